"""The store of engrams on an embedded Chroma, and what it does where a server fails."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.loopback import listening
from support.on_disk import full_disk, having

from services.memory import chroma
from services.memory.engram import Engram
from services.memory.settings import MemorySettings
from services.memory.store import StoreDamaged, StoreUnavailable, open_store
from services.memory.vectors import NO_VECTOR, Vector

EAST, NORTH = Vector("m", [1.0, 0.0]), Vector("m", [0.0, 1.0])


def settings(folder: Path, **values: str) -> MemorySettings:
    return MemorySettings(data_dir=folder, **values)


def engram(number: int, user_id: str = "ann", text: str = "") -> Engram:
    return Engram(f"e{number}", user_id, "note", number, number, content=text or f"note {number}")


async def test_store_opened_again_has_the_same_engrams(tmp_path: Path) -> None:
    async with open_store(settings(tmp_path)) as store:
        await store.put("ann", [(engram(1), EAST), (engram(2), NORTH), (engram(3), NO_VECTOR)])
    async with open_store(settings(tmp_path)) as store:
        assert set(await store.get("ann", ["e1", "e2", "e3", "e4"])) == {"e1", "e2", "e3"}
        assert [hit.id for hit in await store.query("ann", NORTH, 5)] == ["e2", "e1"]
        assert await store.users() == {"ann"}


async def test_deleted_engram_is_gone_from_every_answer(tmp_path: Path) -> None:
    async with open_store(settings(tmp_path)) as store:
        topic = Engram("topic", "ann", "topic", 1, 1, session_id="s", topic="user.pet", content="a cat")
        await store.put("ann", [(topic, EAST), (engram(1), EAST)])
        await store.delete("ann", ["topic"])
        assert await store.get("ann", ["topic"]) == {}
        assert await store.topics("ann") == []
        assert await store.ids_of_session("ann", "s") == []
        assert [hit.id for hit in await store.query("ann", EAST, 5)] == ["e1"]
        assert [one.engram.id async for page in store.of_user("ann") for one in page] == ["e1"]
        await store.drop_user("ann")
        assert (await store.users(), await store.query("ann", EAST, 5)) == (set(), [])


async def test_engram_with_a_new_vector_is_in_one_collection(tmp_path: Path) -> None:
    async with open_store(settings(tmp_path)) as store:
        await store.put("ann", [(engram(1), NO_VECTOR)])
        await store.put("ann", [(engram(1), EAST)])
        counts = {one.space.model: one.count for one in await store.collections()}
        assert counts == {"": 0, "m": 1}


@pytest.mark.slow
async def test_store_keeps_the_files_of_few_indexes_open(tmp_path: Path) -> None:
    """An open index takes 2.7 MB of memory and four files, so 160 of them would have 640 files."""
    async with open_store(settings(tmp_path)) as store:
        for number in range(160):
            user_id = f"user-{number}"
            await store.put(user_id, [(engram(1, user_id), EAST), (engram(2, user_id), NORTH)])
            await store.query(user_id, EAST, 1)
        assert open_files() < 400
        # An index that was closed for other users opens again.
        for number in (0, 1, 159):
            assert [hit.id for hit in await store.query(f"user-{number}", NORTH, 2)] == ["e2", "e1"]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_searches_are_answered_during_a_large_write(tmp_path: Path) -> None:
    async with open_store(settings(tmp_path)) as store:
        await store.put("ann", [(engram(1), EAST)])
        many = [(engram(n, "ben", "word " * 200), Vector("m", [1.0, n / 4_000])) for n in range(4_000)]
        writing = asyncio.create_task(store.put("ben", many))
        answered = 0
        while not writing.done():
            assert [hit.id for hit in await store.query("ann", EAST, 5)] == ["e1"]
            answered += not writing.done()
        await writing
        assert answered > 3


async def test_read_beyond_its_deadline_fails_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(settings(tmp_path)) as store:
        await store.put("ann", [(engram(1), EAST)])
        with monkeypatch.context() as short:
            short.setattr(chroma, "READ_S", 0.0)
            with pytest.raises(StoreUnavailable, match="has not answered for 0 s"):
                await store.get("ann", ["e1"])
        assert set(await store.get("ann", ["e1"])) == {"e1"}


async def test_vanished_store_is_damage_and_names_the_backup(tmp_path: Path) -> None:
    async with open_store(settings(tmp_path)) as store:
        await store.put("ann", [(engram(1), EAST)])
    (tmp_path / "chroma" / "chroma.sqlite3").unlink()
    async with open_store(settings(tmp_path)) as store:
        with pytest.raises(StoreDamaged, match=r"chroma.sqlite3 is gone.*local2 restore"):
            await store.get("ann", ["e1"])
        # and it stays damaged, without another attempt
        assert "is gone" in (store.damage or "")
        with pytest.raises(StoreDamaged):
            await store.ping()
    assert not (tmp_path / "chroma" / "chroma.sqlite3").exists()


async def test_store_begins_no_write_on_a_full_disk(tmp_path: Path) -> None:
    async with open_store(settings(tmp_path)) as store:
        await store.put("ann", [(engram(1), EAST)])
        with full_disk():
            put = store.put("ann", [(engram(2), EAST)])
            for call in (put, store.delete("ann", ["e1"]), store.drop_user("ann"), store.ping()):
                with pytest.raises(StoreUnavailable, match=r"the disk of .* is full"):
                    await call
            assert list(await store.get("ann", ["e1", "e2"])) == ["e1"]
        await store.delete("ann", ["e1"])
        assert await store.get("ann", ["e1"]) == {}


# ── a server that fails ──────────────────────────────────────────────────────────────────────────────────────


async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Read what comes, and never answer."""
    while await reader.read(1_000):
        pass


