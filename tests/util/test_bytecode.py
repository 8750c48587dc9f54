"""Instructions of every Python in one vocabulary, written down for the Pythons that are not here."""

from __future__ import annotations

import dis
import re
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import functionalize as fz
from functionalize.errors import UncapturableError
from functionalize.util import bytecode
from functionalize.util.bytecode import (
    Step,
    _blocks,
    _Reader,
    blocks,
    constants_of,
    handlers_of,
    may_repeat,
    read,
)

ROOT = Path(__file__).parents[2]


def test_one_file_imports_dis() -> None:
    pattern = re.compile(r"^\s*(import|from) (dis|opcode|_opcode)\b|\bdis\.", re.MULTILINE)
    files = [*(ROOT / "functionalize").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if pattern.search(file.read_text())}
    assert found == {"functionalize/util/bytecode.py"}


class Raw(NamedTuple):
    """An instruction as `dis` gives it, of a Python that need not be here. effect: on the height of the stack."""

    opname: str
    arg: int | None
    argval: Any
    effect: int
    offset: int
    argrepr: str = ""
    positions: Any = None


def normal(
    version: tuple[int, int],
    raws: list[tuple[str, int | None, Any, int]],
    handlers: tuple[int, ...] = (),
) -> list[tuple[Any, ...]]:
    """Operation, value or kind, number, keywords of each step."""
    steps = _read(version, raws, handlers)
    return [(s.op, s.value if s.value is not None else s.kind, s.number, s.keywords) for s in steps]


def _read(
    version: tuple[int, int],
    raws: list[tuple[str, int | None, Any, int]],
    handlers: tuple[int, ...] = (),
) -> tuple[Step, ...]:
    code = (lambda: ("k",)).__code__.replace(co_consts=(None, ("k",)))
    every = [
        Raw(name, arg, value, effect, 2 * at) for at, (name, arg, value, effect) in enumerate(raws)
    ]
    steps = _Reader(code, version, lambda raw: raw.effect).read(every, handlers).steps
    assert sum(s.effect for s in steps) == sum(raw.effect for raw in every if raw.opname != "CACHE")
    return steps


