"""What one call of a captured step does: a plan, which is a value, made before anything changes.

    Replay(cached, call)     the program `cached` runs, on the inputs of `call`
    Audit(cached, call)      the step runs for real, and is compared with the program, of which `call` has the inputs
    Compare(cached, call)    the same, of a program that was predicted and that no call was compared with
    Record(why)              the step runs for real, and is recorded: no program covers it
    Eager(why)               the step runs for real

A rank plans by itself, then all ranks that vote agree on the worst plan, then each acts.
Invariant: `LastPlan` is what is kept of a plan for `explain`: it holds no program and no tensor.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from functionalize.ir.inputs import Call
from functionalize.step.cache import CachedProgram

WAITS = "the program of this kind of call waits for its passes"


@dataclass(frozen=True, slots=True)
class Replay:
    """A program whose guards hold runs. call: its inputs."""

    cached: CachedProgram
    call: Call


@dataclass(frozen=True, slots=True)
class Audit:
    """The step runs for real, and is compared with a program. call: the inputs of the program."""

    cached: CachedProgram
    call: Call


@dataclass(frozen=True, slots=True)
class Compare:
    """The step runs for real, and is compared with a program that was predicted: its first call.

    is_alone: whether the other ranks run eagerly, and do not vote after it.
    """

    cached: CachedProgram
    call: Call
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """The step runs for real while it is recorded. why: no program covers it."""

    why: str


@dataclass(frozen=True, slots=True)
class Eager:
    """The step runs for real, unrecorded. why: for people.

    is_rare: calls of its kind came too seldom to be recorded, on some rank. is_vain: its programs miss the call, and
    none like it is worth a recording. waits: its program waits for its passes.
    """

    why: str
    is_rare: bool = False
    is_vain: bool = False
    waits: bool = False


Covered = Replay | Audit | Compare
Plan = Covered | Record | Eager


class LastPlan(NamedTuple):
    """The plan of the last call. key: of the call in the cache. kind: of plan. is_kept: whether a program was made."""

    key: Hashable
    kind: type[Plan]
    why: str = ""
    is_kept: bool = False
