"""An entry that cannot be handled becomes a dead letter once; an operator can inspect, replay and drop it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from support.consuming import GROUP, STREAM, consuming
from support.services import running
from support.slots import nothing_to_end, uncounted
from support.waiting import eventually

from shared.bus import Bus, Command, Delivery
from shared.bus.dead_letters import dead_letter_command, drop_forged, forged, idempotency_key, replay
from shared.bus.keys import DEAD_LETTER_VERIFIED_UP_TO, once_key
from shared.bus.slots import Slots
from shared.contracts import (
    CRITIQUE_RESULT,
    DEAD_LETTER,
    PAIRWISE_RESULT,
    QUERY_RECEIVED,
    RESPONSE_GENERATION,
    REWARD_EVENT,
    TOOL_REQUEST,
    USER_FEEDBACK,
    CritiqueResult,
    DeadLetter,
    PairwiseResult,
    QueryReceived,
    ResponseGeneration,
    RewardEvent,
    Subject,
    ToolRequest,
    UserFeedback,
    encode,
)
from shared.envelope import Envelope, Message
from shared.errors import PermanentError
from shared.participant.service import Context, Service, Subscription
from shared.participant.settings import Settings

DEAD = DEAD_LETTER.stream


def letters(raw: redis.Redis) -> list[DeadLetter]:
    rows = raw.xrange(DEAD)
    return [DEAD_LETTER.decode(Envelope.parse("dead.letter", i.decode(), flat(fields))) for i, fields in rows]


def given_up(bus: Bus, entry_id: str, fields: list[bytes], group: str = GROUP) -> Command:
    """Return the command that writes the dead letter of an entry."""
    slots = Slots(1, {STREAM: None}, 5, nothing_to_end, uncounted)
    return dead_letter_command(bus, group, Delivery(STREAM, entry_id, fields, 5, slots), "why")


def flat(fields: dict[bytes, bytes]) -> list[bytes]:
    return [part for pair in fields.items() for part in pair]


GOOD: dict[Subject[Any], Any] = {
    QUERY_RECEIVED: QueryReceived(session_id="s", query="q", user_id="u"),
    TOOL_REQUEST.for_tool("probe"): ToolRequest(query_id="1-1", call_id="c", tool="probe", args={}),
    RESPONSE_GENERATION: ResponseGeneration(
        query_id="1-1", response_id="1-1:A", session_id="s", user_id="u", respondent_id="A", generator_id="g",
        query="q", answer="a", model="m", finish_reason="stop",
    ),
    CRITIQUE_RESULT: CritiqueResult(
        query_id="1-1", response_id="1-1:A", session_id="s", respondent_id="A", feedback="f", rubric="r", query="q",
        answer="a",
    ),
    PAIRWISE_RESULT: PairwiseResult(
        original_query_id="1-1", query_id_a="a", query_id_b="b", winner="tie", reason="r", config_a={}, config_b={},
        session_id="s",
    ),
    USER_FEEDBACK: UserFeedback(query_id="1-1", session_id="s", user_id="u", sentiment="positive"),
    REWARD_EVENT: RewardEvent(
        query_id="1-1", response_id="1-1:A", respondent_id="A", reward=1, source="user", config={}
    ),
}  # fmt: skip

MALFORMED: list[dict[bytes, bytes]] = [
    {b"something": b"else"},
    {b"payload": b""},
    {b"payload": b"{"},
    {b"payload": b"null"},
    {b"payload": b"[]"},
    {b"payload": b"\xff\xfe\x00"},
    {b"payload": b'{"query_id": 7}'},
    {b"payload": b"[" * 5_000},
    {b"payload": b"{}", b"deadline": b"soon"},
    {b"payload": b"{}", b"time": b"\xf0\x28"},
]


@pytest.mark.parametrize("subject", GOOD, ids=lambda subject: subject.name)
async def test_service_dead_letters_malformed_and_handles_good_entries(
    subject: Subject[Any], settings: Settings, raw: redis.Redis
) -> None:
    handled: list[str] = []

    async def handle(message: Message[Any]) -> list[Any]:
        handled.append(message.entry_id)
        return []

    @asynccontextmanager
    async def build(context: Context[Settings]) -> AsyncIterator[list[Subscription[Any]]]:
        yield [Subscription(subject, handle)]

    bad, good = [], []
    for fields in MALFORMED:
        bad.append(raw.xadd(subject.stream, fields).decode())
        good.append(raw.xadd(subject.stream, {"payload": encode(GOOD[subject])}).decode())
    async with running(Service("probe", Settings, build), settings):
        await eventually(lambda: raw.xlen(DEAD) >= len(bad), timeout=20)
        await eventually(lambda: raw.xpending(subject.stream, "probe")["pending"] == 0)
    found = letters(raw)
    assert sorted(letter.entry_id for letter in found) == sorted(bad)
    assert sorted(handled) == sorted(good)
    for letter in found:
        assert letter.stream == subject.stream
        assert letter.group == "probe"
        assert letter.deliveries == 1
        assert "malformed" in letter.reason or "no field 'payload'" in letter.reason


@pytest.mark.parametrize("rest", [b"{}", b"\xff"], ids=["text", "binary"])
async def test_a_query_that_is_put_back_has_lost_the_turn_that_it_had(rest: bytes, bus: Bus, raw: redis.Redis) -> None:
    await bus.link.call(*given_up(bus, "1-1", [b"turn", b"A", b"payload", rest]))
    ((dead_id, _),) = raw.xrange(DEAD)
    replayed = await replay(bus, dead_id.decode())
    assert replayed is not None
    assert (await bus.range(STREAM, replayed, replayed))[0][1] == [b"payload", rest]


async def test_the_same_entry_is_set_aside_once_however_often_it_is_buried(bus: Bus, raw: redis.Redis) -> None:
    for _ in range(3):
        await bus.link.call(*given_up(bus, "1-1", [b"payload", b"x"]))
    await bus.link.call(*given_up(bus, "1-1", [b"payload", b"x"], "another"))
    assert [letter.group for letter in letters(raw)] == [GROUP, "another"]


# ── letters that nobody vouches for ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def witnessed(bus: Bus) -> Bus:
    """A bus whose server has users, of whom some forge letters."""
    bus.users = True
    return bus


def forge(raw: redis.Redis, entry_id: str) -> str:
    """A letter as the bus would write it, without a note that it has."""
    letter = DeadLetter(stream=STREAM, group=GROUP, entry_id=entry_id, deliveries=5, reason="why", fields={})
    return str(raw.xadd(DEAD, {"payload": letter.model_dump_json()}).decode())


async def set_aside(bus: Bus, entry_id: str) -> str:
    written = await bus.link.call(*given_up(bus, entry_id, [b"payload", b"x"]))
    return str(written.decode())


def ids(raw: redis.Redis) -> list[str]:
    return [entry_id.decode() for entry_id, _ in raw.xrange(DEAD)]


@pytest.mark.parametrize("said", [None, "nonsense", "1-1 "])
async def test_the_letters_that_are_there_before_the_first_look_count_as_genuine(
    said: str | None, witnessed: Bus, raw: redis.Redis
) -> None:
    if said is not None:
        raw.set(DEAD_LETTER_VERIFIED_UP_TO, said)
    await drop_forged(witnessed)
    assert raw.get(DEAD_LETTER_VERIFIED_UP_TO) == b"0-0"
    raw.set(DEAD_LETTER_VERIFIED_UP_TO, said) if said else raw.delete(DEAD_LETTER_VERIFIED_UP_TO)
    found = [forge(raw, "1-1"), forge(raw, "2-1")]
    await drop_forged(witnessed)
    assert ids(raw) == found
    assert raw.get(DEAD_LETTER_VERIFIED_UP_TO) == found[-1].encode()


async def test_every_forged_letter_goes_however_many_there_are_and_nothing_else(
    witnessed: Bus, raw: redis.Redis
) -> None:
    await drop_forged(witnessed)
    genuine = [await set_aside(witnessed, "1-1")]
    for number in range(150):
        forge(raw, f"{number}-2")
    # nobody can replay it: it is somebody else's who looks at it
    unread = raw.xadd(DEAD, {"payload": "no json"}).decode()
    forge(raw, "3-1")
    genuine.append(await set_aside(witnessed, "4-1"))
    await drop_forged(witnessed)
    assert ids(raw) == [genuine[0], unread, genuine[1]]
    assert raw.get(DEAD_LETTER_VERIFIED_UP_TO) == genuine[1].encode()
    # one alone
    forge(raw, "5-1")
    await drop_forged(witnessed)
    assert ids(raw) == [genuine[0], unread, genuine[1]]
    # a note goes after a while, and what was looked at in time stays genuine
    raw.delete(once_key(DEAD, f"{STREAM}:{GROUP}:1-1"), once_key(DEAD, f"{STREAM}:{GROUP}:4-1"))
    await drop_forged(witnessed)
    assert ids(raw) == [genuine[0], unread, genuine[1]]


async def test_a_letter_is_vouched_for_by_its_own_note_as_long_as_nobody_has_looked(
    witnessed: Bus, raw: redis.Redis, capfd: pytest.CaptureFixture[str]
) -> None:
    genuine = await set_aside(witnessed, "1-1")
    fake = forge(raw, "2-1")
    # the note names another letter than this one
    copy = forge(raw, "1-1")
    unread = raw.xadd(DEAD, {"payload": "no json"}).decode()
    letters = await witnessed.range(DEAD)
    assert [entry_id for entry_id, _ in letters] == [genuine, fake, copy, unread]
    for said in (None, "nonsense"):
        if said is not None:
            raw.set(DEAD_LETTER_VERIFIED_UP_TO, said)
        # what cannot be read keeps none behind it from being asked for
        assert await forged(witnessed, [letters[3], *letters[:3]]) == [fake, copy]
    assert f'"stream": "{DEAD}", "entry_id": "{unread}"' in capfd.readouterr().err
    # what was looked at, and was not removed then, is asked for no more
    raw.set(DEAD_LETTER_VERIFIED_UP_TO, fake)
    assert await forged(witnessed, letters) == [copy]
    raw.set(DEAD_LETTER_VERIFIED_UP_TO, copy)
    assert await forged(witnessed, letters) == []


def test_a_letter_is_named_after_its_entry() -> None:
    letter = DeadLetter(stream="s", group="g", entry_id="1-1", deliveries=5, reason="why", fields={})
    assert idempotency_key(letter) == "s:g:1-1"


async def test_refused_dead_letter_leaves_its_entry_pending(redis_url: str, raw: redis.Redis) -> None:
    raw.set(DEAD, "not a stream")
    tries: list[int] = []

    async def handler(delivery: Delivery) -> list[Any]:
        tries.append(delivery.deliveries)
        raise PermanentError("no such thing")

    def deliveries() -> list[int]:
        return [row["times_delivered"] for row in raw.xpending_range(STREAM, GROUP, "-", "+", 9)]

    raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    async with consuming(redis_url, handler, heartbeat=0.05, max_deliveries=3):
        raw.xadd(STREAM, {"payload": "x"})
        # More than the limit, so that no replica runs the handler again.
        await eventually(lambda: deliveries() and deliveries()[0] > 3)
        raw.delete(DEAD)
        await eventually(lambda: raw.xlen(DEAD) == 1)
        await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
    assert tries == [1]
