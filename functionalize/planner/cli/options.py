"""The options that several commands have, as typer reads them from annotations."""

from __future__ import annotations

from typing import Annotated

import typer

from functionalize.planner.cli.recorded import DEFAULT_WORLD

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
