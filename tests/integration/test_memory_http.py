"""A user's memory over HTTP: a real gateway and a real memory, several users, and a memory that is not there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
import pytest_asyncio
import redis
from support.http_gateway import Site, client, gateway_settings, generating, serving
from support.memories import MemoryClient, asking, critique, memory_settings, remembering, response
from support.services import announced, running
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.memory.service import app
from shared.contracts import TOOL_ALIASES
from shared.envelope import now_ms
from shared.testing.model_server import ScriptedModelServer
from shared.zones import clock_line, local_date

pytestmark = pytest.mark.asyncio(loop_scope="module")
CAPITAL = ("The capital of Australia is Canberra, not Sydney.", "Right, Canberra is the capital of Australia.")


class House:
    """A gateway, a generator and a memory for all tests of this file; each has users of its own."""

    def __init__(self, site: Site, memory: MemoryClient, redis_url: str) -> None:
        self.site = site
        self.memory = memory
        self.redis_url = redis_url

    async def said(self, user: str, *texts: str, session_id: str = "s1") -> list[str]:
        """Has the memory take in one answer a text; their engrams' ids."""
        spoken = [response(text, "Yes.", user_id=user, session_id=session_id) for text in texts]
        await self.memory.publish(*spoken)
        await self.memory.idle()
        return [one.response_id for one in spoken]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("house")
    async with (
        serving(gateway_settings(server_url, folder)) as site,
        generating(server_url, folder),
        remembering(server_url, folder) as memory,
    ):
        yield House(site, memory, server_url)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_what_was_said_is_searched_listed_shown_and_forgotten(house: House) -> None:
    said = response(*CAPITAL, user_id="eva")
    await house.memory.publish(said, critique(said, 5))
    await house.memory.idle()
    async with await house.site.key("eva") as eva:
        found = (await eva.get("/memory", params={"query": "capital of Australia"})).json()
        assert [(hit["id"], hit["score"], hit["mark"]) for hit in found["hits"]] == [
            (said.response_id, 5, "GOOD EXAMPLE")
        ]
        assert {"similarity", "keyword_rank", "critic", "age"} <= found["hits"][0]["why"].keys()
        assert f"Q: {CAPITAL[0]}" in found["text"]
        listed = (await eva.get("/memory/engrams")).json()
        assert [(e["id"], e["respondent_id"], e["score"]) for e in listed["engrams"]] == [(said.response_id, "A", 5)]
        path = f"/memory/engrams/{said.response_id}"
        assert (await eva.get(path)).json()["answer"] == CAPITAL[1]
        assert (await eva.delete(path)).json() == {"id": said.response_id, "deleted": True}
        assert code(await eva.get(path)) == code(await eva.delete(path)) == (404, "not_found")
        assert (await eva.get("/memory", params={"query": "capital of Australia"})).json()["hits"] == []


