"""Deleted is gone: a word that stood everywhere is looked for in every file, key, export and backup made afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from support.backups import run_local2
from support.http_gateway import ADMIN_KEY, Site, gateway_settings, serving
from support.knowledge import knowledge_settings
from support.memories import memory_settings
from support.on_disk import having
from support.redis_servers import unsynced
from support.services import announced, running
from support.stack import Stage, respondent, stage
from support.waiting import PATIENCE, eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.critic.service import app as critic
from services.critic.settings import CriticSettings
from services.generator.settings import GeneratorSettings
from services.knowledge.service import app as knowledge
from services.memory.service import app as memory
from services.reward.service import app as reward
from services.reward.settings import RewardSettings
from shared.contracts import QUERY_FORGET, QueryForget
from shared.envelope import now_ms
from shared.participant.registry import Registry
from shared.testing.model_server import Rules

# Seconds; a free machine needs less than one. Four times as long is far below the time limit of a test.
QUIET_SECONDS = 12
# Each deletion has its own; one that nobody deletes shows that everything was there to be found.
WORDS = ("Xylographia", "Quetzalby", "Zugzwangen", "Kumquatia")
RULES: Rules = [
    *(
        rule
        for word in WORDS
        for rule in (
            {"when": {"user": f"###Response B:[\\s\\S]*{word}"}, "respond": {"text": f"The first, {word}. [RESULT] A"}},
            {"when": {"user": f"###Score Rubrics[\\s\\S]*{word}"}, "respond": {"text": f"Right, {word}. [RESULT] 4"}},
        )
    ),
    {"when": {"user": "###Response B:"}, "respond": {"text": "The first. [RESULT] A"}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Right. [RESULT] 4"}},
    *(
        rule
        for word in WORDS
        for rule in (
            {
                "when": {"user": f"^keep {word}", "tool_results": 0},
                "respond": {
                    "thinking": word,
                    "tool_calls": [
                        {"name": "save_topic", "args": {"topic": f"user.{word}", "content": f"Lives in {word}."}},
                        {"name": "save_memory", "args": {"content": f"There is a {word}."}},
                        {"name": "probe", "args": {"text": word}},
                    ],
                },
            },
            {"when": {"user": word}, "respond": {"thinking": f"So {word}.", "text": f"{word} is a fine place."}},
        )
    ),
    {"respond": {"text": "Yes."}},
]


def of(word: str) -> str:
    """The session that has the word."""
    return f"session-{WORDS.index(word)}"


@dataclass
class House:
    site: Site
    stage: Stage
    raw: redis.Redis
    folder: Path
    server: EmbeddedRedis
    keepers: contextlib.AsyncExitStack

    async def ask(self, query: str, session: str) -> str:
        body, key = {"query": query, "session_id": session}, {"Idempotency-Key": uuid.uuid4().hex}

        async def taken() -> httpx.Response | None:
            # on a busy machine Redis may wait for the disk for longer than the gateway waits for Redis
            told = await self.site.http.post("/query?wait=false", json=body, headers=key)
            return None if told.status_code == 503 else told

        asked = await eventually(taken)
        assert asked.status_code == 202, asked.text
        query_id = str(asked.json()["query_id"])
        await self.stage.ended(query_id)
        return query_id

    async def tell(self, word: str, session: str) -> list[str]:
        """A conversation with the word everywhere in it, rated; and what came before and after it without."""
        asked = [
            await self.ask(f"keep {word} in mind", session),
            await self.ask(f"I live in {word}.", session),
            await self.ask("Is that so?", session),
        ]
        rated = {"query_id": asked[1], "stars": 5, "comment": f"{word}!"}
        assert (await self.site.http.post("/feedback", json=rated)).status_code == 202
        return asked

    async def quiet(self) -> None:
        """Wait until every group has finished its entries; fail with the pending entries and the live participants."""
        registry, left = Registry(self.stage.bus, heartbeat=0), list[str]()

        async def done() -> bool:
            left[:] = []
            for subject in await self.stage.bus.subjects():
                if subject.kind == "work":
                    await self.stage.bus.trim(subject)
                    left.extend(unfinished(self.raw, subject.stream))
            there = {one.participant: one for one in await registry.replicas(fresh=True)}
            left.extend(f"{name} is not there" for name in ("memory", "knowledge", "reward") if name not in there)
            if left:
                left.extend(f"{name}: {one.state}, holds {one.in_flight}, {one.facts}" for name, one in there.items())
            return not left

        with contextlib.suppress(AssertionError):
            await eventually(done, QUIET_SECONDS, every=0.1)
        assert not left, "\n".join([f"not finished within {PATIENCE * QUIET_SECONDS:g} s:", *left, *waiting_tasks()])

    async def away(self) -> None:
        await self.keepers.aclose()

    async def back(self) -> None:
        await keep(self.keepers, self.server.url, self.folder, self.stage)

    def files(self, word: str) -> list[str]:
        """Files of the data folder that have the word, in whatever case."""
        return having(word, self.folder)

    async def vanishes(self, word: str, but: str = "nothing") -> None:
        """Wait until no file has the word any more, except some and Chroma's own, which its compaction frees."""
        left: list[str] = []

        def gone() -> bool:
            left[:] = [file for file in self.files(word) if not file.startswith((but, "chroma/"))]
            return not left

        with contextlib.suppress(AssertionError):
            await eventually(gone, 20, every=0.2)
        assert left == []

    def keys(self, word: str) -> list[str]:
        return sorted(name for name, text in dump(self.raw) if word.lower().encode() in text.lower())

    async def told(self, word: str) -> list[str]:
        """Exports, lists and searches that tell it."""
        http, found = self.site.http, []
        for path in (
            "/memory/export", "/memory/engrams", "/memory/topics", f"/memory?query={word}", "/sessions",
            "/preferences/export?format=dpo", "/preferences/export?format=kto",
            "/preferences/export?format=critiques", "/knowledge/export", "/knowledge/facts", "/knowledge/entities",
        ):  # fmt: skip
            answer = await http.get(path)
            assert answer.status_code == 200, (path, answer.text)
            text = answer.text.lower().replace(f'"query":"{word.lower()}"', "") if "query=" in path else answer.text
            if word.lower() in text.lower():
                found.append(path)
        return found

    async def in_backup(self, word: str, folder: Path) -> bool:
        file = folder / f"{uuid.uuid4().hex}.backup"
        done = await asyncio.to_thread(run_local2, self.site.url, ADMIN_KEY, "backup", str(file))
        assert done.exit_code == 0, done.output
        return word.lower().encode() in gzip.decompress(file.read_bytes()).lower()

    async def in_append_only_file(self, word: str) -> list[str]:
        """Once it was written anew, as commands: a snapshot of streams has whole blocks of entries, also of those that
        were deleted among others."""
        self.raw.delete("effects")
        self.raw.config_set("aof-use-rdb-preamble", "no")
        self.raw.bgrewriteaof()

        def written() -> bool:
            about = self.raw.info("persistence")
            return not about["aof_rewrite_in_progress"] and not about["aof_rewrite_scheduled"]

        await eventually(written, 20, "the append-only file is written anew")
        return having(word, Path(self.raw.config_get("dir")["dir"]))


