"""Run one program in several ways and compare what a caller can see, bit for bit.

    expected = run_eager(program)
    assert_bitwise_equal(run_trace(program), expected, grads=False)
    assert_bitwise_equal(run_aot_function(program), expected)
    assert_bitwise_equal(run_compile(program, "functionalize"), expected)

An `Outcome` holds outputs, inputs after the forward pass (geometry, visible contents, storage size
and the bytes beside them), which of those share a storage, and gradients. Bits are compared, so NaN
equals the same NaN and -0.0 differs from 0.0.

Refuses to read what a storage no longer holds: contents that reach past its end are `None`.
Bytes that a resize left undefined are compared only where an argument sees them, or where they lie
within the storage's size on entry; programs are written so that those are defined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from examples.resize_program import Args, Fn, ResizeProgram


class Mismatch(AssertionError):
    """Two outcomes differ; the message says in what."""


@dataclass(frozen=True)
class TensorRecord:
    """What can be seen of one tensor. `data` is its contents, None if its storage is too small.

    `where` is e.g. `input 0` or `output 1._local_tensor`; `group` numbers storages in order of
    first appearance, so equal groups mean one storage; `kept` is the storage's bytes, whatever
    tensor sees them, up to its size on entry (inputs only).
    """

    where: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    nbytes: int
    group: int
    data: Tensor | None
    kept: Tensor | None


@dataclass(frozen=True)
class Outcome:
    """The results and effects of one run. A leaf of the outputs that is not a tensor is kept unchanged."""

    outputs: tuple[TensorRecord | object, ...]
    inputs: tuple[TensorRecord, ...]
    grads: tuple[TensorRecord | None, ...]


class _Recorder:
    """Turns tensors into records; keeps the storages alive so that an address means one storage."""

    def __init__(self) -> None:
        self._groups: dict[int, int] = {}
        self._alive: list[UntypedStorage] = []

    def record(
        self, t: Tensor, where: str, entry: dict[int, int] | None = None
    ) -> list[TensorRecord]:
        """The record of `t`, or of its inner tensors; `entry` maps storages to entry sizes."""
        if is_traceable_wrapper_subclass(t):
            parts = _inner_tensors(t).items()
            return [r for n, part in parts for r in self.record(part, f"{where}.{n}", entry)]
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self._groups:
            self._groups[key] = len(self._groups)
            self._alive.append(storage)
        nbytes = storage.nbytes()
        kept = None
        if entry is not None:
            kept = _storage_bytes(storage, min(nbytes, entry.get(key, 0)))
        return [
            TensorRecord(
                where=where,
                dtype=t.dtype,
                shape=tuple(t.shape),
                stride=_significant_stride(t),
                offset=int(t.storage_offset()),
                requires_grad=t.requires_grad,
                nbytes=nbytes,
                group=self._groups[key],
                data=_contents(t) if _end_byte(t) <= nbytes else None,
                kept=kept,
            )
        ]


def _inner_tensors(t: Tensor) -> dict[str, Tensor]:
    """The tensors that a wrapper subclass (DTensor) is made of, by attribute name."""
    names, _ = t.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {str(n): getattr(t, n) for n in names}
    return {n: part for n, part in inner.items() if isinstance(part, Tensor)}


def _end_byte(t: Tensor) -> int:
    if t.numel() == 0:
        return 0
    last = int(t.storage_offset()) + sum(
        (n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)
    )
    return (last + 1) * t.element_size()


def _significant_stride(t: Tensor) -> tuple[int, ...]:
    """Strides of dimensions with several elements; 0 for the others, where any stride will do."""
    if t.numel() == 0:
        return (0,) * t.dim()
    return tuple(s if n > 1 else 0 for n, s in zip(t.shape, t.stride(), strict=True))


def _contents(t: Tensor) -> Tensor:
    return t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _storage_bytes(storage: UntypedStorage, count: int) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8).set_(storage)
    return view[:count].clone()


def snapshot_args(args: Sequence[Tensor]) -> tuple[TensorRecord, ...]:
    """What can be seen of `args` now, all bytes of their storages included."""
    return _snapshot(_Recorder(), args, {k: s.nbytes() for k, s in _storages(args).items()})


def _snapshot(
    recorder: _Recorder, args: Sequence[Tensor], entry: dict[int, int]
) -> tuple[TensorRecord, ...]:
    return tuple(r for i, a in enumerate(args) for r in recorder.record(a, f"input {i}", entry))


def _storages(args: Sequence[Tensor]) -> dict[int, UntypedStorage]:
    found: dict[int, UntypedStorage] = {}
    for a in args:
        if is_traceable_wrapper_subclass(a):
            found |= _storages(list(_inner_tensors(a).values()))
        else:
            storage = a.untyped_storage()
            found[storage._cdata] = storage
    return found


def execute(
    program: ResizeProgram, fns: Sequence[Fn], args: Args | None = None, *, backward: bool = True
) -> Outcome:
    """Run `fns` in a row on `args` (fresh ones by default), then refill and run backward.

    Outputs and inputs are recorded before the refill. Gradients are those of every argument that
    requires one, for the fixed cotangents of `_cotangent`.
    """
    args = program.make_args() if args is None else args
    held = _storages(args)
    entry = {k: s.nbytes() for k, s in held.items()}
    returned = [fn(*args) for fn in fns]
    leaves = pytree.tree_leaves(returned)
    recorder = _Recorder()
    inputs = _snapshot(recorder, args, entry)
    outputs: list[TensorRecord | object] = []
    for i, leaf in enumerate(leaves):
        is_tensor = isinstance(leaf, Tensor)
        outputs.extend(recorder.record(leaf, f"output {i}") if is_tensor else [leaf])
    grads: list[TensorRecord | None] = []
    if program.grad and backward:
        if program.refill is not None:
            program.refill(args)
        roots = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        torch.autograd.backward(roots, [_cotangent(t, i) for i, t in enumerate(roots)])
        for i, a in enumerate(args):
            got = _Recorder().record(a.grad, f"grad of input {i}") if a.grad is not None else [None]
            grads.extend(got)
    return Outcome(tuple(outputs), inputs, tuple(grads))


def _cotangent(t: Tensor, seed: int) -> Tensor:
    if is_traceable_wrapper_subclass(t):
        return torch.ones_like(t)
    ramp = torch.linspace(0.5, 1.5 + seed, max(t.numel(), 1))[: t.numel()]
    return ramp.reshape(t.shape).to(t.dtype)


def run_eager(program: ResizeProgram) -> Outcome:
    """The truth: the program's own functions."""
    return execute(program, program.fns)


