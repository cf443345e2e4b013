"""httptools' parser for a server that upgrades to nothing.

A server may ignore `Upgrade` and then serves the request as if it were not there (RFC 9110, 7.8). llhttp stops after
the head of such a request instead, and its body would be lost: Java's HttpClient, Spring, Ktor and `curl --http2` ask
for h2c with every first request.
"""

from __future__ import annotations

from typing import Any

import httptools

# What belongs to the wish, and goes with it (RFC 7540, 3.2.1).
_WISH = frozenset({b"upgrade", b"http2-settings"})


class PlainParser:
    """Parses one connection's requests for `protocol`, which has uvicorn's callbacks and `headers` and `url`."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._inner = httptools.HttpRequestParser(protocol)

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError."""
        try:
            self._inner.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            if not self.wishes_upgrade:
                # CONNECT: what follows is no HTTP, and nobody reads it
                return
            head = self._head_without_wish()
            self._inner = httptools.HttpRequestParser(self._protocol)
            self.feed_data(head + data[exc.args[0] :])

    @property
    def wishes_upgrade(self) -> bool:
        """Whether the head that was just read asks for another protocol; it comes again without that."""
        return self._inner.should_upgrade() and self._inner.get_method() != b"CONNECT"

    def _head_without_wish(self) -> bytes:
        version = self._inner.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._inner.get_method(), self._protocol.url, version)]
        for name, value in self._protocol.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _WISH)
            if value and name not in _WISH:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    # ── what uvicorn asks of a parser ────────────────────────────────────────────────────────────────────────────

    def should_upgrade(self) -> bool:
        return False

    def get_method(self) -> bytes:
        method: bytes = self._inner.get_method()
        return method

    def get_http_version(self) -> str:
        version: str = self._inner.get_http_version()
        return version

    def should_keep_alive(self) -> bool:
        keep: bool = self._inner.should_keep_alive()
        return keep
