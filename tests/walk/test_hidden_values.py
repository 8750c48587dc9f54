"""A number that the step reads somewhere in Python changes between two calls: the calls are those of eager."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import functionalize as fz
from tests.walk.cases import HELD, MOVED, READ, TENSORS, Settings, put, set_
from tests.walk.trainer import CALLS, CHANGED_AT, Trainer, faithful


class Base(Trainer):
    def compute(self) -> float:
        return float(self.value.scale)

    def step(self, x: Tensor) -> Tensor:
        self.number = lambda value: self.compute()
        return super().step(x)


class Derived(Base):
    """All code that reads the number is a base class's."""


class Head(nn.Module):
    """`forward` calls a helper and reads a property."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(3, 1), settings
        self.weight = self.layer.weight

    @property
    def temperature(self) -> float:
        return self.settings.kl

    def head(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.settings.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.temperature


class WithHead(Trainer):
    def __init__(self, value: Any, number: Any) -> None:
        super().__init__(value, number)
        self.model = Head(value)  # type: ignore[assignment]
        torch.manual_seed(0)
        nn.init.normal_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


@pytest.mark.parametrize("name", READ)
def test_code_that_reads_a_number(name: str) -> None:
    make, number, change = READ[name]
    captured = faithful(make, number, change)
    assert captured.stats.replays >= 2, captured.explain()


@pytest.mark.parametrize("trainer", [Derived, WithHead])
@pytest.mark.parametrize("name", ["scale", "kl"])
def test_code_of_a_base_class_and_of_helpers(trainer: Any, name: str) -> None:
    captured = faithful(Settings, lambda value: 1.0, set_(name), trainer)
    assert captured.stats.replays >= 2, captured.explain()


@pytest.mark.parametrize("name", [*HELD, *TENSORS])
def test_an_object_that_holds_a_number(name: str) -> None:
    make, number, change = {**HELD, **TENSORS}[name]
    captured = faithful(make, number, change)
    assert captured.stats.replays >= 2, captured.explain()


# -- state that is read by changing it -------------------------------------------------------------


@pytest.mark.parametrize("name", MOVED)
def test_state_that_is_read_by_changing_it(name: str) -> None:
    captured = faithful(*MOVED[name])
    assert captured.stats.replays == 0, captured.explain()


# -- hooks, patches, modules -----------------------------------------------------------------------


def hooked(register: Callable[[nn.Linear, list[float]], Any]) -> Callable[..., Trainer]:
    def trainer(value: Any, number: Any) -> Trainer:
        made = Trainer(value, number)
        made.handle = register(made.model, value)  # type: ignore[attr-defined]
        return made

    return trainer


def by_gradient(model: nn.Linear, scale: list[float]) -> Any:
    return model.weight.register_hook(lambda g: g * scale[0])


def after_accumulation(model: nn.Linear, scale: list[float]) -> Any:
    def scaled(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(scale[0])

    return model.weight.register_post_accumulate_grad_hook(scaled)


def on_the_accumulator(model: nn.Linear, scale: list[float]) -> Any:
    node = model.weight.view_as(model.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda grads: tuple(g * scale[0] for g in grads))
    return node


@pytest.mark.parametrize("register", [by_gradient, after_accumulation, on_the_accumulator])
def test_hooks_that_read_a_number(register: Any) -> None:
    faithful(lambda: [1.0], lambda v: 1.0, lambda v: put(v, 0, 2.0), hooked(register))


PATCHES = {
    "F.relu": (F, "relu", lambda v: F.relu(torch.ones(())), lambda x: x * 2),
    "torch.sin": (torch, "sin", lambda v: torch.sin(torch.ones(())), lambda x: x * 2),
    "nn.Linear.forward": (nn.Linear, "forward", lambda v: 1.0, lambda self, x: x @ self.weight.T),
    "F.relu of nn.ReLU": (
        F,
        "relu",
        lambda v: nn.ReLU()(torch.ones(())),
        lambda x, inplace=False: x * 2,
    ),
    "F.linear by another one": (F, "linear", lambda v: 1.0, lambda x, weight, bias: x @ weight.T),
    "a method of Tensor": (Tensor, "tanh", lambda v: torch.ones(()).tanh(), lambda x: x * 2),
    "SGD.step": (torch.optim.SGD, "step", lambda v: 1.0, lambda self, closure=None: None),
    "nn.Module.__call__": (
        nn.Module,
        "__call__",
        lambda v: 1.0,
        lambda self, *args: self.forward(*args) * 2,
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_replaced_functions_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, number, other = PATCHES[name]
    faithful(lambda: None, number, lambda v: monkeypatch.setattr(owner, attribute, other))


class Scaling(TorchFunctionMode):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * self.scale if func is torch.relu else out


def unpacked_by(scale: float) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * scale)


@pytest.mark.parametrize("around", [Scaling, unpacked_by])
def test_what_a_call_is_surrounded_by(around: Callable[[float], Any]) -> None:
    layer = nn.Linear(2, 2)

    def step(x: Tensor) -> Tensor:
        torch.relu(layer(x)).square().sum().backward()
        assert layer.weight.grad is not None
        grad, layer.weight.grad, layer.bias.grad = layer.weight.grad, None, None
        return grad

    captured = fz.capture(step)
    for i in range(CALLS):
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(i))
        with around(1.0 + i // 4):
            assert torch.equal(captured(x), step(x)), i


def test_a_hook_on_all_modules_reads_a_number() -> None:
    scale = [1.0]
    handle = register_module_forward_hook(lambda module, args, out: out * scale[0])
    try:
        faithful(lambda: None, lambda v: 1.0, lambda v: put(scale, 0, 2.0))
    finally:
        handle.remove()


def test_a_cache_is_cleared_long_after_its_source_has_changed() -> None:
    table = {"a": 1.0}
    cached = functools.cache(lambda: table["a"])
    captured = fz.capture(lambda x: x * cached())
    for i in range(12):
        table["a"] = 1.0 + i // 4
        if i == 10:
            cached.cache_clear()
        assert captured(torch.ones(1)).item() == (1.0 if i < 10 else 3.0)
    assert captured.stats.replays >= 4


def test_the_class_of_a_module_is_replaced() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    ours, eager = Trainer(None, lambda v: 1.0), Trainer(None, lambda v: 1.0)
    captured = fz.capture(ours.step)
    for i in range(CALLS):
        if i == CHANGED_AT:
            ours.model.__class__ = eager.model.__class__ = Doubled
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        assert torch.equal(captured(x), eager.step(x)), i
    assert captured.stats.replays >= 2


def test_a_hook_that_decides_to_raise() -> None:
    def refuses(model: nn.Linear, failing: list[bool]) -> Any:
        def check(grad: Tensor) -> None:
            if failing:
                raise ValueError("the gradient is not finite")

        return model.weight.register_hook(check)

    trainer = hooked(refuses)([], lambda v: 1.0)
    captured = fz.capture(trainer.step)
    for i in range(CALLS):
        captured(torch.ones(4, 3) * i)
    assert captured.stats.replays >= 4
    trainer.value.append(True)
    with pytest.raises(ValueError, match="not finite"):
        captured(torch.ones(4, 3))


class Remembers(nn.Linear):
    """Keeps its last activation."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out.detach()
        return out


