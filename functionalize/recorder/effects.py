"""What a step does outside its tensors while it is recorded: a replay would not, so the step is refused by name.

    open("log.txt", "a").write("a step")     writes to the file `log.txt` at train.py:12, in step: ...
    sys.stderr.write("a step")               writes to sys.stderr at train.py:13, in step: ...
    logger.info("a step")                    logs at train.py:14, in step: ...
    subprocess.run(["sync"])                 calls subprocess.Popen (`sync`) at train.py:15, in step: ...

Three ways see an effect. Each sees some that the others do not:

    audit events            files that are opened to be written, folders, processes, connections, from C code too
    a profile function      calls of C functions: `write` of files that are open already, SQL, held references
    replaced functions      `print`, handlers of `logging`, `sys.stderr.write`, `os.write`, sockets, threads

Note [The profile function]
Python calls it at every call of a function, and up to 3.12 it copies the variables of the caller into a dict each time:
a frame keeps old values until its next call, and the dict of `locals()` changes. So only the first recording of each
kind of call is watched, and of these none that is kept with the lifetimes of its storages; a call of `locals` ends the
watch. Of calls that are compared with predicted programs those are whose way through Python no watched call took
(`Coverage.wants_watch`). At the first Python function of an op's dispatch the profile function switches itself off, and
the recorder switches it on after the op: of 24 events per op of a transformer 8 remain. A watched recording is a
twelfth slower, and nearly all of that is the two switches, each of which raises an audit event. So does a look at the
code of a frame, but not one at its globals, which are compared first.
No condition that is known before the step spares the watch: a write may be in code of a library, which the walk does
not read, in a method that is found by a computed name, or in a function that the step imports.

Note [Whose effect]
The innermost frame that is not Python's own decides. An effect of torch's compilers, FSDP2 and this library is not the
step's. Nor is one of an import, which eager does once, or one inside of `warnings.warn`, which a replay repeats. Under
a function that is cached (`functools.cache`: "log this once") the effect does not refuse the step: the call is recorded
once more, and a program is kept only if its own recording had no effect.

Invariants: the step's own calls run as in eager, exceptions included. Outside of recordings an audit event costs the
look-up of its name, and no profile function is set. A profile function of the user stays.
Refusals: none are raised here; `Checks.unrepeatable` has the reasons. Not seen: writes inside compiled extensions that
raise no audit event, and threads that ran before the step.
"""

from __future__ import annotations

import functools
import gc
import io
import logging
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch

from functionalize._compat.dispatch import DISPATCH_CODE, DISPATCH_GLOBALS, dispatched_to
from functionalize.calls.clocks import CLOCKS, CONVERSIONS, clock_text
from functionalize.calls.interceptors import Cause, Interceptors
from functionalize.calls.repeated_calls import repeated_calls, state_patches
from functionalize.recorder.checks import Checks
from functionalize.util.packages import is_installed_file, is_standard_file
from functionalize.util.patching import Patch, set_profile
from functionalize.util.user_stack import is_internal, is_of_import, line_of_frame

Recordings = Callable[[], Iterable[Checks]]  # the checks of this thread's recordings

