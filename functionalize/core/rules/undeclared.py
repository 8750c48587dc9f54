"""Ops whose schema hides what they write: batch norm's running statistics.

aten.native_batch_norm(x, w, b, mean, var, True, m, eps)
  ->  out, save_mean, save_invstd, mean', var' = aten._native_batch_norm_legit_functional(...)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from functionalize.core.ops import OpRecord
from functionalize.core.rules.registry import rule

if TYPE_CHECKING:
    from functionalize.core.discharge import Functionalizer

aten = torch.ops.aten


@rule(aten.native_batch_norm.default)
def native_batch_norm(engine: Functionalizer, record: OpRecord) -> Any:
    """Writes `running_mean` and `running_var` in training although its schema says it does not."""
    x, weight, bias, mean, var, training, momentum, eps = record.args
    if not training or mean is None or var is None:
        return engine.pure(record)
    values = [None if t is None else engine.read(t) for t in (x, weight, bias, mean, var)]
    out = engine.emit.call(
        aten._native_batch_norm_legit_functional.default, *values, training, momentum, eps
    )
    engine.write(mean, engine.part(out, 3))
    engine.write(var, engine.part(out, 4))
    return [engine.part(out, i) for i in range(3)]
