"""What a plan's figures do not need is found when it is asked for, and is then as if it had been found at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

import functionalize as fz
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import MemoryReportError
from functionalize.ir.inputs import Argument, InputSpec
from functionalize.ir.ops import contiguous_geometry
from functionalize.planner.lifetimes import step_memory
from functionalize.planner.sweep.figures import Figures
from functionalize.planner.time.compute import call_costs
from functionalize.planner.timeline import program_memory
from functionalize.planner.timeline.program_memory import program_timeline
from functionalize.program import executable
from functionalize.program.metadata import OpPlaces, Values, read_places
from functionalize.repeats import Repeats
from functionalize.tape.ownership import ownership_of
from tests.planner.sweep.stacks import KINDS, build, inputs
from tests.steps import train

# Found by `evaluate`; `record` is dropped by `describe`.
EVALUATED = {"val", "tensor_meta", "hint", "sized", "phase", "module", "fsdp"}
MODELS = ["of all kinds", "tied"]


def captured(kinds: str, memory: bool = True) -> Any:
    step = fz.capture(train, memory=memory)
    built = build(KINDS[kinds])
    while step.program is None:
        step(*built, inputs())
    return step


def metas(graph: fx.Graph, *names: str) -> list[dict[str, str]]:
    """The metadata of each node as text, without addresses of values: of these names, or of all."""
    return [
        {k: str(v) for k, v in n.meta.items() if k != "val" and (not names or k in names)}
        for n in graph.nodes
    ]


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("not asked for")


@pytest.mark.parametrize("kinds", MODELS)
def test_figures_need_no_purposes_and_no_provenance(kinds: str) -> None:
    with fz.world(4):
        step = captured(kinds)
        at_once = step.program.copy()
        at_once.describe()
        expected = program_timeline(at_once, step.memory.input_categories)
        with pytest.MonkeyPatch.context() as patch:
            for module, name in (
                (program_memory, "Categories"),
                (program_memory, "Padding"),
                (executable, "read_provenance"),
            ):
                patch.setattr(module, name, refuse)
            figures = Figures.of(step.program, step.memory, MACHINES["h100"])
            with pytest.MonkeyPatch.context() as no_timeline:
                no_timeline.setattr(step_memory, "program_timeline", refuse)
                assert figures.row["peak"] > 0 and figures.memory.uncounted is None
            assert figures.program_peak == max(expected.bytes)
            found = program_timeline(step.program, step.memory.input_categories)
            assert found.bytes == expected.bytes
            with pytest.raises(AssertionError, match="not asked for"):
                _ = found.allocations[-1].category
        # In another order: the last one first, and one that another is made of.
        texts = [str(each) for each in reversed(found.allocations)]
        assert texts[::-1] == [str(each) for each in expected.allocations]
        assert [found.ops[i] for i in range(len(found.ops))] == list(expected.ops)
        assert metas(step.program.graph) == metas(at_once.graph)
        assert all("record" not in n.meta for n in step.program.graph.nodes)
        assert str(step.program.tape()) == str(at_once.tape())


def test_purposes_are_refused_of_a_graph_that_was_changed() -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return (a + 1) * 2

    program = fz.functions.trace(f, torch.ones(4))
    timeline = program_timeline(program)
    node = program.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[0]
    node.args = node.args[0], 3
    assert timeline.peak == program_timeline(program).peak
    with pytest.raises(MemoryReportError, match="the graph of the program was changed after"):
        _ = timeline.allocations[-1].name
    assert program_timeline(program).allocations[-1].name == node.name


def test_values_inside_of_equal_layers_are_made_when_they_are_asked_for() -> None:
    with fz.world(4):
        step = captured("an odd one")
        whole = step.program.copy()
        whole.evaluate()
        step.program.evaluate_for_costs()
        calls = [n for n in step.program.graph.nodes if n.op == "call_function"]
        made = {n.name for n in calls if "val" in n.meta}
        assert 0 < len(made) < 0.9 * len(calls)
        figures = Figures.of(step.program, step.memory, MACHINES["h100"])
        assert figures.row["step"] > 0 and figures.traffic and figures.work
        assert made == {n.name for n in calls if "val" in n.meta}
    shared = step.program.copy()  # of a program that has some values
    for program in (shared, figures.program):
        names = "val", "tensor_meta", "phase", "module"
        both = zip(program.graph.nodes, whole.graph.nodes, strict=True)
        assert all(str(a.meta.get(k)) == str(b.meta.get(k)) for a, b in both for k in names)


def test_values_that_are_asked_for_outside_of_the_world_are_those_of_its_target() -> None:
    """CUDA keeps the statistics of a layer norm in float32, a CPU in half precision."""
    with fz.world(4):
        layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)) for _ in range(6)]
        model = nn.Sequential(*layers).bfloat16()
        step = fz.capture(train, memory=True)
        optimizer, x = torch.optim.SGD(model.parameters()), torch.randn(8, 32).bfloat16()
        while step.program is None:
            step(model, optimizer, x)
        whole = step.program.copy()
        whole.evaluate()
        figures = Figures.of(step.program, step.memory, MACHINES["h100"])
        assert figures.row["step"] > 0
    norm = torch.ops.aten.native_layer_norm.default
    looks = [
        [str(t.dtype) for t in node.meta["val"]]
        for program in (whole, figures.program)
        for node in program.graph.find_nodes(op="call_function", target=norm)
    ]
    assert looks == [["torch.bfloat16", "torch.float32", "torch.float32"]] * 12


def test_a_graph_that_changes_has_the_values_that_it_had() -> None:
    with fz.world(4):
        program = captured("an odd one").program
        whole = program.copy()
        whole.evaluate()
        program.evaluate_for_costs()
        made = program.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        bare = [n for n in program.graph.nodes if n.op != "output" and "val" not in n.meta]
        for each in (program, whole):
            node = next(n for n in each.graph.nodes if n.name == made[-1].name)
            node.args = (*reversed(node.args),)
        assert bare and call_costs(program).values() and all("val" in n.meta for n in bare)
        expected = {node.name: cost for node, cost in call_costs(whole).items()}
        assert {node.name: cost for node, cost in call_costs(program).items()} == expected


@pytest.mark.parametrize("writes", [True, False])
def test_equal_blocks_that_write_are_run(writes: bool) -> None:
    graph = fx.Graph()
    x, last = graph.placeholder("x"), graph.placeholder("y")
    for _ in range(3):
        for i in range(30):
            last = graph.call_function(torch.ops.aten.add.Tensor, (last, x), {"alpha": i})
        if writes:
            graph.call_function(torch.ops.aten.add_.Tensor, (last, x))
    geometry = contiguous_geometry((4,), torch.float32)
    spec = InputSpec("x", geometry, geometry.nbytes, torch.device("cpu"), Argument(0))
    program: Any = SimpleNamespace(
        graph=graph, inputs=(spec, spec), repeats=Repeats(graph), constants={}
    )
    values = Values(program)
    assert len(program.repeats.blocks) == 4  # the inputs, and three that are alike
    assert sum("val" in node.meta for node in graph.nodes) == (95 if writes else 33)
    values.finish()
    assert all("val" in node.meta for node in graph.nodes)


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("kinds", MODELS)
def test_modules_and_phases_are_those_of_the_whole_metadata(kinds: str, memory: bool) -> None:
    """The modules of ops that have none on record follow from calls, or from the makers of autograd's nodes."""
    with fz.world(4):
        program = captured(kinds, memory).program
        others = [program.copy(), program.copy()]
        read_places(others[0].graph, OpPlaces)
        read_places(others[1].graph, ownership_of)
        program.describe()
    found = [metas(each.graph, "module", "phase", "fsdp") for each in (program, *others)]
    assert found[0] == found[1] == found[2]
    assert sum("module" in each for each in found[0]) > len(found[0]) / 2


