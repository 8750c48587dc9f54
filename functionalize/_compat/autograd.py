"""Autograd: the running node and backward, hooks of tensors, dispatch below autograd."""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

# The higher-order op by which a custom Function runs inside of `torch.func`.
from torch._functorch.autograd_function import custom_function_call

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.fast_guards import plain_reads

__all__ = ["custom_function_call"]  # names of torch that are used elsewhere

_version: Any = operator.attrgetter("_version")
_KINDS = torch._C.DispatchKey
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
_AUTOCAST = tuple(name for name in dir(_KINDS) if name.startswith("Autocast"))
_ABOVE = functools.reduce(
    operator.or_,
    [torch._C.DispatchKeySet(getattr(_KINDS, name)) for name in (*_AUTOGRAD, *_AUTOCAST)],
)


def below_autograd() -> AbstractContextManager[None]:
    """A context: ops run below autograd, whose kernels a replay does not need, and below autocast (torch 2.11 to 2.15).

    What autocast casts is in the recorded ops; under the caller's autocast an op that it left alone would be cast.
    """
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_ABOVE)
    return guard


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of a tensor, which its writes raise; -1 for a tensor of inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The version counters of tensors, see `version_of`; in a fraction of the time, for hundreds of them."""
    try:
        with plain_reads():
            return tuple(map(_version, tensors))
    except RuntimeError:
        return tuple(map(version_of, tensors))


class KeptVersions:
    """A context whose writes leave the version counters of these tensors as they are (torch 2.11 to 2.15)."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._versions = tuple(tensors), versions_of(tensors)
        if -1 in self._versions:
            self._tensors = tuple(t for t in tensors if not t.is_inference())
            self._versions = versions_of(self._tensors)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        torch._C._autograd._unsafe_set_version_counter(self._tensors, self._versions)


BACKWARD, RECOMPUTE = "backward", "recompute"


_current_node, _current_task = torch._C._current_autograd_node, torch._C._current_graph_task_id
gradients_are_on = torch.is_grad_enabled


# The class of the nodes that accumulate the gradient of a leaf (torch 2.0 to 2.15).
ACCUMULATES: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
OTHER_CLASS = "CppFunction"  # of the nodes of C++ that have no class of their own


class NodeNames(dict[type, str]):
    """The names of autograd's nodes by their class: `Node.name()` makes a text at every call, and may demangle one."""

    def of(self, node: Any) -> str:
        """`node.name()`."""
        kind = type(node)
        name = self.get(kind)
        if name is None:
            name = str(node.name())
            if kind.__name__ != OTHER_CLASS:
                self[kind] = name
        return name


def autograd_position(names: NodeNames) -> tuple[int | None, str | None, str | None]:
    """The sequence number and the name of the autograd node that runs the current op, and the phase; None in a forward.

    The callbacks at the end of a backward run outside of any node. In a backward without `retain_graph`, gradients are
    enabled only in a recomputed forward, as of activation checkpointing.
    """
    if _current_task() == -1:
        return None, None, None
    node = _current_node()
    if node is None:
        return None, None, BACKWARD
    again = gradients_are_on() and not graph_is_kept()
    return node._sequence_nr(), names.of(node), RECOMPUTE if again else BACKWARD


Position = tuple[int | None, str]


def backward_position() -> Position | None:
    """The sequence number of the autograd node that runs the current op, and the phase; None outside of a backward."""
    if _current_task() == -1:
        return None
    node = _current_node()
    if node is None:
        return None, BACKWARD
    again = torch.is_grad_enabled() and not graph_is_kept()
    return node._sequence_nr(), RECOMPUTE if again else BACKWARD


# The Python function that calls autograd's engine: the innermost Python frame of a node implemented in C++.
ENGINE = torch.autograd.graph._engine_run_backward.__code__


# Nodes that accumulate a leaf's gradient have sequence numbers from here on; all others have lower ones.
FIRST_OF_LEAVES = 2**62


def is_of_leaf(number: int) -> bool:
    """Whether a number is that of a node that accumulates a leaf's gradient; a recording numbers these below 0."""
    return number < 0 or number >= FIRST_OF_LEAVES


# Returns the autograd node that runs the current op; None outside of one.
running_node = _current_node

# Returns the unique number of the running backward; -1 outside of one.
graph_task = _current_task

# Returns the sequence number that the next autograd node of this thread will have.
next_node_number = torch.autograd._get_sequence_nr


