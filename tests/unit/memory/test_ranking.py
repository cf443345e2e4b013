from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.memory.ranking import Candidate, Hit, Weights, lifts, mark_of, min_score_for, promising, rank

LEAST = 0.2
EVERYTHING = {"top_k": 1_000, "min_score": LEAST}
NO_DUPLICATES = Weights(duplicate=1.0)

share = st.floats(0, 1, allow_nan=False)
ratings = st.fixed_dictionaries(
    {
        "score": st.none() | st.floats(1, 5),
        "won": st.none() | st.booleans(),
        "feedback": st.none() | st.floats(-1, 1),
        "age_days": st.floats(0, 5_000),
    }
)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    """Engrams with nothing in common but the shape, found in every way that there is."""
    found = []
    for number in range(draw(st.integers(0, 25))):
        similarity = draw(st.none() | st.floats(-1, 1))
        words = draw(st.none() | share)
        one = Candidate(
            f"e{number}",
            similarity,
            keyword_rank=None if words is None else number + 1,
            keyword_score=words,
            text=f"word{chr(97 + number)} thing{chr(97 + number)}",
        )
        found.append(replace(one, **draw(ratings)))
    return found


weights = st.builds(
    Weights,
    keyword=share,
    beside=share,
    critic=share,
    winner=share,
    feedback=share,
    age=share,
    half_life_days=st.floats(0.1, 1_000),
    bound=st.floats(0, 0.5),
    duplicate=st.just(1.0),
)


def stripped(candidate: Candidate) -> Candidate:
    return replace(candidate, score=None, won=None, feedback=None, age_days=0.0)


def ids(hits: list[Hit]) -> list[str]:
    return [hit.id for hit in hits]


def best(*found: Candidate, weights: Weights = Weights(), top_k: int = 5) -> list[str]:
    return ids(rank(found, weights, top_k=top_k, min_score=LEAST))


@given(candidates(), weights)
def test_ratings_and_age_have_no_say_in_what_is_relevant(found: list[Candidate], chosen: Weights) -> None:
    with_ratings = rank(found, chosen, **EVERYTHING)
    without = rank([stripped(one) for one in found], chosen, **EVERYTHING)
    assert set(ids(with_ratings)) == set(ids(without))


@given(candidates(), weights)
def test_no_rating_lifts_an_engram_over_a_clearly_more_relevant_one(found: list[Candidate], chosen: Weights) -> None:
    hits = rank(found, chosen, **EVERYTHING)
    for place, higher in enumerate(hits):
        for lower in hits[place + 1 :]:
            assert lower.relevance * (1 - chosen.bound) <= higher.relevance * (1 + chosen.bound) + 1e-9


@given(candidates(), weights)
def test_with_a_bound_of_zero_relevance_alone_orders(found: list[Candidate], chosen: Weights) -> None:
    hits = rank(found, chosen.model_copy(update={"bound": 0.0}), **EVERYTHING)
    assert [hit.relevance for hit in hits] == sorted((hit.relevance for hit in hits), reverse=True)


@given(candidates(), weights, st.randoms())
def test_the_order_in_which_candidates_come_does_not_matter(found: list[Candidate], chosen: Weights, dice) -> None:
    shuffled = list(found)
    dice.shuffle(shuffled)
    assert rank(found, chosen, top_k=7, min_score=LEAST) == rank(shuffled, chosen, top_k=7, min_score=LEAST)


@given(candidates(), weights, st.integers(0, 30))
def test_a_shorter_result_is_the_beginning_of_a_longer_one(found: list[Candidate], chosen: Weights, top_k: int) -> None:
    assert rank(found, chosen, top_k=top_k, min_score=LEAST) == rank(found, chosen, **EVERYTHING)[:top_k]


@given(candidates(), weights)
def test_why_explains_the_score(found: list[Candidate], chosen: Weights) -> None:
    for hit in rank(found, chosen, **EVERYTHING):
        parts = sum(hit.why[name] for name in ("critic", "winner", "feedback", "age"))
        assert hit.why["shift"] == pytest.approx(max(-chosen.bound, min(chosen.bound, parts)), abs=3e-4)
        assert hit.score == pytest.approx(min(1.0, hit.why["relevance"] * (1 + hit.why["shift"])), abs=3e-4)
        assert 0 <= hit.score <= 1