def test_ops_of_equal_layers_share_their_stacks() -> None:
    with fz.world(4):
        step = captured("an odd one")
        records = step.memory.lifetimes.records
        stacks = [each.traceback for each in records]
        texts = [str(each.summary()) for each in stacks]
        step.program.evaluate_for_costs()
        shared = [each.traceback for each in records]
    assert [str(each.summary()) for each in shared] == texts
    assert len(set(texts)) <= len(set(map(id, shared))) < len(set(map(id, stacks))) / 2


def test_an_evaluated_program_has_what_figures_read_and_keeps_its_records() -> None:
    with fz.world(4):
        program = captured("tied").program
        program.evaluate()
        calls = [n for n in program.graph.nodes if n.op == "call_function"]
        assert all({"val", "phase"} <= n.meta.keys() for n in calls)
        kept = {name for n in calls for name in n.meta} - EVALUATED
        assert "record" in kept and not kept & {"stack_trace", "seq_nr", "original_aten"}
        assert program.notes.resolved is None
        copy = program.copy()  # of an evaluated program: each describes its own nodes
        values = [n.meta["val"] for n in calls]
        program.describe()
        copy.describe()
        assert metas(copy.graph) == metas(program.graph)
        assert all(n.meta["val"] is value for n, value in zip(calls, values, strict=True))
        assert any("stack_trace" in n.meta for n in calls)
