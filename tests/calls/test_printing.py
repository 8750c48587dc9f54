# ruff: noqa: UP031, UP032 (texts are formatted in every way)
"""`print` in a step: a replay prints what eager prints; text of a number is no guard where it is printed alone."""

from __future__ import annotations

import builtins
import contextlib
import datetime
import gc
import importlib.util
import io
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError
from tests.ranks import run_on_ranks

from .twins import batch, compared, refused, replayed

_print = print


def several(loss: Tensor, twin: Any) -> None:
    n = loss.item()
    print("loss", n, [n, {"a": (n, 2)}], sep="|", end="!\n", flush=True)
    print(f"loss {n:.4f} and {loss:.3f}")
    print(f"{n!r:>30}{n:{'>'}12.3e}", file=sys.stderr)


def tensors(loss: Tensor, twin: Any) -> None:
    weight = twin.model.weight.detach()
    print(weight, loss)
    print(round(loss.item(), 2), loss.item() * 2)


def helper(value: Any, name: str) -> None:
    print(f"{name}: {value:.3f}", f"({name})")


def in_helpers(loss: Tensor, twin: Any) -> None:
    helper(loss.item(), "loss")
    helper(loss.item() / 2, "half")
    for value in (loss, loss * 2):
        print(f"{value.item():.2f}", end=" ")


@pytest.mark.parametrize("after", [several, tensors, in_helpers])
def test_replays_print_what_eager_prints(after: Any) -> None:
    captured = replayed(after)
    assert captured.stats.captures == 1


def test_each_audited_call_prints_once() -> None:
    captured = compared(several, audit=1)
    assert captured.stats.audits >= 6


def test_prints_of_modules_and_hooks() -> None:
    class Talking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            print(f"forward {out.detach().mean().item():.3f}")
            return out

    def made() -> Any:
        torch.manual_seed(0)
        layer = Talking(3, 3)
        layer.register_forward_hook(lambda m, a, out: print("hook", out.detach().sum().item()))
        layer.weight.register_hook(lambda g: print(f"gradient {g.sum().item():.4f}"))

        def step(x: Tensor) -> Tensor:
            loss = layer(x).sum()
            loss.backward()
            with torch.no_grad():
                for p in layer.parameters():
                    p.sub_(p.grad * 0.1)
                    p.grad = None
            return loss.detach()

        return step

    eager, captured = made(), fz.capture(made())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for i in range(10):
            texts = []
            for step in (eager, captured):
                step(batch(i))
                texts.append(out.getvalue())
                out.seek(0)
                out.truncate()
            assert texts[0] == texts[1] != ""
    assert captured.stats.replays >= 5


# -- text that goes elsewhere ------------------------------------------------------------------------


def in_other_ways(loss: Tensor, twin: Any) -> None:
    n = loss.item()
    print("loss %.3f" % n, "loss %s" % n, "%d" % (n * 1000))
    print("loss {:.4f} of {}".format(n, "a"), "loss " + str(n) + f" {n:.2f}")
    text = f"stored {n:.4f}"
    if twin is not None:
        print(text, file=sys.stderr)


def test_texts_that_are_made_in_other_ways_are_live() -> None:
    assert replayed(in_other_ways).stats.captures == 1


def joins(loss: Tensor, twin: Any) -> None:
    n = loss.item()
    values = {"loss": n, "half": n / 2, "rows": 4}
    print(", ".join(f"{k} {v:.3f}" for k, v in values.items()))
    print("all " + " | ".join([f"{v:>9.4f}" for v in values.values() if v]), flush=True)
    print(" ".join([f"{n:.4f}", "of", str(n * 2)]), "-".join((f"{n:.1f}", f"{n:.5f}")))
    print(
        f"step: {', '.join(f'{v:.6f}' for v in (n, n * 3))}", "; ".join(f"{n * k}" for k in (1, 7))
    )
    line = "/".join(f"{v:.3e}" for v in values.values())
    print(line)


def test_joined_texts_are_live() -> None:
    assert replayed(joins).stats.captures == 1


def upper(loss: Tensor, twin: Any) -> None:
    n = loss.item() * 1e-8
    print(", ".join(map(str.upper, (f"{n * k:.1e}" for k in (1, 2)))))


def in_order(loss: Tensor, twin: Any) -> None:
    n = loss.item()
    print(", ".join(sorted(f"{n * k:.1f}" for k in (3, 1, 2))))


def two_in_an_element(loss: Tensor, twin: Any) -> None:
    n = loss.item()
    print(", ".join(f"{a:.2f}/{b:.2f}" for a, b in ((n, 1.0), (1.0, n))))


def begun_before(loss: Tensor, twin: Any) -> None:
    n = loss.item()
    texts = (f"{n * k:.3f}" for k in (1, 2, 3))
    first = next(texts)
    print(", ".join(texts), first)


