"""What a short run of a step leaves out, as a whole run shows it.

    found = LeftOut(whole, layers)
    found.stand_in[8000]    320: op 8000, of a layer that is left out, is as op 320, of the layer that stands in for it
    found.like[900]         511: the same of storages
    found.gaps              [LayerGap(start=412, end=9800), ...]: ops 412 to 9799 are of layers that are left out

Raises `Unlike` if a layer that is left out has done something else than the one that stands in for it: if not all of
its ops, one after the other, are the same op, with the same constants, on tensors of the same geometries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from functionalize.equal_layers.layers import FIRST, EqualLayers, Layer, is_equal
from functionalize.equal_layers.recorded_run import RunRecord, Unlike, born
from functionalize.ir.ops import OpRecord, TensorRef
from functionalize.ir.scalars import LiveNumber, expression_text
from functionalize.util.process_groups import same_boxed

_OWN = frozenset({"born", "module", "read", "hint"})  # entries of `meta` that are not compared
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})


class LayerGap(NamedTuple):
    """Ops of layers that are left out: from `start` to before `end`."""

    start: int
    end: int


class LeftOut:
    """A whole run of a step, of which a short one leaves out layers.

    is_left_out: for each op. stand_in: for each op of a layer that is left out, the one of the layer that stands in for
    it; else itself. like: the same of storages; those of other layers are not in it.
    moved: storages whose lives a short run does not show: of layers that are left out, of those that stand in for them,
    and all that ops in gaps allocate or free.
    """

    def __init__(self, whole: RunRecord, layers: EqualLayers) -> None:
        self.whole, self.layers = whole, layers
        self.is_left_out = [layers.is_left_out(layer) for layer in whole.layers]
        for record, is_out in zip(whole.records, self.is_left_out, strict=True):
            if is_out and id(record) in whole.frozen:
                raise Unlike("layers read numbers that are constants of the program")
        self.stand_in = self._aligned()
        self.like = self._like()
        self.gaps = list(self._gaps())
        self.moved = self._moved()

    def _aligned(self) -> list[int]:
        found, records = list(range(len(self.whole.records))), self.whole.records
        places: defaultdict[Layer | None, list[int]] = defaultdict(list)
        for at, layer in enumerate(self.whole.layers):
            places[layer].append(at)
        for number, run in enumerate(self.layers.runs):
            like = places[number, FIRST - 1]
            for place in run.left_out:
                own, name = places[number, place], run.names[place]
                if len(own) != len(like):
                    raise Unlike(f"`{name}` has {len(own)} ops, the layers before it {len(like)}")
                for at, other in zip(own, like, strict=True):
                    if not _are_alike(records[at], records[other]):
                        target = records[at].target
                        raise Unlike(f"`{name}` runs {target} otherwise than the layers before it")
                    found[at] = other
        return found

    def _like(self) -> dict[int, int]:
        whole, found = self.whole, dict[int, int]()
        for serial, name in whole.names.items():
            own = self.layers.name_in_stand_in(name, whole.layers_of_storages[serial])
            if own not in whole.serials:
                raise Unlike(f"`{name}` has no counterpart in the layers before it")
            if own != name:
                found[serial] = whole.serials[own]
        for at, is_out in enumerate(self.is_left_out):
            if is_out and (made := born(whole.records[at])):
                found.update(zip(made, born(whole.records[self.stand_in[at]]), strict=True))
        for serial, like in found.items():
            if whole.sizes.get(serial) != whole.sizes.get(like):
                name = whole.infos[serial].name
                raise Unlike(f"{name} is resized otherwise than in the layers before it")
        return found

    def _gaps(self) -> Iterator[LayerGap]:
        start = None
        for at, is_out in enumerate([*self.is_left_out, False]):
            if is_out and start is None:
                start = at
            elif not is_out and start is not None:
                yield LayerGap(start, at)
                start = None

    def _moved(self) -> set[int]:
        whole, count = self.whole, len(self.is_left_out)
        changed = {
            serial
            for at, serial, _ in whole.notes.changes
            if 0 <= at < count and self.is_left_out[at]
        }
        stand_ins = {(number, FIRST - 1) for number in range(len(self.layers.runs))}
        of_layers = {s for s, layer in whole.layers_of_storages.items() if layer in stand_ins}
        return changed | of_layers | self.like.keys()


def is_same_op(one: OpRecord, other: OpRecord) -> bool:
    """Whether two records are of the same op, which ran in the same phase and a node of the same name."""
    if (
        one.target is not other.target
        or one.autograd_node != other.autograd_node
        or one.phase != other.phase
        or one.thread != other.thread
        or (one.makes is None) != (other.makes is None)
    ):
        return False
    own, others = one.meta, other.meta
    if own.keys() != others.keys():
        return False
    compared = own.keys() - _OWN
    return not compared or all(own[key] == others[key] for key in compared)


def same_constant(one: Any, other: Any) -> bool:
    """Whether two constants of ops are equal."""
    return same_boxed(one, other) if isinstance(one, torch.ScriptObject) else is_equal(one, other)


def _are_alike(one: OpRecord, other: OpRecord) -> bool:
    """Whether two ops of equal layers are the same, on tensors of the same geometries."""
    if not is_same_op(one, other):
        return False
    if one.makes and other.makes and count_of(one.makes) != count_of(other.makes):
        return False
    if [n for _, n in one.resized] != [n for _, n in other.resized]:
        return False
    if "born" in one.meta and [*born(one).values()] != [*born(other).values()]:
        return False
    return (
        _look_alike(one.args, other.args)
        and _look_alike(one.outputs, other.outputs)
        and (not (one.kwargs or other.kwargs) or _look_alike(one.kwargs, other.kwargs))
    )


def count_of(makes: tuple[int, int, bool]) -> tuple[int, bool]:
    """How many autograd nodes were made, and whether gradients were enabled."""
    return makes[1] - makes[0], makes[2]


def _look_alike(one: Any, other: Any) -> bool:
    """Whether two arguments are equal but for the storages of tensors. Geometries of one recording are shared."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is TensorRef:
        return one[1] is other[1] or bool(one[1] == other[1])
    if kind is list or kind is tuple:
        if len(one) != len(other):
            return False
        for a, b in zip(one, other, strict=True):
            if type(a) is TensorRef and type(b) is TensorRef:  # nearly all
                if a[1] is not b[1] and a[1] != b[1]:
                    return False
            elif not _look_alike(a, b):
                return False
        return True
    if kind in _PLAIN:
        return bool(one == other)
    if kind is dict:
        return one.keys() == other.keys() and all(_look_alike(one[k], other[k]) for k in one)
    if kind is LiveNumber:
        return expression_text(one.expression) == expression_text(other.expression)
    return one is other or same_constant(one, other)
