"""A graph server behind a Bolt address: Neo4j, Memgraph or any other that speaks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from services.knowledge.graph import Graph, GraphUnavailable, Row, Run
from services.knowledge.statements import Statement
from shared.extras import required_by

if TYPE_CHECKING:
    from neo4j import AsyncDriver, AsyncSession, AsyncTransaction


_PING = Statement("", "RETURN 1 AS one")


class BoltGraph:
    """Open it with `open_bolt`.

    unique: labels whose ids are made unique before the first use, whenever the server comes. timeout: seconds for a
    connection, and for each sign of life on it.
    """

    def __init__(self, driver: AsyncDriver, database: str | None, unique: Sequence[str], timeout: float) -> None:
        self._driver = driver
        self._database = database
        self._unique = list(unique)
        self._timeout = timeout
        # one writes at a time, as with the embedded one: many servers refuse the later of two that meet
        self._writing = asyncio.Lock()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Run]:
        async with self._writing:
            await self._prepare()
            with _told(self._timeout):
                async with self._driver.session(database=self._database) as session:
                    async with asyncio.timeout(self._timeout):
                        begun = await session.begin_transaction()
                    try:

                        async def run(statement: Statement, *parameters: dict[str, Any]) -> list[Row]:
                            with _told(self._timeout):
                                return await self._rows(begun, statement.cypher, parameters)

                        yield run
                        async with asyncio.timeout(self._timeout):
                            await begun.commit()
                    finally:
                        # after a commit it does nothing
                        async with asyncio.timeout(self._timeout):
                            await begun.close()

    async def read(self, statement: Statement, *parameters: dict[str, Any]) -> list[Row]:
        if self._unique:
            async with self._writing:
                await self._prepare()
        with _told(self._timeout):
            # not as a reader: of a cluster, one that lags behind would answer
            async with self._driver.session(database=self._database) as session:
                return await self._rows(session, statement.cypher, parameters)

    def removed(self) -> None:
        """Do nothing: the server's disk is not ours."""

    async def ping(self) -> None:
        await self.read(_PING, {})

    async def _rows(
        self, runner: AsyncSession | AsyncTransaction, query: str, parameters: Sequence[dict[str, Any]]
    ) -> list[Row]:
        loop, rows = asyncio.get_running_loop(), []
        async with asyncio.timeout(self._timeout) as limit:
            for one in parameters:
                async for record in await runner.run(query, one):
                    rows.append(record.data())
                    limit.reschedule(loop.time() + self._timeout)
                limit.reschedule(loop.time() + self._timeout)
        return rows

    async def _prepare(self) -> None:
        from neo4j.exceptions import CypherSyntaxError

        while self._unique:
            label = self._unique[0]
            with _told(self._timeout):
                try:
                    await self._change(
                        f"CREATE CONSTRAINT local2_{label.lower()} IF NOT EXISTS FOR (n:{label}) REQUIRE n.id IS UNIQUE"
                    )
                except CypherSyntaxError:
                    # openCypher has no form for it, and Memgraph one of its own, to which no index belongs
                    await self._change(f"CREATE CONSTRAINT ON (n:{label}) ASSERT n.id IS UNIQUE")
                    await self._change(f"CREATE INDEX ON :{label}(id)")
            self._unique.pop(0)

    async def _change(self, query: str) -> None:
        """Changes the schema, which some servers refuse in a transaction."""
        async with self._driver.session(database=self._database) as session:
            await self._rows(session, query, [{}])


class _told:
    """The driver's errors as ours."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> None:
        from neo4j.exceptions import AuthError, DriverError, Neo4jError

        if isinstance(exc, AuthError):
            raise GraphUnavailable("the graph server refuses the name or the password") from exc
        if isinstance(exc, TimeoutError):
            raise GraphUnavailable(f"the graph server does not answer within {self._timeout:g} s") from exc
        if isinstance(exc, DriverError | Neo4jError | OSError):
            raise GraphUnavailable(f"the graph server: {' '.join(str(exc).split())[:300]}") from exc


@asynccontextmanager
async def open_bolt(
    address: str, user: str, password: str, database: str | None, unique: Sequence[str], timeout: float
) -> AsyncIterator[Graph]:
    """A server; it need not be there yet: what is asked of it before waits.

    Raises SettingsError when the driver is not installed.
    """
    with required_by(f"LOCAL2_KNOWLEDGE_STORE={address}", "knowledge-bolt"):
        from neo4j import AsyncGraphDatabase
    auth = (user, password) if user else None
    async with AsyncGraphDatabase.driver(
        address, auth=auth, connection_timeout=timeout, connection_acquisition_timeout=timeout
    ) as driver:
        yield BoltGraph(driver, database, unique, timeout)
