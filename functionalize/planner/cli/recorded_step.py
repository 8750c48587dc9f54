"""The recorded step of a script: the input of every command but `plan`, and the content of a file.

found.program, found.timeline()         the graph, and the memory of its replay
found.after("default", say)             the recorded step after passes
write_graph(path, found)                `functionalize capture -o step.fzp`
read_graph(path)                        the recorded step again, without eager's timeline

A file has one program, the categories of its inputs, and the ranks of its process groups, for inspection and for trying
passes. The program of a step refers to objects (modules, optimizers, guards on them) of the process and the fake world
that recorded it. The file leaves them out: inputs become arguments. So the graph can be shown, rewritten and measured
with the program's lifetimes; it cannot be replayed on a model (`step.save` writes a file that can), and has no timeline
of eager's. `functionalize.load` and `step.load` refuse it.
Refuses: `SaveError` for large constants without data (tensors of a fake world have none); `LoadError` as `archive.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.graphs import pytree
from functionalize.cost.categories import Category
from functionalize.errors import LoadError, SaveError
from functionalize.ir.guards import AliasGuard
from functionalize.ir.inputs import Argument, chain_of
from functionalize.ir.outputs import Constant, InputView, OutputRole, SourceItself, Wrapped
from functionalize.planner.sweep.training import Items
from functionalize.planner.timeline.program_memory import program_timeline
from functionalize.planner.timeline.timeline import Timeline
from functionalize.program import archive
from functionalize.program.archive import damaged, refusal
from functionalize.program.json_codec import Decoder, Encoder
from functionalize.program.program import Program
from functionalize.program.program_file import FORMS, Reader, Writer

Say = Callable[[str], None]  # shows a status text


@dataclass(frozen=True, eq=False)
class Recorded:
    """A step's program and the facts recorded with it.

    made: the program; None for a step that cannot be captured, of which the memory that eager has is known.
    input_categories: name of an input -> its category (parameter, optimizer state, ...).
    world, target: as text, for headlines.
    stats: counts of recorded ops, nodes, inputs, guards, and the time that recording needed.
    groups: name of a process group -> its ranks.
    notes: the kernels that the target is assumed to run, and other assumptions.
    eager: the memory of the eager step; None for a step that was read from a file.
    items: what a rank trains on in the step; None if that is not known.
    host: the most bytes of offloaded tensors in host memory as eager runs; 0 of a step that was read from a file.
    """

    name: str
    made: Program | None
    input_categories: Mapping[str, Category]
    world: str
    target: str
    stats: Mapping[str, Any]
    groups: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()
    eager: Timeline | None = None
    items: Items | None = None
    host: int = 0

    @property
    def program(self) -> Program:
        """The program of a step that has one."""
        assert self.made is not None
        return self.made

    def timeline(self) -> Timeline:
        """The memory of a replay of the program."""
        return program_timeline(self.program, self.input_categories, self.target)

    def after(self, pipeline: str | None, say: Say) -> Recorded:
        """The recorded step after the passes of a pipeline."""
        if not pipeline or self.made is None:
            return self
        from functionalize import passes  # lazy: the package `passes` imports this one

        say(f"running {pipeline}")
        return replace(self, made=passes.run(self.program, pipeline))


# -- its file --------------------------------------------------------------------------------------

_KIND = "graph"
_MAX_PLACEHOLDER = 1 << 20  # bytes, at most, of the zeros that replace a constant without data
_PLAIN_FIELDS = ("name", "world", "target", "stats", "notes")


def write_graph(path: str, found: Recorded) -> None:
    """Write a recorded graph; raises `SaveError`, with nothing written."""
    found.program.describe()
    with disable_current_modes():
        writer = Writer(Encoder(FORMS))
        try:
            code = writer.program(_detached(found.program), "program")
        except SaveError as error:
            raise refusal(path, error, "saved") from None
        content = {"records": writer.encoder.records, "programs": [code]}
        metadata = {
            **archive.versions(),
            "kind": _KIND,
            "fields": {name: getattr(found, name) for name in _PLAIN_FIELDS},
            "groups": [[name, list(found.groups.get(name, ()))] for name in writer.groups],
            "input_categories": {
                name: category.value for name, category in found.input_categories.items()
            },
        }
        try:
            archive.write(path, metadata, content, writer.constants)
        except OSError as error:
            raise SaveError(f"{path} cannot be written: {error.strerror}") from error


def read_graph(path: str) -> Recorded:
    """Read a recorded graph; raises `LoadError`."""
    try:
        metadata = archive.read_metadata(path)
        archive.check_versions(metadata)
        if metadata.get("kind") != _KIND:
            raise LoadError(
                f"holds a {metadata.get('kind')} that runs, no graph to look at: `functionalize capture -o` writes one"
            )
        content, constants = archive.read(path)
        groups = {str(name): tuple(ranks) for name, ranks in metadata["groups"]}
        reader = Reader(Program, Decoder(content["records"], FORMS), {}, list(groups), constants)
        plain: dict[str, Any] = {name: metadata["fields"][name] for name in _PLAIN_FIELDS}
        plain["notes"] = tuple(plain["notes"])
        program = reader.program(content["programs"][0])
        input_categories = {
            name: Category(value) for name, value in metadata["input_categories"].items()
        }
        return Recorded(made=program, input_categories=input_categories, groups=groups, **plain)
    except LoadError as error:
        raise refusal(path, error, "loaded") from None
    except Exception as error:
        raise refusal(path, damaged(error), "loaded") from error


def _detached(program: Program) -> Program:
    """The program without references to objects outside it: modules, guards, structures of arguments."""
    inputs = (replace(spec, source=Argument(i)) for i, spec in enumerate(program.inputs))
    outputs = tuple(_plain(role, program) for role in program.outputs)
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


def _plain(role: OutputRole, program: Program) -> OutputRole:
    """Replace a wrapped output by its single inner output, or by text; other objects that cannot be saved by text."""
    if isinstance(role, Wrapped):
        inner = [r for r in role.inner.values() if not isinstance(r, Constant)]
        return _plain(inner[0], program) if len(inner) == 1 else Constant(role.kind.__name__)
    if isinstance(role, SourceItself):
        inputs = ((i, s) for i, s in enumerate(program.inputs) if role.source in chain_of(s.source))
        found = next(inputs, None)
        return Constant("a tensor") if found is None else InputView(found[0], found[1].geometry)
    if isinstance(role, Constant) and not isinstance(role.value, (int, float, str, type(None))):
        return Constant(f"a {type(role.value).__name__}")
    return role


def _real(name: str, value: Tensor) -> Tensor:
    """The constant itself if it has data, else zeros of its shape and strides."""
    if not isinstance(value, FakeTensor):
        return value
    if value.untyped_storage().nbytes() > _MAX_PLACEHOLDER:
        raise SaveError(
            f"holds the constant `{name}` of {value.untyped_storage().nbytes():,} bytes, which has no data in a fake "
            "world: give the script where a file is asked for"
        )
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
