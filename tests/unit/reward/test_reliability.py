"""What is known of the judge: figures that were worked out elsewhere, planted faults that are found, and no others."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from services.reward.reliability import kappa, length_pull, report, share


def pair(winner: str = "A", forward: str = "A", swapped: str = "A", a: int = 100, b: int = 100, **more: Any) -> Any:
    return {"winner": winner, "forward": forward, "swapped": swapped, "length_a": a, "length_b": b,
            "model_a": "one", "model_b": "two", **more}  # fmt: skip


def rated(score: int, reward: float) -> dict[str, Any]:
    return {"score": score, "reward": reward}


def test_kappa_and_its_interval() -> None:
    """The textbook's 2 × 2 table of 20, 5, 10, 15: kappa 0.4, standard error 0.128."""
    table = {(True, True): 20, (True, False): 5, (False, True): 10, (False, False): 15}
    found = kappa([said for said, times in table.items() for _ in range(times)])
    assert (found.cases, found.value) == (50, pytest.approx(0.4))
    assert found.low is not None
    assert found.high is not None
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * 0.1271, abs=0.005)
    assert kappa([]).value is None
    assert kappa([(True, True)] * 9).value is None
    assert kappa([(True, True), (False, False)]).value == 1


def test_the_interval_of_kappa_holds_the_truth_about_as_often_as_it_says() -> None:
    rng, held = random.Random(1), 0
    for _ in range(300):
        pairs = []
        for _ in range(120):
            good = rng.random() < 0.6
            pairs.append((good if rng.random() < 0.85 else not good, good))
        found = kappa(pairs)
        assert found.low is not None
        assert found.high is not None
        # agreement 0.85; chance: judge says good in 0.6 · 0.85 + 0.4 · 0.15 = 0.57
        chance = 0.57 * 0.6 + 0.43 * 0.4
        held += found.low <= (0.85 - chance) / (1 - chance) <= found.high
    assert held >= 275


def test_a_share_has_wilsons_interval() -> None:
    assert share(0, 0).value is None
    found = share(8, 10)
    assert (found.value, found.low, found.high) == (
        0.8,
        pytest.approx(0.4902, abs=1e-3),
        pytest.approx(0.9433, abs=1e-3),
    )
    assert share(0, 10).low == 0
    assert share(10, 10).high == pytest.approx(1)


def test_the_pull_of_length_comes_back() -> None:
    rng = random.Random(2)

    def drawn(slope: float) -> list[tuple[float, bool]]:
        longer = [rng.gauss(0, 1) for _ in range(2_000)]
        return [(x, rng.random() < 1 / (1 + math.exp(-(0.5 + slope * x)))) for x in longer]

    for slope in (1.2, 0.0, -0.7):
        found = length_pull(drawn(slope))
        assert found.value == pytest.approx(slope, abs=0.2)
        assert found.low is not None
        assert found.high is not None
        assert found.high - found.low == pytest.approx(0.22, abs=0.1)
    # without an exception it is still finite
    told = length_pull([(n / 10, n > 0) for n in range(-30, 31) if n])
    assert told.value is not None
    assert 0 < told.value < 1_000
    assert length_pull([(0.0, True)] * 60).value is None
    assert length_pull([(1.0, True), (2.0, False)]).value is None


def test_a_judge_without_faults_is_not_warned_of() -> None:
    rng = random.Random(3)
    people = [rated(5, 1.0)] * 40 + [rated(1, -1.0)] * 40 + [rated(5, -1.0)] * 5 + [rated(3, 1.0)] * 9
    verdicts = []
    for _ in range(200):
        side = rng.choice("AB")
        verdicts.append(pair(side, side, side, rng.randint(50, 500), rng.randint(50, 500)))
    found = report(people, verdicts, {"5": 90, "none": 2}, ["judge"])
    assert found["warnings"] == []
    assert found["agreement"]["cases"] == 85
    assert (found["disagreement"]["value"], found["own_model"]["cases"]) == (0, 0)


