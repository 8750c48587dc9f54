"""Fake results that are made anew look as those that ops give."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.fakes import FakeMaker, FakeTensor, FakeTensorMode
from functionalize.ir import fakes
from functionalize.ir.fake_mode import fake_mode
from functionalize.ir.fakes import Fakes
from functionalize.ir.ops import TensorRef, geometry_of
from functionalize.program.metadata import tensors_of
from functionalize.recorder.recorder import Recorder
from tests.fsdp.features import FEATURES
from tests.fsdp.twins import run

aten = torch.ops.aten


def look(value: Any) -> list[Any]:
    return [(geometry_of(t), t.device, t.untyped_storage().nbytes()) for t in tensors_of(value)]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "new": (aten.mm.default, (torch.ones(3, 4), torch.ones(4, 5))),
    "other strides": (aten.mm.default, (torch.ones(4, 3).t(), torch.ones(4, 5))),
    "view": (aten.slice.Tensor, (torch.ones(6, 4), 0, 2, 5)),
    "view of a view": (aten.t.default, (torch.ones(6, 4)[1:],)),
    "view of another dtype": (aten.view.dtype, (torch.ones(6, 4), torch.int32)),
    "expanded": (aten.expand.default, (torch.ones(1, 4), [3, 4])),
    "list of views": (aten.split.Tensor, (torch.ones(6, 4), 2)),
    "list": (aten._foreach_add.Scalar, ([torch.ones(2), torch.ones(3)], 1)),
    "list of alike": (aten._foreach_add.Scalar, ([torch.ones(2), torch.ones(3), torch.ones(2)], 1)),
    "lists": (
        aten._foreach_mul.List,
        (
            [torch.ones(2), torch.ones(2), torch.ones(2)],
            [torch.ones(2), torch.ones(2, 2), torch.ones(2)],
        ),
    ),
    "list and numbers": (aten._foreach_mul.ScalarList, ([torch.ones(2)] * 3, [1, 2.5, 1])),
    "several": (aten.native_layer_norm.default, (torch.ones(2, 3), [3], None, None, 1e-5)),
    "factory": (aten.empty.memory_format, ([2, 3],)),
    "number": (aten.add.Tensor, (torch.ones(3), 1)),
    "another number": (aten.add.Tensor, (torch.ones(3), 1.5)),
    "conjugate": (aten._conj.default, (torch.ones(3, dtype=torch.complex64),)),
    "itself and a view": (
        torch.ops.fsdp.all_gather_copy_in.default,
        ([torch.ones(2), torch.ones(1)], torch.ones(6), [2, 1], 3, 1),
    ),
    "itself": (aten.lift.default, (torch.ones(3),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_result_is_as_the_first(name: str):
    target, args = CALLS[name]
    fakes, plain = Fakes(), FakeTensorMode()
    convert = fakes.mode.from_tensor

    def faked(mode: Any) -> list[Any]:
        return torch.utils._pytree.tree_map_only(Tensor, mode, list(args))

    with plain:
        wanted = target(*faked(plain.from_tensor))
    with disable_current_modes(), torch.no_grad():
        given = [faked(convert) for _ in range(3)]
        # Copies: `from_tensor` gives one fake for one tensor.
        given = [torch.utils._pytree.tree_map_only(Tensor, lambda t: _again(t), g) for g in given]
        results = [fakes.run(target, g, {}) for g in given]
    for mine, result in zip(given, results, strict=True):
        assert type(result) is type(wanted) and look(result) == look(wanted)
        inputs = [storage(t) for a in mine for t in tensors_of(a)]
        of = [
            inputs.index(storage(t)) if storage(t) in inputs else None for t in tensors_of(result)
        ]
        fresh = [storage(t) for t in tensors_of(result) if storage(t) not in inputs]
        assert len(set(fresh)) == len(fresh)
        assert of == [
            None if target in (aten.mm.default, aten.add.Tensor) else found for found in of
        ]
    assert {storage(t) for t in tensors_of(results[1])}.isdisjoint(
        storage(t) for t in tensors_of(results[2])
    )


RECORDED = {
    **{n: CALLS[n] for n in CALLS if n != "itself"},
    "a tuple": (aten.native_dropout.default, (torch.ones(8, 4), 0.5, True)),
    "of a reduction": (aten.max.dim, (torch.ones(4, 3), 1)),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_result_is_as_that_of_the_fake_kernel(name: str):
    """Its type, and the looks of its tensors: a recording has lists where an op returns a tuple."""
    target, args = RECORDED[name]
    with Recorder(True) as recorder:
        target(*args)
    (record,) = (each for each in recorder.records if each.target is target)
    fakes, plain = Fakes(), Fakes()
    with disable_current_modes(), torch.no_grad():
        given = torch.utils._pytree.tree_map_only(Tensor, fakes.mode.from_tensor, list(args))
        found = fakes.run(target, given, {}, record)
        given = torch.utils._pytree.tree_map_only(Tensor, plain.mode.from_tensor, list(args))
        wanted = plain.run(target, given, {})
    assert type(found) is type(wanted) and look(found) == look(wanted)


def _again(fake: Any) -> Any:
    """Another fake that looks the same, on a storage of its own."""
    whole = fake.new_empty(fake.untyped_storage().nbytes() // fake.element_size())
    return whole.as_strided(fake.size(), fake.stride(), fake.storage_offset())


def values_of(name: str) -> tuple[list[Any], list[Any]]:
    """The values of a step's program, and what every op gives for them when it is run."""
    feature = FEATURES[name]
    with fz.world(size=feature.world, target="cpu"):
        step = fz.capture(feature.make_step(*feature.build()))
        for batch in feature.batches():
            run(step, batch)
        program = step.program
    program.describe()
    got, wanted = [], []
    with disable_current_modes(), torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "call_function" and "hint" not in node.meta:
                args, kwargs = torch.fx.node.map_arg(
                    (node.args, node.kwargs), lambda n: n.meta["val"]
                )
                mode = next(
                    (t.fake_mode for a in node.all_input_nodes for t in tensors_of(a.meta["val"])),
                    FakeTensorMode(),
                )
                with mode:
                    wanted.append((node.name, look(node.target(*args, **kwargs))))
                got.append((node.name, look(node.meta["val"])))
    return got, wanted


