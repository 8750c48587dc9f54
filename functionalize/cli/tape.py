"""`show --tape`: the autograd nodes of a step's backwards, in the order in which they run.

12 MulBackward0 -> 13          train.py:8, in step: loss = (model(x) * scale).sum()
        mul_3
"""

from __future__ import annotations

from dataclasses import asdict

from functionalize.cli.console import Out, plain
from functionalize.cli.graphs import Filter, check_pipeline
from functionalize.cli.memory import check_picture
from functionalize.cli.recorded import Job, recorded
from functionalize.cli.scripts import check_files
from functionalize.errors import UsageError
from functionalize.planning.pictures.tape_picture import tape_picture


def show_tape(out: Out, job: Job, keep: Filter, png: str | None, pipeline: str | None) -> None:
    """Print a step's tape, and draw it to the file `png` (None: not)."""
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