async def test_a_search_takes_several_queries_a_log_and_a_second_look(house: House) -> None:
    first, second, third = await house.said("ada", "The lighthouse is red.", "The boat is blue.", "Bread is baked.")
    second_look = {"when": {"system": "You choose which memories help"}}
    async with await house.site.key("ada") as ada:

        async def found(**params: Any) -> dict[str, Any]:
            answer = await ada.get("/memory", params=params)
            assert answer.status_code == 200, answer.text
            return answer.json()  # type: ignore[no-any-return]

        plain = await found(query="lighthouse", n_results=1, queries=["boat", "lighthouse"])
        assert {hit["id"] for hit in plain["hits"]} == {first, second}
        assert (plain["rerank"], plain["log"]) == (None, None)
        logged = await found(query="boat", n_results=1, log=True, hybrid=True)
        assert [one["id"] for one in logged["log"]] == [first, second, third]
        assert "=== CONVERSATION LOGS ===" in logged["text"]
        house.memory.server.set_rules([{**second_look, "respond": {"text": '{"helpful": [1]}'}}])
        reranked = await found(query="boat", do_rerank=True)
        assert ([hit["id"] for hit in reranked["hits"]], reranked["rerank"]["trouble"]) == ([second], None)
        house.memory.server.set_rules([{**second_look, "respond": {"status": 500, "error": "broken"}}])
        failed = await found(query="boat", do_rerank=True)
        assert second in [hit["id"] for hit in failed["hits"]]
        assert "not reranked" in failed["rerank"]["trouble"]
        house.memory.server.set_rules([])
        # as the model calls it
        body = {"args": {"queries": ["boat", "lighthouse"], "n_results": 1, "log": True}}
        called = (await ada.post("/tools/search_memory/call", json=body)).json()
        assert {hit["id"] for hit in called["data"]["hits"]} == {first, second}
        assert called["result"].startswith("[Memory recall")
        assert "=== CONVERSATION LOGS ===" in called["result"]
        # and as it calls it, too
        for queries in (["", "boat"], "boat"):
            args = {"query": None, "queries": queries, "log": None, "n_results": None}
            called = (await ada.post("/tools/search_memory/call", json={"args": args})).json()
            assert second in [hit["id"] for hit in called["data"]["hits"]]
        for wrong in ({"args": {}}, {"args": {"queries": []}}, {"args": {"query": "x", "n_results": 0}}):
            assert (await ada.post("/tools/search_memory/call", json=wrong)).json()["error"]
        assert code(await ada.get("/memory", params={"query": "x", "queries": ["y"] * 9})) == (422, "invalid_request")


async def test_a_topic_is_put_read_replaced_and_deleted(house: House) -> None:
    async with await house.site.key("tom") as tom:
        path = "/memory/topics/user.preferred_language"
        for language in ("Erlang", "Elixir"):
            assert (await tom.put(path, json={"content": f"Tom prefers {language}."})).status_code == 200
        assert (await tom.get(path)).json()["content"] == "Tom prefers Elixir."
        assert [t["topic"] for t in (await tom.get("/memory/topics")).json()["topics"]] == ["user.preferred_language"]
        for slash in ("/", "%2F"):
            assert (await tom.put(f"/memory/topics/user.a{slash}b", json={"content": slash})).status_code == 200
            assert (await tom.get("/memory/topics/user.a%2Fb")).json()["content"] == slash
        assert (await tom.delete("/memory/topics/user.a/b")).json() == {"topic": "user.a/b", "deleted": True}
        refused = await tom.put("/memory/topics/language", json={"content": "x"})
        assert code(refused) == (422, "invalid_request")
        assert "topic must start with user., project. or constraint." in refused.text
        assert (await tom.delete(path)).json()["deleted"]
        assert code(await tom.get(path)) == code(await tom.delete(path)) == (404, "not_found")


async def test_another_users_ids_are_not_found_and_nothing_of_his_is_shown_or_removed(house: House) -> None:
    async with await house.site.key("ida") as ida, await house.site.key("ivo") as ivo:
        query_id, engram_id = await asked(house, ida, "ida", "ida-1")
        assert (await ida.put("/memory/topics/user.pet", json={"content": "A cat."})).status_code == 200
        for method, path in (
            ("GET", f"/memory/engrams/{engram_id}"),
            ("DELETE", f"/memory/engrams/{engram_id}"),
            ("GET", "/memory/topics/user.pet"),
            ("DELETE", "/memory/topics/user.pet"),
            ("GET", "/sessions/ida-1"),
            ("DELETE", "/sessions/ida-1"),
            ("GET", f"/queries/{query_id}"),
        ):
            answer = await ivo.request(method, path)
            assert code(answer) == (404, "not_found"), path
            assert "cat" not in answer.text
            assert "lighthouse" not in answer.text
        assert (await ivo.get("/memory", params={"query": "lighthouse cat"})).json()["hits"] == []
        listed = (await ida.get("/memory/engrams", params={"limit": 1})).json()
        stolen = await ivo.get("/memory/engrams", params={"cursor": f"{listed['engrams'][0]['time'] + 1}|zzz"})
        assert stolen.json()["engrams"] == []
        assert (await ivo.get("/memory/export")).text == ""
        line = {"query": "mine", "answer": "x", "user_id": "ida", "metadata": {"id": engram_id}}
        assert (await imported(ivo, line)).json()["imported"] == 1
        assert (await ivo.delete("/memory", params={"everything": True})).json()["deleted"] == 1
        assert (await ida.get(f"/memory/engrams/{engram_id}")).json()["query"] == "say the lighthouse is red"
        assert (await ida.get("/memory/topics/user.pet")).json()["content"] == "A cat."


