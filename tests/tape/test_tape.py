"""`program.tape()`: autograd's nodes in the order in which autograd runs them, with edges, lines and ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize import passes
from functionalize._compat.autograd import engine_entry, graph_task, will_execute
from functionalize.recorder.recorder import Recorder
from tests.steps import make_loss_step
from tests.tape.graphs import (
    CASES,
    one_root_to_no_input,
    random_graph,
    root_to_no_input,
)

Said = list[tuple[str, Any]]  # name; the sequence number, or the id of the leaf


class Orders:
    """Asks autograd for the order of each backward, in a hook of the first node that it runs: later it cannot say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_tasks: dict[int, Said] = {}
        owner, name = engine_entry()
        self.engine = getattr(owner, name)
        monkeypatch.setattr(owner, name, self.run_backward)

    def run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for each in outputs:
            node = torch.autograd.graph.get_gradient_edge(each).node
            node.register_prehook(self.first_node_runs)
        self.skips_roots = bool(args[3]) and len(outputs) > 1
        return self.engine(outputs, *args, **kwargs)

    def first_node_runs(self, _: Any) -> None:
        if (task := graph_task()) not in self.of_tasks:
            with torch.autograd.set_multithreading_enabled(False):
                order = torch._C._current_graph_task_execution_order()
            if self.skips_roots:  # it lists those that lead to no input
                order = filter(will_execute, order)
            self.of_tasks[task] = [(type(n).__name__, identity(n)) for n in order]


def identity(node: Any) -> Any:
    leaf = getattr(node, "variable", None)
    return node._sequence_nr() if leaf is None else id(leaf)


STEPS = [
    *CASES,
    one_root_to_no_input,
    root_to_no_input,
    *map(random_graph, range(30)),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_order_is_that_of_autograd(
    step: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Orders(monkeypatch)
    with Recorder(ignore_fake=True) as recorder:
        leaves = leaf_ids(recorder)
        step()
    ours = []
    for call in recorder.tape.backwards:
        if order := call.order():  # else no root leads to an input
            numbers = [call.numbers[place] for place in order]
            names = [call.names[place] for place in order]
            ours.append([(n, leaves.get(i, i)) for n, i in zip(names, numbers, strict=True)])
    assert ours == [orders.of_tasks[task] for task in sorted(orders.of_tasks)]


def test_a_root_that_another_root_reaches_runs_once() -> None:
    """Autograd's own list has such a root twice."""
    a = torch.ones((), requires_grad=True)
    y = a.sin()
    z = y * 2
    with Recorder(ignore_fake=True) as recorder:
        torch.autograd.backward([a, y, z])
    (call,) = recorder.tape.backwards
    assert [call.names[place] for place in call.order()] == [
        "MulBackward0",
        "SinBackward0",
        "AccumulateGrad",
    ]


def leaf_ids(recorder: Recorder) -> dict[int, int]:
    """The id of each leaf by the number of its node, filled while the recorder records."""
    found: dict[int, int] = {}
    numbers_of = recorder.tape._leaf_numbers

    def noting(leaves: list[Tensor]) -> list[int]:
        numbers = numbers_of(leaves)
        found.update(zip(numbers, map(id, leaves), strict=True))
        return numbers

    recorder.tape._leaf_numbers = noting  # type: ignore[method-assign]
    return found


@pytest.fixture
def step() -> Any:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_loss_step(lambda x: (model(x) + 1).tanh().sum(), optimizer)


def captured(train: Any) -> Any:
    found = fz.capture(train)
    for _ in range(3):
        found(torch.ones(2, 3))
    return found


def test_nodes_have_edges_lines_and_ops(step: Any) -> None:
    tape = captured(step).program.tape()
    (backward,) = tape.backwards
    assert backward.line.endswith("loss.backward()")
    assert [node.name for node in backward.nodes] == [
        "SumBackward0",
        "TanhBackward0",
        "AddBackward0",  # runs no op
        "AddmmBackward0",
        "AccumulateGrad",
        "TBackward0",
        "AccumulateGrad",
    ]
    total, tanh, add, addmm, bias, t, weight = backward.nodes
    assert (total.edges, tanh.edges, add.edges) == ((tanh.number,), (add.number,), (addmm.number,))
    assert addmm.edges == (bias.number, t.number) and t.edges == (weight.number,)
    assert (bias.parameter, weight.parameter) == ("model.bias", "model.weight")
    assert all("(model(x) + 1).tanh().sum()" in node.line for node in backward.nodes)
    assert "aten.tanh_backward.default" in [str(op.target) for op in tape.ops[tanh.number]]
    assert add.number not in tape.ops
    text = str(tape).splitlines()
    assert text[0].startswith("backward at ") and "TanhBackward0 -> " in text[2]
    assert any(line.endswith("model.weight") for line in text)


def test_passes_and_files_keep_it(step: Any, tmp_path: Path) -> None:
    first = captured(step)
    first.save(tmp_path / "step.fzp")
    again = fz.capture(step)
    again.load(tmp_path / "step.fzp")
    tape = first.program.tape()
    assert tape.nodes
    assert str(again.programs[0].tape()) == str(tape)
    assert passes.run(first.program, "default").tape().backwards == tape.backwards


def test_a_program_without_a_backward_says_so() -> None:
    program = fz.functions.trace(torch.sin, torch.ones(3))
    assert str(program.tape()) == "no backward" and not program.tape().nodes


def test_two_recordings_have_equal_tapes(step: Any) -> None:
    assert str(captured(step).program.tape()) == str(captured(step).program.tape())
