"""`dynamic=True`: new sizes are predicted, their first call runs for real, later ones replay; never a wrong replay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functionalize as fz
from functionalize.step import cache, options
from functionalize.templates.leaves import leaves_of
from functionalize.templates.template import Template
from tests.lengths.capturing import NEVER
from tests.lengths.sized_calls import Loss, block, lengths, linear, plain_loss, trained
from tests.step.twins import same_state

pytestmark = pytest.mark.usefixtures("ample_allowance")

LEARNED = lengths(8, 12, 20)
NEW = lengths(37, 16, 2, 64, 9)


@pytest.mark.parametrize("passes", ["", "elide_copies,reinplace", "default"])
@pytest.mark.parametrize("fused", [True, False])
def test_new_lengths_are_replayed_after_their_first_call(passes: str, fused: bool) -> None:
    stats = trained(plain_loss, [*LEARNED, *NEW], block, fused, passes=passes).stats
    assert (stats.warmups, stats.captures) == (1, 2)
    assert (stats.predictions, stats.mispredictions, stats.audits) == (6, 0, 6)
    assert (stats.replays, stats.eager, stats.waiting) == (15, 0, 0)


def test_batches_and_lengths() -> None:
    sizes = [
        (2, 8),
        (3, 8),
        (2, 12),
        (5, 20),
        (7, 9),
        *[(b, s) for b in (2, 4) for s in (5, 16, 33)],
    ]
    stats = trained(plain_loss, [size for size in sizes for _ in range(3)]).stats
    assert (stats.captures, stats.predictions, stats.mispredictions) == (3, 8, 0)


def test_sizes_of_one_are_recorded_as_they_are() -> None:
    ones = [(2, 1), (1, 8), (1, 1)]
    stats = trained(plain_loss, [*LEARNED, *[one for one in ones for _ in range(3)], *NEW]).stats
    assert (stats.captures, stats.predictions, stats.mispredictions) == (5, 6, 0)


def test_unique_lengths_run_eagerly() -> None:
    sizes = [(2, length) for length in range(21, 61)]
    stats = trained(plain_loss, [*LEARNED, *sizes]).stats
    assert (stats.captures, stats.predictions) == (2, 2)  # one waits for its first replay
    assert stats.rare == 39


def test_a_length_that_equals_a_width_leaves_its_neighbours_predicted() -> None:
    captured = fz.capture(lambda x: (x * 2).view(8, -1) * 3, dynamic=True, audit=False)
    for rows in (12, 12, 16, 16, 20, 20, 8, 8, 9, 9, 7, 7):
        x = torch.randn(rows, 8)
        assert torch.equal(captured(x), (x * 2).view(8, -1) * 3)
    stats = captured.stats
    assert (stats.captures, stats.predictions, stats.mispredictions) == (3, 3, 0)


def test_microbatches_of_different_lengths() -> None:
    """Gradients accumulate; dropout draws as many numbers as in eager."""
    steps, models = [], [linear(), linear()]
    for model in models:
        optimizers = [torch.optim.AdamW(model.parameters(), fused=True)]

        def step(parts: list[Tensor], model: Any = model, optimizers: Any = optimizers) -> Tensor:
            total = torch.zeros(())
            for part in parts:
                loss = plain_loss(model, part) / len(parts)
                loss.backward()
                total = total + loss.detach()
            (optimizer,) = optimizers
            optimizer.step()
            optimizer.zero_grad()
            return total

        steps.append(step)
    captured = fz.capture(steps[0], dynamic=True, audit=False)
    known = [(9, 12), (7, 20), (13, 6), (21, 11), (33, 40)]
    for i, pair in enumerate([*(p for p in known for _ in range(3)), (10, 14), (14, 9), (22, 38)]):
        parts, found, drawn = [torch.randn(2, n, 8) for n in pair], [], []
        for each in (captured, steps[1]):
            torch.manual_seed(i)
            found.append(each(parts))
            drawn.append(torch.get_rng_state())
        assert torch.equal(*found) and torch.equal(*drawn) and same_state(*models), (i, pair)
    assert captured.stats.instances + captured.stats.predictions >= 4


# -- where a size decides something ----------------------------------------------------------------


def with_a_branch(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out.square().mean() if x.shape[1] > 30 else out.abs().mean()


def with_an_attribute(model: Any, x: Tensor) -> Tensor:
    if x.shape[1] > 30:
        model.longest = 37.0
    return plain_loss(model, x)


def with_a_tensor_kept(model: Any, x: Tensor) -> Tensor:
    loss = plain_loss(model, x)
    if x.shape[1] > 30:
        model.kept = x
    return loss


def with_a_loop(model: nn.Module, x: Tensor) -> Tensor:
    return sum((part.sum() for part in model(x).split(21, 1)), x.new_zeros(()))


def with_a_limit(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[:, :24].square().mean()


def with_a_table(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean() * TABLE[x.shape[1]]


TABLE = [0.5 if n < 30 else 0.25 for n in range(100)]


def with_a_distance(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cdist(model(x), x).mean()  # torch takes another op above 25 rows


def with_a_remainder(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out.square().mean() if x.shape[1] % 4 == 0 else out.abs().mean()


def with_a_dtype(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).to(torch.float64 if len(x[0]) > 30 else torch.float32).square().mean()


@pytest.mark.parametrize(
    "loss_of",
    [
        with_a_branch,
        with_an_attribute,
        with_a_tensor_kept,
        with_a_loop,
        with_a_limit,
        with_a_table,
        with_a_distance,
        with_a_remainder,
        with_a_dtype,
    ],
)
def test_a_size_that_decides_is_found_at_the_first_call(loss_of: Loss) -> None:
    def make() -> Any:
        model: Any = linear()
        model.longest, model.kept = 1.0, torch.ones(1)
        return model

    stats = trained(loss_of, [*LEARNED, *lengths(37, 16, 40, 9, 37, 9)], make).stats
    assert stats.mispredictions >= 1
    assert stats.predictions >= 1
    assert "is not as predicted from calls of other sizes: " in " ".join(stats.guard_failures)


def halves(model: nn.Module, x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return (model(x)[:, :half] * x[:, half : 2 * half]).mean()


@pytest.mark.parametrize(
    "loss_of",
    [
        halves,  # which function of the length is not determined by even ones
        lambda model, x: model(x).mean() * math.sqrt(x.shape[1]),
        lambda model, x: model(x).sum() * (1 / x.shape[1]),
        lambda model, x: model(x).mean() * torch.tensor([1.0 / len(x[0])]).sum(),
    ],
)
def test_what_is_no_function_of_the_sizes_is_recorded(loss_of: Loss) -> None:
    step = trained(loss_of, [*LEARNED, *NEW])
    assert step.stats.predictions == step.stats.mispredictions == 0


def attention(model: nn.Module, x: Tensor) -> Tensor:
    q = model(x).unflatten(-1, (2, 4)).transpose(1, 2)
    positions = torch.arange(x.shape[1])
    mask = (positions[:, None] >= positions) & (positions[:, None] - positions < 16)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().mean()


def test_a_mask_made_of_positions_is_predicted() -> None:
    stats = trained(attention, [*LEARNED, *NEW]).stats
    assert (stats.captures, stats.predictions, stats.mispredictions) == (2, 6, 0)


def test_a_fact_on_a_number_that_only_long_calls_learn() -> None:
    """No op differs at the first call, but a later one takes the branch."""
    steps = []
    for _ in range(2):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = plain_loss(model, x)
            if x.shape[1] > 30 and optimizer.param_groups[0]["lr"] > 0.05:
                loss = loss * 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        steps.append((step, optimizer))
    captured = fz.capture(steps[0][0], dynamic=True, audit=False)
    for i, length in enumerate([8, 8, 8, 12, 12, 20, 20, 37, 37, 37, 37, 37]):
        for _, optimizer in steps:
            optimizer.param_groups[0]["lr"] = 0.01 if i < 9 else 0.1
        x = torch.randn(2, length, 8)
        found = []
        for step in (captured, steps[1][0]):
            torch.manual_seed(i)
            found.append(step(x))
        assert torch.equal(*found), i
    assert captured.stats.mispredictions == 1
    assert "relies on other numbers than recorded calls did" in captured.explain()


def test_sizes_in_the_result() -> None:
    captured = fz.capture(lambda x: (x.sin(), x.shape, {"rows": len(x)}), dynamic=True, audit=False)
    for rows in (8, 8, 12, 12, 20, 20, 37, 37, 37):
        x = torch.randn(rows, 2)
        out, shape, counts = captured(x)
        assert torch.equal(out, x.sin())
        assert (type(shape), shape, counts) == (torch.Size, x.shape, {"rows": rows})
    assert (captured.stats.predictions, captured.stats.mispredictions) == (2, 0)


def test_a_guard_on_the_contents_of_an_argument() -> None:
    def step(x: Tensor, mask: Tensor) -> Tensor:
        return x.sin() if mask.all() else x * mask

    captured = fz.capture(step, dynamic=True, audit=False)
    for i, rows in enumerate((8, 8, 8, 12, 12, 20, 20, 37, 37, 37, 37, 37)):
        x, mask = torch.randn(rows), torch.ones(rows, dtype=torch.bool)
        mask[rows // 2] = i != 9  # a call of a predicted length
        assert torch.equal(captured(x, mask), step(x, mask)), i
    assert (captured.stats.predictions, captured.stats.mispredictions) == (2, 0)


def test_a_step_that_raises_at_a_new_length() -> None:
    def step(x: Tensor) -> Tensor:
        if len(x) > 30:
            raise LookupError("too long")
        return x.sin()

    captured = fz.capture(step, dynamic=True, audit=False)
    for rows in (8, 8, 12, 12, 20, 20):
        captured(torch.ones(rows))
    for _ in range(4):
        with pytest.raises(LookupError, match="too long"):
            captured(torch.ones(37))
    for _ in range(2):  # at first it is rare, as a program waits for its first replay
        assert torch.equal(captured(torch.ones(16)), torch.ones(16).sin())
    assert captured.stats.predictions == 2


def test_a_length_that_stays_is_compared_before_replays_have_paid_for_it() -> None:
    """Each of these lengths is beyond all compared ones; eight comparisons are allowed without a replay."""
    captured = fz.capture(lambda x: x.sin(), dynamic=True, audit=False)
    for rows in (8, 12, 20, *range(21, 41), *[99] * 18):
        assert torch.equal(captured(torch.ones(rows)), torch.ones(rows).sin())
    stats = captured.stats
    assert (stats.captures, stats.predictions, stats.replays) == (2, 9, 2)


def test_neither_a_comparison_nor_a_replay_makes_the_graph_of_a_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That takes a third of the time of a comparison."""
    made = list[Any]()
    monkeypatch.setattr(Template, "at", lambda self, sizes: made.append(sizes))
    stats = trained(plain_loss, [*LEARNED, *NEW], passes="").stats
    assert (stats.predictions, stats.replays) == (6, 15)
    assert not made


