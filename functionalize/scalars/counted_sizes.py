"""Sizes of results that depend on data: how each is counted before its op runs, and which a recording has counted.

    sizing_numbers(aten.nonzero.default, (mask,), {})      [SizingNumber(mask.count_nonzero())]
    sizes.add(record, text, of_op=True)                    a record that has read such a number
    sizes.unknown(early)                                   why the step cannot be captured; early: ids of records

A count that follows from arguments is checked before the graph runs, `program/early_guard.py`. Another one is known
when its op has run; a step that takes such sizes is replayed as `late_sizes/` says, any other is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize.ir.ops import MASKS, OpRecord
from functionalize.program.early_guard import A_SIZE

aten = torch.ops.aten


class SizingNumber(NamedTuple):
    """A tensor of one element that determines the size of an op's result.

    To be known before the graph runs, it may depend on arguments and constants only; on anything as long as it is
    `bound`, which it always is for sane data.
    """

    number: Tensor
    bound: int | None = None


def sizing_numbers(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[SizingNumber] | None:
    """The numbers that determine the size of an op's result; None for an op that is not known here.

    To be called while the ops that compute them are recorded. An empty list: the size depends on no data.
    """
    values = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    if func is aten.index.Tensor:
        masks = [i for i in values["indices"] if i is not None and i.dtype in MASKS]
        return [SizingNumber(mask.count_nonzero()) for mask in masks]
    if func is aten.nonzero.default:
        return [SizingNumber(values["self"].count_nonzero())]
    if func is aten.masked_select.default:
        shape = torch.broadcast_shapes(values["self"].shape, values["mask"].shape)
        return [SizingNumber(values["mask"].expand(shape).count_nonzero())]
    if func is aten.repeat_interleave.Tensor:
        sized = values.get("output_size") is not None
        return [] if sized else [SizingNumber(values["repeats"].sum())]
    if func in (aten._unique2.default, aten.unique_consecutive.default):
        return _number_of_runs(func, values)
    if func is aten.bincount.default:
        counted, last = values["self"], (values.get("minlength") or 0) - 1
        if not counted.numel():
            return []
        return [SizingNumber(counted.max().clamp(min=last), last)]
    if func is aten._ctc_loss.Tensor:  # the size of a table that only its backward reads
        return [SizingNumber(values["target_lengths"].max())]
    if func is aten._ctc_loss.default:
        return []
    if func is aten.linalg_lstsq.default:  # residuals, which depend on the rank with these drivers
        rows, columns = values["self"].shape[-2:]
        by_rank = values.get("driver") in ("gelss", "gelsd") and rows > columns
        return None if by_rank else []
    return None


def _number_of_runs(func: Any, values: Mapping[str, Any]) -> list[SizingNumber] | None:
    """The number of different values; None for floats, as torch's kernels treat NaN and -0.0 in their own way."""
    counted = values["self"]
    if counted.is_floating_point() or counted.is_complex() or values.get("dim") is not None:
        return None
    if not counted.numel():
        return []
    flat = counted.flatten()
    flat = flat.sort().values if func is aten._unique2.default else flat
    return [SizingNumber((flat[1:] != flat[:-1]).count_nonzero() + 1)]


class CountedSizes:
    """The sizes of one recording that depend on data.

    takes_late: whether sizes that are known only when an op of the graph has run are no refusal.
    counted: is called with each size that an op of torch gives its result, before the op runs.
    """

    def __init__(self) -> None:
        self.takes_late = False
        self.counted: Callable[[int], None] | None = None
        self._found: list[tuple[OpRecord, str]] = []
        self._of_ops: set[int] = set()

    def add(self, record: OpRecord, text: str, of_op: int | None = None) -> None:
        """A record has read a size. text: what depends on it. of_op: the size of an op's result; None: of no one op."""
        self._found.append((record, text))
        if of_op is not None:
            self._of_ops.add(id(record))
            if self.counted is not None:
                self.counted(of_op)

    def is_count(self, record: OpRecord) -> bool:
        """Whether a record has read the size of an op's result."""
        return id(record) in self._of_ops

    def what(self, record: OpRecord) -> str:
        """What a record has read, for the guard on it."""
        return A_SIZE if self.is_count(record) else "a tensor's value"

    @property
    def has_counts(self) -> bool:
        """Whether the size of an op's result was read."""
        return bool(self._of_ops)

    @property
    def records(self) -> frozenset[int]:
        """Ids of all records that have read a size."""
        return frozenset(id(record) for record, _ in self._found)

    def late(self, early: Container[int]) -> list[str | None]:
        """For each size of an op's result, what gives it, as text; None: it is known before the graph runs.

        early: ids of the records that are computed from arguments alone.
        """
        counts = [(record, text) for record, text in self._found if self.is_count(record)]
        return [None if id(record) in early else text for record, text in counts]

    def unknown(self, early: Container[int]) -> list[str]:
        """What gives results of sizes that no replay knows in time."""
        taken = self._of_ops if self.takes_late else ()
        late = [(record, text) for record, text in self._found if id(record) not in early]
        return [text for record, text in late if id(record) not in taken]
