"""The pre-pass and its users: `functionalize_storage`, `aot_function`, the torch.compile backends.

    fn ── functionalize_storage ──▶ fn without resizes inside, and an epilogue that resizes and writes inputs
       ── AOTAutograd ────────────▶ forward graph (pure, then the epilogue), backward graph
       ── partition_fn ───────────▶ views of freed parameters are made in backward, not saved

Invariant: after a call the inputs have the function's own storage effects and no others.
Refusals: see `functions/substitution.py`; an error names the op and the user's line.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from functionalize._compat.autograd import KeptVersions
from functionalize._compat.compilers import aot_autograd, inductor, register_backend
from functionalize._compat.fakes import FakeTensor
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.errors import UncapturableError
from functionalize.functions.input_epilogue import UNCOUNTED, EntrySizes
from functionalize.functions.substitution import Substitution
from functionalize.state.arguments import leaf_names
from functionalize.util.structure import flatten

# The op that stands for `tensor.untyped_storage().resize_(nbytes)` and dispatches.
resize_storage_bytes_ = torch.ops.inductor.resize_storage_bytes_


def functionalize_storage(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` without storage resizes inside: an epilogue sets the final size and contents of its inputs.

    Before the epilogue, ops compute with values that are substituted for the resized storages; autograd sees
    the arguments themselves. The result can be called, or passed to `make_fx` or AOTAutograd. For
    `torch.compile` use the backend "functionalize", which includes this pre-pass.

    Raises a `FunctionalizeError` with the op and the user's line where freed or undefined data is read.

        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def refill(p, shard):
        ...     fz.functions.resize_storage_bytes_(p, 16)
        ...     p.copy_(shard)
        ...     out = p.sin()
        ...     fz.functions.resize_storage_bytes_(p, 0)
        ...     return out
        >>> p, shard = torch.empty(4), torch.ones(4)
        >>> _ = p.untyped_storage().resize_(0)
        >>> gm = make_fx(fz.functions.functionalize_storage(refill))(p, shard)
        >>> [node.name for node in gm.graph.nodes if node.op == "call_function"]
        ['clone', 'sin']
    """

    sizes = EntrySizes()

    @functools.wraps(fn)
    def functional(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return fn(*args, **kwargs)
        if torch.compiler.is_exporting():
            raise UncapturableError(
                "torch.export records a function above autograd, out of reach of the pre-pass: export the "
                "program instead, as in torch.export.export(fz.functions.trace(fn, *args).lower(), args)"
            )
        return _call(fn, lambda: _inputs(fn, args, kwargs), sizes, args, kwargs)

    return functional


def _call(
    fn: Callable[..., Any],
    inputs: Callable[[], Iterator[tuple[str, Tensor]]],
    sizes: EntrySizes,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    mode = Substitution(inputs, sizes)
    with mode:
        out = fn(*args, **kwargs)
    mode.apply_epilogue()
    return mode.outputs(out)


def _inputs(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a call reads: its arguments, and parameters and buffers of the module that `fn` belongs to."""
    leaves, spec = flatten((args, kwargs))
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        for name, leaf in zip(leaf_names(fn, spec), leaves, strict=True):
            if isinstance(leaf, Tensor):
                yield name, leaf
    owner = getattr(fn, "__self__", fn)
    if isinstance(owner, torch.nn.Module):
        yield from owner.named_parameters()
        yield from owner.named_buffers()


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Callable[..., Any],
    bw_compiler: Callable[..., Any] | None = None,
    partition_fn: Callable[..., Any] | None = None,
    **kw: Any,
) -> Callable[..., Any]:
    """`functorch.compile.aot_function` for functions that resize storages.

    The function goes through `functionalize_storage`, and `partition_fn` defaults to one that makes views of
    freed parameters in backward instead of saving them. `keep_inference_input_mutations` defaults to True.
    Everything else is as documented there (`torch/_functorch/aot_autograd.py`).

        >>> from functorch.compile import make_boxed_func
        >>> def compiler(gm, inputs):
        ...     return make_boxed_func(gm.forward)
        >>> x = torch.ones(2, requires_grad=True)
        >>> fz.functions.aot_function(lambda x: x.sin(), compiler)(x).sum().backward()
        >>> torch.equal(x.grad, torch.ones(2).cos())
        True
    """
    from functorch.compile import aot_function as stock_aot_function  # type: ignore[import-untyped]

    kw.setdefault("keep_inference_input_mutations", True)
    if kw.get("inference_compiler") is not None:
        kw["inference_compiler"] = _keeping_versions(kw["inference_compiler"])
    return stock_aot_function(
        functionalize_storage(fn),
        _keeping_versions(fw_compiler),
        bw_compiler or fw_compiler,
        partition_fn=_partition(partition_fn),
        **kw,
    )


def _partition(partition_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """`partition_fn` with resizes kept in forward; by default, the partitioner that recomputes views in backward.

    torch's own partitioners do not treat a resize as a side effect and would repeat those of forward in backward.
    """
    if partition_fn is None:
        from functionalize.passes.recompute_views import partitioner

        return partitioner("default")

    def partition(joint_module: fx.GraphModule, joint_inputs: Any, **kw: Any) -> Any:
        for node in joint_module.graph.find_nodes(op="call_function", target=RESIZE_STORAGE):
            if node.meta.get("partitioner_tag") != "is_backward":
                node.meta["partitioner_tag"] = "must_be_in_forward"
        return partition_fn(joint_module, joint_inputs, **kw)

    return partition


def _keeping_versions(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """`compiler`, whose forward does not increment version counters that the function did not increment.

    FSDP refills a parameter between forward and backward without incrementing its version counter. A `copy_` in a
    graph increments it, and autograd would reject the saved parameter in backward.
    """

    @functools.wraps(compiler)
    def compile(gm: fx.GraphModule, inputs: Any) -> Any:
        compiled = compiler(gm, inputs)
        placeholders = gm.graph.find_nodes(op="placeholder")
        uncounted = [
            i for i, n in enumerate(placeholders) if any(u.meta.get(UNCOUNTED) for u in n.users)
        ]
        if not uncounted:
            return compiled
        boxed = getattr(compiled, "_boxed_call", False)

        def run(*args: Any) -> Any:
            values = args[0] if boxed else args
            targets = tuple(values[i] for i in uncounted)
            with KeptVersions(targets):
                return compiled(*args)

        run._boxed_call = boxed  # type: ignore[attr-defined]
        return run

    return compile


# -- torch.compile ---------------------------------------------------------------------------------


def functionalize_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """`torch.compile(fn, backend="functionalize")`: pre-pass, AOTAutograd; its graphs run uncompiled."""
    from functorch.compile import make_boxed_func

    def uncompiled(module: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(module.forward)

    fw_compiler = _keeping_versions(uncompiled)
    return compile_with(
        gm, example_inputs, fw_compiler=fw_compiler, bw_compiler=uncompiled, **options
    )


def functionalize_inductor_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """`torch.compile(fn, backend="functionalize_inductor")`: pre-pass, then Inductor with its defaults."""
    _restore_entry_sizes(gm, example_inputs)
    return inductor(_as_one_call(gm), example_inputs, **options)


def compile_with(
    gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """The pre-pass on a graph of Dynamo, then AOTAutograd with `options` (`fw_compiler`, ...)."""
    _restore_entry_sizes(gm, example_inputs)
    options["partition_fn"] = _partition(options.get("partition_fn"))
    options.setdefault("keep_inference_input_mutations", True)
    return aot_autograd(**options)(_as_one_call(gm), example_inputs)


def _restore_entry_sizes(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Resize the storages of Dynamo's fake inputs back to the sizes that the inputs have on entry.

    Dynamo executes each resize on its fakes, and AOTAutograd continues with the same objects.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, example in zip(placeholders, example_inputs, strict=True):
        fake = node.meta.get("example_value")
        if isinstance(example, FakeTensor) or type(fake) is not FakeTensor:
            continue
        nbytes = example.untyped_storage().nbytes()
        if fake.untyped_storage().nbytes() != nbytes:
            fake.untyped_storage().resize_(nbytes)


def _as_one_call(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module whose one call runs `gm` under the pre-pass; AOTAutograd accepts only graph modules."""
    graph = fx.Graph()
    placeholders = []
    for node in gm.graph.find_nodes(op="placeholder"):
        placeholders.append(graph.placeholder(node.target))
        placeholders[-1].meta = dict(node.meta)
    names = [node.name.removeprefix("l_").removesuffix("_") for node in placeholders]

    sizes = EntrySizes()

    def prepass(*args: Any) -> Any:
        def inputs() -> Iterator[tuple[str, Tensor]]:
            yield from ((n, a) for n, a in zip(names, args, strict=True) if isinstance(a, Tensor))

        return _call(fx.Interpreter(gm).run, inputs, sizes, args, {})

    returned = graph.call_function(prepass, tuple(placeholders))
    (end,) = gm.graph.find_nodes(op="output")
    graph.output(
        [graph.call_function(operator.getitem, (returned, i)) for i in range(len(end.args[0]))]
    )
    module = fx.GraphModule(gm, graph)
    module.meta = gm.meta
    return module


register_backend("functionalize", functionalize_backend)
register_backend("functionalize_inductor", functionalize_inductor_backend)
