"""tests/eval/memory/stack.py against a gateway with a memory behind it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.backups import Place, place
from support.http_gateway import ADMIN_KEY
from support.memories import memory_settings
from support.services import announced, running

from services.memory.service import app as memory_app

PROGRAM = str(Path(__file__).parents[1] / "eval" / "memory" / "stack.py")
DAY = "2026-03-{:02}T09:00:00Z"


@pytest.fixture
async def stack(redis_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with place(redis_url, tmp_path / "gateway") as found:
        settings = memory_settings(redis_url, tmp_path / "memory", found.stage.server.url)
        async with running(memory_app, settings):
            await announced(redis_url, "memory")
            yield found


async def measured(stack: Place, *arguments: str, key: str = ADMIN_KEY) -> tuple[int, str, str]:
    """Run the program; return its exit status, its output and its errors."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL2_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, PROGRAM, *arguments),
        env={**own, "LOCAL2_API_URL": stack.site.url, "LOCAL2_API_KEY": key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


def turn(number: int, query: str, answer: str = "", **known: Any) -> dict[str, Any]:
    return {"id": f"t{number}", "time": DAY.format(number), "query": query, "answer": answer, **known}


def talk(name: str, user: str, *turns: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "conversation", "id": name, "user": user, "turns": turns}


def asked(user: str, query: str, *evidence: str, **more: str) -> dict[str, Any]:
    return {"kind": "question", "id": query, "user": user, "query": query, "evidence": evidence, **more}


def data_set(tmp_path: Path) -> Path:
    """Two users who say nearly the same; one answer that was praised and one that was not."""
    descale = "How to descale the espresso machine?"
    good, bad = {"score": 5, "won": True, "feedback": 1}, {"score": 1, "won": False, "feedback": -1}
    lock = "Which number opens my bicycle lock?"
    lines = [
        talk("a", "ann", turn(1, "My bicycle lock opens with 4471"), turn(2, "Where is Lisbon?", "In Portugal.")),
        talk("r", "ann", turn(4, descale, "Hot water.", **bad), turn(5, descale, "Citric acid, rinse twice.", **good)),
        talk("b", "bob", turn(3, "My bicycle lock opens with 9058")),
        asked("ann", lock, "t1"),
        asked("bob", lock, "t3"),
        asked("ann", "descale the espresso machine", "t5", type="rated"),
        asked("ann", "What did I say on 2 March?", "t2"),
        asked("bob", "zeppelin", type="unanswerable"),
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


async def test_a_running_stack_is_measured_and_left_as_it_was(stack: Place, tmp_path: Path) -> None:
    status, out, err = await measured(stack, str(data_set(tmp_path)), "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["questions"] == 5
    # each user's own lock first, the praised answer first, the day by its name
    assert (found["recall@5"], found["MRR"], found["false hits"]) == (1.0, 1.0, 0.0)
    keys = (await stack.site.http.get("/keys")).json()["keys"]
    assert [key["name"] for key in keys if key["name"].startswith("eval-")] == []
    # what is left are marks against late messages, which go by themselves
    left = await stack.stage.bus.link.call("KEYS", "*eval-*")
    assert [key for key in left if not key.startswith(b"local2:memory:gone:")] == []
    assert (await stack.site.http.get("/memory/engrams")).json()["total"] == 0


async def test_the_table_names_the_measures(stack: Place, tmp_path: Path) -> None:
    status, out, err = await measured(stack, str(data_set(tmp_path)))
    assert status == 0, err
    for word in ("recall@5", "MRR", "this stack", "rated", "5 questions, median"):
        assert word in out


async def test_an_ordinary_key_cannot_measure(stack: Place, tmp_path: Path) -> None:
    made = await stack.site.http.post("/keys", json={"name": "ann", "user_id": "ann", "role": "user"})
    status, out, err = await measured(stack, str(data_set(tmp_path)), key=made.json()["key"])
    assert (status, out) == (1, "")
    assert "administrator" in err


async def test_a_stack_without_keys_is_not_touched(redis_url: str, tmp_path: Path) -> None:
    async with place(redis_url, tmp_path / "gateway", auth="off") as open_stack:
        settings = memory_settings(redis_url, tmp_path / "memory", open_stack.stage.server.url)
        async with running(memory_app, settings):
            await announced(redis_url, "memory")
            status, out, err = await measured(open_stack, str(data_set(tmp_path)))
            assert (status, out) == (1, "")
            assert "does not ask for keys" in err
            assert (await open_stack.site.http.get("/memory/engrams")).json()["total"] == 0


async def test_what_was_imported_is_removed_after_a_failure(stack: Place, tmp_path: Path) -> None:
    lines = data_set(tmp_path).read_text().splitlines()
    # longer than the API takes
    lines[1] = json.dumps({**json.loads(lines[1]), "turns": [turn(4, "x" * 200_000), turn(5, "y")]})
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines))
    status, out, err = await measured(stack, str(path))
    assert (status, out) == (1, "")
    assert "imported 3 of 4 turns" in err
    keys = (await stack.site.http.get("/keys")).json()["keys"]
    assert [key["name"] for key in keys if key["name"].startswith("eval-")] == []
