"""Dead letters: an entry that cannot be handled becomes one once, with its fields, its origin and the reason."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis
from contract.bus.observing import DEADLY, EFFECTS, Recorder, Worker, add, eventually, pending
from contract.bus.servers import Server
from contract.bus.surface import (
    DEAD_LETTERS,
    GROUP,
    STREAM,
    Delivery,
    PermanentError,
    call,
    consuming,
    dead_letters,
    decode,
    drop,
    fields_of,
    key,
    open_bus,
    replay,
)


async def refuse(_delivery: Delivery) -> list[Any]:
    raise PermanentError("no such thing")


async def test_permanent_error_dead_letters_first_delivery(server: Server, client: redis.Redis) -> None:
    async with consuming(server, refuse):
        entry_id = client.xadd(STREAM, {"payload": "x", "name": "value"})
        await eventually(lambda: dead_letters(client) and pending(client) == 0)
    (letter,) = dead_letters(client)
    assert (letter.stream, letter.group, letter.entry_id, letter.deliveries) == (STREAM, GROUP, entry_id, 1)
    assert letter.reason == "no such thing"
    assert letter.fields == {"payload": "x", "name": "value"}


MALFORMED: dict[str, dict[bytes, bytes]] = {
    "no payload": {b"something": b"else"},
    "empty": {b"payload": b""},
    "half": {b"payload": b"{"},
    "null": {b"payload": b"null"},
    "list": {b"payload": b"[]"},
    "binary": {b"payload": b"\xff\xfe\x00"},
    "wrong type": {b"payload": b'{"text": 7}'},
    "deep": {b"payload": b"[" * 5_000},
    "bad deadline": {b"payload": b'{"text": "x"}', b"deadline": b"soon"},
    "bad header": {b"payload": b'{"text": "x"}', b"time": b"\xf0\x28"},
}


async def test_malformed_entries_keep_no_good_one_back(server: Server, client: redis.Redis) -> None:
    good: list[str] = []

    async def handle(delivery: Delivery) -> list[Any]:
        decode(delivery)
        good.append(delivery.entry_id)
        return []

    bad, expected = [], []
    for fields in MALFORMED.values():
        bad.append(client.xadd(STREAM, fields))
        expected += add(client)
    async with consuming(server, handle):
        await eventually(lambda: len(dead_letters(client)) == len(bad) and pending(client) == 0)
    assert sorted(good) == sorted(expected)
    assert sorted(letter.entry_id for letter in dead_letters(client)) == sorted(bad)
    assert {letter.deliveries for letter in dead_letters(client)} == {1}


async def test_failing_entry_is_dead_lettered_once_at_the_limit(server: Server, client: redis.Redis) -> None:
    tries: list[int] = []

    async def handle(delivery: Delivery) -> list[Any]:
        tries.append(delivery.deliveries)
        raise RuntimeError("a bug")

    options: dict[str, Any] = {"visibility_timeout": 0.15, "max_deliveries": 3}
    async with consuming(server, handle, **options), consuming(server, handle, name="r2", **options):
        (entry_id,) = add(client)
        await eventually(lambda: dead_letters(client) and pending(client) == 0)
    assert tries[-1] == max(tries) == 3
    (letter,) = dead_letters(client)
    assert letter.entry_id == entry_id
    assert "3 deliveries" in letter.reason


async def test_hook_effects_are_written_with_the_dead_letter(server: Server, client: redis.Redis) -> None:
    async def hook(delivery: Delivery, reason: str) -> list[Any]:
        return [("RPUSH", EFFECTS, f"{delivery.entry_id} {reason}")]

    async with consuming(server, refuse, hook):
        (entry_id,) = add(client)
        await eventually(lambda: dead_letters(client) and pending(client) == 0)
    assert client.lrange(EFFECTS, 0, -1) == [f"{entry_id} no such thing"]


@pytest.mark.parametrize("fault", ["raises", "wrong type", "unknown command"])
async def test_failing_hook_keeps_no_dead_letter_back(server: Server, client: redis.Redis, fault: str) -> None:
    taken = key("taken")
    client.set(taken, "a string")
    done = Recorder()

    async def handle(delivery: Delivery) -> list[Any]:
        return await (done(delivery) if delivery.entry_id == good else refuse(delivery))

    async def hook(delivery: Delivery, reason: str) -> list[Any]:
        if fault == "raises":
            raise RuntimeError("a bug")
        return [("RPUSH", taken, "x") if fault == "wrong type" else ("NOSUCHCOMMAND", taken)]

    (bad,), (good,) = add(client), add(client)
    async with consuming(server, handle, hook, visibility_timeout=0.15, max_deliveries=2):
        await eventually(lambda: dead_letters(client) and done.seen == [good] and pending(client) == 0)
    assert [letter.entry_id for letter in dead_letters(client)] == [bad]


async def test_entry_that_kills_its_process_is_dead_lettered(
    server: Server, client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    add(client, 1, text=DEADLY)
    options = {"visibility_timeout": 0.3, "max_deliveries": 2}
    for turn in (1, 2):
        assert await worker(server, f"doomed{turn}", **options).ended() == -signal.SIGKILL
        assert client.llen(Worker.STARTED) == turn
    assert dead_letters(client) == []
    worker(server, "survivor", **options)
    await eventually(lambda: dead_letters(client) and pending(client) == 0)
    (letter,) = dead_letters(client)
    assert letter.deliveries == 3
    assert client.llen(Worker.STARTED) == 2


async def test_entry_that_kills_its_process_spares_others(
    server: Server, client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    harmless = add(client)
    (deadly,) = add(client, 1, text=DEADLY)
    harmless += add(client, 2)
    deaths = 0
    started = worker(server, "w0", seconds=0.05, visibility_timeout=0.3, max_deliveries=3)
    while not dead_letters(client):
        if started.process.poll() is not None:
            deaths += 1
            started = worker(server, f"w{deaths}", seconds=0.05, visibility_timeout=0.3, max_deliveries=3)
        await asyncio.sleep(0.01)
    await eventually(lambda: pending(client) == 0)
    assert deaths == 3
    assert [letter.entry_id for letter in dead_letters(client)] == [deadly]
    done = [effect.partition(":")[2] for effect in client.lrange(EFFECTS, 0, -1)]
    assert sorted(done) == sorted(harmless)


async def test_dead_letter_of_failed_effect_survives_a_kill(
    own_server: Server, own_client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    """The process ends after one of its effects failed, while a full server takes no dead letter."""
    client = own_client
    client.set(Worker.EFFECTS, "no list")
    options: dict[str, Any] = {"visibility_timeout": 0.3, "max_deliveries": 2}
    # the last effect fills the server, behind which nothing more is written
    doomed = worker(own_server, "doomed", last_effect=["CONFIG", "SET", "maxmemory", 1], **options)
    (entry_id,) = add(client)
    node = own_server.node_of(STREAM).client

    def refused() -> bool:
        """Whether the entry is pending again, or was never acknowledged and has its dead letter."""
        return bool(dead_letters(client)) or (node.config_get("maxmemory")["maxmemory"] == "1" and pending(client) == 1)

    await eventually(refused)
    doomed.end()
    own_server.accept_writes()
    async with consuming(own_server, Recorder(), **options):
        await eventually(lambda: dead_letters(client) and pending(client) == 0)
    assert [letter.entry_id for letter in dead_letters(client)] == [entry_id]


async def test_key_in_place_of_dead_letters_loses_no_entry(own_server: Server, own_client: redis.Redis) -> None:
    client = own_client
    for name in (EFFECTS, DEAD_LETTERS):
        client.set(name, "a string")

    def refusals() -> int:
        found = [node.client.info("errorstats").get("errorstat_WRONGTYPE", {}) for node in own_server.nodes]
        return sum(int(one.get("count", 0)) for one in found)

    async def handle(_delivery: Delivery) -> list[Any]:
        return [("RPUSH", EFFECTS, "x")]

    async with consuming(own_server, handle, visibility_timeout=0.3, max_deliveries=2):
        (entry_id,) = add(client)
        # the effect and the dead letter were refused
        await eventually(lambda: refusals() > 1)
        client.delete(DEAD_LETTERS)
        await eventually(lambda: dead_letters(client) and pending(client) == 0)
    assert [letter.entry_id for letter in dead_letters(client)] == [entry_id]


AWKWARD: dict[str, list[bytes]] = {
    "text": [b"payload", b"text \xc3\xa9 \xe2\x80\xa8 \\x00", b"empty", b""],
    "binary": [b"payload", bytes(range(256)), b"\xff\xfe", b"\x00"],
    "repeated": [b"name", b"first", b"name", b"second", b"payload", b"{}"],
    "empty": [b"", b""],
}


@pytest.mark.parametrize("fields", AWKWARD.values(), ids=AWKWARD)
async def test_replay_restores_identical_fields(server: Server, client: redis.Redis, fields: list[bytes]) -> None:
    seen: list[list[bytes]] = []
    broken = True

    async def handle(delivery: Delivery) -> list[Any]:
        seen.append(fields_of(delivery))
        if broken:
            raise PermanentError("broken")
        return []

    async with open_bus(server) as bus, consuming(server, handle):
        client.execute_command("XADD", STREAM, "*", *fields)
        await eventually(lambda: client.xlen(DEAD_LETTERS) == 1)
        broken = False
        ((dead_id, _),) = client.xrange(DEAD_LETTERS)
        assert await replay(bus, dead_id) is not None
        await eventually(lambda: len(seen) == 2 and pending(client) == 0)
        assert await replay(bus, dead_id) is None
    assert seen == [fields, fields]
    assert client.xlen(DEAD_LETTERS) == 0


async def test_replay_that_was_cut_off_adds_no_second_entry(server: Server, client: redis.Redis) -> None:
    async with open_bus(server) as bus:
        async with consuming(server, refuse):
            add(client)
            await eventually(lambda: client.xlen(DEAD_LETTERS) == 1 and pending(client) == 0)
        ((dead_id, fields),) = client.xrange(DEAD_LETTERS)
        before = client.xlen(STREAM)
        first = await replay(bus, dead_id)
        # as after a crash between adding the entry and removing the dead letter
        client.delete(DEAD_LETTERS)
        client.xadd(DEAD_LETTERS, fields, id=dead_id)
        assert await replay(bus, dead_id) == first
    assert client.xlen(STREAM) == before + 1
    assert client.xlen(DEAD_LETTERS) == 0


async def test_drop_removes_a_dead_letter_once(server: Server, client: redis.Redis) -> None:
    async with open_bus(server) as bus, consuming(server, refuse):
        add(client)
        await eventually(lambda: client.xlen(DEAD_LETTERS) == 1)
        ((dead_id, _),) = client.xrange(DEAD_LETTERS)
        assert await drop(bus, dead_id)
        assert not await drop(bus, dead_id)
        assert await replay(bus, dead_id) is None
    assert client.xlen(DEAD_LETTERS) == 0


async def test_command_refused_to_a_handler_is_the_reason(server: Server, client: redis.Redis) -> None:
    taken = key("taken")
    client.set(taken, "a string")
    async with open_bus(server, "test/handler") as bus:

        async def handle(_delivery: Delivery) -> list[Any]:
            await call(bus, "LPUSH", taken, "x")
            return []

        async with consuming(server, handle, visibility_timeout=0.15, max_deliveries=2):
            add(client)
            await eventually(lambda: dead_letters(client) and pending(client) == 0)
    (letter,) = dead_letters(client)
    assert "WRONGTYPE" in letter.reason
    assert json.loads(letter.fields["payload"]) == {"text": "x"}
