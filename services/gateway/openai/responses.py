"""OpenAI's Responses API: a request as a question to the agent, a journal as a response and its events. Pure.

A response is its query's journal: its id is the query's, and the same entries give the same items and events, so that a
stream goes on behind any of them (`starting_after`). Source: the API reference of OpenAI, 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from pydantic import Field

from services.gateway.http.errors import openai_code
from services.gateway.openai.append_only_stream import AppendOnlyStream, Completed, Failed, TextDelta
from services.gateway.openai.chat_body import (
    DEFAULT_MODEL,
    Wire,
    answer_schema,
    arguments,
    backend_model,
    bad,
    client_tools,
    content_of,
    effort,
    files_of,
    is_plain,
    options,
    parts_of,
    question,
    zone_in,
)
from services.gateway.openai.completions import citations, usage
from services.gateway.openai.tool_forms import Form, args_of_text, forms_of, full_name, offered, text_of_call
from services.gateway.queries.accept import Ask
from services.gateway.queries.prompt_wrappers import undressed
from services.gateway.queries.records import QueryRecord
from shared.contracts import ChatToolCall, ChatTurnMessage
from shared.records.events import Cancelled, Entry

_MOST_TOOLS = 128
# What the agent has of its own, under whatever name a client wishes it.
_OURS = ("web_search",)
# What was thought, and what tools did that ran at another server: the answer behind them says what came of it.
_OF_OTHERS = frozenset({
    "reasoning", "compaction", "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
    "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response", "tool_search_call",
    "tool_search_output",
})  # fmt: skip
# Fields of a request that its response repeats.
_REPEATED = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "reasoning",
    "store", "temperature", "text", "tool_choice", "tools", "top_p", "background", "user",
)  # fmt: skip


class TextFormat(Wire):
    format: dict[str, Any] | None = None


class Reasoning(Wire):
    effort: str | None = None


class ResponseBody(Wire):
    model_config = Wire.model_config | {
        "json_schema_extra": {"example": {"model": "local2", "input": "What is the capital of France?"}}
    }

    model: str | None = Field(default=DEFAULT_MODEL, max_length=200)
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=200)
    conversation: Any = None
    prompt: Any = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=_MOST_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextFormat | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    user: Any = None

    def items(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []

    def repeated(self) -> dict[str, Any]:
        """What the response repeats of its request."""
        given = self.model_dump(exclude_none=True)
        return {name: given[name] for name in _REPEATED if name in given}


def asked(body: ResponseBody, items: Sequence[Mapping[str, Any]], known_models: Iterable[str], task: str = "") -> Ask:
    """The query in a request; `items`: its whole conversation; `task` as for a chat completion. Raises ApiError 400, or
    404 for an unknown model."""
    if body.conversation is not None or body.prompt is not None:
        raise bad("conversation, prompt: not supported; use previous_response_id or input", "unsupported")
    name = body.model or DEFAULT_MODEL
    messages = messages_of(items)
    if body.instructions:
        messages.insert(0, ChatTurnMessage(role="system", content=body.instructions))
    last, before, following = question(messages)
    plain = is_plain(name, messages, task, body.metadata)
    material, query = ("", last.content) if plain else undressed(last.content)
    functions = [function for function, _ in offered(body.tools or (), _OURS).values()]
    return Ask(
        query=query,
        attachments=[{"id": file_id} for file_id in last.attachments or ()] or None,
        material=material or None,
        messages=before,
        following=following,
        model=backend_model(name, known_models),
        options=options({"temperature": body.temperature, "top_p": body.top_p, "num_predict": body.max_output_tokens}),
        client_tools=None if plain else client_tools(functions, body.tool_choice, body.parallel_tool_calls),
        answer_schema=answer_schema(body.text.format if body.text else None),
        think=False if plain else effort(body.reasoning.effort if body.reasoning else None),
        plain=plain,
        time_zone=zone_in(body.metadata),
    )


# ── the conversation ─────────────────────────────────────────────────────────────────────────────────────────────


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[ChatTurnMessage]:
    """Items as messages: neighbouring calls are one message's, and so is what was said before and after a call of the
    agent's own; what was thought is left out. Raises ApiError 400."""
    found: list[ChatTurnMessage] = []
    for place, item in enumerate(items):
        match str(item.get("type", "message")):
            case "message":
                role = {"developer": "system"}.get(str(item.get("role")), str(item.get("role")))
                if role not in ("system", "user", "assistant"):
                    raise bad(f"input.{place}.role: must be user, assistant, system or developer")
                content = item.get("content")
                said = parts_of(content) or str(content or "")
                words, shown = content_of(said, place, role), files_of(said, role)
                if role == "assistant" and found and found[-1].role == role and not found[-1].tool_calls:
                    words = f"{found.pop().content.rstrip()}\n\n{words.lstrip()}".strip()
                found.append(ChatTurnMessage(role=role, content=words, attachments=shown))
            case "function_call" | "custom_tool_call" as kind:
                name, space = str(item.get("name", "")), item.get("namespace")
                name = full_name(name, space if isinstance(space, str) else None)
                if kind == "custom_tool_call":
                    args = args_of_text(item.get("input"))
                else:
                    args = arguments(item.get("arguments"))
                call = ChatToolCall(id=str(item.get("call_id", "")), name=name, args=args)
                if found and found[-1].role == "assistant":
                    last = found.pop()
                    found.append(last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), call]}))
                else:
                    found.append(ChatTurnMessage(role="assistant", tool_calls=[call]))
            case "function_call_output" | "custom_tool_call_output":
                output = item.get("output")
                said = parts_of(output) or str(output or "")
                words, shown, name = content_of(said, place, "tool"), files_of(said, "tool"), item.get("call_id", "")
                found.append(ChatTurnMessage(role="tool", content=words, tool_call_id=str(name), attachments=shown))
            case kind if kind in _OF_OTHERS:
                pass
            case kind:
                raise bad(f"input.{place}: items of type {kind[:50]} are not supported", "unsupported")
    return found


