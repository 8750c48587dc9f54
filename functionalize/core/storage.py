"""The memory model: what each storage holds now, as a value. Knows no ops.

    FunctionalStorage                         View (one per geometry seen)
    root ───── geometry of the base           parent ── the geometry it was taken from
    base ───── the value of the root          step ──── how to get there, and back
    version ── counts changes of contents     value, version ── kept until the next change

Reading a view whose version is old regenerates it from the base through its chain of steps; writing a
view goes the other way, by each step's inverse. See Note [Reading a stale view].

Invariant: a value has exactly the size, stride and dtype of the geometry it is bound to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from functionalize.core.ops import Geometry, OpRecord, contiguous_geometry
from functionalize.errors import (
    EmptyStorageError,
    InvariantError,
    OutOfBoundsError,
    OverlappingMutationError,
    UndefinedContentsError,
)

Value = Any  # an fx.Node while a graph is built, a torch.Tensor while substituting


class Emitter(Protocol):
    """Turns an op on values into a value: a node of a graph, or the op's result."""

    now: OpRecord | None  # the record being discharged

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        """The value of `target` applied to values and constants."""
        ...

    def empty(self, geometry: Geometry, device: torch.device) -> Value:
        """A value with undefined contents and exactly this size, stride and dtype."""
        ...

    def whole(self, storage: FunctionalStorage, flat: Geometry) -> Value:
        """What an input's whole storage held on entry, as the one-dimensional `flat`."""
        ...


class Step(Protocol):
    """One view op between a parent and a child geometry."""

    def forward(self, emit: Emitter, parent: Value, shift: int) -> Value:
        """The child's value. `shift`: add it to an absolute storage offset to index `parent`'s own memory."""
        ...

    def inverse(
        self, emit: Emitter, child: Value, parent: Callable[[], Value], shift: int
    ) -> Value:
        """The parent's value after `child` was written; asks for the old `parent` only if part of it survives."""
        ...


@dataclass(slots=True)
class View:
    """One geometry of a storage: how it is reached (`step` None: straight from the root), and its value."""

    geometry: Geometry
    parent: Geometry | None = None
    step: Step | None = None
    value: Value = None
    version: int = -1


class Extent:
    """The bytes of a storage that hold something, as disjoint ascending [start, end) intervals."""

    __slots__ = ("spans",)

    def __init__(self, *spans: tuple[int, int]) -> None:
        self.spans = [s for s in spans if s[0] < s[1]]

    def add(self, start: int, end: int) -> None:
        """Mark [start, end), merging what it touches; O(log n) to find, O(n) to shift at worst."""
        if start >= end:
            return
        spans = self.spans
        lo = bisect_left(spans, (start,))
        if lo and spans[lo - 1][1] >= start:
            lo -= 1
            start = spans[lo][0]
        hi = lo
        while hi < len(spans) and spans[hi][0] <= end:
            end = max(end, spans[hi][1])
            hi += 1
        spans[lo:hi] = [(start, end)]

    def truncate(self, end: int) -> None:
        """Forget everything from `end` on."""
        self.spans = [(s, min(e, end)) for s, e in self.spans if s < end]

    def covers(self, start: int, end: int) -> bool:
        """Whether every byte of [start, end) is marked."""
        at = bisect_left(self.spans, (start + 1,)) - 1
        return start >= end or (at >= 0 and self.spans[at][1] >= end)


def check_bounds(name: str, geometry: Geometry, nbytes: int, original: int, verb: str) -> None:
    """Raise unless every element of `geometry` lies inside a storage of `nbytes` bytes."""
    if geometry.end <= nbytes:
        return
    if nbytes == 0:
        raise EmptyStorageError(
            f"{verb} `{name}` ({geometry}), whose storage holds 0 bytes here and would need "
            f"{geometry.end}: grow it and write to it first"
        )
    raise OutOfBoundsError(
        f"{verb} `{name}` ({geometry}), which reaches to byte {geometry.end} of a storage that holds "
        f"{nbytes} bytes here (it held {original} on entry)"
    )