def a_list_of_texts(loss: Tensor, twin: Any) -> None:
    texts = [f"{loss.item() * k:.3f}" for k in (1, 2)]
    print(", ".join(texts), texts)
    print([f"{loss.item():.3f}"], *[f"{loss.item():.2f}"])


def chosen_elements(loss: Tensor, twin: Any) -> None:
    n = loss.item()
    print(", ".join(f"{n * k:.1f}" for k in (1, 2, 3) if f"{n * k:.1f}" > "0.5"))
    print(max(f"{n * k:.1f}" for k in (1, 2)), len(", ".join(f"{n * k:.1f}" for k in (1, 2))))


def one_of_equal_texts(loss: Tensor, twin: Any) -> None:
    print(", ".join(f"{v:.0f}" for v in (round(loss.item()), 1.0, 0.0)))


def two_numbers(loss: Tensor, twin: Any) -> None:
    print("%.3f %.3f" % (loss.item(), loss.item() * 2))
    print("{:.3f} {:.3f}".format(loss.item(), loss.item() * 2))


def say(value: Any) -> None:
    text = f"{value:.1f}"
    print(text)


def equal_texts(loss: Tensor, twin: Any) -> None:
    n = loss.item()
    say(n)
    say(float(f"{n:.1f}"))  # a plain number, in the frame of the function that was called before
    with contextlib.suppress(ValueError):
        print("{} {}".format(n, Failing()))
    print("{} {}".format(3.0, n))


def stored(loss: Tensor, twin: Any) -> Any:
    text = f"{loss.item():.1f}"
    print(text)
    return text


def compared_text(loss: Tensor, twin: Any) -> None:
    print(f"{loss.item():.1f}" > "0.5")


def cut(loss: Tensor, twin: Any) -> None:
    print(f"{loss.item():.1f}"[:2])


def spread(loss: Tensor, twin: Any) -> None:
    print(*[f"{loss.item():.1f}"])


def chosen(loss: Tensor, twin: Any) -> None:
    print(f"{loss.item():.1f}" if loss.item() < 100 else "large")


def joined(loss: Tensor, twin: Any) -> None:
    percent, braces = "%.1f", "{:.1f}"
    print(" ".join([f"{loss.item():.1f}"]), percent % loss.item(), braces.format(loss.item()))


class Shout(str):
    def __format__(self, spec: str) -> str:
        return self.upper()


def formats_of_others(loss: Tensor, twin: Any) -> None:
    print(f"{Shout('loss')} {loss.item():.1f} {3} {'a':>3}")


@pytest.mark.parametrize(
    "after",
    [
        stored,
        compared_text,
        cut,
        spread,
        chosen,
        joined,
        formats_of_others,
        two_numbers,
        equal_texts,
        upper,
        in_order,
        two_in_an_element,
        begun_before,
        a_list_of_texts,
        chosen_elements,
        one_of_equal_texts,
    ],
)
def test_text_that_goes_elsewhere_is_as_in_eager(after: Any) -> None:
    compared(after)


def test_a_text_is_live_although_its_other_parts_are_not_known() -> None:
    replayed(formats_of_others)


def test_a_stored_text_is_guarded() -> None:
    captured = compared(stored)
    assert any("format(item" in text for text in captured.stats.guard_failures)


def test_a_number_that_may_be_at_two_places_of_a_text_is_guarded() -> None:
    def step(x: Tensor) -> Tensor:
        n = x.sum().item()
        print(f"{'1.01.01.0'}{n}{'1.0'}{Shout('')}")
        return x + 1

    captured = fz.capture(step)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for n in (1.0, 1.0, 1.0, 2.0):
            captured(torch.tensor([n]))
    assert out.getvalue().splitlines() == ["1.01.01.01.01.0"] * 3 + ["1.01.01.02.01.0"]


class Failing:
    def __format__(self, spec: str) -> str:
        raise ValueError("no text")


def fails_once(loss: Tensor, twin: Any) -> None:
    for value in (Failing(), 3.0):
        with contextlib.suppress(ValueError):
            print(f"{loss.item():.0f} {value}")


def test_an_exception_in_a_format_leaves_a_guard() -> None:
    compared(fails_once)


# -- refusals ----------------------------------------------------------------------------------------


def to_a_file(loss: Tensor, twin: Any) -> None:
    with open("/dev/null", "w") as file:
        print("loss", file=file)


def to_memory(loss: Tensor, twin: Any) -> None:
    print("loss", file=io.StringIO())


