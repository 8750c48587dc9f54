"""The inputs of a program's last call, and a fast test that its guards hold and its sources find the same inputs.

    known.learn(program, call)      when all guards have passed for `call`
    known.call(leaves)              the next call with its inputs; None: something may have changed

What a guard reads in a step of hundreds of parameters is nearly always the very object that it read before. So each is
asked once more by a reader that notes what it reads (`util/reader.py`), and from then on all these notes are tested
together. Guards that read otherwise are asked at every call, as are sources that find an object that no read returned.

Then the inputs are those of the last call, or what the wrappers around them (DTensors) hold now. Their geometry,
devices and storages may have changed in place, so these are read at every call, by a few functions of C over all
tensors.

Invariant: if `call` returns a call, then `Executable.resolve` without it would return one with the same inputs; if it
returns a miss, no call.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import call as call_of
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.fast_guards import tensor_match
from functionalize.ir.guards import AliasGuard, Guard, Miss, TensorGuard
from functionalize.ir.inputs import Call, Owners, Source
from functionalize.ir.outputs import SourceItself
from functionalize.util.reader import ReadLog
from functionalize.util.unchanged import Read, Unchanged, reading, token

log = logging.getLogger("functionalize")
_MOST_FAILS = 16  # in a row, before what was learned is dropped
_LONGEST_WAIT = 1 << 16  # calls, until facts are noted again that do not hold
_WORTH = 8  # uses of what was learned from one call that make up for learning it


class KnownInputs:
    """What is known from the last call whose guards all passed.

    It learns again from a call whose guards have passed and for which it was of no use. To learn takes as long as to
    ask all guards several times, so it learns ever more seldom while it is of use for a few calls only: then some
    object is another one at every call, or after every few (an evaluation in between).
    """

    def __init__(self) -> None:
        self._last: _LastCall | None = None
        self._misses = self._uses = self._fails = 0

    def call(self, leaves: Sequence[Any], asks_numbers_first: bool = False) -> Call | Miss | None:
        """The next call with its inputs, if nothing has changed; None: the guards must be asked. Changes nothing.

        A miss: only a number is another one. asks_numbers_first: see `Executable.known`.
        """
        if self._last is None:
            return None
        if asks_numbers_first and (miss := self._last.missed_again(leaves)) is not None:
            return miss
        call = self._last.repeated(leaves)
        if isinstance(call, Miss):
            return call
        if call is None:
            self._fails += 1  # in a row: a program of another state may be the one that fits
            if self._fails >= _MOST_FAILS:
                self._last = None  # it refers to objects that may have been replaced
        else:
            self._uses, self._fails = self._uses + 1, 0
            if self._uses >= _WORTH:
                self._misses = 0
        return call

    def learn(self, program: Any, call: Call) -> None:
        """Take note of a call for which all guards of the program have passed just now."""
        self._misses += 1
        if self._misses & (self._misses - 1):
            return
        self._uses = self._fails = 0
        try:
            # What was learned first may have failed as the step puts other tensors into a part of an optimizer's state.
            self._last = _LastCall.of(program, call, by_entry=self._misses > 1)
        except Exception as error:  # an object of the user's that cannot be read twice
            log.debug("every guard is asked at every call: %s: %s", type(error).__name__, error)


class _LastCall:
    """The inputs of a call, by weak references, and the facts by which they were found.

    before, after: guards that are asked at every call, before and after the inputs are known.
    moving: the inputs that are looked up at every call, with their indices. inner: those that are read from the tensors
    around them, which stay the same: for each index, the tensor and its attribute.
    """

    def __init__(
        self,
        facts: Unchanged,
        call: Call,
        moving: Sequence[tuple[int, Source]],
        inner: Mapping[int, tuple[Any, str]],
        before: Sequence[Guard],
        after: Sequence[Any],
        windows: _Windows,
        walk: _Walk,
    ) -> None:
        self._walk = walk
        self._facts, self._before, self._after, self._windows = facts, before, after, windows
        self._missed: Guard | None = None  # by which a call was missed last
        self._owners = Owners(facts.places)
        self._moving, skipped = moving, {*inner, *(index for index, _ in moving)}
        order = [i for i in range(len(call.inputs)) if i not in inner]
        self._inputs: list[Callable[[], Any]] = [
            token(None if i in skipped else call.inputs[i]) for i in order
        ]
        self._inner: list[Read] = []
        for name in dict.fromkeys(name for _, name in inner.values()):
            several = [i for i, (_, each) in inner.items() if each == name]
            self._inner.append(reading((name,), [inner[i][0] for i in several]))
            order += several
        # With one more, since of a single one there is no tuple.
        self._in_order = itemgetter(*sorted(range(len(order)), key=order.__getitem__), 0)

    @staticmethod
    def of(program: Any, call: Call, by_entry: bool = False) -> _LastCall | None:
        """Of a call for which all guards have passed just now; None for a program that finds no input by itself."""
        log, moving = ReadLog(by_entry), []
        facts, call = log.facts, replace(call, reader=log)
        inner: dict[int, tuple[Any, str]] = {}
        walks = [guard for guard in program.facts if getattr(guard, "is_slow", False)]
        before = _left([guard for guard in program.facts if guard not in walks], call, log)
        for index, spec in enumerate(program.inputs):
            if getattr(spec.source, "is_inner", False):
                home = spec.source.home(call)
                # The tensor around it stays, and what it holds is read at every call.
                if log.settle():
                    inner[index] = home
                    continue
            log.find(spec.source, call)
            if not log.settle():
                moving.append((index, spec.source))
        if len(moving) == len(program.inputs):
            return None
        windows = [g for g in program.guards if isinstance(g, TensorGuard)]
        others = [g for g in program.guards if not isinstance(g, TensorGuard)]
        indices = [g.input for g in windows]
        whole = [g for g in others if isinstance(g, AliasGuard) and g.keeps_apart(indices)]
        after = _left([g for g in others if g not in whole], call, log)
        after += _left([r for r in program.outputs if isinstance(r, SourceItself)], call, log)
        elsewhere = {id(tensor) for tensor, _ in facts.aliases}
        for index in [i for i in inner if id(call.inputs[i]) in elsewhere]:
            facts.attribute(*inner.pop(index))  # another place must hold the same object
        facts.freeze()
        fixed = {id(t) for i, t in enumerate(call.inputs) if i not in dict(moving)}
        aliases = [
            (t, i) for t, i in facts.aliases if id(t) not in fixed
        ]  # they stay the same object
        facts.aliases.clear()
        tensors = _Windows(indices, dict(moving), call.inputs, aliases, bool(whole))
        walk = _Walk(walks, call, facts)
        return _LastCall(facts, call, moving, inner, before, after, tensors, walk)

    def missed_again(self, leaves: Sequence[Any]) -> Miss | None:
        """The miss of the guard by which a call was missed last; None: it holds, or cannot be asked alone."""
        if self._missed is None:
            return None
        try:
            failure = self._missed.failure(Call(leaves, [], owners=self._owners))
        except (LookupError, AttributeError, RuntimeError, TypeError):
            return None
        return failure if isinstance(failure, Miss) else None

    def repeated(self, leaves: Sequence[Any]) -> Call | Miss | None:
        """The next call with its inputs; None: something may have changed; a miss: a number has."""
        if not self._facts.hold():
            return None
        call = Call(leaves, [], owners=self._owners)
        try:
            for guard in (*self._before, *self._walk.left(call)):
                if (failure := guard.failure(call)) is not None:
                    return self._noted(guard, failure)
            found = list(map(call_of, self._inputs))
            for read in self._inner:
                found += read()
            *inputs, _ = self._in_order(found)
            call.inputs = inputs
            for index, source in self._moving:
                inputs[index] = source.resolve(call)
            if not self._windows.hold(inputs):
                return None
            for guard in self._after:
                if (failure := guard.failure(call)) is not None:
                    return self._noted(guard, failure)
        except (LookupError, AttributeError, RuntimeError, TypeError):
            return None
        return call

    def _noted(self, guard: Guard, failure: str) -> Miss | None:
        if not isinstance(failure, Miss):
            return None
        self._missed = guard
        return failure


class _Walk:
    """The guards that walk all objects: their facts, which fail alone where an object is made anew before each call.

    Then these guards are asked, and no other; and their facts are noted again after ever more calls.
    others: the facts of all other guards, which hold at each call.
    """

    def __init__(self, guards: Sequence[Guard], call: Call, others: Unchanged) -> None:
        self._guards, self._others, self._calls, self._wait = guards, others, 0, 4
        self._note(call)

    def _note(self, call: Call) -> None:
        log = ReadLog(beside=self._others)
        self._left = _left(self._guards, replace(call, reader=log), log)
        log.facts.freeze()
        self._facts: Unchanged | None = log.facts

    def left(self, call: Call) -> Sequence[Guard]:
        """The guards that must be asked at this call."""
        if self._facts is not None:
            if self._facts.hold():
                return self._left
            self._facts, self._calls = None, 0
        self._calls += 1
        if self._calls >= self._wait:
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._note(call)
        return self._guards


class _Windows:
    """What `TensorGuard`, `AliasGuard` and `SharedGuard` read of tensors.

    indices: of the inputs among `inputs`. moving: of the inputs that may be other objects at every call.
    aliases: see `Unchanged`. are_apart: whether no two inputs share a storage.
    """

    def __init__(
        self,
        indices: Sequence[int],
        moving: Collection[int],
        inputs: Sequence[Tensor],
        aliases: Sequence[tuple[Tensor, int]],
        are_apart: bool,
    ) -> None:
        each = {id(tensor): (tensor, i) for tensor, i in aliases}.values()
        fixed = [i for i in indices if i not in moving]
        moved = [i for i in indices if i in moving]
        self._fixed, self._moved = fixed, moved
        self._aliases = [token(tensor) for tensor, i in each if i not in moving]
        self._moved_aliases = [(token(tensor), moved.index(i)) for tensor, i in each if i in moving]
        tensors = self._tensors(inputs)
        self._match = tensor_match(tensors)
        # A tensor that fills its storage has no offset.
        self._with_offsets = [i for i, t in enumerate(tensors) if not _is_whole(t)]
        self._offsets = self._offsets_of(tensors)
        storages = list(map(_storage, tensors))
        self._sizes = _sizes_of(storages)
        self._apart = len(tensors) if are_apart else len(fixed) + len(self._aliases)
        first: dict[Any, int] = {}
        for at, storage in enumerate(storages):
            first.setdefault(storage, at)
        shared = [
            (at, first[storage]) for at, storage in enumerate(storages) if first[storage] < at
        ]
        if not are_apart:  # `AliasGuard` is asked which inputs share a storage
            places = len(tensors) - len(self._moved_aliases)
            shared = [(at, to) for at, to in shared if at >= places or at < self._apart]
        self._shared, self._sharing = [at for at, _ in shared], [to for _, to in shared]
        self._count = len(set(storages[: self._apart]))

    def _offsets_of(self, tensors: Sequence[Any]) -> array[int]:
        return array("q", map(_offset, map(tensors.__getitem__, self._with_offsets)))

    def _tensors(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The tensors whose storages stay the same, and the others."""
        read = inputs.__getitem__
        moved = [alias() for alias, _ in self._moved_aliases]
        same = [*map(read, self._fixed), *map(call_of, self._aliases)]
        return [*same, *map(read, self._moved), *moved]

    def hold(self, inputs: Sequence[Tensor]) -> bool:
        """Whether each tensor is the same window on a storage of the same size, shared by the same tensors.

        Of storages it is compared which tensors share one.
        """
        tensors = self._tensors(inputs)
        if not tensors:
            return True
        if not self._match(tensors) or self._offsets_of(tensors) != self._offsets:
            return False
        storages = list(map(_storage, tensors))  # the same object for the same storage
        if _sizes_of(storages) != self._sizes or len(set(storages[: self._apart])) != self._count:
            return False
        read = storages.__getitem__
        return all(map(is_, map(read, self._shared), map(read, self._sharing)))


def _sizes_of(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    return list(map(_nbytes, storages))


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()


_storage, _nbytes = Tensor.untyped_storage, torch.UntypedStorage.nbytes
_offset: Any = Tensor.storage_offset


def _left(guards: Sequence[Any], call: Call, log: ReadLog) -> list[Any]:
    """The guards that must be asked at every call. All hold now, and what the others read is noted."""
    left = log.left = []
    for guard in guards:
        if not getattr(guard, "is_read_by_reader", False):
            left.append(guard)
            continue
        for part in guard.parts() if hasattr(guard, "parts") else (guard,):
            failure = part.failure(call)
            if not log.settle() or failure is not None:
                left.append(part)
    return left
