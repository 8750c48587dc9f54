"""The commands and their options; what they do is in the other files of this folder."""

from __future__ import annotations

from typing import Annotated

import typer

from functionalize.cli import demo as demo_command
from functionalize.cli import graphs
from functionalize.cli import memory as memory_command
from functionalize.cli import plan as plan_command
from functionalize.cli.console import run
from functionalize.cli.recorded import DEFAULT_WORLD, Job
from functionalize.cli.scripts import Names, assignments, axis, mesh, nbytes
from functionalize.errors import UsageError

app = typer.Typer(
    name="functionalize",
    help="Record a training step as one graph, in a world of any size on this machine: look at it, plan it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_SCRIPT = "Of the script"
_WORLD = "Of the world"
_PRINTED = "What is printed"

Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT", help="path/to/file.py or package.module, with `build` and `step`."
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT|FILE",
        help="path/to/file.py or package.module; or a file.fzp that `capture -o` wrote.",
    ),
]
Pipeline = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE",
        help="Passes by name, with options: default, or fold_views,remat{select=all}.",
    ),
]
Build = Annotated[
    str, typer.Option(metavar="NAME", help="Returns model, optimizer, ...", rich_help_panel=_SCRIPT)
]
Step = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Takes what build and inputs return.", rich_help_panel=_SCRIPT
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Returns the batch; `inputs`, if there is one.",
        rich_help_panel=_SCRIPT,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A parameter of these functions; repeatable. reshard=False and checkpoint=True work with any model.",
        rich_help_panel=_SCRIPT,
    ),
]
World = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help=f"Ranks; {DEFAULT_WORLD} without a mesh.", rich_help_panel=_WORLD
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(metavar="SIZES", help="dp=64,tp=8 or 64x8.", rich_help_panel=_WORLD),
]
Rank = Annotated[
    int, typer.Option(min=0, metavar="N", help="The rank to look at.", rich_help_panel=_WORLD)
]
Target = Annotated[
    str,
    typer.Option(metavar="NAME", help="Whose kernels: cuda or cpu.", rich_help_panel=_WORLD),
]
Passes = Annotated[
    str | None,
    typer.Option(metavar="PIPELINE", help="Passes to run on the graph first."),
]
Machine = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of the modelled time and the constants: h100, a100, ..."),
]
Limit = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of the device: 80GB, 79GiB.")
]
Json = Annotated[
    bool,
    typer.Option("--json", help="JSON on stdout, nothing else there.", rich_help_panel=_PRINTED),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Tracebacks, warnings and logs.", rich_help_panel=_PRINTED),
]


