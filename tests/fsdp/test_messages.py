"""Messages between two ranks in captured steps: pipelines by hand, rings, what is refused."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import functionalize as fz
from functionalize.errors import UnsupportedOpError
from tests.fsdp.models import Block
from tests.ranks import run_on_ranks

D, MICROBATCHES, CALLS = 8, 4, 14
PASSES = [None, "", "default", "fast"]


class Pipeline:
    """A stage on each rank: all forwards, then all backwards; a send is waited for at the end of the step."""

    def __init__(self):
        torch.manual_seed(dist.get_rank())
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.stage = Block(D)
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), 1e-2)

    def step(self, x, target):
        self.optimizer.zero_grad()
        inputs, outputs, losses, sends = [], [], [], []
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            if self.rank > 0:
                part = torch.empty_like(part)
                dist.recv(part, self.rank - 1)
                part.requires_grad_()
            out = self.stage(part)
            inputs.append(part)
            outputs.append(out)
            if self.rank < self.last:
                sends.append(dist.isend(out.detach(), self.rank + 1))
            else:
                losses.append((out - wanted).square().mean())
        for at, (part, out) in enumerate(zip(inputs, outputs, strict=True)):
            if self.rank == self.last:
                losses[at].backward()
            else:
                gradient = torch.empty_like(out)
                dist.recv(gradient, self.rank + 1)
                out.backward(gradient)
            if self.rank > 0:
                sends.append(dist.isend(part.grad, self.rank - 1))
        for each in sends:
            each.wait()
        self.optimizer.step()
        return torch.stack(losses).sum().detach() if losses else None


def options_of(passes):
    return {} if passes is None else {"passes": passes}


def trained_by_hand(passes):
    eager, captured = Pipeline(), Pipeline()
    step = fz.capture(captured.step, on_uncapturable="raise", **options_of(passes))
    generator = torch.Generator().manual_seed(5)
    for _ in range(CALLS):
        x, target = torch.randn(2, 8, D, generator=generator)
        loss, wanted = step(x, target), eager.step(x, target)
        assert (loss is None and wanted is None) or torch.equal(loss, wanted)
        assert all(map(torch.equal, captured.stage.parameters(), eager.stage.parameters()))
    return step.stats.replays


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("passes", PASSES)
def test_a_pipeline_by_hand(world, passes):
    assert min(run_on_ranks(trained_by_hand, passes, world=world)) >= CALLS - 4


def exchange(x, y):
    """Both ranks send before they receive: a send that waited at once would wait for ever."""
    other = 1 - dist.get_rank()
    sent = dist.isend(x * 2, other)
    received = dist.irecv(y, other)
    received.wait()
    total = (x + y).sum()
    sent.wait()
    return total


def exchanged(passes, elements):
    step = fz.capture(exchange, on_uncapturable="raise", **options_of(passes))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        x = torch.randn(elements, generator=generator)
        y, wanted = torch.zeros(elements), torch.zeros(elements)
        assert torch.equal(step(x, y), exchange(x, wanted)) and torch.equal(y, wanted)
    return step.stats.replays, step.program.print_readable()


@pytest.mark.parametrize("passes", PASSES)
def test_both_send_first(passes):
    """More bytes than a socket holds, so that a send ends when the other rank receives."""
    assert min(replays for replays, _ in run_on_ranks(exchanged, passes, 2_000_000, world=2)) >= 6


def test_a_wait_stands_where_eager_waits(expect):
    (_, text), _ = run_on_ranks(exchanged, "", 4, world=2)
    expect("both_send_first", text)


def attention_on_a_ring(q, k, v):
    """Each rank has a part of the sequence; keys and values go round. One backward through all of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
    blocks, sums, top = [], [], None
    keys, values = k, v
    for turn in range(world):
        scores = q @ keys.T / math.sqrt(D)
        high = scores.detach().amax(-1, keepdim=True)
        top = high if top is None else torch.maximum(top, high)
        blocks.append((scores, values))
        if turn < world - 1:
            following = [torch.empty_like(keys), torch.empty_like(values)]
            ops = [
                dist.P2POp(dist.isend, each.detach().contiguous(), (rank + 1) % world)
                for each in (keys, values)
            ]
            ops += [dist.P2POp(dist.irecv, each, (rank - 1) % world) for each in following]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            keys, values = following
    weights = [torch.exp(scores - top) for scores, _ in blocks]
    sums = torch.stack([each.sum(-1) for each in weights]).sum(0)
    parts = [w @ values for w, (_, values) in zip(weights, blocks, strict=True)]
    out = torch.stack(parts).sum(0) / sums[:, None]
    out.square().mean().backward()
    return out.detach(), q.grad, k.grad, v.grad


