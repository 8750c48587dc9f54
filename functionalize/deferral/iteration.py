"""Forward, backward and the optimizer's step as one captured step, whose replay may wait for `optimizer.zero_grad()`.

    iteration = Iteration(forward, optimizer, options)
    iteration(args, kwargs, tangents, numbers, autocast)          at once
    found = iteration.covered(args, kwargs, tangents, ...)        the program that covers it, and its inputs now
    iteration.carry_out(*found, dropped)                          later; without the gradients of `dropped`

Of a program there is a second one, without the gradients that nobody gets: they are no results, so passes free them
where the optimizer has read them, as in a step that ends with `zero_grad`. Both are of one recording, with the same
guards and inputs.
Refusals, `covered` returns None: programs whose replay changes objects of Python or reads numbers from tensors, and
those that are audited or whose passes wait; these run at the optimizer's step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from functionalize._compat.dispatch import disable_current_modes
from functionalize.ir.inputs import Call, chain_of
from functionalize.ir.outputs import SameAs
from functionalize.program.program import Program
from functionalize.program.prune_unused import drop_unused_results
from functionalize.state.arguments import flatten_result, unflatten_result
from functionalize.state.sources import Gradient
from functionalize.step.cache import CachedProgram
from functionalize.step.captured_step import CapturedStep
from functionalize.step.options import CaptureOptions
from functionalize.step_backward.boundary import is_output


class Iteration:
    """A captured step of a forward, its backward and an optimizer's step. step: that captured step."""

    def __init__(
        self,
        forward: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        options: CaptureOptions,
    ) -> None:
        self.step = CapturedStep(named(_iteration, "iteration", forward, optimizer), options)
        self.step.passes.rewritten = self._note_rewritten
        self._recorded: WeakKeyDictionary[Program, Program] = WeakKeyDictionary()
        # program -> the indices of the slots that one without their gradients leaves out, and that one
        self._lean: WeakKeyDictionary[CachedProgram, tuple[Any, CachedProgram]] = (
            WeakKeyDictionary()
        )
        # the last one that was asked for: where its slots are found, for which tensors, the answer
        self._last: tuple[Any, Collection[int], CachedProgram] | None = None

    def covered(self, *args: Any) -> tuple[CachedProgram, Call] | None:
        """The program whose replay is this call, with its inputs as they are now; None: it must be called."""
        step = self.step
        if step.is_busy or not step.asks_nobody:
            return None
        leaves, spec = step.flattened(args, {})
        found = step.core.cache.first(step.key(leaves, spec), leaves, spec)
        if found is None:
            return None
        cached, program = found[0], found[0].program
        in_python = cached.python_effects or not cached.effects.are_none
        if cached.waits or step.audits.is_due(cached) or program.value_guards or in_python:
            return None
        return found

    def carry_out(
        self, cached: CachedProgram, call: Call, dropped: Collection[int]
    ) -> tuple[Any, bool]:
        """The result of the replay, and whether it has left no gradients. dropped: ids of tensors that get none."""
        lean = self._without(cached, call, dropped) if dropped else cached
        result = self.step.replay(lean, call, counts=False)
        if cached in self.step.core.cache:
            self.step.core.cache.used(cached, is_replayed=True)
        return result, lean is not cached

    def __call__(self, *args: Any) -> Any:
        """All three, at once."""
        return self.step(*args)

    def _note_rewritten(self, recorded: Program, program: Program) -> None:
        if program is not recorded:
            self._recorded[program] = recorded

    def _without(
        self, cached: CachedProgram, call: Call, dropped: Collection[int]
    ) -> CachedProgram:
        """The program without the gradients of these tensors, or the program itself."""
        last = self._last
        if (
            call.owners is not None
            and last is not None
            and last[0] is call.owners
            and last[1] == dropped
        ):
            return last[2]  # its slots are those of then
        found = [i for i, slot in enumerate(cached.slots) if _goes_to(slot, call, dropped)]
        known = self._lean.get(cached)
        if known is None or known[0] != found:
            try:
                with torch.no_grad(), disable_current_modes():
                    made = self._made_without(cached, found)
            except Exception:  # of a pass: the program that has all gradients is right
                made = cached
            known = self._lean[cached] = found, made
        self._last = call.owners, dropped, known[1]
        return known[1]

    def _made_without(self, cached: CachedProgram, left_out: Sequence[int]) -> CachedProgram:
        program = self._recorded.get(cached.program, cached.program).copy()
        reads = any(isinstance(s, Gradient) for i in program.inputs for s in chain_of(i.source))
        if not left_out or reads:
            return cached
        outputs = program.outputs
        result, left = unflatten_result(range(len(outputs)), program.out_spec)
        kept = [i for i in range(len(left)) if i not in left_out]
        order, program.out_spec = flatten_result((result, [left[i] for i in kept]))
        program.outputs = tuple(outputs[i] for i in order)
        if any(isinstance(role, SameAs) for role in outputs):
            return cached
        drop_unused_results(program)
        rewritten = self.step.core.options.applied(program)
        if [i.name for i in rewritten.inputs] != [i.name for i in cached.program.inputs]:
            return cached
        return replace(cached, program=rewritten, slots=[cached.slots[i] for i in kept])


def _goes_to(slot: Any, call: Call, tensors: Collection[int]) -> bool:
    return isinstance(slot, Gradient) and id(slot.of.resolve(call)) in tensors


def _iteration(
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    args: Any,
    kwargs: Any,
    tangents: Any,
    numbers: Any,
    autocast: Any,
) -> list[Tensor]:
    """Forward, backward and the optimizer's step, as one step. numbers: of the results that somebody holds."""
    with torch.enable_grad():
        with entered(autocast):
            result = model(*args, **kwargs)
        leaves = flatten_result(result)[0]
        outputs = {id(leaf): leaf for leaf in leaves if is_output(leaf)}
        pairs = zip(outputs.values(), tangents, strict=True)
        roots = [(leaf, tangent) for leaf, tangent in pairs if tangent is not None]
        torch.autograd.backward([leaf for leaf, _ in roots], [t for _, t in roots])
    optimizer.step()
    return [leaves[number].detach() for number in numbers]


def entered(autocast: tuple[Any, ...] | None) -> Any:
    """A context: `torch.autocast` with these arguments; None: nothing."""
    return torch.autocast(*autocast) if autocast is not None else nullcontext()


def named(function: Callable[..., Any], name: str, *args: Any) -> Callable[..., Any]:
    """A function of its own, since `CapturedStep` takes over the attributes of what it captures."""
    made: Any = functools.partial(function, *args)
    made.__name__ = name
    found: Callable[..., Any] = made
    return found
