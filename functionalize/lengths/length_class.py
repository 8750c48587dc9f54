"""One class: recorded calls of a step that differ in sizes only, and the programs that are predicted for others.

    group.add(RecordedCall(...))                  a recorded call
    prediction = group.predicted(shapes)       a `Prediction`, or None

Recordings are one class if their programs and op streams differ in integers only, and the windows of each storage
relate alike (`relations.py`). A class has a template, made of the programs before the passes: these run once for all
sizes of the class (`shared_passes.py`).

Note [Early templates]
Two recordings are enough for a template if one size varies and all functions of the program are in the op stream,
which first calls compare. The first call that is compared confirms it; until then no other size is replayed, and no
pass runs for all sizes. If that call is not as predicted, or its arguments relate to each other otherwise than those of
the two recordings, the template is dropped, and a third recording determines another one. Else a template is made of
three recordings, and of four where functions of the program are in no op and first calls compare no results.

Invariant: a prediction is never replayed before its first call has run for real, and was found equal to it; see
`first_call.py`, or `coverage.py` says why it would be.
Refusals: what `Template.of` and `SignatureTemplate.of` refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from functionalize.audit.results import is_comparable
from functionalize.audit.shared_sizes import SharedSizes
from functionalize.audit.signature import Signature
from functionalize.lengths.coverage import EVERY, Coverage, varying_below_two
from functionalize.lengths.data_sizes import early_guards
from functionalize.lengths.instances import Instances, programs_at
from functionalize.lengths.observed_sizes import ObservedSizes
from functionalize.lengths.recorded_calls import RecordedCall, Templates
from functionalize.lengths.shared_passes import needs_no_copies, rewritten
from functionalize.lengths.signature_template import SignatureTemplate
from functionalize.program.early_guard import EarlyGuard
from functionalize.program.program import Program
from functionalize.templates.fitting import Sizes
from functionalize.templates.symbols import Shapes
from functionalize.templates.template import EARLY, FEWEST, Mismatch, Template

MOST = 6  # recordings of one class


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a call is expected to do. rest: that of the last reference. is_passed: whether the passes have run.

    programs: the program, and that of the backward if that is one of its own; then `forward` is the op stream of the
    forward alone. why: it is compared; None: the program is replayed.
    """

    group: LengthClass
    shapes: Shapes
    sizes: Sizes
    programs: Sequence[Program]
    op_stream: Callable[[], Signature]
    forward: Callable[[], Signature] | None
    rest: Any
    is_passed: bool
    why: str | None = None

    @property
    def is_due(self) -> bool:
        """Whether it is compared because one in so many new sizes is."""
        coverage = self.group.coverage
        return coverage is not None and self.why == coverage.due

    def found_wrong(self, difference: str) -> None:
        """The first call was not as predicted."""
        if self.group.is_early:
            self.group.begin_again()
            return
        was_known = self.group.coverage is not None and (self.why is None or self.is_due)
        self.group.failed(difference, self.shapes, was_known)

    def found_right(self, observer: ObservedSizes | None, was_watched: bool) -> bool:
        """The first call was as predicted; whether its program may be replayed. observer: of this call.

        was_watched: see `Coverage.wants_watch`.
        """
        coverage = self.group.coverage
        assert coverage is not None
        if observer is not None and not coverage.observed(
            self.sizes, observer.facts(), was_watched
        ):
            return False
        self.group.compared(self.shapes, self.why)
        del self.group.references[:-1]
        return True

    def observer(self) -> ObservedSizes | None:
        """What observes the first call; None: nothing does."""
        group = self.group
        if group.coverage is None or group.signatures is None:
            return None
        if not group.coverage.wants_run(self.sizes):
            return None
        return ObservedSizes(group.signatures.known_at(self.sizes))

    def cached(self, has_passes: bool, replays_before_passes: bool) -> Any:
        """A cache entry, like that of the last reference. has_passes: whether there are any to run."""
        recorded = self.group.recorded
        return self.rest.made_by(
            self,
            prediction=self,
            reason=f"a prediction from {recorded} recorded calls of other sizes",
            awaits_passes=has_passes and not self.is_passed,
            replays_before_passes=replays_before_passes,
            group=self.group,
            replays=0,
            audits=0,
        )


