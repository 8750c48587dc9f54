"""Arrays of numpy among a step's arguments that the step does nothing with but make tensors of them.

    def step(obs, batch):                          obs, and batch["act"]: inputs, as tensors on the arrays' memory
        x = torch.as_tensor(obs, dtype=torch.float32)
        y = torch.from_numpy(batch["act"])

What else code reads of an array cannot be seen, so any other array is a constant of the program, compared by its
bytes. Which arrays are converted is read from the bytecode of the step's own function.
Invariant: the array is loaded nowhere but as the first argument of `torch.as_tensor`, `torch.tensor` or
`torch.from_numpy`, called by that name; instructions that are not known end the search without a find. A name that is
assigned again counts until the assignment, if no jump and no exception passes it by.
Refusals, as constants: arrays that cannot be written or whose memory is not numpy's own, and two arrays on one memory:
a write to one tensor would be read through the other.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

CONVERTERS = frozenset({"as_tensor", "tensor", "from_numpy"})
_FRAMES = frozenset(
    {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "breakpoint"}
)
_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME"})
_BEFORE_CALL = frozenset({"PRECALL", "KW_NAMES"})
_PUSHES = frozenset(
    {"LOAD_CONST", "LOAD_GLOBAL", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"}
)
_CONST_OF = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_ARRAY = "_functionalize_array"  # of a tensor on the memory of an array: that array


class ConvertedArray(NamedTuple):
    """A parameter that is an array, or a dict with an array at `key`."""

    parameter: str
    key: Any = None


def converted_arrays(function: FunctionType) -> frozenset[ConvertedArray]:
    """The arrays of calls of a function with which it does nothing else."""
    return _of_code(function.__code__, function.__globals__.get("torch") is torch)


@functools.lru_cache(maxsize=1024)
def _of_code(code: CodeType, has_torch: bool) -> frozenset[ConvertedArray]:
    if not has_torch or "torch" in code.co_varnames or not _FRAMES.isdisjoint(code.co_names):
        return frozenset()
    if CONVERTERS.isdisjoint(code.co_names):
        return frozenset()
    steps = [s for s in dis.get_instructions(code) if s.opname not in _SKIPPED]
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found: set[ConvertedArray] = set()
    for name in set(names) - set(code.co_cellvars):
        found |= _of_parameter(code, steps, name)
    return frozenset(found)


def _of_parameter(code: CodeType, steps: list[Any], name: str) -> set[ConvertedArray]:
    uses = [at for at, s in enumerate(steps) if _mentions(s, name)]
    stores = [at for at in uses if steps[at].opname == "STORE_FAST"]
    if stores:
        first = stores[0]
        if code.co_exceptiontable or _may_pass(steps, first):
            return set()
        uses = [at for at in uses if at < first]
    good: set[Any] = set()
    bad: set[Any] = set()
    for at in uses:
        if steps[at].opname not in ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"):
            return set()
        key, end = _key_after(steps, at)
        (good if _is_first_argument(steps, at, end) else bad).add(key)
    if None in bad or (None in good and len(good) > 1):
        return set()  # the whole is used: so may be what is in it
    if stores and good != {None}:
        return set()
    return {ConvertedArray(name, key) for key in good - bad}


def _mentions(step: Any, name: str) -> bool:
    if not ("FAST" in step.opname or "DEREF" in step.opname or "CLOSURE" in step.opname):
        return False
    return step.argval == name or (isinstance(step.argval, tuple) and name in step.argval)


def _may_pass(steps: list[Any], at: int) -> bool:
    """Whether a jump leads past an instruction."""
    offset = steps[at].offset
    jumps = (s for s in steps[:at] if s.opcode in dis.hasjrel or s.opcode in dis.hasjabs)
    return any(s.argval > offset for s in jumps)


def _key_after(steps: list[Any], at: int) -> tuple[Any, int]:
    """The constant text by which a loaded value is looked up, and the last instruction of that; None: it is not."""
    if at + 2 < len(steps) and steps[at + 1].opname in _CONST_OF:
        look_up, key = steps[at + 2], steps[at + 1].argval
        is_item = look_up.opname == "BINARY_SUBSCR" or (
            look_up.opname == "BINARY_OP" and look_up.argrepr == "[]"
        )
        if is_item and type(key) is str:
            return key, at + 2
    return None, at


def _is_first_argument(steps: list[Any], at: int, end: int) -> bool:
    """Whether a call of a converter takes what the instructions from `at` to `end` push as its first argument."""
    before = [s for s in steps[max(at - 3, 0) : at] if s.opname != "PUSH_NULL"]
    if len(before) < 2 or before[-1].opname not in ("LOAD_ATTR", "LOAD_METHOD"):
        return False
    if before[-1].argval not in CONVERTERS or before[-2].opname != "LOAD_GLOBAL":
        return False
    if before[-2].argval != "torch":
        return False
    pushed = 1
    for step in steps[end + 1 :]:
        if step.opname in _PUSHES:
            pushed += 1
        elif step.opname == "LOAD_ATTR" and pushed > 1:
            continue
        elif step.opname == "CALL":
            return bool(step.arg == pushed)
        elif step.opname == "CALL_KW":  # 3.13: the names are pushed, too
            return bool(step.arg == pushed - 1)
        elif step.opname not in _BEFORE_CALL:
            return False
    return False


# -- the arrays of a call --------------------------------------------------------------------------


def with_tensors(
    found: Iterable[ConvertedArray],
    names: Mapping[str, int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with tensors on the memory of these arrays in their places.

    names: the position of each parameter among `args`.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return args, kwargs
    places: list[tuple[ConvertedArray, Any]] = []
    for each in found:
        at = names.get(each.parameter, len(args))
        value = args[at] if 0 <= at < len(args) else kwargs.get(each.parameter)
        if each.key is not None:
            value = value.get(each.key) if type(value) is dict else None
        if type(value) is numpy.ndarray:
            places.append((each, value))
    owners = [_owner(array) for _, array in places]
    new, others = list(args), dict(kwargs)
    for (each, array), owner in zip(places, owners, strict=True):
        shared = sum(owner is another for another in owners) > 1
        tensor = None if owner is None or shared else _on_memory(array)
        if tensor is None:
            continue
        at = names.get(each.parameter, len(args))
        table: Any = new if 0 <= at < len(args) else others
        place: Any = at if table is new else each.parameter
        table[place] = tensor if each.key is None else {**table[place], each.key: tensor}
    return tuple(new), others


def _owner(array: Any) -> Any:
    """The array that owns the memory; None: something else does, or nobody may write it."""
    if not array.flags.writeable:
        return None
    kind = type(array)
    while type(array.base) is kind:
        array = array.base
    return array if array.base is None else None


def _on_memory(array: Any) -> Tensor | None:
    try:
        tensor = torch.from_numpy(array)
    except (TypeError, ValueError):  # objects, texts; strides that are negative
        return None
    setattr(tensor, _ARRAY, array)
    return tensor


def array_of(leaf: Any) -> Any:
    """The array on whose memory a leaf of the arguments is a tensor; None: it is another leaf."""
    return getattr(leaf, _ARRAY, None) if type(leaf) is Tensor else None


def tensors_by_array(leaves: Iterable[Any]) -> dict[int, Tensor]:
    """The tensors on arrays among leaves, by the ids of the arrays, which they keep alive."""
    return {id(array): leaf for leaf in leaves if (array := array_of(leaf)) is not None}
