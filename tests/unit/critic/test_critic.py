"""One answer at the critic: when it is judged, what is published and told of it, and what a takeover finds."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from services.critic import critic as module
from services.critic.critic import Critic
from services.critic.grading import absolute_prompt
from services.critic.jury import Comparison, Grade
from services.critic.pairs import Half, Offer
from services.critic.rubrics import Rubric, rubric_for
from services.critic.settings import CriticSettings
from services.critic.turns import LeftOut
from shared.bus.keys import grade_key, verdict_key
from shared.contracts import (
    AGENT_TRANSITION,
    CRITIQUE_RESULT,
    NOT_RUN,
    PAIRWISE_RESULT,
    ChatTurnMessage,
    CritiqueResult,
    JudgeGrade,
    JudgeVerdict,
    Outgoing,
    PairwiseResult,
    ResponseGeneration,
    ToolCallRecord,
)
from shared.records.journal import EntryType
from shared.records.sessions import Turn
from shared.telemetry import metrics

RUBRICS = {name: Rubric(name, f"[Is it {name}?]\nScore 1: no\nScore 5: yes") for name in ("realistic", "style")}
GRADE = Grade(4, "Clear.", "realistic", 1, [JudgeGrade(model="one", score=4, feedback="f").model_dump()])
VERDICT = Comparison("A", "Shorter.", "A", "tie", [JudgeVerdict(model="one", winner="A", reason="r").model_dump()])
INHERITED = {"correlation_id": "c", "causation_id": "cause", "traceparent": "trace"}


class Bench:
    """The critic between a bus, a judge and a line before it that are told what to say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.settings = CriticSettings(**{"retention": 99, "rubrics": {"web_search": "style"}, **settings})
        self.kept: dict[str, bytes] = {}
        self.set: list[tuple[Any, ...]] = []
        self.published: list[Outgoing] = []
        self.told: list[tuple[Any, ...]] = []
        self.counted: list[tuple[Any, ...]] = []
        self.graded: list[tuple[Any, ...]] = []
        self.compared: list[tuple[Any, ...]] = []
        self.lined: list[tuple[Any, ...]] = []
        self.offered: list[tuple[Any, ...]] = []
        self.closed: list[str] = []
        self.erased: list[str] = []
        self.turns: list[Turn] = []
        self.asked_turns: list[tuple[Any, ...]] = []
        self.left: LeftOut | None = None
        # how often the session is still there when that is asked for
        self.there: float = float("inf")
        self.grade: Grade | None = GRADE
        self.verdict: Comparison | None = VERDICT
        self.pair: tuple[Half, Half] | None = None
        bus = SimpleNamespace(publish=self._publish, link=SimpleNamespace(call=self._call))
        context = SimpleNamespace(bus=bus, settings=self.settings, replica="r1")
        monkeypatch.setattr(module, "Sessions", lambda _bus: SimpleNamespace(deleted=self._deleted, turns=self._turns))
        monkeypatch.setattr(module, "Pairs", self._pairs)
        monkeypatch.setattr(module, "tell_after", self._tell)
        monkeypatch.setattr(module, "erase", self._erase)
        meter = {name: self._counts(name) for name in ("grade", "verdict", "left_ungraded")}
        monkeypatch.setattr(metrics, "_meter", SimpleNamespace(**meter))
        judge = SimpleNamespace(grade=self._grade, compare=self._compare)
        line = SimpleNamespace(turn=self._turn)
        self.critic = Critic(cast(Any, context), cast(Any, judge), RUBRICS, cast(Any, line))

    def _pairs(self, _bus: Any, retention: int) -> Any:
        assert retention == 99
        return SimpleNamespace(offer=self._offer, close=self._close)

    async def _offer(self, *what: Any) -> Offer:
        self.offered.append(what)
        return Offer(self.pair, [])

    async def _close(self, query_id: str) -> None:
        self.closed.append(query_id)

    async def _publish(self, message: Outgoing) -> tuple[str]:
        self.published.append(message)
        return (f"{len(self.published)}-7",)

    async def _call(self, command: str, key: str, *values: Any) -> bytes | None:
        if command == "GET":
            return self.kept.get(key)
        self.set.append((command, key, *values))
        self.kept[key] = values[0]
        return None

    async def _deleted(self, session_id: str, query_id: str) -> bool:
        assert (session_id, query_id) == ("s", "50-0")
        self.there -= 1
        return self.there < 0

    async def _erase(self, _bus: Any, query_ids: list[str]) -> None:
        self.erased += query_ids

    async def _turns(self, *what: Any) -> list[Turn]:
        self.asked_turns.append(what)
        return self.turns

    async def _tell(self, _bus: Any, *what: Any, **how: Any) -> None:
        self.told.append((*what, how))

    def _counts(self, name: str) -> Callable[..., None]:
        return lambda *what, **how: self.counted.append((name, *what, *how.items()))

    async def _grade(self, *what: Any) -> Grade | None:
        self.graded.append(what)
        return self.grade

    async def _compare(self, *what: Any) -> Comparison | None:
        self.compared.append(what)
        return self.verdict

    @contextlib.asynccontextmanager
    async def _turn(self, *what: Any) -> AsyncIterator[LeftOut | None]:
        self.lined.append(what)
        yield self.left

    # what the tests ask

    async def gets(self, answer: ResponseGeneration, *, deliveries: int = 1, entry_id: str = "60-1") -> None:
        assert await self.critic.grade(message(answer, deliveries, entry_id)) == ()

    @property
    def states(self) -> list[str]:
        found = [one for one in self.published if one.envelope.subject == AGENT_TRANSITION.name]
        return [orjson.loads(one.envelope.payload)["action"] for one in found]

    def of(self, subject: str) -> list[Outgoing]:
        return [one for one in self.published if one.envelope.subject == subject]


