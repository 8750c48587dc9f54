"""The calls that a file lets replays make, and the values that its program returns for them: what fits each other.

    check_calls(program, effects, 0, SaveError)      at the end of `save`
    check_calls(program, effects, 0, LoadError)      and of `load`: what is saved can be loaded

Arguments are numbers, tensors and constants, in containers of Python: whatever prints them calls no code of the user's.
Texts are of a bounded length. A template of a log record is a constant, and fits its arguments. `extra` sets no
attribute that a record has.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from functionalize._compat.graphs import pytree
from functionalize.calls.call_arguments import ArgumentForm, LateLeaf, TextLeaf
from functionalize.calls.logs import Logged
from functionalize.calls.printing import Printed
from functionalize.calls.schedulers import SchedulerAssigned, SchedulerStepped
from functionalize.calls.warned import Warned
from functionalize.errors import FunctionalizeError
from functionalize.ir.outputs import Constant, InputView, Result, SameAs
from functionalize.ir.scalars import NUMBER_DTYPES
from functionalize.program.program import Program
from functionalize.program.text_formats import (
    NUMBER_LENGTH,
    check_braces,
    check_spec,
    check_template,
    length_of,
)
from functionalize.state.hyperparameters import HyperparameterSet
from functionalize.util.structure import Joined

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_CONTAINERS: tuple[Any, ...] = (
    *(tuple, list, dict, collections.OrderedDict, collections.defaultdict, collections.deque),
    torch.Size,
)
_PAIR: Any = collections.namedtuple("_PAIR", "a b")
_CALLS = (Printed, Logged, Warned, SchedulerStepped)
_SETS_NUMBERS = (SchedulerAssigned, HyperparameterSet)
_MOST = 2**22  # characters of the texts of one call
_TENSOR_LENGTH = 1_000  # about, of a number or a tensor
_RESERVED = frozenset(
    {*vars(logging.makeLogRecord({})), *dir(logging.LogRecord), "message", "asctime"}
)


def check_calls(
    program: Program, effects: Sequence[Any], first: int, kind: type[FunctionalizeError]
) -> None:
    """Raise an error of this kind if these effects cannot have the values that a program returns for them.

    first: the number of gradients that it returns before.
    """
    if not effects:
        return
    for role in program.outputs:
        if isinstance(role, Constant) and type(role.value) not in _PLAIN:
            raise kind(
                f"keeps, prints or returns a constant of the type {type(role.value).__name__}, which a file cannot "
                "hold beside what a replay does in Python"
            )
    for effect, spec, roles in _values(program, effects, first, kind):
        if isinstance(effect, _CALLS):
            _Call(effect, spec, roles, kind).check()
        elif isinstance(effect, _SETS_NUMBERS):
            for role in roles:
                if isinstance(role, Constant) and type(role.value) not in NUMBER_DTYPES:
                    raise kind(f"{effect.what} to what is no number: damaged")


def _values(
    program: Program, effects: Sequence[Any], first: int, kind: type[FunctionalizeError]
) -> Iterator[tuple[Any, pytree.TreeSpec, list[Any]]]:
    """Each effect with the structure of its value and the outputs in it."""
    spec, outputs = program.out_spec, program.outputs
    if spec.type is Joined:
        (spec,) = spec.children()
    parts = spec.children() if spec.type is tuple else []
    each = parts[1].children() if len(parts) == 2 and parts[1].type is list else []
    if len(each) != first + len(effects):
        raise kind("does things in Python with values that are none of them: damaged")
    at = parts[0].num_leaves + sum(child.num_leaves for child in each[:first])
    for effect, child in zip(effects, each[first:], strict=True):
        own = outputs[at : at + child.num_leaves]
        at += child.num_leaves
        yield effect, child, [outputs[r.output] if isinstance(r, SameAs) else r for r in own]


# -- the structure of arguments --------------------------------------------------------------------


def check_form(
    form: Any, keywords: Sequence[str], kind: type[FunctionalizeError]
) -> tuple[list[pytree.TreeSpec], dict[str, pytree.TreeSpec]]:
    """The positional and the named arguments of a call; raises an error of this kind for names beside `keywords`."""
    spec = form.spec
    parts = spec.children() if spec.type is tuple else []
    fits = len(parts) == 2 and parts[0].type is tuple and parts[1].type is dict
    if not fits or not {*parts[1].context} <= {*keywords} or spec.num_leaves != len(form.leaves):
        raise kind("makes a call with arguments that it does not take: damaged")
    for each in (parts[0], parts[1]):
        _check_container(each, kind)
    return parts[0].children(), dict(zip(parts[1].context, parts[1].children(), strict=True))


def _check_container(spec: pytree.TreeSpec, kind: type[FunctionalizeError]) -> None:
    """Raise an error of this kind for a container whose text is made by code of the user's."""
    if spec.is_leaf():
        return
    of, context = spec.type, spec.context
    if of not in _CONTAINERS:
        of = context if isinstance(context, type) and issubclass(context, tuple) else of
        is_named = getattr(getattr(of, "__repr__", None), "__code__", None) is (
            _PAIR.__repr__.__code__
        )
        is_plain = of.__str__ is object.__str__ and of.__format__ is object.__format__
        is_named = is_named and is_plain and issubclass(of, tuple)
        if not is_named and of.__module__ != "torch.return_types":
            raise kind(
                f"hands an object of the type {of.__qualname__} to a call, which a file cannot hold: pass its parts"
            )
    for child in spec.children():
        _check_container(child, kind)


