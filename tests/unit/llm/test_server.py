"""What a model server may answer instead of what was asked: each is one sentence, for every question that there is."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.loopback import listening

from shared.llm.factory import Backend, open_chat_model, open_embedding_model
from shared.llm.ollama_admin import OllamaAdmin
from shared.llm.port import ChatRequest, ModelError, ModelOverloaded, ModelUnavailable, StreamInterrupted
from shared.llm.server import GOOGLE, OLLAMA, OPENAI, Kind, away

BACKENDS: tuple[Backend, ...] = ("ollama", "openai", "google_genai")
ASK = ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}])


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def serving(said: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server that gives one answer to everybody; yields its address."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(lengths[0]) if lengths else 0)
            writer.write(said)
            await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async with listening(serve, tls=tls) as port:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        if tasks:
            await asyncio.wait(tasks)


async def chat(backend: Backend, url: str, ca_file: Path | None = None) -> None:
    model = open_chat_model(backend, base_url=url, api_key="key", ca_file=ca_file)
    try:
        async with aclosing(model.stream(ASK)) as deltas:
            async for _ in deltas:
                pass
    finally:
        await model.aclose()


async def look(backend: Backend, url: str) -> None:
    model = open_chat_model(backend, base_url=url, api_key="key")
    try:
        if (trouble := await model.reachable("m")) is not None:
            raise ModelError(trouble)
    finally:
        await model.aclose()


async def embed(backend: Backend, url: str) -> None:
    model = open_embedding_model(backend, base_url=url, api_key="key")
    try:
        await model.embed("m", ["a text"])
    finally:
        await model.aclose()


async def listed(_backend: Backend, url: str) -> None:
    admin = OllamaAdmin(url)
    try:
        await admin.models()
    finally:
        await admin.aclose()


async def pulled(_backend: Backend, url: str) -> None:
    admin = OllamaAdmin(url)
    try:
        async with aclosing(admin.pull("m")) as parts:
            async for _ in parts:
                pass
    finally:
        await admin.aclose()


QUESTIONS: list[tuple[Backend, Callable[[Backend, str], Awaitable[None]]]] = [
    *((backend, question) for backend in BACKENDS for question in (chat, look, embed)),
    ("ollama", listed),
    ("ollama", pulled),
]
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Sign in</body></html>"
HTML = "content-type: text/html"
ODD = {
    "a web page": answer(PAGE, "200 OK", HTML),
    "a page without its type": answer(PAGE),
    "a sign-in page that refuses": answer(PAGE, "401 Unauthorized", HTML),
    "a page for what is not there": answer(PAGE, "404 Not Found", HTML),
    "an error with status 200": answer(b'{"error": "the disk is full"}'),
    "an error as an object": answer(b'{"error": {"message": "the disk is full", "code": 7}}'),
    "an error as JSON text in a list": answer(b'[{"error": {"message": "the disk is full"}}]', "500 Oops"),
    "no data": answer(b'{"data": null, "models": null, "embeddings": null, "choices": null}'),
    "null": answer(b"null"),
    "a number": answer(b"7"),
    "a list": answer(b"[]"),
    "a text": answer(b'"ok"'),
    "plain text": answer(b"404 page not found", "404 Not Found"),
    "plain text that says all is well": answer(b"Ollama is running"),
    "nothing": answer(b""),
    "nothing at all, not even content": b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n",
    "broken JSON": answer(b'{"models": ['),
    "bytes": answer(b"\xff\xfe\x00\x01"),
    "nesting without an end": answer(b"[" * 100_000),
    "a wrong encoding": answer(b"not gzip", "200 OK", "content-encoding: gzip"),
    "a redirect to a sign-in page": answer(b"", "302 Found", "location: https://login.example/?next=secret"),
    "a redirect without a place": answer(b"", "307 Temporary Redirect"),
    "no key": answer(b'{"error": "invalid api key"}', "401 Unauthorized"),
    "forbidden": answer(b'{"detail": "forbidden"}', "403 Forbidden"),
    "no such route": answer(b'{"detail": "Not Found"}', "404 Not Found"),
    "no such method": answer(b'{"detail": "Method Not Allowed"}', "405 Method Not Allowed"),
    "too many": answer(b'{"error": "slow down"}', "429 Too Many Requests"),
    "a crash": answer(b"Internal Server Error", "500 Internal Server Error"),
    "not offered": answer(b'{"error": {"message": "This server does not support embeddings"}}', "501 Not Implemented"),
    "a proxy's page": answer(PAGE, "502 Bad Gateway", HTML),
    "busy": answer(b"", "503 Service Unavailable"),
    "a late proxy": answer(b"upstream timed out", "504 Gateway Timeout"),
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a cut answer": b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{",
    "a closed connection": b"",
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(("backend", "question"), QUESTIONS, ids=lambda value: getattr(value, "__name__", value))
async def test_every_odd_answer_is_a_model_error_with_a_sentence(
    backend: Backend, question: Callable[[Backend, str], Awaitable[None]], odd: str
) -> None:
    async with serving(ODD[odd]) as url:
        with pytest.raises(ModelError) as caught:
            await question(backend, url)
    said = str(caught.value)
    assert 10 < len(said) < 700
    assert "\n" not in said
    assert "<html" not in said.lower()
    assert "secret" not in said
    # Google's package drops an error with status 200, Ollama's an error in a stream that is not a text
    dropped = (backend == "google_genai" and b" 200 " in ODD[odd]) or (question, odd) == (
        pulled,
        "an error as an object",
    )
    if b"disk" in ODD[odd] and not dropped:
        assert "the disk is full" in said


@pytest.mark.parametrize("backend", ["ollama", "openai"])
@pytest.mark.parametrize("question", [chat, look, embed])
@pytest.mark.parametrize(
    "odd", ["a web page", "a sign-in page that refuses", "null", "nothing", "plain text that says all is well",
            "a redirect to a sign-in page", "no such route"],
)  # fmt: skip
async def test_another_program_at_the_address_is_named_with_the_variable_to_set(
    backend: Backend, question: Callable[[Backend, str], Awaitable[None]], odd: str
) -> None:
    async with serving(ODD[odd]) as url:
        with pytest.raises(ModelError) as caught:
            await question(backend, url)
    assert url in str(caught.value)
    assert ("OLLAMA_HOST" if backend == "ollama" else "LOCAL2_BASE_URL") in str(caught.value)


async def test_where_a_redirect_leads_is_told_without_what_it_carries() -> None:
    async with serving(ODD["a redirect to a sign-in page"]) as url:
        with pytest.raises(ModelError, match=r"answers with a redirect to https://login.example/; set OLLAMA_HOST to"):
            await listed("ollama", url)


@pytest.mark.parametrize(("backend", "question"), QUESTIONS, ids=lambda value: getattr(value, "__name__", value))
async def test_redirect_is_an_error_and_is_not_followed(
    backend: Backend, question: Callable[[Backend, str], Awaitable[None]]
) -> None:
    visits: list[bytes] = []

    async def visited(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        visits.append(await reader.readuntil(b"\r\n\r\n"))

    async with listening(visited) as port:
        async with serving(answer(b"", "307 Temporary Redirect", f"location: http://127.0.0.1:{port}/there")) as url:
            with pytest.raises(ModelError, match="answers with a redirect"):
                await question(backend, url)
        assert visits == []


@pytest.mark.parametrize(
    "host", ["a" * 70, f"{'a' * 63}.{'b' * 70}.invalid", "gpu..invalid"], ids=["label", "name", "dots"]
)
async def test_host_that_no_resolver_accepts_is_unavailable(host: str) -> None:
    with pytest.raises(ModelError, match="check the spelling of the host in OLLAMA_HOST"):
        await look("ollama", f"http://{host}:9")


async def test_a_key_that_is_refused_is_told_with_its_variable() -> None:
    async with serving(ODD["no key"]) as url:
        with pytest.raises(ModelError, match=r"invalid api key; set LOCAL2_BACKEND_API_KEY to a key of the server"):
            await chat("openai", url)
        with pytest.raises(ModelError, match=r"set OLLAMA_API_KEY to a key of the server"):
            await chat("ollama", url)


async def test_a_page_of_a_busy_proxy_still_says_to_try_again() -> None:
    async with serving(answer(PAGE, "503 Service Unavailable", HTML)) as url:
        with pytest.raises(ModelOverloaded):
            await chat("openai", url)
    async with serving(ODD["a proxy's page"]) as url:
        with pytest.raises(ModelUnavailable):
            await chat("ollama", url)


async def test_a_stream_of_nothing_is_asked_for_again() -> None:
    async with serving(ODD["nothing"]) as url:
        with pytest.raises(StreamInterrupted, match="it answered with nothing"):
            await chat("openai", url)


@pytest.mark.parametrize("backend", ["ollama", "openai"])
async def test_looks_and_answers_share_one_connection(backend: Backend) -> None:
    connections = 0
    tasks: set[asyncio.Task[None]] = set()
    said = {
        b"/api/show": b'{"capabilities": ["completion"]}',
        b"/api/ps": b'{"models": []}',
        b"/api/chat": b'{"message": {"content": "hi"}, "done": true, "done_reason": "stop"}\n',
        b"/v1/models": b'{"data": [{"id": "m"}]}',
        b"/v1/chat/completions": b'data: {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}\n\n',
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                    await reader.readexactly(int(lengths[0]) if lengths else 0)
                    body = said.get(head.split(b" ")[1], b"")
                    status = b"200 OK" if body else b"404 Not Found"
                    writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
                    await writer.drain()
        finally:
            writer.close()

    async with listening(serve) as port:
        url = f"http://127.0.0.1:{port}"
        model = open_chat_model(backend, base_url=url, api_key="key")
        for _ in range(3):
            assert await model.reachable("m") is None
            assert [delta async for delta in model.stream(ASK)]
        await model.aclose()
        await asyncio.wait(tasks)
    assert connections == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["data", "id", "models", "model", "embeddings", "embedding", "index", "error", "message",
                         "capabilities", "model_info", "parameters", "choices", "delta", "done", "status", "total",
                         "values", "candidates", "inputTokenLimit", "meta", "owned_by"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=JSON,
    status=st.sampled_from(["200 OK", "200 OK", "400 No", "404 No", "500 No"]),
    lead=st.booleans(),
    asked=st.sampled_from(QUESTIONS),
)
async def test_no_json_makes_a_question_fail_in_another_way(
    value: object, status: str, lead: bool, asked: tuple[Backend, Callable[[Backend, str], Awaitable[None]]]
) -> None:
    body = json.dumps(value).encode()
    backend, question = asked
    async with serving(answer((b"data: " if lead else b"") + body + b"\n\n", status)) as url:
        with suppress(ModelError):
            await question(backend, url)


def caused(said: str, cause: str) -> httpx.ConnectError:
    """A failed connection as httpx raises it: its own sentence, and the system's error behind it."""
    exc = httpx.ConnectError(said)
    exc.__cause__ = OSError(cause)
    return exc


