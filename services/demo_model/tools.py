"""Choice of a tool without a model: a URL, a topic key, else the tool whose example phrasings fit best.

No model that is small enough for a wheel calls tools natively, but the examples are right most of the time. A tool
without examples here is matched by the phrasings in its own description, so that a new tool can be tried with the
demonstration model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from services.demo_model.rules import BY_RULE, Call, filled, ruled

ANSWER = "answer"
RIDGE = 0.3
# Below this similarity a text is like no example at all, and answering is the harmless choice.
THRESHOLD = 0.25

Vectors = np.ndarray[Any, np.dtype[np.float32]]
Embed = Callable[[Sequence[str]], Vectors]


@dataclass(frozen=True, slots=True)
class Example:
    tool: str
    text: str


def shipped_examples() -> list[Example]:
    """Return the examples of this folder."""
    lines = files(__package__).joinpath("examples.jsonl").read_text(encoding="utf-8").splitlines()
    return [Example(**json.loads(line)) for line in lines]


class ExampleIndex:
    """Example phrasings as vectors, and a least-squares fit of the tool over them."""

    def __init__(self, embed: Embed, examples: Iterable[Example]) -> None:
        self._embed = embed
        self._tools: list[str] = []
        self._vectors: Vectors = np.empty((0, 0), dtype=np.float32)
        self._described: set[tuple[str, str]] = set()
        self._fits: dict[frozenset[str], _Fit] = {}
        self._add(list(examples))
        self._shipped = frozenset(self._tools)

    def learn(self, tools: Iterable[Mapping[str, Any]]) -> None:
        """Add the phrasings from the descriptions of tools without shipped examples; each description once."""
        for tool in tools:
            name, description = str(tool["name"]), str(tool.get("description") or "")
            if name in self._shipped or name in BY_RULE or (name, description) in self._described:
                continue
            self._described.add((name, description))
            self._add([Example(name, text) for text in described_phrasings(description)])

    def best(self, text: str, allowed: frozenset[str]) -> str:
        """Return the allowed tool that fits the text best, or ANSWER."""
        if allowed not in self._fits:
            rows = [row for row, tool in enumerate(self._tools) if tool in allowed or tool == ANSWER]
            self._fits[allowed] = _Fit(self._vectors[rows], [self._tools[row] for row in rows])
        return self._fits[allowed].best(self._embed([text])[0])

    def _add(self, examples: Sequence[Example]) -> None:
        if not examples:
            return
        vectors = self._embed([example.text for example in examples])
        self._vectors = np.vstack([self._vectors, vectors]) if self._tools else vectors
        self._tools += [example.tool for example in examples]
        self._fits.clear()


class _Fit:
    """Ridge regression from a text's vector to one score per tool."""

    def __init__(self, vectors: Vectors, tools: Sequence[str]) -> None:
        self._vectors = vectors
        self._labels = [ANSWER, *sorted(set(tools) - {ANSWER})]
        inputs = np.hstack([vectors, np.ones((len(tools), 1), dtype=np.float32)])
        targets = np.array([[1.0 if tool == label else -0.2 for label in self._labels] for tool in tools])
        normal = inputs.T @ inputs + RIDGE * np.eye(inputs.shape[1])
        self._weights = np.linalg.solve(normal, inputs.T @ targets)

    def best(self, vector: Vectors) -> str:
        if not len(self._vectors) or float((self._vectors @ vector).max()) < THRESHOLD:
            return ANSWER
        return self._labels[int(np.argmax(np.append(vector, 1.0) @ self._weights))]


def described_phrasings(description: str) -> list[str]:
    """Return the quoted phrases of a tool's description, else its sentences."""
    quoted = re.findall(r"[\"“']([^\"“”']{6,80})[\"”']", description)
    return quoted or [part.strip() for part in re.split(r"(?<=[.!?])\s+", description) if len(part.strip()) > 5]


def choose(text: str, tools: Sequence[Mapping[str, Any]], index: ExampleIndex) -> Call | None:
    """Return the call for a user's message, or None to answer it.

    tools: the `function` parts of the schemas.
    """
    offered = {str(tool["name"]): tool for tool in tools}
    if call := ruled(text, offered):
        return call
    index.learn(offered.values())
    # A tool that needs an argument which the text cannot give is not a candidate.
    calls = {name: call for name, tool in offered.items() if (call := filled(name, text, tool))}
    return calls.get(index.best(text, frozenset(calls)))
