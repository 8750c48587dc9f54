"""`fz.capture` in the loops of frameworks, without an integration: what each natural place for it does.

    python -m benchmarks.entry_points [--points accelerate_step ...] [--worlds 1 2] [--explain]

Every place is trained by eager and captured, each in a process of its own per rank, with the models and the frameworks
of `tests/integrations`: two microbatches per step, a schedule. Printed are the replays of the captured calls after the
first half, and whether losses, shards and optimizer states are bit for bit those of eager.

    pip install '.[accelerate,lightning,transformers,torchtitan]'
"""

from __future__ import annotations

import argparse
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import functionalize as fz
from tests.integrations import loops
from tests.integrations.loops import BATCH, Net, decay, loss_of, rows, tensors_of

CALLS = 40  # microbatches


class Found(NamedTuple):
    """What one training gave. tensors: of this rank. calls, replays: of the second half."""

    numbers: list[Any]
    tensors: dict[str, Tensor]
    calls: int = 0
    replays: int = 0
    text: str = ""


class Place:
    """A place for `fz.capture`. The captured callable notes how many of its calls in the second half were replays."""

    def __init__(self, is_captured: bool) -> None:
        self.is_captured = is_captured
        self.steps: list[Any] = []
        self.done: list[tuple[int, int]] = []

    def __call__(self, fn: Any, **options: Any) -> Any:
        """`fn`, or its capture."""
        if not self.is_captured:
            return fn
        captured = fz.capture(fn, on_uncapturable="eager", **options)
        self.steps.append(captured)
        return captured

    def owned(self, owner: Any, name: str, **options: Any) -> None:
        """Capture a method as a decorator does, on a class made for this place."""
        if self.is_captured:
            decorated = fz.capture(vars(type(owner))[name], on_uncapturable="eager", **options)
            setattr(type(owner), name, decorated)
            self.steps.append(getattr(owner, name))

    def note(self) -> None:
        """A microbatch has ended."""
        replays = sum(step.stats.replays + step.stats.audits for step in self.steps)
        self.done.append((len(self.done), replays))

    def found(self, numbers: list[Any], tensors: dict[str, Tensor]) -> Found:
        half = len(self.done) // 2
        replays = self.done[-1][1] - self.done[half - 1][1]
        text = "\n".join(step.explain() for step in self.steps)
        return Found(numbers, tensors, len(self.done) - half, replays, text)


# -- accelerate --------------------------------------------------------------------------------------