def unfinished(raw: redis.Redis, stream: str) -> list[str]:
    """Return a line for each unfinished group of a stream, and for each of its pending entries."""
    lines: list[str] = []
    for group in raw.xinfo_groups(stream) if raw.exists(stream) else ():
        if not group["pending"] and not group["lag"]:
            continue
        name = group["name"].decode()
        told = " ".join(f"{key}={value!r}" for key, value in group.items() if key != "name")
        lines.append(f"{stream} {name}: {told} length={raw.xlen(stream)}")
        for row in raw.xpending_range(stream, name, "-", "+", 10):
            entry_id = row["message_id"].decode()
            payload = str(raw.xrange(stream, entry_id, entry_id))[:200]
            consumer, idle = row["consumer"].decode(), row["time_since_delivered"]
            lines.append(f"  {entry_id} at {consumer}, idle {idle} ms, delivery {row['times_delivered']}: {payload}")
    return lines


def waiting_tasks() -> list[str]:
    """Return where each handler of an entry waits, innermost frame last: all participants are in this process."""
    lines: list[str] = []
    for task in asyncio.all_tasks():
        if "Consumer._handle" in repr(task.get_coro()):
            coroutine, places = task.get_coro(), list[str]()
            while coroutine is not None and (frame := getattr(coroutine, "cr_frame", None)) is not None:
                places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                coroutine = getattr(coroutine, "cr_await", None)
            lines.append(f"  a handler waits: {' > '.join(places)}")
    return lines


def dump(raw: redis.Redis) -> Iterator[tuple[str, bytes]]:
    """Everything in Redis, key by key, with where it is."""
    reading: dict[bytes, Any] = {
        b"string": raw.get,
        b"hash": raw.hgetall,
        b"set": raw.smembers,
        b"zset": lambda key: raw.zrange(key, 0, -1),
        b"stream": raw.xrange,
        # it has gone meanwhile
        b"none": lambda _key: "",
    }
    for key in raw.scan_iter(count=1_000):
        # the tests' own count of what the tool did
        if key != b"effects":
            yield key.decode(), key + repr(reading[raw.type(key)](key)).encode()


