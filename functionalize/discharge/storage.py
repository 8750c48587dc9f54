"""The memory model: the current contents of each storage, as a value. Independent of ops.

    FunctionalStorage                         View (one per geometry seen)
    root ───── geometry of the base           parent ── the geometry it is a view of
    base ───── the value of the root          step ──── the view op between them, and its inverse
    pending ── writes not in the base yet     value, version ── valid until these bytes change
    version ── counts writes

Reading a view whose version is old regenerates it from the base through its chain of steps; writing a
view applies the inverses of these steps to get a new base. See Notes [Reading a stale view] and [Pending writes].

Note [Pending writes]
A partial write makes a new base by copying all of it: N partial writes one by one would copy it N times. So a
partial write is kept pending until an op needs the base (see `FunctionalStorage._flush`), often never, or not before
the writes make up the whole (`cat([w0, w1, w2, w3])`). Until then a view is current if no later pending write overlaps
its bytes. Pending writes are disjoint; a write that overlaps one of them without covering it flushes all of them first.

Invariants: a value has exactly the size, stride and dtype of the geometry it is bound to. The byte ranges of pending
writes, each from its first to its last byte, are disjoint; they are kept in ascending order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from functionalize.discharge.byte_ranges import Extent, check_bounds, check_overlap, undefined_text
from functionalize.discharge.values import Emitter, Value, View, ViewStep
from functionalize.errors import InvariantError, UndefinedContentsError
from functionalize.ir.ops import Geometry, OpRecord, contiguous_geometry

aten = torch.ops.aten
_LINE = 64  # bytes of a line of the cache, at which memory is allocated on CPUs


class FunctionalStorage:
    """The record of one storage; sizes in bytes.

    serial: the number of the storage in the recording. called: its name in messages, or the op whose output it is.
    root, base: a geometry of the storage, and the value of that geometry without the `pending` writes.
    original_base, original_nbytes: base and size on entry; of a storage made by the program: at its creation.
    make_step: returns the step between two geometries that no recorded view op connects.
    external: whether it is an input's storage, so that `emit.whole` can read its bytes outside of the root.
    version: the number of writes so far.
    pending: writes that are not in the base yet, or None; base_version: the version of the base without them.
    copied: of a copy of undefined bytes: what a read of these bytes says; else None.
    written: whether the contents may differ from those on entry.
    entry_lost: whether the contents of entry were dropped (by a resize to 0 bytes).
    intact: never resized nor widened, and the root lies inside: every byte is valid, and reads skip that check.
    widened: whether the root is the whole storage, see Note [Widening the base].
    views: every geometry seen so far. top: that of the root.
    """

    __slots__ = (
        *("_valid", "base", "base_version", "called", "copied", "device", "entry_lost", "external"),
        *("intact", "make_step", "nbytes", "original_base", "original_nbytes", "pending", "root"),
        *("serial", "top", "version", "views", "widened", "written"),
    )

    def __init__(
        self,
        serial: int,
        root: Geometry,
        device: torch.device,
        base: Value,
        nbytes: int,
        called: Any,
        make_step: Callable[[Geometry, Geometry], ViewStep],
        external: bool = False,
    ) -> None:
        self.serial, self.root, self.device = serial, root, device
        self.original_base, self.original_nbytes = self.base, self.nbytes = base, nbytes
        self.called, self.make_step, self.external = called, make_step, external
        self.version = self.base_version = 0
        self.written = self.entry_lost = self.widened = False
        self.copied: str | None = None
        self.pending: _PendingWrites | None = None
        self._valid: Extent | None = None
        self.intact = root.end <= nbytes
        top = View(root, None, None, base, 0 if nbytes or not root.numel else -1)
        self.top, self.views = top, {root: top}

    @property
    def name(self) -> str:
        return self.called if type(self.called) is str else f"output of {self.called}"

    @property
    def valid(self) -> Extent:
        """The bytes with defined contents; of most storages nothing asks for them."""
        self._valid = self._valid or Extent((0, self.original_nbytes))
        return self._valid

    # -- views ---------------------------------------------------------------------------------

    def add_view(self, parent: Geometry, child: Geometry, step: ViewStep) -> None:
        """Record that `step` derives `child` from `parent`; of several steps to one geometry the first is kept."""
        if child not in self.views and parent != child:
            if parent not in self.views:
                self.views[parent] = View(parent)
            self.views[child] = View(child, parent, step)

    def _parent_of(self, view: View) -> tuple[View, ViewStep]:
        """The view that `view` is derived from (the root if no op was recorded), and the step between them."""
        if view.step is not None and view.parent is not None:
            return self.views[view.parent], view.step
        return self.top, self.make_step(self.root, view.geometry)

    def _reachable_view(self, geometry: Geometry, emit: Emitter, write: bool = False) -> View:
        """The view of `geometry`, derived from the root; widens the root if it does not contain the geometry."""
        found = self.views.get(geometry)
        if found is not None and self._is_reachable(found, write):
            return found
        is_whole = self.widened and self.root.end >= self.nbytes
        if not (is_whole or found is None) or not self._is_reachable(View(geometry), write):
            self._widen(emit, geometry.dtype.itemsize)
            found = self.views.get(geometry)
        found = found or self.views.setdefault(geometry, View(geometry))
        # Its parents reach past the end of the storage: derive it from the root.
        if not self._is_reachable(found, write):
            found.parent = found.step = None
        return found

    def _is_reachable(self, view: View, write: bool = False) -> bool:
        """Whether the chain of a view's parents ends at the root, or at a geometry inside the root's memory."""
        if self._is_uneven(view.geometry, write and view.step is None):
            return False
        unit = view.geometry.dtype.itemsize  # a new base begins at offset 0, the root may not
        while view.step is not None and view.parent is not None:
            unit, view = max(unit, view.parent.dtype.itemsize), self.views[view.parent]
            if write and self._is_uneven(view.geometry, True):
                return False
        g, root = view.geometry, self.root
        if not g.numel or (g == root and unit == root.dtype.itemsize):
            return True
        inside = g == root or (root.is_dense and root.start <= g.start and g.end <= root.end)
        return inside and root.start % max(unit, root.dtype.itemsize) == 0

    def _is_uneven(self, geometry: Geometry, scattered: bool) -> bool:
        """Whether the root's memory is no whole number of elements, which torch's `*_scatter` ops refuse."""
        root = self.root
        if geometry == root or not (scattered or self.external):
            return False
        entry = 0 if self.widened else self.original_nbytes
        span = root.end - root.start if scattered else 0
        sizes = (geometry.dtype.itemsize, root.dtype.itemsize)
        return any(nbytes % size for nbytes in (entry, span) for size in sizes)

    def _widen(self, emit: Emitter, itemsize: int) -> None:
        """Note [Widening the base]

        A storage's first root is the geometry of the first tensor seen on it, which may be a window on a larger
        storage, have gaps, or be too short since the storage grew. A view that reaches out of that window makes the
        whole storage the root. The bytes outside of the window are as on entry, since every write so far was inside.
        The new root may be a few bytes longer than the storage, to be a whole number of elements of every dtype seen.
        """
        self._flush(emit)
        window = self.top
        # Two sources of the new base: the storage as on entry, and the old base, pasted over it if it has been written
        # (or if there is no entry to read). Either may be missing.
        has_entry = bool(self.external and self.original_nbytes and not self.entry_lost)
        is_current = window.version == self.version and self.root.numel > 0
        has_base = is_current and (self.written or not has_entry)
        end = max(self.nbytes, self.root.end if has_base else 0, has_entry * self.original_nbytes)
        dtype = self.root.dtype
        unit = max(itemsize, *(g.dtype.itemsize for g in self.views))
        uneven = end % unit != 0 or (has_entry and self.original_nbytes % unit != 0)
        if uneven:  # a root of bytes, of a length that is a multiple of every item size
            dtype = torch.uint8
            end += -end % 16
        flat = contiguous_geometry((end // dtype.itemsize,), dtype)
        whole = None
        if has_entry:
            entry = contiguous_geometry((self.original_nbytes // dtype.itemsize,), dtype)
            whole = emit.whole(self.serial, entry)
            whole = whole if entry == flat else self._paste(emit, flat, entry, whole, None)
        if has_base:
            whole = self._paste(emit, flat, self.root, self.base, whole)
        elif whole is None:
            whole = emit.empty(flat, self.device)
        self.root, self.base = flat, whole
        if uneven:
            for view in self.views.values():
                view.version = -1
        self.top = self.views[flat] = View(flat, None, None, whole, self.version)
        window.parent = window.step = None
        self.widened, self.intact = True, False

    def _paste(
        self, emit: Emitter, flat: Geometry, window: Geometry, value: Value, onto: Value | None
    ) -> Value:
        """`onto` (or undefined contents) of geometry `flat` with `value` at `window`."""
        return self.make_step(flat, window).inverse(
            emit, value, lambda: emit.empty(flat, self.device) if onto is None else onto
        )

    # -- reads ---------------------------------------------------------------------------------

    def read(self, geometry: Geometry, emit: Emitter) -> Value:
        """The current value of a view.

        Note [Reading a stale view]
        A view's value is kept with the version it was read at. If its bytes were written since, the value is
        regenerated: the steps are replayed from the nearest ancestor whose value is current in the bytes of this view;
        pending writes of other bytes stay pending. This is all FSDP needs: the weight that autograd saved in forward is
        a view of a storage, and when backward reads it the storage holds the second all-gather.
        """
        found = self.top if geometry is self.top.geometry else self.views.get(geometry)
        if (
            found is not None
            and (found.version == self.version or self._is_current(found, geometry))
            and (self.intact or self.valid.covers(geometry.start, geometry.end))
        ):
            return found.value
        if geometry.numel == 0:
            return emit.empty(geometry, self.device)
        if geometry.end > self.nbytes:
            check_bounds(self.name, geometry, self.nbytes, self.original_nbytes, "reads")
        if not self.intact and not self.valid.covers_view(geometry):
            text = self.copied or undefined_text(self.name, geometry, self.nbytes)
            raise UndefinedContentsError(text)
        return self.peek(geometry, emit)

    def read_in_place(self, geometry: Geometry, emit: Emitter) -> Value:
        """The current value of a view, as a view of the base if it does not begin where memory is allocated.

        Note [Bits by address]
        BLAS rounds by where its operands lie in a line of the cache. Memory is allocated at the beginning of a line,
        so a tensor that eager finds in the middle of a storage must not be read from memory of its own.
        """
        if geometry.start % _LINE and geometry.numel:
            view = self.views.get(geometry)
            while view is not None and view.geometry != self.root:
                if view.is_written:
                    self._flush(emit)
                    view.version = -1
                view = self.views[view.parent] if view.parent is not None else None
        return self.read(geometry, emit)

    def peek(self, geometry: Geometry, emit: Emitter) -> Value:
        """The value of a view, some bytes of which may be undefined: `read` without its checks."""
        return self._regenerate(self._reachable_view(geometry, emit), emit)

    def whole(self, emit: Emitter) -> Value:
        """The base, with every pending write applied."""
        self._flush(emit)
        return self.base

    def _is_current(self, view: View, window: Geometry) -> bool:
        """Whether a view's value is current in the bytes of `window`, a part of it: no later write overlaps these."""
        if view.version == self.version:
            return True
        if not self.pending or view.version < self.base_version:
            return False
        return not self.pending.newer(window.start, window.end, view.version)

    def _regenerate(self, view: View, emit: Emitter) -> Value:
        # Walk up to the nearest ancestor that is current, then replay the steps down to the view.
        chain: list[tuple[View, ViewStep]] = []
        window = view.geometry
        while not self._is_current(view, window):
            if view.geometry == self.root:
                if self.pending:
                    self._flush(emit)
                    continue
                if self.valid.spans:
                    raise InvariantError(f"`{self.name}`: the base is older than the storage")
                view.hold(emit.empty(self.root, self.device), self.version)
                break
            parent, step = self._parent_of(view)
            chain.append((view, step))
            view = parent
        version = view.version
        # An ancestor may be current in the bytes of `view` only: the views below it get its version, not the latest.
        for child, step in reversed(chain):
            child.hold(step.regenerate(emit, view), version)
            view = child
        view.version = self.version
        return view.value

    # -- writes --------------------------------------------------------------------------------

    def check_writable(self, geometry: Geometry) -> None:
        """Raise if `geometry` overlaps itself or reaches past the end of the storage."""
        if not geometry.is_writable(self.nbytes):
            check_overlap(self.name, geometry)
            check_bounds(self.name, geometry, self.nbytes, self.original_nbytes, "writes")

    def scatters(self, geometry: Geometry) -> bool:
        """Whether a write of `geometry` is emitted as a scatter into its parent: its value may have any strides."""
        view = self.views.get(geometry)
        if view is None or view.step is None or not view.step.scatters:
            return False
        return self._is_reachable(view, write=True) and not self._passes_overlap(view)

    def write(self, geometry: Geometry, value: Value, emit: Emitter, exact: bool = True) -> None:
        """Make `value` the contents of `geometry`; the inverses of the view's steps make the new base of it.

        A write that covers the base never reads the old one. A partial write of undefined contents starts
        from `empty`. exact: whether `value` has the strides of `geometry`; required unless `scatters(geometry)`.
        """
        self.check_writable(geometry)
        if not geometry.numel:
            return
        if exact and (
            geometry is self.root or geometry == self.root
        ):  # a shortcut for the general case below
            self.pending = None
            self._rebase(value)
            self.written = True
            if not self.intact:
                self.valid.add_view(geometry)
            return
        view = self._reachable_view(geometry, emit, write=True)
        if self._passes_overlap(view):
            # A parent that shows an element twice (`expand`) has no inverse.
            view.parent = view.step = None
            view = self._reachable_view(geometry, emit, write=True)
        if geometry.nbytes == self.root.nbytes:
            self.pending = None
            self._apply(view, value, emit, exact)
        elif exact:
            self._postpone(view, value, emit)
        else:  # a value of other strides may be a view of another tensor: copy it now
            self._flush(emit)
            self._apply(view, value, emit, exact)
        self.written = True
        self.valid.add_view(geometry)

    def _postpone(self, view: View, value: Value, emit: Emitter) -> None:
        write = _PendingWrite(view, value, self.version + 1, emit.record)
        self.pending = self.pending or _PendingWrites()
        if not self.pending.put(write):
            self._flush(emit)
            write.version = self.version + 1
            self.pending = _PendingWrites()
            self.pending.put(write)
        self.version += 1
        view.hold(value, self.version, is_written=True)

    def _apply(self, view: View, new: Value, emit: Emitter, exact: bool = True) -> None:
        """Write `new` to `view`: the inverses of the steps from the root to `view` make the new base of it."""
        passed = [(view, new)] if exact else []
        while view.geometry != self.root:
            view, step = self._parent_of(view)
            new = step.inverse(emit, new, partial(self._old_value, view, emit))
            passed.append((view, new))
        self._rebase(new)
        for view, new in passed:
            view.hold(new, self.version, is_written=view.geometry != self.root)

    def _rebase(self, base: Value) -> None:
        self.version = self.base_version = self.version + 1
        self.base = base
        self.top.hold(base, self.version)

    def _flush(self, emit: Emitter) -> None:
        """Apply the pending writes to the base: by one `cat` where they are adjacent, else one after the other."""
        if not self.pending:
            return
        writes, self.pending = self.pending, None
        order = sorted(writes, key=lambda write: write.version)
        before, self.version = self.base_version, self.version + 1
        self.base_version = self.version
        # Ancestors of the first write still hold the contents from before these writes, which `_joined` and the first
        # inverse read: mark them as current.
        view = order[0].view
        while view.geometry != self.root:
            view = self._parent_of(view)[0]
            if view.version >= before:
                view.version = self.version
        with emit.made_for(order[-1].record):
            old = partial(self._old_value, self.top, emit)
            base = _joined(emit, self.root, list(writes), old)
        if base is not None:
            self._rebase(base)
        else:
            for write in order:
                with emit.made_for(write.record):
                    self._apply(write.view, write.value, emit)
        for write in order:
            write.view.hold(write.value, self.version, is_written=True)

    def _passes_overlap(self, view: View) -> bool:
        while view.step is not None and view.parent is not None:
            if view.parent.overlaps:
                return True
            view = self.views[view.parent]
        return False

    def _old_value(self, view: View, emit: Emitter) -> Value:
        if self.top.version >= self.base_version:
            return self._regenerate(view, emit)
        return emit.empty(view.geometry, self.device)

    # -- contents dropped by a resize ------------------------------------------------------------

    def retake_views(self) -> None:
        """Make every view stale, so that its next read starts from the base; not if the base lacks a pending write."""
        if self.pending or self.top.version != self.version:
            return
        self.top.output_lists = None
        for view in self.views.values():
            if view is not self.top:
                view.version = -1

    def forget(self) -> None:
        """Drop the contents: no view has a current value, no byte is valid."""
        self.version = self.base_version = self.version + 1
        self.pending = None
        self.valid.truncate(0)
        self.intact, self.entry_lost = False, True

    def keep_prefix(self, nbytes: int) -> None:
        """Only the first `nbytes` bytes remain valid; the base's value is still current for those."""
        self.valid.truncate(nbytes)
        self.intact = False
        if self.pending:
            return
        before, self.version = self.version, self.version + 1
        self.base_version = self.version
        if self.top.version == before:
            self.top.version = self.version


