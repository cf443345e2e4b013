"""HTTP to model servers: reuse of connections and bounds of answers, against servers that send exact bytes."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from support.loopback import listening

from shared.llm.google_genai import GoogleEmbeddings, GoogleWire
from shared.llm.http import ANSWER_BYTES, open_http
from shared.llm.openai import OpenAIEmbeddings
from shared.llm.port import ModelError, ModelUnavailable

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """`requests` are the heads that came, `connections` how many were opened, `endless` the bytes sent without end."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.endless = 0
        self.writers: list[asyncio.StreamWriter] = []


@asynccontextmanager
async def serving(*answers: bytes, endless: bytes = b"") -> AsyncIterator[Server]:
    """Gives the answers in turn, the last one again and again; an empty one closes the connection. endless: what comes
    behind an answer, until the connection is closed."""
    said = Server()
    left = list(answers)
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        said.connections += 1
        said.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(
                    dict(line.lower().split(b": ") for line in head.split(b"\r\n")[1:-2]).get(b"content-length", 0)
                )
                said.requests.append(head)
                said.bodies.append(await reader.readexactly(length))
                answer = left.pop(0) if len(left) > 1 else left[0]
                for byte in answer:
                    writer.write(bytes([byte]))
                await writer.drain()
                while endless and not writer.is_closing():
                    said.endless += len(endless)
                    writer.write(endless)
                    await writer.drain()
                if not answer or b"connection: close" in answer:
                    break
        except (asyncio.IncompleteReadError, OSError):
            pass
        writer.close()

    async with listening(serve) as port:
        said.url = f"http://127.0.0.1:{port}"
        yield said
        for writer in said.writers:
            writer.transport.abort()
        if tasks:
            await asyncio.wait(tasks)


async def test_a_connection_is_used_again_and_not_after_the_server_closed_it() -> None:
    async with serving(OK) as server, open_http(server.url, "k") as http:
        for _ in range(3):
            assert (await http.post("/path?a=b", content=b"body")).content == b"ok"
        assert server.connections == 1
        assert server.requests[0].startswith(b"POST /path?a=b HTTP/1.1\r\n")
        assert b"authorization: Bearer k" in server.requests[0]
        assert server.bodies == [b"body"] * 3
        server.writers[0].close()
        await server.writers[0].wait_closed()
        assert (await http.post("/", content=b"again")).content == b"ok"
        assert server.connections == 2


async def test_a_connection_that_is_closed_in_the_moment_of_its_use_costs_no_answer() -> None:
    async with serving(OK, b"", OK) as server, open_http(server.url, None) as http:
        assert (await http.get("/")).content == b"ok"
        assert (await http.get("/")).content == b"ok"
        assert server.connections == 2


async def test_closed_new_connection_is_an_error_without_a_retry() -> None:
    async with serving(b"") as server, open_http(server.url, None) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/")
        assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    ],
)
async def test_every_framing_of_a_body_is_read(answer: bytes, body: bytes) -> None:
    async with serving(answer) as server, open_http(server.url, None) as http:
        response = await http.get("/")
    assert (response.status_code, response.content) == (200, body)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n9\r\nabc",
        b"SSH-2.0-OpenSSH_9.6\r\nconnection: close\r\n\r\n",
    ],
)
async def test_an_answer_that_is_none_or_ends_early_is_an_error(answer: bytes) -> None:
    async with serving(answer) as server, open_http(server.url, None) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/")


@pytest.mark.parametrize(
    ("begun", "endless"),
    [
        (b"HTTP/1.1 200 OK\r\nx-long: ", b"x" * 50_000),
        (b"HTTP/1.1 200 OK\r\n", b"x-many: yes\r\n" * 4_000),
        (b"HTTP/1.1 200 OK\r\n", b"x" * 50_000),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", b"x" * 50_000),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-trailer: ", b"x" * 50_000),
    ],
    ids=["a header", "headers", "the name of a header", "a chunk's extension", "a trailer"],
)
async def test_endless_headers_end_the_connection(begun: bytes, endless: bytes) -> None:
    async with serving(begun, endless=endless) as server, open_http(server.url, None) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/")
        async with asyncio.timeout(5):
            with suppress(ConnectionError):
                await server.writers[0].wait_closed()
        assert server.endless < 10_000_000


async def test_a_body_in_small_pieces_is_no_header() -> None:
    chunks = b"".join(b"1;%s\r\na\r\n" % (b"x" * 500) for _ in range(400))
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    async with serving(answer) as server, open_http(server.url, None) as http:
        assert (await http.get("/")).content == b"a" * 400