def _lines_of(code: Any) -> tuple[str, range]:
    lines = [line for *_, line in code.co_lines() if line is not None]
    return code.co_filename, range(min(lines), max(lines) + 1)


# Since torch 2.15 `Function.apply` is a function of C++, which has no frame and calls no function of Python.
_APPLY: Any = getattr(torch.autograd.Function.apply, "__func__", None)
SEES_FUNCTIONS = _APPLY is not None
_FUNCTION_FILE, _FUNCTION_LINES = _lines_of(_APPLY.__code__) if SEES_FUNCTIONS else ("", range(0))
_ENGINE_FILE, _ENGINE_LINES = _lines_of(ENGINE)


def is_function_frame(filename: str, line: int) -> bool:
    """Whether a frame is that of `Function.apply`, in which the forward of an `autograd.Function` runs."""
    return filename == _FUNCTION_FILE and line in _FUNCTION_LINES


def is_engine_frame(filename: str, line: int) -> bool:
    """Whether a frame is that of the call of autograd's engine."""
    return filename == _ENGINE_FILE and line in _ENGINE_LINES


def engine_entry() -> tuple[Any, str]:
    """(module, name) of the function by which `torch.autograd` calls its engine (torch 2.3 to 2.15)."""
    return torch.autograd, "_engine_run_backward"


def function_entry() -> tuple[Any, str]:
    """(module, name) of a function that `Function.apply` calls with its arguments before it makes its node.

    `apply` itself is read by many modules at import time, so a replacement of it would be missed (torch 2.1 to 2.14;
    from 2.15 on it calls no function of Python).
    """
    return torch._functorch.utils, "unwrap_dead_wrappers"


def running_node_name() -> str | None:
    """The name of the autograd node that runs in this thread, such as "MaxBackward1"; None outside of one."""
    node = _current_node()
    return None if node is None else node.name()


def in_backward() -> bool:
    """Whether this thread is inside a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Whether `torch.vmap`, or another transform of torch.func, is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode AD is active: a tensor may be more than its storage."""
    return forward_mode_is_on() or in_transform()


def first_gradients(roots: Sequence[Any], passed: Sequence[torch.Tensor | None]) -> list[Any]:
    """The gradients of its roots with which a backward begins: ones for None. Raises eager's errors."""
    return list(torch.autograd._make_grads(roots, passed, is_grads_batched=False))


def current_node_leaf() -> torch.Tensor | None:
    """The leaf into which the running node accumulates a gradient; None for another node, or none."""
    node = torch._C._current_autograd_node()
    return None if node is None else leaf_of(node)


HOOKS_OF_TENSORS = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)  # the attributes that hold them, or None


class OwnHook(functools.partial[Any]):
    """A hook of this library, which is not counted among those of a tensor."""


def hooks_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The numbers of a tensor's hooks: on its gradient, and after the gradient was accumulated."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return len(tensor._backward_hooks or ()), len(_of_others(after)) if after else 0


