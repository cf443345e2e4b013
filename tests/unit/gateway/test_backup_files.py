"""The files' section of a backup: a record whose bytes are not what was saved is found before anything is written."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from services.gateway.backup.files import FilesSection


def record(**changes: Any) -> dict[str, Any]:
    data = b"The manual"
    whole = {
        "user_id": "ann",
        "name": "manual.txt",
        "type": "text/plain",
        "added": 1,
        "sha256": hashlib.sha256(data).hexdigest(),
        "data": base64.b64encode(data).decode(),
    }
    return {**whole, **changes}


def test_a_record_as_it_was_saved_is_right() -> None:
    FilesSection(None).check(record())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{"data": base64.b64encode(b"another").decode()}, {"data": "%%%"}, {"data": ""}, {"sha256": "x"}, {"user_id": ""},
     {"added": -1}, {"unknown": 1}],
)  # fmt: skip
def test_a_record_that_is_wrong_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        FilesSection(None).check(record(**changes))  # type: ignore[arg-type]
