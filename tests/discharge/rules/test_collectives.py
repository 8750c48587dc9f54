"""Collectives on two gloo ranks: replayed like eager, and with a rank that runs eagerly."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import functionalize as fz
from functionalize.discharge.rules.collectives import check_known_collective
from functionalize.errors import FunctionalizeError
from functionalize.util.torch_release import minor_of
from tests.ranks import run_on_ranks

FUNCTIONAL = torch.ops._c10d_functional
GLOO_OF_2_12 = minor_of(torch.__version__) >= (2, 12)


def all_gather(x: Tensor) -> Any:
    out = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(out, x)
    return out


def all_gather_into_columns(x: Tensor) -> Any:
    out = x.new_zeros(4, 2)
    dist.all_gather(list(out.unbind(1)), x)
    return out


def all_gather_numbers(x: Tensor) -> Any:
    out = [torch.empty(()) for _ in range(2)]
    dist.all_gather(out, x.sum())
    return out


def all_gather_in_place(x: Tensor) -> Any:
    out = x.new_zeros(2, 4)
    out[dist.get_rank()] = x
    dist.all_gather(list(out.unbind()), out[dist.get_rank()])
    return out


def all_gather_into_tensor(x: Tensor) -> Any:
    out = x.new_empty(8)
    dist.all_gather_into_tensor(out, x)
    return out


def reduce_scatter_tensor(x: Tensor) -> Any:
    out = x.new_empty(2)
    dist.reduce_scatter_tensor(out, x)
    return out


def broadcast(x: Tensor) -> Any:
    out = x.clone() if dist.get_rank() == 1 else torch.empty_like(x)
    dist.broadcast(out, 1)
    return out


def broadcast_of_an_argument(x: Tensor) -> Any:
    dist.broadcast(x, 0)
    return x * 2


def broadcast_into_a_grown_storage(x: Tensor) -> Any:
    """What a module that is unsharded by broadcasts does: only the root has written it."""
    out = x.clone()
    fz.functions.resize_storage_bytes_(out, 0)
    fz.functions.resize_storage_bytes_(out, 16)
    if dist.get_rank() == 0:
        out.copy_(x)
    dist.broadcast(out, 0)
    return out * 1


def all_reduce(x: Tensor) -> Any:
    out = x.clone()
    dist.all_reduce(out, dist.ReduceOp.MAX)
    return out


def all_reduce_transposed(x: Tensor) -> Any:
    """The other rank may send the memory as it lies."""
    out = torch.arange(6.0).view(2, 3).mul(x[0]).t()
    dist.all_reduce(out)
    return out


def all_reduce_bits(x: Tensor) -> Any:
    out = x.round().long()
    dist.all_reduce(out, dist.ReduceOp.BOR)
    return out


def all_reduce_later(x: Tensor) -> Any:
    out = x.clone()
    work = dist.all_reduce(out, async_op=True)
    y = x * 2
    work.wait()
    return out + y


def all_to_all_single(x: Tensor) -> Any:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def all_to_all_single_uneven(x: Tensor) -> Any:
    rank = dist.get_rank()
    sent, received = [[1, 3], [2, 2]][rank], [[1, 2], [3, 2]][rank]
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x, received, sent)
    return out


def all_to_all_single_of_rows(x: Tensor) -> Any:
    out = x.new_empty(2, 2)
    dist.all_to_all_single(out, x.view(4, 1))
    return out


def all_to_all(x: Tensor) -> Any:
    out = [x.new_empty(2) for _ in range(2)]
    dist.all_to_all(out, list(x.chunk(2)))
    return out


def coalesced_all_gathers(x: Tensor) -> Any:
    out = [x.new_empty(8), x.new_empty(4)]
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(out[0], x)
        dist.all_gather_into_tensor(out[1], x[:2])
    return out


def coalesced_reduce_scatters(x: Tensor) -> Any:
    out = [x.new_empty(2), x.new_empty(1)]
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(out[0], x)
        dist.reduce_scatter_tensor(out[1], x[2:])
    return out


def coalesced_all_reduces(x: Tensor) -> Any:
    out = [x.clone(), x.sum()]
    with dist._coalescing_manager():
        dist.all_reduce(out[0])
        dist.all_reduce(out[1])
    return out


def barrier(x: Tensor) -> Any:
    out = x.sin()
    dist.barrier()
    dist.all_reduce(out)
    return out


def functional(x: Tensor) -> Any:
    group = dist.group.WORLD
    summed = funcol.all_reduce(x, "sum", group)
    gathered = funcol.all_gather_tensor(x, 0, group)
    return summed + 1, gathered + 1, funcol.broadcast(x, 1, group) + 1


def functional_in_place(x: Tensor) -> Any:
    out, name = x.clone(), dist.group.WORLD.group_name
    FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce_(out, "sum", name))
    FUNCTIONAL.wait_tensor(FUNCTIONAL.broadcast_(out, 0, name))
    return out


def functional_into_given(x: Tensor) -> Any:
    gathered, scattered, name = x.new_empty(8), x.new_empty(2), dist.group.WORLD.group_name
    work = FUNCTIONAL.all_gather_into_tensor_out(x, 2, name, out=gathered)
    FUNCTIONAL.wait_tensor(work)
    work = FUNCTIONAL.reduce_scatter_tensor_out(x, "sum", 2, name, out=scattered)
    FUNCTIONAL.wait_tensor(work)
    return gathered, scattered


def functional_coalesced(x: Tensor) -> Any:
    name = dist.group.WORLD.group_name
    both = [x.clone(), x[:2].clone()]
    for t in FUNCTIONAL.all_reduce_coalesced_(both, "sum", name):
        FUNCTIONAL.wait_tensor(t)
    gathered = FUNCTIONAL.all_gather_into_tensor_coalesced(both, 2, name)
    return both, [FUNCTIONAL.wait_tensor(t) for t in gathered]


def functional_waits(x: Tensor) -> Any:
    name = dist.group.WORLD.group_name
    made = [FUNCTIONAL.all_reduce(x, "sum", name), FUNCTIONAL.all_gather_into_tensor(x, 2, name)]
    waited = FUNCTIONAL.wait_tensors(made)
    return waited, [t + 1 for t in made]


def functional_waits_for_views(x: Tensor) -> Any:
    """As `AsyncCollectiveTensor` does, whose views wait for nothing."""
    gathered = FUNCTIONAL.all_gather_into_tensor(x, 2, dist.group.WORLD.group_name)
    part, other = gathered.view(2, -1)[1:], gathered.view(-1, 2)
    first = FUNCTIONAL.wait_tensor(part) + 1
    scattered = funcol.all_to_all_single(x, [2, 2], [2, 2], dist.group.WORLD)
    return first, other * 2, gathered - 1, scattered.view(2, 2).view(-1)[1:] + 1


def functional_with_gradients(x: Tensor) -> Any:
    leaf, group = x.clone().requires_grad_(), dist.group.WORLD
    gathered = funcol.all_gather_tensor_autograd(leaf, 0, group)
    moved = funcol.all_to_all_single_autograd(leaf, [2, 2], [2, 2], group)
    scattered = funcol.reduce_scatter_tensor_autograd(leaf * leaf, "sum", 0, group)
    if not GLOO_OF_2_12:  # refuses the gradient of `sum`, one number expanded
        scattered = scattered.sin()
    loss = gathered.square().sum() + moved.sin().sum() + scattered.sum()
    return loss.detach(), torch.autograd.grad(loss, [leaf])[0]


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    f.__name__: f
    for f in (
        all_gather,
        all_gather_into_columns,
        all_gather_numbers,
        all_gather_in_place,
        all_gather_into_tensor,
        reduce_scatter_tensor,
        broadcast,
        broadcast_of_an_argument,
        broadcast_into_a_grown_storage,
        all_reduce,
        all_reduce_transposed,
        all_reduce_bits,
        all_reduce_later,
        all_to_all_single,
        all_to_all_single_uneven,
        all_to_all_single_of_rows,
        *([all_to_all] if GLOO_OF_2_12 else []),  # "Backend gloo does not support alltoall"
        coalesced_all_gathers,
        coalesced_reduce_scatters,
        coalesced_all_reduces,
        barrier,
        functional,
        functional_in_place,
        functional_into_given,
        functional_coalesced,
        functional_waits_for_views,
        functional_with_gradients,
        *([functional_waits] if hasattr(FUNCTIONAL, "wait_tensors") else []),  # torch 2.15
    )
}


def inputs(step: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def run(name: str) -> tuple[list[str], int, str]:
    """Eager, then captured, then one rank each way; returns what differs, replays, the program."""
    fn, wrong = COLLECTIVES[name], []
    captured = fz.capture(fn)
    for step in range(8):
        x, y = inputs(step), inputs(step)
        expected = fn(x)
        alone = (
            step >= 6 and dist.get_rank() == step % 2
        )  # this rank runs eagerly, the other replays
        actual = fn(y) if alone else captured(y)
        leaves = torch.utils._pytree.tree_leaves
        pairs = zip(leaves((expected, x)), leaves((actual, y)), strict=True)
        wrong += [f"step {step}" for a, b in pairs if not torch.equal(a, b)]
    assert captured.program is not None
    return wrong, captured.stats.replays, captured.program.print_readable(print_output=False)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_replays_like_eager_and_beside_a_rank_that_runs_eagerly(name: str) -> None:
    for wrong, replays, program in run_on_ranks(run, name):
        assert wrong == []
        assert replays >= 4
        assert "c10d." not in program.replace("_c10d_functional.", "")


def verified(name: str) -> str:
    """The program of a captured function after passes, which verify it."""
    captured = fz.capture(COLLECTIVES[name], passes="default", allowance=None)
    for step in range(4):
        captured(inputs(step))
    assert captured.program is not None
    return str(captured.program.print_readable(False))


def test_a_wait_for_a_view_is_a_wait_for_the_result() -> None:
    for program in run_on_ranks(verified, "functional_waits_for_views"):
        waits = re.findall(r"wait_tensor\.default\((\w+)\)", program)
        assert waits == ["all_gather_into_tensor", "all_to_all_single"]


def run_in(how: str, names: list[str]) -> list[str]:
    """Through `trace` (on fakes) or in a live call; returns what differs from eager, and errors."""
    wrong = []
    for name in names:
        fn, x, y = COLLECTIVES[name], inputs(0), inputs(0)
        expected = fn(x)
        try:
            actual = (
                fz.functions.trace(fn, inputs(1))(y)
                if how == "trace"
                else fz.functions.functionalize_storage(fn)(y)
            )
        except FunctionalizeError as error:
            wrong.append(f"{name}: {error}")
            continue
        leaves = torch.utils._pytree.tree_leaves
        pairs = zip(leaves((expected, x)), leaves((actual, y)), strict=True)
        wrong += [name for a, b in pairs if not torch.equal(a, b)]
    return wrong


def test_traced_on_fakes() -> None:
    """Torch has no fake kernels for the coalesced ops of c10d: each is refused by its name."""
    coalesced = [name for name in COLLECTIVES if name.startswith("coalesced")]
    rest = [name for name in COLLECTIVES if name not in coalesced]
    assert run_on_ranks(run_in, "trace", rest) == [[], []]
    for messages in run_on_ranks(run_in, "trace", coalesced):
        assert [m.split()[1] for m in messages] == [
            "c10d.allgather_into_tensor_coalesced_.default",
            "c10d.reduce_scatter_tensor_coalesced_.default",
            "c10d.allreduce_coalesced_.default",
        ]


def test_in_a_live_call() -> None:
    into_resized = "broadcast_into_a_grown_storage"
    rest = [name for name in COLLECTIVES if name != into_resized]
    assert run_on_ranks(run_in, "live", rest) == [[], []]
    for (message,) in run_on_ranks(run_in, "live", [into_resized]):
        assert "c10d.broadcast_.default communicates into a storage that is resized" in message


# -- refusals --------------------------------------------------------------------------------------


def reduce(x: Tensor) -> Any:
    dist.reduce(x, 0)
    return x


def gather(x: Tensor) -> Any:
    out = [torch.empty_like(x) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(x, out, 0)
    return x


def scatter(x: Tensor) -> Any:
    out = torch.empty_like(x)
    dist.scatter(out, [x, x] if dist.get_rank() == 0 else None, 0)
    return out


def reduce_scatter(x: Tensor) -> Any:
    out = x.new_empty(2)
    dist.reduce_scatter(out, list(x.chunk(2)))
    return out


def monitored_barrier(x: Tensor) -> Any:
    dist.monitored_barrier()
    return x


def strided_all_gather(x: Tensor) -> Any:
    given = torch.stack([x, x], 1).t()
    dist.all_gather([torch.empty_like(given) for _ in range(2)], given)
    return x


def check_for_nan(x: Tensor) -> Any:
    torch.ops.c10d.check_for_nan(x)
    return x


def functional_send_and_receive(x: Tensor) -> Any:
    other, name = 1 - dist.get_rank(), dist.group.WORLD.group_name
    out = torch.empty_like(x)
    made = FUNCTIONAL.batch_p2p_ops(["isend", "irecv"], [other, other], [0, 0], [x, out], name)
    for each in (x, out, *made):
        FUNCTIONAL.wait_tensor(each)
    return out


REFUSALS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "reduce": (
        reduce,
        "c10d.reduce_.default has no functional counterpart with the same messages: use dist.all_reduce",
    ),
    "gather": (gather, "c10d.gather_.default has no functional counterpart"),
    "scatter": (scatter, "c10d.scatter_.default has no functional counterpart"),
    "reduce_scatter": (
        reduce_scatter,
        "c10d.reduce_scatter_.default has no functional counterpart",
    ),
    "monitored_barrier": (
        monitored_barrier,
        "c10d.monitored_barrier_.default has no functional counterpart",
    ),
    **(
        {
            "functional_send_and_receive": (
                functional_send_and_receive,
                "_c10d_functional.batch_p2p_ops.default writes and returns an argument",
            )
        }
        if hasattr(FUNCTIONAL, "batch_p2p_ops")  # newer than torch 2.11
        else {}
    ),
    **(
        {
            "check_for_nan": (
                check_for_nan,
                "c10d.check_for_nan.default raises where a tensor holds NaN",
            )
        }
        if hasattr(torch.ops.c10d, "check_for_nan")  # newer than torch 2.11
        else {}
    ),
    "strided_all_gather": (
        strided_all_gather,
        "c10d.allgather_.default sends a tensor that is not contiguous (float32[2, 4] stride [1, 2])",
    ),
}


def refusal(name: str) -> str:
    """What a capture says on a group of one process: after such ops, real ones of gloo now and then hang."""
    backend, world = ("gloo", 1) if name == "monitored_barrier" else ("fake", 2)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.HashStore() if backend == "gloo" else FakeStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=world)
    try:
        captured = fz.capture(REFUSALS[name][0], on_uncapturable="raise")
        captured(torch.ones(4))
        with pytest.raises(FunctionalizeError) as error:
            captured(torch.ones(4))
    finally:
        dist.destroy_process_group()
    return str(error.value)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_has_no_functional_counterpart_is_refused_by_name(name: str) -> None:
    message = refusal(name)
    assert message.startswith(REFUSALS[name][1])
    assert "test_collectives.py" in message


@pytest.mark.skipif(
    not hasattr(torch.ops.c10d, "gather_into_tensor_"), reason="torch has it since 2.14"
)
def test_gathering_into_one_tensor_is_refused_by_name() -> None:
    """Neither gloo nor the fake backend does it, so that it is asked for by its op."""
    with pytest.raises(FunctionalizeError, match=r"use dist\.all_gather_into_tensor, or"):
        check_known_collective(torch.ops.c10d.gather_into_tensor_.default)
