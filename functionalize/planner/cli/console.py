"""Output of the command line: tables and text, or only JSON, on stdout; progress and errors on stderr.

    run(command, json, debug)          run a command and exit with its code; print an error as one paragraph
    out.working(text) -> say           a spinner with a status text, if stderr is a terminal
    out.counting() -> count            a bar with what is done of all; in a pipe a line now and then
    out.emit(data, show)               print data() as JSON, or call show(console)

With `--json` all other output, including the script's, is redirected to stderr, and an error is printed as
`{"error": {"kind", "message"}}`. In a pipe, lines are neither wrapped nor cut.
Tracebacks, warnings and logs are shown only with `--debug`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text
from typer.rich_utils import rich_format_error

from functionalize.ctrl_c import INTERRUPTED, interruptible
from functionalize.errors import FunctionalizeError, InvariantError, UncapturableError, UsageError

_UNLIMITED_WIDTH = 100_000  # columns when stdout is not a terminal
_LINE_EVERY = 5.0  # seconds between lines of progress in a pipe
_STDLIB = os.path.dirname(os.__file__)
_LOGGERS = ("functionalize", "torch")


@dataclass(eq=False)
class Out:
    """The outputs of a command.

    json, debug: the options. stdout: the stream that `run` found, even while `sys.stdout` is redirected.
    console: for text on stdout. errors: for stderr.
    """

    json: bool
    debug: bool
    stdout: TextIO
    console: Console
    errors: Console

    @staticmethod
    def of(as_json: bool, debug: bool) -> Out:
        """Create it for the current `sys.stdout` and `sys.stderr`."""
        return Out(as_json, debug, sys.stdout, _console(sys.stdout), _console(sys.stderr))

    def emit(self, data: Callable[[], Any], show: Callable[[Console], None]) -> None:
        """Print `data()` with --json, else call `show`."""
        if self.json:
            print(json.dumps(_finite(data()), indent=2, default=str), file=self.stdout, flush=True)
        else:
            show(self.console)

    @contextmanager
    def working(self, text: str = "") -> Iterator[Callable[[str], None]]:
        """Show a spinner; the yielded function replaces its text."""
        with self._progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        ) as bar:
            task = bar.add_task(text, total=None)
            yield lambda now: bar.update(task, description=now)

    @contextmanager
    def counting(self) -> Iterator[Callable[[int, int, str], None]]:
        """Show a progress bar; the yielded function has the arguments (done, total, text of the next item).

        In a pipe, a line now and then: `40% (12 of 30): checkpoint True, batch 2`.
        """
        if not self.errors.is_terminal:
            yield _Lines(self.note).count
            return
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with self._progress(*columns) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, of, now: bar.update(task, completed=done, total=of, description=now)

    def _progress(self, *columns: Any) -> Progress:
        return Progress(
            *columns,
            console=self.errors,
            transient=True,
            disable=not self.errors.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def note(self, text: str) -> None:
        """Print a remark on stderr."""
        self.errors.print(Text(text, style="dim"), soft_wrap=True)

    def fail(self, text: str, kind: str) -> None:
        """Print an error on stderr, and with --json as JSON on stdout."""
        if self.json:
            content = {"error": {"kind": kind, "message": text}}
            print(json.dumps(content, indent=2), file=self.stdout, flush=True)
        self.errors.print(Text.assemble(("error: ", "bold red"), text))


class _Lines:
    """Progress as lines, some seconds apart."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._told = tell, time.monotonic()

    def count(self, done: int, of: int, now: str) -> None:
        """Tell it, unless that was done a moment ago."""
        if time.monotonic() - self._told >= _LINE_EVERY:
            self._told = time.monotonic()
            self._tell(f"{done / of:.0%} ({done} of {of}): {now}")


def _finite(data: Any) -> Any:
    """Replace infinities and NaN by text, because JSON cannot represent them."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [*map(_finite, data)] if isinstance(data, (list, tuple)) else data


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with code 1 instead


def _console(stream: TextIO) -> Console:
    has_width = stream.isatty() or "COLUMNS" in os.environ
    return _Console(file=stream, highlight=False, width=None if has_width else _UNLIMITED_WIDTH)


def run(command: Callable[[Out], int | None], as_json: bool, debug: bool) -> None:
    """Run a command, then raise `typer.Exit` with its exit code (None: 0)."""
    out = Out.of(as_json, debug)
    with ExitStack() as stack:
        if as_json:
            stack.enter_context(_file_descriptor_redirected(out))
            stack.enter_context(redirect_stdout(sys.stderr))
        if not debug:
            stack.enter_context(_quiet())
        code = _code(command, out)
    raise typer.Exit(code)


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Report an option or a command that typer rejects in the format of other errors; exit with its code."""
    try:
        yield
    except Exception as error:
        # An exception of click, recognised by its method because typer may bundle its own copy of click.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        if "--json" in sys.argv:
            content = {"error": {"kind": "UsageError", "message": message()}}
            print(json.dumps(content, indent=2))
        rich_format_error(error)  # type: ignore[arg-type]
        raise SystemExit(getattr(error, "exit_code", 2)) from None


