"""The equal layers of a model, and those that a short run of a step leaves out.

    found = EqualLayers.of(roots.walk())
    found.runs                          [LayerRun("model.blocks", 126 layers)]
    found.left_out                      layers 3 to 123 of it
    found.of_module("model.blocks.7.attention")      (0, 7)
    found.stand_in((0, 7))                           (0, 2): layer 2 runs in the place of layer 7

A run is a sequence of layers that follow each other in a `ModuleList`, `Sequential` or `ModuleDict` and are equal: of
one class, with the same modules, parameters of the same geometry, the same hooks and the same attributes. Numbers and
texts among the attributes may differ, as the number of a layer does; `differing` names these, see `short_run.py`.
What FSDP2 keeps for a layer is not compared: the first recording shows what it does in each.
Invariant: what is not understood is different.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from functionalize._compat.modules import ReportedCall, without_reports
from functionalize._compat.references import address
from functionalize.util.tensor_wrappers import plain_tensors

Layer = tuple[int, int]  # the number of a run, and of a layer in it
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# How many layers of a run a short run runs, the first and the last ones. The last of the first ones stands in for
# those left out.
FIRST, LAST = 3, 2
_SHORTEST = FIRST + LAST + 3
_PLAIN = frozenset({bool, int, float, complex, str, bytes, types.NoneType})
_ATOMS = (torch.dtype, torch.device, torch.memory_format, torch.Size, type, types.ModuleType)
# Attributes of a module that are compared apart, and hooks that no step calls.
_APART = frozenset({"_parameters", "_buffers", "_modules"})
_OF_STATE_DICTS = re.compile("_(load_)?state_dict_(pre_|post_)?hooks")
_HOOKS = re.compile("_(forward|backward)_(pre_)?hooks(_with_kwargs|_always_called)?")
_OF_FSDP = "__composable_api_state_key"
_DEEPEST = 16
_EMPTY = types.CellType()


@dataclass(frozen=True)
class LayerRun:
    """Equal layers that follow each other. names: their full names. modules: themselves."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    @property
    def left_out(self) -> range:
        """The numbers of the layers that a short run leaves out."""
        return range(FIRST, len(self.modules) - LAST)


