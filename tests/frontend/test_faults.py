"""A fault in a step or in a capture: the model trains on as in eager, nothing is left behind, later calls are right."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable

import functionalize as fz
from functionalize.core.inputs import Call
from functionalize.core.structure import flatten
from functionalize.errors import FunctionalizeError, InvariantError, PassError, UncapturableError
from tests.faults import (
    Trap,
    Tripwire,
    fault_of,
    interrupt,
    raising,
    surroundings,
)
from tests.fsdp.twins import differences, flat, state_of, unequal


class Trapped(torch.autograd.Function):
    """The identity, with a place for a fault in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trap("backward")
        return gradient.clone(), None


class Centred(nn.Module):
    """A buffer that every step changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return x - self.mean


class Net(nn.Module):
    """Dropout and a buffer: random numbers, state; hooks of every kind, each with a place for a fault."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 5), Centred(5), nn.Linear(5, 2)
        self.drop, self.trap = nn.Dropout(0.3), trap
        self.norm.register_forward_pre_hook(lambda module, args: trap("module pre-hook"))
        self.norm.register_forward_hook(lambda module, args, out: trap("module hook"))
        self.b.register_full_backward_hook(lambda module, *grads: trap("module backward hook"))
        self.a.weight.register_hook(lambda grad: trap("parameter hook"))
        self.a.weight.register_post_accumulate_grad_hook(lambda p: trap("accumulated hook"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.norm(self.a(x))))
        self.trap("forward")
        if x.requires_grad:
            x.register_hook(lambda grad: self.trap("tensor hook"))
        return self.b(Trapped.apply(x, self.trap))


class World:
    """A model and its optimizer, from one seed; `step` has a place for every fault."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.trap = Trap()
        self.model = Net(self.trap)
        given = {"lr": 0.05, "foreach": False, **options}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **given)
        self.optimizer.register_step_pre_hook(lambda *given: self.trap("optimizer pre-hook"))
        self.optimizer.register_step_post_hook(lambda *given: self.trap("optimizer hook"))
        self.drawn = torch.get_rng_state()

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        if loss.requires_grad:
            loss.register_hook(lambda grad: self._queue())
        loss.backward()
        self.trap("between")
        self.optimizer.step()
        self.trap("end")
        return loss.detach()

    def _queue(self) -> None:
        Variable._execution_engine.queue_callback(lambda: self.trap("callback"))


PLACES = (
    "forward",
    "module pre-hook",
    "module hook",
    "module backward hook",
    "backward",
    "tensor hook",
    "parameter hook",
    "accumulated hook",
    "callback",
    "between",
    "optimizer pre-hook",
    "optimizer hook",
    "end",
)
WARM_UP, LIVE, REPLAY, AGAIN = 0, 1, 4, 6
STRIDE = 9
OTHER = 6  # the batch of the call that is recorded again has other rows


def batch(i: int) -> Tensor:
    rows = 7 if i >= OTHER else 4
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(i))


class Twins:
    """One world trained eagerly, one captured; both call by call, each with its own random numbers."""

    def __init__(self, make: Callable[[], Any] = World, **options: Any) -> None:
        self.eager, self.ours = make(), make()
        self.step = fz.capture(self.ours.step, **options)
        self.optimizers = (self.eager.optimizer, self.ours.optimizer)

    def call(
        self,
        i: int,
        given: Callable[[], Sequence[Any]] | None = None,
        around: Callable[[Any], Any] | None = None,
    ) -> str | None:
        """Both calls of step `i`; asserts that they end alike. Returns what was raised.

        given: makes the arguments, of each call its own. around: a context for each call.
        """
        raised, results = [], []
        for world, step in ((self.eager, self.eager.step), (self.ours, self.step)):
            torch.set_rng_state(world.drawn)
            args = given() if given else (batch(i),)
            with surroundings(*self.optimizers), around(world) if around else _nothing():
                raised.append(fault_of(lambda: results.append(step(*args))))  # noqa: B023
            world.drawn = torch.get_rng_state()
        assert raised[0] == raised[1]
        if raised[0] is None:
            assert differences(i, flat(results[1]), flat(results[0])) == []
        self.compare(i)
        return raised[0]

    def compare(self, i: int) -> None:
        """Everything that is the model's, the optimizer's and the generators' is the same."""
        a, b = self.eager, self.ours
        rng = differences(i, {"rng": b.drawn}, {"rng": a.drawn})
        state = differences(i, state_of(b.model, b.optimizer), state_of(a.model, a.optimizer))
        modes = unequal(i, _modes(b.model), _modes(a.model))
        assert rng + state + modes == []


