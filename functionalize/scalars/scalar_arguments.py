"""Live numbers as arguments of ops: which of them the program computes at every call, which are constants.

    p.add_(g, alpha=-lr)        alpha is a scalar of the schema: the record holds a `LiveNumber`
    x / tokens                  torch wraps the number in a tensor: the same
    torch.zeros(tokens)         a size is a constant of the program: a fact of the log, with a guard

Invariant: a kernel receives the plain value of a number only if the record of its op holds the number, as a
`LiveNumber`, or if the number is a fact; no shape depends on a `LiveNumber`.

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


def live_arguments(schema: Any) -> frozenset[str]:
    """The names of the arguments that may be live, as no shape of a result depends on them."""
    if schema.name.startswith(_SIZED_BY_NUMBERS):
        return frozenset()
    return frozenset(a.name for a in schema.arguments if str(a.type) in _LIVE_ARGUMENT_TYPES)


class ScalarArguments:
    """The live numbers of one recording as arguments of ops. carrying: see Note [Carried numbers]."""

    __slots__ = ("carrying", "log")

    def __init__(self, log: ScalarLog) -> None:
        self.log = log
        self.carrying: _Carried | None = None

    def put_into(self, record: OpRecord, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Put the live numbers among an op's arguments into its record; returns the arguments for the kernel.

        A number is a `LiveNumber` of the record if no shape depends on the argument, else a constant.
        """
        schema = record.target._schema
        live = live_arguments(schema)
        names = [argument.name for argument in schema.arguments]
        record.live = True
        pairs = [
            self._taken(arg, recorded, name in live)
            for arg, recorded, name in zip(args, record.args, names, strict=False)
        ]
        taken = {k: self._taken(v, record.kwargs[k], k in live) for k, v in kwargs.items()}
        record.args = tuple(recorded for recorded, _ in pairs)
        record.kwargs = {k: recorded for k, (recorded, _) in taken.items()}
        if self.carrying is not None and self.carrying.op == schema.name:
            self.carrying.put_back(record)
        return tuple(plain for _, plain in pairs), {k: plain for k, (_, plain) in taken.items()}

    def _taken(self, arg: Any, recorded: Any, live: bool) -> tuple[Any, Any]:
        """(what the record holds for an argument, what the kernel receives). recorded: `arg` with references."""
        if isinstance(arg, Tensor) or type(recorded) is TensorRef:
            return recorded, arg
        if isinstance(arg, (list, tuple)):
            if not has_live(arg):  # hundreds of tensors, for a fused optimizer
                return recorded, arg
            pairs = [self._taken(a, r, live) for a, r in zip(arg, recorded, strict=True)]
            return [r for r, _ in pairs], type(arg)([plain for _, plain in pairs])
        if not is_live(arg):
            return recorded, arg
        number: Number = arg.node
        if number.log is not self.log and number.alive and not number.log.yields:
            self.log.foreign()
            # This recording is not kept; the enclosing one sees the op, too.
            return number.left_behind(), arg
        if live and number.log is self.log and number.alive:
            carried = number.carried()
            return carried, carried.hint
        constant = number.settle()
        return constant, constant

    @contextmanager
    def carry(self, op: str, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """A context that puts the live numbers among `arguments` back into records of `op`: Note [Carried numbers].

        Yields the arguments with plain numbers. Numbers of other recordings stay as they are.
        """
        before, self.carrying = self.carrying, _Carried(self.log, op, arguments)
        try:
            yield self.carrying.plain
        finally:
            # Also after an exception: the step may catch it, and it depends on the numbers.
            self.carrying.settle_rest()
            self.carrying = before


class _Carried:
    """The live numbers of a recording among the arguments of one call of `op`, by name.

    plain: all arguments, with plain values in the places of these numbers, all of which are put back or settled.
    """

    def __init__(self, log: ScalarLog, op: str, arguments: Mapping[str, Any]) -> None:
        self.op = op
        taken = {k: _carried(v, log) for k, v in arguments.items() if has_live(v)}
        self._arguments = {k: carried for k, (carried, _) in taken.items()}
        self._live = {k: arguments[k] for k in taken}
        self.plain = {k: taken[k][1] if k in taken else v for k, v in arguments.items()}
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
        for name in self._live.keys() - self._restored:
            settled(self._live[name])


def _carried(arg: Any, log: ScalarLog) -> tuple[Any, Any]:
    """(`arg` with the live numbers of `log` as `LiveNumber`s, `arg` with their plain values)."""
    if isinstance(arg, (list, tuple)):
        pairs = [_carried(each, log) for each in arg]
        return [carried for carried, _ in pairs], type(arg)([plain for _, plain in pairs])
    if not is_live(arg):
        return arg, arg
    if arg.node.log is log and arg.node.alive:
        carried = arg.node.carried()
        return carried, carried.hint
    if arg.node.alive and not arg.node.log.yields:
        return arg, arg
    constant = arg.node.settle()
    return constant, constant


def _restored(carried: Any, now: Any) -> Any:
    """`now` with its numbers replaced by the live ones of `carried`; None if the numbers differ."""
    if type(carried) is LiveNumber:
        same = type(now) is type(carried.hint) and repr(now) == repr(carried.hint)
        return carried if same else None
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
