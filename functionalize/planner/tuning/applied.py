"""What an answer of `tune` does to a model. `policy.py` prints this source as it stands: it imports only torch.

    recompute(module, {"aten.mm.default": {0, 2}})    recompute in backward all but the first and the third `mm`
    recompute(module, {})                             recompute all of it

Ops are counted per call of the module, by overload, as selective checkpointing dispatches them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Saved = Mapping[str, Collection[int]]


def saving(saved: Saved) -> Any:
    """The contexts of one call that saves the results of some ops. saved: name of an op -> which of its calls."""
    calls: Counter[tuple[bool, str]] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        key = context.is_recompute, str(op)
        call, calls[key] = calls[key], calls[key] + 1
        if call in saved.get(str(op), ()):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recompute(module: nn.Module, saved: Saved) -> None:
    """Compute what the forward of a module saves again in backward, except the results of `saved`."""
    run = partial(checkpoint, module.forward, use_reentrant=False)
    module.forward = partial(run, context_fn=partial(saving, saved)) if saved else run
