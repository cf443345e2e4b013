"""The health check's short way: what one plain Redis knows of a participant's replicas, by the standard library.

A check runs every few seconds in every container, and most of its time would go into imports: this way costs a
fraction of the other one. What is not plain (TLS, a socket, sentinels, a cluster, an error) is left to the other one.
"""

from __future__ import annotations

import json
import os
import socket
from typing import IO, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from shared.key_prefix import PREFIX

_INDEX = f"{PREFIX}replicas"


class Announced(NamedTuple):
    """What a replica says of itself, as far as its health is concerned."""

    participant: str
    replica: str
    state: str
    in_flight: int


class NotPlain(Exception):
    """This way cannot tell."""


class Busy(OSError):
    """A script keeps Redis from answering anybody."""


def url_of(participant: str) -> str | None:
    """The bus's URL where the environment names one; it goes before every file."""
    own = f"LOCAL2_{participant.upper().replace('-', '_')}_REDIS_URL"
    return os.environ.get(own) or os.environ.get("LOCAL2_REDIS_URL")


def announced(url: str, participant: str, patience: float) -> list[Announced]:
    """The participant's live replicas. Raises OSError when Redis is away or Busy, and NotPlain."""
    try:
        place = urlsplit(url)
        host, port, database = place.hostname, place.port or 6379, int(place.path.strip("/") or 0)
    except ValueError as exc:
        raise NotPlain from exc
    if place.scheme != "redis" or not host or place.query or "," in place.netloc:
        raise NotPlain
    with socket.create_connection((host, port), patience) as connection, connection.makefile("rb") as replies:

        def ask(*words: str) -> Any:
            parts = [word.encode() for word in words]
            lines = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
            connection.sendall(b"*%d\r\n%s" % (len(parts), lines))
            return _reply(replies)

        if place.password:
            ask("AUTH", *([unquote(place.username)] if place.username else []), unquote(place.password))
        if database:
            ask("SELECT", str(database))
        names = [member.decode() for member in ask("ZRANGE", _INDEX, "0", "-1")]
        own = [name.partition("/")[2] for name in names if name.startswith(f"{participant}/")]
        found = [(replica, ask("GET", f"{PREFIX}replica:{participant}:{replica}")) for replica in own]
    return [_read(participant, replica, value) for replica, value in found if value is not None]


def _read(participant: str, replica: str, value: bytes) -> Announced:
    try:
        written = json.loads(value)
        return Announced(participant, replica, str(written["state"]), int(written.get("in_flight", 0)))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise NotPlain from exc


def _reply(replies: IO[bytes]) -> Any:
    line = replies.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("Redis closed the connection")
    kind, rest = line[:1], line[1:-2]
    match kind:
        case b"+" | b":":
            return rest
        case b"$":
            length = int(rest)
            return None if length < 0 else replies.read(length + 2)[:-2]
        case b"*":
            return [_reply(replies) for _ in range(int(rest))]
        case b"-" if rest.startswith(b"BUSY "):
            raise Busy
        case _:
            raise NotPlain