# -- templates of two recordings -------------------------------------------------------------------


def test_a_function_that_two_recordings_do_not_determine_is_found_by_the_next_call() -> None:
    """`n * n - n` is on a line through any two lengths: the first call that is compared shows that it is none."""
    captured = fz.capture(
        lambda x: (x @ x.t()).flatten()[: len(x) * (len(x) - 1)] * 2, dynamic=True, audit=1
    )
    for rows in (8, 12, 20, 20, 33, 37, 40, 40, 41, 50, 50):
        x = torch.randn(rows, 2)
        assert torch.equal(captured(x), (x @ x.t()).flatten()[: rows * (rows - 1)] * 2), rows
    stats = captured.stats
    assert (stats.captures, stats.predictions, stats.mispredictions) == (4, 2, 0)
    assert "is not as predicted from calls of other sizes" in captured.explain()


def test_lengths_that_are_equal_in_the_first_two_recordings_only() -> None:
    """They are one symbol until a call has other ones; then further recordings tell them apart."""
    captured = fz.capture(lambda x, y: torch.cat([x, y]).sin(), dynamic=True, audit=1)
    both = [(8, 8), (12, 12), *((n, n + k) for n in (15, 20, 31) for k in (2, 5, 9))]
    for sizes in [each for each in both for _ in range(3)]:
        x, y = (torch.randn(n) for n in sizes)
        assert torch.equal(captured(x, y), torch.cat([x, y]).sin()), sizes
    assert captured.stats.captures <= 5
    assert captured.stats.predictions >= 6 and captured.stats.mispredictions == 0