# Since Python 3.14 `warnings` imports its functions from another module.
_WARNS = warnings.formatwarning.__code__.co_filename
_AT_MOST_ONCE = (warnings.__file__, _WARNS, "<frozen importlib")
_CACHED = type(functools.cache(len))
_OURS = ("functionalize.",)
_BENIGN = (
    "triton.",
    "torch._",
    "torch.utils._traceback.",
    "torch.distributed.",
    "torch.fx.",
    "torch.nn.",
    "torch.optim.",
)
_THIN = ("torch.cuda.", "torch.accelerator.")  # only ask the device
_NOT_BENIGN = ("torch.distributed.checkpoint.", "torch.distributed.rpc.")

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_AUDITED = {
    "os": """chmod chown exec fork forkpty kill killpg link mkdir posix_spawn remove removexattr rename
        rmdir setxattr spawn startfile symlink system truncate utime""",
    "shutil": """chown copyfile copymode copystat copytree make_archive move rmtree unpack_archive""",
    "socket": "bind connect sendmsg sendto",
    "subprocess": "Popen",
    "pty": "spawn",
    "sqlite3": "connect",
    "syslog": "syslog",
    "ftplib": "sendcmd",
    "http": "client.send",
    "imaplib": "send",
    "poplib": "putline",
    "smtplib": "send",
    "urllib": "Request",
    "builtins": "input",
}
_EVENTS = frozenset(
    ["open", *(f"{module}.{name}" for module in _AUDITED for name in _AUDITED[module].split())]
)
_DESCRIPTORS = {
    *("write", "writev", "pwrite", "pwritev", "sendfile", "splice", "copy_file_range"),
    *("mkfifo", "mknod", "dup2", "fork"),
}
_SENDS = {"send", "sendall", "sendto", "sendmsg"}
_SQL = {"execute", "executemany", "executescript", "commit", "backup"}
_THREADS = {"start_new_thread", "start_joinable_thread", "fork_exec"}
_SAVES = {"write_record", "write_end_of_file"}  # of torch's writer of archives
_STREAMS = {"write", "writelines", "truncate"}
_DUMPING = {"_pickle", "marshal"}
_ROWS = {"writerow", "writerows"}
# What changes a setting of the whole process that no guard reads, by the name of the module in C.
_OF_PROCESS = {
    os.name: {"chdir", "fchdir", "umask", "nice", "setpriority"},
    "sys": {"setrecursionlimit", "setswitchinterval"},
    "_signal": {"signal", "setitimer", "alarm", "siginterrupt", "set_wakeup_fd"},
    "_locale": {"setlocale"},
}
_C_FUNCTIONS = CLOCKS.union(
    {"dump", "locals", "print", "tofile"},
    *(_DESCRIPTORS, _SENDS, _SQL, _THREADS, _SAVES, _STREAMS, _ROWS),
    *_OF_PROCESS.values(),
)

# Methods in Python that leave an effect to another thread or process, or have it at some of their calls only.
_METHODS = (
    ("concurrent.futures.process", "ProcessPoolExecutor", "submit", "submits work to a pool"),
    ("concurrent.futures.thread", "ThreadPoolExecutor", "submit", "submits work to a pool"),
    ("multiprocessing.pool", "Pool", "_map_async", "submits work to a pool"),
    ("multiprocessing.pool", "Pool", "apply_async", "submits work to a pool"),
    ("multiprocessing.queues", "Queue", "put", "puts into a queue of processes"),
    ("ssl", "SSLSocket", "send", "sends to a socket"),
    ("ssl", "SSLSocket", "sendall", "sends to a socket"),
    ("tensorboardX.writer", "FileWriter", "add_event", "writes to TensorBoard"),
    ("torch.utils.tensorboard.writer", "FileWriter", "add_event", "writes to TensorBoard"),
)


# -- whose effect it is ----------------------------------------------------------------------------


def _of_the_step(frame: FrameType | None) -> Cause | None:
    """What causes an effect; None if it is not the step. Note [Whose effect]. frame: the innermost one."""
    decisive = named = None
    generated = None  # of `python -c`, or of a dataclass
    once = False
    while frame is not None:
        file, module = frame.f_code.co_filename, f"{frame.f_globals.get('__name__')}."
        if file.startswith(_AT_MOST_ONCE):
            return None
        if module.startswith(_OURS):  # runs the step, or has the effect itself
            break
        once = once or _is_cached(frame)
        if file == "<string>":
            generated = generated or frame
        elif not (file.startswith("<frozen") or is_standard_file(file) or module.startswith(_THIN)):
            if decisive is None:
                if module.startswith(_BENIGN) and not module.startswith(_NOT_BENIGN):
                    return None
                decisive = frame
            if named is None and not is_internal(file) and not is_installed_file(file):
                named = frame
        frame = frame.f_back
    found = named or decisive or generated
    return Cause(found, once, decisive in (named, None)) if found is not None else None


def _is_cached(frame: FrameType) -> bool:
    """Whether a frame runs a function of its module that is decorated with `functools.cache`."""
    found = frame.f_globals.get(frame.f_code.co_name)
    return type(found) is _CACHED and found.__wrapped__.__code__ is frame.f_code


def _note(recordings: Recordings, frame: FrameType | None, what: str) -> None:
    """Note an effect in every recording of this thread. frame: the innermost one, of the code that caused it."""
    found = [c for c in recordings() if c.for_real and not c.in_effect]
    if not found:
        return
    step = _of_the_step(frame)
    if step is not None:
        line = line_of_frame(step.named)
        for checks in found:
            checks.note_effect(what, line, once=step.once)


