"""`reinplace`: what is written in place, what is not, and that a step in place is bit for bit what eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functionalize as fz
from functionalize import passes
from functionalize.errors import GuardError, PassError
from functionalize.ir.commit import is_commit
from functionalize.ir.epilogue import Copy
from functionalize.passes.reinplace import InplacePlan, Reinplace
from functionalize.util.structure import flatten
from tests.faults import Tripwire, fault_of, raising
from tests.fsdp import steps
from tests.fsdp.features import FEATURES, GROUPS
from tests.fsdp.models import Net, wrapped
from tests.fsdp.twins import Verdict, bits, compare_twins, state_of
from tests.passes.helpers import rewrite
from tests.ranks import run_on_ranks

IN_PLACE = "elide_copies,reinplace"


def four() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    return tuple(torch.rand(4, 4, generator=g) for _ in range(4))


def text(fn: Callable[..., Any], make: Callable[[], tuple[Tensor, ...]] = four) -> str:
    return rewrite(fn, make, Reinplace())[1].print_readable(False)


# -- what is written in place ----------------------------------------------------------------------


def momentum(w: Tensor, m: Tensor, g: Tensor, x: Tensor) -> Tensor:
    m.mul_(0.9).add_(g)
    w.add_(m, alpha=-0.1)
    return (w * x).exp().sum()


def test_a_step_in_place(expect):
    expect("momentum", text(momentum))


def adam(w: Tensor, v: Tensor, g: Tensor, x: Tensor) -> Tensor:
    loss = (w @ x).relu().sum()
    torch._foreach_mul_([v, w], 0.9)
    torch._foreach_addcmul_([v], [g], [g], 0.1)
    denom = torch._foreach_sqrt([v])
    torch._foreach_add_(denom, 1e-8)
    torch._foreach_addcdiv_([w], [g], denom, -0.1)
    return loss


def test_lists_and_temporaries(expect):
    expect("lists", text(adam))


def test_temporaries_may_stay():
    program = rewrite(adam, four, Reinplace(temporaries=False))[1]
    found = program.print_readable(False)
    assert "relu.default" in found
    assert "_foreach_add.Scalar" in found
    assert program.writes == (0, 1)


def test_what_is_read_before_is_no_obstacle():
    def fn(w: Tensor, g: Tensor, *rest: Tensor) -> Tensor:
        before = w.t() @ g
        w.add_(g)
        return before + w

    assert rewrite(fn, four, Reinplace())[1].epilogue == ()


def test_an_element_that_must_stay_is_cloned():
    def fn(a: Tensor, b: Tensor, c: Tensor, g: Tensor) -> Tensor:
        old = c.t()
        new = torch._foreach_add([a, b, c], [g, g, g])
        a.copy_(new[0])
        b.copy_(new[1])
        return new[2] * old

    before = passes.run(fz.functions.trace(fn, *four()), "elide_copies")
    program = passes.run(before, "reinplace")
    found = program.print_readable(False)
    assert "clone = aten.clone.default(c)" in found
    assert "_foreach_add_.List([a, b, clone], [g, g, g])" in found
    assert program.writes == (0, 1)


def test_a_value_may_be_copied_elsewhere_too():
    def fn(w: Tensor, mean: Tensor, g: Tensor, x: Tensor) -> None:
        w.add_(g)
        mean.copy_(w)

    program = rewrite(fn, four, Reinplace())[1]
    assert program.writes == (0,)
    (copy,) = program.epilogue
    assert isinstance(copy, Copy)
    assert copy.input == 1


# -- what is not -----------------------------------------------------------------------------------


def refused(fn: Callable[..., Any], make: Callable[[], tuple[Tensor, ...]] = four) -> str:
    """The program of `fn`, of which no input is written in place."""
    program = rewrite(fn, make, Reinplace())[1]
    assert program.writes == ()
    return program.print_readable(False)


def test_no_rewrite_leaves_a_program_functional():
    def fn(a: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        return a @ b

    program = rewrite(fn, four, Reinplace())[1]
    assert program.stage == "FUNCTIONAL"
    assert program.history[-1] == "reinplace: 0"


def test_an_old_value_that_is_read_later():
    def fn(w: Tensor, g: Tensor, *rest: Tensor) -> Tensor:
        old = w.t() + 0
        new = w + g
        kept = w.t()
        out = (new @ kept).sum() + old
        w.copy_(new)
        return out

    traced = fz.functions.trace(fn, *four())
    assert passes.run(traced, "default,reinplace").writes == ()


def test_an_old_value_that_another_input_gets():
    def fn(a: Tensor, b: Tensor, *rest: Tensor) -> None:
        old = a.clone()
        a.add_(1)
        b.copy_(old)

    assert passes.run(fz.functions.trace(fn, *four()), IN_PLACE).writes == (0,)  # it is cloned

    def swap(a: Tensor, b: Tensor, *rest: Tensor) -> None:
        c = a + 1
        a.copy_(b + 1)
        b.copy_(c)

    refused(swap)


def test_an_op_that_reads_the_old_value_twice():
    def fn(w: Tensor, *rest: Tensor) -> None:
        w.mul_(w.t())

    assert "aten.mul.Tensor" in refused(fn)


def test_an_op_without_an_in_place_form():
    def fn(a: Tensor, b: Tensor, *rest: Tensor) -> None:
        a.copy_(torch.where(b > 0, a, b))

    assert "where = aten.where.self(gt, a, b)" in refused(fn)


def test_an_op_that_is_not_done_element_by_element():
    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
        a.addmm_(b, c)

    assert "aten.addmm.default" in refused(fn)


def test_an_op_that_draws_random_numbers():
    def fn(a: Tensor, *rest: Tensor) -> None:
        a.bernoulli_(0.5)

    refused(fn)


def test_inputs_on_one_storage():
    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    def make() -> tuple[Tensor, ...]:
        whole = torch.arange(8.0)
        return whole[:4], whole[2:6]

    assert "copy_(" in refused(fn, make)


def test_an_input_that_is_resized():
    def fn(a: Tensor, b: Tensor, *rest: Tensor) -> None:
        b.add_(1)
        fz.functions.resize_storage_bytes_(b, 128)

    assert "resize_storage_bytes_(b, 128)" in refused(fn)


def test_an_input_that_is_replaced():
    def fn(a: Tensor, b: Tensor, *rest: Tensor) -> None:
        a.add_(1)
        b.set_(a)

    assert "set_(b" in refused(fn)


def test_a_new_value_that_the_caller_is_given():
    def fn(w: Tensor, g: Tensor, *rest: Tensor) -> Tensor:
        new = w + g
        w.copy_(new)
        return new

    assert "copy_(w, add)" in passes.run(fz.functions.trace(fn, *four()), IN_PLACE).print_readable(
        False
    )


def test_a_result_of_another_dtype():
    def fn(a: Tensor, b: Tensor) -> None:
        a.mul_(b)

    def make() -> tuple[Tensor, ...]:
        return torch.ones(4, dtype=torch.bfloat16), torch.arange(4.0)

    assert "aten.mul.Tensor" in refused(fn, make)


def test_a_result_of_other_strides():
    def fn(a: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        return torch.add(a.exp().expand(2, 4, 4), 1) + b

    assert "aten.add.Tensor(expand, 1)" in refused(fn)


def test_a_list_whose_clones_cost_more():
    def fn(a: Tensor, b: Tensor, c: Tensor, g: Tensor) -> Tensor:
        old = [b.t(), c.t()]
        new = torch._foreach_add([a, b, c], [g, g, g])
        a.copy_(new[0])
        return new[1] * old[0] + new[2] * old[1]

    program = passes.run(fz.functions.trace(fn, *four()), IN_PLACE)
    assert program.writes == ()
    assert "_foreach_add.List" in program.print_readable(False)


def test_a_temporary_that_is_read_later():
    def fn(a: Tensor, *rest: Tensor) -> Tensor:
        made = a.exp()
        view = made.t()
        return (made + 1) @ view

    assert "aten.add.Tensor" in refused(fn)


def test_a_temporary_that_is_a_part():
    def fn(a: Tensor, *rest: Tensor) -> Tensor:
        return a.exp()[1:] + 1

    assert "aten.add.Tensor" in refused(fn)


# -- training steps --------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{
        f"{name}, {form}": lambda p, k=kind, o=options, f=form: k(p, **o, **_FORMS[f])
        for name, (kind, options) in {
            "SGD": (torch.optim.SGD, {"lr": 0.1}),
            "SGD, momentum": (
                torch.optim.SGD,
                {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
            ),
            "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
            "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        }.items()
        for form in ("single", "foreach", "fused")
    },
}
_FORMS: dict[str, dict[str, bool]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def verdict_of(name: str, make_step: Any = steps.plain) -> Verdict:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        return model, OPTIMIZERS[name](model.parameters())

    g = torch.Generator().manual_seed(2)
    batches = [(torch.randn(4, 8, generator=g), torch.randn(4, 3, generator=g)) for _ in range(9)]
    return compare_twins(build, make_step, batches, passes=IN_PLACE)


def check(verdict: Verdict, copies: int | None = 0) -> None:
    assert verdict.differences == []
    assert (verdict.captures, verdict.guard_failures) == (1, [])
    assert verdict.replays >= 5
    assert "commit(" in verdict.program
    if copies is not None:
        found = [line for line in verdict.program.splitlines() if line.startswith("    copy_(")]
        assert len([line for line in found if "_step" not in line]) == copies, found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str) -> None:
    check(verdict_of(name))


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> steps.Step:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = steps.loss_of(model, x, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        steps.finish(optimizer)
        return loss.detach(), norm

    return step


def two_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> steps.Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        for half in (slice(2), slice(2, None)):
            (steps.loss_of(model, x[half], y[half]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return x.sum()

    return step


@pytest.mark.parametrize("name", ["Adam, foreach", "Adam, fused"])
@pytest.mark.parametrize("make_step", [clipped, steps.keeping_gradients, two_parts])
def test_step(name: str, make_step: Any) -> None:
    kept = 10 if make_step is two_parts else 0  # gradients that are zeroed: made of nothing
    check(verdict_of(name, make_step), kept)


class Scaled:
    """A step with loss scaling. overflow: calls whose loss is infinite."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        self.model = net()
        self.optimizer = kind(self.model.parameters(), **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)

    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x).pow(2).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in state_of(self.model, self.optimizer).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(bits(a[k]), bits(b[k])) for k in a)