def test_why_tells_every_part_of_the_score() -> None:
    weights = Weights(keyword=0.5, critic=0.02, winner=0.03, feedback=0.04, age=0.08, half_life_days=10, bound=0.1)
    one = Candidate("e", 0.8, 2, 0.4, lift=0.05, score=4, won=False, feedback=-0.5, age_days=10)
    (hit,) = rank([one], weights, top_k=1, min_score=LEAST)
    assert hit.why == pytest.approx(
        {
            "similarity": 0.8,
            "keyword_rank": 2,
            "keyword_score": 0.4,
            "lift": 0.05,
            "relevance": 0.65,
            "critic": 0.01,
            "winner": -0.03,
            "feedback": -0.02,
            "age": -0.04,
            "shift": -0.08,
        }
    )
    assert (hit.relevance, hit.score) == (pytest.approx(0.65), pytest.approx(0.65 * 0.92))
    # ratings and age change it by `bound` at most, and a score is told as 1 at most
    (bounded,) = rank([replace(one, lift=0.6, feedback=1, won=True, score=5)], weights, top_k=1, min_score=LEAST)
    assert (bounded.why["winner"], bounded.why["critic"], bounded.why["shift"]) == (0.03, 0.02, 0.05)
    assert bounded.score == 1.0
    narrow = weights.model_copy(update={"bound": 0.05})
    (most,) = rank([replace(one, feedback=1, won=True, score=5, age_days=0)], narrow, top_k=1, min_score=LEAST)
    assert (most.why["feedback"], most.why["shift"]) == (0.04, 0.05)
    (least,) = rank([replace(one, feedback=-1, score=1, age_days=1e6)], weights, top_k=1, min_score=LEAST)
    assert least.why["shift"] == -0.1
    long = Candidate("e", 0.8765432, 1, 0.7654321, lift=0.0123456, score=4.321, feedback=0.54321, age_days=3.21)
    (rounded,) = rank([long], weights, top_k=1, min_score=LEAST)
    assert rounded.why == {name: value and round(value, 4) for name, value in rounded.why.items()}
    (unknown,) = rank([Candidate("e", None, 1, 0.9)], weights, top_k=1, min_score=LEAST)
    assert unknown.why == {
        "similarity": None, "keyword_rank": 1, "keyword_score": 0.9, "lift": 0.0, "relevance": 0.9, "critic": 0.0,
        "winner": 0.0, "feedback": 0.0, "age": 0.0, "shift": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(("top_k", "count"), [(2, 2), (1, 1), (0, 0), (-1, 0)])
def test_no_more_are_told_than_were_asked_for(top_k: int, count: int) -> None:
    assert len(best(Candidate("a", 0.8), Candidate("b", 0.7), Candidate("c", 0.6), top_k=top_k)) == count


@given(candidates(), weights, st.data())
def test_a_better_rating_never_makes_the_place_worse(
    found: list[Candidate], chosen: Weights, data: st.DataObject
) -> None:
    before = ids(rank(found, chosen, **EVERYTHING))
    if not before:
        return
    lucky = data.draw(st.sampled_from(before))
    praised = [replace(one, score=5, won=True, feedback=1.0) if one.id == lucky else one for one in found]
    assert ids(rank(praised, chosen, **EVERYTHING)).index(lucky) <= before.index(lucky)


@given(candidates(), weights)
def test_no_rating_lifts_a_score_over_what_was_promised(found: list[Candidate], chosen: Weights) -> None:
    promised = dict(promising(map(stripped, found), chosen, min_score=LEAST))
    for hit in rank(found, chosen, **EVERYTHING):
        assert hit.score <= promised[hit.id] + 1e-12


def test_what_is_promised_comes_best_first() -> None:
    found = [Candidate("b", 0.5), Candidate("c", 0.1), Candidate("a", 0.9), Candidate("words", None, 1, 0.6)]
    promised = promising(found, Weights(bound=0.0, keyword=0.3), min_score=LEAST)
    assert [id_ for id_, _ in promised] == ["a", "words", "b"]
    assert promised[1][1] == pytest.approx(0.6)
    # what ratings can add
    assert promising([Candidate("a", 0.5)], Weights(bound=0.1, keyword=0.0), min_score=LEAST) == [
        ("a", pytest.approx(0.55))
    ]


def test_of_what_promises_as_much_the_first_id_comes_first() -> None:
    promised = promising([Candidate(name, 0.5) for name in "cab"], Weights(), min_score=LEAST)
    assert [id_ for id_, _ in promised] == ["a", "b", "c"]


def test_what_is_unlike_or_not_old_yet_takes_and_gives_nothing() -> None:
    (hit,) = rank([Candidate("a", -0.5, 1, 1.0, True, age_days=-3)], Weights(keyword=0.5), top_k=1, min_score=LEAST)
    assert (hit.relevance, hit.why["age"]) == (0.5, 0.0)


def test_a_better_turn_beside_one_adds_a_part_of_what_that_lacks() -> None:
    weights = Weights(keyword=0.0, beside=0.5)
    found = {name: Candidate(name, value) for name, value in (("asked", 0.8), ("told", 0.4), ("left", 0.3))}
    pairs = [("asked", "told"), ("told", "left"), ("asked", "left")]
    # of several that are better, the best
    assert lifts(found, pairs, weights) == pytest.approx({"told": 0.2, "left": 0.25})
    assert lifts(found, [(b, a) for a, b in reversed(pairs)], weights) == pytest.approx({"told": 0.2, "left": 0.25})
    assert lifts(found, [], weights) == {}
    # at most as much as it has itself: nothing that fits in nothing
    found = {name: Candidate(name, value) for name, value in (("asked", 0.8), ("weak", 0.1), ("else", -0.2))}
    assert lifts(found, [("weak", "asked"), ("asked", "else")], weights) == pytest.approx({"weak": 0.1, "else": 0.0})


def test_an_answer_beside_the_question_comes_before_what_is_only_alike() -> None:
    found = {"asked": Candidate("asked", 0.7), "told": Candidate("told", 0.3), "alike": Candidate("alike", 0.35)}
    assert best(*found.values()) == ["asked", "alike", "told"]
    added = lifts(found, [("asked", "told")], Weights())
    assert best(*(replace(one, lift=added.get(one.id, 0.0)) for one in found.values())) == ["asked", "told", "alike"]


@given(candidates(), weights, st.data())
def test_nothing_is_lifted_over_the_best_beside_it(
    found: list[Candidate], chosen: Weights, data: st.DataObject
) -> None:
    # one without a similarity needs half of the words to be relevant at all
    by_name = {one.id: one for one in found if one.similarity is not None}
    name = st.sampled_from(sorted(by_name))
    pairs = data.draw(st.lists(st.tuples(name, name))) if by_name else []
    unrated = chosen.model_copy(update=dict.fromkeys(("critic", "winner", "feedback", "age", "bound"), 0.0))

    def relevance(one: Candidate) -> float:
        return sum(hit.relevance for hit in rank([one], unrated, top_k=1, min_score=0.0))

    for name, lift in lifts(by_name, pairs, unrated).items():
        beside = {other for pair in pairs if name in pair for other in pair}
        best_beside = max(relevance(stripped(by_name[other])) for other in beside)
        assert 0 <= lift <= relevance(stripped(by_name[name])) + 1e-9
        assert relevance(replace(stripped(by_name[name]), lift=lift)) <= best_beside + 1e-9
    alone = chosen.model_copy(update={"beside": 0.0})
    assert not any(lifts(by_name, pairs, alone).values())


def test_what_shares_no_word_needs_the_least_similarity() -> None:
    assert best(Candidate("near", 0.2), Candidate("far", 0.19)) == ["near"]


# Candidates with the threshold at LEAST: similarity, share of the words, whether one is rare, lift; and the outcome.
RELEVANT = [
    pytest.param(LEAST, None, False, 0.0, True, id="at-the-threshold"),
    pytest.param(LEAST - 0.01, None, False, 0.0, False, id="below-without-words"),
    pytest.param(LEAST - 0.01, 1.0, False, 0.0, False, id="below-with-common-words"),
    pytest.param(LEAST * 0.9, 0.11, True, 0.0, True, id="little-below-with-a-rare-word"),
    pytest.param(0.0, 0.9, True, 0.0, False, id="unlike-with-most-words"),
    pytest.param(0.0, 1.0, True, 0.0, True, id="unlike-with-all-words"),
    pytest.param(-0.4, 1.0, True, 0.0, True, id="opposite-with-all-words"),
    pytest.param(LEAST / 2, 0.5, True, 0.0, True, id="half-with-half-of-the-words"),
    pytest.param(LEAST / 2, 0.4, True, 0.0, False, id="half-with-fewer-words"),
    pytest.param(LEAST * 0.7, None, False, LEAST * 0.4, True, id="lifted-by-its-neighbour"),
    pytest.param(LEAST * 0.68, None, False, LEAST, False, id="lifted-by-a-part-of-its-own"),
    pytest.param(0.0, 0.8, True, LEAST, False, id="unlike-beside-a-better-one"),
    pytest.param(None, 0.5, False, 0.0, True, id="unknown-with-half-of-the-words"),
    pytest.param(None, 0.49, True, 0.0, False, id="unknown-with-fewer-words"),
]


@pytest.mark.parametrize(("similarity", "words", "rare", "lift", "passes"), RELEVANT)
def test_min_score_is_a_threshold_on_similarity(
    similarity: float | None, words: float | None, rare: bool, lift: float, passes: bool
) -> None:
    place = None if words is None else 1
    one = Candidate("e", similarity, place, words, rare, lift=lift)
    assert best(one) == (["e"] if passes else [])


def test_without_weight_of_words_a_rare_word_does_not_help() -> None:
    assert best(Candidate("e", 0.1, 1, 1.0, True), weights=Weights(keyword=0.0)) == []


def test_nothing_relevant_gives_nothing() -> None:
    assert best(Candidate("a", -0.3, score=5, won=True, feedback=1.0), Candidate("b", 0.0)) == []


def test_without_a_least_score_what_has_nothing_in_common_is_still_left_out() -> None:
    assert rank([Candidate("a", 0.0)], Weights(), top_k=5, min_score=0.0) == []


def test_while_the_embedding_model_is_away_words_alone_decide() -> None:
    found = [Candidate("half", None, 2, 0.5), Candidate("all", None, 1, 1.0), Candidate("few", None, 3, 0.3)]
    assert best(*found) == ["all", "half"]


def test_of_equally_relevant_answers_the_better_rated_comes_first() -> None:
    found = [
        Candidate("plain", 0.6, text="one"),
        Candidate("graded", 0.6, score=5, text="two"),
        Candidate("bad", 0.6, score=1, text="three"),
        Candidate("praised", 0.6, score=5, feedback=1.0, text="four"),
    ]
    assert best(*found) == ["praised", "graded", "plain", "bad"]


def test_the_winner_of_a_comparison_comes_before_the_loser() -> None:
    assert best(Candidate("lost", 0.6, won=False, text="one"), Candidate("won", 0.6, won=True, text="two")) == [
        "won",
        "lost",
    ]


def test_of_equally_relevant_answers_the_newer_comes_first() -> None:
    assert best(Candidate("old", 0.6, age_days=90, text="one"), Candidate("new", 0.6, age_days=1, text="two")) == [
        "new",
        "old",
    ]


def test_ties_are_broken_by_age_then_id() -> None:
    ageless = Weights(age=0.0)
    found = [Candidate("c", 0.6, age_days=1), Candidate("b", 0.6, age_days=2), Candidate("a", 0.6, age_days=2)]
    assert best(*found, weights=ageless) == ["c", "a", "b"]


STORY = "The cottage has a network called larkhouse and everybody may use it while the owners are away in summer"


def test_near_identical_engrams_take_one_place() -> None:
    found = [Candidate(f"copy{number}", 0.8 - number / 100, question="wifi?", text=STORY) for number in range(4)]
    assert best(*found, Candidate("other", 0.4, text="something else"), top_k=2) == ["copy0", "other"]


def test_the_best_rated_stands_for_its_copies() -> None:
    found = [
        Candidate("first", 0.81, score=2, text=STORY),
        Candidate("good", 0.80, score=5, text=STORY + " too"),
        Candidate("last", 0.79, text=STORY),
    ]
    assert best(*found) == ["good"]


@pytest.mark.parametrize(
    ("other", "copies"),
    [
        ("one two three four five", True),
        ("five FOUR three, two: one", True),
        # four of five words, of six in all
        ("one two three four", True),
        ("one two three four six", False),
        ("one two three", False),
        ("one two three four five six seven", False),
    ],
)
def test_near_identical_texts_have_four_of_five_words_in_common(other: str, copies: bool) -> None:
    found = [Candidate("a", 0.8, text="one two three four five"), Candidate("b", 0.7, text=other)]
    assert best(*found) == (["a"] if copies else ["a", "b"])
    assert best(*reversed(found)) == (["a"] if copies else ["a", "b"])


def test_a_copy_that_is_rated_no_better_stands_behind_the_first() -> None:
    found = [Candidate("first", 0.81, feedback=0.5, text=STORY), Candidate("equal", 0.80, feedback=0.5, text=STORY)]
    assert best(*found) == ["first"]
    # any of the ratings decides, age does not
    plain, other = replace(found[0], feedback=None), replace(found[1], feedback=None, age_days=900)
    for better in (replace(other, won=True), replace(other, score=5), replace(other, feedback=0.9)):
        assert best(plain, better) == ["equal"]


def test_who_stands_for_its_copies_stands_in_its_own_place() -> None:
    found = [
        Candidate("first", 0.9, text=STORY),
        Candidate("between", 0.85, text="something else"),
        Candidate("rated", 0.7, score=4, text=STORY),
    ]
    assert best(*found) == ["between", "rated"]
    # also where as many as are wanted come before it
    assert best(*found, top_k=1) == ["between"]
    assert best(*found[:2], top_k=1) == ["first"]


def test_a_changed_number_is_news_and_no_copy() -> None:
    for old, new in ((" room 12", " room 14"), (" gate b12", " gate b14")):
        assert len(best(Candidate("old", 0.8, text=STORY + old), Candidate("new", 0.8, text=STORY + new))) == 2


def test_engrams_without_any_text_are_not_copies_of_each_other() -> None:
    assert len(best(Candidate("a", 0.8), Candidate("b", 0.8))) == 2


@pytest.mark.parametrize(
    ("score", "mark"),
    [(5, "GOOD EXAMPLE"), (4, "GOOD EXAMPLE"), (3, None), (2, "AVOID"), (1, "AVOID"), (None, None)],
)
def test_grades_are_marked_for_the_model(score: float | None, mark: str | None) -> None:
    assert mark_of(score) == mark
    (hit,) = rank([Candidate("a", 0.9, score=score)], Weights(), top_k=1, min_score=LEAST)
    assert hit.mark == mark


@pytest.mark.parametrize("won", [True, False, None])
@pytest.mark.parametrize("score", [1, 2, 3, 4, 5, None])
def test_loser_of_a_comparison_is_no_good_example(score: float | None, won: bool | None) -> None:
    (hit,) = rank([Candidate("a", 0.9, score=score, won=won)], Weights(), top_k=1, min_score=LEAST)
    usual = mark_of(score)
    assert hit.mark == (None if usual == "GOOD EXAMPLE" and won is False else usual)


def test_weights_are_checked_and_described() -> None:
    with pytest.raises(ValueError, match="bound"):
        Weights(bound=0.9)
    with pytest.raises(ValueError, match="extra"):
        Weights.model_validate({"criticc": 1})
    schema = Weights.model_json_schema()
    assert all("description" in part for part in schema["properties"].values())
    assert "required" not in schema
    bounds = ("minimum", "exclusiveMinimum", "maximum")
    shares = dict.fromkeys(("keyword", "beside", "critic", "winner", "feedback", "age"), (0, None, 1))
    assert {name: tuple(part.get(bound) for bound in bounds) for name, part in schema["properties"].items()} == {
        **shares, "half_life_days": (None, 0, None), "bound": (0, None, 0.5), "duplicate": (None, 0, 1),
    }  # fmt: skip


def test_the_least_score_belongs_to_the_embedding_model() -> None:
    assert min_score_for("nomic-embed-text:latest") == 0.3
    assert min_score_for("sentence-transformers/all-MiniLM-L6-v2") == 0.25
    assert min_score_for("another") == 0.3
