"""Random programs over a few aliased inputs, and a small model of which bytes hold something.

    example = draw(examples())      inputs (windows on storages), lines of Python, what is returned
    example.run(*args)              runs the lines
    example.error                   why eager must not run it, None if it may

The model knows storages as sets of valid bytes and tensors as sets of byte positions, nothing else.
It shares no code with the library: geometry comes from torch, by running each line on shadows (tensors
of the same geometry on storages that are large enough for anything).

Invariant: with `error` None, no line reads a byte that was freed or never written, nor writes one past the
end of a storage, and no line writes what it also reads elsewhere: eager's result is defined.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

SHADOW_BYTES = 1024
DTYPES = (torch.float32, torch.int32, torch.uint8, torch.int16, torch.float64, torch.complex64)
HELPERS = {"torch": torch, "R": torch.ops.inductor.resize_storage_bytes_, "aten": torch.ops.aten}


@dataclass(frozen=True)
class Window:
    """An input: how it looks at its storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Example:
    """One program. storages: (bytes, emptied before the call). error: what must be refused, and how."""

    storages: tuple[tuple[int, bool], ...]
    inputs: tuple[Window, ...]
    lines: tuple[str, ...]
    returned: str
    error: str | None
    final: tuple[int, ...] = ()  # per input storage: which bytes are valid at exit, as a bit mask

    @property
    def source(self) -> str:
        """The function as Python."""
        names = ", ".join(f"r{i}" for i in range(len(self.inputs)))
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program({names}):\n{body}    return {self.returned}\n"

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The function."""
        namespace: dict[str, Any] = dict(HELPERS)
        exec(compile(self.source, "<example>", "exec"), namespace)
        found: Callable[..., Any] = namespace["program"]
        return found

    def make_args(self, seed: int = 0) -> list[Tensor]:
        """Fresh inputs: small whole numbers in the dtype of each storage's first window.

        Of integers that are read as floats, none is negative: such floats are NaNs, and which one of two NaNs a sum is
        depends on the kernel, which depends on strides.
        """
        generator = torch.Generator().manual_seed(seed)
        storages = []
        for i, (nbytes, _) in enumerate(self.storages):
            dtype = next((w.dtype for w in self.inputs if w.storage == i), torch.uint8)
            count = -(-nbytes // dtype.itemsize)
            kinds = {w.dtype for w in self.inputs if w.storage == i}
            is_integer = not (dtype.is_floating_point or dtype.is_complex)
            are_floats = any(kind.is_floating_point or kind.is_complex for kind in kinds)
            low = 0 if dtype is torch.uint8 or (is_integer and are_floats) else -9
            drawn = torch.randint(low, 9, (count,), generator=generator)
            storage = torch.UntypedStorage(nbytes)
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            flat.copy_(drawn.to(dtype).view(torch.uint8)[:nbytes])
            storages.append(storage)
        made = [
            torch.empty(0, dtype=w.dtype).set_(storages[w.storage], w.offset, w.size, w.stride)
            for w in self.inputs
        ]
        for storage, (_, emptied) in zip(storages, self.storages, strict=True):
            if emptied:
                storage.resize_(0)
        return made

    def storages_of(self, args: list[Tensor]) -> list[torch.UntypedStorage]:
        """The storages under fresh inputs, in order."""
        under = {w.storage: t.untyped_storage() for w, t in zip(self.inputs, args, strict=True)}
        return [under[i] for i in range(len(self.storages))]

    def __repr__(self) -> str:
        return (
            f"Example(\n    storages={self.storages},\n    inputs={self.inputs},\n"
            f"    error={self.error!r},\n)\n{self.source}"
        )


# -- the model -------------------------------------------------------------------------------------


def positions(t: Tensor) -> int:
    """The bytes of its storage that a tensor looks at, as a bit mask."""
    mask, one = 0, (1 << t.element_size()) - 1
    for index in itertools.product(*(range(n) for n in t.shape)):
        at = t.storage_offset() + sum(i * s for i, s in zip(index, t.stride(), strict=True))
        mask |= one << (at * t.element_size())
    return mask


def _zeros() -> torch.UntypedStorage:
    return torch.zeros(SHADOW_BYTES, dtype=torch.uint8).untyped_storage()


@dataclass(eq=False)
class Buffer:
    """A storage: its size, and the bytes that hold something."""

    nbytes: int
    valid: int
    number: int | None = None  # which input storage it is
    shadow: torch.UntypedStorage = field(default_factory=_zeros)

    def resize(self, nbytes: int) -> None:
        """The rule: a prefix survives, what is new is undefined."""
        self.nbytes = nbytes
        self.valid &= (1 << nbytes) - 1


@dataclass(eq=False)
class Register:
    """A tensor of the program: its shadow, and the storage it is on."""

    name: str
    buffer: Buffer
    shadow: Tensor

    @property
    def bytes(self) -> int:
        """Its byte positions."""
        return positions(self.shadow)

    @property
    def overlaps(self) -> bool:
        """Whether two of its elements share a byte."""
        return self.bytes.bit_count() != self.shadow.numel() * self.shadow.element_size()

    @property
    def inside(self) -> bool:
        """Whether it ends within its storage."""
        return not self.bytes >> self.buffer.nbytes

    @property
    def lazy(self) -> bool:
        """Whether it has a conjugate or negative bit: torch clones it before every op that is no view of it."""
        return self.shadow.is_conj() or self.shadow.is_neg()

    @property
    def defined(self) -> bool:
        """Whether all it looks at may be read."""
        return not self.bytes & ~self.buffer.valid


class Skip(Exception):
    """The line that was drawn is not added."""


# Views that torch makes of a tensor whose storage is too small for it.
ANYWHERE = (
    ".view(",
    ".detach(",
    ".reshape(",
    ".flatten(",
    "torch.view_as_real(",
    "torch.view_as_complex(",
    "torch.conj(",
)


class World:
    """The program so far."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.lines: list[str] = []
        self.registers: list[Register] = []
        self.buffers: list[Buffer] = []
        self.made = 0
        self.keep = False
        self.refused: str | None = None

    # -- drawing

    def below(self, n: int) -> int:
        """A number in [0, n)."""
        return int(self.draw(st.integers(0, n - 1)))

    def one_of(self, options: Any) -> Any:
        """One of several."""
        if not options:
            raise Skip
        return options[self.below(len(options))]

    def pick(self, want: Callable[[Tensor], bool] = lambda t: True) -> Register:
        """A register whose shadow is as wanted, recent ones being likelier."""
        found = [r for r in self.registers if want(r.shadow)]
        return self.one_of([*reversed(found), *found[-2:]])

    # -- what a line does

    def evaluate(self, text: str) -> Any:
        """A line's value on the shadows; a line that torch refuses is not added."""
        names = {r.name: r.shadow for r in self.registers}
        if "*" in text or "mul" in text:
            used = set(re.findall(r"\w+", text))
            if any(n in used and t.is_complex() for n, t in names.items()):
                raise Skip  # where a part is NaN, its product depends on how the loop is vectorised
        try:
            return eval(text, dict(HELPERS), names)
        except Exception:
            raise Skip from None

    def refuse(self, kind: str) -> None:
        """The line must fail. Most such lines are not added, or programs would be short."""
        if not self.keep:
            raise Skip
        if (self.refused, kind) == ("overlap", "storage"):  # a freed source is refused first
            self.refused = "overlap or storage"
        self.refused = self.refused or kind

    def new(self, buffer: Buffer, shadow: Tensor) -> Register:
        """A new register."""
        self.made += 1
        register = Register(f"t{self.made}", buffer, shadow)
        self.registers.append(register)
        return register

    def reads(self, *registers: Register) -> None:
        """All of these are read."""
        for r in registers:
            if not r.defined:
                self.refuse("storage")

    def writes(self, target: Register, *read: Register, alike: bool = True) -> None:
        """`target` is written; what is read must be elsewhere, or (if `alike`) the very same window."""
        for r in read:
            if r.buffer is target.buffer and r.bytes & target.bytes:
                same = (
                    r.shadow.shape == target.shadow.shape and r.shadow.dtype == target.shadow.dtype
                )
                same &= r.shadow.stride() == target.shadow.stride()
                same &= r.shadow.storage_offset() == target.shadow.storage_offset()
                if not (alike and same):
                    raise Skip
        if not target.inside:
            self.refuse("storage")
        if target.overlaps:
            self.refuse("overlap")

    def wrote(self, target: Register) -> None:
        """`target` holds something now."""
        target.buffer.valid |= target.bytes

    def view(self, source: Register, text: str) -> None:
        """`text` looks at `source`, or copies it where torch cannot do that."""
        shadow = self.evaluate(text)
        parts = list(shadow) if isinstance(shadow, (tuple, list)) else [shadow]
        if any(p is source.shadow for p in parts) or not parts:
            raise Skip
        if parts[0].untyped_storage().data_ptr() != source.shadow.untyped_storage().data_ptr():
            self.copy(text, source)
            return
        made = [Register("", source.buffer, p) for p in parts]
        anywhere = any(a in text for a in ANYWHERE) and ".real" not in text and ".imag" not in text
        if not anywhere and not all(m.inside for m in made):
            self.refuse("view")
        names = [self.new(source.buffer, p).name for p in parts]
        tail = "," if isinstance(shadow, (tuple, list)) else ""
        self.lines.append(f"{', '.join(names)}{tail} = {text}")

    def pure(self, text: str, *read: Register, undefined: bool = False) -> None:
        """`text` reads and makes a tensor of its own, which is undefined or as a whole defined."""
        if not undefined:
            self.reads(*read)
        value = self.evaluate(text)
        nbytes = value.untyped_storage().nbytes()
        if nbytes > SHADOW_BYTES // 8:
            raise Skip
        buffer = Buffer(nbytes, 0 if undefined else (1 << nbytes) - 1)
        shadow = torch.empty(0, dtype=value.dtype)
        shadow.set_(buffer.shadow, value.storage_offset(), value.shape, value.stride())
        self.lines.append(f"{self.new(buffer, shadow).name} = {text}")

    def copy(self, text: str, r: Register) -> None:
        """`text` clones `r`.

        Undefined bytes may be cloned if `r` has a conjugate or negative bit: torch does so by itself before every write
        to such a tensor. The clone is as undefined.
        """
        self.pure(text, r, undefined=r.lazy and r.inside and not r.defined)

    def do(self, text: str) -> None:
        """A line that is run for its effect; the model was told already."""
        self.evaluate(text)
        self.lines.append(text)

    def resize(self, r: Register, nbytes: int, text: str) -> None:
        """The storage of `r` gets another size."""
        r.buffer.resize(nbytes)
        self.lines.append(text)

    def resize_op(self, r: Register, nbytes: int) -> None:
        """The same by an op, which of a lazy `r` resizes the clone: eager reads past the end, and changes nothing."""
        if not r.lazy:
            self.resize(r, nbytes, f"R({r.name}, {nbytes})")
            return
        if not r.inside:
            self.refuse("storage")
        self.lines.append(f"R({r.name}, {nbytes})")


