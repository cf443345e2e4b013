"""The whole stack as processes (gateways, generators, tools, Redis, a scripted model), for tests that speak HTTP."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from support.forked import Forked
from support.redis_servers import unsynced
from support.stack import Participant, Participants

from services.cli.launch.embedded_redis import EmbeddedRedis
from tests.support.waiting import PATIENCE

ADMIN_KEY = "the-stack's-admin-key"
HEARTBEAT = 0.3
SSE = {"Accept": "text/event-stream"}
TERMINAL = (b"completed", b"failed", b"cancelled")
_EVENT = re.compile(rb"id: ([0-9]+-[0-9]+)\nevent: ([a-z.]+)\ndata: (.*)\n\n")

Rules = Sequence[Mapping[str, Any]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(fact: Callable[[], Any], timeout: float, what: str, every: float = 0.02) -> Any:
    """The first true value of `fact`; a refused connection is none. timeout: in seconds of a free machine."""
    deadline = time.monotonic() + PATIENCE * timeout
    last: object = None
    while True:
        try:
            if value := fact():
                return value
        except httpx.HTTPError as exc:
            last = exc
        assert time.monotonic() < deadline, f"did not happen within {PATIENCE * timeout:g} s: {what} ({last})"
        time.sleep(every)


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────


def blocks(raw: bytes) -> list[bytes]:
    """The complete events of a stream as they came, comments left out."""
    return [part + b"\n\n" for part in raw.split(b"\n\n")[:-1] if not part.startswith(b":")]


def parsed(block: bytes) -> tuple[str, str, dict[str, Any]]:
    """(id, event, data) of one event."""
    found = _EVENT.fullmatch(block)
    assert found is not None, block
    return found[1].decode(), found[2].decode(), json.loads(found[3])


def event_types(raw: bytes) -> list[str]:
    return [parsed(block)[1] for block in blocks(raw)]


def last_id(raw: bytes) -> str:
    return parsed(blocks(raw)[-1])[0]


def ended(raw: bytes) -> bool:
    """Whether the terminal event is there."""
    found = blocks(raw)
    return bool(found) and parsed(found[-1])[1].encode() in TERMINAL


def answer_in(raw: bytes) -> str:
    """The answer of the `completed` event that ends a stream."""
    _, kind, data = parsed(blocks(raw)[-1])
    assert kind == "completed", (kind, data)
    text: str = data["answer"]
    return text


async def take(response: httpx.Response, count: int) -> bytes:
    """The first `count` events of a stream, byte for byte; all of them when it ends before."""
    seen = b""
    async for chunk in response.aiter_bytes():
        seen += chunk
        if len(blocks(seen)) >= count:
            break
    return b"".join(blocks(seen)[:count])


async def follow(clients: Sequence[httpx.AsyncClient], query_id: str, cuts: Iterator[int], seen: bytes = b"") -> bytes:
    """Reads a stream to its end over several clients in turn, as a browser would that loses its connection.

    cuts: how many events are read before each cut. seen: what was read before.
    """
    turn = 0
    while not ended(seen):
        headers = {"Last-Event-ID": last_id(seen)} if seen else {}
        count = next(cuts)
        async with clients[turn % len(clients)].stream("GET", f"/queries/{query_id}/events", headers=headers) as part:
            assert part.status_code == 200, (part.status_code, await part.aread())
            seen += await take(part, count)
        turn += 1
    return seen


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────


class ModelProcess:
    """The scripted model server as a process: it can go away and come back on the same port."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._port = free_port()
        self._rules: Rules = ()
        self._process: Forked | None = None
        self.http = httpx.Client(base_url=self.url, timeout=10, trust_env=False, verify=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        script = self._log.with_name("rules.json")
        script.write_text(json.dumps({"rules": self._rules}), encoding="utf-8")
        arguments = ("--port", str(self._port), "--rules", str(script))
        self._process = Forked("shared.testing.model_server", *arguments, environment=os.environ, log=self._log)
        until(lambda: self.http.get("/api/version").is_success, 20, "the model server answers")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self.http.close()

    def play(self, rules: Rules) -> None:
        """Another script; what was asked before is forgotten."""
        self._rules = rules
        assert self.http.post("/script/rules", content=json.dumps({"rules": rules})).is_success
        self.http.delete("/script/requests")

    def requests(self, query: str | None = None) -> list[dict[str, Any]]:
        """The chat requests in the order they came, or those whose newest question has these words."""
        found: list[dict[str, Any]] = self.http.get("/script/requests").json()
        return [asked for asked in found if query is None or query in asked["query"]]


class HttpStack:
    """Two or more gateways (`urls`), generators, tools, Redis and a model; `mend` starts again what was killed."""

    def __init__(self, redis: EmbeddedRedis, model: ModelProcess, people: Participants, gateways: int) -> None:
        self.redis = redis
        self.model = model
        self.people = people
        self._ports = [free_port() for _ in range(gateways)]
        self._wanted: dict[str, int] = {}
        self.gateways: list[Participant] = []
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]

    def start(self, generators: int) -> None:
        self.gateways = [self._gateway(port) for port in self._ports]
        self._wanted = {"generator": generators, "web_search": 1, "web_fetch": 1}
        self.mend()

    def _gateway(self, port: int) -> Participant:
        return self.people.start("gateway", api_port=port, admin_key=ADMIN_KEY, keepalive=1)

    def mend(self) -> None:
        """Starts what is missing; returns when everything is ready."""
        self.gateways = [
            one if one.alive else self._gateway(port) for one, port in zip(self.gateways, self._ports, strict=True)
        ]
        allowed = json.dumps([self.model.url.removeprefix("http://")])
        for name, wanted in self._wanted.items():
            for _ in range(wanted - len(self.running(name))):
                self.people.start(name, **({"allowed_private_hosts": allowed} if name == "web_fetch" else {}))
        for url in self.urls:
            until(partial(self._whole, url), 40, f"everything is ready behind {url}")

    def _whole(self, url: str) -> bool:
        """Whether a gateway knows exactly the processes that run now, all ready."""
        with self.web(url) as web:
            if web.get("/ready").status_code != 200:
                return False
            known = {
                part["name"]: {replica["replica"] for replica in part["replicas"] if replica["state"] == "ready"}
                for part in web.get("/participants").json()["participants"]
            }
        return all(
            {int(name.rsplit("-", 2)[1]) for name in known.get(kind, ())} == {one.pid for one in self.running(kind)}
            for kind in (*self._wanted, "gateway")
        )

    def running(self, name: str) -> list[Participant]:
        return list(self.people.alive(name))

    def pids(self) -> set[int]:
        return {one.pid for one in self.people.started if one.alive}

    def owner(self, raw: bytes) -> Participant:
        """The generator that claimed last in a stream of events."""
        names = [data["replica"] for _, kind, data in map(parsed, blocks(raw)) if kind == "claimed"]
        pid = int(names[-1].rsplit("-", 2)[1])
        return next(one for one in self.people.started if one.pid == pid)

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────

    def http(self, number: int, key: str = ADMIN_KEY, timeout: float = 30.0) -> httpx.AsyncClient:
        """A client of one gateway. timeout: in seconds of a free machine."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(
            base_url=self.urls[number],
            headers=bearer(key),
            timeout=PATIENCE * timeout,
            trust_env=False,
            verify=False,
            limits=limits,
        )

    def web(self, url: str | None = None, key: str = ADMIN_KEY, timeout: float = 15.0) -> httpx.Client:
        """The same, blocking; of the first gateway unless a URL is given."""
        return httpx.Client(
            base_url=url or self.urls[0], headers=bearer(key), timeout=PATIENCE * timeout, trust_env=False, verify=False
        )

    def key_of(self, user_id: str) -> str:
        """A new API key of a user without rights."""
        with self.web() as web:
            made = web.post("/keys", json={"name": user_id, "user_id": user_id})
        assert made.status_code == 201, made.text
        key: str = made.json()["key"]
        return key


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def http_stack(folder: Path, rules: Rules = (), *, gateways: int = 2, generators: int = 2) -> Iterator[HttpStack]:
    """A running stack; everything in it is ended, by its process id, with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    model = ModelProcess(folder / "model.log")
    try:
        model.start()
        model.play(rules)
        with (
            unsynced(folder / "redis") as redis,
            Participants(redis.url, model.url, folder / "people", heartbeat=HEARTBEAT) as people,
        ):
            stack = HttpStack(redis, model, people, gateways)
            stack.start(generators)
            yield stack
    finally:
        model.close()
