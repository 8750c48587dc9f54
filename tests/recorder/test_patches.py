"""Which functions a recording replaces: those that it needs, each by one group, and put back as they were."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functionalize as fz
from functionalize.recorder.patches import (
    CHECKS,
    CUDA_GENERATORS,
    EFFECTS,
    ENGINE,
    GENERATORS,
    GROUPS,
    NUMBERS,
    SIZES,
)
from functionalize.util.patching import Patches

GROUPS_BY_NAME = {
    "engine": ENGINE,
    "process groups": GROUPS,
    "generators": GENERATORS,
    "generators of CUDA": CUDA_GENERATORS,
    "checks": CHECKS,
    "numbers": NUMBERS,
    "effects": EFFECTS,
    "sizes": SIZES,
}


def replaced_during(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> dict[str, int]:
    """How many functions each group has replaced while `call` ran; of none there is no entry."""
    found: dict[str, int] = {}
    names = {id(patches): name for name, patches in GROUPS_BY_NAME.items()}
    remove = Patches.remove

    def removed(self: Patches) -> None:
        if id(self) in names:
            found[names[id(self)]] = max(found.get(names[id(self)], 0), len(self._saved))
        remove(self)

    with monkeypatch.context() as patch:
        patch.setattr(Patches, "remove", removed)
        call()
    return found


def of_four_ops(x: Tensor) -> Tensor:
    return (x @ x).relu().sum() + 1


def test_no_function_is_in_two_groups() -> None:
    installed = [patches for patches in GROUPS_BY_NAME.values() if patches is not SIZES]
    places: Counter[tuple[int, str]] = Counter()
    for patches in installed:
        patches.install()
    for patches in installed:
        places.update((id(owner), name) for owner, name, *_ in patches._saved)
        patches.remove()
    assert places and max(places.values()) == 1


def test_a_trace_replaces_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 3)
    fz.functions.trace(of_four_ops, x)
    found = replaced_during(monkeypatch, lambda: fz.functions.trace(of_four_ops, x))
    assert set(found) == {"engine", "generators", "checks"}
    assert sum(found.values()) <= 60


def test_a_step_replaces_all_but_collectives_without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = fz.capture(step)
    captured(torch.randn(2, 3))
    found = replaced_during(monkeypatch, lambda: captured(torch.randn(2, 3)))
    assert set(GROUPS_BY_NAME) - set(found) == {"process groups", "sizes"}


@pytest.mark.parametrize("owner, name", [(torch, "matmul"), (torch.random, "manual_seed")])
def test_what_a_script_replaced_meanwhile_is_called(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """The replacements of the last recording are kept; not where something else stands in their place."""
    fz.functions.trace(of_four_ops, torch.randn(3, 3))
    original, calls = getattr(owner, name), []

    def own(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    def program(x: Tensor) -> Tensor:
        if name == "manual_seed":
            return torch.random.manual_seed(3) and x + 1
        return torch.matmul(x, x)

    for replacement in (own, original, own):
        calls.clear()
        monkeypatch.setattr(owner, name, replacement)
        fz.functions.trace(program, torch.randn(3, 3))
        assert getattr(owner, name) is replacement
        if name == "matmul":
            assert bool(calls) == (replacement is own)


def test_what_stands_in_a_class_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what one reads from the class: a method of C++ would lose its `self`."""
    place = [(owner, name) for owner in (torch.Tensor, dist.ProcessGroup) for name in vars(owner)]
    before = [vars(owner)[name] for owner, name in place]
    for _ in range(3):
        for patches in GROUPS_BY_NAME.values():
            patches.install()
        for patches in GROUPS_BY_NAME.values():
            patches.remove()
        assert all(vars(o)[n] is old for (o, n), old in zip(place, before, strict=True))


def test_a_replacement_that_cannot_be_made_leaves_none() -> None:
    """Neither in place nor kept."""
    fails = [True]

    def some() -> Any:
        yield logging, "warning", print
        if fails:
            raise RuntimeError("no second one")
        yield logging, "error", print

    patches, before = Patches(some, keeps=True), (logging.warning, logging.error)
    with pytest.raises(RuntimeError):
        patches.install()
    assert (logging.warning, logging.error) == before
    fails.clear()
    patches.install()
    assert logging.warning is logging.error is print
    patches.remove()
    assert (logging.warning, logging.error) == before
