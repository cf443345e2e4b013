"""What backends send, as it may be passed on: arguments as a dict, texts that can be encoded."""

from __future__ import annotations

import json
from typing import Any

import orjson

from shared.llm.lenient_literals import DEEPEST, value_at


def arguments_of(value: Any) -> dict[str, Any]:
    """The arguments as a dict. Text that is not a JSON object is kept under `unparsed`: the tool then says which
    argument is missing, and the model can mend its call.
    """
    parsed = value
    for _ in range(2):  # some servers encode the text once more
        if isinstance(parsed, (str, bytes)):
            if not parsed.strip():
                return {}
            try:
                parsed = orjson.loads(parsed)
            except orjson.JSONDecodeError:
                parsed = _loosely(parsed)
    if parsed is None and (value is None or value == "null"):
        return {}
    return parsed if isinstance(parsed, dict) else {"unparsed": value}


def _loosely(text: str | bytes) -> Any:
    """The value of text that is nearly JSON; None when it is none."""
    said = text.decode(errors="replace") if isinstance(text, bytes) else text
    try:
        value, end = value_at(said.strip(), 0)
    except ValueError:
        return None
    return None if said.strip()[end:] else value


def parsed(text: bytes) -> Any:
    """A line's value; of loose encoders' lines too, who write NaN or half a surrogate pair. Raises ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text, parse_int=_whole)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


def _whole(digits: str) -> int | float:
    """A number that Python itself refuses to read for its length is infinite, which no tool is handed."""
    return int(digits) if len(digits) < 1000 else float(digits)


def text_of(value: Any) -> str:
    """A text that can be encoded: half a surrogate pair is replaced. Raises TypeError for anything but a text."""
    if not isinstance(value, str):
        raise TypeError(f"a text is expected, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def trouble_with(args: dict[str, Any]) -> str | None:
    """Why arguments cannot be passed on, in words for the model; None when they can."""
    level: list[Any] = [args]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        return f"the arguments are nested more than {DEEPEST} levels deep"
    try:
        # NaN becomes null there, and would be another argument
        json.dumps(args, allow_nan=False)
        orjson.dumps(args)
    except (TypeError, ValueError) as exc:
        return f"the arguments cannot be passed on: {exc}"
    return None
