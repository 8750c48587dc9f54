"""Values kept in an object: gone with it, not copied, not pickled."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.util.own_values import own_values


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)

    @fz.capture
    def step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.model.bias.add_(1)
        return self.model(x).detach()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 2)

    step = Trainer.step


def trained(make: Any) -> Any:
    trainer = make()
    for _ in range(4):
        trainer.step(torch.ones(3, 4))
    assert trainer.step.stats.replays == 3
    return trainer


@pytest.mark.parametrize("make", [Trainer, Network])
def test_an_instance_is_not_kept_alive(make: Any) -> None:
    trainer = trained(make)
    dead = weakref.ref(trainer), weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("make", [Trainer, Network])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_has_a_captured_method_of_its_own(copied: Any, make: Any) -> None:
    trainer = trained(make)
    twin = copied(trainer)
    before = trainer.model.bias.detach().clone()
    assert twin.step is not trainer.step
    for _ in range(3):
        twin.step(torch.ones(3, 4))
    assert torch.equal(twin.model.bias.detach(), before + 3)
    assert (twin.model is trainer.model) == (copied is copy.copy)
    assert (trainer.step.stats.replays, twin.step.stats.replays) == (3, 2)


def test_objects_without_a_dict_hold_none() -> None:
    assert own_values(3) is None
    own = own_values(Trainer)
    assert own is own_values(Trainer) is not None
    assert own is not own_values(type("Other", (Trainer,), {}))
