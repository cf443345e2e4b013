"""What the store needs of a graph database that speaks openCypher, embedded or a server.

Queries are constants of `store`; everything that comes from outside is a parameter.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from shared.errors import TransientError

Row = dict[str, Any]


class GraphUnavailable(TransientError):
    """The graph cannot be reached just now; what was asked has not happened."""


class Run(Protocol):
    """A query, once with each of some parameters; all rows, in their order. A node is found by `id = $one` at once,
    by `id IN $many` after a look at all nodes: many ids are many parameters."""

    def __call__(self, query: str, *parameters: dict[str, Any]) -> Awaitable[list[Row]]: ...


class Graph(Protocol):
    """One database. Every method raises GraphUnavailable when it cannot be reached."""

    def transaction(self) -> AbstractAsyncContextManager[Run]:
        """Several queries, of which all happen or none: with the block's end, or not at all when it raises.

        Transactions are one after the other, as far as they change the same node.
        """

    async def read(self, query: str, *parameters: dict[str, Any]) -> list[Row]:
        """As `Run`, outside of a transaction."""

    async def ping(self) -> None: ...

    def removed(self) -> None:
        """Something goes for good with the transaction that is under way: nothing of it may be left on our disk."""
