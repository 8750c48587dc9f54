"""`step.save(path)` and `step.load(path)`: the programs of a captured step, from one process to another.

    step.save("step.fzp")         step.rank0.fzp on rank 0 of several
    step.load("step.fzp")         in a new process, before or after its first call

A file holds the programs with everything outside them by name (naming.py), and what they were made for
(fingerprint.py). Loading looks the names up in the step at hand. The guards then hold it to the same facts as
where they were recorded: numbers that Python keeps have their old values, objects are those found at loading.

Where FSDP2 has not run yet in the new process, loading sets it up as a first forward does: roots, and one unshard
of each module that was unsharded before. So it communicates, and every rank must load; if one cannot, none does.

Refusals: `SaveError` for a live object that no name leads to; `LoadError` for whatever does not match, with
nothing loaded. A program for objects that are gone is left out with a warning, as no call can replay it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from functionalize.core import archive, persist
from functionalize.core.archive import FilePath, damaged, refusal
from functionalize.core.encoding import Decoder, Encoder
from functionalize.core.persist import Reader, Runner, Writer, check_replays
from functionalize.core.program import Program
from functionalize.errors import CompileError, LoadError, SaveError
from functionalize.frontend.agreement import Vote
from functionalize.frontend.fingerprint import fingerprint, mismatch, world
from functionalize.frontend.forms import Gone, forms
from functionalize.frontend.fsdp import SetUp, fsdp_set_up, set_up_fsdp
from functionalize.frontend.groups import describe, names_here
from functionalize.frontend.lifted import Key
from functionalize.frontend.naming import Names, check_order
from functionalize.frontend.programs import Kept
from functionalize.frontend.reach import reachable
from functionalize.run import RUNNERS

log = logging.getLogger("functionalize")
_RUNNERS: Mapping[str, Runner] = {persist.runner_name(each): each for each in RUNNERS.values()}
Json = Any


@dataclass(frozen=True, slots=True)
class Saved:
    """What a captured step keeps from call to call. programs: the last used at the end."""

    programs: Sequence[tuple[Hashable, Kept]]
    lifted: frozenset[Key]
    vote: Vote | None


def load(path: FilePath) -> Program:
    """The program that `program.save(path)` wrote.

    Raises `LoadError` if the file is damaged, or of another version of torch, Python or this library.
    """
    return persist.load_program(path, _RUNNERS)


def path_of_rank(path: FilePath) -> Path:
    """The file of this rank: `step.fzp` is `step.rank1.fzp` on rank 1 of several."""
    here, path = world(), Path(path)
    if here["world size"] == 1:
        return path
    return path.with_name(f"{path.stem}.rank{here['rank']}{path.suffix}")


# -- saving ----------------------------------------------------------------------------------------


def save_step(path: FilePath, fn: Callable[..., Any], saved: Saved) -> None:
    """Write every program of a step; raises `SaveError`, with nothing written."""
    path = path_of_rank(path)
    try:
        metadata, content, writer = _written(fn, saved)
    except SaveError as error:
        raise refusal(path, error, "saved") from None
    archive.write(path, metadata, content, writer.constants)


def _written(fn: Callable[..., Any], saved: Saved) -> tuple[Json, Json, Writer]:
    roots = reachable(fn)
    check_order(roots)
    names = Names(roots)
    writer = Writer(Encoder(()))
    programs, gone = [], SaveError("has no program yet: call the step until it is captured")
    for number, (key, kept) in enumerate(saved.programs, 1):
        encoder = Encoder(
            forms(names, fn), names.of
        )  # of its own: what a program left out has written goes with it
        try:
            programs.append(_write_kept(replace(writer, encoder=encoder), key, kept, number))
        except Gone as error:
            gone = error
            log.warning("program %d of %s is not saved: it %s", number, fn, error)
    if not programs:
        raise gone
    vote = saved.vote
    content = {
        "programs": programs,
        "lifted": writer.encoder.value(saved.lifted),
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


def _write_kept(writer: Writer, key: Hashable, kept: Kept, number: int) -> Json:
    value = writer.encoder.value
    return {
        "program": writer.program(kept.program, f"program_{number}"),
        "key": value(key, "the arguments"),
        "slots": value(list(kept.slots)),
        "effects": value(kept.effects),
        "history": value(list(kept.history)),
        "reason": kept.reason,
        "issued": [[writer.group(g), number] for g, number in kept.issued.items()],
        "records": writer.encoder.records,
    }


# -- loading ---------------------------------------------------------------------------------------


def load_step(path: FilePath, fn: Callable[..., Any]) -> Saved:
    """What `save_step` wrote, for `fn` and its objects here; raises `LoadError` on every rank or none."""
    path = path_of_rank(path)
    names = Names(reachable(fn))
    metadata = _together(path, lambda: _checked(path, fn, names))
    _together(path, lambda: _set_up(names, metadata["fsdp"]))
    names = Names(names.roots)  # what FSDP2 made since has names, too
    saved: Saved = _together(path, lambda: _read(path, names, metadata, fn))
    return saved


def _checked(path: Path, fn: Callable[..., Any], names: Names) -> Json:
    """The metadata, if the file is for this step in this process."""
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


def _read(path: Path, names: Names, metadata: Json, fn: Callable[..., Any]) -> Saved:
    content, constants = archive.read(path)
    groups = names_here(metadata["process groups"], names)
    vote = None
    if content["vote"] is not None:
        members, device, compares = content["vote"]
        vote = Vote(tuple(groups[g["group"]] for g in members), torch.device(device), compares)
    kept = []
    for code in content["programs"]:
        decoder = Decoder(code["records"], forms(names, fn), names.object)
        kept.append(_read_kept(Reader(decoder, _RUNNERS, groups, constants), code))
    return Saved(kept, Decoder((), ()).value(content["lifted"]), vote)


def _read_kept(reader: Reader, code: Json) -> tuple[Hashable, Kept]:
    value = reader.decoder.value
    program = reader.program(code["program"])
    if program.runner is not RUNNERS[None]:
        try:
            program.prepare()
        except CompileError as error:
            raise LoadError(f"holds a program that cannot be compiled here: {error}") from error
    kept = Kept(
        program,
        value(code["slots"]),
        value(code["effects"]),
        value(code["history"]),
        str(code["reason"]),
        issued={reader.groups[g["group"]]: number for g, number in code["issued"]},
    )
    return value(code["key"]), kept


def _together(path: Path, part: Callable[[], Any]) -> Any:
    """What `part` returns, if it raises on no rank; else `LoadError` on every rank."""
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
