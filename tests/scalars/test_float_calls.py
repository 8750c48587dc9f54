"""`float(tensor)` in a step: live where code only calls the name, Python's own everywhere else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functionalize as fz
from functionalize.scalars.float_calls import float_scopes

LOSSES = """
import torch

losses, kept = [], {"total": 0.0}


def step(x):
    loss = x.square().mean()
    losses.append(float(loss))
    kept["total"] += float(loss) + float("0.5") + float(2)
    return x * 2
"""
OTHERS = {
    "isinstance": "def helper(x):\n    return isinstance(x, float)\n",
    "type": "class A:\n    def helper(self, x):\n        return type(x) is float\n",
    "attribute": "def helper(x):\n    return float.fromhex(x)\n",
    "mapped": "def helper(x):\n    return list(map(float, x))\n",
    "annotation": "def helper(x):\n    def inner(y: float):\n        return y\n    return inner\n",
    "class": "def helper(x):\n    class A:\n        kind = float\n    return A\n",
}


def module(folder: Path, name: str, source: str) -> Any:
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def same_for(ours: Any, eager: Any, calls: int = 8) -> Any:
    captured = fz.capture(ours.step, on_uncapturable="eager")
    for i in range(calls):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        assert torch.equal(captured(x), eager.step(x))
        assert ours.losses == eager.losses and ours.kept == eager.kept
        assert all(type(n) is float for n in [*ours.losses, *ours.kept.values()])
    assert not hasattr(ours, "float")
    return captured


OPTIONS = "def main(p):\n    p.add_argument('--lr', type=float)\n"


ANNOTATED = """

def scaled(x: float, y: list[float] | None = None) -> float:
    return x


class Kept:
    value: float = 0.0

    @staticmethod
    def of(value: float):
        return value

    @property
    def other(self) -> float:
        return self.value
"""


@pytest.mark.parametrize("more", ["", OPTIONS, ANNOTATED])
def test_floats_of_tensors_are_live(more: str, tmp_path: Path) -> None:
    ours, eager = (module(tmp_path, name, LOSSES + more) for name in ("ours", "eager"))
    captured = same_for(ours, eager)
    assert captured.stats.replays >= 4, captured.explain()


def test_annotations_name_pythons(tmp_path: Path) -> None:
    """Since Python 3.14 they are evaluated when somebody asks: here, while another function has the name."""
    asks = (
        "    seen.append((scaled.__annotations__, Kept.__annotations__, Kept.of.__annotations__))\n"
    )
    source = LOSSES.replace("    loss =", asks + "    loss =", 1) + ANNOTATED
    ours, eager = (module(tmp_path, name, "seen = []\n" + source) for name in ("ours", "eager"))
    same_for(ours, eager)
    assert all(each == eager.seen[0] and each[1] == {"value": float} for each in ours.seen)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="they are evaluated where they are written")
def test_annotations_that_cannot_be_evaluated_keep_pythons(tmp_path: Path) -> None:
    ours = module(tmp_path, "ours", LOSSES + "\n\ndef scaled(x: float, y: Missing): ...\n")
    assert float_scopes([ours.step]) == ()
    hidden = LOSSES + ANNOTATED + "\n\nhold = [scaled]\ndel scaled\n"
    assert float_scopes([module(tmp_path, "hidden", hidden).step]) == ()


def test_audited_calls_have_them_too(tmp_path: Path) -> None:
    ours, eager = (module(tmp_path, name, LOSSES) for name in ("ours", "eager"))
    captured = fz.capture(ours.step, audit=2)
    for i in range(12):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        assert torch.equal(captured(x), eager.step(x)) and ours.losses == eager.losses
    assert captured.stats.audits >= 2 and not captured.stats.audit_failures, captured.explain()


@pytest.mark.parametrize("name", OTHERS)
def test_a_module_that_uses_the_name_otherwise_keeps_pythons(name: str, tmp_path: Path) -> None:
    ours, eager = (module(tmp_path, n, LOSSES + "\n\n" + OTHERS[name]) for n in ("ours", "eager"))
    assert float_scopes([eager.step]) == ()
    assert same_for(ours, eager).stats.replays == 0


def test_code_without_a_file_keeps_pythons() -> None:
    scope: dict[str, Any] = {"__name__": "script"}
    exec(LOSSES, scope)
    assert float_scopes([scope["step"]]) == ()


def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    first = module(tmp_path, "ours", LOSSES)
    assert len(float_scopes([first.step])) == 1
    again = module(tmp_path, "ours", LOSSES + "\n\n" + OTHERS["isinstance"])
    assert float_scopes([again.step]) == ()


def test_a_name_of_the_users_own_is_kept(tmp_path: Path) -> None:
    own = module(tmp_path, "own", LOSSES + "\n\nfloat = round\n")
    assert float_scopes([own.step]) == ()


def test_an_error_in_the_step_removes_it(tmp_path: Path) -> None:
    ours = module(tmp_path, "ours", LOSSES.replace("x * 2", "x * 2 if float(x[0]) < 9 else 1 / 0"))
    captured = fz.capture(ours.step)
    captured(torch.ones(4))
    with pytest.raises(ZeroDivisionError):
        captured(torch.full((4,), 9.0))
    assert not hasattr(ours, "float")


FLOATS = """
import torch


def floats(x):
    found = []
    for value in (
        lambda: float(x.sum()),
        lambda: float(x.sum() > 0),
        lambda: float(x.sum().long()),
        lambda: float(torch.tensor([x.sum()])),
        lambda: float(x),
        lambda: float(),
        lambda: float("nan"),
        lambda: float(x.sum() * 1j),
    ):
        try:
            found.append(repr(value()))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
"""


def test_every_argument_is_as_in_eager(tmp_path: Path) -> None:
    x, floats = torch.tensor([1.5, 2.0]), module(tmp_path, "floats", FLOATS).floats
    captured = fz.capture(lambda y: (y * 2, floats(y)), on_uncapturable="eager")
    assert len(float_scopes([floats])) == 1
    for _ in range(4):
        assert captured(x)[1] == floats(x)
