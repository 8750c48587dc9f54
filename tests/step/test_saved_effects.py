"""Steps that count, keep, print, log and schedule are saved, and a fresh copy of the script replays them."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import LoadError, SaveError
from tests.allowance import ample_allowance
from tests.step.moving_steps import REFUSED, STEPS, World, difference
from tests.step.saved_loops import CALLS, Loop, batch, log, logs, prints, says, schedules

BEFORE, AFTER = 6, 5


def continued(make: Callable[[], Any], path: Path) -> tuple[Any, Any, Any]:
    """A world whose programs come from a file, one that is eager, and the loaded step, after calls that agree."""
    saved = make()
    with ample_allowance():
        captured = fz.capture(saved.step, audit=False)
    for i in range(BEFORE):
        captured(batch(i))
    captured.save(path)
    ours, eager = make(), make()
    for i in range(BEFORE):
        ours.step(batch(i))
        eager.step(batch(i))
    loaded = fz.capture(ours.step, audit=False)
    loaded.load(path)
    for i in range(BEFORE, BEFORE + AFTER):
        torch.manual_seed(i)
        expected = eager.step(batch(i))
        torch.manual_seed(i)
        assert difference(loaded(batch(i)), expected) is None, i
    return ours, eager, loaded


@pytest.mark.parametrize("name", [n for n in STEPS if n not in REFUSED])
def test_a_step_that_moves_state(name: str, tmp_path: Path) -> None:
    ours, eager, loaded = continued(lambda: World(STEPS[name], "SGD"), tmp_path / "step.fzp")
    assert difference(ours.state(), eager.state()) is None
    assert loaded.stats.replays, loaded.explain()


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_a_step_that_calls(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Each call is made again by the loaded program, with the numbers of its replay."""
    ours, eager, loaded = continued(lambda: Loop(*CALLS[name]), tmp_path / "step.fzp")
    assert loaded.stats.replays == AFTER, loaded.explain()
    assert ours.optimizer.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"]
    assert (ours.n, ours.losses) == (eager.n, eager.losses)
    if name == "logging":
        said = [(r.getMessage(), getattr(r, "at", None), r.lineno) for r in caplog.records]
        assert len(said) == 3 * BEFORE + 2 * AFTER and len(set(said)) == BEFORE + AFTER
    elif name != "a scheduler that gets the loss":
        # Eager and ours alternate.
        said_here = capfd.readouterr()
        for lines in (said_here.out.splitlines(), said_here.err.splitlines()):
            last = lines[-2 * AFTER * (1 if lines else 0) :]
            assert last[::2] == last[1::2]
        assert len(said_here.out.splitlines()) == 3 * BEFORE + 2 * AFTER


SCRIPT = """
import sys
import torch
import functionalize as fz
from tests.step.saved_loops import Loop, batch, schedules

loop = Loop(schedules)
step = fz.capture(loop.step, audit=False)
if sys.argv[1] == "saves":
    for i in range(6):
        step(batch(i))
    step.save(sys.argv[2])
else:
    for i in range(6):
        loop.step(batch(i))
    if sys.argv[1] == "loads":
        step.load(sys.argv[2])
found = [(step if sys.argv[1] != "eager" else loop.step)(batch(i)).item() for i in range(6, 10)]
print(found, loop.n, loop.scheduler.last_epoch, step.stats.captures)
"""


def test_another_process(tmp_path: Path) -> None:
    said = {}
    for part in ("saves", "loads", "eager"):
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, part, str(tmp_path / "step.fzp")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said[part] = done.stdout.splitlines()[-5:]
    assert said["loads"] == said["eager"]
    assert said["saves"][:-1] == said["loads"][:-1]
    assert said["loads"][-1].endswith(" 0")


# -- refusals --------------------------------------------------------------------------------------


def saved_loop(path: Path, calls: Callable[[Any, Tensor], Any] = prints) -> None:
    loop = Loop(calls)
    with ample_allowance():
        captured = fz.capture(loop.step, audit=False)
    for i in range(BEFORE):
        captured(batch(i))
    captured.save(path)


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    """Nothing is loaded: the step is recorded as if there were no file."""
    saved_loop(tmp_path / "step.fzp")
    loop = Loop(prints)
    del loop.n
    captured = fz.capture(loop.step)
    with pytest.raises(LoadError, match=r"needs 1 of what the step calls `self\.n`, there is none"):
        captured.load(tmp_path / "step.fzp")
    assert captured.program is None


