"""The tested releases of torch, and the checks on other releases.

    TESTED                     the releases; a release between them is in the tested range
    warn_if_untested()         one warning in a process, at the first capture outside of the range
    why_not_here(modules)      why an FSDP2 step is not replayed on the installed torch, or None

A tested release is not checked. On any other release the contract (`contract.py`, and the list of communicating ops) is
compared with the installed torch once, and with the objects of each step. State that the contract does not describe
might be missed by a replay, so the step is refused, with the name of the attribute.
Invariant: a step is never replayed if FSDP2 has state that the contract does not describe.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import cache
from types import FrameType

import torch
from torch import nn

from functionalize.discharge.rules.collectives import unlisted_ops
from functionalize.errors import UntestedTorchWarning
from functionalize.fsdp.contract import unknown_attributes, unknown_attributes_of
from functionalize.fsdp.objects import fsdp_contexts, fsdp_groups, fsdp_params, fsdp_states
from functionalize.util.torch_release import minor_of, release_of
from functionalize.util.user_stack import is_own

TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")


def is_tested(version: str) -> bool:
    """Whether the tests were run on this very release."""
    return release_of(version) in TESTED


def in_range(version: str) -> bool:
    """Whether a release lies between the oldest and the newest one that were tested."""
    return minor_of(TESTED[0]) <= minor_of(version) <= minor_of(TESTED[-1])


@cache
def _warn(version: str) -> None:
    warnings.warn(
        f"functionalize was tested with torch {TESTED[0]} to {TESTED[-1]}, this is torch {version}: what a capture "
        "assumes of FSDP2 is compared with this torch, and a step that it does not explain is refused by name",
        UntestedTorchWarning,
        stacklevel=_frames_of_ours() + 1,
    )


def _frames_of_ours() -> int:
    """The number of frames of this library below the user's code, from the caller on."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and is_own(frame.f_code.co_filename):
        count, frame = count + 1, frame.f_back
    return count


def warn_if_untested() -> None:
    """Warn once in a process if the installed torch is outside of the tested range."""
    if not in_range(torch.__version__):
        _warn(torch.__version__)


@cache
def broken_contract() -> tuple[str, ...]:
    """One sentence for each op and attribute of the installed torch that the contract does not describe."""
    ops = (f"the op {name} is unknown: whether it writes is not known" for name in unlisted_ops())
    return (*ops, *unknown_attributes())


def why_not_here(modules: Sequence[nn.Module]) -> str | None:
    """Why a step over these modules is not replayed on the installed torch, or None. Always None without FSDP2."""
    if is_tested(torch.__version__):
        return None
    states = [state for module in modules for state in fsdp_states(module)]
    if not states:
        return None
    params = [param for _, param in fsdp_params(states)]
    live = [*states, *fsdp_contexts(states), *fsdp_groups(states), *params]
    problems = dict.fromkeys([*broken_contract(), *unknown_attributes_of(live)])
    if not problems:
        return None
    first, *more = problems
    rest = f" (and {len(more)} more)" if more else ""
    return (
        f"torch {torch.__version__} is not one of those that functionalize was tested with ({', '.join(TESTED)}), and "
        f"its FSDP2 differs: {first}{rest}. Install a tested release, or a newer functionalize"
    )
