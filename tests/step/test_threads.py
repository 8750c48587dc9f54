"""Captured steps in several threads, and threads that read what a step changes."""

import copy
import json
import logging
import math
import os
import pickle
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize.errors import UncapturableError
from functionalize.scalars.live_scalars import as_live
from functionalize.scalars.scalar_log import ScalarLog
from functionalize.util import turns
from tests.ranks import run_on_ranks

BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(24)]


@pytest.fixture(autouse=True)
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def trainers(capture, count):
    """Steps of trainers that reach each other's models and optimizers through two lists."""
    models, optimizers = [], []
    for k in range(count):
        torch.manual_seed(k)
        models.append(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
        optimizers.append(torch.optim.AdamW(models[k].parameters(), 1e-2))

    def make(k):
        def step(x):
            optimizers[k].zero_grad()
            loss = models[k](x).square().mean()
            loss.backward()
            optimizers[k].step()
            return loss.detach()

        return capture(step)

    return [make(k) for k in range(count)]


def losses_in_threads(steps, warm):
    first = 8 if warm else 0
    losses = [[step(x) for x in BATCHES[:first]] for step in steps]
    gate = threading.Barrier(len(steps))

    def work(k):
        gate.wait()
        losses[k] += [steps[k](x) for x in BATCHES[first:]]

    with ThreadPoolExecutor(len(steps)) as pool:
        for done in [pool.submit(work, k) for k in range(len(steps))]:
            done.result()
    return losses


def assert_equal(got, wanted):
    assert [len(each) for each in got] == [len(each) for each in wanted]
    for losses, others in zip(got, wanted, strict=True):
        assert all(map(torch.equal, losses, others))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("warm", [False, True])
def test_steps_that_reach_each_other(count, warm):
    wanted = losses_in_threads(trainers(lambda fn: fn, count), warm)
    steps = trainers(lambda fn: fz.capture(fn, audit=False), count)
    assert_equal(losses_in_threads(steps, warm), wanted)
    if warm:
        assert all(step.stats.replays for step in steps)


def test_forwards_in_two_threads():
    """What follows a forward in its thread is in no turn: both run eagerly, and replay when one has ended."""
    model = nn.Linear(6, 3)
    forwards = [fz.capture(lambda x: model(x).square().mean(), backward=True) for _ in range(2)]
    for x in BATCHES[:6]:
        forwards[0](x).backward()
    replays, begun, go = forwards[0].stats.replays, threading.Event(), threading.Event()

    def work():
        forwards[1](BATCHES[0]).backward()
        begun.set()
        assert go.wait(60)

    thread = threading.Thread(target=work)
    with pytest.warns(
        fz.errors.UncapturableWarning, match="while two threads call captured forwards"
    ):
        thread.start()
        assert begun.wait(60)
        forwards[0](BATCHES[0]).backward()
    assert forwards[0].stats.replays == replays
    assert [forward.stats.eager > 0 for forward in forwards] == [True, True]
    go.set()
    thread.join()
    forwards[0](BATCHES[0]).backward()
    assert forwards[0].stats.replays > replays


def test_one_step_called_by_two_threads():
    (eager,), (step,) = trainers(lambda fn: fn, 1), trainers(fz.capture, 1)
    wanted, got = [eager(x) for x in BATCHES], []
    for x in BATCHES:
        thread = threading.Thread(target=lambda x=x: got.append(step(x)))
        thread.start()
        thread.join()
    assert_equal([got], [wanted])
    assert step.stats.replays


def test_an_error_ends_the_turn():
    steps = trainers(fz.capture, 1)

    @fz.capture
    def fails(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails(BATCHES[0])
    with ThreadPoolExecutor(1) as pool:
        assert torch.is_tensor(pool.submit(steps[0], BATCHES[0]).result(timeout=30))


@pytest.mark.parametrize("has_ranks", [False, True])
def test_steps_that_wait_for_each_other(has_ranks, monkeypatch):
    """A barrier in both steps: eager runs them, so the second call goes without a turn."""
    name = "PATIENCE_OF_RANKS" if has_ranks else "PATIENCE"
    monkeypatch.setattr(f"functionalize.step.captured_step.{name}", 0.2)
    monkeypatch.setattr("functionalize.step.captured_step.has_ranks", lambda: has_ranks)
    gate, weights = threading.Barrier(2), [torch.ones(3), torch.ones(3)]

    def make(k):
        def step(x):
            gate.wait(timeout=30)
            return weights[k].mul_(x)

        return fz.capture(step, on_uncapturable="eager")

    steps = [make(0), make(1)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            done = [pool.submit(step, torch.tensor(2.0)) for step in steps]
            for each in done:
                each.result(timeout=60)
    assert [w.tolist() for w in weights] == [[16.0] * 3] * 2
    assert turns.TURNS.disturbances


def test_a_step_that_calls_another_in_a_thread(monkeypatch):
    """It waits for the other, which wants the turn; after a few calls it runs without a turn, and the other replays."""
    monkeypatch.setattr("functionalize.step.captured_step.PATIENCE", 0.2)
    (inner,), (eager,) = trainers(fz.capture, 1), trainers(lambda fn: fn, 1)
    for x in BATCHES[:8]:
        assert torch.equal(inner(x), eager(x))

    def calls(x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(inner, x).result()

    outer = fz.capture(calls, on_uncapturable="eager")
    for x in BATCHES[8:14]:
        assert torch.equal(outer(x), eager(x))
    before = inner.stats.replays
    assert torch.equal(outer(BATCHES[14]), eager(BATCHES[14]))
    assert inner.stats.replays == before + 1


def test_a_fork_while_another_thread_has_the_turn():
    inside, leave = threading.Event(), threading.Event()

    def waits(x):
        inside.set()
        leave.wait()
        return x + 1

    step = fz.capture(waits, on_uncapturable="eager")
    (other,) = trainers(fz.capture, 1)
    thread = threading.Thread(target=step, args=(BATCHES[0],))
    thread.start()
    inside.wait()
    taken, child = time.monotonic(), os.fork()
    if child == 0:
        turn = turns.TURNS.take(lambda: 0.0)
        os._exit(0 if turn is not None else 1)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert status == 0
    assert time.monotonic() - taken < 30
    assert torch.is_tensor(other(BATCHES[0]))


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(6, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.n, self.ema = 0, 0.0

    def step(self, x):
        self.n += 1
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.ema = 0.9 * self.ema + 0.1 * loss.item()
        return loss.detach()


@contextmanager
def beating(read):
    """A thread named `beat` calls `read` again and again."""
    stop = threading.Event()

    def beat():
        while not stop.wait(1e-5):
            read()

    thread = threading.Thread(target=beat, name="beat")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_thread_that_reads_numbers(caplog):
    """It sees plain numbers by type; the calls run eagerly, with a warning, and are recorded when it has ended."""
    eager, trainer = Trainer(), Trainer()
    step, errors, kinds = fz.capture(trainer.step), [], set()

    def use():
        try:
            read = trainer.n, trainer.ema, trainer.optimizer.param_groups[0]["lr"]
            kinds.update(map(type, read))
            json.dumps(read)
            pickle.loads(pickle.dumps(copy.deepcopy(read)))
            assert f"{read[0]:06d} {read[1]:.3f}" and read[1] * 2 >= 0 and math.exp(read[2]) > 1
        except BaseException as error:
            errors.append(error)

    with beating(use):
        got = [step(x) for x in BATCHES]
    assert_equal([got], [[eager.step(x) for x in BATCHES]])
    assert (errors, kinds, trainer.n) == ([], {int, float}, len(BATCHES))
    assert "while the thread 'beat' (" in caplog.text and "queue.get()" in caplog.text
    for x in BATCHES:
        assert torch.equal(step(x), eager.step(x))
    assert step.stats.replays and trainer.ema == eager.ema


def test_a_thread_that_begins_later_delays_audits_and_no_replay():
    """An audit that is due while it may read is left out: else each later call would be due, and run eagerly."""
    eager, trainer = Trainer(), Trainer()
    step, kinds = fz.capture(trainer.step, audit=4), set()
    for x in BATCHES[:8]:
        assert torch.equal(step(x), eager.step(x))
    before, audits = step.stats.replays, step.stats.audits
    with beating(lambda: kinds.update(map(type, (trainer.n, trainer.ema)))):
        got = [step(x) for x in BATCHES]
    assert_equal([got], [[eager.step(x) for x in BATCHES]])
    assert (step.stats.replays - before, step.stats.audits) == (len(BATCHES), audits)
    assert kinds == {int, float}
    for x in BATCHES:
        assert torch.equal(step(x), eager.step(x))
    assert step.stats.audits > audits and trainer.ema == eager.ema


class ShardedTrainer(Trainer):
    """branches: whether the step decides by a number, about which ranks that replay vote."""

    def __init__(self, branches):
        super().__init__()
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.branches = branches

    def step(self, x):
        loss = super().step(x)
        return loss * 2 if self.branches and self.ema > 0.3 else loss


def beside_a_thread_of_one_rank(branches, begin, end):
    """Of one rank: the types that the thread read, and which calls ran eagerly, before and after its end."""
    eager, trainer, kinds = ShardedTrainer(branches), ShardedTrainer(branches), set()
    step, stack, ran = fz.capture(trainer.step, audit=4), ExitStack(), []
    for at, x in enumerate([*BATCHES, *BATCHES]):
        if at == begin and dist.get_rank() == 1:
            stack.enter_context(beating(lambda: kinds.update(map(type, (trainer.n, trainer.ema)))))
        if at == end:
            stack.close()
        before = step.stats.eager
        assert torch.equal(step(x), eager.step(x))
        assert (trainer.n, trainer.ema) == (eager.n, eager.ema)
        ran.append(step.stats.eager - before)
    return kinds, sum(ran[begin:end]), sum(ran[end + 1 :]), step.stats.audits


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(0, 12), (3, 12), (12, 30)])
def test_a_thread_that_reads_numbers_on_one_rank(branches, begin, end):
    """Before there are programs, all ranks wait for its end; then they go on, without audits while it runs."""
    for rank, found in enumerate(
        run_on_ranks(beside_a_thread_of_one_rank, branches, begin, end, world=2)
    ):
        kinds, beside, after, audits = found
        assert kinds == ({int, float} if rank == 1 else set())
        assert beside >= 10 if begin == 0 else beside == 0, found
        assert after == 0 and audits >= 4, found


def test_a_thread_that_waits_for_numbers_is_no_reader():
    trainer, sent, got = Trainer(), queue.Queue(), []
    step = fz.capture(trainer.step)

    def report():
        while (numbers := sent.get()) is not None:
            got.append(json.dumps(numbers))

    thread = threading.Thread(target=report)
    thread.start()
    for x in BATCHES:
        step(x)
        sent.put((trainer.n, trainer.ema))
    sent.put(None)
    thread.join()
    assert step.stats.replays and len(got) == len(BATCHES)


def test_live_numbers_in_a_thread_that_does_not_record():
    """What another thread does with a number is as with a plain one, and no fact of the recording."""
    log = ScalarLog(lambda reason: None)
    number = as_live(log.from_source(None, "n", 3))
    assert type(number) is not int and type(number + 1) is not int and not log.facts

    def use():
        return (
            *(number + 1, number / 2, number > 3, divmod(number, 2), -number, float(number)),
            *(f"{number:03d}", str(number), copy.copy(number), copy.deepcopy([number])),
            *(pickle.loads(pickle.dumps(number)), math.floor(number), hash(number), bool(number)),
            *torch.full((2,), number).tolist(),
        )

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(use).result()
    wanted = (4, 1.5, False, (1, 1), -3, 3.0, "003", "3", 3, [3], 3, 3, hash(3), True, 3, 3)
    assert repr(found) == repr(wanted)
    assert not log.facts
    assert number > 2 and log.facts


def test_effects_of_another_thread_are_its_own(caplog, capsys):
    """A line that another thread logs or prints while a step is recorded comes once, and no replay repeats it."""
    (step,), (other,) = trainers(fz.capture, 1), trainers(fz.capture, 1)
    logger = logging.getLogger("tests.step.test_threads")
    told = queue.Queue()

    def tell():
        other(BATCHES[0])  # a thread that calls captured steps is no reader of others
        for text in iter(told.get, None):
            logger.warning("told %s", text)
            print("printed", text)

    thread = threading.Thread(target=tell)
    thread.start()
    for i, x in enumerate(BATCHES):
        told.put(i)
        step(x)
    told.put(None)
    thread.join()
    lines = [r.getMessage() for r in caplog.records if r.name == logger.name]
    assert lines == [f"told {i}" for i in range(len(BATCHES))]
    assert capsys.readouterr().out.split("\n")[:-1] == [f"printed {i}" for i in range(len(BATCHES))]
    assert step.stats.replays


def test_a_thread_beside_a_step_that_changes_no_objects(caplog):
    """It can read no number of the recording: the step is recorded, audited and replayed beside it."""

    def trainer(capture):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return capture(step)

    eager, step = trainer(lambda fn: fn), trainer(lambda fn: fz.capture(fn, audit=2))
    with beating(lambda: sum(range(100))):
        got = [step(x) for x in BATCHES]
    assert_equal([got], [[eager(x) for x in BATCHES]])
    assert step.stats.replays and step.stats.audits and not caplog.text, caplog.text


def test_a_thread_that_draws_while_a_step_is_recorded():
    """The message names it: the generator of the process is shared, and what the step set cannot be told from that."""
    sent, drawn = queue.Queue(), queue.Queue()

    def feed():
        while sent.get() is not None:
            drawn.put(torch.rand(2))

    thread = threading.Thread(target=feed, name="feed")
    thread.start()

    @fz.capture(on_uncapturable="raise")
    def step(x):
        y = torch.dropout(x, 0.5, True)
        sent.put(1)
        drawn.get()
        return y

    try:
        with pytest.raises(
            UncapturableError, match=r"the thread .feed. .*let it draw from a `torch.Generator`"
        ):
            for _ in range(3):
                step(torch.ones(3))
    finally:
        sent.put(None)
        thread.join()
