"""The web console: one page and its files. It is static; all that it shows comes over the API with the user's key."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

from services.gateway.errors import not_found

router = APIRouter(include_in_schema=False)

_FOLDER = files("services.gateway") / "console"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PAGE = "index.html"
HEADERS = {
    # nothing from elsewhere, no inline script, and no text that becomes HTML, even if the page had a mistake
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # a page and scripts of two versions must not meet after an update
    "Cache-Control": "no-cache",
}


def _load() -> dict[str, tuple[bytes, str]]:
    """The console's files with their types, by name."""
    found = {}
    for entry in _FOLDER.iterdir():
        media = _TYPES.get(entry.name.rpartition(".")[2])
        if media is not None:
            found[entry.name] = entry.read_bytes(), media
    return found


FILES = _load()


def _served(name: str) -> Response:
    if name not in FILES:
        raise not_found("file")
    content, media = FILES[name]
    return Response(content, headers={**HEADERS, "Content-Type": media})


@router.get("/")
async def page() -> Response:
    return _served(_PAGE)


@router.get("/console/{name}")
async def asset(name: str) -> Response:
    return _served(name)
