"""Tests of the snapshot helper: what fails, with which words, and who is an orphan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import settings

from tests.expect import NEWEST, PINNED, OrphanCheck, Snapshots, normalise
from tests.forks import Fork

pytest_plugins = ["pytester"]

MODULE = "tests/core/test_resize.py"


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    file = tmp_path / "expect/core/resize/grow.txt"
    file.parent.mkdir(parents=True)
    file.write_text("one\ntwo\n")
    (tmp_path / MODULE).parent.mkdir(parents=True)
    (tmp_path / MODULE).touch()
    return Snapshots(tmp_path, release=PINNED)


def ask(snapshots: Snapshots, case: str, text: str) -> None:
    snapshots.expect(snapshots.tests.parent / MODULE, case, text)


def failure(snapshots: Snapshots, case: str, text: str) -> str:
    with pytest.raises(AssertionError) as caught:
        ask(snapshots, case, text)
    return str(caught.value)


def test_normalise() -> None:
    assert normalise("\n a  \r\n\nb\t\n\n\n") == "\n a\n\nb\n"
    assert normalise("a") == "a\n"


def test_same_text_passes(snapshots: Snapshots) -> None:
    ask(snapshots, "grow", "one  \ntwo\n\n")


def test_mismatch_is_a_diff(snapshots: Snapshots) -> None:
    assert_expected_inline(
        failure(snapshots, "grow", "one\nthree"),
        """\
expect/core/resize/grow.txt: differs. \
To accept: EXPECTTEST_ACCEPT=1 python -m pytest tests/core/test_resize.py
--- expect/core/resize/grow.txt
+++ now
@@ -1,2 +1,2 @@
 one
-two
+three""",
    )


def test_missing_file_says_how_to_accept(snapshots: Snapshots) -> None:
    assert_expected_inline(
        failure(snapshots, "shrink", "one"),
        """\
expect/core/resize/shrink.txt: no such snapshot. \
To accept: EXPECTTEST_ACCEPT=1 python -m pytest tests/core/test_resize.py
It would hold:
one
""",
    )


def test_accept_writes(snapshots: Snapshots) -> None:
    snapshots.accept = True
    ask(snapshots, "grow", "new")
    ask(snapshots, "shrink", "new, too")
    snapshots.accept = False
    ask(snapshots, "grow", "new")
    ask(snapshots, "shrink", "new, too")


def test_one_case_with_two_texts(snapshots: Snapshots) -> None:
    snapshots.accept = True
    ask(snapshots, "grow", "new")
    ask(snapshots, "grow", "new")
    assert "asked for twice, with two texts" in failure(snapshots, "grow", "newer")


@pytest.mark.parametrize("case", ["", "a b", "a/b", "../a"])
def test_case_is_one_word(snapshots: Snapshots, case: str) -> None:
    with pytest.raises(ValueError, match="use one word"):
        ask(snapshots, case, "one")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("<function f at 0x7f12ab34cd>", "a memory address, '0x7f12ab34cd'"),
        ("# File: /home/me/x.py:3 in f", "an absolute path, '/home/me/x.py'"),
        ("/usr/lib", "an absolute path, '/usr/lib'"),
        ("open('/tmp/x')", "an absolute path, '/tmp/x'"),
        (r"C:\x", "an absolute path, 'C:\\\\x'"),
    ],
)
def test_unstable_text_is_refused(snapshots: Snapshots, text: str, what: str) -> None:
    snapshots.accept = True
    message = failure(snapshots, "grow", f"x\n{text}\n")
    assert message.startswith(f"expect/core/resize/grow.txt: the text holds {what}; print it")
    assert snapshots.folder(snapshots.tests / "core/test_resize.py").joinpath("grow.txt").exists()


@pytest.mark.parametrize("text", ["0xff", "a/b/c", "s0//2", "see https://a.org/b/c", "1 / 2"])
def test_stable_text_is_not(snapshots: Snapshots, text: str) -> None:
    snapshots.accept = True
    ask(snapshots, "grow", text)


# ---- releases of torch ---------------------------------------------------------------------------

BETWEEN = "2.12"


def test_the_newest_release_has_its_own_text(snapshots: Snapshots) -> None:
    file = snapshots.folder(snapshots.tests / "core/test_resize.py") / f"grow.torch-{NEWEST}.txt"
    newest = Snapshots(snapshots.tests.parent, accept=True, release=NEWEST)
    ask(newest, "grow", "one\ntwo")
    assert not file.exists()  # the pinned release's is right
    newest = Snapshots(snapshots.tests.parent, accept=True, release=NEWEST)
    ask(newest, "grow", "new")
    assert file.read_text() == "new\n"
    ask(snapshots, "grow", "one\ntwo")
    newest = Snapshots(snapshots.tests.parent, release=NEWEST)
    assert f"grow.torch-{NEWEST}.txt: differs. To accept" in failure(newest, "grow", "one\ntwo")
    newest = Snapshots(snapshots.tests.parent, accept=True, release=NEWEST)
    ask(newest, "grow", "one\ntwo")
    assert not file.exists()


def test_a_release_between_gives_one_of_the_two(snapshots: Snapshots) -> None:
    root = snapshots.tests.parent
    between = Snapshots(root, release=BETWEEN)
    ask(between, "grow", "one\ntwo")
    message = failure(Snapshots(root, release=BETWEEN), "grow", "new")
    assert f"torch {BETWEEN} is neither {PINNED} nor {NEWEST}: it has no snapshot" in message
    ask(Snapshots(root, accept=True, release=NEWEST), "grow", "new")
    ask(Snapshots(root, release=BETWEEN), "grow", "new")
    ask(Snapshots(root, accept=True, release=BETWEEN), "grow", "one\ntwo")
    with pytest.raises(AssertionError, match="differs"):  # and accepts nothing
        ask(Snapshots(root, accept=True, release=BETWEEN), "grow", "newer")


# ---- orphans: sessions of their own, in which tests/conftest.py is a plugin ----------------------


class Project:
    """A small project whose ``test_a.py`` asks for ``one`` and ``two``, with an orphan beside."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.root = pytester.path
        self.orphan = self.root / "expect/a/three.txt"
        pytester.makepyprojecttoml("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
        self.write(
            "tests/test_a.py",
            "def test_one(expect):\n    expect('one', '1')\n"
            "def test_two(expect):\n    expect('two', '2')\n",
        )
        for name, text in [("one", "1\n"), ("two", "2\n"), ("three", "3\n")]:
            self.write(f"expect/a/{name}.txt", text)

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, *args: str) -> tuple[int, str]:
        result = self.pytester.runpytest_inprocess(
            "-p", "tests.conftest", "-p", "no:cacheprovider", *args
        )
        return int(result.ret), result.stdout.str()


