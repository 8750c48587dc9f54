"""Graph passes over programs, and over the graph modules of other compilers.

program = passes.run(program, passes.parse("default"))
gm = passes.elide_copies(gm, example_inputs)
"""

from passes.base import Pass
from passes.bucket_gathers import BucketGathers, bucket_gathers
from passes.bucket_reduces import BucketReduces, bucket_reduces
from passes.drop_dead_code import DropDeadCode, drop_dead_code
from passes.elide_copies import ElideCopies, elide_copies
from passes.fold_views import FoldViews, fold_views
from passes.graph_modules import on_graph_module
from passes.merge_duplicates import MergeDuplicates, merge_duplicates
from passes.narrow_masks import NarrowMasks, narrow_masks
from passes.offload import Offload, offload
from passes.order import Order, order
from passes.partition import Partition
from passes.partitioned import Partitioned
from passes.pipeline import PASSES, PIPELINES, parse, pipeline_text
from passes.prefetch import Prefetch, prefetch
from passes.recompute_views import RecomputeViews, partition, partitioner, recompute_views
from passes.reinplace import Reinplace
from passes.remat import Remat, remat
from passes.remove_noops import RemoveNoops, remove_noops
from passes.reshard import Reshard, reshard
from passes.runner import run
from passes.schedule_memory import ScheduleMemory, schedule_memory
from passes.verify import Verify, verify

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
