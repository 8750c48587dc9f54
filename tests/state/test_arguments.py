"""Arguments and results that are objects: tensors inside are inputs and outputs, the structure is guarded."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention

import functionalize as fz
from functionalize.errors import GuardError, UncapturableError
from functionalize.state import arguments
from functionalize.util import structure


@dataclass
class Pair:
    x: Tensor
    y: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    rest: list[Any] = field(default_factory=list)


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like a tokenizer's: items, and objects of its own beside them."""

    def __init__(self, data: dict[str, Any], encodings: Any = None, n: int = 1) -> None:
        super().__init__(data)
        self._encodings, self._n = encodings, n

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Named(dict):  # type: ignore[type-arg]
    title = "none"


class Ordered(OrderedDict):  # type: ignore[type-arg]
    pass


class ReadOnly(Mapping[str, Any]):
    def __init__(self, held: dict[str, Any]) -> None:
        self._held = held

    def __getitem__(self, key: str) -> Any:
        return self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Slots:
    __slots__ = ("__b", "a")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.__b = a, b

    @property
    def b(self) -> Any:
        return self.__b


class Batch:
    def __init__(self, x: Tensor, scale: float = 1.0) -> None:
        self.x, self.scale = x, scale


class Colour(enum.Enum):
    RED = torch.ones(1)


def one(x: Any) -> tuple[list[Any], Any]:
    return arguments.flatten((x,), {})


T, U = torch.ones(2), torch.zeros(3)

CASES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "dataclass": (lambda: Pair(T, U), [T, U]),
    "dataclass_with_lists": (lambda: Pair(T, [U, {"n": 3}]), [T, U, 3]),
    "frozen_with_slots": (lambda: Frozen(T, [1, U]), [T, 1, U]),
    "nested": (lambda: Pair(T, [Frozen(U, [Pair(T)])]), [T, U, T, None]),
    "namespace": (lambda: SimpleNamespace(a=T, b="s"), [T, "s"]),
    "named_tuple": (lambda: Point(T, U), [T, U]),
    "user_dict": (lambda: Encoding({"x": T, "y": U}), [T, U, None, 1]),
    "dict_subclass": (lambda: Named(x=T, y=2), [T, 2]),
    "ordered_subclass": (lambda: Ordered(x=T, y=2), [T, 2]),
    "mapping": (lambda: ReadOnly({"x": T, "y": U}), [T, U]),
    "batch": (lambda: Batch(T, 2.0), [T, 2.0]),
    "slots": (lambda: Slots(U, T), [T, U]),
}


@pytest.mark.parametrize("name", CASES)
def test_tensors_inside_are_leaves_and_equal_structures_are_equal(name: str) -> None:
    make, expected = CASES[name]
    leaves, spec = one(make())
    assert len(leaves) == len(expected)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))
    assert spec == one(make())[1]
    assert isinstance(spec, torch.utils._pytree.TreeSpec)


@pytest.mark.parametrize("name", CASES)
def test_objects_are_made_again_with_other_leaves(name: str) -> None:
    made = CASES[name][0]()
    leaves, spec = arguments.flatten_result(made)
    new = [leaf + 1 if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    again = arguments.unflatten_result(new, spec)
    assert type(again) is type(made) and again is not made
    found, same = arguments.flatten_result(again)
    assert same == spec
    assert all(a is b for a, b in zip(found, new, strict=True))
    assert leaves[0] is arguments.flatten_result(made)[0][0]  # what was taken apart is left alone


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Pair(T), Frozen(T)),
        (Pair(T, [U]), Pair(T, [U, U])),
        (Encoding({"x": T}), Encoding({"z": T})),
        (Encoding({"x": T}, [object()]), Encoding({"x": T}, None)),
        (SimpleNamespace(a=T), SimpleNamespace(b=T)),
        (Named(x=T), {"x": T}),
        (Point(T, U), (T, U)),
        (Slots(T, U), Batch(T)),
    ],
)
def test_another_structure_is_another_spec(a: Any, b: Any) -> None:
    assert one(a)[1] != one(b)[1]


def test_a_dict_may_have_attributes() -> None:
    plain, titled = Named(x=T), Named(x=T)
    titled.title = "t"
    assert one(plain)[1] != one(titled)[1]
    leaves, spec = arguments.flatten_result(titled)
    again = arguments.unflatten_result(leaves, spec)
    assert (again, again.title) == (titled, "t")


