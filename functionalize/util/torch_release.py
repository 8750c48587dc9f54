"""A version of torch as a release: `2.13.0+cpu` is release `2.13.0`, of the minor release `(2, 13)`."""

from __future__ import annotations


def release_of(version: str) -> str:
    """`2.13.0+cpu` as `2.13.0`."""
    return version.partition("+")[0]


def minor_of(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as `(2, 13)`."""
    return tuple(int(part) for part in release_of(version).split(".")[:2])
