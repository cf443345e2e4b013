"""A user's list of sessions: names, pins, words in them, and what runs."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.http_gateway import FakeGenerator, Site
from support.waiting import eventually

from services.gateway.queries import titles
from services.gateway.queries.session_search import excerpt, has_all, words_of
from shared.bus import Bus
from shared.records.sessions import Sessions, Turn


async def say(http: httpx.AsyncClient, words: str, session: str) -> str:
    answer = await http.post("/query", json={"query": words, "session_id": session})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["query_id"])


async def names(http: httpx.AsyncClient, **params: Any) -> list[str]:
    answer = await http.get("/sessions", params=params)
    assert answer.status_code == 200, answer.text
    return [one["session_id"] for one in answer.json()["sessions"]]


async def test_a_session_is_renamed_and_pinned_and_keeps_both(site: Site, fake: FakeGenerator) -> None:
    http = site.http
    for name in ("a", "b", "c"):
        await say(http, f"say {name}", name)
    changed = await http.patch("/sessions/a", json={"title": "  The  first\n one ", "pinned": True})
    assert (changed.status_code, changed.json()["title"], changed.json()["pinned"]) == (200, "The first one", True)
    assert await names(http) == ["a", "c", "b"]
    # use does not move others before it, nor does its own take its title
    await say(http, "say more", "b")
    await say(http, "say more", "a")
    assert await names(http) == ["a", "b", "c"]
    assert (await http.get("/sessions/a")).json()["title"] == "The first one"
    assert (await http.patch("/sessions/c", json={"pinned": True})).json()["title"] == "say c"
    assert await names(http) == ["c", "a", "b"]
    for name in ("a", "c"):
        assert (await http.patch(f"/sessions/{name}", json={"pinned": False})).json()["pinned"] is False
    assert await names(http) == ["a", "b", "c"]


async def test_what_is_not_there_or_another_s_is_not_changed(site: Site, fake: FakeGenerator, bus: Bus) -> None:
    await say(site.http, "say mine", "mine")
    async with await site.key("ann") as ann:
        for http, name in ((ann, "mine"), (site.http, "none"), (site.http, "no such/name")):
            refused = await http.patch(f"/sessions/{name}", json={"title": "x", "pinned": True})
            assert refused.status_code == 404, name
        assert await names(ann) == []
        assert (await ann.get("/queries", params={"session_id": "mine"})).json() == {"queries": []}
    assert (await site.http.get("/sessions/mine")).json()["title"] == "say mine"
    # deleted between the look and the change
    gone = await Sessions(bus).info("mine")
    assert gone is not None
    await site.http.delete("/sessions/mine")
    with pytest.raises(KeyError):
        await Sessions(bus).change(gone, title="back", pinned=True)
    assert await names(site.http) == []


@pytest.mark.parametrize("body", [{}, {"title": " "}, {"title": "x" * 201}, {"pinned": None}, {"owner": "me"}])
async def test_a_change_says_what_it_changes(site: Site, body: dict[str, Any]) -> None:
    assert (await site.http.patch("/sessions/s", json=body)).status_code == 422


async def test_words_are_found_in_titles_questions_and_answers(site: Site, fake: FakeGenerator) -> None:
    http = site.http
    await say(http, "say the Straße of Gibraltar", "sea")
    newest = await say(http, "say strasse again", "sea")
    await say(http, "say nothing", "other")
    await http.patch("/sessions/other", json={"title": "Rivers of Europe"})
    found = (await http.get("/sessions", params={"search": "STRASSE said:"})).json()
    assert [(one["session_id"], one["query_id"]) for one in found["sessions"]] == [("sea", newest)]
    assert "strasse again" in found["sessions"][0]["excerpt"]
    assert found["complete"] is True
    assert await names(http, search="europe rivers") == ["other"]
    assert await names(http, search="gibraltar nothing") == []
    # blank: the list itself
    assert len(await names(http, search="  ")) == 2
    assert (await http.get("/sessions", params={"search": "x", "offset": 1})).status_code == 400
    async with await site.key("ann") as ann:
        assert await names(ann, search="strasse") == []


async def test_session_search_reads_the_thousand_newest(site: Site, bus: Bus) -> None:
    turns = Sessions(bus).appending("oldest", "A", Turn("1-0", "gibraltar", "", 1))
    await Sessions(bus).open("oldest", "admin", "title")
    await bus.link.pipe(turns)
    assert await names(site.http, search="gibraltar") == ["oldest"]
    await asyncio.gather(*(Sessions(bus).open(f"s{n}", "admin", "title") for n in range(1_000)))
    bounded = (await site.http.get("/sessions", params={"search": "gibraltar"})).json()
    assert (bounded["sessions"], bounded["complete"]) == ([], False)


def test_an_excerpt_shows_the_words_on_one_line() -> None:
    text = "a " * 200 + "here is\nthe NEEDLE " + "b " * 200
    shown = excerpt(text, words_of("needle"))
    assert "here is the NEEDLE b" in shown
    assert shown.startswith("…")
    assert shown.endswith("…")
    assert len(shown) < 170
    assert has_all("Ünïcode", words_of("üNÏ"))


async def test_what_runs_is_listed_until_it_ends(site: Site, fake: FakeGenerator) -> None:
    http = site.http
    first = (await http.post("/query?wait=false", json={"query": "slow one", "session_id": "s"})).json()["query_id"]
    second = (await http.post("/query?wait=false", json={"query": "say two", "session_id": "s"})).json()["query_id"]

    async def states(**params: Any) -> dict[str, str]:
        answer = await http.get("/queries", params=params)
        assert answer.status_code == 200, answer.text
        return {one["query_id"]: one["state"] for one in answer.json()["queries"]}

    expected = {first: "running", second: "queued"}
    await eventually(lambda: _same(states(session_id="s", state="running"), expected), what="one runs, one waits")
    assert await states(state="running") == expected
    fake.gate.set()
    await eventually(lambda: _same(states(state="running"), {}), what="nothing runs")
    assert await states(session_id="s") == {first: "completed", second: "completed"}
    await http.post("/query", json={"query": "fail model_missing", "session_id": "s"})
    (failed,) = (await http.get("/queries", params={"session_id": "s", "state": "failed"})).json()["queries"]
    assert failed["error"] == {"code": "model_missing", "message": "it failed: model_missing"}
    assert failed["query"] == "fail model_missing"
    # of another session nothing, and everything of all sessions is too much to ask for
    assert await states(session_id="other") == {}
    assert (await http.get("/queries")).status_code == 400
    async with await site.key("ann") as ann:
        assert (await ann.get("/queries", params={"state": "running"})).json() == {"queries": []}


async def _same(found: Any, expected: dict[str, str]) -> bool:
    await asyncio.sleep(0)
    return bool(await found == expected)


async def test_the_model_names_a_session_once_and_never_one_that_has_a_name(site: Site, fake: FakeGenerator) -> None:
    fake.title = "**A title of one.**"
    http = site.http
    await say(http, "say one", "a")
    made = await asyncio.gather(*(http.post("/sessions/a/title") for _ in range(3)))
    assert {answer.json()["title"] for answer in made} <= {"say one", "A title of one"}
    assert sum(answer.json()["made"] for answer in made) >= 1
    chores = [message.payload for message in fake.queries if message.payload.plain]
    assert [("say one" in chore.query, "You said: one" in chore.query) for chore in chores] == [(True, True)]
    assert (chores[0].messages, chores[0].think) == ([], False)
    again = await http.post("/sessions/a/title")
    assert again.json() == {"session_id": "a", "title": "A title of one", "made": False}
    # the call leaves nothing in the list, and no turn
    assert await names(http) == ["a"]
    await say(http, "say two", "b")
    await http.patch("/sessions/b", json={"title": "Mine"})
    assert (await http.post("/sessions/b/title")).json() == {"session_id": "b", "title": "Mine", "made": False}
    assert (await http.post("/sessions/none/title")).status_code == 404
    async with await site.key("ann") as ann:
        assert (await ann.post("/sessions/a/title")).status_code == 404


async def test_session_whose_turn_is_removed_meanwhile_gets_no_title(site: Site, fake: FakeGenerator, bus: Bus) -> None:
    fake.title = "Something else."
    asked = await say(site.http, "say something", "s")

    async def remove() -> None:
        await Sessions(bus).bring("s", [asked], [])

    fake.before_title = remove
    named = await site.http.post("/sessions/s/title")
    assert named.json() == {"session_id": "s", "title": "say something", "made": False}
    # the next first turn has a title of its own
    fake.before_title = None
    await say(site.http, "say another", "s")
    assert (await site.http.post("/sessions/s/title")).json()["made"]


async def test_a_session_without_an_answer_has_nothing_to_be_named_after(site: Site, fake: FakeGenerator) -> None:
    await site.http.post("/query", json={"query": "fail model_missing", "session_id": "s"})
    refused = await site.http.post("/sessions/s/title")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_answered")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Title: “The capital of France.”", "The capital of France"),
        ("\n\n# **Capitals**\nHere is why", "Capitals"),
        ("  a   b ", "a b"),
        ("x " * 60, ""),
        ("***", ""),
    ],
)
def test_a_title_is_what_is_left_of_a_model_s_words(said: str, expected: str) -> None:
    assert titles.cleaned(said) == expected