def run_trace(program: ResizeProgram, trace: Callable[..., Any] | None = None) -> Outcome:
    """Trace on one set of arguments, check that it was left alone, replay on fresh ones.

    There is no backward pass: a trace is of the forward alone. With several functions, each is
    traced on arguments in the state that those before it leave.
    """
    if trace is None:
        import functionalize as fz

        trace = fz.functions.trace
    replays: list[Fn] = []
    for i, fn in enumerate(program.fns):
        args = program.make_args()
        for before in program.fns[:i]:
            before(*args)
        snapshot = snapshot_args(args)
        replays.append(trace(fn, *args))
        assert_inputs_equal(snapshot_args(args), snapshot, note="touched by trace: ")
    return execute(program, replays, backward=False)


def run_aot_function(
    program: ResizeProgram, aot: Callable[..., Any] | None = None, **options: Any
) -> Outcome:
    """Through `aot` (`fz.functions.aot_function` by default) with compilers that run the graph as it is."""
    from functorch.compile import nop  # type: ignore[import-untyped]

    if aot is None:
        import functionalize as fz

        aot = fz.functions.aot_function
    compiled = [aot(fn, fw_compiler=nop, bw_compiler=nop, **options) for fn in program.fns]
    return execute(program, compiled)


def run_compile(program: ResizeProgram, backend: str | Fn, *, fullgraph: bool = True) -> Outcome:
    """Through `torch.compile`, one compiled function per function of the program.

    fullgraph=True raises where Dynamo would break the graph and run a part in eager.
    """
    if backend in ("functionalize", "functionalize_inductor"):
        import functionalize  # noqa: F401 (registers the backends)
    torch.compiler.reset()
    compiled = [torch.compile(fn, backend=backend, fullgraph=fullgraph) for fn in program.fns]
    return execute(program, compiled)


