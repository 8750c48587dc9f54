"""`step.explain()`: what the next call would do, what went wrong, the counts, and the programs, one a line.

boundary: calls of `Net`, forward with hooks, and their backward: 14 of 21 calls replayed     in a framework's loop
eager around it: loss, clipping, optimizer, scheduler
the next call like the last one replays program 2
guards that missed, the most frequent first
  1 time: the first sizes of `x` are (5,), were (4,)
train_step: 2 programs, 14 replays, 2 captures, 3 warm-ups
program 1: 8 replays, recorded because of the first call; 412 nodes, 31 inputs, 40 actions after the graph, ...

`explain(verbose=True)` lists under each program where its inputs come from, and its guards on numbers:

    model_0_weight   float32[16, 4]   parameter `weight` of a Linear
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from functionalize.calls.draws import DrawnNumber
from functionalize.fsdp.objects import FSDPTensor
from functionalize.ir.inputs import Argument, Captured, InputSpec, WholeStorage
from functionalize.program.program import Program
from functionalize.run.boxed import boxed
from functionalize.state import sources
from functionalize.state.drawing import GeneratorState
from functionalize.state.hyperparameters import HyperparameterNumber
from functionalize.state.number_arguments import NumberArgument
from functionalize.state.place_effects import PlaceNumber
from functionalize.step.cache import CachedProgram, ProgramCache
from functionalize.step.stats import Stats
from functionalize.templates.template import FEWEST, Mismatch, Template
from functionalize.util.text import counted
from functionalize.walk.parts import Held


class Boundary(NamedTuple):
    """What of a framework's loop is captured, and what runs eagerly around it, as text."""

    captured: str
    eager: str


def explanation(
    name: str,
    boundary: Boundary | None,
    next_call: str,
    stats: Stats,
    programs: ProgramCache,
    refused: Iterable[Exception],
    why_unkept: Callable[[str], str],
    sizes: str,
    verbose: bool = False,
) -> str:
    """The text of `CapturedStep.explain`. next_call: what it would do. sizes: text.

    why_unkept: why recordings of calls that missed a guard were not kept; empty: they were.
    """
    lines = []
    if boundary is not None:
        replayed = f"{stats.replays} of {counted(stats.calls, 'call')} replayed"
        lines = [f"boundary: {boundary.captured}: {replayed}", f"eager around it: {boundary.eager}"]
    lines += [next_call, *_went_wrong(stats, refused, why_unkept)]
    lines += [f"{name}: {', '.join(_counts(stats, len(programs)))}", sizes]
    for number, cached in enumerate(programs, 1):
        lines.append(f"program {number}: {'; '.join(_of_program(cached))}")
        if verbose:
            lines += _listing(cached)
    return "\n".join([*lines, *_templates(list(programs))])


def _went_wrong(
    stats: Stats, refused: Iterable[Exception], why_unkept: Callable[[str], str]
) -> Iterator[str]:
    """Refusals, audits that found a difference, guards that missed."""
    yield from (f"cannot be captured: {error}" for error in refused)
    if stats.differences:
        yield "differences that audits found, the last first"
        yield from (f"  {difference}" for difference in reversed(stats.differences))
    if stats.guard_failures:
        yield "guards that missed, the most frequent first"
        missed = Counter(stats.guard_failures).most_common(10)
        for failure, times in missed:
            why = why_unkept(failure)
            yield f"  {counted(times, 'time')}: {failure}{'; ' if why else ''}{why}"


def _counts(stats: Stats, programs: int) -> Iterator[str]:
    yield counted(programs, "program")
    yield counted(stats.replays, "replay")
    yield counted(stats.captures, "capture")
    yield counted(stats.warmups, "warm-up")
    if stats.audits:
        found = (
            counted(stats.audit_failures, "difference") if stats.audit_failures else "no difference"
        )
        yield f"{counted(stats.audits, 'audit')} ({found})"
    if stats.predictions or stats.mispredictions:
        right = f"{stats.predictions} of {stats.predictions + stats.mispredictions}"
        yield f"{right} first calls as predicted"
    if stats.instances:
        yield f"{counted(stats.instances, 'size')} replayed at their first call"
    if stats.eager:
        yield f"{counted(stats.eager, 'call')} eagerly"
    if stats.rare:
        yield f"{stats.rare} of them of kinds that came too seldom to be recorded"
    if stats.waiting:
        yield f"{stats.waiting} of them while a program waited for its passes"


