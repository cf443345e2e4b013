"""Where the bus is: one server, a cluster or servers behind sentinels, all written as a URL."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, Self
from urllib.parse import parse_qsl, urlencode

from shared.bus.wire import Server
from shared.errors import SettingsError

Kind = Literal["single", "cluster", "sentinel"]

FORMS = (
    "redis://, rediss:// or unix:// for one server; redis+cluster://HOST:PORT[,HOST:PORT…]/ for a Redis Cluster; "
    "redis+sentinel://HOST:PORT[,HOST:PORT…]/MASTER[/DB] for sentinels; rediss+… with TLS"
)
_SCHEME = re.compile(r"(rediss?)\+(cluster|sentinel)")
_PLAIN = frozenset({"redis", "rediss", "unix"})
_PORTS = {"cluster": 6379, "sentinel": 26379}


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, port: int) -> Self:
        """`host:port` or `[v6]:port`; `port` when it has none. Raises ValueError."""
        host, colon, number = text.rpartition(":")
        if not colon or number.endswith("]"):
            host, number = text, ""
        number = number or str(port)
        if not number.isdecimal() or not 0 < int(number) < 65_536:
            raise ValueError("a port is no number from 1 to 65535")
        return cls(host.removeprefix("[").removesuffix("]"), int(number))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed URL.

    server: the one; or any of a cluster or behind sentinels, which `at` gives an address. sentinel: any of these.
    addresses: nodes to begin with, or sentinels. master: the name by which the sentinels know it.
    """

    kind: Kind
    server: Server
    addresses: tuple[Address, ...] = ()
    master: str = ""
    sentinel: Server | None = None

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Raises SettingsError, which never shows a password."""
        scheme, _, rest = url.partition("://")
        found = _SCHEME.fullmatch(scheme)
        try:
            if scheme in _PLAIN:
                return cls("single", Server.parse(url))
            if found is None or not rest:
                raise ValueError("it is none of these")
            return cls._of_several(found[1], found[2], rest)
        except OSError as exc:
            raise SettingsError(f"the URL of Redis names certificates that cannot be read: {exc}") from exc
        except ValueError as exc:
            raise SettingsError(f"the URL of Redis is wrong: {exc}; expected: {FORMS}") from exc

    @classmethod
    def _of_several(cls, scheme: str, kind: str, rest: str) -> Endpoint:
        # urlsplit knows one address only, and refuses two in brackets
        rest, _, query = rest.partition("?")
        netloc, _, rest = rest.partition("/")
        userinfo, at, places = netloc.rpartition("@")
        addresses = tuple(Address.parse(place, _PORTS[kind]) for place in places.split(","))
        if not all(address.host for address in addresses):
            raise ValueError("an address has no host")
        options = dict(parse_qsl(query, keep_blank_values=True))
        username, password = options.pop("sentinel_username", None), options.pop("sentinel_password", None)
        server = Server.parse(f"{scheme}://{userinfo}{at}{addresses[0]}/?{urlencode(options)}")
        path = [part for part in rest.split("/") if part]
        if kind == "cluster":
            if server.database or path not in ([], ["0"]):
                raise ValueError("a Redis Cluster has database 0 only: leave the rest of the URL away, or write /0")
            return cls("cluster", server, addresses)
        database = path[1] if len(path) > 1 else str(server.database)
        if not 0 < len(path) < 3 or not database.isdecimal():
            raise ValueError("a sentinel URL ends with the name of the master and a database: …/mymaster/0")
        sentinel = replace(server, username=username, password=password, database=0)
        return cls("sentinel", replace(server, database=int(database)), addresses, path[0], sentinel)

    @property
    def named(self) -> bool:
        """Whether it says which of the server's users this is."""
        return self.server.username not in (None, "default")

    def at(self, address: Address) -> Server:
        """The server at an address."""
        return replace(self.server, host=address.host, port=address.port)
