"""Dynamo, AOTAutograd, Inductor and TorchScript."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.fakes import FakeTensorMode


def load_dynamo() -> None:
    """Import Dynamo, which every optimizer and checkpoint imports at its first use; it takes a second.

    No mode sees what its modules compute when they are imported.
    """
    if "torch._dynamo" not in sys.modules:
        with disable_current_modes():
            importlib.import_module("torch._dynamo")


def uncompiled(active: Callable[[], bool]) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """(owner, name, replacement) by which compiled functions run uncompiled in a thread where `active()` holds.

    `torch.compiler.set_stance("force_eager")` is the public way, but it holds in every thread. None, while nothing was
    compiled. Since torch 2.13 `fullgraph=True` raises if no frame was compiled, unless one around it counts them: 0.
    """
    module = sys.modules.get("torch._dynamo.eval_frame")
    for name, when_active in (
        ("_callback_from_stance", None),
        ("set_fullgraph_compiled_frame_count", 0),
    ):
        original = getattr(module, name, None)
        if original is not None:
            yield module, name, _unless(original, active, when_active)


def _unless(original: Any, active: Callable[[], bool], instead: Any) -> Callable[[Any], Any]:
    def unless_active(argument: Any) -> Any:
        return instead if active() else original(argument)

    unless_active.__doc__ = original.__doc__
    return unless_active


def tracers_of_torchscript() -> list[tuple[Any, str]]:
    """(owner, name) of the functions by which `torch.jit.trace` and ONNX trace and check code (torch 2.0 to 2.15)."""
    of_modules = ("_create_method_from_trace", "_create_method_from_trace_with_dict")
    of_functions = ("_create_function_from_trace", "_create_function_from_trace_with_dict")
    found: list[tuple[Any, str]] = [(torch._C.ScriptModule, name) for name in of_modules]
    found += [(torch._C, name) for name in (*of_functions, "_create_graph_by_tracing")]
    found.append((sys.modules["torch.jit._trace"], "_check_trace"))
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def aot_autograd(**options: Any) -> Any:
    """A Dynamo backend made of a forward and a backward compiler; there is no public function for that."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(**options)


def inductor(gm: torch.fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
    """Inductor as a function of a graph; the public API has it as a backend name only. Slow to import."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, **options)


def inductor_region(
    graph: fx.Graph, like: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> Any:
    """Compile a pure graph of tensors by Inductor: the result `f(inputs)` empties the list and returns the results.

    like, results: tensors with the size, stride, dtype and device of the inputs and of the results. The public API of
    Inductor compiles graphs of Dynamo or AOTAutograd only, and adds their wrappers, which cost time at every call.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    module, context = fx.GraphModule({}, graph), torch._guards.TracingContext

    def laid_out(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [_with_strides(t, r) for t, r in zip(module(*inputs), results, strict=True)]

    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode, torch.no_grad():
        inputs = [
            torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in like
        ]
        traced = make_fx(laid_out, decomposition_table=select_decomp_table())(*inputs)
    (end,) = traced.graph.find_nodes(op="output")
    end.meta["user_visible_output_idxs"] = list(range(len(results)))
    options = {"size_asserts": False, "alignment_asserts": False, "triton.cudagraphs": False}
    with torch._guards.tracing(context(mode)), config.patch(options):
        compiled = compile_fx_inner(traced, inputs, is_inference=True)
    return getattr(compiled, "current_callable")  # noqa: B009 - skips the wrapper that records runs for debugging


def _with_strides(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`t` with the strides of `like`: some decompositions return other strides than the op."""
    if _same_strides(t, like):
        return t
    order = sorted(range(t.dim()), key=like.stride, reverse=True)
    back = [order.index(dim) for dim in range(t.dim())]
    made = t.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    if not _same_strides(made, like):
        raise RuntimeError(f"a result has strides {t.stride()}, and cannot have {like.stride()}")
    return made


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(
        x == y or size == 1 for x, y, size in zip(a.stride(), b.stride(), a.size(), strict=True)
    )


def register_backend(name: str, backend: Any) -> None:
    """Register `torch.compile(backend=name)`, unless an entry point declares it: torch then loads it on first use."""
    from torch._dynamo.backends.registry import _BACKENDS, register_backend

    if name not in _BACKENDS:
        register_backend(backend, name=name)


def script_builtins() -> Any:
    """The module with the table by which `torch.jit.script` maps functions of torch to ops (2.11 to 2.15)."""
    from torch.jit import _builtins

    return _builtins
