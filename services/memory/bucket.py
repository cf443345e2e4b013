"""The bytes of files in a bucket of a store that speaks S3, instead of the folder beside the databases.

Source: `obstore` (the object_store crate of Apache Arrow), which signs, repeats what may be repeated and finds
credentials as Amazon's own tools do, where none are given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from services.memory.blobs import BlobsAway

# Seconds until a store that does not answer counts as away, with all that is tried again.
_PATIENCE = 15
_LONGEST_REASON = 300


class BucketBlobs:
    """`address`: `s3://bucket/prefix`. `endpoint`: of a store that is not Amazon's. `key_id`, `secret`: None where the
    environment has them (AWS_ACCESS_KEY_ID …) or the machine itself."""

    def __init__(
        self, address: str, endpoint: str | None, region: str | None, key_id: str | None, secret: str | None
    ) -> None:
        place = urlsplit(address)
        given: dict[str, Any] = {
            "endpoint": endpoint, "region": region, "access_key_id": key_id, "secret_access_key": secret,
        }  # fmt: skip
        self._store = S3Store(
            place.netloc,
            prefix=place.path.strip("/") or None,
            client_options={
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
                "connect_timeout": timedelta(seconds=5),
                "timeout": timedelta(seconds=4 * _PATIENCE),
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=_PATIENCE)},
            **{name: value for name, value in given.items() if value is not None},
        )

    def keep(self, path: Path, owner: str, digest: str) -> None:
        with _told():
            obstore.put(self._store, _name(owner, digest), path)
        path.unlink(missing_ok=True)

    def there(self, owner: str, digest: str) -> bool:
        with _told(), contextlib.suppress(FileNotFoundError):
            obstore.head(self._store, _name(owner, digest))
            return True
        return False

    def content(self, owner: str, digest: str) -> Path | bytes:
        with _told():
            return bytes(obstore.get(self._store, _name(owner, digest)).bytes())

    def drop(self, owner: str, digest: str) -> None:
        with _told(), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, _name(owner, digest))

    def drop_all(self, owner: str) -> None:
        for digest, _ in list(self.left(owner)):
            self.drop(owner, digest)

    def left(self, owner: str) -> Iterator[tuple[str, float]]:
        with _told():
            for page in obstore.list(self._store, prefix=owner):
                for one in page:
                    yield one["path"].rpartition("/")[2], one["last_modified"].timestamp()


def _name(owner: str, digest: str) -> str:
    return f"{owner}/{digest}"


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What the store refuses, or that it is away, as BlobsAway; what is not there stays FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as exc:
        reason = " ".join(str(exc).split())[:_LONGEST_REASON]
        raise BlobsAway(f"the bucket of files does not answer as it should: {reason}") from exc
