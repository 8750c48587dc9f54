"""What a script gives to objects that are read by their content counts: attributes, slots, classes, moves of a step.

Also: objects of C code that cannot be read and weak references that may die are refused, special methods of classes
without a file are searched, and the type of a tensor is a guard.
"""

from __future__ import annotations

import array
import concurrent.futures
import contextvars
import ctypes
import decimal
import enum
import functools
import gc
import io
import itertools
import linecache
import logging
import multiprocessing
import operator
import os
import queue
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError


class _Logger(logging.Logger):
    def weight(self) -> Any:
        return self.k  # type: ignore[attr-defined]


class _Queue(queue.Queue):  # type: ignore[type-arg]
    def weight(self) -> Any:
        return self.k  # type: ignore[attr-defined]


class _Random(random.Random):
    def weight(self) -> Any:
        return self.k  # type: ignore[attr-defined]


class _Ref(weakref.ref):  # type: ignore[type-arg]
    pass


class _Slotted(functools.partial):  # type: ignore[type-arg]
    __slots__ = ("k", "n")


class _Table(dict):  # type: ignore[type-arg]
    __slots__ = ("k", "n")


class _Row(list):  # type: ignore[type-arg]
    __slots__ = ("k", "n")


class _Text(io.StringIO):
    pass


class _Deque(deque):  # type: ignore[type-arg]
    pass


class _Array(array.array):  # type: ignore[type-arg]
    pass


class _Number(ctypes.c_int):
    pass


class _Generator(torch.Generator):
    pass


class _Method(functools.partialmethod):  # type: ignore[type-arg]
    pass


_SPECIAL: dict[str, Callable[[], Any]] = {
    "partial": lambda: functools.partial(int),
    "subclass of partial with slots": lambda: _Slotted(int),
    "partialmethod": lambda: functools.partialmethod(int),
    "subclass of partialmethod": lambda: _Method(int),
    "logger": lambda: logging.Logger("mine"),
    "subclass of Logger": lambda: _Logger("mine"),
    "adapter": lambda: logging.LoggerAdapter(logging.Logger("mine"), {}),
    "queue": lambda: queue.Queue(),
    "lifo": lambda: queue.LifoQueue(),
    "subclass of Queue": lambda: _Queue(),
    "random": lambda: random.Random(1),
    "subclass of Random": lambda: _Random(1),
    "subclass of ref": lambda: _Ref(_at_home),
    "text file": lambda: io.StringIO(),
    "subclass of StringIO": lambda: _Text(),
    "bytes file": lambda: io.BytesIO(),
    "deque": lambda: _Deque(),
    "array": lambda: _Array("d"),
    "number of C": lambda: _Number(),
    "dict": lambda: UserDict(),
    "dict with slots": lambda: _Table(k=5),
    "list with slots": lambda: _Row([5]),
    "handler": lambda: logging.NullHandler(),
    "cached function": lambda: functools.cache(lambda: None),
    "event": lambda: threading.Event(),
    "thread": lambda: threading.Thread(),
    "future": lambda: concurrent.futures.Future(),
    "staticmethod": lambda: staticmethod(int),
    "generator of torch": lambda: _Generator(),
}


