"""One response: what its model is asked, what is published of it, and what is written at each of its ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from support.entries import data_of
from support.response_runs import deps_of, run_of

from services.generator import ending, generation
from services.generator.attachments import Wanted
from services.generator.committee import PERSONA_ARGUMENTS, PERSONA_TOOLS, Seat, Session
from services.generator.compaction import Past
from services.generator.earlier import Earlier, Loader
from services.generator.ending import Cancelled, Failure, end
from services.generator.generation import generate
from services.generator.grades import LowGrade
from services.generator.loop import Answer, ClientCall
from services.generator.opening import check_owner
from services.generator.response_constraints import ResponseConstraints
from services.generator.settings import GeneratorSettings
from services.generator.steps import JournalSteps
from shared.contracts import (
    MOST_MATERIAL,
    AnswerDialog,
    ChatTurnMessage,
    ClientTools,
    Deliberation,
    Outgoing,
    QueryReceived,
    ResponseGeneration,
    SessionSummarise,
    ToolCallRecord,
    Usage,
    prompt_version,
)
from shared.errors import PermanentError
from shared.llm.port import ModelFacts, ToolCall
from shared.participant.tool_client import Caller
from shared.records.events import (
    AnswerPiece,
    Entry,
    EntryType,
    KnownEvent,
    ModelMessage,
    ThinkingPiece,
    encode,
    shown,
)
from shared.records.journal import JournalEntry
from shared.records.response_state import EMPTY, apply, replay
from shared.records.sessions import Turn
from shared.records.summaries import Summary

NOW = 1_700_000_000_000
QUERY_ID = "50-0"
# of that moment
TODAY = "Today's date: 1970-01-01 (Thursday, Etc/UTC)"
LOW = LowGrade("40-0", 2, "[It was weak.]")


class Writer:
    """A journal: entries with what is written beside each, and what is published with turns."""

    key = "journal"
    next_position = "50-9"

    def __init__(self) -> None:
        self.entries: list[tuple[EntryType, dict[str, Any]]] = []
        self.also: list[list[Any]] = []
        self.told: list[list[Outgoing]] = []
        self.published: list[tuple[list[Outgoing], list[Any]]] = []
        self.large: dict[str, str] = {}
        self.state = EMPTY

    async def append(self, event: KnownEvent, also: Sequence[Any] = (), *, messages: Sequence[Outgoing] = ()) -> None:
        self.entries.append(data_of(event))
        self.state = apply(self.state, Entry(f"50-{len(self.entries)}", 0, event))
        self.also.append(list(also))
        self.told.append(list(messages))

    async def publish(self, messages: Sequence[Outgoing], turn: Sequence[Any]) -> None:
        self.published.append((list(messages), list(turn)))

    def of(self, kind: EntryType) -> list[dict[str, Any]]:
        return [data for each, data in self.entries if each is kind]


class Bench:
    """A response over a bus, a journal and a model that are not there."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        settings: dict[str, Any] | None = None,
        deliveries: int = 1,
        caller: dict[str, Any] | None = None,
        before: Sequence[KnownEvent] = (),
        transitions_left: int = 0,
        **query: Any,
    ) -> None:
        self.settings = GeneratorSettings(**{"system_prompt": "Be kind.", "model": "m", **(settings or {})})
        respondent = self.settings.respondent_id
        self.query = QueryReceived(**{"session_id": "s", "query": "What is new?", "user_id": "ann", **query})
        self.owner: str | None = "ann"
        self.opened: list[tuple[Any, ...]] = []
        self.asked_turns: list[tuple[Any, ...]] = []
        self.turns: list[Turn] = []
        self.piped: list[Any] = []
        self.tools = {"search_memory": {}}
        self.writer = Writer()
        self.writer.state = replay(Entry(f"49-{number}", 0, event) for number, event in enumerate(before))
        bus = SimpleNamespace(
            publishing=lambda message: ("PUBLISH", message), link=SimpleNamespace(pipe=self._pipe), clock=None
        )
        context = SimpleNamespace(settings=self.settings, bus=bus, replica="r1", facts={})
        sessions = SimpleNamespace(open=self._open, turns=self._turns, appending=self._appending)
        self.deps = deps_of(
            context, model=SimpleNamespace(facts=self._facts), tools=SimpleNamespace(schemas=self._schemas),
            sessions=sessions, files="files",
        )  # fmt: skip
        message = SimpleNamespace(
            entry_id=QUERY_ID, payload=self.query, deliveries=deliveries, envelope=SimpleNamespace(id="cause")
        )
        self.run = run_of(
            self.deps,
            self.writer,
            Caller(**{
                "query_id": QUERY_ID, "session_id": "s", "user_id": "ann", "respondent_id": respondent,
                "deadline": 9_000, "traceparent": "trace", "time_zone": "Etc/UTC", **(caller or {}),
            }),
            message=message,
            transitions_left=transitions_left,
        )  # fmt: skip
        self.ran: list[tuple[JournalSteps, Any, int, ResponseConstraints]] = []
        self.sat: list[tuple[Any, ...]] = []
        monkeypatch.setattr(generation, "run_agent", self._run_agent)
        monkeypatch.setattr(generation, "deliberate", self._deliberate)
        monkeypatch.setattr(generation, "attached", self._attached)
        monkeypatch.setattr(generation, "with_own_steps", self._read)
        monkeypatch.setattr(generation, "history_with_files", self._with_files)
        monkeypatch.setattr(generation, "given_history", self._given)
        monkeypatch.setattr(ending, "now_ms", lambda: NOW)
        monkeypatch.setattr(ending, "closing", lambda *what: ("CLOSE", *what))
        monkeypatch.setattr(ending, "keeping", lambda *what: ("KEEP", *what))

    async def _pipe(self, commands: Sequence[Any]) -> list[None]:
        """No answer has a grade."""
        self.piped += [one for one in commands if one[0] != "GET"]
        return [None] * len(commands)

    async def _open(self, *what: Any) -> str | None:
        self.opened.append(what)
        return self.owner

    async def _turns(self, *what: Any) -> list[Turn]:
        self.asked_turns.append(what)
        return self.turns

    def _appending(self, session_id: str, respondent_id: str, turn: Turn) -> list[Any]:
        return [("TURN", session_id, respondent_id, turn)]

    async def _facts(self, model: str) -> ModelFacts:
        return ModelFacts(server=f"of {model}")

    async def _schemas(self) -> dict[str, Any]:
        return self.tools

    async def _run_agent(
        self, steps: JournalSteps, question: Any, rounds: int, constraints: ResponseConstraints
    ) -> Answer:
        self.ran.append((steps, question, rounds, constraints))
        return said()

    async def _deliberate(self, *what: Any) -> tuple[Answer, list[Deliberation]]:
        self.sat.append(what)
        return said(), [SAID]

    async def _attached(self, files: Any, wanted: Wanted, question: str, ids: Sequence[str]) -> Any:
        images = [{"name": "cat.png", "type": "image/png", "data": b""}]
        message = {"role": "user", "content": f"{files} {wanted} {ids} {question}", "images": images}
        return message, [{"id": id, "name": "cat.png"} for id in ids]

    async def _read(self, _bus: Any, user_id: str, messages: Sequence[ChatTurnMessage]) -> list[Any]:
        assert user_id == "ann"
        found = [{"role": said.role, "content": f"read: {said.content}"} for said in messages]
        return [
            {**one, "attachments": said.attachments} if said.attachments else one
            for one, said in zip(found, messages, strict=True)
        ]

    async def _with_files(self, files: Any, wanted: Wanted, read: Sequence[Any]) -> list[Any]:
        return [{"role": one["role"], "content": f"{files} {wanted.model}: {one['content']}"} for one in read]

    async def _given(self, loader: Loader, read: Sequence[Any]) -> Any:
        return await self._with_files(loader.files, loader.wanted, read), Earlier()

    # what the tests ask

    async def steps(self, past: Past | None = None) -> JournalSteps:
        """The steps that the agent runs over."""
        await generate(self.run, past or Past())
        ((steps, _, _, _),) = self.ran
        return steps

    async def completes(self, answer: Answer | None = None, **finished: Any) -> dict[str, Any]:
        """What the journal's last entry has, of an answer that is generated and published."""
        done = await generate(self.run, Past())
        given = {"answer": answer or done.answer, "deliberations": None, **finished}
        await end(self.run, replace(done, **given))
        kind, data = self.writer.entries[-1]
        assert kind is EntryType.COMPLETED
        return data

    @property
    def generation(self) -> ResponseGeneration:
        return ResponseGeneration.model_validate_json(self.writer.published[-1][0][0].envelope.payload)