# -- lines: views ----------------------------------------------------------------------------------


def a_view(w: World) -> None:
    r = w.pick()
    t, n = r.shadow, r.name
    dim = w.below(max(t.dim(), 1))
    size = t.shape[dim] if t.dim() else 0
    kinds = ["view", "detach", "unsqueeze", "dtype", "as_strided", "reshape", "expand"]
    if t.dim():
        kinds += ["slice", "select", "narrow", "split", "chunk", "unbind", "squeeze", "unfold"]
        kinds += ["transpose", "movedim", "flatten", "permute"]
    if t.dim() > 1:
        kinds += ["diagonal", "t"]
    if t.is_complex():
        kinds += ["real", "conj", "imag", "as_real"]
    elif t.dim() and t.shape[-1] == 2 and t.dtype is torch.float32:
        kinds += ["as_complex"] * 3
    kind = w.one_of(kinds)
    if kind == "view":
        text = f"{n}.view({w.one_of([-1, (2, -1), (-1, 2), (1, -1), tuple(t.shape)])})"
    elif kind == "reshape":
        text = f"{n}.reshape({w.one_of([-1, (2, -1), (-1, 2)])})"
    elif kind == "dtype":
        text = f"{n}.view({w.one_of(DTYPES)})"
    elif kind == "slice":
        start, step = w.below(size + 1), 1 + w.below(2)
        if start == 0 and not r.inside:
            raise Skip  # a slice of everything is no op at all
        text = f"{n}[{':, ' * dim}{start}:{start + 1 + w.below(4)}:{step}]"
    elif kind == "select":
        text = f"{n}.select({dim}, {w.below(max(size, 1))})"
    elif kind == "narrow":
        start = w.below(size + 1)
        text = f"{n}.narrow({dim}, {start}, {w.below(size - start + 1)})"
    elif kind in ("split", "chunk"):
        text = f"{n}.{kind}({1 + w.below(3)}, {dim})"
    elif kind == "unbind":
        text = f"{n}.unbind({dim})"
    elif kind == "unfold":
        text = f"{n}.unfold({dim}, 2, {1 + w.below(2)})"
    elif kind in ("transpose", "movedim"):
        other = w.below(t.dim())
        if other == dim and not r.inside:
            raise Skip  # torch makes an alias, without looking at the storage
        text = f"{n}.{kind}({dim}, {other})"
    elif kind == "permute":
        order = w.one_of(list(itertools.permutations(range(t.dim())))[:6])
        text = f"{n}.permute({order})"
    elif kind == "expand":
        text = f"{n}.expand({w.one_of([(2, *t.shape), (-1,) * t.dim(), (3, *t.shape[1:])])})"
    elif kind == "as_strided":
        geometry = w.one_of(
            [((2,), (1,)), ((2, 2), (2, 1)), ((3,), (2,)), ((2, 2), (1, 2)), ((), ())]
        )
        text = f"{n}.as_strided({geometry[0]}, {geometry[1]}, {w.below(4)})"
    elif kind == "unsqueeze":
        text = f"{n}.unsqueeze({w.below(t.dim() + 1)})"
    elif kind in ("real", "imag"):
        text = f"{n}.{kind}"
    elif kind == "conj":
        text = f"torch.conj({n})"
    elif kind in ("as_real", "as_complex"):
        text = f"torch.view_{kind}({n})"
    else:
        text = f"{n}.{kind}()"
    if text.endswith(".t()") and t.dim() < 2:
        raise Skip
    w.view(r, text)