async def asked(house: House, http: httpx.AsyncClient, user: str, session_id: str) -> tuple[str, str]:
    """A query through the API, and the engram of its answer; their ids."""
    text = "say the lighthouse is red"
    answer = (await http.post("/query", json={"query": text, "session_id": session_id})).json()
    spoken = response(text, answer["answer"], query_id=answer["query_id"], user_id=user, session_id=session_id)
    await house.memory.publish(spoken)
    await house.memory.idle()
    return answer["query_id"], spoken.response_id


async def test_a_whole_memory_is_exported_deleted_and_taken_in_again(house: House) -> None:
    said = [response(f"Question {n}?", "Yes.", user_id="max") for n in range(3)]
    await house.memory.publish(*said, critique(said[0], 5))
    await house.memory.idle()
    async with await house.site.key("max") as http:
        await http.put("/memory/topics/user.pet", json={"content": "A cat."})
        exported = await http.get("/memory/export")
        assert exported.headers["content-type"].startswith("application/x-ndjson")
        lines = [orjson.loads(line) for line in exported.text.splitlines()]
        assert len(lines) == 4
        assert code(await http.delete("/memory")) == (422, "invalid_request")
        assert (await http.delete("/memory", params={"everything": True})).json() == {"deleted": 4, "files": 0}
        assert (await http.get("/memory/engrams")).json() == {"engrams": [], "cursor": None, "total": 0}
        assert (await http.get("/memory/topics")).json() == {"topics": []}
        assert (await http.get("/memory/export")).text == ""
        for there in (0, 4):
            taken = {"imported": 4, "there": there, "errors": [], "failed": 0}
            assert (await imported(http, *lines)).json() == taken
        again = (await http.get("/memory/engrams")).json()
        scores = {e["query"]: e["score"] for e in again["engrams"] if e["kind"] == "turn"}
        assert (again["total"], scores) == (4, {"Question 0?": 5, "Question 1?": None, "Question 2?": None})
        assert (await http.get("/memory/topics/user.pet")).json()["content"] == "A cat."


async def imported(http: httpx.AsyncClient, *lines: Any) -> httpx.Response:
    body = b"\n".join(line if isinstance(line, bytes) else orjson.dumps(line) for line in lines)
    return await http.post("/memory/import", content=body)


async def test_lines_of_an_import_that_are_wrong_are_named_by_their_number(house: House) -> None:
    good = {"query": "Good?", "answer": "Yes."}
    # no JSON writer on the way would write it
    deep = b'{"query": "Deep?", "answer": "Yes.", "metadata": ' + b'{"a":' * 300 + b"1" + b"}" * 301
    async with await house.site.key("una") as una:
        many = [{"query": f"Question {n}?", "answer": "Yes."} for n in range(70)]
        answer = await imported(
            una, good, b"no json", b"", [1], *many, {"session_id": "s"}, {**good, "time": "?"}, deep
        )
        found = answer.json()
        # 1 and 5 to 74 are good, 3 is empty; the pages of an import do not change the numbers
        assert (found["imported"], found["failed"]) == (71, 5)
        assert sorted(error["line"] for error in found["errors"]) == [2, 4, 75, 76, 77]
        assert all(error["message"] for error in found["errors"])
        assert (await una.get("/memory/engrams")).json()["total"] == 71


