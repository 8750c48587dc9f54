"""The arguments and the result of a captured step, as leaves and structure (see `util/structure.py`).

    leaves, spec = flatten(args, kwargs)        at every call; a replay requires an equal spec
    leaves, spec = flatten_result(result)       when it is recorded
    unflatten_result(leaves, spec)              the result of a replay: objects of the same types
    leaf_names(fn, spec)                        fn(a, [b, c], d, scale=e): x, rest_0_0, rest_0_1, rest_1, scale

Refusals, returned as text: a step that removes or adds an element of a container among its arguments
(`batch.pop("labels")`), which a replay does not repeat; a result with an object that has tensors inside, which a replay
would return with old contents; a generator or a coroutine, whose code runs after the step has returned.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from functionalize._compat.graphs import pytree
from functionalize.errors import UncapturableError
from functionalize.util import structure
from functionalize.util.reading import is_a, table_of
from functionalize.walk.converted_arrays import array_of


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a call's arguments, and their structure."""
    if not kwargs and structure.are_leaves(args):  # to make a structure takes Python code
        return list(args), _positional(len(args))
    return structure.flatten((args, kwargs))


@functools.lru_cache(maxsize=64)
def _positional(count: int) -> pytree.TreeSpec:
    """The structure of a call with positional arguments alone, which are leaves."""
    return structure.flatten(((0,) * count, {}))[1]


def flatten_result(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a step's result, and its structure."""
    return structure.flatten(result, result=True)


def unflatten_result(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """A result of that structure: new containers with these leaves."""
    return structure.unflatten(list(leaves), spec)


UNOPENED = "arguments that cannot be opened"  # the key of such calls


def unopened(args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> UncapturableError:
    """Why calls with arguments run eagerly whose elements cannot be found."""
    given = [(f"args[{i}]", each) for i, each in enumerate(args)]
    name = "args"
    for at, each in [*given, *((f"kwargs[{k!r}]", v) for k, v in kwargs.items())]:
        try:
            structure.flatten(((each,), {}))
        except Exception:
            name = at
            break
    if isinstance(error, RecursionError):
        why = "contains itself, or has containers in containers too deep to open"
    else:
        why = f"cannot be opened ({type(error).__name__}: {error})"
    return UncapturableError(
        f"takes `{name}`, which {why}: pass its tensors and numbers, or keep it in an attribute of an object"
    )


def leaf_names(fn: Callable[..., Any], spec: pytree.TreeSpec) -> list[str]:
    """A name per leaf of the arguments. `spec`: the structure of `(args, kwargs)`.

    Without a signature, positional arguments are named `arg_0`, `arg_1`, ...
    """
    names = []
    for name, rest in _places(fn, spec):
        keys = (getattr(k, "idx", getattr(k, "key", getattr(k, "name", k))) for k in rest)
        names.append("_".join([name.replace("[", "_").rstrip("]"), *map(str, keys)]))
    return names


def leaf_texts(fn: Callable[..., Any], spec: pytree.TreeSpec) -> list[str]:
    """How code of the step may write each leaf of the arguments: `batch.obs`, `rest[0]['x']`."""
    return [name + pytree.keystr(rest) for name, rest in _places(fn, spec)]


def _places(fn: Callable[..., Any], spec: pytree.TreeSpec) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """For each leaf, the argument in which it is, and the keys from there on."""
    try:
        signature = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        signature = []
    positional = [p for p in signature if p.kind is not p.KEYWORD_ONLY]
    for which, *path in structure.paths(spec):
        if which.idx or not path:
            name = str(getattr(path[0], "key", path[0])) if path else "arg"
        else:
            at = path[0].idx
            name = f"arg_{at}"
            if at < len(positional) and positional[at].kind is not inspect.Parameter.VAR_POSITIONAL:
                name = positional[at].name
            elif positional and positional[-1].kind is inspect.Parameter.VAR_POSITIONAL:
                name = f"{positional[-1].name}[{at - len(positional) + 1}]"
        yield name, tuple(path[1:])


class ArgumentChange(str):
    """How a step changed a container among its arguments: no later recording is kept if it does so again."""

    __slots__ = ()


def changed(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
) -> ArgumentChange | None:
    """How the step changed containers among its arguments, or None. leaves, spec: of the arguments before the step."""
    found = _change(args, kwargs, leaves, spec)
    return None if found is None else ArgumentChange(found)


def _change(
    args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], spec: pytree.TreeSpec
) -> str | None:
    now, now_spec = flatten(args, kwargs)
    if now_spec == spec:
        pairs = zip(leaves, now, structure.paths(spec), strict=True)
        # Arguments themselves cannot change; in the place of unread ones `leaves` has None.
        # `leaves` has tensors in the places of arrays that the step converts.
        moved = [
            path
            for was, is_, path in pairs
            if is_ is not was and len(path) > 2 and (is_ is None or array_of(was) is not is_)
        ]
        if not moved:
            return None
        return f"puts something else at {_text(moved[0])}{_ADVICE}"
    before, after = structure.paths(spec), structure.paths(now_spec)
    for path in before:
        if path not in after:
            return f"takes {_text(path)} away{_ADVICE}"
    added = [path for path in after if path not in before]
    if not added:
        return f"rearranges its arguments{_ADVICE}"
    *outer, last = added[0]
    if isinstance(last, pytree.SequenceKey) and len(outer) > 1:
        return (
            f"appends to {_text(tuple(outer))}, which a replay does not repeat: return what it appends, and append it "
            "outside the step"
        )
    return f"adds {_text(added[0])}{_ADVICE}"


def beside_elements(names: Sequence[str], leaves: Sequence[Any]) -> str | None:
    """That an argument is a named tuple with attributes, or None. names: of the leaves."""
    for name, leaf in zip(names, leaves, strict=True):
        if is_a(leaf, tuple) and (table := table_of(leaf)):
            some = ", ".join(f"`{key}`" for key in table)
            return (
                f"`{name}` is a named tuple with attributes beside its elements ({some}), which a replay would not "
                "read: make them fields of the named tuple, or pass them as arguments of their own"
            )
    return None


def hidden(leaves: Sequence[Any]) -> str | None:
    """Why a replay could not return one of these leaves, or None: it has tensors inside, or is code that runs later."""
    for leaf in leaves:
        if isinstance(leaf, (Iterator, Coroutine, AsyncIterator)):
            return f"returns a {type(leaf).__name__}, which runs after the step has returned: return what it gives"
        if structure.holds_tensors(leaf):
            return (
                f"returns an object of type {type(leaf).__name__} that hides tensors: return the tensors, or "
                "put them in a dict, a dataclass or an object that holds no module"
            )
    return None


_ADVICE = ", which a replay does not repeat: work on a copy of that argument"


def _text(path: tuple[Any, ...]) -> str:
    """`args[0]['labels']`."""
    which, *rest = path
    root = "args" if which.idx == 0 else "kwargs"
    return f"`{root}{pytree.keystr(tuple(rest))}`"
