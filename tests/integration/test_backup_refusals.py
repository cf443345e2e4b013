"""What `local2 backup` and `local2 restore` refuse, with which sentence, and that nothing is changed by it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import redis
from support.backups import BACKUP, Place, backed_up, fill, kept, key_of, names, place
from support.http_gateway import gateway_settings
from support.on_disk import small_files
from support.proxy import Proxy

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.gateway.backup.restore import alone
from services.gateway.http.gateway import Gateway
from shared.bus import open_subscriber
from shared.bus.keys import RESTORE_LOCK
from shared.participant.backup import Header, Reader, Record, Writer
from shared.participant.service import open_context


@pytest.fixture
async def source(redis_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with place(redis_url, tmp_path / "source") as found:
        yield found


@pytest.fixture
async def target(redis_server: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Place]:
    """An empty stack on a Redis of its own."""
    async with place(redis_server.url, tmp_path / "target") as found:
        yield found


async def test_only_an_administrator_may(source: Place, tmp_path: Path) -> None:
    ann = await key_of(source, "ann")
    file = tmp_path / "all.backup"
    done = await source.local2(*BACKUP, str(file), key=ann)
    assert (done.exit_code, file.exists()) == (1, False)
    assert "this needs an administrator's API key" in done.output
    await backed_up(source, file)
    done = await source.local2("restore", "--merge", str(file), key=ann)
    assert done.exit_code == 1
    assert "this needs an administrator's API key" in done.output
    assert names(tmp_path, "*.part") == []


Records = list[tuple[str, Record]]


def changed(file: Path, change: Callable[[Header, Records], Header]) -> bytes:
    """The file with another header or other records, its checksums right again."""
    reader, writer = Reader(BytesIO(file.read_bytes())), Writer()
    records = list(reader.records())
    header = change(reader.header, records)
    parts = [writer.begin(header)]
    for section in header.sections:
        parts += [writer.records(section, [r for name, r in records if name == section]), writer.end(section)]
    return b"".join([*parts, writer.complete()])


def in_a_later_form(header: Header, _records: Records) -> Header:
    return replace(header, sections={**header.sections, "sessions": 2})


def with_a_surplus_field(header: Header, records: Records) -> Header:
    records[-1][1]["surplus"] = 1
    return header


def an_hour_ahead(header: Header, _records: Records) -> Header:
    return replace(header, created=header.created + 3_600_000)


async def test_a_file_that_is_not_whole_changes_nothing(
    source: Place, target: Place, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    await fill(source)
    whole = (await backed_up(source, tmp_path / "all.backup")).read_bytes()
    middle = len(whole) // 2

    files = {
        "truncated": whole[:middle],
        "corrupt": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
        "not_a_backup": b"a letter to grandmother",
        "newer_section": changed(tmp_path / "all.backup", in_a_later_form),
        "invalid_record": changed(tmp_path / "all.backup", with_a_surplus_field),
    }
    before = kept(redis_server.url)
    for code, content in files.items():
        answer = await target.site.http.post("/restore", content=content)
        # a wrong byte may make a record of another form before the sum of all shows it
        told = {code, "invalid_record"} if code == "corrupt" else {code}
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] in told
        (tmp_path / code).write_bytes(content)
        done = await target.local2("restore", str(tmp_path / code))
        assert done.exit_code == 1, code
        assert answer.json()["error"]["message"] in done.output.replace("\n", " ")
    assert kept(redis_server.url) == before == {}


async def test_a_file_from_the_future_is_refused(source: Place, target: Place, tmp_path: Path) -> None:
    await fill(source)
    file = await backed_up(source, tmp_path / "all.backup")
    answer = await target.site.http.post("/restore", content=changed(file, an_hour_ahead))
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "clock_behind")


async def test_an_upload_is_limited(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    async with place(redis_server.url, tmp_path / "target", restore_max_bytes=1000) as target:
        answer = await target.site.http.post("/restore", content=b"x" * 2000)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_two_restores_at_once_do_not_mix(
    source: Place, target: Place, tmp_path: Path, redis_server: EmbeddedRedis
) -> None:
    await fill(source)
    file = await backed_up(source, tmp_path / "all.backup")
    with redis.Redis.from_url(redis_server.url) as raw:
        raw.set(RESTORE_LOCK, "somebody", px=60_000)
        done = await target.local2("restore", str(file))
        assert done.exit_code == 1
        assert "another restore is under way" in done.output
        raw.delete(RESTORE_LOCK)
    assert (await target.local2("restore", str(file))).exit_code == 0


async def test_a_lost_answer_does_not_make_a_restore_stand_in_its_own_way(redis_url: str, tmp_path: Path) -> None:
    async with Proxy(redis_url, drop_every=10) as proxy:
        settings = gateway_settings(proxy.url, tmp_path, redis_timeout=0.2, heartbeat=1)
        gateway = Gateway(settings)
        async with open_context("gateway", settings) as context, open_subscriber(context.bus) as bell:
            gateway.attach(context, bell)
            for _ in range(30):
                async with alone(gateway):
                    pass
        assert proxy.dropped > 5


async def test_a_full_disk_is_a_sentence_and_leaves_nothing(source: Place, target: Place, tmp_path: Path) -> None:
    await fill(source)
    file = await backed_up(source, tmp_path / "all.backup")
    with small_files(500):
        done = await source.local2(*BACKUP, str(tmp_path / "second.backup"))
        assert done.exit_code == 1
        assert "second.backup cannot be written" in done.output
        assert "choose a place that is there and has room" in done.output
        refused = await target.local2("restore", str(file))
        assert refused.exit_code == 1
        assert "make room in its data folder" in refused.output
    assert names(tmp_path, "*.backup*") == ["all.backup"]
    assert names(tmp_path / "target", "restore-*") == []


async def test_an_existing_file_is_not_overwritten(source: Place, tmp_path: Path) -> None:
    file = tmp_path / "thesis.txt"
    file.write_text("years of work")
    done = await source.local2(*BACKUP, str(file))
    assert done.exit_code == 1
    assert "is there already" in done.output
    assert file.read_text() == "years of work"
    assert (await source.local2(*BACKUP, "--force", str(file))).exit_code == 0
    assert (await source.local2("restore", "--check", str(file))).exit_code == 0
