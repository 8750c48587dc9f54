"""`fz.lazy`: what waits, who looks, what is never computed, and what an error or an interruption leaves."""

from __future__ import annotations

import copy
import io
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch import tensor as bound_elsewhere

import functionalize as fz
from functionalize._compat.dispatch import op_overrides
from functionalize.deferral.lazy import Lazy
from functionalize.deferral.runs import Runs
from tests.deferral.eagerly import Empty, image, poisoned, same_as_eager
from tests.faults import Tripwire


@pytest.fixture(autouse=True)
def nothing_is_right_by_chance() -> Any:
    with poisoned():
        yield


def ops(x: Tensor) -> Tensor:
    return (x * 2).sin() + 1


def learned() -> Lazy:
    """A lazy object that has seen the ops of these tests once."""
    lazy = fz.lazy()
    with lazy:
        x = torch.ones(4)
        ops(x).add_(1)
        x.mul_(3)
    return lazy


def pending(lazy: Lazy) -> int:
    stream = lazy._mode._stream
    return 0 if stream is None else stream.ops


# -- who looks -------------------------------------------------------------------------------------

LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y.reshape(-1)[0].item(),
    "bool": lambda y: bool(y[0] > 0),
    "tolist": lambda y: y.tolist(),
    "numpy": lambda y: y.numpy().tolist(),
    "str": lambda y: str(y),
    "deepcopy": lambda y: copy.deepcopy(y),
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "equal": lambda y: torch.equal(y, y),
    "nonzero": lambda y: y.nonzero(),
    "tensor": lambda y: torch.tensor([y[0], y[1]]),
    "storage": lambda y: list(y.untyped_storage()),
    "storage as a list": lambda y: y.untyped_storage().tolist(),
    "typed storage": lambda y: list(y.storage()),
    "dlpack": lambda y: torch.from_dlpack(y),
    "array": lambda y: y.__array__().tolist(),
    "index": lambda y: list(range(int(y.abs()[1]))),
    "format": lambda y: f"{y[0]:.3f}",
    "thread": lambda y: in_thread(lambda: y.clone()),
    "assert": lambda y: torch._assert_async((y == y).all()),
    "to_dlpack": lambda y: torch.from_dlpack(torch.utils.dlpack.to_dlpack(y)),
    "vmap": lambda y: torch.func.vmap(lambda v: v * 2)(y),
    "jacobian": lambda y: torch.func.jacrev(lambda v: (v * v).sum())(y),
}


def in_thread(call: Callable[[], Any]) -> Any:
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", LOOKS)
def test_looks_as_in_eager(name: str) -> None:
    same_as_eager(lambda: [torch.randn(4)], lambda x: LOOKS[name](ops(x)))


def test_looks_by_a_function_that_a_module_has_bound() -> None:
    with learned():
        x = torch.full((4,), 2.0)
        y = ops(x)
        found = bound_elsewhere([y[0], y[1]])
    assert torch.equal(found, ops(torch.full((4,), 2.0))[:2])


@pytest.mark.parametrize("name", ["item", "tolist"])
def test_looks_under_autocast(name: str) -> None:
    """What waits ran into no cast, and runs into none."""

    def call(x: Tensor) -> Any:
        y = (ops(x) @ x) * 2
        with torch.autocast("cpu", torch.bfloat16):
            return LOOKS[name](y), y @ x

    same_as_eager(lambda: [torch.randn(4, 4)], call)


@pytest.mark.parametrize("name", ["tolist", "deepcopy"])
def test_looks_inside_of_a_transform(name: str) -> None:
    def call(x: Tensor) -> Any:
        y = ops(x)

        def inside(v: Tensor) -> Tensor:
            LOOKS[name](y)
            return (v * y).sum()

        return torch.func.vmap(torch.func.grad(inside))(torch.ones(3, 4)), y

    same_as_eager(lambda: [torch.randn(4)], call)


def test_another_thread_has_another_object() -> None:
    lazy = learned()

    def enter() -> Any:
        with (
            pytest.raises(RuntimeError, match="is active in another thread"),
            lazy,
        ):
            pass

    with lazy:
        in_thread(enter)
        y = ops(torch.ones(4))
    assert torch.equal(y, ops(torch.ones(4)))


def test_saves_what_eager_saves() -> None:
    def saved(x: Tensor) -> bytes:
        file = io.BytesIO()
        torch.save({"y": ops(x)}, file)
        file.seek(0)
        return torch.load(file)["y"]

    same_as_eager(lambda: [torch.randn(4)], saved)


def test_an_address_that_was_handed_out() -> None:
    """Whoever has it may write there at any time."""
    import ctypes

    def call(x: Tensor) -> Tensor:
        y = ops(x)
        first = ctypes.cast(y.data_ptr(), ctypes.POINTER(ctypes.c_float))
        z = y * 2
        first[0] = 7.0
        return z + y

    same_as_eager(lambda: [torch.randn(4)], call)


