"""`compile="cudagraphs"`: what may be recorded, and what happens around a recording.

No device is needed, and none has been: a stand-in runs the ops again where CUDA would launch its graph. `tape.py` is
one for `torch.cuda` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functionalize as fz
from benchmarks.step_time import Subject
from functionalize import passes
from functionalize.errors import CompileError, GuardError
from functionalize.ir.generators import GET_STATE, SEED
from functionalize.run.cudagraphs import Device, Recordings, cudagraphs, reasons
from tests.ranks import run_on_ranks
from tests.run.tape import taped
from tests.steps import make_loss_step, make_step


class StandIn:
    """Counts recordings and launches; a launch writes new results where the recorded ones are."""

    def __init__(self) -> None:
        self.recorded = self.launched = 0

    def record(self, body: Callable[[], Sequence[Any]]) -> tuple[Any, Sequence[Any]]:
        self.recorded += 1
        results = body()

        def launch() -> None:
            self.launched += 1
            for old, new in zip(results, body(), strict=True):
                old.copy_(new)

        return launch, results


def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    loss = (x @ w).sum(0)
    w.sub_(loss, alpha=0.1)
    return loss, loss[1:]


def captured(device: StandIn) -> tuple[Any, nn.Linear]:
    """A step whose weight is found in a module, run by recordings of `device`."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    captured = fz.capture(make_step(model, optimizer), passes="")  # as with `compile`
    for _ in range(3):
        captured(torch.ones(2, 3))
    program = captured.program
    program.runner = lambda p: Recordings(p, Device("cuda", ("nccl",), device.record))
    program._run = None
    return captured, model


def test_a_real_step_then_one_recording_then_launches() -> None:
    device = StandIn()
    ours, model = captured(device)
    other, twin = captured(StandIn())
    other.program.runner, other.program._run = None, None
    results: list[tuple[Tensor, Tensor]] = []
    for i in range(5):
        x = torch.full((2, 3), float(i))  # in other memory each time
        results.append((ours(x), other(x).clone()))
        assert torch.equal(model.weight, twin.weight)
    assert all(
        torch.equal(a, b) for a, b in results
    )  # no launch has overwritten what was handed out
    assert (device.recorded, device.launched) == (1, 4)


def test_a_parameter_that_moves_is_recorded_again() -> None:
    device = StandIn()
    ours, model = captured(device)
    for _ in range(3):
        ours(torch.ones(2, 3))
    model.weight.data = model.weight.data.clone()
    before = model.weight.clone()
    ours(torch.ones(2, 3))
    assert device.recorded == 2
    assert not torch.equal(model.weight, before)


def test_there_is_a_recording_for_each_rate() -> None:
    device = StandIn()
    ours, model = captured(device)
    (optimizer,) = [
        c.cell_contents for c in ours.__wrapped__.__closure__ if hasattr(c.cell_contents, "state")
    ]
    optimizer.zero_grad()
    for rate in (0.1, 0.1, 0.2, 0.1, 0.2):
        optimizer.param_groups[0]["lr"] = rate
        before = model.weight.clone()
        ours(torch.ones(2, 3))
        assert not torch.equal(model.weight, before)
    assert (device.recorded, device.launched) == (2, 4)


def test_results_share_memory_with_each_other_only() -> None:
    device = StandIn()
    program = fz.functions.trace(step, torch.ones(2, 3), torch.ones(3, 3))
    program.runner = lambda p: Recordings(p, Device("cpu", (), device.record))
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    program(x, w), program(x, w)
    loss, part = program(x, w)
    kept = loss.clone()
    assert part.untyped_storage().data_ptr() == loss.untyped_storage().data_ptr()
    program(x, w)
    assert torch.equal(loss, kept) and torch.equal(part, kept[1:])


