"""One behaviour for both stores: the embedded one, and a graph server where LOCAL2_TEST_BOLT names an empty one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.bolt_server import bolt_server
from support.on_disk import full_disk
from support.waiting import eventually

from services.knowledge import statements
from services.knowledge.bolt import open_bolt
from services.knowledge.claims import Claim, Turn, claim
from services.knowledge.graph import Graph, GraphUnavailable
from services.knowledge.names import USER
from services.knowledge.search import Search
from services.knowledge.sqlite import open_sqlite
from services.knowledge.statements import LABELS, Statement
from services.knowledge.store import Store
from shared.errors import SettingsError
from shared.participant.background import retry_while_transient

BOLT = os.environ.get("LOCAL2_TEST_BOLT", "")
KINDS = ["sqlite", *(["bolt"] if BOLT else [])]
ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Graph]:
    if kind == "sqlite":
        async with open_sqlite(folder / "g.sqlite") as graph:
            yield graph
    else:
        user, password = os.environ.get("LOCAL2_TEST_BOLT_USER", ""), os.environ.get("LOCAL2_TEST_BOLT_PASSWORD", "")
        async with open_bolt(BOLT, user, password, None, LABELS, 10) as graph:
            async with graph.transaction() as run:
                for label in LABELS:
                    await run(Statement("", f"MATCH (n:{label}) DETACH DELETE n"), {})
            yield graph


@pytest_asyncio.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(request.param, tmp_path) as graph:
        yield Store(graph)


def turn(source: str, said: int = 100, user: str = "ann", session: str = "s1") -> Turn:
    return Turn(source, user, session, said, "the words")


def say(of: Turn, subject: str, relation: str, object_: str, **values: Any) -> Claim:
    found = claim(of, subject, relation, object_, by="model", **values)
    assert found is not None
    return found


async def kept(store: Store, user: str = "ann") -> list[tuple[str, str, str]]:
    return sorted((one.subject_key, one.relation, one.object_key) for one in await store.claims(user))


async def test_a_source_is_written_in_place_of_what_it_said_before(store: Store) -> None:
    first = turn("r1")
    claims = [say(first, "Anna", "lives in", "Lyon"), say(first, "Anna", "likes", "tea")]
    assert await store.replace_claims(first, claims, settled=False) is not None
    before = await store.version("ann")
    source = await store.source("ann", "r1")
    assert source is not None
    assert (source.settled, source.turn.query) == (False, "the words")
    assert await store.replace_claims(first, claims, settled=False) is not None
    assert await kept(store) == [("anna", "likes", "tea"), ("anna", "lives in", "lyon")]
    assert await store.version("ann") > before
    assert await store.replace_claims(first, [say(first, "Anna", "lives in", "Porto")], settled=True) is not None
    assert await kept(store) == [("anna", "lives in", "porto")]
    # a name of which nothing is said any more is gone, and so are the words once they are read
    assert sorted(await store.keys("ann")) == ["anna", "porto"]
    source = await store.source("ann", "r1")
    assert source is not None
    assert (source.settled, source.turn.query) == (True, "")
    # settled, it stays as it is
    assert await store.replace_claims(first, claims, settled=True) is None
    assert await kept(store) == [("anna", "lives in", "porto")]


async def test_what_is_forgotten_goes_alone_and_stays_away(store: Store) -> None:
    one, other, third = turn("r1"), turn("r2", session="s2"), turn("r3", session="s3", said=300)
    for each in (one, other, third):
        await store.replace_claims(each, [say(each, "Anna", "lives in", "Lyon")], settled=True)
    assert await store.forget("ann", ["r1", "unknown"], 200) == 1
    assert await store.forget_session("ann", "s2", 200) == 1
    # said after the deletion of its session
    assert await store.forget_session("ann", "s3", 200) == 0
    assert [claim.source for claim in await store.claims("ann")] == ["r3"]
    for late in (one, other):
        assert await store.replace_claims(late, [say(late, "Anna", "lives in", "Lyon")], settled=True) is None
    assert await store.count("ann") == 1
    assert await store.forget_user("ann", 1_000) == 1
    assert await store.keys("ann") == []
    assert await store.replace_claims(turn("r4", said=999), [], settled=True) is None
    assert await store.replace_claims(turn("r5", said=1_001), [], settled=True) is not None


async def test_users_share_nothing_whatever_they_are_called(store: Store) -> None:
    for user in ("ann", "bob"):
        own = turn("r1", user=user)
        await store.replace_claims(
            own, [say(own, "Anna", "lives in", "Lyon" if user == "ann" else "Rome")], settled=False
        )
    assert await kept(store) == [("anna", "lives in", "lyon")]
    assert [one.object_key for one in await store.newest_claims("bob", ["anna"], 9)] == ["rome"]
    # an export of one that the other takes in changes nothing of the first
    assert await store.import_claims("bob", [*await store.claims("ann")] * 2) == 1
    assert await store.count("bob") == 2
    assert await store.import_claims("bob", await store.claims("ann")) == 0
    assert await kept(store) == [("anna", "lives in", "lyon")]
    assert await store.forget_user("bob", 1_000) == 1
    assert await store.count("ann") == 1
    assert (await store.source("ann", "r1")) is not None


async def test_names_are_found_by_what_is_said_of_them(store: Store) -> None:
    said = turn("r1")
    claims = [say(said, "me", "also called", "Eva"), say(said, "Anna", "married to", "Tom"),
              say(said, "Tom", "lives in", "Rome"), say(said, "Anna", "likes", "tea")]  # fmt: skip
    await store.replace_claims(said, claims, settled=True)
    assert [(one.subject_key, one.object_key) for one in await store.aliases("ann")] == [(USER, "eva")]
    assert {one.object_key for one in await store.newest_claims("ann", ["tom"], 9)} == {"tom", "rome"}
    assert len(await store.newest_claims("ann", ["tom", "anna"], 1)) == 2
    rivals = {
        name: await store.newest_rivals("ann", [name], ["lives in", "is married to"], 9) for name in ("tom", "rome")
    }
    assert sorted(one.relation for one in rivals["tom"]) == ["is married to", "lives in"]
    # Rome is the object of "lives in": one more inhabitant ends no other fact.
    assert rivals["rome"] == []
    await store.remove_claims("ann", [one for one in claims if one.relation == "likes"])
    assert "tea" not in await store.keys("ann")


async def test_a_fact_that_is_looked_up_by_a_claim_is_that_of_the_whole_graph(store: Store) -> None:
    told = [
        ("Anna", "lives in", "Lyon"), ("Annie", "lives in", "Porto"), ("Annie", "also called", "Anna"),
        ("Anna", "likes", "tea"), ("Annie", "likes", "tea"), ("Tom", "married to", "Eva"), ("Eva", "married to", "Jan"),
        ("Tom", "no longer likes", "tea"), ("me", "am called", "Eva"), ("me", "lives in", "Bonn"),
    ]  # fmt: skip
    for number, (subject, relation, object_) in enumerate(told):
        said = turn(f"r{number}", said=100 + number)
        await store.replace_claims(said, [say(said, subject, relation, object_, subject_kind="person")], settled=True)
    search = Search(store)
    facts = await search.all("ann")
    assert sorted(one.relation for one in facts).count("lives in") == 3
    for fact in facts:
        for one in fact.claims:
            assert await search.of_claim("ann", one.id) == fact
            assert await search.of_claim("bob", one.id) is None
    assert await search.of_claim("ann", "nothing") is None
    claims = sorted(one.id for fact in facts for one in fact.claims)
    paged: list[str] = []
    while page := await store.claims_page("ann", paged[-1] if paged else "", 3):
        paged += [one.id for one in page]
    assert paged == claims


async def test_text_is_a_value_and_never_a_query(store: Store) -> None:
    wild = "x'}) DETACH DELETE n // $user \\ \u2028 \""
    mine = turn("r1", session=wild, user="ann")
    await store.replace_claims(mine, [say(mine, "Anna", "likes", "tea", quote=wild)], settled=False)
    other = turn(wild, user="bob")
    await store.replace_claims(other, [say(other, "Tom", "likes", "tea")], settled=True)
    assert await store.forget_session("bob", wild, 1_000) == 0
    assert await store.newest_claims("bob", [wild, "anna"], 5) == []
    assert await kept(store) == [("anna", "likes", "tea")]
    assert (await store.claims("ann"))[0].quote == " ".join(wild.split())


async def test_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    async with opened("sqlite", tmp_path) as graph:
        store = Store(graph)

        async def failing() -> None:
            async with graph.transaction() as run:
                await run(statements.TOUCH, {"user": "ann"})
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await failing()
        assert await store.version("ann") == 0
        tasks = [
            store.replace_claims(turn(f"r{n}"), [say(turn(f"r{n}"), "Anna", "likes", "tea")], settled=True)
            for n in range(5)
        ]
        await asyncio.gather(*tasks)
        assert await store.count("ann") == 5


async def test_cancelled_write_leaves_nothing_and_blocks_nothing(tmp_path: Path) -> None:
    async with opened("sqlite", tmp_path) as graph:
        store = Store(graph)
        for number in range(20):
            source = turn(f"r{number}")
            writing = asyncio.create_task(
                store.replace_claims(source, [say(source, "Anna", "likes", "tea")], settled=True)
            )
            await asyncio.sleep(number / 5_000)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        sources = {one.source for one in await store.claims("ann")}
        assert await store.version("ann") == len(sources)


_FILL = """
import asyncio, os, sys
from pathlib import Path
from services.knowledge.claims import Turn, claim
from services.knowledge.sqlite import open_sqlite
from services.knowledge.store import Store

