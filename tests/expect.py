"""Snapshots: the text a reader should see, kept in a file and compared on every run.

    def test_resize(expect):
        expect("grown_then_freed", program_text)

reads ``expect/<path of the test module, without tests/, test_ and .py>/grown_then_freed.txt``
and fails with a diff when the two differ. ``EXPECTTEST_ACCEPT=1`` writes the file instead; what
was written is to be read by eye before it is committed.

Note [Releases]
~~~~~~~~~~~~~~~
torch itself emits other ops from release to release. ``case.txt`` is what the pinned release gives;
where the newest one gives another text, that is in ``case.torch-2.15.txt``. Each of the two is asserted
on its release; on every other one the text must be one of the two.

Every file must be asked for: see Note [Orphans]. Refused in a snapshot: memory addresses and
absolute paths, which would differ on the next run or on the next machine.

Note [Orphans]
~~~~~~~~~~~~~~
A snapshot that no test asks for is a test that silently stopped running. ``OrphanCheck`` fails
the session for it, but only where it can know: in the folder of a test module of which every
test was collected, ran and passed. A deselected, skipped, xfailed or failed test might have been
the one that asks. A folder without any test module is judged when the whole of ``tests/`` was
collected. Under pytest-xdist every worker reports what it collected and what its tests asked for,
and the controller judges; it judges nothing if a worker died. Under ``EXPECTTEST_ACCEPT=1`` an
orphan is deleted.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from functionalize.fsdp.releases import TESTED
from functionalize.util.torch_release import minor_of

PINNED = "2.13"  # what the Makefile installs by default
NEWEST = ".".join(map(str, minor_of(TESTED[-1])))
HERE = ".".join(map(str, minor_of(torch.__version__)))

_CASE = re.compile(r"[\w.=+-]+")
_UNSTABLE = {
    "a memory address": re.compile(r"0x[0-9a-f]{6,}", re.IGNORECASE),
    # Two components at least, not preceded by a word: neither "a/b", "s0//2" nor a URL.
    "an absolute path": re.compile(
        r"(?:^|(?<=[\s\"'`(\[{<=,:]))(?:/[\w.@+~-]+){2,}|\b[A-Za-z]:\\\w"
    ),
}


def normalise(text: str) -> str:
    """Return ``text`` without trailing blanks or blank lines, and with one newline at its end."""
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(lines).rstrip("\n") + "\n"


class Snapshots:
    """The snapshots of one project: ``root/tests`` asks, ``root/expect`` answers."""

    def __init__(self, root: Path, accept: bool = False, release: str = HERE) -> None:
        """Compare with the files under ``root/expect``, or write them if ``accept``; see Note [Releases]."""
        self.release = release
        self.tests = root / "tests"
        self.files = root / "expect"
        self.accept = accept
        self.asked: dict[Path, str] = {}

    def folder(self, module: Path) -> Path:
        """Return the folder of a test module: ``tests/a/test_b.py`` has ``expect/a/b``."""
        inside = module.relative_to(self.tests)
        return self.files / inside.with_name(inside.stem.removeprefix("test_"))

    def module(self, folder: Path) -> Path:
        """Return the test module that a folder belongs to, whether or not it exists."""
        inside = folder.relative_to(self.files)
        return self.tests / inside.parent / f"test_{inside.name}.py"

    def expect(self, where: pytest.FixtureRequest | Path, case: str, text: str) -> None:
        """Fail unless ``text`` is what the file of ``case`` holds.

        Args:
            where: the test's ``request``, or the path of its module.
            case: the file's name without ``.txt``; one word, unique in its module.
            text: what to compare, after ``normalise``.

        Raises:
            AssertionError: the file is missing or differs, or one case was asked for with two
                texts, or the text would not be the same on another machine.
            ValueError: ``case`` is not one word.
        """
        __tracebackhide__ = True
        module = where if isinstance(where, Path) else where.path
        if not _CASE.fullmatch(case):
            raise ValueError(f"snapshot case {case!r}: use one word of letters, digits and _.=+-")
        file = self.folder(module) / f"{case}.txt"
        name = file.relative_to(self.files.parent).as_posix()
        text = normalise(text)
        for what, pattern in _UNSTABLE.items():
            if found := pattern.search(text):
                raise AssertionError(
                    f"{name}: the text holds {what}, {found[0]!r}; print it without, or the "
                    "snapshot fails elsewhere"
                )
        if self.asked.setdefault(file, text) != text:
            raise AssertionError(
                f"{name}: asked for twice, with two texts; give each its own case\n"
                + _diff(self.asked[file], text, "first", "second")
            )
        newest = file.with_name(f"{case}.torch-{NEWEST}.txt")
        self.asked.setdefault(newest, text)
        if self.release not in (PINNED, NEWEST):
            if text in (_read(file), _read(newest)):
                return
            known = _read(file)
            hint = f"torch {self.release} is neither {PINNED} nor {NEWEST}: it has no snapshot of its own"
            raise AssertionError(
                f"{name}: differs. {hint}\n{_diff(known or '', text, name, 'now')}"
            )
        if self.release == NEWEST and (newest.exists() or (self.accept and file.exists())):
            file, pinned = newest, _read(file)
            if self.accept and text == pinned:
                newest.unlink(missing_ok=True)
                return
        known = _read(file)
        if known == text:
            return
        if self.accept:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
            return
        test = module.relative_to(self.files.parent).as_posix()
        name = file.relative_to(self.files.parent).as_posix()
        hint = f"To accept: EXPECTTEST_ACCEPT=1 python -m pytest {test}"
        if known is None:
            raise AssertionError(f"{name}: no such snapshot. {hint}\nIt would hold:\n{text}")
        raise AssertionError(f"{name}: differs. {hint}\n{_diff(known, text, name, 'now')}")

    def orphans(self, complete: set[Path], whole: bool) -> list[Path]:
        """Return the files that nobody asked for, as far as one can know (Note [Orphans]).

        Args:
            complete: the test modules of which every test ran and passed.
            whole: whether all of ``tests/`` was collected, so that a file of no test module at
                all is to be reported too.
        """
        files = sorted(p for p in self.files.rglob("*") if p.is_file())
        found = []
        for file in files:
            module = self.module(file.parent)
            judged = module in complete or (whole and not module.exists())
            if judged and file not in self.asked:
                found.append(file)
        return found

    def delete(self, file: Path) -> None:
        """Delete a snapshot, and the folders that it leaves empty."""
        file.unlink()
        for folder in file.parents:
            if folder == self.files.parent or any(folder.iterdir()):
                return
            folder.rmdir()


def _read(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


def _diff(old: str, new: str, old_name: str, new_name: str) -> str:
    pair = old.splitlines(), new.splitlines()
    return "\n".join(difflib.unified_diff(*pair, old_name, new_name, lineterm=""))


class OrphanCheck:
    """A pytest plugin that watches which modules ran completely, and judges at the end."""

    def __init__(self, config: pytest.Config, snapshots: Snapshots) -> None:
        """Watch the session of ``config``."""
        self.config = config
        self.snapshots = snapshots
        self.modules: dict[Path, set[str]] = {}  # the node ids that were collected
        self.collected: set[Path] = set()  # also modules without any test
        self.partial: set[Path] = set()
        self.passed: set[str] = set()
        self.spoiled: set[str] = set()
        self.lost = False  # a worker of pytest-xdist died, and with it what its tests asked for
        self.found: list[Path] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        path = self.config.rootpath / report.nodeid.split("::")[0]
        self.collected.add(path)
        if not report.passed:
            self.partial.add(path)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.partial.update(item.path for item in items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.modules.setdefault(item.path, set()).add(item.nodeid)
        for arg in self.config.args:
            path, *node = arg.split("::")
            if node:  # tests asked for by name: the others are not even "deselected"
                self.partial.add(Path(os.path.abspath(self.config.invocation_params.dir / path)))
        if self.config.getoption("lf", False):  # --last-failed filters without a word, too
            self.partial.update(self.modules)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.spoiled.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["orphans"] = self._report()
            return
        if self.lost or self.config.option.collectonly:
            return
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        ran = self.passed - self.spoiled
        complete = {m for m, ids in self.modules.items() if ids <= ran and m not in self.partial}
        on_disk = set(self.snapshots.tests.rglob("test_*.py"))
        whole = not self.partial and on_disk <= self.collected
        self.found = self.snapshots.orphans(complete, whole)
        if self.snapshots.accept:
            for file in self.found:
                self.snapshots.delete(file)
        elif self.found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _report(self) -> dict[str, object]:
        """What the controller must know of this worker, in types that pytest-xdist transmits."""
        return {
            "asked": [str(file) for file in self.snapshots.asked],
            "modules": {str(module): sorted(ids) for module, ids in self.modules.items()},
            "collected": [str(path) for path in self.collected],
            "partial": [str(path) for path in self.partial],
        }

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """In the controller of pytest-xdist, which collects nothing itself: merge the report of a worker."""
        report = getattr(node, "workeroutput", {}).get("orphans")
        if report is None:
            self.lost = True
            return
        self.snapshots.asked.update((Path(file), "") for file in report["asked"])
        self.modules.update((Path(path), set(ids)) for path, ids in report["modules"].items())
        self.collected.update(map(Path, report["collected"]))
        self.partial.update(map(Path, report["partial"]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.found:
            return
        accept = self.snapshots.accept
        terminalreporter.section("orphan snapshots", red=not accept, green=accept)
        for file in self.found:
            name = file.relative_to(self.snapshots.files.parent).as_posix()
            terminalreporter.line(f"{'DELETED' if accept else 'ORPHAN'} {name}")
        if not accept:
            terminalreporter.line("No test asks for them. EXPECTTEST_ACCEPT=1 deletes them.")
