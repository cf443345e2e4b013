"""Pages from a real server on loopback that is allowed by name: texts, limits, redirects, faults."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
import sys
import time
import zlib
from typing import Any

import brotli
import pytest
from support.loopback import listening

from services.web_fetch.service import WebFetch
from shared.errors import ToolError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = """<!doctype html><html><head><title>Tides | Harbour</title></head><body><nav>Menu Menu Menu</nav>
<main><h1>Tides of Norhaven</h1><p>High water comes twice a day, and each time fifty minutes
later than the day before.</p>
<p>Skippers should add half an hour for the inner harbour.</p></main>
<footer>All rights reserved</footer></body></html>"""


@pytest.fixture
def fetch(site: Any, fetcher: Any) -> Any:
    """`await fetch("/path", max_chars=…)` from the local site."""

    async def run(path: str = "/", **options: Any) -> Any:
        return await fetcher([f"127.0.0.1:{site.port}"], **options)(WebFetch(url=site.url(path)))

    return run


async def test_a_page_comes_as_the_agreed_text_with_its_heading(site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/"] = reply(PAGE)
    result = await fetch()
    first, second, *rest = result.text.split("\n")
    assert (first, second, rest[0]) == (f"URL: {site.url()}", "Extracted text:", "Tides of Norhaven")
    assert "fifty minutes" in result.text
    assert "Menu" not in result.text
    assert "All rights reserved" not in result.text
    text = result.text.split("Extracted text:\n")[1]
    assert result.data == {
        "url": site.url(),
        "final_url": site.url(),
        "status": 200,
        "title": "Tides | Harbour",
        "content_type": "text/html",
        "chars": len(text),
        "offset": 0,
        "next_offset": None,
        "truncated": False,
        "redirects": 0,
        "links": [],
    }


async def test_the_request_names_the_agent_and_nothing_private(site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/"] = reply(PAGE)
    await fetch()
    (head,) = site.requests
    assert "User-Agent: LoCAL2/1.0 (research agent)\r\n" in head
    assert f"Host: 127.0.0.1:{site.port}\r\n" in head
    assert "cookie" not in head.lower()
    assert "referer" not in head.lower()


async def test_only_the_first_characters_are_given_and_the_rest_is_counted(site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/long.txt"] = reply("x" * 10_000, content_type="text/plain")
    result = await fetch("/long.txt", max_chars=3_000)
    note = "[7000 of 10000 characters left out; go on with offset 3000]"
    assert result.text == f"URL: {site.url('/long.txt')}\nExtracted text:\n{'x' * 3_000}\n{note}"
    assert result.data["chars"] == 10_000
    assert result.data["truncated"] is True


@pytest.mark.parametrize(
    "status", ["404 Not Found", "403 Forbidden", "500 Oops", "503 Busy", "401 No", "304 Same", "429 Slow"]
)
async def test_an_http_error_is_its_number_and_is_not_tried_again(
    status: str, site: Any, reply: Any, fetch: Any
) -> None:
    site.replies["/"] = reply("no", status)
    with pytest.raises(ToolError) as caught:
        await fetch()
    assert str(caught.value) == f"fetch failed: {status[:3]}"
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    "kind", ["image/png", "application/octet-stream", "video/mp4", "application/zip", "audio/mpeg"]
)
async def test_what_is_not_text_is_refused_before_it_is_read(kind: str, site: Any, fetch: Any) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode())
        await site.stream_for_ever(writer, b"\0" * 65_536)

    site.replies["/"] = endless
    with pytest.raises(ToolError) as caught:
        await fetch()
    assert str(caught.value) == f"fetch error: the content type '{kind}' is not text"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", '{"price": 12.5}'),
        ("application/ld+json; charset=utf-8", '{"@type": "Thing"}'),
        ("text/plain", "two\nlines"),
        ("text/markdown", "# Heading\n\nText"),
        ("application/rss+xml", "<rss><title>News</title></rss>"),
        ("text/csv", "a,b\n1,2"),
    ],
)
async def test_other_text_types_come_as_they_are(kind: str, body: str, site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/"] = reply(body, content_type=kind)
    assert (await fetch()).text == f"URL: {site.url()}\nExtracted text:\n{body}"


async def test_a_page_without_a_type_is_recognised_by_its_content(site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/html"] = reply(PAGE, content_type="")
    site.replies["/text"] = reply("just <b>text", content_type="")
    site.replies["/binary"] = reply(b"\x7fELF\0\0", content_type="")
    assert "Menu" not in (await fetch("/html")).text
    assert (await fetch("/text")).text.endswith("just <b>text")
    with pytest.raises(ToolError, match=r"^fetch error: the content is not text$"):
        await fetch("/binary")


async def test_an_empty_page_says_so(site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/"] = reply("<html><body><div id=app></div><script>run()</script></body></html>")
    result = await fetch()
    assert result.text == f"URL: {site.url()}\nExtracted text:\n[the page has no readable text]"
    assert result.data["chars"] == 0


@pytest.mark.parametrize("status", ["301 A", "302 B", "303 C", "307 D", "308 E"])
async def test_redirects_are_followed_and_counted(status: str, site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/"] = reply(status=status, location="next?a=1#part")
    site.replies["/next?a=1"] = reply(PAGE)
    result = await fetch()
    assert result.data["final_url"] == site.url("/next?a=1")
    assert result.data["redirects"] == 1
    assert result.text.startswith(f"URL: {site.url()}\n")


async def test_redirects_stop_at_the_limit(site: Any, reply: Any, fetch: Any) -> None:
    for n in range(8):
        site.replies[f"/{n}"] = reply(status="302 Found", location=f"/{n + 1}")
    site.replies["/5"] = reply(PAGE)
    assert (await fetch("/0")).data["redirects"] == 5
    site.replies["/5"] = reply(status="302 Found", location="/6")
    site.requests.clear()
    with pytest.raises(ToolError) as caught:
        await fetch("/0")
    assert str(caught.value) == "fetch error: more than 5 redirects"
    assert len(site.requests) == 6


async def test_a_redirect_loop_ends_at_once(site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/a"] = reply(status="302 Found", location="/b")
    site.replies["/b"] = reply(status="302 Found", location="/a")
    with pytest.raises(ToolError) as caught:
        await fetch("/a")
    assert str(caught.value) == "fetch error: the page redirects in a circle"
    assert len(site.requests) == 2


async def test_a_redirect_without_a_target_is_a_failed_fetch(site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/"] = reply(status="302 Found")
    with pytest.raises(ToolError, match=r"^fetch failed: 302$"):
        await fetch()


@pytest.mark.parametrize("where", ["before the headers", "between headers", "in the body", "while redirecting"])
async def test_a_slow_server_is_left_after_the_time_limit(where: str, site: Any, reply: Any, fetch: Any) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        if where == "between headers":
            writer.write(b"HTTP/1.1 200 OK\r\nX-A: b\r\n")
        if where == "in the body":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
            while True:
                writer.write(b"drip ")
                await writer.drain()
                await asyncio.sleep(0.05)
        await asyncio.sleep(30)

    path = "/go" if where == "while redirecting" else "/"
    site.replies["/go"] = reply(status="302 Found", location="/")
    site.replies["/"] = slow
    started = time.monotonic()
    with pytest.raises(ToolError) as caught:
        await fetch(path, timeout=0.5)
    assert str(caught.value) == f"fetch timeout after 0.5s: {site.url(path)}"
    assert time.monotonic() - started < 1.5


async def test_an_endless_page_is_read_up_to_the_size_limit(site: Any, fetch: Any) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        await site.stream_for_ever(writer, b"line of text\n" * 1_000)

    site.replies["/"] = endless
    result = await fetch(max_bytes=100_000, max_chars=10)
    assert result.text.endswith(
        "[99992 of 100000 characters left out; go on with offset 8; the page itself was longer than the size limit]"
    )
    assert result.data["truncated"] is True
    # What the kernel's socket buffers hold comes on top of what was read.
    assert site.sent < 16_000_000


async def test_a_gzip_bomb_is_unpacked_only_up_to_the_limit(site: Any, reply: Any, fetch: Any) -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b"a" * 1_000_000) for _ in range(200)) + packer.flush()
    assert len(bomb) < 250_000
    site.replies["/"] = reply(bomb, content_type="text/plain", content_encoding="gzip")
    result = await fetch(max_bytes=1_000_000)
    assert result.data["chars"] == 1_000_000
    assert result.data["truncated"] is True


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "raw deflate", "br", "zstd", "identity", ""])
async def test_compressed_pages_are_unpacked(coding: str, site: Any, reply: Any, fetch: Any) -> None:
    raw = zlib.compressobj(wbits=-15)
    body = {
        "gzip": gzip.compress(PAGE.encode()),
        "x-gzip": gzip.compress(PAGE.encode()),
        "deflate": zlib.compress(PAGE.encode()),
        "br": brotli.compress(PAGE.encode()),
        "zstd": zstd.compress(PAGE.encode()),
        "raw deflate": raw.compress(PAGE.encode()) + raw.flush(),
    }.get(coding, PAGE.encode())
    site.replies["/"] = reply(body, content_encoding=coding.removeprefix("raw "))
    assert "fifty minutes" in (await fetch()).text


@pytest.mark.parametrize("coding", ["br, gzip", "gzip, gzip", "compress"])
async def test_unknown_compression_is_an_error(coding: str, site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/"] = reply(b"\x0b\x02\x80", content_encoding=coding)
    with pytest.raises(ToolError, match=r"^fetch error: the content encoding '.*' is not supported$"):
        await fetch()


async def test_a_repeated_encoding_header_is_one_list(site: Any, fetch: Any) -> None:
    body = gzip.compress(gzip.compress(PAGE.encode()))
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\nContent-Encoding: gzip\r\n"
    site.replies["/"] = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with pytest.raises(ToolError, match=r"^fetch error: the content encoding 'gzip, gzip' is not supported$"):
        await fetch()


async def test_a_flood_of_answers_that_only_announce_one_ends(site: Any, fetch: Any) -> None:
    async def flood(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await site.stream_for_ever(writer, b"HTTP/1.1 102 Processing\r\n\r\n" * 1_000)

    site.replies["/"] = flood
    with pytest.raises(ToolError, match=r"^fetch error: the server sends more than a page$"):
        await fetch(timeout=60)


async def test_a_few_announcements_do_not_matter(site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/"] = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n" * 3 + reply(PAGE)
    assert "fifty minutes" in (await fetch()).text


@pytest.mark.parametrize("piece", [b"1\r\na\r\n", b"1;" + b"x" * 60_000 + b"\r\na\r\n"], ids=["tiny", "padded"])
async def test_a_flood_of_tiny_pieces_ends(piece: bytes, site: Any, fetch: Any) -> None:
    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await site.stream_for_ever(writer, piece * (60_000 // len(piece) + 1))

    site.replies["/"] = flood
    with pytest.raises(ToolError, match=r"^fetch error: the (page comes in too many tiny pieces|server sends more)"):
        await fetch(timeout=60)


async def test_a_page_in_small_pieces_is_read(site: Any, fetch: Any) -> None:
    async def lines(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"5\r\nline\n\r\n" * 8_000 + b"0\r\n\r\n")
        await writer.drain()

    site.replies["/"] = lines
    assert (await fetch()).data["chars"] == 8_000 * 5 - 1


async def test_a_long_page_is_read_part_by_part(site: Any, reply: Any, fetcher: Any) -> None:
    blocks = [f"Block {n}: " + "some words of it. " * 5 for n in range(40)]
    site.replies["/"] = reply("\n".join(blocks), content_type="text/plain")
    run = fetcher([f"127.0.0.1:{site.port}"], max_chars=1_000)
    offset, shown = 0, []
    while offset is not None:
        result = await run(WebFetch(url=site.url(), offset=offset))
        lines = result.text.split("\n")[2:]
        offset = result.data["next_offset"]
        if offset is not None:
            left = result.data["chars"] - offset
            assert lines.pop() == f"[{left} of {result.data['chars']} characters left out; go on with offset {offset}]"
        shown += lines
    assert shown == [block.strip() for block in blocks]


async def test_behind_the_end_of_a_page_is_nothing(site: Any, reply: Any, fetcher: Any) -> None:
    site.replies["/"] = reply("words", content_type="text/plain")
    result = await fetcher([f"127.0.0.1:{site.port}"])(WebFetch(url=site.url(), offset=9))
    assert result.text == f"URL: {site.url()}\nExtracted text:\n[the page's text ends after 5 characters]"


async def test_broken_compression_is_an_error(site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/"] = reply(b"this is not gzip", content_encoding="gzip")
    with pytest.raises(ToolError, match=r"^fetch error: the page's compression is broken$"):
        await fetch()


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nContent-Type: text/plain\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/plain\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 300_000,
    ],
    ids=["nothing", "garbage", "cut short", "bad chunk", "endless header"],
)  # fmt: skip
async def test_a_broken_answer_is_an_error(answer: bytes, site: Any, fetch: Any) -> None:
    site.replies["/"] = answer
    with pytest.raises(ToolError, match=r"^fetch error: the connection to 127\.0\.0\.1 broke off$"):
        await fetch()
    assert len(site.requests) == 1


async def test_no_server_is_an_error_that_gives_no_address_away(fetcher: Any, names: Any) -> None:
    run = fetcher(["gone.example:9"], resolver=names(gone_example=[["127.0.0.1"]]))
    with pytest.raises(ToolError) as caught:
        await run(WebFetch(url="http://gone.example:9/"))
    assert str(caught.value) == "fetch error: no connection to gone.example:9"


async def test_an_unknown_name_is_an_error(fetcher: Any) -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("[Errno -2] Name or service not known")

    with pytest.raises(ToolError) as caught:
        await fetcher(resolver=unknown)(WebFetch(url="http://no.example/"))
    assert str(caught.value) == "fetch error: the name no.example cannot be resolved"


async def test_tls_speaks_to_the_name_not_to_the_address(fetcher: Any, detour: Any, names: Any) -> None:
    hellos: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hellos.append(await reader.read(4_096))
        writer.close()
        await writer.wait_closed()

    async with listening(handle) as port:
        run = fetcher(network=detour, resolver=names(secure_example=[["93.184.216.34"]]))
        with pytest.raises(ToolError, match=rf"^fetch error: no connection to secure\.example:{port}$"):
            await run(WebFetch(url=f"https://secure.example:{port}/"))
    assert detour.connected == [("93.184.216.34", port)]
    assert b"secure.example" in hellos[0]


async def test_a_certificate_for_nobody_is_refused(fetcher: Any, names: Any, tmp_path: Any) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = await asyncio.create_subprocess_exec(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=secure.example", "-addext", "subjectAltName=DNS:secure.example",
        "-keyout", str(key), "-out", str(certificate), stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await made.wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with listening(handle, tls=context) as port:
        run = fetcher([f"secure.example:{port}"], resolver=names(secure_example=[["127.0.0.1"]]))
        with pytest.raises(ToolError, match=r"^fetch error: the certificate of secure\.example is not valid \(self"):
            await run(WebFetch(url=f"https://secure.example:{port}/"))


async def test_the_loop_stays_free_while_a_heavy_page_is_extracted(site: Any, reply: Any, fetch: Any) -> None:
    site.replies["/"] = reply("<article>" + "<p>Some words of a long page that never ends.</p>" * 8_000 + "</article>")
    await fetch(max_chars=10, timeout=60)  # the extractor is imported
    longest, last, done = 0.0, time.monotonic(), asyncio.Event()

    async def watch() -> None:
        nonlocal longest, last
        while not done.is_set():
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    watcher = asyncio.create_task(watch())
    started = time.monotonic()
    await fetch(max_chars=10, timeout=60)
    took = time.monotonic() - started
    done.set()
    await watcher
    assert longest < max(0.25, took / 2)
