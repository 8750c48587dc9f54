"""Turn eager PyTorch training steps, FSDP2 ones above all, into one functional FX graph."""

import importlib
from typing import TYPE_CHECKING

import functionalize.ctrl_c  # noqa: F401  # before torch is imported, which takes long
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.upper_parts import provide

# For type checkers the names are there, and no other one is. They are imported when they are first used: the command
# line answers `--help` without torch, and most programs use no planner.
if TYPE_CHECKING:
    from functionalize import errors as errors
    from functionalize import functions as functions
    from functionalize import integrations as integrations
    from functionalize import passes as passes
    from functionalize.calls.repeat import repeat
    from functionalize.deferral.lazy import lazy
    from functionalize.entry import capture
    from functionalize.errors import FunctionalizeError, UncapturableWarning
    from functionalize.functions.aot import (
        aot_function,
        functionalize_storage,
        resize_storage_bytes_,
    )
    from functionalize.functions.transforms import trace
    from functionalize.planner.calibration.calibrate import calibrate
    from functionalize.planner.fake_world.target import Target
    from functionalize.planner.fake_world.world import world
    from functionalize.planner.lifetimes.record_memory import record_memory
    from functionalize.planner.sweep.plan import plan
    from functionalize.planner.tuning.tune import tune
    from functionalize.program.program import Program
    from functionalize.step.step_file import load
    from functionalize.step_backward.captured_backward import capture_backward
    from functionalize.step_backward.trace_backward import trace_backward

__all__ = [
    "FunctionalizeError",
    "Program",
    "Target",
    "UncapturableWarning",
    "aot_function",
    "calibrate",
    "capture",
    "capture_backward",
    "functionalize_storage",
    "lazy",
    "load",
    "plan",
    "record_memory",
    "repeat",
    "resize_storage_bytes_",
    "trace",
    "trace_backward",
    "tune",
    "world",
]

# The module of each name.
_MODULES = {
    "FunctionalizeError": "errors",
    "Program": "program.program",
    "Target": "planner.fake_world.target",
    "UncapturableWarning": "errors",
    "aot_function": "functions.aot",
    "calibrate": "planner.calibration.calibrate",
    "capture": "entry",
    "capture_backward": "step_backward.captured_backward",
    "functionalize_storage": "functions.aot",
    "lazy": "deferral.lazy",
    "load": "step.step_file",
    "plan": "planner.sweep.plan",
    "record_memory": "planner.lifetimes.record_memory",
    "repeat": "calls.repeat",
    "resize_storage_bytes_": "functions.aot",
    "trace": "functions.transforms",
    "trace_backward": "step_backward.trace_backward",
    "tune": "planner.tuning.tune",
    "world": "planner.fake_world.world",
}
_PACKAGES = ("errors", "functions", "integrations", "passes")


def _memory_reports() -> object:
    """The planner's part in `capture(memory=True)`."""
    from functionalize.planner.lifetimes.step_memory import REPORTS

    return REPORTS


provide("memory reports", _memory_reports)

if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _MODULES and name not in _PACKAGES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with only_young_collections():  # a third of the time of an import, torch's own among them
            if name in _PACKAGES:
                return importlib.import_module(f"functionalize.{name}")
            found = getattr(importlib.import_module(f"functionalize.{_MODULES[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
