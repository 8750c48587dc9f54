"""Turn eager PyTorch training steps, FSDP2 ones above all, into one functional FX graph."""

import importlib
from typing import TYPE_CHECKING, Any

import functionalize.ctrl_c  # noqa: F401  # before torch is imported, which takes long
from functionalize.util.gc_pause import only_young_collections

with only_young_collections():  # a third of the time of the imports below, torch's own among them
    from functionalize.entry import capture
    from functionalize.errors import FunctionalizeError, UncapturableWarning
    from functionalize.functions.transforms import trace
    from functionalize.program.program import Program
    from functionalize.state.memory_reports import MemoryReports, provide_memory_reports

if TYPE_CHECKING:  # the types of the names that `__getattr__` finds
    from functionalize.calls.repeat import repeat
    from functionalize.deferral.lazy import lazy
    from functionalize.functions.aot import (
        aot_function,
        functionalize_storage,
        resize_storage_bytes_,
    )
    from functionalize.planner.calibration.calibrate import calibrate
    from functionalize.planner.fake_world.target import Target
    from functionalize.planner.fake_world.world import world
    from functionalize.planner.lifetimes.record_memory import record_memory
    from functionalize.planner.sweep.plan import plan
    from functionalize.planner.tuning.tune import tune
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

# Imported when they are first used, as most programs use no planner: the module of each name.
_MODULES = {
    "Target": "planner.fake_world.target",
    "aot_function": "functions.aot",
    "calibrate": "planner.calibration.calibrate",
    "capture_backward": "step_backward.captured_backward",
    "functionalize_storage": "functions.aot",
    "lazy": "deferral.lazy",
    "load": "step.step_file",
    "plan": "planner.sweep.plan",
    "record_memory": "planner.lifetimes.record_memory",
    "repeat": "calls.repeat",
    "resize_storage_bytes_": "functions.aot",
    "trace_backward": "step_backward.trace_backward",
    "tune": "planner.tuning.tune",
    "world": "planner.fake_world.world",
}


def _memory_reports() -> MemoryReports:
    """The planner's part in `capture(memory=True)`."""
    from functionalize.planner.lifetimes.step_memory import REPORTS

    return REPORTS


provide_memory_reports(_memory_reports)


def __getattr__(name: str) -> Any:
    if name == "integrations":
        return importlib.import_module("functionalize.integrations")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with only_young_collections():
        found = getattr(importlib.import_module(f"functionalize.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "integrations"})
