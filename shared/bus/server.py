"""Find the Redis server that has the bus, and connect to it by redis-py.

The URL names one server, the sentinels of a master, or nodes of a server in cluster mode. There all keys share the hash
slot of their prefix (`LOCAL2_KEY_PREFIX`), so one node has all of them: any other node names it by MOVED.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import parse_qsl, urlencode

from redis.asyncio import ConnectionPool, Sentinel
from redis.asyncio.connection import RedisSSLContext, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

from shared.bus.keys import REPLICAS
from shared.bus.redis_connection import BusConnection, bus_connection_class, exchange, is_busy
from shared.bus.replies import ReplyError
from shared.errors import SettingsError
from shared.key_prefix import ONE_SLOT, PREFIX, VARIABLE

Address = tuple[str, int]
Kind = Literal["", "cluster", "sentinel"]

FORMS = (
    "redis://, rediss:// or unix:// for one server; redis+cluster://HOST:PORT[,HOST:PORT…]/ for a server in cluster "
    "mode; redis+sentinel://HOST:PORT[,HOST:PORT…]/MASTER[/DB] for sentinels; rediss+… with TLS"
)
# Seconds between two questions to the sentinels whether there is another master.
_SENTINEL_POLL_S = 1.0
# A node may name another one that has just given the slot away.
_MAX_REDIRECTS = 5
_SENTINEL_LOGIN = {"sentinel_username", "sentinel_password"}
# Replies that mean: the server cannot serve this client now; a new connection later may.
_NOT_SERVING = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "BUSY")
# For every connection. RESP 2 needs no HELLO. Time limits and repeated attempts are those of `Reconnecting`.
_OPTIONS: dict[str, Any] = {
    "protocol": 2,
    "driver_info": None,
    "client_name": None,
    "socket_timeout": None,
    "socket_connect_timeout": None,
    "health_check_interval": 0,
    "retry": Retry(NoBackoff(), 0),
}


class _PasswordFile(CredentialProvider):  # type: ignore[misc]
    """A user whose password is read from a file for each new connection."""

    def __init__(self, username: str | None, path: Path) -> None:
        self.username = username
        self._path = path

    def get_credentials(self) -> tuple[str, ...]:
        """Return the arguments of AUTH. Raises OSError."""
        password = self._path.read_text().strip()
        return (self.username, password) if self.username else (password,)

    async def get_credentials_async(self) -> tuple[str, ...]:
        return await asyncio.to_thread(self.get_credentials)


@dataclass(slots=True)
class _Place:
    """The contents of a URL: its addresses, and how redis-py connects to each."""

    kind: Kind
    pool: ConnectionPool
    addresses: list[Address]
    service: str = ""
    sentinel_login: dict[str, str] = field(default_factory=dict)


def parse(url: str) -> _Place:
    """Read a URL. Raise SettingsError, whose text contains no password."""
    try:
        return _parse(url)
    except OSError as exc:
        raise SettingsError(f"LOCAL2_REDIS_URL names a file that cannot be used: {exc}") from exc
    except TypeError as exc:
        # redis-py passes options of the URL on as arguments: the error names the unknown one.
        unknown = str(exc).rpartition("argument ")[2]
        raise SettingsError(f"LOCAL2_REDIS_URL has the unknown option {unknown}; expected: {FORMS}") from exc
    except (ValueError, RedisError):
        # The cause may show a password.
        raise SettingsError(
            f"LOCAL2_REDIS_URL cannot be read; expected: {FORMS}; write special characters of a password as %XX"
        ) from None


def _parse(url: str) -> _Place:
    scheme, _, rest = url.partition("://")
    base, plus, kind = scheme.partition("+")
    if (plus and kind not in ("cluster", "sentinel")) or base not in ("redis", "rediss", "unix"):
        raise ValueError(scheme)
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    # The bus decides these options for all connections: leave them out of the URL.
    options = {name: value for name, value in parse_qsl(query, keep_blank_values=True) if name not in _OPTIONS}
    password_file = options.pop("password_file", "")
    sentinel_login = {name.removeprefix("sentinel_"): options.pop(name) for name in _SENTINEL_LOGIN & options.keys()}
    service, database = "", path
    if kind == "sentinel":
        service, _, database = path.strip("/").partition("/")
        if not service:
            raise SettingsError(
                "LOCAL2_REDIS_URL for sentinels ends with the name of the master and a database: …/mymaster/0"
            )
    if base != "unix" and not database.strip("/").isdecimal() and database.strip("/"):
        raise SettingsError("LOCAL2_REDIS_URL has a database that is not a number")
    if kind == "cluster" and (database.strip("/") or options.get("db", "0")) != "0":
        raise SettingsError("a server in cluster mode has database 0 only: leave it out of LOCAL2_REDIS_URL")
    query = f"?{urlencode(options)}" if options else ""
    pools = [
        _pool(f"{base}://{login}{at}{host}/{database}{query}", password_file)
        for host in (hosts.split(",") if kind else [hosts])
    ]
    port = 26379 if kind == "sentinel" else 6379
    addresses = [
        (pool.connection_kwargs.get("host", "localhost"), pool.connection_kwargs.get("port", port)) for pool in pools
    ]
    if kind and any("host" not in pool.connection_kwargs for pool in pools):
        raise ValueError("an address without a host")
    return _Place(kind, pools[0], addresses, service, sentinel_login)  # type: ignore[arg-type]


def _pool(url: str, password_file: str) -> ConnectionPool:
    """Return redis-py's pool for a URL of one server, whose connections are BusConnections."""
    read = ConnectionPool.from_url(url, protocol=_OPTIONS["protocol"])
    arguments, connection_class = {**read.connection_kwargs, **_OPTIONS}, read.connection_class
    if password_file:
        if "password" in arguments:
            raise SettingsError("LOCAL2_REDIS_URL has a password and a password_file: leave one of them out")
        provider = _PasswordFile(arguments.pop("username", None), Path(password_file))
        # A missing file is an error of the settings now, and a failed connection later.
        provider.get_credentials()
        arguments["credential_provider"] = provider
    if issubclass(connection_class, SSLConnection):
        # Python 3.13 requires extensions that the certificates of private authorities often lack.
        arguments.setdefault("ssl_exclude_verify_flags", [ssl.VERIFY_X509_STRICT])
        connection_class = _class_with_context(connection_class(**arguments).ssl_context)
    pool = ConnectionPool(connection_class=bus_connection_class(connection_class), **arguments)
    # Raises TypeError if there is an unknown option.
    pool.make_connection()
    return pool


