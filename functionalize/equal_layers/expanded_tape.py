"""The notes about autograd and modules of a short recording, with those of the layers put back that it leaves out.

    tape = ExpandedTape(run)      numbers, marks, calls and graphs are worked out; may raise `Unlike`
    tape.write()                  after `run.write()`

Numbers of autograd nodes: those of a gap get numbers of their own, between what was made before it and after it.

        short:   1  2          3  4          numbers 3 and 4 become 9 and 10
        whole:   1  2 [3 .. 8] 9 10

Graphs of backwards: nodes in gaps are added, with their edges; a node that leads to one in a gap has the edge that it
has in the whole recording. Then each graph is walked as `tape/backwards.py` walks it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from functionalize._compat.references import address
from functionalize.equal_layers.expanded_run import ExpandedRun
from functionalize.equal_layers.recorded_run import RunRecord, Unlike
from functionalize.ir.ops import Made, OpRecord
from functionalize.tape.backwards import BackwardCall
from functionalize.tape.notes import EnteredRange, FunctionCall, ModuleMark

T = TypeVar("T")
Entries = Sequence[tuple[int, T]]  # what holds from a place on
_Node = tuple[bool, int]  # whether it is that of a leaf; the leaf's address, or the new number
# Of an op: the node in which it ran, and those that it made.
_Numbering = tuple[int | None, Made | None]


class _Numbers(NamedTuple):
    """Numbers of a gap: from `start` to before `end` in the whole recording, which become those from `new` on.

    before: the first number of the short recording after the gap.
    """

    start: int
    end: int
    before: int
    new: int


class ExpandedTape:
    """The notes of one recording that is expanded."""

    def __init__(self, run: ExpandedRun) -> None:
        self._run, self._whole, self._other = run, run.whole, run.other
        self._count = len(run.places) + sum(run.left_out.is_left_out)  # of ops
        self._check()
        self._gaps = list(self._numbered_gaps())
        self._starts = [gap.start for gap in self._gaps]
        self._befores = [gap.before for gap in self._gaps]
        self._known = dict(self._pairs())  # numbers of the whole recording -> of the short one
        self._leaves: list[int] = []
        self._leaf_numbers: dict[int, int] = {}  # by address
        self._marks = self._marked()
        self._functions = self._called()
        self._backwards = [
            self._backward(whole, other)
            for whole, other in zip(
                self._whole.tape.backwards, self._other.tape.backwards, strict=True
            )
        ]
        for tape in (self._whole.tape, self._other.tape):
            for leaf in tape.leaves:
                self._leaf(leaf)
        self._numbers = self._of_records()

    def _check(self) -> None:
        whole, other = self._whole.tape, self._other.tape
        if any(record.thread for run in (self._whole, self._other) for record in run.records):
            raise Unlike("several threads run ops")
        if len(whole.backwards) != len(other.backwards):
            raise Unlike("other arguments let the step go backward more often")
        if len(whole.ranges) != len(other.ranges):
            raise Unlike(
                "layers, or other arguments, let the step enter other ranges for the profiler"
            )

    # -- numbers -------------------------------------------------------------------------------

    def _numbered_gaps(self) -> Iterable[_Numbers]:
        whole, other, added = _Made(self._whole), _Made(self._other), 0
        for gap, place in self._run.gaps:
            start, end = whole.next(gap.start), whole.next(gap.end)
            if start == end:
                continue
            before = other.next(place)
            yield _Numbers(start, end, before, before + added)
            added += end - start

    def _gap_of(self, number: int) -> _Numbers | None:
        """The gap of a number of the whole recording; None also for the node of a leaf."""
        at = bisect_right(self._starts, number) - 1
        return self._gaps[at] if at >= 0 and number < self._gaps[at].end else None

    def _of_whole(self, number: int) -> int:
        """The new number of a node of the whole recording."""
        if number < 0:
            return self._leaf(self._whole.tape.leaves[-1 - number])
        gap = self._gap_of(number)
        if gap is not None:
            return gap.new + number - gap.start
        if number not in self._known:
            raise Unlike(
                "a layer that is left out leads to an autograd node that is not in both runs"
            )
        return self._of_other(self._known[number])

    def _of_other(self, number: int) -> int:
        """The new number of a node of the short recording."""
        if number < 0:
            return self._leaf(self._other.tape.leaves[-1 - number])
        at = bisect_right(self._befores, number) - 1
        if at < 0:
            return number
        gap = self._gaps[at]
        return number - gap.before + gap.new + gap.end - gap.start

    def _leaf(self, leaf: int) -> int:
        """The number of the node of a leaf, by its address, in the order of their first use."""
        found = self._leaf_numbers.get(leaf)
        if found is None:
            self._leaves.append(leaf)
            found = self._leaf_numbers[leaf] = -len(self._leaves)
        return found

    def _pairs(self) -> Iterable[tuple[int, int]]:
        """Nodes of ops and functions that both recordings have: their numbers in the whole one and in this one."""
        for at, place in self._run.same.ops.items():
            makes, others = self._whole.records[at].makes, self._other.records[place].makes
            if makes is not None and others is not None:
                ranges = range(makes[0], makes[1] + 1), range(others[0], others[1] + 1)
                yield from zip(*ranges, strict=True)
        own = [f for f in self._whole.tape.functions if self._gap_of(f.number) is None]
        if len(own) != len(self._other.tape.functions):
            raise Unlike("layers that are left out call other autograd functions")
        for function, other in zip(own, self._other.tape.functions, strict=True):
            yield function.number, other.number

    def _of_records(self) -> list[_Numbering]:
        """The numbers of the node in which each op ran and of those that it made, in the order of the new recording."""
        found: list[_Numbering] = [(None, None)] * self._count
        for place, record in zip(self._run.places, self._other.records, strict=True):
            found[place] = _renumbered(record, self._of_other)
        for at, is_out in enumerate(self._run.left_out.is_left_out):
            if is_out and (new := self._run.ops[at]) is not None:
                found[new] = _renumbered(self._whole.records[at], self._of_whole)
        return found

    # -- modules and functions -----------------------------------------------------------------

    def _place(self, at: int) -> int | None:
        """The place in the new recording before which something is noted, that is before op `at` of the whole one."""
        ops, out = self._run.ops, self._run.left_out.is_left_out
        if at < len(ops) and ops[at] is not None:
            return ops[at]
        before = ops[at - 1] if at > 0 else None
        return before + 1 if before is not None and out[at - 1] else None

    def _place_of_other(self, at: int) -> int:
        """The same of the short recording."""
        places = self._run.places
        return places[at] if at < len(places) else self._count

    def _marked(self) -> list[ModuleMark]:
        """The calls of modules. They stand where they stand in the whole recording."""
        layers = self._run.left_out.layers.left_out
        out = {address(module) for layer in layers for module in layer.modules()}
        others = iter(enumerate(self._other.tape.marks))
        self._mark_numbers: dict[int, int] = {}  # of the short recording -> of the new one
        found: list[ModuleMark] = []
        depth, left = 0, 0  # of calls, and the depth at which a layer was entered that is left out
        for at, module, inside in self._whole.tape.marks:
            is_out = left > 0
            if module is None:
                if depth == left:
                    left = 0
                depth -= 1
            else:
                depth += 1
                if not left and module in out:
                    left, is_out = depth, True
            place = self._place(at)
            if not is_out:
                number, other = next(others, (0, None))
                if other is None or other[1:] != (module, inside):
                    raise Unlike("modules are called otherwise without the layers left out")
                self._mark_numbers[number] = len(found)
                place = self._place_of_other(other[0]) if place is None else place
            if place is None:
                raise Unlike(
                    "a layer that is left out is called among ops that are not in both runs"
                )
            found.append((place, module, inside))
        if next(others, None) is not None:
            raise Unlike("modules are called otherwise without the layers left out")
        return found

    def _mark_number(self, marks: int) -> int:
        """How many marks there are in the new recording, before the next of the short one after `marks` of them."""
        return self._mark_numbers[marks - 1] + 1 if marks else 0

    def _called(self) -> list[FunctionCall]:
        found = [
            each._replace(
                number=self._of_other(each.number),
                at=self._place_of_other(each.at),
                marks=self._mark_number(each.marks),
            )
            for each in self._other.tape.functions
        ]
        for each in self._whole.tape.functions:
            if self._gap_of(each.number) is not None:
                place = self._place(each.at)
                assert place is not None
                found.append(each._replace(number=self._of_whole(each.number), at=place))
        return sorted(found, key=lambda each: each.number)

    def _labelled(self) -> list[tuple[int, str]]:
        """From a place on, the label of FSDP2's."""
        return [*_steps(self._at_each(self._whole.tape.labels, self._other.tape.labels, ""))]

    def _ranged(self) -> list[tuple[int, tuple[EnteredRange, ...]]]:
        """From a place on, the ranges for the profiler."""
        others = [
            (at, tuple(each._replace(marks=self._mark_number(each.marks)) for each in entered))
            for at, entered in self._other.tape.ranges
        ]
        return [*_steps(self._at_each(self._whole.tape.ranges, others, ()))]

    def _at_each(self, whole: Entries[T], other: Entries[T], nothing: T) -> list[T]:
        """At each op of the new recording, what holds there: as in the whole recording, if it has the op."""
        found = [nothing] * self._count
        of_other = _spread(other, len(self._run.places), nothing)
        for at, place in enumerate(self._run.places):
            found[place] = of_other[at]
        of_whole = _spread(whole, len(self._run.ops), nothing)
        for at, new in enumerate(self._run.ops):
            if new is not None:
                found[new] = of_whole[at]
        return found

    # -- graphs --------------------------------------------------------------------------------

    def _backward(self, whole: BackwardCall, other: BackwardCall) -> BackwardCall:
        if any(other.numbers[root] < 0 for root in other.roots):
            raise Unlike("it goes backward from a leaf")
        names, edges, leaf_of = self._graph(whole, other)
        key_of = [self._key(self._other, number) for number in other.numbers]
        roots = [key_of[root] for root in other.roots]
        found = list(dict.fromkeys(roots))
        places = {key: place for place, key in enumerate(found)}
        readers: list[int] = []
        stops: list[int] = []
        for key in found:  # which grows
            for each in edges[key]:
                if each not in places:
                    places[each] = len(found)
                    found.append(each)
                readers.append(places[each])
            stops.append(len(readers))
        numbers = [self._leaf(leaf_of[key]) if key in leaf_of else key[1] for key in found]
        ends = None if other.ends is None else [places[key_of[each]] for each in other.ends]
        return BackwardCall(
            [names[key] for key in found],
            numbers,
            readers,
            stops,
            [places[key] for key in roots],
            ends,
            other.thread,
            other.traceback,
        )

    def _key(self, run: RunRecord, number: int) -> _Node:
        """A node, by the address of its leaf or its new number."""
        if number < 0:
            return True, run.tape.leaves[-1 - number]
        return False, self._of_other(number) if run is self._other else self._of_whole(number)

    def _graph(
        self, whole: BackwardCall, other: BackwardCall
    ) -> tuple[dict[_Node, str], dict[_Node, list[_Node]], dict[_Node, int]]:
        """Names and edges of all nodes, and the leaf of those that accumulate a gradient."""
        names: dict[_Node, str] = {}
        edges: dict[_Node, list[_Node]] = {}
        own = [self._key(self._other, number) for number in other.numbers]
        if len(set(own)) != len(own):
            raise Unlike("autograd nodes have equal numbers")
        for key, name, to in zip(own, other.names, other.edges, strict=True):
            names[key], edges[key] = name, [own[each] for each in to]
        for number, name, to in zip(whole.numbers, whole.names, whole.edges, strict=True):
            targets = [whole.numbers[each] for each in to]
            crosses = any(self._gap_of(each) is not None for each in targets)
            if self._gap_of(number) is not None:
                key = self._key(self._whole, number)
                names[key] = name
                edges[key] = [self._key(self._whole, each) for each in targets]
            elif number < 0:
                key = self._key(self._whole, number)
                names.setdefault(key, name)
                edges.setdefault(key, [])
            elif crosses:
                key = self._key(self._whole, number)
                if key not in edges or len(edges[key]) != len(targets):
                    raise Unlike(
                        "a node leads to a layer that is left out, and is not in both runs"
                    )
                edges[key] = [
                    self._key(self._whole, each) if self._gap_of(each) is not None else old
                    for each, old in zip(targets, edges[key], strict=True)
                ]
        return names, edges, {key: key[1] for key in names if key[0]}

    def write(self) -> None:
        """Make the notes of the short recording the new ones."""
        labels, ranges = self._labelled(), self._ranged()
        for record, (seq_nr, makes) in zip(self._other.records, self._numbers, strict=True):
            record.seq_nr, record.makes = seq_nr, makes
        tape = self._other.tape
        tape.marks, tape.functions, tape.backwards = self._marks, self._functions, self._backwards
        tape.labels, tape.ranges, tape.leaves = labels, ranges, self._leaves
        tape.packs |= self._whole.tape.packs


