"""Tool calls that a model printed as text, in the forms of docs/model-servers.md. Pure.

One reader serves all of them: whatever stands around a call, inside it is a name with arguments (JSON, Python's or
Gemma's notation, or tags), or a JSON value with one of a few pairs of keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shared.llm.lenient_literals import UnfinishedError, arguments_at, value_at
from shared.llm.toolcalls import arguments_of

# Tools on offer: their names with the JSON schemas of their parameters.
Offered = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PrintedCall:
    """A tool call that the model wrote as text. `error`: why it cannot be run, in words for the model."""

    name: str
    args: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Calls that stand one after the other, and where they end. `unfinished`: the text ends inside a further one."""

    calls: list[PrintedCall]
    end: int
    unfinished: bool = False


_NAME_KEYS = ("name", "tool_name", "function_name", "tool", "function", "action", "recipient_name")
_ARGUMENT_KEYS = (
    "arguments", "parameters", "args", "params", "input", "kwargs", "tool_input", "action_input", "tool_args",
)  # fmt: skip
_ASIDE_KEYS = frozenset({"type", "id", "index", "tool_call_id", "call_id"})
_WRAP_KEYS = frozenset({"tool_calls", "tool_call", "function_call", "function_calls", "tool_uses"})
# With these a JSON object is a call even of a tool that nobody has offered.
_PLAIN_PAIRS = frozenset((name, args) for name in ("name", "tool_name") for args in ("arguments", "parameters"))
_MESSAGE_KEYS = frozenset({"role", "content"})
CALL_KEYS = frozenset(_NAME_KEYS) | frozenset(_ARGUMENT_KEYS) | _ASIDE_KEYS | _WRAP_KEYS | _MESSAGE_KEYS

_IDENTIFIER = re.compile(r"[A-Za-z_][\w.:/-]{0,127}")
# Namespaces that models put before a name, and what they put behind it.
_BEFORE_NAME = re.compile(r"(?:(?:functions?|tools?|default_api|api|namespace)(?:\.|::|/))+")
_BEHIND_NAME = re.compile(r"(?::\d+|\.call|<\|.*)$", re.DOTALL)

_TOKEN = r"<[|｜][^<>\s]{1,40}[|｜]>"
_TAG = (
    r"</?(?:tool_calls?|function_calls?|TOOLCALL|tools?|\w+:tool_call|longcat_tool_call|\w+:function_calls|"
    r"｜DSML｜(?:function|tool)_calls)>"
)
_SEPARATORS = re.compile(r"[\s,;]*")
# What may stand between calls that stand between markers.
_NOISE = re.compile(
    rf"(?:[\s,;]|function\s*<｜tool▁sep｜>|{_TOKEN}|{_TAG}|<\|?/?tool_call\|?>|<(?:start|end)_function_call>|"
    r"\[TOOL_CALLS\]|```\w*|✿FUNCTION✿:|assistant(?=commentary)|(?:assistant|commentary|analysis)(?=\s|<)|#[^\n]*\n)*"
)
_BEFORE_PYTHON = re.compile(r"print\(\s*")
_CALLED = re.compile(r"(?:call:|to=)?([A-Za-z_][\w.:/-]{0,127})")
# Between a name and its arguments.
_BETWEEN = re.compile(
    rf"(?:\s|:(?=\s*\{{)|{_TOKEN}|\[CALL_ID\]\s*\w+|\[ARGS\]|```\w*|✿ARGS✿:|Action Input:|"
    r"(?:json|commentary|code)(?=\s|[{<]))*"
)
# What may begin one of these, and how long it can be.
_TOKEN_BEGINS = ("", "<", "[", "`", "✿", "A", "j", "c")
_TOKEN_CHARS = 48
_PAIR = re.compile(
    r"\s*<(?:longcat_)?arg_key>(.*?)</(?:longcat_)?arg_key>\s*<(?:longcat_)?arg_value>(.*?)</(?:longcat_)?arg_value>",
    re.DOTALL,
)
_TAGGED = re.compile(
    r"<(｜DSML｜|\w+:)?(function|invoke)(?:\s*=\s*|\s+name\s*=\s*)[\"']?([^\"'<>\s]+)[\"']?[^<>]*>", re.IGNORECASE
)
_PARAMETER = re.compile(
    r"\s*<(?:｜DSML｜|\w+:)?param(?:eter)?(?:\s*=\s*|\s+name\s*=\s*)[\"']?([^\"'<>\s]+)[\"']?([^<>]*)>"
    r"(.*?)(?:</(?:｜DSML｜|\w+:)?param(?:eter)?>|(?=<(?:｜DSML｜|\w+:)?param(?:eter)?[\s=])|\Z)",
    re.DOTALL,
)
_RAW_TEXT = 'string="true"'


