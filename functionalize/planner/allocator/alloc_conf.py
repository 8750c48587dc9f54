"""The options of CUDA's caching allocator that decide how much memory it reserves.

    Settings()                                                      torch's defaults, on a device of unlimited memory
    Settings(limit=80 * 2**30)                                      on a device with 80 GiB for the allocator
    Settings.parse("expandable_segments:True,max_split_size_mb:64") the text of `PYTORCH_ALLOC_CONF`

    option in the text                      field
    expandable_segments                     expandable_segments
    max_split_size_mb                       max_split_size (bytes)
    max_non_split_rounding_mb               max_non_split_rounding (bytes)
    large_segment_size_mb                   large_segment (bytes)
    roundup_power2_divisions                divisions: one per power of two from 1 MiB to 32 GiB
    per_process_memory_fraction             fraction of the `limit` that may be reserved; beyond it torch raises
                                            an out-of-memory error, after it has released its cache
    garbage_collection_threshold            garbage_collection_threshold: fraction of these bytes; without
                                            per_process_memory_fraction it has no effect

Options that do not change any size (`pinned_*`, `release_lock_on_cudamalloc`, …) are parsed and ignored.
Refuses (`AllocatorSettingsError`): what torch refuses, and `backend:cudaMallocAsync`, which is a different allocator.
Source: torch 2.13, `c10/core/AllocatorConfig.h`, `c10/cuda/CUDAAllocatorConfig.h`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from functionalize.errors import AllocatorSettingsError

MIB = 1 << 20
MIN_BLOCK = 512  # sizes are rounded up to a multiple of this
SMALL_REQUEST = 1 * MIB  # requests up to this size are small
SMALL_SEGMENT = 2 * MIB  # the size of the segments that small requests share
MIN_LARGE = 10 * MIB  # large requests below this size share segments of `large_segment` bytes
ROUND_LARGE = 2 * MIB  # each larger request has its own segment, rounded up to a multiple of this

_INTERVALS = 16  # entries of `roundup_power2_divisions`: powers of two from 1 MiB on
_SMALLEST_INTERVAL = 20  # log2 of 1 MiB
_IGNORED = (
    "backend",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "pinned_free_catch_all",
)


@dataclass(frozen=True)
class Settings:
    """The options, with sizes in bytes.

    limit: device memory that the allocator can reserve; None: unlimited.
    expandable_segments: reserve a range of addresses per stream and map its pages when they are needed.
    max_split_size: blocks of at least this size are never split; None: every block may be split.
    max_non_split_rounding: by how many bytes a block that must not be split may exceed the request that it
        serves; None: `large_segment`.
    large_segment: size of the segments that requests of 1 to 10 MiB share.
    divisions: sizes are rounded up to a power of two's fraction 1/n, one n per power of two from 1 MiB on;
        0 or 1: to a multiple of 512 bytes.
    garbage_collection_threshold: fraction of `allowed` above which old cached segments are released; 0: never.
    fraction: fraction of `limit` that may be reserved.
    """

    limit: int | None = None
    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int | None = None
    large_segment: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0
    fraction: float = 1.0

    @classmethod
    def parse(cls, text: str, limit: int | None = None) -> Settings:
        """Parse the text of `PYTORCH_ALLOC_CONF` (or `PYTORCH_CUDA_ALLOC_CONF`)."""
        found: dict[str, Any] = {}
        for key, value in _items(text):
            if key == "backend" and value != "native":
                raise _refused(
                    f"backend:{value}", "only torch's native allocator is simulated: leave it out"
                )
            if key not in _IGNORED:
                name, read = _option(key)
                found[name] = read(key, value)
        settings = cls(limit, **found)
        for name, nbytes in (
            ("max_split_size_mb", settings.max_split_size),
            ("max_non_split_rounding_mb", found.get("max_non_split_rounding")),
        ):
            if nbytes is not None and nbytes < settings.large_segment:
                least = f"at least {settings.large_segment // MIB} MiB (`large_segment_size_mb`)"
                raise _refused(f"{name}:{nbytes // MIB}", f"give {least}")
        return settings

    @property
    def allowed(self) -> int | None:
        """The bytes that may be reserved, where `fraction` makes that less than `limit`; None: no such bound."""
        return None if self.limit is None or self.fraction == 1 else int(self.limit * self.fraction)

    def rounded(self, nbytes: int) -> int:
        """The size of the block that serves a request of `nbytes`, if it is split off a larger block."""
        if nbytes < MIN_BLOCK:
            return MIN_BLOCK
        interval = nbytes.bit_length() - 1 - _SMALLEST_INTERVAL
        divisions = self.divisions[min(max(interval, 0), _INTERVALS - 1)]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            step = (1 << (nbytes.bit_length() - 1)) // divisions
            return _up(nbytes, step)
        return _up(nbytes, MIN_BLOCK)

    def segment_for(self, size: int) -> int:
        """The size of the segment to reserve for a block of a (rounded) size that no cached block can serve."""
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        return self.large_segment if size < MIN_LARGE else _up(size, ROUND_LARGE)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _refused(option: str, why: str) -> AllocatorSettingsError:
    return AllocatorSettingsError(f"The allocator option `{option}` cannot be used: {why}.")


def _items(text: str) -> list[tuple[str, str]]:
    """The (option, value) pairs of a text; a list value keeps its brackets."""
    text = "".join(text.split())
    items = []
    while text:
        found = re.match(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)", text)
        if found is None:
            raise _refused(text, "write `option:value,option:value`, a list as `[a:b,c:d]`")
        items.append((found[1], found[2]))
        text = text[found.end() :]
    return items


def _option(key: str) -> tuple[str, Any]:
    """The name of the field that an option sets, and the function that parses its value."""
    known = {
        "expandable_segments": ("expandable_segments", _flag),
        "max_split_size_mb": ("max_split_size", _mebibytes),
        "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
        "large_segment_size_mb": ("large_segment", _mebibytes),
        "roundup_power2_divisions": ("divisions", _divisions),
        "garbage_collection_threshold": ("garbage_collection_threshold", _share),
        "per_process_memory_fraction": ("fraction", _share),
    }
    if key not in known:
        raise _refused(key, f"torch has no such option; it has {', '.join((*known, *_IGNORED))}")
    return known[key]


def _flag(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _refused(f"{key}:{value}", "give `True` or `False`")
    return value == "True"


def _mebibytes(key: str, value: str) -> int:
    least = (
        MIN_LARGE // MIB + 1 if key == "large_segment_size_mb" else 20 if "rounding" in key else 1
    )
    if not value.isdecimal() or int(value) < least:
        raise _refused(f"{key}:{value}", f"give a whole number of MiB, at least {least}")
    return int(value) * MIB


def _share(key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share < 1 and not (share == 1 and key == "per_process_memory_fraction"):
        raise _refused(f"{key}:{value}", "give a number between 0 and 1")
    return share


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """One number for all sizes, or a list as `[256:1,512:2,>:4]`: pairs of a size in MiB and its divisions.

    A pair holds from its size to the next power of two. Below the first listed size its divisions apply; `>` sets all
    sizes above the last one; a power of two in between that is not listed has no divisions.
    """
    if not value.startswith("["):
        return (_power(key, value),) * _INTERVALS
    divisions = [0] * _INTERVALS
    last, first = 0, True
    for item in value[1:-1].split(","):
        start, _, number = item.partition(":")
        power = 0 if number == "0" else _power(key, number)
        if start == ">":
            divisions[last + 1 :] = [power] * (_INTERVALS - last - 1)
            continue
        last = min(_power(key, start).bit_length() - 1, _INTERVALS - 1)
        if first:
            divisions[:last] = [power] * last
        divisions[last], first = power, False
    return tuple(divisions)


def _power(key: str, number: str) -> int:
    """Parse a power of two."""
    if not number.isdecimal() or int(number).bit_count() != 1:
        raise _refused(f"{key}:{number}", "give powers of two")
    return int(number)
