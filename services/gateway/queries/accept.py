"""Accepting a query: limits, its session, its place in the session's queue, the bus. An accepted query is not lost."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from pydantic import BaseModel

from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import Principal, digest
from services.gateway.http.schemas import ChatSettings
from services.gateway.queries.deletion import STEP
from services.gateway.queries.records import QueryRecord, load, open_session, opened
from services.gateway.queries.versions import branch_point, files_of_query, supersede
from shared.bus.keys import once_key
from shared.contracts import QUERY_RECEIVED, AcceptedQuery, QueryReceived, persona_key
from shared.records import lanes
from shared.records.sessions import title_of
from shared.telemetry import tracing

ONCE = (
    "A request that is repeated with the same key asks once; another request with it is refused (409), and so is a "
    "repeat after the query was deleted, with its session or alone (410)"
)
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
# The least seconds for which a query's record and key are stored: a client repeats a request within this time.
_ONCE_AT_LEAST = 60
# Fields of every canonical request. Another field is in it only if it is set: then a request without the field stays
# the same when an update adds the field.
_ALWAYS_CANONICAL = frozenset({
    "query", "session_id", "mode", "personas", "rounds", "messages", "options", "tools", "deadline_seconds",
})  # fmt: skip
# A repeated request may get another model or another session, and `given` has a rule of its own.
_NOT_CANONICAL = frozenset({"model", "given", "kept", "about"})
_NAMESPACE = uuid.UUID("6f3c2f0e-9d0a-4f5e-8a53-6c6f63616c32")


class Ask(AcceptedQuery):
    """A validated query. messages: the client's own history; the query is then in no lane, and nothing is stored.

    given: the part of the request that the route stores beside the query.
    chat: the client's name for the conversation.
    kept: the session that stores the turn although the client has the history; empty: a new session.
    about: the session that a chore belongs to, and is deleted with.
    instead_of: the query of the session that this one replaces.
    time_zone: None: the zone of the user's key, else the deployment's.
    """

    session_id: str | None = None
    deadline_seconds: float | None = None
    given: str = ""
    chat: str | None = None
    kept: str | None = None
    about: str | None = None
    instead_of: str | None = None

    @property
    def whole(self) -> bool:
        """Whether the answer is shown only when it is complete, because its form is validated before."""
        return self.answer_schema is not None or (self.client_tools is not None and self.client_tools.choice != "auto")

    def canonical(self) -> bytes:
        """Return the JSON that identifies a repeated request, without the model: a repeat may have another one."""
        said = {
            name: value
            for name, value in self
            if name not in _NOT_CANONICAL and (name in _ALWAYS_CANONICAL or value not in (None, False))
        }
        said["messages"] = said["messages"] or []
        if self.attachments:
            # Other facts about a file may change between a request and its repeat.
            said["attachments"] = [{k: one[k] for k in ("id", "name") if k in one} for one in self.attachments]
        if self.given:
            # The answer to another kind of request has another form.
            said["given"] = self.given
        return orjson.dumps(said, default=BaseModel.model_dump, option=orjson.OPT_SORT_KEYS)

    def digest(self) -> str:
        """Return the digest of the canonical request."""
        return digest(self.canonical().decode())


@dataclass(frozen=True, slots=True)
class Origin:
    """The user of a request, and its headers. Raises ApiError 400 for a malformed Idempotency-Key."""

    principal: Principal
    idempotency_key: str | None = None
    traceparent: str | None = None

    def __post_init__(self) -> None:
        if self.idempotency_key is not None and not _KEY.fullmatch(self.idempotency_key):
            raise ApiError(400, "bad_idempotency_key", "Idempotency-Key: 1 to 255 printable characters without spaces")

    @property
    def once(self) -> str:
        """The once-key of a request with an Idempotency-Key."""
        return digest(f"{self.principal.user_id}\n{self.idempotency_key}")

    @property
    def trace(self) -> str:
        """The span of this request if tracing is on; else the client's trace context, or a new one."""
        if here := tracing.current():
            return here
        if self.traceparent is not None and tracing.well_formed(self.traceparent):
            return self.traceparent
        return f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"


