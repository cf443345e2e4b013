from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.memory.catalog import Known
from services.memory.fts import BEFORE_WEIGHT, COMMON, EARLIER_WEIGHT, VERSION
from services.memory.keywords import OPEN_FILES, Entry, Found, KeywordIndex, KeywordIndexDamaged, Seen, Sought


@pytest.fixture
def index(tmp_path: Path) -> Iterator[KeywordIndex]:
    index = KeywordIndex(tmp_path / "keywords")
    yield index
    index.close()


def ids(found: Found) -> list[str]:
    return [hit.id for hit in found.hits]


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "keywords").glob("*.db"))


def on_disk(tmp_path: Path, words: list[str]) -> list[str]:
    """Those of the words, without their endings, that stand in any file."""
    contents = [path.read_bytes() for path in (tmp_path / "keywords").iterdir()]
    return [word for word in words if any(word.encode() in content for content in contents)]


COFFEE = Entry("coffee", "I take my coffee with oat milk")
LISBON = Entry("lisbon", "We moved to Lisbon in May")


def test_an_engram_is_found_by_forms_of_its_words(index: KeywordIndex) -> None:
    index.add("ann", [COFFEE, LISBON])
    assert ids(index.search("ann", "When did I move to Lisbon?", 5)) == ["lisbon"]
    assert ids(index.search("ann", "coffees", 5)) == ["coffee"]


def test_hits_are_ranked_and_scored_by_the_share_of_the_words(index: KeywordIndex) -> None:
    index.add("ann", [COFFEE, Entry("tea", "tea with milk"), Entry("other", "bread and butter")])
    first, second = index.search("ann", "coffee with oat milk", 5).hits
    assert (first.id, first.score) == ("coffee", pytest.approx(1.0))
    assert second.id == "tea"
    assert 0 < second.score < 0.5


def test_a_word_that_no_engram_has_lowers_the_score(index: KeywordIndex) -> None:
    index.add("ann", [COFFEE, LISBON])
    (hit,) = index.search("ann", "coffee zeppelin", 5).hits
    assert 0.2 < hit.score < 0.6


def test_a_turn_is_found_by_the_words_of_the_turn_before_it_but_counts_less(index: KeywordIndex) -> None:
    index.add("ann", [Entry("booked", "Casa Lume, at seven", "the restaurant for our anniversary")])
    index.add("ann", [Entry("restaurant", "a restaurant guide")])
    assert ids(index.search("ann", "anniversary", 5)) == ["booked"]
    assert ids(index.search("ann", "restaurant", 5)) == ["restaurant", "booked"]


def test_a_turn_has_a_part_of_the_words_of_the_two_turns_before_it(index: KeywordIndex) -> None:
    said = ["the anniversary dinner", "which restaurant", "Casa Lume", "at seven"]
    before = ["", *said]
    turns = zip(range(4), said, before, strict=False)
    index.add("ann", [Entry(str(n), text, earlier, talk="s", time=n) for n, text, earlier in turns])
    index.add("ann", [Entry("4", "alone")])
    (worth,) = index.search("ann", "anniversary", 5).sought.rarity
    shares = {hit.id: hit.score for hit in index.seen("ann", list("01234"), Sought({worth: 1.0}))}
    assert shares == {"0": 1.0, "1": BEFORE_WEIGHT, "2": EARLIER_WEIGHT, "3": 0.0, "4": 0.0}
    # what is gone counts for nothing any more, also where somebody else comes before now
    index.remove("ann", ["1"])
    index.add("ann", [Entry("2", said[2], talk="s", time=2)])
    assert [hit.score for hit in index.seen("ann", ["2"], Sought({worth: 1.0}))] == [0.0]


def around(index: KeywordIndex, *names: str, user: str = "ann") -> dict[str, tuple[str | None, str | None]]:
    after = {one.id: one.later[0] for one in index.seen(user, names, Sought()) if one.later}
    before = {later: one for one, later in after.items()}
    return {name: (before.get(name), after.get(name)) for name in names}