async def main() -> None:
    async with open_sqlite(Path(sys.argv[1])) as graph:
        store = Store(graph)
        for number in range(int(sys.argv[2]), int(sys.argv[3])):
            turn = Turn(f"r{number}", "ann", "s", number, "")
            known = claim(turn, f"Person{number}", "likes", f"thing {number}", by="model")
            await store.replace_claims(turn, [known], settled=True)
            print(number, flush=True)
        if sys.argv[4] == "dies":
            os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def filling(folder: Path, first: int, end: int, how: str = "closes") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _FILL, str(folder / "g.sqlite"), str(first), str(end), how],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def killed_while_filling(folder: Path, first: int, seconds: float) -> int:
    """Kill a writer some time after its first write; return the number of its last acknowledged write."""
    with filling(folder, first, 1 << 30) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline())]
        # Any moment of a write.
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        return [*acknowledged, *map(int, process.stdout.read().splitlines())][-1]


async def test_killed_writer_keeps_every_acknowledged_claim(tmp_path: Path) -> None:
    written, dice = 0, random.Random(5)
    for _ in range(6):
        acknowledged = killed_while_filling(tmp_path, written, dice.uniform(0, 0.1))
        async with opened("sqlite", tmp_path) as graph:
            kept = {one.said for one in await Store(graph).claims("ann")}
        assert kept >= set(range(acknowledged + 1))
        # The write under way may have been committed.
        assert len(kept) <= acknowledged + 2
        written = max(kept) + 1


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def removed(file: Path) -> None:
    file.unlink()


