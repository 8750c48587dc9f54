"""Every refusal that a step can meet has a row in `test_advice.py` or `test_advice_on_calls.py`, or a reason here.

The texts of refusals are found in the code: what is passed to the functions that note one, the messages of the errors
that a stage of a recording raises, and texts that say what a replay would do. A new one needs a row, in which the step
with the proposed edit is captured, or a line in `NO_ROW`.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.step import test_advice, test_advice_on_calls

_ROOT = Path(__file__).resolve().parents[2]
# Folders whose refusals a recorded step can meet.
_FOLDERS = [
    "calls",
    "discharge",
    "fsdp",
    "late_sizes",
    "recorder",
    "run",
    "scalars",
    "state",
    "step",
    "step_backward",
    "util",
    "walk",
]
_ERRORS = {"UncapturableError", "UnsupportedOpError", "UnsupportedTensorError"}
_NOTES = {"note", "refuse_here", "note_effect", "note_changes_each_time"}
_SAYS = re.compile(
    r"a replay|, of which no program|another tensor to|another storage \(|sizes or strides in place"
    r"|a step .* outlive|cannot be seen:|changes what it is guarded|has an autograd history|did not settle"
)

_ALIKE, _BEGIN = 12, 4  # letters

_RANKS = "needs several ranks: tests/discharge/rules/test_collectives.py, tests/fsdp and tests/audit have such steps"
_FORWARD = (
    "of a captured forward (`backward=True`): tests/calls/test_forwards.py, tests/step_backward"
)
_TRACED = "of `fz.functions.trace` and `trace_backward`, which capture no step: tests/functions, tests/step_backward"
_OP = "of an op of which few use this form: the tests of the rule have the op"
_PART = "a part of messages that other rows have"
_NO_REFUSAL = "no refusal: a guard, a report, a log"
_NONE = "no edit: "

# A pattern of the text of a refusal -> why there is no row.
NO_ROW = {
    r"^\{\}, which a replay would not: \{\}$": _PART,
    r"^\{\} `\{\}` of \{\}, which a replay would not$": f"{_PART}: of progress bars",
    r"^that something else holds, too, where a replay would make another one$": _PART,
    r"^: make it outside the step; a replay puts no texts there": f"{_PART}: test_carried_containers.py has one",
    r"^\{\}, which a replay would not$": _PART,
    r"^a tensor that requires a gradient, which": _PART,
    r"^the step \{\}, \{\}: \{\}$": _PART,
    r"^\{\} \{\}, which a replay (would not: do so|cannot repeat)": _PART,
    r"^changes Python state, which a replay would not: \{\}": _PART,
    r"^draws from `\{\}`, reads or writes it|^\{\} to a number of its own": _PART,
    r"^Python reads a tensor \{\}|^runs the higher-order op|^call it outside the step": _PART,
    r"^assigns another tensor to": _PART,
    r"^changes what it is guarded by": _PART,
    r"^the step did not settle": _PART,
    r"^: (append to it alone|take items|write into it)|^, which a replay does not repeat": _PART,
    r"^meets? \{\}|^\{\}, which is more than": _PART,
    r"^rearranges its arguments": "of dicts whose keys change places: tests/state/test_arguments.py",
    r"^gives a tensor in `\{\}` another storage": _PART,
    r"^gathers tensors that differ|^sends |^communicates in place|^broadcasts several": _RANKS,
    r"^raises where a tensor holds NaN|sends parts of different sizes|^exchanges Python objects": _RANKS,
    r"^another rank cannot capture|^relies on a number that it reads, comm": _RANKS,
    r"^receives from whichever rank|^starts to receive|^has passes that change coll": _RANKS,
    r"^a rank of process group|^runs one backward through several captured": _RANKS,
    r"^returns a result that fits no|^computes into|^writes \{\} and has no": _OP,
    r"^raises by data|^takes another formula|^updates `running_mean`|^reduces \{\} to one": _OP,
    r"^computes the gradient of (`cumprod`|a product)": "torch before 2.13, or never seen",
    r"^multiplies a parameter": _OP,
    r"^asserts by data|^finds `\{\}` on a storage|^turns `\{\}` from": _TRACED,
    r"hook keeps the tensor that becomes|^a backward cannot be traced|^\{\}\. Nothing was": _TRACED,
    r"^gives a leaf another storage": _TRACED,
    r"^the trace of a backward|^`\{\}`: the backward \{\}|^the backward reads": _TRACED,
    r"^\{\} changes the size or strides of a tensor in place": _TRACED,
    r"^a number that another recording reads": "of a step that runs in another one: tests/step/test_captured_step.py",
    r"^goes backward from an output|^differentiates the backward|^the method `\{\}`": "has a test, not a row",
    r"^\{\} to \{\} \(it was|^\{\}, which a replay would not: do so outside$": _FORWARD,
    r"^keeps a number that it reads|^goes backward itself|^the storage of": _FORWARD,
    r"^a gradient goes to|^returns a parameter of FSDP2": _FORWARD,
    r"with a tensor that was in another place": "tests/step/moving_steps.py",
    r"with a number of its own at every call": "of clocks that libraries read: tests/step/moving_steps.py",
    r"^leaves a gradient in": "of a subclass whose `.grad` raises: tests/state",
    r"^a replay (of %s|failed|at a size|of \{\} at)": _NO_REFUSAL,
    r"^as programs were dropped|^has no program|^what a replay repeats": _NO_REFUSAL,
    r"call that a replay makes again and a file": _NO_REFUSAL,
    r"^guarded on entry|^a tensor or nothing, which|^the order of the forwards": _NO_REFUSAL,
    r"^an event on a stream|^a replay runs on the stream": _NO_REFUSAL,
    r"is a property without a setter": f"{_NONE}another torch: tests/fsdp/test_contract.py",
    r"^a bug in functionalize|^replays differ from eager": f"{_NONE}a bug of functionalize",
    r"^\{\}, and \{\}$": f"{_NONE}of computed sizes, `_why_apart`: tests/late_sizes",
}


class Text(NamedTuple):
    """The text of a refusal in the code. Its holes are {}."""

    where: str
    text: str


def _value(node: ast.expr, module: Any) -> str | None:
    """A text, with the constants of its module put in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        found = getattr(module, node.id, None)
        return found if isinstance(found, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [
            each.value if isinstance(each, ast.FormattedValue) else each for each in node.values
        ]
        return "".join(_value(each, module) or "{}" for each in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_value(node.left, module) or "{}") + (_value(node.right, module) or "{}")
    return None


def _texts_of(path: Path) -> Iterator[Text]:
    module = importlib.import_module(".".join(path.relative_to(_ROOT).with_suffix("").parts))
    tree = ast.parse(path.read_text())
    inside: set[int] = set()  # of other texts, or of docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
        if not isinstance(node, (ast.JoinedStr, ast.BinOp, ast.Call)) or id(node) in inside:
            continue
        function = node.func if isinstance(node, ast.Call) else None
        called = getattr(function, "attr", getattr(function, "id", ""))
        texts: list[Any] = node.args if isinstance(node, ast.Call) else [node]
        values = [value for each in texts if (value := _value(each, module)) is not None]
        if isinstance(node, ast.Call) and called not in _NOTES | _ERRORS:
            continue
        inside |= {id(part) for each in texts for part in ast.walk(each)}
        found = ": ".join(values)
        is_refusal = called != "" or _SAYS.search(found)
        if is_refusal and " " in found:
            yield Text(f"{path.relative_to(_ROOT)}:{node.lineno}", found)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in inside:
            found = node.value if isinstance(node.value, str) else ""
            if _SAYS.search(found):
                yield Text(f"{path.relative_to(_ROOT)}:{node.lineno}", found)


@cache
def texts() -> list[Text]:
    """The texts of all refusals in the code."""
    paths = (p for each in _FOLDERS for p in (_ROOT / "functionalize" / each).rglob("*.py"))
    found = (text for path in sorted(paths) for text in _texts_of(path))
    return [each for each in found if each.text.strip() != "{} {}"]


@cache
def _said() -> list[str]:
    """What the messages of the rows say, without the escapes of regular expressions."""
    rows = (*test_advice.ROWS, *test_advice_on_calls.ROWS)
    return [re.sub(r"\\([^dw])", r"\1", text) for row in rows for text in (row.says, row.advises)]


def _pieces(text: str) -> set[str]:
    """All pieces of so many letters, without holes; of a shorter text itself."""
    found = {text[at : at + _ALIKE] for at in range(max(len(text) - _ALIKE, 0) + 1)}
    return {each for each in found if "{}" not in each}


@cache
def _common() -> set[str]:
    """The pieces of more than two texts."""
    counts = Counter(piece for each in texts() for piece in _pieces(each.text))
    return {piece for piece, count in counts.items() if count > 2}


def _has_row(text: Text) -> bool:
    """Whether a row begins as this text, or says a piece of it that few others have."""
    begin, pieces = text.text.partition("{}")[0], _pieces(text.text) - _common()
    return any(
        (len(begin) > _BEGIN and said.startswith(begin)) or any(piece in said for piece in pieces)
        for said in _said()
    )


def _reason(text: Text) -> str | None:
    return next((why for pattern, why in NO_ROW.items() if re.search(pattern, text.text)), None)


def test_each_refusal_has_a_row_or_a_reason():
    missing = [each for each in texts() if not _has_row(each) and _reason(each) is None]
    assert not missing, "\n".join(f"{each.where}: {each.text}" for each in missing)


def test_each_reason_is_of_a_refusal():
    found = [each.text for each in texts()]
    assert len(found) > 80
    stale = [each for each in NO_ROW if not any(re.search(each, text) for text in found)]
    assert not stale


def test_each_refusal_proposes_an_edit():
    """After what happened, a colon or a point and the edit."""
    without = [
        each
        for each in texts()
        if not re.search(r"(: |; |\. )[A-Za-z`{][^:]{5,}$", each.text)
        and not (_reason(each) or "").startswith((_PART, _NO_REFUSAL, _NONE, _RANKS, _TRACED))
    ]
    assert not without, "\n".join(f"{each.where}: {each.text}" for each in without)