# -- one call --------------------------------------------------------------------------------------


class _Call:
    """A call with the outputs that are the values of its arguments."""

    def __init__(
        self,
        effect: Any,
        spec: pytree.TreeSpec,
        roles: Sequence[Any],
        kind: type[FunctionalizeError],
    ) -> None:
        self.effect, self.kind = effect, kind
        self.form: ArgumentForm = effect.form
        self.length = 0
        self._at = 0  # the next leaf
        parts = spec.children() if spec.type is tuple else []
        if len(parts) != 2 or not parts[0].is_leaf() or parts[1].type is not list:
            self._refuse()
        values = parts[1].children()
        if len(values) != len(self.form.leaves):
            self._refuse()
        self._leaves: list[Any] = []
        at = 1
        for leaf, child in zip(self.form.leaves, values, strict=True):
            own = roles[at : at + child.num_leaves]
            at += child.num_leaves
            self._leaves.append(self._leaf(leaf, child, own))

    def _refuse(self) -> Any:
        raise self.kind("makes a call with values that do not fit its arguments: damaged")

    def _leaf(self, leaf: Any, child: pytree.TreeSpec, roles: Sequence[Any]) -> Any:
        """A stand-in for the value of an argument: a constant itself, or 1; a `TextLeaf` for a text."""
        if not all(isinstance(role, (Result, InputView, Constant)) for role in roles):
            self._refuse()
        if isinstance(leaf, TextLeaf):
            if child.type is not list or not len(leaf.parts) == len(roles) == child.num_children:
                self._refuse()
            self.length += _length_of_text(leaf, self.kind)
            return leaf
        if not child.is_leaf() or (leaf is not None and not isinstance(leaf, LateLeaf)):
            self._refuse()
        (role,) = roles
        if leaf is None and isinstance(role, Constant):
            self.length += (
                length_of(role.value) if isinstance(role.value, (str, bytes)) else NUMBER_LENGTH
            )
            return role.value
        self.length += _TENSOR_LENGTH
        return 1

    def check(self) -> None:
        """Raise an error if the call, or the text of its arguments, cannot be made."""
        if self.length > _MOST:
            raise self.kind(f"{self.effect.what} a text that is too long for a file")
        keywords = {Printed: ("sep", "end", "flush"), Logged: ("extra",)}.get(type(self.effect), ())
        if isinstance(self.effect, SchedulerStepped):
            keywords = ("epoch", "metrics")
        args, named = check_form(self.form, keywords, self.kind)
        values = [self._value(each) for each in args]
        options = {name: self._value(each) for name, each in named.items()}
        if isinstance(self.effect, Printed):
            for name in ("sep", "end"):
                if not isinstance(options.get(name), (str, TextLeaf, type(None))):
                    raise self.kind(f"prints with a `{name}` that is no text: damaged")
        elif isinstance(self.effect, Warned):
            if len(args) != 1 or not args[0].is_leaf():
                raise self.kind("warns by what is no text")
        elif isinstance(self.effect, Logged):
            if not args or not args[0].is_leaf():
                raise self.kind("logs by what is no text")
            self._check_record(values, options.get("extra"))

    def _check_record(self, values: list[Any], extra: Any) -> None:
        message, *rest = values
        if rest:
            of_record = rest[0] if len(rest) == 1 and isinstance(rest[0], dict) and rest[0] else ()
            whole = "x" * self.length  # as long as the text of any container is at most
            shown = {k: self._shown(v, whole) for k, v in dict(of_record).items()}
            args = shown if of_record else tuple(self._shown(v, whole) for v in rest)
            check_template(message, args, self.kind, _MOST, _TENSOR_LENGTH)
            check_braces(message, self.kind)
        if extra is None:
            return
        if not isinstance(extra, dict) or not all(type(name) is str for name in extra):
            raise self.kind("logs with an `extra` that is no dict of names: damaged")
        taken = sorted(_RESERVED & extra.keys())
        if taken:
            raise self.kind(f"logs with an `extra` that sets `{taken[0]}` of the record")

    def _value(self, spec: pytree.TreeSpec) -> Any:
        """A stand-in for an argument: a dict and a list of stand-ins for a container."""
        if spec.is_leaf():
            self._at += 1
            return self._leaves[self._at - 1]
        children = [self._value(child) for child in spec.children()]
        if spec.type in (dict, collections.OrderedDict):
            return dict(zip(spec.context, children, strict=True))
        return children

    def _shown(self, value: Any, whole: str) -> Any:
        """A stand-in as an argument of a template."""
        if isinstance(value, TextLeaf):
            return "x" * _length_of_text(value, self.kind)
        return whole if isinstance(value, (list, dict)) else value


def _length_of_text(text: TextLeaf, kind: type[FunctionalizeError]) -> int:
    return sum(
        len(part) if isinstance(part, str) else NUMBER_LENGTH + part_length(part, kind)
        for part in text.parts
    )


def part_length(part: Any, kind: type[FunctionalizeError]) -> int:
    """The characters of a number's text beside those of the number; raises an error of this kind if there is none."""
    then = check_spec(part.then, kind, ("x",))
    template = getattr(part.function, "__self__", None)
    if part.function is repr and not part.args:
        return then
    if part.function is format and len(part.args) == 1:
        return then + check_spec(part.args[0], kind)
    if type(template) is str and part.function == template.__mod__ and not part.args:
        return then + check_template(template, (1,), kind, _MOST)
    raise kind("makes a text by what formats no number: damaged")
