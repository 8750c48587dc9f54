"""What `util/bytecode.py` reads of a function is what the interpreter does when it runs it.

Hypothesis writes functions of f-strings, `%`, `str.format`, joins, comprehensions, calls, attributes, subscripts. The
methods of their variables note which step the function runs: `a + b` calls `__add__` at a step "binary" of kind "+",
in whatever Python this is.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import importlib.util
import inspect
import io
import itertools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functionalize as fz
from functionalize.errors import UncapturableError
from functionalize.scalars.call_sites import ELEMENT, CallSite, Text, callee_of, site_at
from functionalize.util import bytecode
from functionalize.util.bytecode import KNOWN, NOT_IN_CODE, VERSIONS, Step, read, running
from functionalize.walk.code_names import names_in
from tests.laws.opcodes import NAMES

HERE = sys.version_info[:2]

# -- the tables ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_every_instruction_of_every_python_is_known(version: tuple[int, int]) -> None:
    assert not NAMES[version] - KNOWN - NOT_IN_CODE
    assert NAMES.keys() == {*VERSIONS}


def test_no_instruction_is_known_that_no_python_has() -> None:
    every = frozenset[str]().union(*NAMES.values())
    pseudo = {
        f"POP_JUMP_{way}IF_{test}" for way in ("", "FORWARD_", "BACKWARD_") for test in ("NONE",)
    }
    assert not KNOWN - every - pseudo


def test_the_names_are_those_of_this_python() -> None:
    real = {name for name, code in dis.opmap.items() if code < 256}
    assert NAMES[HERE] == {name for name in real if not name.startswith("INSTRUMENTED_")}


# -- the height of the stack, lines and jumps, in much code ----------------------------------------

MODULES = (
    *(
        "argparse",
        "ast",
        "asyncio.base_events",
        "collections",
        "contextlib",
        "dataclasses",
        "enum",
        "functools",
    ),
    *(
        "inspect",
        "json.decoder",
        "logging",
        "pathlib",
        "random",
        "statistics",
        "subprocess",
        "tempfile",
        "typing",
    ),
    *(
        "functionalize.scalars.call_sites",
        "functionalize.walk.parts",
        "functionalize.step.stages",
        __name__,
    ),
)


def codes(module: str) -> Iterator[types.CodeType]:
    file = importlib.import_module(module).__file__
    assert file is not None
    with open(file) as source:
        todo = [compile(source.read(), file, "exec", dont_inherit=True)]
    while todo:
        code = todo.pop()
        yield code
        todo += [each for each in code.co_consts if isinstance(each, types.CodeType)]


@pytest.mark.parametrize("module", MODULES)
def test_steps_are_those_of_the_interpreter(module: str) -> None:
    for code in codes(module):
        raws = list(dis.get_instructions(code))
        steps = read(code)
        assert [s.at for s in steps] == [*range(len(steps))]
        effects = [
            dis.stack_effect(r.opcode, r.arg, jump=False) for r in raws if r.opname != "CACHE"
        ]
        assert sum(s.effect for s in steps) == sum(effects), code
        for name in ("JUMP", "RETURN", "IMPORT_NAME", "STORE_ATTR"):
            op = {"JUMP": ("jump", "branch"), "RETURN": ("return",), "IMPORT_NAME": ("import",)}
            wanted = op.get(name, ("set_attribute",))
            found = [s for s in steps if s.op in wanted]
            # `RETURN_GENERATOR` begins a generator.
            there = [r for r in raws if name in r.opname and r.opname != "RETURN_GENERATOR"]
            assert len(found) == len(there), (code, name)
        heights(code, steps)


def heights(code: types.CodeType, steps: tuple[Step, ...]) -> None:
    """The height of the stack at a step is the same on every way that leads there."""
    known: dict[int, int] = {}
    # Python 3.11 does not count the value that a generator begins with.
    is_suspended = bool(
        code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
    )
    todo = [(0, int(is_suspended and HERE == (3, 11)))]
    while todo:
        at, height = todo.pop()
        while at < len(steps):
            step = steps[at]
            assert height >= 0
            if at in known:
                assert known[at] == height, (code, step)
                break
            known[at] = height
            if step.op in ("return", "raise"):
                break
            if step.target is not None and step.op in ("jump", "branch"):
                keeps = step.op == "branch" and step.effect == -1 and _keeps(code, step)
                todo.append((step.target, height + (step.effect if not keeps else 0)))
            if step.op == "jump" or (step.op == "send" and step.target is None):
                break
            height += step.effect
            at += 1


def _keeps(code: types.CodeType, step: Step) -> bool:
    """Whether a jump of Python 3.11 keeps the value that it looks at: `a or b`."""
    _, starts, first, _ = bytecode._read(code)
    offset = starts[len(first) - 1 - first[::-1].index(step.at)]
    return "OR_POP" in dis.opname[code.co_code[offset]]


# -- what the interpreter does at a step -----------------------------------------------------------

SEEN: list[tuple[str, Step, types.CodeType]] = []


def note(expected: str) -> None:
    """A method of a variable was called: which step does its caller run?"""
    frame = sys._getframe(2)
    if frame.f_code.co_filename == "<law>":
        SEEN.append((expected, running(frame), frame.f_code))


class Probe:
    """A variable that notes everything that is done with it, and is itself the result."""

    def __init__(self, depth: int = 0) -> None:
        object.__setattr__(self, "depth", depth)

    def __getattr__(self, name: str) -> Any:
        note(f"attribute {name}")
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        note(f"set_attribute {name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note(f"call {len(args) + len(kwargs)} {tuple(kwargs)}")
        return self

    def __getitem__(self, key: Any) -> Any:
        note("subscript")
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        note("set_subscript")

    def __iter__(self) -> Iterator[Any]:
        note("iterate")
        return Items([Probe(), Probe()])

    def __contains__(self, value: Any) -> bool:
        note("contains")
        return True

    def __format__(self, spec: str) -> str:
        note("format")
        return "f"

    def __repr__(self) -> str:
        note("convert repr")
        return "r"

    def __str__(self) -> str:
        note("text")
        return "s"

    def __bool__(self) -> bool:
        note("bool")
        return True

    def __neg__(self) -> Any:
        note("unary -")
        return self

    def __invert__(self) -> Any:
        note("unary ~")
        return self

    def __pos__(self) -> Any:
        note("unary +")
        return self


class Items:
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> Any:
        note("for")
        if not self.values:
            raise StopIteration
        return self.values.pop()


def _operator(name: str, expected: str) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        note(expected)
        return self

    method.__name__ = name
    return method


BINARY = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "matmul": "@",
}
BINARY |= {"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "pow": "**"}
COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
for _name, _symbol in BINARY.items():
    setattr(Probe, f"__{_name}__", _operator(_name, f"binary {_symbol}"))
    setattr(Probe, f"__i{_name}__", _operator(_name, f"binary {_symbol}="))
for _name, _symbol in COMPARE.items():
    setattr(Probe, f"__{_name}__", _operator(_name, f"compare {_symbol}"))
Probe.__hash__ = object.__hash__  # type: ignore[method-assign]


def agrees(expected: str, step: Step) -> bool:
    """Whether a step is one at which the interpreter does this."""
    what, _, detail = expected.partition(" ")
    if what == "attribute":
        return step.op in ("attribute", "method") and step.value == detail
    if what == "set_attribute":
        return (step.op, step.value) == (what, detail)
    if what == "call":
        return (
            f"call {step.number} {step.keywords}" == expected
            if step.op == "call"
            else step.op == "call_unpacked"
        )
    if what in ("binary", "unary", "compare"):
        return (step.op, step.kind) == (what, detail)
    if what == "convert":  # `%r`, `repr(a)`, and containers ask for it, too
        return (step.op, step.kind) in (("convert", "repr"), ("convert", "ascii")) or step.op in (
            *TEXTS,
            "format",
        )
    if what == "text":
        return (step.op, step.kind) == ("convert", "str") or step.op in TEXTS
    if what == "format":
        return step.op in ("format", "call")
    if what == "bool":  # of the jump that follows, of `not`, or, since Python 3.13, in a comparison
        return step.op in ("branch", "compare") or (step.op, step.kind) == ("unary", "not")
    if what == "iterate":  # also `*a`, `join`, `in`
        return step.op in ("iterate", *TAKERS)
    if what == "for":
        return step.op in ("for", *TAKERS)
    return step.op == what


TEXTS = ("call", "binary")
TAKERS = ("call", "call_unpacked", "extend", "contains", "other")

NAMES_OF_VARIABLES = st.sampled_from(["a", "b", "G"])
CONSTANTS = st.sampled_from(["1", "2.5", "'t'", "None", "1000", "-3", "(1, 2)"])
SPECS = st.sampled_from(["", ":>9", ":.3f", "!r", "!s", "!r:>5", ":{b}", "!a"])


def expressions() -> st.SearchStrategy[str]:
    leaves = NAMES_OF_VARIABLES | CONSTANTS.map(lambda c: f"G({c})")

    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(inner, st.sampled_from([*BINARY.values()]), inner).map(
                lambda t: f"({' '.join(t)})"
            ),
            st.tuples(inner, st.sampled_from([*COMPARE.values()]), inner).map(
                lambda t: f"({' '.join(t)})"
            ),
            st.tuples(st.sampled_from("-~+"), inner).map("".join),
            st.tuples(inner, st.sampled_from("xy")).map(".".join),
            st.tuples(inner, st.lists(inner, max_size=3).map(", ".join)).map(
                lambda t: f"{t[0]}({t[1]})"
            ),
            st.tuples(inner, inner, inner).map(lambda t: f"{t[0]}.m({t[1]}, k={t[2]})"),
            st.tuples(inner, inner, inner).map(lambda t: f"{t[0]}({t[1]}, k={t[2]}, l=1)"),
            st.tuples(inner, inner).map(lambda t: f"{t[0]}(*{t[1]}, **dict(k=1))"),
            st.tuples(inner, inner).map(lambda t: f"{t[0]}[{t[1]}]"),
            st.tuples(inner, inner).map(lambda t: f"{t[0]}[{t[1]}:2]"),
            st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
            st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
                lambda t: f"({' '.join(t)})"
            ),
            st.tuples(inner, inner).map(lambda t: f"G({t[0]} in {t[1]}, {t[0]} is not None)"),
            inner.map(lambda e: f"G(not {e})"),
            st.lists(st.tuples(inner, SPECS), min_size=1, max_size=3).map(_f_string),
            inner.map(lambda e: f"G('%s and %r' % ({e}, {e}))"),
            inner.map(lambda e: f"G('%s' % {e}, str({e}), repr({e}))"),
            st.tuples(inner, inner).map(lambda t: f"G('{{:>3}}|{{!r}}'.format({t[0]}, {t[1]}))"),
            st.tuples(inner, SPECS).map(
                lambda t: f"G(', '.join([{_field('v', t[1])} for v in {t[0]}]))"
            ),
            st.tuples(inner, SPECS).map(
                lambda t: f"G('-'.join({_field('v', t[1])} for v in {t[0]} if v))"
            ),
            st.tuples(inner, inner).map(
                lambda t: f"G([v + {t[0]} for v in {t[1]} for w in v if w])"
            ),
            st.tuples(inner, inner).map(
                lambda t: f"G({{id(v): v.x for v in {t[1]}}}, {{id({t[0]}) for v in b}})"
            ),
            st.tuples(inner, inner).map(lambda t: f"G([[v @ w for w in {t[0]}] for v in {t[1]}])"),
            inner.map(lambda e: f"G((lambda p=1: {e})())"),
            inner.map(lambda e: f"G([(lambda: v)() for v in {e}])"),
        )

    return st.recursive(leaves, grown, max_leaves=6)


def _field(value: str, spec: str) -> str:
    return f'f"{{{value}{spec}}}"'


def _f_string(fields: list[tuple[str, str]]) -> str:
    inner = "| ".join(f"{{({each}){spec}}}" for each, spec in fields)
    # Before Python 3.12 a text inside of a field has other quotation marks.
    return f'G(f"""{inner}""")' if '"""' not in inner else "G(1)"


