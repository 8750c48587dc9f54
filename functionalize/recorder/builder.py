"""From a recording to a `Program`: discharge the op stream, decide the epilogue and the role of each output.

    builder = Builder(recorder)
    builder.add_inputs([...])     placeholders; aliasing inputs share one storage record
    builder.discharge()           the engine runs over every record
    builder.roles(leaves)         how a replay makes each output
    builder.epilogue()            the mutations of inputs that a replay makes after the graph
    builder.program(...)          the program: dead code eliminated, guards added

Invariants: outputs that share a storage in the recording share one at every replay. The program never returns a
constant of its own, only a copy of it. Refusals: an output on a storage whose contents are undefined.
"""

from __future__ import annotations

import operator
import re
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functionalize._compat.dispatch import is_traceable_wrapper_subclass
from functionalize._compat.graphs import pytree
from functionalize.analysis.dead_code import drop_dead_code
from functionalize.discharge.emitters import GraphEmitter
from functionalize.discharge.epilogue_actions import actions_of
from functionalize.discharge.functionalizer import Functionalizer
from functionalize.discharge.values import View
from functionalize.errors import FunctionalizeError
from functionalize.ir.epilogue import Action, Set
from functionalize.ir.guards import Guard, NanGuard, NumberGuard, ValueGuard
from functionalize.ir.inputs import InputSpec, Source, WholeStorage
from functionalize.ir.ops import Geometry, OpRecord, TensorRef, contiguous_geometry
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
from functionalize.ir.scalars import (
    NUMBER_DTYPES,
    Applied,
    ScalarInput,
    expression_text,
    is_known_before_run,
)
from functionalize.ir.waits import WAIT, sink_waits
from functionalize.program.early_guard import EarlyGuard, is_early
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.scalars.live_scalars import expression_of
from functionalize.scalars.scalar_log import Fact
from functionalize.tape.anomaly import nan_check
from functionalize.util.reading import is_a
from functionalize.util.tensor_wrappers import plain_tensors
from functionalize.util.user_stack import line_of

aten = torch.ops.aten


class TensorInput(NamedTuple):
    """A tensor that becomes a placeholder.

    ref: its storage and geometry in the recording. source: where a replay reads it.
    """

    name: str
    ref: TensorRef
    source: Source


_WITHOUT_IDENTITY = (bool, int, float, complex, str, bytes, type(None))