def _note_clock(
    recordings: Recordings, frame: FrameType | None, what: str, may_convert: bool = False
) -> None:
    """Note a call that reads a clock. frame: the innermost one. may_convert: or that converts a time it was passed."""
    found = [c for c in recordings() if c.for_real and not c.in_effect and c.own_clock is None]
    step = _of_the_step(frame) if found and not _is_apart(frame) else None
    if step is None:
        return
    for checks in found:
        text = f"{what} {line_of_frame(step.named)}"
        checks.clock = checks.clock or text
        if step.is_own and not step.once and not may_convert:
            checks.own_clock = text


def _is_apart(frame: FrameType | None) -> bool:
    """Whether a callback of the garbage collector runs, as within any line of the step, or `os.makedirs`."""
    codes = {getattr(each, "__code__", None) for each in (os.makedirs, *gc.callbacks)}
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


# -- audit events ----------------------------------------------------------------------------------


@functools.cache
def watch_audit_events(active: Callable[[], bool], recordings: Recordings) -> None:
    """Install the audit hook, once per process: Python cannot remove one.

    active: whether anything is recorded, in any thread.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS and active():
            what = _event_text(event, args)
            if what is not None:
                _note(recordings, sys._getframe(1), what)
            elif event == "open" and not _is_null(args[0]):
                _note_clock(recordings, sys._getframe(1), f"a file, {_path(args[0])},")

    sys.addaudithook(hook)


def _event_text(event: str, args: tuple[Any, ...]) -> str | None:
    if event == "open":
        path, _, flags = args
        writes = isinstance(flags, int) and flags & _WRITING
        return f"writes to the file {_path(path)}" if writes and not _is_null(path) else None
    subject = _path(args[0]) if args and isinstance(args[0], (str, bytes, os.PathLike)) else ""
    if (
        event == "os.mkdir"
    ):  # `os.makedirs(path, exist_ok=True)` does nothing to a folder that is there
        return None if os.path.isdir(args[0]) else f"makes the folder {subject}"
    return f"calls {event}" + (f" ({subject})" if subject else "")


def _path(path: Any) -> str:
    return f"`{os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else path}`"


def _is_null(path: Any) -> bool:
    return path in (os.devnull, os.fsencode(os.devnull))


# -- calls of C functions --------------------------------------------------------------------------


class CallWatch:
    """Note [The profile function], of one recording, in the thread that records.

    mode: the class of the recorder, at whose ops the watch pauses.
    pauses: whether it is off while the recorder handles an op. Since Python 3.12 a switch costs more than it saves.
    paused: whether it is off for an op that the recorder has still to handle; then `profile` is set again.
    """

    pauses = sys.version_info < (3, 12)

    def __init__(self, recordings: Recordings, mode: type) -> None:
        self.paused = False

        def profile(frame: FrameType, event: str, function: Any) -> None:
            if event == "call":
                if (
                    frame.f_globals is DISPATCH_GLOBALS
                    and frame.f_code is DISPATCH_CODE
                    and self.pauses
                    and dispatched_to(frame) is mode
                ):
                    set_profile(None)
                    self.paused = True
            elif event == "c_call" and function.__name__ in _C_FUNCTIONS:
                if function is locals and not is_of_import(frame):
                    set_profile(None)
                    return
                if function.__name__ in CLOCKS and (clock := clock_text(function)) is not None:
                    may_convert = function.__name__ in CONVERSIONS
                    _note_clock(recordings, frame, clock, may_convert)
                try:
                    what = _call_text(function)
                except Exception:  # a property of the user's, such as the name of a stream
                    what = f"calls {function.__qualname__}"
                if what is not None:
                    _note(recordings, frame, what)

        self.profile = profile

    @property
    def is_on(self) -> bool:
        """Whether Python calls `profile` now."""
        return sys.getprofile() is self.profile

    def start(self) -> None:
        """Watch, unless the user profiles or a recording around this one watches."""
        self.paused = False
        if sys.getprofile() is None:
            set_profile(self.profile)

    def stop(self) -> bool:
        """Stop watching. Returns whether the watch has seen all calls since `start`."""
        if not self.is_on:
            return False
        set_profile(None)
        return True


def _call_text(function: Any) -> str | None:
    """What a C function does outside the step; None if nothing that leaves it."""
    name, owner = function.__name__, function.__self__
    if isinstance(owner, ModuleType):
        return _function_text(owner.__name__, name)
    if isinstance(owner, io.IOBase):
        return _stream_text(owner) if name in _STREAMS else None
    if isinstance(owner, socket.SocketType):
        return "sends to a socket" if name in _SENDS else None
    modules = {kind.__module__ for kind in type(owner).__mro__}
    if name in _SQL:
        return "runs SQL" if "sqlite3" in modules else None
    if name == "write":
        return "sends to a socket" if "_ssl" in modules else None
    if name == "dump":
        return "calls Pickler.dump" if "_pickle" in modules else None
    if name in _ROWS:
        return "writes rows by csv" if "_csv" in modules else None
    if name in _SAVES:
        return "saves tensors to a file"
    return "writes an array to a file" if name == "tofile" else None


def _function_text(module: str, name: str) -> str | None:
    if name == "dump":
        return f"calls {module.removeprefix('_')}.dump" if module in _DUMPING else None
    if name in _OF_PROCESS.get(module, ()):
        owner = "os" if module == os.name else module.removeprefix("_")
        return f"changes a setting of the process by {owner}.{name}"
    if module == "builtins":
        return "prints" if name == "print" else None
    if module == "_thread":
        return "starts a thread"
    if module == "_posixsubprocess":
        return "starts a process"
    return f"calls os.{name}" if module == os.name and name in _DESCRIPTORS else None


def _stream_text(stream: Any) -> str | None:
    if isinstance(stream, (io.StringIO, io.BytesIO)):
        return None  # in memory; one that is reachable is compared by its position
    for name in ("stdout", "stderr"):
        if stream is getattr(sys, name) or stream is getattr(sys, f"__{name}__"):
            return f"writes to sys.{name}"
    path = getattr(stream, "name", None)
    if path is None:
        return "writes to a file"
    return None if _is_null(path) else f"writes to the file {_path(path)}"


# -- replaced functions ----------------------------------------------------------------------------


def patches(recordings: Recordings, recorders: Callable[[], list[Any]]) -> Iterator[Patch]:
    """(owner, name, replacement). recordings: returns the checks of this thread's recordings; recorders: these."""
    interceptors = Interceptors(recorders, _of_the_step)
    for owner, name, what, interceptor in repeated_calls():
        original = getattr(owner, name, None)
        if original is not None:
            yield owner, name, interceptors.interceptor(original, what, interceptor)
    yield from state_patches(recorders)
    for owner, name, what in _functions_with_effects():
        original = getattr(owner, name, None)
        if original is not None:
            yield owner, name, _noting(recordings, original, what)