def check_overlap(name: str, geometry: Geometry) -> None:
    """Raise if several elements of a tensor that is written share one memory location."""
    if geometry.overlaps:
        raise OverlappingMutationError(
            f"writes `{name}` ({geometry}), in which several elements share one memory location: "
            "clone() it before writing"
        )


@dataclass(slots=True, eq=False)
class FunctionalStorage:
    """The record of one storage; sizes in bytes.

    original_base, original_nbytes: as on entry (of a storage born inside: as at birth).
    external: an input's storage, whose bytes around the root can be asked for.
    valid: which bytes may be read. written: whether the contents differ from entry.
    fresh: whether the base starts at its own memory's offset 0, not at the root's absolute offset.
    """

    serial: int
    root: Geometry
    device: torch.device
    original_base: Value
    original_nbytes: int
    name: str
    make_step: Callable[[Geometry, Geometry], Step]
    external: bool = False
    base: Value = None
    nbytes: int = 0
    version: int = 0
    written: bool = False
    lost: bool = False
    fresh: bool = False
    valid: Extent = field(default_factory=Extent)
    views: dict[Geometry, View] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = self.original_base
        self.nbytes = self.original_nbytes
        self.valid = Extent((0, self.nbytes))
        version = self.version if self.nbytes or not self.root.numel else -1
        self.views[self.root] = View(self.root, None, None, self.base, version)

    # -- views ---------------------------------------------------------------------------------

    def add_view(self, parent: Geometry, child: Geometry, step: Step) -> None:
        """Remember that `child` is reached from `parent` by `step`; the first way seen stays."""
        if child not in self.views and parent != child:
            if parent not in self.views:
                self.views[parent] = View(parent)
            self.views[child] = View(child, parent, step)

    def _link(self, view: View) -> tuple[View, Step]:
        """The view that `view` comes from, and the step between them."""
        if view.step is not None and view.parent is not None:
            return self.views[view.parent], view.step
        return self.views[self.root], self.make_step(self.root, view.geometry)

    @property
    def _shift(self) -> int:
        return -self.root.offset if self.fresh else 0

    def _reach(self, geometry: Geometry, emit: Emitter) -> View:
        """The view of `geometry`, with a root that covers it."""
        if geometry.numel and not (
            self.root.start <= geometry.start and geometry.end <= self.root.end
        ):
            self._widen(emit)
        found = self.views.get(geometry)
        if found is None:
            found = self.views[geometry] = View(geometry)
        return found

    def _widen(self, emit: Emitter) -> None:
        """Note [Widening the base]

        A storage's first root is the tensor it was first seen through, which may be a window on a larger
        storage, or on one that has grown since. A view past that window makes the whole storage the root.
        The bytes around the window are as on entry, because every write so far went through the window.
        """
        dtype, itemsize = self.root.dtype, self.root.dtype.itemsize
        flat = contiguous_geometry((self.nbytes // itemsize,), dtype)
        window = self.views[self.root]
        has_base = window.version == self.version
        if self.external and self.original_nbytes and not self.lost:
            entry = contiguous_geometry((self.original_nbytes // itemsize,), dtype)
            whole = emit.whole(self, entry)
            if entry != flat:
                kept = contiguous_geometry((min(entry.size[0], flat.size[0]),), dtype)
                part = (
                    self.make_step(entry, kept).forward(emit, whole, 0) if kept != entry else whole
                )
                whole = part if kept == flat else self._paste(emit, flat, kept, part, None)
            has_base = has_base and self.written
        else:
            whole = None
        if has_base:
            part, old = self.base, self.root
            if old.end > self.nbytes:
                old = contiguous_geometry(
                    ((self.nbytes - old.start) // itemsize,), dtype, old.offset
                )
                part = self.make_step(self.root, old).forward(emit, part, self._shift)
            whole = self._paste(emit, flat, old, part, whole)
        elif whole is None:
            whole = emit.empty(flat, self.device)
        self.root, self.base, self.fresh = flat, whole, True
        self.views[flat] = View(flat, None, None, whole, self.version)
        window.parent = window.step = None

    def _paste(
        self, emit: Emitter, flat: Geometry, window: Geometry, value: Value, onto: Value | None
    ) -> Value:
        """`onto` (or undefined contents) of geometry `flat` with `value` at `window`."""
        return self.make_step(flat, window).inverse(
            emit, value, lambda: emit.empty(flat, self.device) if onto is None else onto, 0
        )

    # -- reads ---------------------------------------------------------------------------------

    def read(self, geometry: Geometry, emit: Emitter) -> Value:
        """The value of a view now.

        Note [Reading a stale view]
        A view's value is kept with the version it was read at. If the storage changed since, the value is
        regenerated by replaying the steps from the nearest current ancestor. This is all FSDP needs: the
        weight that autograd saved in forward is a view of a storage, and when backward reads it the storage
        holds the second all-gather.
        """
        found = self.views.get(geometry)
        if found is not None and found.version == self.version:
            return found.value
        if geometry.numel == 0:
            return emit.empty(geometry, self.device)
        check_bounds(self.name, geometry, self.nbytes, self.original_nbytes, "reads")
        if not self.valid.covers(geometry.start, geometry.end):
            raise UndefinedContentsError(
                f"reads `{self.name}` ({geometry}), whose storage was grown to {self.nbytes} bytes and "
                "these bytes were not written since: their contents are undefined"
            )
        return self._regenerate(self._reach(geometry, emit), emit)

    def _regenerate(self, view: View, emit: Emitter) -> Value:
        chain: list[tuple[View, Step]] = []
        while view.version != self.version:
            if view.geometry == self.root:
                raise InvariantError(f"`{self.name}`: the base is older than the storage")
            parent, step = self._link(view)
            chain.append((view, step))
            view = parent
        value = view.value
        for child, step in reversed(chain):
            value = child.value = step.forward(emit, value, self._shift)
            child.version = self.version
        return value

    # -- writes --------------------------------------------------------------------------------

    def check_writable(self, geometry: Geometry) -> None:
        """Raise unless a write of `geometry` is well defined."""
        check_overlap(self.name, geometry)
        check_bounds(self.name, geometry, self.nbytes, self.original_nbytes, "writes")

    def write(self, geometry: Geometry, value: Value, emit: Emitter) -> None:
        """Make `value` what `geometry` holds; the base becomes the inverse of the chain of views.

        A write that covers the base never reads the old one. A partial write of undefined contents starts
        from `empty`.
        """
        self.check_writable(geometry)
        view, new = self._reach(geometry, emit), value
        passed = [(view, new)]
        while view.geometry != self.root:
            view, step = self._link(view)
            new = step.inverse(emit, new, partial(self._old, view, emit), self._shift)
            passed.append((view, new))
        self.base = new
        self.version += 1
        self.written = self.fresh = True
        self.valid.add(geometry.start, geometry.end)
        for view, new in passed:
            view.value, view.version = new, self.version

    def _old(self, view: View, emit: Emitter) -> Value:
        if self.valid.spans:
            return self._regenerate(view, emit)
        return emit.empty(view.geometry, self.device)

    # -- contents that go and come ---------------------------------------------------------------

    def forget(self) -> None:
        """The contents are gone: no view has a value, no byte may be read."""
        self.version += 1
        self.valid = Extent()
        self.lost = True
        self.fresh = False

    def keep_prefix(self, nbytes: int) -> None:
        """Only the first `nbytes` bytes remain valid; the base's value is still right for those."""
        self.version += 1
        self.valid.truncate(nbytes)
        self.views[self.root].version = self.version
