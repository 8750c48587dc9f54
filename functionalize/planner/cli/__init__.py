"""The command line: `functionalize` and `python -m functionalize`; see `docs/cli.md`.

    functionalize capture | show | opt | memory | plan | compare | report | calibrate | tune

    scripts.py    a user's script; values as text         app.py            the commands and their options
    recorded.py   records its step in a fake world        recorded_step.py  the recorded step, and its file
    console.py    output, progress, errors                graphs.py         capture, show, opt
    memory.py, plan.py, compare.py, report.py, calibrate.py, tune.py: the commands of these names

Exit codes: 0; 1 if the step or the plan failed, or nothing fits in `--limit`; 2 for wrong usage; 130 for Ctrl-C.
Without typer and rich, or without torch: 2, and what to install. Ctrl-C: `functionalize/ctrl_c.py`.
"""

from __future__ import annotations

import sys

from functionalize.ctrl_c import INTERRUPTED

_NEEDS = ("typer", "rich")


def main() -> int:
    """Run the command line on `sys.argv`; return the exit code, unless typer raises `SystemExit` before."""
    try:
        from functionalize.planner.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in _NEEDS:
            raise
        print(
            f"The command line of functionalize needs {' and '.join(_NEEDS)}, and there is no {error.name} here: "
            'pip install "functionalize[cli]". The library itself works without.',
            file=sys.stderr,
        )
        return 2
    from functionalize.planner.cli.console import wrong_usage

    try:
        with wrong_usage():
            return int(app(prog_name="functionalize", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
