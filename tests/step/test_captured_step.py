"""`capture` on ordinary modules in one process: what it returns, guards, refuses and leaves behind."""

from __future__ import annotations

import gc
import inspect
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

pytestmark = pytest.mark.usefixtures("ample_allowance")


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
    for _ in range(2):
        assert torch.equal(step(batch(1)), batch(1))
    for _ in range(2):
        assert torch.equal(step(batch(1), n=3), batch(1) * 3)
    assert torch.equal(step(batch(1), n=4), batch(1) * 4)
    assert step.stats.guard_failures == [
        "the structure of the arguments changed",
        "`n` is 4, was 3, which is part of the program",
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
    captured = fz.capture(step, on_uncapturable="raise")
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


def test_state_made_anew_at_every_step_is_an_input_and_is_assigned() -> None:
    class Keeper:
        last = torch.zeros(6)

        def step(self, x: Tensor) -> Tensor:
            self.last = self.last * 0.5 + x.mean(0)
            return self.last.sum()

    eager, ours = Keeper(), Keeper()
    captured = fz.capture(ours.step)
    for i in range(8):
        assert torch.equal(eager.step(batch(i)), captured(batch(i)))
        assert torch.equal(eager.last, ours.last)
    assert captured.stats.replays >= 4, captured.explain()


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
    for i in range(5):
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


# -- methods ---------------------------------------------------------------------------------------


class Trainer:
    scale = 2.0

    def __init__(self) -> None:
        self.model, self.optimizer = twins()[0]

    def eager(self, x: Tensor) -> Tensor:
        return make_step(self.model, self.optimizer)(x) * self.scale

    @fz.capture
    def step(self, x: Tensor) -> Tensor:
        """Trains."""
        return self.eager(x)

    @fz.capture
    @staticmethod
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @fz.capture
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    @fz.capture
    @classmethod
    def scaled(cls, x: Tensor) -> Tensor:
        return x * cls.scale

    @classmethod
    @fz.capture
    def scaled_too(cls, x: Tensor) -> Tensor:
        return x * cls.scale


class Halving(Trainer):
    scale = 0.5

    @fz.capture
    def step(self, x: Tensor) -> Tensor:
        return super().step(x) + 1


def test_a_method_is_captured_for_each_instance() -> None:
    eager, ours, other = Trainer(), Trainer(), Trainer()
    for i in range(5):
        torch.manual_seed(i)
        expected = eager.eager(batch(i))
        torch.manual_seed(i)
        assert torch.equal(ours.step(batch(i)), expected)
        assert same_state(eager.model, ours.model)
    assert ours.step is ours.step
    assert (ours.step.stats.replays, other.step.stats.replays) == (3, 0)
    assert (ours.step.__name__, ours.step.__doc__) == ("step", "Trains.")
    assert str(inspect.signature(ours.step)) == "(x: 'Tensor') -> 'Tensor'"
    assert isinstance(Trainer.step, type(ours.step)) and Trainer.step.stats.replays == 0


def test_a_captured_method_of_a_subclass_calls_that_of_its_base() -> None:
    eager, ours = Halving(), Halving()
    for i in range(5):
        torch.manual_seed(i)
        expected = eager.eager(batch(i)) + 1
        torch.manual_seed(i)
        assert torch.equal(ours.step(batch(i)), expected)
    assert ours.step.stats.replays == 3


@pytest.mark.parametrize(
    ("name", "factors"),
    [("doubled", (2, 2)), ("tripled", (3, 3)), ("scaled", (2, 0.5)), ("scaled_too", (2, 0.5))],
)
def test_static_and_class_methods(name: str, factors: tuple[float, float]) -> None:
    for kind, factor in zip((Trainer, Halving), factors, strict=True):
        for owner in (kind, kind()):
            for i in range(3):
                assert torch.equal(getattr(owner, name)(batch(i)), batch(i) * factor)
        # Since Python 3.13 `classmethod` does not ask what it holds for a method: it makes one of the step.
        assert getattr(kind, name) == getattr(kind(), name)
        assert getattr(kind, name).stats.replays >= 4
    assert (getattr(Trainer, name) == getattr(Halving, name)) == (factors[0] == factors[1])


def test_a_captured_forward_that_is_a_method() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        @fz.capture(backward=True)
        def loss(self, x: Tensor) -> Tensor:
            return self.layer(x).square().sum()

        @fz.capture
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    network = Network()
    for i in range(4):
        network.loss(batch(i)).backward()
        network.zero_grad()
        with torch.no_grad():
            assert torch.equal(network(batch(i)), network.layer(batch(i)))
    assert network.loss.stats.backwards == 3
    assert network.forward.stats.replays == 3


def test_a_method_of_an_object_that_can_hold_no_program() -> None:
    class Slotted:
        __slots__ = ()

        @fz.capture(on_uncapturable="raise")
        def step(self, x: Tensor) -> Tensor:
            return x + 1

        @fz.capture
        def eager(self, x: Tensor) -> Tensor:
            return x + 1

    message = (
        "the method `step` of a Slotted cannot be captured: .* Add `__dict__` to its `__slots__`"
    )
    with pytest.raises(UncapturableError, match=message):
        Slotted().step(batch(0))
    assert torch.equal(Slotted().eager(batch(0)), batch(0) + 1)


# -- modes, and calls that do not settle -----------------------------------------------------------


def in_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        model.train()
        return make_step(model, optimizer)(x)

    return step


def test_modes_that_the_step_sets_are_set_by_a_replay() -> None:
    (a, opt_a), (b, opt_b) = twins()
    eager, step = in_training(a, opt_a), fz.capture(in_training(b, opt_b), audit=False)
    for i in range(40):
        torch.manual_seed(i)
        expected = eager(batch(i))
        torch.manual_seed(i)
        assert torch.equal(step(batch(i)), expected)
        assert [m.training for m in a.modules()] == [m.training for m in b.modules()]
        assert same_state(a, b)
        if i % 3 == 2:
            assert torch.equal(a.eval()(batch(i)), b.eval()(batch(i)))
        if i % 12 == 11:  # some modules alone
            a.norm.train()
            b.norm.train()
    assert (step.stats.warmups, step.stats.captures, step.stats.replays) == (1, 3, 36)


def test_modes_that_a_step_leaves_behind() -> None:
    model = twins()[0][0]

    def evaluate(x: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            return model(x)

    step = fz.capture(evaluate)
    for i in range(8):
        model.train(i % 2 == 0)
        assert step(batch(i)).shape == (5, 2)
        assert not any(m.training for m in model.modules())
    assert step.stats.replays >= 5


class Kept:
    """Keeps a tensor with its autograd history now and then: such calls do not settle."""

    def __init__(self) -> None:
        self.last, self.keeps = torch.zeros(6), False
        self.weight = torch.ones(6, requires_grad=True)

    def step(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.last = self.last.detach() * 0.5 + x.mean(0) * self.weight
        return x * 2


def test_a_settled_step_is_not_refused_for_calls_that_do_not_settle(caplog: Any) -> None:
    eager, ours = Kept(), Kept()
    step = fz.capture(ours.step, audit=False)
    for i in range(60):
        for world, run in ((eager, eager.step), (ours, step)):
            world.keeps = i > 3 and i % 3 == 0
            assert torch.equal(run(batch(i)), batch(i) * 2)
        assert torch.equal(eager.last, ours.last)
    # Code reads `self.last`, which requires a gradient as soon as a call has kept one: another program.
    assert step.stats.captures == 2
    # 18 calls do not settle: two are recorded, then those whose number is a power of two.
    assert (step.stats.replays, step.stats.warmups, step.stats.eager) == (40, 6, 12)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith(
        "step runs eagerly where `self.keeps` is True, was False: 4 recordings"
    )


# -- results that are the objects of others --------------------------------------------------------


@dataclass
class Everything:
    weight: Tensor
    nested: dict[str, Any]


def test_parameters_buffers_and_states_are_returned_themselves() -> None:
    model, optimizer = twins()[0]
    average = torch.zeros(8)

    def train(x: Tensor) -> Everything:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        average.lerp_(model.norm.running_mean, 0.1)
        buffers = (model.norm.running_mean, [model.norm.num_batches_tracked, average])
        state = optimizer.state[model.a.weight]
        found = Everything(
            model.a.weight,
            {"all": list(model.parameters()), "buffers": buffers, "state": state},
        )
        found.nested["grad"] = model.a.bias.grad
        optimizer.zero_grad(set_to_none=False)
        return found

    step = fz.capture(train)
    for i in range(5):
        found = step(batch(i))
        assert found.weight is model.a.weight and isinstance(found.weight, nn.Parameter)
        pairs = zip(found.nested["all"], model.parameters(), strict=True)
        assert all(a is b for a, b in pairs)
        mean, (count, averaged) = found.nested["buffers"]
        assert mean is model.norm.running_mean and count is model.norm.num_batches_tracked
        assert averaged is average
        state = optimizer.state[model.a.weight]
        assert all(found.nested["state"][key] is state[key] for key in state)
        assert found.nested["grad"] is model.a.bias.grad
    assert step.stats.replays >= 3


def test_returned_tensors_that_are_tied_and_untied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight

    model = Tied()
    step = fz.capture(lambda x: (x * 2, model.b.weight))
    for i in range(6):
        if i == 3:
            model.b.weight = nn.Parameter(torch.ones(6, 6))
        assert step(batch(i))[1] is model.b.weight
    assert step.stats.replays >= 3


def test_a_returned_parameter_that_is_replaced_between_calls() -> None:
    model = nn.Linear(6, 6)
    step = fz.capture(lambda x: (x * 2, model.bias))
    for i in range(6):
        if i == 3:
            model.bias = nn.Parameter(torch.ones(6))
        if i == 5:
            model.bias = None
        assert step(batch(i))[1] is model.bias
    assert step.stats.replays >= 2
