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
        except fz.errors.FunctionalizeError as error:
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


def _strided(kind: str, i: int) -> Any:
    array = np.random.default_rng(i).normal(size=(4, 6, 8))
    kinds = {
        "C": lambda: array,
        "transposed": lambda: array.transpose(2, 0, 1),
        "Fortran": lambda: np.asfortranarray(array),
        "steps": lambda: array[:, ::2],
        "of size 1": lambda: array[:1].T,
        "of one column": lambda: array[:, 1],
        "empty": lambda: array[:0].T,
    }
    return kinds[kind]()


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize(
    "kind", ["C", "transposed", "Fortran", "steps", "of size 1", "of one column", "empty"]
)
def test_a_tensor_of_an_array_has_the_strides_of_eager(kind, dtype):
    """A copy keeps the strides of a dense array, as `torch.tensor` does."""

    def fn(obs: Any) -> Any:
        copied = torch.tensor(obs, dtype=dtype)
        others = torch.as_tensor(obs, dtype=dtype), torch.from_numpy(obs)
        made = (copied, *others)
        strides = [x.stride() for x in made], [x.is_contiguous() for x in made]
        return strides, copied, copied.square().sum() + sum(x.sum() for x in others)

    for audit in ("auto", False):
        step = fz.capture(fn, audit=audit)
        for i in range(8):
            found, expected = step(_strided(kind, i)), fn(_strided(kind, i))
            assert found[0] == expected[0] and bits(found[1:]) == bits(expected[1:])
            assert found[1].stride() == expected[1].stride()
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


def by_one_of_two_functions(obs: Any) -> Any:
    return (_mean if MODEL.training else torch.as_tensor)(obs).sum()


def _mean(obs: Any) -> Any:
    return torch.tensor(float(obs.mean()))


def by_a_helper_that_reads_it(obs: Any) -> Any:
    return _mean(obs) + torch.as_tensor(obs).sum()


def by_a_helper_of_any_arguments(obs: Any) -> Any:
    return _of_all(obs)


def _of_all(*args: Any) -> Any:
    return torch.as_tensor(args[0]).sum() * float(args[0][0, 0])


def by_a_helper_that_calls_itself(obs: Any) -> Any:
    return _again(obs, 2)


def _again(obs: Any, n: int) -> Any:
    return _again(obs, n - 1) if n else torch.as_tensor(obs).sum()


def by_a_method_of_it(obs: Any) -> Any:
    return torch.as_tensor(obs.sum(0)).sum()


def by_a_helper_that_keeps_it(obs: Any) -> Any:
    return _kept(obs).sum() * float(KEPT[0][0, 0])


KEPT: list[Any] = [None]


