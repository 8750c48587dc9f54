"""`verify`: one test per kind of violation, with its words; all of them are reported at once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx

import functionalize as fz
from examples.programs import PROGRAMS
from examples.resize_program import R, values, z
from functionalize import passes
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.errors import VerifyError
from functionalize.ir.commit import commit
from functionalize.ir.epilogue import Copy, Resize, Set
from functionalize.ir.guards import TensorGuard, ValueGuard
from functionalize.ir.ops import contiguous_geometry
from functionalize.ir.outputs import Result
from functionalize.passes.verify import Verify, verify

aten = torch.ops.aten
FUNCTIONAL = torch.ops._c10d_functional
FLAT = contiguous_geometry((4,), torch.float32)


def step(a, p, b):
    """Two results, and an epilogue that grows `p` and writes `p` and `b`."""
    R(p, 16)
    p.copy_(a + 1)
    b.mul_(2)
    return p * 3, a.sin()


def program() -> fz.Program:
    made = fz.functions.trace(step, values(4), z(4), values(4))
    made.describe()
    return made


def node(program: fz.Program, name: str) -> torch.fx.Node:
    return next(n for n in program.graph.nodes if n.name == name)


def insert(program: fz.Program, before: str, target, *args) -> torch.fx.Node:
    with program.graph.inserting_before(node(program, before)):
        new = program.graph.call_function(target, args)
    new.meta["val"] = None
    return new


def words(broken: fz.Program) -> str:
    with pytest.raises(VerifyError) as error:
        verify(broken)
    return str(error.value)


def returning(broken: fz.Program, *nodes: torch.fx.Node) -> None:
    """Let the graph return these instead of its first results."""
    (output,) = broken.graph.find_nodes(op="output")
    output.args = ((*nodes, *output.args[0][len(nodes) :]),)


def test_a_sound_program_passes():
    verify(program())
    assert passes.run(program(), [Verify()]).history == ("verify: 0",)


@pytest.mark.parametrize("each", PROGRAMS, ids=lambda p: p.name)
def test_every_traced_program_passes(each):
    """What `trace` makes of the catalogue; of several functions, of the first."""
    verify(fz.functions.trace(each.fns[0], *each.make_args()))


def test_reports_every_violation(expect):
    broken = program()
    insert(broken, "sin", aten.add_.Tensor, node(broken, "a"), 1)
    insert(broken, "sin", RESIZE_STORAGE, node(broken, "b"), 0)
    insert(broken, "sin", aten.cos.default, node(broken, "p"))
    broken.epilogue = (*broken.epilogue, Resize(7, 0))
    expect("every_violation", words(broken))


# -- the form of the graph -------------------------------------------------------------------------


def test_placeholders_match_inputs():
    broken = program()
    broken.inputs = broken.inputs[:2]
    assert_expected_inline(
        words(broken),
        """\