def tool_name(name: str, offered: Collection[str]) -> str:
    """The name without what models put around it, as it is on offer: `functions.Web-Search:0` is `web_search`."""
    if name in offered:
        return name
    bare = _BEHIND_NAME.sub("", _BEFORE_NAME.sub("", name.strip(), count=1))
    if bare in offered:
        return bare
    return next((known for known in offered if _folded(known) == _folded(bare)), bare)


def _folded(name: str) -> str:
    return re.sub(r"[_.\s-]", "", name).casefold()


def calls_of(value: Any, offered: Offered, *, marked: bool = False) -> list[PrintedCall] | None:
    """The calls that a JSON value stands for; None when it is no call.

    marked: it stood between markers of calls, where arguments may be missing.
    """
    if isinstance(value, list):
        found = [calls_of(item, offered, marked=marked) for item in value]
        return [call for calls in found for call in calls or ()] if found and all(found) else None
    if not isinstance(value, dict):
        return None
    keys = set(value)
    if wrapped := keys & _WRAP_KEYS:
        inner = value[wrapped.pop()]
        spare = keys - _WRAP_KEYS - _ASIDE_KEYS - _MESSAGE_KEYS
        return None if spare or value.get("content") else calls_of(inner, offered, marked=marked)
    if isinstance(value.get("function"), dict) and keys <= _ASIDE_KEYS | {"function"}:
        return calls_of(value["function"], offered, marked=marked)
    if len(value) == 1:
        ((name, args),) = value.items()
        if name in offered and isinstance(args, dict):
            return [PrintedCall(name, args)]
    return _named_by_keys(value, offered, marked)


def _named_by_keys(value: dict[str, Any], offered: Offered, marked: bool) -> list[PrintedCall] | None:
    names = [key for key in _NAME_KEYS if key in value]
    given = [key for key in _ARGUMENT_KEYS if key in value]
    if len(names) != 1 or len(given) > 1 or set(value) - {*names, *given} - _ASIDE_KEYS:
        return None
    said = value[names[0]]
    if not isinstance(said, str) or not _IDENTIFIER.fullmatch(said):
        return None
    name = tool_name(said, offered)
    if not given:
        return [PrintedCall(name, {})] if marked else None
    if name not in offered and not marked and (names[0], given[0]) not in _PLAIN_PAIRS:
        return None
    arguments = value[given[0]]
    if arguments is None and not marked:
        return None
    args = arguments_of(arguments)
    if "unparsed" in args:
        if given[0] != "action_input" or not isinstance(arguments, str):
            return None
        args = _placed([arguments], offered.get(name, {}))
    return [PrintedCall(name, args)]


def read_calls(text: str, at: int, offered: Offered, *, marked: bool, cut: bool = False) -> Found:
    """The calls that stand at `at`, as many as follow each other.

    marked: between markers, code fences or tags, where names alone and the markers of several calls are to be expected.
    cut: nothing more will come (see `value_at`).
    """
    calls: list[PrintedCall] = []
    end = at
    while True:
        start = _end_of(_NOISE if marked else _SEPARATORS, text, end)
        try:
            item = _item(text, start, offered, marked, cut)
        except UnfinishedError:
            return Found(calls, end, unfinished=True)
        except ValueError:
            item = None
        if item is None:
            return Found(calls, _end_of(_NOISE, text, end) if marked and calls else end)
        calls.extend(item.calls)
        end = item.end


def _item(text: str, at: int, offered: Offered, marked: bool, cut: bool) -> Found | None:
    """What stands at `at`; None when it is no call. Raises ValueError."""
    if at >= len(text):
        return None
    if text[at] == "<":
        return _tagged(text, at, offered, cut) if marked else None
    if text[at] in "{[":
        inner = _end_of(_SEPARATORS, text, at + 1)
        if text[at] == "[" and _CALLED.match(text, inner):
            return _python_list(text, inner, offered, marked, cut)
        value, end = value_at(text, at, cut=cut)
        calls = calls_of(value, offered, marked=marked)
        return None if calls is None else Found(calls, end)
    printing = _BEFORE_PYTHON.match(text, at)
    item = _called(text, printing.end() if printing else at, offered, marked, cut)
    if item is None or printing is None:
        return item
    end = _end_of(_SEPARATORS, text, item.end)
    return Found(item.calls, end + 1) if text[end : end + 1] == ")" else item


