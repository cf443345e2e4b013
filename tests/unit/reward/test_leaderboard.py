"""The leaderboard: who is drawn as one, what cannot be compared, and that nothing is worked out twice."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.reward import leaderboard as module
from services.reward.leaderboard import Leaderboard


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


def test_only_what_changed_is_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: list[int] = []

    def counting(comparisons: Any, **options: Any) -> Any:
        ranked.append(len(comparisons))
        return real(comparisons, **options)

    real = module.rank
    monkeypatch.setattr(module, "rank", counting)
    board = Leaderboard()
    pairs, ratings = [pair(n) for n in range(8)], [rating(n) for n in range(5)]
    first = board.make(pairs, ratings, [], 50)
    # over all is the same as of the one intent
    assert sorted(ranked) == [0, 0, 5, 8]
    assert board.make(pairs, ratings, [], 50) == first
    assert len(ranked) == 4
    board.make([*pairs, pair(9, intent="chat")], ratings, [], 50)
    assert sorted(ranked[4:]) == [1, 9]


def test_thirty_configurations_and_two_thousand_comparisons_take_a_second_of_work() -> None:
    """The processor's time, so that other work on the machine does not count."""
    rows = [
        pair(n, f"m{n % 30:02}", f"m{(n * 7 + n // 30 + 1) % 30:02}", session_id=f"s{n // 3}") for n in range(2_000)
    ]
    began = time.thread_time()
    shown = Leaderboard().make(rows, [], [], 1_000)
    assert len(shown["judge"]["rows"]) == 30
    assert time.thread_time() - began < 3
