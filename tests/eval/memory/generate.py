"""Makes the data sets of `make eval-memory`: `python tests/eval/memory/generate.py` writes all four files.

train.jsonl, test.jsonl (from bank.yaml): people and their assistant, three people a half, five months each.
talks-train.jsonl, talks-test.jsonl (from talks.yaml): friends among themselves; scenes fall into the halves by the hash
of their names, and are in the memory of one user. The same seed gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
HALVES = ("train", "test")
PEOPLE = 3
FIRST_DAY = datetime(2026, 2, 1, 8, tzinfo=UTC)
DAYS = 150
ASKED = datetime(2026, 7, 10, 9, tzinfo=UTC)
# What the critic gives; a turn without a grade is as common as one with the commonest.
SCORES = (None, 2, 3, 4, 4, 5)
# How often each person is asked about a day.
DATED = 5

Line = dict[str, Any]


@dataclass
class Person:
    """One user's days (what is said on each, in order) and the questions with the turns that answer them."""

    name: str
    dice: random.Random
    days: dict[int, list[Line]] = field(default_factory=dict)
    asked: list[tuple[str, str, list[Line]]] = field(default_factory=list)
    facts: list[tuple[int, Line]] = field(default_factory=list)

    def say(self, day: int, *pairs: tuple[str, str], **known: Any) -> list[Line]:
        """Turns one after the other on that day. A critic's score says nothing about what is asked later."""
        turns = [{"query": query, "answer": answer, **(known or self.graded())} for query, answer in pairs]
        self.days.setdefault(day, []).extend(turns)
        return turns

    def chat(self, general: list[list[str]]) -> None:
        """What else was talked about."""
        for query, answer in general:
            day = self.dice.choice(list(self.days))
            place = self.dice.choice([0, len(self.days[day])])
            self.days[day].insert(place, {"query": query, "answer": answer, **self.graded()})

    def graded(self) -> Line:
        score = self.dice.choice(SCORES)
        return {} if score is None else {"score": score}


def person(half: str, number: int, bank: Line) -> Person:
    """Everything that one person of a half says and asks."""
    made = Person(f"{half}-{number + 1}", random.Random(f"{half} {number}"))
    free = list(range(DAYS))
    made.dice.shuffle(free)
    for fact in bank["facts"]:
        values, day = fact["values"][number], free.pop()
        fill = lambda text, values=values: text.format(*values)  # noqa: E731
        turns = [tuple(fact["first"])] if "first" in fact else []
        said = made.say(day, *turns, (fill(fact["say"]), fill(fact["reply"])))[-1]
        made.facts.append((day, said))
        made.asked += [(kind, fill(text), [said]) for kind, text in fact["ask"].items()]
        for _ in range(made.dice.choice([1, 1, 3])):
            made.say(free.pop(), tuple(fact["near"]))
    for fact in bank["updates"]:
        values = fact["values"][number]
        before, after = sorted((free.pop(), free.pop()))
        made.say(before, tuple(text.format(*values) for text in fact["old"]))
        (said,) = made.say(after, tuple(text.format(*values) for text in fact["new"]))
        made.asked += [(kind, text, [said]) for kind, text in fact["ask"].items()]
    for fact in bank["multi"]:
        values = fact["values"][number]
        days = sorted(free.pop() for _ in fact["turns"])
        said = [
            made.say(day, tuple(text.format(*values) for text in turn))[0]
            for day, turn in zip(days, fact["turns"], strict=True)
        ]
        made.asked += [(kind, text, said) for kind, text in fact["ask"].items()]
    for fact in bank["rated"]:
        fill = lambda text, values=fact["values"][number]: text.format(*values)  # noqa: E731
        (good,) = made.say(free.pop(), (fill(fact["query"]), fill(fact["good"])), score=5, won=True, feedback=1.0)
        made.say(free.pop(), (fill(fact["query"]), fill(fact["bad"])), score=1, won=False, feedback=-1.0)
        made.asked.append(("rated", fact["ask"], [good]))
    made.chat(bank["general"])
    for day, said in made.dice.sample(made.facts, DATED):
        when = FIRST_DAY + timedelta(days=day)
        made.asked.append(("temporal", f"What did I tell you on {when.day} {when:%B}?", [said]))
    made.asked += [("unanswerable", text, []) for text in bank["unanswerable"]]
    return made


