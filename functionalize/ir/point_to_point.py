"""Messages between two ranks as nodes: a send makes a token, a receive makes a tensor, and a wait completes either.

    c10d.send([x], pg, dst, tag)     ->   send = send_message(x, dst, tag, "pg")
    work.wait()                      ->   wait = wait_tensor(send)
    c10d.recv_([y], pg, src, tag)    ->   receive = receive_message([4], float32, cpu, src, tag, "pg")
                                          y = wait_tensor(receive)             before the first reader of `y`

The ops of torch for these return an argument that they have written, which their schemas do not say; so these are added
to the namespace of the functional collectives, and what holds for a collective holds for them: it has a wait, is never
dropped or merged, and keeps its order among all that communicates.

Unlike those of collectives, waits of messages have a place, too. A message ends only when the other rank has come to
its part, for which it may wait for a later message of this one:

    rank 0   send(1); receive(1); wait, wait        rank 1   send(0); receive(0); wait, wait

so a wait stands where eager waits, or later: never before a message that eager starts before it. `message_sent` marks
in an op stream where eager waits for a send.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functionalize._compat.distributed import start_receive, start_send

# The ops exist as long as these objects.
_LIBRARY = torch.library.Library("_c10d_functional", "FRAGMENT")
_MARKS = torch.library.Library("functionalize", "FRAGMENT")
_LIBRARY.define("send_message(Tensor input, int dst, int tag, str group_name) -> Tensor")
_LIBRARY.define(
    "receive_message(SymInt[] size, ScalarType dtype, Device device, int src, int tag, str group_name) -> Tensor"
)
_MARKS.define("message_sent(int number) -> ()")
SEND = torch.ops._c10d_functional.send_message.default
RECEIVE = torch.ops._c10d_functional.receive_message.default
SENT = torch.ops.functionalize.message_sent.default
# As an eager step calls them.
EAGER_SEND = torch.ops.c10d.send.default if dist.is_available() else None
_EAGER_RECEIVE = torch.ops.c10d.recv_.default if dist.is_available() else None
_MESSAGES = frozenset({SEND, RECEIVE, EAGER_SEND, _EAGER_RECEIVE})


def is_message(target: object) -> bool:
    """Whether an op sends a message to one rank or receives one."""
    return target in _MESSAGES


@torch.library.register_fake("_c10d_functional::send_message", lib=_LIBRARY)
def _token(input: Tensor, dst: int, tag: int, group_name: str) -> Tensor:
    return input.new_empty(0)


@torch.library.impl(_LIBRARY, "send_message", "CompositeExplicitAutograd")
def _send(input: Tensor, *to: Any) -> Tensor:
    token = _token(input, *to)
    start_send(token, input, *to)
    return token


@torch.library.register_fake("_c10d_functional::receive_message", lib=_LIBRARY)
def _received(
    size: list[int],
    dtype: torch.dtype,
    device: torch.device,
    src: int,
    tag: int,
    group_name: str,
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


@torch.library.impl(_LIBRARY, "receive_message", "CompositeExplicitAutograd")
def _receive(size: list[int], dtype: torch.dtype, device: torch.device, *source: Any) -> Tensor:
    out = _received(size, dtype, device, *source)
    start_receive(out, *source)
    return out


@torch.library.impl(_MARKS, "message_sent", "CompositeExplicitAutograd")
def _message_sent(number: int) -> None:
    """Nothing is left to do: eager has waited."""
