"""What the command line prints: tables and text, or JSON alone on stdout; progress and errors on stderr.

    run(command, json, debug)          the command's exit code; every error as one paragraph
    out.working(text) -> say           a spinner with what goes on, where stderr is a terminal
    out.emit(data, show)               data() as JSON, or show(console)

With `--json` all else that is printed meanwhile, by the script too, goes to stderr, and an error is
`{"error": {"kind", "message"}}`. Pipes are given lines as long as they are.
Warnings and logs are for those who debug: they are shown with `--debug` alone, with tracebacks.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
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

from functionalize.errors import FunctionalizeError, InvariantError, UncapturableError, UsageError
from functionalize.util.user_stack import user_frames

INTERRUPTED = 130  # the exit code after Ctrl-C
_NO_END = 100_000  # columns of what is no terminal
_STDLIB = os.path.dirname(os.__file__)
_LOGGERS = ("functionalize", "torch")


@dataclass(eq=False)
class Out:
    """Where a command prints. stdout: the real one."""

    json: bool
    debug: bool
    stdout: TextIO
    console: Console
    errors: Console

    @staticmethod
    def of(as_json: bool, debug: bool) -> Out:
        """For the streams of now."""
        return Out(as_json, debug, sys.stdout, _console(sys.stdout), _console(sys.stderr))

    def emit(self, data: Callable[[], Any], show: Callable[[Console], None]) -> None:
        """Print the one or the other."""
        if self.json:
            print(json.dumps(_finite(data()), indent=2, default=str), file=self.stdout, flush=True)
        else:
            show(self.console)

    @contextmanager
    def working(self, text: str = "") -> Iterator[Callable[[str], None]]:
        """What goes on, in place of what went on before."""
        with self._progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        ) as bar:
            task = bar.add_task(text, total=None)
            yield lambda now: bar.update(task, description=now)

    @contextmanager
    def counting(self) -> Iterator[Callable[[int, int, str], None]]:
        """How many of how many are done, and what comes next."""
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
        """A line beside the result, on stderr."""
        self.errors.print(Text(text, style="dim"), soft_wrap=True)

    def fail(self, text: str, kind: str) -> None:
        """An error, on stderr, and as JSON if that was asked for."""
        if self.json:
            told = {"error": {"kind": kind, "message": text}}
            print(json.dumps(told, indent=2), file=self.stdout, flush=True)
        self.errors.print(Text.assemble(("error: ", "bold red"), text))


def _finite(data: Any) -> Any:
    """The same with text in place of infinities and NaN, for which JSON has no words."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [*map(_finite, data)] if isinstance(data, (list, tuple)) else data


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # where rich would exit with 1


def _console(stream: TextIO) -> Console:
    there = stream.isatty() or "COLUMNS" in os.environ
    return _Console(file=stream, highlight=False, width=None if there else _NO_END)


def run(command: Callable[[Out], int | None], as_json: bool, debug: bool) -> None:
    """Run a command and leave with its exit code (None: 0)."""
    out = Out.of(as_json, debug)
    with ExitStack() as stack:
        if as_json:
            stack.enter_context(_alone(out))
            stack.enter_context(redirect_stdout(sys.stderr))
        if not debug:
            stack.enter_context(_quiet())
        code = _code(command, out)
    raise typer.Exit(code)


@contextmanager
def wrong_usage() -> Iterator[None]:
    """An option or a command that typer does not know, told as any other error."""
    try:
        yield
    except Exception as error:
        message = getattr(
            error, "format_message", None
        )  # click's, which typer may have its own copy of
        if message is None:
            raise
        if "--json" in sys.argv:
            told = {"error": {"kind": "UsageError", "message": message()}}
            print(json.dumps(told, indent=2))
        rich_format_error(error)  # type: ignore[arg-type]
        raise SystemExit(getattr(error, "exit_code", 2)) from None


@contextmanager
def _alone(out: Out) -> Iterator[None]:
    """What is written past Python's `sys.stdout`, by C code or to the file descriptor, goes to stderr, too."""
    try:
        is_its_own = out.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):  # no file
        is_its_own = False
    if not is_its_own:
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
    try:
        return command(out) or 0
    except KeyboardInterrupt:
        out.errors.print("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # who reads has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # so that the interpreter's last flush does not fail
        return 0
    except (Exception, SystemExit) as error:
        if out.debug:
            out.errors.print(Text(traceback.format_exc()), soft_wrap=True)
        out.fail(told(error), type(error).__name__)
        return 2 if isinstance(error, UsageError) else 1


def told(error: BaseException) -> str:
    """What a person reads of an error: ours as it is, others with their kind and the user's line."""
    if isinstance(error, UncapturableError):
        return f"the step cannot be recorded: {error}"
    if isinstance(error, FunctionalizeError):
        return str(error)
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
    """Without warnings and logs."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
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
    """A table without lines: numbers to the right and whole, texts (`left`) shortened where they must be."""
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
    """Whether a table has room."""
    endless = console.options.update(width=_NO_END)
    return console.measure(made, options=endless).maximum <= console.width


def plain(console: Console, text: str, style: str = "") -> None:
    """Text as it is, lines as long as they are."""
    console.print(Text(text, style), soft_wrap=True)


def wrapped(console: Console, text: str) -> None:
    """Text in lines of the terminal's width."""
    console.print(Text(text))
