from __future__ import annotations

import pytest

from services.memory.engram import Engram
from services.memory.index import engrams_of, entry, similarities
from services.memory.keywords import Seen
from services.memory.vectors import Vector

COFFEE = Engram("1-0:A", "ann", "turn", 1_700_000_000_000, 1_700_000_000_000, query="coffee?", answer="oat milk")


def hit(number: int, vector: list[float] | None, model: str = "m") -> Seen:
    added = entry(COFFEE, None if vector is None else Vector(model, vector))
    return Seen(f"e{number}", 1.0, "", added.vector, added.model)


def test_hits_are_compared_by_the_vectors_that_were_added_with_them() -> None:
    found = similarities([hit(1, [0.6, 0.8]), hit(2, [1.0, 0.0])], Vector("m", [1.0, 0.0]))
    assert found == {"e1": pytest.approx(0.6, abs=1e-3), "e2": pytest.approx(1.0)}


def test_vectors_of_another_model_are_not_compared() -> None:
    hits = [hit(1, None), hit(4, [1.0], ""), hit(2, [1.0, 0.0], "other"), hit(3, [1.0, 0.0, 0.0])]
    assert similarities(hits, Vector("m", [1.0, 0.0])) == {}


def test_what_is_kept_of_an_engram_is_the_whole_engram() -> None:
    assert engrams_of({COFFEE.id: entry(COFFEE).data}, "ann") == {COFFEE.id: COFFEE}


def test_nothing_of_another_user_is_read() -> None:
    assert engrams_of({COFFEE.id: entry(COFFEE).data, "without": ""}, "bob") == {}
