"""What leaves a step beside its tensors is refused by name at the first call; what is not the step's is no obstacle."""

from __future__ import annotations

import builtins
import csv
import functools
import importlib
import io
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functionalize as fz
from functionalize.errors import UncapturableError
from functionalize.recorder.effects import watch_audit_events
from tests.forks import Fork
from tests.ranks import run_on_ranks

try:
    import tqdm
except ImportError:
    tqdm = None

X = torch.ones(3)
Effect = Callable[[], Any]
_print, _os_write = builtins.print, os.write  # as `from os import write` holds it
logger = logging.getLogger("tests.effects")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is the current one."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def refusal(step: Callable[[Tensor], Any], x: Tensor = X) -> str:
    """The error of a step after one call, which was eager's."""
    captured = fz.capture(step, on_uncapturable="raise")
    captured(x)
    with pytest.raises(UncapturableError) as raised:
        captured(x)
    assert captured.stats.replays == 0
    return str(raised.value)


def assert_replays(step: Callable[[Tensor], Any]) -> Any:
    captured = fz.capture(step)
    for _ in range(4):
        captured(X)
    assert captured.stats.replays >= 2
    return captured


# -- what leaves the process -----------------------------------------------------------------------


EFFECTS: list[tuple[Effect, str]] = [
    (lambda: open("log.txt", "a").close(), "writes to the file `log.txt` at "),
    (lambda: Path("log.txt").write_text("a"), "writes to the file `log.txt` at "),
    (lambda: np.save("a.npy", np.ones(2)), "writes to the file `a.npy` at "),
    (lambda: sys.stdout.write("a\n"), "writes to sys.stdout at "),
    (lambda: sys.stderr.write("a\n"), "writes to sys.stderr at "),
    (lambda: sys.stderr.writelines(["a"]), "writes to sys.stderr at "),
    (lambda: _print("a"), "prints at "),
    (lambda: os.write(1, b""), "calls os.write at "),
    (lambda: _os_write(1, b""), "calls os.write at "),
    (lambda: logger.handle(logging.makeLogRecord({"msg": "a step", "levelno": 40})), "logs at "),
    (lambda: torch.save({"n": 1}, "a.pt"), "saves by torch.save at "),
    (lambda: os.mkdir(tempfile.mktemp(dir=".")), "makes the folder `./"),
    (lambda: shutil.rmtree(tempfile.mkdtemp(dir=".")), "makes the folder `"),
    (lambda: os.rename("there", "there"), "calls os.rename (`there`) at "),
    (lambda: subprocess.run(["true"], check=True), "calls subprocess.Popen (`true`)"),
    (lambda: os.system("true"), "calls os.system (`true`) at "),
    (lambda: database(), "calls sqlite3.connect (`:memory:`) at "),
    (lambda: threading.Thread(target=int).start(), "starts a thread at "),
    (lambda: os.chdir("."), "changes a setting of the process by os.chdir at "),
    (lambda: os.umask(os.umask(0)), "changes a setting of the process by os.umask at "),
    (
        lambda: sys.setrecursionlimit(sys.getrecursionlimit()),
        "changes a setting of the process by sys.setrecursionlimit at ",
    ),
    (
        lambda: signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1)),
        "changes a setting of the process by signal.signal at ",
    ),
]


def file_write(opened: ExitStack) -> Effect:
    file = opened.enter_context(open("held.txt", "w"))  # noqa: SIM115
    return lambda: file.write("a step\n")


def pipe_write(opened: ExitStack) -> Effect:
    start, end = os.pipe()
    opened.callback(os.close, start)
    file = opened.enter_context(os.fdopen(end, "wb", buffering=0))
    return lambda: file.write(b"a step\n")


def held_stream(opened: ExitStack) -> Effect:
    write = sys.stderr.write
    return lambda: write("a step\n")


def rows(opened: ExitStack) -> Effect:
    writer = csv.writer(opened.enter_context(open("held.csv", "w")))  # noqa: SIM115
    return lambda: writer.writerow([1, 2])


def sql(opened: ExitStack) -> Effect:
    connection = opened.enter_context(closing(sqlite3.connect(":memory:", isolation_level=None)))
    connection.execute("create table losses (loss real)")
    return lambda: connection.execute("insert into losses values (1.0)")


def cursor(opened: ExitStack) -> Effect:
    connection = opened.enter_context(closing(sqlite3.connect(":memory:", isolation_level=None)))
    found = connection.cursor()
    return lambda: found.execute("create table if not exists losses (loss real)")


def send(opened: ExitStack) -> Effect:
    one, other = map(opened.enter_context, socket.socketpair())
    return lambda: (one.send(b"a step"), other.recv(6))


def work(opened: ExitStack) -> Effect:
    pool = opened.enter_context(ThreadPoolExecutor(1))
    pool.submit(int).result()
    return lambda: pool.submit(int).result()


