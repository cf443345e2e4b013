"""API keys: only their SHA-256 is stored, and each has an owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Literal, Protocol

import orjson

from services.gateway.settings import GatewaySettings
from shared.bus import Bus
from shared.bus.keys import API_KEYS
from shared.envelope import now_ms
from shared.telemetry.logging import get_logger

log = get_logger()

Role = Literal["admin", "user"]
ADMIN = "admin"
# A revoked key works at most this long on another replica.
_CACHE_SECONDS = 2.0
_CACHE_SIZE = 10_000


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks."""

    user_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key without its secret. `created` is in ms since the epoch; `start`: it is an administrator's start key."""

    id: str
    name: str
    user_id: str
    role: Role
    created: int
    start: bool = False

    def dump(self) -> bytes:
        return orjson.dumps(
            {
                "id": self.id,
                "name": self.name,
                "user_id": self.user_id,
                "role": self.role,
                "created": self.created,
                "start": self.start,
            }
        )


def digest(key: str) -> str:
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


def admin_key(settings: GatewaySettings) -> str:
    """The configured key, else the one in the data folder, else a new one, which is shown once and kept there."""
    if settings.admin_key is not None:
        return settings.admin_key.get_secret_value()
    path = settings.data_dir / "admin.key"
    with contextlib.suppress(FileNotFoundError):
        return _kept(path)
    key = new_key()
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"admin.key.{os.getpid()}-{secrets.token_hex(4)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    try:
        # a link, unlike a rename, fails when another gateway on this folder was first
        os.link(fresh, path)
    except FileExistsError:
        return _kept(path)
    finally:
        fresh.unlink()
    print(f"local2: the administrator's API key, shown once and kept in {path}: {key}", file=sys.stderr, flush=True)
    return key


def _kept(path: Path) -> str:
    path.chmod(0o600)
    return path.read_text(encoding="utf-8").strip()


def new_key() -> str:
    return "l2_" + secrets.token_urlsafe(32)


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
        self._admin = "" if self._off else digest(admin_key(settings))
        self._cache: dict[str, tuple[float, Principal | None]] = {}

    async def start(self) -> None:
        """Makes the administrator's key known to the other replicas."""
        if self._off:
            return
        link = self._connection.bus.link
        if self._configured:
            # the configured key is the same everywhere: an earlier one must not open any door
            stale = [h for h, record in await self.stored() if record.start and h != self._admin]
            if stale:
                await link.call("HDEL", API_KEYS, *stale)
        record = KeyRecord(self._admin[:12], "start key", ADMIN, "admin", now_ms(), start=True)
        await link.call("HSETNX", API_KEYS, self._admin, record.dump())

    async def principal(self, key: str) -> Principal | None:
        """Whose key it is; None for an unknown one."""
        if self._off:
            return Principal("local", "admin")
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
        found = Principal(record.user_id, record.role) if record else None
        if len(self._cache) >= _CACHE_SIZE:
            self._cache.clear()
        self._cache[hashed] = (now + _CACHE_SECONDS, found)
        return found

    async def create(self, name: str, user_id: str, role: Role) -> tuple[KeyRecord, str]:
        """The record, and the secret, which nobody can read again."""
        key = new_key()
        hashed = digest(key)
        record = KeyRecord(hashed[:12], name, user_id, role, now_ms())
        await self._connection.bus.link.call("HSET", API_KEYS, hashed, record.dump())
        self._cache.pop(hashed, None)
        return record, key

    async def listed(self) -> list[KeyRecord]:
        return sorted((record for _, record in await self.stored()), key=lambda record: (record.created, record.id))

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
        return KeyRecord(**orjson.loads(raw))
    except (ValueError, TypeError):
        log.warning("keys.malformed_record")
        return None