def test_in_place_a_commit_comes_before_each_launch() -> None:
    device = StandIn()
    seen: list[tuple[Any, int]] = []
    program = passes.run(fz.functions.trace(step, torch.ones(2, 3), torch.ones(3, 3)), "reinplace")
    assert program.stage == "INPLACE" and program.writes == (1,)
    run = Recordings(program, Device("cpu", (), device.record))
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    run([x, w], lambda *values: seen.append((values, device.launched)))
    run([x, w], lambda *values: seen.append((values, device.launched)))
    assert seen == [((), 0), ((), 0)]

    def refuses(*values: Any) -> None:
        raise GuardError("no")

    before = w.clone()
    with pytest.raises(GuardError):
        run([x, w], refuses)
    assert torch.equal(w, before)  # written where it is, and only by a launch


def test_a_step_that_is_recorded_again_and_again_is_told(caplog: pytest.LogCaptureFixture) -> None:
    run = Recordings(
        fz.functions.trace(lambda x: x + 1, torch.ones(2)), Device("cpu", (), StandIn().record)
    )
    run._arguments, run._fixed = [], [0]  # as if the argument were a parameter that always moves
    tensors = [torch.ones(2) for _ in range(17)]
    for tensor in tensors:
        run([tensor])
    assert "has recorded a step 16 times: parameters move" in caplog.text
    assert len(run._recordings) == 4


# -- the calls of torch.cuda ----------------------------------------------------------------------------


def taping(step: Any) -> Any:
    """A captured step whose replays are what `record_on_cuda` records; single numbers are in host memory."""
    step.program.runner = lambda p: Recordings(p, Device("cuda"))
    step.program._run = None
    return step


def twins(build: Callable[[], Any], pipeline: str, *args: Any) -> tuple[Any, Any]:
    """An eager step and the same captured, after equal calls."""
    eager, ours = build(), fz.capture(build(), passes=pipeline, audit=False)
    for i in range(4):
        for each in (eager, ours):
            torch.manual_seed(i)
            each(*args)
    assert ours.stats.replays > 0
    return eager, taping(ours)


def dropping() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    return make_step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize("pipeline", ["", "default"])
def test_a_launch_draws_the_random_numbers_of_eager(pipeline: str) -> None:
    eager, ours = twins(dropping, pipeline, torch.ones(3, 4))
    with taped() as graphs:
        for i in range(5):
            x = torch.full((3, 4), float(i + 1))
            states = []
            losses = []
            for each in (eager, ours):
                torch.manual_seed(i)
                losses.append(each(x))
                states.append(torch.get_rng_state())
            assert torch.equal(*losses) and torch.equal(*states)
    (graph,) = graphs
    assert graph.launches == 4  # the first call of a runner is a real step


def test_recording_runs_nothing_and_a_launch_reads_its_static_copies() -> None:
    program = passes.run(fz.functions.trace(step, torch.ones(2, 3), torch.ones(3, 3)), "reinplace")
    run = cudagraphs(program, Device("cpu", ()))
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    run([x, w])
    before = w.clone()

    def refuses(*values: Any) -> None:
        raise GuardError("no")

    with taped() as graphs:
        with pytest.raises(GuardError):
            run([x, w], refuses)
        assert torch.equal(w, before) and [graph.launches for graph in graphs] == [0]
        other = torch.full((2, 3), 2.0)
        (loss,) = run([other, w])
        assert torch.equal(loss, (other @ before).sum(0))
        assert torch.equal(w, before.sub(loss, alpha=0.1))
    assert len(graphs) == 1


