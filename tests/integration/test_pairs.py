"""Two answers to one query meet: in any order, once, for so long, and no more than so many wait."""

from __future__ import annotations

import orjson
import pytest
import redis

from services.critic.pairs import Half, Offer, Pairs
from shared.bus import Bus
from shared.bus.keys import PAIRS_WAITING, pair_key
from shared.contracts import RespondentId

NOTHING = Offer(None, [])


def half(side: str, answer: str = "") -> Half:
    return Half(f"1-0:{side}", answer or f"as {side} says", "", 4, {"model": side}, "the question", "realistic")


@pytest.mark.parametrize(("first", "second"), [("A", "B"), ("B", "A")])
async def test_whoever_brings_the_second_answer_judges_the_pair(
    bus: Bus, first: RespondentId, second: RespondentId
) -> None:
    pairs = Pairs(bus)
    assert await pairs.offer("1-0", first, half(first), 9) == NOTHING
    assert await pairs.waiting() == 1
    both = Offer((half("A"), half("B")), [])
    assert await pairs.offer("1-0", second, half(second), 9) == both
    assert await pairs.waiting() == 0
    # again after a crash: the entry that had the pair has it, with what was said first, and the other never
    assert await pairs.offer("1-0", first, half(first), 9) == NOTHING
    assert await pairs.offer("1-0", second, half(second, "otherwise"), 9) == both


async def test_a_pair_that_is_over_takes_no_answers_and_waits_for_none(bus: Bus, raw: redis.Redis) -> None:
    pairs = Pairs(bus, retention=600)
    assert await pairs.offer("1-0", "A", half("A"), 9) == NOTHING
    await pairs.close("1-0")
    assert await pairs.waiting() == 0
    assert await pairs.offer("1-0", "A", half("A"), 9) == NOTHING
    assert await pairs.offer("1-0", "B", half("B"), 9) == NOTHING
    assert (await pairs.waiting(), raw.hgetall(pair_key("1-0"))) == (0, {b"closed": b"1"})
    assert 0 < raw.ttl(pair_key("1-0")) <= 600


def age(raw: redis.Redis, query_id: str, ms: int) -> None:
    """Let an answer have waited so much longer for its counterpart."""
    raw.zincrby(PAIRS_WAITING, -ms, query_id)


async def test_the_oldest_are_given_up_for_room(bus: Bus, raw: redis.Redis) -> None:
    pairs = Pairs(bus)
    for number, ms in ((3, 30), (1, 20), (2, 10)):
        assert await pairs.offer(f"{number}-0", "A", half("A"), 3) == NOTHING
        age(raw, f"{number}-0", ms * 1_000)
    # An answer that is offered again waits from its first offer on.
    assert await pairs.offer("3-0", "A", half("A"), 3) == NOTHING
    assert await pairs.offer("4-0", "A", half("A"), 2) == Offer(None, ["3-0", "1-0"])
    assert [raw.exists(pair_key(f"{number}-0")) for number in (1, 2, 3, 4)] == [0, 1, 0, 1]
    assert await pairs.waiting() == 2
    # the counterpart of one that was given up waits in its turn
    assert await pairs.offer("3-0", "B", half("B"), 9) == NOTHING


@pytest.mark.parametrize(("retention", "seconds"), [(600, 600), (86_400, 3_600)])
async def test_what_waits_is_forgotten_when_its_counterpart_is_late(
    bus: Bus, raw: redis.Redis, retention: int, seconds: int
) -> None:
    pairs = Pairs(bus, retention)
    await pairs.offer("1-0", "A", half("A"), 9)
    for key in (pair_key("1-0"), PAIRS_WAITING):
        assert seconds - 10 < raw.ttl(key) <= seconds
    age(raw, "1-0", (seconds - 60) * 1_000)
    await pairs.offer("2-0", "A", half("A"), 9)
    assert await pairs.waiting() == 2
    age(raw, "1-0", 60_000)
    await pairs.offer("3-0", "A", half("A"), 9)
    assert await pairs.waiting() == 2
    # a pair that is judged is kept no longer either, from its last answer on
    raw.expire(pair_key("2-0"), 5)
    assert (await pairs.offer("2-0", "B", half("B"), 9)).pair
    assert raw.ttl(pair_key("2-0")) > 5


async def test_an_answer_of_a_later_release_is_read_as_far_as_it_is_known(bus: Bus, raw: redis.Redis) -> None:
    raw.hset(pair_key("1-0"), "A", orjson.dumps({**orjson.loads(half("A").dump()), "newer": 1}))
    found = await Pairs(bus).offer("1-0", "B", half("B"), 9)
    assert found.pair == (half("A"), half("B"))