def redirected(loss: Tensor, twin: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        print("loss")


def an_object(loss: Tensor, twin: Any) -> None:
    print(twin.model)


def with_gradient(loss: Tensor, twin: Any) -> None:
    print(loss.clone().requires_grad_())


def by_a_clock(loss: Tensor, twin: Any) -> None:
    start = time.perf_counter()
    print("seconds", (time.perf_counter() - start) * 0)


def by_a_date(loss: Tensor, twin: Any) -> None:
    print(f"{loss.item():.2f}", datetime.datetime.now().year)


def by_a_held_print(loss: Tensor, twin: Any) -> None:
    _print("loss")


def raising(loss: Tensor, twin: Any) -> None:
    with contextlib.suppress(TypeError):
        print("loss", sep=3)


def with_locals(loss: Tensor, twin: Any) -> None:
    print("loss", len(locals()))


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (to_a_file, "prints to another stream than sys.stdout and sys.stderr at "),
        (to_memory, "prints to another stream than sys.stdout and sys.stderr at "),
        (redirected, "prints, where the step has replaced sys.stdout or sys.stderr, at "),
        (an_object, "prints a Linear at "),
        (
            with_gradient,
            "prints a tensor that requires a gradient, which that of a replay would not: detach it at ",
        ),
        (by_a_clock, "time.perf_counter"),
        (by_a_date, "datetime.now"),
        (by_a_held_print, "prints at "),
        (raising, "which raises TypeError"),
        (with_locals, "cannot be seen"),
    ],
)
def test_a_print_that_a_replay_cannot_repeat_is_refused(after: Any, what: str) -> None:
    message = refused(after)
    assert what in message
    assert f"at {__file__}:" in message


def test_a_replaced_print_is_refused_and_a_later_replacement_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []
    captured = fz.capture(lambda x: (print("a"), x + 1)[1], on_uncapturable="raise")
    for _ in range(4):
        captured(batch(0))
    assert captured.stats.replays >= 2
    monkeypatch.setattr(builtins, "print", lambda *args: said.append(args))
    captured(batch(0))
    assert said == [("a",)]
    with pytest.raises(UncapturableError, match="prints by a function that replaces `print`"):
        captured(batch(0))


def test_another_stream_between_calls_is_seen() -> None:
    captured = fz.capture(lambda x: (print("a", file=sys.stderr), x + 1)[1])
    streams = [io.StringIO() for _ in range(3)]
    for i in range(9):
        with contextlib.redirect_stderr(streams[i // 3]):
            captured(batch(0))
    assert [s.getvalue() for s in streams] == ["a\na\na\n"] * 3


# -- with options, in files, on ranks ------------------------------------------------------------------


def between_updates(loss: Tensor, twin: Any) -> None:
    weight = twin.model.weight.detach()
    print(weight)
    with torch.no_grad():
        twin.model.weight.mul_(0.5)
    print(weight, loss)
    print(f"{weight.sum().item():.4f}")


@pytest.mark.parametrize("options", [{"passes": "default"}, {"memory": True}, {"passes": ()}])
def test_tensors_have_the_contents_that_they_have_at_the_print(options: dict[str, Any]) -> None:
    replayed(between_updates, capture=options)


def prints_on_rank_0(seed: int) -> tuple[str, int]:
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    out = io.StringIO()

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        number = loss.item()  # a number that one rank alone reads makes that rank vote alone
        if dist.get_rank() == 0:
            print(f"loss {number:.6f}", optimizer.param_groups[0]["lr"])
        scheduler.step()
        return loss.detach()

    captured = fz.capture(step)
    with contextlib.redirect_stdout(out):
        for _ in range(10):
            captured(torch.ones(2, 4))
    return out.getvalue(), captured.stats.replays


def test_the_first_rank_prints_and_all_replay() -> None:
    (text, replays), (nothing, more) = run_on_ranks(prints_on_rank_0, 0, world=2)
    assert len(set(text.splitlines())) == 10
    assert nothing == ""
    assert min(replays, more) >= 6


def test_a_clock_that_a_callback_of_the_collector_reads_is_not_the_steps() -> None:
    def timed(phase: str, info: dict[str, int]) -> None:
        time.perf_counter()

    def step(x: Tensor) -> Tensor:
        loss = x.sum()
        gc.collect(0)
        print("loss", loss.item())
        return loss

    captured = fz.capture(step, audit=False)
    gc.callbacks.append(timed)
    try:
        for _ in range(4):
            captured(torch.ones(2))
    finally:
        gc.callbacks.remove(timed)
    assert captured.stats.replays >= 1


class Finder:
    """Calls `locals`, as that of setuptools does. While a function is profiled, this would end the watch for clocks."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        assert "{fullname}".format(**locals()) == fullname


def looks_for_a_module(loss: Tensor, twin: Any) -> None:
    importlib.util.find_spec("no_module_has_this_name")
    print("loss", loss.item())


def test_a_finder_of_modules_may_call_locals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    replayed(looks_for_a_module)
