"""`capture`, `show` and `opt`: statistics of a recording, the graph as text, the effect of passes.

# backward, args_0.blocks.1.up                         phase and module, printed where they change
    mm_3 = aten.mm.default(t_5, view_12)
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor, fx

from functionalize.errors import UsageError
from functionalize.ir.ops import geometry_of
from functionalize.ir.phases import phase_of
from functionalize.planner.cli.console import Out, plain, table
from functionalize.planner.cli.recorded import Job, recorded
from functionalize.planner.cli.recorded_step import Recorded, write_graph
from functionalize.planner.cli.scripts import as_usage, check_files, check_picture
from functionalize.planner.pictures.tape_picture import tape_picture
from functionalize.planner.report.text import signed
from functionalize.planner.sweep import points
from functionalize.program.printer import node_text, program_text, where_text
from functionalize.program.program import Program
from functionalize.util.text import human_bytes, human_seconds
from functionalize.util.user_stack import user_line

_COLOURS = (("@@", "cyan"), ("+++", "bold"), ("---", "bold"), ("+", "green"), ("-", "red"))


# -- capture ---------------------------------------------------------------------------------------


def capture(out: Out, job: Job, file: str | None) -> None:
    """Record a step, print statistics, and write it to `file` (None: not)."""
    if job.is_file:
        raise UsageError(f"{job.source} is recorded already: capture takes a script")
    if file is not None and not file.endswith(".fzp"):
        raise UsageError(f"-o {file}: the file of a recorded graph ends in .fzp")
    check_files(file)
    with out.working() as say, recorded(job, say) as found:
        if file is not None:
            say(f"writing {file}")
            write_graph(file, found)
    data = {"script": found.name, "world": found.world, "target": found.target, **found.stats}
    out.emit(
        lambda: {**data, "notes": list(found.notes), "file": file},
        lambda console: _show_stats(console, found, file),
    )


def _show_stats(console: Console, found: Recorded, file: str | None) -> None:
    stats = found.stats
    plain(console, headline(found))
    kinds = [f"{count:,} {kind}" for kind, count in sorted(stats["collectives"].items())]
    rows = (
        ("ops", f"{stats['ops']:,} recorded, {stats['resizes']:,} of them resizes of storages"),
        ("nodes", f"{stats['nodes']:,} in the graph, none of which resizes or mutates"),
        ("collectives", ", ".join(kinds) or "none"),
        ("inputs", f"{stats['inputs']:,}, held by {stats['guards']:,} guards"),
        ("recorded", f"in {human_seconds(stats['seconds'])}, {stats['calls']} calls of the step"),
        *((("file", f"{file}: for show, opt and memory"),) if file is not None else ()),
    )
    for name, text in rows:
        plain(console, f"  {name:<12}{text}")
    show_notes(console, found)


def headline(found: Recorded) -> str:
    """The name of a recorded step, its world and target."""
    return f"{found.name}: {found.world}, target {found.target}"


def show_notes(console: Console, found: Recorded) -> None:
    """Print the assumptions of a recording."""
    for note in found.notes:
        plain(console, note)


# -- show ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filter:
    """Selects ops of a graph by module, phase, forward and text; all criteria that are not None must match.

    backward_of: the name of a forward op. backward: the names of the ops of its backward, see `resolved`.
    """

    module: str | None = None
    phase: str | None = None
    grep: str | None = None
    backward_of: str | None = None
    backward: frozenset[str] = frozenset()

    def resolved(self, program: Program) -> Filter:
        """The filter for one program. Raises `UsageError` for a forward op that the program does not have."""
        if self.backward_of is None:
            return self
        try:
            ops = program.backward_of(self.backward_of)
        except LookupError as error:
            raise UsageError(f"--backward-of {self.backward_of}: {error}") from None
        return replace(self, backward=frozenset(n.name for n in ops))

    @property
    def filters(self) -> bool:
        """Whether any criterion is set."""
        return any((self.module, self.phase, self.grep, self.backward_of))

    def __call__(self, node: fx.Node) -> bool:
        """Whether a node matches."""
        return (
            (self.phase is None or phase_of(node) == self.phase)
            and (self.module is None or in_module(node.meta.get("module", ""), self.module))
            and (self.backward_of is None or node.name in self.backward)
            and (self.grep is None or self.grep.lower() in node_text(node).lower())
        )


def in_module(name: str, glob: str) -> bool:
    """Whether a glob matches a module or one that contains it: `blocks.1` matches `model.blocks.1.up`."""
    return any(
        fnmatchcase(name, pattern) for pattern in (glob, f"{glob}.*", f"*.{glob}", f"*.{glob}.*")
    )


def show(out: Out, job: Job, keep: Filter, pipeline: str | None) -> None:
    """Print a step's graph, or the ops of it that a filter selects."""
    check_pipeline(pipeline)
    with out.working() as say, recorded(job, say) as raw:
        found = raw.after(pipeline, say)
        program = found.program
        program.describe()
        keep = keep.resolved(program)
        kept = [node for node in _ops(program) if keep(node)]
        if not kept:
            raise UsageError(_no_match(program, keep))
    out.emit(
        lambda: {"nodes": [_node(node) for node in kept], "of": program.nodes()},
        lambda console: _show_graph(console, program, keep, len(kept)),
    )


