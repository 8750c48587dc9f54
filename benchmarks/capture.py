"""What a capture costs, against the floor: the same eager step under an empty `TorchDispatchMode`.

    python -m benchmarks.capture [--layers 4 16 64] [--repeat 5] [--json]

For each depth of a small transformer (width 128, AdamW fused): an eager step, the floor, a step's first call
(real, recorded, not kept), our capture (its second: the real step, recorded, discharged, as a program), a
replay, `make_fx`, `aot_function` and `torch.compile(backend="aot_eager")` of forward and backward. Medians of
interleaved runs, each started from a clean garbage collector; ratios to the floor, and microseconds per node of
the graph that came out.

Then the first steps of a run of `fz.capture(step, passes="default")`, from the model's first step on, as a ratio to as
many eager steps, in CPU time of one thread: ten steps, and the largest ratio from there on with its step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functionalize as fz
from benchmarks.machine import machine

WIDTH, HEADS, VOCABULARY, BATCH, SEQUENCE = 128, 4, 256, 2, 16


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding, `layers` blocks, a head."""

    def __init__(self, layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Empty(TorchDispatchMode):
    """The floor: a dispatch mode that only runs every op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subject:
    """One model and the ways to run or capture a step of it; each returns a number of nodes (0: none)."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        self.model = Transformer(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
        self.step(self.tokens)
        self.captured = fz.capture(self.step, audit=False)
        self.captured(self.tokens), self.captured(self.tokens)
        self.fresh = fz.capture(self.step)

    def step(self, tokens: Tensor) -> Tensor:
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def eager(self) -> int:
        self.step(self.tokens)
        return 0

    def floor(self) -> int:
        with Empty():
            self.step(self.tokens)
        return 0

    def warm_up(self) -> int:
        self.fresh = fz.capture(self.step)
        self.fresh(self.tokens)
        return 0

    def capture(self) -> int:
        self.fresh(self.tokens)
        assert self.fresh.stats.captures == 1
        return int(self.fresh.stats.nodes)

    def replay(self) -> int:
        before = self.captured.stats.replays
        self.captured(self.tokens)
        assert self.captured.stats.replays == before + 1
        return 0

    def _loss_and_gradients(self) -> tuple[Callable[..., Any], list[Tensor]]:
        names, values = zip(*self.model.named_parameters(), strict=True)

        def fn(*args: Tensor) -> tuple[Tensor, ...]:
            params = dict(zip(names, args[:-1], strict=True))
            loss = torch.func.functional_call(self.model, params, (args[-1],))
            return (loss, *torch.autograd.grad(loss, args[:-1]))

        return fn, [*(v.detach().requires_grad_() for v in values), self.tokens]

    def make_fx(self) -> int:
        from torch.fx.experimental.proxy_tensor import make_fx

        fn, args = self._loss_and_gradients()
        return _ops(make_fx(fn, tracing_mode="fake")(*args))

    def aot_function(self) -> int:
        from functorch.compile import aot_function, make_boxed_func

        nodes = 0

        def compiler(gm: Any, inputs: Any) -> Any:
            nonlocal nodes
            nodes += _ops(gm)
            return make_boxed_func(gm.forward)

        names, values = zip(*self.model.named_parameters(), strict=True)

        def fn(*args: Tensor) -> Tensor:
            params = dict(zip(names, args[:-1], strict=True))
            return torch.func.functional_call(self.model, params, (args[-1],))

        args = [*(v.detach().requires_grad_() for v in values), self.tokens]
        aot_function(fn, compiler, compiler)(*args).backward()
        return nodes

    def compile_aot_eager(self) -> int:
        torch._dynamo.reset()
        torch.compile(self.model, backend="aot_eager")(self.tokens).backward()
        self.optimizer.zero_grad()
        return 0


class Run:
    """The first steps of a new model's training. passes: the pipeline with which the step is captured; None: eager."""

    def __init__(self, layers: int, passes: str | None) -> None:
        torch.manual_seed(0)
        model = Transformer(layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))

        def step() -> None:
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        self.step = step if passes is None else fz.capture(step, passes=passes)
        self.seconds: list[float] = []

    def go_on(self) -> None:
        """One step."""
        start = time.thread_time()
        self.step()
        self.seconds.append(time.thread_time() - start)


def first_steps(layers: int, steps: int = 100) -> dict[str, Any]:
    """The first ten steps as a ratio to eager; the largest ratio from the tenth on, and at which step."""
    eager, captured = Run(layers, None), Run(layers, "default")
    gc.collect()
    for _ in range(steps):
        eager.go_on()
        captured.go_on()
    sums = zip(accumulate(captured.seconds), accumulate(eager.seconds), strict=True)
    ratios = [ours / theirs for ours, theirs in sums]
    largest = max(ratios[9:])
    return {"ten": ratios[9], "largest": largest, "at": ratios.index(largest) + 1}


def _ops(gm: Any) -> int:
    return sum(n.op == "call_function" for n in gm.graph.nodes)


CHEAP = ("eager", "floor", "warm_up", "capture", "replay")
DEAR = ("make_fx", "aot_function", "compile_aot_eager")


def measure(layers: int, repeat: int) -> dict[str, tuple[float, int]]:
    """Median seconds and node count per way; the slow ones run once after one cheap warm-up of torch."""
    subject = Subject(layers)
    for name in CHEAP:
        getattr(subject, name)()
    times: dict[str, list[float]] = {name: [] for name in (*CHEAP, *DEAR)}
    nodes: dict[str, int] = {}
    for i in range(repeat):
        for name in (*CHEAP, *DEAR) if i == repeat - 1 else CHEAP:
            gc.collect()
            start = time.perf_counter()
            nodes[name] = getattr(subject, name)()
            times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(t), nodes[name]) for name, t in times.items()}


def table(results: dict[int, dict[str, tuple[float, int]]]) -> str:
    """One row per depth and way."""
    rows = [f"{'layers':>6}  {'way':<18} {'ms':>9} {'x floor':>8} {'nodes':>7} {'us/node':>8}"]
    for layers, result in results.items():
        floor = result["floor"][0]
        for name, (seconds, nodes) in result.items():
            per = f"{seconds / nodes * 1e6:8.1f}" if nodes else f"{'':>8}"
            count = str(nodes) if nodes else ""
            rows.append(
                f"{layers:>6}  {name:<18} {seconds * 1e3:9.1f} {seconds / floor:8.2f} {count:>7} {per}"
            )
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measure(1, 1)  # imports and first-use costs of every way
    results = {n: measure(n, options.repeat) for n in options.layers}
    first = {n: first_steps(n) for n in options.layers}
    if options.json:
        print(json.dumps({"machine": machine(), "results": results, "first": first}))
        return
    print(machine())
    print(table(results))
    print("\nthe first steps of a run with `default`, x eager")
    for layers, row in first.items():
        print(
            f"{layers:>6}  ten steps {row['ten']:.2f}, at most {row['largest']:.2f} (step {row['at']})"
        )


if __name__ == "__main__":
    main()
