"""A row of `features.py`: a model, a step, how many ranks; and which release of torch has it first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from functionalize.util.torch_release import minor_of
from tests.fsdp import steps
from tests.fsdp.models import Build
from tests.fsdp.twins import MakeStep


@dataclass(frozen=True)
class Feature:
    """A row. name: for people; eager: how eager fails, where it cannot run it; since: the first torch that has it."""

    name: str
    build: Build
    make_step: MakeStep = steps.plain
    world: int = 2
    batches: Callable[[], Sequence[Any]] = steps.pairs
    eager: str = ""
    since: str = ""

    @property
    def title(self) -> str:
        """The name, with the release if not every tested torch has it."""
        return f"{self.name} (torch {self.since})" if self.since else self.name

    @property
    def is_here(self) -> bool:
        """Whether the installed torch has it."""
        return not self.since or minor_of(torch.__version__) >= minor_of(self.since)


def needs(since: str) -> pytest.MarkDecorator:
    """Skip a test on releases of torch that do not have its feature yet."""
    here = minor_of(torch.__version__)
    return pytest.mark.skipif(here < minor_of(since), reason=f"FSDP2 has it since torch {since}")


def parameters(rows: dict[str, Feature]) -> list[Any]:
    """The names of rows for `pytest.mark.parametrize`, those that torch does not have yet marked as skipped."""
    return [pytest.param(n, marks=[needs(r.since)] if r.since else []) for n, r in rows.items()]
