"""The web console: one page and its files. It is static; all that it shows comes over the API with the user's key."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request, Response

from services.gateway.http.errors import not_found

router = APIRouter(include_in_schema=False)

# What `make console` and the image build; it may come while the gateway runs, and be built again.
FOLDER = Path(str(files("services"))) / "console" / "dist"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE = "index.html"
HEADERS = {
    # Only this origin, no inline script, and no HTML from text except by the one policy, which sanitises it.
    # `blob:` is for images alone: the page fetches them with the key and makes an address for their bytes.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'; trusted-types local2",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# The page names its files by their hashes: they never change, and it is asked for each time.
_FOR_EVER = "public, max-age=31536000, immutable"
_ASKED = "no-cache"
_MISSING = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="3"><title>LoCAL2</title></head>
<body><h1>LoCAL2 answers; its console is not built yet</h1>
<p><code>make run</code> builds it after the first start, which takes a minute: this page shows it as soon as it is
there. Where it does not come, <code>make console</code> builds it and says what is missing (it needs the npm registry,
once).</p>
<p>Until then: <code>local2 ask "What is the capital of France?"</code>, or the API, which
<a href="openapi.json">describes itself</a>.</p></body></html>
"""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media: str
    # the same by gzip; None where the build made none
    compressed: bytes | None


class Built:
    """The files of a build, read once; again when its page is another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state: tuple[int, int] | None = None
        self._files: dict[str, _File] = {}

    def file(self, name: str) -> _File | None:
        """The page, or a file of it by its bare name."""
        try:
            found = (self._folder / _PAGE).stat()
            state = (found.st_mtime_ns, found.st_size)
        except OSError:
            return None
        if state != self._state:
            self._files, self._state = self._read(), state
        return self._files.get(name)

    def _read(self) -> dict[str, _File]:
        paths = [self._folder / _PAGE, *sorted((self._folder / "console").glob("*"))]
        return {path.name: self._one(path) for path in paths if path.suffix in _TYPES}

    @staticmethod
    def _one(path: Path) -> _File:
        smaller = path.with_name(f"{path.name}.gz")
        return _File(path.read_bytes(), _TYPES[path.suffix], smaller.read_bytes() if smaller.exists() else None)


built = Built(FOLDER)


def _accepts_gzip(request: Request) -> bool:
    for part in request.headers.get("accept-encoding", "").lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _served(request: Request, file: _File, keep: str) -> Response:
    headers = {**HEADERS, "Content-Type": file.media, "Cache-Control": keep, "Vary": "Accept-Encoding"}
    if file.compressed is not None and _accepts_gzip(request):
        return Response(file.compressed, headers={**headers, "Content-Encoding": "gzip"})
    return Response(file.content, headers=headers)


@router.get("/")
async def page(request: Request) -> Response:
    file = built.file(_PAGE)
    return _served(request, file or _File(_MISSING.encode(), _TYPES[".html"], None), _ASKED)


@router.get("/console/{name}")
async def asset(request: Request, name: str) -> Response:
    file = built.file(name) if name != _PAGE else None
    if file is None:
        raise not_found("file")
    return _served(request, file, _FOR_EVER)
