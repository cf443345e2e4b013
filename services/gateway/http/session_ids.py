"""The form of a session's id."""

from __future__ import annotations

import re

SESSION_RULE = "1 to 128 letters, digits and . _ : @ + = -, beginning with a letter or digit"
_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,127}")


def is_session_id(value: str) -> bool:
    return _SESSION_ID.fullmatch(value) is not None
