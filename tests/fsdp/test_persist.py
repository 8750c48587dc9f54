"""A captured FSDP2 step, saved on both ranks, replays from its first call in processes that never ran it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import functionalize as fz
from functionalize.errors import LoadError
from tests import ranks
from tests.fsdp.twins import differences, flat, grown_storages, state_of
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

Twin = tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any]]
BEFORE, AFTER = 4, 4  # steps in the process that saves, and in the one that loads


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


def twin(kind: str, layers: int = 2) -> Twin:
    """A sharded model, its optimizer, and a step that leaves no gradient."""
    torch.manual_seed(3)
    own = dist.new_group([0, 1]) if kind == "own group" else None
    model = nn.Sequential(*(Block(6) for _ in range(layers)), nn.Linear(6, 3))
    options: dict[str, Any] = {}
    if kind == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if kind == "hybrid":
        options["mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    if kind == "own mesh":
        options["mesh"] = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    if kind == "kept unsharded":
        options["reshard_after_forward"] = False
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if kind == "prefetched":
        model.set_modules_to_backward_prefetch([model[1]])  # type: ignore[operator]
        model[0].set_modules_to_forward_prefetch([model[1]])  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train_step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        loss.backward()
        if own is not None:
            dist.all_reduce(loss.detach(), group=own)
        if kind == "numbers" and not loss.isfinite():
            return loss, loss
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def microbatches(x: Tensor, y: Tensor, last: bool) -> Tensor:
        model.set_requires_gradient_sync(last)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return model, optimizer, microbatches if kind == "microbatches" else train_step


def batch(step: int, kind: str) -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(5, 6, generator=made)
    y = torch.randint(3, (5,), generator=made)
    return (x, y, step % 2 == 1) if kind == "microbatches" else (x, y)


def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return model.state_dict(), optimizer.state_dict()


def save(kind: str, folder: str) -> dict[str, Any]:
    """Train, save the programs and a checkpoint of this rank."""
    model, optimizer, fn = twin(kind)
    step = fz.capture(fn)
    for i in range(BEFORE):
        step(*batch(i, kind))
    if kind == "microbatches":  # once more, as the first pair of calls were warm-ups
        for i in range(2 * BEFORE):
            step(*batch(i, kind))
    path = os.path.join(folder, "step.fzp")
    step.save(path)
    torch.save(checkpoint(model, optimizer), f"{path}.checkpoint{dist.get_rank()}")
    return {"captures": step.stats.captures, "files": sorted(os.listdir(folder))}


def restored(kind: str, folder: str) -> Twin:
    model, optimizer, fn = twin(kind)
    path = os.path.join(folder, f"step.fzp.checkpoint{dist.get_rank()}")
    of_model, of_optimizer = torch.load(path, weights_only=False)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    return model, optimizer, fn


def load(kind: str, folder: str) -> dict[str, Any]:
    """Go on from the checkpoint twice, eagerly and by the loaded programs, in a model that never ran."""
    dist.new_group(
        [0, 1]
    )  # group names count: those that the saving processes had are others' here
    eager_model, eager_optimizer, eager = restored(kind, folder)
    model, optimizer, fn = restored(kind, folder)
    step = fz.capture(fn)
    step.load(os.path.join(folder, "step.fzp"))
    grown = grown_storages(model)
    found: list[str] = []
    for i in range(BEFORE, BEFORE + AFTER + 2):
        torch.manual_seed(i)
        expected = eager(*batch(i, kind))
        torch.manual_seed(i)
        actual = (step if i < BEFORE + AFTER else fn)(
            *batch(i, kind)
        )  # at last, eager goes on from replay
        found += differences(i, flat(actual), flat(expected))
        found += differences(i, state_of(model, optimizer), state_of(eager_model, eager_optimizer))
        if grown_storages(model) != grown_storages(eager_model):
            found.append(f"step {i}: left grown {grown_storages(model)}")
    stats = step.stats
    calls = (stats.warmups, stats.captures, stats.replays)
    return {"grown": grown, "different": found, "calls": calls, "missed": stats.guard_failures}


KINDS = (
    "plain",
    "mixed precision",
    "hybrid",
    "own mesh",
    "own group",
    "kept unsharded",
    "prefetched",
    "microbatches",
    "numbers",
)


def save_all(folder: str) -> list[dict[str, Any]]:
    return [save(kind, os.path.join(folder, kind)) for kind in KINDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of both ranks for every kind; the processes that wrote them are gone."""
    folder = tmp_path_factory.mktemp("saved")
    for kind in KINDS:
        (folder / kind).mkdir()
    with ranks.other_processes():
        by_rank = run_on_ranks(save_all, str(folder))
    for rank, saved in enumerate(by_rank):
        for kind, each in zip(KINDS, saved, strict=True):
            assert each["captures"] == (2 if kind == "microbatches" else 1)
            assert (folder / kind / f"step.rank{rank}.fzp").exists()
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_never_ran_replays_bitwise_from_the_first_call(
    kind: str, folder: Path
) -> None:
    for loaded in run_on_ranks(load, kind, str(folder / kind)):
        assert loaded == {
            "grown": [],
            "different": [],
            "calls": (0, 0, AFTER),
            "missed": [],
        }


