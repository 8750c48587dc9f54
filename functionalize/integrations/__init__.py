"""One line per framework: its own loop, unchanged, with captured calls of its model. See `docs/integrations.md`.

    model, optimizer = fz.integrations.accelerate.prepare(accelerator, model, optimizer)
    Trainer(..., callbacks=[fz.integrations.lightning.CaptureModules()])
    Trainer(..., callbacks=[fz.integrations.transformers.CaptureModel()])
    fz.integrations.torchtitan.capture(trainer)

A module is imported when its name is first used; `lightning` and `transformers` import the framework.
"""

import importlib
from typing import TYPE_CHECKING

_FRAMEWORKS = ("accelerate", "lightning", "torchtitan", "transformers")

if TYPE_CHECKING:
    from functionalize.integrations import accelerate as accelerate
    from functionalize.integrations import lightning as lightning
    from functionalize.integrations import torchtitan as torchtitan
    from functionalize.integrations import transformers as transformers
else:

    def __getattr__(name):
        if name in _FRAMEWORKS:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FRAMEWORKS})