def accelerated(place: Place, captured: str) -> Found:
    """captured: the step with `accumulate`, the step inside it, the model or the loss."""
    from tests.integrations.accelerate_loop import accelerator_of

    accelerator, model = accelerator_of(), Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    loader: Any = DataLoader(rows(40), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    called = place(model, backward=True) if captured == "model" else model
    compute = loss_of
    if captured == "loss":
        compute = place(lambda model, x, y: loss_of(model, x, y), backward=True)

    def inner(x: Tensor, y: Tensor) -> Tensor:
        loss = compute(called, x, y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    run = place(inner) if captured == "inner" else inner

    def whole(x: Tensor, y: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            return run(x, y)

    step = place(whole) if captured == "whole" else whole
    numbers = []
    torch.manual_seed(5)
    for _ in range(CALLS // 5):
        for x, y in loader:
            numbers.append((step(x, y).item(), scheduler.get_last_lr()))
            place.note()
    return place.found(numbers, tensors_of(model, optimizer.optimizer))


# -- the Trainer ------------------------------------------------------------------------------------


def trained(place: Place, name: str, how: str = "assigned", **options: Any) -> Found:
    """name: the method that is captured."""
    from tests.integrations import transformers_loop as loop

    class Own(loop.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return super().training_step(model, inputs, num_items_in_batch)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs)

    class Notes(loop.TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            place.note()

        on_step_end = on_substep_end

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                numbers.append((logs["loss"], logs["learning_rate"]))

    numbers: list[Any] = []
    trainer = loop.trainer_of(
        Own,
        tempfile.mkdtemp(),
        40,
        [Notes()],
        num_train_epochs=CALLS // 10,
        eval_strategy="no",
        save_strategy="no",
    )
    if name == "forward":
        trainer.model.forward = place(trainer.model.forward, **options)
    elif how == "decorated":
        place.owned(trainer, name, **options)
    else:
        setattr(trainer, name, place(getattr(trainer, name), **options))
    trainer.train()
    return place.found(numbers, tensors_of(trainer.model, trainer.optimizer.optimizer))


# -- Lightning --------------------------------------------------------------------------------------


def lit(place: Place, name: str, how: str = "assigned", **options: Any) -> Found:
    from tests.integrations import lightning_loop as loop

    class Own(loop.Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.net, *batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

        def on_fit_start(self) -> None:
            capture, self.capture = self.capture, None  # whose names are data: no code of the step
            capture()

    class Numbers(loop.lightning.Callback):
        """Notes numbers: in a hook of the module this would be code that the captured method may call."""

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *args: Any
        ) -> None:
            logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
            numbers.append((outputs["loss"].item(), logged))

    class Manual(Own):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.net, *batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()
            self.lr_schedulers().step()
            return loss.detach()

    class Loader(DataLoader):
        """Notes that a microbatch begins. No code of the step leads to it, as to methods of the module."""

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                place.note()
                yield batch

    def capture() -> None:
        kept = "training_step" if name == "manual" else name
        if name == "forward":
            module.net.forward = place(module.net.forward, **options)
        elif how == "decorated":
            place.owned(module, kept, **options)
        else:
            setattr(module, kept, place(getattr(module, kept), **options))

    module: Any = Manual() if name == "manual" else Own()
    module.capture = capture
    numbers: list[Any] = []
    trainer = loop.trainer_of(CALLS // 5, 1 if name == "manual" else 2, [Numbers()])
    trainer.fit(module, Loader(rows(40), batch_size=BATCH))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return place.found(
        [*numbers, trainer.global_step, logged], tensors_of(module, *trainer.optimizers)
    )


def fabric(place: Place, captured: str) -> Found:
    from tests.integrations import fabric_loop as loop

    fabric, model = loop.fabric_of(), Net()
    model = fabric.setup_module(model)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer: Any = fabric.setup_optimizers(plain)
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, decay)
    loader: Any = fabric.setup_dataloaders(DataLoader(rows(40), batch_size=BATCH))
    compute = (
        place(lambda x, y: loss_of(model, x, y), backward=True)
        if captured == "loss"
        else (lambda x, y: loss_of(model, x, y))
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = compute(x, y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = place(step) if captured == "step" else step
    numbers = []
    torch.manual_seed(5)
    for _ in range(CALLS // 5):
        for x, y in loader:
            numbers.append((run(x, y).item(), scheduler.get_last_lr()))
            scheduler.step()
            place.note()
    return place.found(numbers, tensors_of(model.module, plain))


def titan(place: Place) -> Found:
    from tests.integrations import torchtitan_loop as loop

    trainer, model = loop.trainer_of()
    trainer.train_step = place(trainer.train_step)
    numbers: list[Any] = []

    def log(at: int, *losses: float, **extra: Any) -> None:
        numbers.append((at, *losses))
        place.note()

    trainer.metrics_processor.log = log
    trainer.train()
    return place.found(numbers, tensors_of(model, *trainer.optimizers))


POINTS: dict[str, Callable[[Place], Found]] = {
    "accelerate: a step with `accumulate`": lambda p: accelerated(p, "whole"),
    "accelerate: the step inside `accumulate`": lambda p: accelerated(p, "inner"),
    "accelerate: the model": lambda p: accelerated(p, "model"),
    "accelerate: the loss": lambda p: accelerated(p, "loss"),
    "Trainer: `training_step`": lambda p: trained(p, "training_step"),
    "Trainer: `training_step`, decorated": lambda p: trained(p, "training_step", "decorated"),
    "Trainer: `compute_loss`": lambda p: trained(p, "compute_loss", backward=True),
    "Trainer: `model.forward`": lambda p: trained(p, "forward", backward=True),
    "Lightning: `training_step`": lambda p: lit(p, "training_step", backward=True),
    "Lightning: `training_step`, decorated": lambda p: lit(
        p, "training_step", "decorated", backward=True
    ),
    "Lightning: manual `training_step`": lambda p: lit(p, "manual"),
    "Lightning: `optimizer_step`": lambda p: lit(p, "optimizer_step"),
    "Lightning: `forward` of a child": lambda p: lit(p, "forward", backward=True),
    "Fabric: a step": lambda p: fabric(p, "step"),
    "Fabric: the loss": lambda p: fabric(p, "loss"),
    "torchtitan: `train_step`": titan,
}


def train_rank(point: str, is_captured: bool, out: Path, world: int, port: int, rank: int) -> None:
    """What a process does: train, and write what it found."""
    loops.join(point, world, port, rank)
    torch.save(tuple(POINTS[point](Place(is_captured))), out.with_suffix(f".{rank}"))


def compared(point: str, world: int) -> tuple[str, str]:
    """A row of the table, and the text of `explain`."""
    with tempfile.TemporaryDirectory() as folder:
        for is_captured in (False, True):
            out = Path(folder) / str(is_captured)
            loops.forked(world, train_rank, point, is_captured, out)
        eager, ours = (
            [
                Found(*torch.load(Path(folder) / f"{c}.{r}", weights_only=False))
                for r in range(world)
            ]
            for c in (False, True)
        )
    same = all(
        [*map(repr, a.numbers)] == [*map(repr, b.numbers)]
        and a.tensors.keys() == b.tensors.keys()
        and all(torch.equal(value, b.tensors[name]) for name, value in a.tensors.items())
        for a, b in zip(eager, ours, strict=True)
    )
    first = ours[0]
    row = f"| {point} | {world} | {first.replays} of {first.calls} | {'yes' if same else 'no'} |"
    return row, first.text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--explain", action="store_true")
    arguments: Any = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the frameworks
    logging.disable(logging.WARNING)
    print("| captured | ranks | replays in the second half | equal |\n| --- | --- | --- | --- |")
    names = [n for n in POINTS if any(part in n for part in arguments.points)]
    for name, world in itertools.product(names, arguments.worlds):
        row, text = compared(name, world)
        print(row, *([text] if arguments.explain else []), sep="\n", flush=True)


if __name__ == "__main__":
    main()