def test_a_recording_that_fails_changes_nothing() -> None:
    program = passes.run(fz.functions.trace(step, torch.ones(2, 3), torch.ones(3, 3)), "reinplace")
    run = cudagraphs(program, Device("cpu", ()))
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    run([x, w])
    before = w.clone()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with taped(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph", fails)
        with pytest.raises(RuntimeError, match="capturing"):
            run([x, w])
        assert torch.equal(w, before)
        patch.undo()
        run([x, w])
    assert not torch.equal(w, before)


def sharded() -> Any:
    model, _ = Subject(2, 16, 2, 4).sharded("cpu")  # AdamW counts in host memory here
    return make_loss_step(model, torch.optim.SGD(model.parameters(), lr=0.1))


def launched_collectives(pipeline: str) -> tuple[bool, int, set[str]]:
    tokens = torch.arange(8).view(2, 4) + dist.get_rank()
    eager, ours = twins(sharded, pipeline, tokens)
    with taped() as graphs:
        pairs = [(eager(tokens + i), ours(tokens + i)) for i in range(4)]
    (graph,) = graphs
    return all(torch.equal(*pair) for pair in pairs), graph.launches, graph.names()


@pytest.mark.parametrize("pipeline", ["", "default"])
def test_collectives_are_part_of_a_recording(pipeline: str) -> None:
    for equal, launches, names in run_on_ranks(launched_collectives, pipeline, world=2):
        assert equal and launches == 3
        assert {"all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"} <= {
            name.removesuffix("_out") for name in names
        }


# -- refusals ----------------------------------------------------------------------------------------


def test_every_reason_is_told() -> None:
    def fn(x: Tensor, lr: Tensor) -> Tensor:
        state = GET_STATE(torch.device("cpu"))
        SEED(3)
        n = x.sum().item()
        return x * lr.item() * n + state.sum()

    program = _captured(fn, torch.ones(3), torch.tensor(0.5))
    with pytest.raises(CompileError) as raised:
        cudagraphs(program)
    text = str(raised.value)
    assert text.startswith("compile='cudagraphs' cannot take this step, for 4 reasons:\n  1. ")
    assert "`x` (float32[3]) is on cpu: move it to the device" in text
    assert "`get_rng_state` reads or sets a generator, which the host does" in text
    assert "`manual_seed` reads or sets a generator" in text
    assert "reads a number from `sum_1`, for which the host waits: keep it a tensor" in text
    assert "`_local_scalar_dense_1`" not in text  # of a number in host memory: part of a recording
    assert text.endswith("run it without `compile`, or with compile='inductor'")


def _captured(fn: Callable[..., Any], *args: Any) -> fz.Program:
    step = fz.capture(fn)
    for _ in range(3):
        step(*args)
    program = step.program
    assert program is not None
    program.describe()
    return program


def test_what_is_on_the_other_device_is_told_once() -> None:
    program = fz.functions.trace(
        lambda x: (torch.ones(2, device="cpu").sin() + 1).cos(), torch.ones(3)
    )
    program.describe()
    program.inputs = ()
    (reason,) = reasons(_without_inputs(program), "cuda", ("nccl",))
    assert reason.startswith("`ones` (aten.ones.default) computes on cpu, which no launch repeats")
    assert "`capturable=True` or `fused=True`" in reason


def _without_inputs(program: fz.Program) -> fz.Program:
    for node in program.graph.find_nodes(op="placeholder"):
        program.graph.erase_node(node)
    return program


def test_a_storage_that_is_freed_is_told() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        fz.functions.resize_storage_bytes_(x, 0)
        return y

    program = fz.functions.trace(fn, torch.ones(3))
    program.describe()
    assert reasons(program, "cpu", ()) == ["`x` is grown or freed at the end of every step"]


def communicating() -> list[str]:
    def fn(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        dist.barrier()
        return x + 1

    return reasons(_captured(fn, torch.ones(2)), "cpu", ("nccl",))


def test_what_the_host_communicates_is_told() -> None:
    for found in run_on_ranks(communicating, world=2):
        assert found == [
            "`all_reduce` communicates by gloo, which only the host can do",
            "`barrier` is a barrier, at which the host waits",
        ]


def test_a_captured_step_that_cannot_be_recorded_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = fz.capture(lambda x: x + 1, compile="cudagraphs", on_uncapturable="raise")
    x = torch.ones(2)
    with pytest.raises(CompileError, match="is on cpu: move it to the device"):
        for _ in range(4):
            assert torch.equal(step(x), x + 1)
    assert "cannot be captured" in caplog.text
