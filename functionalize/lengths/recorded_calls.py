"""Recorded calls of a step, as programs for other sizes are made from them, and the kinds of calls.

RecordedKinds(is_auto)   the kinds of calls that were recorded, and of which programs for other sizes may be made
RecordedCall.of(...)        a recorded call: its sizes, its program before the passes, its op stream

A forward that was recorded with its backward has two programs: its own, and that of the backward. Its op stream is that
of both.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import not_
from typing import Any

from torch import Tensor

from functionalize.audit.results import is_comparable
from functionalize.audit.signature import Signature
from functionalize.lengths.signature_template import SignatureTemplate, SignatureTokens
from functionalize.program.program import Program
from functionalize.templates.call_keys import MADE, has_made_sizes, open_key, shapes_of
from functionalize.templates.fitting import Formula, Sizes
from functionalize.templates.leaves import Leaves, identity, leaves_of
from functionalize.templates.symbols import Shapes, Symbols
from functionalize.templates.template import (
    EARLY,
    FEWEST,
    Mismatch,
    Template,
    first_difference,
)
from functionalize.util.text import counted


@dataclass(slots=True)
class _Recordings:
    """Those of one kind of call, kept or not. sizes: of the first. differ: whether others had other sizes."""

    sizes: Shapes
    count: int = 0
    differ: bool = False


class RecordedKinds:
    """The kinds of calls that were recorded, by their open key. is_auto: compare those that differ in sizes only."""

    def __init__(self, is_auto: bool) -> None:
        self._is_auto = is_auto
        self._found: dict[Hashable, _Recordings] = {}

    def note(self, key: Any) -> None:
        """A call is recorded, or a program is kept. key: of it in the cache."""
        sizes = shapes_of(key)
        found = self._found.setdefault(open_key(key), _Recordings(sizes))
        found.count += 1
        found.differ |= found.sizes != sizes

    def compare(self, key: Any) -> None:
        """Programs for other sizes are known of this kind of call."""
        self._found.setdefault(open_key(key), _Recordings(shapes_of(key))).differ = True

    def are_compared(self, key: Any) -> bool:
        """Whether a recording of such a call is made ready to be compared with others."""
        if not self._is_auto:
            return True
        found = self._found.get(open_key(key))
        return found is not None and found.differ

    def count(self, key: Any) -> int:
        """How many calls of this kind were recorded."""
        found = self._found.get(open_key(key))
        return 0 if found is None else found.count

    @property
    def text(self) -> str:
        """Of how many kinds of calls recordings are compared, and why of others they are not."""
        if not self._is_auto:
            return "of every kind of call"
        differ = sum(found.differ for found in self._found.values())
        if not differ:
            return 'of no kind of call yet: no two recordings of one kind differ in sizes (dynamic="auto")'
        return f"of {differ} of {counted(len(self._found), 'kind')} of calls, whose recordings differ in sizes"


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One recorded call. key: in the cache. names: of its tensors. program: as recorded, before the passes.

    cached: the `CachedProgram`. backward: the program of its backward, if that is one of its own; then `forward` is the
    op stream of the forward alone, and `signature` that of both.
    """

    key: Any
    names: Sequence[str]
    program: Program
    signature: Signature
    cached: Any
    backward: Program | None = None
    forward: Signature | None = None

    @property
    def programs(self) -> list[Program]:
        """Its program, and that of its backward."""
        return [self.program] if self.backward is None else [self.program, self.backward]

    @property
    def shapes(self) -> Shapes:
        """The sizes of its tensors."""
        return shapes_of(self.key)

    @property
    def token(self) -> Any:
        """What else must be equal in all recordings of a class."""
        return identity(self.cached.replayed_alike)

    @cached_property
    def leaves(self) -> list[Leaves]:
        """Those of each of its programs."""
        return list(map(leaves_of, self.programs))

    @cached_property
    def forms(self) -> SignatureTokens:
        """Its op stream, as it is compared with others."""
        return SignatureTokens(self.signature)

    @property
    def tokens(self) -> int:
        """What all recordings of a class have in common."""
        tokens = tuple([tuple(each.tokens) for each in self.leaves])
        return hash((tokens, self.token, self.forms.relations()))

    def forget(self) -> None:
        """Drop what comparisons have read: it is as large as the programs."""
        for name in ("leaves", "forms"):
            vars(self).pop(name, None)

    def like(self, key: Any, cached: Any) -> RecordedCall | None:
        """The reference of an earlier `CachedProgram` of this kind, if it is there as it was recorded. key: of it."""
        is_other = cached is self.cached or type(cached) is not type(self.cached)
        program = cached.recorded or cached.program
        if is_other or self.backward is not None or program.history:
            return None
        if open_key(key) != open_key(self.key) or cached.signature is None:
            return None
        return RecordedCall(key, self.names, program, cached.signature, cached)

    def replayed_by(self, found: Any) -> None:
        """The prediction of an equal program, for which nothing is compiled: it is replayed, unless passes ran."""
        if found is None or self.backward is not None:
            return
        made = found.programs[0]
        made.facts = self.program.facts
        if self.cached.recorded is self.program:
            self.cached.recorded = made
        if self.cached.program is self.program:
            self.cached.program, self.cached.op_stream = made, found.op_stream

    @staticmethod
    def of(
        key: Any,
        names: Sequence[str],
        leaves: Sequence[Any],
        program: Program,
        cached: Any,
        backward: tuple[Program, Signature] | None = None,
    ) -> RecordedCall | None:
        """The reference of a `CachedProgram`; None if it has no signature, or an argument has no sizes.

        key: in the cache. names, leaves: of the arguments. program: as recorded. backward: the program of the backward,
        and the op stream of both.
        """
        tensors = [n for n, x in zip(names, leaves, strict=True) if isinstance(x, Tensor)]
        tensors += [MADE] if has_made_sizes(key) else []
        own = cached.signature
        if own is None or len(tensors) != len(shapes_of(key)):
            return None
        if backward is None:
            return RecordedCall(key, tensors, program, own, cached)
        return RecordedCall(key, tensors, program, backward[1], cached, backward[0], own)


