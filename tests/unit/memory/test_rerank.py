"""What a chat model and a server's /rerank say, in every form and with every fault."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from services.memory.rerank import CrossEncoder, ModelReranker, RerankFailed, asked, chosen, refusal, scored
from services.memory.settings import MemorySettings
from shared.errors import ModelError
from shared.llm.discovery import ModelFacts
from shared.llm.port import ChatRequest, Finish, TextDelta

TEXTS = ["We sold the boat.", "Bread, butter.", "The boat is dark blue."]
URL = "http://rerank.example:8012/v1/rerank"
# Exchanges with llama.cpp and infinity as they were.
RECORDED = {path.stem: path for path in (Path(__file__).parents[2] / "support" / "rerank_wire").glob("*.ndjson")}


def settings(**values: Any) -> MemorySettings:
    return MemorySettings(_env_file=None, **{"rerank_url": URL, **values})  # type: ignore[call-arg]


class Model:
    """A chat model that says one thing, or fails. window: its context in tokens, where the server tells it."""

    def __init__(
        self, text: str = "", fails: Exception | None = None, hangs: bool = False, window: int | None = None
    ) -> None:
        self.text, self.fails, self.hangs, self.window = text, fails, hangs, window
        self.closed = False
        self.asked: list[ChatRequest] = []

    async def facts(self, _model: str) -> ModelFacts:
        return ModelFacts(window=self.window)

    async def stream(self, request: ChatRequest) -> AsyncIterator[TextDelta | Finish]:
        self.asked.append(request)
        try:
            if self.hangs:
                await asyncio.Event().wait()
            if self.fails:
                raise self.fails
            for at in range(0, len(self.text), 5):
                yield TextDelta(self.text[at : at + 5])
            yield Finish("stop", 100, 5, "m")
        finally:
            self.closed = True


async def by_model(asks: Model, **values: Any) -> list[int]:
    return await ModelReranker(asks).order("Which colour has the boat?", TEXTS, settings(**values))  # type: ignore[arg-type]


async def test_the_model_reads_everything_and_names_what_helps() -> None:
    model = Model('{"helpful": [3, 1, 3]}')
    assert await by_model(model, model="m", num_ctx=4_096) == [2, 0]
    (request,) = model.asked
    assert (request.model, request.num_ctx, request.think) == ("m", 4_096, False)
    assert request.options["temperature"] == 0
    # a number of each, and what stands around them
    assert 40 <= request.options["num_predict"] <= 60
    assert [message["role"] for message in request.messages] == ["system", "user"]
    numbers = {"type": "array", "maxItems": 3, "items": {"type": "integer", "minimum": 1, "maximum": 3}}
    assert request.response_schema == {"type": "object", "properties": {"helpful": numbers}, "required": ["helpful"]}
    told = request.messages[1]["content"]
    assert "Which colour has the boat?" in told
    assert all(text in told for text in TEXTS)


async def test_when_nothing_helps_nothing_is_left() -> None:
    assert await by_model(Model('Here: {"helpful": []}')) == []
    assert await by_model(Model('{"helpful": [2]} and no other')) == [1]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "no list"),
        ("none of them", "no list"),
        ('{"helpful": [1', "no list"),
        ('["helpful"]', "no list"),
        ('{"other": [1]}', "no list"),
        ('{"helpful": "1"}', "not there"),
        ('{"helpful": 1}', "not there"),
        ('{"helpful": null}', "not there"),
        ('{"helpful": [0]}', "not there"),
        ('{"helpful": [4]}', "not there"),
        ('{"helpful": [true]}', "not there"),
    ],
)
async def test_an_answer_that_cannot_be_read_reranks_nothing(answer: str, why: str) -> None:
    with pytest.raises(RerankFailed, match=why):
        await by_model(Model(answer))


async def test_a_model_that_fails_or_hangs_reranks_nothing() -> None:
    with pytest.raises(RerankFailed, match="not reranked: the server is full"):
        await by_model(Model(fails=ModelError("the server is full")))
    slow = Model(hangs=True)
    with pytest.raises(RerankFailed, match=r"more than 0.01 s"):
        await by_model(slow, rerank_timeout=0.01)
    assert slow.closed
    with pytest.raises(RerankFailed, match="demonstration model"):
        await by_model(Model('{"helpful": [1]}'), demo=True)


def test_a_long_memory_is_read_in_part_and_numbers_are_in_order() -> None:
    told = asked("q", ["x" * 5_000, "y"], 10_000)
    assert told.count("x") == 1_500
    assert told.index("[1]") < told.index("[2]")
    assert chosen('{"helpful": [2]}', 2) == [1]


def test_each_memory_has_its_part_of_the_room_and_never_less_than_says_something() -> None:
    texts = ["x" * 1_000] * 4
    told = asked("q" * 800, texts, 2_000)
    assert 1_950 < len(told) < 2_050
    assert told.count("x") % 4 == 0
    assert asked("q" * 800, texts, 900).count("x") == asked("q" * 800, texts, -900).count("x") == 400


async def test_all_memories_have_room_in_the_models_context() -> None:
    """A server cuts the beginning of what is too long for it: the question would be lost."""
    texts = [f"memory {number} {'x' * 2_000}" for number in range(50)]
    for window, wished in ((4_096, 32_000), (None, 4_096)):
        model = Model('{"helpful": [50]}', window=window)
        assert await ModelReranker(model).order("boat?", texts, settings(num_ctx=wished)) == [49]  # type: ignore[arg-type]
        (request,) = model.asked
        told = sum(len(message["content"] or "") for message in request.messages)
        assert 2.5 * 4_096 < told < 3 * (4_096 - request.options["num_predict"])
        assert request.messages[1]["content"].startswith("Question: boat?")
        assert all(f"[{number + 1}] memory {number} " in request.messages[1]["content"] for number in range(50))


class Server:
    """A /rerank that takes one of the two forms.

    most: texts that it takes at once, and longest: characters of one; more are refused with the status `too_much`.
    """

    def __init__(
        self,
        form: str = "documents",
        status: int = 200,
        body: bytes | None = None,
        coding: str = "",
        most: int = 1_000,
        longest: int = 10_000,
        too_much: int = 422,
    ) -> None:
        self.form, self.status, self.body, self.coding = form, status, body, coding
        self.most, self.longest, self.too_much = most, longest, too_much
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if self.status != 200:
            return httpx.Response(self.status)
        if self.coding:
            packed = httpx.ByteStream(gzip.compress(b"x" * 10_000_000))
            return httpx.Response(200, headers={"content-encoding": self.coding}, stream=packed)
        if self.body is not None:
            return httpx.Response(200, content=self.body)
        given = json.loads(request.content)
        if self.form not in given:
            return httpx.Response(422, json={"error": f"missing field {self.form}"})
        if len(given[self.form]) > self.most or max(map(len, given[self.form])) > self.longest:
            return httpx.Response(self.too_much, json={"error": "too much"})
        scores = [len(text) for text in given[self.form]]
        if self.form == "texts":
            return httpx.Response(200, json=[{"index": at, "score": score} for at, score in enumerate(scores)])
        results = [{"index": at, "relevance_score": -1.0 / score} for at, score in enumerate(scores)]
        return httpx.Response(200, json={"results": results[::-1]})


async def by_server(server: Server, times: int = 1, **values: Any) -> list[int]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as http:
        encoder = CrossEncoder(http)
        for _ in range(times):
            order = await encoder.order("boat?", TEXTS, settings(**values))
    return order


@pytest.mark.parametrize(("form", "calls"), [("documents", 2), ("texts", 3)])
async def test_a_server_orders_everything_in_either_form(form: str, calls: int) -> None:
    server = Server(form)
    assert await by_server(server, times=2) == [2, 0, 1]
    # which of the two it takes is found out once
    assert len(server.asked) == calls


@pytest.mark.parametrize(
    "server",
    [
        Server("texts", most=32, too_much=422),
        Server("texts", most=1, too_much=413),
        Server("documents", longest=400, too_much=400),
        Server("documents", longest=400, too_much=500),
    ],
)
async def test_a_server_that_takes_less_at_once_is_asked_in_parts(server: Server) -> None:
    """TEI takes 32 texts unless it is told otherwise; llama.cpp and vLLM none that is longer than the model reads."""
    texts = ["x" * (7 * number % 51 + 1) for number in range(50)]
    texts[20] = "x" * 1_000
    async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as http:
        order = await CrossEncoder(http).order("boat?", texts, settings())
    assert order == sorted(range(50), key=lambda place: -len(texts[place]))


@pytest.mark.parametrize("status", [400, 413, 422, 500])
async def test_a_server_that_refuses_everything_is_not_asked_for_ever(status: int) -> None:
    server = Server(status=status)
    async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as http:
        with pytest.raises(RerankFailed, match=f"answers {status}"):
            await CrossEncoder(http).order("boat?", ["x" * 1_500] * 50, settings())
    assert len(server.asked) < 20


@pytest.mark.parametrize(("length", "longest"), [(200, None), (201, 100), (300, 150), (301, 150)])
async def test_a_text_that_is_too_long_is_halved_down_to_what_still_says_something(
    length: int, longest: int | None
) -> None:
    server = Server("documents", longest=199, too_much=500)
    async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as http:
        asking = CrossEncoder(http).order("boat?", ["x" * length], settings())
        if longest is None:
            with pytest.raises(RerankFailed, match="answers 500"):
                await asking
            return
        assert await asking == [0]
    assert [len(json.loads(request.content)["documents"][0]) for request in server.asked] == [length, longest]


@pytest.mark.parametrize(
    ("status", "why"), [(401, "the key in .* was refused"), (403, "refused"), (404, "answers 404")]
)
async def test_a_server_that_refuses_for_another_reason_is_asked_once(status: int, why: str) -> None:
    for texts in (TEXTS, ["x" * 1_000]):
        server = Server(status=status)
        async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as http:
            with pytest.raises(RerankFailed, match=why):
                await CrossEncoder(http).order("boat?", texts, settings())
        assert len(server.asked) == 1


async def test_a_redirection_to_somewhere_else_is_not_followed() -> None:
    asked_of: list[str] = []

    def redirect(request: httpx.Request) -> httpx.Response:
        asked_of.append(str(request.url))
        return httpx.Response(302, headers={"location": "http://elsewhere.example/"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(redirect), follow_redirects=True) as http:
        with pytest.raises(RerankFailed, match="answers 302"):
            await CrossEncoder(http).order("boat?", TEXTS, settings())
    assert asked_of == [URL]


async def test_an_answer_may_be_as_large_as_a_megabyte() -> None:
    results = json.dumps([{"index": at, "score": at} for at in range(3)]).encode()
    assert await by_server(Server(body=results.ljust(1_000_000))) == [2, 1, 0]
    with pytest.raises(RerankFailed, match="too large"):
        await by_server(Server(body=results.ljust(1_000_001)))


async def test_a_servers_model_and_key_are_sent_with_the_question() -> None:
    server = Server()
    await by_server(server, rerank_model="bge", rerank_key=SecretStr("secret"))
    (request,) = server.asked
    given = json.loads(request.content)
    assert (str(request.url), request.headers["authorization"]) == (URL, "Bearer secret")
    assert given == {"query": "boat?", "model": "bge", "documents": TEXTS, "top_n": 3}
    assert request.headers["accept-encoding"] == "identity"
    plain = Server("texts")
    await by_server(plain)
    assert [json.loads(request.content) for request in plain.asked] == [
        {"query": "boat?", "documents": TEXTS, "top_n": 3}, {"query": "boat?", "texts": TEXTS, "truncate": True},
    ]  # fmt: skip
    assert "authorization" not in plain.asked[0].headers


async def test_a_server_has_as_long_as_the_setting_says() -> None:
    """A cross-encoder on a processor may be silent for longer than the five seconds that an HTTP client waits."""
    server = Server()
    await by_server(server, rerank_timeout=60.0)
    assert set(server.asked[0].extensions["timeout"].values()) == {60.0}


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (Server(status=401), "LOCAL2_MEMORY_RERANK_KEY"),
        (Server(status=404), "answers 404"),
        (Server(status=302), "answers 302"),
        (Server(status=422), "answers 422"),
        (Server(body=b"<html>"), "not JSON"),
        (Server(body=b"[]"), "does not score"),
        (Server(body=b"7"), "does not score"),
        (Server(body=b'{"results": null}'), "does not score"),
        (Server(body=b'{"results": [{"index": 0, "relevance_score": 1}, {"index": 9, "score": 1}, 7]}'), "not score"),
        (Server(body=b"x" * 2_000_000), "too large"),
        (Server(coding="gzip"), "a compressed answer, which was not asked for"),
    ],
)
async def test_a_server_that_answers_otherwise_reranks_nothing(server: Server, why: str) -> None:
    with pytest.raises(RerankFailed, match=why):
        await by_server(server)


async def test_a_server_that_is_away_or_was_not_named_reranks_nothing() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async def hang(_request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    def late(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("silent", request=request)

    url = "http://ann:secret@rerank.example:8012/v1/rerank?key=secret#secret"
    for handler, why in (
        (refuse, "no connection to http://rerank.example:8012/$"),
        (hang, "no answer within 0.01 s"),
        (late, "no answer within 0.01 s"),
    ):
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as http:
            with pytest.raises(RerankFailed, match=why):
                await CrossEncoder(http).order("boat?", TEXTS, settings(rerank_timeout=0.01, rerank_url=url))
    with pytest.raises(RerankFailed, match="LOCAL2_MEMORY_RERANK_URL"):
        await by_server(Server(), rerank_url=None)
    with pytest.raises(RerankFailed, match="is not an address"):
        await by_server(Server(), rerank_url="http://[::1")


def test_scores_are_read_by_their_places() -> None:
    assert scored([{"index": 1, "score": 2}, {"index": 0, "score": 0.5}], 2) == {1: 2.0, 0: 0.5}
    good = {"index": 0, "score": 1}
    for other in ({"index": 2, "score": 1}, {"index": -1, "score": 1}, {"index": True, "score": 1}, {"index": 1}, 7,
                  {"index": "1", "score": 1}, {"index": 1, "score": "high"}, {"score": 1}):  # fmt: skip
        with pytest.raises(RerankFailed):
            scored([good, other], 2)
    for nothing in ("nothing", None, {}, {"results": {"index": 0, "score": 1}}):
        with pytest.raises(RerankFailed):
            scored(nothing, 1)


@pytest.mark.parametrize("name", sorted(RECORDED))
async def test_what_genuine_servers_said_is_understood(name: str) -> None:
    """The first line says what was asked of which server and what came of it, the others are the exchanges."""
    first, *exchanges = [json.loads(line) for line in RECORDED[name].read_text().splitlines()]
    left = list(exchanges)

    def play(request: httpx.Request) -> httpx.Response:
        expected = left.pop(0)
        assert (request.url.path, json.loads(request.content)) == (expected["path"], expected["sent"])
        return httpx.Response(expected["status"], json=expected["said"])

    asks = settings(rerank_url=f"http://rerank.example/{first['url']}", rerank_model=first["model"])
    async with httpx.AsyncClient(transport=httpx.MockTransport(play)) as http:
        ordering = CrossEncoder(http).order(first["query"], first["texts"], asks)
        if "order" in first:
            assert await ordering == first["order"]
        else:
            with pytest.raises(RerankFailed, match=f"^{re.escape(first['failed'])}$"):
                await ordering
    assert left == []


async def test_a_question_that_is_too_long_is_cut_as_texts_are() -> None:
    def play(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        asked.append(len(sent["query"]))
        if len(sent["query"]) + max(map(len, sent["documents"])) > 900:
            return httpx.Response(500)
        return httpx.Response(200, json={"results": [{"index": 0, "relevance_score": 1 - asked[-1] / len(TEXTS[0])}]})

    asked: list[int] = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(play)) as http:
        assert await CrossEncoder(http).order("boat? " * 10_000, [TEXTS[0]], settings()) == [0]
    assert asked == [1_500, 750]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "not  started\\nso"}}', ", not started so"),
        (b'{"error": "Input validation error", "error_type": "Validation"}', ", Input validation error"),
        (b'{"detail": "Not Found"}', ", Not Found"),
        (b'{"detail": [{"msg": "too long", "input": "our words"}]}', ""),
        (b'{"error": {"message": 5}}', ""),
        (b'["x"]', ""),
        (b"<html>", ""),
        (b'{"detail": "%s"}' % (b"x" * 500), f", {'x' * 200}"),
    ],
)
def test_why_a_server_refuses_is_told_in_its_words_but_not_in_ours(body: bytes, said: str) -> None:
    assert refusal(body) == said
