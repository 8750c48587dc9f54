"""A fault in a step or in a capture: the model trains on as in eager, nothing is left behind, later calls are right."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import FunctionalizeError, InvariantError, PassError, UncapturableError
from functionalize.recorder.patches import EFFECTS
from functionalize.util.gc_pause import only_young_collections
from tests.faults import (
    Tripwire,
    fault_of,
    interrupt,
    ops_of_replay,
    raising,
    surroundings,
)
from tests.fsdp.twins import differences, state_of
from tests.leftovers import leftovers
from tests.planner.fake_world.worlds import (
    AGAIN,
    LIVE,
    OTHER,
    PLACES,
    STRIDE,
    WARM_UP,
    Twins,
    World,
    batch,
    train,
)

pytestmark = pytest.mark.usefixtures("ample_allowance")

# -- in the step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", PLACES)
def test_an_exception_while_recording(where: str) -> None:
    """In the warm-up, the recording that would be kept, and one more after a guard failed."""
    twins = Twins()
    for i in range(AGAIN + 1):
        if i in (WARM_UP, LIVE, AGAIN):
            for world in (twins.eager, twins.ours):
                world.trap.arm(where, raising(ValueError(f"in {where}")))
            assert twins.call(i) == f"ValueError: in {where}"
            assert not twins.ours.trap.disarm()
        else:
            assert twins.call(i) is None
    train(twins, AGAIN + 1)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), torch.OutOfMemoryError("no")]
)
@pytest.mark.parametrize("where", ["forward", "callback"])
def test_an_interrupt_while_recording(where: str, error: BaseException) -> None:
    twins = Twins()
    for i in (WARM_UP, LIVE):
        for world in (twins.eager, twins.ours):
            world.trap.arm(where, raising(error))
        assert twins.call(i) == f"{type(error).__name__}: {error}"
    train(twins, 2)


@pytest.mark.parametrize("where", ["forward", "tensor hook", "optimizer pre-hook"])
def test_ctrl_c_while_recording(where: str) -> None:
    twins = Twins()
    for i in (WARM_UP, LIVE):
        for world in (twins.eager, twins.ours):
            world.trap.arm(where, interrupt)
        assert twins.call(i) == "KeyboardInterrupt: "
    train(twins, 2)


def ops_of(call: Callable[[], Any]) -> int:
    with Tripwire(-1, raising(AssertionError)) as wire:
        call()
    return wire.ops


@pytest.mark.parametrize("at", [WARM_UP, LIVE, AGAIN])
def test_an_op_that_fails_while_recording(at: int) -> None:
    """Every ninth op of the step, each in a world of its own."""
    ops = ops_of(lambda: World().step(batch(0)))
    trained = 0
    for position in range(0, ops, STRIDE):
        twins = Twins()
        for i in range(min(at, 2)):
            twins.call(i)
        error = raising(torch.OutOfMemoryError(f"op {position}"))
        found = twins.call(at, around=lambda world: Tripwire(position, error))  # noqa: B023
        if found is None:
            continue
        assert found == f"OutOfMemoryError: op {position}"
        after = [twins.call(i) for i in range(at + 1, at + 5)]
        # A fault while AdamW makes its state is one that eager does not recover from.
        assert after == [None] * 4 or (at == WARM_UP and "KeyError: 'exp_avg" in str(after[3]))
        assert twins.step.stats.replays or after[0]
        trained += after[0] is None
    assert trained > ops / STRIDE / 2


def test_an_op_that_fails_in_a_replay() -> None:
    """Every op in turn: the call runs eagerly. In the copies of the epilogue, at the end: no value was changed.

    Of a program that writes nothing in place.
    """
    twins = Twins(passes="")
    for i in range(3):
        assert twins.call(i) is None
    x, world, program = batch(3), twins.ours, twins.step.program
    assert program is not None

    def state() -> dict[str, Tensor]:
        found = state_of(world.model, world.optimizer)
        return {**found, "rng": torch.get_rng_state()}

    ops = ops_of_replay(program)
    for position in range(ops + 1):
        torch.set_rng_state(world.drawn)
        before = {name: tensor.clone() for name, tensor in state().items()}
        error = torch.OutOfMemoryError(f"op {position}")
        with surroundings(world.optimizer), Tripwire(position, raising(error)):
            fault = fault_of(twins.step, x)
        if position < ops:
            assert fault is None
            world.drawn = torch.get_rng_state()
            torch.set_rng_state(twins.eager.drawn)
            twins.eager.step(x)
            twins.eager.drawn = torch.get_rng_state()
            twins.compare(position)
        else:
            assert fault == f"OutOfMemoryError: op {position}"
            kept = {name: t for name, t in before.items() if not name.endswith(".grad")}
            assert len(kept) < len(before)  # the step drops the last gradients first, in eager too
            assert differences(position, state(), kept) == []
    assert (twins.step.stats.replays, twins.step.stats.eager) == (1, ops)
    train(twins, 3)


def counted() -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """A step that counts in its forward, and fails in its backward for some data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(x: Tensor, at: Tensor) -> Tensor:
        loss = torch.gather(model(x), 1, at[:, None]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def test_an_op_that_fails_before_the_first_write() -> None:
    """By default parameters and states are written in place; the counter of the forward waits for them."""
    (a, eager), (b, ours) = counted(), counted()
    step, right = fz.capture(ours), torch.zeros(4, dtype=torch.long)
    for i in range(4):
        assert torch.equal(step(batch(i), right), eager(batch(i), right))
    program = step.core.cache.latest.program
    assert (program.stage, step.program.stage) == ("INPLACE", "FUNCTIONAL")
    written = {program.inputs[i].name for i in program.writes}
    assert "model_0_weight" in written
    assert "model_1_num_batches_tracked" not in written
    wrong = right + 9
    for i in (4, 5):
        assert fault_of(step, batch(i), wrong) == fault_of(eager, batch(i), wrong)
        assert all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))
    assert torch.equal(step(batch(6), right), eager(batch(6), right))
    assert (step.stats.eager, step.stats.replays) == (2, 2)


