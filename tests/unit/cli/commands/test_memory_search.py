"""`local2 memory search`: what its options ask for, and what it shows of the answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support.backups import run_local2

HIT = {
    "id": "1-0:A",
    "kind": "turn",
    "time": 1_700_000_000_000,
    "query": "Where is the boat?",
    "answer": "In Bergen.",
    "content": None,
    "topic": None,
    "relevance": 0.9,
    "score": None,
    "sentiment": None,
    "pairwise_winner": None,
    "pairwise_verdict": None,
    "respondent_id": "A",
}
LOG = "[Memory recall — 2026-05-31]\n\n1. …\n\n=== CONVERSATION LOGS ===\n\n[session s]\nUser: Where is\x1b the boat?"


@dataclass
class Memory:
    """A gateway with one answer to a search."""

    answer: dict[str, Any]
    loopback: Any
    asked: dict[str, Any] = field(default_factory=dict)

    async def search(self, *args: str, **changed: Any) -> str:
        answer = json.dumps({**self.answer, **changed}).encode()

        async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
            url = urlsplit(heard.path)
            self.asked = {"path": url.path, **parse_qs(url.query)}
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + answer)

        self.loopback.play = play
        url = f"http://127.0.0.1:{self.loopback.port}"
        told = await asyncio.to_thread(run_local2, url, "key", "memory", "search", *args)
        assert told.exit_code == 0, told.output
        return str(told.output)


@pytest.fixture
def memory(loopback_gateway: Any) -> Memory:
    return Memory({"hits": [HIT], "text": LOG, "degraded": None, "rerank": None, "log": None}, loopback_gateway)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ([], {"limit": ["5"]}),
        (
            ["--also", "harbour", "--also", "rain", "--vectors", "--rerank", "--log", "-n", "7"],
            {"limit": ["7"], "queries": ["harbour", "rain"], "hybrid": ["false"], "do_rerank": ["true"],
             "log": ["true"]},
        ),
    ],
    ids=["the stack's settings", "options"],
)  # fmt: skip
async def test_memory_search_asks_as_its_options_say(memory: Memory, options: list[str], asked: dict[str, Any]) -> None:
    assert "Bergen" in await memory.search("boat", *options)
    assert memory.asked == {"path": "/memory", "query": ["boat"], **asked}


async def test_memory_search_shows_the_log_and_why_nothing_was_reranked(memory: Memory) -> None:
    trouble = {"by": "model", "of": 20, "trouble": "not reranked: the server is full"}
    shown = await memory.search("boat", rerank=trouble, log=[HIT])
    assert "note: not reranked: the server is full" in shown
    assert "[session s]\nUser: Where is the boat?" in shown
    assert "\x1b" not in shown
    assert "[session s]" not in await memory.search("boat")
