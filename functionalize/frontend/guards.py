"""Facts of a training step that are no tensor: modes, hyperparameters, train/eval, gradients present."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from functionalize.core.inputs import Call
from functionalize.frontend.sources import ModuleTensor, Roots


@dataclass(frozen=True, slots=True)
class ModeGuard:
    """Grad mode, inference mode, autocast and the default dtype are as at capture."""

    facts: tuple[tuple[str, Any], ...]

    @staticmethod
    def now() -> ModeGuard:
        """The guard for the modes as they are."""
        return ModeGuard(_modes())

    def failure(self, call: Call) -> str | None:
        for (name, old), (_, new) in zip(self.facts, _modes(), strict=True):
            if old != new:
                return f"{name} is {new}, was {old}"
        return None


def _modes() -> tuple[tuple[str, Any], ...]:
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("CPU autocast", torch.is_autocast_enabled("cpu")),
        ("CUDA autocast", torch.is_autocast_enabled("cuda")),
        ("the default dtype", torch.get_default_dtype()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TrainingGuard:
    """Every module is in the mode (training or evaluation) it was in."""

    modules: tuple[nn.Module, ...]
    training: tuple[bool, ...]

    @staticmethod
    def of(roots: Roots) -> TrainingGuard:
        """The guard for every module under `roots`."""
        modules = tuple(m for root in roots.modules.values() for m in root.modules())
        return TrainingGuard(modules, tuple([m.training for m in modules]))

    def failure(self, call: Call) -> str | None:
        if tuple([m.training for m in self.modules]) == self.training:
            return None
        for module, was in zip(self.modules, self.training, strict=True):
            if module.training != was:
                mode = "training" if module.training else "evaluation"
                return f"a {type(module).__name__} is in {mode} mode, was not"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class HyperparameterGuard:
    """What an optimizer reads that is no tensor (`lr`, `betas`, ...) is as at capture: it is baked in."""

    optimizer: torch.optim.Optimizer
    name: str
    facts: tuple[tuple[tuple[str, Any], ...], ...]

    @staticmethod
    def of(name: str, optimizer: torch.optim.Optimizer) -> HyperparameterGuard:
        """The guard for one optimizer."""
        return HyperparameterGuard(optimizer, name, _hyperparameters(optimizer))

    def failure(self, call: Call) -> str | None:
        now = _hyperparameters(self.optimizer)
        if now == self.facts:
            return None
        for i, (new, old) in enumerate(zip(now, self.facts, strict=False)):
            for (key, value), (_, was) in zip(new, old, strict=False):
                if value != was:
                    return f"`{self.name}` group {i} has {key} = {value!r}, had {was!r}"
        return f"`{self.name}` has other parameter groups"


def _hyperparameters(
    optimizer: torch.optim.Optimizer,
) -> tuple[tuple[tuple[str, Any], ...], ...]:
    return tuple(
        tuple(
            (key, len(value) if key == "params" else value)
            for key, value in group.items()
            if not isinstance(value, Tensor)
        )
        for group in optimizer.param_groups
    )


@dataclass(frozen=True, slots=True, eq=False)
class GradientGuard:
    """Parameters enter the step with or without a gradient as they did."""

    sources: tuple[ModuleTensor, ...]
    names: tuple[str, ...]
    present: tuple[bool, ...]

    @staticmethod
    def of(parameters: list[tuple[str, ModuleTensor, Any]]) -> GradientGuard:
        """The guard for these parameters as they are."""
        return GradientGuard(
            tuple(source for _, source, _ in parameters),
            tuple(name for name, _, _ in parameters),
            tuple(value.grad is not None for _, _, value in parameters),
        )

    def failure(self, call: Call) -> str | None:
        for source, name, was in zip(self.sources, self.names, self.present, strict=True):
            now = source.resolve(call).grad is not None
            if now != was:
                return f"`{name}` enters with{'' if now else 'out'} a gradient, did not before"
        return None
