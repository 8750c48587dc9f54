"""A refusal names what the step does to Python state, its line, and an edit; the edited step is captured and replays.

Each row: a step that is refused, what the message says, the words of the edit, and the edited step. The rows about
calls and ops are in `test_advice_on_calls.py`; `test_advice_is_complete.py` asserts that each refusal has a row.
"""

from __future__ import annotations

import collections
import datetime
import os
import random
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import FunctionalizeError
from tests.ranks import run_on_ranks
from tests.step.refusals import (
    OUTSIDE,
    Counted,
    Kept,
    Owner,
    Row,
    check,
    detached,
    plain,
    times_given,
)

# -- what moves when it is read --------------------------------------------------------------------


def _next(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * next(o.it)


def _next_batch(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(next(o.batches))


def _batch_given(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(given)


def _shuffled(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * float(o.rng.permutation(4)[0])


def _shuffled_by_random(o: Owner, x: Tensor, given: Any) -> Any:
    items = [0.5, 1.5, 2.5]
    random.shuffle(items)
    return o.loss(x) * items[0]


def _first_of_shuffled(owner: Owner) -> Tensor:
    items = [0.5, 1.5, 2.5]
    random.shuffle(items)
    return torch.tensor(items[0])


def _drawn_by_numpy(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * float(np.random.rand(2)[0])


def _put_into_queue(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.queue.put(loss.item())
    return loss.item()


def _number(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x).item()


# -- containers ------------------------------------------------------------------------------------


def _read_list(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.losses.append(loss.item())
    return loss * len(o.losses)


def _appended(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.losses.append(loss.item())
    return loss


def _popped(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * o.todo.pop()


def _appended_object(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.losses.append(datetime.timedelta(hours=1))
    return loss


def _appended_tuple(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.losses.append(("hours", 1))
    return loss


def _appended_with_history(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.losses.append(loss)
    return loss


def _appended_detached(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.losses.append(loss.detach())
    return loss


def _list_anew_and_appended(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x).detach()
    o.last = [loss]
    o.last.append(loss + 1)
    return loss


def _list_of_all(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x).detach()
    o.last = [loss, loss + 1]
    return loss


def _entry_of_dict(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.table[len(o.table)] = loss.item()
    return loss.item()


def _added_to_set(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.names.add(loss.item())
    return loss.item()


def _recent(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.recent.append(loss.item())
    return loss * o.recent[-1]


def _bounded(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.bounded.append(loss.item())
    return loss * o.bounded[-1]


def _text_grows(o: Owner, x: Tensor, given: Any) -> Any:
    o.text += "."
    return o.loss(x)


def _array(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.array[0] = loss.item()
    return loss, torch.from_numpy(o.array.copy())


def _tensor(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.tensor[0] = loss.item()
    return loss, o.tensor.clone()


# -- what is carried from call to call -------------------------------------------------------------


def _counted(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x) * o.counted.a
    o.counted = Counted(loss.detach().sigmoid(), 8 if o.counted.n == 7 else 7)
    return loss


def _counted_on(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x) * o.counted.a
    o.counted = Counted(loss.detach().sigmoid(), o.counted.n + 1)
    return loss


def _list_in_dict(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x) * o.mixed["loss"]
    log = [*o.mixed.get("log", ()), loss.detach()]
    o.mixed = {"loss": loss.detach().sigmoid(), "log": log}
    return loss


def _list_apart(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x) * o.mixed["loss"]
    o.mixed = {"loss": loss.detach().sigmoid()}
    o.losses.append(loss.detach())
    return loss


def _kept_twice(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x) * o.carried[0]
    o.carried = [loss.detach().sigmoid(), o.carried[0] + 1]
    o.losses.append(o.carried)
    return loss


def _kept_apart(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x) * o.carried[0]
    o.carried = [loss.detach().sigmoid(), o.carried[0] + 1]
    o.losses.append([*o.carried])
    return loss


def _with_history(o: Owner, x: Tensor, given: Any) -> Any:
    o.last = o.loss(x)
    return o.last * 1


def _without_history(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.last = loss.detach()
    return loss * 1


def _requiring(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.pair = loss.detach().requires_grad_(), loss.detach()
    return loss


def _not_requiring(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.pair = loss.detach(), loss.detach()
    return loss


def _other_type(o: Owner, x: Tensor, given: Any) -> Any:
    o.settled = "" if o.settled else 1.0  # type: ignore[assignment]
    return o.loss(x)


def _another_object(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.kept = Kept(loss.item())
    return loss


def _same_object(o: Owner, x: Tensor, given: Any) -> Any:
    loss = o.loss(x)
    o.kept.n = loss.item()
    return loss


def _module_anew(o: Owner, x: Tensor, given: Any) -> Any:
    o.other = nn.Linear(4, 2)
    return o.loss(x)


def _environment(o: Owner, x: Tensor, given: Any) -> Any:
    os.environ["FUNCTIONALIZE_TEST"] = str(
        len(os.environ.get("FUNCTIONALIZE_TEST", "")) % 2 * "1" + "1"
    )
    return o.loss(x)


# -- tensors of modules and of the caller ----------------------------------------------------------


def _data_assigned(o: Owner, x: Tensor, given: Any) -> Any:
    o.model.weight.data = o.model.weight.data * 0.9
    return o.loss(x)


def _parameter_written(o: Owner, x: Tensor, given: Any) -> Any:
    with torch.no_grad():
        o.model.weight.copy_(o.model.weight * 0.9)
    return o.loss(x)


def _parameter_assigned(o: Owner, x: Tensor, given: Any) -> Any:
    o.model.weight = nn.Parameter(o.model.weight.detach() * 0.9)
    return o.loss(x)


def _buffer_assigned(o: Owner, x: Tensor, given: Any) -> Any:
    o.norm.running_mean = o.norm.running_mean * 0.9 + x.mean(0)
    return o.loss(x) + o.norm.running_mean.sum()


def _buffer_written(o: Owner, x: Tensor, given: Any) -> Any:
    with torch.no_grad():
        o.norm.running_mean.copy_(o.norm.running_mean * 0.9 + x.mean(0))
    return o.loss(x) + o.norm.running_mean.sum()


def _mask_turned(o: Owner, x: Tensor, given: Any) -> Any:
    o.mask.t_()
    return o.loss(x) + o.mask.sum()


def _mask_not_turned(o: Owner, x: Tensor, given: Any) -> Any:
    mask = o.mask.t()
    return o.loss(x) + mask.sum()


def _argument_unsqueezed(o: Owner, x: Tensor, given: Any) -> Any:
    x.unsqueeze_(0)
    return o.loss(x)


def _argument_viewed(o: Owner, x: Tensor, given: Any) -> Any:
    x = x.unsqueeze(0)
    return o.loss(x)


def _frozen(o: Owner, x: Tensor, given: Any) -> Any:
    o.model.bias.requires_grad_(not o.model.bias.requires_grad)
    return o.loss(x).detach()


def _hooked(o: Owner, x: Tensor, given: Any) -> Any:
    o.other.register_forward_hook(lambda module, args, output: None)
    return o.loss(x) + o.other(x).sum()


def _not_hooked(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) + o.other(x).sum()


def _group_added(o: Owner, x: Tensor, given: Any) -> Any:
    o.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    return o.loss(x)


def _by_lbfgs(o: Owner, x: Tensor, given: Any) -> Any:
    def closure() -> Tensor:
        o.lbfgs.zero_grad()
        loss = o.loss(x)
        loss.backward()
        return loss

    return o.lbfgs.step(closure).detach()


def _fetched(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(next(iter(o.shuffled)))


# -- arguments and results -------------------------------------------------------------------------


def _labelled(owner: Owner) -> Any:
    return {"labels": torch.tensor(0.5)}


def _popped_from_argument(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * given.pop("labels")


def _popped_from_copy(o: Owner, x: Tensor, given: Any) -> Any:
    given = dict(given)
    return o.loss(x) * given.pop("labels")


def _added_to_argument(o: Owner, x: Tensor, given: Any) -> Any:
    given["loss"] = o.loss(x).detach()
    return given["loss"] * given["labels"]


def _added_to_copy(o: Owner, x: Tensor, given: Any) -> Any:
    given = {**given}
    given["loss"] = o.loss(x).detach()
    return given["loss"] * given["labels"]


def _put_into_argument(o: Owner, x: Tensor, given: Any) -> Any:
    given["labels"] = given["labels"] * 2
    return o.loss(x) * given["labels"]


def _put_into_copy(o: Owner, x: Tensor, given: Any) -> Any:
    given = {**given}
    given["labels"] = given["labels"] * 2
    return o.loss(x) * given["labels"]


class _Labelled(collections.namedtuple("_Labelled", "labels")):
    """A named tuple that may have attributes, too."""


class _Pair(collections.namedtuple("_Pair", "h c")):
    """Carried to the next call."""


def _carries_named(o: Owner, x: Tensor, given: Any) -> Any:
    h = torch.ones(()) if o.last is None else o.last.h
    loss = o.loss(x) * h
    o.last = _Pair(loss.detach().cos(), loss.detach().sin())
    return loss.detach()


def _carries_tuple(o: Owner, x: Tensor, given: Any) -> Any:
    h = torch.ones(()) if o.last is None else o.last[0]
    loss = o.loss(x) * h
    o.last = (loss.detach().cos(), loss.detach().sin())
    return loss.detach()


class _Weighted(NamedTuple):
    labels: Tensor
    weight: float


def _weighted_beside(owner: Owner) -> Any:
    given = _Labelled(torch.tensor(0.5))
    given.weight = 2.0  # type: ignore[attr-defined]
    return given


def _reads_beside(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * given.labels * given.weight


def _reads_fields(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * given.labels * given.weight


def _given_array(owner: Owner) -> Any:
    return np.random.rand(3, 1)


def _array_as_tensor(owner: Owner) -> Any:
    return torch.as_tensor(_given_array(owner))


def _arrays(owner: Owner) -> Any:
    return {"obs": _given_array(owner)}


def _in_loop(o: Owner, x: Tensor, given: Any) -> Any:
    found = {}
    for key, value in given.items():
        found[key] = torch.as_tensor(value)
    return o.loss(x * found["obs"].float())


def _part_of_array(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x * torch.tensor(given[:1], dtype=torch.float32))


def _cast_array(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x * torch.from_numpy(given.astype("float32")))


def _computed_array(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x * torch.as_tensor(given * 2.0, dtype=torch.float32))


def _as_float_tensor(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x * torch.FloatTensor(given))


def _of_tensor(o: Owner, x: Tensor, given: Any) -> Any:
    given = given["obs"] if isinstance(given, dict) else given
    return o.loss(x * given.float())


def _part_of_tensor(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x * given[:1].float())


def _twice_tensor(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x * (given * 2.0).float())


def _local_state(o: Owner, x: Tensor, given: Any) -> Any:
    return o.loss(x) * o.local.scale


_OF_ARRAY = r"makes a tensor \(float(32|64)\[\d, 1\]\) of the array `given`, an argument, at "
_BEFORE = r"make the tensor before the step \(`torch\.as_tensor\(given\)`\), and pass it in place"

ROWS = (
    Row(
        _in_loop,
        r"makes a tensor \(float64\[3, 1\]\) of the array `given\['obs'\]`, an argument, at ",
        r"before the step \(`torch\.as_tensor\(given\['obs'\]\)`\), and pass it in place of the array",
        _of_tensor,
        lambda o: {"obs": torch.as_tensor(_given_array(o))},
        _arrays,
    ),
    Row(_part_of_array, _OF_ARRAY, _BEFORE, _part_of_tensor, _array_as_tensor, _given_array),
    Row(_cast_array, _OF_ARRAY, _BEFORE, _of_tensor, _array_as_tensor, _given_array),
    Row(_as_float_tensor, _OF_ARRAY, _BEFORE, _of_tensor, _array_as_tensor, _given_array),
    Row(
        _computed_array,
        r"of numbers that may be others at every step, at ",
        r"`torch\.as_tensor\(given\)`, if the numbers are of that array\), and pass it",
        _twice_tensor,
        _array_as_tensor,
        _given_array,
    ),
    Row(
        _carries_named,
        r"assigns another tensor to `o\.last\.h`",
        r"carry tensors to the next call in a tuple",
        _carries_tuple,
        first=5,
    ),
    Row(
        _reads_beside,
        r"`given` is a named tuple with attributes beside its elements \(`weight`\)",
        r"make them fields of the named tuple, or pass them as arguments of their own",
        _reads_fields,
        lambda o: _Weighted(torch.tensor(0.5), 2.0),
        _weighted_beside,
        has_line=False,
    ),
    Row(
        _next,
        r"draws from `o\.it`",
        r"call `next\(\)` outside the step, and pass the step what it gives as an argument",
        times_given,
        lambda o: torch.tensor(next(o.it)),
        is_same=False,
    ),
    Row(
        _next_batch,
        r"`o\.batches\._num_yielded` is \d, was \d",
        r"call `next\(\)` outside the step",
        _batch_given,
        lambda o: next(o.batches),
        is_same=False,
    ),
    Row(
        _shuffled,
        r"draws from `o\.rng`",
        r"draw outside the step, and pass the step what it gives as an argument",
        times_given,
        lambda o: torch.tensor(float(o.rng.permutation(4)[0])),
        is_same=False,
    ),
    Row(
        _shuffled_by_random,
        r"draws from `random`",
        r"draw outside the step",
        times_given,
        _first_of_shuffled,
        is_same=False,
    ),
    Row(
        _drawn_by_numpy,
        r"draws from `numpy\.random`",
        r"draw outside the step",
        times_given,
        lambda o: torch.tensor(float(np.random.rand(2)[0])),
        is_same=False,
    ),
    Row(
        _put_into_queue,
        r"`o\.queue` is the Queue \d, was the Queue \d",
        OUTSIDE,
        _number,
        after=lambda o, found: o.queue.put(found),
    ),
    Row(
        _read_list,
        r"`o\.losses` is a list of 2, was a list of 1",
        r"append to it alone, and read it outside the step",
        _appended,
        is_same=False,
    ),
    Row(
        _popped,
        r"`o\.todo` is a list of \d+, was a list of \d+",
        r"take items outside the step, and pass the step",
        times_given,
        lambda o: torch.tensor(o.todo.pop()),
        is_same=False,
    ),
    Row(
        _appended_object,
        r"appends to `o\.losses` a timedelta that a replay cannot make again",
        r"append numbers and tensors, or tuples and dicts of these",
        _appended_tuple,
    ),
    Row(
        _appended_with_history,
        r"appends to `o\.losses` with a tensor that has an autograd history",
        r"detach it",
        _appended_detached,
    ),
    Row(
        _list_anew_and_appended,
        r"`o\.last` is another list, to which the step appends",
        r"make it with all its items",
        _list_of_all,
    ),
    Row(
        _entry_of_dict,
        r"`o\.table` is a dict of 2, was a dict of 1",
        OUTSIDE,
        _number,
        after=lambda o, found: o.table.update({len(o.table): found}),
    ),
    Row(
        _added_to_set,
        r"`o\.names` is a set of \d, was a set of \d",
        OUTSIDE,
        _number,
        after=lambda o, found: o.names.add(found),
    ),
    Row(
        _recent,
        r"`o\.recent` is a deque of 2, was a deque of 1",
        r"give it a bound \(`deque\(maxlen=n\)`\)",
        _bounded,
        first=5,
    ),
    Row(
        _text_grows,
        r"`o\.text` is '\.+', was '\.+'",
        OUTSIDE,
        plain,
        after=lambda o, found: setattr(o, "text", f"{o.text}."),
    ),
    Row(
        _array,
        r"`o\.array` \(ndarray float64\) has other contents",
        r"keep it as a tensor \(`torch\.from_numpy\(array\)`\)",
        _tensor,
    ),
    Row(
        _counted,
        r"`o\.counted\.n` is \d, was \d",
        r"compute it of what was there \(`n \+ 1`\)",
        _counted_on,
    ),
    Row(
        _list_in_dict,
        r"`o\.mixed\.log` is a list of \d, was a list of \d",
        r"keep other things that change in attributes of their own",
        _list_apart,
    ),
    Row(
        _kept_twice,
        r"leaves in `o\.carried` a list that something else holds, too",
        r"put a copy there \(`\[\*items\]`\), or a tuple",
        _kept_apart,
    ),
    Row(
        _with_history,
        r"assigns `o\.last` with a tensor that has an autograd history",
        r"detach it",
        _without_history,
    ),
    Row(
        _requiring,
        r"assigns `o\.pair` with a new tensor that requires a gradient",
        r"detach it",
        _not_requiring,
    ),
    Row(
        _other_type,
        r"`o\.settled` is '', was 1\.0|`o\.settled` is 1\.0, was ''",
        OUTSIDE,
        plain,
        after=lambda o, found: setattr(o, "settled", "" if o.settled else 1.0),
    ),
    Row(
        _another_object,
        r"`o\.kept` is another object",
        r"keep one object, and assign to its attributes or items",
        _same_object,
    ),
    Row(_module_anew, r"`o\.other` is another Linear", OUTSIDE, plain, is_same=False),
    Row(_environment, r"os\.environ\.FUNCTIONALIZE_TEST` is '1+', was '1+'", OUTSIDE, plain),
    Row(
        _data_assigned,
        r"gives `model\.weight` another storage",
        r"write into it \(`with torch\.no_grad\(\): ",
        _parameter_written,
    ),
    Row(
        _parameter_assigned,
        r"assigns another tensor to `model\.weight`",
        r"write into it",
        _parameter_written,
    ),
    Row(
        _buffer_assigned,
        r"assigns another tensor to `norm\.running_mean`",
        r"write into it",
        _buffer_written,
    ),
    Row(
        _mask_turned,
        r"gives `o\.mask` other sizes or strides in place",
        r"make another tensor",
        _mask_not_turned,
    ),
    Row(
        _argument_unsqueezed,
        r"gives `x` other sizes or strides in place",
        r"make another tensor",
        _argument_viewed,
    ),
    Row(
        _frozen,
        r"`model\.bias` (now|no longer) requires a gradient",
        OUTSIDE,
        detached,
        after=lambda o, found: o.model.bias.requires_grad_(not o.model.bias.requires_grad),
    ),
    Row(_hooked, r"`other` has _forward_hooks = ", OUTSIDE, _not_hooked),
    Row(_group_added, r"`optimizer` has \d parameter groups, had \d", OUTSIDE, plain),
    Row(
        _fetched,
        r"fetches a batch by a sampler that draws the order",
        r"fetch it outside the step, and pass it as an argument",
        times_given,
        is_same=False,
    ),
    Row(
        _popped_from_argument,
        r"takes `args\[1\]\['labels'\]` away",
        r"work on a copy of that argument",
        _popped_from_copy,
        _labelled,
    ),
    Row(
        _added_to_argument,
        r"adds `args\[1\]\['loss'\]`",
        r"work on a copy of that argument",
        _added_to_copy,
        _labelled,
    ),
    Row(
        _put_into_argument,
        r"puts something else at `args\[1\]\['labels'\]`",
        r"work on a copy of that argument",
        _put_into_copy,
        _labelled,
    ),
    Row(
        _local_state,
        r"reaches `o\.local` \(a _local\), which may hold state that cannot be seen",
        r"pass what the step needs of it as an argument",
        times_given,
        lambda o: torch.tensor(o.local.scale),
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_refusal_proposes_an_edit_that_works(row, monkeypatch):
    monkeypatch.setenv("FUNCTIONALIZE_TEST", "")
    check(row)


def test_an_argument_that_became_none_is_named():
    model = nn.Linear(4, 2)

    def fn(x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return model(x).sum() + (0 if hidden is None else hidden.sum())

    step = fz.capture(fn, audit=False)
    for i in range(8):
        step(torch.randn(3, 4), torch.ones(2) if i < 4 else None)
    assert "`hidden` is None, was a tensor" in step.stats.guard_failures
    assert not any("NoneType" in each for each in step.stats.guard_failures)


def _gathers_objects(x: Tensor) -> Tensor:
    loss, found = x.sum(), [None] * dist.get_world_size()
    dist.all_gather_object(found, loss.item())
    return loss * sum(found)  # type: ignore[arg-type]


def _broadcasts_objects(x: Tensor) -> Tensor:
    found = [x.sum().item() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    return x.sum() * found[0]


def _gathers_tensors(x: Tensor) -> Tensor:
    loss = x.sum()
    found = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(found, loss)
    return loss * sum(found)  # type: ignore[arg-type]


def _exchanges(name: str) -> Any:
    step = fz.capture(globals()[name], audit=False, on_uncapturable="raise")
    for _ in range(6):
        try:
            result = step(torch.randn(3) + dist.get_rank())
        except FunctionalizeError as error:
            return str(error)
    return step.stats.replays, result.isfinite().item()


@pytest.mark.parametrize("name", ["all_gather_object", "broadcast_object_list"])
def test_an_exchange_of_objects_is_refused_by_its_name(name):
    step = {"all_gather_object": "_gathers_objects"}.get(name, "_broadcasts_objects")
    for message in run_on_ranks(_exchanges, step):
        assert message.startswith(f"exchanges Python objects by {name}() at "), message
        assert re.search(r"test_advice\.py:\d+, in _", message)
        assert "torch.distributed.all_reduce() or all_gather()" in message
        assert ".item()" not in message.split(": put numbers")[1]
    for replays, is_finite in run_on_ranks(_exchanges, "_gathers_tensors"):
        assert replays >= 3 and is_finite


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_a_weight_that_is_computed_before_each_forward(name):
    """The function of `nn.utils` is refused with the name of its successor, and that is captured."""

    def replayed(norm: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(norm(nn.Linear(3, 3)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def train(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = fz.capture(train, on_uncapturable="raise")
        for _ in range(8):
            step(torch.ones(2, 3))
        return step.stats.replays

    with pytest.raises(FunctionalizeError, match=r"nn\.utils\.parametrizations\.weight_norm"):
        replayed(getattr(nn.utils, name))
    assert replayed(getattr(nn.utils.parametrizations, name)) >= 3
