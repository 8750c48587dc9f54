"""The programs of one step, side by side: train and eval, first and last microbatch, sequence lengths.

    cache.matching(key, leaves, spec)    the programs whose guards all hold, with their inputs
    cache.add(key, cached)               adds a program; at the limit the least recently used one is dropped
    unsettled.skips(missed, 5)           whether calls that missed so were recorded five times, and never kept

The key of a call is made of properties of its arguments (shapes, dtypes, numbers). The programs with that key are tried
in order, the last used first; a program's first failing guard ends its trial.
Invariant: at most `limit` programs. After `limit` programs in a row were dropped without a replay, recording stops:
some fact differs at every call, and the warning names it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from functionalize.audit.signature import Signature
from functionalize.fsdp.python_state import FSDPEffects
from functionalize.ir.inputs import Call
from functionalize.program.program import Program
from functionalize.state.python_effects import PythonEffect
from functionalize.state.sources import Slot
from functionalize.step.step_memory import StepMemory
from functionalize.step.vote import Fingerprints
from functionalize.util.structure import odd_keys
from functionalize.util.text import without_numbers
from functionalize.walk.fact_text import NUMBERS

log = logging.getLogger("functionalize")
STRUCTURE = "the structure of the arguments changed"


@dataclass(eq=False)
class CachedProgram:
    """One program of a step, and the effects of a replay on Python objects.

    slots: the slots to which a replay assigns the gradients that the program returns.
    effects: the changes of FSDP2's state in Python.
    python_effects: what a replay repeats in Python, in its order, with the values that the program returns last.
    has_grad_fn: for each leaf of the result, whether it had an autograd history in eager.
    reason: why the call was recorded.
    replays: the number of replays.
    fingerprints: those of the collectives in each process group; empty unless passes may change collectives.
    memory: the memory report; None if lifetimes were not recorded.
    signature: the recorded op stream, with which audited calls are compared; None: the program is not audited.
    audits: the number of audited calls.
    """

    program: Program
    slots: Sequence[Slot]
    effects: FSDPEffects
    has_grad_fn: Sequence[bool]
    reason: str
    replays: int = 0
    fingerprints: Fingerprints = field(default_factory=dict)
    memory: StepMemory | None = None
    signature: Signature | None = None
    audits: int = 0
    python_effects: Sequence[PythonEffect] = ()


def key_of(leaves: Sequence[Any], spec: Any) -> Hashable:
    """The key of a call in the cache; calls with different keys cannot share a program."""
    return (spec, odd_keys(spec), *[_key_of_leaf(leaf) for leaf in leaves])


def _key_of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        try:
            return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
        except RuntimeError:  # a nested tensor, which is refused when the call is recorded
            return "nested", leaf.dtype
    if isinstance(leaf, (float, complex)):
        return repr(leaf)
    return ("number", leaf) if isinstance(leaf, NUMBERS) else ("object", type(leaf))


def _same_numbers(a: CachedProgram, b: CachedProgram) -> bool:
    """Whether Python read the same numbers from tensors in two recordings with the same key."""
    if not a.program.value_guards:
        return False
    facts = [(g.where, repr(g.value)) for g in a.program.value_guards]
    return facts == [(g.where, repr(g.value)) for g in b.program.value_guards]


class ProgramCache:
    """At most `limit` programs of one step, called `name` in messages."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._by_key: dict[Hashable, list[CachedProgram]] = {}
        self._used: OrderedDict[CachedProgram, Hashable] = OrderedDict()  # the last used at the end
        self._misses: Counter[str] = Counter()
        self._example: dict[str, str] = {}
        self._unused_in_a_row = 0
        self.reason = ""

    def __len__(self) -> int:
        return len(self._used)

    def __iter__(self) -> Any:
        return iter(self._used)

    def items(self) -> Iterator[tuple[Hashable, CachedProgram]]:
        """Every program with its key, the last used at the end."""
        return ((key, cached) for cached, key in self._used.items())

    @property
    def latest(self) -> CachedProgram | None:
        """The program that was last replayed or added."""
        return next(reversed(self._used), None)

    @property
    def thrashing(self) -> bool:
        """Whether programs are added and dropped without a replay."""
        return self._unused_in_a_row >= self._limit

    def matching(
        self, key: Hashable, leaves: Sequence[Any], spec: Any
    ) -> Iterator[tuple[CachedProgram, Call]]:
        """The programs whose guards hold, with their inputs, last used first; `reason`: the first failed guard."""
        self.reason = ""
        for cached in list(self._by_key.get(key, ())):
            call = cached.program.resolve(leaves)
            if isinstance(call, Call):
                yield cached, call
            else:
                self.missed(call)
        if not self.reason:
            self.missed(self._why_none(leaves, spec))

    def _why_none(self, leaves: Sequence[Any], spec: Any) -> str:
        if self.latest is None:
            return "the first call"
        if spec != self.latest.program.in_spec:
            return STRUCTURE
        call = self.latest.program.resolve(leaves)
        return call if isinstance(call, str) else "the arguments are of another kind"

    def missed(self, reason: str) -> None:
        """Record that a guard failed; the first failure of a call is its `reason`."""
        self.reason = self.reason or reason
        kind = without_numbers(reason)
        self._misses[kind] += 1
        self._example[kind] = reason

    def used(self, cached: CachedProgram) -> None:
        """Record that a program was replayed, or audited."""
        self._used.move_to_end(cached)
        bucket = self._by_key[self._used[cached]]
        if bucket[0] is not cached:
            bucket.remove(cached)
            bucket.insert(0, cached)

    def add(self, key: Hashable, cached: CachedProgram) -> None:
        """Add a program. It replaces one for the same numbers, else, at the limit, the least recently used one."""
        for same in [k for k in self._by_key.get(key, ()) if _same_numbers(k, cached)]:
            self.drop(same)
        if len(self._used) >= self._limit:
            oldest = next(iter(self._used))
            self.drop(oldest)
            first = self._unused_in_a_row == 0
            unused = oldest.replays == oldest.audits == 0
            self._unused_in_a_row = self._unused_in_a_row + 1 if unused else 0
            if self.thrashing or (first and self._unused_in_a_row):
                self._warn()
        self._by_key.setdefault(key, []).insert(0, cached)
        self._used[cached] = key

    def drop(self, cached: CachedProgram) -> None:
        """Remove a program."""
        key = self._used.pop(cached)
        bucket = self._by_key[key]
        bucket.remove(cached)
        if not bucket:
            del self._by_key[key]

    def _warn(self) -> None:
        kind, times = self._misses.most_common(1)[0]
        end = "it runs eagerly from now on" if self.thrashing else "the oldest is dropped"
        log.warning(
            "%s has %d programs, as many as it may (`max_programs`), and needs another: %s. Missed most often "
            "(%d times): %s",
            self._name,
            self._limit,
            end,
            times,
            self._example[kind],
        )


class UnsettledMisses:
    """Guards that missed, and for which the call was then recorded and not kept; by the kind of their message.

    A step that was captured once is not refused because calls of some kind do not settle: these run eagerly.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: dict[str, tuple[int, str]] = {}  # -> how many calls, why the last was not kept

    def add(self, missed: str, why: str) -> None:
        """A call that was recorded because of `missed` was not kept, since the step `why`."""
        kind = without_numbers(missed)
        self._kinds[kind] = self._kinds.get(kind, (0, ""))[0] + 1, why

    def clear(self) -> None:
        """A recording was kept."""
        self._kinds.clear()

    def skips(self, missed: str, most: int) -> bool:
        """Whether to run a call eagerly: `most` calls like it were not kept. It is tried again at powers of two."""
        kind = without_numbers(missed)
        count, why = self._kinds.get(kind, (0, ""))
        if count < most or not count & (count - 1):
            return False
        if count == most:
            log.warning(
                "%s runs eagerly where %s: %d recordings of such calls were not kept, since the step %s",
                self._name,
                missed,
                count,
                why,
            )
        self._kinds[kind] = count + 1, why
        return True
