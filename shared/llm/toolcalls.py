"""Tool calls as models write them: arguments as a dict or as JSON text, and whole calls printed as text.

Three printed forms are recognised, because nothing else looks like them:
`<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>` (Gemma 4), `<tool_call>{"name", "arguments"}</tool_call>`
(Hermes, Qwen), and a whole answer that is one JSON object of a name and arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import orjson

_QUOTE = '<|"|>'
_KEYS = {"name", "arguments", "parameters", "type", "id"}
_NAME = re.compile(r"\s*(?:call:)?([A-Za-z_][\w.-]*)\s*(?=\{)")
_KEY = re.compile(r"\s*([\w.$-]+)\s*:")
_SCALAR = re.compile(r"[^,}\]]+")
_SPACE = re.compile(r"\s*")
# The beginning of a JSON object that can still become a call.
_CALL_HEAD = re.compile(r'\s*\{\s*"(name|arguments|parameters|type|id)"\s*:')
_HEAD_CHARS = 64
# Levels of arguments: no tool has more, and what encodes them on their way has limits of its own.
_DEEPEST = 100


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
                return {"unparsed": value}
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else {"unparsed": value}


def parsed(text: bytes) -> Any:
    """A line's value; of loose encoders' lines too, who write NaN or half a surrogate pair. Raises ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


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
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        return f"the arguments are nested more than {_DEEPEST} levels deep"
    try:
        # NaN becomes null there, and would be another argument
        json.dumps(args, allow_nan=False)
        orjson.dumps(args)
    except (TypeError, ValueError) as exc:
        return f"the arguments cannot be passed on: {exc}"
    return None


def may_become_call(text: str) -> bool:
    """Whether an answer that begins like this can still turn out to be one printed call."""
    start = text.lstrip()
    if not start.startswith("{"):
        return not start
    return len(start) < _HEAD_CHARS or _CALL_HEAD.match(text) is not None


def json_call(text: str, offered: Collection[str]) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments, when the text is one JSON object of exactly these and the tool is on offer."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict) or not set(value) <= _KEYS:
        return None
    name = value.get("name")
    if not isinstance(name, str) or name not in offered:
        return None
    given = value.get("arguments", value.get("parameters"))
    args = arguments_of(given)
    return None if given is None or "unparsed" in args else (name, args)


def marked_call(text: str, offered: Collection[str]) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of what stood between tool-call markers; None when it is malformed."""
    call = json_call(text, offered)
    if call is not None:
        return call
    name = _NAME.match(text)
    if name is None:
        return None
    try:
        args, end = _object(text, name.end())
    except (ValueError, IndexError, RecursionError):
        return None
    return (name[1], args) if not text[end:].strip() else None


def _value(text: str, at: int) -> tuple[Any, int]:
    """One value of Gemma's notation that begins at `at`, and where it ends. Raises ValueError or IndexError."""
    at = _skip(text, at)
    if text.startswith(_QUOTE, at):
        end = text.index(_QUOTE, at + len(_QUOTE))
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at] == '"':
        end = at + 1
        while text[end] != '"':
            end += 2 if text[end] == "\\" else 1
        return orjson.loads(text[at : end + 1]), end + 1
    if text[at] == "{":
        return _object(text, at)
    if text[at] == "[":
        return _array(text, at)
    scalar = _SCALAR.match(text, at)
    if scalar is None:
        raise ValueError("a value is missing")
    word = scalar[0].strip()
    try:
        return orjson.loads(word), scalar.end()
    except orjson.JSONDecodeError:
        return word, scalar.end()


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        if text[at] == '"' or text.startswith(_QUOTE, at):
            key, at = _value(text, at)
            at = _skip(text, at)
            if text[at] != ":":
                raise ValueError("a colon is missing")
            at += 1
        else:
            bare = _KEY.match(text, at)
            if bare is None:
                raise ValueError("a key is missing")
            key, at = bare[1], bare.end()
        found[key], at = _value(text, at)
        at = _next(text, at, "}")
    return found, at + 1


def _array(text: str, at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    at = _skip(text, at + 1)
    while text[at] != "]":
        value, at = _value(text, at)
        found.append(value)
        at = _next(text, at, "]")
    return found, at + 1


def _next(text: str, at: int, closer: str) -> int:
    at = _skip(text, at)
    if text[at] == ",":
        return _skip(text, at + 1)
    if text[at] != closer:
        raise ValueError("a comma is missing")
    return at


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at
