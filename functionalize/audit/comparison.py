"""An audited run against the signature of a program: the first difference, or a number for which a guard fails.

    comparison = Comparison(signature, recorder, storages, numbers)
    comparison.check(record)                                 for each op, when it has run
    verdict = comparison.verdict(leaves, spec, assigned)
    verdict.difference      "op 12 of 80: argument 1 of aten.mul.Tensor is 0.25, the program has 0.5" and both lines
    verdict.missed          "`item > 1` is True, was False": no program would have been replayed to its end

Compared, in order: each op, its arguments and results (constants by type and value, tensors by geometry and storage),
the contents of tensors that Python made from numbers; then the result, and which gradients the step has left.
A storage that existed before the step must be the one at the place of the recording, every other one corresponds to one
of the recording from its first use on. A live number must have the value of its expression with this call's numbers.
Invariant: it reads, and changes nothing. A difference counts only if all guards on numbers read before it hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from functionalize._compat.graphs import pytree
from functionalize._compat.stacks import CapturedTraceback
from functionalize.audit.digest import digest
from functionalize.audit.signature import NumberFact, Row, Signature, leaf_of, row_of
from functionalize.audit.verdict import AuditVerdict
from functionalize.ir.guards import same_constant
from functionalize.ir.ops import OpRecord, TensorRef
from functionalize.ir.scalars import (
    Applied,
    LiveNumber,
    ScalarInput,
    bottom_up,
    expression_text,
    is_expression,
)
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.storage_table import External
from functionalize.util.user_stack import line_of

_NOTHING = object()


class Comparison:
    """One audited run and the signature of the program.

    storages: for the number of each storage in the signature, its number in this run, as far as known before the run.
    numbers: the values of the `ScalarInput`s of the signature before the run.
    next_row: the op that should come next; None after a difference, an error or the last op.
    failed: an error in the comparison itself, which ends it.
    """

    def __init__(
        self,
        signature: Signature,
        recorder: Recorder,
        storages: Mapping[int, int],
        numbers: Mapping[ScalarInput, Any],
    ) -> None:
        self.signature, self.recorder = signature, recorder
        self._now = dict(storages)
        self._was = {now: was for was, now in storages.items()}
        self._values: dict[Any, Any] = dict(numbers)
        self._names = {serial: name for serial, name, _ in signature.sources}
        self._outside: dict[int, External] = {}
        self._rows: tuple[Row | None, ...] = (*signature.rows, None)
        self._at = 0  # how many ops were as expected
        self.next_row = self._rows[0]
        self._difference: str | None = None  # at the first op that was not
        self.failed: Exception | None = None

    def _external(self, storage: int) -> External | None:
        """The tensor from outside on a storage of this run; None if an op has allocated the storage."""
        externals = self.recorder.storages.externals
        for external in externals[len(self._outside) :]:
            self._outside[external.ref.storage] = external
        return self._outside.get(storage)

    # -- storages, for the recorder --------------------------------------------------------------

    def storage_now(self, was: int) -> int | None:
        """The number in this run of a storage of the signature; None: it was not used yet."""
        return self._now.get(was)

    def is_outside(self, was: int) -> bool:
        """Whether a storage of the signature existed before the step."""
        return was in self._names

    def bind(self, was: int, now: int) -> None:
        """An op has allocated storage `now` of this run, in the place of `was`."""
        self._now[was], self._was[now] = now, was

    # -- ops -----------------------------------------------------------------------------------

    def advance(self) -> None:
        """The next op was the expected one."""
        self._at += 1
        self.next_row = self._rows[self._at]

    def fail(self, error: Exception) -> None:
        """The comparison itself has raised `error`."""
        self.failed, self.next_row = error, None

    def _differ(self, text: str) -> None:
        self._difference, self.next_row = text, None

    def check(self, record: OpRecord) -> None:
        """Compare a record with the row that should come next."""
        if self._difference is not None or self.failed is not None:
            return
        last = self.recorder.scalars[-1] if self.recorder.scalars else None
        frozen = last is not None and last.record is record
        self.check_row(row_of(record, frozen), last.value if last else None)

    def check_row(self, now: Row, value: Any) -> None:
        """Compare a row of this run with the row that should come next. value: of the number that it read."""
        if self._difference is not None or self.failed is not None:
            return
        was = self.next_row
        if was is None or not self._is_same_row(was, now):
            self._differ(self._op_text(self._at + 1, was, now))
            return
        if was.read is not None and now.read is not None:
            self._values[was.read] = now.read.record.meta.get("hint", value)
        self.advance()

    def check_result(self, record: OpRecord) -> None:
        """Compare a record of which only the result may differ."""
        was = self.next_row
        assert was is not None
        if self._same(was.outputs, record.outputs):
            self.advance()
        else:
            now = row_of(record, False)
            now = was._replace(outputs=now.outputs, stack=now.stack)
            self._differ(self._op_text(self._at + 1, was, now))

    # -- verdicts ------------------------------------------------------------------------------

    def verdict(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec, assigned: Sequence[bool]
    ) -> AuditVerdict:
        """leaves, spec, assigned: as those of the signature.

        Raises the error in the comparison, if there was one.
        """
        return self.verdict_on([leaf_of(leaf, self.recorder) for leaf in leaves], spec, assigned)

    def verdict_on(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec, assigned: Sequence[bool]
    ) -> AuditVerdict:
        """The same, of leaves in the form of a signature."""
        if self.failed is not None:
            raise self.failed
        if self._difference is None and self.next_row is not None:
            self._differ(self._op_text(self._at + 1, self.next_row, None))
        return self._judged(
            self._difference or self._end(leaves, spec, tuple(assigned)) or self._notes()
        )

    def verdict_of_failed(self, error: BaseException) -> AuditVerdict:
        """The verdict on a run in which the step raised `error`; an op that raises does so in a replay, too."""
        if self.failed is not None:
            raise self.failed
        difference = self._difference
        if difference is None and self.recorder.failed is None:
            after = f"after op {self._at} of {len(self.signature.rows)}"
            difference = (
                f"{after} the step raises {type(error).__name__}: {error}; the program goes on"
            )
        return self._judged(difference)

    def _judged(self, difference: str | None) -> AuditVerdict:
        missed = self._missed()
        return AuditVerdict(missed=missed) if missed is not None else AuditVerdict(difference)

    def _missed(self) -> str | None:
        for fact in self.signature.facts:
            try:
                now = self._value(fact.expression)
            except _UnknownError:  # read after the difference
                continue
            except ArithmeticError as error:
                return f"a number cannot be computed: {error}"
            if not same_constant(now, fact.value):
                return f"{_text_of_fact(fact)} is {now!r}, was {fact.value!r}"
        return None

    # -- rows ----------------------------------------------------------------------------------

    def _is_same_row(self, was: Row, now: Row) -> bool:
        same = self._same
        return (
            was.target is now.target
            and len(was.args) == len(now.args)
            and all(same(a, b) for a, b in zip(was.args, now.args, strict=True))
            and (not (was.kwargs or now.kwargs) or same(was.kwargs, now.kwargs))
            and same(was.outputs, now.outputs)
            and same(was.resized and _resized(was), now.resized and _resized(now))
            and was.gradients == now.gradients
            and (was.read is None) == (now.read is None)
        )

    def _same(self, was: Any, now: Any) -> bool:
        kind = type(was)
        if kind is TensorRef:
            return (
                type(now) is TensorRef
                and was[1] == now[1]
                and self._is_same_storage(was[0], now[0])
            )
        if kind is LiveNumber or type(now) is LiveNumber:
            try:
                value = self._value(was.expression) if kind is LiveNumber else was
            except (_UnknownError, ArithmeticError):
                return False
            return same_constant(now.hint if type(now) is LiveNumber else now, value)
        if kind is list or kind is tuple:
            return (
                isinstance(now, (list, tuple))
                and len(was) == len(now)
                and all(self._same(a, b) for a, b in zip(was, now, strict=True))
            )
        if kind is dict:
            return was.keys() == now.keys() and all(
                self._same(value, now[key]) for key, value in was.items()
            )
        return was is now or same_constant(now, was)

    def _is_same_storage(self, was: int, now: int) -> bool:
        known = self._now.get(was)
        if known is not None or now in self._was:
            return known == now
        # The first use of both: a storage from outside or a literal corresponds to one of the same kind.
        external, literal = self._external(now), self.signature.literals.get(was)
        is_literal = external is not None and external.literal
        if is_literal != (literal is not None):
            return False
        if (
            external is not None
            and external.literal
            and not _same_digest(literal, digest(external.tensor))
        ):
            return False
        if (external is not None and not is_literal) != (was in self._names):
            return False
        self._now[was], self._was[now] = now, was
        return True

    # -- numbers -------------------------------------------------------------------------------

    def _value(self, expression: Any) -> Any:
        """The value of an expression with the numbers read so far; raises `_UnknownError`, `ArithmeticError`."""
        values = self._values
        if not is_expression(expression):
            return expression
        for part in bottom_up(expression, values):
            if not isinstance(part, Applied):
                raise _UnknownError
            values[part] = part.function(*[values[a] if is_expression(a) else a for a in part.args])
        return values[expression]

    # -- the end of the step -------------------------------------------------------------------

    def _end(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec, assigned: tuple[bool, ...]
    ) -> str | None:
        signature = self.signature
        for (name, _), was, now in zip(signature.slots, signature.assigned, assigned, strict=True):
            if was != now:
                what = ("assigns", "does not") if now else ("leaves", "assigns another one")
                return f"after the last op: the step {what[0]} `{name}`, the program {what[1]}"
        if spec != signature.spec:
            return f"after the last op: the result is {spec}, that of the program {signature.spec}"
        for at, (was, now) in enumerate(zip(signature.leaves, leaves, strict=True)):
            if not self._same(was, now):
                here, there = self._value_text(now), self._program_text(was)
                return f"after the last op: leaf {at} of the result is {here}, that of the program {there}"
        return None

    def _notes(self) -> str | None:
        notes = self.recorder.checks.unrepeatable
        return f"after equal ops: the step {notes[0]}" if notes else None

    # -- text ----------------------------------------------------------------------------------

    def _op_text(self, at: int, was: Row | None, now: Row | None) -> str:
        text = f"op {at} of {len(self.signature.rows)}: {self._row_text(was, now)}"
        lines = [f"\n  {line_of(now.stack)}"] if now is not None else []
        if was is not None and was.stack is not None:
            recorded = _line(was.stack)
            if now is None or recorded != _line(now.stack):
                lines.append(f"\n  recorded {recorded}")
        return text + "".join(lines)

    def _row_text(self, was: Row | None, now: Row | None) -> str:
        if now is None:
            assert was is not None
            return f"the step ends, the program runs {was.target}"
        if was is None:
            return f"the step runs {now.target}, the program ends"
        if was.target is not now.target:
            return f"the step runs {now.target}, the program {was.target}"
        for key, before, after in _parts(was, now):
            if before is _NOTHING or after is _NOTHING or not self._same(before, after):
                here, there = self._value_text(after), self._program_text(before)
                return f"{key} of {now.target} is {here}, the program has {there}"
        return f"{now.target} runs with another grad mode than in the program"

    def _value_text(self, value: Any) -> str:
        if value is _NOTHING:
            return "absent"
        if type(value) is LiveNumber:
            return repr(value.hint)
        if type(value) is TensorRef:
            return f"{value.geometry} of {self._origin(value.storage)}"
        if type(value) in (list, tuple):
            return f"[{', '.join(map(self._value_text, value))}]"
        return repr(value)

    def _program_text(self, value: Any) -> str:
        if value is _NOTHING:
            return "none"
        if type(value) is LiveNumber:
            try:
                return f"{self._value(value.expression)!r}"
            except (_UnknownError, ArithmeticError):
                return f"`{expression_text(value.expression)}`"
        if type(value) is TensorRef:
            name = self._names.get(value.storage, "a temporary")
            name = "other numbers" if value.storage in self.signature.literals else _named(name)
            return f"{value.geometry} of {name}"
        if type(value) in (list, tuple):
            return f"[{', '.join(map(self._program_text, value))}]"
        return repr(value)

    def _origin(self, storage: int) -> str:
        external = self._external(storage)
        if external is None:
            return "a temporary"
        if external.literal:
            shown = f" {external.tensor.tolist()}" if external.tensor.numel() <= 8 else ""
            return f"the numbers{shown}"
        if storage not in self._was:
            return "a tensor that the program does not read"
        return _named(self.recorder.storages.infos[storage].name)


class _UnknownError(LookupError):
    """A number was not read before the first difference."""


def _parts(was: Row, now: Row) -> list[tuple[str, Any, Any]]:
    pairs = enumerate(zip_longest(was.args, now.args, fillvalue=_NOTHING))
    parts = [(f"argument {i}", a, b) for i, (a, b) in pairs]
    for key in {**was.kwargs, **now.kwargs}:
        parts.append(
            (f"argument `{key}`", was.kwargs.get(key, _NOTHING), now.kwargs.get(key, _NOTHING))
        )
    parts.append(("the result", was.outputs, now.outputs))
    parts.append(("the sizes of storages after", _resized(was), _resized(now)))
    parts.append(("the number read", was.read is not None, now.read is not None))
    return parts


def _resized(row: Row) -> list[Any]:
    """The sizes of the storages that an op has resized; which storages follows from its arguments."""
    return [nbytes for _, nbytes in row.resized]


def _same_digest(was: Any, now: Any) -> bool:
    return was is not None and tuple(was) == tuple(now)


def _named(name: str) -> str:
    return name if name == "a temporary" else f"`{name}`"


def _line(stack: CapturedTraceback | None) -> str:
    return line_of(stack)


def _text_of_fact(fact: NumberFact) -> str:
    if isinstance(fact.expression, Applied):
        return f"`{expression_text(fact.expression)}`"
    return "a tensor's value"
