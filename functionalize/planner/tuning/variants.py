"""Variants of the model that a script builds: fewer of its equal layers, another mesh, a policy.

    layers = layers_of(built)                     name -> module: what `fully_shard` wraps below a root, outermost
    runs(built)                                   [Run("model.layers", ["layers.0", ..., "layers.31"])]
    builder = VariantBuilder(build)               as `build`, with a parameter `variant`
    builder(size="8B", variant=Variant(keep=2))   two layers of each run

A run is a sequence of equal layers in one `ModuleList`, `Sequential` or `ModuleDict`: of one class, with parameters and
submodules of the same shapes and classes. What a run costs is linear in its length, so two short models tell it.
Invariant: a variant without `keep` is the model of the script, layer for layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn, optim

from functionalize._compat.graphs import pytree
from functionalize.fsdp.objects import fsdp_states
from functionalize.planner.sweep.changes import modules_of
from functionalize.planner.tuning.policy import LayerPolicy, Mesh, apply_to

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Run:
    """Equal layers that follow each other in a container.

    names: their fully qualified names. removable: whether the container can do with fewer.
    """

    container: str
    names: tuple[str, ...]
    removable: bool = True


@dataclass(frozen=True)
class Variant:
    """What is changed in a model.

    mesh: given to the parameter `mesh` of `build`; None: `build` makes its own.
    keep: the first so many layers of each run; None: all. more: the number of the run of which one more is kept.
    policy: of every layer, or by name; None: as built.
    """

    mesh: tuple[tuple[str, int], ...] | None = None
    keep: int | None = None
    more: int | None = None
    policy: LayerPolicy | tuple[tuple[str, LayerPolicy], ...] | None = None

    def __str__(self) -> str:  # for a reader; `repr` tells variants apart
        layers = "all layers" if self.keep is None else f"{self.keep} layers of each run"
        own = "one policy" if isinstance(self.policy, LayerPolicy) else "a policy each"
        return f"{layers}, {'as built' if self.policy is None else own}"


class VariantBuilder:
    """The `build` of a script with one more parameter, `variant`."""

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build
        own = inspect.signature(build)
        parameters = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        variant = inspect.Parameter("variant", inspect.Parameter.KEYWORD_ONLY, default=Variant())
        rest = [p for p in own.parameters.values() if p.kind is p.VAR_KEYWORD]
        self.__signature__ = own.replace(parameters=[*parameters, variant, *rest])

    def __call__(self, *args: Any, variant: Variant = Variant(), **kwargs: Any) -> Any:
        if variant.mesh is not None:
            kwargs["mesh"] = device_mesh(dict(variant.mesh))
        built = self._build(*args, **kwargs)
        if variant.keep is not None:
            _shorten(built, variant.keep, variant.more)
        if variant.policy is not None:
            layers = layers_of(built)
            if isinstance(variant.policy, LayerPolicy):
                apply_to(dict.fromkeys(layers.values(), variant.policy))
            else:
                apply_to({layers[name]: each for name, each in variant.policy})
        return built


def device_mesh(sizes: Mesh, device: str = "cpu") -> Any:
    """The `DeviceMesh` of named dimensions over all ranks."""
    return dist.init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def layers_of(built: Any) -> dict[str, nn.Module]:
    """The outermost modules below a root that `fully_shard` wraps, by fully qualified name, in the order of the model.

    Of the first root that has some: a policy is applied to one model.
    """
    for root in modules_of(built):
        wrapped = {module for state in fsdp_states(root) for module in state._modules}
        found: dict[str, nn.Module] = {}
        for name, module in root.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in found)
            if module in wrapped and module is not root and not inside:
                found[name] = module
        if found:
            return found
    return {}


def runs(built: Any) -> list[Run]:
    """The layers of a model in runs of equal ones; a layer that is like none of its neighbours is a run of one."""
    found: list[Run] = []
    last: Any = None
    layers = layers_of(built)
    names = dict(_root_of(built, layers).named_modules()) if layers else {}
    for name, layer in layers.items():
        container = name.rpartition(".")[0]
        kind = container, _kind(layer)
        if kind == last:
            found[-1] = replace(found[-1], names=(*found[-1].names, name))
        else:
            found.append(Run(container, (name,), isinstance(names[container], _CONTAINERS)))
        last = kind
    return found


def _root_of(built: Any, layers: Mapping[str, nn.Module]) -> nn.Module:
    """The module under which the layers have their names."""
    name, layer = next(iter(layers.items()))
    return next(m for m in modules_of(built) if dict(m.named_modules()).get(name) is layer)


def _kind(layer: nn.Module) -> Any:
    """Equal for layers of the same structure."""
    return (
        tuple((name, type(each)) for name, each in layer.named_modules()),
        tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()),
        layer.training,
    )


def shortened(found: list[Run], keep: int, more: int | None) -> list[int]:
    """How many layers of each run are kept."""
    return [
        min(len(run.names), keep + (i == more)) if run.removable else len(run.names)
        for i, run in enumerate(found)
    ]


def _shorten(built: Any, keep: int, more: int | None) -> None:
    """Remove all but the first layers of each run from the model, and their parameters from optimizers."""
    every, layers = runs(built), layers_of(built)
    if not layers:
        return
    removed: set[int] = set()
    root = _root_of(built, layers)
    # From the last run back, and from the end of each: containers number their modules anew.
    for run, count in reversed([*zip(every, shortened(every, keep, more), strict=True)]):
        container: Any = root.get_submodule(run.container)
        for name in reversed(run.names[count:]):
            removed |= {id(p) for p in layers[name].parameters()}
            key = name.rpartition(".")[2]
            del container[key if isinstance(container, nn.ModuleDict) else int(key)]
    for each in pytree.tree_leaves(built):
        if isinstance(each, optim.Optimizer):
            for group in each.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in removed]
