"""A client's constraints: its own tools end the run, and an answer has the form that was asked for or there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest

from services.generator.loop import Answer, ClientCall, Message, Reply, run_agent
from services.generator.response_constraints import ResponseConstraints, UnusableForm
from shared.contracts import ClientTools, ToolCallRecord
from shared.llm.port import ModelError, ToolCall

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


WEATHER = function("weather", description="How the weather is.", parameters=CITY)
CLOCK = function("clock")


class Model:
    """Gives the replies in turn; `sent` are the messages, the form asked for, and whether tools were on offer."""

    def __init__(self, *replies: Reply | str) -> None:
        self._replies = [one if isinstance(one, Reply) else Reply(one, "", [], "stop", "m") for one in replies]
        self.sent: list[tuple[list[Message], Mapping[str, Any] | None, bool]] = []
        self.ran: list[tuple[int, str]] = []

    async def model(
        self, step: int, current: Sequence[Message], *, with_tools: bool, form: Mapping[str, Any] | None = None
    ) -> Reply:
        self.sent.append((list(current), form, with_tools))
        return self._replies.pop(0)

    async def tools(self, step: int, calls: Sequence[tuple[int, ToolCall]]) -> list[ToolCallRecord]:
        self.ran += [(position, one.name) for position, one in calls]
        return [ToolCallRecord(tool=one.name, args={}, result="ours", call_id="c") for _, one in calls]

    async def transition(self, action: str) -> None:
        pass


def calls(*names: str, said: str = "") -> Reply:
    made = [ToolCall(f"id-{name}", name, {}) for name in names]
    return Reply(said, "", made, "tool_calls", "m")


async def answered(model: Model, constraints: ResponseConstraints) -> Answer:
    return await run_agent(model, {"role": "user", "content": "Well?"}, 5, constraints)


async def test_a_call_of_the_clients_tool_ends_the_run_when_our_own_have_their_results() -> None:
    model = Model(calls("search", "weather", "clock", said="I look."))
    answer = await answered(model, ResponseConstraints(tools=ClientTools(functions=[WEATHER, CLOCK])))
    assert model.ran == [(0, "search")]
    assert [(one.step, one.position, one.call.name) for one in answer.client_calls] == [
        (0, 1, "weather"),
        (0, 2, "clock"),
    ]
    assert (answer.text, answer.finish_reason) == ("I look.", "tool_calls")
    assert [record.tool for record in answer.tool_calls] == ["search"]


@pytest.mark.parametrize("said", ["", "I look."])
async def test_a_call_of_the_clients_tool_is_no_answer_and_is_handed_over_when_no_call_of_ours_is_left(
    said: str,
) -> None:
    constraints = ResponseConstraints(tools=ClientTools(functions=[WEATHER]))
    answer = await answered(Model(calls("weather", said=said)), constraints)
    assert answer.client_calls == [ClientCall(0, 0, ToolCall("id-weather", "weather", {}))]
    assert (answer.text, answer.said_before) == (said, [])
    # the second one repeats the first, and the third is refused
    model = Model(*[calls("search")] * 3, calls("search", "weather", said=said))
    answer = await answered(model, constraints)
    assert answer.client_calls == [ClientCall(3, 1, ToolCall("id-weather", "weather", {}))]
    assert (answer.text, model.ran) == (said, [(0, "search")])


async def test_one_call_is_handed_over_at_a_time_when_the_client_wants_it_so() -> None:
    tools = ClientTools(functions=[WEATHER, CLOCK], parallel=False)
    answer = await answered(Model(calls("clock", "weather")), ResponseConstraints(tools=tools))
    assert [one.call.name for one in answer.client_calls] == ["clock"]


async def test_a_call_of_the_clients_tool_that_cannot_be_read_is_told_to_the_model() -> None:
    broken = Reply("", "", [ToolCall("1", "weather", {}, error="the arguments are no JSON")], "tool_calls", "m")
    model = Model(broken, "Fine.")
    answer = await answered(model, ResponseConstraints(tools=ClientTools(functions=[WEATHER])))
    assert (answer.text, answer.client_calls, model.ran) == ("Fine.", [], [])
    assert "the arguments are no JSON" in model.sent[1][0][-1]["content"]


async def test_what_follows_the_question_is_sent_behind_it() -> None:
    model = Model("Sunny.")
    following = [{"role": "tool", "content": "sun"}]
    answer = await answered(model, ResponseConstraints(following=following, tools=ClientTools(functions=[WEATHER])))
    assert model.sent == [([{"role": "user", "content": "Well?"}, *following], None, True)]
    assert (answer.text, answer.finish_reason) == ("Sunny.", "stop")


@pytest.mark.parametrize(
    ("choice", "functions", "said", "name", "args"),
    [
        ("weather", [WEATHER, CLOCK], '{"city": "Graz"}', "weather", {"city": "Graz"}),
        ("required", [WEATHER], 'So: {"city": "Graz"}.', "weather", {"city": "Graz"}),
        ("required", [WEATHER, CLOCK], '{"name": "clock", "arguments": {"now": 1}}', "clock", {"now": 1}),
        ("clock", [WEATHER, CLOCK], "```json\n{}\n```", "clock", {}),
    ],
)
async def test_a_call_that_must_be_made_is_the_json_that_the_model_was_held_to(
    choice: str, functions: list[dict[str, Any]], said: str, name: str, args: dict[str, Any]
) -> None:
    model = Model(said)
    constraints = ResponseConstraints(tools=ClientTools(functions=functions, choice=choice))
    answer = await answered(model, constraints)
    assert answer.client_calls == [ClientCall(0, 0, ToolCall("", name, args))]
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")
    ((messages, form, offered),) = model.sent
    assert (form, offered) == (constraints.form, False)
    assert messages[-1]["role"] == "system"
    told = messages[-1]["content"]
    assert told.endswith(orjson.dumps(constraints.form).decode())
    # the tools that can be meant, and no others
    meant = [choice] if choice != "required" else [one["function"]["name"] for one in functions]
    assert re.findall(r"^- (\w+): (.*)$", told, re.MULTILINE) == [
        (one, {"weather": "How the weather is.", "clock": "no description"}[one]) for one in meant
    ]


async def test_a_call_that_must_be_made_may_be_mended_once() -> None:
    constraints = ResponseConstraints(tools=ClientTools(functions=[WEATHER], choice="weather"))
    answer = await answered(Model("Sunny.", '{"city": "Graz"}'), constraints)
    assert answer.client_calls == [ClientCall(1, 0, ToolCall("", "weather", {"city": "Graz"}))]
    # nothing said is no second form
    model = Model("Sunny.", "")
    with pytest.raises(ModelError, match="gave no answer"):
        await answered(model, constraints)
    assert len(model.sent) == 2
    model = Model("three", "")
    with pytest.raises(ModelError, match="gave no answer"):
        await answered(model, ResponseConstraints(schema=SCHEMA))
    assert len(model.sent) == 2


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ('{"n": 3}', '{"n":3}'),
        ('Here you are:\n```json\n{"n": 3}\n```\nDone.', '{"n":3}'),
        ('It is {"n": 3}, I think.', '{"n":3}'),
    ],
)
async def test_an_answer_in_the_form_asked_for_is_told_as_its_json_alone(said: str, text: str) -> None:
    model = Model(said)
    answer = await answered(model, ResponseConstraints(schema=SCHEMA))
    assert (answer.text, answer.client_calls, answer.finish_reason) == (text, [], "stop")
    ((messages, form, offered),) = model.sent
    assert (form, offered) == (SCHEMA, True)
    assert messages[-1]["content"].endswith(orjson.dumps(SCHEMA).decode())


@pytest.mark.parametrize(
    ("said", "trouble"),
    [("three", "it is not JSON"), ('{"n": "x"}', "n: 'x' is not of type 'integer'"), ("[3]", "the value: ")],
)
async def test_an_answer_without_the_form_is_asked_for_once_more_and_held_to_it(said: str, trouble: str) -> None:
    model = Model(said, '{"n": 3}')
    assert (await answered(model, ResponseConstraints(schema=SCHEMA))).text == '{"n":3}'
    messages, form, offered = model.sent[1]
    assert (form, offered) == (SCHEMA, False)
    assert messages[-2] == {"role": "assistant", "content": said}
    assert trouble in messages[-1]["content"]
    with pytest.raises(ModelError, match="does not have the form that was asked for"):
        await answered(Model(said, said), ResponseConstraints(schema=SCHEMA))


@pytest.mark.parametrize("reason", ["length", "loop"])
async def test_an_answer_that_was_cut_off_is_told_as_far_as_it_goes(reason: str) -> None:
    model = Model(Reply('{"n": ', "", [], reason, "m"))
    answer = await answered(model, ResponseConstraints(schema=SCHEMA))
    assert (answer.text, answer.finish_reason) == ('{"n": ', reason)


def of_place(kind: str) -> dict[str, Any]:
    """The parameters of a tool, as pydantic writes them."""
    place = {"type": "object", "properties": {"at": {"type": kind}, "in": {"$ref": "#/$defs/Place"}}}
    return {"type": "object", "properties": {"place": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}}


async def test_each_of_several_tools_has_the_definitions_that_its_arguments_refer_to() -> None:
    functions = [function("walk", parameters=of_place("integer")), function("drive", parameters=of_place("string"))]
    constraints = ResponseConstraints(tools=ClientTools(functions=[*functions, CLOCK], choice="required"))
    args = {"place": {"at": "home", "in": {"at": "town"}}}
    model = Model(orjson.dumps({"name": "walk", "arguments": args}).decode(), '{"name": "clock", "arguments": {}}')
    assert (await answered(model, constraints)).client_calls == [ClientCall(1, 0, ToolCall("", "clock", {}))]
    driven = await answered(Model(orjson.dumps({"name": "drive", "arguments": args}).decode()), constraints)
    assert driven.client_calls == [ClientCall(0, 0, ToolCall("", "drive", args))]
    # a schema with a name of its own keeps what it refers to
    named = {"$id": "https://example.org/drive", **of_place("string")}
    constraints = ResponseConstraints(
        tools=ClientTools(functions=[function("drive", parameters=named), CLOCK], choice="required")
    )
    assert constraints.call_of(orjson.dumps({"name": "drive", "arguments": args}).decode()).args == args


TWICE = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}


@pytest.mark.parametrize(
    ("schema", "trouble"),
    [
        ({"$ref": "#/nowhere"}, "'/nowhere' does not exist"),
        ({"$ref": "#nobody"}, "'nobody' does not exist"),
        ({"$ref": "#"}, "recursion"),
        ({"$ref": "#/other", "other": 5}, "'int'"),
        ({"$ref": "http://127.0.0.1:1/schema"}, "Unresolvable"),
        ({"$ref": "file:///etc/hostname"}, "Unresolvable"),
        ({"$id": "a", "$ref": "http://["}, "Invalid"),
        ({"$ref": "#/$defs/d0", "$defs": {**TWICE, "d40": {}}}, "more than 1 s"),
        ({"properties": {"n": {"pattern": "^(a+)+$"}}}, "more than 1 s"),
    ],
)
async def test_a_form_that_nothing_can_be_compared_with_ends_the_answer(
    schema: dict[str, Any], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr("urllib.request.urlopen", fetched.append)
    model = Model(f'{{"n": "{"a" * 60}b"}}')
    with pytest.raises(UnusableForm, match=f"^the JSON schema cannot be used: .*{trouble}"):
        await answered(model, ResponseConstraints(schema=schema))
    assert fetched == []
