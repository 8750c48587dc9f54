"""Arguments and results of calls, as flat leaves and a structure that compares by value.

    leaves, spec = flatten((args, kwargs))       Batch(x=t0, y=[t1, 3])  ->  [t0, t1, 3], Batch(x=*, y=[*, *])
    unflatten(leaves, spec)                      an object of the same type with other leaves
    paths(spec), sketch(spec)                    .x, .y[0], .y[1]; Batch(x=*, y=[*, *]) to print

pytree opens lists, dicts, named tuples and registered types. Of the objects that are leaves for pytree, this module
also opens the following into their attributes and items, without registering their types:

- subclasses of dict and of Mapping (`BatchEncoding`), dataclasses, `SimpleNamespace`;
- other objects that hold tensors: as an argument if they hold only tensors and numbers (a batch), as a result also
  with other contents (a cache), or with symbolic numbers only (a record of `loss.item()`);
- as an argument, a `BlockMask`, and a nested function that encloses nothing, or only tensors and constants, with a
  tensor among them or inside such an object (`mask_mod`): its code is a leaf, and the enclosed values are further ones.

An object that holds a module or an optimizer, or whose class has a part written in C, stays a leaf; so does a result
without tensors and symbolic numbers, which is returned as it is. Attributes of a dict or a `UserDict` that are neither
tensors nor numbers are compared by their type only: tokenizers keep such objects beside the items.
Invariant: a spec is an ordinary `TreeSpec`; equal specs mean the same types, names, keys and lengths.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import FunctionType, MappingProxyType, MemberDescriptorType, NoneType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functionalize._compat.graphs import pytree
from functionalize.util.code_objects import closed_function, enclosed, opened_function
from functionalize.util.reading import elements_of, is_a, table_of, values_of

_NUMBERS = (bool, int, float, complex, str, bytes, NoneType)
_ATOMS = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_CLOSED = frozenset({Tensor, nn.Parameter, *_ATOMS})
_LEAVES = _CLOSED - {torch.Size}  # of which pytree makes a tuple
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_STATEFUL = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_BASES = (
    OrderedDict,
    dict,
    SimpleNamespace,
    object,
)  # C-implemented bases that a class written in Python may have


def flatten(tree: Any, *, result: bool = False) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of `tree` and its structure.

    result: whether `tree` is the result of a step and not its arguments; more objects are then opened, see above.
    """
    stays = _is_size if result else None
    leaves, spec = pytree.tree_flatten(tree, is_leaf=stays)
    if _has_open_tuples(spec):
        stays = partial(_stays, _is_size if result else _is_nothing)
        leaves, spec = pytree.tree_flatten(tree, is_leaf=stays)
    if all(type(leaf) in _CLOSED for leaf in leaves):
        return leaves, spec
    opened = [_opened(leaf, result, frozenset()) for leaf in leaves]
    if any(type(leaf) is Opened for leaf in opened):
        tree = of_leaves(opened, spec)
        return pytree.tree_flatten(tree, is_leaf=stays)
    return leaves, spec


def are_leaves(values: Iterable[Any]) -> bool:
    """Whether values are tensors and numbers, which `flatten` does not open."""
    return all(type(each) in _LEAVES for each in values)


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size  # pytree makes a tuple of it


def _has_open_tuples(spec: pytree.TreeSpec) -> bool:
    """Whether there is a named tuple that may hold more than its iteration gives: attributes, or other elements."""
    if spec.type is namedtuple and (spec.context.__dictoffset__ or _has_own_iter(spec.context)):
        return True
    return not spec.is_leaf() and any(map(_has_open_tuples, spec.children()))


def _stays(is_leaf: Callable[[Any], bool], value: Any) -> bool:
    """Whether pytree does not open a value, as it would drop attributes of a named tuple, or take other elements."""
    if is_leaf(value):
        return True
    return is_a(value, tuple) and (bool(table_of(value)) or _has_own_iter(type(value)))


def _has_own_iter(kind: type[tuple[Any, ...]]) -> bool:
    """Whether a class of tuples iterates in a way of its own."""
    return kind.__iter__ is not tuple.__iter__


def _is_nothing(value: Any) -> bool:
    return False


