"""Which new sizes a coverage lets a class replay: one example for each of its rules."""

from __future__ import annotations

import operator

import torch
import torch.distributed as dist

from functionalize.audit.shared_sizes import SharedSizes
from functionalize.lengths.coverage import NEAR, Coverage
from functionalize.lengths.length_class import LengthClass
from functionalize.lengths.length_classes import LengthClasses
from functionalize.lengths.size_facts import ComputedSize, SizeFacts
from functionalize.templates.call_keys import open_key
from functionalize.templates.fitting import Formula, Sizes
from functionalize.templates.leaves import constant_token
from functionalize.templates.symbols import Symbols
from functionalize.templates.template import Template

ROWS = Formula(0, ((1, (0,)),))
NOTHING = SizeFacts((), (), ())
COMPARED: list[Sizes] = [(8,), (12,), (40,)]


def coverage(facts: SizeFacts = NOTHING, runs: int = 2, on_cpu: bool = True) -> Coverage:
    """After these calls were compared, and the first ones observed."""
    made = Coverage.of(100, [ROWS], [ROWS], on_cpu)
    for sizes in COMPARED:
        made.was_compared(sizes)
    for sizes in COMPARED[:runs]:
        made.observed(sizes, facts)
    return made


def test_two_runs_must_have_learned_the_same() -> None:
    assert "not observed yet" in str(coverage(runs=1).why_compared((20,)))
    assert coverage().why_compared((20,)) is None


def test_c_functions_are_seen_in_a_call_of_each_way_through_python() -> None:
    """Recorded calls were watched: no run that takes their way is; of another way the second one is."""

    def above(bound: int, is_true: bool) -> SizeFacts:
        part = ComputedSize(operator.gt, (("part", 0), ("constant", bound, int)))
        return SizeFacts((ROWS, part), ((1, constant_token(is_true), f"`s0 > {bound}`"),), ())

    made = coverage(runs=0)
    for sizes in ((36,), (38,)):
        assert not made.wants_watch(sizes)
        assert made.observed(sizes, above(16, True), was_watched=False)
    assert made.why_compared((34,)) is None and not made.wants_watch((34,))
    assert made.wants_watch((10,)), "Python takes another way there"
    other = coverage(runs=0)
    assert not other.wants_watch((50,))
    assert not other.observed((50,), above(45, True), was_watched=False)
    assert other.wants_watch((60,)), "no recorded call took the way of the observed one"
    assert not other.observed((55,), above(45, True), was_watched=False)
    assert "not observed yet" in str(other.why_compared((52,)))
    assert other.observed((60,), above(45, True))
    assert other.takes_known_path((52,))


def test_an_integer_for_torch_is_that_of_the_template_in_all_runs() -> None:
    """`min(rows, 12)` is the number of rows at 10, and was in two of three runs."""
    least = ComputedSize(min, (("part", 0), ("constant", 12, int)))
    found = coverage(SizeFacts((ROWS, least), (), (1,)), runs=3).why_compared((10,))
    assert found == "Python computes an integer that is in no op"


def test_remainders_are_those_of_compared_sizes() -> None:
    assert coverage().why_compared((15,)) == "no compared size leaves 1 by 2, as 15 does"
    assert coverage(on_cpu=False).why_compared((24,)) is None
    assert "leaves 4 by 16" in str(coverage(on_cpu=False).why_compared((20,)))


def test_new_sizes_lie_between_compared_ones() -> None:
    for outside in (4, 44):
        assert coverage().why_compared((outside,)) == f"({outside},) is not between compared sizes"


def test_a_tensor_whose_size_is_one_is_compared_once() -> None:
    """The difference of two sizes that both lie between compared ones; torch takes other ops at 0 and 1."""
    rest = Formula(0, ((1, (0,)), (-1, (1,))))
    made = Coverage.of(100, [ROWS, rest], [ROWS, rest], on_cpu=True)
    for sizes in ((8, 2), (13, 7), (40, 21)):
        made.was_compared(sizes)
        made.observed(sizes, NOTHING)
    assert made.why_compared((20, 18)) is None
    why = made.why_compared((20, 19))
    assert why == "a tensor has the size 1, which it had in no compared call"
    made.was_compared((20, 19), why)
    assert made.why_compared((18, 17)) is None
    assert str(made.why_compared((19, 19))).startswith("a tensor has the size 0")


def test_a_size_that_is_hardly_beyond_compared_ones_is_told_apart() -> None:
    """By at most a sixteenth of their range, if no call of these sizes did something else."""
    for outside in (6, 42):
        assert coverage().why_compared((outside,)) == NEAR
        assert str(coverage().why_compared((outside,), [(12,)])).endswith(
            "is not between compared sizes"
        )


def test_calls_hardly_beyond_compared_ones_count_where_a_comparison_settles_them() -> None:
    """They are then between compared ones: not those on the other side, or further out."""
    own = coverage()
    assert not any(own.has_come_near((size,)) for size in (42, 42, 41, 6, 6, 6, 41))
    assert own.has_come_near((42,))
    own.was_compared((42,), NEAR)
    assert not own.has_come_near((7,)) and own.near == [(6,)] * 3 + [(7,)]
    assert own.has_come_near((6,))


def test_many_calls_hardly_beyond_compared_ones_are_enough_where_no_one_settles_four() -> None:
    own = Coverage.of(100, [ROWS], [ROWS], on_cpu=True)
    for sizes in ((8, 8), (40, 40)):
        own.was_compared(sizes)
    found = [own.has_come_near((41, 30 - at)) for at in range(17)]
    assert found == [False] * 15 + [True, False] and own.near == [(41, 14)]


def test_a_comparison_that_was_due_on_another_rank_counts() -> None:
    store, own = dist.HashStore(), coverage()
    shared, other = SharedSizes(store, "step"), SharedSizes(store, "step")
    own.every, own.gap, own.new = 2, 2, 1
    assert own.why_compared((20,)) == own.due
    other.publish((14,))
    assert shared.teach(own) and (own.gap, own.new) == (2, 1)
    other.publish((18,), is_due=True)
    assert shared.teach(own) and (own.gap, own.new) == (4, 0)
    assert own.elsewhere == [(14,), (18,)] and own.why_compared((20,)) is None


def test_no_call_of_another_class_lies_between_them() -> None:
    classes, group, other = LengthClasses(), LengthClass(0), LengthClass(1)
    symbols = Symbols.of([[sizes] for sizes in COMPARED], ["x"])
    group.templates = [Template(None, symbols, [])]  # of no program: its symbols are read alone
    group.coverage = coverage()
    key = ("spec", (torch.Size((20,)), torch.float32))
    classes._classes[open_key(key)] = [group, other]
    assert classes.why_compared(key, [group, other]) is None
    for known, differing in ([[(16,)]], []), ([], [[(16,)]]):
        other.known, other.differing = known, differing
        assert classes.why_compared(key, [group, other]) == "(20,) is not between compared sizes"
