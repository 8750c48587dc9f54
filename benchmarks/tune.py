"""The search of `fz.tune` for Llama 3 8B, and its choice of what to save beside that of torch's `sac_ilp`.

    python -m benchmarks.tune [--size 8B] [--world 64] [--tokens 4000000] [--layers 4] [--json]
    python -m benchmarks.tune --layers 0            the search alone

First: the seconds of a search, how many configurations it compared, how far composed figures were from plans.
Then, for a layer and several budgets of bytes: torch's `SACEstimator` lists the layer's ops, its solver (`sac_ilp`, by
pulp's CBC) chooses what to save; `fz.tune`'s choice (HiGHS) may keep as many bytes as torch's keeps. Both are applied
to a short model and planned. The times of ops are the same for both, those of our model of an H100: torch's estimator
has none without a GPU. The comparison needs pulp, which torch imports: `pip install pulp`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import functionalize as fz
from benchmarks.machine import machine
from examples import llama
from functionalize.cost.costs import seconds
from functionalize.cost.machines.presets import MACHINES
from functionalize.planner.sweep.plan import plan
from functionalize.planner.timeline.timeline import EAGER
from functionalize.planner.tuning.choices import frontier
from functionalize.planner.tuning.pieces import recording
from functionalize.planner.tuning.policy import LayerPolicy
from functionalize.planner.tuning.variants import Variant, VariantBuilder, layers_of

SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)  # of the bytes of all ops' results, the budget of torch's solver
NAME = "blocks.1"
H100 = MACHINES["h100"]
Row = dict[str, Any]


def searched(size: str, world: int, tokens: int) -> Row:
    """A search, and what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = fz.tune(
        llama.build,
        llama.step,
        inputs=llama.inputs,
        world=world,
        limit="h100",
        batch_tokens=tokens,
        size=size,
        pipelines=[],
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    facts, best = found.facts, found.best
    return {
        "size": size,
        "world": world,
        "tokens": found.tokens,
        "configurations": facts.candidates,
        "settings": facts.settings,
        "short plans": facts.short,
        "whole plans": facts.whole,
        "seconds": wall,
        "CPU seconds": cpu,
        "peak, plan by composed": best.peak / best.composed.peak,
        "time, plan by composed": best.seconds / best.composed.seconds,
        "gap": best.assigned.gap,
        "best": found.row(best),
    }


def timed(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """What `RuntimeEstimator` returns for an op: its result and milliseconds, here of our model of an H100."""
    out = func(*args, **(kwargs or {}))
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}

    def node_of(tensor: Tensor) -> fx.Node:
        if id(tensor) not in nodes:
            nodes[id(tensor)] = graph.placeholder(f"x{len(nodes)}")
            nodes[id(tensor)].meta["val"] = tensor
        return nodes[id(tensor)]

    node = graph.call_function(func, *pytree.tree_map_only(Tensor, node_of, (args, kwargs or {})))
    node.meta["val"] = out
    return out, seconds(node, H100) * 1e3


def of_torch(size: str) -> list[tuple[float, LayerPolicy]]:
    """What torch's solver chooses: (seconds of solving, policy) per share.

    For a layer without `fully_shard`, under which the estimator fails: writes of FSDP2's hooks have no parent in it.
    """
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP, SACEstimator
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module

    estimator = SACEstimator()
    shape = llama.SHAPES[size]
    with fz.world(1):
        block = llama.Block(shape).bfloat16()
        (tokens,) = llama.inputs()
        x = torch.randn(*tokens.shape, shape.width, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = torch.randn(2, tokens.size(1), shape.width // shape.heads).bfloat16().unbind()
        estimator._estimate_runtime = timed  # type: ignore[assignment]
        with estimator:
            block(x, cos, sin)
        name = type(block).__name__
        stats = estimator.sac_mod_stats[name]
        data = estimator._sac_mod_metadata[name].sac_metadata
        funcs = [each.func for each in data if each.func not in OPS_TO_ALWAYS_SKIP]
    found = []
    for share in SHARES:
        start = time.perf_counter()
        decisions = get_optimal_checkpointing_policy_per_module(stats, share)
        spent = time.perf_counter() - start
        calls: Counter[Any] = Counter()
        saved: dict[str, list[int]] = {}
        for func, keep in zip(funcs, decisions, strict=True):
            if keep:
                saved.setdefault(str(func), []).append(calls[func])
            calls[func] += 1
        found.append((spent, LayerPolicy(tuple((k, tuple(v)) for k, v in saved.items()), True)))
    return found


def compared(size: str, layers: int, world: int) -> list[Row]:
    """Both choices for every budget, planned on a model of so many layers."""

    def build(layers: int = layers) -> Any:
        return llama.build(size, layers)

    theirs = of_torch(size)
    with fz.world(world):
        built = build()
        with recording({NAME: layers_of(built)[NAME]}, H100) as pieces:
            llama.step(*built, *llama.inputs())
        del built
    piece = pieces[NAME]
    start = time.perf_counter()
    choices = frontier(piece)
    ours = time.perf_counter() - start
    nbytes = {(op.name, op.call): op.nbytes for op in piece.ops}
    policies = []
    for spent, policy in theirs:
        kept = sum(nbytes.get((op, call), 0) for op, calls in policy.saved or () for call in calls)
        best = next(c for c in choices if c.saved is not None and c.nbytes <= kept)
        policies += [
            (policy, kept, spent),
            (LayerPolicy(best.saved, True), best.nbytes, ours / len(choices)),
        ]
    variants = [Variant(policy=policy) for policy, _, _ in policies]
    builder = VariantBuilder(build)
    planned = plan(builder, llama.step, {"variant": variants}, inputs=llama.inputs, world=world)
    rows = []
    for i, share in enumerate(SHARES):
        row: Row = {"share": share}
        for who, at in (("torch", 2 * i), ("ours", 2 * i + 1)):
            figures = planned.plans[at].figures
            assert figures is not None
            again = sum(p.compute for p in figures.time.phases if p.phase == "recompute")
            row |= {
                f"{who} kept": policies[at][1],
                f"{who} peak": figures.memory.levels(EAGER).requested,
                f"{who} recomputed": again / layers,
                f"{who} step": figures.time.seconds,
                f"{who} solved in": policies[at][2],
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="8B")
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--layers", type=int, default=4, help="of the comparison; 0: none")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.layers and importlib.util.find_spec("pulp") is None:
        parser.error(
            "torch's sac_ilp needs pulp, which is not installed: pip install pulp, or --layers 0 for the search alone"
        )
    search = searched(given.size, given.world, given.tokens)
    rows = compared(given.size, given.layers, given.world) if given.layers else []
    if given.json:
        print(json.dumps({"machine": machine(), "search": search, "choices": rows}, indent=2))
        return
    print(machine())
    for key, value in search.items():
        print(f"{key:>24}  {value if not isinstance(value, float) else f'{value:,.4g}'}")
    if not rows:
        return
    gib, ms = 2**30, 1e3
    print("\na layer: bytes kept, recomputed ms; the model: peak GiB, step ms; solved in ms")
    for row in rows:
        for who in ("torch", "ours"):
            print(
                f"{row['share']:.0%} {who:>6}  {row[f'{who} kept'] / 2**20:8.0f} MiB "
                f"{row[f'{who} recomputed'] * ms:8.3f} {row[f'{who} peak'] / gib:8.2f} "
                f"{row[f'{who} step'] * ms:8.2f} {row[f'{who} solved in'] * ms:8.1f}"
            )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