CALL = [
    ("global", "f", 1, ()),
    ("local", "x", 0, ()),
    ("local", "y", 0, ()),
    ("call", "", 2, ("k",)),
    ("return", "", 0, ()),
]
CALLS = {
    (3, 11): [
        ("RESUME", 0, None, 0), ("LOAD_GLOBAL", 1, "f", 2), ("CACHE", None, None, 0), ("LOAD_FAST", 0, "x", 1),
        ("LOAD_FAST", 1, "y", 1), ("KW_NAMES", 1, ("k",), 0), ("PRECALL", 2, None, -2), ("CALL", 2, None, -1),
        ("RETURN_VALUE", None, None, -1),
    ],
    (3, 12): [
        ("RESUME", 0, None, 0), ("LOAD_GLOBAL", 1, "f", 2), ("LOAD_FAST", 0, "x", 1), ("LOAD_FAST_CHECK", 1, "y", 1),
        ("KW_NAMES", 1, ("k",), 0), ("CALL", 2, None, -3), ("RETURN_VALUE", None, None, -1),
    ],
    (3, 13): [
        ("RESUME", 0, None, 0), ("LOAD_GLOBAL", 1, "f", 2), ("LOAD_FAST_LOAD_FAST", 1, ("x", "y"), 2),
        ("LOAD_CONST", 1, ("k",), 1), ("CALL_KW", 2, None, -4), ("RETURN_VALUE", None, None, -1),
    ],
    (3, 14): [
        ("RESUME", 0, None, 0), ("LOAD_GLOBAL", 1, "f", 2),
        ("LOAD_FAST_BORROW_LOAD_FAST_BORROW", 1, ("x", "y"), 2), ("LOAD_CONST", 1, ("k",), 1),
        ("CALL_KW", 2, None, -4), ("RETURN_VALUE", None, None, -1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("version", CALLS)
def test_a_call_with_keywords_is_one_step(version: tuple[int, int]) -> None:
    assert normal(version, CALLS[version]) == CALL


TEXT = [("local", "x", 0, ()), ("convert", "repr", 1, ()), ("format", "", 1, ())]
LATER = [
    ("local", "x", 0, ()),
    ("convert", "repr", 0, ()),
    ("constant", ">9", 0, ()),
    ("format", "", 1, ()),
]
OLD_TEXT = [("LOAD_FAST", 0, "x", 1), ("LOAD_CONST", 1, ">9", 1), ("FORMAT_VALUE", 6, None, -1)]
NEW_TEXT = [
    ("LOAD_FAST", 0, "x", 1), ("CONVERT_VALUE", 2, None, 0), ("LOAD_CONST", 1, ">9", 1),
    ("FORMAT_WITH_SPEC", None, None, -1),
]  # fmt: skip


def test_a_conversion_and_a_format_are_two_steps() -> None:
    for version in ((3, 11), (3, 12)):
        assert normal(version, OLD_TEXT) == [TEXT[0], LATER[2], *TEXT[1:]]
    for version in ((3, 13), (3, 14)):
        assert normal(version, NEW_TEXT) == LATER
    assert normal((3, 12), [("LOAD_FAST", 0, "x", 1), ("FORMAT_VALUE", 0, None, 0)])[1] == (
        "format",
        "",
        0,
        (),
    )


def test_a_method_is_no_attribute() -> None:
    for version, name, arg, op in (
        ((3, 11), "LOAD_METHOD", 1, "method"),
        ((3, 11), "LOAD_ATTR", 1, "attribute"),  # the argument is the position of the name
        ((3, 12), "LOAD_ATTR", 2, "attribute"),
        ((3, 12), "LOAD_ATTR", 3, "method"),
        ((3, 14), "LOAD_ATTR", 3, "method"),
        ((3, 12), "LOAD_SUPER_ATTR", 3, "super"),
    ):
        assert normal(version, [(name, arg, "append", 0)]) == [(op, "append", 0, ())]


def test_instructions_of_two_steps() -> None:
    assert normal((3, 12), [("RETURN_CONST", 0, 7, 0)]) == [
        ("constant", 7, 0, ()),
        ("return", "", 0, ()),
    ]
    slices = [("BINARY_SLICE", None, None, -2), ("STORE_SLICE", None, None, -4)]
    kinds = [
        ("build", "slice", 2, ()),
        ("subscript", "", 0, ()),
        ("build", "slice", 2, ()),
        ("set_subscript", "", 0, ()),
    ]
    assert normal((3, 12), slices) == kinds
    assert [s.op for s in _read((3, 12), [("END_FOR", None, None, -2)])] == ["end_for", "pop"]
    assert [s.op for s in _read((3, 13), [("END_FOR", None, None, -1)])] == ["end_for"]
    assert normal((3, 14), [("LOAD_SMALL_INT", 7, 7, 1)]) == [("constant", 7, 0, ())]
    pairs = [
        ("STORE_FAST_LOAD_FAST", 1, ("x", "y"), 0),
        ("STORE_FAST_STORE_FAST", 1, ("x", "y"), -2),
    ]
    assert [s.op for s in _read((3, 13), pairs)] == ["set_local", "local", "set_local", "set_local"]


def test_a_jump_to_what_is_left_out_leads_to_the_step_after_it() -> None:
    raws = [
        ("LOAD_FAST", 0, "x", 1), ("POP_JUMP_IF_FALSE", 2, 8, -1), ("LOAD_FAST", 0, "x", 1),
        ("POP_TOP", None, None, -1), ("NOP", None, None, 0), ("TO_BOOL", None, None, 0), ("LOAD_CONST", 0, None, 1),
        ("RETURN_VALUE", None, None, -1),
    ]  # fmt: skip
    steps = _read((3, 13), raws)
    assert steps[1].target == 4 and [s.at for s in steps if s.is_target] == [4]
    assert [s.at for s in _read((3, 13), raws, handlers=(10,)) if s.is_target] == [4]


COMPREHENSION = [  # [f(v) for v in x], of Python 3.12
    ("LOAD_FAST", 0, "x", 1), ("GET_ITER", None, None, 0), ("LOAD_FAST_AND_CLEAR", 1, "v", 1), ("SWAP", 2, None, 0),
    ("BUILD_LIST", 0, None, 1), ("SWAP", 2, None, 0), ("FOR_ITER", 5, 26, 1), ("STORE_FAST", 1, "v", -1),
    ("LOAD_GLOBAL", 1, "f", 2), ("LOAD_FAST", 1, "v", 1), ("CALL", 1, None, -2), ("LIST_APPEND", 2, None, -1),
    ("JUMP_BACKWARD", 6, 12, 0), ("END_FOR", None, None, -2), ("SWAP", 2, None, 0), ("STORE_FAST", 1, "v", -1),
    ("RETURN_VALUE", None, None, -1),
]  # fmt: skip


def test_a_comprehension_in_line_is_one_block() -> None:
    steps = _read((3, 12), COMPREHENSION)
    found = _blocks(steps, 0, len(steps))
    assert [s.op for s in found] == ["local", "iterate", "inlined", "return"]
    assert found[2].kind == "list" and found[2].effect == 0
    assert [s.op for s in found[2].body] == ["set_local", "global", "local", "call", "add", "jump"]
    # One that restores another variable is not understood, and stays as it is.
    other = [*COMPREHENSION[:-2], ("STORE_FAST", 2, "w", -1), COMPREHENSION[-1]]
    assert "inlined" not in [s.op for s in _blocks(_read((3, 12), other), 0, len(steps))]


# -- this Python -----------------------------------------------------------------------------------


def test_small_integers_are_constants() -> None:
    def counts(x: Any) -> None:
        x.n = 7
        x.m = 7000

    assert {7, 7000} <= {*constants_of(counts.__code__)}


def test_steps_that_may_run_again() -> None:
    def tries(x: Any) -> None:
        first(x)
        for each in x:
            second(each)
        try:
            third(x)
        except ValueError:
            fourth(x)

    def first(x: Any) -> None: ...

    second = third = fourth = first
    repeats = {
        s.value: may_repeat(tries.__code__, s.at) for s in read(tries.__code__) if s.op == "deref"
    }
    assert repeats == {"first": False, "second": True, "third": False, "fourth": False}


def test_handlers_are_those_of_the_exception_table() -> None:
    def tries(x: Any) -> Any:
        with x:
            try:
                return [x.y(v) for v in x]
            except (ValueError, KeyError) as error:
                raise TypeError from error
            finally:
                x.close()

    for code in (tries.__code__, Path.rglob.__code__, types.DynamicClassAttribute.setter.__code__):
        entries = dis.Bytecode(code).exception_entries
        assert [*handlers_of(code)] == [(e.start, e.end, e.target) for e in entries]
    assert [s.op for s in blocks(tries.__code__)]


def test_a_step_runs_eagerly_on_a_python_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile("def step(x, n):\n    return x * len(str(n))\n", "<unknown>", "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    monkeypatch.setattr(bytecode, "VERSIONS", ((3, 99),))
    step = fz.capture(namespace["step"])
    with pytest.warns(
        fz.errors.UncapturableWarning, match="knows the instructions of Python 3.99 to 3.99"
    ):
        for n in range(3):
            assert step(torch.ones(2), n).tolist() == [1.0, 1.0]
    assert step.stats.captures == 0
    with pytest.raises(UncapturableError, match="knows the instructions of"):
        fz.capture(namespace["step"], on_uncapturable="raise")(torch.ones(2), 1)
