"""Outputs of a replay: gradients as DTensors around parts of one result, also where a result changes its size."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from functionalize._compat.distributed import fake_process_group
from functionalize.ir.inputs import Call
from functionalize.ir.ops import geometry_of
from functionalize.ir.outputs import Constant, OutputBuilder, Result, SameAs, Wrapped


def test_gradients_around_parts_of_a_result() -> None:
    with fake_process_group(0, 1):
        like = DTensor.from_local(torch.zeros(2, 3), init_device_mesh("cpu", (1,)), [Replicate()])
        names, context = like.__tensor_flatten__()
        (name,) = [n for n in names if isinstance(getattr(like, n), torch.Tensor)]
        others = {n: Constant(getattr(like, n)) for n in names if n != name}
        window = geometry_of(like._local_tensor)
        parts = [window._replace(offset=at) for at in (0, 6)]
        shards = [
            Wrapped(DTensor, {name: Result(1, part), **others}, context, like.shape, like.stride())
            for part in parts
        ]
        builder = OutputBuilder([shards[0], Result(0), shards[1], SameAs(0), Constant(3)])
        # Of other sizes, at another offset, and as at first.
        for whole in (
            torch.rand(12),
            torch.rand(12),
            torch.rand(20),
            torch.rand(14)[2:],
            torch.rand(12),
        ):
            loss = torch.rand(())
            first, same, second, again, number = builder.build(Call([], []), [], [loss, whole])
            assert same is loss and again is first and number == 3
            for made, at in ((first, 0), (second, 6)):
                assert type(made) is DTensor and made._spec == like._spec and not made.requires_grad
                assert torch.equal(made._local_tensor, whole[at : at + 6].view(2, 3))
                assert made._local_tensor.untyped_storage() is whole.untyped_storage()
