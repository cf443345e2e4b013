"""Whose key it is, how keys are made, kept and taken back, and what a request says of who asks."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import pytest
from fastapi import FastAPI
from support.waiting import eventually

from services.gateway.http.admin_key import AdminKey, admin_key, shown_by
from services.gateway.http.auth import CHAT_HEADER, USER_HEADER, AdminDep, UserDep, unauthorized
from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import ADMIN, LINK_SECONDS, KeyRecord, Keys, Principal, digest
from services.gateway.settings import GatewaySettings
from shared.bus import Bus
from shared.bus.keys import API_KEYS, link_key
from shared.envelope import now_ms
from shared.errors import BusUnavailable

SECRET = "l2_0123456789abcdef0123456789abcdef"
ANN = Principal("ann", "user")
FAR = 9_000_000_000_000


class Away:
    @property
    def bus(self) -> Any:
        raise BusUnavailable("away")

    @contextlib.asynccontextmanager
    async def reachable(self) -> AsyncIterator[None]:
        raise BusUnavailable("away")
        yield


def keys(data_dir: Path, **settings: Any) -> Keys:
    return Keys(cast(Any, Away()), GatewaySettings(admin_key=SECRET, data_dir=data_dir, **settings))


async def test_the_operator_comes_in_while_the_bus_is_away_and_nobody_else(tmp_path: Path) -> None:
    known = keys(tmp_path)
    found = await known.principal(SECRET)
    assert found == Principal(ADMIN, "admin")
    # not even the administrator's key speaks for others, unless that was said of it
    assert not found.trusted
    assert await known.principal("") is None
    for other in (SECRET[:-1], SECRET + "0", SECRET.upper(), "x"):
        with pytest.raises(BusUnavailable):
            await known.principal(other)


# ── the administrator's ──────────────────────────────────────────────────────────────────────────────────────────


def kept_in(folder: Path, key: str | None = None) -> GatewaySettings:
    return GatewaySettings(admin_key=cast(Any, key), data_dir=folder)


def test_a_configured_key_is_the_administrators_and_none_is_made(tmp_path: Path) -> None:
    assert admin_key(kept_in(tmp_path, SECRET)) == AdminKey(SECRET)
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_made_once_in_a_folder_that_is_its_users(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    open_files = os.listdir("/dev/fd")
    made = admin_key(kept_in(folder))
    assert made == AdminKey(made.secret, folder / "admin.key")
    assert re.fullmatch(r"l2_[A-Za-z0-9_-]{43}", made.secret)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, folder / "admin.key")] == [0o700, 0o600]
    assert admin_key(kept_in(folder)) == AdminKey(made.secret)
    assert os.listdir("/dev/fd") == open_files


def test_a_key_that_only_its_user_can_read_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    for mode, kept in ((0o400, 0o400), (0o604, 0o600), (0o640, 0o600)):
        path.unlink(missing_ok=True)
        path.write_text(SECRET[3:])
        path.chmod(mode)
        assert admin_key(kept_in(tmp_path)) == AdminKey(SECRET[3:])
        assert stat.S_IMODE(path.stat().st_mode) == kept


def test_a_folder_that_cannot_be_written_may_hold_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "admin.key").write_text(SECRET[3:])

    def refused(*_: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refused)
    assert admin_key(kept_in(tmp_path)) == AdminKey(SECRET[3:])


def test_a_key_has_reached_the_disk_before_its_name_and_its_name_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, int, bool]] = []

    def fsync(file: int) -> None:
        about = os.fstat(file)
        folder = stat.S_ISDIR(about.st_mode)
        synced.append((folder, 0 if folder else about.st_size, (tmp_path / "admin.key").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    made = admin_key(kept_in(tmp_path))
    assert synced == [(False, len(made.secret) + 1, False), (True, 0, True)]


def test_of_two_gateways_that_begin_at_once_both_have_the_key_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def later(fresh: Path, path: Path) -> None:
        path.write_text(SECRET[3:])
        link(fresh, path)

    monkeypatch.setattr(os, "link", later)
    assert admin_key(kept_in(tmp_path)) == AdminKey(SECRET[3:])
    assert [one.name for one in tmp_path.iterdir()] == ["admin.key"]


def test_the_command_that_shows_a_key_can_be_typed() -> None:
    assert shown_by(Path("/my data/admin.key")) == "cat '/my data/admin.key'"


# ── on the bus ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("bob", "bob"), ("x" * 64, "x" * 64), ("A.b_c@d+e-1", "A.b_c@d+e-1"),
        *((odd, f"={sha256(odd.encode()).hexdigest()[:40]}") for odd in ("x" * 65, "a b", "a/b", "=x", "ä")),
    ],
)  # fmt: skip
def test_a_person_whom_a_key_names_is_the_keys_alone(name: str, known: str) -> None:
    assert ANN.named(name) == Principal(f"ann/{known}", "user", trusted=True)


def test_a_record_is_read_as_it_was_written_and_lasts_where_it_was_made_by_hand() -> None:
    said: dict[str, Any] = {"id": "i", "name": "n", "user_id": "ann", "role": "user", "created": 1}
    for record in (KeyRecord(**said), KeyRecord("i", "n", "ann", "user", 1, True, 5, True)):
        assert KeyRecord(**orjson.loads(record.dump())) == record
    assert KeyRecord(**said).lasting
    assert not KeyRecord(**{**said, "start": True}).lasting
    assert not KeyRecord(**said, until=5).lasting
    assert KeyRecord(**said, trusted=True).lasting


async def put(bus: Bus, secret: str, **values: Any) -> KeyRecord:
    """A key that is known."""
    hashed = digest(secret)
    record = KeyRecord(**{"id": hashed[:12], "name": "n", "user_id": "ann", "role": "user", "created": 1, **values})
    await bus.link.call("HSET", API_KEYS, hashed, record.dump())
    return record


async def gone(bus: Bus, secret: str) -> None:
    await bus.link.call("HDEL", API_KEYS, digest(secret))


async def test_a_configured_key_is_written_once_and_closes_what_an_earlier_one_opened(
    gateway: Gateway, tmp_path: Path
) -> None:
    bus, known = gateway.bus, Keys(gateway, kept_in(tmp_path, SECRET))
    hand, link = await put(bus, "hand"), await put(bus, "link", until=FAR)
    earliest = now_ms()
    await known.start()
    (start,) = [record for record in await known.listed() if record.start]
    assert start == KeyRecord(digest(SECRET)[:12], "start key", "admin", "admin", start.created, start=True)
    assert earliest <= start.created <= now_ms()
    # the same again closes nothing
    await known.start()
    assert await known.listed() == [hand, link, start] if hand.id < link.id else [link, hand, start]
    other = Keys(gateway, kept_in(tmp_path, SECRET[3:]))
    await other.start()
    assert [(record.name, record.id) for record in await other.listed()] == [
        ("n", hand.id), ("start key", digest(SECRET[3:])[:12]),
    ]  # fmt: skip


async def test_a_generated_key_leaves_those_of_other_replicas(gateway: Gateway, tmp_path: Path) -> None:
    for name in ("a", "b"):
        known = Keys(gateway, kept_in(tmp_path / name))
        assert known.made == tmp_path / name / "admin.key"
        await known.start()
        assert await known.principal(known.made.read_text().strip()) == Principal(ADMIN, "admin")
    assert [record.start for record in await known.listed()] == [True, True]


async def test_without_keys_everybody_is_the_operator_and_no_key_is_made(gateway: Gateway, tmp_path: Path) -> None:
    known = Keys(gateway, GatewaySettings(auth="off", data_dir=tmp_path))
    await known.start()
    assert [await known.principal(key) for key in ("", "x")] == [Principal("local", "admin")] * 2
    assert (known.made, os.listdir(tmp_path), await known.listed()) == (None, [], [])


async def test_a_key_is_whose_its_record_says_until_it_ends(gateway: Gateway) -> None:
    known = gateway.keys
    await put(gateway.bus, "plain")
    await put(gateway.bus, "boss", user_id="eva", role="admin", trusted=True, until=FAR)
    await put(gateway.bus, "over", until=1)
    await gateway.bus.link.call(
        "HSET", API_KEYS, digest("odd"), b"{", digest("list"), b"[1]", digest("new"), b'{"x":1}'
    )
    found = [await known.principal(key) for key in ("plain", "boss", "over", "odd", "list", "new", "none")]
    assert found == [ANN, Principal("eva", "admin", trusted=True), None, None, None, None, None]
    # what cannot be read is no key of a list either
    assert {record.user_id for record in await known.listed()} == {"ann", "eva"}


async def test_removed_key_works_for_a_moment_where_it_was_used(gateway: Gateway) -> None:
    known, bus = gateway.keys, gateway.bus
    assert await known.principal("one") is None
    await put(bus, "two")
    assert await known.principal("two") == ANN
    await gone(bus, "two")
    assert await known.principal("two") == ANN

    async def unknown() -> bool:
        return await known.principal("two") is None

    await eventually(unknown, 2.5)


async def test_a_key_is_made_for_a_user_and_taken_back_at_once(gateway: Gateway) -> None:
    known = gateway.keys
    earliest = now_ms()
    for trusted in (False, True):
        record, secret = await known.create("laptop", "ann", "user", trusted=trusted)
        assert record == KeyRecord(digest(secret)[:12], "laptop", "ann", "user", record.created, trusted=trusted)
        assert earliest <= record.created <= now_ms()
        assert dict(await known.stored()) == {digest(secret): record}
        assert await known.principal(secret) == Principal("ann", "user", trusted)
        other = await put(gateway.bus, "other", created=record.created + 1)
        assert await known.revoke(record.id) == record
        assert await known.principal(secret) is None
        assert await known.listed() == [other]
        assert await known.revoke(record.id) is None
        await gone(gateway.bus, "other")
    assert not (await known.create("laptop", "ann", "user"))[0].trusted


async def test_a_start_key_is_shown_and_stays(gateway: Gateway) -> None:
    record = await put(gateway.bus, "start", start=True)
    assert await gateway.keys.revoke(record.id) == record
    assert await gateway.keys.listed() == [record]


async def test_keys_are_listed_as_they_were_made(gateway: Gateway) -> None:
    for secret, created in (("a", 5), ("b", 1), ("c", 5), ("d", 3)):
        await put(gateway.bus, secret, created=created)
    listed = [(record.created, record.id) for record in await gateway.keys.listed()]
    assert listed == sorted(listed)
    assert [created for created, _ in listed] == [1, 3, 5, 5]


@pytest.mark.parametrize("old", [True, False])
async def test_a_link_gives_a_browser_a_key_once_and_ends_those_that_are_over(gateway: Gateway, old: bool) -> None:
    known, bus = gateway.keys, gateway.bus
    stays = [await put(bus, "hand"), await put(bus, "another browser", until=FAR)]
    if old:
        await put(bus, "over", until=1)
    token = await known.link(Principal("eva", "admin"))
    assert LINK_SECONDS - 15 < await bus.link.call("TTL", link_key(digest(token))) <= 60
    redeemed = await known.redeem(token)
    assert redeemed is not None
    record, secret = redeemed
    assert record == KeyRecord(
        digest(secret)[:12], "browser", "eva", "admin", record.created, until=record.created + 7 * 86_400_000
    )
    assert sorted(one.id for one in await known.listed()) == sorted(one.id for one in (*stays, record))
    assert await known.principal(secret) == Principal("eva", "admin")
    assert await known.redeem(token) is None


# ── in a request ─────────────────────────────────────────────────────────────────────────────────────────────────


def asking(gateway: Gateway) -> tuple[FastAPI, httpx.AsyncClient]:
    app = FastAPI()
    app.state.gateway = gateway

    @app.get("/who")
    async def who(principal: UserDep) -> list[Any]:
        return [principal.user_id, principal.role, principal.trusted]

    @app.get("/boss")
    async def boss(principal: AdminDep) -> list[Any]:
        return [principal.user_id]

    return app, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


async def test_a_request_is_of_whoever_its_key_is(gateway: Gateway) -> None:
    await put(gateway.bus, "mine")
    await put(gateway.bus, "trusted", trusted=True)
    app, http = asking(gateway)
    async with http:

        async def answered(path: str, **headers: str) -> tuple[int, Any]:
            answer = await http.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            return answer.status_code, answer.json() if answer.status_code == 200 else answer.headers.get(
                "www-authenticate"
            )

        for given in ("Bearer mine", "bearer  mine ", "BEARER mine"):
            assert await answered("/who", authorization=given) == (200, ["ann", "user", False])
        for given in ("Basic mine", "mine", "Bearer", "Bearer wrong", "", "Bearermine"):
            assert await answered("/who", authorization=given) == (401, "Bearer")
        assert await answered("/who") == (401, "Bearer")
        named = {USER_HEADER: "bob", CHAT_HEADER: "c"}
        assert await answered("/who", authorization="Bearer mine", **named) == (200, ["ann", "user", False])
        assert await answered("/who", authorization="Bearer trusted") == (200, ["ann", "user", True])
        assert await answered("/who", authorization="Bearer trusted", **named) == (200, ["ann/bob", "user", True])
        # with a key, from wherever one asks
        assert (await answered("/who", authorization="Bearer mine", host="page.example"))[0] == 200
        assert await answered("/boss", authorization="Bearer mine") == (403, None)
        assert await answered("/boss", authorization="Bearer an-administrator's-key") == (200, ["admin"])
    described = app.openapi()["components"]["securitySchemes"]
    assert described == {"HTTPBearer": {"type": "http", "scheme": "bearer", "description": "An API key"}}


async def test_without_keys_only_this_machine_is_answered(gateway: Gateway, tmp_path: Path) -> None:
    settings = GatewaySettings(auth="off", data_dir=tmp_path)
    gateway.context.settings, gateway.keys = settings, Keys(gateway, settings)
    _, http = asking(gateway)
    async with http:
        for headers, status in (
            ({}, 200),
            ({"host": "localhost:8765"}, 200),
            ({"origin": "http://localhost:3000"}, 200),
            ({"host": "page.example"}, 403),
            ({"origin": "http://page.example"}, 403),
            ({"host": "page.example", "origin": "http://localhost"}, 403),
        ):
            assert (await http.get("/boss", headers=headers)).status_code == status, headers


def test_who_has_no_key_is_told_how_one_is_sent() -> None:
    refusal = unauthorized()
    assert (refusal.status_code, refusal.code) == (401, "unauthorized")
    assert refusal.headers == {"WWW-Authenticate": "Bearer"}
