"""Encodings of what a step does to Python objects: places by their names, calls by what they call.

    self.n += 1; losses.append(loss.item())      the place that the walk of the live step calls `self.n`, `losses`
    print(f"step {self.n}: {loss:.3f}")          `sys.stdout`, the parts of the text
    logger.info("loss %s", loss.item())          the logger `train`, which the live step reaches
    scheduler.step()                             the scheduler that the live step reaches, the class whose `step` it is

A file holds no code: a replay of a program that was loaded assigns to places that the live step moves, and calls
`print`, loggers and schedulers of the live step, with numbers, texts and tensors.
Where a warning or a log record was made is a line of the live step's code (code_places.py). What is said is text that
fits the values of the program (saved_calls.py).
Refusals: `SaveError` for other calls (bars, writers, functions of `fz.repeat`), objects among their arguments,
generators; `LoadError` for a place, a logger or a scheduler that is not there, and for options of `print` that write
elsewhere.
"""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, ReduceLROnPlateau

from functionalize.calls.call_arguments import ArgumentForm, LateLeaf, TextLeaf, TextPart
from functionalize.calls.draws import DrawnNumber, Draws
from functionalize.calls.interceptors import ORIGINAL
from functionalize.calls.late_numbers import LateNumber, LateRead, LateValue, is_late
from functionalize.calls.logs import Logged, SilentFact
from functionalize.calls.printing import Printed, PrintFact, StreamFact
from functionalize.calls.schedulers import (
    LAST,
    SchedulerAssigned,
    SchedulerFact,
    SchedulerNumber,
    SchedulerStepped,
    stepping_classes,
    vars_of,
)
from functionalize.calls.warned import Warned
from functionalize.errors import FunctionalizeError, LoadError, SaveError
from functionalize.ir.scalars import NUMBER_DTYPES
from functionalize.program.field_types import checked
from functionalize.program.json_codec import Form, plain_form
from functionalize.saving.code_places import CodePlaces
from functionalize.saving.object_names import Names
from functionalize.saving.saved_calls import check_form, part_length
from functionalize.state.drawing import GeneratorSet, GeneratorState
from functionalize.state.hyperparameters import GroupNumber, HyperparameterSet, is_liftable
from functionalize.state.number_arguments import NumberArgument
from functionalize.state.place_effects import (
    Appended,
    Assigned,
    AssignedLeaf,
    FlagGuard,
    PlaceNumber,
)
from functionalize.state.python_state import SurroundingsGuard
from functionalize.walk.live_places import LivePlaces, may_grow
from functionalize.walk.parts import Held

_OF_PLACES = (Assigned, AssignedLeaf, Appended)
_NUMBERS = (int, float)
_STREAMS = ("stdout", "stderr")
_WARNINGS: dict[Any, type[Warning]] = {
    name: each
    for name, each in vars(builtins).items()
    if isinstance(each, type) and issubclass(each, Warning)
}
_OF_PRINT = ("sep", "end", "flush")
# Effects that are saved or refused by name; all others are calls.
NAMED_EFFECTS = (
    *(Assigned, AssignedLeaf, Appended, HyperparameterSet, Draws, GeneratorSet),
    *(Printed, Logged, Warned, SchedulerStepped, SchedulerAssigned, LateRead),
)


