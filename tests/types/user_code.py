"""Code of a user, with what type checkers must say of it: `# shows X`, a type; `# error`, that the line is wrong.

It is never run. `test_user_code.py` asks mypy and pyright.
"""

# ruff: noqa
from pathlib import Path
from typing import reveal_type

import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize import integrations

model = nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())


def train_step(batch: Tensor, scale: float = 1.0) -> Tensor:
    loss: Tensor = (model(batch) * scale).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


step = fz.capture(train_step)
reveal_type(step(torch.ones(3, 2)))  # shows Tensor
reveal_type(step(torch.ones(3, 2), scale=0.5))  # shows Tensor
step("wrong")  # error
step(torch.ones(3, 2), scal=0.5)  # error
step.explian()  # error
reveal_type(step.explain())  # shows str
reveal_type(step.stats.replays)  # shows int
reveal_type(step.program)  # shows Program | None
step.save(Path("step.fzp"))
step.load("step.fzp", types=[dict])

fz.captrue(train_step)  # error
fz.capture(train_step, pases="default")  # error
fz.capture(train_step, dynamic="always")  # error
fz.capture("train_step")  # error


@fz.capture(passes="default", audit=False)
def decorated(batch: Tensor) -> dict[str, Tensor]:
    return {"loss": model(batch).sum()}


reveal_type(decorated(torch.ones(3, 2))["loss"])  # shows Tensor
decorated()  # error


class Trainer:
    @fz.capture
    def step(self, batch: Tensor) -> Tensor:
        return batch.sum()


reveal_type(Trainer().step(torch.ones(3, 2)))  # shows Tensor
Trainer().step(1)  # error
reveal_type(Trainer().step.stats.captures)  # shows int

forward = fz.capture(model, backward=True)
forward(torch.ones(3, 2)).sum().backward()
backward = fz.functions.capture_backward()
backward(step(torch.ones(3, 2)))

reveal_type(fz.load("step.fzp"))  # shows Program
reveal_type(fz.functions.trace(train_step, torch.ones(3, 2)))  # shows Program
reveal_type(fz.planner.Target("cpu"))  # shows Target
fz.integrations.lighning  # error
integrations.transformers.CaptureModel()
integrations.accelerate.prepare
fz.passes.parse("default")
reveal_type(fz.passes.on_graph_module("default"))  # shows GraphModulePass
fz.passes.elide_copes  # error
reveal_type(fz.planner.MACHINES["h100"])  # shows Machine
fz.planner.machines_of  # error
fz.trace(train_step)  # error
fz.errors.GuardError
fz.functions.compile  # error
fz.plan(lambda: None, wrld=8)  # error
