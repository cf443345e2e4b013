"""A server's answer as the text that a model reads."""

from __future__ import annotations

from typing import Any

import orjson
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from services.mcp.secrets import Secrets
from shared.errors import ToolError
from shared.participant.tool import ToolResult

# Of an error's text, in characters.
_LONGEST_ERROR = 4_000


def tool_result(answer: CallToolResult, secrets: Secrets, max_bytes: int) -> ToolResult:
    """Text as it is, images and resources by a line that names them. Raises ToolError when the server calls it one."""
    text = "\n".join(_block(block) for block in answer.content)
    structured = answer.structured_content
    if not text and structured is not None:
        text = orjson.dumps(structured, default=str).decode()
    text = secrets.masked(text)
    if answer.is_error:
        raise ToolError(text[:_LONGEST_ERROR].strip() or "the tool failed, and did not say why")
    size = len(encoded := text.encode(errors="replace"))
    if cut := size > max_bytes:
        shown = encoded[:max_bytes].decode(errors="ignore")
        text = f"{shown}\n[cut: the result has {size} bytes, and {max_bytes} are shown; ask for less at once]"
    data: dict[str, Any] = {"truncated": cut}
    if structured is not None and len(orjson.dumps(structured, default=str)) <= max_bytes:
        data["structured"] = secrets.masked_in(structured)
    return ToolResult(text or "[the tool has nothing to say]", data)


def _block(block: Any) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent():
            return f"[image, {block.mime_type}, {_bytes(block.data)} bytes]"
        case AudioContent():
            return f"[sound, {block.mime_type}, {_bytes(block.data)} bytes]"
        case ResourceLink():
            return f"[resource {block.name}: {block.uri}]"
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return f"[resource {resource.uri}{_type(resource.mime_type)}]\n{resource.text}"
        case EmbeddedResource(resource=BlobResourceContents() as resource):
            return f"[resource {resource.uri}{_type(resource.mime_type)}, {_bytes(resource.blob)} bytes]"
        case _:
            return f"[content of an unknown kind: {getattr(block, 'type', type(block).__name__)}]"


def _type(mime_type: str | None) -> str:
    return f", {mime_type}" if mime_type else ""


def _bytes(base64: str) -> int:
    """How much a base64 text stands for."""
    return len(base64.rstrip("=")) * 3 // 4
