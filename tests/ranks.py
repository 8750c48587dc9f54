"""Run a function on real ranks: persistent processes joined by gloo over loopback.

    def loss_of(rank_seed):  # top level, so that the ranks can import it
        ...
        return loss.item()

    first, second = run_on_ranks(loss_of, 7, world=2)

The processes start on the first call and serve all later ones, so a call costs milliseconds. Between calls they are
stopped, since each of gloo's process groups has a thread that wakes up a hundred times a second.
What that means for the function:

- arguments and results travel by value (pickle): return plain or local tensors, not DTensors;
- each call starts at ``torch.manual_seed(0)`` and ends with a barrier, so that ranks which issued
  different collectives fail here and not in the next test;
- caches (sharding propagation, dynamo) stay warm from call to call, as does a process group that
  the function makes;
- it must leave torch as it found it: see ``tests/leftovers.py``.

A failure is raised again here, the first one to arrive, with its rank and remote traceback. It
costs the pool, as the ranks are no longer known to be in step: an error that is *expected* is
cheaper to catch inside the function. A hang kills the pool and shows where each rank stood. The
next call starts a fresh pool. A hang inside collectives is repeated once on a fresh pool, with a
warning that shows the stacks.

Nothing here needs pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import operator
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.leftovers import leftovers, settle_process

T = TypeVar("T")

PRELOADED = [
    "tests.ranks",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "functionalize",
    "passes",
]
START_SECONDS = 120.0  # importing torch on a busy machine takes a while
GRACE_SECONDS = 1.0  # after a failure, for the others to report theirs
STOPS = (
    sys.platform == "linux"
)  # elsewhere a process cannot ask to end with its parent, which it must if it is stopped
# The server imports torch once; a fork of it takes milliseconds. The first ranks of a pool are processes of their own,
# so that the ranks hash strings differently, as they do in a job: nothing that they must agree on may depend on it.
UNFORKED = 1


class RankError(RuntimeError):
    """A rank failed in a way that has no exception to raise again here."""


class RankTimeout(TimeoutError):
    """Some rank did not return in time. in_collective: whether all these ranks waited in a collective."""

    in_collective = False


class HungCollectiveWarning(UserWarning):
    """A call whose ranks all waited in collectives was repeated on new processes."""


# ---- in the ranks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failure:
    rank: int
    error: BaseException | None  # None: it died, or the exception cannot travel
    summary: str
    details: str  # the remote traceback

    def raise_(self, world: int, others: Iterable[_Failure]) -> None:
        error = self.error
        if error is None:
            error = RankError(self.summary)
        error.add_note(f"On rank {self.rank} of {world}:\n{self.details.rstrip()}")
        for other in others:
            error.add_note(f"Rank {other.rank} failed too: {other.summary}")
        raise error


def _attempt(rank: int, thunk: Callable[[], object]) -> bytes:
    """Return the pickled result of ``thunk``, or the pickled ``_Failure``."""
    try:
        return pickle.dumps(thunk())
    except BaseException as error:  # SystemExit and pytest's outcomes are answers, too
        summary = "".join(traceback.format_exception_only(error)).strip()
        details = traceback.format_exc()
        travels: BaseException | None = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            travels = None
        return pickle.dumps(_Failure(rank, travels, summary, details))


def _call(message: bytes) -> object:
    module, qualname, args = pickle.loads(message)
    torch.manual_seed(0)
    result = operator.attrgetter(qualname)(importlib.import_module(module))(*args)
    if problems := leftovers():
        raise RankError(f"{qualname} left torch changed: " + "; ".join(problems))
    if not dist.is_initialized():
        raise RankError(f"{qualname} destroyed the process group, which is the pool's")
    dist.barrier()
    return result


def _join(rank: int, world: int, folder: str) -> None:
    # Without it gloo looks up the host name, which need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    settle_process()
    _use_one_worker_per_group()
    gc.freeze()  # every full collection would visit the objects of torch
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10)
    )


def _use_one_worker_per_group() -> None:
    """Let gloo's groups have one worker thread each, for as long as the process lives.

    They have two, which write the name of the last collective that has ended into one string of C++, without a lock
    (`ProcessGroupGloo::runLoop`, torch 2.11 to 2.15). That corrupts the heap, seldom, also of processes that wait for
    each collective before the next: the worker writes after it has woken those who wait.
    """
    gloo = dist.ProcessGroupGloo
    initialize: Any = gloo.__init__

    def with_one_worker(
        self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: Any
    ) -> None:
        if any(others.values()):  # `enable_reconfigure` (torch 2.15) does not go with options
            return initialize(self, store, rank, size, timeout, **others)
        options: Any = gloo._Options()
        options._devices = [gloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])]
        options._timeout, options._threads = timeout, 1
        return initialize(self, store, rank, size, options)

    gloo.__init__ = with_one_worker  # type: ignore[method-assign,assignment]


def _serve(answers: Connection, rank: int, world: int, folder: str) -> None:
    """What a rank runs: join the others, then answer calls until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if STOPS:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with open(f"{folder}/stacks.{rank}", "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        answers.send_bytes(_attempt(rank, lambda: _join(rank, world, folder)))
        while True:
            try:
                message = answers.recv_bytes()
            except (EOFError, OSError):
                break
            answer = _attempt(rank, lambda: _call(message))  # noqa: B023 - called at once
            gc.collect()  # models are cycles; they must not die in the middle of the next test
            gc.freeze()  # what is left are modules and caches, which the next collection need not visit
            answers.send_bytes(answer)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)