def processes(opened: ExitStack) -> Effect:
    queue: Any = multiprocessing.Queue()
    opened.callback(queue.close)
    return lambda: queue.put(1)


def bar(opened: ExitStack) -> Effect:
    found = opened.enter_context(tqdm.tqdm(total=8, mininterval=100, file=io.StringIO()))
    return lambda: found.update(1)


def pickled(opened: ExitStack) -> Effect:
    file = opened.enter_context(open("held.pickle", "wb"))  # noqa: SIM115
    return lambda: pickle.dump(1, file)


def in_a_mode(opened: ExitStack) -> Effect:
    file = opened.enter_context(open("held.txt", "w"))  # noqa: SIM115

    class Writing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            file.write("an op\n")
            return func(*args, **(kwargs or {}))

    def effect() -> None:
        with Writing():
            X.sin()

    return effect


def database() -> None:
    sqlite3.connect(":memory:").close()


HELD = [
    (file_write, "writes to the file `held.txt` at "),
    (pipe_write, "writes to the file `"),
    (held_stream, "writes to sys.stderr at "),
    (rows, "writes rows by csv at "),
    (sql, "runs SQL at "),
    (cursor, "runs SQL at "),
    (send, "sends to a socket at "),
    (work, "submits work to a pool at "),
    (processes, "puts into a queue of processes at "),
    (pickled, "calls pickle.dump at "),
    (in_a_mode, "writes to the file `held.txt` at "),
    pytest.param(
        bar, "moves a progress bar at ", marks=pytest.mark.skipif(not tqdm, reason="tqdm")
    ),
]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        *((lambda _, effect=effect: effect, what) for effect, what in EFFECTS),
        *HELD,
    ],
)
def test_what_leaves_the_process_is_refused_at_the_first_call(
    folder: Path, make: Callable[[ExitStack], Effect], what: str
) -> None:
    (folder / "there").touch()
    with ExitStack() as opened:
        effect = make(opened)

        def step(x: Tensor) -> Tensor:
            effect()
            return x + 1

        message = refusal(step)
    assert message.startswith(what)
    assert f"at {__file__}:" in message
    assert ", which a replay would not: do so outside the step" in message
    assert "; " not in message, "one effect, one reason"


def test_an_effect_in_a_hook_and_in_the_backward_is_refused() -> None:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, args, out: os.write(1, b""))
    assert refusal(lambda x: layer(x)).startswith("calls os.write at ")

    other = nn.Linear(3, 3)
    other.weight.register_hook(lambda grad: _print("backward"))

    def step(x: Tensor) -> None:
        other(x).sum().backward()

    assert refusal(step).startswith("prints at ")


def test_an_effect_of_a_captured_forward_is_refused() -> None:
    layer = nn.Linear(3, 3)

    def loss(x: Tensor) -> Tensor:
        sys.stderr.write("a step\n")
        return layer(x).sum()

    captured = fz.capture(loss, backward=True, on_uncapturable="raise")
    captured(X).backward()
    with pytest.raises(UncapturableError, match=r"^writes to sys.stderr at"):
        captured(X)


def test_an_effect_in_a_later_recording_is_refused() -> None:
    switch = [0]
    stream = sys.stderr

    def step(x: Tensor) -> Tensor:
        if switch[0]:
            stream.write("a step\n")
        return x + 1

    captured = fz.capture(step, on_uncapturable="raise")
    for _ in range(4):
        captured(X)
    assert captured.stats.replays >= 2
    switch[0] = 1
    captured(X)
    with pytest.raises(UncapturableError, match=r"^writes to sys.stderr at"):
        captured(X)


def logs_every_step() -> None:
    logging.basicConfig(level="INFO")
    log = logging.getLogger("train")

    def step(x: Tensor) -> Tensor:
        log.info("a step")
        return x + 1

    captured = fz.capture(step, on_uncapturable="eager")
    for _ in range(6):
        captured(torch.ones(3))


def test_every_line_of_a_log_on_a_descriptor_appears() -> None:
    done = Fork(logs_every_step).done()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("INFO:train:a step") == 6


# -- text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "how"),
    [
        (lambda x: str(x.sum()), "as text"),
        (lambda x: "%s" % x.sum(), "as text"),  # noqa: UP031
        (lambda x: f"{x}", "as text"),
        (lambda x: f"{x!r}", "as text"),
        (lambda x: f"{nn.Parameter(x.sum())}", "as text"),
        (repr, "as text"),
        (lambda x: x.tolist(), "by .tolist()"),
        (lambda x: x.data_ptr(), "by .data_ptr()"),
        (lambda x: np.asarray(x).sum(), "by .numpy()"),
        (lambda x: np.from_dlpack(x).sum(), "by .__dlpack__()"),
        (pickle.dumps, "by pickling it"),
        (lambda x: torch.save(x, io.BytesIO()), "by pickling it"),
    ],
)
def test_a_read_without_an_op_is_refused_at_the_first_call(read: Any, how: str) -> None:
    message = refusal(lambda x: (x + 1, read(x)))
    assert f"Python reads a tensor {how} at {__file__}:" in message


