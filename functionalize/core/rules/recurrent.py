"""Ops whose CPU kernel does other work while gradients are on: oneDNN's LSTM layer.

    aten.mkldnn_rnn_layer(x, ...)    ->    functionalize.mkldnn_rnn_layer(x, ...)

With gradients on, its kernel calls oneDNN's training primitive and gives the workspace that backward
needs; with gradients off it calls the inference primitive and gives none. A program runs with gradients
off, so what was recorded with gradients on becomes an op of our own, whose kernel is aten's with gradients
on (below autograd: nothing is remembered for a backward). What was recorded with them off stays aten's.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize._compat import below_autograd
from functionalize.core.ops import OpRecord, map_refs
from functionalize.core.rules.registry import Engine, rule

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
# The ops of which a record must say whether gradients were on, as `meta["gradients"]`.
READS_GRAD_MODE = frozenset({_LAYER})

_LIBRARY = torch.library.Library("functionalize", "FRAGMENT")  # while it lives, so does the op
_LIBRARY.define(str(_LAYER._schema).removeprefix("aten::"))


@torch.library.impl(_LIBRARY, "mkldnn_rnn_layer", "CompositeExplicitAutograd")
def _trained_layer(*args: Any) -> Any:
    with below_autograd(), torch.enable_grad():
        return _LAYER(*args)


@torch.library.register_fake("functionalize::mkldnn_rnn_layer", lib=_LIBRARY)
def _fake_layer(*args: Any) -> Any:
    return _LAYER(*args)


@rule(_LAYER)
def layer(engine: Engine, record: OpRecord) -> Any:
    """Run live, an op sees the gradient mode of its caller, and a record says nothing of it."""
    if not record.meta.get("gradients"):
        return engine.pure(record)
    trained = torch.ops.functionalize.mkldnn_rnn_layer.default
    return engine.emit.call(trained, *map_refs(engine.read, record.args))
