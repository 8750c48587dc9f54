"""Live numbers as arguments of ops: which of them the program computes anew, which are constants.

    p.add_(g, alpha=-lr)        alpha is a `Scalar`: the record holds a `LiveNumber`
    x / tokens                  torch wraps the number in a tensor: the same
    torch.zeros(tokens)         a size is a constant of the program: a fact of the ledger, guarded

Invariant: kernels are given plain numbers; no shape depends on a `LiveNumber`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from functionalize.core.numbers import LiveNumber
from functionalize.core.ops import OpRecord
from functionalize.frontend.ledger import Ledger, Number
from functionalize.frontend.live import SYMBOLIC, is_live, plain

# By the schema: arguments that no shape depends on. A number for a `Tensor` is one that torch has wrapped.
_TAKEN_LIVE = frozenset(
    {"number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]"}
)
_SIZED_BY_NUMBERS = ("aten::arange", "aten::range")


def take_numbers(ledger: Ledger, record: OpRecord) -> None:
    """Replace live numbers in a record: by `LiveNumber`s where the op takes them, else by constants."""
    schema = record.target._schema
    record.live = True
    sized = schema.name.startswith(_SIZED_BY_NUMBERS)
    args = list(record.args)
    for at, argument in enumerate(schema.arguments):
        live = not sized and str(argument.type) in _TAKEN_LIVE
        if at < len(args):
            args[at] = _taken(ledger, args[at], live)
        elif argument.name in record.kwargs:
            record.kwargs[argument.name] = _taken(ledger, record.kwargs[argument.name], live)
    record.args = tuple(args)
    if ledger.handed is not None and ledger.handed.op == schema.name:
        ledger.handed.take(record)


def _taken(ledger: Ledger, arg: Any, live: bool) -> Any:
    if isinstance(arg, list):
        return [_taken(ledger, a, live) for a in arg]
    if not is_live(arg):
        return arg
    number: Number = arg.node
    if live and number.alive and number.ledger is ledger:
        return LiveNumber(number.expression, number.hint)
    if number.alive and number.ledger is not ledger:
        ledger.foreign()
    return number.settle() if number.ledger is ledger else number.hint


class Handed:
    """Note [Handed over]

    Two callers take live numbers to an op by a way that only plain ones can go. The fused optimizers
    take `lr` as a C++ double. DTensor would keep the number in its caches of shardings, compare by it, and
    give it to ops when no recording is left that knows it. So the caller is given plain numbers, the ledger
    keeps the live ones by the names of the arguments, and the record of the op gets them back there. One
    that no record got is a constant of the program.
    """

    def __init__(self, op: str, arguments: Mapping[str, Any]) -> None:
        self.op = op
        self._arguments = {k: v for k, v in arguments.items() if has_live(v)}
        self._taken: set[str] = set()

    def take(self, record: OpRecord) -> None:
        """Put the numbers back into a record of the op."""
        args = list(record.args)
        for at, argument in enumerate(record.target._schema.arguments):
            name = argument.name
            if name not in self._arguments:
                continue
            now = args[at] if at < len(args) else record.kwargs.get(name)
            value = _put_back(self._arguments[name], now)
            if value is None:
                continue
            self._taken.add(name)
            if at < len(args):
                args[at] = value
            else:
                record.kwargs[name] = value
        record.args = tuple(args)

    def close(self) -> None:
        """What was not put back is a constant."""
        for name in self._arguments.keys() - self._taken:
            settled(self._arguments[name])


@contextmanager
def handing_over(ledger: Ledger, op: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Inside, records of `op` get back the live numbers that are in `arguments`."""
    before, ledger.handed = ledger.handed, Handed(op, arguments)
    try:
        yield
        ledger.handed.close()
    finally:
        ledger.handed = before


def _put_back(handed: Any, now: Any) -> Any:
    """`now` with the live numbers of `handed` in their places; None if these are not the same numbers."""
    if is_live(handed):
        number: Number = handed.node
        same = type(now) is type(number.hint) and repr(now) == repr(number.hint)
        return LiveNumber(number.expression, number.hint) if same and number.alive else None
    if isinstance(handed, (list, tuple)):
        if not isinstance(now, (list, tuple)) or len(now) != len(handed):
            return None
        parts = [_put_back(h, n) for h, n in zip(handed, now, strict=True)]
        return None if any(part is None for part in parts) else parts
    return now


def has_live(arg: Any) -> bool:
    """Whether there is a live number in an argument."""
    if isinstance(arg, (list, tuple)):
        return any(map(has_live, arg))
    return type(arg) in SYMBOLIC and is_live(arg)


def settled(arg: Any) -> Any:
    """An argument with plain numbers, which are constants of the program from now on."""
    if type(arg) in (list, tuple):
        return type(arg)(map(settled, arg))
    return plain(arg)


def run_with(ledger: Ledger, arg: Any) -> Any:
    """An argument as the op is run with it: plain numbers for those of the ledger and for constants."""
    kind = type(arg)
    if kind in SYMBOLIC and is_live(arg):
        theirs = arg.node.ledger
        return arg.node.hint if theirs is ledger or not theirs.active else arg
    if kind is list or kind is tuple:
        return kind(run_with(ledger, a) for a in arg)
    if kind is dict:
        return {k: run_with(ledger, a) for k, a in arg.items()}
    return arg
