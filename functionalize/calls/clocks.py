"""C functions whose results differ from call to call, with the same state of Python: clocks, random bytes, files.

    clock_text(time.perf_counter)       "time.perf_counter"
    clock_text(datetime.now)            "datetime.now"

A call that a replay makes again has the constants of the recording among its arguments. They are constants if Python
computed them from guarded state; if the step reads a clock, that is not known.
"""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

_BY_MODULE = {
    "time": """time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns
        thread_time thread_time_ns clock_gettime clock_gettime_ns localtime gmtime ctime strftime asctime""",
    "posix": """urandom getrandom times getloadavg stat lstat fstat listdir scandir statvfs read readv pread
        sysconf""",
    "nt": "urandom times stat lstat fstat listdir scandir read",
    "gc": "get_count get_stats get_objects",
    "resource": "getrusage",
    "_tracemalloc": "get_traced_memory",
    "sys": "getrefcount",
    "_uuid": "generate_time_safe",
    "torch._C": "_cuda_memoryStats _cuda_memorySnapshot _host_emptyCache _accelerator_getDeviceStats",
}
_NAMES = {module: frozenset(names.split()) for module, names in _BY_MODULE.items()}
# Functions that convert the time they are passed, or without one read the clock.
CONVERSIONS = frozenset({"localtime", "gmtime", "ctime", "strftime", "asctime"})
_DATES = frozenset({"now", "utcnow", "today"})
_READS = frozenset({"read", "read1", "readline", "readlines", "readinto", "recv", "recv_into"})
CLOCKS = frozenset().union(*_NAMES.values(), _DATES, _READS)


def clock_text(function: Any) -> str | None:
    """The name of a C function with one of the names in `CLOCKS`, if its results differ; else None."""
    name, owner = function.__name__, function.__self__
    if isinstance(owner, ModuleType):
        known = name in _NAMES.get(owner.__name__, ())
        of_files = "files, by os" if owner.__name__ in ("posix", "nt") else owner.__name__
        return f"{of_files}.{name}" if known else None
    if isinstance(owner, type):
        return (
            f"{owner.__name__}.{name}"
            if name in _DATES and owner.__module__ == "datetime"
            else None
        )
    in_memory = isinstance(owner, (io.StringIO, io.BytesIO))
    is_stream = isinstance(owner, io.IOBase) or name.startswith("recv")
    return (
        f"{type(owner).__name__}.{name}" if name in _READS and is_stream and not in_memory else None
    )