def _functions_with_effects() -> Iterator[tuple[Any, str, str]]:
    """(owner, name, what it does)."""
    yield logging.Handler, "handle", "logs"
    yield threading.Thread, "start", "starts a thread"
    for owner in (torch, torch.serialization):
        yield owner, "save", "saves by torch.save"
    for name in _DESCRIPTORS - {"fork"}:
        yield os, name, f"calls os.{name}"
    for name in (*_SENDS, "sendfile"):
        yield socket.socket, name, "sends to a socket"
    for module, of, name, what in _METHODS:
        yield getattr(sys.modules.get(module), of, None), name, what
    for name in ("stdout", "stderr"):
        found = {id(s): s for s in (getattr(sys, name), getattr(sys, f"__{name}__"))}
        for stream in found.values():  # `print` and loggers find `write` on the object
            setter: Any = type(stream).__setattr__
            if setter is object.__setattr__ and hasattr(stream, "__dict__"):
                for method in ("write", "writelines"):
                    yield stream, method, f"writes to sys.{name}"


def _noting(recordings: Recordings, original: Any, what: str) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        _note(recordings, sys._getframe(1), what)
        inside = list(recordings())
        for checks in inside:
            checks.in_effect += 1
        try:
            return original(*args, **kwargs)
        finally:
            for checks in inside:
                checks.in_effect -= 1

    noting.__doc__ = original.__doc__
    return noting
