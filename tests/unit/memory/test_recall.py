from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.memory.catalog import Catalog
from services.memory.engram import Engram, as_before
from services.memory.index import entry
from services.memory.keywords import KeywordIndex, Sought
from services.memory.recall import Recall, Recalled, Reranked, Wanted
from services.memory.rerank import RerankFailed
from services.memory.settings import MemorySettings
from services.memory.store import Near
from services.memory.vectors import Vector

USER = "ann"
# The time of every search: 2026-11-28 12:00 UTC.
NOON = 1_795_867_200_000
DAY = 86_400_000
# The similarity of each engram, unless a test gives another one.
SIMILAR = 0.15


@dataclass
class Memory:
    """Store, index and embedder of a search: real words, and similarities as the test has them."""

    keywords: KeywordIndex
    near: dict[str, float] = field(default_factory=dict)
    engrams: dict[str, Engram] = field(default_factory=dict)
    using: str = "m"
    trouble: str | None = None
    away: bool = False
    catalog: Catalog = field(default_factory=Catalog)
    rebuilding: bool = False

    def say(self, *turns: str, session: str = "s", respondent: str = "A", time: int = 0) -> list[str]:
        """Turns `question | answer` of a session, a second apart; their ids."""
        made = []
        for number, turn in enumerate(turns):
            query, _, answer = turn.partition(" | ")
            at, name = 1_000 * (time + number), f"{session}-{time + number}:{respondent}"
            made.append(Engram(name, USER, "turn", at, at, session, name, respondent, query, answer))
        self.keywords.add(USER, [entry(one, Vector("m", [SIMILAR, 0.99])) for one in made])
        self.engrams |= {one.id: one for one in made}
        self.catalog.add(made)
        return [one.id for one in made]

    # as the store and the embedder

    async def query(self, *args: Any) -> list[Near] | Vector | None:
        if len(args) == 1:
            return None if self.away else Vector("m", [1.0, 0.0])
        _, _, limit, hidden = args
        found = [Near(name, value) for name, value in self.near.items() if name not in hidden]
        return sorted(found, key=lambda one: -one.similarity)[:limit]

    async def get(self, _user_id: str, ids: Sequence[str]) -> dict[str, Engram]:
        return {name: self.engrams[name] for name in ids if name in self.engrams}

    # as the index

    async def look(self, _user_id: str, work: Callable[[KeywordIndex], Any]) -> Any:
        """None: the word index is being rebuilt."""
        return None if self.rebuilding else work(self.keywords)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    keywords = KeywordIndex(tmp_path / "words")
    yield Memory(keywords)
    keywords.close()


async def searched(memory: Memory, wanted: Wanted, reranker: Order | None = None, **settings: object) -> Recalled:
    chosen = MemorySettings(_env_file=None, **settings)  # type: ignore[call-arg, arg-type]
    rerankers = {"model": reranker} if reranker else {}
    recall = Recall(memory, memory, memory, rerankers, lambda: NOON)  # type: ignore[arg-type]
    return await recall.search(USER, wanted, chosen)


def ids(recalled: Recalled) -> list[str]:
    return [engram.id for _, engram in recalled.hits]


async def found(memory: Memory, *queries: str, **settings: object) -> list[str]:
    return ids(await searched(memory, Wanted(queries), **settings))


class Order:
    """A reranker that turns the list round and keeps so many; or fails."""

    name = "model"

    def __init__(self, keep: int = 50, fails: str = "") -> None:
        self.keep, self.fails = keep, fails
        self.asked: list[tuple[str, list[str]]] = []

    async def order(self, query: str, texts: Sequence[str], _settings: MemorySettings) -> list[int]:
        self.asked.append((query, list(texts)))
        if self.fails:
            raise RerankFailed(self.fails)
        return list(range(len(texts)))[::-1][: self.keep]


