"""Open WebUI: chats as its export of all chats or of one writes them, and its list of memories."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from services.cli.imports.talks import Found, Note, Said, milliseconds
from services.cli.local_files import FileTrouble

NAMES = ("*.json", "*.jsonl", "*.ndjson")
# Thoughts, calls and results are written into the text of an answer.
_DETAILS = re.compile(r"<details\s[^>]*\btype=\"[^\"]*\"[^>]*>.*?</details>\s*", re.DOTALL | re.IGNORECASE)


def read(name: str, document: Any, found: Found) -> None:
    """Adds what a document holds. Raises FileTrouble when it is no such export."""
    rows = document if isinstance(document, list) else [document]
    for row in rows:
        if not isinstance(row, dict):
            raise FileTrouble(f"{name} is no export of Open WebUI: a list of chats or of memories is expected")
        if isinstance(row.get("chat"), dict):
            _chat(row, row["chat"], found)
        elif isinstance(row.get("history"), dict):
            # a chat without its row in the database
            _chat(row, row, found)
        elif isinstance(row.get("content"), str):
            if row["content"].strip():
                found.notes.append(Note(row["content"].strip(), milliseconds(row.get("created_at"))))
        else:
            raise FileTrouble(f"{name} is no export of Open WebUI: an entry of it is neither a chat nor a memory")


def _chat(row: Mapping[str, Any], chat: Mapping[str, Any], found: Found) -> None:
    history = chat.get("history") if isinstance(chat.get("history"), dict) else {}
    assert isinstance(history, dict)
    tree = {key: value for key, value in (history.get("messages") or {}).items() if isinstance(value, dict)}
    listed = [one for one in chat.get("messages") or [] if isinstance(one, dict)]
    current = history.get("currentId") or row.get("current_message_id") or (listed[-1].get("id") if listed else None)
    path = list(_path(tree, current)) if current in tree else listed
    # a message that is only in the list is not of another branch
    aside = [one for one in tree.values() if one not in path and one.get("role") in ("user", "assistant")]
    if aside and path:
        found.left_out["messages of other branches"] += len(aside)
    began = milliseconds(row.get("created_at") or chat.get("timestamp"))
    name = str(row.get("id") or chat.get("id") or (path[0].get("id") if path else ""))
    title = row.get("title") or chat.get("title") or ""
    found.add(f"openwebui-{name}", str(title), _said(path, found), began)


def _path(tree: Mapping[str, dict[str, Any]], current: Any) -> Iterator[dict[str, Any]]:
    """From the first message to the current one."""
    back: dict[str, dict[str, Any]] = {}
    while isinstance(current, str) and current in tree and current not in back:
        back[current] = tree[current]
        current = tree[current].get("parentId")
    yield from reversed(back.values())


def _said(path: list[dict[str, Any]], found: Found) -> Iterator[Said]:
    for message in path:
        role = message.get("role")
        if role not in ("user", "assistant"):
            found.left_out["instructions and other messages that nobody said"] += 1
            continue
        content = message.get("content")
        names = [str(one.get("name") or one.get("type") or "file") for one in _rows(message.get("files"))]
        if isinstance(content, list):
            names += [str(one.get("type")) for one in _rows(content) if one.get("type") != "text"]
            content = "\n".join(str(one.get("text") or "") for one in _rows(content) if one.get("type") == "text")
        found.left_out["attachments (their names stay in the text)"] += len(names)
        text = "\n".join([_DETAILS.sub("", str(content or "")).strip(), *(f"[attachment: {one}]" for one in names)])
        yield Said(role, text.strip(), milliseconds(message.get("timestamp")))


def _rows(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
