"""`dynamic=True` with passes: they run once for all sizes of a class, and never by what is so at one size by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functionalize as fz
from functionalize import passes
from functionalize.cost.liveness import Liveness
from functionalize.passes.base import Pass
from functionalize.passes.remove_noops import RemoveNoops
from functionalize.program.known_inputs import KnownInputs
from functionalize.step import pass_schedule
from functionalize.templates.leaves import leaves_of
from tests.lengths.capturing import NEVER, capture
from tests.lengths.sized_calls import block, plain_loss, trained
from tests.lengths.ways import LEARNED, calls, compared

pytestmark = pytest.mark.usefixtures("ample_allowance")
EACH = [n for n in LEARNED for _ in range(3)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fz.Program]]:
    """The programs on which the passes ran; those of a class run after a few replays."""
    found: list[fz.Program] = []

    def run(program: fz.Program, pipeline: Any, original: Any = passes.run) -> fz.Program:
        found.append(program)
        return original(program, pipeline)  # type: ignore[no-any-return]

    monkeypatch.setattr(passes, "run", run)
    monkeypatch.setattr(pass_schedule, "GAIN", 5.0)
    yield found


def group_of(captured: Any) -> Any:
    (group,) = [each for each in captured.predictions.lengths if each.template is not None]
    return group


@pytest.mark.parametrize("fused", [True, False])
def test_the_passes_run_for_two_sizes_and_hold_for_all(
    runs: list[fz.Program], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = []

    def learn(self: KnownInputs, *args: Any, original: Any = KnownInputs.learn) -> None:
        learned.append(self)
        original(self, *args)

    monkeypatch.setattr(KnownInputs, "learn", learn)
    sizes = [(2, n) for n in (11, 19, 33, 61) for _ in range(3)]
    new = [(2, n) for n in range(9, 64) if n not in (11, 16, 19, 33)]
    step = trained(
        plain_loss,
        # Recorded and predicted ones in turn; then the width of the model, at which the passes do not hold.
        [*sizes, *new, *sizes, *[(2, 11), (2, 40)] * 8, *[(2, 16)] * 18],
        block,
        fused,
        passes="default",
        dynamic=True,
    )
    # At two sizes for all, and at the width; one that is not fused is not replayed without them: at two sizes before.
    assert len(runs) == (3 if fused else 5)
    assert step.stats.mispredictions == 0
    assert step.stats.instances >= 30
    assert group_of(step).apart is None
    assert {program.stage for program in step.programs[-5:-1]} == {"INPLACE"}
    assert len(learned) < 20  # of 80 replays


def test_before_the_passes_programs_are_replayed_if_they_need_no_copies() -> None:
    sizes = [(2, n) for n in (12, 20, 33, 64, 25) for _ in range(3)]
    step = trained(plain_loss, sizes, block, passes="default", dynamic=True)
    assert step.stats.eager == step.stats.waiting == 0
    assert {program.stage for program in step.programs} == {"FUNCTIONAL"}
    step = trained(plain_loss, sizes, block, fused=False, passes="default", dynamic=True)
    assert step.stats.eager == step.stats.waiting == 0
    assert {program.stage for program in step.programs} == {"INPLACE"}  # their passes ran first


def with_equal_values(x: Tensor) -> Tensor:
    """Two values that are one where the length is 8 or 33."""
    return x * torch.arange(len(x))[:, None] + torch.arange(8).sum() + torch.arange(33).sum()


def with_a_limit(x: Tensor) -> Tensor:
    return x[:64].clone() * 2  # the whole, up to 64


def with_a_rest(x: Tensor) -> Tensor:
    return x[x.shape[0] - 8 :].clone() * 2


def with_a_square(x: Tensor) -> Tensor:
    y = x @ x.new_ones(2, 33)
    return y.t().contiguous().view(-1).view(x.shape[0], 33).transpose(0, 1).reshape(33, -1) * 2


def with_padding(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 64 - x.shape[0])).sum(1)


def with_repeats(x: Tensor) -> Tensor:
    return x.repeat(x.shape[0] // 8, 1).sum(0) * x  # once where the length is less than 16


def with_parts(x: Tensor) -> Tensor:
    one, other = x.clone().split([8, x.shape[0] - 8])
    return one.sum() * torch.cat([other * 2, one])


def with_two_crossings(x: Tensor) -> Tensor:
    """Two functions that are equal at 32 and at 33, where the passes would run if these were generic sizes."""
    return x * (x.shape[0] * x.shape[0]) + x * (65 * x.shape[0] - 1056)


WAYS: list[Callable[[Tensor], Tensor]] = [
    with_equal_values,
    with_a_limit,
    with_a_rest,
    with_a_square,
    with_padding,
    with_repeats,
    with_parts,
    with_two_crossings,
]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_equal_at_some_sizes_only(
    runs: list[fz.Program], way: Callable[[Tensor], Tensor]
) -> None:
    pipeline = "recompute_views,elide_copies{parts=true},merge_duplicates,reinplace"
    compared(way, [*EACH, *calls(3)[::2]], every=NEVER, passes=pipeline)
    assert runs or way is with_repeats  # recorded at each size


def test_programs_are_what_the_passes_make_at_each_size(tmp_path: Path) -> None:
    pipeline = "cleanup,reinplace"
    sizes = [(2, n) for n in (11, 19, 33, 61) for _ in range(3)]
    step = trained(plain_loss, sizes, block, passes=pipeline, dynamic=True)
    group = group_of(step)
    group.run_passes(step.core.options.applied)
    assert group.apart is None
    assert group.passed_at((16,)) is None  # as long as the model is wide
    step.save(tmp_path / "step.fzp")
    step.forget()
    step.load(tmp_path / "step.fzp")
    for length, each in [(n, g) for n in (9, 37, 63, 96) for g in (group, group_of(step))]:
        made = leaves_of(each.passed_at((length,))[0])
        expected = leaves_of(passes.run(group.template.at((length,)), pipeline))
        assert (made.tokens, made.integers) == (expected.tokens, expected.integers), length


# -- where passes run for each size -----------------------------------------------------------------


@dataclass(frozen=True)
class ByLength(Pass):
    """Halves what is longer than 30."""

    name: ClassVar[str] = "by_length"

    def apply(self, program: fz.Program) -> int:
        done = 0
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            if node.args[1] == 2 and node.meta["val"].shape[0] > 30:
                node.args = (node.args[0], 1)
                done += 1
        return done


def test_what_a_pass_makes_for_all_sizes_is_verified(
    runs: list[fz.Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program whose graph writes an argument before all guards have passed."""

    def apply(self: Any, program: fz.Program) -> int:
        (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        node.target = torch.ops.aten.mul_.Tensor
        return 1

    monkeypatch.setattr(RemoveNoops, "apply", apply)
    pipeline = "remove_noops,verify"
    options: Any = {"every": NEVER, "audit": False, "on_uncapturable": "eager"}
    captured = capture(lambda x: x * 2, passes=pipeline, **options)
    for rows in [*EACH, 40, 41, 25]:
        assert torch.equal(captured(torch.ones(rows)), torch.full((rows,), 2.0))
    assert "writes its argument `self`" in group_of(captured).apart


def test_a_pass_of_the_user_runs_for_each_size(runs: list[fz.Program]) -> None:
    captured = capture(lambda x: x * 2, passes=[ByLength()], every=NEVER, audit=False)
    for rows in [*EACH, *(n for n in (40, 25) for _ in range(10))]:
        found = captured(torch.ones(rows))
    assert torch.equal(captured(torch.ones(40)), torch.ones(40))
    assert torch.equal(found, torch.full((25,), 2.0))
    assert "may decide by sizes" in group_of(captured).apart


def test_a_budget_holds_for_each_size(runs: list[fz.Program]) -> None:
    def gradients(x: Tensor, *weights: Tensor) -> list[Tensor]:
        for w in weights:
            x = x + F.gelu(x @ w) @ w
        return list(torch.autograd.grad(x.square().mean(), weights))

    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(6)]
    captured = capture(
        gradients, passes="remat{select=budget, budget_mb=0.03}", every=NEVER, audit=False
    )
    plain = capture(gradients, every=NEVER, audit=False)
    peaks = []
    for step in (plain, captured):
        for rows in [*EACH, *[61] * 10, *[63] * 10]:
            x = torch.ones(rows, 8)
            assert all(map(torch.equal, step(x, *weights), gradients(x, *weights)))
        step.program.describe()
        peaks.append(Liveness(step.program.graph).peak / 2**20)
    assert peaks[1] <= 0.03 < peaks[0]
    assert "bounds the memory" in group_of(captured).apart