async def test_what_stands_beside_a_hit_is_found_though_neither_search_brings_it(memory: Memory) -> None:
    asked, then, told, after = memory.say("Which boat did you buy?", "Guess.", "The blue one, Marguerite.", "Fine.")
    memory.near = {asked: 0.7}
    first, *others = await found(memory, "boat", min_score=0.2)
    assert (first, sorted(others)) == (asked, [then, told])
    assert after not in await found(memory, "boat", min_score=0.0)
    assert await found(memory, "boat", min_score=0.2, weights={"beside": 0.0}) == [asked]


async def test_hidden_answers_have_no_neighbours(memory: Memory) -> None:
    asked, silent = memory.say("Which boat did you buy?", "Silence.")
    b, told = memory.say("Which boat was it?", "The blue one.", respondent="B")
    later = {one.id: one.later for one in memory.keywords.seen(USER, [asked, silent, b, told], Sought())}
    assert later == {asked: [silent], silent: [], b: [], told: []}


async def test_log_round_a_hit_has_no_hidden_answer(memory: Memory) -> None:
    shown = memory.say("How was Bergen?", "It rained.", "And the harbour?")
    memory.say("How was Bergen?", "It snowed unseen.", "And the harbour?", respondent="B")
    recalled = await searched(memory, Wanted(("harbour",), log=True))
    assert recalled.log is not None
    assert [one.id for talk in recalled.log for one in talk] == shown


async def test_search_without_word_index_finds_no_hidden_answer(memory: Memory) -> None:
    (shown,) = memory.say("Which boat did you buy?")
    (hidden,) = memory.say("Which boat did you buy?", respondent="B")
    memory.near = {hidden: 0.9, shown: 0.7}
    # The catalog is not complete yet, and memory is rebuilding the word index.
    memory.catalog = Catalog()
    memory.rebuilding = True
    assert await found(memory, "boat") == [shown]


async def dated(memory: Memory, query: str, zone: str = "UTC") -> list[str]:
    found = await searched(memory, Wanted((query,), zone=zone), weights={"beside": 0.0})
    return [engram.id for _, engram in found.hits]