async def suspended() -> None:
    """What stands for a message's `suspended`."""


def message(answer: ResponseGeneration, deliveries: int = 1, entry_id: str = "60-1") -> Any:
    return SimpleNamespace(
        payload=answer, entry_id=entry_id, deliveries=deliveries, suspended=suspended, headers=lambda: dict(INHERITED)
    )


def answer(**values: Any) -> ResponseGeneration:
    given: dict[str, Any] = {
        "query_id": "50-0", "response_id": "50-0:B", "session_id": "s", "user_id": "ann", "respondent_id": "B",
        "generator_id": "g", "query": "Why?", "answer": "Because.", "model": "m", "options": {"temperature": 0.5},
        "finish_reason": "stop", "history": [],
    }  # fmt: skip
    return ResponseGeneration(**{**given, **values})


CONFIG = {"model": "m", "options": {"temperature": 0.5}, "prompt_version": ""}
HEADERS = {"correlation_id": "50-0", "causation_id": "cause", "session_id": "s", "user_id": "ann",
           "respondent_id": "B", "traceparent": "trace"}  # fmt: skip


def headers(outgoing: Outgoing) -> dict[str, Any]:
    return {name: getattr(outgoing.envelope, name) for name in HEADERS}


# ── grading ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_grade_is_kept_published_and_told_with_what_the_judge_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    await bench.gets(answer())
    assert bench.graded == [("Why?", "Because.", "", RUBRICS["realistic"])]
    assert bench.set == [("SET", grade_key("50-0:B"), orjson.dumps(asdict(GRADE)), "EX", 99)]
    assert bench.counted == [("grade", 4)]
    (critique,) = bench.of(CRITIQUE_RESULT.name)
    prompt = [
        ChatTurnMessage.model_validate(one) for one in absolute_prompt("Why?", "Because.", RUBRICS["realistic"].text)
    ]
    assert CritiqueResult.model_validate_json(critique.envelope.payload) == CritiqueResult(
        query_id="50-0", response_id="50-0:B", session_id="s", respondent_id="B", score=4, feedback="Clear.",
        rubric="realistic", query="Why?", answer="Because.", prompt=prompt,
        judges=[JudgeGrade(model="one", score=4, feedback="f")],
    )  # fmt: skip
    assert (critique.once, headers(critique)) == ("50-0:B", HEADERS)
    place = bench.published.index(critique) + 1
    shown = {"score": 4, "feedback": "Clear.", "rubric": "realistic", "judges": GRADE.judges}
    how = {"message_id": f"{place}-7", "once": "critique"}
    assert bench.told == [("s", "50-0:B", EntryType.CRITIQUE, shown, how)]
    half = Half("50-0:B", "Because.", "", 4, CONFIG, "Why?", "realistic")
    assert bench.offered == [("50-0", "B", half, bench.settings.pairwise_buffer)]
    assert (bench.closed, bench.compared) == ([], [])
    assert bench.states == ["RECEIVE", "GRADE", "PUBLISH", "RESET"]
    first = bench.published[0]
    assert orjson.loads(first.envelope.payload) == {
        "agent": "critic", "replica": "r1", "query_id": "50-0", "from": "IDLE", "action": "RECEIVE", "to": "RECEIVING"
    }  # fmt: skip
    told = ("correlation_id", "session_id", "respondent_id")
    assert {name: getattr(first.envelope, name) for name in told} == {name: HEADERS[name] for name in told}
    # whoever takes it over finds the grade
    await bench.gets(answer(), deliveries=2)
    assert (len(bench.graded), len(bench.set), len(bench.of(CRITIQUE_RESULT.name))) == (1, 1, 2)
    # what was stored and cannot be read is asked for again
    for damaged in (b"{", b'{"other": 1}', b"[]"):
        bench.kept[grade_key("50-0:B")] = damaged
        await bench.gets(answer())
    assert len(bench.graded) == 4


