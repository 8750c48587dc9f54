"""What is assumed of the installed torch holds, on every release; and what does not hold is found, by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import functionalize as fz
from functionalize._compat.fsdp import backward_query, fsdp_classes
from functionalize.discharge.rules import collectives
from functionalize.errors import UncapturableError, UntestedTorchWarning
from functionalize.fsdp import contract as fsdp_contract
from functionalize.fsdp import releases as release
from functionalize.fsdp.contract import (
    ATTRIBUTES,
    METHODS,
    MOVED,
    Handling,
    unknown_attributes,
    unknown_attributes_of,
)
from functionalize.fsdp.objects import (
    fsdp_contexts,
    fsdp_groups,
    fsdp_params,
    fsdp_slots,
    fsdp_states,
)
from functionalize.fsdp.python_state import FSDPState
from functionalize.ir.inputs import Call
from tests.fsdp import steps
from tests.fsdp.meshes import replicated
from tests.fsdp.models import frozen_block, grouped, nested, wrapped
from tests.ranks import run_on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NAMES = ("FSDPStateContext", "FSDPState", "FSDPCommContext", "FSDPParamGroup", "FSDPParam")


# -- it holds --------------------------------------------------------------------------------------


def test_every_op_that_communicates_has_a_rule_or_a_refusal_of_its_own() -> None:
    assert list(collectives.unlisted_ops()) == []


def test_every_attribute_and_method_of_fsdp2_is_explained() -> None:
    assert [cls.__name__ for cls in fsdp_classes()] == [*NAMES, "FSDPModule"]
    assert list(unknown_attributes()) == []


def test_the_function_by_which_a_forward_asks_whether_a_backward_runs_is_found() -> None:
    """A release that asks in another way would reshard differently in a forward that runs again in a backward."""
    group = next(cls for cls in fsdp_classes() if cls.__name__ == "FSDPParamGroup")
    names = set[str](group.post_forward.__code__.co_names)
    asked = {name for name in names if name == "is_bw" or "graph_task" in name}
    found = backward_query()
    assert ({found[1]} if found is not None else set[str]()) == asked
    if found is not None:
        owner, name = found
        assert group.post_forward.__globals__ is vars(owner) and getattr(owner, name)() is False


def test_every_entry_says_why() -> None:
    assert set(ATTRIBUTES) == set(NAMES)
    assert all(entry.reason for table in ATTRIBUTES.values() for entry in table.values())
    assert all(METHODS.values())


MODELS: dict[str, tuple[Any, Any, int]] = {
    "plain": (wrapped(), steps.plain, 2),
    "nested": (nested, steps.plain, 2),
    "grouped": (grouped, steps.plain, 2),
    "frozen": (wrapped(make=frozen_block), steps.plain, 2),
    "replicate": (replicated, steps.plain, 2),
    "mixed precision": (
        wrapped(mp_policy=BF16),
        steps.accumulating("set_requires_gradient_sync"),
        2,
    ),
    "HSDP": (wrapped(2, 2), steps.accumulating("set_requires_all_reduce"), 4),
    "resharded to some": (wrapped(reshard_after_forward=2), steps.plain, 4),
}


def live(name: str) -> tuple[list[str], int, int]:
    """Unknown attributes of a model in the middle of its training; how many slots and places were assigned."""
    build, make_step, _ = MODELS[name]
    model, optimizer = build()
    step = make_step(model, optimizer)
    for batch in steps.pairs(2):
        step(*batch)
    params = [param for _, param in fsdp_params(model)]
    objects = [*fsdp_states(model), *fsdp_contexts(model), *fsdp_groups(model), *params]
    slots, call = [slot for _, slot in fsdp_slots(model)], Call((), [])
    for slot in slots:
        before = slot.resolve(call)
        slot.assign(call, torch.ones(1))
        assert torch.equal(slot.resolve(call), torch.ones(1))
        slot.assign(call, before)
    places = FSDPState.now([model]).places
    for place in places:
        place.write(place.read())
    for batch in steps.pairs(2):
        step(*batch)  # FSDP2 goes on with what was assigned
    return list(unknown_attributes_of(objects)), len(slots), len(places)


@pytest.mark.parametrize("name", MODELS)
def test_live_objects_are_explained_and_every_slot_and_place_is_writable(name: str) -> None:
    for unknown, slots, places in run_on_ranks(live, name, world=MODELS[name][2]):
        assert unknown == []
        assert slots >= 2
        assert places >= 40


# -- what does not hold is found -------------------------------------------------------------------


class FSDPParamGroup:
    """As a later torch may have it; this file is its source."""

    _queued: int

    def __init__(self) -> None:
        self.reduce_grads = True
        self._depth, (self._first, *_) = 1, [2]

    @property
    def all_reduce_grads(self) -> bool:
        return True

    @property
    def _partial_reduce_output(self) -> Tensor | None:
        return None

    @property
    def brand_new(self) -> int:
        return self._depth


def test_a_new_attribute_and_one_that_became_a_property_fail_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fsdp_contract, "fsdp_classes", lambda: [FSDPParamGroup])
    unknown = "is unknown: whether a step changes or reads it is not known"
    assert sorted(unknown_attributes()) == [
        f"FSDPParamGroup._depth {unknown}",
        f"FSDPParamGroup._first {unknown}",
        "FSDPParamGroup._partial_reduce_output is a property without a setter: a replay could not "
        "assign it",
        f"FSDPParamGroup._queued {unknown}",
        "FSDPParamGroup.all_reduce_grads is a property, and was state: a guard would not see it",
        f"FSDPParamGroup.brand_new {unknown}",
    ]


def test_a_new_method_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPModule, "set_something", lambda self: None, raising=False)
    assert list(unknown_attributes()) == [
        "FSDPModule.set_something is unknown: whether it changes what a step does is not known"
    ]


def test_a_class_without_its_source_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = type("FSDPParam", (), {"__module__": "nowhere"})
    monkeypatch.setattr(fsdp_contract, "fsdp_classes", lambda: [made])
    (problem,) = unknown_attributes()
    assert problem.startswith("FSDPParam cannot be looked at: its source is not there")


def test_a_live_attribute_fails_by_name() -> None:
    group = FSDPParamGroup()
    assert list(unknown_attributes_of([group, group])) == [
        "FSDPParamGroup._depth is unknown: a live object has it",
        "FSDPParamGroup._first is unknown: a live object has it",
    ]


@pytest.fixture
def new_op() -> Any:
    """An op that a later torch may have."""
    lib = torch.library.Library("fsdp", "FRAGMENT")
    lib.define("shuffle_(Tensor x) -> ()")
    lib.impl("shuffle_", lambda x: None, "CompositeExplicitAutograd")
    yield
    lib._destroy()


def test_a_new_op_fails_by_name(new_op: None) -> None:
    assert list(collectives.unlisted_ops()) == ["fsdp.shuffle_"]


def test_a_step_with_a_new_op_is_refused_by_name(new_op: None) -> None:
    def step(x: Tensor) -> Tensor:
        torch.ops.fsdp.shuffle_(x)
        return x + 1

    captured = fz.capture(step, on_uncapturable="raise")
    captured(torch.ones(2))
    with pytest.raises(
        fz.errors.FunctionalizeError,
        match=r"fsdp.shuffle_.default is a communication op without a rule",
    ):
        captured(torch.ones(2))


# -- on a torch that was not tested ----------------------------------------------------------------


def test_what_counts_as_tested() -> None:
    assert release.is_tested("2.13.0+cpu")
    assert not release.is_tested("2.13.1")
    assert release.in_range("2.13.1")
    assert release.in_range("2.11.0+cu130")
    assert not release.in_range("2.10.0")
    assert not release.in_range("2.16.0.dev20261101+cpu")
    assert release.is_tested(torch.__version__)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> str:
    """The installed torch says that it is a later one."""
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    release._warn.cache_clear()
    release.broken_contract.cache_clear()
    yield "2.99.0"
    release._warn.cache_clear()
    release.broken_contract.cache_clear()


def test_one_warning_names_the_range(later: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step = fz.capture(lambda x: x + 1)
            for _ in range(3):
                step(torch.ones(2))
    (warning,) = caught
    assert warning.category is UntestedTorchWarning
    assert str(warning.message) == (
        f"functionalize was tested with torch {release.TESTED[0]} to {release.TESTED[-1]}, this is torch 2.99.0: "
        "what a capture assumes of FSDP2 is compared with this torch, and a step that it does not explain is refused "
        "by name"
    )
    assert warning.filename == __file__
    assert step.stats.replays == 2


def test_a_warning_that_is_an_error_changes_nothing(later: str) -> None:
    ran = []
    step = fz.capture(lambda x: ran.append(1))
    with pytest.raises(UntestedTorchWarning):
        step(torch.ones(2))
    assert ran == []


def elsewhere(forget: str) -> tuple[str, int, int]:
    """Train on a torch that says it is another one, and that has one attribute more than is known."""
    version, tables = torch.__version__, fsdp_contract.ATTRIBUTES
    kind, _, name = forget.partition(".")
    try:
        torch.__version__ = "2.99.0"
        if forget:
            fewer = {n: e for n, e in tables[kind].items() if n != name}
            fsdp_contract.ATTRIBUTES = {**tables, kind: fewer}
        model, optimizer = wrapped()()
        captured = fz.capture(steps.plain(model, optimizer), on_uncapturable="raise")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch in steps.pairs(5):
                captured(*batch)
    except UncapturableError as error:
        return str(error), captured.stats.replays, captured.stats.captures
    finally:
        torch.__version__, fsdp_contract.ATTRIBUTES = version, tables
        release.broken_contract.cache_clear()
    return "", captured.stats.replays, captured.stats.captures


def test_another_torch_that_the_contract_explains_is_replayed() -> None:
    for said, replays, _ in run_on_ranks(elsewhere, ""):
        assert said == ""
        assert replays >= 2


@pytest.mark.parametrize(
    "forget", ["FSDPParamGroup._all_reduce_state", "FSDPStateContext.all_states"]
)
def test_another_torch_that_it_does_not_explain_is_refused_by_name(forget: str) -> None:
    for said, replays, captures in run_on_ranks(elsewhere, forget):
        assert said.startswith("torch 2.99.0 is not one of those that functionalize was tested")
        assert f"its FSDP2 differs: {forget} is unknown" in said
        assert said.endswith("Install a tested release, or a newer functionalize")
        assert (replays, captures) == (0, 0)


# -- slots -----------------------------------------------------------------------------------------


def read_only(attribute: str) -> list[str]:
    """A slot that cannot be assigned after the step has run, as a property without a setter."""
    model, _ = wrapped()()
    (group, *_) = fsdp_groups(model)
    kind = type(group)

    class Sealed(kind):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == attribute and vars(self).get("sealed"):
                raise AttributeError(f"property {name!r} has no setter")
            super().__setattr__(name, value)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = steps.loss_of(model, x, y)
        loss.backward()
        for param in model.parameters():
            param.grad = None
        vars(group)[attribute] = torch.ones(3)
        vars(group)["sealed"] = True
        return loss.detach()

    group.__class__ = Sealed
    captured, said = fz.capture(step, on_uncapturable="raise"), []
    for batch in steps.pairs(3):
        vars(group)["sealed"] = False
        vars(group)[attribute] = None
        try:
            captured(*batch)
        except UncapturableError as error:
            said.append(str(error))
    vars(group).pop("sealed")
    return said


def test_a_slot_that_cannot_be_assigned_is_refused_before_a_replay() -> None:
    for said in run_on_ranks(read_only, "_partial_reduce_output"):
        assert len(said) == 2
        assert "partial_reduce_output`, which a replay cannot assign (property" in said[0]


def test_grad_dtype_is_guarded() -> None:
    """A replay would assign the recorded gradient, which then no longer fits, after its program has run."""
    model = torch.nn.Linear(2, 2)
    captured = fz.capture(lambda x: model(x).sum().backward())

    def call() -> None:
        for p in model.parameters():
            p.grad = None
        captured(torch.ones(1, 2))

    for _ in range(3):
        call()
    model.weight.grad = None
    model.weight.grad_dtype = torch.float64
    call()
    assert model.weight.grad.dtype is torch.float64
    (failure,) = captured.stats.guard_failures
    assert failure.endswith("weight` has the grad_dtype torch.float64, had its own dtype")


def test_moved_slots_are_slots() -> None:
    for kind, name in MOVED:
        assert ATTRIBUTES[kind][name].handling is Handling.SLOT
