"""A program in a file: `program.save(path)`, `functionalize.load(path)`.

    program     {"label": ..., "graph": nodes, "runner": its name, "inputs": ..., "guards": ..., ...}
    node        [op, name, target, args, kwargs, meta]; in args, {"node": 3} is the fourth node

The name of a process group is {"group": its index in the metadata}: names differ from process to process, ranks
do not. Stacks are written as text; compiled code and fake values are not: they are made again when asked for.

Invariant: reading follows json_codec.py: a file makes nothing run but ops that files may call (callable_ops.py), and
functions of numbers. Its numbers of inputs, results and bytes fit each other when it is loaded.
Refusals: `SaveError` for a tensor that the program holds and no argument leads to; `LoadError` for what no `Writer`
wrote.
"""

from __future__ import annotations

import keyword
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx

from functionalize._compat.dispatch import auto_functionalized, is_traceable_wrapper_subclass_type
from functionalize._compat.graphs import pytree
from functionalize.errors import LoadError, SaveError
from functionalize.ir import epilogue, guards, inputs, ops, outputs
from functionalize.ir import scalars as numbers
from functionalize.ir.commit import commit
from functionalize.ir.inputs import Captured
from functionalize.program import archive
from functionalize.program.archive import FilePath, damaged, refusal
from functionalize.program.bounded_numbers import BOUNDED
from functionalize.program.callable_ops import check_call
from functionalize.program.early_guard import EarlyGuard
from functionalize.program.executable import Executable
from functionalize.program.field_types import checked
from functionalize.program.json_codec import (
    Decoder,
    Encoder,
    Form,
    Json,
    is_function,
    is_target,
    plain_form,
    position,
)
from functionalize.program.known_types import Types
from functionalize.program.metadata import read_records
from functionalize.program.text_formats import check_spec
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
    check_function(function, args)
    return numbers.Applied(*checked(numbers.Applied, (function, args, known_before_run)))


def check_function(function: Any, args: Any) -> None:
    """Raises `LoadError` for what a file may not call with numbers."""
    if not is_target(function) or function is commit:
        raise LoadError(f"calls {function!r:.80}, which is no function of numbers: damaged")
    if not is_function(function):
        check_call(function)
        return
    if not isinstance(args, (list, tuple)):
        raise LoadError("calls a function with arguments that are none: damaged")
    if function in _GROWING and any(type(n) is int and abs(n) > _MOST for n in args[1:]):
        raise LoadError("computes a number that is too large: damaged")
    if function in (format, repr) and len(args) > 1:
        check_spec(args[1], LoadError)


# Whose result, or a number on the way to it, may be far longer than what it is made of.
_GROWING = (operator.pow, operator.lshift, BOUNDED[operator.pow], BOUNDED[operator.lshift], round)
_MOST = 2**12


def _scalar_input(source: Any, name: Any, hint: Any) -> numbers.ScalarInput:
    _require(_is_ours(source, "resolve"), "a number from nowhere")
    return numbers.ScalarInput(*checked(numbers.ScalarInput, (source, name, hint)))


def _wrapped(*values: Any) -> outputs.Wrapped:
    kind, inner, *_ = checked(outputs.Wrapped, values)
    if not is_traceable_wrapper_subclass_type(kind):
        raise LoadError(f"wraps tensors in a {kind.__qualname__}, which is no wrapper: damaged")
    if not all(isinstance(key, str) and isinstance(role, _ROLES) for key, role in inner.items()):
        raise LoadError("wraps something that is no output: damaged")
    return outputs.Wrapped(*values)


_ROLES: Any = outputs.OutputRole


