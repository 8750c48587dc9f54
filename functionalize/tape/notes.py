"""What a recording notes about autograd, beside the number of the running node in each op's record.

    y = x * w          the counter of autograd nodes moves: `record.makes` is the number of its node
    z = y.detach()     it does not: the op makes no node
    Gate.apply(z)      an `autograd.Function`: a node of its own, also if its forward runs no op

Autograd counts nodes per thread, and makes the node of an op just before the op is dispatched. So an op has made a
node iff the counter moved since the op before it, and gradients are enabled. `ownership.py` evaluates the notes.
Invariant: the notes keep no tensor alive, and a node only while the call of the engine runs that has its graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import traceback as fx_traceback

from functionalize._compat.autograd import (
    BACKWARD,
    FIRST_OF_LEAVES,
    RECOMPUTE,
    NodeNames,
    current_node_leaf,
    gradients_are_on,
    graph_is_kept,
    graph_task,
    in_backward,
    leaf_of,
    next_node_number,
    running_node,
    saved_tensor_hooks,
)
from functionalize._compat.references import address
from functionalize._compat.stacks import CapturedTraceback, Stacks, entered_frame, stack_here
from functionalize.ir.ops import OpRecord
from functionalize.tape.backwards import BackwardCall, walked
from functionalize.tape.hooks import is_user_hook, kind_of_hook

_thread = threading.get_ident


class FunctionCall(NamedTuple):
    """A call of an `autograd.Function` that made a node.

    number: of the node. thread: that made it; 0 is the thread of the recording. at: the number of records before it.
    marks: the number of marks of modules before it.
    """

    number: int
    thread: int
    at: int
    traceback: CapturedTraceback
    marks: int


# From a place in the records on, a module is called: its address, and whether the call began inside a backward, as in a
# recomputation. Or the innermost call has ended: None. A plain tuple, as every call of a module makes two.
ModuleMark = tuple[int, int | None, bool]


class EnteredRange(NamedTuple):
    """A `record_function` that the step has entered. number: of the entry. marks: the marks of modules before it."""

    name: str
    number: int
    marks: int
    in_backward: bool


def _nowhere(leaf: int) -> tuple[str, str]:
    return "", ""


def _nothing(module: Any) -> str:
    return ""


class TapeNotes:
    """The notes of one recording.

    records: the op stream, which the recorder extends.
    made: the number that the next node of the recording's thread has, as of the last op.
    leaves: the addresses of the leaves that a backward can reach; the node of the first has the number -1.
    marks: which modules were called when, if that was observed (see state/module_calls.py).
    labels: from a place in the records on, the innermost label of FSDP2's for the profiler, or "".
    ranges: from a place in the records on, the other ranges for the profiler that are entered, outermost first.
    packs: the hooks of the user's that were called for saved tensors.
    place_of: returns the module and the full name of the parameter with an address, empty if unknown.
    name_of: the name of the module with an address, empty if unknown. class_of: the class of a module, by its name.
    is_off: whether nothing is noted, since no program is made of the recording.
    """

    def __init__(self, records: list[OpRecord]) -> None:
        self.records = records
        self.functions: list[FunctionCall] = []
        self.leaves: list[int] = []
        self.backwards: list[BackwardCall] = []
        self.marks: list[ModuleMark] = []
        self.labels: list[tuple[int, str]] = []
        self._labels: list[str] = []
        self.ranges: list[tuple[int, tuple[EnteredRange, ...]]] = []
        self.packs: set[CodeType] = set()
        self._unpacks: set[CodeType] = set()
        self.place_of: Callable[[int], tuple[str, str]] = _nowhere
        self.name_of: Callable[[int], str] = _nothing
        self.class_of: Callable[[str], str] = _nothing
        self.is_off = False
        # Of each leaf, by its address: the number of its node.
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.resolved: Any = None  # see `ownership.ownership_of`
        self.names = NodeNames()
        self.made = 0
        self.stacks = Stacks()
        self._made: dict[int, int] = {}  # thread -> the same number, of other threads
        # Of the innermost running backward: the place of each node, and by place its number and its name.
        self._nodes: tuple[dict[Any, int], list[int], list[str]] = ({}, [], [])
        self._running: list[Any] = []  # the same of those around it

    def start(self) -> None:
        """The recording begins, or goes on, in this thread."""
        self.stacks.main, self.made = _thread(), next_node_number()
        self.saved_by(*saved_tensor_hooks())

    def end(self) -> None:
        """The recording is over: no reference to a leaf is kept, since torch swaps no tensor that has a weak one."""
        self._known = {}

    def thread(self) -> int:
        """The running thread; 0 is the thread of the recording."""
        found = _thread()
        return 0 if found == self.stacks.main else found

    def backward_called(self, outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
        """A backward of `outputs` begins. inputs: if it is of these alone."""
        if self.is_off:
            return
        thread, stack = self.thread(), stack_here()
        call, places = walked(outputs, inputs, self._leaf_numbers, thread, stack)
        self.backwards.append(call)
        self._running.append(self._nodes)
        self._nodes = places, call.numbers, call.names

    def backward_ended(self) -> None:
        """The innermost backward has ended, or raises."""
        if self._running:
            self._nodes = self._running.pop()

    def record(self, func: Any) -> OpRecord:
        """The record of an op that is being dispatched; for a mode's handler."""
        if graph_task() == -1:
            # Outside of a backward no stack is shared: the calling frame need not be looked up.
            if self.is_off:
                return OpRecord(func, (), {}, None, (), stack_here())
            record = OpRecord(func, (), {}, None, (), stack_here(), self)
            made = next_node_number()
            if made != self.made:
                if made > self.made:
                    record.makes = self.made, made - 1, gradients_are_on()
                self.made = made
        else:
            stacks = self.stacks
            stack = stacks.here()
            if self.is_off:
                return OpRecord(func, (), {}, None, (), stack)
            # The walk has made the Python objects of these nodes; they are asked for nothing.
            places, numbers, names = self._nodes
            place = places.get(running_node())
            if place is None or stack is not stacks.shared:
                record = self._in_python(func, stack, running_node())
            else:
                number, name = numbers[place], names[place]
                away = stacks.away
                record = OpRecord(func, (), {}, None, (), stack, self, away, number, name, BACKWARD)
                if number < 0:
                    record.meta["accumulates"] = True
                if gradients_are_on():
                    self._graded(record)
        if fx_traceback.current_meta:
            custom = fx_traceback.current_meta.get("custom")
            if custom:  # `annotate` changes its dict
                record.meta["custom"] = dict(custom)
        return record

    def _in_python(self, func: Any, stack: CapturedTraceback, node: Any) -> OpRecord:
        """The record of an op of a backward that Python code ran, or a node that the walk has not found."""
        number = name = None
        if node is not None:
            number, name = node._sequence_nr(), self.names.of(node)
            if number >= FIRST_OF_LEAVES:  # nodes that accumulate gradients share their numbers
                leaf = leaf_of(node)
                number = None if leaf is None else self._leaf_numbers([leaf])[0]
        away = self.thread()
        record = OpRecord(func, (), {}, None, (), stack, self, away, number, name, BACKWARD)
        if stack is not self.stacks.shared:
            self._note_hook(record)
        elif number is not None and number < 0:
            record.meta["accumulates"] = True
        if gradients_are_on():
            self._graded(record)
        return record

    def _graded(self, record: OpRecord) -> None:
        """An op in a backward while gradients are enabled: it may be recomputed, and may make a node."""
        if record.autograd_node is not None and not graph_is_kept():
            record.phase = RECOMPUTE
        made = next_node_number()
        before = self._swap(_thread(), made)
        if made > before:
            record.makes = before, made - 1, True

    def _note_hook(self, record: OpRecord) -> None:
        """Note the kind of the hook that runs an op in a backward."""
        frame = entered_frame()
        if frame is not None:
            inside = record.autograd_node is not None
            leaf = current_node_leaf() if inside else None
            kind = kind_of_hook(frame, inside, leaf, self._unpacks)
            if kind is not None:
                record.meta["hook"] = kind

    def _swap(self, thread: int, made: int) -> int:
        """Set the number that the next node of a thread has; returns the one before."""
        if thread != self.stacks.main:
            # Of the first op of another thread, at most the newest node is its own.
            before = self._made.get(thread, made - 1)
            self._made[thread] = made
        else:
            before, self.made = self.made, made
        return before

    def saved_by(self, *hooks: Any) -> None:
        """Tensors that autograd saves go through these hooks: that which packs, and that which unpacks."""
        if len(hooks) == 2 and all(map(is_user_hook, hooks)):
            self.packs.add(hooks[0].__code__)
            self._unpacks.add(hooks[1].__code__)

    def labelled(self, label: str | None) -> None:
        """FSDP2 enters a part of its work under a label, or leaves it (None)."""
        if self.is_off:
            return
        if label is not None:
            self._labels.append(label)
        elif self._labels:
            self._labels.pop()
        self.labels.append((len(self.records), self._labels[-1] if self._labels else ""))

    def ranged(self, name: str | None) -> None:
        """The step enters a range for the profiler, or leaves the innermost one (None)."""
        if self.is_off:
            return
        entered = self.ranges[-1][1] if self.ranges else ()
        if name is not None:
            found = EnteredRange(name, len(self.ranges), len(self.marks), in_backward())
            entered = (*entered, found)
        else:
            entered = entered[:-1]
        self.ranges.append((len(self.records), entered))

    def function_called(self, args: Iterable[Any]) -> None:
        """An `autograd.Function` is about to make its node. It makes one also without need for gradients."""
        if self.is_off:
            return
        thread, number = self.thread(), next_node_number()
        self._swap(_thread(), number + 1)
        needed = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if needed and gradients_are_on():
            at, marks = len(self.records), len(self.marks)
            self.functions.append(FunctionCall(number, thread, at, stack_here(), marks))

    def _leaf_numbers(self, leaves: list[Tensor]) -> list[int]:
        """The numbers of the nodes of leaves."""
        places = list(map(address, leaves))
        if not self.leaves and len(set(places)) == len(places):  # of the first backward: at once
            self.leaves = places
            numbers = list(range(-1, -1 - len(places), -1))
            self._known = dict(
                zip(places, zip(map(weakref.ref, leaves), numbers, strict=True), strict=True)
            )
            return numbers
        return [self._leaf_number(*each) for each in zip(leaves, places, strict=True)]

    def _leaf_number(self, leaf: Tensor, at: int) -> int:
        found = self._known.get(at)
        if found is None or found[0]() is not leaf:
            self.leaves.append(at)
            found = self._known[at] = weakref.ref(leaf), -len(self.leaves)
        return found[1]

    def place(self, number: int) -> tuple[str, str]:
        """The module and the full name of the parameter of a leaf's node, empty if unknown."""
        return self.place_of(self.leaves[-1 - number])