def test_memory_of_numpy() -> None:
    import numpy

    def call() -> Tensor:
        array = numpy.zeros(4, dtype=numpy.float32)
        y = torch.from_numpy(array) * 2
        array += 5
        return y

    same_as_eager(lambda: [], call)


# -- what waits ------------------------------------------------------------------------------------


def test_waits_until_somebody_looks() -> None:
    lazy, x = learned(), torch.ones(4)
    with lazy:
        y = ops(x)
        assert pending(lazy) == 3
        lazy.barrier()
        assert pending(lazy) == 0
    assert torch.equal(y, ops(x))


def test_what_nobody_holds_is_not_computed() -> None:
    lazy = learned()
    x = torch.ones(4)
    with lazy:
        ops(x)
        y = x * 2
        lazy.barrier()
        assert "looked 1 times: lazy.barrier()" in lazy.explain()
        assert torch.equal(y, torch.full((4,), 2.0))
        ops(x)
        lazy.barrier()  # nobody holds anything: nothing runs
        assert "looked 1 times: lazy.barrier()" in lazy.explain()


def test_a_storage_of_which_no_tensor_is_left() -> None:
    lazy = learned()
    with lazy:
        x = torch.ones(4)
        storage = x.untyped_storage()
        x.mul_(3)
        del x
        lazy.barrier()
    assert torch.empty(0).set_(storage).tolist() == [3.0] * 4


def test_a_result_runs_once() -> None:
    lazy, x = learned(), torch.ones(4)
    with lazy:
        x.mul_(3)
        lazy.barrier()
        lazy.barrier()
        x.mul_(3)
    assert x.tolist() == [9.0] * 4


def test_a_program_is_found_by_the_ops_and_by_what_is_held() -> None:
    """`explain` says who looked, which kinds there are, where they begin, and what differs."""
    lazy, x = learned(), torch.ones(4)
    first = len(lazy._runs.kinds())
    with lazy:
        x - 1  # its first call runs at once
        for kind in "aabbacc":
            y = x * 2
            z = y + 1 if kind != "c" else y - 1
            if kind == "b":
                del y
            lazy.barrier()
            assert z.tolist() == [3.0 if kind != "c" else 1.0] * 4
    kinds = lazy._runs.kinds()[first:]
    assert [(kind.runs, kind.replays) for kind in kinds] == [(3, 2), (2, 1), (2, 1)]
    text, (a, b, _) = lazy.explain(), kinds
    assert "looked 7 times: lazy.barrier()" in text
    assert f"kind {a.number}: 2 ops at {__file__}" in text
    assert f"2 runs, 1 by its program; is {a.number}, but other results are held" in text
    assert f"; differs from {b.number} from aten.sub.Tensor on, at {__file__}" in text


def test_the_byte_budget() -> None:
    lazy = fz.lazy(max_bytes=64)
    with lazy:
        for _ in range(3):
            y = [torch.ones(4) * 2 for _ in range(10)]
            assert pending(lazy) <= 4
    assert "the byte budget" in lazy.explain()
    assert y[-1].tolist() == [2.0] * 4


def test_versions_count_as_in_eager() -> None:
    def call(x: Tensor) -> list[int]:
        y = ops(x)
        y.add_(1)
        z = y.view(2, 2)
        z.mul_(2)
        return [y._version, z._version, x._version]

    same_as_eager(lambda: [torch.randn(4)], call)


def test_a_write_after_a_save_is_refused_as_in_eager() -> None:
    def call(x: Tensor) -> Tensor:
        y = (x * 2).exp()
        y.mul_(2)
        return torch.autograd.grad(y.sum(), x)[0]

    same_as_eager(lambda: [torch.randn(4, requires_grad=True)], call)


def test_switched_off() -> None:
    lazy = fz.lazy(enabled=False)
    with lazy:
        assert (torch.ones(2) * 2).tolist() == [2.0, 2.0]
        assert pending(lazy) == 0
    assert (
        lazy.explain()
        == "lazy is switched off (enabled=False, or FUNCTIONALIZE=off): every op ran at once"
    )


def test_wrong_limits() -> None:
    with pytest.raises(ValueError, match="max_bytes is at least 1, not 0"):
        fz.lazy(max_bytes=0)


def test_blocks_inside_blocks() -> None:
    lazy, other, x = learned(), learned(), torch.ones(4)
    with lazy:
        with lazy:
            y = ops(x)
        assert pending(lazy) == 3
        with other:  # it would not see what waits in `lazy`
            z = ops(y)
            assert pending(other) == 0
    assert torch.equal(z, ops(ops(x)))
    assert "a block was entered inside of the dispatch mode LazyMode" in other.explain()


# -- random numbers --------------------------------------------------------------------------------


def test_generators_move_as_in_eager() -> None:
    def call(x: Tensor) -> Any:
        y = nn.functional.dropout(ops(x), 0.5)
        state = torch.get_rng_state()
        z = y * torch.rand(4) + torch.randn_like(y)
        torch.set_rng_state(state)
        return y, z, torch.rand(2), torch.initial_seed(), torch.randint(5, (3,)) * 2

    same_as_eager(lambda: [torch.randn(4)], call)


