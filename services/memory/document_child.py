"""The process in which files are read."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from services.memory.document_text import text_of
from services.memory.formats import FileRefused
from shared.reading.child import serve
from shared.reading.pdf import MEMORY, load_parser


def read(data: bytes, request: dict[str, Any]) -> dict[str, Any]:
    try:
        found = text_of(data, request["kind"], request["name"])
    except FileRefused as exc:
        return {"refused": str(exc)}
    return {"title": found.title, "blocks": [astuple(block) for block in found.blocks], "cut": found.cut}


def _load(request: dict[str, Any]) -> None:
    if request["kind"] == "pdf":
        load_parser()


if __name__ == "__main__":
    serve(read, memory=MEMORY, cpu_seconds=lambda request: request["cpu"], prepare=_load)
