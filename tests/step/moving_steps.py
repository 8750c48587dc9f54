"""Steps that move state in Python, each with a world of its own: `STEPS[name](world)` fills the world and is a step.

Of a world, all attributes and the cells of the step are compared between twins; `REFUSED` has the message for steps
that cannot be replayed.
"""

from __future__ import annotations

import math
import os
import time
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Step = Callable[[Tensor], Any]


class World:
    """A model, its optimizer, and whatever a step adds."""

    def __init__(self, make: Callable[[World], Step], optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = self.made_model()
        kinds: dict[str, Any] = {
            "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
            "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        }
        self.optimizer = kinds[optimizer](list(self.model.parameters()))
        self.n: Any = 0
        self.step = make(self)

    def made_model(self) -> nn.Module:
        """The model; other worlds have others."""
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def train(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> Any:
        """All that Python holds around the step."""
        cells = [c.cell_contents for c in getattr(self.step, "__closure__", None) or ()]
        own = {k: v for k, v in vars(self).items() if k not in ("model", "optimizer", "step")}
        modules = [dict(vars(m)) for m in self.model.modules()]
        extra = [{k: v for k, v in m.items() if not k.startswith("_")} for m in modules]
        return [own, [c for c in cells if not isinstance(c, World)], extra, self.model.state_dict()]


def difference(a: Any, b: Any, at: str = "") -> str | None:
    """Where two states differ, by value and type; None if they do not."""
    if type(a) is not type(b):
        return f"{at}: {a!r} and {b!r}"
    if isinstance(a, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        return None if same and a.requires_grad == b.requires_grad else f"{at}: {a} and {b}"
    if isinstance(a, dict):
        a = {k: v for k, v in a.items() if not str(k).startswith("__")}
        if list(a) != [k for k in b if not str(k).startswith("__")]:
            return f"{at}: {list(a)} and {list(b)}"
        pairs = [(k, a[k], b[k]) for k in a]
    elif isinstance(a, (list, tuple)) or type(a).__name__ == "deque":
        if len(a) != len(b):
            return f"{at}: {len(a)} and {len(b)} elements"
        pairs = [(str(i), *each) for i, each in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, (bool, int, float, str, set, type(None))):
        return None if repr(a) == repr(b) else f"{at}: {a!r} and {b!r}"
    elif callable(a) and getattr(a, "__name__", "") == "<lambda>":
        pairs = [("read", a(), b())] if a.__code__.co_argcount == 0 else []
    elif isinstance(a, (World, type)) or not hasattr(a, "__dict__"):
        pairs = []
    else:
        inner = not isinstance(a, torch.nn.Module)
        pairs = [(k, v, vars(b).get(k)) for k, v in vars(a).items() if inner]
    found = (difference(x, y, f"{at}.{key}") for key, x, y in pairs)
    return next((each for each in found if each is not None), None)


STEPS: dict[str, Callable[[World], Step]] = {}
REFUSED: dict[str, tuple[str, int]] = {}
# Steps that are replayed later than at the fourth call, or at some calls only.
REPLAYS: dict[str, int] = {}


def moves(make: Callable[[World], Step]) -> Callable[[World], Step]:
    STEPS[make.__name__] = make
    return make


def replays(least: int) -> Callable[[Callable[[World], Step]], Callable[[World], Step]]:
    """A step of which at least so many of twelve calls are replayed."""

    def add(make: Callable[[World], Step]) -> Callable[[World], Step]:
        STEPS[make.__name__], REPLAYS[make.__name__] = make, least
        return make

    return add


def refused(
    message: str, at: int = 2
) -> Callable[[Callable[[World], Step]], Callable[[World], Step]]:
    """A step that is refused, with this message, at its call number `at`."""

    def add(make: Callable[[World], Step]) -> Callable[[World], Step]:
        STEPS[make.__name__], REFUSED[make.__name__] = make, (message, at)
        return make

    return add


# -- numbers ---------------------------------------------------------------------------------------


@moves
def attribute(w: World) -> Step:
    def step(x: Tensor) -> Tensor:
        w.n += 1
        return w.train(x).detach()

    return step


@moves
def closure_cell(w: World) -> Step:
    n = 0

    def step(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return w.train(x).detach()

    return step


@moves
def module_global(w: World) -> Step:
    scope: dict[str, Any] = {"w": w, "count": 0, "__name__": "script"}
    code = "def step(x):\n    global count\n    count += 1\n    return w.train(x).detach()\n"
    exec(compile(code, "script.py", "exec"), scope)
    w.scope = scope
    step: Step = scope["step"]
    return step


@moves
def dict_entry(w: World) -> Step:
    w.counts = {"steps": 0, "other": 5}

    def step(x: Tensor) -> Tensor:
        w.counts["steps"] += 1
        return w.train(x).detach()

    return step


@moves
def ordered_dict_entry(w: World) -> Step:
    w.counts = OrderedDict(steps=0, samples=0)

    def step(x: Tensor) -> Tensor:
        w.counts["steps"] += 1
        w.counts["samples"] += len(x)
        return w.train(x).detach()

    return step


@moves
def default_dict_entry(w: World) -> Step:
    w.counts = defaultdict(int)

    def step(x: Tensor) -> Tensor:
        w.counts["steps"] += 1
        return w.train(x).detach()

    return step


@moves
def counter_entry(w: World) -> Step:
    w.counts = Counter()

    def step(x: Tensor) -> Tensor:
        w.counts["steps"] += 1
        w.counts["samples"] += len(x)
        return w.train(x).detach()

    return step


@moves
def namespace(w: World) -> Step:
    w.progress = types.SimpleNamespace(steps=0, average=None)

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.progress.steps += 1
        new = loss.item()
        w.progress.average = (
            new if w.progress.average is None else 0.9 * w.progress.average + 0.1 * new
        )
        return loss.detach()

    return step


@moves
def functions_of_math(w: World) -> Step:
    w.perplexities = []

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        if not math.isfinite(loss.item()) or np.isnan(loss.item()):
            raise ValueError("diverged")
        w.n += 1
        w.perplexities.append(math.exp(loss.item()))
        return loss.detach() * (1 + math.cos(math.pi * w.n / 20))

    return step


@moves
def list_element(w: World) -> Step:
    w.counts = [0, 7, 0.0]

    def step(x: Tensor) -> Tensor:
        w.counts[0] += 1
        w.counts[2] += 0.5
        return w.train(x).detach()

    return step


class Slotted:
    __slots__ = ("n", "total")

    def __init__(self) -> None:
        self.n, self.total = 0, 0.0


@moves
def slots(w: World) -> Step:
    counts = Slotted()
    w.read = lambda: (counts.n, counts.total)

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        counts.n += 1
        counts.total += loss.item()
        return loss.detach()

    return step


@dataclass
class Record:
    steps: int = 0
    total: float = 0.0


@moves
def record_of_a_dataclass(w: World) -> Step:
    w.record = Record()

    def step(x: Tensor) -> float:
        loss = w.train(x)
        w.record.steps += 1
        w.record.total += loss.item() * len(x)
        return w.record.total / w.record.steps

    return step


class Counted:
    steps = 0


@moves
def class_attribute(w: World) -> Step:
    kind = type("Own", (Counted,), {"steps": 0})
    w.read = lambda: kind.steps

    def step(x: Tensor) -> Tensor:
        kind.steps += 1
        return w.train(x).detach()

    return step


@moves
def attribute_of_a_python_module(w: World) -> Step:
    counters = types.ModuleType("counters")
    counters.steps = 0  # type: ignore[attr-defined]
    w.read = lambda: counters.steps  # type: ignore[attr-defined]

    def step(x: Tensor) -> Tensor:
        counters.steps += 1  # type: ignore[attr-defined]
        return w.train(x).detach()

    return step


class Counting(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls, self.scale = inner, 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scale = self.scale * 0.9 + 0.1
        out: Tensor = self.inner(x) * self.scale
        return out


@moves
def attributes_of_a_module(w: World) -> Step:
    w.model = Counting(w.model)
    return lambda x: w.train(x).detach()


@moves
def total_of_losses(w: World) -> Step:
    w.total = 0.0

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.total += loss.item()
        return loss.detach()

    return step


class AverageMeter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val = self.avg = self.sum = 0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val  # type: ignore[assignment]
        self.sum += val * n  # type: ignore[assignment]
        self.count += n
        self.avg = self.sum / self.count  # type: ignore[assignment]


@moves
def average_meter(w: World) -> Step:
    w.meter = AverageMeter()

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.meter.update(loss.item(), x.size(0))
        return loss.detach()

    return step


@moves
def two_meters(w: World) -> Step:
    w.meters = {"loss": AverageMeter(), "norm": AverageMeter()}

    def step(x: Tensor) -> dict[str, float]:
        loss = w.train(x)
        w.meters["loss"].update(loss.item(), x.size(0))
        w.meters["norm"].update(x.norm().item())
        return {name: meter.avg for name, meter in w.meters.items()}

    return step


@moves
def warmup_of_the_learning_rate(w: World) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = w.model(x).square().mean() * min(1.0, 0.0625 + 0.001 * w.n)
        loss.backward()
        w.optimizer.step()
        w.optimizer.zero_grad()
        w.n += 1
        return loss.detach()

    return step


@moves
def momentum_that_decays(w: World) -> Step:
    w.beta = 0.9
    w.average = torch.zeros(())

    def step(x: Tensor) -> Tensor:
        loss = w.train(x).detach()
        w.beta = w.beta * 0.99 + 0.0001
        w.average.mul_(w.beta).add_(loss, alpha=1 - w.beta)
        return w.average / (1 - w.beta)

    return step


@moves
def cumulative_batch_norm(w: World) -> Step:
    norm: Any = w.model[1]  # type: ignore[index]
    norm.momentum = None
    return lambda x: w.train(x).detach()


@replays(3)
def best_loss(w: World) -> Step:
    w.best = 1e9

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.best = min(w.best, loss.item() + 1e6)
        return loss.detach()

    return step


@replays(2)
def accumulation(w: World) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = w.model(x).square().mean()
        loss.backward()
        w.n += 1
        if w.n == 2:
            w.optimizer.step()
            w.optimizer.zero_grad()
            w.n = 0
        return loss.detach()

    return step


@moves
def modulo(w: World) -> Step:
    def step(x: Tensor) -> Tensor:
        w.n = (w.n * 5 + 3) % 1009
        return w.train(x).detach() * w.n

    return step


@moves
def swapped_numbers(w: World) -> Step:
    w.a, w.b = 1, 2

    def step(x: Tensor) -> Tensor:
        w.a, w.b = w.b, w.a + w.b
        return w.train(x).detach()

    return step


class Proxy:
    def __init__(self) -> None:
        self.__dict__["values"] = {"n": 0}

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[name] = value


@moves
def set_by_a_descriptor(w: World) -> Step:
    w.proxy = Proxy()

    def step(x: Tensor) -> Tensor:
        w.proxy.n += 1
        return w.train(x).detach()

    return step


class Named:
    def __init__(self) -> None:
        self._steps = 0

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value


@moves
def set_by_a_property(w: World) -> Step:
    w.named = Named()

    def step(x: Tensor) -> Tensor:
        w.named.steps += 2
        return w.train(x).detach()

    return step


@moves
def one_dict_by_two_names(w: World) -> Step:
    w.first = {"n": 0}
    w.second = w.first

    def step(x: Tensor) -> Tensor:
        w.first["n"] += 1
        w.second["n"] += 10
        return w.train(x).detach()

    return step


@moves
def lazily_built(w: World) -> Step:
    w.scale = None

    def step(x: Tensor) -> Tensor:
        if w.scale is None:
            w.scale = 2.0
        return w.train(x).detach() * w.scale

    return step


@moves
def number_in_an_optimizers_state(w: World) -> Step:
    class Signed(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.add_(p.grad.sign(), alpha=-0.01 / state["step"])

    w.optimizer = Signed(w.model.parameters(), {"lr": 0.1})
    return lambda x: w.train(x).detach()


@replays(8)
def numbers_in_an_optimizers_groups(w: World) -> Step:
    class Averaging(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            group = self.param_groups[0]
            group["step"] = group.get("step", 0) + 1
            group["norm"] += sum(p.grad.square().sum().item() for p in group["params"])
            group["rate"] = group["lr"] / math.sqrt(1 + group["norm"]) / group["step"]
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["rate"])

    w.optimizer = Averaging(w.model.parameters(), {"lr": 0.1, "norm": 0.0})
    read = w.optimizer.state_dict

    def step(x: Tensor) -> Tensor:
        return w.train(x).detach()

    w.groups = lambda: read()["param_groups"]
    return step


# -- tensors ---------------------------------------------------------------------------------------


@moves
def last_loss(w: World) -> Step:
    w.last = None

    def step(x: Tensor) -> None:
        w.last = w.train(x).detach()

    return step


@moves
def loss_before(w: World) -> Step:
    w.last = torch.zeros(())

    def step(x: Tensor) -> Tensor:
        loss = w.train(x).detach()
        difference = loss - w.last
        w.last = loss
        return difference

    return step


@moves
def metrics(w: World) -> Step:
    w.metrics = {}

    def step(x: Tensor) -> None:
        loss = w.train(x)
        w.metrics["loss"] = loss.item()
        w.metrics["norm"] = x.norm()
        w.metrics["rows"] = len(x)

    return step


@moves
def moving_average_of_parameters(w: World) -> Step:
    w.ema = {k: p.detach().clone() for k, p in w.model.named_parameters()}

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        with torch.no_grad():
            for k, p in w.model.named_parameters():
                w.ema[k] = w.ema[k] * 0.9 + p * 0.1
        return loss.detach()

    return step


@moves
def views_of_one_storage(w: World) -> Step:
    w.all = w.first = None

    def step(x: Tensor) -> Tensor:
        w.all = w.model(x).detach()
        w.first = w.all[0]
        w.first.add_(1)
        return w.train(x).detach()

    return step


@moves
def buffer_rebound_in_a_module(w: World) -> Step:
    class Centered(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.center = inner, torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            self.center = self.center * 0.5 + out.detach().mean(0) * 0.5
            return out - self.center

    w.model = Centered(w.model)
    return lambda x: w.train(x).detach()


@moves
def result_that_is_kept(w: World) -> Step:
    w.last = None

    def step(x: Tensor) -> Tensor:
        w.last = w.train(x).detach()
        return w.last

    return step


@moves
def argument_that_is_kept(w: World) -> Step:
    w.batch = None

    def step(x: Tensor) -> Tensor:
        w.batch = x
        return w.train(x).detach()

    return step


@moves
def storage_of_a_parameter(w: World) -> Step:
    w.snapshot = None

    def step(x: Tensor) -> Tensor:
        w.snapshot = w.model[0].weight.detach()[1:]  # type: ignore[index]
        return w.train(x).detach()

    return step


@moves
def tensor_that_a_hook_keeps(w: World) -> Step:
    w.kept = {}

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        module.last = out.detach()
        w.kept["last"] = out.detach() * 2

    w.model[0].register_forward_hook(keep)  # type: ignore[index]
    return lambda x: w.train(x).detach()


# -- lists -----------------------------------------------------------------------------------------


@moves
def losses(w: World) -> Step:
    w.losses = []

    def step(x: Tensor) -> None:
        w.losses.append(w.train(x).item())

    return step


@moves
def losses_in_a_cell(w: World) -> Step:
    losses: list[float] = []

    def step(x: Tensor) -> None:
        losses.append(w.train(x).item())

    return step


@moves
def history_of_tensors(w: World) -> Step:
    w.history = []

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.history.append(loss.detach())
        return loss.detach()

    return step


@moves
def history_of_records(w: World) -> Step:
    w.history = []

    def step(x: Tensor) -> None:
        loss = w.train(x)
        w.n += 1
        w.history.append({"loss": loss.item(), "step": w.n, "rows": [len(x), (1, "a")]})

    return step


@moves
def two_appended(w: World) -> Step:
    w.losses, w.norms = [], []

    def step(x: Tensor) -> None:
        loss = w.train(x)
        w.losses.append(loss.item())
        w.norms.append(x.norm().item())
        w.losses.append(-loss.item())

    return step


class Logged(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norms = inner, []  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.norms.append(out.detach().norm())
        return out


@moves
def list_of_a_module(w: World) -> Step:
    w.model = Logged(w.model)
    return lambda x: w.train(x).detach()


@moves
def lists_in_a_dict(w: World) -> Step:
    w.history = {"loss": [], "norm": []}

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.history["loss"].append(loss.item())
        w.history["norm"].append(x.norm())
        return loss.detach()

    return step


@moves
def lists_by_a_variable_key(w: World) -> Step:
    w.history = defaultdict(list)

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        for name, value in (("loss", loss), ("norm", x.norm())):
            w.history[name].append(value.item())
        return loss.detach()

    return step


# -- what no replay repeats ------------------------------------------------------------------------


@refused(
    r"`w.losses` is a list of 2, was a list of 1: append.*\n  `losses` of a World\n  changed at .*w.losses.append"
)
def list_that_is_read(w: World) -> Step:
    w.losses = []

    def step(x: Tensor) -> float:
        w.losses.append(w.train(x).item())
        return sum(w.losses)

    return step


@replays(5)
def text_that_alternates(w: World) -> Step:
    w.phase = "warm"

    def step(x: Tensor) -> Any:
        loss = w.train(x).detach() * (2 if w.phase == "warm" else 3)
        w.phase = "hot" if w.phase == "warm" else "warm"
        return loss

    return step


@refused(r"`w.label` is 'call \d', was 'call \d'", 3)
def text_that_is_computed(w: World) -> Step:
    w.label = "call 0"

    def step(x: Tensor) -> Any:
        w.n += 1
        w.label = f"call {w.n}"
        return w.train(x).detach()

    return step


@refused(r"`w.recent` is a deque of 2, was a deque of 1: give it a bound \(`deque\(maxlen=n\)`\)")
def deque_without_bound(w: World) -> Step:
    w.recent = deque()

    def step(x: Tensor) -> float:
        w.recent.append(w.train(x).item())
        return sum(w.recent)

    return step


@replays(6)
def deque_of_losses(w: World) -> Step:
    w.recent = deque(maxlen=3)

    def step(x: Tensor) -> None:
        w.recent.append(w.train(x).item())

    return step


@replays(6)
def deque_that_is_read(w: World) -> Step:
    w.recent = deque(maxlen=3)

    def step(x: Tensor) -> float:
        w.recent.appendleft(w.train(x).item())
        return sum(w.recent) / len(w.recent)

    return step


@replays(5)
def full_deque(w: World) -> Step:
    w.recent = deque([0.0] * 4, maxlen=4)

    def step(x: Tensor) -> Any:
        w.recent.append(w.train(x).item())
        w.recent.rotate(2)
        return w.recent[0]

    return step


@replays(4)
def deque_without_bound_that_is_popped(w: World) -> Step:
    w.recent = deque(torch.zeros(()) for _ in range(4))

    def step(x: Tensor) -> Any:
        first = w.recent.popleft()
        w.recent.append(w.train(x).detach() + first)
        return first

    return step


@replays(4)
def list_of_module_changed_in_place(w: World) -> Step:
    w.model.ring = [torch.zeros(()) for _ in range(3)]  # type: ignore[assignment]

    def step(x: Tensor) -> Any:
        ring: Any = w.model.ring
        mean = sum(ring) / len(ring)
        ring.append(w.train(x).detach() * mean)
        ring.pop(0)
        return mean

    return step


@replays(4)
def table_of_module_changed_in_place(w: World) -> Step:
    w.model.table = {"h": torch.zeros(()), "n": 0}  # type: ignore[assignment]

    def step(x: Tensor) -> Any:
        table: Any = w.model.table
        table["h"] = w.train(x).detach() + table["h"] * 0.5
        table["n"] += 1
        return table["h"] * table["n"]

    return step


@refused(r"reads time.perf_counter at .*w.at = time.perf_counter\(\), which changes by itself and")
def time_of_the_call(w: World) -> Step:
    w.at = 0.0

    def step(x: Tensor) -> Tensor:
        w.at = time.perf_counter()
        return w.train(x).detach()

    return step


@refused(r"assigns `w.nodes`: with a number of its own at every call", at=3)
def nodes_in_all(w: World) -> Step:
    w.nodes = 0

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.nodes += loss.grad_fn._sequence_nr()  # no clock that is known
        return loss.detach()

    return step


@refused(r"reads time.perf_counter at .*loss = w.train\(x\), time.perf_counter\(\), which changes")
def seconds_in_the_result(w: World) -> Step:
    def step(x: Tensor) -> Any:
        loss = w.train(x), time.perf_counter()
        return loss[0].detach() if loss[1] > 0 else loss

    return step


@refused(r"reads files, by os.stat at .*if not os.path.exists\(w.stop\):, which changes by itself")
def file_that_ends_the_run(w: World) -> Step:
    w.stop = "a file that is not there"

    def step(x: Tensor) -> Tensor | None:
        if not os.path.exists(w.stop):
            return w.train(x).detach()
        return None

    return step


@refused(r"reads a file, `.*moving_steps.py`, at .*Path\(__file__\)")
def file_that_every_call_reads(w: World) -> Step:
    def step(x: Tensor) -> Tensor:
        return w.train(x).detach() * len(Path(__file__).read_text())

    return step


@replays(3)
def file_that_the_first_call_reads(w: World) -> Step:
    w.has_read = False

    def step(x: Tensor) -> Tensor:
        if not w.has_read:
            w.has_read = os.path.exists(__file__)
        return w.train(x).detach()

    return step


@replays(4)
def flag_that_toggles(w: World) -> Step:
    w.is_even = True

    def step(x: Tensor) -> Tensor:
        w.is_even = not w.is_even
        return w.train(x if w.is_even else 2 * x).detach()

    return step


@refused(r"assigns `w.last` with a tensor that has an autograd history: detach it")
def loss_with_its_history(w: World) -> Step:
    w.last = None

    def step(x: Tensor) -> None:
        w.last = w.train(x)

    return step


@refused(r"`w.text` is .*, was .*\n  `text` of a World\n  changed at .*w.text = ")
def text_of_a_loss(w: World) -> Step:
    w.text = ""

    def step(x: Tensor) -> None:
        w.text = f"{w.train(x).item():.3f}"

    return step


@moves
def swapped_tensors(w: World) -> Step:
    w.a, w.b = torch.zeros(2), torch.ones(2)

    def step(x: Tensor) -> Tensor:
        w.a, w.b = w.b, w.a
        return w.train(x).detach() + w.a.sum()

    return step


@refused(r"`w.by_name.losses` is a list of 2, was a list of 1")
def list_that_a_loop_over_a_dict_reads(w: World) -> Step:
    w.by_name = {"losses": []}

    def step(x: Tensor) -> int:
        loss, rows = w.train(x), 0
        for _, values in w.by_name.items():
            values.append(loss.item())
            rows += len(values)
        return rows

    return step


@refused(r"`w.history.loss` is a list of 2, was a list of 1")
def list_in_a_dict_that_is_read(w: World) -> Step:
    w.history = {"loss": []}

    def step(x: Tensor) -> int:
        w.history["loss"].append(w.train(x).item())
        return len(w.history["loss"])

    return step


@refused(r"`w.logs.train.loss` is a list of 2, was a list of 1")
def list_in_a_dict_of_dicts_that_keys_read(w: World) -> Step:
    w.logs = {"train": {"loss": []}}

    def step(x: Tensor) -> int:
        loss, rows = w.train(x), 0
        for name in w.logs:
            rows += len(w.logs[name]["loss"])
            w.logs[name]["loss"].append(loss.item())
        return rows

    return step


@refused(r"`w.(history|logs).loss` is a list of 2, was a list of 1")
def list_in_a_dict_that_has_two_names(w: World) -> Step:
    w.history = w.logs = {"loss": []}

    def step(x: Tensor) -> int:
        w.history["loss"].append(w.train(x).item())
        return sum(map(len, w.logs.values()))

    return step


@refused(r"`w.losses` is a list of 2, was a list of 1")
def list_that_getattr_reads(w: World) -> Step:
    w.losses, w.which = [], "losses"

    def step(x: Tensor) -> int:
        w.losses.append(w.train(x).item())
        return len(getattr(w, w.which))

    return step


@refused(r"`w.losses` is a list of 2, was a list of 1")
def list_that_a_helper_reads(w: World) -> Step:
    w.losses = []

    def last(values: list[float]) -> float:
        return values[-1]

    def step(x: Tensor) -> float:
        w.losses.append(w.train(x).item())
        return last(w.losses)

    return step


@refused(r"gives `w\.last` another storage")
def storage_that_is_replaced(w: World) -> Step:
    w.last, w.turn = torch.zeros(()), torch.zeros(())

    def step(x: Tensor) -> Tensor:
        loss = w.train(x).detach()
        w.last.data = loss
        return loss + w.last

    return step


class Steps(int):
    pass


@refused(
    r"`w.n` is the Steps 2, was the Steps 1: do so outside the step\n  `n` of a World\n  changed at .*w.n = Steps"
)
def subclass_of_int(w: World) -> Step:
    w.n = Steps(0)

    def step(x: Tensor) -> Tensor:
        w.n = Steps(w.n + 1)
        return w.train(x).detach()

    return step


@refused(r"appends to `w.history` a dict that a replay cannot make again")
def record_that_another_holds(w: World) -> Step:
    w.history, w.keep = [], [None]

    def step(x: Tensor) -> Any:
        found = {"loss": w.train(x).item()}
        w.history.append(found)
        return found

    return step


@refused(r"`w.seen` .*\n  changed at .*w.seen.add")
def set_that_grows(w: World) -> Step:
    w.seen = set()

    def step(x: Tensor) -> Tensor:
        w.seen.add(len(w.seen))
        return w.train(x).detach()

    return step


@moves
def element_of_a_tuple(w: World) -> Step:
    w.pair = (0, "a")

    def step(x: Tensor) -> Tensor:
        w.pair = (w.pair[0] + 1, "a")
        return w.train(x).detach()

    return step


# -- objects that the step replaces by others ------------------------------------------------------


@refused(
    r"`w.meter` is another object: keep one object.*\n  `meter` of a World\n  changed at .*w.meter = Average",
    at=3,
)
def meter_that_is_made_anew(w: World) -> Step:
    w.meter = AverageMeter()

    def step(x: Tensor) -> Tensor:
        w.meter = AverageMeter()
        loss = w.train(x)
        w.meter.update(loss.item())
        return loss.detach()

    return step


@refused(
    r"`w.history` is a list of 2, was a list of 1: append.*\n  `history` of a World\n  changed at .*w.history = "
)
def list_that_is_extended_by_another(w: World) -> Step:
    w.history = []

    def step(x: Tensor) -> None:
        w.history = w.history + [w.train(x).item()]  # noqa: RUF005

    return step


@moves
def last_losses(w: World) -> Step:
    w.recent = [0.0, 0.0, 0.0]

    def step(x: Tensor) -> float:
        w.recent = [*w.recent[1:], w.train(x).item()]
        return sum(w.recent)

    return step


@moves
def metrics_of_numbers_in_a_new_dict(w: World) -> Step:
    """The learning rate is live, and the same at every call so far."""
    w.metrics = {"loss": 0.0, "n": 0, "lr": 0.0}

    def step(x: Tensor) -> None:
        w.n += 1
        lr = w.optimizer.param_groups[0]["lr"]
        w.metrics = {"loss": w.train(x).item(), "n": w.n, "lr": lr}

    return step


@moves
def metrics_in_an_empty_dict(w: World) -> Step:
    """The first call makes the keys."""
    w.metrics = {}

    def step(x: Tensor) -> None:
        w.metrics["loss"] = w.train(x).item()
        w.metrics["lr"] = w.optimizer.param_groups[0]["lr"]

    return step


class Counts(NamedTuple):
    n: int = 0
    average: float = 0.0


@moves
def named_tuple_that_is_replaced(w: World) -> Step:
    w.counts = Counts()

    def step(x: Tensor) -> None:
        loss = w.train(x).item()
        w.counts = w.counts._replace(n=w.counts.n + 1, average=0.9 * w.counts.average + 0.1 * loss)

    return step


@dataclass(frozen=True)
class Frozen:
    n: int = 0
    best: float = 9.0


@moves
def frozen_dataclass_that_is_replaced(w: World) -> Step:
    w.frozen = Frozen()

    def step(x: Tensor) -> None:
        loss = w.train(x).item()
        w.frozen = replace(w.frozen, n=w.frozen.n + 1, best=min(w.frozen.best, loss))

    return step


@moves
def meter_of_a_module(w: World) -> Step:
    w.model.meter = AverageMeter()

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.model.meter.update(loss.item())  # type: ignore[union-attr, operator]
        return loss.detach()

    return step


@moves
def namespace_of_a_module(w: World) -> Step:
    w.model.counts = types.SimpleNamespace(n=0, last=0.0)  # type: ignore[assignment]

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.model.counts.n += 1  # type: ignore[union-attr, operator]
        w.model.counts.last = loss.item()  # type: ignore[union-attr, operator, assignment]
        return loss.detach()

    return step


@moves
def tensor_in_a_meter_of_a_module(w: World) -> Step:
    w.model.meter = AverageMeter()

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.model.meter.update(loss.detach())  # type: ignore[union-attr, operator]
        return loss.detach() * w.model.meter.avg  # type: ignore[union-attr, operator]

    return step


@dataclass
class Progress:
    n: int = 0
    losses: list[float] = field(default_factory=list)


@moves
def list_of_a_dataclass(w: World) -> Step:
    """Of which methods that `dataclasses` has made read the list."""
    w.progress = Progress()

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.progress.n += 1
        w.progress.losses.append(loss.item())
        return loss.detach()

    return step


@refused(r"appends to `w.progress.losses`, and reads it by `__repr__` of a Progress", at=3)
def list_of_a_dataclass_that_is_printed(w: World) -> Step:
    w.progress, w.length = Progress(), 0

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.progress.losses.append(loss.item())
        w.length = len(f"{w.progress}") > 100
        return loss.detach()

    return step


@refused(r"appends to `w.progress.losses`, and reads it by `__eq__` of a Progress")
def list_of_a_dataclass_that_is_compared(w: World) -> Step:
    w.progress, w.other, w.equal = Progress(), Progress(losses=[0.0]), 0

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.progress.losses.append(loss.item())
        w.equal += w.progress == w.other
        return loss.detach()

    return step


@moves
def deque_without_a_bound(w: World) -> Step:
    w.losses = deque()

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.losses.append(loss.item())
        return loss.detach()

    return step


@moves
def least_and_greatest(w: World) -> Step:
    """Which of two numbers is the least is decided by each replay."""
    w.best, w.worst, w.scale = 9.0, 0.0, 1.0

    def step(x: Tensor) -> Tensor:
        w.n += 1
        loss = w.train(x * min(1.0, w.n / 7)).item()
        w.best, w.worst = min(w.best, loss), max([w.worst, loss, 0.001])
        w.scale = max(0.1, 1 - w.n / 5)
        return x * w.scale

    return step


@moves
def number_that_is_computed_and_stays(w: World) -> Step:
    w.factor = 1.0

    def step(x: Tensor) -> Tensor:
        w.n += 1
        w.factor = min(1.0, 0.5 * w.n)
        return w.train(x * w.factor).detach()

    return step


@moves
def least_of_what_is_no_number(w: World) -> Step:
    """The least of a NaN and a number is the first of them, as 0.0 and -0.0 are."""
    w.found, w.zero = 0.0, 0.0

    def step(x: Tensor) -> Tensor:
        w.n += 1
        w.found = min(float("nan"), w.train(x).item())
        w.zero = min(0.0, -0.0 * w.n)
        return x * max(w.n, 3)

    return step


@replays(4)
def metrics_in_a_new_dict(w: World) -> Step:
    w.metrics = {}

    def step(x: Tensor) -> None:
        loss = w.train(x)
        w.metrics = {"loss": loss.detach(), "number": loss.item()}

    return step


@moves
def average_in_a_new_dict(w: World) -> Step:
    w.average = {k: p.detach().clone() for k, p in w.model.named_parameters()}

    def step(x: Tensor) -> Tensor:
        loss = w.train(x)
        w.average = {k: w.average[k] * 0.9 + p.detach() for k, p in w.model.named_parameters()}
        return loss.detach()

    return step


@moves
def hidden_state_in_a_new_tuple(w: World) -> Step:
    w.hidden = (torch.zeros(2), torch.zeros(2))

    def step(x: Tensor) -> Tensor:
        first, second = w.hidden
        out: Tensor = w.model(x).mean(0) + first - second
        w.train(x)
        w.hidden = (out.detach(), second + 1)
        return out.detach()

    return step
