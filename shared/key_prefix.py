"""The prefix of every Redis key of this deployment, from the environment."""

from __future__ import annotations

import os
import re
import sys

VARIABLE = "LOCAL2_KEY_PREFIX"
_DEFAULT = "local2:"
# The braces are a hash tag: every key with them is in the same hash slot of a server in cluster mode.
_FORM = re.compile(r"[A-Za-z0-9_.-]+:|\{[A-Za-z0-9_.-]+\}:")


def _from_environment() -> str:
    prefix = os.environ.get(VARIABLE) or _DEFAULT
    if not _FORM.fullmatch(prefix):
        sys.exit(
            f"local2: {VARIABLE} is {prefix!r}; set it to a name and a colon, such as {_DEFAULT} (the default), "
            "or {local2}: for a Redis server in cluster mode"
        )
    return prefix


PREFIX = _from_environment()
ONE_SLOT = PREFIX.startswith("{")
