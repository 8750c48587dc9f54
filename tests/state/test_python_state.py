"""What Python holds around a step changes between two calls: the guard sees it, and the call is right."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

import functionalize as fz
from functionalize.errors import UncapturableError
from functionalize.ir.inputs import Call
from functionalize.state.python_state import SurroundingsGuard
from functionalize.walk.walker import walked
from tests.planner.fake_world.worlds import Twins

pytestmark = pytest.mark.usefixtures("ample_allowance")

np = pytest.importorskip("numpy")


def batch(i: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(i))


class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2


class Pair(NamedTuple):
    first: float
    second: float


@dataclass
class Settings:
    """As scripts keep them."""

    scale: float = 1.0
    inner: Any = None
    table: dict[str, Any] = field(default_factory=dict)


class PlainConfig:
    """A configuration of a model."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Net(nn.Module):
    """A module that keeps more than tensors and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.config = PlainConfig(1.0)
        self.scales = [1.0, 2.0]
        self.table: dict[str, Any] = {"scale": 1.0}
        self.tensors = {"shift": torch.ones(6)}
        self.activation: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.a(x)) * self.config.scale * self.scales[0] * self.table["scale"]
        return self.b(x + self.tensors["shift"])


def halved(a: Tensor, b: Tensor) -> Tensor:
    return F.mse_loss(a, b) / 2


def attended(x: Tensor) -> Tensor:
    x = x[None, None]
    return F.scaled_dot_product_attention(x, x, x)[0, 0]


class World:
    """A trainer. value: what a case changes; use: how the step makes a number of it."""

    scale = 1.0

    def __init__(self, value: Any = None, use: Callable[[Any], Any] = lambda value: 1.0) -> None:
        torch.manual_seed(0)

        class Model(Net):
            pass

        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loss_fn: Any = F.mse_loss
        self.value, self.use = value, use
        self.drawn = torch.get_rng_state()

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.loss_fn(attended(self.model(x)), x)
        return loss * self.scale

    def step(self, x: Tensor) -> Tensor:
        loss = self.loss(x) * self.use(self.value)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def assign(path: str, make: Callable[[], Any]) -> Callable[[World], Any]:
    def change(world: World) -> None:
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, world), name, make())

    return change


def keep_a_class(world: World) -> None:
    """The attribute of the class, seen through the instance."""
    kind = type("Other", (type(world),), {"scale": 3.0})
    world.__class__ = kind


def patch_the_class(world: World) -> None:
    kind: Any = type(world.model)
    kind.forward = lambda self, x: self.b(self.a(x))


def patch_the_step(world: World) -> None:
    before = world.optimizer.step

    def step() -> None:
        for p in world.model.parameters():
            p.grad.mul_(2)  # type: ignore[union-attr]
        before()

    world.optimizer.step = step  # type: ignore[assignment, method-assign]


def double_gradients(optimizer: torch.optim.Optimizer, *given: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(2)


def replace_the_loss(world: World) -> None:
    world.loss = lambda x: world.model(x).square().mean()  # type: ignore[method-assign]


def another_forward(world: World) -> None:
    world.model.a.forward = lambda x: torch.tanh(x)  # type: ignore[method-assign, assignment]


# What changes, and what the guard says.
CHANGES: dict[str, tuple[Callable[[World], Any], str]] = {
    "a function": (assign("loss_fn", lambda: F.l1_loss), "`self.loss_fn` is the code of l1_loss"),
    "a lambda": (assign("loss_fn", lambda: lambda a, b: (a - b).abs().mean()), "self.loss_fn"),
    "the user's function": (assign("loss_fn", lambda: halved), "self.loss_fn"),
    "a method": (replace_the_loss, "attributes: loss"),
    "a class": (keep_a_class, "self"),
    "a forward of a class": (patch_the_class, "forward"),
    "a forward of a module": (another_forward, "model.a.forward"),
    "a module's configuration": (assign("model.config.scale", lambda: 2.0), "config.scale` is 2.0"),
    "another configuration": (assign("model.config", lambda: PlainConfig(3.0)), "config.scale"),
    "a module's list": (lambda w: w.model.scales.__setitem__(0, 3.0), "model.scales.0` is 3.0"),
    "a module's dict": (lambda w: w.model.table.update(scale=3.0), "model.table.scale` is 3.0"),
    "a module's function": (assign("model.activation", lambda: torch.tanh), "model.activation"),
    "a tensor in a module's dict": (
        lambda w: w.model.tensors.update(shift=torch.full((6,), 2.0)),
        "model.tensors.shift",
    ),
    "an optimizer's hook": (
        lambda w: w.optimizer.register_step_pre_hook(double_gradients),
        "optimizer._optimizer_step_pre_hooks",
    ),
    "an optimizer's method": (patch_the_step, "optimizer.step"),
    "an optimizer's state": (lambda w: w.optimizer.state.clear(), "is not where it was"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_calls_is_seen(name: str) -> None:
    change, text = CHANGES[name]
    twins = Twins(World)
    lives(twins, change, text)


def lives(twins: Twins, change: Callable[[Any], Any], text: str) -> None:
    for i in range(4):
        assert twins.call(i, lambda i=i: [batch(i)]) is None
    before = twins.step.stats.replays
    assert before >= 1
    for world in (twins.eager, twins.ours):
        change(world)
    for i in range(4, 9):
        assert twins.call(i, lambda i=i: [batch(i)]) is None
    assert text in twins.step.stats.guard_failures[0], twins.step.stats.guard_failures
    assert twins.step.stats.replays >= before + 3


def into(key: Any, value: Any) -> Callable[[World], None]:
    return lambda world: world.value.__setitem__(key, value)


# What the step keeps, how it makes a number of it, what changes.
VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[World], Any]]] = {
    "a dict in a dict": (
        lambda: {"a": {"b": 1.0}},
        lambda v: v["a"]["b"],
        lambda w: w.value["a"].update(b=2.0),
    ),
    "a new key": (lambda: {"a": 1.0}, lambda v: v.get("b", 1.0), into("b", 2.0)),
    "an element": (lambda: [1.0, 2.0], sum, into(0, 5.0)),
    "a length": (lambda: ["x"], len, lambda w: w.value.append("y")),
    "an element of many": (lambda: [1.0] * 100, sum, into(7, 5.0)),
    "a set": (lambda: {1, 2}, sum, lambda w: w.value.add(3)),
    "a deque": (lambda: collections.deque([1.0]), sum, lambda w: w.value.append(2.0)),
    "a tensor in a deque": (
        lambda: collections.deque([torch.ones(())]),
        lambda v: v[0],
        lambda w: w.value.appendleft(torch.tensor(3.0)),
    ),
    "a named tuple": (
        lambda: Pair(1.0, 2.0),
        lambda v: v.first,
        assign("value", lambda: Pair(3.0, 2.0)),
    ),
    "an enum": (lambda: Kind.SMALL, lambda v: v.value, assign("value", lambda: Kind.LARGE)),
    "another dataclass": (
        lambda: Settings(inner=Settings(1.0)),
        lambda v: v.inner.scale,
        assign("value", lambda: Settings(inner=Settings(2.0))),
    ),
    "a new attribute": (
        types.SimpleNamespace,
        lambda v: getattr(v, "scale", 1.0),
        assign("value.scale", lambda: 2.0),
    ),
    "an attribute by name": (
        lambda: Settings(1.0),
        lambda v: vars(v)["scale"],
        assign("value.scale", lambda: 2.0),
    ),
    "an array": (lambda: np.ones(3), lambda v: float(v[0]), into(0, 2.0)),
    "a float32": (
        lambda: np.float32(1),
        float,
        assign("value", lambda: np.float32(2)),
    ),
    "a fraction": (lambda: Fraction(1, 2), float, assign("value", lambda: Fraction(3, 2))),
    "a dtype": (
        lambda: torch.float32,
        lambda v: torch.full((), 1.1).to(v).float(),
        assign("value", lambda: torch.bfloat16),
    ),
    "a range": (lambda: range(3), sum, assign("value", lambda: range(4))),
    "a slice": (
        lambda: slice(0, 2),
        lambda v: torch.arange(4.0)[v].sum(),
        assign("value", lambda: slice(0, 3)),
    ),
    "a partial's keyword": (
        lambda: functools.partial(F.leaky_relu, negative_slope=0.1),
        lambda v: -v(torch.tensor(-1.0)),
        assign("value", lambda: functools.partial(F.leaky_relu, negative_slope=0.2)),
    ),
    "a partial's tensor": (
        lambda: functools.partial(torch.mul, torch.ones(())),
        lambda v: v(2.0),
        assign("value", lambda: functools.partial(torch.mul, torch.full((), 2.0))),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_the_step_keeps(name: str) -> None:
    make, use, change = VALUES[name]
    lives(Twins(lambda: World(make(), use)), change, "")


def test_defaults_and_closures() -> None:
    def make() -> World:
        factor = 1.0

        def use(value: Any, times: float = 1.0) -> float:
            return factor * times

        return World(None, use)

    def change(world: World) -> None:
        world.use.__defaults__ = (2.0,)  # type: ignore[attr-defined]

    lives(Twins(make), change, "self.use.defaults")


# -- what holds for everything ---------------------------------------------------------------------


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.mse_loss else result


@contextlib.contextmanager
def removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def double_the_output(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


AROUND: dict[str, tuple[Callable[[], Any], str]] = {
    "a hook on all modules": (
        lambda: removed(register_module_forward_hook(double_the_output)),
        "the global forward hooks",
    ),
    "a hook on all optimizers": (
        lambda: removed(register_optimizer_step_pre_hook(double_gradients)),
        "the global step pre-hooks",
    ),
    "kernels of attention": (lambda: sdpa_kernel(SDPBackend.MATH), "attention"),
    "a function mode": (Doubling, "the function modes"),
    "hooks on saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.bfloat16(), lambda t: t.float()
        ),
        "the hooks on saved tensors",
    ),
    "anomaly detection": (lambda: torch.autograd.set_detect_anomaly(True), "anomaly detection"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", AROUND)
def test_what_is_on_around_a_call_is_seen(name: str) -> None:
    around, text = AROUND[name]
    twins = Twins(World)
    for i in range(4):
        assert twins.call(i, lambda i=i: [batch(i)]) is None
    replays = twins.step.stats.replays
    assert twins.call(4, lambda: [batch(4)], lambda world: around()) is None
    assert twins.step.stats.replays == replays
    assert text in twins.step.stats.guard_failures[0]
    for i in range(5, 8):
        assert twins.call(i, lambda i=i: [batch(i)]) is None
    assert twins.step.stats.replays == replays + 3


def test_what_a_hook_on_all_optimizers_reads_is_seen() -> None:
    scales = [2.0]

    def scale_gradients(optimizer: Any, *given: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(scales[0])

    twins = Twins(World)
    with removed(register_optimizer_step_pre_hook(scale_gradients)):
        for i in range(8):
            scales[0] = 3.0 if i == 6 else 2.0
            assert twins.call(i, lambda i=i: [batch(i)]) is None
    assert twins.step.stats.replays >= 3
    assert any("the global hooks" in text for text in twins.step.stats.guard_failures)


# -- what is no change -----------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_a_hook_on_all_optimizers_is_nothing_to_code_without_an_optimizer(backward: bool) -> None:
    model, steps = Net(), list[int]()

    def loss_of(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if not backward:
            loss.backward()
        return loss

    step = fz.capture(loss_of, backward=backward)
    optimizer = torch.optim.SGD(model.parameters())
    for i in range(8):  # a new hook each time, of which what it reads grows
        with removed(register_optimizer_step_pre_hook(lambda *given: steps.append(len(steps)))):
            optimizer.zero_grad()
            loss = step(batch(i))
            if backward:
                loss.backward()
            optimizer.step()
    assert not step.stats.guard_failures and step.stats.replays >= 4, step.explain()
    assert steps == [*range(8)]


def make_anew(world: World) -> None:
    """Everything that the step holds is another object, which is equal to the one before."""
    world.value = Settings(1.0, [lambda v: v, {"a": (1.0, "x")}], {"z": range(3)})
    world.loss = types.MethodType(type(world).loss, world)  # type: ignore[method-assign]
    world.model.config = PlainConfig(1.0)
    world.model.scales = [1.0, 2.0]
    world.model.table = {"scale": 1.0}


def test_equal_objects_are_no_change() -> None:
    def make() -> World:
        world = World(None, lambda value: value.scale + len(value.inner) + len(value.table))
        make_anew(world)
        return world

    twins = Twins(make)
    for i in range(8):
        assert twins.call(i, lambda i=i: [batch(i)]) is None
        make_anew(twins.ours), make_anew(twins.eager)
    assert twins.step.stats.guard_failures == []
    assert twins.step.stats.replays >= 5


def test_what_no_code_names_is_no_change() -> None:
    twins = Twins(World)
    for i in range(6):
        assert twins.call(i, lambda i=i: [batch(i)]) is None
        twins.ours.history = [*getattr(twins.ours, "history", []), i]
    assert twins.step.stats.replays >= 3


def test_eval_of_a_model_evaluates_no_text() -> None:
    """The method has the name of a function that may read anything."""

    class Script:
        def __init__(self) -> None:
            self.model, self.epoch = nn.Dropout(), 0

        def evaluate(self, x: Tensor) -> Tensor:
            self.model.eval()
            return self.model(x)  # type: ignore[no-any-return]

        def text(self, x: Tensor) -> Tensor:
            return x * eval("self.epoch")  # type: ignore[no-any-return]

    script = Script()
    for step, found in ((script.evaluate, None), (script.text, "`self.epoch` is 2, was 0")):
        script.epoch = 0
        guard = SurroundingsGuard.of(step, walked(step))
        script.epoch = 2
        assert guard.failure(Call((), [])) == found


def test_cycles_end() -> None:
    table: dict[str, Any] = {"n": 1}
    table["self"] = [table]

    def step() -> int:
        return int(table["n"])

    guard = SurroundingsGuard.of(step, walked(step))
    assert guard.failure(Call((), [])) is None
    table["n"] = 2
    assert guard.failure(Call((), [])) == "`table.n` is 2, was 1"


# -- what a step does itself -----------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Keeps the number of steps as many optimizers do: in Python."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.data.add_(p.grad, alpha=-0.1 / state["step"])


def test_an_optimizer_that_counts_in_python_is_replayed() -> None:
    worlds = World(), World()
    for world in worlds:
        world.optimizer = Counting(world.model.parameters())
    step = fz.capture(worlds[1].step)
    for i in range(8):
        worlds[0].step(batch(i)), step(batch(i))
        states = [[s["step"] for s in w.optimizer.state.values()] for w in worlds]
        assert repr(states[0]) == repr(states[1])
    assert step.stats.replays >= 4, step.explain()


def test_a_state_made_anew_has_no_program_of_its_own() -> None:
    """The optimizer's state is dropped twice: what was recorded without one is never replayed with one."""
    twins = Twins(World)
    for i in range(14):
        if i in (5, 9):
            twins.eager.optimizer.state.clear(), twins.ours.optimizer.state.clear()
        assert twins.call(i, lambda i=i: [batch(i)]) is None
    assert twins.step.stats.replays >= 8


