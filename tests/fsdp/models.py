"""Small models under `fully_shard`: one builder for each way of wrapping that a row of `features.py` needs.

A builder returns `(model, optimizer)`, from the same seed every time: two calls make twins. Builders run on
the ranks, where the process groups are; functions that take options return a builder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.tensor import Shard

Built = tuple[nn.Module, torch.optim.Optimizer]
Build = Callable[[], Built]
WIDTH, CLASSES = 8, 3


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 16) -> None:
        super().__init__()
        self.a = nn.Linear(width, hidden)
        self.b = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(x)))


class Net(nn.Module):
    """Residual blocks and a head."""

    def __init__(
        self, width: int = WIDTH, hidden: int = 16, classes: int = CLASSES, blocks: int = 2
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    """One mesh for each shape: process groups are made once for all rows."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrapped(
    *shape: int,
    then: Callable[[Any], None] | None = None,
    make: Callable[[], Net] = Net,
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    root: dict[str, Any] | None = None,
    **options: Any,
) -> Build:
    """`Net` with every block and the root under `fully_shard(**options)`, on a mesh of `shape` if given.

    then: called with the wrapped model before the optimizer is made. root: what differs for the root.
    """

    def build() -> Built:
        torch.manual_seed(0)
        model = make()
        given = {**options, "mesh": mesh(*shape)} if shape else options
        for block in model.blocks:
            fully_shard(block, **given)
        fully_shard(model, **{**given, **(root or {})})
        if then is not None:
            then(model)
        return model, optimizer(p for p in model.parameters() if p.requires_grad)

    return build


# -- what is wrapped -------------------------------------------------------------------------------


def nested() -> Built:
    """A wrapped module inside a wrapped one, one that is not wrapped, and sizes that do not divide."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, WIDTH))
    model = nn.Sequential(
        nn.Sequential(inner, nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 7), nn.Linear(7, CLASSES)
    )
    fully_shard(inner[0])
    fully_shard(model[0])
    fully_shard(model)
    return model, adamw(model.parameters())


def root_only() -> Built:
    torch.manual_seed(0)
    model = Net()
    fully_shard(model)
    return model, adamw(model.parameters())


def uneven() -> Net:
    """No size divides by two or four; the head's bias is smaller than the mesh."""
    return Net(hidden=5, classes=CLASSES)


def grouped() -> Built:
    """Two modules in one group: `fully_shard([a, b])`."""
    torch.manual_seed(0)
    model = Net(blocks=3)
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.blocks[2], model.head])
    fully_shard(model)
    return model, adamw(model.parameters())


def separate_roots() -> Built:
    """Modules that have no wrapped parent: each is a root, with a callback of its own in backward."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model.head)
    return model, adamw(model.parameters())


def roots_that_share() -> Built:
    """Several roots with one set of streams, as the stages of a pipeline on one rank."""
    model, optimizer = separate_roots()
    share_comm_ctx([*model.blocks, model.head])  # type: ignore[list-item]
    return model, optimizer


def from_meta() -> Built:
    """Built on the meta device, wrapped, then given memory and values."""
    with torch.device("meta"):
        model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for child in model.modules():
        if isinstance(child, nn.Linear):
            child.reset_parameters()
    return model, adamw(model.parameters())


def ignoring() -> Built:
    """The head's bias is left to the user: not sharded, not reduced."""
    torch.manual_seed(0)
    model = Net()
    ignored = {model.head.bias}
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, ignored_params=ignored)
    return model, momentum(p for p in model.parameters() if p is not model.head.bias)


# -- parameters ------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH, bias=False)
        self.block = Block()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.into.weight
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.out(self.block(self.into(x))))


def tied(group: bool) -> Build:
    """Two layers with one weight, managed by the root, or by a group of their own."""

    def build() -> Built:
        torch.manual_seed(0)
        model = Tied()
        fully_shard(model.block)
        if group:
            fully_shard([model.into, model.out])
        fully_shard(model)
        return model, adamw(model.parameters())

    return build


def frozen_block() -> Net:
    model = Net()
    model.blocks[0].requires_grad_(False)
    return model


def frozen_weights() -> Net:
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith("weight"))
    return model


class Normed(Net):
    """Batch norm: buffers that every step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(super().features(x))


class Halved(Block):
    """Only rank 0 uses the second layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return x + (self.b(h) if torch.distributed.get_rank() == 0 else h[:, :WIDTH])


def sometimes_used() -> Net:
    model = Net()
    model.blocks[1] = Halved()
    return model


def largest_dim(p: nn.Parameter) -> Shard:
    """`shard_placement_fn`: the second dimension wherever there is one."""
    return Shard(1 if p.dim() > 1 else 0)


def even() -> Net:
    return Net(classes=4)


# -- what is set on the wrapped model --------------------------------------------------------------


def prefetched(model: Any) -> None:
    """Forward and backward prefetch, by hand."""
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    model.set_modules_to_backward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


def every(method: str, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
    """`method(*args)` on every wrapped module."""

    def apply(model: nn.Module) -> None:
        for child in model.modules():
            if isinstance(child, FSDPModule):
                getattr(child, method)(*args, **kwargs)

    return apply


def both(*each: Callable[[Any], None]) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        for then in each:
            then(model)

    return apply


# -- what goes in and out, compiled blocks, hooks -----------------------------------------------------


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    label: str


class Structured(nn.Module):
    """A model that takes keyword and other arguments and returns a structure."""

    def __init__(self, model: nn.Module, kind: type) -> None:
        super().__init__()
        self.inner, self.kind = model, kind

    def forward(self, x: Tensor, *, targets: Tensor, scale: float = 1.0, name: str = "") -> Any:
        logits = self.inner(x) * scale
        loss = F.mse_loss(logits, targets)
        if self.kind is dict:
            return {"loss": loss, "aux": [logits, (name, None)]}
        return Output(loss, logits, name)


def structured(kind: type) -> Callable[[], Built]:
    def build() -> Built:
        torch.manual_seed(0)
        model = Structured(Net(), kind)
        fully_shard(model.inner)
        fully_shard(model)
        return model, adamw(model.parameters())

    return build


def compiled() -> Built:
    torch.manual_seed(0)
    model = Net()
    for i, block in enumerate(model.blocks):
        block.compile(backend="eager")
        fully_shard(model.blocks[i])
    fully_shard(model)
    return model, adamw(model.parameters())


def in_backward() -> Built:
    """An SGD step for each parameter as soon as its gradient is reduced."""
    model, _ = wrapped()()
    for p in model.parameters():

        def update(p: Any) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        p.register_post_accumulate_grad_hook(update)
    return model, torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)


def registered(model: Any) -> None:
    register_fsdp_forward_method(model, "features")