def test_an_activation_that_a_module_keeps() -> None:
    ours, eager = Trainer(None, lambda v: 1.0), Trainer(None, lambda v: 1.0)
    for each in (ours, eager):
        torch.manual_seed(0)
        each.model = Remembers(3, 1)
        each.optimizer = torch.optim.SGD(each.model.parameters(), lr=0.1)
    captured = fz.capture(ours.step, on_uncapturable="eager")
    for i in range(CALLS):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        assert torch.equal(captured(x), eager.step(x))
        assert torch.equal(ours.model.last, eager.model.last), i  # type: ignore[arg-type]


def test_a_count_in_a_functions_attribute() -> None:
    def make() -> Any:
        def step(x: Tensor) -> Tensor:
            step.calls += 1  # type: ignore[attr-defined]
            return x * 2

        step.calls = 0  # type: ignore[attr-defined]
        return step

    ours, eager = make(), make()
    captured = fz.capture(ours, on_uncapturable="eager")
    for _ in range(CALLS):
        assert torch.equal(captured(torch.ones(2)), eager(torch.ones(2)))
        assert ours.calls == eager.calls


def test_a_batch_from_a_loader_that_the_step_iterates() -> None:
    """The rows of a dataset are views of one storage, which is the same one at every step."""
    data = TensorDataset(torch.arange(32.0).reshape(16, 2))

    def make() -> Any:
        batches = iter(DataLoader(data, batch_size=2))
        return lambda x: x + next(batches)[0].sum()

    ours, eager = make(), make()
    captured = fz.capture(ours, on_uncapturable="eager")
    for _ in range(CALLS):
        assert torch.equal(captured(torch.ones(2)), eager(torch.ones(2)))


def test_a_loader_that_is_made_new_in_the_step() -> None:
    data = TensorDataset(torch.arange(32.0).reshape(16, 2))
    loaders = [
        DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(3)) for _ in "ab"
    ]
    captured = fz.capture(lambda x: x + next(iter(loaders[0]))[0].sum(), on_uncapturable="eager")
    for _ in range(CALLS):
        assert torch.equal(captured(torch.ones(2)), torch.ones(2) + next(iter(loaders[1]))[0].sum())