def looked_up() -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """A step with statistics and a random number before an op that fails for some data."""
    torch.manual_seed(0)
    width = batch(0).shape[1]
    parts = {"norm": nn.BatchNorm1d(width), "table": nn.Embedding(4, width), "drop": nn.Dropout()}
    model = nn.ModuleDict(parts)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor, at: Tensor) -> Tensor:
        x = model["drop"](model["norm"](x))
        loss = (x * model["table"](at)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def indices(x: Tensor, i: int) -> Tensor:
    """Out of range in call 4."""
    return torch.full((len(x),), 9 if i == 4 else i % 4)


@pytest.mark.parametrize("passes", ["", "cleanup"])
def test_an_error_of_the_data_in_a_replay(passes: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is raised at the user's line, and what came before it has the effects that it has in eager."""
    (a, eager), (b, ours) = looked_up(), looked_up()
    step = fz.capture(ours, passes=passes)
    for i in range(6):
        found = []
        for model, run in ((a, eager), (b, step)):
            torch.manual_seed(i)
            fault = fault_of(run, batch(i), indices(batch(i), i))
            state = [*model.state_dict().values(), torch.get_rng_state()]
            found.append((fault, [t.flatten().view(torch.uint8).tolist() for t in state]))
        assert found[0] == found[1]
        assert (found[0][0] is None) == (i != 4)
    assert int(b["norm"].num_batches_tracked) == 6
    assert (step.stats.replays, step.stats.eager) == (3, 1)
    assert "a replay of step failed, the call runs eagerly: IndexError" in caplog.text


def test_an_error_of_the_data_where_the_graph_writes_inputs() -> None:
    """After `reinplace`, only inputs that `program.writes` names may have changed."""
    model, train = looked_up()
    step = fz.capture(train, passes="default")
    for i in range(4):
        step(batch(i), indices(batch(i), i))
    program = step.program
    assert program is not None
    written = {program.inputs[i].name for i in program.writes}
    before = {n: t.clone() for n, t in model.state_dict().items()}
    drawn = torch.get_rng_state()
    assert str(fault_of(step, batch(4), indices(batch(4), 4))).startswith("IndexError")
    after = model.state_dict()
    changed = {
        f"model_{n}".replace(".", "_") for n in after if not torch.equal(after[n], before[n])
    }
    assert "model_norm_num_batches_tracked" in changed <= written
    assert torch.equal(torch.get_rng_state(), drawn)
    replays = step.stats.replays
    step(batch(5), indices(batch(5), 5))
    assert step.stats.replays == replays + 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_in_a_replay(error: BaseException) -> None:
    twins = Twins(passes="")
    for i in range(3):
        assert twins.call(i) is None
    x = batch(3)
    for turn, position in enumerate((0, 20, 60)):
        torch.set_rng_state(twins.ours.drawn)
        with surroundings(twins.ours.optimizer), Tripwire(position, raising(error)):
            assert fault_of(twins.step, x) == f"{type(error).__name__}: {error}"
        assert torch.equal(torch.get_rng_state(), twins.ours.drawn)
        twins.eager.optimizer.zero_grad()  # the first thing that the step does, a replay's too
        twins.compare(3)
        train(twins, 4 + 6 * turn, 10 + 6 * turn)  # until it replays again


# -- in the epilogue -------------------------------------------------------------------------------


class Growing:
    """Two storages that one step fills and the next one frees."""

    def __init__(self) -> None:
        self.a, self.b, self.c = torch.ones(4), torch.empty(4), torch.empty(4)
        for tensor in (self.b, self.c):
            tensor.untyped_storage().resize_(0)

    def step(self, x: Tensor) -> None:
        self.a.add_(x.sum())
        for i, tensor in enumerate((self.b, self.c)):
            tensor.untyped_storage().resize_(16)
            tensor.copy_(x[i, :4])

    def free(self) -> None:
        for tensor in (self.b, self.c):
            tensor.untyped_storage().resize_(0)


def test_memory_runs_out_where_the_epilogue_grows_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = Growing(), Growing()
    step = fz.capture(ours.step, passes="")
    for i in range(4):
        for world, run in ((eager, eager.step), (ours, step)):
            world.free()
            run(batch(i))
    assert step.stats.replays >= 1
    ours.free()
    resize, calls = torch.UntypedStorage.resize_, []

    def scarce(storage: torch.UntypedStorage, size: int) -> Any:
        calls.append(size)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("the second storage")
        return resize(storage, size)

    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "resize_", scarce)
        assert fault_of(step, batch(4)) == "OutOfMemoryError: the second storage"
    assert torch.equal(ours.a, eager.a)
    assert [t.untyped_storage().nbytes() for t in (ours.b, ours.c)] == [0, 0]
    replays = step.stats.replays
    eager.step(batch(4))
    step(batch(4))
    assert step.stats.replays == replays + 1
    assert all(map(torch.equal, vars(ours).values(), vars(eager).values()))


# -- in the capture itself -------------------------------------------------------------------------


def break_passes(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from functionalize import passes

    def run(program: Any, pipeline: Any) -> Any:
        raise error

    monkeypatch.setattr(passes, "run", run)


def break_discharge(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from functionalize.recorder.builder import Builder

    def discharge(self: Any) -> None:
        raise error

    monkeypatch.setattr(Builder, "discharge", discharge)


# With the number of the call in which it breaks: the passes run when a call has found the program.
BREAKS = pytest.mark.parametrize("break_it, at", [(break_passes, 2), (break_discharge, 1)])


@BREAKS
@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), InvariantError("a bug"), PassError("a bug")]
)
def test_a_bug_while_a_program_is_made(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[..., None], at: int, error: Exception
) -> None:
    """The step's result is returned; the next call raises before anything runs."""
    twins = Twins(passes="default", on_uncapturable="raise")
    for i in range(at):
        assert twins.call(i) is None
    with monkeypatch.context() as patched:
        break_it(patched, error)
        assert twins.call(at) is None
    drawn = torch.get_rng_state()
    before = {k: t.clone() for k, t in state_of(twins.ours.model, twins.ours.optimizer).items()}
    with pytest.raises(FunctionalizeError, match="a bug"):
        twins.step(batch(at + 1))
    after = state_of(twins.ours.model, twins.ours.optimizer)
    assert differences(2, after, before) == []
    assert torch.equal(torch.get_rng_state(), drawn)