# -- pending writes --------------------------------------------------------------------------------

# With gaps between them, fewer writes than this are scattered one by one: a `cat` would slice the old base per gap.
_FEW = 4


@dataclass(slots=True)
class _PendingWrite:
    """A write of `value` to `view`, which made version `version` of the storage; `record`: the op that wrote."""

    view: View
    value: Any
    version: int
    record: OpRecord | None

    @property
    def geometry(self) -> Geometry:
        """The geometry that was written."""
        return self.view.geometry


class _PendingWrites:
    """Pending writes ordered by first byte; a look-up is O(log n), an insertion at worst O(n)."""

    __slots__ = ("_starts", "_writes")

    def __init__(self) -> None:
        self._writes: list[_PendingWrite] = []
        self._starts: list[int] = []

    def __len__(self) -> int:
        return len(self._writes)

    def __iter__(self) -> Iterator[_PendingWrite]:
        return iter(self._writes)

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        lo = bisect_left(self._starts, start)
        if lo and self._writes[lo - 1].geometry.end > start:
            lo -= 1
        return lo, bisect_left(self._starts, end)

    def newer(self, start: int, end: int, version: int) -> bool:
        """Whether a pending write that overlaps [start, end) came after `version`."""
        lo, hi = self._overlapping(start, end)
        return any(self._writes[i].version > version for i in range(lo, hi))

    def put(self, write: _PendingWrite) -> bool:
        """Add a write in place of those that it covers; False, with nothing changed, if it overlaps one in part."""
        g = write.geometry
        lo, hi = self._overlapping(g.start, g.end)
        for old in self._writes[lo:hi]:
            covers = g.is_dense and g.start <= old.geometry.start and old.geometry.end <= g.end
            if not covers and old.geometry != g:
                return False
        self._writes[lo:hi] = [write]
        self._starts[lo:hi] = [g.start]
        return True


