"""`scheduler.step()` in a step: a replay calls the scheduler itself, with Python's numbers.

    optimizer.step()
    scheduler.step()                            every scheduler of `torch.optim`; of the user's, what they inherit
    plateau.step(loss.item())                   with this step's number
    print(scheduler.get_last_lr()[0])           a late number: see late_numbers.py; also if it is returned

The state of a scheduler is no guarded state. While a step is recorded, every attribute of a scheduler that code reads
or sets outside of `step` is noted: a number becomes a live number, after `step` a late one; other objects are guarded.
A number that code assigns to an attribute that held one (`scheduler._step_count += 1`) is assigned by a replay, too.
Refusals: hyperparameters that are tensors, or that the step has set; a scheduler or an optimizer that the search does
not find; other attributes that are set; a `step` after that, or one that runs ops; after `step`, reads of objects that
are no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from functionalize._compat.stacks import CapturedTraceback
from functionalize.calls.call_arguments import ArgumentForm, CallArguments
from functionalize.calls.call_log import CallRecorder, CallTarget
from functionalize.calls.interceptors import Repeated
from functionalize.calls.late_numbers import LateNumber
from functionalize.cost.categories import Category
from functionalize.ir.inputs import Call
from functionalize.ir.scalars import NUMBER_DTYPES
from functionalize.scalars.live_scalars import as_live, is_live, left_behind
from functionalize.util.text import with_article

_get = object.__getattribute__


class Hyperparameters(Protocol):
    """The live hyperparameters of a recording, see `state/hyperparameters.py`."""

    def begin_change(self, optimizers: Sequence[Any]) -> str | None:
        """Put plain numbers in the place of live ones; text: why a call must not change them."""
        ...

    def end_change(self, by: str, effect: Any) -> str | None:
        """What the call has set are late numbers from now on; text: a change that is none of a number."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerStepped:
    """A call of a scheduler's `step`. original: the function of its class."""

    scheduler: LRScheduler
    original: Callable[..., Any]
    form: ArgumentForm
    what: str = "steps a scheduler"

    def repeat(self, call: Call, value: Any) -> None:
        """Call it with the numbers and tensors of a replay."""
        args, keywords = self.form.filled(value[1])
        self.original(self.scheduler, *args, **keywords)


class SchedulerInterceptor:
    """See `Interceptor`."""

    def repeated(
        self, recording: CallRecorder, frame: FrameType, original: Any, args: Any, keywords: Any
    ) -> Repeated | str | None:
        what = "steps a scheduler"
        if not args or not isinstance(args[0], LRScheduler):
            return what
        scheduler = args[0]
        many = list(_schedulers(scheduler))
        has_epoch = "epoch" in keywords or len(args) > 1 + isinstance(
            scheduler, lr_scheduler.ReduceLROnPlateau
        )
        if has_epoch and not isinstance(scheduler, lr_scheduler.CosineAnnealingWarmRestarts):
            return f"{what} with an epoch"
        if any(type(each).__getattribute__ is not LRScheduler.__getattribute__ for each in many):
            return f"{what} whose class has a `__getattribute__`"
        if recording.calls.hyperparameters is None:
            return what
        if any(
            (id(each), name) in recording.calls.assigned for each in many for name in vars_of(each)
        ):
            return f"{what} whose numbers it has assigned"
        passed = [each.detach() if isinstance(each, torch.Tensor) else each for each in args[1:]]
        found = CallArguments.of(
            recording, frame, passed, keywords
        )  # the number of a metric counts
        if isinstance(found, str):
            return f"{what} with {found}"
        refused = recording.calls.hyperparameters.begin_change(
            [_get(each, "optimizer") for each in many]
        )
        if refused is not None:
            return f"{what} {refused}"
        recording.calls.targets.append(CallTarget(scheduler, what))
        recording.calls.quiet_ops = 0
        effect = SchedulerStepped(scheduler, original, found.form)
        plain, others = found.plain
        return Repeated(
            effect, CallArguments(found.form, found.values, ((scheduler, *plain), others))
        )

    def after(self, recording: CallRecorder, repeated: Repeated) -> str | None:
        """After the call: what it has changed that a replay cannot know, or None."""
        recording.calls.stepped |= {id(each) for each in _schedulers(repeated.effect.scheduler)}
        hyperparameters = recording.calls.hyperparameters
        refused: str | None = hyperparameters.end_change("`scheduler.step()`", repeated.effect)
        reads = any(isinstance(each, torch.Tensor) for each in repeated.arguments.values)
        if recording.calls.quiet_ops and not reads:
            return "it runs ops, whose tensors a replay has at the end of the step only; step it outside the step"
        return refused