# -- lines: values ---------------------------------------------------------------------------------


def _number(w: World) -> int:
    return int(w.one_of([2, 3, 1, 0, 5]))


def _like(w: World, r: Register) -> Register:
    return w.pick(lambda t: t.shape == r.shadow.shape and t.dtype == r.shadow.dtype)


def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast has a defined result for every value."""
    if target.is_complex or source.is_complex:
        return source == target
    return target.is_floating_point or not source.is_floating_point


def a_value(w: World) -> None:
    r = w.pick()
    n = r.name
    kind = w.one_of(["add", "mul", "binary", "clone", "to", "cat", "sum", "neg", "where"])
    if kind == "add":
        w.pure(f"{n} + {_number(w)}", r)
    elif kind == "mul":
        w.pure(f"{n} * {_number(w)}", r)
    elif kind == "binary":
        other = _like(w, r)
        w.pure(f"{n} {w.one_of('+-*')} {other.name}", r, other)
    elif kind == "to":
        dtype = w.one_of(DTYPES)
        if dtype == r.shadow.dtype or not _converts(r.shadow.dtype, dtype):
            raise Skip
        w.pure(f"{n}.to({dtype})", r)
    elif kind == "cat":
        other = _like(w, r)
        w.pure(f"torch.cat([{n}, {other.name}])", r, other)
    elif kind == "where":
        other = _like(w, r)
        w.pure(f"torch.where({n} == {other.name}, {n}, {_number(w)})", r, other)
    elif kind == "clone":
        w.copy(f"{n}.clone()", r)
    else:
        w.pure(f"{n}.{kind}()", r)


# -- lines: writes ---------------------------------------------------------------------------------


def a_write(w: World) -> None:
    r = w.pick()
    n = r.name
    kind = w.one_of(
        ["copy_", "fill_", "zero_", "add_", "mul_", "binary_", "copy_", "masked", "index"]
    )
    if r.overlaps and not w.keep:
        raise Skip
    if kind == "copy_":
        source = w.pick(lambda t: _converts(t.dtype, r.shadow.dtype))
        w.writes(r, source)
        w.reads(source)
        w.do(f"{n}.copy_({source.name})")
    elif kind in ("fill_", "zero_"):
        w.writes(r)
        w.do(f"{n}.fill_({_number(w)})" if kind == "fill_" else f"{n}.zero_()")
    elif kind in ("add_", "mul_"):
        w.writes(r)
        w.reads(r)
        w.do(f"{n}.{kind}({_number(w)})")
    elif kind == "binary_":
        other = _like(w, r)
        w.writes(r, other)
        w.reads(r, other)
        w.do(f"{n}.{w.one_of(['add_', 'mul_', 'sub_'])}({other.name})")
    elif kind == "masked":
        w.writes(r)
        w.reads(r)
        w.do(f"{n}.masked_fill_({n} == {_number(w)}, {_number(w)})")
    else:
        if not r.shadow.dim():
            raise Skip
        w.writes(r)
        w.reads(r)
        w.do(
            f"{n}.index_fill_(0, torch.tensor([{w.below(max(r.shadow.shape[0], 1))}]), {_number(w)})"
        )
    w.wrote(r)


def an_out(w: World) -> None:
    r = w.pick()
    target = _like(w, r)
    kind = w.one_of(["mul", "add", "cat", "empty"])
    if kind == "empty":  # grown by the op; on fakes to contiguous strides, whatever eager chooses
        if not r.shadow.is_contiguous():
            raise Skip
        w.reads(r)
        text = f"torch.mul({r.name}, {_number(w)}, out=torch.empty(0, dtype={r.shadow.dtype}))"
        w.pure(text, r)
        return
    if kind == "mul":
        w.writes(target, r)
        w.reads(r)
        w.do(f"torch.mul({r.name}, {_number(w)}, out={target.name})")
    elif kind == "add":
        other = _like(w, r)
        w.writes(target, r, other)
        w.reads(r, other)
        w.do(f"torch.add({r.name}, {other.name}, out={target.name})")
    else:
        a, b = (w.pick(lambda t: t.dtype == target.shadow.dtype) for _ in range(2))
        value = w.evaluate(f"torch.cat([{a.name}, {b.name}])")
        if value.shape != target.shadow.shape:
            raise Skip
        w.writes(target, a, b, alike=False)
        w.reads(a, b)
        w.do(f"torch.cat([{a.name}, {b.name}], out={target.name})")
    w.wrote(target)


def a_foreach(w: World) -> None:
    a = w.pick()
    b = w.pick(lambda t: t.dtype == a.shadow.dtype)
    for one, other in ((a, b), (b, a)):
        w.writes(one, other, alike=False)
    kind = w.one_of(["add_", "mul_", "zero_", "copy_"])
    if kind == "copy_":
        c, d = _like(w, a), _like(w, b)
        for target in (a, b):
            w.writes(target, c, d, alike=False)
        w.reads(c, d)
        w.do(f"torch._foreach_copy_([{a.name}, {b.name}], [{c.name}, {d.name}])")
    elif kind == "zero_":
        w.do(f"torch._foreach_zero_([{a.name}, {b.name}])")
    else:
        w.reads(a, b)
        w.do(f"torch._foreach_{kind}([{a.name}, {b.name}], {_number(w)})")
    w.wrote(a)
    w.wrote(b)


# -- lines: sizes and places -----------------------------------------------------------------------


def a_resize(w: World) -> None:
    r = w.pick()
    b = r.buffer
    needed = r.bytes.bit_length()
    size = w.one_of([0, needed, 64, b.nbytes // 2, b.nbytes + 8, 16, 40, 7])
    how = w.one_of(["op", "untyped", "typed"])
    if how == "typed":
        count = size // r.shadow.element_size()
        size = count * r.shadow.element_size()
        w.resize(r, size, f"{r.name}._typed_storage()._resize_({count})")
    elif how == "untyped":
        w.resize(r, size, f"{r.name}.untyped_storage().resize_({size})")
    else:
        w.resize_op(r, size)


def a_refill(w: World) -> None:
    """What FSDP does: grow to what a tensor needs and write it."""
    r = w.pick()
    needed = max(r.bytes.bit_length(), r.buffer.nbytes)
    if needed != r.buffer.nbytes:
        w.resize_op(r, needed)
    source = w.pick(lambda t: t.dtype == r.shadow.dtype)
    w.writes(r, source)
    w.reads(source)
    w.do(f"{r.name}.copy_({source.name})")
    w.wrote(r)


def a_move(w: World) -> None:
    """Another window for an existing tensor: in-place views, `set_`, `.data =`, `resize_`."""
    r = w.pick()
    t, n = r.shadow, r.name
    kind = w.one_of(["set_", "data", "t_", "transpose_", "squeeze_", "unsqueeze_", "resize_"])
    if kind in ("set_", "data"):
        other = w.pick(lambda o: o.dtype == t.dtype and not o.is_conj() and not o.is_neg())
        if other is r or t.is_conj() or t.is_neg() or not other.inside:
            raise Skip
        w.lines.append(f"{n}.set_({other.name})" if kind == "set_" else f"{n}.data = {other.name}")
        t.set_(other.shadow)
        r.buffer = other.buffer
        return
    if kind == "resize_":
        if t.is_conj() or t.is_neg():
            raise Skip
        size = w.one_of([(2,), (3,), (2, 2), (0,), (4,)])
        end = (t.storage_offset() + torch.Size(size).numel()) * t.element_size()
        if end > SHADOW_BYTES // 2:
            raise Skip
        grows = tuple(t.shape) != size and torch.Size(size).numel() and end > r.buffer.nbytes
        w.do(f"{n}.resize_({size})")
        if grows:
            r.buffer.nbytes = end
        return
    if (kind == "t_" and t.dim() > 2) or (kind == "transpose_" and t.dim() < 2):
        raise Skip
    if not r.inside and not (kind == "t_" and t.dim() < 2):
        w.refuse("view")
    w.do(f"{n}.{kind}({', '.join('01'[: {'transpose_': 2, 'unsqueeze_': 1}.get(kind, 0)])})")


LINES: tuple[tuple[Callable[[World], None], int], ...] = (
    (a_view, 6),
    (a_write, 5),
    (a_resize, 3),
    (a_refill, 3),
    (a_value, 3),
    (an_out, 2),
    (a_foreach, 1),
    (a_move, 1),
)
_KINDS = tuple(kind for kind, weight in LINES for _ in range(weight))


# -- whole programs --------------------------------------------------------------------------------


def _window(draw: Callable[[Any], Any], storage: int, nbytes: int) -> Window:
    dtype = draw(st.sampled_from(DTYPES + DTYPES[:2] * 2))
    capacity = nbytes // dtype.itemsize
    offset = draw(st.integers(0, min(capacity, 3)))
    room = capacity - offset
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((room,), (1,))]
    if room >= 2:
        shapes += [((room // 2, 2), (2, 1)), ((2, room // 2), (1, 2)), (((room + 1) // 2,), (2,))]
        shapes += [((room // 2,), (1,)), ((2, room // 2), (room // 2, 1)), ((room,), (1,))]
    if room >= 1:
        shapes += [((1, room), (room, 1)), ((), ())]
        shapes += [((2, room), (0, 1))] * (draw(st.integers(0, 9)) == 9)
    shapes += [((0,), (1,))] * (draw(st.integers(0, 9)) == 9)
    size, stride = draw(st.sampled_from(shapes))
    return Window(storage, dtype, size, stride, offset)


@st.composite
def examples(draw: Callable[[Any], Any], max_lines: int = 12) -> Example:
    """A random program."""
    storages, windows = [], []
    for i in range(draw(st.integers(1, 3))):
        nbytes = draw(st.sampled_from([32, 64, 16, 48, 24, 30]))
        storages.append((nbytes, draw(st.integers(0, 2)) == 0))
        windows += [_window(draw, i, nbytes) for _ in range(draw(st.integers(1, 3)))]
    w = World(draw)
    for i, (nbytes, emptied) in enumerate(storages):
        w.buffers.append(Buffer(0 if emptied else nbytes, 0 if emptied else (1 << nbytes) - 1, i))
    for i, each in enumerate(windows):
        b = w.buffers[each.storage]
        shadow = torch.empty(0, dtype=each.dtype).set_(
            b.shadow, each.offset, each.size, each.stride
        )
        w.registers.append(Register(f"r{i}", b, shadow))
    inputs = list(w.registers)
    error = None
    for _ in range(draw(st.integers(1, 3 * max_lines))):
        error = _add_line(w)
        if error or len(w.lines) >= max_lines:
            break
    returned = "None"
    if error is None:
        returned, error = _returned(w, inputs)
    return Example(
        tuple(storages),
        tuple(windows),
        tuple(w.lines),
        returned,
        error,
        tuple(b.valid for b in w.buffers),
    )


def _add_line(w: World) -> str | None:
    """Add one line; the kind of error if it must be refused, which ends the program."""
    lines, registers, made = len(w.lines), len(w.registers), w.made
    before = [(b, b.nbytes, b.valid) for b in {r.buffer: None for r in w.registers}]
    w.keep = w.below(12) == 11
    try:
        w.one_of(_KINDS)(w)
        return w.refused
    except Skip:
        w.refused = None
        del w.lines[lines:], w.registers[registers:]
        w.made = made
        for b, nbytes, valid in before:
            b.nbytes, b.valid = nbytes, valid
        return None


def _returned(w: World, inputs: list[Register]) -> tuple[str, str | None]:
    """What is returned, and whether that must be refused: contents that are the caller's must be defined."""
    chosen = [w.pick() for _ in range(w.below(4))]
    chosen = [r for r in chosen if r.defined or r.buffer.number is not None or w.below(8) == 7]
    born = [r for r in [*chosen, *inputs] if r.buffer.number is None]
    names = [r.name for r in chosen] + w.one_of([[], [], [], ["None"], ["7"]])
    refused = None if all(r.defined for r in born) else "exit"
    return (f"({', '.join(names)},)" if names else "None"), refused
