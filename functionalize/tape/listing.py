"""What a backward depends on, listed without running it: the nodes with all that they hold, and every hook.

    found = listed([loss], [torch.ones(())])
    found.key          equal for two graphs of the same nodes, edges, numbers, sizes and hooks, in the same order
    found.tensors      what the nodes have saved, tangents among it; found.leaves, found.hooks, found.packed

Python cannot list the hooks of a node. The collector of torch's compiled autograd can: in C++, it goes through the
nodes and hands its compiler, node by node, all that each of them would compute from. The compiler here notes that and
compiles nothing; the collector's own run ends in an exception before anything has run. Nodes, hooks and gradients are
as before.
Invariant: what the compiler gets is all that compiled autograd computes a backward from. So graphs of equal keys
differ at most in the contents of tensors, and in what the Python code of hooks and Functions reads, attributes of `ctx`
among it. These are for the caller to compare: `hooks` has the objects.
Refusals (`Unlisted`): hooks and nodes in C++, hooks and Functions of torch itself or of installed packages, whose state
is elsewhere (checkpointing, FSDP2, module backward hooks, compiled functions); `retain_grad`; arguments of nodes that
are no plain values; tensors of subclasses; while another thread goes backward, whose graph would be handed to this
compiler, too; a process that uses compiled autograd itself.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from functionalize._compat.autograd import (
    bound_function,
    in_backward,
    leaf_of,
    nodes_of,
    tape_compiler,
)
from functionalize._compat.references import address
from functionalize._compat.stacks import stack_here
from functionalize.errors import InvariantError
from functionalize.tape.backwards import walked
from functionalize.util.packages import is_users
from functionalize.util.tensor_wrappers import is_plain

_PLAIN = frozenset({bool, int, float, complex, str, types.NoneType})
_TORCH = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format})


class Unlisted(Exception):
    """Why a backward cannot be listed, in words."""


class TapeListing(NamedTuple):
    """What a backward depends on.

    key: of its nodes. tensors: that the nodes hold, None for gradients. leaves: whose gradients are accumulated.
    hooks: functions, and of each Function its class and the attributes of its `ctx`. packed: what hooks have packed.
    """

    key: str
    tensors: list[Tensor | None]
    leaves: list[Tensor]
    hooks: list[Any]
    packed: list[Any]


class _Done(BaseException):
    """Ends the run of the collector, with the tensors, hooks and packed objects that it has found.

    It is no `Exception`, so that nothing of the user's can catch it. torch makes a text of it, so it has no arguments.
    """

    def __init__(self, *found: list[Any]) -> None:
        super().__init__()
        self.found = found


def _run(_: Any, inputs: Any, sizes: Any, scalars: Any, hooks: Any, packed: Any) -> Any:
    raise _Done(list(inputs), list(hooks), list(packed))


# What a compiler returns. torch drops no reference to it, so it is one object, which leads to no tensor.
_COMPILED = _run, _run


def listed(roots: Sequence[Tensor], gradients: Sequence[Any]) -> TapeListing:
    """List the backward of `roots`; raises `Unlisted`."""
    if in_backward():
        raise Unlisted("inside of a backward")
    leaves = [leaf for node in nodes_of(roots) if (leaf := leaf_of(node)) is not None]
    known = set(map(address, leaves))
    leaves += [root for root in roots if root.is_leaf and address(root) not in known]
    for tensor in (*roots, *leaves):
        if not is_plain(tensor):
            raise Unlisted(f"a {type(tensor).__name__} in the graph")
    places = {address(leaf): -1 - i for i, leaf in enumerate(leaves)}
    call, _ = walked(
        roots, (), lambda found: [places[address(each)] for each in found], 0, stack_here()
    )
    found: list[_Compiler] = []
    listing: Any = None

    def compiler() -> _Compiler:
        found.append(_Compiler())
        return found[-1]

    try:
        with tape_compiler(compiler):
            torch.autograd.backward(roots, gradients, retain_graph=True)
    except _Done as done:
        listing = done.found
    except Exception as error:
        if any(each.unpacks for each in found):
            raise InvariantError("torch did not put back what hooks have packed") from error
        raise Unlisted(str(error).partition("\n")[0]) from error
    if len(found) != 1 or listing is None:
        raise Unlisted("torch has listed nothing")
    if found[0].refused is not None:
        raise Unlisted(found[0].refused)
    notes, (tensors, hooks, packed) = found[0].notes, listing
    text = repr((call.names, call.edges, call.order(), notes))
    dropped = {address(leaf.grad) for leaf in leaves if leaf.grad is not None}
    kept = [None if address(each) in dropped else each for each in tensors]
    key = hashlib.sha256(text.encode()).hexdigest()
    return TapeListing(key, kept, leaves, [_described(each) for each in hooks], packed)


def _described(hook: Any) -> Any:
    """What is to be compared of a hook, or of the `ctx` of a Function."""
    if isinstance(hook, FunctionCtx):
        kind = getattr(type(hook), "_forward_cls", type(hook))
        if not is_users(kind.__module__):
            raise Unlisted(f"a node of `{kind.__module__}.{kind.__qualname__}`")
        return kind, dict(vars(hook))
    inner = hook
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    module = inner.__module__ if isinstance(inner, types.FunctionType) else type(inner).__module__
    if not is_users(module):
        raise Unlisted(f"a hook of `{module}`")
    return hook


class _Compiler:
    """Stands for a compiler of compiled autograd (torch._dynamo.compiled_autograd): each method notes its arguments.

    notes: what was passed, in order. refused: why the backward cannot be listed. unpacks: whether a hook has packed
    what a node saved.
    While a node is handed over, it holds what `begin_capture` has returned in place of its tensors: aliases, so that
    nothing is written to the tensors themselves. No method raises, as torch would not put them back.
    """

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.refused: str | None = None
        self.unpacks = False
        self._known: dict[int, str] = {}  # address of a tensor -> how it is noted
        self._made: list[Tensor] = []  # keeps the addresses
        self._inputs: list[Tensor] = []

    def begin_capture(
        self, inputs: Any, sizes: Any, scalars: Any, origins: Any, accumulate: Any, nans: Any
    ) -> Any:
        with torch.no_grad():
            self._inputs = [each.detach() if is_plain(each) else each for each in inputs]
        for i, tensor in enumerate(self._inputs):
            if not is_plain(tensor):
                self._refuse(f"a {type(tensor).__name__} in the graph")
            self._known[address(tensor)] = f"<input {i}>"
        self._note("begin", len(inputs), sizes, scalars, accumulate)
        return "", self._inputs, list(sizes), list(scalars)

    def end_capture(self, outputs: Any) -> Any:
        self._note("end", outputs)
        return _COMPILED

    def close(self) -> None: ...

    def set_node_origin(self, name: str, index: int, function: Any) -> None:
        self._note("node", name, index)

    def bind_function(self, name: str, function: Any, is_custom: bool, is_traceable: bool) -> str:
        if is_custom or not is_traceable:
            self._refuse(f"the node {name}, of C++")
        return bound_function(name, function, is_custom, is_traceable)

    def apply_functional(self, name: str, grads: Any, args: Any, metadata: Any) -> list[Tensor]:
        self._note(name, grads, args)  # the metadata are those that `validate_outputs` gets
        return self._results(len(metadata))

    def proxy_call_backward(
        self, grads: Any, metadata: Any, saved: Any, at: Any, ctx: Any, *more: Any
    ) -> Any:
        if any(grad is None for grad in grads):  # it may make zeros of it, or not
            self._refuse("a Function of which an output gets no gradient")
        self._note("Function", grads, metadata, saved, at, ctx.needs_input_grad, more)
        results = self._results(len(metadata))
        return tuple(None if m is None else r for m, r in zip(metadata, results, strict=True))

    def validate_outputs(self, _: Any, outputs: Any, args: Any, metadata: Any) -> list[Any]:
        self._note("validate", outputs, args)
        return list(outputs)

    def accumulate(self, old: Any, new: Any) -> Tensor:
        self._note("add", old, new)
        return self._results(1)[0]

    def accumulate_grad(self, *args: Any) -> Tensor:
        self._note("accumulate", *args)
        return self._results(1)[0]

    def tensor_pre_hook(self, grads: Any, hook: int, at: int) -> list[Any]:
        self._note("tensor pre-hook", grads, hook, at)
        return list(grads)

    def cpp_tensor_pre_hook(self, grads: Any, hook: int, at: int) -> list[Any]:
        self._refuse("a hook of C++ (`retain_grad` is one)")
        return list(grads)

    def pre_hook(self, grads: Any, hook: int) -> list[Any]:
        self._note("pre-hook", grads, hook)
        return list(grads)

    def post_hook(self, outputs: Any, grads: Any, hook: int) -> list[Any]:
        self._note("post-hook", outputs, grads, hook)
        return list(outputs)

    def post_acc_grad_hook(self, leaf: Any, hook: int) -> list[Any]:
        self._note("post-accumulate-grad hook", leaf, hook)
        return [leaf]

    def unpack_hook(self, hook: int, packed: int) -> Tensor:
        self.unpacks = True
        self._note("unpack", hook, packed)
        return self._results(1)[0]

    def call_copy_slices_prologue(self, *args: Any) -> list[Tensor]:
        self._note("copy slices", *args)
        return self._results(3)

    def call_copy_slices_epilogue(self, needed: Any, *args: Any) -> list[Tensor]:
        self._note("slices copied", needed, *args)
        return self._results(len(needed))

    def _results(self, count: int) -> list[Tensor]:
        made = [torch.empty(()) for _ in range(count)]
        for each in made:
            self._known[address(each)] = f"<result {len(self._made)}>"
            self._made.append(each)
        return made

    def _note(self, *said: Any) -> None:
        self.notes.append(self._plain(said))

    def _plain(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple or kind is list or kind is torch.Size:
            plain = self._plain
            return [each if type(each) in _PLAIN else plain(each) for each in value]
        if kind is Tensor:
            known = self._known.get(address(value))
            if known is not None:
                return known
        if kind in _TORCH:
            return str(value)
        self._refuse(f"a node with an argument of type {type(value).__name__}")
        return None

    def _refuse(self, reason: str) -> None:
        self.refused = self.refused or reason
