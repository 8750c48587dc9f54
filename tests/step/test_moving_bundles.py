"""Containers of tensors that a step leaves for its next call, as recurrent models carry their hidden states."""

from __future__ import annotations

import copy
import dataclasses
import re
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import functionalize as fz
from functionalize.errors import UncapturableError

pytestmark = pytest.mark.usefixtures("ample_allowance")


class Carried(NamedTuple):
    h: Tensor
    c: Tensor


@dataclasses.dataclass
class Record:
    h: Tensor
    c: Tensor


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("c", "h")
    h: Tensor
    c: Tensor


class Keeper:
    state: Any = None


def _zeros() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 4), torch.zeros(2, 4)


PACKS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda h, c: (h, c), lambda s: s),
    "named": (Carried, lambda s: (s.h, s.c)),
    "layers": (lambda h, c: ((h, c), (c, h)), lambda s: s[0]),
    "with numbers": (lambda h, c: (h, None, "lstm", 3, c), lambda s: (s[0], s[4])),
    "list": (lambda h, c: [h, c], tuple),
    "dict": (lambda h, c: {"h": h, 1: c}, lambda s: (s["h"], s[1])),
    "dataclass": (Record, lambda s: (s.h, s.c)),
    "slots": (Slotted, lambda s: (s.h, s.c)),
    "namespace": (
        lambda h, c: types.SimpleNamespace(h=h, c=c, name="lstm"),
        lambda s: (s.h, s.c),
    ),
    "nested": (
        lambda h, c: {"layers": [Record(h, c), (h + c, None)], "n": 2},
        lambda s: (s["layers"][0].h, s["layers"][0].c),
    ),
}
PLACES: dict[str, Callable[[], tuple[Any, Callable[[], Any], Callable[[Any], None]]]] = {}


def place(name: str) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        PLACES[name] = make
        return make

    return add


@place("module")
def _in_module() -> Any:
    module = nn.Module()
    return module, lambda: module.state, lambda value: setattr(module, "state", value)


@place("object")
def _in_object() -> Any:
    keeper = Keeper()
    return keeper, lambda: keeper.state, lambda value: setattr(keeper, "state", value)


@place("namespace")
def _in_namespace() -> Any:
    space = types.SimpleNamespace(state=None)
    return space, lambda: space.state, lambda value: setattr(space, "state", value)


@place("dict")
def _in_dict() -> Any:
    table: dict[str, Any] = {}
    return table, lambda: table["state"], lambda value: table.__setitem__("state", value)


@place("list")
def _in_list() -> Any:
    items = [None]
    return items, lambda: items[0], lambda value: items.__setitem__(0, value)


@place("closure")
def _in_closure() -> Any:
    state: Any = None

    def put(value: Any) -> None:
        nonlocal state
        state = value

    return None, lambda: state, put


def run(
    pack: str, where: str, capture: Callable[[Any], Any], calls: int = 24
) -> tuple[list[Any], Any]:
    """Losses, states and weights of some calls; the caller sets the state back at one, and to another size later."""
    torch.manual_seed(0)
    (packed, opened), (_, get, put) = PACKS[pack], PLACES[where]()
    cell, head = nn.LSTMCell(3, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.1)
    put(packed(*_zeros()))

    def step(x: Tensor) -> Tensor:
        h, c = cell(x, opened(get()))
        loss = head(h).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        put(packed(h.detach(), c.detach()))
        return loss.detach()

    each, found = capture(step), []
    for i in range(calls):
        if i == 9:
            put(packed(torch.ones(2, 4), torch.ones(2, 4)))
        if i == 15:
            put(packed(torch.ones(3, 4), torch.ones(3, 4)))
        found.append(each(torch.randn(2 if i < 15 else 3, 3)))
        kind: Any = type(get())
        found += [kind, *(t.clone() for t in opened(get())), head.weight.detach().clone()]
        assert all(not t.requires_grad for t in opened(get()))
    return found, each


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a is b


