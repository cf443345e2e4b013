"""A client's own tools and forms: OpenAI's client, the gateway, the bus and the generator, at a scripted model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.openai_place import PARIS, Place, calling, open_place

from shared.contracts import RESPONSE_GENERATION


@pytest.fixture
async def place(redis_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with open_place(redis_url, tmp_path) as place:
        yield place


def tool(name: str = "weather", **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, **parameters}
    return {"type": "function", "function": {"name": name, "description": f"Tells the {name}", "parameters": schema}}


async def test_a_clients_tool_ends_the_turn_and_its_result_is_taken_up(place: Place) -> None:
    place.rules(calling("weather", text="I look."), {"respond": {"text": "It says <<result>>."}})
    first = await place.ask("How is it in Paris?", tools=[tool()])
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function", "weather", {"city": "Paris"}
    )  # fmt: skip
    offered = [one["function"]["name"] for one in place.sent[0]["tools"]]
    assert {"weather", "probe"} <= set(offered)
    said = [{"role": "user", "content": "How is it in Paris?"}, choice.message.model_dump(exclude_none=True)]
    last = await place.ask(
        [*said, {"role": "tool", "tool_call_id": call.id, "content": "rain"}], tools=[tool()]
    )  # fmt: skip
    assert (last.choices[0].finish_reason, last.choices[0].message.content) == ("stop", "It says rain.")
    # a call for the client is no answer: only the second request's end was published
    (published,) = await place.on.published(RESPONSE_GENERATION)
    assert (published.answer, published.query) == ("It says rain.", "How is it in Paris?")


async def test_a_tool_that_takes_a_text(place: Place) -> None:
    patch = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    choice: Any = {"type": "custom", "custom": {"name": "patch"}}
    said: list[Any] = [{"role": "user", "content": "Edit it."}]
    call = {"name": "patch", "args": {"input": "*** Begin"}}
    place.rules({"when": {"tool_results": 0}, "respond": {"tool_calls": [call]}}, {"respond": {"text": "<<result>>!"}})
    first = await place.ask(said, tools=[patch], tool_choice=choice)
    (told,) = first.choices[0].message.tool_calls
    assert (told.type, told.custom.name, told.custom.input) == ("custom", "patch", "*** Begin")
    streamed = [part async for part in await place.ask(said, tools=[patch], stream=True)]
    (delta,) = [part.choices[0].delta for part in streamed if part.choices and part.choices[0].delta.tool_calls]
    assert delta.tool_calls[0].model_dump()["custom"] == {"name": "patch", "input": "*** Begin"}
    message = first.choices[0].message.model_dump(exclude_none=True)
    last = await place.ask(
        [*said, message, {"role": "tool", "tool_call_id": told.id, "content": "done"}], tools=[patch]
    )
    assert last.choices[0].message.content == "done!"
    (_, _, asked, _) = place.sent[-1]["messages"]
    assert asked["tool_calls"][0]["function"]["arguments"] == {"input": "*** Begin"}


async def test_our_own_tools_run_first_and_their_results_are_there_when_the_client_comes_back(place: Place) -> None:
    place.rules(calling("probe", "weather", thinking="Both, I think."), {"respond": {"text": "Done: <<result>>"}})
    first = await place.ask("Both?", tools=[tool()])
    (call,) = first.choices[0].message.tool_calls
    assert call.function.name == "weather"
    history = [
        {"role": "user", "content": "Both?"},
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sun"},
    ]
    await place.ask(history, tools=[tool()])
    system, question, asked, own, theirs = place.sent[-1]["messages"]
    assert (system["role"], question["content"]) == ("system", "Both?")
    assert [one["function"]["name"] for one in asked["tool_calls"]] == ["probe", "weather"]
    assert asked["thinking"] == "Both, I think."
    assert (own["tool_name"], theirs["tool_name"], theirs["content"]) == ("probe", "weather", "sun")
    assert "you said ping" in own["content"]
    assert [one["id"] for one in asked["tool_calls"]] == [own["tool_call_id"], theirs["tool_call_id"]]
    # of what somebody else's query did, nothing is told
    await place.ask(history, place.bob, tools=[tool()])
    assert [m["role"] for m in place.sent[-1]["messages"]] == ["system", "user", "assistant", "tool"]
    assert "you said ping" not in json.dumps(place.sent[-1])


async def test_a_name_in_both_is_the_clients(place: Place) -> None:
    place.rules(calling("probe"))
    done = await place.ask("ping", tools=[tool("probe")])
    assert [call.function.name for call in done.choices[0].message.tool_calls] == ["probe"]
    mine = [one for one in place.sent[0]["tools"] if one["function"]["name"] == "probe"]
    assert [one["function"]["description"] for one in mine] == ["Tells the probe"]


async def test_a_stream_ends_with_the_calls(place: Place) -> None:
    both = [{"name": "weather", "args": {"city": "Ö"}}, {"name": "time", "args": {}}]
    place.rules(calling("probe", text="Wait."), {"respond": {"tool_calls": both}})
    stream = await place.ask("Both?", tools=[tool(), tool("time")], stream=True)
    calls, text, reasons = {}, "", []
    async for chunk in stream:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for part in delta.tool_calls or ():
            calls[part.index] = (part.id, part.function.name, part.function.arguments)
    assert (text, reasons[-1]) == ("Wait.", "tool_calls")
    assert [(name, json.loads(args)) for _, name, args in calls.values()] == [("weather", {"city": "Ö"}), ("time", {})]
    assert len({call_id for call_id, _, _ in calls.values()}) == 2
    place.rules(calling("probe", text="Wait."), {"respond": {"tool_calls": both}})
    whole = await place.ask("Both?", tools=[tool(), tool("time")], parallel_tool_calls=False)
    assert whole.choices[0].message.content == "Wait."
    assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["weather"]


@pytest.mark.parametrize(
    ("choice", "written"),
    [
        ({"type": "function", "function": {"name": "weather"}}, {"city": "Rome"}),
        ("required", {"name": "weather", "arguments": {"city": "Rome"}}),
    ],
)
async def test_a_call_can_be_demanded(place: Place, choice: Any, written: Any) -> None:
    place.rules({"respond": {"text": json.dumps(written)}})
    done = await place.ask("Rome?", tools=[tool(), tool("time")], tool_choice=choice)
    (call,) = done.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    assert (done.choices[0].finish_reason, done.choices[0].message.content) == ("tool_calls", None)
    (sent,) = place.sent
    assert "tools" not in sent
    assert sent["format"]
    assert "weather" in sent["messages"][0]["content"]
    history = [
        {"role": "user", "content": "Rome?"},
        done.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "hot"},
    ]
    place.rules({"respond": {"text": "<<result>>!"}})
    last = await place.ask(history, tools=[tool(), tool("time")])
    assert last.choices[0].message.content == "hot!"
    assert [m["role"] for m in place.sent[-1]["messages"]] == ["system", "user", "assistant", "tool"]


async def test_without_leave_to_call_the_clients_tools_are_not_offered(place: Place) -> None:
    await place.ask("x", tools=[tool()], tool_choice="none")
    assert "weather" not in [one["function"]["name"] for one in place.sent[0]["tools"]]


async def test_the_older_functions_are_answered_in_their_form(place: Place) -> None:
    place.rules(calling("weather"), {"respond": {"text": "<<result>>"}})
    functions = [tool()["function"]]
    done = await place.ask("x", functions=functions)
    assert done.choices[0].finish_reason == "function_call"
    assert done.choices[0].message.function_call.name == "weather"
    history = [
        {"role": "user", "content": "x"},
        done.choices[0].message.model_dump(exclude_none=True),
        {"role": "function", "name": "weather", "content": "snow"},
    ]
    last = await place.ask(history, functions=functions)
    assert last.choices[0].message.content == "snow"
    assert place.sent[-1]["messages"][-1]["tool_name"] == "weather"


async def test_calls_in_a_history_reach_the_model_whole_and_each_has_a_result(place: Place) -> None:
    def called(*ids: str) -> dict[str, Any]:
        calls = [
            {"id": one, "type": "function", "function": {"name": f"f{one}", "arguments": '{"n": 1}'}} for one in ids
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    await place.ask(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "first"},
            called("1", "2"),
            {"role": "tool", "tool_call_id": "2", "content": "two"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ok"}]},
            {"role": "user", "content": "second"},
            {"role": "system", "content": "Speak French."},
        ]
    )  # fmt: skip
    system, first, asked, two, one, ok, second = place.sent[0]["messages"]
    assert system["role"] == "system"
    assert system["content"].endswith("Be brief.\n\nSpeak French.")
    assert (first["content"], ok["content"], second["content"]) == ("first", "ok", "second")
    assert [call["function"]["arguments"] for call in asked["tool_calls"]] == [{"n": 1}, {"n": 1}]
    assert (two["tool_name"], two["content"], one["tool_name"]) == ("f2", "two", "f1")
    assert "no result" in one["content"]


FORM: Any = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PARIS}}


@pytest.mark.parametrize(
    "said", ['{"city": "Paris"}', 'Here:\n```json\n{"city": "Paris"}\n```\nDone.', 'So: {"city":"Paris"}']
)
async def test_an_answer_has_the_form_that_was_asked_for(place: Place, said: str) -> None:
    place.rules(calling("probe", text="Let me look."), {"respond": {"text": said}})
    done = await place.ask("Where?", response_format=FORM)
    assert json.loads(done.choices[0].message.content) == {"city": "Paris"}
    first, second = place.sent
    # tools before the last step stay free
    assert first["tools"]
    assert second["tools"]
    assert "JSON schema" in first["messages"][0]["content"]


async def test_an_answer_without_the_form_is_asked_for_once_more_and_held_to_it(place: Place) -> None:
    place.rules(
        {"when": {"any_tools": True}, "respond": {"text": "It is in Paris."}},
        {"respond": {"text": '{"city": "Paris"}'}},
    )
    stream = await place.ask("Where?", response_format=FORM, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert json.loads(text) == {"city": "Paris"}
    free, held = place.sent
    assert "format" not in free
    assert held["format"] == PARIS
    assert "tools" not in held
    assert "not JSON" in held["messages"][-1]["content"]


async def test_an_answer_that_never_has_the_form_is_an_error_that_is_not_asked_for_again(place: Place) -> None:
    place.rules({"respond": {"text": '{"town": "Paris"}'}})
    with pytest.raises(openai.APIStatusError, match="city") as caught:
        await place.ask("Where?", response_format=FORM)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(place.sent) == 2
    place.rules({"respond": {"text": '{"city": "Par', "done_reason": "length"}})
    cut = await place.ask("Where?", response_format=FORM)
    assert (cut.choices[0].finish_reason, cut.choices[0].message.content) == ("length", '{"city": "Par')
    place.rules({"respond": {"text": '{"anything": 1}'}})
    free = await place.ask("Where?", response_format={"type": "json_object"})
    assert json.loads(free.choices[0].message.content) == {"anything": 1}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("local2-utility", "a title, please"),
        ("local2", "### Task:\nGenerate a title, please\n<chat_history>\nUSER: hi\n</chat_history>"),
    ],
)
async def test_housekeeping_is_one_plain_call_of_the_model(place: Place, model: str, said: str) -> None:
    place.rules({"respond": {"text": "Title"}})
    done = await place.ann.chat.completions.create(model=model, messages=[{"role": "user", "content": said}])
    assert done.choices[0].message.content == "Title"
    (sent,) = place.sent
    assert [message["role"] for message in sent["messages"]] == ["user"]
    assert "tools" not in sent
    assert sent["think"] is False
    assert not await place.on.published(RESPONSE_GENERATION)


async def test_sources_are_cited(place: Place) -> None:
    # a probe is no source; what was said before it is told as in a stream
    place.rules(calling("probe", text="Wait."), {"respond": {"text": "There."}})
    done = await place.ask("x")
    assert done.choices[0].message.content == "Wait.\n\nThere."
    assert done.choices[0].message.annotations == []


async def test_what_clients_usually_send_is_understood(place: Place) -> None:
    done = await place.ask(
        "x",
        extra_body={
            "stream": None, "stream_options": {"include_usage": None}, "max_tokens": -1, "stop": "", "seed": 2**40 + 5,
            "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "reasoning_effort": "none", "n": None,
            "response_format": {"type": "text"}, "user": "somebody", "store": False,
        },
    )  # fmt: skip
    assert done.choices[0].message.content == "You asked: x"
    (sent,) = place.sent
    wanted = {"seed": 5, "top_k": 3, "min_p": 0.1, "repeat_penalty": 1.1}
    assert {name: sent["options"].get(name) for name in wanted} == wanted
    assert "stop" not in sent["options"]
    assert sent["think"] is False


async def test_what_is_wrong_with_tools_and_forms_is_said(place: Place) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [tool(), tool()]}, "same name"),
        ({"tools": [tool(type=7)]}, "no JSON schema"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [tool()], "tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ]
    for fields, words in cases:
        with pytest.raises(openai.BadRequestError, match=words):
            await place.ask("x", **fields)
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o' here") as caught:
        await place.ann.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    assert not place.sent
