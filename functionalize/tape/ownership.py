"""Which op made each autograd node of a recording, and which nodes an op belongs to; evaluated on demand.

    ownership = ownership_of(notes)
    ownership.of(record)             Position(node=7, made=None): the op ran in node 7 of the recording's numbering
    ownership.maker(record)          the op, or the call of an `autograd.Function`, that made the node in which it ran

Autograd's own numbers continue from step to step, and every thread counts for itself. Here nodes are numbered in the
order in which the op stream mentions them, so that two recordings of one step have equal numbers.
The maker of a node is, in this order: the call of the `Function`; the op before which the counter moved to its number;
for `CopySlices`, which autograd adds after an op in place on a view, that op; for the node of a leaf, the first of all
that made a node which leads to it, in the graphs of the backwards. Where several nodes were made before one
op (autograd remakes the node of a view whose base was written), the op's own is the one of its name.
Invariant: an op that made no node, and ran in none, has no number. A node from before the recording, and one whose
number was set by hand, have no maker.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Container, Iterable
from functools import cached_property
from operator import itemgetter
from traceback import FrameSummary
from typing import Any, NamedTuple

from functionalize._compat.autograd import SEES_FUNCTIONS, is_engine_frame, is_function_frame
from functionalize._compat.references import address
from functionalize._compat.stacks import CapturedTraceback
from functionalize.ir.ops import OpRecord, TensorRef, refs_in
from functionalize.tape.backwards import BackwardCall
from functionalize.tape.hooks import PACK
from functionalize.tape.notes import FunctionCall, TapeNotes
from functionalize.tape.tape import RecordedBackward, TapeNode
from functionalize.util.user_stack import StackTexts

Key = tuple[int, int]  # thread, number
Maker = OpRecord | FunctionCall
_first = itemgetter(0)
_COPY_SLICES, _CPP_FUNCTION = "CopySlices", "CppNode"  # parts of the names of nodes


class Position(NamedTuple):
    """The autograd nodes of one op, by their numbers in the recording: in which it ran, and which it made."""

    node: int | None
    made: int | None


class _Mark(NamedTuple):
    """From a place in the records on: the innermost module that is being called, whether its call began inside a
    backward, and all modules that are being called, outermost first: name -> (name, class)."""

    at: int
    module: str
    inside: bool
    stack: dict[str, tuple[str, str]]


class OpPlaces:
    """The modules and labels of the ops of one recording; of few ops it needs the makers of nodes."""

    def __init__(self, notes: TapeNotes) -> None:
        self._notes = notes
        self._places = {address(record): at for at, record in enumerate(notes.records)}
        self._marks = _module_marks(notes)
        self._mark_places = list(map(_first, self._marks))
        self._label_places = list(map(_first, notes.labels))

    @cached_property
    def stacks(self) -> StackTexts:
        """The stacks of the recording."""
        return StackTexts(record.traceback for record in self._notes.records)

    def maker(self, record: OpRecord) -> Maker | None:
        """What made the node in which an op ran. For a leaf's node: the first op that used the leaf."""
        in_none = record.seq_nr is None or record.autograd_node is None
        return None if in_none else ownership_of(self._notes).maker(record)

    def module(self, record: OpRecord) -> str:
        """The module of an op: that is being called; of an op in a backward, the module of its forward.

        A module that is called inside a backward (activation checkpointing) counts as in a forward. An op that
        accumulates a gradient belongs to the module of the parameter.
        """
        if record.phase is not None and record.seq_nr is not None and record.seq_nr < 0:
            return self._notes.place(record.seq_nr)[0]
        at, _ = self._mark(record)
        return self._marks[at].module if at >= 0 else ""

    def _mark(self, record: OpRecord) -> tuple[int, bool]:
        """The place of the mark for the module of an op, -1 if there is none; whether it is that of its forward."""
        at = bisect_right(self._mark_places, self._places[address(record)]) - 1
        if record.phase is None or (at >= 0 and self._marks[at].inside):
            return at, False
        maker = self.maker(record)
        if isinstance(maker, FunctionCall):
            return maker.marks - 1, True
        return (
            bisect_right(self._mark_places, self._places[address(maker)]) - 1 if maker else -1
        ), True

    def label(self, record: OpRecord) -> str:
        """The label under which FSDP2 ran an op, or ""."""
        at = bisect_right(self._label_places, self._places[address(record)]) - 1
        return self._notes.labels[at][1] if at >= 0 else ""


