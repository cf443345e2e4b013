"""What is kept of answers, verdicts and votes, and what goes again."""

from __future__ import annotations

import itertools
import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.reward.database import TABLES
from services.reward.manage import verdict_page
from services.reward.store import FIRST, Store, config_name
from services.reward.votes import Cast, Part, Vote
from shared.contracts import VotePart
from shared.errors import SettingsError, TransientError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "p.sqlite")
    yield store
    store.close()


def response(name: str = "1-0:A", **values: Any) -> dict[str, Any]:
    query_id, _, respondent = name.partition(":")
    return {
        "response_id": name, "query_id": query_id, "session_id": "s", "user_id": "ann", "respondent": respondent,
        "query": "q", "answer": "a", "messages": "[]", "config": f"config {respondent}", "intent": "question",
        "tools": 0, "time": 1, **values,
    }  # fmt: skip


def pair(query_id: str = "1-0", **values: Any) -> dict[str, Any]:
    return {
        "query_id": query_id, "response_a": f"{query_id}:A", "response_b": f"{query_id}:B", "winner": "A",
        "forward": "A", "swapped": "A", "score_a": 4, "score_b": 2, "reason": "r", "config_a": "config A",
        "config_b": "config B", "session_id": "s", "time": 1, **values,
    }  # fmt: skip


def critique(name: str = "1-0:A", **values: Any) -> dict[str, Any]:
    return {
        "response_id": name, "query_id": name.partition(":")[0], "session_id": "s", "score": 4, "feedback": "f",
        "rubric": "r", "time": 1, **values,
    }  # fmt: skip


def rate(store: Store, name: str = "1-0:A", reward: float = 1.0, cast: Cast = (1, 0)) -> bool:
    """Whether these stars counted."""
    return change(store, {"stars": Part(cast, round(reward * 2 + 3))}, name) is not None


def change(store: Store, parts: Mapping[VotePart, Part], name: str = "1-0:A") -> tuple[Vote, Cast] | None:
    row = {"response_id": name, "query_id": name.partition(":")[0], "session_id": "s", "user_id": "ann"}
    return store.vote(row, parts)


def everything(store: Store) -> None:
    for name in ("1-0:A", "1-0:B"):
        store.put("responses", response(name))
    store.put("pairs", pair())
    store.put("critiques", critique())
    rate(store)


