"""A run of a step without most of its equal layers.

    short = ShortRun(layers)
    with short: step(model, batch)
    short.ran_whole        why a layer that was to be left out was called all the same; None: none was

        x ─▶ layer 0 ─▶ layer 1 ─▶ layer 2 ──────────────▶ layer 124 ─▶ layer 125
                                            x is passed on

A layer that is left out returns its input in the place of its output. Which of its arguments that is follows from the
layer that stands in for it: the one whose tensors the next layer gets. All other arguments must be those of the
stand-in, and all tensors that it returns must be passed on.
What the layers that run read of the attributes that differ among equal layers is noted in `read`.
Invariant: afterwards modules and their classes are as before. No tensor of the run is kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from functionalize._compat.graphs import pytree
from functionalize._compat.modules import end_reports, report_calls
from functionalize._compat.references import address
from functionalize.equal_layers.layers import FIRST, EqualLayers, text_of

_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})


class ShortRun:
    """Leaves out layers while active; an `Observer` of a recorded run.

    ran_whole: why a layer that was to be left out has run, or cannot be left out. read: the attributes with different
    values in equal layers that were read or set.
    """

    def __init__(self, layers: EqualLayers) -> None:
        self._layers = layers
        self._places = {
            address(module): (number, place)
            for number, run in enumerate(layers.runs)
            for place, module in enumerate(run.modules)
            if place == FIRST - 1 or place in run.left_out
        }
        self._watched = [
            module for run in layers.runs for module in run.modules[FIRST - 1 : run.left_out.stop]
        ]
        self._calls: dict[int, _StandIn] = {}  # by the number of the run
        self.ran_whole: str | None = None
        self.read: set[str] = set()
        self._notes: list[tuple[type, str]] = []

    def __enter__(self) -> ShortRun:
        report_calls(self._watched, self._called)
        for kind, names in self._layers.differing.items():
            for name in names:
                if any(name in vars(base) for base in kind.__mro__):
                    self.read.add(text_of(kind, name))  # a property, which may read it
                    continue
                noted = _Noted(name, partial(self.read.add, text_of(kind, name)))
                self._notes.append((kind, name))
                setattr(kind, name, noted)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for owner, name in self._notes:
            delattr(owner, name)
        self._notes.clear()
        end_reports(self._watched)
        self._calls.clear()

    def settled(self, result: Any) -> Any:
        return result

    def _called(
        self, module: nn.Module, own: Callable[..., Any] | None, *args: Any, **kwargs: Any
    ) -> Any:
        call = own or module._call_impl
        number, place = self._places[address(module)]
        if place == FIRST - 1:
            self._calls.pop(number, None)
            result = call(*args, **kwargs)
            self._calls[number] = _StandIn(args, kwargs, result)
            return result
        stand_in = self._calls.get(number)
        if stand_in is None or self.ran_whole is not None:
            why = "is called before the layer that stands in for it"
        else:
            passed = stand_in.passed_on(args, kwargs)
            if not isinstance(passed, str):
                return passed[0]
            why = passed
        run = self._layers.runs[number]
        self.ran_whole = self.ran_whole or f"`{run.names[place]}` {why}"
        return call(*args, **kwargs)


class _StandIn:
    """One call of the layer that stands in for others: its arguments and its result, of tensors weak references."""

    def __init__(self, args: Any, kwargs: Any, result: Any) -> None:
        leaves, self._arguments = pytree.tree_flatten((args, kwargs))
        self._leaves = [_weak(leaf) for leaf in leaves]
        self._looks = [_look(leaf) for leaf in leaves]
        results, self._result = pytree.tree_flatten(result)
        self._results = [_weak(leaf) for leaf in results]
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in results]
        # Of a result: the argument that is passed on in its place; None until the next layer is called.
        self._from: dict[int, int] | None = None

    def passed_on(self, args: Any, kwargs: Any) -> tuple[Any] | str:
        """What the call of a layer that is left out returns; text why it must run."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._arguments:
            return "is called with other arguments"
        if self._from is None:
            found = self._find(leaves)
            if isinstance(found, str):
                return found
            self._from = found
        elif any(self._results[at]() is not leaves[place] for at, place in self._from.items()):
            return "is not called with what the layer before it returned"
        moved = set(self._from.values())
        for place, leaf in enumerate(leaves):
            if place in moved:
                if _look(leaf) != self._looks[place]:
                    return f"is called with a tensor of another geometry than {self._looks[place]}"
            elif not _is_same(leaf, self._leaves[place], self._looks[place]):
                return "is called with other arguments"
        results = [
            leaves[self._from[at]] if at in self._from else constant
            for at, constant in enumerate(self._constants)
        ]
        return (pytree.tree_unflatten(results, self._result),)

    def _find(self, leaves: Sequence[Any]) -> dict[int, int] | str:
        """The argument of the next layer that each tensor of the result is."""
        places = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        found = {}
        for at, reference in enumerate(self._results):
            if reference is None:
                if type(self._constants[at]) not in _PLAIN:
                    return f"would return a {type(self._constants[at]).__name__}"
                continue
            result = reference()
            if result is None or id(result) not in places:
                return "would return a tensor that the layer after it does not get"
            found[at] = places[id(result)]
        if not found:
            return "would return no tensor"
        return found


def _weak(leaf: Any) -> Any:
    return weakref.ref(leaf) if isinstance(leaf, Tensor) else None


def _look(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


def _is_same(leaf: Any, reference: Any, look: Any) -> bool:
    """Whether an argument is that of the stand-in. look: the argument itself, if it is no tensor."""
    if reference is not None:
        return reference() is leaf
    return leaf is look or (
        type(leaf) is type(look) and type(leaf) in _PLAIN and bool(leaf == look)
    )


class _Noted:
    """An attribute of a class that notes that an instance's own is read or set."""

    def __init__(self, name: str, note: Callable[[], None]) -> None:
        self._name, self._note = name, note

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or self._name not in instance.__dict__:
            raise AttributeError(self._name)
        self._note()
        return instance.__dict__[self._name]

    def __set__(self, instance: Any, value: Any) -> None:
        self._note()
        instance.__dict__[self._name] = value

    def __delete__(self, instance: Any) -> None:
        self._note()
        del instance.__dict__[self._name]