def changed(path: Path, change: Callable[[Any], None]) -> None:
    """Change the JSON of a file, with right checksums."""
    from tests.program.hostile import rewritten

    with zipfile.ZipFile(path) as archive:
        content = json.loads(archive.read("programs.json"))
    change(content)
    whole = path.with_suffix(".whole")
    path.rename(whole)
    rewritten(whole, path, content)


def records(content: Any, kind: str) -> list[Any]:
    found = [r for p in content["programs"] for r in p["records"] if r["is"] == kind]
    assert found, kind
    return found


def test_a_file_cannot_assign_elsewhere(tmp_path: Path) -> None:
    """To what the live step does not move: its model, its methods."""
    for name in ("self.model", "self.step", "self.optimizer.param_groups", "self.calls"):
        path = tmp_path / f"{name}.fzp"
        saved_loop(path)

        def elsewhere(content: Any, name: str = name) -> None:
            for each in records(content, "Assigned"):
                each["with"][0]["tuple"][0] = name

        changed(path, elsewhere)
        loop = Loop(prints)
        loop.step(batch(0))
        model, calls = loop.model, loop.calls
        captured = fz.capture(loop.step)
        with pytest.raises(LoadError, match="there is none"):
            captured.load(path)
        assert loop.model is model and loop.calls is calls


def counts(loop: Any, loss: Tensor) -> None:
    number, average = getattr(loop, "counts", (0, 0.0))
    loop.counts = number + 1, 0.5 * average + loss.item()


def test_a_place_inside_of_a_container(tmp_path: Path) -> None:
    """A file names what a replay may read in it by keys, which lead to elements alone."""
    for at, key in enumerate((5, "__class__", True, "count")):
        path = tmp_path / f"{at}.fzp"
        saved_loop(path, counts)

        def elsewhere(content: Any, key: Any = key) -> None:
            for each in records(content, "PlaceNumber"):
                place = each["with"][0]["tuple"]
                place[3:] = [key] if len(place) > 3 else []

        loop = Loop(counts)
        loop.step(batch(0))
        changed(path, elsewhere)
        with pytest.raises(LoadError, match=r"in what the step calls `self\.counts`"):
            fz.capture(loop.step).load(path)


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("Printed", lambda r: r["with"].__setitem__(1, "__stdin__"), "neither sys.stdout nor"),
        ("Logged", lambda r: r["with"].__setitem__(0, "root"), "does not reach"),
        ("SchedulerStepped", lambda r: r["with"].__setitem__(1, 10_000), "does not have"),
        ("PlaceNumber", lambda r: r["with"].__setitem__(2, {"type": "builtins:str"}), "no number"),
    ],
)
def test_a_damaged_call(kind: str, change: Any, message: str, tmp_path: Path) -> None:
    of = {"Logged": logs, "SchedulerStepped": schedules}
    saved_loop(tmp_path / "step.fzp", of.get(kind, prints))
    changed(tmp_path / "step.fzp", lambda content: change(records(content, kind)[0]))
    loop = Loop(of.get(kind, prints))
    loop.step(batch(0))
    with pytest.raises(LoadError, match=message):
        fz.capture(loop.step).load(tmp_path / "step.fzp")


