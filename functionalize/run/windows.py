"""Views whose geometry follows from that of the inputs: the boxed runner makes each by one call of C++.

    a = view(x, [2, 16, 4, 16])
    b = transpose(a, 1, 2)              ->      b = window(x, (2, 4, 16, 16), (1024, 16, 64, 1), 0)

A chain of views is one window on the tensor that it begins with; a view that only windows read is not made.

Invariant: a window has the size, the strides and the offset of the view at every call for which the guards hold.
Known is the geometry of an input that a `TensorGuard` compares, of a view of a known tensor, of a gathered or scattered
tensor, and of the result of an op whose kernels take their geometry from the code that also serves tensors without data
(torch's structured kernels). The first call of the code compares the tensors with what is known of them.
Refusals: results of the program; sizes that are computed; all other ops; other devices than CPU and CUDA.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functionalize._compat.dispatch import disable_current_modes, reaches_kernels
from functionalize._compat.fast_guards import window_in_python, window_within
from functionalize.errors import InvariantError
from functionalize.ir.guards import TensorGuard
from functionalize.ir.waits import WAIT
from functionalize.program.program import Program

aten = torch.ops.aten


class ViewForm(NamedTuple):
    """The geometry of a tensor. offset: from the first element of the tensor `of`, which it is a view of, or itself."""

    of: fx.Node
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def is_row_major(self) -> bool:
        """Whether the last dimension is the fastest, without gaps; also by the strides of dimensions of size 1."""
        return self.stride == _row_major(self.size)


class Foretold(NamedTuple):
    """What is foretold of the tensor of a window. name: in the graph."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(form: ViewForm) -> Foretold:
        """form: of the tensor itself."""
        return Foretold(form.of.name, form.size, form.stride)


class Windows(NamedTuple):
    """made: the views that are windows. skipped: views that only windows read. forms: all that is known."""

    made: Mapping[fx.Node, ViewForm]
    skipped: frozenset[fx.Node]
    forms: Mapping[fx.Node, ViewForm]

    def read(self, node: fx.Node) -> Sequence[fx.Node]:
        """The values that the code of a node reads."""
        if node in self.skipped:
            return ()
        return [self.made[node].of] if node in self.made else node.all_input_nodes


NO_WINDOWS = Windows({}, frozenset(), {})


KnownResults = dict[Any, list[Tensor] | None]  # of ops on tensors without data


def windows(program: Program, known: KnownResults | None = None) -> Windows:
    """The views of a program that the runner makes as windows. Linear in nodes and edges.

    known: results that programs like this one share.
    """
    found = _ViewForms(program, {} if known is None else known)
    made: dict[fx.Node, ViewForm] = {}
    for node in program.graph.nodes:
        form = found.add(node) if node.op == "call_function" else None
        if form is not None and form.of is not node:
            made[node] = form
    lists = {node.args[0]: None for node in made if node.target is operator.getitem}
    views: list[Any] = [*made, *lists]
    skipped = (node for node in views if node.users and all(user in made for user in node.users))
    return Windows(made, frozenset(skipped), found.forms)


def with_windows(
    code: Callable[..., Sequence[Any]], bases: Callable[[], Sequence[Foretold]]
) -> Callable[..., Sequence[Any]]:
    """The code with a function that makes windows: if a mode, say, sees the ops, one that it sees as well.

    bases: returns what is foretold of the tensor of each window, in the order of the code; the first call compares.
    """
    is_compared = False

    def run(inputs: list[Any], *commit: Any) -> Sequence[Any]:
        nonlocal is_compared
        window = window_within if reaches_kernels(inputs) else window_in_python
        results = code(inputs, *commit, window if is_compared else _comparing(window, bases()))
        is_compared = True
        return results

    return run


def _comparing(window: Callable[..., Tensor], bases: Sequence[Foretold]) -> Callable[..., Tensor]:
    """The function that makes windows; it raises `InvariantError` if a tensor is not as foretold."""
    foretold = iter(bases)

    def compared(base: Tensor, *place: Any) -> Tensor:
        form, now = next(foretold), (tuple(base.shape), base.stride())
        if now != (form.size, form.stride):
            was = f"size {form.size} and strides {form.stride}"
            raise InvariantError(
                f"`{form.name}` has size {now[0]} and strides {now[1]}, foretold were {was}"
            )
        return window(base, *place)

    return compared


