"""Graph passes over programs, and over the graph modules of other compilers.

program = passes.run(program, passes.parse("default"))
gm = passes.elide_copies(gm, example_inputs)
"""

from passes.elide_copies import ElideCopies, elide_copies
from passes.infra import Pass, on_graph_module, run
from passes.pipeline import PASSES, PIPELINES, parse, pipeline_text
from passes.recompute_views import RecomputeViews, partition, partitioner, recompute_views
from passes.verify import Verify, verify

__all__ = [
    "PASSES",
    "PIPELINES",
    "ElideCopies",
    "Pass",
    "RecomputeViews",
    "Verify",
    "elide_copies",
    "on_graph_module",
    "parse",
    "partition",
    "partitioner",
    "pipeline_text",
    "recompute_views",
    "run",
    "verify",
]
