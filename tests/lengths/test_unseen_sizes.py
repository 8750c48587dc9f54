"""New sizes that are replayed at their first call, where nothing decides by them; never a wrong replay."""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize.lengths.instances import Instance
from functionalize.step import options
from functionalize.step.core import StepCore
from functionalize.templates.leaves import leaves_of
from tests.lengths.capturing import NEVER, capture
from tests.lengths.sized_calls import block, plain_loss, trained
from tests.lengths.ways import LEARNED, WAYS, calls, compare
from tests.steps import make_loss_step

pytestmark = pytest.mark.usefixtures("ample_allowance")


class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2 if ctx.rows != 41 else grads[0] * 3


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(x.size(0), 3).sum() * x


def kept(x: Tensor) -> Tensor:
    rows = x.shape[0]
    return x * 2 if hash(rows) % 7 else x * 3


def compared_shapes(x: Tensor) -> Tensor:
    return x.sin() if x.shape != torch.Size([41, 2]) else x.cos()


def in_a_set(x: Tensor) -> Tensor:
    return x * (2.0 if x.size(0) in {41, 42, 50} else 3.0)


def recomputed(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return y.sin() if y.shape[0] != 41 else y.cos()

    return checkpoint(inner, x * 2, use_reentrant=False)  # type: ignore[no-any-return]


def hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * 2 if grad.shape[0] != 41 else grad * 3)
    return y


def by_bytes(x: Tensor) -> Tensor:
    return x * 2 if x.nbytes != 41 * 8 else x * 3


def by_strides(x: Tensor) -> Tensor:
    return x * 2 if x.t().contiguous().stride(0) != 41 else x * 3


def by_storage(x: Tensor) -> Tensor:
    return x * 2 if len((x + 0).untyped_storage()) != 41 * 8 else x * 3


def as_text(x: Tensor) -> Tensor:
    return x * (2 if str(x.shape[0]) != "41" else 3)


def of_numbers(x: Tensor) -> Tensor:
    return x * 2 if max(x.shape[0] * 3 - 100, 23) == 23 else x * 3


