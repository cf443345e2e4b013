"""OpenAI's chat completions, going out: a result or a journal as a completion or its chunks. Pure."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from typing import Any

import orjson

from services.gateway.http.errors import error_body, openai_code, openai_fields
from services.gateway.openai.append_only_stream import AppendOnlyStream, Completed, Failed, TextDelta, step_of
from services.gateway.openai.tool_forms import text_of_call
from shared.records.events import Entry, Event, ToolAnswered, ToolAsked

DONE = b"data: [DONE]\n\n"


def completion(
    query_id: str,
    model: str,
    shown: Mapping[str, Any],
    created: int,
    *,
    whole: bool = False,
    legacy: bool = False,
    custom: Container[str] = (),
    thinking: str | None = None,
) -> dict[str, Any]:
    """A finished result in OpenAI's shape; `whole`, `legacy` and `custom` as for `Chunks`. `thinking`: what a stream
    would have told of it, where that is more than the result has."""
    thought = (shown["thinking"] if thinking is None else thinking) or None
    calls = tool_calls(shown.get("client_calls") or (), custom)
    text = shown["answer"] if whole else content_of(shown)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": None,
        "annotations": citations(shown["tool_calls"], text),
        "reasoning": thought,
        "reasoning_content": thought,
    }
    if calls:
        message |= {"function_call": calls[0]["function"]} if legacy else {"tool_calls": calls}
    reason = finish_reason(shown["finish_reason"], handed=bool(calls), legacy=legacy)
    return {
        "id": f"chatcmpl-{query_id}",
        "object": "chat.completion",
        "created": created,
        "model": shown["model"] or model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": usage(shown["usage"]),
    }


def content_of(shown: Mapping[str, Any]) -> str:
    """All that was said to the user, also before a call of the agent's own tools: what a stream would have told."""
    return "\n\n".join(part for part in (*shown.get("said_before", ()), shown["answer"]) if part)


def tool_calls(calls: Sequence[Mapping[str, Any]], custom: Container[str] = ()) -> list[dict[str, Any]]:
    """Calls of the client's tools in OpenAI's shape; those named in `custom` take a text."""
    return [
        {"id": call["id"], "type": "custom", "custom": {"name": call["name"], "input": text_of_call(call["args"])}}
        if call["name"] in custom
        else {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": orjson.dumps(call["args"]).decode()},
        }
        for call in calls
    ]


def citations(calls: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The sources of an answer as URL citations: pages that were read, and hits of a search that the text names.

    Places are counted in characters; a source that the text does not name stands at its end.
    """
    read: dict[str, str] = {}
    for call in calls:
        data = call.get("data")
        if call["tool"] == "web_fetch" and isinstance(data, dict) and data.get("url"):
            read[str(data["url"])] = str(data.get("title") or data["url"])
        if call["tool"] == "web_search" and isinstance(data, list):
            hits = [hit for hit in data if isinstance(hit, dict) and hit.get("url")]
            for hit in [hit for hit in hits if str(hit["url"]) in text] or hits:
                read.setdefault(str(hit["url"]), str(hit.get("title") or hit["url"]))
    found = []
    for url, title in read.items():
        begin = text.find(url)
        start, end = (begin, begin + len(url)) if begin >= 0 else (len(text), len(text))
        citation = {"url": url, "title": title, "start_index": start, "end_index": end}
        found.append({"type": "url_citation", "url_citation": citation})
    return found


def finish_reason(reason: str | None, *, handed: bool = False, legacy: bool = False) -> str:
    """`handed`: the client has calls to run. The agent's own are over by then: they never show."""
    if handed:
        return "function_call" if legacy else "tool_calls"
    if reason == "loop":
        return "length"
    return reason if reason in ("length", "content_filter") else "stop"


def usage(counts: Any) -> dict[str, int]:
    known = counts if isinstance(counts, dict) else {}
    prompt, generated = (
        count if isinstance(count := known.get(name), int) else 0 for name in ("prompt_tokens", "completion_tokens")
    )
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _event_of(event: Event) -> list[bytes]:
    """A call that begins or ends, as Open WebUI shows what a program does beside its answer."""
    if not isinstance(event, ToolAsked | ToolAnswered):
        return []
    data = {"description": step_of(event), "done": isinstance(event, ToolAnswered)}
    return [b"data: %b\n\n" % orjson.dumps({"event": {"type": "status", "data": data}})]


class Chunks:
    """A journal as `chat.completion.chunk` events.

    whole: the text is sent when it is complete, because it has to have a form that is looked at first.
    legacy: a call of the client's is told as a function call. custom: names of its tools that take a text.
    status: calls of the agent's own tools are told as Open WebUI's status events too.
    """

    def __init__(
        self,
        query_id: str,
        model: str,
        include_usage: bool,
        *,
        whole: bool = False,
        legacy: bool = False,
        custom: Container[str] = (),
        status: bool = False,
    ) -> None:
        self._id = f"chatcmpl-{query_id}"
        self._model = model
        self._created = int(time.time())
        self._include_usage = include_usage
        self._legacy = legacy
        self._custom = custom
        self._status = status
        self._telling = AppendOnlyStream(whole=whole, steps=True)
        self.done = False

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def feed(self, entries: Sequence[Entry]) -> bytes:
        """The chunks of some journal entries; `done` is set after the terminal one."""
        out: list[bytes] = []
        for entry in entries:
            if self._status:
                out += _event_of(entry.event)
            for said in self._telling.take(entry):
                out.append(self._said(said))
                self.done = not isinstance(said, TextDelta)
            self._model = self._telling.model or self._model
            if self.done:
                break
        return b"".join(out)

    def _said(self, said: TextDelta | Completed | Failed) -> bytes:
        match said:
            case TextDelta("thinking", text):
                return self._chunk({"reasoning": text, "reasoning_content": text})
            case TextDelta(_, text):
                return self._chunk({"content": text})
            case Completed(value):
                return self._end(value)
            case Failed(code, message):
                return self.broken(code, message)

    def broken(self, code: str, message: str) -> bytes:
        """An error after the response has begun: clients of OpenAI raise it."""
        return b"data: %b\n\n%b" % (error_body(openai_code(code), message, openai_fields(500)), DONE)

    def _end(self, value: Mapping[str, Any]) -> bytes:
        out = []
        if sources := citations(value.get("tool_calls") or (), str(value.get("answer") or "")):
            out.append(self._chunk({"annotations": sources}))
        calls = tool_calls(value.get("client_calls") or (), self._custom)
        if calls:
            out += self._calls(calls)
        reason = finish_reason(value.get("finish_reason"), handed=bool(calls), legacy=self._legacy)
        out.append(self._chunk({}, reason))
        if self._include_usage:
            out.append(self._event({"choices": [], "usage": usage(value.get("usage"))}))
        return b"".join((*out, DONE))

    def _calls(self, calls: Sequence[Mapping[str, Any]]) -> list[bytes]:
        if self._legacy:
            return [self._chunk({"function_call": calls[0]["function"]})]
        return [self._chunk({"tool_calls": [{"index": n, **call}]}) for n, call in enumerate(calls)]

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        extra: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return self._event({"choices": [choice], **extra})

    def _event(self, body: dict[str, Any]) -> bytes:
        head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model}
        return b"data: %b\n\n" % orjson.dumps({**head, **body})