1 violation in the program
1. the placeholders are ['a', 'p', 'b'], the inputs are ['a', 'p']: one each, in this order""",
    )


def test_unknown_constant():
    broken = program()
    with broken.graph.inserting_before(node(broken, "sin")):
        broken.graph.create_node("get_attr", "weight").meta["val"] = None
    assert "`weight` reads the constant `weight`, which does not exist" in words(broken)


def test_call_method():
    broken = program()
    with broken.graph.inserting_before(node(broken, "sin")):
        broken.graph.call_method("sin", (node(broken, "a"),)).meta["val"] = None
    assert "is a call_method: every value is an input, a constant or an op" in words(broken)


def test_missing_value():
    broken = program()
    del node(broken, "sin").meta["val"]
    assert "`sin` has no meta['val']: set it as `passes.metadata.set_value` does" in words(broken)


def test_missing_tensor_meta():
    broken = program()
    del node(broken, "sin").meta["tensor_meta"]
    assert "`sin` has a tensor in meta['val'] and no meta['tensor_meta']" in words(broken)


def test_val_against_tensor_meta():
    broken = program()
    sin = node(broken, "sin")
    sin.meta["tensor_meta"] = sin.meta["tensor_meta"]._replace(dtype=torch.float64)
    expected = "`sin` is float32[4] by meta['val'], float64[4] by meta['tensor_meta']"
    assert expected in words(broken)


def test_val_against_input():
    broken = program()
    spec = replace(broken.inputs[0], geometry=contiguous_geometry((3,), torch.float32))
    broken.inputs = (spec, *broken.inputs[1:])
    expected = "`a` is float32[4] on cpu by meta['val'], float32[3] on cpu as an input"
    assert expected in words(broken)


def test_val_bytes_against_input():
    broken = program()
    broken.inputs = (replace(broken.inputs[0], nbytes=0), *broken.inputs[1:])
    expected = "the storage of `a` holds 16 bytes by meta['val'], 0 as an input"
    assert expected in words(broken)


# -- purity ----------------------------------------------------------------------------------------


def test_mutation():
    broken = program()
    insert(broken, "sin", aten.add_.Tensor, node(broken, "a"), 1)
    expected = (
        "1. `add__tensor` writes its argument `self` (`a`): use the functional form of "
        "aten.add_.Tensor, and let the epilogue write inputs\n"
    )
    assert expected in words(broken)
    assert_expected_inline(
        words(broken).partition(expected)[2],
        """\
       mul = aten.mul.Tensor(b, 2)
       mul_1 = aten.mul.Tensor(clone, 3)
     > add__tensor = aten.add_.Tensor(a, 1)
       sin = aten.sin.default(a)
       return (mul_1, sin, clone, mul)""",
    )


def test_mutation_of_a_list():
    broken = program()
    pair = [node(broken, "a"), node(broken, "b")]
    insert(broken, "sin", aten._foreach_add_.Scalar, pair, 1)
    assert "writes its argument `self` (`b`)" in words(broken)


def in_place(write: bool = True) -> fz.Program:
    """The program at stage INPLACE, whose commit comes before `sin`."""
    made = program()
    insert(made, "sin", commit)
    made.stage = "INPLACE"
    if write:
        insert(made, "sin", aten.add_.Tensor, node(made, "b"), 1)
        made.writes = (2,)
    return made


def test_mutation_is_allowed_in_place():
    verify(in_place())


def test_a_commit_is_for_stage_in_place():
    broken = in_place(write=False)
    broken.stage = "FUNCTIONAL"
    assert "`commit` commits at stage FUNCTIONAL: only INPLACE has one" in words(broken)


def test_two_commits():
    broken = in_place()
    insert(broken, "sin", commit)
    assert "a program at stage INPLACE has one commit, this one has 2" in words(broken)


def test_a_commit_that_is_not_given_what_is_guarded():
    broken = in_place()
    broken.value_guards = (ValueGuard(0, 1.0, "here"),)
    assert "the arguments of the commit are not the guarded values" in words(broken)


def test_a_write_before_the_commit():
    broken = in_place()
    insert(broken, "commit", aten.add_.Tensor, node(broken, "b"), 1)
    assert "writes its argument `self` (`b`), before the commit" in words(broken)


def test_a_temporary_may_be_written_before_the_commit():
    fine = in_place()
    made = insert(fine, "commit", aten.cos.default, node(fine, "a"))
    insert(fine, "commit", aten.add_.Tensor, made, 1)
    verify(fine)


def test_a_resize_in_place():
    broken = in_place()
    insert(broken, "sin", RESIZE_STORAGE, node(broken, "a"), 0)
    assert "is a resize: resizes belong to the epilogue" in words(broken)


def test_a_random_op_after_the_commit():
    broken = in_place()
    insert(broken, "sin", aten.rand_like.default, node(broken, "a"))
    assert "may fail, wait for other ranks, or read a generator, after the commit" in words(broken)


def test_a_write_that_is_not_told():
    broken = in_place()
    broken.writes = (0,)
    assert "ops write the inputs [2], and `writes` says [0]" in words(broken)


def test_resize():
    broken = program()
    insert(broken, "sin", RESIZE_STORAGE, node(broken, "a"), 0)
    expected = "is a resize: resizes belong to the epilogue"
    assert expected in words(broken)


def test_read_of_an_empty_input():
    broken = program()
    insert(broken, "sin", aten.cos.default, node(broken, "p"))
    expected = "reads `p`, whose storage holds 0 bytes on entry and would need 16"
    assert f"`cos_default` {expected}" in words(broken)


def test_read_of_an_empty_input_through_views():
    broken = program()
    view = insert(broken, "sin", aten.view.default, node(broken, "p"), [2, 2])
    t = insert(broken, "sin", aten.t.default, view)
    insert(broken, "sin", aten.cos.default, t)
    expected = "`cos_default` reads `t_default`, a view of `view_default`, a view of `p`, whose"
    assert expected in words(broken)


def test_unused_view_of_an_empty_input():
    broken = program()
    insert(broken, "sin", aten.view.default, node(broken, "p"), [2, 2])
    assert "`view_default` reads `p`, whose storage holds 0 bytes" in words(broken)


def test_returned_empty_input():
    broken = program()
    returning(broken, node(broken, "p"))
    assert "returns `p`, whose storage holds 0 bytes on entry" in words(broken)


def test_read_past_the_end_of_an_input():
    broken = program()
    broken.inputs = (replace(broken.inputs[0], nbytes=8), *broken.inputs[1:])
    expected = "`sin` reads `a`, whose storage holds 8 bytes on entry and would need 16"
    assert expected in words(broken)


# -- what leaves the graph -------------------------------------------------------------------------


# -- collectives -----------------------------------------------------------------------------------


def test_what_a_collective_has_only_begun_to_make():
    broken = program()
    begun = insert(broken, "sin", FUNCTIONAL.all_reduce.default, node(broken, "a"), "sum", "0")
    insert(broken, "sin", aten.cos.default, begun)
    assert (
        f"`cos_default` reads `{begun.name}`, which `{begun.name}` has not completed: "
        "read what `wait_tensor` returns" in words(broken)
    )


def test_a_wait_and_a_collective_that_nobody_reads():
    sound = program()
    begun = insert(sound, "sin", FUNCTIONAL.all_reduce.default, node(sound, "a"), "sum", "0")
    insert(sound, "sin", FUNCTIONAL.wait_tensor.default, begun)
    insert(sound, "sin", FUNCTIONAL.all_reduce.default, node(sound, "a"), "max", "0")
    verify(sound)


def test_part_of_a_list_that_is_under_way():
    broken = program()
    begun = insert(
        broken, "sin", FUNCTIONAL.all_reduce_coalesced.default, [node(broken, "a")], "sum", "0"
    )
    part = insert(broken, "sin", operator.getitem, begun, 0)
    insert(broken, "sin", aten.cos.default, part)
    assert f"`cos_default` reads `{part.name}`, which `{begun.name}` has not completed" in words(
        broken
    )


def test_output_on_an_input():
    broken = program()
    returning(broken, node(broken, "a"))
    assert "output 0 is `a`, which shares memory with input `a`: copy it" in words(broken)


def test_outputs_that_share():
    broken = program()
    view = insert(broken, "sin", aten.view.default, node(broken, "mul_1"), [2, 2])
    passes.metadata.set_value(view)
    returning(broken, node(broken, "mul_1"), view)
    expected = "output 1 is `view_default`, which shares memory with output 0: copy it"
    assert expected in words(broken)


def test_output_out_of_range():
    broken = program()
    broken.outputs = (Result(9), *broken.outputs[1:])
    assert "output 0 is result 9 of 4" in words(broken)


def test_output_larger_than_its_storage():
    broken = program()
    broken.outputs = (Result(0, FLAT._replace(size=(5,))), *broken.outputs[1:])
    expected = "output 0 is `mul_1` seen as float32[5], which needs 20 bytes of 16"
    assert expected in words(broken)


# -- the epilogue ----------------------------------------------------------------------------------

EPILOGUES: list[tuple[str, Callable[[fz.Program], tuple], str]] = [
    (
        "unknown_input",
        lambda p: (Resize(7, 0),),
        "a resize in the epilogue names input 7 of 3",
    ),
    (
        "unknown_source",
        lambda p: (Set(0, FLAT, 5, None),),
        "a set in the epilogue names input 5 of 3",
    ),
    (
        "unknown_result",
        lambda p: (Copy(2, FLAT, 9),),
        "a copy in the epilogue of `b` is from result 9 of 4",
    ),
    (
        "copy_into_nothing",
        lambda p: (Copy(1, FLAT, 0),),
        "a copy in the epilogue of `p` as float32[4] needs 16 bytes of a storage that holds 0",
    ),
    (
        "copy_after_a_resize_to_less",
        lambda p: (Resize(1, 8), Copy(1, FLAT, 0)),
        "needs 16 bytes of a storage that holds 8 then",
    ),
    (
        "copy_of_another_size",
        lambda p: (Copy(2, FLAT._replace(size=(2,)), 0),),
        "a copy in the epilogue of `b` as float32[2] is from `mul_1`, which is float32[4]",
    ),
    (
        "resized_twice",
        lambda p: (Resize(1, 8), Resize(1, 16)),
        "a resize in the epilogue makes `p` 16 bytes, resized before",
    ),
    (
        "negative",
        lambda p: (Resize(1, -8),),
        "a resize in the epilogue makes `p` -8 bytes, which is negative",
    ),
]


@pytest.mark.parametrize(
    ("make", "expected"), [e[1:] for e in EPILOGUES], ids=[e[0] for e in EPILOGUES]
)
def test_epilogue(make, expected):
    broken = program()
    broken.epilogue = make(broken)
    assert expected in words(broken)


def test_copy_from_what_the_epilogue_changes():
    broken = program()
    (output,) = broken.graph.find_nodes(op="output")
    returning(broken, *output.args[0][:2], node(broken, "b"))  # what is copied to `p`
    expected = (
        "the epilogue copies `b` to input 1, but it shares memory with `b`, "
        "which the epilogue changes: copy it first"
    )
    assert expected in words(broken)


def test_guards():
    broken = program()
    broken.value_guards = (ValueGuard(9, 1.0, "at line 1"),)
    broken.guards = (*broken.guards, TensorGuard(8, broken.inputs[0]))
    text = words(broken)
    assert "a guard on a value names result 9 of 4" in text
    assert "a TensorGuard names input 8 of 3" in text


# -- graph modules ---------------------------------------------------------------------------------


def test_graph_module():
    gm = make_fx(lambda x: x.sin())(values(4))
    passes.verify(gm)
    with pytest.raises(VerifyError, match="writes its argument `self`"):
        passes.verify(make_fx(lambda x: x.add_(1))(values(4)))
