"""What a participant says of itself and does for all, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shared.bus import Bus, BusFull, Command, ReplyError
from shared.bus.keys import KNOWN_TOOLS
from shared.contracts import QUERY_CANCEL, RESPONSE_GENERATION
from shared.envelope import Message
from shared.errors import BusUnavailable, TransientError
from shared.participant.janitor import ABANDONED_MS, Janitor
from shared.participant.presence import Presence
from shared.participant.registry import Registry, ReplicaInfo
from shared.participant.service import Context, _mark_draining
from shared.participant.tool import Cancelled


async def test_a_janitor_that_cannot_work_waits_its_time_before_it_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        source = "test/1"

        @staticmethod
        async def lease(*_office: Any) -> Any:
            raise TransientError("away")

    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr("shared.participant.janitor.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await Janitor(cast(Bus, Away()), 60.0).run()
    assert waited == [60.0, 60.0, 60.0]


async def test_a_janitor_whose_user_of_redis_may_not_leaves_it_to_others() -> None:
    class Closed:
        source = "test/1"

        @staticmethod
        async def lease(*_office: Any) -> Any:
            raise ReplyError("NOPERM this user has no permissions")

    # it ends, instead of waiting for its next try
    async with asyncio.timeout(30):
        await Janitor(cast(Bus, Closed()), 3_600.0).run()


async def test_a_group_that_came_back_is_absent_from_then_on_when_it_goes_again() -> None:
    absent: list[list[str]] = [["memory"], [], ["memory"], ["memory"]]

    class Watched:
        async def absent(self, _subject: Any, _silent: int) -> list[str]:
            return absent.pop(0)

    janitor = Janitor(cast(Bus, Watched()), 60.0)
    found = [
        await janitor._abandoned(RESPONSE_GENERATION, now)
        for now in (0, 1_000, ABANDONED_MS, 2 * ABANDONED_MS)
    ]  # fmt: skip
    assert found == [[], [], [], ["memory"]]


async def test_a_full_redis_is_told_of_until_it_takes_a_heartbeat_again() -> None:
    full = [True, False]
    still: list[Command] = []

    class Pulse:
        async def pipe(self, commands: Sequence[Command]) -> list[Any]:
            if full.pop(0):
                raise BusFull("out of memory")
            return [1 for _ in commands]

        async def call(self, *command: Any) -> Any:
            still.append(command)

    told = ReplicaInfo("probe", "r1", "ready", 1, 1)
    bus = cast(Bus, SimpleNamespace(pulse=Pulse()))
    presence = Presence(bus, "probe", "r1", "local2:inbox:probe:r1", lambda: "0-0", lambda: told, b"{}")
    with pytest.raises(BusFull):
        await presence.announce(2.0)
    assert presence.full == "out of memory"
    assert still == [("EXPIRE", "local2:replica:probe:r1", 6)]
    await presence.announce(2.0)
    assert presence.full is None


@pytest.mark.parametrize(
    ("names", "known", "count", "added"),
    [
        ([], [], 0, None),
        (["one", "two"], [1, 0], 1, ["two"]),
        (["one"], [1], 1, None),
        (["one", "two"], [0, 0], 999, None),
        (["one"], [0], 999, ["one"]),
        (["one"], ReplyError("NOPERM no"), ReplyError("NOPERM no"), None),
        (["one"], ReplyError("WRONGTYPE it is"), ReplyError("WRONGTYPE it is"), None),
    ],
)
async def test_names_of_tools_are_noted_once_and_so_many_at_most(
    names: list[str], known: Any, count: Any, added: list[str] | None
) -> None:
    said: list[Command] = []

    class Asked:
        async def pipe_raw(self, commands: Sequence[Command]) -> list[Any]:
            said.extend(commands)
            return [known, count]

        async def call(self, *command: Any) -> bytes:
            said.append(command)
            return b"string" if command[0] == "TYPE" else b"OK"

    await Registry(cast(Bus, SimpleNamespace(link=Asked())), 0.1)._remember(names)
    asked = [("SMISMEMBER", KNOWN_TOOLS, *names), ("SCARD", KNOWN_TOOLS)] if names else []
    assert said[: len(asked)] == asked
    mended = ["TYPE", "DEL"] * 2 if isinstance(known, ReplyError) and known.code == "WRONGTYPE" else []
    assert [command[0] for command in said[len(asked) :]] == (["SADD"] if added else mended)
    if added:
        assert said[-1] == ("SADD", KNOWN_TOOLS, *added)


@pytest.mark.parametrize("patient", [False, True])
async def test_who_arrives_waits_for_a_full_redis_only_when_it_is_to(
    patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    class Pulse:
        async def pipe(self, commands: Sequence[Command]) -> None:
            said.append(commands[0][0])
            if said.count("SET") < 3:
                raise BusFull("out of memory")

        async def pipe_raw(self, commands: Sequence[Command]) -> None:
            said.append(commands[0][0])

    async def sleep(_seconds: float) -> None:
        said.append("waits")

    monkeypatch.setattr("shared.participant.presence.asyncio.sleep", sleep)
    bus = cast(Bus, SimpleNamespace(pulse=Pulse()))
    told = ReplicaInfo("probe", "r1", "ready", 1, 1)
    presence = Presence(bus, "probe", "r1", "local2:inbox:probe:r1", lambda: "0-0", lambda: told, b"{}")
    await presence.arrive(patient=patient)
    assert said == (["SET", "waits", "SET", "waits", "SET", "INCR"] if patient else ["SET"])


async def test_what_an_observer_makes_of_a_message_ends_nothing() -> None:
    class Follower:
        def __init__(self) -> None:
            cancel = [b"payload", b'{"query_id": "9-1", "reason": "x"}']
            self.left = [[b"payload", b"}"], cancel, cancel]

        async def next(self) -> list[tuple[str, list[bytes]]]:
            if not self.left:
                raise asyncio.CancelledError
            return [("1-1", self.left.pop(0))]

    seen: list[str] = []

    async def newest(_stream: str) -> str:
        return "7-1"

    async def handle(message: Message[Any]) -> None:
        seen.append(message.payload.query_id)
        raise RuntimeError("a bug")

    followed: list[tuple[str, str]] = []

    def follow(stream: str, after: str) -> Follower:
        followed.append((stream, after))
        return Follower()

    context = SimpleNamespace(tail=SimpleNamespace(follow=follow), bus=SimpleNamespace(newest=newest))
    for after in (None, "3-1"):
        with pytest.raises(asyncio.CancelledError):
            await Context._observe(cast(Any, context), QUERY_CANCEL, handle, after)
    assert seen == ["9-1"] * 4
    assert followed == [(QUERY_CANCEL.stream, "7-1"), (QUERY_CANCEL.stream, "3-1")]


@pytest.mark.parametrize("away", [False, True])
async def test_who_is_told_to_stop_says_so_at_once_and_leaves_all_the_same_when_nobody_hears_it(away: bool) -> None:
    said: list[str] = []

    class Leaving:
        state = "ready"

        async def announce(self) -> None:
            said.append(self.state)
            if away:
                raise BusUnavailable("away")

    stop = asyncio.Event()
    marking = asyncio.create_task(_mark_draining(cast(Any, Leaving()), stop))
    await asyncio.sleep(0)
    assert said == []
    stop.set()
    await marking
    assert said == ["draining"]


def test_of_cancelled_queries_the_oldest_are_forgotten() -> None:
    cancelled = Cancelled()
    for n in range(QUERY_CANCEL.keep + 1):
        cancelled.add(f"{n}-1")
    assert "0-1" not in cancelled
    assert "1-1" in cancelled
    assert f"{QUERY_CANCEL.keep}-1" in cancelled
