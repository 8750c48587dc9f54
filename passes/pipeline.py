"""Passes as text: named pipelines, and a syntax for passes with options.

    "elide_copies{parts=true},recompute_views{outputs=3}"   <->   (ElideCopies(parts=True), ...)
    "default"                                                  the named pipeline of that name

Items are separated by commas, as are the options of one pass. Values follow the type of the field:
`25`, `0.5`, `true`, `none`, a word, or words joined by `+`. `pipeline_text` prints what `parse`
reads back, functions excepted: an option that is one has no text.

Invariant: the registries are filled at import and never change.
Refusals (`PassError`): an unknown pass or option, a value that is not of the option's type, bad
braces.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from functionalize.errors import PassError
from functionalize.passes.base import Pass, option_text
from functionalize.passes.bucket_gathers import BucketGathers
from functionalize.passes.bucket_reduces import BucketReduces
from functionalize.passes.drop_dead_code import DropDeadCode
from functionalize.passes.elide_copies import ElideCopies
from functionalize.passes.fold_views import FoldViews
from functionalize.passes.merge_duplicates import MergeDuplicates
from functionalize.passes.narrow_masks import NarrowMasks
from functionalize.passes.offload import Offload
from functionalize.passes.order import Order
from functionalize.passes.partition import Partition
from functionalize.passes.prefetch import Prefetch
from functionalize.passes.recompute_views import RecomputeViews
from functionalize.passes.reinplace import Reinplace
from functionalize.passes.remat import Remat
from functionalize.passes.remove_noops import RemoveNoops
from functionalize.passes.reshard import Reshard
from functionalize.passes.schedule_memory import ScheduleMemory
from functionalize.passes.verify import Verify

PASSES: Mapping[str, type[Pass]] = types.MappingProxyType(
    {
        each.name: each
        for each in (
            BucketGathers,
            BucketReduces,
            DropDeadCode,
            ElideCopies,
            FoldViews,
            MergeDuplicates,
            NarrowMasks,
            Partition,
            Prefetch,
            Offload,
            Order,
            RecomputeViews,
            Reinplace,
            Remat,
            RemoveNoops,
            Reshard,
            ScheduleMemory,
            Verify,
        )
    }
)

# cleanup: removes nodes; results and collectives are unchanged.
# default: preserves every bit of every result, needs no more memory than before; collectives are issued as in eager.
# fast: may round differently (small sums over more than two ranks are merged) and needs more memory: parameters stay
# gathered for the backward as far as 1.3 times the peak of the program as eager runs it allows.
_CLEANUP = "remove_noops,elide_copies,fold_views,merge_duplicates,drop_dead_code"
PIPELINES: Mapping[str, str] = types.MappingProxyType(
    {
        "cleanup": _CLEANUP,
        "default": f"{_CLEANUP},reinplace,schedule_memory",
        "fast": (
            f"{_CLEANUP},reshard{{keep=budget, growth=1.3}},bucket_reduces{{mb=1, rounding=true}},"
            "prefetch{reduces=1},reinplace,schedule_memory"
        ),
    }
)

_ITEM = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:\{(?P<options>[^{}]*)\})?\s*(?P<end>,|$)")

_WORDS: Mapping[Any, Mapping[str, Any]] = types.MappingProxyType(
    {type(None): {"none": None}, bool: {"true": True, "false": False}}
)


def parse(text: str) -> tuple[Pass, ...]:
    """The passes that `text` names; raises `PassError` for anything it cannot read.

    >>> fz.passes.parse("elide_copies{parts=true},verify")
    (ElideCopies(parts=True), Verify())
    """
    found: list[Pass] = []
    at = 0
    while at < len(text):
        item = _ITEM.match(text, at)
        if item is None or (item["end"] and item.end() == len(text)):
            raise PassError(
                f"pipeline {text!r}: cannot read {text[at:]!r}; write "
                "`pass` or `pass{option=value}`, separated by commas"
            )
        at = item.end()
        if item["options"] is None and item["name"] in PIPELINES:
            found += parse(PIPELINES[item["name"]])
        else:
            found.append(_pass(item["name"], item["options"] or ""))
    return tuple(found)


def pipeline_text(passes: Iterable[Pass]) -> str:
    """The text that `parse` turns into `passes`; options at their defaults are left out.

    >>> fz.passes.pipeline_text(fz.passes.parse("cleanup"))
    'remove_noops,elide_copies,fold_views,merge_duplicates,drop_dead_code'
    """
    return ",".join(str(each) for each in passes)


def _pass(name: str, options: str) -> Pass:
    if name in PIPELINES:
        raise PassError(f"`{name}` is a pipeline, which has no options; it is {PIPELINES[name]!r}")
    kind = PASSES.get(name)
    if kind is None:
        known = sorted({*PASSES, *PIPELINES})
        raise PassError(f"no pass `{name}`{_closest(name, known)}; there are {', '.join(known)}")
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in options.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise PassError(f"`{name}`: cannot read the option {item!r}; write `option=value`")
        if key not in known:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise PassError(f"`{name}` has no option `{key}`{_closest(key, known)}; {there}")
        if key in values:
            raise PassError(f"`{name}`: the option `{key}` appears twice")
        values[key] = _value(name, key, value, hints[key])
    return kind(**values)


def _closest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _value(name: str, key: str, text: str, hint: Any) -> Any:
    for kind in _alternatives(hint):
        try:
            value = _read(text, kind)
        except ValueError:
            continue
        if option_text(value) == text or isinstance(value, float):
            return value
    wanted = " or ".join(_kind_text(kind) for kind in _alternatives(hint))
    raise PassError(f"`{name}`: the option `{key}` is {wanted}, not {text!r}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that an option may have, the most specific first."""
    union = get_origin(hint) in (Union, types.UnionType)
    kinds = get_args(hint) if union else (hint,)
    return tuple(sorted(kinds, key=lambda k: k is not type(None)))


def _read(text: str, kind: Any) -> Any:
    """`text` converted to type `kind`; raises `ValueError` if that is not possible."""
    if kind in _WORDS:
        if text not in _WORDS[kind]:
            raise ValueError(text)
        return _WORDS[kind][text]
    words = text.split("+") if get_origin(kind) is tuple else [text]
    if not all(words) or get_origin(kind) is Callable:
        raise ValueError(text)
    return tuple(words) if get_origin(kind) is tuple else kind(text)


def _kind_text(kind: Any) -> str:
    if kind is type(None):
        return "none"
    if kind is bool:
        return "true or false"
    if get_origin(kind) is tuple:
        return "words joined by +"
    if get_origin(kind) is Callable:
        return "a function"
    return {int: "an integer", float: "a number", str: "a word"}.get(kind, str(kind))
