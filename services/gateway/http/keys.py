"""API keys: only their SHA-256 is stored, and each has an owner."""

from __future__ import annotations

import asyncio
import re
import secrets
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Literal, Protocol

import orjson

from services.gateway.http.admin_key import admin_key, new_key
from services.gateway.settings import GatewaySettings
from shared.bus import Bus, Script
from shared.bus.keys import API_KEYS, link_key
from shared.envelope import now_ms
from shared.telemetry.logging import get_logger

log = get_logger()

Role = Literal["admin", "user"]
ADMIN = "admin"
# How long a link opens the console, and how long the key works that a browser gets for it.
LINK_SECONDS = 60
LINK_KEY_SECONDS = 7 * 86_400
_NAME = re.compile(r"[A-Za-z0-9._@+-]{1,64}")
_REPLACE = Script.read(Path(__file__).parent / "replace_field.lua")
# A revoked key works at most this long on another replica.
_CACHE_SECONDS = 2.0
_CACHE_SIZE = 10_000


@dataclass(frozen=True, slots=True)
class Principal:
    """The user of a request. trusted: the key may name other users. time_zone: IANA name of the key's zone, or an empty
    string."""

    user_id: str
    role: Role
    trusted: bool = False
    time_zone: str = ""

    def named(self, name: str) -> Principal:
        """The person whom a trusted key names. No key of anybody has that user, and no other key's people have it: a
        key's own user has no slash, and what follows the last one is the name or its digest."""
        known = name if _NAME.fullmatch(name) else f"={digest(name)[:40]}"
        return Principal(f"{self.user_id}/{known}", "user", trusted=True, time_zone=self.time_zone)


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key without its secret. Times are in ms since the epoch.

    start: it is an administrator's start key.
    until: when it ends, of a key that a browser was given for a one-time link; 0: never.
    trusted: it may name the person and the chat that a request is of.
    time_zone: IANA name of the zone of its questions that name none; empty: the deployment's.
    """

    id: str
    name: str
    user_id: str
    role: Role
    created: int
    start: bool = False
    until: int = 0
    trusted: bool = False
    time_zone: str = ""

    @property
    def lasting(self) -> bool:
        """Whether it was made by hand: the others belong to an installation and a browser, not to the data."""
        return not self.start and not self.until

    @property
    def principal(self) -> Principal:
        return Principal(self.user_id, self.role, self.trusted, self.time_zone)

    def dump(self) -> bytes:
        # Gateways of earlier versions refuse unknown fields.
        return orjson.dumps({name: value for name, value in asdict(self).items() if name != "time_zone" or value})


# Known fields: gateways of later versions may write others.
_FIELDS = frozenset(field.name for field in fields(KeyRecord))


def digest(key: str) -> str:
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


class Connection(Protocol):
    """The bus, and the time limit round what a request asks of it."""

    @property
    def bus(self) -> Bus: ...

    def reachable(self) -> AbstractAsyncContextManager[None]: ...


class Keys:
    def __init__(self, connection: Connection, settings: GatewaySettings) -> None:
        self._connection = connection
        self._off = settings.auth == "off"
        self._configured = settings.admin_key is not None
        self.made: Path | None = None
        self._admin = ""
        if not self._off:
            found = admin_key(settings)
            self._admin, self.made = digest(found.secret), found.made
        self._cache: dict[str, tuple[float, Principal | None]] = {}

    async def start(self) -> None:
        """Makes the administrator's key known to the other replicas."""
        if self._off:
            return
        link = self._connection.bus.link
        if self._configured:
            # the configured key is the same everywhere: an earlier one must not open any door
            stored = await self.stored()
            stale = [h for h, record in stored if record.start and h != self._admin]
            if stale:
                # what was opened with it neither
                stale += [h for h, record in stored if record.until]
                await link.call("HDEL", API_KEYS, *stale)
        record = KeyRecord(self._admin[:12], "start key", ADMIN, "admin", now_ms(), start=True)
        await link.call("HSETNX", API_KEYS, self._admin, record.dump())

    async def principal(self, key: str) -> Principal | None:
        """Whose key it is; None for an unknown one."""
        if self._off:
            return Principal("local", "admin")
        if not key:
            return None
        hashed = digest(key)
        # known without the bus: a Redis that lost its data must not lock the operator out
        if compare_digest(hashed, self._admin):
            return Principal(ADMIN, "admin")
        now = asyncio.get_running_loop().time()
        until, known = self._cache.get(hashed, (0.0, None))
        if now < until:
            return known
        async with self._connection.reachable():
            raw = await self._connection.bus.link.call("HGET", API_KEYS, hashed)
        record = _record(raw)
        over = record is not None and record.until and record.until <= now_ms()
        found = record.principal if record and not over else None
        if len(self._cache) >= _CACHE_SIZE:
            self._cache.clear()
        self._cache[hashed] = (now + _CACHE_SECONDS, found)
        return found

    async def create(
        self, name: str, user_id: str, role: Role, *, trusted: bool = False, time_zone: str = ""
    ) -> tuple[KeyRecord, str]:
        """Make a key. Return its record and its secret, which is stored nowhere."""
        key = new_key()
        hashed = digest(key)
        record = KeyRecord(hashed[:12], name, user_id, role, now_ms(), trusted=trusted, time_zone=time_zone)
        await self._connection.bus.link.call("HSET", API_KEYS, hashed, record.dump())
        return record, key

    async def link(self, principal: Principal) -> str:
        """A token for which a browser gets a key of that person, once, within LINK_SECONDS."""
        token = secrets.token_urlsafe(32)
        whose = orjson.dumps({"user_id": principal.user_id, "role": principal.role})
        await self._connection.bus.link.call("SET", link_key(digest(token)), whose, "EX", LINK_SECONDS)
        return token

    async def redeem(self, token: str) -> tuple[KeyRecord, str] | None:
        """A key for the token; None for one that was used, is too old or never was."""
        bus = self._connection.bus
        raw = await bus.link.call("GETDEL", link_key(digest(token)))
        if raw is None:
            return None
        whose, now, key = Principal(**orjson.loads(raw)), now_ms(), new_key()
        hashed = digest(key)
        over = [h for h, record in await self.stored() if 0 < record.until <= now]
        record = KeyRecord(hashed[:12], "browser", whose.user_id, whose.role, now, until=now + LINK_KEY_SECONDS * 1000)
        await bus.link.pipe([("HSET", API_KEYS, hashed, record.dump()), *([("HDEL", API_KEYS, *over)] if over else [])])
        return record, key

    async def listed(self) -> list[KeyRecord]:
        return sorted((record for _, record in await self.stored()), key=lambda record: (record.created, record.id))

    async def set_zone(self, key_id: str, time_zone: str) -> KeyRecord | None:
        """Set the time zone of a key; empty: the deployment's. Return its record, unchanged for a start key; None for
        an unknown id. Other replicas use the new zone after at most two seconds."""
        link = self._connection.bus.link
        for hashed, record in await self.stored():
            if record.id == key_id and not record.start:
                changed = replace(record, time_zone=time_zone)
                # Replace only an existing field: a key that was revoked meanwhile must not come back.
                if not await link.call(*_REPLACE((API_KEYS,), hashed, changed.dump())):
                    return None
                self._cache.pop(hashed, None)
                return changed
            if record.id == key_id:
                return record
        return None

    async def revoke(self, key_id: str) -> KeyRecord | None:
        """The record of the key that no longer works; None when there is none.

        A start key is left alone: the gateway that has it would accept it all the same.
        """
        for hashed, record in await self.stored():
            if record.id == key_id:
                if not record.start:
                    await self._connection.bus.link.call("HDEL", API_KEYS, hashed)
                    self._cache.pop(hashed, None)
                return record
        return None

    async def stored(self) -> list[tuple[str, KeyRecord]]:
        """Every key's record by its SHA-256."""
        raw = await self._connection.bus.link.call("HGETALL", API_KEYS)
        found = [(h.decode(errors="replace"), _record(value)) for h, value in zip(raw[::2], raw[1::2], strict=True)]
        return [(hashed, record) for hashed, record in found if record is not None]


def _record(raw: bytes | None) -> KeyRecord | None:
    if raw is None:
        return None
    try:
        return KeyRecord(**{name: value for name, value in orjson.loads(raw).items() if name in _FIELDS})
    except (ValueError, TypeError, AttributeError):
        log.warning("keys.malformed_record")
        return None
