"""Pipelines as text: what is read, what is printed, and every refusal's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from functionalize import passes
from functionalize.errors import PassError
from functionalize.passes import Pass, parse, pipeline, pipeline_text
from functionalize.passes.drop_dead_code import DropDeadCode
from functionalize.passes.elide_copies import ElideCopies
from functionalize.passes.fold_views import FoldViews
from functionalize.passes.merge_duplicates import MergeDuplicates
from functionalize.passes.recompute_views import RecomputeViews
from functionalize.passes.reinplace import Reinplace
from functionalize.passes.remove_noops import RemoveNoops
from functionalize.passes.schedule_memory import ScheduleMemory
from functionalize.passes.verify import Verify

CLEANUP = (RemoveNoops(), ElideCopies(), FoldViews(), MergeDuplicates(), DropDeadCode())


@dataclass(frozen=True)
class Options(Pass):
    """One option of every type."""

    name: ClassVar[str] = "options"
    count: int = 0
    ratio: float = 0.0
    flag: bool = False
    word: str = ""
    words: tuple[str, ...] = ()
    limit: int | None = 8

    def apply(self, program) -> int:
        return 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("cleanup", CLEANUP),
        ("default", (*CLEANUP, Reinplace(), ScheduleMemory())),
        ("elide_copies", (ElideCopies(),)),
        (" elide_copies , verify ", (ElideCopies(), Verify())),
        ("elide_copies{}", (ElideCopies(),)),
        ("cleanup,verify", (*CLEANUP, Verify())),
        (
            "elide_copies{parts=true},recompute_views{outputs=3, emptied=w+b}",
            (ElideCopies(parts=True), RecomputeViews(3, ("w", "b"))),
        ),
    ],
)
def test_parse_and_print(text, expected):
    found = parse(text)
    assert found == expected
    assert parse(pipeline_text(found)) == expected


def test_every_type_of_option(monkeypatch):
    monkeypatch.setattr(pipeline, "PASSES", {"options": Options})
    given = Options(3, 0.25, True, "w", ("a", "b"), None)
    text = "options{count=3, ratio=0.25, flag=true, word=w, words=a+b, limit=none}"
    assert pipeline_text([given]) == text
    assert parse(text) == (given,)
    assert parse("options{count=-1,limit=4,words=a}") == (Options(-1, words=("a",), limit=4),)


def test_defaults_are_left_out():
    assert pipeline_text([ElideCopies(), RecomputeViews(outputs=3)]) == (
        "elide_copies,recompute_views{outputs=3}"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "elide_copy",
            "no pass `elide_copy` (did you mean `elide_copies`?); there are "
            + ", ".join(sorted({*passes.PASSES, *passes.PIPELINES})),
        ),
        (
            "elide_copies{part=true}",
            "`elide_copies` has no option `part` (did you mean `parts`?); it has parts",
        ),
        ("verify{x=1}", "`verify` has no option `x`; it has none"),
        (
            "cleanup{parts=true}",
            "`cleanup` is a pipeline, which has no options; it is "
            "'remove_noops,elide_copies,fold_views,merge_duplicates,drop_dead_code'",
        ),
        (
            "elide_copies{parts=1}",
            "`elide_copies`: the option `parts` is true or false, not '1'",
        ),
        (
            "recompute_views{outputs=two}",
            "`recompute_views`: the option `outputs` is none or an integer, not 'two'",
        ),
        (
            "recompute_views{outputs=}",
            "`recompute_views`: the option `outputs` is none or an integer, not ''",
        ),
        (
            "recompute_views{emptied=a+}",
            "`recompute_views`: the option `emptied` is none or words joined by +, not 'a+'",
        ),
        (
            "elide_copies{parts}",
            "`elide_copies`: cannot read the option 'parts'; write `option=value`",
        ),
        (
            "elide_copies{parts=true,parts=false}",
            "`elide_copies`: the option `parts` appears twice",
        ),
        (
            "elide_copies{parts=true",
            "pipeline 'elide_copies{parts=true': cannot read 'elide_copies{parts=true'; write "
            "`pass` or `pass{option=value}`, separated by commas",
        ),
        (
            "verify,",
            "pipeline 'verify,': cannot read 'verify,'; write `pass` or `pass{option=value}`, "
            "separated by commas",
        ),
        (
            "verify elide_copies",
            "pipeline 'verify elide_copies': cannot read 'verify elide_copies'; write `pass` or "
            "`pass{option=value}`, separated by commas",
        ),
    ],
)
def test_refusals(text, message):
    with pytest.raises(PassError) as error:
        parse(text)
    assert str(error.value) == message


def test_registries_do_not_change():
    with pytest.raises(TypeError):
        passes.PASSES["new"] = ElideCopies
    with pytest.raises(TypeError):
        passes.PIPELINES["default"] = ""
    assert all(parse(name) for name in passes.PIPELINES)
    assert {p.name for p in passes.PASSES.values()} == set(passes.PASSES)