def attended(passes):
    step = fz.capture(attention_on_a_ring, on_uncapturable="raise", **options_of(passes))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        inputs = torch.randn(3, 5, D, generator=generator)
        assert all(map(torch.equal, step(*inputs), attention_on_a_ring(*inputs)))
    return step.stats.replays


@pytest.mark.parametrize("passes", PASSES)
def test_attention_on_a_ring(passes):
    assert min(run_on_ranks(attended, passes, world=3)) >= 6


def with_another_size():
    """One rank meets a size that it has not recorded, while the other one replays."""
    rank = dist.get_rank()

    def step(x):
        mine, theirs = x.sum().reshape(1), torch.empty(1)
        if rank == 0:
            dist.send(mine, 1)
            dist.recv(theirs, 1)
        else:
            dist.recv(theirs, 0)
            dist.send(mine, 0)
        return mine + theirs

    captured = fz.capture(step, dynamic=False, on_uncapturable="raise")
    for call in range(16):
        x = torch.full((3 + (rank == 1 and call in (7, 11)),), float(call))
        assert torch.equal(captured(x), step(x))
    return captured.stats.replays


def test_a_rank_that_replays_beside_one_that_does_not():
    first, second = run_on_ranks(with_another_size, world=2)
    assert first > second >= 8


def deciding_by_what_comes():
    """What ran is told by the messages that the other rank has received: none is sent twice."""
    rank = dist.get_rank()

    def step(x):
        if rank == 0:
            dist.send(x, 1)
            return x
        got = torch.empty_like(x)
        dist.recv(got, 0)
        return got * 2 if got.sum().item() > 0 else got

    captured = fz.capture(step, on_uncapturable="eager")
    for call in range(12):
        x = torch.full((3,), float(call * (-1) ** call))
        assert torch.equal(captured(x), x * 2 if rank and x.sum() > 0 else x)
    return captured.explain()


@pytest.mark.filterwarnings("ignore::functionalize.errors.UncapturableWarning")
def test_a_decision_by_a_received_number():
    first, second = run_on_ranks(deciding_by_what_comes, world=2)
    assert "0 programs" not in first
    assert "decides by a number that its graph computes" in second


def beside_a_decision():
    """Rank 0 decides by a number; rank 1 is in a group with it, and sends to rank 2, which is not."""
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])

    def step(x):
        if rank == 2:
            got = torch.empty_like(x)
            dist.recv(got, 1, group=second)
            return got
        total = x * 2
        dist.all_reduce(total, group=first)
        if rank == 0:
            return total * 3 if total.sum().item() > 0 else total
        dist.send(total, 2, group=second)
        return total

    captured = fz.capture(step)
    for call in range(1, 24):
        x = torch.full((3,), float(-call if call % 7 == 5 else call))
        wanted = x * 4 * (3 if rank == 0 and x[0] > 0 else 1)
        assert torch.equal(captured(x), wanted), (rank, call)
    return captured.explain()


