"""Connections of every form, slow or silent ones, and what a broken one still had in its buffers."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import redis
from contract.bus.calling import Callers, Effects
from contract.bus.servers import Server, alone, network
from contract.bus.surface import (
    EntryType,
    JournalWriter,
    PermanentError,
    SettingsError,
    call,
    connected,
    follow_journals,
    journal_key,
    key,
    open_bus,
    read_journal,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.cluster import Node, Watched
from support.entries import event_of
from support.proxy import Proxy
from support.waiting import eventually

ORDER, COUNT = key("order"), key("count")
LARGE = 8_000_000


# ── forms of a URL ───────────────────────────────────────────────────────────────────────────────────────────────


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate of 127.0.0.1; return the files of the certificate and its key."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "redis")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(private, hashes.SHA256())
    )
    chain, secret = folder / "redis.pem", folder / "redis.key"
    chain.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form, encryption = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, encryption))
    return chain, secret


@contextlib.asynccontextmanager
async def tcp(folder: Path) -> AsyncIterator[str]:
    with running(alone(folder)) as node:
        yield f"redis://{node.name}/0"


@contextlib.asynccontextmanager
async def tcp_with_password(folder: Path) -> AsyncIterator[str]:
    with running(alone(folder, requirepass="p@ss/word")) as node:
        yield f"redis://:p%40ss%2Fword@{node.name}/0"


@contextlib.asynccontextmanager
async def tcp_with_user(folder: Path) -> AsyncIterator[str]:
    with running(alone(folder)) as node:
        node.client.execute_command("ACL", "SETUSER", "ann", "on", ">secret", "~*", "&*", "+@all")
        node.client.execute_command("ACL", "SETUSER", "default", "off")
        yield f"redis://ann:secret@{node.name}/0"


@contextlib.asynccontextmanager
async def tcp_with_password_file(folder: Path) -> AsyncIterator[str]:
    async with tcp_with_user(folder) as url:
        (folder / "password").write_text("secret\n")
        yield f"{url.replace(':secret@', '@')}?password_file={folder / 'password'}"


@contextlib.asynccontextmanager
async def database(folder: Path) -> AsyncIterator[str]:
    with running(alone(folder)) as node:
        yield f"redis://{node.name}/3"


@contextlib.asynccontextmanager
async def unix_socket(folder: Path) -> AsyncIterator[str]:
    with running(alone(folder, unixsocket=str(folder / "s"))):
        yield f"unix://{folder / 's'}?db=0"


@contextlib.asynccontextmanager
async def tls(folder: Path) -> AsyncIterator[str]:
    chain, secret = certificate(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain, secret)
    with running(alone(folder)) as node:
        async with Proxy(f"redis://{node.name}/0", tls=context) as proxy:
            yield f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={chain}"


@contextlib.asynccontextmanager
async def sentinels(folder: Path) -> AsyncIterator[str]:
    with Watched(folder, password="secret", sentinel_password="another") as watched:
        yield watched.url


@contextlib.contextmanager
def running(node: Node) -> Iterator[Node]:
    node.start()
    try:
        yield node
    finally:
        node.close()


Form = Callable[[Path], AbstractAsyncContextManager[str]]
FORMS = [tcp, tcp_with_password, tcp_with_user, tcp_with_password_file, database, unix_socket, tls, sentinels]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
async def test_url_of_each_form_carries_calls_and_journals(form: Form, callers: Callers, tmp_path: Path) -> None:
    async with form(tmp_path) as url, callers.both(url) as asker, follow_journals(asker.bus) as journals:
        assert (await asker.ask("hello")).result == "you said hello"
        writer, _ = await JournalWriter.claim(asker.bus, journal_key("1-1", "A"), event_of("claimed", {}), 60)
        follower = journals.follow(journal_key("1-1", "A"))
        assert [entry_id for entry_id, _ in await follower.next()] == ["1-1"]
        waiting = asyncio.create_task(follower.next())
        await writer.append(event_of(EntryType.COMPLETED, {}))
        assert [entry_id for entry_id, _ in await asyncio.wait_for(waiting, 30)] == ["1-2"]
        assert len(await read_journal(asker.bus, journal_key("1-1", "A"))) == 2
        follower.close()


async def test_certificates_are_read_once_for_all_connections(tmp_path: Path) -> None:
    async with tls(tmp_path) as url, open_bus(url) as bus:
        await call(bus, "SET", key("a"), "b")
        await asyncio.to_thread(Path(url.partition("ssl_ca_certs=")[2]).unlink)
        async with bus.dedicated("other") as other:
            assert await asyncio.wait_for(other.call("GET", key("a")), 20) == b"b"


async def test_tls_server_of_unknown_authority_is_refused(tmp_path: Path) -> None:
    async with tls(tmp_path) as url, open_bus(url.partition("?")[0], timeout=0.5) as bus:
        writing = asyncio.create_task(call(bus, "SET", key("a"), "b"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writing, 1.0)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://127.0.0.1/0",
        "redis://secret@h:port/0",
        "redis://h/x",
        "redis+sentinel://secret@h/",
        "rediss://h?no=1",
        "redis://h?password_file=/none/here",
        f"redis://:secret@h?password_file={__file__}",
    ],
)
def test_url_that_is_wrong_is_refused_with_a_reason(url: str) -> None:
    with pytest.raises(SettingsError, match="LOCAL2_REDIS_URL") as refused:
        open_bus(url)
    assert "secret" not in str(refused.value)


async def test_password_file_is_read_anew_for_each_connection(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("old")
    with running(alone(tmp_path, requirepass="old")) as node:
        async with open_bus(f"redis://{node.name}/0?password_file={password}") as bus:
            await call(bus, "SET", key("a"), "b")
            node.client.config_set("requirepass", "new")
            node.client.client_kill_filter(_type="normal", skipme=True)
            # The file changes later than the server.
            reading = asyncio.create_task(call(bus, "GET", key("a")))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(reading), 0.5)
            password.write_text("new")
            assert await asyncio.wait_for(reading, 30) == b"b"


async def test_sentinel_failover_is_followed(tmp_path: Path, callers: Callers, effects: Effects) -> None:
    """Calls are answered before and after the master has changed, and no one has run twice."""
    with Watched(tmp_path, password="secret") as watched:
        old = watched.master()
        async with callers.both(watched.url, redis_timeout=0.5) as asker:
            assert (await asker.ask("before", "c1")).result == "you said before"
            old.kill()
            await eventually(lambda: watched.master() is not old, 20, "the sentinels have chosen")
            assert (await asker.ask("after", "c2", timeout=60)).result == "you said after"
    assert effects.all_runs() == {"before": 1, "after": 1}


# ── slow and silent connections ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_slow_connection_carries_large_reply(server: Server, client: redis.Redis) -> None:
    """8 MB at 200 kB/s take forty seconds, eight times as long as a connection may be silent."""
    client.set(key("large"), "x" * LARGE)
    async with network(server, rate=200_000) as net, open_bus(net) as bus:
        await connected(bus)
        opened = net.connections
        assert await call(bus, "GET", key("large"), repeat=False) == b"x" * LARGE
        assert net.connections == opened


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "timeout"), [pytest.param(2_000_000, 1.0, id="2 MB/s"), pytest.param(200_000, 5.0, id="200 kB/s")]
)
async def test_slow_connection_carries_large_command(
    rate: int, timeout: float, server: Server, client: redis.Redis
) -> None:
    async with network(server, rate=rate, window=65_536) as net, open_bus(net, timeout=timeout) as bus:
        await connected(bus)
        opened = net.connections
        assert await call(bus, "SET", key("large"), "x" * LARGE, repeat=False) == b"OK"
        assert net.connections == opened
    assert client.strlen(key("large")) == LARGE


async def test_slow_connection_carries_large_tool_call(server: Server, callers: Callers, effects: Effects) -> None:
    """Both participants stay offered meanwhile: heartbeats do not wait behind it."""
    text = "y" * 3_000_000
    async with network(server, rate=3_000_000) as net, callers.asker(server) as observer:  # noqa: SIM117
        async with callers.worker(net, redis_timeout=0.5), callers.asker(net, redis_timeout=0.5) as asker:
            await eventually(observer.client.schemas)
            large = asyncio.create_task(asker.ask(text, "c1", timeout=100, attempt=1))
            looks: list[bool] = []
            while not large.done():
                looks.append(bool(await observer.client.schemas()))
                await asyncio.sleep(0.05)
            assert (await large).result == f"you said {text}"
    assert effects.runs(text) == 1
    assert looks.count(False) <= len(looks) // 10


async def test_slow_answers_beyond_the_timeout_are_waited_for(server: Server) -> None:
    """Each answer takes longer than the time limit: the limit of the next connection is longer."""
    async with network(server) as net:
        net.set(latency=0.3)
        async with open_bus(net, timeout=0.05) as bus:
            for number in range(2):
                assert await asyncio.wait_for(call(bus, "SET", key("a"), number), 60) == b"OK"


@pytest.mark.parametrize("timeout", [0.2, 1.0])
async def test_black_holed_connection_is_replaced_in_time(timeout: float, server: Server) -> None:
    async with network(server) as net, open_bus(net, timeout=timeout) as bus:
        best = float("inf")
        loop = asyncio.get_running_loop()
        for number in range(3):
            await call(bus, "SET", key("a"), number)
            net.lose_connections()
            started = loop.time()
            assert await asyncio.wait_for(call(bus, "GET", key("a")), 60) == b"%d" % number
            best = min(best, loop.time() - started)
    # no sooner than the limit, and about a second later at most
    assert timeout * 0.9 <= best < 2 * timeout + 1.0


@pytest.mark.parametrize("data", [pytest.param(b"?\r\n", id="no reply"), pytest.param(b"+OK\r\n", id="one too many")])
async def test_connection_with_unexpected_bytes_is_replaced(data: bytes, server: Server) -> None:
    async with network(server) as net, open_bus(net) as bus:
        assert await call(bus, "SET", key("a"), 1) == b"OK"
        opened = net.connections
        net.inject(data)
        await eventually(lambda: net.connections > opened)
        assert await call(bus, "GET", key("a")) == b"1"


async def test_broken_connection_buffers_are_not_carried_out(server: Server, client: redis.Redis) -> None:
    """The network holds a connection. Its commands are sent again over the next one; then the network lets go."""
    async with network(server, window=8_192) as net, open_bus(net, timeout=0.3) as bus:
        await connected(bus)
        net.hold_connections()
        texts = [str(number) * 50_000 for number in range(1_000, 1_020)]
        await asyncio.gather(*(call(bus, "RPUSH", ORDER, text) for text in texts))
        assert client.lrange(ORDER, 0, -1) == texts
        await call(bus, "DEL", ORDER)
        net.release()
        # what was still on its way would arrive before what is sent now
        for number in range(20):
            await call(bus, "INCR", COUNT)
            assert client.exists(ORDER) == 0, number
    await eventually(lambda: not any("test/1" in one["name"] for one in client.client_list()))
    assert client.exists(ORDER) == 0


async def test_message_that_breaks_connections_is_given_up(server: Server, client: redis.Redis) -> None:
    """Something on the way cannot bear large messages. The caller gets the reason; the next command is carried out."""
    async with network(server, most=1_500_000) as net, open_bus(net, timeout=0.5) as bus:
        with pytest.raises(PermanentError, match="broke the connection"):
            await asyncio.wait_for(call(bus, "SET", key("large"), "x" * 2_000_000), 60)
        assert await asyncio.wait_for(call(bus, "SET", key("small"), "x"), 30) == b"OK"
    assert not client.exists(key("large"))
