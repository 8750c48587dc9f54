"""Progress bars, TensorBoard, wandb, `self.log` of Lightning in a step: a replay calls the same method again.

    bar.set_postfix(loss=loss.item())        bar.update(1)        bar.set_description(f"loss {loss.item():.3f}")
    writer.add_scalar("loss", loss.item(), 3)
    run.log({"loss": loss.item()})
    self.log("loss", loss)                   of a LightningModule, which detaches the tensor
    self.log("accuracy", self.accuracy)      a metric of torchmetrics: Lightning keeps it, and reads its last value

The state of a bar, and of what Lightning logs, is no guarded state: it changes by itself, and between calls. While a
step is recorded, their attributes that code outside of such calls reads or sets are noted: the step is refused by name.
Refusals: a bar, a writer or a metric that the search does not find; a metric whose value the step changes after it has
logged it; arguments that a replay cannot have again; a result that the step uses.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import ref

from torch import Tensor

from functionalize.calls.call_arguments import ArgumentForm, CallArguments
from functionalize.calls.call_log import CallRecorder, CallTarget
from functionalize.calls.interceptors import Repeated
from functionalize.ir.inputs import Call
from functionalize.scalars.call_sites import drops_result
from functionalize.util.text import with_article

BAR_METHODS = (
    *("update", "set_postfix", "set_postfix_str", "set_description", "set_description_str"),
    *("refresh", "unpause", "reset", "clear", "display"),
)
_MODULES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
_RUN = "wandb.sdk.wandb_run", "Run"
WRITER_METHODS = ("add_scalar", "add_scalars", "add_text", "flush")
_CONNECTOR = "trainer.connectors.logger_connector"
LOG_CLASSES = (
    f"{_CONNECTOR}.result._ResultCollection",
    f"{_CONNECTOR}.logger_connector._LoggerConnector",
)


@dataclass(frozen=True, slots=True)
class MethodCalled:
    """A call of a method. original: the function of the class."""

    what: str
    target: Any
    original: Callable[..., Any]
    form: ArgumentForm

    @property
    def reads_objects(self) -> bool:
        """Whether it is made when the step has assigned all that it assigns."""
        return bool(self.form.objects)

    def repeat(self, call: Call, value: Any) -> None:
        """Call it with the numbers and tensors of a replay."""
        args, keywords = self.form.filled(value[1])
        self.original(self.target, *args, **keywords)


@dataclass(frozen=True, slots=True)
class MethodInterceptor:
    """See `Interceptor`. what: for messages. detaches: whether the method uses tensors without their history."""

    what: str
    detaches: bool = False

    def repeated(
        self, recording: CallRecorder, frame: FrameType, original: Any, args: Any, keywords: Any
    ) -> Repeated | str | None:
        if not args or not drops_result(frame):
            return self.what
        if self.detaches and not keywords.get("enable_graph"):
            args = tuple(map(_detached, args))
            keywords = {key: _detached(value) for key, value in keywords.items()}
        objects = _metric_classes() if self.detaches else ()
        found = CallArguments.of(recording, frame, args[1:], keywords, objects=objects)
        if isinstance(found, str):
            return f"{self.what} with {found}"
        recording.calls.targets.append(CallTarget(args[0], self.what))
        for each in found.form.objects:
            what = f"{self.what} with {with_article(type(each).__name__)}"
            recording.calls.targets.append(CallTarget(each, what, _is_still(each)))
        plain, others = found.plain
        effect = MethodCalled(self.what, args[0], original, found.form)
        return Repeated(
            effect, CallArguments(found.form, found.values, ((args[0], *plain), others))
        )


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _metric_classes() -> tuple[type, ...]:
    """The class of metrics that Lightning logs as objects, if it was imported."""
    kind = getattr(sys.modules.get("torchmetrics.metric"), "Metric", None)
    return () if kind is None else (kind,)


def _is_still(metric: Any) -> Callable[[], bool]:
    """Tells whether a metric has the last value that it has now, all that Lightning reads when it logs the metric."""

    value = metric._forward_cache
    if not isinstance(value, Tensor):
        return lambda: value is None and metric._forward_cache is None
    was, version = ref(value), value._version

    def holds() -> bool:
        now = metric._forward_cache
        return isinstance(now, Tensor) and now is was() and now._version == version

    return holds


def _log_classes() -> Iterator[Any]:
    """The classes that keep what Lightning logs."""
    for module, names in itertools.product(_MODULES, LOG_CLASSES):
        place, _, name = names.rpartition(".")
        found = sys.modules.get(f"{module.removesuffix('core.module')}{place}")
        yield getattr(found, name, None)


def bar_class() -> Any:
    """`tqdm.std.tqdm`, if it was imported."""
    return getattr(sys.modules.get("tqdm.std"), "tqdm", None)


def methods() -> Iterator[tuple[Any, str, str, MethodInterceptor]]:
    """The table of interceptors: owner, name, what a call does, interceptor."""
    module = sys.modules.get("torch.utils.tensorboard.writer")
    loggers = [getattr(sys.modules.get(name), "LightningModule", None) for name in _MODULES]
    for owner, names, what in (
        (bar_class(), BAR_METHODS, "moves a progress bar"),
        (getattr(module, "SummaryWriter", None), WRITER_METHODS, "writes to TensorBoard"),
        (getattr(sys.modules.get(_RUN[0]), _RUN[1], None), ("log",), "logs to wandb"),
        *((owner, ("log",), "logs to Lightning") for owner in loggers),
    ):
        for name in names:
            if owner is not None and name in vars(owner):
                yield owner, name, what, MethodInterceptor(what, owner in loggers)


def bar_patches(recorders: Callable[[], list[Any]]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement): reads and assignments of their attributes. recorders: those of this thread."""

    def note(bar: Any, name: str, what: str) -> None:
        for each in recorders():
            if each.checks.for_real and not each.checks.in_effect:
                named = with_article(object.__getattribute__(bar, "__class__").__name__)
                each.checks.refuse_here(f"{what} `{name}` of {named}, which a replay would not")

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in object.__getattribute__(self, "__dict__") or name == "__dict__":
            note(self, name, "reads")
        return value

    def assign(self: Any, name: str, value: Any) -> None:
        note(self, name, "sets")
        object.__setattr__(self, name, value)

    for kind in (bar_class(), *_log_classes()):
        if kind is not None:
            yield kind, "__getattribute__", read
            yield kind, "__setattr__", assign
