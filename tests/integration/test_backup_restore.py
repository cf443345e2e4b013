"""`local2 backup` of one stack, `local2 restore` into another: what arrives, and what an interruption leaves."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from support.backups import BACKUP, WITHOUT, Place, backed_up, fill, kept, key_of, names, place, said, seen
from support.http_gateway import client, gateway_settings
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.gateway.backup.archive import archive
from services.gateway.http.gateway import Gateway
from shared.bus.keys import RESTORE_LOCK, RESTORE_UNFINISHED, record_key
from shared.errors import BusUnavailable
from shared.participant.backup import BackupError, Header, Record, examine


@pytest.fixture
async def source(redis_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with place(redis_url, tmp_path / "source") as found:
        yield found


@pytest.fixture
async def target(redis_server: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Place]:
    """An empty stack on a Redis of its own."""
    async with place(redis_server.url, tmp_path / "target") as found:
        yield found


# ── there and back ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_empty_stack_becomes_the_one_that_was_backed_up(
    source: Place, target: Place, redis_url: str, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    keys = await fill(source)
    file = await backed_up(source, tmp_path / "all.backup")
    done = await target.local2("restore", str(file))
    assert done.exit_code == 0, done.output
    assert "sessions: 6 restored" in done.output
    assert await seen(target, keys) == await seen(source, keys)
    assert kept(redis_server.url) == kept(redis_url)


async def test_a_restored_conversation_goes_on_with_its_history(source: Place, target: Place, tmp_path: Path) -> None:
    keys = await fill(source)
    await target.local2("restore", str(await backed_up(source, tmp_path / "all.backup")))
    answer = await target.ask("and now?", "ann-0", keys["ann"])
    assert answer["answer"] == "You asked: and now?"
    messages = target.stage.server.requests[-1].body["messages"]
    told = [text for turn in range(3) for text in (said("ann", 0, turn), f"You asked: {said('ann', 0, turn)}")]
    assert [m["content"] for m in messages[1:]] == [*told, "and now?"]
    async with client(target.site.url, keys["ann"]) as ann:
        turns = (await ann.get("/sessions/ann-0")).json()["turns"]
    assert [turn["query"] for turn in turns][-1] == "and now?"


async def test_restored_settings_work_in_running_participants_at_once(
    source: Place, target: Place, tmp_path: Path
) -> None:
    await fill(source)
    await target.ask("before", "s")
    assert "temperature" not in target.stage.server.requests[-1].body["options"]
    await target.site.http.delete("/sessions/s")
    await target.local2("restore", str(await backed_up(source, tmp_path / "all.backup")))

    async def warmer() -> bool:
        await target.ask("after", "s2")
        return bool(target.stage.server.requests[-1].body["options"].get("temperature") == 0.25)

    await eventually(warmer, what="the generator hears of the restored settings")


async def test_the_file_holds_no_secret_and_is_for_its_owner_alone(source: Place, tmp_path: Path) -> None:
    keys = await fill(source)
    file = await backed_up(source, tmp_path / "all.backup")
    content = gzip.decompress(file.read_bytes())
    assert b"ann 0.0" in content
    assert not [key for key in keys.values() if key.encode() in content]
    assert b"start key" not in content
    assert file.stat().st_mode & 0o777 == 0o600


async def test_a_query_that_is_being_answered_is_not_in_the_file(source: Place, target: Place, tmp_path: Path) -> None:
    source.stage.server.set_rules(
        [
            {"when": {"user": "^hold"}, "respond": {"text": "x", "fault": {"kind": "stall"}}},
            {"respond": {"text": "You asked: <<query>>"}},
        ]
    )
    await source.ask("first", "s")
    held = (await source.site.http.post("/query?wait=false", json={"query": "hold", "session_id": "s"})).json()
    await eventually(lambda: source.stage.server.requests[-1].query == "hold", what="the model is asked")
    await target.local2("restore", str(await backed_up(source, tmp_path / "all.backup")))
    turns = (await target.site.http.get("/sessions/s")).json()["turns"]
    assert [turn["query"] for turn in turns] == ["first"]
    assert (await target.ask("next", "s"))["answer"] == "You asked: next"
    await source.site.http.post(f"/queries/{held['query_id']}/cancel")
    await source.stage.ended(held["query_id"])


# ── into a stack that is not empty ───────────────────────────────────────────────────────────────────────────────


async def test_a_stack_with_data_is_left_alone_unless_asked_otherwise(
    source: Place, target: Place, tmp_path: Path
) -> None:
    await fill(source)
    await target.ask("mine", "my-own")
    done = await target.local2("restore", str(await backed_up(source, tmp_path / "all.backup")))
    assert done.exit_code == 1
    assert "there are sessions in this stack: --merge keeps them" in done.output
    assert [s["session_id"] for s in (await target.site.http.get("/sessions")).json()["sessions"]] == ["my-own"]


async def test_merge_keeps_what_is_there_and_adds_what_is_missing(source: Place, target: Place, tmp_path: Path) -> None:
    keys = await fill(source)
    file = await backed_up(source, tmp_path / "all.backup")
    await target.local2("restore", str(file))
    await target.ask("newer", "ann-0", keys["ann"])
    await target.site.http.patch("/participants/generator/settings", json={"temperature": 0.9})
    async with client(target.site.url, keys["ann"]) as ann:
        assert (await ann.delete("/sessions/ann-1")).status_code == 200
    await target.ask("another", "own")
    done = await target.local2("restore", "--merge", str(file))
    assert done.exit_code == 0, done.output
    assert re.findall("sessions: .*", done.output) == ["sessions: 6 of 6 done", "sessions: 1 restored, 5 already there"]
    async with client(target.site.url, keys["ann"]) as ann:
        assert len((await ann.get("/sessions/ann-0")).json()["turns"]) == 4
        assert len((await ann.get("/sessions/ann-1")).json()["turns"]) == 3
    values = (await target.site.http.get("/participants/generator/settings")).json()["values"]
    assert (values["temperature"], values["max_tool_iterations"]) == (0.9, 2)
    assert (await target.site.http.get("/sessions/own")).status_code == 200


async def test_a_session_id_of_another_user_is_not_taken_over(source: Place, target: Place, tmp_path: Path) -> None:
    await source.ask("the source's", "same-id", await key_of(source, "ann"))
    file = await backed_up(source, tmp_path / "all.backup")
    await target.ask("the target's", "same-id")
    done = await target.local2("restore", "--merge", str(file))
    assert done.exit_code == 0
    assert "session same-id belongs to another user here" in done.output
    assert [t["query"] for t in (await target.site.http.get("/sessions/same-id")).json()["turns"]] == ["the target's"]


async def test_replace_leaves_exactly_what_the_file_has(
    source: Place, target: Place, redis_url: str, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    keys = await fill(source)
    old = await key_of(target, "carol")
    done = await target.ask("carol's", "carol-1", old)
    await target.ask("old", "ann-0")
    await target.site.http.patch("/participants/generator/settings", json={"num_ctx": 4096, "temperature": 1.5})
    result = await target.local2("restore", "--replace", str(await backed_up(source, tmp_path / "all.backup")))
    assert result.exit_code == 0, result.output
    assert kept(redis_server.url) == kept(redis_url)
    assert await seen(target, keys) == await seen(source, keys)
    with redis.Redis.from_url(redis_server.url) as raw:
        assert not raw.exists(f"local2:journal:{done['query_id']}:A", record_key(done["query_id"]))

    async def locked_out() -> bool:
        async with client(target.site.url, old) as carol:
            return (await carol.get("/sessions")).status_code == 401

    await eventually(locked_out, what="the replaced key no longer works")
    await target.ask("fresh", "fresh")
    options = target.stage.server.requests[-1].body["options"]
    assert (options["num_ctx"], options["temperature"]) == (target.stage.settings.num_ctx, 0.25)


async def test_restoring_twice_changes_nothing(
    source: Place, target: Place, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    await fill(source)
    file = await backed_up(source, tmp_path / "all.backup")
    await target.local2("restore", str(file))
    once = kept(redis_server.url)
    assert (await target.local2("restore", "--merge", str(file))).exit_code == 0
    assert kept(redis_server.url) == once


async def test_a_setting_that_the_participant_does_not_have_is_left_out_and_said(
    source: Place, target: Place, tmp_path: Path, redis_url: str
) -> None:
    await fill(source)
    with redis.Redis.from_url(redis_url) as raw:
        raw.hset("local2:settings:generator", "of_another_version", "1")
    done = await target.local2("restore", str(await backed_up(source, tmp_path / "all.backup")))
    assert done.exit_code == 0
    assert "left out: setting of generator: of_another_version: not a run-time setting" in done.output
    assert "max_tool_iterations" in str((await target.site.http.get("/participants/generator/settings")).json())


# ── interruptions ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_bus_that_goes_away_during_a_backup_leaves_no_file(
    target: Place, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    await fill(target)
    redis_server.stop()
    done = await target.local2(*BACKUP, str(tmp_path / "all.backup"))
    assert done.exit_code == 1
    assert "bus" in done.output
    assert names(tmp_path, "*.backup*") == []
    redis_server.start()
    await eventually(lambda: _ready(target), 10, "the gateway is on the bus again")


async def _ready(stack: Place) -> bool:
    return (await stack.site.http.get("/sessions")).status_code == 200


async def test_an_interrupted_restore_is_completed_by_running_it_again(
    source: Place, target: Place, tmp_path: Path, redis_url: str, redis_server: EmbeddedRedis
) -> None:
    await fill(source)
    for number in range(150):
        await source.stage.sessions.open(f"many-{number:03}", "ann", "a title")
    file = await backed_up(source, tmp_path / "all.backup")
    # as a gateway leaves it that dies after its first batch of sessions
    async with target.site.http.stream("POST", "/restore", content=file.read_bytes()) as answer:
        async for line in answer.aiter_lines():
            if orjson.loads(line).get("section") == "sessions":
                break
    await eventually(lambda: _unlocked(redis_server), what="the broken restore has ended")
    half = kept(redis_server.url)
    assert 0 < len(half) < len(kept(redis_url))
    noted = await target.local2(*BACKUP, str(tmp_path / "half.backup"))
    assert "a restore of this stack was interrupted" in noted.output
    refused = await target.local2("restore", str(tmp_path / "half.backup"))
    assert (
        "a restore of another file was interrupted here: to complete it, restore that file again with neither --merge "
        "nor --replace; to give it up, restore a file with --replace, which first removes the present data"
    ) in refused.output
    done = await target.local2("restore", str(file))
    assert done.exit_code == 0, done.output
    assert kept(redis_server.url) == kept(redis_url)
    with redis.Redis.from_url(redis_server.url) as raw:
        assert not raw.exists(RESTORE_UNFINISHED)
    await eventually(lambda: _unlocked(redis_server), what="the lock goes behind the last line")


def _unlocked(server: EmbeddedRedis) -> bool:
    with redis.Redis.from_url(server.url) as raw:
        return not raw.exists(RESTORE_LOCK)


async def test_a_bus_that_goes_away_during_a_restore_is_told_and_the_same_command_completes_it(
    source: Place, target: Place, tmp_path: Path, redis_url: str, redis_server: EmbeddedRedis
) -> None:
    await fill(source)
    for number in range(1_000):
        await source.stage.sessions.open(f"many-{number:04}", "ann", "a title")
    file = await backed_up(source, tmp_path / "all.backup")
    with redis.Redis.from_url(redis_server.url) as raw:
        restoring = asyncio.create_task(target.local2("restore", str(file)))
        await eventually(lambda: raw.dbsize() > 200, 20, "a part of it is written", every=0)
        assert len(kept(redis_server.url)) < 1_000
    redis_server.kill()
    # longer than a restore waits for one batch is not needed: the connection comes back, and it goes on by itself
    redis_server.start()
    done = await restoring
    if done.exit_code:
        assert "run the same command again" in done.output
        await eventually(lambda: _unlocked(redis_server), 15, "the lease of the broken restore is over")
        again = await target.local2("restore", str(file))
        assert again.exit_code == 0, again.output
    assert len(kept(redis_server.url)) == len(kept(redis_url))


async def test_the_progress_of_a_restore_is_told_in_json_lines(source: Place, target: Place, tmp_path: Path) -> None:
    await fill(source)
    file = await backed_up(source, tmp_path / "all.backup")
    answer = await target.site.http.post("/restore", content=file.read_bytes())
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[0]["checked"]["counts"] == {"settings": 2, "sessions": 6, "keys": 2}
    assert lines[-1]["restored"]["sessions"] == {"written": 6, "kept": 0, "skipped": 0, "reasons": []}
    assert {"section": "sessions", "done": 6, "of": 6} in lines


async def test_replace_killed_while_it_deletes_is_completed_by_a_rerun(
    source: Place, target: Place, tmp_path: Path, redis_url: str, redis_server: EmbeddedRedis
) -> None:
    keys = await fill(source)
    file = await backed_up(source, tmp_path / "all.backup")
    await fill(target)
    for number in range(150):
        await target.stage.sessions.open(f"old-{number:03}", "admin", "a title")
    whole = len(kept(redis_server.url))
    params = {"mode": "replace", "without": [one.removeprefix("--without=") for one in WITHOUT]}
    async with target.site.http.stream("POST", "/restore", params=params, content=file.read_bytes()) as answer:
        async for line in answer.aiter_lines():
            if (orjson.loads(line).get("removed") or 0) >= 32:
                break
    await eventually(lambda: _unlocked(redis_server), what="the broken restore has ended")
    assert 100 < len(kept(redis_server.url)) < whole
    refused = await target.local2("restore", *WITHOUT, str(file))
    assert (
        "a restore with --replace was interrupted here, and the data is incomplete: restore a file with --replace"
    ) in refused.output
    done = await target.local2("restore", "--replace", *WITHOUT, str(file))
    assert done.exit_code == 0, done.output
    assert kept(redis_server.url) == kept(redis_url)
    assert await seen(target, keys) == await seen(source, keys)


async def test_replace_reports_what_it_has_removed(source: Place, target: Place, tmp_path: Path) -> None:
    await fill(source)
    file = await backed_up(source, tmp_path / "all.backup")
    for number in range(100):
        await target.stage.sessions.open(f"old-{number:03}", "admin", "a title")
    answer = await target.site.http.post("/restore?mode=replace", content=file.read_bytes())
    lines = [json.loads(line) for line in answer.text.splitlines()]
    removed = [line["removed"] for line in lines if line.get("section") == "sessions" and "removed" in line]
    assert (removed[0], removed[-1], removed) == (0, 100, sorted(removed))
    # A line for each batch, before the first write.
    assert 3 <= len(removed) <= 50
    assert lines.index({"section": "sessions", "removed": 100}) < lines.index(
        {"section": "sessions", "done": 6, "of": 6}
    )


async def test_restore_in_a_pipe_prints_each_step_as_a_line(source: Place, target: Place, tmp_path: Path) -> None:
    await fill(source)
    for number in range(100):
        await target.stage.sessions.open(f"old-{number:03}", "admin", "a title")
    done = await target.local2("restore", "--replace", str(await backed_up(source, tmp_path / "all.backup")))
    # The line of a long step ends with its seconds.
    lines = [line.split(" (")[0] for line in done.output.splitlines()]
    steps = ("sessions: 0 removed", "sessions: 100 removed", "sessions: 6 of 6 done", "keys: 2 of 2 done")
    assert [line for line in lines if line in steps] == list(steps)


async def test_settings_of_a_participant_that_was_never_here_wait_for_it(
    source: Place, target: Place, tmp_path: Path, redis_url: str, redis_server: EmbeddedRedis
) -> None:
    with redis.Redis.from_url(redis_url) as raw:
        raw.hset("local2:settings:later", "greeting", '"hello"')
    await target.local2("restore", str(await backed_up(source, tmp_path / "all.backup")))
    with redis.Redis.from_url(redis_server.url) as raw:
        assert raw.hgetall("local2:settings:later") == {b"greeting": b'"hello"'}


class Failing:
    """A section whose store goes away after its first page."""

    name = "failing"
    version = 1

    async def export(self) -> AsyncIterator[Sequence[Record]]:
        yield [{"a": 1}]
        raise BusUnavailable("the bus does not answer")


async def test_a_bus_that_goes_away_in_the_middle_leaves_a_file_that_says_so(tmp_path: Path) -> None:
    gateway = Gateway(gateway_settings("unix:///nowhere", tmp_path))
    sections: Any = {"failing": Failing()}
    data = b"".join([piece async for piece in archive(gateway, sections, Header("1", 1, {"failing": 1}))])
    with pytest.raises(BackupError, match=r"not finished: the bus does not answer \(unavailable\)"):
        examine(io.BytesIO(data))
