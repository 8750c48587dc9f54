"""Random number generators: ops of programs that read and set their states, and restoring them after an error.

    torch.get_rng_state()       functionalize.get_rng_state(device('cpu'))         -> the state, a value
    torch.set_rng_state(s)      functionalize.set_rng_state(s, device('cpu'))
    torch.manual_seed(3)        functionalize.manual_seed(3)                       every generator
    torch.cuda.manual_seed(3)   functionalize.manual_seed(3, device('cuda:0'))     `cuda`: all of them

Python code sets a generator by calls that do not dispatch. While a recorder is active, these calls are patched to run
the ops above (see `recorder/patches.py`), so that a state saved in forward and restored for its recomputation is a
value of the program, and a seed is set again at every replay.

Invariant: these ops have the tag of random ops, so that a pass that keeps the order of random ops keeps theirs.
A `get_rng_state` without users may be removed: reading a state changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from functionalize.util.by_address import by_address

_LIBRARY = torch.library.Library(
    "functionalize", "FRAGMENT"
)  # the ops exist as long as this object
for _schema in (
    "get_rng_state(Device device) -> Tensor",
    "set_rng_state(Tensor state, Device device) -> ()",
    "manual_seed(int seed, Device? device=None) -> ()",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.nondeterministic_seeded,))

GET_STATE = torch.ops.functionalize.get_rng_state.default
SET_STATE = has_side_effect(torch.ops.functionalize.set_rng_state.default)
SEED = has_side_effect(torch.ops.functionalize.manual_seed.default)

_STATE_BYTES = {"cpu": 5056, "cuda": 16}


def _generator(device: torch.device) -> torch.Generator:
    """The default generator of a device (with an index, unless it is the CPU)."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


@torch.library.impl(_LIBRARY, "get_rng_state", "CompositeExplicitAutograd")
def _get_rng_state(device: torch.device) -> Tensor:
    return _generator(device).get_state()


@torch.library.impl(_LIBRARY, "set_rng_state", "CompositeExplicitAutograd")
def _set_rng_state(state: Tensor, device: torch.device) -> None:
    _generator(device).set_state(state)


@torch.library.impl(_LIBRARY, "manual_seed", "CompositeExplicitAutograd")
def _manual_seed(seed: int, device: torch.device | None = None) -> None:
    if device is None:
        torch.manual_seed(seed)
    elif device.type == "cuda" and device.index is None:
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    else:
        _generator(device).manual_seed(seed)


@torch.library.register_fake("functionalize::get_rng_state", lib=_LIBRARY)
def _fake_rng_state(device: torch.device) -> Tensor:
    return torch.empty(_STATE_BYTES[device.type], dtype=torch.uint8, device="cpu")


@torch.library.register_fake("functionalize::set_rng_state", lib=_LIBRARY)
def _set_no_rng_state(state: Tensor, device: torch.device) -> None:
    """Fake tensors draw no numbers: the generators stay as they are."""


@torch.library.register_fake("functionalize::manual_seed", lib=_LIBRARY)
def _seed_nothing(seed: int, device: torch.device | None = None) -> None:
    """Fake tensors draw no numbers: the generators stay as they are, as above."""


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a generator, sets it or reads its state."""
    return is_random_op(node.target)


@by_address
def is_random_op(target: Any) -> bool:
    """Whether an op does so."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def generator_states() -> tuple[Tensor, ...]:
    """The states of the default generators: CPU, and every CUDA device if CUDA is in use.

    Not by `torch.get_rng_state`, which a recorder may have patched to record the call.
    """
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return tuple(generator.get_state() for generator in (torch.default_generator, *cuda))


def set_generators(states: Sequence[Tensor]) -> None:
    """Set the default generators to states that `generator_states` returned."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    for generator, state in zip((torch.default_generator, *cuda), states, strict=False):
        generator.set_state(state)


@contextmanager
def generators_restored_on_error() -> Iterator[None]:
    """Restore the default generators (CPU, and CUDA if it is in use) if the body raises.

    By torch's functions: an enclosing recorder, which records the random ops of the body, must record this too.
    """
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    except BaseException:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        raise
