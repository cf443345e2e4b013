"""What a server lists, as tools that models can be offered: names, sizes, and what has changed since the first time."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import orjson

from shared.contracts import ToolFunction

_LONGEST_NAME = 64
_MOST_NAMESAKES = 3
_STRANGE = re.compile(r"[^A-Za-z0-9_-]")
# What one tool's name, description and schema may have, and what all of one server's (bytes of JSON): a registry
# entry is written with every heartbeat.
MOST_OF_ONE = 16_000
MOST_OF_ALL = 256_000
MOST_TOOLS = 100


@dataclass(frozen=True, slots=True)
class Listed:
    """A tool as its server lists it. `name` is the server's, `function` what a model would be offered. `read_only`:
    it changes nothing, as its server says."""

    name: str
    function: ToolFunction
    read_only: bool = False

    @property
    def hash(self) -> str:
        """Changes whenever anything changes that a model is told."""
        told = self.function.model_dump(exclude_none=True)
        return hashlib.sha256(orjson.dumps([self.name, told], option=orjson.OPT_SORT_KEYS)).hexdigest()

    @property
    def size(self) -> int:
        return len(orjson.dumps([self.name, self.function.model_dump(exclude_none=True)]))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A tool that is not offered because of what it is."""

    tool: str
    why: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """A tool that is not offered until an operator says yes."""

    tool: Listed
    why: Literal["changed", "new"]


@dataclass(frozen=True, slots=True)
class Sorted:
    """A server's tools: those that are offered, those that wait for a yes, those that cannot be."""

    offered: list[Listed] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def tool_name(server: str, name: str) -> str:
    """`server__name` with the characters that models' servers accept; one too long ends in a hash."""
    whole = f"{server}__{_STRANGE.sub('_', name)}"
    if len(whole) <= _LONGEST_NAME:
        return whole
    return f"{whole[: _LONGEST_NAME - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def listed(
    server: str, name: str, description: str | None, schema: Mapping[str, Any], *, read_only: bool = False
) -> Listed:
    """The tool as it is offered: its schema goes through as it is, with the two fields that models' servers need."""
    parameters = {"type": "object", "properties": {}, **schema}
    told = description or f"The tool {name} of the server {server}."
    return Listed(name, ToolFunction(name=tool_name(server, name), description=told, parameters=parameters), read_only)


def fitting(tools: Sequence[Listed], allow: Sequence[str]) -> tuple[list[Listed], list[LeftOut]]:
    """The tools that may be offered at all, and why others may not be."""
    fits: list[Listed] = []
    left_out: list[LeftOut] = []
    wanted = [tool for tool in tools if not allow or any(fnmatchcase(tool.name, one) for one in allow)]
    namesakes: dict[str, list[str]] = defaultdict(list)
    for tool in wanted:
        namesakes[tool.function.name].append(repr(tool.name[:_LONGEST_NAME]))
    size = 0
    for tool in wanted:
        name = tool.function.name
        if len(namesakes[name]) > 1:
            # of any number of them, as many as people read
            others = " and ".join(sorted(namesakes[name][:_MOST_NAMESAKES]))
            left_out.append(LeftOut(name, f"{others} would have the same name; allow only one of them"))
        elif tool.size > MOST_OF_ONE:
            left_out.append(LeftOut(name, f"its name, description and schema have more than {MOST_OF_ONE} bytes"))
        elif len(fits) == MOST_TOOLS or size + tool.size > MOST_OF_ALL:
            left_out.append(LeftOut(name, "the server has too many tools; name those that you want under allow"))
        else:
            size += tool.size
            fits.append(tool)
    there = [tool.name for tool in tools]
    left_out += [
        LeftOut(pattern, "is allowed, but the server has no such tool")
        for pattern in allow
        if not any(fnmatchcase(name, pattern) for name in there)
    ]
    return fits, left_out


def pins(tools: Sequence[Listed]) -> dict[str, str]:
    """What is remembered of a server that is seen for the first time: the hash of each tool that could be offered."""
    return {tool.name: tool.hash for tool in tools if tool.size <= MOST_OF_ONE}


def sorted_out(
    tools: Sequence[Listed], allow: Sequence[str], pinned: Mapping[str, str], approved: Mapping[str, str]
) -> Sorted:
    """Who is offered: a tool that is as it was when its server was first seen, or as an operator has approved it.

    pinned: by the server's names. approved: by the names that models see.
    """
    fits, left_out = fitting(tools, allow)
    found = Sorted(left_out=left_out)
    for tool in fits:
        if approved.get(tool.function.name, pinned.get(tool.name)) == tool.hash:
            found.offered.append(tool)
        else:
            found.waiting.append(Waiting(tool, "changed" if tool.name in pinned else "new"))
    return found
