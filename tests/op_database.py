"""torch's op database for tests: its ops, what a user calls for one, and a context in which reading it is cheap."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy
import torch

from tests.discharge.eager import one_thread

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_methods_invocations, common_utils
    from torch.testing._internal.opinfo import core

OPS: list[Any] = common_methods_invocations.op_db


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def function_of(op: Any) -> Callable[..., Any]:
    """The function that a user of this op calls: a recording replaces some of `torch` and `torch.linalg`."""
    module, _, name = op.name.rpartition(".")
    owner = {"": torch, "linalg": torch.linalg}.get(module)
    if module == "" and getattr(op.op, "__name__", "") != name:
        return op.op  # type: ignore[no-any-return]
    return getattr(owner, name, op.op)  # type: ignore[no-any-return]


def _set_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


@contextmanager
def plain_runs() -> Iterator[None]:
    """One thread, no warnings of torch's about odd arguments, no seeds set by an op itself, and no names of tests.

    For each op the database reads the source of every frame on the stack, to find the test that runs, and
    `torch.manual_seed` formats the stack for each kind of device: most of the time here.
    """
    with ExitStack() as stack:
        for owner, name, new in (
            (common_methods_invocations, "wrapper_set_seed", lambda op, *a, **k: op(*a, **k)),
            (common_utils, "extract_test_fn", lambda: None),
            (core, "extract_test_fn", lambda: None),
            (common_utils, "set_rng_seed", _set_seed),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(one_thread())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield
