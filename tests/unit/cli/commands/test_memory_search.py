"""`local2 memory search`: what its options ask for, and what it shows of the answer."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.commands import memory

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


class Gateway:
    """In the place of the API: what was asked, and one answer."""

    def __init__(self, **answer: Any) -> None:
        self.answer = {"hits": [HIT], "text": LOG, "degraded": None, "rerank": None, "log": None, **answer}
        self.asked: dict[str, Any] = {}

    def get(self, path: str, **params: Any) -> Any:
        self.asked = {"path": path, **{name: value for name, value in params.items() if value is not None}}
        return self.answer


def said(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, *args: str) -> str:
    monkeypatch.setattr(memory, "with_api", lambda call: call(gateway))
    result = CliRunner().invoke(memory.memory, ["search", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_without_options_the_stacks_settings_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    assert "Bergen" in said(gateway, monkeypatch, "boat")
    assert gateway.asked == {"path": "/memory", "query": "boat", "limit": 5}


def test_options_say_how_it_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    said(
        gateway, monkeypatch, "boat", "--also", "harbour", "--also", "rain", "--vectors", "--rerank", "--log", "-n", "7"
    )
    assert gateway.asked == {
        "path": "/memory",
        "query": "boat",
        "limit": 7,
        "queries": ["harbour", "rain"],
        "hybrid": False,
        "do_rerank": True,
        "log": True,
    }


def test_the_log_and_why_nothing_was_reranked_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = {"by": "model", "of": 20, "trouble": "not reranked: the server is full"}
    shown = said(Gateway(rerank=trouble, log=[HIT]), monkeypatch, "boat")
    assert "note: not reranked: the server is full" in shown
    assert "[session s]\nUser: Where is the boat?" in shown
    assert "\x1b" not in shown
    assert "[session s]" not in said(Gateway(), monkeypatch, "boat")
