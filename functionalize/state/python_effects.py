"""What a step does to Python objects and a replay does again: print a loss, count a call, keep a number.

    recorder.python_effects.append((Printed(...), loss))    while the step is recorded: an effect and its value
    cached.python_effects                                   the effects of a program, in their order
    repeat(effects, call, values)                           at the end of each replay

The value of an effect is a tree of tensors, live numbers and constants. It is a part of what the program returns: a
tensor is that of this replay, a live number arrives as a plain `int` or `float` of the type that it has in eager.

Invariant: effects are repeated in the order of the recording, once per replay, after the epilogue, the gradients and
FSDP2's state: calls, then what the step assigns, then calls that read objects to which it assigns (`is_last`). If one
raises, the effects before it have happened, it and those after it have not, and everything else is as the step leaves
it; the exception propagates and the step does not run again.
Refusals: a tensor with an autograd history, or that requires a gradient, among the values, unless every replay finds
the same object; effects in the backward of a captured forward (`backward=True`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from functionalize._compat.graphs import pytree
from functionalize.errors import UncapturableError
from functionalize.ir.inputs import Call
from functionalize.ir.outputs import LeafItself, OutputRole, SameAs, SourceItself
from functionalize.state.arguments import flatten_result
from functionalize.state.place_effects import AssignedLeaf
from functionalize.util.structure import Joined


class PythonEffect(Protocol):
    """Something that a step does to a Python object, and that a replay repeats."""

    @property
    def what(self) -> str:
        """What the step does, for messages: "prints", "sets `self.last`"."""
        ...

    def repeat(self, call: Call, value: Any) -> None:
        """Do it again, with the value of this replay."""
        ...


def is_last(effect: PythonEffect) -> bool:
    """Whether a call reads objects, with what the step has assigned to them."""
    return getattr(effect, "reads_objects", False)


def in_order(
    calls: Sequence[tuple[PythonEffect, Any]], moves: Sequence[tuple[PythonEffect, Any]]
) -> list[tuple[PythonEffect, Any]]:
    """The effects of a step, with their values. moves: what it assigns. No two calls change places."""
    first = next((i for i, (effect, _) in enumerate(calls) if is_last(effect)), len(calls))
    return [*calls[:first], *moves, *calls[first:]]


def flatten_left(
    result: Any,
    gradients: Sequence[Any],
    effects: Sequence[tuple[PythonEffect, Any]],
    one_object: Sequence[tuple[Any, Any]] = (),
) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves and the structure of all that a step leaves: its result, gradients, the values of its effects.

    one_object: the containers that stand in several of these, see `carried_containers.py`.
    """
    tree: Any = result, [*gradients, *(value for _, value in effects)]
    if one_object:
        numbers = {id(effect): len(gradients) + i for i, (effect, _) in enumerate(effects)}

        def keys(where: Any) -> tuple[Any, ...]:
            of, inner = where
            return (0, *inner) if of is None else (1, numbers[id(of)], *inner)

        tree = Joined(tree, tuple((keys(source), keys(to)) for source, to in one_object))
    return flatten_result(tree)


def repeat(effects: Sequence[PythonEffect], call: Call, values: Sequence[Any]) -> None:
    """Repeat the effects of a program in their order. values: one for each."""
    for effect, value in zip(effects, values, strict=True):
        effect.repeat(call, value)


def unrepeated(effects: Sequence[tuple[PythonEffect, Any]]) -> str | None:
    """Text about the first of the effects, where a replay repeats none; None: there is none."""
    return f"{effects[0][0].what}, which a replay would not: do so outside" if effects else None


def unrepeatable(effects: Sequence[PythonEffect], values: Sequence[Any]) -> str | None:
    """Why a replay could not make one of these values, or None: it has an autograd history."""
    for effect, value in zip(effects, values, strict=True):
        leaves = flatten_result(value)[0]
        if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves):
            return f"{effect.what} with a tensor that has an autograd history: detach it{_other_edit(effect)}"
    return None


def _other_edit(effect: PythonEffect) -> str:
    """What else to do about a tensor with a history that a step leaves in a place."""
    place = getattr(effect, "place", None)
    table = getattr(place, "container", None)
    key = getattr(place, "key", None)
    parameters = table.get("_parameters") if type(table) is dict else None
    # `nn.utils.weight_norm`, `spectral_norm` and `prune` compute it anew before each forward, for that to read.
    if type(parameters) is dict and not parameters.keys().isdisjoint((f"{key}_g", f"{key}_orig")):
        return (
            ", or compute it where it is read, as `nn.utils.parametrizations.weight_norm` and `spectral_norm` do in "
            "place of those of `nn.utils`, and `nn.utils.parametrize.register_parametrization` for a mask"
        )
    return ""


def check_leaves(
    effects: Sequence[PythonEffect],
    values: Sequence[Any],
    leaves: Sequence[Any],
    roles: Sequence[OutputRole],
    was_there: Callable[[Tensor], bool],
    origin: Callable[[str], str],
) -> None:
    """Raise `UncapturableError` for a tensor among the values that a replay makes otherwise.

    leaves, roles: of all that the program returns; the last ones are those of the values. was_there: whether a tensor
    was in some place on entry. origin: the lines that have an effect, by the text about it.
    """
    first = len(leaves)
    for effect, value in reversed(list(zip(effects, values, strict=True))):
        first, last = first - len(flatten_result(value)[0]), first
        for leaf, role in zip(leaves[first:last], roles[first:last], strict=True):
            role = roles[role.output] if isinstance(role, SameAs) else role
            if not isinstance(leaf, Tensor) or isinstance(role, (SourceItself, LeafItself)):
                continue
            if was_there(leaf):
                raise UncapturableError(
                    f"the step {effect.what} with a tensor that was in another place, which a replay cannot find again "
                    f"there: assign a copy{origin(effect.what)}"
                )
            if leaf.requires_grad and not isinstance(effect, AssignedLeaf):
                raise UncapturableError(
                    f"the step {effect.what} with a new tensor that requires a gradient, which that of a replay would "
                    f"not: detach it{origin(effect.what)}"
                )
