"""Encodings of the guards and sources of a captured step (see program/json_codec.py); effects: effect_codecs.py.

Most are written as their fields, with live objects by name. Some guards compare objects by identity: a module's
children, its hooks (by the keys of its table, which are process-wide counters), parameters. Identities are not
saved; loading fills them in from this process. Numbers keep their saved values, so that the guard detects a change
at the first call.

Refusals: `Gone` for a guard whose objects no longer exist, which no call can pass; `LoadError` for a
module that has other hooks, an optimizer that has other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from functionalize._compat.distributed import dtensor_parts
from functionalize.errors import LoadError, SaveError
from functionalize.fsdp import objects as fsdp
from functionalize.fsdp import python_state as fsdp_state
from functionalize.ir.inputs import Call
from functionalize.program.json_codec import Form, plain_form
from functionalize.program.program_file import FORMS, attribute_form
from functionalize.saving.effect_codecs import effect_forms
from functionalize.saving.fingerprint import hook_names
from functionalize.saving.object_names import Names
from functionalize.state import sources
from functionalize.state import step_guards as guards
from functionalize.state.alias_guard import SharedGuard
from functionalize.state.hyperparameters import HyperparameterNumber
from functionalize.state.mode_guard import ModeGuard
from functionalize.state.tensor_attributes import ArgumentAttributes
from functionalize.walk.parts import Held, MovedPlace


class Gone(SaveError):
    """A guard of the program refers to objects that no longer exist."""


_PLAIN = (
    fsdp_state.Contents,
    fsdp_state.FSDPEffects,
    fsdp_state.FSDPState,
    fsdp_state.FSDPStateGuard,
    fsdp_state.Place,
    ArgumentAttributes,
    ModeGuard,
    guards.MetadataGuard,
    guards.SlotGuard,
    HyperparameterNumber,
    SharedGuard,
    sources.Gradient,
    sources.GroupTensor,
    sources.OptimizerParameter,
    sources.OptimizerState,
)
_NO_CALL = Call((), [])


def forms(names: Names, fn: Callable[..., Any]) -> list[Form]:
    """The forms of all classes that programs of the step `fn` may contain."""
    records, placements = dtensor_parts()
    return [
        *FORMS,
        *map(plain_form, (*_PLAIN, *records)),
        attribute_form(sources.Inner, 1),
        attribute_form(sources.ModuleTensor, 1),
        attribute_form(fsdp.FSDPTensor, 1),
        *(_form_of_attributes(kind, attributes) for kind, attributes in placements.items()),
        Form(Held, lambda held: _save_held(names, held), lambda *v: _load_held(names, *v)),
        Form(MovedPlace, lambda held: _save_held(names, held), lambda *v: _load_moved(names, *v)),
        Form(guards.ModuleGuard, _save_modules, _load_modules),
        Form(guards.ParameterGuard, _save_parameters, _load_parameters),
        Form(guards.HyperparameterGuard, _save_hyperparameters, _load_hyperparameters),
        *effect_forms(names, fn),
    ]


def _form_of_attributes(kind: Any, attributes: Sequence[str]) -> Form:
    def load(*values: Any) -> Any:
        return kind(**dict(zip(attributes, values, strict=True)))

    return Form(kind, lambda value: tuple(getattr(value, a) for a in attributes), load)


# -- places ----------------------------------------------------------------------------------------


_MOVED = "moved"  # a place whose content the step moves, by its name


def _save_held(names: Names, held: Held) -> tuple[Any, ...]:
    place = names.place(held)
    if place is not None:
        return place
    if isinstance(held.container, Held) or names.of(held.container) is not None:
        return held.container, held.key
    moved = names.movable(held)
    if moved is not None:
        return _MOVED, *moved
    raise SaveError(
        f"looks at {held.key!r} in a {type(held.container).__name__} that only its arguments lead to: "
        "let the step find it by itself (as a global, an attribute, a closure)"
    )


def _load_held(names: Names, *values: Any) -> Held:
    if len(values) == 4 and values[0] == _MOVED:
        return names.moved(*values[1:])
    return names.held(*values) if len(values) == 3 else Held(*values)


def _load_moved(names: Names, *values: Any) -> MovedPlace:
    held = _load_held(names, *values)
    return MovedPlace(held.container, held.key)


# -- modules ---------------------------------------------------------------------------------------


def _is_hooks(key: str) -> bool:
    return key.endswith("_hooks")


def _save_modules(guard: guards.ModuleGuard) -> tuple[Any, ...]:
    facts = []
    for module, name, was in zip(guard.modules, guard.names, guard.facts, strict=True):
        fact = dict(was)
        if fact["children"] != [id(child) for child in module._modules.values()]:
            raise Gone(f"is for other children of `{name}`")
        fact["children"] = list(module._modules)
        for key in filter(_is_hooks, was):
            if was[key] != list(vars(module)[key]):
                raise Gone(f"is for other hooks of `{name}`")
            fact[key] = hook_names(vars(module)[key])
        facts.append(fact)
    return guard.modules, guard.names, tuple(facts)


def _load_modules(
    modules: tuple[nn.Module, ...], names: tuple[str, ...], facts: tuple[dict[str, Any], ...]
) -> guards.ModuleGuard:
    for module, name, fact in zip(modules, names, facts, strict=True):
        if fact["children"] != list(module._modules):
            raise LoadError(f"needs `{name}` to have the children {fact['children']}")
        fact["children"] = [id(child) for child in module._modules.values()]
        for key in filter(_is_hooks, fact):
            now = hook_names(vars(module)[key])
            if fact[key] != now:
                raise LoadError(
                    f"needs the {key.strip('_')} of `{name}` to be {fact[key]}, they are {now}"
                )
            fact[key] = list(vars(module)[key])
    return guards.ModuleGuard(modules, names, facts)


# -- parameters ------------------------------------------------------------------------------------


def _save_parameters(guard: guards.ParameterGuard) -> tuple[Any, ...]:
    facts = []
    for source, name, fact in zip(guard.sources, guard.names, guard.facts, strict=True):
        if fact.same is not None:
            try:
                now = source.resolve(_NO_CALL)
            except IndexError:
                raise SaveError(f"has the parameter `{name}` as an argument") from None
            if now is not fact.same:
                raise Gone(f"is for another parameter `{name}`")
        facts.append((*fact[:-1], fact.same is not None))
    return guard.sources, guard.names, tuple(facts)


def _load_parameters(
    sources_: tuple[Any, ...], names: tuple[str, ...], facts: tuple[Any, ...]
) -> guards.ParameterGuard:
    found = []
    for source, name, (*fact, same) in zip(sources_, names, facts, strict=True):
        try:
            parameter = source.resolve(_NO_CALL) if same else None
            found.append(guards.LeafFacts._make((*fact, parameter)))
        except (LookupError, AttributeError):
            raise LoadError(f"needs the parameter `{name}`, which is not there") from None
    return guards.ParameterGuard(sources_, names, tuple(found))


# -- optimizers ------------------------------------------------------------------------------------


def _save_hyperparameters(guard: guards.HyperparameterGuard) -> tuple[Any, ...]:
    facts = []
    groups = guard.optimizer.param_groups
    for i, was in enumerate(guard.facts):
        if i >= len(groups) or was["params"] != tuple(map(id, groups[i]["params"])):
            raise Gone(f"is for other parameters of `{guard.name}`")
        facts.append({**was, "params": len(was["params"])})
    return guard.optimizer, guard.name, tuple(facts), guard.lifted


def _load_hyperparameters(
    optimizer: Any, name: str, facts: tuple[dict[str, Any], ...], lifted: frozenset[Any]
) -> guards.HyperparameterGuard:
    groups = optimizer.param_groups
    if [len(g["params"]) for g in groups] != [fact["params"] for fact in facts]:
        raise LoadError(f"needs `{name}` to have the groups of parameters that it had")
    for group, fact in zip(groups, facts, strict=True):
        fact["params"] = tuple(map(id, group["params"]))
    return guards.HyperparameterGuard(optimizer, name, facts, lifted)
