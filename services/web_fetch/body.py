"""A response body of limited size: decompressed piece by piece, never further than the limit."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from services.web_fetch.errors import FetchError

# The request asks for these. Brotli and Zstandard are decoded too: some servers send them unasked.
ACCEPT_ENCODING = "gzip, deflate"

# The most members of a gzip body or frames of a zstd body; block-wise compression has 64 kB in each. The limit ends a
# body of empty ones.
MAX_MEMBERS = 1_000
# Bytes that are decompressed in one step.
PIECE = 65_536
# RFC 9659: a zstd body of HTTP has a window of at most 8 MB.
_ZSTD_WINDOW_LOG = 23

_GZIP = 16 + zlib.MAX_WBITS
_GZIP_MAGIC = b"\x1f"
_ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", *(bytes([n, 0x2A, 0x4D, 0x18]) for n in range(0x50, 0x60)))


class Decoder(Protocol):
    @property
    def whole(self) -> bool:
        """Whether the compressed data may end here."""

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        """Take the next bytes from the wire; yield the decoded bytes, at most about PIECE at once."""


class Body:
    """Collects at most `limit` bytes after decompression. cut: the body was longer."""

    def __init__(self, content_encoding: str, limit: int) -> None:
        """Raises FetchError for an unknown content encoding."""
        self._limit = limit
        codings = [
            name for part in content_encoding.lower().split(",") if (name := part.strip()) not in ("", "identity")
        ]
        coding = ", ".join(codings)
        if coding not in _DECODERS:
            raise FetchError(f"the content encoding {coding[:40]!r} is not supported")
        self._decode = _DECODERS[coding]()
        self._data = bytearray()
        self._begun = False
        self.cut = False

    @property
    def broken_off(self) -> bool:
        """Whether the compressed data ended before its end mark, below the limit. An empty body is whole."""
        return self._begun and not self.cut and not self._decode.whole

    def __len__(self) -> int:
        return len(self._data)

    @property
    def data(self) -> bytes:
        return bytes(self._data)

    def begin(self, size: int) -> bytes:
        return bytes(self._data[:size])

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes from the wire, up to the limit. Raises FetchError for broken compression."""
        if self.cut or not chunk:
            return
        self._begun = True
        for plain in self._decode(chunk):
            room = self._limit - len(self._data)
            self._data += plain[:room]
            if len(plain) > room:
                self.cut = True
                return


class _Identity:
    whole = True

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        yield chunk


class _Zlib:
    """gzip with one or several members; deflate with and without the zlib header."""

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._members = _Members()
        self._inflater: zlib._Decompress | None = None

    @property
    def whole(self) -> bool:
        return self._inflater is not None and self._inflater.eof

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        # After a full piece, output may be left without input.
        full = False
        try:
            while chunk or full:
                if self._inflater is None:
                    self._inflater = zlib.decompressobj(_GZIP if self._gzip else self._deflate_window(chunk[0]))
                elif self._inflater.eof:
                    # Anything else behind the end is padding.
                    if not self._gzip or not chunk.startswith(_GZIP_MAGIC):
                        return
                    self._members.add()
                    self._inflater = zlib.decompressobj(_GZIP)
                plain = self._inflater.decompress(chunk, PIECE)
                yield plain
                full = len(plain) == PIECE
                chunk = self._inflater.unconsumed_tail or self._inflater.unused_data
        except zlib.error as exc:
            raise _broken() from exc

    @staticmethod
    def _deflate_window(first: int) -> int:
        # "deflate" means zlib, but some servers send the bare stream.
        return zlib.MAX_WBITS if first & 0x0F == 8 and first >> 4 <= 7 else -zlib.MAX_WBITS


class _Brotli:
    def __init__(self) -> None:
        # Imported at first use: few servers send it.
        import brotli

        self._error = brotli.error
        self._decompressor = brotli.Decompressor()

    @property
    def whole(self) -> bool:
        return bool(self._decompressor.is_finished())

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        try:
            while not self._decompressor.is_finished():
                plain = self._decompressor.process(chunk, output_buffer_limit=PIECE)
                yield plain
                # The decompressor accepts more data even while it still has output.
                if not plain and self._decompressor.can_accept_more_data():
                    return
                chunk = b""
        except self._error as exc:
            raise _broken() from exc


class _Zstd:
    """One or several frames."""

    def __init__(self) -> None:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd

        self._error = zstd.ZstdError
        options = {int(zstd.DecompressionParameter.window_log_max): _ZSTD_WINDOW_LOG}
        self._new = partial(zstd.ZstdDecompressor, options=options)
        self._decompressor = self._new()
        self._members = _Members()
        # The first bytes of a frame without its complete magic number.
        self._rest = b""

    @property
    def whole(self) -> bool:
        return bool(self._decompressor.eof)

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        chunk, self._rest = self._rest + chunk, b""
        try:
            while True:
                if self._decompressor.eof:
                    # Anything else behind the end is padding.
                    if not chunk.startswith(_ZSTD_MAGICS):
                        self._rest = chunk if len(chunk) < len(_ZSTD_MAGICS[0]) else b""
                        return
                    self._members.add()
                    self._decompressor = self._new()
                yield self._decompressor.decompress(chunk, PIECE)
                if self._decompressor.needs_input:
                    return
                chunk = self._decompressor.unused_data if self._decompressor.eof else b""
        except self._error as exc:
            raise _broken() from exc


class _Members:
    def __init__(self) -> None:
        self._count = 0

    def add(self) -> None:
        self._count += 1
        if self._count > MAX_MEMBERS:
            raise FetchError("the page's compression has too many members")


def _broken() -> FetchError:
    return FetchError("the page's compression is broken")


_DECODERS: dict[str, Callable[[], Decoder]] = {
    "": _Identity,
    "gzip": lambda: _Zlib(gzip=True),
    "x-gzip": lambda: _Zlib(gzip=True),
    "deflate": lambda: _Zlib(gzip=False),
    "br": _Brotli,
    "zstd": _Zstd,
}
