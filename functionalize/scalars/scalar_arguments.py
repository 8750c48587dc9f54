"""Live numbers as arguments of ops: which of them the program computes at every call, which are constants.

    p.add_(g, alpha=-lr)        alpha is a scalar of the schema: the record holds a `LiveNumber`
    x / tokens                  torch wraps the number in a tensor: the same
    torch.zeros(tokens)         a size is a constant of the program: a fact of the log, with a guard

Invariant: kernels receive plain numbers; no shape depends on a `LiveNumber`.

Note [Carried numbers]
Two callers of ops accept plain numbers only. The fused optimizers convert `lr` to a C++ double. DTensor would keep a
live number as a key in its caches of shardings, and would use it after its recording has ended. So the caller receives
plain numbers, the recording carries the live ones by the names of the op's arguments, and they are put back into the
record of the op. A carried number that was put back into no record is a constant of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from functionalize.ir.ops import OpRecord, TensorRef
from functionalize.ir.scalars import LiveNumber
from functionalize.scalars.live_scalars import SYMBOLIC, is_live, settled
from functionalize.scalars.scalar_log import Number, ScalarLog

# Schema types of arguments that no shape depends on. A number in the place of a `Tensor` is one that torch wraps.
_LIVE_ARGUMENT_TYPES = frozenset(
    {"number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]"}
)
_SIZED_BY_NUMBERS = ("aten::arange", "aten::range")


class ScalarArguments:
    """The live numbers of one recording as arguments of ops. carrying: see Note [Carried numbers]."""

    __slots__ = ("carrying", "log")

    def __init__(self, log: ScalarLog) -> None:
        self.log = log
        self.carrying: _Carried | None = None

    def put_into(self, record: OpRecord) -> None:
        """Replace live numbers in a record: by `LiveNumber`s if no shape depends on the argument, else by constants."""
        schema = record.target._schema
        record.live = True
        sized = schema.name.startswith(_SIZED_BY_NUMBERS)
        args = list(record.args)
        for at, argument in enumerate(schema.arguments):
            live = not sized and str(argument.type) in _LIVE_ARGUMENT_TYPES
            if at < len(args):
                args[at] = self._recorded(args[at], live)
            elif argument.name in record.kwargs:
                record.kwargs[argument.name] = self._recorded(record.kwargs[argument.name], live)
        record.args = tuple(args)
        if self.carrying is not None and self.carrying.op == schema.name:
            self.carrying.put_back(record)

    def _recorded(self, arg: Any, live: bool) -> Any:
        if isinstance(arg, list):  # of hundreds of tensors, for a fused optimizer
            return [a if type(a) is TensorRef else self._recorded(a, live) for a in arg]
        if not is_live(arg):
            return arg
        number: Number = arg.node
        if number.log is self.log:
            if live and number.alive:
                return LiveNumber(number.expression, number.hint)
            return number.settle()
        if number.log.yields:
            return number.settle()
        if number.alive:
            self.log.foreign()
        return number.hint

    def plain(self, arg: Any) -> Any:
        """An argument for a kernel: numbers of this recording, and constants, become plain.

        A live number of an enclosing recording stays live, because that recording will see the op, too.
        """
        kind = type(arg)
        if kind in SYMBOLIC and is_live(arg):
            log = arg.node.log
            return arg.node.hint if log is self.log or log.yields or not log.active else arg
        if kind is list or kind is tuple:
            return kind([a if isinstance(a, Tensor) else self.plain(a) for a in arg])
        if kind is dict:
            return {k: self.plain(v) for k, v in arg.items()}
        return arg

    @contextmanager
    def carry(self, op: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """A context that puts the live numbers among `arguments` back into records of `op`: Note [Carried numbers]."""
        before, self.carrying = self.carrying, _Carried(op, arguments)
        try:
            yield
            self.carrying.settle_rest()
        finally:
            self.carrying = before


class _Carried:
    """The live numbers among the arguments of one call of `op`, by name."""

    def __init__(self, op: str, arguments: Mapping[str, Any]) -> None:
        self.op = op
        self._arguments = {k: v for k, v in arguments.items() if has_live(v)}
        self._restored: set[str] = set()

    def put_back(self, record: OpRecord) -> None:
        """Put the live numbers into a record of the op, if it holds equal plain ones."""
        args = list(record.args)
        for at, argument in enumerate(record.target._schema.arguments):
            name = argument.name
            if name not in self._arguments:
                continue
            now = args[at] if at < len(args) else record.kwargs.get(name)
            value = _restored(self._arguments[name], now)
            if value is None:
                continue
            self._restored.add(name)
            if at < len(args):
                args[at] = value
            else:
                record.kwargs[name] = value
        record.args = tuple(args)

    def settle_rest(self) -> None:
        """Make constants of the numbers that were put back into no record."""
        for name in self._arguments.keys() - self._restored:
            settled(self._arguments[name])


def _restored(carried: Any, now: Any) -> Any:
    """`now` with its numbers replaced by the live ones of `carried`; None if the numbers differ."""
    if is_live(carried):
        number: Number = carried.node
        same = type(now) is type(number.hint) and repr(now) == repr(number.hint)
        return LiveNumber(number.expression, number.hint) if same and number.alive else None
    if isinstance(carried, (list, tuple)):
        if not isinstance(now, (list, tuple)) or len(now) != len(carried):
            return None
        parts = [_restored(c, n) for c, n in zip(carried, now, strict=True)]
        return None if any(part is None for part in parts) else parts
    return now


def has_live(arg: Any) -> bool:
    """Whether an argument is or contains a live number."""
    if isinstance(arg, (list, tuple)):
        return any(map(has_live, arg))
    return type(arg) in SYMBOLIC and is_live(arg)