SAID = Deliberation(persona="Skeptic", round=1, response="No.")
# What the model has said so far, two members of a committee among it, and its tokens.
MESSAGES = [
    ModelMessage(step=0, role="assistant", content=content, scope=scope, prompt_tokens=prompt, completion_tokens=answer)
    for content, scope, prompt, answer in (
        ("", "skeptic.1:", 3, 2), ("No.", "skeptic.1.again:", 40, 20), ("", "", 500, None),
    )
]  # fmt: skip
SPENT = {"prompt_tokens": 543, "completion_tokens": 22}


def said(text: str = "Nothing.", **more: Any) -> Answer:
    given = {"thinking": "hm", "tool_calls": [], "usage": Usage(prompt_tokens=7), "finish_reason": "stop",
             "model": "served"}  # fmt: skip
    return Answer(**{"text": text, **given, **more})


def turn(number: int, **more: Any) -> Turn:
    return Turn(f"{number}-0", f"q{number}", f"a{number}", number, **more)


# ── what is published ────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_answer_is_published_with_its_turn_before_its_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, options={"seed": 3}, after="30-0", settings={"temperature": 0.5}, before=[LOW.event()])
    record = ToolCallRecord(tool="calculator", args={"x": 1}, result="2", call_id="c")
    completed = await bench.completes(said(tool_calls=[record], said_before=["I look."]))
    assert completed == {
        "answer": "Nothing.",
        "said_before": ["I look."],
        "thinking": "hm",
        "tool_calls": [record.model_dump(mode="json")],
        "usage": Usage(prompt_tokens=7).model_dump(),
        "finish_reason": "stop",
        "model": "served",
    }
    (((generation, dialog), turns),) = bench.writer.published
    headers = {"correlation_id": QUERY_ID, "causation_id": "cause", "session_id": "s", "user_id": "ann",
               "respondent_id": "A", "traceparent": "trace", "deadline": 9_000}  # fmt: skip
    for outgoing in (generation, dialog):
        assert outgoing.once == f"{QUERY_ID}:A"
        assert {name: getattr(outgoing.envelope, name) for name in headers} == headers
    prompt = f"Be kind.\n\n{TODAY}\n\n[It was weak.]"
    assert bench.generation == ResponseGeneration(
        query_id=QUERY_ID, response_id=f"{QUERY_ID}:A", session_id="s", user_id="ann", respondent_id="A",
        generator_id="GeneratorAgent", query="What is new?", answer="Nothing.", thinking="hm", tool_calls=[record],
        model="served", options={"temperature": 0.5, "seed": 3}, own_options={"temperature": 0.5},
        prompt_version=prompt_version("Be kind."), usage=Usage(prompt_tokens=7), finish_reason="stop", system=prompt,
        time_zone="Etc/UTC",
    )  # fmt: skip
    assert AnswerDialog.model_validate_json(dialog.envelope.payload) == AnswerDialog(
        session_id="s", query_id=QUERY_ID, query="What is new?", answer="Nothing.", respondent_id="A"
    )
    kept = Turn(QUERY_ID, "What is new?", "Nothing.", NOW, False, 3.0, "40-0", "30-0")
    assert turns == [("TURN", "s", "A", kept)]
    assert [data["action"] for data in bench.writer.of(EntryType.STATE)] == ["RECEIVE", "START_GENERATION", "PUBLISH"]
    # the journal's end is the last that is told, with the step behind it, and what happened stays with the session
    (last,) = bench.writer.told[-1]
    assert orjson.loads(last.envelope.payload)["action"] == "RESET"
    closes, (keep, session_id, query_id, events, why) = bench.writer.also[-1]
    assert closes == ("CLOSE", "journal", bench.settings.retention)
    assert (keep, session_id, query_id, why) == ("KEEP", "s", QUERY_ID, None)
    # the answer is in its turn
    place, kind, data = events[-1]
    assert (place, kind, "answer" in data) == ("50-9", "completed", False)