# How many references C++ has to a tensor; its Python object is one (torch 2.3 to 2.15).
reference_count: Callable[[torch.Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]


def may_have_accumulator(tensor: torch.Tensor) -> bool:
    """Whether a graph or a script may keep the node that accumulates a leaf's gradient: it has a reference to the leaf.

    A graph does until its backward has run, a script to hang hooks on the node. If neither does, autograd makes a
    node for each graph, and none has hooks.
    """
    return reference_count(tensor) > 1 and tensor.requires_grad and tensor.is_leaf


def accumulator_tables(leaf: torch.Tensor) -> list[dict[Any, Any]]:
    """The dicts of the hooks on the node that accumulates the gradient of a leaf, if that node may be kept.

    No function returns them, but the handle of a new hook has the dict that it was added to.
    """
    if not may_have_accumulator(leaf):
        return []
    tables = []
    with disable_current_modes(), torch.enable_grad():
        node = accumulator_of(leaf)
        for register in (node.register_prehook, node.register_hook):
            handle = register(_no_hook)
            tables.append(handle.hooks_dict_ref())
            handle.remove()
    return tables


def accumulator_hooks(leaf: torch.Tensor) -> list[Any]:
    """The hooks on the node that accumulates the gradient of a leaf."""
    return [hook for table in accumulator_tables(leaf) for hook in table.values()]


def _no_hook(*gradients: Any) -> None:
    """A hook that is removed at once."""


def _of_others(table: dict[Any, Any]) -> list[Any]:
    return [hook for hook in table.values() if type(hook) is not OwnHook]


def hook_tables(tensor: torch.Tensor) -> list[dict[Any, Any]]:
    """The dicts in which a tensor's hooks are stored."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [table for table in (tensor._backward_hooks, after) if table is not None]


def accumulator_of(leaf: torch.Tensor) -> Any:
    """The autograd node that accumulates the gradient of a leaf."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf into which an autograd node accumulates a gradient; None for another node."""
    return node.variable if type(node) is ACCUMULATES else None


def nodes_of(outputs: Iterable[Any]) -> dict[Any, None]:
    """The autograd nodes through which a backward from tensors, or gradient edges, goes; each once."""
    found: dict[Any, None] = {}
    todo = [gradient_node(each) for each in outputs]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found[node] = None
            todo += [following for following, _ in node.next_functions]
    return found


def gradient_node(each: Any) -> Any:
    """The autograd node of a gradient edge, or of a tensor that is no leaf; None for a leaf."""
    return each.grad_fn if isinstance(each, torch.Tensor) else each.node


def will_execute(node: Any) -> bool:
    """Whether the running backward will execute a node; no public function returns it."""
    return torch._C._will_engine_execute_node(node)


def graph_is_kept() -> bool:
    """Whether the running backward was called with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def hook_functions(tensor: torch.Tensor) -> list[Any]:
    """The hooks of a tensor: on its gradient, then after the gradient was accumulated."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [*(tensor._backward_hooks or {}).values(), *_of_others(after or {})]


def saved_hooks_entry() -> tuple[Any, str]:
    """(class, name) of the method that makes hooks on saved tensors active."""
    return torch.autograd.graph.saved_tensors_hooks, "__enter__"


def saved_tensor_hooks() -> tuple[Any, ...]:
    """The active default pack and unpack hooks of saved tensors, or () (torch 2.11 to 2.13)."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return tuple(found) if found is not None else ()


def forward_mode_is_on() -> bool:
    """Whether forward-mode AD is active, so that tensors may have tangents; no public name (2.11 to 2.15)."""
    return bool(forward_ad._current_level >= 0)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward has accumulated all gradients; its exceptions leave the backward."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


@contextmanager
def tape_compiler(make: Callable[[], Any]) -> Iterator[None]:
    """A context in which a compiler, made by `make`, gets the backward of a graph, which is not run.

    torch's compiled autograd does that, for all threads: a backward that another thread calls waits for the end. Its
    cache is emptied, so that the compiler gets every backward. Raises `RuntimeError` if compiled autograd is used, its
    cache holds what others have compiled, or another thread is going backward (torch 2.13).
    """
    compiled: Any = torch._C._dynamo.compiled_autograd
    if not compiled.is_cache_empty():
        raise RuntimeError("compiled autograd is in use")
    with _others_wait():
        before = compiled.set_autograd_compiler(make, False)
        try:
            if before[0] is not None:
                raise RuntimeError("compiled autograd is in use")
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            compiled.set_autograd_compiler(*before)
            compiled.clear_cache()


@contextmanager
def _others_wait() -> Iterator[None]:
    """A context in which no other thread goes backward; raises `RuntimeError` if one does already.

    A backward from Python enters the engine by one function. Python switches threads on its entry at the earliest, so a
    thread that has found the function as it was has a frame of it.
    """
    owner, name = engine_entry()
    original, this, running = getattr(owner, name), threading.get_ident(), threading.Lock()

    def waits(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != this:
            with running:
                pass
        return original(*args, **kwargs)

    inside = (ENGINE, waits.__code__)
    with running:
        setattr(owner, name, waits)
        try:
            for thread, frame in sys._current_frames().items():
                found: Any = None if thread == this else frame
                while found is not None:
                    if found.f_code in inside:
                        raise RuntimeError("another thread goes backward")
                    found = found.f_back
            yield
        finally:
            setattr(owner, name, original)


def bound_function(name: str, function: Any, is_custom: bool, is_traceable: bool) -> str:
    """The name by which compiled autograd finds a function of C++, which binds it once in a process (torch 2.13)."""
    from torch._dynamo.compiled_autograd import ops  # it takes a second to import

    return str(ops.add(name, function, is_custom, is_traceable))
