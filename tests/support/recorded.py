"""Exchanges with a genuine Ollama 0.32.14, recorded in ollama_wire/, played by a server on loopback.

A recording has one JSON object a line: the case, the request, the response's head, its lines (`line`: JSON, `text`:
anything else), and how it ended. Long lists and middles were shortened.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.testing.model_server import ScriptedModelServer

RECORDINGS = {path.stem: path for path in sorted(Path(__file__).with_name("ollama_wire").glob("*.ndjson"))}
_MORE = re.compile(r"\(… (\d+) more\)")


class Recorded(ScriptedModelServer):
    """Answers every request as it was answered in one recording, whatever it asks."""

    def __init__(self, name: str) -> None:
        super().__init__()
        parts = [orjson.loads(line) for line in RECORDINGS[name].read_bytes().splitlines() if line.strip()]
        self.request: dict[str, Any] = parts[1]["request"]
        head = parts[2]["response"]
        lines = [part for part in parts[3:] if "line" in part or "text" in part]
        body = b"\n".join(orjson.dumps(_whole(p["line"])) if "line" in p else p["text"].encode() for p in lines)
        streamed = "ndjson" in head["headers"].get("content-type", "")
        headers = {name: value for name, value in head["headers"].items() if name == "content-type"}
        self.asked: list[tuple[str, str, Any]] = []

        async def play(request: Request) -> Response:
            content = await request.body()
            self.asked.append((request.method, request.url.path, orjson.loads(content) if content else None))
            return Response(body + b"\n" * streamed, head["status"], headers=headers)

        self.app = Starlette(routes=[Route("/{path:path}", play, methods=["GET", "POST"])])


def _whole(value: Any) -> Any:
    """A value whose long lists were shortened, with as many members as it had."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    if value and isinstance(value[-1], str) and (more := _MORE.fullmatch(value[-1])):
        return [*value[:-1], *[0.01] * int(more[1])]
    return [_whole(inner) for inner in value]
