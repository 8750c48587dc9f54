"""A user's script: its functions by name, and the values of command-line options.

    with opened("train.py", FunctionNames()) as script:      or "package.module"; inside, its folder is on sys.path
        script.build, script.step, script.inputs             or "hf:models/qwen3": the script made from a config

    assignments(["layers=4", "size=8B"])    {"layers": 4, "size": "8B"}       Python's literals, else text
    axis("batch=1,2,4")                     ("batch", [1, 2, 4])
    mesh("dp=64,tp=8"), mesh("64x8")        {"dp": 64, "tp": 8}, (64, 8)
    nbytes("80GB"), nbytes("80GiB")         80 * 10**9, 80 * 2**30

Refuses (`UsageError`): a missing file, module or function, and a value that cannot be parsed. Errors that a script
raises while it is imported propagate.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import linecache
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from functionalize.errors import FunctionalizeError, SaveError, UsageError
from functionalize.planner.sweep.training import Training

Mesh = dict[str, int] | tuple[int, ...]
DEFAULT_WORLD = 8  # ranks: one node of most machines
_PICTURES = (".png", ".svg", ".pdf")
_DRAWN_BY = {**dict.fromkeys(_PICTURES, ("matplotlib", "plots")), ".html": ("plotly", "page")}
_WORDS = {"true": True, "false": False, "none": None}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_UNITS = {"b": 1} | {
    f"{prefix}{infix}b": base**power
    for power, prefix in enumerate("kmgtp", 1)
    for infix, base in (("", 1000), ("i", 1024))
}


@dataclass(frozen=True)
class FunctionNames:
    """The names of a script's functions. inputs: None: a function `inputs` is used if the script has one."""

    build: str = "build"
    step: str = "step"
    inputs: str | None = None


@dataclass(frozen=True, eq=False)
class Script:
    """The functions of a script."""

    name: str
    build: Callable[..., Any]
    step: Callable[..., Any]
    inputs: Callable[..., Any] | None = None


@contextmanager
def opened(where: str, names: FunctionNames) -> Iterator[Script]:
    """Import a script: `where` is the path of a file, the name of a module, or names a config."""
    from functionalize.planner.configs.sources import is_config, script_of  # needs torch

    if is_config(where):
        with on_path(Path.cwd()), _from_text(where, script_of(where)) as module:
            yield _script(where, module, names)
        return
    path = Path(where)
    is_file = where.endswith(".py") or path.exists()
    if is_file and not path.is_file():
        raise UsageError(f"{where} is not there: give the path of a Python file, or package.module")
    with on_path(path.resolve().parent if is_file else Path.cwd()):
        if is_file:
            with _from_file(path) as module:
                yield _script(where, module, names)
        else:
            yield _script(where, _from_name(where), names)


@contextmanager
def as_usage(kind: type[FunctionalizeError] = FunctionalizeError) -> Iterator[None]:
    """Raises `UsageError` with the text of an error of a kind of this package's."""
    try:
        yield
    except kind as error:
        raise UsageError(str(error)) from None


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Let Python find modules in a folder first."""
    sys.path.insert(0, str(folder))
    # Hide this command's arguments from a script that reads `sys.argv`.
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = arguments
        with suppress(ValueError):  # the script has removed it
            sys.path.remove(str(folder))


@contextmanager
def _from_file(path: Path) -> Iterator[ModuleType]:
    """Import a file as a module. Its name is that of the file, unless `sys.modules` has that name already."""
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_script"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file: give one that ends in .py, or package.module")
    module = importlib.util.module_from_spec(spec)
    with _among_modules(module):
        spec.loader.exec_module(module)
        yield module


@contextmanager
def _from_text(where: str, text: str) -> Iterator[ModuleType]:
    """Import a text as a module. Reports quote its lines, which no file has, from `linecache`."""
    module, name = ModuleType("script_of_a_config"), f"<{where}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    with _among_modules(module):
        exec(compile(text, name, "exec"), vars(module))
        yield module


@contextmanager
def _among_modules(module: ModuleType) -> Iterator[None]:
    name = module.__name__
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is not None:
            sys.modules[name] = before
        else:
            sys.modules.pop(name, None)


def _from_name(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f"{name!r} is no name of a module: give package.module, or the path of a .py file"
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"no module `{name}` (there is no `{error.name}` on sys.path or in {os.getcwd()}): "
            "give package.module, or the path of a .py file"
        ) from None


def _script(where: str, module: ModuleType, names: FunctionNames) -> Script:
    return Script(
        where,
        _function(where, module, names.build, "build"),
        _function(where, module, names.step, "step"),
        _function(where, module, names.inputs, "inputs")
        if names.inputs is not None or hasattr(module, "inputs")
        else None,
    )


def _function(where: str, module: ModuleType, name: str | None, option: str) -> Any:
    found = getattr(module, name or option, None)
    if callable(found):
        return found
    own = (n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_"))
    there = ", ".join(
        n for n in own if getattr(vars(module)[n], "__module__", "") == module.__name__
    )
    raise UsageError(
        f"{where} has no function `{name or option}`: it has {there or 'none'}. Name the one that is meant: "
        f"--{option} NAME"
    )


# -- values ----------------------------------------------------------------------------------------


def assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` texts; every key may occur once."""
    found: dict[str, Any] = {}
    for text in texts:
        key, value = _pair(text, "--set")
        if key in found:
            raise UsageError(f"--set {key} appears twice")
        found[key] = literal(value)
    return found


