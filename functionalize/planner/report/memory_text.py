"""A `Memory` as text, for a terminal.

    memory of a step               eager     program
      requested                26.1 GiB    24.0 GiB
      ...
    peak of program: 24.0 GiB in backward, while aten.mm.default runs in layers.31: saved activations 9.1 GiB (38%), ...

Bytes have three digits and a binary unit. Invariant: this file computes no figures, it formats those of `Memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from functionalize.planner.report.display import AllocationGroup
from functionalize.planner.report.memory_figures import EAGER, PROGRAM, MemoryFigures, StorageRow
from functionalize.util.text import human_bytes

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


def _levels(memory: MemoryFigures) -> str:
    levels = [memory.levels(name) for name in memory.timelines]
    rows: list[Sequence[str]] = [("memory of a step", *memory.timelines)]
    for name in ("requested", "allocated", "reserved"):
        title = f"  {name}{' (simulated)' if name == 'reserved' else ''}"
        rows.append((title, *(human_bytes(getattr(each, name)) for each in levels)))
    for constant in memory.constants:
        rows.append(
            (f"  {constant.name} (declared)", *[human_bytes(constant.nbytes)] * len(levels))
        )
    if memory.constants:
        rows.append(("  device", *(human_bytes(each.device) for each in levels)))
    if memory.host_peak:
        host = [human_bytes(memory.host_peak) if n == EAGER else "" for n in memory.timelines]
        rows.append(("  host memory (requested)", *host))
    return _table(rows)


def _categories(memory: MemoryFigures) -> str:
    if len(memory.timelines) < 2:
        (name,) = memory.timelines
        found = memory.by_category(name)
        return _table(
            [("at the peak", name), *((f"  {c.value}", human_bytes(n)) for c, n in found.items())]
        )
    rows: list[Sequence[str]] = [("at the peak", *memory.timelines, "program - eager")]
    difference = memory.difference()
    for change in difference.categories:
        both = human_bytes(change.eager), human_bytes(change.program)
        rows.append((f"  {change.category.value}", *both, signed(change.nbytes)))
    total = signed(difference.program - difference.eager)
    rows.append(("  all", human_bytes(difference.eager), human_bytes(difference.program), total))
    return _table(rows)


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
    rows: list[Sequence[str]] = [(title, "")]
    rows += [(f"  {name}", human_bytes(nbytes)) for name, nbytes in list(found.items())[:k]]
    left = list(found.values())[k:]
    if left:
        rows.append((f"  {len(left)} more", human_bytes(sum(left))))
    return _table(rows)


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


def _table(rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    rows = list(rows)
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            [
                row[0].ljust(wide[0]),
                *(cell.rjust(w) for cell, w in zip(row[1:], wide[1:], strict=True)),
            ]
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