def test_argument_keys_that_are_equal_and_not_the_same() -> None:
    captured = fz.capture(lambda table: table["x"] * (2 if type([*table][1]) is bool else 3))
    for key in (1, 1, 1, 1, True, True, 1, True):
        wanted = 2 if type(key) is bool else 3
        assert captured({"x": torch.ones(2), key: torch.ones(2)}).tolist() == [wanted, wanted]


class Liar:
    """Equals everything."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_arguments_that_claim_to_be_equal() -> None:
    captured = fz.capture(lambda x, liar: x * liar.scale)
    for i in range(CALLS):
        assert captured(torch.ones(1), Liar(i // 4)).item() == i // 4


class Sink:
    """What a training framework keeps behind a module: metrics, by name."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = {}

    def log(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(value)


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.trainer = nn.Linear(3, 1), Sink()

    def log(self, name: str, value: Tensor) -> None:
        self.trainer.log(name, value.item())

    def training_step(self, x: Tensor) -> Tensor:
        loss = self.layer(x).mean()
        self.log("loss", loss)
        return loss


def test_metrics_that_a_module_logs() -> None:
    ours, eager = Logging(), Logging()
    captured = fz.capture(ours.training_step, on_uncapturable="eager")
    for i in range(CALLS):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        assert torch.equal(captured(x), eager.training_step(x))
        assert ours.trainer.metrics == eager.trainer.metrics
    assert captured.stats.replays == 0
    assert "model.trainer.metrics" in captured.explain()


class Watching:
    """Raises where the walk reads an attribute."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __getattribute__(self, name: str) -> Any:
        assert not sys._getframe(1).f_globals["__name__"].startswith("functionalize.walk")
        return super().__getattribute__(name)


def test_no_method_of_the_user_is_called() -> None:
    value = Watching()
    captured = fz.capture(lambda x: x * value.scale)
    for i in range(8):
        value.scale = 1.0 + i // 4
        assert captured(torch.ones(1)).item() == value.scale
    assert captured.stats.replays >= 4


class Pair(list[float]):
    """A list with an attribute."""

    scale = 1.0


CHANGED_LISTS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[nn.Module], object]]] = {
    "a tuple that becomes a list": (
        (1.0, 2.0),
        lambda held: 1.0 if isinstance(held, tuple) else 3.0,
        lambda model: setattr(model, "held", [1.0, 2.0]),
    ),
    "an attribute of a list": (
        Pair([1.0]),
        lambda held: held.scale,
        lambda model: setattr(model.held, "scale", 3.0),
    ),
    "None that becomes a tensor": (
        [None],
        lambda held: 1.0 if held[0] is None else held[0],
        lambda model: model.held.__setitem__(0, torch.tensor(3.0)),  # type: ignore[operator]
    ),
    "a tensor that becomes a parameter": (
        [torch.tensor(1.0)],
        lambda held: 3.0 if isinstance(held[0], nn.Parameter) else 1.0,
        lambda model: model.held.__setitem__(  # type: ignore[operator]
            0, nn.Parameter(torch.tensor(1.0))
        ),
    ),
}


@pytest.mark.parametrize("name", CHANGED_LISTS)
def test_a_list_that_a_module_holds(name: str) -> None:
    held, number, change = CHANGED_LISTS[name]
    model = nn.Linear(2, 2)
    model.held = held

    captured = fz.capture(lambda x: x * number(model.held), audit=False)
    x = torch.ones(2)
    for _ in range(4):
        assert torch.equal(captured(x), x)
    assert captured.stats.replays > 0
    change(model)
    for _ in range(4):
        assert torch.equal(captured(x), x * 3)


class Partly(nn.Module):
    """A model that lists its head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self
        yield from self.head.named_modules(memo, f"{prefix}.head", remove_duplicate)

    def modules(self):
        raise RuntimeError("not for others")


def test_modules_that_a_model_does_not_list() -> None:
    def losses(wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model, found = Partly(), []
        optimizer = torch.optim.SGD([*model.backbone.parameters(), *model.head.parameters()], 0.1)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        captured = wrap(step)
        for i in range(16):
            if i == 4:
                model.backbone[1].p = 0.1
            if i == 8:
                model.backbone[1].eval()
            if i == 12:
                model.backbone[0].register_forward_hook(lambda module, given, result: result * 2)
            found.append(captured(torch.ones(3, 4)).item())
        return found, captured

    eager, _ = losses(lambda fn: fn)
    found, step = losses(lambda fn: fz.capture(fn, audit=False, allowance=None))
    assert found == eager and step.stats.replays >= 6