async def test_another_respondents_answer_is_published_under_its_name_and_its_steps_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, settings={"respondent_id": "B", "agent_id": "shadow"})
    await bench.completes()
    found = bench.generation
    assert (found.respondent_id, found.generator_id, found.response_id) == ("B", "shadow", f"{QUERY_ID}:B")
    ((_, turns),) = bench.writer.published
    assert [one[:3] for one in turns] == [("TURN", "s", "B")]
    assert bench.writer.also[-1] == [("CLOSE", "journal", bench.settings.retention)]


async def test_calls_for_the_client_are_told_it_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    client_calls = [ClientCall(1, 2, ToolCall("x", "weather", {"city": "Graz"}))]
    bench = Bench(monkeypatch)
    completed = await bench.completes(said("I look.", client_calls=client_calls))
    assert completed["client_calls"] == [{"id": "call_50_0_1_2", "name": "weather", "args": {"city": "Graz"}}]
    assert bench.writer.published == []
    # there is no turn with which it could be kept
    assert bench.writer.also[-1] == [("CLOSE", "journal", bench.settings.retention)]
    plain = Bench(monkeypatch, plain=True)
    assert "client_calls" not in await plain.completes()
    assert plain.writer.published == []
    assert plain.writer.also[-1] == [("CLOSE", "journal", bench.settings.retention)]