async def test_a_hit_carries_what_its_line_was_imported_with(house: House) -> None:
    async with await house.site.key("eve") as eve:
        asked = {"query": "Which lamp stands at the pier?", "answer": "A green one.", "metadata": {"turn": "D1:3"}}
        assert (await imported(eve, asked, {"answer": "The pier has been repainted."})).json()["imported"] == 2
        hits = (await eve.get("/memory", params={"query": "lamp at the pier"})).json()["hits"]
        assert hits[0]["metadata"] == {"turn": "D1:3"}
        # an answer whose question is not known is a note
        assert [hit["content"] for hit in hits[1:]] == ["The pier has been repainted."]


async def test_a_line_that_is_too_long_is_refused_after_what_came_before_it(house: House) -> None:
    async with await house.site.key("lea") as lea:
        answer = await imported(lea, {"content": "x" * 400_001})
        assert code(answer) == (413, "body_too_large")
        assert "400000" in answer.text
        assert (await lea.get("/memory/engrams")).json()["total"] == 0


async def test_pages_follow_each_other_by_their_cursor(house: House) -> None:
    ids = await house.said("kim", *(f"Question {n}?" for n in range(5)))
    async with await house.site.key("kim") as kim:
        seen: list[str] = []
        asked: dict[str, Any] = {"limit": 2}
        while True:
            page = (await kim.get("/memory/engrams", params=asked)).json()
            assert page["total"] == 5
            seen += [engram["id"] for engram in page["engrams"]]
            if page["cursor"] is None:
                break
            asked["cursor"] = page["cursor"]
        assert seen == ids[::-1]
        assert code(await kim.get("/memory/engrams", params={"cursor": "nonsense"})) == (422, "invalid_request")


async def test_a_tool_may_be_called_by_its_older_name(house: House) -> None:
    async with await house.site.key("old") as old:
        saved = await old.post("/tools/memory_save/call", json={"args": {"key": "user.pet", "value": "A cat."}})
        assert saved.json()["result"] == "Memory saved: user.pet"


@pytest.mark.parametrize(
    ("own", "args", "zone"),
    [
        ("Australia/Sydney", {}, "Australia/Sydney"),
        ("Australia/Sydney", {"zone": "america/los_angeles"}, "America/Los_Angeles"),
        ("America/Los_Angeles", {"zone": None}, "America/Los_Angeles"),
    ],
)
async def test_current_time_is_that_of_the_users_zone(house: House, own: str, args: dict[str, Any], zone: str) -> None:
    made = await house.site.http.post("/keys", json={"name": "clock", "user_id": "tim", "time_zone": own})
    async with client(house.site.url, made.json()["key"]) as tim:
        before = now_ms()
        told = (await tim.post("/tools/current_time/call", json={"args": args})).json()
        possible = {clock_line(before, zone), clock_line(now_ms(), zone)}
        assert (told["result"] in possible, told["error"]) == (True, None)
        refused = (await tim.post("/tools/current_time/call", json={"args": {"zone": "Tokyo"}})).json()
    assert refused["error"] == "unknown time zone: 'Tokyo'; give an IANA name such as Asia/Tokyo"


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Pago_Pago"])
async def test_search_over_http_is_dated_in_the_zone_of_the_key(house: House, zone: str) -> None:
    key = {"name": "dates", "user_id": zone.replace("/", "-"), "time_zone": zone}
    made = await house.site.http.post("/keys", json=key)
    async with client(house.site.url, made.json()["key"]) as http:
        assert (await http.put("/memory/topics/user.pet", json={"content": "A cat."})).status_code == 200
        today = f"{local_date(now_ms(), zone)}"
        found = (await http.get("/memory", params={"query": "What happened today?"})).json()
        assert [hit["topic"] for hit in found["hits"]] == ["user.pet"]
        assert found["text"].splitlines()[2].endswith(f" {today}")
        line = orjson.loads((await http.get("/memory/export")).text)
        assert line["metadata"]["time_zone"] == zone


