"""Names for the argument leaves of a call, from the function's signature.

    def fn(x, *rest, scale)    fn(a, [b, c], d, scale=e)    x, rest_0_0, rest_0_1, rest_1, scale

Invariant: one name per leaf, in the order of `flatten((args, kwargs))`. Names are not always unique.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from functionalize._compat.graphs import pytree
from functionalize.util.structure import paths


def leaf_names(fn: Callable[..., Any], spec: pytree.TreeSpec) -> list[str]:
    """A name per leaf of the arguments. `spec`: the structure of `(args, kwargs)`.

    Without a signature, positional arguments are named `arg_0`, `arg_1`, ...
    """
    try:
        signature = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        signature = []
    names = []
    for path in paths(spec):
        keys: list[Any] = [
            getattr(k, "idx", getattr(k, "key", getattr(k, "name", k))) for k in path
        ]
        kind, *rest = keys
        if kind == 0 and rest:
            at, *rest = rest
            positional = [p for p in signature if p.kind is not p.KEYWORD_ONLY]
            name = f"arg_{at}"
            if at < len(positional) and positional[at].kind is not inspect.Parameter.VAR_POSITIONAL:
                name = positional[at].name
            elif positional and positional[-1].kind is inspect.Parameter.VAR_POSITIONAL:
                name = f"{positional[-1].name}_{at - len(positional) + 1}"
        else:
            name, *rest = [str(r) for r in rest] or ["arg"]
        names.append("_".join([name, *(str(r) for r in rest)]))
    return names
