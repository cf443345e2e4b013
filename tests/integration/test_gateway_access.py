"""Who may do what: API keys, owners, loopback without keys."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
import stat
import sys
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import redis
from support.http_gateway import ADMIN_KEY, Site, client, gateway_settings, generating, serving
from support.waiting import eventually

from services.gateway.http.admin_key import AdminKey, admin_key
from shared.bus.keys import API_KEYS
from shared.errors import SettingsError


@pytest.fixture
async def site(redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(gateway_settings(redis_url, tmp_path)) as site:
        yield site


def access() -> dict[tuple[str, str], tuple[str, str]]:
    """What docs/access.md promises, by method and path."""
    page = (Path(__file__).parents[2] / "docs" / "access.md").read_text()
    rows = re.findall(r"^\| `([A-Z]+) (\S+)` \| (.*?) \| (.*?) ?\|$", page, re.MULTILINE)
    return {(method, path): (user, admin) for method, path, user, admin in rows}


ACCESS = access()
OPEN = [route for route, (user, _) in ACCESS.items() if user.startswith("open to all")]
OPERATORS = [route for route, (user, _) in ACCESS.items() if user == "no"]
BODIES: dict[str, dict[str, Any]] = {
    "/keys": {"name": "n", "user_id": "u"},
    "/keys/redeem": {"token": "x"},
    "/keys/{key_id}": {"time_zone": None},
}


async def tried(http: httpx.AsyncClient, method: str, path: str) -> httpx.Response:
    """A request for something that is not there."""
    body = None if method in ("GET", "DELETE") else BODIES.get(path, {})
    return await http.request(method, re.sub(r"\{\w+\}", "1-0", path), json=body)


async def test_the_page_names_every_route(site: Site) -> None:
    described = (await site.http.get("/openapi.json")).json()["paths"]
    routes = {(method.upper(), path) for path, methods in described.items() for method in methods}
    assert set(ACCESS) == routes
    assert len(OPERATORS) > 15


async def test_every_route_that_is_not_open_to_all_needs_a_key(site: Site) -> None:
    assert len(OPEN) == 4
    for key in (None, "wrong", "l2_\u00e9"):
        async with client(site.url, None) as stranger:
            if key:
                stranger.headers["Authorization"] = f"Bearer {key}"
            for method, path in ACCESS:
                response = await tried(stranger, method, path)
                if (method, path) in OPEN:
                    assert response.status_code in (200, 404, 503), (method, path)
                    continue
                assert response.status_code == 401, (method, path)
                assert response.json()["error"]["code"] == "unauthorized"
                assert response.headers["www-authenticate"] == "Bearer"
            assert (await stranger.get("/health")).json() == {"status": "ok"}
            assert (await stranger.get("/ready")).status_code == 503


async def test_a_user_s_key_opens_what_the_page_says_and_nothing_else(site: Site) -> None:
    streams = ("/queries/{query_id}/events", "/memory", "/memory/", "/preferences/")
    async with await site.key("ann") as ann:
        for method, path in ACCESS:
            if (method, path) in OPERATORS:
                response = await tried(ann, method, path)
                assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden"), (method, path)
            elif not path.startswith(streams):
                assert (await tried(ann, method, path)).status_code not in (401, 403), (method, path)


async def test_user_key_does_not_list_work_of_others(redis_url: str, tmp_path: Path, site: Site) -> None:
    async with await site.key("ann") as ann, generating(redis_url, tmp_path):
        known = (await ann.get("/participants")).json()["participants"]
        assert {"name": "generator", "replicas": [{"state": "ready"}]} in known
        assert all(set(one) == {"name", "replicas"} for one in known)
        assert all(set(replica) == {"state"} for one in known for replica in one["replicas"])


async def test_nobody_touches_what_belongs_to_another(redis_url: str, tmp_path: Path, site: Site) -> None:
    async with generating(redis_url, tmp_path), await site.key("ann") as ann, await site.key("bob", "admin") as bob:
        mine = (await ann.post("/query", json={"query": "say hello", "session_id": "ann-1"})).json()
        query_id = mine["query_id"]
        for method, path, body in [
            ("GET", f"/queries/{query_id}", None),
            ("GET", f"/queries/{query_id}/events", None),
            ("POST", f"/queries/{query_id}/cancel", None),
            ("POST", "/feedback", {"query_id": query_id, "stars": 1}),
            ("DELETE", f"/feedback/{query_id}", None),
            ("GET", "/sessions/ann-1", None),
            ("DELETE", "/sessions/ann-1", None),
        ]:
            for other in (bob, site.http):
                response = await other.request(method, path, json=body)
                assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found"), (method, path)
        assert (await bob.get("/sessions")).json()["sessions"] == []
        assert [s["session_id"] for s in (await ann.get("/sessions")).json()["sessions"]] == ["ann-1"]
        assert len((await ann.get("/sessions/ann-1")).json()["turns"]) == 1


async def test_nobody_keeps_the_name_of_a_session_from_another(redis_url: str, tmp_path: Path, site: Site) -> None:
    async with generating(redis_url, tmp_path), await site.key("ann") as ann, await site.key("bob") as bob:

        async def say(http: httpx.AsyncClient, word: str, session: str) -> str:
            answer = await http.post("/query", json={"query": f"say {word}", "session_id": session})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["session_id"])

        async def said(http: httpx.AsyncClient, session: str) -> list[str]:
            return [turn["query"] for turn in (await http.get(f"/sessions/{session}")).json()["turns"]]

        assert await say(bob, "bobs", "notes") == "notes"
        kept = await say(ann, "anns", "notes")
        assert kept != "notes"
        assert await say(ann, "more", "notes") == await say(ann, "last", kept) == kept
        assert await said(ann, "notes") == await said(ann, kept) == ["say anns", "say more", "say last"]
        assert await said(bob, "notes") == ["say bobs"]
        assert (await bob.get(f"/sessions/{kept}")).status_code == 404
        # nor can the name be taken that another will get
        again = kept.replace("notes@", "plans@")
        assert await say(bob, "x", again) != again
        # the name is free again, and hers is where it was
        assert (await bob.delete("/sessions/notes")).status_code == 200
        assert await say(ann, "still", "notes") == kept
        assert [one["session_id"] for one in (await ann.get("/sessions")).json()["sessions"]] == [kept]
        assert (await ann.delete("/sessions/notes")).json()["session_id"] == kept
        assert (await ann.get("/sessions/notes")).status_code == 404


async def test_only_the_hash_of_a_key_is_stored_and_a_revoked_key_stops_working(
    redis_url: str, tmp_path: Path, site: Site, raw: redis.Redis
) -> None:
    made = (await site.http.post("/keys", json={"name": "laptop", "user_id": "ann"})).json()
    secret = made.pop("key")
    assert made == {"id": sha256(secret.encode()).hexdigest()[:12], "name": "laptop", "user_id": "ann",
                    "role": "user", "created": made["created"], "trusted": False,
                    "time_zone": None}  # fmt: skip
    for key in raw.scan_iter("*"):
        assert secret.encode() not in raw.dump(key)
    listed = (await site.http.get("/keys")).json()["keys"]
    assert {key["user_id"] for key in listed} == {"admin", "ann"}
    assert secret not in str(listed)
    async with (
        serving(gateway_settings(redis_url, tmp_path)) as other,
        client(other.url, secret) as ann,
        client(site.url, secret) as here,
    ):
        assert (await ann.get("/sessions")).status_code == 200
        assert (await here.get("/sessions")).status_code == 200
        assert (await site.http.delete(f"/keys/{made['id']}")).status_code == 200
        # at once where it was revoked, and soon wherever else it had been used
        assert (await here.get("/sessions")).status_code == 401

        async def refused() -> bool:
            return (await ann.get("/sessions")).status_code == 401

        await eventually(refused, 3)
    assert (await site.http.delete(f"/keys/{made['id']}")).status_code == 404


async def test_the_start_key_is_not_revoked_by_accident_and_a_changed_one_closes_the_old_door(
    redis_url: str, tmp_path: Path, site: Site, raw: redis.Redis
) -> None:
    (start,) = (await site.http.get("/keys")).json()["keys"]
    kept = await site.http.delete(f"/keys/{start['id']}")
    assert (kept.status_code, kept.json()["error"]["code"]) == (409, "start_key")
    changed = gateway_settings(redis_url, tmp_path, admin_key="another-administrator")
    async with serving(changed, ready=False) as other, client(other.url, "another-administrator") as http:

        async def known() -> bool:
            return (await http.get("/sessions")).status_code == 200 and raw.hlen("local2:keys") == 1

        await eventually(known)
        assert (await other.http.get("/sessions")).status_code == 401


async def test_a_generated_key_is_kept_for_this_user_only_and_a_log_gets_the_command_that_shows_it(
    redis_url: str, tmp_path: Path, raw: redis.Redis, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    settings = gateway_settings(redis_url, folder, admin_key=None)
    async with serving(settings, ready=False):
        pass
    shown = capfd.readouterr().err
    key = (folder / "admin.key").read_text().strip()
    assert key not in shown
    assert f"to see it: cat {folder / 'admin.key'}\n" in shown
    assert stat.S_IMODE((folder / "admin.key").stat().st_mode) == 0o600
    raw.flushall()
    async with serving(settings, ready=False) as site, client(site.url, key) as admin:

        async def known() -> bool:
            return (await admin.get("/keys")).status_code == 200

        await eventually(known)
        assert key not in capfd.readouterr().err
        # a key in the file opens every other replica too
        elsewhere = gateway_settings(redis_url, tmp_path / "elsewhere", admin_key=None)
        async with serving(elsewhere, ready=False) as other, client(other.url, key) as there:

            async def opened() -> bool:
                return (await there.get("/keys")).status_code == 200

            await eventually(opened)


async def test_at_a_terminal_a_generated_key_is_told_by_a_link_that_works_once(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    async with serving(gateway_settings(redis_url, tmp_path, admin_key=None), ready=False) as site:
        await eventually(lambda: "#once=" in shown.getvalue())
        assert (tmp_path / "admin.key").read_text().strip() not in shown.getvalue()
        (token,) = re.findall(rf"local2: open {site.url}/#once=(\S+) ", shown.getvalue())
        async with client(site.url, None) as browser:
            assert (await browser.post("/keys/redeem", json={"token": token})).status_code == 201


KEPT = [
    (b"", "is empty"), (b"\n", "is empty"), (b"x", "holds no key"), (b"l2_abc", "holds no key"),
    (b"l2_" + b"a" * 30, "holds a part"), (b"l2_" + b"a" * 43 + b"l2_" + b"a" * 43, "holds a part"),
    (b"two words here", "holds no key"), (b"\xff\xfe\x00\x01" * 8, "holds no key"), (b"\x00" * 46, "holds no key"),
]  # fmt: skip


@pytest.mark.parametrize(("kept", "wrong"), KEPT)
def test_with_a_broken_key_file_the_gateway_does_not_start(tmp_path: Path, kept: bytes, wrong: str) -> None:
    (tmp_path / "admin.key").write_bytes(kept)
    with pytest.raises(SettingsError, match=f"admin.key {wrong}.*: put the key back, or remove the file"):
        admin_key(gateway_settings("redis://127.0.0.1:1", tmp_path, admin_key=None))
    assert (tmp_path / "admin.key").read_bytes() == kept


def test_a_key_of_one_s_own_and_a_link_to_it_may_stand_in_the_file(tmp_path: Path) -> None:
    settings = gateway_settings("redis://127.0.0.1:1", tmp_path, admin_key=None)
    (tmp_path / "elsewhere").write_text("a-key-of-my-own\n")
    (tmp_path / "admin.key").symlink_to("elsewhere")
    assert admin_key(settings) == AdminKey("a-key-of-my-own")
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o600


def test_where_no_key_can_be_kept_it_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "to-file").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling-key").mkdir()
    (tmp_path / "dangling-key" / "admin.key").symlink_to("nowhere")
    (tmp_path / "folder-key" / "admin.key").mkdir(parents=True)
    for name in ("file", "file/below", "dangling", "to-file", "loop", "dangling-key", "folder-key"):
        settings = gateway_settings("redis://127.0.0.1:1", tmp_path / name, admin_key=None)
        with pytest.raises(SettingsError, match=r"key cannot be kept in .*; make the folder writable"):
            admin_key(settings)


def test_a_folder_that_is_a_link_to_another_is_used(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    made = admin_key(gateway_settings("redis://127.0.0.1:1", tmp_path / "data", admin_key=None))
    assert (tmp_path / "disk" / "admin.key").read_text() == f"{made.secret}\n"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["admin.key"]


def test_a_full_disk_at_the_first_start_is_said_and_leaves_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SettingsError, match=r"cannot be kept in .*No space left on device"):
        admin_key(gateway_settings("redis://127.0.0.1:1", tmp_path, admin_key=None))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["short", "with a space in it", "clé-de-la-maison", "x" * 20 + "\n"])
def test_a_configured_key_that_no_client_could_send_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="LOCAL2_ADMIN_KEY must be at least 8 printable"):
        gateway_settings("redis://127.0.0.1:1", tmp_path, admin_key=key)


async def test_an_empty_key_file_ends_the_process_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_bytes(b"")
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL2_ADMIN_KEY"}
    environment |= {"LOCAL2_DATA_DIR": str(tmp_path), "LOCAL2_API_PORT": "0", "LOCAL2_REDIS_URL": "redis://127.0.0.1:1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, told = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert b"admin.key is empty: put the key back" in told
    assert b"Traceback" not in told


async def test_a_link_opens_the_console_once_and_its_key_ends_with_the_administrator_s(
    redis_url: str, tmp_path: Path, site: Site, raw: redis.Redis
) -> None:
    made = await site.http.post("/keys/link")
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    token = made.json()["token"]
    assert made.json() == {"token": token, "path": f"/#once={token}", "seconds": 60}
    (kept,) = raw.keys("local2:link:*")
    assert token.encode() not in kept
    assert 0 < raw.ttl(kept) <= 60
    async with client(site.url, None) as browser:
        both = await asyncio.gather(*(browser.post("/keys/redeem", json={"token": token}) for _ in range(2)))
        assert sorted(answer.status_code for answer in both) == [201, 404]
        opened = next(answer.json() for answer in both if answer.status_code == 201)
        assert opened["user_id"] == "admin"
        for wrong in ("x", token, ADMIN_KEY):
            assert (await browser.post("/keys/redeem", json={"token": wrong})).status_code == 404
    assert opened["key"] != ADMIN_KEY
    async with client(site.url, opened["key"]) as browser:
        assert (await browser.get("/keys")).status_code == 200
        listed = {key["id"]: key for key in (await browser.get("/keys")).json()["keys"]}
        assert listed[opened["id"]]["until"] == opened["until"]
        # whoever changes the key of the installation means every door that it opened
        changed = gateway_settings(redis_url, tmp_path, admin_key="another-administrator")
        async with serving(changed, ready=False):

            async def refused() -> bool:
                return (await browser.get("/keys")).status_code == 401

            await eventually(refused)


async def test_the_key_of_a_link_ends(site: Site, raw: redis.Redis) -> None:
    token = (await site.http.post("/keys/link")).json()["token"]
    opened = (await site.http.post("/keys/redeem", json={"token": token})).json()
    hashed = sha256(opened["key"].encode()).hexdigest()
    record = orjson.loads(raw.hget("local2:keys", hashed))
    assert 6 * 86_400_000 < record["until"] - record["created"] <= 7 * 86_400_000
    raw.hset("local2:keys", hashed, orjson.dumps({**record, "until": record["created"]}))
    async with client(site.url, opened["key"]) as late:
        assert (await late.get("/sessions")).status_code == 401
    token = (await site.http.post("/keys/link")).json()["token"]
    assert (await site.http.post("/keys/redeem", json={"token": token})).status_code == 201
    assert not raw.hexists("local2:keys", hashed)


async def test_a_flushed_redis_does_not_lock_the_operator_out(site: Site, raw: redis.Redis) -> None:
    raw.flushall()
    assert (await site.http.get("/sessions")).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.10", "::", "example.org"])
async def test_without_keys_only_loopback_may_be_bound(redis_url: str, tmp_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match="not a loopback address"):
        gateway_settings(redis_url, tmp_path, auth="off", host=host)


async def test_a_refused_setting_ends_the_process_with_a_sentence(tmp_path: Path) -> None:
    environment = {**os.environ, "LOCAL2_AUTH": "off", "LOCAL2_API_HOST": "0.0.0.0", "LOCAL2_DATA_DIR": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, told = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode != 0
    assert b"auth is off, but the host 0.0.0.0 is not a loopback address" in told
    assert b"Traceback" not in told


async def test_a_taken_port_is_said_in_a_sentence(redis_url: str, tmp_path: Path, site: Site) -> None:
    from services.gateway.service import listen

    port = int(site.url.rpartition(":")[2])
    with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"):
        listen(gateway_settings(redis_url, tmp_path, port=port))


async def test_without_keys_a_web_page_cannot_speak_for_the_user(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    async with serving(gateway_settings(redis_url, tmp_path, auth="off")) as site, client(site.url, None) as http:
        assert (await http.get("/sessions")).status_code == 200
        for headers in ({"Host": "rebound.example:8765"}, {"Origin": "https://page.example"}, {"Origin": "null"},
                        {"Host": "[x"}, {"Origin": "http://[x"}):  # fmt: skip
            response = await http.get("/sessions", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
        assert (await http.get("/sessions", headers={"Origin": "http://localhost:3000"})).status_code == 200
    # no key is kept that would open the door once keys are wanted again
    assert raw.hlen(API_KEYS) == 0
