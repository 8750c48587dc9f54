"""torch's own autograd tests with each backward traced, where torch's file is there; the list of those that fail."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.step_backward import torch_autograd
from tests.step_backward.torch_autograd_skips import SKIPS

LISTED = {name: reason for reason, names in SKIPS.items() for name in names}
NAMES = torch_autograd.names() if torch_autograd.path() else []


def test_the_list_is_shorter_than_that_of_compiled_autograd() -> None:
    listed = Counter(name for names in SKIPS.values() for name in names)
    assert max(listed.values()) == 1
    assert len(listed) < 82


@pytest.mark.skipif(not NAMES, reason=torch_autograd.MISSING)
@pytest.mark.parametrize("name", NAMES)
def test_as_torch_expects(name: str) -> None:
    outcome = torch_autograd.run(name)
    if outcome.skipped is not None:
        pytest.skip(outcome.skipped)
    if name in LISTED:
        assert outcome.error is not None, f"`{name}` passes: take it off the list"
    else:
        assert outcome.error is None, outcome.error
