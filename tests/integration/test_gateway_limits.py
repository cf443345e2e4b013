"""A gateway process without a proxy: what clients that do not read, write or end cost the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.http_gateway import ADMIN_KEY, client
from support.stack import Participants
from support.waiting import eventually

SILENT, SLOW_READERS = 3_000, 2_000
# Seconds that /health may take on a busy machine while thousands of clients are connected.
MOST_SECONDS = 1.0


@dataclass
class Server:
    """A gateway process. host, port: where it listens."""

    port: int
    pid: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    def peak(self, *, begin: bool = False) -> int:
        """Return the most memory that the process has had, in bytes. begin: from now on."""
        if begin:
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    async def health(self, times: int = 40) -> list[float]:
        """Return the seconds that /health takes, each time on a new connection."""
        found = []
        for _ in range(times):
            started = time.perf_counter()
            reader, writer = await self.connect()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            async with asyncio.timeout(20):
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
            found.append(time.perf_counter() - started)
            writer.close()
        return found


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncIterator[Server]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * SILENT:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * SILENT), hard))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Participants(redis_url, "http://127.0.0.1:9", tmp_path, admin_key=ADMIN_KEY, log_level="error") as stack:
        process = stack.start("gateway", api_port=port)
        async with client(f"http://127.0.0.1:{port}", ADMIN_KEY) as http:

            async def serves() -> bool:
                with contextlib.suppress(OSError, Exception):
                    return (await http.get("/sessions")).status_code == 200
                return False

            await eventually(serves, what=f"the gateway answers\n{process.log()}")
        yield Server(port, process.pid)


async def opened(server: Server, count: int, first: bytes, *, buffer: int | None = None) -> list[socket.socket]:
    """Return connections that have sent `first` and do nothing else. buffer: bytes that each can receive."""
    loop = asyncio.get_running_loop()

    async def one() -> socket.socket:
        made = socket.socket()
        made.setblocking(False)
        if buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        await loop.sock_connect(made, ("127.0.0.1", server.port))
        if first:
            await loop.sock_sendall(made, first)
        return made

    found: list[socket.socket] = []
    for _ in range(0, count, 100):
        found += await asyncio.gather(*(one() for _ in range(100)))
    return found


def report(what: str, before: list[float], during: list[float], grown: int) -> None:
    """Print the figures of a run: pytest shows them with -s."""
    ms = [f"{statistics.median(found) * 1000:.1f}/{max(found) * 1000:.1f}" for found in (before, during)]
    print(f"\n{what}: /health p50/max {ms[0]} ms alone, {ms[1]} ms with them; peak memory +{grown / 1e6:.1f} MB")


@pytest.mark.parametrize(
    ("count", "first", "buffer", "most_grown"),
    [
        pytest.param(SILENT, b"", None, 150_000_000, id="silent"),
        pytest.param(SILENT, b"GET /sessions HTTP/1.1\r\nHost: x\r\nX: ", None, 150_000_000, id="half a head"),
        pytest.param(
            SILENT, b"POST /keys/redeem HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", None, 300_000_000,
            id="half a body",
        ),
        pytest.param(
            SLOW_READERS, b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n", 4_096, 500_000_000, id="slow readers"
        ),
    ],
)  # fmt: skip
async def test_clients_that_do_nothing_do_not_slow_health(
    server: Server, count: int, first: bytes, buffer: int | None, most_grown: int, request: pytest.FixtureRequest
) -> None:
    before, peak = await server.health(), server.peak(begin=True)
    started = time.perf_counter()
    connections = await opened(server, count, first, buffer=buffer)
    try:
        # Every request has been taken up: what it costs is no matter of these clients alone.
        await server.health(1)
        took = time.perf_counter() - started
        during = await server.health()
    finally:
        for one in connections:
            one.close()
    grown = server.peak() - peak
    report(f"{count} {request.node.callspec.id} in {took:.1f} s", before, during, grown)
    assert statistics.median(during) < MOST_SECONDS
    assert max(during) < 5 * MOST_SECONDS
    assert grown < most_grown


async def test_4000_headers_of_4_kb_are_refused_in_bounded_memory(server: Server) -> None:
    peak = server.peak(begin=True)
    line = b"X-A: " + b"a" * 4_096 + b"\r\n"

    async def one() -> bytes:
        reader, writer = await server.connect()
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET /sessions HTTP/1.1\r\nHost: x\r\n" + 4_000 * line + b"\r\n")
            await writer.drain()
        found = b""
        with contextlib.suppress(ConnectionError):
            found = await reader.read()
        writer.close()
        return found

    answers = await asyncio.gather(*(one() for _ in range(10)))
    assert not any(answer.startswith(b"HTTP/1.1 2") for answer in answers)
    grown = server.peak() - peak
    print(f"\n10 × 4,000 headers of 4 kB (164 MB): peak memory +{grown / 1e6:.1f} MB")
    assert grown < 30_000_000
    assert max(await server.health(5)) < 5 * MOST_SECONDS


LARGE = b"POST /query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
KEY = b"Authorization: Bearer %b\r\n" % ADMIN_KEY.encode()


@pytest.mark.parametrize(
    ("size", "headers", "status", "code"),
    [
        pytest.param(5_000_000, KEY, 413, "body_too_large", id="over 4 MB"),
        pytest.param(10**15, KEY, 413, "body_too_large", id="a petabyte"),
        pytest.param(5_000_000, KEY + b"Expect: 100-continue\r\n", 413, "body_too_large", id="waits for 100"),
        pytest.param(100_000, b"", 401, "unauthorized", id="a stranger's"),
    ],
)
async def test_body_over_the_limit_is_refused_before_it_is_read(
    server: Server, size: int, headers: bytes, status: int, code: str
) -> None:
    reader, writer = await server.connect()
    # No byte of the body is sent.
    writer.write(LARGE % (size, headers))
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
    writer.close()
    assert int(head.split()[1]) == status
    assert json.loads(body)["error"]["code"] == code


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_request_with_upgrade_keeps_its_body(server: Server, protocol: bytes) -> None:
    reader, writer = await server.connect()
    body = json.dumps({"name": "laptop", "user_id": "ann"}).encode()
    head = (
        b"POST /keys HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
    )
    writer.write(head % (protocol, len(body), KEY) + body)
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 201")
    writer.close()