def test_what_is_found_comes_with_the_next_two_turns_of_its_talk(index: KeywordIndex) -> None:
    index.add("ann", [Entry(name, f"said {name}", talk="s", time=place) for place, name in enumerate("abcd")])
    index.add("ann", [Entry("e", "said elsewhere", talk="t", time=9), Entry("f", "said", time=9)])
    later = {"a": ["b", "c"], "b": ["c", "d"], "c": ["d"], "d": [], "e": [], "f": []}
    assert {one.id: one.later for one in index.seen("ann", [*later, "gone"], Sought())} == later
    assert {one.id: one.later for one in index.search("ann", "said", 10).hits} == later


def test_turns_of_a_talk_are_in_order_by_time_and_then_as_they_came(index: KeywordIndex) -> None:
    # a talk's own order is not the order of arrival, but where times are the same
    times = {"c": 3, "a": 1, "b1": 2, "b2": 2, "b3": 2}
    index.add("ann", [Entry(name, f"said {name}", talk="s", time=time) for name, time in times.items()])
    index.add("ann", [Entry("other", "said elsewhere", talk="t", time=2), Entry("alone", "said", time=2)])
    found = around(index, *times, "other", "alone")
    assert found["a"] == (None, "b1")
    assert found["b1"] == ("a", "b2")
    assert found["b2"] == ("b1", "b3")
    assert found["b3"] == ("b2", "c")
    assert found["c"] == ("b3", None)
    assert found["other"] == found["alone"] == (None, None)


def test_a_turn_that_is_written_again_keeps_its_place_among_those_of_one_time(index: KeywordIndex) -> None:
    turns = [Entry(name, f"said {name}", talk="s", time=7) for name in "abc"]
    index.add("ann", turns)
    index.add("ann", [replace(turns[1], text="said otherwise"), replace(turns[0], before="what was said before")])
    assert around(index, *"abc") == {"a": (None, "b"), "b": ("a", "c"), "c": ("b", None)}
    index.add("ann", [replace(turns[1], time=9, text="said otherwise")])
    assert around(index, *"abc") == {"a": (None, "c"), "b": ("c", None), "c": ("a", "b")}


def test_a_turn_that_is_removed_is_no_longer_between_others(index: KeywordIndex) -> None:
    index.add("ann", [Entry(name, f"said {name}", talk="s", time=place) for place, name in enumerate("abc")])
    index.remove("ann", ["b"])
    assert around(index, "a", "c", "b") == {"a": (None, "c"), "c": ("a", None), "b": (None, None)}
    assert around(index, "a", user="bob") == {"a": (None, None)}


