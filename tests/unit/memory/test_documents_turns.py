"""Who waits is served in turn: one user's hundred files do not delay another one's. And files whose place is away."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.waiting import eventually

from services.memory.blobs import BlobsAway, FolderBlobs
from services.memory.chunks import Block
from services.memory.document_text import DocumentText
from services.memory.documents import Documents
from services.memory.incoming import Incoming
from services.memory.library import Library
from services.memory.transfer import FileEndpoint, TooManyUploads
from services.memory.vectors import Space, Vector
from shared.contracts import MemoryRead
from shared.errors import TransientError

SPACE = Space("m", 2)
AWAY = "the bucket of files does not answer as it should: 503"


class Reader:
    """Tells what it has read, in order; each file is let through by one release."""

    def __init__(self) -> None:
        self.read_files: list[str] = []
        self.let = asyncio.Semaphore(0)
        self.fails = ""

    async def read(self, data: bytes, _kind: str, _name: str) -> DocumentText:
        await self.let.acquire()
        text = data.decode()
        if text == self.fails:
            self.fails = ""
            raise OSError(text)
        self.read_files.append(text)
        return DocumentText("", [Block("", text)], cut=False)


class Embedder:
    def __init__(self) -> None:
        self.space: Space | None = SPACE
        self.batches: list[list[str]] = []
        self.fails = 0
        self.meanwhile: Any = None

    async def documents(self, texts: list[str]) -> list[Vector]:
        if self.fails:
            self.fails -= 1
            raise TransientError("it is away")
        self.batches.append(texts)
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return [Vector("m", (1.0, 0.0)) for _ in texts]


class Bytes(FolderBlobs):
    """Files in a folder. away: digests of the files for which the folder does not answer. tried: one release each."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.away: set[str] = set()
        self.tried = asyncio.Semaphore(0)

    def keep(self, path: Path, owner: str, digest: str) -> None:
        self._answer(digest)
        super().keep(path, owner, digest)

    def content(self, owner: str, digest: str) -> Path | bytes:
        self._answer(digest)
        return super().content(owner, digest)

    def _answer(self, digest: str) -> None:
        if digest in self.away:
            self.tried.release()
            raise BlobsAway(AWAY)


