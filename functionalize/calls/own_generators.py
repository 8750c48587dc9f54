"""Draws from a `torch.Generator` of the step's own: recorded as draws from torch's generator, in the state of its own.

    torch.rand(3, generator=self.g)      before = get_rng_state(cpu)
                                         set_rng_state(state, cpu)      the state of `self.g`, an input
                                         rand([3], generator=None)
                                         after = get_rng_state(cpu)     the next draw's `state`
                                         set_rng_state(before, cpu)

    own.know(generator, state)           before the step: its state, a tensor that the recording knows
    own.drawn(recorder, func, ...)       runs such an op; NotImplemented: it is none, and runs as it is

Both generators are of one class of C++, so the numbers and the state are the same. At the end of a replay `after` is
the state of `self.g` (`GeneratorSet`), which no failed replay has moved.
Invariant: `state` is the generator's own when the op runs. A generator that is seeded or set in the step has another
one: the op is recorded with its generator, which discharge refuses.
Refusals: generators that the step makes, that two names lead to or that are arguments; those of CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import address_of_generator as _address
from functionalize._compat.dispatch import current_modes, disable_current_modes
from functionalize._compat.fakes import FakeTensor
from functionalize.ir.generators import GET_STATE, SET_STATE

_CPU = torch.device("cpu")


def is_own(value: Any) -> bool:
    """Whether this is a generator of the CPU that is not torch's."""
    is_of_cpu = type(value) is torch.Generator and value.device == _CPU
    return is_of_cpu and _address(value) != _address(torch.default_generator)


@dataclass(slots=True)
class OwnGenerators:
    """The generators from which one recorded step may draw, by address: each with its state, and that on entry."""

    _states: dict[int, Tensor] = field(default_factory=dict)
    _entries: dict[int, Tensor] = field(default_factory=dict)

    def know(self, generator: torch.Generator, state: Tensor) -> None:
        """Before the step: a generator and its state, a tensor that the recording knows."""
        self._states[_address(generator)] = self._entries[_address(generator)] = state

    def moved(self, generator: torch.Generator) -> Tensor | None:
        """Its state, a tensor of the recording, if draws have changed it and nothing has since; else None."""
        state = self._states.get(_address(generator))
        if state is None or state is self._entries[_address(generator)]:
            return None
        return state if torch.equal(generator.get_state(), state) else None

    def drawn(self, recorder: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a random op that draws from a known generator; NotImplemented for any other op."""
        own = next((a for a in (*args, *kwargs.values()) if type(a) is torch.Generator), None)
        if own is None or not recorder.checks.for_real:
            return NotImplemented
        args = [None if a is own else a for a in args]
        kwargs = {k: None if a is own else a for k, a in kwargs.items()}
        address = _address(own)
        if address == _address(torch.default_generator):
            with recorder:
                return func(*args, **kwargs)
        state = self._states.get(address)
        is_inner = any(hasattr(mode, "resize_storage") for mode in current_modes())
        if state is None or is_inner:
            return NotImplemented
        with disable_current_modes():
            if not torch.equal(own.get_state(), state):
                return NotImplemented
        with recorder:
            before = GET_STATE(_CPU)
            if isinstance(before, FakeTensor):
                return NotImplemented
            SET_STATE(state, _CPU)
            try:
                return func(*args, **kwargs)
            finally:
                after = self._states[address] = GET_STATE(_CPU)
                SET_STATE(before, _CPU)
                own.set_state(after)
