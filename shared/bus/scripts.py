"""The bus's Lua scripts: operations that must be atomic.

A tool worker needs no others: its Redis user may not load any, and every participant that may load them has these. The
caller cannot choose the amount of work of a script, because Redis serves no other client meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha1
from pathlib import Path
from typing import Any, ClassVar

from shared.bus.replies import Command, Reply, ReplyError

FOLDER = Path(__file__).parent / "scripts"


class Script:
    """A Lua script. All its keys share a hash slot.

    Every connection loads the missing scripts of its process, and every heartbeat repeats that. A Redis user that may
    not load scripts waits for a participant that may.
    """

    known: ClassVar[dict[str, Script]] = {}

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = sha1(source.encode(), usedforsecurity=False).hexdigest()
        Script.known[self.sha] = self

    @classmethod
    def read(cls, *files: Path) -> Script:
        """Return the script in a file; files before the last one define the functions that it calls."""
        return cls("".join(file.read_text(encoding="utf-8") for file in files))

    def __call__(self, keys: Sequence[str], *args: Any) -> Command:
        return ("EVALSHA", self.sha, len(keys), *keys, *args)


async def load_scripts(ask: Callable[[Sequence[Command]], Awaitable[list[Reply]]]) -> list[Reply]:
    """Load the scripts of this process that a server lacks. Return the server's replies to that; errors are values.

    ask: sends commands to the server and returns their replies.
    """
    scripts = list(Script.known.values())
    (known,) = await ask([("SCRIPT", "EXISTS", *[script.sha for script in scripts])])
    if isinstance(known, ReplyError):
        if known.code != "NOPERM":
            return [known]
        # A user that may not even ask loads all of them.
        known = [0] * len(scripts)
    missing = [script for script, exists in zip(scripts, known, strict=True) if not exists]
    return await ask([("SCRIPT", "LOAD", script.source) for script in missing]) if missing else []


# The consumer that owns entries which any replica may claim at once.
UNOWNED_CONSUMER = "handover"

PUBLISH_ONCE = Script.read(FOLDER / "publish_once.lua")
RENEW_CLAIMS = Script.read(FOLDER / "renew_claims.lua")
SET_DELIVERY_COUNT = Script.read(FOLDER / "set_delivery_count.lua")
HAND_OVER = Script.read(FOLDER / "hand_over.lua")
REMOVE_IDLE_CONSUMERS = Script.read(FOLDER / "remove_idle_consumers.lua")
DROP_EXCESS = Script.read(FOLDER / "drop_excess_consumers.lua")
DROP_EMPTY = Script.read(FOLDER / "drop_empty_stream.lua")
FIND_BY_TEXT = Script.read(FOLDER / "find_by_text.lua")
UNREAD = Script.read(FOLDER / "count_unread.lua")
