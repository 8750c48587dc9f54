"""The metadata that passes read in `node.meta`, filled in on first access to a program's graph module.

val            a fake tensor like the node's value
tensor_meta    its size, stride and dtype, as FX passes read them
stack_trace    the user's frames
seq_nr         the autograd node in which the op ran, else the one that it made, so that equal numbers join forward and
               backward; numbered in the order of the step, not by autograd; absent if there is no such node
autograd_node  the name of the node, of an op that ran in one
makes_seq_nr   the node that an op in a backward made: of a recomputation, and with `create_graph`
forward_stack_trace    the user's frames of the op that made the node in which this op ran
forward_seq_nr         where no op of the graph made that node (it was a view): the node of the op that reads the view
original_aten  the op that was recorded, where the node is its functional counterpart
phase          the part of a training step that the op belongs to, see `ir/phases.py`
module         the module that the op belongs to: that was called, in a backward that of the forward
nn_module_stack        the modules that were being called, outermost first, as FX writes them: {name: (name, class)}
fwd_nn_module_stack    the same, of an op in a backward: those of its forward
fsdp           (group, role) of an op that FSDP2 ran, see `fsdp_role`
ranges         (name, number, modules) of each `record_function` of the step around the op, outermost first: the number
               of the entry, and how many modules of `nn_module_stack` were being called then (None: none, no backward)
hook           (kind, the user's line in it) of an op that ran in a hook of autograd's, see `tape/hooks.py`
custom         the user's `torch.fx.traceback.annotate` of the op, in a backward that of the forward
gradient_of    the parameters whose gradients the value is, as autograd has accumulated them last

A number that Python reads has as `val` the value that was recorded for it in `hint`. A result whose size depends on
data has the geometry in `sized`, which was recorded, or is that for other sizes; an early guard checks the size.
A result of an op without a fake kernel that answers (custom ops without `register_fake`) is described as recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.fsdp import fsdp_role
from functionalize._compat.graphs import TensorMetadata
from functionalize._compat.references import address
from functionalize.errors import UnknownValueError
from functionalize.ir.fake_mode import fake_like
from functionalize.ir.fakes import Fakes, reads, writes
from functionalize.ir.inputs import InputSpec
from functionalize.ir.ops import (
    Geometry,
    OpRecord,
    TensorRef,
    geometry_of,
    is_sized_by_data,
    tensor_metadata,
)
from functionalize.ir.phases import set_phases
from functionalize.repeats import Repeats, Section
from functionalize.tape.notes import TapeNotes
from functionalize.tape.ownership import OpPlaces, ownership_of
from functionalize.util.by_address import by_address
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.user_stack import StackTexts


class GraphWithInputs(Protocol):
    """A graph, its inputs (one per placeholder), and its constants by name."""

    @property
    def graph(self) -> fx.Graph: ...

    @property
    def inputs(self) -> Sequence[InputSpec]: ...

    @property
    def repeats(self) -> Repeats: ...

    @property
    def constants(self) -> Mapping[str, Any]: ...


def evaluate(program: GraphWithInputs, places: Callable[[TapeNotes], Any] = OpPlaces) -> Values:
    """Fill what costs are computed from: `val`, `tensor_meta`, `sized`, `phase`, `module`, `fsdp`.

    places: of the notes; `ownership_of` where `read_provenance` follows, which needs the same.
    Of the blocks that are like another one, `finish` of the result fills the values that are missing.
    """
    with only_young_collections():  # the objects made here live as long as the program
        read_places(program.graph, places)
        return Values(program)


def read_records(graph: fx.Graph) -> None:
    """Fill the metadata that comes from the recorded ops, and drop the records."""
    read_places(graph, ownership_of)
    read_provenance(graph)


def read_places(graph: fx.Graph, places: Callable[[TapeNotes], Any]) -> None:
    """Fill where in the step and in the model recorded ops are, and the sizes that depend on data."""
    updates: list[fx.Node] = []
    tape = _Tape(graph, places)
    tape.share_stacks()
    for node, record in tape.recorded:
        if tape.stacks.is_update(record.traceback):
            updates.append(node)
        tape.place(node, record)
        made = size_by_data(node)
        if made is not None:
            node.meta["sized"] = made
    set_phases(graph, updates)
    _set_modules_of_groups(graph)


def read_provenance(graph: fx.Graph) -> None:
    """Fill where recorded ops come from: stacks, modules, autograd's nodes, hooks; and drop the records."""
    with only_young_collections():
        _read_provenance(graph)


