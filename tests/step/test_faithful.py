"""`capture` replays nothing that eager would not do: changes are seen, what cannot be repeated is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize.errors import UncapturableError

pytestmark = pytest.mark.usefixtures("ample_allowance")

STEPS = 9


def batch(i: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(i))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 2)
        self.scale, self.drop, self.mask = 1.0, nn.Dropout(0.2), torch.ones(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.a(x))) * self.mask) * self.scale


class World:
    """A model with an optimizer; `change` does to it what the test is about."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.factor = 1.0

    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean() * self.factor
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def freeze(world: World) -> None:
    world.model.a.weight.requires_grad_(False)


def replace_optimizer(world: World) -> None:
    world.optimizer = torch.optim.SGD(world.model.parameters(), lr=0.01)


def replace_model(world: World) -> None:
    world.model = Net()
    world.optimizer = torch.optim.SGD(world.model.parameters(), lr=0.1)


def replace_submodule(world: World) -> None:
    torch.manual_seed(5)
    world.model.b = nn.Linear(5, 2)


def replace_parameter(world: World) -> None:
    world.model.b.bias = nn.Parameter(torch.ones(2))


def other_dropout(world: World) -> None:
    world.model.drop.p = 0.5


def module_number(world: World) -> None:
    world.model.scale = 2.0


def other_number(world: World) -> None:
    world.factor = 3.0


def add_hook(world: World) -> None:
    world.model.a.register_forward_hook(lambda module, args, out: out * 2)


def add_gradient_hook(world: World) -> None:
    world.model.a.weight.register_hook(lambda grad: grad * 0.5)


def replace_plain_tensor(world: World) -> None:
    world.model.mask = torch.tensor([1.0, 0, 1, 0, 1])


def load(world: World) -> None:
    torch.manual_seed(9)
    world.model.load_state_dict(Net().state_dict())


@pytest.mark.parametrize(
    "change",
    [
        freeze,
        replace_optimizer,
        replace_model,
        replace_submodule,
        replace_parameter,
        other_dropout,
        module_number,
        other_number,
        add_hook,
        add_gradient_hook,
        replace_plain_tensor,
        load,
    ],
)
def test_a_change_between_steps_is_seen(change: Callable[[World], None]) -> None:
    eager, ours = World(), World()
    step = fz.capture(ours.step)
    for i in range(STEPS):
        if i == 4:
            torch.manual_seed(1)
            change(eager)
            torch.manual_seed(1)
            change(ours)
        torch.manual_seed(i)
        expected = eager.step(batch(i))
        torch.manual_seed(i)
        assert torch.equal(step(batch(i)), expected), (i, step.stats)
        for a, b in zip(eager.model.parameters(), ours.model.parameters(), strict=True):
            assert torch.equal(a, b), (i, step.stats)
    assert step.stats.replays >= 3


def refusal(step: Callable[..., Any], calls: int = 8, **options: Any) -> str:
    """The error of a step that is refused; no call of it may have been replayed."""
    captured = fz.capture(step, **options, on_uncapturable="raise")
    with pytest.raises(UncapturableError) as raised:
        for i in range(calls):
            captured(batch(i))
    assert captured.stats.replays == 0
    return str(raised.value)


SCALE = torch.ones(())  # no argument, and no constant


def test_the_recorded_step_is_returned_and_the_next_call_raises() -> None:
    seen = []
    selected = lambda x: (seen.append(1), x[x * SCALE > 0].sum())[1]  # noqa: E731
    captured = fz.capture(selected, dynamic=False, on_uncapturable="raise")
    assert torch.equal(captured(batch(0)), batch(0)[batch(0) > 0].sum())
    with pytest.raises(UncapturableError, match="size depends on data"):
        captured(batch(1))
    assert len(seen) == 1


@pytest.mark.parametrize("select", [torch.nonzero, torch.unique])
def test_sizes_that_depend_on_data_are_refused(select: Any) -> None:
    assert "gives a result whose size depends on data at " in refusal(
        lambda x: select(x * SCALE > 0).numel() + x, dynamic=False
    )