async def test_what_members_of_a_committee_said_is_told_and_published(monkeypatch: pytest.MonkeyPatch) -> None:
    for deliberations, told in (([SAID], [SAID.model_dump(mode="json")]), ([], []), (None, None)):
        bench = Bench(monkeypatch)
        completed = await bench.completes(deliberations=deliberations)
        assert completed.get("deliberations") == told
        assert ("deliberations" in completed) is (told is not None)
        assert bench.generation.deliberations == deliberations


async def test_a_client_that_keeps_its_history_has_its_turn_kept_as_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = [ChatTurnMessage(role="assistant", content="It is: ")]
    history = [ChatTurnMessage(role="user", content="Hi."), ChatTurnMessage(role="assistant", content="Hello.")]
    bench = Bench(monkeypatch, messages=history, kept=True, following=begun)
    await bench.completes(said("nothing.", said_before=["I look.", ""]))
    assert bench.generation.answer == "It is: nothing."
    assert bench.generation.history == history
    ((_, turns),) = bench.writer.published
    assert [one[3].answer for one in turns] == ["It is: I look.\n\nnothing."]
    assert bench.opened == [("s", "ann", "What is new?", QUERY_ID)]
    # of an answer with a form there is nothing but the form
    bench = Bench(monkeypatch, messages=history, kept=True, answer_schema={"type": "object"})
    await bench.completes(said("{}", said_before=["I look."]))
    assert [one[3].answer for one in bench.writer.published[0][1]] == ["{}"]
    # where the session is not told of it, there is no turn
    bench = Bench(monkeypatch, messages=history)
    await bench.completes()
    assert bench.writer.published[0][1] == []
    assert bench.opened == []


@pytest.mark.parametrize(
    ("following", "begun"),
    [
        ([], ""),
        ([ChatTurnMessage(role="assistant", content="It is: ")], "It is: "),
        ([ChatTurnMessage(role="tool", content="sun", tool_call_id="x")], ""),
        (
            [ChatTurnMessage(role="assistant", content="Before."), ChatTurnMessage(role="user", content="Go on.")],
            "",
        ),
        (
            [
                ChatTurnMessage.model_validate(
                    {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "1", "name": "f", "args": {}}]}
                )
            ],
            "",
        ),
    ],
)
async def test_the_beginning_that_a_client_gave_is_the_beginning_of_the_answer(
    monkeypatch: pytest.MonkeyPatch, following: list[ChatTurnMessage], begun: str
) -> None:
    bench = Bench(monkeypatch, messages=[], following=following)
    await bench.completes()
    assert bench.generation.answer == f"{begun}Nothing."


async def test_what_stood_before_the_question_is_told_to_the_judge_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, material="x" * MOST_MATERIAL + "y")
    await bench.completes()
    assert bench.generation.material == "x" * MOST_MATERIAL
    bench = Bench(monkeypatch)
    await bench.completes()
    assert bench.generation.material is None


