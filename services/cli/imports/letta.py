"""Letta: agent files (`.af`), of one agent as version 1 wrote them, and of several as they are written now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from services.cli.imports.talks import Found, Note, Said, milliseconds
from services.cli.local_files import FileTrouble

NAMES = ("*.af", "*.json")
# An agent's picture of itself is no memory of its user.
_OWN_BLOCKS = frozenset({"persona"})


def read(name: str, document: Any, found: Found) -> None:
    """Adds what a document holds. Raises FileTrouble when it is no such export."""
    if isinstance(document, dict) and isinstance(document.get("agents"), list):
        agents, blocks = document["agents"], document.get("blocks") or []
        found.left_out["files and sources (bring them in by themselves)"] += sum(
            len(document.get(kind) or []) for kind in ("files", "sources")
        )
    elif isinstance(document, dict) and isinstance(document.get("core_memory"), list):
        agents, blocks = [document], document["core_memory"]
    else:
        raise FileTrouble(f"{name} is no agent file of Letta: `agents`, or `core_memory` and `messages`, are expected")
    for number, agent in enumerate(agents):
        if not isinstance(agent, dict):
            raise FileTrouble(f"{name} is no agent file of Letta: an agent of it is no object")
        messages = [one for one in agent.get("messages") or [] if isinstance(one, dict)]
        # ids of a file are made anew with each export: an agent is known by its name and its first message
        first = _time(messages[0].get("created_at")) if messages else None
        title = str(agent.get("name") or f"agent {number + 1}")
        ident = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in title)[:60]
        found.add(f"letta-{ident}-{first or 0}", title, _said(messages, found), first)
    for block in blocks:
        value = str(block.get("value") or "").strip() if isinstance(block, dict) else ""
        if not value:
            continue
        if block.get("label") in _OWN_BLOCKS:
            found.left_out["what an agent says of itself (persona)"] += 1
        else:
            found.notes.append(Note(f"{block.get('label') or 'memory'}: {value}", _time(block.get("updated_at"))))


def _said(messages: list[dict[str, Any]], found: Found) -> Iterator[Said]:
    for message in messages:
        role, time = message.get("role"), _time(message.get("created_at"))
        text, others = _text(message)
        found.left_out["attachments (their names stay in the text)"] += len(others)
        text = "\n".join([text, *(f"[attachment: {one}]" for one in others)]).strip()
        if role == "user":
            spoken = _unpacked(text)
            if spoken is None:
                found.left_out["the product's own notices to the agent"] += 1
            else:
                yield Said("user", spoken, time)
        elif role == "assistant":
            calls = [one.get("function") for one in message.get("tool_calls") or [] if isinstance(one, dict)]
            spoken = "\n\n".join(filter(None, map(_sent, calls))) or (None if calls else text)
            if spoken is None:
                found.left_out["the assistant's thoughts, tool calls and their results"] += 1
            else:
                yield Said("assistant", spoken, time)
        elif role == "tool":
            found.left_out["the assistant's thoughts, tool calls and their results"] += 1
        else:
            found.left_out["instructions and other messages that nobody said"] += 1


def _text(message: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The words of a message, and what else it has; thoughts are neither."""
    content = message.get("content") if message.get("content") is not None else message.get("text")
    if not isinstance(content, list):
        return str(content or ""), []
    parts = [one for one in content if isinstance(one, dict)]
    texts = [str(one.get("text") or "") for one in parts if one.get("type") == "text"]
    return "\n".join(texts), [str(one["type"]) for one in parts if one.get("type") in ("image", "file")]


def _unpacked(text: str) -> str | None:
    """What a user said, out of the envelope that it is kept in; None for a notice in such an envelope."""
    try:
        packed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if not isinstance(packed, dict) or not isinstance(packed.get("type"), str):
        return text
    if packed["type"] != "user_message":
        return None
    return str(packed.get("message") or "")


def _sent(function: Any) -> str:
    """What a call says to the user: older agents answer by calling a tool."""
    if not isinstance(function, dict) or function.get("name") != "send_message":
        return ""
    arguments = function.get("arguments")
    try:
        values = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        return ""
    return str(values.get("message") or "") if isinstance(values, dict) else ""


def _time(value: Any) -> int | None:
    """ISO 8601 (without a zone: UTC), or a number."""
    if not isinstance(value, str):
        return milliseconds(value)
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        return None
    return milliseconds((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
