"""One view of all participants' logs: their JSON lines as readable ones, each with the participant's name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

from services.cli.words import printable

WIDTH = 13
_COLOURS = ("36", "35", "34", "32", "33", "96", "95", "94")
_LEVELS = {"warning": "33", "error": "31", "critical": "31"}
# What the prefix and the columns already say.
_KNOWN = frozenset({"event", "level", "timestamp", "participant"})


def readable(line: str) -> tuple[str, str]:
    """The text and the level of a log line; a line that is not a JSON event stays as it is."""
    try:
        event = json.loads(line)
    except ValueError:
        return printable(line), ""
    if not isinstance(event, dict) or "event" not in event:
        return printable(line), ""
    level = str(event.get("level", ""))
    traceback = event.pop("exception", None)
    fields = " ".join(f"{name}={_value(value)}" for name, value in event.items() if name not in _KNOWN)
    text = f"{_clock(event.get('timestamp'))} {event['event']}"
    if level in _LEVELS:
        text = f"{_clock(event.get('timestamp'))} {level.upper()} {event['event']}"
    if fields:
        text += f"  {fields}"
    if traceback:
        text += f"\n{traceback}"
    return printable(text), level


def _value(value: object) -> str:
    if isinstance(value, str):
        return value if value and " " not in value else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _clock(timestamp: object) -> str:
    try:
        return datetime.fromisoformat(str(timestamp)).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return "--:--:--"


class LogView:
    """Writes the lines of all participants to one place. `colour`: escape sequences are understood there."""

    def __init__(self, out: TextIO | None = None, *, colour: bool = False) -> None:
        self._out = out or sys.stderr
        self._colour = colour
        self._names: dict[str, str] = {}
        self.last: dict[str, str] = {}

    def writer(self, name: str) -> Callable[[str], None]:
        """A function that takes this participant's lines."""
        return lambda line: self.write(name, line)

    def write(self, name: str, line: str) -> None:
        text, level = readable(line)
        self.last[name] = text
        for part in text.splitlines() or [""]:
            self._out.write(self._prefix(name) + self._tinted(part, level) + "\n")
        self._out.flush()

    def say(self, text: str) -> None:
        """The supervisor's own words."""
        for part in text.splitlines():
            self._out.write(self._prefix("local2") + part + "\n")
        self._out.flush()

    def _prefix(self, name: str) -> str:
        padded = name.ljust(WIDTH)
        if not self._colour:
            return f"{padded} | "
        colour = self._names.setdefault(name, _COLOURS[len(self._names) % len(_COLOURS)])
        return f"\x1b[{colour}m{padded}\x1b[0m │ "

    def _tinted(self, text: str, level: str) -> str:
        colour = _LEVELS.get(level)
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colour and colour else text
