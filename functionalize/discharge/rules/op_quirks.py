"""Ops that do more than their schema says: batch norm's running statistics, streams, oneDNN's LSTM layer, `bincount`,
and the check by which `torch.linalg.inv`, `cholesky`, `solve` and factorizations raise.

    aten.native_batch_norm(x, w, b, mean, var, True, m, eps)
      ->  out, save_mean, save_invstd, mean', var' = aten._native_batch_norm_legit_functional(...)
    aten.mkldnn_rnn_layer(x, ...)
      ->  functionalize.mkldnn_rnn_layer(x, ...)

With gradients on, the kernel of `mkldnn_rnn_layer` calls oneDNN's training primitive and returns the workspace that
backward needs; with gradients off it calls the inference primitive and returns none. A program runs with gradients off,
so a call that was recorded with gradients on becomes a call of an op of this library, whose kernel runs aten's with
gradients on (below autograd, which saves nothing). A call that was recorded with gradients off stays aten's.

    values, info = aten.linalg_inv_ex(a)
    aten._linalg_check_errors(info, "linalg.inv", True)
      ->  values, info = aten.linalg_inv_ex(a, check_errors=True)

Refusals: `_linalg_check_errors` of what no op with `check_errors` has made; batch norm with `out=` on a CPU with an
input or output that is not contiguous: eager's kernel rounds differently, or leaves the saved statistics unwritten.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize._compat.autograd import below_autograd
from functionalize.discharge.layout import UNKNOWN, output_geometries
from functionalize.discharge.rules.registry import Engine, rule
from functionalize.errors import UnsupportedOpError
from functionalize.ir.ops import OpRecord, map_refs

aten = torch.ops.aten


@rule(aten.native_batch_norm.default)
def native_batch_norm(engine: Engine, record: OpRecord) -> Any:
    """Writes `running_mean` and `running_var` in training although its schema says it does not."""
    x, weight, bias, mean, var, training, momentum, eps = record.args
    if not training or mean is None or var is None:
        return engine.pure(record)
    target = aten._native_batch_norm_legit_functional.default
    have = output_geometries(target, record.args, {})
    values = [None if t is None else engine.read(t) for t in (x, weight, bias, mean, var)]
    out = engine.emit.call(target, *values, training, momentum, eps)
    for i, ref in ((3, mean), (4, var)):
        engine.write(ref, engine.fit(engine.part(out, i), have[i], ref))
    return [engine.part(out, i) for i in range(3)]


@rule(aten.native_batch_norm.out, aten._native_batch_norm_legit.out)
def native_batch_norm_out(engine: Engine, record: OpRecord) -> Any:
    """The same, with the results written to `out`, `save_mean` and `save_invstd`."""
    x, weight, bias, mean, var, training, momentum, eps = record.args
    outs = [record.kwargs[name] for name in ("out", "save_mean", "save_invstd")]
    for ref in outs:
        engine.storage(ref.storage).check_writable(ref.geometry)
    if not training or mean is None or var is None:
        target, stats = aten.native_batch_norm.default, []
    else:
        target, stats = aten._native_batch_norm_legit_functional.default, [mean, var]
    have = output_geometries(target, record.args, {})
    rows = x.geometry.is_contiguous and outs[0].geometry.is_contiguous
    if not rows and engine.device_of(x).type == "cpu":
        raise UnsupportedOpError(
            f"takes another formula where the input ({x.geometry}) or `out` ({outs[0].geometry}) is not "
            "contiguous: compute without out=, then copy_()"
        )
    if not training:  # the saved statistics are then empty on some devices
        have = [have[0], UNKNOWN, UNKNOWN]
    values = [None if t is None else engine.read(t) for t in (x, weight, bias, mean, var)]
    result = engine.emit.call(target, *values, training, momentum, eps)
    for i, ref in enumerate([*outs, *stats]):
        if ref.geometry.numel or have[i] is not UNKNOWN:
            engine.write(ref, engine.fit(engine.part(result, i), have[i], ref))
    return [None, None, None]


@rule(aten.bincount.default)
def bincount(engine: Engine, record: OpRecord) -> Any:
    """The size depends on data, and a guard may check it after the graph, whose ops rely on the recorded size."""
    size = record.outputs.geometry.size[0]
    return engine.emit.call(aten.slice.Tensor, engine.pure(record), 0, 0, size)


@rule(aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)
def vendor_batch_norm(engine: Engine, record: OpRecord) -> Any:
    """`(input, weight, bias, running_mean, running_var, training, factor, epsilon)`; no functional form."""
    mean, var, training = record.args[3:6]
    if training and (mean is not None or var is not None):
        raise UnsupportedOpError(
            "updates `running_mean` and `running_var` although its schema does not say so, and has no "
            "functional form: turn the vendor's kernel off (torch.backends.cudnn.flags(enabled=False)), "
            "or use BatchNorm with track_running_stats=False"
        )
    return engine.pure(record)


@rule(aten.record_stream.default)
def record_stream(engine: Engine, record: OpRecord) -> None:
    """`record_stream(Tensor(a!) self, Stream s)` informs the CUDA allocator; it writes nothing."""


CHECK_ERRORS = aten._linalg_check_errors.default
_OPTION = "check_errors"
_MOST_VIEWS = 8  # between the op that is checked and the check, as under `torch.func.vmap`


@rule(CHECK_ERRORS)
def linalg_check_errors(engine: Engine, record: OpRecord) -> None:
    """`(Tensor info, str api_name, *, bool is_matrix) -> ()` raises unless `info` is 0: the op that made it does so."""
    made = engine.read(record.args[0])
    if isinstance(made, torch.Tensor):
        engine.emit.call(CHECK_ERRORS, made, *record.args[1:], **record.kwargs)
        return
    for _ in range(_MOST_VIEWS):
        schema = getattr(made.target, "_schema", None)
        if schema is not None and any(each.name == _OPTION for each in schema.arguments):
            made.kwargs = {**made.kwargs, _OPTION: True}
            return
        if not made.args or not isinstance(made.args[0], type(made)):
            break
        made = made.args[0]
    raise UnsupportedOpError(
        f"raises by data that {made} has computed, and a program has no such check: use the function's `_ex` form, "
        "with check_errors=True"
    )


_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
# The ops whose records have `meta["gradients"]`: whether gradients were on when the op ran.
READS_GRAD_MODE = frozenset({_LAYER})

_LIBRARY = torch.library.Library(
    "functionalize", "FRAGMENT"
)  # the op exists as long as this object
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
    """In a substituted call the op runs in the gradient mode of the caller, and the record has no `gradients`."""
    if not record.meta.get("gradients"):
        return engine.pure(record)
    trained = torch.ops.functionalize.mkldnn_rnn_layer.default
    return engine.emit.call(trained, *map_refs(engine.read, record.args))
