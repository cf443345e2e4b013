"""The server of a test that says what it answers, and sees what it was asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shared.bus import Bus, Command, Reply


class Asked:
    """Every connection of a bus: answers what it is asked in turn, with what the test has put there.

    now: the loop's time, for whoever takes it from here. takes: seconds that each reply takes. options: how each
    command that was sent alone was to be sent.
    """

    def __init__(self, *replies: Reply) -> None:
        self.now = 100.0
        self.takes = 0.0
        self.replies = list(replies)
        self.options: list[dict[str, Any]] = []
        self._asked: list[Any] = []

    def bus(self, now_ms: int | None = None, *, url: str = "redis://127.0.0.1:1", **options: Any) -> Bus:
        """A bus on it. now_ms: the server's time, which stands still."""
        made = Bus(url, "test/1", **options)
        made.link = made.heartbeat_link = self  # type: ignore[assignment]
        if now_ms is not None:
            made.now_ms = lambda: now_ms  # type: ignore[method-assign]
        return made

    def time(self) -> float:
        return self.now

    async def call(self, *command: Any, **options: Any) -> Reply:
        self.options.append(options)
        return self._reply(command)

    async def pipe(self, commands: Iterable[Command]) -> Any:
        return self._reply(list(commands))

    async def pipe_raw(self, commands: Iterable[Command]) -> Any:
        return self._reply(list(commands))

    async def commit(self, commands: Iterable[Command]) -> Any:
        return self._reply(list(commands))

    def _reply(self, asked: Any) -> Reply:
        self._asked.append(asked)
        self.now += self.takes
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def heard(self) -> list[Any]:
        """What it was asked since: a command, or a list of those that were sent together. Nothing is left to say."""
        asked, self._asked = self._asked, []
        assert self.replies == []
        return asked
