"""A low grade reaches the model at the next turn of its session, once."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from support.stack import Stage, stage

from shared.bus.keys import grade_key
from shared.contracts import ChatTurnMessage
from shared.records.journal import EntryType

HISTORY = [ChatTurnMessage(role="user", content="a"), ChatTurnMessage(role="assistant", content="b")]
TOOL_RESULT = ChatTurnMessage(role="tool", content="sun", tool_call_id="x")
WORDS = "It does not say why."


async def graded(on: Stage, query_id: str, score: int | None, words: str = WORDS) -> None:
    stored = {"score": score, "feedback": words, "rubric": "realistic", "attempts": 1}
    await on.bus.link.call("SET", grade_key(f"{query_id}:A"), orjson.dumps(stored))


def system(on: Stage, number: int = -1) -> str:
    return str(on.server.requests[number].body["messages"][0]["content"])


async def asked(on: Stage, query: str, **fields: Any) -> str:
    query_id = await on.ask(query, "s1", **fields)
    await on.answer(query_id)
    return query_id


async def test_the_model_is_told_of_a_low_grade_once_and_not_in_the_users_name(redis_url: str) -> None:
    async with stage(redis_url) as on:
        first = await asked(on, "Why is the sky blue?")
        await graded(on, first, 2)
        second = await asked(on, "Thanks.")
        told = system(on)
        assert f'answer to "Why is the sky blue?" 2 of 5. The judge\'s reason: "{WORDS}"' in told
        said = [m["content"] for m in on.server.requests[-1].body["messages"][1:]]
        assert said == ["Why is the sky blue?", "You asked: Why is the sky blue?", "Thanks."]
        (notice,) = [entry.value() for entry in await on.journal(second) if entry.type is EntryType.NOTICE]
        assert (notice["code"], notice["about"], notice["score"]) == ("low_grade", first, 2)
        assert notice["note"] in told
        # not again, though its grade is still the last one that there is
        third = await asked(on, "And now?")
        assert "graded" not in system(on)
        assert WORDS not in orjson.dumps(on.server.requests[-1].body).decode()
        assert "low_grade" not in [e.value().get("code") for e in await on.journal(third)]
        # a later one is told again, also when the judge is a turn behind
        await graded(on, third, 1, "Empty.")
        await asked(on, "Go on.", mode="committee", personas=["skeptic"])
        member, final = system(on, -2), system(on)
        assert "Empty." in final
        assert "Empty." not in member
        assert not any(WORDS in turn.query + turn.answer for turn in await on.turns("s1"))


async def test_a_grade_that_comes_a_turn_late_is_told_and_a_better_one_since_ends_it(redis_url: str) -> None:
    async with stage(redis_url) as on:
        first = await asked(on, "one")
        second = await asked(on, "two")
        await graded(on, first, 1)
        await graded(on, second, 4)
        await asked(on, "three")
        assert "graded" not in system(on)
        await on.bus.link.call("DEL", grade_key(f"{second}:A"))
        await asked(on, "four")
        assert 'answer to "one" 1 of 5' in system(on)


@pytest.mark.parametrize(
    ("score", "values", "fields"),
    [
        (3, {}, {}),
        (None, {}, {}),
        (1, {"tell_low_grade": False}, {}),
        (1, {}, {"plain": True}),
        # a client's tool result continues a turn whose prompt had the note
        (1, {}, {"messages": HISTORY, "kept": True, "following": [TOOL_RESULT]}),
        (
            1,
            {},
            {"messages": [ChatTurnMessage(role="user", content="a"), ChatTurnMessage(role="assistant", content="b")]},
        ),
    ],
)
async def test_nothing_is_told_of_other_grades_or_where_it_is_not_wanted(
    score: int | None, values: dict[str, Any], fields: dict[str, Any], redis_url: str
) -> None:
    async with stage(redis_url, **values) as on:
        await graded(on, await asked(on, "one"), score)
        await asked(on, "two", **fields)
        assert "graded" not in orjson.dumps(on.server.requests[-1].body).decode()


async def test_low_grade_of_a_client_that_sends_its_history_is_told(redis_url: str) -> None:
    """The session stores its turns, too."""
    async with stage(redis_url) as on:
        await graded(on, await asked(on, "one", messages=[], kept=True), 1)
        await asked(on, "two", messages=HISTORY, kept=True)
        assert 'answer to "one" 1 of 5' in system(on)


async def test_a_grade_that_cannot_be_read_is_none(redis_url: str) -> None:
    async with stage(redis_url) as on:
        first = await asked(on, "one")
        for garbage in (b"\xff", b"[]", b'{"score": "2"}', b'{"feedback": 1}'):
            await on.bus.link.call("SET", grade_key(f"{first}:A"), garbage)
            await asked(on, "two")
            assert "graded" not in system(on)


async def test_respondent_b_is_told_nothing(redis_url: str) -> None:
    async with stage(redis_url, respondent_id="B", yield_above=None) as on:
        first = await on.ask("one", "s1", respondents=("B",))
        await on.answer(first, respondent="B")
        for name in "AB":
            await on.bus.link.call("SET", grade_key(f"{first}:{name}"), orjson.dumps({"score": 1, "feedback": WORDS}))
        await on.answer(await on.ask("two", "s1", respondents=("B",)), respondent="B")
        assert "graded" not in system(on)
