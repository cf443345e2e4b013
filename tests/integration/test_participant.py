"""The frame of a participant on a real Redis: registry entry, settings, observers, subscriptions, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest
import redis
from structlog.contextvars import get_contextvars
from support.services import announced, child, running
from support.waiting import eventually

from shared.bus.keys import inbox_key, schema_key, settings_key
from shared.contracts import (
    DEAD_LETTER,
    QUERY_CANCEL,
    RESPONSE_GENERATION,
    SETTINGS_UPDATE,
    USER_FEEDBACK,
    Outgoing,
    QueryCancel,
    ResponseGeneration,
    SettingsUpdate,
    UserFeedback,
    encode,
)
from shared.envelope import Message
from shared.participant.registry import Registry, ReplicaInfo
from shared.participant.service import Context, Service, Subscription, Work, open_context
from shared.participant.settings import Settings
from shared.telemetry.logging import get_logger, show_from

RESPONSE = ResponseGeneration(
    query_id="1-1", response_id="1-1:A", session_id="s", user_id="u", respondent_id="A", generator_id="g",
    query="q", answer="a", model="m", finish_reason="stop",
)  # fmt: skip
FEEDBACK = UserFeedback(query_id="1-1", session_id="s", user_id="u", sentiment="positive")


class Probing(Settings):
    runtime: ClassVar[frozenset[str]] = frozenset({"log_level", "greeting", "concurrency"})

    greeting: str = "hello"
    concurrency: int = 3


@pytest.fixture
def probing(redis_url: str, tmp_path: Path) -> Probing:
    return Probing(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.2, drain=2.0)


async def told(context: Context[Any], participant: str = "probe") -> ReplicaInfo | None:
    """Return the registry entry of the participant's only replica."""
    found = await Registry(context.bus, 0.0).live(participant)
    return found[0] if found else None


def keep(raw: redis.Redis, **values: Any) -> None:
    raw.hset(settings_key("probe"), mapping={name: orjson.dumps(value) for name, value in values.items()})


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_participant_stored_settings_count_one_by_one(probing: Probing, raw: redis.Redis) -> None:
    keep(raw, greeting="kept", concurrency="many", gone=1, log_level="error")
    try:
        async with open_context("probe", probing) as context:
            assert (context.settings.greeting, context.settings.concurrency) == ("kept", 3)
            assert get_logger().get_effective_level() == logging.ERROR
            described = orjson.loads(raw.get(schema_key("probe")))
        assert set(described["schema"]["properties"]) == set(Probing.runtime)
        assert (described["defaults"]["greeting"], described["defaults"]["concurrency"]) == ("hello", 3)
    finally:
        show_from("warning")


@pytest.mark.parametrize(
    ("values", "greeting"),
    [({"greeting": "a"}, "a"), ({"greeting": 5}, "hello"), ({"heartbeat": 5.0, "greeting": "a"}, "hello")],
    ids=["valid", "wrong type", "not a run-time setting"],
)
async def test_participant_applies_valid_updates_of_its_own_settings(
    values: dict[str, Any], greeting: str, probing: Probing
) -> None:
    heard: list[tuple[str, int]] = []

    async def changed(settings: Probing) -> None:
        heard.append((settings.greeting, settings.concurrency))

    async with open_context("probe", probing) as context:
        for _ in range(2):
            context.on_settings(changed)
        updates = [("another", {"greeting": "b"}), ("probe", values), ("probe", {"concurrency": 9})]
        await context.bus.publish(
            *[SETTINGS_UPDATE.of(SettingsUpdate(participant=name, values=each)) for name, each in updates]
        )
        await eventually(lambda: heard[-2:] == [(greeting, 9)] * 2)
        assert heard[:-2] == ([(greeting, 3)] * 2 if greeting == "a" else [])


# ── what it says of itself ───────────────────────────────────────────────────────────────────────────────────────


