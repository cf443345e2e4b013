"""A small store that speaks as much of S3 as files need, on loopback, in a thread: objects by name, in one bucket."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

KEY_ID, SECRET = "a-key-id", "a-secret"
_FORMAT = "%Y-%m-%dT%H:%M:%S.000Z"


class S3Server:
    """objects: name → (bytes, when they came). away: it answers 503 to everything."""

    bucket = "files"

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, datetime]] = {}
        self.away = False
        self.url = ""


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    store = S3Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _refused(self, status: int, code: str) -> None:
            self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

        def _name(self) -> str | None:
            """The object's name; None for a request that was refused."""
            path = unquote(urlsplit(self.path).path).removeprefix("/")
            bucket, _, name = path.partition("/")
            if store.away:
                self._refused(503, "SlowDown")
            elif not self.headers.get("Authorization", "").startswith(f"AWS4-HMAC-SHA256 Credential={KEY_ID}/"):
                self._refused(403, "InvalidAccessKeyId")
            elif bucket != store.bucket:
                self._refused(404, "NoSuchBucket")
            else:
                return name
            return None

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if (name := self._name()) is not None:
                store.objects[name] = body, datetime.now(UTC)
                self._answer(200, ETag=f'"{md5(body).hexdigest()}"')

        def do_GET(self) -> None:
            if (name := self._name()) is None:
                return
            if not name:
                self._list()
            elif name not in store.objects:
                self._refused(404, "NoSuchKey")
            else:
                body, came = store.objects[name]
                tag, shown = f'"{md5(body).hexdigest()}"', came.strftime("%a, %d %b %Y %H:%M:%S GMT")
                self._answer(200, body, ETag=tag, Last_Modified=shown)

        do_HEAD = do_GET

        def _list(self) -> None:
            prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
            entries = "".join(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(body)}</Size>"
                f"<LastModified>{came.strftime(_FORMAT)}</LastModified></Contents>"
                for name, (body, came) in sorted(store.objects.items())
                if name.startswith(prefix)
            )
            whole = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
            self._answer(200, whole.encode(), Content_Type="application/xml")

        def do_POST(self) -> None:
            """Several are deleted at once: so clients delete one, too."""
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if self._name() is not None:
                names = re.findall("<Key>([^<]*)</Key>", body)
                for name in names:
                    store.objects.pop(unescape(name), None)
                told = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
                whole = f"<DeleteResult>{told}</DeleteResult>"
                self._answer(200, whole.encode(), Content_Type="application/xml")

        def do_DELETE(self) -> None:
            if (name := self._name()) is not None:
                store.objects.pop(name, None)
                self._answer(204)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        store.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            thread.join()
