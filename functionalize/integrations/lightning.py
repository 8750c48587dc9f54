"""Lightning: a callback of its Trainer, and `setup` for Fabric.

    callback = fz.integrations.lightning.CaptureModules()
    Trainer(strategy=ModelParallelStrategy(...), callbacks=[callback]).fit(module, loader)
    print(callback.explain())

    model, optimizer = fz.integrations.lightning.setup(fabric, model, optimizer)     # Fabric

Of a `LightningModule` the calls of its children are captured, which `training_step`, `validation_step` and
`forward` make. The steps themselves run eagerly: `self.log`, metrics, the loss, and all state of the Trainer. So does
what computes with parameters that the `LightningModule` holds itself.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from torch import nn

from functionalize.integrations.captured_calls import CapturedCalls, captured

__all__ = ["CaptureModules", "captured", "setup"]


class CaptureModules(Callback):
    """Captures the calls of a LightningModule's children while `fit` runs. options: those of `fz.capture`."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.captured: CapturedCalls | None = None

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """The strategy has sharded the modules by now."""
        children = [
            child for child in pl_module.children() if any(True for _ in child.parameters())
        ]
        self.captured = CapturedCalls(children, **self.options)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """The modules run as before `fit`."""
        self._remove()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """As at the end of `fit`."""
        self._remove()

    def _remove(self) -> None:
        if self.captured is not None:
            self.captured.remove()

    def explain(self) -> str:
        """What is captured, and what became of it."""
        return "`fit` has not begun" if self.captured is None else self.captured.explain()


def setup(
    fabric: Any, module: nn.Module, *optimizers: Any, options: dict[str, Any] | None = None
) -> Any:
    """What `fabric.setup(module, *optimizers)` returns, with the calls of the module captured.

    A strategy that sets up modules and optimizers apart (FSDP2) has `fabric.setup_module` and `setup_optimizers`: pass
    the module alone here, and the optimizers to `fabric.setup_optimizers`.
    """
    if optimizers:
        found = fabric.setup(module, *optimizers)
        wrapped = found[0]
    else:
        found = wrapped = fabric.setup_module(module)
    CapturedCalls([wrapped.module], **(options or {}))
    return found
