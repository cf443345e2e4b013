"""What a connection may send before anybody knows whose it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.http_gateway import ADMIN_KEY, Site, client, gateway_settings, generating, serving


@pytest.fixture
async def site(redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(gateway_settings(redis_url, tmp_path, client_seconds=1.0)) as site:
        yield site


async def connect(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = site.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def said(reader: asyncio.StreamReader) -> bytes:
    """Everything until the connection is closed."""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


def refusal(raw: bytes) -> tuple[int, str]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def pour(writer: asyncio.StreamWriter, first: bytes, again: bytes, most: int) -> int:
    """Sends until it is refused; how much went out."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        writer.write(first)
        while sent < most:
            writer.write(again)
            sent += len(again)
            await writer.drain()
    return sent


HEAD = b"GET /sessions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
DECLARED = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 9")


@pytest.mark.parametrize(
    ("first", "again"),
    [
        pytest.param(b"GET /", b"a" * 65_536, id="a URL"),
        pytest.param(HEAD + b"X: ", b"a" * 65_536, id="a header"),
        pytest.param(HEAD, b"X-A: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 1_000, id="headers"),
        pytest.param(HEAD + b"X: a\r\n", b" a" * 1_000 + b"\r\n", id="a folded header"),
        pytest.param(CHUNKED + b"2;", b"a" * 65_536, id="a chunk's extension"),
        pytest.param(b"", b"\r\n" * 30_000, id="empty lines"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01", b"\x00" * 100, id="TLS"),
    ],
)
async def test_head_without_an_end_is_refused(site: Site, first: bytes, again: bytes) -> None:
    reader, writer = await connect(site)
    pouring = asyncio.create_task(pour(writer, first, again, 400_000_000))
    answer = await said(reader)
    # A reset that overtakes the answer is a refusal too.
    assert not answer or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 "))
    assert await pouring < 400_000_000
    writer.close()


@pytest.mark.parametrize(("size", "status"), [(8_000, 401), (9_000, 400)])
async def test_head_size_is_a_setting(redis_url: str, tmp_path: Path, size: int, status: int) -> None:
    settings = gateway_settings(redis_url, tmp_path, max_header_bytes=8_192)
    async with serving(settings) as site:
        reader, writer = await connect(site)
        # Without its end the server has to hold the head.
        writer.write((HEAD + b"X: ").ljust(size, b"a"))
        await asyncio.sleep(0)
        if status == 401:
            writer.write(b"\r\n\r\n")
        async with asyncio.timeout(20):
            assert int((await reader.readuntil(b"\r\n")).split()[1]) == status
        writer.close()


async def test_too_many_connections_get_503(redis_url: str, tmp_path: Path) -> None:
    async with serving(gateway_settings(redis_url, tmp_path, max_connections=10)) as site:
        silent = [await connect(site) for _ in range(10)]
        reader, writer = await connect(site)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await said(reader)).startswith(b"HTTP/1.1 503")
        for _, one in (*silent, (reader, writer)):
            one.close()


async def test_the_longest_search_in_any_script_is_no_long_url(site: Site) -> None:
    async with client(site.url, None) as stranger:
        for letter in ("a", "é", "語", "🦊"):
            assert (await stranger.get("/memory", params={"query": letter * 4_000})).status_code == 401


async def test_bodies_in_small_chunks_and_trailers_are_taken(redis_url: str, tmp_path: Path, site: Site) -> None:
    body = json.dumps({"query": "say " + "hello " * 1_000}).encode()
    async with generating(redis_url, tmp_path):
        reader, writer = await connect(site)
        for _ in range(2):
            writer.write(CHUNKED.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer %b\r\n\r\n" % ADMIN_KEY.encode()))
            for byte in body:
                writer.write(b"1\r\n%c\r\n" % byte)
            writer.write(b"0\r\nX-Trailer: " + b"a" * 16_384 + b"\r\nAuthorization: Bearer wrong\r\n\r\n")
            await writer.drain()
            async with asyncio.timeout(60):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                length = int(head.lower().partition(b"content-length: ")[2].split()[0])
                await reader.readexactly(length)
        writer.close()


@pytest.mark.parametrize("first", [CHUNKED, CHUNKED + b"2\r\n{", DECLARED, DECLARED + b"{"])
async def test_silent_body_is_refused_and_its_connection_closed(site: Site, first: bytes) -> None:
    reader, writer = await connect(site)
    writer.write(first)
    assert refusal(await said(reader)) == (408, "request_timeout")
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"),
        DECLARED.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"),
    ],
)
async def test_request_with_two_lengths_is_refused_and_its_connection_closed(site: Site, head: bytes) -> None:
    reader, writer = await connect(site)
    writer.write(head + b"0\r\n\r\n" + HEAD + b"\r\n")
    raw = await said(reader)
    writer.close()
    assert refusal(raw) == (400, "invalid_request")
    # The bytes behind it are never read as a request.
    assert raw.count(b"HTTP/1.1 ") == 1