class Ownership(OpPlaces):
    """The makers of the nodes of one recording."""

    def __init__(self, notes: TapeNotes) -> None:
        super().__init__(notes)
        self._range_places = list(map(_first, notes.ranges))
        self._names: dict[Key, str] = {}  # of the nodes that ran an op
        self._ran_in: dict[int, Key] = {}  # id of a record -> the node
        self._made: dict[int, Key] = {}
        self._makers: dict[Key, Maker] = {}
        self._numbers: dict[Key, int] = {}
        # Thread -> the ops that made a node, with its number.
        self._own: dict[int, list[tuple[int, OpRecord]]] = {}
        self._later: list[
            Key
        ] = []  # nodes that were made after the op before, not for the next one
        for record in notes.records:
            if record.seq_nr is not None and record.autograd_node is not None:
                key = _thread_of_node(record), record.seq_nr
                self._ran_in[address(record)] = key
                self._names.setdefault(key, record.autograd_node)
        for function in notes.functions:
            self._makers[function.thread, function.number] = function
        for record in notes.records:
            self._add_made(record)
        self._add_inner_ops(notes)
        self._add_later()
        if not SEES_FUNCTIONS:
            self._drop_functions()
        self._add_leaves()
        for record in notes.records:
            for found in (self._ran_in.get(address(record)), self._made.get(address(record))):
                if found is not None:
                    self._numbers.setdefault(found, len(self._numbers))

        self._orders = [call.order() for call in notes.backwards]
        for call, order in zip(notes.backwards, self._orders, strict=True):
            for place in order:
                self._numbers.setdefault(_key_in(call, place), len(self._numbers))

    def backwards(self) -> tuple[RecordedBackward, ...]:
        """The backwards of the recording, in their order."""
        calls = zip(self._notes.backwards, self._orders, strict=True)
        return tuple(self._backward(call, order) for call, order in calls)

    def _backward(self, call: BackwardCall, order: list[int]) -> RecordedBackward:
        nodes, running = [], set(order)
        for place in order:
            key, number = _key_in(call, place), call.numbers[place]
            edges = [self._numbers[_key_in(call, n)] for n in call.edges[place] if n in running]
            maker = self._makers.get(key)
            line = self.stacks.line_or_empty(maker.traceback) if maker is not None else ""
            parameter = self._notes.place(number)[1] if number < 0 else ""
            name = call.names[place]
            nodes.append(TapeNode(self._numbers[key], name, tuple(edges), line, parameter))
        return RecordedBackward(tuple(nodes), self.stacks.line_or_empty(call.traceback))

    def _drop_functions(self) -> None:
        """The nodes of an `autograd.Function` have no maker: what made them was not seen, an op that follows was."""
        unseen = {key for key, name in self._names.items() if name.endswith("Backward")}
        self._makers = {key: each for key, each in self._makers.items() if key not in unseen}
        self._made = {record: key for record, key in self._made.items() if key not in unseen}

    def of(self, record: OpRecord) -> Position:
        """The nodes of an op."""
        ran_in, made = self._ran_in.get(address(record)), self._made.get(address(record))
        return Position(ran_in and self._numbers[ran_in], made and self._numbers[made])

    def maker(self, record: OpRecord) -> Maker | None:
        """What made the node in which an op ran. For a leaf's node: the first op that used the leaf."""
        key = self._ran_in.get(address(record))
        return None if key is None else self._makers.get(key)

    def module_stack(self, record: OpRecord) -> tuple[dict[str, tuple[str, str]], bool]:
        """The modules that are being called, outermost first: name -> (name, class); whether those of its forward."""
        at, of_forward = self._mark(record)
        return self._stack_at(at), of_forward

    def _stack_at(self, mark: int) -> dict[str, tuple[str, str]]:
        return self._marks[mark].stack if mark >= 0 else {}

    def ranges(self, record: OpRecord) -> tuple[tuple[str, int, int | None], ...]:
        """(name, number, modules) of the ranges for the profiler around an op, outermost first; not FSDP2's.

        number: of the entry. modules: how many modules of `module_stack` were being called when it was entered; None if
        there was none and no backward.
        """
        at = bisect_right(self._range_places, self._places[address(record)]) - 1
        entered = self._notes.ranges[at][1] if at >= 0 else ()
        if not entered:
            return ()
        counts = [len(self._stack_at(each.marks - 1)) for each in entered]
        return tuple(
            (each.name, each.number, count if count or each.in_backward else None)
            for each, count in zip(entered, counts, strict=True)
        )

    def hook(self, record: OpRecord) -> tuple[str, str] | None:
        """The kind of the hook in which an op ran, and the user's innermost line in it; None outside of hooks."""
        kind = record.meta.get("hook")
        if kind is not None:
            return kind, self.stacks.line_after(record.traceback, is_engine_frame)
        if record.phase is not None or not self._notes.packs or record.traceback is None:
            return None
        if not any(map(self._is_pack, record.traceback.summary())):
            return None
        return PACK, self.stacks.line_or_empty(record.traceback)

    def _is_pack(self, frame: FrameSummary) -> bool:
        line = frame.lineno or 0
        return any(
            frame.filename == code.co_filename
            and frame.name == code.co_name
            and line in [at for *_, at in code.co_lines()]
            for code in self._notes.packs
        )

    def custom(self, record: OpRecord) -> Any:
        """The user's annotations of an op: its own, else those of the op whose backward or recomputation it is."""
        own = record.meta.get("custom")
        if own is not None or record.seq_nr is None:
            return own
        maker = self.maker(record)
        return maker.meta.get("custom") if isinstance(maker, OpRecord) else None

    def readers(self, emitted: Container[int]) -> dict[int, int]:
        """For makers that no node of a graph stands for (most views): the first op that reads what they made.

        emitted: addresses of the records that have nodes. Returns numbers of nodes: of such a maker -> made by that op.
        A call of a `Function` without ops has the next op that made a node.
        """
        found: dict[int, int] = {}
        reader: dict[TensorRef, int] = {}
        calls, following = list(self._notes.functions), None
        numbers = {record: self._numbers[key] for record, key in self._made.items()}
        stands = {number for record, number in numbers.items() if record in emitted}
        for at in range(len(self._notes.records) - 1, -1, -1):
            record = self._notes.records[at]
            made, target = numbers.get(address(record)), None
            if address(record) in emitted:
                target = following = made if made is not None else following
            elif made is not None:
                target = next((reader[r] for r in refs_in([record.outputs]) if r in reader), None)
                if target is not None and made not in stands:
                    found.setdefault(made, target)
            if target is not None and made is not None:
                reader.update(dict.fromkeys(refs_in([record.args, record.kwargs]), target))
            while calls and calls[-1].at >= at:
                call = calls.pop()
                number = self._numbers.get((call.thread, call.number))
                if number is not None and following is not None and number not in stands:
                    found.setdefault(number, following)
        return found

    # -- nodes that ops made ---------------------------------------------------------------------

    def _add_made(self, record: OpRecord) -> None:
        if record.makes is None:
            return
        first, last, enabled = record.makes
        thread, numbers = record.thread, range(first, last + 1)
        own = self._own_number(record, numbers)
        # Autograd ends an op in place on a view with `CopySlices` and the new node of the view.
        ended = not enabled or any(self._is(thread, n, _COPY_SLICES) for n in numbers)
        for number in numbers:
            if number == own or not ended or (own is not None and number > own):
                self._makers.setdefault((thread, number), record)
            else:
                self._later.append((thread, number))
        if own is not None:
            self._made[address(record)] = thread, own
            self._own.setdefault(thread, []).append((own, record))

    def _own_number(self, record: OpRecord, numbers: range) -> int | None:
        """The number among these that is the node of the op itself."""
        assert record.makes is not None
        thread = record.thread
        if not record.makes[-1]:  # inside the forward of a `Function` of C++
            return next((n for n in numbers if self._is(thread, n, _CPP_FUNCTION)), None)
        if len(numbers) == 1:
            return None if self._is(thread, numbers[0], _COPY_SLICES) else numbers[0]
        name = _plain(str(record.target).partition(".")[2].partition(".")[0])
        named = (n for n in numbers if _plain(self._names.get((thread, n), "")) == name)
        return next(named, None)

    def _is(self, thread: int, number: int, part: str) -> bool:
        return part in self._names.get((thread, number), "")

    def _add_later(self) -> None:
        """The makers of nodes that autograd added after an op: that op."""
        for own in self._own.values():
            own.sort(key=_first)
        for thread, number in self._later:
            own = self._own.get(thread, [])
            at = bisect_right(own, number, key=_first) - 1
            if at >= 0:
                self._makers.setdefault((thread, number), own[at][1])

    def _add_leaves(self) -> None:
        """The maker of a leaf's node: the first op or `Function` whose node sends a gradient to it."""
        first: dict[int, tuple[int, bool]] = {}
        for call in self._notes.backwards:
            for place, after in enumerate(call.edges):
                for number in {call.numbers[each] for each in after if call.numbers[each] < 0}:
                    maker = self._makers.get(_key_in(call, place))
                    if maker is None:
                        continue
                    at = self._order_of(maker)
                    if number not in first or at < first[number]:
                        first[number], self._makers[0, number] = at, maker

    def _order_of(self, maker: Maker) -> tuple[int, bool]:
        """A key by which makers are in their order: a call of a `Function` is before the op that follows it."""
        if isinstance(maker, OpRecord):
            return self._places[address(maker)], True
        return maker.at, False

    def _add_inner_ops(self, notes: TapeNotes) -> None:
        """Ops in the forward of a `Function` belong to its node, unless they made one themselves."""
        running: list[FunctionCall] = []
        calls = iter(notes.functions)
        call = next(calls, None)
        for at, record in enumerate(notes.records):
            while call is not None and call.at <= at:
                del running[max(_depth(call.traceback) - 1, 0) :]
                running.append(call)
                call = next(calls, None)
            if not running or record.autograd_node is not None:
                continue
            del running[_depth(record.traceback) :]
            if running and address(record) not in self._made:
                self._made[address(record)] = running[-1].thread, running[-1].number


