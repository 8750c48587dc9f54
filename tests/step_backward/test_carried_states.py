"""Hidden states that a captured forward (`backward=True`) leaves for its next call: refused by name, with an edit."""

from __future__ import annotations

import dataclasses
import re
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError

pytestmark = pytest.mark.usefixtures("ample_allowance")


@dataclasses.dataclass
class Hidden:
    h: Tensor
    c: Tensor


Change = Callable[[Any, Tensor, Tensor], None]


class Cell(nn.Module):
    """A recurrent cell that keeps its states. opened: both of them. change: keeps other ones."""

    def __init__(self, state: Any, opened: Callable[[Any], Any], change: Change) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 1)
        self.state, self.opened, self.change = state, opened, change

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x, tuple(each.clone() for each in self.opened(self.state)))
        self.change(self, h.detach(), c.detach())
        result: Tensor = self.head(h)
        return result


def _one(m: Any, h: Tensor, c: Tensor) -> None:
    m.state = torch.cat([h, c], 1)


def _tuple(m: Any, h: Tensor, c: Tensor) -> None:
    m.state = h, c


def _list(m: Any, h: Tensor, c: Tensor) -> None:
    m.state = [h, c]


def _dict(m: Any, h: Tensor, c: Tensor) -> None:
    m.state = {"h": h, "c": c}


def _in_place(m: Any, h: Tensor, c: Tensor) -> None:
    m.state["h"], m.state["c"] = h, c


def _record(m: Any, h: Tensor, c: Tensor) -> None:
    m.state = Hidden(h, c)


def _namespace(m: Any, h: Tensor, c: Tensor) -> None:
    m.state.h, m.state.c = h, c


def _deque(m: Any, h: Tensor, c: Tensor) -> None:
    m.state.extend([h, c])


def _written(m: Any, h: Tensor, c: Tensor) -> None:
    """What the messages propose."""
    with torch.no_grad():
        if isinstance(m.state, Tensor):
            m.state.copy_(torch.cat([h, c], 1))
            return
        old_h, old_c = m.opened(m.state)
        old_h.copy_(h)
        old_c.copy_(c)


def _z() -> Tensor:
    return torch.zeros(2, 4)


def _by_name(state: Any) -> tuple[Tensor, Tensor]:
    return state.h, state.c


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Change, str]] = {
    "one": (lambda: torch.zeros(2, 8), lambda s: (s[:, :4], s[:, 4:]), _one, "model.state"),
    "tuple": (lambda: (_z(), _z()), lambda s: s, _tuple, "model.state_0"),
    "list": (lambda: [_z(), _z()], tuple, _list, "model.state_0"),
    "dict": (lambda: {"h": _z(), "c": _z()}, lambda s: (s["h"], s["c"]), _dict, "model.state.h"),
    "dict in place": (
        lambda: {"h": _z(), "c": _z()},
        lambda s: (s["h"], s["c"]),
        _in_place,
        "model.state.h",
    ),
    "dataclass": (lambda: Hidden(_z(), _z()), _by_name, _record, "model.state.h"),
    "namespace": (
        lambda: types.SimpleNamespace(h=_z(), c=_z()),
        _by_name,
        _namespace,
        "model.state.h",
    ),
    "deque": (lambda: deque([_z(), _z()], 2), tuple, _deque, "model.state_0"),
}


def _run(case: str, change: Change, capture: Callable[[Any], Any], calls: int = 12) -> Any:
    torch.manual_seed(0)
    make, opened, _, _ = CASES[case]
    model = Cell(make(), opened, change)
    optimizer = torch.optim.SGD([*model.cell.parameters(), *model.head.parameters()], 0.1)
    forward, found = capture(model), []
    for _ in range(calls):
        loss = forward(torch.randn(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state = model.state
        found += [loss.detach(), model.cell.weight_hh.detach().clone()]
        found += [each.clone() for each in model.opened(state)]
    return found, forward


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name_with_an_edit_that_works(case: str) -> None:
    *_, change, name = CASES[case]
    with pytest.raises(UncapturableError) as raised:
        _run(case, change, lambda m: fz.capture(m, backward=True, on_uncapturable="raise"))
    message = str(raised.value)
    assert f"`{name}`" in message and "captured forward" in message, message
    assert "write into it (`with torch.no_grad(): tensor.copy_(new)`)" in message, message
    assert re.search(rf"{re.escape(__file__)}:\d+, in {change.__name__}: ", message), message

    def captured(model: Any) -> Any:
        return fz.capture(model, backward=True, on_uncapturable="raise")

    (expected, _), (found, forward) = (
        _run(case, _written, lambda m: m),
        _run(case, _written, captured),
    )
    assert all(map(torch.equal, expected, found))
    assert forward.stats.replays >= 6, forward.explain()


@pytest.mark.parametrize("case", CASES)
def test_as_eager_where_it_runs_eagerly(case: str) -> None:
    change = CASES[case][2]
    expected, _ = _run(case, change, lambda m: m)
    found, forward = _run(case, change, lambda m: fz.capture(m, backward=True))
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    assert not forward.stats.replays