# ── summaries ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_older_turns_are_summarised_when_the_history_nears_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    past = Past([turn(n) for n in range(1, 5)], Summary("1-0", 1, "They met."))

    async def wishes(used: int = 790, **settings: Any) -> list[Any]:
        bench = Bench(monkeypatch, settings=settings)
        done = await generate(bench.run, past)
        usage = Usage(prompt_tokens=1, context_tokens=used, context_window=1_000)
        await end(bench.run, replace(done, answer=said(usage=usage)))
        ((_, (kept, *wish)),) = bench.writer.published
        assert kept[0] == "TURN"
        return wish

    asked: list[Any] = []

    def due(after: Any, answered: Turn, used: int, *how: Any) -> str | None:
        asked.append((after, answered, used, *how))
        return "3-0" if used > 700 else None

    monkeypatch.setattr(ending, "due", due)
    ((command, wish),) = await wishes(history_turns=40)
    assert command == "PUBLISH"
    assert SessionSummarise.model_validate_json(wish.envelope.payload) == SessionSummarise(
        session_id="s", user_id="ann", until="3-0"
    )
    headers = (wish.envelope.session_id, wish.envelope.user_id, wish.envelope.causation_id, wish.once)
    assert headers == ("s", "ann", "cause", None)
    after, answered, used, window, most, ratio = asked[0]
    assert [one.query_id for one in after] == ["2-0", "3-0", "4-0"]
    assert (answered.query_id, answered.query, answered.answer) == (QUERY_ID, "What is new?", "Nothing.")
    assert (used, window, most, ratio) == (790, 1_000, 40, 3.0)
    assert await wishes(used=10) == []
    for settings in ({"compact": False}, {"respondent_id": "B"}, {"history_turns": 0}, {"demo": True}):
        assert await wishes(**settings) == []


# ── other ends ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_failure_is_told_and_the_question_stays_with_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, before=MESSAGES)
    await generate(bench.run, Past())
    await end(bench.run, Failure("model_error", "away"))
    assert bench.writer.entries[-1] == (
        EntryType.FAILED, {"code": "model_error", "message": "away", "usage": SPENT}
    )  # fmt: skip
    assert bench.writer.of(EntryType.STATE)[-1] == {"from": "GENERATING", "action": "FAIL", "to": "ERROR"}
    (last,) = bench.writer.told[-1]
    assert orjson.loads(last.envelope.payload)["from"] == "ERROR"
    _, (_, _, _, events, why) = bench.writer.also[-1]
    assert events[-1][1] == "failed"
    assert (why.state, why.query, why.error) == ("failed", "What is new?", {"code": "model_error", "message": "away"})
    assert bench.writer.published == bench.piped == []
    # of a query that had not begun no state is told, nor of what has no place in a session
    bench = Bench(monkeypatch, messages=[])
    await end(bench.run, Failure("deadline_exceeded", "late"))
    assert (bench.writer.of(EntryType.STATE), bench.writer.told[-1]) == ([], [])
    assert bench.writer.also[-1] == [("CLOSE", "journal", bench.settings.retention)]
    for more in ({"plain": True}, {"settings": {"respondent_id": "B"}}):
        bench = Bench(monkeypatch, **more)
        await end(bench.run, Failure("model_error", "away"))
        assert bench.writer.also[-1] == [("CLOSE", "journal", bench.settings.retention)]


async def test_what_a_takeover_did_not_show_is_shown_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, transitions_left=5)
    await generate(bench.run, Past())
    assert bench.writer.of(EntryType.STATE) == []
    await end(bench.run, Failure("model_error", "away"))
    assert [data["action"] for data in bench.writer.of(EntryType.STATE)] == ["FAIL"]


@pytest.mark.parametrize(
    ("written", "query", "kept"),
    [("Half an", {}, True), (" \n", {}, False), ("Half an", {"messages": []}, False)],
)
async def test_what_was_written_before_a_cancel_is_kept_as_interrupted(
    monkeypatch: pytest.MonkeyPatch, written: str, query: dict[str, Any], kept: bool
) -> None:
    bench = Bench(monkeypatch, **query)
    read: list[tuple[Any, ...]] = []

    async def read_journal(*what: Any) -> list[JournalEntry]:
        read.append(what)
        events = [*MESSAGES, ThinkingPiece(text="hm"), AnswerPiece(text=written)]
        return [JournalEntry(f"49-{number}", event.type, 0, encode(event)[1]) for number, event in enumerate(events)]

    monkeypatch.setattr(ending, "read_journal", read_journal)
    await generate(bench.run, Past())
    await end(bench.run, Cancelled())
    assert read == [(bench.deps.context.bus, "journal")]
    assert bench.writer.entries[-1] == (
        EntryType.CANCELLED, {"answer": written, "thinking": "hm", "usage": SPENT}
    )  # fmt: skip
    assert bench.writer.of(EntryType.STATE)[-1]["action"] == "FAIL"
    left = Turn(QUERY_ID, "What is new?", written, NOW, True, None, None, None)
    assert bench.piped == ([("TURN", "s", "A", left)] if kept else [])
    keeps = bench.writer.also[-1][1:]
    if query:
        assert keeps == []
        return
    ((_, _, _, events, why),) = keeps
    assert (why is None) is kept
    told = {"usage": SPENT} if kept else {"answer": written, "usage": SPENT}
    _, kind, data = events[-1]
    assert (kind, data) == ("cancelled", told)


