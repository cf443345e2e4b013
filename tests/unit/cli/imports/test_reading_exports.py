"""What is read out of the exports of other products; the documents are written by hand after their formats."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.cli.imports import chatgpt, letta, openwebui
from services.cli.imports.files import documents
from services.cli.imports.talks import Found, Said, Talk, Turn, milliseconds, turns_of
from services.cli.local_files import FileTrouble

AT = 1_700_000_000


def said(found: Found) -> dict[str, list[tuple[str, str]]]:
    return {talk.name: [(turn.query, turn.answer) for turn in talk.turns] for talk in found.talks}


def left(found: Found) -> dict[str, int]:
    return {what.split(" (")[0]: count for what, count in found.left_out.items() if count}


# ── Open WebUI ───────────────────────────────────────────────────────────────────────────────────────────────────


def webui_message(name: str, parent: str | None, role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "parentId": parent,
        "childrenIds": [],
        "role": role,
        "content": content,
        "timestamp": AT,
        **more,
    }


def webui_chat(*messages: dict[str, Any], current: str, **row: Any) -> dict[str, Any]:
    history = {"messages": {one["id"]: one for one in messages}, "currentId": current}
    return {
        "id": "c1", "user_id": "u", "title": "Boats", "created_at": AT - 5, "updated_at": AT + 50, "archived": False,
        "chat": {"title": "Boats", "models": ["m"], "history": history, "messages": []}, **row,
    }  # fmt: skip


def test_of_a_chat_of_open_webui_the_path_that_it_shows_is_taken() -> None:
    thought = (
        '<details type="reasoning" done="true" duration="2">\n<summary>Thought</summary>\n&gt; Hm\n</details>\nAt nine.'
    )
    chat = webui_chat(
        webui_message("1", None, "user", "When does it leave?", files=[{"type": "file", "name": "plan.pdf"}]),
        webui_message("2", "1", "assistant", "At ten.", timestamp=AT + 1),
        webui_message("3", "1", "assistant", thought, timestamp=AT + 2),
        webui_message(
            "4", "3", "user", [{"type": "text", "text": "And back?"}, {"type": "image_url"}], timestamp=AT + 3
        ),
        webui_message("5", "4", "assistant", "At six.", timestamp=AT + 4),
        webui_message("6", "5", "user", "And then?", timestamp=AT + 5),
        current="6",
    )
    found = Found()
    openwebui.read("x.json", [chat], found)
    assert said(found) == {
        "openwebui-c1": [
            ("When does it leave?\n[attachment: plan.pdf]", "At nine."),
            ("And back?\n[attachment: image_url]", "At six."),
        ]
    }
    (talk,) = found.talks
    assert (talk.title, [turn.time for turn in talk.turns]) == ("Boats", [AT * 1000, (AT + 3) * 1000])
    assert left(found) == {
        "attachments": 2,
        "messages of other branches": 1,
        "questions without an answer": 1,
    }


def test_a_chat_of_open_webui_may_have_a_list_only_or_a_loop() -> None:
    messages = [webui_message("a", None, "user", "Hi"), webui_message("b", None, "assistant", "Hello")]
    listed = {"id": "c2", "title": "L", "chat": {"messages": messages}}
    looping = webui_chat(
        webui_message("1", "2", "user", "Round?"), webui_message("2", "1", "assistant", "Yes."), current="2", id="c3"
    )
    found = Found()
    openwebui.read("x.json", [listed, looping], found)
    assert said(found) == {"openwebui-c2": [("Hi", "Hello")], "openwebui-c3": [("Round?", "Yes.")]}


def test_memories_of_open_webui_are_notes() -> None:
    rows = [
        {"id": "m", "user_id": "u", "type": "user", "content": "Likes oat milk.", "created_at": AT, "updated_at": AT}
    ]
    found = Found()
    openwebui.read("memories.json", rows, found)
    assert [(note.content, note.time) for note in found.notes] == [("Likes oat milk.", AT * 1000)]


# ── ChatGPT ──────────────────────────────────────────────────────────────────────────────────────────────────────


def node(name: str, parent: str | None, role: str = "", *parts: Any, **message: Any) -> dict[str, Any]:
    content = {"content_type": "text" if all(isinstance(one, str) for one in parts) else "multimodal_text",
               "parts": list(parts)}  # fmt: skip
    whole = {
        "id": name, "author": {"role": role, "name": None, "metadata": {}}, "create_time": AT + len(name) + 0.25,
        "content": content, "status": "finished_successfully", "weight": 1.0, "metadata": {}, "recipient": "all",
        **message,
    }  # fmt: skip
    return {"id": name, "message": whole if role else None, "parent": parent, "children": []}


def chatgpt_talk(*nodes: dict[str, Any], current: str | None, **more: Any) -> dict[str, Any]:
    return {"conversation_id": "g1", "id": "g1", "title": "Tea", "create_time": AT + 0.5, "update_time": AT + 9.5,
            "mapping": {one["id"]: one for one in nodes}, "current_node": current, **more}  # fmt: skip


TALK = chatgpt_talk(
    node("r", None),
    node("rs", "r", "system", ""),
    node("rsc", "rs", "user", "", content={"content_type": "user_editable_context", "user_profile": "I am Ann"},
         metadata={"is_visually_hidden_from_conversation": True}),
    node("rscu", "rsc", "user", {"content_type": "image_asset_pointer", "asset_pointer": "file://1"}, "What is it?",
         metadata={"attachments": [{"id": "1", "name": "cup.png"}]}),
    node("other", "rscu", "assistant", "A bowl."),
    node("rscut", "rscu", "assistant", "", content={"content_type": "thoughts", "thoughts": [{"content": "hm"}]}),
    node("rscutc", "rscut", "assistant", "", content={"content_type": "code", "text": "look()"}, recipient="python"),
    node("rscutct", "rscutc", "tool", "", content={"content_type": "execution_output", "text": "cup"}),
    node("rscutcta", "rscutct", "assistant", "A cup."),
    node("rscutctab", "rscutcta", "assistant", "Of tea."),
    node("rscutctabu", "rscutctab", "user", {"content_type": "audio_transcription", "text": "And its colour?"},
         {"content_type": "audio_asset_pointer"}),
    node("rscutctabua", "rscutctabu", "assistant", "Green."),
    current="rscutctabua",
)  # fmt: skip


def test_of_a_conversation_of_chatgpt_what_was_said_on_its_current_path_is_taken() -> None:
    found = Found()
    chatgpt.read("conversations.json", [TALK], found)
    assert said(found) == {
        "chatgpt-g1": [
            ("What is it?\n[attachment: cup.png]", "A cup.\n\nOf tea."),
            ("And its colour?\n[attachment: audio]", "Green."),
        ]
    }
    assert found.talks[0].turns[0].time == (AT + 4) * 1000 + 250
    assert left(found) == {
        "attachments": 2,
        "messages of other branches": 1,
        "the assistant's thoughts, tool calls and their results": 3,
    }


def test_without_a_current_node_the_newest_leaf_ends_the_path() -> None:
    found = Found()
    talk = chatgpt_talk(node("u", None, "user", "Q"), node("a1", "u", "assistant", "Old"),
                        node("a22", "u", "assistant", "New"), current=None)  # fmt: skip
    talk["mapping"]["u"]["children"] = ["a1", "a22"]
    chatgpt.read("conversations.json", [talk], found)
    assert said(found) == {"chatgpt-g1": [("Q", "New")]}


# ── Letta ────────────────────────────────────────────────────────────────────────────────────────────────────────


def letta_message(role: str, text: str, minute: int, **more: Any) -> dict[str, Any]:
    at = f"2025-05-01T10:{minute:02}:00+00:00"
    return {"role": role, "content": [{"type": "text", "text": text}], "created_at": at, "tool_calls": None, **more}


def packed(text: str, kind: str = "user_message") -> str:
    return json.dumps({"type": kind, "message": text, "time": "2025-05-01 10:00:00 AM UTC+0000"})


SENDING = {
    "id": "c",
    "type": "function",
    "function": {"name": "send_message", "arguments": '{"message": "Hello Ann!"}'},
}
SEARCHING = {"id": "d", "type": "function", "function": {"name": "archival_memory_search", "arguments": "{}"}}
MESSAGES = [
    letta_message("system", "You are …", 0),
    letta_message("user", packed("x", "login"), 1),
    letta_message("user", packed("I am Ann"), 2),
    letta_message("assistant", "A new person.", 3, tool_calls=[SEARCHING]),
    letta_message("tool", "{}", 3),
    letta_message("assistant", "I greet her.", 4, tool_calls=[SENDING]),
    letta_message("user", "How are you?", 5),
    letta_message("assistant", "Fine.", 6),
]
BLOCKS = [{"label": "human", "value": "Ann, likes tea.", "updated_at": "2025-05-01T11:00:00"},
          {"label": "persona", "value": "I am kind."}, {"label": "todo", "value": ""}]  # fmt: skip
ONE = {"name": "My agent!", "messages": MESSAGES, "core_memory": BLOCKS, "system": "You are …", "version": "0.7"}
SEVERAL = {
    "agents": [{"id": "agent-0", "name": "My agent!", "messages": MESSAGES}], "blocks": BLOCKS,
    "files": [{"id": "file-0"}], "sources": [], "groups": [], "tools": [], "mcp_servers": [], "metadata": {},
}  # fmt: skip


@pytest.mark.parametrize("document", [ONE, SEVERAL])
def test_of_an_agent_file_what_was_said_and_what_is_remembered_is_taken(document: dict[str, Any]) -> None:
    found = Found()
    letta.read("a.af", document, found)
    began = 1_746_093_600_000
    (talk,) = found.talks
    assert (talk.name, talk.title) == (f"letta-My-agent--{began}", "My agent!")
    assert [(turn.query, turn.answer, turn.time) for turn in talk.turns] == [
        ("I am Ann", "Hello Ann!", began + 120_000),
        ("How are you?", "Fine.", began + 300_000),
    ]
    assert [(note.content, note.time) for note in found.notes] == [("human: Ann, likes tea.", began + 3_600_000)]
    files_there = {"files and sources": 1} if "agents" in document else {}
    assert left(found) == {
        **files_there,
        "instructions and other messages that nobody said": 1,
        "the assistant's thoughts, tool calls and their results": 2,
        "the product's own notices to the agent": 1,
        "what an agent says of itself": 1,
    }


# ── in common ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("read", "document"),
    [
        (openwebui.read, ["x"]), (openwebui.read, {"id": 1}), (openwebui.read, [{"mapping": {}}]),
        (chatgpt.read, {"conversations": []}), (chatgpt.read, [{"title": "x"}]), (chatgpt.read, [1]),
        (letta.read, []), (letta.read, {"agents": 1}), (letta.read, {"agents": ["x"]}),
    ],
)  # fmt: skip
def test_another_document_is_refused_with_what_is_expected(read: Any, document: Any) -> None:
    with pytest.raises(FileTrouble, match=r"name\.json is no (export|agent file) of"):
        read("name.json", document, Found())


def test_times_only_grow_and_are_made_where_there_are_none() -> None:
    messages = [Said("user", "a", 500), Said("assistant", "1"), Said("user", "b", 400), Said("assistant", "2", 401),
                Said("user", "c"), Said("assistant", "3")]  # fmt: skip
    assert [turn.time for turn in turns_of(messages, 100, Counter())] == [500, 501, 502]
    assert [turn.time for turn in turns_of(messages[4:], 100, Counter())] == [100]


def test_what_is_no_whole_turn_is_counted() -> None:
    counts: Counter[str] = Counter()
    messages = [Said("assistant", "Welcome!"), Said("user", "a"), Said("user", "b"), Said("assistant", " "),
                Said("assistant", "1"), Said("user", "x" * 400_001), Said("assistant", "2"),
                Said("user", "late")]  # fmt: skip
    assert [(turn.query, turn.answer) for turn in turns_of(messages, 1, counts)] == [("a\n\nb", "1")]
    assert +counts == Counter({"answers without a question": 1, "turns longer than 400,000 characters": 1,
                               "questions without an answer": 1})  # fmt: skip


@pytest.mark.parametrize(
    ("value", "ms"),
    [(AT, AT * 1000), (AT + 0.25, AT * 1000 + 250), (AT * 1000, AT * 1000), (AT * 10**6, AT * 1000),
     (AT * 10**9, AT * 1000), (0, None), (-1, None), (True, None), ("1", None), (None, None), (10**21, None)],
)  # fmt: skip
def test_times_of_all_units_are_milliseconds(value: object, ms: int | None) -> None:
    assert milliseconds(value) == ms


def test_a_very_long_conversation_is_several() -> None:
    talk = Talk("t", "Title", tuple(Turn("q" * 10, "a" * 10, time) for time in range(7)))
    pieces = list(talk.pieces(45, 100))
    assert [(one.name, one.title, len(one.turns)) for one in pieces] == [
        ("t", "Title", 2), ("t.2", "Title (2)", 2), ("t.3", "Title (3)", 2), ("t.4", "Title (4)", 1)
    ]  # fmt: skip
    assert [len(one.turns) for one in talk.pieces(10, 100)] == [1] * 7
    assert [len(one.turns) for one in talk.pieces(1_000, 4)] == [4, 3]
    assert list(talk.pieces(1_000, 100)) == [talk]


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_a_folder_and_an_archive_hold_the_same(tmp_path: Path) -> None:
    text = json.dumps([TALK])
    folder = tmp_path / "export" / "deep"
    folder.mkdir(parents=True)
    (folder / "conversations.json").write_text(text)
    (folder / "user.json").write_text("{}")
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        archive.writestr("export/conversations-000.json", text)
        archive.writestr("export/chat.html", "<html>")
    (tmp_path / "renamed.json").write_text("\ufeff" + text)
    for path in (tmp_path / "export", tmp_path / "export.zip", tmp_path / "renamed.json"):
        assert [document for _, document in documents(path, chatgpt.NAMES)] == [[TALK]]


def test_json_lines_are_a_list(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(documents(path, openwebui.NAMES)) == [("all.jsonl", [{"a": 1}, {"a": 2}])]


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    cases: dict[str, bytes] = {"half.json": b'[{"a": 1', "empty.json": b" ", "binary.json": b"\x00\xff"}
    for name, raw in cases.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(FileTrouble, match=rf"{name} is (not JSON|empty)"):
            list(documents(tmp_path / name, openwebui.NAMES))
    with pytest.raises(FileTrouble, match="there is no file"):
        list(documents(tmp_path / "none.json", openwebui.NAMES))
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileTrouble, match=r"holds no conversations\.json"):
        list(documents(tmp_path / "folder", chatgpt.NAMES))
    (tmp_path / "broken.zip").write_bytes(b"PK\x05\x06" + b"\x01" * 18)
    with pytest.raises(FileTrouble, match=r"cannot be read|is not JSON"):
        list(documents(tmp_path / "broken.zip", chatgpt.NAMES))
    with (tmp_path / "large.json").open("wb") as sparse:
        sparse.truncate(500 * 1024**2 + 1)
    with pytest.raises(FileTrouble, match="split it"):
        list(documents(tmp_path / "large.json", openwebui.NAMES))