async def accept(gateway: Gateway, origin: Origin, ask: Ask) -> QueryRecord:
    """Return the accepted query.

    Raises ApiError (404, 409, 410, 429), BusUnavailable, and for a large query TooMuchUnderWay and BusNearlyFull.
    """
    record = await _once(gateway, origin, ask)
    if ask.instead_of is not None:
        # After the acceptance: a refused query must not remove anything.
        async with gateway.reachable(extra=STEP):
            await supersede(gateway, record, ask.instead_of)
    return record


async def _once(gateway: Gateway, origin: Origin, ask: Ask) -> QueryRecord:
    async with gateway.reachable():
        if origin.idempotency_key is None:
            return await _admitted(gateway, origin, ask, os.urandom(16).hex(), str(uuid.uuid4()))
        if (before := await _asked_before(gateway, origin, ask)) is not None:
            return before
        # A repeat after a crash must get the same session.
        once = origin.once
        return await _admitted(gateway, origin, ask, once, str(uuid.uuid5(_NAMESPACE, once)))


async def asked_before(gateway: Gateway, origin: Origin, ask: Ask) -> QueryRecord | None:
    """Return the query that was accepted for the same Idempotency-Key. Raises ApiError (409, 410), BusUnavailable."""
    async with gateway.reachable():
        return await _asked_before(gateway, origin, ask)


async def _asked_before(gateway: Gateway, origin: Origin, ask: Ask) -> QueryRecord | None:
    known = await gateway.bus.link.call("GET", once_key(QUERY_RECEIVED.stream, origin.once))
    if known is None:
        return None
    return _same(await load(gateway, known.decode()), ask.digest())


def with_settings(ask: Ask, settings: ChatSettings) -> Ask:
    """Return the query with the settings of its session, except for fields that it sets itself."""
    options = {**({} if settings.temperature is None else {"temperature": settings.temperature}), **(ask.options or {})}
    return ask.model_copy(
        update={
            "model": ask.model or settings.model,
            "options": options or None,
            "system_prompt": settings.system_prompt if ask.system_prompt is None else ask.system_prompt,
        }
    )


def _same(earlier: QueryRecord | None, asked: str) -> QueryRecord:
    """Return the earlier query of an Idempotency-Key.

    earlier: None if that query was deleted. asked: the digest of the present request. Raises ApiError (409, 410).
    """
    if earlier is None:
        raise ApiError(
            410, "query_deleted", "the query of this Idempotency-Key was deleted; ask again with another key"
        )
    if earlier.asked != asked:
        raise ApiError(409, "idempotency_conflict", "this Idempotency-Key was used for another request")
    return earlier


