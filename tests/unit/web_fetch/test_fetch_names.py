"""Names to addresses: from name servers on loopback that answer, or never do."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import aiodns
import pytest
from support.waiting import eventually

from services.web_fetch import guard
from services.web_fetch.names import ATTEMPT_SECONDS, ATTEMPTS, Names, open_names
from services.web_fetch.service import WebFetch
from shared.errors import ToolError

pytestmark = pytest.mark.asyncio(loop_scope="module")

A, AAAA = 1, 28
Answer = Callable[[int], list[bytes] | None]


class Server(asyncio.DatagramProtocol):
    """A name server: `answer` gives the addresses for a type of record, None for no such name."""

    def __init__(self, answer: Answer | None) -> None:
        self.answer = answer
        self.asked = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, sender: Any) -> None:
        self.asked += 1
        if self.answer is None:
            return
        end = data.index(b"\0", 12) + 5
        (kind,) = struct.unpack(">H", data[end - 4 : end - 2])
        addresses = self.answer(kind)
        code = 0x8183 if addresses is None else 0x8180
        found = addresses or []
        head = data[:2] + struct.pack(">HHHHH", code, 1, len(found), 0, 0)
        records = b"".join(struct.pack(">HHHIH", 0xC00C, kind, 1, 60, len(raw)) + raw for raw in found)
        self.transport.sendto(head + data[12:end] + records, sender)


@asynccontextmanager
async def asking(answer: Answer | None, timeout: float = 5) -> AsyncIterator[tuple[Names, Server]]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(lambda: Server(answer), local_addr=("127.0.0.1", 0))
    address = f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
    # without `lookups`: of what is given there pycares keeps no copy until it is read
    names = Names(nameservers=[address], timeout=timeout, domains=[])
    try:
        yield names, server
    finally:
        await names.close()
        transport.close()


async def test_both_kinds_of_addresses_are_found() -> None:
    def answer(kind: int) -> list[bytes]:
        return [bytes([93, 184, 216, 34])] if kind == A else [bytes.fromhex("20010db8" + "0" * 23 + "1")]

    async with asking(answer) as (names, _):
        assert sorted(await names("page.example", 80)) == ["2001:db8::1", "93.184.216.34"]


async def test_an_address_is_its_own_answer() -> None:
    async with asking(None) as (names, server):
        assert await names("93.184.216.34", 80) == ["93.184.216.34"]
        assert await names("2001:db8::1", 80) == ["2001:db8::1"]
        assert server.asked == 0


async def test_this_machines_own_names_are_known() -> None:
    names = Names()
    try:
        assert set(await names("localhost", 80)) <= {"127.0.0.1", "::1"}
    finally:
        await names.close()


async def test_an_unknown_name_is_an_error(fetcher: Any) -> None:
    async with asking(lambda _: None) as (names, _):
        with pytest.raises(ToolError, match=r"^fetch error: the name no\.example cannot be resolved$"):
            await fetcher(resolver=names)(WebFetch(url="http://no.example/"))


async def test_a_name_without_addresses_is_an_error(fetcher: Any) -> None:
    async with asking(lambda _: []) as (names, _):
        with pytest.raises(ToolError, match=r"^fetch error: the name no\.example cannot be resolved$"):
            await fetcher(resolver=names)(WebFetch(url="http://no.example/"))


async def test_a_private_address_is_blocked_whoever_says_it(fetcher: Any) -> None:
    async with asking(lambda kind: [bytes([10, 0, 0, 1])] if kind == A else []) as (names, _):
        with pytest.raises(ToolError, match=r"^blocked: in\.example is not on the public internet$"):
            await fetcher(resolver=names)(WebFetch(url="http://in.example/"))


async def test_silent_name_servers_hold_up_no_other_fetch(site: Any, reply: Any, fetcher: Any) -> None:
    site.replies["/"] = reply("words")
    async with asking(None, timeout=60) as (names, server):
        lost = [asyncio.create_task(names(f"lost{n}.example", 80)) for n in range(64)]
        await eventually(lambda: server.asked >= len(lost))
        run = fetcher([f"localhost:{site.port}"])
        assert (await run(WebFetch(url=site.url(host="localhost")))).text.endswith("words")
        assert not any(task.done() for task in lost)
        for task in lost:
            task.cancel()
        await asyncio.wait(lost)
        assert all(task.cancelled() for task in lost)


async def test_silent_name_servers_are_an_error(fetcher: Any) -> None:
    async with asking(None, timeout=0.1) as (names, _):
        with pytest.raises(ToolError, match=r"^fetch error: the name servers do not answer for lost\.example$"):
            await fetcher(resolver=names)(WebFetch(url="http://lost.example/"))


async def test_a_resolver_that_never_ends_is_left(fetcher: Any) -> None:
    async with asking(None, timeout=60) as (names, _):
        with pytest.raises(ToolError, match=r"^fetch error: the name servers do not answer for lost\.example$"):
            await fetcher(resolver=names)(WebFetch(url="http://lost.example/"))


async def test_two_attempts_at_a_name_end_before_the_guard_gives_it_up() -> None:
    # each waits twice as long as the one before
    assert ATTEMPT_SECONDS * (2**ATTEMPTS - 1) < guard.RESOLVE_SECONDS


class Resolver:
    """What c-ares is asked; it answers with `nodes`, or fails with `error`."""

    made: ClassVar[list[dict[str, Any]]] = []
    nodes: ClassVar[list[Any]] = []
    error: ClassVar[Exception | None] = None
    asked: ClassVar[list[Any]] = []
    closed: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        self.made.append(options)

    async def getaddrinfo(self, host: str, **how: Any) -> Any:
        self.asked.append((host, how))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(nodes=[SimpleNamespace(addr=addr) for addr in self.nodes])

    async def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> type[Resolver]:
    fresh = type("Fresh", (Resolver,), {"made": [], "asked": [], "nodes": [], "error": None, "closed": 0})
    monkeypatch.setattr(aiodns, "DNSResolver", fresh)
    return fresh


async def test_a_name_is_looked_up_once_for_connections_by_one_resolver(resolver: type[Resolver]) -> None:
    resolver.nodes = [(b"2001:db8::1", 80, 0, 0), ("93.184.216.34", 80), (b"2001:db8::1", 80, 0, 0)]
    async with open_names() as names:
        assert resolver.made == []
        for host in ("a.example", "b.example"):
            assert await names(host, 81) == ["2001:db8::1", "93.184.216.34"]
    wanted = {"port": 81, "type": socket.SOCK_STREAM}
    assert resolver.asked == [("a.example", wanted), ("b.example", wanted)]
    assert resolver.made == [{"timeout": ATTEMPT_SECONDS, "tries": ATTEMPTS}]
    assert resolver.closed == 1
    # who has asked for nothing has nothing to close
    async with open_names():
        pass
    assert (len(resolver.made), resolver.closed) == (1, 1)
    await Names(domains=[])("a.example", 80)
    assert resolver.made[1] == {"timeout": ATTEMPT_SECONDS, "tries": ATTEMPTS, "domains": []}


@pytest.mark.parametrize(("number", "silent"), [(12, True), (4, False), (11, False)])
async def test_a_silent_name_server_is_told_from_one_that_refuses(
    resolver: type[Resolver], number: int, silent: bool
) -> None:
    resolver.error = aiodns.error.DNSError(number, "no")
    with pytest.raises(OSError, match=r"cannot resolve a\.example") as refused:
        await Names()("a.example", 80)
    assert isinstance(refused.value, TimeoutError) is silent