def test_what_is_said_to_be_kept_is_on_disk_and_what_is_removed_is_not(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    for _ in range(2):
        with closing(Store(path)) as store:
            said = [store.rows(f"PRAGMA {name}")[0][name] for name in ("journal_mode", "synchronous", "secure_delete")]
            # 2: every commit waits for the disk
            assert said == ["wal", 2, 1]
            assert store.put("responses", response())
        # closed, nothing is left beside it
        assert not list(tmp_path.glob("*-wal"))


def test_a_place_that_cannot_be_used_is_told_and_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "p.sqlite"
    with pytest.raises(SettingsError, match=rf"database: {path} cannot be used: ") as caught:
        Store(path)
    assert "doctor" not in str(caught.value)


def test_a_row_that_comes_again_replaces_the_earlier_one_under_its_key(store: Store) -> None:
    assert store.put("responses", response(answer="first"))
    assert store.put("responses", response(answer="second"))
    assert store.put("responses", response("2-0:A"))
    found = store.response("1-0:A")
    assert found is not None
    assert found["answer"] == "second"
    assert store.response("3-0:A") is None
    assert store.counts() == {**dict.fromkeys(TABLES, 0), "responses": 2}


@pytest.mark.parametrize(
    ("second", "wins"), [((2, 0), True), ((1, 1), True), ((1, 0), True), ((0, 9), False), ((0, 0), False)]
)
def test_the_vote_that_was_cast_last_counts_whichever_comes_last(
    second: tuple[int, int], wins: bool, store: Store
) -> None:
    assert rate(store, reward=1.0, cast=(1, 0))
    assert rate(store, reward=-1.0, cast=second) is wins
    (row,) = store.page("votes", "", 10)
    assert row["reward"] == (-1.0 if wins else 1.0)


def test_a_vote_that_changed_has_a_later_mark_than_before(store: Store) -> None:
    first = change(store, {"stars": Part((1, 0), 5)})
    # another one that says to be of the same moment, one that is late, and one of two moments
    same = change(store, {"stars": Part((1, 0), 1)})
    late = change(store, {"thumb": Part((0, 9), "positive")})
    both = change(store, {"thumb": Part((2, 0), "negative"), "stars": Part((5, 3), 2)})
    marks = [state[1] for state in (first, same, late, both) if state is not None]
    assert (marks[0], marks[3]) == ((1, 0), (5, 3))
    assert marks[0] < marks[1] < marks[2] < marks[3]
    assert change(store, {"stars": Part((5, 3), 2)}) == (both[0], (5, 3))  # type: ignore[index]


CAST: list[dict[VotePart, Part]] = [
    {"thumb": Part((1, 0), "negative", "no")},
    {"stars": Part((2, 0), 5)},
    {"stars": Part((3, 0), 4, "well")},
    {"thumb": Part((4, 0))},
    {"thumb": Part((5, 0), "positive"), "stars": Part((5, 0))},
    {"thumb": Part((6, 0)), "stars": Part((6, 0))},
]


@pytest.mark.parametrize(
    ("count", "thumb", "stars", "reward", "comment"),
    [
        (1, "negative", None, -1.0, "no"),
        (2, "negative", 5, 1.0, "no"),
        (3, "negative", 4, 0.5, "well"),
        (4, None, 4, 0.5, "well"),
        (5, "positive", None, 1.0, None),
        (6, None, None, 0.0, None),
    ],
)
def test_thumb_and_stars_are_changed_and_withdrawn_by_themselves_in_any_order(
    count: int, thumb: Any, stars: int | None, reward: float, comment: str | None, tmp_path: Path
) -> None:
    for number, order in enumerate(itertools.permutations(CAST[:count])):
        if number % max(1, math.factorial(count) // 6):
            continue
        with closing(Store(tmp_path / f"{number}.sqlite")) as store:
            states = [change(store, parts) for parts in order]
            # of two states the later one has the larger mark, and the same change again gives the same
            marks = [state[1] for state in states if state is not None]
            assert marks == sorted(set(marks))
            again = change(store, CAST[count - 1])
            assert again is not None
            vote, mark = again
            assert mark == marks[-1]
            assert (vote.thumb, vote.stars, vote.reward, vote.comment) == (thumb, stars, reward, comment)
            (row,) = store.page("votes", "", 10)
            assert (row["reward"], row["stars"], row["comment"]) == (reward, stars, comment)
            assert (row["withdrawn"], store.counts()["votes"]) == ((1, 0) if count == 6 else (0, 1))


def test_a_withdrawn_vote_counts_nowhere(store: Store) -> None:
    everything(store)
    config, before = store.page("responses", "", 1)[0]["config"], store.vote_counts
    assert before(config, 0, None) == {"positive": 1, "negative": 0}
    change(store, {"thumb": Part((9, 0)), "stars": Part((9, 0))})
    assert store.vote_counts(config, 0, None) == {"positive": 0, "negative": 0}
    assert store.ratings() == store.judged_and_rated() == []
    assert [row["vote_a"] for row in store.pair_rows("", 5)] == [None]
    assert {row["vote"] for row in store.answer_rows("", 5)} == {None}
    assert store.tallies()["sentiments"] == {"positive": 0, "negative": 0, "neutral": 0}
    # a vote that was cast before comes late
    assert not rate(store, cast=(8, 0))
    # nothing is left of a comment
    assert store.page("votes", "", 1)[0]["comment"] is None


def test_what_a_session_left_goes_with_it_and_does_not_come_back(store: Store) -> None:
    everything(store)
    store.put("responses", response("1-5:A", session_id="other"))
    store.put("consents", {"user_id": "ann", "given": 1, "time": 1})
    store.forget("s", 10)
    assert store.counts() == {**dict.fromkeys(TABLES, 0), "responses": 1, "consents": 1, "forgotten": 1}
    # what comes late of a query up to then, and what comes of a session of that name made anew
    late, new = response("10-0:A"), response("11-0:A")
    assert not store.put("responses", late)
    assert not rate(store, "9-3:A")
    assert store.put("responses", new)
    assert store.gone("s", "10-0")
    assert not store.gone("s", "11-0")
    assert not store.gone("other", "1-0")
    # an id that tells no time is older than any deletion
    assert store.gone("s", "my-id")
    assert store.load("responses", [late, response("12-0:A")], replace=False) == 1


def test_only_what_nobody_compared_or_rated_is_pruned(store: Store) -> None:
    everything(store)
    for name in ("2-0:A", "3-0:A", "4-0:A"):
        store.put("responses", response(name))
        store.put("critiques", critique(name))
    rate(store, "2-0:A")
    store.put("responses", response("5-0:A", time=100))
    store.put("critiques", critique("5-0:A", time=100))
    # what is said to go is what goes, grades too
    assert store.unused(before=100)[::2] == (6, 4)
    assert store.prune(before=100) == (2, ("critiques", 0, ""))
    assert store.prune(before=100, after=("critiques", 0, "")) == (2, None)
    assert [row["response_id"] for row in store.page("responses", "", 10)] == ["1-0:A", "1-0:B", "2-0:A", "5-0:A"]
    assert [row["response_id"] for row in store.page("critiques", "", 10)] == ["1-0:A", "2-0:A", "5-0:A"]


def test_of_what_is_old_everything_goes_few_rows_at_a_time(store: Store) -> None:
    everything(store)
    for number in range(2, 302):
        store.put("responses", response(f"{number}-0:A"))
        store.put("critiques", critique(f"{number}-0:A"))
    store.put("responses", response("500-0:A", time=100))
    kept, oldest, due = store.census(before=100)
    assert oldest is not None
    # 300 answers with their grades
    assert (kept, store.unused(before=100)[2]) == (due + 1, 600)
    removed: list[int] = []
    while count := store.expire(before=100):
        removed.append(count)
    assert sum(removed) == due
    assert len(removed) > 1
    counts = store.counts()
    assert [counts[table] for table in ("responses", "pairs", "critiques", "votes")] == [1, 0, 0, 0]


def test_pruning_looks_at_few_rows_at_a_time(store: Store) -> None:
    rows = [response(f"{number}-0:A", time=number // 300) for number in range(700)]
    assert store.load("responses", rows, replace=False) == 700
    rate(store, "2-0:A")
    pages, place = [], FIRST
    while place is not None:
        removed, place = store.prune(before=100, after=place)
        pages.append(removed)
    assert (sum(pages), max(pages) < 300) == (699, True)
    assert [row["response_id"] for row in store.page("responses", "", 10)] == ["2-0:A"]


# ── on disk ──────────────────────────────────────────────────────────────────────────────────────────────────────

WORD = "xylograph"
TALK = f'["{WORD}", "q"]'


def on_disk(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if WORD.encode() in file.read_bytes()]


def worded(name: str, **values: Any) -> dict[str, Any]:
    return response(name, query=WORD, answer=f"{WORD} " * 300, messages=f'["{WORD}"]', **values)


@pytest.mark.parametrize("way", ["session", "query", "pruned", "cleared"])
def test_of_what_is_removed_no_word_stays_in_any_file(store: Store, tmp_path: Path, way: str) -> None:
    for number in range(20):
        store.put("responses", worded(f"{number}-0:A"))
        store.put("critiques", critique(f"{number}-0:A", feedback=WORD))
        # what is replaced is removed, too
        store.put("responses", worded(f"{number}-0:A", intent="chat"))
    assert on_disk(tmp_path)
    match way:
        case "session":
            store.forget("s", 100)
        case "query":
            store.take_back("s", [f"{number}-0" for number in range(20)], 100)
        case "pruned":
            assert store.prune(before=100)[0] == store.prune(before=100, after=("critiques", 0, ""))[0] == 20
            store.overwrite()
        case _:
            store.clear()
    assert on_disk(tmp_path) == []


def test_later_answers_keep_nothing_of_a_query_that_is_taken_back(store: Store) -> None:
    for name in ("1-0:A", "1-0:B", "2-0:A", "2-0:B", "3-0:A"):
        store.put("responses", response(name, messages=TALK, time=int(name[0])))
    store.put("responses", response("9-0:A", messages=TALK, time=9, session_id="another"))
    # it began with this answer's question
    store.put("responses", response("8-0:A", messages='["q"]', time=8))
    store.put("pairs", pair("3-0", response_b="2-0:B"))
    rate(store, "3-0:A")
    assert len(store.pair_rows("", 10)) == 1
    for _ in range(2):
        store.take_back("s", ["2-0"], 5)
    kept = {row["response_id"]: row["messages"] for row in store.page("responses", "", 10)}
    assert kept == {"1-0:A": TALK, "1-0:B": TALK, "3-0:A": "", "8-0:A": '["q"]', "9-0:A": TALK}
    # of several the earliest
    store.put("responses", response("7-0:A", messages=TALK, time=7))
    store.take_back("s", ["12-0", "6-0", "11-0"], 12)
    assert store.response("7-0:A")["messages"] == ""  # type: ignore[index]
    # it still counts, and is no example
    assert len(store.ratings()) == 1
    assert store.pair_rows("", 10) == store.answer_rows("", 10) == []
    # one that was on its way with the words in it
    assert store.put_response(response("4-0:A", messages=TALK, time=4), ["1-0", "2-0"])
    assert store.put_response(response("5-0:A", messages="[]", time=5), ["1-0"])
    assert [store.response(name)["messages"] for name in ("4-0:A", "5-0:A")] == ["", "[]"]  # type: ignore[index]


def prompts(store: Store) -> dict[str, str]:
    return {row["response_id"]: row["prompt"] for row in store.page("critiques", "", 10)}


def test_what_the_judge_read_goes_with_the_conversation(store: Store) -> None:
    first = '[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]'
    later = '[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "user", "content": "q"}]'
    for name, messages in (("1-0:A", first), ("3-0:A", later), ("4-0:A", first)):
        store.put_response(response(name, messages=messages, time=int(name[0])), [])
        store.put_critique(critique(name, prompt="read"))
    store.take_back("s", ["2-0"], 5)
    assert prompts(store) == {"1-0:A": "read", "3-0:A": "", "4-0:A": "read"}
    # on its way meanwhile: whichever of the two comes first
    store.put_critique(critique("3-0:A", prompt="read"))
    store.put_critique(critique("5-0:A", prompt="read"))
    store.put_response(response("5-0:A", messages=later, time=5), ["2-0"])
    assert prompts(store) == {"1-0:A": "read", "3-0:A": "", "4-0:A": "read", "5-0:A": ""}
    store.forget("s", 9)
    assert prompts(store) == {}


def test_verdicts_come_with_both_answers_and_the_vote_on_each(store: Store) -> None:
    everything(store)
    rate(store, "1-0:B", reward=-1.0)
    # one of whose answers is not known
    store.put("pairs", pair("2-0"))
    store.put("responses", response("2-0:A"))
    (row,) = store.pair_rows("", 10)
    assert (row["vote_a"], row["vote_b"]) == (1.0, -1.0)
    assert (row["a"]["response_id"], row["b"]["response_id"]) == ("1-0:A", "1-0:B")
    assert store.pair_rows("1-0", 10) == []
    store.put("responses", response("2-0:B"))
    assert [row["query_id"] for row in store.pair_rows("", 1)] == ["1-0"]
    assert [row["query_id"] for row in store.pair_rows("1-0", 1)] == ["2-0"]
    (unvoted,) = store.pair_rows("1-0", 1)
    assert (unvoted["vote_a"], unvoted["vote_b"]) == (None, None)


def test_answers_that_were_graded_or_rated_are_told_page_by_page(store: Store) -> None:
    for name in ("1-0:A", "2-0:A", "3-0:A", "4-0:A"):
        store.put("responses", response(name))
    store.put("critiques", critique("1-0:A"))
    store.put("critiques", critique("2-0:A", score=None))
    rate(store, "3-0:A", reward=-0.5)
    rows = store.answer_rows("", 10)
    assert [(row["response_id"], row["score"], row["vote"]) for row in rows] == [
        ("1-0:A", 4, None),
        ("3-0:A", None, -0.5),
    ]
    assert [row["response_id"] for row in store.answer_rows("1-0:A", 1)] == ["3-0:A"]
    assert store.judged_and_rated() == []
    rate(store, "1-0:A", reward=1.0)
    assert store.judged_and_rated() == [{"score": 4, "judges": "", "reward": 1.0}]
    assert store.jury_grades() == []
    store.put("critiques", critique("1-0:A", judges="[1]"))
    assert store.judged_and_rated() == [{"score": 4, "judges": "[1]", "reward": 1.0}]
    assert store.jury_grades() == ["[1]"]
    assert [row["judges"] for row in store.answer_rows("", 10)] == ["[1]", ""]


def test_what_rankings_are_made_of(store: Store) -> None:
    everything(store)
    store.put("pairs", pair("2-0", winner="B", forward=None, swapped=None))
    assert store.comparisons() == [
        {"config_a": "config A", "config_b": "config B", "winner": "A", "forward": "A", "swapped": "A",
         "session_id": "s", "user_id": "ann", "intent": "question"},
        {"config_a": "config A", "config_b": "config B", "winner": "B", "forward": None, "swapped": None,
         "session_id": "s", "user_id": None, "intent": None},
    ]  # fmt: skip
    assert store.ratings() == [
        {"config": "config A", "reward": 1.0, "session_id": "s", "user_id": "ann", "intent": "question"}
    ]


def test_what_is_asked_of_the_judge(store: Store) -> None:
    everything(store)
    config = {"config_a": '{"model":"m"}', "config_b": "{}"}
    store.put("pairs", pair("1-0", **config))
    store.put("pairs", pair("2-0", winner="tie", **config))
    known, lost = store.judged_pairs()
    assert (known["winner"], known["model_a"], known["model_b"]) == ("A", "m", None)
    assert known["length_a"] == len(store.response("1-0:A")["answer"])  # type: ignore[index]
    assert (lost["winner"], lost["length_a"], lost["length_b"]) == ("tie", None, None)


def test_tallies_count_each_value_and_those_that_nobody_gave(store: Store) -> None:
    everything(store)
    store.put("critiques", critique("2-0:A", score=None))
    store.put("pairs", pair("2-0", winner="tie"))
    for number, reward in ((2, -0.5), (3, 0.0), (4, 0.5)):
        rate(store, f"{number}-0:A", reward=reward)
    assert store.tallies() == {
        "grades": {"1": 0, "2": 0, "3": 0, "4": 1, "5": 0, "none": 1},
        "verdicts": {"A": 1, "B": 0, "tie": 1},
        "sentiments": {"positive": 2, "negative": 1, "neutral": 1},
    }


EXPERIMENT = {
    "name": "warmer", "state": "running", "config_a": "config A", "config_b": "config B", "settings_a": "{}",
    "settings_b": '{"temperature":1}', "before_a": None, "before_b": "{}", "started": 10, "ended": None,
}  # fmt: skip


def test_one_experiment_is_on_at_a_time_and_each_has_its_name(store: Store) -> None:
    active = ("starting", "running")
    assert store.begin_experiment(EXPERIMENT, active) is None
    other = {**EXPERIMENT, "name": "colder", "started": 20}
    assert store.begin_experiment(other, active) == (
        "the experiment warmer is running: one at a time; stop or promote it first"
    )
    assert not store.move_experiment("warmer", "starting", "stopped")
    assert not store.move_experiment("unknown", "running", "stopped")
    assert store.experiment("warmer") == EXPERIMENT
    assert store.move_experiment("warmer", "running", "stopped", ended=15, before_b="{1}")
    warmer = {**EXPERIMENT, "state": "stopped", "ended": 15, "before_b": "{1}"}
    assert store.experiment("warmer") == warmer
    assert store.experiment("unknown") is None
    assert store.begin_experiment(EXPERIMENT, active) == ("there was an experiment warmer before: take another name")
    assert store.begin_experiment(other, active) is None
    # what goes on comes first, then what ended last
    last = {**EXPERIMENT, "name": "last", "state": "stopped", "ended": 16}
    store.put("experiments", last)
    assert store.experiments() == [other, last, warmer]
    assert store.experiments("stopped") == [last, warmer]
    assert store.experiments("failed") == []


def test_an_experiments_verdicts_are_those_on_questions_of_its_time(store: Store) -> None:
    for number, config in ((9, "config B"), (10, "config B"), (11, "config C"), (12, "config B"), (13, "config B")):
        name = f"{number}-0"
        store.put("responses", response(f"{name}:A", time=number, intent=f"i{number}"))
        store.put("pairs", pair(name, config_b=config, winner="tie" if number == 12 else "B", time=100 - number))
        rate(store, f"{name}:A", reward=1.0 if number % 2 else -1.0)
    row = {"session_id": "s", "winner": "B", "counts": 1}
    # in the order in which they came
    every = [{**row, "intent": "i13"}, {**row, "intent": "i12", "winner": "tie"}, {**row, "intent": "i11", "counts": 0},
             {**row, "intent": "i10"}]  # fmt: skip
    assert store.trial_rows(EXPERIMENT, None) == every
    assert store.trial_rows(EXPERIMENT, 13) == every[1:]
    # its sides the other way round are not its sides
    turned = {**EXPERIMENT, "config_a": "config B", "config_b": "config A"}
    assert [row["counts"] for row in store.trial_rows(turned, None)] == [0] * 4
    store.put("responses", response("12-0:B", time=12, config="config A"))
    rate(store, "12-0:B")
    assert store.vote_counts("config A", 10, None) == {"positive": 2, "negative": 2}
    assert store.vote_counts("config A", 10, 13) == {"positive": 1, "negative": 2}
    assert store.vote_counts("config A", 11, 13) == {"positive": 1, "negative": 1}
    assert store.vote_counts("config B", 0, None) == {"positive": 0, "negative": 0}


def test_rankings_can_be_asked_of_one_intent(store: Store) -> None:
    for number, intent in ((1, "code"), (2, "chat")):
        store.put("responses", response(f"{number}-0:A", intent=intent))
        store.put("pairs", pair(f"{number}-0"))
        rate(store, f"{number}-0:A")
    assert (
        [row["intent"] for row in store.comparisons("chat")]
        == [row["intent"] for row in store.ratings("chat")]
        == ["chat"]
    )
    assert store.comparisons("poem") == store.ratings("poem") == []
    assert len(store.comparisons()) == len(store.ratings()) == 2


def test_a_user_who_was_never_asked_has_said_nothing(store: Store) -> None:
    assert store.consent("ann") is None
    for given in (1, 0):
        store.put("consents", {"user_id": "ann", "given": given, "time": 1})
        assert store.consent("ann") is bool(given)
        assert store.consents() == {"ann": bool(given)}


def test_rows_of_a_backup_leave_what_is_there_unless_they_replace_it(store: Store) -> None:
    store.put("responses", response(answer="here"))
    rows = [response(answer="of the backup"), response("2-0:A")]
    assert store.load("responses", rows, replace=False) == 1
    assert store.rows("SELECT answer FROM responses ORDER BY response_id") == [{"answer": "here"}, {"answer": "a"}]
    assert store.load("responses", rows, replace=True) == 2
    assert store.rows("SELECT answer FROM responses WHERE query_id='1-0'") == [{"answer": "of the backup"}]
    assert store.page("responses", "1-0:A", 10)[0]["response_id"] == "2-0:A"
    with pytest.raises(ValueError, match="nothing"):
        store.load("nothing", [], replace=False)
    # a row is taken in as a whole or not at all, with those beside it
    with pytest.raises(ValueError, match="colour"):
        store.load("responses", [response("3-0:A"), response("4-0:A", colour="red")], replace=False)
    assert store.counts()["responses"] == 2
    assert store.clear() == 2
    assert sum(store.counts().values()) == 0


def test_a_file_that_is_no_database_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(SettingsError, match=r"p\.sqlite"):
        Store(path)


@pytest.mark.slow
def test_a_file_that_is_locked_just_now_is_tried_again_and_a_wrong_row_is_not(tmp_path: Path) -> None:
    """SQLite waits 10 s for the lock."""
    path = tmp_path / "p.sqlite"
    with closing(Store(path)) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TransientError, match="cannot be used just now"):
            store.put("responses", response())
        other.execute("ROLLBACK")
        assert store.put("responses", response())
        with pytest.raises(sqlite3.IntegrityError):
            store.put("responses", response("2-0:A", query=None))
        assert (store.counts()["responses"], store.damage) == (1, None)


def test_a_configuration_has_one_name_in_whatever_order_it_is_told() -> None:
    one = config_name({"model": "m", "options": {"top_p": 1, "temperature": 0.5}, "prompt_version": ""})
    assert one == config_name({"options": {"temperature": 0.5, "top_p": 1}, "model": "m", "prompt_version": None})
    assert one == '{"model":"m","options":{"temperature":0.5,"top_p":1}}'
    assert config_name({"model": "m", "options": {}}) == '{"model":"m"}'
    assert config_name({"model": "m", "n": 0}) == '{"model":"m","n":0}'


def test_verdicts_come_newest_first_with_the_answers_that_are_kept(store: Store) -> None:
    for number in range(5):
        query_id = f"{number}-0"
        for letter in "AB":
            store.put("responses", response(f"{query_id}:{letter}", query=f"q{number}", answer=f"{letter}{number}"))
        store.put("critiques", critique(f"{query_id}:A", time=10 + number))
        store.put("pairs", pair(query_id, time=10 + number))
    # an id that only begins alike is another question's
    store.put("responses", response("4-0:A", response_id="4-01:A", query_id="4-01"))
    found: list[dict[str, Any]] = []
    place = (2**62, "")
    while page := store.verdicts(place, 3):
        assert len(page) <= 3
        found += page
        place = (page[-1]["time"], page[-1]["id"])
    assert [(row["kind"], row["query_id"]) for row in found] == [
        (kind, f"{number}-0") for number in (4, 3, 2, 1, 0) for kind in ("grade", "comparison")
    ]
    assert [one["answer"] for one in found[0]["answers"]] == ["A4", "B4"]
    store.forget("s", 2**40)
    assert store.verdicts((2**62, ""), 3) == []


def test_a_verdict_outlives_its_answers(store: Store) -> None:
    store.put("critiques", critique())
    (row,) = store.verdicts((2**62, ""), 3)
    assert (row["score"], row["response_id"], row["answers"]) == (4, "1-0:A", [])


def test_a_verdict_of_several_judges_tells_each(store: Store) -> None:
    store.put("critiques", critique(judges='[{"model": "one", "score": 4, "feedback": "Clear."}]', time=2))
    store.put("pairs", pair(judges='[{"model": "two", "winner": null, "reason": "not asked: away"}]', time=1))
    told = [row["judges"] for row in verdict_page(store, "", 10)["verdicts"]]
    assert told == [
        [{"model": "one", "score": 4, "winner": None, "words": "Clear."}],
        [{"model": "two", "score": None, "winner": None, "words": "not asked: away"}],
    ]
