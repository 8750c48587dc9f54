"""`Executable`: a pure graph, the sources of its inputs, the roles of its outputs, and its replay.

    inputs ──sources──▶ guards ──▶ graph ──▶ value guards ──▶ epilogue ──▶ outputs

At stage INPLACE the value guards are checked in the middle of the graph, and the ops after them may write inputs: see
`ir/commit.py`.

Autograd compares the version counters of what a replay writes with those of what graphs of eager have saved. Such a
graph may be older than the replay, and go backward after it. A counter that eager leaves (the statistics of batch norm,
writes to `.data`) would make its backward fail, one that eager raises and a replay does not would let it compute with
other values, without a word. So a replay leaves and raises the counters that eager leaves and raises, also those of
wrapper subclasses, whose inner tensors were written.

Invariant: no tensor of the caller is changed before the last guard has passed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from functionalize._compat.autograd import KeptVersions, below_autograd
from functionalize._compat.bindings import without_function_modes
from functionalize._compat.dispatch import is_profiling
from functionalize._compat.graphs import pytree
from functionalize.errors import GuardError
from functionalize.ir.commit import Commit, commit
from functionalize.ir.epilogue import Action, apply_epilogue, whole_copies
from functionalize.ir.fakes import Fakes
from functionalize.ir.generators import generators_restored_on_error, is_random
from functionalize.ir.guards import Guard, Miss, NanGuard, TensorGuard, ValueGuard, first_failure
from functionalize.ir.inputs import Call, InputSpec
from functionalize.ir.outputs import OutputBuilder, OutputRole, SourceItself, viewed_by
from functionalize.program.failed_messages import note_message
from functionalize.program.gloo_waits import added_waits
from functionalize.program.known_inputs import KnownInputs
from functionalize.program.metadata import Values, evaluate, read_provenance, tensors_of
from functionalize.repeats import Repeats
from functionalize.tape.notes import TapeNotes
from functionalize.tape.ownership import OpPlaces, ownership_of
from functionalize.tape.tape import RecordedBackward
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.structure import flatten, paths, rebuilder, sketch

_ADVICE = ". Nothing was changed: trace again for arguments like these"


class Vote(Protocol):
    """The agreement of ranks on whether to commit, see `step/vote.py`."""

    def any_failed(self, failure: str | None) -> bool:
        """Whether any rank calls this with a failure. A collective: every rank calls it."""
        ...


@dataclass(eq=False, repr=False)
class Executable:
    """A captured callable as data that can be replayed; `Program` adds text, lowering and files.

    constants: tensors that the graph reads by `get_attr`, by name.
    inputs: one per placeholder of the graph.
    outputs: one role per leaf of `out_spec`.
    epilogue: the mutations of inputs that the caller must still see at exit, in order.
    facts: guards that read no input, checked before inputs are resolved.
    guards: guards on inputs, checked before the graph runs.
    value_guards: guards on values that the graph computes, checked before anything is written.
    stage: FUNCTIONAL, PARTITIONED or INPLACE.
    history: the rewrites of each pass, as `name{options}: rewrites`.
    writes: the inputs that ops of the graph write, all after its `commit`; only at stage INPLACE.
    runner: compiles the program for replays; None: it is interpreted.
    backwards: the backwards of the recording; `notes`: what they are made of, until the program is described.
    """

    graph: fx.Graph
    constants: dict[str, Any]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputRole, ...]
    epilogue: tuple[Action, ...]
    guards: tuple[Guard, ...]
    value_guards: tuple[ValueGuard, ...]
    in_spec: pytree.TreeSpec | None
    out_spec: pytree.TreeSpec
    facts: tuple[Guard, ...] = ()
    stage: str = "FUNCTIONAL"
    history: tuple[str, ...] = ()
    writes: tuple[int, ...] = ()
    runner: Callable[[Any], Callable[..., Sequence[Any]]] | None = None
    backwards: tuple[RecordedBackward, ...] = ()
    notes: TapeNotes | None = field(default=None, repr=False)
    _module: fx.GraphModule | None = field(default=None, repr=False)
    _values: Values | None = field(default=None, repr=False)
    _described: bool = field(default=False, repr=False)
    _run: Callable[..., Sequence[Any]] | None = field(default=None, repr=False)
    _random: bool = field(default=True, repr=False)
    _versions: _Versions = field(default_factory=lambda: _Versions(()), init=False, repr=False)
    _builder: OutputBuilder | None = field(default=None, init=False, repr=False)
    _rebuild: Callable[[list[Any]], Any] | None = field(default=None, init=False, repr=False)
    _repeats: Repeats | None = field(default=None, init=False, repr=False)
    _whole_copies: tuple[Any, frozenset[int]] = field(
        default=(None, frozenset()), init=False, repr=False
    )
    _looked_slowly: bool = field(default=False, init=False, repr=False)
    _known: KnownInputs = field(default_factory=KnownInputs, init=False, repr=False)

    def __repr__(self) -> str:
        # Guards hold tensors whose storages FSDP2 has emptied: the text of one reads freed memory.
        ops = sum(node.op == "call_function" for node in self.graph.nodes)
        return f"<{type(self).__name__}: {ops} ops, {len(self.inputs)} inputs, {len(self.outputs)} outputs>"

    @property
    def graph_module(self) -> fx.GraphModule:
        """The pure graph, described; built on first access."""
        if self._module is None:
            self.describe()
            self._module = _module_of(self)
        return self._module

    @graph_module.setter
    def graph_module(self, module: fx.GraphModule) -> None:
        self._module, self.graph, self._run = module, module.graph, None

    def describe(self) -> None:
        """Fill every `node.meta`: `val`, `tensor_meta`, `phase`; `stack_trace`, `seq_nr` where recorded.

        Done once, and only on demand: symbolising stacks and making fake values costs as much as the capture.
        """
        if not self._described:
            with only_young_collections():  # what is made here lives as long as the program
                self._evaluate(ownership_of).finish()
                read_provenance(self.graph)
                self._described = True
                self.resolve_notes()

    def evaluate(self) -> None:
        """Fill the part of every `node.meta` that figures are computed from: values, phases and modules."""
        if not self._described:
            self.evaluate_for_costs()
            self._evaluate(OpPlaces).finish()

    def evaluate_for_costs(self) -> None:
        """The same, but of a block that is like another one only the values that nodes outside of it read."""
        if not self._described:
            self._evaluate(OpPlaces)
            if self.notes is not None:
                self.notes.resolved = None  # the records of a plan keep the notes alive

    @property
    def fakes(self) -> Fakes | None:
        """What made the values of the nodes; None of a graph that had values."""
        return None if self._values is None else self._values.fakes

    def _evaluate(self, places: Callable[[TapeNotes], Any]) -> Values:
        if self._values is None:
            self._values = evaluate(self, places)
        return self._values

    @property
    def repeats(self) -> Repeats:
        """The repeating blocks of the graph. Nodes that a changed graph keeps have their values by then."""
        if self._repeats is None or not self._repeats.are_of(self.graph):
            if self._values is not None:
                self._values.finish()
            self._repeats = Repeats(self.graph)
        return self._repeats

    def resolve_notes(self) -> None:
        """Make `backwards` of the notes of the recording, and drop these."""
        if self.notes is not None:
            self.backwards = ownership_of(self.notes).backwards()
            self.notes.resolved = None  # the records of a plan keep the notes alive
            self.notes = None

    def nodes(self) -> int:
        """Ops in the graph, without placeholders and the output."""
        return [n.op for n in self.graph.nodes].count("call_function")

    @property
    def output_names(self) -> tuple[str, ...]:
        """The path of each output in the callable's result: `out`, `out[0]`, `out['loss']`."""
        return tuple(f"out{pytree.keystr(path)}" for path in paths(self.out_spec))

    # -- replay ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay: outputs as the callable returns them, inputs mutated as it would.

        Runs below autograd: outputs have no `grad_fn` (use `aot_function` for gradients). Raises
        `GuardError`, with nothing changed, if the arguments differ from what was captured.
        """
        leaves, spec = flatten((args, kwargs))
        if self.in_spec is not None and spec != self.in_spec:
            was = tree_text(self.in_spec)
            raise GuardError(f"the arguments are {tree_text(spec)}, were {was}{_ADVICE}")
        resolved = self.resolve(leaves)
        if isinstance(resolved, str):
            raise GuardError(resolved + _ADVICE)
        return self.replay(resolved)

    def resolve(self, leaves: Sequence[Any]) -> Call | str:
        """The inputs of this call, or the message of the first guard that fails. Changes nothing."""
        known = self.known(leaves)
        return known if known is not None else self.resolve_anew(leaves)

    def known(self, leaves: Sequence[Any], asks_numbers_first: bool = False) -> Call | Miss | None:
        """The same in a fraction of the time, for what the last calls have shown; None: every guard must be asked.

        asks_numbers_first: whether the number by which the program was missed last is asked before all else; a miss
        says nothing of the other guards then.
        """
        return self._known.call(leaves, asks_numbers_first)

    def resolve_anew(self, leaves: Sequence[Any]) -> Call | str:
        """The same by asking every guard; what is found is known from then on."""
        call, failure = self.ask(leaves)
        if isinstance(failure, Miss) or failure is None:
            self._known.learn(self, call)
        return call if failure is None else failure

    def forget_inputs(self) -> None:
        """Release what is known of the last calls: another program is replayed from now on."""
        self._known = KnownInputs()

    def resolve_slowly(self, leaves: Sequence[Any]) -> Call | str:
        """The same by asking every guard and every source."""
        call, failure = self.ask(leaves)
        return call if failure is None else failure

    @property
    def looked_slowly(self) -> bool:
        """Whether the last `ask` came to a guard that takes as long as a small step."""
        return self._looked_slowly

    def ask(self, leaves: Sequence[Any]) -> tuple[Call, str | None]:
        """Ask every guard and every source: the call, and why it is not covered.

        A miss is of a number: all guards that are not on numbers hold then, and the inputs are found.
        """
        call, missed = Call(leaves, []), None
        self._looked_slowly = False
        for fact in self.facts:
            self._looked_slowly |= getattr(fact, "is_slow", False)
            try:
                failure = fact.failure(call)
            except (LookupError, AttributeError) as error:
                failure = f"something is not where it was: {error}"
            if isinstance(failure, Miss):
                missed = missed or failure
            elif failure is not None:
                return call, failure
        for spec in self.inputs:
            try:
                call.inputs.append(spec.source.resolve(call))
            except (LookupError, AttributeError, RuntimeError) as error:
                return call, f"`{spec.name}` is not where it was: {error}"
        for guard in self.guards:
            failure = guard.failure(call)
            if isinstance(failure, Miss):
                missed = missed or failure
            elif failure is not None:
                return call, failure
        for i, role in enumerate(self.outputs):
            if isinstance(role, SourceItself) and (failure := role.failure(call)) is not None:
                return call, f"the tensor that is returned as output {i} {failure}"
        return call, missed

    def replay(
        self,
        call: Call,
        vote: Vote | None = None,
        change: Callable[[list[Any]], None] | None = None,
    ) -> Any:
        """Run the graph on resolved inputs, then the epilogue; raises `GuardError` before the latter.

        vote: the agreement with other ranks on whether a guard failed. change: puts other leaves in the list of them.
        Any other exception of an op is propagated, with nothing changed: `may_run_again`. The epilogue allocates
        first and then copies: an interruption after that (Ctrl-C, a broken device) leaves the step half done, as it
        would in eager; so does one after the `commit` of a graph at stage INPLACE.
        """
        self.prepare()
        with torch.no_grad(), self._versions.kept(call.inputs):
            with generators_restored_on_error() if self._random else nullcontext():
                results = self.results(call, vote, writes=True)
                call.committed = True
                homes = apply_epilogue(self.epilogue, call.inputs, results, self._whole())
                self._versions.raise_around(call)
            if self._builder is None or self._builder.roles is not self.outputs:
                self._builder = OutputBuilder(self.outputs)
                self._rebuild = rebuilder(self.out_spec)
            assert self._rebuild is not None
            outs = self._builder.build(call, homes, results)
        if change is not None:
            change(outs)
        return self._rebuild(outs)

    def _whole(self) -> frozenset[int]:
        """The copies of the epilogue into all of an input, by the geometries that guards compare."""
        of = self._whole_copies[0]
        if of is None or of[0] is not self.epilogue or of[1] is not self.guards:
            compared = (g for g in self.guards if isinstance(g, TensorGuard))
            found = whole_copies(self.epilogue, {g.input: g.spec.geometry for g in compared})
            self._whole_copies = (self.epilogue, self.guards), found
        return self._whole_copies[1]

    def results(self, call: Call, vote: Vote | None, writes: bool = False) -> Sequence[Any]:
        """The graph's results, after the guards on numbers; before the epilogue.

        writes: whether the last op may write inputs in place; its results are None. At stage FUNCTIONAL nothing is
        written otherwise, nor if this raises.
        """
        call.committed = is_checked = False

        def check(*values: Any) -> None:
            nonlocal is_checked
            self._check(values, vote)
            is_checked, call.committed = True, self.stage == "INPLACE"

        try:
            with below_autograd(), without_function_modes():
                results = self.run(call.take_inputs(), check, writes)
        except ArithmeticError as error:  # of Python: the user's code may catch it
            if not self.may_run_again(call):
                raise
            raise GuardError(f"a number cannot be computed: {error}") from None
        if not is_checked:
            self._check([results[guard.slot] for guard in self.value_guards], vote)
        return results

    def read_by_graph_only(self) -> list[int]:
        """The inputs that neither an output, nor the epilogue, nor a write of the graph needs."""
        needed = {n for each in self.epilogue for n in (each.input, getattr(each, "other", None))}
        needed |= {i for role in self.outputs for i in viewed_by(role)} | set(self.writes)
        return [i for i in range(len(self.inputs)) if i not in needed]

    def may_run_again(self, call: Call) -> bool:
        """Whether the step may run eagerly in place of a replay that an exception ended: it has changed nothing.

        With collectives it may not: the other ranks have passed them.
        """
        return not call.committed and not any(
            getattr(n.target, "namespace", "") == "_c10d_functional" for n in self.graph.nodes
        )

    def _check(self, values: Sequence[Any], vote: Vote | None) -> None:
        """Raise `GuardError` unless every value guard holds, on every rank. values: one for each."""
        failed = first_failure(self.value_guards, values)
        failure = failed[1] if failed is not None else None
        if failed is not None and isinstance(failed[0], NanGuard):
            failed[0].report()
        if vote is not None and vote.any_failed(failure):
            failure = failure or "a number that Python reads differs on another rank"
        if failure is not None:
            raise GuardError(failure)

    def run(self, inputs: list[Any], check: Commit = commit, writes: bool = False) -> Sequence[Any]:
        """The graph's results for these inputs; empties the list.

        check: called with the guarded values before an input is written. writes: see `results`.
        """
        run = self.prepare()
        write: Callable[..., Sequence[Any]] | None = getattr(run, "write", None)
        try:
            if self.stage == "INPLACE":
                return run(inputs, check)
            return write(inputs, check) if writes and write is not None else run(inputs)
        except RuntimeError as error:
            note_message(error)
            raise

    def prepare(self) -> Callable[..., Sequence[Any]]:
        """Compile the program by its runner, which otherwise happens at the first replay; may raise `CompileError`.

        Returns what runs the graph: while a profiler runs, code with ranges, if the runner has such.
        """
        if self._run is None:
            self._random = any(is_random(n) for n in self.graph.nodes)
            self._versions = _Versions(self.inputs)
            self._run = self.runner(self) if self.runner else self._interpreted
        if is_profiling() and (with_ranges := getattr(self._run, "with_ranges", None)) is not None:
            found: Callable[..., Sequence[Any]] = with_ranges(self)
            return found
        return self._run

    def _interpreted(self, inputs: list[Any], check: Commit = commit) -> Sequence[Any]:
        result: Sequence[Any] = _Interpreter(self.graph_module, check).run(*inputs)
        return result


def _module_of(program: Executable) -> fx.GraphModule:
    root = torch.nn.Module()
    for name, value in program.constants.items():
        root.register_buffer(name, value)
    return fx.GraphModule(root, program.graph, "Program")


def tree_text(spec: pytree.TreeSpec) -> str:
    """The arguments' structure, `*` for each leaf."""
    args, kwargs = sketch(spec)
    parts = [*map(str, args), *(f"{k}={v}" for k, v in kwargs.items())]
    return f"({', '.join(parts)})".replace("'*'", "*")