@pytest.fixture
def project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Iterator[Project]:
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    yield Project(pytester)
    # The profile is the process's, not the session's: give it back to the outer session.
    settings.load_profile("long" if pytestconfig.getoption("--fuzz-long") else "ci")


def test_orphan_fails_the_session(project: Project) -> None:
    code, out = project.run()
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "2 passed" in out
    assert "ORPHAN expect/a/three.txt" in out
    assert "EXPECTTEST_ACCEPT=1 deletes them" in out
    assert project.orphan.exists()


def test_no_orphan_no_failure(project: Project) -> None:
    project.orphan.unlink()
    code, out = project.run()
    assert code == 0
    assert "orphan snapshots" not in out


@pytest.mark.parametrize(
    "args",
    [
        ["-k", "one"],
        ["--deselect", "tests/test_a.py::test_two"],
        ["tests/test_a.py::test_one"],
        ["tests/test_a.py::test_one", "tests/test_a.py::test_two"],
        ["--collect-only"],
    ],
)
def test_partial_run_is_not_judged(project: Project, args: list[str]) -> None:
    code, out = project.run(*args)
    assert code == 0
    assert "orphan snapshots" not in out


@pytest.mark.parametrize(
    "line", ["pytest.skip('no')", "pytest.xfail('no')", "assert False", "raise OSError"]
)
def test_a_test_that_did_not_pass_might_have_asked(project: Project, line: str) -> None:
    project.write("tests/test_a.py", f"import pytest\ndef test_one():\n    {line}\n")
    code, out = project.run()
    assert code == (0 if "pytest" in line else 1)
    assert "orphan snapshots" not in out


def test_last_failed_is_not_judged(project: Project) -> None:
    project.write("expect/a/one.txt", "0\n")
    command = ["-p", "tests.conftest"]
    project.pytester.runpytest_inprocess(*command)
    project.write("expect/a/one.txt", "1\n")
    result = project.pytester.runpytest_inprocess(*command, "--lf")
    result.assert_outcomes(passed=1)
    assert result.ret == 0


def test_other_modules_are_judged_on_their_own(project: Project) -> None:
    project.write("tests/test_b.py", "def test_b():\n    assert False\n")
    project.write("expect/b/x.txt", "x\n")
    _, out = project.run()
    assert "ORPHAN expect/a/three.txt" in out
    assert "expect/b" not in out


def test_folder_without_a_test_module(project: Project) -> None:
    project.orphan.unlink()
    project.write("expect/core/gone/x.txt", "x\n")
    code, out = project.run("tests/test_a.py")
    assert code == 1, "tests/test_a.py is all there is to collect"
    assert "ORPHAN expect/core/gone/x.txt" in out
    project.write("tests/test_b.py", "def test_b():\n    pass\n")
    code, out = project.run("tests/test_a.py")
    assert code == 0
    assert "orphan snapshots" not in out


