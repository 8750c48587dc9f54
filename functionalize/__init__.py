"""Turn eager PyTorch training steps, FSDP2 ones above all, into one functional FX graph.

Here is what a training script needs first. `fz.functions` has functions of tensors, `fz.passes` rewrites of programs,
`fz.planner` machines, devices and reports, `fz.integrations` frameworks, `fz.errors` errors and warnings.
"""

from typing import TYPE_CHECKING

import functionalize.ctrl_c  # noqa: F401  # before torch is imported, which takes long
from functionalize.util.late_names import late_names
from functionalize.util.upper_parts import provide

# For type checkers the names are there, and no other one is. They are imported when they are first used: the command
# line answers `--help` without torch, and most programs use no planner.
if TYPE_CHECKING:
    from functionalize import errors as errors
    from functionalize import functions as functions
    from functionalize import integrations as integrations
    from functionalize import passes as passes
    from functionalize import planner as planner
    from functionalize.calls.repeat import repeat
    from functionalize.deferral.lazy import lazy
    from functionalize.entry import capture
    from functionalize.planner.fake_world.world import world
    from functionalize.planner.lifetimes.record_memory import record_memory
    from functionalize.planner.sweep.plan import plan
    from functionalize.planner.tuning.tune import tune
    from functionalize.program.program import Program
    from functionalize.step.step_file import load

__all__ = [
    "Program",
    "capture",
    "lazy",
    "load",
    "plan",
    "record_memory",
    "repeat",
    "tune",
    "world",
]


def _memory_reports() -> object:
    """The planner's part in `capture(memory=True)`."""
    from functionalize.planner.lifetimes.step_memory import REPORTS

    return REPORTS


provide("memory reports", _memory_reports)

if not TYPE_CHECKING:
    __getattr__, __dir__ = late_names(
        __name__,
        {
            "Program": "functionalize.program.program",
            "capture": "functionalize.entry",
            "lazy": "functionalize.deferral.lazy",
            "load": "functionalize.step.step_file",
            "plan": "functionalize.planner.sweep.plan",
            "record_memory": "functionalize.planner.lifetimes.record_memory",
            "repeat": "functionalize.calls.repeat",
            "tune": "functionalize.planner.tuning.tune",
            "world": "functionalize.planner.fake_world.world",
        },
        ("errors", "functions", "integrations", "passes", "planner"),
    )