async def keep(stack: contextlib.AsyncExitStack, url: str, folder: Path, on: Stage) -> None:
    """Memory, knowledge and reward."""
    host = on.server.url
    for app, settings in (
        (memory, memory_settings(url, folder, host, erase_after=0)),
        (knowledge, knowledge_settings(url, folder, host)),
        (reward, RewardSettings(redis_url=url, data_dir=folder, heartbeat=0.5, drain=0.5, patience=2)),
    ):
        await stack.enter_async_context(running(app, settings))
    for name in ("memory", "knowledge", "reward"):
        await announced(url, name, timeout=30)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """Everybody who keeps something of a conversation."""
    folder = tmp_path / "data"
    folder.mkdir()
    with unsynced(tmp_path / "redis") as server, redis.Redis.from_url(server.url) as raw:
        url = server.url
        async with (
            stage(url, RULES, probes=1) as on,
            contextlib.AsyncExitStack() as stack,
            contextlib.AsyncExitStack() as keepers,
        ):
            shadow = GeneratorSettings(**on.settings.model_dump() | {"respondent_id": "B"})
            judge: dict[str, Any] = {"redis_url": url, "heartbeat": 1, "drain": 0.5, "yield_rest": 0}
            await stack.enter_async_context(running(respondent(shadow), shadow))
            await stack.enter_async_context(
                running(critic, CriticSettings(**judge, ollama_host=on.server.url, skip_tool_answers=False))
            )
            await keep(keepers, url, folder, on)
            site = await stack.enter_async_context(serving(gateway_settings(url, folder)))
            for name in ("respondent-b", "critic"):
                await announced(url, name)
            yield House(site, on, raw, folder, server, keepers)


async def test_of_what_is_deleted_no_word_is_left_anywhere(house: House, tmp_path: Path) -> None:
    session, engram, taken_back, stays = WORDS
    for word in WORDS:
        asked = await house.tell(word, of(word))
        if word == engram:
            gone_engrams = asked
        elif word == taken_back:
            gone_queries = asked[:2]
    await house.quiet()
    for word in WORDS:
        places = house.files(word)
        for part in ("chroma/chroma.sqlite3", "chroma-words/", "preferences.sqlite", "knowledge"):
            assert any(place.startswith(part) for place in places), (word, part, places)
        assert house.keys(word)
        told = await house.told(word)
        assert {"/memory/export", "/memory/topics", "/sessions", "/knowledge/facts"} <= set(told), (word, told)
    assert "/preferences/export?format=kto" in await house.told(session)

    # a session
    assert (await house.site.http.delete(f"/sessions/{of(session)}")).status_code == 200
    # the engrams of turns, and what was saved in them; the conversation itself is there until its session is deleted
    for line in (await house.site.http.get("/memory/engrams?limit=200")).json()["engrams"]:
        if line["session_id"] == of(engram) and (line["query_id"] in gone_engrams[:2]):
            # of one query's answers, deleting one deletes the others
            assert (await house.site.http.delete(f"/memory/engrams/{line['id']}")).status_code in (200, 404)
    # turns that a client has edited away: the session was brought to what it sent, and everybody is told
    await house.stage.sessions.bring(of(taken_back), gone_queries, [])
    back = QueryForget(user_id="admin", session_id=of(taken_back), queries=gone_queries, at=now_ms())
    await house.stage.bus.publish(QUERY_FORGET.of(back, user_id="admin", session_id=of(taken_back)))
    await house.quiet()

    await house.vanishes(session)
    assert house.keys(session) == []
    assert await house.in_append_only_file(session) == []
    assert await house.told(session) == []
    assert not await house.in_backup(session, tmp_path)

    # what the memory and the knowledge kept of it, and nothing of the conversation itself
    await house.vanishes(engram, but="preferences")
    assert not any("memory:" in key for key in house.keys(engram))
    kept = set(await house.told(engram))
    assert all(path.startswith(("/preferences", "/sessions")) for path in kept), kept

    await house.vanishes(taken_back)
    assert not set(await house.told(taken_back)) - {"/sessions"}

    # and of others everything is there
    assert {"/memory/export", "/memory/topics", "/sessions", "/knowledge/facts"} <= set(await house.told(stays))
    assert await house.in_backup(stays, tmp_path)


async def test_what_is_deleted_while_its_keepers_are_away_goes_when_they_are_back(house: House) -> None:
    session, stays = WORDS[0], WORDS[3]
    for word in (session, stays):
        await house.tell(word, of(word))
    await house.quiet()
    await house.away()
    assert house.files(session)
    assert (await house.site.http.delete(f"/sessions/{of(session)}")).status_code == 200
    await house.back()
    await house.quiet()
    await house.vanishes(session)
    assert house.keys(session) == []
    assert "/memory/export" in await house.told(stays)
