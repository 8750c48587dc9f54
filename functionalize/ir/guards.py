"""Guards: facts that the capture relied on, checked at every call before any input is changed."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from functionalize.ir.inputs import Call, InputSpec
from functionalize.ir.ops import geometry_of
from functionalize.ir.scalars import ScalarInput, evaluated, expression_text
from functionalize.util.packages import has_own_equality
from functionalize.util.reading import is_a
from functionalize.util.structure import holds_tensors
from functionalize.util.text import without_numbers


class Miss(str):
    """Why a guard fails, as text. question: what it asks; answer: what that is now, which other calls may find, too.

        miss = Miss("`n + 1` at train.py:9 is 4, was 3", "`n + 1` at train.py:9", "4")

    asked: the question as other programs may ask it, see `answers_among`; None: only this one does.
    """

    __slots__ = ("answer", "asked", "question")

    question: str
    answer: str
    asked: Hashable

    def __new__(cls, text: str, question: str, answer: str, asked: Hashable = None) -> Miss:
        made = super().__new__(cls, text)
        made.question, made.answer, made.asked = question, answer, asked
        return made

    @staticmethod
    def of(text: str) -> Miss:
        """The miss of a guard that says `x is 3, was 2`, or something else."""
        if isinstance(text, Miss):
            return text
        now, _, _ = text.partition(", was ")
        return Miss(text, without_numbers(now.partition(" is ")[0]), now)


class Guard(Protocol):
    """A fact the capture relied on.

    `is_read_by_reader = True`: all that decides its answer it reads by the reader of the call, so that it need not be
    asked at every call: `program/known_inputs.py`. It may have `parts()`: guards, each on one of its objects, that say
    the same together.
    """

    def failure(self, call: Call) -> str | None:
        """Why the fact no longer holds, or None."""
        ...


@dataclass(frozen=True, slots=True)
class TensorGuard:
    """An input has the geometry, device and storage size it had."""

    input: int
    spec: InputSpec

    def failure(self, call: Call) -> str | None:
        t, spec = call.inputs[self.input], self.spec
        if self._holds(t):
            return None
        if not isinstance(t, Tensor):
            return f"`{spec.name}` is {type(t).__name__}, was a tensor"
        now = geometry_of(t)
        if now != spec.geometry:
            return f"`{spec.name}` is {now}, was {spec.geometry}"
        if t.device != spec.device:
            return f"`{spec.name}` is on {t.device}, was on {spec.device}"
        nbytes = t.untyped_storage().nbytes()
        if nbytes != spec.nbytes:
            return f"the storage of `{spec.name}` holds {nbytes} bytes, held {spec.nbytes}"
        return None

    def _holds(self, t: Any) -> bool:
        """A faster check for the usual case (steps have hundreds of inputs); False may also mean undecided."""
        spec = self.spec
        size, stride, offset, dtype, conj, neg = spec.geometry
        return (
            isinstance(t, Tensor)
            and t.dtype is dtype
            and t.shape == size
            and t.stride() == stride
            and t.storage_offset() == offset
            and t.device == spec.device
            and t.untyped_storage().nbytes() == spec.nbytes
            and not (conj or neg or dtype.is_complex or t.is_neg())
        )


@dataclass(frozen=True, slots=True)
class AliasGuard:
    """Inputs share storages exactly as they did. groups: for each input a number, equal for inputs on one storage."""

    groups: tuple[int, ...]
    names: tuple[str, ...]

    def keeps_apart(self, indices: Sequence[int]) -> bool:
        """Whether all that it requires is that no two of these inputs share a storage."""
        count = len(self.groups)
        return [*indices] == [*range(count)] and len(set(self.groups)) == count

    def failure(self, call: Call) -> str | None:
        owner: dict[int, int] = {}
        for index, group in enumerate(self.groups):
            key = call.inputs[index].untyped_storage()._cdata
            if owner.setdefault(key, group) != group:
                return f"`{self.names[index]}` shares a storage with another input, it did not"
        if len(owner) != len(set(self.groups)):
            return "inputs that shared a storage no longer do"
        return None


def same_constant(now: Any, was: Any) -> bool:
    """Whether two values that are no tensors are the same: -0.0 is not 0.0; arrays are compared by their bytes.

    An object whose class compares by code of the user's is the same one or not: that may leave out what a step reads.
    """
    if type(now) is not type(was):
        return False
    if now is was:
        return True
    if is_a(now, (float, complex)):
        base: Any = float if is_a(now, float) else complex
        return bool(base.__repr__(now) == base.__repr__(was))
    for base in (int, str, bytes):
        if is_a(now, base):
            return bool(base.__eq__(now, was))
    if _is_array(now):
        same = now.dtype == was.dtype and now.shape == was.shape
        return same and bool(now.tobytes() == was.tobytes())
    # `==` of two objects may be true although they hold different tensors.
    return not has_own_equality(type(now)) and not holds_tensors(now) and bool(now == was)


def frozen_constant(value: Any) -> Any:
    """`value`, or a copy of it if it is an array, which the caller may change."""
    return value.copy() if _is_array(value) else value


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def _brief(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)


@dataclass(frozen=True, slots=True)
class ConstantGuard:
    """A leaf that is no tensor has the value it had."""

    leaf: int
    value: Any
    name: str

    def failure(self, call: Call) -> str | None:
        now = call.leaves[self.leaf]
        if same_constant(now, self.value):
            return None
        changed = f"`{self.name}` is {_brief(now)}, was {_brief(self.value)}, which is part of the program"
        if type(now).__module__ == "numpy" and hasattr(now, "item") and not getattr(now, "ndim", 1):
            return f"{changed}: pass a number of Python's (`{self.name}.item()`), which may vary"
        return changed


@dataclass(frozen=True, slots=True)
class ValueGuard:
    """A number that Python read from a tensor (`.item()`), or a comparison or text of it, is as it was.

    Checked when the graph has computed it. slot: which result of the graph it is. where: the user's line that read it.
    what: describes it in messages.
    """

    slot: int
    value: Any
    where: str
    what: str = "a tensor's value"

    def failure_of(self, results: Sequence[Any] | Mapping[int, Any]) -> str | None:
        now = results[self.slot]
        if same_constant(now, self.value):
            return None
        asked = f"{self.what} read {self.where}"
        return Miss(f"{asked} is {now!r}, was {self.value!r}", asked, repr(now))


def first_failure(
    guards: Sequence[ValueGuard], values: Sequence[Any]
) -> tuple[ValueGuard, str] | None:
    """The first of guards on numbers that one graph computes which fails, and why. values: of each."""
    for at, (guard, value) in enumerate(zip(guards, values, strict=True)):
        failure = guard.failure_of({guard.slot: value})
        if failure is not None:
            if isinstance(failure, Miss):
                failure.asked, _ = answers_among(guards[: at + 1])[-1]
            return guard, failure
    return None


def answers_among(guards: Sequence[ValueGuard]) -> list[tuple[Hashable, str]]:
    """For guards on numbers that one graph computes: what each asks, and the recorded answer.

    Code that has read its first numbers in the same lines as other code asks for the same number next.
    """
    found: list[tuple[Hashable, str]] = []
    before = 0
    for guard in guards:
        before = hash((before, guard.where, guard.what))
        found.append((before, repr(guard.value)))
    return found


@dataclass(frozen=True, slots=True)
class NanGuard(ValueGuard):
    """Autograd has found no nan values in what a node returned, in anomaly mode.

    what: the name of the node. where: the user's line that called the backward. forward: the user's frames that made
    the node, as FX writes them; empty if unknown.
    """

    forward: str = ""

    def failure_of(self, results: Sequence[Any] | Mapping[int, Any]) -> str | None:
        if same_constant(results[self.slot], self.value):
            return None
        line = " ".join(map(str.strip, self.forward.splitlines()[-2:])) or "unknown"
        return f"{self.what} returned nan values in the backward {self.where}; its forward: {line}"

    def report(self) -> None:
        """Warn as autograd does before it raises."""
        warnings.warn(
            f"Error detected in {self.what}, in a replay. Traceback of forward call that caused the error:\n"
            f"{self.forward.rstrip() or '  unknown'}\n"
            "The replay has changed nothing. The call runs eagerly now, to leave what eager leaves.",
            stacklevel=2,
        )


@dataclass(frozen=True, slots=True, eq=False)
class NumberGuard:
    """An expression of Python's own numbers (`if lr > 0.1`) has the value it had; checked before the graph runs."""

    expression: Any
    value: Any
    where: str

    def failure(self, call: Call) -> str | None:
        try:
            now = self.answer(call)
        except (LookupError, ArithmeticError) as error:
            return f"{self.question} cannot be computed: {error}"
        if same_constant(now, self.value):
            return None
        text = f"{self.question} is {now!r}, was {self.value!r}"
        return Miss(text, self.question, repr(now), self.question)

    @property
    def question(self) -> str:
        """The expression, and the user's line that read it."""
        return f"`{expression_text(self.expression)}` {self.where}"

    @property
    def never_holds(self) -> bool:
        """Whether it cannot hold at another call: the number is drawn, and was made a plain one."""
        return bool(getattr(getattr(self.expression, "source", None), "never_returns", False))

    def answer(self, call: Call) -> Any:
        """The value of the expression in this call; raises `LookupError` or `ArithmeticError`."""

        def number(leaf: ScalarInput) -> Any:
            return leaf.source.resolve(call).item()

        return evaluated(self.expression, number)
