"""What the tests of the contract suite look at and work with: entries, handlers that record, worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import redis
from contract.bus.servers import Server
from contract.bus.surface import GROUP, STREAM, Delivery, key, stream
from support.waiting import always, eventually

__all__ = [
    "DEADLY", "EFFECTS", "Recorder", "Worker", "add", "always", "consumers", "deliveries", "eventually", "owners",
    "pending", "read_as", "streams_of",
]  # fmt: skip

_TESTS = Path(__file__).resolve().parents[2]
EFFECTS = key("effects")
# The text of an entry that ends the process of its handler (worker.py).
DEADLY = "deadly"


def add(client: redis.Redis, count: int = 1, to: str = STREAM, *, text: str = "x") -> list[str]:
    """Write entries as any client does, and return their ids."""
    return [client.xadd(to, {"payload": json.dumps({"text": text})}) for _ in range(count)]


def read_as(client: redis.Redis, name: str, count: int, *, of: str = STREAM) -> list[str]:
    """Add entries and read them as a consumer that then dies; return their ids."""
    with contextlib.suppress(redis.ResponseError):
        client.xgroup_create(of, GROUP, "0", mkstream=True)
    ids = add(client, count, of)
    client.xreadgroup(GROUP, name, {of: ">"}, count=count)
    return ids


def streams_of(count: int) -> list[str]:
    """Return the names of so many streams."""
    return [stream(f"work{number}") for number in range(count)]


def pending(client: redis.Redis, of: str = STREAM, group: str = GROUP) -> int:
    """Return the number of entries in flight; -1 while there is no group."""
    try:
        return int(client.xpending(of, group)["pending"])
    except redis.ResponseError:
        return -1


def _rows(client: redis.Redis, of: str, group: str) -> list[dict[str, Any]]:
    with contextlib.suppress(redis.ResponseError):
        return list(client.xpending_range(of, group, "-", "+", 10_000))
    # there is no group
    return []


def owners(client: redis.Redis, of: str = STREAM, group: str = GROUP) -> dict[str, str]:
    """Return the consumer of each entry in flight."""
    return {row["message_id"]: row["consumer"] for row in _rows(client, of, group)}


def deliveries(client: redis.Redis, of: str = STREAM, group: str = GROUP) -> dict[str, int]:
    """Return the delivery count of each entry in flight."""
    return {row["message_id"]: row["times_delivered"] for row in _rows(client, of, group)}


def consumers(client: redis.Redis, of: str = STREAM, group: str = GROUP) -> dict[str, int]:
    """Return the number of entries that each consumer of a group holds."""
    return {row["name"]: row["pending"] for row in client.xinfo_consumers(of, group)}


def read_waits(server: Server) -> bool:
    """Return whether a consumer waits in the server for new entries."""
    return any("b" in row["flags"] for node in server.nodes for row in node.client.client_list())


class Recorder:
    """A handler that records what it is given, and returns no effects.

    seen: entry ids in the order in which they began. running, most: handlers at this moment, and at most.
    gate: while it is set to an Event, each handler waits for that.
    """

    def __init__(self, seconds: float = 0.0, *, gated: bool = False) -> None:
        self.seconds = seconds
        self.seen: list[str] = []
        self.deliveries: list[int] = []
        self.running = 0
        self.most = 0
        self.gate = asyncio.Event()
        if not gated:
            self.gate.set()

    async def __call__(self, delivery: Delivery) -> list[Any]:
        self.seen.append(delivery.entry_id)
        self.deliveries.append(delivery.deliveries)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        return []


class Worker:
    """A consumer in a process of its own (worker.py), to be sent signals.

    It appends `NAME:ENTRY_ID` to the list `started` when a handler begins, and to `effects` with the acknowledgement.
    Options are those of worker.py.
    """

    STARTED = key("started")
    EFFECTS = EFFECTS

    def __init__(self, url: str, name: str, **options: Any) -> None:
        arguments = json.dumps({"url": url, "name": name, **options})
        environment = {**os.environ, "PYTHONPATH": f"{_TESTS}{os.pathsep}{_TESTS.parent}"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "contract.bus.worker", arguments], env=environment, cwd=_TESTS.parent
        )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self, timeout: float = 15.0) -> int:
        """Wait until the process has ended, and return its exit status."""
        await eventually(lambda: self.process.poll() is not None, timeout, "the worker process has ended")
        return int(self.process.returncode)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
