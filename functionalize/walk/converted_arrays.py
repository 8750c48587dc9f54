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

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize.util.bytecode import Step, read

CONVERTERS = frozenset({"as_tensor", "tensor", "from_numpy"})
_FRAMES = frozenset(
    {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "breakpoint"}
)
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
    steps = read(code)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found: set[ConvertedArray] = set()
    for name in set(names) - set(code.co_cellvars):
        found |= _of_parameter(code, steps, name)
    return frozenset(found)


def _of_parameter(code: CodeType, steps: Sequence[Step], name: str) -> set[ConvertedArray]:
    uses = [s.at for s in steps if s.value == name and s.op in _OF_VARIABLES]
    stores = [at for at in uses if steps[at].op == "set_local"]
    if stores:
        first = stores[0]
        if code.co_exceptiontable or _may_pass(steps, first):
            return set()
        uses = [at for at in uses if at < first]
    good: set[Any] = set()
    bad: set[Any] = set()
    for at in uses:
        if steps[at].op != "local":
            return set()
        key, end = _key_after(steps, at)
        (good if _is_first_argument(steps, at, end) else bad).add(key)
    if None in bad or (None in good and len(good) > 1):
        return set()  # the whole is used: so may be what is in it
    if stores and good != {None}:
        return set()
    return {ConvertedArray(name, key) for key in good - bad}


_OF_VARIABLES = frozenset(
    {
        "local",
        "set_local",
        "del_local",
        "save_local",
        "cell",
        "make_cell",
        "deref",
        "set_deref",
        "del_deref",
    }
)


def _may_pass(steps: Sequence[Step], at: int) -> bool:
    """Whether a jump leads past a step."""
    return any(s.target is not None and s.target > at for s in steps[:at])


def _key_after(steps: Sequence[Step], at: int) -> tuple[Any, int]:
    """The constant text by which a loaded value is looked up, and the last step of that; None: it is not."""
    key, look_up = (*steps[at + 1 : at + 3], None, None)[:2]
    if key is None or look_up is None or key.op != "constant" or look_up.op != "subscript":
        return None, at
    return (key.value, at + 2) if type(key.value) is str else (None, at)


def _is_first_argument(steps: Sequence[Step], at: int, end: int) -> bool:
    """Whether a call of a converter takes what the steps from `at` to `end` push as its first argument."""
    before = [s for s in steps[max(at - 3, 0) : at] if s.op != "null"]
    if len(before) < 2 or before[-1].op not in ("attribute", "method"):
        return False
    if before[-1].value not in CONVERTERS or before[-2].op != "global":
        return False
    if before[-2].value != "torch":
        return False
    pushed = 1
    for step in steps[end + 1 :]:
        if step.op in ("constant", "global", "local"):
            pushed += 1
        elif step.op == "attribute" and pushed > 1:
            continue
        else:
            return step.op == "call" and step.number == pushed
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
