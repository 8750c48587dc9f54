"""Check the invariants of a program; report every violation at once, with the graph around it.

    > add_ = aten.add_.Tensor(a, 1)        `add_` writes its argument `self` (`a`): ...

1. No node writes an argument (by its schema), no node is a resize. At stage INPLACE there is one `commit`
   (ir/commit.py): before it ops write what the graph made, after it inputs that `writes` names; no
   number, random op or collective comes after it.
2. No node reads an input whose storage is empty on entry, not even through a view.
3. The caller's tensors change only after the last guard, and only those that the epilogue names: every input
   and result that the epilogue, guards and outputs name exists, with fitting geometry; a value returned to the
   caller shares no memory with any other value; the epilogue does not overwrite a value before copying it.
4. The result of a collective is read only through its wait.
5. `val` and `tensor_meta` exist and agree with each other and with the inputs.

Not checked here: that every rank issues the same collectives. `step/collective_check.py` compares them when a
recording ends, `step/vote.py` before replays of programs whose passes may have changed them, and `passes.run`
checks that no other pass changes them.
Rewrites nothing. Linear in nodes and edges.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, fx

from functionalize._compat.graphs import input_nodes
from functionalize.analysis.aliases import (
    Aliases,
    guarded_storages,
    is_view,
    results,
    results_of,
    storage_classes,
    written_nodes,
)
from functionalize.analysis.dead_code import is_number, keeps_its_place
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.errors import VerifyError
from functionalize.ir.commit import is_commit
from functionalize.ir.epilogue import Copy, Resize, Set
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.ir.outputs import Result
from functionalize.ir.waits import is_functional_collective
from functionalize.passes.base import INPLACE, STAGES, Pass
from functionalize.passes.graph_modules import program_of
from functionalize.passes.views import geometry_in
from functionalize.program.collective_order import groups_of
from functionalize.program.printer import window_text
from functionalize.program.program import Program

Finding = tuple[fx.Node | None, str]  # (the node concerned, or None if there is none; the message)


@dataclass(frozen=True)
class Verify(Pass):
    """Raise `VerifyError` unless the program holds its invariants."""

    name: ClassVar[str] = "verify"
    accepts: ClassVar[tuple[str, ...]] = STAGES

    def apply(self, program: Program) -> int:
        verify(program)
        return 0


def verify(program: Program | fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> None:
    """Raise `VerifyError`, listing every violation, unless a program, or the graph of a module, holds its invariants.

    A bare graph module has no epilogue, and its outputs may alias anything. The size of an input's storage is
    that of its `val`. example_inputs: needed only where its nodes have no fake values.

        >>> fz.passes.verify(fz.functions.trace(lambda x: x.sin(), torch.ones(2)))
    """
    if isinstance(program, fx.GraphModule):
        program = replace(program_of(program, example_inputs), outputs=())
    program.describe()
    nodes = list(program.graph.nodes)
    found = list(_structure(program, nodes))
    if not found:  # the other checks rely on a well-formed graph
        aliases = Aliases(program.graph)
        found = [f for checks in _CHECKS for f in checks(program, nodes, aliases)]
    if not found:
        return
    index = {node: i for i, node in enumerate(nodes)}
    lines = [f"{len(found)} violation{'s' if len(found) > 1 else ''} in the program"]
    for i, (node, text) in enumerate(found, 1):
        lines.append(f"{i}. {text}")
        if node is not None:
            at = index[node]
            around = window_text(nodes[max(0, at - 2) : at + 3], node)
            lines += [f"     {line}" for line in around.splitlines()]
    raise VerifyError("\n".join(lines))


# -- the form of the graph and of its metadata -----------------------------------------------------


def _structure(program: Program, nodes: Sequence[fx.Node]) -> Iterator[Finding]:
    if not nodes or nodes[-1].op != "output":
        yield None, "the graph does not end with its output"
    placeholders = [n for n in nodes if n.op == "placeholder"]
    names, specs = [str(n.target) for n in placeholders], [s.name for s in program.inputs]
    if names != specs:
        yield None, f"the placeholders are {names}, the inputs are {specs}: one each, in this order"
    for node in nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            yield (
                node,
                f"`{node.name}` is a {node.op}: every value is an input, a constant or an op",
            )
        if node.op == "get_attr" and str(node.target) not in program.constants:
            yield node, f"`{node.name}` reads the constant `{node.target}`, which does not exist"
        if node.op != "output" and "val" not in node.meta:
            yield (
                node,
                f"`{node.name}` has no meta['val']: set it as `passes.metadata.set_value` does",
            )


def _metadata(program: Program, nodes: Sequence[fx.Node], aliases: Aliases) -> Iterator[Finding]:
    for node in nodes:
        value, described = node.meta.get("val"), node.meta.get("tensor_meta")
        if not isinstance(value, Tensor):
            continue
        if described is None:
            yield node, f"`{node.name}` has a tensor in meta['val'] and no meta['tensor_meta']"
            continue
        have: Any = geometry_in(program, value) or (value.shape, value.stride(), 0, value.dtype)
        if (have[0], have[1], have[3]) == (described.shape, described.stride, described.dtype):
            continue
        have = tuple(have[0]), tuple(have[1]), have[3]
        recorded = (tuple(described.shape), tuple(described.stride), described.dtype)
        if have != recorded:
            yield (
                node,
                f"`{node.name}` is {_look(*have)} by meta['val'], "
                f"{_look(*recorded)} by meta['tensor_meta']",
            )
    placeholders = [n for n in nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, program.inputs, strict=True):
        value = node.meta["val"]
        if not isinstance(value, Tensor) or not isinstance(spec.geometry, Geometry):
            continue
        now = geometry_in(program, value) or geometry_of(value)
        if now != spec.geometry or value.device != spec.device:
            yield (
                node,
                f"`{node.name}` is {now} on {value.device} by meta['val'], "
                f"{spec.geometry} on {spec.device} as an input",
            )
        held = value.untyped_storage().nbytes()
        if now.numel and (held == 0) != (spec.nbytes == 0):
            yield (
                node,
                f"the storage of `{node.name}` holds {held} bytes by meta['val'], "
                f"{spec.nbytes} as an input",
            )


def _look(size: tuple[int, ...], stride: tuple[int, ...], dtype: Any) -> str:
    return str(Geometry(size, stride, 0, dtype))


# -- purity ----------------------------------------------------------------------------------------


def _purity(program: Program, nodes: Sequence[fx.Node], aliases: Aliases) -> Iterator[Finding]:
    if program.stage == INPLACE:
        yield from _written_in_place(program, nodes, aliases)
        return
    for node in nodes:
        if node.target is RESIZE_STORAGE:
            yield node, f"`{node.name}` is a resize: resizes belong to the epilogue"
            continue
        if is_commit(node):
            yield node, f"`{node.name}` commits at stage {program.stage}: only {INPLACE} has one"
        for name, written in written_nodes(node):
            yield (
                node,
                f"`{node.name}` writes its argument `{name}` (`{written.name}`): use the "
                f"functional form of {node.target}, and let the epilogue write inputs",
            )


def _written_in_place(
    program: Program, nodes: Sequence[fx.Node], aliases: Aliases
) -> Iterator[Finding]:
    commits = [n for n in nodes if is_commit(n)]
    if len(commits) != 1:
        yield None, f"a program at stage {INPLACE} has one commit, this one has {len(commits)}"
        return
    slots = results(program.graph)
    guarded = [slots[guard.slot] for guard in program.value_guards if guard.slot < len(slots)]
    if list(commits[0].args) != guarded:
        yield commits[0], "the arguments of the commit are not the guarded values, in order"
    after, written = False, set[int]()
    inputs = {n: i for i, n in enumerate(n for n in nodes if n.op == "placeholder")}
    memory = {aliases.of(n): n for n in nodes if n.op in ("placeholder", "get_attr")}
    for node in nodes:
        after |= is_commit(node)
        if node.target is RESIZE_STORAGE:
            yield node, f"`{node.name}` is a resize: resizes belong to the epilogue"
            continue
        writes = written_nodes(node)
        for name, each in writes:
            owner = memory.get(aliases.of(each))
            if owner in inputs and after:
                written.add(inputs[owner])
            elif owner is not None:
                when = "before the commit" if owner in inputs else "which is a constant"
                yield node, f"`{node.name}` writes its argument `{name}` (`{each.name}`), {when}"
        is_late = after and not writes and not is_commit(node)
        if is_late and (keeps_its_place(node) or is_number(node)):
            why = "may fail, wait for other ranks, or read a generator, after the commit"
            yield node, f"`{node.name}` {why}"
    if written != set(program.writes):
        yield (
            None,
            f"ops write the inputs {sorted(written)}, and `writes` says {sorted(program.writes)}",
        )


def _empty_reads(program: Program, nodes: Sequence[fx.Node], aliases: Aliases) -> Iterator[Finding]:
    placeholders = [n for n in nodes if n.op == "placeholder"]
    empty: dict[fx.Node, str] = {}
    for node, spec in zip(placeholders, program.inputs, strict=True):
        if isinstance(spec.geometry, Geometry) and spec.geometry.end > spec.nbytes:
            empty[node] = (
                f"`{node.name}`, whose storage holds {spec.nbytes} bytes on entry and would need "
                f"{spec.geometry.end}"
            )
    for node in nodes if empty else ():
        read = [n for n in input_nodes(node) if n in empty]
        if read and is_view(node) and node.users:
            empty[node] = f"`{node.name}`, a view of {empty[read[0]]}"
            continue
        for each in read:
            verb = "returns" if node.op == "output" else f"`{node.name}` reads"
            yield node, f"{verb} {empty[each]}"


# -- collectives -----------------------------------------------------------------------------------


def _waited(program: Program, nodes: Sequence[fx.Node], aliases: Aliases) -> Iterator[Finding]:
    started: dict[
        fx.Node, str
    ] = {}  # a result that is not waited for -> the name of its collective
    for node in nodes:
        if groups_of(node.target, node.args):
            started[node] = node.name
        elif node.target is operator.getitem and node.all_input_nodes[0] in started:
            started[node] = started[node.all_input_nodes[0]]
            continue
        if is_functional_collective(node.target) and node not in started:
            continue  # a wait
        if not started or started.keys().isdisjoint(input_nodes(node)):
            continue
        for used in input_nodes(node):
            if used in started and used is not node:
                yield (
                    node,
                    f"`{node.name}` reads `{used.name}`, which `{started[used]}` has not completed: "
                    "read what `wait_tensor` returns",
                )


# -- what leaves the graph -------------------------------------------------------------------------


def _outputs(program: Program, nodes: Sequence[fx.Node], aliases: Aliases) -> Iterator[Finding]:
    slots = results(program.graph)
    owner: dict[fx.Node, str] = {n: f"input `{n.name}`" for n in nodes if n.op == "placeholder"}
    owner |= {n: f"constant `{n.target}`" for n in nodes if n.op == "get_attr"}
    memory = {aliases.of(n): name for n, name in owner.items()}
    returned = [
        (f"output {i}", r) for i, role in enumerate(program.outputs) for r in results_of(role)
    ]
    returned += [
        (f"`set_` of input {a.input}", Result(a.slot, a.geometry))
        for a in program.epilogue
        if isinstance(a, Set) and a.slot is not None
    ]
    owners: dict[fx.Node, tuple[int, str]] = {}  # group of aliases -> its slot and output
    for what, role in returned:
        if not 0 <= role.slot < len(slots):
            yield nodes[-1], f"{what} is result {role.slot} of {len(slots)}"
            continue
        node = slots[role.slot]
        if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], Tensor):
            continue
        yield from _fits(what, role, node)
        group = aliases.of(node)
        if group in memory:
            yield (
                node,
                f"{what} is `{node.name}`, which shares memory with {memory[group]}: copy it",
            )
        slot, other = owners.setdefault(group, (role.slot, what))
        if slot != role.slot and not role.is_saved:
            yield node, f"{what} is `{node.name}`, which shares memory with {other}: copy it"


def _fits(what: str, role: Result, node: fx.Node) -> Iterator[Finding]:
    nbytes = node.meta["val"].untyped_storage().nbytes()
    if role.geometry is not None and role.geometry.end > nbytes:
        yield (
            node,
            f"{what} is `{node.name}` seen as {role.geometry}, which needs {role.geometry.end} "
            f"bytes of {nbytes}",
        )


def _epilogue(program: Program, nodes: Sequence[fx.Node], aliases: Aliases) -> Iterator[Finding]:
    inputs, slots, classes = program.inputs, results(program.graph), storage_classes(program)
    homes = guarded_storages(program) or range(len(inputs))  # of a backward, saved values have none
    sizes = {c: spec.nbytes for c, spec in zip(homes, inputs, strict=True)}
    resized: set[int] = set()
    for action in program.epilogue:
        kind = f"{type(action).__name__.lower()} in the epilogue"
        named = [action.input, *([action.other] if isinstance(action, Set) else [])]
        wrong = [i for i in named if i is not None and not 0 <= i < len(inputs)]
        if wrong:
            yield None, f"a {kind} names input {wrong[0]} of {len(inputs)}"
            continue
        home, name = homes[action.input], inputs[action.input].name
        if isinstance(action, Resize):
            if home in resized or action.nbytes < 0:
                why = "which is negative" if action.nbytes < 0 else "resized before"
                yield None, f"a {kind} makes `{name}` {action.nbytes} bytes, {why}"
            resized.add(home)
            sizes[home] = action.nbytes
        elif isinstance(action, Copy):
            yield from _copy(f"a {kind} of `{name}`", action, slots, nodes, sizes[home])
    yield from _overwritten(program, slots, classes, nodes, aliases)


def _copy(
    what: str, action: Copy, slots: Sequence[Any], nodes: Sequence[fx.Node], nbytes: int
) -> Iterator[Finding]:
    if action.geometry.end > nbytes:
        yield (
            None,
            f"{what} as {action.geometry} needs {action.geometry.end} bytes of a storage that "
            f"holds {nbytes} then",
        )
    if not 0 <= action.slot < len(slots):
        yield nodes[-1], f"{what} is from result {action.slot} of {len(slots)}"
        return
    value = slots[action.slot].meta["val"]
    if tuple(value.shape) != tuple(action.geometry.size) or value.dtype != action.geometry.dtype:
        yield (
            slots[action.slot],
            f"{what} as {action.geometry} is from `{slots[action.slot].name}`, which is "
            f"{_look(tuple(value.shape), tuple(value.stride()), value.dtype)}",
        )


def _overwritten(
    program: Program,
    slots: Sequence[Any],
    classes: Sequence[int],
    nodes: Sequence[fx.Node],
    aliases: Aliases,
) -> Iterator[Finding]:
    """The source of a copy must not share memory with a target of the epilogue: the order would matter."""
    placeholders = [n for n in nodes if n.op == "placeholder"]
    actions = [a for a in program.epilogue if 0 <= a.input < len(classes)]
    touched = {classes[a.input] for a in actions if not isinstance(a, Set)}
    memory = {
        aliases.of(n): n for n, home in zip(placeholders, classes, strict=True) if home in touched
    }
    for action in actions:
        if isinstance(action, Copy) and 0 <= action.slot < len(slots):
            node = slots[action.slot]
            source = memory.get(aliases.of(node))
            if source is not None:
                yield (
                    node,
                    f"the epilogue copies `{node.name}` to input {action.input}, but it shares "
                    f"memory with `{source.name}`, which the epilogue changes: copy it first",
                )


def _guards(program: Program, nodes: Sequence[fx.Node], aliases: Aliases) -> Iterator[Finding]:
    slots = len(results(program.graph))
    for guard in program.value_guards:
        if not 0 <= guard.slot < slots:
            yield nodes[-1], f"a guard on a value names result {guard.slot} of {slots}"
    for each in program.guards:
        index = getattr(each, "input", None)
        if isinstance(index, int) and not 0 <= index < len(program.inputs):
            yield None, f"a {type(each).__name__} names input {index} of {len(program.inputs)}"


_CHECKS = (_metadata, _purity, _empty_reads, _waited, _outputs, _epilogue, _guards)
