"""The live view of the bus: the last entries of the matching subjects, then each new entry, over a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from support.proxy import Proxy

from services.gateway.operations.bus_stream import Tap, event, matches
from services.gateway.queries.sse import KEEP_ALIVE
from shared.bus import Bus
from shared.bus.keys import KNOWN_TOOLS, stream_key

# Seconds between two comments of a silent stream: also the time between two reads here.
OFTEN = 0.1


async def add(bus: Bus, subject: str, *ids: str, payload: bytes = b"{}") -> None:
    await bus.link.pipe([("XADD", stream_key(subject), one, "payload", payload) for one in ids])


def ids(chunk: bytes) -> list[tuple[str, str]]:
    """The events of a chunk: subject and id."""
    lines = chunk.decode().splitlines()
    return [(kind[7:], entry_id[4:]) for entry_id, kind in zip(lines[::4], lines[1::4], strict=True)]


async def following(chunks: AsyncGenerator[bytes, None]) -> list[tuple[str, str]]:
    """The events of the next chunk that is no comment."""
    async with asyncio.timeout(60):
        while (chunk := await anext(chunks)) == KEEP_ALIVE:
            pass
    return ids(chunk)


@pytest.mark.parametrize(
    ("patterns", "matching"),
    [
        (["*"], ["a", "a.b", "b"]), (["a"], ["a"]), (["a*"], ["a", "a.b"]), (["a.*"], ["a.b"]), ([], []),
        (["b", "a.b"], ["a.b", "b"]), (["a.b.c", "x*"], []),
    ],
)  # fmt: skip
def test_subject_matches_itself_or_a_prefix_with_star(patterns: list[str], matching: list[str]) -> None:
    assert [subject for subject in ("a", "a.b", "b") if matches(subject, patterns)] == matching


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ([b"user_id", b"ann", b"payload", b'{"b": 1,  "a": "\xc3\xa4"}'],
         b'"user_id":"ann","payload":{"b":1,"a":"\xc3\xa4"}'),
        ([b"payload", b"{"], b'"payload":"{"'),
        ([b"payload", b"[" * 300 + b"]" * 300], b'"payload":"' + b"[" * 300 + b"]" * 300 + b'"'),
        ([b"x", b"\xff"], rb'"x":"\\xff","payload":null'),
    ],
)  # fmt: skip
def test_event_of_an_entry_in_any_form_is_json(fields: list[bytes], shown: bytes) -> None:
    data = b'{%b,"subject":"one","entry_id":"1-2"}' % shown
    assert event("one", ("1-2", fields)) == b"id: 1-2\nevent: one\ndata: " + data + b"\n\n"


async def test_tap_returns_last_entries_then_new_ones_by_id(bus: Bus) -> None:
    """Over all subjects. A subject of a tool that is announced later is new as a whole; other subjects are left out."""
    await add(bus, "answer.dialog", "9-0", "10-0")
    await add(bus, "query.cancel", "5-0", "11-0")
    await add(bus, "user.feedback", "12-0")
    # a key of another type, and an id after which Redis would find no entry
    await bus.link.call("SET", stream_key("query.forget"), "no stream")
    tap = Tap(bus, ["answer.dialog", "query.*", "tool.*"], last=3)
    async with aclosing(tap.events(keepalive=OFTEN)) as chunks:
        shown = [ids(await anext(chunks)) for _ in range(3)]
        assert shown == [[("answer.dialog", "9-0")], [("answer.dialog", "10-0")], [("query.cancel", "11-0")]]
        assert await anext(chunks) == KEEP_ALIVE
        await asyncio.gather(
            add(bus, "answer.dialog", "12-0", "14-0"), add(bus, "query.cancel", "13-0", "100000000000000-0")
        )
        expected = [("answer.dialog", "12-0"), ("query.cancel", "13-0"), ("answer.dialog", "14-0")]
        assert await following(chunks) == expected
        await bus.link.call("SADD", KNOWN_TOOLS, "late")
        await add(bus, "tool.request.late", "2-0")
        assert await following(chunks) == [("tool.request.late", "2-0")]
        await add(bus, "answer.dialog", "15-0")
        assert await following(chunks) == [("answer.dialog", "15-0")]


async def test_tap_finds_subjects_again_after_a_damaged_list(bus: Bus) -> None:
    await bus.link.call("SET", KNOWN_TOOLS, "no set")
    async with aclosing(Tap(bus, ["*"], last=1).events(keepalive=OFTEN)) as chunks:
        assert await anext(chunks) == KEEP_ALIVE
        await bus.link.call("DEL", KNOWN_TOOLS)
        await add(bus, "answer.dialog", "1-0")
        assert await following(chunks) == [("answer.dialog", "1-0")]


async def test_tap_sends_entries_together_up_to_a_size(bus: Bus) -> None:
    """More entries than one read returns follow at once, and large ones in several chunks."""
    async with aclosing(Tap(bus, ["answer.dialog"], last=0).events(keepalive=3_600.0)) as chunks:
        assert await anext(chunks) == KEEP_ALIVE
        small = [f"{n}-0" for n in range(1, 100)]
        await add(bus, "answer.dialog", *small)
        first = await following(chunks)
        assert 1 < len(first) < 99
        found = list(first)
        while len(found) < 99:
            found += await following(chunks)
        assert found == [("answer.dialog", one) for one in small]
        large = [f"{n}-0" for n in range(100, 109)]
        await add(bus, "answer.dialog", *large, payload=b'"%b"' % (b"x" * 40_000))
        assert [len(await following(chunks)) for _ in range(5)] == [2, 2, 2, 2, 1]


async def test_tap_sends_comments_in_silence(bus: Bus) -> None:
    tap = Tap(bus, ["answer.dialog"], last=0)
    async with aclosing(tap.events(keepalive=OFTEN)) as chunks:
        began = asyncio.get_running_loop().time()
        assert [await anext(chunks) for _ in range(4)] == [KEEP_ALIVE] * 4
        # The first comment marks the start.
        assert asyncio.get_running_loop().time() - began >= 3 * OFTEN


async def test_tap_sends_comments_while_redis_is_away(redis_url: str, bus: Bus) -> None:
    async with Proxy(redis_url) as proxy, Bus(proxy.url, "test/2") as behind:
        chunks = Tap(behind, ["answer.dialog"], last=0).events(keepalive=OFTEN)
        assert await anext(chunks) == KEEP_ALIVE
        proxy.freeze()
        await add(bus, "answer.dialog", "1-0")
        assert [await anext(chunks) for _ in range(4)] == [KEEP_ALIVE] * 4
        proxy.thaw()
        assert await following(chunks) == [("answer.dialog", "1-0")]
        await chunks.aclose()
