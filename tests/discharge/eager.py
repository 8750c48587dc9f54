"""Eager against `trace` and replay, bit for bit: outputs, what the arguments hold, storage sizes.

same_as_eager(fn, a, b)      runs fn on clones, traces it on others, replays on third ones
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

import functionalize as fz
from functionalize.ir.ops import geometry_of


def clones(tree: Any) -> Any:
    """`tree` with every tensor on a copy of its storage; tensors that shared one still do."""
    made: dict[int, torch.UntypedStorage] = {}

    def clone(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        storage = leaf.untyped_storage()
        copy = made.setdefault(storage._cdata, storage.clone())
        new = torch.empty(0, dtype=leaf.dtype)
        new.set_(copy, leaf.storage_offset(), leaf.shape, leaf.stride())
        copy.resize_(storage.nbytes())  # `set_` grew it
        new = torch._conj(new) if leaf.is_conj() else new
        return torch._neg_view(new) if leaf.is_neg() else new

    return pytree.tree_map(clone, tree)


def described(tree: Any, strides: bool = True) -> list[Any]:
    """What is compared of every leaf: geometry and bits of a tensor, else its repr."""
    return [leaf_described(leaf, strides) for leaf in pytree.tree_leaves(tree)]


def leaf_described(leaf: Any, strides: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    stride = tuple(st for s, st in zip(leaf.shape, leaf.stride(), strict=True) if s != 1)
    if leaf.numel() == 0 or not strides:
        stride = ()
    looks = (tuple(leaf.shape), stride, leaf.dtype, leaf.is_conj(), leaf.is_neg())
    return (*looks, bits(leaf))


def bits(tensor: Tensor) -> bytes:
    """The elements of a tensor in order, as bytes; empty if its storage is too small for them."""
    if geometry_of(tensor).end > tensor.untyped_storage().nbytes():
        return b""
    plain = tensor.detach().resolve_conj().resolve_neg()
    dense = torch.empty(plain.numel(), dtype=plain.dtype)
    dense.view(plain.shape).copy_(plain)
    return bytes_of(dense.untyped_storage())


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def storages(tree: Any) -> list[tuple[int, bytes]]:
    """Size and bytes of every leaf's storage."""
    found = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            found.append((storage.nbytes(), bytes_of(storage)))
    return found


def sharing(tree: Any) -> list[int]:
    """For every tensor, which of the tensors before it has the same storage."""
    addresses = [t.untyped_storage()._cdata for t in pytree.tree_leaves(tree) if is_tensor(t)]
    return [addresses.index(a) for a in addresses]


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def run_seeded(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    torch.default_generator.manual_seed(
        1234
    )  # `torch.manual_seed` formats a stack for each kind of device
    with torch.no_grad():
        return fn(*args, **kwargs)


def same_as_eager(
    fn: Callable[..., Any],
    *args: Any,
    whole: bool = True,
    strides: bool = True,
    contents: bool = True,
    times: int = 1,
    **kwargs: Any,
) -> fz.Program:
    """Assert that replay does what eager does; returns the program.

    whole: compare also the bytes of storages that no argument or output looks at.
    strides: compare also the strides of arguments and outputs.
    contents: compare also what the arguments hold; where that is undefined, it cannot be.
    times: how often to run both, one after the other, on the same arguments.
    """
    eager_args, eager_kwargs = clones((args, kwargs))
    ours_args, ours_kwargs = clones((args, kwargs))
    trace_args, trace_kwargs = clones((args, kwargs))
    before = storages((trace_args, trace_kwargs))
    with torch.no_grad():
        program = fz.functions.trace(fn, *trace_args, **trace_kwargs)
    assert storages((trace_args, trace_kwargs)) == before, "trace touched its arguments"
    check_pure(program)
    for _ in range(times):
        want = run_seeded(fn, eager_args, eager_kwargs)
        drawn = torch.get_rng_state()
        got = run_seeded(program, ours_args, ours_kwargs)
        assert torch.equal(torch.get_rng_state(), drawn), "the generator advanced differently"
        assert described(got, strides) == described(want, strides), "outputs differ"
        theirs, ours = (want, eager_args, eager_kwargs), (got, ours_args, ours_kwargs)
        given = [described(each[1:], strides) for each in (ours, theirs)]
        assert given[0] == given[1] or not contents, "arguments differ"
        assert sharing(ours) == sharing(theirs), "aliases differ"
        sizes = [[n for n, _ in storages(each[1:])] for each in (ours, theirs)]
        assert sizes[0] == sizes[1], "storage sizes differ"
        if whole:
            assert storages(ours[1:]) == storages(theirs[1:]), "storages differ"
    return program


def check_pure(program: fz.Program) -> None:
    """Invariants 1 and 2 of the design, in short."""
    empty = {s.name for s in program.inputs if s.nbytes == 0 and s.geometry.numel}
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None:
            assert not schema.is_mutable, f"{node.target} mutates"
        for used in node.all_input_nodes:
            if used.op == "placeholder" and used.name in empty:
                assert node.op == "output", f"{node} reads {used}, which is empty"


def text_of(program: fz.Program) -> str:
    """The program's text, for snapshots."""
    return program.print_readable(print_output=False)


@contextlib.contextmanager
def one_thread() -> Any:
    """Sums of several threads are not always in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
