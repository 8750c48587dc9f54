"""The figures of a step: its memory with the lifetimes of eager and of the program side by side, and bytes per op.

    memory = Memory(eager, program)          two timelines, or one of them; `text.py` adds the text
    memory.peak                              requested bytes of the program (of eager if there is no program)
    memory.levels("eager")                   requested, allocated, reserved and declared bytes, separately
    memory.fit(80 * 10**9, "eager")          whether it fits in a device of so many bytes
    memory.difference()                      why the two peaks differ: by category, and by storages
    memory.top(10), memory.to_json()         the largest storages: where made, last used and freed; all of it as JSON
    memory.by_module(), by_op(), by_line(), by_phase()       the bytes of the peak, by the op that made them

    requested   the sizes of storages                      exact: the timelines
    allocated   each storage rounded up to 512 bytes       as in CUDA's caching allocator
    reserved    the allocator's segments                   simulated: `allocator.py`
    constants   memory outside of torch's allocator        declared: `constants.py`

Invariants: numbers of different levels are never added up, except in `device`, the sum of reserved and constants; every
breakdown sums up to the requested peak. Linear in events, except `reserved`.
Refuses (`MemoryReportError`): a timeline that the report does not have.

The memory of every op of a forward and of its backward, in bytes: the input of a stage or checkpoint planner.

    rows = quantities(program)
    forward_in          read by the op: activations, parameters, inputs; each storage once
    forward_tmp         made by the op and never read (for example outputs for another device)
    forward_out         made by the op and read later; a view makes nothing
    saved               made by the op and read by a backward: once per storage, however many views it has
    backward_tmp        made by the ops of its backward and read by these only
    backward_out        made by these and read by others: the gradients of its inputs and parameters

    mm = aten.mm(x, w)          in: x, w   out: mm   saved: mm       (relu's backward reads relu, mm's reads x and w)
    mm_1, mm_2 (its backward)   out: the gradients of x and of w

Forward and backward are matched by autograd's nodes (`tape/queries.py`): a backward belongs to the first op of the
forward that made its node and makes a storage. Ops of FSDP2's hooks in backward are counted with the autograd node in
which they run, and so are recomputed ops (checkpointing).
Invariants: a storage is counted by the one op that makes it; sums over the rows are sums over storages. Needs a
described program; linear in nodes and edges. The backward's columns are 0 for an op without one, and without phases.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, fx

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.analysis.aliases import storage_key
from functionalize.cost.categories import Category, is_part
from functionalize.cost.liveness import Liveness, Storage
from functionalize.errors import MemoryReportError, PictureError, PlannedOutOfMemoryError
from functionalize.ir.phases import FORWARD, phase_of
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.allocator.allocator import Reserved, StreamOf, simulate
from functionalize.planner.machines.constants import DeviceConstant
from functionalize.planner.report.rows import NO_PHASE
from functionalize.planner.timeline.timeline import (
    BEFORE,
    EAGER,
    PROGRAM,
    Allocation,
    Op,
    Timeline,
    by_category,
)
from functionalize.program.metadata import tensors_of
from functionalize.program.program import Program
from functionalize.tape.queries import forward_number, made_by
from functionalize.util.text import counted, human_bytes

_NUMBERS = re.compile(r"\d+")


class AllocationGroup(NamedTuple):
    """Allocations whose names differ in numbers only, such as those of a model's layers: `layers.*.wq`."""

    category: Category
    name: str
    members: int
    nbytes: int


def pattern(name: str) -> str:
    """A name with its numbers replaced: `layers.*.wq`."""
    return _NUMBERS.sub("*", name)


def groups(allocations: Iterable[Allocation]) -> list[AllocationGroup]:
    """Allocations grouped by category and `pattern` of the name, largest first; a group of one keeps the name."""
    found: dict[tuple[Category, str], list[Allocation]] = {}
    for each in allocations:
        found.setdefault((each.category, pattern(each.name)), []).append(each)
    made = (
        AllocationGroup(
            c, name if len(some) > 1 else some[0].name, len(some), sum(a.nbytes for a in some)
        )
        for (c, name), some in found.items()
    )
    return sorted(made, key=lambda group: -group.nbytes)


