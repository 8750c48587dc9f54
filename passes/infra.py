"""What a pass is, how passes are run on a program, and how one runs on a bare `GraphModule`.

    program = run(program, [ElideCopies(), Verify()])
    program.history            ("elide_copies: 12", "verify: 0")

    gm = on_graph_module(ElideCopies())(gm, example_inputs)     # the form of others' pass lists

A pass analyses first and mutates second, and refuses when it is unsure. It works on
`program.graph`, keeps every `node.meta` right (`set_value`), and leaves inputs, outputs and
epilogue meaning what they meant.

Invariant: the program that was given is untouched; what comes back holds every invariant of
`verify`.
Refusals: a pass at a stage that it does not accept; a graph without fake values.
"""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from functionalize._compat import FakeTensor, disable_current_modes, pytree
from functionalize.core.aliases import is_view, results, storage_key
from functionalize.core.collector import only_young_collections
from functionalize.core.dead_code import is_impure
from functionalize.core.fake_mode import fake_like, fake_mode
from functionalize.core.fakes import Fakes
from functionalize.core.inputs import Argument, InputSpec
from functionalize.core.metas import fake_input
from functionalize.core.ops import geometry_of, tensor_metadata
from functionalize.core.program import Program, Result
from functionalize.core.rules.resizes import RESIZE_STORAGE
from functionalize.core.sequence import Texts, sequences
from functionalize.errors import InvariantError, PassError, VerifyError

FUNCTIONAL, PARTITIONED, INPLACE = "FUNCTIONAL", "PARTITIONED", "INPLACE"
STAGES = (FUNCTIONAL, PARTITIONED, INPLACE)

GraphPass = Callable[..., fx.GraphModule]

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_AS_STRIDED = torch.ops.aten.as_strided.default
_CHAIN = 16  # as far as a pass looks up a chain of views: what is longer would cost quadratic time


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite of a program. The fields of a subclass are its options.

    name: as in pipelines and in the history. accepts: the stages it can run at. produces: the stage
    it leaves a program at that it rewrote (None: the one it found). changes_collectives: it may merge, split, drop or
    reorder them, so that ranks must run it alike.
    """

    name: ClassVar[str]
    accepts: ClassVar[tuple[str, ...]] = (FUNCTIONAL,)
    produces: ClassVar[str | None] = None
    changes_collectives: ClassVar[bool] = False

    @abstractmethod
    def apply(self, program: Program) -> int:
        """Rewrite `program` where it stands; the number of rewrites, 0 if it is untouched."""

    def __str__(self) -> str:
        """`name{option=value, ...}` with the options that differ from their defaults."""
        given = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        options = ", ".join(f"{n}={option_text(v)}" for n, v, default in given if v != default)
        return f"{self.name}{{{options}}}" if options else self.name


def option_text(value: Any) -> str:
    """The value of an option as a pipeline spells it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(option_text(v) for v in value)
    return str(value)


def run(program: Program, passes: Iterable[Pass] | str) -> Program:
    """A copy of `program` with every pass applied in order; `program` itself is untouched.

    passes: the passes, or a pipeline as text (`passes.pipeline.parse`).
    The program is verified before the first pass and after each one. Raises `PassError` for a pass
    at a stage it does not accept, `VerifyError` if `program` is broken, `InvariantError` if a pass
    broke it.
    """
    from passes.pipeline import parse  # which knows the passes, each of which knows this module

    passes = parse(passes) if isinstance(passes, str) else tuple(passes)
    _check_stages(program.stage, passes)
    program.describe()  # once for the program and all its copies
    with only_young_collections():  # what passes look up of a graph lives as long as they run
        return _run(program, passes)


def _run(program: Program, passes: Sequence[Pass]) -> Program:
    from passes.verify import check

    check(program)
    new = program.copy()
    issued = sequences(new.graph)
    for each in passes:
        count = each.apply(new)
        if count:
            new.stage = each.produces or new.stage
        try:
            new.graph.lint()
            check(new)
        except (RuntimeError, VerifyError) as error:
            raise InvariantError(f"`{each}` left a broken program: {error}") from error
        before, issued = issued, sequences(new.graph)
        if issued != before and not each.changes_collectives:
            raise InvariantError(f"`{each}` {_what_changed(before, issued)}")
        new.history = (*new.history, f"{each}: {count}")
    return new


