"""Random number generators: a replay that fails leaves them as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def generator_states() -> tuple[torch.Tensor, ...]:
    """The states of the default generators: CPU, and every CUDA device if CUDA is in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return (torch.get_rng_state(), *cuda)


@contextmanager
def generators_restored_on_error() -> Iterator[None]:
    """Put the default generators (CPU, and CUDA if it is in use) back if the body raises."""
    cpu, *cuda = generator_states()
    try:
        yield
    except BaseException:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        raise
