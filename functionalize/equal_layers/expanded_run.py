"""A short recording of a step with the layers put back that it leaves out.

        whole:   a   L1  L2  L3  L4  b        L1: the ops of layer 1
        short:   a'  L1'         L4' b'       of other arguments
        becomes  a'  L1' L2' L3' L4' b'

The ops of a layer that was left out, the storages that they use, and when these are allocated and freed, are those of
the whole recording; their constants, geometries and bytes are those of the layer that ran in its place, in the other
recording. All else is what that has, but for what ops next to a gap read from the layers in it.
Invariant: a recording that does not fit is not changed: `Unlike` is raised before `write`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from functionalize.equal_layers.correspondence import Correspondence
from functionalize.equal_layers.expanded_numbers import ExpandedNumbers
from functionalize.equal_layers.left_out import LayerGap, LeftOut
from functionalize.equal_layers.recorded_run import RunRecord, Unlike, born
from functionalize.ir.ops import NESTED, OpRecord, TensorRef, map_refs, refs_in, storages_in
from functionalize.ir.scalars import LiveNumber, map_numbers

_new_tuple = tuple.__new__
_CHANGED = frozenset({TensorRef, LiveNumber, *NESTED})


class ExpandedRun:
    """One short recording that becomes a whole one.

    ops: for each op of the whole recording, its place in the new one; None for one that is not in it.
    places: for each op of the short recording, its place in the new one.
    own: for each storage of the whole recording, its number in the new one; none for one that is not in it.
    gaps: each gap, with the op of the short recording before which it is.
    """

    def __init__(self, left_out: LeftOut, other: RunRecord) -> None:
        self.left_out, self.whole, self.other = left_out, left_out.whole, other
        self.same = Correspondence(left_out, other)
        self.gaps = [(gap, self._before(gap)) for gap in left_out.gaps]
        self.ops, self.places = self._place()
        # Storages of which the short recording does not show the lives: as in the whole one.
        self._unshown = {self.same.back[s] for s in self.same.unshown if s in self.same.back}
        self._moved = left_out.moved | self._unshown
        self.own: dict[int, int] = {}
        self._added: list[tuple[int, int]] = []  # storages of the whole run, with their numbers
        self._seen: list[TensorRef | None] = []  # by storage, the last reference that was made
        self._numbers = ExpandedNumbers(left_out, self.same, other)
        self._number()
        self._records = self._rewritten()
        self._changes = self._lives()
        self._sums = self._summed()

    def _before(self, gap: LayerGap) -> int:
        """The op of the short recording before which a gap is."""
        ops = self.same.ops
        before = -1 if gap.start == 0 else ops.get(gap.start - 1)
        after = len(self.other.records) if gap.end == len(self.whole.records) else ops.get(gap.end)
        if before is None and after is None:
            raise Unlike("other arguments let the step run other ops between layers")
        if before is not None and after is not None and after != before + 1:
            raise Unlike("other arguments let the step run other ops between layers")
        return after if after is not None else (before or 0) + 1

    def _place(self) -> tuple[list[int | None], list[int]]:
        ops: list[int | None] = [None] * len(self.whole.records)
        places, at = [], 0
        gaps = iter([*self.gaps, None])
        gap = next(gaps)
        for place in range(len(self.other.records) + 1):
            while gap is not None and gap[1] == place:
                for each in range(*gap[0]):
                    ops[each], at = at, at + 1
                gap = next(gaps)
            if place < len(self.other.records):
                places.append(at)
                at += 1
        for whole, found in self.same.ops.items():
            ops[whole] = places[found]
        return ops, places

    def _like(self, serial: int) -> int | None:
        """The storage of the short recording that gets the bytes there that one of the whole recording would get."""
        found = self.left_out.like.get(serial, serial)
        number = self.same.storages.get(found)
        return None if number in self.same.unshown else number

    def _number(self) -> None:
        """Number the storages: those of ops that ran have their numbers, others follow."""
        own, following = self.own, len(self.other.infos)
        for serial, name in self.whole.names.items():
            own[serial] = self.other.serials[name]
        for at, record in enumerate(self.whole.records):
            if not (made := born(record)):
                continue
            ran: Sequence[int] = ()
            if not self.left_out.is_left_out[at]:
                if at not in self.same.ops:
                    continue
                ran = tuple(born(self.other.records[self.same.ops[at]]))
                if len(ran) != len(made) and any(self.other.infos[s].alive for s in ran):
                    raise Unlike(f"the results of {record.target} outlive the step")
            if len(ran) != len(made):
                ran = range(following, following + len(made))
                following += len(made)
                self._added += zip(made, ran, strict=True)
                self._moved.update(made)
            own.update(zip(made, ran, strict=True))
        self._seen = [None] * following

    @property
    def made(self) -> dict[int, int]:
        """Of the storages that the whole run has made, the numbers in the new recording."""
        return {serial: n for serial, n in self.own.items() if serial not in self.whole.names}

    # -- ops -----------------------------------------------------------------------------------

    def _rewritten(self) -> list[tuple[Any, ...]]:
        """Of each op, in the new order: its record if it ran, its place in the whole recording, its values."""
        found: list[Any] = [None] * (len(self.places) + sum(self.left_out.is_left_out))
        matched = {other: at for at, other in self.same.ops.items()}
        moved = {n for s in self._moved if (n := self._like(s)) is not None}
        moved -= self.other.names.keys()
        for i, (place, record) in enumerate(zip(self.places, self.other.records, strict=True)):
            at = matched.get(i)
            if at is None:
                values = record.args, record.kwargs, record.outputs, record.resized
                used = storages_in([record]) | {ref.storage for ref in refs_in([record.outputs])}
                if not used.isdisjoint(moved) or not used.isdisjoint(self.same.unshown):
                    raise Unlike(f"{record.target} uses what layers have made that are left out")
                found[place] = record, None, (*values, born(record))
            else:
                found[place] = record, at, self._values(at, record)
        for at, is_out in enumerate(self.left_out.is_left_out):
            if is_out:
                like = self.other.records[self.same.ops[self.left_out.stand_in[at]]]
                found[self.ops[at] or 0] = None, at, self._values(at, like)
        return found

    def _values(self, at: int, found: OpRecord) -> tuple[Any, ...]:
        """Arguments, results, resizes and allocations of an op that the whole recording has.

        found: the op of the short recording that it is, or that stands in for it.
        """
        record, own = self.whole.records[at], self.own
        of_all = at in self.same.of_all
        stand_in = self.left_out.stand_in[at]
        like = None if stand_in == at else self.whole.records[stand_in]
        args = self._value(record.args, found.args, like and like.args, of_all)
        kwargs = record.kwargs
        if kwargs:
            kwargs = self._value(kwargs, found.kwargs, like and like.kwargs, of_all)
        outputs = self._value(record.outputs, found.outputs, like and like.outputs, of_all)
        resized: tuple[Any, ...] = ()
        if record.resized:
            sizes = zip(record.resized, found.resized, strict=True)
            resized = tuple((own[serial], size) for (serial, _), (_, size) in sizes)
        made: dict[int, Any] = {}
        if "born" in record.meta:
            looks = record.meta["born"] if of_all else born(found)
            made = dict(zip(map(own.__getitem__, born(record)), looks.values(), strict=True))
        return args, kwargs, outputs, resized, made

    def _value(self, value: Any, found: Any, like: Any, of_all: bool) -> Any:
        """A value of the whole recording, with the constants and geometries of the short one.

        like: of an op of a layer that is left out, the value of the op that stands in for it.
        """
        kind = type(value)
        if kind is TensorRef:
            return self._ref(value, found, like, of_all)
        if kind is list or kind is tuple:
            if len(value) != len(found):
                return map_numbers(self._numbers.of, map_refs(self._in_list, value))
            likes, ref = like if like is not None else repeat(None), self._ref
            new = [
                ref(v, f, s, of_all)
                if type(v) is TensorRef
                else self._value(v, f, s, of_all)
                if type(v) in _CHANGED
                else f
                for v, f, s in zip(value, found, likes, strict=False)
            ]
            return new if kind is list else tuple(new)
        if kind is dict:
            return {
                key: self._value(each, found[key], like and like[key], of_all)
                for key, each in value.items()
            }
        return self._numbers.of(value) if kind is LiveNumber and like is not None else found

    def _ref(self, value: TensorRef, found: TensorRef, like: Any, of_all: bool) -> TensorRef:
        serial = self.own.get(value[0])
        if like is not None:
            if value[0] == like[0]:
                serial = found[0]  # all layers use it
            elif serial is None:
                raise Unlike("layers that are left out use a tensor that is not in both runs")
        elif serial is None:
            serial = found[0]
        geometry = value[1] if of_all else found[1]
        seen = self._seen[serial]
        if seen is None or seen[1] is not geometry:
            seen = self._seen[serial] = _new_tuple(TensorRef, (serial, geometry))
        return seen

    def _in_list(self, ref: TensorRef) -> TensorRef:
        if ref[0] not in self.own:
            raise Unlike("an op of all layers uses a tensor that is not in both runs")
        return TensorRef(self.own[ref[0]], ref[1])

    # -- storages ------------------------------------------------------------------------------

    def _lives(self) -> list[tuple[int, int, int]]:
        """The changes of storages: of those that the short recording does not show, as in the whole one."""
        moved, own, count = self._moved, self.own, len(self._records)
        likes = {serial: self._like(serial) for serial in moved}
        sizes = {s: iter(self.other.sizes.get(n, ())) for s, n in likes.items() if n is not None}
        hidden = {own[serial] for serial in moved if serial in own} | self.same.unshown
        shown = _by_place(self.other.notes.changes, [*self.places, count])
        of_whole = _by_place(self.whole.notes.changes, [*self.ops, count])
        if any(serial in moved for serial, _ in of_whole.pop(None, ())):
            raise Unlike("tensors of layers are freed by ops that are not in both runs")
        found: list[tuple[int, int, int]] = []
        for place in range(count + 1):
            theirs = shown.get(place, [])
            for serial, nbytes in of_whole.get(place, ()):
                if serial in moved:
                    if nbytes and serial in sizes:
                        nbytes = next(sizes[serial], 0) or self._resized_otherwise()
                    found.append((place, own[serial], nbytes))
                    if theirs and theirs[0][0] in hidden:
                        theirs.pop(0)
                    continue
                number = own.get(serial)
                if number is None:  # of an op that only the whole recording has
                    number = theirs[0][0] if theirs else None
                at = next((i for i, each in enumerate(theirs) if each[0] == number), None)
                if at is not None and number not in hidden:
                    found.append((place, *theirs.pop(at)))
                elif serial in own:
                    self._check_free(serial)
            for number, nbytes in theirs:
                if number not in hidden:
                    if number in self.same.back and place in of_whole:
                        self._check_free(self.same.back[number])
                    found.append((place, number, nbytes))
        return found

    def _resized_otherwise(self) -> int:
        raise Unlike("other arguments let layers resize storages otherwise")

    def _check_free(self, serial: int) -> None:
        """Raise if a tensor that both recordings have should live alike: it is of a layer, or all ops are in both."""
        if len(self.same.ops) == len(self.other.records) or self.whole.layers_of_storages.get(
            serial
        ):
            raise Unlike("tensors outside of layers live otherwise without the layers left out")

    def _summed(self) -> dict[int, frozenset[int]]:
        found = {self.places[at]: used for at, used in self.other.notes.sums.items()}
        for at, used in self.whole.notes.sums.items():
            place = self.ops[at]
            if place is not None and all(serial in self.own for serial in used):
                found[place] = frozenset([self.own[serial] for serial in used])
            elif self.left_out.is_left_out[at]:
                raise Unlike("layers that are left out add gradients that are not in both runs")
        return dict(sorted(found.items()))

    def write(self) -> None:
        """Make the short recording the new one."""
        other, notes = self.other, self.other.notes
        for serial, number in self._added:
            self._add(serial, number)
        for serial in self._unshown | (self.left_out.like.keys() & self.whole.names.keys()):
            self._see(serial)
        other.records[:] = [self._record(*each) for each in self._records]
        notes.changes[:], notes.sums = self._changes, self._sums
        places = [*self.places, len(self._records)]
        notes.updates = [
            range(places[each.start], places[each[-1]] + 1 if each else places[each.start])
            for each in notes.updates
        ]

    def _record(self, record: OpRecord | None, at: int | None, values: tuple[Any, ...]) -> OpRecord:
        args, kwargs, outputs, resized, made = values
        if record is None:
            assert at is not None
            record = self._as(self.whole.records[at], self._numbers.reads.get(at))
        record.args, record.kwargs, record.outputs = args, kwargs, outputs
        record.resized = resized
        if made:
            record.meta["born"] = made
        return record

    def _as(self, like: OpRecord, read: OpRecord | None) -> OpRecord:
        """A record as another one, without values. read: the record itself, if the op returns a number to Python."""
        tape = self.other.tape
        if read is None:
            run = (
                like.thread,
                None,
                like.autograd_node,
                like.phase,
                None,
                dict(like.meta),
                like.live,
            )
            return OpRecord(like.target, (), {}, None, (), like.traceback, tape, *run)
        read.meta = {**like.meta, **read.meta}
        read.traceback, read.tape, read.thread = like.traceback, tape, like.thread
        read.autograd_node, read.phase, read.live = like.autograd_node, like.phase, like.live
        return read

    def _add(self, serial: int, number: int) -> None:
        """Add the entry of a storage that an op made which was left out."""
        info, like = self.whole.infos[serial], self._like(serial)
        found = self.other.infos[like] if like is not None else info
        entry = self.other.storages.add_freed(
            found.original_nbytes, found.device, info.name, found.seen.geometry
        )
        assert entry.serial == number
        entry.nbytes, entry.resized = found.nbytes, found.resized

    def _see(self, serial: int) -> None:
        """Note how a storage was seen last that only layers use which were left out, or ops of all layers."""
        info, like = self.other.infos[self.own[serial]], self._like(serial)
        found = self.whole.infos[serial] if like is None else self.other.infos[like]
        info.seen = TensorRef(info.serial, found.seen.geometry)
        info.nbytes, info.resized = found.nbytes, found.resized
        info.original_nbytes = found.original_nbytes


def _by_place(
    changes: Sequence[tuple[int, int, int]], places: Sequence[int | None]
) -> dict[int | None, list[tuple[int, int]]]:
    """Changes of storages by the place of their op in another recording; None: it is not there.

    What is noted before the first op counts as of that.
    """
    found: dict[int | None, list[tuple[int, int]]] = {}
    for at, serial, nbytes in changes:
        found.setdefault(places[at] if at > 0 else 0, []).append((serial, nbytes))
    return found
