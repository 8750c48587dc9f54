"""Turn eager PyTorch training steps, FSDP2 ones above all, into one functional FX graph."""

from functionalize.aot import aot_function, functionalize_storage, resize_storage_bytes_
from functionalize.core.program import Program
from functionalize.errors import FunctionalizeError
from functionalize.frontend.persist import load
from functionalize.frontend.step import capture
from functionalize.transforms import trace

__all__ = [
    "FunctionalizeError",
    "Program",
    "aot_function",
    "capture",
    "functionalize_storage",
    "load",
    "resize_storage_bytes_",
    "trace",
]
