"""A forward that waits inside `fz.lazy`, its backward, and the test that they may run later than they were called.

    waiting = WaitingCall(..., cached, call)     a program whose guards hold, and its inputs
    waiting.results(forms)                       what the forward returns, contents undefined
    waiting.run()                                the programs of forward and backward, on the inputs that they had
    waiting.still_holds()                        whether Python would do now what it would have done at their lines
    waiting.run_in(joint)                        as a part of a captured step, if it still holds

Invariant: each runs once; an error leaves NaN in the results, and has a note with the line of the forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import is_
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx

from functionalize._compat.dispatch import disable_current_modes, storage_at
from functionalize._compat.references import WeakStorage
from functionalize._compat.stacks import stack_here
from functionalize.deferral.interpreted import fill, window_on
from functionalize.deferral.learned import NewTensor
from functionalize.deferral.mode import LazyMode
from functionalize.deferral.settings import read, under
from functionalize.ir.guards import TensorGuard
from functionalize.ir.inputs import Call, WholeStorage
from functionalize.ir.ops import geometry_of
from functionalize.program.executable import Executable
from functionalize.program.program import Program
from functionalize.recorder.eager_formulas import unseen
from functionalize.state.arguments import unflatten_result
from functionalize.step.captured_step import CapturedStep
from functionalize.step_backward.backward_of import ReplayedForward
from functionalize.step_backward.boundary import RequestedGradients, with_backward
from functionalize.step_backward.captured_forward import CapturedForward
from functionalize.step_backward.pair import BackwardProgram, ForwardProgram
from functionalize.step_backward.pair_builder import SavedValue
from functionalize.step_backward.recorded_forward import TWICE
from functionalize.util.user_stack import line_of

_Found = Mapping[int, Any]  # inputs by number


class Reliance:
    """What a program relies on, without its graph: its guards, and the inputs that it finds by itself.

    but: kinds of guards that do not count.
    """

    def __init__(self, program: Program, but: tuple[type, ...] = ()) -> None:
        found = [not isinstance(s.source, (SavedValue, WholeStorage)) for s in program.inputs]
        self.kept = [i for i, yes in enumerate(found) if yes]
        place = {i: at for at, i in enumerate(self.kept)}
        windows = [g for g in program.guards if isinstance(g, TensorGuard) and g.input in place]
        self._asked = Executable(
            graph=fx.Graph(),
            constants={},
            inputs=tuple(program.inputs[i] for i in self.kept),
            outputs=(),
            epilogue=(),
            guards=tuple(TensorGuard(place[g.input], g.spec) for g in windows),
            value_guards=(),
            in_spec=None,
            out_spec=program.out_spec,
            facts=tuple(fact for fact in program.facts if not isinstance(fact, but)),
        )

    def find(self, leaves: Sequence[Any]) -> _Found | None:
        """The inputs, if all guards hold."""
        call = self._asked.resolve(leaves)
        return dict(zip(self.kept, call.inputs, strict=True)) if isinstance(call, Call) else None


class WaitingCall:
    """A forward that waits, and its backward: the `CapturedBackward` of the node of its results.

    captured: the forward. has_backward: whether the backward waits as well.
    reliance_of: what a program relies on. ran: gets how it ran.
    cached, call: the program of the forward, its inputs. copies: arguments where anybody may write, and their copies.
    """

    def __init__(
        self,
        mode: LazyMode,
        captured: CapturedForward,
        reliance_of: Callable[[ForwardProgram | BackwardProgram], Reliance],
        ran: Counter[str],
        cached: ForwardProgram,
        call: Call,
        copies: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.captured, self.has_backward = captured, False
        self._mode, self._reliance_of, self._ran = mode, reliance_of, ran
        self._cached, self._call, self._copies = cached, call, copies
        self._replayed = ReplayedForward(captured, cached, call)
        self._settings, self._autocast = read(), _autocast()
        self._found = {i: call.inputs[i] for i in reliance_of(cached).kept}
        self._storages = _storages(self._found)
        self._backward: BackwardProgram | None = None
        self._found_by_backward: _Found = {}
        self._tangents: Sequence[Tensor | None] = ()
        self._is_over = False
        self._stack = stack_here()
        # of each result: its number, its storage, what it is
        self._outputs: list[tuple[int, WeakStorage, NewTensor]] = []
        self._inputs = self._replayed.inputs()

    def results(self, forms: Sequence[Any]) -> Any:
        """What the forward returns; contents undefined, with an autograd history."""
        values = []
        for number, form in enumerate(forms):
            value = form.make() if isinstance(form, NewTensor) else form.value
            if isinstance(form, NewTensor):
                self._outputs.append((number, WeakStorage(value.untyped_storage()), form))
            values.append(value)
        result, _ = unflatten_result(values, self._cached.spec)
        leaves: Any = self._call.leaves
        return with_backward(result, self._cached.has_grad_fn, self, leaves, self._inputs)

    def made(self, tensor: Any) -> bool:
        """Whether a tensor is on the storage of a result."""
        if not isinstance(tensor, Tensor):
            return False
        storage = tensor.untyped_storage()
        return any(self._storage(weak) is storage for _, weak, _ in self._outputs)

    # -- as autograd's node calls it -----------------------------------------------------------

    @property
    def reduced_together(self) -> WeakSet[Any]:
        return self._replayed.reduced_together

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Nothing: a write to a result is an op, which runs the forward first; what it saves is not the result."""

    def backward(
        self, tangents: Sequence[Tensor | None], requested: RequestedGradients, keep: bool
    ) -> Sequence[Tensor | None]:
        mode = self._mode
        self._refresh()
        if mode.call is self and not self.has_backward:
            with disable_current_modes():
                covers = requested.everything and not keep and self._covers(tangents, requested)
            if covers:
                return [None] * len(self._inputs)
            mode.look("a backward that no program covers")
        if self._is_over or self.has_backward:
            raise RuntimeError(TWICE)
        with unseen():
            return self._replayed.backward(tangents, requested, keep)

    def _refresh(self) -> None:
        """A backward reads the arguments as they are now; if somebody has written to one, the forward runs before."""
        for original, copy in self._copies:
            with disable_current_modes(), torch.no_grad():
                is_same = torch.equal(original, copy)
            if not is_same:
                if self._mode.call is self:
                    self._mode.look("a write to an argument past torch")
                with disable_current_modes():
                    window_on(copy.untyped_storage(), geometry_of(copy)).copy_(original)

    def _covers(self, tangents: Sequence[Tensor | None], requested: RequestedGradients) -> bool:
        """Whether a recorded backward can replace this one, and waits from now on."""
        saved = set(self._cached.saved)
        for each in self._cached.backwards:
            if each.requested == requested and saved.issuperset(each.used):
                found = self._reliance_of(each).find([*self._call.leaves, *tangents])
                if found is not None:
                    self._backward, self._tangents, self._found_by_backward = each, tangents, found
                    self.has_backward = True
                    return True
        return False

    # -- how it runs ---------------------------------------------------------------------------

    def run(self) -> None:
        """Run the programs of what waits, each once."""
        self._ran["by programs of their own"] += 1
        try:
            with under(self._settings):
                values = self._cached.program.replay(self._call)
                self._replayed.hold(values[self._cached.results :])
                self._write(dict(enumerate(values[: self._cached.results])))
                if self._backward is None:
                    return
                gradients = self._replayed.replay(
                    self._backward, self._found_by_backward, self._tangents
                )
            self._is_over = True
            _accumulate(self._inputs, gradients)
        except BaseException as error:
            self._failed(error)
            raise

    def still_holds(self) -> bool:
        """Whether Python would do now what it would have done at the lines of the forward and of its backward."""
        if self._backward is None or read() != self._settings:
            return False
        reliance, leaves = self._reliance_of, self._call.leaves
        with torch.enable_grad(), entered(self._autocast):
            found = reliance(self._cached).find(leaves)
        if found is None or not _are_same(found, self._found, self._storages):
            return False
        with torch.no_grad():
            later = reliance(self._backward).find([*leaves, *self._tangents])
        was = self._found_by_backward
        return later is not None and _are_same(later, was, _storages(was))

    def run_in(self, joint: CapturedStep) -> None:
        """Run forward, backward and the optimizer's step as one captured step."""
        self._is_over = True
        self._ran["with an optimizer's step"] += 1
        spec = self._cached.program.in_spec
        assert spec is not None
        args, kwargs = unflatten_result(self._call.leaves, spec)
        numbers = [n for n, weak, _ in self._outputs if weak.alive]
        try:
            values = joint(args, kwargs, list(self._tangents), numbers, self._autocast)
        except BaseException as error:
            self._failed(error)
            raise
        with torch.no_grad(), disable_current_modes():
            self._write(dict(zip(numbers, values, strict=True)))

    def _storage(self, weak: WeakStorage) -> torch.UntypedStorage | None:
        return storage_at(weak._reference) if weak.alive else None

    def _write(self, values: Mapping[int, Any]) -> None:
        for number, weak, form in self._outputs:
            storage = self._storage(weak)
            if storage is not None and number in values:
                window_on(storage, form.geometry).copy_(values[number])

    def _failed(self, error: BaseException) -> None:
        """The results were never computed; say which line asked for them."""
        self._is_over = True
        error.add_note(f"this forward was called {line_of(self._stack)}")
        with torch.no_grad(), disable_current_modes():
            for _, weak, form in self._outputs:
                storage = self._storage(weak)
                if storage is not None:
                    fill(window_on(storage, form.geometry))