@pytest.mark.parametrize(
    ("pack", "where"),
    [
        *[("tuple", where) for where in PLACES],
        *[(pack, where) for pack in PACKS if pack != "tuple" for where in ("module", "object")],
        *[("list", where) for where in ("namespace", "dict", "list", "closure")],
    ],
)
def test_hidden_states(pack: str, where: str) -> None:
    expected, _ = run(pack, where, lambda step: step)
    found, step = run(pack, where, fz.capture)
    assert len(expected) == len(found) and all(map(_equal, expected, found))
    assert step.stats.replays > 12
    assert step.stats.audits and not step.stats.audit_failures


def test_first_state_is_none() -> None:
    """The first call finds no state, nor does a later one: `nn.LSTM` makes it."""

    def losses(capture: Callable[[Any], Any]) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model, keeper = nn.LSTM(3, 4, batch_first=True), Keeper()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            y, state = model(x, keeper.state)
            loss: Tensor = y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keeper.state = tuple(t.detach() for t in state)
            return loss.detach()

        each, found = capture(step), []
        for i in range(24):
            if i in (11, 18):
                keeper.state = None
            found.append(each(torch.randn(2, 5, 3)))
        return found, each

    (expected, _), (found, step) = losses(lambda step: step), losses(fz.capture)
    assert all(map(torch.equal, expected, found))
    assert step.stats.replays > 12


def _carried(change: Callable[[Any, Tensor], None]) -> tuple[Any, Any]:
    """A captured step that changes a namespace, and the namespace."""
    space = types.SimpleNamespace(a=_zeros(), b=_zeros())

    def step(x: Tensor) -> Tensor:
        change(space, x)
        return space.a[0].sum()

    return fz.capture(step, on_uncapturable="raise"), space


@dataclasses.dataclass
class _Held:
    """What a caller keeps beside the state of a step."""

    space: Any
    kept: list[Any] = dataclasses.field(default_factory=list)


def _kept(held: _Held, x: Tensor) -> Any:
    held.space.a = {"h": x, "inner": [x + 1]}
    held.kept.append(held.space.a["inner"])


def _moved(held: _Held, x: Tensor) -> Any:
    held.space.b, held.space.a = held.space.a, [held.space.a[0] + x, held.space.a[1]]


def _exchanged(held: _Held, x: Tensor) -> Any:
    held.space.a, held.space.b = held.space.b, held.space.a
    held.space.a[0] = held.space.a[0] + x


def _changed(held: _Held, x: Tensor) -> Any:
    if float(x[0]) > 0:
        held.space.a = [held.space.a[0] + x, held.space.a[1]]
    else:
        held.space.a[0] = held.space.a[1] * 2


def _other_keys(held: _Held, x: Tensor) -> Any:
    n = getattr(held.space, "n", 0)
    held.space.a, held.space.n = [held.space.a[0] + x, *[held.space.a[1]] * (n % 3 + 1)], n + 1


REFUSED = {
    _other_keys: r"`.*a` is a list of \d, was a list of \d: .* keep other things that change",
    _kept: "leaves in `.*a` a dict that something else holds, too",
    _moved: "leaves in `.*b` a list that something else holds, too",
    _exchanged: "a list that something else holds, too|changes the list in",
    _changed: "changes the list in `.*a` in place, where earlier calls put another one",
}


