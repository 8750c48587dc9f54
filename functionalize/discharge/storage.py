"""The memory model: what each storage holds now, as a value. Knows no ops.

    FunctionalStorage                         View (one per geometry seen)
    root ───── geometry of the base           parent ── the geometry it was taken from
    base ───── the value of the root          step ──── how to get there, and back
    parts ──── what was written since         value, version ── kept until these bytes change
    version ── counts changes of contents

Reading a view whose version is old regenerates it from the base through its chain of steps; writing a
view goes the other way, by each step's inverse. See Notes [Reading a stale view] and [Parts to come].

Invariant: a value has exactly the size, stride and dtype of the geometry it is bound to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from functionalize.discharge.byte_ranges import Extent, check_bounds, check_overlap
from functionalize.discharge.pending_writes import Part, Parts, joined
from functionalize.discharge.values import Emitter, Step, Value, View
from functionalize.errors import (
    InvariantError,
    UndefinedContentsError,
)
from functionalize.ir.ops import Geometry, contiguous_geometry


@dataclass(slots=True, eq=False)
class FunctionalStorage:
    """The record of one storage; sizes in bytes.

    original_base, original_nbytes: as on entry (of a storage born inside: as at birth).
    external: an input's storage, whose bytes around the root can be asked for.
    parts: what was written and is not in the base yet, if anything; floor: the version of the base without them.
    valid: which bytes may be read. written: whether the contents differ from entry.
    lost: whether the contents of entry were given up.
    intact: neither resized nor widened, and the root lies in it: every value may be read, without a look at `valid`.
    widened: the root is the whole storage, see Note [Widening the base].
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
    floor: int = 0
    written: bool = False
    lost: bool = False
    widened: bool = False
    valid: Extent = field(init=False)
    intact: bool = field(init=False)
    parts: Parts | None = None
    views: dict[Geometry, View] = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.original_base
        self.nbytes = self.original_nbytes
        self.valid = Extent((0, self.nbytes))
        self.intact = self.root.end <= self.nbytes
        version = self.version if self.nbytes or not self.root.numel else -1
        self.views = {self.root: View(self.root, None, None, self.base, version)}

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

    def _reach(self, geometry: Geometry, emit: Emitter) -> View:
        """The view of `geometry`, with a root that holds it."""
        found = self.views.get(geometry)
        if found is not None and self._holds(found):
            return found
        is_whole = self.widened and self.root.end >= self.nbytes
        if not is_whole and (found is not None or not self._holds(View(geometry))):
            self._widen(emit, geometry.dtype.itemsize)
            found = self.views.get(geometry)
        if found is None:
            found = self.views[geometry] = View(geometry)
        if not self._holds(found):  # seen through a view that reaches past the end: go straight
            found.parent = found.step = None
        return found

    def _holds(self, view: View) -> bool:
        """Whether the way back from a view ends at the root, or at a window inside the root's memory."""
        if self._is_uneven(view.geometry):
            return False
        while view.step is not None and view.parent is not None:
            view = self.views[view.parent]
        g, root = view.geometry, self.root
        if g == root or not g.numel:
            return True
        inside = root.is_dense and root.start <= g.start and g.end <= root.end
        return inside and root.start % max(g.dtype.itemsize, root.dtype.itemsize) == 0

    def _is_uneven(self, geometry: Geometry) -> bool:
        """Whether a storage of entry is no whole number of elements: torch's `*_scatter` refuse that."""
        if self.widened or not self.external or geometry == self.root:
            return False
        sizes = (geometry.dtype.itemsize, self.root.dtype.itemsize)
        return any(self.original_nbytes % size for size in sizes)

    def _widen(self, emit: Emitter, itemsize: int) -> None:
        """Note [Widening the base]

        A storage's first root is the tensor it was first seen through, which may be a window on a larger
        storage, have gaps, or be too short since the storage grew. A view past that window makes the whole
        storage the root. The bytes around the window are as on entry: every write so far went through it.
        The root may be a little longer than the storage, to be a whole number of elements of any dtype.
        """
        self._settle(emit)
        window = self.views[self.root]
        has_entry = bool(self.external and self.original_nbytes and not self.lost)
        has_base = window.version == self.version and (self.written or not has_entry)
        has_base = has_base and self.root.numel > 0
        end = max(self.nbytes, self.root.end if has_base else 0, has_entry * self.original_nbytes)
        dtype = self.root.dtype
        unit = max(itemsize, *(g.dtype.itemsize for g in self.views))
        uneven = end % unit != 0 or (has_entry and self.original_nbytes % unit != 0)
        if uneven:
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
        self.views[flat] = View(flat, None, None, whole, self.version)
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
        """The value of a view now.

        Note [Reading a stale view]
        A view's value is kept with the version it was read at. If the storage changed since, the value is
        regenerated by replaying the steps from the nearest ancestor that is current where the view is: parts
        written elsewhere can wait. This is all FSDP needs: the weight that autograd saved in forward is a view
        of a storage, and when backward reads it the storage holds the second all-gather.
        """
        found = self.views.get(geometry)
        if (
            found is not None
            and (found.version == self.version or self._is_current(found, geometry))
            and (self.intact or self.valid.covers(geometry.start, geometry.end))
        ):
            return found.value
        if geometry.numel == 0:
            return emit.empty(geometry, self.device)
        check_bounds(self.name, geometry, self.nbytes, self.original_nbytes, "reads")
        if not self.intact and not self.valid.covers_view(geometry):
            raise UndefinedContentsError(
                f"reads `{self.name}` ({geometry}), whose storage was grown to {self.nbytes} bytes and "
                "some of these bytes were not written since: write to all of them first"
            )
        return self.peek(geometry, emit)

    def peek(self, geometry: Geometry, emit: Emitter) -> Value:
        """The value of a view, bytes with undefined contents included."""
        return self._regenerate(self._reach(geometry, emit), emit)

    def whole(self, emit: Emitter) -> Value:
        """The base, with all that was written."""
        self._settle(emit)
        return self.base

    def _is_current(self, view: View, window: Geometry) -> bool:
        """Whether a view's value is right in `window`, a part of the view: no write since has met that."""
        if view.version == self.version:
            return True
        if not self.parts or view.version < self.floor:
            return False
        return not self.parts.newer(window.start, window.end, view.version)

    def _regenerate(self, view: View, emit: Emitter) -> Value:
        chain: list[tuple[View, Step]] = []
        window = view.geometry
        while not self._is_current(view, window):
            if view.geometry == self.root:
                if self.parts:
                    self._settle(emit)
                    continue
                if self.valid.spans:
                    raise InvariantError(f"`{self.name}`: the base is older than the storage")
                view.hold(emit.empty(self.root, self.device), self.version)
                break
            parent, step = self._link(view)
            chain.append((view, step))
            view = parent
        version = view.version
        for child, step in reversed(chain):
            child.hold(step.regenerate(emit, view), version)
            view = child
        view.version = self.version
        return view.value

    # -- writes --------------------------------------------------------------------------------

    def check_writable(self, geometry: Geometry) -> None:
        """Raise unless a write of `geometry` is well defined."""
        check_overlap(self.name, geometry)
        check_bounds(self.name, geometry, self.nbytes, self.original_nbytes, "writes")

    def scatters(self, geometry: Geometry) -> bool:
        """Whether a write of `geometry` is copied into its parent, so that it may have any strides."""
        view = self.views.get(geometry)
        if view is None or view.step is None or not view.step.scatters:
            return False
        return self._holds(view) and not self._passes_overlap(view)

    def write(self, geometry: Geometry, value: Value, emit: Emitter, exact: bool = True) -> None:
        """Make `value` what `geometry` holds; the base becomes the inverse of the chain of views.

        A write that covers the base never reads the old one. A partial write of undefined contents starts
        from `empty`. exact: whether `value` has the strides of `geometry`; needed unless that `scatters`.

        Note [Parts to come]
        A write of a part makes a new base by a copy of all of it: to write N parts one by one would copy N
        times. So a part waits until something needs the base (see `_settle`); that is often never, or when
        the parts make up the whole. Until then a view is current if no part that came after it meets its
        bytes. The parts share no byte; one that runs into another, without covering it, makes the base.
        """
        self.check_writable(geometry)
        if not geometry.numel:
            return
        if exact and geometry == self.root:  # what follows comes to this
            self.parts = None
            self._rebase(value)
            self.written = True
            if not self.intact:
                self.valid.add_view(geometry)
            return
        view = self._reach(geometry, emit)
        if self._passes_overlap(view):  # no way back through a view that shows an element twice
            view.parent = view.step = None
            view = self._reach(geometry, emit)
        if geometry.nbytes == self.root.nbytes:
            self.parts = None
            self._apply(view, value, emit, exact)
        elif exact:
            self._postpone(view, value, emit)
        else:  # a value of any strides may be a view of anything
            self._settle(emit)
            self._apply(view, value, emit, exact)
        self.written = True
        self.valid.add_view(geometry)

    def _postpone(self, view: View, value: Value, emit: Emitter) -> None:
        part = Part(view, value, self.version + 1, emit.now)
        self.parts = self.parts or Parts()
        if not self.parts.put(part):
            self._settle(emit)
            part.version = self.version + 1
            self.parts = Parts()
            self.parts.put(part)
        self.version += 1
        view.hold(value, self.version)

    def _apply(self, view: View, new: Value, emit: Emitter, exact: bool = True) -> None:
        """The base after a write of `view`, by the inverses of its chain."""
        passed = [(view, new)] if exact else []
        while view.geometry != self.root:
            view, step = self._link(view)
            new = step.inverse(emit, new, partial(self._old, view, emit))
            passed.append((view, new))
        self._rebase(new)
        for view, new in passed:
            view.hold(new, self.version)

    def _rebase(self, base: Value) -> None:
        self.version += 1
        self.floor = self.version
        self.base = base
        self.views[self.root].hold(base, self.version)

    def _settle(self, emit: Emitter) -> None:
        """Put what was written in parts into the base: several that lie side by side by one `cat`."""
        if not self.parts:
            return
        parts, self.parts = self.parts, None
        order = sorted(parts, key=lambda part: part.version)
        before, self.version = self.floor, self.version + 1
        self.floor = self.version
        view: View | None = order[
            0
        ].view  # its ancestors hold what was there before, which `joined` needs
        while view is not None:
            if view is not order[0].view and view.version >= before:
                view.version = self.version
            is_root = view.geometry == self.root
            view = None if is_root else self._link(view)[0]
        with emit.made_for(order[-1].record):
            old = partial(self._old, self.views[self.root], emit)
            base = joined(emit, self.root, list(parts), old)
        if base is not None:
            self._rebase(base)
        else:
            for part in order:
                with emit.made_for(part.record):
                    self._apply(part.view, part.value, emit)
        for part in order:
            part.view.hold(part.value, self.version)

    def _passes_overlap(self, view: View) -> bool:
        while view.step is not None and view.parent is not None:
            if view.parent.overlaps:
                return True
            view = self.views[view.parent]
        return False

    def _old(self, view: View, emit: Emitter) -> Value:
        if self.views[self.root].version >= self.floor:
            return self._regenerate(view, emit)
        return emit.empty(view.geometry, self.device)

    # -- contents that go and come ---------------------------------------------------------------

    def retake_views(self) -> None:
        """Every view is taken of the base again on its next read, unless the base lacks what was written since."""
        root = self.views[self.root]
        if self.parts or root.version != self.version:
            return
        root.lists = {}
        for view in self.views.values():
            if view is not root:
                view.version = -1

    def forget(self) -> None:
        """The contents are gone: no view has a value, no byte may be read."""
        self.version += 1
        self.floor = self.version
        self.parts = None
        self.valid, self.intact = Extent(), False
        self.lost = True

    def keep_prefix(self, nbytes: int) -> None:
        """Only the first `nbytes` bytes remain valid; the base's value is still right for those."""
        self.valid.truncate(nbytes)
        self.intact = False
        if self.parts:
            return
        root = self.views[self.root]
        is_current = root.version == self.version
        self.version += 1
        self.floor = self.version
        if is_current:
            root.version = self.version