STATEMENTS = st.sampled_from([
    "{}", "c = {}", "a.x = {}", "a[b] = {}", "a[1:b] = {}", "a += {}", "a.x -= {}", "a[b] *= {}",
    "if {}:\n        b.y", "for c in {}:\n        a(c)", "a, c = {}", "with G.cm() as c:\n        {}",
    "try:\n        {}\n    except KeyError:\n        b.z", "while {}:\n        break", "del c; c = {}",
    "for c in b:\n        if c: continue\n        {}", "a: int = {}", "assert {}, a",
])  # fmt: skip


@st.composite
def functions(draw: st.DrawFn) -> str:
    lines = draw(st.lists(st.tuples(STATEMENTS, expressions()), min_size=1, max_size=4))
    body = "\n    ".join(form.format(each) for form, each in lines)
    return f"def law(a, b, c):\n    {body}\n    return a\n"


class _Manager:
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def made(source: str, **names: Any) -> Any:
    space: dict[str, Any] = {"dict": dict, "str": str, "repr": repr, "id": id, **names}
    try:
        exec(compile(source, "<law>", "exec", dont_inherit=True), space)
    except SyntaxError:  # a backslash or a nested quotation mark in an f-string of an older Python
        return None
    return space["law"]


@pytest.mark.long
@settings(max_examples=max(300, settings.default.max_examples))
@given(functions())
def test_a_step_is_what_the_interpreter_does(source: str) -> None:
    probe = Probe()
    object.__setattr__(probe, "cm", _Manager)
    function = made(source, G=probe)
    if function is None:
        return
    SEEN.clear()
    # Of what a text or a number cannot do; the steps until there count.
    with contextlib.suppress(TypeError, ValueError, AttributeError, IndexError):
        function(Probe(), Probe(), Probe())
    wrong = [(what, step) for what, step, _ in SEEN if not agrees(what, step)]
    assert not wrong, f"{source}\n{wrong}"
    names = names_in(function.__code__)
    read_names = {what.split()[1] for what, *_ in SEEN if "attribute" in what}
    assert read_names <= names.names, source


