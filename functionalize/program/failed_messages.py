"""Which message between two ranks failed in a replay: the process group's error names none.

    messages[7] = message_text(node)                line 7 of the code starts a message, or waits for it
    namespace[MESSAGES] = messages                  the globals of the code
    note_message(error)                             adds "the message that receives from rank 1 of ..." to an error

Messages that fail are those of a rank that has ended, or that does not come to its part within the group's timeout.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from functionalize.ir.point_to_point import SEND, is_message
from functionalize.ir.waits import WAIT

CODE = "<functionalize boxed program>"  # the name of its file
MESSAGES = "messages"


def message_text(node: fx.Node) -> str | None:
    """What the message of a node is that starts it or waits for it; None: it is of no message."""
    started: Any = node.args[0] if node.target is WAIT else node
    if not isinstance(started, fx.Node) or not is_message(started.target):
        return None
    rank, tag, group = started.args[-3:]
    way = "sends to" if started.target is SEND else "receives from"
    tagged = f", tag {tag}" if tag else ""
    return f"{way} rank {rank} of the process group {group!r}{tagged} (`{started.name}`)"


def note_message(error: BaseException) -> None:
    """Note at an error of a graph's code at which message it was raised."""
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == CODE:
            messages = at.tb_frame.f_globals.get(MESSAGES, {})
            if (text := messages.get(at.tb_lineno)) is not None:
                error.add_note(
                    f"In a replay, at the message that {text}: that rank has ended, or waits for something else"
                )
        at = at.tb_next
