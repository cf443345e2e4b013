"""The names of a user, for finding those that somebody means: another spelling, a part of a name, a typing error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rapidfuzz import fuzz, process

from services.knowledge.claims import Claim
from services.knowledge.merging import facts_of
from services.knowledge.names import USER, named

# How like a name another must be, of 100; short names differ by one letter and are two people.
_LIKE = 84.0
_MOST = 8


class Names:
    """version: of the store, when they were read. aliases: claims that two names are one entity's."""

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
        """One key for all names of an entity: the user's, else the first one."""
        while (parent := self._parent.get(key, key)) != key:
            key = parent
        return key

    def with_aliases(self, keys: Iterable[str]) -> list[str]:
        """The keys with all other names of their entities."""
        found = {other for key in keys for other in self._together.get(self.entity(key), [key])}
        return sorted(found)

    def matching(self, text: str) -> list[str]:
        """The entities that a text may mean: those with its words, else those that are spelled alike."""
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
        # the shortest first: whoever has just this name
        return list(dict.fromkeys(self.entity(name) for name in sorted(found, key=lambda one: (len(one), one))))[:_MOST]

    def _join(self, first: str, second: str) -> None:
        """The smaller one stands for both: in which order aliases come makes no difference. The user's is the
        smallest."""
        one, other = sorted((self.entity(first), self.entity(second)), key=lambda key: (key != USER, key))
        self._parent.setdefault(one, one)
        self._parent[other] = one
