"""Live numbers as arguments of ops: which of them the program computes anew, which are constants.

    p.add_(g, alpha=-lr)        alpha is a scalar of the schema: the record holds a `LiveNumber`
    x / tokens                  torch wraps the number in a tensor: the same
    torch.zeros(tokens)         a size is a constant of the program: a fact of the log, guarded

Invariant: kernels take plain numbers; no shape depends on a `LiveNumber`.

Note [Carried numbers]
Two callers of ops can take plain numbers only. The fused optimizers take `lr` as a C++ double. DTensor would keep a
live number in its caches of shardings, compare by it, and pass it to ops when no recording is left that knows it. So
the caller takes plain numbers, the recording keeps the live ones by the names of the op's arguments, and the record of
the op gets them back. A number that no record got back is a constant of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from functionalize.ir.ops import OpRecord
from functionalize.ir.scalars import LiveNumber
from functionalize.recorder.live_scalars import SYMBOLIC, is_live, plain
from functionalize.recorder.scalar_log import Number, ScalarLog

# By the schema: arguments that no shape depends on. A number for a `Tensor` is one that torch has wrapped.
_TAKEN_LIVE = frozenset(
    {"number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]"}
)
_SIZED_BY_NUMBERS = ("aten::arange", "aten::range")


class ScalarArguments:
    """The live numbers of one recording, where they are arguments of ops. carrying: see Note [Carried numbers]."""

    __slots__ = ("carrying", "log")

    def __init__(self, log: ScalarLog) -> None:
        self.log = log
        self.carrying: _Carried | None = None

    def put_into(self, record: OpRecord) -> None:
        """Replace live numbers in a record: by `LiveNumber`s where the op takes them, else by constants."""
        schema = record.target._schema
        record.live = True
        sized = schema.name.startswith(_SIZED_BY_NUMBERS)
        args = list(record.args)
        for at, argument in enumerate(schema.arguments):
            live = not sized and str(argument.type) in _TAKEN_LIVE
            if at < len(args):
                args[at] = self._recorded(args[at], live)
            elif argument.name in record.kwargs:
                record.kwargs[argument.name] = self._recorded(record.kwargs[argument.name], live)
        record.args = tuple(args)
        if self.carrying is not None and self.carrying.op == schema.name:
            self.carrying.put_back(record)

    def _recorded(self, arg: Any, live: bool) -> Any:
        if isinstance(arg, list):
            return [self._recorded(a, live) for a in arg]
        if not is_live(arg):
            return arg
        number: Number = arg.node
        if number.log is self.log:
            if live and number.alive:
                return LiveNumber(number.expression, number.hint)
            return number.settle()
        if number.alive:
            self.log.foreign()
        return number.hint

    def plain(self, arg: Any) -> Any:
        """An argument as a kernel takes it: plain numbers for those of this recording and for constants.

        A number of a recording around this one stays live, for that recording.
        """
        kind = type(arg)
        if kind in SYMBOLIC and is_live(arg):
            log = arg.node.log
            return arg.node.hint if log is self.log or not log.active else arg
        if kind is list or kind is tuple:
            return kind(map(self.plain, arg))
        if kind is dict:
            return {k: self.plain(v) for k, v in arg.items()}
        return arg

    @contextmanager
    def carry(self, op: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Inside, records of `op` get back the live numbers of its `arguments`: Note [Carried numbers]."""
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
        """Put the live numbers into a record of the op, where it holds the same plain ones."""
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
        """What no record got back is a constant of the program."""
        for name in self._arguments.keys() - self._restored:
            settled(self._arguments[name])


def _restored(carried: Any, now: Any) -> Any:
    """`now` with the live numbers of `carried` in their places; None if these are not the same numbers."""
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
    """Whether there is a live number in an argument."""
    if isinstance(arg, (list, tuple)):
        return any(map(has_live, arg))
    return type(arg) in SYMBOLIC and is_live(arg)


def settled(arg: Any) -> Any:
    """An argument with plain numbers, which are constants of the program from now on."""
    if type(arg) in (list, tuple):
        return type(arg)(map(settled, arg))
    return plain(arg)