@dataclass(frozen=True, eq=False)
class EqualLayers:
    """The runs of equal layers of a step's models.

    differing: by class, the attributes with values of their own in some layers. parameters: the full names of the
    parameters of layers, by address.
    """

    runs: tuple[LayerRun, ...]
    differing: Mapping[type, frozenset[str]]
    parameters: Mapping[int, str]
    _layers: dict[str, Layer] = field(default_factory=dict)

    @staticmethod
    def of(named: Iterable[tuple[str, nn.Module]], read: Set[str] = frozenset()) -> EqualLayers:
        """named: every module of the step with its full name. read: attributes that must be equal, with their classes
        (`Attention.layer_idx`)."""
        runs: list[LayerRun] = []
        differing: dict[type, set[str]] = {}
        inside: set[int] = set()  # addresses of modules inside of a run
        for name, container in named:
            if not isinstance(container, CONTAINERS) or address(container) in inside:
                continue
            children = [(f"{name}.{own}", child) for own, child in container._modules.items()]
            for run, unlike in _runs(children, read):
                runs.append(run)
                inside |= {address(m) for layer in run.modules for m in layer.modules()}
                for kind, attributes in unlike.items():
                    differing.setdefault(kind, set()).update(attributes)
        layers = {
            _joined(name, own): (number, place)
            for number, run in enumerate(runs)
            for place, (name, layer) in enumerate(zip(run.names, run.modules, strict=True))
            for own, _ in layer.named_modules()
        }
        parameters = {
            address(parameter): f"{name}.{own}"
            for run in runs
            for name, layer in zip(run.names, run.modules, strict=True)
            for own, parameter in layer.named_parameters()
        }
        frozen = {kind: frozenset(attributes) for kind, attributes in differing.items()}
        return EqualLayers(tuple(runs), frozen, parameters, layers)

    @property
    def left_out(self) -> list[nn.Module]:
        """The layers that a short run leaves out."""
        return [run.modules[place] for run in self.runs for place in run.left_out]

    @property
    def attributes(self) -> Set[str]:
        """The attributes that differ, as `read` of `of`."""
        return {text_of(kind, name) for kind, names in self.differing.items() for name in names}

    def of_module(self, name: str) -> Layer | None:
        """The layer that a module is, or is in."""
        return self._layers.get(name)

    def of_tensor(self, name: str) -> Layer | None:
        """The layer of a parameter, a buffer, or what is kept for one, by its full name."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._layers:
                return self._layers[name]
        return None

    def is_left_out(self, layer: Layer | None) -> bool:
        return layer is not None and layer[1] in self.runs[layer[0]].left_out

    def stand_in(self, layer: Layer | None) -> Layer | None:
        """The layer that runs in the place of one that is left out; another layer itself."""
        return (layer[0], FIRST - 1) if layer is not None and self.is_left_out(layer) else layer

    def name_in_stand_in(self, name: str, layer: Layer | None) -> str:
        """The name of the tensor of the stand-in that is in the place of one of a layer that is left out."""
        if layer is None or not self.is_left_out(layer):
            return name
        names = self.runs[layer[0]].names
        return name.replace(f"{names[layer[1]]}.", f"{names[FIRST - 1]}.", 1)


def _joined(name: str, own: str) -> str:
    return f"{name}.{own}" if own else name


def _runs(
    children: Sequence[tuple[str, nn.Module]], read: Set[str]
) -> Iterator[tuple[LayerRun, dict[type, set[str]]]]:
    """The runs among the modules of a container that are long enough, with the attributes that differ in each."""
    start = 0
    while start < len(children):
        first, end, differing = children[start][1], start + 1, dict[type, set[str]]()
        while end < len(children) and are_equal(first, children[end][1], differing, read):
            end += 1
        if end - start >= _SHORTEST:
            names, modules = zip(*children[start:end], strict=True)
            yield LayerRun(names, modules), differing
        start = end


def are_equal(
    one: nn.Module,
    other: nn.Module,
    differing: dict[type, set[str]],
    read: Set[str] = frozenset(),
) -> bool:
    """Whether two layers are equal. differing: is extended by the attributes with values of their own."""
    if one is other:
        return False
    parts, others = list(one.named_modules()), list(other.named_modules())
    if [(name, type(part)) for name, part in parts] != [(name, type(p)) for name, p in others]:
        return False
    likeness = _Likeness({address(a): b for (_, a), (_, b) in zip(parts, others, strict=True)})
    for (_, a), (_, b) in zip(parts, others, strict=True):
        if not likeness.of_modules(a, b):
            return False
    if any(text_of(kind, name) in read for kind, name in likeness.differing):
        return False
    for kind, name in likeness.differing:
        differing.setdefault(kind, set()).add(name)
    return True


def text_of(kind: type, name: str) -> str:
    """An attribute of a class, as text."""
    return f"{kind.__qualname__}.{name}"


class _Likeness:
    """Compares the parts of two layers. parts: of a module of the one, by its address, that of the other."""

    def __init__(self, parts: Mapping[int, nn.Module]) -> None:
        self._parts = parts
        self.differing: set[tuple[type, str]] = set()

    def of_modules(self, a: nn.Module, b: nn.Module) -> bool:
        for table in ("_parameters", "_buffers"):
            if not self._same(vars(a)[table], vars(b)[table], 0):
                return False
        own, others = _attributes(a), _attributes(b)
        if own.keys() != others.keys():
            return False
        for name, value in own.items():
            other = others[name]
            if _HOOKS.fullmatch(name):  # by their numbers, which are of the process
                value, other = [*value.values()], [*other.values()]
            if self._same(value, other, 0):
                continue
            if not (type(value) in _PLAIN and type(other) in _PLAIN) or name == "training":
                return False
            self.differing.add((type(a), name))
        return True

    def _same(self, a: Any, b: Any, depth: int) -> bool:
        """Whether code that finds `a` in one layer and `b` in the other does the same with them."""
        if a is b:
            return True
        if type(a) is not type(b) or depth > _DEEPEST:
            return False
        deeper = depth + 1
        if type(a) in _PLAIN or isinstance(a, _ATOMS):
            return bool(a == b)
        if isinstance(a, Tensor):
            return _look(a) == _look(b)
        if isinstance(a, nn.Module):
            return self._parts.get(address(a)) is b
        if isinstance(a, dict):
            return [*a] == [*b] and all(self._same(a[key], b[key], deeper) for key in a)
        if isinstance(a, (list, tuple)):
            same = (self._same(x, y, deeper) for x, y in zip(a, b, strict=False))
            return len(a) == len(b) and all(same)
        if isinstance(a, (set, frozenset)):
            return bool(a == b)
        if isinstance(a, types.MethodType):
            return a.__func__ is b.__func__ and self._same_owner(a.__self__, b.__self__, deeper)
        if isinstance(a, types.FunctionType):
            return (
                a.__code__ is b.__code__
                and self._same(a.__defaults__, b.__defaults__, deeper)
                and self._same(a.__kwdefaults__, b.__kwdefaults__, deeper)
                and self._same(_closed_over(a), _closed_over(b), deeper)
            )
        if isinstance(a, partial):
            return self._same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), deeper)
        return _is_value(a) and is_equal(a, b)

    def _same_owner(self, a: Any, b: Any, depth: int) -> bool:
        """FSDP2's hooks are methods of the state that it keeps for each layer."""
        is_of_fsdp = type(a).__module__.startswith("torch.distributed.fsdp.")
        return type(a) is type(b) if is_of_fsdp else self._same(a, b, depth)


def _is_value(a: Any) -> bool:
    """Whether an object is no more than its fields, which `==` compares: of torch (a placement), a frozen dataclass."""
    kind: Any = type(a)
    frozen = dataclasses.is_dataclass(a) and kind.__dataclass_params__.frozen
    return kind.__eq__ is not object.__eq__ and (frozen or kind.__module__.startswith("torch."))


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, by their class's own rule."""
    try:
        return bool(one == other)
    except Exception:  # of a class of the user's, or of tensors
        return False


def _attributes(module: nn.Module) -> dict[str, Any]:
    """All but tensors and modules, what FSDP2 keeps, and a call that is only reported."""
    return {
        name: value
        for name, value in vars(module).items()
        if not (name in _APART or name.startswith(_OF_FSDP) or _OF_STATE_DICTS.fullmatch(name))
        and not (type(value) is ReportedCall and without_reports(value) is None)
    }


def _closed_over(function: types.FunctionType) -> tuple[Any, ...]:
    cells = function.__closure__ or ()
    return tuple(cell.cell_contents if cell != _EMPTY else cell for cell in cells)


def _look(tensor: Tensor) -> Any:
    """The class and the geometry of a tensor, and of the tensors that it wraps."""
    inner = [(t.shape, t.stride(), t.storage_offset()) for t in plain_tensors(tensor)]
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, inner