async def test_who_judged_alone_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.grade = Grade(None, "not graded: away", "realistic", 3)
    await bench.gets(answer())
    (told,) = bench.told
    assert told[3] == {"score": None, "feedback": "not graded: away", "rubric": "realistic"}
    assert bench.counted == [("grade", None)]


async def test_the_judge_reads_the_conversation_and_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, skip_tool_answers=False)
    bench.turns = [Turn("40-0", "Hi.", "Hello.", 40)]
    calls = [
        ToolCallRecord(tool="web_search", args={}, result="found", call_id="c"),
        ToolCallRecord(tool="other", args={}, result="no", error="no", call_id="d"),
    ]
    await bench.gets(answer(history=None, tool_calls=calls))
    ((asked, *_, rubric),) = bench.graded
    conversation = "The conversation so far:\nUser: Hi.\nAssistant: Hello.\n\nThe user's message to answer now:\nWhy?"
    found = "What the assistant was given or had found when it answered (context, not an answer):\nweb_search: found"
    assert (asked, rubric) == (f"{conversation}\n\n{found}", RUBRICS["style"])
    assert bench.asked_turns == [("s", "B", "50-0")]
    # the half of a pair has each by itself
    ((_, _, half, _),) = bench.offered
    assert (half.instruction, half.reference, half.rubric) == (conversation, "web_search: found", "style")
    # a tool that failed says nothing of how the answer is to be judged
    bench = Bench(monkeypatch, skip_tool_answers=False)
    history = [ChatTurnMessage(role="user", content="Hi."), ChatTurnMessage(role="assistant", content="Hello.")]
    failed = [ToolCallRecord(tool="web_search", args={}, result="no", error="no", call_id="c")]
    await bench.gets(answer(history=history, tool_calls=failed))
    assert bench.graded == [(conversation, "Because.", "", RUBRICS["realistic"])]
    assert bench.asked_turns == []
    # one that is not run for the second respondent is told of like the first one's
    bench = Bench(monkeypatch, skip_tool_answers=False, rubrics={"save_memory": "style"})
    saves = [ToolCallRecord(tool="save_memory", args={}, result=f"[{NOT_RUN}]", error=NOT_RUN, call_id="c")]
    await bench.gets(answer(history=history, tool_calls=saves))
    assert bench.graded == [(conversation, "Because.", "", RUBRICS["style"])]


async def test_material_is_shown_to_the_judge_and_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    await bench.gets(answer(material="It is teal."))
    assert "Given with the question: It is teal." in bench.graded[0][0]
    assert orjson.loads(bench.of(CRITIQUE_RESULT.name)[0].envelope.payload)["prompt"] is None


@pytest.mark.parametrize(("more", "closed"), [({"answer": " "}, ["50-0"]), ({"tool_calls": [
    ToolCallRecord(tool="web_search", args={}, result="found", call_id="c")]}, ["50-0"])])  # fmt: skip
async def test_what_is_not_to_be_judged_is_skipped_and_so_is_its_pair(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], closed: list[str]
) -> None:
    bench = Bench(monkeypatch)
    await bench.gets(answer(**more))
    assert (bench.states, bench.closed, bench.lined) == (["RECEIVE", "SKIP"], closed, [])
    assert bench.graded == bench.of(CRITIQUE_RESULT.name) == []


async def test_one_query_in_so_many_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "one_in", lambda n, query_id: (n, query_id) != (7, "50-0"))
    bench = Bench(monkeypatch, judge_one_in=7)
    await bench.gets(answer())
    # both halves are left out alike: there is no pair that waits
    assert (bench.states, bench.closed, bench.lined) == (["RECEIVE", "SKIP"], [], [])
    bench = Bench(monkeypatch, judge_one_in=6)
    await bench.gets(answer())
    assert len(bench.graded) == 1


