"""Real FSDP2 steps on a fake process group, each captured once: what tests of plans look at.

step = recorded("llama")
step.program, step.flops, step.issued       the program, and what the same step does as it is written
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import functionalize as fz
from benchmarks.capture import Transformer
from functionalize._compat.distributed import fake_process_group, process_groups
from functionalize.planner.time.communication import members_of
from functionalize.util.process_groups import group_name, is_group

LAYERS, WIDTH, WORDS = 3, 16, 64
ROWS, LENGTH = 2, 8
TOKENS = ROWS * LENGTH
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
aten = torch.ops.aten


def repeated(query: Any, key: Any) -> Any:
    """The shape of keys that are given to every head: torch 2.11 counts no grouped ones."""
    batch, _, *rest = key
    return (batch, query[1], *rest)


# What torch leaves out on CPUs before 2.15, by torch's own formulas.
ATTENTION_OF_CPUS: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *a, out_shape=None, **kw: flop_counter.sdpa_flop_count(
            q, repeated(q, k), repeated(q, v)
        )
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda g, q, k, v, *a, out_shape=None, **kw: flop_counter.sdpa_backward_flop_count(
            g, q, repeated(q, k), repeated(q, v)
        )
    ),
}
COUNTED_BY_TORCH = aten._scaled_dot_product_flash_attention_for_cpu in flop_counter.flop_registry


@dataclass(frozen=True)
class Recorded:
    """A captured step, and its eager self. world: the ranks that share parameters.

    units: the shapes of the parameters of each wrapped module, the root first. groups: the ranks of each process
    group; members: what `members_of` says while they are there. flops: by op, as `FlopCounterMode` counts them;
    all_flops: with the attention of CPUs. issued: the collectives of a step as written, in order: (op, group, bytes of
    the input).
    """

    program: fz.Program
    world: int
    units: list[list[tuple[int, ...]]]
    groups: dict[str, tuple[int, ...]]
    members: dict[str, tuple[int, ...]]
    flops: Counter[str]
    all_flops: Counter[str]
    issued: list[tuple[str, str, int]]


class Issued(TorchDispatchMode):
    """Writes down the collectives that a step issues: FSDP2's, and the functional ones of DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # what it does inside comes here again
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            given = args[GIVEN[name]]
            tensors = given if isinstance(given, (list, tuple)) else [given]
            (group,) = (group_name(a) for a in args if is_group(a))
            self.found.append((name, group, sum(t.nbytes for t in tensors)))
        elif func.namespace == "_c10d_functional" and name.startswith("all_"):
            self.found.append((name, str(args[-1]), args[0].nbytes))
        return func(*args, **(kwargs or {}))


GIVEN = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 0}  # what is sent


@functools.cache
def recorded(name: str) -> Recorded:
    """The step of that name, see `MAKERS`."""
    world = 8 if name == "hsdp" else 4
    with fake_process_group(0, world):
        torch.manual_seed(0)
        maker = MAKERS[name]
        model, blocks, ids = maker.make()
        options = dict(maker.options)
        if name == "hsdp":
            options["mesh"] = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        with maker.around():
            return _recorded(model, blocks, ids, maker.clip, options)


def _recorded(
    model: nn.Module, blocks: Any, ids: Tensor, clip: bool, options: dict[str, Any]
) -> Recorded:
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> Tensor:
        loss: Tensor = model(ids)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = fz.capture(step)
    for _ in range(3):
        captured()
    assert captured.stats.replays
    captured.program.describe()
    with FlopCounterMode(display=False) as plain, Issued() as issued:
        step()
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_OF_CPUS) as more:
        step()
    groups = process_groups()
    return Recorded(
        program=captured.program,
        world=4,
        units=list(_units(model)),
        groups={g.group_name: tuple(dist.get_process_group_ranks(g)) for g in groups},
        members=members_of(captured.program),
        flops=_by_op(plain),
        all_flops=_by_op(more),
        issued=issued.found,
    )


def _units(model: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the parameters that each wrapped module gathers, none twice."""
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    inner = {id(p) for m in modules[1:] for p in m.parameters()}
    yield [tuple(p.shape) for p in model.parameters() if id(p) not in inner]
    for module in modules[1:]:
        yield [tuple(p.shape) for p in module.parameters()]


def _by_op(counter: FlopCounterMode) -> Counter[str]:
    return Counter({str(op): n for op, n in counter.get_flop_counts()["Global"].items()})


# -- the steps -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Maker:
    """How a step is made: (model, what is wrapped besides the root, tokens)."""

    make: Callable[[], tuple[nn.Module, Any, Tensor]]
    options: dict[str, Any] = field(default_factory=dict)
    clip: bool = False
    around: Callable[[], Any] = nullcontext


def _tokens() -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH))


def _transformer() -> tuple[nn.Module, Any, Tensor]:
    model = Transformer(LAYERS, WIDTH)
    return model, model.blocks, _tokens()


def _checkpointed() -> tuple[nn.Module, Any, Tensor]:
    model, blocks, ids = _transformer()
    for block in blocks:
        forward = block.forward
        block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    return model, blocks, ids


class Losses(nn.Module):
    """A language model that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def _llama() -> tuple[nn.Module, Any, Tensor]:
    """Grouped queries, and a width of the MLP that the ranks cannot share evenly."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=65,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )
    model = transformers.LlamaForCausalLM(config)
    return Losses(model), model.model.layers, _tokens()


@contextmanager
def _math() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


MAKERS = {
    "transformer": Maker(_transformer),
    "hsdp": Maker(_transformer, {"mp_policy": BF16}, clip=True),
    "checkpointed": Maker(_checkpointed, around=_math),
    "llama": Maker(_llama, {"mp_policy": BF16}),
}