def _read_provenance(graph: fx.Graph) -> None:
    tape = _Tape(graph)
    for node, record in tape.recorded:
        if trace := tape.stacks.trace(record.traceback):
            node.meta["stack_trace"] = trace
        tape.annotate(node, record)
        node.meta["original_aten"] = record.target
    tape.name_gradients(graph)
    # Filled again, a dict has no room for what was removed: megabytes, of many nodes. (Setting `meta` takes longer.)
    for node in graph.nodes:
        meta = node.meta
        meta.pop("record", None)
        kept = list(meta.items())
        meta.clear()
        meta.update(kept)


def _set_modules_of_groups(graph: fx.Graph) -> None:
    """Give ops that FSDP2 ran in a callback at the end of a backward the module of their group, if it is one."""
    modules: dict[str, set[str]] = {}
    for node in graph.nodes:
        if "fsdp" in node.meta and "module" in node.meta:
            modules.setdefault(node.meta["fsdp"][0], set()).add(node.meta["module"])
    for node in graph.nodes:
        if "fsdp" in node.meta and "module" not in node.meta:
            found = modules.get(node.meta["fsdp"][0], ())
            if len(found) == 1:
                (node.meta["module"],) = found


class _Tape:
    """The autograd nodes of the ops of one graph."""

    def __init__(self, graph: fx.Graph, places: Callable[[TapeNotes], Any] = ownership_of) -> None:
        found = ((n, n.meta.get("record")) for n in graph.nodes)
        self.recorded: list[tuple[fx.Node, OpRecord]] = [each for each in found if each[1]]
        self._notes = next((r.tape for _, r in self.recorded if r.tape is not None), None)
        own: Any = places(self._notes) if self._notes is not None else None
        self._own = own
        self.stacks = own.stacks if own else StackTexts(r.traceback for _, r in self.recorded)
        # By label and addresses of ops, as hashing one calls Python.
        self._roles: dict[tuple[str, int, int], tuple[str, str] | None] = {}

    @cached_property
    def _readers(self) -> Mapping[int, int]:
        emitted = {address(record) for _, record in self.recorded if record.tape is not None}
        found: Mapping[int, int] = self._own.readers(emitted)
        return found

    def share_stacks(self) -> None:
        """Let all ops of the recording that have equal stacks share one: equal layers have equal stacks."""
        for record in self._notes.records if self._notes is not None else ():
            record.traceback = self.stacks.shared(record.traceback)

    def place(self, node: fx.Node, record: OpRecord) -> None:
        """Fill the module of an op, and its role for FSDP2."""
        own, meta = self._own, node.meta
        if own is None:
            return
        if module := record.meta.get("module") or own.module(record):
            meta["module"] = module
        if label := own.label(record):
            key = label, address(record.target), address(node.target)
            if key not in self._roles:
                self._roles[key] = fsdp_role(label, record.target, node.target)
            if role := self._roles[key]:
                meta["fsdp"] = role

    def annotate(self, node: fx.Node, record: OpRecord) -> None:
        """Fill what else comes from the autograd nodes and the modules of an op."""
        meta, own = node.meta, self._own
        if own is None:
            return
        stack, of_forward = own.module_stack(record)
        found = (
            ("custom", own.custom(record)),
            ("fwd_nn_module_stack" if of_forward else "nn_module_stack", stack),
            ("hook", own.hook(record)),
            ("ranges", own.ranges(record)),
        )
        for name, value in found:
            if value:
                meta[name] = value
        ran_in, made = own.of(record)
        if ran_in is None:
            if made is not None:
                meta["seq_nr"] = made
            return
        meta["seq_nr"], meta["autograd_node"] = ran_in, record.autograd_node
        if made is not None:
            meta["makes_seq_nr"] = made
        if ran_in in self._readers:
            meta["forward_seq_nr"] = self._readers[ran_in]
        maker = own.maker(record)
        if maker is not None and (trace := self.stacks.trace(maker.traceback)):
            meta["forward_stack_trace"] = trace

    def name_gradients(self, graph: fx.Graph) -> None:
        """Replace numbers of leaves by the names of parameters; the last node that was accumulated for one has it."""
        found: dict[str, fx.Node] = {}
        for node in graph.nodes:
            for number in node.meta.pop("accumulates", ()):
                if self._notes is not None and (name := self._notes.place(number)[1]):
                    found.pop(name, None)
                    found[name] = node
        for name, node in found.items():
            node.meta.setdefault("gradient_of", []).append(name)