# With whether any new size is replayed at its first call.
OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nothing": (lambda x: x.sin() * 2, True),
    "sizes for torch": (lambda x: (x.view(x.shape[0], 2, -1) * 2).reshape(x.numel()) * 3, True),
    "a comparison": (lambda x: x.sin() if x.shape[0] > 5 else x.cos(), True),
    "a threshold": (lambda x: x.sin() if x.shape[0] < 41 else x.cos(), True),
    "one size": (lambda x: x.sin() if x.shape[0] != 41 else x.cos(), True),
    "one size by ==": (compared_shapes, True),
    "one size of a product": (lambda x: x.sin() if x.numel() != 82 else x.cos(), True),
    "one size in a backward": (Sums.apply, True),
    "one size in a hook": (hooked, True),
    "one size in a recomputation": (recomputed, True),
    "one size in arithmetic": (of_numbers, True),
    "one size in a set": (in_a_set, False),
    "a hash": (kept, False),
    "len": (lambda x: x.sin() if len(x) != 41 else x.cos(), False),
    "bytes": (by_bytes, False),
    "strides": (by_strides, False),
    "a storage": (by_storage, False),
    "text": (as_text, False),
    "a module": (Widening(), True),
    "multiples of four": (lambda x: x[: x.shape[0] // 4 * 4] * 2, True),
    "the rest by three": (lambda x: x[x.shape[0] % 3 :] * 2, True),
    "halves": (lambda x: x[: x.shape[0] // 2] * 2, False),
    "a limit in torch": (lambda x: x[:41] * 2, True),
    "chunks": (lambda x: x.chunk(4)[0] * 2, False),
    "parts": (lambda x: x.split(41)[0] * 2, True),
    "distances": (lambda x: torch.cdist(x, x.detach() + 1), True),
    "a softmax": (lambda x: F.softmax(x @ x.t(), dim=-1) @ x, True),
    "padding": (lambda x: F.pad(x, (0, 0, 0, 64 - x.shape[0])).sum(1), True),
    "positions": (lambda x: x * torch.arange(x.shape[0]).clamp(max=41)[:, None], True),
}


@pytest.mark.parametrize("way", OTHERS)
def test_first_calls_that_are_replayed_equal_eager(way: str) -> None:
    fn, is_replayed = OTHERS[way]
    stats = compare(fn, calls(0), every=NEVER)
    assert (stats.instances > 0) == is_replayed, stats


def test_random_sizes_and_ways(pytestconfig: pytest.Config) -> None:
    """Sizes of recordings, of comparisons and of replays in any order, in ways drawn at random."""
    ways = [*(fn for fn, _ in OTHERS.values()), *(fn for fn, _ in WAYS.values())]
    for seed in range(150 if pytestconfig.getoption("--fuzz-long") else 3):
        draw = random.Random(seed)
        sizes = [draw.randrange(8, draw.choice((20, 50, 80))) for _ in range(60)]
        repeated = [n for n in sizes for _ in range(draw.choice((1, 1, 3)))]
        compare(draw.choice(ways), repeated, every=draw.choice((2, 8, NEVER)))


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_ask_for_a_size(way: str) -> None:
    compare(WAYS[way][0], calls(1), every=NEVER)


def test_an_integer_that_python_computes_is_not_taken_for_a_size() -> None:
    """All recorded sizes are multiples of four, so that `n // 4 * 4` is `n` in the template."""
    learned = [n for n in (8, 12, 20, 32, 64) for _ in range(3)]
    stats = compare(
        lambda x: x[: x.shape[0] // 4 * 4] * 2, [*learned, 16, 24, 28, 14, 30, 36], every=NEVER
    )
    assert stats.instances == 4  # those of 16, 24, 28, 36


def test_a_constant_that_facts_lead_to_is_not_taken_for_a_function() -> None:
    """Zero and one in recordings are fitted by a function that is one where Python computes zero."""
    way = WAYS["a root that is one integer"][0]
    sizes = [25, 48, 48, 48, 19, 19, 19, 29, 29, 29, 16, 16, 16, 22, 79, 10, 14, 28, 11, 13]
    stats = compare(way, [*sizes, 62, 62, 62, 19, 19, 50, 63, 11, 25, 14, 15], dynamic=True)
    assert stats.captures >= 4


@pytest.mark.parametrize("passes", ["", "default"])
def test_a_transformer_replays_lengths_that_it_never_had(passes: str) -> None:
    """No length returns: the first calls are recorded, of whatever length they are."""
    new = [(2, n) for n in range(9, 64) if n not in (12, 20, 33)]
    sizes = [(2, n) for n in (10, 8, 12, 20, 33, 64)]
    stats = trained(plain_loss, [*sizes, *new], block, passes=passes, dynamic=True).stats
    assert (stats.warmups, stats.captures, stats.mispredictions) == (1, 2, 0)
    assert (
        stats.instances >= 42
    )  # of 52; few are compared, and those that equal a width run eagerly
    assert stats.predictions <= 8


def test_one_new_size_in_n_is_compared_and_a_difference_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A choice by the size that no rule knows of, made where Python is not observed: by a function of torch."""
    monkeypatch.setattr(options, "EVERY", 4)

    def chosen(x: Tensor) -> Tensor:
        return F.hardtanh(x) if OF_TORCH(x) else x.sin()

    others = [10, 14, 16, 18, 22, 24, 26, 28, 30]
    captured = fz.capture(chosen, dynamic=True, audit=False)
    for rows in [*(n for n in LEARNED for _ in range(3)), *others]:
        captured(torch.randn(rows, 2))
    stats = captured.stats
    # 18 is the fourth new size: compared, it differs. From then on every first call is.
    assert (stats.instances, stats.mispredictions) == (3, 1)
    assert "is not as predicted from calls of other sizes" in captured.explain()


def test_fewer_new_sizes_are_compared_after_those_that_agreed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "EVERY", 2)
    new = [n for n in range(9, 64) if n not in LEARNED]
    stats = compare(lambda x: x.sin() * 2, [*LEARNED, *new], dynamic=True)
    due = 5  # the 2nd of 52, the 4th after it, then the 8th, the 16th and once more the 16th
    assert (stats.predictions, stats.instances) == (3 + due, len(new) - due)


def test_a_size_that_equals_a_width_is_compared_when_it_returns() -> None:
    """What is found there holds for this size alone."""
    found = []
    captured = capture(lambda x: (x @ torch.ones(2, 16)).sin(), every=NEVER, audit=False)
    for rows in (*LEARNED, *[16] * 9):
        captured(torch.ones(rows, 2))
        found.append((captured.stats.eager, captured.stats.predictions, captured.stats.replays))
    assert found[-9:] == [*((n, 3, 0) for n in range(1, 8)), (7, 4, 0), (7, 4, 1)]


def test_one_of_four_calls_of_sizes_hardly_beyond_compared_ones_is_compared() -> None:
    captured = capture(lambda x: x.sin() * 2, every=NEVER, audit=False)
    found = []
    for rows in (*LEARNED, 66, 65, 66, 67, 66, 70):
        captured(torch.randn(rows, 2))
        found.append((captured.stats.rare, captured.stats.predictions, captured.stats.instances))
    assert found[-4:] == [(3, 3, 0), (3, 4, 0), (3, 4, 1), (4, 4, 1)]


def test_the_state_of_python_is_not_read_where_only_torch_may_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the compared sizes; what torch does otherwise there is found."""
    monkeypatch.setattr(options, "EVERY", 4)
    read = []

    def state(self: Any, *args: Any, original: Any = StepCore.state_before) -> Any:
        read.append(args)
        return original(self, *args)

    monkeypatch.setattr(StepCore, "state_before", state)
    captured = fz.capture(lambda x: x[:70] * 2, dynamic=True, audit=False)
    for rows in (*LEARNED, 69, 80):
        x = torch.randn(rows, 2)
        assert torch.equal(captured(x), x[:70] * 2)
    assert (captured.stats.predictions, captured.stats.mispredictions) == (4, 1)
    assert len(read) == 2  # in the observed calls
    captured = fz.capture(lambda x: x.sin() * 2, dynamic=True, audit=False)
    for rows in (*LEARNED, 10, 14, 18, 22):
        captured(torch.randn(rows, 2))
    assert (captured.stats.predictions, len(read)) == (4, 5)  # all of one new size in four


@pytest.mark.parametrize("first", [(60, 64), (60, 60), (20, 60), (20, 33)], ids=str)
def test_what_only_some_sizes_write_is_always_written(
    first: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a file in a place that no walk reads. first: the first compared sizes, after two recorded ones."""
    with (tmp_path / "sizes.txt").open("w") as file:
        monkeypatch.setattr(linecache, "FILE", file, raising=False)

        def step(x: Tensor) -> Tensor:
            if x.shape[0] > 50:
                sys.modules["line" + "cache"].FILE.write(".")
            return x.sin() * 2

        captured = capture(step, every=NEVER, audit=False, on_uncapturable="eager")
        sizes = (8, 12, *first, 10, 62, 18, 14, 61, 63, 16, 58, 64, 60, 9, 11, 62, 58)
        for rows in sizes:
            captured(torch.randn(rows, 2))
    assert captured.stats.instances >= 1
    assert len((tmp_path / "sizes.txt").read_text()) == sum(rows > 50 for rows in sizes)


class _OfTorch:
    """Reads a size without a call that is replaced, as C++ does."""

    size = torch._C.TensorBase.size

    def __call__(self, x: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return type(self).size(x, 0) == 18


OF_TORCH = _OfTorch()


def test_two_recordings_are_enough_where_only_guards_know_an_integer() -> None:
    """The bytes of the argument, `24*s0`, are in no op, and no first call compares results: replays compare them."""
    weight = torch.randn(8, 4)

    def step(tokens: Tensor) -> Tensor:
        return torch.zeros(8, 4).index_add(0, tokens.flatten(), weight[tokens].flatten(0, 1))

    captured = fz.capture(step, dynamic=True)
    for length in (5, 9, 6, 8, 7, 10):
        tokens = torch.randint(8, (3, length))
        assert torch.equal(captured(tokens), step(tokens))
    assert (captured.stats.captures, captured.stats.predictions) == (2, 3)


def test_sizes_between_calls_that_differ_are_compared() -> None:
    """`cdist` takes another op from 26 rows on: between 20 and 33 nothing is replayed that was not compared."""
    captured = capture(lambda x: torch.cdist(x, x + 1) * 2, every=NEVER, audit=False)
    for rows in [*(n for n in LEARNED for _ in range(3)), *range(9, 64)]:
        x = torch.randn(rows, 2)
        assert torch.equal(captured(x), torch.cdist(x, x + 1) * 2), rows
    assert captured.stats.instances > 0


def test_instances_equal_recorded_programs(pytestconfig: pytest.Config) -> None:
    """Leaf for leaf, for batches and lengths; those of 1 are kinds of their own."""
    model = block()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = make_loss_step(lambda x: plain_loss(model, x), optimizer)
    captured = fz.capture(step, dynamic=True, audit=1)
    for batch, length in ((2, 9), (3, 9), (2, 12), (5, 20), (4, 33), (6, 24)):
        for _ in range(3):
            captured(torch.randn(batch, length, 8))
    (group,) = [each for each in captured.predictions.lengths if each.template is not None]
    is_long, equal = pytestconfig.getoption("--fuzz-long"), 0
    batches, lengths = (range(1, 5), range(1, 97)) if is_long else ((1, 2, 4), (7, 50))
    for batch in batches:
        for length in lengths:
            recorded = fz.capture(step, allowance=None, audit=False)
            for _ in range(3):
                recorded(torch.randn(batch, length, 8))
            prediction = group.predicted([(batch, length, 8)])
            if prediction is None:
                assert 1 in (batch, length) or length in (2, 4, 8, 16), (batch, length)
                continue
            made, expected = leaves_of(prediction.programs[0]), leaves_of(recorded.program)
            assert (made.tokens, made.integers) == (expected.tokens, expected.integers)
            equal += 1
    assert equal >= (250 if is_long else 4)


def test_what_is_said_of_sizes_that_were_replayed_unseen() -> None:
    captured = fz.capture(lambda x: x.sin() * 2, dynamic=True, audit=False)
    for rows in [*(n for n in LEARNED for _ in range(3)), 10, 14, 16]:
        captured(torch.randn(rows, 2))
    assert "3 sizes replayed at their first call" in captured.explain()
    assert {type(program) for program in captured.programs} == {Instance}  # the recorded ones, too
    text = captured.program.print_readable(print_output=False)
    assert text.startswith("# s0 = 16: size 0 of `x`\nprogram(\n    x: float32[s0, 2],\n")
    assert "float32[16, 2]" in str(captured.program.inputs[0].geometry)


def test_what_python_reads_of_the_arguments_tells_classes_apart() -> None:
    """Two programs for each length: with padding and without. Both are predicted, also at a length that one has."""

    def step(x: Tensor, mask: Tensor) -> Tensor:
        return x.sin() if mask.all() else x.cos() * mask[:, None]

    captured = fz.capture(step, dynamic=True, audit=False)
    draw, unseen = random.Random(0), []
    for i, rows in enumerate([8, 40, 12, 36, 20, 28, *draw.sample(range(9, 40), 31)] * 2):
        for is_padded in (False, True) if i % 2 else (True, False):
            x, mask = torch.randn(rows, 2), torch.arange(rows) < rows - is_padded
            before = captured.stats.instances
            assert torch.equal(captured(x, mask), step(x, mask)), (rows, is_padded)
            unseen.append((is_padded, captured.stats.instances - before))
    assert captured.stats.captures <= 8 and captured.stats.mispredictions == 0
    for is_padded in (False, True):
        assert sum(n for padded, n in unseen if padded is is_padded) >= 15
