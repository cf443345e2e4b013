"""Where the bus is: one server, a cluster or servers behind sentinels, all written as a URL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

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
    def parse(cls, text: str, port: int | None = None) -> Self:
        """`host:port` or `[v6]:port`; `port` when it has none. Raises ValueError."""
        host, colon, number = text.rpartition(":")
        if not colon or number.endswith("]"):
            host, number = text, ""
        if not number and port is None:
            raise ValueError("a port is missing")
        found = int(number) if number else port or 0
        if not 0 < found < 65_536:
            raise ValueError("a port is out of range")
        return cls(host.removeprefix("[").removesuffix("]"), found)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed URL. `addresses`: nodes to begin with, or sentinels. `options`: what redis-py takes after `?`."""

    kind: Kind
    url: str
    scheme: str = "redis"
    userinfo: str = ""
    addresses: tuple[Address, ...] = ()
    master: str = ""
    database: int = 0
    options: tuple[tuple[str, str], ...] = ()
    sentinel_username: str | None = None
    sentinel_password: str | None = None

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Raises SettingsError, which never shows a password. What is said of one server is left to redis-py."""
        scheme, _, rest = url.partition("://")
        if scheme in _PLAIN:
            return cls("single", url)
        found = _SCHEME.fullmatch(scheme)
        if found is None or not rest:
            raise SettingsError(f"the URL of Redis is not one of these: {FORMS}")
        kind: Kind = "cluster" if found[2] == "cluster" else "sentinel"
        # urlsplit's own host and port know one address only
        parts = urlsplit(f"//{rest}")
        userinfo, _, places = parts.netloc.rpartition("@")
        try:
            addresses = tuple(Address.parse(place, _PORTS[kind]) for place in places.split(","))
        except ValueError as exc:
            raise SettingsError(f"the URL of Redis names a wrong address ({exc}); expected: {FORMS}") from exc
        if not all(address.host for address in addresses):
            raise SettingsError(f"the URL of Redis names an address without a host; expected: {FORMS}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        path = [part for part in parts.path.split("/") if part]
        endpoint = cls(kind, url, found[1], userinfo, addresses)
        return endpoint._of_cluster(path, options) if kind == "cluster" else endpoint._of_sentinel(path, options)

    def _of_cluster(self, path: list[str], options: dict[str, str]) -> Endpoint:
        if options.pop("db", "0") != "0" or path not in ([], ["0"]):
            raise SettingsError("a Redis Cluster has database 0 only: leave the rest of the URL away, or write /0")
        return Endpoint(self.kind, self.url, self.scheme, self.userinfo, self.addresses, options=tuple(options.items()))

    def _of_sentinel(self, path: list[str], options: dict[str, str]) -> Endpoint:
        database = path[1] if len(path) > 1 else options.pop("db", "0")
        if not 0 < len(path) < 3 or not database.isdecimal():
            raise SettingsError("a sentinel URL ends with the name of the master and a database: …/mymaster/0")
        username, password = options.pop("sentinel_username", None), options.pop("sentinel_password", None)
        return Endpoint(
            *(self.kind, self.url, self.scheme, self.userinfo, self.addresses, path[0], int(database)),
            *(tuple(options.items()), username, password),
        )

    @property
    def named(self) -> bool:
        """Whether it says which of the server's users this is."""
        parts = urlsplit(self.url)
        user = parts.username or dict(parse_qsl(parts.query)).get("username")
        return user not in (None, "", "default")

    def server(self, address: Address) -> str:
        """The URL of one server, with the credentials of all."""
        login = f"{self.userinfo}@" if self.userinfo else ""
        options = f"?{urlencode(self.options)}" if self.options else ""
        return f"{self.scheme}://{login}{address}/{self.database}{options}"

    def sentinel(self, address: Address) -> str:
        """The URL of one sentinel."""
        login = ""
        if self.sentinel_password is not None:
            login = f"{quote(self.sentinel_username or '', safe='')}:{quote(self.sentinel_password, safe='')}@"
        options = f"?{urlencode(self.options)}" if self.options else ""
        return f"{self.scheme}://{login}{address}/{options}"
