"""The options of CUDA's caching allocator that decide how much memory it reserves.

    Settings()                                                      torch's defaults, on a device without end
    Settings(limit=80 * 2**30)                                      on a device with 80 GiB for the allocator
    Settings.parse("expandable_segments:True,max_split_size_mb:64") what `PYTORCH_ALLOC_CONF` says

    option in the text                      field
    expandable_segments                     expandable_segments
    max_split_size_mb                       max_split_size (bytes)
    max_non_split_rounding_mb               max_non_split_rounding (bytes)
    large_segment_size_mb                   large_segment (bytes)
    roundup_power2_divisions                divisions: one per power of two from 1 MiB to 32 GiB
    per_process_memory_fraction             fraction of the `limit`: above it torch releases its cache, or gives up
    garbage_collection_threshold            garbage_collection_threshold, of that; without a fraction it does nothing

Options that change no size (`pinned_*`, `release_lock_on_cudamalloc`, …) are read and left out.
Refuses (`AllocatorSettingsError`): what torch refuses, and `backend:cudaMallocAsync`, which is another allocator.
Source: torch 2.13, `c10/core/AllocatorConfig.h`, `c10/cuda/CUDAAllocatorConfig.h`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from functionalize.errors import AllocatorSettingsError

MIB = 1 << 20
MIN_BLOCK = 512  # what sizes are rounded up to
SMALL_REQUEST = 1 * MIB  # up to here a request is small
SMALL_SEGMENT = 2 * MIB  # what small requests are packed in
MIN_LARGE = 10 * MIB  # below, large requests are packed in segments of `large_segment`
ROUND_LARGE = 2 * MIB  # from there on they get a segment of their own, rounded up to this

_INTERVALS = 16  # of `roundup_power2_divisions`: powers of two from 1 MiB on
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
    """Sizes in bytes. limit: what the device has for the allocator; None: no end of it.

    max_non_split_rounding: how much larger a block may be that is too large to be split; None: by a large segment.
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
        """The settings of a `PYTORCH_ALLOC_CONF` (or `PYTORCH_CUDA_ALLOC_CONF`)."""
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
        """How many bytes may be reserved where that is less than the device has; None: all of them."""
        return None if self.limit is None or self.fraction == 1 else int(self.limit * self.fraction)

    def rounded(self, nbytes: int) -> int:
        """The size of the block that a request of so many bytes is given, if one is cut out for it."""
        if nbytes < MIN_BLOCK:
            return MIN_BLOCK
        interval = nbytes.bit_length() - 1 - _SMALLEST_INTERVAL
        divisions = self.divisions[min(max(interval, 0), _INTERVALS - 1)]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            step = (1 << (nbytes.bit_length() - 1)) // divisions
            return _up(nbytes, step)
        return _up(nbytes, MIN_BLOCK)

    def segment_for(self, size: int) -> int:
        """The size of the segment that is reserved for a block of a rounded size that no cached one serves."""
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        return self.large_segment if size < MIN_LARGE else _up(size, ROUND_LARGE)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _refused(option: str, why: str) -> AllocatorSettingsError:
    return AllocatorSettingsError(f"The allocator option `{option}` cannot be used: {why}.")


def _items(text: str) -> list[tuple[str, str]]:
    """The options of a text and their values, lists with their brackets."""
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
    """The field of an option, and what reads its value."""
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
    """One number for all sizes, or `[256:1,512:2,>:4]`: MiB, and the divisions from there to the next power of two.

    Below the first the first holds; a power of two between that is not named is not rounded to divisions.
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
    """A power of two."""
    if not number.isdecimal() or int(number).bit_count() != 1:
        raise _refused(f"{key}:{number}", "give powers of two")
    return int(number)
