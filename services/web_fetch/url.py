"""The one URL parser: what is checked here is, part by part, what is connected to and requested.

It takes less than a browser does. Everything on which two parsers could disagree (user names, backslashes, control
characters, numbers in unusual forms) is refused instead of interpreted.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, urljoin, urlsplit

import idna

from services.web_fetch.errors import Blocked

MAX_URL = 8_192
DEFAULT_PORTS = {"http": 80, "https": 443}
# Below 1024 only the two of the web; above, none on which something else than HTTP is known to listen.
FIRST_FREE_PORT = 1_024
OTHER_SERVICES = frozenset({
    1433, 1521, 1719, 1720, 1723, 1883, 2049, 2181, 2375, 2376, 2379, 2380, 3306, 3389, 3659, 4045, 4190, 5060, 5061,
    5432, 5672, 5900, 6000, 6379, 6380, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 9042, 9092, 10080, 10250,
    11211, 26379, 27017,
})  # fmt: skip

_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\\\u2028\u2029]")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[0-9]{1,5}")
# Characters that stay as they are in a path or a query, `%` included: escapes are not escaped again.
_KEEP = "/?%:@!$&'()*+,;=-._~[]"


@dataclass(frozen=True, slots=True)
class Target:
    """What is requested. `host` is lower case, in IDNA form, without brackets and without a trailing dot."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    def join(self, location: str) -> Target:
        """Where a redirect from here leads. Raises Blocked."""
        _refuse_unsafe(location)
        try:
            return parse(urljoin(str(self), location.strip()))
        except ValueError as exc:
            raise Blocked("the redirect's URL is malformed") from exc


def parse(url: str) -> Target:
    """The target of a URL. Raises Blocked when it is not a plain http(s) URL."""
    _refuse_unsafe(url)
    try:
        parts = urlsplit(url.strip())
    except ValueError as exc:
        raise Blocked("the URL is malformed") from exc
    scheme = parts.scheme
    if scheme not in ("http", "https"):
        raise Blocked("only http:// and https:// URLs can be fetched")
    if "@" in parts.netloc:
        raise Blocked("a URL with a user name or password is not fetched")
    host, port = split_authority(parts.netloc)
    path = quote(parts.path or "/", safe=_KEEP)
    query = f"?{quote(parts.query, safe=_KEEP)}" if parts.query else ""
    return Target(
        "https" if scheme == "https" else "http",
        host,
        DEFAULT_PORTS[scheme] if port is None else port,
        path + query,
    )


def split_authority(authority: str) -> tuple[str, int | None]:
    """Host and port (None when there is none) of `host`, `host:port` or `[v6]:port`. Raises Blocked."""
    if authority.startswith("["):
        host, bracket, rest = authority[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise Blocked("the URL's host is malformed")
        return _ipv6(host), _port(rest[1:])
    name, _, port = authority.partition(":")
    return _name(name), _port(port)


def check_port(port: int) -> None:
    """Raises Blocked for a port on which no web server is expected."""
    if port not in DEFAULT_PORTS.values() and (port < FIRST_FREE_PORT or port in OTHER_SERVICES):
        raise Blocked(f"port {port} is not one of a web server")


def _refuse_unsafe(url: str) -> None:
    if len(url) > MAX_URL:
        raise Blocked(f"the URL is longer than {MAX_URL} characters")
    if _UNSAFE.search(url):
        raise Blocked("the URL contains a backslash or a control character")


def _port(text: str) -> int | None:
    if not text:
        return None
    if not _PORT.fullmatch(text) or not 0 < int(text) <= 65_535:
        raise Blocked("the URL's port is malformed")
    return int(text)


def _ipv6(text: str) -> str:
    # A zone (`%eth0`) chooses an interface of this machine: never public.
    if "%" in text:
        raise Blocked("an IPv6 address with a zone is not fetched")
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError as exc:
        raise Blocked("the URL's host is malformed") from exc


def _name(text: str) -> str:
    host = text.lower()
    if not host.isascii():
        try:
            # Maps full-width letters, digits and dots to plain ones first, so that the checks below see them.
            host = idna.encode(text, uts46=True).decode("ascii").lower()
        except UnicodeError as exc:
            raise Blocked("the URL's host is not a valid name") from exc
    host = host.removesuffix(".")
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise Blocked("the URL's host is not a valid name")
    if _NUMBER.fullmatch(labels[-1]):
        # Resolvers read 2130706433, 0x7f.1 and 0177.0.0.1 as 127.0.0.1.
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError as exc:
            raise Blocked("a numeric host must be four decimal numbers") from exc
    return host
