"""An engine on graph inputs, for rules of ops that this machine cannot run."""

from __future__ import annotations

import torch

from functionalize.discharge.emitters import GraphEmitter
from functionalize.discharge.functionalizer import Functionalizer
from functionalize.ir.ops import TensorRef, contiguous_geometry


def engine_with(*sizes: tuple[int, ...]) -> tuple[Functionalizer, list[TensorRef]]:
    emit = GraphEmitter(lambda storage, flat: emit.graph.placeholder("whole"))
    engine, refs = Functionalizer(emit), []
    for i, size in enumerate(sizes):
        ref = TensorRef(i, contiguous_geometry(size, torch.float32))
        node = emit.graph.placeholder(f"a{i}")
        engine.declare(ref, ref.geometry.nbytes, torch.device("cuda"), node, f"a{i}", external=True)
        refs.append(ref)
    return engine, refs
