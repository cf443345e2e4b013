"""Tool results in the terminal entry and on the bus: a large one is stored once, in its own entry. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from shared.contracts import MOST_RESULT, OWN_TOOLS, ToolCallRecord
from shared.records.journal import LARGE_RESULT


def ended_call(record: ToolCallRecord, large: Mapping[str, str]) -> dict[str, Any]:
    """Return a call as the terminal entry has it. large: the entries of large results, by call id.

    For a large result, `result_in` names its entry. The result, and data above LARGE_RESULT bytes, are left out.
    """
    ended = record.model_dump(mode="json")
    if (place := large.get(record.call_id)) is not None:
        ended |= {"result": "", "result_in": place}
        if len(orjson.dumps(ended["data"])) > LARGE_RESULT:
            ended["data"] = None
    return ended


def published_call(record: ToolCallRecord) -> ToolCallRecord:
    """Return a call for observers: the first MOST_RESULT characters of its result, without larger data.

    Data of our own tools stays: memory reads from it whether an answer is tainted.
    """
    cut: dict[str, Any] = {}
    if len(record.result) > MOST_RESULT:
        cut["result"] = record.result[:MOST_RESULT]
    if record.data is not None and record.tool not in OWN_TOOLS and len(orjson.dumps(record.data)) > MOST_RESULT:
        cut["data"] = None
    return record.model_copy(update=cut) if cut else record
