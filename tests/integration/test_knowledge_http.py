"""A user's knowledge over HTTP and from the command line: a real gateway and a real knowledge, and one that is away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import orjson
import pytest
import pytest_asyncio
from support.backups import run_local2
from support.http_gateway import Site, gateway_settings, serving
from support.knowledge import KnowledgeClient, knowing

pytestmark = pytest.mark.asyncio(loop_scope="module")


class House:
    """A gateway and a knowledge for all tests of this file; each has users of its own."""

    def __init__(self, site: Site, knowledge: KnowledgeClient) -> None:
        self.site = site
        self.knowledge = knowledge


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("house")
    async with serving(gateway_settings(server_url, folder)) as site, knowing(server_url, folder) as knowledge:
        yield House(site, knowledge)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_facts_are_listed_added_corrected_and_forgotten(house: House) -> None:
    await house.knowledge.say("My sister Anna lives in Lyon.", user_id="eva")
    async with await house.site.key("eva") as eva, await house.site.key("tim") as tim:
        listed = (await eva.get("/knowledge/facts", params={"about": "Anna", "state": "is"})).json()
        assert sorted(fact["relation"] for fact in listed["facts"]) == ["is sister of", "lives in"]
        lyon = next(fact for fact in listed["facts"] if fact["relation"] == "lives in")
        assert lyon["subject"] == {"id": "anna", "name": "Anna", "kind": "person"}
        assert lyon["sources"][0]["quote"] == "My sister Anna lives in Lyon."
        path = f"/knowledge/facts/{lyon['id']}"
        assert (await eva.get(path)).json() == lyon
        moved = (await eva.patch(path, json={"object": "Lille", "since": "2020"})).json()
        assert moved["text"].startswith("Anna lives in Lille: IS true since 2020")
        made = await eva.post("/knowledge/facts", json={"subject": "me", "relation": "lives in", "object": "Graz"})
        assert made.json()["confidence"] == 1
        assert [made.json()[end]["kind"] for end in ("subject", "object")] == ["person", "place"]
        works = (
            await eva.patch(f"/knowledge/facts/{made.json()['id']}", json={"relation": "works at", "object": "Acme"})
        ).json()
        assert [works[end]["kind"] for end in ("subject", "object")] == ["person", "organisation"]
        assert (await eva.delete(f"/knowledge/facts/{works['id']}")).status_code == 200
        made = await eva.post("/knowledge/facts", json={"subject": "me", "relation": "lives in", "object": "Graz"})
        graph = (await eva.get("/knowledge/graph", params={"about": "Anna"})).json()
        assert {edge["relation"] for edge in graph["edges"]} == {"lives in", "is sister of"}
        entities = (await eva.get("/knowledge/entities", params={"about": "anna"})).json()["entities"]
        assert [(one["name"], one["facts"], one["names"]) for one in entities] == [("Anna", 2, ["anna"])]
        exported = [orjson.loads(line) for line in (await eva.get("/knowledge/export")).text.splitlines()]
        assert len(exported) == 3
        # nobody else's
        path = f"/knowledge/facts/{moved['id']}"
        assert code(await tim.get(path)) == code(await tim.delete(path)) == (404, "not_found")
        assert code(await tim.patch(path, json={"object": "Rome"})) == (404, "not_found")
        assert (await tim.get("/knowledge/facts")).json() == {"facts": [], "cursor": None, "total": 0}
        assert (await eva.delete(path)).json() == {"id": moved["id"], "deleted": True}
        assert code(await eva.get(path)) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/knowledge/facts", {"subject": "me", "relation": "lives in"}),
        ("POST", "/knowledge/facts", {"subject": "me", "relation": "{}", "object": "Rome"}),
        ("POST", "/knowledge/facts", {"subject": "me", "relation": "is", "object": "me"}),
        ("POST", "/knowledge/facts", {"subject": "me", "relation": "lives in", "object": "Rome", "since": "soon"}),
        ("PATCH", "/knowledge/facts/x", {}),
        ("PATCH", "/knowledge/facts/x", {"holds": "maybe"}),
        ("GET", "/knowledge/facts?cursor=x", None),
        ("GET", "/knowledge/facts?state=maybe", None),
        ("GET", "/knowledge/graph?limit=0", None),
    ],
)
async def test_what_makes_no_sense_is_refused_with_a_sentence(
    house: House, method: str, path: str, body: dict[str, str] | None
) -> None:
    async with await house.site.key("rob") as rob:
        answer = await rob.request(method, path, json=body)
        assert code(answer) == (422, "invalid_request")


async def test_an_engram_that_is_deleted_takes_its_facts_along(house: House) -> None:
    said = await house.knowledge.say("Tom lives in Rome.", user_id="zoe")
    await house.knowledge.say("Tom works at SAP.", user_id="zoe")
    async with await house.site.key("zoe") as zoe:
        # no memory is running: what it would forget is forgotten here all the same
        assert code(await zoe.delete(f"/memory/engrams/{said.response_id}")) == (503, "memory_unavailable")
        await house.knowledge.idle()
        texts = [fact["relation"] for fact in (await zoe.get("/knowledge/facts")).json()["facts"]]
        assert texts == ["works at"]
        await zoe.delete("/memory?everything=true")
        await house.knowledge.idle()
        assert (await zoe.get("/knowledge/facts")).json()["total"] == 0


async def test_the_command_line_shows_adds_corrects_forgets_and_exports(house: House, tmp_path: Path) -> None:
    made = await house.site.http.post("/keys", json={"name": "pia's", "user_id": "pia", "role": "user"})
    key = made.json()["key"]

    async def local2(*args: str) -> str:
        done = await asyncio.to_thread(run_local2, house.site.url, key, "knowledge", *args)
        assert done.exit_code == 0, done.output
        return done.output

    assert "nothing is known" in await local2("show")
    added = await local2("add", "Anna", "lives in", "Lyon", "--since", "2019")
    fact_id = added.split()[0]
    assert "Anna lives in Lyon: IS true since 2019" in added
    assert fact_id in await local2("show", "Anna")
    shown = json.loads(await local2("show", fact_id, "--json"))
    assert shown["facts"][0]["why"]
    corrected = await local2("correct", fact_id, "--until", "2024-03", "--object", "Lille")
    assert "WAS true since 2019 until 2024-03" in corrected
    file = tmp_path / "facts.jsonl"
    await local2("export", "-o", str(file))
    assert json.loads(file.read_text())["object"] == "Lille"
    assert '"object":"Lille"' in (await local2("export")).replace(" ", "")
    assert "forgot" in await local2("forget", corrected.split()[0])
    assert "nothing is known" in await local2("show")
    refused = await asyncio.to_thread(run_local2, house.site.url, key, "knowledge", "correct", "x")
    assert refused.exit_code == 2


async def test_metrics_and_the_registry_say_what_is_kept(house: House) -> None:
    text = (await house.site.http.get("/metrics")).text
    assert "local2_knowledge_claims" in text
    (row,) = [one for one in (await house.site.http.get("/participants")).json()["participants"]
              if one["name"] == "knowledge"]  # fmt: skip
    assert row["replicas"][0]["facts"]["read_by"] == "rules"


async def test_without_a_knowledge_its_routes_say_so(redis_url: str, tmp_path: Path) -> None:
    async with serving(gateway_settings(redis_url, tmp_path)) as site:
        for path in ("/knowledge/facts", "/knowledge/entities", "/knowledge/graph", "/knowledge/export"):
            assert code(await site.http.get(path)) == (503, "knowledge_unavailable")
