"""`demo`: a small transformer under FSDP2 on 64 ranks that do not exist; and what a script has to look like.

functionalize demo
functionalize memory functionalize.cli.demo --world 64          the same functions, given to another command
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize.cli.console import Out, cut, plain, table, wrapped
from functionalize.cli.graphs import graph_text, headline
from functionalize.cli.memory import brief
from functionalize.cli.recorded import Job, Recorded, recorded
from functionalize.planning.communication import communication
from functionalize.planning.display import Peak, human_bytes, human_seconds
from functionalize.planning.summary import Sweep
from functionalize.planning.sums import summed

WORLD = 64
_LINES = 7  # of the graph that are shown
_NAME = "functionalize.cli.demo"
_BATCHES = (8, 16, 32)


# -- what a user writes ----------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Tokens to the loss of predicting the next one."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(
    layers: int = 4, width: int = 1024, vocabulary: int = 32_000
) -> tuple[Model, torch.optim.Optimizer]:
    """The model, sharded layer by layer, and its optimizer."""
    model = Model(layers, width, vocabulary).bfloat16()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def inputs(batch: int = 8, length: int = 1024, vocabulary: int = 32_000) -> tuple[Tensor]:
    """The tokens of one rank."""
    return (torch.randint(0, vocabulary, (batch, length)),)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """One training step."""
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# -- what the command makes of it ------------------------------------------------------------------


def demo(out: Out) -> None:
    """Record the step, look at it, run passes on it, plan it with other batches."""
    with out.working() as say, recorded(Job(_NAME, world=WORLD), say) as found:
        after = found.after("default", say)
        say("measuring")
        peaks = [
            found.eager.peak if found.eager is not None else 0,
            *(each.timeline().peak for each in (found, after)),
        ]
        sent = summed(communication(found.program), "kind")
    with out.counting() as told:
        sweep = fz.plan(
            build,
            step,
            {"batch": _BATCHES, "checkpoint": [False, True]},
            inputs=inputs,
            world=WORLD,
            progress=lambda done, of, point: told(done, of, f"batch {point['batch']}"),
        )

    def show(console: Console) -> None:
        _show_recorded(console, found)
        _show_memory(console, found, peaks)
        plain(console, "\nSent by each rank of a ring, in a step:")
        for row in sent:
            plain(console, f"  {human_bytes(row.sent):>9}  {row.count} x {row.kind}")
        _show_plan(console, sweep)

    data = {
        "world": found.world,
        "stats": dict(found.stats),
        "peak": dict(zip(("eager", "program", "after the passes"), peaks, strict=True)),
        "sent": {row.kind: {"count": row.count, "bytes": row.sent} for row in sent},
        "points": sweep.rows(),
    }
    out.emit(lambda: data, show)


def _show_recorded(console: Console, found: Recorded) -> None:
    stats = found.stats
    plain(console, headline(found), "bold")
    wrapped(
        console,
        "A transformer of 4 layers, each wrapped by fully_shard, with AdamW. Its step ran on fake tensors in "
        f"{human_seconds(stats['seconds'])} and was recorded: {stats['ops']:,} ops and {stats['resizes']} resizes "
        f"became one graph of {stats['nodes']:,} nodes without resizes. It begins:\n",
    )
    lines = graph_text(found.program).splitlines()
    at = next(i for i, line in enumerate(lines) if "all_gather_into_tensor" in line)
    for line in lines[at : at + _LINES]:
        cut(console, line)


def _show_memory(console: Console, found: Recorded, peaks: list[int]) -> None:
    eager, program, after = map(human_bytes, peaks)
    words = brief(Peak.of(found.eager).words()) if found.eager is not None else eager
    wrapped(console, f"\nPeak of eager: {words}")
    wrapped(console, f'Peak of the program: {program}; after passes="default": {after}.')


def _show_plan(console: Console, sweep: Sweep) -> None:
    plain(console, "\nWhat if the batch were another, or activations were checkpointed?\n")
    rows = [
        (
            str(row["batch"]),
            "yes" if row["checkpoint"] else "no",
            human_bytes(row["peak"]),
            human_bytes(row["device"]),
            human_seconds(row["step"]),
        )
        for row in sweep.rows()
    ]
    table(console, ("batch", "checkpoint", "peak", "device", "step (modelled)"), rows, ())
    plain(
        console,
        f"\nNext: functionalize memory {_NAME} --world {WORLD}\n"
        f"      functionalize plan {_NAME} --world {WORLD} --largest batch --limit 80GB\n"
        "      and the same with a script of yours that has build, inputs and step.",
    )
