"""`bucket_gathers`: copies dropped, neighbours merged, large ones split; on real ranks bit for bit as eager."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import passes
from functionalize.passes.bucket_gathers import BucketGathers
from tests.fsdp.features import FEATURES
from tests.passes.chains import aten, feature, functional, orders, traced, unshard
from tests.passes.helpers import graph_text
from tests.ranks import run_on_ranks

KB = 1 / 1024  # of a MiB
w, b = torch.ones(64, 8), torch.ones(8)
x = torch.ones(4, 8)


def kinds(program) -> list[str]:
    """What is sent, in order: `kind(sizes)`."""
    found = orders(program.graph)
    return [f"{kind}{sizes}" for each in found.values() for kind, _, _, _, sizes in each]


def layer(x, w, b):
    full_w, full_b = unshard(w, b)
    return x @ full_w.t(), full_b.sum()


# -- fires -----------------------------------------------------------------------------------------


def test_large_pieces_travel_without_copies(expect):
    n, after = traced(layer, x, w, b, each=BucketGathers(apart_kb=1))
    assert n == 1
    expect("apart", after.print_readable(False))


def test_small_pieces_share_a_buffer(expect):
    def fn(x, w, b, c):
        full_w, full_b, full_c = unshard(w, b, c)
        return x @ full_w.t() + full_b.sum(), full_c + 1

    n, after = traced(fn, x, w, b, b + 1, each=BucketGathers(apart_kb=1))
    assert n == 1
    expect("shared", after.print_readable(False))


def test_one_piece_needs_no_buffer():
    def fn(w):
        return unshard(w)[0].sum()

    n, after = traced(fn, w, each=BucketGathers())
    assert n == 1
    assert kinds(after) == ["all_gather_into_tensor((512,),)"]
    assert not after.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert not after.graph.find_nodes(op="call_function", target=aten.split_with_sizes_copy.default)


def test_a_part_that_nobody_reads_is_waited_for_and_not_unpacked():
    def fn(x, w, b, c):
        return x @ unshard(w, b, c)[0].t()

    n, after = traced(fn, x, w, b, b + 1, each=BucketGathers(apart_kb=1))
    assert n == 1
    waits = after.graph.find_nodes(op="call_function", target=functional.wait_tensor.default)
    assert [len(wait.users) for wait in waits] == [1, 0]
    assert not after.graph.find_nodes(op="call_function", target=aten.split_with_sizes_copy.default)


def test_neighbours_are_merged_up_to_a_size(expect):
    def fn(x, w, b, v, c, u):
        first, bias = unshard(w, b)
        h = x @ first.t() + bias.sum()
        second, more = unshard(v, c)
        h = h @ second.t() + more.sum()
        (third,) = unshard(u)
        return h.sum() + third.sum()

    args = (x, w, b, torch.ones(4, 128), b + 1, torch.ones(2048))
    n, after = traced(fn, *args, each=BucketGathers(mb=9 * KB))
    assert n == 2  # two are merged, the third loses its copies
    expect("merged", after.print_readable(False))


def test_one_that_is_larger_is_split():
    def fn(*shards):
        return [part.sum() for part in unshard(*shards)]

    shards = [torch.ones(n) for n in (16, 16, 16, 200, 16)]
    n, after = traced(fn, *shards, each=BucketGathers(mb=0.25 * KB, split=True))
    assert n == 4
    assert kinds(after) == [
        "all_gather_into_tensor((32,),)",
        "all_gather_into_tensor((16,),)",
        "all_gather_into_tensor((200,),)",
        "all_gather_into_tensor((16,),)",
    ]
    n, after = traced(fn, *shards, each=BucketGathers(mb=0.25 * KB))
    assert (n, len(kinds(after))) == (0, 1)


def test_across_reductions():
    def fn(x, w, v):
        (first,) = unshard(w)
        h = x @ first.t()
        norm = functional.wait_tensor(functional.all_reduce(h.sum(), "sum", "0"))
        (second,) = unshard(v)
        return h @ second.t() + norm

    args = (x, w, torch.ones(4, 128))
    assert len(kinds(traced(fn, *args, each=BucketGathers(mb=1))[1])) == 3
    n, after = traced(fn, *args, each=BucketGathers(mb=1, across=True))
    assert n == 1
    assert [each.partition("(")[0] for each in kinds(after)] == [
        "all_gather_into_tensor",
        "all_reduce",
    ]


def test_on_a_graph_module():
    gm = make_fx(layer, tracing_mode="fake")(x, w, b)
    assert passes.on_graph_module("bucket_gathers{apart_kb=1}")(gm, [x, w, b]) is gm
    assert "all_gather_into_tensor_coalesced" in graph_text(gm)


# -- refuses ---------------------------------------------------------------------------------------


def test_refuses_what_is_as_wanted():
    assert traced(layer, x, w, b, each=BucketGathers(apart_kb=None))[0] == 0
    assert traced(layer, x, w, b, each=BucketGathers(apart_kb=64))[0] == 0  # all pieces are small


def test_refuses_a_piece_without_elements():
    def fn(w, e):
        return unshard(w, e)[0].sum()

    assert traced(fn, w, torch.ones(0), each=BucketGathers(apart_kb=1))[0] == 0


def test_refuses_a_whole_that_is_read_in_another_way():
    def fn(w, b):
        cat = torch.cat([w.view(-1), b])
        whole = functional.wait_tensor(functional.all_gather_into_tensor(cat, 2, "0"))
        return whole.sum(), *aten.split_with_sizes_copy.default(whole.view(2, -1), [512, 8], 1)

    assert traced(fn, w, b, each=BucketGathers(apart_kb=1))[0] == 0


def test_refuses_one_that_is_coalesced():
    def fn(w, v):
        out = functional.all_gather_into_tensor_coalesced([w, v], 2, "0")
        return [functional.wait_tensor(each).sum() for each in out]

    assert traced(fn, w, w + 1, each=BucketGathers(mb=1))[0] == 0


def merged(fn, *args) -> bool:
    """Whether two gathers of two shards each become one."""
    _, after = traced(fn, *args, each=BucketGathers(mb=1, apart_kb=None))
    return len(kinds(after)) < 2


@pytest.mark.parametrize(
    ("why", "second"),
    [
        ("nothing", lambda w, v: unshard(v, v + 0)),
        ("dtype", lambda w, v: unshard(v.bfloat16(), v.bfloat16())),
        ("group", lambda w, v: unshard(v, v + 0, group="1")),
        ("world", lambda w, v: unshard(v, v + 0, world=4)),
    ],
)
def test_refuses_to_merge_another_kind_or_computed_shards(why, second):
    def fn(w, v):
        return [t.sum() for t in (*unshard(w, w.view(-1)), *second(w, v))]

    assert not merged(fn, b, b + 1)  # even of one kind: v + 0 is computed
    if why == "nothing":
        assert merged(lambda w, v: [t.sum() for t in (*unshard(w), *unshard(v))], b, b + 1)


def test_refuses_to_merge_the_same_shards():
    assert not merged(lambda w: [t.sum() for t in (*unshard(w), *unshard(w))], b)


def test_refuses_to_merge_across_another_collective():
    def fn(w, v):
        (first,) = unshard(w)
        other = functional.wait_tensor(functional.broadcast(first, 0, "0"))
        return first + other, unshard(v)[0].sum()

    _, after = traced(fn, b, b + 1, each=BucketGathers(mb=1, across=True))
    assert len(kinds(after)) == 3


# -- on ranks --------------------------------------------------------------------------------------

ROWS = {
    "apart": ("bucket_gathers{apart_kb=0.2}", "all_gather_into_tensor_coalesced"),
    "merged": ("bucket_gathers{mb=0.003, across=true, apart_kb=none}", "all_gather_into_tensor"),
    "split": (
        "elide_copies,bucket_gathers{mb=0.0005, split=true, across=true, apart_kb=0.1}",
        "all_gather_into_tensor_coalesced",
    ),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", ["blocks_and_root", "bf16", "shard_1", "gathered_in_int8"])
def test_equal_to_eager(name, row):
    pipeline, kind = ROWS[row]
    for found, replays, collectives, sent in run_on_ranks(feature, name, pipeline):
        assert found == []
        assert replays >= 5
        assert row != "apart" or name == "gathered_in_int8" or kind in collectives
        assert row != "merged" or name == "gathered_in_int8" or len(sent) < 8


@pytest.mark.parametrize("name", ["uneven_shards", "hsdp_bf16"])
def test_equal_to_eager_on_four_ranks(name):
    pipeline = "bucket_gathers{mb=0.003, across=true, apart_kb=0.1}"
    ranks = run_on_ranks(feature, name, pipeline, world=FEATURES[name].world)
    assert [found for found, _, _, _ in ranks] == [[]] * 4
    assert all(replays >= 5 for _, replays, _, _ in ranks)
    assert len({tuple(sorted(collectives.items())) for _, _, collectives, _ in ranks}) == 1
