"""`torch.compile` inside a captured step: what is compiled is recorded, and runs, as it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import eval_frame as frames

import functionalize as fz


class Counting:
    """A backend that counts its graphs and how often they run."""

    def __init__(self) -> None:
        self.compiled = self.ran = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return gm.forward(*args)

        return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(F.gelu(self.a(x))))


def build(compiled: Counting | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    block = Block()
    if compiled is not None:
        block.compile(backend=compiled, fullgraph=True)
    model = nn.Sequential(block, nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x[:, :2])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batches(n: int = 6) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=g) for _ in range(n)]


def test_a_compiled_block_is_recorded_as_it_is_written() -> None:
    backend = Counting()
    model, optimizer = build(backend)
    twin, twin_optimizer = build(None)
    step, eager = fz.capture(make_step(model, optimizer)), make_step(twin, twin_optimizer)
    for x in batches():
        assert torch.equal(step(x), eager(x))
    assert step.stats.replays >= 3
    assert (backend.compiled, backend.ran) == (0, 0)
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    plain = fz.capture(make_step(*build(None)))
    for x in batches():
        plain(x)
    text = [s.program.print_readable(print_output=False) for s in (step, plain)]
    assert text[0] == text[1]


def test_code_compiled_before_is_not_run_while_recording_and_is_after() -> None:
    backend = Counting()
    model, optimizer = build(backend)
    (first, *rest) = batches()
    model(first)
    assert (backend.compiled, backend.ran) == (1, 1)
    step = fz.capture(make_step(model, optimizer))
    for x in rest:
        step(x)
    assert step.stats.replays >= 2
    assert (backend.compiled, backend.ran) == (1, 1)
    model(first)
    assert backend.ran == 2


def test_a_compiled_step_is_recorded_as_it_is_written() -> None:
    backend = Counting()
    step = fz.capture(torch.compile(make_step(*build(None)), backend=backend))
    eager = make_step(*build(None))
    for x in batches():
        assert torch.equal(step(x), eager(x))
    assert step.stats.replays >= 3
    assert (backend.compiled, backend.ran) == (0, 0)


def test_other_threads_go_on_compiling() -> None:
    backend = Counting()
    other = torch.compile(lambda x: x.sin() + 1, backend=backend)
    model, optimizer = build(None)
    inner = make_step(model, optimizer)

    def elsewhere() -> None:
        other(torch.ones(3))

    def step(x: Tensor) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return inner(x)

    fz.capture(step)(batches()[0])
    assert (backend.compiled, backend.ran) == (1, 1)


def test_the_frame_hook_is_put_back_after_an_error() -> None:
    original = frames._callback_from_stance

    def step(x: Tensor) -> Tensor:
        assert frames._callback_from_stance is not original
        raise ValueError("stop")

    try:
        fz.capture(step)(torch.ones(1))
    except ValueError:
        pass
    assert frames._callback_from_stance is original
