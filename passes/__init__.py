"""Rewrites of programs, and of the graph modules of other compilers.

    program = passes.run(program, "default")
    gm = passes.on_graph_module("elide_copies")(gm, example_inputs)

The class of a pass stands in the module of its name, `functionalize.passes.elide_copies.ElideCopies`, and in `PASSES`.
`docs/passes.md` has what each does, before and after.
"""

import sys

from functionalize.errors import PassError, VerifyError
from functionalize.passes.base import Pass
from functionalize.passes.partitioned import Partitioned
from functionalize.passes.pipeline import PASSES, PIPELINES, parse, pipeline_text
from functionalize.passes.recompute_views import partitioner
from functionalize.passes.runner import on_graph_module, run
from functionalize.passes.verify import verify

__all__ = [
    "PASSES",
    "PIPELINES",
    "Partitioned",
    "Pass",
    "PassError",
    "VerifyError",
    "on_graph_module",
    "parse",
    "partitioner",
    "pipeline_text",
    "run",
    "verify",
]

if (
    __name__ == "passes"
):  # imported in a checkout by the name of the folder: the same modules, no second ones
    sys.modules |= {
        name.removeprefix("functionalize."): module
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith("functionalize.passes.")
    }