@contextmanager
def _file_descriptor_redirected(out: Out) -> Iterator[None]:
    """Redirect file descriptor 1 to stderr too, for C code and others that bypass `sys.stdout`."""
    try:
        is_process_stdout = out.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):  # a stream without a file descriptor
        is_process_stdout = False
    if not is_process_stdout:
        yield
        return
    out.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(os.dup(kept), "w", encoding=out.stdout.encoding) as stdout:
            out.stdout = stdout
            yield
    finally:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _code(command: Callable[[Out], int | None], out: Out) -> int:
    with interruptible() as was_interrupted:
        try:
            return command(out) or 0
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or was_interrupted():
                out.errors.print("interrupted")
                return INTERRUPTED
            return _failed(error, out)


def _failed(error: BaseException, out: Out) -> int:
    if isinstance(error, BrokenPipeError):  # the reader of the pipe has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # so that the interpreter's last flush does not fail
        return 0
    if not isinstance(error, (Exception, SystemExit)):
        raise error
    if out.debug:
        out.errors.print(Text(traceback.format_exc()), soft_wrap=True)
    out.fail(error_text(error), type(error).__name__)
    return 2 if isinstance(error, UsageError) or _lacks_torch(error) else 1


def _lacks_torch(error: BaseException) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"


def error_text(error: BaseException) -> str:
    """The text of an error: of this package's its message, of others their type, message and the user's line."""
    if isinstance(error, UncapturableError):
        return f"the step cannot be recorded: {error}"
    if isinstance(error, FunctionalizeError):
        return str(error)
    if _lacks_torch(error):
        return "this command needs torch, and there is none here: pip install torch"
    from functionalize.util.user_stack import user_frames  # which imports torch

    text = str(error).strip()
    kind = type(error).__name__
    head = f"{kind}: {text}" if text else kind
    found = user_frames(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in found if not frame.filename.startswith(_STDLIB)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{head}\n  at {error.filename}:{error.lineno}: {(error.text or '').strip()}"
    if isinstance(error, OSError) or (isinstance(error, SystemExit) and not frames):
        return head
    if isinstance(error, InvariantError) or not frames:
        return f"{head}\n  This is a bug of functionalize, please report it with what --debug shows"
    at = frames[-1]
    return f"{head}\n  at {at.filename}:{at.lineno}, in {at.name}: {at.line or ''}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings, and logs for which nobody has set up a handler."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    last_resort = logging.lastResort
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            logging.lastResort = logging.NullHandler()
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            logging.lastResort = last_resort
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


# -- tables ----------------------------------------------------------------------------------------


def table(
    console: Console,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[int] = (0,),
) -> None:
    """Print a table; see `table_of`."""
    console.print(table_of(heads, rows, left), crop=False)


def table_of(
    heads: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)
) -> Table:
    """A table without borders. left: columns of text, cut to fit; the others are right-aligned and never cut."""
    rows = [*rows]
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(zip(heads, *rows, strict=True)):
        if i in left:
            made.add_column(heads[i], overflow="ellipsis")
        else:
            made.add_column(heads[i], justify="right", min_width=max(map(len, column)))
    for row in rows:
        made.add_row(*(Text(cell, no_wrap=True) for cell in row))
    return made


def fits(console: Console, made: Table) -> bool:
    """Whether a table fits in the width of the console without being cut."""
    unlimited = console.options.update(width=_UNLIMITED_WIDTH)
    return console.measure(made, options=unlimited).maximum <= console.width


def plain(console: Console, text: str, style: str = "") -> None:
    """Print text without wrapping or cutting lines."""
    console.print(Text(text, style), soft_wrap=True)


def wrapped(console: Console, text: str) -> None:
    """Print text, wrapped to the width of the terminal."""
    console.print(Text(text))
