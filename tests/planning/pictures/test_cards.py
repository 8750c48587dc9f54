"""The cards of a page say what the report says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from functionalize.planning.pictures.cards import _HELP, Card, cards_html, memory_cards, speed_card
from functionalize.planning.pictures.page import Table, write_page
from functionalize.planning.report.display import human_seconds
from functionalize.planning.report.memory import Memory
from functionalize.planning.timeline.timeline import (
    BEFORE,
    Allocation,
    Category,
    Event,
    Op,
    Timeline,
)
from tests.planning.timelines import real

GIB = 2**30


def held(category: Category, nbytes: int, phase: str = "forward") -> Memory:
    """A step that holds 1 GiB of parameters and `nbytes` of a category. phase: of its op."""
    kept = Allocation(GIB, Category.SHARDED_PARAMETERS, "weight", BEFORE, None, 0)
    made = Allocation(nbytes, category, "made", 0, None, 0)
    events = [Event(BEFORE, kept, True), Event(0, made, True)]
    return Memory(Timeline("eager", [Op("aten.mm", phase)], [kept, made], events))


def test_a_step_that_fits():
    fits, holds, helps = memory_cards(
        held(Category.SAVED_ACTIVATIONS, 3 * GIB), "eager", "h100", 8 * GIB
    )
    assert (fits.answer, fits.is_good) == ("yes: 4.00 GiB of 8.00 GiB", True)
    assert "h100" in fits.note
    assert holds.answer == "saved activations 3.00 GiB (75%)"
    assert holds.note == "sharded parameters 1.00 GiB (25%)"
    assert "checkpointing" in helps.answer and helps.note == "for saved activations"


def test_a_step_that_does_not_fit_says_which_allocation_failed():
    fits, *_ = memory_cards(held(Category.TEMPORARIES, 3 * GIB), "eager", "a100", 2 * GIB)
    assert (fits.answer, fits.is_good) == ("no: 4.00 GiB of 2.00 GiB", False)
    assert "Out of memory at op 0, aten.mm" in fits.note


def test_without_a_limit_there_is_no_verdict():
    fits, *_ = memory_cards(held(Category.TEMPORARIES, 3 * GIB), "eager", "cpu", None)
    assert (fits.answer, fits.is_good) == ("4.00 GiB on the device", None)


@pytest.mark.parametrize("category", [*Category])
def test_advice_is_for_the_largest_category(category: Category):
    cards = memory_cards(held(category, 3 * GIB), "eager", "h100", None)
    assert [c.answer for c in cards[2:]] == ([_HELP[category]] if category in _HELP else [])


def test_the_speed_has_tokens_and_seconds() -> None:
    *_, time = real()
    fast = speed_card(time, 7573.2, "tokens")
    assert fast.answer == f"7,573 tokens/s/rank, {human_seconds(time.seconds)} a step"
    assert "exposed communication; modelled on h100" in fast.note
    assert speed_card(time).answer == f"{human_seconds(time.seconds)} a step"
    assert speed_card(time, 0.5, "samples").answer.startswith("0.5 samples/s/rank, ")


def test_texts_are_escaped():
    made = cards_html([Card("Does it fit?", "<script>", "a & b", False)])
    assert made == (
        '<div class="cards"><div class="card bad"><h2>Does it fit?</h2><b>&lt;script&gt;</b>'
        "<p>a &amp; b</p></div></div>"
    )


def test_cards_and_first_tables_come_before_all_else(tmp_path: Path):
    file = tmp_path / "page.html"
    tables = [Table("Later", ["a"], [[1]])]
    first, cards = [Table("Points", ["a"], [[2]])], [Card("Does it fit?", "yes", "", True)]
    write_page(file, tables=tables, first=first, cards=cards)
    heads = re.findall(r"<h[12]>(.*?)</h[12]>", file.read_text())
    assert heads == ["Plan of a step", "Does it fit?", "Points", "Later"]


def test_advice_is_not_what_the_step_does_already():
    saved = held(Category.SAVED_ACTIVATIONS, 3 * GIB, "recompute")
    assert memory_cards(saved, "eager", "h100", None)[2].answer == "a smaller batch"


def test_fragmentation_has_its_own_advice():
    sizes = [(30, 0, True), (3, 1, True), (40, 2, True), (40, 2, False), (50, 3, True)]
    made = [
        Allocation(n << 20, Category.SAVED_ACTIVATIONS, "made", i, None, i)
        for i, n in enumerate((30, 3, 40, 50))
    ]
    events = [Event(op, made[which], born) for op, (_, which, born) in enumerate(sizes)]
    memory = Memory(Timeline("eager", [Op("aten.mm", "forward")] * 5, made, events))
    fits, _, helps = memory_cards(memory, "eager", "h100", 90 << 20)
    assert fits.is_good is False
    assert helps.answer == "expandable_segments:True, checkpointing, a smaller batch"
    assert "expandable" not in memory_cards(memory, "eager", "h100", 80 << 20)[2].answer
