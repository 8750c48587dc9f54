"""One line per framework: its own loop, unchanged, with captured calls of its model. See `docs/integrations.md`.

    model, optimizer = fz.integrations.accelerate.prepare(accelerator, model, optimizer)
    Trainer(..., callbacks=[fz.integrations.lightning.CaptureModules()])
    Trainer(..., callbacks=[fz.integrations.transformers.CaptureModel()])
    fz.integrations.torchtitan.capture(trainer)

A module is imported when its name is first used; `lightning` and `transformers` import the framework.
"""

import importlib
from typing import Any

_FRAMEWORKS = ("accelerate", "lightning", "torchtitan", "transformers")


def __getattr__(name: str) -> Any:
    if name in _FRAMEWORKS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