class Builder:
    """Discharges one recording into one program."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        me: Builder = weakref.proxy(self)  # a cycle would keep the tensors of the recording
        self.emit = GraphEmitter(lambda *at: me._whole_storage(*at), lambda n: me._number_input(n))
        self.engine = Functionalizer(self.emit)
        self.inputs: list[InputSpec] = []
        self.storage_of_input: list[int] = []
        self.constants: dict[str, Tensor] = {}
        self._base_input: dict[int, int] = {}  # storage -> index of the input that is its base
        self._nodes: list[fx.Node] = []
        self._names: set[str] = set()
        self._slots: dict[fx.Node, int] = {}  # a node that the graph returns -> its index
        self._clones: dict[fx.Node, fx.Node] = {}  # a constant -> the copy that is returned
        self._shared: set[int] = set()  # storages under several output tensors
        self._value_guards: list[ValueGuard] = []
        self.early: frozenset[int] = frozenset()  # ids of records computed from arguments alone
        self._early: list[tuple[fx.Node, Any, str, str]] = []  # see `EarlyGuard.of`
        self._number_guards: list[NumberGuard] = []
        self._gradients: dict[int, fx.Node] = {}  # by the number of the leaf

    # -- inputs --------------------------------------------------------------------------------

    def add_inputs(self, inputs: Sequence[TensorInput]) -> None:
        """Make a placeholder for each input. The base of a storage is the widest dense input on it."""
        first = len(self.inputs)
        for each in inputs:
            info = self.recorder.storages.infos[each.ref.storage]
            spec = InputSpec(
                self._unique(each.name),
                each.ref.geometry,
                info.original_nbytes,
                info.device,
                each.source,
            )
            self._placeholder(spec, each.ref.storage)
        by_storage: dict[int, list[int]] = {}
        for index, each in enumerate(inputs, first):
            by_storage.setdefault(each.ref.storage, []).append(index)
        for serial, indices in by_storage.items():
            self._declare(serial, indices)

    def _declare(self, serial: int, indices: list[int]) -> None:
        base = max(indices, key=self._width) if len(indices) > 1 else indices[0]
        spec = self.inputs[base]
        self._base_input[serial] = base
        ref = TensorRef(serial, spec.geometry)
        storage = self.engine.declare(
            ref, spec.nbytes, spec.device, self._nodes[base], spec.name, external=True
        )
        # The other inputs are known views: a read of one needs no view op.
        for index in indices if len(indices) > 1 else ():
            g = self.inputs[index].geometry
            if g not in storage.views:
                version = storage.version if spec.nbytes else -1
                storage.views[g] = View(g, None, None, self._nodes[index], version)

    def _width(self, index: int) -> tuple[bool, int]:
        g = self.inputs[index].geometry
        return g.is_dense and not g.conj and not g.neg, g.end - g.start

    def _placeholder(self, spec: InputSpec, serial: int) -> fx.Node:
        node = self.emit.nodes.placeholder(spec.name)
        if self._nodes and node.prev is not self._nodes[-1]:
            self._nodes[-1].append(node)
        self._nodes.append(node)
        self.inputs.append(spec)
        self.storage_of_input.append(serial)
        return node

    def _number_input(self, number: ScalarInput) -> fx.Node:
        """A placeholder for a number that every call reads from its source.

        Its storage serial is negative: no storage of the recording has it.
        """
        dtype = NUMBER_DTYPES[type(number.hint)]
        geometry, cpu = contiguous_geometry((), dtype), torch.device("cpu")
        name = self._unique(number.name)
        spec = InputSpec(name, geometry, dtype.itemsize, cpu, number.source)
        return self._placeholder(spec, -1 - len(self.inputs))

    def add_constant(self, ref: TensorRef, tensor: Tensor) -> None:
        """Declare a tensor that is a constant of the program: `tensor` holds its contents."""
        info = self.recorder.storages.infos[ref.storage]
        name = f"constant_{len(self.constants)}"
        self.constants[name] = tensor
        node = self.emit.graph.create_node("get_attr", name)
        self.engine.declare(ref, info.original_nbytes, info.device, node, name)

    def _whole_storage(self, serial: int, flat: Geometry) -> fx.Node:
        index = self._base_input[serial]
        base = self.inputs[index]
        name = self._unique(f"{base.name}_storage")
        spec = InputSpec(name, flat, base.nbytes, base.device, WholeStorage(index, flat))
        return self._placeholder(spec, serial)

    def _unique(self, name: str) -> str:
        name = name.replace(".", "_")
        if not name.isidentifier():
            name = re.sub(r"\W+", "_", name).strip("_") or "arg"
            name = f"arg_{name}" if name[0].isdigit() else name
        unique, n = name, 1
        while unique in self._names:
            unique, n = f"{name}_{n}", n + 1
        self._names.add(unique)
        return unique

    # -- the op stream -------------------------------------------------------------------------

    def discharge(self) -> None:
        """Run the engine over every record, and add a guard for every fact that the step relies on."""
        self.run(self.recorder.records)
        log = self.recorder.scalar_log
        self.guard(log.facts.values() if log is not None else ())

    def run(self, records: Iterable[OpRecord]) -> None:
        """Run the engine over records that follow those of the previous call."""
        scalars, run = {id(s.record): s for s in self.recorder.scalars}, self.engine.run
        for record in records:
            # A record may return a number to Python: a frozen one (`scalar`) or a live one (`read`).
            scalar = scalars.get(id(record)) if scalars else None
            meta = record.meta
            read = meta.get("read") if meta else None
            if scalar is None and read is None:
                run(record)
                if meta and "accumulates" in meta:
                    self._note_gradient(record)
                continue
            node = self.engine.step(record)
            if read is not None:
                self.emit.numbers[read] = node
                node.meta["hint"] = record.meta["hint"]
            if scalar is not None:
                node.meta["hint"] = scalar.value
                where = line_of(record.traceback)
                if (nan := nan_check(node, record)) is not None:
                    self._value_guards.append(NanGuard(self.slot(node), scalar.value, where, *nan))
                    continue
                early = id(record) in self.early
                what = self.recorder.checks.sizes.what(record)
                self._guard_value(node, scalar.value, where, what, early)

    def _note_gradient(self, record: OpRecord) -> None:
        """Put the number of a leaf on the node of its gradient, which autograd has just accumulated."""
        number, out = record.seq_nr, record.outputs
        storage = self.engine.storages.get(out.storage) if type(out) is TensorRef else None
        if number is None or storage is None or not isinstance(storage.base, fx.Node):
            return
        before = self._gradients.get(number)
        if before is not None:
            before.meta["accumulates"].remove(number)
        self._gradients[number] = storage.base
        storage.base.meta.setdefault("accumulates", []).append(number)

    def guard(self, facts: Iterable[Fact]) -> None:
        """Add a guard for each fact about a live number."""
        for fact in facts:
            self._guard(fact)

    def _guard(self, fact: Fact) -> None:
        """Add the guard: it runs before the graph if the fact depends on arguments alone, else after it."""
        expression, where = fact.expression, line_of(fact.traceback)
        if is_known_before_run(expression):
            self._number_guards.append(NumberGuard(expression, fact.value, where))
            return
        node = self.emit.number(expression)
        what = f"`{expression_text(expression)}`"
        if not isinstance(expression, Applied):
            what = self.recorder.checks.sizes.what(expression.record)
        self._guard_value(node, fact.value, where, what, is_early(expression, self.early))

    def _guard_value(self, node: fx.Node, value: Any, where: str, what: str, early: bool) -> None:
        if early:
            self._early.append((node, value, where, what))
        else:
            self._value_guards.append(ValueGuard(self.slot(node), value, where, what))

    def early_guards(self, runner: Callable[..., Any]) -> list[Guard]:
        """Guards on facts that depend on arguments alone.

        To be called before `program`, whose dead-code elimination removes their nodes.
        """
        sizing = self.recorder.checks.sizes.records
        return EarlyGuard.several(self._early, sizing, self.inputs, self.constants, runner)

    # -- outputs -------------------------------------------------------------------------------

    def slot(self, node: fx.Node) -> int:
        """The index of a node in the graph's results; adds the node if the graph does not return it yet."""
        return self._slots.setdefault(node, len(self._slots))

    def roles(
        self,
        leaves: Sequence[Any],
        arguments: Sequence[Any] = (),
        outside: Container[int] = (),
        places: Mapping[int, SourceItself] = MappingProxyType({}),
    ) -> list[OutputRole]:
        """The role of each output leaf; outputs that share a storage keep sharing it.

        arguments: leaves of the call's arguments; an output that is one of them is returned as that object.
        outside: ids of leaves that the caller already holds; a replay returns these very objects.
        places: by the ids of leaves, the roles of objects that every replay finds again.
        """
        seen: dict[int, set[int]] = {}  # storage -> ids of the tensors on it
        for leaf in [*leaves, *arguments]:
            for t in plain_tensors(leaf) if id(leaf) not in outside else []:
                seen.setdefault(self.recorder.storages.ref(t).storage, set()).add(id(t))
        self._shared = {storage for storage, objects in seen.items() if len(objects) > 1}
        # Of numbers and texts there may be one object, by chance.
        argument_index = {
            id(leaf): i for i, leaf in enumerate(arguments) if not is_a(leaf, _WITHOUT_IDENTITY)
        }
        roles: list[OutputRole] = []
        first: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            if is_a(leaf, Tensor) and id(leaf) in outside:
                roles.append(Constant(leaf))
            elif id(leaf) in argument_index:
                roles.append(LeafItself(argument_index[id(leaf)]))
            elif id(leaf) in places:
                roles.append(places[id(leaf)])
            elif is_a(leaf, Tensor) and id(leaf) in first:
                roles.append(SameAs(first[id(leaf)]))
            else:
                try:
                    roles.append(self._role(leaf))
                except FunctionalizeError as error:
                    text = f"to return leaf {i} of its result, the program {error}"
                    raise type(error)(text) from None
            first.setdefault(id(leaf), i)
        return roles

    def _role(self, leaf: Any) -> OutputRole:
        if not is_a(leaf, Tensor):
            expression = expression_of(leaf, self.recorder.scalar_log)
            if expression is None:
                return Constant(leaf)
            return Result(self.slot(self.emit.number(expression)))
        if is_traceable_wrapper_subclass(leaf):
            names, context = leaf.__tensor_flatten__()
            inner = {n: self._role(getattr(leaf, n)) for n in names}
            return Wrapped(type(leaf), inner, context, leaf.shape, leaf.stride())
        ref = self.recorder.storages.ref(leaf)
        if ref.storage in self._base_input:
            return InputView(self._base_input[ref.storage], ref.geometry)
        if ref.storage not in self._shared and not (ref.geometry.conj or ref.geometry.neg):
            return Result(self.slot(self._without_constant(self.engine.read(ref))))
        return Result(*self._in_base(ref))

    def _in_base(self, ref: TensorRef) -> tuple[int, Geometry]:
        """For a tensor on a storage that the step made: the result index of the base, and the geometry within it."""
        storage = self.engine.storage(ref.storage)
        storage.read(ref.geometry, self.emit)
        base = self._without_constant(storage.peek(storage.root, self.emit))
        g, root = ref.geometry, storage.root
        return self.slot(base), g._replace(offset=g.offset - root.start // g.dtype.itemsize)

    def _without_constant(self, node: fx.Node) -> fx.Node:
        """`node`, or a copy of it if it is (a view of) a constant, because the caller may write to a result."""
        origin = node
        while origin.op == "call_function" and _is_view_call(origin):
            origin = origin.args[0]  # type: ignore[assignment]
        if origin.op != "get_attr":
            return node
        return self._clones.setdefault(node, self.emit.call(aten.clone.default, node))

    def moved(self, index: int, tensor: Tensor) -> Set | None:
        """The `set_` of input `index` if its tensor ended on another storage or with another geometry, else None."""
        ref, spec = self.recorder.storages.ref(tensor), self.inputs[index]
        if ref.storage in self._base_input:
            if ref == TensorRef(self.storage_of_input[index], spec.geometry):
                return None
            return Set(index, ref.geometry, self._base_input[ref.storage], None)
        slot, geometry = self._in_base(ref)
        return Set(index, geometry, None, slot)

    def epilogue(self) -> list[Action]:
        """The resizes and copies that a replay makes on its inputs, by storage."""
        actions: list[Action] = []
        for serial, index in self._base_input.items():
            actions += actions_of(self.engine.storages[serial], index, self.emit, self.slot)
        return actions

    # -- the program -----------------------------------------------------------------------------

    def program(
        self,
        outputs: Sequence[OutputRole],
        epilogue: Sequence[Action],
        guards: Sequence[Guard],
        in_spec: pytree.TreeSpec | None,
        out_spec: pytree.TreeSpec,
        runner: Callable[..., Any],
    ) -> Program:
        """Add the graph's output, eliminate dead code, move waits down to their first use, and make the program."""
        for token in self.engine.sends:
            if token is not None:  # the step never waits for it: its wait comes last
                self.emit.call(WAIT, token)
        self.emit.graph.output(tuple(self._slots))
        drop_dead_code(self.emit.graph)
        sink_waits(self.emit.graph)
        return Program(
            graph=self.emit.graph,
            constants=dict(self.constants),
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            epilogue=tuple(epilogue),
            guards=tuple(guards),
            facts=tuple(self._number_guards),
            value_guards=tuple(self._value_guards),
            in_spec=in_spec,
            out_spec=out_spec,
            runner=runner,
            notes=self.recorder.tape,
        )


def _is_view_call(node: fx.Node) -> bool:
    """Whether a node's value is, or is a part of, a view of its first argument."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.returns) and schema.returns[0].alias_info is not None