def _calls(wrap: Callable[..., Any], special: Any, does_move: bool) -> list[Any]:
    special.k, special.n = 1.0, 0

    def read(x: Tensor) -> Tensor:
        return x * (special.weight() if hasattr(special, "weight") else special.k)

    def move(x: Tensor) -> Tensor:
        special.n += 1
        return x * 2

    step, found = wrap(move if does_move else read), []
    for i in range(9):
        if i > 3:
            special.k = float(i // 2)
        found.append((step(torch.ones(1)).item(), special.n))
    return found


@pytest.mark.parametrize("name", _SPECIAL)
def test_an_attribute_that_the_caller_changes_is_a_guard(name: str) -> None:
    expected = _calls(lambda fn: fn, _SPECIAL[name](), does_move=False)
    captured: list[Any] = []

    def capture(fn: Callable[..., Any]) -> Any:
        captured.append(fz.capture(fn, audit=False))
        return captured[0]

    assert _calls(capture, _SPECIAL[name](), does_move=False) == expected
    assert captured[0].stats.replays, captured[0].explain()


@pytest.mark.parametrize("name", _SPECIAL)
def test_a_counter_there_moves_as_in_eager_or_the_step_is_refused(name: str) -> None:
    expected = _calls(lambda fn: fn, _SPECIAL[name](), does_move=True)
    try:
        found = _calls(lambda fn: fz.capture(fn, audit=False), _SPECIAL[name](), does_move=True)
    except UncapturableError as error:
        assert "special.n" in str(error) or "special" in str(error)
        assert name not in ("partial", "logger", "queue", "random", "text file")
        return
    assert found == expected


def test_no_method_of_the_user_is_called_to_read_a_generator() -> None:
    class Counting(random.Random):
        asked = 0

        def getstate(self) -> Any:
            Counting.asked += 1
            return super().getstate()

    special = Counting(1)
    special.k = 2.0  # type: ignore[attr-defined]
    step = fz.capture(lambda x: x * special.k, audit=False)  # type: ignore[attr-defined]
    assert [step(torch.ones(1)).item() for _ in range(4)] == [2.0] * 4
    assert Counting.asked == 0


def test_another_class_attribute_of_a_subclass_is_a_guard() -> None:
    class Scaled(random.Random):
        scale = 1.0

    special = Scaled(1)
    step = fz.capture(lambda x: x * special.scale, audit=False)
    assert [step(torch.ones(1)).item() for _ in range(4)] == [1.0] * 4
    Scaled.scale = 3.0
    assert step(torch.ones(1)).item() == 3.0


def test_a_replaced_dict_of_attributes_is_a_guard() -> None:
    special = functools.partial(int)
    special.k = 1.0  # type: ignore[attr-defined]
    step = fz.capture(lambda x: x * special.k, audit=False)  # type: ignore[attr-defined]
    assert [step(torch.ones(1)).item() for _ in range(4)] == [1.0] * 4
    special.__dict__ = {"k": 3.0}
    assert step(torch.ones(1)).item() == 3.0


def test_attributes_in_which_a_library_keeps_content_are_no_facts() -> None:
    log = logging.Logger("mine")
    words = {"_cache": 1.0, "manager": 1.0}
    step = fz.capture(lambda x: x * sum(words[k] for k in vars(log) if k in words), audit=False)
    for _ in range(6):
        step(torch.ones(1))
        log.isEnabledFor(10 + len(log._cache))  # type: ignore[attr-defined]
    assert step.stats.captures == 1, step.explain()


# -- locks, events, futures, weak references ---------------------------------------------------------


def _taken(lock: Any) -> int:
    return 2 if lock.acquire(False) and not lock.release() else 3


_LOCKS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "event": (multiprocessing.Event, lambda e: 2 if e.is_set() else 3, lambda e: e.set()),
    "lock of processes": (multiprocessing.Lock, _taken, lambda lock: lock.acquire()),
    "count": (lambda: multiprocessing.Semaphore(3), lambda s: s.get_value(), lambda s: s.acquire()),
    "lock": (threading.Lock, _taken, lambda lock: lock.acquire()),
    "semaphore": (threading.Semaphore, _taken, lambda lock: lock.acquire()),
    "value": (
        lambda: multiprocessing.Value("d", 1.0),
        lambda v: v.value,
        lambda v: setattr(v, "value", 2.0),
    ),
    "variable": (
        lambda: contextvars.ContextVar("v", default=1.0),
        lambda v: v.get(),
        lambda v: v.set(2.0),
    ),
    "getter": (
        lambda: [operator.itemgetter("a"), {"a": 1.0}],
        lambda pair: pair[0](pair[1]),
        lambda pair: pair[1].update(a=2.0),
    ),
    "unfinished tasks": (
        queue.Queue,
        lambda q: q.unfinished_tasks + 1,
        lambda q: setattr(q, "unfinished_tasks", 2),
    ),
    "finalizer": (
        lambda: weakref.finalize(_at_home, int),
        lambda f: 2 if f.alive else 3,
        lambda f: f.detach(),
    ),
    "finalizer at exit": (
        lambda: weakref.finalize(_at_home, int),
        lambda f: 2 if f.atexit else 3,
        lambda f: setattr(f, "atexit", False),
    ),
    "handlers": (
        lambda: logging.Logger("mine"),
        lambda log: 2 if log.hasHandlers() else 3,
        lambda log: log.addHandler(logging.NullHandler()),
    ),
    "list of handlers": (
        lambda: logging.Logger("mine"),
        lambda log: len(log.handlers) + 1,
        lambda log: log.addHandler(logging.NullHandler()),
    ),
    "endless repetition": (
        lambda: [itertools.repeat(1.0)],
        lambda held: next(held[0]),
        lambda held: operator.setitem(held, 0, itertools.repeat(2.0)),
    ),
    "precision": (
        decimal.Context,
        lambda context: context.prec,
        lambda context: setattr(context, "prec", 7),
    ),
    "level": (
        lambda: logging.Logger("mine"),
        lambda log: 2 if log.isEnabledFor(20) else 3,
        lambda log: log.setLevel(30),
    ),
    "attribute of a member": (
        lambda: enum.Enum("Color", "RED"),
        lambda color: getattr(color.RED, "w", 1.0),
        lambda color: setattr(color.RED, "w", 2.0),
    ),
    "wrapped file": (
        lambda: io.BufferedWriter(io.BytesIO(b"abc")),
        lambda file: len(file.raw.getvalue()) + 1,
        lambda file: file.truncate(1),
    ),
    "maxsize": (
        lambda: queue.Queue(3),
        lambda q: 2 if q.full() else 3,
        lambda q: q.put(setattr(q, "maxsize", 1)),
    ),
}