def _file(kind: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(metavar=kind, help=help)


def _size(text: str | None) -> int | None:
    return nbytes(text) if text is not None else None


def _job(
    source: str,
    build: str,
    step: str,
    inputs: str | None,
    given: list[str] | None,
    world: int | None,
    shape: str | None,
    rank: int,
    target: str,
) -> Job:
    made = mesh(shape) if shape is not None else None
    return Job(
        source, Names(build, step, inputs), assignments(given or ()), world, made, rank, target
    )


@app.command()
def capture(
    script: Script,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE.fzp", help="Write the graph.")
    ] = None,
    build: Build = "build",
    step: Step = "step",
    inputs: Inputs = None,
    given: Set = None,
    world: World = None,
    mesh: Mesh = None,
    rank: Rank = 0,
    target: Target = "cuda",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Record the step of a script in a fake world, and say what was recorded.

    The file has the graph, shapes, modules and lines, for show, opt and memory. It cannot be replayed on a model:
    CapturedStep.save writes what can be.

    Example: [bold]functionalize capture train.py --world 64 --set layers=4 -o step.fzp[/]
    """
    run(
        lambda out: graphs.capture(
            out, _job(script, build, step, inputs, given, world, mesh, rank, target), output
        ),
        as_json,
        debug,
    )


@app.command()
def show(
    source: Source,
    module: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Ops of these modules: blocks.0, *.attention."),
    ] = None,
    phase: Annotated[
        str | None, typer.Option(metavar="NAME", help="forward, backward, recompute, optimizer.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ops whose line has this text.")
    ] = None,
    passes: Passes = None,
    build: Build = "build",
    step: Step = "step",
    inputs: Inputs = None,
    given: Set = None,
    world: World = None,
    mesh: Mesh = None,
    rank: Rank = 0,
    target: Target = "cuda",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the graph of a step, all of it or the part of a module, a phase, a text.

    Example: [bold]functionalize show step.fzp --module blocks.0 --phase backward[/]
    """
    run(
        lambda out: graphs.show(
            out,
            _job(source, build, step, inputs, given, world, mesh, rank, target),
            graphs.Filter(module, phase, grep),
            passes,
        ),
        as_json,
        debug,
    )


@app.command()
def opt(
    source: Source,
    pipeline: Pipeline,
    diff: Annotated[bool, typer.Option("--diff", help="What changed, as a unified diff.")] = False,
    build: Build = "build",
    step: Step = "step",
    inputs: Inputs = None,
    given: Set = None,
    world: World = None,
    mesh: Mesh = None,
    rank: Rank = 0,
    target: Target = "cuda",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run passes on the graph of a step: what each did, nodes and peak before and after.

    Example: [bold]functionalize opt step.fzp default --diff[/]
    """
    run(
        lambda out: graphs.opt(
            out, _job(source, build, step, inputs, given, world, mesh, rank, target), pipeline, diff
        ),
        as_json,
        debug,
    )


@app.command()
def memory(
    source: Source,
    top: Annotated[int, typer.Option(min=0, metavar="K", help="Rows of each table.")] = 10,
    of: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose peak is broken down: eager or program."),
    ] = None,
    passes: Passes = None,
    limit: Limit = None,
    alloc_conf: Annotated[
        str, typer.Option(metavar="TEXT", help="As PYTORCH_ALLOC_CONF: expandable_segments:True.")
    ] = "",
    machine: Machine = None,
    png: Annotated[str | None, _file("FILE.png", "A picture (or .svg, .pdf).")] = None,
    html: Annotated[str | None, _file("FILE.html", "A page that works offline.")] = None,
    snapshot: Annotated[str | None, _file("FILE.pickle", "For PyTorch's memory viewer.")] = None,
    trace: Annotated[str | None, _file("FILE.json", "For Perfetto: schedule and memory.")] = None,
    build: Build = "build",
    step: Step = "step",
    inputs: Inputs = None,
    given: Set = None,
    world: World = None,
    mesh: Mesh = None,
    rank: Rank = 0,
    target: Target = "cuda",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a step holds at its peak: by category, module, op and line; whether it fits.

    Ends with 1 if it does not fit in --limit.

    Example: [bold]functionalize memory train.py --world 64 --limit 80GB --png memory.png[/]
    """
    run(
        lambda out: memory_command.memory(
            out,
            _job(source, build, step, inputs, given, world, mesh, rank, target),
            memory_command.Wanted(
                top, of, passes, machine, alloc_conf, _size(limit), png, html, snapshot, trace
            ),
        ),
        as_json,
        debug,
    )


@app.command()
def plan(
    script: Script,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=1,2,4", help="The values of one key; repeatable, all combinations."
        ),
    ] = None,
    largest: Annotated[
        str | None, typer.Option(metavar="KEY", help="Search the largest that fits in --limit.")
    ] = None,
    limit: Limit = None,
    passes: Passes = None,
    machine: Machine = None,
    csv: Annotated[str | None, _file("FILE.csv", "The table, numbers as they are.")] = None,
    html: Annotated[str | None, _file("FILE.html", "A page that works offline.")] = None,
    png: Annotated[str | None, _file("FILE.png", "Memory against time (or .svg, .pdf).")] = None,
    trace: Annotated[str | None, _file("FILE.json", "For Perfetto: schedule and memory.")] = None,
    build: Build = "build",
    step: Step = "step",
    inputs: Inputs = None,
    given: Set = None,
    world: World = None,
    mesh: Mesh = None,
    rank: Rank = 0,
    target: Target = "cuda",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Plan a step at every point of a grid: memory, traffic, modelled time.

    Keys: world, mesh, rank, target, reshard, checkpoint, passes, machine; any other goes to build, inputs or step.

    Example: [bold]functionalize plan train.py --grid world=64,1024 --grid batch=1,2,4 --largest batch --limit 80GB[/]
    """
    run(
        lambda out: plan_command.plan(
            out,
            _job(script, build, step, inputs, given, world, mesh, rank, target),
            plan_command.Asked(
                _axes(grid), passes, machine, largest, _size(limit), csv, html, png, trace
            ),
        ),
        as_json,
        debug,
    )


def _axes(grid: list[str] | None) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for text in grid or ():
        key, values = axis(text)
        if key in found:
            raise UsageError(f"--grid {key} is given twice")
        found[key] = values
    return found


@app.command()
def demo(as_json: Json = False, debug: Debug = False) -> None:
    """A small transformer under FSDP2 on 64 ranks that do not exist: recorded, looked at, planned.

    Example: [bold]functionalize demo[/]
    """
    run(demo_command.demo, as_json, debug)
