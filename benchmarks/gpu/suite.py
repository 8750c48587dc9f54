"""The tests whose files name CUDA, each file by pytest in its own process: counts, and the names of those that fail.

tests/passes/test_offload.py: failed        0        0
tests/passes/test_offload.py: skipped for want of a GPU        0        0
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Prediction, Rows

ROOT = Path(__file__).parents[2]
_SECONDS = 480  # of all files
_WITHOUT = "not torch.cuda.is_available()"  # in the condition of a test that is skipped on a CPU
_REASON = "needs a GPU"


def files(small: bool) -> list[str]:
    """Those with tests that need a GPU, then, unless `small`, all others that name CUDA."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    found = [path for path, text in texts.items() if _WITHOUT in text]
    if not small:
        found += [path for path, text in texts.items() if "cuda" in text and path not in found]
    return [str(path.relative_to(ROOT)) for path in found]


def predict(options: Options) -> dict[str, Prediction]:
    """No test fails; with a GPU none is skipped because there is none."""
    found = {}
    for name in files(options.small):
        found[f"{name}: failed"] = Prediction(0)
        if options.device == "cuda":
            found[f"{name}: skipped for want of a GPU"] = Prediction(0)
    return found


def measure(options: Options, rows: Rows) -> None:
    """Run the files while there is time."""
    end = time.monotonic() + _SECONDS
    for name in files(options.small):
        with rows.guarded(f"{name}: failed"), tempfile.TemporaryDirectory() as folder:
            left = end - time.monotonic()
            if left < 1:
                raise TimeoutError(f"the {_SECONDS} s of this part have passed")
            report = Path(folder, "report.xml")
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
                + ["-k", "gpu"] * options.small
                + [f"--junitxml={report}", name],
                cwd=ROOT,
                timeout=left,
                capture_output=True,
                text=True,
            )
            if not report.exists():
                raise RuntimeError((done.stdout + done.stderr).strip()[-300:])
            _add(name, report, rows)


def _add(name: str, report: Path, rows: Rows) -> None:
    tests = list(ElementTree.parse(report).iter("testcase"))
    failed = [test for test in tests if {"failure", "error"} & {child.tag for child in test}]
    skipped = list(_skipped(tests))
    missing = sum(_REASON in reason for reason in skipped)
    rows.add(f"{name}: passed", len(tests) - len(failed) - len(skipped))
    rows.add(
        f"{name}: failed", len(failed), note=", ".join(test.get("name", "") for test in failed)
    )
    rows.add(f"{name}: skipped", len(skipped), note="; ".join(dict.fromkeys(skipped)))
    rows.add(f"{name}: skipped for want of a GPU", missing)


def _skipped(tests: list[ElementTree.Element]) -> Iterator[str]:
    for test in tests:
        for child in test:
            if child.tag == "skipped":
                yield child.get("message", "")
