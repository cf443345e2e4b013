"""A key that a program of several people has: it says whom a request is of. Every other key speaks for itself alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from support.http_gateway import FakeGenerator, Site, client

USER = "X-OpenWebUI-User-Id"


async def made(site: Site, **body: Any) -> httpx.AsyncClient:
    """A client with a new key."""
    response = await site.http.post("/keys", json={"name": "webui", "user_id": "webui", **body})
    assert response.status_code == 201, response.text
    assert response.json()["trusted"] is body.get("trusted", False)
    return client(site.url, response.json()["key"])


async def whose(http: httpx.AsyncClient, fake: FakeGenerator, named: str | None = None, **body: Any) -> str:
    """The user whom a chat completion was of."""
    headers = {USER: named} if named else {}
    asked = {"model": "local2", "messages": [{"role": "user", "content": "say hi"}], **body}
    done = await http.post("/v1/chat/completions", json=asked, headers=headers)
    assert done.status_code == 200, done.text
    return fake.queries[-1].payload.user_id


async def test_a_trusted_key_names_people_who_are_apart(site: Site, fake: FakeGenerator) -> None:
    async with await made(site, trusted=True) as webui:
        own = await whose(webui, fake)
        ann = await whose(webui, fake, "ann")
        bob = await whose(webui, fake, user="bob")
        mia = await whose(webui, fake, metadata={"user_id": "mia"})
        assert (own, ann, bob, mia) == ("webui", "webui/ann", "webui/bob", "webui/mia")
        # a header is more than a body
        assert await whose(webui, fake, "ann", user="bob") == ann
        # what is no plain word is kept apart as well, and hides no other
        odd = {await whose(webui, fake, user=name) for name in ("a/b", "a b", "é" * 300, "../admin")}
        assert len(odd) == 4
        assert all(one.startswith("webui/=") and one.count("/") == 1 for one in odd)
        # not a name
        assert await whose(webui, fake, user=7) == "webui"
        assert await whose(webui, fake, metadata={"user_id": None}) == "webui"
        # on every route
        first = {"query": "say hi", "session_id": "notes"}
        assert (await webui.post("/query", json=first, headers={USER: "ann"})).status_code == 200
        listed = {
            name: (await webui.get("/sessions/notes", headers={USER: name} if name else {})).status_code
            for name in ("ann", "bob", "")
        }
        assert listed == {"ann": 200, "bob": 404, "": 404}


async def test_names_mean_nothing_with_any_other_key(site: Site, fake: FakeGenerator) -> None:
    async with await made(site) as plain:
        assert await whose(plain, fake, "ann", user="bob", metadata={"user_id": "mia"}) == "webui"
    assert await whose(site.http, fake, "ann", user="bob") == "admin"


async def test_a_name_is_never_another_keys_nor_the_administrators(site: Site, fake: FakeGenerator) -> None:
    async with (
        await made(site, trusted=True) as webui,
        await made(site, user_id="other", trusted=True) as other,
        await made(site, user_id="boss", role="admin", trusted=True) as boss,
    ):
        assert await whose(webui, fake, "admin") == "webui/admin"
        assert await whose(other, fake, "ann") == "other/ann"
        # a person who is named is no administrator, whoever names him
        assert (await boss.get("/keys")).status_code == 200
        assert (await boss.get("/keys", headers={USER: "ann"})).status_code == 403
    # no key can be made whose user is somebody named
    refused = await site.http.post("/keys", json={"name": "x", "user_id": "webui/ann"})
    assert refused.status_code == 422


async def test_trust_is_listed_and_survives_a_backup(site: Site, redis_url: str, tmp_path: Path) -> None:
    async with await made(site, trusted=True):
        pass
    async with await made(site, user_id="ann"):
        pass
    listed = (await site.http.get("/keys")).json()["keys"]
    assert {(one["user_id"], one["trusted"]) for one in listed} == {
        ("admin", False), ("webui", True), ("ann", False)
    }  # fmt: skip
    # nobody is here who keeps these
    others = {"without": ["files", "knowledge", "memories", "preferences"]}
    saved = await site.http.get("/backup", params=others)
    assert saved.status_code == 200
    for one in listed:
        await site.http.delete(f"/keys/{one['id']}")
    restored = await site.http.post("/restore", params=others, content=saved.content)
    assert '"restored"' in restored.text, restored.text
    again = (await site.http.get("/keys")).json()["keys"]
    assert {one["user_id"]: one["trusted"] for one in again} == {"admin": False, "webui": True, "ann": False}
