"""What the bus asks of the server for each thing that it is asked for, and what it makes of the replies."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
from support.asked import Asked

from shared.bus import Bus, Command, ConnectionLost, ReplyError
from shared.bus.endpoint import Endpoint
from shared.bus.keys import KNOWN_TOOLS, once_key
from shared.bus.port import Script
from shared.bus.scripts import HAND_OVER, PUBLISH_ONCE, REAP, RENEW_CLAIMS, UNREAD
from shared.bus.streams import OBSERVED, entries, event_length, grouping, size_of
from shared.contracts import (
    AGENT_TRANSITION,
    DEAD_LETTER,
    QUERY_CANCEL,
    QUERY_RECEIVED,
    RESPONSE_GENERATION,
    SUBJECTS,
    TOOL_RESULT,
    Outgoing,
)
from shared.envelope import Envelope

NOW = 1_700_000_000_000
WORK = RESPONSE_GENERATION.stream
GONE = ReplyError("ERR no such key")
# ids that come so late that hardly any is behind them
LATE = 10**14
GROUPS = ("XINFO", "GROUPS", WORK)
BOUND = [("XLEN", WORK), ("MEMORY", "USAGE", WORK)]


def group(name: str, last: str = "6-0", *, pending: int = 0, lag: int | None = 0) -> list[Any]:
    return [b"name", name.encode(), b"consumers", 2, b"pending", pending, b"last-delivered-id", last.encode(),
            b"lag", lag]  # fmt: skip


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Connection:
    """What a bus opens: what it was made of, and what became of it."""

    made: ClassVar[list[Connection]]
    client_id = 7

    def __init__(self, *given: Any, **options: Any) -> None:
        self.given = given
        self.options = options
        self.told: list[Any] = []
        self.made.append(self)

    async def __aenter__(self) -> Connection:
        self.told.append("opened")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.told.append("closed")

    async def call(self, *command: object) -> int:
        self.told.append(command)
        return 1

    def line(self, stream: str, name: str) -> Connection:
        return type(self)(stream, name=name)


class Reader(Connection):
    """One that ends its reads itself."""

    async def unblock(self) -> bool:
        self.told.append("unblocked")
        return True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    monkeypatch.setattr(Connection, "made", [], raising=False)
    return Connection.made


NAMES = [f"s/1:{kind}" for kind in ("commands", "pulse", "groups", "inbox")]


@pytest.mark.parametrize(("url", "kind"), [("redis://a:1", "Link"), ("redis+sentinel://a:1/main", "SentinelLink")])
async def test_a_bus_on_one_server_has_three_connections_and_the_second_ends_reads_of_the_third(
    url: str, kind: str, made: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"shared.bus.streams.{kind}", Connection)
    bus = Bus(url, "s/1", timeout=3.0)
    link, pulse, reader = made
    assert [bus.link, bus.pulse, bus.reader] == made
    # and one for each further read that waits, whatever it reads
    line = bus.line("s", "inbox")
    assert made[3:] == [line]
    assert [one.options["name"] for one in made] == NAMES
    clock, ((where,), *others) = link.options["clock"], [one.given for one in made]
    assert link.options == {"name": NAMES[0], "timeout": 3.0, "clock": clock}
    assert others == [("",), ("",), ("s",)]
    if kind == "Link":
        assert where == Endpoint.parse(url).server
    else:
        assert where._endpoint == Endpoint.parse(url)
    # what the server says to any of them is the bus's time
    clock.learn([b"1000", b"0"], time.monotonic())
    assert 1_000_000 <= bus.now_ms() < 1_600_000
    async with bus as opened:
        assert opened is bus
        assert await bus.unblock()
    assert pulse.told == ["opened", ("CLIENT", "UNBLOCK", 7), "closed"]
    assert link.told == reader.told == ["opened", "closed"]
    assert made[3].told == []


async def test_a_bus_on_a_cluster_reads_where_its_streams_are(
    made: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("ClusterLink", "ClusterReader"):
        monkeypatch.setattr(f"shared.bus.streams.{kind}", Reader if kind == "ClusterReader" else Connection)
    bus = Bus("redis+cluster://a:1", "s/1", timeout=3.0)
    link, pulse, reader = made
    assert [bus.link, bus.pulse, bus.reader, bus.line("s", "inbox")] == made
    endpoint = Endpoint.parse("redis+cluster://a:1")
    assert [one.given for one in made] == [(endpoint,), (endpoint,), (link,), ("s",)]
    assert [one.options for one in made[:2]] == [{"name": name, "timeout": 3.0} for name in NAMES[:2]]
    assert [one.options for one in made[2:]] == [{"name": name} for name in NAMES[2:]]
    async with bus:
        assert await bus.unblock()
    assert link.told == pulse.told == ["opened", "closed"]
    assert reader.told == ["opened", "unblocked", "closed"]
    assert made[3].told == []


# ── time and offices ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("timeout", "block"), [(5.0, 2.0), (0.5, 1.0)])
def test_a_read_waits_two_seconds_or_less_where_replies_are_missed_sooner(timeout: float, block: float) -> None:
    assert Bus("redis://127.0.0.1:1", "test/1", timeout=timeout).block == block


async def test_time_is_told_by_the_server_and_what_is_left_counts_from_when_something_was_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monotonic = [50.0]
    monkeypatch.setattr("shared.bus.clock.time.monotonic", lambda: monotonic[0])
    server = Asked([b"5000", b"250000"])
    bus = server.bus()
    await bus.tell_time()
    assert server.heard() == [("TIME",)]
    # an answer to the second try would be late
    assert server.options == [{"retry": False}]
    assert bus.now_ms() == 5_000_250
    assert bus.left(5_010_250, "5000250-0") == 10.0
    # it is told when there is a connection again
    server.replies = [ConnectionLost("gone")]
    await bus.tell_time()
    assert bus.now_ms() == 5_000_250
    monotonic[0], server.replies = 60.0, [[b"8610", b"250000"]]
    await bus.tell_time()
    assert bus.now_ms() == 8_610_250
    # ten seconds have passed, and the clock went forward by an hour
    assert bus.left(5_020_250, "5000250-0") == 10.0
    assert bus.left(8_620_250, "8610250-0") == 10.0
    # what says not when it was accepted was accepted now
    assert bus.left(8_620_250, "nobody knows") == 10.0
    assert bus.left(8_620_250, "") == 10.0


TAKING, HOLDER = ("SET", "office", "me", "NX", "PX", 500), ("GET", "office")


@pytest.mark.parametrize(
    ("ms", "replies", "asked", "has"),
    [
        (500, [None, b"OK"], [HOLDER, TAKING], True),
        (500, [b"me", 1], [HOLDER, ("PEXPIRE", "office", 500)], True),
        # it has gone between the two
        (500, [b"me", 0], [HOLDER, ("PEXPIRE", "office", 500)], False),
        (500, [b"another", 0], [HOLDER, ("PEXPIRE", "office", 60_000, "LT")], False),
        (90_000, [b"another", 1], [HOLDER, ("PEXPIRE", "office", 90_000, "LT")], False),
        # the answer to the first SET was lost
        (500, [None, None, b"me", 1], [HOLDER, TAKING, HOLDER, ("PEXPIRE", "office", 500)], True),
        # somebody else was faster
        (500, [None, None, b"another", 0], [HOLDER, TAKING, HOLDER, ("PEXPIRE", "office", 60_000, "LT")], False),
        (500, [None, None, None, 0], [HOLDER, TAKING, HOLDER, ("PEXPIRE", "office", 60_000, "LT")], False),
    ],
)
async def test_an_office_is_kept_by_who_has_it_and_goes_after_its_time(
    ms: int, replies: list[Any], asked: list[Command], has: bool
) -> None:
    server = Asked(*replies)
    assert await server.bus().lease("office", "me", ms) is has
    assert server.heard() == asked


async def test_the_scripts_that_are_missing_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = [RENEW_CLAIMS, REAP, HAND_OVER]
    monkeypatch.setattr(Script, "known", {script.sha: script for script in scripts})
    server = Asked([[0, 1, 0]], [b"sha", b"sha"])
    await server.bus().keep_scripts()
    asking = [("SCRIPT", "EXISTS", *[script.sha for script in scripts])]
    assert server.heard() == [asking, [("SCRIPT", "LOAD", script.source) for script in (RENEW_CLAIMS, HAND_OVER)]]
    server.replies = [[[1, 1, 1]]]
    await server.bus().keep_scripts()
    assert server.heard() == [asking]


# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────


def message(subject: str, payload: bytes = b"{}", once: str | None = None, deadline: int | None = None) -> Outgoing:
    return Outgoing(Envelope(subject, payload, source="somebody", time=7, deadline=deadline), once)


FIELDS = ["source", "test/1", "time", "7", "correlation_id", "", "session_id", "", "respondent_id", "A"]


async def test_a_message_is_published_with_its_sender_on_the_stream_of_its_subject() -> None:
    server = Asked([b"1-1", b"1-2", b"1-3"])
    cancel, work = message(QUERY_CANCEL.name), message(QUERY_RECEIVED.name)
    assert await server.bus().publish(cancel, cancel, work) == ["1-1", "1-2", "1-3"]
    fields = (*FIELDS, "payload", b"{}")
    assert server.heard() == [
        [
            ("XADD", "local2:query.cancel", "MAXLEN", "~", 1_000, "*", *fields),
            ("XADD", "local2:query.cancel", "*", *fields),
            ("XADD", "local2:query.received", "*", *fields),
        ]
    ]


@pytest.mark.parametrize(("size", "keep"), [(0, 1_000), (31_999, 1_000), (32_001, 999), (32_000_001, 1)])
def test_an_event_stream_keeps_what_it_may_and_of_large_entries_so_many_bytes(size: int, keep: int) -> None:
    command = Asked().bus().publishing(message(QUERY_CANCEL.name, bytes(size)))
    assert command[2:5] == ("MAXLEN", "~", keep)


@pytest.mark.parametrize(
    ("retention", "deadline", "seconds"),
    [
        (100, None, 100),
        (60, None, 60),
        (59, None, 60),
        (100, NOW + 30_999, 130),
        (100, NOW - 5_000, 100),
        (5, NOW + 30_000, 90),
    ],
)
def test_that_a_message_was_published_is_known_until_its_query_is_forgotten(
    retention: int, deadline: int | None, seconds: int
) -> None:
    bus = Asked().bus(NOW, retention=retention)
    told = [] if deadline is None else ["deadline", str(deadline)]
    for subject, bound in ((QUERY_CANCEL, ("MAXLEN", "~", 1_000)), (QUERY_RECEIVED, ())):
        assert bus.publishing(message(subject.name, once="name", deadline=deadline)) == PUBLISH_ONCE(
            (subject.stream, once_key(subject.stream, "name")), seconds, *bound, "*", *FIELDS, *told, "payload", b"{}"
        )


def test_only_event_streams_are_cut_by_what_is_published() -> None:
    assert {subject.name: event_length(subject.name) for subject in SUBJECTS} == {
        subject.name: subject.keep if subject.kind == "event" else None for subject in SUBJECTS
    }
    assert event_length("tool.result.probe") == TOOL_RESULT.keep
    assert event_length("tool.request.probe") is event_length("tool.results") is None


# ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_subjects_are_those_with_a_fixed_name_and_two_of_every_tool() -> None:
    server = Asked([b"web", b"a\xff", b"mail"])
    names = [subject.name for subject in await server.bus().subjects()]
    assert server.heard() == [("SMEMBERS", KNOWN_TOOLS)]
    assert names == [
        *(subject.name for subject in SUBJECTS),
        *(f"{kind}.{tool}" for tool in ("a\ufffd", "mail", "web") for kind in ("tool.request", "tool.result")),
    ]


LENGTH = ("XLEN", WORK)
WRONG = ReplyError("WRONGTYPE it holds another kind of value")


@pytest.mark.parametrize(("name", "backlog"), [("a", 7), ("b", 1), ("nobody", 9)])
async def test_the_backlog_of_a_group_is_what_it_has_not_finished(name: str, backlog: int) -> None:
    server = Asked([[group("a", pending=3, lag=4), group("b", pending=1)]], *([9] if name == "nobody" else []))
    assert await server.bus().backlog(WORK, name) == backlog
    assert server.heard() == [[GROUPS], *([LENGTH] if name == "nobody" else [])]


async def test_where_redis_has_lost_count_of_what_is_unread_it_is_counted() -> None:
    server = Asked([[group("a", pending=3, lag=4), group("b", pending=1, lag=None)]], 2)
    assert await server.bus().backlog(WORK, "b") == 3
    assert server.heard() == [[GROUPS], UNREAD((WORK,), b"6-0")]


async def test_what_is_not_there_or_no_stream_has_no_backlog_and_what_may_not_be_read_is_an_error() -> None:
    for groups, length in ((GONE, 0), (WRONG, WRONG)):
        assert await Asked([groups], length).bus().backlog(WORK, "g") == 0
    refused = ReplyError("NOPERM no permissions to access a key")
    with pytest.raises(ReplyError, match="NOPERM"):
        await Asked([refused], refused).bus().backlog(WORK, "g")


@pytest.mark.parametrize(
    ("entry_id", "pending", "groups", "finished"),
    [
        ("6-0", [], [group("other", "9-0"), group("g", "6-0")], True),
        ("6-1", None, [group("other", "9-0"), group("g", "6-0")], False),
        ("5-9", [], [group("g", "10-0")], True),
        ("6-0", [[b"6-0", b"r1", 5, 1]], [group("g", "6-0")], False),
        # what no group is there for is waited for by nobody
        ("6-0", None, [group("other", "1-0")], True),
        ("6-0", ReplyError("NOGROUP x"), [group("g", "6-0")], True),
        ("6-0", None, ReplyError("ERR no such key"), True),
    ],
)
async def test_an_entry_is_finished_when_its_group_has_read_it_and_it_is_not_pending(
    entry_id: str, pending: Any, groups: Any, finished: bool
) -> None:
    server = Asked([groups], *([] if pending is None else [[pending]]))
    assert await server.bus().finished(WORK, "g", entry_id) is finished
    asking = [] if pending is None else [[("XPENDING", WORK, "g", entry_id, entry_id, 1)]]
    assert server.heard() == [[GROUPS], *asking]


ROWS = [[b"2-0", [b"a", b"b"]], [b"1-0", [b"c", b"de"]]]
FOUND = [("2-0", [b"a", b"b"]), ("1-0", [b"c", b"de"])]


async def test_entries_are_read_between_two_ids_or_from_the_end() -> None:
    server = Asked(ROWS, ROWS, ROWS, ROWS, None)
    bus = server.bus()
    assert [
        await bus.range("s"),
        await bus.range("s", "1-0", "(3-0", 5),
        await bus.latest("s", 2),
        await bus.latest("s", 2, before="(3-0"),
        await bus.range("s", count=0),
    ] == [FOUND] * 4 + [[]]
    assert server.heard() == [
        ("XRANGE", "s", "-", "+"),
        ("XRANGE", "s", "1-0", "(3-0", "COUNT", 5),
        ("XREVRANGE", "s", "+", "-", "COUNT", 2),
        ("XREVRANGE", "s", "(3-0", "-", "COUNT", 2),
        ("XRANGE", "s", "-", "+", "COUNT", 0),
    ]
    assert [size_of(entry) for entry in FOUND] == [2, 3]
    assert entries(None) == []


async def test_what_comes_from_now_on_comes_after_the_newest_entry() -> None:
    for reply, newest in ((ROWS, "2-0"), ([], "0-0"), (ReplyError("WRONGTYPE x"), "0-0")):
        server = Asked(reply)
        assert await server.bus().newest("s") == newest
        assert server.heard() == [("XREVRANGE", "s", "+", "-", "COUNT", 1)]


async def test_a_stream_has_the_groups_that_it_tells() -> None:
    for reply, names in (([group("a"), group("g")], ["a", "g"]), ([], []), (GONE, [])):
        server = Asked([reply])
        assert list(await server.bus().groups(WORK)) == names
        assert server.heard() == [[GROUPS]]
    assert grouping("s", "g") == ("XGROUP", "CREATE", "s", "g", "0", "MKSTREAM")


async def test_a_group_is_absent_when_no_consumer_of_it_gives_a_sign_of_life() -> None:
    names = ["silent", "busy", "gone"]
    server = Asked([[group(name) for name in names]], [0, 2, GONE])
    assert await server.bus().absent(RESPONSE_GENERATION, 500) == ["silent"]
    assert server.heard() == [[GROUPS], [REAP((WORK,), name, 500) for name in names]]


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────


# ── retention ────────────────────────────────────────────────────────────────────────────────────────────────────


def cutting(stream: str, way: str, bound: str | int) -> Command:
    return ("XTRIM", stream, way, "~", bound, "LIMIT", 100)


async def test_an_event_stream_loses_what_is_older_than_the_retention_and_no_dead_letter() -> None:
    server = Asked(100, 30, 0)
    bus = server.bus(NOW, retention=60)
    assert await bus.trim(AGENT_TRANSITION) == 130
    assert server.heard() == [cutting(AGENT_TRANSITION.stream, "MINID", NOW - 60_000)] * 3
    assert await bus.trim(DEAD_LETTER) == 0
    assert server.heard() == []


@pytest.mark.parametrize(
    ("length", "size", "keep"),
    [
        (20_000, None, 10_000),
        (20_000, 32_000_000, 10_000),
        (20_000, 64_000_000, 10_000),
        (50_000, 64_000_000, 10_000),
        (20_000, 128_000_000, 5_000),
        (3, 320_000_000, 1),
    ],
)
@pytest.mark.parametrize("groups", [GONE, [], [group("gone")]])
async def test_a_work_stream_that_nobody_reads_is_bounded_by_length_and_bytes(
    groups: Any, length: int, size: int | None, keep: int
) -> None:
    server = Asked([groups], [length, size], 0)
    assert await server.bus(NOW).trim(RESPONSE_GENERATION, abandoned=["gone"], spare_ms=60_000) == 0
    assert server.heard() == [[GROUPS], BOUND, cutting(WORK, "MAXLEN", keep)]


PENDING = ("XPENDING", WORK, b"b")


@pytest.mark.parametrize(
    ("summary", "abandoned", "oldest"),
    [
        ([2, b"9-5", b"9-9", []], (), "9-5"),
        # what was pending was finished meanwhile
        ([0, None, None, None], (), "10-1"),
        ([1, b"11-0", b"11-0", []], (), "10-4"),
        (None, ["b", "nobody"], "10-4"),
    ],
)
async def test_a_work_stream_keeps_what_a_group_has_not_finished(
    summary: Any, abandoned: list[str], oldest: str
) -> None:
    rows = [group("a", "10-3"), group("b", "10-0", pending=1)]
    asking = [] if summary is None else [PENDING]
    server = Asked([rows], *([summary] if asking else []), 100, 0, 7)
    assert await server.bus(NOW).trim(RESPONSE_GENERATION, abandoned=abandoned) == 107
    cut = cutting(WORK, "MINID", oldest)
    assert server.heard() == [[GROUPS], *asking, cut, cut, ("XTRIM", WORK, "MINID", "=", oldest)]


@pytest.mark.parametrize(
    ("length", "size", "last", "oldest"),
    [
        (OBSERVED, None, NOW, NOW - 60_000),
        (OBSERVED, None, NOW - 70_000, NOW - 70_000),
        (OBSERVED, None, 9, 9),
        (OBSERVED + 1, None, NOW, NOW),
        (OBSERVED, 64_000_000, NOW, NOW),
    ],
)
async def test_what_was_finished_just_now_stays_for_observers_where_it_is_not_much(
    length: int, size: int | None, last: int, oldest: int
) -> None:
    server = Asked([[group("a", f"{last}-0")]], [length, size], 0, 0)
    assert await server.bus(NOW).trim(RESPONSE_GENERATION, spare_ms=60_000) == 0
    bound = f"{oldest}-{int(oldest == last)}"
    assert server.heard() == [
        [GROUPS], BOUND, cutting(WORK, "MINID", bound), ("XTRIM", WORK, "MINID", "=", bound)
    ]  # fmt: skip


def test_ids_behind_which_nothing_would_come_are_left_out() -> None:
    bus = Asked().bus()

    def sane(*ids: str) -> list[str]:
        return [entry_id for entry_id, _ in bus.sane([(entry_id, []) for entry_id in ids])]

    assert sane() == []
    assert sane("1-0", f"{LATE - 1}-9") == ["1-0", f"{LATE - 1}-9"]
    assert sane("1-0", f"{LATE - 1}-0", f"{LATE}-0", f"{LATE}-1") == ["1-0", f"{LATE - 1}-0"]


SHUT = [("XRANGE", "s", f"{LATE}-0", "+", "COUNT", 1), ("XLEN", "s")]
ABOUT = [("XINFO", "STREAM", "s")]
SHUTTING = [[f"{LATE}-0".encode(), []]]


def about(last: str) -> list[Any]:
    return [[b"length", 1, b"last-generated-id", last.encode()]]


@pytest.mark.parametrize(
    ("replies", "asked"),
    [
        ([[ReplyError("WRONGTYPE x"), 0]], [SHUT]),
        ([[[], 5]], [SHUT]),
        ([[[], 0], [GONE]], [SHUT, ABOUT]),
        ([[[], 0], about(f"{LATE - 1}-9")], [SHUT, ABOUT]),
        ([[SHUTTING, 5], about(f"{LATE - 1}-9")], [SHUT, ABOUT]),
    ],
)
async def test_a_stream_that_is_not_shut_is_left_as_it_is(replies: list[Any], asked: list[Any]) -> None:
    server = Asked(*replies)
    assert not await server.bus().unblock_stream("s")
    assert server.heard() == asked


@pytest.mark.parametrize(
    ("first", "kept", "last"),
    [
        ([SHUTTING, 2], [("1-0", [b"a", b"b"]), ("2-0", [b"c", b"d"])], f"{NOW}-0"),
        ([SHUTTING, 1], [(f"{NOW + 5}-3", [b"a", b"b"])], f"{NOW + 5}-3"),
        # the entry that has shut it was deleted
        ([[], 0], [], f"{NOW}-0"),
    ],
)
async def test_a_stream_that_is_shut_is_made_anew_with_what_was_there_before(
    first: list[Any], kept: list[tuple[str, list[bytes]]], last: str
) -> None:
    server = Asked(first, about(f"{LATE}-0"), [[entry_id.encode(), fields] for entry_id, fields in kept], [])
    assert await server.bus(NOW).unblock_stream("s")
    assert server.heard() == [
        SHUT,
        ABOUT,
        ("XRANGE", "s", "-", f"({LATE}-0"),
        [
            ("DEL", "s"),
            ("XGROUP", "CREATE", "s", "nobody", "0", "MKSTREAM"),
            ("XGROUP", "DESTROY", "s", "nobody"),
            *(("XADD", "s", entry_id, *fields) for entry_id, fields in kept),
            ("XSETID", "s", last),
        ],
    ]
