"""`partition`: one boundary, values saved by name, two graphs that compute what the one did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functionalize as fz
from examples.resize_program import values
from functionalize import passes
from functionalize.errors import PassError
from functionalize.ir.guards import ValueGuard
from functionalize.ir.inputs import Call, Captured
from functionalize.ir.outputs import Constant
from functionalize.ir.phases import FORWARD, phase_of
from functionalize.passes import Partitioned
from tests.fsdp import models, steps
from tests.fsdp.twins import compare_twins
from tests.graphs import graph_text
from tests.ranks import run_on_ranks
from tests.steps import make_step

aten = torch.ops.aten


def net(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w.t() + b) @ w


def joint(x: Tensor, w: Tensor, b: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
    out = net(x, w, b)
    return out, *torch.autograd.grad(out, (x, w, b), tangent)


def primals() -> list[Tensor]:
    return [t.requires_grad_() for t in (values(4, 8), values(6, 8, seed=1), values(6, seed=2))]


def trained() -> tuple[fz.Program, nn.Module]:
    """A captured step of a small model, optimizer included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    captured = fz.capture(make_step(model, optimizer))
    for _ in range(3):
        captured(values(4, 8))
    assert captured.program is not None
    return captured.program, model


def look(parts: Partitioned) -> str:
    """The two graphs, and what is saved, without the lines of the user's code."""
    table = "\n".join(line.partition("  File")[0] for line in str(parts).splitlines())
    graphs = [("forward", parts.forward), ("backward", parts.backward)]
    return "\n".join([*(graph_text(name, gm.graph) for name, gm in graphs), table]) + "\n"


def bits(found: list[Tensor]) -> list[list[int]]:
    return [t.contiguous().view(-1).view(torch.uint8).tolist() for t in found]


# -- fires -----------------------------------------------------------------------------------------


def test_fires_on_a_joint_program(expect):
    program = fz.functions.trace(joint, *primals(), values(4, 8))
    parts = Partitioned.of(program)
    expect("joint", look(parts))
    assert program.stage == "FUNCTIONAL" and parts.program.stage == "PARTITIONED"
    assert [s.name for s in parts.saved] == ["add", "gelu"] and parts.nbytes == 2 * 4 * 6 * 4
    assert "test_partition.py" in parts.saved[0].where


def test_one_value_is_told_in_the_singular():
    def fn(x, tangent):
        y = (x * 2).sin()
        return y, *torch.autograd.grad(y, [x], tangent)

    parts = Partitioned.of(fz.functions.trace(fn, values(4).requires_grad_(), values(4, seed=1)))
    assert str(parts).startswith("saved for backward: 1 value, 16 bytes\n")


def test_fires_on_a_step_with_its_optimizer(expect):
    program, _ = trained()
    parts = Partitioned.of(program)
    expect("step", look(parts))
    args = [
        spec.source.resolve(Call((), [])) if i else values(4, 8)
        for i, spec in enumerate(program.inputs)
    ]
    torch.manual_seed(0)
    expected = bits(list(program.run(list(args))))
    torch.manual_seed(0)
    assert bits(parts.run(args)) == expected


def test_the_program_replays_as_before():
    args = *primals(), values(4, 8)
    before = fz.functions.trace(joint, *args)
    after = passes.run(before, "partition,verify")
    assert after.history[0].startswith("partition: ")
    assert bits(list(after(*args))) == bits(list(before(*args)))


