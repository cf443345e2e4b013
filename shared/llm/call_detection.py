"""Whether text that looks like the beginning of a tool call is one. Pure.

Two kinds: what begins with a marker that only calls have, and what begins a line and could be prose as well (JSON, a
code fence, a call in Python's notation). A verdict that is given stays the same whatever text follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shared.llm.printed_calls import CALL_KEYS, Found, Offered, PrintedCall, read_calls

# Of a call in a channel of gpt-oss.
_CHANNEL_ENDS = ("<|call|>", "<|end|>", "<|return|>")
# Markers that begin calls, and what ends them; without an end they last as long as the answer.
CALL_MARKERS: dict[str, tuple[str, ...]] = {
    "<tool_call>": ("</tool_call>",),
    "<tool_calls>": ("</tool_calls>",),
    "<|tool_call>": ("<tool_call|>",),
    "<|tool_call|>": ("<|/tool_call|>",),
    "<|tool_calls|>": ("<|/tool_calls|>",),
    "<function=": ("</function>",),
    "<function name=": ("</function>",),
    "<function_call>": ("</function_call>",),
    "<function_calls>": ("</function_calls>",),
    "<atem:function_calls>": ("</atem:function_calls>",),
    "<invoke name=": ("</invoke>",),
    "<minimax:tool_call>": ("</minimax:tool_call>",),
    "<seed:tool_call>": ("</seed:tool_call>",),
    "<longcat_tool_call>": ("</longcat_tool_call>",),
    "<TOOLCALL>": ("</TOOLCALL>",),
    "<start_function_call>": ("<end_function_call>",),
    "<｜DSML｜function_calls>": ("</｜DSML｜function_calls>",),
    "<｜DSML｜tool_calls>": ("</｜DSML｜tool_calls>",),
    "<｜tool▁calls▁begin｜>": ("<｜tool▁calls▁end｜>",),
    "<｜tool▁call▁begin｜>": ("<｜tool▁call▁end｜>",),
    "<|tool_calls_section_begin|>": ("<|tool_calls_section_end|>",),
    "<|tool_call_begin|>": ("<|tool_call_end|>",),
    "<|tool_call_start|>": ("<|tool_call_end|>",),
    "<|START_ACTION|>": ("<|END_ACTION|>",),
    "<|action_start|>": ("<|action_end|>",),
    "<|tools_prefix|>": ("<|tools_suffix|>",),
    "<|python_start|>": ("<|python_end|>",),
    "<|python_tag|>": ("<|eom_id|>", "<|eot_id|>"),
    "[TOOL_CALLS]": (),
    "✿FUNCTION✿:": ("✿RESULT✿", "✿RETURN✿"),
    "commentary to=functions.": _CHANNEL_ENDS,
    "assistantcommentary to=functions.": _CHANNEL_ENDS,
}
# What follows these is read together with them.
_WITHIN = frozenset(
    {"<function=", "<function name=", "<invoke name=", "commentary to=functions.", "assistantcommentary to=functions."}
)
# Ends of turns: no text of any answer.
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<turn|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>",
)  # fmt: skip

UNREADABLE = "the tool call could not be read; make it again, with its arguments as one JSON object"
CUT_OFF = "the tool call was cut off by the length limit; make a shorter one"

# How an answer ended: not yet, by itself, or by the limit of its length.
Ending = Literal["", "stop", "length"]

# Line beginnings that are no call by themselves.
_LEADS = ("Action:", "functools", ">>>", "tool_code")
_LEAD = re.compile(r"(?:Action:|functools(?=\[)|>>>|tool_code(?=\s))\s*")
_PREFIXES = ("print(", "default_api.", "functions.")
_FENCE = re.compile(r"```[ \t]*([\w-]*)")
_JSON_FENCES = frozenset({"", "json", "jsonc", "json5", "text", "plaintext", "xml"})
_CALL_FENCES = frozenset({"tool_code", "tool_call", "tool_calls", "tool_use", "tool", "function_call", "function"})
_CODE_FENCES = frozenset({"python", "py"})
_FENCES = _JSON_FENCES | _CALL_FENCES | _CODE_FENCES
_WORD = re.compile(r"(?:print\(\s*)?(?:call:|to=)?[A-Za-z_][\w.:/-]*")
_BEFORE_ARGUMENTS = ("Action Input:", "✿ARGS✿:", "json", "code")
_SPACE = re.compile(rf"(?:\s|{'|'.join(map(re.escape, ENDS))})*")
# A tool's name, in a call that is not complete.
_NAMED = re.compile(r"[\"'](?:name|tool_name|function|tool)[\"']\s*:\s*[\"']([\w.:/-]+)[\"']|^\W*([\w.:/-]+)\s*[({]")


@dataclass(frozen=True, slots=True)
class Context:
    """Where a candidate stands.

    asked: the question asks for text of this kind. first: nothing was said before it. example: what was said just
    before announces an example.
    """

    offered: Offered
    asked: bool = False
    first: bool = True
    example: bool = False


@dataclass(frozen=True, slots=True)
class NeedMore:
    """More text has to come. `certain`: it is a call, whatever comes."""

    certain: bool = False


@dataclass(frozen=True, slots=True)
class NotACall:
    """The candidate is text, so far at least."""

    end: int


@dataclass(frozen=True, slots=True)
class Calls:
    calls: list[PrintedCall]
    end: int


Verdict = NeedMore | NotACall | Calls


def classify_marked(text: str, marker: str, context: Context, ending: Ending, *, sure: bool) -> Verdict:
    """The verdict on text that begins with a marker of calls.

    sure: where it stands, nobody would merely talk about the marker.
    """
    start = 0 if marker in _WITHIN else len(marker)
    looks = True if start == 0 else _begins_call(text[start:])
    if looks is None and not ending:
        return NeedMore(certain=sure)
    if not looks and not sure:
        return NotACall(len(marker))
    for stop, closer in _each(text, start, CALL_MARKERS.get(marker, _CHANNEL_ENDS)):
        end = stop + len(closer)
        region = text[: stop if start else end][start:]
        found = read_calls(region, 0, context.offered, marked=True, cut=True)
        if found.unfinished:
            continue  # the closer may stand inside of an argument
        if found.calls and not region[found.end :].strip():
            return Calls(found.calls, end)
        return Calls([_unreadable(region, context.offered)], end) if sure else NotACall(len(marker))
    if not ending:
        return NeedMore(certain=True)
    found = read_calls(text, start, context.offered, marked=True, cut=ending == "stop")
    if found.calls and _begins_closer(text[found.end :], CALL_MARKERS.get(marker, _CHANNEL_ENDS)):
        return Calls(found.calls, len(text))
    if found.unfinished or not (found.calls or not sure):
        error = CUT_OFF if ending == "length" else UNREADABLE
        return Calls([*found.calls, _unreadable(text[found.end :], context.offered, error)], len(text))
    return Calls(found.calls, found.end) if found.calls else NotACall(len(marker))


def opens_line(text: str, offered: Offered) -> bool | None:
    """Whether a line that begins like this is to be weighed; None while that is open."""
    if text[0] in "`{[":
        return True
    beginnings = (*_LEADS, *_PREFIXES, *offered)
    if text.startswith(beginnings):
        return True
    return None if True in [beginning.startswith(text) for beginning in beginnings] else False


def classify_line(text: str, context: Context, ending: Ending) -> Verdict:
    """The verdict on the beginning of a line that could be a call, and could be prose."""
    if not ending and any(lead.startswith(text) for lead in _LEADS):
        return NeedMore()
    lead = _LEAD.match(text)
    start = lead.end() if lead else 0
    body = text[start:]
    if not ending and len(body) < 3 and "```".startswith(body):
        return NeedMore()
    if body.startswith("```"):
        return _fenced(text, start, context, ending)
    looks = _begins_json(body, context.offered) if body[:1] in ("{", "[") else _begins_call(body)
    if looks is None and not ending:
        return NeedMore()
    if not looks:
        return NotACall(1)
    found = read_calls(text, start, context.offered, marked=False)
    if found.unfinished and ending == "stop":
        found = read_calls(text, start, context.offered, marked=False, cut=True)
    named = body[0] not in "{["
    if found.unfinished:
        known = _name_in(text[found.end :] if found.calls else body, context.offered) in context.offered
        if not ending:
            return NeedMore(certain=known and context.first and not context.asked)
        if not known:
            return NotACall(1)
        error = CUT_OFF if ending == "length" else UNREADABLE
        found = Found([*found.calls, _unreadable(body, context.offered, error)], len(text))
    if not found.calls or (named and any(call.name not in context.offered for call in found.calls)):
        return NotACall(1)
    return _decided(text, found, context, ending)


def _fenced(text: str, start: int, context: Context, ending: Ending) -> Verdict:
    """The verdict on a code fence."""
    opening = _FENCE.match(text, start)
    assert opening is not None
    prose = NotACall(start + 3)
    if opening.end() == len(text) and not ending:
        return NeedMore() if any(kind.startswith(opening[1]) for kind in _FENCES) else prose
    if opening[1] not in _FENCES:
        return prose
    body = text[opening.end() :]
    inside = body.lstrip()
    json = inside[:1] in ("{", "[")
    looks = _begins_json(inside, context.offered) if json else _begins_call(inside)
    if looks is None:
        return prose if ending else NeedMore()
    if not looks or inside[0] == "`" or (inside[0] == "<" and opening[1] in _CODE_FENCES):
        return prose
    found: Found | None = None
    for stop, closer in _each(body, 0, ("```",)):
        found = read_calls(body[:stop], 0, context.offered, marked=True, cut=True)
        if found.unfinished:
            found = None
            continue
        if body[found.end : stop].strip():
            return prose
        found = Found(found.calls, opening.end() + stop + len(closer))
        break
    if found is None:
        if not ending:
            return NeedMore()
        found = read_calls(body, 0, context.offered, marked=True, cut=ending == "stop")
        if found.unfinished:
            if _name_in(inside, context.offered) not in context.offered:
                return prose
            error = CUT_OFF if ending == "length" else UNREADABLE
            found = Found([*found.calls, _unreadable(inside, context.offered, error)], len(body))
        end = len(body) if _begins_closer(body[found.end :], ("```",)) else found.end
        found = Found(found.calls, opening.end() + end)
    known = all(call.name in context.offered for call in found.calls)
    if not found.calls or not (known or json or inside[0] == "<" or opening[1] in _CALL_FENCES):
        return prose
    return _decided(text, found, context, ending)


def _decided(text: str, found: Found, context: Context, ending: Ending) -> Verdict:
    """The verdict on calls that could be prose as well, by what stands around them."""
    after = _SPACE.match(text, found.end)
    assert after is not None
    rest = text[after.end() :]
    calls, end, trailing = found.calls, found.end, not rest
    if not ending and (not rest.strip(" \t,;") or any(marker.startswith(rest) for marker in ENDS)):
        return NeedMore()
    if rest:
        if "\n" not in text[found.end : after.end()]:
            return NotACall(found.end)
        opens = opens_line(rest, context.offered)
        further = (
            classify_line(rest, context, ending)
            if opens
            else NeedMore()
            if opens is None and not ending
            else NotACall(1)
        )
        if isinstance(further, NeedMore):
            return further
        if isinstance(further, Calls):
            calls, end = [*calls, *further.calls], after.end() + further.end
            trailing = not text[end:].strip()
    known = all(call.name in context.offered for call in calls)
    # what follows a call is made up; what stands behind words is one only when nothing follows
    meant = context.first or (trailing and not context.example)
    if context.asked:
        meant = known and context.first and trailing
    return Calls(calls, end) if meant else NotACall(end)


def _begins_call(text: str) -> bool | None:
    """Whether a call can begin like this; None while that is open."""
    start = text.lstrip()
    if not start:
        return None
    if start[0] in "{[<`":
        return True
    word = _WORD.match(start)
    if word is None:
        return None if "print(".startswith(start) or start.startswith("#") else False
    rest = start[word.end() :].lstrip()
    if rest[:1] in ("(", "{", "[", "<", "`") or rest.startswith(_BEFORE_ARGUMENTS):
        return True
    return None if any(words.startswith(rest) for words in _BEFORE_ARGUMENTS) else False


def _begins_json(text: str, offered: Offered) -> bool | None:
    """Whether a JSON value, or a list of calls in Python's notation, can begin like this and be a call."""
    inner = text[1:].lstrip()
    if not inner:
        return None
    if text[0] == "[":
        if inner[0] == "{":
            return _begins_json(inner, offered)
        word = _WORD.match(inner)
        if word is None:
            return False
        return None if word.end() == len(inner) else inner[word.end()] == "("
    if inner[0] in "\"'":
        key, closed, _ = inner[1:].partition(inner[0])
    else:
        key = re.split(r"\W", inner, maxsplit=1)[0]
        closed = inner[len(key) :]
    if closed:
        return key in CALL_KEYS or key in offered
    return None if any(known.startswith(key) for known in (*CALL_KEYS, *offered)) else False


def _each(text: str, start: int, closers: Iterable[str]) -> list[tuple[int, str]]:
    """Where the closers stand, in their order."""
    found = []
    for closer in closers:
        at = text.find(closer, start)
        while at >= 0:
            found.append((at, closer))
            at = text.find(closer, at + len(closer))
    return sorted(found)


def _begins_closer(text: str, closers: Iterable[str]) -> bool:
    """Whether an answer's end is what had been begun of a closer."""
    rest = text.strip()
    return bool(rest) and any(closer.startswith(rest) for closer in closers)


def _name_in(text: str, offered: Offered) -> str:
    """The name in a call that cannot be read, when it can be told."""
    found = _NAMED.search(text)
    name = (found[1] or found[2]) if found else ""
    return name if name in offered else "unreadable_call"


def _unreadable(text: str, offered: Offered, error: str = UNREADABLE) -> PrintedCall:
    return PrintedCall(_name_in(text, offered), {}, error)
