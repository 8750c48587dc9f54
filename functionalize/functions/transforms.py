"""`trace`: the program of a function, recorded on fakes of its arguments; see `docs/functions.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from functionalize._compat.dispatch import current_modes, disable_current_modes
from functionalize._compat.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from functionalize.errors import (
    EagerError,
    FunctionalizeError,
    ResizeError,
    UncapturableError,
)
from functionalize.ir.epilogue import Action
from functionalize.ir.fake_mode import fake_mode
from functionalize.ir.guards import AliasGuard, ConstantGuard, Guard, TensorGuard
from functionalize.ir.inputs import Argument, Captured, Source
from functionalize.ir.ops import refs_in
from functionalize.program.program import Program
from functionalize.recorder.builder import Builder, TensorInput
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.stand_ins import StandIns, fake_of, is_fake
from functionalize.run.boxed import boxed
from functionalize.state.arguments import flatten_result, hidden, leaf_names
from functionalize.util.structure import flatten, unflatten
from functionalize.util.tensor_wrappers import plain_tensors_by_path
from functionalize.util.user_stack import line_of, line_of_traceback
from functionalize.walk.walker import tensor_names


def trace(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """The program of `fn`, recorded on fakes of its arguments; the arguments are never touched.

    Tensors may alias each other, have empty storages, be wrapper subclasses. Other leaves are constants
    and are guarded. Returns a `Program`; call it with arguments of the same shapes to replay.

    Raises a `FunctionalizeError` that names the op, the tensor, the sizes and the user's line for a program
    that eager PyTorch cannot run, and for one that has no functional form.

        >>> program = fz.functions.trace(lambda x: x.mul_(2).sum(), torch.ones(2))
        >>> x = torch.ones(2)
        >>> program(x), x  # the epilogue writes the argument, as eager does
        (tensor(4.), tensor([2., 2.]))
    """
    with _own_modes():
        return _Trace(fn, args, kwargs).program()


@contextmanager
def _own_modes() -> Iterator[None]:
    """Disable an enclosing fake mode or recorder, which must not see the ops of this trace."""
    if any(isinstance(m, (FakeTensorMode, Recorder)) for m in current_modes()):
        with disable_current_modes():
            yield
    else:
        yield


class _Trace:
    """One run of a function on fakes."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.fn = fn
        self.leaves, self.in_spec = flatten((args, kwargs))
        self.mode = fake_mode(allow_non_fake_inputs=True, static_shapes=True)
        self.mode.cache_enabled = False  # Note [Views of an emptied fake]
        self.fakes = [fake_of(self.mode, x) if isinstance(x, Tensor) else x for x in self.leaves]
        self.stand_ins = StandIns(self.mode, tensor_names(fn))
        self.recorder = Recorder(stand_ins=self.stand_ins)
        self.names = leaf_names(fn, self.in_spec)
        self.inputs = _argument_inputs(self.recorder, self.fakes, self.names)

    def run(self) -> Any:
        """Call the function with the fakes; returns its result."""
        args, kwargs = unflatten(self.fakes, self.in_spec)
        before = [_grad(t) for t in self.fakes]
        try:
            out = _run(self.recorder, self.mode, lambda: self.fn(*args, **kwargs))
        finally:
            changed = self.stand_ins.restore()
        for name, fake, grad in zip(self.names, self.fakes, before, strict=True):
            changed = name if _grad(fake) is not grad else changed
        if changed is not None:
            raise UncapturableError(
                f"sets the `.grad` of `{changed}`, which a program of `trace` cannot repeat: use `capture` "
                "for a training step, or return torch.autograd.grad(...)"
            )
        self.stand_ins.check(self.recorder.storages)
        return out

    def program(self) -> Program:
        """Run the function, discharge the recorded ops, and build outputs, epilogue and guards."""
        out_leaves, out_spec = flatten_result(self.run())
        reason = next(iter(self.recorder.checks.unrepeatable), None) or hidden(out_leaves)
        if reason is not None:
            raise UncapturableError(reason)
        builder = Builder(self.recorder)
        self._add_inputs(builder)
        builder.discharge()
        with self.recorder.quiet(), self.mode:
            outside = {id(t) for t in out_leaves if isinstance(t, Tensor) and not is_fake(t)}
            outputs = builder.roles(out_leaves, self.fakes, outside)
            epilogue: list[Action] = builder.epilogue()
            for index, each in enumerate(self.inputs):
                if isinstance(each.source, Argument):
                    moved = builder.moved(index, _inner(self.fakes, each.source))
                    if moved is not None:
                        epilogue.append(moved)
        return builder.program(
            outputs, epilogue, self._guards(builder), self.in_spec, out_spec, boxed
        )

    def _add_inputs(self, builder: Builder) -> None:
        """Add the inputs: arguments, used gradients of arguments, tensors found outside them, constants."""
        used = {ref.storage for r in self.recorder.records for ref in refs_in([r.args, r.kwargs])}
        self.inputs = [g for g in self.inputs if not _is_grad(g.source) or g.ref.storage in used]
        for each in self.stand_ins.found.values():
            if each.ref is not None:
                self.inputs.append(TensorInput(each.name, each.ref, Captured(each.real)))
        declared = {g.ref.storage for g in self.inputs}
        for external in self.recorder.storages.externals:
            if external.literal:
                builder.add_constant(external.ref, external.tensor)
            elif external.ref.storage not in declared and external.ref.storage in used:
                raise UncapturableError(
                    f"uses a fake tensor ({external.ref.geometry}) that is none of its arguments: pass it as an "
                    "argument"
                )
        builder.add_inputs(self.inputs)

    def _guards(self, builder: Builder) -> list[Guard]:
        guards: list[Guard] = [
            ConstantGuard(i, leaf, self.names[i])
            for i, leaf in enumerate(self.leaves)
            if not isinstance(leaf, Tensor)
        ]
        guards += [TensorGuard(i, spec) for i, spec in enumerate(builder.inputs)]
        if builder.inputs:
            names = tuple(spec.name for spec in builder.inputs)
            guards.append(AliasGuard(tuple(builder.storage_of_input), names))
        return guards