def _renumbered(record: OpRecord, new: Callable[[int], int]) -> _Numbering:
    seq, makes = record.seq_nr, record.makes
    made = makes and (new(makes[0]), new(makes[1]), makes[2])
    return seq if seq is None else new(seq), made


class _Made:
    """The numbers of autograd nodes that ops and functions of a recording have made."""

    def __init__(self, run: RunRecord) -> None:
        made = [(at, r.makes[0], r.makes[1]) for at, r in enumerate(run.records) if r.makes]
        made += [(each.at, each.number, each.number) for each in run.tape.functions]
        made.sort(key=lambda each: each[1])
        self._at = [at for at, _, _ in made]
        self._numbers = [first for _, first, _ in made]
        self._end = made[-1][2] + 1 if made else 0

    def next(self, at: int) -> int:
        """The first number that an op from place `at` on has made."""
        found = bisect_right(self._at, at - 1)
        return self._numbers[found] if found < len(self._numbers) else self._end


def _spread(entries: Entries[T], count: int, nothing: T) -> list[T]:
    """At each op, what holds from the last entry on."""
    found = []
    at, now = 0, nothing
    for place in range(count):
        while at < len(entries) and entries[at][0] <= place:
            now, at = entries[at][1], at + 1
        found.append(now)
    return found


def _steps(values: Iterable[T]) -> Iterator[tuple[int, T]]:
    """Where a value differs from the one before, with the value."""
    before: T | None = None
    for at, value in enumerate(values):
        if at == 0 or value != before:
            yield at, value
            before = value
