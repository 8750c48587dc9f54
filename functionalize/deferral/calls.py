"""Calls of a captured forward and of an optimizer inside `fz.lazy`: they wait, and run as one captured step.

    model, optimizer = lazy.module(model), lazy.optimizer(optimizer)
    loss = model(x)            waits: the results are tensors whose contents are not there yet
    loss.backward()            waits: one autograd node, see `step_backward/boundary.py`
    optimizer.step()           waits, too, if a program covers all three; else they run here, as one captured step
    optimizer.zero_grad()      that program, without the gradients: nothing waits after it

| who looks first | what runs |
| --- | --- |
| `zero_grad` after the optimizer's step | all three as one program, see `iteration.py` |
| anybody else after the optimizer's step | the same with the gradients as results |
| anybody before it | the programs of the forward and of its backward, on the inputs that they had at their lines |

Each forward is a `_WaitingCall`:

    waiting = _WaitingCall(..., cached, call)    a program whose guards hold, and its inputs
    waiting.results(forms)                       what the forward returns, contents undefined
    waiting.run()                                the programs of forward and backward, on the inputs that they had
    waiting.joins(joint, agreements)             the optimizer's step waits, too, as a program of all three covers it
    waiting.run_step(dropped)                    that program, without the gradients of the tensors `dropped`
    waiting.still_holds()                        whether Python would do now what it would have done at their lines
    waiting.run_in(joint)                        as a part of a captured step, which may be recorded

A call waits only if a program covers it, whose guards hold and whose inputs are found at its line: so it can run later
whatever Python does in between. A captured step that is recorded runs Python late. So the guards are asked again before
it: if they hold, on the same tensors, Python would have done at the line of each call what it does now. Once a program
of all three was found so to do what the others do (`_Agreements`), its own guards are enough, on the same tensors.
Ranks may look at different places: whichever way a rank takes, it issues eager's collectives in their order. So passes
that change collectives are refused, and a step whose ranks vote does not replace the programs.
Invariant: each call runs once; an error leaves NaN in the results, and has a note with the line of the forward.
Refusals: calls that run at once, as `fz.capture(model, backward=True)` runs them. `explain` counts them by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, fx

from functionalize._compat.autograd import hook_tables
from functionalize._compat.dispatch import current_modes, disable_current_modes, storage_at
from functionalize._compat.references import WeakStorage
from functionalize._compat.stacks import stack_here
from functionalize.deferral.interpreted import fill, window_on
from functionalize.deferral.iteration import Iteration, entered, named
from functionalize.deferral.learned import NewTensor, NoDescription, description
from functionalize.deferral.may_wait import draws_nothing
from functionalize.deferral.mode import LazyMode
from functionalize.deferral.settings import read, under
from functionalize.ir.generators import is_random
from functionalize.ir.guards import TensorGuard
from functionalize.ir.inputs import Argument, Call, WholeStorage
from functionalize.ir.ops import geometry_of
from functionalize.ir.outputs import Constant, Result
from functionalize.program.executable import Executable
from functionalize.program.program import Program
from functionalize.recorder.eager_formulas import unseen
from functionalize.state import arguments
from functionalize.state.arguments import flatten_result, unflatten_result
from functionalize.state.hyperparameters import HyperparameterNumber
from functionalize.state.step_guards import SlotGuard
from functionalize.step.cache import CachedProgram
from functionalize.step.captured_step import CapturedStep
from functionalize.step.options import CaptureOptions
from functionalize.step_backward.backward_of import ReplayedForward
from functionalize.step_backward.boundary import RequestedGradients, with_backward
from functionalize.step_backward.captured_forward import Forward, captured_forward, forward_of
from functionalize.step_backward.pair import BackwardProgram, ForwardProgram
from functionalize.step_backward.pair_builder import SavedValue
from functionalize.step_backward.recorded_forward import TWICE
from functionalize.templates.leaves import identity
from functionalize.util.user_stack import line_of

_PLAIN = (Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class LazyModule:
    """What `lazy.module(model)` returns: calls wait inside of the block; attributes are those of the model."""

    def __init__(
        self, model: Callable[..., Any], mode: LazyMode, options: CaptureOptions, name: str
    ) -> None:
        self._model, self._mode, self._name = model, mode, name
        self._captured = captured_forward(named(model, name), options)
        self._forward = forward_of(self._captured)
        self._ran: Counter[str] = Counter()
        self._forms: WeakKeyDictionary[ForwardProgram, list[Any]] = WeakKeyDictionary()
        self._unfit: WeakKeyDictionary[ForwardProgram, str] = WeakKeyDictionary()
        self._reliances: WeakKeyDictionary[Any, _Reliance] = WeakKeyDictionary()
        self._new: ForwardProgram | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = self._mode
        if not _is_on(mode):
            return self._model(*args, **kwargs)
        mode.look(f"a call of {self._name}")
        with disable_current_modes():
            self._new = None
            (positional, named), copies = self._owned(args, kwargs)
            found = self._forward.covered(positional, named, self._may_wait)
            if found is not None:
                waiting = _WaitingCall(
                    mode, self._forward, self._reliance_of, self._ran, *found, copies
                )
                result = waiting.results(self._forms[found[0]])
                mode.call = waiting
                return result
        self._ran["at once"] += 1
        before = self._captured.stats.replays
        result = self._captured(*args, **kwargs)
        if self._new is not None and self._captured.stats.replays == before + 1:
            self._learn(self._new, result)
        return result

    def _owned(self, args: Any, kwargs: Any) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
        """The arguments, and those on memory of numpy or of other processes, where anybody may write, with copies."""
        leaves, spec = arguments.flatten(args, kwargs)
        copies = [
            (leaf, leaf.detach().clone())
            for leaf in leaves
            if isinstance(leaf, Tensor) and not leaf.requires_grad and self._is_foreign(leaf)
        ]
        if not copies:
            return (args, kwargs), []
        new = {id(leaf): copy for leaf, copy in copies}
        return unflatten_result([new.get(id(leaf), leaf) for leaf in leaves], spec), copies

    def _is_foreign(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return not storage.resizable() or storage.is_shared() or self._mode.has_escaped([tensor])

    def _may_wait(self, cached: ForwardProgram, call: Call) -> bool:
        """Whether this call may wait; else it runs at once."""
        if cached in self._unfit:
            return False
        if cached not in self._forms:
            self._new = cached  # its results are learned from its first replay
            return False
        tensors = [t for t in call.inputs if isinstance(t, Tensor)]
        if self._mode.has_escaped(tensors) or torch.is_autocast_enabled("cuda"):
            return False
        leaves = [source.resolve(call) for source in cached.parameters]
        # Autograd would call their hooks now.
        return all(isinstance(leaf, _PLAIN) for leaf in call.leaves) and not any(
            table for leaf in leaves for table in hook_tables(leaf)
        )

    def _learn(self, cached: ForwardProgram, result: Any) -> None:
        """Note what a forward returns, from a replay, or why its calls cannot wait."""
        leaves = flatten_result(result)[0]
        roles = cached.program.outputs[: len(leaves)]
        try:
            if why := _why_not(cached):
                raise NoDescription(why)
            taken: set[int] = set()
            pairs = zip(leaves, roles, strict=True)
            self._forms[cached] = [_form(leaf, role, taken) for leaf, role in pairs]
        except (NoDescription, NotImplementedError, RuntimeError) as error:
            self._unfit[cached] = str(error) or "returns a tensor that is not plain and dense"

    def _reliance_of(self, each: ForwardProgram | BackwardProgram) -> _Reliance:
        if each not in self._reliances:
            # A forward reads no gradients; whether there are any may change before its backward.
            but = (SlotGuard,) if isinstance(each, ForwardProgram) else ()
            self._reliances[each] = _Reliance(each.program, but)
        return self._reliances[each]

    def explain(self) -> str:
        """How its calls ran, and why those that cannot wait cannot."""
        ran = ", ".join(f"{count} {how}" for how, count in self._ran.items()) or "none"
        why = "".join(f"\n    runs at once: it {reason}" for reason in set(self._unfit.values()))
        return f"calls of {self._name}: {ran}{why}"


class LazyOptimizer:
    """What `lazy.optimizer(optimizer)` returns: its step joins what waits; attributes are the optimizer's."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, mode: LazyMode, options: CaptureOptions
    ) -> None:
        self._optimizer, self._mode, self._options = optimizer, mode, options
        self._alone = CapturedStep(named(_step, "step", optimizer), options)
        self._joints: dict[Forward, tuple[Iteration, _Agreements]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step. closure: as of `torch.optim`; with one, nothing waits in the call."""
        mode = self._mode
        if closure is not None or not _is_on(mode):
            return self._optimizer.step(*([] if closure is None else [closure]))
        call = mode.call
        if isinstance(call, _WaitingCall) and call.has_backward and not call.has_step:
            joint, agreements = self._joint(call.captured)
            with disable_current_modes():
                if call.joins(joint, agreements):
                    return None  # waits
                holds = joint.step.asks_nobody and call.still_holds()
            if holds:
                mode.run_call(call, lambda: call.run_in(joint))
                return None
        mode.look("optimizer.step()")
        return self._alone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's `zero_grad`; runs what waits, if its step does, without the gradients that it drops."""
        mode, optimizer, call = self._mode, self._optimizer, self._mode.call
        is_torch = getattr(optimizer.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad
        if (
            set_to_none
            and is_torch
            and isinstance(call, _WaitingCall)
            and call.has_step
            and _is_on(mode)
        ):
            tensors = {id(p) for group in optimizer.param_groups for p in group["params"]}
            done: list[bool] = []
            mode.run_call(call, lambda: done.append(call.run_step(tensors)))
            if done[0]:
                return
        optimizer.zero_grad(set_to_none)

    def _joint(self, forward: Forward) -> tuple[Iteration, _Agreements]:
        if forward not in self._joints:
            made = Iteration(forward.callable, self._optimizer, self._options)
            self._joints[forward] = made, _Agreements()
        return self._joints[forward]

    def explain(self) -> str:
        """The programs of whole iterations, and those of the step alone."""
        steps = (*(joint.step for joint, _ in self._joints.values()), self._alone)
        return "\n".join(step.explain() for step in steps)


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _is_on(mode: LazyMode) -> bool:
    """Whether the block is active, and nothing else sees the ops of a call."""
    modes = current_modes()
    return len(modes) == 1 and modes[0] is mode and not mode.suspended


def _why_not(cached: ForwardProgram) -> str | None:
    """Why calls of a forward cannot wait; None if they can."""
    if any(
        is_random(n) and not draws_nothing(n.target, n.args) for n in cached.program.graph.nodes
    ):
        return "draws random numbers, which others may draw before it would run"
    if cached.program.value_guards:
        return "reads numbers from tensors"
    if cached.slots or cached.python_effects or not cached.effects.are_none:
        return "changes objects of Python"
    written = {action.input for action in cached.program.epilogue} | set(cached.program.writes)
    if any(isinstance(cached.program.inputs[i].source, Argument) for i in written):
        return "writes to its arguments"
    return None


def _form(leaf: Any, role: Any, taken: set[int]) -> NewTensor | Constant:
    """What a result is: a tensor on a storage of its own, or a constant."""
    if isinstance(role, Constant) and isinstance(role.value, _PLAIN):
        return role
    found = description(leaf, [], taken, []) if isinstance(role, Result) else None
    if not isinstance(found, NewTensor):
        raise NoDescription
    return found


# -- one call that waits ---------------------------------------------------------------------------

_Found = Mapping[int, Any]  # inputs by number
_Pairs = Sequence[tuple[int, int, int]]


class _Reliance:
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


class _Agreements:
    """Which programs of whole iterations do what a forward and a backward do, before the optimizer's step.

    If all three cover one state of Python, the first does there what the others do; and a program does the same always.
    So from then on the guards of the first are enough, if it finds the inputs that the others found at their lines.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[CachedProgram, tuple[Any, Any, Any]] = WeakKeyDictionary()

    def of(self, joint: CachedProgram, forward: Any, backward: Any) -> _Pairs | None:
        """(input of `joint`, 0 for the forward and 1 for the backward, its input) for each; None: unknown."""
        known = self._known.get(joint)
        if known is None or known[0]() is not forward or known[1]() is not backward:
            return None
        pairs: _Pairs = known[2]
        return pairs

    def note(
        self,
        joint: CachedProgram,
        call: Call,
        forward: ForwardProgram,
        backward: BackwardProgram,
        reliance_of: Callable[[Any], _Reliance],
    ) -> _Pairs:
        """The same; they cover the state of now. call: the inputs of `joint`."""
        places = {
            identity(each.program.inputs[i].source): (of, i)
            for of, each in ((1, backward), (0, forward))
            for i in reliance_of(each).kept
        }
        pairs, is_known = [], True
        for at, spec in enumerate(joint.program.inputs):
            source = spec.source
            found = places.get(identity(source))
            if found is not None:
                pairs.append((at, *found))
            elif not isinstance(source, (WholeStorage, HyperparameterNumber)):
                # A tensor for the optimizer alone; a number, which is a new one each time, may be a constant of others.
                is_known &= source.resolve(call) is call.inputs[at]
        if is_known:
            self._known[joint] = ref(forward), ref(backward), pairs
        return pairs


class _WaitingCall:
    """A forward that waits, and its backward: the `CapturedBackward` of the node of its results.

    captured: the forward. has_backward: whether the backward waits as well.
    reliance_of: what a program relies on. ran: gets how it ran.
    cached, call: the program of the forward, its inputs. copies: arguments where anybody may write, and their copies.
    """

    def __init__(
        self,
        mode: LazyMode,
        captured: Forward,
        reliance_of: Callable[[ForwardProgram | BackwardProgram], _Reliance],
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
        self._backward: BackwardProgram | None = None
        self._found_by_backward: _Found = {}
        self._tangents: Sequence[Tensor | None] = ()
        self._is_over = False
        # how the optimizer's step waits: the step, its program, its inputs; the numbers of the results that it returns
        self._step: tuple[Iteration, CachedProgram, Call] | None = None
        self._numbers: list[int] = []
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
        # Ops of a loss outside of the callable may have it pending.
        mode.look("the gradient of a result")
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
        if self._step is not None:
            self.run_step(())
            return
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
        if found is None or not _are_same(found, self._found):
            return False
        with torch.no_grad():
            later = reliance(self._backward).find([*leaves, *self._tangents])
        return later is not None and _are_same(later, self._found_by_backward)

    def _arguments(self) -> tuple[Any, ...]:
        """The arguments of the captured step that is this forward, its backward and a step."""
        spec = self._cached.program.in_spec
        assert spec is not None
        args, kwargs = unflatten_result(self._call.leaves, spec)
        self._numbers = [n for n, weak, _ in self._outputs if weak.alive]
        return args, kwargs, list(self._tangents), self._numbers, self._autocast

    @property
    def has_step(self) -> bool:
        """Whether an optimizer's step waits, too."""
        return self._step is not None

    def joins(self, joint: Iteration, agreements: _Agreements) -> bool:
        """Whether the optimizer's step waits from now on, since a program covers all three."""
        if self._backward is None or read() != self._settings:
            return False
        found = joint.covered(*self._arguments())
        if found is None:
            return False
        cached, call = found
        pairs = agreements.of(cached, self._cached, self._backward)
        if pairs is None:
            if not self.still_holds():
                return False
            pairs = agreements.note(cached, call, self._cached, self._backward, self._reliance_of)
        was = self._found, self._found_by_backward
        if not all(_is_same(call.inputs[at], was[of][i]) for at, of, i in pairs):
            return False
        self._step = joint, cached, call
        return True

    def run_step(self, dropped: Collection[int]) -> bool:
        """Run all three, whether the gradients of tensors with the ids `dropped` were left out."""
        assert self._step is not None
        (joint, cached, call), self._step = self._step, None
        try:
            with under(self._settings):
                values, is_lean = joint.carry_out(cached, call, dropped)
        except Exception as error:
            if cached.program.may_run_again(call):
                self.run()  # the forward or its backward raises; else the optimizer's step did
            else:
                self._failed(error)
            raise
        self._done(values)
        return is_lean

    def run_in(self, joint: Iteration) -> None:
        """Run forward, backward and the optimizer's step as one captured step."""
        arguments = self._arguments()
        try:
            values = joint(*arguments)
        except BaseException as error:
            self._failed(error)
            raise
        self._done(values)

    def _done(self, values: Sequence[Tensor]) -> None:
        self._is_over = True
        self._ran["with an optimizer's step"] += 1
        with torch.no_grad(), disable_current_modes():
            self._write(dict(zip(self._numbers, values, strict=True)))

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


def _are_same(now: _Found, was: _Found) -> bool:
    """Whether these are the same tensors, and equal numbers."""
    return all(_is_same(value, was[i]) for i, value in now.items())


def _is_same(now: Any, was: Any) -> bool:
    return now is was or (not isinstance(now, Tensor) and repr(now) == repr(was))


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