def effect_forms(names: Names, fn: Callable[..., Any]) -> list[Form]:
    """The forms of what a step does to Python objects, and of the guards and sources that go with it."""

    codes = CodePlaces(names)

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
        *(of_place(kind, partial(_load_effect, kind), "name") for kind in _OF_PLACES),
        Form(
            SurroundingsGuard,
            lambda guard: (guard.portable(), _save_live(names, guard.state.live)),
            lambda saved, live: SurroundingsGuard.loaded(fn, saved, _load_live(names, *live)),
        ),
        Form(DrawnNumber, lambda number: _refuse_draws(number.draws), _never),
        Form(Draws, _refuse_draws, _never),
        *(Form(kind, _refuse_generator, _never) for kind in (GeneratorState, GeneratorSet)),
        *(_form_of_late(kind) for kind in (LateLeaf, LateRead, LateValue)),
        *map(plain_form, (TextLeaf, ArgumentForm)),
        Form(TextPart, _save_part, _load_part),
        Form(LateNumber, _save_late, _load_late),
        Form(GroupNumber, lambda number: _save_group_number(names, number), _load_group_number),
        Form(PrintFact, lambda fact: (), lambda: PrintFact(_print())),
        Form(StreamFact, lambda fact: (fact.name,), lambda name: StreamFact(*_stream(name))),
        Form(Printed, lambda printed: (printed.form, printed.stream), _load_printed),
        *_forms_of_loggers(names, codes),
        Form(
            Warned,
            lambda warned: _save_warned(warned, codes),
            lambda *values: _load_warned(codes, *values),
        ),
        _checked_form(SchedulerNumber, _is_number_of_scheduler),
        plain_form(SchedulerFact),
        _checked_form(SchedulerAssigned, _sets_a_number),
        _checked_form(HyperparameterSet, _sets_a_hyperparameter),
        Form(SchedulerStepped, _save_stepped, _load_stepped),
    ]


def _load_effect(kind: type, held: Held, name: Any) -> Any:
    return kind(*checked(kind, (name, held)))


def _never(*values: Any) -> Any:
    raise LoadError("holds what no file holds, since it is never saved: damaged")


def _checked_form(kind: Any, fits: Callable[[Any], bool]) -> Form:
    """The form of a dataclass whose objects fit what is here."""
    plain = plain_form(kind)

    def load(*values: Any) -> Any:
        made = plain.load(*values)
        if not fits(made):
            raise LoadError(f"has a {kind.__name__} of what is no number here")
        return made

    return Form(kind, plain.save, load)


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
    part_length(part, SaveError)
    template = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__mod__" and type(template) is str:
        function = template  # `"%.3f" % number`
    return function, part.args, part.then, part.late


def _load_part(function: Any, args: Any, then: Any, late: Any) -> TextPart:
    found = function.__mod__ if type(function) is str else function
    made = TextPart(*checked(TextPart, (found, args, then, late)))
    part_length(made, LoadError)
    if late is not None and not is_late(late):
        raise LoadError("makes a text of what is no number: damaged")
    return made


def _form_of_late(kind: Any) -> Form:
    """The form of a class whose one field is an expression of late numbers."""
    plain = plain_form(kind)

    def load(*values: Any) -> Any:
        if not all(map(is_late, values)):
            raise LoadError("reads a number after a call, which is none: damaged")
        return plain.load(*values)

    return Form(kind, plain.save, load)


def _save_late(number: LateNumber) -> tuple[Any, ...]:
    source = getattr(number.now, "__self__", None)
    if not isinstance(source, (SchedulerNumber, GroupNumber)):
        raise SaveError(f"reads {number.what} after a call that sets it, which a file cannot name")
    return number.what, source


def _load_late(what: Any, source: Any) -> LateNumber:
    if not isinstance(what, str) or not isinstance(source, (SchedulerNumber, GroupNumber)):
        raise LoadError("reads a number that no call sets: damaged")
    return LateNumber(what, source.now)


def _save_group_number(names: Names, number: GroupNumber) -> tuple[Any, ...]:
    for optimizer in names.roots.optimizers.values():
        for i, group in enumerate(optimizer.param_groups):
            if group is number.group:
                return optimizer, i, number.name, number.index
    raise SaveError(f"reads `{number.name}` of a parameter group that no optimizer has any more")


def _load_group_number(optimizer: Any, group: Any, name: Any, index: Any) -> GroupNumber:
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    if type(group) is not int or not 0 <= group < len(groups):
        raise LoadError("reads a parameter group that is not there")
    found = groups[group]
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