# ── what the model is asked ──────────────────────────────────────────────────────────────────────────────────────


async def test_the_model_reads_the_newest_turns_and_the_summary_of_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    summary = Summary("2-0", 2, "They met.")
    turns = [turn(1), turn(2), turn(3, ratio=9.0), turn(4), turn(5, ratio=4.5)]
    bench = Bench(monkeypatch, settings={"history_turns": 3}, system_prompt="In French.")
    conversation = (await bench.steps(Past(turns, summary))).conversation
    prompt = {"role": "system", "content": f"Be kind.\n\nIn French.\n\n{TODAY}"}
    assert conversation.system == [prompt, summary.message()]
    assert conversation.history == [turn(3).messages(), turn(4).messages(), turn(5).messages()]
    assert conversation.names == ["3-0", "4-0", "5-0"]
    assert (conversation.summarised, conversation.until, conversation.rates.ratio) == (2, "2-0", 4.5)
    bench = Bench(monkeypatch, settings={"history_turns": 50})
    conversation = (await bench.steps(Past(turns[:4], summary))).conversation
    assert ([len(conversation.history), conversation.names], conversation.rates.ratio) == ([2, ["3-0", "4-0"]], 3.0)
    # who is to see no turns sees no summary either
    bench = Bench(monkeypatch, settings={"history_turns": 0})
    conversation = (await bench.steps(Past(turns, summary))).conversation
    assert (len(conversation.system), conversation.history, conversation.summarised) == (1, [], 0)
    conversation = (await Bench(monkeypatch).steps()).conversation
    assert (conversation.history, conversation.names, conversation.rates.ratio) == ([], [], 3.0)


async def test_a_history_that_the_client_gives_takes_the_place_of_the_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        ChatTurnMessage(role="system", content="Be brief."),
        ChatTurnMessage(role="user", content="Hi."),
        ChatTurnMessage(role="assistant", content="Hello."),
    ]
    bench = Bench(monkeypatch, messages=given, plain=True)
    steps = await bench.steps(Past([turn(1)]))
    assert steps.conversation.system == [
        {"role": "system", "content": ""}, {"role": "system", "content": "read: Be brief."},
    ]  # fmt: skip
    assert [[one["content"] for one in turn] for turn in steps.conversation.history] == [["read: Hi.", "read: Hello."]]
    with_file = [*given, ChatTurnMessage(role="user", content="See.", attachments=["f"])]
    bench = Bench(monkeypatch, messages=with_file)
    history = (await bench.steps()).conversation.history
    assert history[1] == [{"role": "user", "content": "files m: read: See."}]