class Judge:
    """A participant that publishes feedback on each response, and stops where the test holds it."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.started = 0
        self.query_ids: list[str] = []
        self.service = Service("probe", Probing, self._build)

    async def _judge(self, message: Message[ResponseGeneration]) -> Iterable[Outgoing]:
        self.query_ids.append(get_contextvars()["query_id"])
        self.started += 1
        await self.go_on.wait()
        if message.payload.answer == "bad":
            raise ValueError("a bug")
        return [USER_FEEDBACK.of(FEEDBACK)] * 2

    async def _give_up(self, message: Message[ResponseGeneration], reason: str) -> Iterable[Outgoing]:
        return [USER_FEEDBACK.of(UserFeedback(**{**vars_of(FEEDBACK), "comment": reason}))]

    @contextlib.asynccontextmanager
    async def _build(self, _context: Context[Probing]) -> AsyncIterator[Sequence[Work]]:
        yield [Subscription(RESPONSE_GENERATION, self._judge, self._give_up)]


def vars_of(feedback: UserFeedback) -> dict[str, Any]:
    return {name: getattr(feedback, name) for name in ("query_id", "session_id", "user_id", "sentiment")}


async def test_participant_tells_its_load_and_its_end(probing: Probing, redis_url: str) -> None:
    judge = Judge()
    judge.go_on.clear()
    async with open_context("asker", probing) as asker:
        async with running(judge.service, probing):
            await announced(redis_url, "probe")
            await asker.bus.publish(*[RESPONSE_GENERATION.of(RESPONSE)] * 2)

            async def busy() -> bool:
                info = await told(asker)
                return info is not None and (info.in_flight, info.concurrency) == (2, 3)

            await eventually(busy)
            await asker.bus.publish(SETTINGS_UPDATE.of(SettingsUpdate(participant="probe", values={"concurrency": 5})))

            async def resized() -> bool:
                info = await told(asker)
                return info is not None and info.concurrency == 5

            await eventually(resized)
            judge.go_on.set()

            async def finished() -> bool:
                info = await told(asker)
                return info is not None and (info.in_flight, info.handled, info.state) == (0, 2, "ready")

            await eventually(finished)
            judge.go_on.clear()
            await asker.bus.publish(RESPONSE_GENERATION.of(RESPONSE))
            await eventually(lambda: judge.started == 3)

            async def draining() -> bool:
                info = await told(asker)
                return info is not None and info.state == "draining"

            async def release() -> None:
                await eventually(draining)
                judge.go_on.set()

            releasing = asyncio.create_task(release())
        await releasing
        assert await told(asker) is None


async def test_participant_heartbeat_restores_what_a_flush_removed(probing: Probing, raw: redis.Redis) -> None:
    async with open_context("probe", probing) as context:
        raw.flushall()
        await eventually(lambda: raw.exists(schema_key("probe")) and raw.exists(inbox_key("probe", context.replica)))

        async def there() -> bool:
            return await told(context) is not None

        await eventually(there)
        # each of both alone
        for key in (schema_key("probe"), inbox_key("probe", context.replica)):
            raw.delete(key)
            await eventually(lambda key=key: raw.exists(key))
        await context.presence.describe(b'{"new":1}')
        assert raw.get(schema_key("probe")) == b'{"new":1}'


async def test_participant_heartbeat_goes_on_after_its_index_is_damaged(probing: Probing, raw: redis.Redis) -> None:
    async with open_context("probe", probing) as context:
        raw.set("local2:replicas", "not an index")

        async def there() -> bool:
            return raw.type("local2:replicas") == b"zset" and await told(context) is not None

        await eventually(there)


# ── what it reads ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_subscription_publishes_what_its_handler_returns(
    probing: Probing, redis_url: str, raw: redis.Redis
) -> None:
    judge = Judge()
    async with running(judge.service, probing):
        await announced(redis_url, "probe")
        raw.xadd(RESPONSE_GENERATION.stream, {"payload": encode(RESPONSE), "correlation_id": "7-0"})
        await eventually(lambda: raw.xlen(USER_FEEDBACK.stream) == 2)
        assert raw.xpending(RESPONSE_GENERATION.stream, "probe")["pending"] == 0
    assert judge.query_ids == ["7-0"]


async def test_subscription_publishes_for_an_entry_that_is_given_up(
    probing: Probing, redis_url: str, raw: redis.Redis
) -> None:
    bad = ResponseGeneration(**{**orjson.loads(encode(RESPONSE)), "answer": "bad"})
    async with running(Judge().service, probing.model_copy(update={"max_deliveries": 1})):
        await announced(redis_url, "probe")
        raw.xadd(RESPONSE_GENERATION.stream, {"payload": encode(bad)})
        await eventually(lambda: raw.xlen(DEAD_LETTER.stream) == 1)
    ((_, fields),) = raw.xrange(USER_FEEDBACK.stream)
    assert "a bug" in orjson.loads(fields[b"payload"])["comment"]


async def test_participant_reads_work_that_is_added_while_it_runs(
    probing: Probing, redis_url: str, raw: redis.Redis
) -> None:
    found: list[str] = []

    async def note(message: Message[QueryCancel]) -> Iterable[Outgoing]:
        found.append(message.payload.query_id)
        return ()

    contexts: list[Context[Probing]] = []

    @contextlib.asynccontextmanager
    async def build(context: Context[Probing]) -> AsyncIterator[Sequence[Work]]:
        contexts.append(context)
        yield []

    async with running(Service("probe", Probing, build), probing):
        await announced(redis_url, "probe")
        await contexts[0].serve([Subscription(QUERY_CANCEL, note)])
        raw.xadd(QUERY_CANCEL.stream, {"payload": encode(QueryCancel(query_id="9-1"))})
        await eventually(lambda: found == ["9-1"])


@pytest.mark.parametrize("from_the_start", [False, True])
async def test_observer_goes_on_after_a_malformed_entry_and_a_failure(
    from_the_start: bool, probing: Probing, raw: redis.Redis
) -> None:
    seen: list[str] = []

    async def handle(message: Message[QueryCancel]) -> None:
        seen.append(message.payload.query_id)
        raise RuntimeError("a bug")

    def cancel(query_id: str) -> None:
        raw.xadd(QUERY_CANCEL.stream, {"payload": encode(QueryCancel(query_id=query_id))})

    cancel("before")
    async with open_context("probe", probing) as context:
        context.observe(QUERY_CANCEL, handle, **({"after": "0-0"} if from_the_start else {}))
        if from_the_start:
            await eventually(lambda: seen == ["before"])

        async def heard() -> bool:
            cancel("first")
            return "first" in seen

        await eventually(heard)
        raw.xadd(QUERY_CANCEL.stream, {"payload": "}"})
        cancel("last")
        await eventually(lambda: "last" in seen)
        assert ("before" in seen) is from_the_start


# ── start and end ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_participant_with_a_wrong_setting_ends_with_status_2(redis_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with child("probe", redis_url, log=log, LOCAL2_HEARTBEAT="soon") as started:
        assert await started.ended(30) == 2
    assert "\nlocal2: settings of probe: heartbeat (LOCAL2_HEARTBEAT): " in f"\n{log.read_text()}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_participant_ends_on_signal(number: signal.Signals, redis_url: str) -> None:
    with child("probe", redis_url) as started:
        await announced(redis_url, "probe")
        started.send(number)
        assert await started.ended(20) == 0


async def test_participant_waits_for_room_in_redis_if_patient(probing: Probing, raw: redis.Redis) -> None:
    used = raw.info("memory")["used_memory"]
    raw.config_set("maxmemory", used // 2)
    raw.config_set("maxmemory-policy", "noeviction")
    try:
        async with open_context("asker", probing, patient=False) as context:
            waiting = asyncio.create_task(_opened(probing))
            await eventually(lambda: context.presence.full)
            assert not waiting.done()
            raw.config_set("maxmemory", 0)
            await asyncio.wait_for(waiting, 20)
            await eventually(lambda: context.presence.full is None)
    finally:
        raw.config_set("maxmemory", 0)


async def _opened(settings: Settings) -> None:
    async with open_context("probe", settings):
        pass