def with_others(tree: Any, others: Mapping[int, Any]) -> Any:
    """The tree with others in the places of leaves, by their ids. Containers stay the same objects, but tuples.

    So do not those of types that `flatten` alone opens.
    """
    changed = _with_others(tree, others, {})
    leaves, spec = flatten(changed, result=True)
    if all(id(leaf) not in others for leaf in leaves):
        return changed
    return unflatten([others.get(id(leaf), leaf) for leaf in leaves], spec)


def _with_others(value: Any, others: Mapping[int, Any], memo: dict[int, Any]) -> Any:
    if id(value) in others:
        return others[id(value)]
    kind: Any = type(value)
    if kind in _CLOSED or id(value) in memo:
        return memo.get(id(value), value)
    if issubclass(kind, tuple):
        elements = list(tuple.__iter__(value))
        found = [_with_others(each, others, memo) for each in elements]
        is_same = all(a is b for a, b in zip(elements, found, strict=True))
        is_plain = kind is tuple or hasattr(kind, "_make")
        if is_same or not is_plain:
            return value
        memo[id(value)] = made = tuple.__new__(kind, found)
        return made
    memo[id(value)] = value
    if issubclass(kind, (list, deque, dict)):
        base: Any = next(each for each in (list, deque, dict) if issubclass(kind, each))
        pairs = list(dict.items(value) if base is dict else enumerate(base.__iter__(value)))
        put = base.__setitem__
    elif issubclass(kind, SimpleNamespace) or dataclasses.is_dataclass(kind):
        pairs, put = list(attributes_of(value).items()), object.__setattr__
    else:
        return value
    for key, each in pairs:
        now = _with_others(each, others, memo)
        if now is not each:
            put(value, key, now)
    return value


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """The inverse of `flatten`: opened objects are created without calling their `__init__`."""
    tree = of_leaves(leaves, spec)
    return tree.joined() if type(tree) is Joined else tree