def attribute_form(kind: Any, *places: int) -> Form:
    """The form of a dataclass with names of attributes in its fields `places`: they are no special ones of Python."""
    plain = plain_form(kind)

    def load(*values: Any) -> Any:
        made = plain.load(*values)
        for at in places:
            for name in (values[at],) if isinstance(values[at], str) else values[at]:
                if not isinstance(name, str) or not name.isidentifier() or name.startswith("__"):
                    raise LoadError(f"reads the attribute {name!r:.80}: damaged")
        return made

    return Form(kind, plain.save, load)


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
            inputs.InputSpec,
            inputs.WholeStorage,
            ops.Geometry,
            outputs.Constant,
            outputs.InputView,
            outputs.LeafItself,
            outputs.Result,
            outputs.SameAs,
            outputs.SourceItself,
            tape.RecordedBackward,
            tape.TapeNode,
        ),
    ),
    Form(numbers.Applied, _APPLIED.save, _applied, _parts),
    Form(numbers.ScalarInput, plain_form(numbers.ScalarInput).save, _scalar_input),
    attribute_form(inputs.Argument, 1),
    Form(outputs.Wrapped, plain_form(outputs.Wrapped).save, _wrapped),
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
            raise LoadError(f"is run by {name!r:.80}, which is not a runner of this process")
        runner = self.runners[name] if name is not None else None
        fields = {n: self.decoder.value(code[n]) for n in _FIELDS}
        constants = {
            n.removeprefix(prefix): t for n, t in self.constants.items() if n.startswith(prefix)
        }
        guards = list(fields["guards"])
        for at, part in code["early"]:
            guards.insert(at, EarlyGuard(self.program(part)))
        fields["guards"] = tuple(guards)
        made = self.make(graph=graph, constants=constants, runner=runner, **fields)
        check_program(made)
        return made

    def _graph(self, nodes: Json) -> fx.Graph:
        graph = fx.Graph()
        made: list[fx.Node] = []

        def read(code: Json) -> Any:
            if isinstance(code, list):
                return [read(c) for c in code]
            if isinstance(code, dict) and "node" in code:
                return made[position(code["node"], len(made))]
            if isinstance(code, dict) and "group" in code:
                return self.groups[position(code["group"], len(self.groups))]
            if isinstance(code, dict) and "tuple" in code:
                return tuple(read(c) for c in code["tuple"])
            return self.decoder.value(code)

        for op, name, written, args, kwargs, meta in nodes:
            target = written if op != "call_function" else self.decoder.value(written)
            names = [name, *kwargs, *([written] if op != "call_function" else [])]
            known = op == "call_function" or op in ("placeholder", "get_attr", "output")
            if not known or not all(map(_is_name, names)) or (op == "output") != (name == "output"):
                raise LoadError(f"has a node that is none ({op!r:.40} {name!r:.40}): damaged")
            if op == "call_function" and not is_target(target):
                raise LoadError(f"calls {target!r:.80}, which is no op: damaged")
            arguments = tuple(read(a) for a in args), {k: read(v) for k, v in kwargs.items()}
            if op == "call_function":
                self._check_call(target, *arguments)
            node = graph.create_node(op, target, *arguments, name=name)
            if node.name != name:
                raise LoadError(f"has two nodes of the name {name:.80}: damaged")
            node.meta.update({k: self.decoder.value(v) for k, v in meta.items() if k in _META})
            made.append(node)
        return graph

    def _check_call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_function(target):
            check_call(target, self.decoder.ops)
        elif target is auto_functionalized:
            if not args or not hasattr(args[0], "_schema"):
                raise LoadError("calls an op that is none: damaged")
            check_call(args[0], self.decoder.ops)
        elif target is operator.getitem:
            if len(args) != 2 or kwargs or type(args[1]) is not int:
                raise LoadError("takes a part that is none of a result: damaged")
        elif target is not commit:
            check_function(target, args)
        if not all(map(_is_data, (*args, *kwargs.values()))) and target is not auto_functionalized:
            raise LoadError(f"calls {target} with an argument that no op has: damaged")


_DATA = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)


def _is_data(arg: Any) -> bool:
    """Whether a value is an argument that ops have: a number, text, a value of the graph, a list or a slice of them."""
    if type(arg) in (list, tuple, torch.Size) or isinstance(arg, (list, tuple)):
        return all(map(_is_data, arg))
    return isinstance(arg, (fx.Node, slice, torch.memory_format, *_DATA))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


# -- what fits each other --------------------------------------------------------------------------