def _class_with_context(context: RedisSSLContext) -> type[SSLConnection]:
    """Return redis-py's class of TLS connections with one context for all of them.

    redis-py reads the certificates again for each connection, and blocks the event loop for up to 0.1 s.
    """
    context.get()

    class OneContext(SSLConnection):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.ssl_context = context

    return OneContext


class Server:
    """The server that has the bus, for all connections of a process.

    address: of the server that the newest connection found; None until then.
    """

    def __init__(self, url: str) -> None:
        """Raises SettingsError when the URL has none of the FORMS."""
        self._place = parse(url)
        self._seeds = deque(self._place.addresses)
        self.address: Address | None = None
        self._asked_sentinels = -_SENTINEL_POLL_S

    @property
    def username(self) -> str | None:
        options = self._place.pool.connection_kwargs
        provider: _PasswordFile | None = options.get("credential_provider")
        username: str | None = provider.username if provider else options.get("username")
        return username

    @property
    def addresses(self) -> list[Address]:
        """The addresses in the URL."""
        return self._place.addresses

    def unconnected(self, address: Address | None = None, **options: Any) -> BusConnection:
        """Return a connection that is not open yet."""
        arguments = {**self._place.pool.connection_kwargs, **options}
        if address is not None and "path" not in arguments:
            arguments["host"], arguments["port"] = address
        connection: BusConnection = self._place.pool.connection_class(**arguments)
        return connection

    async def connect(self, within: float) -> BusConnection:
        """Return an open connection to the server that takes the bus's writes.

        within: seconds that the caller waits. Raises OSError, RedisError or ReplyError when there is no such server
        now, and SettingsError when this deployment's key prefix does not fit the server.
        """
        address = await self._first_address(within)
        for _ in range(_MAX_REDIRECTS):
            connection = self.unconnected(address)
            try:
                await connection.connect()
                moved_to = await self._moved_to(connection, address)
            except BaseException as exc:
                # A busy server has the bus: the script that keeps it busy can be ended there.
                self.address = address if is_busy(exc) else None
                await connection.disconnect()
                raise
            if moved_to is None:
                self.address = address
                return connection
            await connection.disconnect()
            address = moved_to
        raise ConnectionError("the nodes of the server in cluster mode do not agree on the node that has the bus")

    async def _first_address(self, within: float) -> Address:
        if self._place.kind == "sentinel":
            return await self._ask_sentinels(within)
        if self.address is None:
            self._seeds.rotate(-1)
            return self._seeds[0]
        return self.address

    async def _moved_to(self, connection: BusConnection, address: Address) -> Address | None:
        """Return the address of the node that has the bus; None if it is this one. Raise if no node has it now."""
        if self._place.kind == "sentinel":
            (role,) = await exchange(connection, [("ROLE",)])
            if isinstance(role, ReplyError):
                raise role
            if role[0] != b"master":
                raise ConnectionError(f"the sentinels' master is a {role[0].decode()} now")
            return None
        # Any read of one of the bus's keys does: each user of Redis may read this one.
        about, reply = await exchange(connection, [("HELLO",), ("ZRANGE", REPLICAS, 0, 0)])
        if isinstance(about, list) and b"cluster" in about and not ONE_SLOT:
            raise SettingsError(
                f"this Redis server is in cluster mode, where all keys must have one hash tag: set {VARIABLE} to "
                f"{{{PREFIX.removesuffix(':')}}}: in the environment of every participant"
            )
        if isinstance(reply, ReplyError) and reply.code == "MOVED":
            host, _, port = str(reply).rpartition(" ")[2].rpartition(":")
            # A node without a name leaves the host out.
            return (address[0] if host in ("", "?") else host.strip("[]")), int(port)
        if isinstance(reply, ReplyError) and reply.code in _NOT_SERVING:
            raise reply
        return None

    # ── sentinels ────────────────────────────────────────────────────────────────────────────────────────────

    async def _ask_sentinels(self, within: float) -> Address:
        """Return the newest master among the sentinels' replies: a sentinel that was cut off returns an earlier one."""
        kwargs = self._place.pool.connection_kwargs
        options = {
            **{name: value for name, value in kwargs.items() if name.startswith("ssl_")},
            **_OPTIONS,
            "ssl": issubclass(self._place.pool.connection_class, SSLConnection),
            "socket_timeout": within / 2,
            "socket_connect_timeout": within / 2,
            **self._place.sentinel_login,
        }
        sentinel = Sentinel(self._place.addresses, sentinel_kwargs=options)
        for client in sentinel.sentinels:
            client.connection_pool.connection_class = self._place.pool.connection_class
        try:
            asked = [client.sentinel_master(self._place.service) for client in sentinel.sentinels]
            states = await asyncio.gather(*asked, return_exceptions=True)
        finally:
            # A caller whose time ends meanwhile must not keep the connections from being closed.
            await asyncio.shield(sentinel.aclose())
        known = [state for state in states if isinstance(state, dict)]
        masters = [state for state in known if sentinel.check_master_state(state, self._place.service)]
        if not masters:
            reasons = "; ".join(str(state) for state in states if isinstance(state, Exception))
            raise ConnectionError(f"no sentinel names a master that is up ({reasons})")
        newest = max(masters, key=lambda state: int(state["config-epoch"]))
        return str(newest["ip"]), int(newest["port"])

    async def watch(self, address: Address | None) -> NoReturn:
        """Raise ConnectionError when the bus is no longer at `address`: another connection has found it elsewhere.

        Sentinels demote a replaced master ten seconds later, and writes that it confirms until then are lost. So this
        asks them once a second for the master.
        """
        while self.address in (address, None):
            await asyncio.sleep(_SENTINEL_POLL_S / 4)
            now = asyncio.get_running_loop().time()
            if self._place.kind == "sentinel" and now - self._asked_sentinels >= _SENTINEL_POLL_S:
                self._asked_sentinels = now
                with suppress(OSError):
                    self.address = await self._ask_sentinels(_SENTINEL_POLL_S)
        raise ConnectionError("another server has the bus now")
