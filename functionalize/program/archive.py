"""The file of saved programs: a zip of metadata, programs and constants.

    metadata.json    versions, world, sizes: checked first, without reading the rest
    programs.json    records (see json_codec.py) and, per program, its nodes and fields (see program_file.py)
    constants.pt     constants of the programs, by `torch.save`, read with `weights_only=True`

Invariant: a file is written as a whole or not at all.
Refusals: `LoadError` for a file that does not exist, is damaged, or was written by other versions.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functionalize.errors import FunctionalizeError, LoadError

FORMAT = 2
FilePath = str | os.PathLike[str]
Json = Any

# -- metadata --------------------------------------------------------------------------------------


def versions() -> dict[str, Any]:
    """The versions that must be equal when a program is saved and when it is loaded."""
    try:
        own = importlib.metadata.version("functionalize")
    except importlib.metadata.PackageNotFoundError:  # imported from a source folder
        own = "unknown"
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "functionalize": own,
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

_METADATA, _PROGRAMS, _CONSTANTS = "metadata.json", "programs.json", "constants.pt"
_LARGEST = 2**31  # bytes of JSON: far above any program, below what would exhaust a machine


def write(path: FilePath, metadata: Json, content: Json, constants: Mapping[str, Tensor]) -> None:
    """Write a file atomically: an existing file is replaced when the new one is complete."""
    tensors = io.BytesIO()
    torch.save(dict(constants), tensors)
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with (
            os.fdopen(handle, "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            archive.writestr(_METADATA, json.dumps(metadata, indent=1))
            archive.writestr(_PROGRAMS, json.dumps(content, separators=(",", ":")))
            archive.writestr(_CONSTANTS, tensors.getvalue())
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
    data = io.BytesIO(_entry(path, _CONSTANTS))
    try:
        constants = torch.load(data, weights_only=True)
    except Exception as error:
        raise LoadError(f"has constants that cannot be read, it is damaged: {error}") from error
    if not isinstance(constants, dict) or not all(type(t) is Tensor for t in constants.values()):
        raise LoadError("has constants that are no tensors: it is damaged")
    return content, constants


def _entry(path: FilePath, name: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(name).file_size > _LARGEST:
                raise LoadError(f"has a {name} of more than {_LARGEST} bytes: it is damaged")
            return archive.read(name)
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
        raise LoadError(f"is no saved program, or is damaged: {error}") from error


def refusal(path: FilePath, error: FunctionalizeError, verb: str) -> FunctionalizeError:
    """`error` with the file's path before its message."""
    reported = type(error)(f"{os.fspath(path)} cannot be {verb}: it {error}")
    reported.__cause__ = error.__cause__
    return reported


def damaged(error: Exception) -> LoadError:
    """The `LoadError` for an exception that reading an undamaged file cannot raise."""
    reported = LoadError(f"is damaged: {type(error).__name__}: {error}")
    reported.__cause__ = error
    return reported
