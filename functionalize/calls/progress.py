"""Progress bars of `tqdm` and scalars of TensorBoard in a step: a replay calls the same method of the same object.

    bar.set_postfix(loss=loss.item())        bar.update(1)        bar.set_description(f"loss {loss.item():.3f}")
    writer.add_scalar("loss", loss.item(), 3)

The state of a bar is no guarded state: it changes by itself, and between calls. While a step is recorded, attributes of
a bar that code outside of `tqdm` reads or sets are noted: the step is refused by name.
Refusals: a bar or a writer that the search does not find; arguments that a replay cannot have again; a result that the
step uses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from functionalize.calls.call_arguments import ArgumentForm, CallArguments
from functionalize.calls.call_log import CallRecorder
from functionalize.calls.doors import Repeated
from functionalize.ir.inputs import Call
from functionalize.scalars.call_sites import drops_result
from functionalize.util.text import with_article

BAR_METHODS = (
    *("update", "set_postfix", "set_postfix_str", "set_description", "set_description_str"),
    *("refresh", "unpause", "reset", "clear", "display"),
)
WRITER_METHODS = ("add_scalar", "add_scalars", "add_text", "flush")
_OWN_STATE = frozenset({"__class__", "__init__", "__del__", "__dict__"})


@dataclass(frozen=True, slots=True)
class MethodCalled:
    """A call of a method. original: the function of the class."""

    what: str
    target: Any
    original: Callable[..., Any]
    form: ArgumentForm

    def repeat(self, call: Call, value: Any) -> None:
        """Call it with the numbers and tensors of a replay."""
        args, keywords = self.form.filled(value[1])
        self.original(self.target, *args, **keywords)


@dataclass(frozen=True, slots=True)
class MethodDoor:
    """See `Door`. what: for messages."""

    what: str

    def repeated(
        self, recording: CallRecorder, frame: FrameType, original: Any, args: Any, keywords: Any
    ) -> Repeated | str | None:
        if not args or not drops_result(frame):
            return self.what
        found = CallArguments.of(recording, frame, args[1:], keywords)
        if isinstance(found, str):
            return f"{self.what} with {found}"
        recording.calls.targets.append((args[0], self.what))
        plain, others = found.plain
        effect = MethodCalled(self.what, args[0], original, found.form)
        return Repeated(
            effect, CallArguments(found.form, found.values, ((args[0], *plain), others))
        )


def bar_class() -> Any:
    """`tqdm.std.tqdm`, if it was imported."""
    return getattr(sys.modules.get("tqdm.std"), "tqdm", None)


def methods() -> Iterator[tuple[Any, str, str, MethodDoor]]:
    """The table of doors: owner, name, what a call does, door."""
    module = sys.modules.get("torch.utils.tensorboard.writer")
    for owner, names, what in (
        (bar_class(), BAR_METHODS, "moves a progress bar"),
        (getattr(module, "SummaryWriter", None), WRITER_METHODS, "writes to TensorBoard"),
    ):
        for name in names:
            if owner is not None and name in vars(owner):
                yield owner, name, what, MethodDoor(what)


def bar_patches(recorders: Callable[[], list[Any]]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement): reads and assignments of the attributes of bars. recorders: those of this thread."""
    kind = bar_class()
    if kind is None:
        return

    def note(bar: Any, name: str, what: str) -> None:
        for each in recorders():
            if each.checks.for_real and not each.checks.in_effect:
                named = with_article(object.__getattribute__(bar, "__class__").__name__)
                each.checks.refuse_here(f"{what} `{name}` of {named}, which a replay would not:")

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in object.__getattribute__(self, "__dict__") or name == "__dict__":
            note(self, name, "reads")
        return value

    def assign(self: Any, name: str, value: Any) -> None:
        note(self, name, "sets")
        object.__setattr__(self, name, value)

    yield kind, "__getattribute__", read
    yield kind, "__setattr__", assign
