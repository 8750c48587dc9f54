"""`Liveness` on small graphs, and against what the allocator sees of the boxed runner, node by node."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import record_function

import functionalize as fz
from benchmarks.allocations import allocations, count_everything, counted
from functionalize.cost.liveness import Liveness
from functionalize.passes.metadata import set_value
from functionalize.program.program import Program
from functionalize.run.boxed import boxed
from tests.discharge.eager import one_thread
from tests.ranks import run_on_ranks
from tests.steps import make_step

aten = torch.ops.aten
MARK = "the graph"
ROW = 64 * 64 * 4  # bytes of the tensors below


def liveness(fn: Callable[..., Any], *args: Tensor) -> Liveness:
    program = fz.functions.trace(fn, *args)
    program.describe()
    return Liveness(program.graph)


def x() -> Tensor:
    return torch.arange(64 * 64, dtype=torch.float32).view(64, 64)


# -- small graphs ----------------------------------------------------------------------------------


def test_inputs_and_constants_are_not_counted():
    live = liveness(lambda a: a.t().sum() * 1, x())
    assert live.peak == 2 * 4
    assert [s.nbytes for s in live.storages] == [4, 4]


def test_a_storage_counts_once_however_many_views():
    live = liveness(lambda a: (a + 1).t().view(-1)[5:].sum(), x().t())
    assert [s.nbytes for s in live.storages] == [ROW, 4]
    base = live.storages[0]
    assert live.nodes[base.first].target is aten.add.Tensor
    assert live.nodes[base.last].target is aten.sum.default
    assert [n.name for n in base.nodes[:2]] == ["add", "t"]


def test_a_value_is_live_from_the_node_that_makes_it_to_its_last_use():
    def f(a):
        b = a + 1
        c = b * 2
        d = c.sum()
        return d + b.sum()

    live = liveness(f, x())
    sizes = dict(zip((n.name for n in live.nodes), live.timeline, strict=True))
    assert sizes["add"] == ROW
    assert sizes["mul"] == sizes["sum_1"] - 4 == 2 * ROW
    assert sizes["sum_2"] == ROW + 8
    assert (live.peak, live.nodes[live.peak_at].name) == (2 * ROW + 4, "sum_1")


def test_results_are_live_to_the_end():
    live = liveness(lambda a: ((a + 1), (a * 2).sum()), x())
    assert live.timeline[-1] == ROW + 4


def test_a_list_is_live_with_its_items():
    """The runner frees the list after its last item was taken out: until then it holds them all."""

    def f(a):
        one, two = torch._foreach_mul([a, a], 2.0)
        total = one.sum()
        return total + two.sum()

    live = liveness(f, x())
    first, second = [s for s in live.storages if s.nbytes == ROW]
    assert live.nodes[first.first] is live.nodes[second.first]
    assert live.nodes[first.last].name == "sum_1" and live.nodes[second.last].name == "sum_2"


def test_another_order():
    def f(a):
        b = a + 1
        c = a + 2
        return b.sum() + c.sum()

    live = liveness(f, x())
    by_name = {n.name: n for n in live.nodes}
    names = [n.name for n in live.nodes]
    names.remove("add_1")
    names.insert(names.index("sum_1") + 1, "add_1")
    other = Liveness(live.graph, [by_name[name] for name in names])
    assert (live.peak, other.peak) == (2 * ROW + 4, ROW + 8)
    assert [n.name for n in other.nodes] == names


def gathered(coalesced: bool) -> fx.Graph:
    """A gather of a sum, an op beside it, then the wait."""
    c10d, graph = torch.ops._c10d_functional, fx.Graph()
    a = graph.placeholder("a")
    add = graph.call_function(aten.add.Tensor, (a, 1))
    if coalesced:
        gather = c10d.all_gather_into_tensor_coalesced.default
        start = graph.call_function(gather, ([add], 2, "0"))
        start = graph.call_function(operator.getitem, (start, 0))
    else:
        start = graph.call_function(c10d.all_gather_into_tensor.default, (add, 2, "0"))
    beside = graph.call_function(aten.sum.default, (a,))
    wait = graph.call_function(c10d.wait_tensor.default, (start,))
    total = graph.call_function(aten.sum.default, (wait,))
    graph.output((beside, total))
    with torch._subclasses.FakeTensorMode() as mode:
        a.meta["val"] = mode.from_tensor(x())
    for node in graph.nodes:
        if node.op == "call_function":
            set_value(node)
    return graph


@pytest.mark.parametrize("coalesced", [False, True])
def test_what_a_collective_reads_is_held_until_its_wait(coalesced):
    live = Liveness(gathered(coalesced))
    sent, whole = live.storages[:2]
    (wait,) = [n for n in live.nodes if n.target is torch.ops._c10d_functional.wait_tensor.default]
    assert (sent.nbytes, live.nodes[sent.first].target) == (ROW, aten.add.Tensor)
    assert sent.last == live.place[wait] - 1
    assert (whole.nbytes, whole.nodes[-1]) == (2 * ROW, wait)
    assert whole.last == live.place[wait] + 1


# -- against the allocator -------------------------------------------------------------------------


def seen(program: Program, replay: Callable[[], object]) -> list[tuple[fx.Node, int]]:
    """What the allocator counts at the end of every op of one replay, less what was live before the graph."""
    program.run = marked(program.run)  # type: ignore[method-assign]
    try:
        with counted() as count:
            replay()
    finally:
        del program.run
    (mark,) = [e for e in inner(count.tree) if e.name == MARK]
    nodes = [n for n in program.graph.nodes if hasattr(n.target, "_schema")]
    ops = list(outermost(mark.children))
    assert [e.name for e in ops] == [n.target._schema.name for n in nodes]
    events = [event for event, _ in allocations(count.tree)]
    times = [event.start_time_ns for event in events]

    def total(time: int) -> int:
        return int(events[bisect.bisect_right(times, time) - 1].typed[1].total_allocated)

    before = total(mark.start_time_ns)
    return [(n, total(e.end_time_ns) - before) for n, e in zip(nodes, ops, strict=True)]


def outermost(events: Any) -> Any:
    """The ops that no other op has called, inside of ranges or not."""
    for event in events:
        is_op = event.typed[0] == torch._C._profiler._EventType.TorchOp
        if is_op and event.typed[1].scope == torch._C._profiler.RecordScope.FUNCTION:
            yield event
        else:
            yield from outermost(event.children)


def marked(run: Callable[..., Any]) -> Callable[..., Any]:
    def marked_run(*args: Any) -> Any:
        with record_function(MARK):
            return run(*args)

    return marked_run


def inner(tree: Any) -> Any:
    stack = list(tree)
    while stack:
        event = stack.pop()
        yield event
        stack += event.children


def program_of(fn: Callable[..., Any], *args: Tensor) -> Program:
    program = fz.functions.trace(fn, *args)
    program.runner = boxed
    program.describe()
    return program


def lists_and_views(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    one, two = torch._foreach_add([a, b], 1.0)
    parts = (one @ two).split(16)
    norm, _, rstd = torch.native_layer_norm(torch.cat(parts[1:]), [64], None, None, 1e-5)
    b.mul_(norm.sum())
    top = (a * 3).topk(4)
    return a + rstd.sum(), top.values, torch.relu(two).t()[3]


def a_training_step(a: Tensor, w: Tensor) -> Tensor:
    h = torch.relu(a @ w)
    loss = (h @ w.t()).pow(2).mean()
    grad = torch.autograd.grad(loss, [w])[0]
    with torch.no_grad():
        w.sub_(grad * 0.1)
    return loss


@pytest.fixture
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("fn", [lists_and_views, a_training_step])
def test_the_timeline_is_what_the_allocator_sees(fn, on_one_thread):
    a, b = x(), x().clone().requires_grad_(fn is a_training_step)
    program = program_of(fn, a, b)
    live = Liveness(program.graph)
    program(a, b)
    found = seen(program, lambda: program(a, b))
    assert found
    differ = [(n.name, got, live.timeline[live.place[n]]) for n, got in found]
    assert [each for each in differ if each[1] != each[2]] == []


REPLAYS, AGREE = 60, 0.4  # at most; the share of ops at which no buffer of gloo is left


def fsdp_differences() -> list[int]:
    """What the allocator sees beyond `Liveness` at each op, in units of the largest gathered buffer, rounded up.

    Gloo's threads may be late with what they free, which only adds: at each op the least of several replays counts,
    until enough ops agree. What is left of the replay before would count as live before the step, and only take away:
    such a replay does not count.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    # The default pipeline waits for each collective at once. Else the runner adds waits on gloo, and frees inputs.
    step = fz.capture(make_step(model, optimizer), passes="default")

    count_everything()
    try:
        while step.stats.replays < 2:
            step(torch.randn(4, 32))
        step.program.describe()
        live = Liveness(step.program.graph)
        gathers = [n for n in live.nodes if "all_gather" in n.name]
        buffer = max(storage.nbytes for n in gathers for storage in live.of[n])
        batch, found = torch.randn(4, 32), []
        for _ in range(REPLAYS):
            at = seen(step.program, lambda: step(batch))
            beyond = [-(-(got - live.timeline[live.place[n]]) // buffer) for n, got in at]
            if min(beyond) >= 0:
                found = [*map(min, beyond, found or beyond)]
            done = torch.tensor(float(len(found) > 0 and found.count(0) > len(found) * AGREE))
            dist.all_reduce(done, dist.ReduceOp.MIN)
            if done:
                break
    finally:
        count_everything(False)
    return found


def test_the_timeline_of_an_fsdp2_step_is_what_the_allocator_sees():
    """But for gloo's own buffers, which its threads free when they come to it."""
    for beyond in run_on_ranks(fsdp_differences):
        assert len(beyond) > 150
        assert min(beyond) == 0
        assert beyond.count(0) > len(beyond) * AGREE