def _what_changed(before: Mapping[str, Texts], now: Mapping[str, Texts]) -> str:
    """Where a pass changed the collectives that ranks rely on."""
    group = next(g for g in {**before, **now} if before.get(g) != now.get(g))
    was, texts = before.get(group, ()), now.get(group, ())
    at = next((i for i, (a, b) in enumerate(zip(was, texts, strict=False)) if a != b), None)
    at = min(len(was), len(texts)) if at is None else at
    a, b = (each[at] if at < len(each) else "nothing" for each in (was, texts))
    return (
        f"changed the collectives of process group {group!r} and does not say that it may "
        f"(`changes_collectives`): number {at + 1} was {a} and is {b}"
    )


def _check_stages(stage: str, passes: Sequence[Pass]) -> None:
    for i, each in enumerate(passes):
        if stage not in each.accepts:
            since = f", which `{passes[i - 1]}` leaves it at" if i else ""
            raise PassError(
                f"`{each}` accepts a program at stage {' or '.join(each.accepts)}, "
                f"this one is at {stage}{since}"
            )
        stage = each.produces or stage


# -- metadata --------------------------------------------------------------------------------------


def value_of(arg: Any) -> Any:
    """`arg` with the fake value in place of every node."""
    return fx.node.map_arg(arg, lambda n: n.meta["val"])


def set_value(node: fx.Node) -> None:
    """Fill `val` and `tensor_meta` of one node by running it on its arguments' fake values.

    One that is given no tensor (`full`) makes a fake one of the mode of the first in the graph.
    """
    args, kwargs = value_of(node.args), value_of(node.kwargs)
    others = (n.meta.get("val") for n in node.graph.nodes)
    near = itertools.chain([(args, kwargs)], others)
    leaves = itertools.chain.from_iterable(map(pytree.tree_leaves, near))
    mode = next((t.fake_mode for t in leaves if isinstance(t, FakeTensor)), nullcontext())
    target: Any = node.target
    with mode, torch.no_grad():
        value = target(*args, **kwargs)
    _describe(node, value)


def is_detached(node: fx.Node) -> bool:
    """Whether a view's fake value is not on its source's memory: `make_fx` on real tensors loses it."""
    if not is_view(node) and node.target is not _UNSAFE_VIEW:
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return storage_key(value) != storage_key(source)


def _describe(node: fx.Node, value: Any) -> None:
    node.meta["val"] = value
    if isinstance(value, Tensor):
        node.meta["tensor_meta"] = tensor_metadata(geometry_of(value))
    else:
        node.meta.pop("tensor_meta", None)


def revalue(graph: fx.Graph) -> None:
    """Make the fake values of views anew whose source is another node now; linear in nodes."""
    for node in graph.nodes:
        if is_detached(node):
            set_value(node)


# -- views -----------------------------------------------------------------------------------------


def viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view of, past the tuple that it may be a part of; None if it is no view."""
    if node.target is _UNSAFE_VIEW:  # whose schema denies it
        return node.all_input_nodes[0]
    if not is_view(node):
        return None
    source = node.all_input_nodes[0]
    return viewed(source) if node.target is operator.getitem else source


def chain(node: fx.Node, guarded: bool) -> Iterator[fx.Node]:
    """What a node is a view of, the nearest first, as far as its place there is known, at most 16 of them.

    guarded: whether inputs begin where their fake values do; else `as_strided`, which counts from the
    beginning of the storage, may find anything in an input.
    """
    absolute = False
    for _ in range(_CHAIN):
        absolute |= node.target is _AS_STRIDED and not guarded
        above = viewed(node)
        if above is None or (absolute and _may_be_lent(above)):
            return
        node = above
        yield node


def _may_be_lent(node: fx.Node) -> bool:
    """Whether a value is a view of an input or a constant, or of something too far away to tell."""
    for _ in range(_CHAIN):
        above = viewed(node)
        if above is None:
            return node.op != "call_function"
        node = above
    return True


def is_plain(node: fx.Node) -> bool:
    """Whether a value is a strided tensor of known sizes: comparing symbolic ones adds guards."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return all(type(n) is int for n in numbers)


