"""The first lines of a page: does it fit, how fast is it, what holds the memory, what would help.

    [ Does it fit?        ]  [ How fast?           ]  [ What holds the memory? ]  [ What would help?      ]
    [ yes: 66.5 of 80 GiB ]  [ 822 ms a step       ]  [ saved activations: 80% ]  [ checkpointing, ...    ]

Invariant: a card computes no figure, it words those of the report and of the modelled time.
"""

from __future__ import annotations

import html
import re
import types
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from functionalize._compat.autograd import RECOMPUTE
from functionalize.planning.report.display import human_bytes, human_seconds
from functionalize.planning.report.memory_figures import MemoryFigures
from functionalize.planning.time.step_time import StepTime
from functionalize.planning.timeline.timeline import Category

_UNIT, _NARROW = (
    re.compile(r"(?<=\d) (?=(?:[KMGTP]iB|B|s|ms|µs)\b)"),
    "\u00a0",
)  # no line ends between
_BATCH = "a smaller batch"
_EXPANDABLE = "expandable_segments:True"  # as the allocator's error has it, where it is enough
_FEWER = "more ranks to shard over, or offload"
_UNITS = "smaller modules under fully_shard"
_HELP: Mapping[Category, str] = types.MappingProxyType(
    {
        Category.SHARDED_PARAMETERS: _FEWER,
        Category.OPTIMIZER_STATE: _FEWER,
        Category.SHARDED_GRADIENTS: _FEWER,
        Category.PADDING: _FEWER,
        Category.UNSHARDED_PARAMETERS: f"reshard_after_forward=True, {_UNITS}",
        Category.CAST_PARAMETERS: "MixedPrecisionPolicy(param_dtype=torch.bfloat16) in place of autocast",
        Category.ALL_GATHER_BUFFERS: _UNITS,
        Category.UNSHARDED_GRADIENTS: _UNITS,
        Category.REDUCE_SCATTER_BUFFERS: _UNITS,
        Category.SAVED_ACTIVATIONS: f"checkpointing, {_BATCH}",
        Category.RECOMPUTED: "checkpoints of smaller modules",
        Category.TEMPORARIES: f"{_BATCH}, a loss over parts of the batch",
        Category.SCRATCH: f"another kernel, {_BATCH}",
        Category.INPUTS: _BATCH,
    }
)


class Card(NamedTuple):
    """A question and its answer. is_good: whether the answer is yes; None: neither yes nor no."""

    question: str
    answer: str
    note: str = ""
    is_good: bool | None = None

    def html(self) -> str:
        """The card as HTML."""
        kind = {True: " good", False: " bad", None: ""}[self.is_good]
        texts = (self.question, self.answer, self.note)
        rows = (
            f"<{t}>{_UNIT.sub(_NARROW, html.escape(text))}</{t}>"
            for t, text in zip(("h2", "b", "p"), texts, strict=True)
            if text
        )
        return f'<div class="card{kind}">{"".join(rows)}</div>'


def cards_html(cards: Iterable[Card]) -> str:
    """The cards in a row that wraps."""
    return f'<div class="cards">{"".join(card.html() for card in cards)}</div>'


def memory_cards(memory: MemoryFigures, of: str, machine: str, limit: float | None) -> list[Card]:
    """Whether a step fits, what holds its memory, and what would help. of: whose lifetimes. machine: a name."""
    found = sorted(memory.by_category(of).items(), key=lambda item: -item[1])
    all_ = sum(nbytes for _, nbytes in found) or 1
    shares = [f"{c.value} {human_bytes(n)} ({n / all_:.0%})" for c, n in found[:3]]
    cards = [_fit_card(memory, of, machine, limit)]
    if found:
        cards.append(Card("What holds the memory?", shares[0], ", ".join(shares[1:])))
        helps = _HELP.get(found[0][0])
        if helps is not None:
            if any(op.phase == RECOMPUTE for op in memory.timeline(of).ops):
                helps = helps.removeprefix("checkpointing, ")
            refused = memory.fit(limit, of).refused if limit is not None else None
            if _EXPANDABLE in (refused or ""):
                helps = f"{_EXPANDABLE}, {helps}"
            cards.append(Card("What would help?", helps, f"for {found[0][0].value}"))
    return cards


def _fit_card(memory: MemoryFigures, of: str, machine: str, limit: float | None) -> Card:
    by = f"{machine}; reserved by the simulated allocator, and declared constants"
    if limit is None:
        device = human_bytes(memory.levels(of).device)
        return Card("Does it fit?", f"{device} on the device", by)
    fit = memory.fit(limit, of)
    sizes = f"{human_bytes(fit.nbytes)} of {human_bytes(limit)}"
    if fit.refused is None:
        return Card("Does it fit?", f"yes: {sizes}", by, True)
    why = fit.refused.partition(". ")[0]  # the first sentence: the text has what to do
    return Card("Does it fit?", f"no: {sizes}", f"{machine}; {why}", False)


def speed_card(time: StepTime, rate: float | None = None, items: str = "") -> Card:
    """How fast a step is, as modelled. rate: items per second and rank, `items` what they are."""
    throughput = "" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    throughput += f" {items}/s/rank" if throughput else ""
    seconds = f"{human_seconds(time.seconds)} a step"
    mfu = f"MFU {time.mfu:.0%}, " if time.mfu is not None else ""
    waits = f"{mfu}{human_seconds(time.exposed)} exposed communication; modelled on {time.where}"
    return Card("How fast?", f"{throughput}, {seconds}" if throughput else seconds, waits)
