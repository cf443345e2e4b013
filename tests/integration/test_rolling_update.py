"""The last release and this one side by side on one bus, as in a rolling update: every question is answered once."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from support.forked import TESTS
from support.http_stack import ADMIN_KEY, SSE, ModelProcess, answer_in, bearer, ended, event_types, free_port, parsed
from support.http_stack import blocks as events_of
from support.stack import Participant, Participants
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus
from shared.contracts import DEAD_LETTER, QUERY_RECEIVED, RESPONSE_GENERATION
from shared.participant.registry import Registry

pytestmark = pytest.mark.slow

LAST_RELEASE = "4376d24"
HERE = TESTS.parent
_GIT = ("git", "-C", str(HERE))
# A checkout without history, or a source archive, has no code of the last release; what that release left on the bus is
# recorded, and is tested everywhere.
_KNOWN = subprocess.run([*_GIT, "cat-file", "-e", f"{LAST_RELEASE}^{{commit}}"], capture_output=True).returncode == 0
with_last_release = pytest.mark.skipif(not _KNOWN, reason="this checkout has no history")

LONG = " ".join(f"word{n}" for n in range(60))
RULES = [
    {
        "when": {"user": "^look", "tool_results": 0},
        "respond": {"tool_calls": [{"name": "probe", "args": {"text": "<<query>>", "seconds": 0.2}, "id": "call_1"}]},
    },
    {
        "when": {"user": "^toil", "tool_results": 0},
        "respond": {"tool_calls": [{"name": "probe", "args": {"text": "<<query>>", "seconds": 4}, "id": "call_1"}]},
    },
    {"when": {"user": "^look slowly", "tool_results": 1}, "respond": {"text": LONG, "pace": 0.05}},
    {"when": {"user": "^(look|toil)", "tool_results": 1}, "respond": {"text": "It says: <<result~you said [a-z ]+>>"}},
    {"when": {"user": "^slow"}, "respond": {"text": LONG, "pace": 0.05}},
    {"respond": {"text": "Turn: <<query>>"}},
]


@pytest.fixture(scope="module")
def last_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the last release."""
    tree = tmp_path_factory.mktemp("last-release")
    packed = subprocess.run([*_GIT, "archive", LAST_RELEASE], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tree, filter="data")
    return tree


@dataclass
class Mixed:
    """Participants of two releases on one Redis; `trees`: where the code of each lies."""

    server: EmbeddedRedis
    model: ModelProcess
    people: Participants
    trees: dict[str, Path]

    async def start(self, name: str, release: str, **values: Any) -> Participant:
        """A replica that is ready."""
        started = self.people.start(name, tree=self.trees[release], **values)

        async def ready() -> bool:
            assert started.alive, started.log()
            async with Bus(self.server.url, "test/waiting") as bus:
                return any(
                    info.state == "ready" and int(info.replica.rsplit("-", 2)[1]) == started.pid
                    for info in await Registry(bus, 0.0).live(name)
                )

        await eventually(ready, 30, f"{name} of the {release} release", every=0.05)
        return started

    async def gateway(self, release: str, **values: Any) -> httpx.AsyncClient:
        """A client of a new gateway."""
        port = free_port()
        await self.start("gateway", release, api_port=port, admin_key=ADMIN_KEY, keepalive=1, **values)
        return self.client(port)

    def client(self, port: int) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers=bearer(ADMIN_KEY), timeout=60, trust_env=False, verify=False
        )

    def shown_to_the_model(self, query: str) -> list[str]:
        """What was said, as the last request for a query had it."""
        body = self.model.requests(query)[-1]["body"]
        return [message["content"] for message in body["messages"] if message["role"] in ("user", "assistant")]

    async def settled(self) -> None:
        """Returns when nobody has work left; everything was answered once then, and every call ran once."""
        with redis.Redis.from_url(self.server.url) as raw:

            def idle() -> bool:
                groups = [
                    group
                    for stream in (QUERY_RECEIVED.stream, "local2:tool.request.probe")
                    if raw.exists(stream)
                    for group in raw.xinfo_groups(stream)
                ]
                return not any(group["pending"] or group["lag"] for group in groups)

            await eventually(idle, 20, "nobody has work left", every=0.05)
            assert raw.xlen(DEAD_LETTER.stream) == 0
            assert {int(count) for count in raw.hvals("effects")} <= {1}, "a call ran twice"
            queries = [entry_id.decode() for entry_id, _ in raw.xrange(QUERY_RECEIVED.stream)]
            for query_id in queries:
                journal = [fields[b"type"].decode() for _, fields in raw.xrange(f"local2:journal:{query_id}:A")]
                terminal = [kind for kind in journal if kind in ("completed", "failed", "cancelled")]
                assert len(terminal) == 1, journal
            published = [fields[b"correlation_id"].decode() for _, fields in raw.xrange(RESPONSE_GENERATION.stream)]
            assert len(published) == len(set(published)), "an answer was published twice"