@pytest.mark.parametrize("form", ["single", "foreach", "fused"])
def test_an_overflow_of_a_scaled_loss(form: str) -> None:
    eager, ours = (Scaled(torch.optim.AdamW, lr=0.01, **_FORMS[form]) for _ in range(2))
    step = fz.capture(ours.step, passes=IN_PLACE)
    g = torch.Generator().manual_seed(3)
    for call in range(14):
        x = torch.randn(4, 8, generator=g) * (float("inf") if call in (8, 12) else 1)
        torch.testing.assert_close(step(x), eager.step(x), rtol=0, atol=0, equal_nan=True)
        assert same(ours.state(), eager.state()), call
        assert ours.scaler.get_scale() == eager.scaler.get_scale()
    assert step.stats.replays >= 6
    # The one for an overflow, which comes twice, cannot pay for its passes.
    assert all(program.writes for program in step.programs if program.history)
    assert any(program.writes for program in step.programs)


def test_a_guard_that_fails_changes_nothing() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def train(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss * 2 if loss.item() < 1e3 else loss

    step = fz.capture(train, passes=IN_PLACE)
    for _ in range(6):
        step(torch.ones(4, 8))
    program = step.program
    (guard,) = program.value_guards
    (commit,) = filter(is_commit, program.graph.nodes)
    assert len(commit.args) == 1
    before = {k: v.clone() for k, v in state_of(model, optimizer).items()}
    versions = [p._version for p in model.parameters()]
    leaves, _ = flatten(((torch.full((4, 8), 1e6),), {}))
    call = program.resolve(leaves)
    assert not isinstance(call, str)
    with pytest.raises(GuardError, match="is False, was True"):
        program.replay(call)
    assert same(state_of(model, optimizer), before)
    assert [p._version for p in model.parameters()] == versions
    assert guard.value is True


def test_versions_count_what_is_written() -> None:
    program = passes.run(fz.functions.trace(momentum, *four()), "reinplace")
    args = four()
    program(*args)
    assert [t._version for t in args] == [1, 2, 0, 0]  # as in eager
    assert program.writes == (0, 1)


def test_an_op_that_fails_before_the_commit_changes_nothing() -> None:
    program = passes.run(fz.functions.trace(momentum, *four()), "reinplace")
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    early = next(i for i, n in enumerate(nodes) if is_commit(n))
    for at in range(len(nodes) - 1):
        args, before = four(), four()
        with Tripwire(at, raising(RuntimeError("broken"))):
            assert fault_of(program, *args) is not None
        unchanged = all(torch.equal(a, b) for a, b in zip(args, before, strict=True))
        assert unchanged or at > early, at


def test_a_fault_in_a_replay_before_its_commit() -> None:
    """Nothing has changed yet: the call runs eagerly."""
    model, twin = net(), net()
    make = OPTIMIZERS["Adam, fused"]
    optimizer, other = make(model.parameters()), make(twin.parameters())
    step = fz.capture(steps.plain(model, optimizer), passes=IN_PLACE, audit=False)
    eager = steps.plain(twin, other)
    batch = torch.ones(4, 8), torch.zeros(4, 3)
    for _ in range(4):
        assert torch.equal(step(*batch), eager(*batch))
    ops = [n for n in step.program.graph.nodes if hasattr(n.target, "_schema") or is_commit(n)]
    commit = next(i for i, n in enumerate(ops) if is_commit(n))
    for at in range(0, commit, 5):
        with Tripwire(at, raising(RuntimeError("broken"))):
            assert torch.equal(step(*batch), eager(*batch)), at
        assert same(state_of(model, optimizer), state_of(twin, other)), at
    assert step.stats.eager == len(range(0, commit, 5))
    assert torch.equal(step(*batch), eager(*batch))
    assert same(state_of(model, optimizer), state_of(twin, other))
    assert step.stats.captures == 1


# -- programs at stage INPLACE ---------------------------------------------------------------------


def test_lowered() -> None:
    program = passes.run(fz.functions.trace(adam, *four()), "reinplace")
    mine, theirs = four(), four()
    module = program.lower()
    assert not any(is_commit(n) for n in module.graph.nodes)
    with torch.no_grad():
        (out,) = module(*mine)
    assert torch.equal(out, adam(*theirs))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_saved_and_loaded(tmp_path) -> None:
    program = passes.run(fz.functions.trace(adam, *four()), "reinplace")
    program.save(tmp_path / "adam.fzp")
    loaded = fz.load(tmp_path / "adam.fzp")
    assert loaded.stage == "INPLACE"
    assert loaded.writes == program.writes
    assert loaded.print_readable(False) == program.print_readable(False)
    mine, theirs = four(), four()
    assert torch.equal(loaded(*mine), adam(*theirs))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    passes.run(loaded, "verify")


def test_interpreted() -> None:
    program = passes.run(fz.functions.trace(adam, *four()), "reinplace")
    program.runner = None
    mine, theirs = four(), four()
    assert torch.equal(program(*mine), adam(*theirs))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_pass_on_pure_graphs_refuses_it() -> None:
    with pytest.raises(PassError, match="accepts a program at stage FUNCTIONAL, this one is at"):
        passes.run(fz.functions.trace(adam, *four()), "reinplace,elide_copies")


def test_time_is_linear() -> None:
    def chain(n: int) -> Any:
        def fn(w: Tensor, g: Tensor) -> Tensor:
            for _ in range(n):
                w.add_(g)
            return w * 1

        program = fz.functions.trace(fn, torch.zeros(2), torch.ones(2))
        program.describe()
        return program

    for n in (100, 400):
        plan = InplacePlan(chain(n).copy())
        replaced = plan.epilogue_copies()
        assert [len(writes) for writes in replaced.values()] == [n]
        assert all(len(m.readers) <= 2 for m in plan.memory.values())


# -- on ranks --------------------------------------------------------------------------------------


def on_ranks(name: str) -> Verdict:
    build = wrapped(optimizer=OPTIMIZERS[name])
    return compare_twins(build, steps.plain, steps.pairs(), passes=IN_PLACE)


@pytest.mark.parametrize("name", ["Adam, fused", "Adam, foreach", "SGD, momentum, single"])
def test_on_two_ranks(name: str) -> None:
    for rank, verdict in enumerate(run_on_ranks(on_ranks, name)):
        check(verdict, 2 * rank)  # the head's shards on the second rank are padded: parts


def feature_in_place(name: str) -> Verdict:
    row = FEATURES[name]
    return compare_twins(row.build, row.make_step, row.batches(), passes=IN_PLACE)


@pytest.mark.parametrize("name", [next(iter(rows)) for rows in GROUPS.values()])
def test_a_feature_in_place(name: str) -> None:
    for verdict in run_on_ranks(feature_in_place, name, world=FEATURES[name].world):
        assert verdict.differences == []
        assert verdict.replays >= 5


def failing_on_one_rank() -> tuple[list[str], bool, int]:
    """A number that one rank reads differs: no rank has changed anything, and all run the step again."""
    model, optimizer = wrapped(optimizer=OPTIMIZERS["Adam, fused"])()
    eager_model, eager_optimizer = wrapped(optimizer=OPTIMIZERS["Adam, fused"])()
    found: list[str] = []

    def make(model: Any, optimizer: Any) -> Any:
        def train(x: Tensor) -> Tensor:
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss * 2 if loss.item() < 1e3 else loss

        return train

    eager = make(eager_model, eager_optimizer)
    step = fz.capture(make(model, optimizer), passes=IN_PLACE)
    for call in range(9):
        large = call == 7 and dist.get_rank() == 1
        x = torch.full((4, 8), 1e6 if large else 1.0 + call)
        if not torch.equal(step(x), eager(x)):
            found.append(f"call {call}: the loss")
        if not same(state_of(model, optimizer), state_of(eager_model, eager_optimizer)):
            found.append(f"call {call}: the state")
    in_place = all(p.writes for p in step.programs if p.history)  # that of call 7 awaits its passes
    return found, in_place and bool(step.stats.replays), len(step.stats.guard_failures)


def test_a_guard_that_fails_on_one_rank() -> None:
    for found, in_place, misses in run_on_ranks(failing_on_one_rank):
        assert found == []
        assert in_place
        assert misses
