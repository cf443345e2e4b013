"""Which queries a respondent leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.generator.settings import GeneratorSettings
from services.generator.shadow import is_left_out
from shared.contracts import ClientTools, QueryReceived
from shared.participant.sampling import one_in

IN_SAMPLE, OUTSIDE = (next(f"{n}-1" for n in range(100) if one_in(7, f"{n}-1") is wanted) for wanted in (True, False))


async def left_out(
    settings: dict[str, Any], query: dict[str, Any], unfinished: int, *, deliveries: int = 1, query_id: str = IN_SAMPLE
) -> bool:
    async def count() -> int:
        return unfinished

    payload = QueryReceived(**{"session_id": "s", "query": "Why?", "user_id": "ann", **query})
    message: Any = SimpleNamespace(entry_id=query_id, payload=payload, deliveries=deliveries)
    return await is_left_out(GeneratorSettings(**settings), message, count)


@pytest.mark.parametrize(
    ("settings", "query", "unfinished", "expected"),
    [
        pytest.param({}, {}, 0, False, id="idle"),
        pytest.param({}, {}, 20, False, id="at-the-limit"),
        pytest.param({}, {}, 21, True, id="over-the-limit"),
        pytest.param({"leave_out_above": None}, {}, 10**6, False, id="no-limit"),
        pytest.param({"leave_out_above": 0}, {}, 1, True, id="limit-of-zero"),
        pytest.param({}, {"plain": True}, 0, True, id="plain-call"),
        pytest.param({}, {"client_tools": ClientTools(functions=[])}, 0, True, id="client-tools"),
    ],
)
async def test_shadow_leaves_out_queries_while_many_are_unfinished(
    settings: dict[str, Any], query: dict[str, Any], unfinished: int, expected: bool
) -> None:
    assert await left_out({"respondent_id": "B", **settings}, query, unfinished) is expected


async def test_shadow_answers_a_sample() -> None:
    settings = {"respondent_id": "B", "answer_one_in": 7}
    assert not await left_out(settings, {}, 0, query_id=IN_SAMPLE)
    assert await left_out(settings, {}, 0, query_id=OUTSIDE)


async def test_shadow_continues_a_query_that_another_replica_began() -> None:
    settings = {"respondent_id": "B", "answer_one_in": 7}
    assert not await left_out(settings, {}, 99, deliveries=2, query_id=OUTSIDE)


async def test_respondent_a_leaves_nothing_out() -> None:
    settings = {"respondent_id": "A", "answer_one_in": 7, "leave_out_above": 0}
    assert not await left_out(settings, {"client_tools": ClientTools(functions=[])}, 99, query_id=OUTSIDE)
