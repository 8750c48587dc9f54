"""Every kind of guard fails in turn by a real change of the world: the call runs eagerly, and is right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.ir.inputs import Call
from functionalize.util.structure import flatten
from tests.planner.fake_world.worlds import Twins, World, batch, train

pytestmark = pytest.mark.usefixtures("ample_allowance")

# -- guards ----------------------------------------------------------------------------------------


class Guarded(World):
    """A step with a guard of every kind: it reads a number, and is given some."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.weights, self.one = 1.0, {"main": 1.0}, torch.ones(1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, x: Tensor, y: Tensor, options: Any) -> Tensor:
        y = y[0] if isinstance(y, list) else y
        loss = (
            self.model(x) * options["scale"] * self.factor * self.weights["main"] * len(self.one)
        ).square().mean() + y.sum()
        if loss.item() > 1000:
            loss = loss * 0.5
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def given_to(
    shape: tuple[int, ...] = (4, 6), times: float = 1.0, **options: Any
) -> Callable[[], Sequence[Any]]:
    """Makes arguments for `Guarded.step`."""

    def make() -> Sequence[Any]:
        g = torch.Generator().manual_seed(5)
        x, y = torch.randn(shape, generator=g) * times, torch.randn(24, generator=g)
        return x, y[:4], {"scale": 2.0, **options}

    return make


def with_an_attribute() -> Sequence[Any]:
    x, y, options = given_to()()
    x.note = 1.0
    return x, y, options


def of_another_dtype() -> Sequence[Any]:
    x, y, options = given_to()()
    return x, y.double(), options


def with_a_gradient() -> Sequence[Any]:
    x, y, options = given_to()()
    return x, y.requires_grad_(), options


def strided() -> Sequence[Any]:
    x, y, options = given_to()()
    return x.t().contiguous().t(), y, options


def on_one_storage() -> Sequence[Any]:
    x, _, options = given_to()()
    return x, x[0, :4], options


def as_a_list() -> Sequence[Any]:
    x, y, options = given_to()()
    return x, [y], options


def halve_the_weight(world: Guarded) -> None:
    world.model.b.weight = nn.Parameter(world.model.b.weight.detach() / 2)


def replace_the_buffer(world: Guarded) -> None:
    world.model.norm.mean = torch.ones(10)[::2]


def leave_a_gradient(world: Guarded) -> None:
    for p in world.model.parameters():
        p.grad = torch.ones_like(p)


def freeze(world: Guarded) -> None:
    world.model.a.bias.requires_grad_(False)


def hook_the_module(world: Guarded) -> None:
    world.model.b.register_forward_hook(lambda module, args, out: out * 2)


def hook_the_parameter(world: Guarded) -> None:
    world.model.b.weight.register_hook(lambda grad: grad * 2)


def forget_the_state(world: Guarded) -> None:
    world.optimizer.state.clear()


def enlarge_the_buffer(world: Guarded) -> None:
    world.model.norm.mean.set_(torch.zeros(9).untyped_storage(), 0, (5,))


def hyperparameter(**values: Any) -> Callable[[Guarded], None]:
    return lambda world: world.optimizer.param_groups[0].update(values)


def attribute(path: str, value: Any) -> Callable[[Guarded], None]:
    def change(world: Guarded) -> None:
        *owners, name = path.split(".")
        owner: Any = world
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, value)

    return change


@contextlib.contextmanager
def default_dtype(world: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic(world: Any) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# What fails, of what kind it is, what it says, and what the call is given or done under.
CHANGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "shape": ("TensorGuard", "x` is float32", {"given": given_to((7, 6))}),
    "dtype": ("TensorGuard", "y` is float64", {"given": of_another_dtype}),
    "requires_grad": ("ParameterGuard", "now requires a gradient", {"given": with_a_gradient}),
    "structure": ("structure", "structure", {"given": as_a_list}),
    "constant": (
        "ConstantGuard",
        "`options_scale` is 3.0, was 2.0",
        {"given": given_to(scale=3.0)},
    ),
    "attribute": (
        "ArgumentAttributes",
        "attributes ['note'], had []",
        {"given": with_an_attribute},
    ),
    "strides": ("TensorGuard", "x` is float32", {"given": strided}),
    "aliases": ("AliasGuard", "shares a storage", {"given": on_one_storage}),
    "grad mode": ("ModeGuard", "grad mode is False", {"around": lambda w: torch.no_grad()}),
    "inference": ("ModeGuard", " is ", {"around": lambda w: torch.inference_mode()}),
    "autocast": ("ModeGuard", "autocast", {"around": lambda w: torch.autocast("cpu")}),
    "default dtype": ("ModeGuard", "default dtype", {"around": default_dtype}),
    "deterministic": ("ModeGuard", "deterministic mode", {"around": deterministic}),
    "eval": ("ModuleGuard", "training = False", {"change": lambda w: w.model.eval()}),
    "module hook": ("ModuleGuard", "_forward_hooks", {"change": hook_the_module}),
    "dropout": ("ModuleGuard", "p = 0.5", {"change": attribute("model.drop.p", 0.5)}),
    "python number": ("SurroundingsGuard", "factor` is 2.0", {"change": attribute("factor", 2.0)}),
    "parameter hook": ("ParameterGuard", "other hooks", {"change": hook_the_parameter}),
    "frozen": ("ParameterGuard", "no longer requires", {"change": freeze}),
    "parameter": ("ParameterGuard", "another parameter", {"change": halve_the_weight}),
    "buffer": ("TensorGuard", "mean` is float32", {"change": replace_the_buffer}),
    "storage": ("TensorGuard", "holds 36 bytes", {"change": enlarge_the_buffer}),
    "unread tensor": (
        "MetadataGuard",
        "one` is float32[2]",
        {"change": attribute("one", torch.ones(2))},
    ),
    "gradients": ("SlotGuard", "grad` is there", {"change": leave_a_gradient}),
    "nesterov": ("HyperparameterGuard", "nesterov", {"change": hyperparameter(nesterov=True)}),
    "kind of lr": ("HyperparameterGuard", "lr = <class 'int'>", {"change": hyperparameter(lr=1)}),
    "state": ("source", "is not where it was", {"change": forget_the_state}),
    "container": (
        "SurroundingsGuard",
        "weights.main` is 2.0",
        {"change": lambda w: w.weights.update(main=2.0)},
    ),
    "number read": ("ValueGuard", "is True, was False", {"given": given_to(times=300.0)}),
}


