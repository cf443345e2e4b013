"""Where the bus is: one server, a cluster or servers behind sentinels, all written as a URL."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote

from shared.errors import SettingsError

FORMS = (
    "redis://, rediss:// or unix:// for one server; redis+cluster://HOST:PORT[,HOST:PORT…]/ for a Redis Cluster; "
    "redis+sentinel://HOST:PORT[,HOST:PORT…]/MASTER[/DB] for sentinels; rediss+… with TLS"
)
_SCHEME = re.compile(r"unix|rediss?(?:\+(cluster|sentinel))?")
_PORTS = {"single": 6379, "cluster": 6379, "sentinel": 26379}
_CERTIFICATES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_SSL_OPTIONS = frozenset(
    f"ssl_{name}" for name in ("cert_reqs", "ca_certs", "ca_path", "certfile", "keyfile", "password", "check_hostname")
)
# What other clients take in a URL and what makes no difference here.
_IGNORED = frozenset(
    {"protocol", "socket_timeout", "socket_connect_timeout", "max_connections", "health_check_interval", "client_name"}
)


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server listens, and as whom it is spoken to. `path`: a unix socket, instead of host and port."""

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    username: str | None = None
    password: str | None = None
    database: int = 0
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def at(self, host: str, port: int) -> Server:
        """Another one that is spoken to alike."""
        return replace(self, host=host, port=port)

    def greeting(self) -> list[tuple[Any, ...]]:
        """The commands that a new connection begins with."""
        commands: list[tuple[Any, ...]] = []
        if self.password is not None:
            commands.append(("AUTH", *([self.username] if self.username else []), self.password))
        if self.database:
            commands.append(("SELECT", self.database))
        return commands


def _context(options: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"), capath=options.get("ssl_ca_path"))
    wanted = options.get("ssl_cert_reqs", "required").lower()
    if wanted not in _CERTIFICATES:
        raise ValueError(f"ssl_cert_reqs must be one of {', '.join(_CERTIFICATES)}")
    # Python 3.13 wants of certificates what those of one's own authority often lack, and what 3.12 takes
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    checked = options.get("ssl_check_hostname", "true").lower() not in ("0", "false", "no")
    context.check_hostname = checked and wanted != "none"
    context.verify_mode = _CERTIFICATES[wanted]
    if certificate := options.get("ssl_certfile"):
        context.load_cert_chain(certificate, options.get("ssl_keyfile"), options.get("ssl_password"))
    return context


def _place(text: str, port: int) -> tuple[str, int]:
    """`host:port` or `[v6]:port`; `port` when it has none. Raises ValueError."""
    host, colon, number = text.rpartition(":")
    if not colon or number.endswith("]"):
        host, number = text, ""
    number = number or str(port)
    if not number.isdecimal() or not 0 < int(number) < 65_536:
        raise ValueError("a port is no number from 1 to 65535")
    if not host:
        raise ValueError("an address has no host")
    return unquote(host).removeprefix("[").removesuffix("]"), int(number)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed URL.

    server: the one; or how any of a cluster or behind sentinels is spoken to. several: nodes to begin with, or
    sentinels. master: the name by which the sentinels know it.
    """

    kind: Literal["single", "cluster", "sentinel"]
    server: Server
    several: tuple[Server, ...] = ()
    master: str = ""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Reads it as redis-py and redis-cli write it, or in another of the FORMS. Raises SettingsError, which never
        shows a password."""
        scheme, there, rest = url.partition("://")
        found = _SCHEME.fullmatch(scheme)
        try:
            if found is None or not there or (found[1] and not rest):
                raise ValueError("it is none of these")
            return cls._read(scheme, found[1] or "single", rest)
        except OSError as exc:
            raise SettingsError(f"the URL of Redis names certificates that cannot be read: {exc}") from exc
        except ValueError as exc:
            raise SettingsError(f"the URL of Redis is wrong: {exc}; expected: {FORMS}") from exc

    @classmethod
    def _read(cls, scheme: str, kind: str, rest: str) -> Endpoint:
        # urlsplit knows one address only, and refuses two in brackets
        rest, _, query = rest.partition("?")
        netloc, _, path = rest.partition("/")
        userinfo, _, addresses = netloc.rpartition("@")
        if kind == "single" and addresses[:1] in ("", ":"):
            addresses = f"localhost{addresses}"
        # first: where its server was left out, a password stands there, and what is told of the rest would show it
        texts = [addresses] if kind == "single" else addresses.split(",")
        places = [_place(text, _PORTS[kind]) for text in texts]
        username, _, password = map(unquote, userinfo.partition(":"))
        options = dict(parse_qsl(query, keep_blank_values=True))
        login = [options.pop(f"sentinel_{name}", None) for name in ("username", "password") if kind == "sentinel"]
        username, password = options.pop("username", "") or username, options.pop("password", "") or password
        database = options.pop("db", "") or (path.strip("/") if kind == "single" and scheme != "unix" else "")
        if database and not database.isdecimal():
            raise ValueError(f"the database must be a number, not {database!r}")
        tls = _context(options) if scheme.startswith("rediss") else None
        if unknown := options.keys() - _IGNORED - (_SSL_OPTIONS if tls else frozenset()):
            raise ValueError(f"unknown options: {', '.join(sorted(unknown))}")
        server = Server(username=username or None, password=password or None, database=int(database or 0), tls=tls)
        if scheme == "unix":
            return cls("single", replace(server, path=f"/{unquote(path)}", port=0))
        several = tuple(server.at(*place) for place in places)
        if kind == "single":
            return cls("single", several[0])
        parts = [part for part in path.split("/") if part]
        if kind == "cluster":
            if server.database or parts not in ([], ["0"]):
                raise ValueError("a Redis Cluster has database 0 only: leave the rest of the URL away, or write /0")
            return cls("cluster", server, several)
        database = parts[1] if len(parts) > 1 else str(server.database)
        if not 0 < len(parts) < 3 or not database.isdecimal():
            raise ValueError("a sentinel URL ends with the name of the master and a database: …/mymaster/0")
        several = tuple(replace(one, username=login[0], password=login[1], database=0) for one in several)
        return cls("sentinel", replace(server, database=int(database)), several, parts[0])
