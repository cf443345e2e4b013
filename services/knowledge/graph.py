"""What the store needs of a graph database that speaks openCypher, embedded or a server.

Queries are constants of `store`; everything that comes from outside is a parameter.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from shared.errors import TransientError

Row = dict[str, Any]
# One query with its parameters; the rows it returns.
Run = Callable[[str, dict[str, Any]], Awaitable[list[Row]]]


class GraphUnavailable(TransientError):
    """The graph cannot be reached just now; what was asked has not happened."""


class Graph(Protocol):
    """One database. Every method raises GraphUnavailable when it cannot be reached."""

    def transaction(self) -> AbstractAsyncContextManager[Run]:
        """Several queries, of which all happen or none: with the block's end, or not at all when it raises.

        Transactions are one after the other, as far as they change the same node.
        """

    async def read(self, query: str, parameters: dict[str, Any]) -> list[Row]: ...

    async def ping(self) -> None: ...