def _schedulers(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """A scheduler and those that it steps."""
    yield scheduler
    for each in vars_of(scheduler).get("_schedulers", ()):
        yield from _schedulers(each)


def vars_of(scheduler: LRScheduler) -> dict[str, Any]:
    """The `__dict__` of a scheduler, past the replaced `__getattribute__`."""
    table: dict[str, Any] = _get(scheduler, "__dict__")
    return table


# -- reads of their state --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerNumber:
    """The source of a number that a scheduler holds. index: in the list `name`; None: it is the attribute itself."""

    scheduler: LRScheduler
    name: str
    index: int | None
    kind: type
    category: ClassVar[Category] = Category.OPTIMIZER_STATE

    def now(self) -> Any:
        """The number now. Raises `LookupError` if it is of another type or missing."""
        value = vars_of(self.scheduler)[self.name]
        if self.index is not None:
            value = value[self.index]
        if type(value) is not self.kind:
            raise LookupError(f"`{self.name}` is {with_article(type(value).__name__)}")
        return value

    def resolve(self, call: Call) -> Any:
        return torch.tensor(self.now(), dtype=NUMBER_DTYPES[self.kind])


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerFact:
    """An attribute of a scheduler that the step has read is the object that it was."""

    scheduler: LRScheduler
    name: str
    value: Any

    def failure(self, call: Call) -> str | None:
        """Why the program does not hold, or None."""
        now = vars_of(self.scheduler).get(self.name, self)
        same = now is self.value or (
            type(now) is type(self.value) in _PLAIN and repr(now) == repr(self.value)
        )
        kind = type(self.scheduler).__name__
        return None if same else f"`{self.name}` of {with_article(kind)} is another one"


_PLAIN = frozenset({bool, int, float, str, type(None)})
LAST = "_last_lr"


def scheduler_patches(recorders: Callable[[], list[Any]]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement): reads and assignments of attributes. recorders: those of this thread."""

    def active() -> list[Any]:
        return [r for r in recorders() if r.checks.for_real and not r.checks.in_effect]

    def read(self: LRScheduler, name: str) -> Any:
        value = _get(self, name)
        if name not in _get(self, "__dict__") and name != "__dict__":
            return value
        for recording in active():
            value = _read(recording, self, name, value)
        return value

    def assign(self: LRScheduler, name: str, value: Any) -> None:
        for recording in active():
            _assign(recording, self, name, value)
        object.__setattr__(self, name, left_behind(value))

    yield LRScheduler, "__getattribute__", read
    yield LRScheduler, "__setattr__", assign


@dataclass(frozen=True, slots=True)
class SchedulerAssigned:
    """The step has assigned a number to an attribute of a scheduler."""

    scheduler: LRScheduler
    name: str

    @property
    def what(self) -> str:
        return f"sets `{self.name}` of {with_article(type(self.scheduler).__name__)}"

    def repeat(self, call: Call, value: Any) -> None:
        """Assign the number of a replay."""
        object.__setattr__(self.scheduler, self.name, value)


SCHEDULING = (SchedulerStepped, SchedulerAssigned)


def _assign(recording: CallRecorder, scheduler: LRScheduler, name: str, value: Any) -> None:
    """Note a number that the step assigns, or refuse. The first recording, without live numbers, is not kept."""
    effect, log = SchedulerAssigned(scheduler, name), recording.scalar_log
    was, kind = vars_of(scheduler).get(name), type(left_behind(value))
    if (
        type(was) is not kind
        or kind not in NUMBER_DTYPES
        or id(scheduler) in recording.calls.stepped
    ):
        recording.checks.refuse_here(f"{effect.what}, which a replay would not")
        return
    recording.calls.targets.append(CallTarget(scheduler, effect.what))
    recording.calls.assigned[id(scheduler), name] = value
    if log is not None and not is_live(value):  # it may be another number at every call
        recording.checks.refuse_here(
            f"{effect.what} to a number of its own, which a replay would not"
        )
    recording.python_effects.append((effect, value))


def _read(recording: CallRecorder, scheduler: LRScheduler, name: str, value: Any) -> Any:
    """The value of an attribute for the code that reads it."""
    log, is_stepped = recording.scalar_log, id(scheduler) in recording.calls.stepped
    kind = with_article(_get(scheduler, "__class__").__name__)
    recording.calls.targets.append(CallTarget(scheduler, f"reads `{name}` of {kind}"))

    def live(number: Any, index: int | None) -> Any:
        source: Any = SchedulerNumber(scheduler, name, index, type(number))
        if is_stepped:
            after = recording.python_effects[-1][0] if recording.python_effects else None
            stack = CapturedTraceback.extract()
            source = LateNumber(f"`{name}` of {kind}", source.now, after, stack)
        assert log is not None
        return as_live(log.from_source(source, f"scheduler.{name}", number))

    assigned = recording.calls.assigned.get((id(scheduler), name))
    if assigned is not None:
        return assigned
    if log is not None and type(value) in NUMBER_DTYPES:
        return live(value, None)
    if (
        log is not None
        and name == LAST
        and type(value) is list
        and set(map(type, value)) <= NUMBER_DTYPES.keys()
    ):
        return [live(each, i) for i, each in enumerate(value)]
    if name == "__dict__" or (is_stepped and log is not None and name != "optimizer"):
        recording.checks.refuse_here(
            f"reads `{name}` of {kind}, which a replay steps after it",
            "read it before `scheduler.step()`, or outside the step",
        )
    else:
        recording.calls.guard(SchedulerFact(scheduler, name, value))
    return value


def stepping_classes() -> Iterator[type]:
    """The schedulers of torch that have a `step` of their own."""
    found: dict[type, None] = {}
    for module in (lr_scheduler, swa_utils):
        for each in vars(module).values():
            if isinstance(each, type) and issubclass(each, LRScheduler) and "step" in vars(each):
                found[each] = None
    yield from found
