"""Experiments: another configuration on trial with respondent B, until the judge's verdicts say whether it is better.

What is meant to happen is written to the store before it happens on the bus, and marked as done after: a reward that
dies in between finishes it when it is back. Every step may be done twice.

    starting → running → stopping → stopped
                       → promoting → promoted → reverting → reverted
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

import orjson

from services.reward.sequential import LEVEL, trial
from services.reward.store import Store, config_name
from shared.bus import Bus, Command, ReplyError
from shared.bus.keys import schema_key, settings_key
from shared.contracts import SETTINGS_UPDATE, SettingsUpdate, configuration
from shared.errors import ToolError, TransientError
from shared.llm.intents import Intent
from shared.participant.complaint import complaint
from shared.participant.registry import ReplicaInfo
from shared.participant.settings import Described, stored_values
from shared.telemetry.logging import get_logger

log = get_logger()
R = TypeVar("R")
Row = dict[str, Any]

A, B = "generator", "respondent-b"
# What can be tried, by the names that people use, and the settings behind them: what tells configurations apart.
TRIED = {"model": "model", "prompt": "system_prompt", "temperature": "temperature"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ACTIVE = ("starting", "running", "stopping", "promoting")
_PENDING = ("starting", "stopping", "promoting", "reverting")
_ONE_CONVERSATION = 20
_FEW = 5


class Refused(Exception):
    """Not now: the state of things stands in the way. The text says what to do."""


class WithStore(Protocol):
    def __call__(self, work: Callable[[Store], R], /) -> Awaitable[R]: ...


class Experiments:
    """replicas: the live replicas of all participants."""

    def __init__(self, bus: Bus, with_store: WithStore, replicas: Callable[[], Awaitable[list[ReplicaInfo]]]) -> None:
        self._bus = bus
        self._with_store = with_store
        self._replicas = replicas
        # one step at a time: what is asked for and what is caught up with must not meet
        self._lock = asyncio.Lock()

    # ── what is asked for ────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, name: str, wanted: Mapping[str, Any]) -> Row:
        """B is configured as A is now, but for what is wanted (`model`, `prompt`, `temperature`).

        Raises ToolError for a name or a setting that cannot be used, Refused when another experiment runs.
        """
        if not _NAME.fullmatch(name):
            raise ToolError("name: up to 64 letters, digits, dots, dashes and underscores are expected")
        if unknown := sorted(set(wanted) - TRIED.keys()):
            raise ToolError(f"b: {unknown[0][:100]} cannot be tried; an experiment sets: {', '.join(TRIED)}")
        if not wanted:
            raise ToolError(f"b: name at least one of {', '.join(TRIED)} that is to be different")
        async with self._lock:
            a, b = await self._settings_of(A), await self._settings_of(B)
            values = {TRIED[said]: value for said, value in wanted.items()}
            if wrong := complaint(b.described.schema, values):
                raise ToolError(f"b: {wrong}")
            trying = {**a.tried(), **values}
            row = {
                "name": name,
                "state": "starting",
                "config_a": _config(a.tried()),
                "config_b": _config(trying),
                "settings_a": _dump(a.tried()),
                "settings_b": _dump(trying),
                "before_a": None,
                "before_b": _dump(b.before()),
                "started": self._bus.now_ms(),
                "ended": None,
            }
            if row["config_a"] == row["config_b"]:
                raise ToolError("b: that is how the generator is configured already; there is nothing to compare")
            if (reason := await self._with_store(lambda store: store.begin_experiment(row, ACTIVE))) is not None:
                raise Refused(reason)
            await self._carry_on(await self._found(name))
        return await self.show(name)

    async def stop(self, name: str) -> Row:
        """Ends it without a change; B has its former settings again. Raises Refused unless it runs."""
        return await self._ask(name, "running", "stopping", ended=self._bus.now_ms())

    async def promote(self, name: str, *, force: bool = False) -> Row:
        """B's configuration becomes A's, and B has its former settings again.

        Raises Refused unless it runs and B is better (or it is forced), and when a run-time setting cannot do it.
        """
        shown = await self.show(name)
        if shown["state"] == "running" and shown["result"]["decision"] != "better" and not force:
            raise Refused(
                f"the verdicts do not say that B is better ({shown['result']['decision']}): wait for more, stop the "
                "experiment, or force it"
            )
        self._refuse_other_server(await self._replicas())
        a = await self._settings_of(A)
        return await self._ask(name, "running", "promoting", before_a=_dump(a.before()), ended=self._bus.now_ms())

    async def revert(self, name: str) -> Row:
        """A has the settings again that it had before the promotion. Raises Refused unless it was promoted last."""
        latest = await self._with_store(lambda store: store.experiments("promoted"))
        if latest and latest[0]["name"] != name and any(row["name"] == name for row in latest):
            raise Refused(f"{latest[0]['name']} was promoted after it: revert that one first")
        return await self._ask(name, "promoted", "reverting")

    async def _ask(self, name: str, state: str, to: str, **fields: Any) -> Row:
        async with self._lock:
            await self._found(name)
            if not await self._with_store(lambda store: store.move_experiment(name, state, to, **fields)):
                now = (await self._found(name))["state"]
                raise Refused(f"{name} is {now}; only one that is {state} can be {_PARTICIPLES[to]}")
            await self._carry_on(await self._found(name))
        return await self.show(name)

    # ── what is done ─────────────────────────────────────────────────────────────────────────────────────────────

    async def catch_up(self) -> None:
        """Finishes what was begun. Raises TransientError when the store is away."""
        async with self._lock:
            for state in _PENDING:
                for row in await self._with_store(lambda store, state=state: store.experiments(state)):  # type: ignore[misc]
                    await self._carry_on(row)

    async def _carry_on(self, row: Row) -> None:
        try:
            await self._carry_out(row)
        except (TransientError, ReplyError, Refused) as exc:
            # it is written down: it happens as soon as it can
            log.warning("experiment.waits", name=row["name"], reason=str(exc))

    async def _carry_out(self, row: Row) -> None:
        name, state = row["name"], row["state"]
        trying = orjson.loads(row["settings_b"])
        match state:
            case "starting":
                await self._apply(B, trying)
            case "stopping":
                await self._restore(B, row["before_b"])
            case "promoting":
                await self._apply(A, trying)
                await self._restore(B, row["before_b"])
            case "reverting":
                await self._restore(A, row["before_a"])
            case _:
                return
        await self._with_store(lambda store: store.move_experiment(name, state, _DONE[state]))
        log.info(f"experiment.{_DONE[state]}", name=name)

    async def _apply(self, participant: str, values: Mapping[str, Any]) -> None:
        stored = [part for field, value in values.items() for part in (field, orjson.dumps(value))]
        await self._tell(participant, [("HSET", settings_key(participant), *stored)], values)

    async def _restore(self, participant: str, before: str) -> None:
        """What was changed at run time before is so again; the rest is what the participant started with."""
        was = orjson.loads(before)
        described = await self._settings_of(participant)
        unset = {name: described.described.defaults.get(name) for name in was["unset"]}
        commands: list[Command] = []
        if was["changed"]:
            pairs = [part for field, value in was["changed"].items() for part in (field, orjson.dumps(value))]
            commands.append(("HSET", settings_key(participant), *pairs))
        if unset:
            commands.append(("HDEL", settings_key(participant), *unset))
        await self._tell(participant, commands, {**was["changed"], **unset})

    async def _tell(self, participant: str, commands: Sequence[Command], values: Mapping[str, Any]) -> None:
        update = SettingsUpdate(participant=participant, values=dict(values))
        await self._bus.link.pipe([*commands, self._bus.publishing(SETTINGS_UPDATE.of(update))])

    # ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────

    async def all(self) -> list[Row]:
        """The latest first, without their figures."""
        rows = await self._with_store(lambda store: store.experiments())
        return [_summary(row) for row in rows]

    async def show(self, name: str) -> Row:
        """An experiment with what the verdicts say so far. Raises LookupError when there is none of that name."""
        row = await self._found(name)

        def read(store: Store) -> tuple[list[Row], Row, Row | None]:
            since, until = row["started"], row["ended"]
            promoted = store.vote_counts(row["config_b"], until, None) if row["before_a"] and until else None
            return store.trial_rows(row, until), store.vote_counts(row["config_a"], since, until), promoted

        verdicts, votes, promoted = await self._with_store(read)
        return {
            **_summary(row),
            **await asyncio.to_thread(_results, verdicts),
            "votes": {"a": votes, "promoted": promoted},
            "warnings": await self._warnings(row, verdicts),
        }

    async def _warnings(self, row: Row, verdicts: Sequence[Row]) -> list[str]:
        found = []
        if row["state"] == "running":
            found += _of_replicas(await self._replicas())
            for participant, config in ((A, "config_a"), (B, "config_b")):
                if _config((await self._settings_of(participant)).tried()) != row[config]:
                    found.append(
                        f"the settings of {participant} were changed since the start: what it answers now does not "
                        "count; stop the experiment and start another one"
                    )
        counted = [verdict for verdict in verdicts if verdict["counts"]]
        if left_out := len(verdicts) - len(counted):
            found.append(f"{left_out} verdicts do not count: A or B was configured in another way when it answered")
        conversations = len({verdict["session_id"] for verdict in counted})
        if len(counted) >= _ONE_CONVERSATION and conversations < _FEW:
            found.append(
                f"all verdicts come from {conversations} conversations, and each counts once: ask about more matters"
            )
        return found

    async def _found(self, name: str) -> Row:
        row = await self._with_store(lambda store: store.experiment(name))
        if row is None:
            raise LookupError(name)
        return row

    async def _settings_of(self, participant: str) -> _Settings:
        keys = [("GET", schema_key(participant)), ("HGETALL", settings_key(participant))]
        raw, changed = await self._bus.link.pipe(keys)
        described = Described.parse(participant, raw)
        if described is None:
            how = "; `local2 run --respondent-b` starts it, in containers the profile respondent-b" * (participant == B)
            raise Refused(f"no {participant} was ever here{how}")
        return _Settings(described, stored_values(participant, changed))

    @staticmethod
    def _refuse_other_server(replicas: Sequence[ReplicaInfo]) -> None:
        """What B's model runs on is no run-time setting: A may not be able to reach it."""
        facts = {info.participant: info.facts for info in replicas if info.participant in (A, B)}
        servers = {name: (told.get("backend"), told.get("server")) for name, told in facts.items()}
        if len(servers) < 2 or None in servers[B] or None in servers[A] or servers[A] == servers[B]:
            return
        (backend, server), (own_backend, own_server) = servers[B], servers[A]
        variable = "LOCAL2_GENERATOR_OLLAMA_HOST" if backend == "ollama" else "LOCAL2_GENERATOR_BASE_URL"
        raise Refused(
            f"{B} asks {backend} at {server}, the generator {own_backend} at {own_server}, which cannot be changed "
            f"while it runs: set LOCAL2_GENERATOR_BACKEND={backend} and {variable}={server} for the generator, start "
            "it again, and promote then"
        )


