"""`patterns`: the chains that FSDP2 leaves are found, with their pieces and parts; others are not returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import functionalize as fz
from functionalize.ir.barrier import BARRIER
from functionalize.passes import patterns
from tests.fsdp.features import FEATURES
from tests.fsdp.twins import run
from tests.passes.chains import all_reduced, aten, functional, orders, reduce, unshard
from tests.ranks import run_on_ranks

w, b = torch.ones(6, 8), torch.ones(6)


def graph_of(fn: Any, *args: torch.Tensor) -> fx.Graph:
    return fz.functions.trace(fn, *args).graph_module.graph


def names(nodes: Any) -> list[str | None]:
    return [None if node is None else node.name for node in nodes]


def test_a_gather():
    graph = graph_of(lambda w, b: unshard(w.bfloat16(), b.bfloat16())[0] + 1, w, b)
    (found,) = patterns.gathers(graph)
    assert names(found.shards) == ["w", "b"]
    assert names(found.pieces) == ["view", "_to_copy_1"]
    assert names(found.feed) == ["_to_copy", "view", "_to_copy_1", "cat"]
    assert names(found.unpack) == ["wait_tensor", "view_1", "split_with_sizes_copy", "getitem"]
    assert names(found.parts) == ["getitem", None]
    assert (found.group, found.world, found.dtype, found.nbytes) == ("0", 2, torch.bfloat16, 216)
    assert found.pack is not None and found.pack.name == "cat"


def test_gathers_of_the_same_shards_have_one_key():
    def fn(w, b):
        return [t.sum() for t in (*unshard(w), *unshard(w), *unshard(b))]

    first, second, third = (each.key for each in patterns.gathers(graph_of(fn, w, b)))
    assert first == second != third


def test_a_coalesced_gather():
    def fn(w, b):
        done = functional.all_gather_into_tensor_coalesced([w, b], 2, "0")
        return [functional.wait_tensor(each).sum() for each in done]

    (found,) = patterns.gathers(graph_of(fn, w, b))
    assert found.parts == found.waits == found.unpack
    assert (found.pack, found.nbytes) == (None, 432)


def test_a_reduction_and_its_all_reduce():
    graph = graph_of(lambda w: [t + 1 for t in all_reduced(w)], w)
    (found,) = patterns.reduces(graph)
    assert names(found.grads) == ["w", "add"]
    assert names(found.feed) == ["_chunk_cat", "view"]
    assert found.all_reduce is not None and found.result is found.all_reduce_wait
    assert names(found.parts) == ["slice_1", "slice_2"]
    assert (found.op, found.group, found.world, found.nbytes) == ("avg", "0", 2, 384)
    (plain,) = patterns.reduces(graph_of(lambda w: [t + 1 for t in reduce(w)], w))
    assert plain.all_reduce is None and plain.result is plain.wait


def test_other_chains_are_not_returned():
    def read_twice(w, b):
        cat = torch.cat([w.view(-1), b])
        whole = functional.wait_tensor(functional.all_gather_into_tensor(cat, 2, "0"))
        return whole.sum(), *aten.split_with_sizes_copy.default(whole.view(2, -1), [48, 6], 1)

    def other_sizes(w, b):
        cat = torch.cat([w.view(-1), b])
        whole = functional.wait_tensor(functional.all_gather_into_tensor(cat, 2, "0"))
        return aten.split_with_sizes_copy.default(whole.view(2, -1), [50, 4], 1)

    def unwaited(w, b):
        return functional.all_gather_into_tensor(w, 2, "0")

    def half_waited(w, b):
        done = functional.all_gather_into_tensor_coalesced([w, b], 2, "0")
        return functional.wait_tensor(done[0]) + 1

    for fn in (read_twice, other_sizes, unwaited, half_waited):
        assert patterns.gathers(graph_of(fn, w, b)) == []

    def unwaited_reduction(w):
        return functional.reduce_scatter_tensor(w, "sum", 2, "0")

    assert patterns.reduces(graph_of(unwaited_reduction, w)) == []


def test_orders():
    graph = graph_of(lambda w, b: (*unshard(w, b), *reduce(w, group="1", op="sum")), w, b)
    graph.call_function(BARRIER, ("0", []))
    float32 = (torch.float32,)
    assert orders(graph) == {
        "0": [
            ("all_gather_into_tensor", "0", None, float32, ((54,),)),
            ("barrier", "0", None, (), ()),
        ],
        "1": [("reduce_scatter_tensor", "1", "sum", float32, ((48,),))],
    }


def found_in(name: str) -> tuple[list[Any], list[Any], Any]:
    """On a rank: what is found in a captured step."""
    row = FEATURES[name]
    step: Any = fz.capture(row.make_step(*row.build()))
    for batch in row.batches():
        run(step, batch)
    graph = step.program.graph_module.graph
    gathers = [(len(g.shards), [p is None for p in g.parts]) for g in patterns.gathers(graph)]
    return gathers, [len(r.parts) for r in patterns.reduces(graph)], orders(graph)


def test_all_chains_of_a_step_are_found_alike_on_all_ranks():
    first, *others = run_on_ranks(found_in, "uneven_shards", world=4)
    gathers, reductions, order = first
    assert [n for n, _ in gathers] == [2, 4, 4, 4, 4]
    assert gathers[-1][1] == [
        True,
        True,
        False,
        True,
    ]  # the first layer needs no gradient of its input
    assert reductions == [4, 2, 4]
    assert all(each[2] == order for each in others)
    assert others[-1][1] == [2, 0, 2]  # the last rank has empty shards, which nobody reads
