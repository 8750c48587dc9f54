"""`drop_dead_code`: what nobody uses goes, unless it does more than make a value."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import functionalize as fz
from examples.resize_program import values
from functionalize import passes
from functionalize.passes.drop_dead_code import DropDeadCode
from tests.passes.helpers import graph_text, seen

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def with_dead_code() -> fz.Program:
    """A program with ops that nobody uses, as passes leave behind."""
    program = fz.functions.trace(lambda x: (x * 2).sin() + torch.rand(4), values(4))
    program.describe()
    graph = program.graph
    (end,) = graph.find_nodes(op="output")
    x = graph.find_nodes(op="placeholder")[0]
    with graph.inserting_before(end):
        cos = graph.call_function(aten.cos.default, (x,))
        made = [cos, graph.call_function(aten.exp.default, (cos,))]
        made += [graph.call_function(aten.rand.default, ([4],), {"device": torch.device("cpu")})]
        made += [
            graph.call_function(
                torch.ops.functionalize.get_rng_state.default, (torch.device("cpu"),)
            )
        ]
        made += [graph.call_function(functional.all_reduce.default, (x, "sum", "0"))]
        made += [graph.call_function(functional.wait_tensor.default, (made[-1],))]
    for node in made:
        passes.metadata.set_value(node)
    return program


def test_fires_and_leaves_random_ops_and_collectives(expect):
    program = with_dead_code()
    after = passes.run(program, [DropDeadCode()])
    assert after.history == ("drop_dead_code: 3",)
    assert passes.run(after, [DropDeadCode()]).history[-1] == "drop_dead_code: 0"
    expect(
        "fires",
        f"{program.print_readable(False)}-- {after.history[0]}\n{after.print_readable(False)}",
    )


def test_a_captured_program_has_none():
    def make():
        return (values(4),)

    before = fz.functions.trace(lambda x: (x.cos(), torch.rand(4), x.sin())[2], *make())
    after = passes.run(before, [DropDeadCode()])
    assert after.history == ("drop_dead_code: 0",) and seen(after, make) == seen(before, make)


def test_refuses_to_drop_inputs():
    program = fz.functions.trace(lambda x, y: x.sin(), values(4), values(4))
    assert len(passes.run(program, [DropDeadCode()]).inputs) == len(program.inputs)


def test_refuses_what_writes_or_checks():
    def body(x):
        x.cos()
        x.add_(1)
        torch.ops.aten._assert_async.msg(x.sum() > 0, "no")
        return x.sin()

    gm = make_fx(body)(values(4).abs())
    kept = graph_text(passes.on_graph_module("drop_dead_code")(gm, [values(4).abs()]))
    assert "cos" not in kept and "add_" in kept and "_assert_async" in kept
    assert isinstance(gm, fx.GraphModule)


def test_accepts_every_stage():
    program = with_dead_code()
    program.stage = "PARTITIONED"
    assert passes.run(program, [DropDeadCode()]).history == ("drop_dead_code: 3",)
