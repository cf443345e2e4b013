"""The rows that reward writes for each message, and the events that it publishes of votes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from support.entries import event_of

from services.reward.manage import Access
from services.reward.service import Rewarding
from services.reward.settings import RewardSettings
from services.reward.store import Store
from shared.bus import Bus
from shared.bus.keys import journal_key
from shared.contracts import (
    NOT_RUN,
    REWARD_EVENT,
    ChatTurnMessage,
    CritiqueResult,
    JudgeGrade,
    JudgeVerdict,
    MemoryForget,
    PairwiseResult,
    QueryForget,
    ResponseGeneration,
    RewardEvent,
    ToolCallRecord,
    UserFeedback,
)
from shared.envelope import Envelope, Message
from shared.records.journal import EntryType, JournalWriter, read_journal
from shared.records.sessions import Sessions, Turn

CONFIG = '{"model":"m","options":{"temperature":0.5},"prompt_version":"v"}'


class Office:
    """Reward with a database of its own, called as its consumer calls it. Votes wait for no answer."""

    def __init__(self, bus: Bus, path: Path) -> None:
        self.bus = bus
        self.store = Store(path)
        context = SimpleNamespace(bus=bus, settings=RewardSettings(patience=0))
        self.rewarding = Rewarding(cast(Any, context), Access(self.store))

    async def published(self) -> list[Envelope]:
        return [Envelope.parse(REWARD_EVENT.name, *entry) for entry in await self.bus.range(REWARD_EVENT.stream)]

    async def events(self) -> list[RewardEvent]:
        return [REWARD_EVENT.decode(envelope) for envelope in await self.published()]

    def row(self, table: str) -> dict[str, Any]:
        (row,) = self.store.page(table, "", 10)
        return row


@pytest.fixture
def office(bus: Bus, tmp_path: Path) -> Iterator[Office]:
    office = Office(bus, tmp_path / "p.sqlite")
    yield office
    office.store.close()


def message(payload: Any, entry_id: str = "90-1") -> Message[Any]:
    return Message(entry_id, Envelope("any", b"", id="cause", time=777), payload)


def lately(row: dict[str, Any]) -> bool:
    """Whether the row is of the last minute. Removes its time."""
    return abs(time.time() * 1000 - row.pop("time")) < 60_000


def answer(**values: Any) -> ResponseGeneration:
    given: dict[str, Any] = {
        "query_id": "50-0", "response_id": "50-0:A", "session_id": "s", "user_id": "ann", "respondent_id": "A",
        "generator_id": "g", "query": "Is it so?", "answer": "Yes.", "model": "m", "options": {"temperature": 0.5},
        "prompt_version": "v", "finish_reason": "stop", "system": "Be kind.",
    }  # fmt: skip
    return ResponseGeneration(**{**given, **values})


KEPT = {
    "response_id": "50-0:A", "query_id": "50-0", "session_id": "s", "user_id": "ann", "respondent": "A",
    "query": "Is it so?", "answer": "Yes.", "config": CONFIG, "intent": "question", "tools": 0, "time": 50,
    "calls": "", "material": 0,
}  # fmt: skip


async def test_answer_is_stored_with_its_conversation(office: Office) -> None:
    sessions = Sessions(office.bus)
    await sessions.open("s", "ann", "Hi.")
    await office.bus.link.pipe(sessions.appending("s", "A", Turn("40-0", "Hi.", "Hello.", 40)))
    assert await office.rewarding.response(message(answer())) == ()
    row = office.row("responses")
    messages = orjson.loads(row.pop("messages"))
    assert row == KEPT
    assert [(one["role"], one["content"]) for one in messages] == [
        ("system", "Be kind."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Is it so?"),
    ]  # fmt: skip
    # a turn that is taken back removes the conversation from the answers behind it
    await office.rewarding.take_back(message(QueryForget(user_id="ann", session_id="s", queries=["40-0"], at=60)))
    await office.rewarding.response(message(answer(query_id="55-0", response_id="55-0:A")))
    assert [row["messages"] for row in office.store.page("responses", "", 10)] == ["", ""]


async def test_answer_to_given_history_is_stored_with_its_messages(office: Office) -> None:
    history = [
        ChatTurnMessage(role="system", content="Be brief."),
        ChatTurnMessage(role="user", content="Hi."),
        ChatTurnMessage(role="assistant", content=" "),
        ChatTurnMessage(role="tool", content="sun", tool_call_id="x"),
        ChatTurnMessage(role="assistant", content="Hello."),
    ]
    failed = ToolCallRecord(tool="web_search", args={}, result="[away]", error="away", call_id="c")
    call = ToolCallRecord(tool="web_search", args={"query": "so"}, result="x", call_id="d")
    told = answer(history=history, query_id="mine", response_id="mine:A", material="M", tool_calls=[failed, call])
    await office.rewarding.response(message(told))
    row = office.row("responses")
    assert [(one["role"], one["content"]) for one in orjson.loads(row["messages"])] == [
        ("system", "Be kind.\n\nBe brief."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Is it so?"),
    ]  # fmt: skip
    # the id of the query tells no time: that of the message counts
    assert (row["time"], row["material"], row["tools"], row["intent"]) == (777, 1, 2, "lookup")
    assert [one["role"] for one in orjson.loads(row["calls"])] == ["assistant", "tool"] * 2
    # a failed call does not decide the intent
    await office.rewarding.response(message(answer(history=[], tool_calls=[failed])))
    assert office.store.response("50-0:A")["intent"] == "question"  # type: ignore[index]
    # a call that was not run for a second respondent does
    saves = ToolCallRecord(tool="save_memory", args={}, result=f"[{NOT_RUN}]", error=NOT_RUN, call_id="c")
    await office.rewarding.response(message(answer(history=[], tool_calls=[saves])))
    assert office.store.response("50-0:A")["intent"] == "remember"  # type: ignore[index]


async def test_grade_and_comparison_are_stored_as_published(office: Office) -> None:
    grade = CritiqueResult(
        query_id="50-0", response_id="50-0:A", session_id="s", respondent_id="A", score=4, feedback="Clear.",
        rubric="realistic", query="Is it so?", answer="Yes.", judges=[JudgeGrade(model="one", score=4, feedback="f")],
        prompt=[ChatTurnMessage(role="user", content="Grade.")],
    )  # fmt: skip
    assert await office.rewarding.critique(message(grade)) == ()
    row = office.row("critiques")
    assert orjson.loads(row.pop("prompt")) == [{"role": "user", "content": "Grade."}]
    assert orjson.loads(row.pop("judges")) == [{"model": "one", "score": 4, "feedback": "f"}]
    assert lately(row)
    assert row == {
        "response_id": "50-0:A", "query_id": "50-0", "session_id": "s", "score": 4, "feedback": "Clear.",
        "rubric": "realistic",
    }  # fmt: skip
    await office.rewarding.critique(message(grade.model_copy(update={"prompt": None, "judges": []})))
    assert (office.row("critiques")["prompt"], office.row("critiques")["judges"]) == ("", "")
    config = {"model": "m", "options": {"temperature": 0.5}, "prompt_version": "v"}
    verdict = JudgeVerdict(model="one", winner="tie", forward="A", swapped="B", reason="r")
    result = PairwiseResult(
        original_query_id="50-0", query_id_a="50-0:A", query_id_b="50-0:B", winner="tie", score_a=4, score_b=2,
        reason="Near.", config_a=config, config_b={**config, "model": "n"}, session_id="s", forward="A", swapped="B",
        judges=[verdict],
    )  # fmt: skip
    assert await office.rewarding.pairwise(message(result)) == ()
    row = office.row("pairs")
    assert orjson.loads(row.pop("judges")) == [verdict.model_dump()]
    assert lately(row)
    assert row == {
        "query_id": "50-0", "response_a": "50-0:A", "response_b": "50-0:B", "winner": "tie", "forward": "A",
        "swapped": "B", "score_a": 4, "score_b": 2, "reason": "Near.", "config_a": CONFIG,
        "config_b": CONFIG.replace('"m"', '"n"'), "session_id": "s",
    }  # fmt: skip


def vote(**values: Any) -> UserFeedback:
    return UserFeedback(**{"query_id": "50-0", "session_id": "s", "user_id": "ann", **values})


async def test_vote_is_published_with_all_its_parts(office: Office) -> None:
    writer, _ = await JournalWriter.claim(office.bus, journal_key("50-0", "A"), event_of("claimed", {}), 60)
    await writer.append(event_of(EntryType.COMPLETED, {}))
    await office.rewarding.response(message(answer(history=[])))
    thumb = vote(sentiment="negative", comment="No.")
    assert await office.rewarding.feedback(message(thumb, "90-1")) == ()
    await office.rewarding.feedback(message(vote(sentiment="positive", stars=4), "91-0"))
    # an earlier vote that comes late does not count
    await office.rewarding.feedback(message(vote(sentiment="positive"), "89-0"))
    await office.rewarding.feedback(message(vote(withdrawn=True), "92-0"))
    common = {"query_id": "50-0", "response_id": "50-0:A", "respondent_id": "A", "config": orjson.loads(CONFIG),
              "intent": "question"}  # fmt: skip
    assert await office.events() == [
        RewardEvent(reward=-1.0, source="thumbs", vote_id="90-1", **common),
        RewardEvent(reward=0.5, source="stars", vote_id="91-0", **common),
        RewardEvent(reward=0.0, source="thumbs", vote_id="92-0", withdrawn=True, **common),
    ]
    # a delivery that is repeated publishes nothing more
    await office.rewarding.feedback(message(vote(withdrawn=True), "92-0"))
    first, *_ = await office.published()
    headers = {"correlation_id": "50-0", "causation_id": "cause", "session_id": "s", "user_id": "ann",
               "respondent_id": "A"}  # fmt: skip
    assert {name: getattr(first, name) for name in headers} == headers
    shown = [
        {"reward": -1.0, "sentiment": "negative", "thumb": "negative", "stars": None, "comment": "No."},
        {"reward": 0.5, "sentiment": "positive", "thumb": "negative", "stars": 4, "comment": "No."},
        {"reward": None, "sentiment": None, "thumb": None, "stars": None, "comment": None},
    ]
    entries = await read_journal(office.bus, journal_key("50-0", "A"))
    assert [entry.value() for entry in entries if entry.type is EntryType.REWARD] == shown
    row = office.row("votes")
    assert (row["response_id"], row["query_id"], row["session_id"], row["user_id"]) == ("50-0:A", "50-0", "s", "ann")


async def test_vote_on_unknown_answer_has_no_configuration(office: Office) -> None:
    await office.rewarding.feedback(message(vote(sentiment="positive", respondent_id="B")))
    (event,) = await office.events()
    assert (event.response_id, event.respondent_id, event.config, event.intent) == ("50-0:B", "B", {}, "")
    # a vote on a deleted answer is not published
    await office.rewarding.forget(message(MemoryForget(user_id="ann", session_id="s", at=60)))
    await office.rewarding.feedback(message(vote(sentiment="positive")))
    assert len(await office.published()) == 1
