"""Functions of tensors as programs and graphs, and the backwards of eager graphs, for those who write compilers.

program = fz.functions.trace(fn, *args)
program = fz.functions.trace_backward(loss)
"""

from typing import TYPE_CHECKING

from functionalize.util.late_names import late_names

if TYPE_CHECKING:
    from functionalize.functions.aot import (
        aot_function,
        functionalize_storage,
        resize_storage_bytes_,
    )
    from functionalize.functions.transforms import trace
    from functionalize.step_backward.captured_backward import capture_backward
    from functionalize.step_backward.trace_backward import trace_backward
else:
    __getattr__, __dir__ = late_names(
        __name__,
        {
            "aot_function": "functionalize.functions.aot",
            "capture_backward": "functionalize.step_backward.captured_backward",
            "functionalize_storage": "functionalize.functions.aot",
            "resize_storage_bytes_": "functionalize.functions.aot",
            "trace": "functionalize.functions.transforms",
            "trace_backward": "functionalize.step_backward.trace_backward",
        },
    )

__all__ = [
    "aot_function",
    "capture_backward",
    "functionalize_storage",
    "resize_storage_bytes_",
    "trace",
    "trace_backward",
]