def axis(text: str) -> tuple[str, list[Any]]:
    """Parse `key=value,value,...`: one axis of a grid and its values. Commas in brackets do not separate values."""
    key, values = _pair(text, "--grid")
    parts = [part.strip() for part in _split(values)]
    if not all(parts):
        raise UsageError(f"--grid {text}: a value is empty; write --grid key=1,2,4")
    return key, [mesh(part) if key == "mesh" else literal(part) for part in parts]


def axes(texts: Sequence[str] | None) -> dict[str, list[Any]]:
    """Parse the axes of a grid; every key may occur once."""
    found: dict[str, list[Any]] = {}
    for text in texts or ():
        key, values = axis(text)
        if key in found:
            raise UsageError(f"--grid {key} appears twice")
        found[key] = values
    return found


def literal(text: str) -> Any:
    """Parse a Python literal, or `true`, `false`, `none` in any case; any other text is returned as it is."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def mesh(text: str) -> Mesh:
    """Parse the sizes of a mesh: `64x8`, or with names `dp=64,tp=8`."""
    if re.fullmatch(r"\d+(x\d+)*", text):
        return tuple(map(int, text.split("x")))
    named = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part) for part in text.split(",")]
    sizes = {found[1]: int(found[2]) for found in named if found is not None}
    if len(sizes) != len(named):
        raise UsageError(f"--mesh {text!r} cannot be read: write 64x8, or dp=64,tp=8")
    return sizes


def check_files(*files: str | None) -> None:
    """Raises `UsageError` for a file that could not be written or drawn, before the (slow) recording."""
    for file in filter(None, files):
        library, extra = _DRAWN_BY.get(Path(file).suffix, ("", ""))
        if library and not _is_installed(library):
            raise UsageError(
                f'{file} needs {library}, which is not installed: pip install "functionalize[{extra}]"'
            )
        folder = Path(file).parent
        if Path(file).is_dir():
            raise UsageError(f"{file} is a folder: name a file in it")
        if not folder.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {folder}")
        if not os.access(Path(file) if Path(file).exists() else folder, os.W_OK):
            raise UsageError(f"{file} cannot be written: permission denied")


def check_picture(file: str | None) -> None:
    """Raises `UsageError` for a picture of an unknown format, before the (slow) recording."""
    if file is not None and Path(file).suffix not in _PICTURES:
        raise UsageError(f"--png {file}: the file of a picture ends in {' or '.join(_PICTURES)}")


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # `sys.modules` says that it is not there
        return False


@contextmanager
def writing(*files: str) -> Iterator[None]:
    """Raises `SaveError` where one of these files cannot be written, as on a disk that is full."""
    try:
        yield
    except OSError as error:
        where = error.filename or " or ".join(files)
        raise SaveError(f"{where} cannot be written: {error.strerror}") from error


def nbytes(text: str) -> int:
    """Parse a size in bytes: `80GB` (80 * 10**9), `80GiB` (80 * 2**30), or a plain number."""
    found = re.fullmatch(r"([\d_]*\.?\d+(?:[eE]\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = found[2].lower() or "b" if found is not None else ""
    if found is None or unit not in _UNITS:
        raise UsageError(
            f"the size {text!r} cannot be read: write 80GB, 74.5GiB, a number of bytes, or a machine, as h100"
        )
    size = float(found[1]) * _UNITS[unit]
    if not 1 <= size < math.inf:
        raise UsageError(f"the size {text!r} is no number of bytes of a device")
    return int(size)


def training(tokens: str | None, price: float | None) -> Training | None:
    """The run that `--tokens` (`15T`, `300B`, `1.5e9`) and `--price` describe; None without tokens."""
    if tokens is None:
        if price is not None:
            raise UsageError("--price needs --tokens: the cost of training on how many?")
        return None
    found = re.fullmatch(r"([\d_]*\.?\d+(?:[eE]\+?\d+)?)\s*([kKmMbBtT]?)", tokens.strip())
    if found is None:
        raise UsageError(f"--tokens {tokens!r} cannot be read: write 15T, 300B, 20M or a number")
    with as_usage():
        return Training(float(found[1]) * _COUNTS[found[2].upper()], price)


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip().isidentifier():
        raise UsageError(f"{option} {text!r} cannot be read: write {option} key=value")
    return key.strip(), value.strip()


def _split(text: str) -> list[str]:
    """Split at the commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