async def _check_personas(gateway: Gateway, personas: Sequence[str]) -> None:
    """Raise ApiError 400 for a persona that no live generator has. Without a live generator accept any name."""
    live = await gateway.context.registry.live("generator")
    known = {persona for info in live for persona in info.facts.get("personas", ())}
    keys = {persona_key(persona) for persona in known}
    unknown = sorted({asked for asked in personas if persona_key(asked) not in keys}) if known else []
    if unknown:
        raise ApiError(
            400, "unknown_persona", f"unknown personas: {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )


async def _admitted(gateway: Gateway, origin: Origin, ask: Ask, once: str, fresh_session: str) -> QueryRecord:
    """Accept a query if Redis has room for its size. Raises as `_accept`, and TooMuchUnderWay and BusNearlyFull."""
    canonical, user, large = ask.canonical(), origin.principal.user_id, gateway.large_queries
    await large.admit(user, once, len(canonical))
    try:
        record = await _accept(gateway, origin, ask, digest(canonical.decode()), once, fresh_session)
    except BaseException:
        large.ended(user, once)
        raise
    large.rename(user, once, record.query_id)
    return record


async def _accept(gateway: Gateway, origin: Origin, ask: Ask, asked: str, once: str, fresh_session: str) -> QueryRecord:
    """Accept a query. asked: the digest of the request without the settings of its chat."""
    settings, user = gateway.settings, origin.principal.user_id
    registry = gateway.context.registry
    if await gateway.backlog(settings.max_backlog) > settings.max_backlog:
        gateway.metrics.refused.labels("backlog").inc()
        raise ApiError(429, "overloaded", "too many queries are waiting; try again shortly", {"Retry-After": "5"})
    if ask.personas:
        await _check_personas(gateway, ask.personas)
    shadows = await registry.live("respondent-b")
    session_id, random, after = fresh_session, False, ""
    title = title_of(ask.query, ask.attachments)
    if ask.kept:
        session_id = ask.kept
    elif ask.session_id is not None:
        session_id, known = await opened(gateway, origin.principal, ask.session_id, title)
        if ask.instead_of is not None:
            after = await branch_point(gateway, session_id, user, ask.instead_of)
            if ask.attachments is None and known is not None:
                files = await files_of_query(gateway, known, ask.instead_of)
                ask = ask.model_copy(update={"attachments": files})
        elif known is not None:
            after = known.tip
        if known is not None:
            ask = with_settings(ask, ChatSettings.of(known.settings))
            if known.tip:
                # From this query on the newest turn is shown.
                await gateway.sessions.change(known, tip="")
    elif ask.messages is None or ask.kept is not None:
        random = origin.idempotency_key is None
        if not random:
            # The name is derived from the user and the key: a client of another user may have taken it.
            session_id = await open_session(gateway, origin.principal, session_id, title)
    seconds = min(ask.deadline_seconds or settings.deadline_seconds, settings.deadline_seconds)
    record = QueryRecord("", user, session_id, ask.query, ask.mode, asked, ask.given, after)
    fields: dict[str, Any] = {
        **{name: getattr(ask, name) for name in AcceptedQuery.model_fields},
        "attachments": ask.attachments or None,
        "time_zone": ask.time_zone or origin.principal.time_zone or settings.zone,
    }
    payload = QueryReceived(
        **fields,
        session_id=session_id,
        user_id=user,
        kept=ask.kept is not None,
        after=after or None,
        first=random and ask.messages is None,
    )
    headers = {"session_id": session_id, "user_id": user, "traceparent": origin.trace}
    # A client's key outlives its deleted query: a repeat is refused. Every other key is deleted with the record.
    kept_key = origin.idempotency_key is not None and ask.about is None
    found = await lanes.accept(
        gateway.bus,
        QUERY_RECEIVED.of(payload, once=once, **headers),
        record.stored() | ({} if kept_key else {"once": once}),
        left=seconds,
        seconds=int(seconds) + max(settings.retention, _ONCE_AT_LEAST),
        session_id=session_id if ask.messages is None or ask.kept is not None else ask.about,
        respondents=[] if ask.messages is not None else ["A", "B"] if shadows else ["A"],
        limit=settings.max_session_backlog,
        # No other user can have a session of a random name, so it is made in the same write.
        also=gateway.sessions.making(session_id, user, title) if random and ask.messages is None else (),
    )
    if found is None:
        gateway.metrics.refused.labels("session").inc()
        raise ApiError(429, "session_busy", "too many queries of this session are waiting", {"Retry-After": "2"})
    tracing.annotate({"local2.query.id": found.query_id, "gen_ai.conversation.id": session_id})
    if found.earlier is not None:
        # The same key came twice at the same moment, or its query was deleted after the first check.
        return _same(QueryRecord.parse(found.query_id, found.earlier) if found.earlier else None, asked)
    gateway.accepted(ask.mode, found.unfinished)
    return replace(record, query_id=found.query_id, accepted=found.accepted, deadline=found.deadline)