def test_windows_hold_what_was_said_round_each_and_touching_ones_are_one(index: KeywordIndex) -> None:
    index.add("ann", [Entry(f"s{n:02}", f"said {n}", talk="s", time=n // 2) for n in range(20)])
    index.add("ann", [Entry("t0", "said", talk="t", time=1), Entry("t1", "said", talk="t", time=2), COFFEE])
    names = [f"s{n:02}" for n in range(20)]
    assert index.windows("ann", ["s10", "t1", "s02", "s13", "coffee", "gone"], 2) == [
        names[8:16],
        ["t0", "t1"],
        names[0:5],
    ]
    # the one between joins the two
    assert index.windows("ann", ["s02", "s08", "s05"], 2) == [names[0:11]]
    assert index.windows("ann", ["s00"], 0) == [["s00"]]
    assert index.windows("bob", ["s10"], 2) == index.windows("ann", [], 2) == []


def test_what_only_the_vectors_have_found_is_judged_by_the_words_too(index: KeywordIndex) -> None:
    index.add(
        "ann", [replace(LISBON, talk="s", time=1), replace(COFFEE, talk="s", time=2, data="d", vector=b"v", model="m")]
    )
    found = index.search("ann", "coffee with milk in Lisbon", 5)
    both = index.seen("ann", ["coffee", "lisbon", "gone"], found.sought)
    assert sorted(both) == sorted(found.hits)
    assert index.seen("ann", ["coffee"], Sought()) == [Seen("coffee", 0.0, "d", b"v", "m", [])]
    assert index.seen("bob", ["coffee"], found.sought) == []


def test_no_user_finds_anything_of_another(index: KeywordIndex, tmp_path: Path) -> None:
    index.add("ann", [COFFEE])
    index.add("bob", [Entry("coffee", "Bob drinks coffee black")])
    assert index.search("eve", "coffee", 5).hits == []
    index.remove("bob", ["coffee"])
    assert ids(index.search("ann", "coffee", 5)) == ["coffee"]
    assert index.search("bob", "coffee", 5).hits == []
    index.remove_user("ann")
    assert index.search("ann", "coffee", 5).hits == []
    assert len(files(tmp_path)) == 1


def test_one_users_words_do_not_change_anothers_scores(index: KeywordIndex) -> None:
    index.add("ann", [COFFEE, LISBON])
    before = index.search("ann", "coffee in Lisbon", 5).hits
    index.add("bob", [Entry(f"b{number}", "coffee coffee coffee") for number in range(50)])
    assert index.search("ann", "coffee in Lisbon", 5).hits == before


def test_searching_makes_no_file(index: KeywordIndex, tmp_path: Path) -> None:
    assert index.search("ann", "coffee", 5) == Found()
    assert index.count("ann") == 0
    assert index.remove("ann", ["coffee"]) == 0
    assert (index.seen("ann", ["coffee"], Sought({"coffe": 1.0})), index.data("ann", ["coffee"])) == ([], {})
    assert index.windows("ann", ["coffee"], 2) == []
    assert files(tmp_path) == []


def test_nothing_is_found_of_nothing_that_is_asked_for(index: KeywordIndex) -> None:
    index.add("ann", [replace(COFFEE, talk="s", time=1), replace(LISBON, talk="s", time=2)])
    found = index.search("ann", "coffee", 1)
    assert ids(found) == ["coffee"]
    for limit in (0, -1):
        assert index.search("ann", "coffee", limit) == Found()
    assert index.search("ann", "?!", 5) == Found()
    assert (index.seen("ann", [], found.sought), index.data("ann", [])) == ([], {})
    assert index.windows("ann", [], 2) == []


def test_search_does_not_wait_for_another_writer(index: KeywordIndex, tmp_path: Path) -> None:
    index.add("ann", [COFFEE])
    (path,) = files(tmp_path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        other.execute("DELETE FROM engram")
        assert ids(index.search("ann", "coffee", 5)) == ["coffee"]
        other.execute("ROLLBACK")


def test_a_folder_is_made_for_its_owner_alone_and_is_found_again(tmp_path: Path) -> None:
    for _ in range(2):
        KeywordIndex(tmp_path / "data" / "keywords").close()
    assert (tmp_path / "data" / "keywords").stat().st_mode & 0o777 == 0o700


def test_adding_again_replaces(index: KeywordIndex) -> None:
    index.add("ann", [COFFEE])
    index.add("ann", [COFFEE])
    index.add("ann", [Entry("coffee", "I drink tea now")])
    assert index.count("ann") == 1
    assert index.search("ann", "coffee oat milk", 5).hits == []
    assert ids(index.search("ann", "tea", 5)) == ["coffee"]


def test_data_is_given_back_and_replaced_without_the_words(index: KeywordIndex) -> None:
    index.add("ann", [Entry("coffee", COFFEE.text, data="ungraded", vector=b"place", model="m"), LISBON])
    index.add("ann", [Entry("coffee", COFFEE.text, data="graded")])
    assert index.data("ann", ["coffee", "lisbon", "unknown"]) == {"coffee": "graded", "lisbon": ""}
    assert index.data("bob", ["coffee"]) == {}
    (hit,) = index.search("ann", "coffee", 5).hits
    assert (hit.id, hit.vector, hit.model) == ("coffee", b"place", "m")
    assert index.count("ann") == 2


def test_a_vector_goes_with_its_text_and_is_replaced_by_another(index: KeywordIndex) -> None:
    index.add("ann", [Entry("coffee", COFFEE.text, vector=b"old", model="m")])
    index.add("ann", [Entry("coffee", COFFEE.text, vector=b"new", model="n")])
    (hit,) = index.search("ann", "coffee", 5).hits
    assert (hit.vector, hit.model) == (b"new", "n")
    index.add("ann", [Entry("coffee", "tea", data="changed")])
    (hit,) = index.search("ann", "tea", 5).hits
    assert (hit.vector, hit.model) == (None, "")


def test_another_turn_before_it_leaves_the_vector_in_its_place(index: KeywordIndex) -> None:
    index.add("ann", [Entry("coffee", COFFEE.text, vector=b"place", model="m"), LISBON])
    index.add("ann", [Entry("coffee", COFFEE.text, before="Shall we take the ferry?")])
    (hit,) = index.search("ann", "ferry", 5).hits
    assert (hit.id, hit.vector, hit.model) == ("coffee", b"place", "m")


def test_an_addition_that_fails_leaves_nothing_behind(index: KeywordIndex) -> None:
    index.add("ann", [LISBON])
    with pytest.raises(sqlite3.Error, match="not supported"):
        index.add("ann", [COFFEE, Entry({}, "no id")])  # type: ignore[arg-type]
    assert index.search("ann", "coffee", 5).hits == []
    index.add("ann", [COFFEE])
    assert ids(index.search("ann", "coffee", 5)) == ["coffee"]


def test_what_is_removed_is_not_on_the_disk_any_more(index: KeywordIndex, tmp_path: Path) -> None:
    index.add("ann", [Entry("secret", "the codeword is xylophone", "zanzibar", "quetzalcoatl " * 500), COFFEE])
    for number in range(40):
        # each write is a segment of its own in the index of words
        index.add("ann", [Entry(f"other {number}", f"another codeword {number}", "", "quince " * 100)])
    secrets = ["xylophon", "zanzibar", "quetzalcoatl"]
    assert on_disk(tmp_path, secrets) == secrets
    assert index.remove("ann", ["secret", "unknown"]) == 1
    while index.overwrite("ann"):
        pass
    assert on_disk(tmp_path, secrets) == []
    assert ids(index.search("ann", "coffee", 5)) == ["coffee"]


@pytest.mark.parametrize("begun", ["ended", "user removed"])
def test_what_is_removed_later_is_overwritten_as_well(index: KeywordIndex, tmp_path: Path, begun: str) -> None:
    for number in range(40):
        index.add("ann", [Entry(f"other {number}", f"another codeword {number}", "", "quince " * 100)])
    index.remove("ann", ["other 1"])
    index.overwrite("ann")
    if begun == "ended":
        while index.overwrite("ann"):
            pass
    else:
        index.remove_user("ann")
    # so few segments are not put together unless that is asked for
    index.add("ann", [Entry("secret", "the codeword is xylophone")])
    assert on_disk(tmp_path, ["xylophon"])
    index.remove("ann", ["secret"])
    while index.overwrite("ann"):
        pass
    assert on_disk(tmp_path, ["xylophon"]) == []
    assert index.count("ann") == (39 if begun == "ended" else 0)


@pytest.mark.parametrize("steps", [0, 1])
def test_removed_words_are_overwritten_after_a_restart(index: KeywordIndex, tmp_path: Path, steps: int) -> None:
    for number in range(40):
        index.add("ann", [Entry(f"other {number}", f"another codeword {number}", "", "{}")])
    index.add("ann", [Entry("secret", "the codeword is xylophone", data="{}")])
    index.remove("ann", ["secret"])
    for _ in range(steps):
        index.overwrite("ann")
    index.close()
    again = KeywordIndex(tmp_path / "keywords")
    assert again.unclean == set()
    assert len(again.known(again.files())) == 40
    assert again.unclean == {"ann"}
    while again.overwrite("ann"):
        pass
    again.close()
    assert again.unclean == set()
    assert on_disk(tmp_path, ["xylophon"]) == []


def test_an_index_is_made_anew_of_what_it_is_given(index: KeywordIndex) -> None:
    index.add("ann", [COFFEE])
    index.add("bob", [COFFEE])
    index.replace("ann", [LISBON])
    assert ids(index.search("ann", "coffee in Lisbon", 5)) == ["lisbon"]
    assert (index.count("ann"), index.count("bob")) == (1, 1)


def test_overwriting_makes_no_file_and_can_be_repeated(index: KeywordIndex, tmp_path: Path) -> None:
    assert not index.overwrite("nobody")
    assert files(tmp_path) == []
    index.add("ann", [COFFEE])
    while index.overwrite("ann"):
        pass
    while index.overwrite("ann"):
        pass
    assert ids(index.search("ann", "coffee", 5)) == ["coffee"]


def test_it_is_still_there_after_a_restart(index: KeywordIndex, tmp_path: Path) -> None:
    index.add("ann", [COFFEE])
    index.close()
    again = KeywordIndex(tmp_path / "keywords")
    assert ids(again.search("ann", "coffee", 5)) == ["coffee"]
    again.close()


def test_what_was_added_survives_a_crash(index: KeywordIndex, tmp_path: Path) -> None:
    index.add("ann", [COFFEE])
    # no close: another process opens what the first has left
    after = KeywordIndex(tmp_path / "keywords")
    assert ids(after.search("ann", "coffee", 5)) == ["coffee"]
    after.close()


def test_the_mark_says_how_far_it_follows_the_store(index: KeywordIndex, tmp_path: Path) -> None:
    assert index.mark() is None
    index.set_mark("17-0")
    assert KeywordIndex(tmp_path / "keywords").mark() == "17-0"


def test_an_index_of_another_version_has_no_mark(index: KeywordIndex, tmp_path: Path) -> None:
    index.set_mark("17-0")
    mark = tmp_path / "keywords" / "mark"
    mark.write_text(mark.read_text().replace(str(VERSION), str(VERSION + 1), 1))
    assert index.mark() is None


def test_index_cleared_has_neither_words_nor_mark(index: KeywordIndex) -> None:
    index.add("ann", [COFFEE])
    index.add("bob", [COFFEE])
    index.set_mark("17-0")
    index.clear()
    assert (index.count("ann"), index.count("bob"), index.mark()) == (0, 0, None)
    index.add("ann", [LISBON])
    assert ids(index.search("ann", "coffee in Lisbon", 5)) == ["lisbon"]


def test_known_engrams_are_those_of_readable_files(index: KeywordIndex, tmp_path: Path) -> None:
    index.add("ann", [Entry("a", "tea", data='{"kind":"turn","respondent_id":"A"}', time=5), LISBON])
    index.add("ann", [Entry("b", "", data='{"kind":"turn","respondent_id":"B"}', time=6)])
    index.remove("ann", ["lisbon"])
    index.add("ben", [Entry("c", "tea", data='{"kind":"note","respondent_id":""}', time=7)])
    before = set(files(tmp_path))
    index.add("eve", [COFFEE])
    index.close()
    (lost,) = set(files(tmp_path)) - before
    lost.write_bytes(b"no database" * 1_000)
    found = sorted(index.known(index.files()))
    assert found == [
        Known("a", "ann", 5, "turn", True),
        Known("b", "ann", 6, "turn", False),
        Known("c", "ben", 7, "note", True),
    ]


@pytest.mark.parametrize("damage", ["garbage", "pages", "version"])
def test_a_damaged_file_is_reported_and_made_anew(index: KeywordIndex, tmp_path: Path, damage: str) -> None:
    index.add("ann", [COFFEE, *(Entry(f"e{number}", f"coffee number{number} " * 40) for number in range(200))])
    index.close()
    (path,) = files(tmp_path)
    if damage == "garbage":
        path.write_bytes(b"this is no database " * 500)
    elif damage == "pages":
        content = bytearray(path.read_bytes())
        content[8_192:] = b"\xa5" * (len(content) - 8_192)
        path.write_bytes(content)
    else:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    with pytest.raises(KeywordIndexDamaged) as caught:
        index.search("ann", "coffee", 5)
    assert caught.value.user_id == "ann"
    assert files(tmp_path) == []
    index.replace("ann", [COFFEE])
    assert ids(index.search("ann", "coffee", 5)) == ["coffee"]
    assert index.count("ann") == 1


def test_a_file_that_cannot_be_opened_just_now_is_not_called_damaged(index: KeywordIndex, tmp_path: Path) -> None:
    index.add("ann", [COFFEE])
    index.close()
    (path,) = files(tmp_path)
    path.rename(path.with_suffix(".aside"))
    path.mkdir()
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        index.search("ann", "coffee", 5)
    path.rmdir()
    path.with_suffix(".aside").rename(path)
    assert ids(index.search("ann", "coffee", 5)) == ["coffee"]


def test_a_mark_that_cannot_be_read_is_none(index: KeywordIndex, tmp_path: Path) -> None:
    index.set_mark("17-0")
    (tmp_path / "keywords" / "mark").write_bytes(b"\xff\xfe\n17-0")
    assert index.mark() is None


def opened(tmp_path: Path) -> set[str]:
    """The files of the index that this process has open."""
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return {link for link in links if link.startswith(str(tmp_path / "keywords")) and link.endswith(".db")}


def test_a_user_who_is_forgotten_leaves_no_open_file(index: KeywordIndex, tmp_path: Path) -> None:
    for forget in (lambda: index.remove_user("ann"), index.clear, index.close):
        index.add("ann", [COFFEE])
        assert len(opened(tmp_path)) == 1
        forget()
        assert opened(tmp_path) == set()
    index.remove_user("ann")
    assert files(tmp_path) == []


def test_many_users_have_few_open_files_and_the_last_used_stay_open(index: KeywordIndex, tmp_path: Path) -> None:
    for number in range(OPEN_FILES + 8):
        index.add(f"user{number}", [Entry("e", f"thing{number} coffee")])
        if number == 0:
            first = opened(tmp_path)
        assert first <= opened(tmp_path)
        # The first user searches all the time.
        assert ids(index.search("user0", "thing0", 5)) == ["e"]
    assert len(opened(tmp_path)) == OPEN_FILES
    for number in range(OPEN_FILES + 8):
        assert ids(index.search(f"user{number}", f"thing{number}", 5)) == ["e"]
        assert index.search(f"user{number}", f"thing{number + 1}", 5).hits == []


def test_many_threads_add_search_and_forget(index: KeywordIndex) -> None:
    # More users than open files: threads close the files of other threads.
    others = [f"other{number}" for number in range(OPEN_FILES)]
    for user in others:
        index.add(user, [COFFEE])
    stop = threading.Event()

    def search(user: str) -> None:
        while not stop.is_set():
            assert all(hit.id.startswith(user) for hit in index.search(user, "coffee", 50).hits)

    def write(user: str) -> None:
        for number in range(15):
            index.add(user, [Entry(f"{user}-{number}", "coffee"), Entry(f"{user}-x{number}", "coffee")])
            index.remove(user, [f"{user}-x{number}"])
        if user == "u4":
            index.remove_user(user)

    def visit() -> None:
        while not stop.is_set():
            assert all(ids(index.search(user, "coffee", 5)) == ["coffee"] for user in others)

    users = [f"u{number}" for number in range(5)]
    with ThreadPoolExecutor(11) as pool:
        searches = [pool.submit(visit), *(pool.submit(search, user) for user in users)]
        try:
            for done in [pool.submit(write, user) for user in users]:
                done.result(30)
        finally:
            stop.set()
        for done in searches:
            done.result(30)
    assert [index.count(user) for user in users] == [15, 15, 15, 15, 0]


def test_where_every_word_is_common_what_has_them_all_is_found(index: KeywordIndex) -> None:
    index.add("ann", [Entry("both", "tea and coffee, a long time ago")])
    index.add("ann", [Entry(f"c{number}", f"coffee {number}") for number in range(2 * COMMON)])
    index.add("ann", [Entry(f"t{number}", f"tea {number}") for number in range(2 * COMMON)])
    assert ids(index.search("ann", "coffee or tea", 5))[0] == "both"


def test_where_one_word_is_common_the_newest_are_found(index: KeywordIndex) -> None:
    index.add("ann", [Entry(f"c{number}", "coffee") for number in range(2 * COMMON)])
    assert ids(index.search("ann", "coffee", 5)) == [f"c{2 * COMMON - number}" for number in range(1, 6)]


def test_of_what_has_all_common_words_those_come_first_that_have_them_themselves(index: KeywordIndex) -> None:
    index.add("ann", [Entry(f"said{number}", "coffee and tea") for number in range(3)])
    index.add("ann", [Entry(f"asked{number}", "yes", "coffee and tea") for number in range(COMMON - 4)])
    index.add("ann", [Entry(f"c{number}", "coffee") for number in range(COMMON)])
    index.add("ann", [Entry(f"t{number}", "tea") for number in range(COMMON)])
    found = ids(index.search("ann", "coffee or tea", 5))
    assert found == ["said2", "said1", "said0", f"asked{COMMON - 5}", f"asked{COMMON - 6}"]


def test_a_word_is_worth_more_than_the_same_in_the_turn_before_and_less_than_several_there(index: KeywordIndex) -> None:
    index.add("ann", [Entry(f"e{number}", "bread") for number in range(50)])
    index.add("ann", [Entry("asked", "yes", "coffee from Sumatra"), Entry("said", "coffee")])
    index.add("ann", [Entry("told", "Sumatra")])
    found = index.search("ann", "coffee Sumatra", 5)
    assert [(hit.id, round(hit.score, 3)) for hit in found.hits] == [("asked", 0.8), ("told", 0.5), ("said", 0.5)]
    assert ids(index.search("ann", "Sumatra", 5)) == ["told", "asked"]


def test_a_common_word_does_not_hide_a_rare_one(index: KeywordIndex) -> None:
    index.add("ann", [Entry("rare", "coffee from Sumatra"), *(Entry(f"c{n}", "coffee") for n in range(2 * COMMON))])
    first, *_ = index.search("ann", "coffee Sumatra", 5).hits
    assert (first.id, first.score) == ("rare", pytest.approx(1.0))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=80), st.text(max_size=80))
def test_no_text_breaks_a_search(index: KeywordIndex, stored: str, asked: str) -> None:
    index.add("ann", [Entry("any", stored, asked)])
    for hit in index.search("ann", asked, 5).hits:
        assert 0 <= hit.score <= 1 + 1e-9
    index.search("ann", f'{asked}" OR turn:* NEAR({stored}) -{asked}', 5)


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "forget"]),
        st.sampled_from(["ann", "bob", "eve"]),
        st.integers(0, 5),
        st.sampled_from(["alpha", "beta", "gamma"]),
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_after_any_history_each_user_finds_exactly_their_own(tmp_path: Path, history: list) -> None:
    index = KeywordIndex(tmp_path / "history")
    index.clear()
    kept: dict[str, dict[str, str]] = {"ann": {}, "bob": {}, "eve": {}}
    for action, user, number, word in history:
        if action == "add":
            index.add(user, [Entry(f"e{number}", word)])
            kept[user][f"e{number}"] = word
        elif action == "remove":
            index.remove(user, [f"e{number}"])
            kept[user].pop(f"e{number}", None)
        else:
            index.remove_user(user)
            kept[user].clear()
    for user, theirs in kept.items():
        assert index.count(user) == len(theirs)
        for word in ("alpha", "beta", "gamma"):
            expected = {id_ for id_, said in theirs.items() if said == word}
            assert {hit.id for hit in index.search(user, word, 20).hits} == expected
    index.close()
