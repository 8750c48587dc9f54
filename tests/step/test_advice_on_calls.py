"""A refusal names a call or an op of the step, its line, and an edit; the edited step is captured and replays.

See `test_advice.py`, whose rows are about state in Python.
"""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, matmul
from torch.linalg import svdvals

import functionalize as fz
from functionalize.errors import FunctionalizeError, UncapturableError
from tests.step.refusals import OUTSIDE, Owner, Row, check, detached, plain, times_given

_FOLDER = Path(os.devnull)  # set by the test


def _number(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x).item()


def _trained(o: Owner, x: Tensor) -> Tensor:
    loss = o.loss(x)
    loss.backward()
    o.optimizer.step()
    o.optimizer.zero_grad()
    return loss.detach()


def _trains(o: Owner, x: Tensor, given: Any) -> Any:
    return _trained(o, x)


# -- clocks and files that are read ----------------------------------------------------------------


def _reads_clock(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * (1 + time.time() % 7)


def _reads_date(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * (1 + datetime.datetime.now().second)


def _random_bytes(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * (1 + os.urandom(1)[0])


# -- what leaves the process -----------------------------------------------------------------------


def _writes_file(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x).item()
    with (_FOLDER / "log").open("a") as file:
        file.write(f"{loss}")
    return loss


def _write(o: Owner, loss: Any) -> None:
    with (_FOLDER / "log").open("a") as file:
        file.write(f"{loss}")


def _writes_stderr(o: Owner, x: Tensor, given: Any) -> Any:
    sys.stderr.write("")
    return o.loss(x)


def _saves(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x).detach()
    torch.save(loss, _FOLDER / "loss.pt")
    return loss


def _starts_thread(o: Owner, x: Tensor, given: Any) -> Any:
    thread = threading.Thread(target=len, args=([],))
    thread.start()
    thread.join()
    return o.loss(x)


def _prints_object(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    print(o.note)
    return loss


def _prints_time(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    print(time.time())
    return loss


def _prints_to_file(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x).item()
    with (_FOLDER / "log").open("a") as file:
        print(loss, file=file)
    return loss


def _logs_then_raises(o: Owner, x: Tensor, given: Any) -> Any:
    try:
        print(o.loss(x).item(), end=0)  # type: ignore[call-overload]
    except TypeError:
        pass
    return o.loss(x)


def _prints_number(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    print(loss.item())
    return loss


# -- schedulers ------------------------------------------------------------------------------------


def _epoch(o: Owner, x: Tensor, given: Any) -> Any:
    loss = _trained(o, x)
    o.scheduler.step(3)
    return loss


def _scheduled(o: Owner, x: Tensor, given: Any) -> Any:
    loss = _trained(o, x)
    o.scheduler.step()
    return loss


def _sets_scheduler(o: Owner, x: Tensor, given: Any) -> Any:
    loss = _trained(o, x)
    o.scheduler.gamma = 0.25
    return loss


def _new_scheduler(o: Owner, x: Tensor, given: Any) -> Any:
    loss = _trained(o, x)
    torch.optim.lr_scheduler.StepLR(o.optimizer, 2, 0.5)
    return loss


def _reads_rate_after(o: Owner, x: Tensor, given: Any) -> Any:
    loss = _trained(o, x)
    o.scheduler.step()
    return loss * o.scheduler.get_last_lr()[0]


def _reads_rate_before(o: Owner, x: Tensor, given: Any) -> Any:
    loss = _trained(o, x) * o.scheduler.get_last_lr()[0]
    o.scheduler.step()
    return loss


def _decides_by_rate_after(o: Owner, x: Tensor, given: Any) -> Any:
    loss = _trained(o, x)
    o.scheduler.step()
    return loss * 2 if o.optimizer.param_groups[0]["lr"] < 0.01 else loss


def _decides_by_rate_before(o: Owner, x: Tensor, given: Any) -> Any:
    is_low = o.optimizer.param_groups[0]["lr"] < 0.01
    loss = _trained(o, x)
    loss = loss * 2 if is_low else loss
    o.scheduler.step()
    return loss


# -- how Python reads tensors ----------------------------------------------------------------------


def _by_numpy(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    return loss * float(loss.detach().numpy())


def _by_item(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    return loss * loss.detach().item()


def _by_list(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * sum(x[0].tolist())


def _by_items(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * sum([each.item() for each in x[0].unbind()])


def _as_text(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x).detach()
    o.text = str(loss)
    return loss


def _by_pointer(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * (1 if x.data_ptr() == o.mask.data_ptr() else 2)


def _by_identity(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * (1 if x is o.mask else 2)


def _pickled(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x).detach()
    pickle.dumps(loss)
    return loss


def _listed_computed(o: Owner, x: Tensor, given: Any) -> Any:
    found = (o.model(x) > 0).sum(1).tolist()
    return o.loss(x) * sum(found)


def _items_computed(o: Owner, x: Tensor, given: Any) -> Any:
    found = [each.item() for each in (o.model(x) > 0).sum(1).unbind()]
    return o.loss(x) * sum(found)


def _selected(o: Owner, x: Tensor, given: Any) -> Any:
    out = o.model(x)
    return out[out > 0].sum()


def _masked(o: Owner, x: Tensor, given: Any) -> Any:
    out = o.model(x)
    return torch.where(out > 0, out, 0.0).sum()


# -- generators ------------------------------------------------------------------------------------


def _state_set(o: Owner, x: Tensor, given: Any) -> Any:
    torch.default_generator.manual_seed(3)
    return o.loss(x) * torch.rand(())


def _seeded(o: Owner, x: Tensor, given: Any) -> Any:
    torch.manual_seed(3)
    return o.loss(x) * torch.rand(())


def _seeds(o: Owner, x: Tensor, given: Any) -> Any:
    torch.seed()
    return o.loss(x)


def _initial_seed(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * (torch.initial_seed() % 2)


def _generator_made(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * torch.rand((), generator=torch.Generator().manual_seed(1))


def _generator_kept(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * torch.rand((), generator=o.generator)


# -- ops and settings ------------------------------------------------------------------------------


def _sets_dtype(o: Owner, x: Tensor, given: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    loss = o.loss(x) * torch.ones(1)
    torch.set_default_dtype(torch.float32)
    return loss.float()


def _by_cond(o: Owner, x: Tensor, given: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))


def _by_if(o: Owner, x: Tensor, given: Any) -> Any:
    return x * 2 if x.sum().item() > 0 else x * 3


def _traces(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(torch.jit.trace(lambda x: x * 2, (x,))(x))


def _doubled(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x * 2)


def _backward_in_thread(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    o.optimizer.zero_grad()
    return loss.detach()


def _backward(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    loss.backward()
    o.optimizer.zero_grad()
    return loss.detach()


def _history(owner: Owner) -> Any:
    return torch.ones(4, requires_grad=True) * 2


def _backward_beyond(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x * given)
    loss.backward()
    o.optimizer.zero_grad()
    return loss.detach()


def _backward_detached(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x * given.detach())
    loss.backward()
    o.optimizer.zero_grad()
    return loss.detach()


def _sparse(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x.to_sparse().to_dense())


def _quantised(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize())


def _nested(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(torch.nested.nested_tensor([*x]).to_padded_tensor(0.0))


def _unfilled(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) + (torch.empty(3) * 0).isnan().all()


def _filled(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) + (torch.zeros(3) * 0).isnan().all()


def _unordered(o: Owner, x: Tensor, given: Any) -> Any:
    x = x.clone()
    x.add_(x[:1].expand(3, 4))
    return o.loss(x)


def _ordered(o: Owner, x: Tensor, given: Any) -> Any:
    x = x.clone()
    x.add_(x[:1].expand(3, 4).clone())
    return o.loss(x)


def _into_strides(o: Owner, x: Tensor, given: Any) -> Any:
    out = torch.empty(4, 3).t()
    torch.sum(x.expand(2, 3, 4), 0, out=out)
    return o.loss(x) + out.sum()


def _copied_into_strides(o: Owner, x: Tensor, given: Any) -> Any:
    out = torch.empty(4, 3).t()
    out.copy_(torch.sum(x.expand(2, 3, 4), 0))
    return o.loss(x) + out.sum()


def _values_by_name(o: Owner, x: Tensor, given: Any) -> Any:
    return svdvals(x).sum()


def _values_by_attribute(o: Owner, x: Tensor, given: Any) -> Any:
    return torch.linalg.svdvals(x).sum()


@torch.library.custom_op("advice::noisy", mutates_args=())
def _noise(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape)


@torch.library.custom_op(
    "advice::tagged", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def _tagged_noise(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape)


@torch.library.custom_op("advice::count", mutates_args=())
def _count(x: Tensor) -> int:
    return int((x > 0).sum())


@torch.library.custom_op("advice::counted", mutates_args=())
def _count_tensor(x: Tensor) -> Tensor:
    return (x > 0).sum()


@torch.library.custom_op("advice::product", mutates_args=())
def _product(x: Tensor) -> Tensor:
    return x @ x.t()


for each in (_noise, _tagged_noise):
    each.register_fake(torch.empty_like)
_count_tensor.register_fake(lambda x: torch.empty((), dtype=torch.int64))
_product.register_fake(lambda x: x.new_empty(x.shape[0], x.shape[0]))


def _noisy(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) + _noise(x.detach()).sum()


def _noisy_tagged(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) + _tagged_noise(x.detach()).sum()


def _number_of_op(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * _count(x)


def _tensor_of_op(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * _count_tensor(x).item()


def _op_under_autocast(o: Owner, x: Tensor, given: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _product(x).sum()


def _op_without_autocast(o: Owner, x: Tensor, given: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        return _product(x.bfloat16()).sum()


def _overlaps(o: Owner, x: Tensor, given: Any) -> Any:
    x = x.clone()
    _swap(x[0], x[:, 0])
    return o.loss(x)


def _overlaps_copy(o: Owner, x: Tensor, given: Any) -> Any:
    x = x.clone()
    _swap(x[0], x[:, 0].clone())
    return o.loss(x)


@torch.library.custom_op("advice::add_first", mutates_args=("x",))
def _swap(x: Tensor, y: Tensor) -> None:
    x.copy_(x + y[0])


def _draws_into_gaps(o: Owner, x: Tensor, given: Any) -> Any:
    torch.manual_seed(1)
    out = torch.zeros(6, 8)
    out[:, ::2].normal_()
    return o.loss(out[:, ::2])


def _draws_then_copies(o: Owner, x: Tensor, given: Any) -> Any:
    torch.manual_seed(1)
    out = torch.zeros(6, 8)
    out[:, ::2].copy_(torch.empty(6, 4).normal_())
    return o.loss(out[:, ::2])


def _product_by_name(o: Owner, x: Tensor, given: Any) -> Any:
    return matmul(x.view(3, 1, 4), torch.ones(1, 4, 2)).sum()


def _product_by_attribute(o: Owner, x: Tensor, given: Any) -> Any:
    return torch.matmul(x.view(3, 1, 4), torch.ones(1, 4, 2)).sum()


def _differentiates_filled(o: Owner, x: Tensor, given: Any) -> Any:
    value = o.model.bias.sum()
    filled = x.masked_fill(x > 0, value).square().sum()
    (found,) = torch.autograd.grad(filled, value, create_graph=True)
    return found.detach()


def _differentiates_selected(o: Owner, x: Tensor, given: Any) -> Any:
    value = o.model.bias.sum()
    filled = torch.where(x > 0, value, x).square().sum()
    (found,) = torch.autograd.grad(filled, value, create_graph=True)
    return found.detach()


def _scheduled_by_tensors(o: Owner, x: Tensor, given: Any) -> Any:
    loss = _trained(o, x)
    o.by_tensors.step()
    return loss


def _reads_rates_after(o: Owner, x: Tensor, given: Any) -> Any:
    loss = _trained(o, x)
    o.scheduler.step()
    return loss * o.scheduler.base_lrs[0]


def _reads_rates_before(o: Owner, x: Tensor, given: Any) -> Any:
    rate = o.scheduler.base_lrs[0]
    loss = _trained(o, x)
    o.scheduler.step()
    return loss * rate


# -- results ---------------------------------------------------------------------------------------


def _returns_generator(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    return (loss * i for i in range(3))


def _returns_list(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    return [loss * i for i in range(3)]


def _returns_function(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    return lambda: loss


_READ_OUTSIDE = r"which changes by itself and which a replay would not read: do so outside the step"

ROWS = (
    Row(_reads_clock, r"reads time\.time at", _READ_OUTSIDE, times_given, is_same=False),
    Row(_reads_date, r"reads datetime\.now at", _READ_OUTSIDE, times_given, is_same=False),
    Row(
        _random_bytes, r"reads files, by os\.urandom at", _READ_OUTSIDE, times_given, is_same=False
    ),
    Row(_writes_file, r"writes to the file `.*log` at", OUTSIDE, _number, after=_write),
    Row(
        _writes_stderr,
        r"writes to sys\.stderr at",
        OUTSIDE,
        plain,
        after=lambda o, found: sys.stderr.write(""),
    ),
    Row(
        _saves,
        r"saves by torch\.save at",
        OUTSIDE,
        detached,
        after=lambda o, found: torch.save(found, _FOLDER / "loss.pt"),
    ),
    Row(_starts_thread, r"starts a thread at", OUTSIDE, plain),
    Row(_prints_object, r"prints a Note at", OUTSIDE, plain, after=lambda o, found: print(o.note)),
    Row(
        _prints_time,
        r"prints at .*\n?.*its arguments may change by themselves, since the step reads time\.time",
        OUTSIDE,
        plain,
        after=lambda o, found: print(time.time()),
    ),
    Row(
        _prints_to_file,
        r"prints to another stream than sys\.stdout and sys\.stderr at",
        OUTSIDE,
        _number,
        after=_write,
    ),
    Row(
        _logs_then_raises,
        r"prints at .* which raises TypeError, and a replay would raise after the whole step",
        OUTSIDE,
        plain,
    ),
    Row(
        _epoch,
        r"steps a scheduler with an epoch at",
        OUTSIDE,
        _trains,
        after=lambda o, found: o.scheduler.step(3),
    ),
    Row(
        _sets_scheduler,
        r"sets `gamma` of a StepLR to a number of its own",
        OUTSIDE,
        _trains,
        after=lambda o, found: setattr(o.scheduler, "gamma", 0.25),
    ),
    Row(_new_scheduler, r"sets `step_size` of a StepLR", OUTSIDE, _trains),
    Row(
        _reads_rate_after,
        r"reads `_last_lr` of a StepLR after a call that sets it",
        r"so make it there",
        _reads_rate_before,
        is_same=False,
    ),
    Row(
        _decides_by_rate_after,
        r"reads `optimizer` group 0: lr after a call that sets it",
        r"so make it there",
        _decides_by_rate_before,
        is_same=False,
    ),
    Row(
        _by_numpy,
        r"Python reads a tensor by \.numpy\(\)",
        r"call \.item\(\) for a number",
        _by_item,
    ),
    Row(_by_list, r"Python reads a tensor by \.tolist\(\)", r"use \.item\(\)", _by_items),
    Row(
        _listed_computed, r"Python reads a tensor .*by \.tolist\(\)", r"\.item\(\)", _items_computed
    ),
    Row(
        _as_text,
        r"Python reads a tensor as text",
        r"return the tensor, and make the text outside the step",
        detached,
        after=lambda o, found: setattr(o, "text", str(found)),
    ),
    Row(
        _by_pointer,
        r"Python reads a tensor by \.data_ptr\(\)",
        r"compare tensors by `is`",
        _by_identity,
    ),
    Row(
        _pickled,
        r"Python reads a tensor by pickling it",
        r"return the tensor, and save it outside the step",
        detached,
        after=lambda o, found: pickle.dumps(found),
    ),
    Row(
        _selected,
        r"aten\.index\.Tensor gives a result whose size depends on data at",
        r"compute with a mask \(`torch\.where`",
        _masked,
        options={"dynamic": False},
        is_same=False,
    ),
    Row(
        _state_set,
        r"a random generator is set inside the step",
        r"torch\.manual_seed, .*: use these",
        _seeded,
    ),
    Row(_seeds, r"torch\.seed\(\) is called inside the step", r"call it outside the step", plain),
    Row(
        _initial_seed,
        r"torch\.initial_seed\(\) is called inside the step",
        r"call it outside the step",
        times_given,
        lambda o: torch.tensor(torch.initial_seed() % 2),
    ),
    Row(
        _generator_made,
        r"draws from a torch\.Generator argument",
        r"keep the generator in one attribute",
        _generator_kept,
        is_same=False,
    ),
    Row(
        _sets_dtype,
        r"changes torch's setting `default_dtype`",
        r"set it outside the step",
        plain,
        is_same=False,
    ),
    Row(_by_cond, r"runs the higher-order op `cond`", r"use Python's `if`", _by_if),
    Row(_traces, r"traces code for TorchScript", r"trace it outside the step", _doubled),
    Row(
        _backward_in_thread,
        r"its backward runs in another thread",
        r"call backward\(\) in that thread",
        _backward,
    ),
    Row(
        _backward_beyond,
        r"its backward goes through `given`",
        r"compute `given` inside the step, or detach it",
        _backward_detached,
        _history,
    ),
    Row(_sparse, r"layout torch\.sparse_coo", r"Compute with a dense tensor", plain),
    Row(
        _quantised,
        r"makes a quantised tensor",
        r"Compute with a dense tensor",
        plain,
        is_same=False,
    ),
    Row(_nested, r"makes a nested tensor", r"Compute with a dense tensor", plain),
    Row(
        _unfilled,
        r"reads a tensor that was made without contents",
        r"fill it, or make it by torch\.zeros",
        _filled,
    ),
    Row(
        _unordered,
        r"reads an expanded view of it",
        r"clone\(\) the view before",
        _ordered,
        is_same=False,
    ),
    Row(
        _into_strides,
        r"adds in the order of the strides of `out`",
        r"reduce without out=, then copy_\(\)",
        _copied_into_strides,
        is_same=False,
    ),
    Row(
        _values_by_name,
        r"decomposes a matrix",
        r"as attributes of torch\.linalg",
        _values_by_attribute,
        is_same=False,
    ),
    Row(
        _noisy,
        r"advice\.noisy\.default draws random numbers, which its schema does not say",
        r"give it the tag",
        _noisy_tagged,
    ),
    Row(
        _number_of_op,
        r"advice\.count\.default returns a number to Python",
        r"let it return a tensor, and call \.item\(\)",
        _tensor_of_op,
    ),
    Row(
        _op_under_autocast,
        r"advice\.product\.default calls other ops under autocast",
        r"switch autocast off around the call",
        _op_without_autocast,
        is_same=False,
    ),
    Row(
        _overlaps,
        r"writes an argument .* that overlaps another one",
        r"clone\(\) one of them",
        _overlaps_copy,
    ),
    Row(
        _draws_into_gaps,
        r"draws into .*, a tensor with gaps",
        r"draw into a contiguous tensor, then copy_\(\)",
        _draws_then_copies,
        is_same=False,
    ),
    Row(
        _product_by_name,
        r"multiplies a batch of matrices by a function that was read before the recording",
        r"call it as torch\.matmul",
        _product_by_attribute,
    ),
    Row(
        _differentiates_filled,
        r"computes the gradient of a tensor that `masked_fill` filled in",
        r"use `torch\.where",
        _differentiates_selected,
    ),
    Row(
        _scheduled_by_tensors,
        r"steps a scheduler at .*it runs ops, whose tensors a replay has at the end of the step only",
        r"step it outside the step",
        _trains,
        after=lambda o, found: o.by_tensors.step(),
    ),
    Row(
        _reads_rates_after,
        r"reads `base_lrs` of a StepLR, which a replay steps after it",
        r"read it before `scheduler\.step\(\)`, or outside the step",
        _reads_rates_before,
    ),
    Row(
        _returns_generator,
        r"returns a generator, which runs after the step has returned",
        r"return what it gives",
        _returns_list,
        has_line=False,
        is_same=False,
    ),
    Row(
        _returns_function,
        r"returns an object of type function that hides tensors",
        r"return the tensors",
        plain,
        has_line=False,
        is_same=False,
    ),
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    monkeypatch.setitem(globals(), "_FOLDER", tmp_path)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.mark.filterwarnings(
    "ignore"
)  # of torch, about quantised and nested tensors, schedulers, `torch.jit`
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_refusal_proposes_an_edit_that_works(row):
    check(row)


# -- refusals that do not come from the next call of a step ----------------------------------------


def test_a_backward_from_the_result_of_a_replay_belongs_into_the_step():
    o = Owner()
    step = fz.capture(lambda x: o.loss(x), audit=False)
    for _ in range(6):
        loss = step(torch.ones(3, 4))
    with pytest.raises(
        UncapturableError, match=r"an output of a captured step.*: call backward inside the step"
    ):
        loss.backward()
    inside = fz.capture(lambda x: _backward(o, x, None), audit=False, on_uncapturable="raise")
    found = [inside(torch.ones(3, 4)) for _ in range(8)]
    assert inside.stats.replays >= 4
    assert all(torch.equal(each, o.loss(torch.ones(3, 4))) for each in found)


def test_a_second_derivative_belongs_into_the_captured_forward():
    o = Owner()
    x = torch.ones(3, 4, requires_grad=True)

    def penalised(x: Tensor) -> Tensor:
        loss = o.loss(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    forward = fz.capture(lambda x: o.loss(x), backward=True, audit=False)
    with pytest.raises(
        FunctionalizeError, match="take the second derivative inside the captured function"
    ):
        for _ in range(8):
            torch.autograd.grad(forward(x), x, create_graph=True)
            torch.autograd.grad(forward(x), x)
    inside = fz.capture(penalised, backward=True, audit=False, on_uncapturable="raise")
    for _ in range(8):
        (found,) = torch.autograd.grad(inside(x), x)
        (expected,) = torch.autograd.grad(penalised(x), x)
        assert torch.equal(found, expected)
    assert inside.stats.replays >= 4


class _Slotted:
    __slots__ = ("owner",)

    @fz.capture
    def step(self, x: Tensor) -> Tensor:
        return self.owner.loss(x)


class _WithDict:
    __slots__ = ("__dict__", "__weakref__", "owner")

    @fz.capture
    def step(self, x: Tensor) -> Tensor:
        return self.owner.loss(x)


def test_a_method_needs_a_dict_of_its_object():
    slotted, other = _Slotted(), _WithDict()
    slotted.owner = other.owner = Owner()
    message = r"`step` of a _Slotted cannot be captured.*: .*\. Add `__dict__` to its `__slots__`"
    with pytest.warns(fz.errors.UncapturableWarning, match=message):
        slotted.step(torch.ones(3, 4))
    for _ in range(8):
        assert torch.equal(other.step(torch.ones(3, 4)), slotted.step(torch.ones(3, 4)))
    assert other.step.stats.replays >= 4


def test_an_optimizer_that_counts_in_python_steps_outside():
    owners = Owner(), Owner()

    def stepped(o: Owner, closure: Any) -> Tensor:
        return o.lbfgs.step(closure).detach()

    def closure_of(o: Owner, loss_of: Any, x: Tensor) -> Any:
        def closure() -> Tensor:
            o.lbfgs.zero_grad()
            loss = loss_of(x)
            loss.backward()
            return loss

        return closure

    o = owners[0]
    refused = fz.capture(
        lambda x: stepped(o, closure_of(o, o.loss, x)), audit=False, on_uncapturable="raise"
    )
    pattern = r"`lbfgs\.state\..*(\n.*)*test_advice_on_calls\.py:\d+, in "
    with pytest.raises(UncapturableError, match=pattern) as found:
        for i in range(10):
            refused(torch.ones(3, 4) + i)
    assert OUTSIDE in str(found.value)
    o, twin = Owner(), Owner()
    model = o.model  # of `o`, the state of its optimizers would be guarded, too
    captured = fz.capture(
        lambda x: model(x).square().sum(), backward=True, audit=False, on_uncapturable="raise"
    )
    for i in range(8):
        x = torch.ones(3, 4) + i
        found_loss = stepped(o, closure_of(o, captured, x))
        assert torch.equal(found_loss, stepped(twin, closure_of(twin, twin.loss, x)))
    assert captured.stats.replays >= 4
