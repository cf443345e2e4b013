"""Subjects and payloads: the names of the contract, strict when written, tolerant when read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from shared.bus.streams import event_length
from shared.contracts import (
    AGENT_TRANSITION,
    MAX_QUERY_CHARS,
    QUERY_RECEIVED,
    REWARD_EVENT,
    SUBJECTS,
    TOOL_REQUEST,
    TOOL_RESULT,
    USER_FEEDBACK,
    AgentTransition,
    QueryReceived,
    ResponseGeneration,
    RewardEvent,
    Subject,
    ToolRequest,
    ToolResultMessage,
    UserFeedback,
    canonical_tool,
    encode,
    listed_tools,
)
from shared.envelope import Envelope
from shared.errors import DecodeError

QUERY = {"session_id": "s", "query": "q", "user_id": "u"}


def decode(payload: bytes) -> QueryReceived:
    return QUERY_RECEIVED.decode(Envelope(subject="query.received", payload=payload))


def test_every_subject_of_the_contract_is_declared() -> None:
    assert {subject.name for subject in SUBJECTS} == {
        "query.received", "tool.schema", "tool.schema.request", "response.generation", "answer.dialog",
        "critique.result", "pairwise.result", "user.feedback", "reward.event", "agent.transition", "settings.update",
        "query.cancel", "dead.letter", "memory.save", "memory.classify", "memory.read", "memory.forget",
        "memory.changed", "query.forget",
        "knowledge.read", "knowledge.forget", "session.summarise",
    }  # fmt: skip
    assert TOOL_REQUEST.for_tool("web_search").stream == "local2:tool.request.web_search"
    assert TOOL_RESULT.for_tool("web_search").stream == "local2:tool.result.web_search"


def test_what_a_group_reads_is_a_work_stream_and_what_observers_read_is_bounded() -> None:
    work = {subject.name for subject in SUBJECTS if subject.kind == "work"}
    assert work == {
        "query.received", "response.generation", "critique.result", "pairwise.result", "user.feedback", "reward.event",
        "memory.save", "memory.classify", "memory.read", "memory.forget", "query.forget",
        "knowledge.read", "knowledge.forget", "session.summarise",
    }  # fmt: skip
    for subject in (*SUBJECTS, TOOL_REQUEST.for_tool("x"), TOOL_RESULT.for_tool("x")):
        assert (event_length(subject.name) is None) == (subject.kind == "work")


def test_an_unknown_field_is_an_error_when_writing_and_ignored_when_reading() -> None:
    with pytest.raises(ValidationError):
        QueryReceived(**QUERY, colour="red")
    assert decode(orjson.dumps({**QUERY, "colour": "red"})).query == "q"


def test_an_unknown_field_deep_inside_is_ignored_when_reading() -> None:
    message = {"role": "user", "content": "hi", "weight": 3}
    decoded = decode(orjson.dumps({**QUERY, "messages": [message]}))
    assert decoded.messages is not None
    assert decoded.messages[0].content == "hi"


@pytest.mark.parametrize(
    "change",
    [
        {"query": ""},
        {"query": "x" * (MAX_QUERY_CHARS + 1)},
        {"query": None},
        {"mode": "monologue"},
        {"rounds": 0},
        {"session_id": 7},
        {"messages": [{"role": "wizard"}]},
        {"tools": "web_search"},
    ],
)
def test_a_malformed_payload_names_the_field(change: dict[str, object]) -> None:
    with pytest.raises(DecodeError, match=next(iter(change))):
        decode(orjson.dumps({**QUERY, **change}))


@pytest.mark.parametrize("payload", [b"", b"{", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"query": "\\ud800"}'])
def test_anything_else_is_a_decode_error(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(payload)


def test_a_payload_is_read_back_as_written() -> None:
    query = QueryReceived(**QUERY, mode="committee", personas=["x"], options={"temperature": 0.1})
    assert decode(QUERY_RECEIVED.of(query).envelope.payload) == query


ASKED: dict[str, Any] = {"query_id": "1-1", "call_id": "c", "tool": "t", "args": {}}
ANSWERED: dict[str, Any] = {"query_id": "1-1", "call_id": "c", "tool": "t", "result": "r", "duration_ms": 0}
FAR = 2**200


@pytest.mark.parametrize(
    ("subject", "kind", "said", "wrong"),
    [
        (TOOL_REQUEST, ToolRequest, ASKED, {"call_id": "", "args": [], "token": 1, "user_id": None}),
        (TOOL_RESULT, ToolResultMessage, ANSWERED, {"result": 3, "duration_ms": -1, "error": 1, "session_id": None}),
    ],
)
def test_calls_and_results_are_held_to_their_form_like_every_payload(
    subject: Subject[Any], kind: type[Any], said: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """They are no models, which makes no difference to what is written or read."""
    with pytest.raises(ValidationError, match="newer"):
        kind(**said, newer=True)
    assert subject.read(orjson.dumps({**said, "newer": True})) == kind(**said)
    for name, value in wrong.items():
        with pytest.raises(ValidationError, match=name):
            kind(**{**said, name: value})
        with pytest.raises(DecodeError, match=f"the payload is malformed: {name}: "):
            subject.read(orjson.dumps({**said, name: value}))
    for name in said:
        with pytest.raises(DecodeError, match=f"the payload is malformed: {name}: Field required"):
            subject.read(orjson.dumps({key: value for key, value in said.items() if key != name}))
    for garbage in (b"", b"{", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"query_id": "\\ud800"}'):
        with pytest.raises(DecodeError):
            subject.read(garbage)


def test_what_is_asked_and_answered_is_read_as_it_was_written_however_large_its_numbers() -> None:
    asked = ToolRequest(**{**ASKED, "args": {"n": FAR, "deep": [{"x": None}]}})
    assert TOOL_REQUEST.read(encode(asked)) == asked
    answered = ToolResultMessage(**ANSWERED, data=[FAR, 1.5, "\N{SNOWMAN}"])
    assert TOOL_RESULT.read(encode(answered)) == answered
    assert TOOL_RESULT.read(encode(replace(answered, data=[FAR, float("nan")]))).data == [FAR, None]


def test_a_transition_is_written_with_the_names_of_the_contract() -> None:
    transition = AgentTransition(
        agent="g", replica="r", query_id="1-1", from_state="IDLE", action="RECEIVE", to="RECEIVING"
    )
    written = AGENT_TRANSITION.of(transition).envelope
    assert set(orjson.loads(written.payload)) == {"agent", "replica", "query_id", "from", "action", "to"}
    assert AGENT_TRANSITION.decode(written) == transition


@pytest.mark.parametrize("reward", [-1.01, 1.01])
def test_a_reward_is_between_minus_one_and_one(reward: float) -> None:
    with pytest.raises(ValidationError):
        RewardEvent(query_id="1-1", response_id="1-1:A", respondent_id="A", reward=reward, source="user", config={})
    assert REWARD_EVENT.kind == "work"


@pytest.mark.parametrize("stars", [0, 6])
def test_stars_are_one_to_five(stars: int) -> None:
    with pytest.raises(ValidationError):
        UserFeedback(query_id="1-1", session_id="s", user_id="u", sentiment="positive", stars=stars)
    assert USER_FEEDBACK.of(
        UserFeedback(query_id="1-1", session_id="s", user_id="u", sentiment="negative", stars=1)
    ).envelope.payload


@pytest.mark.parametrize(
    ("name", "args", "current"),
    [
        ("recall_memory", {"query": "x"}, "search_memory"),
        ("memory_recall", {"query": "x"}, "search_memory"),
        ("search_memories", {}, "search_memory"),
        ("recall_memory", {"topic": "user.name"}, "recall_topic"),
        ("memory_recall", {"topic": ""}, "search_memory"),
        ("search_memory", {"topic": "user.name"}, "search_memory"),
        ("memory_save", {"topic": "user.name", "content": "x"}, "save_topic"),
        ("web_search", {}, "web_search"),
    ],
)
def test_older_tool_names_mean_the_current_ones(name: str, args: dict[str, str], current: str) -> None:
    assert canonical_tool(name, args) == current


@pytest.mark.parametrize(
    ("names", "current"),
    [
        ([], set()),
        (["search_memory"], {"search_memory"}),
        # by its arguments an old recall name is one of two tools
        (["recall_memory"], {"search_memory", "recall_topic"}),
        (["memory_recall", "web_search"], {"search_memory", "recall_topic", "web_search"}),
        (["search_memories"], {"search_memory", "recall_topic"}),
        (["memory_save"], {"save_topic"}),
        (["git__log"], {"git__log"}),
    ],
)
def test_list_of_tools_means_their_current_names(names: list[str], current: set[str]) -> None:
    assert listed_tools(names) == current


def response(**values: Any) -> ResponseGeneration:
    return ResponseGeneration.model_validate(
        {
            "query_id": "1-1", "response_id": "1-1:A", "session_id": "s", "user_id": "u", "respondent_id": "A",
            "generator_id": "g", "query": "q", "answer": "a", "model": "m", "finish_reason": "stop",
            "prompt_version": "v2", **values,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "sampling"),
    [
        ({"options": {"temperature": 0.5}}, {"temperature": 0.5}),
        # a program that does not tell what is its own: bounds of an answer are never a respondent's
        ({"options": {"temperature": 0.5, "num_predict": 9, "stop": ["x"], "seed": 7}}, {"temperature": 0.5}),
        ({"options": {"temperature": 0.1, "top_p": 0.2}, "own_options": {"temperature": 0.9}}, {"temperature": 0.9}),
        ({"options": {"temperature": 0.1}, "own_options": {}}, {}),
    ],
)
def test_a_configuration_is_model_own_sampling_and_prompt(values: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert response(**values).config == {"model": "m", "options": sampling, "prompt_version": "v2"}
