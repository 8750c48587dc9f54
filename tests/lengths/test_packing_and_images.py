"""Batches whose sizes are several numbers: sequences packed into one row, images of any height and width."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import functionalize as fz
from tests.fsdp.twins import bits
from tests.scalars.bits import bits as bits_of
from tests.step.twins import same_state

pytestmark = pytest.mark.usefixtures("ample_allowance")

WORDS, WIDTH = 32, 8


class Packed(nn.Module):
    """A layer of attention within each of the sequences in a row, by `cu_seqlens`."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        hidden = self.words(ids) + self.places(position_ids)
        q, k, v = (part.view(1, -1, 2, WIDTH // 2) for part in self.qkv(hidden).chunk(3, -1))
        mixed = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), cu_seqlens)
        logits = self.head(mixed.transpose(1, 2).reshape(-1, WIDTH))
        return F.cross_entropy(logits[:-1], ids[1:])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        """By one mask of blocks."""
        sequence = torch.bucketize(torch.arange(q.shape[2]), cu_seqlens[1:], right=True)
        mask = (sequence[:, None] == sequence).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class TakenApart(Packed):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Sequence by sequence, whose lengths Python reads."""
        lengths = cu_seqlens.diff().tolist()
        parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
        each = [F.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
        return torch.cat(each, 2)


def packed(lengths: Sequence[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (sum(lengths),), generator=generator)
    places = torch.cat([torch.arange(length) for length in lengths])
    return [ids, places, F.pad(torch.tensor(list(lengths)).cumsum(0), (1, 0))]


class Convolutions(nn.Sequential):
    def __init__(self, stride: int) -> None:
        first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride, padding=1)
        super().__init__(first, nn.GroupNorm(2, 4), nn.GELU(), second)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).mean((2, 3)).square().sum()


def images(size: tuple[int, ...], seed: int) -> list[Tensor]:
    """size: height and width of two images, or how many and both."""
    generator = torch.Generator().manual_seed(seed)
    *count, height, width = size
    return [torch.randn(*(count or [2]), 3, height, width, generator=generator)]


def trained(
    build: Callable[[], nn.Module], make: Callable[..., list[Tensor]], calls: Sequence[Any]
) -> Any:
    """A captured step; it equals its eager twin bit for bit after every call."""
    models, steps = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(*batch: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss: Tensor = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        models.append(model)
        steps.append(step)
    captured = fz.capture(steps[0], dynamic=True, audit=False)
    for i, sizes in enumerate(calls):
        batch = make(sizes, i)
        a, b = captured(*[t.clone() for t in batch]), steps[1](*batch)
        assert torch.equal(bits(a), bits(b)) and same_state(*models), (i, sizes)
    return captured


def in_any_order(several: Sequence[Any], seed: int) -> list[Any]:
    found = list(several)
    random.Random(seed).shuffle(found)
    return found


ROWS = [(5, 9), (7, 4, 13), (12, 3), (6, 21, 9), (3, 2, 8, 4), (30, 20, 10, 2)]


def test_packed_sequences_of_any_number_and_length() -> None:
    draw = random.Random(0)
    new = [tuple(draw.randrange(2, 14) for _ in range(draw.choice((2, 3, 4)))) for _ in range(16)]
    stats = trained(Packed, packed, [*(r for r in ROWS for _ in range(3)), *new]).stats
    assert stats.instances + stats.predictions >= 6, stats
    assert stats.captures <= 8 and stats.mispredictions == 0


def test_packed_sequences_that_are_taken_apart() -> None:
    """One row of 24 words is cut anew at each call: the lengths are numbers that Python reads of an argument."""
    cuts = [(5, 11, 8), (7, 4, 13), (9, 12, 3), (2, 18, 4), (14, 3, 7), (4, 14, 6), (12, 5, 7)]
    calls = [
        *(cut for cut in cuts for _ in range(3)),
        (6, 10, 8),
        (8, 9, 7),
        (10, 6, 8),
        (6, 10, 8),
    ]
    stats = trained(TakenApart, packed, calls).stats
    assert stats.replays >= 7 and stats.mispredictions == 0, stats


@pytest.mark.parametrize("stride", [1, 2])
def test_images_of_any_height_and_width(stride: int) -> None:
    """With a stride, sizes are products of quotients, which are not fitted if these have remainders."""
    learned = [(8, 12), (12, 8), (16, 20), (9, 15), (21, 11), (24, 30), (13, 18), (31, 33)]
    new = in_any_order([(h, w) for h in (10, 11, 14, 17) for w in (9, 13, 16, 19)], 0)
    calls = [*(s for s in learned for _ in range(3)), *new]
    stats = trained(lambda: Convolutions(stride), images, calls).stats
    assert stats.mispredictions == 0
    assert (stats.instances + stats.predictions >= 6) == (stride == 1), stats


def test_images_whose_sizes_all_leave_one_remainder() -> None:
    """Then a stride divides them without a remainder, and so it does their products."""
    heights, widths = (24, 36, 52, 60), (28, 44, 68, 76)
    every = [(b, h, w) for b in (2, 3, 5, 7) for h in heights for w in widths]
    sizes, corners = in_any_order(every, 1), [(2, 24, 28), (8, 60, 76)]
    others = [(3, 37, 44), (3, 36, 46), (4, 39, 29)]  # of which the stride leaves another remainder
    calls = [*(s for s in [*sizes[:6], *corners] for _ in "12"), *sizes[6:30], *others, *others]
    captured = trained(lambda: Convolutions(2), images, calls)
    stats = captured.stats
    assert stats.captures <= 5 + len(others) and stats.instances >= 10, stats
    assert "//4" in captured.programs[0].print_readable(print_output=False)


# -- torch's packed sequences ----------------------------------------------------------------------


class Recurrent(nn.Module):
    """Of sequences of several lengths, as torch packs them."""

    def __init__(self, kind: str, layer: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4) if layer else nn.Identity()
        self.rnn = getattr(nn, kind)(4, 4, batch_first=True)

    def packed(self, x: Tensor, lengths: Any, is_sorted: bool) -> PackedSequence:
        return pack_padded_sequence(
            self.embed(x), lengths, batch_first=True, enforce_sorted=is_sorted
        )

    def loss(self, packed: PackedSequence) -> Tensor:
        out, _ = self.rnn(packed)
        padded, lengths = pad_packed_sequence(out, batch_first=True)
        return padded.square().sum() + (padded.sum((1, 2)) / lengths).sum()


def _sequences(i: int) -> Tensor:
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(i))


def _trained_packed(model: Recurrent, step: Callable[..., Tensor], calls: Sequence[Any]) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(*batch: Any) -> Tensor:
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = fz.capture(train, on_uncapturable="raise")
    states = [{k: v.clone() for k, v in model.state_dict().items()}]
    for fn in (captured, train):
        model.load_state_dict(states[0])
        states.append([(bits_of(fn(*call)), bits_of(list(model.parameters()))) for call in calls])
    assert states[1] == states[2]
    return captured.stats


LENGTHS = {
    "list": ([5, 3, 2], True),
    "tensor": (torch.tensor([5, 3, 3]), True),
    "unsorted": ([2, 5, 3], False),
    "unsorted tensor": (torch.tensor([2, 5, 5]), False),
    "of one": ([1, 1, 1], True),
}


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("name", LENGTHS)
def test_packed_sequences_of_constant_lengths(name: str, kind: str, layer: bool) -> None:
    """Also of what a layer has computed: the lengths follow from numbers of Python."""
    given, is_sorted = LENGTHS[name]
    model = Recurrent(kind, layer)

    def step(x: Tensor) -> Tensor:
        lengths = given.clone() if isinstance(given, Tensor) else given
        return model.loss(model.packed(x, lengths, is_sorted))

    stats = _trained_packed(model, step, [(_sequences(i),) for i in range(8)])
    assert stats.replays >= 4


@pytest.mark.parametrize("is_sorted", [False, True])
def test_packed_sequences_of_lengths_that_are_arguments(is_sorted: bool) -> None:
    """Calls of lengths that were not met before are recorded, and no other program stands for them."""
    model = Recurrent("LSTM", True)

    def step(x: Tensor, lengths: Tensor) -> Tensor:
        return model.loss(model.packed(x, lengths, is_sorted))

    met = [[5, 3, 2], [5, 4, 1]] if is_sorted else [[2, 5, 3], [4, 1, 5]]
    calls = [(_sequences(i), torch.tensor(met[i // 2 % 2])) for i in range(24)]
    assert _trained_packed(model, step, calls).replays >= 8


@pytest.mark.parametrize("name", LENGTHS)
def test_a_packed_sequence_as_an_argument(name: str) -> None:
    """Its class makes one of other values than its elements: torch's, and one of the user."""
    given, is_sorted = LENGTHS[name]
    model = Recurrent("LSTM", False)
    packed = [(model.packed(_sequences(i), given, is_sorted),) for i in range(8)]
    assert _trained_packed(model, model.loss, packed).replays >= 4


def test_a_packed_sequence_as_a_result() -> None:
    def step(x: Tensor) -> PackedSequence:
        return pack_padded_sequence(x * 2, [3, 2], batch_first=True)

    captured = fz.capture(step, on_uncapturable="raise")
    for i in range(8):
        x = _sequences(i)[:2]
        found, expected = captured(x), step(x)
        assert type(found) is PackedSequence
        assert bits_of(list(found[:2])) == bits_of(list(expected[:2]))
        assert found.sorted_indices is found.unsorted_indices is None
    assert captured.stats.replays >= 4
