"""A program in a file: `program.save(path)`, `functionalize.load(path)`.

    program     {"label": ..., "graph": nodes, "runner": its name, "inputs": ..., "guards": ..., ...}
    node        [op, name, target, args, kwargs, meta]; in args, {"node": 3} is the fourth node

The name of a process group is {"group": its index in the metadata}: names differ from process to process, ranks
do not. Stacks are written as text; compiled code and fake values are not: they are made again when asked for.

Invariant: reading follows json_codec.py: a file makes nothing run but ops, and functions of numbers.
Refusals: `SaveError` for a tensor that the program holds and no argument leads to.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor, fx

from functionalize.errors import LoadError, SaveError
from functionalize.ir import epilogue, guards, inputs, ops, outputs
from functionalize.ir import scalars as numbers
from functionalize.ir.inputs import Captured
from functionalize.program import archive
from functionalize.program.archive import FilePath, damaged, refusal
from functionalize.program.early_guard import EarlyGuard
from functionalize.program.executable import Executable
from functionalize.program.json_codec import Decoder, Encoder, Form, Json, is_target, plain_form
from functionalize.program.metadata import read_records
from functionalize.tape import tape
from functionalize.util import structure

Runner = Callable[[Any], Callable[..., Sequence[Any]]]

# -- forms -----------------------------------------------------------------------------------------


def _parts(expression: Any) -> Iterable[Any]:
    done: dict[Any, None] = {}
    for part in numbers.bottom_up(expression, done):
        done[part] = None
        yield part


def _applied(function: Any, args: Any, known_before_run: bool) -> numbers.Applied:
    if not is_target(function):
        raise LoadError(f"calls {function!r}, which is no function of numbers: damaged")
    return numbers.Applied(function, args, known_before_run)


_SHAPE, _BESIDE = structure.PARTS_OF_SPECS
_APPLIED = plain_form(numbers.Applied)
FORMS: tuple[Form, ...] = (
    *map(
        plain_form,
        (
            epilogue.Copy,
            epilogue.Resize,
            epilogue.Set,
            guards.AliasGuard,
            guards.ConstantGuard,
            guards.NanGuard,
            guards.NumberGuard,
            guards.TensorGuard,
            guards.ValueGuard,
            inputs.Argument,
            inputs.InputSpec,
            inputs.WholeStorage,
            numbers.ScalarInput,
            ops.Geometry,
            outputs.Constant,
            outputs.InputView,
            outputs.LeafItself,
            outputs.Result,
            outputs.SameAs,
            outputs.SourceItself,
            outputs.Wrapped,
            tape.RecordedBackward,
            tape.TapeNode,
        ),
    ),
    Form(numbers.Applied, _APPLIED.save, _applied, _parts),
    plain_form(_SHAPE),
    Form(_BESIDE, lambda beside: (beside.value,), _BESIDE),
)

# -- programs --------------------------------------------------------------------------------------

_FIELDS = (
    "inputs",
    "outputs",
    "epilogue",
    "guards",
    "value_guards",
    "in_spec",
    "out_spec",
    "facts",
    "stage",
    "history",
    "writes",
    "backwards",
)
_META = (
    "hint",
    "sized",
    "stack_trace",
    "seq_nr",
    "autograd_node",
    "makes_seq_nr",
    "forward_stack_trace",
    "forward_seq_nr",
    "original_aten",
    "phase",
    "module",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "fsdp",
    "ranges",
    "hook",
    "custom",
    "gradient_of",
)


@dataclass(slots=True)
class Writer:
    """Writes programs, and collects what the file holds beside them.

    groups: the names of process groups; programs refer to them by index.
    constants: the tensors that programs hold, by label and name.
    """

    encoder: Encoder
    groups: list[str] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)

    def group(self, name: str) -> Json:
        """A process group, by its index in the metadata."""
        if name not in self.groups:
            self.groups.append(name)
        return {"group": self.groups.index(name)}

    def program(self, program: Executable, label: str) -> Json:
        """One program; its constants are kept under `label`."""
        for spec in program.inputs:
            if isinstance(spec.source, Captured):
                raise SaveError(
                    f"holds the tensor `{spec.name}` ({spec.geometry}), which no module, optimizer or "
                    "argument leads to: pass it as an argument, or register it as a buffer"
                )
        for name, value in program.constants.items():
            if type(value) is not Tensor:
                raise SaveError(
                    f"has the constant `{name}`, a {type(value).__name__}, not a plain tensor"
                )
            self.constants[f"{label}.{name}"] = value
        program.resolve_notes()
        runner, fields = program.runner, {}
        if runner is not None and not _is_by_name(runner):
            raise SaveError(f"is run by {runner!r}, which has no name of its own")
        early = [(i, g.program) for i, g in enumerate(program.guards) if isinstance(g, EarlyGuard)]
        others = tuple(g for g in program.guards if not isinstance(g, EarlyGuard))
        for name in _FIELDS:
            value = others if name == "guards" else getattr(program, name)
            fields[name] = self.encoder.value(value, name)
        return {
            "label": label,
            "early": [[i, self.program(p, f"early {i} of {label}")] for i, p in early],
            "runner": runner and runner_name(runner),
            "graph": self._graph(program.graph),
            **fields,
        }

    def _graph(self, graph: fx.Graph) -> Json:
        index = {node: i for i, node in enumerate(graph.nodes)}
        read_records(graph)

        def written(arg: Any) -> Json:
            if isinstance(arg, fx.Node):
                return {"node": index[arg]}
            if isinstance(arg, (list, tuple)) and any(_has_node(a) for a in arg):
                parts = [written(a) for a in arg]
                return parts if isinstance(arg, list) else {"tuple": parts}
            return self.encoder.value(arg, "an argument of an op")

        nodes = []
        for node in graph.nodes:
            target = node.target
            if not isinstance(target, str):
                if not is_target(target):
                    raise SaveError(f"calls {target}, which is no op")
                target = self.encoder.value(target)
            args, kwargs = (
                list(map(written, node.args)),
                {k: written(v) for k, v in node.kwargs.items()},
            )
            for at in group_arguments(node.target):
                if isinstance(at, int) and at < len(args):
                    args[at] = self.group(str(node.args[at]))
                elif at in kwargs:
                    kwargs[str(at)] = self.group(str(node.kwargs[str(at)]))
            nodes.append([node.op, node.name, target, args, kwargs, self._meta(node)])
        return nodes

    def _meta(self, node: fx.Node) -> Json:
        """The metadata that cannot be recomputed from the graph."""
        return {
            k: self.encoder.value(node.meta[k], k) for k in _META if node.meta.get(k) is not None
        }


def runner_name(runner: Any) -> str:
    """The name by which a runner is saved and looked up."""
    return f"{runner.__module__}.{runner.__qualname__}"


def _is_by_name(runner: Any) -> bool:
    return isinstance(runner, types.FunctionType) and "<" not in runner.__qualname__


def _has_node(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return any(map(_has_node, arg))
    return isinstance(arg, fx.Node)


def group_arguments(target: Any) -> list[int | str]:
    """The positions and names of an op's arguments that are names of process groups."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return []
    found = [(i, a.name) for i, a in enumerate(schema.arguments) if a.name == "group_name"]
    return [key for pair in found for key in pair]


