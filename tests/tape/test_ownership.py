"""The line that made each autograd node is what anomaly mode says; an op that made no node has no number."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize._compat.autograd import SEES_FUNCTIONS, NodeNames
from functionalize._compat.distributed import fake_process_group
from functionalize.ir.ops import OpRecord
from functionalize.recorder.recorder import Recorder
from functionalize.tape.notes import TapeNotes
from functionalize.tape.ownership import ownership_of
from tests.tape.graphs import CASES, model, x
from tests.tape.oracle import compared, differing

aten = torch.ops.aten


@pytest.mark.parametrize("step", CASES, ids=lambda step: step.__name__)
def test_every_backward_op_has_the_line_of_anomaly_mode(step: Callable[[], None]) -> None:
    rows = compared(step)
    assert rows and not differing(rows)
    assert all(row.eager is not None for row in rows)


@contextmanager
def one_rank() -> Iterator[None]:
    with fake_process_group(0, 1):
        yield


HUGGING_FACE = ["build_llama", "build_t5", "build_mixtral"]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("how", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("build", HUGGING_FACE)
def test_models_of_hugging_face(build: str, how: bool | None) -> None:
    huggingface = pytest.importorskip("tests.fsdp.huggingface")
    with one_rank():
        torch.manual_seed(0)
        net, optimizer = getattr(huggingface, build)()
        if how is not None:
            net.gradient_checkpointing_enable({"use_reentrant": how})
            net.enable_input_require_grads()
        tokens = torch.randint(0, huggingface.WORDS, (2, huggingface.LENGTH))
        step = huggingface.train(net, optimizer)
        step(input_ids=tokens, labels=tokens)
        rows = compared(lambda: step(input_ids=tokens, labels=tokens))
    assert len(rows) > 200 and not differing(rows)


def fsdp_llama() -> tuple[nn.Module, torch.optim.Optimizer]:
    from examples.llama import Llama, Shape

    torch.manual_seed(0)
    net = Llama(Shape(4, 32, 64, 4, 2))
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)


@pytest.mark.skipif(not SEES_FUNCTIONS, reason="`Function.apply` is C++ in this release")
def test_no_number_is_borrowed_and_every_backward_op_has_a_line() -> None:
    from examples.llama import step

    with one_rank():
        net, optimizer = fsdp_llama()
        tokens = torch.randint(0, 64, (1, 8))
        captured = fz.capture(step)
        while captured.program is None:
            captured(net, optimizer, tokens)
        captured.program.describe()
        ops = [n for n in captured.program.graph.nodes if n.op == "call_function"]
    assert not [n for n in ops if n.meta["phase"] == "optimizer" and "seq_nr" in n.meta]
    inside = [n for n in ops if n.meta["phase"] == "backward" and "autograd_node" in n.meta]
    assert len(inside) > 200
    outside = [n for n in ops if n.meta["phase"] == "backward" and "autograd_node" not in n.meta]
    assert all(
        "fsdp" in n.meta and n.meta["module"] == "model" for n in outside
    )  # the last reduction
    program = captured.program
    assert not [n for n in inside if not program.forward_of(n)]
    assert not [n for n in inside if "forward_stack_trace" not in n.meta]
    made: dict[int, set[Any]] = {}
    for n in ops:
        if n.meta["phase"] == "forward" and "seq_nr" in n.meta:
            made.setdefault(n.meta["seq_nr"], set()).add(n.meta["original_aten"])
    # Several nodes of the graph may be one op of eager's.
    assert all(len(targets) == 1 for targets in made.values())


def test_two_recordings_have_equal_numbers() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(batch: Tensor) -> Tensor:
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    numbers = []
    for _ in range(2):
        step = fz.capture(train)
        for _ in range(3):
            step(torch.ones(2, 3))
        step.program.describe()
        numbers.append([n.meta.get("seq_nr") for n in step.program.graph.nodes])
    assert numbers[0] == numbers[1] and max(filter(None, numbers[0])) < 20


def test_a_number_that_was_set_by_hand_has_no_maker() -> None:
    with Recorder() as recorder:
        y = x().sin()
        y.grad_fn._set_sequence_nr(2**40)
        y.sum().backward()
    ownership = ownership_of(recorder.tape)
    (op,) = (
        r for r in recorder.records if r.autograd_node == "SinBackward0" and "mul" in str(r.target)
    )
    assert ownership.maker(op) is None


def test_a_graph_from_before_the_recording_has_no_maker() -> None:
    y = x().sin().sum()
    with Recorder() as recorder:
        x().cos()
        y.backward()
    ownership = ownership_of(recorder.tape)
    inside = [r for r in recorder.records if r.autograd_node is not None]
    assert inside and all(ownership.maker(r) is None for r in inside)


def record(thread: int, made: int | None = None, node: int | None = None) -> OpRecord:
    """An op in a thread that made a node, or ran in one."""
    found = OpRecord(aten.sin.default, (), {}, thread=thread)
    if made is not None:
        found.makes = made, made, True
    if node is not None:
        found.seq_nr, found.autograd_node, found.phase = node, "SinBackward0", "backward"
    return found


def test_threads_count_for_themselves() -> None:
    """A thread of autograd's runs nodes of the recording's thread, and numbers those that it makes itself alike."""
    forward, again, backward = record(0, made=5), record(7, made=5), record(7, node=5)
    ownership = ownership_of(TapeNotes([forward, again, backward]))
    assert ownership.maker(backward) is forward
    assert ownership.of(forward).made == ownership.of(backward).node == 0
    assert ownership.of(again).made == 1


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize("raises", [False, True])
def test_nodes_live_no_longer_than_their_backward(raises: bool) -> None:
    def hook(gradient: Tensor) -> None:
        if raises:
            raise KeyError

    with Recorder() as recorder:
        y = _Double.apply(x())
        y.register_hook(hook)
        node = weakref.ref(y.grad_fn)
        with pytest.raises(KeyError) if raises else nullcontext():
            y.sum().backward()
        del y
        assert recorder.records[-1].autograd_node is not None and node() is None


def test_names_of_nodes_are_their_own() -> None:
    leaf, written = x(), x() * 1
    written[:1].mul_(leaf[:1])
    nodes = [
        leaf.sin().grad_fn,
        torch.autograd.graph.get_gradient_edge(leaf).node,
        written.grad_fn,
        _Double.apply(leaf).grad_fn,
    ]
    names = NodeNames()
    assert [names.of(node) for node in nodes * 2] == [node.name() for node in nodes * 2]
    assert len(names) == 4 and "CopySlices" in names.of(nodes[2])


def test_nodes_without_a_class_of_their_own_are_asked_each_time() -> None:
    class CppFunction:
        def __init__(self, text: str) -> None:
            self.text = text

        def name(self) -> str:
            return self.text

    names = NodeNames()
    assert [names.of(CppFunction(text)) for text in "ab"] == ["a", "b"]