def test_what_moves_or_is_taken_again_is_of_the_phase_it_is_in():
    after = passes.run(fz.functions.trace(joint, *primals(), values(4, 8)), "partition")
    late = [n for n in after.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"]
    assert late and all(phase_of(n) != FORWARD for n in late)
    early = [n for n in after.graph.nodes if n.meta.get("partitioner_tag") == "is_forward"]
    assert early and all(phase_of(n) == FORWARD for n in early)


def test_a_second_run_is_refused():
    after = passes.run(fz.functions.trace(joint, *primals(), values(4, 8)), "partition")
    with pytest.raises(PassError) as error:
        passes.run(after, "partition")
    assert (
        str(error.value)
        == "`partition` accepts a program at stage FUNCTIONAL, this one is at PARTITIONED"
    )
    assert Partitioned.of(after).program is after


def test_a_wait_stays_with_its_collective():
    def program() -> fz.Program:
        traced = fz.functions.trace(joint, *primals(), values(4, 8))
        traced.describe()
        graph = traced.graph
        mm = graph.find_nodes(op="call_function", target=aten.mm.default)[0]
        first = next(n for n in graph.nodes if phase_of(n) == "backward")
        with graph.inserting_after(mm):
            sent = graph.call_function(
                torch.ops._c10d_functional.all_reduce.default, (mm, "sum", "0")
            )
        with graph.inserting_after(first):
            wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (sent,))
        for node in (sent, wait):
            node.meta["phase"] = FORWARD
            passes.metadata.set_value(node)
        return traced

    after = passes.run(program(), "partition")
    names = [n.name for n in after.graph.nodes]
    tags = {n.name: n.meta.get("partitioner_tag") for n in after.graph.nodes}
    assert tags["wait_tensor_default"] == "is_forward"
    assert names.index("wait_tensor_default") < min(
        names.index(n) for n, t in tags.items() if t == "is_backward"
    )


# -- as a function ---------------------------------------------------------------------------------


def test_as_function_gives_the_gradients_of_eager():
    function = Partitioned.of(fz.functions.trace(joint, *primals(), values(4, 8))).as_function()
    for scale in (1.0, 2.0):
        mine, eager = primals(), primals()
        (net(*eager) * scale).sum().backward()
        (function(*mine) * scale).sum().backward()
        assert bits([t.grad for t in mine]) == bits([t.grad for t in eager])


