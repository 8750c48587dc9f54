"""The sizes at which ranks have compared calls with predictions, in the store of a process group.

    shared = SharedSizes.of(program, digest, known)    digest: of the op stream for all sizes, equal on ranks that share
    shared.publish((37,))                              on this rank a call of these sizes was as predicted
    shared.publish((37,), is_due=True)                 it was compared because one in so many is
    shared.teach(known)                                adds the sizes that other ranks have published

Where ranks have lengths of their own, all others wait for a rank that compares. What torch does at a size is the same
on all ranks that run the same ops on the same kind of machine, so one comparison is enough for all of them. What Python
does is not taken over from others. One in so many new sizes is compared whatever is known: on one of these ranks.
Invariant: nothing waits for another rank. What a rank reads depends on when it reads, and so does whether it compares;
the bits of a result do not. If the store fails, nothing is shared any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from functionalize._compat.distributed import group_of_name, store_of_group
from functionalize.program.collective_order import groups_of
from functionalize.program.executable import Executable
from functionalize.templates.fitting import Sizes

_LOST, _DUE = "lost", "due "
_MOST_READ = 256  # of what thousands of ranks have published at once


class Known(Protocol):
    """What one rank knows: `Coverage`."""

    compared: list[Sizes]
    elsewhere: list[Sizes]
    lost: str | None

    def was_due(self) -> None:
        """A size was compared because one in so many is."""


class SharedSizes:
    """The published sizes of one class of calls."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._read = 0

    @staticmethod
    def of(program: Executable, digest: str, coverage: Known) -> SharedSizes:
        """What the ranks share with which a program communicates. coverage: of this rank, which is published."""
        nodes = program.graph.nodes
        names = dict.fromkeys(name for node in nodes for name in groups_of(node.target, node.args))
        groups = (group_of_name(name) for name in names)
        stores = (store_of_group(group) for group in groups if group.size() > 1)
        shared = SharedSizes(next(stores, None), f"functionalize/compared/{digest}")
        for sizes in coverage.compared:
            shared.publish(sizes)
        return shared

    def publish(self, sizes: Sizes | None, is_due: bool = False) -> None:
        """Let other ranks know that a call of these sizes was as predicted; None: that one was not.

        is_due: it was compared because one in so many is.
        """
        text = _LOST if sizes is None else _DUE * is_due + ",".join(map(str, sizes))
        if self._store is None:
            return
        with self._failing():
            self._store.set(f"{self._key}/{self._count(1)}", text)

    def teach(self, coverage: Known) -> bool:
        """Add what was published since the last call; whether it was new."""
        known, is_new = {*coverage.compared, *coverage.elsewhere}, False
        for text in self._news():
            if text == _LOST:
                coverage.lost = coverage.lost or "a call was not as predicted on another rank"
                is_new = True
            elif (sizes := _sizes_of(text)) not in known:
                known.add(sizes)
                coverage.elsewhere.append(sizes)
                is_new = True
                if text.startswith(_DUE):
                    coverage.was_due()
        return is_new

    def _news(self) -> list[str]:
        found: list[str] = []
        if self._store is None:
            return found
        with self._failing():
            count = self._count(0)
            for number in range(max(self._read, count - _MOST_READ) + 1, count + 1):
                key = f"{self._key}/{number}"
                if not self._store.check([key]):  # it is published at this moment
                    break
                found.append(self._store.get(key).decode())
                self._read = number
        return found

    def _count(self, by: int) -> int:
        return int(self._store.add(f"{self._key}/count", by))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """In it the store may fail."""
        try:
            yield
        except RuntimeError:
            self._store = None


def _sizes_of(text: str) -> Sizes:
    return tuple(map(int, text.removeprefix(_DUE).split(",")))