@contextlib.asynccontextmanager
async def mixed(folder: Path, trees: dict[str, Path], server: EmbeddedRedis) -> AsyncIterator[Mixed]:
    model = ModelProcess(folder / "model.log")
    try:
        model.start()
        model.play(RULES)
        with Participants(server.url, model.url, folder / "people") as people:
            yield Mixed(server, model, people, trees)
    finally:
        model.close()


@pytest.fixture
async def both(tmp_path: Path, last_release: Path, redis_server: EmbeddedRedis) -> AsyncIterator[Mixed]:
    async with mixed(tmp_path, {"last": last_release, "this": HERE}, redis_server) as running:
        yield running


async def ask(http: httpx.AsyncClient, query: str, session: str) -> str:
    accepted = await http.post("/query?wait=false", json={"query": query, "session_id": session})
    assert accepted.status_code == 202, accepted.text
    query_id: str = accepted.json()["query_id"]
    return query_id


async def whole(http: httpx.AsyncClient, query_id: str) -> bytes:
    """The stream of a query to its end."""
    response = await http.get(f"/queries/{query_id}/events", headers=SSE)
    assert response.status_code == 200, response.text
    assert ended(response.content), response.content[-500:]
    return response.content


async def answered(http: httpx.AsyncClient, query: str, session: str) -> str:
    """An answer over the events of its query."""
    return answer_in(await whole(http, await ask(http, query, session)))


def text_in(raw: bytes) -> str:
    """The pieces of an answer as a client shows them."""
    pieces: list[tuple[list[int], str]] = []
    for entry_id, kind, data in map(parsed, events_of(raw)):
        at = [int(part) for part in entry_id.split("-")]
        if kind == "answer":
            pieces.append((at, data["text"]))
        elif kind == "restarted":
            valid = [int(part) for part in data["discard_after"].split("-")]
            pieces = [piece for piece in pieces if piece[0] <= valid]
    return "".join(text for _, text in pieces)


async def turns(http: httpx.AsyncClient, session: str) -> list[str]:
    """A session's questions as the gateway tells them."""
    found = (await http.get(f"/sessions/{session}")).json()["turns"]
    return [turn["query"] for turn in found]


@with_last_release
@pytest.mark.parametrize(
    ("gateway", "generator", "worker"),
    [("last", "this", "last"), ("this", "last", "this")],
)
async def test_participants_of_two_releases_answer_together(
    both: Mixed, gateway: str, generator: str, worker: str
) -> None:
    # fewer than there are turns: none of them may stay in its lane
    asking = both.gateway(gateway, max_session_backlog=2)
    _, _, http = await asyncio.gather(both.start("probe", worker), both.start("generator", generator), asking)
    async with http:
        assert await answered(http, "look at this", "s") == "It says: you said look at this"
        assert await answered(http, "and then", "s") == "Turn: and then"
        assert "look at this" in both.shown_to_the_model("and then")
        first = await ask(http, "slow one", "s")
        second = await ask(http, "after it", "s")
        assert text_in(await whole(http, first)) == LONG
        assert answer_in(await whole(http, second)) == "Turn: after it"
        assert LONG in both.shown_to_the_model("after it")
        assert await turns(http, "s") == ["look at this", "and then", "slow one", "after it"]
        stopped = await ask(http, "slow and stopped", "t")
        await eventually(lambda: both.model.requests("slow and stopped"))
        assert (await http.post(f"/queries/{stopped}/cancel")).is_success
        assert event_types(await whole(http, stopped))[-1] == "cancelled"
        waiting = await http.post("/query", json={"query": "waited for", "session_id": "s"})
        assert waiting.json()["answer"] == "Turn: waited for"
    await both.settled()


@with_last_release
@pytest.mark.parametrize(("before", "after"), [("last", "this"), ("this", "last")])
async def test_a_session_goes_on_when_its_generator_is_replaced(both: Mixed, before: str, after: str) -> None:
    _, leaving, coming, http, other = await asyncio.gather(
        both.start("probe", before), both.start("generator", before), both.start("generator", after),
        both.gateway(before), both.gateway(after),
    )  # fmt: skip
    async with http, other:
        for n in range(6):
            # both generators get some of them
            assert await answered(http if n % 2 else other, f"turn {n}", "s") == f"Turn: turn {n}"
            said = both.shown_to_the_model(f"turn {n}")
            assert [f"turn {m}" for m in range(n)] == [text for text in said if text.startswith("turn")][:n]
        leaving.process.terminate()
        await eventually(lambda: not leaving.alive, 20)
        assert await answered(other, "look on", "s") == "It says: you said look on"
        assert "Turn: turn 5" in both.shown_to_the_model("look on")
        assert await turns(other, "s") == [*[f"turn {n}" for n in range(6)], "look on"]
    assert coming.alive
    await both.settled()