@pytest.mark.parametrize("left", ["backlog", "age"])
async def test_what_the_judge_cannot_keep_up_with_is_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch, left: LeftOut
) -> None:
    bench = Bench(monkeypatch)
    bench.left = left
    await bench.gets(answer())
    await bench.gets(answer())
    assert (bench.states, bench.closed) == (["RECEIVE", "SKIP"] * 2, ["50-0"] * 2)
    assert bench.critic.left_out == {"backlog": 0, "age": 0, left: 2}
    assert (bench.counted, bench.graded) == ([("left_ungraded", left)] * 2, [])


async def test_an_answer_waits_in_the_order_of_its_question_and_beside_others_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, skip_tool_answers=False)
    history = [ChatTurnMessage(role="user", content="12345")]
    calls = [ToolCallRecord(tool="f", args={}, result="1234567", call_id="c")]
    await bench.gets(answer(system="123", material="12", history=history, tool_calls=calls), deliveries=2)
    await bench.gets(answer(history=None), deliveries=3)
    await bench.gets(answer(), entry_id="60-1")
    sizes = [len("Why?Because.") + 3 + 2 + 5 + 7, len("Why?Because."), len("Why?Because.")]
    assert bench.lined == [
        ((50, 0), (60, 1), sizes[0], suspended), ((50, 0), (60, 1), sizes[1], None),
        ((50, 0), (60, 1), sizes[2], suspended),
    ]  # fmt: skip
    # another program's id tells no time
    bench = Bench(monkeypatch)
    monkeypatch.setattr(bench, "_deleted", None)
    bench.left = "age"
    await bench.gets(answer(query_id="mine", response_id="mine:B"))
    assert bench.lined == [((60, 1), (60, 1), len("Why?Because."), suspended)]


@pytest.mark.parametrize(("there", "states", "closed"), [
    (0, ["RECEIVE", "SKIP"], []), (1, ["RECEIVE", "GRADE", "RESET"], ["50-0"]),
])  # fmt: skip
async def test_nothing_comes_of_an_answer_whose_session_was_deleted(
    monkeypatch: pytest.MonkeyPatch, there: int, states: list[str], closed: list[str]
) -> None:
    bench = Bench(monkeypatch)
    bench.there = there
    await bench.gets(answer())
    assert (bench.states, bench.closed, len(bench.graded)) == (states, closed, there)
    assert bench.set == bench.told == bench.offered == bench.of(CRITIQUE_RESULT.name) == []
    assert set(bench.erased) == {"50-0"}


async def test_what_came_of_an_answer_that_was_deleted_meanwhile_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    await bench.gets(answer())
    assert len(bench.offered) == 1
    assert bench.erased == []
    bench = Bench(monkeypatch)
    bench.there = 2
    await bench.gets(answer())
    assert len(bench.offered) == 1
    assert bench.erased == ["50-0"]


async def test_a_judge_that_is_missing_grades_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.grade = None
    await bench.gets(answer())
    assert (bench.states, bench.closed, bench.set) == (["RECEIVE", "GRADE", "RESET"], ["50-0"], [])
    assert bench.offered == bench.of(CRITIQUE_RESULT.name) == []


async def test_an_answer_that_is_given_up_is_published_as_not_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    assert await bench.critic.abandon(message(answer()), "it failed") == ()
    (critique,) = bench.of(CRITIQUE_RESULT.name)
    told = CritiqueResult.model_validate_json(critique.envelope.payload)
    assert (told.score, told.feedback, told.rubric, told.prompt) == (None, "not graded: it failed", "realistic", None)
    assert (bench.closed, len(bench.told)) == (["50-0"], 1)
    bench = Bench(monkeypatch)
    bench.there = 0
    assert await bench.critic.abandon(message(answer()), "it failed") == ()
    assert bench.published == bench.closed == []


async def test_what_breaks_off_is_shown_and_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for bus_is_away in (False, True):
        bench = Bench(monkeypatch)

        async def breaks(*_what: Any, bench: Bench = bench, away: bool = bus_is_away) -> Grade:
            if away:
                monkeypatch.setattr(bench.critic._bus, "publish", breaks)
            raise ConnectionError("cut")

        monkeypatch.setattr(bench.critic._judge, "grade", breaks)
        with pytest.raises(ConnectionError, match="cut"):
            await bench.gets(answer())
        assert bench.states == ["RECEIVE", "GRADE", *([] if bus_is_away else ["FAIL", "RESET"])]


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────