# ── ids ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def response_name(query_id: str) -> str:
    return f"resp_{query_id.replace('-', '_')}"


def query_of(name: str) -> str:
    """The query that a response, or one of its items, is of; no id of a query when it is none."""
    parts = name.split("_")
    return "-".join(parts[1:3])


# ── the response ─────────────────────────────────────────────────────────────────────────────────────────────────


class Answering:
    """A response as its journal tells it. `events` are OpenAI's; `shown` is the response so far.

    repeated: what the response repeats of its request. whole: see `AppendOnlyStream`. after: events up to this number
    are known.
    """

    def __init__(self, record: QueryRecord, repeated: Mapping[str, Any], *, whole: bool, after: int = -1) -> None:
        self._name = record.query_id.replace("-", "_")
        self._telling = AppendOnlyStream(whole=whole)
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._number = 0
        self._after = after
        self.done = False
        self.shown: dict[str, Any] = {
            "id": response_name(record.query_id),
            "object": "response",
            "created_at": record.accepted // 1000,
            "status": "queued",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "model": DEFAULT_MODEL,
            "output": self._output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": True,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "usage": None,
            **repeated,
        }
        self._forms = forms_of(self.shown["tools"], _OURS)

    def opening(self) -> bytes:
        created = self._event("response.created", response=self.shown)
        self.shown["status"] = "in_progress"
        return created + self._event("response.in_progress", response=self.shown)

    def feed(self, entries: Sequence[Entry]) -> bytes:
        """The events of some entries; `done` is set after the terminal one."""
        out: list[bytes] = []
        for entry in entries:
            self.shown["status"] = "in_progress"
            for said in self._telling.take(entry):
                match said:
                    case TextDelta(kind, text):
                        out += self._more("reasoning" if kind == "thinking" else "message", text)
                    case Completed(value):
                        out += self._end(value, cancelled=isinstance(entry.event, Cancelled))
                    case Failed(code, message):
                        out.append(self.broken(code, message))
            self.shown["model"] = self._telling.model or self.shown["model"]
            if self.done:
                break
        return b"".join(out)

    def broken(self, code: str, message: str) -> bytes:
        """The events of a response that failed."""
        error = {"code": openai_code(code), "message": message}
        return b"".join([*self._close(), *self._finish("failed", error=error)])

    # ── items ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _more(self, kind: str, text: str) -> list[bytes]:
        out = [] if self._open is not None and self._open["type"] == kind else [*self._close(), *self._begin(kind)]
        assert self._open is not None
        part = self._part()
        part["text"] += text
        name = "response.reasoning_summary_text.delta" if kind == "reasoning" else "response.output_text.delta"
        logprobs: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return [*out, self._event(name, **self._place(), delta=text, **logprobs)]

    def _begin(self, kind: str) -> list[bytes]:
        number = len(self._output)
        if kind == "reasoning":
            item: dict[str, Any] = {"id": f"rs_{self._name}_{number}", "type": "reasoning", "summary": []}
        else:
            item = {"id": f"msg_{self._name}_{number}", "type": "message", "role": "assistant",
                    "status": "in_progress", "content": []}  # fmt: skip
        self._output.append(item)
        self._open = item
        added = self._event("response.output_item.added", output_index=number, item=item)
        if kind == "reasoning":
            item["summary"].append({"type": "summary_text", "text": ""})
            name = "response.reasoning_summary_part.added"
        else:
            item["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
            name = "response.content_part.added"
        return [added, self._event(name, **self._place(), part=self._part())]

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        part: dict[str, Any] = self._open["summary" if self._open["type"] == "reasoning" else "content"][0]
        return part

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        index = "summary_index" if self._open["type"] == "reasoning" else "content_index"
        return {"item_id": self._open["id"], "output_index": len(self._output) - 1, index: 0}

    def _close(self, sources: Sequence[Mapping[str, Any]] = ()) -> list[bytes]:
        """Ends the item that is being told."""
        item = self._open
        if item is None:
            return []
        out, part, place = [], self._part(), self._place()
        if item["type"] == "reasoning":
            out.append(self._event("response.reasoning_summary_text.done", **place, text=part["text"]))
            out.append(self._event("response.reasoning_summary_part.done", **place, part=part))
        else:
            for number, source in enumerate(sources):
                annotation = {"type": "url_citation", **source["url_citation"]}
                part["annotations"].append(annotation)
                out.append(self._event("response.output_text.annotation.added", **place, annotation_index=number,
                                       annotation=annotation))  # fmt: skip
            item["status"] = "completed"
            out.append(self._event("response.output_text.done", **place, text=part["text"], logprobs=[]))
            out.append(self._event("response.content_part.done", **place, part=part))
        out.append(self._event("response.output_item.done", output_index=place["output_index"], item=item))
        self._open = None
        return out

    def _call(self, call: Mapping[str, Any]) -> list[bytes]:
        number, form = len(self._output), self._forms.get(call["name"]) or Form(call["name"])
        kind, field, told, mark = (
            ("custom_tool_call", "input", text_of_call(call["args"]), "ctc")
            if form.custom
            else ("function_call", "arguments", orjson.dumps(call["args"]).decode(), "fc")
        )
        name = f"{mark}_{call['id'].removeprefix('call_')}"
        item = {"id": name, "type": kind, "status": "in_progress", "call_id": call["id"], "name": form.name, field: ""}
        if form.namespace is not None:
            item["namespace"] = form.namespace
        self._output.append(item)
        out = [self._event("response.output_item.added", output_index=number, item=item)]
        item[field] = told
        place = {"item_id": name, "output_index": number}
        event = "response.custom_tool_call_input" if form.custom else "response.function_call_arguments"
        out.append(self._event(f"{event}.delta", **place, delta=told))
        named = {} if form.custom else {"name": form.name}
        out.append(self._event(f"{event}.done", **place, **named, **{field: told}))
        item["status"] = "completed"
        return [*out, self._event("response.output_item.done", output_index=number, item=item)]

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, value: Mapping[str, Any], *, cancelled: bool) -> list[bytes]:
        text = self._part()["text"] if self._open is not None else ""
        out = self._close(citations(value.get("tool_calls") or (), text))
        for call in value.get("client_calls") or ():
            out += self._call(call)
        counts = usage(value.get("usage"))
        self.shown["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
        if cancelled:
            return [*out, *self._finish("cancelled")]
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        if (reason := reasons.get(str(value.get("finish_reason")))) is not None:
            return [*out, *self._finish("incomplete", incomplete_details={"reason": reason})]
        return [*out, *self._finish("completed")]

    def _finish(self, status: str, **fields: Any) -> list[bytes]:
        self.done = True
        self.shown |= {"status": status, **fields}
        # there is no event of its own for what was cancelled
        name = "incomplete" if status == "cancelled" else status
        return [self._event(f"response.{name}", response=self.shown)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        if number <= self._after:
            return b""
        body = {"type": kind, "sequence_number": number, **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(body))
