"""Graph passes over programs, and over the graph modules of other compilers.

    program = passes.run(program, passes.parse("default"))
    gm = passes.elide_copies(gm, example_inputs)

`docs/passes.md` has what each does, before and after.
"""

import sys

from functionalize.passes.base import Pass
from functionalize.passes.bucket_gathers import BucketGathers, bucket_gathers
from functionalize.passes.bucket_reduces import BucketReduces, bucket_reduces
from functionalize.passes.drop_dead_code import DropDeadCode, drop_dead_code
from functionalize.passes.elide_copies import ElideCopies, elide_copies
from functionalize.passes.fold_views import FoldViews, fold_views
from functionalize.passes.graph_modules import on_graph_module
from functionalize.passes.merge_duplicates import MergeDuplicates, merge_duplicates
from functionalize.passes.narrow_masks import NarrowMasks, narrow_masks
from functionalize.passes.offload import Offload, offload
from functionalize.passes.order import Order, order
from functionalize.passes.partition import Partition
from functionalize.passes.partitioned import Partitioned
from functionalize.passes.pipeline import PASSES, PIPELINES, parse, pipeline_text
from functionalize.passes.prefetch import Prefetch, prefetch
from functionalize.passes.recompute_views import (
    RecomputeViews,
    partition,
    partitioner,
    recompute_views,
)
from functionalize.passes.reinplace import Reinplace
from functionalize.passes.remat import Remat, remat
from functionalize.passes.remove_noops import RemoveNoops, remove_noops
from functionalize.passes.reshard import Reshard, reshard
from functionalize.passes.runner import run
from functionalize.passes.schedule_memory import ScheduleMemory, schedule_memory
from functionalize.passes.verify import Verify, verify

__all__ = [
    "PASSES",
    "PIPELINES",
    "BucketGathers",
    "BucketReduces",
    "DropDeadCode",
    "ElideCopies",
    "FoldViews",
    "MergeDuplicates",
    "NarrowMasks",
    "Offload",
    "Order",
    "Partition",
    "Partitioned",
    "Pass",
    "Prefetch",
    "RecomputeViews",
    "Reinplace",
    "Remat",
    "RemoveNoops",
    "Reshard",
    "ScheduleMemory",
    "Verify",
    "bucket_gathers",
    "bucket_reduces",
    "drop_dead_code",
    "elide_copies",
    "fold_views",
    "merge_duplicates",
    "narrow_masks",
    "offload",
    "on_graph_module",
    "order",
    "parse",
    "partition",
    "partitioner",
    "pipeline_text",
    "prefetch",
    "recompute_views",
    "remat",
    "remove_noops",
    "reshard",
    "run",
    "schedule_memory",
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
