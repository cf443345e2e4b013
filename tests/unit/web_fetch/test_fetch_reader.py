"""The processes in which pages are read: hostile pages, and others beside them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.hostile_page import PAGES, PLAIN_TEXT
from support.waiting import eventually

from services.web_fetch.errors import FetchError
from services.web_fetch.page import Page
from services.web_fetch.reader import PROCESSES, Reader, Reading, open_reader
from services.web_fetch.url import parse

ROOT = Path(__file__).parents[3]
MB = 1024 * 1024


def page(data: bytes, kind: str = "text/html") -> Page:
    return Page(parse("http://a.example/"), 200, kind, kind, data, False, (parse("http://a.example/"),))


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    async with open_reader() as reader:
        yield reader


async def read(reader: Reader, html: str) -> Reading:
    return await reader.read(page(html.encode()), 0, 3_000)


def children() -> list[int]:
    """The processes that read pages for this one."""
    return [child.pid for child in psutil.Process().children() if "services.web_fetch.child" in child.cmdline()]


@pytest.fixture(scope="module")
def hostile() -> dict[str, dict[str, Any]]:
    """What each page took."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "support.hostile_page"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {told["kind"]: told for told in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PAGES, *PLAIN_TEXT])
def test_hostile_page_of_five_megabytes_is_read_in_its_limits(kind: str, hostile: dict[str, dict[str, Any]]) -> None:
    took = hostile[kind]
    assert took["memory"] <= 150 * MB
    assert "more time or memory" not in took["said"]


async def test_a_process_reads_one_page_after_the_other(reader: Reader) -> None:
    assert (await read(reader, "<h1>One</h1>")).text == "One"
    first = children()
    assert (await read(reader, "<h1>Two</h1>")).text == "Two"
    assert children() == first
    assert len(first) == 1


async def test_a_killed_process_is_replaced_and_the_page_is_read(reader: Reader) -> None:
    await read(reader, "<p>x")
    (pid,) = children()
    os.kill(pid, signal.SIGKILL)
    assert "words" in (await read(reader, "<p>words")).text
    assert pid not in children()


async def test_a_page_that_kills_every_process_is_an_error(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(FetchError, match=r"^fetch error: the page takes more time or memory than a page may$"):
        await read(reader, "<p>x")
    monkeypatch.undo()
    assert (await read(reader, "<p>x")).text == "x"


async def test_a_page_that_nobody_waits_for_holds_no_place(reader: Reader) -> None:
    heavy = b"<ul>" + b"<li><a href=x>Link text</a>" * 5_100
    for _ in range(PROCESSES + 1):
        running = asyncio.create_task(reader.read(page(heavy), 0, 10))
        await eventually(lambda: bool(children()))
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
    assert children() == []
    assert (await read(reader, "<p>x")).text == "x"


async def test_other_pages_are_read_beside_heavy_ones(reader: Reader) -> None:
    def heavy() -> asyncio.Task[Reading]:
        return asyncio.create_task(reader.read(page(b"<ul>" + b"<li><a href=x>Link text</a>" * 5_100), 0, 10))

    running = [heavy()]
    (pid,) = await eventually(children)
    os.kill(pid, signal.SIGSTOP)
    running += [heavy(), heavy()]
    for n in range(3):
        assert (await read(reader, f"<p>{n}")).text == str(n)
    assert not any(task.done() for task in running)
    os.kill(pid, signal.SIGCONT)
    assert all(reading.text for reading in await asyncio.gather(*running))


async def test_a_process_knows_nothing_of_the_service(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_REDIS_URL", "redis://web:secret@bus")
    await read(reader, "<p>x")
    (pid,) = children()
    assert "secret" not in str(psutil.Process(pid).environ())


async def test_no_process_outlives_the_reader() -> None:
    async with open_reader() as reader:
        await asyncio.gather(*(read(reader, "<p>x") for _ in range(4)))
        assert len(children()) == PROCESSES
    assert children() == []


@pytest.mark.parametrize("kind", ["text/html", "", "text/plain"])
async def test_a_process_that_read_much_is_not_kept(kind: str, reader: Reader) -> None:
    data: Any = b"words of a long text\n" * 30_000
    await reader.read(page(data, kind), 0, 100)
    assert children() == []
