"""The event stream of a query over real HTTP, with a gateway that breaks it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from services.cli.api import Api, ApiError
from services.cli.sse import Event, Parser, QueryStream

EVENTS = [
    ("1-1", "claimed", {"replica": "a"}),
    ("1-2", "thinking", {"text": "hm "}),
    ("1-3", "answer", {"text": "Par\u2028is\n"}),
    ("1-4", "answer", {"text": "."}),
    ("1-5", "completed", {"answer": "Par\u2028is\n."}),
]


def frame(entry_id: str, kind: str, data: dict[str, Any]) -> bytes:
    return f"id: {entry_id}\nevent: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


async def collected(stream: QueryStream) -> list[tuple[str, str, dict[str, Any]]]:
    async with aclosing(stream.ask({"query": "x"})) as events:
        return [(e.id, e.type, e.data) async for e in events]


@pytest.mark.parametrize("cut_inside", [False, True])
async def test_a_stream_cut_after_every_event_is_resumed_without_loss_or_repetition(
    loopback_gateway: Any, event_head: Callable[..., bytes], chunk: Callable[[bytes], bytes], cut_inside: bool
) -> None:
    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        last = heard.headers.get("last-event-id", "1-0")
        rest = [event for event in EVENTS if event[0] > last]
        writer.write(event_head() + chunk(frame(*rest[0])))
        if cut_inside and len(rest) > 1:
            # Half of the next event: it does not count, and comes again in whole.
            writer.write(chunk(frame(*rest[1])[:-7]))
        if len(rest) == 1:
            writer.write(b"0\r\n\r\n")

    loopback_gateway.play = play
    async with Api(loopback_gateway.settings()) as api:
        resumed: list[str] = []
        stream = QueryStream(api, on_resume=resumed.append)
        assert await collected(stream) == EVENTS
    assert (stream.query_id, stream.session_id) == ("7-0", "s")
    assert len(resumed) == len(EVENTS) - 1
    asked, *later = loopback_gateway.requests
    assert (asked.method, asked.path, asked.headers["authorization"]) == ("POST", "/query", "Bearer test-key")
    assert [r.headers["last-event-id"] for r in later] == ["1-1", "1-2", "1-3", "1-4"]
    assert {(r.method, r.path) for r in later} == {("GET", "/queries/7-0/events")}


async def test_a_query_whose_answer_never_began_is_sent_again_under_the_same_key(
    loopback_gateway: Any, event_head: Callable[..., bytes], chunk: Callable[[bytes], bytes]
) -> None:
    async def play(_heard: Any, writer: asyncio.StreamWriter) -> None:
        if len(loopback_gateway.requests) > 2:
            writer.write(event_head() + chunk(frame(*EVENTS[-1])) + b"0\r\n\r\n")

    loopback_gateway.play = play
    async with Api(loopback_gateway.settings()) as api:
        assert await collected(QueryStream(api)) == EVENTS[-1:]
    assert [r.method for r in loopback_gateway.requests] == ["POST"] * 3
    assert len({r.headers["idempotency-key"] for r in loopback_gateway.requests}) == 1
    assert {r.body for r in loopback_gateway.requests} == {b'{"query":"x"}'}


async def test_a_refusal_is_final_and_keeps_its_code(loopback_gateway: Any, json_answer: Callable[..., bytes]) -> None:
    async def play(_heard: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"error": {"code": "overloaded", "message": "too many queries"}}, 429))

    loopback_gateway.play = play
    async with Api(loopback_gateway.settings()) as api:
        with pytest.raises(ApiError, match="too many queries") as caught:
            await collected(QueryStream(api))
    assert (caught.value.code, caught.value.status, len(loopback_gateway.requests)) == ("overloaded", 429, 1)


async def test_a_gateway_that_stays_away_ends_the_waiting(
    loopback_gateway: Any, event_head: Callable[..., bytes], chunk: Callable[[bytes], bytes]
) -> None:
    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        if heard.method == "POST":
            writer.write(event_head() + chunk(frame(*EVENTS[0])))

    loopback_gateway.play = play
    async with Api(loopback_gateway.settings()) as api:
        with pytest.raises(ApiError, match="failed"):
            await collected(QueryStream(api, patience=0.3))
    assert len(loopback_gateway.requests) > 1


async def test_without_a_gateway_the_sentence_says_how_to_start_one() -> None:
    from services.cli.settings import ClientSettings

    async with Api(ClientSettings(api_url="http://127.0.0.1:9")) as api:
        with pytest.raises(ApiError, match=r"nothing answers at http://127.0.0.1:9; .*local2 run"):
            await collected(QueryStream(api, start_patience=0.3))


def test_comments_and_unknown_fields_are_skipped_and_data_lines_are_joined() -> None:
    parser = Parser()
    lines = [": keep-alive", "", "id: 1-1", "event: answer", "retry: 5", 'data: {"text":', 'data: "a"}', ""]
    assert [e for line in lines if (e := parser.feed(line))] == [Event("1-1", "answer", {"text": "a"})]


@pytest.mark.parametrize(
    "data", [b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b'{"text":"\\ud800"}'],
    ids=["cut off", "a list", "null", "not UTF-8", "nested too deeply", "half a surrogate pair"],
)  # fmt: skip
async def test_stream_passes_over_malformed_data_of_an_event(
    loopback_gateway: Any, event_head: Callable[..., bytes], chunk: Callable[[bytes], bytes], data: bytes
) -> None:
    async def play(_heard: Any, writer: asyncio.StreamWriter) -> None:
        malformed = b"id: 1-1\nevent: notice\ndata: " + data + b"\n\n"
        writer.write(event_head() + chunk(malformed) + chunk(frame(*EVENTS[-1])) + b"0\r\n\r\n")

    loopback_gateway.play = play
    async with Api(loopback_gateway.settings()) as api:
        assert await collected(QueryStream(api)) == [("1-1", "notice", {}), EVENTS[-1]]


def test_an_event_type_does_not_leak_into_the_next_event() -> None:
    parser = Parser()
    for line in ("event: answer", "data: {}", ""):
        parser.feed(line)
    parser.feed("data: {}")
    event = parser.feed("")
    assert event is not None
    assert event.type == "message"


async def test_a_gateway_that_is_just_starting_is_waited_for_and_said_once(
    event_head: Callable[..., bytes], chunk: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    from services.cli.settings import ClientSettings

    heads: list[bytes] = []

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(event_head() + chunk(frame(*EVENTS[-1])) + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    with socket.socket() as held:
        # Bound, but nobody listens: connections are refused until the gateway is there.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        said: list[str] = []
        servers: list[asyncio.Server] = []

        async def appear() -> None:
            await asyncio.sleep(0.5)
            # the first start of all makes the key
            (tmp_path / "admin.key").write_text("made-just-now")
            servers.append(await asyncio.start_server(play, sock=held.dup()))

        async with Api(ClientSettings(api_url=url, data_dir=tmp_path)) as api:
            starting = asyncio.create_task(appear())
            assert await collected(QueryStream(api, on_resume=said.append)) == EVENTS[-1:]
            await starting
        for server in servers:
            server.close()
    assert said == [f"nothing answers at {url}; trying for 5 s"]
    assert [b"authorization: bearer made-just-now" in head for head in heads] == [True]


async def test_a_refused_key_names_the_folder_that_was_looked_in(
    loopback_gateway: Any, json_answer: Callable[..., bytes], tmp_path: Path
) -> None:
    async def play(_heard: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"error": {"code": "unauthorized", "message": "no such key"}}, 401))

    loopback_gateway.play = play
    async with Api(loopback_gateway.settings(data_dir=Path("mine"))) as api:
        with pytest.raises(ApiError) as caught:
            await collected(QueryStream(api))
        with pytest.raises(ApiError, match=r"mine/admin\.key"):
            await api.get("/sessions")
    assert str(tmp_path / "mine" / "admin.key") in str(caught.value)