@with_last_release
# the update as it is done, and going back in an emergency; what a killed one of the last release leaves is below
@pytest.mark.parametrize(("before", "after", "end"), [("last", "this", "terminate"), ("this", "last", "kill")])
async def test_an_answer_under_way_is_taken_over_by_the_other_release(
    both: Mixed, before: str, after: str, end: str
) -> None:
    _, leaving, http, other = await asyncio.gather(
        both.start("probe", before), both.start("generator", before), both.gateway(before), both.gateway(after)
    )
    async with http, other:
        query_id = await ask(http, "look slowly", "s")
        following = [asyncio.create_task(whole(one, query_id)) for one in (http, other)]
        await eventually(lambda: len(both.model.requests("look slowly")) == 2)
        # one more of the session waits for it
        next_id = await ask(http, "what next", "s")
        getattr(leaving.process, end)()
        await both.start("generator", after)
        streams = await asyncio.wait_for(asyncio.gather(*following), 60)
        assert event_types(streams[0]).count("claimed") == 2
        assert [answer_in(raw) for raw in streams] == [LONG, LONG]
        assert [text_in(raw) for raw in streams] == [LONG, LONG]
        assert answer_in(await whole(other, next_id)) == "Turn: what next"
        assert LONG in both.shown_to_the_model("what next")
    await both.settled()


@with_last_release
@pytest.mark.parametrize(("before", "after"), [("last", "this"), ("this", "last")])
async def test_a_call_that_waits_for_a_worker_is_run_by_one_of_the_other_release(
    both: Mixed, before: str, after: str
) -> None:
    leaving, _, http = await asyncio.gather(
        both.start("probe", before, concurrency=1), both.start("generator", before), both.gateway(after)
    )
    async with http:
        running = await ask(http, "toil", "s")
        with redis.Redis.from_url(both.server.url) as raw:
            await eventually(lambda: raw.hexists("effects", "toil"))
        waiting = await ask(http, "look there", "t")
        await both.start("probe", after)
        # it finishes what it has begun, or is asked again: never both
        leaving.process.terminate()
        assert answer_in(await whole(http, waiting)) == "It says: you said look there"
        assert answer_in(await whole(http, running)) == "It says: you said toil"


def recorded(url: str) -> None:
    """What the last release left when it was killed: two answered questions, one in the middle of its answer with its
    call done, one behind it in the same session, and one that nobody had read."""
    commands = json.loads(Path(__file__).with_name("last_release.json").read_text(encoding="utf-8"))
    with redis.Redis.from_url(url) as raw:
        in_a_minute = str((raw.time()[0] + 60) * 1000)
        for command in commands:
            raw.execute_command(*[in_a_minute if word == "DEADLINE" else word for word in command])


async def test_what_the_last_release_left_unfinished_is_finished(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    recorded(redis_server.url)
    with redis.Redis.from_url(redis_server.url) as raw:
        look, then, slowly, after, new = [entry_id.decode() for entry_id, _ in raw.xrange(QUERY_RECEIVED.stream)]
    async with mixed(tmp_path, {"this": HERE}, redis_server) as on:
        _, _, http = await asyncio.gather(on.start("probe", "this"), on.start("generator", "this"), on.gateway("this"))
        async with http:
            assert answer_in(await whole(http, look)) == "It says: you said look at this"
            assert answer_in(await whole(http, then)) == "Turn: and then"
            assert text_in(await whole(http, slowly)) == LONG
            assert answer_in(await whole(http, after)) == "Turn: after it"
            assert answer_in(await whole(http, new)) == "Turn: new one"
            said = on.shown_to_the_model("after it")
            assert {"look at this", "and then", "look slowly", LONG} <= set(said)
            assert await turns(http, "s") == ["look at this", "and then", "look slowly", "after it"]
            # the call was done: its result is in the journal
            assert len(on.model.requests("look slowly")) == 1
            await on.settled()
            assert (await http.delete("/sessions/s")).is_success
            assert (await http.get("/sessions/s")).status_code == 404
            assert (await http.get(f"/queries/{look}")).status_code == 404
