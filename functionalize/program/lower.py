"""A program as one `fx.GraphModule`, the epilogue as ops at its end.

    program(a: float32[8] in 0 bytes):        def forward(self, a):
        full = aten.full([8], 1)                  full = aten.full([8], 1)
        return full                     ->        resize_storage_bytes_(a, 32)
    epilogue:                                     copy_(a, full)
        resize_storage_bytes_(a, 32)              return (full,)
        copy_(a, full)

Placeholders are the tensor leaves of the arguments, in order; captured tensors that are no arguments are
attributes. The module returns the output leaves as a tuple.

Invariant: on fresh arguments, outputs, inputs, aliasing and storage sizes are as after a replay.
Guards are not lowered: call the module with arguments like those of the capture. At stage INPLACE, ops write inputs
where the graph does; the `commit` is dropped.
Refusal: an input that is neither an argument nor captured (as in a training step), and a window that no view op can
make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from functionalize.errors import UncapturableError
from functionalize.ir.commit import is_commit
from functionalize.ir.epilogue import Copy, Resize, Set
from functionalize.ir.inputs import Argument, Captured, WholeStorage
from functionalize.ir.ops import Geometry
from functionalize.ir.outputs import (
    Constant,
    InputView,
    LeafItself,
    OutputRole,
    Result,
    SameAs,
    SourceItself,
    Wrapped,
)
from functionalize.program.executable import Executable

aten = torch.ops.aten
resize_storage_bytes_ = torch.ops.inductor.resize_storage_bytes_.default


def lower(program: Executable) -> fx.GraphModule:
    """A module with the effects of a replay, without guards; raises `UncapturableError` (see above)."""
    return _Lowering(program).module()


class _Rebuild(torch.nn.Module):
    """Puts a wrapper subclass around inner tensors."""

    def __init__(self, role: Wrapped) -> None:
        super().__init__()
        self.role = role

    def forward(self, *inner: Any) -> Any:
        role = self.role
        rebuild: Any = role.kind
        parts = dict(zip(role.inner, inner, strict=True))
        return rebuild.__tensor_unflatten__(parts, role.context, role.size, role.stride)


class _Lowering:
    def __init__(self, program: Executable) -> None:
        self.program = program
        self.source = program.graph_module
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.leaves: dict[int, fx.Node] = {}
        self.inputs: list[fx.Node] = []
        self.sizes = [
            spec.nbytes for spec in program.inputs
        ]  # of the storages, at the current action
        self.results: list[Any] = []

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """A node."""
        return self.graph.call_function(target, args)

    def module(self) -> fx.GraphModule:
        """The whole module: inputs, graph, epilogue, outputs."""
        self._add_inputs()
        self._copy_graph()
        homes = self._epilogue()
        self.graph.output(self._outputs(homes))
        module = fx.GraphModule(self.root, self.graph, "Lowered")
        module.graph.lint()
        return module

    # -- inputs and graph ------------------------------------------------------------------------

    def _add_inputs(self) -> None:
        specs = self.program.inputs
        for spec in specs:
            if isinstance(spec.source, Argument) and spec.source.leaf not in self.leaves:
                name = spec.name if not spec.source.attributes else f"leaf_{spec.source.leaf}"
                self.leaves[spec.source.leaf] = self.graph.placeholder(name)
        for i, spec in enumerate(specs):
            source = spec.source
            if isinstance(source, Argument):
                node = self.leaves[source.leaf]
                for attribute in source.attributes:
                    node = self.call(getattr, node, attribute)
            elif isinstance(source, WholeStorage):
                node = self._window(source.input, self.inputs[source.input], source.geometry)
            elif isinstance(source, Captured):
                setattr(self.root, f"captured_{i}", source.value)
                node = self.graph.get_attr(f"captured_{i}")
            else:
                raise UncapturableError(
                    f"`{spec.name}` is found by {source}, which a lowered module has no argument for: "
                    "lower a program of `trace`, whose tensors are arguments"
                )
            self.inputs.append(node)

    def _copy_graph(self) -> None:
        env = dict(zip(self.source.graph.find_nodes(op="placeholder"), self.inputs, strict=True))
        for node in self.source.graph.nodes:
            if node.op == "get_attr":
                setattr(self.root, node.target, getattr(self.source, node.target))
            if node.op == "output":
                self.results = [fx.node.map_arg(a, env.__getitem__) for a in node.args[0]]
                self.offsets = [_offset_of(a) for a in node.args[0]]
            elif node.op != "placeholder" and not is_commit(node):
                env[node] = self.graph.node_copy(node, env.__getitem__)

    # -- the epilogue ----------------------------------------------------------------------------

    def _epilogue(self) -> list[fx.Node]:
        """Emit the actions; returns for each input a node on the storage that it had on entry."""
        homes = list(self.inputs)
        for action in self.program.epilogue:
            if isinstance(action, Set) and homes[action.input] is self.inputs[action.input]:
                homes[action.input] = self.call(aten.alias.default, self.inputs[action.input])
        for action in self.program.epilogue:
            i, home = action.input, homes[action.input]
            if isinstance(action, Resize):
                self._resize(i, home, action.nbytes)
            elif isinstance(action, Copy):
                with self._room(i, home, action.geometry):
                    target = self._window(i, home, action.geometry)
                    self.call(aten.copy_.default, target, self.results[action.slot])
            else:
                self._set(action, homes)
        return homes

    def _resize(self, index: int, home: fx.Node, nbytes: int) -> None:
        self.call(resize_storage_bytes_, home, nbytes)
        self.sizes[index] = nbytes

    def _set(self, action: Set, homes: list[fx.Node]) -> None:
        target, own = self.inputs[action.input], self.program.inputs[action.input].geometry
        if action.slot is not None:
            source, g = self._part(action.slot, action.geometry), action.geometry
            self._move(target, own, source, g)
            return
        other, g = action.other or 0, action.geometry
        with self._room(other, homes[other], g):
            self._move(target, own, self._window(other, homes[other], g), g)

    def _move(self, target: fx.Node, own: Geometry, source: fx.Node, g: Geometry) -> None:
        plain = not (g.conj or g.neg or own.conj or own.neg)
        op = aten.set_.source_Tensor if g.dtype == own.dtype and plain else aten.set_data.default
        self.call(op, target, source)

    # -- windows ---------------------------------------------------------------------------------

    def _window(self, index: int, node: fx.Node, g: Geometry) -> fx.Node:
        """An input's storage seen as `g`."""
        own = self.program.inputs[index].geometry
        return node if g == own else self._seen(node, own, g)

    @contextmanager
    def _room(self, index: int, home: fx.Node, g: Geometry) -> Iterator[None]:
        """Temporarily grow a freed storage, so that the `as_strided` of this window passes its bounds check."""
        own, nbytes = self.program.inputs[index].geometry.dtype.itemsize, self.sizes[index]
        needed = -(-g.end // own) * own
        if needed > nbytes:
            self._resize(index, home, needed)
        yield
        if needed > nbytes:
            self._resize(index, home, nbytes)

    def _seen(self, node: fx.Node, own: Geometry, g: Geometry) -> fx.Node:
        if own.neg:
            node = self.call(aten._neg_view.default, node)
        if own.conj:
            node = self.call(aten._conj.default, node)
        if own.dtype != g.dtype:
            unit = max(own.dtype.itemsize, g.dtype.itemsize)
            start, end = g.start // unit * unit, -(-g.end // unit) * unit
            size = own.dtype.itemsize
            flat = ([max(end - start, 0) // size], [1], start // size)
            node = self.call(aten.as_strided.default, node, *flat)
            node = self.call(aten.view.dtype, node, g.dtype)
        node = self.call(aten.as_strided.default, node, list(g.size), list(g.stride), g.offset)
        if g.conj:
            node = self.call(aten._conj.default, node)
        return self.call(aten._neg_view.default, node) if g.neg else node

    def _part(self, slot: int, g: Geometry) -> fx.Node:
        """A window `g` on a result's memory; its offset counts from the result's first element."""
        own = self.offsets[slot]
        at = g.offset + own.start // g.dtype.itemsize
        return self._seen(self.results[slot], own, g._replace(offset=at))

    # -- outputs ---------------------------------------------------------------------------------

    def _outputs(self, homes: list[fx.Node]) -> tuple[Any, ...]:
        outs: list[Any] = []
        returned: set[int] = set()
        for role in self.program.outputs:
            same = isinstance(role, SameAs)
            outs.append(outs[role.output] if same else self._output(role, homes, returned))  # type: ignore[union-attr]
        return tuple(outs)

    def _output(self, role: OutputRole, homes: list[fx.Node], returned: set[int]) -> Any:
        if isinstance(role, LeafItself):
            return self.leaves[role.leaf]
        if isinstance(role, SourceItself):
            raise UncapturableError(
                f"returns the tensor that {role.source} finds, and a lowered module has no argument for it: lower a "
                "program of `trace`"
            )
        if isinstance(role, InputView):
            return self._input_view(role, homes)
        if isinstance(role, Result):
            if role.geometry is not None:
                return self._part(role.slot, role.geometry)
            node = self.results[role.slot]
            if role.slot in returned and _is_tensor(node):
                return self.call(aten.alias.default, node)
            returned.add(role.slot)
            return node
        if isinstance(role, Wrapped):
            inner = tuple(self._output(r, homes, returned) for r in role.inner.values())
            name = f"rebuild_{len(list(self.root.children()))}"
            self.root.add_module(name, _Rebuild(role))
            return self.graph.call_module(name, inner)
        assert isinstance(role, Constant)
        if role.value is None or isinstance(role.value, (bool, int, float, str)):
            return role.value
        name = f"output_{len(self.graph.nodes)}"
        setattr(self.root, name, role.value)
        return self.graph.get_attr(name)

    def _input_view(self, role: InputView, homes: list[fx.Node]) -> fx.Node:
        index, g = role.input, role.geometry
        home = homes[index]
        if g == self.program.inputs[index].geometry:
            return self.call(aten.alias.default, home)
        with self._room(index, home, g):
            return self._window(index, home, g)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _offset_of(node: Any) -> Geometry:
    """A result's geometry in its own memory."""
    from functionalize.ir.ops import geometry_of

    value = node.meta["val"] if isinstance(node, fx.Node) else None
    return (
        geometry_of(value) if isinstance(value, torch.Tensor) else Geometry((), (), 0, torch.uint8)
    )