def test_as_function_takes_none_gradients_and_expanded_tangents():
    def two(x: Tensor, w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(x @ w)
        return h * mask, h.sum()

    def both(x: Tensor, w: Tensor, mask: Tensor, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        outs = two(x, w, mask)
        return *outs, *torch.autograd.grad(outs, (x, w), tangents), None

    def args() -> list[Tensor]:
        return [
            values(4, 8).requires_grad_(),
            values(8, 8, seed=1).requires_grad_(),
            values(4, 8, seed=2),
        ]

    function = Partitioned.of(
        fz.functions.trace(both, *args(), values(4, 8), values(1).sum())
    ).as_function()
    mine, eager = args(), args()
    for fn, given in ((function, mine), (two, eager)):
        out, total = fn(*given)
        (out.sum() + total).backward()
    assert bits([t.grad for t in mine[:2]]) == bits([t.grad for t in eager[:2]])
    assert mine[2].grad is None


def test_as_function_trains_a_module():
    weight, other = nn.Parameter(values(6, 8)), nn.Parameter(values(6, 8))
    bias = values(6, seed=2)
    function = Partitioned.of(fz.functions.trace(joint, *primals(), values(4, 8))).as_function()
    for i in range(3):
        x = values(4, 8, seed=i)
        for fn, p in ((function, weight), (net, other)):
            fn(x, p, bias).pow(2).sum().backward()
            with torch.no_grad():
                p -= 0.1 * p.grad
            p.grad = None
    assert bits([weight.detach()]) == bits([other.detach()])


def _writes(x, t):
    out = x.sin()
    (g,) = torch.autograd.grad(out, (x,), t)
    t.add_(1)
    return out, g


def _too_few_tangents(x):
    out = x.sin().sum()
    return out, *torch.autograd.grad(out, (x,))


def _reads_a_tangent(x, t):
    out = (x * t).sin()
    return out, *torch.autograd.grad(out, (x,), t)


CONTRACTS = {
    _writes: "a program that changes its inputs is no function with a backward",
    _too_few_tangents: "a joint program takes (*primals, *tangents) and returns (*results, *gradients), a tangent per "
    "result and a gradient or None per primal: this one takes 1 arguments and returns 1 results of its forward, then 1 "
    "of its backward",
    _reads_a_tangent: "the forward reads a tangent: there is none before backward",
}


@pytest.mark.parametrize("fn", CONTRACTS, ids=lambda fn: fn.__name__.strip("_"))
def test_as_function_refuses(fn):
    args = [values(4).requires_grad_(), values(4, seed=1).abs()][: fn.__code__.co_argcount]
    parts = Partitioned.of(fz.functions.trace(fn, *args))
    with pytest.raises(PassError) as error:
        parts.as_function()
    assert str(error.value) == CONTRACTS[fn]


def test_as_function_refuses_numbers_and_what_is_no_argument():
    parts = Partitioned.of(fz.functions.trace(joint, *primals(), values(4, 8)))
    program = parts.program
    program.value_guards = (ValueGuard(0, 1.0, "here"),)
    with pytest.raises(PassError) as error:
        parts.as_function()
    assert (
        str(error.value)
        == "a program that depends on a number that Python read is no function with a backward"
    )
    program.value_guards = ()
    program.inputs = (replace(program.inputs[0], source=Captured(values(4))), *program.inputs[1:])
    with pytest.raises(PassError) as error:
        parts.as_function()
    assert str(error.value) == "`x` is no argument: trace a function of tensors for this"


def test_as_function_refuses_gradients_that_are_neither_tensor_nor_none():
    program = fz.functions.trace(joint, *primals(), values(4, 8))
    parts = Partitioned.of(program)
    parts.program.outputs = (*program.outputs[:3], Constant(1))
    with pytest.raises(PassError) as error:
        parts.as_function()
    assert (
        str(error.value)
        == "every result is a tensor of its own, every gradient one or None: clone the others"
    )


def test_refuses_a_graph_that_returns_a_constant():
    program = passes.run(fz.functions.trace(joint, *primals(), values(4, 8)), "partition")
    (output,) = program.graph.find_nodes(op="output")
    output.args = ((*output.args[0], 3),)
    with pytest.raises(PassError) as error:
        Partitioned.of(program)
    assert str(error.value) == (
        "the graph returns 3, which no op makes: return values of nodes, and keep constants in `program.outputs`"
    )


# -- refuses ---------------------------------------------------------------------------------------


def test_refuses_a_program_without_a_backward():
    with pytest.raises(PassError) as error:
        passes.run(fz.functions.trace(lambda x: x.sin(), values(4)), "partition")
    assert str(error.value) == (
        "nothing in this program ran in a backward, so there is no boundary to partition it at: capture or trace a "
        "function that calls `backward()` or `torch.autograd.grad`"
    )


def test_refuses_microbatches():
    def step(x: Tensor, w: Tensor) -> Tensor:
        first = torch.autograd.grad((x @ w).relu().sum(), (w,))[0]
        return first + torch.autograd.grad((x * 2 @ w).relu().sum(), (w,))[0]

    with pytest.raises(PassError) as error:
        passes.run(
            fz.functions.trace(step, values(4, 8), values(8, 8).requires_grad_()), "partition"
        )
    assert str(error.value) == (
        "`mul` runs in a forward after `expand` ran in a backward: forwards and backwards alternate, as with several "
        "microbatches, and there is no one boundary to partition at; partition a step with one forward and one backward"
    )


def test_refuses_a_later_stage():
    program = passes.run(fz.functions.trace(joint, *primals(), values(4, 8)), "partition")
    program.stage = "INPLACE"
    with pytest.raises(PassError) as error:
        Partitioned.of(program)
    assert str(error.value) == (
        "a program at stage INPLACE cannot be made into two graphs: partition it before the passes that come after"
    )


# -- FSDP2 -----------------------------------------------------------------------------------------


def _fsdp(reshard: bool) -> tuple[list[str], str, bool]:
    """What differs from eager; what is saved; whether both graphs give the bits of the one."""
    build = models.wrapped(reshard_after_forward=reshard)
    verdict = compare_twins(build, steps.plain, steps.pairs(), passes="partition")
    model, optimizer = build()
    step = fz.capture(steps.plain(model, optimizer))
    for batch in steps.pairs(4):
        step(*batch)
    program = step.program
    assert program is not None
    leaves = steps.pairs(1)[0]
    call = program.resolve(list(leaves))
    assert not isinstance(call, str), call
    parts = Partitioned.of(program)
    same = bits(parts.run(call.inputs)) == bits(list(program.run(list(call.inputs))))
    return verdict.differences, str(parts), same and verdict.replays > 0


@pytest.mark.parametrize("reshard", [True, False])
def test_an_fsdp_step_replays_bit_for_bit(reshard):
    for differences, table, same in run_on_ranks(_fsdp, reshard, world=2):
        assert differences == [] and same
        assert "\n  t" not in table  # the parameter is saved, and not its transpose
