"""Which parts of a graph are compiled together, and which of them are the same. Nothing is compiled here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import functionalize as fz
from functionalize import passes
from functionalize.analysis.aliases import is_view
from functionalize.run.inductor import canonical, regions_of, undone


def layers(count: int) -> fz.Program:
    """A step of so many residual layers: forward, backward, an update that is not like a layer."""
    x, ws = torch.randn(4, 8), [torch.randn(8, 8, requires_grad=True) for _ in range(2 * count)]

    def step(x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        for a, b in zip(ws[::2], ws[1::2], strict=True):
            x = x + F.gelu(F.layer_norm(x, (8,)) @ a).mul(2).sin() @ b
        return torch.autograd.grad(x.square().mean(), ws)

    program = fz.functions.trace(step, x, *ws)
    program.describe()
    return program


def everything(node: fx.Node) -> bool:
    return True


def kinds(program: fz.Program, most: int) -> tuple[int, int]:
    """(regions, kinds of regions)."""
    regions = regions_of(program.graph, everything, 1, most)
    assert max(len(region.nodes) for region in regions) <= 2 * most
    covered = [node for region in regions for node in region.nodes]
    assert len(covered) == len(set(covered)) == program.nodes()
    return len(regions), len({canonical(region, {})[0] for region in regions})


def test_identical_layers_are_one_kind() -> None:
    (few, few_kinds), (many, many_kinds) = kinds(layers(6), 60), kinds(layers(18), 60)
    assert many >= few + 24  # a region for each further layer and direction
    assert many_kinds == few_kinds <= 6


def test_a_stretch_without_repeats_is_cut_where_little_is_live() -> None:
    def fn(x: Tensor) -> Tensor:
        for i in range(30):
            x = (x + i).sin() * x.size(0) ** i
        return x

    program = fz.functions.trace(fn, torch.randn(3))
    program.describe()
    regions = regions_of(program.graph, everything, 1, 20)
    assert all(len(region.nodes) <= 20 for region in regions)
    assert [len(region.inputs) for region in regions] == [1] * len(regions)


def test_regions_end_at_what_is_not_accepted_and_return_what_is_read() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.split_with_sizes_copy(x.sin(), [2, 2])  # the parts go with the split
        c = torch.cumsum(a, 0)
        return b * 2 + c, b.cos() + a

    program = fz.functions.trace(fn, torch.randn(4))
    program.describe()

    def accepts(node: fx.Node) -> bool:
        return node.target is not torch.ops.aten.cumsum.default

    first, second = regions_of(program.graph, accepts, 1, 100)
    assert [n.name for n in first.nodes] == ["sin", "split_with_sizes_copy", "getitem", "getitem_1"]
    assert [n.name for n in first.outputs] == ["getitem", "getitem_1"]
    assert [n.name for n in second.inputs] == ["getitem_1", "cumsum", "getitem"]
    assert [n.name for n in second.outputs] == ["add", "add_1"]
    assert regions_of(program.graph, accepts, 5, 100) == []  # too few ops that compute


def test_names_and_offsets_make_no_kinds_and_strides_and_numbers_do() -> None:
    def text(fn: Callable[[Tensor], Any], x: Tensor) -> str:
        program = fz.functions.trace(fn, x)
        program.describe()
        (region,) = regions_of(program.graph, lambda n: not is_view(n), 1, 100)
        return canonical(region, {})[0]

    x = torch.randn(4, 4)
    same = text(lambda x: x[0:2].sin() + 1, x)
    assert text(lambda other: other[2:4].sin() + 1, x) == same
    assert text(lambda x: x[0:2].sin() + 2, x) != same
    assert text(lambda x: x.t()[0:2].sin() + 1, x) != same


# -- what is in place and need not be ----------------------------------------------------------------


def test_ops_on_temporaries_are_undone_and_those_on_inputs_are_not() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        w.mul_(0.5)
        return torch.relu(x.sin() + 1) * 2

    program = passes.run(fz.functions.trace(fn, torch.randn(4), torch.randn(4)), "reinplace")
    program.describe()
    found = {str(node.target): str(target) for node, target in undone(program).items()}
    assert found == {
        "aten.add_.Tensor": "aten.add.Tensor",
        "aten.relu_.default": "aten.relu.default",
        "aten.mul_.Tensor": "aten.mul.Tensor",
    }


def test_an_op_stays_in_place_where_the_old_name_is_read_after_it() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() * (x.sin() + 1)

    program = passes.run(fz.functions.trace(fn, torch.randn(3)), "reinplace")
    program.describe()
    (add,) = [n for n in undone(program) if "add_" in str(n.target)]
    (mul,) = add.users
    mul.replace_input_with(mul.args[0], add.args[0])
    assert add not in undone(program)


@pytest.mark.parametrize("stage", ["FUNCTIONAL", "PARTITIONED"])
def test_other_stages_have_nothing_to_undo(stage: str) -> None:
    program = fz.functions.trace(lambda x: x.sin(), torch.randn(3))
    program.stage = stage
    assert undone(program) == {}
