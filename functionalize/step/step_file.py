"""`step.save(path)` and `step.load(path)`: move the programs of a captured step between processes.

    step.save("step.fzp")         step.rank0.fzp on rank 0 of several
    step.load("step.fzp")         in a new process, before or after its first call

A file holds the programs, in which references to outside objects are names (object_names.py), a description of the
step and its environment (fingerprint.py), and with `dynamic` what makes programs for further sizes (saved_classes.py).
`load` resolves the names in its own step. Guards then compare numbers with their values at recording, and objects with
those that `load` found.

If FSDP2 has not run yet in the new process, `load` initialises it as a first forward does: it sets roots, and unshards
each module once that was unsharded before. So `load` communicates, and every rank must call it; if one rank fails, no
rank loads anything.

Refusals: `SaveError` for a live object that has no name in the step; `LoadError` for any mismatch, with nothing
loaded. A program for objects that no longer exist is left out with a warning: no call can replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from functionalize.audit import signature as signatures
from functionalize.audit.signature import Signature
from functionalize.errors import CompileError, LoadError, SaveError
from functionalize.fsdp.objects import SetUp, fsdp_set_up, set_up_fsdp
from functionalize.lengths.length_class import LengthClass
from functionalize.lengths.length_classes import LengthClasses
from functionalize.lengths.saved_classes import FORMS as FORMS_OF_CLASSES
from functionalize.lengths.saved_classes import read_class, write_class
from functionalize.program import archive
from functionalize.program import program_file as persist
from functionalize.program.archive import FilePath, damaged, refusal
from functionalize.program.field_types import fields_checked
from functionalize.program.json_codec import Decoder, Encoder, Form, position
from functionalize.program.known_types import Types
from functionalize.program.program import Program
from functionalize.program.program_file import Reader, Runner, Writer, check_replays
from functionalize.run import RUNNERS
from functionalize.saving.effect_codecs import NAMED_EFFECTS
from functionalize.saving.fingerprint import fingerprint, mismatch, world
from functionalize.saving.live_types import LiveTypes
from functionalize.saving.object_names import Names, check_order
from functionalize.saving.saved_calls import check_calls
from functionalize.saving.saved_groups import describe, names_here
from functionalize.saving.step_codecs import Gone, forms
from functionalize.state.hyperparameters import Key
from functionalize.step.cache import CachedProgram, ProgramCache
from functionalize.step.vote import RankVote
from functionalize.util.switches import AUDITS, REFUSALS
from functionalize.walk.walker import walked

_RUNNERS: Mapping[str, Runner] = {persist.runner_name(each): each for each in RUNNERS.values()}
Json = Any


@dataclass(frozen=True, slots=True)
class SavedStep:
    """The contents of a file.

    programs: pairs (key, program), the last used at the end. hyperparameters: those whose values have changed.
    vote: the vote of the ranks; None: they need none. classes: those with a template, of calls that differ in sizes.
    """

    programs: Sequence[tuple[Hashable, CachedProgram]]
    hyperparameters: frozenset[Key]
    vote: RankVote | None
    classes: Sequence[LengthClass] = ()

    @staticmethod
    def of(
        cache: ProgramCache,
        lengths: LengthClasses | None,
        hyperparameters: frozenset[Key],
        vote: RankVote | None,
    ) -> SavedStep:
        """What to write of a step: for each class with a template its last recording, not what it makes again."""
        classes = [each for each in lengths or () if each.template is not None]
        classes = [each for each in classes if not each.is_early]
        latest = [each.references[-1] for each in classes]
        programs = [
            (key, cached)
            for key, cached in cache.items()
            if cached.prediction is None
            and not (cached.group is not None and cached.group.makes_again(cached))
        ]
        kept = {id(cached) for _, cached in programs}
        evicted = [(each.key, each.cached) for each in latest if id(each.cached) not in kept]
        return SavedStep([*evicted, *programs], hyperparameters, vote, classes)


def load(path: FilePath, types: Sequence[type] = (), ops: Sequence[str] = ()) -> Program:
    """The program that `program.save(path)` wrote.

        program = functionalize.load("fn.fzp", types=[Batch], ops=["mylib"])

    types: classes of yours that the file may name, to make results of them. ops: namespaces of custom ops that it may
    call. A file names nothing else than these and what this library and torch consist of: it is data.
    Raises `LoadError` if the file is damaged, of another version of torch, Python or this library, or needs a class or
    an op that `types` and `ops` do not name.

        >>> fz.functions.trace(lambda x: x.sin(), torch.ones(2)).save("sin.fzp")
        >>> fz.load("sin.fzp")(torch.zeros(2))
        tensor([0., 0.])
    """
    return persist.load_program(path, Program, _RUNNERS, types, ops)


def path_of_rank(path: FilePath) -> Path:
    """The file of this rank: `step.fzp` is `step.rank1.fzp` on rank 1 of several."""
    here, path = world(), Path(path)
    if here["world size"] == 1:
        return path
    return path.with_name(f"{path.stem}.rank{here['rank']}{path.suffix}")


# -- saving ----------------------------------------------------------------------------------------


def save_step(path: FilePath, fn: Callable[..., Any], saved: SavedStep) -> None:
    """Write every program of a step. If it raises `SaveError`, nothing was written."""
    path = path_of_rank(path)
    try:
        metadata, content, writer = _contents(fn, saved)
    except SaveError as error:
        raise refusal(path, error, "saved") from None
    archive.write(path, metadata, content, writer.constants)


def _contents(fn: Callable[..., Any], saved: SavedStep) -> tuple[Json, Json, Writer]:
    state = walked(fn)
    roots, names = state.roots, Names(state)
    check_order(roots)
    writer, written = Writer(Encoder(())), dict[int, int]()
    programs, error = [], SaveError("has no program yet: call the step until it is captured")
    for number, (key, cached) in enumerate(saved.programs, 1):
        # An encoder per program, so that the file has no records of a program that is left out.
        encoder = Encoder(_forms(names, fn, writer.group), names.of)
        try:
            programs.append(_write_program(replace(writer, encoder=encoder), key, cached, number))
            written[id(cached)] = len(programs) - 1
        except Gone as lost:
            error = lost
            REFUSALS.warning("program %d of %s is not saved: it %s", number, fn, lost)
    if not programs:
        raise error
    vote = saved.vote
    content = {
        "programs": programs,
        "classes": list(_write_classes(writer, fn, names, saved, written)),
        "lifted": writer.encoder.value(saved.hyperparameters),
        "vote": None
        if vote is None
        else [[writer.group(g) for g in vote.groups], str(vote.device), vote.compares],
    }
    metadata = {
        **archive.versions(),
        "kind": "step",
        **fingerprint(fn, names),
        "process groups": describe(writer.groups, names),
        "fsdp": {name: fsdp_set_up(root) for name, root in roots.modules.items()},
        "nodes": [len(code["program"]["graph"]) for code in programs],
    }
    return metadata, content, writer


def _write_program(writer: Writer, key: Hashable, cached: CachedProgram, number: int) -> Json:
    value = writer.encoder.value
    for effect in cached.python_effects:
        if not isinstance(effect, NAMED_EFFECTS):
            raise SaveError(
                f"{effect.what}, a call that a replay makes again and a file cannot name: make it outside of the step"
            )
    _check_calls(cached, cached.recorded or cached.program, SaveError)
    return {
        "program": writer.program(cached.recorded or cached.program, f"program_{number}"),
        "key": value(key, "the arguments"),
        "slots": value(list(cached.slots)),
        "dropped": value(list(cached.dropped)),
        "effects": value(cached.effects),
        "python effects": value(list(cached.python_effects), "what a replay repeats in Python"),
        "history": value(list(cached.has_grad_fn)),
        "reason": cached.reason,
        "signature": _write_signature(writer, cached),
        "issued": [[writer.group(g), number] for g, number in cached.fingerprints.items()],
        "records": writer.encoder.records,
    }


def _write_classes(
    writer: Writer,
    fn: Callable[..., Any],
    names: Names,
    saved: SavedStep,
    written: Mapping[int, int],
) -> Iterator[Json]:
    """Each class whose last program was written. written: by the id of a program, its place."""
    for number, group in enumerate(saved.classes, 1):
        latest = written.get(id(group.references[-1].cached))
        if latest is None:
            continue
        encoder = Encoder([*_forms(names, fn, writer.group), *FORMS_OF_CLASSES], names.of)
        try:
            code = write_class(replace(writer, encoder=encoder), group, f"class_{number}")
        except SaveError as error:
            REFUSALS.warning(
                "of %s, sizes that were not recorded are recorded where it is loaded: it %s",
                fn,
                error,
            )
        else:
            of_class = [c for _, c in saved.programs if c.group is group and id(c) in written]
            yield {**code, "latest": latest, "programs": [written[id(c)] for c in of_class]}


def _write_signature(writer: Writer, cached: CachedProgram) -> Json:
    """What audits compare with; None, so that none is made, if it names an object that the program does not need."""
    try:
        return writer.encoder.value(cached.signature, "the op stream")
    except SaveError as error:
        AUDITS.info("a saved program will not be audited: its op stream %s", error)
        return None


# -- loading ---------------------------------------------------------------------------------------


def load_step(
    path: FilePath, fn: Callable[..., Any], types: Sequence[type] = (), ops: Sequence[str] = ()
) -> SavedStep:
    """Read a file of `save_step` for the step `fn`; raises `LoadError` on every rank or on none.

    types, ops: what the file may name beside what the step itself names (`live_types.py`).
    """
    path = path_of_rank(path)
    names = Names(walked(fn))
    metadata = _together(path, lambda: _checked(path, fn, names))
    _together(path, lambda: _set_up(names, metadata["fsdp"]))
    names = Names(names.state)  # now with names for the objects that `_set_up` made
    saved: SavedStep = _together(path, lambda: _read(path, names, metadata, fn, types, ops))
    return saved


def _checked(path: Path, fn: Callable[..., Any], names: Names) -> Json:
    """The metadata of the file; raises `LoadError` if it is not for this step and process."""
    metadata = archive.read_metadata(path)
    archive.check_versions(metadata)
    check_replays(metadata)
    if metadata["kind"] != "step":
        raise LoadError("holds one program: load it with `functionalize.load`")
    found = mismatch(metadata, fingerprint(fn, names))
    if found is not None:
        raise LoadError(found)
    names_here(metadata["process groups"], names)
    return metadata


def _set_up(names: Names, goals: Json) -> None:
    for name, root in names.roots.modules.items():
        goal = [SetUp(*each) for each in goals[name]]
        if len(goal) != len(fsdp_set_up(root)):
            raise LoadError(f"was saved for other modules with `fully_shard` under `{name}`")
        set_up_fsdp(root, goal)


def _read(
    path: Path,
    names: Names,
    metadata: Json,
    fn: Callable[..., Any],
    types: Sequence[type],
    ops: Sequence[str],
) -> SavedStep:
    content, constants = archive.read(path)
    groups = names_here(metadata["process groups"], names)
    vote = None
    if content["vote"] is not None:
        members, device, compares = content["vote"]
        vote = RankVote(tuple(groups[g["group"]] for g in members), torch.device(device), compares)

    live = LiveTypes.of(names, fn)
    known, namespaces = Types([*live.types, *types]), live.namespaces | {*ops}

    def reader(code: Json, more: Sequence[Form] = ()) -> Reader[Program]:
        read = [*_forms(names, fn, None, groups), *more]
        decoder = Decoder(code["records"], read, names.object, known, namespaces)
        return Reader(Program, decoder, _RUNNERS, groups, constants)

    programs = []
    for code in content["programs"]:
        programs.append(_read_program(reader(code), code))
    classes = [
        _read_class(reader(code, FORMS_OF_CLASSES), code, programs) for code in content["classes"]
    ]
    lifted = Decoder((), ()).value(content["lifted"])
    fields = {"hyperparameters": lifted, "vote": vote}
    return SavedStep(programs, classes=classes, **fields_checked(SavedStep, fields))


def _read_class(
    reader: Reader[Program], code: Json, programs: Sequence[tuple[Hashable, CachedProgram]]
) -> LengthClass:
    latest = programs[code["latest"]]
    group = read_class(reader, code, *latest)
    for each in (group.template, *(each.template for each in group.passed)):
        if each is not None:
            _check_calls(latest[1], each.reference, LoadError)
    for at in code["programs"]:
        programs[at][1].group = group
    return group


def _forms(
    names: Names, fn: Callable[..., Any], group: Any, groups: Sequence[str] = ()
) -> list[Form]:
    return [*forms(names, fn), *signatures.forms(group, groups)]


def _read_program(reader: Reader[Program], code: Json) -> tuple[Hashable, CachedProgram]:
    value = reader.decoder.value
    program = reader.program(code["program"])
    if program.runner is not RUNNERS[None]:
        try:
            program.prepare()
        except CompileError as error:
            raise LoadError(f"holds a program that cannot be compiled here: {error}") from error
    fields = {
        "slots": value(code["slots"]),
        "effects": value(code["effects"]),
        "has_grad_fn": value(code["history"]),
        "reason": str(code["reason"]),
        "dropped": value(code["dropped"]),
        "python_effects": value(code["python effects"]),
    }
    signature, issued = value(code["signature"]), code["issued"]
    if signature is not None and not isinstance(signature, Signature):
        raise LoadError("has an op stream that is none: damaged")
    fingerprints = {}
    for group, number in issued:
        at = position(group["group"], len(reader.groups))
        fingerprints[reader.groups[at]] = number
    cached = CachedProgram(
        program,
        op_stream=signature,
        fingerprints=fingerprints,
        **fields_checked(CachedProgram, fields),
    )
    if not all(isinstance(each, NAMED_EFFECTS) for each in cached.python_effects):
        raise LoadError("repeats what is no effect of a step: damaged")
    _check_calls(cached, program, LoadError)
    key = value(code["key"])
    hash(key)
    return key, cached


def _check_calls(
    cached: CachedProgram, program: Program, kind: type[SaveError] | type[LoadError]
) -> None:
    """Raise an error of this kind if a program does not return what its effects take."""
    check_calls(program, cached.python_effects, len(cached.slots), kind)


def _together(path: Path, part: Callable[[], Any]) -> Any:
    """The result of `part`; if it raises on any rank, `LoadError` on every rank."""
    error: LoadError | None = None
    result = None
    try:
        result = part()
    except LoadError as refused:
        error = refused
    except Exception as found:
        error = damaged(found)
    if _any_rank(error is not None) and error is None:
        error = LoadError("is refused on another rank")
    if error is not None:
        raise refusal(path, error, "loaded") from error.__cause__
    return result


def _any_rank(failed: bool) -> bool:
    if world()["world size"] == 1:
        return failed
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flag = torch.tensor(int(failed), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
