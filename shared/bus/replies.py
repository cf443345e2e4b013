"""Commands, replies, and the errors that a reply may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.errors import BusUnavailable, Local2Error, TransientError

Command = tuple[Any, ...]
Reply = Any

# Messages of one loop tick are written so many at a time: Redis and their readers begin on these while the next ones
# are prepared.
TOGETHER = 16

# With these errors a server refuses every write and still serves reads: no room on its disk, or fewer replicas than its
# configuration requires. OOM refuses only the commands that may need more memory.
NO_WRITES = ("MISCONF", "NOREPLICAS")
FULL = ("OOM", *NO_WRITES)


class ReplyError(Local2Error):
    """Redis refused a command. `code` is the first word of its answer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class BusFull(TransientError):
    """Redis has reached its memory limit, cannot write to its disk or lacks replicas, and refuses writes."""


class ConnectionLost(Local2Error):
    """The connection broke after the command was sent; the command may have been carried out.

    broken: how often the connection broke while this large message was being sent.
    """

    def __init__(self, text: str, broken: int = 0) -> None:
        super().__init__(text)
        self.broken = broken


def checked(reply: Reply) -> Reply:
    """Return the reply. Raise BusUnavailable, BusFull or ReplyError when it is an error."""
    if not isinstance(reply, ReplyError):
        return reply
    if reply.code == "BUSY":
        raise BusUnavailable(str(reply))
    # A new error: a raised reply would refer to this frame, which refers to the reply.
    raise BusFull(str(reply)) if reply.code in FULL else ReplyError(str(reply))


def committed(replies: Sequence[Reply]) -> list[Reply]:
    """Return the replies of a transaction's commands, from those of MULTI, its commands and EXEC.

    Raise BusFull or ReplyError when the server refused the transaction.
    """
    outcome = replies[-1]
    if isinstance(outcome, ReplyError):
        # EXECABORT only says that an earlier reply has the reason.
        checked(next(reply for reply in replies if isinstance(reply, ReplyError)))
    return list(outcome)