def check_program(program: Executable) -> None:
    """Raises `LoadError` if numbers in a program from a file do not fit each other.

    So nothing that reads a program has to ask whether an index exists, and no tensor is a window beyond its storage.
    """
    nodes = list(program.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    _require(bool(nodes) and nodes[-1].op == "output", "a graph without an end")
    _require(sum(node.op == "output" for node in nodes) == 1, "a graph with several ends")
    before = [node for node in nodes if node.op != "get_attr"]
    _require(before[: len(placeholders)] == placeholders, "a graph whose inputs are not first")
    _require(isinstance(program.inputs, tuple), "inputs that are none")
    _require(len(placeholders) == len(program.inputs), "another number of inputs than its graph")
    results: Any = nodes[-1].args[0] if nodes[-1].args else None
    _require(isinstance(results, (list, tuple)), "a graph without results")
    for node in nodes:
        if node.op == "get_attr":
            _require(node.target in program.constants, f"no constant `{node.target}`")
    _require(
        all(isinstance(each, inputs.InputSpec) for each in program.inputs), "inputs that are none"
    )
    for name in ("epilogue", "guards", "value_guards", "facts", "outputs", "backwards", "history"):
        _require(isinstance(getattr(program, name), tuple), f"a list of {name} that is none")
    for spec in program.inputs:
        _check_geometry(spec.geometry)
        _require(spec.nbytes >= 0, "an input of less than no bytes")
        has_outer = spec.version != "raised around" or getattr(spec.source, "is_inner", False)
        _require(spec.version in inputs.VERSIONS and has_outer, "an input of no such version")
    places = _Places(program, len(results))
    for i, spec in enumerate(program.inputs):
        if isinstance(spec.source, inputs.Argument):
            _require(0 <= spec.source.leaf < places.leaves, "an input that is no argument")
        if isinstance(spec.source, inputs.WholeStorage):
            places.window(spec.source.input, spec.source.geometry, i)
        _require(_is_ours(spec.source, "resolve"), "an input from nowhere")
    for guard in (*program.guards, *program.facts, *program.value_guards):
        _require(_is_ours(guard, "failure") or _is_ours(guard, "failure_of"), "no guard")
    for guard in program.guards:
        if isinstance(guard, guards.TensorGuard):
            _require(0 <= guard.input < len(program.inputs), "a guard on no input")
        elif isinstance(guard, guards.AliasGuard):
            fits = len(guard.groups) == len(program.inputs) == len(guard.names)
            _require(fits, "a guard on other inputs")
    for action in program.epilogue:
        places.action(action)
    _require(isinstance(program.out_spec, pytree.TreeSpec), "results without a structure")
    spec_ok = program.in_spec is None or isinstance(program.in_spec, pytree.TreeSpec)
    _require(spec_ok, "arguments without a structure")
    _require(program.out_spec.num_leaves == len(program.outputs), "another number of results")
    for number, role in enumerate(program.outputs):
        places.role(role, number)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise LoadError(f"has {what}: damaged")


def _is_ours(value: Any, method: str) -> bool:
    """Whether a value has a method that is ours: an object of the user's, which a file may name, may have one, too."""
    kind = type(value)
    return kind.__module__.partition(".")[0] == "functionalize" and hasattr(kind, method)


def _check_geometry(geometry: Any) -> None:
    _require(isinstance(geometry, ops.Geometry), "a tensor of no size")
    counts = (*geometry.size, *geometry.stride, geometry.offset)
    fits = len(geometry.size) == len(geometry.stride) <= 64
    _require(fits and all(0 <= n < 2**62 for n in counts), "a tensor of a size that none has")


class _Places:
    """The storages of a program's inputs: how many bytes each holds at the end."""

    def __init__(self, program: Executable, results: int) -> None:
        self.inputs, self.results = program.inputs, results
        self.leaves = 2**31 if program.in_spec is None else program.in_spec.num_leaves
        self.final = {i: spec.nbytes for i, spec in enumerate(program.inputs)}
        for action in program.epilogue:
            if isinstance(action, epilogue.Resize):
                self.input(action.input)
                _require(0 <= action.nbytes < 2**62, "a storage of a size that none has")
                self.final[action.input] = action.nbytes

    def input(self, at: int) -> None:
        _require(0 <= at < len(self.inputs), "an action on no input")

    def slot(self, at: int) -> None:
        _require(0 <= at < self.results, "an output that is no result")

    def window(self, at: int, geometry: Any, below: int | None = None) -> None:
        """Whether a window is inside the storage of an input, on entry or at the end, or that is freed."""
        self.input(at)
        _require(below is None or at < below, "an input on a later one")
        _check_geometry(geometry)
        most = max(self.inputs[at].nbytes, self.final[at])
        _require(geometry.end <= most or self.final[at] == 0, "a tensor larger than its storage")

    def action(self, action: Any) -> None:
        """Whether the action of an epilogue has its inputs and results."""
        _require(isinstance(action, (epilogue.Copy, epilogue.Resize, epilogue.Set)), "no action")
        self.input(action.input)
        if isinstance(action, epilogue.Copy):
            self.window(action.input, action.geometry)
            self.slot(action.slot)
        elif isinstance(action, epilogue.Set):
            if action.other is not None:
                self.window(action.other, action.geometry)
            else:
                _check_geometry(action.geometry)
                self.slot(-1 if action.slot is None else action.slot)

    def role(self, role: Any, number: int) -> None:
        """Whether an output has its inputs, results and earlier outputs."""
        _require(isinstance(role, _ROLES), "an output that is none")
        if isinstance(role, outputs.Result):
            self.slot(role.slot)
            if role.geometry is not None:
                _check_geometry(role.geometry)
        elif isinstance(role, outputs.InputView):
            self.window(role.input, role.geometry)
        elif isinstance(role, outputs.SameAs):
            _require(0 <= role.output < number, "an output that is a later one")
        elif isinstance(role, outputs.LeafItself):
            _require(0 <= role.leaf < self.leaves, "an output that is no argument")
        elif isinstance(role, outputs.SourceItself):
            sources = (role.source, *role.others)
            _require(all(_is_ours(s, "resolve") for s in sources), "an output from nowhere")
        elif isinstance(role, outputs.Wrapped):
            for inner in role.inner.values():
                self.role(inner, number)


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


def load_program(
    path: FilePath,
    make: type[E],
    runners: Mapping[str, Runner],
    types: Sequence[type] = (),
    ops: Sequence[str] = (),
) -> E:
    """The program of `save_program`, as a `make`; raises `LoadError`. types, ops: see `Decoder`."""
    try:
        metadata = archive.read_metadata(path)
        archive.check_versions(metadata)
        check_replays(metadata)
        if metadata.get("kind") != "program":
            raise LoadError("holds the programs of a captured step: load them with `step.load`")
        content, constants = archive.read(path)
        decoder = Decoder(content["records"], FORMS, types=Types(types), ops=ops)
        return Reader(make, decoder, runners, (), constants).program(content["programs"][0])
    except LoadError as error:
        raise refusal(path, error, "loaded") from None
    except Exception as error:
        raise refusal(path, damaged(error), "loaded") from error