@dataclass(frozen=True, slots=True)
class Templates:
    """Recordings as one. sizes: the symbols of each. programs: its template, and that of its backward.

    whole: of the op streams. forwards: of those of forwards alone.
    """

    sizes: list[Sizes]
    programs: list[Template]
    whole: SignatureTemplate
    forwards: SignatureTemplate | None

    @property
    def formulas(self) -> list[Formula]:
        """The functions of all integers."""
        return [*(f for each in self.programs for f in each.formulas), *self.whole.formulas()]

    @staticmethod
    def of(
        references: Sequence[RecordedCall], fewest: int = FEWEST, may_be_equal: bool = False
    ) -> Templates | Mismatch:
        """The templates of recordings with equal tokens. fewest: the number of sizes; `EARLY`: one size may vary.

        may_be_equal: whether all recordings may be of the same sizes.
        """
        calls, names = [r.shapes for r in references], references[0].names
        least = fewest if len(calls) == EARLY else FEWEST
        different = len({tuple(map(tuple, shapes)) for shapes in calls})
        if different < least and not (may_be_equal and different == 1):
            return Mismatch(0, "the arguments", f"less than {least} different sizes")
        symbols = Symbols.of(calls, names)
        if len(calls) == EARLY and len(symbols.names) > 1:
            return Mismatch(0, "the arguments", f"{EARLY} recordings in which several sizes vary")
        sizes = [own for shapes in calls if not isinstance(own := symbols.sizes_of(shapes), str)]
        if len(sizes) < len(calls):
            return Mismatch(0, "the arguments", "a size is 0 or 1, and greater elsewhere")
        programs = []
        leaves = zip(*(each.leaves for each in references), strict=True)
        for several in zip(*(each.programs for each in references), strict=True):
            found = Template.of(several, calls, names, next(leaves), least)
            if isinstance(found, Mismatch):
                return found
            programs.append(found)
        whole = SignatureTemplate.of([each.forms for each in references], sizes)
        if isinstance(whole, Mismatch):
            return whole
        alone = [SignatureTokens(each.forward) for each in references if each.forward is not None]
        forwards = SignatureTemplate.of(alone, sizes) if alone else None
        if isinstance(forwards, Mismatch):
            return forwards
        made = Templates(sizes, programs, whole, forwards)
        return made._unconfirmed(references[0].leaves[0]) or made

    def _unconfirmed(self, leaves: Leaves) -> Mismatch | None:
        """Functions of the program that first calls do not compare, if too few recordings agree on them."""
        program = self.programs[0]
        unguarded = compress(program.formulas, map(not_, leaves.guarded))
        alone = {f for f in unguarded if f.terms}.difference(self.whole.formulas())
        if not alone or len(self.sizes) > FEWEST:
            return None
        # A first call with a program of its backward is compared with both programs.
        if len(self.sizes) == FEWEST and (self.programs[1:] or is_comparable(program.reference)):
            return None
        return Mismatch(0, "the program", f"{len(alone)} functions of sizes are in no op")


def difference(recorded: RecordedCall, programs: Sequence[Program], rest: Any) -> str | None:
    """Where a recorded call is not as predicted. programs, rest: those of the prediction."""
    if len(programs) != len(recorded.programs):
        return "the call goes backward, and others do not, or the other way round"
    for other, expected in zip(recorded.leaves, programs, strict=True):
        one = leaves_of(expected)
        found = first_difference(one, other)
        if found is not None:
            return ": ".join(found)
        for at, *values in zip(one.at, one.integers, other.integers, strict=True):
            if values[0] != values[1]:
                return f"{one.place(at)}: an integer is {values[1]}, not {values[0]}"
    if recorded.token != identity(rest.replayed_alike):
        return "the call leaves its state otherwise than recorded calls did"
    return None
