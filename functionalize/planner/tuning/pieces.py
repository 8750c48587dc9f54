"""One layer as it runs: its ops, what they allocate and cost, and what autograd saves of it.

    with recording(layers, machine) as pieces:     name -> module
        step(*args)                                 run once, in a fake world
    pieces["blocks.0"].ops                          PieceOp("aten.mm.default", call 3, 41 µs, 64 MiB)

What is recorded is what a checkpoint of the layer sees: the ops of its `forward`, without FSDP2's hooks, counted per
overload as selective checkpointing counts them. An op after the last value that autograd saves is never run again:
recomputation stops there.
Not recorded in detail: layers with tensor subclasses (DTensor: tensor parallelism), whose ops run on their parts; a
`LayerPiece` of such a layer is not `selective`.
Invariant: the step runs as without a recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from functionalize._compat.dispatch import TorchDispatchMode
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.graphs import pytree
from functionalize.analysis.aliases import storage_key
from functionalize.cost.costs import is_collective, seconds
from functionalize.cost.machines.machine import Machine
from functionalize.ir.generators import is_random


@dataclass(frozen=True)
class PieceOp:
    """An op of a layer that may be saved or recomputed.

    name: of the overload. call: which of its calls in this layer, from 0.
    seconds: modelled; 0 if the op is never run again.
    nbytes: of the storages that it makes, but those that live on as the layer's result.
    random: whether it draws numbers. fixed: whether its results cannot be saved: it has none of its own, or a later op
    writes to them.
    """

    name: str
    call: int
    seconds: float
    nbytes: int
    random: bool
    fixed: bool


@dataclass(frozen=True)
class LayerPiece:
    """One layer. saved: bytes that autograd keeps of it until its backward, without the layer's result and inputs.

    held: bytes of inputs that a checkpoint holds and autograd does not. selective: whether ops are known one by one.
    """

    ops: tuple[PieceOp, ...]
    saved: int
    held: int
    selective: bool

    @property
    def recompute(self) -> float:
        """Seconds to run again all that a checkpoint runs again."""
        return sum(op.seconds for op in self.ops)


@contextmanager
def recording(layers: Mapping[str, nn.Module], machine: Machine) -> Iterator[dict[str, LayerPiece]]:
    """Record the first call of each of these modules."""
    found: dict[str, LayerPiece] = {}
    before = {module: vars(module).get("forward") for module in layers.values()}

    def recorded(name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if name in found:
            return forward(*args, **kwargs)
        mode = _PieceMode()
        with mode, saved_tensors_hooks(mode.saves, lambda value: value):
            result = forward(*args, **kwargs)
        found[name] = mode.piece((args, kwargs), result, machine)
        return result

    try:
        for name, module in layers.items():
            module.forward = partial(recorded, name, module.forward)
        yield found
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


class _PieceMode(TorchDispatchMode):
    """Makes a graph of the ops that run, and notes what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []  # so that no id and no key of a storage is used twice
        self._made: list[tuple[fx.Node, int, tuple[int, ...]]] = []
        self._nbytes: dict[int, int] = {}
        self._written: set[int] = set()
        self._calls: Counter[Any] = Counter()
        self._saved: set[int] = set()
        self._last_save = 0
        self._plain = True

    def saves(self, value: Tensor) -> Tensor:
        """Called by autograd with what it saves."""
        self._last_save = len(self._made)
        if _is_plain(value):
            self._kept.append(value)
            self._saved.add(_key(value))
        else:
            self._plain = False
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        call, self._calls[func] = self._calls[func], self._calls[func] + 1
        read, made = _tensors((args, kwargs)), _tensors(result)
        if not self._plain or not all(map(_is_plain, (*read, *made))):
            self._plain = False
            return result
        for tensor in read:
            self._known(tensor)
        node = self._graph.call_function(
            func, *pytree.tree_map_only(Tensor, lambda t: self._nodes[id(t)], (args, kwargs))
        )
        node.meta["val"] = result
        new = {_key(t): t.untyped_storage().nbytes() for t in made if _key(t) not in self._nbytes}
        self._nbytes |= new
        for tensor in made:
            self._kept.append(tensor)
            self._nodes[id(tensor)] = node
        if getattr(func, "_schema", None) is not None and func._schema.is_mutable:
            self._written |= {_key(t) for t in read}
        self._made.append((node, call, tuple(new)))
        return result

    def _known(self, tensor: Tensor) -> None:
        if id(tensor) not in self._nodes:
            node = self._nodes[id(tensor)] = self._graph.placeholder(f"input_{len(self._nodes)}")
            node.meta["val"] = tensor
            self._kept.append(tensor)
            self._nbytes.setdefault(_key(tensor), 0)  # not made here

    def piece(self, inputs: Any, result: Any, machine: Machine) -> LayerPiece:
        """What was recorded. inputs, result: of the layer."""
        if not self._plain:
            return LayerPiece((), 0, 0, False)
        results = {_key(t) for t in _tensors(result)}
        ops = []
        for i, (node, call, made) in enumerate(self._made):
            again = i < self._last_save
            spent = seconds(node, machine) if again else 0.0
            if not made and not spent:  # a view
                continue
            ops.append(
                PieceOp(
                    str(node.target),
                    call,
                    spent,
                    sum(self._nbytes[key] for key in made if key not in results),
                    is_random(node),
                    is_collective(node) or not made or any(key in self._written for key in made),
                )
            )
        held = {_key(t): t.untyped_storage().nbytes() for t in _tensors(inputs) if t.requires_grad}
        return LayerPiece(
            tuple(ops),
            sum(self._nbytes.get(key, 0) for key in self._saved - results),
            sum(nbytes for key, nbytes in held.items() if key not in self._saved),
            True,
        )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


def _key(tensor: Tensor) -> int:
    key = storage_key(tensor)
    assert key is not None
    return key