def _check_call(form: Any, keywords: Sequence[str]) -> tuple[int, frozenset[str]]:
    """The number of positional arguments and the other names; raises `LoadError` for names beside `keywords`."""
    if not isinstance(form, ArgumentForm):
        raise LoadError("makes a call without arguments: damaged")
    args, named = check_form(form, keywords, LoadError)
    return len(args), frozenset(named)


def _save_warned(warned: Warned, codes: CodePlaces) -> tuple[Any, ...]:
    name = warned.category.__name__
    if _WARNINGS.get(name) is not warned.category:
        raise SaveError(f"warns by `{name}`, a class that is not Python's own: use one that is")
    return name, codes.name(warned.file, warned.line), warned.form


def _load_warned(codes: CodePlaces, name: Any, where: Any, form: Any) -> Warned:
    _check_call(form, ())
    line = codes.line(*where)
    shown: dict[str, Any] = {}
    found = _WARNINGS.get(name), line.file, line.line, line.module, form, "warns", shown
    return Warned(*checked(Warned, found))


def _forms_of_loggers(names: Names, codes: CodePlaces) -> list[Form]:
    def save(logger: Any) -> str:
        if not names.reaches_logger(logger.name):
            raise SaveError(
                f"logs by `{logger.name}`, a logger that the step's code does not name: call a method of a logger that "
                "is a global or an attribute"
            )
        return str(logger.name)

    def save_logged(logged: Logged) -> tuple[Any, ...]:
        _check_level(logged.level, SaveError)
        where = codes.name(logged.file, logged.line, logged.function)
        return save(logged.logger), logged.level, where, logged.form

    def load_logged(name: Any, level: Any, where: Any, form: Any) -> Logged:
        _check_call(form, ("extra",))
        _check_level(level, LoadError)
        line = codes.line(*where)
        found = names.logger(name), level, line.file, line.line, line.function, form, "logs"
        return Logged(*checked(Logged, found))

    return [
        Form(Logged, save_logged, load_logged),
        Form(
            SilentFact,
            lambda fact: (save(fact.logger), fact.level),
            lambda name, level: SilentFact(*checked(SilentFact, (names.logger(name), level))),
        ),
    ]


def _check_level(level: Any, kind: type[FunctionalizeError]) -> None:
    """Raise an error of this kind for a level that `logging` has no name for."""
    if type(level) is not int or level not in logging.getLevelNamesMapping().values():
        raise kind(
            f"logs at the level {level!r:.40}, which has no name here: add it by `logging.addLevelName`"
        )


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
    of = kinds[at] if type(at) is int and 0 <= at < len(kinds) else object
    original = _step_of(of) if of in set(stepping_classes()) else None  # never one of the user's
    if not isinstance(scheduler, LRScheduler) or not isinstance(original, FunctionType):
        raise LoadError("steps a scheduler by a function that its class does not have")
    count, names = _check_call(form, ("epoch", "metrics"))
    has_epoch = "epoch" in names or count > isinstance(scheduler, ReduceLROnPlateau)
    if has_epoch and not isinstance(scheduler, CosineAnnealingWarmRestarts):
        raise LoadError("steps a scheduler with an epoch: damaged")
    return SchedulerStepped(
        *checked(SchedulerStepped, (scheduler, original, form, "steps a scheduler"))
    )


def _is_number_of_scheduler(number: SchedulerNumber) -> bool:
    return number.kind in NUMBER_DTYPES and (number.index is None or number.name == LAST)


def _sets_a_number(effect: SchedulerAssigned) -> bool:
    """Whether a scheduler has a number there, as where a step is recorded."""
    return type(vars_of(effect.scheduler).get(effect.name)) in NUMBER_DTYPES


def _sets_a_hyperparameter(effect: HyperparameterSet) -> bool:
    _, group, name = effect.key
    groups = effect.optimizer.param_groups
    return 0 <= group < len(groups) and is_liftable(groups[group].get(name))
