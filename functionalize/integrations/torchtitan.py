"""torchtitan: forward, loss and backward of each microbatch of its trainer are captured as one step.

    trainer = config.build()
    step = fz.integrations.torchtitan.capture(trainer)
    trainer.train()
    print(step.explain())

    torchrun ... -m functionalize.integrations.torchtitan --module llama3 --config llama3_debugmodel ...

The second form takes the place of `-m torchtitan.train`: torchtitan's own entry runs, whose trainer is captured when it
begins to train.

torchtitan calls `trainer.fwd_bwd_fn` for each microbatch, and replaces it itself for CUDA graphs. From now on it is the
captured step: gradients are left in `.grad`, reduced or accumulated by FSDP2 as in eager. Clipping, optimizer,
scheduler, metrics, checkpoints and validation run eagerly.
Refusals: pipeline parallelism, whose schedule calls the stages itself; CUDA graphs of torchtitan
(`training.disable_cuda_graphs` must be true).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from functionalize import entry
from functionalize.step.captured_step import CapturedStep
from functionalize.step.explain import Boundary
from functionalize.util.patching import Patches

log = logging.getLogger("functionalize")


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


def main() -> None:
    """Run torchtitan's own entry, `torchtitan.train.main`, with its trainer captured; its arguments are torchtitan's.

    torchtitan's logger says at the end what was captured. Raises `ValueError` as `capture` does.
    """
    from torchtitan.tools.logging import logger
    from torchtitan.train import main as own_main
    from torchtitan.trainer import Trainer

    own_train, steps = Trainer.train, list[CapturedStep[..., Any]]()

    @functools.wraps(own_train)
    def train(trainer: Any) -> None:
        steps.append(capture(trainer))
        own_train(trainer)

    patches = Patches(lambda: iter([(Trainer, "train", train)]))
    patches.install()
    try:
        own_main()
    finally:
        patches.remove()
        for step in steps:
            logger.info(step.explain())
    if not steps:
        log.warning(
            "nothing was captured: no trainer has called `torchtitan.trainer.Trainer.train`"
        )


if __name__ == "__main__":
    main()