async def test_older_names_are_answered_on_the_bus_too(house: House) -> None:
    with redis.Redis.from_url(house.redis_url) as raw:
        raw.xadd("local2:inbox:another-program", {"type": "started"})
        asked = (
            ("memory_save", {"key": "user.pet", "value": "A cat."}, "Memory saved: user.pet"),
            ("recall_memory", {"topic": "user.pet"}, "[Memory: user.pet]\nA cat."),
            ("search_memories", {"query": "user pet cat"}, "A cat."),
            ("memory_recall", {"query": "user pet cat"}, "A cat."),
        )
        for name, args, told in asked:
            call_id = f"mine:{name}"
            request = {"query_id": "1-1", "call_id": call_id, "tool": name, "args": args, "user_id": "pia",
                       "reply_to": "local2:inbox:another-program"}  # fmt: skip
            fields = {"payload": orjson.dumps(request)}
            # twice: it is one call
            for _ in range(2):
                raw.xadd(f"local2:tool.request.{name}", fields)
            answer = await answered(raw, call_id)
            assert told in answer["result"], name
            assert answer["error"] is None
    async with await house.site.key("pia") as pia:
        assert len((await pia.get("/memory/topics")).json()["topics"]) == 1
    listed = (await house.site.http.get("/bus/streams")).json()["streams"]
    shown = [stream["subject"] for stream in listed]
    assert "tool.request.search_memory" in shown
    assert not [subject for subject in shown if subject.rpartition(".")[2] in TOOL_ALIASES]
    offered = {tool["function"]["name"] for tool in (await house.site.http.get("/tools")).json()["tools"]}
    assert offered == {
        "search_memory", "save_memory", "save_topic", "recall_topic", "search_documents", "current_time",
    }  # fmt: skip


async def answered(raw: redis.Redis, call_id: str) -> dict[str, Any]:
    def found() -> list[bytes]:
        inbox = raw.xrange("local2:inbox:another-program")
        return [fields[b"payload"] for _, fields in inbox if fields.get(b"call_id") == call_id.encode()]

    await eventually(lambda: bool(found()), 10, f"{call_id} is answered")
    answer: dict[str, Any] = orjson.loads(found()[0])
    return answer