def _grad(value: Any) -> Tensor | None:
    return value.grad if isinstance(value, Tensor) and value.is_leaf else None


def _is_grad(source: Source) -> bool:
    return isinstance(source, Argument) and source.attributes[-1:] == ("grad",)


def _inner(leaves: Sequence[Any], source: Argument) -> Tensor:
    value = leaves[source.leaf]
    for name in source.attributes:
        value = getattr(value, name)
    assert isinstance(value, Tensor)
    return value


def _argument_inputs(
    recorder: Recorder, leaves: Sequence[Any], names: Sequence[str]
) -> list[TensorInput]:
    inputs: list[TensorInput] = []

    def add(value: Any, name: str, leaf: int, attributes: tuple[str, ...]) -> None:
        for path, tensor in plain_tensors_by_path(value):
            full, source = ".".join([name, *path]), Argument(leaf, (*attributes, *path))
            inputs.append(TensorInput(full, recorder.storages.bring_in(tensor, full), source))
            grad = _grad(tensor)
            if grad is not None:
                add(grad, f"{full}.grad", leaf, (*source.attributes, "grad"))

    for i, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        add(leaf, name, i, ())
    return inputs


def _run(recorder: Recorder, mode: FakeTensorMode, call: Callable[[], Any]) -> Any:
    """Run `call` while recording; an exception of eager becomes a `FunctionalizeError` that names the op."""
    try:
        with mode, recorder:
            return call()
    except FunctionalizeError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        record = recorder.failed[1] if recorder.failed else None
        where = line_of(record.traceback) if record else ""
        raise UncapturableError(
            f"{error.func} gives Python a number, or a size, that depends on data, and `trace` runs on "
            f"fakes, which have none: pass it as an argument, or use `capture`\n  {where}"
        ) from error
    except Exception as error:
        if str(error).startswith("inductor::resize_storage_bytes_()"):
            raise ResizeError(
                f"inductor.resize_storage_bytes_.default received a size that is no integer: sizes are "
                f"whole bytes\n  {line_of_traceback(error.__traceback__)}"
            ) from error
        if recorder.failed is None or recorder.failed[0] is not error:
            raise
        record = recorder.failed[1]
        raise EagerError(
            f"{record.target} failed on {recorder.describe(record)}: {error}\n"
            f"  {line_of(record.traceback)}"
        ) from error