def _autocast() -> tuple[Any, ...] | None:
    """The arguments of a `torch.autocast` that is like the one which is active."""
    if not torch.is_autocast_enabled("cpu"):
        return None
    return "cpu", torch.get_autocast_dtype("cpu"), True, torch.is_autocast_cache_enabled()


def entered(autocast: tuple[Any, ...] | None) -> Any:
    """A context: `torch.autocast` with these arguments; None: nothing."""
    return torch.autocast(*autocast) if autocast is not None else nullcontext()


def _storages(found: _Found) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in found.values() if isinstance(t, Tensor)]


def _are_same(now: _Found, was: _Found, storages: Sequence[torch.UntypedStorage]) -> bool:
    """Whether these are the same tensors, on the same storages, and equal numbers."""
    tensors = all(
        value is was[i] or (not isinstance(value, Tensor) and repr(value) == repr(was[i]))
        for i, value in now.items()
    )
    return tensors and all(map(is_, _storages(now), storages))


def _accumulate(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to `.grad` as autograd does, which cannot run below itself: an op may have looked."""
    with torch.no_grad():
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is None:
                continue
            if leaf.grad is not None:
                leaf.grad.add_(gradient)
            elif gradient.stride() == leaf.stride():
                leaf.grad = gradient
            else:
                leaf.grad = torch.empty_like(leaf).copy_(gradient)