async def test_an_answer_is_asked_for_as_its_query_and_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, settings={"max_tool_iterations": 4, "think": False})
    await generate(bench.run, Past())
    ((steps, question, rounds, constraints),) = bench.ran
    assert (question, rounds, constraints) == (
        {"role": "user", "content": "What is new?"},
        4,
        ResponseConstraints([], None, None),
    )
    assert (steps.model_name, steps.allowed, steps.scope, steps.labels) == ("m", None, "", {})
    assert (steps.think, steps.max_deferral_s, steps.functions, steps.options) == (False, None, [], {})
    assert (steps.parallel, steps.arguments, steps.run) == (False, {}, bench.run)
    tools = ClientTools(functions=[{"type": "function", "function": {"name": "weather"}}])
    following = [ChatTurnMessage(role="tool", content="sun", tool_call_id="x")]
    bench = Bench(
        monkeypatch, model="other", think=True, tools=["calculator"], plain=True, client_tools=tools, material="M: ",
        following=following, answer_schema={"type": "object"}, options={"seed": 1}, settings={"think": False},
    )  # fmt: skip
    await generate(bench.run, Past())
    ((steps, question, rounds, constraints),) = bench.ran
    read = [{"role": "tool", "content": "read: sun"}]
    assert (question["content"], rounds, constraints) == (
        "M: What is new?",
        0,
        ResponseConstraints(read, tools, {"type": "object"}),
    )
    assert (steps.model_name, steps.allowed, steps.think) == ("other", frozenset({"calculator"}), True)
    assert (steps.max_deferral_s, steps.functions, steps.options) == (30.0, tools.functions, {"seed": 1})


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({}, ModelFacts(server="of m")),
        ({"model": "other"}, ModelFacts(server="of other")),
        ({"settings": {"demo": True}}, ModelFacts(abilities=frozenset())),
    ],
)
async def test_files_are_read_for_the_model_that_is_asked(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], facts: ModelFacts
) -> None:
    bench = Bench(monkeypatch, attachments=[{"id": 1}, {"id": "f"}], **more)
    done = await generate(bench.run, Past())
    ((_, question, _, _),) = bench.ran
    wanted = Wanted("ann", str(more.get("model", "m")), facts, bench.settings.num_ctx)
    before = f"files {wanted} ['1', 'f'] "
    assert question["content"] == f"{before}What is new?"
    await end(bench.run, replace(done, answer=said()))
    material = bench.generation.material
    assert material is not None
    assert material.startswith("[attached image cat.png: ")
    assert material.endswith(before)


# ── the session's owner ──────────────────────────────────────────────────────────────────────────────────────────


async def test_whose_session_it_is_not_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    for owner in ("ann", None):
        bench.owner = owner
        await check_owner(bench.deps, bench.query, QUERY_ID)
    bench.owner = "bob"
    with pytest.raises(PermanentError, match="session s belongs to another user"):
        await check_owner(bench.deps, bench.query, QUERY_ID)


@pytest.mark.parametrize(
    ("deliveries", "query", "asked"), [(1, {}, False), (2, {}, True), (2, {"messages": []}, False)]
)
async def test_who_takes_an_answer_over_asks_whose_session_it_is(
    monkeypatch: pytest.MonkeyPatch, deliveries: int, query: dict[str, Any], asked: bool
) -> None:
    bench = Bench(monkeypatch, deliveries=deliveries, **query)
    await generate(bench.run, Past())
    assert bench.opened == ([("s", "ann", "What is new?", QUERY_ID)] if asked else [])


# ── the last grade ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("more", "before", "told"),
    [
        ({}, [], True),
        ({"settings": {"tell_low_grade": False}}, [], False),
        ({"settings": {"respondent_id": "B"}}, [], False),
        ({"plain": True}, [], False),
        ({"following": [ChatTurnMessage(role="tool", content="sun", tool_call_id="x")]}, [], False),
        ({}, MESSAGES, False),
        ({}, [LOW.event()], False),
    ],
)
async def test_of_a_low_grade_the_model_is_told_once(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], before: Sequence[KnownEvent], told: bool
) -> None:
    looked: list[Any] = []

    async def last(bus: Any, turns: Sequence[Turn]) -> LowGrade | None:
        looked.append((bus, turns))
        return LOW

    monkeypatch.setattr(generation, "last_low_grade", last)
    bench = Bench(monkeypatch, before=before, **more)
    steps = await bench.steps(Past([turn(1)]))
    assert looked == ([(bench.deps.context.bus, [turn(1)])] if told else [])
    assert bench.writer.of(EntryType.NOTICE) == ([shown(LOW.event())] if told else [])
    knows = told or before == [LOW.event()]
    assert ("[It was weak.]" in steps.conversation.system[0]["content"]) is knows
    assert bench.asked_turns == []


async def test_of_a_history_that_the_client_gives_the_sessions_own_turns_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Any] = []

    async def last(_bus: Any, turns: Sequence[Turn]) -> LowGrade | None:
        looked.append(turns)
        return None

    monkeypatch.setattr(generation, "last_low_grade", last)
    bench = Bench(monkeypatch, messages=[], kept=True)
    bench.turns = [turn(7)]
    await bench.steps()
    assert (looked, bench.asked_turns) == ([[turn(7)]], [("s", "A", QUERY_ID)])
    assert bench.writer.of(EntryType.NOTICE) == []