@BREAKS
def test_a_bug_in_the_eager_mode(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[..., None], at: int
) -> None:
    """A later call runs eagerly, also after another fault."""
    twins = Twins(passes="default", on_uncapturable="eager", dynamic=False)
    for i in range(at):
        assert twins.call(i) is None
    with monkeypatch.context() as patched:
        break_it(patched, RuntimeError("a bug"))
        assert twins.call(at) is None
    for i in range(at + 1, 3):
        assert twins.call(i) is None
    for world in (twins.eager, twins.ours):
        world.trap.arm("backward", raising(ValueError("no")))
    assert twins.call(3) == "ValueError: no"
    for i in range(4, OTHER):
        assert twins.call(i) is None
    assert twins.step.stats.replays == 0
    assert twins.step.stats.eager == OTHER - 2  # the call that raised counts
    train(twins, OTHER)  # arguments of another kind are captured


class Dead:
    """Something to hold weakly."""


def test_a_bug_before_the_step() -> None:
    """Where looking at what the step can reach fails, the step runs eagerly all the same."""
    gone = weakref.proxy(Dead())
    captured = fz.capture(lambda x: (gone, x + 1)[1], on_uncapturable="raise")
    assert torch.equal(captured(batch(0)), batch(0) + 1)
    with pytest.raises(UncapturableError, match="ReferenceError"):
        captured(batch(1))


# -- one inside another, beside another ------------------------------------------------------------


