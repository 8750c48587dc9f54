"""`Executable`: a pure graph, where its inputs come from, where its outputs go, and how a replay runs it.

    inputs ──sources──▶ guards ──▶ graph ──▶ value guards ──▶ epilogue ──▶ outputs

At stage INPLACE the value guards are checked in the middle of the graph, and what follows may write inputs: see
`commit.py`.

Invariant: nothing of the caller's is changed before the last guard has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from functionalize._compat.autograd import below_autograd
from functionalize._compat.graphs import pytree
from functionalize.errors import GuardError
from functionalize.ir.commit import Commit, commit
from functionalize.ir.epilogue import Action, apply_epilogue
from functionalize.ir.generators import generators_restored_on_error, is_random
from functionalize.ir.guards import Guard, ValueGuard
from functionalize.ir.inputs import Call, InputSpec
from functionalize.ir.outputs import OutputRole, SameAs, output_of
from functionalize.program.interpreter import Interpreter
from functionalize.program.metadata import annotate
from functionalize.util.structure import flatten, paths, sketch

_ADVICE = ". Nothing was changed: trace again for arguments like these"


class Vote(Protocol):
    """How the ranks agree, see `step/vote.py`."""

    def any_failed(self, failed: bool) -> bool:
        """Whether any rank says so."""
        ...


@dataclass(eq=False)
class Executable:
    """A captured callable as data, with what it takes to replay it; `Program` adds text, lowering and files.

    inputs: one per placeholder of the graph. outputs: one role per leaf of `out_spec`. epilogue: what the
    caller still sees, in order. facts: guards that look at no input, checked before inputs are found.
    history: what each pass did, as `name{options}: rewrites`. writes: the inputs that ops of the graph write,
    all of them after its `commit`; it has one at stage INPLACE only.
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
    _module: fx.GraphModule | None = field(default=None, repr=False)
    _described: bool = field(default=False, repr=False)
    _run: Callable[..., Sequence[Any]] | None = field(default=None, repr=False)
    _random: bool = field(default=True, repr=False)

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
        """Fill every `node.meta`: `val`, `tensor_meta`, `phase`; `stack_trace`, `seq_nr` where known.

        Done once, when somebody first needs it: symbolising stacks and making fake values costs as much as the capture.
        """
        if not self._described:
            annotate(self)
            self._described = True

    def nodes(self) -> int:
        """Ops in the graph, without placeholders and the output."""
        return sum(n.op == "call_function" for n in self.graph.nodes)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Where in what the callable returns each output is: `out`, `out[0]`, `out['loss']`."""
        return tuple(f"out{pytree.keystr(path)}" for path in paths(self.out_spec))

    # -- replay ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay: outputs as the callable returns them, inputs mutated as it would.

        Runs below autograd: outputs carry no history (use `aot_function` for gradients). Raises
        `GuardError`, with nothing changed, if the arguments are not what the capture saw.
        """
        leaves, spec = flatten((args, kwargs))
        if self.in_spec is not None and spec != self.in_spec:
            was = tree_text(self.in_spec)
            raise GuardError(f"the arguments are {tree_text(spec)}, were {was}{_ADVICE}")
        failed = self.resolve(leaves)
        if isinstance(failed, str):
            raise GuardError(failed + _ADVICE)
        return self.replay(failed)

    def resolve(self, leaves: Sequence[Any]) -> Call | str:
        """The inputs now, or the first guard's failure. Changes nothing."""
        call = Call(leaves, [])
        for fact in self.facts:
            try:
                failure = fact.failure(call)
            except (LookupError, AttributeError) as error:
                failure = f"something is not where it was: {error}"
            if failure is not None:
                return failure
        for spec in self.inputs:
            try:
                call.inputs.append(spec.source.resolve(call))
            except (LookupError, AttributeError, RuntimeError) as error:
                return f"`{spec.name}` is not where it was: {error}"
        for guard in self.guards:
            failure = guard.failure(call)
            if failure is not None:
                return failure
        return call

    def replay(self, call: Call, vote: Vote | None = None) -> Any:
        """Run the graph on resolved inputs, then the epilogue; raises `GuardError` before the latter.

        vote: asks the other ranks whether a guard failed there.
        Whatever else an op raises passes through, with nothing changed. The epilogue allocates first and then
        copies: what ends it after that (Ctrl-C, a broken device) leaves the step half done, as it would eager;
        and so does what ends a graph at stage INPLACE after its `commit`.
        """
        self.prepare()
        with torch.no_grad():
            with generators_restored_on_error() if self._random else nullcontext():
                results = self._results(call, vote)
                homes = apply_epilogue(self.epilogue, call.inputs, results)
            outs: list[Any] = []
            given: set[int] = set()
            for role in self.outputs:
                if isinstance(role, SameAs):
                    outs.append(outs[role.output])
                else:
                    outs.append(output_of(role, call, homes, results, given))
        return pytree.tree_unflatten(outs, self.out_spec)

    def _results(self, call: Call, vote: Vote | None) -> Sequence[Any]:
        committed = False

        def check(*values: Any) -> None:
            nonlocal committed
            self._check(values, vote)
            committed = True

        try:
            with below_autograd():
                results = self.run(list(call.inputs), check)
        except ArithmeticError as error:  # Python's, of numbers: eager may be ready for it
            if committed or any(
                getattr(n.target, "namespace", "") == "_c10d_functional" for n in self.graph.nodes
            ):
                raise  # the other ranks are past the collectives that eager would issue again
            raise GuardError(f"a number cannot be computed: {error}") from None
        if not committed:
            self._check([results[guard.slot] for guard in self.value_guards], vote)
        return results

    def _check(self, values: Sequence[Any], vote: Vote | None) -> None:
        """Raise `GuardError` unless every value guard holds, on every rank. values: one for each."""
        pairs = zip(self.value_guards, values, strict=True)
        failures = (guard.failure_of({guard.slot: value}) for guard, value in pairs)
        failure = next((f for f in failures if f is not None), None)
        if vote is not None and vote.any_failed(failure is not None):
            failure = failure or "a number that Python reads differs on another rank"
        if failure is not None:
            raise GuardError(failure)

    def run(self, inputs: list[Any], check: Commit = commit) -> Sequence[Any]:
        """What the graph returns for these inputs; empties the list.

        check: called with the values of the value guards where the graph commits, if it does.
        """
        self.prepare()
        assert self._run is not None
        return self._run(inputs, check) if self.stage == "INPLACE" else self._run(inputs)

    def prepare(self) -> None:
        """Have the runner do now what the first replay would wait for; it may raise `CompileError`."""
        if self._run is None:
            self._random = any(is_random(n) for n in self.graph.nodes)
            self._run = self.runner(self) if self.runner else self._interpreted

    def _interpreted(self, inputs: list[Any], check: Commit = commit) -> Sequence[Any]:
        result: Sequence[Any] = Interpreter(self.graph_module, check).run(*inputs)
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
