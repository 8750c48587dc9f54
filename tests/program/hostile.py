"""Program files that somebody made by hand, and what becomes of whoever loads and calls them.

    python -m tests.program.hostile audited FOLDER FILE...         every event of Python's audit hooks, by line
    python -m tests.program.hostile mutations FOLDER COUNT SEED    mutations of the JSON, in one process
    python -m tests.program.hostile flips FOLDER COUNT SEED        flipped bits of the file
    python -m tests.program.hostile large FOLDER BYTES 0           a file with a large constant

Mutations and flips write what they try to `FOLDER/now-SEED` first: if the process dies,
that is what killed it. A file may take the process twice what it unpacks to, and no more.
"""

from __future__ import annotations

import collections
import copy
import gc
import hashlib
import json
import random
import resource
import signal
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import LoadError
from functionalize.util.structure import flatten

Json = Any
# Bytes of addresses beside those that are in use, so that no file can take a machine's memory.
SPARE = 400 << 20
# Bytes that loading and calling may take beside twice what the file unpacks to: the interpreter's own.
BESIDE = 8 << 20


def computed(x: Tensor, y: dict[str, Tensor], k: float) -> Any:
    """Views, writes, a constant, parts of results, an opened object, containers of several kinds."""
    x[1:].add_(y["a"])
    best = x.max(0)
    made = SimpleNamespace(a=x * 2, b=x.sum() * k, c=1.5)
    both = (x.view(-1)[2:5], torch.tensor([1.0, 2.0]) + k)
    return {"object": made, "both": both, "best": best, "x": x, "cut": torch.split(y["a"], 2)}


def arguments() -> tuple[Tensor, dict[str, Tensor], float]:
    made = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, generator=made), {"a": torch.randn(4, generator=made)}, 0.5


