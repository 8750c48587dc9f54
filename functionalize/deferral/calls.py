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

A call waits only if a program covers it, whose guards hold and whose inputs are found at its line: so it can run later
whatever Python does in between. A captured step that is recorded runs Python late. So the guards are asked again before
it: if they hold, on the same tensors, Python would have done at the line of each call what it does now. Once a program
of all three was found so to do what the others do (`Agreements`), its own guards are enough, on the same tensors.
Ranks may look at different places: whichever way a rank takes, it issues eager's collectives in their order. So passes
that change collectives are refused, and a step whose ranks vote does not replace the programs.
Refusals: calls that run at once, as `fz.capture(model, backward=True)` runs them. `explain` counts them by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from functionalize._compat.autograd import hook_tables
from functionalize._compat.dispatch import current_modes, disable_current_modes
from functionalize.deferral.iteration import Iteration, named
from functionalize.deferral.learned import NewTensor, NoDescription, description
from functionalize.deferral.may_wait import draws_nothing
from functionalize.deferral.mode import LazyMode
from functionalize.deferral.waiting_call import Agreements, Reliance, WaitingCall
from functionalize.ir.generators import is_random
from functionalize.ir.inputs import Argument, Call
from functionalize.ir.outputs import Constant, Result
from functionalize.state import arguments
from functionalize.state.arguments import flatten_result, unflatten_result
from functionalize.state.step_guards import SlotGuard
from functionalize.step.captured_step import CapturedStep
from functionalize.step.options import CaptureOptions
from functionalize.step_backward.captured_forward import Forward, captured_forward, forward_of
from functionalize.step_backward.pair import BackwardProgram, ForwardProgram

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
        self._reliances: WeakKeyDictionary[Any, Reliance] = WeakKeyDictionary()
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
                waiting = WaitingCall(
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

    def _reliance_of(self, each: ForwardProgram | BackwardProgram) -> Reliance:
        if each not in self._reliances:
            # A forward reads no gradients; whether there are any may change before its backward.
            but = (SlotGuard,) if isinstance(each, ForwardProgram) else ()
            self._reliances[each] = Reliance(each.program, but)
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
        self._joints: dict[Forward, tuple[Iteration, Agreements]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step. closure: as of `torch.optim`; with one, nothing waits in the call."""
        mode = self._mode
        if closure is not None or not _is_on(mode):
            return self._optimizer.step(*([] if closure is None else [closure]))
        call = mode.call
        if isinstance(call, WaitingCall) and call.has_backward and not call.has_step:
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
            and isinstance(call, WaitingCall)
            and call.has_step
            and _is_on(mode)
        ):
            tensors = {id(p) for group in optimizer.param_groups for p in group["params"]}
            done: list[bool] = []
            mode.run_call(call, lambda: done.append(call.run_step(tensors)))
            if done[0]:
                return
        optimizer.zero_grad(set_to_none)

    def _joint(self, forward: Forward) -> tuple[Iteration, Agreements]:
        if forward not in self._joints:
            made = Iteration(forward.callable, self._optimizer, self._options)
            self._joints[forward] = made, Agreements()
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
