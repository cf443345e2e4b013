"""A question in the place of another one, and how a chat is asked: what the model reads, what stays, what leaves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.http_gateway import gateway_settings, serving
from support.openai_place import Place, open_place
from support.proxy import Proxy, once
from support.waiting import eventually

from shared.bus import order
from shared.bus.keys import journal_key, record_key, session_key, turns_key
from shared.contracts import QUERY_FORGET, RESPONSE_GENERATION
from shared.records.journal import EntryType
from shared.records.sessions import MAX_TURNS, Sessions, Turn, before

pytestmark = pytest.mark.asyncio(loop_scope="module")

_names = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    async with open_place(server_url, tmp_path_factory.mktemp("gateway")) as place:
        yield place


class Chat:
    """A session of our own routes. Its model says the same until it is told something else."""

    def __init__(self, place: Place) -> None:
        self.place, self.http = place, place.site.http
        self.name = f"chat-{next(_names)}"

    def says(self, text: str, **respond: Any) -> None:
        self.place.rules({"respond": {"text": text, **respond}})

    async def ask(self, query: str, status: int = 200, wait: bool = True, **fields: Any) -> str:
        body = {"query": query, "session_id": self.name, **fields}
        answer = await self.http.post(f"/query?wait={str(wait).lower()}", json=body)
        assert answer.status_code == status, answer.text
        return str(answer.json().get("query_id", ""))

    async def shown(self) -> dict[str, Any]:
        answer = await self.http.get(f"/sessions/{self.name}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def listed(self) -> list[dict[str, Any]]:
        return list((await self.http.get("/queries", params={"session_id": self.name})).json()["queries"])

    async def held(self) -> list[tuple[str, str]]:
        return [(turn["query"], turn["answer"]) for turn in (await self.shown())["turns"]]

    @property
    def read(self) -> list[str]:
        """What the model was last given, without its instructions."""
        return [said["content"] for said in self.place.sent[-1]["messages"] if said["role"] != "system"]

    async def forgotten(self) -> list[str]:
        found = await self.place.on.published(QUERY_FORGET)
        return [one for gone in found if gone.session_id == self.name for one in gone.queries]


@pytest_asyncio.fixture(loop_scope="module")
async def chat(service: Place) -> AsyncIterator[Chat]:
    """One stack for all tests of this file; each has a session of its own."""
    chat = Chat(service)
    chat.says("You asked: <<query>>")
    yield chat
    await service.on.idle()


async def test_the_same_question_again_is_a_version_and_the_model_goes_on_from_the_newer_one(chat: Chat) -> None:
    one = await chat.ask("one")
    chat.says("first")
    first = await chat.ask("two")
    await chat.ask("behind the first")
    chat.says("second")
    second = await chat.ask("two", instead_of=first)
    assert chat.read == ["one", "You asked: one", "two"]
    chat.says("You asked: <<query>>")
    last = await chat.ask("three")
    assert chat.read == ["one", "You asked: one", "two", "second", "three"]
    shown = await chat.shown()
    # all of it can be read, and what stands where
    assert [turn["answer"] for turn in shown["turns"]] == [
        "You asked: one", "first", "first", "second", "You asked: three",
    ]  # fmt: skip
    assert [turn["query_id"] for turn in shown["turns"] if turn["after"] is not None] == [second]
    assert shown["tip"] == last
    told = [said["content"] for said in shown["messages"] if said["role"] != "system"]
    assert told == [*chat.read, "You asked: three"]
    assert await chat.forgotten() == []
    # a version of a version stands where the first one does
    await chat.ask("two", instead_of=second)
    assert chat.read == ["one", "You asked: one", "two"]
    await chat.ask("one", instead_of=one)
    assert chat.read == ["one"]


async def test_an_older_version_is_chosen_and_the_next_question_goes_on_from_it(chat: Chat) -> None:
    chat.says("first")
    first = await chat.ask("one")
    behind = await chat.ask("two")
    chat.says("second")
    await chat.ask("one", instead_of=first)
    changed = await chat.http.patch(f"/sessions/{chat.name}", json={"version": first})
    assert changed.status_code == 200, changed.text
    shown = await chat.shown()
    assert shown["tip"] == behind
    assert [said["content"] for said in shown["messages"] if said["role"] == "assistant"] == ["first", "first"]
    asked = await chat.ask("three")
    assert chat.read == ["one", "first", "two", "first", "three"]
    # what is said last is what is shown, and what comes behind it
    assert (await chat.shown())["tip"] == asked
    await chat.ask("four")
    assert chat.read[-3:] == ["three", "second", "four"]
    assert (await chat.http.patch(f"/sessions/{chat.name}", json={"version": "1-0"})).status_code == 404


async def test_other_words_take_the_question_and_what_came_after_it_away(chat: Chat) -> None:
    await chat.ask("one")
    first = await chat.ask("My sister lives in Lyon.")
    again = await chat.ask("My sister lives in Lyon.", instead_of=first)
    behind = await chat.ask("two")
    await chat.ask("My sister lives in Porto.", instead_of=again)
    assert [query for query, _ in await chat.held()] == ["one", "My sister lives in Porto."]
    assert chat.read == ["one", "You asked: one", "My sister lives in Porto."]
    assert await chat.forgotten() == [first, again, behind]
    for gone in (first, again, behind):
        assert (await chat.http.get(f"/queries/{gone}")).status_code == 404
        keys = await chat.place.on.bus.link.call("EXISTS", journal_key(gone, "A"), record_key(gone))
        assert (keys, await chat.place.on.published(RESPONSE_GENERATION, gone)) == (0, [])


async def test_repeated_edit_finishes_what_another_gateway_began(chat: Chat, tmp_path: Path) -> None:
    """That gateway has lost Redis before its last step."""
    first = await chat.ask("before")
    key = {"Idempotency-Key": f"again-{chat.name}"}
    body = {"query": "after", "session_id": chat.name, "instead_of": first}
    async with (
        Proxy(chat.place.on.settings.redis_url) as proxy,
        serving(gateway_settings(proxy.url, tmp_path)) as breaking,
    ):
        reached = asyncio.Event()

        async def lose() -> None:
            reached.set()
            await asyncio.Event().wait()

        proxy.before = once(turns_key(chat.name, "B").encode(), lose)
        broken = asyncio.create_task(breaking.http.post("/query", json=body, headers=key))
        async with asyncio.timeout(60):
            await reached.wait()
        (asked,) = await chat.listed()
        answers = [await chat.http.post("/query", json=body, headers=key) for _ in range(2)]
        broken.cancel()
        proxy.cut()
    assert [answer.json()["query_id"] for answer in answers] == [asked["query_id"]] * 2
    assert [query for query, _ in await chat.held()] == ["after"]


@pytest.mark.parametrize("words", ["hold", "something else"])
async def test_a_question_that_is_still_answered_stops(chat: Chat, words: str) -> None:
    chat.place.rules({"when": {"user": "^hold"}, "respond": {"text": "x", "fault": {"kind": "stall"}}})
    running = await chat.ask("hold", status=202, wait=False)
    await chat.place.on.seen(running, EntryType.STATE, action="START_GENERATION")
    behind = await chat.ask("hold on", status=202, wait=False)
    chat.says("You asked: <<query>>")
    again = await chat.ask(words, instead_of=running)
    assert chat.read == [words]

    async def ended() -> list[str]:
        listed = await chat.listed()
        return [one["query_id"] for one in listed if one["state"] in ("queued", "running")]

    assert not await ended()
    assert (await chat.shown())["tip"] == again
    for stopped in (running, behind):
        state = await chat.http.get(f"/queries/{stopped}")
        assert state.status_code == 404 or state.json()["state"] == "cancelled"


async def test_a_question_that_failed_is_asked_again_in_its_place(chat: Chat) -> None:
    await chat.ask("one")
    chat.place.rules({"respond": {"status": 400, "error": "no"}})
    await chat.ask("two", status=400)
    (failed,) = [one["query_id"] for one in await chat.listed() if one["state"] == "failed"]
    chat.says("You asked: <<query>>")
    again = await chat.ask("two", instead_of=failed)
    assert chat.read == ["one", "You asked: one", "two"]
    assert [query for query, _ in await chat.held()] == ["one", "two"]
    listed = await chat.listed()
    assert [one["after"] is not None for one in listed if one["query_id"] == again] == [True]


async def test_of_two_tabs_that_edit_at_once_the_later_question_stands(chat: Chat) -> None:
    one = await chat.ask("one")
    two = await chat.ask("two")
    await chat.ask("three")
    asked = await asyncio.gather(
        *(chat.ask(words, instead_of=two, status=202, wait=False) for words in ("this", "that"))
    )
    last = max(asked, key=order)
    # of the other one nothing is left
    await chat.place.on.ended(last)
    await chat.place.on.idle()
    held = [turn["query_id"] for turn in (await chat.shown())["turns"]]
    assert held == [one, last]
    assert (await chat.shown())["tip"] == last
    # the same words at once are versions of one place, of which none is lost
    again = await asyncio.gather(*(chat.ask("one", instead_of=one, status=202, wait=False) for _ in range(2)))
    for query_id in again:
        await chat.place.on.ended(query_id)
    await chat.place.on.idle()
    turns = (await chat.shown())["turns"]
    stopped = [one["query_id"] for one in await chat.listed() if one["state"] == "cancelled"]
    assert {turn["query_id"] for turn in turns} | set(stopped) == {*held, *again}
    assert {turn["after"] for turn in turns if turn["query_id"] in again} == {before(one)}


async def test_another_gateway_shows_the_same_versions_and_goes_on_from_the_chosen_one(
    chat: Chat, tmp_path: Path
) -> None:
    first = await chat.ask("one")
    behind = await chat.ask("two")
    await chat.ask("one", instead_of=first)
    assert (await chat.http.patch(f"/sessions/{chat.name}", json={"version": first})).status_code == 200
    shown = await chat.shown()
    async with serving(gateway_settings(chat.place.on.settings.redis_url, tmp_path, bus_wait=30.0)) as started:
        chat.http = started.http
        assert await chat.shown() == shown
        assert shown["tip"] == behind
        await chat.ask("three")
        assert chat.read[:4] == ["one", "You asked: one", "two", "You asked: two"]
        corrected = await chat.ask("other words", instead_of=behind)
    chat.http = chat.place.site.http
    assert (await chat.shown())["tip"] == corrected
    assert [query for query, _ in await chat.held()] == ["one", "one", "other words"]


async def test_only_a_query_of_the_same_session_can_be_replaced(chat: Chat) -> None:
    other = Chat(chat.place)
    elsewhere = await other.ask("one")
    await chat.ask("one")
    await chat.ask("two", status=404, instead_of=elsewhere)
    await chat.ask("two", status=404, instead_of="1-0")
    await chat.ask("two", status=400, instead_of="last")
    alone = await chat.http.post("/query", json={"query": "two", "instead_of": elsewhere})
    assert alone.status_code == 422
    assert "session_id" in alone.json()["error"]["message"]
    assert [query for query, _ in await other.held()] == ["one"]
    assert [query for query, _ in await chat.held()] == ["one"]


async def test_a_model_is_shown_its_most_turns_of_one_version_however_many_others_there_are(chat: Chat) -> None:
    sessions = Sessions(chat.place.on.bus)
    await chat.ask("zero")
    turns = [Turn(f"{n}-0", f"q{n}", "a", n) for n in range(1, 61)]
    aside = [Turn(f"{n}-0", f"q{n}", "aside", n, after="60-0" if n == 101 else None) for n in range(101, 261)]
    back = Turn("261-0", "q261", "a", 261, after="60-0")
    for one in (*turns, *aside, back):
        await chat.place.on.bus.link.pipe(sessions.appending(chat.name, "B", one))
    assert await sessions.turns(chat.name, "B") == [*turns[11:], back]
    assert await sessions.turns(chat.name, "B", "261-0") == turns[-MAX_TURNS:]
    assert await sessions.turns(chat.name, "B", after="30-0") == turns[:30]


async def test_a_chat_is_asked_as_it_is_set_by_every_client(chat: Chat) -> None:
    await chat.ask("one")
    set_ = {"system_prompt": "Speak like a pirate.", "temperature": 0.25, "mode": "committee", "personas": ["Skeptic"]}
    changed = await chat.http.patch(f"/sessions/{chat.name}", json={"settings": set_})
    assert changed.json()["settings"] == {"model": None, "rounds": None, **set_}
    shown = await chat.shown()
    assert shown["settings"] == changed.json()["settings"]
    assert "Speak like a pirate." in shown["messages"][0]["content"]
    await chat.ask("two")
    asked = chat.place.sent[-1]
    assert asked["messages"][0]["content"].count("Speak like a pirate.") == 1
    assert asked["options"]["temperature"] == 0.25
    # what a query says itself comes first
    await chat.ask("three", system_prompt="Speak like a poet.", options={"temperature": 1})
    asked = chat.place.sent[-1]
    assert "poet" in asked["messages"][0]["content"]
    assert "pirate" not in asked["messages"][0]["content"]
    assert asked["options"]["temperature"] == 1
    # and the operator's own instructions stay in front
    assert not asked["messages"][0]["content"].startswith("Speak")
    # an answer's judge and its readers of preference data are told what the model was told
    (said,) = await chat.place.on.published(RESPONSE_GENERATION, (await chat.shown())["tip"])
    assert "Speak like a poet." in said.system
    assert (await chat.http.patch(f"/sessions/{chat.name}", json={"settings": {}})).json()["settings"]["mode"] is None
    await chat.ask("four")
    assert "pirate" not in str(chat.place.sent[-1]["messages"])


async def test_settings_that_nobody_of_us_wrote_are_none(chat: Chat) -> None:
    await chat.ask("one")
    for value in ("[1]", "{", '{"temperature": "hot"}'):
        await chat.place.on.bus.link.call("HSET", session_key(chat.name), "settings", value, "tip", "x")
        assert (await chat.shown())["settings"]["temperature"] is None
        await chat.ask("two")
    refused = await chat.http.patch(f"/sessions/{chat.name}", json={"settings": {"temperature": 9}})
    assert refused.status_code == 422
    assert (await chat.http.patch(f"/sessions/{chat.name}", json={})).status_code == 422


async def test_a_client_that_keeps_the_history_knows_no_versions(chat: Chat) -> None:
    await chat.ask("zero")
    first = await chat.ask("one")
    chat.says("again")
    await chat.ask("one", instead_of=first)
    said = ("zero", "You asked: zero", "one", "again")
    history = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    answer = await chat.http.post(
        "/v1/chat/completions", json={"model": "local2", "messages": [*history, {"role": "user", "content": "two"}]}
    )
    assert answer.status_code == 200, answer.text

    async def turns() -> bool:
        return await chat.held() == [said[:2], said[2:], ("two", "again")]

    await eventually(turns)