@pytest.mark.parametrize(
    ("kind", "url", "exc", "remedy"),
    [
        (OLLAMA, "http://127.0.0.1:11434", httpx.ConnectError("[Errno 111] Connect call failed"), "ollama serve"),
        (OLLAMA, "http://gpu:11434", httpx.ConnectError("[Errno 111] Connect call failed"), "OLLAMA_HOST=0.0.0.0"),
        (OPENAI, "http://localhost:8000/v1", httpx.ConnectError("All connection attempts failed"), "start that server"),
        (OLLAMA, "http://gpo:11434", httpx.ConnectError("[Errno -2] Name or service not known"), "check the spelling"),
        (OLLAMA, "http://gpo", httpx.ConnectError("encoding with 'idna' codec failed: label too long"), "spelling"),
        (OLLAMA, "http://gpu:11434", httpx.ConnectTimeout("no connection within 10s"), "firewall"),
        (OLLAMA, "http://gpu:11434", httpx.ConnectError("[Errno 113] No route to host"), "the machine is on"),
        (OLLAMA, "http://gpu:11434", caused("All connection attempts failed", "[Errno 113] No route to host"), "is on"),
        (OLLAMA, "http://gpu:11434", httpx.ConnectTimeout(""), "firewall"),
        (OLLAMA, "http://gpu:11434", httpx.ReadTimeout(""), "see its log"),
        (OPENAI, "https://gpu/v1", httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
         "unable to get local issuer certificate"), "LOCAL2_CA_FILE"),
        (OPENAI, "https://gpu/v1", httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
         "Hostname mismatch, certificate is not valid for 'gpu'."), "another name: use that one in LOCAL2_BASE_URL"),
        (OPENAI, "https://gpu/v1", httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
         "certificate has expired"), "renew it"),
        (OLLAMA, "https://gpu:11434", httpx.ConnectError("[SSL] record layer failure"), "begin OLLAMA_HOST with http://"),
        (OPENAI, "http://gpu/v1", httpx.RemoteProtocolError("not an HTTP answer"), "check LOCAL2_BASE_URL"),
        (OPENAI, "http://gpu/v1", httpx.ReadTimeout("silent for 10s"), "see its log"),
        (GOOGLE, "https://generativelanguage.googleapis.com", httpx.ProxyError("407 Denied"), "NO_PROXY"),
    ],
)  # fmt: skip
def test_what_to_do_fits_what_is_wrong(kind: Kind, url: str, exc: Exception, remedy: str) -> None:
    found = away(kind, url, exc)
    assert remedy in found.remedy
    assert url in found.cause
    assert str(found) == f"{found.cause}; {found.remedy}"
    assert ("ollama serve" in str(found)) == (remedy == "ollama serve")


def _authority(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A file of one's own authority, and what a server on 127.0.0.1 with its certificate needs."""
    now = datetime.now(UTC)
    key, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def made(name: str, subject_key: ec.EllipticCurvePrivateKey, *, authority: bool) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "our authority")]))
            .public_key(subject_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        )
        return builder.sign(key, hashes.SHA256())

    ca_file, chain = folder / "ca.pem", folder / "server.pem"
    ca_file.write_bytes(made("our authority", key, authority=True).public_bytes(serialization.Encoding.PEM))
    pem = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    chain.write_bytes(pem + made("server", own, authority=False).public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return ca_file, context


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_certificate_of_ones_own_authority_is_believed_when_its_file_is_given(
    backend: Backend, tmp_path: Path
) -> None:
    ca_file, context = _authority(tmp_path)
    async with serving(ODD["an error as JSON text in a list"], context) as url:
        with pytest.raises(ModelUnavailable, match=r"LOCAL2_CA_FILE"):
            await chat(backend, url)
        with pytest.raises(ModelError, match="the disk is full"):
            await chat(backend, url, ca_file)
