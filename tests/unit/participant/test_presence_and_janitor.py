"""What a participant says of itself and does for all, without a server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from shared.bus import Bus, BusFull, Command, ReplyError
from shared.bus.keys import JANITOR, KNOWN_TOOLS, REPLICAS, replica_key, schema_key, starts_key
from shared.contracts import DEAD_LETTER, KNOWLEDGE_READ, QUERY_CANCEL, QUERY_RECEIVED, RESPONSE_GENERATION, Subject
from shared.envelope import Message
from shared.errors import BusUnavailable, TransientError
from shared.participant.janitor import ABANDONED_MS, Janitor
from shared.participant.presence import Presence
from shared.participant.registry import Registry, ReplicaInfo
from shared.participant.service import Context, _mark_draining
from shared.participant.tool import Cancelled


class Trimmed:
    """A bus whose streams a janitor trims; `done` is what it did, in order."""

    source = "test/1"

    def __init__(self, *subjects: Subject[Any]) -> None:
        self.done: list[Any] = []
        self.now = 1_000
        self.gone: list[str] = []
        self.elected: list[bool | Exception] = [True]
        self.refused: dict[str, Exception] = {}
        self.link = self
        self._subjects = list(subjects)

    async def lease(self, *office: Any) -> bool:
        self.done.append(("lease", *office))
        said = self.elected.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    async def call(self, *command: Any) -> Any:
        self.done.append(command)

    async def learn_time(self) -> None:
        self.done.append("time")

    def now_ms(self) -> int:
        return self.now

    async def subjects(self) -> list[Subject[Any]]:
        return self._subjects

    async def reset_exhausted_ids(self, stream: str) -> None:
        self.done.append(("unblock", stream))

    async def idle_groups(self, subject: Subject[Any], silent_ms: int) -> list[str]:
        assert silent_ms == 60_000
        return self.gone

    async def trim(self, subject: Subject[Any], *, spare_ms: int, abandoned: Sequence[str]) -> None:
        self.done.append(("trim", subject.name, spare_ms, list(abandoned)))
        if subject.name in self.refused:
            raise self.refused[subject.name]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Trimmed:
    """Streams of every sort; where the janitor waits stands what it waits for, and it ends when it has no office more
    to ask for."""
    on = Trimmed(DEAD_LETTER, QUERY_CANCEL, QUERY_RECEIVED, KNOWLEDGE_READ)

    async def shared(bus: Any) -> None:
        assert bus is on
        on.done.append("share")

    async def sleep(seconds: float) -> None:
        on.done.append(seconds)
        if not on.elected:
            raise asyncio.CancelledError

    async def drop_forged(bus: Any) -> None:
        assert bus is on
        on.done.append("forged")

    monkeypatch.setattr("shared.participant.janitor.drop_forged", drop_forged)
    monkeypatch.setattr("shared.participant.janitor.enforce_quota", shared)
    monkeypatch.setattr("shared.participant.janitor.asyncio", SimpleNamespace(sleep=sleep))
    return on


ROUND: list[Any] = [
    "time", "share",
    ("unblock", DEAD_LETTER.stream), "forged", ("trim", "dead.letter", 60_000, []),
    ("unblock", QUERY_CANCEL.stream), ("trim", "query.cancel", 60_000, []),
    ("trim", "query.received", 60_000, []), ("trim", "knowledge.read", 1_000, []),
]  # fmt: skip
LEASE = ("lease", JANITOR, "test/1", 180_000)


async def test_who_has_the_office_trims_every_stream_and_puts_it_right(on: Trimmed) -> None:
    on.elected = [True, False]
    with pytest.raises(asyncio.CancelledError):
        await Janitor(cast(Bus, on), 60.0).run()
    assert on.done == [LEASE, *ROUND, 60.0, LEASE, 60.0]


@pytest.mark.parametrize(
    "error", [BusFull("out of memory"), ReplyError("WRONGTYPE it is"), ReplyError("ERR other"), TransientError("away")],
    ids=str,
)  # fmt: skip
async def test_a_stream_that_cannot_be_trimmed_keeps_no_other_from_it(error: Exception, on: Trimmed) -> None:
    on.refused = {"dead.letter": error}
    with pytest.raises(asyncio.CancelledError):
        await Janitor(cast(Bus, on), 60.0).run()
    # what is wrong with all of it ends the round; there is a next one
    whole = isinstance(error, BusFull) or str(error).startswith("WRONGTYPE")
    assert on.done == [LEASE, *(ROUND if whole else ROUND[:5]), 60.0]


async def test_a_janitor_that_cannot_work_waits_its_time_before_it_tries_again(on: Trimmed) -> None:
    on.elected = [TransientError("away"), ReplyError("ERR other"), ReplyError("WRONGTYPE it is")]
    with pytest.raises(asyncio.CancelledError):
        await Janitor(cast(Bus, on), 60.0).run()
    # what nobody wrote would stay for ever in the place of the office
    assert on.done == [LEASE, 60.0, LEASE, 60.0, LEASE, ("DEL", JANITOR), 60.0]


async def test_a_janitor_whose_user_of_redis_may_not_leaves_it_to_others(on: Trimmed) -> None:
    on.elected = [ReplyError("NOPERM this user has no permissions"), True]
    # it ends, instead of waiting for its next try
    await Janitor(cast(Bus, on), 60.0).run()
    assert on.done == [LEASE]


@pytest.mark.parametrize(
    ("period", "times", "abandoned"),
    [
        (1_800.0, [0, 1_800_000, 3_600_000], ["memory"]),
        (1_800.0, [0, 1_800_000, 3_599_999], []),
        (1_800.0, [0, 1, 3_600_000], ["memory"]),
        (1.0, range(0, 3_600_001, 60_000), ["memory"]),
        # it was away itself meanwhile, somebody else had the office in between, or the clock was put back
        (1_800.0, [0, 5_400_001, 9_000_000], []),
        (1_800.0, [0, None, 3_600_000], []),
        (1_800.0, [0, 3_599_999, 3_500_000, 3_600_000], []),
    ],
)
async def test_a_group_holds_entries_back_until_one_janitor_has_seen_it_absent_for_an_hour(
    period: float, times: Sequence[int | None], abandoned: list[str], on: Trimmed
) -> None:
    janitor = Janitor(cast(Bus, on), period)
    # its queries are the gateway's to bound
    on.gone = ["memory", "generator"]
    for at in times:
        on.elected = [at is not None]
        on.now = 7_000_000 + (at or 0)
        with pytest.raises(asyncio.CancelledError):
            await janitor.run()
    assert on.done[-3] == ("trim", "query.received", 60_000, abandoned)


async def test_a_group_that_came_back_is_absent_from_then_on_when_it_goes_again() -> None:
    absent: list[list[str]] = [["memory"], [], ["memory"], ["memory"]]

    class Watched:
        async def idle_groups(self, _subject: Any, _silent: int) -> list[str]:
            return absent.pop(0)

    janitor = Janitor(cast(Bus, Watched()), 60.0)
    found = [
        await janitor._abandoned(RESPONSE_GENERATION, now)
        for now in (0, 1_000, ABANDONED_MS, 2 * ABANDONED_MS)
    ]  # fmt: skip
    assert found == [[], [], [], ["memory"]]


@pytest.mark.parametrize(
    ("names", "known", "count", "added"),
    [
        ([], [], 0, None),
        (["one", "two"], [1, 0], 1, ["two"]),
        (["one"], [1], 1, None),
        (["one"], [0], 999, ["one"]),
        # those that nobody serves make room, the others do not
        (["one", "two"], [0, 1], 1_000, ["one"]),
        ([f"t{n}" for n in range(1_001)], [0] * 1_001, 2, None),
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
            return {"TYPE": b"string", "SMEMBERS": [b"two", b"gone\xff"]}.get(command[0], b"OK")

    await Registry(cast(Bus, SimpleNamespace(link=Asked())), 0.2)._remember(names)
    asked = [("SMISMEMBER", KNOWN_TOOLS, *names), ("SCARD", KNOWN_TOOLS)] if names else []
    assert said[: len(asked)] == asked
    mended = ["TYPE", "DEL"] * 2 if isinstance(known, ReplyError) and known.code == "WRONGTYPE" else []
    gone = [name for name in (b"two", b"gone\xff") if name.decode(errors="replace") not in names]
    full = isinstance(count, int) and count + len(names) > 1_000 and 0 in known
    forgotten = [("SMEMBERS", KNOWN_TOOLS), *(("SREM", KNOWN_TOOLS, name) for name in gone)] if full else []
    assert said[len(asked) :][: len(forgotten)] == forgotten
    assert [command[0] for command in said[len(asked) + len(forgotten) :]] == (["SADD"] if added else mended)
    if added:
        assert said[-1] == ("SADD", KNOWN_TOOLS, *added)


INBOX = "local2:inbox:probe:r1"
OPENING: list[Command] = [
    ("SET", schema_key("probe"), b"{}"),
    ("XADD", INBOX, "*", "type", "started"),
    ("EXPIRE", INBOX, 60),
]


class Link:
    """Keeps what is sent, and answers every command with what the test says; the errors come first."""

    def __init__(self, *errors: Exception, replies: Sequence[Any] = ()) -> None:
        self.sent: list[Any] = []
        self.errors = list(errors)
        self.replies = list(replies)

    async def pipe(self, commands: Sequence[Command]) -> list[Any]:
        self.sent.append(list(commands))
        if self.errors:
            raise self.errors.pop(0)
        return [self.replies.pop(0) if self.replies else 1 for _ in commands]

    pipe_raw = pipe

    async def call(self, *command: Any) -> Any:
        return (await self.pipe([command]))[0]


def presence_on(link: Link, read: str = "0-0", heartbeat: float = 2.0, **bus: Any) -> Presence:
    told = ReplicaInfo("probe", "r1", "ready", 1, 5)
    on = SimpleNamespace(heartbeat_link=link, **bus)
    return Presence(cast(Bus, on), "probe", "r1", INBOX, lambda: read, lambda: told, b"{}", heartbeat)


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("error", [BusFull("out of memory"), BusUnavailable("away")], ids=str)
async def test_who_arrives_waits_for_a_redis_that_takes_no_writes_only_when_it_is_to(
    error: Exception, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(error, error)

    async def sleep(_seconds: float) -> None:
        link.sent.append("waits")

    monkeypatch.setattr("shared.participant.presence.asyncio.sleep", sleep)
    presence = presence_on(link)
    await presence.register(patient=patient)
    started = [("INCR", starts_key("probe"))]
    assert link.sent == ([OPENING, "waits", OPENING, "waits", OPENING, started] if patient else [OPENING])
    # who waited for room says so until his first heartbeat
    assert presence.full == ("out of memory" if isinstance(error, BusFull) else None)


async def test_a_full_redis_is_told_of_until_it_takes_a_heartbeat_again() -> None:
    link = Link(BusFull("out of memory"))
    presence = presence_on(link)
    with pytest.raises(BusFull):
        await presence.announce()
    assert presence.full == "out of memory"
    assert link.sent[1:] == [[("EXPIRE", "local2:replica:probe:r1", 6)]]
    await presence.announce()
    assert presence.full is None


async def test_a_heartbeat_says_who_is_there_and_keeps_what_is_his() -> None:
    info = ReplicaInfo("probe", "r1", "ready", 1, 5)
    beat = [
        ("SET", replica_key("probe", "r1"), orjson.dumps(asdict(info)), "PX", 6_000),
        ("ZADD", REPLICAS, 5, "probe/r1"),
        ("EXISTS", schema_key("probe")),
        ("EXPIRE", INBOX, 60),
    ]
    # as ZADD says of one that is there already
    link = Link(replies=[b"OK", 0, 1, 1])
    presence = presence_on(link)
    await presence.announce()
    assert link.sent == [beat]
    # another description is written at once, and whenever it is gone, as the inbox is
    await presence.describe(b'{"new":1}')
    assert link.sent.pop() == [("SET", schema_key("probe"), b'{"new":1}')]
    for there in ([0, 1], [1, 0]):
        link.replies = [b"OK", 1, *there]
        await presence.announce()
        assert link.sent.pop() == [("SET", schema_key("probe"), b'{"new":1}'), *OPENING[1:]]


async def test_heartbeat_goes_on_after_failures_of_redis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    waited: list[float] = []

    def part(name: str, *errors: Exception) -> Any:
        left = list(errors)

        async def does(*_stream: str) -> None:
            done.append(name)
            if left:
                raise left.pop(0)

        return does

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise asyncio.CancelledError

    link = Link(ReplyError("WRONGTYPE it is"), replies=[0, b"none", b"set"])
    presence = presence_on(
        link,
        "7-5",
        60.0,
        reset_exhausted_ids=part("unblock"),
        learn_time=part("time", BusUnavailable("away")),
        load_scripts=part("scripts", ReplyError("NOPERM no")),
    )
    monkeypatch.setattr("shared.participant.presence.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await presence.run()
    assert Counter(done) == {"time": 2, "scripts": 2, "unblock": 2}
    assert all(0 < seconds <= 60 for seconds in waited)
    # what somebody has put in the place of an index is looked for, because of the beat that met it
    looked = [[("TYPE", REPLICAS)], [("TYPE", KNOWN_TOOLS)]]
    _, *others, _ = [one for one in link.sent if one != [("XTRIM", INBOX, "MINID", "=", "7-6")]]
    assert (others, len(link.sent)) == (looked, 6)


async def test_what_is_no_failure_of_redis_ends_a_heartbeat() -> None:
    async def bug() -> None:
        raise RuntimeError("a bug")

    async def nothing(*_stream: str) -> None:
        pass

    presence = presence_on(Link(), reset_exhausted_ids=nothing, learn_time=bug, load_scripts=nothing)
    with pytest.raises(RuntimeError, match="a bug"):
        await presence.run()


async def test_an_index_that_cannot_be_mended_now_ends_no_heartbeat() -> None:
    for error in (BusUnavailable("away"), ReplyError("NOPERM no")):
        link = Link(error)
        await presence_on(link)._missed(ReplyError("WRONGTYPE it is"))
        assert link.sent == [[("TYPE", REPLICAS)]]
    # other refusals have nothing to do with it
    link = Link()
    await presence_on(link)._missed(ReplyError("NOPERM no"))
    assert link.sent == []


async def test_who_leaves_takes_away_what_was_his() -> None:
    class Slow(Link):
        async def pipe_raw(self, commands: Sequence[Command]) -> list[Any]:
            for _ in range(3):
                await asyncio.sleep(0)
            return await self.pipe(commands)

    gone = [("DEL", replica_key("probe", "r1")), ("ZREM", REPLICAS, "probe/r1"), ("DEL", INBOX)]
    for errors in ([], [BusUnavailable("away")], [ReplyError("NOPERM no")]):
        link = Slow(*errors)
        await presence_on(link).deregister()
        assert link.sent == [gone]


async def test_who_leaves_waits_for_nobody() -> None:
    class Hanging(Link):
        async def pipe_raw(self, _commands: Sequence[Command]) -> list[Any]:
            await asyncio.Event().wait()
            raise AssertionError

    async with asyncio.timeout(30):
        await presence_on(Hanging()).deregister()


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
        assert (message.entry_id, message.envelope.subject) == ("1-1", "query.cancel")
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
