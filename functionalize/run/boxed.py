"""The default runner: straight-line Python made from the graph, each value freed after its last use.

    def run(inputs):
        a, b = inputs; inputs.clear()
        mul = op0(a, b); del a
        return (mul,)

Ops are called through torch's Python binding if there is one, else through their C++ handle, without the Python frame
of `OpOverload.__call__`; views whose geometry is known are made by one call of C++ (`windows.py`). At stage INPLACE it
is `run(inputs, commit)`, which calls its argument `commit` in the place of the graph's `commit`.
While a profiler runs, replays call code with ranges (`ranges.py`) and without windows; it is made when first needed.
`run(inputs)` is pure at stage FUNCTIONAL. `run.write(inputs, commit)`, where there is one, is what a replay calls: an
optimizer's op runs last and in place, and its results are None (`last_write.py`).
Invariant: nodes execute in graph order, that op apart; apart from the caller, only the local variables keep values
alive.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import fx

from functionalize._compat.bindings import binding_of
from functionalize._compat.dispatch import entry_of
from functionalize.analysis.aliases import written_nodes
from functionalize.analysis.last_write import LastWrite, in_order, last_write
from functionalize.ir.commit import Commit, commit, is_commit
from functionalize.ir.waits import WAIT
from functionalize.program.failed_messages import CODE, MESSAGES, message_text
from functionalize.program.gloo_waits import added_waits
from functionalize.program.program import Program
from functionalize.run.ranges import Path, in_ranges, path_of
from functionalize.run.windows import NO_WINDOWS, Foretold, ViewForm, Windows, windows, with_windows
from functionalize.templates.template import SymbolicInt

Runner = Callable[..., Sequence[Any]]
Arguments = Mapping[fx.Node, tuple[Any, Any]]  # positional ones, and those by keyword
_SLICE = torch.ops.aten.slice.Tensor
_RENAMED = frozenset({"self", "mat1", "mat2"})  # arguments that have another name in a binding


@dataclass(frozen=True, slots=True, eq=False)
class BoxedCall:
    """A target that gets its arguments in one list and empties it, so that it can free each after its last use."""

    code: Callable[[list[Any]], Sequence[Any]]

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return self.code(list(inputs))


@dataclass(slots=True, eq=False)
class WritingRunner:
    """The code of a graph with a `LastWrite`."""

    code: Runner
    with_ranges: CodeWithRanges | None = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self.code(inputs, None)

    def write(self, inputs: list[Any], commit: Commit) -> Sequence[Any]:
        """The results, with the op in place after `commit`."""
        return self.code(inputs, commit)


@dataclass(slots=True, eq=False)
class CodeWithRanges:
    """The same code with ranges for a profiler, made at the first call. graph: that of a program, or of its regions."""

    graph: fx.Graph
    code: Runner | None = None

    def __call__(self, program: Program) -> Runner:
        if self.code is None:
            program.describe()
            self.code = _compiled(replace(program, graph=self.graph, _run=None), has_ranges=True)
        return self.code


class LateLines(Protocol):
    """Code that computes integers while the graph runs, of the sizes of results: `late_sizes/late_instances.py`."""

    def begin(self) -> Sequence[str]:
        """Lines before the first op."""
        ...

    def after(self, node: fx.Node, name: str) -> Sequence[str]:
        """Lines after an op, whose result is called `name`."""
        ...

    def call(self, node: fx.Node, call: str, name: Callable[[fx.Node], str]) -> str:
        """The expression that calls an op. name: of each value."""
        ...

    def check(self, number: SymbolicInt) -> None:
        """Raise `TypeError` if an integer is needed before it is known."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class BoxedTemplate:
    """The code of a graph with symbols (`SymbolicInt`) in the places of integers: compiled once, for all values.

    make: from the integers to the code. bases: what is foretold of the tensor of each window, with symbols.
    """

    make: Callable[..., Runner]
    names: tuple[str, ...]
    bases: tuple[Foretold, ...]
    has_last_write: bool

    @staticmethod
    def of(
        program: Program,
        arguments: Arguments,
        names: Sequence[str],
        views: Windows,
        late: LateLines | None = None,
    ) -> BoxedTemplate:
        """arguments: of the nodes, with symbols. names: of those whose values `at` takes. views: the windows of the
        program, with symbols. late: computes the other symbols.

        Raises `TypeError` if a symbol is in an argument of another type than lists, tuples and slices.
        """
        make, bases, last = _code(program, False, views, tuple(names), arguments, late)
        return BoxedTemplate(make, tuple(names), tuple(bases), last)

    def at(self, values: Sequence[Any], with_ranges: Any) -> Runner:
        """The code for these values, one for each name."""
        run: Any = self.make(*values)
        if self.bases:
            known = dict(zip(self.names, values, strict=True))
            run = with_windows(run, lambda: [_known(form, known) for form in self.bases])
        run = WritingRunner(run) if self.has_last_write else run
        run.with_ranges = with_ranges
        return run