def of_leaves(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """What `pytree.tree_unflatten` makes, but named tuples without the `__new__` of their class."""
    if len(leaves) != spec.num_leaves:
        raise ValueError(f"{len(leaves)} leaves of a structure that has {spec.num_leaves}")
    return _made_of(iter(leaves), spec)


def _made_of(leaves: Iterator[Any], spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return next(leaves)
    return _node([_made_of(leaves, child) for child in spec.children()], spec)


def _node(children: list[Any], spec: pytree.TreeSpec) -> Any:
    """A container of that structure around its children.

    `PackedSequence.__new__`, and one that a user writes, may take other arguments than the elements, and reads them.
    """
    if spec.type is namedtuple:
        return tuple.__new__(spec.context, children)
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


def rebuilder(spec: pytree.TreeSpec) -> Callable[[list[Any]], Any]:
    """A function that does what `unflatten` does, and that copies a list of leaves at once, however long it is."""
    children, start = spec.children(), 0
    if spec.type is Joined:
        make, same = rebuilder(children[0]), spec.context
        return lambda leaves: Joined(make(leaves), same).joined()
    if spec.type is list and all(child.is_leaf() for child in children):
        return list
    if spec.type not in (list, tuple):
        return lambda leaves: unflatten(leaves, spec)
    parts: list[tuple[slice, Callable[[list[Any]], Any]]] = []
    for child in children:
        parts.append((slice(start, start + child.num_leaves), rebuilder(child)))
        start += child.num_leaves
    kind: Any = spec.type
    return lambda leaves: kind([make(leaves[part]) for part, make in parts])


def paths(spec: pytree.TreeSpec) -> list[tuple[Any, ...]]:
    """The path of each leaf, as pytree's keys from the root."""
    return list(_paths(spec, ()))


def odd_keys(spec: pytree.TreeSpec) -> tuple[str, ...]:
    """The types of all keys of dicts that are no strings: the key 1 equals the key True, and is another one."""
    found: list[str] = []
    pending = [spec]
    while pending:
        each = pending.pop()
        if (
            isinstance(each.type, type)
            and issubclass(each.type, dict)
            and isinstance(each.context, list)
        ):
            found += [type(key).__name__ for key in each.context if type(key) is not str]
        pending += each.children()
    return tuple(found)


def sketch(spec: pytree.TreeSpec) -> Any:
    """An object with the structure of `spec`, for messages: every leaf is `"*"`."""
    if spec.is_leaf():
        return "*"
    children = [sketch(child) for child in spec.children()]
    if spec.type is Joined:
        return children[0]
    if spec.type is Opened:
        return Opened(spec.context, children)
    return _node(children, spec)


def holds_tensors(leaf: Any) -> bool:
    """Whether an object that is a leaf of the structure holds tensors."""
    if type(leaf) in _CLOSED or is_a(leaf, (Tensor, type, *_STATEFUL)):
        return False
    return any(is_a(x, Tensor) for x in objects_inside(leaf))


# -- objects as pytree nodes -----------------------------------------------------------------------


class _Beside:
    """An attribute of a mapping that is compared by its type only: equal to any other of the same type."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Beside) and type(other.value) is type(self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return type(self.value).__name__


class _Shape(NamedTuple):
    """The structure of an opened object.

    keys: those of a dict's items. names: the attributes that are children. beside: attributes of a mapping that are
    compared by their type only.
    """

    kind: type
    keys: tuple[Any, ...]
    names: tuple[str, ...]
    beside: tuple[tuple[str, _Beside], ...]


class Opened:
    """An object split into its structure and its children. Only this and `Joined` are registered with pytree."""

    __slots__ = ("children", "shape")

    def __init__(self, shape: _Shape, children: list[Any]) -> None:
        self.shape, self.children = shape, children

    def __repr__(self) -> str:
        names = [*map(repr, self.shape.keys), *self.shape.names]
        inner = (f"{name}={child!r}" for name, child in zip(names, self.children, strict=True))
        return f"{self.shape.kind.__name__}({', '.join(inner)})"


def _keys(shape: _Shape) -> list[Any]:
    return [*map(pytree.MappingKey, shape.keys), *map(pytree.GetAttrKey, shape.names)]


def _rebuilt(children: Any, shape: _Shape) -> Any:
    """An object of that shape around these children."""
    children = list(children)
    if shape.kind is FunctionType:
        return closed_function(*children)
    value = _blank(shape.kind)
    for key, child in zip(shape.keys, children, strict=False):
        _base(shape.kind).__setitem__(value, key, child)
    for name, child in zip(shape.names, children[len(shape.keys) :], strict=True):
        object.__setattr__(value, name, child)
    for name, beside in shape.beside:
        object.__setattr__(value, name, beside.value)
    return value


def is_shape(shape: Any, children: int) -> bool:
    """Whether this is the structure of an object that `flatten` may have opened, with so many children.

    A shape from a file may name any class that is known there, and any attribute: an object is only made of a class
    that is opened, without code of the class, and gets no attribute that the class itself computes or sets.
    """
    if type(shape) is not _Shape or not isinstance(shape.kind, type):
        return False
    if not _is_transparent(shape.kind) or len(shape.keys) + len(shape.names) != children:
        return False
    if shape.keys and not issubclass(shape.kind, dict):
        return False
    names = (*shape.names, *(name for name, _ in shape.beside))
    return all(isinstance(name, str) and _is_stored(shape.kind, name) for name in names)


def _is_stored(kind: type, name: str) -> bool:
    """Whether an attribute of that name is stored in the object: no descriptor of the class handles it."""
    found = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
    return isinstance(found, MemberDescriptorType) or not hasattr(type(found), "__set__")


PARTS_OF_SPECS = (_Shape, _Beside)  # the classes of this module that occur in a spec, for saving it

pytree.register_pytree_node(
    Opened,
    lambda opened: (opened.children, opened.shape),
    _rebuilt,
    flatten_with_keys_fn=lambda o: (
        list(zip(_keys(o.shape), o.children, strict=True)),
        o.shape,
    ),
)


class KeptObject:
    """In the place of a part of a result: the object that is at a place outside. place: where a replay finds it."""

    __slots__ = ("place",)

    def __init__(self, place: Any) -> None:
        self.place = place


class Joined:
    """A tree in which some containers are one object, which pytree would make several times.

    same: pairs of the keys that lead to a container, and of those that lead to where it stands, too; what is inside a
    container comes before it.
    """

    __slots__ = ("same", "tree")

    def __init__(self, tree: Any, same: tuple[tuple[Any, Any], ...]) -> None:
        self.tree, self.same = tree, same

    def joined(self) -> Any:
        """The tree, whose containers are still those of pytree, with one object in all places of each."""
        tree = self.tree
        for source, target in self.same:
            value = tree
            for key in source:
                value = _inside_of(value, key)
            tree = _with(tree, target, value)
        return tree


def _inside_of(value: Any, key: Any) -> Any:
    if issubclass(type(value), (list, tuple, deque, dict)):
        return value[key]
    return object.__getattribute__(value, key)


def _with(value: Any, keys: Any, inner: Any) -> Any:
    """A tree with another object where keys lead: in place, or other tuples."""
    if not keys:
        return inner
    key, *rest = keys
    now = _with(_inside_of(value, key), rest, inner)
    kind: Any = type(value)
    if issubclass(kind, tuple):
        elements = [*value[:key], now, *value[key + 1 :]]
        return tuple.__new__(kind, elements)
    if issubclass(kind, (list, deque, dict)):
        value[key] = now
    else:
        object.__setattr__(value, key, now)
    return value


pytree.register_pytree_node(
    Joined,
    lambda joined: ([joined.tree], joined.same),
    lambda children, same: Joined(next(iter(children)), same),
    flatten_with_keys_fn=lambda joined: (
        [(pytree.SequenceKey(0), joined.tree)],
        joined.same,
    ),
)


# -- which objects are opened ----------------------------------------------------------------------


def _opened(leaf: Any, result: bool, above: frozenset[int]) -> Any:
    """`leaf`, or an `Opened` of it; `above`: ids of the objects that it is inside of."""
    kind: Any = type(leaf)
    if kind is FunctionType:
        return leaf if result or id(leaf) in above else _opened_function(leaf, above)
    if kind in _CLOSED or not _is_transparent(kind) or id(leaf) in above:
        return leaf
    above = above | {id(leaf)}
    keys, items = _items(leaf)
    attributes = attributes_of(leaf)
    children = {name: _opened_inside(v, result, above) for name, v in attributes.items()}
    beside = {
        name: value
        for name, value in children.items()
        if is_a(leaf, (dict, UserDict)) and name != "data" and not _counts(value)
    }
    names = tuple(name for name in children if name not in beside)
    inner = [_opened_inside(v, result, above) for v in items]
    inner += [children[name] for name in names]
    if not _is_data(kind, inner, result):
        return leaf
    kept = tuple((name, _Beside(attributes[name])) for name in beside)
    return Opened(_Shape(kind, keys, names, kept), inner)


def _opened_function(function: FunctionType, above: frozenset[int]) -> Any:
    found = opened_function(function)
    if found is None:
        return function
    emptied, (defaults, *contents) = found
    within = above | {id(function)}
    parts = [_opened_inside(each, False, within) for each in (defaults, *contents)]
    leaves = pytree.tree_leaves(tuple(parts), is_leaf=lambda part: is_a(part, (list, dict)))
    data = [leaf for leaf in leaves if type(leaf) is not FunctionType or enclosed(leaf)]
    if not all(is_a(leaf, (Tensor, *_ATOMS)) for leaf in data):
        return function  # what it encloses may change, or is state
    if contents and not above and not any(is_a(leaf, Tensor) for leaf in leaves):
        return function
    names = ("code", "defaults", *function.__code__.co_freevars)
    return Opened(_Shape(FunctionType, (), names, ()), [emptied, *parts])


def _opened_inside(value: Any, result: bool, above: frozenset[int]) -> Any:
    if _is_flat(value):
        return value
    leaves, spec = pytree.tree_flatten(value, is_leaf=_is_size)
    return of_leaves([_opened(leaf, result, above) for leaf in leaves], spec)


def _is_flat(value: Any) -> bool:
    """Whether a value contains no object to open: decided for the usual values without a walk by pytree."""
    kind = type(value)
    if kind is dict:
        return all(type(v) in _CLOSED for v in value.values())
    if kind is list or kind is tuple:
        return all(type(v) in _CLOSED for v in value)
    return kind in _CLOSED


def _is_data(kind: type, children: list[Any], result: bool) -> bool:
    """Whether an object with these children is opened."""
    known = _is_known(kind)
    if known and not result and all(map(_is_flat, children)):
        return True
    leaves = pytree.tree_leaves(children)
    if any(is_a(leaf, _STATEFUL) for leaf in leaves):
        return False
    if known and not result:
        return True
    if not any(is_a(leaf, (Tensor, *_SYMBOLIC)) for leaf in leaves):
        return False
    if known or kind.__module__.partition(".")[0] == "torch":
        return known
    return result or all(is_a(leaf, (Tensor, *_ATOMS)) for leaf in leaves)


@lru_cache(maxsize=4096)
def _is_known(kind: Any) -> bool:
    is_mask = (kind.__module__, kind.__name__) == ("torch.nn.attention.flex_attention", "BlockMask")
    return is_mask or dataclasses.is_dataclass(kind) or issubclass(kind, (Mapping, SimpleNamespace))


def _counts(value: Any) -> bool:
    """Whether an attribute of a mapping is compared by value, as a child, and not by its type only."""
    if _is_flat(value):
        return True
    leaves = pytree.tree_leaves(value)
    if any(is_a(leaf, Tensor) for leaf in leaves):
        return True
    return all(is_a(leaf, _ATOMS) for leaf in leaves)


@lru_cache(maxsize=4096)
def _is_transparent(kind: Any) -> bool:
    """Whether objects of this class consist of their attributes and items, and can be rebuilt from them."""
    closed = (type, Tensor, enum.Enum, KeptObject, *_SYMBOLIC, *_STATEFUL)
    if issubclass(kind, closed) or hasattr(kind, "__del__"):
        return False
    if kind in _BASES and kind is not SimpleNamespace:
        return False
    try:
        _blank(kind)
    except TypeError:
        return False
    return True


def _base(kind: type) -> Any:
    return next(base for base in _BASES if issubclass(kind, base))


def _blank(kind: type) -> Any:
    """An object without attributes; raises `TypeError` for a class that has a part written in C."""
    base = _base(kind)
    return base.__new__(kind)


# -- what is inside --------------------------------------------------------------------------------


def _items(value: Any) -> tuple[tuple[Any, ...], list[Any]]:
    if not is_a(value, dict):
        return (), []
    return tuple(dict.keys(value)), list(dict.values(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """What is in the `__dict__` of an object and in its slots, by name."""
    found = dict(table_of(value) or {})
    kind: Any = type(value)
    for name in _slots(kind):
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:  # an empty one
            continue
    return found


@lru_cache(maxsize=4096)
def _slots(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{each.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__"):
                names.append(name)
    return tuple(names)


def is_stateful(value: Any) -> bool:
    """Whether a value is a tensor, a module, an optimizer or a scheduler: in all places the same object."""
    return is_a(value, (Tensor, *_STATEFUL))


def objects_inside(leaf: Any, depth: int = 4) -> Iterator[Any]:
    """The objects that an object refers to: items, attributes, closure cells; not those of modules or globals."""
    if is_a(leaf, (*_STATEFUL, KeptObject, type, *_ATOMS)) or depth == 0:
        return
    held = enclosed(leaf)
    if is_a(leaf, dict):
        held = list(values_of(leaf))
    elif is_a(leaf, (list, tuple, set, frozenset)):
        held = list(elements_of(leaf))
    elif is_a(leaf, MappingProxyType):
        held = list(leaf.values())
    for each in (*held, *attributes_of(leaf).values()):
        yield each
        if not is_a(each, Tensor):
            yield from objects_inside(each, depth - 1)


# -- paths -----------------------------------------------------------------------------------------


def _paths(spec: pytree.TreeSpec, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if spec.is_leaf():
        yield above
        return
    children = spec.children()
    if spec.type is Joined:
        yield from _paths(children[0], above)
        return
    for key, child in zip(_keys_of(spec, len(children)), children, strict=True):
        yield from _paths(child, (*above, key))


def _keys_of(spec: pytree.TreeSpec, count: int) -> list[Any]:
    """pytree's keys of the children of one node; their positions if its type has no keys."""
    if spec.type is Opened:
        return _keys(spec.context)
    if spec.type is namedtuple:
        return [pytree.GetAttrKey(name) for name in spec.context._fields]
    node = pytree.SUPPORTED_NODES[spec.type]
    if node.flatten_with_keys_fn is None:
        return [pytree.SequenceKey(i) for i in range(count)]
    pairs, _ = node.flatten_with_keys_fn(_node(list(range(count)), spec))
    return [key for key, _ in pairs]
