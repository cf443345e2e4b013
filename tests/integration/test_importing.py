"""`local2 import` against a gateway with a memory behind it, and the route that conversations come in by."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.backups import Place, place
from support.memories import memory_settings
from support.services import announced, running

from services.memory.service import app as memory_app

AT = 1_700_000_000_000


@pytest.fixture
async def stack(redis_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with place(redis_url, tmp_path / "gateway") as found:
        settings = memory_settings(redis_url, tmp_path / "memory", found.stage.server.url)
        async with running(memory_app, settings):
            await announced(redis_url, "memory")
            yield found


def chat(name: str, *turns: tuple[str, str], began: int = AT // 1000) -> dict[str, Any]:
    """A chat as Open WebUI exports it."""
    messages: dict[str, Any] = {}
    last = None
    for number, (role, text) in enumerate(
        (side, text) for turn in turns for side, text in zip(("user", "assistant"), turn, strict=True)
    ):
        one = f"{name}-{number}"
        messages[one] = {"id": one, "parentId": last, "role": role, "content": text, "timestamp": began + number}
        last = one
    history = {"messages": messages, "currentId": last}
    return {"id": name, "title": f"About {name}", "created_at": began, "chat": {"history": history}}


BOATS = (("Shall we take the ferry?", "Yes."), ("When does it leave?", "At nine."))
TEA = (("Which tea?", "Green."),)


async def everything(stack: Place) -> tuple[Any, Any]:
    """All sessions whole, and all memories; without what tells when they came."""
    listed = (await stack.site.http.get("/sessions")).json()["sessions"]
    whole = [(await stack.site.http.get(f"/sessions/{one['session_id']}")).json() for one in listed]
    return whole, sorted((await stack.site.http.get("/memory/export")).text.splitlines())


async def test_an_export_is_shown_first_then_taken_in_and_the_second_time_changes_nothing(
    stack: Place, tmp_path: Path
) -> None:
    path = tmp_path / "chats.json"
    note = {"id": "m1", "content": "Likes oat milk.", "created_at": AT // 1000}
    path.write_text(json.dumps([chat("boats", *BOATS), chat("tea", *TEA, began=AT // 1000 + 60), note]))

    shown = await stack.local2("import", "openwebui", str(path))
    assert shown.exit_code == 0, shown.output
    assert "2 conversations with 3 turns, 1 memory" in shown.output
    assert await everything(stack) == ([], [])

    taken = await stack.local2("import", "openwebui", str(path), "--write")
    assert taken.exit_code == 0, taken.output
    assert "sessions: 2 added or longer (3 turns), 0 already there" in taken.output
    assert "memories: 4 added, 0 already there" in taken.output
    sessions, memories = await everything(stack)
    tea, boats = sessions
    assert [(one["session_id"], one["title"], one["created"], one["updated"]) for one in sessions] == [
        ("openwebui-tea", "About tea", AT + 60_000, AT + 60_000),
        ("openwebui-boats", "About boats", AT, AT + 2_000),
    ]
    assert [(turn["query"], turn["answer"], turn["time"]) for turn in boats["turns"]] == [
        ("Shall we take the ferry?", "Yes.", AT),
        ("When does it leave?", "At nine.", AT + 2_000),
    ]
    assert [message["content"] for message in tea["messages"] if message["role"] != "system"] == list(TEA[0])
    before = {one.get("query"): one["metadata"].get("before") for one in map(json.loads, memories)}
    assert before == {
        "Shall we take the ferry?": None,
        "When does it leave?": "Shall we take the ferry?\nYes.",
        "Which tea?": None,
        None: None,
    }

    again = await stack.local2("import", "openwebui", str(path), "--yes")
    assert "sessions: 0 added or longer (0 turns), 2 already there" in again.output
    assert "memories: 0 added, 4 already there" in again.output
    assert await everything(stack) == (sessions, memories)


async def test_a_longer_conversation_is_added_to_and_another_branch_of_it_changes_nothing(
    stack: Place, tmp_path: Path
) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([chat("boats", *BOATS[:1])]))
    await stack.local2("import", "openwebui", str(path), "--write", "--no-memories")
    path.write_text(json.dumps([chat("boats", *BOATS)]))
    longer = await stack.local2("import", "openwebui", str(path), "--write", "--no-memories")
    assert "1 added or longer (1 turn)" in longer.output
    sessions, memories = await everything(stack)
    assert [turn["query"] for turn in sessions[0]["turns"]] == [turn[0] for turn in BOATS]
    assert memories == []
    path.write_text(json.dumps([chat("boats", BOATS[0], ("Is it far?", "No."))]))
    other = await stack.local2("import", "openwebui", str(path), "--write")
    assert "because they differ from what was imported before: 1" in other.output
    assert await everything(stack) == (sessions, [])
    # what is imported is deleted as any session
    assert (await stack.site.http.delete("/sessions/openwebui-boats")).json()["deleted"]
    assert await everything(stack) == ([], [])


async def test_a_broken_export_is_a_sentence_and_nothing_of_it_is_taken(stack: Place, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps([chat("boats", *BOATS)]))
    (folder / "b.json").write_text('[{"id": ')
    done = await stack.local2("import", "openwebui", str(folder), "--write")
    assert done.exit_code == 1
    assert "b.json is not JSON" in done.output
    assert await everything(stack) == ([], [])


def session(name: str, *turns: tuple[str, int], **more: Any) -> dict[str, Any]:
    said = [{"query": text, "answer": f"Yes, {text}", "time": time} for text, time in turns]
    return {"session_id": name, "turns": said, **more}


async def test_sessions_of_one_name_are_each_users_own(stack: Place) -> None:
    keys = {}
    for name in ("ann", "bob"):
        made = await stack.site.http.post("/keys", json={"name": name, "user_id": name, "role": "user"})
        keys[name] = {"Authorization": f"Bearer {made.json()['key']}"}
        body = {"sessions": [session("talk", (f"I am {name}", AT))]}
        for state in ("added", "there"):
            answer = await stack.site.http.post("/sessions/import", json=body, headers=keys[name])
            assert [one["state"] for one in answer.json()["sessions"]] == [state]
    for name, key in keys.items():
        shown = (await stack.site.http.get("/sessions/talk", headers=key)).json()
        assert [turn["query"] for turn in shown["turns"]] == [f"I am {name}"]


async def test_a_turn_that_is_imported_never_has_the_name_of_a_query(stack: Place) -> None:
    """Deleting a session removes what is kept of its queries: these must not be somebody else's."""
    asked = await stack.site.http.post("/query", json={"query": "mine"})
    query_id = asked.json()["query_id"]
    made = await stack.site.http.post("/keys", json={"name": "eve", "user_id": "eve", "role": "user"})
    eve = {"Authorization": f"Bearer {made.json()['key']}"}
    body = {"sessions": [session("talk", ("x", int(query_id.partition("-")[0])))]}
    await stack.site.http.post("/sessions/import", json=body, headers=eve)
    assert (await stack.site.http.delete("/sessions/talk", headers=eve)).status_code == 200
    assert (await stack.site.http.get(f"/queries/{query_id}")).json()["query"] == "mine"


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"sessions": []}, "sessions"),
    ({"sessions": [session("a b", ("x", 1))]}, "letters, digits"),
    ({"sessions": [session("a")]}, "turns"),
    ({"sessions": [session("a", ("x", 2), ("y", 2))]}, "later time"),
    ({"sessions": [session("a", ("x", -1))]}, "time"),
    ({"sessions": [session("a", ("", 1))]}, "query"),
    ({"sessions": [session("a", ("x", 1), user_id="bob")]}, "user_id"),
)


async def test_what_is_no_session_is_refused_with_a_sentence(stack: Place) -> None:
    for body, words in WRONG:
        answer = await stack.site.http.post("/sessions/import", json=body)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (422, True), answer.text
    assert await everything(stack) == ([], [])