def _runs(change: Any, capture: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """What each of some calls leaves, and which objects are one."""
    torch.manual_seed(0)
    space = types.SimpleNamespace(a=[torch.zeros(2), torch.ones(2)], b=[torch.ones(2)] * 2)
    held = _Held(space)
    step, found = capture(lambda x: change(held, x)), []
    for _ in range(24):
        result = step(torch.randn(2))
        a, b = space.a, space.b
        found += [a is b, result is a, any(each is a for each in held.kept), type(a)]
        tree = [a, b, result, held.kept]
        found += [t.clone() for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
    return found, step


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_list_that_something_else_holds_is_refused(change: Any) -> None:
    """A replay would leave another list there: what holds the first one would not see it change."""
    (expected, _), (found, step) = _runs(change, lambda s: s), _runs(change, fz.capture)
    assert len(expected) == len(found) and all(map(_equal, expected, found))
    (error,) = step.core.refused.values()
    assert re.search(REFUSED[change], str(error)), str(error)


def _ring(held: _Held, x: Tensor) -> Any:
    held.space.a = [*held.space.a[1:], held.space.a[0] * 0.5 + x]


def _ring_in_place(held: _Held, x: Tensor) -> Any:
    held.space.a.append(held.space.a[0] * 0.5 + x)
    held.space.a.pop(0)


def _pointer(held: _Held, x: Tensor) -> Any:
    n = getattr(held.space, "n", 0)
    held.space.a[n % 2], held.space.n = held.space.a[(n + 1) % 2] + x, n + 1


def _copies(held: _Held, x: Tensor) -> Any:
    held.space.a = [held.space.a[1] + x, held.space.a[0] * 2]
    held.space.b = [*held.space.a]


def _crossed(held: _Held, x: Tensor) -> Any:
    a, b = held.space.a, held.space.b
    held.space.a, held.space.b = [b[0] + x, b[1]], [a[0], a[1] * 1.1]


def _emptied(held: _Held, x: Tensor) -> Any:
    (h, c), held.space.a = held.space.a, None
    held.space.a = [c + x, h * 2]


@pytest.mark.parametrize(
    "change",
    [_ring, _ring_in_place, _pointer, _copies, _crossed, _emptied],
    ids=lambda change: change.__name__,
)
def test_tensors_change_places(change: Any) -> None:
    (expected, _), (found, step) = _runs(change, lambda s: s), _runs(change, fz.capture)
    assert len(expected) == len(found) and all(map(_equal, expected, found))
    assert step.stats.replays > 8, step.explain()
    assert step.stats.audits and not step.stats.audit_failures


class Rings(torch.optim.Optimizer):
    """An optimizer that keeps gradients of some steps in a container for each parameter."""

    def __init__(self, params: Any, change: Callable[[dict[str, Any], Tensor], None]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.change = change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["ring"] = [torch.zeros_like(p) for _ in range(3)]
                    state["n"], state["m"] = 0, {"first": torch.zeros_like(p)}
                self.change(state, p.grad)
                p.add_(sum(state["ring"]) / 3 + state["m"]["first"], alpha=-group["lr"])


def _new_list(state: dict[str, Any], grad: Tensor) -> None:
    state["ring"] = [*state["ring"][1:], grad.clone()]


def _first_out(state: dict[str, Any], grad: Tensor) -> None:
    state["ring"].append(grad.clone())
    if len(state["ring"]) > 5:
        state["ring"].pop(0)


def _by_pointer(state: dict[str, Any], grad: Tensor) -> None:
    state["ring"][state["n"] % 3] = grad.clone()
    state["n"] += 1


def _new_dict(state: dict[str, Any], grad: Tensor) -> None:
    state["m"] = {"first": state["m"]["first"] * 0.9 + grad}


def _in_dict_of_state(state: dict[str, Any], grad: Tensor) -> None:
    state["m"]["first"] = state["m"]["first"] * 0.9 + grad


@pytest.mark.parametrize(
    "change",
    [_new_list, _first_out, _by_pointer, _new_dict, _in_dict_of_state],
    ids=lambda change: change.__name__,
)
def test_containers_in_optimizer_state(change: Any) -> None:
    def run(capture: Callable[[Any], Any]) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = Rings(model.parameters(), change)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        each, found = capture(step), []
        for i in range(70):
            if i == 30 and change is not _by_pointer:  # other lists, with the same contents
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            found += [each(torch.randn(2, 4)), model.weight.detach().clone()]
        return found, each

    (expected, _), (found, step) = run(lambda s: s), run(fz.capture)
    assert all(map(torch.equal, expected, found))
    assert step.stats.replays > 40, step.explain()
    assert not step.stats.audit_failures


def test_state_of_call_before_is_kept() -> None:
    """Replays leave what the caller has kept of earlier calls as it was, and alive no longer than eager."""

    def change(space: Any, x: Tensor) -> None:
        space.a = (space.a[0] + x, space.a[1] + 1)

    step, space = _carried(change)
    kept = []
    for _ in range(16):
        step(torch.ones(2, 4))
        kept.append(space.a)
    assert step.stats.replays > 8
    assert [int(h[0, 0]) for h, _ in kept] == [int(c[0, 0]) for _, c in kept] == [*range(1, 17)]
    last = weakref.ref(space.a[0])
    kept.clear()
    step(torch.ones(2, 4))
    assert last() is None


def test_views_share_memory_as_in_eager() -> None:
    def change(space: Any, x: Tensor) -> None:
        both = torch.stack([space.a[0] + x, space.a[1] + 1])
        space.a = (both[0], both[1])

    step, space = _carried(change)
    for _ in range(12):
        step(torch.ones(2, 4))
        first, second = (t.untyped_storage().data_ptr() for t in space.a)
        assert first == second
    assert step.stats.replays > 6


@pytest.mark.parametrize("is_tuple", [True, False], ids=["tuple", "two attributes"])
def test_one_tensor_twice_only_sometimes(is_tuple: bool) -> None:
    """The caller puts one tensor in two places: the program of that call is no program of the next one."""
    space = types.SimpleNamespace(pair=(torch.zeros(2), torch.ones(2)), a=torch.zeros(2))
    space.b = torch.ones(2)

    def step(x: Tensor) -> Tensor:
        a, b = space.pair if is_tuple else (space.a, space.b)
        result = ((a + x) * b).sum()
        if is_tuple:
            space.pair = (a + x, b * 1.1)
        else:
            space.a, space.b = a + x, b * 1.1
        return result

    def run(step: Any) -> list[Tensor]:
        space.pair, space.a, space.b = (
            (torch.zeros(2), torch.ones(2)),
            torch.zeros(2),
            torch.ones(2),
        )
        found = []
        for i in range(24):
            if i in (8, 15):
                space.a = space.b = torch.full((2,), 2.0)
                space.pair = (space.a, space.a)
            found.append(step(torch.full((2,), float(i))))
        return found

    captured = fz.capture(step, audit=False)
    assert all(map(torch.equal, run(step), run(captured)))
    assert captured.stats.replays > 8


def test_numbers_in_tuple_are_guarded() -> None:
    keeper = Keeper()
    keeper.state = (torch.zeros(2), 2)

    def step(x: Tensor) -> Tensor:
        h, scale = keeper.state
        keeper.state = (h * scale + x, scale)
        return keeper.state[0].sum()

    captured, twin = fz.capture(step), torch.zeros(2)
    for i in range(24):
        if i == 12:
            keeper.state = (keeper.state[0], 3)
        twin = twin * keeper.state[1] + 1
        assert torch.equal(captured(torch.ones(2)), twin.sum())
    assert captured.stats.captures == 2 and captured.stats.replays > 12


def test_history_is_refused() -> None:
    keeper, weight = Keeper(), nn.Parameter(torch.ones(2))
    keeper.state = _zeros()[:1]

    def step(x: Tensor) -> Tensor:
        keeper.state = (keeper.state[0].detach() + x.sum() * weight.sum(),)
        return keeper.state[0].sum().detach()

    captured = fz.capture(step, on_uncapturable="raise")
    with pytest.raises(UncapturableError, match="autograd history: detach it"):
        for _ in range(8):
            captured(torch.ones(2))


def test_exception_leaves_state_as_eager(tmp_path: Path) -> None:
    keeper = Keeper()
    keeper.state = _zeros()

    def step(x: Tensor) -> Tensor:
        keeper.state = (keeper.state[0] + x, keeper.state[1] + 1)
        return (keeper.state[0] @ x.T).sum()

    captured = fz.capture(step)
    for i in range(12):
        captured(torch.ones(2, 4))
        assert int(keeper.state[1][0, 0]) == i + 1
    before = keeper.state
    with pytest.raises(RuntimeError):
        captured(torch.ones(3, 4))
    assert keeper.state is before
    captured(torch.ones(2, 4))
    assert int(keeper.state[1][0, 0]) == 13
    captured.save(tmp_path / "step.fzp")
    loaded = fz.capture(step)
    loaded.load(tmp_path / "step.fzp")
    loaded(torch.ones(2, 4))
    assert int(keeper.state[1][0, 0]) == 14 and loaded.stats.replays == 1


def _on_parameter(change: Callable[[Any, Tensor], None], capture: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    weight: Any = model.weight
    weight.scale, weight.count, weight.pair = torch.ones(()), 0, (torch.ones(()), torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        scale, (a, b) = model.weight.scale, model.weight.pair
        loss = (model(x) * scale * a + b).square().mean() * (1 + model.weight.count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        change(model.weight, x)
        return loss.detach()

    each, found = capture(step), []
    for i in range(24):
        if i == 12:
            weight.scale, weight.count = torch.full((), 0.5), 3
            weight.pair = (torch.full((), 0.5), torch.ones(()))
        if i == 18:  # another parameter, with attributes of its own
            old, model.weight = weight, nn.Parameter(weight.detach().clone())
            weight = model.weight
            weight.scale, weight.count, weight.pair = old.scale + 1, old.count, old.pair
            optimizer.param_groups[0]["params"][0] = weight
        found.append(each(torch.randn(2, 3)))
        found += [weight.scale, torch.tensor(weight.count), *weight.pair, weight.detach().clone()]
    return found, each


@pytest.mark.parametrize("is_parameter", [True, False])
def test_tensor_inside_a_wrapper(is_parameter: bool) -> None:
    """A step puts another tensor into a wrapper subclass, as torchao's precomputed scales are put there."""

    def run(capture: Callable[[Any], Any]) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        pair: Any = TwoTensor(torch.ones(3), torch.ones(3))
        if is_parameter:
            model.pair = nn.Parameter(pair, requires_grad=False)
        else:
            model.register_buffer("pair", pair)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            held: Any = model.pair
            loss = (model(x) * held.b).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            held.b = x.detach().abs().amax(0)
            return loss.detach()

        each, found = capture(step), []
        for _ in range(24):
            found += [each(torch.randn(4, 3)), model.pair.b.clone(), model.weight.detach().clone()]
        return found, each

    (expected, _), (found, step) = run(lambda s: s), run(fz.capture)
    assert all(map(torch.equal, expected, found))
    assert step.stats.replays > 10, step.explain()


def test_other_storage_inside_a_wrapper_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("pair", TwoTensor(torch.ones(3), torch.ones(3)))

    def step(x: Tensor) -> Tensor:
        held: Any = model.pair
        result = (model(x) * held.b).sum().detach()
        held.b.data = held.b + 1
        return result

    captured = fz.capture(step, on_uncapturable="raise")
    with pytest.raises(UncapturableError, match=r"gives `.*pair\.b` another storage"):
        for _ in range(8):
            captured(torch.ones(2, 3))


def _scale(weight: Any, x: Tensor) -> None:
    weight.scale = 1 / (1 + x.abs().max())


def _count(weight: Any, x: Tensor) -> None:
    weight.count += 1


def _pair(weight: Any, x: Tensor) -> None:
    weight.pair = (x.mean().sigmoid(), weight.pair[1] + 1)


@pytest.mark.parametrize("change", [_scale, _count, _pair], ids=lambda change: change.__name__)
def test_attributes_of_parameter(change: Any) -> None:
    (expected, _), (found, step) = (_on_parameter(change, c) for c in (lambda s: s, fz.capture))
    assert all(map(torch.equal, expected, found))
    assert step.stats.replays > 10 and not step.stats.audit_failures