def _no_match(program: Program, keep: Filter) -> str:
    """The message if no op matches, with the phases and modules of the graph."""
    phases = dict.fromkeys(filter(None, map(phase_of, program.graph.nodes)))
    modules = sorted({n.meta["module"] for n in program.graph.nodes if n.meta.get("module")})
    some = ", ".join(modules[:8]) + (f", and {len(modules) - 8} more" if len(modules) > 8 else "")
    criteria = {"module": keep.module, "phase": keep.phase, "grep": keep.grep}
    criteria["backward-of"] = keep.backward_of
    options = ", ".join(f"--{key} {value}" for key, value in criteria.items() if value)
    return f"no op fits {options}; there are the phases {', '.join(phases)} and the modules {some or 'none'}"


def _ops(program: Program) -> Iterator[fx.Node]:
    return (n for n in program.graph.nodes if n.op not in ("placeholder", "output"))


def _node(node: fx.Node) -> dict[str, Any]:
    value = node.meta.get("val")
    return {
        "name": node.name,
        "op": str(node.target),
        "text": node_text(node),
        "phase": phase_of(node) or "",
        "module": node.meta.get("module", ""),
        "value": str(geometry_of(value)) if isinstance(value, Tensor) else "",
        "line": user_line(node.meta.get("stack_trace", "")),
        "forward": user_line(node.meta.get("forward_stack_trace", "")),
    }


def graph_text(program: Program, keep: Filter | None = None) -> str:
    """The program as text, with a comment line where phase or module change.

    With a filter: only the ops that match and the inputs that they use.
    """
    kept = [node for node in _ops(program) if keep is None or keep(node)]
    lines = program_text(program, keep).splitlines()
    first = len(program.inputs) + 2  # "program(", the inputs, "):"
    if keep is not None and keep.filters:
        used = {n.name for node in kept for n in node.all_input_nodes if n.op == "placeholder"}
        specs = zip(_placeholders(program), lines[1 : first - 1], strict=True)
        before, after = [line for name, line in specs if name in used], []
    else:
        before, after = lines[:first], lines[first + len(kept) :]
    text, last = before, None
    for node, line in zip(kept, lines[first:], strict=False):
        where = where_text(node)
        if where != last and where:
            text.append(f"    # {where}")
        text.append(line)
        last = where
    return "\n".join([*text, *after]) + "\n"


def _placeholders(program: Program) -> list[str]:
    return [node.name for node in program.graph.nodes if node.op == "placeholder"]


