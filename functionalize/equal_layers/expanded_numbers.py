"""The live numbers of ops that are put back into a short recording.

    numbers = ExpandedNumbers(left_out, same, short)
    numbers.of(number)      a live number of the whole recording, as one of the short recording
    numbers.reads[8000]     the record of op 8000, of a layer that is left out, which returns a number to Python

An expression of an op that both recordings have becomes that of the short one; others are made anew, once each. A
number that a layer reads which is left out has the value that the stand-in's has.
Raises `Unlike` for a number that only the whole recording reads, and if the step relies on one that a layer reads
which is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from functionalize.equal_layers.correspondence import Correspondence
from functionalize.equal_layers.left_out import LeftOut
from functionalize.equal_layers.recorded_run import RunRecord, Unlike
from functionalize.ir.ops import NESTED, OpRecord
from functionalize.ir.scalars import (
    Applied,
    LiveNumber,
    Read,
    ScalarInput,
    bottom_up,
    evaluated,
    is_expression,
)

_WITH_NUMBERS = frozenset({LiveNumber, Applied, list, tuple, dict})


class ExpandedNumbers:
    """The live numbers of one recording that is expanded. reads: records of ops that are left out, by their places."""

    def __init__(self, left_out: LeftOut, same: Correspondence, short: RunRecord) -> None:
        whole = left_out.whole
        self.reads: dict[int, OpRecord] = {}
        self._new: dict[Any, Any] = {}  # expressions of the whole recording -> of this one
        self._inputs: dict[str, ScalarInput] = {}
        for at, record in enumerate(whole.records):
            if "read" in record.meta and left_out.is_left_out[at]:
                hint = short.records[same.ops[left_out.stand_in[at]]].meta["hint"]
                read = self.reads[at] = OpRecord(record.target, (), {}, meta={"hint": hint})
                self._new[record.meta["read"]] = read.meta["read"] = Read(read)
        live = ((r.args, r.kwargs) for r in short.records if r.live)
        for part in _parts(n.expression for each in live for n in _numbers(each)):
            if isinstance(part, ScalarInput):
                self._inputs[part.name] = part
        for at, place in same.ops.items():
            record, other = whole.records[at], short.records[place]
            if "read" in record.meta:
                self._new[record.meta["read"]] = other.meta["read"]
            if record.live:
                self._pair((record.args, record.kwargs), (other.args, other.kwargs))
        own = {whole.records[at].meta["read"] for at in self.reads}
        if own and not own.isdisjoint(_parts(fact.expression for fact in whole.facts)):
            raise Unlike("the step relies on a number that a layer reads which is left out")

    def _pair(self, one: Any, other: Any) -> None:
        """Note which expressions are the same, in the arguments of two ops that correspond."""
        kind = type(one)
        if kind is LiveNumber:
            self._pair(one.expression, other.expression)
        elif kind is Applied and one not in self._new:
            self._new[one] = other
            self._pair(one.args, other.args)
        elif kind in (list, tuple) and len(one) == len(other):
            for a, b in zip(one, other, strict=True):
                if type(a) in _WITH_NUMBERS:
                    self._pair(a, b)
        elif kind is dict:
            for key, value in one.items():
                self._pair(value, other[key])

    def of(self, number: LiveNumber) -> LiveNumber:
        """A number of the whole recording, in this one."""
        for part in bottom_up(number.expression, self._new):
            if isinstance(part, Applied):
                args = [self._new[a] if is_expression(a) else a for a in part.args]
                self._new[part] = Applied.of(part.function, *args)
            elif isinstance(part, ScalarInput) and part.name in self._inputs:
                self._new[part] = self._inputs[part.name]
            else:
                raise Unlike("layers that are left out use a number that is not in both runs")
        expression = self._new[number.expression]
        return LiveNumber(expression, evaluated(expression, _hint))


def _hint(leaf: Any) -> Any:
    return leaf.record.meta["hint"] if isinstance(leaf, Read) else leaf.hint


def _parts(expressions: Iterable[Any]) -> set[Any]:
    """The expressions and all that they consist of."""
    found: dict[Any, bool] = {}
    for expression in expressions:
        for part in bottom_up(expression, found):
            found[part] = True
    return set(found)


def _numbers(arg: Any) -> Iterator[LiveNumber]:
    if type(arg) is LiveNumber:
        yield arg
    elif type(arg) in NESTED:
        for each in arg.values() if isinstance(arg, dict) else arg:
            yield from _numbers(each)
