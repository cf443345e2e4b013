"""Which operations of a participant's `…_manage` write: a caller without an answer must know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import ToolError
from shared.participant.tool import OUTCOME_UNKNOWN

UNAVAILABLE = "unavailable: "
_WRITES: Mapping[str, frozenset[str]] = {
    "memory": frozenset({"delete", "delete_session", "delete_user", "import", "topic_put", "topic_delete"}),
    "documents": frozenset({"delete", "delete_user"}),
    "knowledge": frozenset({"add", "correct", "delete", "import", "clear"}),
    "reward": frozenset({"consent", "load", "clear", "start", "stop", "promote", "revert"}),
}


def is_write(participant: str, args: Mapping[str, Any]) -> bool:
    """Return whether an operation with these arguments writes."""
    op = args.get("op")
    if (participant, op) == ("reward", "consent") and args.get("given") is None:
        # It asks for the consent that was given.
        return False
    return op in _WRITES.get(participant, ())


def store_away(participant: str, args: Mapping[str, Any], reason: object) -> ToolError:
    """Return the error of an operation whose store failed while it ran."""
    return ToolError(f"{OUTCOME_UNKNOWN if is_write(participant, args) else UNAVAILABLE}{reason}")
