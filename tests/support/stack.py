"""A stack for tests: participants inside the test or as processes, the scripted model, and a client of the bus.

`stage` serves inside the test: quick, for everything that needs no crash. `Participants` starts processes, to be
killed, stopped and continued by their id. `Client` asks as the gateway does and looks at what came of it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from support.apps import ProbeSettings, probe
from support.forked import ROOT, Forked
from support.services import announced, running
from support.waiting import eventually

from services.generator.service import build
from services.generator.settings import GeneratorSettings
from shared.bus import Bus
from shared.bus.keys import cancel_key, journal_key
from shared.contracts import QUERY_CANCEL, QUERY_RECEIVED, QueryCancel, QueryReceived, Subject
from shared.envelope import Envelope
from shared.participant.service import Service
from shared.records import lanes
from shared.records.event_log import MessageRef, messages_of
from shared.records.journal import TERMINAL, EntryType, JournalEntry, read_journal
from shared.records.sessions import Sessions, Turn
from shared.testing.model_server import Rules, ScriptedModelServer

MODULES = {
    "generator": "services.generator",
    "respondent-b": "services.generator",
    "gateway": "services.gateway",
    "web_search": "services.web_search",
    "web_fetch": "services.web_fetch",
    "critic": "services.critic",
    "reward": "services.reward",
    "memory": "services.memory",
    "mcp": "services.mcp",
    "knowledge": "services.knowledge",
}
_names = itertools.count(1)
_UNLISTED = ("memory.", "knowledge.", "session.", "query.forget", "dead.letter")


def order(entry_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split("-"))


def shown(entries: Sequence[JournalEntry], kind: EntryType = EntryType.ANSWER) -> str:
    """The text as a client shows it: without what `restarted` voids, and without answer text before a tool call."""
    pieces: list[tuple[str, str]] = []
    for entry in entries:
        if entry.type is kind:
            pieces.append((entry.id, entry.value()["text"]))
        elif entry.type is EntryType.RESTARTED:
            valid = order(entry.value()["discard_after"])
            pieces = [piece for piece in pieces if order(piece[0]) <= valid]
        elif kind is EntryType.ANSWER and entry.type is EntryType.MESSAGE and entry.value()["tool_calls"]:
            pieces = []
    return "".join(text for _, text in pieces)


class Client:
    """Asks and follows over the bus alone. `user` owns its sessions."""

    def __init__(self, bus: Bus, user: str = "u1") -> None:
        self.bus = bus
        self.user = user
        self.sessions = Sessions(bus)

    async def ask(
        self,
        query: str,
        session: str | None = None,
        *,
        respondents: Sequence[str] = ("A",),
        deadline: float = 60.0,
        **fields: Any,
    ) -> str:
        """The id of the accepted query. deadline: seconds from now."""
        session = session or f"s{next(_names)}"
        stored = fields.get("messages") is None
        if stored:
            await self.sessions.open(session, self.user, query)
        payload = QueryReceived(session_id=session, query=query, user_id=self.user, **fields)
        once = uuid.uuid4().hex
        accepted = await lanes.accept(
            self.bus,
            QUERY_RECEIVED.of(payload, once=once, session_id=session, user_id=self.user),
            {"user_id": self.user, "session_id": session, "query": query, "once": once},
            left=deadline,
            seconds=3_600,
            session_id=session if stored else None,
            respondents=respondents,
            limit=1_000,
        )
        assert accepted is not None
        return accepted.query_id

    async def cancel(self, query_id: str) -> None:
        await self.bus.link.call("SET", cancel_key(query_id), 1, "EX", 60)
        await self.bus.publish(QUERY_CANCEL.of(QueryCancel(query_id=query_id), correlation_id=query_id))

    async def journal(self, query_id: str, respondent: str = "A") -> list[JournalEntry]:
        return await read_journal(self.bus, journal_key(query_id, respondent))

    async def types(self, query_id: str, respondent: str = "A") -> list[str]:
        return [entry.type.value for entry in await self.journal(query_id, respondent)]

    async def seen(self, query_id: str, kind: EntryType, timeout: float = 10.0, **data: Any) -> JournalEntry:
        """The first entry of a type (and with such data) in the query's journal, as soon as it is there."""

        async def look() -> JournalEntry | None:
            for entry in await self.journal(query_id):
                if entry.type is kind and data.items() <= entry.value().items():
                    return entry
            return None

        found = await eventually(look, timeout, f"{kind.value} {data} in the journal of {query_id}")
        assert isinstance(found, JournalEntry)
        return found

    async def ended(self, query_id: str, timeout: float = 15.0, respondent: str = "A") -> JournalEntry:
        """The entry that ends the journal, as soon as it is there."""

        async def look() -> JournalEntry | None:
            entries = await self.journal(query_id, respondent)
            return next((entry for entry in entries if entry.type in TERMINAL), None)

        found = await eventually(look, timeout, f"the end of {query_id}")
        assert isinstance(found, JournalEntry)
        return found

    async def answer(self, query_id: str, timeout: float = 15.0, respondent: str = "A") -> str:
        """The final answer; fails when the query did not complete."""
        entry = await self.ended(query_id, timeout, respondent)
        assert entry.type is EntryType.COMPLETED, entry.data
        text: str = entry.value()["answer"]
        return text

    async def turns(self, session: str, respondent: str = "A") -> list[Turn]:
        return await self.sessions.turns(session, respondent)

    async def published(self, subject: Subject[Any], query_id: str | None = None) -> list[Any]:
        """The payloads of a subject, oldest first; those of one query when it is given."""
        found = []
        for entry_id, fields in await self.bus.range(subject.stream):
            envelope = Envelope.parse(subject.name, entry_id, fields)
            if query_id in (None, envelope.correlation_id):
                found.append(subject.decode(envelope))
        return found

    async def logged(self, query_id: str) -> list[str]:
        """Return the subjects of the query's event log. Fails unless it has exactly the query's messages on the bus, in
        the order of their ids."""
        before = await self._correlated(query_id)
        log = await messages_of(self.bus, query_id)
        after = await self._correlated(query_id)
        assert len(set(log)) == len(log)
        assert [order(message.entry_id) for message in log] == sorted(order(message.entry_id) for message in log)
        # The janitor removes entries, and participants add some, at any moment.
        assert before & after <= set(log) <= before | after
        return [message.subject for message in log]

    async def _correlated(self, query_id: str) -> set[MessageRef]:
        found = set()
        for subject in await self.bus.subjects():
            for entry_id, fields in await self.bus.range(subject.stream):
                own = Envelope.parse(subject.name, entry_id, fields).correlation_id == query_id
                if (own or (subject.name, entry_id) == ("query.received", query_id)) and not subject.name.startswith(
                    _UNLISTED
                ):
                    found.add(MessageRef(subject.name, entry_id))
        return found

    async def idle(self, group: str = "generator", timeout: float = 10.0) -> None:
        """Returns when the group has finished everything on its stream."""

        async def done() -> bool:
            return await self.bus.backlog(QUERY_RECEIVED.stream, group) == 0

        await eventually(done, timeout, f"nothing left for {group}")

    async def effects(self) -> dict[str, int]:
        """How often the probe ran, by its text."""
        raw = await self.bus.link.call("HGETALL", "effects")
        return {name.decode(): int(count) for name, count in zip(raw[::2], raw[1::2], strict=True)}


