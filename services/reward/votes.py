"""One person's vote on one answer: a thumb and stars, each given, changed and withdrawn by itself. No I/O.

Each part says when it was cast, and of two changes of a part the later one counts, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from shared.contracts import Sentiment, UserFeedback, VotePart

Cast = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """at: the id of the entry that it came with. value: a sentiment, or 1 to 5 stars; None: it was withdrawn."""

    at: Cast
    value: Any = None
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class Vote:
    parts: Mapping[VotePart, Part]

    @property
    def thumb(self) -> Sentiment | None:
        value: Sentiment | None = self._value("thumb")
        return value

    @property
    def stars(self) -> int | None:
        value: int | None = self._value("stars")
        return value

    @property
    def withdrawn(self) -> bool:
        return self.thumb is None and self.stars is None

    @property
    def reward(self) -> float:
        """-1 to 1; stars say more than a thumb. 0 when the vote was withdrawn."""
        if self.stars is not None:
            return (self.stars - 3) / 2
        return {"positive": 1.0, "negative": -1.0, None: 0.0}[self.thumb]

    @property
    def sentiment(self) -> Sentiment | None:
        """What the stars say, else the thumb; 3 stars without one are positive. None when the vote was withdrawn."""
        if self.stars is None or self.stars == 3:
            return self.thumb or (None if self.stars is None else "positive")
        return "positive" if self.stars > 3 else "negative"

    @property
    def comment(self) -> str | None:
        """The last one that came with a part that still counts."""
        said = [part for part in self.parts.values() if part.value is not None and part.comment is not None]
        return max(said, key=lambda part: part.at).comment if said else None

    def _value(self, name: VotePart) -> Any:
        return self.parts[name].value if name in self.parts else None

    def dump(self) -> str:
        return orjson.dumps({name: asdict(part) for name, part in self.parts.items()}).decode()

    @staticmethod
    def load(row: Mapping[str, Any]) -> Vote:
        """Of a row of the store."""
        found = orjson.loads(row["parts"] or "{}")
        return Vote({name: Part(**{**part, "at": tuple(part["at"])}) for name, part in found.items()})


def changes(said: UserFeedback, at: Cast) -> dict[VotePart, Part]:
    """The parts of the vote that a message changes."""
    values: dict[VotePart, Any] = {"thumb": said.sentiment, "stars": said.stars}
    if said.withdrawn:
        return {name: Part(at) for name in said.changed()}
    return {name: Part(at, values[name], said.comment) for name in said.changed()}
