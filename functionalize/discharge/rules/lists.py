"""Foreach and fused ops whose lists share memory: eager computes one list element after the other.

    _foreach_add_([a, b], [b, a])   ->   _foreach_add_([a], [b]); _foreach_add_([b], [a])
    _foreach_add_([a, b], [c, d])        unchanged: no element reads what another has written

Invariant: an op is split up if and only if the byte range of a tensor that one element writes overlaps that of a
tensor of another element; O(n) in the tensors, plus a sort of those that share a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from functionalize.ir.ops import TensorRef

_Span = tuple[int, int]


@cache
def _lists(target: Any) -> tuple[tuple[int, str, str, bool], ...]:
    """(position, name, kind, written) of the arguments of an op that loops over lists; empty for other ops.

    kind: "list", a list with a tensor or number per element; "packed", one tensor with a number per element; "shared",
    one tensor that every element reads.
    """
    name = target._schema.name.removeprefix("aten::")
    if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return ()
    found: list[tuple[int, str, str, bool]] = []
    for i, a in enumerate(target._schema.arguments):
        written = a.alias_info is not None and a.alias_info.is_write
        if a.kwarg_only and written:
            return ()  # eager copies to `out=` after all elements are computed
        if str(a.type).startswith(("List[Tensor", "List[Optional[Tensor", "List[number")):
            found.append((i, a.name, "list", written))
        elif str(a.type) == "Tensor" and a.name == "scalars":
            found.append((i, a.name, "packed", written))
        elif str(a.type) == "Tensor" and not name.startswith("_fused_"):
            found.append((i, a.name, "shared", written))
    return tuple(found) if any(w and kind == "list" for _, _, kind, w in found) else ()


def one_by_one(
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    storage_of: Callable[[Any], Any],
    span_of: Callable[[Any], _Span],
    narrow: Callable[[Any, int], Any],
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """The arguments of one call per list element, in order; None if one call for all elements has the same effect.

    storage_of: a key of a tensor's storage; None for what is no tensor.
    span_of: the byte range of a tensor in its storage; called only for tensors that share one.
    narrow: element `i` of a tensor of numbers.
    """
    lists = _lists(target)
    if not lists:
        return None
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name, _, _ in lists]
    pairs = zip(values, lists, strict=True)
    first: Any = next(v for v, (*_, kind, written) in pairs if written and kind == "list")
    length = len(first)
    if length < 2 or not _elements_overlap(lists, values, storage_of, span_of):
        return None

    def element(at: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        new, named = list(args), dict(kwargs)
        for (i, name, kind, _), value in zip(lists, values, strict=True):
            if kind == "shared" or value is None or (kind == "list" and len(value) != length):
                continue
            one = narrow(value, at) if kind == "packed" else [value[at]]
            if i < len(new):
                new[i] = one
            else:
                named[name] = one
        return tuple(new), named

    return map(element, range(length))


def _elements_overlap(
    lists: Any, values: Any, storage_of: Callable[[Any], Any], span_of: Callable[[Any], _Span]
) -> bool:
    """Whether an element writes to bytes that another element reads or writes."""
    if _no_two_share(lists, values, storage_of):
        return False
    places: dict[Any, list[tuple[int, bool, Any]]] = {}  # (element, written, tensor) by storage
    for (_, _, kind, written), value in zip(lists, values, strict=True):
        if kind == "packed" or value is None:
            continue
        for at, each in enumerate(value) if kind == "list" else [(-1, value)]:
            key = storage_of(each)
            if key is not None:
                places.setdefault(key, []).append((at, written, each))
    return any(
        len({at for at, _, _ in on}) > 1 and any(w for _, w, _ in on) and _overlap(on, span_of)
        for on in places.values()
        if len(on) > 1
    )


def _no_two_share(lists: Any, values: Any, storage_of: Callable[[Any], Any]) -> bool:
    """Whether every tensor is on a storage of its own, as usual: decided in a fifth of the time of `places`."""
    seen: list[Any] = []
    for (_, _, kind, _), value in zip(lists, values, strict=True):
        if kind != "packed" and value is not None:
            keys = map(storage_of, value if kind == "list" else (value,))
            seen += [key for key in keys if key is not None]
    return len(set(seen)) == len(seen)


def _overlap(on: list[tuple[int, bool, Any]], span_of: Callable[[Any], _Span]) -> bool:
    spans = sorted((*span_of(each), at, written) for at, written, each in on)
    # Sweep over the spans by start. For each kind (all spans, written spans) keep the two elements whose spans end
    # furthest: one of the two is another element than the current one.
    reached: dict[int, int] = {}
    reached_written: dict[int, int] = {}
    for start, end, at, written in spans:
        if start >= end:
            continue
        before = reached if written else reached_written
        if any(other != at and stop > start for other, stop in before.items()):
            return True
        for ends in (reached, reached_written) if written else (reached,):
            ends[at] = max(ends.get(at, 0), end)
            if len(ends) > 2:
                del ends[min(ends, key=ends.__getitem__)]
    return False


def _storage_of(ref: Any) -> int | None:
    return ref.storage if type(ref) is TensorRef else None


def _span_of(ref: TensorRef) -> tuple[int, int]:
    return ref.geometry.start, ref.geometry.end


def _element(ref: TensorRef, at: int) -> TensorRef:
    g = ref.geometry
    return ref._replace(geometry=g._replace(size=(1,), offset=g.offset + at * g.stride[0]))


OF_REFS = (_storage_of, _span_of, _element)  # the last three arguments of `one_by_one`, for records
