"""ChatGPT: the `conversations.json` of its data export, alone or in the archive that it comes in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from services.cli.imports.talks import Found, Said, milliseconds
from services.cli.local_files import FileTrouble

# Large exports come in several numbered files.
NAMES = ("conversations.json", "conversations-*.json")
# What the assistant writes for itself or for its tools.
_WORKINGS = frozenset({"thoughts", "reasoning_recap", "code", "execution_output", "tether_quote",
                       "tether_browsing_display", "system_error"})  # fmt: skip


def read(name: str, document: Any, found: Found) -> None:
    """Adds what a document holds. Raises FileTrouble when it is no such export."""
    if not isinstance(document, list) or not all(
        isinstance(one, dict) and isinstance(one.get("mapping"), dict) for one in document
    ):
        raise FileTrouble(f"{name} is no export of ChatGPT: a list of conversations with a `mapping` each is expected")
    for talk in document:
        tree = {key: node for key, node in talk["mapping"].items() if isinstance(node, dict)}
        current = talk.get("current_node")
        if current not in tree:
            current = _newest_leaf(tree)
        path = list(_path(tree, current))
        on_path = {id(node) for node in path}
        found.left_out["messages of other branches"] += sum(
            bool(_shown(node)) for node in tree.values() if id(node) not in on_path
        )
        ident = talk.get("conversation_id") or talk.get("id") or (path[0].get("id") if path else "")
        began = milliseconds(talk.get("create_time"))
        found.add(f"chatgpt-{ident}", str(talk.get("title") or ""), _said(path, found), began)


def _newest_leaf(tree: Mapping[str, dict[str, Any]]) -> str | None:
    leaves = [key for key, node in tree.items() if not node.get("children")]
    return max(leaves, key=lambda key: milliseconds((tree[key].get("message") or {}).get("create_time")) or 0,
               default=None)  # fmt: skip


def _path(tree: Mapping[str, dict[str, Any]], current: Any) -> Iterator[dict[str, Any]]:
    """From the first node to the current one."""
    back: dict[str, dict[str, Any]] = {}
    while isinstance(current, str) and current in tree and current not in back:
        back[current] = tree[current]
        current = tree[current].get("parent")
    yield from reversed(back.values())


def _shown(node: Mapping[str, Any]) -> dict[str, Any] | None:
    """The message of a node, when a person or the assistant has said it to the other."""
    message = node.get("message")
    if not isinstance(message, dict) or _role(message) not in ("user", "assistant"):
        return None
    return message


def _role(message: Mapping[str, Any]) -> str:
    author = message.get("author")
    return str(author.get("role")) if isinstance(author, dict) else ""


def _said(path: list[dict[str, Any]], found: Found) -> Iterator[Said]:
    for node in path:
        message = node.get("message")
        if not isinstance(message, dict):
            continue
        meta = message.get("metadata") if isinstance(message.get("metadata"), dict) else {}
        content = message.get("content") if isinstance(message.get("content"), dict) else {}
        assert isinstance(meta, dict)
        assert isinstance(content, dict)
        kind, role = str(content.get("content_type")), _role(message)
        if role == "tool" or kind in _WORKINGS or message.get("recipient") not in (None, "all"):
            found.left_out["the assistant's thoughts, tool calls and their results"] += 1
            continue
        if role not in ("user", "assistant") or kind.endswith("editable_context"):
            # the root is a system message without words
            found.left_out["instructions and other messages that nobody said"] += bool(_texts(content)[0])
            continue
        if meta.get("is_visually_hidden_from_conversation"):
            found.left_out["hidden messages"] += 1
            continue
        texts, others = _texts(content)
        files = meta.get("attachments") if isinstance(meta.get("attachments"), list) else []
        assert isinstance(files, list)
        names = [str(one.get("name") or "file") for one in files if isinstance(one, dict)]
        # an image that was sent stands in the text and in the list
        names += others[len(names) :]
        found.left_out["attachments (their names stay in the text)"] += len(names)
        text = "\n".join([*texts, *(f"[attachment: {one}]" for one in names)])
        yield Said(role, text.strip(), milliseconds(message.get("create_time")))


def _texts(content: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The words of a message, and what else it has: images, sound."""
    texts: list[str] = []
    others: list[str] = []
    parts = content.get("parts")
    for part in parts if isinstance(parts, list) else [content.get("text")]:
        if isinstance(part, str):
            texts += [part] if part.strip() else []
        elif isinstance(part, dict):
            kind = str(part.get("content_type") or "part")
            if isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                others.append(kind.removesuffix("_asset_pointer"))
    return texts, others