class _ViewForms:
    """The geometry of the values of a program, by running ops on tensors without data; equal ones once."""

    def __init__(self, program: Program, known: KnownResults) -> None:
        self.forms: dict[fx.Node, ViewForm] = {}
        self._sizes: dict[fx.Node, tuple[int, ...]] = {}  # of views of unknown tensors
        self._known = known
        (self._output,) = program.graph.find_nodes(op="output")
        if not all(spec.device.type in ("cpu", "cuda") for spec in program.inputs):
            return
        placeholders = program.graph.find_nodes(op="placeholder")
        for guard in program.guards:
            if isinstance(guard, TensorGuard):
                node, geometry = placeholders[guard.input], guard.spec.geometry
                size, stride = tuple(geometry.size), tuple(geometry.stride)
                self.forms[node] = ViewForm(node, size, stride, 0, geometry.dtype)

    def add(self, node: fx.Node) -> ViewForm | None:
        """The form of the value of a node; None: unknown."""
        form = self._form(node)
        if form is not None:
            if self._output in node.users:  # the tensor is the caller's
                form = form._replace(of=node, offset=0)
            self.forms[node] = form
        elif node.target is aten.view.default:
            size: Any = node.args[1]
            if all(type(each) is int and each >= 0 for each in size):
                self._sizes[node] = tuple(size)
        elif node.target is aten.t.default and node.args[0] in self._sizes:
            self._sizes[node] = self._sizes[node.args[0]][::-1]  # type: ignore[index]
        return form

    def _form(self, node: fx.Node) -> ViewForm | None:
        target, first = node.target, node.args[0] if node.args else None
        if target is operator.getitem and isinstance(first, fx.Node):
            return self._part(node, first)
        if target in _IN_PLACE or (target is WAIT and WAIT is not None):
            form = self.forms.get(first)  # type: ignore[arg-type]
            return form._replace(of=node, offset=0) if form is not None else None
        if target is aten.mm.default:
            return self._product(node)
        if target in _COLLECTIVES:
            return self._shard(node)
        if target not in _VIEWS and target not in _COMPUTED:
            return None
        if target in _ELEMENTWISE and (form := self._elementwise(node)) is not None:
            return form
        if (made := self._run(node)) is None:
            return None
        return self._view(first, made[0]) if target in _VIEWS else self._new(node, node, made[0])

    def _elementwise(self, node: fx.Node) -> ViewForm | None:
        """The result of an op on floats that lie row by row, all of one size: it lies so, too. None: others run."""
        forms = [self.forms.get(each) for each in node.all_input_nodes]
        first = forms[0] if forms else None
        if first is None or not first.is_row_major or not first.dtype.is_floating_point:
            return None
        if any(f is None or (f.size, f.stride, f.dtype) != first[1:3] + first[4:] for f in forms):
            return None
        if not all(isinstance(each, (fx.Node, int, float, str)) for each in node.args):
            return None
        return ViewForm(node, first.size, first.stride, 0, first.dtype)

    def _part(self, node: fx.Node, whole: fx.Node) -> ViewForm | None:
        """An element of a list of views, or of copies of them."""
        is_view = whole.target in _LISTS
        if not is_view and whole.target is not aten.split_with_sizes_copy.default:
            return None
        if (made := self._run(whole)) is None:
            return None
        part = made[node.args[1]]  # type: ignore[index]
        return self._view(whole.args[0], part) if is_view else self._new(node, whole, part)

    def _new(self, node: fx.Node, op: fx.Node, made: Tensor) -> ViewForm | None:
        size = tuple(made.shape)
        if 1 in size and not all(self.forms[n].is_row_major for n in op.all_input_nodes):
            return None  # the strides of such dimensions depend on the path that a kernel takes
        return ViewForm(node, size, made.stride(), 0, made.dtype)

    def _shard(self, node: fx.Node) -> ViewForm | None:
        """The result of a collective on shards: a new tensor, row by row."""
        form = self.forms.get(node.args[0])  # type: ignore[arg-type]
        ranks: Any = node.args[-2]
        if form is None or not form.size or type(ranks) is not int:
            return None
        rows = form.size[0] * ranks if node.target in _GATHERS else form.size[0] // ranks
        size = (rows, *form.size[1:])
        return ViewForm(node, size, _row_major(size), 0, form.dtype)

    def _view(self, base: Any, made: Tensor) -> ViewForm:
        form = self.forms[base]
        offset = form.offset + int(made.storage_offset())
        return ViewForm(form.of, tuple(made.shape), made.stride(), offset, made.dtype)

    def _product(self, node: fx.Node) -> ViewForm | None:
        """The result of `mm` lies row by row, whatever its arguments: their sizes are enough."""
        first, second = node.args[:2]
        sizes = [self._size(each) for each in (first, second)]
        known = [self.forms[each] for each in (first, second) if each in self.forms]  # type: ignore[index]
        if sizes[0] is None or sizes[1] is None or not known:
            return None
        rows, columns = sizes[0][0], sizes[1][1]
        return ViewForm(node, (rows, columns), (max(columns, 1), 1), 0, known[0].dtype)

    def _size(self, node: Any) -> tuple[int, ...] | None:
        return self.forms[node].size if node in self.forms else self._sizes.get(node)

    def _run(self, node: fx.Node) -> list[Tensor] | None:
        """The results of an op on tensors without data; None: an argument is unknown."""
        read = node.all_input_nodes  # a property that makes a list
        if not read or not all(n in self.forms for n in read):
            return None
        forms = [self.forms[n] for n in read]
        others = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{read.index(n)}")
        key = node.target, repr(others), *(form[1:3] + form[4:] for form in forms)
        if key not in self._known:
            self._known[key] = self._results(node)
        return self._known[key]

    def _results(self, node: fx.Node) -> list[Tensor] | None:
        def like(each: fx.Node) -> Tensor:
            form = self.forms[each]
            return torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="meta")

        target: Any = node.target
        with disable_current_modes(), torch.no_grad():
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), like)
            try:
                made = target(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError):  # the op itself shall raise
                return None
        return [made] if isinstance(made, Tensor) else list(made)