def ownership_of(notes: TapeNotes) -> Ownership:
    """The makers of the nodes of a recording; computed once."""
    # A recording may be continued.
    now = len(notes.records), len(notes.functions), len(notes.backwards)
    if notes.resolved is None or notes.resolved[0] != now:
        notes.resolved = now, Ownership(notes)
    found: Ownership = notes.resolved[1]
    return found


def _module_marks(notes: TapeNotes) -> list[_Mark]:
    """The innermost module from each mark on, which may be its caller's if it has no name; equal stacks are one."""
    running: list[tuple[str, bool]] = []
    stacks: dict[tuple[str, ...], dict[str, tuple[str, str]]] = {}
    found = []
    for at, module, inside in notes.marks:
        if module is None:
            del running[-1:]
        else:
            running.append((notes.name_of(module) or (running[-1][0] if running else ""), inside))
        names = tuple(name for name, _ in running if name)
        if names not in stacks:
            stacks[names] = {name: (name, notes.class_of(name)) for name in names}
        found.append(_Mark(at, *(running[-1] if running else ("", False)), stacks[names]))
    return found


def _key_in(call: BackwardCall, place: int) -> Key:
    number = call.numbers[place]
    return call.thread if number >= 0 else 0, number


def _thread_of_node(record: OpRecord) -> int:
    """The thread that made the node in which an op ran.

    A thread of autograd's for a device runs nodes of the recording's thread, except in a backward that it has called
    itself (reentrant checkpointing): these it has made.
    """
    if record.thread and record.seq_nr is not None and record.seq_nr >= 0:
        return record.thread if _any_frame(record.traceback, is_engine_frame) else 0
    return 0


def _depth(traceback: CapturedTraceback | None) -> int:
    """How many forwards of a `Function` are on a stack."""
    frames = traceback.summary() if traceback is not None else ()
    return sum(is_function_frame(f.filename, f.lineno or 0) for f in frames)


def _any_frame(traceback: CapturedTraceback | None, wanted: Any) -> bool:
    frames: Iterable[Any] = traceback.summary() if traceback is not None else ()
    return any(wanted(f.filename, f.lineno or 0) for f in frames)


def _plain(name: str) -> str:
    """The common part of the name of an op and that of its node: `mul_` and `MulBackward0` become `mul`."""
    return re.sub(r"Backwards?\d*$", "", name).replace("_", "").lower()
