"""One behaviour for every graph: the embedded one, and a server where LOCAL2_TEST_BOLT names an empty one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.bolt_server import bolt_server
from support.waiting import eventually

from services.knowledge.bolt import open_bolt
from services.knowledge.claims import Claim, Turn, claim
from services.knowledge.graph import Graph, GraphUnavailable
from services.knowledge.ladybug import GraphLocked, LadybugGraph, open_ladybug
from services.knowledge.names import USER
from services.knowledge.repair import repair
from services.knowledge.search import Search
from services.knowledge.store import LABELS, TABLES, Store
from shared.errors import SettingsError
from shared.participant.background import retry_while_transient

BOLT = os.environ.get("LOCAL2_TEST_BOLT", "")
BUFFER = 32 * 1024 * 1024
KINDS = ["ladybug", *(["bolt"] if BOLT else [])]


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Graph]:
    if kind == "ladybug":
        async with open_ladybug(folder / "g.lbug", TABLES, BUFFER) as graph:
            yield graph
    else:
        user, password = os.environ.get("LOCAL2_TEST_BOLT_USER", ""), os.environ.get("LOCAL2_TEST_BOLT_PASSWORD", "")
        async with open_bolt(BOLT, user, password, None, LABELS, 10) as graph:
            async with graph.transaction() as run:
                for label in LABELS:
                    await run(f"MATCH (n:{label}) DETACH DELETE n", {})
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
    return sorted((one.subject_key, one.relation, one.object_key) for one in await store.all(user))


async def test_a_source_is_written_in_place_of_what_it_said_before(store: Store) -> None:
    first = turn("r1")
    claims = [say(first, "Anna", "lives in", "Lyon"), say(first, "Anna", "likes", "tea")]
    assert await store.hear(first, claims, settled=False) is not None
    before = await store.version("ann")
    source = await store.source("ann", "r1")
    assert source is not None
    assert (source.settled, source.turn.query) == (False, "the words")
    assert await store.hear(first, claims, settled=False) is not None
    assert await kept(store) == [("anna", "likes", "tea"), ("anna", "lives in", "lyon")]
    assert await store.version("ann") > before
    assert await store.hear(first, [say(first, "Anna", "lives in", "Porto")], settled=True) is not None
    assert await kept(store) == [("anna", "lives in", "porto")]
    # a name of which nothing is said any more is gone, and so are the words once they are read
    assert sorted(await store.keys("ann")) == ["anna", "porto"]
    source = await store.source("ann", "r1")
    assert source is not None
    assert (source.settled, source.turn.query) == (True, "")
    # settled, it stays as it is
    assert await store.hear(first, claims, settled=True) is None
    assert await kept(store) == [("anna", "lives in", "porto")]


async def test_what_is_forgotten_goes_alone_and_stays_away(store: Store) -> None:
    one, other, third = turn("r1"), turn("r2", session="s2"), turn("r3", session="s3", said=300)
    for each in (one, other, third):
        await store.hear(each, [say(each, "Anna", "lives in", "Lyon")], settled=True)
    assert await store.forget("ann", ["r1", "unknown"], 200) == 1
    assert await store.forget_session("ann", "s2", 200) == 1
    # said after the deletion of its session
    assert await store.forget_session("ann", "s3", 200) == 0
    assert [claim.source for claim in await store.all("ann")] == ["r3"]
    for late in (one, other):
        assert await store.hear(late, [say(late, "Anna", "lives in", "Lyon")], settled=True) is None
    assert await store.count("ann") == 1
    assert await store.forget_user("ann", 1_000) == 1
    assert await store.keys("ann") == []
    assert await store.hear(turn("r4", said=999), [], settled=True) is None
    assert await store.hear(turn("r5", said=1_001), [], settled=True) is not None


async def test_users_share_nothing_whatever_they_are_called(store: Store) -> None:
    for user in ("ann", "bob"):
        own = turn("r1", user=user)
        await store.hear(own, [say(own, "Anna", "lives in", "Lyon" if user == "ann" else "Rome")], settled=False)
    assert await kept(store) == [("anna", "lives in", "lyon")]
    assert [one.object_key for one in await store.touching("bob", ["anna"], 9)] == ["rome"]
    # an export of one that the other takes in changes nothing of the first
    assert await store.take("bob", [*await store.all("ann")] * 2) == 1
    assert await store.count("bob") == 2
    assert await store.take("bob", await store.all("ann")) == 0
    assert await kept(store) == [("anna", "lives in", "lyon")]
    assert await store.forget_user("bob", 1_000) == 1
    assert await store.count("ann") == 1
    assert (await store.source("ann", "r1")) is not None


async def test_names_are_found_by_what_is_said_of_them(store: Store) -> None:
    said = turn("r1")
    claims = [say(said, "me", "also called", "Eva"), say(said, "Anna", "married to", "Tom"),
              say(said, "Tom", "lives in", "Rome"), say(said, "Anna", "likes", "tea")]  # fmt: skip
    await store.hear(said, claims, settled=True)
    assert [(one.subject_key, one.object_key) for one in await store.aliases("ann")] == [(USER, "eva")]
    assert {one.object_key for one in await store.touching("ann", ["tom"], 9)} == {"tom", "rome"}
    assert len(await store.touching("ann", ["tom", "anna"], 1)) == 2
    assert [one.object_key for one in await store.places("ann", ["tom"], ["lives in"], 9)] == ["rome"]
    await store.unsay("ann", [one for one in claims if one.relation == "likes"])
    assert "tea" not in await store.keys("ann")


async def test_a_fact_that_is_looked_up_by_a_claim_is_that_of_the_whole_graph(store: Store) -> None:
    told = [
        ("Anna", "lives in", "Lyon"), ("Annie", "lives in", "Porto"), ("Annie", "also called", "Anna"),
        ("Anna", "likes", "tea"), ("Annie", "likes", "tea"), ("Tom", "married to", "Eva"), ("Eva", "married to", "Jan"),
        ("Tom", "no longer likes", "tea"), ("me", "am called", "Eva"), ("me", "lives in", "Bonn"),
    ]  # fmt: skip
    for number, (subject, relation, object_) in enumerate(told):
        said = turn(f"r{number}", said=100 + number)
        await store.hear(said, [say(said, subject, relation, object_, subject_kind="person")], settled=True)
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
    while page := await store.page("ann", paged[-1] if paged else "", 3):
        paged += [one.id for one in page]
    assert paged == claims


async def test_text_is_a_value_and_never_a_query(store: Store) -> None:
    wild = "x'}) DETACH DELETE n // $user \\ \u2028 \""
    mine = turn("r1", session=wild, user="ann")
    await store.hear(mine, [say(mine, "Anna", "likes", "tea", quote=wild)], settled=False)
    other = turn(wild, user="bob")
    await store.hear(other, [say(other, "Tom", "likes", "tea")], settled=True)
    assert await store.forget_session("bob", wild, 1_000) == 0
    assert await store.touching("bob", [wild, "anna"], 5) == []
    assert await kept(store) == [("anna", "likes", "tea")]
    assert (await store.all("ann"))[0].quote == " ".join(wild.split())


async def test_of_a_transaction_that_fails_nothing_is_there(tmp_path: Path) -> None:
    async with opened("ladybug", tmp_path) as graph:
        store = Store(graph)

        async def failing() -> None:
            async with graph.transaction() as run:
                await run("MERGE (u:KnowledgeUser {id: $user}) SET u.version = 5", {"user": "ann"})
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await failing()
        assert await store.version("ann") == 0
        with pytest.raises(RuntimeError, match="Parser exception"):
            await graph.read("NO QUERY", {})
        tasks = [
            store.hear(turn(f"r{n}"), [say(turn(f"r{n}"), "Anna", "likes", "tea")], settled=True) for n in range(5)
        ]
        await asyncio.gather(*tasks)
        assert await store.count("ann") == 5


async def test_a_graph_that_is_gone_or_broken_is_said_and_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.knowledge.ladybug._LOCK_PATIENCE", 0.1)
    async with opened("ladybug", tmp_path):
        pass
    file = tmp_path / "g.lbug"
    whole = file.read_bytes()
    file.write_bytes(b"no graph at all" * 100)
    with pytest.raises(SettingsError, match="cannot be read"):
        async with opened("ladybug", tmp_path):
            pass
    # what is put aside can be looked at, and a new one is begun
    said = await asyncio.to_thread(repair, file, BUFFER)
    assert "was put aside as" in said[1]
    assert await asyncio.to_thread(repair, file, BUFFER) == []
    async with opened("ladybug", tmp_path):
        with pytest.raises(GraphLocked, match="in use"):
            await asyncio.to_thread(repair, file, BUFFER)
    assert await asyncio.to_thread(repair, file, BUFFER) == []
    file.unlink()
    with pytest.raises(SettingsError, match="was there before"):
        async with opened("ladybug", tmp_path):
            pass
    file.write_bytes(whole)
    async with opened("ladybug", tmp_path) as graph:
        await graph.ping()


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def lost_its_log(file: Path) -> None:
    """As when the log of a process that died is not copied along."""
    file.with_name(f"{file.name}.wal").unlink()


def zeroed(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:4096] + bytes(len(data) - 4096))


def cut(file: Path) -> None:
    os.truncate(file, 4096)


def garbled_log(file: Path) -> None:
    log = file.with_name(f"{file.name}.wal")
    data = log.read_bytes()
    log.write_bytes(data[: len(data) // 2] + b"\x7f" * 600 + data[len(data) // 2 + 600 :])


_FILL = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from services.knowledge.claims import Turn, claim
from services.knowledge.ladybug import open_ladybug
from services.knowledge.store import TABLES, Store

async def main() -> None:
    async with open_ladybug(Path(sys.argv[1]), TABLES, 32 << 20) as graph:
        for number in range(40):
            turn = Turn(f"r{number}", "ann", "s", number, "")
            known = claim(turn, f"Person{number}", "likes", f"thing {number}", by="model")
            await Store(graph).hear(turn, [known], settled=True)
        if sys.argv[2] == "dies":
            os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a graph of 40 claims: one that was closed, and one whose process was killed."""
    root = Path(__file__).parents[2]
    found = {}
    for how in ("closes", "dies"):
        found[how] = tmp_path_factory.mktemp(how)
        subprocess.run([sys.executable, "-c", _FILL, str(found[how] / "g.lbug"), how, str(root)], check=how == "closes")
    return found


