"""torchtitan: forward, loss and backward of each microbatch of its trainer are captured as one step.

    trainer = config.build()
    step = fz.integrations.torchtitan.capture(trainer)
    trainer.train()
    print(step.explain())

torchtitan calls `trainer.fwd_bwd_fn` for each microbatch, and replaces it itself for CUDA graphs. From now on it is the
captured step: gradients are left in `.grad`, reduced or accumulated by FSDP2 as in eager. Clipping, optimizer,
scheduler, metrics, checkpoints and validation run eagerly.
Refusals: pipeline parallelism, whose schedule calls the stages itself; CUDA graphs of torchtitan
(`training.disable_cuda_graphs` must be true).
"""

from __future__ import annotations

from typing import Any

from functionalize import entry
from functionalize.step.captured_step import CapturedStep
from functionalize.step.explain import Boundary


def capture(trainer: Any, **options: Any) -> CapturedStep[..., Any]:
    """Replace `trainer.fwd_bwd_fn` by a captured step, and return it. options: those of `fz.capture`.

    A call that cannot be captured runs eagerly. Raises `ValueError` for a trainer with pipeline parallelism or
    CUDA graphs.
    """
    if trainer.parallel_dims.pp_enabled:
        raise ValueError(
            "the schedule of pipeline parallelism calls the stages of this trainer itself: `fwd_bwd_fn` is not called, "
            "and nothing would be captured"
        )
    if not trainer.config.training.disable_cuda_graphs:
        raise ValueError(
            "torchtitan has wrapped `fwd_bwd_fn` of this trainer in a CUDA graph: set "
            "`training.disable_cuda_graphs`"
        )
    options = {"on_uncapturable": "eager", **options}
    step: CapturedStep[..., Any] = entry.capture(trainer.fwd_bwd_fn, **options)
    step.boundary = Boundary(
        "`trainer.fwd_bwd_fn`, forward, loss and backward of a microbatch",
        "data, clipping, optimizer, schedulers, validation, metrics, checkpoints",
    )
    trainer.fwd_bwd_fn = step
    return step
