"""The commands and their options; the other files of this folder implement them.

@command(Source)
def opt(out: Out, job: Job, pipeline: Pipeline, ...): ...        `command` adds --build, --world, --json, ...

An option that several commands have is an annotation, from which typer reads it.
What a command needs is imported when it runs: `--help` and `--version` answer at once, also where torch is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from functionalize.errors import UsageError
from functionalize.planner.cli.console import Out, run
from functionalize.planner.cli.scripts import (
    DEFAULT_WORLD,
    FunctionNames,
    assignments,
    axes,
    nbytes,
    on_path,
    training,
)
from functionalize.planner.cli.scripts import mesh as sizes

if TYPE_CHECKING:
    from functionalize.planner.cli.recorded import Job

# -- options of several commands -------------------------------------------------------------------

_SCRIPT = "Of the script"
_WORLD = "Of the world"
_PRINTED = "What is printed"

Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT",
        help="path/to/file.py or package.module, with `build` and `step`; or a config: hf:, trainer:, titan:.",
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT|FILE",
        help="path/to/file.py, package.module or a config (hf:, trainer:, titan:); or a file.fzp of `capture -o`.",
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
ShowScript = Annotated[
    bool,
    typer.Option(
        "--show-script",
        help="Print the script that a config stands for, and end.",
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
    typer.Option(
        metavar="NAME|FILE", help="Of the modelled time and the constants: h100, ..., here.json."
    ),
]
Limit = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of the device: 80GB, 79GiB, h100.")
]
AllocConf = Annotated[
    str, typer.Option(metavar="TEXT", help="As PYTORCH_ALLOC_CONF: expandable_segments:True.")
]
Tokens = Annotated[
    str | None, typer.Option(metavar="N", help="Days of training on so many: 15T, 300B, 1e9.")
]
Price = Annotated[
    float | None, typer.Option(metavar="X", help="Of a GPU for an hour: the cost of --tokens.")
]
Json = Annotated[
    bool,
    typer.Option("--json", help="JSON on stdout, nothing else there.", rich_help_panel=_PRINTED),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Tracebacks, warnings and logs.", rich_help_panel=_PRINTED),
]


def file_option(kind: str, help: str) -> typer.models.OptionInfo:
    """The option of a file to write. kind: how its name ends."""
    return typer.Option(metavar=kind, help=help)


# -- commands --------------------------------------------------------------------------------------

app = typer.Typer(
    name="functionalize",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _size(text: str | None) -> int | None:
    """The bytes of `--limit`: a size, or the memory of a machine."""
    from functionalize.cost.machines.presets import MACHINES

    if text is None or text not in MACHINES:
        return nbytes(text) if text is not None else None
    memory = MACHINES[text].memory
    if memory is None:
        raise UsageError(f"--limit {text}: this machine has no memory of its own; write a size")
    return memory


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            torch = f"torch {version('torch')}"
        except PackageNotFoundError:
            torch = "no torch"
        print(f"functionalize {version('functionalize')}, {torch}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    show_version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print and end."),
    ] = False,
) -> None:
    """Record a training step as one graph, in a world of any size on this machine: look at it, plan it."""


def _job(
    source: str,
    build: Build = "build",
    step: Step = "step",
    inputs: Inputs = None,
    set_: Set = None,
    world: World = None,
    mesh: Mesh = None,
    rank: Rank = 0,
    target: Target = "cuda",
) -> Job:
    """The job described by the options on the script and the world."""
    from functionalize.planner.cli.recorded import Job

    names = FunctionNames(build, step, inputs)
    mesh_sizes = sizes(mesh) if mesh is not None else None
    return Job(source, names, assignments(set_ or ()), world, mesh_sizes, rank, target)


def _printed(show_script: ShowScript = False, as_json: Json = False, debug: Debug = False) -> None:
    """The options on output."""


def command(source: Any) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """A decorator that registers a command of `app` with its own options, those of `_job` and those of `_printed`.

    source: the annotation of the command's first argument. The function is called with the `Out`, the `Job` and its own
    options.
    """

    def registered(function: Callable[..., int | None]) -> Callable[..., None]:
        own = _options(function, but=("out", "job"))
        first, *shared = _options(_job)

        @wraps(function)
        def main(show_script: bool, as_json: bool, debug: bool, **values: Any) -> None:
            of_job = {option.name: values.pop(option.name) for option in (first, *shared)}

            def act(out: Out) -> int | None:
                if show_script:
                    _show_script(out, of_job[first.name])
                    return 0
                return function(out, _job(**of_job), **values)

            run(act, as_json, debug)

        options = [first.replace(annotation=source), *own, *shared, *_options(_printed)]
        main.__signature__ = Signature(options)  # type: ignore[attr-defined]
        main.__annotations__ = {each.name: each.annotation for each in options}
        app.command()(main)
        return main

    return registered


def _show_script(out: Out, source: str) -> None:
    from functionalize.planner.configs.sources import is_config, script_of

    if not is_config(source):
        raise UsageError(
            f"{source} is a script: --show-script prints that of a config, as hf:models/qwen3"
        )
    with on_path(Path.cwd()):
        text = script_of(source)
    out.emit(lambda: {"script": text}, lambda console: print(text, end="", file=out.stdout))


def _options(function: Callable[..., Any], but: tuple[str, ...] = ()) -> list[Parameter]:
    """The parameters of a function, keyword-only as typer needs them. but: without these, which are no options."""
    names = globals()
    return [
        each.replace(kind=Parameter.KEYWORD_ONLY, annotation=eval(each.annotation, names))
        for name, each in signature(function).parameters.items()
        if name not in but
    ]


@command(Script)
def capture(
    out: Out,
    job: Job,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE.fzp", help="Write the graph.")
    ] = None,
) -> None:
    """Record the step of a script in a fake world, and say what was recorded.

    The file has the graph, shapes, modules and lines, for show, opt and memory. It cannot be replayed on a model:
    CapturedStep.save writes what can be.

    Example: [bold]functionalize capture train.py --world 64 --set layers=4 -o step.fzp[/]
    """
    from functionalize.planner.cli import graphs

    graphs.capture(out, job, output)


@command(Source)
def show(
    out: Out,
    job: Job,
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
    backward_of: Annotated[
        str | None, typer.Option(metavar="NODE", help="Ops of the backward of this forward op.")
    ] = None,
    tape: Annotated[
        bool, typer.Option("--tape", help="Autograd's nodes in their order, not the graph.")
    ] = False,
    png: Annotated[
        str | None, file_option("FILE.png", "With --tape: a picture (or .svg, .pdf).")
    ] = None,
    passes: Passes = None,
) -> None:
    """Print the graph of a step, all of it or the part of a module, a phase, a text, the backward of one op.

    Example: [bold]functionalize show step.fzp --module blocks.0 --phase backward[/]
    """
    from functionalize.planner.cli import graphs

    keep = graphs.Filter(module, phase, grep, backward_of)
    if tape:
        graphs.show_tape(out, job, keep, png, passes)
    elif png is not None:
        raise UsageError("--png draws the tape: add --tape")
    else:
        graphs.show(out, job, keep, passes)


@command(Source)
def opt(
    out: Out,
    job: Job,
    pipeline: Pipeline,
    diff: Annotated[bool, typer.Option("--diff", help="What changed, as a unified diff.")] = False,
) -> None:
    """Run passes on the graph of a step: what each did, nodes and peak before and after.

    Example: [bold]functionalize opt step.fzp default --diff[/]
    """
    from functionalize.planner.cli import graphs

    graphs.opt(out, job, pipeline, diff)


@command(Source)
def memory(
    out: Out,
    job: Job,
    top: Annotated[int, typer.Option(min=0, metavar="K", help="Rows of each table.")] = 10,
    of: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose peak is broken down: eager or program."),
    ] = None,
    passes: Passes = None,
    limit: Limit = None,
    alloc_conf: AllocConf = "",
    machine: Machine = None,
    png: Annotated[str | None, file_option("FILE.png", "A picture (or .svg, .pdf).")] = None,
    html: Annotated[str | None, file_option("FILE.html", "A page that works offline.")] = None,
    snapshot: Annotated[
        str | None, file_option("FILE.pickle", "For PyTorch's memory viewer.")
    ] = None,
    trace: Annotated[
        str | None, file_option("FILE.json", "For Perfetto: schedule and memory.")
    ] = None,
    time_axis: Annotated[
        bool, typer.Option("--time-axis", help="The picture over modelled time, not over events.")
    ] = False,
) -> int:
    """What a step holds at its peak: by category, module, op and line; whether it fits.

    Ends with 1 if it does not fit in --limit.

    Example: [bold]functionalize memory train.py --world 64 --limit 80GB --png memory.png[/]
    """
    from functionalize.planner.cli.memory import MemoryOptions
    from functionalize.planner.cli.memory import memory as printed

    given = (top, of, passes, machine, alloc_conf, _size(limit))
    files = (png, html, snapshot, trace)
    return printed(out, job, MemoryOptions(*given, *files, time_axis))


@command(Script)
def plan(
    out: Out,
    job: Job,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=1,2,4", help="The values of one key; repeatable, all combinations."
        ),
    ] = None,
    largest: Annotated[
        str | None, typer.Option(metavar="KEY", help="Search the largest that fits in --limit.")
    ] = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="All ranks of a pipeline, with the time they wait.")
    ] = False,
    limit: Limit = None,
    passes: Passes = None,
    alloc_conf: AllocConf = "",
    machine: Machine = None,
    tokens: Tokens = None,
    price: Price = None,
    csv: Annotated[str | None, file_option("FILE.csv", "The table, numbers as they are.")] = None,
    trace: Annotated[
        str | None, file_option("FILE.json", "For Perfetto: schedule and memory.")
    ] = None,
) -> int:
    """Plan a step at every point of a grid: memory, traffic, modelled time.

    Keys: world, mesh, rank, target, reshard, checkpoint, passes, machine, alloc_conf; any other goes to build,
    inputs or step.

    Example: [bold]functionalize plan train.py --grid world=64,1024 --grid batch=1,2,4 --largest batch --limit 80GB[/]
    """
    from functionalize.planner.cli.plan import PlanOptions
    from functionalize.planner.cli.plan import plan as planned

    size = _size(limit)
    options = PlanOptions(
        axes(grid),
        passes,
        machine,
        alloc_conf or None,
        largest,
        size,
        csv,
        trace,
        training(tokens, price),
        stages,
    )
    return planned(out, job, options)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A.json", help="Of plan --json, memory --json.")],
    second: Annotated[str, typer.Argument(metavar="B.json", help="Another of the same kind.")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks.")] = False,
) -> None:
    """Two plans, or two reports on memory, side by side: each figure, and how it changes.

    Ends with 1 if no point is in both.

    Example: [bold]functionalize compare before.json after.json[/]
    """

    def printed(out: Out) -> int:
        from functionalize.planner.cli.compare import side_by_side

        return side_by_side(out, first, second)

    run(printed, as_json, debug)


@app.command()
def report(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="Of a run with FUNCTIONALIZE_REPORT=DIR.")
    ],
    page: Annotated[
        str | None, typer.Option("--html", metavar="FILE.html", help="One page, offline.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks.")] = False,
) -> None:
    """What the ranks of a run logged: programs, replays, misses, memory, the time to the first replay.

    Example: [bold]functionalize report logs --html run.html[/]
    """

    def printed(out: Out) -> None:
        from functionalize.planner.cli.report import report

        report(out, folder, page)

    run(printed, as_json, debug)


@app.command()
def calibrate(
    file: Annotated[
        str, typer.Argument(metavar="FILE.json", help="Written: for --machine of memory and plan.")
    ],
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu or cuda; CUDA where there is one.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Processes; 2, or one for each GPU.")
    ] = None,
    each: Annotated[
        float, typer.Option(metavar="SECONDS", help="Of one measurement, of some 100.")
    ] = 0.1,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON on stdout, nothing else there.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks, warnings and logs.")] = False,
) -> None:
    """Measure this machine: how fast its kernels, its collectives and its host are, with all ranks busy.

    Takes less than two minutes on a CPU. Nothing else should run meanwhile.

    Example: [bold]functionalize calibrate here.json[/]
    """

    def measured(out: Out) -> None:
        from functionalize.planner.cli.calibrate import calibrate

        calibrate(out, file, device, ranks, each)

    run(measured, as_json, debug)


@command(Script)
def tune(
    out: Out,
    job: Job,
    limit: Limit = None,
    batch_tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Of a step on all ranks: 1M, 524_288.")
    ] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="Of a rank and microbatch.")
    ] = None,
    tp: Annotated[
        str | None, typer.Option(metavar="2,4,8", help="Sizes of tensor parallelism to try, too.")
    ] = None,
    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload", help="The only value of it to try.", show_default="both"
        ),
    ] = None,
    passes: Annotated[
        list[str] | None,
        typer.Option(metavar="PIPELINE", help="To run on the best's program; repeatable."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Settings to plan whole.")] = 1,
    alloc_conf: AllocConf = "",
    machine: Machine = None,
    tokens: Tokens = None,
    price: Price = None,
    code: Annotated[
        str | None, file_option("FILE.py", "Write the policy, to apply to a model.")
    ] = None,
) -> None:
    """Search the configuration with the most tokens per second that fits in --limit, and print it as code.

    Example: [bold]functionalize tune train.py --world 64 --limit h100 --batch-tokens 1M --code policy.py[/]
    """
    from functionalize.planner.cli.tune import TuneOptions
    from functionalize.planner.cli.tune import tune as tuned

    run, size = training(tokens, price), _size(limit)
    conf = alloc_conf or None
    given = (size, batch_tokens, batches, passes, top, machine, conf, tp, run, code, offload)
    tuned(out, job, TuneOptions(*given))
