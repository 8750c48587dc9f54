"""Ctrl-C at any moment: one line on stderr, exit code 130, no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from functionalize import ctrl_c

# The file alone, as `python -m functionalize` imports it before all else: no torch, so a process takes no time.
LOAD = f"""
import importlib.util, os, signal, sys, time, weakref
sys.orig_argv = ["python", "-m", "functionalize"]
spec = importlib.util.spec_from_file_location("ctrl_c", {ctrl_c.__file__!r})
ctrl_c = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ctrl_c)
press = lambda: os.kill(os.getpid(), signal.SIGINT)
"""


def ran(code: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a process."""
    command = [sys.executable, "-S", "-c", LOAD + textwrap.dedent(code)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return found.returncode, found.stdout, found.stderr


def test_before_and_after_a_command_it_ends_at_once() -> None:
    assert ran("press(); print('on')") == (130, "", "interrupted\n")
    code = "with ctrl_c.interruptible() as pressed: assert not pressed()\npress(); print('on')"
    assert ran(code) == (130, "", "interrupted\n")


def test_a_command_cleans_up_and_says_so_once() -> None:
    code = """
    with ctrl_c.interruptible() as pressed:
        try:
            try:
                press()
            finally:
                print("cleaned up", flush=True)
        except KeyboardInterrupt:
            print("interrupted", pressed(), file=sys.stderr, flush=True)
    time.sleep(0.1)
    press()
    print("on")
    """
    assert ran(code) == (130, "cleaned up\n", "interrupted True\n")


def test_inside_of_exec_the_exit_code_is_the_same() -> None:
    code = """
    with ctrl_c.interruptible():
        try:
            exec("press()")
        except KeyboardInterrupt:
            print("handled")
    """
    assert ran(code) == (130, "handled\n", "")


@pytest.mark.parametrize(
    "lost",
    [
        "weakref.finalize(x, press); del x",  # a callback cannot raise
        "press_twice()",
        "swallow(); time.sleep(30)",  # ends when patience ends
    ],
)
def test_it_is_not_lost(lost: str) -> None:
    code = f"""
    class X: pass
    x = X()
    ctrl_c.PATIENCE = 0.1
    def swallow():
        try: press()
        except BaseException: pass
    def press_twice():
        swallow()
        press()
    with ctrl_c.interruptible():
        {lost}
        print("on")
    """
    assert ran(code) == (130, "", "interrupted\n")


def test_what_another_thread_receives_waits_too() -> None:
    code = """
    import threading
    held, seen = threading.Event(), []
    def other():
        held.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        seen.append(True)
    thread = threading.Thread(target=other)
    thread.start()
    with ctrl_c.held_back():
        held.set()
        thread.join()
        print(seen, flush=True)
    """
    assert ran(code) == (130, "[True]\n", "interrupted\n")


def test_what_was_started_meanwhile_waits_and_then_ends_without_a_word() -> None:
    child = "signal.sigpending() == {signal.SIGINT} or sys.exit('lost'); ctrl_c.let_through(); sys.exit('alive')"
    code = f"""
    import subprocess
    with ctrl_c.held_back():
        command = [sys.executable, "-S", "-c", "input()\\n" + {LOAD + child!r}]
        child = subprocess.Popen(command, stdin=subprocess.PIPE)
        press()
        child.send_signal(signal.SIGINT)
        child.communicate(b"sent\\n")
        print(child.returncode, flush=True)
    """
    assert ran(code) == (130, f"{-signal.SIGINT}\n", "interrupted\n")


def test_who_imports_the_package_keeps_his_own_handler() -> None:
    assert not ctrl_c.is_command() and signal.getsignal(signal.SIGINT) is not ctrl_c.leave
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with ctrl_c.interruptible() as pressed:
        assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before and not pressed()


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`functionalize` in a session of its own, as a terminal has it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "functionalize", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    found = Path(f"/proc/{process}/task/{process}/children")
    return [*map(int, found.read_text().split())]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds children in Linux's /proc")
def test_a_calibration_leaves_no_rank(tmp_path: Path) -> None:
    """One is interrupted while torch is imported, another one while its ranks are."""
    file = str(tmp_path / "here.json")
    with command("calibrate", file) as early, command("calibrate", file) as late:
        while "libtorch" not in Path(f"/proc/{early.pid}/maps").read_text():
            time.sleep(0.01)
        os.killpg(early.pid, signal.SIGINT)
        assert early.communicate(timeout=60) == ("", "interrupted\n") and early.returncode == 130
        ranks: list[int] = []
        while len(ranks) < 3 and late.poll() is None:  # two, and multiprocessing's own
            time.sleep(0.02)
            ranks = children(late.pid)
        late.send_signal(signal.SIGINT)  # to the parent alone
        assert late.communicate(timeout=60) == ("", "interrupted\n") and late.returncode == 130
    until = time.monotonic() + 60  # multiprocessing's own notices that its parent has ended
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    assert len(ranks) == 3 and not os.listdir(tmp_path)