def _of_program(cached: CachedProgram) -> Iterator[str]:
    """What is said of one program in its line."""
    program, backwards = cached.program, getattr(cached, "backwards", ())  # of a captured forward
    audits = f", {counted(cached.audits, 'audited call')}" if cached.audits else ""
    yield f"{counted(cached.replays, 'replay')}{audits}, recorded because of {cached.reason}"
    guards = len(program.facts) + len(program.guards)
    yield (
        f"{counted(program.nodes(), 'node')}, {counted(len(program.inputs), 'input')}, "
        f"{counted(len(program.epilogue), 'action')} after the graph, {counted(guards, 'guard')} before it and "
        f"{len(program.value_guards)} on numbers that Python read"
    )
    if backwards:
        replays = sum(each.replays for each in backwards)
        yield f"{counted(len(backwards), 'backward')} with {counted(replays, 'replay')}"
    if cached.awaits_passes and cached.replays_before_passes:
        yield "its passes have not run: replays must return first what they cost"
    elif cached.waits:
        yield "its passes have not run, and its calls run eagerly: they cost more than is left"
    if program.runner is not None and program.runner is not boxed:
        yield f"run by {getattr(program.runner, '__name__', program.runner)}"


def _listing(cached: CachedProgram) -> Iterator[str]:
    """Where the inputs of a program come from, the numbers that it is guarded by, its backwards."""
    program = cached.program
    width = max((len(spec.name) for spec in program.inputs), default=0)
    for spec in program.inputs:
        yield f"    {spec.name:{width}}  {spec.geometry}  {source_text(spec, program.inputs)}"
    for guard in program.value_guards:
        yield f"    read {guard.where}: {guard.value!r}"
    for backward in getattr(cached, "backwards", ()):
        yield (
            f"  backward: {counted(backward.replays, 'replay')}; "
            f"{counted(backward.program.nodes(), 'node')}, {counted(len(backward.used), 'saved value')}, "
            f"{counted(len(backward.program.epilogue), 'action')} after the graph"
        )


def _templates(programs: list[CachedProgram]) -> Iterator[str]:
    """Which programs are one graph at several sizes of the arguments, and where others part."""
    alike: dict[Any, list[tuple[int, Program]]] = {}
    for number, cached in enumerate(programs, 1):
        program = cached.program
        arguments = [s.geometry for s in program.inputs if isinstance(s.source, Argument)]
        kinds = tuple((g.dtype, tuple(min(size, 2) for size in g.size)) for g in arguments)
        alike.setdefault((program.history, kinds), []).append((number, program))
    for group in alike.values():
        if len(group) >= FEWEST:
            yield _template_text([n for n, _ in group], Template.of([p for _, p in group]))


def _template_text(numbers: list[int], found: Template | Mismatch) -> str:
    names = ", ".join(map(str, numbers))
    if isinstance(found, Mismatch) and not found.program:
        return f"programs {names} make no template: {found}"
    if isinstance(found, Mismatch):
        return f"programs {numbers[0]} and {numbers[found.program]} are not one graph: {found}"
    sizes = ", ".join(f"s{i} = {name}" for i, name in enumerate(found.symbols.names)) or "no size"
    return (
        f"programs {names} are one graph: {found.varying} of {len(found.formulas)} integers are "
        f"functions of {sizes}"
    )


def source_text(spec: InputSpec, inputs: tuple[InputSpec, ...]) -> str:
    """Where a call finds an input, as text."""
    source = spec.source
    if isinstance(source, WholeStorage):
        return f"the whole storage of {inputs[source.input].name}"
    return _text(source)


def _text(source: Any) -> str:
    if isinstance(source, Argument):
        return f"leaf {source.leaf} of the arguments" + "".join(f".{a}" for a in source.attributes)
    if isinstance(source, sources.ModuleTensor):
        kind = "parameter" if source.table == "_parameters" else "buffer"
        return f"{kind} `{source.name}` of a {type(source.module).__name__}"
    if isinstance(source, sources.Gradient):
        return f"the gradient of {_text(source.of)}"
    if isinstance(source, sources.OptimizerState):
        return f"state `{source.key}` of parameter {source.index} in group {source.group}"
    if isinstance(source, sources.OptimizerParameter):
        return f"parameter {source.index} in group {source.group} of the optimizer"
    if isinstance(source, sources.Inner):
        inner = "local" if source.attribute == "_local_tensor" else source.attribute
        return f"the {inner} tensor of {_text(source.of)}"
    if isinstance(source, FSDPTensor):
        where = getattr(source.param, "_param_fqn", None) or getattr(
            source.param, "_module_fqn", ""
        )
        return f"FSDP2's {source.attribute.lstrip('_')} of `{where or 'root'}`"
    if isinstance(source, HyperparameterNumber):
        return f"`{source.key}` of group {source.group} of `{source.name}`"
    if isinstance(source, DrawnNumber):
        return f"a number drawn by {source.text}"
    if isinstance(source, GeneratorState):
        return f"the state of the generator `{source.place.name}`"
    if isinstance(source, PlaceNumber):
        return f"`{source.name}`, a number that Python keeps"
    if isinstance(source, NumberArgument):
        return f"the argument `{source.name}`, a number"
    if isinstance(source, Held):
        return "a variable that the step names" if source.key is None else f"`{source.key}`"
    if isinstance(source, Captured):
        return "a tensor that the program holds"
    return type(source).__name__