def _called(text: str, at: int, offered: Offered, marked: bool, cut: bool) -> Found | None:
    """A name with its arguments."""
    said = _CALLED.match(text, at)
    if said is None:
        return None
    name = tool_name(said[1].rstrip(":"), offered)
    schema = offered.get(name, {})
    if text[said.end() : said.end() + 1] == "(":
        positional, named, end = arguments_at(text, said.end(), cut=cut)
        return Found([PrintedCall(name, {**_placed(positional, schema), **named})], end)
    start = _end_of(_BETWEEN, text, said.end())
    if text[start : start + 1] == "{":
        value, end = value_at(text, start, cut=cut)
        return Found([PrintedCall(name, value)], end) if isinstance(value, dict) else None
    if not cut and len(text) - start < _TOKEN_CHARS and text[start : start + 1] in _TOKEN_BEGINS:
        raise UnfinishedError("the arguments are missing")
    args: dict[str, Any] = {}
    end = said.end()
    while pair := _PAIR.match(text, end):
        args[pair[1].strip()] = _typed(pair[2], schema, pair[1].strip())
        end = pair.end()
    if not args and "Action Input:" in text[said.end() : start]:
        line, newline, _ = text[start:].partition("\n")
        if not newline and not cut:
            raise UnfinishedError("the line has no end")
        return Found([PrintedCall(name, _placed([line.strip()], schema))], start + len(line))
    return Found([PrintedCall(name, args)], end) if args or (marked and name in offered) else None


def _python_list(text: str, at: int, offered: Offered, marked: bool, cut: bool) -> Found | None:
    """`[f(x="y"), g()]`, behind its bracket."""
    calls: list[PrintedCall] = []
    while text[at : at + 1] != "]":
        if at >= len(text):
            if cut and calls:
                return Found(calls, at)
            raise UnfinishedError("a bracket is not closed")
        said = _CALLED.match(text, at)
        if said is not None and said.end() >= len(text) and not cut:
            raise UnfinishedError("a name may not be complete")
        item = _called(text, at, offered, marked=False, cut=cut)
        if item is None:
            return None
        calls.extend(item.calls)
        at = _end_of(_SEPARATORS, text, item.end)
    return Found(calls, at + 1)


def _tagged(text: str, at: int, offered: Offered, cut: bool) -> Found | None:
    """`<function=NAME>…</function>` and `<invoke name="NAME">…</invoke>`, with JSON or parameters as tags inside."""
    head = _TAGGED.match(text, at)
    if head is None:
        return None
    name = tool_name(head[3], offered)
    closer = f"</{head[1] or ''}{head[2]}>"
    start = _end_of(_SEPARATORS, text, head.end())
    if text[start : start + 1] == "{":
        value, end = value_at(text, start, cut=cut)
        after = _end_of(_SEPARATORS, text, end)
        end = after + len(closer) if text.startswith(closer, after) else end
        return Found([PrintedCall(name, value)], end) if isinstance(value, dict) else None
    stop = text.find(closer, head.end())
    if stop < 0 and not cut:
        raise UnfinishedError("a tag is not closed")
    body = text[head.end() :] if stop < 0 else text[head.end() : stop]
    args: dict[str, Any] = {}
    schema, place = offered.get(name, {}), 0
    while parameter := _PARAMETER.match(body, place):
        written = parameter[3].removeprefix("\n").removesuffix("\n")
        args[parameter[1]] = written if _RAW_TEXT in parameter[2] else _typed(written, schema, parameter[1])
        place = parameter.end()
    if body[place:].strip():
        return None
    return Found([PrintedCall(name, args)], len(text) if stop < 0 else stop + len(closer))


def _typed(text: str, schema: Mapping[str, Any], name: str) -> Any:
    """An argument that was written as plain text, by what the tool expects under its name."""
    properties = schema.get("properties") or {}
    expected = properties.get(name)
    if isinstance(expected, dict) and expected.get("type") == "string":
        return text
    try:
        value, end = value_at(text.strip(), 0)
    except ValueError:
        return text
    whole = not text.strip()[end:].strip()
    return value if whole and (expected is not None or not isinstance(value, str)) else text


def _placed(values: list[Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without names, under the names that the tool's parameters have in their order."""
    names = list(schema.get("properties") or ())
    return {names[n] if n < len(names) else f"argument_{n + 1}": value for n, value in enumerate(values)}


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