# ---- in the parent -------------------------------------------------------------------------------


def fork_server() -> Any:
    """The context whose processes are forks of one that has imported `PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.getcwd()
    os.chdir(Path(__file__).parents[1])  # where the server, if it starts now, finds `tests`
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(before)
    return context


class RankPool:
    """``world`` processes joined by gloo, each waiting for a call."""

    def __init__(self, world: int, unforked: int = UNFORKED) -> None:
        """Start the processes and wait until they have joined. unforked: ranks that hash strings in their own way."""
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes = []
        self._pipes: list[Connection] = []
        server = fork_server()
        for rank in range(world):
            context: Any = multiprocessing.get_context("spawn") if rank < unforked else server
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world, self._folder.name), daemon=True
            )
            process.start()
            theirs.close()  # so that the death of the rank closes the pipe
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            self._collect("joining", START_SECONDS)
        except BaseException:
            self.close(kill=True)
            raise

    def run(self, name: str, message: bytes, timeout: float) -> list[Any]:
        """Send a pickled call to all ranks and return their results; ``name`` is for messages."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            try:
                pipe.send_bytes(message)
            except OSError:
                pass  # it died since the last call; reading says so
        results = self._collect(name, timeout)
        self._signal(signal.SIGSTOP)
        return results

    def close(self, kill: bool = False) -> None:
        """Let the ranks end, or ``kill`` them."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if not kill:
                process.join(10)
            process.kill()
            process.join()
            process.close()
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        for process in self._processes if STOPS else ():
            with contextlib.suppress(ProcessLookupError):  # it died
                if process.exitcode is None and process.pid is not None:
                    os.kill(process.pid, number)

    def _collect(self, name: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[_Failure] = []
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            seconds = max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), seconds)
            if not ready:
                break
            for pipe in [pipe for pipe in waiting if pipe in ready]:  # in rank order
                rank = waiting.pop(pipe)
                answer = self._receive(pipe, rank, name)
                if not isinstance(answer, _Failure):
                    results[rank] = answer
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                failures.append(answer)
        if failures:
            # The death of one rank makes gloo raise on the others: it comes first.
            first, *others = sorted(failures, key=lambda f: f.error is not None)
            first.raise_(self.world, others)
        if waiting:
            self._hung(name, timeout, sorted(waiting.values()))
        return [results[rank] for rank in range(self.world)]

    def _receive(self, pipe: Connection, rank: int, name: str) -> object:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(10)
            code = process.exitcode
            how = f"exit code {code}"
            if code is not None and code < 0:
                how = f"signal {signal.Signals(-code).name}"
            summary = f"rank {rank} of {self.world} died of {how} in {name}"
            return _Failure(rank, None, summary, self._stacks(rank))

    def _hung(self, name: str, timeout: float, ranks: list[int]) -> None:
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None:
                os.kill(pid, signal.SIGUSR1)
        stacks = self._written(ranks)
        error = RankTimeout(
            f"{name}: ranks {ranks} of {self.world} did not return within {timeout:g} s"
        )
        for rank, stack in zip(ranks, stacks, strict=True):
            error.add_note(f"Rank {rank} stood at:\n{stack}")
        error.in_collective = all(map(_waits_in_collective, stacks))
        raise error

    def _written(self, ranks: list[int]) -> list[str]:
        """The stacks, as soon as faulthandler has written all; it works while a rank hangs in C++."""
        until, before = time.monotonic() + 10, [""]
        stacks = [self._stacks(rank) for rank in ranks]
        while (stacks != before or not all(stacks)) and time.monotonic() < until:
            time.sleep(0.2)
            before, stacks = stacks, [self._stacks(rank) for rank in ranks]
        return stacks

    def _stacks(self, rank: int) -> str:
        file = Path(self._folder.name, f"stacks.{rank}")
        return file.read_text(errors="replace").strip() if file.exists() else ""


def _waits_in_collective(stack: str) -> bool:
    """Whether the innermost frames of a rank are of `torch.distributed`, or the recorder around them, or a replay.

    The code of a replay calls the ops of collectives without a frame of torch.
    """
    frames = [line for line in stack.splitlines() if line.lstrip().startswith("File ")][:6]
    replays = any('"<functionalize boxed program>"' in frame for frame in frames[:1])
    return replays or any("/torch/distributed/" in frame for frame in frames)


_pools: dict[int, RankPool] = {}  # by world size; processes outlive a call, hence a global
_other: list[bool] = []  # one for each `other_processes` that we are in


def close_pools() -> None:
    """End all ranks; the next call starts new ones."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_pools)