# -- where a text goes -----------------------------------------------------------------------------


class Talker:
    """Receives texts, and notes at which step of its caller."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []

    def say(self, *args: Any, **kwargs: Any) -> None:
        self.heard.append((running(sys._getframe(1)).at, args, kwargs))


TOLD: list[tuple[CallSite | None, str]] = []


class Number:
    """A number whose every text is another one, and which notes where the bytecode says that it goes."""

    count = itertools.count()

    def _text(self, spec: str = "") -> str:
        frame = sys._getframe(2)
        at = running(frame).at
        site = site_at(frame.f_code, at)
        if site is not None and site.callee is ELEMENT:
            if site.made_at is None and frame.f_back is not None:
                frame = frame.f_back
                at = running(frame).at
            site = site_at(frame.f_code, at if site.made_at is None else site.made_at)
        if site is not None and (site.callee is ELEMENT or callee_of(site, frame) is None):
            site = None
        text = f"<n{next(self.count)}>"
        TOLD.append((site, text))
        return format(text, spec)

    def __format__(self, spec: str) -> str:
        return self._text(spec)

    def __repr__(self) -> str:
        return self._text()

    def __str__(self) -> str:
        return self._text()


FORMS = st.sampled_from([
    'f"{{{v}}}"', 'f"a {{{v}:>5}}b"', 'f"{{{v}!r}}"', 'f"{{{v}!s:>6}}"', '"%s;" % {v}', "str({v})", "'%s' % {v} + 'z'",
    "'{{:>4}}'.format({v})", '("x " + str({v}))', 'f"{{{v}}} and {{{v}!r:<5}}"', 'f"{{str({v})}}"',
    '"a" "b"', 'f"{{str({v}):>9}}"', "f\"{{f'{{{v}!r:>7}}'}}\"", "f\"{{f'{{{v}}}':>12}}\"", 'f"{{{v}:>{{5 + 4}}}}"',
    'f"{{str({v})!r}}"',
])  # fmt: skip
JOINS = st.sampled_from([
    "', '.join([{t} for v in ms])", "', '.join({t} for v in ms)", "'-'.join([{t}, 'c'])", "'+'.join(({t}, {t}))", "{t}",
    "', '.join([{t} for v in ms if v is not None])", "''.join([{t} for m in [ms] for v in m])", "({t}).upper()",
    "f\"{{', '.join([{t} for v in ms]):>20}}\"", "', '.join(map(str.upper, [{t} for v in ms]))",
    "', '.join([u for u in [{t} for v in ms]])", "', '.join([[{t} for v in ms][0] for w in ms])",
    "', '.join(sorted({t} for v in ms))", "', '.join([({t} if w else 'c') for w, v in enumerate(ms)])",
    "', '.join([{t} for v in ms] + ['c'])", "', '.join(({t} for v in ms) if n else [])",
])  # fmt: skip
USES = st.sampled_from([
    "say({t})", "say('a', {t}, end={u})", "say({t}, k={u}, l=1)", "talker.say({t})", "text = {t}\n    say(text)",
    "say([{t}])", "say(*[{t}])", "for _ in (1, 2):\n        say({t})", "x = {t}\n    say({u})", "say({t} if n else '')",
    "text = {t}\n    say('a', text)\n    n", "try:\n        say({t})\n    except KeyError:\n        say({u})",
    "with manager():\n        say({t}, {u})", "text = {t}\n    other = {u}\n    say(text, other)", "say({t} or 'a')",
    "while True:\n        say({t})\n        break", "text = {t}\n    text = {u}\n    say(text)", "say({t}); say({u})",
])  # fmt: skip


@st.composite
def speeches(draw: st.DrawFn, most: int = 3) -> str:
    def text() -> str:
        join = draw(JOINS)
        form = draw(FORMS).format(v="v" if "for v in" in join else "n")
        return join.format(t=form) if draw(st.booleans()) or "for v" in join else form

    body = [draw(USES).format(t=text(), u=text()) for _ in range(draw(st.integers(1, most)))]
    return "def law(n, ms, talker, manager):\n    " + "\n    ".join(body) + "\n"


FOUND = {"told": 0, "known": 0}


@pytest.mark.long
@settings(max_examples=max(400, settings.default.max_examples))
@given(speeches())
def test_a_text_goes_where_the_bytecode_says(source: str) -> None:
    talker = Talker()
    function = made(source, say=talker.say)
    if function is None:
        return
    TOLD.clear()
    function(Number(), [Number(), Number()], talker, _Manager)
    for site, text in TOLD:
        FOUND["told"] += 1
        if site is None:
            continue
        FOUND["known"] += 1
        heard = [
            (at, args, kwargs) for at, args, kwargs in talker.heard if text in f"{args}{kwargs}"
        ]
        assert len(heard) == 1, f"{source}\n{text} goes to {site}, and {talker.heard}"
        ((at, args, kwargs),) = heard
        assert at == site.at, f"{source}\n{text} goes to {site}"
        values = {**dict(enumerate(args)), **kwargs}
        parts = {**dict(enumerate(site.args)), **site.keywords}
        assert values.keys() == parts.keys()
        holding = [key for key, value in values.items() if text in str(value)]
        assert len(holding) == 1 and type(values[holding[0]]) is str, source
        template = parts[holding[0]]
        assert template is not None and _may_be(template, values[holding[0]]), f"{source}\n{site}"


def _may_be(parts: Text, value: str) -> bool:
    """Whether the parts that are constants stand in a text, in order."""
    end = 0
    for each in parts.parts:
        if isinstance(each, str):
            end = value.find(each, end)
            if end < 0:
                return False
            end += len(each)
    return True


@pytest.mark.long
def test_of_many_texts_the_call_is_known() -> None:
    assert FOUND["known"] > 0.15 * FOUND["told"] > 0, FOUND


# -- what a replay prints --------------------------------------------------------------------------

STEP = """
import torch
from torch import no_grad as manager

