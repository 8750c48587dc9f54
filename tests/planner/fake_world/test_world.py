"""Fake worlds: the programs that real ranks record, at any size, with nothing left behind."""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import flex_attention

import functionalize as fz
from functionalize._compat.distributed import (
    fake_work_ids,
    mesh_methods,
    process_groups,
    sharding_propagation,
)
from functionalize._compat.fsdp import fully_sharded_chunks
from functionalize.errors import WorldError
from functionalize.ir.worlds import in_world
from tests.fsdp.features import FEATURES
from tests.fsdp.models import Net, mesh
from tests.ranks import run_on_ranks
from tests.steps import make_step


def program_of(name: str) -> str:
    """The program of a feature's step, with process groups numbered as they come."""
    feature = FEATURES[name]
    step = fz.capture(feature.make_step(*feature.build()))
    for batch in feature.batches():
        step(*batch)
        if step.program is not None:
            break
    assert step.program is not None, step.explain()
    text = step.program.print_readable(print_output=False)
    # On fakes functional collectives leave out a wrapper, which is the identity below autograd.
    text = re.sub(r"\n +(\w+) = _c10d_functional._wrap_tensor_autograd.default\(\w+\)", "", text)
    groups: dict[str, str] = {}
    return re.sub(
        r"(?<=['\"])\d+(?=['\"])", lambda m: groups.setdefault(m[0], f"group {len(groups)}"), text
    )


def program_in_world(name: str, rank: int = 0) -> str:
    torch.manual_seed(0)
    mesh.cache_clear()  # those of the world before
    with fz.world(size=FEATURES[name].world, rank=rank, target="cpu"):
        return program_of(name)


def programs_of(names: list[str]) -> list[str]:
    return [program_of(name) for name in names]


ON_TWO = [
    "blocks_and_root", "grouped", "shard_1", "keep_unsharded", "bf16", "fp16", "cpu_offload",
    "no_sync", "tied_in_the_root", "frozen_weights", "clip_grad_norm",
]  # fmt: skip
ON_FOUR = ["uneven_shards", "reshard_to_some", "hsdp", "tensor_parallel"]


# torch warns of what a feature's model does; the other one is of a deprecated name that it calls itself.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module", "ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(("names", "world"), [(ON_TWO, 2), (ON_FOUR, 4)])
def test_the_program_is_that_of_real_ranks(names: list[str], world: int):
    by_rank = run_on_ranks(programs_of, names, world=world)
    for rank in {0, world - 1}:
        for name, real in zip(names, by_rank[rank], strict=True):
            assert program_in_world(name, rank) == real, (name, rank)


def training(width: int = 8, **options: object):
    """A model, its optimizer and its step, built as on real ranks."""
    model = Net(width)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    step = make_step(model, optimizer)

    return model, step


def captured(width: int = 8, rows: int = 4):
    model, train = training(width)
    step = fz.capture(train)
    while step.program is None:
        step(torch.randn(rows, width))
    return model, step


def test_a_world_as_large_as_there_are():
    with fz.world(size=16_384, rank=16_383, target="cpu") as world:
        model, step = captured(width=32_768)
        assert dist.get_world_size() == world.mesh.size() == 16_384
        assert model.blocks[0].a.weight.to_local().numel() == 0  # 16 rows for 16,384 ranks
        assert model.blocks[0].b.weight.to_local().shape == (2, 16)
        assert step(torch.randn(4, 32_768)).shape == ()
        assert step.stats.replays == 1
    text = step.program.print_readable(print_output=False)
    assert "all_gather_into_tensor.default" in text and ", 16384, " in text


def test_no_work_is_done_for_every_rank():
    """torch cuts a parameter into one view for every rank."""

    def ops_at(size: int) -> int:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Counting(TorchDispatchMode):
            seen = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                Counting.seen += 1
                return func(*args, **(kwargs or {}))

        with fz.world(size=size, target="cpu"), Counting():
            training()
        return Counting.seen

    assert ops_at(16_384) == ops_at(4)