class _Settings:
    """The run-time settings of a participant as they are now."""

    def __init__(self, described: Described, changed: Mapping[str, Any]) -> None:
        self.described = described
        self._changed = changed

    def tried(self) -> Row:
        """The settings that make a configuration."""
        defaults = self.described.defaults
        return {name: self._changed.get(name, defaults.get(name)) for name in TRIED.values()}

    def before(self) -> Row:
        """How they can be put back: what was changed at run time, and what was not."""
        names = TRIED.values()
        return {
            "changed": {name: self._changed[name] for name in names if name in self._changed},
            "unset": [name for name in names if name not in self._changed],
        }


_DONE = {"starting": "running", "stopping": "stopped", "promoting": "promoted", "reverting": "reverted"}
_PARTICIPLES = {"stopping": "stopped", "promoting": "promoted", "reverting": "reverted"}


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()


def _config(values: Mapping[str, Any]) -> str:
    """The configuration that answers with these settings name."""
    temperature = values["temperature"]
    own = {} if temperature is None else {"temperature": float(temperature)}
    return config_name(configuration(values["model"], own, values["system_prompt"]))


def _summary(row: Mapping[str, Any]) -> Row:
    a, b = (
        {said: orjson.loads(row[side])[name] for said, name in TRIED.items()} for side in ("settings_a", "settings_b")
    )
    changed = [said for said in TRIED if a[said] != b[said]]
    return {"name": row["name"], "state": row["state"], "started": row["started"], "ended": row["ended"],
            "a": a, "b": b, "changed": changed}  # fmt: skip


def _results(verdicts: Sequence[Mapping[str, Any]]) -> Row:
    """The trial over all, and of each kind of question with its share of the chance to be wrong."""
    counted = [verdict for verdict in verdicts if verdict["counts"]]
    kinds = sorted({str(verdict["intent"]) for verdict in counted if verdict["intent"]})
    alpha = (1 - LEVEL) / len(Intent)
    return {
        "result": asdict(trial((verdict["session_id"], verdict["winner"]) for verdict in counted)),
        "intents": {
            kind: asdict(trial(((v["session_id"], v["winner"]) for v in counted if v["intent"] == kind), alpha))
            for kind in kinds
        },
    }


def _of_replicas(replicas: Sequence[ReplicaInfo]) -> list[str]:
    """What stands in the way of new verdicts."""
    there = {info.participant: info.facts for info in replicas}
    found = [f"no {name} is running: nothing is compared" for name in (B, "critic") if name not in there]
    reasons = {name: there[name].get("backend_reason") for name in (B, "critic") if name in there}
    return found + [f"{name} cannot work: {reason}" for name, reason in reasons.items() if reason]
