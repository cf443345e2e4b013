"""The leaderboard: who is drawn as one, what cannot be compared, and that nothing is worked out twice."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.reward.leaderboard import Leaderboard, label
from services.reward.ranking import BAR


def config(name: str) -> str:
    return f'{{"model":"{name}"}}'


def pair(number: int, a: str = "a", b: str = "b", **fields: Any) -> dict[str, Any]:
    winner = "A" if number % 3 else "B"
    row = {"config_a": config(a), "config_b": config(b), "winner": winner, "forward": winner, "swapped": winner,
           "session_id": f"s{number // 4}", "user_id": "ann", "intent": "question"}  # fmt: skip
    return {**row, **fields}


def rating(number: int, **fields: Any) -> dict[str, Any]:
    return {"config": config("a"), "reward": 1.0 if number % 4 else -1.0, "session_id": f"s{number}",
            "user_id": "ann", "intent": "code", **fields}  # fmt: skip


def test_sessions_are_drawn_unless_there_are_many_users() -> None:
    few = Leaderboard().make([pair(n) for n in range(40)], [rating(n) for n in range(9)], [], 50)
    assert (few["judge"]["resampled"], few["judge"]["clusters"]) == ("session", 10)
    assert (few["people"]["resampled"], few["people"]["clusters"]) == ("session", 9)
    many = Leaderboard().make([pair(n, user_id=f"u{n % 25}") for n in range(100)], [], [], 50)
    assert (many["judge"]["resampled"], many["judge"]["clusters"]) == ("user", 25)


@pytest.mark.parametrize(("users", "unit"), [(19, "session"), (20, "user")])
def test_users_are_drawn_from_twenty_on(users: int, unit: str) -> None:
    rows = [pair(n, user_id=f"u{n % users}", session_id=f"s{n}") for n in range(40)]
    shown = Leaderboard().make(rows, [], [], 50)["judge"]
    assert (shown["resampled"], shown["clusters"]) == (unit, users if unit == "user" else 40)


def test_a_verdict_whose_user_is_not_known_any_more_counts_by_its_session() -> None:
    rows = [pair(n, user_id=f"u{n % 25}" if n else None) for n in range(100)]
    assert Leaderboard().make(rows, [], [], 50)["judge"]["resampled"] == "session"


def test_it_says_which_configurations_cannot_be_compared() -> None:
    one = Leaderboard().make([pair(n) for n in range(8)], [], [], 50)
    assert (one["judge"]["groups"], one["judge"]["note"]) == (1, None)
    two = Leaderboard().make([pair(n, *("ab" if n % 2 else "cd")) for n in range(8)], [], [], 50)
    assert two["judge"]["groups"] == 2
    assert two["judge"]["note"].startswith("2 groups of configurations were never compared with each other")
    assert [row["group"] for row in two["judge"]["rows"]] == [1, 1, 2, 2]


def test_a_configuration_against_itself_tells_nothing_of_it() -> None:
    rows = [*(pair(n, "a", "a") for n in range(3)), *(pair(n) for n in range(4)), pair(9, "c", "c")]
    shown = Leaderboard().make(rows, [], [], 50)["judge"]
    assert shown["comparisons"] == 4
    assert [(row["name"], row["comparisons"]) for row in shown["rows"]] == [("a", 4), ("b", 4)]


def test_a_verdict_is_counted_for_who_won_it_and_its_orders_tell_of_the_judge() -> None:
    likes_first = [pair(n, winner="tie", forward="A", swapped="B") for n in range(6)]
    rows = [*likes_first, *(pair(n, winner="A", forward="A", swapped="A") for n in range(4))]
    shown = Leaderboard().make(rows, [], [], 50)["judge"]
    assert [(row["name"], row["wins"], row["ties"], row["losses"]) for row in shown["rows"]] == [
        ("a", 4, 6, 0),
        ("b", 0, 6, 4),
    ]
    assert shown["disagreement"] == 0.6
    assert shown["bias"] > 0.5


def test_each_intent_has_its_rankings_and_what_has_none_is_unknown() -> None:
    pairs = [pair(0, intent="writing"), pair(1, intent=None), pair(2, intent=None)]
    ratings = [rating(0, intent="code"), rating(1, intent="writing"), rating(2, intent="writing")]
    intents = Leaderboard().make(pairs, ratings, [], 50)["intents"]
    assert [(name, own["judge"]["comparisons"], own["people"]["comparisons"]) for name, own in intents.items()] == [
        ("code", 0, 1),
        ("unknown", 2, 0),
        ("writing", 1, 2),
    ]


GOOD, POOR = [(5, 1.0)], [(1, -0.5)]


@pytest.mark.parametrize(
    ("both", "cases", "share", "kappa"),
    [
        ([(5, 1.0), (4, 0.5), (4, -1.0), (1, -0.5), (2, 1.0)], 5, 0.6, (0.6 - 0.52) / 0.48),
        # a grade in the middle is neither, and so is a withdrawn vote
        ([(3, 1.0), (3, -1.0), (3, 0.0), (5, 0.0), (1, 0.0), *GOOD, *POOR], 2, 1.0, 1.0),
        (40 * GOOD + 40 * POOR + 10 * [(5, -1.0)] + 10 * [(1, 1.0)], 100, 0.8, 0.6),
        (9 * GOOD, 9, 1.0, None),
        (9 * [(5, -1.0)], 9, 0.0, 0.0),
        ([], 0, None, None),
    ],
)
def test_leaderboard_shows_agreement_of_judge_and_people(
    both: list[tuple[int, float]], cases: int, share: float | None, kappa: float | None
) -> None:
    rows = [{"score": score, "reward": reward} for score, reward in both]
    shown = Leaderboard().make([], [], rows, 50)["agreement"]
    assert (shown["cases"], shown["share"]) == (cases, share)
    assert shown["kappa"] == (kappa if kappa is None else pytest.approx(kappa))


def test_a_configuration_is_shown_with_its_name_and_as_it_is() -> None:
    rows = Leaderboard().make([], [rating(n) for n in range(8)], [], 50)["people"]["rows"]
    assert [(row["name"], row["config"]) for row in rows] == [("a", {"model": "a"}), (BAR, None)]


@pytest.mark.parametrize(
    ("configuration", "shown"),
    [
        ({}, "?"),
        ({"model": "m", "options": None, "prompt_version": ""}, "m"),
        ({"model": "m", "options": {"top_k": 40, "temperature": 0.1 + 0.2}}, "m · temperature=0.3 top_k=40"),
        ({"options": {"seed": 1_234_567}, "prompt_version": "v2"}, "? · seed=1234567 · prompt v2"),
    ],
)
def test_a_configuration_in_a_few_words(configuration: dict[str, Any], shown: str) -> None:
    assert label(configuration) == shown


def test_leaderboard_ranks_again_only_what_changed() -> None:
    board = Leaderboard()
    pairs, ratings = [pair(n) for n in range(8)], [rating(n) for n in range(5)]
    first = board.make(pairs, ratings, [], 50)
    again = board.make(pairs, ratings, [], 50)
    assert again["judge"] is first["judge"]
    changed = board.make([*pairs, pair(9, intent="chat")], ratings, [], 50)
    assert changed["people"] is first["people"]
    assert changed["judge"]["comparisons"] == 9
    assert changed["intents"].keys() == {*first["intents"], "chat"}
    more = board.make(pairs, ratings, [], 60)
    assert more["judge"] is not first["judge"]


def test_thirty_configurations_and_two_thousand_comparisons_take_a_second_of_work() -> None:
    """The processor's time, so that other work on the machine does not count."""
    rows = [
        pair(n, f"m{n % 30:02}", f"m{(n * 7 + n // 30 + 1) % 30:02}", session_id=f"s{n // 3}") for n in range(2_000)
    ]
    began = time.thread_time()
    shown = Leaderboard().make(rows, [], [], 1_000)
    assert len(shown["judge"]["rows"]) == 30
    assert time.thread_time() - began < 3