async def test_client_that_sends_too_much_reads_the_refusal(site: Site) -> None:
    # httpx reads nothing until it has sent all.
    answer = await site.http.post("/query", content=b" " * 30_000_000, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"


async def test_requests_that_come_together_are_answered_in_their_order(site: Site) -> None:
    reader, writer = await connect(site)
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    writer.write(HEAD + b"\r\n" + (one + b"\r\n") * 100 + one + b"Connection: close\r\n\r\n")
    raw = await said(reader)
    writer.close()
    assert [part.split()[0] for part in raw.split(b"HTTP/1.1 ")[1:]] == [b"401", *[b"200"] * 101]


async def test_what_is_refused_behind_a_running_answer_is_not_written_into_it(
    redis_url: str, tmp_path: Path, site: Site
) -> None:
    async with generating(redis_url, tmp_path) as fake:
        reader, writer = await connect(site)
        body = json.dumps({"query": "slow"}).encode()
        fields = f"Host: x\r\nAuthorization: Bearer {ADMIN_KEY}\r\nContent-Type: application/json"
        head = f"POST /query HTTP/1.1\r\n{fields}\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(20):
            begun = await reader.readuntil(b"\nevent: ")
        writer.write(HEAD + b"\r\n" + b"this is no request\r\n\r\n")
        fake.gate.set()
        rest = await said(reader)
        writer.close()
    assert begun.startswith(b"HTTP/1.1 200")
    answer, _, behind = rest.partition(b"0\r\n\r\n")
    assert b"event: completed" in answer
    assert [part.split()[0] for part in behind.split(b"HTTP/1.1 ")[1:]] == [b"401", b"400"]


async def test_an_answer_that_takes_longer_and_a_connection_kept_for_the_next_request_are_left_alone(
    redis_url: str, tmp_path: Path, site: Site
) -> None:
    async with generating(redis_url, tmp_path) as fake:
        reader, writer = await connect(site)
        ask = json.dumps({"query": "slow"}).encode()
        writer.write(
            b"POST /query HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (ADMIN_KEY.encode(), len(ask), ask)
        )
        # longer than a client may be silent
        await asyncio.sleep(2.5)
        fake.gate.set()
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        await asyncio.sleep(2.5)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


# ── wishes for another protocol ──────────────────────────────────────────────────────────────────────────────────

# As Java's HttpClient sends it; curl and OkHttp differ in the order of headers only.
WISH = (
    b"POST /query HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: %d\r\nHost: x\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: %b\r\nUser-Agent: Java-http-client/21\r\n"
    b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n\r\n"
)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_request_that_wishes_an_upgrade_is_served_with_its_body(
    site: Site, redis_url: str, tmp_path: Path, protocol: bytes, size: int
) -> None:
    body = json.dumps({"query": "say " + "x" * 5_000}).encode()
    raw = (WISH % (len(body), protocol, ADMIN_KEY.encode()) + body) * 2
    async with generating(redis_url, tmp_path):
        reader, writer = await connect(site)
        for at in range(0, len(raw), size):
            writer.write(raw[at : at + size])
            if size > 1 or at % 500 == 0:
                await writer.drain()
        for _ in range(2):
            async with asyncio.timeout(20):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                assert head.startswith(b"http/1.1 200")
                length = int(head.partition(b"content-length:")[2].split()[0])
                assert json.loads(await reader.readexactly(length))["answer"] == "You said: " + "x" * 5_000
        writer.close()


async def test_an_upgrade_of_a_chunked_request_and_of_one_without_a_body(site: Site) -> None:
    reader, writer = await connect(site)
    auth = b"Authorization: Bearer " + ADMIN_KEY.encode() + b"\r\n"
    wish = b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + auth
    writer.write(b"GET /sessions HTTP/1.1\r\nHost: x\r\n" + wish + b"\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    reader, writer = await connect(site)
    chunks = b"d\r\n" + b'{"query": ""}' + b"\r\n0\r\n\r\n"
    writer.write(CHUNKED.removesuffix(b"\r\n") + wish + b"\r\n" + chunks)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 422")
    writer.close()


async def test_a_connect_is_no_way_through(site: Site) -> None:
    reader, writer = await connect(site)
    writer.write(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 1_000)
    async with asyncio.timeout(10):
        assert (await reader.readuntil(b"\r\n"))[9:12] in (b"400", b"404", b"405")
    writer.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
async def test_curl_with_http2_is_served(site: Site, redis_url: str, tmp_path: Path) -> None:
    async with generating(redis_url, tmp_path):
        curl = await asyncio.create_subprocess_exec(
            "curl", "-sS", "--max-time", "20", "--http2", f"{site.url}/query", "-H", "Content-Type: application/json",
            "-H", f"Authorization: Bearer {ADMIN_KEY}", "-d", '{"query": "say hello"}',
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await curl.communicate()
    assert json.loads(out)["answer"] == "You said: hello"