def test_what_a_tokenizer_keeps_beside_the_items_counts_by_its_type() -> None:
    a, b = (Encoding({"x": T}, [object()]) for _ in range(2))
    assert one(a)[1] == one(b)[1]
    assert one(a)[0] == [T, 1]
    again = arguments.unflatten_result(*arguments.flatten_result(a))
    assert again._encodings is a._encodings
    assert one(Encoding({"x": T}, [U]))[0] == [T, U, 1]  # but tensors are always seen


def test_what_is_no_data_stays_a_leaf() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for leaf in (
        Pair(model),  # type: ignore[arg-type]
        SimpleNamespace(optimizer=[optimizer], loss=T),
        model,
        optimizer,
        Colour.RED,
        Pair,
        MappingProxyType({"x": T}),
        SimpleNamespace,
        object(),
        Batch("no tensor"),  # type: ignore[arg-type]
        torch.float32,
    ):
        assert one(leaf)[0] == [leaf]
    assert one(defaultdict(list, x=T))[0] == [T]  # pytree's own


def test_an_object_with_more_than_tensors_is_data_only_as_a_result() -> None:
    batch = Batch(T, scale=object())  # type: ignore[arg-type]
    assert one(batch)[0] == [batch]
    leaves, spec = arguments.flatten_result(batch)
    assert leaves == [T, batch.scale]
    assert arguments.unflatten_result([U, 1], spec).x is U


def test_a_result_without_tensors_is_returned_as_it_is() -> None:
    for result in (Pair(1), SimpleNamespace(a=1), Named(n=1)):  # type: ignore[arg-type]
        assert arguments.flatten_result(result)[0] == [result]


def test_cycles_end() -> None:
    a, b = SimpleNamespace(x=T), SimpleNamespace(x=U)
    a.other, b.other = b, a
    leaves, _ = one(a)
    assert leaves[:2] == [T, U] and leaves[2] is a


def test_changes_to_the_arguments_are_told() -> None:
    def told(change: Callable[[Any], Any], batch: Any) -> str | None:
        args, kwargs = (batch,), {"flag": True}
        leaves, spec = arguments.flatten(args, kwargs)
        change(batch)
        return arguments.changed(args, kwargs, leaves, spec)

    advice = ", which a replay does not repeat: work on a copy of that argument"
    assert told(lambda b: None, {"x": T, "y": U}) is None
    assert told(lambda b: b.pop("y"), {"x": T, "y": U}) == f"takes `args[0]['y']` away{advice}"
    assert told(lambda b: b.update(y=U), {"x": T}) == f"adds `args[0]['y']`{advice}"
    assert (
        told(lambda b: setattr(b, "x", U), Pair(T)) == f"puts something else at `args[0].x`{advice}"
    )
    assert told(lambda b: b.append(b.pop(0)), [[T], U]) == f"takes `args[0][0][0]` away{advice}"


def test_hidden_tensors_are_told() -> None:
    message = arguments.hidden([1, T, MappingProxyType({"x": T})])
    assert message is not None and message.startswith(
        "returns an object of type mappingproxy that hides tensors: return the tensors"
    )
    assert (
        arguments.hidden([lambda: T * 2 + len(CASES)]) is None
    )  # a global, not part of the result
    loss = T.sum()
    assert arguments.hidden([lambda: loss]) is not None
    assert arguments.hidden([nn.Linear(1, 1), "s", Colour, object(), None]) is None


# -- in captured steps and traces ------------------------------------------------------------------

KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": Pair,
    "frozen": lambda x, y: Frozen(x, [y]),
    "named_tuple": Point,
    "namespace": lambda x, y: SimpleNamespace(x=x, y=y),
    "user_dict": lambda x, y: Encoding({"x": x, "y": y}, [object()]),
    "dict_subclass": lambda x, y: Named(x=x, y=y),
    "mapping": lambda x, y: ReadOnly({"x": x, "y": y}),
    "slots": Slots,
}


def both(batch: Any) -> list[Tensor]:
    return [t for t in arguments.flatten_result(batch)[0] if isinstance(t, Tensor)]


@pytest.mark.parametrize("name", KINDS)
def test_capture_takes_and_returns_objects(name: str) -> None:
    def step(batch: Any) -> Any:
        x, y = both(batch)
        return KINDS[name](x * 2, y + x)

    captured = fz.capture(step)
    for i in range(6):
        x, y = torch.full((3,), float(i)), torch.rand(3)
        mine, eager = captured(KINDS[name](x, y)), step(KINDS[name](x, y))
        assert type(mine) is type(eager)
        for a, b in zip(both(mine), both(eager), strict=True):
            assert torch.equal(a, b)
    assert captured.stats.replays >= 4
    assert captured.stats.guard_failures == []


WINDOW = [64]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < WINDOW[0])