def test_an_index_of_integers_is_not() -> None:
    captured = fz.capture(lambda x, i: x[i])
    for i in range(3):
        at = torch.tensor([i, 0])
        assert torch.equal(captured(batch(i), at), batch(i)[at])
    assert captured.stats.replays == 2


def test_checkpointing_without_dropout_is_captured() -> None:
    world, twin = World(), World()
    for w in (world, twin):
        w.model.drop.p = 0.0
        w.model.eval()

    def make(w: World) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            loss = checkpoint(w.model, x, use_reentrant=False, preserve_rng_state=False)
            loss.square().mean().backward()
            w.optimizer.step()
            w.optimizer.zero_grad()
            return loss.detach()

        return step

    eager, captured = make(twin), fz.capture(make(world))
    for i in range(STEPS):
        assert torch.equal(captured(batch(i)), eager(batch(i)))
    assert captured.stats.replays >= 3


@pytest.mark.parametrize("how", ["numpy", "tolist"])
def test_numbers_read_past_the_dispatcher_are_refused(how: str) -> None:
    message = refusal(lambda x: x * float(np.sum(getattr(x, how)())))
    assert f"Python reads a tensor by .{how}() at " in message
    advice = {
        "tolist": "use .item()",
        "numpy": "return the tensor, and call .numpy() outside the step",
    }
    assert message.endswith(advice[how])


def test_texts_of_python_that_change_are_refused() -> None:
    class Counting:
        done = ""

        def step(self, x: Tensor) -> Tensor:
            self.done += "."
            return x * len(self.done)

    message = refusal(Counting().step)
    assert "changes Python state, which a replay would not: `self.done` is" in message


def test_a_storage_assigned_by_the_step_is_refused() -> None:
    weight = nn.Parameter(torch.ones(6))

    def step(x: Tensor) -> Tensor:
        weight.data = weight.data * 0.5
        return x + 1

    assert "gives `weight` another storage" in refusal(step)


@pytest.mark.parametrize("whose", ["x", "table"])
def test_sizes_given_to_a_tensor_in_place_at_every_call_are_refused(whose: str) -> None:
    """A view of the storage at other sizes is an op; the tensor itself would keep its sizes in a replay."""
    table = torch.ones(2, 6)

    def step(x: Tensor) -> Tensor:
        given = x if whose == "x" else table
        if whose == "x":
            given.unsqueeze_(0)
        else:
            given.t_()
        return x * 2 + table.sum()

    assert f"gives `{whose}` other sizes or strides in place" in refusal(step)


def test_sizes_given_to_a_tensor_once_are_recorded_once_more() -> None:
    tables = [torch.ones(12) for _ in range(2)]
    first, second = ((lambda x, t=t: x + t.resize_(2, 6).sum()) for t in tables)
    captured = fz.capture(first)
    for _ in range(4):
        assert torch.equal(captured(torch.ones(3)), second(torch.ones(3)))
        assert tables[0].shape == tables[1].shape
    assert captured.stats.replays >= 1


def test_a_scheduler_outside_the_step_needs_no_other_program() -> None:
    eager, ours = World(), World()
    schedulers = [torch.optim.lr_scheduler.StepLR(w.optimizer, 4) for w in (eager, ours)]
    step = fz.capture(ours.step)
    for i in range(12):
        torch.manual_seed(i)
        expected = eager.step(batch(i))
        torch.manual_seed(i)
        assert torch.equal(step(batch(i)), expected)
        for scheduler in schedulers:
            scheduler.step()
    assert step.stats.replays >= 8
    assert step.stats.guard_failures == []


def test_numbers_under_inference_mode_are_guarded() -> None:
    captured = fz.capture(lambda x: x + 1 if bool((x > 5).any()) else x - 1)
    with torch.inference_mode():
        for x in (batch(0), batch(1), batch(2) + 9, batch(3)):
            assert torch.equal(captured(x), x + 1 if (x > 5).any() else x - 1)
    assert len(captured.stats.guard_failures) == 1  # the fourth call replays the first program


