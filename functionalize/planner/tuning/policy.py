"""A configuration as an eager policy: applied to a model, or printed as a Python file that needs only torch.

    policy.batch, policy.accumulate, policy.mesh      of one rank, microbatches of a step, dimension -> ranks
    policy.apply(model)                               checkpointing and resharding of its layers
    policy.code()                                     the same as a file with a function `apply(model)`

`applied.py` has what both do, and `code` prints its source, so that they cannot differ.
Invariant: `apply` refuses before it changes anything.
Refuses (`TuneError`): a model without the layers of the policy, one that it was applied to before.
"""

from __future__ import annotations

import inspect
import pprint
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from functionalize.errors import TuneError
from functionalize.planner.sweep.changes import set_reshard
from functionalize.planner.tuning import applied

Mesh = Mapping[str, int]
_OFFLOAD = tuple(
    f"  # `build` passes offload_policy={name}() to each `fully_shard`"
    for name in ("OffloadPolicy", "CPUOffloadPolicy")
)


@dataclass(frozen=True)
class LayerPolicy:
    """What is done to one layer.

    saved: None: nothing is recomputed; else all is, but the results of these ops: (name of the op, which of its calls).
    reshard: `reshard_after_forward`; None: as the model has it.
    """

    saved: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    reshard: bool | int | None = None

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """In words: `saves mm 0 1, cat 0; resharded`."""
        kept = ", ".join(
            f"{name.removeprefix('aten.').removesuffix('.default')} {' '.join(map(str, calls))}"
            for name, calls in self.saved or ()
        )
        how = "saves all" if self.saved is None else f"saves {kept}" if kept else "recomputed"
        if self.reshard is None:
            return how
        if isinstance(self.reshard, bool):
            return f"{how}; {'resharded' if self.reshard else 'stays unsharded'}"
        return f"{how}; resharded to {self.reshard}"


@dataclass(frozen=True, repr=False)
class EagerPolicy:
    """How a model is run eagerly.

    batch: of one rank and microbatch. accumulate: microbatches of a step. mesh: None: one dimension of all ranks.
    layers: fully qualified name of a module -> its policy. offload: whether the `offload_policy` of `fully_shard` is
    `CPUOffloadPolicy()`; None: as `build` has it.
    """

    batch: Any = None
    accumulate: int = 1
    mesh: Mesh | None = None
    layers: Mapping[str, LayerPolicy] = field(default_factory=dict)
    offload: bool | None = None

    def __repr__(self) -> str:
        ways = len({*self.layers.values()})
        return f"<EagerPolicy: {self._head()}; {len(self.layers)} layers in {ways} ways>"

    def __str__(self) -> str:
        """A line for the batch and the mesh, then one for each way in which layers are run."""
        names: dict[LayerPolicy, list[str]] = {}
        for name, each in self.layers.items():
            names.setdefault(each, []).append(name)
        return "\n".join(
            [self._head(), *(f"{', '.join(found)}: {each}" for each, found in names.items())]
        )

    def _head(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in (self.mesh or {}).items())
        offloaded = ", offload_policy=CPUOffloadPolicy()" if self.offload else ""
        return f"batch {self.batch} x {self.accumulate}, {mesh or 'all ranks shard'}{offloaded}"

    def apply(self, model: nn.Module) -> None:
        """Checkpoint and reshard the layers of a model, in place, before its first forward."""
        modules = dict(model.named_modules())
        missing = [name for name in self.layers if name not in modules]
        if missing:
            raise TuneError(
                f"the model has no module `{missing[0]}`, which this policy is for: apply it to the one that was tuned"
            )
        chosen = {modules[name]: policy for name, policy in self.layers.items()}
        if any(isinstance(vars(module).get("forward"), partial) for module in chosen):
            raise TuneError("a policy was applied to this model before: apply it to a new one")
        apply_to(chosen)

    def code(self) -> str:
        """A Python file with this policy: constants, and `apply(model)`."""
        names: dict[LayerPolicy, list[str]] = {}
        for name, each in self.layers.items():
            names.setdefault(each, []).append(name)
        saved = {
            name: {op: set(calls) for op, calls in each.saved}
            for each, found in names.items()
            if each.saved is not None
            for name in found
        }
        reshard = {
            name: each.reshard
            for each, found in names.items()
            if each.reshard is not None
            for name in found
        }
        source = inspect.getsource(applied)
        functions = source[source.index("from __future__") :].rstrip()
        numbers = {value for value in reshard.values() if not isinstance(value, bool)}
        lines = [
            '"""Written by `functionalize tune`. Apply it after `fully_shard`, before the first step."""',
            "",
            functions,
            "",
            "",
            f"BATCH = {self.batch!r}  # of one rank and microbatch",
            f"ACCUMULATE = {self.accumulate!r}  # microbatches of a step",
            f"MESH = {dict(self.mesh) if self.mesh else None!r}",
            *(
                []
                if self.offload is None
                else [f"OFFLOAD = {self.offload}{_OFFLOAD[self.offload]}"]
            ),
            "# Layer -> the results that it saves: op -> which of its calls. The rest is computed again in backward.",
            f"SAVED = {_shown(saved)}",
            "# Layer -> its `reshard_after_forward`.",
            f"RESHARD = {_shown(reshard)}",
            "",
            "",
            "def apply(model: nn.Module) -> None:",
            '    """Checkpoint and reshard the layers of a model that `fully_shard` was applied to."""',
            "    for name, saved in SAVED.items():",
            "        recompute(model.get_submodule(name), saved)",
        ]
        if numbers:
            lines += [
                "    from functionalize.planner.sweep.changes import set_reshard  # torch's own setter takes no number",
                "",
                "    set_reshard({model.get_submodule(name): value for name, value in RESHARD.items()})",
            ]
        else:
            lines += [
                "    for name, value in RESHARD.items():",
                "        model.get_submodule(name).set_reshard_after_forward(value, recurse=False)",
            ]
        return "\n".join(lines) + "\n"


def apply_to(chosen: Mapping[Any, LayerPolicy]) -> None:
    """Apply the policies of modules."""
    set_reshard({m: each.reshard for m, each in chosen.items() if each.reshard is not None})
    for module, each in chosen.items():
        if each.saved is not None:
            applied.recompute(module, {op: set(calls) for op, calls in each.saved})


def counted_policies(policies: Iterable[LayerPolicy]) -> str:
    """`20 saves all, 12 recomputed`, the layers of each in their order."""
    found: dict[str, int] = {}
    for each in policies:
        found[each.text()] = found.get(each.text(), 0) + 1
    return ", ".join(f"{count} {text}" for text, count in found.items())


def _shown(value: Any) -> str:
    return pprint.pformat(value, width=100, sort_dicts=False)