def test_tensors_are_never_allocated():
    """ViT-B/16's first layer at ten billion images."""
    with fz.world(size=1, target="cpu"):
        images = torch.empty(10**10, 3, 224, 224)
        patches = nn.Conv2d(3, 768, 16, 16)(images)
        assert patches.shape == (10**10, 768, 14, 14)


def test_meshes():
    with fz.world(mesh={"dp": 64, "tp": 8}, rank=11, target="cpu") as world:
        assert world.size == 512 and world.mesh.get_coordinate() == (1, 3)
        mine = init_device_mesh("cuda", (64, 8), mesh_dim_names=("dp", "tp"))
        assert mine == world.mesh and mine["tp"].size() == 8 and mine["dp"].get_local_rank() == 1
        training(mesh=world.mesh["dp"])
        by_list = DeviceMesh("cuda", [[0, 11], [1, 12]])
        assert by_list.get_coordinate() == (0, 1)
        assert DeviceMesh("cuda", by_list.mesh.view(-1)).size() == 4


def test_a_hugging_face_model_from_its_config():
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(num_hidden_layers=2)  # 7B's shapes
    with fz.world(size=64, target="cpu"):
        model = AutoModelForCausalLM.from_config(config)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        tokens = torch.randint(0, config.vocab_size, (1, 4096))

        def train(tokens: Tensor) -> Tensor:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            return loss.detach()

        step = fz.capture(train)
        step(tokens), step(tokens)
    assert step.program is not None and step.stats.collectives["all_gather_into_tensor"] == 5


def test_numbers_that_are_read_are_assumed():
    with fz.world(size=2, target="cpu") as world:
        _, train = training()
        losses = [train(torch.randn(4, 8)).item() for _ in range(2)]
    assert losses == [1.0, 1.0]
    ((line, count),) = world.assumed.items()
    assert "train(torch.randn(4, 8)).item()" in line and count == 2


def test_what_is_assumed_of_numbers():
    with fz.world(size=2, target="cpu") as world:
        x = torch.randn(4)
        assert not (x > 2).any() and (x > 2).all() and bool(x[0] > 2)
        found = torch.zeros(1)
        found += x[:1].isnan()
        assert found.clone().item() == 0.0 and torch.full((), 3).item() == 3
        assert x.sum().item() == 1.0 and x.sum().long().item() == 1
        nn.init.trunc_normal_(torch.empty(100))  # draws until all numbers fit
    assert all("test_world.py" in line or "trunc_normal_" in line for line in world.assumed)


def test_a_scaler_finds_no_overflow():
    with fz.world(size=2, target="cuda"):
        model, scaler = Net(), torch.amp.GradScaler("cuda")
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        step = fz.capture(train)
        for _ in range(4):
            step(torch.randn(4, 8))
    assert step.program is not None, step.explain()
    phases = [
        node.meta.get("phase")
        for node in step.program.graph_module.graph.nodes
        if node.op == "call_function"
    ]
    assert phases.count("optimizer") >= len(list(model.parameters()))


def test_a_loop_that_waits_for_a_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("functionalize.planner.fake_world.world._MOST_READS", 100)
    with fz.world(size=2, target="cpu"):
        x = torch.randn(4)
        with pytest.raises(WorldError, match="a number is read 100 times and never changes"):
            while x.sum().item() > 0:
                x = x - 1


def test_what_real_ranks_do_afterwards_is_as_before():
    before = FEATURES["hsdp"].title
    (first, *_) = run_on_ranks(around_a_world, "blocks_and_root")
    assert first == program_in_world("blocks_and_root") and before


