"""What every test gets: snapshots, hypothesis profiles, and a check that nothing stays patched.

``--fuzz-long`` makes the property tests draw many more examples, at random; without it they draw
the same ones every time. Tests with the mark ``long`` run where a path or ``-m`` asks for them, those with the mark
``fuzz`` where ``-m fuzz`` does.
"""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.common_utils  # loads a profile of hypothesis: before ours
from hypothesis import HealthCheck, settings

from tests.allowance import ample_allowance
from tests.expect import OrphanCheck, Snapshots
from tests.leftovers import leftovers, restore, settle_process
from tests.ranks import close_pools

_SNAPSHOTS = pytest.StashKey[Snapshots]()

# Nothing is judged by its time: on a busy machine the first run of an op can take a second.
settings.register_profile(
    "any",
    settings.get_profile("default"),  # not torch's, which draws 10 examples
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# `derandomize` is said in both: under CI=true hypothesis changes what a profile starts from.
settings.register_profile("ci", settings.get_profile("any"), derandomize=True)
settings.register_profile("long", settings.get_profile("any"), derandomize=False, max_examples=5000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-long",
        action="store_true",
        help="property tests draw 5000 random examples each, instead of 100 fixed ones",
    )


def pytest_configure(config: pytest.Config) -> None:
    is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    if hasattr(config, "workerinput"):  # which has the paths as arguments in either case
        config.option.markexpr = config.workerinput["markexpr"]
    elif "fuzz" not in (asked := config.option.markexpr):
        asked = asked or ("not long" if is_whole else "")
        config.option.markexpr = f"({asked}) and not fuzz" if asked else "not fuzz"
    settings.load_profile("long" if config.getoption("--fuzz-long") else "ci")
    settle_process()
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
    accept = bool(os.environ.get("EXPECTTEST_ACCEPT"))
    config.stash[_SNAPSHOTS] = snapshots = Snapshots(config.rootpath, accept)
    config.pluginmanager.register(OrphanCheck(config, snapshots), "orphan-snapshots")
    # Inductor's cache does not tell instruction sets apart: it would find code that it then cannot compile.
    cache = os.environ.get(
        "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "inductor")
    )
    capability = torch.backends.cpu.get_cpu_capability()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, capability)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Before a worker of pytest-xdist starts."""
    node.workerinput["markexpr"] = node.config.option.markexpr


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist; elsewhere `atexit` does it
        close_pools()


@pytest.fixture(name="ample_allowance")
def steps_may_cost_what_they_like() -> Iterator[None]:
    """For tests of what is recorded, within a few calls, and not of how often: `tests/allowance.py`."""
    with ample_allowance():
        yield


@pytest.fixture
def expect(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``expect(case, text)``: compare ``text`` with the snapshot ``case`` of this test module."""
    return functools.partial(request.config.stash[_SNAPSHOTS].expect, request)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Full collections visit only what the tests of this module made, not torch and what the modules before it hold."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves torch patched, a mode on, or gradients off, and clean up after it.

    A process group that a test makes in this process goes with it: fake worlds make their own.
    """
    had_group = dist.is_initialized()
    yield
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()
    if problems := leftovers():
        restore()
        pytest.fail("the test left torch changed: " + "; ".join(problems), pytrace=False)
