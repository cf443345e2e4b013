"""What makes two requests the same, what a chat's settings say of a query, and the trace that it belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.http.errors import ApiError
from services.gateway.http.keys import Principal
from services.gateway.http.schemas import ChatSettings
from services.gateway.queries.accept import Ask, Origin, with_settings
from shared.contracts import ChatTurnMessage, ClientTools

ANN = Principal("ann", "user")
PLAIN = Ask(query="What is new?")
# Another value for everything that a request may say.
OTHER: dict[str, Any] = {
    "query": "What is old?", "session_id": "s", "mode": "committee", "personas": ["Skeptic"], "rounds": 2,
    "messages": [ChatTurnMessage(role="user", content="x")], "options": {"seed": 1}, "tools": ["web_search"],
    "deadline_seconds": 5.0, "material": "a page", "attachments": ["f1"],
    "following": [ChatTurnMessage(role="assistant", content="y")],
    "client_tools": ClientTools(functions=[]), "answer_schema": {"type": "object"}, "think": True, "plain": True,
    "given": "responses", "chat": "c", "instead_of": "1-0", "system_prompt": "Be brief.",
    "time_zone": "Europe/Berlin",
}  # fmt: skip
# Which models there are, under which name the turn is kept, and of which a chore is, may change before a repeat.
NO_PART: dict[str, Any] = {"model": "other:1b", "kept": "s9", "about": "s9"}


def changed(**values: Any) -> Ask:
    return PLAIN.model_copy(update=values)


def test_a_request_that_says_anything_else_is_another_one() -> None:
    assert OTHER.keys() | NO_PART.keys() == Ask.model_fields.keys()
    digests = {name: changed(**{name: value}).digest() for name, value in OTHER.items()}
    assert len({*digests.values(), PLAIN.digest()}) == len(OTHER) + 1
    for name, value in NO_PART.items():
        assert changed(**{name: value}).digest() == PLAIN.digest()
    assert changed(options={"a": 1, "b": 2}).digest() == changed(options={"b": 2, "a": 1}).digest()
    said = [changed(messages=[ChatTurnMessage(role="user", content=text)]).digest() for text in ("x", "y")]
    assert said[0] != said[1]
    # no history and an empty one are the same
    assert changed(messages=[]).digest() == PLAIN.digest()
    assert changed(think=False).digest() == changed(plain=False).digest() == PLAIN.digest()


def test_a_request_is_the_same_in_every_release() -> None:
    assert PLAIN.digest() == "bdeada700f6cecd49ea7abccd1f57be9e039cf6bce5fbf09ed510a161e2ae578"


@pytest.mark.parametrize(
    ("ask", "whole"),
    [
        (PLAIN, False),
        (changed(answer_schema={}), True),
        (changed(client_tools=ClientTools(functions=[])), False),
        (changed(client_tools=ClientTools(functions=[], choice="required")), True),
        (changed(client_tools=ClientTools(functions=[], choice="f")), True),
    ],
)
def test_an_answer_whose_form_is_looked_at_counts_as_a_whole(ask: Ask, whole: bool) -> None:
    assert ask.whole is whole


def test_a_chat_is_asked_as_it_is_set_and_what_the_query_says_itself_stays() -> None:
    chat = ChatSettings(model="m", temperature=0.5, system_prompt="Be brief.", mode="committee", rounds=3)
    assert with_settings(PLAIN, chat) == changed(model="m", options={"temperature": 0.5}, system_prompt="Be brief.")
    own = changed(model="n", options={"temperature": 0, "seed": 1}, system_prompt="")
    assert with_settings(own, chat) == own
    assert with_settings(changed(options={"seed": 1}), chat).options == {"temperature": 0.5, "seed": 1}
    assert with_settings(PLAIN, ChatSettings(temperature=0)).options == {"temperature": 0}
    assert with_settings(PLAIN, ChatSettings()) == PLAIN


@pytest.mark.parametrize("key", ["k", "x" * 255, "!~"])
def test_a_key_is_of_its_user(key: str) -> None:
    once = Origin(ANN, key).once
    assert once == Origin(ANN, key).once
    assert once not in (Origin(Principal("bob", "user"), key).once, Origin(ANN, f"{key[:-1]}?").once)
    assert key not in once


@pytest.mark.parametrize("key", ["", "x" * 256, "a b", "a\n", "ä", "\x7f"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ApiError) as refused:
        Origin(ANN, key)
    assert (refused.value.status_code, refused.value.code) == (400, "bad_idempotency_key")


def test_a_query_goes_on_with_the_clients_trace_or_begins_one() -> None:
    given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert Origin(ANN, traceparent=given).trace == given
    begun = [Origin(ANN, traceparent=given).trace for given in (None, "", "00-xyz-1-01")]
    assert len(set(begun)) == 3
    for trace in begun:
        # it is one that the next would go on with
        assert Origin(ANN, traceparent=trace).trace == trace