def size_by_data(node: fx.Node) -> Any:
    """(geometry, device) of a result whose size depends on data, or a list of them; None for other nodes.

    As recorded; of a program for other sizes as it is there.
    """
    record = node.meta.get("record")
    if "sized" in node.meta or record is None:
        return node.meta.get("sized")
    may_be = _may_be_sized_by_data(record.target)
    return as_recorded(node) if may_be and is_sized_by_data(record) else None


@by_address
def _may_be_sized_by_data(target: Any) -> bool:
    return torch.Tag.dynamic_output_shape in getattr(target, "tags", ())


def as_recorded(node: fx.Node) -> Any:
    """(geometry, device) of the result of a recorded op, or a list of them; None if it is not all on new storages."""
    record = node.meta.get("record")
    if record is None or node.target is not record.target:
        return None
    return _recorded(record.outputs, record.meta.get("born", {}))


def _is_as_recorded(node: fx.Node, args: Any, kwargs: Any) -> bool:
    """Whether a call has the sizes and numbers that were recorded: the copy of a program for other sizes has others."""
    record = node.meta.get("record")
    return record is not None and _looks([record.args, record.kwargs]) == _looks([args, kwargs])


def _looks(arg: Any) -> Any:
    if isinstance(arg, TensorRef):  # a tuple, too
        return tuple(arg.geometry.size), arg.geometry.dtype
    if isinstance(arg, (list, tuple)):
        return [*map(_looks, arg)]
    if isinstance(arg, dict):
        return {name: _looks(each) for name, each in arg.items()}
    return (tuple(arg.shape), arg.dtype) if isinstance(arg, Tensor) else arg


def _recorded(outputs: Any, born: Mapping[int, Any]) -> Any:
    """(geometry, device) of a result, or a list of them; None if it is not all on new storages."""
    if isinstance(outputs, TensorRef):
        found = born.get(outputs.storage)
        return None if found is None else (outputs.geometry, found[1])
    made = [_recorded(each, born) for each in outputs]
    return None if None in made else made


def propagate(program: GraphWithInputs) -> None:
    """Set `val` and `tensor_meta` of every node; linear in nodes."""
    Values(program).finish()


