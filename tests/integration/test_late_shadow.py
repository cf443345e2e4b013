"""The shadow has not come to a query yet, or comes to it late: its user sees and has what the shown answer left."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from support.apps import Probe, ProbeSettings, open_probe
from support.openai_place import Place, open_place
from support.services import announced, running
from support.stack import respondent
from support.waiting import eventually

from services.generator.settings import GeneratorSettings
from shared.bus.keys import cancel_key, turns_key
from shared.contracts import NOT_RUN, RESPONSE_GENERATION
from shared.participant.tool import tool_service

# the second one has a model of its own
FAILS = {"when": {"user": "^fail", "model": "^gemma"}, "respond": {"status": 400, "error": "no"}}
SAYS = {"respond": {"text": "You asked: <<query>>"}}

CALLS = {
    "when": {"user": "^do", "tool_results": 0},
    "respond": {"tool_calls": [{"name": name, "args": {"text": name}} for name in ("probe", "keeper")]},
}
keeper = tool_service("keeper", Probe, ProbeSettings, open_probe, read_only=False)


@contextlib.asynccontextmanager
async def beside(redis_url: str, folder: Path, **values: Any) -> AsyncIterator[Place]:
    """A gateway, a generator, and a second respondent with these settings."""
    async with open_place(redis_url, folder) as place:
        place.rules(FAILS, CALLS, SAYS)
        settings = place.on.settings.model_dump() | {"respondent_id": "B", "model": "shadow:1b", **values}
        async with running(respondent(GeneratorSettings(**settings)), GeneratorSettings(**settings)):
            await announced(redis_url, "respondent-b")
            yield place


async def listed(place: Place, session: str) -> list[str]:
    found = await place.site.http.get("/queries", params={"session_id": session})
    return [one["query_id"] for one in found.json()["queries"] if one["state"] != "completed"]


async def test_a_failed_question_leaves_for_other_words_before_the_shadow_has_come_to_it(
    redis_url: str, tmp_path: Path
) -> None:
    async with beside(redis_url, tmp_path, yield_rest=600) as place:
        http = place.site.http
        assert (await http.post("/query", json={"query": "fail", "session_id": "s"})).status_code == 400
        (failed,) = await listed(place, "s")
        await place.on.idle()
        body = {"query": "other words", "session_id": "s", "instead_of": failed}
        assert (await http.post("/query", json=body)).status_code == 200
        assert await listed(place, "s") == []
        # nor does it come to it any more
        assert await place.on.bus.link.call("GET", cancel_key(failed)) == b"taken back"


async def test_what_a_client_takes_back_leaves_before_the_shadow_has_come_to_it(redis_url: str, tmp_path: Path) -> None:
    async with beside(redis_url, tmp_path, yield_rest=600) as place:
        made = await place.site.http.post(
            "/keys", json={"name": "ui", "user_id": "ui", "role": "user", "trusted": True}
        )
        headers = {"Authorization": f"Bearer {made.json()['key']}", "X-OpenWebUI-Chat-Id": "c"}

        async def ask(*said: str) -> int:
            messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
            body = {"model": "local2", "messages": messages}
            return (await place.site.http.post("/v1/chat/completions", json=body, headers=headers)).status_code

        async def kept() -> list[str]:
            found = await place.site.http.get("/queries", params={"session_id": "c"}, headers=headers)
            return [one["query"] for one in found.json()["queries"]]

        assert await ask("one") == 200
        assert await ask("one", "You asked: one", "fail") == 400
        assert await kept() == ["one", "fail"]
        await place.on.idle()
        assert await ask("one", "You asked: one", "two") == 200
        assert await kept() == ["one", "two"]


async def test_a_session_does_not_begin_with_an_answer_that_nobody_sees(redis_url: str, tmp_path: Path) -> None:
    async with beside(redis_url, tmp_path) as place:
        body = {"model": "local2", "messages": [{"role": "user", "content": "fail"}]}
        asked = await place.site.http.post("/v1/chat/completions", json=body)
        assert asked.status_code == 400
        await place.on.idle("respondent-b")
        assert (await place.site.http.get("/sessions")).json()["sessions"] == []
        # where there is one its answer is in it, for the conversation that it goes on from
        asked = await place.site.http.post("/query", json={"query": "one"})
        session = asked.json()["session_id"]

        async def stored() -> bool:
            return await place.on.bus.link.call("ZCARD", turns_key(session, "B")) == 1

        await eventually(stored)


async def test_what_would_last_is_done_for_the_answer_that_is_shown(redis_url: str, tmp_path: Path) -> None:
    async with beside(redis_url, tmp_path) as place:
        settings = ProbeSettings(redis_url=redis_url, heartbeat=1.0, drain=0.2)
        async with running(keeper, settings):
            await announced(redis_url, "keeper")
            asked = await place.site.http.post("/query", json={"query": "do it"})
            assert asked.status_code == 200
            await place.on.idle("respondent-b")
            assert await place.on.effects() == {"probe": 2, "keeper": 1}
        a, b = sorted(await place.on.published(RESPONSE_GENERATION), key=lambda one: one.respondent_id)
        assert [[call.error for call in one.tool_calls] for one in (a, b)] == [[None, None], [None, NOT_RUN]]
