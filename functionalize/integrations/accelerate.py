"""Hugging Face accelerate: `Accelerator.prepare`, and the calls of the prepared models are captured.

    model, optimizer, loader, scheduler = fz.integrations.accelerate.prepare(
        accelerator, model, optimizer, loader, scheduler
    )
    for batch in loader:                       # the loop, unchanged
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            ...
    print(fz.integrations.accelerate.captured(model).explain())

`captured_calls.py` says what is captured. `optimizer.step()`, clipping, the scheduler, `accumulate` and the counters of
accelerate run eagerly.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from functionalize.integrations.captured_calls import CapturedCalls, captured

__all__ = ["captured", "prepare"]


def prepare(accelerator: Any, *objects: Any, options: dict[str, Any] | None = None) -> Any:
    """What `accelerator.prepare(*objects)` returns, with the calls of its modules captured.

    options: those of `fz.capture`; without them, a call that cannot be captured runs eagerly.
    """
    prepared = accelerator.prepare(*objects)
    found = prepared if isinstance(prepared, tuple | list) else (prepared,)
    CapturedCalls([each for each in found if isinstance(each, nn.Module)], **(options or {}))
    return prepared
