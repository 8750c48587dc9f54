"""Ranks that could part: one cannot capture its step, or settles later, while numbers are read; none waits for ever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import functionalize as fz
from functionalize import passes
from functionalize.errors import InvariantError, PassError, UncapturableError
from functionalize.passes import Pass
from functionalize.program.program import Program
from functionalize.step import vote as agreement
from tests.allowance import ample_allowance
from tests.fsdp.pair import Pair
from tests.fsdp.sharded import build_mlp
from tests.fsdp.steps import pairs
from tests.fsdp.twins import differences, state_of
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


def compared(scripts: list[Any], batches: list[Any]) -> tuple[list[str], Any, str]:
    """How a captured step, which may run eagerly, differs from its eager twin."""
    (eager_model, eager_optimizer, eager), (model, optimizer, mine) = scripts
    captured = fz.capture(mine, on_uncapturable="eager")
    found: list[str] = []
    for i, batch in enumerate(batches):
        expected, actual = eager(*batch), captured(*batch)
        found += differences(i, {"loss": actual}, {"loss": expected})
        found += differences(i, state_of(model, optimizer), state_of(eager_model, eager_optimizer))
    return found, captured.stats, captured.explain()


def parted(kind: str) -> tuple[list[str], Any, str]:
    """Twins whose step reads a number; on rank 1 it does something more."""
    second = dist.get_rank() == 1
    scripts = []
    for _ in range(2):
        model, optimizer = build_mlp()
        calls: list[int] = []
        cache: dict[int, Tensor] = {}

        def step(
            x: Tensor,
            y: Tensor,
            model: Any = model,
            optimizer: Any = optimizer,
            calls: list[int] = calls,
            cache: dict[int, Tensor] = cache,
        ) -> Tensor:
            loss = F.mse_loss(model(x), y)
            if kind == "refused" and second:
                calls.append(1)
            if kind == "later" and second and not cache:
                cache[0] = torch.ones(1)
            if loss.item() > 1e6:
                raise ValueError("the loss is too large")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        scripts.append((model, optimizer, step))
    return compared(scripts, pairs(10))


def test_a_step_that_one_rank_cannot_capture_is_captured_by_none() -> None:
    (found, first, why), (second_found, second, second_why) = run_on_ranks(parted, "refused")
    assert found == second_found == []
    assert (first.replays, second.replays) == (0, 0)
    assert first.eager == second.eager == 8
    assert "cannot be captured: another rank cannot capture this step" in why
    assert "changes Python state, which a replay would not: `defaults.calls`" in second_why


def test_a_rank_that_settles_later_is_waited_for() -> None:
    (found, first, _), (second_found, second, why) = run_on_ranks(parted, "later")
    assert found == second_found == []
    assert (first.captures, second.captures) == (1, 1), why
    assert first.replays == second.replays >= 5


def one_kind_refused() -> tuple[list[str], Any, str]:
    """Every third call is of a kind that rank 1 cannot capture; the others are replayed until that is known."""
    second = dist.get_rank() == 1
    scripts = []
    for _ in range(2):
        model, optimizer = build_mlp()

        def step(
            x: Tensor, y: Tensor, log: bool, model: Any = model, optimizer: Any = optimizer
        ) -> Tensor:
            loss = F.mse_loss(model(x), y)
            if loss.item() > 1e6 or (log and second and torch.unique(loss.detach()).shape[0] < 0):
                raise ValueError("the loss is too large")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        scripts.append((model, optimizer, step))
    return compared(scripts, [(*b, i % 3 == 2 and i > 4) for i, b in enumerate(pairs(12))])


def test_a_kind_of_call_that_one_rank_cannot_capture() -> None:
    """The ranks vote at every call: a rank that stops must be heard, not waited for."""
    (found, first, why), (second_found, second, second_why) = run_on_ranks(one_kind_refused)
    assert found == second_found == []
    assert first.replays == second.replays == 3
    assert first.eager == second.eager == 6
    assert "cannot be captured: another rank cannot capture this step" in why
    assert "cannot be captured: aten._unique2.default gives a result whose size" in second_why


def shapes_differ(numbers: bool) -> tuple[list[str], Any]:
    """From the fifth step on, rank 1 alone has more rows in every second batch."""
    both = Pair(numbers)
    for i in range(14):
        longer = dist.get_rank() == 1 and i >= 5 and i % 2 == 1
        both.call(i, 6 if longer else 4)
    return both.differences, both.captured.stats


@pytest.mark.parametrize("numbers", [False, True])
def test_a_rank_whose_batch_has_another_shape(numbers: bool) -> None:
    (found, first), (second_found, second) = run_on_ranks(shapes_differ, numbers)
    assert found == second_found == []
    assert second.captures == 2
    assert second.guard_failures[0].startswith("`x` is float32[6, 8], was float32[4, 8]")
    if numbers:  # they record together
        assert first.guard_failures == ["a guard failed on another rank"]
        assert first.replays == second.replays
    else:
        assert first.guard_failures == []
        assert first.replays + first.audits == second.replays + second.audits + 1


def lengths_differ(numbers: bool, unique: bool) -> tuple[list[str], Any, bool]:
    """Each rank draws a length of its own for each call, from few or from ever new ones."""
    both = Pair(numbers, passes="", dynamic=False)  # recordings alone are paid for
    generator = torch.Generator().manual_seed(dist.get_rank())
    for i in range(40):
        drawn = int(torch.randint(4, (1,), generator=generator))
        both.call(i, 2 + (2 * i + dist.get_rank() if unique else drawn))
    return both.differences, both.captured.stats, both.captured.core.vote is not None


@pytest.mark.parametrize("numbers", [False, True])
def test_ranks_with_lengths_of_their_own(numbers: bool) -> None:
    results = run_on_ranks(lengths_differ, numbers, False)
    for found, stats, votes in results:
        assert found == []
        assert votes is numbers
        assert stats.replays >= (5 if numbers else 20)
    if numbers:
        first, second = (stats for _, stats, _ in results)
        assert (first.replays, first.rare) == (second.replays, second.rare)


@pytest.mark.parametrize("numbers", [False, True])
def test_ranks_with_ever_new_lengths_run_eagerly(numbers: bool) -> None:
    for found, stats, votes in run_on_ranks(lengths_differ, numbers, True):
        assert found == []
        assert votes is numbers
        assert (stats.warmups, stats.captures) == (1, int(numbers))
        # Where ranks vote, each call is looked at; else the step rests after 32.
        assert (stats.rare, stats.eager) == ((38, 38) if numbers else (32, 39))


def rare_and_refused() -> tuple[list[str], Any]:
    """A kind that cannot be recorded on rank 1 comes again while rank 0 has ever new lengths."""
    second = dist.get_rank() == 1
    both = Pair(on_uncapturable="eager", dynamic=False)
    for i in range(20):
        if i == 5 and second:
            key = next(iter(both.captured.core.cache.items()))[0]
            both.captured.core.refuse(key, UncapturableError("for a test"))
        both.call(i, 4 if i < 5 or (second and i > 14) else 10 + i)
    return both.differences, both.captured.stats


def test_a_refused_kind_does_not_wait_for_a_rank_that_records_nothing() -> None:
    for found, stats in run_on_ranks(rare_and_refused):
        assert found == []
        assert stats.replays >= 2
        assert stats.eager >= 13


class Absent:
    """A vote in which some rank takes no part."""

    def wait(self, patience: Any) -> None:
        raise RuntimeError("Timed out")


def test_a_rank_that_takes_no_part_is_told_of() -> None:
    with pytest.raises(UncapturableError) as raised:
        agreement._await(Absent(), "7")  # type: ignore[arg-type]
    assert str(raised.value).startswith(
        "a rank of process group '7' does not say whether it replays the step: every rank must read numbers"
    )


@ample_allowance()
def unsharded_ahead() -> tuple[list[str], str]:
    """Every call ends by starting the unshard that the next one waits for."""
    found: list[str] = []
    (model, optimizer), (twin, twin_optimizer) = build_mlp(), build_mlp()

    def make(model: Any, optimizer: Any) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.unshard(async_op=True)
            return loss.detach()

        return step

    captured = fz.capture(make(model, optimizer), on_uncapturable="eager")
    eager = make(twin, twin_optimizer)
    for i, batch in enumerate(pairs(8)):
        found += differences(i, {"loss": captured(*batch)}, {"loss": eager(*batch)})
        found += differences(i, state_of(model, optimizer), state_of(twin, twin_optimizer))
    assert captured.stats.replays == 0
    return found, captured.explain()


def test_an_unshard_across_calls_is_refused_by_name() -> None:
    for found, why in run_on_ranks(unsharded_ahead):
        assert found == []
        assert "an unshard begins in one call and ends in another" in why


# -- passes that change collectives ----------------------------------------------------------------


@dataclass(frozen=True)
class DropAnUnreadReduce(Pass):
    """Drops all-reduces that nobody reads, on the ranks `on`, in programs for batches of `rows` rows."""

    name: ClassVar[str] = "drop_an_unread_reduce"
    changes_collectives: ClassVar[bool] = True
    on: tuple[int, ...] = (0, 1)
    rows: tuple[int, ...] = (4, 6)

    def apply(self, program: Program) -> int:
        nodes = program.graph.find_nodes(op="call_function", target=ALL_REDUCE)
        rows = program.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
        if dist.get_rank() not in self.on or rows not in self.rows:
            return 0
        dead = [n for n in nodes if not n.users or all(not u.users for u in n.users)]
        for node in dead:
            for user in list(node.users):
                program.graph.erase_node(user)
            program.graph.erase_node(node)
        return len(dead)


@dataclass(frozen=True)
class DropInSilence(DropAnUnreadReduce):
    """The same, and does not say so."""

    name: ClassVar[str] = "drop_in_silence"
    changes_collectives: ClassVar[bool] = False


def silent() -> str:
    @fz.capture
    def step(x: Tensor) -> Tensor:
        dist.all_reduce(x + 1)
        dist.all_reduce(x * 2, dist.ReduceOp.MAX)
        return x + 2

    for _ in range(3):
        step(torch.ones(4))
    try:
        passes.run(step.program, [DropInSilence()])
    except InvariantError as error:
        return str(error)
    return ""


def test_a_pass_that_changes_collectives_must_say_so() -> None:
    assert run_on_ranks(silent)[0] == (
        "`drop_in_silence` changed the collectives of process group '0' and does not say that it may "
        "(`changes_collectives`): number 1 was all_reduce(float32[4], sum) and is nothing"
    )


def test_a_forward_alone_refuses_passes_that_change_collectives() -> None:
    with pytest.raises(PassError) as error:
        fz.capture(lambda x: x, passes=[DropAnUnreadReduce()], backward=True)
    assert str(error.value) == (
        "`drop_an_unread_reduce` changes collectives, and a forward's backward may be replayed on one rank and run "
        "on another: capture a whole step, or leave the pass out"
    )


def dropped(
    on: tuple[int, ...],
    rows: tuple[int, ...],
    longer_on: tuple[int, ...],
    numbers: bool,
    kind: Any = DropAnUnreadReduce,
) -> tuple[list[str], Any, int, str]:
    """Twins whose step reduces something that nobody reads; a pass drops that reduction."""
    scripts = []
    for _ in range(2):
        model, optimizer = build_mlp()

        def step(x: Tensor, y: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = F.mse_loss(model(x), y)
            dist.all_reduce(loss.detach() + 1)
            if numbers and loss.item() > 1e6:
                raise ValueError("the loss is too large")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        scripts.append((model, optimizer, step))
    (twin, twin_optimizer, eager), (model, optimizer, mine) = scripts
    captured = fz.capture(mine, passes=[kind(on, rows)])
    found: list[str] = []
    group = dist.group.WORLD
    issued = 0
    for i in range(12):
        longer = dist.get_rank() in longer_on and i >= 5 and i % 2 == 1
        (batch,) = pairs(1, rows=6 if longer else 4)
        loss = eager(*batch)
        before = group._get_sequence_number_for_group()
        found += differences(i, {"loss": captured(*batch)}, {"loss": loss})
        issued = group._get_sequence_number_for_group() - before
        found += differences(i, state_of(model, optimizer), state_of(twin, twin_optimizer))
    return found, captured.stats, issued, captured.explain()


@pytest.mark.parametrize("numbers", [False, True])
def test_a_program_with_fewer_collectives_replays_if_all_ranks_have_it(numbers: bool) -> None:
    (found, first, issued, _), (second_found, second, _, _) = run_on_ranks(
        dropped, (0, 1), (4, 6), (), numbers
    )
    assert found == second_found == []
    assert first.replays == second.replays >= 8
    recorded = sum(first.collectives.values()) + 1
    assert issued == recorded - 1 + 1 + numbers  # one dropped; one vote before, one after a number


def test_a_rank_with_other_arguments_waits_for_those_that_record() -> None:
    """Rank 1 records for its longer batches; rank 0, which has a program, must record, too."""
    (found, first, _, _), (second_found, second, _, _) = run_on_ranks(
        dropped, (0, 1), (4, 6), (1,), False
    )
    assert found == second_found == []
    assert first.replays == second.replays >= 5
    assert first.captures + first.warmups == second.captures + second.warmups > 2


def test_programs_that_do_not_fit_together_run_eagerly() -> None:
    (found, first, _, _), (second_found, second, _, why) = run_on_ranks(
        dropped, (0,), (4, 6), (), False
    )
    assert found == second_found == []
    assert (first.replays, second.replays) == (0, 0)
    assert first.eager == second.eager >= 8
    assert "after the passes the programs of the ranks issue different collectives" in why


@dataclass(frozen=True)
class DropIfLucky(DropAnUnreadReduce):
    """The same, which a step may leave out."""

    name: ClassVar[str] = "drop_if_lucky"
    is_optional: ClassVar[bool] = True


def test_without_an_optional_pass_that_ranks_ran_differently_all_replay() -> None:
    (found, first, _, _), (second_found, second, _, _) = run_on_ranks(
        dropped, (0,), (4, 6), (), False, DropIfLucky
    )
    assert found == second_found == []
    assert first.replays == second.replays >= 5
    assert first.eager == second.eager == 1
    assert first.collectives == second.collectives
    (why,) = second.guard_failures
    assert why.startswith("the ranks, whose arguments differ in size, chose different parameters")


def test_programs_for_some_arguments_do_not_fit_together() -> None:
    """Only rank 1 has longer batches, and its program for them has a collective more."""
    (found, first, _, _), (second_found, second, _, _) = run_on_ranks(
        dropped, (0, 1), (4,), (1,), False
    )
    assert found == second_found == []
    assert first.replays == second.replays >= 4
    assert first.eager == second.eager >= 1
