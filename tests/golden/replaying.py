"""A recorded journal, written into Redis again and read through the public routes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson
from golden.states import digest, form
from support.http_gateway import Site

from services.cli.commands.answer_view import AnswerView
from services.cli.sse import Event
from services.cli.terminal import Terminal
from shared.bus import Bus
from shared.bus.keys import journal_key
from shared.contracts import QUERY_RECEIVED, QueryReceived
from shared.records.events import decode
from shared.records.response_state import EMPTY, apply
from shared.records.sessions import Sessions, Turn
from shared.records.steps import keep_ended

JOURNALS = Path(__file__).parent / "journals"
# A journal by hand: entries that real runs have seldom, in an order that a reader must survive.
ODD = Path(__file__).parent / "odd.json"
TERMINAL = ("completed", "failed", "cancelled")
# Not compared: the messages on the bus.
_BUS = ("event_log", "events")
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}}
_RUN = re.compile(r"(x)\1{999,}")
_SHORT = re.compile(r"\{\{x\*([0-9]+)\}\}")

Fields = dict[str, str]
# An entry's id and its fields as they stand in Redis.
Recorded = tuple[str, Fields]


def load(path: Path) -> tuple[list[Recorded], dict[str, Any]]:
    """The entries of a recorded journal, and the outputs that were recorded with it."""
    text = _SHORT.sub(lambda found: "x" * int(found[1]), path.read_text(encoding="utf-8"))
    record = orjson.loads(text)
    return [(entry_id, fields) for entry_id, fields in record["entries"]], record["outputs"] | {
        "state": record["state"]
    }


def dump(entries: list[Recorded], outputs: dict[str, Any]) -> str:
    """Text of a file that `load` reads. Runs of one letter are shortened."""
    rest = {name: output for name, output in outputs.items() if name != "state"}
    shown = orjson.dumps(rest, option=orjson.OPT_INDENT_2).decode()
    head, parts = {**outputs["state"], "parts": []}, outputs["state"]["parts"]
    state = orjson.dumps(head).decode().replace('"parts":[]', f'"parts":[\n{_lines(parts)}\n]')
    text = f'{{"entries":[\n{_lines(entries)}\n],\n"state":{state},\n"outputs":{shown}}}\n'
    return _RUN.sub(lambda found: f"{{{{x*{len(found[0])}}}}}", text)


def _lines(values: Sequence[Any]) -> str:
    return ",\n".join(orjson.dumps(value).decode() for value in values)


def states_of(entries: list[Recorded]) -> dict[str, str]:
    """The state of the response at the end, and after every entry, as JSON."""
    typed = [decode(entry_id, fields["type"], 0, fields["data"].encode()) for entry_id, fields in entries]
    states = [orjson.dumps(form(state)).decode() for state in accumulate(typed, apply, initial=EMPTY)][1:]
    return {"state": states[-1], "states_while_it_runs": "\n".join(states)}


class Replay:
    """Writes one journal under new queries, and collects what clients get. `texts`: all outputs, by name."""

    def __init__(self, site: Site, bus: Bus, name: str, entries: list[Recorded]) -> None:
        self._http = site.http
        self._bus = bus
        self._session = f"golden-{name}"
        self._entries = entries
        self._asking = asyncio.Lock()
        self.texts: dict[str, str] = {}

    async def run(self) -> None:
        await asyncio.gather(
            self._queries(),
            self._chat("chat_chunks", "chat", {}),
            self._chat("chat_chunks_of_a_form", "form", {"response_format": _FORM}),
            self._responses(),
        )
        self.texts["terminal"] = self._terminal()
        self.texts |= states_of(self._entries)

    def outputs(self) -> dict[str, Any]:
        """The outputs to be recorded: result, state and the terminal's text in full, of the rest its hash."""
        whole = {name: orjson.loads(self.texts[name]) for name in ("result", "state")}
        whole["terminal"] = self.texts["terminal"]
        return whole | {name: digest(text) for name, text in sorted(self.texts.items()) if name not in whole}

    async def _write(self, query_id: str, entry: Recorded) -> None:
        fields = [one for pair in entry[1].items() for one in pair]
        await self._bus.link.call("XADD", journal_key(query_id, "A"), entry[0], *fields)

    def _plain(self, text: str, query_id: str) -> str:
        text = text.replace(query_id, "QUERY").replace(query_id.replace("-", "_"), "QUERY")
        text = re.sub(r'"(created|created_at)":\d+', r'"\1":0', text)
        return re.sub(r'"session_id":"[0-9a-f]{8}-[0-9a-f-]{27}"', '"session_id":"SESSION"', text)

    async def _queries(self) -> None:
        """The result and the session's record after every entry; then the events, and the record that is kept."""
        async with self._asking:
            asked = await self._http.post("/query?wait=false", json={"query": "golden", "session_id": self._session})
        query_id = str(asked.json()["query_id"])
        results, records = [], []
        for entry in self._entries:
            await self._write(query_id, entry)
            results.append(await self._result(query_id))
            records.append(await self._record(query_id))
        self.texts["result"] = results[-1]
        self.texts["results_while_it_runs"] = "\n".join(results)
        self.texts["records_while_it_runs"] = "\n".join(records)
        events = await self._http.get(f"/queries/{query_id}/events")
        self.texts["events"] = self._plain(events.text, query_id)
        self.texts["record"] = await self._kept(query_id)

    async def _result(self, query_id: str) -> str:
        found = (await self._http.get(f"/queries/{query_id}")).json()
        shown = {name: value for name, value in found.items() if name not in _BUS}
        return self._plain(orjson.dumps(shown).decode(), query_id)

    async def _record(self, query_id: str) -> str:
        found = (await self._http.get(f"/sessions/{self._session}/turns/{query_id}")).json()
        return self._plain(orjson.dumps(found["journal"]).decode(), query_id)

    async def _kept(self, query_id: str) -> str:
        (data,) = [orjson.loads(one["data"]) for _, one in self._entries if one["type"] in TERMINAL]
        if answer := data.get("answer"):
            turn = Turn(query_id, "golden", answer, 0)
            await self._bus.link.pipe(Sessions(self._bus).appending(self._session, "A", turn))
        query = QueryReceived(session_id=self._session, query="golden", user_id="u")
        await keep_ended(self._bus, query, query_id)
        return await self._record(query_id)

    async def _newest(self) -> str:
        return await self._bus.newest(QUERY_RECEIVED.stream)

    async def _streamed(self, path: str, body: dict[str, Any]) -> str:
        async with contextlib.AsyncExitStack() as stack:
            headers = {"X-LoCAL2-Events": "status"}
            async with self._asking:
                answer = await stack.enter_async_context(self._http.stream("POST", path, json=body, headers=headers))
            query_id = answer.headers["X-Query-Id"]
            for entry in self._entries:
                await self._write(query_id, entry)
            text = (await answer.aread()).decode()
        return self._plain(text, query_id)

    async def _whole(self, path: str, body: dict[str, Any]) -> str:
        async with self._asking:
            before = await self._newest()
            asking = asyncio.create_task(self._http.post(path, json=body))
            while (query_id := await self._newest()) == before:
                await asyncio.sleep(0.002)
        for entry in self._entries:
            await self._write(query_id, entry)
        return self._plain((await asking).text, query_id)

    async def _chat(self, name: str, said: str, fields: dict[str, Any]) -> None:
        body = {"model": "local2", "messages": [{"role": "user", "content": f"{self._session} {said}"}], **fields}
        usage = {"stream_options": {"include_usage": True}}
        self.texts[name] = await self._streamed("/v1/chat/completions", {**body, "stream": True, **usage})
        self.texts[f"{name}_as_one"] = await self._whole("/v1/chat/completions", body)

    async def _responses(self) -> None:
        body = {"model": "local2", "input": f"{self._session} response"}
        self.texts["response_events"] = await self._streamed("/v1/responses", {**body, "stream": True})
        self.texts["response"] = await self._whole("/v1/responses", body)

    def _terminal(self) -> str:
        out = io.StringIO()
        view = AnswerView(Terminal(file=out, width=100))
        for entry_id, fields in self._entries:
            view.show(Event(entry_id, fields["type"], orjson.loads(fields["data"])))
        return out.getvalue()
