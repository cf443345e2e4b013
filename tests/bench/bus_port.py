"""What a bus must offer to be measured by this harness, and how one is named on the command line."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import orjson

# What a tool is asked, as it crosses the bus: a JSON document of 473 bytes. The answer is a text of the same length.
MESSAGE_BYTES = 473
# Calls that a worker serves at the same time.
CONCURRENCY = 64


class BusUnderTest(Protocol):
    """One process's side of a tool round trip: requester → worker → requester.

    The harness starts two processes, each with an object of its own, made with the URL of the same Redis server. In
    the worker it awaits `start_worker`, in the requester `start_requester`; both then serve until `close`.

    name: how the tables call it.
    promises: one line that says what the implementation does for a call, and what not.
    """

    name: str
    promises: str

    def __init__(self, url: str) -> None: ...

    async def start_worker(self) -> None:
        """Serves calls with `tool_work`. Returns when calls can be taken; they are served in the background."""

    async def start_requester(self) -> None:
        """Returns when calls can be made. The worker is running by then."""

    async def call(self, args: dict[str, Any]) -> str:
        """The worker's `tool_work(args)`. Up to 256 calls are under way at the same time in one event loop."""
        ...

    async def close(self) -> None:
        """Ends what `start_worker` or `start_requester` began."""


def tool_work(args: dict[str, Any]) -> str:
    """The tool that every implementation runs: as little as possible, and the answer depends on the question."""
    text: str = args["text"]
    return text[::-1]


def message(number: int) -> dict[str, Any]:
    """Arguments that make a JSON document of exactly MESSAGE_BYTES."""
    args: dict[str, Any] = {"number": number, "language": "en", "limit": 5, "text": f"{number:08d} "}
    args["text"] += "what a tool is asked " * 24
    args["text"] = args["text"][: len(args["text"]) - (len(orjson.dumps(args)) - MESSAGE_BYTES)]
    return args


def bus_class(target: str) -> type[BusUnderTest]:
    """The class that `module:Class` names. Raises ValueError with a sentence."""
    module, colon, name = target.partition(":")
    if not colon:
        raise ValueError(f"--bus {target}: write it as module:Class")
    found: type[BusUnderTest] = getattr(importlib.import_module(module), name)
    return found
