"""One connection as bytes: how it is opened, what it may be told, and how it ends."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.scripted_redis import HangUp, ScriptedRedis
from support.waiting import eventually

from shared.bus import ReplyError
from shared.bus.endpoint import Endpoint
from shared.bus.wire import Desync, Wire, open_wire


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One for 127.0.0.1 that vouches for itself, and its key, which is kept with a password."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    chain, kept = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    kept.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"p"),
        )
    )
    return chain, kept


async def test_a_connection_may_be_one_of_tls_to_whoever_has_the_certificate_of_that_name(
    certificate: tuple[Path, Path],
) -> None:
    chain, key = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(chain))
    context.load_cert_chain(chain, key, "p")
    # the client shows one too
    context.verify_mode = ssl.CERT_REQUIRED
    redis, own = ScriptedRedis(), f"&ssl_certfile={chain}&ssl_keyfile={key}&ssl_password=p"
    async with redis.listening(tls=context) as server:
        url = f"rediss://127.0.0.1:{server.port}/?ssl_ca_certs={chain}{own}"
        wire, replies = await open_wire(Endpoint.parse(url).server, [("PING",)])
        assert replies == [b"PONG"]
        wire.abort()
        # nobody vouches for it, or it has another name
        for odd in (url.replace(f"ssl_ca_certs={chain}", ""), url.replace("127.0.0.1", "localhost")):
            with pytest.raises(ssl.SSLCertVerificationError):
                await open_wire(Endpoint.parse(odd).server)
        wire, _ = await open_wire(
            Endpoint.parse(url.replace("127.0.0.1", "localhost") + "&ssl_check_hostname=no").server
        )
        wire.abort()
        await eventually(lambda: not redis.connections)
    # the loop closes what was aborted in its next rounds
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert redis.asked[0] == [(b"PING",)]


async def test_a_connection_may_go_through_a_file(tmp_path: Path) -> None:
    redis, path = ScriptedRedis(), tmp_path / "redis.sock"
    async with redis.listening(path=path) as server:
        wire, replies = await open_wire(replace(server, password="p", database=2), [("PING",), ("TIME",)])
        assert replies == [b"PONG", [b"5000", b"0"]]
        wire.abort()
        # once more is once
        wire.abort()
        await eventually(lambda: not redis.connections)
        assert str(await wire.lost)
        wire.abort()
    assert redis.asked == [[(b"AUTH", b"p"), (b"SELECT", b"2"), (b"PING",), (b"TIME",)]]


@pytest.mark.parametrize(("what", "said"), [("AUTH", "WRONGPASS no"), ("SELECT", "ERR DB index is out of range")])
async def test_who_is_refused_is_told_and_leaves(what: str, said: str) -> None:
    redis = ScriptedRedis(**{what: ReplyError(said)})
    async with redis.listening() as server:
        with pytest.raises(ConnectionError, match=said):
            await open_wire(replace(server, password="p", database=2), [("PING",)])
        await eventually(lambda: redis.asked and not redis.connections)
        # of what is asked behind that an error is an answer
        redis.answers |= ScriptedRedis().answers | {"PING": ReplyError("NOPERM no")}
        wire, (reply,) = await open_wire(replace(server, password="p"), [("PING",)])
        assert str(reply) == "NOPERM no"
        wire.abort()
        # who asks for nothing is not kept waiting
        wire, replies = await asyncio.wait_for(open_wire(server), 30)
        assert replies == []
        wire.abort()


async def test_a_connection_that_ends_before_it_is_answered_ends_with_what_the_server_said_last() -> None:
    def hangs_up(*_: bytes) -> None:
        raise HangUp

    for first, said in (
        (ReplyError("NOAUTH a password"), "NOAUTH a password"),
        ("fine", "Redis closed the connection"),
    ):
        redis = ScriptedRedis(PING=first, TIME=hangs_up)
        async with redis.listening() as server:
            with pytest.raises(ConnectionError, match=said):
                await open_wire(server, [("PING",), ("TIME",)])


async def test_what_nobody_asked_for_or_makes_no_sense_ends_a_connection() -> None:
    for data, error in ((b"+one\r\n+two\r\n", Desync), (b"?\r\n", Desync)):
        wire = Wire()
        wire.transport = Kept()
        asking = asyncio.create_task(wire.ask([("PING",)]))
        await asyncio.sleep(0)
        wire.data_received(data)
        assert isinstance(await wire.lost, error)
        # what follows is not looked at
        wire.data_received(b"+three\r\n")
        asking.cancel()
    wire = Wire()
    wire.data_received(b"+one\r\n")
    assert isinstance(wire.lost.result(), Desync)


async def test_replies_of_one_read_come_together_and_a_part_of_one_not_at_all() -> None:
    wire, got, heard = Wire(), list[list[object]](), list[float]()
    wire.receive = got.append
    for data in (b"+one\r\n:2\r\n$5\r\nth", b"", b"ree\r\n"):
        wire.heard = 0.0
        wire.data_received(data)
        heard.append(wire.heard)
    assert got == [[b"one", 2], [b"three"]]
    # also what is not complete is a sign of life
    assert all(heard)


class Kept(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += bytes(data)


async def test_what_is_written_to_a_connection_that_ends_is_lost() -> None:
    wire, transport = Wire(), Kept()
    wire.connection_made(transport)
    wire.send([("GET", "x"), ("PING",)])
    transport.closing = True
    wire.send([("GET", "y")])
    assert transport.data == b"*2\r\n$3\r\nGET\r\n$1\r\nx\r\n*1\r\n$4\r\nPING\r\n"
    wire.connection_lost(OSError("reset"))
    assert str(wire.lost.result()) == "reset"
    wire.connection_lost(None)
    assert str(wire.lost.result()) == "reset"
