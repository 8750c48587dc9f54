"""A joint graph cut in two at its boundary: what is saved, what is not, and that both halves compute the whole."""

from __future__ import annotations

import torch
from torch import fx

from functionalize.analysis.joint_split import Split, split

aten = torch.ops.aten


def joint() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """Before: two of the three parts of a split are used after it, one only there; a dead op; a constant."""
    graph = fx.Graph()
    n: dict[str, fx.Node] = {name: graph.placeholder(name) for name in ("a", "w", "tangent")}
    n["constant"] = graph.create_node("get_attr", "constant", name="constant")
    n["mul"] = graph.call_function(aten.mul.Tensor, (n["a"], n["w"]))
    n["split"] = graph.call_function(aten.split.Tensor, (n["mul"], 2))
    n["first"] = graph.call_function(torch.ops.aten.sin.default, (n["mul"],))
    n["dead"] = graph.call_function(aten.cos.default, (n["mul"],))
    return graph, n


def cut(keep: tuple[str, ...] = ()) -> tuple[Split, dict[str, fx.Node]]:
    import operator

    graph, n = joint()
    early = [node for node in graph.nodes if node.op == "call_function"]
    n["part"] = graph.call_function(operator.getitem, (n["split"], 0))
    n["grad"] = graph.call_function(aten.mul.Tensor, (n["tangent"], n["part"]))
    n["late_dead"] = graph.call_function(aten.neg.default, (n["first"],))
    n["out"] = graph.call_function(aten.add.Tensor, (n["grad"], n["w"]))
    n["sum"] = graph.call_function(aten.add.Tensor, (n["out"], n["constant"]))
    return split(graph, early, [n["first"]], [n["sum"]], keep), n


def names(graph: fx.Graph, op: str) -> list[str]:
    return [node.name for node in graph.nodes if node.op == op]


def test_what_is_used_after_the_boundary_is_saved_and_nothing_else() -> None:
    halves, n = cut()
    assert halves.saved == halves.used == (n["part"],)
    assert n["dead"].name not in names(halves.forward, "call_function")
    assert n["late_dead"].name not in names(halves.backward, "call_function")


def test_inputs_and_constants_are_given_again() -> None:
    halves, _ = cut()
    assert names(halves.forward, "placeholder") == ["a", "w", "tangent"]
    assert names(halves.backward, "placeholder") == ["a", "w", "tangent", "getitem"]
    assert names(halves.backward, "get_attr") == ["constant"]
    assert names(halves.forward, "get_attr") == []


def test_a_value_may_be_kept_for_another_backward() -> None:
    halves, n = cut(keep=("cos_default",))
    assert halves.saved == (n["dead"], n["part"])
    assert halves.used == (n["part"],)
    assert names(halves.backward, "placeholder") == ["a", "w", "tangent", "getitem"]


def test_both_halves_compute_what_the_whole_does() -> None:
    halves, _ = cut()
    root = torch.nn.Module()
    root.register_buffer("constant", torch.tensor(3.0))
    forward, backward = (fx.GraphModule(root, g) for g in (halves.forward, halves.backward))
    a, w, t = torch.randn(4), torch.randn(4), torch.randn(2)
    w2 = w[:2]
    first, part = forward(a, w, None)
    assert torch.equal(first, (a * w).sin())
    (total,) = backward(None, w2, t, part)
    assert torch.equal(total, t * (a * w)[:2] + w2 + 3)
