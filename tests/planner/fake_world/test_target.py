"""A target personality: which kernels, defaults and names a planned CUDA device has, on fake CPU tensors."""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import (
    scaled_dot_product_attention,
)  # as a user's module has it, before any plan
from torch.utils.checkpoint import DefaultDeviceType, checkpoint

import functionalize as fz
from functionalize._compat.dispatch import TorchDispatchMode, all_op_names
from functionalize._compat.fakes import FakeTensorMode
from functionalize.errors import TargetError
from functionalize.ir.generators import is_random
from functionalize.planner.fake_world import autocast as autocasts
from functionalize.planner.fake_world import sdpa_choice as attention
from functionalize.planner.fake_world.cuda_kernels import Choice, Choices
from functionalize.planner.fake_world.target import Target, target_named
from functionalize.planner.fake_world.world import world
from functionalize.util.torch_release import minor_of

H100, A100, L4 = Target(), Target(capability=(8, 0)), Target(capability=(8, 9))
BF16 = torch.bfloat16


class Ops(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Live(TorchDispatchMode):
    """The bytes of the storages that were made and are alive; the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.untyped_storage() not in given:
                self._add(t.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        if storage not in self._seen:
            self._seen.add(storage)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._remove, storage.nbytes())

    def _remove(self, nbytes: int) -> None:
        self.bytes -= nbytes


@contextmanager
def planned(target: Target = H100) -> Iterator[Choices]:
    with FakeTensorMode(), target.applied() as choices:
        yield choices


def ops_of(fn: Callable[[], Any], target: Target = H100) -> list[str]:
    """The ops of `fn` on a planned device."""
    with planned(target), Ops() as ops:
        fn()
    return ops.names


def qkv(*shape: int, dtype: torch.dtype = BF16, kv: tuple[int, ...] | None = None) -> list[Tensor]:
    shapes = (shape, kv or shape, kv or shape)
    return [torch.empty(s, dtype=dtype, requires_grad=True) for s in shapes]


def attended(
    *shape: int, dtype: torch.dtype = BF16, kv: tuple[int, ...] | None = None, **options: Any
) -> Tensor:
    given = qkv(*shape, dtype=dtype, kv=kv)
    mask = options.pop("mask", None)
    if mask is not None:
        options["attn_mask"] = torch.empty(mask, dtype=torch.bool)
    return F.scaled_dot_product_attention(*given, **options)


# -- attention: which kernel -----------------------------------------------------------------------------

SHAPE = (2, 4, 128, 64)
GROUPS = (2, 2, 128, 64)
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    # what is called: the kernel on an H100, on an A100
    "plain": ({}, "cudnn", "flash"),
    "causal": ({"is_causal": True}, "cudnn", "flash"),
    "float32": ({"dtype": torch.float32}, "efficient", "efficient"),
    "mask": ({"mask": (2, 1, 128, 128)}, "cudnn", "efficient"),
    "mask of two dimensions": ({"mask": (128, 128)}, "cudnn", "efficient"),
    "float32, mask": ({"dtype": torch.float32, "mask": (128, 128)}, "efficient", "efficient"),
    "dropout in 16ths": ({"dropout_p": 0.125}, "cudnn", "flash"),
    "dropout": ({"dropout_p": 0.1}, "flash", "flash"),
    "groups": ({"kv": GROUPS, "enable_gqa": True}, "cudnn", "flash"),
    "scale": ({"scale": 0.3}, "cudnn", "flash"),
    "cross": ({"kv": (2, 4, 77, 64)}, "cudnn", "flash"),
    "causal cross": ({"kv": (2, 4, 77, 64), "is_causal": True}, "cudnn", "efficient"),
    "one key": ({"kv": (2, 4, 1, 64)}, "flash", "flash"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_device_takes_the_kernel_of_its_dispatcher(case: str) -> None:
    options, hopper, ampere = CASES[case]
    for target, kernel in ((H100, hopper), (A100, ampere)):
        with planned(target) as choices, Ops() as ops:
            out = attended(*SHAPE, **options)
            out.sum().backward()
        name = f"_scaled_dot_product_{kernel}_attention"
        assert [n for n in ops.names if "attention" in n] == [name, f"{name}_backward"]
        assert out.shape == SHAPE
        assert choices.kernels("scaled_dot_product_attention") == {kernel: 1}


@pytest.mark.parametrize(
    ("shape", "target", "kernel"),
    [
        ((1, 2, 64, 256), H100, "flash"),  # cuDNN trains up to 128
        ((1, 2, 64, 60), H100, "flash"),  # cuDNN takes multiples of 8, flash pads
        ((1, 2, 64, 320), H100, "efficient"),
        ((1, 2, 64, 256), A100, "flash"),
        ((1, 2, 64, 224), L4, "efficient"),  # flash cannot train with it there
        ((1, 2, 64, 192), L4, "flash"),
        ((70000, 2, 8, 64), H100, "flash"),
    ],
)
def test_head_sizes(shape: tuple[int, ...], target: Target, kernel: str) -> None:
    with planned(target) as choices:
        assert attended(*shape).shape == shape
    assert choices.kernels("scaled_dot_product_attention") == {kernel: 1}


@pytest.mark.parametrize(
    ("contexts", "kernel"),
    [
        ([SDPBackend.FLASH_ATTENTION], "flash"),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "efficient"),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], "cudnn"),
        ([SDPBackend.MATH], "math"),
    ],
)
def test_sdpa_kernel_is_followed(contexts: list[SDPBackend], kernel: str) -> None:
    with planned() as choices, sdpa_kernel(contexts):
        attended(*SHAPE)
    assert choices.kernels("scaled_dot_product_attention") == {kernel: 1}


def test_the_order_of_sdpa_kernel_is_followed() -> None:
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with planned() as choices, sdpa_kernel(order, set_priority=True):
        attended(*SHAPE)
    assert choices.kernels("scaled_dot_product_attention") == {"efficient": 1}


@pytest.mark.parametrize("kernel", attention.KERNELS)
def test_a_target_can_say_the_kernel(kernel: str) -> None:
    with planned(Target(attention=kernel)) as choices:
        attended(*SHAPE)
    assert choices.rows == [Choice("scaled_dot_product_attention", kernel, "the target says so", 1)]


# -- attention: what a kernel gives -----------------------------------------------------------------------


def kept_by(target: Target, dtype: torch.dtype = BF16) -> int:
    """The bytes that attention of (1, 8, 1024, 128) keeps for backward, its result among them."""
    with planned(target):
        given = qkv(1, 8, 1024, 128, dtype=dtype)
        with Live() as live:
            out = F.scaled_dot_product_attention(*given, is_causal=True)
            kept = live.bytes
        del out
    return kept


def test_fused_kernels_keep_the_result_and_a_number_per_row() -> None:
    result, rows = 1024 * 8 * 128 * 2, 1024 * 8 * 4
    assert (
        kept_by(Target(attention="flash")) == result + rows + 3 * 8
    )  # and the state of a generator
    assert kept_by(Target(attention="cudnn")) == result + rows + 2 * 8
    assert kept_by(Target(attention="efficient")) == result + rows + 2 * 8


def test_math_keeps_the_scores() -> None:
    scores = 8 * 1024 * 1024 * 4
    assert kept_by(Target(attention="math")) > scores > 10 * kept_by(H100)


def test_peak_memory_of_a_step_of_attention() -> None:
    peaks = {}
    for kernel in ("flash", "math"):
        with planned(Target(attention=kernel)):
            given = qkv(1, 8, 2048, 128)
            with Live() as live:
                F.scaled_dot_product_attention(*given, is_causal=True).sum().backward()
            peaks[kernel] = live.peak
    assert peaks["math"] > 10 * peaks["flash"]


def test_efficient_attention_pads_rows_of_statistics_and_mask() -> None:
    shapes = {}

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if "efficient_attention" in str(func):
                shapes["statistics"], shapes["mask"] = out[1].shape, args[3].stride()
            return out

    with planned(A100), Shapes():
        attended(2, 4, 50, 64, mask=(2, 1, 50, 50))
    assert shapes == {"statistics": (2, 4, 64), "mask": (50 * 56, 0, 56, 1)}


@pytest.mark.parametrize(("mask", "causal"), [(None, False), (None, True), ((2, 1, 16, 16), False)])
def test_math_attention_is_what_torch_makes_of_it(mask: Any, causal: bool) -> None:
    def call() -> None:
        attended(2, 4, 16, 8, mask=mask, is_causal=causal, dropout_p=0.1).sum().backward()

    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH), Ops() as eager:
        call()
    with planned(Target("cpu", attention="math")), sdpa_kernel(SDPBackend.MATH), Ops() as cpu:
        call()
    fused_dropout = {"native_dropout", "native_dropout_backward"}
    plain_dropout = {"bernoulli_", "div_", "empty_like", "mul"}
    ours = [n for n in ops_of(call, Target(attention="math")) if n not in fused_dropout]
    assert cpu.names == eager.names
    assert [n for n in ours if n not in plain_dropout] == [
        n for n in eager.names if n not in plain_dropout
    ]


def test_a_function_imported_before_is_overridden() -> None:
    assert "_scaled_dot_product_cudnn_attention" in ops_of(
        lambda: scaled_dot_product_attention(*qkv(*SHAPE))
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_takes_the_same_kernels(reentrant: bool) -> None:
    def block(x: Tensor) -> Tensor:
        return F.dropout(F.scaled_dot_product_attention(x, x, x), 0.1)

    def step() -> None:
        x = torch.empty(SHAPE, dtype=BF16, requires_grad=True)
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()

    with planned() as choices, Ops() as ops:
        step()
    assert ops.names.count("_scaled_dot_product_cudnn_attention") == 2
    assert ops.names.count("_scaled_dot_product_cudnn_attention_backward") == 1
    assert ops.names.count("native_dropout") == 2
    assert {row.op: row.count for row in choices.rows} == {
        "scaled_dot_product_attention": 2,
        "dropout": 2,
    }


def test_inference_mode_takes_the_device_s_kernel() -> None:
    with planned() as choices, torch.inference_mode():
        attended(*SHAPE)
    assert choices.kernels("scaled_dot_product_attention") == {"cudnn": 1}


def test_tensor_parallel_attention_and_norms() -> None:
    with world(mesh={"dp": 4, "tp": 8}) as w:
        mesh = w.mesh["tp"]
        local = torch.empty(2, 4, 64, 32, dtype=BF16, requires_grad=True)
        x = DTensor.from_local(local, mesh, [Shard(1)])
        out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        F.rms_norm(out, (32,)).sum().backward()
        weight = DTensor.from_local(torch.empty(32, dtype=BF16), mesh, [Replicate()])
        normed = F.layer_norm(out, (32,), weight)
        assert out.placements == normed.placements == (Shard(1),)
        assert w.choices.kernels("scaled_dot_product_attention") == {"cudnn": 1}
        assert w.choices.kernels("rms_norm") == {"_fused_rms_norm": 1}


# -- attention: refusals ----------------------------------------------------------------------------------


def test_math_attention_is_never_silent() -> None:
    with planned(), pytest.raises(TargetError) as caught:
        attended(4, 128, 60)
    message = str(caught.value)
    assert message.startswith(
        "scaled_dot_product_attention(query bfloat16 [4, 128, 60], key bfloat16 [4, 128, 60], value bfloat16 "
        "[4, 128, 60]): sm_90 would take math attention, which keeps the scores of every head in memory"
    )
    for kernel in ("cudnn", "flash", "efficient"):
        assert f"    {kernel}: needs 4 dimensions, not [3, 3, 3]" in message
    assert "test_target.py" in message and "in attended: return F.scaled_dot" in message
    assert 'accept math attention with Target(attention="math")' in message


REFUSALS: dict[str, tuple[Target, str, dict[str, Any], str]] = {
    "mask": (H100, "flash", {"mask": (128, 128)}, "takes no mask"),
    "type": (H100, "flash", {"dtype": torch.float32}, "needs float16 or bfloat16, not float32"),
    "double": (H100, "efficient", {"dtype": torch.float64}, "or float32, not float64"),
    "device": (Target(capability=(7, 5)), "flash", {}, "needs sm_80 to sm_121, not sm_75"),
    "lengths": (
        H100,
        "flash",
        {"kv": (2, 4, 77, 64), "is_causal": True},
        "is_causal needs equal lengths, not 128 and 77",
    ),
    "heads": (H100, "flash", {"kv": GROUPS}, r"the numbers of heads differ: \[4, 2, 2\]"),
    "groups": (H100, "efficient", {"kv": GROUPS, "enable_gqa": True}, "numbers of heads differ"),
    "uneven groups": (
        H100,
        "cudnn",
        {"kv": (2, 3, 128, 64), "enable_gqa": True},
        r"heads \[4, 3, 3\] are not groups of the same size",
    ),
    "batches": (H100, "flash", {"kv": (1, 4, 128, 64)}, r"the batches differ: \[2, 1, 1\]"),
    "nothing": (H100, "flash", {"kv": (2, 4, 0, 64)}, "a sequence is empty"),
    "one": (H100, "cudnn", {"kv": (2, 4, 1, 64)}, "a sequence has length 1"),
    "dropout": (H100, "cudnn", {"dropout_p": 0.1}, "needs dropout in steps of 1/16, not 0.1"),
    "mask's shape": (H100, "cudnn", {"mask": (4, 128, 128)}, "does not fit"),
    "sizes": (H100, "flash", {"kv": (2, 4, 128, 32)}, r"equal head sizes .*\[64, 32, 32\]"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_why_a_kernel_refuses(case: str) -> None:
    target, kernel, options, reason = REFUSALS[case]
    forced = Target(capability=target.capability, attention=kernel)
    with planned(forced), pytest.raises(TargetError, match=reason) as caught:
        attended(*SHAPE, **options)
    assert f"the target says attention={kernel!r}, which refuses" in str(caught.value)


def test_cudnn_alone_takes_groups_of_two_sizes() -> None:
    with planned() as choices:
        (q, _, v), k = qkv(*SHAPE), torch.empty(GROUPS, dtype=BF16)
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            pytest.raises(
                TargetError, match=r"flash: heads \[4, 2, 4\] are not groups of the same size"
            ),
        ):
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert choices.kernels("scaled_dot_product_attention") == {"cudnn": 1}


def test_sizes_that_no_kernel_takes() -> None:
    for kernel, text in (
        ("cudnn", "needs head sizes up to 128, not [320, 320]"),
        ("flash", "needs equal head sizes up to 256, not [320, 320, 320]"),
    ):
        with planned(Target(attention=kernel)), pytest.raises(TargetError, match=re.escape(text)):
            attended(1, 2, 8, 320)
    for kernel, text in (
        ("cudnn", "needs head sizes that 8 divides, not [60, 60]"),
        ("efficient", "needs head sizes that 8 divides, not [60, 60, 60]"),
    ):
        with planned(Target(attention=kernel)), pytest.raises(TargetError, match=re.escape(text)):
            attended(1, 2, 8, 60)
    ada = Target(capability=(8, 6), attention="flash")
    with planned(ada), pytest.raises(TargetError, match="train with head size 224 on sm_86"):
        attended(1, 2, 8, 224)
    with planned(Target(attention="cudnn")), pytest.raises(TargetError, match="65535 samples"):
        attended(70000, 1, 8, 64)


def test_strides_and_determinism() -> None:
    with planned(Target(attention="flash")):
        q, k, v = (t.transpose(-1, -2) for t in qkv(2, 4, 64, 64))
        with pytest.raises(TargetError, match=r"have strides \[64, 64, 64\], not 1"):
            F.scaled_dot_product_attention(q, k, v)
    with planned(Target(attention="efficient")):
        mask = torch.empty(64, 64, dtype=torch.bool).t()
        with pytest.raises(TargetError, match="dimension of the mask has stride 64, not 1"):
            F.scaled_dot_product_attention(*qkv(2, 4, 64, 64), mask)
    with planned(Target(attention="cudnn")):
        bias = torch.empty(64, 64, dtype=BF16, requires_grad=True)
        with pytest.raises(TargetError, match="the mask needs a gradient"):
            F.scaled_dot_product_attention(*qkv(2, 4, 64, 64), bias)
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(TargetError, match="is not deterministic"):
                attended(*SHAPE)
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_device_without_any_kernel_stops() -> None:
    with planned(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(TargetError) as caught:
        attended(*SHAPE, dtype=torch.float32)
    assert "sm_90 has no kernel for it, and would stop here" in str(caught.value)
    assert "cudnn: switched off (sdpa_kernel or torch.backends.cuda)" in str(caught.value)


def test_errors_of_eager_are_eager_s() -> None:
    with planned() as choices:
        q, k, v = qkv(*SHAPE)
        with pytest.raises(RuntimeError, match="same dtype"):
            F.scaled_dot_product_attention(q, k.float(), v)
    assert choices.rows == []


# -- other kernels ------------------------------------------------------------------------------------------


def test_dropout_keeps_a_mask_of_bytes() -> None:
    def kept(target: Target) -> int:
        with planned(target):
            x = torch.empty(64, 64, requires_grad=True)
            with Live() as live:
                out = F.dropout(x, 0.1)
                kept = live.bytes
            del out
        return kept

    assert kept(H100) == 64 * 64 * (4 + 1)
    assert kept(Target("cpu")) == 64 * 64 * (4 + 4)


@pytest.mark.parametrize(("p", "train"), [(0.1, False), (0.0, True), (1.0, True)])
def test_dropout_that_draws_nothing_is_as_it_was(p: float, train: bool) -> None:
    def call() -> None:
        F.dropout(torch.empty(3, requires_grad=True), p, train)

    with FakeTensorMode(), Ops() as eager:
        call()
    assert ops_of(call) == eager.names


def test_rms_norm_is_one_op_that_keeps_a_number_per_row() -> None:
    def step() -> None:
        x = torch.empty(8, 64, dtype=BF16, requires_grad=True)
        weight = torch.empty(64, dtype=BF16, requires_grad=True)
        F.rms_norm(x, (64,), weight, 1e-5).sum().backward()

    names = ops_of(step)
    assert {"_fused_rms_norm", "_fused_rms_norm_backward"} <= set(names) and "pow" not in names
    with planned(), Live() as live:
        x = torch.empty(8, 64, dtype=BF16, requires_grad=True)
        before = live.bytes
        out = F.rms_norm(x, (64,))
        assert live.bytes - before == 8 * 64 * 2 + 8 * 4
        del out


def test_layer_norm_keeps_its_statistics_in_float32() -> None:
    for dtype in (torch.float32, BF16, torch.float16):
        with planned():
            out, *kept = torch.native_layer_norm(
                torch.empty(8, 64, dtype=dtype), (64,), None, None, 1e-5
            )
        assert (out.dtype, [t.dtype for t in kept]) == (dtype, [torch.float32] * 2)
        assert [t.shape for t in kept] == [(8, 1)] * 2


def test_softmax_of_float16_widens_inside() -> None:
    def widen(dtype: torch.dtype) -> list[str]:
        def call() -> None:
            x = torch.empty(8, 64, dtype=dtype, requires_grad=True)
            assert x.softmax(-1, torch.float32).dtype == torch.float32
            x.log_softmax(-1, torch.float32).sum().backward()

        return ops_of(call)

    assert "_to_copy" not in widen(torch.float16)
    assert "_to_copy" in widen(BF16)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_reported(kind: Any) -> None:
    with planned() as choices:
        kind(4, 4).cuda()(torch.empty(3, 2, 4, device="cuda"))[0].sum().backward()
    (row,) = choices.rows
    assert row.kernel == "as on a CPU" and "not modelled" in row.reason and row.count == 1


# -- autocast -------------------------------------------------------------------------------------------------

RMS_NORM_IS_LISTED = minor_of(torch.__version__) >= (2, 12)


def test_the_lists_of_autocast_are_torch_s() -> None:
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text().replace("\\\n", " ")

    def listed(macro: str) -> set[str]:
        body = re.search(rf"#define {macro}\(_\)(.*)", text)
        assert body is not None
        found = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
        return {f"{name}.{overload}" if overload else name for name, overload in found}

    # torch 2.11 does not list it: its autocast computes it in the dtype of its input.
    newer = set() if RMS_NORM_IS_LISTED else {"rms_norm"}
    by_name = "" if minor_of(torch.__version__) >= (2, 13) else autocasts.FLOAT_RESULT_BY_NAME
    for names, macro in (
        (autocasts.LOWER, "AT_FORALL_LOWER_PRECISION_FP"),
        (autocasts.FLOAT, "AT_FORALL_FP32"),
        (f"{autocasts.FLOAT_RESULT} {by_name}", "AT_FORALL_FP32_SET_OPT_DTYPE"),
        (autocasts.WIDEST, "AT_FORALL_PROMOTE"),
    ):
        assert set(names.split()) - newer == listed(macro), macro


AUTOCAST: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "linear": (lambda x: F.linear(x.float(), x.float()), BF16),
    "mv": (lambda x: x.float().mv(x[0].float()), BF16),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), torch.float32),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), torch.float32 if RMS_NORM_IS_LISTED else BF16),
    "softmax": (lambda x: x.softmax(-1), torch.float32),
    "softmax that says its type": (lambda x: x.softmax(-1, BF16), BF16),
    "sum": (lambda x: x.sum(), torch.float32),
    "sum of integers": (lambda x: x.long().sum(), torch.int64),
    "prod": (lambda x: x.prod(), torch.float32),
    "norm": (lambda x: torch.norm(x, 2), torch.float32),
    "exp": (lambda x: x.exp(), torch.float32),
    "exp of doubles": (lambda x: x.double().exp(), torch.float64),
    "cat": (lambda x: torch.cat([x, x]), BF16),
    "cat of two types": (lambda x: torch.cat([x, x.float()]), torch.float32),
    "addcmul": (lambda x: torch.addcmul(x, x.float(), x), torch.float32),
    "dot": (lambda x: x[0].dot(x[1]), BF16),
    "pad": (lambda x: F.pad(x[None], (1, 1), "reflect"), BF16),
    "cross_entropy": (lambda x: F.cross_entropy(x, x[:, 0].long()), torch.float32),
    "attention": (lambda x: F.scaled_dot_product_attention(*[x.float()[None, None]] * 3), BF16),
}


@pytest.mark.parametrize("case", AUTOCAST)
def test_autocast_has_the_device_s_lists(case: str) -> None:
    fn, dtype = AUTOCAST[case]
    with planned(), torch.autocast("cuda", dtype=BF16):
        assert fn(torch.empty(8, 8, dtype=BF16, requires_grad=True)).dtype == dtype


def test_cross_entropy_takes_the_logits_as_they_are() -> None:
    def call() -> None:
        with torch.autocast("cuda", dtype=BF16):
            F.cross_entropy(torch.empty(4, 8, dtype=BF16), torch.empty(4, dtype=torch.long))

    names = ops_of(call)
    assert names.index("_log_softmax") < names.index("_to_copy")  # on CPU the cast comes first


def test_autocast_gradients_checkpoints_and_the_cache_of_weights() -> None:
    def step() -> None:
        linear, x = nn.Linear(8, 8), torch.empty(2, 8)
        with torch.autocast("cuda", dtype=BF16):
            y = checkpoint(lambda x: linear(linear(x)), x, use_reentrant=False)
            assert y.dtype == BF16
        y.sum().backward()
        assert linear.weight.grad is not None and linear.weight.grad.dtype == torch.float32

    names = ops_of(step)
    assert (
        names.count("addmm") == 2 + 1
    )  # the recomputation ends where its last result is not needed
    # forward: the input, weight, bias; the same at recomputation; the gradients of weight and bias
    assert names.count("_to_copy") == 3 + 3 + 2


def test_what_autocast_tells() -> None:
    with planned():
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.float16
        for named in ("cuda", "cpu"):
            with torch.autocast(named):
                assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
                assert torch.get_autocast_dtype("cuda") == torch.float16
                with torch.autocast(named, enabled=False):
                    assert F.linear(torch.empty(8, 8), torch.empty(8, 8)).dtype == torch.float32
        with torch.autocast("cuda", dtype=BF16), torch.autocast("cuda"):
            assert torch.get_autocast_dtype("cuda") == BF16


def test_real_tensors_under_autocast_keep_the_cpu_s_lists() -> None:
    with H100.applied(), torch.autocast("cpu", dtype=BF16):
        x = torch.ones(8, 8, dtype=BF16)
        assert x.exp().dtype == BF16
        assert F.cross_entropy(x, torch.zeros(8, dtype=torch.long)).dtype == torch.float32
        assert torch.cat([x, x.float()]).dtype == torch.float32
        assert F.layer_norm(x, (8,)).dtype == BF16
        assert F.conv1d(x.float()[None], x.float()[..., None]).dtype == BF16


# -- names and defaults -----------------------------------------------------------------------------------------


def test_cuda_is_a_name_of_the_device_all_tensors_are_on() -> None:
    with planned():
        x = torch.empty(3)
        batch = [
            torch.zeros(3, device="cuda"),
            torch.tensor([1.0], device="cuda:0"),
            torch.arange(3, device=torch.device("cuda", 0)),
            torch.zeros_like(x, device="cuda"),
            x.new_zeros(3, device="cuda"),
            x.to("cuda"),
            x.to(device="cuda", dtype=BF16),
            x.to(torch.cuda.current_device(), non_blocking=True),
            x.cuda(),
            x.cuda(0, non_blocking=True),
            x.pin_memory(),
            nn.Linear(2, 2, device="cuda").weight,
            nn.Linear(2, 2).cuda().weight,
            nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
        ]
        assert x.cuda() is x
        with torch.device("cuda"):
            batch.append(nn.Linear(2, 2).weight)
        assert {t.device.type for t in batch} == {"cpu"}
        assert sum(t.sum() for t in batch).shape == ()


@pytest.mark.parametrize("target", [H100, Target("cpu")], ids=str)
def test_a_converted_module_keeps_its_parameters(target: Target) -> None:
    with planned(target):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        before = list(model.parameters())
        device = "cuda" if target is H100 else "cpu"
        for convert in (
            lambda: model.to(device),
            lambda: model.bfloat16(),
            lambda: model.to(device, torch.float16),
            lambda: model.float(),
        ):
            convert()
            after = list(model.parameters())
            assert len(after) == 5 and all(a is b for a, b in zip(after, before, strict=True))
            assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in after)
        model.half()
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        model(torch.empty(2, 4, dtype=torch.float16)).sum().backward()


def test_meshes_of_cuda() -> None:
    with world(8):
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        assert mesh.device_type == mesh["dp"].device_type == "cpu"


def test_what_scripts_ask_of_torch_cuda() -> None:
    with planned(A100):
        assert torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        assert torch.cuda.device_count() == 8 and torch.cuda.current_device() == 0
        assert torch.cuda.get_device_capability() == torch.cuda.get_device_capability(0) == (8, 0)
        assert torch.cuda.get_device_properties(0).major == 8
        assert "sm_80" in torch.cuda.get_device_name()
        torch.cuda.set_device(3)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory.memory_allocated() == 0
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.accelerator.is_available() and torch.accelerator.device_count() == 8
        torch.accelerator.synchronize()
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.range_pop()


def test_streams_and_events_do_nothing() -> None:
    with planned():
        stream, start, end = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event(True)
        start.record()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.empty(3).record_stream(stream)
            end.record(stream)
        torch.cuda.default_stream().wait_event(stream.record_event())
        end.synchronize()
        assert start.elapsed_time(end) == 0.0 and end.query() and stream.query()
        assert isinstance(stream, torch.cuda.Stream) and isinstance(end, torch.cuda.Event)


@pytest.mark.parametrize("name", ["mem_get_info", "memory_summary", "CUDAGraph"])
def test_what_a_planned_device_cannot_tell(name: str) -> None:
    with (
        planned(),
        pytest.raises(TargetError, match=rf"torch.cuda.{name} has no meaning") as caught,
    ):
        getattr(torch.cuda, name)()
    assert "test_target.py" in str(caught.value) and "leave it out" in str(caught.value)


def test_torch_s_own_code_is_told_the_truth() -> None:
    with planned():
        assert torch.cuda.is_available() and not torch.cuda.is_initialized()
        assert DefaultDeviceType.get_device_type() == "cpu"  # it asks for the accelerator
        with torch.random.fork_rng(devices=[]):
            torch.empty(3).normal_()


def test_a_grad_scaler_is_on() -> None:
    with world(2):
        scaler, model = torch.amp.GradScaler("cuda"), nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        assert scaler.is_enabled()
        with torch.autocast("cuda"):
            loss = model(torch.empty(2, 4, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_optimizers_take_foreach_by_default(name: str) -> None:
    def step() -> None:
        model = nn.Linear(4, 4)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        model(torch.empty(2, 4)).sum().backward()
        with Ops() as ops:
            optimizer.step()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seen.extend(ops.names)

    for target, foreach in ((H100, True), (Target("cpu"), False)):
        seen: list[str] = []
        with world(2, target=target):
            step()
        updates = [n for n in seen if n.startswith("_foreach_add")]
        assert bool(updates) == foreach
        assert not foreach or "_foreach_norm" in seen


# -- nothing is left behind ---------------------------------------------------------------------------------------


def surroundings() -> dict[str, Any]:
    """What a target may replace."""
    owners = [
        torch,
        torch.Tensor,
        torch.cuda,
        torch.cuda.memory,
        torch.cuda.random,
        torch.cuda.nvtx,
        torch.cuda.amp.common,
        torch.accelerator,
        torch.utils,
        torch.utils._foreach_utils,
        sys.modules["torch.optim.optimizer"],
        torch.amp.autocast_mode.autocast,
        dist.device_mesh.DeviceMesh,
        FakeTensorMode,
    ]
    found = {
        f"{o.__name__}.{name}": value
        for o in owners
        for name, value in list(vars(o).items())
        if not name.startswith("cache")  # the counters of the fake mode
    }
    found["kernels"] = {
        name: torch._C._dispatch_dump(name) for name in all_op_names() if name.startswith("aten::")
    }
    found["taken apart"] = dict(torch.ops.aten.scaled_dot_product_attention.default.py_kernels)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        name
        for name in before.keys() | after.keys()
        if before.get(name) is not after.get(name) and before.get(name) != after.get(name)
    ]


def test_everything_is_as_before() -> None:
    with planned():
        attended(*SHAPE)  # imports what it imports
    before = surroundings()
    with H100.applied():
        during = changed(before, surroundings())
    assert changed(before, surroundings()) == []
    assert len(during) > 50 and {"kernels", "torch.cuda.is_available"} <= set(during)
    with pytest.raises(ZeroDivisionError), planned():
        attended(*SHAPE)
        1 / 0  # noqa: B018
    with pytest.raises(TargetError), planned():
        attended(4, 128, 60)
    assert changed(before, surroundings()) == []


def test_a_target_that_fails_to_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings()

    def broken(find: Any) -> Any:
        raise OSError("no")

    monkeypatch.setattr(autocasts, "overridden", broken)
    with pytest.raises(OSError, match="no"), H100.applied():
        pass
    assert changed(before, surroundings()) == []
    monkeypatch.undo()
    with H100.applied():
        pass


def test_other_threads_see_no_difference() -> None:
    torch.manual_seed(0)
    given = [torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3)]

    def program() -> Any:
        out = F.scaled_dot_product_attention(*given, is_causal=True)
        out = F.rms_norm(out, (8,))
        names = out.grad_fn.name(), torch.cuda.is_available(), torch.cuda.device_count()
        try:
            nn.Linear(2, 2).to("cuda")
        except (AssertionError, RuntimeError) as error:
            names = *names, str(error)
        with torch.autocast("cpu"):
            names = *names, F.layer_norm(out.bfloat16(), (8,)).dtype
        try:
            torch.cuda.Stream()
        except RuntimeError as error:
            names = *names, str(error)
        return out, names

    answers = []
    expected, told = program()
    with planned() as choices:
        thread = threading.Thread(target=lambda: answers.append(program()))
        thread.start()
        thread.join()
    (out, names) = answers[0]
    assert torch.equal(out, expected) and names == told and choices.rows == []


def test_real_tensors_of_a_thread_that_plans_get_the_cpu_s_kernels() -> None:
    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    expected = F.scaled_dot_product_attention(x, x, x)
    with H100.applied() as choices:
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), expected)
        torch.manual_seed(0)
        dropped = F.dropout(x, 0.5)
        assert F.rms_norm(x, (8,)).grad_fn.name() == "MulBackward0"
    torch.manual_seed(0)
    assert torch.equal(dropped, F.dropout(x, 0.5))
    assert choices.rows == []


def test_a_target_inside_a_target_is_refused() -> None:
    with H100.applied():
        for target in (H100, Target("cpu")):
            inside = pytest.raises(TargetError, match=r"applied inside cuda \(sm_90\): leave the")
            with inside, target.applied():
                pass
    with Target("cpu").applied(), pytest.raises(TargetError, match="inside cpu"), A100.applied():
        pass


def test_two_threads_plan_at_once() -> None:
    kernels: dict[str, Any] = {}
    meet = threading.Barrier(2)

    def plan(target: Target) -> None:
        with planned(target) as choices:
            meet.wait()
            attended(*SHAPE)
            meet.wait()
        kernels[str(target)] = choices.kernels("scaled_dot_product_attention")

    threads = [threading.Thread(target=plan, args=(t,)) for t in (H100, A100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kernels == {"cuda (sm_90)": {"cudnn": 1}, "cuda (sm_80)": {"flash": 1}}


# -- targets and reports --------------------------------------------------------------------------------------------


def test_targets_by_name() -> None:
    assert target_named("cuda") == Target() and target_named("cpu").name == "cpu"
    assert target_named(A100) is A100
    assert str(Target("cpu")) == "cpu" and str(A100) == "cuda (sm_80)"
    assert str(Target(attention="math")) == "cuda (sm_90, attention=math)"


def test_unknown_targets() -> None:
    with pytest.raises(TargetError, match="there is no target 'tpu': take one of 'cuda', 'cpu'"):
        target_named("tpu")
    with pytest.raises(
        TargetError, match="there is no attention kernel 'fast': take one of 'cudnn'"
    ):
        Target(attention="fast")


def test_the_report(expect: Callable[[str, str], None]) -> None:
    with planned(A100) as choices:
        assert choices.text() == "for cuda (sm_80): no op had a choice of kernels"
        for _ in range(2):
            F.dropout(attended(*SHAPE), 0.1)
        attended(*SHAPE, mask=(128, 128))
        F.rms_norm(attended(*SHAPE, dtype=torch.float32), (64,))
    expect("report", choices.text() + "\n")


# -- real programs ----------------------------------------------------------------------------------------------------


def llama_step(target: Target, checkpointed: bool = False, mask: bool = False) -> tuple[Any, Any]:
    """A step of a small Hugging Face Llama under FSDP2, captured: its program, and what was chosen."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        attn_implementation="sdpa",
    )
    with world(64, target=target) as w:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config)
        model.to("cuda")
        if checkpointed:
            layers = model.model.layers
            for i, layer in enumerate(layers):
                layers[i] = checkpoint_wrapper(layer)
        mesh = init_device_mesh("cuda", (64,))
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        options = {"attention_mask": torch.empty(2, 1, 64, 64, dtype=BF16)} if mask else {}

        def train_step(ids: Tensor) -> Tensor:
            loss = model(ids, labels=ids, **options).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = fz.capture(train_step)
        ids = torch.randint(0, 256, (2, 64), device="cuda")
        for _ in range(4):
            step(ids)
        assert step.stats.replays and step.program is not None, step.explain()
        return step.program.graph_module.graph, w.choices