@pytest.mark.parametrize(
    ("how", "harm"),
    [("closes", emptied), ("closes", cut), ("closes", zeroed), ("dies", emptied), ("dies", lost_its_log),
     ("dies", garbled_log)],
)  # fmt: skip
async def test_what_is_left_of_a_file_is_never_taken_for_an_empty_graph(
    written: dict[str, Path], tmp_path: Path, how: str, harm: Callable[[Path], None]
) -> None:
    shutil.copytree(written[how], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "g.lbug"
    harm(file)
    for _ in range(2):
        with pytest.raises(SettingsError, match=r"the knowledge .*: `local2 doctor --repair` puts it aside"):
            async with opened("ladybug", tmp_path):
                pass
    assert "was put aside as" in (await asyncio.to_thread(repair, file, BUFFER))[1]
    # one in which nothing has been said yet is none that was lost
    for _ in range(2):
        async with opened("ladybug", tmp_path) as graph:
            count = await Store(graph).count("ann")
            # what stands in a log before the damage is kept
            assert 0 < count < 40 if harm is garbled_log else count == 0
    assert not [name for name in os.listdir(tmp_path) if ".saved" in name]


async def test_what_a_full_disk_has_left_of_a_log_is_kept_but_for_its_end(
    written: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(written["dies"], tmp_path, dirs_exist_ok=True)
    log = tmp_path / "g.lbug.wal"
    # inside the last one of forty
    os.truncate(log, log.stat().st_size - 40)
    with log.open("ab") as file:
        file.write(bytes(40))
    with pytest.raises(SettingsError, match="cannot be read"):
        async with opened("ladybug", tmp_path):
            pass
    said = await asyncio.to_thread(repair, tmp_path / "g.lbug", BUFFER)
    assert said[-1] == "its log was read up to the damage; a backup brings back what came later"
    async with opened("ladybug", tmp_path) as graph:
        assert await Store(graph).count("ann") == 39


async def test_on_a_full_disk_nothing_is_written_and_what_waits_is_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened("ladybug", tmp_path) as graph:
        store = Store(graph)
        claims = [say(turn("r1"), "Anna", "likes", "tea")]
        with monkeypatch.context() as full:
            # more than any disk has
            full.setattr("shared.participant.disk._KEPT", 2**80)
            full.setattr("shared.participant.disk._SHARE", 1)
            writing = asyncio.create_task(retry_while_transient(lambda: store.hear(turn("r1"), claims, settled=True)))
            with pytest.raises(GraphUnavailable, match=r"the disk of .* is full"):
                await store.hear(turn("r1"), claims, settled=True)
            assert isinstance(graph, LadybugGraph)
            for asked in (graph.renew(), graph.ping()):
                with pytest.raises(GraphUnavailable, match="is full"):
                    await asked
            assert await kept(store) == []
            assert not writing.done()
        await writing
        assert len(await kept(store)) == 1


async def test_a_killed_process_leaves_a_graph_that_is_whole(written: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(written["dies"], tmp_path, dirs_exist_ok=True)
    async with opened("ladybug", tmp_path) as graph:
        assert await Store(graph).count("ann") == 40
    assert await asyncio.to_thread(repair, tmp_path / "g.lbug", BUFFER) == []


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
                await run("MATCH (n:Slow) RETURN n.id AS id", {})

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
                await run(f"MATCH (n:Name{number}) RETURN n.id AS id", {})

        await asyncio.gather(*(write(number) for number in range(8)))
        assert len(server.queries) == 8
        assert server.most == 1


@pytest.mark.parametrize("older", [False, True])
async def test_ids_are_made_unique_once_and_in_the_form_that_the_server_knows(older: bool) -> None:
    async with (
        bolt_server(refuses=("REQUIRE",) if older else ()) as server,
        open_bolt(server.address, "ann", "x", None, ["One", "Two"], 10) as graph,
    ):
        await asyncio.gather(*(graph.ping() for _ in range(4)), *(graph.read("MATCH (n) RETURN n", {}) for _ in "ab"))
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


async def test_of_what_is_removed_no_word_is_left_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.knowledge.ladybug._GATHER", 0.0)
    # what a process that died has left
    (tmp_path / "g.lbug.export").mkdir()
    (tmp_path / "g.lbug.export" / "nodes.parquet").write_bytes(b"Xylograph")
    async with opened("ladybug", tmp_path) as graph:
        assert having(b"ylograph", tmp_path) == []
        store = Store(graph)
        gone, stays = turn("r1"), turn("r2", session="s2")
        await store.hear(gone, [say(gone, "Anna", "lives in", "Xylograph")], settled=False)
        await store.hear(stays, [say(stays, "Anna", "likes", "tea, with 'milk'")], settled=True)
        await store.forget_session("ann", "s1", 200)
        assert (tmp_path / "g.lbug.removed").exists()
        await eventually(lambda: not (tmp_path / "g.lbug.removed").exists(), what="the file is written anew")
        assert having(b"ylograph", tmp_path) == []
        assert len(await kept(store)) == 1
        # what was deleted is still refused, and the file can be written to
        assert await store.hear(gone, [say(gone, "Anna", "lives in", "Xylograph")], settled=False) is None
        new = turn("r3", session="s3")
        assert await store.hear(new, [say(new, "Bea", "lives in", "Lyon")], settled=True) is not None
    async with opened("ladybug", tmp_path) as graph:
        assert len(await kept(Store(graph))) == 2


async def test_whoever_reads_and_writes_meanwhile_waits(tmp_path: Path) -> None:
    async with open_ladybug(tmp_path / "g.lbug", TABLES, BUFFER) as graph:
        store = Store(graph)
        await store.hear(turn("r1"), [say(turn("r1"), "Anna", "likes", "tea")], settled=True)
        assert isinstance(graph, LadybugGraph)
        for _ in range(3):
            second = turn("r2")
            found = await asyncio.gather(
                graph.renew(),
                *(kept(store) for _ in range(20)),
                store.hear(second, [say(second, "Bea", "likes", "milk")], settled=False),
            )
            assert all(("anna", "likes", "tea") in one for one in found[1:-1])
        assert len(await kept(store)) == 2


async def test_a_read_that_runs_is_waited_for_and_others_are_answered_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_ladybug(tmp_path / "g.lbug", TABLES, BUFFER) as graph:
        store = Store(graph)
        await store.hear(turn("r1"), [say(turn("r1"), "Anna", "likes", "tea")], settled=True)
        assert isinstance(graph, LadybugGraph)
        ended, answered = threading.Event(), threading.Event()
        closed: list[bool] = []
        disconnect, copy = graph._disconnect, graph._copy

        def told() -> None:
            closed.append(ended.is_set())
            disconnect()

        def slow() -> None:
            assert answered.wait(60)
            copy()

        monkeypatch.setattr(graph, "_disconnect", told)
        monkeypatch.setattr(graph, "_copy", slow)
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(graph._reader, ended.wait)
        renewing = asyncio.create_task(graph.renew())
        loop.call_later(0.2, ended.set)
        await reading
        # it waits in the line of readers behind the file's first change of hands, and is answered before the second
        assert await kept(store) == [("anna", "likes", "tea")]
        answered.set()
        await renewing
        assert closed == [True, True]
        assert await kept(store) == [("anna", "likes", "tea")]


async def test_a_graph_larger_than_its_share_of_memory_is_written_anew(tmp_path: Path) -> None:
    dice = random.Random(1)
    async with open_ladybug(tmp_path / "g.lbug", TABLES, BUFFER) as graph:
        store = Store(graph)
        for number in range(60):
            words = dice.randbytes(20_000).hex()
            await store.hear(Turn(f"r{number}", "ann", "s1", 100, words, words), [], settled=False)
        assert isinstance(graph, LadybugGraph)
        await graph.renew()
        assert await store.forget_session("ann", "s1", 200) == 60


async def test_a_file_that_cannot_be_written_anew_stays_as_it_was_and_is_due(tmp_path: Path) -> None:
    async with open_ladybug(tmp_path / "g.lbug", TABLES, BUFFER) as graph:
        store = Store(graph)
        await store.hear(turn("r1"), [say(turn("r1"), "Anna", "likes", "tea")], settled=True)
        graph.removed()
        # in the way of the copy
        (tmp_path / "g.lbug.export").write_text("a file")
        assert isinstance(graph, LadybugGraph)
        with pytest.raises(GraphUnavailable, match=r"written anew|refuses it"):
            await graph.renew()
        assert len(await kept(store)) == 1
        assert (tmp_path / "g.lbug.removed").exists()
