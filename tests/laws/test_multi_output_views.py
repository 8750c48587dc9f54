"""A view op that gives a list is one node per value of the base, however many of the views are read.

    for p in x.unbind(0): p.sin()       unbind = aten.unbind.int(x)
                                        getitem = unbind[0]; sin = aten.sin(getitem); ...

The ops are found in torch's registry: one that a release adds fails here until its case is written.
Work is counted as in `test_linear.py`: calls per node do not grow with the number of parts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import nop  # type: ignore[import-untyped]
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import functionalize as fz
from functionalize import passes
from functionalize.program.program import Program
from tests.discharge.eager import same_as_eager
from tests.laws.counting import SLACK, calls

aten = torch.ops.aten
R = fz.functions.resize_storage_bytes_


class Case(NamedTuple):
    """take(x, n): the op on `x` of size `size(n)`, which gives n parts."""

    size: Callable[[int], tuple[int, ...]]
    take: Callable[[Tensor, int], list[Tensor]]


def rows(n: int) -> tuple[int, ...]:
    return (n, 3)


def columns(n: int) -> tuple[int, ...]:
    return (3, n)


def depths(n: int) -> tuple[int, ...]:
    return (2, 2, n)


def flat(n: int) -> tuple[int, ...]:
    return (n,)


CASES: dict[str, Case] = {
    "unbind.int": Case(rows, lambda x, n: aten.unbind.int(x, 0)),
    "split.Tensor": Case(columns, lambda x, n: aten.split.Tensor(x, 1, 1)),
    "split.sizes": Case(rows, lambda x, n: aten.split.sizes(x, [1] * n)),
    "split_with_sizes": Case(columns, lambda x, n: aten.split_with_sizes(x, [1] * n, -1)),
    "chunk": Case(rows, lambda x, n: aten.chunk(x, n)),
    "tensor_split.sections": Case(columns, lambda x, n: aten.tensor_split.sections(x, n, 1)),
    "tensor_split.indices": Case(
        rows, lambda x, n: aten.tensor_split.indices(x, list(range(1, n)))
    ),
    "hsplit.int": Case(columns, lambda x, n: aten.hsplit.int(x, n)),
    "hsplit.array": Case(flat, lambda x, n: aten.hsplit.array(x, list(range(1, n)))),
    "vsplit.int": Case(rows, lambda x, n: aten.vsplit.int(x, n)),
    "vsplit.array": Case(rows, lambda x, n: aten.vsplit.array(x, list(range(1, n)))),
    "dsplit.int": Case(depths, lambda x, n: aten.dsplit.int(x, n)),
    "dsplit.array": Case(depths, lambda x, n: aten.dsplit.array(x, list(range(1, n)))),
    "unsafe_split.Tensor": Case(rows, lambda x, n: aten.unsafe_split.Tensor(x, 1)),
    "unsafe_split_with_sizes": Case(
        columns, lambda x, n: aten.unsafe_split_with_sizes(x, [1] * n, 1)
    ),
    "unsafe_chunk": Case(rows, lambda x, n: aten.unsafe_chunk(x, n)),
    "unflatten_dense_tensors": Case(
        flat, lambda x, n: aten.unflatten_dense_tensors(x, [torch.empty(1)] * n)
    ),
}
# They give a list of one tensor, and no views of it.
_COPIES = {"unbind_copy", "split_copy", "split_with_sizes_copy"}
_OTHERS = {"gradient", "where", "nonzero_numpy", "_histogramdd_bin_edges", "quantize_per_tensor"}
# It reads its second argument and calls `tensor_split.sections` or `.indices`.
_READS_A_VALUE = {"tensor_split.tensor_indices_or_sections"}
# The dispatcher gives the others to the engine as these, or as slices.
PRIMITIVE = ("unbind.int", "split.Tensor", "split_with_sizes", "chunk")
each_op = pytest.mark.parametrize("name", CASES)


def registered() -> Iterator[Any]:
    """torch's own ops that take a tensor, and whose only result is a list of tensors."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        packet = getattr(aten, op, None) if namespace == "aten" else None
        found = getattr(packet, overload or "default", None)
        if isinstance(found, torch._ops.OpOverload):
            returns, arguments = found._schema.returns, found._schema.arguments
            is_list = [str(r.type) for r in returns] == ["List[Tensor]"]
            is_named = "Dimname" in found._overloadname  # of named tensors (torch 2.11)
            if is_list and not is_named and any(str(a.type) == "Tensor" for a in arguments):
                yield found


def test_every_op_of_torch_has_a_case() -> None:
    names = {str(op).removeprefix("aten.").removesuffix(".default"): op for op in registered()}
    assert len(names) > 20
    known = set(CASES) | _READS_A_VALUE
    assert {n for n, op in names.items() if op._schema.returns[0].alias_info} <= known
    others = {n.partition(".")[0] for n in names if n not in known and "_foreach" not in n}
    assert others <= _COPIES | _OTHERS
    assert set(CASES) <= set(names)


