"""What torch itself traces in a step: `torch.cond`, `while_loop`, `scan`, `map`, flex attention, `torch.jit.trace`.

    torch.cond(x.sum() > 0, f, g, (x,))     refused by name; the call that is recorded runs as eager does
    torch.cond(True, f, g, (x,))            calls `f`: no higher-order op, captured like all else
    torch.jit.trace(f, (x,))                refused likewise: its graph would contain what a recorder asks of tensors

Eager compiles a higher-order op by Dynamo, which makes tensors in closures (the parameters of modules) operands of the
op, with gradients of zeros where the branch that was not taken uses them. A recorder runs compiled code uncompiled, and
would lose these gradients. Therefore the op is compiled as in eager, and no mode of a recorder sees what is inside.
Of flex attention no program is made, although it runs by ops where it is not compiled: users compile it, and the kernel
that Inductor generates rounds and allocates otherwise. On CPUs it has no backward.
Refusals: `torch.jit.trace`; every higher-order op that runs while a step is recorded, but for custom Functions inside
of `torch.func`: eager never compiles them, and the ops inside are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize._compat.autograd import backward_position, custom_function_call
from functionalize._compat.compilers import tracers_of_torchscript
from functionalize._compat.dispatch import HigherOrderOperator, disable_current_modes
from functionalize.recorder.checks import Checks
from functionalize.util.patching import Patch

# Its class calls its base class with two more arguments, the tensors in closures, which Dynamo finds itself.
_FLEX, _SEEN_BY_DYNAMO = "flex_attention", 7
_BY_PRODUCT = "use torch.nn.functional.scaled_dot_product_attention with a mask"
_INSTEAD = {
    "cond": "use Python's `if` (`if x.sum().item() > 0:`)",
    "while_loop": "use Python's `while` (`while x.sum().item() > 0:`)",
    _FLEX: _BY_PRODUCT,
    f"{_FLEX}_backward": _BY_PRODUCT,
}


def patches(checks: Callable[[], Iterator[Checks]], watched: Callable[[], bool]) -> Iterator[Patch]:
    """(owner, name, replacement). checks: of the recorders of this thread. watched: whether there is a recorder."""
    original = HigherOrderOperator.__call__

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not watched() or self is custom_function_call:
            return original(self, *args, **kwargs)
        for each in checks():
            each.refuse_here(
                f"runs the higher-order op `{self._name}`, of which no program can be made",
                _INSTEAD.get(self._name, "use Python's `for` or `if`, or run it outside the step"),
            )
        with disable_current_modes():
            if backward_position() is not None:
                return original(self, *args, **kwargs)
            if self._name == _FLEX:
                args = args[:_SEEN_BY_DYNAMO]
            compiled = torch.compile(lambda *a, **k: self(*a, **k), backend="eager", fullgraph=True)
            return compiled(*args, **kwargs)

    yield HigherOrderOperator, "__call__", call
    for owner, name in tracers_of_torchscript():
        yield owner, name, _unseen(getattr(owner, name), checks, watched)


def _unseen(
    original: Any, checks: Callable[[], Iterator[Checks]], watched: Callable[[], bool]
) -> Any:
    def trace(*args: Any, **kwargs: Any) -> Any:
        if not watched():
            return original(*args, **kwargs)
        for each in checks():
            each.refuse_here(
                "traces code for TorchScript, of which no program can be made",
                "trace it outside the step",
            )
        with disable_current_modes():
            return original(*args, **kwargs)

    return trace