class House:
    def __init__(self, folder: Path) -> None:
        self.blobs = Bytes(folder)
        self.library = Library(folder, self.blobs)
        self.reader, self.embedder = Reader(), Embedder()
        settings = SimpleNamespace(
            documents=SimpleNamespace(chunk=800, max_uploads=2, max_file_bytes=100, max_files=9, max_total_bytes=999),
            embed_batch=2,
        )
        context: Any = SimpleNamespace(
            settings=settings,
            bus=SimpleNamespace(publish=self._publish, now_ms=lambda: 1, lease=self._lease),
            replica="r",
        )
        parts: Any = (context, self.library, self.reader, self.embedder, lambda _step: None)
        self.documents = Documents(*parts)

    async def _publish(self, *wishes: Any) -> None:
        pass

    async def _lease(self, *_: Any) -> bool:
        return True

    async def add(self, user: str, text: str) -> Any:
        """Add a file of that text; return the message that asks for its reading."""
        path = self.library.fresh()
        path.write_text(text)
        incoming = Incoming(path, "a.txt", "text/plain", digest_of(text))
        file, _ = await self.documents.take(user, incoming, "a.txt", "text/plain", None, None)
        return SimpleNamespace(payload=MemoryRead(user_id=user, file_id=file.id))

    @contextlib.asynccontextmanager
    async def embedding(self) -> AsyncIterator[None]:
        """While the vectors of the chunks are made."""
        running = asyncio.create_task(self.documents.run())
        try:
            yield
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    def owners(self) -> list[list[str]]:
        """The users whose texts were embedded, batch by batch."""
        return [[text.split("\n")[-1].split()[0] for text in batch] for batch in self.embedder.batches]


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.asynccontextmanager
async def asking(documents: Documents) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the endpoint of files, with its token."""
    endpoint = FileEndpoint(documents)
    transport, headers = httpx.ASGITransport(endpoint.app), {"Authorization": f"Bearer {endpoint.token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://memory", headers=headers) as http:
        yield http


@pytest.fixture
async def house(tmp_path: Path) -> House:
    return House(tmp_path / "documents")


async def test_who_comes_later_with_one_file_is_read_next(house: House) -> None:
    mine = [await house.add("ann", f"ann {n}") for n in range(6)]
    house.reader.let.release()
    await house.documents.read(mine[0])
    theirs = [await house.add("bob", "bob's one"), await house.add("cid", "cid's one")]
    for _ in range(20):
        house.reader.let.release()
    for wish in [*mine[1:], *theirs]:
        await house.documents.read(wish)
    assert house.reader.read_files[:5] == ["ann 0", "ann 1", "bob's one", "cid's one", "ann 2"]
    # each once
    assert sorted(house.reader.read_files) == sorted([f"ann {n}" for n in range(6)] + ["bob's one", "cid's one"])


async def test_two_who_read_at_once_do_not_read_the_same_and_what_one_fails_at_the_other_does(house: House) -> None:
    mine, other = await house.add("ann", "ann"), await house.add("bob", "bob")
    house.reader.fails = "ann"
    # bob's turn reads ann's first, because she has waited longer
    first = asyncio.create_task(house.documents.read(other))
    await asyncio.sleep(0)
    second = asyncio.create_task(house.documents.read(mine))
    for _ in range(4):
        house.reader.let.release()
    with pytest.raises(OSError, match="ann"):
        await first
    await second
    # as it is delivered again
    await house.documents.read(other)
    assert sorted(house.reader.read_files) == ["ann", "bob"]


async def fill(house: House, user: str, count: int) -> None:
    for n in range(count):
        wish = await house.add(user, f"{user} {n}")
        house.reader.let.release()
        await house.documents.read(wish)


async def test_vectors_are_made_a_batch_a_turn_and_who_comes_meanwhile_has_one_too(house: House) -> None:
    await fill(house, "ann", 6)
    await fill(house, "bob", 2)
    house.embedder.meanwhile = lambda: fill(house, "cid", 1)
    async with house.embedding():
        await eventually(lambda: sum(map(len, house.embedder.batches)) == 9, 10, "each chunk has a vector")
    assert house.owners() == [["ann"] * 2, ["bob"] * 2, ["ann"] * 2, ["cid"], ["ann"] * 2]


async def test_what_a_model_that_is_away_leaves_is_made_later(house: House) -> None:
    await fill(house, "ann", 2)
    async with house.embedding():
        await eventually(lambda: house.owners() == [["ann"] * 2], 10, "ann's chunks have vectors")
        house.embedder.fails = 1
        await fill(house, "bob", 1)
        await eventually(lambda: not house.embedder.fails, 10, "the model was away")
        # The next file wakes the one that makes vectors.
        await fill(house, "cid", 1)
        await eventually(lambda: len(house.embedder.batches) == 3, 10, "the others have vectors, too")
    assert sorted(house.owners()[1:]) == [["bob"], ["cid"]]


# ── the place of the files is away ───────────────────────────────────────────────────────────────────────────────


async def test_a_file_is_read_when_the_place_of_files_is_back(house: House) -> None:
    wish, other = await house.add("ann", "ann 0"), await house.add("bob", "bob")
    for _ in range(2):
        house.reader.let.release()
    house.blobs.away = {digest_of("ann 0")}
    # A missing file blocks only its own reading.
    reading = asyncio.create_task(house.documents.read(wish))
    for _ in range(2):
        await house.blobs.tried.acquire()
    await house.documents.read(other)
    file = house.library.file("ann", wish.payload.file_id)
    assert file is not None
    assert (file.state, reading.done()) == ("reading", False)
    house.blobs.away.clear()
    await reading
    assert house.reader.read_files == ["bob", "ann 0"]


async def test_a_file_that_cannot_be_put_away_is_refused_with_a_sentence(house: House) -> None:
    house.blobs.away = {digest_of("some text")}
    async with asking(house.documents) as http:
        answer = await http.post("/files", params={"user_id": "ann", "name": "a.txt"}, content=b"some text")
        assert answer.status_code == 503
        assert answer.json()["error"] == {"code": "memory_unavailable", "message": AWAY}
    # nothing is left of it
    assert house.library.files("ann", 5) == []
    assert list(house.library.incoming.iterdir()) == []


async def test_a_file_whose_bytes_are_gone_is_not_there(house: House, tmp_path: Path) -> None:
    wish = await house.add("ann", "ann 0")
    file = house.library.file("ann", wish.payload.file_id)
    assert file is not None
    assert await house.documents.content("ann", file.id, text=False, wait=0) is not None
    (stored,) = (tmp_path / "documents").rglob(file.hash)
    stored.unlink()
    assert await house.documents.content("ann", file.id, text=False, wait=0) is None


# ── the endpoint of files ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer x", "Basic {token}", "Bearer {token}x", "Bearer é"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/files"), ("GET", "/files/file-1")])
async def test_file_endpoint_refuses_a_request_without_its_token(
    house: House, method: str, path: str, header: str | None
) -> None:
    endpoint, another = FileEndpoint(house.documents), FileEndpoint(house.documents)
    assert endpoint.token != another.token
    async with httpx.AsyncClient(transport=httpx.ASGITransport(endpoint.app), base_url="http://memory") as http:
        for token in (endpoint.token, another.token):
            given = header.format(token=token).encode() if header is not None else None
            headers = {"Authorization": given} if given is not None else {}
            answer = await http.request(method, path, params={"user_id": "ann"}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
        stale = {"Authorization": f"Bearer {another.token}"}
        assert (await http.request(method, path, params={"user_id": "ann"}, headers=stale)).status_code == 401


async def pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size):
        yield b"x"


@pytest.mark.parametrize(
    ("method", "path", "params", "content", "status", "code"),
    [
        pytest.param("POST", "/files", {}, b"x", 422, "invalid_request", id="no user"),
        pytest.param("POST", "/files", {"user_id": "ann"}, b"x" * 101, 413, "too_large", id="too large"),
        pytest.param("POST", "/files", {"user_id": "ann"}, 101, 413, "too_large", id="too large, without a length"),
        pytest.param(
            "POST", "/files", {"user_id": "ann", "keep_seconds": "-1"}, b"", 422, "invalid_request", id="past"
        ),
        pytest.param("GET", "/files/file-1", {"user_id": "ann"}, b"", 404, "not_found", id="not there"),
        pytest.param("GET", "/files/{id}", {"user_id": "bob"}, b"", 404, "not_found", id="another user's"),
        pytest.param("GET", "/files/{id}", {"user_id": "ann", "wait": "900"}, b"", 422, "invalid_request", id="wait"),
    ],
)
async def test_file_endpoint_refuses_with_code_and_sentence(
    house: House, method: str, path: str, params: dict[str, str], content: bytes | int, status: int, code: str
) -> None:
    wish = await house.add("ann", "ann's")
    async with asking(house.documents) as http:
        body = content if isinstance(content, bytes) else pieces(content)
        answer = await http.request(method, path.format(id=wish.payload.file_id), params=params, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert list(house.library.incoming.iterdir()) == []


async def test_file_endpoint_takes_some_files_of_a_user_at_once(house: House) -> None:
    go = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"some "
        await go.wait()
        yield b"text"

    async with asking(house.documents) as http:

        async def add(user: str, body: AsyncIterator[bytes] | bytes) -> int:
            return (await http.post("/files", params={"user_id": user, "name": "a.txt"}, content=body)).status_code

        under_way = [asyncio.create_task(add("ann", slow())) for _ in range(2)]
        await eventually(lambda: len(list(house.library.incoming.iterdir())) == 2)
        assert (await add("ann", b"x"), await add("bob", b"x")) == (429, 201)
        go.set()
        assert sorted(await asyncio.gather(*under_way)) == [200, 201]
        assert await add("ann", b"y") == 201


async def test_announced_upload_counts_until_it_begins(house: House) -> None:
    endpoint = FileEndpoint(house.documents)
    for _ in range(2):
        endpoint.announce("ann")
    with pytest.raises(TooManyUploads, match="2 files of yours are on their way"):
        endpoint.announce("ann")
    endpoint.announce("bob")
    headers = {"Authorization": f"Bearer {endpoint.token}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(endpoint.app), base_url="http://m") as http:
        assert (await http.post("/files", params={"user_id": "ann"}, content=b"x", headers=headers)).status_code == 201
    endpoint.announce("ann")