def brief(name: str) -> str:
    """A name without namespace and default overload: `aten.mm.default layers.0` as `mm layers.0`."""
    return (
        name.replace("aten.", "", 1).replace(".default", "", 1)
        if name.startswith("aten.")
        else name
    )


def check_held(held: Sequence[int], timeline: Timeline) -> None:
    """Raise `PictureError` unless there is one number of the device's bytes per event of the timeline."""
    if len(held) != len(timeline.events):
        raise PictureError(
            f"The device's bytes at {len(held):,} moments do not match the {len(timeline.events):,} events of "
            f"`{timeline.name}`. Pass one number per event, as `Memory.held()` returns them."
        )


class Peak(NamedTuple):
    """The peak of a timeline.

    event: the index of the event after which it is reached. op: the op of that event; None before the step.
    live: the allocations that are live then, largest first.
    """

    nbytes: int
    event: int
    op: Op | None
    live: list[Allocation]
    categories: dict[Category, int]

    def __repr__(self) -> str:
        return f"<Peak: {self.words()}>"

    @classmethod
    def of(cls, timeline: Timeline) -> Peak:
        """The first event after which the most bytes are live."""
        live = timeline.live_at(timeline.peak_at) if timeline.events else []
        op = timeline.peak_op
        return cls(timeline.peak, timeline.peak_at, op, live, by_category(live))

    def where(self) -> str:
        """`in forward, while aten.mm.default runs in layers.3.mlp`."""
        if self.op is None:
            return "before the step"
        module = f" in {self.op.module}" if self.op.module else ""
        return f"in {self.op.phase or NO_PHASE}, while {self.op.name} runs{module}"

    def largest(self, count: int = 3) -> list[tuple[Category, int]]:
        """The categories with the most bytes."""
        return sorted(self.categories.items(), key=lambda item: -item[1])[:count]

    def words(self) -> str:
        """One sentence: the bytes, the op, the largest categories."""
        share = max(self.nbytes, 1)
        of = ", ".join(
            f"{c.value} {human_bytes(n)} ({100 * n / share:.0f}%)" for c, n in self.largest()
        )
        return f"{human_bytes(self.nbytes)} {self.where()}" + (f": {of}" if of else "") + "."


# -- the memory of a step --------------------------------------------------------------------------


BEFORE_THE_STEP, AFTER_THE_STEP = "before the step", "after the step"
_BLOCK = 512  # bytes: CUDA's caching allocator rounds sizes up to a multiple


class Levels(NamedTuple):
    """Bytes of the peak at each level. They may be reached at different moments."""

    requested: int
    allocated: int
    reserved: int
    constants: int

    @property
    def device(self) -> int:
        """The bytes that the device must have: reserved and constants."""
        return self.reserved + self.constants


class Fit(NamedTuple):
    """Whether a step runs on a device with a limit. refused: why it does not; None: it does.

    nbytes: what the device holds: at the limit the allocator releases its cache. If it is refused, without a limit.
    """

    nbytes: int
    refused: str | None


class StorageRow(NamedTuple):
    """A storage that is live at the peak.

    op, module, line, phase: those of the op that made it. made, last_use, freed: the ops of these events, as text.
    """

    nbytes: int
    category: Category
    name: str
    shape: str
    op: str
    module: str
    line: str
    phase: str
    made: str
    last_use: str
    freed: str

    def __repr__(self) -> str:
        return f"<StorageRow: {human_bytes(self.nbytes)}, {self.category.value}, {self.name} {self.shape}>"


class CategoryChange(NamedTuple):
    """A category's bytes at the peak of each timeline."""

    category: Category
    eager: int
    program: int

    @property
    def nbytes(self) -> int:
        """The bytes that the program has more than eager."""
        return self.program - self.eager


