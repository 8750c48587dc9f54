"""The file of saved programs: a zip of metadata, programs and constants.

    metadata.json    versions, world, sizes: checked first, without reading the rest
    programs.json    records (see json_codec.py) and, per program, its nodes and fields (see program_file.py)
    constants.bin    the bytes of the constants' storages in a row; programs.json says which tensors they are

Invariant: a file is written as a whole or not at all. Nothing is unpickled. No more memory is taken than the sizes of
the entries say, and no entry says more than its compressed bytes can hold.
Refusals: `LoadError` for a file that does not exist, is damaged, or was written by other versions; `SaveError` for a
constant that is not plain bytes (sparse, quantized).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from functionalize.errors import FunctionalizeError, LoadError, SaveError

FORMAT = 3
FilePath = str | os.PathLike[str]
Json = Any

# -- metadata --------------------------------------------------------------------------------------


@functools.cache
def _own_version() -> str:
    try:
        return importlib.metadata.version("functionalize")
    except importlib.metadata.PackageNotFoundError:  # imported from a source folder
        return "unknown"


def versions() -> dict[str, Any]:
    """The versions that must be equal when a program is saved and when it is loaded."""
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "functionalize": _own_version(),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def check_versions(metadata: Json) -> None:
    """Raises `LoadError` if a file was written by other versions than those running."""
    if metadata.get("format") != FORMAT:
        raise LoadError(f"has format {metadata.get('format')}, this library reads format {FORMAT}")
    for name, here in versions().items():
        if metadata.get(name) != here:
            raise LoadError(f"was saved with {name} {metadata.get(name)}, this is {name} {here}")


# -- files -----------------------------------------------------------------------------------------

_METADATA, _PROGRAMS, _CONSTANTS = "metadata.json", "programs.json", "constants.bin"
_LARGEST = 2**31  # bytes of JSON: far above any program, below what would exhaust a machine
_DEFLATED = 1100  # bytes, at most, that one byte of a deflated entry makes
# The same of JSON that is longer than `_SHORT`: as objects it takes ten times its bytes.
_REPETITIVE = 200
_SHORT = 2**22
_LONGEST = 800  # characters of a message


def write(path: FilePath, metadata: Json, content: Json, constants: Mapping[str, Tensor]) -> None:
    """Write a file atomically: an existing file is replaced when the new one is complete."""
    described, storages = _described(constants)
    content = {**content, "constants": described}
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with (
            os.fdopen(handle, "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            archive.writestr(_METADATA, json.dumps(metadata, indent=1))
            archive.writestr(_PROGRAMS, json.dumps(content, separators=(",", ":")))
            with archive.open(_CONSTANTS, "w", force_zip64=True) as entry:
                for storage in storages:
                    entry.write(storage)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_metadata(path: FilePath) -> Json:
    """The metadata alone; raises `LoadError` if the file is no saved program."""
    return json.loads(_entry(path, _METADATA))


def read(path: FilePath) -> tuple[Json, dict[str, Tensor]]:
    """Content and constants."""
    content = json.loads(_entry(path, _PROGRAMS))
    with _opened(path, _CONSTANTS) as (entry, size):
        return content, _constants(content["constants"], entry, size)


def _entry(path: FilePath, name: str) -> bytes:
    with _opened(path, name) as (entry, size):
        if size > _LARGEST:
            raise LoadError(f"has a {name} of more than {_LARGEST} bytes: it is damaged")
        return entry.read()


@contextlib.contextmanager
def _opened(path: FilePath, name: str) -> Iterator[tuple[IO[bytes], int]]:
    """An entry, and its size, which its compressed bytes can hold."""
    try:
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo(name)
            packed, most = info.compress_size, _DEFLATED
            if name != _CONSTANTS and info.file_size > _SHORT:
                most = _REPETITIVE
            if packed > os.path.getsize(path) or info.file_size > most * packed + 64:
                raise LoadError(
                    f"has a {name} that says it is larger than it can be: it is damaged"
                )
            with archive.open(info) as entry:
                yield entry, info.file_size
    except FileNotFoundError as error:
        raise LoadError("is not there") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        EOFError,
        OSError,
        NotImplementedError,
    ) as error:
        raise LoadError(f"is no saved program, or is damaged: {_line(error)}") from error


# -- constants -------------------------------------------------------------------------------------


def _described(constants: Mapping[str, Tensor]) -> tuple[Json, list[Any]]:
    """The tensors by name, and the bytes of their storages. Tensors that share a storage share it again when read."""
    storages: dict[int, int] = {}
    sizes: list[int] = []
    parts: list[Any] = []
    tensors: dict[str, Json] = {}
    for name, tensor in constants.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise SaveError(f"has the constant `{name}`, a tensor that is not plain bytes")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        storage = tensor.untyped_storage()
        index = storages.setdefault(storage._cdata, len(sizes))
        if index == len(sizes):
            sizes.append(storage.nbytes())
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            parts.append(whole.cpu().numpy().data)
        dtype = str(tensor.dtype).removeprefix("torch.")
        window = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        tensors[name] = [index, dtype, *window, str(tensor.device)]
    return {"storages": sizes, "tensors": tensors}, parts


def _constants(described: Json, entry: IO[bytes], size: int) -> dict[str, Tensor]:
    sizes = described["storages"]
    if not all(type(n) is int and n >= 0 for n in sizes) or sum(sizes) != size:
        raise LoadError("has constants of other sizes than it says: it is damaged")
    bases = []
    for nbytes in sizes:
        base = torch.empty(nbytes, dtype=torch.uint8)
        _fill(entry, base.numpy().data)
        bases.append(base)
    if entry.read(1):
        raise LoadError("has more constants than it says: it is damaged")
    moved: dict[tuple[int, torch.device], Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, (index, dtype, shape, stride, offset, device) in described["tensors"].items():
        kind, place = getattr(torch, dtype, None), torch.device(device)
        numbers = (index, offset, *shape, *stride)
        if not isinstance(kind, torch.dtype) or any(type(n) is not int or n < 0 for n in numbers):
            raise LoadError(f"has the constant `{name:.80}`, which is none: it is damaged")
        if index >= len(bases) or len(shape) != len(stride):
            raise LoadError(f"has the constant `{name:.80}` of no storage: it is damaged")
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
        if 0 not in shape and last * kind.itemsize > sizes[index]:
            raise LoadError(f"has the constant `{name:.80}` beyond its storage: it is damaged")
        if any(n >= 2**62 for n in numbers):
            raise LoadError(f"has the constant `{name:.80}` of a size that none has: it is damaged")
        if (index, place) not in moved:
            moved[index, place] = bases[index].to(place)
        storage = moved[index, place].untyped_storage()
        made = torch.empty(0, dtype=kind, device=place)
        found[name] = made.set_(storage, 0 if 0 in shape else offset, tuple(shape), tuple(stride))
    return found


def _fill(entry: IO[bytes], into: memoryview) -> None:
    at = 0
    while at < len(into):
        part = entry.read(min(len(into) - at, 1 << 20))
        if not part:
            raise EOFError("its constants end too early")
        into[at : at + len(part)] = part
        at += len(part)


def refusal(path: FilePath, error: FunctionalizeError, verb: str) -> FunctionalizeError:
    """`error` with the file's path before its message, in one line."""
    # It may hold names of the file.
    said = "".join(c if c.isprintable() else " " for c in str(error))
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
    reported = type(error)(f"{os.fspath(path)} cannot be {verb}: it {said}")
    reported.__cause__ = error.__cause__
    return reported


def damaged(error: Exception) -> LoadError:
    """The `LoadError` for an exception that reading an undamaged file cannot raise."""
    reported = LoadError(f"is damaged: {type(error).__name__}: {_line(error)}")
    reported.__cause__ = error
    return reported


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).splitlines()), "")[:300]
