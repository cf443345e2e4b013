"""docs/asyncapi.yaml is what the contracts say, and what flows on a bus is what it says."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import orjson
import redis
import yaml
from jsonschema import Draft202012Validator
from support.openai_place import calling, open_place

ROOT = Path(__file__).parents[2]


def described() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "asyncapi.yaml").read_text(encoding="utf-8"))
    return found


def test_the_document_is_what_the_contracts_say() -> None:
    """When it is not: make docs-asyncapi."""
    script = runpy.run_path(str(ROOT / "deploy" / "docs_asyncapi.py"))
    assert (ROOT / "docs" / "asyncapi.yaml").read_text(encoding="utf-8") == script["text"]()


def test_every_reference_of_the_document_leads_somewhere() -> None:
    whole = described()

    def walk(value: Any) -> list[str]:
        if isinstance(value, dict):
            here = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return here + [ref for part in value.values() for ref in walk(part)]
        return [ref for part in value for ref in walk(part)] if isinstance(value, list) else []

    references = walk(whole)
    assert len(references) > 60
    for reference in references:
        place: Any = whole
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
    assert whole["asyncapi"].startswith("3.")


def trouble(whole: dict[str, Any], subject: str, fields: dict[bytes, bytes]) -> list[str]:
    """What is wrong with an entry, as the document sees it."""
    message = whole["components"]["messages"][subject]
    headers = {name.decode(): value.decode() for name, value in fields.items() if name != b"payload"}
    found = []
    for schema, value in ((message["headers"], headers), (message["payload"], orjson.loads(fields[b"payload"]))):
        validator = Draft202012Validator({**schema, "components": whole["components"]})
        found += [f"{subject}: {error.json_path}: {error.message}" for error in validator.iter_errors(value)]
    return found


def flown(whole: dict[str, Any], raw: redis.Redis) -> set[str]:
    """The subjects of which entries stand on the bus now, each as the document says."""
    seen = set()
    for key in raw.scan_iter("local2:*", _type="STREAM"):
        name = key.decode().removeprefix("local2:")
        subject = next((one for one in ("tool.request", "tool.result") if name.startswith(f"{one}.")), name)
        if subject not in whole["channels"]:
            assert name.startswith(("journal:", "inbox:")), name
            continue
        for _, fields in raw.xrange(key):
            assert trouble(whole, subject, fields) == []
            seen.add(subject)
    return seen


async def test_what_flows_on_a_bus_is_what_the_document_says(redis_url: str, tmp_path: Path, raw: redis.Redis) -> None:
    whole = described()
    async with open_place(redis_url, tmp_path) as place:
        place.rules(calling("probe"), {"respond": {"thinking": "Hm.", "text": "Done."}})
        async with await place.site.key("cleo") as cleo:
            asked = (await cleo.post("/query", json={"query": "use the probe", "session_id": "s"})).json()
            assert asked["state"] == "completed", asked
            rated = await cleo.post("/feedback", json={"query_id": asked["query_id"], "stars": 4})
            assert rated.status_code == 202
            seen = flown(whole, raw)
            # what is removed with a session is announced first
            assert (await cleo.delete("/sessions/s")).status_code == 200
            seen |= flown(whole, raw)
    assert {"query.received", "tool.schema", "tool.result", "agent.transition", "response.generation", "answer.dialog",
            "user.feedback", "memory.forget"} <= seen, seen  # fmt: skip
    wrong = {b"payload": b'{"query_id":1}', b"time": b"soon"}
    assert len(trouble(whole, "query.cancel", wrong)) == 2
