"""Fitting a conversation into the model's context, by whole turns. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import orjson

Message = Mapping[str, Any]

# Characters per token assumed until the backend has counted a prompt of this conversation; low, so that we err early.
DEFAULT_RATIO = 3.0
# More than so many are never seen: part of what was sent has not been counted.
MOST_RATIO = 6.0
_PER_MESSAGE = 8
_MAX_RESERVE = 8_192
# A tool's result in the block that tool_message puts round it, and how much of it is left at least.
_QUOTED = re.compile(r"(\[untrusted content from [^\n]*\n)(.*)(\n\[end of untrusted content[^\n]*\])", re.DOTALL)
_LEAST_QUOTED = 400
_LEFT_OUT_CHARS = 60
# What an image takes of the window, as if it were text: about a thousand tokens at most models.
_IMAGE_CHARS = 3_000


@dataclass(slots=True)
class Fitted:
    """messages: what is sent. dropped: turns left out, oldest first. tokens: estimated length of what is sent."""

    messages: list[Message]
    dropped: int
    kept: int
    tokens: int


class ContextTooSmall(ValueError):
    """The newest message with the system prompt and the tools does not fit at all."""


@dataclass(slots=True)
class Conversation:
    """system: messages that are never cut. history: turns, oldest first. ratio: characters per token.

    most: turns that are sent at most; None: as many as fit. kept: turns of the last request. announced: how many
    left-out turns clients know of. names: the queries of the history's turns; nothing where the client keeps it.
    summarised: turns before them that the system messages tell of in other words, the last of which is `until`.
    """

    system: list[Message]
    history: list[list[Message]]
    ratio: float = DEFAULT_RATIO
    most: int | None = None
    kept: int = 0
    announced: int = 0
    names: Sequence[str] = ()
    summarised: int = 0
    until: str = ""

    def seen(self, fitted: Fitted) -> dict[str, Any]:
        """What the model sees of the conversation: counts of turns sent, left out and summarised, and which."""
        seen: dict[str, Any] = {"turns": fitted.kept, "cut": fitted.dropped}
        if fitted.kept and len(self.names) == len(self.history):
            seen["first_turn"] = self.names[fitted.dropped]
        if self.summarised:
            seen |= {"summarised": self.summarised, "summarised_until": self.until}
        return seen

    def fit(self, current: Sequence[Message], tools: Sequence[Mapping[str, Any]], context: int) -> Fitted:
        """What to send, in a context of so many tokens. Raises ContextTooSmall."""
        history = self.history if self.most is None else self.history[max(0, len(self.history) - self.most) :]
        fitted = fit(self.system, history, current, tools, context, self.ratio)
        self.kept = fitted.kept
        fitted.dropped = len(self.history) - fitted.kept
        return fitted

    def halve(self) -> bool:
        """Has fewer turns sent than in the last request, half of them; False when there were none."""
        self.most = self.kept // 2
        return self.kept > 0

    def measure(self, sent: int, tokens: int | None) -> bool:
        """A prompt of `sent` characters was found to have so many tokens; True when they are more than estimated."""
        before, self.ratio = self.ratio, measured_ratio(sent, tokens) or self.ratio
        return self.ratio < 0.98 * before


def reserve(num_ctx: int) -> int:
    """Tokens kept free for the answer."""
    return min(_MAX_RESERVE, num_ctx // 4)


def estimate(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), ratio: float = DEFAULT_RATIO) -> int:
    """Tokens of messages and tool schemas, at `ratio` characters per token."""
    # rounded up: the sum over parts must not be less than the whole
    return ceil(characters(messages, tools) / ratio) + _PER_MESSAGE * len(messages)


def characters(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
    total = sum(len(tool["function"]["name"]) + len(orjson.dumps(tool)) for tool in tools)
    for message in messages:
        total += len(message.get("content") or "") + len(message.get("thinking") or "")
        if details := message.get("reasoning_details"):
            total += len(orjson.dumps(details))
        total += _IMAGE_CHARS * len(message.get("images") or ())
        if calls := message.get("tool_calls"):
            total += len(orjson.dumps(calls))
    return total


def measured_ratio(sent: int, prompt_tokens: int | None) -> float | None:
    """Characters per token as the backend counted them; None when it did not, or when part came from its cache."""
    if not prompt_tokens or sent < 400:
        return None
    ratio = sent / prompt_tokens
    return ratio if 1.0 <= ratio <= MOST_RATIO else None


def fit(
    system: Sequence[Message],
    history: Sequence[Sequence[Message]],
    current: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    num_ctx: int,
    ratio: float = DEFAULT_RATIO,
) -> Fitted:
    """Drops the oldest turns until prompt and reserve fit. System prompt, tools and the current query are never cut;
    of the current tool results the longest are, and say so.

    history: turns, each a sequence of messages, oldest first. Raises ContextTooSmall.
    """
    fixed, room = estimate([*system, *current], tools, ratio), num_ctx - reserve(num_ctx)
    if (excess := fixed - room) > 0:
        current = shortened(current, ceil(excess * ratio))
        fixed = estimate([*system, *current], tools, ratio)
    if fixed >= num_ctx:
        raise ContextTooSmall(
            f"the question, the system prompt and the tool results need about {fixed} tokens, "
            f"but the model's context is {num_ctx}"
        )
    room -= fixed
    kept: list[Sequence[Message]] = []
    for turn in reversed(history):
        cost = estimate(turn, (), ratio)
        if cost > room:
            break
        room -= cost
        kept.insert(0, turn)
    messages = [*system, *(message for turn in kept for message in turn), *current]
    tokens = estimate(messages, tools, ratio) if kept else fixed
    return Fitted(messages, len(history) - len(kept), len(kept), tokens)


def shortened(messages: Sequence[Message], excess: int) -> list[Message]:
    """The messages with at least so many characters less in the results of tools, the longest first, which say how much
    is left out; as they are where the results are not that long."""
    quoted = {
        place: match
        for place, message in enumerate(messages)
        if message["role"] == "tool" and (match := _QUOTED.fullmatch(str(message.get("content"))))
    }
    lengths = sorted(len(match[2]) for match in quoted.values())
    left, level = sum(lengths) - excess - _LEFT_OUT_CHARS * len(lengths), 0
    for place, length in enumerate(lengths):
        # the shorter ones stay whole, and leave what they do not need to the longer ones
        level = left // (len(lengths) - place)
        if length > level:
            break
        left -= length
    if level < _LEAST_QUOTED:
        return list(messages)
    found = list(messages)
    for place, match in quoted.items():
        if (length := len(match[2])) > level:
            note = f"\n[{length - level} of {length} characters left out]"
            found[place] = {**messages[place], "content": f"{match[1]}{match[2][:level]}{note}{match[3]}"}
    return found


def split_turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """A client's own history as (system messages, turns); a turn begins with each user message.

    Thoughts are left out: they belong to the turn that is not over yet.
    """
    system = [message for message in messages if message["role"] == "system"]
    turns: list[list[Message]] = []
    for message in messages:
        if message["role"] == "system":
            continue
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(_without_thoughts(message))
    return system, turns


def _without_thoughts(message: Message) -> Message:
    kept = {name: value for name, value in message.items() if name not in ("thinking", "reasoning_details")}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [{name: call[name] for name in call if name != "signature"} for call in calls]
    return kept


def one_system(messages: Sequence[Message]) -> list[Message]:
    """The same conversation with one system message, in front: many models' templates know no other place."""
    system = [text for message in messages if message["role"] == "system" and (text := message["content"])]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *others] if system else others
