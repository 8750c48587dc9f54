"""`capture` on ordinary modules in one process: what it returns, guards, refuses and leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import FunctionalizeError, UncapturableError
from tests.step.twins import batch, same_state, twins
from tests.steps import make_step


def test_replays_bitwise_with_dropout_and_batch_norm() -> None:
    (a, opt_a), (b, opt_b) = twins()
    eager, step = make_step(a, opt_a), fz.capture(make_step(b, opt_b))
    for i in range(6):
        torch.manual_seed(i)
        expected, after = eager(batch(i)), torch.get_rng_state()
        torch.manual_seed(i)
        assert torch.equal(step(batch(i)), expected)
        assert torch.equal(torch.get_rng_state(), after)
        assert same_state(a, b)
    assert (step.stats.warmups, step.stats.captures, step.stats.replays) == (1, 1, 4)


def test_is_a_decorator_with_options_and_keeps_the_name() -> None:
    model, optimizer = twins()[0]

    @fz.capture(passes=())
    def train_step(x: Tensor) -> Tensor:
        """Trains."""
        return make_step(model, optimizer)(x)

    for i in range(4):
        train_step(batch(i))
    assert train_step.__name__ == "train_step"
    assert train_step.__doc__ == "Trains."
    assert train_step.stats.replays == 2


def test_a_method_of_a_trainer_is_searched_for_its_model() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = twins()[0]

        def step(self, x: Tensor) -> Tensor:
            return make_step(self.model, self.optimizer)(x)

    step = fz.capture(Trainer().step)
    for i in range(4):
        step(batch(i))
    names = [spec.name for spec in step.program.inputs]
    assert {"model_a_weight", "model_norm_running_mean", "optimizer_0_0_exp_avg"} <= set(names)
    assert not [n for n in names if n.startswith("captured")]


def evaluation(model: nn.Module) -> None:
    model.eval()


def other_decay(model: nn.Module) -> None:
    model.optimizer.param_groups[0]["weight_decay"] = 0.5


def frozen_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def in_double(model: nn.Module) -> None:
    """Parameters, buffers, and the state of the optimizer, which loading casts."""
    optimizer = model.double().optimizer
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        (evaluation, "`model` has training = False, had True"),
        (other_decay, "`optimizer` group 0 has weight_decay = 0.5, had 0.01"),
        (frozen_gradients, "`model.a.weight.grad` is there, was not there"),
        (in_double, "`x` is float64[5, 6], was float32[5, 6]"),
    ],
)
def test_a_guard_that_fails_recaptures_and_names_itself(change: Any, failure: str) -> None:
    (a, opt_a), (b, opt_b) = twins()
    eager, step = make_step(a, opt_a), fz.capture(make_step(b, opt_b))
    a.optimizer, b.optimizer = opt_a, opt_b
    for i in range(8):
        if i == 4:
            change(a)
            change(b)
        x = batch(i).to(a.a.weight.dtype)
        torch.manual_seed(i)
        expected = eager(x)
        torch.manual_seed(i)
        assert torch.equal(step(x), expected)
        assert same_state(a, b)
    assert step.stats.guard_failures[0] == failure
    assert step.stats.replays >= 2


def test_modes_are_guarded() -> None:
    step = fz.capture(lambda x: x.sin())
    step(batch(0)), step(batch(1))
    with torch.no_grad():
        step(batch(2))
    assert step.stats.guard_failures == ["grad mode is False, was True"]


def test_constants_and_structure_are_guarded() -> None:
    step = fz.capture(lambda x, n=1: x * n)
    assert torch.equal(step(batch(0)), batch(0))
    assert torch.equal(step(batch(1)), batch(1))
    assert torch.equal(step(batch(1), n=3), batch(1) * 3)
    assert torch.equal(step(batch(1), n=4), batch(1) * 4)
    assert step.stats.guard_failures == [
        "the structure of the arguments changed",
        "argument leaf 1 is 4, was 3",
    ]


@dataclass
class Output:
    loss: Tensor
    note: str


torch.utils._pytree.register_dataclass(Output)


def test_outputs_keep_their_structure_and_aliasing() -> None:
    def step(x: Tensor, y: Tensor) -> Any:
        z = x + 1
        return {"view": z[1:], "whole": z, "input": y, "out": Output(z.sum(), "a"), "none": None}

    captured = fz.capture(step)
    y = torch.ones(2)
    captured(batch(0), y)
    out, expected = captured(batch(1), y), step(batch(1), y)
    assert captured.stats.replays == 1
    assert out["input"] is y
    assert out["none"] is None and out["out"].note == "a"
    assert torch.equal(out["out"].loss, expected["out"].loss)
    assert out["view"].data_ptr() == out["whole"][1:].data_ptr()
    assert torch.equal(out["view"], expected["view"])


def test_gradients_are_outputs() -> None:
    model = nn.Linear(6, 2)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    captured = fz.capture(step)
    for i in range(5):
        captured(batch(i))
    kept = model.weight.grad
    assert captured.stats.replays >= 2 and kept is not None
    twin = nn.Linear(6, 2)
    twin.load_state_dict(model.state_dict())
    twin(batch(4)).sum().backward()
    assert torch.equal(kept, twin.weight.grad)


def test_a_number_read_by_python_is_guarded() -> None:
    def step(x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x - 1

    captured = fz.capture(step)
    up, down = torch.ones(3), -torch.ones(3)
    for x in (up, up, down, down, up):
        assert torch.equal(captured(x), step(x))
    assert captured.stats.replays == 2
    failure = captured.stats.guard_failures[0]
    assert failure.startswith("`item > 0` read at ")
    assert failure.endswith("is False, was True")


def test_a_tensor_found_outside_is_read_at_every_call() -> None:
    scale = torch.ones(6)
    captured = fz.capture(lambda x: x * scale)
    for _ in range(3):
        captured(batch(0))
    scale.fill_(2)
    assert torch.equal(captured(batch(0)), batch(0) * 2)
    assert (captured.stats.warmups, captured.stats.replays) == (1, 2)


def test_an_attribute_is_looked_up_at_every_call() -> None:
    class Trainer:
        batch = None

        def step(self) -> Tensor:
            return self.batch * 2

    trainer = Trainer()
    captured = fz.capture(trainer.step)
    for i in range(5):
        trainer.batch = batch(i)
        assert torch.equal(captured(), batch(i) * 2)
    assert captured.stats.replays == 3


def test_a_tensor_chosen_from_a_list_by_a_counter_is_refused() -> None:
    batches, count = [batch(i) for i in range(10)], iter(range(10))
    assert "draws from `count`" in refused(lambda x: x + batches[next(count)])


def test_a_literal_is_a_constant_once_it_is_seen_twice() -> None:
    captured = fz.capture(lambda x: x * torch.tensor([1.0, 2, 3, 4, 5, 6]))
    for i in range(4):
        assert torch.equal(captured(batch(i)), batch(i) * torch.arange(1.0, 7))
    assert (captured.stats.warmups, captured.stats.replays) == (1, 2)


def refused(step: Callable[..., Any]) -> str:
    captured = fz.capture(step)
    with pytest.raises(UncapturableError) as raised:
        for i in range(10):
            captured(batch(i))
    assert captured.stats.replays == 0
    return str(raised.value)


def test_data_that_arrives_behind_the_arguments_is_refused() -> None:
    """An iterator inside the step: replaying the first batch for ever would be silent nonsense."""
    loader = iter([batch(i) for i in range(10)])
    message = refused(lambda x: x + next(loader))
    assert "draws from `loader`, reads or writes it, which a replay would not" in message


def test_numbers_that_change_through_a_literal_are_refused() -> None:
    count = iter(range(10))
    message = refused(lambda x: x + torch.tensor([float(next(count))]))
    assert "draws from `count`" in message


def test_state_made_anew_at_every_step_is_refused() -> None:
    class Keeper:
        last = torch.zeros(6)

        def step(self, x: Tensor) -> Tensor:
            self.last = self.last * 0.5 + x.mean(0)
            return self.last.sum()

    message = refused(Keeper().step)
    assert message.endswith("assigns another tensor to `last`")


def test_garbage_in_cycles_is_not_taken_for_what_the_step_keeps() -> None:
    class Node:
        def __init__(self, value: Tensor) -> None:
            self.value, self.me = value, self

    def step(x: Tensor) -> Tensor:
        made = [Node(x + i) for i in range(3)]
        gc.collect(0)  # the next generation has them now, and is left alone during a capture
        return made[2].value * 2

    captured = fz.capture(step)
    for i in range(4):
        assert torch.equal(captured(batch(i)), step(batch(i)))
    assert captured.stats.captures == 1
    assert captured.stats.replays == 3


def test_an_exception_passes_through_and_leaves_nothing() -> None:
    (a, opt_a), (b, opt_b) = twins()
    eager, step = make_step(a, opt_a), fz.capture(make_step(b, opt_b))
    for run in (eager, step):
        with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
            run(torch.randn(5, 7))
        assert not isinstance(raised.value, FunctionalizeError)
    assert "resize_" not in vars(torch.UntypedStorage)
    for i in range(4):
        torch.manual_seed(i)
        expected = eager(batch(i))
        torch.manual_seed(i)
        assert torch.equal(step(batch(i)), expected)
    assert same_state(a, b)
    assert step.stats.replays == 2


def test_a_failed_replay_changes_nothing() -> None:
    """A value guard fails after the graph ran: parameters, and the generator, are as before it."""
    (a, opt_a), (b, opt_b) = twins()

    def guarded(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        step = make_step(model, optimizer)

        def run(x: Tensor, flag: Tensor) -> Tensor:
            loss = step(x)
            return loss + 1 if flag.item() else loss

        return run

    eager, step = guarded(a, opt_a), fz.capture(guarded(b, opt_b))
    yes, no = torch.tensor(True), torch.tensor(False)
    for i, flag in enumerate((yes, yes, yes, no, no)):
        torch.manual_seed(i)
        expected, after = eager(batch(i), flag), torch.get_rng_state()
        torch.manual_seed(i)
        assert torch.equal(step(batch(i), flag), expected)
        assert torch.equal(torch.get_rng_state(), after)
        assert same_state(a, b)
    assert len(step.stats.guard_failures) == 1
    assert step.stats.replays == 2


def test_a_capture_inside_a_capture() -> None:
    inner = fz.capture(lambda x: x.mul(2))
    outer = fz.capture(lambda x: inner(x) + 1)
    for i in range(5):
        assert torch.equal(outer(batch(i)), batch(i) * 2 + 1)
    assert outer.stats.replays >= 3


def test_storage_resizes_of_a_captured_tensor() -> None:
    def step(p: Tensor, x: Tensor) -> Tensor:
        p.untyped_storage().resize_(24)
        p.copy_(x)
        out = p * 2
        p.untyped_storage().resize_(0)
        return out

    captured = fz.capture(step)
    p = torch.empty(6)
    p.untyped_storage().resize_(0)
    for i in range(4):
        x = batch(i)[0]
        assert torch.equal(captured(p, x), x * 2)
        assert p.untyped_storage().nbytes() == 0
    assert captured.stats.replays == 3
    assert [s.name for s in captured.program.inputs] == ["x"]


def test_a_resize_inside_a_capture_inside_a_capture() -> None:
    def resizing(p: Tensor, x: Tensor) -> Tensor:
        p.untyped_storage().resize_(24)
        p.copy_(x)
        out = p * 2
        p.untyped_storage().resize_(0)
        return out

    inner = fz.capture(resizing)
    outer = fz.capture(lambda p, x: inner(p, x) + 1)
    p = torch.empty(6)
    p.untyped_storage().resize_(0)
    for i in range(4):
        x = batch(i)[0]
        assert torch.equal(outer(p, x), x * 2 + 1)
        assert p.untyped_storage().nbytes() == 0
    assert outer.stats.replays >= 2


def test_an_object_that_keeps_a_program_is_captured_again() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(3, 3)
            self.captured = fz.capture(self.step)
            self.program: fz.Program | None = None

        def step(self, x: Tensor) -> Tensor:
            return self.model(x).detach() if self.program is None else self.model(x).detach() + 1

    trainer = Trainer()
    x = torch.ones(2, 3)
    first = [trainer.captured(x) for _ in range(4)]
    trainer.program = trainer.captured.program
    second = [trainer.captured(x) for _ in range(4)]
    assert trainer.captured.stats.replays >= 3
    assert all(torch.equal(each, first[0]) for each in first)
    assert all(torch.equal(each, first[0] + 1) for each in second)


def test_what_a_profiler_is_told_is_no_op_of_the_program() -> None:
    def named(x: Tensor) -> Tensor:
        with torch.profiler.record_function("a part"):
            return x * 2

    step = fz.capture(named)
    for _ in range(3):
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    assert step.stats.replays and step.stats.ops == 1