async def test_question_about_yesterday_finds_what_was_said_then(memory: Memory) -> None:
    (older,) = memory.say("I bought bread.", session="a", time=(NOON - 2 * DAY) // 1000)
    (then,) = memory.say("I bought milk.", session="b", time=(NOON - DAY) // 1000)
    (now,) = memory.say("I bought tea.", session="c", time=(NOON - 60_000) // 1000)
    for name, found in {"yesterday": then, "the day before yesterday": older, "today": now}.items():
        assert await dated(memory, f"What did we talk about {name}?") == [found], name
    assert (await dated(memory, "Did I buy bread yesterday?"))[:1] != [now]


async def test_yesterday_is_that_of_the_users_zone(memory: Memory) -> None:
    # 26 November, 20:00 UTC: the 27th in Sydney, and noon of the 26th in Los Angeles
    (said,) = memory.say("I bought milk.", time=(NOON - DAY - 16 * 3_600_000) // 1000)
    found = {zone: await dated(memory, "What was yesterday?", zone) for zone in
             ("Australia/Sydney", "America/Los_Angeles", "Europe/Berlin")}  # fmt: skip
    assert found == {"Australia/Sydney": [said], "America/Los_Angeles": [], "Europe/Berlin": []}


# A keyword hit below the threshold: its question, the other memories, and whether it is found.
BELOW = [
    pytest.param("the zeppelin", ["coffee"] * 8, True, id="rare"),
    pytest.param("the coffee", ["more coffee"] * 8, False, id="common"),
    pytest.param("the coffee machine", ["more coffee"] * 8, True, id="common-and-rare"),
    pytest.param("a zeppelin", ["coffee"] * 2, True, id="small-store"),
]


@pytest.mark.parametrize(("said", "others", "passes"), BELOW)
async def test_keyword_hit_below_the_threshold_needs_a_rare_word(
    memory: Memory, said: str, others: list[str], passes: bool
) -> None:
    (hit,) = memory.say(said, session="x")
    for number, text in enumerate(others):
        memory.say(text, session=f"other-{number}")
    assert await found(memory, said, top_k=50, min_score=0.3) == ([hit] if passes else [])


@pytest.mark.parametrize(("egg", "goldfish"), [(0.04, 0.13), (-0.08, 0.07), (0.1, 0.16)])
async def test_unrelated_next_turns_of_a_chat_are_left_out(memory: Memory, egg: float, goldfish: float) -> None:
    names = memory.say("My aunt Frieda lives in Oslo.", "How long do I boil an egg?", "And a goldfish?")
    turns = [memory.engrams[name] for name in names]
    following = [replace(one, before=as_before(before)) for before, one in pairwise(turns)]
    memory.keywords.add(USER, [entry(one) for one in following])
    memory.near = dict(zip(names, [0.58, egg, goldfish], strict=True))
    assert await found(memory, "Where does aunt Frieda live?", min_score=0.25) == names[:1]


async def test_memory_below_the_threshold_without_words_is_left_out(memory: Memory) -> None:
    near, far = memory.say("alpha", "beta")
    memory.near = {near: 0.31, far: 0.29}
    assert await found(memory, "gamma", min_score=0.3, weights={"beside": 0.0}) == [near]


async def test_words_count_for_what_only_the_vectors_have_found(memory: Memory) -> None:
    oldest, *_ = memory.say(*(f"coffee number {number}" for number in range(80)))
    memory.near = {oldest: 0.9}
    recalled = await searched(memory, Wanted(("coffee",)))
    hit, engram = recalled.hits[0]
    assert (engram.id, hit.why["keyword_rank"], hit.why["keyword_score"]) == (oldest, None, 1.0)


async def test_while_the_model_is_away_words_alone_decide(memory: Memory) -> None:
    asked, *_ = memory.say("Which boat did you buy?", "The blue one.")
    memory.near, memory.away = {"s-1:A": 0.9}, True
    assert await found(memory, "boat") == [asked]


async def test_several_queries_are_merged_and_each_engram_is_told_once(memory: Memory) -> None:
    boat, bread, both = memory.say("We bought a boat.", "We baked bread.", "We ate bread on the boat.", session="x")
    alone = {"beside": 0.0}
    assert await found(memory, "boat", top_k=1, weights=alone) in ([boat], [both])
    hits = await found(memory, "boat", "bread", weights=alone)
    assert sorted(hits) == sorted([boat, bread, both])
    # the best of each first: what is found for one query alone does not stand behind all of the other's
    assert await found(memory, "boat", "baked", top_k=1, weights=alone) in ([boat, bread], [both, bread])


async def test_n_results_is_the_number_for_each_query_and_bounded_for_all(memory: Memory) -> None:
    memory.say(*(f"coffee number {number}" for number in range(60)), *(f"tea number {number}" for number in range(60)))
    for queries, n_results, count in ((("coffee",), 7, 7), (("coffee", "tea"), 7, 14), (("coffee", "tea"), 50, 50)):
        assert len((await searched(memory, Wanted(queries, n_results), min_score=SIMILAR)).hits) == count


async def test_without_words_the_vectors_alone_decide(memory: Memory) -> None:
    coffee, alike = memory.say("coffee with milk", "an unlike text")
    memory.near = {alike: 0.9, coffee: 0.3}
    for hybrid in ({"wanted": False, "setting": True}, {"wanted": None, "setting": False}):
        recalled = await searched(memory, Wanted(("coffee",), hybrid=hybrid["wanted"]), hybrid=hybrid["setting"])
        assert ids(recalled)[0] == alike
        assert {hit.why["keyword_score"] for hit, _ in recalled.hits} == {None}
    assert ids(await searched(memory, Wanted(("coffee with milk",), hybrid=True), hybrid=False))[0] == coffee
    # nothing else to go by
    memory.away = True
    assert ids(await searched(memory, Wanted(("coffee with milk",), hybrid=False)))[0] == coffee


async def test_a_reranker_chooses_from_more_than_are_told(memory: Memory) -> None:
    turns = memory.say(*(f"coffee number {number}" for number in range(30)))
    order = Order()
    pool = {"rerank_pool": 12, "min_score": SIMILAR}
    recalled = await searched(memory, Wanted(("coffee",), n_results=3, do_rerank=True), order, **pool)
    ((query, texts),) = order.asked
    assert (query, len(texts), recalled.reranked) == ("coffee", 12, Reranked("model", 12))
    plain = await searched(memory, Wanted(("coffee",), n_results=12), order, min_score=SIMILAR)
    assert ids(recalled) == ids(plain)[::-1][:3]
    assert plain.reranked is None
    assert set(ids(recalled)) <= set(turns)


async def test_a_reranker_reads_no_more_for_several_queries_than_there_is_room_for(memory: Memory) -> None:
    words = ("coffee", "tea", "milk", "bread")
    memory.say(*(f"{word} number {number}" for word in words for number in range(30)))
    order = Order()
    pool = {"rerank_pool": 12, "min_score": SIMILAR}
    recalled = await searched(memory, Wanted(words, n_results=4, do_rerank=True), order, **pool)
    assert (len(order.asked[0][1]), len(recalled.hits)) == (16, 16)
    recalled = await searched(memory, Wanted(words, n_results=2, do_rerank=True), order, **pool)
    assert (len(order.asked[1][1]), len(recalled.hits)) == (12, 8)
    # of each query as many
    assert [sum(word in text for text in order.asked[1][1]) for word in words] == [3, 3, 3, 3]


async def test_what_a_reranker_leaves_out_is_not_told(memory: Memory) -> None:
    memory.say("coffee", "coffee again")
    assert (await searched(memory, Wanted(("coffee",), do_rerank=True), Order(keep=0))).hits == []
    nothing = await searched(memory, Wanted(("zeppelin",), do_rerank=True), Order(keep=0))
    assert (nothing.hits, nothing.reranked) == ([], Reranked("model", 0))


async def test_a_reranker_that_fails_leaves_everything_as_it_was_and_says_so(memory: Memory) -> None:
    memory.say(*(f"coffee number {number}" for number in range(9)))
    plain = await searched(memory, Wanted(("coffee",)), min_score=SIMILAR)
    order = Order(fails="the server is full")
    failed = await searched(memory, Wanted(("coffee",)), order, do_rerank=True, min_score=SIMILAR)
    assert ids(failed) == ids(plain)
    assert failed.reranked is not None
    assert failed.reranked.trouble == "the server is full"
    unranked = await searched(memory, Wanted(("coffee",), do_rerank=True), rerank="none", min_score=SIMILAR)
    assert ids(unranked) == ids(plain)
    assert unranked.reranked is not None
    assert "rerank is none" in str(unranked.reranked.trouble)
    assert (await searched(memory, Wanted(("coffee",), do_rerank=False), Order(), do_rerank=True)).reranked is None


async def test_the_log_has_what_was_said_before_and_after(memory: Memory) -> None:
    talk = memory.say("How was Bergen?", "It rained.", "And the harbour?", "Full of boats.", "Fine.", "Good night.")
    memory.say("Another talk about rain.", session="other", time=100)
    recalled = await searched(memory, Wanted(("harbour",), log=True))
    assert ids(recalled)[0] == talk[2]
    assert recalled.log is not None
    assert [engram.id for engram in recalled.log[0]] == talk[: len(recalled.log[0])]
    assert set(talk[:5]) <= {engram.id for engram in recalled.log[0]}
    assert (await searched(memory, Wanted(("harbour",)))).log is None
    assert (await searched(memory, Wanted(("zeppelin",), log=True))).log == []


async def test_while_the_index_is_made_anew_the_vectors_alone_are_searched(memory: Memory) -> None:
    asked, _ = memory.say("Which boat did you buy?", "The blue one.")
    memory.near = {asked: 0.7}
    memory.rebuilding = True
    assert await found(memory, "boat") == [asked]
