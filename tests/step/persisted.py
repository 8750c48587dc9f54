"""Steps that test_persist.py saves, and what another process does with them: `python -m ... FOLDER`."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import LoadError
from functionalize.step import options
from functionalize.util.structure import flatten
from tests.allowance import ample_allowance

BEFORE, AFTER = 5, 5


@dataclass
class Output:
    """A result of a type that pytree does not know."""

    loss: Tensor
    parts: dict[str, Any]


class Settings:
    """What a step reads beside its tensors."""

    def __init__(self) -> None:
        self.scale = 2.0


class Averaged(nn.Module):
    """A module that keeps a tensor as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return x - self.mean


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["weight"] = 1.0 / (1 + group["steps"])
            group["steps"] += 1
            for p in group["params"]:
                p.grad.mul_(group["weight"])
        return super().step(closure)


@dataclass
class Twin:
    """Whatever a training script makes before its loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any]
    settings: Settings


def twin(kind: str) -> Twin:
    """The objects of one kind, made as every process makes them."""
    torch.manual_seed(1)
    norm: nn.Module = nn.BatchNorm1d(8) if kind != "other class" else nn.LayerNorm(8)
    layers = [nn.Linear(4, 8), norm, nn.Dropout(0.3), nn.ReLU(), Averaged(), nn.Linear(8, 2)]
    if kind == "fewer layers":
        layers.pop(4)
    if kind == "other shape":
        layers[-1] = nn.Linear(8, 3)
    model = nn.Sequential(*layers)
    if kind == "other dtype":
        model.double()
    if kind == "a hook of the user":
        model.register_forward_hook(lambda module, args, out: out)
    if kind == "another hook":
        model.register_forward_hook(print)
    made = torch.optim.SGD if kind in ("sgd", "other optimizer") else torch.optim.AdamW
    optimizer = made(model.parameters(), lr=0.02)
    if kind == "counts":
        optimizer = Counting(
            [{"params": list(model.parameters()), "steps": 0, "weight": 1.0}], 0.02
        )
    if kind == "other groups":
        optimizer.param_groups[0]["params"].pop()
    settings = Settings()
    return Twin(model, optimizer, step_of(kind, model, optimizer, settings), settings)


def helper(x: Tensor) -> Tensor:
    return x.square()


def step_of(
    kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings
) -> Callable[..., Any]:
    def finish(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if kind == "other code":

        def train_step(x: Tensor) -> Any:
            loss = (helper(model(x)) * settings.scale).sum()
            finish(loss)
            return loss

    elif kind == "number":

        def train_step(x: Tensor) -> Any:
            loss = (helper(model(x)) * settings.scale).mean()
            if loss.isfinite():
                finish(loss)
            return {"loss": loss, "text": "fine", "step": None}

    elif kind == "gradients stay":

        def train_step(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = (helper(model(x)) * settings.scale).mean()
            loss.backward()
            optimizer.step()
            return loss

    elif kind == "lengths":

        def train_step(x: Tensor) -> Any:
            loss = helper(model(x)).mean()
            finish(loss * 3 if math.sqrt(x.shape[0] - 5) == 4.0 else loss)
            return loss

    else:

        def train_step(x: Tensor) -> Any:
            loss = (helper(model(x)) * settings.scale).mean()
            finish(loss)
            ones = torch.tensor([1.0, 2.0])
            return Output(loss, {"x": x, "ones": ones * loss.detach(), "again": loss})

    return train_step


KINDS = ("adamw", "sgd", "number", "counts", "gradients stay")
REFUSED = (
    "fewer layers",
    "other shape",
    "other dtype",
    "other class",
    "a hook of the user",
    "another hook",
    "other optimizer",
    "other groups",
    "other code",
)


def batch(i: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(i))


def digest(tree: Any) -> str:
    """The bits of every tensor, and everything else."""
    found = hashlib.sha256()
    for leaf in flatten(tree, result=True)[0]:
        if isinstance(leaf, Tensor):
            found.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def seen(made: Twin, out: Any) -> str:
    """Everything that a step may change."""
    state = made.model.state_dict(), made.optimizer.state_dict(), torch.get_rng_state()
    means = [m.mean for m in made.model.modules() if isinstance(m, Averaged)]
    return digest([out, list(state), means])


def train(made: Twin, step: Callable[..., Any], begin: int, end: int) -> list[str]:
    """What is seen after each step."""
    found = []
    for i in range(begin, end):
        made.optimizer.param_groups[0]["lr"] *= 0.9
        out = step(batch(i))
        found.append(seen(made, out))
    return found


LEARNED, UNSEEN = (5, 7, 13, 16, 29), (9, 21, 11, 7, 29)  # rows; at 21 the step decides otherwise


def train_at(made: Twin, step: Callable[..., Any], rows: Sequence[int]) -> list[str]:
    """The same with other numbers of rows."""
    found = []
    for i, count in enumerate(rows):
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(i))
        found.append(seen(made, step(x)))
    return found


def checkpoint(made: Twin) -> dict[str, Any]:
    """Everything a training script saves beside its programs."""
    means = [m.mean.clone() for m in made.model.modules() if isinstance(m, Averaged)]
    return {
        "model": made.model.state_dict(),
        "optimizer": made.optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "means": means,
    }


def restored(kind: str, folder: Path) -> Twin:
    made, saved = twin(kind), torch.load(folder / f"{kind}.pt")
    made.model.load_state_dict(saved["model"])
    made.optimizer.load_state_dict(saved["optimizer"])
    averaged = (m for m in made.model.modules() if isinstance(m, Averaged))
    for module, mean in zip(averaged, saved["means"], strict=True):
        module.mean.copy_(mean)
    torch.set_rng_state(saved["rng"])
    return made


def go_on(kind: str, folder: Path) -> dict[str, Any]:
    """Load, and go on from the checkpoint: eagerly, and by the programs."""
    eager = restored(kind, folder)
    expected = train(eager, eager.step, BEFORE, BEFORE + AFTER)
    made = restored(kind, folder)
    step = fz.capture(made.step)
    step.load(folder / f"{kind}.fzp")
    actual = train(made, step, BEFORE, BEFORE + AFTER)
    stats = step.stats
    assert step.program is not None
    return {
        "expected": expected,
        "actual": actual,
        "calls": [stats.warmups, stats.captures, stats.replays],
        "missed": stats.guard_failures,
        "text": digest(step.program.print_readable(print_output=False)),
    }


@ample_allowance()
def predict(folder: Path) -> dict[str, Any]:
    """Load, and go on with numbers of rows that were never recorded."""
    eager = restored("lengths", folder)
    expected = train_at(eager, eager.step, UNSEEN)
    made = restored("lengths", folder)
    options.EVERY = 1000
    step = fz.capture(made.step, dynamic=True)
    step.load(folder / "lengths.fzp")
    actual = train_at(made, step, UNSEEN)
    stats = step.stats
    calls = [stats.captures, stats.instances, stats.replays, stats.predictions, len(step.programs)]
    return {"expected": expected, "actual": actual, "calls": calls}


def changed(folder: Path) -> dict[str, list[str]]:
    """What the guards say at the first call, after something was changed beside the programs."""
    found = {}
    for what in ("lr", "betas", "dropout", "eval", "scale", "parameter", "requires_grad", "hook"):
        made = restored("adamw", folder)
        step = fz.capture(made.step)
        step.load(folder / "adamw.fzp")
        group, model = made.optimizer.param_groups[0], made.model
        if what == "lr":
            group["lr"] = 0.5
        if what == "betas":
            group["betas"] = (0.5, 0.5)
        if what == "dropout":
            model[2].p = 0.1  # type: ignore[index, union-attr]
        if what == "eval":
            model.eval()
        if what == "scale":
            made.settings.scale = 3.0
        if what == "parameter":
            model[0].weight = nn.Parameter(torch.zeros(8, 4))  # type: ignore[index, union-attr]
        if what == "requires_grad":
            model[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
        if what == "hook":
            model.register_forward_hook(lambda module, args, out: out)
        step(batch(0))
        found[what] = step.stats.guard_failures
    return found


def refusals(folder: Path) -> dict[str, str]:
    """What loading the programs of another step says."""
    found = {}
    for kind in REFUSED:
        try:
            fz.capture(twin(kind).step).load(folder / "adamw.fzp")
            found[kind] = "nothing"
        except LoadError as error:
            found[kind] = str(error)
    return found


if __name__ == "__main__":
    from tests.step import persisted  # by the name that the other process knows it by

    where = Path(sys.argv[1])
    report = {
        "kinds": {kind: persisted.go_on(kind, where) for kind in KINDS},
        "lengths": persisted.predict(where),
        "changed": persisted.changed(where),
        "refusals": persisted.refusals(where),
    }
    (where / "report.json").write_text(json.dumps(report))
