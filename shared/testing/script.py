"""The script of the model server: rules that say what "the model" answers to what it is asked.

The first rule whose `when` fits plays. Texts and string arguments are templates: `<<query>>` is the last user message,
`<<1>>` a group of `when.user`, `<<result>>` the last tool result, `<<earlier>>` the conversation before the last user
message, `<<system>>` the system prompt; `<<result~REGEX>>` is the first match in it (its first group, if it has one).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson
import yaml
from pydantic import BaseModel, ConfigDict, Field

from shared.testing.insistence import Insistence

STORIES = Path(__file__).with_name("stories_rules.yaml")

_PLACE = re.compile(r"<<(\w+)(?:~(.*?))?>>", re.DOTALL)
_WORDS = re.compile(r"\S+\s*|\s+")


@dataclass(frozen=True, slots=True)
class Asked:
    """A chat request, the same for every protocol. `messages` are `{role, content, tool_name?}`; `think` is None when
    the request does not say: a model that can think then does.
    """

    model: str
    messages: Sequence[dict[str, str]]
    tools: Sequence[str]
    think: bool | None
    stream: bool

    @property
    def last_user(self) -> int:
        """Position of the last user message, -1 without one."""
        return max((n for n, m in enumerate(self.messages) if m["role"] == "user"), default=-1)

    @property
    def query(self) -> str:
        return self.messages[self.last_user]["content"] if self.last_user >= 0 else ""

    @property
    def results(self) -> list[dict[str, str]]:
        """Tool messages since the last user message."""
        return [m for m in self.messages[self.last_user + 1 :] if m["role"] == "tool"]

    def part(self, name: str) -> str:
        """A named part of the request, as templates use it."""
        match name:
            case "query":
                return self.query
            case "result":
                return self.results[-1]["content"] if self.results else ""
            case "system":
                return "\n".join(m["content"] for m in self.messages if m["role"] == "system")
            case "earlier":
                past = self.messages[: max(self.last_user, 0)]
                return "\n".join(m["content"] for m in past if m["role"] != "system")
            case _:
                raise KeyError(name)


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class When(Part):
    """All that are given must fit; patterns are searched, without regard to case."""

    user: str | None = None
    system: str | None = None
    earlier: str | None = None
    result: str | None = None
    model: str | None = None
    tool_results: int | None = Field(default=None, description="number of tool messages since the user's message")
    last_tool: str | None = Field(default=None, description="name of the tool that answered last")
    offered: str | None = Field(default=None, description="a tool that must be on offer")
    any_tools: bool | None = Field(default=None, description="whether any tool is on offer")

    def fits(self, asked: Asked) -> bool:
        patterns = (
            (self.user, asked.query),
            (self.system, asked.part("system")),
            (self.earlier, asked.part("earlier")),
            (self.result, asked.part("result")),
            (self.model, asked.model),
        )
        results = asked.results
        return (
            all(p is None or re.search(p, text, re.IGNORECASE) for p, text in patterns)
            and self.tool_results in (None, len(results))
            and self.last_tool in (None, results[-1].get("tool_name") if results else "")
            and (self.offered is None or self.offered in asked.tools)
            and self.any_tools in (None, bool(asked.tools))
        )


class Call(Part):
    """`id`: None makes one up, an empty one is left out. `text_arguments` goes out instead of `args`, as text.
    `signature`: Gemini's signature of the thoughts before the call; in OpenAI's protocol as Google's server sends it.
    """

    name: str
    args: dict[str, Any] = {}
    text_arguments: str | None = None
    id: str | None = None
    signature: str = ""


class Fault(Part):
    """What goes wrong after so many chunks.

    error_line: an error inside the stream, which has a `code` in OpenAI's protocol · cut: the connection is closed
    no_done: the stream ends without its last chunk · garbage: a chunk that is not JSON, then the stream goes on
    stall: silence until the client leaves
    """

    kind: Literal["error_line", "cut", "no_done", "garbage", "stall"]
    after: int = 0
    text: str = "llama runner process has terminated"
    code: int = 500


class Respond(Part):
    """A text is sent word by word, a list chunk by chunk. Thinking is sent only when it was asked for."""

    thinking: str | list[str] = ""
    text: str | list[str] = ""
    tool_calls: list[Call] = []
    one_line: bool = Field(default=False, description="Ollama: all calls in one line")
    calls_in_done: bool = Field(default=False, description="Ollama: the calls come with the last line")
    whole_calls: bool = Field(default=False, description="OpenAI: arguments are not cut into fragments")
    reasoning_field: Literal["reasoning", "reasoning_content", "reasoning_details", "content"] = Field(
        default="reasoning_content", description="OpenAI: where thoughts stand; content: as parts of it (Mistral)"
    )
    delay: float = Field(default=0, description="seconds before the first byte")
    pace: float = Field(default=0, description="seconds from one chunk to the next")
    done_reason: Literal["stop", "length"] = "stop"
    status: int | None = Field(default=None, description="an HTTP error instead of an answer")
    error: str = "scripted error"
    fault: Fault | None = None


class Rule(Part):
    """`times`: plays so often, then the next rules are looked at."""

    name: str = ""
    when: When = When()
    respond: Respond = Respond()
    times: int | None = None


class Script(Part):
    """`models`: the server's models with their abilities; None: every name, with every ability. `insists`: rules for
    the messages of a request."""

    rules: list[Rule] = []
    insists: Insistence | None = None
    models: dict[str, list[str]] | None = None


@dataclass(slots=True)
class Director:
    """Finds the rule for a request and counts how often each has played."""

    script: Script
    played: dict[int, int] = field(default_factory=dict)

    def choose(self, asked: Asked) -> Rule:
        for number, rule in enumerate(self.script.rules):
            count = self.played.get(number, 0)
            if (rule.times is None or count < rule.times) and rule.when.fits(asked):
                self.played[number] = count + 1
                return rule
        return Rule(name="fallback", respond=Respond(text="You asked: <<query>>"))


def load_script(text: str) -> Script:
    """A script from YAML or JSON: a mapping with `rules`, or the list of rules alone."""
    try:
        # YAML reads a pair of escaped surrogates, which JSON has beyond U+FFFF, as two broken characters
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        content = yaml.safe_load(text)
    return Script.model_validate({"rules": content} if isinstance(content, list) else content)


def chunks_of(text: str | list[str], rule: Rule, asked: Asked) -> list[str]:
    """The chunks to send, filled in."""
    if isinstance(text, list):
        return [fill(chunk, rule, asked) for chunk in text]
    return _WORDS.findall(fill(text, rule, asked))


def fill(value: Any, rule: Rule, asked: Asked) -> Any:
    """A template (or the templates inside a value), filled in. A pattern that finds nothing leaves nothing."""
    if isinstance(value, dict):
        return {key: fill(inner, rule, asked) for key, inner in value.items()}
    if isinstance(value, list):
        return [fill(inner, rule, asked) for inner in value]
    if not isinstance(value, str):
        return value

    def place(match: re.Match[str]) -> str:
        name, pattern = match[1], match[2]
        if name.isdigit():
            found = re.search(rule.when.user or "", asked.query, re.IGNORECASE)
            return (found[int(name)] or "") if found else ""
        text = asked.part(name)
        if pattern is None:
            return text
        found = re.search(pattern, text, re.IGNORECASE)
        return (found[1 if found.re.groups else 0] or "").strip() if found else ""

    return _PLACE.sub(place, value)