def test_accept_deletes_orphans(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write("expect/core/gone/x.txt", "x\n")
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    code, out = project.run()
    assert code == 0
    assert "DELETED expect/a/three.txt" in out
    assert "DELETED expect/core/gone/x.txt" in out
    assert not project.orphan.exists()
    assert not (project.root / "expect/core").exists()
    assert (project.root / "expect/a/one.txt").exists()


def test_the_controller_of_xdist_judges(project: Project) -> None:
    """Each of the two tests runs in a worker of its own, which asks for one of the two snapshots."""
    pytest.importorskip("xdist")
    code, out = project.run("-n", "2", "--dist", "load")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "2 passed" in out
    assert [line for line in out.splitlines() if line.startswith("ORPHAN")] == [
        "ORPHAN expect/a/three.txt"
    ]


@pytest.mark.parametrize("died", [False, True])
def test_the_controller_judges_nothing_once_a_worker_died(tmp_path: Path, died: bool) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(collectonly=False))
    check, session = OrphanCheck(config, Snapshots(tmp_path)), SimpleNamespace(exitstatus=0)
    orphan = tmp_path / "expect/a/three.txt"
    orphan.parent.mkdir(parents=True)
    orphan.touch()
    check.modules[tmp_path / "tests/test_a.py"] = {"tests/test_a.py::test_one"}
    check.passed.add("tests/test_a.py::test_one")
    check.pytest_testnodedown(SimpleNamespace(workeroutput={"orphans": check._report()}), None)
    if died:
        check.pytest_testnodedown(SimpleNamespace(), "crashed")
    check.pytest_sessionfinish(session, pytest.ExitCode.OK)  # type: ignore[arg-type]
    assert check.found == ([] if died else [orphan])


# ---- conftest: nothing left behind ---------------------------------------------------------------


LEFT_BEHIND = {
    "torch.UntypedStorage.resize_ = lambda *a: None": "UntypedStorage.resize_ is still patched",
    "torch.TypedStorage.resize_ = lambda *a: None": "TypedStorage.resize_ is still patched",
    "torch.set_grad_enabled(False)": "gradients are still off",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "the number of threads: *, was *",
    "torch.set_default_dtype(torch.float64)": "the default dtype: torch.float64, was torch.float32",
    "torch.use_deterministic_algorithms(True, warn_only=True)": (
        "(deterministic algorithms, warn only): (True, True), was (False, False)"
    ),
    "torch.set_float32_matmul_precision('medium')": "the float32 matmul precision: medium, was highest",
    "torch.set_anomaly_enabled(True)": "anomaly detection: True, was False",
    "torch.set_warn_always(True)": "`torch.set_warn_always`: True, was False",
    "torch.set_autocast_enabled('cpu', True)": "autocast on CPUs: True, was False",
    "torch.set_autocast_dtype('cpu', torch.float16)": (
        "the dtype of autocast on CPUs: torch.float16, was torch.bfloat16"
    ),
    "gc.disable()": "the garbage collector's switch: False, was True",
    "gc.set_threshold(7, 7, 7)": "the thresholds of the garbage collector: (7, 7, 7), was *",
    "FakeTensorMode().__enter__()": "FakeTensorMode is still on",
    "TorchDispatchMode().__enter__()": "TorchDispatchMode is still on",
    "BaseTorchFunctionMode().__enter__()": "BaseTorchFunctionMode is still on",
}


def test_left_behind_is_an_error_and_is_cleaned_up(project: Project) -> None:
    tests = "".join(
        f"def test_guilty_{i}():\n    {line}\ndef test_innocent_{i}():\n    pass\n"
        for i, line in enumerate(LEFT_BEHIND)
    )
    project.write(
        "tests/test_c.py",
        "import gc\n"
        "import torch\n"
        "from torch._subclasses import FakeTensorMode\n"
        "from torch.overrides import BaseTorchFunctionMode\n"
        "from torch.utils._python_dispatch import TorchDispatchMode\n" + tests,
    )
    # A process of its own: in this one pytester would forget modules that torch imports lazily,
    # and torch cannot import them twice.
    command = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-rE", "tests/test_c.py"]
    ran = Fork(pytest.main, command, folder=project.root).done()
    outcomes = pytest.RunResult.parse_summary_nouns(ran.stdout.splitlines())
    assert outcomes == {"passed": 2 * len(LEFT_BEHIND), "errors": len(LEFT_BEHIND)}, ran
    lines = pytest.LineMatcher(ran.stdout.splitlines())
    for i, problem in enumerate(LEFT_BEHIND.values()):
        lines.fnmatch_lines([f"ERROR *::test_guilty_{i} - *"])
        lines.fnmatch_lines([f"the test left torch changed: {problem}"])


def test_fuzz_profiles(project: Project) -> None:
    project.write(
        "tests/test_c.py",
        "import torch.testing._internal.common_utils\n"  # which has profiles of its own
        "from hypothesis import settings\n"
        "def test_c(request):\n"
        "    long = request.config.getoption('--fuzz-long')\n"
        "    assert settings.default.derandomize is not long\n"
        "    assert settings.default.max_examples == (5000 if long else 100)\n"
        "    assert settings.default.deadline is None\n",
    )
    for options in ([], ["--fuzz-long"]):
        command = ["-p", "tests.conftest", "-p", "no:cacheprovider", *options, "tests/test_c.py"]
        ran = Fork(pytest.main, command, folder=project.root).done()
        assert pytest.RunResult.parse_summary_nouns(ran.stdout.splitlines()) == {"passed": 1}, ran
