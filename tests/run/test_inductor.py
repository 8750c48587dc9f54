"""`compile="inductor"`: like eager but for the last bits, whatever it leaves to the boxed runner."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize._compat.compilers import _with_strides
from functionalize.errors import CompileError, LoadError, UncapturableError
from functionalize.run import inductor
from tests.ranks import run_on_ranks
from tests.steps import make_step

pytestmark = pytest.mark.long

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor needs a C++ compiler"
)
Step = Callable[[Tensor], Tensor]


def one_thread() -> Any:
    """No pool of processes is left behind."""
    from torch._inductor import config

    return config.patch(compile_threads=1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.relu(self.linear(x)) * 2, 0.2)


def twin(sharded: bool = False) -> tuple[nn.Module, Step]:
    """Three layers with dropout, and default AdamW, whose step count Python reads."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    step = make_step(model, optimizer)

    return model, step


def train(step: Step, calls: int = 7) -> tuple[list[float], Tensor]:
    """The losses, and the state of the generator, which dropout moves."""
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return [step(torch.randn(4, 8)).item() for _ in range(calls)], torch.get_rng_state()


def trained() -> dict[str, Any]:
    """What eager FSDP2 and a compiled twin came to, and how the twin's program is run."""
    (model, eager), (other, ours) = twin(sharded=True), twin(sharded=True)
    step = fz.capture(ours, passes="reinplace", compile="inductor")
    with one_thread():
        (losses, generator), (our_losses, our_generator) = train(eager), train(step)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    plan = inductor.plan_of(step.program, inductor.Options())
    return {
        "losses": (our_losses, losses),
        "generator": torch.equal(generator, our_generator),
        "shards": [(b.to_local().tolist(), a.to_local().tolist()) for a, b in pairs],  # type: ignore[attr-defined]
        "replays": step.stats.replays,
        "explained": step.explain(),
        "stage": step.program.stage,
        "reused": plan.regions - plan.kinds,
        "outside": sorted({str(n.target) for n in plan.graph.nodes if n.op == "call_function"}),
    }


@needs_compiler
def test_a_step_on_two_ranks_is_like_eager_and_draws_the_same_masks() -> None:
    for seen in run_on_ranks(trained, world=2):
        torch.testing.assert_close(*seen["losses"], rtol=1e-5, atol=1e-6)
        assert seen["generator"]
        for ours, eager in seen["shards"]:
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
        assert seen["replays"] >= 4
        assert "run by inductor" in seen["explained"]
        assert seen["stage"] == "INPLACE"
        assert seen["reused"] >= 1
        outside = " ".join(seen["outside"])
        for op in ("_local_scalar_dense", "all_gather_into_tensor", "bernoulli", "addcdiv_"):
            assert op in outside
        for op in ("aten.mm", "aten.relu"):
            assert op not in outside


def test_collectives_may_be_inside() -> None:
    """Nothing is compiled: which nodes would be."""
    for inside, outside in run_on_ranks(placed, world=2):
        assert inside == 0
        assert outside > 4


def placed() -> tuple[int, int]:
    """How many collectives are left between regions, if they may go in, and if not."""
    step = fz.capture(twin(sharded=True)[1])
    train(step)
    program, counts = step.program, []
    program.describe()
    made, inductor.inductor_region = inductor.inductor_region, lambda *_: tuple
    try:
        for collectives in (True, False):
            plan = inductor.plan_of(program, inductor.Options(collectives=collectives, least=1))
            counts.append(sum("_c10d" in str(n.target) for n in plan.graph.nodes))
    finally:
        inductor.inductor_region = made
    return counts[0], counts[1]


@needs_compiler
def test_a_program_is_saved_with_its_runner(tmp_path: Path) -> None:
    program = fz.functions.trace(lambda x: (x.sin() + 1).exp() * 2, torch.randn(8))
    program.runner = inductor.inductor
    program.save(tmp_path / "p.fzp")
    loaded = fz.load(tmp_path / "p.fzp")
    assert loaded.runner is inductor.inductor
    x = torch.randn(8)
    with one_thread():
        torch.testing.assert_close(loaded(x), (x.sin() + 1).exp() * 2)


def test_a_step_is_saved_with_its_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def interpreted(graph: Any, like: Any, results: Any) -> Any:
        made.append(graph)
        module = torch.fx.GraphModule({}, graph)
        return lambda inputs: module(*inputs)

    monkeypatch.setattr(inductor, "inductor_region", interpreted)
    step = fz.capture(twin()[1], compile="inductor")
    train(step)
    step.save(tmp_path / "s.fzp")
    other = fz.capture(twin()[1])
    made.clear()
    other.load(tmp_path / "s.fzp")
    assert made  # compiled while it was loaded
    assert other.program.runner is inductor.inductor
    monkeypatch.setattr(inductor, "inductor_region", lambda *_: 1 / 0)
    with pytest.raises(
        LoadError, match="holds a program that cannot be compiled here: compile='induc"
    ):
        fz.capture(twin()[1]).load(tmp_path / "s.fzp")


@pytest.mark.parametrize("strides", [(1, 3), (4, 1)])
def test_results_are_laid_out_as_the_op_would_have(strides: tuple[int, int]) -> None:
    t = torch.randn(3, 4)
    laid_out = _with_strides(t, torch.empty_strided((3, 4), strides))
    assert laid_out.stride() == strides and torch.equal(laid_out, t)
    assert (laid_out is t) == (strides == t.stride())
    with pytest.raises(RuntimeError, match=r"has strides \(4, 1\), and cannot have \(8, 1\)"):
        _with_strides(t, torch.empty_strided((3, 4), (8, 1)))


# -- refusals ----------------------------------------------------------------------------------------


class InvalidCxxCompiler(RuntimeError):
    """As Inductor's."""


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RuntimeError("no lowering\nat all"), "RuntimeError: no lowering\n  run the step without"),
        (InvalidCxxCompiler("none of g++"), "none of g++\n  install a C++ compiler"),
    ],
)
def test_what_cannot_be_compiled_is_told_and_no_step_is_lost(
    error: Exception, advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(inductor, "inductor_region", fails)
    eager, ours = twin()[1], fz.capture(twin()[1], compile="inductor", on_uncapturable="raise")
    torch.manual_seed(1)
    x = torch.randn(4, 8)
    calls = 0
    with pytest.raises(CompileError) as raised:
        while calls < 5:
            torch.manual_seed(calls)
            assert torch.equal(ours(x), _seeded(eager, x, calls))
            calls += 1
    assert calls >= 2
    assert "compile='inductor' cannot compile the " in str(raised.value)
    assert advice in str(raised.value)
    assert "cannot be captured" in caplog.text


def _seeded(step: Step, x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return step(x)


def test_it_runs_eagerly_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "inductor_region", lambda *_: 1 / 0)
    step = fz.capture(twin()[1], compile="inductor", on_uncapturable="eager")
    train(step)
    assert step.stats.replays == 0 and step.stats.eager > 0


def test_an_unknown_name_is_told_before_anything_runs() -> None:
    with pytest.raises(
        ValueError, match="compile is one of None, 'inductor', 'cudagraphs', not 'x'"
    ):
        fz.capture(lambda x: x, compile="x")


def test_errors_are_ours() -> None:
    assert issubclass(CompileError, fz.errors.FunctionalizeError)
    assert not issubclass(CompileError, UncapturableError)
