"""What happened in a session's queries is there as long as the session: without their journals, and never after it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio
from support.entries import event_of, whole
from support.openai_place import Place, calling, open_place
from support.stack import Client, stage

from shared.bus import Bus
from shared.bus.keys import journal_key, queries_key, record_key, session_key, steps_key
from shared.contracts import QueryReceived
from shared.records.journal import EntryType, JournalWriter
from shared.records.sessions import Sessions, Turn
from shared.records.steps import Unanswered, keep_ended, keeping, read_steps, read_unanswered, tell_after

pytestmark = pytest.mark.asyncio(loop_scope="module")

_names = itertools.count()
SAID = "9000000000000-0"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    async with open_place(server_url, tmp_path_factory.mktemp("gateway")) as place:
        yield place


class Chat:
    def __init__(self, place: Place) -> None:
        self.place, self.http, self.bus = place, place.site.http, place.on.bus
        self.name = f"told-{next(_names)}"

    async def ask(self, query: str, **fields: Any) -> str:
        """The id of a query, once it has ended."""
        answer = await self.http.post("/query?wait=false", json={"query": query, "session_id": self.name, **fields})
        assert answer.status_code == 202, answer.text
        query_id = str(answer.json()["query_id"])
        await self.place.on.ended(query_id)
        return query_id

    async def told(self, query_id: str, status: int = 200) -> dict[str, Any]:
        answer = await self.http.get(f"/sessions/{self.name}/turns/{query_id}")
        assert answer.status_code == status, answer.text
        return dict(answer.json())

    async def listed(self) -> list[dict[str, Any]]:
        answer = await self.http.get(f"/queries?session_id={self.name}")
        assert answer.status_code == 200, answer.text
        return list(answer.json()["queries"])

    async def expire(self, *query_ids: str) -> None:
        """What a day takes away."""
        await self.place.on.idle()
        keys = [key for one in query_ids for key in (journal_key(one, "A"), record_key(one))]
        await self.bus.link.call("UNLINK", queries_key(self.name), *keys)


@pytest_asyncio.fixture(loop_scope="module")
async def chat(place: Place) -> AsyncIterator[Chat]:
    yield Chat(place)
    await place.on.idle()


def steps(told: dict[str, Any]) -> list[tuple[str, str]]:
    """What a person sees of it, in order."""
    found = []
    for entry in told["journal"]:
        data = entry["data"]
        if entry["event"] not in ("claimed", "state"):
            found.append((entry["event"], str(data.get("text") or data.get("result") or data.get("answer") or "")))
    return found


async def test_a_turn_tells_the_same_when_its_journal_has_expired(chat: Chat) -> None:
    asking = {"thinking": "I should look.", "text": "One moment. "}
    chat.place.rules(calling("probe", **asking), {"respond": {"thinking": "I know.", "text": "It is done."}})
    query_id = await chat.ask("ping")
    live = await chat.told(query_id)
    result = (await chat.http.get(f"/queries/{query_id}")).json()
    # what is kept is what the journal says, from the first moment
    await chat.bus.link.call("HDEL", steps_key(chat.name), query_id)
    from_journal = await chat.told(query_id)
    assert steps(from_journal)[-3:] == [("answer", "It is done."), ("message", ""), ("completed", "It is done.")]
    assert [one for one in steps(from_journal) if one != ("answer", "It is done.")] == steps(live)
    await keep_ended(chat.bus, QueryReceived(session_id=chat.name, query="ping", user_id="u"), query_id)
    await chat.expire(query_id)
    assert (await chat.http.get(f"/queries/{query_id}")).status_code == 404
    told = await chat.told(query_id)
    assert live["open_to_votes"]
    assert told == {**live, "open_to_votes": False}
    vote = await chat.http.post("/feedback", json={"query_id": query_id, "stars": 5})
    assert (vote.status_code, (await chat.http.delete(f"/feedback/{query_id}")).status_code) == (404, 404)
    assert steps(told) == [
        ("thinking", "I should look."), ("answer", "One moment. "), ("message", ""),
        ("tool.result", "you said ping"), ("thinking", "I know."), ("message", ""), ("completed", "It is done."),
    ]  # fmt: skip
    (call,) = [entry["data"] for entry in told["journal"] if entry["event"] == "tool.result"]
    assert (call["tool"], call["args"], call["data"]) == ("probe", {"text": "ping"}, {"text": "ping"})
    end = told["journal"][-1]["data"]
    assert (end["usage"], end["model"], end["finish_reason"]) == (
        result["usage"], result["model"], result["finish_reason"],
    )  # fmt: skip
    assert "event_log" not in told
    ids = [tuple(map(int, entry["id"].split("-"))) for entry in told["journal"]]
    assert ids == sorted(set(ids))


async def test_what_is_thought_of_an_answer_stays_with_its_session(chat: Chat) -> None:
    chat.place.rules({"respond": {"text": "Yes."}})
    query_id = await chat.ask("so?")
    response = f"{query_id}:A"
    vote = {"reward": 1.0, "sentiment": "positive", "thumb": None, "stars": 5, "comment": "good"}
    for kind, data, message in (
        (EntryType.CRITIQUE, {"score": 4, "feedback": "Right.", "rubric": "r"}, SAID),
        (EntryType.PAIRWISE, {"winner": "A"}, SAID),
        (EntryType.REWARD, {**vote, "stars": 2}, "9000000000001-0"),
    ):
        await tell_after(chat.bus, chat.name, response, event_of(kind, data), message_id=message, once=kind.value)
    await chat.expire(query_id)
    # of a second vote too, which comes when the journal has gone
    late = "9000000000002-0"
    await tell_after(chat.bus, chat.name, response, event_of(EntryType.REWARD, vote), message_id=late, once="again")
    told = await chat.told(query_id)
    assert [(entry["event"], entry["id"]) for entry in told["journal"]][-4:] == [
        (told["journal"][-4]["event"], told["journal"][-4]["id"]),
        ("critique", "9000000000000-0"), ("pairwise", "9000000000000-1"), ("reward", "9000000000002-0"),
    ]  # fmt: skip
    assert told["journal"][-4]["event"] == "completed"
    assert told["journal"][-1]["data"] == vote
    # the second respondent's is nobody's to see here
    await tell_after(
        chat.bus, chat.name, f"{query_id}:B", event_of(EntryType.CRITIQUE, {"score": 1}), message_id=SAID, once="b"
    )
    assert await chat.told(query_id) == told


async def test_a_question_without_an_answer_stays_with_its_reason(chat: Chat) -> None:
    chat.place.rules({"respond": {"status": 400, "error": "no such thing"}})
    failed = await chat.ask("fail", mode="chat")
    chat.place.rules({"respond": {"thinking": "Let me see.", "text": "Well."}})
    answered = await chat.ask("then this")
    before = await chat.listed()
    await chat.expire(failed, answered)
    (kept,) = await chat.listed()
    assert kept == {**before[0], "accepted": kept["accepted"]}
    assert abs(kept["accepted"] - before[0]["accepted"]) < 60_000
    assert (kept["query_id"], kept["state"], kept["query"]) == (failed, "failed", "fail")
    assert "no such thing" in kept["error"]["message"]
    told = await chat.told(failed)
    assert told["journal"][-1]["event"] == "failed"
    running = await chat.http.get(f"/queries?session_id={chat.name}&state=running")
    assert running.json() == {"queries": []}
    # the same words again leave it where it is, other words take away what they replace, and nothing else
    again = await chat.ask("fail", instead_of=failed)
    assert [one["query_id"] for one in await chat.listed()] == [failed, again]
    other = await chat.ask("other words", instead_of=answered)
    await chat.expire(again, other)
    assert [one["query_id"] for one in await chat.listed()] == [failed]
    await chat.told(answered, 404)
    await chat.ask("never mind", instead_of=failed)
    assert await read_unanswered(chat.bus, chat.name) == {}
    for gone in (failed, again):
        await chat.told(gone, 404)


async def test_a_question_that_was_stopped_before_its_answer_stays(chat: Chat) -> None:
    chat.place.rules({"respond": {"text": "never " * 500, "pace": 0.05}})
    answer = await chat.http.post("/query?wait=false", json={"query": "wait", "session_id": chat.name})
    query_id = answer.json()["query_id"]
    await chat.place.on.seen(query_id, EntryType.STATE, action="START_GENERATION")
    await chat.http.post(f"/queries/{query_id}/cancel")
    await chat.place.on.ended(query_id)
    await chat.expire(query_id)
    shown = (await chat.http.get(f"/sessions/{chat.name}")).json()["turns"]
    unanswered = [one["query_id"] for one in await chat.listed()]
    # as a turn with the part that had been written, or without one as a question
    assert [turn["query_id"] for turn in shown] + unanswered == [query_id]
    assert (await chat.told(query_id))["journal"][-1]["event"] == "cancelled"


async def test_only_its_user_is_told(chat: Chat) -> None:
    chat.place.rules({"respond": {"text": "Yes."}})
    query_id = await chat.ask("mine")
    for path, status in (
        (f"/sessions/{chat.name}/turns/1-0", 404), (f"/sessions/{chat.name}/turns/none", 400),
        (f"/sessions/not-there/turns/{query_id}", 404),
    ):  # fmt: skip
        assert (await chat.http.get(path)).status_code == status, path
    made = await chat.http.post("/keys", json={"name": "eve", "user_id": f"eve-{chat.name}", "role": "user"})
    eve = {"Authorization": f"Bearer {made.json()['key']}"}
    path = f"/sessions/{chat.name}/turns/{query_id}"
    assert (await chat.http.get(path, headers=eve)).status_code == 404
    # nor in a session of theirs that has the same name
    await chat.http.post("/query", json={"query": "hers", "session_id": chat.name}, headers=eve)
    assert (await chat.http.get(path, headers=eve)).status_code == 404


async def test_an_answer_of_an_earlier_release_shows_what_its_journal_has_and_then_nothing(chat: Chat) -> None:
    chat.place.rules({"respond": {"text": "Yes."}})
    query_id = await chat.ask("old")
    await chat.place.on.idle()
    await chat.bus.link.call("DEL", steps_key(chat.name))
    assert steps(await chat.told(query_id))[-1] == ("completed", "Yes.")
    await chat.expire(query_id)
    assert (await chat.told(query_id))["journal"] == []
    await tell_after(
        chat.bus,
        chat.name,
        f"{query_id}:A",
        event_of(EntryType.CRITIQUE, {"score": 5}),
        message_id=SAID,
        once="critique",
    )
    assert [entry["event"] for entry in (await chat.told(query_id))["journal"]] == ["critique"]


async def test_what_somebody_else_has_written_there_hides_nothing_else(chat: Chat) -> None:
    chat.place.rules({"respond": {"text": "Yes."}})
    query_id = await chat.ask("well")
    await chat.expire(query_id)
    garbage: list[Any] = [query_id, "\x00", f"{query_id} critique", "[1]", "x unanswered", "{}", "5-0 unanswered", "7"]
    await chat.bus.link.call("HSET", steps_key(chat.name), *garbage)
    assert (await chat.told(query_id))["journal"] == []
    assert await chat.listed() == []


async def test_nothing_comes_back_after_its_session(chat: Chat) -> None:
    chat.place.rules({"respond": {"text": "Yes."}})
    query_id = await chat.ask("gone")
    await chat.place.on.idle()
    assert (await chat.http.delete(f"/sessions/{chat.name}")).status_code == 200
    why = Unanswered(query="gone", state="failed")
    for _ in range(2):
        await chat.bus.link.call(*keeping(chat.name, query_id, [("1-0", "failed", {})], why))
        await tell_after(
            chat.bus, chat.name, f"{query_id}:A", event_of(EntryType.CRITIQUE, {}), message_id=SAID, once="critique"
        )
        assert await chat.bus.link.call("EXISTS", steps_key(chat.name)) == 0
        # nor in one that has its name
        await Sessions(chat.bus).open(chat.name, "admin", "t")
    await chat.bus.link.call("DEL", session_key(chat.name))


async def test_of_two_owners_the_first_tells(chat: Chat) -> None:
    await Sessions(chat.bus).open(chat.name, "admin", "t")
    turn = Turn("5-0", "q", "a", 5)
    await chat.bus.link.pipe(Sessions(chat.bus).appending(chat.name, "A", turn))
    for model in ("first", "zombie"):
        await chat.bus.link.call(*keeping(chat.name, "5-0", [("1-0", "completed", {"model": model})]))
    told = await read_steps(chat.bus, chat.name, turn, "5-0")
    assert told is not None
    assert told == [("1-0", "completed", {"answer": "a", "model": "first"})]
    assert await read_unanswered(chat.bus, chat.name) == {}


async def test_an_owner_that_died_behind_its_last_entry_leaves_nothing_untold(redis_url: str) -> None:
    async with Bus(redis_url, "test/dead") as bus:
        client = Client(bus)
        ends = {"pong": EntryType.COMPLETED, "fail": EntryType.FAILED, "stop": EntryType.CANCELLED}
        asked = {name: await client.ask(name, name) for name in ends}
        for name, kind in ends.items():
            journal = journal_key(asked[name], "A")
            writer, _ = await JournalWriter.claim(
                bus, journal, event_of("claimed", whole("claimed", {"model": "m"})), 60
            )
            await writer.append(event_of(EntryType.THINKING, {"text": "Hm."}))
            if kind is EntryType.COMPLETED:
                turn = Turn(asked[name], name, "pong", 1)
                await bus.link.pipe(client.sessions.appending(name, "A", turn))
            said = {"code": "c", "message": "no"} if kind is EntryType.FAILED else {"answer": "", "thinking": ""}
            await writer.append(event_of(kind, said | ({"answer": "pong"} if kind is EntryType.COMPLETED else {})))
        async with stage(redis_url) as on:
            await on.idle()
            for name, kind in ends.items():
                raw = await bus.link.call("HGET", steps_key(name), asked[name])
                assert [event[1] for event in orjson.loads(raw)["events"]] == ["claimed", "thinking", kind.value]
                why = await read_unanswered(bus, name)
                assert [(one.query, one.state) for one in why.values()] == [(name, kind.value)][: kind != "completed"]
                assert [one.error for one in why.values()] == [
                    {"code": "c", "message": "no"} if kind == "failed" else None
                ][: kind != "completed"]
