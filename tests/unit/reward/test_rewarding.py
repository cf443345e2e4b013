"""What reward keeps of each message, what it publishes of a vote, and for how long a vote waits for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from services.reward import service as module
from services.reward.manage import Access
from services.reward.service import Rewarding, _judges, _tend
from services.reward.settings import RewardSettings
from services.reward.store import Store
from shared.contracts import (
    NOT_RUN,
    ChatTurnMessage,
    CritiqueResult,
    JudgeGrade,
    JudgeVerdict,
    MemoryForget,
    Outgoing,
    PairwiseResult,
    QueryForget,
    ResponseGeneration,
    RewardEvent,
    ToolCallRecord,
    UserFeedback,
)
from shared.errors import TransientError
from shared.records.journal import Crossing, EntryType
from shared.records.sessions import Turn
from shared.telemetry import metrics

NOW = 1_700_000_000_000
CONFIG = '{"model":"m","options":{"temperature":0.5},"prompt_version":"v"}'
INHERITED = {"correlation_id": "c", "causation_id": "cause", "traceparent": "trace"}


class Office:
    """Reward with a database of its own, on a bus that only listens."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store(path)
        self.published: list[Outgoing] = []
        self.told: list[tuple[Any, ...]] = []
        self.counted: list[str] = []
        self.turns: list[Turn] = []
        self.asked: list[tuple[Any, ...]] = []

        self.facts: dict[str, Any] = {}
        bus = SimpleNamespace(publish=self._publish)
        self.context = cast(Any, SimpleNamespace(bus=bus, settings=RewardSettings(patience=0), facts=self.facts))
        sessions = SimpleNamespace(turns=self._turns)
        monkeypatch.setattr(module, "Sessions", lambda _bus: sessions)
        monkeypatch.setattr(module, "tell_after", self._tell)
        monkeypatch.setattr(module, "now_ms", lambda: NOW)
        monkeypatch.setattr(metrics, "_meter", SimpleNamespace(vote=self.counted.append))
        self.access = Access(self.store)
        self.rewarding = Rewarding(self.context, self.access)

    async def _publish(self, message: Outgoing) -> tuple[str]:
        self.published.append(message)
        return (f"{len(self.published)}-7",)

    async def _turns(self, *what: Any) -> list[Turn]:
        self.asked.append(what)
        return self.turns

    async def _tell(self, bus: Any, *what: Any, **how: Any) -> None:
        assert bus is self.context.bus
        self.told.append((*what, how))

    def row(self, table: str) -> dict[str, Any]:
        (row,) = self.store.page(table, "", 10)
        return row


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    office = Office(tmp_path / "p.sqlite", monkeypatch)
    yield office
    office.store.close()


def message(payload: Any, entry_id: str = "90-1") -> Any:
    return SimpleNamespace(
        payload=payload,
        entry_id=entry_id,
        envelope=SimpleNamespace(time=777),
        headers=lambda: dict(INHERITED),
        suspended=nullcontext,
    )


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