def _nothing() -> Any:
    return contextlib.nullcontext()


def _modes(model: nn.Module) -> dict[str, Any]:
    return {name: module.training for name, module in model.named_modules()}


def train(twins: Twins, at: int, last: int = 10) -> None:
    """From step `at` on: no fault, and replays at the end."""
    before = twins.step.stats.replays
    assert [twins.call(i) for i in range(at, last)] == [None] * (last - at)
    assert twins.step.stats.replays > before


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
    """Every op in turn, the copies of the epilogue at the end: nothing was changed; the call made again is right."""
    twins = Twins()
    for i in range(3):
        assert twins.call(i) is None
    x, world, program = batch(3), twins.ours, twins.step.program
    assert program is not None

    def state() -> dict[str, Tensor]:
        found = state_of(world.model, world.optimizer)
        return {**found, "rng": torch.get_rng_state()}

    torch.set_rng_state(world.drawn)
    before = {name: tensor.clone() for name, tensor in state().items()}
    ops = sum(isinstance(n.target, torch._ops.OpOverload) for n in program.graph.nodes) + 1
    for position in range(ops):
        error = torch.OutOfMemoryError(f"op {position}")
        with surroundings(world.optimizer), Tripwire(position, raising(error)):
            assert fault_of(twins.step, x) == f"OutOfMemoryError: op {position}"
        assert differences(position, state(), before) == []
    assert twins.step.stats.replays == 1
    world.drawn = torch.get_rng_state()
    train(twins, 3)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_in_a_replay(error: BaseException) -> None:
    twins = Twins()
    for i in range(3):
        assert twins.call(i) is None
    x = batch(3)
    for position in (0, 20, 60):
        torch.set_rng_state(twins.ours.drawn)
        with surroundings(twins.ours.optimizer), Tripwire(position, raising(error)):
            assert fault_of(twins.step, x) == f"{type(error).__name__}: {error}"
        assert torch.equal(torch.get_rng_state(), twins.ours.drawn)
        twins.compare(3)
    train(twins, 3)


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
    step = fz.capture(ours.step)
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


# -- guards ----------------------------------------------------------------------------------------