losses, sums = [], {"total": 0.0}


def step(x):
    n = float(x.square().mean())
    ms = [x.mean().item(), float(x.sum()) * 2]
    losses.append(float(x.amax()))
    sums["total"] += float(n)
    law(n, ms, None, manager)
    return x * 2


"""
NUMBERED: Counter[str] = Counter()


def outcomes(step: Any, module: Any) -> Iterator[Any]:
    for k in range(5):
        out = io.StringIO()
        x = torch.randn(3, generator=torch.Generator().manual_seed(k))
        with contextlib.redirect_stdout(out):
            result = step(x)
        yield out.getvalue(), result.tolist(), list(module.losses), dict(module.sums)


@pytest.mark.long
@settings(max_examples=max(60, settings.default.max_examples // 4))
@given(source=speeches(most=1))
def test_a_replay_prints_what_eager_prints(source: str, tmp_path_factory: Any) -> None:
    for ours, prints in (
        ("talker.say(", "print("),
        ("say(", "print("),
        (", k=", ", sep="),
        ("l=1", "flush=True"),
    ):
        source = source.replace(ours, prints)
    try:
        compile(source, "<law>", "exec")
    except SyntaxError:
        return
    file = tmp_path_factory.mktemp("law") / "stepping.py"
    file.write_text(STEP + source)
    eager, ours = (loaded(file, f"stepping_{name}") for name in ("eager", "ours"))
    captured = fz.capture(ours.step, on_uncapturable="eager")
    for expected, found in zip(outcomes(eager.step, eager), outcomes(captured, ours), strict=True):
        assert found == expected, f"{source}\n{captured.explain()}"
    NUMBERED.update(steps=1, replayed=captured.stats.replays > 0)


def loaded(file: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.long
def test_many_of_these_steps_are_replayed() -> None:
    assert NUMBERED["replayed"] > 0.2 * NUMBERED["steps"] > 0, NUMBERED


# -- refusals --------------------------------------------------------------------------------------


def plain() -> None:
    pass


def test_an_unknown_instruction_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bytecode, "_PLAIN", {k: v for k, v in bytecode._PLAIN.items() if k != "POP_TOP"}
    )
    bytecode._read.cache_clear()

    def forgets() -> None:
        plain()

    with pytest.raises(
        UncapturableError, match=r"test_bytecode.py:\d+, in forgets: Python 3.* instruction POP_TOP"
    ):
        read(forgets.__code__)
    bytecode._read.cache_clear()


def test_an_unknown_python_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
    bytecode._read.cache_clear()
    with pytest.raises(UncapturableError, match=r"this is Python 3\.99, .* Python 3\.11 to 3\.14"):
        read(plain.__code__)
    bytecode._read.cache_clear()