# ── a committee ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_committee_sits_as_the_query_and_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"active_personas": ["Skeptic", "Empath"], "rounds": 2, "parallel": True, "persona_tool_iterations": 4,
                "max_tool_iterations": 6}  # fmt: skip
    bench = Bench(
        monkeypatch, mode="committee", tools=["search_memory", "web_search"], settings=settings, before=MESSAGES
    )
    finished = await generate(bench.run, Past([turn(1)], Summary("0-5", 1, "They met.")))
    assert (finished.deliberations, bench.ran) == ([SAID], [])
    assert finished.answer.usage == Usage(**SPENT)
    ((session, _, base, question, open_steps, progress, _),) = bench.sat
    assert session == Session(["Skeptic", "Empath"], 2, True, 4, 6, TODAY)
    assert base == f"Be kind.\n\n{TODAY}"
    assert question == {"role": "user", "content": "What is new?"}
    seat = Seat("Skeptic", 1)
    member, own = open_steps(seat, "Doubt."), open_steps(None, "Be you.")
    assert (member.scope, member.labels, member.parallel) == (seat.scope, {"persona": "Skeptic", "round": 1}, True)
    # of what the client allows, what a member may use
    assert (member.allowed, member.arguments) == (frozenset({"search_memory"}), PERSONA_ARGUMENTS)
    assert (own.allowed, own.scope, own.labels) == (frozenset({"search_memory", "web_search"}), "", {})
    assert (own.parallel, own.arguments) == (False, {})
    first, summary = member.conversation.system
    assert (first, own.conversation.system[0]["content"]) == ({"role": "system", "content": "Doubt."}, "Be you.")
    assert "They met." in summary["content"]
    # each has a history of its own to cut
    assert member.conversation.history == own.conversation.history == [turn(1).messages()]
    assert member.conversation.history is not own.conversation.history
    await progress("working", seat, {})
    await progress("done", seat, {"response": "No."})
    assert bench.writer.entries[-2:] == [
        (EntryType.PERSONA_WORKING, {"persona": "Skeptic", "round": 1}),
        (EntryType.PERSONA_DONE, {"persona": "Skeptic", "round": 1, "response": "No."}),
    ]
    await progress("done", seat, {"response": "No."})
    assert len(bench.writer.of(EntryType.PERSONA_DONE)) == 1
    bench = Bench(monkeypatch, mode="committee", personas=["empath"], rounds=3, settings={"parallel": False})
    await generate(bench.run, Past())
    ((session, *_),) = bench.sat
    assert session == Session(["Empath"], 3, False, 3, 5, TODAY)
    member = bench.sat[0][4](seat, "Doubt.")
    assert (member.allowed, member.parallel) == (PERSONA_TOOLS, False)
    # nobody deliberates: the answer is as in a chat
    bench = Bench(monkeypatch, mode="committee", personas=[])
    assert (await generate(bench.run, Past())).deliberations is None
    assert len(bench.ran) == 1


async def test_memories_are_looked_up_for_a_model_that_cannot_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    async def tools(steps: JournalSteps, step: int, calls: Sequence[tuple[int, ToolCall]]) -> list[ToolCallRecord]:
        called.append((steps.scope, steps.allowed, steps.arguments, steps.options, step, calls))
        return [ToolCallRecord(tool="search_memory", args={}, result="You have a dog.", call_id="c")]

    monkeypatch.setattr(JournalSteps, "tools", tools)
    bench = Bench(monkeypatch, mode="committee", options={"seed": 1})
    await generate(bench.run, Past())
    retrieve = bench.sat[0][6]
    assert await retrieve() is None
    await bench.run.notice("tools_unsupported", "it cannot call tools")
    assert await retrieve() == "You have a dog."
    call = ToolCall("context", "search_memory", {"query": "What is new?"})
    assert called == [(Seat("context", 0).scope, PERSONA_TOOLS, PERSONA_ARGUMENTS, {"seed": 1}, 0, [(0, call)])]
    bench.tools = {"web_search": {}}
    assert await retrieve() is None
    assert len(called) == 1
