"""Encodings of what a step does to Python objects: places by their names, calls by what they call.

    self.n += 1; losses.append(loss.item())      the place that the walk of the live step calls `self.n`, `losses`
    print(f"step {self.n}: {loss:.3f}")          `sys.stdout`, the parts of the text
    logger.info("loss %s", loss.item())          the logger `train`, which the live step reaches
    scheduler.step()                             the scheduler that the live step reaches, the class whose `step` it is

A file holds no code: a replay of a program that was loaded assigns to places that the live step moves, and calls
`print`, loggers and schedulers of the live step, with numbers, texts and tensors.
Refusals: `SaveError` for other calls (bars, writers, functions of `fz.repeat`), objects among their arguments,
generators; `LoadError` for a place, a logger or a scheduler that is not there, and for options of `print` that write
elsewhere.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from functionalize._compat.graphs import pytree
from functionalize.calls.call_arguments import ArgumentForm, LateLeaf, TextLeaf, TextPart
from functionalize.calls.draws import DrawnNumber, Draws
from functionalize.calls.interceptors import ORIGINAL
from functionalize.calls.late_numbers import LateNumber, LateRead, LateValue
from functionalize.calls.logs import Logged, SilentFact
from functionalize.calls.printing import Printed, PrintFact, StreamFact
from functionalize.calls.schedulers import (
    SchedulerAssigned,
    SchedulerFact,
    SchedulerNumber,
    SchedulerStepped,
)
from functionalize.calls.warned import Warned
from functionalize.errors import FunctionalizeError, LoadError, SaveError
from functionalize.ir.outputs import Constant
from functionalize.program.field_types import checked
from functionalize.program.json_codec import Form, plain_form
from functionalize.program.program import Program
from functionalize.saving.object_names import Names
from functionalize.state.drawing import GeneratorSet, GeneratorState
from functionalize.state.hyperparameters import GroupNumber, HyperparameterSet
from functionalize.state.number_arguments import NumberArgument
from functionalize.state.place_effects import Appended, Assigned, FlagGuard, PlaceNumber
from functionalize.state.python_state import SurroundingsGuard
from functionalize.walk.live_places import LivePlaces, may_grow
from functionalize.walk.parts import Held

_NUMBERS = (int, float)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_STREAMS = ("stdout", "stderr")
_WARNINGS: dict[Any, type[Warning]] = {
    name: each
    for name, each in vars(builtins).items()
    if isinstance(each, type) and issubclass(each, Warning)
}
_OF_PRINT = frozenset({"sep", "end", "flush"})
# Effects that are saved or refused by name; all others are calls.
NAMED_EFFECTS = (
    *(Assigned, Appended, HyperparameterSet, Draws, GeneratorSet),
    *(Printed, Logged, Warned, SchedulerStepped, SchedulerAssigned, LateRead),
)


def effect_forms(names: Names, fn: Callable[..., Any]) -> list[Form]:
    """The forms of what a step does to Python objects, and of the guards and sources that go with it."""

    def of_place(kind: type, load: Callable[..., Any], *attributes: str) -> Form:
        def save(value: Any) -> tuple[Any, ...]:
            place = _saved_place(names, value.place, value.name)
            return place, *(getattr(value, each) for each in attributes)

        return Form(kind, save, lambda place, *rest: load(names.moved(*place), *rest))

    return [
        of_place(PlaceNumber, _load_number, "name", "kind"),
        Form(NumberArgument, lambda each: (each.leaf, each.name, each.kind), _load_argument),
        of_place(
            FlagGuard,
            lambda held, *v: FlagGuard(*checked(FlagGuard, (v[0], held, v[1]))),
            "name",
            "was",
        ),
        of_place(Assigned, lambda held, name: Assigned(*checked(Assigned, (name, held))), "name"),
        of_place(Appended, lambda held, name: Appended(*checked(Appended, (name, held))), "name"),
        Form(
            SurroundingsGuard,
            lambda guard: (guard.portable(), _save_live(names, guard.state.live)),
            lambda saved, live: SurroundingsGuard.loaded(fn, saved, _load_live(names, *live)),
        ),
        Form(DrawnNumber, lambda number: _refuse_draws(number.draws), _never),
        Form(Draws, _refuse_draws, _never),
        *(Form(kind, _refuse_generator, _never) for kind in (GeneratorState, GeneratorSet)),
        *map(plain_form, (LateLeaf, LateRead, LateValue, TextLeaf, ArgumentForm)),
        Form(TextPart, _save_part, _load_part),
        Form(LateNumber, _save_late, lambda what, source: LateNumber(what, source.now)),
        Form(GroupNumber, lambda number: _save_group_number(names, number), _load_group_number),
        Form(PrintFact, lambda fact: (), lambda: PrintFact(_print())),
        Form(StreamFact, lambda fact: (fact.name,), lambda name: StreamFact(*_stream(name))),
        Form(Printed, lambda printed: (printed.form, printed.stream), _load_printed),
        *_forms_of_loggers(names),
        Form(Warned, _save_warned, _load_warned),
        plain_form(SchedulerNumber),
        plain_form(SchedulerFact),
        plain_form(SchedulerAssigned),
        Form(SchedulerStepped, _save_stepped, _load_stepped),
    ]


def _never(*values: Any) -> Any:
    raise LoadError("holds what no file holds, since it is never saved: damaged")


def check_constants(program: Program, kind: type[FunctionalizeError]) -> None:
    """Raise an error of this kind for a program with effects that has an object among the constants it gives them."""
    for role in program.outputs:
        if isinstance(role, Constant) and type(role.value) not in _PLAIN:
            raise kind(
                f"keeps, prints or returns a constant of the type {type(role.value).__name__}, which a file cannot "
                "hold beside what a replay does in Python"
            )


# -- places ----------------------------------------------------------------------------------------


def _saved_place(names: Names, held: Held, name: str) -> tuple[Any, ...]:
    place = names.movable(held)
    if place is None:
        raise SaveError(
            f"reads or changes `{name}`, which the step's own objects do not lead to by names, so a file cannot name "
            "it: keep it in an attribute of an object that the step reaches by itself"
        )
    return place


def _load_argument(leaf: Any, name: Any, kind: Any) -> NumberArgument:
    if kind not in _NUMBERS:
        raise LoadError("has an argument that is no number: damaged")
    return NumberArgument(*checked(NumberArgument, (leaf, name, kind)))


def _load_number(held: Held, name: Any, kind: Any) -> PlaceNumber:
    if kind not in _NUMBERS:
        raise LoadError("has an input that is no number: damaged")
    return PlaceNumber(*checked(PlaceNumber, (held, name, kind)))


def _save_live(names: Names, live: LivePlaces) -> tuple[Any, ...]:
    values = [_saved_place(names, held, str(held.key)) for held in live.values.values()]
    lists = [names.movable_of_list(each) for each in live.lists.values()]
    if None in lists:
        raise SaveError(
            "appends to a list that a file cannot name: keep it in an attribute or a global"
        )
    numbers = [
        (_saved_place(names, live.values[at], "a container"), sorted(keys, key=repr))
        for at, keys in live.numbers.items()
        if at in live.values
    ]
    return values, lists, numbers


def _load_live(names: Names, values: Any, lists: Any, numbers: Any) -> LivePlaces:
    held = [names.moved(*place) for place in values]
    found = [names.moved(*place).resolve() for place in lists]
    if not all(map(may_grow, found)):
        raise LoadError("appends to what is no list here")
    return LivePlaces(
        {each.place: each for each in held},
        {id(each): each for each in found},
        {names.moved(*place).place: frozenset(map(tuple, keys)) for place, keys in numbers},
    )


def _refuse_draws(draws: Draws | GeneratorSet) -> tuple[Any, ...]:
    raise SaveError(f"{draws.what}, a generator that a file cannot name: draw outside of the step")


def _refuse_generator(value: GeneratorState | GeneratorSet) -> tuple[Any, ...]:
    return _refuse_draws(GeneratorSet(value.place))


# -- texts and late numbers ------------------------------------------------------------------------


def _save_part(part: TextPart) -> tuple[Any, ...]:
    function: Any = part.function
    template = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__mod__" and type(template) is str:
        function = template  # `"%.3f" % number`
    return function, part.args, part.then, part.late


def _load_part(function: Any, args: Any, then: Any, late: Any) -> TextPart:
    found = function.__mod__ if type(function) is str else function
    return TextPart(*checked(TextPart, (found, args, then, late)))


def _save_late(number: LateNumber) -> tuple[Any, ...]:
    source = getattr(number.now, "__self__", None)
    if not isinstance(source, (SchedulerNumber, GroupNumber)):
        raise SaveError(f"reads {number.what} after a call that sets it, which a file cannot name")
    return number.what, source


def _save_group_number(names: Names, number: GroupNumber) -> tuple[Any, ...]:
    for optimizer in names.roots.optimizers.values():
        for i, group in enumerate(optimizer.param_groups):
            if group is number.group:
                return optimizer, i, number.name, number.index
    raise SaveError(f"reads `{number.name}` of a parameter group that no optimizer has any more")


def _load_group_number(optimizer: Any, group: Any, name: Any, index: Any) -> GroupNumber:
    try:
        found = optimizer.param_groups[group]
    except (AttributeError, LookupError, TypeError):
        raise LoadError("reads a parameter group that is not there") from None
    return GroupNumber(*checked(GroupNumber, (found, name, index)))


# -- print and logging -----------------------------------------------------------------------------


def _print() -> Any:
    found = getattr(builtins.print, ORIGINAL, builtins.print)
    if not isinstance(found, BuiltinFunctionType):
        raise LoadError("prints, and `print` is another function here")
    return found


def _stream(name: Any) -> tuple[str, Any]:
    if name not in _STREAMS:
        raise LoadError("prints to a stream that is neither sys.stdout nor sys.stderr: damaged")
    return name, getattr(sys, name)


def _load_printed(form: Any, stream: Any) -> Printed:
    _check_call(form, _OF_PRINT)
    return Printed(*checked(Printed, (form, stream and _stream(stream)[0], "prints")))


def _check_call(form: Any, keywords: Iterable[str]) -> None:
    """Raise `LoadError` for arguments by other names than `keywords`."""
    try:
        args, named = pytree.tree_unflatten([None] * len(form.leaves), form.spec)
        known = type(args) is tuple and named.keys() <= {*keywords}
    except Exception:
        known = False
    if not known:
        raise LoadError("makes a call with arguments that it does not take: damaged")


def _save_warned(warned: Warned) -> tuple[Any, ...]:
    name = warned.category.__name__
    if _WARNINGS.get(name) is not warned.category:
        raise SaveError(f"warns by `{name}`, a class that is not Python's own: use one that is")
    return name, warned.file, warned.line, warned.module, warned.form


def _load_warned(name: Any, *values: Any) -> Warned:
    _check_call(values[-1], ())
    return Warned(*checked(Warned, (_WARNINGS.get(name), *values, "warns", {})))


def _forms_of_loggers(names: Names) -> list[Form]:
    def save(logger: Any) -> str:
        if not names.reaches_logger(logger.name):
            raise SaveError(
                f"logs by `{logger.name}`, a logger that the step's code does not name: call a method of a logger that "
                "is a global or an attribute"
            )
        return str(logger.name)

    def save_logged(logged: Logged) -> tuple[Any, ...]:
        where = logged.file, logged.line, logged.function
        return save(logged.logger), logged.level, *where, logged.form

    def load_logged(name: Any, *values: Any) -> Logged:
        _check_call(values[-1], ("extra",))
        return Logged(*checked(Logged, (names.logger(name), *values, "logs")))

    return [
        Form(Logged, save_logged, load_logged),
        Form(
            SilentFact,
            lambda fact: (save(fact.logger), fact.level),
            lambda name, level: SilentFact(*checked(SilentFact, (names.logger(name), level))),
        ),
    ]


# -- schedulers ------------------------------------------------------------------------------------


def _save_stepped(stepped: SchedulerStepped) -> tuple[Any, ...]:
    for i, each in enumerate(type(stepped.scheduler).__mro__):
        if _step_of(each) is stepped.original:
            return stepped.scheduler, i, stepped.form
    raise SaveError("steps a scheduler by a function that its class does not have any more")


def _step_of(kind: type) -> Any:
    """The `step` of a class, past what a recording puts in its place."""
    found = vars(kind).get("step")
    return getattr(found, ORIGINAL, found)


def _load_stepped(scheduler: Any, at: Any, form: Any) -> SchedulerStepped:
    kinds = type(scheduler).__mro__
    original = _step_of(kinds[at]) if type(at) is int and 0 <= at < len(kinds) else None
    if not isinstance(original, FunctionType):
        raise LoadError("steps a scheduler by a function that its class does not have")
    _check_call(form, ("epoch", "metrics"))
    return SchedulerStepped(
        *checked(SchedulerStepped, (scheduler, original, form, "steps a scheduler"))
    )
