"""`bucket_reduces`: neighbours merged where no bit changes, copies dropped; on real ranks bit for bit as eager."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import passes
from functionalize.passes.bucket_reduces import BucketReduces
from functionalize.passes.patterns import collectives
from tests.fsdp.features import FEATURES
from tests.passes.chains import (
    all_reduced,
    aten,
    feature,
    functional,
    reduce,
    same_bits,
    traced,
    unshard,
)
from tests.passes.helpers import graph_text
from tests.ranks import run_on_ranks

w, b = torch.ones(6, 8), torch.ones(6)
MERGE = BucketReduces(mb=1)


def two(x, y, **options):
    return [t + 1 for t in (*reduce(x * 2, y * 2, **options), *reduce(x * 3, **options))]


def sent(program) -> list[str]:
    return [each.kind for each in collectives(program.graph)]


# -- fires -----------------------------------------------------------------------------------------


def test_neighbours_become_one_with_aligned_shards(expect):
    n, after = traced(two, w, b, each=MERGE)
    assert n == 1
    expect("merged", after.print_readable(False))


def test_casts_stay(expect):
    def fn(x, y):
        packed = [aten._chunk_cat.default([g, g], 0, 2).float().view(-1) for g in (x, y)]
        done = [functional.reduce_scatter_tensor(p, "sum", 2, "0") for p in packed]
        return [functional.wait_tensor(each) + 1 for each in done]

    n, after = traced(fn, w.bfloat16(), b.bfloat16(), each=MERGE)
    assert n == 1
    expect("cast", after.print_readable(False))


def test_a_single_gradient_is_not_packed(expect):
    n, after = traced(lambda g: reduce(g * 2), w, each=BucketReduces())
    assert n == 1
    expect("single", after.print_readable(False))


def test_a_shard_that_is_handed_out_stays_a_tensor_of_its_own():
    def fn(x, y):
        first, second = reduce(x * 2), reduce(y * 2)
        return first[0], second[0] + 1

    n, after = traced(fn, w, b, each=MERGE)
    assert n == 1
    assert len(after.graph.find_nodes(op="call_function", target=aten.clone.default)) == 1


def test_across_all_gathers():
    def fn(x, y):
        first = reduce(x * 2, x)
        (full,) = unshard(y)
        return [t + 1 for t in (*first, *reduce(full, full))]

    args = w, b
    assert len(sent(traced(fn, *args, each=MERGE)[1])) == 3
    n, after = traced(fn, *args, each=BucketReduces(mb=1, across=True))
    assert n == 1
    assert sent(after) == ["all_gather_into_tensor", "reduce_scatter_tensor"]


def test_minima_of_many_ranks_and_integers_are_exact():
    assert traced(lambda x, y: two(x, y, op="min", world=3), w, b, each=MERGE)[0] == 1
    ints = w.int(), b.int()
    assert traced(lambda x, y: two(x, y, op="sum", world=3), *ints, each=MERGE)[0] == 1


def test_on_a_graph_module():
    def fn(x, y):
        packed = [aten._chunk_cat.default([g, g], 0, 2).view(-1) for g in (x, y)]
        done = [functional.reduce_scatter_tensor(p, "sum", 2, "0") for p in packed]
        return [functional.wait_tensor(each) + 1 for each in done]

    gm = make_fx(fn, tracing_mode="fake")(w, b)
    assert passes.on_graph_module("bucket_reduces{mb=1}")(gm, [w, b]) is gm
    assert graph_text(gm).count("= _c10d_functional.reduce_scatter") == 1


# -- refuses ---------------------------------------------------------------------------------------


def unmerged(fn, *args, each=MERGE) -> bool:
    n, after = traced(fn, *args, each=each)
    return n == 0 and sent(after).count("reduce_scatter_tensor") == 2


def test_refuses_without_a_size_and_above_it():
    def fn(x, y):
        return [t + 1 for t in (*reduce(x, y), *reduce(y, x))]

    assert unmerged(fn, w, b, each=BucketReduces())
    assert unmerged(fn, w, b, each=BucketReduces(mb=400 / (1 << 20)))


def test_refuses_sums_of_many_ranks():
    def fn(x, y):
        return [t + 1 for t in (*reduce(x, y, world=3), *reduce(y, x, world=3))]

    assert unmerged(fn, w, b)
    n, after = traced(fn, w, b, each=BucketReduces(mb=1, rounding=True))
    assert (n, sent(after)) == (1, ["reduce_scatter_tensor"])


def test_refuses_an_all_reduce_over_ranks_it_cannot_count():
    def fn(x, y):
        return [t + 1 for t in (*all_reduced(x), *all_reduced(y))]

    assert unmerged(fn, w, b)
    assert not unmerged(fn, w, b, each=BucketReduces(mb=1, rounding=True))


@pytest.mark.parametrize(
    "options", [{"op": "sum"}, {"group": "1"}, {"world": 1}], ids=["op", "group", "world"]
)
def test_refuses_another_kind(options):
    def fn(x, y):
        return [t + 1 for t in (*reduce(x, y), *reduce(y, x, **options))]

    assert unmerged(fn, w, b)


def test_refuses_another_dtype():
    def fn(x, y):
        return [t + 1 for t in (*reduce(x, y), *reduce(y.double(), x.double()))]

    assert unmerged(fn, w, b)


def test_refuses_a_shard_that_the_next_one_needs():
    def fn(x, y):
        first, _ = reduce(x, y)
        return [t + 1 for t in reduce(first.repeat(2, 1), x)]

    assert unmerged(fn, w, b)


def test_refuses_across_another_collective():
    def fn(x, y):
        first = reduce(x, y)
        norm = functional.wait_tensor(functional.all_reduce(y.sum(), "sum", "0"))
        return [t + norm for t in (*first, *reduce(y, x))]

    assert unmerged(fn, w, b, each=BucketReduces(mb=1, across=True))


def test_refuses_a_buffer_that_is_read_elsewhere():
    def fn(x, y):
        packed = aten._chunk_cat.default([x], 0, 2).view(-1)
        shard = functional.wait_tensor(functional.reduce_scatter_tensor(packed, "sum", 2, "0"))
        return shard + 1, packed.sum()

    assert traced(fn, w, b, each=MERGE)[0] == 0


def test_refuses_a_single_gradient_that_does_not_divide():
    def fn(x):
        packed = aten._chunk_cat.default([x], 0, 4).view(-1)
        done = functional.reduce_scatter_tensor(packed, "sum", 4, "0")
        return functional.wait_tensor(done) + 1

    assert traced(fn, w, each=BucketReduces())[0] == 0
    assert traced(fn, w.t()[:4], each=BucketReduces())[0] == 0  # nor one in another order


# -- on ranks --------------------------------------------------------------------------------------

PIPELINE = "bucket_reduces{mb=1, across=true}"


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("blocks_and_root", 1),
        ("bf16", 1),
        ("kept_gradients", 1),
        ("clip_grad_norm", 1),
        ("optimizer_in_backward", 3),
    ],
)
def test_equal_to_eager(name, left):
    for found, replays, kinds, _ in run_on_ranks(feature, name, PIPELINE):
        assert found == []
        assert replays >= 5
        assert kinds["reduce_scatter_tensor"] == left


@pytest.mark.parametrize(("name", "left"), [("uneven_shards", 3), ("hsdp_bf16", 1)])
def test_equal_to_eager_on_four_ranks(name, left):
    """Four ranks in one group add up in an order that depends on the position; two and two do not."""
    for found, replays, kinds, _ in run_on_ranks(
        feature, name, PIPELINE, world=FEATURES[name].world
    ):
        assert found == []
        assert replays >= 5
        assert kinds["reduce_scatter_tensor"] == left


def one_of_each(rank_seed: int) -> bool:
    torch.manual_seed(rank_seed + torch.distributed.get_rank())
    return same_bits(two, [torch.randn(6, 8), torch.randn(6)], "bucket_reduces{mb=1}")


def test_two_ranks_give_the_same_bits():
    assert run_on_ranks(one_of_each, 3) == [True, True]
