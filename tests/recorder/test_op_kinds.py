"""Sizes of results: an op whose size depends on constants and arguments is captured; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import functionalize as fz
from functionalize.errors import UncapturableError
from tests.steps import make_loss_step


class Model(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))


Body = Callable[[Any, Tensor], Tensor]


def ctc(lengths: Any, targets: Any = ((1, 2), (2, 1)), **options: Any) -> Body:
    def loss(m: Any, x: Tensor) -> Tensor:
        frames, labels = lengths() if callable(lengths) else lengths
        logits = m.linear(x).unsqueeze(1).expand(5, 2, 4).log_softmax(-1)
        return F.ctc_loss(logits, torch.tensor(targets), frames, labels, **options)

    return loss


def counts(m: Any, x: Tensor) -> Tensor:
    """Experts that the rows chose: computed by the model, and always below the number of experts."""
    chosen = m.linear(x).argmax(-1)
    return m.linear(x).sum() * torch.bincount(chosen, minlength=4).square().sum()


def filled(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x).clone()
    y[:, torch.tensor([True, False, True, True])] = torch.tensor([1.0, 2.0, 3.0])
    return y.square().sum()


CAPTURED: dict[str, Body] = {
    "output_size": lambda m, x: m.linear(x).repeat_interleave(torch.tensor([1, 2, 0, 3, 1]), 0, output_size=7).sum(),
    "output_size_of_data": lambda m, x: m.linear(x).repeat_interleave((x[:, 0] > 9) + 2, 0, output_size=10).sum(),
    "repeats": lambda m, x: m.linear(x).repeat_interleave(torch.tensor([1, 2, 0, 3, 1]), 0).square().sum(),
    "bincount": lambda m, x: (m.linear(x) * torch.bincount(torch.tensor([0, 1, 3]))).sum(),
    "bincount_of_arguments": lambda m, x: (m.linear(x) * torch.bincount((x[:, 0] > 0).long(), minlength=4)).sum(),
    "bincount_of_results": counts,
    "weighted_bincount": lambda m, x: torch.bincount((x[:, 0] > 0).long(), x[:, 1], 4).sum() * m.linear(x).sum(),
    "ctc_tuples": ctc(((5, 5), (2, 2))),
    "ctc_lists": ctc(([5, 4], [2, 1]), reduction="sum", zero_infinity=True),
    "ctc_tensors": ctc(lambda: (torch.tensor([5, 4]), torch.tensor([2, 1]))),
    "ctc_flat_targets": ctc(((5, 4), (2, 1)), targets=(1, 2, 2)),
    "mask": lambda m, x: m.linear(x)[:, torch.tensor([True, False, True, True])].square().sum(),
    "mask_of_list": lambda m, x: m.linear(x)[:, [True, False, True, True]].square().sum(),
    "mask_in_a_buffer": lambda m, x: m.linear(x)[:, m.mask].square().sum(),
    "mask_made": lambda m, x: m.linear(x)[:4][torch.ones(4, 4, dtype=torch.bool).triu(1)].square().sum(),
    "mask_compared": lambda m, x: m.linear(x)[:, torch.arange(4) != 1].square().sum(),
    "mask_written": filled,
    "masked_select": lambda m, x: m.linear(x).masked_select(torch.tensor([True, False, True, True])).sum(),
    "nonzero": lambda m, x: m.linear(x)[:, torch.tensor([0, 1, 1, 0]).nonzero().squeeze(1)].sum(),
    "where": lambda m, x: m.linear(x)[:, torch.where(m.mask)[0]].sum(),
    "unique": lambda m, x: m.linear(x)[:, torch.unique(torch.tensor([0, 1, 1]))].sum(),
}  # fmt: skip
REFUSED: dict[str, tuple[Body, str]] = {
    "mask_of_results": (lambda m, x: m.linear(x)[m.linear(x) > 0].sum(), "aten.index.Tensor"),
    "nonzero": (lambda m, x: m.linear(x)[(m.linear(x)[:, 0] > 0).nonzero()].sum(), "aten.nonzero.default"),
    "selected": (lambda m, x: m.linear(x).masked_select(m.linear(x) > 0).sum(), "aten.masked_select.default"),
    "repeats": (lambda m, x: m.linear(x).repeat_interleave(m.linear(x).argmax(1), 0).sum(), "aten.repeat_interleave"),
    "unbounded": (lambda m, x: (m.linear(x).sum() * torch.bincount(m.linear(x).argmax(0))).sum(), "aten.bincount"),
    "unique": (lambda m, x: m.linear(x)[torch.unique(m.linear(x).argmax(0))].sum(), "aten._unique2"),
    "unique_floats": (lambda m, x: m.linear(x).sum() * torch.unique(x).numel(), "aten._unique2"),
    "unique_rows": (lambda m, x: m.linear(x).sum() * torch.unique((x > 0).long(), dim=0).numel(), "aten.unique_dim"),
}  # fmt: skip


def trained(
    body: Body, wrap: Callable[[Any], Any], change: Callable[[Any], None] | None = None
) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step, seen = wrap(make_loss_step(lambda x: body(model, x), optimizer)), []
    for i in range(8):
        if i == 5 and change is not None:
            change(model)
        loss = step(torch.randn(5, 4, generator=torch.Generator().manual_seed(i)))
        seen.append([t.detach().clone() for t in (loss, *model.parameters())])
    return step, seen


def compared(body: Body, change: Callable[[Any], None] | None = None, **options: Any) -> Any:
    _, expected = trained(body, lambda fn: fn, change)
    options.setdefault("on_uncapturable", "eager")
    step, seen = trained(body, lambda fn: fz.capture(fn, **options), change)
    for ours, theirs in zip(seen, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    return step


@pytest.mark.parametrize("passes", ["", "default"])
@pytest.mark.parametrize("name", CAPTURED)
def test_sizes_that_follow_from_constants_are_captured(name: str, passes: str) -> None:
    step = compared(CAPTURED[name], passes=passes)
    assert step.stats.replays >= 4, (step.stats, step.explain())


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_depend_on_data_are_refused(name: str) -> None:
    body, op = REFUSED[name]
    step = compared(body, dynamic=False)
    assert step.stats.replays == 0
    assert f"{op}" in step.explain() and "whose size depends on data at" in step.explain()


def test_least_squares() -> None:
    """LAPACK rounds by the alignment of memory, in eager too."""

    def body(m: Any, x: Tensor) -> Tensor:
        return torch.linalg.lstsq(x, x @ torch.ones(4, 2)).solution.sum() * m.linear(x).sum()

    _, expected = trained(body, lambda fn: fn)
    step, seen = trained(body, fz.capture)
    for ours, theirs in zip(seen, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert step.stats.replays >= 5


def test_a_mask_that_changes_is_noticed_before_the_graph_runs() -> None:
    def change(model: Any) -> None:
        model.mask.copy_(torch.tensor([True, False, False, True]))

    step = compared(CAPTURED["mask_in_a_buffer"], change)
    assert step.stats.captures == 2 and "aten" not in step.stats.guard_failures[0]
    assert "read at" in step.stats.guard_failures[0]


def test_more_bins_than_were_asked_for() -> None:
    """The replay has the bins that were recorded, and a guard runs the step again if data has more."""
    weight = nn.Parameter(torch.ones(4))

    def fn(at: Tensor) -> Tensor:
        chosen = (at * weight.detach()[0]).long()
        return (torch.bincount(chosen, minlength=4) * weight.detach().sum()).clone()

    step = fz.capture(fn, dynamic=False, on_uncapturable="raise")
    for last in (1, 2, 3, 3, 1):
        at = torch.tensor([0.0, last])
        assert torch.equal(step(at), fn(at))
    assert step.stats.replays == 3
    with pytest.raises(UncapturableError, match=r"aten.bincount.default gives a result whose size"):
        for _ in range(2):
            at = torch.tensor([0.0, 6.0])
            assert torch.equal(step(at), fn(at))


def test_lengths_that_change() -> None:
    lengths: list[int] = []

    def start(model: Any) -> None:
        lengths[:] = [2, 1]

    def change(model: Any) -> None:
        lengths[:] = [2, 2]

    def body(m: Any, x: Tensor) -> Tensor:
        return ctc(([5, 4], lengths))(m, x)

    start(None)
    _, expected = trained(body, lambda fn: fn, change)
    start(None)
    step, seen = trained(body, fz.capture, change)
    for ours, theirs in zip(seen, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert step.stats.replays >= 2  # the first change makes the lengths live: two recordings


def test_memory_that_no_op_filled_is_refused() -> None:
    """C++ fills the tensor that it makes of the lengths without an op: a replay would divide by something else."""
    c_function: Any = torch._C._VariableFunctions.ctc_loss  # type: ignore[attr-defined]

    def body(m: Any, x: Tensor) -> Tensor:
        logits = m.linear(x).unsqueeze(1).expand(5, 2, 4).log_softmax(-1)
        loss: Tensor = c_function(logits, torch.ones(2, 2).long(), [5, 4], [2, 1], 0, 1, False)
        return loss

    step = compared(body)
    assert step.stats.replays == 0
    assert "reads a tensor that was made without contents and that no op filled" in step.explain()


def sequences(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, (last, _) = m.lstm(packed)
    return last.sum() + out.data.square().sum()


def pre_packed(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return m.gru(PackedSequence(x.reshape(-1, 4)[: int(lengths.sum())], lengths))[1].sum()


READ_BY_CPP: dict[str, tuple[Callable[..., Tensor], list[list[int]]]] = {
    "tensor_split": (lambda m, x, i: m.gru(x)[0].tensor_split(i, 1)[1].sum(), [[1, 3], [2, 3]]),
    "sections": (lambda m, x, i: m.gru(x)[0].tensor_split(i[0], 1)[0].sum(), [[2, 0], [3, 0]]),
    "packed": (sequences, [[5, 3, 2], [4, 5, 1]]),
    "pre_packed": (pre_packed, [[3, 2, 1], [3, 3, 0]]),
}


@pytest.mark.parametrize("name", READ_BY_CPP)
def test_indices_that_cpp_reads_without_an_op_are_guarded(name: str) -> None:
    """The tensors have one size, and their contents decide how the result is cut."""
    fn, contents = READ_BY_CPP[name]
    torch.manual_seed(0)
    model = nn.Module()
    model.lstm, model.gru = nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)

    def step(x: Tensor, lengths: Tensor) -> Tensor:
        loss = fn(model, x, lengths)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    captured = fz.capture(step)
    first, second = (torch.tensor([n for n in each if n]) for each in contents)
    for i, lengths in enumerate([first] * 4 + [second] * 3 + [first]):
        x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(i))
        assert torch.equal(captured(x, lengths.clone()), step(x, lengths))
    assert captured.stats.replays >= 3