def test_integers_that_a_pass_computes_are_not_taken_for_constants(
    runs: list[fz.Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of this package that makes an integer of which no recording tells."""

    def apply(self: Any, program: fz.Program) -> int:
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            with program.graph.inserting_after(node):
                rows = node.meta["val"].shape[0]
                part = program.graph.call_function(
                    torch.ops.aten.slice.Tensor, (node, 0, 0, 1000 + 3 * rows)
                )
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part, lambda user, part=part: user is not part)
        return 1

    monkeypatch.setattr(RemoveNoops, "apply", apply)
    captured = capture(lambda x: x * 2, passes="remove_noops", every=NEVER, audit=False)
    for rows in [*EACH, 40, 41, 25]:
        assert torch.equal(captured(torch.ones(rows)), torch.full((rows,), 2.0))
    assert "a pass has computed an integer" in group_of(captured).apart


def test_the_numbers_of_inputs_and_results_are_no_sizes(runs: list[fz.Program]) -> None:
    """A step of many parameters, at lengths below their number and that of a table's rows."""
    torch.manual_seed(0)
    table, weights = torch.randn(64, 2), [torch.randn(2, requires_grad=True) for _ in range(70)]
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9, foreach=False)

    def step(x: Tensor) -> Tensor:
        loss = sum(((x * w + table[: len(x)]).square().mean() for w in weights), torch.zeros(()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = fz.capture(step, dynamic=True, audit=False, passes="reinplace")
    for rows in (9, 20, 33, 50, *EACH, 21, 27, 35):
        captured(torch.randn(rows, 2))
    assert group_of(captured).apart is None
    assert len(runs) == 3  # of the first size, before there were others, and at two sizes for all