@pytest.mark.parametrize("passes", ["", "default"])
def test_a_template_that_nothing_has_confirmed_is_not_relied_on(passes: str, tmp_path: Any) -> None:
    """Recorded lengths return many times: passes run for each; no other length is replayed, and no file has it."""
    sizes = [(2, length) for _ in range(80) for length in (8, 12)]
    step = trained(plain_loss, sizes, every=NEVER, passes=passes)
    (group,) = step.predictions.lengths
    assert group.is_early and not group.passed and step.stats.captures == 2
    assert all(program.history for program in step.programs) == bool(passes)
    step.save(tmp_path / "step.fzp")
    step(torch.randn(2, 16, 8))
    assert not group.is_early and step.stats.instances == 0
    step.forget()
    step.load(tmp_path / "step.fzp")
    assert len(step.programs) == 2 and not list(step.predictions.lengths)


def test_recordings_for_a_template_that_never_comes_delay_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each length is a constant of its program. More are recorded than may be kept; then one length stays."""
    monkeypatch.setattr(cache, "MOST_PROGRAMS", 4)
    captured = fz.capture(lambda x: x * (1 / len(x)), dynamic=True, audit=False)
    for rows in (*range(2, 14), *[99] * 6):
        assert torch.equal(captured(torch.ones(rows)), torch.ones(rows) * (1 / rows))
    stats = captured.stats
    assert (stats.captures, stats.predictions, stats.replays) == (8, 0, 4)


# -- options ---------------------------------------------------------------------------------------


def test_what_it_does_not_go_with() -> None:
    for other in ({"memory": True}, {"compile": "inductor"}):
        with pytest.raises(ValueError, match="dynamic=True predicts"):
            fz.capture(plain_loss, dynamic=True, **other)
    for wrong in ("always", 0, 2.0):
        with pytest.raises(ValueError, match="dynamic is True, False or 'auto'"):
            fz.capture(plain_loss, dynamic=wrong)


def test_predicted_programs_that_were_right_are_saved_with_their_template(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "EVERY", 1)
    step = trained(plain_loss, [*LEARNED, *NEW])
    step.save(tmp_path / "step.fzp")
    count, (group,) = len(step.programs), step.predictions.lengths
    step.forget()
    step.load(tmp_path / "step.fzp")
    assert len(step.programs) == count == 8
    (loaded,) = step.predictions.lengths
    assert loaded.tokens == group.tokens  # later recordings are of this class
    assert (loaded.recorded, loaded.every, loaded.coverage) == (2, 1, group.coverage)
    for length in (11, 30):
        made, expected = (
            leaves_of(each.predicted([(2, length, 8)]).programs[0]) for each in (loaded, group)
        )
        assert (made.tokens, made.integers) == (expected.tokens, expected.integers)
    for length in (37, 30, 30):
        step(torch.randn(2, length, 8))
    assert (step.stats.captures, step.stats.predictions) == (2, 7)
    assert step.stats.replays == 5 + 10 + 2


def test_what_a_file_cannot_name_leaves_a_class_out(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    step = trained(plain_loss, [*LEARNED, *NEW])
    (group,) = step.predictions.lengths
    group.coverage.lost = object()
    step.save(tmp_path / "step.fzp")
    assert "sizes that were not recorded are recorded where it is loaded: it holds" in caplog.text
    step.forget()
    step.load(tmp_path / "step.fzp")
    assert len(step.programs) == 8 and not list(step.predictions.lengths)


# -- dynamic="auto" ----------------------------------------------------------------------------------


def test_auto_leaves_a_step_of_one_length_as_it_is() -> None:
    step = trained(plain_loss, [(2, 8)] * 6, dynamic="auto", passes="default")
    stats, (cached,) = step.stats, step.core.cache
    assert (stats.warmups, stats.captures, stats.replays, stats.eager) == (1, 1, 4, 0)
    assert (
        not list(step.predictions.lengths) and cached.op_stream is None
    )  # nothing is kept for a template
    assert "are predicted of no kind of call yet: no two recordings" in step.explain()


def test_auto_leaves_lengths_that_never_return_eager() -> None:
    sizes = [(2, length) for length in range(21, 61)]
    stats = trained(plain_loss, sizes, dynamic="auto").stats
    assert stats.warmups + stats.captures <= 2
    assert stats.eager >= 38 and stats.rare >= 32  # then it rests


@pytest.mark.parametrize("recorded, passes", [(2, ()), (3, "default")])
def test_auto_begins_when_two_recordings_differ_in_sizes(recorded: int, passes: Any) -> None:
    """A first recording that passes have rewritten is in no class: one more is needed."""
    new = [(2, length) for length in (20,)[: recorded - 2]]  # recorded at its first call
    sizes = [*[(2, 8)] * 4, *[(2, 12)] * 4, *new, *lengths(37, 16, 30)]
    step = trained(plain_loss, sizes, dynamic="auto", audit="auto", passes=passes)
    stats = step.stats
    assert stats.captures == recorded
    assert stats.predictions + stats.instances == 3
    assert stats.mispredictions == 0
    assert "are predicted of 1 of 1 kind of calls" in step.explain()
