"""The names of a user, found by another spelling, a part of a name, or with a typing error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rapidfuzz import fuzz, process

from services.knowledge.claims import Claim
from services.knowledge.merging import facts_of
from services.knowledge.names import USER, named

# Least similarity of 100: two people may have short names that differ in one letter.
_LIKE = 84.0
_MOST = 8


class Names:
    """version: the user's version when the names were read. aliases: claims that two names are of one entity."""

    def __init__(self, version: int, keys: Iterable[str], aliases: Iterable[Claim]) -> None:
        self.version = version
        self._keys = sorted(set(keys))
        self._known = set(self._keys)
        self._by_word: dict[str, set[str]] = defaultdict(set)
        for key in self._keys:
            for word in key.split():
                self._by_word[word].add(key)
        self._parent: dict[str, str] = {}
        for fact in facts_of(aliases):
            if fact.state == "is":
                self._join(fact.subject.id, fact.object.id)
        self._together: dict[str, list[str]] = defaultdict(list)
        for key in self._parent:
            self._together[self.entity(key)].append(key)

    def __len__(self) -> int:
        return len(self._keys)

    def entity(self, key: str) -> str:
        """Return the key that stands for all names of an entity: the user's key, else the first one."""
        while (parent := self._parent.get(key, key)) != key:
            key = parent
        return key

    def with_aliases(self, keys: Iterable[str]) -> list[str]:
        """Return the keys and those of all other names of their entities."""
        found = {other for key in keys for other in self._together.get(self.entity(key), [key])}
        return sorted(found)

    def matching(self, text: str) -> list[str]:
        """Return the entities that a text may name: those with its words, else those with similar spelling."""
        key = named(text)
        if key is None:
            return []
        if key == USER:
            return [USER]
        found = {key} & self._known
        words = [self._by_word.get(word, set()) for word in key.split()]
        found |= set.intersection(*words) if words else set()
        if not found:
            alike = process.extract(key, self._keys, scorer=fuzz.ratio, score_cutoff=_LIKE, limit=_MOST)
            found = {name for name, _, _ in alike}
        if not found:
            near = process.extract(key, list(self._by_word), scorer=fuzz.ratio, score_cutoff=_LIKE, limit=_MOST)
            found = {name for word, _, _ in near for name in self._by_word[word]}
        # The shortest first: the name that is just this text.
        return list(dict.fromkeys(self.entity(name) for name in sorted(found, key=lambda one: (len(one), one))))[:_MOST]

    def _join(self, first: str, second: str) -> None:
        """Let the smaller key stand for both, whatever the order of aliases. The user's key is the smallest."""
        one, other = sorted((self.entity(first), self.entity(second)), key=lambda key: (key != USER, key))
        self._parent.setdefault(one, one)
        self._parent[other] = one
