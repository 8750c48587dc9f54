"""`capture_backward`: graphs of one tape share a program; what a program does not hold for runs eagerly."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import functionalize as fz
from functionalize.errors import InvariantError, LoadError, SaveError
from functionalize.tape import listing
from functionalize.tape.listing import Unlisted, listed
from tests.step_backward.cases import CASES
from tests.step_backward.runs import Run, model, same

Loss = Callable[[nn.Module, Tensor, int], Tensor]

_KEPT = "retain_grad"
_CHECKPOINT = "torch.utils.checkpoint"
# The cases of which no backward is replayed, and what `refused` says of them: "" if each call differs in its state.
EAGER = {
    "hook_order": _KEPT,
    "retain_inplace": _KEPT,
    "retained_twice": _KEPT,
    "save_on_cpu": "torch.autograd.graph",
    "multi_grad_hook": "torch.autograd.graph",
    "module_bw_hooks": "torch.utils.hooks",
    "ckpt_early": _CHECKPOINT,
    "checkpointed_reentrant": _CHECKPOINT,
    "checkpointed_dropout": _CHECKPOINT,
    "checkpointed_norm": _CHECKPOINT,
    "written_buffer": "",
    "sparse_free_index": "",
}
NO_BACKWARD = {
    "only_input",
    "grad_edge",
    "unused_input",
    "only_some_inputs",
}  # other than of inputs


def results(case: Any, run: Run) -> list[Any]:
    """What a case returns, all gradients and the generator, after each of seven calls."""
    m, found = model(), []
    torch.manual_seed(1)
    for i in range(7):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of anomaly mode
            found.append(case(m, torch.randn(5, 3), run))
        found.append([None if p.grad is None else p.grad.clone() for p in m.parameters()])
        found.append(torch.get_rng_state())
        if i % 3 == 2:
            m.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in CASES if name not in NO_BACKWARD])
def test_as_eager(name: str) -> None:
    case, captured = CASES[name], fz.functions.capture_backward()

    def backward(loss: Any, gradient: Any = None, retain_graph: bool = False) -> None:
        captured(loss, gradient, retain_graph)

    grad = torch.autograd.grad
    ours = results(case, Run(backward, grad))
    assert same(ours, results(case, Run(torch.autograd.backward, grad)))
    assert (captured.stats.replays > 0) == (name not in EAGER)
    assert EAGER.get(name, "") in " ".join(captured.refused)
    assert torch._C._dynamo.compiled_autograd.is_cache_empty()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * x * ctx.scale, None


SETTINGS = {"scale": 1.0}


def hooked(y: Tensor, hook: Any) -> Tensor:
    y.register_hook(hook)
    return y


def scaled(y: Tensor, scale: float) -> Tensor:
    return hooked(y, lambda g: g * scale)


def of_a_tensor(y: Tensor) -> Tensor:
    w = y.detach().sum()
    return hooked(y, lambda g: g * w)


def of_a_setting(y: Tensor, i: int) -> Tensor:
    SETTINGS["scale"] = float(i % 2 + 1)
    return hooked(y, lambda g: g * SETTINGS["scale"])


def reordered(m: Any, x: Tensor, i: int) -> Tensor:
    """The gradients of a weight are added in another order at every other call."""
    parts = [(m[0].weight * (0.1 + k) * x.sum()).sin() for k in range(4)]
    if i % 2:
        parts[0].grad_fn._set_sequence_nr(2**40)
    return torch.stack([part.sum() for part in parts]).sum()


# Losses whose tapes, or what their hooks read, change from call to call; how many programs are replayed.
CHANGING: dict[str, tuple[Loss, int]] = {
    "depth": (
        lambda m, x, i: sum((m(x + k).square().mean() for k in range(1 + i % 2)), x.sum()),
        2,
    ),
    "rows": (lambda m, x, i: m(x[: 4 + i % 2]).square().mean(), 2),
    "a number of a node": (lambda m, x, i: (m(x) * (1.0 + i % 2)).sum(), 2),
    "an attribute of ctx": (lambda m, x, i: Scaled.apply(m(x), 1.0 + i % 2).sum(), 2),
    "a number in a closure": (lambda m, x, i: scaled(m(x), 1.0 + i % 2).sum(), 2),
    "a number in a global": (lambda m, x, i: of_a_setting(m(x), i).sum(), 2),
    "a hook that is there or not": (
        lambda m, x, i: (hooked(m(x), lambda g: g * 3) if i % 2 else m(x)).sum(),
        2,
    ),
    "another hook": (
        lambda m, x, i: hooked(m(x), (lambda g: g * 3) if i % 2 else (lambda g: g * 5)).sum(),
        2,
    ),
    "the order of nodes": (reordered, 2),
    "a tensor in a closure": (lambda m, x, i: of_a_tensor(m(x)).sum(), 0),
}


@pytest.mark.parametrize("audit", [False, 1])
@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_is_noticed(name: str, audit: Any) -> None:
    loss, programs = CHANGING[name]
    captured, (a, b) = (
        fz.functions.capture_backward(audit=audit, allowance=None),
        (model(), model()),
    )
    for i in range(12):
        x = torch.full((5, 3), 0.1 * i)
        a.zero_grad()
        b.zero_grad()
        loss(a, x, i).backward()
        captured(loss(b, x, i))
        assert same([p.grad for p in a.parameters()], [p.grad for p in b.parameters()])
    assert captured.stats.audit_failures == 0
    ran = captured.stats.replays + captured.stats.audits
    assert (len(captured.programs) == programs and ran >= 4) if programs else ran == 0


def key(m: nn.Module, loss: Tensor) -> str:
    return listed([loss], [torch.ones(())]).key


def test_a_listing_changes_nothing() -> None:
    m, x = model(), torch.ones(5, 3)
    m(x).sum().backward()
    before = [(p.grad, p.grad.clone(), p._version) for p in m.parameters()]
    loss = hooked(m(x), lambda g: g * 2).sum()
    assert key(m, loss) == key(m, loss) == key(m, hooked(m(x), lambda g: g * 2).sum())
    for p, (grad, was, version) in zip(m.parameters(), before, strict=True):
        assert p.grad is grad and torch.equal(grad, was) and p._version == version
    loss.backward()
    with pytest.raises(Unlisted, match="second time"):
        key(m, loss)


def test_a_listing_prints_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Tensor] = []
    monkeypatch.setattr(Tensor, "__repr__", lambda t, **_: printed.append(t) or "")
    key(model(), model()(torch.ones(5, 3)).sum())
    assert not printed


@pytest.mark.parametrize("replays", [False, True])
def test_nothing_outlives_the_graph(replays: bool) -> None:
    captured, m = fz.functions.capture_backward(audit=False), model()
    for _ in range(3 if replays else 1):
        m.zero_grad()
        h = m[0](torch.ones(5, 3)).tanh()
        storage = StorageWeakRef(h.untyped_storage())
        captured(m[2](h).square().mean())
        del h
    assert (captured.stats.replays > 0) == replays
    assert storage.expired()  # without a search for garbage


def test_a_write_to_what_was_saved_raises_as_in_eager() -> None:
    captured, m = fz.functions.capture_backward(), model()
    for i in range(4):
        m.zero_grad()
        y = m(torch.ones(5, 3)).tanh()
        if i == 3:
            y.detach().mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                captured(y.sum())
        else:
            captured(y.sum())
    assert captured.stats.replays == 2


def test_while_another_thread_goes_backward_this_one_is_eager() -> None:
    captured, m, other = fz.functions.capture_backward(), model(), model()
    entered, done = threading.Event(), threading.Event()

    def pauses(g: Tensor) -> None:
        entered.set()
        assert done.wait(20)

    loss = hooked(other(torch.ones(5, 3)), pauses).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    assert entered.wait(20)
    captured(m(torch.ones(5, 3)).sum())
    done.set()
    thread.join()
    assert dict(captured.refused) == {"another thread goes backward": 1}
    assert same([p.grad for p in m.parameters()], [p.grad for p in other.parameters()])


def test_a_backward_that_begins_during_a_listing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    m, other, threads = model(), model(), []
    begin = listing._Compiler.begin_capture

    def begins(*args: Any) -> Any:
        with torch.enable_grad():
            loss = other(torch.ones(5, 3)).sum()
        threads.append(threading.Thread(target=loss.backward))
        threads[-1].start()
        threads[-1].join(0.05)
        assert threads[-1].is_alive()
        return begin(*args)

    monkeypatch.setattr(listing._Compiler, "begin_capture", begins)
    captured = fz.functions.capture_backward()
    for _ in range(3):
        m.zero_grad()
        other.zero_grad()
        captured(m(torch.ones(5, 3)).sum())
        threads[-1].join()
        assert same([p.grad for p in m.parameters()], [p.grad for p in other.parameters()])
    assert captured.stats.replays == 2 and not captured.refused


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_autograd_is_left_alone() -> None:
    from torch._dynamo.compiled_autograd import _enable, reset

    captured, m = fz.functions.capture_backward(), model()
    captured(m(torch.ones(5, 3)).sum())  # torch names its functions to the first compiler alone
    m.zero_grad()
    with _enable(lambda gm: gm), torch.autograd.set_multithreading_enabled(False):
        captured(m(torch.ones(5, 3)).sum())
        m(torch.ones(5, 3)).sum().backward()
    captured(m(torch.ones(5, 3)).sum())
    assert dict(captured.refused) == {"compiled autograd is in use": 2}
    assert m[0].bias.grad is not None and m[0].bias.grad.abs().sum() > 0
    reset()


def test_what_torch_has_not_put_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(compiler: Any, name: str, grads: Any, args: Any, metadata: Any) -> Any:
        if name == "PowBackward0":
            raise NotImplementedError("a node")
        return compiler._results(len(metadata))

    m = model()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        loss = m(torch.ones(5, 3)).square().sum()
    monkeypatch.setattr(listing._Compiler, "apply_functional", fails)
    with pytest.raises(Unlisted, match="a node"):
        key(m, m(torch.ones(5, 3)).square().sum())
    with pytest.raises(InvariantError, match="did not put back what hooks have packed"):
        key(m, loss)


def test_it_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="backwards of eager graphs"):
        fz.functions.capture_backward().save(tmp_path / "a.fzp")
    with pytest.raises(LoadError, match="backwards of eager graphs"):
        fz.functions.capture_backward().load(tmp_path / "a.fzp")