def _known(form: Foretold, values: Mapping[str, int]) -> Foretold:
    size, stride = (
        tuple([values[repr(n)] if type(n) is SymbolicInt else n for n in several])
        for several in (form.size, form.stride)
    )
    return form._replace(size=size, stride=stride)


def boxed(program: Program) -> Runner:
    """A function from the list of inputs (emptied by the call) to the tuple of results."""
    run: Any = _compiled(program)
    run.with_ranges = CodeWithRanges(program.graph)
    return run


def _compiled(program: Program, has_ranges: bool = False) -> Runner:
    views = NO_WINDOWS if has_ranges else windows(program)
    make, bases, has_last_write = _code(program, has_ranges, views)
    run = in_ranges(make()) if has_ranges else make()
    if bases:
        run = with_windows(run, lambda: bases)
    return WritingRunner(run) if has_last_write else run


def _code(
    program: Program,
    has_ranges: bool,
    views: Windows,
    symbols: Sequence[str] = (),
    arguments: Arguments = MappingProxyType({}),
    late: LateLines | None = None,
) -> tuple[Callable[..., Runner], list[Foretold], bool]:
    """A function from the values of the symbols to the code, the bases of its windows, whether its last op writes.

    arguments: of nodes, with symbols. late: see `BoxedTemplate.of`.
    """
    namespace: dict[str, Any] = {}
    names: dict[fx.Node, str] = {}
    handles: dict[Any, str] = {commit: "commit"}
    last = last_write(program)
    nodes = in_order(program.graph, last)
    tail: frozenset[fx.Node] = frozenset(last.tail) if last is not None else frozenset()
    takes_commit = last is not None or program.stage == "INPLACE"
    takes = {"move": has_ranges, "inputs": True, "commit": takes_commit, "window": views.made}
    lines = [f"def run({', '.join(name for name, is_taken in takes.items() if is_taken)}):"]
    waits = added_waits(nodes)
    last_use = _last_uses(nodes, waits, views)
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last_use.items():
        dying.setdefault(user, []).append(node)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    for i, node in enumerate(nodes):
        names[node] = f"v{i}"
    if placeholders:
        lines.append(f"    {', '.join(names[n] for n in placeholders)}, = inputs")
    lines.append("    inputs.clear()")
    lines += [f"    {line}" for line in late.begin()] if late is not None else []

    def text(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return names[arg]
        if isinstance(arg, (list, tuple)) and type(arg).__name__ != "Size":
            inner = ", ".join(text(a) for a in arg)
            if isinstance(arg, list):
                return f"[{inner}]"
            return f"({inner},)" if arg else "()"
        if late is not None and type(arg) is SymbolicInt:
            late.check(arg)
        if arg is None or type(arg) in (bool, int, str, SymbolicInt):
            return repr(arg)
        if isinstance(arg, slice):
            return f"slice({text(arg.start)}, {text(arg.stop)}, {text(arg.step)})"
        if symbols and isinstance(arg, dict):
            raise TypeError("an argument of a type that may hold sizes")
        return _bind(namespace, "k", arg)

    def handle_of(target: Any) -> str:
        if target not in handles:
            handles[target] = _bind(namespace, "op", entry_of(target))
        return handles[target]

    def arguments_of(node: fx.Node) -> list[str]:
        args, kwargs = arguments.get(node) or (node.args, node.kwargs)
        return [*map(text, args), *(f"{k}={text(v)}" for k, v in kwargs.items())]

    def call_of(node: fx.Node) -> str:
        binding = binding_of(node.target)
        if binding is None or not _fits_binding(node):
            return handle_of(node.target)
        if binding not in handles:
            handles[binding] = _bind(namespace, "op", binding)
        return handles[binding]

    def last_lines(last: LastWrite) -> Iterator[str]:
        write = _bind(namespace, "op", entry_of(last.target))
        for started in waits.pop(nodes[-1], ()):
            yield from _wait(names[started], started, handle_of(WAIT))
        passed = ", ".join(arguments_of(last.node))
        yield "    if commit is None:"
        yield f"        {names[last.node]} = {handle_of(last.node.target)}({passed})"
        for part in last.parts:
            yield f"        {names[part]} = {names[part.all_input_nodes[0]]}[{text(part.args[1])}]"
        yield "    else:"
        yield f"        commit({', '.join(map(text, last.guarded))})"
        yield f"        {write}({passed})"
        yield f"        {' = '.join(names[part] for part in last.parts)} = None"

    path: Path = ()
    bases: list[Foretold] = []
    messages: dict[int, str] = {}

    def note_line(of: fx.Node) -> None:
        """The next line starts a message, or waits for it. The first one of `whole` comes before these."""
        if of.op == "call_function" and (message := message_text(of)) is not None:
            messages[len(lines) + 2] = message

    for node in nodes:
        if has_ranges and path != (path := path_of(node, path)):
            lines.append(f"    move({_bind(namespace, 'k', path)})")
        if last is not None and node in tail:
            lines += last_lines(last) if node is last.node else ()
            continue
        for started in waits.get(node, ()):
            note_line(started)
            lines += _wait(names[started], started, handle_of(WAIT))
        if node in views.skipped:
            continue
        note_line(node)
        silent = not node.users and _is_effect(node)
        if node in views.made:
            bases.append(Foretold.of(views.forms[views.made[node].of]))
            lines.append(f"    {names[node]} = window({_arguments(names, views.made[node])})")
        elif node.op == "call_function":
            handle = call_of(node)
            parts = arguments_of(node)
            if isinstance(node.target, BoxedCall):
                ending = [names[n] for n in dying.pop(node, [])]
                lines += [
                    f"    args = {parts[0]}",
                    *([f"    del {', '.join(ending)}"] if ending else []),
                ]
                parts, handles[node.target] = ["args"], _bind(namespace, "op", node.target.code)
                handle = handles[node.target]
            kept = "" if silent else f"{names[node]} = "
            value = _item(node, parts) or f"{handle}({', '.join(parts)})"
            if late is not None:
                value = late.call(node, value, names.__getitem__)
            lines.append(f"    {kept}{value}")
            if late is not None:
                lines += [f"    {line}" for line in late.after(node, names[node])]
        elif node.op == "get_attr":
            constant = _bind(namespace, "c", program.constants[str(node.target)])
            lines.append(f"    {names[node]} = {constant}")
        elif node.op == "output":
            returned: Any = node.args[0]
            lines.append(f"    return {text(tuple(returned))}")
            break
        dead = dying.get(node, []) + ([node] if node not in last_use and not silent else [])
        if dead:
            lines.append(f"    del {', '.join(names[n] for n in dead)}")
    body = "\n".join(f"    {line}" for line in lines)
    whole = f"def make({', '.join(symbols)}):\n{body}\n    return run"
    namespace[MESSAGES] = messages
    exec(compile(whole, CODE, "exec"), namespace)
    return namespace["make"], bases, last is not None


def _arguments(names: Mapping[fx.Node, str], form: ViewForm) -> str:
    return f"{names[form.of]}, {form.size}, {form.stride}, {form.offset}"


def _fits_binding(node: fx.Node) -> bool:
    """Whether a binding may be called in place of an op.

    Its names differ, it returns tuples for lists, and it keeps the tensor that it makes of a number beyond the op.
    """
    schema = node.target._schema  # type: ignore[union-attr]
    lists = any(str(each.type).startswith("List") for each in schema.returns)
    parts_only = all(user.target is operator.getitem for user in node.users)
    has_number = any(
        isinstance(value, (int, float)) and str(declared.type) == "Tensor"
        for value, declared in zip(node.args, schema.arguments, strict=False)
    )
    fits = bool(node.args) and not has_number and not node.kwargs.keys() & _RENAMED
    return fits and (parts_only or not lists)


def _item(node: fx.Node, parts: Sequence[str]) -> str | None:
    """`x[i]` for a part of a tuple, `x[a:b]` for a part of a tensor along its first dimension; None for other calls."""
    if node.target is operator.getitem:
        return f"{parts[0]}[{parts[1]}]"
    if node.target is _SLICE and not node.kwargs and len(parts) == 4 and node.args[1] == 0:
        return f"{parts[0]}[{parts[2]}:{parts[3]}]"
    return None


def _is_effect(node: fx.Node) -> bool:
    """Whether a node is called for its side effect: a write or the commit."""
    return is_commit(node) or (node.op == "call_function" and bool(written_nodes(node)))


def _bind(namespace: dict[str, Any], prefix: str, value: Any) -> str:
    name = f"{prefix}{len(namespace)}"
    namespace[name] = value
    return name


def _wait(name: str, started: fx.Node, wait: str) -> list[str]:
    """Code that waits for a collective whose result is called `name`."""
    if isinstance(started.meta.get("val"), (list, tuple)):
        return [f"    for part in {name}: {wait}(part)"]
    return [f"    {wait}({name})"]


def _last_uses(
    nodes: Sequence[fx.Node], waits: Mapping[fx.Node, Sequence[fx.Node]], views: Windows
) -> dict[fx.Node, fx.Node]:
    """The node after which each value is freed. waits: for a node, the collectives to wait for before it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for used in (*views.read(node), *waits.get(node, ())):
            last[used] = node
    return last
