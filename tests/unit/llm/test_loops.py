"""Loops are seen, whatever returns in them; what merely repeats a lot is left alone."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest

from shared.llm.loops import LoopWatch, asks_to_repeat, without_loop

ROOT = Path(__file__).parents[3]
_random = random.Random(7)
WORDS = ["".join(_random.choices("abcdefghijklmnop", k=_random.randint(2, 9))) for _ in range(500)]


def prose(words: int) -> str:
    return " ".join(_random.choices(WORDS, k=words))


# name: (what comes before, what returns)
LOOPS = {
    "a word": ("", "The "),
    "a sentence": ("Paris. ", "The capital of France is Paris. "),
    "a line": ("Well:\n", "I am sorry, I cannot do that.\n"),
    "two sentences in turn": ("", "Yes, I think so. No, I do not think so. "),
    "thoughts": ("Let me see.\n", "Wait, let me check that again. "),
    "words of another script": ("", "我不知道。"),
    "a paragraph": ("A beginning. ", prose(40) + "\n\n"),
    "a page": ("A beginning. ", prose(250) + "\n\n"),
    "a row of a table": ("| a | b |\n|---|---|\n", "| one | two |\n"),
    "a line of code": ("```python\n", "    x = x + 1\n"),
    "a ruler": ("Title\n", "-"),
    "empty lines": ("End.", "\n"),
    "JSON": ("", '{"name": "web_search"}, '),
}

REPETITIVE = {
    "a times table": "".join(f"| {' | '.join(str(i * j) for j in range(1, 13))} |\n" for i in range(1, 120)),
    "a rota": "".join(f"| {day} {week} | Anna | Kitchen |\n" for week in range(1, 60) for day in ("Mon", "Tue", "Wed")),
    "measurements": "".join(f"2026-01-{n % 28 + 1:02},{n * 37 % 101},ok\n" for n in range(1_200)),
    "getters": "```python\n" + "".join(
        f"    def get_{a}{b}(self):\n        return self._{a}{b}\n\n" for a, b in product("abcdefghijkl", "mnopqrs")
    ) + "```",
    "a matrix of zeros": "```\n" + ("0, " * 32 + "\n") * 32 + "```",
    "a song that counts down": "".join(
        f"{n} bottles of beer on the wall, {n} bottles of beer.\n"
        f"Take one down and pass it around, {n - 1} bottles of beer on the wall.\n\n" for n in range(99, 0, -1)
    ),
    "a poem with a refrain": "".join(
        prose(14) + "\nOh row, row, row your boat\ngently down the stream,\nmerrily, merrily, merrily,\n"
        "life is but a dream.\n\n" for _ in range(25)
    ),
    "a list": "".join(f"{n}. The {word} of interest, as before\n" for n, word in enumerate(WORDS)),
    "an empty form": "| name | date | |\n|---|---|---|\n" + "|  |  |  |\n" * 60,
    "a line written fifty times": "I must not talk in class.\n" * 50,
}  # fmt: skip


def stopped_at(text: str, step: int = 37) -> int | None:
    """How much of a text had come when it was seen to be a loop."""
    watch = LoopWatch()
    return next((at + step for at in range(0, len(text), step) if watch.feed(text[at : at + step])), None)


@pytest.mark.parametrize(("before", "again"), LOOPS.values(), ids=LOOPS)
def test_a_loop_is_seen_and_cut_back_to_what_was_said_once(before: str, again: str) -> None:
    text = before + again * (20_000 // len(again))
    seen = stopped_at(text)
    assert seen is not None
    assert seen <= 9_000
    kept = without_loop(text[:seen])
    assert kept.startswith(before.rstrip())
    assert len(kept) <= len(before + again) + 1
    assert again.strip()[:20] in kept


def test_points_of_a_list_that_are_all_the_same_are_a_loop_whatever_their_numbers() -> None:
    assert stopped_at("".join(f"{n}. The same point again\n" for n in range(1, 400))) is not None
    assert stopped_at("".join(f"- **Step {n}**: {prose(9)}\n" for n in range(1, 400))) is None


@pytest.mark.parametrize("text", REPETITIVE.values(), ids=REPETITIVE)
def test_what_repeats_a_lot_and_says_something_new_is_no_loop(text: str) -> None:
    assert stopped_at(text) is None


def test_no_file_of_this_project_is_a_loop() -> None:
    files = [path for room in ("docs", "shared", "services", "deploy") for path in (ROOT / room).rglob("*.*")]
    texts = [
        path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in (".md", ".py", ".yaml", ".js", ".ts", ".tsx", ".css")
        # what a build of the console has fetched and made
        and not {"node_modules", "dist"} & {*path.parts}
    ]
    assert len(texts) > 150
    for text in texts:
        assert stopped_at(text, 512) is None


@pytest.mark.parametrize("step", [1, 3, 100, 511, 5_000])
def test_the_verdict_does_not_depend_on_how_the_text_is_cut(step: int) -> None:
    watch, whole = LoopWatch(), LoopWatch()
    text = prose(200) + " again" * 1_000
    for at in range(0, len(text), step):
        watch.feed(text[at : at + step])
    assert watch.feed("") == whole.feed(text) is True


def test_what_was_asked_for_many_times_is_not_watched() -> None:
    for question in ("Write 'I must not talk' 200 times.", "Repeat after me", "say it 100x", "Schreib es 50 mal"):
        assert asks_to_repeat(question)
    assert not asks_to_repeat("What is 3 times 4?")
    assert not LoopWatch(patient=lambda: True).feed("again " * 5_000)


def test_whether_it_was_asked_for_is_looked_at_when_a_text_goes_in_circles() -> None:
    looked: list[str] = []
    watch = LoopWatch(patient=lambda: looked.append("question") is None)
    assert not watch.feed(prose(300))
    assert looked == []
    assert not watch.feed("again " * 5_000)
    assert looked == ["question"]


def test_a_text_that_does_not_end_in_circles_is_not_cut() -> None:
    for text in ("", "a", "Fine.", prose(300), "no no no, he said"):
        assert without_loop(text) == text


def test_of_megabytes_that_come_at_once_the_end_is_looked_at() -> None:
    long = prose(400_000)
    assert not LoopWatch().feed(long)
    assert LoopWatch().feed(long + "The capital of France is Paris. " * 600)