def failing_guard(program: Any, args: Sequence[Any]) -> str:
    """The kind of the first guard that fails; a value guard if all hold that need no replay."""
    leaves, spec = flatten((tuple(args), {}))
    if spec != program.in_spec:
        return "structure"
    call = Call(leaves, [])
    for fact in program.facts:
        if fact.failure(call) is not None:
            return type(fact).__name__
    try:
        call.inputs += [spec.source.resolve(call) for spec in program.inputs]
    except LookupError:
        return "source"
    failed = [type(guard).__name__ for guard in program.guards if guard.failure(call)]
    return failed[0] if failed else "ValueGuard"


@pytest.mark.parametrize("name", CHANGES)
def test_a_guard_that_fails(name: str) -> None:
    """The world changes between two calls: the call runs eagerly, with nothing done before."""
    kind, text, how = CHANGES[name]
    twins = Twins(Guarded)
    for i in range(3):
        assert twins.call(i, given_to()) is None
    replays = twins.step.stats.replays
    assert replays == 1
    for world in (twins.eager, twins.ours):
        how.get("change", lambda world: None)(world)
    given, around = how.get("given", given_to()), how.get("around")
    with around(None) if around else contextlib.nullcontext():
        assert failing_guard(twins.step.program, given()) == kind
    found = twins.call(3, given, around)
    assert (found is None) == (name not in ("grad mode", "inference"))
    assert twins.step.stats.replays == replays
    assert text in twins.step.stats.guard_failures[-1]
    for i in range(4, 8):
        twins.call(i, given, around)
    if found is None:
        assert twins.step.stats.replays > replays
    for i in range(8, 12):
        assert twins.call(i, given_to()) is None
    assert twins.step.stats.replays > replays + 1


def test_every_kind_of_guard_is_among_them() -> None:
    twins = Twins(Guarded)
    for i in range(3):
        twins.call(i, given_to())
    program = twins.step.program
    assert program is not None
    guards = [*program.facts, *program.guards, *program.value_guards]
    kinds = {type(guard).__name__ for guard in guards}
    assert kinds - {kind for kind, _, _ in CHANGES.values()} == {"FSDPStateGuard"}


# -- tensors on one storage ------------------------------------------------------------------------


class Tied(nn.Module):
    """Two modules that hold the same parameter, buffer and plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleDict({n: nn.Linear(6, 6, bias=False) for n in "ab"})
        self.model["b"].weight = self.model["a"].weight
        shared = torch.ones(6)
        for module in self.model.values():
            module.register_buffer("mask", shared)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.drawn = torch.get_rng_state()

    def step(self, x: Tensor) -> Tensor:
        a, b = self.model["a"], self.model["b"]
        loss = (b(a(x) * a.mask) * b.mask).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "weight", nn.Parameter(b.weight.detach() * 2)),
        lambda b: setattr(b, "mask", torch.zeros(6)),
    ],
    ids=["parameter", "buffer"],
)
def test_tensors_that_shared_a_storage_are_parted(change: Callable[[nn.Module], None]) -> None:
    twins = Twins(Tied)
    for i in range(4):
        assert twins.call(i) is None
    for world in (twins.eager, twins.ours):
        change(world.model["b"])
    replays = twins.step.stats.replays
    assert twins.call(4) is None
    assert twins.step.stats.replays == replays
    assert "no longer shares a storage" in twins.step.stats.guard_failures[-1]
    train(twins, 5, 9)


@pytest.mark.parametrize("name", ["weight", "mask"])
def test_tensors_that_shared_a_storage_are_parted_in_a_captured_forward(name: str) -> None:
    eager, ours = Tied(), Tied()

    def forward_of(world: Tied) -> Callable[[Tensor], Tensor]:
        a, b = world.model["a"], world.model["b"]
        return lambda x: (b(a(x) * a.mask) * b.mask).square().mean()

    plain, captured = forward_of(eager), fz.capture(forward_of(ours), backward=True)
    for i in range(9):
        for world, forward in ((eager, plain), (ours, captured)):
            if i == 4:
                b = world.model["b"]
                setattr(
                    b, name, nn.Parameter(b.weight.detach() * 2) if name == "weight" else b.mask * 2
                )
            world.model.zero_grad()
            forward(batch(i)).backward()
        pairs = zip(eager.model.parameters(), ours.model.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    assert captured.stats.replays >= 5
