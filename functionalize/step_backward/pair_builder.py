"""Discharge the recording of a forward and its backward into one graph: the forward's ops, then the backward's.

    builder.run(records of the forward);  forward = builder.half(...)     its outputs, epilogue, guards
    builder.begin_backward(...)                           a new placeholder for each input
    builder.run(records of the backward); backward = builder.half(...)    likewise

Invariant: after `begin_backward`, a read of an input reads the contents of its storage when the backward begins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import fx

from functionalize.cost.categories import Category
from functionalize.discharge.epilogue_actions import actions_of
from functionalize.discharge.rules.views import straight
from functionalize.discharge.storage import FunctionalStorage
from functionalize.discharge.values import View
from functionalize.ir.epilogue import Action
from functionalize.ir.guards import Guard, NumberGuard, ValueGuard
from functionalize.ir.inputs import Call, InputSpec, Source
from functionalize.ir.ops import Geometry
from functionalize.ir.outputs import OutputRole, SourceItself
from functionalize.ir.scalars import ScalarInput, evaluated
from functionalize.program.printer import node_text
from functionalize.program.program import Program
from functionalize.recorder.builder import Builder
from functionalize.recorder.recorder import Recorder
from functionalize.run.boxed import boxed
from functionalize.state.arguments import flatten_result


@dataclass(frozen=True, slots=True)
class SavedValue:
    """The source of a saved value in the backward's program.

    leaf: its index in the backward's arguments: the forward's leaves, the tangents, then the saved values.
    hint: the value at recording, if it is a number.
    """

    leaf: int
    hint: Any = None
    category: ClassVar[Category] = Category.SAVED_ACTIVATIONS

    def resolve(self, call: Call) -> Any:
        return call.leaves[self.leaf]


@dataclass(frozen=True, slots=True)
class Half:
    """The discharged forward or backward. results: the nodes of its outputs and of its epilogue's values."""

    outputs: list[OutputRole]
    epilogue: list[Action]
    results: list[fx.Node]
    value_guards: tuple[ValueGuard, ...]
    number_guards: tuple[NumberGuard, ...]
    early_guards: tuple[Guard, ...]

    def program(
        self,
        builder: Builder,
        graph: fx.Graph,
        inputs: Sequence[InputSpec],
        saved: Any,
        in_spec: Any,
    ) -> Program:
        """The program of this half; it returns a flat list, with saved values at the end."""
        outputs = (*self.outputs, *saved)
        return Program(
            graph=graph,
            constants=dict(builder.constants),
            inputs=tuple(inputs),
            outputs=outputs,
            epilogue=tuple(self.epilogue),
            guards=(),
            facts=self.number_guards,
            value_guards=self.value_guards,
            in_spec=in_spec,
            out_spec=flatten_result([0] * len(outputs))[1],
            runner=boxed,
        )


class PairBuilder(Builder):
    """Discharges the recording of a forward and its backward.

    forward_nodes: the op nodes of the forward. names: placeholder -> its name in the backward's program, if it differs
    from that in the joint graph.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.forward_nodes: list[fx.Node] = []
        self.names: dict[fx.Node, str] = {}
        self._geometry: dict[fx.Node, tuple[Geometry, torch.device]] = {}

    def half(
        self,
        leaves: Sequence[Any],
        arguments: Sequence[Any],
        deferred: Collection[int],
        places: Mapping[int, SourceItself] = MappingProxyType({}),
    ) -> Half:
        """Outputs, epilogue and guards of the ops discharged since the last call of `half`.

        leaves: the leaves of the result. arguments: the leaves of the arguments.
        deferred: storages without an epilogue in this half. places: see `roles`.
        """
        outputs = self.roles(leaves, arguments, places=places)
        epilogue: list[Action] = []
        for serial, index in self._base_input.items():
            if serial not in deferred:
                epilogue += actions_of(self.engine.storages[serial], index, self.emit, self.slot)
        half = Half(
            outputs,
            epilogue,
            list(self._slots),
            tuple(self._value_guards),
            tuple(self._number_guards),
            tuple(self.early_guards(boxed)),
        )
        self._slots, self._clones = {}, {}
        self._value_guards, self._number_guards, self._early = [], [], []
        return half

    def summary(self) -> tuple[str, tuple[Source, ...]]:
        """The ops so far as text, and the sources of the inputs that they read."""
        nodes = self.emit.graph.nodes
        read = [i for i, node in enumerate(self._nodes) if node.users]
        text = [node_text(node) for node in nodes if node.op != "placeholder"]
        text += [self._nodes[i].name for i in read]
        # Addresses of profiler ranges, which are dead code, differ between two equal runs.
        same = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(text))
        return same, tuple(self.inputs[i].source for i in read)

    def begin_backward(self, deferred: Collection[int]) -> None:
        """Make a new placeholder for each input, and mark views stale so that the backward regenerates them.

        A view of a value that the forward made is regenerated from the whole value, which is saved.
        deferred: storages that keep their placeholder, since the backward writes their epilogue.
        """
        self.forward_nodes = [n for n in self.emit.graph.nodes if n.op == "call_function"]
        for serial, storage in list(self.engine.storages.items()):
            for view in storage.views.values():
                if isinstance(view.value, fx.Node):
                    found = view.geometry._replace(offset=0), storage.device
                    self._geometry.setdefault(view.value, found)
            if serial in self._base_input and serial not in deferred:
                self._new_input(serial, storage)
            else:
                storage.retake_views()

    def _new_input(self, serial: int, storage: FunctionalStorage) -> None:
        """Make the placeholder and the storage record of an input for the backward."""
        was = self.inputs[self._base_input[serial]]
        name = self._unique(was.name)
        spec = InputSpec(name, was.geometry, storage.nbytes, was.device, was.source)
        node = self._placeholder(spec, serial)
        self.names |= {self._nodes[self._base_input[serial]]: f"{was.name}_before", node: was.name}
        self._base_input[serial] = len(self.inputs) - 1
        new = FunctionalStorage(
            serial, spec.geometry, spec.device, node, spec.nbytes, was.name, straight, external=True
        )
        for g, view in storage.views.items():
            if g != spec.geometry:
                new.views[g] = View(g, view.parent, view.step)
        self.engine.storages[serial] = new

    def backward_inputs(self) -> list[InputSpec]:
        """Every input, with its name in the backward's program."""
        pairs = zip(self._nodes, self.inputs, strict=True)
        return [replace(spec, name=self.names.get(node, spec.name)) for node, spec in pairs]

    def saved(self, node: fx.Node, source: SavedValue) -> InputSpec:
        """The input of the backward for a saved value of the forward."""
        number = next((e for e, n in self.emit.numbers.items() if n is node), None)
        if number is not None:
            source = replace(source, hint=evaluated(number, _hint))
        geometry, device = self._geometry.get(node, (None, torch.device("cpu")))
        nbytes = geometry.end if geometry is not None else 0
        return InputSpec(node.name, geometry, nbytes, device, source)  # type: ignore[arg-type]


def _hint(leaf: Any) -> Any:
    """The value of a number at recording."""
    return leaf.hint if isinstance(leaf, ScalarInput) else leaf.record.meta["hint"]