class _Interpreter(fx.Interpreter):
    """Runs a graph node by node, where no runner was chosen. check: what runs where the graph commits.

    Collectives of one gloo group run one at a time (see `gloo_waits.py`).
    """

    def __init__(self, module: fx.GraphModule, check: Commit) -> None:
        super().__init__(module)
        self._check = check
        self._waits = added_waits(self.graph.nodes)
        self._pending = {n: None for nodes in self._waits.values() for n in nodes}

    def run_node(self, n: fx.Node) -> Any:
        for started in self._waits.get(n, ()):
            for part in tensors_of(self._pending.pop(started)):
                torch.ops._c10d_functional.wait_tensor.default(part)
        value = super().run_node(n)
        if n in self._pending:
            self._pending[n] = value
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(self._check if target is commit else target, args, kwargs)


# -- version counters ------------------------------------------------------------------------------

_NOTHING = nullcontext()


class _Versions:
    """What replays of one program do to version counters. It holds no tensor.

    around: for each input with a tensor around it, its index, its source, what finds that tensor where it was looked up
    last, and the name by which that holds the input.
    """

    def __init__(self, inputs: Sequence[InputSpec]) -> None:
        self._kept = [i for i, spec in enumerate(inputs) if spec.version == "kept"]
        self._around: list[tuple[int, Any, Any, str]] = [
            (i, spec.source, _gone, spec.source.attribute)  # type: ignore[attr-defined]
            for i, spec in enumerate(inputs)
            if spec.version == "raised around"
        ]

    def kept(self, inputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """A context in which writes leave the counters that eager leaves."""
        return KeptVersions([inputs[i] for i in self._kept]) if self._kept else _NOTHING

    def raise_around(self, call: Call) -> None:
        """Raise the counters of the tensors around inputs, as writes by their own ops do."""
        if not self._around:
            return
        found: list[Tensor] = []
        for at, (index, source, known, name) in enumerate(self._around):
            outer = known()
            if getattr(outer, name, None) is not call.inputs[index]:
                outer = source.of.resolve(call)
                self._around[at] = index, source, _finder(source.of, outer), name
            found.append(outer)
        torch.autograd.graph.increment_version(found)


def _finder(source: Any, found: Tensor) -> Callable[[], Any]:
    """What finds a tensor again: no weak reference to a parameter, which torch could not swap then."""
    table = getattr(source, "entries", None)
    return weakref.ref(found) if table is None else functools.partial(table.get, source.name)


def _gone() -> None:
    return None