def _joined(
    emit: Emitter, root: Geometry, writes: Sequence[_PendingWrite], old: Callable[[], Any]
) -> Any:
    """The base as one `cat` of the written values and of the slices of `old()` between them.

    None if that is impossible (a write is no contiguous run of the root) or not worthwhile (fewer than `_FEW` writes,
    with gaps).
    """
    if len(writes) < 2 or not all(_is_run(g, root) for g in (root, *(w.geometry for w in writes))):
        return None
    edges = [root.start, *(e for w in writes for e in (w.geometry.start, w.geometry.end)), root.end]
    gaps = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
    flat = None
    if any(start < end for start, end in gaps):
        if len(writes) < _FEW:
            return None
        flat = _flat(emit, old(), root)
    pieces: list[Any] = []
    for i, (start, end) in enumerate(gaps):
        if start < end:
            at, to = ((b - root.start) // root.dtype.itemsize for b in (start, end))
            pieces.append(emit.call(aten.slice.Tensor, flat, 0, at, to))
        if i < len(writes):
            pieces.append(_flat(emit, writes[i].value, writes[i].geometry))
    whole = emit.call(aten.cat.default, pieces)
    return whole if len(root.size) == 1 else emit.call(aten.view.default, whole, list(root.size))


def _is_run(g: Geometry, root: Geometry) -> bool:
    """Whether `g` is a run of consecutive elements of the root."""
    inside = root.start <= g.start and g.end <= root.end
    return g.is_contiguous and g.dtype == root.dtype and inside and not g.conj and not g.neg


def _flat(emit: Emitter, value: Any, g: Geometry) -> Any:
    return value if len(g.size) == 1 else emit.call(aten.view.default, value, [g.numel])