def lines(half: str, bank: Line) -> Iterator[Line]:
    """The file of one half: conversations first, then the questions."""
    people = [person(half, number, bank) for number in range(PEOPLE)]
    for one in people:
        for session, (day, turns) in enumerate(sorted(one.days.items()), start=1):
            name = f"{one.name}-s{session}"
            began = FIRST_DAY + timedelta(days=day, minutes=one.dice.randrange(600))
            for number, turn in enumerate(turns, start=1):
                turn["id"] = f"{name}-{number}"
                turn["time"] = f"{began + timedelta(minutes=3 * number):%Y-%m-%dT%H:%M:%SZ}"
            ordered = [{"id": turn["id"], "time": turn["time"], **turn} for turn in turns]
            yield {"kind": "conversation", "id": name, "user": one.name, "turns": ordered}
    for one in people:
        for number, (kind, text, evidence) in enumerate(one.asked, start=1):
            about = {"kind": "question", "id": f"{one.name}-q{number}", "user": one.name, "type": kind}
            asked = {"time": f"{ASKED:%Y-%m-%dT%H:%M:%SZ}", "query": text}
            yield {**about, **asked, "evidence": [turn["id"] for turn in evidence]}


def written(half: str) -> str:
    """The text of one file."""
    bank = yaml.safe_load((HERE / "bank.yaml").read_text(encoding="utf-8"))[half]
    return text_of(lines(half, bank))


_LABELLED = re.compile(r"(?:(\w+)> )?([AB]): (.*)")


def half_of(scene: str) -> str:
    """Which half a scene is in: nobody has chosen."""
    return HALVES[hashlib.sha256(scene.encode()).digest()[0] % 2]


def talks(half: str) -> Iterator[Line]:
    """The file of one half of the friends' talks. All that is said in a session has the session's time."""
    bank = yaml.safe_load((HERE / "talks.yaml").read_text(encoding="utf-8"))
    dice, user, asked = random.Random(f"talks {half}"), f"talks-{half}", list[Line]()
    played = [
        (scene, number, pair)
        for scene in bank["scenes"]
        if half_of(scene["name"]) == half
        for number, pair in enumerate(bank["pairs"])
    ]
    dice.shuffle(played)
    for session, (scene, number, (first, second)) in enumerate(played, start=1):
        day = FIRST_DAY + timedelta(days=3 * session, minutes=dice.randrange(600))
        at, labels = f"{day:%Y-%m-%dT%H:%M:%SZ}", dict[str, str]()

        def fill(text: str, scene: Line = scene, number: int = number, a: str = first, b: str = second) -> str:
            return text.format(*scene["values"][number], A=a, B=b)

        turns = []
        for place, line in enumerate(scene["lines"], start=1):
            label, who, text = _LABELLED.fullmatch(line).groups()
            turn = f"{user}-s{session}-{place}"
            labels |= {label: turn} if label else {}
            said = fill(text)
            turns.append({"id": turn, "time": at, "query": fill(f"{{{who}}}: {said[0].upper()}{said[1:]}")})
        yield {"kind": "conversation", "id": f"{user}-s{session}", "user": user, "turns": turns}
        for kind, text, evidence in scene["questions"]:
            question = {"kind": "question", "id": f"{user}-q{len(asked) + 1}", "user": user, "type": kind}
            asked.append({**question, "query": fill(text), "evidence": [labels[one] for one in evidence]})
    yield from asked


def text_of(rows: Iterator[Line]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in rows)


if __name__ == "__main__":
    for half in HALVES:
        (HERE / f"{half}.jsonl").write_text(written(half), encoding="utf-8")
        (HERE / f"talks-{half}.jsonl").write_text(text_of(talks(half)), encoding="utf-8")