# ── inside the test ──────────────────────────────────────────────────────────────────────────────────────────────


class Stage(Client):
    """Generators of this process with the model server that they ask."""

    def __init__(self, bus: Bus, server: ScriptedModelServer, settings: GeneratorSettings) -> None:
        super().__init__(bus)
        self.server = server
        self.settings = settings


def respondent(settings: GeneratorSettings) -> Service[GeneratorSettings]:
    return Service("generator" if settings.respondent_id == "A" else "respondent-b", GeneratorSettings, build)


@contextlib.asynccontextmanager
async def stage(
    url: str, rules: Rules = (), *, replicas: int = 1, probes: int = 0, heartbeat: float = 1.0, **values: Any
) -> AsyncIterator[Stage]:
    """Serves until the block ends. `values` are settings of the generator.

    heartbeat: no busy machine misses three of them, so that no tool and no respondent seems to be away.
    """
    async with ScriptedModelServer(rules) as server, Bus(url, "test/client") as bus, AsyncExitStack() as stack:
        common: dict[str, Any] = {"redis_url": url, "heartbeat": heartbeat, "drain": 0.2}
        addresses = {"openai": f"{server.url}/plain/v1", "google_genai": server.url}
        backend = {"ollama_host": server.url, "base_url": addresses.get(values.get("backend", "ollama"))}
        settings = GeneratorSettings(**{**common, **backend, "yield_rest": 0, **values})
        for _ in range(probes):
            await stack.enter_async_context(running(probe, ProbeSettings(**common)))
        if probes:
            await announced(url, "probe", probes)
        for _ in range(replicas):
            await stack.enter_async_context(running(respondent(settings), settings))
        if replicas:
            await announced(url, respondent(settings).participant, replicas)
        yield Stage(bus, server, settings)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────