def test_arrays_among_the_arguments_are_compared_by_contents() -> None:
    captured = fz.capture(lambda x, scale: x * torch.from_numpy(scale).sum().item())
    scale = np.ones(3, dtype=np.float32)
    for i in range(3):
        assert torch.equal(captured(batch(i), scale), batch(i) * 3)
    scale[0] = 4
    assert torch.equal(captured(batch(5), scale), batch(5) * 6)


def test_gradients_of_arguments_are_assigned() -> None:
    def step(x: Tensor) -> Tensor:
        x.grad = None
        loss = x.square().sum()
        loss.backward()
        return loss.detach()

    captured = fz.capture(step)
    for i in range(4):
        x = batch(i).requires_grad_()
        captured(x)
        assert torch.equal(x.grad, 2 * x.detach())
    assert captured.stats.replays >= 2


def test_loose_parameters_train() -> None:
    def make() -> tuple[list[Tensor], torch.optim.Optimizer]:
        weights = [torch.ones(6, requires_grad=True)]
        return weights, torch.optim.SGD(weights, lr=0.1)

    def step_of(weights: list[Tensor], optimizer: torch.optim.Optimizer) -> Any:
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (x * weights[0]).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    (a, opt_a), (b, opt_b) = make(), make()
    eager, captured = step_of(a, opt_a), fz.capture(step_of(b, opt_b))
    for i in range(6):
        assert torch.equal(captured(batch(i)), eager(batch(i)))
        assert torch.equal(a[0].grad, b[0].grad)
        assert torch.equal(a[0], b[0])
    assert captured.stats.replays >= 3


def test_going_backward_from_a_replayed_output_is_refused() -> None:
    model = nn.Linear(6, 2)
    captured = fz.capture(lambda x: F.relu(model(x)).sum())
    for i in range(2):
        captured(batch(i)).backward()
        model.zero_grad()
    loss = captured(batch(2))
    assert loss.requires_grad
    assert captured.stats.replays == 1
    with pytest.raises(UncapturableError, match="call backward inside the step"):
        loss.backward()


def test_a_pipeline_that_is_misspelt_is_told_at_once() -> None:
    with pytest.raises(fz.errors.FunctionalizeError, match="nonsense"):
        fz.capture(lambda x: x, passes="nonsense")


@pytest.mark.parametrize("passes", ["", "reinplace", "default"])
def test_writes_to_data_beside_a_graph_of_eager(passes: str) -> None:
    def gradients(capture: Any) -> Any:
        torch.manual_seed(0)
        model, found = nn.Linear(6, 5), []
        model.register_buffer("mean", torch.zeros(5))

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                model.weight.data.mul_(0.99)  # no version, so that graphs of eager may go backward
                model.mean.add_(1)  # a version
                return model(x)

        captured = capture(step)
        for i in range(STEPS):
            x = batch(i).requires_grad_()
            loss = model(x).square().sum() + (model.weight * x.sum()).sum()
            versions = model.weight._version, model.mean._version
            captured(batch(i + 100))
            loss.backward()
            found.append((x.grad, model.weight.grad.clone()))
            assert model.weight._version == versions[0]
            assert model.mean._version > versions[1]
        return found, captured

    (expected, _), (found, captured) = (
        gradients(lambda f: f),
        gradients(fz.capture(on_uncapturable="raise", passes=passes)),
    )
    for each, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, each, other))
    assert captured.stats.replays >= 6, captured.explain()


def test_a_graph_of_eager_through_a_wrapped_parameter_that_a_replay_writes() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3)))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    model = Wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @fz.capture(on_uncapturable="raise")
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def wrapped() -> Tensor:
        return TwoTensor(torch.ones(3, 3), torch.ones(3, 3))

    for _ in range(6):
        before = model(wrapped().requires_grad_()).sum()
        version = model.weight._version
        step(wrapped())
        assert model.weight._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
    assert step.stats.replays >= 3, step.explain()
