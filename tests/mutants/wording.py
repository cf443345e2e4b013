"""Which tests speak of what a change is about, by the words that both use: hundreds of tests run a line of an agent's
loop, and few say anything about the one field that it fills."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

Words = frozenset[str]
# Names are taken apart, so that `_late` and `is_late` meet.
_WORD = re.compile(r"[a-z]{3,}")


def words_of(text: str) -> Words:
    return frozenset(_WORD.findall(text.lower()))


def words_at(source: str, line: int, old: str) -> Words:
    """What a change is about: what it replaces, and the lines around it, which say when."""
    lines = source.splitlines()
    return words_of("\n".join([old, *lines[max(0, line - 2) : line + 1]]))


class Wording:
    """Of the test files (path → text)."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._tests = {
            f"{path}::{name}": words_of(text) for path, source in texts.items() for name, text in _functions(source)
        }
        self._uses = Counter(word for words in self._tests.values() for word in words)

    def nearness(self, test: str, words: Iterable[str]) -> float:
        """1 where a test shares no word with a change, and more with each, the rarer the more (inverse document
        frequency, Spärck Jones 1972)."""
        said = self._tests.get(test.partition("[")[0], frozenset())
        return 1.0 + sum(math.log(len(self._tests) / self._uses[word]) for word in said.intersection(words))


def _functions(source: str) -> Iterable[tuple[str, str]]:
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            yield node.name, "\n".join(lines[first - 1 : node.end_lineno])
