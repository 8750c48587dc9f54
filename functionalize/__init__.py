"""Turn eager PyTorch training steps, FSDP2 ones above all, into one functional FX graph."""

from functionalize.aot import aot_function, functionalize_storage, resize_storage_bytes_
from functionalize.core.program import Program
from functionalize.errors import FunctionalizeError
from functionalize.frontend.entry import capture
from functionalize.frontend.persist import load
from functionalize.frontend.record_memory import record_memory
from functionalize.frontend.target import Target
from functionalize.frontend.world import world
from functionalize.planning.plan import plan
from functionalize.transforms import trace

__all__ = [
    "FunctionalizeError",
    "Program",
    "Target",
    "aot_function",
    "capture",
    "functionalize_storage",
    "load",
    "plan",
    "record_memory",
    "resize_storage_bytes_",
    "trace",
    "world",
]