def overwritten(file: Path) -> None:
    file.write_bytes(b"no database at all" * 500)


def zeroed(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:4096] + bytes(len(data) - 4096))


def cut(file: Path) -> None:
    os.truncate(file, 4096)


def lost_its_log(file: Path) -> None:
    """The log of a process that died was not copied along."""
    file.with_name(f"{file.name}-wal").unlink()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a database of 40 claims: one that was closed, and one whose process was killed."""
    found = {}
    for how in ("closes", "dies"):
        found[how] = tmp_path_factory.mktemp(how)
        with filling(found[how], 0, 40, how) as process:
            process.communicate()
    return found


DAMAGES = [("closes", emptied), ("closes", removed), ("closes", overwritten), ("closes", cut), ("closes", zeroed),
           ("dies", emptied), ("dies", lost_its_log)]  # fmt: skip


@pytest.mark.parametrize(("how", "harm"), DAMAGES)
async def test_damaged_database_is_an_error_with_advice(
    written: dict[str, Path], tmp_path: Path, how: str, harm: Callable[[Path], None]
) -> None:
    shutil.copytree(written[how], tmp_path, dirs_exist_ok=True)
    harm(tmp_path / "g.sqlite")
    for _ in range(2):
        with pytest.raises(SettingsError, match=r"the knowledge .*: `local2 doctor --repair` puts it aside"):
            async with opened("sqlite", tmp_path):
                pass


async def test_full_disk_delays_writes_until_there_is_room(tmp_path: Path) -> None:
    async with opened("sqlite", tmp_path) as graph:
        store = Store(graph)
        claims = [say(turn("r1"), "Anna", "likes", "tea")]
        with full_disk():
            writing = asyncio.create_task(
                retry_while_transient(lambda: store.replace_claims(turn("r1"), claims, settled=True))
            )
            with pytest.raises(GraphUnavailable, match=r"the disk of .* is full"):
                await store.replace_claims(turn("r1"), claims, settled=True)
            with pytest.raises(GraphUnavailable, match="is full"):
                await graph.ping()
            assert await kept(store) == []
            assert not writing.done()
        await writing
        assert len(await kept(store)) == 1


async def test_a_server_that_is_away_is_an_error_that_passes() -> None:
    async with open_bolt("bolt://127.0.0.1:9", "neo4j", "x", None, LABELS, 2) as graph:
        with pytest.raises(GraphUnavailable, match="the graph server"):
            await graph.ping()
        with pytest.raises(GraphUnavailable):
            await Store(graph).count("ann")
        with pytest.raises(GraphUnavailable):
            await Store(graph).settle("ann", "r1")


@pytest.mark.parametrize("silent", ["HELLO", "BEGIN", "MATCH (n:Slow)", "COMMIT"])
async def test_a_server_that_stands_still_is_left_after_the_time_that_the_setting_gives_it(silent: str) -> None:
    async with bolt_server(silent=silent) as server, open_bolt(server.address, "ann", "x", None, [], 0.3) as graph:

        async def write() -> None:
            async with graph.transaction() as run:
                await run(Statement("", "MATCH (n:Slow) RETURN n.id AS id"), {})

        for _ in range(2):
            async with asyncio.timeout(10):
                with pytest.raises(GraphUnavailable, match=r"the graph server does not answer within 0\.3 s"):
                    await write()
        server.silent = ""
        await write()


async def test_one_of_those_who_write_at_once_writes_and_the_others_wait() -> None:
    async with bolt_server() as server, open_bolt(server.address, "ann", "x", None, [], 10) as graph:

        async def write(number: int) -> None:
            async with graph.transaction() as run:
                await run(Statement("", f"MATCH (n:Name{number}) RETURN n.id AS id"), {})

        await asyncio.gather(*(write(number) for number in range(8)))
        assert len(server.queries) == 8
        assert server.most == 1


@pytest.mark.parametrize("older", [False, True])
async def test_ids_are_made_unique_once_and_in_the_form_that_the_server_knows(older: bool) -> None:
    async with (
        bolt_server(refuses=("REQUIRE",) if older else ()) as server,
        open_bolt(server.address, "ann", "x", None, ["One", "Two"], 10) as graph,
    ):
        await asyncio.gather(
            *(graph.ping() for _ in range(4)), *(graph.read(Statement("", "MATCH (n) RETURN n"), {}) for _ in "ab")
        )
        changes = [query for query in server.queries if query[0].startswith("CREATE")]
        expected = []
        for label in ("One", "Two"):
            constraint = (
                f"CREATE CONSTRAINT local2_{label.lower()} IF NOT EXISTS FOR (n:{label}) REQUIRE n.id IS UNIQUE"
            )
            forms = [f"CREATE CONSTRAINT ON (n:{label}) ASSERT n.id IS UNIQUE", f"CREATE INDEX ON :{label}(id)"]
            # a server that has the other form takes none of them in a transaction
            expected += [(query, False) for query in [constraint, *(forms if older else [])]]
        assert changes == expected
        assert len(server.queries) == len(expected) + 6


# ── what is removed, on disk ─────────────────────────────────────────────────────────────────────────────────────


def having(word: bytes, folder: Path) -> list[str]:
    """The files in which the word is; one that goes meanwhile has it no more."""
    found = []
    for file in [Path(root) / name for root, _, names in os.walk(folder) for name in names]:
        with contextlib.suppress(FileNotFoundError):
            if word in file.read_bytes():
                found.append(file.name)
    return found


async def test_deleted_words_leave_the_files_at_once(tmp_path: Path) -> None:
    async with opened("sqlite", tmp_path) as graph:
        store = Store(graph)
        gone, stays = turn("r1"), turn("r2", session="s2")
        for number in range(50):
            other = turn(f"x{number}", session="s2")
            await store.replace_claims(other, [say(other, f"Person {number}", "likes", "tea")], settled=True)
        await store.replace_claims(gone, [say(gone, "Anna", "lives in", "Xylograph", quote="Xylograph")], settled=False)
        await store.replace_claims(stays, [say(stays, "Anna", "likes", "tea, with 'milk'")], settled=True)
        assert having(b"ylograph", tmp_path)
        await store.forget_session("ann", "s1", 200)
        assert having(b"ylograph", tmp_path) == []
        assert await store.replace_claims(gone, [say(gone, "Anna", "lives in", "Xylograph")], settled=False) is None
        assert await store.count("ann") == 51


async def test_deleted_words_leave_the_files_after_a_long_read(tmp_path: Path) -> None:
    async with opened("sqlite", tmp_path) as graph:
        store = Store(graph)
        gone = turn("r1")
        await store.replace_claims(gone, [say(gone, "Anna", "lives in", "Xylograph")], settled=False)
        with contextlib.closing(sqlite3.connect(tmp_path / "g.sqlite")) as reader:
            rows = reader.execute("SELECT * FROM claims")
            rows.fetchone()
            forgetting = asyncio.create_task(store.forget_session("ann", "s1", 200))
            await asyncio.wait({forgetting}, timeout=0.3)
            rows.close()
        await forgetting

        async def is_gone() -> bool:
            await graph.ping()
            return having(b"ylograph", tmp_path) == []

        await eventually(is_gone, 10, "the log is emptied")