class Guarded(World):
    """A step with a guard of every kind: it reads a number, and is given some."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, x: Tensor, y: Tensor, options: Any) -> Tensor:
        y = y[0] if isinstance(y, list) else y
        loss = (self.model(x) * options["scale"] * self.factor).square().mean() + y.sum()
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
    "shape": ("TensorGuard", "args_0` is float32", {"given": given_to((7, 6))}),
    "dtype": ("TensorGuard", "args_1` is float64", {"given": of_another_dtype}),
    "requires_grad": ("ParameterGuard", "now requires a gradient", {"given": with_a_gradient}),
    "structure": ("structure", "structure", {"given": as_a_list}),
    "constant": (
        "ConstantGuard",
        "argument leaf 2 is 3.0, was 2.0",
        {"given": given_to(scale=3.0)},
    ),
    "strides": ("TensorGuard", "args_0` is float32", {"given": strided}),
    "aliases": ("AliasGuard", "shares a storage", {"given": on_one_storage}),
    "grad mode": ("ModeGuard", "grad mode is False", {"around": lambda w: torch.no_grad()}),
    "inference": ("ModeGuard", " is ", {"around": lambda w: torch.inference_mode()}),
    "autocast": ("ModeGuard", "autocast", {"around": lambda w: torch.autocast("cpu")}),
    "default dtype": ("ModeGuard", "default dtype", {"around": default_dtype}),
    "deterministic": ("ModeGuard", "deterministic mode", {"around": deterministic}),
    "eval": ("ModuleGuard", "training = False", {"change": lambda w: w.model.eval()}),
    "module hook": ("ModuleGuard", "_forward_hooks", {"change": hook_the_module}),
    "dropout": ("ModuleGuard", "p = 0.5", {"change": attribute("model.drop.p", 0.5)}),
    "python number": ("PlaceGuard", "factor` is 2.0", {"change": attribute("factor", 2.0)}),
    "parameter hook": ("ParameterGuard", "other hooks", {"change": hook_the_parameter}),
    "frozen": ("ParameterGuard", "no longer requires", {"change": freeze}),
    "parameter": ("ParameterGuard", "another parameter", {"change": halve_the_weight}),
    "buffer": ("TensorGuard", "mean` is float32", {"change": replace_the_buffer}),
    "storage": ("TensorGuard", "holds 36 bytes", {"change": enlarge_the_buffer}),
    "gradients": ("SlotGuard", "grad` is there", {"change": leave_a_gradient}),
    "nesterov": ("HyperparameterGuard", "nesterov", {"change": hyperparameter(nesterov=True)}),
    "kind of lr": ("HyperparameterGuard", "lr = <class 'int'>", {"change": hyperparameter(lr=1)}),
    "state": ("source", "is not where it was", {"change": forget_the_state}),
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


# -- in the capture itself -------------------------------------------------------------------------


def break_passes(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    import passes

    def run(program: Any, pipeline: Any) -> Any:
        raise error

    monkeypatch.setattr(passes, "run", run)


def break_discharge(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from functionalize.frontend.build import Builder

    def discharge(self: Any) -> None:
        raise error

    monkeypatch.setattr(Builder, "discharge", discharge)


@pytest.mark.parametrize("break_it", [break_passes, break_discharge])
@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), InvariantError("a bug"), PassError("a bug")]
)
def test_a_bug_while_a_program_is_made(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[..., None], error: Exception
) -> None:
    """The step's result is returned; the next call raises before anything runs."""
    twins = Twins(passes="default")
    assert twins.call(0) is None
    with monkeypatch.context() as patched:
        break_it(patched, error)
        assert twins.call(1) is None
    drawn = torch.get_rng_state()
    before = {k: t.clone() for k, t in state_of(twins.ours.model, twins.ours.optimizer).items()}
    with pytest.raises(FunctionalizeError, match="a bug"):
        twins.step(batch(2))
    after = state_of(twins.ours.model, twins.ours.optimizer)
    assert differences(2, after, before) == []
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("break_it", [break_passes, break_discharge])
def test_a_bug_in_the_eager_mode(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[..., None]
) -> None:
    """A later call runs eagerly, also after another fault."""
    twins = Twins(passes="default", on_uncapturable="eager")
    assert twins.call(0) is None
    with monkeypatch.context() as patched:
        break_it(patched, RuntimeError("a bug"))
        assert twins.call(1) is None
    assert twins.call(2) is None
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
    captured = fz.capture(lambda x: (gone, x + 1)[1])
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
    """Different models, each with a fault at another call; one more trains eagerly and is not recorded."""
    worlds, eager = [Still() for _ in range(4)], [Still() for _ in range(4)]
    steps: list[Any] = [fz.capture(world.step) for world in worlds[:3]]
    faults = (0, 1, 0, 5)
    with surroundings(*(world.optimizer for world in worlds)):
        in_threads(
            *(
                lambda w=w, s=s, at=at: trained(w, s, 20, at)
                for w, s, at in zip(worlds, [*steps, worlds[3].step], faults, strict=True)
            )
        )
    for world, twin, at in zip(worlds, eager, faults, strict=True):
        trained(twin, twin.step, 20, at)
        states = (state_of(w.model, w.optimizer) for w in (world, twin))
        assert differences(at, *states) == []
    assert all(step.stats.replays >= 15 for step in steps)


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