def _kept(obs: Any) -> Any:
    KEPT[0] = obs
    return torch.as_tensor(obs)


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
    by_one_of_two_functions,
    by_a_helper_that_reads_it,
    by_a_helper_of_any_arguments,
    by_a_helper_that_calls_itself,
    by_a_method_of_it,
    by_a_helper_that_keeps_it,
    may_not_be_assigned,
    in_a_handler,
    by_its_frame,
    returns_it,
)


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list")
@pytest.mark.parametrize("fn", OTHERS, ids=lambda fn: fn.__name__)
def test_an_array_with_another_use_is_a_constant(fn):
    assert not converted_arrays(fn).arrays
    step = fz.capture(fn, audit=False)
    found = _results(step, lambda i: _array(i // 3))
    expected = _results(fn, lambda i: _array(i // 3))
    if isinstance(found[-1], Exception):
        del expected[len(found) - 1 :], found[-1]
    if fn is returns_it:
        found, expected = [given for _, given in found], [given for _, given in expected]
    assert found == expected


def test_which_arrays_are_converted():
    assert converted_arrays(as_tensor).arrays == {ConvertedArray("obs")}

    def of_a_dict(batch: Any, other: Any) -> Any:
        read = batch["b"][0]
        return torch.as_tensor(batch["a"]), torch.as_tensor(batch["b"]), read, other["c"]

    assert converted_arrays(of_a_dict).arrays == {ConvertedArray("batch", "a")}

    def of_a_whole_dict(batch: Any) -> Any:
        return torch.as_tensor(batch["a"]), batch.values()

    assert not converted_arrays(of_a_whole_dict).arrays


def _two(a: Any, b: Any) -> Any:
    x, y = torch.as_tensor(a), torch.as_tensor(b)
    x.add_(1)
    return y.sum()


# -- by functions that the step calls --------------------------------------------------------------


def _helper(obs: Any) -> Tensor:
    return torch.as_tensor(obs, dtype=torch.float32)


def _scaled(obs: Any, scale: float = 1.0, *, more: float = 0.0) -> Tensor:
    found = torch.from_numpy(obs).float()
    return found * scale + more


def _obs_of(batch: Any) -> Tensor:
    return _helper(batch["obs"])


class Trainer:
    """Its methods make tensors of arrays, and steps call them."""

    def __init__(self) -> None:
        self.model, self.scale = MODEL, 2.0

    def to_tensor(self, obs: Any) -> Tensor:
        return torch.as_tensor(obs, dtype=torch.float32)

    @staticmethod
    def static(obs: Any) -> Tensor:
        return torch.tensor(obs).float()

    def inner(self, obs: Any, others: Any) -> Tensor:
        return self.to_tensor(obs) + others

    def by_method(self, obs: Any) -> Tensor:
        return self.model(self.to_tensor(obs)).sum()

    def by_static_method(self, obs: Any) -> Tensor:
        return self.model(self.static(obs)).sum()

    def by_several(self, obs: Any) -> Tensor:
        return self.model(self.inner(obs, torch.ones(4)) + self.to_tensor(obs=obs)).sum()

    def by_function(self, obs: Any) -> Tensor:
        return self.model(_helper(obs)).sum()

    def by_keyword(self, obs: Any) -> Tensor:
        return self.model(_scaled(scale=self.scale, more=float(self.scale), obs=obs)).sum()

    def among_others(self, obs: Any) -> Tensor:
        return self.model(_scaled(obs, max(self.scale, 3.0))).sum()

    def of_another(self, obs: Any) -> Tensor:
        return self.model(OTHER.to_tensor(obs)).sum()


OTHER = Trainer()
OF_METHODS = [name for name in vars(Trainer) if name.startswith(("by_", "among", "of_"))]


@pytest.mark.parametrize("name", OF_METHODS)
def test_an_array_that_a_helper_converts_is_an_input(name):
    fn = getattr(Trainer(), name)
    step = fz.capture(fn)
    assert _results(step, _array) == _results(fn, _array)
    assert step.stats.captures == 1 and step.stats.replays >= 11
    assert not step.stats.audit_failures


@pytest.mark.parametrize("by_key", [False, True])
def test_arrays_in_a_dict_that_a_helper_converts(by_key):
    def of_key(batch: Any) -> Any:
        return MODEL(_helper(batch["obs"])).sum() * batch["weight"].sum()

    def of_batch(batch: Any) -> Any:
        return MODEL(_obs_of(batch)).sum() * batch["weight"].sum()

    fn = of_key if by_key else of_batch
    assert converted_arrays(fn).arrays == {ConvertedArray("batch", "obs")}
    step = fz.capture(fn)
    for i in range(14):
        batch = {"obs": _array(i), "weight": torch.full((2,), float(i))}
        assert bits(step(batch)) == bits(fn(batch))
    assert step.stats.captures == 1 and step.stats.replays >= 11


def test_a_helper_that_is_replaced(monkeypatch):
    """By a function that reads the array, by a method of the object alone: the array is a constant from then on."""

    def reads(obs: Any) -> Any:
        return torch.as_tensor(obs, dtype=torch.float32) * float(obs[0, 0])

    trainer = Trainer()
    for name, replace in (
        ("by_function", lambda: monkeypatch.setitem(globals(), "_helper", reads)),
        ("by_method", lambda: setattr(trainer, "to_tensor", reads)),
        ("of_another", lambda: monkeypatch.setattr(Trainer, "to_tensor", lambda _, o: reads(o))),
    ):
        fn = getattr(trainer, name)
        step = fz.capture(fn, audit=False)
        for i in range(16):
            if i == 8:
                assert step.stats.replays >= 5
                replace()
            assert bits(step(_array(i))) == bits(fn(_array(i))), (name, i)


def test_which_arrays_helpers_convert():
    trainer: Any = Trainer()
    assert converted_arrays(Trainer.by_method, trainer).arrays == {ConvertedArray("obs")}
    assert not converted_arrays(Trainer.by_method).arrays  # of any object
    trainer.to_tensor = len
    assert not converted_arrays(Trainer.by_method, trainer).arrays

    def of_two_keys(batch: Any) -> Any:
        return _obs_of(batch), torch.as_tensor(batch["act"]), batch["other"][0]

    arrays = {ConvertedArray("batch", "obs"), ConvertedArray("batch", "act")}
    assert converted_arrays(of_two_keys).arrays == arrays

    def read_too(batch: Any) -> Any:
        return _obs_of(batch), batch["obs"][0]

    assert not converted_arrays(read_too).arrays


def test_arrays_that_share_memory_are_constants():
    step = fz.capture(_two, audit=False)
    for i in range(8):
        memory, twin = _array(i), _array(i)
        try:
            found = step(memory[:2], memory[1:])
        except fz.errors.FunctionalizeError:
            break
        assert bits(found) == bits(_two(twin[:2], twin[1:]))
    assert not step.stats.replays


def test_parts_of_one_array_that_do_not_overlap_are_inputs():
    step = fz.capture(_two, audit=False)
    for i in range(8):
        memory, twin = _array(i), _array(i)
        assert bits(step(memory[:1], memory[1:])) == bits(_two(twin[:1], twin[1:]))
        assert memory.tolist() == twin.tolist()
    assert step.stats.replays >= 5


def _read_only(i: int) -> Any:
    array = _array(i)
    array.flags.writeable = False
    return array


def _mapped(i: int) -> Any:
    return np.frombuffer(_array(i).tobytes()).reshape(3, 4)


MEMORIES = {
    "read-only": _read_only,
    "bytes": _mapped,
    "bytearray": lambda i: np.frombuffer(bytearray(_array(i).tobytes())).reshape(3, 4),
    "broadcast": lambda i: np.broadcast_to(_array(i)[0], (3, 4)),
    "strided": lambda i: np.lib.stride_tricks.as_strided(_array(i), (3, 4), (32, 8)),
    "tensor.numpy()": lambda i: torch.from_numpy(_array(i)).clone().numpy(),
    "part of a tensor": lambda i: torch.from_numpy(_array(i)).repeat(2, 1)[1:4].numpy(),
    "np.asarray(tensor)": lambda i: np.asarray(torch.from_numpy(_array(i)).clone()),
}
_MAY_BE_WRITTEN = ("bytearray", "strided", "tensor.numpy()", "part of a tensor")


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", MEMORIES)
def test_arrays_of_other_memory_are_inputs(name):
    for fn in (from_numpy, copied, *((written,) if name in _MAY_BE_WRITTEN else ())):
        step = fz.capture(fn, audit=False)
        assert _results(step, MEMORIES[name], 8) == _results(fn, MEMORIES[name], 8)
        assert step.stats.captures == 1 and step.stats.replays >= 5


def test_two_arrays_of_parts_of_one_tensor():
    def make(i: int) -> list[Any]:
        whole = torch.from_numpy(_array(i)).clone()
        return [whole[:1].numpy(), whole[1:].numpy()]

    step = fz.capture(_two, audit=False)
    for i in range(8):
        arrays, twins = make(i), make(i)
        assert bits(step(*arrays)) == bits(_two(*twins))
        assert arrays[0].tolist() == twins[0].tolist()
    assert step.stats.replays >= 5


def test_an_array_on_the_memory_of_a_parameter_that_the_step_writes():
    """Eager reads what it has written: the array is a constant."""

    def train(model: nn.Linear, obs: Any) -> Any:
        x = torch.as_tensor(obs)
        with torch.no_grad():
            model.weight += 1
        return (x * 2).sum()

    for of in (lambda t: t.numpy(), lambda t: t[:1].numpy(), np.from_dlpack):
        model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
        twin.load_state_dict(model.state_dict())
        step = fz.capture(lambda obs, model=model: train(model, obs), audit=False)
        for _ in range(8):
            array, other = of(model.weight.detach()), of(twin.weight.detach())
            assert bits(step(array)) == bits(train(twin, other))
        assert torch.equal(model.weight, twin.weight)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_an_array_on_the_memory_of_a_tensor_is_a_constant():
    weight = torch.ones(3, 4, dtype=torch.float64)
    step = fz.capture(from_numpy, audit=False)
    for array in (weight.numpy(), weight[:2].numpy(), np.from_dlpack(weight)):
        for _ in range(4):
            assert bits(step(array)) == bits(from_numpy(array))


def test_an_array_that_is_returned_is_that_of_the_call() -> None:
    model = torch.nn.Linear(4, 2)

    def step(x: Tensor, w: Any) -> Any:
        return model(x).sum().detach(), w

    captured = fz.capture(step, audit=False, allowance=None)
    first, second = np.ones(3), np.ones(3)
    for i in range(8):
        given = first if i < 5 else second
        _, found = captured(torch.ones(2, 4), given)
        assert found is given
    assert captured.stats.replays >= 6


@pytest.mark.parametrize("in_state", [False, True], ids=["argument", "state"])
def test_arrays_that_lie_otherwise_are_others(in_state: bool) -> None:
    held: dict[str, Any] = {"w": None}

    def step(x: Tensor, w: Any) -> Any:
        return x * float((held["w"] if in_state else w).strides[0])

    captured = fz.capture(step, audit=False, allowance=None)
    for i in range(9):
        held["w"] = np.arange(6.0).reshape(2, 3).copy("F" if i % 3 == 2 else "C")
        given = None if in_state else held["w"]
        assert captured(torch.ones(1), given).item() == held["w"].strides[0]
    assert captured.stats.replays >= 3
