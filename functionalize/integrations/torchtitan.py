"""torchtitan: forward, loss and backward of each microbatch of its trainer are captured as one step.

    trainer = config.build()
    step = fz.integrations.torchtitan.capture(trainer)
    trainer.train()
    print(step.explain())

    torchrun ... -m functionalize.integrations.torchtitan --module llama3 --config llama3_debugmodel ...

The second form takes the place of `-m torchtitan.train`: torchtitan's own entry runs, whose trainer is captured when it
begins to train.

torchtitan calls `trainer.fwd_bwd_fn` for each microbatch, and replaces it itself for CUDA graphs; under pipeline
parallelism it calls `trainer.pp_forward_backward_step` for all microbatches of a schedule. From now on this is the
captured step: gradients are left in `.grad`, reduced or accumulated by FSDP2 as in eager. Clipping, optimizer,
scheduler, metrics, checkpoints and validation run eagerly.
Refusals: CUDA graphs of torchtitan (`training.disable_cuda_graphs` must be true).
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

    Under pipeline parallelism it is `trainer.pp_forward_backward_step`. A call that cannot be captured runs eagerly.
    Raises `ValueError` for a trainer with CUDA graphs.
    """
    name, what = "fwd_bwd_fn", "a microbatch"
    if trainer.parallel_dims.pp_enabled:
        name, what = "pp_forward_backward_step", "all microbatches of the schedule"
    if not trainer.config.training.disable_cuda_graphs:
        raise ValueError(
            "torchtitan has wrapped `fwd_bwd_fn` of this trainer in a CUDA graph: set "
            "`training.disable_cuda_graphs`"
        )
    options = {"on_uncapturable": "eager", **options}
    step: CapturedStep[..., Any] = entry.capture(getattr(trainer, name), **options)
    step.boundary = Boundary(
        f"`trainer.{name}`, forward, loss and backward of {what}",
        "data, clipping, optimizer, schedulers, validation, metrics, checkpoints",
    )
    setattr(trainer, name, step)
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
