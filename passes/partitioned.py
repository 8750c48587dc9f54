"""Forward and backward of a program as two graphs, and the values saved in between.

    parts = Partitioned.of(step.program)
    print(parts)                           saved for backward: 2 values, 768 bytes
                                             relu    float32[4, 16]    256 bytes  File "model.py", line 7, ...
                                             addmm   float32[4, 32]    512 bytes  ...
    parts.forward, parts.backward          graph modules: inputs -> results, saved; inputs, saved -> results
    results = parts.run(inputs)            forward, then backward: the results of `program.run`
    function = parts.as_function()         of a joint program: a `torch.autograd.Function`, as a function

Invariant: the same ops on the same values as in the single graph, so the same bits. A value is saved once, however
many views of it the backward makes; an input is not saved but read again.

Refusals (`PassError`): those of `Partition`; a stage after PARTITIONED; as a function, a program that changes
its inputs, depends on a number, or has not one tangent argument per result and one gradient per other argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from functionalize.analysis.aliases import results, storage_key
from functionalize.analysis.joint_split import Split, split
from functionalize.errors import PassError
from functionalize.ir.inputs import Argument
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.ir.outputs import Constant, Result
from functionalize.passes.base import FUNCTIONAL, PARTITIONED
from functionalize.passes.partition import EARLY, TAG, Partition
from functionalize.passes.runner import run
from functionalize.program.program import Program
from functionalize.util.text import counted


@dataclass(frozen=True, slots=True)
class Saved:
    """A value that the forward makes and the backward reads.

    geometry: None for a number. nbytes: of its storage, 0 if a value before it in the list is on the same one.
    where: the innermost line of the user's code that made it.
    """

    name: str
    geometry: Geometry | None
    nbytes: int
    where: str


@dataclass(frozen=True, eq=False)
class Partitioned:
    """The two graphs of a program.

    forward: takes the inputs `forward_inputs` (by number), returns the results `forward_slots` (slots of the program's
    graph), then `saved`. backward: takes the inputs `backward_inputs`, then `saved`; returns the results
    `backward_slots`.

        >>> def joint(x, tangent):
        ...     y = x.sin()
        ...     return y, *torch.autograd.grad(y, x, tangent)
        >>> x = torch.ones(2, requires_grad=True)
        >>> parts = fz.passes.Partitioned.of(fz.functions.trace(joint, x, torch.ones(2)))
        >>> parts.as_function()(x).sum().backward()
        >>> torch.equal(x.grad, torch.ones(2).cos())
        True
    """

    program: Program
    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[Saved, ...]
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    forward_slots: tuple[int, ...]
    backward_slots: tuple[int, ...]

    @staticmethod
    def of(program: Program) -> Partitioned:
        """Split a program into two graphs. A program that is not partitioned is copied and partitioned first."""
        if program.stage == FUNCTIONAL:
            program = run(program, [Partition()])
        if program.stage != PARTITIONED:
            raise PassError(
                f"a program at stage {program.stage} cannot be made into two graphs: partition it before the passes "
                "that come after"
            )
        slots = results(program.graph)
        early = [n for n in program.graph.nodes if n.meta.get(TAG) == EARLY]
        before = {n for n in program.graph.nodes if n.op in ("placeholder", "get_attr")}.union(
            early
        )
        sides: tuple[list[int], list[int]] = [], []
        for i, each in enumerate(slots):
            sides[isinstance(each, fx.Node) and each not in before].append(i)
        parts, saved = _cut(program, early, *([slots[i] for i in side] for side in sides))
        forward, used = _module(program, parts.forward)
        backward, used_later = _module(program, parts.backward)
        return Partitioned(
            program, forward, backward, saved, used, used_later, tuple(sides[0]), tuple(sides[1])
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all saved values."""
        return sum(value.nbytes for value in self.saved)

    def __str__(self) -> str:
        lines = [f"saved for backward: {counted(len(self.saved), 'value')}, {self.nbytes:,} bytes"]
        looks = [str(v.geometry or "a number") for v in self.saved]
        names = max((len(v.name) for v in self.saved), default=0)
        wide = max(map(len, looks), default=0)
        for value, look in zip(self.saved, looks, strict=True):
            row = (
                f"  {value.name:<{names}}  {look:<{wide}}  {value.nbytes:>12,} bytes  {value.where}"
            )
            lines.append(row.rstrip())
        return "\n".join(lines)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The results of the program's graph, by the forward and then the backward."""
        made = self.forward(*(inputs[i] for i in self.forward_inputs))
        count = len(self.forward_slots)
        rest = self.backward(*(inputs[i] for i in self.backward_inputs), *made[count:])
        found = dict(zip(self.forward_slots, made[:count], strict=True))
        found |= zip(self.backward_slots, rest, strict=True)
        return [found[i] for i in range(len(found))]

    def as_function(self) -> Callable[..., Any]:
        """A differentiable function of the arguments without the tangents; see `_Contract` for its requirements.

        It returns a tensor, or a tuple of them. Its backward is not differentiable again.
        """
        return _function(self, _Contract.of(self))


def _cut(
    program: Program, early: Sequence[fx.Node], first: Sequence[Any], second: Sequence[Any]
) -> tuple[Split, tuple[Saved, ...]]:
    """Call `split`, which requires a graph without its output node, and results that are nodes."""
    joint, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node.op != "output":
            copies[node] = joint.node_copy(node, copies.__getitem__)
    _check_results(first)
    parts = split(
        joint, [copies[n] for n in early], [copies[n] for n in first], [copies[n] for n in second]
    )
    seen: set[Any] = set()
    return parts, tuple(_saved(node, seen) for node in parts.used)


