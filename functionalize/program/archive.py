"""The file of saved programs: a zip of what a reader compares first, what programs are, and their constants.

    metadata.json    versions, world, sizes: read without the rest
    programs.json    records (see json_codec.py) and, per program, its nodes and fields (see persist.py)
    constants.pt     tensors that programs hold, by `torch.save`, read with `weights_only=True`

Invariant: a file is written as a whole or not at all.
Refusals: `LoadError` for a file that is not there, is damaged, or is of another version of anything.
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

FORMAT = 1
FilePath = str | os.PathLike[str]
Json = Any

# -- metadata --------------------------------------------------------------------------------------


def versions() -> dict[str, Any]:
    """What must be the same where a program is read."""
    try:
        own = importlib.metadata.version("functionalize")
    except importlib.metadata.PackageNotFoundError:  # run from its folder
        own = "unknown"
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "functionalize": own,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def check_versions(metadata: Json) -> None:
    """Raises `LoadError` if a file is of another version of anything that programs depend on."""
    if metadata.get("format") != FORMAT:
        raise LoadError(f"has format {metadata.get('format')}, this library reads format {FORMAT}")
    for name, here in versions().items():
        if metadata.get(name) != here:
            raise LoadError(f"was saved with {name} {metadata.get(name)}, this is {name} {here}")


# -- files -----------------------------------------------------------------------------------------

_METADATA, _PROGRAMS, _CONSTANTS = "metadata.json", "programs.json", "constants.pt"
_LARGEST = 2**31  # bytes of JSON: far above any program, below what would exhaust a machine


def write(path: FilePath, metadata: Json, content: Json, constants: Mapping[str, Tensor]) -> None:
    """Write a file, or leave what is there: it is put in place when it is complete."""
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
    """The metadata alone; raises `LoadError` for what is no such file."""
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
    """`error` with the file before it."""
    told = type(error)(f"{os.fspath(path)} cannot be {verb}: it {error}")
    told.__cause__ = error.__cause__
    return told


def damaged(error: Exception) -> LoadError:
    """What reading a file raised that no sound file makes it raise."""
    told = LoadError(f"is damaged: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
