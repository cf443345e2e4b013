"""The connection that the store needs: to the embedded database, or to a graph server."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from services.knowledge.statements import Statement
from shared.errors import TransientError

Row = dict[str, Any]


class GraphUnavailable(TransientError):
    """The graph cannot be reached now; the operation did not happen."""


class Run(Protocol):
    """Run a statement once for each set of parameters; return all rows, in their order."""

    def __call__(self, statement: Statement, *parameters: dict[str, Any]) -> Awaitable[list[Row]]: ...


class Graph(Protocol):
    """One database. Every method raises GraphUnavailable if it cannot be used now."""

    def transaction(self) -> AbstractAsyncContextManager[Run]:
        """Open a transaction: all of its statements take effect when the block ends, or none if the block raises.

        One transaction runs at a time.
        """

    async def read(self, statement: Statement, *parameters: dict[str, Any]) -> list[Row]:
        """Run a statement outside of a transaction, as `Run` does."""

    async def ping(self) -> None: ...

    def removed(self) -> None:
        """Note that the current transaction deletes data, which must leave our disk too."""