@contextlib.contextmanager
def other_processes() -> Iterator[None]:
    """Calls inside run on new processes, all of them forks, which end with it; those of calls outside are kept."""
    kept = dict(_pools)
    _pools.clear()
    _other.append(True)
    try:
        yield
    finally:
        close_pools()
        _other.pop()
        _pools.update(kept)


def run_on_ranks(
    fn: Callable[..., T], *args: object, world: int = 2, timeout: float = 120
) -> list[T]:
    """Call ``fn(*args)`` on each of ``world`` ranks and return the results in rank order.

    Args:
        fn: a function that can be imported by name; it finds its rank with ``dist.get_rank()``.
        args: picklable.
        world: the number of ranks.
        timeout: seconds for the call, without the start of the processes.

    Raises:
        TypeError: ``fn`` is not at the top level of a module.
        RankTimeout: a rank did not return; its notes show where each one stood.
        RankError: a rank died, or raised what cannot be pickled, or left torch changed.
        Exception: whatever ``fn`` raised, with a note that has the rank and its traceback.
    """
    name = f"{fn.__module__}.{fn.__qualname__}"
    try:
        importable = operator.attrgetter(fn.__qualname__)(sys.modules[fn.__module__]) is fn
    except (AttributeError, KeyError):
        importable = False
    if not importable:
        raise TypeError(f"{name}: the ranks import a function by name; put it at the top level")
    message = pickle.dumps((fn.__module__, fn.__qualname__, args))
    try:
        return _run(world, name, message, timeout)
    except RankTimeout as error:
        # Between processes of one machine gloo now and then loses a message, on every torch from 2.11 to 2.15 and with
        # no code of this library: one rank has returned from a collective, the other one waits in it for ever. Ranks
        # that wait for each other in earnest do so on new processes, too.
        if not error.in_collective:
            raise
        warnings.warn(
            f"{error}; repeated\n" + "\n".join(error.__notes__), HungCollectiveWarning, stacklevel=2
        )
    return _run(world, name, message, timeout)


def _run(world: int, name: str, message: bytes, timeout: float) -> list[Any]:
    if world not in _pools:
        _pools[world] = RankPool(world, 0 if _other else UNFORKED)
    try:
        return _pools[world].run(name, message, timeout)
    except BaseException:  # also Ctrl-C: the ranks may be out of step
        _pools.pop(world).close(kill=True)
        raise