def test_the_text_of_a_number_is_guarded() -> None:
    captured = fz.capture(lambda x: (x + 1, f"{x.sum()}", f"{x.sum().item():.2f}"))
    for n in (1.0, 1.0, 1.0, 1.0, 2.0):
        assert captured(X * n)[1:] == (f"{3 * n}", f"{3 * n:.2f}")
    assert captured.stats.replays >= 2


# -- what is no effect of the step -------------------------------------------------------------------


def imports() -> Effect:
    Path("printing_module.py").write_text("print('imported')\nopen('made.txt', 'w').close()\n")
    sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()

    def effect() -> None:
        importlib.import_module("printing_module")

    return effect


def warns() -> Effect:
    def effect() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda *_: sys.stderr.write("warned\n")  # type: ignore[assignment]
            warnings.warn("a step", stacklevel=1)

    return effect


def text_in_memory() -> Effect:
    return lambda: io.StringIO().write("a step")


def nowhere() -> Effect:
    def effect() -> None:
        with open(os.devnull, "w") as file:
            file.write("a step")

    return effect


@functools.cache
def log_once(text: str) -> None:
    logger.error(text)


@pytest.mark.parametrize(
    "make",
    [
        imports,
        warns,
        text_in_memory,
        nowhere,
        lambda: lambda: logger.debug("nobody handles it"),
        lambda: lambda: os.makedirs(".", exist_ok=True),
        lambda: functools.partial(log_once, "a step"),
    ],
)
def test_what_is_no_effect_of_the_step_is_no_obstacle(
    folder: Path, make: Callable[[], Effect], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_once.cache_clear()
    monkeypatch.setattr(sys, "path", list(sys.path))
    effect = make()

    def step(x: Tensor) -> Tensor:
        effect()
        return x + 1

    assert_replays(step)


def test_an_effect_of_a_custom_op_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    @torch.library.custom_op("test_effects::say", mutates_args=())
    def say(x: Tensor) -> Tensor:
        print("said")
        return x.clone()

    captured = assert_replays(lambda x: say(x) + 1)
    calls = captured.stats.warmups + captured.stats.captures + captured.stats.replays
    assert capsys.readouterr().out.count("said") == calls


def test_a_thread_that_writes_beside_the_step_is_no_obstacle(folder: Path) -> None:
    ended = threading.Event()

    def write() -> None:
        with open("log.txt", "w") as file:
            while not ended.wait(0.001):
                print("a line", file=file)

    thread = threading.Thread(target=write)
    thread.start()

    def step(x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x + 1

    try:
        assert_replays(step)
    finally:
        ended.set()
        thread.join()


def test_the_profile_function_of_the_user_stays() -> None:
    def profile(*_: Any) -> None:
        pass

    seen: list[Any] = []

    def step(x: Tensor) -> Tensor:
        seen[:] = [sys.getprofile()]
        return x + 1

    sys.setprofile(profile)
    try:
        fz.capture(lambda x: step(x))(X)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert seen == [profile]


def test_the_variables_of_the_step_are_as_in_eager() -> None:
    def step(x: Tensor) -> Tensor:
        found = locals()
        del found["x"]
        y = x + len(found)
        return y + len(found)

    captured = fz.capture(step)
    assert torch.equal(captured(X), step(X))


def test_a_step_that_raises_leaves_everything_as_it_was() -> None:
    def step(x: Tensor) -> Tensor:
        print("a step")
        raise ValueError

    captured = fz.capture(step)
    with pytest.raises(ValueError):
        captured(X)
    assert sys.getprofile() is None
    assert builtins.print is _print
    assert "write" not in vars(sys.stdout)


# -- on ranks ----------------------------------------------------------------------------------------


def writes_on_rank_0(seed: int) -> tuple[list[str], int, int]:
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.NamedTemporaryFile("w") as file:

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                file.write("a step\n")
            return loss.detach()

        captured = fz.capture(step, on_uncapturable="eager")
        for _ in range(5):
            captured(torch.ones(2, 4))
        file.flush()
        lines = Path(file.name).read_text().count("a step")
    return [str(e) for e in captured.core.refused.values()], lines, captured.stats.replays


def test_the_rank_that_writes_refuses_and_the_other_one_replays() -> None:
    (refused, lines, _), (none, no_lines, replays) = run_on_ranks(writes_on_rank_0, 0, world=2)
    assert (lines, none, no_lines) == (5, [], 0)
    assert len(refused) == 1
    assert refused[0].startswith("writes to the file `")
    assert replays >= 2


def test_the_process_has_one_hook_on_audit_events() -> None:
    """Python cannot remove one: with a hook for each recording, every event would cost more and more."""
    for _ in range(2):
        fz.capture(lambda x: x + 1)(torch.ones(2))
    assert watch_audit_events.cache_info().currsize == 1