class Trainer:
    """A step with a model, an optimizer, and a live number."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor) -> dict[str, Any]:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.detach(), "none": None}


def write_files(folder: Path) -> None:
    """The two files that are changed."""
    fz.functions.trace(computed, *arguments()).save(folder / "program.fzp")
    trainer = Trainer()
    step = fz.capture(trainer.step)
    for i in range(4):
        trainer.optimizer.param_groups[0]["lr"] *= 0.9
        step(torch.full((2, 3), float(i)))
    step.save(folder / "step.fzp")


def digest(tree: Any) -> str:
    """The bits of every tensor, and everything else."""
    found = hashlib.sha256()
    for leaf in flatten(tree, result=True)[0]:
        if isinstance(leaf, Tensor):
            plain = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            found.update(plain.numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def run_program(path: Path) -> str:
    """Load and call a program of `trace`: what it returns and what it did to its arguments."""
    program = fz.load(path)
    x, y, k = arguments()
    try:
        out = program(x, y, k)
        return digest([out, x, y])
    except Exception as error:  # whatever the ops of another program raise
        return f"error {type(error).__name__}"


def run_step(path: Path) -> str:
    """Load a step and call it."""
    trainer = Trainer()
    trainer.step(torch.ones(2, 3))
    step = fz.capture(trainer.step)
    step.load(path)
    try:
        out = step(torch.ones(2, 3))
        return digest([out, list(trainer.model.parameters())])
    except Exception as error:
        return f"error {type(error).__name__}"


RUNS: dict[str, Callable[[Path], str]] = {"program": run_program, "step": run_step}


def tried(kind: str, path: Path) -> str:
    """What becomes of a file: `refused`, or what its call makes. Raises `AssertionError` if its refusal is unclear."""
    signal.alarm(60)
    try:
        return RUNS[kind](path)
    except LoadError as error:
        assert "\n" not in str(error), f"several lines: {error}"
        assert len(str(error)) < 1000, f"a long message: {error}"
        return "refused"
    finally:
        signal.alarm(0)


# -- mutations -------------------------------------------------------------------------------------

NAMES = (
    *(
        "",
        "os.system",
        "__class__",
        "__reduce__",
        "builtins:eval",
        "subprocess:Popen",
        "a\nb",
        "x" * 5000,
    ),
    *(
        "aten.from_file.default",
        "aten.as_strided.default",
        "aten.set_.source_Tensor",
        "cpu",
        "meta",
        "cuda:7",
    ),
    *(
        "aten._reshape_alias.default",
        "inductor.resize_storage_bytes_.default",
        "aten.empty.memory_format",
    ),
    *(
        "aten.sum.default",
        "aten.mul_.Tensor",
        "aten.resize_.default",
        "commit",
        "operator.pow",
        "float64",
    ),
    *(
        "int64",
        "complex64",
        "bits8",
        "module model",
        "attributes of module model",
        "optimizer optimizer",
    ),
    *(
        "0x1p+1023",
        "inf",
        "nan",
        "builtins:dict",
        "builtins:int",
        "collections:namedtuple",
        "step",
        "__dict__",
    ),
)
NUMBERS = (
    0,
    1,
    2,
    3,
    -1,
    -2,
    7,
    64,
    10**6,
    2**31,
    2**40,
    2**62,
    2**63,
    -(2**63),
    2**64,
    10**30,
    10**400,
)
TAGS = (
    *(
        "record",
        "node",
        "live",
        "type",
        "op",
        "function",
        "dtype",
        "device",
        "float",
        "tuple",
        "Size",
        "dict",
    ),
    *(
        "enum",
        "tree",
        "numpy",
        "bytes",
        "complex",
        "slice",
        "range",
        "set",
        "frozenset",
        "group",
        "nothing",
    ),
)
leaves = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(NUMBERS),
    st.sampled_from((None, True, False, 1.5)),
    st.text(max_size=6),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(TAGS), inner, max_size=2)
    ),
    max_leaves=5,
)
edits = st.lists(
    st.tuples(
        st.sampled_from(("replace", "replace", "swap", "copy", "delete", "repeat", "add", "nest")),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        values,
        st.integers(-3, 3),
    ),
    min_size=1,
    max_size=3,
)


def places(tree: Json) -> list[tuple[Any, Any]]:
    """Every container of a tree with each of its keys, without the sources of messages (stacks)."""
    found: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending:
        each = pending.pop()
        keys: Any = range(len(each)) if isinstance(each, list) else list(each)
        for key in keys:
            found.append((each, key))
            if isinstance(each[key], (list, dict)):
                pending.append(each[key])
    return found


def edited(tree: Json, changes: Any) -> Json:
    """A copy of the tree with changes."""
    tree = copy.deepcopy(tree)
    for kind, one, other, value, step in changes:
        found = places(tree)
        if not found:
            return tree
        holder, key = found[one % len(found)]
        second, place = found[other % len(found)]
        if kind == "replace":
            holder[key] = value
        elif kind == "swap":
            holder[key], second[place] = copy.deepcopy(second[place]), copy.deepcopy(holder[key])
        elif kind == "copy":
            holder[key] = copy.deepcopy(second[place])
        elif kind == "delete":
            del holder[key]
        elif kind == "repeat" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == "nest":
            holder[key] = {"tuple": [holder[key]]}
        elif type(holder[key]) is int:
            holder[key] += step
    return tree


def rewritten(path: Path, to: Path, content: Json) -> None:
    """The file with another `programs.json`."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            data = json.dumps(content) if name == "programs.json" else old.read(name)
            new.writestr(name, data)


def limit_memory() -> None:
    """Let this process take `SPARE` bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def resident(key: str) -> int:
    """Bytes of memory of this process: now (`VmRSS`), or at most since `peak` began (`VmHWM`)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) << 10


def unpacked(path: Path) -> int:
    """Bytes of what a file holds."""
    with zipfile.ZipFile(path) as archive:
        return sum(info.file_size for info in archive.infolist())