def _show_graph(console: Console, program: Program, keep: Filter, count: int) -> None:
    text = Text(graph_text(program, keep).rstrip())
    text.highlight_regex(r"(?m)^    # .*$", "cyan")
    console.print(text, soft_wrap=True)
    if keep.filters:
        plain(console, f"({count:,} of {program.nodes():,} ops)")


def show_tape(out: Out, job: Job, keep: Filter, png: str | None, pipeline: str | None) -> None:
    """Print the autograd nodes of a step's backwards in their order, and draw them to `png` (None: not)."""
    if keep.filters:
        raise UsageError(
            "--tape shows all nodes: leave out --module, --phase, --grep and --backward-of"
        )
    check_pipeline(pipeline)
    check_picture(png)
    check_files(png)
    with out.working() as say, recorded(job, say) as raw:
        found = raw.after(pipeline, say)
        tape = found.program.tape()
        if png is not None:
            say(f"drawing {png}")
            tape_picture(tape, png, title=found.name)
    names = {number: [op.name for op in ops] for number, ops in tape.ops.items()}
    out.emit(
        lambda: {"backwards": [asdict(each) for each in tape.backwards], "ops": names},
        lambda console: plain(console, str(tape)),
    )


# -- opt -------------------------------------------------------------------------------------------


def check_pipeline(pipeline: str | None) -> None:
    """Raises `UsageError` for a pipeline that cannot be parsed, before the (slow) recording."""
    with as_usage():
        points.check_pipeline(pipeline)


def opt(out: Out, job: Job, pipeline: str, diff: bool) -> None:
    """Run the passes of a pipeline one by one; print the rewrites of each, and the change of nodes and peak."""
    check_pipeline(pipeline)
    with out.working() as say, recorded(job, say) as found:
        say("measuring")
        before, peak = found, found.timeline().peak
        rows = []
        for after_pass, row in _passes(found, pipeline, say):
            found = after_pass
            rows.append(row)
        say("measuring")
        after = found.timeline().peak
        changes = _diff(before.program, found.program) if diff else []
    data: dict[str, Any] = {
        "nodes": [before.program.nodes(), found.program.nodes()],
        "peak": [peak, after],
        "passes": rows,
        "stage": found.program.stage,
    }

    def show(console: Console) -> None:
        plain(console, headline(found))
        lines = [("as recorded", "", f"{data['nodes'][0]:,}", "")]
        for row in rows:
            counts = f"{row['rewrites']:,}", f"{row['nodes']:,}"
            lines.append((row["pass"], *counts, human_seconds(row["seconds"])))
        table(console, ("pass", "rewrites", "nodes", "in"), lines)
        change = f"{human_bytes(peak)} -> {human_bytes(after)} ({signed(after - peak)})"
        plain(console, f"peak of the program, requested bytes: {change}")
        if diff:
            _show_diff(console, changes)

    out.emit(lambda: {**data, **({"diff": changes} if diff else {})}, show)


def _passes(
    found: Recorded, pipeline: str, say: Callable[[str], None]
) -> Iterator[tuple[Recorded, Mapping[str, Any]]]:
    """Yield, after each pass, the recorded step and the row of the report."""
    from functionalize import passes

    for each in passes.parse(pipeline):
        say(f"running {each}")
        start = time.perf_counter()
        program = passes.run(found.program, (each,))
        found = replace(found, made=program)
        name, _, rewrites = program.history[-1].rpartition(": ")
        took = time.perf_counter() - start
        yield (
            found,
            {"pass": name, "rewrites": int(rewrites), "nodes": program.nodes(), "seconds": took},
        )


def _diff(before: Program, after: Program) -> list[str]:
    old, new = (graph_text(program).splitlines() for program in (before, after))
    return list(difflib.unified_diff(old, new, "as recorded", "after the passes", lineterm="", n=2))


def _show_diff(console: Console, changes: list[str]) -> None:
    text = Text("\n".join(changes) if changes else "no difference")
    for start, style in reversed(_COLOURS):
        text.highlight_regex(rf"(?m)^{re.escape(start)}.*$", style)
    console.print(text, soft_wrap=True)
