"""What is old goes once a number of days is set: shown before, by the forgetting of a deletion, and nothing else."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from support.command_line import local2
from support.http_gateway import gateway_settings, serving
from support.memories import remembering
from support.waiting import eventually

from services.knowledge.claims import Turn, claim
from services.knowledge.retention import kinds as facts
from services.knowledge.search import Search
from services.knowledge.sqlite import open_sqlite
from services.knowledge.store import Store
from shared.bus.keys import gone_key
from shared.participant.retention import Census

DAY_MS = 86_400_000


def age_files(folder: Path, at: int) -> None:
    """As if all of them had come then (ms)."""
    for library in folder.rglob("library.db"):
        with closing(sqlite3.connect(library, timeout=20)) as db, db:
            db.execute("UPDATE file SET added = ?", (at,))


def has_file(folder: Path, content: bytes) -> bool:
    return any(one.is_file() and one.read_bytes() == content for one in folder.rglob("*"))


async def test_what_is_old_is_shown_then_set_then_gone(
    redis_url: str, raw: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a clock is believed at once, and looked at all the time
    monkeypatch.setattr("shared.participant.retention._WATCHED", 0.0)
    monkeypatch.setattr("shared.participant.retention._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("shared.participant.retention._ROUND_SECONDS", 0.0)
    now = int(time.time() * 1000)
    ages = {"old": now - 40 * DAY_MS, "pinned": now - 50 * DAY_MS, "fresh": now - DAY_MS}
    async with remembering(redis_url, tmp_path) as memory, serving(gateway_settings(redis_url, tmp_path)) as site:
        http = site.http
        for name, at in ages.items():
            turns = [{"query": f"{name}?", "answer": f"{name}.", "time": at}]
            body = {"sessions": [{"session_id": name, "turns": turns}]}
            assert (await http.post("/sessions/import", json=body)).status_code == 200
        await http.patch("/sessions/pinned", json={"pinned": True})
        # what nobody could have written makes nothing due
        raw.set("local2:session:{broken}", "no hash")
        raw.hset("local2:session:{unreadable}", mapping={"user_id": "ann", "title": "?", "updated": "soon"})
        lines: list[dict[str, Any]] = [
            {"query": f"{name} answer?", "answer": f"{name} answer.", "time": at} for name, at in ages.items()
        ]
        lines += [{"content": f"{name} note", "time": at} for name, at in ages.items()]
        taken = await memory.manage("import", "admin", lines=lines)
        assert taken["imported"] == 6
        file = await http.post("/files?name=a.txt", content=b"words", headers={"Content-Type": "text/plain"})
        assert file.status_code == 201

        shown = (await http.get("/retention", params={"days": 30})).json()
        due = {one["kind"]: (one["keep_days"], one["kept"], one["due"]) for one in shown["kinds"]}
        assert due == {"sessions": (0, 4, 1), "engrams": (0, 3, 2), "notes": (0, 3, 2), "files": (0, 1, 0)}
        assert [one["participant"] for one in shown["away"]] == ["knowledge", "reward"]
        listed = await local2(monkeypatch, site, "retention", "--days", "30")
        assert "sessions" in listed.output
        assert "ever" in listed.output
        asked = await local2(monkeypatch, site, "retention", "set", "sessions", "30")
        assert asked.exit_code == 1
        assert "1 of 4 sessions will be removed for good" in asked.output
        wrong = await local2(monkeypatch, site, "retention", "set", "grapes", "30")
        assert "grapes is none of sessions, engrams, notes, files" in str(wrong.exception)
        # nobody has asked for anything to go
        assert (await http.get("/retention", params={"days": 30})).json() == shown

        async def is_left(kind: str, count: int) -> bool:
            found = (await http.get("/retention")).json()["kinds"]
            return next(one["kept"] for one in found if one["kind"] == kind) == count

        assert has_file(tmp_path, b"words")
        age_files(tmp_path, ages["old"])
        for kind, count in (("sessions", 3), ("engrams", 1), ("notes", 1), ("files", 0)):
            done = await local2(monkeypatch, site, "retention", "set", kind, "30", "--yes")
            assert done.exit_code == 0, done.output
            assert f"{kind}: 30 days" in done.output
            await eventually(lambda kind=kind, count=count: is_left(kind, count), 20, f"old {kind} are gone")  # type: ignore[misc]
        left = (await http.get("/sessions")).json()["sessions"]
        assert [one["session_id"] for one in left] == ["pinned", "fresh"]
        engrams = (await memory.engrams("admin")).values()
        assert sorted(one["query"] or one["content"] for one in engrams) == ["fresh answer?", "fresh note"]
        assert (await http.get("/sessions/old")).status_code == 404
        assert (await http.get(f"/files/{file.json()['id']}")).status_code == 404
        assert not has_file(tmp_path, b"words")

        async def is_told() -> bool:
            return bool(raw.exists(gone_key("admin", "old")))

        await eventually(is_told, 20, "memory has heard of the end of the session")


async def test_retention_of_facts_counts_facts_and_not_sources(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "g.sqlite") as graph:
        store = Store(graph)
        (kind,) = facts(store, Search(store))
        assert await kind.census(200) == Census(0, None, 0)
        # Two facts from one source, a source without facts, and a fact with an old and a new source.
        said = {"r1": ("tea", "coffee"), "r2": (), "r3": ("coffee",)}
        for at, (source, objects) in zip((100, 100, 300), said.items(), strict=True):
            turn = Turn(source, "ann", "s1", at, "")
            found = [claim(turn, "Anna", "likes", one, by="model") for one in objects]
            await store.replace_claims(turn, [one for one in found if one], settled=True)
        assert await kind.census(200) == Census(2, 100, 1)


async def test_what_was_read_long_ago_is_forgotten_and_what_a_person_entered_stays(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "g.sqlite") as graph:
        store = Store(graph)
        for number, source in enumerate(("r1", "r2", "person:1", "r9")):
            turn = Turn(source, "ann", "s1", 100 + 100 * (source == "r9"), "")
            found = claim(turn, "Anna", "likes", f"thing {number}", by="model")
            assert found is not None
            await store.replace_claims(turn, [found], settled=True)
        (kind,) = facts(store, Search(store))
        census = await kind.census(200)
        assert (census.kept, census.oldest, census.due) == (4, 100, 2)
        assert [count async for count in kind.remove(200)] == [2]
        assert {one.source for one in await store.claims("ann")} == {"person:1", "r9"}
        assert [count async for count in kind.remove(200)] == []
