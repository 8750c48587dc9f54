"""A recorded graph in a file: `functionalize capture -o step.fzp`, to look at and to try passes on.

    write_graph(path, recorded)       one program, what its inputs are for, the ranks of its process groups
    read_graph(path)                  the same again, without eager's timeline

What the program of a step refers to (modules, optimizers, guards on them) is of the process and the fake world that
recorded it, and is left out: its inputs become arguments. So such a file can be shown, rewritten and measured with the
program's lifetimes; it cannot be replayed on a model (`step.save` writes what can be), and has no timeline of eager's.
`functionalize.load` and `step.load` refuse it.
Refuses: `SaveError` for constants without data (a fake world has none) that are large; `LoadError` as `archive.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.graphs import pytree
from functionalize.cli.recorded_step import Recorded
from functionalize.errors import LoadError, SaveError
from functionalize.ir.guards import AliasGuard
from functionalize.ir.inputs import Argument
from functionalize.ir.outputs import Constant, OutputRole, Wrapped
from functionalize.planning.timeline.timeline import Category
from functionalize.program import archive
from functionalize.program.archive import damaged, refusal
from functionalize.program.json_codec import Decoder, Encoder
from functionalize.program.program import Program
from functionalize.program.program_file import FORMS, Reader, Writer

KIND = "graph"
_LARGEST = 1 << 20  # bytes of a constant that stands for one without data
_TOLD = ("name", "world", "target", "stats", "notes")


def write_graph(path: str, found: Recorded) -> None:
    """Write a recorded graph; raises `SaveError`, with nothing written."""
    found.program.describe()
    with disable_current_modes():
        writer = Writer(Encoder(FORMS))
        try:
            code = writer.program(alone(found.program), "program")
        except SaveError as error:
            raise refusal(path, error, "saved") from None
        content = {"records": writer.encoder.records, "programs": [code]}
        metadata = {
            **archive.versions(),
            "kind": KIND,
            "told": {name: getattr(found, name) for name in _TOLD},
            "groups": [[name, list(found.groups.get(name, ()))] for name in writer.groups],
            "given": {name: category.value for name, category in found.given.items()},
        }
        try:
            archive.write(path, metadata, content, writer.constants)
        except OSError as error:
            raise SaveError(f"{path} cannot be written: {error.strerror}") from error


def read_graph(path: str) -> Recorded:
    """A recorded graph that was written; raises `LoadError`."""
    try:
        metadata = archive.read_metadata(path)
        archive.check_versions(metadata)
        if metadata.get("kind") != KIND:
            raise LoadError(
                f"holds a {metadata.get('kind')} that runs, no graph to look at: `functionalize capture -o` writes one"
            )
        content, constants = archive.read(path)
        groups = {str(name): tuple(ranks) for name, ranks in metadata["groups"]}
        reader = Reader(Program, Decoder(content["records"], FORMS), {}, list(groups), constants)
        told: dict[str, Any] = {name: metadata["told"][name] for name in _TOLD}
        told["notes"] = tuple(told["notes"])
        program = reader.program(content["programs"][0])
        given = {name: Category(value) for name, value in metadata["given"].items()}
        return Recorded(program=program, given=given, groups=groups, **told)
    except LoadError as error:
        raise refusal(path, error, "loaded") from None
    except Exception as error:
        raise refusal(path, damaged(error), "loaded") from error


def alone(program: Program) -> Program:
    """The program without what leads out of it."""
    inputs = (replace(spec, source=Argument(i)) for i, spec in enumerate(program.inputs))
    outputs = tuple(_plain(role) for role in program.outputs)
    return replace(
        program,
        inputs=tuple(inputs),
        outputs=outputs,
        guards=tuple(guard for guard in program.guards if isinstance(guard, AliasGuard)),
        facts=(),
        in_spec=None,
        out_spec=pytree.tree_structure([0] * len(outputs)),
        constants={name: _real(name, value) for name, value in program.constants.items()},
        runner=None,
    )


def _plain(role: OutputRole) -> OutputRole:
    """A wrapper by what is in it; a constant that is no number or text, as text."""
    if isinstance(role, Wrapped):
        inner = [r for r in role.inner.values() if not isinstance(r, Constant)]
        return _plain(inner[0]) if len(inner) == 1 else Constant(role.kind.__name__)
    if isinstance(role, Constant) and not isinstance(role.value, (int, float, str, type(None))):
        return Constant(f"a {type(role.value).__name__}")
    return role


def _real(name: str, value: Tensor) -> Tensor:
    """A constant, or zeros in place of one without data."""
    if not isinstance(value, FakeTensor):
        return value
    if value.untyped_storage().nbytes() > _LARGEST:
        raise SaveError(
            f"holds the constant `{name}` of {value.untyped_storage().nbytes():,} bytes, which has no data in a fake "
            "world: give the script where a file is asked for"
        )
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