class Difference(NamedTuple):
    """Why two peaks differ. only_eager, only_program: storages live at one peak and not at the other.

    categories: the largest change first; storages: the largest group first.
    """

    eager: int
    program: int
    categories: tuple[CategoryChange, ...]
    only_eager: tuple[AllocationGroup, ...]
    only_program: tuple[AllocationGroup, ...]

    def __repr__(self) -> str:
        most = "".join(f", {c.category.value} {c.nbytes:+,}" for c in self.categories[:1])
        return f"<Difference: eager {self.eager:,} bytes, program {self.program:,}{most}>"


@dataclass(frozen=True, eq=False, repr=False)
class MemoryFigures:
    """The memory of one step.

    eager, program: the timelines; one of them may be None. constants: memory outside of torch's allocator, as
    `declared(...)` returns it. settings: the settings of the simulated allocator; None: the defaults.
    stream_of: returns the stream on which eager allocates a storage; None: one stream.
    caching: False on a CPU, whose allocator keeps no freed memory: allocated and reserved bytes are the requested ones.
    host_peak: the most requested bytes of offloaded tensors in host memory, beside the device.
    """

    eager: Timeline | None = None
    program: Timeline | None = None
    constants: tuple[DeviceConstant, ...] = ()
    settings: Settings | None = None
    stream_of: StreamOf | None = None
    caching: bool = True
    host_peak: int = 0

    def __repr__(self) -> str:
        peaks = [f"{name} {human_bytes(each.peak)}" for name, each in self.timelines.items()]
        return f"<{type(self).__name__}, peaks: {', '.join(peaks) or 'none'}>"

    # -- timelines ---------------------------------------------------------------------------------

    @cached_property
    def timelines(self) -> dict[str, Timeline]:
        """The timelines of this report, by name."""
        both = {EAGER: self.eager, PROGRAM: self.program}
        return {name: timeline for name, timeline in both.items() if timeline is not None}

    def timeline(self, of: str | None = None) -> Timeline:
        """The timeline of that name; None: the program's, else eager's. Raises `MemoryReportError` if it is missing."""
        name = self._name(of)
        found: Timeline | None = getattr(self, name) if name in (EAGER, PROGRAM) else None
        if found is None:
            there = " and ".join(self.timelines) or "none"
            raise MemoryReportError(
                f"no timeline `{name}` in this report, there is {there}: capture the step with "
                "`fz.capture(step, memory=True)`, or give `program_timeline(program)`"
            )
        return found

    @cached_property
    def _known(self) -> dict[Any, Any]:
        """The peaks, levels and fits that have been found, by what was asked."""
        return {}

    @property
    def peak(self) -> int:
        """The most requested bytes that are live at once."""
        return self.timeline().peak

    def peak_of(self, of: str | None = None) -> Peak:
        """The peak of a timeline: its event, its op, the live allocations."""
        name = self._name(of)
        if ("peak", name) not in self._known:
            self._known["peak", name] = Peak.of(self.timeline(name))
        found: Peak = self._known["peak", name]
        return found

    def _name(self, of: str | None) -> str:
        """The name of a timeline; None: of the program's, else of eager's. A timeline is made when it is read."""
        return of or (PROGRAM if self.program is not None or self.eager is None else EAGER)

    @property
    def uncounted(self) -> str | None:
        """A line on the ops whose scratch is not known, for which no bytes are counted; None if there are none."""
        found = self.timeline(EAGER if self.eager is not None else PROGRAM).uncounted
        calls = (f"{name} ({counted(count, 'call')})" for name, count in found.items())
        return f"scratch not known, and not counted: {', '.join(calls)}" if found else None

    # -- levels ------------------------------------------------------------------------------------

    def levels(self, of: str | None = None) -> Levels:
        """The peak at each level; raises `PlannedOutOfMemoryError` if the settings have a limit that is too small."""
        name = self._name(of)
        if ("levels", name) not in self._known:
            timeline = self.timeline(name)
            constants = sum(constant.nbytes for constant in self.constants)
            rounded = reserved = timeline.peak
            if self.caching:
                rounded = max(allocated(timeline), default=0)
                reserved = self.simulated(name).peak
            self._known["levels", name] = Levels(timeline.peak, rounded, reserved, constants)
        found: Levels = self._known["levels", name]
        return found

    def simulated(self, of: str | None = None, settings: Settings | None = None) -> Reserved:
        """What the caching allocator reserves after each event. settings: in place of this report's."""
        name = self._name(of)
        streams = self.stream_of if name == EAGER else None  # a program allocates on one stream
        return simulate(self.timeline(name), settings or self.settings, streams)

    def held(self, of: str | None = None, limit: float | None = None) -> list[int]:
        """What the device holds after each event: reserved and declared bytes; at a limit that it fits in, as `fit`."""
        name, settings = self._name(of), self.settings
        constants = self.levels(name).constants
        if limit is not None and self.fit(limit, name).refused is None:
            settings = replace(settings or Settings(), limit=int(limit) - constants)
        found = self.simulated(name, settings).bytes if self.caching else self.timeline(name).bytes
        return [nbytes + constants for nbytes in found]

    def fit(self, limit: float, of: str | None = None) -> Fit:
        """Whether a device of `limit` bytes can run the step."""
        key = limit, self._name(of)
        if key not in self._known:
            self._known[key] = self._fit(*key)
        found: Fit = self._known[key]
        return found

    def _fit(self, limit: float, of: str) -> Fit:
        levels = self.levels(of)
        left = int(limit) - levels.constants
        if levels.reserved <= left:
            return Fit(levels.device, None)
        if left <= 0:
            needed = f"{human_bytes(levels.constants)} of {human_bytes(limit)}"
            return Fit(levels.device, f"context and workspaces alone need {needed}")
        if not self.caching:
            needed = f"{human_bytes(levels.reserved)} of {human_bytes(limit)}"
            return Fit(levels.device, f"the peak needs {needed}: {self.peak_of(of).where()}")
        try:
            settings = replace(self.settings or Settings(), limit=left)
            return Fit(self.simulated(of, settings).peak + levels.constants, None)
        except PlannedOutOfMemoryError as error:
            beside = f" ({human_bytes(levels.constants)} of the device's are declared constants)"
            return Fit(levels.device, f"{error}{beside if levels.constants else ''}")

    # -- the peak, broken down ---------------------------------------------------------------------

    def by_category(self, of: str | None = None) -> dict[Category, int]:
        """The requested bytes of every category at the peak."""
        return self.peak_of(of).categories

    def by_module(self, of: str | None = None) -> dict[str, int]:
        """The requested bytes of the peak by the module whose ops made them, the largest first."""
        return self._by(of, lambda op: op.module or "(no module)")

    def by_op(self, of: str | None = None) -> dict[str, int]:
        """The requested bytes of the peak by the op that made them."""
        return self._by(of, lambda op: op.name)

    def by_line(self, of: str | None = None) -> dict[str, int]:
        """The requested bytes of the peak by the user's line that made them."""
        return self._by(of, lambda op: op.line or "(no line)")

    def by_phase(self, of: str | None = None) -> dict[str, int]:
        """The requested bytes of the peak by the phase that made them."""
        return self._by(of, lambda op: op.phase or "(no phase)")

    def _by(self, of: str | None, key: Callable[[Op], str]) -> dict[str, int]:
        timeline, found = self.timeline(of), Counter[str]()
        for each in self.peak_of(of).live:
            name = BEFORE_THE_STEP if each.made == BEFORE else key(timeline.ops[each.made])
            found[name] += each.nbytes
        return dict(found.most_common())

    def top(self, k: int = 10, of: str | None = None) -> list[StorageRow]:
        """The k largest storages that are live at the peak."""
        timeline = self.timeline(of)
        return [_row(each, timeline) for each in self.peak_of(of).live[:k]]

    # -- two peaks ---------------------------------------------------------------------------------

    def difference(self) -> Difference:
        """Why the two peaks differ. Storages of the same category, size and padding are matched one to one."""
        eager, program = self.peak_of(EAGER), self.peak_of(PROGRAM)
        every = [c for c in Category if c in eager.categories or c in program.categories]
        changes = (
            CategoryChange(c, eager.categories.get(c, 0), program.categories.get(c, 0))
            for c in every
        )
        return Difference(
            eager.nbytes,
            program.nbytes,
            tuple(sorted(changes, key=lambda change: -abs(change.nbytes))),
            tuple(groups(_not_in(program.live, eager.live))),
            tuple(groups(_not_in(eager.live, program.live))),
        )

    # -- for people and programs -------------------------------------------------------------------

    def to_json(self, k: int = 20, timelines: bool = False) -> dict[str, Any]:
        """The report as plain dicts, lists, numbers and strings.

        k: rows of each table. timelines: whether to add the bytes of every category after every event.
        """
        self.timeline()
        found: dict[str, Any] = {
            "constants": [constant._asdict() for constant in self.constants],
            "host": self.host_peak,
            "timelines": {name: self._json(name, k, timelines) for name in self.timelines},
        }
        if len(self.timelines) == 2:
            found["difference"] = _json_of(self.difference(), k)
        return found

    def _json(self, name: str, k: int, stacked: bool) -> dict[str, Any]:
        timeline, levels, peak = self.timeline(name), self.levels(name), self.peak_of(name)
        found: dict[str, Any] = {
            "levels": {**levels._asdict(), "device": levels.device},
            "peak": {
                "event": peak.event,
                "op": peak.op._asdict() if peak.op is not None else None,
                "where": peak.where(),
            },
            "by_category": _texts(peak.categories),
            "by_module": self.by_module(name),
            "by_op": self.by_op(name),
            "by_line": self.by_line(name),
            "by_phase": self.by_phase(name),
            "top": [{**row._asdict(), "category": row.category.value} for row in self.top(k, name)],
            "ops": len(timeline.ops),
            "events": len(timeline.events),
            "uncounted": dict(timeline.uncounted),
        }
        if stacked:
            found["stacked"] = _texts(timeline.stacked())
        return found


