"""Clients that keep the history: the session holds what they send, and nothing stays of what they took back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.http_gateway import client
from support.openai_place import Place, calling, open_place
from support.waiting import eventually

from shared.bus.keys import journal_key, record_key
from shared.contracts import QUERY_FORGET, RESPONSE_GENERATION, ResponseGeneration
from shared.records.sessions import Sessions, Turn

pytestmark = pytest.mark.asyncio(loop_scope="module")

Messages = list[dict[str, Any]]
_names = itertools.count()
CHAT, USER = "X-OpenWebUI-Chat-Id", "X-OpenWebUI-User-Id"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    async with open_place(
        server_url, tmp_path_factory.mktemp("gateway"), client_gone_seconds=0.2, keepalive=1.0
    ) as place:
        yield place


@pytest_asyncio.fixture(loop_scope="module")
async def place(service: Place) -> AsyncIterator[Place]:
    """One stack for all tests of this file; each has a person and chats of its own."""
    service.rules({"respond": {"text": "You asked: <<query>>"}})
    yield service
    await service.on.idle()


class Talk:
    """A chat as a program with a trusted key has it: all of it is sent with every question."""

    def __init__(self, http: httpx.AsyncClient, chat: str | None, user: str = "") -> None:
        self._http = http
        self.user = user or f"ann{next(_names)}"
        user = self.user
        self.headers = {USER: user, **({CHAT: chat} if chat else {})}
        self.messages: Messages = []
        self.queries: list[str] = []
        self.session = ""

    async def post(self, messages: Messages, **body: Any) -> httpx.Response:
        asked = {"model": "local2", "messages": messages, **body}
        return await self._http.post("/v1/chat/completions", json=asked, headers=self.headers)

    async def say(self, text: str, **body: Any) -> str:
        self.messages.append({"role": "user", "content": text})
        done = await self.post(self.messages, **body)
        assert done.status_code == 200, done.text
        self.session = done.headers["X-Session-Id"]
        self.queries.append(done.headers["X-Query-Id"])
        answer: str = done.json()["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    async def held(self) -> list[tuple[str, str]]:
        """The turns of the session."""
        found = await self._http.get(f"/sessions/{self.session}", headers=self.headers)
        assert found.status_code == 200, found.text
        return [(turn["query"], turn["answer"]) for turn in found.json()["turns"]]

    async def sessions(self) -> list[str]:
        found = await self._http.get("/sessions", headers=self.headers)
        return [one["session_id"] for one in found.json()["sessions"]]


async def key(place: Place, user_id: str, **body: Any) -> httpx.AsyncClient:
    made = await place.site.http.post("/keys", json={"name": "x", "user_id": user_id, **body})
    return client(place.site.url, made.json()["key"], timeout=30.0)


@pytest_asyncio.fixture(loop_scope="module")
async def webui(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    async with await key(place, "webui", trusted=True) as http:
        yield http


async def taken_back(place: Place, talk: Talk) -> list[str]:
    found = await place.on.published(QUERY_FORGET)
    return [one for gone in found if gone.user_id.endswith(talk.user) for one in gone.queries]


async def published(place: Place, talk: Talk) -> list[ResponseGeneration]:
    found = await place.on.published(RESPONSE_GENERATION)
    return [one for one in found if one.user_id.endswith(talk.user)]


async def traces(place: Place, query_id: str) -> int:
    """How many keys and entries there are of a query."""
    bus = place.on.bus
    keys = await bus.link.call("EXISTS", journal_key(query_id, "A"), record_key(query_id))
    return int(keys) + len(await place.on.published(RESPONSE_GENERATION, query_id))


async def test_a_chat_is_a_session_and_an_edited_question_leaves_it(place: Place, webui: httpx.AsyncClient) -> None:
    talk = Talk(webui, f"chat-{next(_names)}")
    await talk.say("one")
    await talk.say("two")
    await talk.say("three")
    assert talk.session == talk.headers[CHAT]
    assert await talk.held() == [(q, f"You asked: {q}") for q in ("one", "two", "three")]
    assert not await taken_back(place, talk)
    # the second question is edited: it and what followed it were never said
    talk.messages = talk.messages[:2]
    await talk.say("TWO")
    assert [query for query, _ in await talk.held()] == ["one", "TWO"]
    assert await taken_back(place, talk) == talk.queries[1:3]
    assert [await traces(place, one) > 0 for one in talk.queries] == [True, False, False, True]
    for gone in talk.queries[1:3]:
        assert (await webui.get(f"/queries/{gone}", headers=talk.headers)).status_code == 404
    # the model was shown what the client sent
    assert [m["content"] for m in place.sent[-1]["messages"] if m["role"] == "user"] == ["one", "TWO"]


async def test_an_answer_that_is_made_again_takes_the_place_of_the_first(
    place: Place, webui: httpx.AsyncClient
) -> None:
    talk = Talk(webui, f"chat-{next(_names)}")
    await talk.say("one")
    place.rules({"respond": {"text": "Another."}})
    talk.messages = []
    await talk.say("one")
    assert await talk.held() == [("one", "Another.")]
    assert await taken_back(place, talk) == talk.queries[:1]


async def test_turns_that_a_client_brings_are_the_sessions_and_deleted_ones_go(
    place: Place, webui: httpx.AsyncClient
) -> None:
    talk = Talk(webui, "brought")
    talk.messages = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "Yes, before."}]
    await talk.say("one")
    await talk.say("two")
    assert [query for query, _ in await talk.held()] == ["before", "one", "two"]
    # what was edited in an answer stands so in the session, and what was remembered of the first is forgotten
    talk.messages[3]["content"] = "Rather this."
    await talk.say("three")
    assert await talk.held() == [
        ("before", "Yes, before."), ("one", "Rather this."), ("two", "You asked: two"), ("three", "You asked: three")
    ]  # fmt: skip
    assert await taken_back(place, talk) == talk.queries[:1]
    del talk.messages[:2]
    await talk.say("four")
    assert [query for query, _ in await talk.held()] == ["one", "two", "three", "four"]


async def test_chats_and_people_are_apart(place: Place, webui: httpx.AsyncClient) -> None:
    first = Talk(webui, "same")
    second, other = Talk(webui, "another", user=first.user), Talk(webui, "same")
    for talk in (first, second, other):
        await talk.say("hello")
    assert len({talk.session for talk in (first, second, other)}) == 3
    await other.say("again")
    assert len(await first.held()) == len(await second.held()) == 1
    assert len(await other.held()) == 2
    # what cannot be a session's name is kept under one that can
    odd = Talk(webui, "{a chat}" * 30)
    await odd.say("hello")
    await odd.say("again")
    assert len(await odd.held()) == 2


async def test_a_chat_that_somebody_names_without_trust_means_nothing(place: Place) -> None:
    async with await key(place, "plain") as http:
        talk = Talk(http, "untrusted")
        await talk.say("one", metadata={"chat_id": "untrusted", "session_id": "untrusted"})
        assert talk.session != "untrusted"
        assert (await http.get("/sessions/untrusted")).status_code == 404


async def test_without_a_name_the_history_tells_which_session_is_meant(place: Place) -> None:
    async with await key(place, "carl") as http:
        talk, other = Talk(http, None, user="carl"), Talk(http, None)
        await talk.say("one")
        # as many clients give it back
        talk.messages[-1]["content"] = f" {talk.messages[-1]['content']}\n"
        await talk.say("two")
        first = talk.session
        await other.say("other")
        assert other.session != first
        await talk.say("three")
        assert talk.session == first
        assert [query for query, _ in await talk.held()] == ["one", "two", "three"]
        # taken back as far as its first answer
        talk.messages = talk.messages[:2]
        await talk.say("TWO")
        assert talk.session == first
        assert [query for query, _ in await talk.held()] == ["one", "TWO"]
        assert await taken_back(place, talk) == talk.queries[1:3]
        # examples that were never said are no session's
        stranger = Talk(http, None)
        stranger.messages = [{"role": "user", "content": "example"}, {"role": "assistant", "content": "So."}]
        await stranger.say("go on")
        assert sorted(await talk.sessions()) == sorted([first, other.session])
        # nobody else's
        async with await key(place, "dora") as doras:
            copy = Talk(doras, None)
            copy.messages = list(talk.messages)
            await copy.say("four")
            assert await copy.sessions() == []


async def test_what_is_said_before_tools_and_what_is_continued_are_part_of_the_turn(
    place: Place, webui: httpx.AsyncClient
) -> None:
    place.rules(calling("probe", text="I look."), {"respond": {"text": "There."}})
    talk = Talk(webui, f"chat-{next(_names)}")
    assert await talk.say("where?") == "I look.\n\nThere."
    assert await talk.held() == [("where?", "I look.\n\nThere.")]
    # the last answer is continued: the client has both parts as one
    place.rules({"respond": {"text": "More."}})
    more = await talk.post(talk.messages)
    assert more.json()["choices"][0]["message"]["content"] == "More."
    assert await talk.held() == [("where?", "I look.\n\nThere.More.")]
    assert await taken_back(place, talk) == talk.queries
    last = (await published(place, talk))[-1]
    assert (last.query_id, last.answer) == (more.headers["X-Query-Id"], "I look.\n\nThere.More.")
    talk.messages[-1]["content"] += "More."
    await talk.say("thanks")
    assert len(await talk.held()) == 2
    assert len(await taken_back(place, talk)) == 1


async def test_a_clients_tool_call_is_no_turn_and_goes_with_its_question(
    place: Place, webui: httpx.AsyncClient
) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    place.rules(calling("weather"), {"respond": {"text": "Rain."}})
    talk = Talk(webui, f"chat-{next(_names)}")
    asked: Messages = [{"role": "user", "content": "How is it?"}]
    first = await talk.post(asked, tools=[tool])
    message = first.json()["choices"][0]["message"]
    talk.session = first.headers["X-Session-Id"]
    assert await talk.held() == []
    # the journal of the call is needed until its result has been used
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    history = [*asked, message, result]
    done = await talk.post(history, tools=[tool])
    assert await talk.held() == [("How is it?", "Rain.")]
    assert not await taken_back(place, talk)
    # taken back, both go
    await talk.post([{"role": "user", "content": "Other"}])
    assert set(await taken_back(place, talk)) == {first.headers["X-Query-Id"], done.headers["X-Query-Id"]}


async def test_what_is_stopped_leaves_nothing_and_the_part_that_the_client_kept_is_its_turn(
    place: Place, webui: httpx.AsyncClient
) -> None:
    place.rules({"respond": {"text": ["one ", *(f"word{number} " for number in range(200))], "pace": 0.02}})
    talk = Talk(webui, f"chat-{next(_names)}")
    asked: Messages = [{"role": "user", "content": "count"}]
    async with webui.stream(
        "POST", "/v1/chat/completions", headers=talk.headers,
        json={"model": "local2", "messages": asked, "stream": True},
    ) as stream:  # fmt: skip
        async for line in stream.aiter_lines():
            if "one " in line:
                break
        talk.session, query_id = stream.headers["X-Session-Id"], stream.headers["X-Query-Id"]
    place.rules({"respond": {"text": "Well."}})
    # whoever asks on does not come back for it: it is stopped at once
    talk.messages = [*asked, {"role": "assistant", "content": "one"}]
    await talk.say("enough")
    await place.on.ended(query_id)
    await place.on.idle()
    assert await talk.held() == [("count", "one"), ("enough", "Well.")]
    assert [one.query for one in await published(place, talk)] == ["enough"]


async def test_questions_of_one_chat_at_once_do_not_stop_each_other(place: Place, webui: httpx.AsyncClient) -> None:
    talk = Talk(webui, f"chat-{next(_names)}")
    await talk.say("one")
    asked = [*talk.messages, {"role": "user", "content": "two"}]
    both = await asyncio.gather(talk.post(asked), talk.post(asked, temperature=1.0))
    assert [one.status_code for one in both] == [200, 200]
    assert [query for query, _ in await talk.held()] == ["one", "two", "two"]
    # the client goes on with one of them
    talk.messages = [*asked, {"role": "assistant", "content": both[0].json()["choices"][0]["message"]["content"]}]
    await talk.say("three")
    assert [query for query, _ in await talk.held()] == ["one", "two", "three"]


async def test_a_change_that_was_broken_off_is_made_by_the_next_request(
    place: Place, webui: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(webui, f"chat-{next(_names)}")
    await talk.say("one")
    await talk.say("two")
    talk.messages = talk.messages[:2]

    async def dies(*_any: Any) -> None:
        raise RuntimeError("the process has died")

    with monkeypatch.context() as patched:
        patched.setattr(Sessions, "bring", dies)
        broken = await talk.post([*talk.messages, {"role": "user", "content": "TWO"}])
        assert broken.status_code == 500
    # nothing was asked, and what was forgotten is not yet out of the session
    assert [query for query, _ in await talk.held()] == ["one", "two"]
    await talk.say("TWO")
    assert [query for query, _ in await talk.held()] == ["one", "TWO"]
    assert set(await taken_back(place, talk)) == {talk.queries[1]}


async def test_the_same_request_with_the_same_key_changes_nothing(place: Place, webui: httpx.AsyncClient) -> None:
    talk = Talk(webui, f"chat-{next(_names)}")
    talk.headers["Idempotency-Key"] = "once"
    first = await talk.post([{"role": "user", "content": "one"}])
    again = await talk.post([{"role": "user", "content": "one"}])
    assert first.headers["X-Query-Id"] == again.headers["X-Query-Id"]
    assert not await taken_back(place, talk)
    talk.session = first.headers["X-Session-Id"]
    assert await talk.held() == [("one", "You asked: one")]


async def test_housekeeping_does_not_touch_the_chat(place: Place, webui: httpx.AsyncClient) -> None:
    talk = Talk(webui, f"chat-{next(_names)}")
    await talk.say("one")
    title = "### Task:\nGenerate a title.\n<chat_history>\nUSER: one\n</chat_history>"
    done = await talk.post([{"role": "user", "content": title}])
    assert done.json()["choices"][0]["message"]["content"]
    # also one that is only called so
    talk.headers["X-OpenWebUI-Task"] = "title_generation"
    assert (await talk.post([{"role": "user", "content": "A title for: one"}])).status_code == 200
    assert len(await talk.held()) == 1
    assert not await taken_back(place, talk)
    assert len(await published(place, talk)) == 1


async def test_files_before_a_question_are_for_the_model_and_not_the_question(
    place: Place, webui: httpx.AsyncClient
) -> None:
    passages = "### Task:\nRespond to the user query using the provided context\n<context>\nIt is teal.\n</context>\n\n"
    talk = Talk(webui, f"chat-{next(_names)}")
    await talk.say(f"{passages}What colour is it?")
    assert place.sent[-1]["messages"][-1]["content"] == f"{passages}What colour is it?"
    assert [query for query, _ in await talk.held()] == ["What colour is it?"]
    (kept,) = await published(place, talk)
    assert kept.query == "What colour is it?"
    # whoever judges the answer sees what it was drawn from
    assert kept.material == passages
    # later on the client sends the question alone
    talk.messages[0]["content"] = "What colour is it?"
    await talk.say("Sure?")
    assert not await taken_back(place, talk)


async def test_a_session_that_is_deleted_meanwhile_stays_deleted(place: Place, webui: httpx.AsyncClient) -> None:
    place.rules({"respond": {"text": ["slow ", "answer"], "pace": 0.5}})
    talk = Talk(webui, f"chat-{next(_names)}")
    session = talk.headers[CHAT]
    asking = asyncio.create_task(talk.post([{"role": "user", "content": "one"}]))

    async def there() -> bool:
        return (await webui.get(f"/sessions/{session}", headers=talk.headers)).status_code == 200

    await eventually(there)
    assert (await webui.delete(f"/sessions/{session}", headers=talk.headers)).status_code == 200
    assert (await asking).status_code in (200, 404)
    await place.on.idle()
    assert not await there()
    assert not await place.on.turns(session)


async def test_turns_of_the_second_respondent_go_too(place: Place, webui: httpx.AsyncClient) -> None:
    talk = Talk(webui, f"chat-{next(_names)}")
    await talk.say("one")
    sessions = Sessions(place.on.bus)
    turn = Turn(talk.queries[0], "one", "B says this.", 1)
    await place.on.bus.link.pipe(sessions.appending(talk.session, "B", turn))
    assert len(await place.on.turns(talk.session, "B")) == 1
    talk.messages = []
    await talk.say("ONE")
    assert not await place.on.turns(talk.session, "B")


# ── the same by the Responses API ────────────────────────────────────────────────────────────────────────────────


class Responding(Talk):
    """A chat of a client that sends the whole conversation as the input of each response."""

    async def respond(self, asked: str | Messages, **body: Any) -> dict[str, Any]:
        done = await self._http.post(
            "/v1/responses", json={"model": "local2", "input": asked, **body}, headers=self.headers
        )
        assert done.status_code == 200, done.text
        self.session = done.headers["X-Session-Id"]
        self.queries.append(done.headers["X-Query-Id"])
        made: dict[str, Any] = done.json()
        return made

    async def say(self, text: str, **body: Any) -> str:
        self.messages.append({"role": "user", "content": text})
        made = await self.respond(self.messages, **body)
        self.messages += made["output"]
        return "".join(part["text"] for item in made["output"] for part in item.get("content") or ())


async def test_a_client_that_sends_all_items_has_one_session_and_what_it_takes_back_leaves_it(place: Place) -> None:
    async with await key(place, "emil") as http:
        talk = Responding(http, None, user="emil")
        # an answer of two messages is one turn
        place.rules(calling("probe", thinking="Look.", text="I look."), {"respond": {"text": "There: <<query>>"}})
        assert await talk.say("one") == "I look.\n\nThere: one"
        first = talk.session
        for text in ("two", "three"):
            await talk.say(text)
        assert talk.session == first
        assert [query for query, _ in await talk.held()] == ["one", "two", "three"]
        assert await talk.sessions() == [first]
        assert not await taken_back(place, talk)
        # the second question is edited
        kept = next(n for n, item in enumerate(talk.messages) if item.get("content") == "two")
        talk.messages = talk.messages[:kept]
        await talk.say("TWO")
        assert [query for query, _ in await talk.held()] == ["one", "TWO"]
        assert await taken_back(place, talk) == talk.queries[1:3]
        said = [(m["role"], m["content"]) for m in place.sent[-1]["messages"] if m["role"] in ("user", "assistant")]
        assert said[:3] == [("user", "one"), ("assistant", "I look.\n\nThere: one"), ("user", "TWO")]
        # the same conversation by the other route
        chat = Talk(http, None, user="emil")
        chat.messages = [{"role": role, "content": text} for role, text in said[:3]]
        chat.messages.append({"role": "assistant", "content": (await talk.held())[-1][1]})
        await chat.say("four")
        assert chat.session == first


async def turns_of(place: Place, session_id: str) -> list[tuple[str, str]]:
    return [(turn.query, turn.answer) for turn in await place.on.turns(session_id)]


async def test_a_response_goes_on_in_the_session_of_the_one_before_and_one_aside_takes_nothing(place: Place) -> None:
    async with await key(place, "fred") as http:
        talk = Responding(http, None, user="fred")
        one = await talk.respond("one")
        session = talk.session
        two = await talk.respond("two", previous_response_id=one["id"])
        assert talk.session == session
        assert [query for query, _ in await talk.held()] == ["one", "two"]
        # from the first one again: both ways can be gone
        aside = await talk.respond("TWO", previous_response_id=one["id"])
        assert talk.session != session
        for before in (two, aside):
            assert (await talk.respond("three", previous_response_id=before["id"]))["status"] == "completed"
        assert await talk.sessions() == [session]
        assert [query for query, _ in await turns_of(place, session)] == ["one", "two", "three"]
        assert not await taken_back(place, talk)


async def test_a_response_of_a_trusted_key_is_the_persons_and_the_chats(place: Place, webui: httpx.AsyncClient) -> None:
    by_header = Responding(webui, f"chat-{next(_names)}")
    await by_header.say("one")
    by_header.messages = []
    await by_header.say("ONE")
    assert by_header.session == by_header.headers[CHAT]
    assert [query for query, _ in await by_header.held()] == ["ONE"]
    named = Responding(webui, None)
    said = {"user": named.user, "metadata": {"chat_id": f"chat-{next(_names)}"}}
    await Responding(webui, None).say("another person's")
    del named.headers[USER]
    await named.say("two", **said)
    named.headers[USER] = named.user
    assert named.session == said["metadata"]["chat_id"]
    assert [query for query, _ in await named.held()] == ["two"]


async def test_files_and_chores_in_a_response_are_what_they_are_in_a_chat(
    place: Place, webui: httpx.AsyncClient
) -> None:
    passages = "### Task:\nRespond to the user query using the provided context\n<context>\nIt is teal.\n</context>\n\n"
    talk = Responding(webui, f"chat-{next(_names)}")
    await talk.say(f"{passages}What colour is it?")
    assert place.sent[-1]["messages"][-1]["content"] == f"{passages}What colour is it?"
    (kept,) = await published(place, talk)
    assert kept.query == "What colour is it?"
    for headers, body in (({}, {"metadata": {"task": "tags"}}), ({"X-OpenWebUI-Task": "tags"}, {})):
        chore = Responding(webui, talk.headers[CHAT], talk.user)
        chore.headers |= headers
        await chore.respond("Tags, please", **body)
    assert "tools" not in place.sent[-1]
    assert [query for query, _ in await talk.held()] == ["What colour is it?"]
    assert len(await published(place, talk)) == 1


async def test_a_response_that_is_deleted_takes_its_own_turn_along_and_no_other(place: Place) -> None:
    async with await key(place, "gerd") as http:
        talk = Responding(http, None, user="gerd")
        first = await talk.respond("one")
        await talk.respond("two", previous_response_id=first["id"])
        assert (await http.delete(f"/v1/responses/{first['id']}")).status_code == 200
        assert [query for query, _ in await talk.held()] == ["two"]
        assert await taken_back(place, talk) == talk.queries[:1]
        assert await traces(place, talk.queries[0]) == 0
        assert await traces(place, talk.queries[1]) > 0
        assert (await http.get(f"/v1/responses/{first['id']}")).status_code == 404
