"""The process that reads PDFs."""

from __future__ import annotations

from typing import Any

from shared.reading.child import serve
from shared.reading.pdf import CPU_SECONDS, MEMORY, PdfUnreadable, load_parser, read_pdf


def read(data: bytes, request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a PdfText, or of a PdfUnreadable. `seconds` of the request: see `read_pdf`."""
    try:
        found = read_pdf(data, seconds=request["seconds"])
    except PdfUnreadable as exc:
        return {"why": exc.why, "detail": exc.detail}
    return {"title": found.title, "blocks": found.blocks, "pages": found.pages, "read": found.read}


if __name__ == "__main__":
    serve(read, memory=MEMORY, cpu_seconds=lambda _request: CPU_SECONDS, prepare=lambda _request: load_parser())