@pytest.mark.parametrize("name", _LOCKS)
def test_state_of_synchronization_is_a_guard(name: str) -> None:
    make, read, change = _LOCKS[name]

    def calls(wrap: Callable[..., Any]) -> list[float]:
        special, found = make(), []
        step = wrap(lambda x: x * read(special))
        for i in range(8):
            if i == 5:
                change(special)
            found.append(step(torch.ones(1)).item())
        return found

    assert calls(lambda fn: fz.capture(fn, audit=False)) == calls(lambda fn: fn)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (torch.futures.Future, "Future"),
        (torch.distributed.HashStore, "HashStore"),
        (threading.local, "_local"),
        (random.SystemRandom, "SystemRandom"),
        (lambda: io.BufferedRWPair(io.BytesIO(b"abc"), io.BytesIO()), "BufferedRWPair"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(make: Callable[[], Any], word: str) -> None:
    special = make()
    step = fz.capture(lambda x: x * (2 if special else 3), on_uncapturable="raise")
    with pytest.raises(UncapturableError, match=rf"`special` \(an? {word}\)"):
        for _ in range(3):
            step(torch.ones(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(1, 1),
        lambda: torch.ones(1),
        lambda: lambda: 1,
        lambda: type("C", (), {}),
        lambda: {1},
        lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
    ],
)
def test_a_weak_reference_that_a_program_would_keep_alive_is_refused(
    make: Callable[[], Any],
) -> None:
    held = make()
    reference = weakref.ref(held)
    step = fz.capture(lambda x: x * (2 if reference() is None else 3), on_uncapturable="raise")
    with pytest.raises(UncapturableError, match=r"`reference` \(a weak reference to an? "):
        for _ in range(3):
            step(torch.ones(1))


def test_a_weak_reference_to_what_the_step_reads_is_no_refusal() -> None:
    model = nn.Linear(1, 1)
    references = [weakref.ref(model), weakref.ref(model.weight), weakref.ref(_at_home)]
    step = fz.capture(
        lambda x: model(x).detach() * sum(each() is not None for each in references), audit=False
    )
    for _ in range(5):
        step(torch.ones(1, 1))
    assert step.stats.replays >= 2, step.explain()


def _at_home() -> None: ...


class _Thing:
    k = 1.0


@pytest.mark.parametrize("is_proxy", [False, True])
def test_an_object_that_dies_is_noticed(is_proxy: bool) -> None:
    held = _Thing()
    reference: Any = (weakref.proxy if is_proxy else weakref.ref)(held)

    def read(x: Tensor) -> Tensor:
        try:
            return x * (reference.k if is_proxy else 2 if reference() is None else 1)
        except ReferenceError:
            return x * 2

    step = fz.capture(read, audit=False)
    assert [step(torch.ones(1)).item() for _ in range(4)] == [1.0] * 4
    del held
    gc.collect()
    assert step(torch.ones(1)).item() == 2.0


# -- classes without a file --------------------------------------------------------------------------

_SOURCE = """
class Scale:
    def __init__(self): self.k = 1.0
    def __mul__(self, x): return x * self.k
    def __call__(self, x): return x * self.k
    def __bool__(self): return self.k > 2
    def __getitem__(self, i): return self.k
    def __len__(self): return int(self.k)
    def __contains__(self, x): return self.k > 2
    def __iter__(self): return iter([self.k])
    def __enter__(self): return self.k
    def __exit__(self, *error): pass
    def __getattr__(self, name): return self.__dict__["k"]
    def __eq__(self, other): return self.k > 2
    def __float__(self): return self.k
"""


def _entered(scale: Any, x: Tensor) -> Tensor:
    with scale as k:
        return x * k  # type: ignore[no-any-return]


_USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "*": lambda s, x: s * x,
    "()": lambda s, x: s(x),
    "bool": lambda s, x: x * (2 if s else 3),
    "[]": lambda s, x: x * s[0],
    "len": lambda s, x: x * len(s),
    "in": lambda s, x: x * (2 if 1 in s else 3),
    "iter": lambda s, x: x * sum(s),
    "with": _entered,
    "getattr": lambda s, x: x * s.anything,
    "==": lambda s, x: x * (2 if s == 1 else 3),
    "float": lambda s, x: x * float(s),  # C accepts an exact float only
}


