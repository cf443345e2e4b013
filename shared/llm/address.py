"""Addresses of model servers as people write them, and what stands between us and such a server."""

from __future__ import annotations

import ipaddress
import re
import socket
from importlib.util import find_spec
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from shared.errors import SettingsError
from shared.extras import advice

OLLAMA_PORT = 11434
OPENAI_URL = "http://127.0.0.1:8000/v1"
GOOGLE_URL = "https://generativelanguage.googleapis.com"
_USUAL_PORTS = {"http": 80, "https": 443}

_BROKEN_SCHEME = re.compile(r"https?(?!://)[:/]", re.IGNORECASE)
# Names that only a private network knows: of mDNS, RFC 8375, RFC 6762's appendix G, and of clusters.
_PRIVATE = (".localhost", ".local", ".internal", ".intranet", ".private", ".home.arpa", ".lan", ".home", ".svc")
# What a server listens on, and where it is found then.
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def ollama_url(text: str | None) -> str:
    """The base URL for a value of OLLAMA_HOST: a URL, a host, or host:port; nothing means this machine.

    A path that names one of the server's protocols (`/v1`, `/api`) is left out. Raises ValueError with a sentence.
    """
    value = (text or "").strip() or "127.0.0.1"
    parts = _parts(value)
    port = parts.port or (_USUAL_PORTS[parts.scheme] if "://" in value else OLLAMA_PORT)
    return _url(parts, port, re.sub(r"/(v1|api)$", "", parts.path.rstrip("/")))


def openai_url(text: str | None) -> str:
    """The base URL of an OpenAI-compatible server; one without a path is taken to mean `/v1`.

    Raises ValueError with a sentence.
    """
    parts = _parts((text or "").strip() or OPENAI_URL)
    path = re.sub(r"/(chat/completions|completions|embeddings|models)$", "", parts.path.rstrip("/"))
    return _url(parts, parts.port, path or "/v1")


def google_url(text: str | None) -> str:
    """The base URL of a server that speaks the Gemini API. Raises ValueError with a sentence."""
    parts = _parts((text or "").strip() or GOOGLE_URL)
    return _url(parts, parts.port, parts.path.rstrip("/"))


def shown(url: str) -> str:
    """The URL for people: without the password that may stand in it."""
    return re.sub(r"(?<=://)[^/@]*@", "", url)


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: one server."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or _USUAL_PORTS.get(parts.scheme, 80)


def is_loopback(url: str) -> bool:
    """Whether the server is on this machine."""
    host = urlsplit(url).hostname or ""
    address = _ip(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback)


def is_private(host: str) -> bool:
    """Whether the host is in no public network, by its address or by a name that only a private one knows."""
    address = _ip(host)
    if address is not None:
        return not address.is_global
    name = host.lower().rstrip(".")
    return "." not in name or name.endswith(_PRIVATE)


def proxy_for(url: str) -> str | None:
    """The proxy of the environment that stands before the server; None: it is asked directly, as every private one is.

    `HTTP_PROXY`, `HTTPS_PROXY` and `ALL_PROXY` are heard, and `NO_PROXY` with names, suffixes, `*` and networks.
    Raises SettingsError for a proxy that cannot be used.
    """
    scheme, host, port = origin(url)
    proxies = getproxies()
    name = scheme if proxies.get(scheme) else "all"
    proxy = proxies.get(name, "").strip()
    if not proxy or is_private(host) or proxy_bypass(f"{host}:{port}") or _in_networks(host, proxies.get("no", "")):
        return None
    variable = f"{name.upper()}_PROXY"
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    kind = proxy.partition("://")[0].lower()
    if kind in ("socks5", "socks5h"):
        if find_spec("socksio") is None:
            raise SettingsError(
                f"{variable} names a SOCKS proxy, which needs the package socksio, which is not installed; "
                f"{advice('socks')}; or add {host} to NO_PROXY"
            )
    elif kind not in ("http", "https"):
        raise SettingsError(f"{variable}: a proxy is http://, https:// or socks5://, not {kind}://")
    try:
        _checked(proxy)
    except ValueError as exc:
        raise SettingsError(f"{variable}: {exc}") from exc
    return proxy


def _parts(value: str) -> SplitResult:
    """A server's address in its parts; the scheme may be left out. Raises ValueError with a sentence."""
    if _BROKEN_SCHEME.match(value):
        raise ValueError("an address begins with http:// or https://")
    if "://" not in value:
        value = f"http://[{value}]" if value.count(":") > 1 and "[" not in value and _ip(value) else f"http://{value}"
    _checked(value)
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"an address begins with http:// or https://, not with {parts.scheme}://")
    if parts.query or parts.fragment:
        raise ValueError("an address ends with its path: leave out what begins with ? or #")
    return parts


def _checked(url: str) -> None:
    """Raises ValueError with a sentence that does not quote the URL: there may be a password in it."""
    if re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError("there is a space or a line's end in the address")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("the host is malformed: an IPv6 address stands in brackets, http://[::1]:8000") from None
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("the port must be a number from 1 to 65535")
    if not parts.hostname:
        raise ValueError("there is no host in the address")
    try:
        httpx.URL(url)
    except httpx.InvalidURL:
        raise ValueError("the host is malformed") from None


def _url(parts: SplitResult, port: int | None, path: str) -> str:
    host = _EVERY_INTERFACE.get(parts.hostname or "", parts.hostname or "")
    user, at, _ = parts.netloc.rpartition("@")
    place = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{user}{at}{place}{f':{port}' if port else ''}{path}"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            # 127.1 and the like
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except (OSError, ValueError):
            return None
    return getattr(address, "ipv4_mapped", None) or address


def _in_networks(host: str, no_proxy: str) -> bool:
    address = _ip(host)
    if address is None:
        return False
    for entry in no_proxy.split(","):
        try:
            if address in ipaddress.ip_network(entry.strip(), strict=False):
                return True
        except ValueError:
            continue
    return False
