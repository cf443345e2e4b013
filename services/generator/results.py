"""How often the results of an answer's tools are kept: a large one once, in its own entry of the journal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from shared.contracts import MOST_RESULT, OWN_TOOLS, ToolCallRecord
from shared.records.journal import LARGE_RESULT


def as_told(record: ToolCallRecord, large: Mapping[str, str]) -> dict[str, Any]:
    """A call as the end of the journal has it. large: the entries of large results by call id; of such a one the end
    names the entry, instead of the result and of data above LARGE_RESULT bytes."""
    told = record.model_dump(mode="json")
    if (place := large.get(record.call_id)) is not None:
        told |= {"result": "", "result_in": place}
        if len(orjson.dumps(told["data"])) > LARGE_RESULT:
            told["data"] = None
    return told


def as_observed(record: ToolCallRecord) -> ToolCallRecord:
    """A call as observers are told of it: the first MOST_RESULT characters of its result, and no more data than that.
    What our own tools say of their finds decides how far an answer is trusted, and stays."""
    cut: dict[str, Any] = {}
    if len(record.result) > MOST_RESULT:
        cut["result"] = record.result[:MOST_RESULT]
    if record.data is not None and record.tool not in OWN_TOOLS and len(orjson.dumps(record.data)) > MOST_RESULT:
        cut["data"] = None
    return record.model_copy(update=cut) if cut else record