E = TypeVar("E", bound=Executable)


@dataclass(slots=True)
class Reader(Generic[E]):
    """Reads what a `Writer` wrote.

    make: the class of the programs.
    groups: for each process group in the metadata, its name in this process.
    """

    make: type[E]

    decoder: Decoder
    runners: Mapping[str, Runner]
    groups: Sequence[str]
    constants: Mapping[str, Tensor]

    def program(self, code: Json) -> E:
        """The program that was written as `code`."""
        graph, prefix = self._graph(code["graph"]), f"{code['label']}."
        name = code["runner"]
        if name is not None and name not in self.runners:
            raise LoadError(f"is run by {name}, which is not a runner of this process")
        runner = self.runners[name] if name is not None else None
        fields = {n: self.decoder.value(code[n]) for n in _FIELDS}
        constants = {
            n.removeprefix(prefix): t for n, t in self.constants.items() if n.startswith(prefix)
        }
        guards = list(fields["guards"])
        for at, part in code["early"]:
            guards.insert(at, EarlyGuard(self.program(part)))
        fields["guards"] = tuple(guards)
        return self.make(graph=graph, constants=constants, runner=runner, **fields)

    def _graph(self, nodes: Json) -> fx.Graph:
        graph = fx.Graph()
        made: list[fx.Node] = []

        def read(code: Json) -> Any:
            if isinstance(code, list):
                return [read(c) for c in code]
            if isinstance(code, dict) and "node" in code:
                return made[code["node"]]
            if isinstance(code, dict) and "group" in code:
                return self.groups[code["group"]]
            if isinstance(code, dict) and "tuple" in code:
                return tuple(read(c) for c in code["tuple"])
            return self.decoder.value(code)

        for op, name, written, args, kwargs, meta in nodes:
            target = written if op != "call_function" else self.decoder.value(written)
            names = [name, *kwargs, *([written] if op != "call_function" else [])]
            known = op == "call_function" or op in ("placeholder", "get_attr", "output")
            if not known or not all(n.isidentifier() for n in names):
                raise LoadError(f"has a node that is none ({op} {name}): damaged")
            if op == "call_function" and not is_target(target):
                raise LoadError(f"calls {target!r}, which is no op: damaged")
            arguments = tuple(read(a) for a in args), {k: read(v) for k, v in kwargs.items()}
            node = graph.create_node(op, target, *arguments, name=name)
            node.meta.update({k: self.decoder.value(v) for k, v in meta.items()})
            made.append(node)
        return graph


# -- one program by itself -------------------------------------------------------------------------


def save_program(program: Executable, path: FilePath) -> None:
    """Write one program whose inputs are arguments; raises `SaveError`."""
    writer = Writer(Encoder(FORMS))
    try:
        code = writer.program(program, "program")
        if writer.groups:
            raise SaveError(
                "communicates, and process groups have other names elsewhere: save a captured step"
            )
    except SaveError as error:
        raise refusal(path, error, "saved") from None
    content = {"records": writer.encoder.records, "programs": [code]}
    metadata = {**archive.versions(), "kind": "program", "nodes": program.nodes()}
    archive.write(path, metadata, content, writer.constants)


def check_replays(metadata: Mapping[str, Any]) -> None:
    """Raises `LoadError` for a graph that the command line wrote."""
    if metadata.get("kind") == "graph":
        raise LoadError(
            "holds a graph to look at, for `functionalize show`, `opt` and `memory`: it cannot be replayed"
        )


def load_program(path: FilePath, make: type[E], runners: Mapping[str, Runner]) -> E:
    """The program of `save_program`, as a `make`; raises `LoadError`."""
    try:
        metadata = archive.read_metadata(path)
        archive.check_versions(metadata)
        check_replays(metadata)
        if metadata.get("kind") != "program":
            raise LoadError("holds the programs of a captured step: load them with `step.load`")
        content, constants = archive.read(path)
        decoder = Decoder(content["records"], FORMS)
        return Reader(make, decoder, runners, (), constants).program(content["programs"][0])
    except LoadError as error:
        raise refusal(path, error, "loaded") from None
    except Exception as error:
        raise refusal(path, damaged(error), "loaded") from error
