"""What Python holds on tensors that come and go: attributes of arguments and of results.

    x.weight = 2.0; step(x)        read by the step: `ArgumentAttributes` is a guard on which there are, and the walk
                                   compares the values of those that code names
    x.seen = True                  in the step: refused, as a replay would not do it
    return y                       with `y.tag = "t"`, or `y` a new leaf that requires a gradient, or a new tensor of a
                                   class of the user's: refused, as a replay returns a plain tensor

Attributes of tensors that the step finds elsewhere (buffers, globals) are state as those of any object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from functionalize._compat.fakes import FakeTensor
from functionalize.errors import UncapturableError
from functionalize.ir.inputs import Call
from functionalize.util.reading import table_of
from functionalize.util.tensor_wrappers import is_no_wrapper, is_wrapper, own_functions_text
from functionalize.util.text import with_article

_NONE: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ArgumentAttributes:
    """Tensors among the arguments have attributes of these names, and are inference tensors if they were.

    leaves: their indices; names: for messages.
    """

    leaves: tuple[int, ...]
    names: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]
    inference: tuple[bool, ...]

    @staticmethod
    def of(names: Sequence[str], leaves: Sequence[Any]) -> ArgumentAttributes:
        """The guard for arguments as they are."""
        found = [i for i, leaf in enumerate(leaves) if _is_unwrapped(leaf)]
        keys = tuple(tuple(sorted(_attributes(leaves[i]))) for i in found)
        inference = tuple(is_inference(leaves[i]) for i in found)
        return ArgumentAttributes(tuple(found), tuple(names[i] for i in found), keys, inference)

    def failure(self, call: Call) -> str | None:
        """Why the program does not hold, or None."""
        each = zip(self.leaves, self.names, self.keys, self.inference, strict=True)
        for at, name, were, was_inference in each:
            leaf = call.leaves[at]
            if is_inference(leaf) != was_inference:
                now, was = ("no", "one") if was_inference else ("an", "none")
                return f"`{name}` is {now} inference tensor, was {was}"
            found = _attributes(leaf)
            if len(found) != len(were) or (found and tuple(sorted(found)) != were):
                return f"the tensor `{name}` has the attributes {sorted(found)}, had {list(were)}"
        return None


def refused_class(kind: type) -> UncapturableError:
    """Why calls with a tensor of such a class run eagerly."""
    return UncapturableError(
        f"takes {own_functions_text(kind)}, which a replay does not: pass `x.as_subclass(torch.Tensor)`"
    )


def is_inference(leaf: Any) -> bool:
    """Whether a tensor was made in `inference_mode`, so that autograd cannot save it."""
    return type(leaf) is Tensor and leaf.is_inference()


class GivenAttributes(NamedTuple):
    """The attributes of a tensor among the arguments before the step."""

    name: str
    tensor: Tensor
    found: dict[str, Any]

    @staticmethod
    def of(names: Sequence[str], leaves: Iterable[Any]) -> list[GivenAttributes]:
        """Those of each."""
        found = zip(names, leaves, strict=True)
        return [GivenAttributes(n, t, dict(_attributes(t))) for n, t in found if _is_unwrapped(t)]

    def change(self, call: Call) -> str | None:
        """What the step has done to them that a replay would not."""
        now = _attributes(self.tensor)
        if not now and not self.found:
            return None
        for key in (*self.found, *now):
            if now.get(key, self) is not self.found.get(key, self):
                return (
                    f"assigns `{key}` to the argument `{self.name}`, a tensor, which a replay would not: return it, "
                    "or keep it in an attribute of a module or of an object of your own"
                )
        return None


def why_unreturnable(result: Tensor) -> str | None:
    """Why a replay could not return a tensor that the step has made; None: it could."""
    kind = type(result)
    if is_wrapper(result):
        return None
    if kind is nn.Parameter or not is_no_wrapper(result):
        return (
            f"returns {with_article(kind.__name__)} that it has made, and a replay returns plain tensors: return "
            "`x.as_subclass(torch.Tensor)`, and make it one outside the step"
        )
    if result.requires_grad and result.is_leaf:
        return (
            "returns a leaf that it has made and that requires a gradient, and a replay returns plain tensors: "
            "return it detached, and call `requires_grad_()` outside the step"
        )
    if names := sorted(_attributes(result)):
        return (
            f"returns a tensor with the attribute `{names[0]}`, and a replay returns plain tensors: return what it is "
            "beside the tensor"
        )
    return None


def _attributes(tensor: Any) -> dict[str, Any]:
    # A fake tensor has its own there.
    return _NONE if type(tensor) is FakeTensor else table_of(tensor) or _NONE


def _is_unwrapped(leaf: Any) -> bool:
    """Whether a leaf is a tensor without others inside, whose attributes are a script's alone."""
    return issubclass(type(leaf), Tensor) and not is_wrapper(leaf)