def test_a_call_with_another_argument(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`print(..., file=...)` would write to whatever object a file names."""
    saved_loop(tmp_path / "step.fzp")

    def rename(content: Any) -> None:
        text = json.dumps(content)
        assert '"sep"' in text
        content["programs"] = json.loads(json.dumps(content["programs"]).replace('"sep"', '"file"'))

    changed(tmp_path / "step.fzp", rename)
    loop = Loop(prints)
    loop.step(batch(0))
    with pytest.raises(LoadError, match="arguments that it does not take"):
        fz.capture(loop.step).load(tmp_path / "step.fzp")


def test_what_no_file_holds(tmp_path: Path) -> None:
    """A function of `fz.repeat` is code of a script."""
    seen: list[float] = []
    note = fz.repeat(seen.append)

    def notes(loop: Loop, loss: Tensor) -> None:
        note(loss.item())

    loop = Loop(notes)
    with ample_allowance():
        captured = fz.capture(loop.step, audit=False)
    for i in range(BEFORE):
        captured(batch(i))
    assert captured.stats.replays
    with pytest.raises(SaveError, match="a call that a replay makes again and a file cannot name"):
        captured.save(tmp_path / "step.fzp")
    assert not list(tmp_path.iterdir())


def unreached_logger(loop: Loop, loss: Tensor) -> None:
    logging.warning("step %d", loop.n)


def test_a_logger_that_the_code_does_not_name(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="logs by `root`, a logger that the step's code does not"):
        saved_loop(tmp_path / "step.fzp", unreached_logger)
    assert not list(tmp_path.iterdir())


def test_a_constant_beside_what_is_printed(tmp_path: Path) -> None:
    def shows_a_type(loop: Loop, loss: Tensor) -> None:
        print(loop.n, loss.dtype)

    with pytest.raises(SaveError, match="a constant of the type dtype, which a file cannot hold"):
        saved_loop(tmp_path / "step.fzp", shows_a_type)
    assert not list(tmp_path.iterdir())


# -- where it was made, and what it says: nothing of it is a file's --------------------------------

SHIFTED = """{comment}
import logging
import warnings

log = logging.getLogger("tests.shifted")


class Loop:
    def __init__(self, model):
        self.model, self.n = model, 0

    def step(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.model.zero_grad()
        self.n += 1
        warnings.warn(
            f"loss of step {{self.n}}",
            RuntimeWarning,
        )
        log.info("step %3d of %s", self.n, "many", extra={{"at": self.n}})
        return loss.detach()
"""


def shifted(folder: Path, comment: str) -> Any:
    """A loop whose code is in a file of its own, below a comment."""
    folder.mkdir()
    (folder / "shifted_step.py").write_text(SHIFTED.format(comment=comment))
    spec = importlib.util.spec_from_file_location("shifted_step", folder / "shifted_step.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shifted_step"] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.Loop(nn.Linear(3, 2))


def test_a_warning_and_a_record_name_the_line_that_the_code_has_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The saved step was in another folder, below a shorter comment."""
    caplog.set_level(logging.INFO, "tests.shifted")
    try:
        first = fz.capture(shifted(tmp_path / "a", "# a").step, audit=False)
        with warnings.catch_warnings(record=True), ample_allowance():
            warnings.simplefilter("always")
            for i in range(BEFORE):
                first(batch(i))
        first.save(tmp_path / "step.fzp")
        loop = shifted(tmp_path / "b", "# a\n# longer\n# comment")
        loaded = fz.capture(loop.step, audit=False)
        loaded.load(tmp_path / "step.fzp")
        said = {}
        for name, step in (("replay", loaded), ("eager", loop.step)):
            caplog.clear()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                step(batch(0))
            (record,) = caplog.records
            said[name] = [
                *((w.category, w.filename, w.lineno) for w in warned),
                (record.pathname, record.lineno, record.funcName, record.levelno),
            ]
    finally:
        del sys.modules["shifted_step"]
    assert loaded.stats.replays == 1, loaded.explain()
    assert said["replay"] == said["eager"]
    assert said["eager"][0][1] == str(tmp_path / "b" / "shifted_step.py")


HOSTILE = """
import json, sys, warnings, zipfile
from pathlib import Path

sys.path.insert(0, {root!r})
import torch
import functionalize as fz
from tests.program.hostile import rewritten
from tests.step.saved_loops import Loop, batch, says

def made(count=0):
    loop = Loop(says)
    for i in range(count):
        loop.step(batch(i))
    return fz.capture(loop.step, audit=False)

warnings.simplefilter("always")
folder, secret = Path(sys.argv[1]), sys.argv[2]
step = made()
for i in range(6):
    step(batch(i))
step.save(folder / "step.fzp")
with zipfile.ZipFile(folder / "step.fzp") as archive:
    text = archive.read("programs.json").decode()

def named(value):
    '''Each field that is text, or begins with text, is the name of a file.'''
    if isinstance(value, str):
        return secret
    inner = value.get("tuple") if isinstance(value, dict) else None
    return {{"tuple": [secret, *inner[1:]]}} if inner else value

files = [folder / "step.fzp"]
for kind in ("Warned", "Logged"):
    content = json.loads(text)
    for program in content["programs"]:
        for record in program["records"]:
            if record["is"] == kind:
                record["with"][1:-1] = map(named, record["with"][1:-1])
    files.append(folder / f"{{kind}}.fzp")
    rewritten(folder / "step.fzp", files[-1], content)

opened, is_on = [], [False]

def hook(event, args):
    if is_on[0] and event in ("open", "import", "os.listdir", "subprocess.Popen"):
        opened.append(str(args[0]))

sys.addaudithook(hook)
steps = [made(6) for _ in files]
for each, file in zip(steps, files):
    is_on[0] = True
    try:
        each.load(file)
    except fz.errors.FunctionalizeError as error:
        print("refused", error)
    else:
        for i in range(3):
            each(batch(i))
    is_on[0] = False
    print("replays", each.stats.replays)
print(json.dumps(opened))
"""


def test_a_file_makes_nothing_open_what_it_names(tmp_path: Path) -> None:
    """`linecache` opens the file of a warning that is shown: an audit hook sees the file, and no other one."""
    root = Path(__file__).parents[2]
    script, secret = tmp_path / "hostile_warnings.py", tmp_path / "secret"
    script.write_text(HOSTILE.format(root=str(root)))
    secret.write_text("a line that no other file has\n")
    command = [sys.executable, str(script), str(tmp_path), str(secret)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("refused", "replays"))]
    assert said[0] == "replays 3"
    assert [s.partition(" cannot be loaded: it ")[2] for s in said[1::2]] == [
        "warns or logs as a line of code that the step does not reach: damaged"
    ] * 2
    assert "a line that no other file has" not in done.stderr
    opened = {*json.loads(done.stdout.splitlines()[-1])}
    files = {str(tmp_path / f"{name}.fzp") for name in ("step", "Warned", "Logged")}
    assert files <= opened <= files | {str(root / "tests" / "step" / "saved_loops.py")}


def test_a_warning_of_a_line_outside_of_the_step_is_not_saved(tmp_path: Path) -> None:
    def warns(loop: Loop, loss: Tensor) -> None:
        warnings.warn(f"loss {loss.item()}", stacklevel=4)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(SaveError, match="which is no line of the code that the step reaches"):
            saved_loop(tmp_path / "step.fzp", warns)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a step that logs, prints and warns."""
    path = tmp_path_factory.mktemp("spoken") / "step.fzp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved_loop(path, says)
    return path


def refused_here(path: Path, change: Callable[[Any], None], calls: Any = says) -> str:
    """What a changed file is refused for; nothing was loaded and made."""
    changed(path, change)
    loop = Loop(calls)
    loop.step(batch(0))
    captured = fz.capture(loop.step)
    with pytest.raises(LoadError) as error:
        captured.load(path)
    assert captured.program is None
    return str(error.value).partition("cannot be loaded: it ")[2]


@pytest.mark.parametrize(
    "was, now, message",
    [
        ('"loss %6d %s"', '"loss %699999999d %s"', "write a width below 1000"),
        ('"loss %6d %s"', '"loss %6.99999f %s"', "write a width below 1000"),
        ('"loss %6d %s"', '"loss %*d"', "write a width below 1000"),
        ('"loss %6d %s"', '"loss %(a)d"', "for other values than it takes"),
        ('"loss %6d %s"', '"loss %d %d"', "for other values than it takes"),
        ('"loss %6d %s"', '"loss"', "for other values than it takes"),
        ('"loss %6d %s"', '"loss %n %s"', "which no file may"),
        ('"loss %6d %s"', '"{0.__class__} %d %s"', "whose braces no file may have"),
        ('"loss %6d %s"', '"{1:99999999} %d %s"', "whose braces no file may have"),
        ('"loss %6d %s"', "5", "no constant text"),
        ('"n %7d"', '"n %799999999d"', "write a width below 1000"),
        ('"n %7d"', '"n %(a)d"', "for other values than it takes"),
        ('"n %7d"', '"n %s %s"', "for other values than it takes"),
        ('"n %7d"', '"n"', "for other values than it takes"),
        ('"8d"', '"899999999d"', "prints a number in a format"),
        ('"8d"', '"!!"', "prints a number in a format"),
        ('{"function":"format"}', '{"function":"operator.pow"}', "formats no number"),
        ('{"function":"format"}', '{"type":"builtins:str"}', "formats no number"),
        ('"|"', "5", "no text"),
        ('["at"]', '["msg"]', "sets `msg` of the record"),
        ('["at"]', '["getMessage"]', "sets `getMessage` of the record"),
        ('["at"]', "[7]", "no dict of names"),
        ('"RuntimeWarning"', '"SystemExit"', "`category` is a NoneType"),
        ('"tests.saved_effects",30', '"tests.saved_effects",31', "has no name here"),
        ('"tests.saved_effects",30', '"functionalize",30', "a logger that the step does not"),
    ],
)
def test_a_text_that_a_file_makes_large_or_wrong(
    was: str, now: str, message: str, spoken: Path, tmp_path: Path
) -> None:
    """What the live step's texts may be is bounded when the file is loaded: no call fails or takes memory by it."""
    path = tmp_path / "step.fzp"
    path.write_bytes(spoken.read_bytes())
    seen = []

    def other(content: Any) -> None:
        text = json.dumps(content["programs"], separators=(",", ":"))
        seen.append(text.count(was))
        content["programs"] = json.loads(text.replace(was, now))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert message in refused_here(path, other)
    assert seen[0]


def test_one_part_of_a_text_a_million_times(spoken: Path, tmp_path: Path) -> None:
    """Parts of a file are small, and what refers to them is smaller than the text that it makes."""
    path = tmp_path / "step.fzp"
    path.write_bytes(spoken.read_bytes())

    def longer(content: Any) -> None:
        for each in records(content, "TextPart"):
            if each["with"][0] == {"function": "format"}:
                each["with"][1] = {"tuple": ["999d"]}
        for each in records(content, "TextLeaf"):
            each["with"][0]["tuple"] *= 10_000

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = refused_here(path, longer)
    assert "too long for a file" in said or "do not fit its arguments" in said


class Own(nn.Linear):
    """A module with methods that sources, guards and effects have, and `LateNumber`s read."""

    def _called(self, *args: Any) -> Any:
        raise AssertionError("a file has called it")

    resolve = failure = failure_of = repeat = now = _called
    what = "is a module"


class OwnLoop(Loop):
    def __init__(self) -> None:
        super().__init__(schedules)
        self.model = Own(3, 2)


@pytest.mark.parametrize("kind", ["effect", "source", "guard", "late", "text", "number"])
def test_a_file_calls_no_method_of_the_users(kind: str, tmp_path: Path) -> None:
    """The objects that a file names as the live step's own are data where it puts them."""
    path = tmp_path / "step.fzp"
    loop: Loop = OwnLoop()
    with ample_allowance():
        captured = fz.capture(loop.step, audit=False)
    for i in range(BEFORE):
        captured(batch(i))
    captured.save(path)

    def put(content: Any) -> None:
        live = {"live": "module model"}
        for each in content["programs"]:
            if kind == "effect":
                each["python effects"][0] = live
            elif kind == "guard":
                each["program"]["guards"] = {"tuple": [live]}
        if kind == "source":
            records(content, "InputSpec")[0]["with"][4] = live
        elif kind == "late":
            records(content, "LateNumber")[0]["with"][1] = live
        elif kind == "number":
            records(content, "ScalarInput")[0]["with"][0] = live
        elif kind == "text":
            content["programs"][0]["records"].append(
                {"is": "TextPart", "with": [live, {"tuple": []}, "", None]}
            )

    changed(path, put)
    ours = OwnLoop()
    ours.step(batch(0))
    with pytest.raises(
        LoadError,
        match=r"nowhere|is a Own|`python_effects` is|no guard|no call sets|no effect|formats no number",
    ):
        fz.capture(ours.step).load(path)


@pytest.mark.parametrize(
    "kind, change",
    [
        ("SchedulerNumber", lambda r: r["with"].__setitem__(2, 5)),
        ("SchedulerNumber", lambda r: r["with"].__setitem__(3, {"type": "builtins:str"})),
        ("SchedulerStepped", lambda r: r["with"].__setitem__(1, len(type(r).__mro__))),
        ("GroupNumber", lambda r: r["with"].__setitem__(0, {"live": "module model"})),
        ("GroupNumber", lambda r: r["with"].__setitem__(1, -1)),
    ],
)
def test_a_number_of_a_scheduler_that_is_none(kind: str, change: Any, tmp_path: Path) -> None:
    path = tmp_path / "step.fzp"
    saved_loop(path, schedules)

    def other(content: Any) -> None:
        each = records(content, kind)[0]
        if kind == "SchedulerNumber":
            each["with"][1] = "last_epoch"
        change(each)

    refused_here(path, other, schedules)


@pytest.mark.parametrize(
    "say, message",
    [
        (lambda loop: log.warning("%1000d", loop.n), "write a width below 1000"),
        (lambda loop: log.warning("%*d", 5, loop.n), "write a width below 1000"),
        (lambda loop: print(f"{loop.n:1000d}"), "prints a number in a format"),
    ],
)
def test_what_would_not_be_loaded_is_not_saved(say: Any, message: str, tmp_path: Path) -> None:
    def calls(loop: Loop, loss: Tensor) -> None:
        say(loop)

    with pytest.raises(SaveError, match=message):
        saved_loop(tmp_path / "step.fzp", calls)
    assert not list(tmp_path.iterdir())
