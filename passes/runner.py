"""`passes.run`: apply passes to a copy of a program, and verify the result. `on_graph_module`: to a graph module.

    program = run(program, [ElideCopies(), Verify()])
    program = run(program, "default")
    program.history            ("elide_copies: 12", "verify: 0")
    gm = on_graph_module("elide_copies{parts=true}")(gm, example_inputs)

Invariant: the argument is untouched; the result holds every invariant of `verify`, draws from generators and reads
their states in the same order, and issues the same collectives unless a pass says that it changes them.
Refusals: a pass at a stage that it does not accept; a graph without fake values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from functionalize.errors import InvariantError, PassError, VerifyError
from functionalize.ir.generators import GET_STATE, is_random
from functionalize.ir.point_to_point import is_message
from functionalize.passes.base import FUNCTIONAL, Pass
from functionalize.passes.graph_modules import program_of
from functionalize.passes.pipeline import parse, pipeline_text
from functionalize.passes.verify import verify
from functionalize.program.collective_order import Texts, sequences
from functionalize.program.program import Program
from functionalize.util.gc_pause import no_collections


def run(program: Program, passes: Iterable[Pass] | str) -> Program:
    """A copy of `program` with every pass applied in order; `program` itself is untouched.

    passes: the passes, or a pipeline as text (`passes.pipeline.parse`).
    The program is verified before the first pass and after the last one; if it is broken then, the passes run once
    more, each verified. Raises `PassError` for a pass at a stage it does not accept, `VerifyError` if `program` is
    broken, `InvariantError` with the name of the pass that broke it.

        >>> program = fz.functions.trace(lambda x: x.clone().sin(), torch.ones(2))
        >>> fz.passes.run(program, "elide_copies,verify").history
        ('elide_copies: 1', 'verify: 0')
    """
    passes = parse(passes) if isinstance(passes, str) else tuple(passes)
    _check_stages(program.stage, passes)
    program.describe()  # once for the program and all its copies
    try:
        with no_collections():  # what passes look up of a graph lives as long as they run
            return _run(program, passes)
    finally:
        program.geometries.clear()  # those of values that no node has any more, too


@dataclass(frozen=True)
class GraphModulePass:
    """Passes as one function of a graph module, for the lists of passes of other compilers. It can be pickled."""

    passes: tuple[Pass, ...]

    @property
    def __name__(self) -> str:
        return pipeline_text(self.passes)

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
    ) -> fx.GraphModule:
        """`gm` itself, rewritten. example_inputs: needed only where nodes have no fake values (`meta["val"]`)."""
        program = program_of(gm, example_inputs)
        if sum([each.apply(program) for each in self.passes]):
            gm.graph.lint()
            gm.recompile()
        return gm


def on_graph_module(passes: Pass | Iterable[Pass] | str) -> GraphModulePass:
    """Passes as a function `(gm, example_inputs=None) -> gm` that rewrites `gm` itself and returns it.

    passes: one, several, or a pipeline as text.
    Every output counts as returned to the caller, and every input may be an alias of every other one. What it makes is
    not verified: `verify(gm)` does. Raises `PassError` as `run` does, and for a graph without fake values where no
    example inputs are passed.

        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: x.clone().sin())(torch.ones(2))
        >>> gm = fz.passes.on_graph_module("elide_copies")(gm)
        >>> [node.name for node in gm.graph.nodes]
        ['x_1', 'sin', 'output']
    """
    if isinstance(passes, str):
        passes = parse(passes)
    found = (passes,) if isinstance(passes, Pass) else tuple(passes)
    _check_stages(FUNCTIONAL, found)
    return GraphModulePass(found)


def _run(program: Program, passes: Sequence[Pass]) -> Program:
    verify(program)
    try:
        new = _applied(program, passes, checks=False)
        _verify(new)
    except PassError:
        raise
    except Exception as error:
        _applied(program, passes, checks=True)  # names the pass
        raise InvariantError(f"the passes left a broken program: {error}") from error
    return new


def _applied(program: Program, passes: Sequence[Pass], checks: bool) -> Program:
    """A copy with every pass applied. checks: whether to verify after each.

    Without, collectives and random ops are compared only before a pass that may change collectives, and at the end:
    whoever finds a difference runs the passes once more, with checks, to name the pass.
    """
    new = program.copy()
    order = _Order(new.graph)
    for i, each in enumerate(passes):
        if each.changes_collectives and any(is_message(n.target) for n in new.graph.nodes):
            # Ranks that exchange messages have other programs: none knows what the other ones wait for.
            new.history = (
                *new.history,
                f"{each}: left out, as messages between two ranks are sent",
            )
            continue
        count = each.apply(new)
        if count:
            new.stage = each.produces or new.stage
        if checks:
            try:
                _verify(new)
            except (RuntimeError, VerifyError) as error:
                raise InvariantError(f"`{each}` left a broken program: {error}") from error
        following = passes[i + 1] if i + 1 < len(passes) else None
        may_change, may_next = (p is not None and p.changes_collectives for p in (each, following))
        if checks or following is None or may_change != may_next:
            order.compare(new.graph, each, may_change)
        new.history = (*new.history, f"{each}: {count}")
    return new


class _Order:
    """The collectives of a graph that ranks rely on, and its random ops."""

    def __init__(self, graph: fx.Graph) -> None:
        self._issued, self._draws = sequences(graph), _draws(graph)

    def compare(self, graph: fx.Graph, by: Pass, changes_collectives: bool) -> None:
        """Compare with the graph as it is after a pass; raises `InvariantError` if the pass may not do what it did."""
        before, self._issued = self._issued, sequences(graph)
        if self._issued != before and not changes_collectives:
            raise InvariantError(f"`{by}` {_what_changed(before, self._issued)}")
        drew, self._draws = self._draws, _draws(graph)
        if not _are_in_order(drew, self._draws):
            raise InvariantError(
                f"`{by}` moved, added or removed random ops, or reads the state of a generator elsewhere"
            )


def _draws(graph: fx.Graph) -> list[tuple[Any, int]]:
    """The ops that draw from a generator or set it, in order; how many read a state since the one before it."""
    found: list[tuple[Any, int]] = []
    reads = 0
    for node in graph.nodes:
        if node.target is GET_STATE:
            reads += 1
        elif is_random(node):
            found.append((node.target, reads))
            reads = 0
    return [*found, (None, reads)]


def _are_in_order(before: list[tuple[Any, int]], now: list[tuple[Any, int]]) -> bool:
    """Whether a graph has the same draws; reads of a state may go, and none may come."""
    return len(before) == len(now) and all(
        was is is_now and count >= left
        for (was, count), (is_now, left) in zip(before, now, strict=True)
    )


def _verify(program: Program) -> None:
    program.graph.lint()
    verify(program)


def _what_changed(before: Mapping[str, Texts], now: Mapping[str, Texts]) -> str:
    """Where a pass changed the collectives that ranks rely on."""
    group = next(g for g in {**before, **now} if before.get(g) != now.get(g))
    was, texts = before.get(group, ()), now.get(group, ())
    at = next((i for i, (a, b) in enumerate(zip(was, texts, strict=False)) if a != b), None)
    at = min(len(was), len(texts)) if at is None else at
    a, b = (each[at] if at < len(each) else "nothing" for each in (was, texts))
    return (
        f"changed the collectives of process group {group!r} and does not say that it may "
        f"(`changes_collectives`): number {at + 1} was {a} and is {b}"
    )


def _check_stages(stage: str, passes: Sequence[Pass]) -> None:
    for i, each in enumerate(passes):
        if stage not in each.accepts:
            since = f", which `{passes[i - 1]}` leaves it at" if i else ""
            raise PassError(
                f"`{each}` accepts a program at stage {' or '.join(each.accepts)}, "
                f"this one is at {stage}{since}"
            )
        stage = each.produces or stage