A = Half("50-0:A", "Because of A.", "found by A", 5, {"model": "a"}, "Asked of A?", "style")
B = Half("50-0:B", "Because.", "found by B", 4, CONFIG, "Asked of B?", "realistic")


async def test_a_verdict_is_kept_published_and_told_to_both_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.pair = (A, B)
    await bench.gets(answer())
    # A's user saw A's conversation
    ((asked, *rest),) = bench.compared
    assert asked.startswith("Asked of A?\n\nWhat the assistant was given")
    assert asked.endswith("\nfound by A\n\nfound by B")
    assert rest == ["Because of A.", "Because.", "", RUBRICS["style"]]
    assert bench.set[1:] == [("SET", verdict_key("50-0"), orjson.dumps(asdict(VERDICT)), "EX", 99)]
    assert bench.counted[1:] == [("verdict", "A", ("split", True))]
    (result,) = bench.of(PAIRWISE_RESULT.name)
    assert PairwiseResult.model_validate_json(result.envelope.payload) == PairwiseResult(
        original_query_id="50-0", query_id_a="50-0:A", query_id_b="50-0:B", winner="A", score_a=5, score_b=4,
        reason="Shorter.", config_a={"model": "a"}, config_b=CONFIG, session_id="s", forward="A", swapped="tie",
        judges=[JudgeVerdict(model="one", winner="A", reason="r")],
    )  # fmt: skip
    assert (result.once, headers(result)) == ("50-0", {**HEADERS, "respondent_id": "A"})
    place = bench.published.index(result) + 1
    shown = {"winner": "A", "reason": "Shorter.", "score_a": 5, "score_b": 4, "judges": VERDICT.judges}
    how = {"message_id": f"{place}-7", "once": "pairwise"}
    assert bench.told[1:] == [("s", name, EntryType.PAIRWISE, shown, how) for name in ("50-0:A", "50-0:B")]
    assert bench.closed == ["50-0"]
    assert bench.states == ["RECEIVE", "GRADE", "PUBLISH", "COMPARE", "PUBLISH", "RESET"]
    # whoever takes it over finds the verdict
    await bench.gets(answer(), deliveries=2)
    assert (len(bench.compared), len(bench.of(PAIRWISE_RESULT.name))) == (1, 2)


async def test_who_compared_alone_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.pair, bench.verdict = (A, B), Comparison("tie", "Near.", "tie", "tie")
    await bench.gets(answer())
    assert bench.told[1][3] == {"winner": "tie", "reason": "Near.", "score_a": 5, "score_b": 4}
    assert bench.counted[1:] == [("verdict", "tie", ("split", False))]


async def test_a_pair_without_a_verdict_is_done_with(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.pair, bench.verdict = (A, B), None
    await bench.gets(answer())
    assert bench.states == ["RECEIVE", "GRADE", "PUBLISH", "COMPARE", "RESET"]
    assert (bench.closed, bench.counted[1:]) == (["50-0"], [("verdict", None, ("split", False))])
    assert bench.of(PAIRWISE_RESULT.name) == bench.set[1:] == bench.told[1:] == []


async def test_nothing_comes_of_a_pair_whose_session_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.pair, bench.there = (A, B), 2
    await bench.gets(answer())
    assert (len(bench.compared), bench.closed) == (1, ["50-0"])
    assert bench.of(PAIRWISE_RESULT.name) == bench.set[1:] == bench.counted[1:] == []


@pytest.mark.parametrize(("half", "asked", "rubric"), [
    (Half("50-0:A", "a", "", None, {}, "Asked?", "style"), "Asked?", "style"),
    (Half("50-0:A", "a", "", None, {}, "Asked?", "gone"), "Asked?", "realistic"),
])  # fmt: skip
async def test_an_answer_is_compared_by_its_rubric_or_by_the_turns_where_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, half: Half, asked: str, rubric: str
) -> None:
    bench = Bench(monkeypatch)
    bench.pair = (half, B)
    await bench.gets(answer())
    ((told, *rest),) = bench.compared
    assert told.startswith(f"{asked}\n\n")
    assert rest == ["a", "Because.", "", RUBRICS[rubric]]


@pytest.mark.parametrize("name", ["search_memory", "recall_memory", "search_memories"])
def test_rubric_of_an_older_tool_name_fits_the_tool(name: str) -> None:
    assert rubric_for(["search_memory"], {name: "style"}, RUBRICS) == RUBRICS["style"]