# -- settings --------------------------------------------------------------------------------------


def test_settings_are_those_of_the_line() -> None:
    def call(x: Tensor) -> Any:
        with torch.no_grad():
            y = ops(x)
        torch.set_default_dtype(torch.float64)
        try:
            z = ops(y)
            return z.to(torch.get_default_dtype()) + 1
        finally:
            torch.set_default_dtype(torch.float32)

    same_as_eager(lambda: [torch.randn(4)], call)


def test_inference_mode() -> None:
    layer = nn.Linear(4, 4)

    def call(x: Tensor) -> Any:
        with torch.inference_mode():
            return layer(ops(x)).relu_().tolist()

    same_as_eager(lambda: [torch.randn(4)], call)


def test_autocast() -> None:
    layer = nn.Linear(4, 4)

    def call(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(ops(x)).float().square().sum()
        return loss, torch.autograd.grad(loss, list(layer.parameters()))

    same_as_eager(lambda: [torch.randn(4)], call)


# -- errors and interruptions ----------------------------------------------------------------------


def test_an_error_comes_at_its_line() -> None:
    """An index that is out of range, a number that divides by zero: such ops do not wait."""

    def call(x: Tensor) -> Any:
        y = ops(x)
        try:
            nn.functional.embedding(torch.tensor([9]), y.view(2, 2))
        except IndexError as error:
            return y, str(error)
        raise AssertionError

    same_as_eager(lambda: [torch.randn(4)], call)


@contextmanager
def failing() -> Iterator[None]:
    """The kernel of `sin` raises: nothing else that waits does."""

    def sin(x: Tensor) -> Tensor:
        raise OverflowError("no sine")

    with op_overrides("aten") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kernel is overridden
        library.impl("sin", sin, "CPU")
        yield


@pytest.mark.parametrize("runs", [0, 2])
def test_an_op_that_fails_late(runs: int) -> None:
    """Storages are as eager leaves them at that op; what only later ops made is NaN. runs: 2: a program fails."""
    lazy = learned()
    p, x = torch.ones(4), torch.ones(4)

    def block() -> tuple[Tensor, ...]:
        x.mul_(3)
        y = x * 2
        z = y.sin()
        w = z + 1
        p.mul_(3)
        return y, z, w

    for _ in range(runs):
        with lazy:
            kept = block()
            lazy.barrier()
    for t in (p, x):
        t.fill_(1)
    with lazy, poisoned(7):
        kept = block()
        with failing(), pytest.raises(OverflowError, match="no sine") as error:
            lazy.barrier()
        assert "z = y.sin()" in error.value.__notes__[0]
        assert pending(lazy) == 0
        y, z, w = kept
        assert (x.tolist(), y.tolist(), p.tolist()) == ([3.0] * 4, [6.0] * 4, [1.0] * 4)
        assert z.isnan().all() and w.isnan().all()


def test_an_exception_leaves_the_block() -> None:
    lazy, x = learned(), torch.ones(4)
    with pytest.raises(ZeroDivisionError), lazy:
        x.mul_(3)
        y = ops(x)
        _ = 1 // 0
    assert x.tolist() == [3.0] * 4
    assert torch.equal(y, ops(x))


def test_ctrl_c_while_pending_ops_run() -> None:
    lazy, x = learned(), torch.ones(4)
    run = Runs.run

    def interrupted(self: Runs, stream: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return run(self, stream)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with lazy:
            x.mul_(3)
            y = ops(x)
            with mock.patch.object(Runs, "run", interrupted), pytest.raises(KeyboardInterrupt):
                lazy.barrier()
            assert torch.equal(y.clone(), ops(x))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert x.tolist() == [3.0] * 4


def trained_until(op: int, context: Any) -> Any:
    """Two steps, and a third one that Ctrl-C ends at the given op; what is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step() -> None:
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with context:
        for _ in range(2):
            step()
        try:
            with Tripwire(op, raise_interrupt):
                step()
        except KeyboardInterrupt:
            pass
    found = [image(p) for p in model.parameters()]
    found += [image(p.grad) for p in model.parameters()]
    return found, [image(t) for s in optimizer.state.values() for t in s.values()]


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_at_any_op() -> None:
    lazy = fz.lazy()
    for op in range(0, 40, 3):
        assert trained_until(op, lazy) == trained_until(op, Empty()), op


# -- with the rest of the library ------------------------------------------------------------------


def test_a_captured_step_inside() -> None:
    def run(context: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step, losses = fz.capture(train), []
        with context:
            for _ in range(6):
                losses.append(step(ops(torch.randn(3, 4))) * 2)
        return [image(t) for t in (*losses, *model.parameters())]

    lazy = learned()
    assert run(lazy) == run(fz.lazy(enabled=False))


def test_a_trace_inside() -> None:
    lazy, x = learned(), torch.ones(4)
    with lazy:
        y = ops(x)
        program = fz.functions.trace(ops, y)
        z = program(y)
    assert torch.equal(z, ops(ops(x)))