async def test_a_compressed_answer_is_refused_before_it_is_unpacked() -> None:
    packed = zlib.compress(b" " * 10_000_000)
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: deflate\r\ncontent-length: %d\r\n\r\n" % len(packed)
    async with serving(head + packed) as server:
        embeddings = OpenAIEmbeddings(server.url, None)
        with pytest.raises(ModelUnavailable, match="compressed answer, which was not asked for") as refused:
            await embeddings.embed("m", ["a"])
        await embeddings.aclose()
        google = GoogleEmbeddings(server.url, "k")
        with pytest.raises(ModelUnavailable, match="compressed answer, which was not asked for"):
            await google.embed("m", ["a"])
        await google.aclose()
        assert all(b"accept-encoding: identity\r\n" in head.lower() for head in server.requests)
    assert "Accept-Encoding: identity" in str(refused.value)


@pytest.mark.parametrize(
    ("user", "key", "said"),
    [
        ("", None, None),
        ("", "k", b"Bearer k"),
        ("me:p%40ss@", "k", b"Basic bWU6cEBzcw=="),  # me:p@ss
    ],
)
async def test_a_request_says_who_asks_and_nothing_that_an_earlier_answer_has_brought(
    user: str, key: str | None, said: bytes | None
) -> None:
    body = b'{"data": [{"index": 0, "embedding": [1.0]}]}'
    answer = b"HTTP/1.1 200 OK\r\nset-cookie: seen=1; path=/\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with serving(answer) as server:
        embeddings = OpenAIEmbeddings(server.url.replace("//", f"//{user}") + "/v1", key)
        for _ in range(2):
            assert await embeddings.embed("m", ["a"]) == [[1.0]]
        await embeddings.aclose()
    for request in server.requests:
        place, *lines = request.split(b"\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
        assert place == b"POST /v1/embeddings HTTP/1.1"
        assert headers.get(b"authorization") == said
        assert b"cookie" not in headers
    assert len(server.requests) == 2


async def test_what_google_is_asked_beside_chats_is_bounded() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"
    async with serving(head, endless=b" " * 1_000_000) as server:
        google, embeddings = GoogleWire(server.url, "k"), GoogleEmbeddings(server.url, "k")
        with pytest.raises(ModelError, match="without the end of a line"):
            await google.facts("m")
        with pytest.raises(ModelError, match="without the end of a line"):
            await embeddings.embed("m", ["a"])
        await google.aclose()
        await embeddings.aclose()
        assert server.endless < 4 * ANSWER_BYTES


async def test_a_response_left_before_its_end_closes_its_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"
    async with serving(head) as server, open_http(server.url, None) as http:
        async with http.stream("GET", "/") as response:
            assert await anext(aiter(response.aiter_bytes()))
        await asyncio.wait_for(server.writers[0].wait_closed(), 5)


async def test_an_answer_that_ends_after_the_client_was_closed_leaves_no_connection_open() -> None:
    async with serving(OK) as server:
        http = open_http(server.url, None)
        response = await http.send(http.build_request("GET", "/"), stream=True)
        body = await anext(aiter(response.aiter_raw()))
        await http.aclose()
        await response.aclose()
        async with asyncio.timeout(10):
            # the server reads the end of the connection, and ends
            await server.writers[0].wait_closed()
    assert body == b"ok"


async def test_silence_is_a_timeout_where_one_is_asked_for() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"
    async with serving(head) as server, open_http(server.url, None, timeout=0.05) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.get("/")


async def test_a_proxy_of_the_environment_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(OK) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        async with open_http("http://model.example:8000", None) as http:
            assert (await http.get("/v1/models")).content == b"ok"
        assert proxy.requests[0].startswith(b"GET http://model.example:8000/v1/models HTTP/1.1\r\n")


async def test_a_server_of_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(OK) as server, serving(b"") as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("all_proxy", proxy.url)
        async with open_http(server.url, None) as http:
            assert (await http.get("/v1/models")).content == b"ok"
        assert (len(server.requests), proxy.requests) == (1, [])


@pytest.mark.parametrize(
    "begun", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"], ids=["headers", "body"]
)
async def test_cancelled_request_closes_its_connection(begun: bytes) -> None:
    async with serving(begun) as server, open_http(server.url, None) as http:
        task = asyncio.create_task(http.get("/"))
        async with asyncio.timeout(5):
            while not server.bodies:
                await asyncio.sleep(0.01)
        task.cancel()
        async with asyncio.timeout(1):
            with suppress(ConnectionError):
                await server.writers[0].wait_closed()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_requests_at_the_same_time_get_connections_of_their_own() -> None:
    async with serving(OK) as server, open_http(server.url, None) as http:
        answers = await asyncio.gather(*[http.get("/") for _ in range(20)])
        assert [answer.content for answer in answers] == [b"ok"] * 20
        assert server.connections == 20
        await asyncio.gather(*[http.get("/") for _ in range(20)])
        assert server.connections == 20
