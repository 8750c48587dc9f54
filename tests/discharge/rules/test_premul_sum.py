"""PREMUL_SUM: a replay asks the group for what eager asks. Only NCCL can run it; here, a fake group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize import passes
from functionalize._compat.distributed import fake_process_group
from functionalize.errors import UnsupportedOpError
from functionalize.planner.time.communication import communication
from functionalize.program.collective_order import sequences
from tests.steps import make_step

Group = dist.ProcessGroup
Sent = list[tuple[str, torch.Size, Any]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """What a fake group of four ranks was asked to multiply and sum: the method, the size, the reduction."""
    found: Sent = []

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(Group, name)

        def method(group: Any, *args: Any) -> Any:
            tensor = args[0][0] if isinstance(args[0], list) else args[-2]
            reduction = args[-1].reduceOp.__getstate__()
            if reduction[0] == dist.ReduceOp.PREMUL_SUM:
                found.append((name, tensor.shape, reduction))
            return original(group, *args)

        return method

    for name in {"_reduce_scatter_base", "reduce_scatter_single", "allreduce"} & vars(Group).keys():
        monkeypatch.setattr(Group, name, noted(name))
    with fake_process_group(0, 4):
        yield found


def last_call(step: Callable[[Tensor], Any], sent: Sent) -> Sent:
    """What the fourth call sends."""
    for _ in range(4):
        sent.clear()
        step(torch.ones(2, 4))
    return list(sent)


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_a_replay_of_fsdp_reduces_as_eager(factor: float, mesh: tuple[int, ...], sent: Sent):
    def made() -> Callable[[Tensor], Tensor]:
        names = ("replicate", "shard")[-len(mesh) :]
        model = fully_shard(
            nn.Linear(4, 4), mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names)
        )
        model.set_gradient_divide_factor(factor)
        return make_step(model, torch.optim.SGD(model.parameters()))

    eager, step = made(), fz.capture(made())
    expected = last_call(eager, sent)
    assert expected[0][2] == (dist.ReduceOp.PREMUL_SUM, 1 / factor)
    assert last_call(step, sent) == expected
    assert step.stats.replays, step.explain()


def test_an_all_reduce_with_a_factor(sent: Sent):
    def step(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y, dist._make_nccl_premul_sum(0.3))
        return y + 1

    captured = fz.capture(step)
    assert last_call(captured, sent) == [
        ("allreduce", torch.Size([2, 4]), (dist.ReduceOp.PREMUL_SUM, 0.3))
    ]
    assert captured.stats.replays, captured.explain()
    program = captured.program
    program.describe()
    assert sequences(program.graph) == {
        "0": ("all_reduce_premul_sum(float32[2, 4], premul_sum(0.3))",)
    }


def test_what_reads_collectives_knows_it(sent: Sent):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for each in (*model, model):
        fully_shard(each).set_gradient_divide_factor(3.0)
    step = fz.capture(make_step(model, torch.optim.SGD(model.parameters())))
    expected = last_call(step, sent)
    program = passes.run(step.program, "default,reinplace")
    found = [n for n in program.graph.nodes if "reduce_scatter" in str(n.target)]
    assert len(found) == len(expected) == 2
    rows = [each for each in communication(program) if each.kind == "reduce-scatter"]
    assert sum(each.count for each in rows) == 2 and all(each.sent for each in rows)


def test_a_factor_that_is_a_tensor_is_refused():
    def step(x: Tensor) -> Tensor:
        dist.all_reduce(x, dist._make_nccl_premul_sum(torch.tensor(0.5)))
        return x

    captured = fz.capture(step, on_uncapturable="raise")
    with fake_process_group(0, 2):
        captured(torch.ones(2))
        captured(torch.ones(2))
        with pytest.raises(UnsupportedOpError, match=r"PREMUL_SUM.*a factor that is a number"):
            captured(torch.ones(2))