class Values:
    """The values of a graph's nodes, `val` and `tensor_meta`: made by running the graph on fake tensors.

    Those of a block that is like an earlier one are made from descriptions of the values there: first the ones that
    nodes outside of the block read, which `call_costs` needs; the others by `finish`. A block that writes is run.
    Invariant: they are those of the graph as it was at first, whatever is changed before `finish`.
    fakes: what makes them, which knows the results of all these calls.
    """

    def __init__(self, program: GraphWithInputs) -> None:
        self._constants, self._repeats = program.constants, program.repeats
        self.fakes, self._specs = Fakes(), iter(program.inputs)
        self._env: dict[fx.Node, Any] = {}
        self._looks: dict[Geometry, TensorMetadata] = {}  # the values of equal layers share them
        self._recipes: dict[int, list[Any]] = {}  # start of a block -> recipes of its values
        self._as_recorded: set[int] = set()  # addresses of ops without a fake kernel that answers
        self._finished = False
        self._fill(self._repeats.read_from_outside())

    def finish(self) -> None:
        """Make the values that are missing."""
        if self._finished:
            return
        self._fill(range(len(self._repeats.nodes)))
        self._finished = True
        self._env.clear()
        self._recipes.clear()

    def _fill(self, wanted: Container[int]) -> None:
        """Make the missing values at some places, and of all nodes outside of blocks that are like others."""
        with disable_current_modes(), torch.no_grad(), only_young_collections():
            for block, like in self._repeats.likes():
                if like is not None:
                    self._make(block, like, wanted)
                else:
                    self._run_all(block)

    def _run_all(self, block: Section) -> None:
        for node in self._repeats.nodes[block.start : block.end]:
            if node not in self._env:
                self._run(node)

    def _make(self, block: Section, like: Section, wanted: Container[int]) -> None:
        """Make the values of a block that is like another one. wanted: at these places."""
        nodes, made, env = self._repeats.nodes, self.fakes.made, self._env
        if like.start not in self._recipes:
            # A result is described as it is now: after all writes.
            there = range(like.start, like.end)
            targets: list[Any] = [nodes[place].target for place in there]
            # A size that was recorded says nothing about that in another block.
            runs = any(writes(each) or address(each) in self._as_recorded for each in targets)
            recipes = [None if runs else self._recipe(place) for place in there]
            looks = [nodes[place].meta.get("tensor_meta") for place in there]
            self._recipes[like.start] = list(zip(recipes, map(reads, recipes), looks, strict=True))
        recipes, needed = self._recipes[like.start], set[int]()
        for place in range(block.end - 1, block.start - 1, -1):
            recipe, is_read, _ = recipes[place - block.start]
            if recipe is None or place in wanted or place in needed:
                needed.add(place)
                if recipe is None or is_read:
                    needed.update(self._repeats.read(place, place + 1))
        for place, (recipe, is_read, look) in enumerate(recipes, block.start):
            node = nodes[place]
            if place not in needed or node in env:
                continue
            if recipe is None:
                self._run(node)
                continue
            value = made(recipe, self._tensors(place) if is_read else [])
            env[node] = node.meta["val"] = value
            if look is not None:
                node.meta["tensor_meta"] = look

    def _recipe(self, place: int) -> Any:
        """The recipe of a value that a node has; None if it must be run."""
        node = self._repeats.nodes[place]
        return self.fakes.recipe(node.target, node.meta["val"], self._tensors(place))

    def _tensors(self, place: int) -> list[Tensor]:
        """The tensors that a node reads."""
        nodes = self._repeats.nodes
        return [
            t
            for at in self._repeats.read(place, place + 1)
            for t in tensors_of(nodes[at].meta["val"])
        ]

    def _result(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The fake result of a call; what was recorded, where torch cannot say: the op has no fake kernel that answers.

        Raises `UnknownValueError` if nothing was recorded, either: of a program for other sizes, or of a file.
        """
        target: Any = node.target
        try:
            return self.fakes.run(target, args, kwargs, node.meta.get("record"))
        except Exception as error:
            made = as_recorded(node) if _is_as_recorded(node, args, kwargs) else None
            if made is None:
                raise UnknownValueError(
                    f"the size of `{node.name}` is not known: {target} has no fake kernel that "
                    f"answers ({type(error).__name__}: {error}): give it one with "
                    "`torch.library.register_fake`, or capture without passes"
                ) from error
            self._as_recorded.add(address(target))
            return self.fakes.sized(made)

    def _run(self, node: fx.Node) -> None:
        fakes = self.fakes
        if node.op == "placeholder":
            value = fake_input(fakes, next(self._specs))
        elif node.op == "get_attr":
            value = fake_like(fakes.mode, self._constants[str(node.target)])
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._env.__getitem__)
            if (value := node.meta.get("hint")) is None:
                made = node.meta.get("sized")
                run = made is None
                value = self._result(node, args, kwargs) if run else fakes.sized(made)
        else:
            return
        self._env[node] = node.meta["val"] = value
        if isinstance(value, Tensor):
            geometry = geometry_of(value)
            if geometry not in self._looks:
                self._looks[geometry] = tensor_metadata(geometry)
            node.meta["tensor_meta"] = self._looks[geometry]


def fake_input(fakes: Fakes, spec: InputSpec) -> Any:
    """A fake tensor with an input's geometry and the size of its storage on entry."""
    if not isinstance(spec.geometry, Geometry):
        return getattr(spec.source, "hint", spec.source)
    return fakes.like(spec.geometry, spec.nbytes, spec.device)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensor that a node's value is, or all tensors in a (nested) list."""
    if isinstance(value, Tensor):
        return iter((value,))
    return _tensors_in(value) if isinstance(value, (list, tuple)) else iter(())


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors_in(each)
