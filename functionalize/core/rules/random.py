"""Random ops that overwrite their tensor: `uniform_`, `normal_`, `random_`, `bernoulli_`, ...

    a.uniform_(0, 1)   ->  a' = aten.uniform(aten.empty_strided(...), 0, 1)

The functional overload draws the same numbers from the generator as the in-place one, into the same layout.
Out-of-place random ops (`rand`, `native_dropout`) need no rule. A dead random node is kept in the program:
replay consumes the generator exactly as eager does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from functionalize.core.ops import OpRecord, map_refs
from functionalize.core.rules.mutations import functional_form
from functionalize.core.rules.registry import rule

if TYPE_CHECKING:
    from functionalize.core.discharge import Functionalizer

aten = torch.ops.aten


@rule(
    aten.uniform_.default,
    aten.normal_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
    aten.bernoulli_.float,
    aten.bernoulli_.Tensor,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
)
def overwrite_with_random(engine: Functionalizer, record: OpRecord) -> None:
    """`op_(Tensor(a!) self, ..., Generator? generator=None)`; what `self` held is not read."""
    target = record.args[0]
    engine.storage(target.storage).check_writable(target.geometry)
    form = functional_form(record.target)
    empty = engine.emit.empty(target.geometry, engine.device_of(target))
    rest = map_refs(engine.read, record.args[1:])
    engine.write(target, engine.emit.call(form.target, empty, *rest, **record.kwargs))