def erase_unused(node: fx.Node) -> None:
    """Erase a node that nobody uses, and what was there for it alone; what is impure or writes stays."""
    dead, erased = [node], set[fx.Node]()
    while dead:
        node = dead.pop()
        if node in erased or node.users or node.op == "placeholder" or is_impure(node):
            continue
        above = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        dead += above


# -- graph modules ---------------------------------------------------------------------------------


def on_graph_module(each: Pass) -> GraphPass:
    """`each` as a function `(gm, example_inputs=None) -> gm` that rewrites `gm` itself and returns
    it.

    Every output counts as handed out, and every input may be an alias of every other one.
    """

    def rewrite(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> fx.GraphModule:
        if each.apply(program_of(gm, example_inputs)):
            gm.graph.lint()
            gm.recompile()
        return gm

    rewrite.__name__ = rewrite.__qualname__ = each.name
    return rewrite


def program_of(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> Program:
    """A `Program` around the graph of `gm` itself, not a copy of it; it has no guards.

    example_inputs: needed only where nodes have no `val` yet. Raises `PassError` if they are
    missing.
    """
    _fill_values(gm, example_inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    specs = tuple(_spec_of(i, node) for i, node in enumerate(placeholders))
    slots = results(gm.graph)
    return Program(
        graph=gm.graph,
        constants={str(n.target): None for n in gm.graph.find_nodes(op="get_attr")},
        inputs=specs,
        outputs=tuple(Result(i) for i, each in enumerate(slots) if isinstance(each, fx.Node)),
        epilogue=(),
        guards=(),
        value_guards=(),
        in_spec=None,
        out_spec=pytree.tree_structure(slots),
        _module=gm,
        _described=True,
    )


def _fill_values(gm: fx.GraphModule, example_inputs: Sequence[Any] | None) -> None:
    bare = [n for n in gm.graph.nodes if n.op != "output" and "val" not in n.meta]
    if bare:
        if example_inputs is None:
            raise PassError(
                f"`{bare[0].name}` has no fake value in its `meta['val']`, and a pass decides by "
                "size, stride and memory: give example_inputs"
            )
        known = [t for t in example_inputs if isinstance(t, FakeTensor)]
        mode = known[0].fake_mode if known else fake_mode(allow_non_fake_inputs=True)
        inputs = [
            fake_like(mode, x) if isinstance(x, Tensor) and not known else x for x in example_inputs
        ]
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    elif any(is_detached(node) for node in gm.graph.nodes):
        _refill_values(gm)
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and "tensor_meta" not in node.meta:
            _describe(node, value)


def _refill_values(gm: fx.GraphModule) -> None:
    """Make fake values that share memory as the graph does, from the geometry of its inputs."""
    fakes = Fakes()
    with disable_current_modes(), torch.no_grad():
        for i, node in enumerate(gm.graph.nodes):
            if node.op == "placeholder":
                _describe(node, fake_input(fakes, _spec_of(i, node)))
            elif node.op == "get_attr":
                _describe(node, fake_like(fakes.mode, getattr(gm, str(node.target))))
            elif node.op == "call_function" and node.target is not RESIZE_STORAGE:
                args, kwargs = value_of((node.args, node.kwargs))
                _describe(node, fakes.run(node.target, args, kwargs))


def _spec_of(index: int, node: fx.Node) -> InputSpec:
    value = node.meta.get("val")
    source = Argument(index)
    if not isinstance(value, Tensor):
        return InputSpec(str(node.target), value, 0, torch.device("cpu"), source)  # type: ignore[arg-type]
    nbytes = value.untyped_storage().nbytes()
    return InputSpec(str(node.target), geometry_of(value), nbytes, value.device, source)