@pytest.mark.filterwarnings("ignore::functionalize.errors.UncapturableWarning")
def test_a_decision_on_a_rank_that_sends_nothing():
    texts = run_on_ranks(beside_a_decision, world=3)
    assert all("one of these decides by a number" in text for text in texts[:2])


class Swapped(torch.autograd.Function):
    """What the other rank has, and in backward its gradient."""

    @staticmethod
    def forward(ctx, x):
        other, theirs = 1 - dist.get_rank(), torch.empty_like(x)
        sent = dist.isend(x, other)
        dist.recv(theirs, other)
        sent.wait()
        return theirs

    @staticmethod
    def backward(ctx, gradient):
        return Swapped.forward(ctx, gradient.contiguous())


def captured_forward():
    layer = nn.Linear(D, D)
    forward = fz.capture(lambda x: Swapped.apply(layer(x)).square(), backward=True)
    for _ in range(4):
        forward(torch.randn(2, D)).sum().backward()
    return forward.explain()


@pytest.mark.filterwarnings("ignore::functionalize.errors.UncapturableWarning")
def test_a_forward_that_may_run_again():
    for text in run_on_ranks(captured_forward, world=2):
        assert "0 programs" in text and "a second time where a backward that no program" in text


def beside_one_that_sends():
    """The passes of rank 0 change collectives; those of rank 1, which sends, are left out."""
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])

    def step(x):
        if rank == 2:
            dist.recv(x, 1, group=second)
            return x + 1
        total = x * 2
        dist.all_reduce(total, group=first)
        if rank == 1:
            dist.send(total, 2, group=second)
        return total + 1

    captured = fz.capture(step, passes="fast")
    for call in range(16):
        assert torch.equal(
            captured(torch.full((3,), float(call))), torch.full((3,), 4.0 * call + 1)
        )
    return captured.explain()


@pytest.mark.filterwarnings("ignore::functionalize.errors.UncapturableWarning")
def test_passes_of_a_rank_beside_one_that_sends():
    first, second, third = run_on_ranks(beside_one_that_sends, world=3)
    assert "left out on another rank of its process group" in first
    assert "1 program" in second and "1 program" in third


def received_later():
    """The receive of a step ends when the other rank sends, which waits for a message after the step."""
    rank, kept = dist.get_rank(), []

    def step(x):
        got = torch.zeros(2)
        kept.append(dist.irecv(got, 1))
        return x + 1

    captured = fz.capture(step)
    for call in range(6):
        if rank == 1:
            dist.recv(torch.zeros(2), 0)
            dist.send(torch.full((2,), float(call)), 0)
            continue
        captured(torch.ones(2))
        dist.send(torch.ones(2), 1)
        kept.pop().wait()
    return captured.explain() if rank == 0 else ""


def asked():
    def step(x):
        got = torch.zeros(2)
        if dist.get_rank() == 1:
            dist.send(x, 0)
            return x
        work = dist.irecv(got, 1)
        while not work.is_completed():
            work.wait()
        return got

    captured = fz.capture(step)
    for call in range(6):
        captured(torch.full((2,), float(call)))
    return captured.explain()


@pytest.mark.filterwarnings("ignore::functionalize.errors.UncapturableWarning")
def test_what_depends_on_when_a_message_ends():
    assert "and does not wait for it: call `wait()`" in run_on_ranks(received_later, world=2)[0]
    assert "asks whether a message between two ranks has ended" in run_on_ranks(asked, world=2)[0]


def from_any_rank():
    def step(x):
        dist.recv(x)
        return x + 1

    captured = fz.capture(step, on_uncapturable="raise")
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
        return ""
    assert torch.equal(captured(torch.zeros(2)), torch.full((2,), 2.0))
    with pytest.raises(UnsupportedOpError) as error:
        captured(torch.zeros(2))
    return str(error.value)


def test_a_source_that_is_data():
    _, message = run_on_ranks(from_any_rank, world=2)
    assert "receives from whichever rank sends first" in message and "src=..." in message
