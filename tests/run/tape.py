"""A stand-in for CUDA graphs on the CPU: `torch.cuda.CUDAGraph` and `torch.cuda.graph` as `record_on_cuda` calls them.

    with taped() as graphs:
        launch, results = record_on_cuda(body)     runs `body`, and undoes what it did to memory and to generators
        launch()                                   runs its ops again, on the same memory

As on a device, Python of `body` runs while recording only, a launch reads and writes the addresses of the recording,
and it draws new random numbers. Not as on a device: the memory of a recording is never used twice, and there are no
streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _storages(value: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in _tensors(value)}


class TapeGraph:
    """`torch.cuda.CUDAGraph`. ops: what was recorded. launches: how often it was replayed."""

    def __init__(self) -> None:
        self.ops: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.launches = 0

    @torch.no_grad()
    def replay(self) -> None:
        """Run the ops again. Results that are new memory go to the memory of the recorded ones."""
        self.launches += 1
        for func, args, kwargs, recorded in self.ops:
            out = _tensors(func(*args, **kwargs))
            for old, new in zip(recorded, out, strict=True):
                if _storages(old).isdisjoint(_storages((args, kwargs))):
                    if func.namespace == "_c10d_functional":
                        new = torch.ops._c10d_functional.wait_tensor(new)
                    old.copy_(new)

    def names(self) -> set[str]:
        """The names of the recorded ops."""
        return {func.overloadpacket.__name__ for func, *_ in self.ops}


class Recording(TorchDispatchMode):
    """`torch.cuda.graph`."""

    def __init__(self, graph: TapeGraph, capture_error_mode: str = "global") -> None:
        super().__init__()
        assert capture_error_mode == "thread_local"  # other threads of the process may use CUDA
        self.graph = graph
        self.written: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Any:
        self.generator = torch.get_rng_state()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        with torch.no_grad():
            for tensor, before in reversed(self.written):
                tensor.copy_(before)
        torch.set_rng_state(self.generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                self.written += [(t, t.clone()) for t in _tensors(value)]
        out = func(*args, **kwargs)
        self.graph.ops.append((func, args, kwargs, _tensors(out)))
        return out


@contextmanager
def taped() -> Iterator[list[TapeGraph]]:
    """Inside of the `with`, CUDA graphs are tapes; yields those that were made."""
    made: list[TapeGraph] = []

    def graph() -> TapeGraph:
        made.append(TapeGraph())
        return made[-1]

    with mock.patch.object(torch.cuda, "CUDAGraph", graph):  # noqa: SIM117
        with mock.patch.object(torch.cuda, "graph", Recording):
            yield made
