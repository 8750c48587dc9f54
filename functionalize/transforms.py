"""`trace` and its kin: a function as a program, or as a function without resizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from functionalize._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    is_traceable_wrapper_subclass,
)
from functionalize.core.epilogue import Action
from functionalize.core.program import (
    AliasGuard,
    Argument,
    Captured,
    ConstantGuard,
    Guard,
    Program,
    TensorGuard,
)
from functionalize.core.where import line_of
from functionalize.errors import EagerError, FunctionalizeError, UncapturableError
from functionalize.frontend.build import Builder, GivenInput
from functionalize.frontend.dispatch import Recorder
from functionalize.run.boxed import boxed


def trace(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """The program of `fn`, recorded on fakes of its arguments; the arguments are never touched.

    Tensors may alias each other, have empty storages, be wrapper subclasses. Other leaves are constants
    and are guarded. Returns a `Program`; call it with arguments of the same shapes to replay.

    Raises a `FunctionalizeError` that names the op, the tensor, the sizes and the user's line for a program
    that eager PyTorch cannot run, and for one that has no functional form.
    """
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    fakes = [_fake(fake_mode, leaf) for leaf in leaves]
    recorder = Recorder(convert=fake_mode)
    given = _given_inputs(recorder, fn, fakes, in_spec)
    fake_args, fake_kwargs = pytree.tree_unflatten(fakes, in_spec)
    out = _run(recorder, fake_mode, lambda: fn(*fake_args, **fake_kwargs))
    builder = Builder(recorder)
    known = {g.ref.storage for g in given}
    for external in recorder.externals:
        if external.ref.storage in known:
            continue
        if external.literal:
            builder.add_constant(external.ref, external.tensor)
        else:
            given.append(GivenInput(external.info.name, external.ref, Captured(external.real)))
    builder.add_inputs(given)
    builder.discharge()
    out_leaves, out_spec = pytree.tree_flatten(out)
    with recorder.quiet(), fake_mode:
        outputs = builder.roles(out_leaves, fakes)
        epilogue: list[Action] = builder.epilogue()
        for index, each in enumerate(given):
            if isinstance(each.source, Argument):
                moved = builder.moved(index, _inner(fakes, each.source))
                if moved is not None:
                    epilogue.append(moved)
    return builder.program(outputs, epilogue, _guards(builder, leaves), in_spec, out_spec, boxed)


def _fake(mode: FakeTensorMode, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    fake = mode.from_tensor(leaf, static_shapes=True)
    return fake


def _inner(leaves: Sequence[Any], source: Argument) -> Tensor:
    value = leaves[source.leaf]
    for name in source.attributes:
        value = getattr(value, name)
    assert isinstance(value, Tensor)
    return value


def _given_inputs(
    recorder: Recorder, fn: Callable[..., Any], leaves: Sequence[Any], spec: pytree.TreeSpec
) -> list[GivenInput]:
    given: list[GivenInput] = []

    def add(value: Any, name: str, leaf: int, attributes: tuple[str, ...]) -> None:
        if is_traceable_wrapper_subclass(value):
            for attribute in value.__tensor_flatten__()[0]:
                inner = getattr(value, attribute)
                add(inner, f"{name}.{attribute}", leaf, (*attributes, attribute))
        elif isinstance(value, Tensor):
            ref = recorder.bring_in(value, name)
            given.append(GivenInput(name, ref, Argument(leaf, attributes)))

    for i, (leaf, name) in enumerate(zip(leaves, _leaf_names(fn, leaves, spec), strict=True)):
        add(leaf, name, i, ())
    return given


def _leaf_names(fn: Callable[..., Any], leaves: Sequence[Any], spec: pytree.TreeSpec) -> list[str]:
    """A name per leaf, from the signature of `fn` where it has one."""
    tree = pytree.tree_unflatten(list(leaves), spec)
    try:
        signature = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        signature = []
    names = []
    for path, _ in pytree.tree_flatten_with_path(tree)[0]:
        kind, *rest = [getattr(k, "idx", getattr(k, "key", getattr(k, "name", k))) for k in path]
        if kind == 0 and rest:
            at, *rest = rest
            positional = [p for p in signature if p.kind is not p.KEYWORD_ONLY]
            name = f"arg_{at}"
            if at < len(positional) and positional[at].kind is not inspect.Parameter.VAR_POSITIONAL:
                name = positional[at].name
            elif positional and positional[-1].kind is inspect.Parameter.VAR_POSITIONAL:
                name = f"{positional[-1].name}_{at - len(positional) + 1}"
        else:
            name, *rest = [str(r) for r in rest] or ["arg"]
        names.append("_".join([name, *(str(r) for r in rest)]))
    return names


def _run(recorder: Recorder, mode: FakeTensorMode, call: Callable[[], Any]) -> Any:
    """Run `call` while recording; what eager cannot run becomes an error of ours."""
    try:
        with mode, recorder:
            return call()
    except FunctionalizeError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        record = recorder.failed[1] if recorder.failed else None
        where = line_of(record.traceback) if record else ""
        raise UncapturableError(
            f"{error.func} gives Python a number, or a size, that depends on data; "
            f"on fakes there is no data\n  {where}"
        ) from error
    except Exception as error:
        if recorder.failed is None or recorder.failed[0] is not error:
            raise
        record = recorder.failed[1]
        raise EagerError(
            f"{record.target} failed on {recorder.describe(record)}: {error}\n"
            f"  {line_of(record.traceback)}"
        ) from error


def _guards(builder: Builder, leaves: Sequence[Any]) -> list[Guard]:
    guards: list[Guard] = [
        ConstantGuard(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)
    ]
    guards += [TensorGuard(i, spec) for i, spec in enumerate(builder.inputs)]
    if builder.inputs:
        names = tuple(spec.name for spec in builder.inputs)
        guards.append(AliasGuard(tuple(builder.storage_of_input), names))
    return guards
