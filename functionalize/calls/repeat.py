"""`fz.repeat`: a function that a step calls for what it does, not for its result. A replay calls it again.

    @fz.repeat
    def log(metrics): table.write(metrics)

    @fz.repeat(when=lambda metrics: metrics["step"] % 10 == 0)
    def report(metrics): ...

    log_to_run = fz.repeat(run.log)              of a library

    def step(batch):
        ...
        log({"loss": loss.item(), "step": self.n})

The function is no part of the step: its code is not searched, and its own state is guarded by nothing, since it runs at
every call. A replay calls it when it has done all else, in the order of the step's calls, with the numbers and the
contents of the tensors that its arguments have where the step calls it.
Invariants: without a recording the call is the function's own. In a recording it runs where it stands, with plain
numbers, unrecorded.
Refusals: a result that the step uses; arguments that are no numbers, texts or tensors, or lists, tuples and dicts of
these; a call that changes what the step reads, draws random numbers, or computes with other tensors of the step than
its arguments: a replay calls it too late for that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar, overload

from torch import Tensor

from functionalize._compat.graphs import pytree
from functionalize.calls.call_arguments import CallArguments
from functionalize.calls.call_log import CallRecorder
from functionalize.calls.interceptors import Interceptor, Repeated
from functionalize.calls.progress import MethodCalled
from functionalize.scalars.call_sites import TAKES_TEXT, drops_result

P = ParamSpec("P")
R = TypeVar("R")
WHAT = "calls a function of `fz.repeat`"


class RepeatedFunction:
    """A function of `repeat`. instance: of a method, what it was read from. when: see `repeat`."""

    def __init__(
        self, function: Callable[..., Any], when: Callable[..., bool] | None, *instance: Any
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._when, self._instance = function, when, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = (*self._instance, *args)
        if self._when is not None and not self._when(*args, **kwargs):
            return None
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> RepeatedFunction:
        if instance is None:
            return self
        return RepeatedFunction(self._function, self._when, instance, *self._instance)

    def __repr__(self) -> str:
        return f"fz.repeat({self._function!r})"

    def __reduce__(self) -> Any:
        """By its name, as functions are pickled, where it is what the name stands for."""
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for name in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        if found is self:
            return self.__qualname__
        return RepeatedFunction, (self._function, self._when, *self._instance)


@overload
def repeat(function: Callable[P, R], *, when: Callable[..., bool]) -> Callable[P, R | None]: ...


@overload
def repeat(function: Callable[P, R]) -> Callable[P, R]: ...


@overload
def repeat(
    *, when: Callable[..., bool] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...


def repeat(
    function: Callable[..., Any] | None = None, *, when: Callable[..., bool] | None = None
) -> Any:
    """A function whose calls in a captured step replays make again, at the end of the step.

    function: a function, a method, or any callable; without it, a decorator. when: called with the arguments of each
    call, in eager and in replays alike: the function is called if it is true. So a step that logs every tenth time
    needs no branch, for which it would be recorded twice.

        @fz.repeat(when=lambda metrics: metrics["step"] % 10 == 0)
        def log(metrics: dict[str, float]) -> None:
            writer.writerow(metrics)

    A step may pass numbers (`loss.item()`), tensors, lists, tuples and dicts of these, and as arguments of their own
    texts of numbers; it may not use the result. Raises `TypeError` for what cannot be called.

        >>> lines = []
        >>> log = fz.repeat(lines.append, when=lambda loss: loss > 0)
        >>> step = fz.capture(lambda x: log(x.sum().item()))
        >>> for number in range(6):
        ...     step(torch.full((2,), float(number)))
        >>> lines
        [2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if function is None:
        return functools.partial(repeat, when=when)
    if not callable(function):
        raise TypeError(f"fz.repeat takes a function, not {function!r}")
    if when is not None and not callable(when):
        raise TypeError(f"when is a function of the arguments of a call, not {when!r}")
    return RepeatedFunction(function, when)


# -- in recordings ---------------------------------------------------------------------------------

# A text of numbers may be made for such a call.
setattr(RepeatedFunction, TAKES_TEXT, True)


class RepeatInterceptor:
    """See `Interceptor`."""

    def repeated(
        self, recording: CallRecorder, frame: FrameType, original: Any, args: Any, keywords: Any
    ) -> Repeated | str | None:
        if not drops_result(frame):
            return f"uses the result of {args[0]!r} (call it without `fz.repeat` for that)"
        found = CallArguments.of(recording, frame, args[1:], keywords)
        if isinstance(found, str):
            return f"calls {args[0]!r} with {found}"
        plain, others = found.plain
        passed = [leaf for leaf in pytree.tree_leaves((plain, others)) if isinstance(leaf, Tensor)]
        recording.calls.begin_apart(passed)
        effect = MethodCalled(WHAT, args[0], original, found.form)
        return Repeated(
            effect, CallArguments(found.form, found.values, ((args[0], *plain), others))
        )

    def after(self, recording: CallRecorder, repeated: Repeated) -> str | None:
        """After the call: what it has done that a replay would do too late, or None."""
        return recording.calls.end_apart()


def repeated_functions() -> tuple[Any, str, str, Interceptor]:
    """The entry of the table of interceptors: owner, name, what a call does, interceptor."""
    return RepeatedFunction, "__call__", WHAT, RepeatInterceptor()