def assert_bitwise_equal(
    actual: Outcome, expected: Outcome, *, grads: bool = True, aliasing: bool = True
) -> None:
    """Raise `Mismatch` unless `actual` is `expected` in all that a caller sees.

    Offset and storage size are compared for inputs and for outputs on an input's storage: a fresh
    output may lie anywhere. grads=False ignores gradients and `requires_grad`; aliasing=False
    ignores which tensors share a storage.
    """
    _same_count("outputs", actual.outputs, expected.outputs)
    assert_inputs_equal(actual.inputs, expected.inputs, grads=grads, aliasing=aliasing)
    shared = {r.group for r in expected.inputs} if aliasing else set()
    for i, (a, e) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        if isinstance(a, TensorRecord) and isinstance(e, TensorRecord):
            _assert_record(a, e, grads=grads, aliasing=aliasing, storage=e.group in shared)
        elif isinstance(a, TensorRecord) or isinstance(e, TensorRecord) or a != e:
            raise Mismatch(f"output {i}: {_brief(a)}, expected {_brief(e)}")
    if not grads:
        return
    _same_count("gradients", actual.grads, expected.grads)
    for i, (ga, ge) in enumerate(zip(actual.grads, expected.grads, strict=True)):
        if ga is not None and ge is not None:
            _assert_record(ga, ge, grads=False, aliasing=False, storage=False)
        elif ga is not ge:
            raise Mismatch(f"grad of input {i}: {_brief(ga)}, expected {_brief(ge)}")


def assert_inputs_equal(
    actual: Sequence[TensorRecord],
    expected: Sequence[TensorRecord],
    *,
    grads: bool = True,
    aliasing: bool = True,
    note: str = "",
) -> None:
    """The same for inputs alone; `note` comes before the message."""
    _same_count("inputs", actual, expected)
    if aliasing:
        for a, e in zip(actual, expected, strict=True):
            _assert_group(a, e, note)
    for a, e in zip(actual, expected, strict=True):
        _assert_record(a, e, grads=grads, aliasing=aliasing, storage=True, note=note)


def _same_count(what: str, actual: Sequence[object], expected: Sequence[object]) -> None:
    if len(actual) != len(expected):
        raise Mismatch(f"{len(actual)} {what}, expected {len(expected)}")


def _brief(leaf: object) -> str:
    if isinstance(leaf, TensorRecord):
        return f"a {leaf.dtype} tensor of shape {leaf.shape}"
    return repr(leaf)


def _assert_record(
    a: TensorRecord, e: TensorRecord, *, grads: bool, aliasing: bool, storage: bool, note: str = ""
) -> None:
    where = f"{note}{e.where}"
    fields = ["dtype", "shape", "stride"]
    fields += ["requires_grad"] if grads else []
    fields += ["offset", "nbytes"] if storage else []
    for name in fields:
        got, want = getattr(a, name), getattr(e, name)
        if got != want:
            raise Mismatch(f"{where}: {name} {got}, expected {want}")
    if aliasing:
        _assert_group(a, e, note)
    _assert_bits(a.data, e.data, where)
    if storage:
        _assert_bits(a.kept, e.kept, f"{where}, bytes of its storage")


def _assert_group(a: TensorRecord, e: TensorRecord, note: str) -> None:
    if a.group != e.group:
        raise Mismatch(f"{note}{e.where}: on storage #{a.group}, expected #{e.group}")


def _assert_bits(actual: Tensor | None, expected: Tensor | None, where: str) -> None:
    if actual is None or expected is None:
        if actual is not expected:
            state = ("readable", "freed")
            raise Mismatch(f"{where}: {state[actual is None]}, expected {state[expected is None]}")
        return
    bits = [
        t.reshape(-1).view(torch.uint8).view(t.numel(), -1) for t in (actual, expected) if t.numel()
    ]
    if not bits or torch.equal(bits[0], bits[1]):
        return
    wrong = (bits[0] != bits[1]).any(1).nonzero().reshape(-1).tolist()
    got, want = actual.reshape(-1)[wrong[0]].item(), expected.reshape(-1)[wrong[0]].item()
    raise Mismatch(
        f"{where}: {len(wrong)} of {actual.numel()} elements differ, "
        f"first at {wrong[0]}: {got}, expected {want}"
    )