@pytest.mark.parametrize("use", _USES)
@pytest.mark.parametrize("file", ["<string>", "<stdin>", "<ipython-input-3-abc>"])
def test_special_methods_of_a_class_without_a_file_are_searched(use: str, file: str) -> None:
    space: dict[str, Any] = {"__name__": "a_notebook"}
    linecache.cache[file] = (len(_SOURCE), None, _SOURCE.splitlines(True), file)
    exec(compile(_SOURCE, file, "exec"), space)

    def calls(wrap: Callable[..., Any]) -> list[float]:
        scale, found = space["Scale"](), []
        step = wrap(lambda x: _USES[use](scale, x))
        for i in range(9):
            if i > 3:
                scale.k = float(i // 2)
            found.append(step(torch.ones(1)).item())
        return found

    assert calls(lambda fn: fz.capture(fn, audit=False)) == calls(lambda fn: fn)


def test_special_methods_of_a_class_in_a_command_line_are_searched() -> None:
    rest = """
import torch, functionalize as fz
scale = Scale()
def step(x): return scale * x
captured = fz.capture(step, audit=False)
found = []
for i in range(6):
    if i > 3: scale.k = 3.0
    found.append(captured(torch.ones(1)).item())
print(found, captured.stats.replays)
"""
    command = [sys.executable, "-W", "ignore", "-c", _SOURCE + textwrap.dedent(rest)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("] ")[0] == "[1.0, 1.0, 1.0, 1.0, 3.0, 3.0", done.stdout
    assert int(done.stdout.split("] ")[1]) >= 1


# -- the type of a tensor ----------------------------------------------------------------------------


class _Shifted(Tensor):
    """A product with such a tensor has 100 more."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result + 100 if func is Tensor.mul else result


def _shifted(x: Tensor) -> Tensor:
    return Tensor.as_subclass(x, _Shifted)


class _Seven(int):
    def __rmul__(self, other: Any) -> Any:
        return other * 7

    def __mul__(self, other: Any) -> Any:
        return other * 7


class _Pair(tuple):  # type: ignore[type-arg]
    pass


_ARGUMENTS: dict[str, tuple[Any, Any, Any]] = {
    "tensor": (lambda x: x * 2, lambda x: x, _shifted),
    "parameter": (
        lambda x: x * (2 if type(x) is Tensor else 3),
        lambda x: x,
        lambda x: nn.Parameter(x, requires_grad=False),
    ),
    "in a list": (lambda x: x[0] * 2, lambda x: [x], lambda x: [_shifted(x)]),
    "deep": (lambda x: x["a"][0] * 2, lambda x: {"a": (x,)}, lambda x: {"a": (_shifted(x),)}),
    "int": (lambda x: x[0] * x[1], lambda x: (x, 2), lambda x: (x, _Seven(2))),
    "bool": (
        lambda x: x[0] * (2 if type(x[1]) is int else 3),
        lambda x: (x, 1),
        lambda x: (x, True),
    ),
    "tuple": (
        lambda x: x[0] * (2 if type(x) is tuple else 3),
        lambda x: (x, 1),
        lambda x: _Pair((x, 1)),
    ),
}


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", _ARGUMENTS)
def test_the_type_of_an_argument_is_a_guard(name: str, order: int) -> None:
    fn, *makers = _ARGUMENTS[name]

    def calls(wrap: Callable[..., Any]) -> list[Any]:
        step = wrap(fn)
        return [
            step(makers[(i // 4 + order) % 2](torch.ones(2) + i)).as_subclass(Tensor).tolist()
            for i in range(12)
        ]

    assert calls(lambda fn: fz.capture(fn, audit=False)) == calls(lambda fn: fn)


@pytest.mark.parametrize("place", ["parameter", "buffer", "attribute", "entry"])
def test_the_type_of_a_found_tensor_is_a_guard(place: str) -> None:
    def calls(wrap: Callable[..., Any]) -> list[Any]:
        model, table = nn.Linear(2, 1, bias=False), {"t": torch.ones(2)}
        model.weight.data.fill_(1.0)
        model.register_buffer("b", torch.ones(2))
        model.t = torch.ones(2)

        def fn(x: Tensor) -> Any:
            return (x * model.weight[0] * model.b * model.t * table["t"]).detach()

        step, found = wrap(fn), []
        for i in range(8):
            if i == 4 and place == "parameter":
                model._parameters["weight"] = _shifted(model.weight.detach())  # type: ignore
            if i == 4 and place == "buffer":
                model.b = _shifted(model.b)
            if i == 4 and place == "attribute":
                model.t = _shifted(model.t)
            if i == 4 and place == "entry":
                table["t"] = _shifted(table["t"])
            found.append(step(torch.ones(2)).as_subclass(Tensor).tolist())
        return found

    assert calls(lambda fn: fz.capture(fn, audit=False)) == calls(lambda fn: fn)


def test_facts_of_much_data_are_equal_in_another_process() -> None:
    """A saved program compares them: `hash` has a seed of each process."""
    code = (
        "import numpy as np; from functionalize.walk.parts import parts_of;"
        "from functionalize.walk.code_names import NameFilter; from functionalize.walk.fact_text import portable;"
        "values = np.arange(1000.0), bytearray(1000), [*map(float, range(2000))];"
        "print([portable(parts_of(value, NameFilter()).fact) for value in values])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
