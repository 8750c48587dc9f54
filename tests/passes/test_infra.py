"""Running passes: order, history, what stays untouched, what is refused; and bare graph modules."""

from __future__ import annotations

import importlib
import pickle
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import functionalize as fz
from examples.resize_program import values
from functionalize import passes
from functionalize._compat.fakes import FakeTensor
from functionalize.errors import InvariantError, PassError
from functionalize.ir.generators import GET_STATE
from functionalize.passes import Pass
from functionalize.passes.elide_copies import ElideCopies
from functionalize.passes.metadata import set_value
from functionalize.passes.verify import Verify
from functionalize.program.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class Rename(Pass):
    """Turns `sin` into `cos`; a pass with options and a stage of its own."""

    name: ClassVar[str] = "rename"
    produces: ClassVar[str | None] = "PARTITIONED"
    times: int = 1
    label: str = "x"

    def apply(self, program: fz.Program) -> int:
        found = program.graph.find_nodes(op="call_function", target=aten.sin.default)
        for node in found:
            node.target = aten.cos.default
        return len(found)


@dataclass(frozen=True)
class Break(Pass):
    """Makes a graph that `verify` refuses."""

    name: ClassVar[str] = "break"

    def apply(self, program: fz.Program) -> int:
        for node in program.graph.nodes:
            node.meta.pop("val", None)
        return 1


def program() -> fz.Program:
    return fz.functions.trace(lambda x: x.clone().sin(), values(4))


def test_history_and_stage():
    after = passes.run(program(), [ElideCopies(), Rename(times=2), Verify()])
    assert after.history == ("elide_copies: 1", "rename{times=2}: 1", "verify: 0")
    assert after.stage == "PARTITIONED"
    assert torch.equal(after(values(4)), values(4).cos())
    assert torch.equal(after.graph_module(values(4))[0], values(4).cos())


def test_pipeline_text_is_accepted():
    assert passes.run(program(), "elide_copies,verify").history == ("elide_copies: 1", "verify: 0")


def test_original_is_untouched():
    before = program()
    text = before.print_readable(False)
    after = passes.run(before, [ElideCopies(), Rename()])
    assert before.print_readable(False) == text and before.history == ()
    assert before.stage == "FUNCTIONAL"
    assert not set(before.graph.nodes) & set(after.graph.nodes)
    assert torch.equal(before(values(4)), values(4).sin())


def test_no_pass_is_a_copy():
    before = program()
    after = passes.run(before, [])
    assert after is not before and after.print_readable(False) == before.print_readable(False)


def test_stage_that_a_pass_does_not_accept():
    partitioned = passes.run(program(), [Rename()])
    with pytest.raises(PassError) as error:
        passes.run(partitioned, [ElideCopies()])
    assert str(error.value) == (
        "`elide_copies` accepts a program at stage FUNCTIONAL, this one is at PARTITIONED"
    )


def test_stages_are_checked_before_anything_runs():
    with pytest.raises(PassError) as error:
        passes.run(program(), [Rename(), ElideCopies(parts=True)])
    assert str(error.value) == (
        "`elide_copies{parts=true}` accepts a program at stage FUNCTIONAL, this one is at "
        "PARTITIONED, which `rename` leaves it at"
    )


def test_pass_that_breaks_the_program():
    with pytest.raises(InvariantError, match="`break` left a broken program: 3 violations"):
        passes.run(program(), [Break()])


class ReadsLate(Pass):
    """Moves the first read of a generator's state to the end of the graph."""

    name = "reads_late"

    def apply(self, program: Program) -> int:
        (read,) = program.graph.find_nodes(op="call_function", target=GET_STATE)
        (output,) = program.graph.find_nodes(op="output")
        output.prepend(read)
        return 1


def draws(x: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.get_rng_state()
    return x + torch.rand(2), state


def test_a_pass_that_reads_a_generator_elsewhere_is_named() -> None:
    recorded = fz.functions.trace(draws, torch.ones(2))
    assert passes.run(recorded, "default").history
    with pytest.raises(InvariantError, match="`reads_late` moved, added or removed random ops, or"):
        passes.run(recorded, [ReadsLate()])


class Stumble(Pass):
    """A pass that fails on a broken program."""

    name = "stumble"

    def apply(self, program: Program) -> int:
        raise KeyError("what a broken program lacks")


def test_the_pass_that_broke_the_program_is_named_if_a_later_one_fails():
    with pytest.raises(InvariantError, match="`break` left a broken program: 3 violations"):
        passes.run(program(), [Break(), Stumble()])


def test_an_error_of_a_pass_propagates():
    with pytest.raises(KeyError, match="what a broken program lacks"):
        passes.run(program(), [ElideCopies(), Stumble()])


# -- graph modules ---------------------------------------------------------------------------------


def test_passes_on_a_graph_module_have_the_form_of_a_graph_pass():
    gm = make_fx(lambda x: x.clone().sin())(values(4))
    each = passes.on_graph_module(ElideCopies())
    assert each.__name__ == "elide_copies"
    assert each(gm, [values(4)]) is gm
    assert [n.name for n in gm.graph.nodes] == ["x_1", "sin", "output"]


def test_passes_on_a_graph_module_are_one_several_or_a_text():
    text = "elide_copies{parts=true},verify"
    each = passes.on_graph_module(text)
    assert each == passes.on_graph_module(passes.parse(text)) == pickle.loads(pickle.dumps(each))
    assert each.__name__ == text
    with pytest.raises(PassError, match="`elide_copies` accepts a program at stage FUNCTIONAL"):
        passes.on_graph_module([Rename(), ElideCopies()])


def test_the_class_of_a_pass_stands_in_the_module_of_its_name():
    for name, kind in passes.PASSES.items():
        module = importlib.import_module(f"functionalize.passes.{name}")
        assert getattr(module, kind.__name__) is kind
        assert re.sub(r"(?<!^)([A-Z])", r"_\1", kind.__name__).lower() == name


def test_adapter_needs_fake_values():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.sin.default, (x,)),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(PassError) as error:
        passes.on_graph_module("elide_copies")(gm)
    assert str(error.value) == (
        "`x` has no fake value in its `meta['val']`, and a pass decides by size, stride and "
        "memory: give example_inputs"
    )
    passes.on_graph_module("elide_copies")(gm, [values(4)])
    assert all("val" in n.meta for n in gm.graph.nodes if n.op != "output")


def test_a_node_without_tensor_arguments_has_a_fake_value():
    made = program()
    made.describe()
    with made.graph.inserting_before(made.graph.find_nodes(op="output")[0]):
        node = made.graph.call_function(torch.ops.aten.full.default, ([2], 1.0))
    set_value(node)
    assert isinstance(node.meta["val"], FakeTensor)
    assert tuple(node.meta["tensor_meta"].shape) == (2,)
