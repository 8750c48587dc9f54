"""A whole run of a step and a short one, of other arguments: which ops and storages of the one are those of the other.

    same = Correspondence(left_out, short)
    same.ops[310]           312: op 310 of the whole run is op 312 of the short one; none for ops without a counterpart
    same.storages[17]       19: storage 17 of the whole run is storage 19 of the short one

        whole:   a   L   L   b   c   d   L   L   e          L: ops of layers that are in both
        short:   a   L   L   b   x   y   d   L   L   e      b and d correspond; c, x and y have no counterpart

The ops of layers must be the same in the same order, and use storages alike. Between them, from each side on, shared
ops correspond as long as they do: a loss may take a copy of a batch of two that it takes a view of for a batch of one.
A shared op may be of all layers at once, as an optimizer's, or the norm of all gradients: `of_all`. It must not depend
on the arguments; what it is computed from and computes has the geometries of the whole run.
Raises `Unlike`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from functionalize.equal_layers.left_out import LeftOut, count_of, is_same_op, same_constant
from functionalize.equal_layers.recorded_run import RunRecord, Unlike, born
from functionalize.ir.ops import NESTED, OpRecord, TensorRef, refs_in
from functionalize.ir.scalars import LiveNumber, expression_text


@dataclass(eq=False)
class _Pairing:
    """What two ops have in common.

    storages: pairs. is_of_all: whether they have lists of other lengths, or use what an op of all layers has made.
    is_changed: whether other geometries or constants differ.
    """

    storages: list[tuple[int, int]] = field(default_factory=list)
    is_of_all: bool = False
    is_changed: bool = False


class Correspondence:
    """ops: by places in the whole run. storages: by numbers of the whole run. of_all: places in the whole run.

    back: `storages`, the other way round. unshown: storages of the short run that have another geometry than in the
    whole run, as an op of all layers has made them.
    """

    def __init__(self, left_out: LeftOut, short: RunRecord) -> None:
        self.ops: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.of_all: set[int] = set()
        self.unshown: set[int] = set()
        self._whole, self._short, self._left_out = left_out.whole, short, left_out
        self.back: dict[int, int] = {}
        self._nodes: dict[int | None, int | None] = {}
        self._find()

    def _find(self) -> None:
        whole, short, left_out = self._whole, self._short, self._left_out
        if whole.serials.keys() != short.serials.keys():
            raise Unlike("other arguments let the step use other tensors from outside")
        for name, serial in whole.serials.items():
            self._note(serial, short.serials[name])
        own = [at for at, is_out in enumerate(left_out.is_left_out) if not is_out]
        places = [i for i, at in enumerate(own) if whole.layers[at] is not None]
        others = [at for at, layer in enumerate(short.layers) if layer is not None]
        if len(places) != len(others):
            raise Unlike("other arguments let layers run other ops")
        for i, other in zip(places, others, strict=True):
            if whole.layers[own[i]] != short.layers[other] or not self._match(own[i], other):
                target = whole.records[own[i]].target
                raise Unlike(f"other arguments let layers run other ops: {target}")
        start, other_start = 0, 0
        ends = zip([*places, len(own)], [*others, len(short.records)], strict=True)
        for end, other_end in ends:
            self._match_shared(own[start:end], range(other_start, other_end))
            start, other_start = end + 1, other_end + 1

    def _match_shared(self, own: list[int], others: range) -> None:
        """Match the shared ops between two ops of layers, from both sides."""
        count = min(len(own), len(others))
        front = next((i for i in range(count) if not self._match(own[i], others[i])), count)
        for i in range(1, count - front + 1):
            if not self._match(own[-i], others[-i]):
                break

    def _match(self, at: int, other_at: int) -> bool:
        """Note that two ops correspond, if they do."""
        one, other = self._whole.records[at], self._short.records[other_at]
        if not is_same_op(one, other) or one.meta.get("module") != other.meta.get("module"):
            return False
        if len(one.resized) != len(other.resized):
            return False
        if one.makes and other.makes and count_of(one.makes) != count_of(other.makes):
            return False
        found = _Pairing(
            [(a, b) for (a, _), (b, _) in zip(one.resized, other.resized, strict=True)]
        )
        is_pair = (
            self._pair(one.args, other.args, found)
            and self._pair(one.kwargs, other.kwargs, found)
            and self._pair_results(one, other, found)
        )
        if not is_pair or not self._fits(found.storages):
            return False
        in_node = one.seq_nr is not None and other.seq_nr is not None
        if in_node and self._nodes.setdefault(one.seq_nr, other.seq_nr) != other.seq_nr:
            return False
        if found.is_of_all:
            if self._whole.layers[at] is not None or found.is_changed or one.resized:
                return False
            self.of_all.add(at)
            self.unshown |= _unshown(one, other)
        for pair in found.storages:
            self._note(*pair)
        self.ops[at] = other_at
        return True

    def _fits(self, pairs: list[tuple[int, int]]) -> bool:
        """Whether pairs of storages fit to each other, and to those that are known."""
        own, back = dict[int, int](), dict[int, int]()
        for one, other in pairs:
            if one in self._left_out.like:
                continue  # of a layer that is left out: another one is in its place
            known = self.storages.get(one, own.get(one, other))
            if known != other or self.back.get(other, back.get(other, one)) != one:
                return False
            own[one], back[other] = other, one
        return True

    def _note(self, one: int, other: int) -> None:
        if one not in self._left_out.like:
            self.storages[one], self.back[other] = other, one

    def _pair(self, one: Any, other: Any, found: _Pairing) -> bool:
        kind = type(one)
        if kind is not type(other):
            return False
        if kind is TensorRef:
            found.storages.append((one[0], other[0]))
            if other[0] in self.unshown:
                found.is_of_all = True
            elif one[1] != other[1]:
                found.is_changed = True
        elif kind is list or kind is tuple:
            if len(one) != len(other):
                return _pair_lists(one, other, found)
            return all(self._pair(a, b, found) for a, b in zip(one, other, strict=True))
        elif kind is dict:
            if one.keys() != other.keys():
                return False
            return all(self._pair(value, other[key], found) for key, value in one.items())
        elif kind is LiveNumber:
            return expression_text(one.expression) == expression_text(other.expression)
        elif one is not other and not same_constant(one, other):
            found.is_changed = True
        return True

    def _pair_results(self, one: OpRecord, other: OpRecord, found: _Pairing) -> bool:
        own, others = refs_in([one.outputs]), refs_in([other.outputs])
        if len(own) == len(others) and len(born(one)) == len(born(other)):
            found.storages += zip(born(one), born(other), strict=True)
            found.storages += [(a[0], b[0]) for a, b in zip(own, others, strict=True)]
            return True
        return found.is_of_all


def _pair_lists(one: Any, other: Any, found: _Pairing) -> bool:
    """Two lists of other lengths, of an op of all layers: what the short run has must be in the whole one."""
    kinds = {type(each) for each in [*one, *other]}
    if not (one and other) or len(kinds) != 1 or kinds & NESTED:
        return False
    found.is_of_all = True
    return set(map(_look, other)) <= set(map(_look, one))


def _look(value: Any) -> Any:
    if type(value) is TensorRef:
        return value[1]
    return expression_text(value.expression) if type(value) is LiveNumber else value


def _unshown(one: OpRecord, other: OpRecord) -> set[int]:
    """The storages that an op of all layers makes in the short run, and that are others in the whole one."""
    own, others = refs_in([one.outputs]), refs_in([other.outputs])
    if len(own) != len(others):
        return set(born(other))
    return {b[0] for a, b in zip(own, others, strict=True) if a[1] != b[1]} & set(born(other))
