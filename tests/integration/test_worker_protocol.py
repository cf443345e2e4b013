"""The examples of docs/worker-protocol.md have the shape of what a worker and its caller really write."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from support.apps import ProbeSettings, probe
from support.services import announced, running
from support.waiting import eventually

from shared.bus import Script, scripts
from shared.bus.keys import replica_key, result_key
from shared.contracts import QUERY_CANCEL, QueryCancel
from shared.participant.registry import RELEASE
from shared.participant.service import open_context
from shared.participant.settings import Settings
from shared.participant.tool_client import Caller, ToolClient

PAGE = (Path(__file__).parents[2] / "docs" / "worker-protocol.md").read_text(encoding="utf-8")
EXAMPLES: dict[str, Any] = {
    name: orjson.loads(text)
    for name, text in re.findall(r"^<!-- example: ([a-z ]+) -->\n```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
}
# What is different for each tool, and each entry.
FREE = ("args", "data", "parameters", "facts", "fields")


def shape(value: Any) -> Any:
    """Names and types, without the values."""
    if isinstance(value, dict):
        return {name: "any" if name in FREE else shape(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shape(part) for part in value[:1]]
    return type(value).__name__


def texts(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


async def test_the_examples_look_like_what_is_written(redis_url: str, settings: Settings, raw: redis.Redis) -> None:
    shared = settings.model_dump(include={"redis_url", "data_dir", "heartbeat", "drain"})
    seen: dict[str, Any] = {}
    stream = "local2:tool.request.probe"
    own = ProbeSettings(**shared, effects_url=redis_url)
    async with running(probe, own), open_context("asker", settings) as context:
        await announced(redis_url, "probe")
        (name,) = [key.decode() for key in raw.scan_iter(replica_key("probe", "*"))]
        seen["replica"] = orjson.loads(raw.get(name))
        seen["schema"] = orjson.loads(raw.xrevrange("local2:tool.schema", count=1)[0][1][b"payload"])
        caller = Caller("q1", "s", "ann", deadline=context.bus.now_ms() + 10_000)
        calling = asyncio.create_task(
            ToolClient(context).call(
                "probe", {"text": "x", "seconds": 0.3}, call_id="c1", caller=caller, timeout=5, attempt=1
            )
        )
        ((_, fields),) = await eventually(lambda: raw.xrange(stream))
        seen["request fields"] = texts(fields)
        seen["request"] = orjson.loads(fields[b"payload"])
        assert (await calling).error is None
        await context.bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="q1")))
        seen["cancel"] = orjson.loads(raw.xrevrange("local2:query.cancel", count=1)[0][1][b"payload"])
        seen["result"] = orjson.loads(raw.get(result_key("probe", "c1")))
        replies = [texts(entry) for _, entry in raw.xrange(seen["request"]["reply_to"])]
        seen["reply fields"] = next(one for one in replies if one["type"] == "tool.result")
        assert seen["reply fields"]["token"] == seen["request"]["token"] != ""
        raw.xadd(stream, {"payload": "no json"})
        ((letter_id, letter),) = await eventually(lambda: raw.xrange("local2:dead.letter"))
        seen["dead letter"] = orjson.loads(letter[b"payload"])
        note = f"local2:once:{{local2:dead.letter}}:{stream}:probe:{seen['dead letter']['entry_id']}"
        assert raw.get(note) == letter_id
    assert set(seen) == set(EXAMPLES)
    for name, value in seen.items():
        there = {part: one for part, one in value.items() if one is not None}
        assert set(there) <= set(EXAMPLES[name]) <= set(value), name
        assert shape(there) == shape({part: EXAMPLES[name][part] for part in there}), name
    assert EXAMPLES["replica"]["release"] == RELEASE


@pytest.mark.parametrize("name", [name for name, value in vars(scripts).items() if isinstance(value, Script)])
def test_every_script_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_worker_in_javascript_is_as_short_as_the_page_says() -> None:
    lines = (Path(__file__).parents[2] / "examples" / "worker.mjs").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert f"release: {RELEASE} " in "\n".join(lines)