def block_mask(seed: int, width: int) -> Any:
    """Documents in a batch, as training loops make one for each."""
    documents = torch.randint(0, 3, (1, 64), generator=torch.Generator().manual_seed(seed))

    def document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() < width

    parts = flex_attention.and_masks(causal, document, near)
    return flex_attention.create_block_mask(parts, 1, None, 64, 64, device="cpu", BLOCK_SIZE=16)


@pytest.mark.parametrize("backward", [False, True])
def test_a_block_mask_for_each_batch_is_a_structure_of_tensors(backward: bool) -> None:
    zero, at = torch.tensor(0), torch.arange(64)
    weight = torch.ones(64, 4, requires_grad=True)

    def attended(x: Tensor, mask: Any) -> Tensor:
        scores = (x @ weight.T) * mask.to_dense()[0, 0].repeat_interleave(
            16, 0, output_size=64
        ).sum(1)
        allowed = mask.mask_mod(zero, zero, at[:, None], at[None])
        loss = scores.masked_fill(~allowed, 0.0).square().mean() + mask.kv_num_blocks.sum()
        return loss if backward else loss.detach()

    def called(forward: Any, *given: Any) -> list[Tensor]:
        weight.grad = None
        loss = forward(*given)
        if backward:
            loss.backward()
        return [loss.detach(), *([] if weight.grad is None else [weight.grad])]

    captured = fz.capture(attended, backward=backward)
    for i in range(10):
        WINDOW[0] = 32 if i == 9 else 64  # a global that a part of the mask reads
        given = torch.randn(64, 4), block_mask(i, 8 if i < 7 else 9)
        pairs = zip(called(captured, *given), called(attended, *given), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert captured.stats.replays >= 5, captured.explain()
    found = captured.stats.guard_failures
    assert len(found) == 2 and "is 9, was 8" in found[0] and "WINDOW" in found[1], found


def test_a_function_is_data_only_if_what_it_encloses_is() -> None:
    model, found = nn.Linear(2, 2), list[int]()

    def counter() -> Callable[[], Tensor]:
        n = 0

        def count() -> Tensor:
            nonlocal n
            n += 1
            return T * n

        return count

    for leaf in (lambda: model(T), lambda: found.append(len(T)), counter(), both, lambda: found):
        assert one(leaf)[0] == [leaf]
    a, b = torch.ones(2), torch.zeros(3)
    leaves, spec = one(lambda x=2: (a + x, b))
    assert [*map(type, leaves)] == [FunctionType, int, Tensor, Tensor]
    ((again,), _) = structure.unflatten([*leaves[:2], b, a], spec)
    assert torch.equal(again()[0], b + 2) and again(3)[1] is a


def test_another_structure_is_captured_anew() -> None:
    captured = fz.capture(lambda batch: batch["x"] * 2 + len(batch))
    for _ in range(3):
        captured(Encoding({"x": T}))
    assert torch.equal(captured(Encoding({"x": T, "y": U})), T * 2 + 2)
    assert captured.stats.guard_failures == ["the structure of the arguments changed"]


def test_an_object_in_the_arguments_with_a_model_is_no_batch() -> None:
    """Its counter may change from call to call: the step does not read it."""
    state = SimpleNamespace(model=nn.Linear(2, 2), at=0)
    captured = fz.capture(lambda state, x: state.model(x))
    for i in range(5):
        state.at = i
        assert torch.equal(captured(state, T * i), state.model(T * i))
    assert captured.stats.replays >= 3


def test_an_object_that_calls_itself_equal_is_another_one() -> None:
    class Sly:
        def __init__(self, x: Tensor) -> None:
            self.x, self.other = x, object()

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = object.__hash__

    captured = fz.capture(lambda sly: sly.x * 2)
    first = Sly(T)
    for _ in range(4):
        captured(first)
    assert captured.stats.replays >= 1
    assert torch.equal(captured(Sly(T * 5)), T * 10)


def test_a_step_that_changes_its_arguments_is_refused() -> None:
    @fz.capture(on_uncapturable="raise")
    def step(batch: dict[str, Tensor]) -> Tensor:
        batch.pop("y")
        return batch["x"] * 2

    message = r"takes `args\[0\]\['y'\]` away, which a replay does not repeat: work on a copy"
    with pytest.raises(UncapturableError, match=message):
        for _ in range(9):
            batch = {"x": T, "y": U}
            assert torch.equal(step(batch), T * 2)
            assert "y" not in batch


def test_a_result_that_hides_tensors_is_refused() -> None:
    def step(x: Tensor) -> Any:
        return MappingProxyType({"loss": x * 2})

    captured = fz.capture(step, on_uncapturable="raise")
    with pytest.raises(
        UncapturableError, match="an object of type mappingproxy that hides tensors"
    ):
        for i in range(9):
            assert captured(T * i)["loss"][0] == i * 2
    with pytest.raises(
        UncapturableError, match="an object of type mappingproxy that hides tensors"
    ):
        fz.functions.trace(step, T)


def test_trace_takes_and_returns_objects() -> None:
    def fn(batch: Pair, *, more: Encoding) -> Pair:
        batch.x.add_(1)
        return Pair(batch.x * more["z"], batch.y)

    program = fz.functions.trace(fn, Pair(torch.ones(2), 3), more=Encoding({"z": torch.ones(2)}))
    assert [spec.name for spec in program.inputs] == ["batch_x", "more_data_z"]
    assert program.output_names == ("out.x", "out.y")
    x, z = torch.full((2,), 2.0), torch.full((2,), 5.0)
    out = program(Pair(x, 3), more=Encoding({"z": z}))
    assert type(out) is Pair and torch.equal(out.x, torch.full((2,), 15.0)) and out.y == 3
    assert torch.equal(x, torch.full((2,), 3.0))
    text = r"the arguments are \(Pair\(x=\*, y=\[\*\]\), more=Encoding\(data=.*, were \(Pair\(x=\*, y=\*\), "
    with pytest.raises(GuardError, match=text):
        program(Pair(x, [3]), more=Encoding({"z": z}))


@pytest.mark.parametrize(
    "tree",
    [1, [], (), (1, [2, 3]), [1, [2, (3,)]], ({"a": 1}, [2, Point(3, 4)], Frozen(5)), ((), [[1]])],
)
def test_a_compiled_structure_builds_what_the_structure_builds(tree: Any) -> None:
    leaves, spec = structure.flatten(tree, result=True)
    rebuild, expected = structure.rebuilder(spec), structure.unflatten(leaves, spec)
    for _ in range(2):
        assert rebuild(leaves) == expected and type(rebuild(leaves)) is type(expected)
    assert not leaves or rebuild(leaves) is not leaves


@pytest.mark.parametrize(
    "args", [(), (1,), (torch.ones(2), None), (torch.Size((2, 3)), 1.0), ([1],)]
)
def test_positional_arguments_have_the_structure_that_pytree_finds(args: tuple[Any, ...]) -> None:
    leaves, spec = arguments.flatten(args, {})
    expected, structure_found = structure.flatten((args, {}))
    assert spec == structure_found and all(map(is_, leaves, expected))
    assert len(leaves) == len(expected) and arguments.flatten(args, {"a": 1})[1] != spec


class Counted(namedtuple("Counted", "x n")):
    """A named tuple that is made of other values than its elements."""

    def __new__(cls, x: Tensor) -> Counted:
        return super().__new__(cls, x, len(x))


def test_a_named_tuple_with_a_constructor_of_its_own() -> None:
    def fn(batch: Any) -> Any:
        return Counted(batch["pair"].x * batch["pair"].n), batch["pair"]

    step = fz.capture(fn, on_uncapturable="raise")
    for i in range(8):
        batch = {"pair": Counted(torch.full((3,), float(i)))}
        (made, same), (expected, _) = step(batch), fn(batch)
        assert type(made) is type(same) is Counted and made.n == same.n == 3
        assert torch.equal(made.x, expected.x) and torch.equal(same.x, batch["pair"].x)
    assert step.stats.replays >= 4


def test_attributes_of_a_named_tuple_are_no_part_of_its_structure() -> None:
    """No program stands for calls with other ones."""
    step = fz.capture(lambda pair: pair.x.sum() * pair.scale, audit=False, on_uncapturable="eager")
    for i in range(12):
        pair = Counted(torch.ones(3))
        pair.scale = float(i)  # type: ignore[attr-defined]
        assert step(pair) == 3 * i
    assert not step.stats.replays


class Partial(namedtuple("Partial", "x n")):
    """Iterates over a part of its elements."""

    __slots__ = ()

    def __iter__(self):
        return iter((self.x,))


def test_a_named_tuple_that_iterates_in_its_own_way_stays_whole() -> None:
    """What pytree makes of it lacks elements; the step runs as eager does."""
    batch = Partial(torch.ones(3), 2)
    assert structure.flatten([batch])[0] == [batch]
    step = fz.capture(lambda batch: batch.x * batch.n)
    for n in range(12):
        assert torch.equal(step(Partial(torch.ones(3) + n, n)), (torch.ones(3) + n) * n)
