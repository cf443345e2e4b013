"""A response body of limited size: decompressed piece by piece, never further than the limit."""

from __future__ import annotations

import zlib

from services.web_fetch.errors import FetchError

# What is asked for. Brotli is left out: its Python bindings are one more dependency, and every server has gzip.
ACCEPT_ENCODING = "gzip, deflate"

# Members of a gzip body; those of block-wise compression have 64 KB each. Empty ones would be work without an end.
MAX_MEMBERS = 1_000

_GZIP = 16 + zlib.MAX_WBITS
_GZIP_MAGIC = 0x1F


class Body:
    """Collects at most `limit` bytes after decompression. `cut` says that there was more."""

    def __init__(self, content_encoding: str, limit: int) -> None:
        self._limit = limit
        codings = [
            name for part in content_encoding.lower().split(",") if (name := part.strip()) not in ("", "identity")
        ]
        self._coding = ", ".join(codings)
        if self._coding not in ("", "gzip", "x-gzip", "deflate"):
            raise FetchError(f"the content encoding {self._coding[:40]!r} is not supported")
        self._members = 0
        self._inflater: zlib._Decompress | None = None
        self._data = bytearray()
        self.cut = False

    def __len__(self) -> int:
        return len(self._data)

    @property
    def data(self) -> bytes:
        return bytes(self._data)

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes from the wire; stops in the middle of them once the limit is passed."""
        try:
            while chunk and not self.cut:
                # One byte more than may be kept, to know whether there is more.
                room = self._limit - len(self._data) + 1
                plain, chunk = self._decode(chunk, room)
                self._data += plain[: room - 1]
                self.cut = len(plain) >= room
        except zlib.error as exc:
            raise FetchError("the page's compression is broken") from exc

    def _decode(self, chunk: bytes, room: int) -> tuple[bytes, bytes]:
        """At most `room` decoded bytes, and the input that is left."""
        if not self._coding:
            return chunk[:room], chunk[room:]
        if self._inflater is None:
            self._inflater = zlib.decompressobj(self._window(chunk))
        elif self._inflater.eof:
            # A gzip body may have several members, one after the other; anything else after the end is padding.
            if self._coding == "deflate" or chunk[0] != _GZIP_MAGIC:
                return b"", b""
            self._members += 1
            if self._members > MAX_MEMBERS:
                raise FetchError("the page's compression has too many members")
            self._inflater = zlib.decompressobj(_GZIP)
        plain = self._inflater.decompress(chunk, room)
        return plain, self._inflater.unconsumed_tail or self._inflater.unused_data

    def _window(self, chunk: bytes) -> int:
        if self._coding != "deflate":
            return _GZIP
        # "deflate" means zlib, but some servers send the bare stream.
        return zlib.MAX_WBITS if chunk[0] & 0x0F == 8 and chunk[0] >> 4 <= 7 else -zlib.MAX_WBITS
