"""Fit a conversation into the model's context, by whole turns. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import orjson

Message = Mapping[str, Any]

# Characters per token until the backend has counted a prompt of this conversation. Low, so that estimates are too high.
DEFAULT_RATIO = 3.0
# A larger ratio means that the backend has counted only a part of the prompt.
MOST_RATIO = 6.0
_PER_MESSAGE = 8
_MAX_RESERVE = 8_192
# A tool's result in the block of `tool_message`, and the least characters of it that stay.
_QUOTED = re.compile(r"(\[untrusted content from [^\n]*\n)(.*)(\n\[end of untrusted content[^\n]*\])", re.DOTALL)
_LEAST_QUOTED = 400
_LEFT_OUT_CHARS = 60
# Tokens of an image until the backend has counted some. Documented figures: 256 for Gemma 3 and 4, 576 for LLaVA 1.5,
# one per 28 x 28 pixels for Qwen2-VL, 765 to 1,105 for GPT-4o, at most about 1,600 for Claude.
IMAGE_TOKENS = 1_000
# Bounds of a learned figure: the smallest of these, and the largest of open models at full size.
_LEAST_IMAGE, _MOST_IMAGE = 256, 4_096
# Above this share of images, the count of a prompt is no measure of characters per token.
_IMAGES_SHARE = 0.25
# The share of the prompt's room up to which files of earlier turns are sent again. Compaction begins at 0.8: files
# alone never cause it.
EARLIER_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Rates:
    """Lengths in tokens. ratio: characters per token. image: tokens per image."""

    ratio: float = DEFAULT_RATIO
    image: int = IMAGE_TOKENS


@dataclass(frozen=True, slots=True)
class EarlierFile:
    """A file of an earlier message, which the model gets again while it fits.

    text: its quoted text. image: in the form of the model port. line: the text in place of the file, also without text
    and image. unseen: the line for a server that takes no images. left_out: the image is not loaded, because it cannot
    fit.
    """

    id: str
    name: str
    line: str
    unseen: str = ""
    text: str = ""
    image: Mapping[str, Any] | None = None
    left_out: bool = False


@dataclass(slots=True)
class Fitted:
    """messages: those of the request. dropped: turns left out, oldest first. tokens: estimated length of the request.
    left_out: images of earlier turns that are not sent."""

    messages: list[Message]
    dropped: int
    kept: int
    tokens: int
    left_out: list[EarlierFile] = field(default_factory=list)


class ContextTooSmall(ValueError):
    """The newest message with the system prompt and the tools does not fit at all."""


@dataclass(slots=True)
class Conversation:
    """system: messages that are never cut. history: turns, oldest first; a message's `files` are `EarlierFile`s.

    most: the most turns to send; None: as many as fit. kept: turns of the last request. announced: the number of
    left-out turns and the ids of left-out images that the journal has announced. names: the queries of the history's
    turns; empty for a client's history. summarised: the number of earlier turns in the summary, up to the query
    `until`. unseen: images of those turns. sees: whether the server takes images of earlier turns.
    """

    system: list[Message]
    history: list[list[Message]]
    rates: Rates = Rates()
    most: int | None = None
    kept: int = 0
    announced: tuple[int, frozenset[str]] = (0, frozenset())
    names: Sequence[str] = ()
    summarised: int = 0
    until: str = ""
    unseen: Sequence[EarlierFile] = ()
    sees: bool = True

    def seen(self, fitted: Fitted) -> dict[str, Any]:
        """What the model sees of the conversation: counts of turns sent, left out and summarised, and which."""
        seen: dict[str, Any] = {"turns": fitted.kept, "cut": fitted.dropped}
        if fitted.kept and len(self.names) == len(self.history):
            seen["first_turn"] = self.names[fitted.dropped]
        if self.summarised:
            seen |= {"summarised": self.summarised, "summarised_until": self.until}
        return seen

    def fit(self, current: Sequence[Message], tools: Sequence[Mapping[str, Any]], context: int) -> Fitted:
        """Return the request that fits a context of `context` tokens: whole turns first, then the files of these turns,
        newest first. Raises ContextTooSmall."""
        history = self.history if self.most is None else self.history[max(0, len(self.history) - self.most) :]
        bare = [[with_files(message, ()) for message in turn] for turn in history]
        fitted = fit(self.system, bare, current, tools, context, self.rates)
        self.kept = fitted.kept
        fitted.dropped = len(self.history) - fitted.kept
        if any("files" in message for turn in self.history for message in turn):
            self._add_files(fitted, int(EARLIER_SHARE * (context - reserve(context))) - fitted.tokens)
        fitted.left_out += self.unseen
        return fitted

    def _add_files(self, fitted: Fitted, room: int) -> None:
        """Put files into the messages of the kept turns, newest first. room: in tokens."""
        for turn in self.history[: fitted.dropped]:
            fitted.left_out += [one for message in turn for one in message.get("files", ()) if _is_image(one)]
        place = len(self.system) + sum(len(turn) for turn in self.history[fitted.dropped :])
        for message in (message for turn in reversed(self.history[fitted.dropped :]) for message in reversed(turn)):
            place -= 1
            sent: list[EarlierFile] = []
            for file in message.get("files", ()):
                cost = self._cost(file)
                if cost is not None and cost <= room:
                    room -= cost
                    fitted.tokens += cost
                    sent.append(file)
                elif _is_image(file):
                    fitted.left_out.append(file)
            if "files" in message:
                fitted.messages[place] = with_files(message, sent, sees=self.sees)

    def _cost(self, file: EarlierFile) -> int | None:
        """Return the tokens that a file adds to its line; None for a file that cannot be sent."""
        if file.image is not None:
            return self.rates.image if self.sees else None
        return ceil((len(file.text) - len(file.line)) / self.rates.ratio) if file.text else None

    def resends_images(self) -> bool:
        """Return whether the request may contain images of earlier turns."""
        return self.sees and any(
            one.image is not None for turn in self.history for message in turn for one in message.get("files", ())
        )

    def halve(self) -> bool:
        """Has fewer turns sent than in the last request, half of them; False when there were none."""
        self.most = self.kept // 2
        return self.kept > 0

    def measure(self, sent: int, tokens: int | None, images: int = 0) -> bool:
        """Learn the rates from a prompt of `sent` characters and some images, of which the server counted the tokens.
        Return whether they are more than estimated."""
        before = self.rates
        if images and tokens and before.ratio != DEFAULT_RATIO:
            each = int((tokens - sent / before.ratio) / images)
            self.rates = replace(self.rates, image=max(_LEAST_IMAGE, min(_MOST_IMAGE, each)))
        seen = images * self.rates.image
        if tokens and seen <= _IMAGES_SHARE * tokens:
            self.rates = replace(self.rates, ratio=measured_ratio(sent, tokens - seen) or before.ratio)
        return _length(sent, images, self.rates) > 1.02 * _length(sent, images, before)


def _length(sent: int, images: int, rates: Rates) -> float:
    return sent / rates.ratio + images * rates.image


def _is_image(file: EarlierFile) -> bool:
    """Return whether a file is an image that the model could have seen."""
    return file.image is not None or file.left_out


def with_files(message: Message, sent: Sequence[EarlierFile], *, sees: bool = True) -> Message:
    """Return a message of the history for a request: with the files in `sent`, and a line for each other file."""
    if "files" not in message:
        return message
    texts: list[str] = []
    images: list[Mapping[str, Any]] = []
    for file in message["files"]:
        if file not in sent:
            texts.append(file.line if sees or file.image is None else file.unseen)
        elif file.image is not None:
            images.append(file.image)
        else:
            texts.append(file.text)
    found = {name: value for name, value in message.items() if name not in ("files", "images")}
    found["content"] = "\n\n".join([*texts, message["content"]])
    return {**found, "images": images} if images else found


def reserve(num_ctx: int) -> int:
    """Return the tokens to leave free for the answer."""
    return min(_MAX_RESERVE, num_ctx // 4)


def estimate(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), rates: Rates = Rates()) -> int:
    """Return the estimated tokens of messages and tool schemas."""
    # Rounded up: the sum over parts must not be less than the whole.
    text = ceil(characters(messages, tools) / rates.ratio)
    return text + _PER_MESSAGE * len(messages) + rates.image * images_in(messages)


def images_in(messages: Sequence[Message]) -> int:
    return sum(len(message.get("images") or ()) for message in messages)


def characters(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
    """Return the characters of messages and tool schemas, without images."""
    total = sum(len(tool["function"]["name"]) + len(orjson.dumps(tool)) for tool in tools)
    for message in messages:
        total += len(message.get("content") or "") + len(message.get("thinking") or "")
        if details := message.get("reasoning_details"):
            total += len(orjson.dumps(details))
        if calls := message.get("tool_calls"):
            total += len(orjson.dumps(calls))
    return total


def measured_ratio(sent: int, prompt_tokens: int | None) -> float | None:
    """Return the counted characters per token; None if the backend counted nothing, or left out its cache."""
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
    rates: Rates = Rates(),
) -> Fitted:
    """Return the request without the oldest turns, so that prompt and reserve fit.

    System prompt, tools and the current query are never cut. The longest current tool results are, with a note.
    history: turns, each a sequence of messages, oldest first. Raises ContextTooSmall.
    """
    fixed, room = estimate([*system, *current], tools, rates), num_ctx - reserve(num_ctx)
    if (excess := fixed - room) > 0:
        current = shortened(current, ceil(excess * rates.ratio))
        fixed = estimate([*system, *current], tools, rates)
    if fixed >= num_ctx:
        raise ContextTooSmall(
            f"the question, the system prompt and the tool results need about {fixed} tokens, "
            f"but the model's context is {num_ctx}"
        )
    room -= fixed
    kept: list[Sequence[Message]] = []
    for turn in reversed(history):
        cost = estimate(turn, (), rates)
        if cost > room:
            break
        room -= cost
        kept.insert(0, turn)
    messages = [*system, *(message for turn in kept for message in turn), *current]
    tokens = estimate(messages, tools, rates) if kept else fixed
    return Fitted(messages, len(history) - len(kept), len(kept), tokens)


def shortened(messages: Sequence[Message], excess: int) -> list[Message]:
    """Return the messages with at least `excess` characters fewer in tool results, the longest cut first.

    A cut result ends with a note. If the results are not long enough, nothing is cut.
    """
    quoted = {
        place: match
        for place, message in enumerate(messages)
        if message["role"] == "tool" and (match := _QUOTED.fullmatch(str(message.get("content"))))
    }
    lengths = sorted(len(match[2]) for match in quoted.values())
    left, level = sum(lengths) - excess - _LEFT_OUT_CHARS * len(lengths), 0
    for place, length in enumerate(lengths):
        # Shorter results stay whole, and leave their unused share to the longer ones.
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
    """Return a client's own history as (system messages, turns); a turn begins with each user message.

    Thoughts are left out: only the current turn has them.
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
    """Return the conversation with one system message, at the beginning: many templates allow no other place."""
    system = [text for message in messages if message["role"] == "system" and (text := message["content"])]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *others] if system else others