WRITES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "itself": (aten.add_.Tensor, (torch.ones(3), torch.ones(3))),
    "a list": (aten._foreach_add_.Scalar, ([torch.ones(2), torch.ones(3)], 1)),
    "out": (aten.mm.out, (torch.ones(3, 4), torch.ones(4, 5))),
    "a view": (aten.copy_.default, (torch.ones(6, 4)[1:3], torch.ones(4))),
    "transposed": (aten.t_.default, (torch.ones(3, 4),)),
    "resized": (aten.resize_.default, (torch.ones(3, 4), [5, 6])),
    "emptied": (aten.set_.default, (torch.ones(3, 4),)),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_second_write_leaves_its_arguments_as_the_first(name: str):
    target, args = WRITES[name]
    out = {"out": torch.ones(3, 5)} if name == "out" else {}
    fakes = Fakes()
    ran: list[Any] = []

    def written(run: Any) -> Any:
        """How a call leaves its arguments and what it returns, as indices of arguments."""
        call, named = torch.utils._pytree.tree_map_only(
            Tensor, fakes.mode.from_tensor, (list(args), out)
        )
        tensors = [*tensors_of(call), *tensors_of(list(named.values()))]
        made = run(call, named)
        index = {id(t): i for i, t in enumerate(tensors)}
        return look(tensors), [index.get(id(t)) for t in tensors_of(made)]

    def plain(call: Any, named: Any) -> Any:
        with fakes.mode:
            return target(*call, **named)

    def cached(call: Any, named: Any) -> Any:
        def op() -> Any:
            ran.append(target)
            return plain(call, named)

        return fakes._cache.run(target, call, named, op)

    below_autograd = torch._C._AutoDispatchBelowADInplaceOrView  # where a mode's ops are
    with disable_current_modes(), below_autograd():
        wanted = written(plain)
        assert [written(cached) for _ in range(3)] == [wanted] * 3
    assert len(ran) == (3 if name in ("transposed", "resized", "emptied") else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_fast_fake_is_as_the_constructor_makes_it(dtype: torch.dtype, device: str):
    mode, place = fake_mode(), torch.device(device)
    mode._allow_unsafe_data_ptr_access = False
    make = FakeMaker(mode).make
    metas = [torch.empty(3, 4, dtype=dtype, device="meta").t() for _ in range(3)]
    with disable_current_modes(), torch.no_grad():
        wanted, first, second = (
            FakeTensor(mode, metas[0], place),
            make(metas[1], place),
            make(metas[2], place),
        )
    assert make.__self__._states[place] is not None
    for made in (first, second):
        assert vars(made) == vars(wanted) and look(made) == look(wanted)
        assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(wanted)
        assert made._version == 0 and made._base is None and not made.requires_grad
        with pytest.raises(RuntimeError, match="data"):
            made.data_ptr()
    assert first is not second and vars(first) is not vars(second)
    sizes = [sys.getsizeof(vars(each)) for each in (wanted, first, second)]
    assert max(sizes) == sizes[0]  # thousands of fakes are as small as the constructor's
    first.assumed = 1
    assert not hasattr(second, "assumed")


def test_geometries_that_are_known_give_the_same_key():
    with disable_current_modes(), torch.no_grad(), fake_mode():
        x, y = torch.empty(3, 4).t(), torch.empty(6, dtype=torch.int64)[2:]
    args = (x, [y, 2, x], 3.0, None, "mean", (1, True))
    refs = tuple(_refs(args))
    tensors, same = [], []
    key = fakes._key(args, tensors)
    assert fakes._key(args, same, refs) == key
    assert [id(t) for t in tensors] == [id(t) for t in same] == [id(t) for t in (x, y, x)]
    others = [
        (y, *args[1:]),
        (*args[:5], (1, 1)),
        (*args[:5], [1, True]),
        (x, *args[1][:2], *args[2:]),
    ]
    assert all(fakes._key(other, []) != key for other in others)


def _refs(args: Any) -> list[Any]:
    """The arguments with a reference in place of each tensor, as a recorder has them."""
    return [
        TensorRef(0, geometry_of(arg))
        if isinstance(arg, Tensor)
        else _refs(arg)
        if isinstance(arg, (list, tuple))
        else arg
        for arg in args
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [16, 12])
@pytest.mark.parametrize("dims", [(2, 3), (3, 3), (2, 2)])
def test_grouped_products_look_as_on_the_cpu(
    dims: tuple[int, int], columns: int, dtype: torch.dtype
) -> None:
    """torch's meta kernel takes bfloat16 alone, and lays its rows out otherwise."""
    a = torch.ones(*(8, 16) if dims[0] == 2 else (3, 8, 16), dtype=dtype)
    if dims == (2, 2):
        if dtype is torch.bfloat16 and columns == 12:
            pytest.skip("rows of 24 bytes: eager refuses them")
        b = torch.ones(16, columns, dtype=dtype)
    else:
        b = torch.ones(3, columns, 16, dtype=dtype).transpose(1, 2)
    offs = (
        None if dims[0] == 3 else torch.tensor([2, 5, 8 if b.dim() == 3 else 16], dtype=torch.int32)
    )
    real = aten._grouped_mm.default(a, b, offs)
    fakes = Fakes()
    given = [
        None if t is None else fakes.like(geometry_of(t), t.untyped_storage().nbytes(), t.device)
        for t in (a, b, offs)
    ]
    assert look(fakes.run(aten._grouped_mm.default, given, {})) == look(real)


@pytest.mark.parametrize("name", ["blocks_and_root", "bf16", "tied_in_the_root"])
def test_the_values_of_a_step(name: str):
    got, wanted = values_of(name)
    assert len(got) > 100 and got == wanted
