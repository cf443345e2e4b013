"""Who may do what: API keys, owners, loopback without keys."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest
import redis
from support.http_gateway import Site, client, gateway_settings, generating, serving
from support.waiting import eventually

from shared.errors import SettingsError


@pytest.fixture
async def site(redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(gateway_settings(redis_url, tmp_path)) as site:
        yield site


MEMORY = [
    ("GET", "/memory?query=x"), ("DELETE", "/memory"), ("GET", "/memory/engrams"), ("GET", "/memory/engrams/x"),
    ("DELETE", "/memory/engrams/x"), ("GET", "/memory/topics"), ("GET", "/memory/topics/user.x"),
    ("PUT", "/memory/topics/user.x"), ("DELETE", "/memory/topics/user.x"), ("GET", "/memory/export"),
    ("POST", "/memory/import"),
]  # fmt: skip
PREFERENCES = [
    ("GET", "/preferences/leaderboard"), ("GET", "/preferences/export"), ("GET", "/preferences/consent"),
    ("PUT", "/preferences/consent"),
]  # fmt: skip
ROUTES = [
    ("POST", "/query"), ("GET", "/queries/1-0"), ("GET", "/queries/1-0/events"), ("POST", "/queries/1-0/cancel"),
    ("POST", "/feedback"), ("GET", "/sessions"), ("GET", "/sessions/s"), ("DELETE", "/sessions/s"), ("GET", "/tools"),
    ("POST", "/tools/x/call"), ("GET", "/participants"), ("GET", "/participants/gateway/settings"),
    ("PATCH", "/participants/gateway/settings"), ("GET", "/bus/events"), ("GET", "/bus/streams"),
    ("GET", "/dead-letters"), ("POST", "/dead-letters/1-0/replay"), ("DELETE", "/dead-letters/1-0"),
    ("DELETE", "/dead-letters"), ("GET", "/keys"), ("POST", "/keys"), ("DELETE", "/keys/x"), ("GET", "/v1/models"),
    ("GET", "/backup"), ("POST", "/restore"), *MEMORY, *PREFERENCES,
    ("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("GET", "/openapi.json"),
]  # fmt: skip
OPERATORS = [
    ("PATCH", "/participants/gateway/settings"), ("GET", "/bus/events"), ("GET", "/bus/streams"),
    ("GET", "/dead-letters"), ("POST", "/dead-letters/1-0/replay"), ("DELETE", "/dead-letters/1-0"),
    ("DELETE", "/dead-letters"), ("GET", "/keys"), ("POST", "/keys"), ("DELETE", "/keys/x"),
    ("GET", "/backup"), ("POST", "/restore"), ("GET", "/preferences/export"),
]  # fmt: skip


async def test_every_route_but_health_and_ready_needs_a_key(site: Site) -> None:
    described = (await site.http.get("/openapi.json")).json()["paths"]
    assert sum(len(methods) for methods in described.values()) == len(ROUTES) + 2
    for key in (None, "wrong", "l2_\u00e9"):
        async with client(site.url, None) as stranger:
            if key:
                stranger.headers["Authorization"] = f"Bearer {key}"
            for method, path in ROUTES:
                response = await stranger.request(method, path, json={} if method in ("POST", "PATCH") else None)
                assert response.status_code == 401, (method, path)
                assert response.json()["error"]["code"] == "unauthorized"
                assert response.headers["www-authenticate"] == "Bearer"
            assert (await stranger.get("/health")).json() == {"status": "ok"}
            assert (await stranger.get("/ready")).status_code == 503


async def test_operators_routes_are_for_administrators(site: Site) -> None:
    async with await site.key("ann") as ann:
        for method, path in OPERATORS:
            response = await ann.request(method, path, json={"name": "n", "user_id": "u"} if method != "GET" else None)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden"), (method, path)


async def test_nobody_touches_what_belongs_to_another(redis_url: str, tmp_path: Path, site: Site) -> None:
    async with generating(redis_url, tmp_path), await site.key("ann") as ann, await site.key("bob", "admin") as bob:
        mine = (await ann.post("/query", json={"query": "say hello", "session_id": "ann-1"})).json()
        query_id = mine["query_id"]
        for method, path, body in [
            ("GET", f"/queries/{query_id}", None),
            ("GET", f"/queries/{query_id}/events", None),
            ("POST", f"/queries/{query_id}/cancel", None),
            ("POST", "/feedback", {"query_id": query_id, "stars": 1}),
            ("GET", "/sessions/ann-1", None),
            ("DELETE", "/sessions/ann-1", None),
            ("POST", "/query", {"query": "say mine", "session_id": "ann-1"}),
        ]:
            for other in (bob, site.http):
                response = await other.request(method, path, json=body)
                assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found"), (method, path)
        assert (await bob.get("/sessions")).json()["sessions"] == []
        assert [s["session_id"] for s in (await ann.get("/sessions")).json()["sessions"]] == ["ann-1"]
        assert len((await ann.get("/sessions/ann-1")).json()["turns"]) == 1


async def test_only_the_hash_of_a_key_is_stored_and_a_revoked_key_stops_working(
    redis_url: str, tmp_path: Path, site: Site, raw: redis.Redis
) -> None:
    made = (await site.http.post("/keys", json={"name": "laptop", "user_id": "ann"})).json()
    secret = made.pop("key")
    assert made == {"id": sha256(secret.encode()).hexdigest()[:12], "name": "laptop", "user_id": "ann",
                    "role": "user", "created": made["created"]}  # fmt: skip
    for key in raw.scan_iter("*"):
        assert secret.encode() not in raw.dump(key)
    listed = (await site.http.get("/keys")).json()["keys"]
    assert {key["user_id"] for key in listed} == {"admin", "ann"}
    assert secret not in str(listed)
    async with serving(gateway_settings(redis_url, tmp_path)) as other, client(other.url, secret) as ann:
        assert (await ann.get("/sessions")).status_code == 200
        assert (await site.http.delete(f"/keys/{made['id']}")).status_code == 200

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


async def test_a_generated_key_is_shown_once_and_kept_for_this_user_only(
    redis_url: str, tmp_path: Path, raw: redis.Redis, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    settings = gateway_settings(redis_url, folder, admin_key=None)
    async with serving(settings, ready=False):
        pass
    shown = capfd.readouterr().err
    key = (folder / "admin.key").read_text().strip()
    assert shown.count(key) == 1
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


async def test_a_flushed_redis_does_not_lock_the_operator_out(site: Site, raw: redis.Redis) -> None:
    raw.flushall()
    assert (await site.http.get("/sessions")).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.10", "::", "example.org"])
async def test_without_keys_only_loopback_may_be_bound(redis_url: str, tmp_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match="not a loopback address"):
        gateway_settings(redis_url, tmp_path, auth="off", host=host)


async def test_a_refused_setting_ends_the_process_with_a_sentence(tmp_path: Path) -> None:
    import os
    import sys

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


async def test_without_keys_a_web_page_cannot_speak_for_the_user(redis_url: str, tmp_path: Path) -> None:
    async with serving(gateway_settings(redis_url, tmp_path, auth="off")) as site, client(site.url, None) as http:
        assert (await http.get("/sessions")).status_code == 200
        for headers in ({"Host": "rebound.example:8765"}, {"Origin": "https://page.example"}, {"Origin": "null"}):
            response = await http.get("/sessions", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
        assert (await http.get("/sessions", headers={"Origin": "http://localhost:3000"})).status_code == 200