@dataclass(slots=True, eq=False)
class LengthClass:
    """Recordings with equal graphs. known: shapes of recordings, and of predictions that were right.

    templates: of its programs, and of those of backwards; empty: there are none yet. instances, passed: the programs of
    each before the passes and after, empty until they are used. signatures: of the op streams, forwards: of forwards
    alone. differing: shapes of predictions that were wrong. coverage: there is a template.
    fewest: of how many recordings a template is made. is_lean: see `needs_no_copies`. compares_results: whether first
    calls do.
    apart: why passes run for each size. replays: of programs without passes. issued: the fingerprints of the
    collectives of all programs after the passes, see `program/collective_order.py`; None: they were not asked for.
    shared: what ranks share of their comparisons; None until the first one. digest: of the op streams; "" of a file.
    """

    tokens: int
    references: list[RecordedCall] = field(default_factory=list)
    known: list[Shapes] = field(default_factory=list)
    templates: list[Template] = field(default_factory=list)
    signatures: SignatureTemplate | None = None
    why: Mismatch | None = None
    recorded: int = 0
    failures: int = 0
    differing: list[Shapes] = field(default_factory=list)
    every: int = EVERY
    coverage: Coverage | None = None
    is_lean: bool = True
    compares_results: bool = True
    instances: list[Instances] = field(default_factory=list)
    passed: list[Instances] = field(default_factory=list)
    forwards: SignatureTemplate | None = None
    apart: str | None = None
    replays: int = 0
    issued: Mapping[str, int] | None = None
    shared: SharedSizes | None = None
    digest: str = ""
    fewest: int = EARLY

    @property
    def sharing(self) -> SharedSizes:
        """What ranks share of their comparisons; there is a template."""
        if self.shared is None:
            assert self.signatures is not None and self.coverage is not None
            digest = self.digest or self.signatures.digest()
            self.shared = SharedSizes.of(self.templates[0].reference, digest, self.coverage)
        return self.shared

    @property
    def template(self) -> Template | None:
        """Of the program, or of the forward; None: there is none yet."""
        return self.templates[0] if self.templates else None

    def add(self, reference: RecordedCall) -> bool:
        """Add a recording, unless the template makes another program at its sizes; whether it was added."""
        self.recorded += 1
        if self.is_early and self._is_other(reference):
            self.begin_again()
        if self._is_other(reference):
            if reference.shapes not in self.differing:
                was_known = self.why_compared(reference.shapes, ()) is None
                self.failed("it was recorded", reference.shapes, was_known)
            return False
        self.compared(reference.shapes)
        if self.template is not None:
            others = [each for each in self.references if each.shapes != reference.shapes]
            is_again = len(others) < len(self.references)  # it confirms nothing
            self.references[:] = [*(others if is_again else ()), reference]
        elif len(self.references) < MOST:
            self.references.append(reference)
            if len(self.references) >= self.fewest:
                self.why = self._make()
        if not self.wants:
            for each in self.references:
                each.forget()
        return True

    def _is_other(self, reference: RecordedCall) -> bool:
        """Whether the template makes another program, of equal tokens, at the sizes of a recording."""
        sizes = self.sizes_of(reference.shapes)
        if isinstance(sizes, str):
            return False
        pairs = zip(reference.leaves, self.templates, strict=True)
        return any(tuple(own.integers) != t.predicted(sizes) for own, t in pairs)

    def compared(self, shapes: Shapes, why: str | None = None) -> None:
        """A call with these shapes was recorded, or was as predicted. why: it was compared."""
        self.known.append(shapes)
        sizes = self.sizes_of(shapes)
        if self.coverage is not None and not isinstance(sizes, str):
            self.coverage.was_compared(sizes, why)

    def failed(self, why: str, shapes: Shapes, was_known: bool) -> None:
        """A call with these shapes was not as predicted. was_known: whether no rule said that it might not be."""
        self.failures += 1
        self.differing.append(shapes)
        if self.coverage is not None and was_known:
            self.coverage.lost = f"a call was not as predicted, {why}"

    def _make(self) -> Mismatch | None:
        templates = Templates.of(self.references, self.fewest)
        if isinstance(templates, Mismatch):
            return templates
        sizes, signatures = templates.sizes, templates.whole
        on_cpu = all(spec.device.type == "cpu" for spec in templates.programs[0].reference.inputs)
        coverage = Coverage.of(self.every, templates.formulas, signatures.lengths, on_cpu)
        for own in sizes:
            coverage.was_compared(own)
        self.takes(templates.programs, signatures, coverage)
        self.digest = signatures.digest(self.references[0].forms.rows)
        programs = zip(*(each.programs for each in self.references), strict=True)
        self.instances = [Instances.of(t, sizes, next(programs)) for t in self.templates]
        self.forwards = templates.forwards
        for each in self.references:
            each.replayed_by(self.predicted(each.shapes))
        if len(sizes) > EARLY:
            del self.references[:-1]  # the template holds what it needs of the others
        return None

    @property
    def is_early(self) -> bool:
        """Whether the template is made of too few recordings to be known without a comparison: none was made yet."""
        return self.template is not None and len(self.references) > 1

    def begin_again(self) -> None:
        """The template, which nothing has confirmed, is wrong: further recordings determine another one."""
        self.fewest, self.templates, self.instances = FEWEST, [], []
        self.signatures = self.forwards = self.coverage = self.shared = None
        self.digest = ""

    def takes(
        self, templates: list[Template], signatures: SignatureTemplate, coverage: Coverage
    ) -> None:
        """From now on it has a template."""
        self.templates, self.signatures, self.coverage = templates, signatures, coverage
        self.is_lean = all(needs_no_copies(each.reference) for each in templates)
        # The first call of a prediction compares results only where its graph can run beside the step.
        self.compares_results = is_comparable(templates[0].reference)

    def makes_again(self, cached: Any) -> bool:
        """Whether a `CachedProgram` of this class need not be kept: its like is replayed at its next call."""
        if (
            self.coverage is None
            or self.coverage.is_hopeless
            or self.apart is not None
            or self.is_early
        ):
            return False
        return cached is not self.references[-1].cached

    @property
    def wants(self) -> bool:
        """Whether a further recording may lead to a template."""
        return self.template is None and len(self.references) < MOST

    def distance(self, shapes: Shapes) -> int:
        """How far a call is from the nearest one that is known."""
        own, known = [*chain(*shapes)], [chain(*each) for each in self.known]
        return min(sum(abs(a - b) for a, b in zip(own, k, strict=True)) for k in known)

    def why_compared(self, shapes: Shapes, others: Sequence[Shapes]) -> str | None:
        """Why the first call with these shapes runs for real, and is compared; None: it is replayed.

        others: the shapes of calls that are in other classes.
        """
        sizes = self.sizes_of(shapes)
        if self.template is None or isinstance(sizes, str) or self.coverage is None:
            return str(sizes)
        values_in = self.template.symbols.values_in
        return self.coverage.why_compared(sizes, list(map(values_in, others)))

    def predicted(self, shapes: Shapes, is_passed: bool = False) -> Prediction | None:
        """What is expected of a call with these shapes. is_passed: by the program after the passes, if there is one."""
        sizes = self.sizes_of(shapes)
        if self.signatures is None or isinstance(sizes, str):
            return None
        op_stream = self.signatures.at(sizes)
        if isinstance(op_stream, str):
            return None
        programs = self.passed_at(sizes) if is_passed else None
        has_passed, latest = programs is not None, self.references[-1]
        if programs is None:
            self.instances = self.instances or self._instances_of(self.templates)
            programs = programs_at(self.instances, sizes)
        if programs is None or len(programs) < len(latest.programs):
            return None
        for program, recorded in zip(programs, latest.programs, strict=True):
            program.facts = recorded.facts  # on the state as it is now
        stream = None if self.forwards is None else self.forwards.at(sizes)
        if isinstance(stream, str):
            return None
        return Prediction(
            self, shapes, sizes, programs, op_stream, stream, latest.cached, has_passed
        )

    def early_guards(self, shapes: Shapes) -> tuple[list[EarlyGuard], bool]:
        """The guards on numbers of the arguments, and whether they are those for these shapes, not of a recording."""
        expected = self.predicted(shapes)
        program = self.references[-1].program if expected is None else expected.programs[0]
        return early_guards(program.guards), expected is not None

    def _instances_of(self, templates: Sequence[Template]) -> list[Instances]:
        """The programs of templates of this class that were loaded, or are those after the passes."""
        known = [sizes for sizes in map(self.sizes_of, self.known) if not isinstance(sizes, str)]
        # Of as many sizes as a template is made of.
        return [Instances.of(each, known[: FEWEST + 1]) for each in templates]

    # -- passes ----------------------------------------------------------------------------------

    def run_passes(self, apply: Callable[[Program], Program]) -> None:
        """Run the passes for all sizes, once."""
        if self.passed or self.apart is not None:
            return
        assert self.signatures is not None and self.coverage is not None
        known = self.coverage.compared
        found = [rewritten(each, self.signatures, known, apply) for each in self.templates]
        self.apart = next((each for each in found if isinstance(each, str)), None)
        if self.apart is None:
            self.takes_passed([each for each in found if not isinstance(each, str)])

    def takes_passed(self, templates: Sequence[Template]) -> None:
        """From now on it has templates of the programs after the passes."""
        self.passed = self._instances_of(templates)

    def sizes_of(self, shapes: Shapes) -> Sizes | str:
        """The value of each symbol in a call; text: it has none."""
        found = self.template
        return found.symbols.sizes_of(shapes) if found is not None else "there is no template"

    def shares_passes(self, sizes: Sizes | str) -> bool:
        """Whether what passes decide for all sizes holds at these: no sizes of tensors are equal, 0 or 1 by chance."""
        if isinstance(sizes, str) or self.signatures is None or self.apart is not None:
            return False
        if self.is_early:
            return False
        values = {each: each.value(sizes) for each in self.signatures.lengths}
        return len({*values.values()}) == len(values) and not varying_below_two(values)

    def passed_at(self, sizes: Sizes) -> list[Program] | None:
        """The program after the passes, and that of the backward; None if these run for each size, or have not run."""
        is_known = bool(self.passed) and self.shares_passes(sizes)
        return programs_at(self.passed, sizes) if is_known else None
