"""The test of an experiment: right however often it is looked at, and as sure as its conversations allow."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.sequential import Winner, trial


def drawn(rng: random.Random, share: float, number: int, session: int = 1) -> list[tuple[int, Winner]]:
    return [(n // session, "B" if rng.random() < share else "A") for n in range(number)]


def beta_binomial(wins: int, losses: int, narrow: int = 1) -> float:
    """The capital of a stake after so many wins and losses, in closed form (Robbins 1970); narrow: both parameters of
    the beta distribution over which it is spread."""

    def beta(a: int, b: int) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    return beta(wins + narrow, losses + narrow) - beta(narrow, narrow) + (wins + losses) * math.log(2)


def test_nothing_is_known_before_the_first_verdict() -> None:
    nothing = trial([])
    assert (nothing.decision, nothing.share, nothing.low, nothing.high, nothing.p_value) == ("not yet", None, 0, 1, 1)
    assert trial([(1, "tie"), (2, "tie")]).ties == 2
    assert trial([(1, "tie")]).share is None


def test_a_difference_is_found_and_its_side_named() -> None:
    better = trial(drawn(random.Random(1), 0.75, 200))
    worse = trial(drawn(random.Random(1), 0.25, 200))
    assert (better.decision, worse.decision) == ("better", "worse")
    assert 0.5 < better.low < 0.75 < better.high < 1
    assert 0 < worse.low < 0.25 < worse.high < 0.5
    # of a small one too
    small = [trial([(n, "B" if n % 5 < wins else "A") for n in range(600)]).decision for wins in (2, 3)]
    assert small == ["worse", "better"]
    assert better.p_value <= 0.05
    assert better.more is None


def test_what_was_decided_stays_decided_and_says_when() -> None:
    first = [(n, "B") for n in range(12)]
    decided = trial(first)  # type: ignore[arg-type]
    assert decided.decision == "better"
    assert decided.decided_at is not None
    assert decided.decided_at < 12
    later = trial([*first, *((100 + n, "A") for n in range(20))])  # type: ignore[list-item]
    assert (later.decision, later.decided_at) == ("better", decided.decided_at)
    assert later.low < 0.5
    assert later.p_value == decided.p_value


def test_ties_count_and_decide_nothing() -> None:
    verdicts = drawn(random.Random(2), 0.6, 60)
    ties: list[tuple[int, Winner]] = [(1_000 + n, "tie") for n in range(500)]
    with_ties = trial([*ties, *verdicts])
    alone = trial(verdicts)
    assert with_ties.ties == 500
    assert (with_ties.share, with_ties.low, with_ties.high) == (alone.share, alone.low, alone.high)
    assert with_ties.p_value == alone.p_value


def test_a_long_conversation_counts_once() -> None:
    once = trial([(1, "B"), (2, "A"), (3, "B")])
    long = trial([(1, "B")] * 50 + [(2, "A")] * 50 + [(3, "B")] * 50)
    assert long.verdicts == 150
    assert (long.conversations, long.share, long.low, long.high) == (3, once.share, once.low, once.high)
    assert trial([(1, "B")] * 500).decision == "not yet"


def test_conversations_that_go_on_side_by_side_count_as_if_one_came_after_the_other() -> None:
    rng = random.Random(4)
    after = drawn(rng, 0.6, 80, session=8)
    beside = sorted(after, key=lambda _: rng.random())
    first, second = trial(after), trial(beside)
    assert first.share == pytest.approx(second.share)
    assert (first.low, first.high) == (pytest.approx(second.low), pytest.approx(second.high))


def test_with_one_verdict_in_each_conversation_it_is_the_mixture_ratio_test() -> None:
    """Half of the stakes lie evenly: the capital is at least half of that test's, and of the same order."""
    for wins, losses in ((20, 5), (40, 20), (30, 30)):
        verdicts: list[tuple[int, Winner]] = [(n, "B" if n < wins else "A") for n in range(wins + losses)]
        random.Random(wins).shuffle(verdicts)
        p_value = trial(verdicts).p_value
        assert -math.log(p_value) >= beta_binomial(wins, losses) - math.log(2) - 0.01


@pytest.mark.parametrize(("wins", "losses"), [(7, 0), (20, 5), (40, 3), (5, 60)])
def test_half_of_the_stakes_are_on_moderate_differences_and_half_on_all_alike(wins: int, losses: int) -> None:
    fewer: Winner = "A" if wins > losses else "B"
    more: Winner = "B" if wins > losses else "A"
    said = [fewer] * min(wins, losses) + [more] * max(wins, losses)
    capital = (math.exp(beta_binomial(wins, losses)) + math.exp(beta_binomial(wins, losses, 8))) / 2
    assert trial(enumerate(said)).p_value == pytest.approx(1 / capital, rel=0.01)
    for winner in (fewer, more):
        assert trial([(1, winner)]).p_value == pytest.approx(1)


def test_looking_after_every_verdict_finds_nothing_where_nothing_is() -> None:
    """A short form; the full one is in the evaluation of experiments."""
    found = [trial(drawn(random.Random(seed), 0.5, 150)).decision for seed in range(80)]
    assert found.count("better") + found.count("worse") <= 8


def test_it_says_how_many_conversations_are_still_needed() -> None:
    verdicts: list[tuple[int, Winner]] = [(n, "B" if n % 5 < 3 else "A") for n in range(40)]
    some = trial(verdicts)
    assert some.decision == "not yet"
    assert some.more is not None
    grown: list[tuple[int, Winner]] = [(n, "B" if n % 5 < 3 else "A") for n in range(40 + some.more + 5)]
    assert trial(grown).decision == "better"
    assert trial([(1, "A"), (2, "B")]).more is None
    # more than a hundred thousand
    assert trial([(n, "B" if n % 1_000 < 501 else "A") for n in range(1_000)]).more is None


def test_how_many_are_still_needed_is_right_to_one() -> None:
    decided = trial([(n, "B") for n in range(20)]).decided_at
    assert decided is not None
    for before in range(1, decided):
        some = trial([(n, "B") for n in range(before)])
        assert (some.decision, some.more) == ("not yet", decided - before)


def test_a_smaller_alpha_wants_more() -> None:
    verdicts = drawn(random.Random(6), 0.65, 90)
    usual, strict = trial(verdicts), trial(verdicts, 0.05 / 7)
    assert strict.low < usual.low
    assert strict.high > usual.high
    assert strict.p_value == usual.p_value


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["A", "B", "tie"])), max_size=40))
def test_turning_every_verdict_round_turns_the_result_round(verdicts: list[tuple[int, Winner]]) -> None:
    turned: dict[Winner, Winner] = {"A": "B", "B": "A", "tie": "tie"}
    one, other = trial(verdicts), trial([(session, turned[winner]) for session, winner in verdicts])
    assert {one.decision, other.decision} in ({"not yet"}, {"better", "worse"})
    assert (one.wins, one.ties, one.losses) == (other.losses, other.ties, other.wins)
    if one.share is not None and other.share is not None:
        assert one.share == pytest.approx(1 - other.share)
        assert one.low == pytest.approx(1 - other.high, abs=1e-6)
        assert one.low <= one.share <= one.high
