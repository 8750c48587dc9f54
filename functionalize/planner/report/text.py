"""A `Memory` as text, for a terminal.

    memory of a step               eager     program
      requested                26.1 GiB    24.0 GiB
      ...
    peak of program: 24.0 GiB in backward, while aten.mm.default runs in layers.31: saved activations 9.1 GiB (38%), ...

Bytes have three digits and a binary unit. Invariant: `memory_text` computes no figures, it formats those of `Memory`.

A recorded step compared with its plan: what was foretold, what was allocated, and the ops where they part.

    with fz.world(64): ...                                     planned = step.memory
    recorded = fz.record_memory(train_step); recorded(batch)   on real tensors, one call
    print(planned.against(recorded.memory).text())

        planned     mm [64 KiB]  relu [64 KiB]                    mm [16 KiB]
        recorded    mm [64 KiB]  relu [64 KiB]  clone [64 KiB]    mm [16 KiB]
                                                └ parted: 64 KiB more than planned

Ops are compared by their names and the sizes of the storages that they allocate, and that are freed until the next
op that allocates, in the order in which they ran. Op scratch is left out: a recording of eager does not see it.
Invariant: the ops that are alike and those of the partings are all ops that allocate. Close to linear where few differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from typing import NamedTuple

from functionalize.cost.categories import Category
from functionalize.planner.report.figures import AllocationGroup, MemoryFigures, StorageRow
from functionalize.planner.timeline.timeline import BEFORE, EAGER, PROGRAM, Op, Timeline
from functionalize.util.text import aligned, human_bytes

_WIDE = 60  # characters of a name; a longer one loses its beginning, as its end is more specific


def memory_text(memory: MemoryFigures, k: int) -> str:
    """The whole report; k: rows of each table."""
    memory.timeline()  # raises if there is none
    parts = [_levels(memory), _categories(memory), memory.uncounted or ""]
    for name in memory.timelines:
        parts.append(f"peak of {name}: {memory.peak_of(name).words()}")
        parts.append(_top(name, memory.top(k, name)))
        parts += [
            _breakdown(f"{name}, by {what}", found, k)
            for what, found in (
                ("module", memory.by_module(name)),
                ("op", memory.by_op(name)),
                ("line", {short_line(n): b for n, b in memory.by_line(name).items()}),
                ("phase", memory.by_phase(name)),
            )
        ]
    if len(memory.timelines) == 2:
        difference = memory.difference()
        parts.append(_only(EAGER, PROGRAM, difference.only_eager, k))
        parts.append(_only(PROGRAM, EAGER, difference.only_program, k))
    return "\n\n".join(part for part in parts if part) + "\n"


def level_rows(memory: MemoryFigures) -> list[tuple[str, list[str], str]]:
    """A row per level of the peak: its name, its bytes in each timeline, how they are known."""
    levels = [memory.levels(name) for name in memory.timelines]
    rows = [
        (name, [human_bytes(getattr(each, name)) for each in levels], how)
        for name, how in (("requested", ""), ("allocated", "rounded"), ("reserved", "simulated"))
    ]
    for constant in memory.constants:
        rows.append((constant.name, [human_bytes(constant.nbytes)] * len(levels), "declared"))
    if memory.constants:
        device = [human_bytes(each.device) for each in levels]
        rows.append(("device", device, "reserved and declared"))
    if memory.host_peak:
        host = [human_bytes(memory.host_peak) if n == EAGER else "" for n in memory.timelines]
        rows.append(("host", host, "requested"))
    return rows


def category_rows(memory: MemoryFigures) -> list[tuple[str, ...]]:
    """A row per category at the peak: its name, its bytes in each timeline, of two timelines their difference."""
    if len(memory.timelines) < 2:
        (name,) = memory.timelines
        return [(c.value, human_bytes(n)) for c, n in memory.by_category(name).items()]
    return [
        (c.category.value, human_bytes(c.eager), human_bytes(c.program), signed(c.nbytes))
        for c in memory.difference().categories
    ]


def largest_rows(found: Mapping[str, int], k: int) -> list[tuple[str, str]]:
    """The first k of a breakdown as (name, bytes), and a row for the sum of the others."""
    rows = [(name, human_bytes(nbytes)) for name, nbytes in [*found.items()][:k]]
    left = [*found.values()][k:]
    return rows + ([(f"{len(left)} more", human_bytes(sum(left)))] if left else [])


def _levels(memory: MemoryFigures) -> str:
    rows: list[Sequence[str]] = [("memory of a step", *memory.timelines)]
    for name, cells, how in level_rows(memory):
        title = {"host": "host memory"}.get(name, name)
        known = f" ({how})" if how in ("simulated", "declared", "requested") else ""
        rows.append((f"  {title}{known}", *cells))
    return _table(rows)


def _categories(memory: MemoryFigures) -> str:
    rows = category_rows(memory)
    heads = ["at the peak", *memory.timelines]
    if len(memory.timelines) == 2:
        heads.append("program - eager")
        both = memory.difference()
        peaks = human_bytes(both.eager), human_bytes(both.program)
        rows.append(("all", *peaks, signed(both.program - both.eager)))
    return _table([heads, *((f"  {name}", *cells) for name, *cells in rows)])


def _top(name: str, rows: Sequence[StorageRow]) -> str:
    lines = [f"{name}, largest at the peak"]
    for row in rows:
        lines.append(
            f"  {human_bytes(row.nbytes):>9}  {row.category.value}: {_short(row.name)} {row.shape}"
        )
        where = ", ".join(part for part in (row.module, short_line(row.line)) if part)
        used = (
            "last used and freed"
            if row.last_use == row.freed
            else f"last used {row.last_use}; freed"
        )
        made = f"{row.made} ({where})" if where else row.made
        lines += [f"             made {made}", f"             {used} {row.freed}"]
    return "\n".join(lines) if rows else ""


def _breakdown(title: str, found: Mapping[str, int], k: int) -> str:
    rows = ((f"  {name}", nbytes) for name, nbytes in largest_rows(found, k))
    return _table([(title, ""), *rows])


def _only(here: str, there: str, found: Sequence[AllocationGroup], k: int) -> str:
    if not found:
        return ""
    lines = [f"live at the peak of {here}, not at that of {there}"]
    for group in found[:k]:
        many = f"{group.members} x " if group.members > 1 else ""
        lines.append(
            f"  {human_bytes(group.nbytes):>9}  {group.category.value}: {many}{_short(group.name)}"
        )
    left = found[k:]
    if left:
        lines.append(f"  {human_bytes(sum(g.nbytes for g in left)):>9}  in {len(left)} more")
    return "\n".join(lines)


def signed(nbytes: int) -> str:
    """`+1.50 GiB`, `-12 B`, `0 B`."""
    return f"{'+' if nbytes > 0 else ''}{human_bytes(nbytes)}"


def short_line(line: str) -> str:
    """`fsdp/train.py:12, in step: out = a.sin()`: the file with its folder only, a long line of code cut off."""
    path, colon, code = line.partition(":")
    line = "/".join(path.replace("\\", "/").split("/")[-2:]) + colon + code
    return line if len(line) <= 2 * _WIDE else f"{line[: 2 * _WIDE - 3]}..."


def _short(name: str) -> str:
    return name if len(name) <= _WIDE else f"...{name[3 - _WIDE :]}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(aligned(rows, 1))


# -- a recorded step compared with its plan --------------------------------------------------------


_SEARCHED = 2_000  # ops of each run, at most, in which a shift is looked for


class AllocatingOp(NamedTuple):
    """An op that allocates, and what is freed from it on, until the next one.

    sizes: bytes of the storages that it allocates, in order; freed: of those that are freed, in ascending order.
    at: its index in the timeline; `BEFORE` for what is freed before the first one.
    """

    name: str
    sizes: tuple[int, ...]
    freed: tuple[int, ...]
    at: int

    @property
    def nbytes(self) -> int:
        """The change of the live bytes, up to the next op that allocates."""
        return sum(self.sizes) - sum(self.freed)


class Parting(NamedTuple):
    """Consecutive ops that differ. planned, recorded: those of each run between two ops that are alike."""

    planned: Sequence[AllocatingOp]
    recorded: Sequence[AllocatingOp]

    def __repr__(self) -> str:
        ops = f"{len(self.planned)} ops planned, {len(self.recorded)} recorded"
        return f"<Parting: {ops}, {self.nbytes:+,} bytes>"

    @property
    def nbytes(self) -> int:
        """The live bytes that its ops add more than planned."""
        return sum(op.nbytes for op in self.recorded) - sum(op.nbytes for op in self.planned)


@dataclass(frozen=True, eq=False, repr=False)
class Partings:
    """Two runs of a step compared. alike: the number of ops that allocate the same.

    partings: where they differ, in the order of the step.
    """

    planned: Timeline
    recorded: Timeline
    alike: int
    partings: Sequence[Parting]

    def __repr__(self) -> str:
        return f"<Partings: {self.alike} ops alike, {len(self.partings)} partings>"

    def __str__(self) -> str:
        return self.text()

    @staticmethod
    def of(planned: Timeline, recorded: Timeline) -> Partings:
        """Compare two timelines of eager."""
        one, other = list(_allocating(planned)), list(_allocating(recorded))
        start, end = _ends(one, other)
        blocks = _blocks(one[start : len(one) - end], other[start : len(other) - end])
        found = [Parting(a, b) for a, b in blocks]
        return Partings(planned, recorded, len(one) - sum(len(p.planned) for p in found), found)

    @property
    def before(self) -> tuple[int, int]:
        """The bytes that were there before the step: as planned, as recorded."""
        return _before(self.planned), _before(self.recorded)

    def text(self, k: int = 10) -> str:
        """What is alike and where they part. k: the number of partings that are shown, the largest of them."""
        pairs = (("before the step", *self.before), ("peak", self.planned.peak, self.recorded.peak))
        lines = [f"{'':<17}{'planned':>10}{'recorded':>10}{'difference':>12}"]
        for name, one, other in pairs:
            both = f"{human_bytes(one):>10}{human_bytes(other):>10}"
            lines.append(f"{name:<17}{both}{signed(other - one):>12}")
        lines.append(f"{self.alike:,} ops allocate as planned")
        largest = sorted(self.partings, key=lambda each: -_size(each))[:k]
        for each in sorted(largest, key=self.partings.index):
            lines.append(f"parted: {signed(each.nbytes)}")
            lines += [f"  planned   {_described(op, self.planned)}" for op in each.planned[:3]]
            lines += [f"  recorded  {_described(op, self.recorded)}" for op in each.recorded[:3]]
            left = max(len(each.planned) - 3, 0) + max(len(each.recorded) - 3, 0)
            lines += [f"  and {left} ops more"] if left else []
        if len(self.partings) > k:
            lines.append(f"and {len(self.partings) - k} partings more")
        return "\n".join(lines)


def _allocating(timeline: Timeline) -> Iterator[AllocatingOp]:
    """The ops that allocate, in order, without scratch."""
    at, sizes, freed = BEFORE, list[int](), list[int]()
    for event in timeline.events:
        if event.allocation.category in (Category.SCRATCH, Category.RNG_STATE):
            continue
        if event.made and event.op != BEFORE:
            if event.op != at:
                yield from _closed(timeline, at, sizes, freed)
                at, sizes, freed = event.op, [], []
            sizes.append(event.allocation.nbytes)
        elif not event.made:
            freed.append(event.allocation.nbytes)
    yield from _closed(timeline, at, sizes, freed)


def _closed(
    timeline: Timeline, at: int, sizes: list[int], freed: list[int]
) -> Iterator[AllocatingOp]:
    """The op, if it allocates or frees anything."""
    if sizes or freed:
        name = "the start of the step" if at == BEFORE else timeline.ops[at].name
        name = name.removeprefix("aten.").removesuffix(".default")
        yield AllocatingOp(name, tuple(sizes), tuple(sorted(freed)), at)


def _before(timeline: Timeline) -> int:
    return sum(event.nbytes for event in timeline.events if event.op == BEFORE)


def _ends(one: Sequence[AllocatingOp], other: Sequence[AllocatingOp]) -> tuple[int, int]:
    """The number of ops that are alike at the beginning, and at the end after these."""
    most = min(len(one), len(other))
    start = next((i for i in range(most) if one[i][:3] != other[i][:3]), most)
    back = (i for i in range(most - start) if one[-1 - i][:3] != other[-1 - i][:3])
    return start, next(back, most - start)


def _blocks(
    one: Sequence[AllocatingOp], other: Sequence[AllocatingOp]
) -> Iterator[tuple[Sequence[AllocatingOp], Sequence[AllocatingOp]]]:
    """The stretches of ops that differ."""
    if max(len(one), len(other)) > _SEARCHED:  # a search is quadratic: op by op, without shifts
        same = [a[:3] == b[:3] for a, b in zip(one, other, strict=False)]
        least = len(same)
        for alike, places in groupby(range(least), key=same.__getitem__):
            found = list(places)
            if not alike:
                cut = slice(found[0], found[-1] + 1)
                yield one[cut], other[cut]
        if len(one) != len(other):
            yield one[least:], other[least:]
        return
    matcher = SequenceMatcher(None, [a[:3] for a in one], [b[:3] for b in other], autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            yield one[a:b], other[c:d]


def _size(parting: Parting) -> int:
    """All bytes of a parting, by which a report orders them."""
    return sum(sum(op.sizes) + sum(op.freed) for op in (*parting.planned, *parting.recorded))


def _described(op: AllocatingOp, timeline: Timeline) -> str:
    """`12: mm allocates 64.0 KiB, frees 1.00 KiB; forward, layers.0, train.py:31, in step: ...`."""
    sizes = (
        f"{verb} {' + '.join(map(human_bytes, each))}"
        for verb, each in (("allocates", op.sizes), ("frees", op.freed))
        if each
    )
    what = f"{op.name} {', '.join(sizes)}"
    if op.at == BEFORE:
        return what
    found: Op = timeline.ops[op.at]
    where = ", ".join(part for part in (found.phase, found.module, found.line) if part)
    return f"{op.at}: {what}; {where}"


# -- the report ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Memory(MemoryFigures):
    """The figures of a step's memory, and their report as text."""

    def __str__(self) -> str:
        return self.text() if self.timelines else repr(self)

    def text(self, k: int = 10) -> str:
        """The report; k: rows of each table. Raises `MemoryReportError` without a timeline."""
        return memory_text(self, k)

    def against(self, recorded: MemoryFigures) -> Partings:
        """This plan of a step beside the memory that `fz.record_memory` recorded: the ops where they part.

        Raises `MemoryReportError` if one of the reports has no timeline of eager.
        """
        return Partings.of(self.timeline(EAGER), recorded.timeline(EAGER))