def allocated(timeline: Timeline) -> Iterable[int]:
    """The bytes that are allocated after each event: every storage rounded up to 512 bytes."""
    sizes = (-(-event.allocation.nbytes // _BLOCK) * _BLOCK for event in timeline.events)
    pairs = zip(timeline.events, sizes, strict=True)
    return accumulate(size if event.made else -size for event, size in pairs)


def _row(each: Allocation, timeline: Timeline) -> StorageRow:
    op = timeline.ops[each.made] if each.made != BEFORE else Op("", "")
    return StorageRow(
        each.nbytes,
        each.category,
        each.name,
        each.shape,
        op.name,
        op.module,
        op.line,
        op.phase,
        place(timeline, each.made),
        place(timeline, each.last_use),
        place(timeline, each.freed),
    )


def place(timeline: Timeline, op: int | None) -> str:
    """`12: aten.mm.default`; an index outside the step is `before the step` or `after the step`."""
    if op is None or op >= len(timeline.ops):
        return AFTER_THE_STEP
    return BEFORE_THE_STEP if op == BEFORE else f"{op}: {timeline.ops[op].name}"


def _not_in(others: Iterable[Allocation], these: Iterable[Allocation]) -> list[Allocation]:
    """The allocations of `these` without a match in `others`; each of `others` matches one allocation."""
    left = Counter((each.category, each.nbytes, each.padding) for each in others)
    found = []
    for each in these:
        like = (each.category, each.nbytes, each.padding)
        if left[like]:
            left[like] -= 1
        else:
            found.append(each)
    return found


def _texts(by_category: Mapping[Category, Any]) -> dict[str, Any]:
    return {category.value: value for category, value in by_category.items()}


def _json_of(difference: Difference, k: int) -> dict[str, Any]:
    def plain(found: Iterable[AllocationGroup]) -> list[dict[str, Any]]:
        return [{**group._asdict(), "category": group.category.value} for group in found]

    return {
        "eager": difference.eager,
        "program": difference.program,
        "categories": {c.category.value: [c.eager, c.program] for c in difference.categories},
        "only_eager": plain(difference.only_eager[:k]),
        "only_program": plain(difference.only_program[:k]),
    }


# -- bytes per op ----------------------------------------------------------------------------------


class Quantities(NamedTuple):
    """One op of a forward; all numbers are bytes, see the top of the file."""

    name: str
    op: str
    module: str
    forward_in: int
    forward_tmp: int
    forward_out: int
    saved: int
    backward_tmp: int
    backward_out: int


def quantities(program: Program) -> list[Quantities]:
    """A row for each op of the forwards (of all ops, if the graph has no phases), in their order.

    Ops that make no storage and have no backward are left out: most views.

        >>> program = fz.functions.trace(lambda x: x.sin().sum(), torch.ones(256))
        >>> [(row.op, row.forward_in, row.forward_out) for row in fz.planner.quantities(program)]
        [('aten.sin.default', 1024, 1024), ('aten.sum.default', 1024, 4)]
    """
    program.describe()
    live = Liveness(program.graph)
    readers = _Readers(live)
    backwards = _backwards(live.nodes)
    numbered = [n for n in live.nodes if phase_of(n) == FORWARD and made_by(n) is not None]
    makers = [n for n in numbered if any(live.nodes[s.first] is n for s in live.of[n])]
    # Later entries overwrite: the first op that makes a storage, else the first op.
    owner = {made_by(n): n for n in (*reversed(numbered), *reversed(makers))}
    known = any(phase_of(n) for n in live.nodes)
    rows = []
    for node in live.nodes:
        if node.op != "call_function" or is_part(node) or (known and phase_of(node) != FORWARD):
            continue
        made = [s for s in live.of[node] if live.nodes[s.first] is node]
        number = made_by(node)
        backward = backwards.get(number, []) if owner.get(number) is node else []
        if not made and not backward:
            continue
        tmp, out = readers.split(made, {node})
        inside, gradients = readers.split(_made_by(backward, live), set(backward))
        saved = sum(s.nbytes for s in made if readers.in_backward(s))
        name, module = str(node.target), str(node.meta.get("module") or "")
        reads = _read_by(node)
        rows.append(Quantities(node.name, name, module, reads, tmp, out, saved, inside, gradients))
    return rows


class _Readers:
    """The nodes that read each storage; taking an item of a list is no read."""

    def __init__(self, live: Liveness) -> None:
        self._readers: dict[Storage, set[fx.Node]] = {s: set() for s in live.storages}
        for node in live.nodes:
            if is_part(node):
                continue
            for storage in {s for n in node.all_input_nodes for s in live.of[n]}:
                if live.nodes[storage.first] is not node:
                    self._readers[storage].add(node)

    def split(self, made: list[Storage], ops: set[fx.Node]) -> tuple[int, int]:
        """(bytes of the storages that no node outside of `ops` reads, bytes of the others)."""
        total = sum(s.nbytes for s in made)
        out = sum(s.nbytes for s in made if self._readers[s] - ops)
        return total - out, out

    def in_backward(self, storage: Storage) -> bool:
        """Whether a backward reads it."""
        return any(phase_of(n) in (BACKWARD, RECOMPUTE) for n in self._readers[storage])


def _backwards(nodes: list[fx.Node]) -> dict[int | None, list[fx.Node]]:
    """The number of an autograd node -> the ops of its backward."""
    found: dict[int | None, list[fx.Node]] = {}
    for node in nodes:
        number = forward_number(node)
        if phase_of(node) in (BACKWARD, RECOMPUTE) and number is not None:
            found.setdefault(number, []).append(node)
    return found


def _made_by(nodes: list[fx.Node], live: Liveness) -> list[Storage]:
    made = {s: None for node in nodes for s in live.of[node] if live.nodes[s.first] is node}
    return list(made)


def _read_by(node: fx.Node) -> int:
    """The bytes of the storages that a node reads, each once."""
    sizes = {storage_key(v): v.untyped_storage().nbytes() for v in _inputs(node)}
    return sum(sizes.values())


def _inputs(node: fx.Node) -> Iterator[Tensor]:
    for each in node.all_input_nodes:
        yield from tensors_of(each.meta.get("val"))