@asynccontextmanager
async def silent_server(_folder: Path) -> AsyncIterator[str]:
    async with listening(silent) as port:
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def closed_port(_folder: Path) -> AsyncIterator[str]:
    async with listening(silent) as port:
        pass
    yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def unknown_certificate(folder: Path) -> AsyncIterator[str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    now = datetime.now(UTC)
    own = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    both = folder / "both.pem"
    both.write_bytes(own.public_bytes(pem) + key.private_bytes(pem, *form))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A listener with TLS of its own leaves the connection open if the client refuses the certificate.
        connection = writer.transport
        try:
            with suppress(OSError):
                await writer.start_tls(context)
        finally:
            connection.abort()

    async with listening(greet) as port:
        yield f"https://127.0.0.1:{port}"


Failing = Callable[[Path], AbstractAsyncContextManager[str]]
FAILURES: dict[str, tuple[Failing, str]] = {
    "silent": (silent_server, "has not answered for 0.5 s"),
    "closed": (closed_port, "onnect"),
    "certificate": (unknown_certificate, "CERTIFICATE_VERIFY_FAILED"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_server_that_fails_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "silent":
        # The real time limit is 30 s.
        monkeypatch.setattr(chroma, "READ_S", 0.5)
    failing, said = FAILURES[name]
    async with failing(tmp_path) as url, open_store(settings(tmp_path, chroma_url=url)) as store:
        with pytest.raises(StoreUnavailable, match=said):
            await store.get("ann", ["e1"])
        assert store.damage is None


# ── deletion and the disk ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("deletion", ["engram", "user"])
async def test_deleted_text_leaves_the_disk_by_vacuum(tmp_path: Path, deletion: str) -> None:
    """Chroma's queue has the text of an engram until its collection had 1,000 more changes, or is removed."""
    word = "xylograph"
    async with open_store(settings(tmp_path)) as store:
        await store.put("ann", [(engram(0, text=f"{word} {word}"), EAST)])
        await store.put("ben", [(engram(1, "ben"), EAST)])
        if deletion == "user":
            await store.drop_user("ann")
        else:
            await store.delete("ann", ["e0"])
            await store.put("ann", [(engram(n), Vector("m", [1.0, n / 1_000])) for n in range(1, 1_002)])
    vacuum = [str(Path(sys.executable).with_name("chroma")), "vacuum", "--path", str(tmp_path / "chroma"), "--force"]
    done = await asyncio.to_thread(subprocess.run, vacuum, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert having(word, tmp_path) == []
    async with open_store(settings(tmp_path)) as store:
        assert await store.users() == ({"ben"} if deletion == "user" else {"ann", "ben"})
        assert [hit.id for hit in await store.query("ben", EAST, 5)] == ["e1"]