async def test_without_a_memory_its_routes_say_so_and_the_stack_is_ready(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as own:
        async with serving(gateway_settings(own.url, tmp_path)) as site, generating(own.url, tmp_path):
            for method, path, body in (
                ("GET", "/memory?query=x", None),
                ("GET", "/memory/engrams", None),
                ("GET", "/memory/engrams/1-0:A", None),
                ("DELETE", "/memory/engrams/1-0:A", None),
                ("DELETE", "/memory?everything=true", None),
                ("GET", "/memory/topics", None),
                ("PUT", "/memory/topics/user.pet", {"content": "A cat."}),
                ("GET", "/memory/export", None),
                ("POST", "/memory/import", {"query": "q", "answer": "a"}),
            ):
                answer = await site.http.request(method, path, json=body)
                assert code(answer) == (503, "memory_unavailable"), path
                assert "no memory is running" in answer.text
                assert answer.headers["retry-after"]
            ready = await site.http.get("/ready")
            assert (ready.status_code, ready.json()["parts"]["memory"]["reason"]) == (200, "no memory is running")


async def test_a_memory_without_its_model_is_degraded_and_the_stack_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nowhere = f"http://127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as stack:
        own = stack.enter_context(EmbeddedRedis(tmp_path / "redis"))
        site = await stack.enter_async_context(serving(gateway_settings(own.url, tmp_path)))
        await stack.enter_async_context(generating(own.url, tmp_path))
        await stack.enter_async_context(running(app, memory_settings(own.url, tmp_path, nowhere)))
        model = ScriptedModelServer(port=port)
        memory = await stack.enter_async_context(asking(own.url, tmp_path, model))
        await announced(own.url, "memory")

        async def reason() -> str | None:
            ready = await site.http.get("/ready")
            assert ready.status_code == 200
            why: str | None = ready.json()["parts"]["memory"]["reason"]
            return why

        async def degraded() -> bool:
            return (await reason() or "").startswith("embedding model nomic-embed-text: ")

        await eventually(degraded, 15, "the memory says what is missing")
        # what needs no vector is served, what needs one says so
        kept = await site.http.put("/memory/topics/user.pet", json={"content": "A cat."})
        assert kept.status_code == 200
        found = (await site.http.get("/memory", params={"query": "cat"})).json()
        assert ([hit["topic"] for hit in found["hits"]], bool(found["degraded"])) == (["user.pet"], True)
        refused = await imported(site.http, {"query": "q", "answer": "a"})
        assert code(refused) == (503, "memory_unavailable")
        with monkeypatch.context() as disk:
            disk.setattr("services.memory.store.no_room", lambda _folder: "the disk is full")
            for method in ("PUT", "DELETE"):
                refused = await site.http.request(method, "/memory/topics/user.pet", json={"content": "A dog."})
                assert code(refused) == (503, "memory_unavailable")
                assert "the disk is full" in refused.text
        await stack.enter_async_context(model)

        async def well() -> bool:
            return await reason() is None

        await eventually(well, 20, "the memory is well again")
        await memory.idle()
        assert [hit["topic"] for hit in (await site.http.get("/memory", params={"query": "cat"})).json()["hits"]]


async def test_stock_clients_get_vectors_of_the_memorys_model(house: House) -> None:
    async with await house.site.key("ema") as ema:
        key = ema.headers["authorization"].removeprefix("Bearer ")
        async with openai.AsyncOpenAI(base_url=f"{house.site.url}/v1", api_key=key, max_retries=0) as stock:
            texts = [f"text {number}" for number in range(70)]
            packed = await stock.embeddings.create(model="local2", input=texts)
            plain = await stock.embeddings.create(model="local2", input=texts[3], encoding_format="float")
            assert [one.index for one in packed.data] == list(range(70))
            assert packed.data[3].embedding == pytest.approx(plain.data[0].embedding)
            assert sum(value * value for value in plain.data[0].embedding) == pytest.approx(1.0, abs=1e-3)
            assert len({tuple(one.embedding) for one in packed.data}) > 60
            assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (2, 2)
            named = await stock.embeddings.create(model=plain.model, input="text 3", encoding_format="float")
            assert named.data == plain.data
            with pytest.raises(openai.NotFoundError) as unknown:
                await stock.embeddings.create(model="text-embedding-3-small", input="x")
            assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"input": []}, "input: from 1 to 2048 texts"),
        ({"input": ["x"] * 2_049}, "input: from 1 to 2048 texts"),
        ({"input": [1, 2]}, "input.0: a text is expected"),
        ({"input": [[1, 2]]}, "input.0: a text is expected"),
        ({"input": ["x", " "]}, "input.1: must not be empty"),
        ({"input": "x", "dimensions": 8}, "dimensions: "),
        ({"input": "x" * 300_000}, "input: a text of 300000 characters (0) is too long"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format: "),
    ],
)
async def test_what_cannot_be_embedded_is_a_bad_request_with_a_sentence(
    house: House, body: dict[str, Any], sentence: str
) -> None:
    answer = await house.site.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(sentence)
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["x-should-retry"] == "false"


async def test_a_plain_import_in_parts_is_found_by_the_turn_before_each_line(house: House) -> None:
    """Late, in the wrong order, and twice: what came before follows from session and time."""
    lines = [
        {"query": "Shall we take the ferry to Bergen?", "answer": "Yes.", "session_id": "trip", "time": 1_700_000_000},
        {"query": "When does it leave?", "answer": "At nine.", "session_id": "trip", "time": 1_700_000_100},
        {"query": "And the ticket?", "answer": "Forty.", "session_id": "trip", "time": 1_700_000_200},
    ]
    async with await house.site.key("fay") as fay:
        for part in ([lines[2]], [lines[1]], [lines[0], lines[2]]):
            assert (await imported(fay, *part)).json()["imported"] == len(part)
        kept = [orjson.loads(line) for line in (await fay.get("/memory/export")).text.splitlines()]
    before = {line["query"]: line["metadata"].get("before", "") for line in kept}
    assert before == {
        "Shall we take the ferry to Bergen?": "",
        "When does it leave?": "Shall we take the ferry to Bergen?\nYes.",
        "And the ticket?": "When does it leave?\nAt nine.",
    }
