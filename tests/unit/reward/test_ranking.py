"""The ranking recovers what was planted, says how sure it is, and is not fooled by a judge's bias."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.ranking import (
    BAR,
    Comparison,
    Outcome,
    Ranking,
    from_rating,
    rank,
)

STRENGTHS = {"w": 0.9, "x": 0.3, "y": -0.2, "z": -1.0}


def judged(rng: random.Random, names: list[str], bias: float) -> Comparison:
    """A judge that adds `bias` to whatever it reads first, and decides by a logistic draw each time."""
    a, b = rng.sample(names, 2)
    ahead = STRENGTHS[a] - STRENGTHS[b]
    forward: Outcome = "A" if rng.random() < 1 / (1 + math.exp(-(ahead + bias))) else "B"
    swapped: Outcome = "A" if rng.random() < 1 / (1 + math.exp(-(ahead - bias))) else "B"
    return Comparison(a, b, forward if forward == swapped else "tie", forward, swapped)


def test_the_planted_order_strengths_and_bias_come_back() -> None:
    rng = random.Random(3)
    result = rank([judged(rng, list(STRENGTHS), 0.7) for _ in range(3000)], samples=200)
    assert [row.name for row in result.rows] == ["w", "x", "y", "z"]
    for row in result.rows:
        assert row.strength == pytest.approx(STRENGTHS[row.name], abs=0.2)
        assert row.low < row.strength < row.high
    assert result.bias == pytest.approx(0.7, abs=0.1)
    assert result.disagreement is not None
    assert 0.2 < result.disagreement < 0.6


def test_intervals_of_many_samples_are_those_of_few() -> None:
    """400 kinds of sessions: at most 5,000 samples of them are fitted at once."""
    met = [
        Comparison("a", "b", winner, cluster=(wins, losses))
        for wins in range(1, 21)
        for losses in range(1, 21)
        for winner, times in (("A", wins), ("B", losses))
        for _ in range(times)
    ]
    few, many = (rank(met, samples=samples).rows[0] for samples in (400, 10_001))
    assert [many.low, many.high] == pytest.approx([few.low, few.high], abs=0.01)
    assert many.low < 0 < many.high


def test_fit_is_the_maximum_of_the_likelihood() -> None:
    rng = random.Random(8)
    met = [judged(rng, list(STRENGTHS), 0.7) for _ in range(60)]
    met += [Comparison("w", "x", "B"), Comparison("y", "z", "tie"), Comparison("z", "w", "B")]
    found = rank(met, samples=20)
    strength = {row.name: row.strength for row in found.rows}
    assert sum(strength.values()) == pytest.approx(0, abs=1e-9)
    assert found.bias is not None
    pull = dict.fromkeys([*strength, "bias"], 0.0)
    for c in met:
        seen = ((c.winner, 0),) if c.forward is None else ((c.forward, 1), (c.swapped, -1))
        for winner, order in seen:
            expected = 1 / (1 + math.exp(-(strength[c.a] - strength[c.b] + order * found.bias)))
            missing = {"A": 1.0, "B": 0.0, "tie": 0.5}[str(winner)] - expected
            pull[c.a] += missing
            pull[c.b] -= missing
            pull["bias"] += order * missing
    # The gradient is that of the prior, which keeps each strength finite.
    assert pull == pytest.approx({name: 0.002 * value for name, value in (*strength.items(), ("bias", found.bias))})


def test_swapping_removes_a_bias_that_one_order_puts_into_the_ranking() -> None:
    """The weaker configuration always stands first: judged in that order alone, it seems to be the stronger one."""
    rng = random.Random(5)
    both = []
    for _ in range(2000):
        forward: Outcome = "A" if rng.random() < 1 / (1 + math.exp(-(-0.4 + 1.0))) else "B"
        swapped: Outcome = "A" if rng.random() < 1 / (1 + math.exp(-(-0.4 - 1.0))) else "B"
        both.append(Comparison("weak", "strong", forward if forward == swapped else "tie", forward, swapped))
    single = rank([Comparison(c.a, c.b, c.forward or "tie") for c in both], samples=100)
    swapped_too = rank(both, samples=100)
    assert single.rows[0].name == "weak"
    assert single.rows[0].low > single.rows[1].high
    assert swapped_too.rows[0].name == "strong"
    gap = swapped_too.rows[0].strength - swapped_too.rows[1].strength
    assert gap == pytest.approx(0.4, abs=0.15)


def test_about_95_of_100_intervals_hold_the_truth() -> None:
    """A short form; the full one is in the evaluation of the ranking."""
    rng = random.Random(11)
    truth = {name: s - np.mean(list(STRENGTHS.values())) for name, s in STRENGTHS.items()}
    hits = [
        row.low <= truth[row.name] <= row.high
        for _ in range(60)
        for row in rank([judged(rng, list(STRENGTHS), 0.5) for _ in range(300)], samples=200).rows
    ]
    assert 0.88 <= np.mean(hits) <= 0.99


def test_who_never_lost_has_a_finite_strength_and_comes_first() -> None:
    result = rank([Comparison("a", "b", "A")] * 5 + [Comparison("b", "c", "A")] * 5, samples=100)
    assert [row.name for row in result.rows] == ["a", "b", "c"]
    assert all(math.isfinite(row.high) and abs(row.high) < 50 for row in result.rows)
    assert (result.rows[0].wins, result.rows[0].ties, result.rows[0].losses) == (5, 0, 0)


def test_each_side_has_its_own_wins_ties_and_losses() -> None:
    met: list[Outcome] = ["A", "A", "A", "B", "B", "tie"]
    found = {
        row.name: (row.wins, row.ties, row.losses) for row in rank([Comparison("a", "b", one) for one in met]).rows
    }
    assert found == {"a": (3, 1, 2), "b": (2, 1, 3)}


@pytest.mark.parametrize(
    ("wins", "least", "most"), [(1, 0.0, 0.1), (5, 0.35, 0.65), (10, 0.6, 0.8), (200, 0.97, 0.995)]
)
def test_who_never_lost_has_an_interval_as_wide_as_so_few_wins_allow(wins: int, least: float, most: float) -> None:
    """Clopper and Pearson: 0.025, 0.48, 0.69, 0.98."""
    for comparison in (Comparison("a", "b", "A"), Comparison("a", "b", "A", "A", "A")):
        first = rank([comparison] * wins, samples=1000).rows[0]
        assert first.name == "a"
        assert least <= first.win_rate_low <= most
        assert first.win_rate_high > 0.9


@pytest.mark.parametrize(
    ("opponents", "wins", "least", "most"), [(1, 5, 0.35, 0.65), (2, 5, 0.35, 0.7), (3, 5, 0.35, 0.7)]
)
def test_winner_of_each_of_few_matches_keeps_a_wide_interval(
    opponents: int, wins: int, least: float, most: float
) -> None:
    first = rank([Comparison("a", f"b{n}", "A") for n in range(opponents)] * wins, samples=1000).rows[0]
    assert first.name == "a"
    assert least <= first.win_rate_low <= most


def test_only_ties_are_equal_strengths() -> None:
    result = rank([Comparison("a", "b", "tie", "A", "B")] * 20, samples=100)
    assert [row.strength for row in result.rows] == pytest.approx([0, 0], abs=1e-6)
    assert result.disagreement == 1.0
    assert result.bias is not None
    assert result.bias > 2
    assert result.bias_low is not None
    assert result.bias_high is not None
    assert 0 < result.bias_low <= result.bias <= result.bias_high


def test_nothing_to_compare_is_an_empty_ranking() -> None:
    assert rank([]) == Ranking([], 0, None, None, None, None, 0, 0)
    assert rank([Comparison("a", "a", "A")]) == Ranking([], 1, None, None, None, None, 0, 0)
    assert rank([Comparison("a", "a", "tie", "A", "B")] * 2) == Ranking([], 2, None, None, None, 1.0, 0, 0)


@pytest.mark.parametrize("orders", [{"forward": "B"}, {"swapped": "B"}])
def test_of_an_outcome_with_one_order_only_its_winner_counts(orders: dict[str, Any]) -> None:
    found = rank([Comparison("a", "b", "A", **orders)] * 3, samples=20)
    assert found == rank([Comparison("a", "b", "A")] * 3, samples=20)
    assert (found.bias, found.bias_low, found.bias_high, found.disagreement) == (None, None, None, None)


def test_who_met_nobody_else_is_not_ranked() -> None:
    result = rank([Comparison("a", "b", "A")] * 2 + [Comparison("c", "c", "A")] * 9, samples=20)
    assert ([row.name for row in result.rows], result.groups) == (["a", "b"], 1)
    assert (result.comparisons, result.clusters) == (11, 2)


def test_configurations_that_never_met_are_not_ranked_against_each_other() -> None:
    """After an edit of the prompt both respondents are new: nothing says how they stand to those before."""
    before = [Comparison("v1-A", "v1-B", "A" if n % 3 else "B") for n in range(90)]
    after = [Comparison("v2-A", "v2-B", "B" if n % 4 else "A") for n in range(120)]
    result = rank(before + after, samples=200)
    assert result.groups == 2
    assert [(row.name, row.group) for row in result.rows] == [("v2-B", 1), ("v2-A", 1), ("v1-A", 2), ("v1-B", 2)]
    for group in (1, 2):
        rows = [row for row in result.rows if row.group == group]
        assert sum(row.strength for row in rows) == pytest.approx(0, abs=1e-6)
        assert sum(row.win_rate for row in rows) == pytest.approx(1)
    # each group is what it would be alone
    alone = rank(after, samples=200)
    for row, own in zip(result.rows[:2], alone.rows, strict=True):
        assert (row.name, row.wins) == (own.name, own.wins)
        assert row.strength == pytest.approx(own.strength, abs=1e-6)


def test_groups_of_as_many_comparisons_stand_in_the_order_of_their_names() -> None:
    for pairs in (("af", "be", "cd"), ("dc", "eb", "fa")):
        result = rank([Comparison(a, b, "tie") for a, b in pairs], samples=20)
        assert {row.name: row.group for row in result.rows} == {"a": 1, "f": 1, "b": 2, "e": 2, "c": 3, "d": 3}


def test_one_comparison_connects_two_groups() -> None:
    apart = [Comparison("a", "b", "A"), Comparison("c", "d", "A")] * 20
    assert rank(apart, samples=50).groups == 2
    joined = rank([*apart, Comparison("b", "c", "B")], samples=50)
    assert joined.groups == 1
    assert {row.group for row in joined.rows} == {1}


def test_what_one_conversation_says_ten_times_is_one_piece_of_evidence() -> None:
    said = [(n, "A" if n % 3 else "B") for n in range(30)]
    once = rank([Comparison("a", "b", winner, cluster=n) for n, winner in said], samples=400)
    repeated = rank([Comparison("a", "b", winner, cluster=n) for n, winner in said for _ in range(10)], samples=400)
    apart = rank([Comparison("a", "b", winner) for _, winner in said for _ in range(10)], samples=400)
    assert (once.clusters, repeated.clusters, apart.clusters) == (30, 30, 300)

    def width(result: Ranking) -> float:
        return result.rows[0].high - result.rows[0].low

    assert width(repeated) == pytest.approx(width(once), rel=0.15)
    assert width(apart) < width(repeated) / 2


def test_the_other_way_round_the_same_comparisons_are_drawn_alike() -> None:
    said: list[tuple[str, str, Outcome]] = [("a", "b", "A"), ("b", "c", "B"), ("a", "c", "tie"), ("c", "a", "A")]
    met = [Comparison(a, b, winner, "A", winner, cluster) for a, b, winner in said for cluster in (None, *"stu")]
    assert rank(met[::-1], samples=20) == rank(met, samples=20)


OUTCOMES: st.SearchStrategy[Outcome] = st.sampled_from(["A", "B", "tie"])
COMPARISONS = st.lists(
    st.builds(Comparison, a=st.sampled_from("ab"), b=st.sampled_from("cde"), winner=OUTCOMES,
              forward=OUTCOMES, swapped=OUTCOMES, cluster=st.sampled_from([None, "s", "t", "u"])),
    min_size=1, max_size=30,
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(COMPARISONS, st.randoms(use_true_random=False))
def test_the_order_of_comparisons_does_not_matter(comparisons: list[Comparison], rng: random.Random) -> None:
    shuffled = list(comparisons)
    rng.shuffle(shuffled)
    ranked = rank(comparisons, samples=50)
    assert ranked.rows
    assert rank(shuffled, samples=50) == ranked


@settings(max_examples=30, deadline=None)
@given(COMPARISONS)
def test_naming_the_sides_the_other_way_round_changes_no_strength(comparisons: list[Comparison]) -> None:
    other: dict[Outcome, Outcome] = {"A": "B", "B": "A", "tie": "tie"}
    mirrored = [
        Comparison(c.b, c.a, other[c.winner], other[c.swapped or "tie"], other[c.forward or "tie"]) for c in comparisons
    ]
    strengths = {row.name: row.strength for row in rank(comparisons, samples=50).rows}
    for row in rank(mirrored, samples=50).rows:
        assert row.strength == pytest.approx(strengths[row.name], abs=1e-5)


def test_votes_rank_configurations_by_how_often_people_are_content() -> None:
    votes = [("good", 1.0)] * 18 + [("good", -1.0)] * 2 + [("poor", 1.0)] * 6 + [("poor", -0.5)] * 14
    result = rank([from_rating(name, reward) for name, reward in votes], samples=200)
    assert [row.name for row in result.rows] == ["good", BAR, "poor"]
    assert result.bias is None
    bar = next(row.strength for row in result.rows if row.name == BAR)
    assert result.rows[0].strength - bar == pytest.approx(math.log(18 / 2), abs=0.1)


def test_a_vote_is_won_or_lost_against_what_readers_expect_or_neither() -> None:
    assert from_rating("x", 0.5, "s") == Comparison("x", BAR, "A", cluster="s")
    assert from_rating("x", 0.0) == Comparison("x", BAR, "tie")
    assert from_rating("x", -0.5) == Comparison("x", BAR, "B")