def around_a_world(name: str) -> str:
    """On a real rank: its groups are hidden in a world, and there again afterwards."""
    groups, count = process_groups(), torch.ones(())
    with fz.world(size=4):
        assert dist.get_world_size() == 4 and not {*groups} & {*process_groups()}
        dist.all_reduce(torch.ones(()))
    dist.all_reduce(count)
    assert count == dist.get_world_size() == 2 and groups == process_groups()
    return program_of(name)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left(fails: bool):
    def replaced() -> list[object]:
        places = [sharding_propagation(), fake_work_ids(), *fully_sharded_chunks(), *mesh_methods()]
        return [inspect.getattr_static(owner, name) for owner, name in places] + [sys.excepthook]

    before = replaced()
    try:
        with fz.world(size=8, target="cuda"):
            assert in_world()
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert not in_world() and not dist.is_initialized()
    assert replaced() == before
    assert type(torch.ones(2)) is Tensor
    assert F.linear(torch.ones(1, 2), torch.ones(1, 2)).item() == 2


def test_what_a_world_refuses():
    with pytest.raises(WorldError, match=r"a mesh of shape \(2, 3\) has 6 ranks, the world 4"):
        fz.world(size=4, mesh=(2, 3)).__enter__()
    with pytest.raises(WorldError, match="positive whole numbers"):
        fz.world(mesh=(2, 0)).__enter__()
    with pytest.raises(WorldError, match="rank 4 is not in a world of 4 ranks"):
        fz.world(size=4, rank=4).__enter__()
    with fz.world(size=4, target="cpu"):
        with pytest.raises(WorldError, match="a fake world inside a fake world"):
            fz.world(size=2).__enter__()
        x = torch.randn(4)
        with pytest.raises(WorldError, match=r"aten.nonzero.default gives a result whose size"):
            x.nonzero()
        with pytest.raises(
            WorldError, match=r"aten.equal.default decides by data[\s\S]*torch.equal"
        ):
            torch.equal(x, x)
        with pytest.raises(WorldError, match="a mesh is made of a tensor of ranks"):
            DeviceMesh("cuda", torch.ones(4).int())


def test_rows_by_their_numbers_are_captured():
    """`x[i]` has a size that depends on data where `i` is a mask, and only there."""
    step = fz.capture(lambda x, i: x[i].sin())
    with fz.world(2):
        for _ in range(3):
            step(torch.ones(4, 2), torch.zeros(3, dtype=torch.long))
        assert step.program is not None and step.stats.replays
        with pytest.raises(WorldError, match=r"aten.nonzero.default gives a result whose size"):
            step(torch.ones(4, 2), torch.zeros(4, dtype=torch.bool))


def test_meshes_that_are_none():
    for shape, message in (
        (8, r"a mesh is a shape, as \(64, 8\)"),
        ("2x4", "a mesh is a shape"),
        ({"dp": 2, 3: 2}, "the names of a mesh's dimensions are texts"),
        ((), "positive whole numbers"),
    ):
        with pytest.raises(WorldError, match=message):
            fz.world(mesh=shape).__enter__()
    with pytest.raises(WorldError, match="rank 1 is not in a world of 4 ranks"):
        fz.world(size=4, rank="1").__enter__()


