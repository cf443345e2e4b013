"""Names to addresses. A look-up that nobody answers holds no thread and ends by itself."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiodns

# The second attempt waits twice as long: together they stay inside the guard's own limit.
ATTEMPT_SECONDS, ATTEMPTS = 1.5, 2
_NO_ANSWER = 12  # c-ares: ARES_ETIMEOUT


class Names:
    """This machine's resolver configuration (hosts file, search list, name servers), asked by c-ares."""

    def __init__(self, **options: Any) -> None:
        self._options = {"timeout": ATTEMPT_SECONDS, "tries": ATTEMPTS, **options}
        self._resolver: aiodns.DNSResolver | None = None

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses in the order in which to try them. Raises OSError. An address is its own answer."""
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            pass
        # Imported at first use: an idle worker does not need it.
        import aiodns

        if self._resolver is None:
            self._resolver = aiodns.DNSResolver(**self._options)
        try:
            found = await self._resolver.getaddrinfo(host, port=port, type=socket.SOCK_STREAM)
        except aiodns.error.DNSError as exc:
            failure = TimeoutError if exc.args[:1] == (_NO_ANSWER,) else OSError
            raise failure(f"cannot resolve {host}") from exc
        addresses = (node.addr[0] for node in found.nodes)
        return list(dict.fromkeys(a.decode() if isinstance(a, bytes) else str(a) for a in addresses))

    async def close(self) -> None:
        if self._resolver is not None:
            await self._resolver.close()


@asynccontextmanager
async def open_names() -> AsyncIterator[Names]:
    names = Names()
    try:
        yield names
    finally:
        await names.close()
