"""The table of storages: numbers, sizes, who is held, what an observer hears."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize.errors import UnsupportedTensorError
from functionalize.recorder.storage_table import StorageInfo, StorageTable


class Heard:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.resized: list[tuple[int, int]] = []

    def storage_seen(self, info: StorageInfo, storage: torch.UntypedStorage) -> None:
        self.seen.append((info.serial, info.nbytes))

    def storage_resized(self, serial: int, nbytes: int) -> None:
        self.resized.append((serial, nbytes))


def test_views_of_one_storage_have_one_number_and_the_first_is_the_external() -> None:
    table, x = StorageTable(), torch.ones(4)
    first, view = table.bring_in(x, "x"), table.ref(x[1:])
    assert (first.storage, view.storage, view.geometry.offset) == (0, 0, 1)
    (external,) = table.externals
    assert external.tensor is x and external.info.name == "x" and not external.literal
    assert table.out_ref(x + 1).storage == 1 and table.born[1][0] == 16


def test_tensors_with_equal_geometries_share_one() -> None:
    table, x = StorageTable(), torch.ones(4, 2)
    first = table.bring_in(x, "x").geometry
    assert table.ref(torch.ones(4, 2)).geometry is first and table.out_ref(x + 1).geometry is first
    assert table.ref(x[1:]).geometry is not first and table.ref(x).geometry is first
    assert table.ref(torch.ones(2, 4).t()).geometry.stride == (1, 4)


def test_sizes_of_an_enclosing_tracer_cannot_be_shared() -> None:
    seen = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        table = StorageTable()
        seen.append(table.bring_in(x, "x").geometry)
        seen.append(table.out_ref(x[1:].clone()).geometry)
        return x + 1

    make_fx(traced, tracing_mode="symbolic")(torch.ones(5))
    assert all(isinstance(each.size[0], torch.SymInt) for each in seen)
    assert [int(each.size[0]) for each in seen] == [5, 4]


def test_an_argument_on_a_resized_storage_is_noted() -> None:
    table, x, y = StorageTable(), torch.ones(4), torch.ones(4)
    table.ref(x), table.ref(y)
    assert table.note_size(x.untyped_storage()) is None
    x.untyped_storage().resize_(0)
    assert table.note_size(x.untyped_storage()) == (0, 0)
    assert table.note_size(x.untyped_storage()) is None
    table.ref(y)
    assert not table.met_resized
    table.ref(x)
    assert table.met_resized


def test_an_observer_hears_of_every_storage_and_size() -> None:
    heard = Heard()
    table, x = StorageTable(heard), torch.ones(4)
    table.ref(x), table.ref(x.view(2, 2)), table.out_ref(torch.ones(2))
    x.untyped_storage().resize_(8)
    table.note_size(x.untyped_storage())
    assert heard.seen == [(0, 16), (1, 8)] and heard.resized == [(0, 8)]


@pytest.mark.parametrize("holds", [True, False])
def test_tensors_of_the_program_are_not_held_and_those_from_outside_are_if_asked(
    holds: bool,
) -> None:
    table = StorageTable()
    table.holds_externals = holds
    outside, made = torch.ones(4), torch.ones(4)
    table.bring_in(outside, "outside"), table.out_ref(made)
    found = [weakref.ref(outside), weakref.ref(made)]
    del outside, made
    gc.collect()
    assert [each() is not None for each in found] == [holds, False]
    assert [info.alive for info in table.infos] == [holds, False]


def test_what_is_held_of_a_tensor_with_a_history_is_a_detached_alias() -> None:
    table, x = StorageTable(), torch.ones(4, requires_grad=True)
    y = x * 2
    table.ref(y)
    held = table.externals[0].tensor
    assert held.grad_fn is None and held.data_ptr() == y.data_ptr()


def test_a_tensor_without_a_storage_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"layout torch.sparse_coo"):
        StorageTable().ref(torch.eye(2).to_sparse())