def _check_results(found: Sequence[Any]) -> None:
    plain = [each for each in found if not isinstance(each, fx.Node)]
    if plain:
        raise PassError(
            f"the graph returns {plain[0]!r}, which no op makes: return values of nodes, and keep constants in "
            "`program.outputs`"
        )


def _saved(node: fx.Node, seen: set[Any]) -> Saved:
    value, frames = node.meta["val"], str(node.meta.get("stack_trace", "")).strip().splitlines()
    where = " ".join(line.strip() for line in frames[-2:])
    if not isinstance(value, Tensor):
        return Saved(node.name, None, 0, where)
    key = storage_key(value)
    nbytes = 0 if key in seen else int(value.untyped_storage().nbytes())
    seen.add(key)
    return Saved(node.name, geometry_of(value), nbytes, where)


def _module(program: Program, graph: fx.Graph) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """(a module around a graph without its unused inputs, the numbers of the used ones)."""
    used = []
    placeholders = graph.find_nodes(op="placeholder")
    for i, node in enumerate(placeholders[: len(program.inputs)]):
        if node.users:
            used.append(i)
        else:
            graph.erase_node(node)
    root = torch.nn.Module()
    for name, value in program.constants.items():
        root.register_buffer(name, value)
    return fx.GraphModule(root, graph, "Partitioned"), tuple(used)


# -- as a function ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Contract:
    """The signature that a program needs to become a `torch.autograd.Function`.

    (*primals, *tangents) -> (*results, *gradients): a tangent per result, a gradient or None per primal, as
    in `torch.autograd.grad`. leaves: for each input, the number of its argument. gradients: for each primal, the index
    of its gradient among the backward's results.
    """

    primals: int
    results: tuple[int, ...]
    leaves: tuple[int, ...]
    gradients: tuple[int | None, ...]

    @staticmethod
    def of(parts: Partitioned) -> _Contract:
        program = parts.program
        if program.epilogue or program.value_guards:
            what = (
                "changes its inputs" if program.epilogue else "depends on a number that Python read"
            )
            raise PassError(f"a program that {what} is no function with a backward")
        leaves = [_leaf(spec.source) for spec in program.inputs]
        if -1 in leaves:
            name = program.inputs[leaves.index(-1)].name
            raise PassError(f"`{name}` is no argument: trace a function of tensors for this")
        slots = [
            r.slot if isinstance(r, Result) and r.geometry is None else None
            for r in program.outputs
        ]
        count = next((i for i, s in enumerate(slots) if s not in parts.forward_slots), len(slots))
        primals = len(slots) - count
        total = program.in_spec.num_leaves if program.in_spec else 0
        late = [*slots[count:]]
        if total - primals != count or any(s in parts.forward_slots for s in late if s is not None):
            raise PassError(
                f"a joint program takes (*primals, *tangents) and returns (*results, *gradients), a tangent per "
                f"result and a gradient or None per primal: this one takes {total} arguments and returns {count} "
                f"results of its forward, then {len(late)} of its backward"
            )
        if any(s is None and not _is_none(r) for s, r in zip(slots, program.outputs, strict=True)):
            raise PassError(
                "every result is a tensor of its own, every gradient one or None: clone the others"
            )
        if any(leaves[i] >= primals for i in parts.forward_inputs):
            raise PassError("the forward reads a tangent: there is none before backward")
        place = {slot: i for i, slot in enumerate(parts.backward_slots)}
        gradients = tuple(None if s is None else place[s] for s in late)
        first = tuple(parts.forward_slots.index(s) for s in slots[:count] if s is not None)
        return _Contract(primals, first, tuple(leaves), gradients)


def _leaf(source: Any) -> int:
    return source.leaf if isinstance(source, Argument) and not source.attributes else -1


def _is_none(role: Any) -> bool:
    return isinstance(role, Constant) and role.value is None


def _function(parts: Partitioned, contract: _Contract) -> Callable[..., Any]:
    count = len(parts.forward_slots)
    early, late = (
        [contract.leaves[i] for i in side] for side in (parts.forward_inputs, parts.backward_inputs)
    )
    again = [leaf for leaf in late if leaf < contract.primals]
    specs = {contract.leaves[i]: parts.program.inputs[i].geometry for i in parts.backward_inputs}

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *primals: Tensor) -> Any:
            made = parts.forward(*(primals[leaf] for leaf in early))
            saved = made[count:]
            ctx.numbers = [None if isinstance(s, Tensor) else s for s in saved]
            tensors = [s for s in saved if isinstance(s, Tensor)]
            ctx.save_for_backward(*(primals[leaf] for leaf in again), *tensors)
            outs = tuple(made[i] for i in contract.results)
            return outs if len(outs) > 1 else outs[0]

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *tangents: Tensor) -> Any:
            kept = ctx.saved_tensors
            inputs = dict(zip(again, kept, strict=False))
            inputs |= {
                contract.primals + i: _laid_out(t, specs.get(contract.primals + i))
                for i, t in enumerate(tangents)
            }
            rest = iter(kept[len(again) :])
            saved = [next(rest) if number is None else number for number in ctx.numbers]
            grads = parts.backward(*(inputs[leaf] for leaf in late), *saved)
            return tuple(None if i is None else grads[i] for i in contract.gradients)

    return Function.apply


def _laid_out(tangent: Tensor, geometry: Geometry | None) -> Tensor:
    """A tangent with the strides of the trace: autograd passes tangents of any layout, often an `expand`."""
    if geometry is None or tangent.stride() == geometry.stride:
        return tangent
    new = torch.empty_strided(
        geometry.size, geometry.stride, dtype=tangent.dtype, device=tangent.device
    )
    return new.copy_(tangent)
