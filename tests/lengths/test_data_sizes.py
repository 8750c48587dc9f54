"""Sizes that ops make of arguments: counted before a call, a part of its kind, and symbols of predicted programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import functionalize as fz
from tests.fsdp.twins import bits
from tests.lengths.capturing import capture
from tests.ranks import run_on_ranks
from tests.steps import make_loss_step

pytestmark = pytest.mark.usefixtures("ample_allowance")

ROWS = 40
Body = Callable[[Any, Tensor, Tensor], Tensor]


def selected(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """As ELECTRA's discriminator does."""
    active = labels >= 0
    return F.cross_entropy(model(x)[active], labels[active])


def written(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """As wav2vec2 masks: the backward selects."""
    hidden = model(x) * 2
    hidden[labels >= 0] = model.embedding
    return hidden.square().mean()


def labelled(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """As CTC heads do: all labels of the batch in one row."""
    rows = labels.view(4, -1)[:, :5]
    chosen = rows >= 0
    log_probs = model(x).view(4, 10, 4).transpose(0, 1).log_softmax(-1)
    targets = rows.masked_select(chosen).clamp(min=1)
    return F.ctc_loss(log_probs, targets, torch.full((4,), 10), chosen.sum(-1), zero_infinity=True)


def found(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    at = (labels >= 0).nonzero().squeeze(1)
    return model(x)[at].square().sum() / at.numel()


def reshaped(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """What selects has the sizes of the model's result, which Python asks for."""
    out = model(x)
    pairs = out.view(-1, 2, out.shape[1])
    return pairs[labels.view(pairs.shape[0], 2) >= 0].square().mean()


def repeated(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return model(x).repeat_interleave(labels.clamp(min=0), 0).square().sum()


def distinct(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return model(x)[torch.unique(labels * torch.arange(ROWS) // 3).clamp(min=0)].square().sum()


def consecutive(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    values, counts = torch.unique_consecutive(labels, return_counts=True)
    return model(x)[: values.numel()].mul(counts[:, None]).square().sum()


def split(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """As packed sequences are taken apart."""
    first = (labels[:20] >= 0).sum() + 1
    sizes, (is_first,) = torch.stack([first, ROWS - first]).tolist(), (labels[:1] >= 0).tolist()
    assert type(is_first) is bool
    return sum((part.square().mean() for part in model(x).split(sizes)), x.new_zeros(()))


def decided(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Python decides by how many there are."""
    chosen = model(x)[labels >= 0]
    return chosen.square().mean() if len(chosen) > 20 else chosen.abs().mean()


def listed(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """A branch that no size of the call tells: by the first label."""
    chosen = model(x)[labels >= 0]
    return chosen.square().mean() if labels[0] >= 0 else chosen.abs().mean()


def changed_first(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The step writes the argument that selects, before and after it is used."""
    labels[3] = 1
    loss = model(x)[labels >= 0].square().mean()
    labels[4] = -1
    return loss + model(x)[labels >= 0].abs().mean()


def changed_by_the_model(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """What selects is an argument that the step writes: refused."""
    out = model(x)
    labels[3] = out[3].detach().argmax() - 2
    return out[labels >= 0].square().mean()


def either(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Only some calls select."""
    out = model(x)
    return (out if bool((labels[:2] >= 0).all()) else out[labels >= 0]).square().mean()


BODIES: dict[str, Body] = {
    each.__name__: each
    for each in (
        selected,
        written,
        labelled,
        found,
        reshaped,
        repeated,
        distinct,
        consecutive,
        split,
    )
}
DECIDING: dict[str, Body] = {
    each.__name__: each for each in (decided, listed, changed_first, changed_by_the_model, either)
}


class Model(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 4)
        self.embedding = nn.Parameter(torch.ones(4))


def batch(count: int, seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """`count` rows have a label; the others have -100."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (rows,), generator=generator)
    labels[torch.randperm(rows, generator=generator)[count:]] = -100
    return torch.randn(rows, 8, generator=generator), labels


def trained(body: Body, counts: list[int], rows: Sequence[int] = (), **options: Any) -> Any:
    """A captured step after calls with so many labels; it equals its eager twin bit for bit after every call.

    rows: of each call; empty: the same number.
    """
    models = [Model(), Model()]
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    steps: list[Any] = []
    for model, optimizer in zip(models, optimizers, strict=True):

        def step(x: Tensor, labels: Tensor, model: Any = model, optimizer: Any = optimizer) -> Any:
            return make_loss_step(lambda given: body(model, given, labels), optimizer)(x)

        steps.append(step)
    options.setdefault("audit", False)
    steps[0] = capture(steps[0], **options)
    for i, count in enumerate(counts):
        given = batch(count, i, rows[i] if rows else ROWS)
        results = []
        for each in steps:
            mine = [t.clone() for t in given]
            results.append([each(*mine), *mine])
        for a, b in zip(*results, strict=True):
            assert torch.equal(bits(a), bits(b)), (i, count)
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(bits(a), bits(b)), (i, count)
    return steps[0]


KNOWN = [n for n in (9, 14, 21, 27, 34) for _ in range(3)]
NEW = [n for n in range(10, 34) if n not in KNOWN]


@pytest.mark.parametrize("name", BODIES)
def test_a_count_that_returns_is_replayed(name: str) -> None:
    stats = trained(BODIES[name], [12] * 5 + [12, 30] * 4, allowance=None).stats
    assert stats.replays >= (6 if name in ("selected", "written", "found") else 2), stats


@pytest.mark.parametrize("name", ["selected", "written", "found"])
def test_new_counts_are_replayed_at_their_first_call(name: str) -> None:
    stats = trained(BODIES[name], [*KNOWN, *NEW], dynamic=True).stats
    assert stats.instances >= 5 and stats.mispredictions == 0, stats
    assert stats.captures <= 6


@pytest.mark.parametrize(
    ("name", "every"),
    [*((n, e) for n in DECIDING for e in (1, 1000)), *((n, 1000) for n in BODIES)],
)
def test_python_that_decides_by_counts_is_never_replayed_wrongly(name: str, every: int) -> None:
    counts = [*KNOWN, *NEW, 0, 0, 0, 1, 1, 1, ROWS, ROWS, ROWS, 2, 3]
    trained({**BODIES, **DECIDING}[name], counts, every=every, on_uncapturable="eager")


@pytest.mark.parametrize("name", ["selected", "written", "found", "reshaped"])
@pytest.mark.parametrize("is_all", [True, False])
def test_counts_of_arguments_of_new_sizes(name: str, is_all: bool) -> None:
    """How a count is computed depends on the sizes of arguments, as of `reshaped`. is_all: each row has a label."""
    learned = [(9, 24), (14, 32), (21, 40), (27, 48), (12, 36)]
    draw = random.Random(0)
    rows = [
        *(n for _, n in learned for _ in "123"),
        *(2 * draw.randrange(13, 24) for _ in range(40)),
    ]
    counts = [count for count, _ in learned for _ in "123"]
    counts += [draw.randrange(10, n - 1) for n in rows[len(counts) :]]
    stats = trained(BODIES[name], rows if is_all else counts, rows, dynamic=True).stats
    assert stats.captures <= 5 and stats.mispredictions == 0, stats
    assert stats.instances >= 5, stats


@pytest.mark.parametrize("name", ["selected", "written", "found", "repeated", "consecutive"])
def test_passes_run_for_all_counts(name: str) -> None:
    """They ask for the size of what is selected: it is that of the count, not that of the recording."""
    counts = [*KNOWN, *([*NEW, *KNOWN] * 9)]
    step = trained(BODIES[name], counts, dynamic=True, passes="default")
    (group,) = step.predictions.lengths
    assert group.passed and group.apart is None
    latest = step.programs[-1]
    latest.describe()
    made = [n.meta["val"] for n in latest.graph.nodes if "sized" in n.meta]
    if name in ("repeated", "consecutive"):
        return  # of which the size is not the count
    assert made and all(counts[-1] in value.shape for value in made)


def test_counts_that_never_return_are_not_recorded() -> None:
    stats = trained(selected, [12] * 5 + NEW, dynamic=False).stats
    assert stats.captures <= 3 and stats.eager >= 15, stats


def test_an_argument_that_the_model_writes_says_no_size() -> None:
    step = trained(changed_by_the_model, [12] * 5, on_uncapturable="eager", dynamic=False)
    assert step.stats.replays == 0 and "whose size depends on data at" in step.explain()


def test_audits_count_too() -> None:
    stats = trained(selected, [12] * 12, audit=3).stats
    assert stats.audits >= 2 and stats.audit_failures == 0


def test_programs_of_counts_are_saved(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = selected(model, x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first = fz.capture(step, allowance=None, audit=False)
    for i, count in enumerate([12, 12, 12, 30, 30]):
        first(*batch(count, i))
    first.save(tmp_path / "step.fzp")
    second = fz.capture(step, audit=False)
    second.load(tmp_path / "step.fzp")
    for i, count in enumerate([12, 30, 12]):
        assert torch.equal(second(*batch(count, i)), step(*batch(count, i)))
    assert second.stats.replays == 3


def test_numbers_of_as_many_parts_as_an_op_has_found() -> None:
    """What computes them from the arguments holds their number: for another one it fails, and the call is recorded."""

    def step(x: Tensor, mask: Tensor) -> list[Tensor]:
        cuts = F.pad(mask.nonzero().squeeze(1), (1, 1))
        cuts[-1] = len(x)
        return [part.sum(0) for part in x.split(cuts.diff().tolist())]

    captured, x = fz.capture(step, allowance=None, audit=False), torch.randn(12, 2)
    for count in (4, 4, 4, 7, 7, 7, 4, 7):
        mask = torch.arange(12) < count
        assert all(map(torch.equal, captured(x, mask), step(x, mask)))
    assert captured.stats.replays >= 4


def test_a_list_of_numbers_that_the_step_computes_is_refused() -> None:
    def body(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        out = model(x)
        return out.sum() * (out > 0).sum(0).tolist()[0]

    step = trained(body, [12] * 4, on_uncapturable="eager")
    assert step.stats.replays == 0
    assert "reads a tensor that the step computes by .tolist()" in step.explain()


# -- tokens that travel to other ranks -------------------------------------------------------------


def routed(follows: str) -> tuple[bool, int, str]:
    """Rows travel to the rank that the batch, or the model, chooses."""
    torch.manual_seed(0)
    rank, model = dist.get_rank(), Model()

    def step(x: Tensor, to: Tensor) -> Tensor:
        out = model(x)
        to = to if follows == "arguments" else to * (out.abs().sum() > 0)
        sent = torch.stack([(to == 0).sum(), (to == 1).sum()])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        give = [int(n.item()) for n in sent]
        take = [int(n.item()) for n in received]
        rows = out.new_empty(sum(take), 4)
        order = to.argsort(stable=True)
        dist.all_to_all_single(rows, out.detach()[order], take, give)
        return rows.sum(0)

    captured = fz.capture(step, on_uncapturable="eager", audit=False)
    equal = True
    for i in range(8):
        generator = torch.Generator().manual_seed(10 * i + rank)
        x = torch.randn(12, 8, generator=generator)
        to = (torch.arange(12) < 3 + (i + rank) % 5).long()
        equal &= torch.equal(captured(x, to), step(x, to))
    return equal, captured.stats.replays, captured.explain()


@pytest.mark.parametrize("follows", ["arguments", "model"])
def test_uneven_exchanges_whose_sizes_other_ranks_say_are_refused(follows: str) -> None:
    for equal, replays, text in run_on_ranks(routed, follows):
        assert equal and replays == 0
        assert "sends parts of different sizes at" in text
