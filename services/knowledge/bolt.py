"""A graph server behind a Bolt address: Neo4j, Memgraph or any other that speaks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from services.knowledge.graph import Graph, GraphUnavailable, Row, Run
from shared.errors import SettingsError

if TYPE_CHECKING:
    from neo4j import AsyncDriver


class BoltGraph:
    """Open it with `open_bolt`."""

    def __init__(self, driver: AsyncDriver, database: str | None) -> None:
        self._driver = driver
        self._database = database

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Run]:
        with _told():
            async with self._driver.session(database=self._database) as session:
                begun = await session.begin_transaction()
                try:

                    async def run(query: str, *parameters: dict[str, Any]) -> list[Row]:
                        with _told():
                            results = [await (await begun.run(query, one)).data() for one in parameters]
                        return [row for rows in results for row in rows]

                    yield run
                    await begun.commit()
                finally:
                    # after a commit it does nothing
                    await begun.close()

    async def read(self, query: str, *parameters: dict[str, Any]) -> list[Row]:
        with _told():
            async with self._driver.session(database=self._database, default_access_mode="READ") as session:
                results = [await (await session.run(query, one)).data() for one in parameters]
        return [row for rows in results for row in rows]

    def removed(self) -> None:
        """What a server does with its disk is its own affair."""

    async def ping(self) -> None:
        await self.read("RETURN 1 AS one", {})


class _told:
    """The driver's errors as ours."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> None:
        from neo4j.exceptions import AuthError, DriverError, Neo4jError

        if isinstance(exc, AuthError):
            raise GraphUnavailable("the graph server refuses the name or the password") from exc
        if isinstance(exc, DriverError | Neo4jError | OSError):
            raise GraphUnavailable(f"the graph server: {' '.join(str(exc).split())[:300]}") from exc


@asynccontextmanager
async def open_bolt(
    address: str, user: str, password: str, database: str | None, schema: Sequence[str], timeout: float
) -> AsyncIterator[Graph]:
    """A server; it need not be there yet: what is asked of it before waits.

    Raises SettingsError when the driver is not installed.
    """
    try:
        from neo4j import AsyncGraphDatabase
    except ImportError as exc:
        raise SettingsError(
            f"store: {address} wants the neo4j driver, which is not installed: pip install 'local2[knowledge-bolt]'"
        ) from exc
    auth = (user, password) if user else None
    async with AsyncGraphDatabase.driver(
        address, auth=auth, connection_timeout=timeout, connection_acquisition_timeout=timeout
    ) as driver:
        graph = BoltGraph(driver, database)
        yield _Prepared(graph, schema)


class _Prepared:
    """A graph whose constraints are made before its first use, whenever the server comes."""

    def __init__(self, graph: BoltGraph, schema: Sequence[str]) -> None:
        self._graph = graph
        self._schema = list(schema)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Run]:
        await self._prepare()
        async with self._graph.transaction() as run:
            yield run

    async def read(self, query: str, *parameters: dict[str, Any]) -> list[Row]:
        await self._prepare()
        return await self._graph.read(query, *parameters)

    async def ping(self) -> None:
        await self._prepare()
        await self._graph.ping()

    def removed(self) -> None:
        self._graph.removed()

    async def _prepare(self) -> None:
        while self._schema:
            # a change of the schema is a transaction of its own there
            async with self._graph.transaction() as run:
                await run(self._schema[0], {})
            self._schema.pop(0)