def test_each_fault_is_told_in_plain_words() -> None:
    people = [rated(5, 1.0), rated(5, -1.0), rated(1, 1.0), rated(1, -1.0)] * 20
    split = [pair("tie", "A", "B")] * 60 + [pair("tie", "B", "A")] * 5
    led = [pair("A", a=200 + n) for n in range(30)] + [pair("B", "B", "B", b=200 + n) for n in range(30)]
    led += [pair("A", b=150 + n) for n in range(6)]
    own = [pair("A", model_a="judge")] * 40
    found = report(people, [*split, *led, *own], {"4": 50, "none": 50}, ["judge"])
    text = "\n".join(found["warnings"])
    for words in (
        "agree hardly more than by chance (kappa 0.00)",
        "names another winner when the answers change places",
        "prefers whichever answer stands first",
        "longer answers win: one that is twice as long has",
        "judge judges answers of its own; it won 100% of 40 decided verdicts",
        "50% of the grades could not be had or read",
    ):
        assert words in text
    second = report([], [pair("tie", "B", "A")] * 40, {}, [])
    assert "0 answers have a grade and a vote" in second["warnings"][0]
    assert any("stands second" in said for said in second["warnings"])
    shorter = [pair("B", "B", "B", a=200 + n) for n in range(30)] + [pair("A", b=200 + n) for n in range(30)]
    assert any("shorter answers win" in said for said in report([], shorter, {}, [])["warnings"])
    always = report([rated(5, 1.0)] * 40, [], {}, [])
    assert any("cannot be told" in said for said in always["warnings"])


def test_answers_that_are_not_known_any_more_say_nothing_of_length() -> None:
    found = report([], [pair(a=0), {**pair(), "length_a": None}], {}, [])
    assert found["length"]["cases"] == 0


def test_each_of_several_judges_is_measured_by_itself() -> None:
    """One follows the first place, one people; the third was there for half of it."""

    def grades(good: bool, there: bool) -> str:
        said = [("fair", 5 if good else 1), ("led", 5), ("away", (5 if good else 1) if there else None)]
        return json.dumps([{"model": name, "score": score, "feedback": ""} for name, score in said])

    def verdicts(winner: str, there: bool) -> str:
        each = {"fair": (winner, winner, winner), "led": ("tie", "A", "B"), "away": (winner if there else None,) * 3}
        names = ("winner", "forward", "swapped")
        return json.dumps(
            [{"model": name, "reason": "", **dict(zip(names, w, strict=True))} for name, w in each.items()]
        )

    numbers = range(80)
    people = [
        {**rated(5 if n % 2 else 1, 1.0 if n % 2 else -1.0), "judges": grades(bool(n % 2), n < 40)} for n in numbers
    ]
    pairs = [
        pair(w := "AB"[n % 2], w, w, model_a="led", judges=verdicts(w, n < 40)) for n in numbers
    ]  # fmt: skip
    found = report(people, pairs, {"5": 80}, ["fair", "led", "away"], [row["judges"] for row in people])
    assert found["judge"] == "fair + led + away"
    assert (found["agreement"]["value"], found["disagreement"]["value"]) == (1, 0)
    each = {one["judge"]: one for one in found["judges"]}
    assert sorted(each) == ["away", "fair", "led"]
    fair, led, away = each["fair"], each["led"], each["away"]
    assert (fair["agreement"]["value"], fair["disagreement"]["value"], fair["unread"]["value"]) == (1, 0, 0)
    assert (led["agreement"]["value"], led["disagreement"]["value"], led["first_wins"]["value"]) == (0, 1, 1)
    assert "the judge prefers whichever answer stands first" in led["warnings"]
    assert (away["agreement"]["cases"], away["disagreement"]["cases"], away["unread"]["value"]) == (40, 40, 0.5)
    # one judge alone has no figures of its own beside these
    assert report([rated(5, 1.0)], [pair()], {}, ["one"])["judges"] == []
