"""What servers are given from the environment, and taking it out of all that comes back from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from services.mcp.settings import Server
from shared.errors import TransientError

_PLACE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# Shorter ones stand in ordinary words.
_SHORTEST = 6


class Missing(TransientError):
    """A variable is named that the environment does not have."""


class Secrets:
    """The variables of the environment that one server's settings name. Raises Missing."""

    def __init__(self, server: Server, environment: Mapping[str, str]) -> None:
        texts = (*server.command, server.url, *server.headers.values())
        names = {*server.env, *(name for text in texts for name in _PLACE.findall(text))}
        if missing := sorted(name for name in names if name not in environment):
            raise Missing(f"the environment has no {', '.join(missing)}")
        self._values = {name: environment[name] for name in sorted(names)}
        # the longest first: one may be part of another
        hidden = sorted(self._values.items(), key=lambda item: -len(item[1]))
        self._hidden = [(value, f"[{name}]") for name, value in hidden if len(value) >= _SHORTEST]

    def put_in(self, text: str) -> str:
        """The text with each `${NAME}` replaced by its value."""
        return _PLACE.sub(lambda found: self._values[found.group(1)], text)

    def of(self, names: tuple[str, ...]) -> dict[str, str]:
        return {name: self._values[name] for name in names}

    def masked(self, text: str) -> str:
        """The text with each value replaced by its variable's name."""
        for value, name in self._hidden:
            text = text.replace(value, name)
        return text

    def masked_in(self, value: Any) -> Any:
        """The same in all texts of a JSON value, names of fields included."""
        match value:
            case str():
                return self.masked(value)
            case list():
                return [self.masked_in(one) for one in value]
            case dict():
                return {self.masked(name): self.masked_in(one) for name, one in value.items()}
            case _:
                return value