def yielding(x: Tensor) -> Iterator[Tensor]:
    yield x * 2


async def awaited(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("step", [yielding, lambda x: iter([1, 2]), lambda x: map(str, [1])])
def test_what_runs_after_the_step_is_refused(step: Any) -> None:
    captured = fz.capture(step, on_uncapturable="raise")
    with pytest.raises(UncapturableError, match="runs after the step has returned"):
        for _ in range(4):
            captured(torch.ones(2))


def test_a_coroutine_is_refused() -> None:
    captured = fz.capture(awaited, on_uncapturable="raise")
    captured(torch.ones(2)).close()
    with pytest.raises(UncapturableError, match="returns a coroutine"):
        captured(torch.ones(2))


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {"a"}, lambda out: out.add("b")),
        (lambda: bytearray(b"ab"), lambda out: out.append(1)),
        (lambda: types.SimpleNamespace(b=[2]), lambda out: out.b.append(2)),
        (lambda: np.ones(2), lambda out: out.fill(7)),
    ],
    ids=["set", "bytearray", "namespace", "array"],
)
def test_results_that_the_caller_changes_are_made_anew(make: Any, change: Any) -> None:
    step = fz.capture(lambda x: (x * 2, make()))
    for _ in range(5):
        _, out = step(torch.ones(2))
        assert repr(out) == repr(make())
        change(out)
    assert step.stats.replays >= 3


def test_a_result_that_the_step_found_is_the_same_object() -> None:
    mine = {"a"}
    step = fz.capture(lambda x: (x * 2, mine))
    assert all(step(torch.ones(2))[1] is mine for _ in range(5))
    assert step.stats.replays >= 3