@pytest.mark.parametrize(
    ("target", "options", "kernel"),
    [
        (H100, {}, "cudnn"),
        (A100, {"mask": True}, "efficient"),
        (A100, {"checkpointed": True}, "flash"),
    ],
)
def test_a_captured_llama_has_the_chosen_ops(
    target: Target, options: dict[str, Any], kernel: str
) -> None:
    graph, choices = llama_step(target, **options)
    nodes = [n for n in graph.nodes if hasattr(n.target, "overloadpacket")]
    ops = [n.target.overloadpacket.__name__ for n in nodes]
    name = f"_scaled_dot_product_{kernel}_attention"
    again = 2 if options.get("checkpointed") else 1
    assert ops.count(name) == again and ops.count(f"{name}_backward") == 1
    assert not [op for op in ops if "softmax" in op and "log_softmax" not in op]
    assert choices.kernels("scaled_dot_product_attention").keys() == {kernel}
    assert all(is_random(n) for n, op in zip(nodes, ops, strict=True) if op == name)


def test_a_captured_step_has_fused_norms_and_dropout() -> None:
    with world(4):
        model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Dropout(0.1)).cuda()
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters())

        def train_step(x: Tensor) -> None:
            noise = torch.randn(8, device="cuda") + torch.tensor(1.0, device="cuda:0")
            (model(x.cuda()) + noise).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

        step = fz.capture(train_step)
        for _ in range(3):
            step(torch.empty(2, 8, device="cuda"))
        assert step.stats.replays == 1 and step.program is not None, step.explain()
        text = step.program.print_readable(print_output=False)
    for op in ("_fused_rms_norm", "_fused_rms_norm_backward", "native_dropout"):
        assert f"aten.{op}.default" in text
    assert "aten.pow" not in text and "cuda" not in text  # it can be looked at outside the world