@pytest.mark.parametrize("inner_first", [0, 1, 4])
@pytest.mark.parametrize("fault", [None, 0, 1])
def test_a_captured_step_inside_another(inner_first: int, fault: int | None) -> None:
    """The inner one is new, was recorded once, or has a program; a fault in it passes through both."""
    twins = Twins()
    for i in range(inner_first):
        assert twins.call(i) is None
    inner = twins.step

    def outer(x: Tensor) -> Tensor:
        return inner(x) * 2 + x.mean()

    captured = fz.capture(outer)
    for i in range(6):
        results = []
        for world, step in ((twins.eager, twins.eager.step), (twins.ours, captured)):
            torch.set_rng_state(world.drawn)
            if i == fault:
                world.trap.arm("backward", raising(ValueError("no")))
            with surroundings(*twins.optimizers):
                assert (fault_of(lambda: results.append(step(batch(i)))) is None) == (i != fault)  # noqa: B023
            world.drawn = torch.get_rng_state()
        if i != fault:
            assert torch.equal(results[1], results[0] * 2 + batch(i).mean())
        twins.compare(i)
    assert captured.stats.replays >= 2
    for i in range(6, 10):  # the inner one by itself again
        assert twins.call(i) is None
    assert inner.stats.replays >= 1


def in_threads(*works: Callable[[], None]) -> None:
    """Run all at once, starting together; the first error is raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            start.wait(30)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


class Still(World):
    """No random numbers: the generator is the process's, whatever thread draws from it."""

    def __init__(self) -> None:
        super().__init__()
        self.model.drop.p = 0.0


def trained(world: World, step: Callable[..., Any], calls: int, fault: int = -1) -> None:
    for i in range(calls):
        if i == fault:
            world.trap.arm("backward", raising(ValueError("no")))
        assert (fault_of(step, batch(i % OTHER)) is None) == (i != fault)


def test_threads_capture_at_once() -> None:
    """Different models, each with a fault at another call; one more trains eagerly and is not recorded.

    Calls that come while that one trains are not recorded, so that all are sure to replay only afterwards.
    """
    worlds, eager = [Still() for _ in range(4)], [Still() for _ in range(4)]
    steps: list[Any] = [fz.capture(world.step) for world in worlds[:3]]
    faults = (0, 1, 0, 5)

    def in_all(calls: int, faults: Sequence[int]) -> None:
        with surroundings(*(world.optimizer for world in worlds)):
            in_threads(
                *(
                    lambda w=w, s=s, at=at: trained(w, s, calls, at)
                    for w, s, at in zip(worlds, [*steps, worlds[3].step], faults, strict=False)
                )
            )

    def assert_equal(call: int) -> None:
        for world, twin in zip(worlds, eager, strict=True):
            states = (state_of(w.model, w.optimizer) for w in (world, twin))
            assert differences(call, *states) == []

    in_all(20, faults)
    for twin, at in zip(eager, faults, strict=True):
        trained(twin, twin.step, 20, at)
    assert_equal(20)
    for world, step, twin in zip(worlds, steps, eager, strict=False):
        trained(world, step, 4)
        trained(twin, twin.step, 4)
    before = [step.stats.replays + step.stats.audits for step in steps]
    in_all(20, (-1, -1, -1))
    for twin in eager[:3]:
        trained(twin, twin.step, 20)
    assert_equal(44)
    after = [step.stats.replays + step.stats.audits for step in steps]
    assert [b - a for a, b in zip(before, after, strict=True)] == [20] * 3


def test_modes_around_a_capture() -> None:
    """`no_grad`, `inference_mode` and autocast hold for recordings and replays, and end with their blocks."""
    model = nn.Linear(6, 2)
    captured = fz.capture(lambda x: F.relu(model(x)) * 2)
    for around in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        replays = captured.stats.replays
        for i in range(4):
            with around():
                expected = F.relu(model(batch(i))) * 2
            with surroundings(), around():
                found = captured(batch(i))
            assert torch.equal(found, expected)
            assert found.dtype is expected.dtype
            assert found.requires_grad == expected.requires_grad
            assert found.is_inference() == expected.is_inference()
        assert captured.stats.replays > replays


# -- Ctrl-C at any moment --------------------------------------------------------------------------


def test_a_block_of_the_collector_that_is_left_without_its_end() -> None:
    """Ctrl-C may come after the thresholds were raised, and before Python knows that they are to be restored."""
    before = gc.get_threshold()
    block, another = only_young_collections(), only_young_collections()
    block.__enter__()
    with another:
        assert gc.get_threshold() != before
    assert gc.get_threshold() != before
    del block
    assert gc.get_threshold() == before


def test_ctrl_c_while_torch_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is put back all the same."""
    saved, interrupts = EFFECTS._saved, []

    class Saved(list[Any]):
        def pop(self, *at: Any) -> Any:
            if len(self) == 9 and not interrupts:
                interrupts.append(1)
                raise KeyboardInterrupt
            return super().pop(*at)

    monkeypatch.setattr(EFFECTS, "_saved", Saved(saved))
    assert fault_of(fz.capture(lambda x: x + 1), batch(0)) == "KeyboardInterrupt: "
    assert interrupts
    assert leftovers() == []
