"""One line per framework: its own loop, unchanged, with captured calls of its model. See `docs/integrations.md`.

    model, optimizer = fz.integrations.accelerate.prepare(accelerator, model, optimizer)
    Trainer(..., callbacks=[fz.integrations.lightning.CaptureModules()])
    Trainer(..., callbacks=[fz.integrations.transformers.CaptureModel()])
    fz.integrations.torchtitan.capture(trainer)

A module is imported when its name is first used; `lightning` and `transformers` import the framework.
"""

from typing import TYPE_CHECKING

from functionalize.util.late_names import late_names

if TYPE_CHECKING:
    from functionalize.integrations import accelerate as accelerate
    from functionalize.integrations import lightning as lightning
    from functionalize.integrations import torchtitan as torchtitan
    from functionalize.integrations import transformers as transformers
else:
    __getattr__, __dir__ = late_names(
        __name__, {}, ("accelerate", "lightning", "torchtitan", "transformers")
    )