async def test_an_answer_is_kept_with_the_conversation_that_led_to_it(office: Office) -> None:
    office.turns = [Turn("40-0", "Hi.", "Hello.", 40)]
    assert await office.rewarding.response(message(answer())) == ()
    row = office.row("responses")
    messages = orjson.loads(row.pop("messages"))
    assert row == KEPT
    assert [(one["role"], one["content"]) for one in messages] == [
        ("system", "Be kind."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Is it so?"),
    ]  # fmt: skip
    assert office.asked == [("s", "A", "50-0")]
    # a turn that was taken back meanwhile takes the conversation with it
    await office.rewarding.take_back(message(QueryForget(user_id="ann", session_id="s", queries=["40-0"], at=60)))
    await office.rewarding.response(message(answer(query_id="55-0", response_id="55-0:A")))
    assert [row["messages"] for row in office.store.page("responses", "", 10)] == ["", ""]


async def test_of_a_history_that_the_client_gave_what_was_said_is_kept(office: Office) -> None:
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
    # an id that tells no time: when its message came
    assert (row["time"], row["material"], row["tools"], row["intent"], office.asked) == (777, 1, 2, "lookup", [])
    assert [one["role"] for one in orjson.loads(row["calls"])] == ["assistant", "tool"] * 2
    # what a tool that failed would have found says nothing of the question
    await office.rewarding.response(message(answer(history=[], tool_calls=[failed])))
    assert office.store.response("50-0:A")["intent"] == "question"  # type: ignore[index]
    # that of a second respondent's is as of the first one's
    saves = ToolCallRecord(tool="save_memory", args={}, result=f"[{NOT_RUN}]", error=NOT_RUN, call_id="c")
    await office.rewarding.response(message(answer(history=[], tool_calls=[saves])))
    assert office.store.response("50-0:A")["intent"] == "remember"  # type: ignore[index]


async def test_a_grade_and_a_comparison_are_kept_as_they_were_told(office: Office) -> None:
    grade = CritiqueResult(
        query_id="50-0", response_id="50-0:A", session_id="s", respondent_id="A", score=4, feedback="Clear.",
        rubric="realistic", query="Is it so?", answer="Yes.", judges=[JudgeGrade(model="one", score=4, feedback="f")],
        prompt=[ChatTurnMessage(role="user", content="Grade.")],
    )  # fmt: skip
    assert await office.rewarding.critique(message(grade)) == ()
    row = office.row("critiques")
    assert orjson.loads(row.pop("prompt")) == [{"role": "user", "content": "Grade."}]
    assert orjson.loads(row.pop("judges")) == [{"model": "one", "score": 4, "feedback": "f"}]
    assert row == {
        "response_id": "50-0:A", "query_id": "50-0", "session_id": "s", "score": 4, "feedback": "Clear.",
        "rubric": "realistic", "time": NOW,
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
    assert row == {
        "query_id": "50-0", "response_a": "50-0:A", "response_b": "50-0:B", "winner": "tie", "forward": "A",
        "swapped": "B", "score_a": 4, "score_b": 2, "reason": "Near.", "config_a": CONFIG,
        "config_b": CONFIG.replace('"m"', '"n"'), "session_id": "s", "time": NOW,
    }  # fmt: skip


def vote(**values: Any) -> UserFeedback:
    return UserFeedback(**{"query_id": "50-0", "session_id": "s", "user_id": "ann", **values})


async def test_a_vote_is_published_and_told_with_all_that_it_says_by_now(office: Office) -> None:
    await office.rewarding.response(message(answer(history=[])))
    thumb = vote(sentiment="negative", comment="No.")
    assert await office.rewarding.feedback(message(thumb, "90-1")) == ()
    await office.rewarding.feedback(message(vote(sentiment="positive", stars=4), "91-0"))
    # an earlier one that comes late counts for nothing
    await office.rewarding.feedback(message(vote(sentiment="positive"), "89-0"))
    await office.rewarding.feedback(message(vote(withdrawn=True), "92-0"))
    events = [RewardEvent.model_validate_json(each.envelope.payload) for each in office.published]
    common = {"query_id": "50-0", "response_id": "50-0:A", "respondent_id": "A", "config": orjson.loads(CONFIG),
              "intent": "question"}  # fmt: skip
    assert events == [
        RewardEvent(reward=-1.0, source="thumbs", vote_id="90-1", **common),
        RewardEvent(reward=0.5, source="stars", vote_id="91-0", **common),
        RewardEvent(reward=0.0, source="thumbs", vote_id="92-0", withdrawn=True, **common),
    ]
    first = office.published[0]
    assert first.once == "50-0:A:90-1"
    headers = {"correlation_id": "50-0", "causation_id": "cause", "session_id": "s", "user_id": "ann",
               "respondent_id": "A", "traceparent": "trace"}  # fmt: skip
    assert {name: getattr(first.envelope, name) for name in headers} == headers
    shown = [
        {"reward": -1.0, "sentiment": "negative", "thumb": "negative", "stars": None, "comment": "No."},
        {"reward": 0.5, "sentiment": "positive", "thumb": "negative", "stars": 4, "comment": "No."},
        {"reward": None, "sentiment": None, "thumb": None, "stars": None, "comment": None},
    ]
    assert office.told == [
        ("s", "50-0:A", EntryType.REWARD, each, {"message": Crossing("reward.event", f"{n}-7"), "once": f"reward:{at}"})
        for n, (each, at) in enumerate(zip(shown, ("90-1", "91-0", "92-0"), strict=True), 1)
    ]
    assert office.counted == ["negative", "positive", "withdrawn"]
    row = office.row("votes")
    assert (row["response_id"], row["query_id"], row["session_id"], row["user_id"]) == ("50-0:A", "50-0", "s", "ann")


async def test_a_vote_on_an_answer_that_is_not_known_counts_without_its_configuration(office: Office) -> None:
    await office.rewarding.feedback(message(vote(sentiment="positive", respondent_id="B")))
    (event,) = (RewardEvent.model_validate_json(each.envelope.payload) for each in office.published)
    assert (event.response_id, event.respondent_id, event.config, event.intent) == ("50-0:B", "B", {}, "")
    # of what was deleted nothing is published
    await office.rewarding.forget(message(MemoryForget(user_id="ann", session_id="s", at=60)))
    await office.rewarding.feedback(message(vote(sentiment="positive")))
    assert len(office.published) == 1


async def test_a_vote_waits_for_its_answer_as_long_as_there_is_patience(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            await office.rewarding.response(message(answer(history=[])))

    office.context.settings = RewardSettings(patience=600)
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    await office.rewarding.feedback(message(vote(sentiment="positive")))
    assert waited == [0.1] * 3
    assert orjson.loads(office.published[0].envelope.payload)["config"] == orjson.loads(CONFIG)
    # one that is deleted is not waited for
    await office.rewarding.forget(message(MemoryForget(user_id="ann", session_id="s", at=60)))
    await office.rewarding.feedback(message(vote(sentiment="positive"), "95-0"))
    assert len(waited) == 3


async def test_votes_on_one_answer_are_published_one_after_the_other(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = asyncio.Event(), asyncio.Event()
    publish = office.context.bus.publish

    async def slowly(outgoing: Outgoing) -> tuple[str]:
        begun.set()
        await gate.wait()
        found: tuple[str] = await publish(outgoing)
        return found

    monkeypatch.setattr(office.context.bus, "publish", slowly)
    first = asyncio.create_task(office.rewarding.feedback(message(vote(sentiment="positive"), "90-0")))
    await begun.wait()
    later = asyncio.create_task(office.rewarding.feedback(message(vote(sentiment="negative"), "91-0")))
    other = asyncio.create_task(office.rewarding.feedback(message(vote(sentiment="negative", query_id="51-0"), "92-0")))
    # the other answer's vote does not wait, and stands at the gate with the first
    while office.store.counts()["votes"] < 2:
        await asyncio.sleep(0.001)
    gate.set()
    await asyncio.gather(first, later, other)
    mine = [each for each in office.published if orjson.loads(each.envelope.payload)["query_id"] == "50-0"]
    assert [orjson.loads(each.envelope.payload)["reward"] for each in mine] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("replicas", "judges"),
    [
        ([], []),
        ([("generator", {"model": "g"})], []),
        ([("critic", {})], []),
        ([("critic", {}), ("critic", {"model": "j"})], ["j"]),
        ([("critic", {"model": "j", "judges": []})], ["j"]),
        ([("critic", {"model": "j", "judges": [{"model": "one"}, {"model": "two"}]})], ["one", "two"]),
    ],
)
async def test_who_judges_is_what_a_critic_says_of_itself(
    replicas: Sequence[tuple[str, dict[str, Any]]], judges: list[str]
) -> None:
    async def found() -> list[Any]:
        return [SimpleNamespace(participant=name, facts=facts) for name, facts in replicas]

    context = SimpleNamespace(registry=SimpleNamespace(replicas=found))
    assert await _judges(cast(Any, context)) == judges


async def test_what_is_kept_is_said_again_and_again_also_when_the_database_was_in_the_way(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    tried = 0

    async def catch_up() -> None:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise TransientError("locked")

    async def sleep(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    await office.rewarding.response(message(answer(history=[])))
    with pytest.raises(asyncio.CancelledError):
        await _tend(office.context, office.access, cast(Any, SimpleNamespace(catch_up=catch_up)))
    assert (office.facts["responses"], office.facts["grades"]["none"], tried, paused) == (1, 0, 2, [5, 5])