def load_while_running(folder: str) -> list[int]:
    """Load into a step that was called before, whose model FSDP2 has set up."""
    _, _, fn = restored("plain", folder)
    fn(*batch(0, "plain"))
    step = fz.capture(fn)
    step.load(os.path.join(folder, "step.fzp"))
    step(*batch(1, "plain"))
    return [step.stats.captures, step.stats.replays]


def test_a_model_that_ran_before_loading_replays(folder: Path) -> None:
    assert run_on_ranks(load_while_running, str(folder / "plain")) == [[0, 1]] * 2


def refusal(kind: str, file: str, layers: int = 2) -> str:
    """What loading says on this rank; the step then runs as if nothing had been loaded."""
    _, _, fn = twin(kind, layers)
    step = fz.capture(fn)
    try:
        step.load(file)
    except LoadError as error:
        step(*batch(0, kind))
        assert step.stats.warmups == 1
        return str(error).partition("cannot be loaded: it ")[2]
    return "nothing"


def test_what_one_rank_cannot_load_no_rank_loads(folder: Path, tmp_path: Path) -> None:
    files = [folder / "plain" / f"step.rank{rank}.fzp" for rank in range(2)]
    (tmp_path / "step.rank0.fzp").write_bytes(files[0].read_bytes())
    first, second = run_on_ranks(refusal, "plain", str(tmp_path / "step.fzp"))
    assert (first, second) == ("is refused on another rank", "is not there")
    (tmp_path / "step.rank1.fzp").write_bytes(files[1].read_bytes()[:-1000])
    first, second = run_on_ranks(refusal, "plain", str(tmp_path / "step.fzp"))
    assert first == "is refused on another rank" and "damaged" in second


def test_the_file_of_another_rank_is_refused(folder: Path, tmp_path: Path) -> None:
    for rank in range(2):
        data = (folder / "plain" / f"step.rank{1 - rank}.fzp").read_bytes()
        (tmp_path / f"step.rank{rank}.fzp").write_bytes(data)
    first, second = run_on_ranks(refusal, "plain", str(tmp_path / "step.fzp"))
    assert first == "was saved for rank 1, this is rank 0"
    assert second == "was saved for rank 0, this is rank 1"


def test_the_file_of_another_world_is_refused(folder: Path) -> None:
    step = fz.capture(lambda x: x.sum())
    with pytest.raises(LoadError, match="was saved for world size 2, this is world size 1"):
        step.load(folder / "plain" / "step.rank0.fzp")


def test_another_sharding_is_refused(folder: Path) -> None:
    path = str(folder / "plain" / "step.fzp")
    for said in run_on_ranks(refusal, "hybrid", path):
        assert said.startswith("was saved for other parameters or buffers: `model.0.up.weight` is ")
        assert (
            "as Replicate(), Shard(dim=0) on a mesh of [1, 2], was " in said or "as R, S(0)" in said
        )
    for said in run_on_ranks(refusal, "plain", path, 3):
        assert said.startswith("was saved for other modules: `model.2` is a ")
