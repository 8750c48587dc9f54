"""Arrays that a step makes tensors of are its inputs; an array with any other use is a constant of the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.walk.converted_arrays import ConvertedArray, converted_arrays
from tests.scalars.bits import bits

torch.manual_seed(0)
MODEL = nn.Linear(4, 2)


def as_tensor(obs: Any) -> Any:
    return MODEL(torch.as_tensor(obs, dtype=torch.float32)).sum()


def from_numpy(obs: Any) -> Any:
    return MODEL(torch.from_numpy(obs).float()).sum()


def copied(obs: Any) -> Any:
    return MODEL(torch.tensor(obs, dtype=torch.float32, device="cpu")).sum()


def twice(obs: Any) -> Any:
    return MODEL(torch.as_tensor(obs).float()).sum() * torch.tensor(obs).mean()


def assigned_again(obs: Any) -> Any:
    obs = torch.as_tensor(obs).float()
    return MODEL(obs).sum() + obs.mean()


def written(obs: Any) -> Any:
    found = torch.from_numpy(obs)
    found.add_(1)
    return found.sum()


def copy_written(obs: Any) -> Any:
    found = torch.tensor(obs)
    found[0] = 3
    return found.sum(), torch.as_tensor(obs).sum()


def returned(obs: Any) -> Any:
    return torch.from_numpy(obs), torch.as_tensor(obs).t()


def with_gradient(obs: Any) -> Any:
    x = torch.tensor(obs, requires_grad=True)
    x.square().sum().backward()
    return x.grad


CONVERTED = (
    as_tensor,
    from_numpy,
    copied,
    twice,
    assigned_again,
    written,
    copy_written,
    returned,
    with_gradient,
)


def _results(step: Any, make: Any, calls: int = 14) -> list[Any]:
    results = []
    for i in range(calls):
        array = make(i)
        try:
            found = step(array)
        except fz.FunctionalizeError as error:
            return [*results, error]
        given = array.tolist() if isinstance(array, np.ndarray) else None
        results.append((bits(found), given))
    return results


def _array(i: int) -> Any:
    return np.random.default_rng(i).normal(size=(3, 4))


@pytest.mark.parametrize("audit", [False, "auto"])
@pytest.mark.parametrize("fn", CONVERTED, ids=lambda fn: fn.__name__)
def test_an_array_that_is_converted_is_an_input(fn, audit):
    step = fz.capture(fn, audit=audit)
    assert _results(step, _array) == _results(fn, _array)
    assert step.stats.captures == 1 and step.stats.replays >= 11
    assert not step.stats.audit_failures


DTYPES = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_kind_of_number(dtype):
    def make(i: int) -> Any:
        return np.random.default_rng(i).integers(0, 2, size=(3, 4)).astype(dtype)

    for fn in (as_tensor, copied):
        step = fz.capture(fn, audit=False)
        assert _results(step, make, 6) == _results(fn, make, 6)
        assert step.stats.replays >= 4


def test_arrays_in_a_dict_and_by_keyword():
    def fn(batch: Any, n: int, *, mask: Any) -> Any:
        x = torch.as_tensor(batch["obs"], dtype=torch.float32)
        act = torch.as_tensor(batch["act"])
        chosen = MODEL(x).gather(1, act[:, None])
        return (chosen * torch.from_numpy(mask)).sum() * batch["weight"].sum() * n

    step = fz.capture(fn)
    for i in range(14):
        rng = np.random.default_rng(i)
        batch = {
            "obs": rng.normal(size=(3, 4)),
            "act": rng.integers(0, 2, 3),
            "weight": torch.randn(3),
        }
        mask = rng.random(2) > 0.5
        assert bits(step(batch, 3, mask=mask)) == bits(fn(batch, 3, mask=mask))
    assert step.stats.captures == 1 and step.stats.replays >= 11


def test_a_method_of_a_policy():
    class Policy:
        def __init__(self) -> None:
            self.model, self.device = MODEL, torch.device("cpu")
            self.act = fz.capture(self._act, audit=False)

        def _act(self, obs: Any) -> Tensor:
            with torch.no_grad():
                x = torch.as_tensor(obs, dtype=torch.float32, device=self.device)
                return self.model(x).argmax(-1)

    policy = Policy()
    for i in range(8):
        assert bits(policy.act(_array(i))) == bits(policy._act(_array(i)))
    assert policy.act.stats.replays >= 6


# -- any other use ---------------------------------------------------------------------------------


def reads_an_element(obs: Any) -> Any:
    return torch.as_tensor(obs).sum() * (2 if obs[0, 0] > 0 else 3)


def computes_first(obs: Any) -> Any:
    return torch.as_tensor(obs + 1).sum()


def as_another_argument(obs: Any) -> Any:
    return torch.as_tensor(np.zeros(2), dtype=torch.float32).sum() + torch.tensor(len(obs))


def by_another_function(obs: Any) -> Any:
    return torch.as_tensor(np.asarray(obs)).sum()


def in_a_list(obs: Any) -> Any:
    return torch.tensor([obs, obs]).sum()


def in_a_nested_function(obs: Any) -> Any:
    return sum(torch.as_tensor(obs).sum() * i for i in range(2))


def may_not_be_assigned(obs: Any) -> Any:
    if MODEL.training:
        obs = torch.as_tensor(obs)
    return float(obs.mean()) * MODEL.weight.sum()


def in_a_handler(obs: Any) -> Any:
    try:
        obs = torch.as_tensor(obs)
    except TypeError:
        obs = 1
    return obs.sum() * float(obs[0, 0])


def by_its_frame(obs: Any) -> Any:
    return torch.as_tensor(obs).sum() * float(locals()["obs"][0, 0])


def returns_it(obs: Any) -> Any:
    torch.as_tensor(obs).sum()
    return obs


OTHERS = (
    reads_an_element,
    computes_first,
    as_another_argument,
    by_another_function,
    in_a_list,
    in_a_nested_function,
    may_not_be_assigned,
    in_a_handler,
    by_its_frame,
    returns_it,
)


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list")
@pytest.mark.parametrize("fn", OTHERS, ids=lambda fn: fn.__name__)
def test_an_array_with_another_use_is_a_constant(fn):
    assert not converted_arrays(fn)
    step = fz.capture(fn, audit=False)
    found = _results(step, lambda i: _array(i // 3))
    expected = _results(fn, lambda i: _array(i // 3))
    if isinstance(found[-1], Exception):
        del expected[len(found) - 1 :], found[-1]
    if fn is returns_it:
        found, expected = [given for _, given in found], [given for _, given in expected]
    assert found == expected


def test_which_arrays_are_converted():
    assert converted_arrays(as_tensor) == {ConvertedArray("obs")}

    def of_a_dict(batch: Any, other: Any) -> Any:
        read = batch["b"][0]
        return torch.as_tensor(batch["a"]), torch.as_tensor(batch["b"]), read, other["c"]

    assert converted_arrays(of_a_dict) == {ConvertedArray("batch", "a")}

    def of_a_whole_dict(batch: Any) -> Any:
        return torch.as_tensor(batch["a"]), batch.values()

    assert not converted_arrays(of_a_whole_dict)


def _two(a: Any, b: Any) -> Any:
    x, y = torch.as_tensor(a), torch.as_tensor(b)
    x.add_(1)
    return y.sum()


def test_arrays_that_share_memory_are_constants():
    step = fz.capture(_two, audit=False)
    for i in range(8):
        memory, twin = _array(i), _array(i)
        try:
            found = step(memory[:2], memory[1:])
        except fz.FunctionalizeError:
            break
        assert bits(found) == bits(_two(twin[:2], twin[1:]))
    assert not step.stats.replays


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_arrays_of_other_memory_are_constants():
    weight = torch.ones(3, 4, dtype=torch.float64)
    step = fz.capture(from_numpy, audit=False)
    frozen = _array(0)
    frozen.flags.writeable = False
    for array in (weight.numpy(), frozen, _array(0)[::-1][::-1]):
        for _ in range(4):
            assert bits(step(array)) == bits(from_numpy(array))