def _row_major(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose last dimension is the fastest."""
    steps = itertools.accumulate((max(each, 1) for each in size[:0:-1]), operator.mul, initial=1)
    return tuple(steps)[::-1] if size else ()


def _ops(names: str, namespace: Any = aten) -> frozenset[Any]:
    pairs = (name.split(".") for name in names.split())
    return frozenset(getattr(getattr(namespace, name), overload) for name, overload in pairs)


_VIEWS = _ops("""
    _unsafe_view.default expand.default permute.default select.int slice.Tensor squeeze.dim t.default transpose.int
    unsqueeze.default view.default
""")
_LISTS = _ops("split.Tensor split_with_sizes.default unbind.int")
_COMPUTED = _ops("""
    _chunk_cat.default _log_softmax.default _softmax.default add.Scalar add.Tensor addmm.default bmm.default cat.default
    clone.default cos.default div.Scalar div.Tensor embedding.default exp.default gelu.default gelu_backward.default
    mean.dim mul.Scalar mul.Tensor neg.default pow.Tensor_Scalar rsqrt.default sigmoid.default silu.default
    silu_backward.default sin.default sqrt.default sub.Tensor sum.dim_IntList tanh.default
""")
_ELEMENTWISE = _ops("""
    add.Scalar add.Tensor cos.default div.Scalar div.Tensor exp.default gelu.default gelu_backward.default mul.Scalar
    mul.Tensor neg.default pow.Tensor_Scalar rsqrt.default sigmoid.default silu.default silu_backward.default
    sin.default sqrt.default sub.Tensor tanh.default
""")
_IN_PLACE = _ops("""
    add_.Scalar add_.Tensor div_.Scalar div_.Tensor mul_.Scalar mul_.Tensor neg_.default pow_.Scalar rsqrt_.default
    sub_.Tensor
""")
_FUNCTIONAL = torch.ops._c10d_functional
_GATHERS = _ops("all_gather_into_tensor.default", _FUNCTIONAL) if WAIT is not None else frozenset()
_COLLECTIVES = _GATHERS | (
    _ops("reduce_scatter_tensor.default", _FUNCTIONAL) if WAIT is not None else frozenset()
)