def lists_in(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose value is a list of views."""
    return [n for n in graph.nodes if n.op == "call_function" and _gives_a_list(n.target)]


def _gives_a_list(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and [str(r.type) for r in schema.returns] == ["List[Tensor]"]


def traced(name: str, n: int, write: bool) -> tuple[Program, int]:
    """A program that reads every part, and also writes it, and the calls that tracing takes."""
    case, found = CASES[name], list[Program]()

    def fn(x: Tensor) -> Any:
        parts = case.take(x, n)
        return [part.mul_(2) for part in parts] and None if write else torch.cat(parts)

    x = torch.zeros(case.size(n))
    number = calls(lambda: found.append(fz.functions.trace(fn, x)))
    return found[0], number


def is_in_place(name: str) -> bool:
    """Whether writes to parts in turn end in one `cat`: no part lies between the elements of another."""
    return CASES[name].size in (rows, flat)


def reads_and_writes() -> Iterator[Any]:
    for name in CASES:
        yield pytest.param(name, False, id=f"{name}-read")
        if is_in_place(name):
            yield pytest.param(name, True, id=f"{name}-written")


@pytest.mark.parametrize(("name", "write"), list(reads_and_writes()))
def test_work_is_linear_in_the_parts(name: str, write: bool) -> None:
    counts = []
    for n in (25, 100):
        program, of_trace = traced(name, n, write)
        size = len(program.graph.nodes)
        assert len(lists_in(program.graph)) <= 1
        of_metas = calls(program.describe)
        of_passes = calls(lambda program=program: passes.run(program, "default"))
        counts.append((size, of_trace / size, of_metas / size, of_passes / size))
    (small, *few), (large, *many) = counts
    assert large <= 8 * small
    assert all(b <= SLACK * a for a, b in zip(few, many, strict=True)), counts


def test_eight_hundred_parts() -> None:
    (few, n), (many, m) = (traced("unbind.int", parts, False) for parts in (100, 800))
    sizes = [len(program.graph.nodes) for program in (few, many)]
    assert sizes[1] - sizes[0] == 700  # one `getitem` more for one part more
    assert m / sizes[1] <= SLACK * n / sizes[0]


# -- writes between reads --------------------------------------------------------------------------


def between_reads(name: str) -> Callable[[Tensor], list[Tensor]]:
    """Reads parts before and after writes of the base, of a part, and of a view across parts."""
    take = CASES[name].take

    def fn(x: Tensor) -> list[Tensor]:
        parts = take(x, 6)
        out = [parts[0] * 2, parts[5] * 2]
        x.add_(1)  # every part is stale
        out += [parts[0] * 3, parts[1] * 3]
        parts[1].mul_(4)  # the others hold what they did
        out += [part.sin() for part in parts]
        x.view(-1)[1:3].fill_(7.0)
        return out + [part.cos() for part in take(x, 6)]

    return fn


def values_of(name: str) -> int:
    """The values of `x` whose parts are read there: parts with others between their elements are written at once."""
    return 3 if is_in_place(name) else 4


@each_op
def test_a_write_between_reads(name: str) -> None:
    size = CASES[name].size(6)
    program = same_as_eager(between_reads(name), torch.randn(size), times=2)
    lists = lists_in(program.graph)
    assert len(lists) in (0, values_of(name))
    assert len({n.args[0] for n in lists}) == len(lists)
    assert all(u.target is operator.getitem for n in lists for u in n.users)


@each_op
def test_of_a_stale_view(name: str) -> None:
    size = CASES[name].size(6)

    def fn(x: Tensor) -> Any:
        window = x[2:-2].view(size)
        out = [part.sin() for part in CASES[name].take(window, 6)]
        x.add_(1)
        return out + [part.cos() for part in CASES[name].take(window, 6)]

    program = same_as_eager(fn, torch.randn(torch.Size(size).numel() + 4), times=2)
    assert len(lists_in(program.graph)) in (0, 2)


def resized(name: str) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """The same on a parameter that is empty on entry, as FSDP2's are."""
    fn = between_reads(name)

    def filled(p: Tensor, given: Tensor) -> list[Tensor]:
        R(p, given.untyped_storage().nbytes())
        p.copy_(given)
        out = fn(p)
        R(p, 0)
        return out

    return filled


def empty(size: tuple[int, ...]) -> Tensor:
    p = torch.empty(size)
    p.untyped_storage().resize_(0)
    return p


@pytest.mark.parametrize("name", PRIMITIVE)
def test_substituted(name: str) -> None:
    size = CASES[name].size(6)
    given = torch.randn(size)
    want = resized(name)(empty(size), given)
    functional = fz.functions.functionalize_storage(resized(name))
    with torch.no_grad():
        gm = make_fx(functional)(empty(size), given)
    assert len(lists_in(gm.graph)) == values_of(name)
    for fn in (functional, gm, fz.functions.aot_function(resized(name), nop)):
        p = empty(size)
        got = fn(p, given)
        assert p.untyped_storage().nbytes() == 0
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