class Participant:
    """One process. `name` is the participant's; `tree` is where its code lies."""

    def __init__(self, name: str, environment: dict[str, str], log: Path, tree: Path = ROOT) -> None:
        self.name = name
        self._log = log
        module, *arguments = [MODULES[name]] if name in MODULES else ["support.apps", name]
        self.process: Forked | subprocess.Popen[bytes]
        if tree == ROOT:
            self.process = Forked(module, *arguments, environment=environment, log=log)
            return
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=tree,
                env={**environment, "PYTHONPATH": os.pathsep.join([str(tree / "tests"), str(tree)])},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends it as a crash would."""
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        # The process creates the file.
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""


class Participants:
    """Processes of one stack; those that still run are killed at the end.

    `values` are settings of all of them (`heartbeat=0.3`).
    """

    def __init__(self, url: str, model_url: str, folder: Path, **values: Any) -> None:
        self.url = url
        self.folder = folder
        self.started: list[Participant] = []
        settings = {
            "redis_url": url,
            "heartbeat": 0.3,
            "drain": 0.5,
            "log_format": "json",
            "data_dir": folder,
            **values,
        }
        self._environment = {
            **os.environ,
            **{f"LOCAL2_{name.upper()}": str(value) for name, value in {**settings, **values}.items()},
            "OLLAMA_HOST": model_url,
            "LOCAL2_WEB_SEARCH_PROVIDER": "mock",
        }

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_exc: object) -> None:
        for participant in self.started:
            if participant.alive:
                participant.kill()

    def start(self, name: str, *, tree: Path = ROOT, **values: Any) -> Participant:
        """A new replica, of the code in `tree`. `values` are settings of this one."""
        number = sum(one.name == name for one in self.started)
        environment = dict(self._environment)
        if name == "respondent-b":
            environment["LOCAL2_RESPONDENT_ID"] = "B"
        environment.update({f"LOCAL2_{key.upper()}": str(value) for key, value in values.items()})
        participant = Participant(name, environment, self.folder / f"{name}-{number}.log", tree)
        self.started.append(participant)
        return participant

    async def ready(self, name: str, replicas: int = 1, timeout: float = 20.0) -> None:
        await announced(self.url, name, replicas, timeout)

    async def owner(self, entry: JournalEntry) -> Participant:
        """The process that wrote a `claimed` entry."""
        pid = int(entry.value()["replica"].rsplit("-", 2)[1])
        return next(one for one in self.started if one.pid == pid)

    def alive(self, name: str) -> Iterator[Participant]:
        return (one for one in self.started if one.name == name and one.alive)
