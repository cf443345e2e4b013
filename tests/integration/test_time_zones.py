"""The time zone of a question: from the client, from its key, or from the deployment."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.http_gateway import ADMIN_KEY, FakeGenerator, Site, client, gateway_settings, generating, serving
from support.services import announced, running
from support.stack import respondent, stage

from services.gateway.http.keys import KeyRecord, digest
from services.generator.settings import GeneratorSettings
from services.web_search import service as web_search
from services.web_search.service import WebSearchSettings
from shared.contracts import RESPONSE_GENERATION
from shared.envelope import entry_ms, now_ms
from shared.zones import date_line, local_date

ROOT = Path(__file__).parents[2]
CHAT = {"model": "local2", "messages": [{"role": "user", "content": "echo hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/query", {"query": "echo hi", "time_zone": "Mars/Olympus"}, 422, "time_zone"),
        ("/v1/chat/completions", {**CHAT, "metadata": {"time_zone": "Mars/Olympus"}}, 400, "metadata.time_zone"),
        (
            "/v1/responses",
            {"model": "local2", "input": "echo hi", "metadata": {"time_zone": "Mars/Olympus"}},
            400,
            "metadata.time_zone",
        ),
        ("/keys", {"name": "n", "user_id": "u", "time_zone": "Mars/Olympus"}, 422, "time_zone"),
    ],
    ids=["query", "chat", "responses", "key"],
)
async def test_unknown_zone_is_refused_with_a_sentence(
    redis_url: str, tmp_path: Path, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    async with serving(gateway_settings(redis_url, tmp_path)) as site:
        refused = await site.http.post(path, json=body)
        assert refused.status_code == status
        assert refused.json()["error"]["message"] == (
            f"{field}: unknown time zone: 'Mars/Olympus'; give an IANA name such as Europe/Berlin"
        )


async def test_question_has_its_zone_by_every_route(redis_url: str, tmp_path: Path) -> None:
    settings = gateway_settings(redis_url, tmp_path, time_zone="Africa/Nairobi")
    async with serving(settings) as site, generating(redis_url, tmp_path) as generator:
        responses = {"model": "local2", "input": "echo hi"}
        asked: list[tuple[str, dict[str, Any], str]] = [
            ("/query", {"query": "echo hi", "time_zone": "asia/tokyo"}, "Asia/Tokyo"),
            ("/query", {"query": "echo hi"}, "Africa/Nairobi"),
            ("/v1/chat/completions", {**CHAT, "metadata": {"time_zone": "Asia/Tokyo"}}, "Asia/Tokyo"),
            ("/v1/chat/completions", CHAT, "Africa/Nairobi"),
            ("/v1/responses", {**responses, "metadata": {"time_zone": "Asia/Tokyo"}}, "Asia/Tokyo"),
            ("/v1/responses", responses, "Africa/Nairobi"),
        ]
        for path, body, _ in asked:
            assert (await site.http.post(path, json=body)).status_code == 200, path
        assert zones(generator) == [zone for *_, zone in asked]


async def test_zone_of_a_key_is_that_of_its_questions(redis_url: str, tmp_path: Path) -> None:
    settings = gateway_settings(redis_url, tmp_path, time_zone="Africa/Nairobi")
    async with serving(settings) as site, generating(redis_url, tmp_path) as generator:
        body = {"name": "phone", "user_id": "ann", "time_zone": "Australia/Sydney"}
        made = (await site.http.post("/keys", json=body)).json()
        async with client(site.url, made["key"]) as ann:
            assert (await ann.post("/query", json={"query": "echo hi"})).status_code == 200
            for zone in ("America/Los_Angeles", None):
                changed = await site.http.patch(f"/keys/{made['id']}", json={"time_zone": zone})
                assert (changed.status_code, changed.json()["time_zone"]) == (200, zone)
                assert await listed(site, made["id"]) == zone
                assert (await ann.post("/query", json={"query": "echo hi"})).status_code == 200
        assert zones(generator) == ["Australia/Sydney", "America/Los_Angeles", "Africa/Nairobi"]


async def test_zone_of_a_key_is_set_on_the_command_line(redis_url: str, tmp_path: Path) -> None:
    async with serving(gateway_settings(redis_url, tmp_path)) as site:

        async def local2(*arguments: str) -> tuple[int | None, str]:
            running = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.cli", "keys", *arguments, cwd=ROOT,
                env={**os.environ, "LOCAL2_API_URL": site.url, "LOCAL2_API_KEY": ADMIN_KEY},
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            said, _ = await running.communicate()
            return running.returncode, said.decode()

        code, said = await local2("add", "phone", "--time-zone", "asia/tokyo")
        assert code == 0, said
        key_id = said.split()[1].rstrip(",")
        assert await listed(site, key_id) == "Asia/Tokyo"
        assert await local2("zone", key_id, "Europe/Berlin") == (0, "phone: Europe/Berlin\n")
        assert await listed(site, key_id) == "Europe/Berlin"
        assert (await local2("zone", key_id))[0] == 0
        assert await listed(site, key_id) is None
        code, said = await local2("zone", key_id, "Mars/Olympus")
        assert (code, "unknown time zone: 'Mars/Olympus'" in said) == (1, True)


async def test_zone_of_a_key_that_is_not_there_is_refused(redis_url: str, tmp_path: Path) -> None:
    async with serving(gateway_settings(redis_url, tmp_path)) as site:
        (start,) = (await site.http.get("/keys")).json()["keys"]
        for key_id, status, code in ((start["id"], 409, "start_key"), ("none", 404, "not_found")):
            refused = await site.http.patch(f"/keys/{key_id}", json={"time_zone": "Asia/Tokyo"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        made = (await site.http.post("/keys", json={"name": "n", "user_id": "ann"})).json()
        async with client(site.url, made["key"]) as ann:
            assert (await ann.patch(f"/keys/{made['id']}", json={"time_zone": None})).status_code == 403


def test_key_record_without_a_zone_is_read_by_earlier_versions() -> None:
    record = KeyRecord(digest("k")[:12], "n", "ann", "user", 1)
    assert b"time_zone" not in record.dump()
    assert b'"time_zone":"Asia/Tokyo"' in KeyRecord("i", "n", "ann", "user", 1, time_zone="Asia/Tokyo").dump()


# 25 hours apart: their dates always differ.
EAST, WEST = "Pacific/Kiritimati", "Pacific/Pago_Pago"


@pytest.mark.parametrize("zone", [EAST, WEST])
async def test_both_respondents_read_the_date_in_the_users_zone(redis_url: str, zone: str) -> None:
    async with stage(redis_url) as on:
        shadow = GeneratorSettings(**{**on.settings.model_dump(), "respondent_id": "B", "temperature": 0.5})
        async with running(respondent(shadow), shadow):
            await announced(redis_url, "respondent-b")
            query_id = await on.ask("What day is it?", respondents=("A", "B"), time_zone=zone)
            for respondent_id in ("A", "B"):
                await on.answer(query_id, respondent=respondent_id)
        prompts = [request.body["messages"][0]["content"] for request in on.server.requests]
        published = await on.published(RESPONSE_GENERATION, query_id)
    line = date_line(entry_ms(query_id), zone)
    assert [line in prompt.splitlines() for prompt in prompts] == [True, True]
    assert [generation.time_zone for generation in published] == [zone, zone]


async def test_committee_members_read_the_same_date(redis_url: str) -> None:
    async with stage(redis_url) as on:
        query_id = await on.ask("What day is it?", mode="committee", personas=["skeptic", "empath"], time_zone=EAST)
        await on.answer(query_id)
        prompts = [request.body["messages"][0]["content"] for request in on.server.requests]
    line = date_line(entry_ms(query_id), EAST)
    assert [line in prompt.splitlines() for prompt in prompts] == [True] * 3


@pytest.mark.parametrize("zone", [EAST, WEST])
async def test_tool_call_has_the_zone_of_its_question(redis_url: str, zone: str) -> None:
    call = {"name": "web_search", "args": {"query": "Bitcoin price today"}}
    rules = [{"when": {"tool_results": 0}, "respond": {"tool_calls": [call]}}]
    searching = WebSearchSettings(redis_url=redis_url, heartbeat=0.2, drain=0.2, provider="mock")
    async with running(web_search.app, searching), stage(redis_url, rules) as on:
        await announced(redis_url, "web_search")
        before = local_date(now_ms(), zone)
        await on.answer(await on.ask("go", time_zone=zone))
        told = on.server.requests[-1].body["messages"][-1]["content"]
    days = {before, local_date(now_ms(), zone)}
    assert any(f"Today's date: {day}\n" in told for day in days)


async def listed(site: Site, key_id: str) -> str | None:
    keys = (await site.http.get("/keys")).json()["keys"]
    return next(key["time_zone"] for key in keys if key["id"] == key_id)


def zones(generator: FakeGenerator) -> list[str]:
    return [message.payload.time_zone for message in generator.queries]