def language_model(name: str):
    """A model as it is trained: no cache, and a mask that masks nothing, which real training leaves out."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
    tokens = torch.ones(2, 8, dtype=torch.long)
    if name == "llama":
        config = transformers.LlamaConfig(**small, num_key_value_heads=1, use_cache=False)
        return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**small))
    return model, {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}


def program_of_language_model(name: str) -> str:
    model, batch = language_model(name)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        model.zero_grad()
        return loss.detach()

    captured = fz.capture(step)
    while captured.program is None:
        captured(batch)
    return captured.program.print_readable(print_output=False)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_libraries_do_not_find_out_that_tensors_are_fake(name: str):
    real = program_of_language_model(name)
    with fz.world(size=1, target="cpu") as world:
        assert program_of_language_model(name) == real
        assert not isinstance(torch.ones(1), torch._subclasses.FakeTensor)
    assert any("all()" in line or "torch.all" in line for line in world.assumed)
    assert torch._subclasses.FakeTensor.__name__ == "FakeTensor"


def test_inference_mode():
    with fz.world(size=2, target="cuda"):
        model, *_ = training()
        batch = torch.randn(4, 8)

        @torch.inference_mode()
        def evaluate(x: Tensor) -> float:
            return model(x).mean().item()

        step = fz.capture(evaluate, memory=True)
        while step.program is None:
            step(batch)
        assert step.memory.eager.peak > 0
        with torch.inference_mode():
            made = nn.Linear(2, 2)
        assert made.weight.requires_grad


def test_whole_numbers_on_the_device():
    def counts(x: Tensor) -> Tensor:
        rows = torch.tensor([x.size(0)], device="cuda")
        dist.all_reduce(rows)
        flags = torch.tensor(1, device=torch.device("cuda", 0))
        return rows * flags

    with fz.world(size=4, target="cuda"):
        step = fz.capture(counts)
        while step.program is None:
            step(torch.ones(3, 2))
    assert "all_reduce" in step.program.print_readable(print_output=False)


def test_a_number_is_formatted_as_assumed():
    with fz.world(size=2, target="cpu") as world:
        assert f"{torch.randn(4).sum():.2f}" == "1.00" and f"{torch.zeros(1)[0]:.1f}"
    assert any("torch.randn(4).sum():.2f" in line for line in world.assumed)
    assert f"{torch.tensor(2.0):.1f}" == "2.0"


def test_what_cannot_be_run_on_fakes_says_what_to_do():
    with fz.world(size=2, target="cuda"):
        layer = nn.Linear(2, 2)
        with pytest.raises(WorldError, match=r"Tensor.numpy\(\) reads data[\s\S]*test_world"):
            torch.ones(2).numpy()
        with pytest.raises(WorldError, match=r"DistributedDataParallel reads[\s\S]*\(ranks, 1\)"):
            nn.parallel.DistributedDataParallel(layer)
        with pytest.raises(WorldError, match=r"FSDP1[\s\S]*fully_shard \(FSDP2\)"):
            dist.fsdp.FullyShardedDataParallel(layer)
        with pytest.raises(WorldError, match=r"SyncBatchNorm has kernels[\s\S]*with BatchNorm"):
            nn.SyncBatchNorm(2)(torch.ones(3, 2))
        q = torch.randn(1, 1, 16, 16, requires_grad=True)
        with pytest.raises(WorldError, match=r"flex_attention has no[\s\S]*scaled_dot_product"):
            flex_attention.flex_attention(q, q, q)
    assert torch.ones(2).numpy().sum() == 2


def test_tensors_of_a_world_say_that_they_are_on_the_cpu():
    with fz.world(2, target="cuda"):
        layer = nn.Linear(2, 2, device="cuda")
        for tensor in (layer.weight, torch.ones(2, device="cuda"), torch.ones(2).to("cuda:0")):
            assert not tensor.is_cuda and tensor.device.type == "cpu"


def test_meshes_of_modules_share_their_ranks():
    with fz.world(64):
        one, other = (dist.init_device_mesh("cpu", (64,), mesh_dim_names=("dp",)) for _ in "12")
        assert one is not other and one == other and hash(one) == hash(other)
        assert one._flatten_rank_map is other._flatten_rank_map and one._rank_map is other._rank_map
        assert one != dist.init_device_mesh("cpu", (64,), mesh_dim_names=("tp",))
        square = dist.init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
        assert one != square and square["dp"] != square["tp"]
        assert square._flatten_rank_map is one._flatten_rank_map == tuple(range(64))


def test_collectives_are_answered_as_torch_does(monkeypatch: pytest.MonkeyPatch):
    def answers() -> list[object]:
        with fz.world(4):
            whole, part, group = torch.empty(8), torch.empty(2), dist.group.WORLD.boxed()
            out = torch.ops.c10d._allgather_base_.default(whole, part, group, False)
            found = [out[0] is whole, type(out[1]), len(out), whole._version]
            return [*found, program_of(next(iter(FEATURES)))]  # it reduces and scatters, too

    answered = answers()
    monkeypatch.setattr("functionalize.planner.fake_world.world._COLLECTIVES", frozenset())
    assert answered == answers() and answered[0] is True
