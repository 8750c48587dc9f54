"""One class: recorded calls of a step that differ in the sizes that it computes, and perhaps in those of arguments.

    group.add(reference, is_late, observer)    a recorded call
    group.is_ready                             whether its program is replayed
    program = group.at((37,))                  for arguments of these sizes, and any computed ones

    observer = LateObserver(whole, symbols, (37,), (True,))       37: the size of the arguments
    recorder.checks.sizes.counted = observer.counted
    with observer: ...                         a recorded run in which Python is observed

Every call that is compared is recorded: what it computes is known only then. Its computed sizes become known one after
the other: a size that has a value of its own among those known at a moment is live, others that Python asks for lose
the run, see `lengths/observed_sizes.py`. The template is determined by all recordings until several in a row were as
predicted; with more symbols more must agree, since then more functions fit a few numbers by chance.

Which sizes a replay takes (`Admission` asks):

- Python. Runs were observed, as for the sizes of arguments (`lengths/coverage.py`): what it learned of a computed size
  must hold for that of the replay. A size that Python asks for and that equals another one in that run teaches nothing.
- torch, by thresholds, by remainders, by 0 and 1. So a computed size lies between compared ones, or beyond them by at
  most an eighth of their range, and leaves a remainder that one has left. Sizes that one line of the step makes count
  as one here, such as those of the experts of all layers: the same ops read them. Both rules are weaker than those
  for arguments: computed ones are others in each call, and each of many must fit. That two sizes are equal by chance
  decides nothing: torch compares sizes of tensors that are broadcast to each other, and there only 1 and equal ones
  are possible.
- The sizes of arguments are those of `lengths/coverage.py`.
- Tensors on one storage relate to each other as in the recordings, since torch and the engine decide by such relations
  (`lengths/relations.py`). Asked at every replay, and remembered for each storage, as few sizes move its windows.

Invariant: a class in which a recording was not as predicted, though a replay would have taken its sizes, is not
replayed again.
Refusals: sizes of 0 and 1 beside others; a collective that sends a computed size, since other ranks expect theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from functionalize.late_sizes.late_instances import (
    LateInstances,
    first_late,
    late_guards,
    late_places,
)
from functionalize.lengths.coverage import Coverage
from functionalize.lengths.instances import programs_at
from functionalize.lengths.observed_sizes import ObservedSizes
from functionalize.lengths.recorded_calls import RecordedCall, Templates
from functionalize.lengths.relations import relations
from functionalize.lengths.shared_passes import rewritten
from functionalize.lengths.signature_template import SignatureTemplate, value_at
from functionalize.program.program import Program
from functionalize.templates.fitting import Formula, Sizes
from functionalize.templates.symbols import Shapes, Symbols
from functionalize.templates.template import FEWEST, Mismatch, Template
from functionalize.util.text import counted

_MOST = 12  # recordings that determine a template
_AGREEING = 2  # recordings in a row that must be as predicted, at least
_HARDLY = 8  # a size counts as between compared ones up to this part of their range beyond them
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp", "symm_mem")


@dataclass(slots=True)
class _Range:
    """Compared sizes that one line makes. rests: what they leave."""

    low: int
    high: int
    rests: set[int]


@dataclass(slots=True, eq=False)
class LateClass:
    """references: the recordings that determine the template; the last one alone once it is known.

    is_late: for each size of a result that the step counts, whether it is known late. is_observed: the next recording
    is, since Python may take another way than in those that were.
    passed: what became of the passes: "" they have run, else why they have not; None: they were not asked to.
    agreed: how many in a row were as predicted. why: there is no template. lost: it is not replayed any more.
    """

    tokens: int
    every: int
    is_late: Sequence[bool] = ()
    is_observed: bool = False
    references: list[RecordedCall] = field(default_factory=list)
    templates: Templates | None = None
    instances: LateInstances | None = None
    coverage: Coverage | None = None
    arguments: Coverage | None = None
    why: Mismatch | None = None
    lost: str | None = None
    passed: str | None = None
    recorded: int = 0
    agreed: int = 0
    replays: int = 0
    misses: int = 0
    _related: _WindowRelations | None = None
    _lengths: list[Formula] = field(default_factory=list)  # sizes of tensors that may be 0 or 1
    _ranges: dict[str, _Range] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)  # of each symbol that is known late

    # -- recordings ------------------------------------------------------------------------------

    def add(
        self, reference: RecordedCall, is_late: Sequence[bool], observer: LateObserver | None
    ) -> None:
        """Add a recording. is_late: see above. observer: of this call, made for the template as it is."""
        self.recorded += 1
        self.is_late = is_late
        if self.lost is not None:
            return
        sizes = self._as_predicted(reference)
        if sizes is not None:
            self.agreed += 1
            self._compared(sizes)
            if observer is not None and self.coverage is not None:
                self.coverage.observed(sizes, observer.facts())
                self.is_observed = False
            self.references.append(reference)
            if self.is_known:
                del self.references[:-1]
                reference.forget()
                self._update_coverage()
            return
        if self.templates is not None:
            self.agreed = 0
            if self.replays and self._why_not_replayed(reference) is None:
                self.lost = "a call was not as predicted"
                return
            if self.replays:
                self.templates = self.instances = None
        self.references.append(reference)
        if len(self.references) >= FEWEST:
            self._make()
        if len(self.references) >= _MOST and self.templates is None:
            self.lost = str(self.why)
            self.release()

    def _update_coverage(self) -> None:
        if self.coverage is not None and self.coverage.lost is not None:
            self.lost = f"it is not known what Python learns of sizes: {self.coverage.lost}"

    def release(self) -> None:
        """Drop what further recordings would be compared with, if there will be none."""
        del self.references[:-1]
        for each in self.references:
            each.forget()

    def _why_not_replayed(self, reference: RecordedCall) -> str | None:
        """Why a replay of a recorded call would have missed; None: it would not."""
        sizes = self._symbols.sizes_of(reference.shapes)
        if isinstance(sizes, str):
            return sizes
        late = enumerate(sizes[self.first :], self.first)
        refused = (self.why_refused(symbol, size) for symbol, size in late)
        first = next((why for why in refused if why is not None), None)
        return first or self.why_compared(sizes[: self.first]) or self.why_not(sizes)

    def _as_predicted(self, reference: RecordedCall) -> Sizes | None:
        """The sizes of a recording, if the template makes its program; None: it does not, or there is none."""
        if self.templates is None:
            return None
        sizes = self._symbols.sizes_of(reference.shapes)
        if isinstance(sizes, str):
            return None
        pairs = zip(reference.leaves, self.templates.programs, strict=True)
        is_equal = all(tuple(own.integers) == t.predicted(sizes) for own, t in pairs)
        return sizes if is_equal and self.templates.whole.predicts(reference.forms, sizes) else None

    def _make(self) -> None:
        templates = Templates.of(self.references, may_be_equal=True)
        found = self._instances_of(templates) if isinstance(templates, Templates) else templates
        if isinstance(found, Mismatch):
            self.templates, self.instances, self.why = None, None, found
            return
        assert isinstance(templates, Templates)
        self.templates, self.instances, self.why = templates, found, None
        self.passed = None
        symbols, whole = self._symbols, templates.whole
        inputs = self.references[-1].program.inputs
        on_cpu = all(spec.device.type == "cpu" for spec in inputs)
        formulas = templates.formulas
        self.coverage = Coverage.of(self.every, formulas, whole.lengths, on_cpu)
        own = [f for f in formulas if not f.symbols or max(f.symbols) < self.first]
        lengths = [f for f in whole.lengths if not f.symbols or max(f.symbols) < self.first]
        self.arguments = Coverage.of(self.every, own, lengths, on_cpu)
        self._related = _WindowRelations(whole)
        self._lengths = [f for f in whole.lengths if _may_be_below_two(f)]
        self._lines, self._ranges = _lines(symbols, self.references[0]), {}
        for sizes in templates.sizes:
            self._compared(sizes)

    def _instances_of(self, templates: Templates) -> LateInstances | Mismatch:
        template = templates.programs[0]
        first = first_late(template.symbols)
        sent = _sent(templates.whole, first)
        if sent is not None:
            return Mismatch(0, f"`{sent}`", "what it sends has a size that the step computes")
        return LateInstances.made(template, templates.sizes[0], first, self)

    def _compared(self, sizes: Sizes) -> None:
        assert self.coverage is not None and self.arguments is not None
        self.coverage.was_compared(sizes)
        self.arguments.compared.append(sizes[: self.first])
        for line, size in zip(self._lines, sizes[self.first :], strict=True):
            rest = size % self.coverage.modulus
            found = self._ranges.setdefault(line, _Range(size, size, set()))
            found.low, found.high = min(found.low, size), max(found.high, size)
            found.rests.add(rest)

    @property
    def _symbols(self) -> Symbols:
        assert self.templates is not None
        return self.templates.programs[0].symbols

    @property
    def first(self) -> int:
        """The number of the first symbol that is known late."""
        return first_late(self._symbols)

    # -- calls -----------------------------------------------------------------------------------

    @property
    def is_known(self) -> bool:
        """Whether as many recordings in a row were as predicted as the number of symbols asks for."""
        if self.templates is None:
            return False
        late = len(self._symbols.names) - self.first
        return self.agreed >= _AGREEING + max(late - 1, 0).bit_length()

    @property
    def is_ready(self) -> bool:
        """Whether its program is replayed."""
        if self.lost is not None or self.coverage is None or not self.is_known:
            return False
        return self.coverage.has_known_path or not self._symbols.names

    def observer(self, shapes: Shapes) -> LateObserver | None:
        """What observes a call that is recorded; None: nothing is to be learned of it. shapes: of its arguments."""
        if self.templates is None or self.coverage is None or self.coverage.is_hopeless:
            return None
        sizes = self.sizes_of(shapes)
        is_wanted = self.is_observed or not self.coverage.has_known_path
        if isinstance(sizes, str) or not (self._symbols.names and is_wanted):
            return None
        return LateObserver(self.templates.whole, self._symbols, sizes, self.is_late)

    def sizes_of(self, shapes: Shapes) -> Sizes | str:
        """The sizes of the arguments of a call; text: in what it is of another kind."""
        return self._symbols.first_of(shapes, self.first)

    def why_compared(self, sizes: Sizes) -> str | None:
        """Why a call with arguments of these sizes is recorded; None: it is replayed."""
        assert self.arguments is not None
        if sizes in self.arguments.compared:
            return None
        return self.arguments.torch_may_differ(sizes, (), ())

    @property
    def text(self) -> str:
        """What is known of it, for `explain`."""
        text = f"sizes that the step computes: {counted(self.recorded, 'recorded call')}"
        if self.lost is not None:
            return f"{text}; none is replayed: {self.lost}"
        if self.is_ready:
            late = len(self._symbols.names) - self.first
            text += f" (without passes: {self.passed})" if self.passed else ""
            return (
                f"{text} are one program, in which {counted(late, 'size')} may vary; "
                f"{counted(self.replays, 'replay')}; {counted(self.misses, 'replay')} met a size that was not compared"
            )
        why = f": {self.why}" if self.why is not None else ""
        return f"{text}, of which more are needed to replay others{why}"

    def at(self, sizes: Sizes) -> Program | None:
        """The program for arguments of these sizes; None if one of them is the whole of its storage there only."""
        assert self.instances is not None
        found = programs_at([self.instances], sizes)
        if found is None:
            return None
        found[0].facts = self.references[-1].program.facts
        return found[0]

    def run_passes(self, apply: Callable[[Program], Program]) -> None:
        """Run the passes, once for all sizes: `lengths/shared_passes.py`."""
        assert self.templates is not None and self.coverage is not None
        templates, compared = self.templates, self.coverage.compared
        found: Any = rewritten(templates.programs[0], templates.whole, compared, apply)
        if isinstance(found, Template):
            found = LateInstances.made(found, compared[0], self.first, self)
        if isinstance(found, LateInstances):
            self.instances = found
        self.passed = "" if isinstance(found, LateInstances) else str(found)

    # -- replays: `admission.Rules` ----------------------------------------------------------------

    def why_refused(self, symbol: int, size: int) -> str | None:
        assert self.coverage is not None
        if size < 2:
            return "is one that torch treats in its own way"
        found = self._ranges[self._lines[symbol - self.first]]
        margin = (found.high - found.low) // _HARDLY
        if not found.low - margin <= size <= found.high + margin:
            return f"is not between compared ones, {found.low} and {found.high}"
        rest = size % self.coverage.modulus
        if rest not in found.rests:
            return f"leaves {rest} by {self.coverage.modulus}, as no compared one does"
        return None

    def compared_size(self, symbol: int, arguments: Sizes) -> int:
        assert self.coverage is not None
        fits = [c for c in self.coverage.compared if c[: self.first] == arguments]
        return min(each[symbol] for each in fits or self.coverage.compared)

    def why_not(self, sizes: Sizes) -> str | None:
        coverage = self.coverage
        assert coverage is not None
        for formula in coverage.divided:
            rest = formula.rest(sizes)
            if all(formula.rest(c) != rest for c in coverage.compared):
                return f"no compared size leaves {rest} in {formula}"
        for formula in self._lengths:
            size = formula.value(sizes)
            if size < 2 and all(formula.value(c) != size for c in coverage.compared):
                return f"a tensor has the size {size}, which it had in no compared call"
        if self._related is not None and not self._related.hold(sizes):
            return "tensors on one storage relate to each other otherwise than in recorded calls"
        why = coverage.python_differs(sizes) if sizes else None
        self.is_observed |= why is not None and coverage.wants_observer
        return why


def _may_be_below_two(formula: Formula) -> bool:
    """Whether a function of sizes from 2 on may be 0 or 1."""
    grows = all(coefficient > 0 for coefficient, _ in formula.terms)
    return bool(formula.terms) and not (grows and formula.constant >= 0 and not formula.operator)


def _lines(symbols: Symbols, reference: RecordedCall) -> list[str]:
    """The line of the step that makes each size that is known late."""
    first, found = first_late(symbols), dict[int, str]()
    guards = late_guards(reference.program)
    for guard, (_, symbol, _) in zip(guards, late_places(symbols, len(guards)), strict=True):
        found.setdefault(symbol, guard.where)
    return [found[n] for n in range(first, len(symbols.names))]


def _sent(whole: SignatureTemplate, first: int) -> str | None:
    """The first collective of which an argument or a result has a size that is known late."""

    def is_late(function: Formula | tuple[object, tuple[Formula, ...]]) -> bool:
        formulas = [function] if isinstance(function, Formula) else function[1]
        return any(f.symbols and max(f.symbols) >= first for f in formulas)

    late = [is_late(function) for function in whole.functions]
    start = 0
    for row, end in zip(whole.reference.rows, whole.ends, strict=True):
        space = getattr(row.target, "namespace", "")
        if space in _COLLECTIVES and any(late[n] for n in whole.columns[start:end]):
            return str(row.target)
        start = end
    return None


# -- tensors on one storage ------------------------------------------------------------------------

_MOST_KNOWN = 4096  # sizes that are remembered


@dataclass(slots=True)
class _Storage:
    """A storage with several windows, or one whose layout depends on sizes. symbols: those of its windows."""

    functions: list[Any]
    related: Any
    symbols: tuple[int, ...]
    known: set[Sizes] = field(default_factory=set)

    def holds(self, sizes: Sizes) -> bool:
        own = tuple([sizes[symbol] for symbol in self.symbols])
        if own in self.known:
            return True
        windows: list[Any] = [value_at(each, sizes) for each in self.functions]
        if relations(windows) != self.related:
            return False
        if len(self.known) < _MOST_KNOWN:
            self.known.add(own)
        return True


class _WindowRelations:
    """Those of the storages that windows share at all sizes."""

    def __init__(self, whole: SignatureTemplate) -> None:
        self._storages = []
        for windows, related in zip(whole.storages, whole.related, strict=True):
            if len(windows) > 1 or not whole.layout_is_known(windows[0]):
                functions: list[Any] = [whole.functions[number] for number in windows]
                symbols = {n for _, formulas in functions for f in formulas for n in f.symbols}
                self._storages.append(_Storage(functions, related, tuple(sorted(symbols))))

    def hold(self, sizes: Sizes) -> bool:
        """Whether they are as in the recordings."""
        return all(each.holds(sizes) for each in self._storages)


# -- the observer of a recorded call ---------------------------------------------------------------


class LateObserver(ObservedSizes):
    """sizes: of the arguments. is_late: for each size of a result that is counted, whether it is known late."""

    def __init__(
        self, whole: SignatureTemplate, symbols: Symbols, sizes: Sizes, is_late: Sequence[bool]
    ) -> None:
        super().__init__(whole.known_at(sizes))
        self._whole, self._sizes = whole, [*sizes]
        self._counts = iter(is_late)
        self._places = iter(late_places(symbols, sum(is_late)))

    def counted(self, count: int) -> None:
        """An op is about to make a result of this size."""
        if not next(self._counts, False):
            return
        _, symbol, _ = next(self._places)
        if symbol == len(self._sizes):
            self._sizes.append(count)
            self.learn(self._whole.known_at(tuple(self._sizes)))