@contextmanager
def bounded(claimed: int) -> Iterator[None]:
    """A block in which the process grows by twice of what a file claims at most, whether it is refused or not."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    yield
    grown = resident("VmHWM") - before
    assert grown <= 2 * claimed + BESIDE, f"{grown} bytes for a file of {claimed}"


def mutations(folder: Path, count: int, start: int) -> collections.Counter[str]:
    """How many mutations had which outcome."""
    seen: collections.Counter[str] = collections.Counter()
    trees, right = {}, {}
    for kind in RUNS:
        with zipfile.ZipFile(folder / f"{kind}.fzp") as archive:
            trees[kind] = json.loads(archive.read("programs.json"))
        right[kind] = tried(kind, folder / f"{kind}.fzp")
        assert len(right[kind]) == 64
    path, now = folder / f"changed-{start}.fzp", folder / f"now-{start}"
    limit_memory()

    @seed(start)
    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.sampled_from(sorted(RUNS)), edits)
    def each(kind: str, changes: Any) -> None:
        now.write_text(repr((kind, changes)))
        rewritten(folder / f"{kind}.fzp", path, edited(trees[kind], changes))
        with bounded(unpacked(path)):
            said = tried(kind, path)
        other = said if said.startswith(("refused", "error")) else "runs another program"
        seen["equal" if said == right[kind] else other] += 1

    each()
    for kind in RUNS:  # nothing of this process was changed
        assert tried(kind, folder / f"{kind}.fzp") == right[kind]
    return seen


def flips(folder: Path, count: int, start: int) -> collections.Counter[str]:
    """How many flipped bits had which outcome."""
    seen: collections.Counter[str] = collections.Counter()
    chosen = random.Random(start)
    path, now = folder / f"flipped-{start}.fzp", folder / f"now-{start}"
    whole = {kind: (folder / f"{kind}.fzp").read_bytes() for kind in RUNS}
    right = {kind: tried(kind, folder / f"{kind}.fzp") for kind in RUNS}
    limit_memory()
    for _ in range(count):
        kind = chosen.choice(sorted(RUNS))
        bit = chosen.randrange(8 * len(whole[kind]))
        now.write_text(repr((kind, bit)))
        data = bytearray(whole[kind])
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with bounded(unpacked(folder / f"{kind}.fzp")):
            said = tried(kind, path)
        assert said in ("refused", right[kind]), f"bit {bit} of {kind}: {said}"
        seen["equal" if said == right[kind] else said] += 1
    return seen


def large(folder: Path, nbytes: int, start: int) -> None:
    """Load and call a program whose constant has that many bytes."""
    path = folder / "large.fzp"
    x = torch.ones(3, 4)
    fz.functions.trace(lambda x: x + torch.tensor(np.zeros(nbytes // 8))[:4], x).save(path)
    tried("program", folder / "program.fzp")
    with bounded(unpacked(path)):
        assert fz.load(path)(x).equal(x.double())


# -- audit events ----------------------------------------------------------------------------------

WATCHED = (
    "import",
    "exec",
    "compile",
    "open",
    "subprocess.Popen",
    "os.",
    "socket.",
    "ctypes.",
    "pickle.",
)


def audited(folder: Path, files: Sequence[Path]) -> list[str]:
    """The audit events of loading and calling files, and their results.

    A file that nobody changed was loaded and called before.
    """
    tried("program", folder / "program.fzp")
    gc.collect()
    events: list[str] = []
    is_on = [True]

    def hook(event: str, args: Any) -> None:
        if is_on[0] and event.startswith(WATCHED):
            events.append(described(event, args))

    sys.addaudithook(hook)
    for file in files:
        events.append(f"result {tried('program', file)}")
        gc.collect()
    is_on[0] = False
    return events


def described(event: str, args: Any) -> str:
    """An event in one line. Code objects by their file."""
    if event == "open":
        name, mode, flags = args
        writes = flags & 0o3 or (isinstance(mode, str) and set(mode) & set("wax+"))
        return f"open {'to write' if writes else 'to read'} {name}"
    if event == "exec":
        return f"exec {args[0].co_filename}"
    if event == "compile":
        return f"compile {args[1]}"
    return f"{event} {args[:1]}"[:200]


def lines() -> Iterator[str]:
    what, folder, *rest = sys.argv[1:]
    if what == "audited":
        yield json.dumps(audited(Path(folder), [*map(Path, rest)]))
        return
    made = {"mutations": mutations, "flips": flips, "large": large}[what]
    yield json.dumps(made(Path(folder), int(rest[0]), int(rest[1])))


if __name__ == "__main__":
    from tests.program import hostile  # by the name that pickles and files know it by

    try:
        for line in hostile.lines():
            print(line)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
