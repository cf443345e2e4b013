"""OpenAI's chat completions in and out: pure translation, no I/O."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.gateway.accept import Ask
from services.gateway.errors import ApiError, error_body, openai_fields, sentence
from services.gateway.schemas import Options
from shared.bus import order
from shared.contracts import MAX_QUERY_CHARS, ChatTurnMessage
from shared.records.journal import EntryType, JournalEntry

DEFAULT_MODEL = "local2"
DONE = b"data: [DONE]\n\n"

ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class Wire(BaseModel):
    # clients send many fields that change nothing for a local model; what matters and cannot be done is refused below
    model_config = ConfigDict(extra="allow", frozen=True)


class Part(Wire):
    type: str
    text: str | None = None


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = Field(default=None, max_length=200)


class StreamOptions(Wire):
    include_usage: bool = False


class ChatBody(Wire):
    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        json_schema_extra={
            "example": {"model": "local2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        },
    )

    model: str = Field(default=DEFAULT_MODEL, max_length=200)
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None


def asked(body: ChatBody, known_models: Iterable[str]) -> Ask:
    """The query in a request. Raises ApiError 400 for what this assistant cannot do."""
    _refuse(body)
    *history, last = body.messages
    if last.role != "user":
        raise _bad("messages: the last message must be the user's")
    query = _text(last, len(history))
    if not query.strip():
        raise _bad("messages: the last message is empty")
    if len(query) > MAX_QUERY_CHARS:
        raise _bad(f"messages: the last message is longer than {MAX_QUERY_CHARS} characters", "context_length_exceeded")
    return Ask(
        query=query,
        messages=[
            ChatTurnMessage(role=ROLES[message.role], content=_text(message, place), name=message.name)
            for place, message in enumerate(history)
        ],
        model=body.model if body.model in set(known_models) else None,
        options=_options(body),
    )


def _refuse(body: ChatBody) -> None:
    if body.tools or body.functions:
        raise _bad("tools: the assistant calls its own tools; a client's tools are not supported", "unsupported")
    if body.n not in (None, 1):
        raise _bad("n: only one answer at a time", "unsupported")
    if body.response_format and body.response_format.get("type", "text") != "text":
        raise _bad("response_format: only text is supported", "unsupported")
    if body.logprobs:
        raise _bad("logprobs: not supported", "unsupported")


def _text(message: ChatMessage, place: int) -> str:
    content = message.content
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise _bad(f"messages.{place}.content: parts of type {part.type[:50]} are not supported", "unsupported")
    return "\n".join(part.text or "" for part in content)


def _options(body: ChatBody) -> dict[str, Any] | None:
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "num_predict": limit,
        "seed": body.seed,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
    }
    try:
        options = Options.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as exc:
        raise _bad(sentence(exc.errors(include_url=False)[0]).replace("num_predict", "max_tokens")) from exc
    return options.model_dump(exclude_none=True) or None


def _bad(message: str, code: str = "invalid_request") -> ApiError:
    return ApiError(400, code, message)


def completion(query_id: str, model: str, shown: dict[str, Any], created: int) -> dict[str, Any]:
    """A finished result in OpenAI's shape."""
    return {
        "id": f"chatcmpl-{query_id}",
        "object": "chat.completion",
        "created": created,
        "model": shown["model"] or model,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": shown["answer"],
                    "refusal": None,
                    "reasoning": shown["thinking"] or None,
                    "reasoning_content": shown["thinking"] or None,
                },
                "logprobs": None,
                "finish_reason": finish_reason(shown["finish_reason"]),
            }
        ],
        "usage": usage(shown["usage"]),
    }


def finish_reason(reason: str | None) -> str:
    """The agent's own tool calls are over by then: they never show."""
    return "length" if reason == "length" else "stop"


def usage(counts: Any) -> dict[str, int]:
    known = counts if isinstance(counts, dict) else {}
    prompt, generated = (
        count if isinstance(count := known.get(name), int) else 0 for name in ("prompt_tokens", "completion_tokens")
    )
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class Chunks:
    """A journal as `chat.completion.chunk` events.

    What was sent cannot be taken back: when a model call is started again, the new text is compared with what the
    client already has of that call, and only what goes beyond it is sent.
    """

    def __init__(self, query_id: str, model: str, include_usage: bool) -> None:
        self._id = f"chatcmpl-{query_id}"
        self._model = model
        self._created = int(time.time())
        self._include_usage = include_usage
        self._sent: list[tuple[tuple[int, int], str, str]] = []
        self._replayed: dict[str, str] = {}
        self._again: dict[str, str] = {}
        self._gap = False
        self._any_answer = False
        self.done = False

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def feed(self, entries: Sequence[JournalEntry]) -> bytes:
        """The chunks of some journal entries; `done` is set after the terminal one."""
        out: list[bytes] = []
        for entry in entries:
            match entry.type:
                case _ if b'"persona"' in entry.data and "persona" in entry.value():
                    # what the committee says among itself is not the answer
                    continue
                case EntryType.CLAIMED:
                    self._model = entry.value().get("model") or self._model
                case EntryType.THINKING | EntryType.ANSWER:
                    out.append(self._delta(entry))
                case EntryType.MESSAGE:
                    self._sent.clear()
                    self._replayed.clear()
                    self._gap = self._any_answer and bool(entry.value().get("tool_calls"))
                case EntryType.RESTARTED:
                    self._restart(entry.valid_until())
                case EntryType.COMPLETED | EntryType.CANCELLED:
                    out.append(self._end(entry.value()))
                case EntryType.FAILED:
                    out.append(self._failed(entry.value()))
                case _:
                    pass
            if self.done:
                break
        return b"".join(out)

    def _delta(self, entry: JournalEntry) -> bytes:
        kind, text = str(entry.type), entry.text()
        self._sent.append((order(entry.id), kind, text))
        text = self._beyond(kind, text)
        if not text:
            return b""
        if entry.type is EntryType.THINKING:
            return self._chunk({"reasoning": text, "reasoning_content": text})
        if self._gap:
            # what was said before a tool call and the answer are two paragraphs
            text, self._gap = f"\n\n{text}", False
        self._any_answer = True
        return self._chunk({"content": text})

    def _restart(self, after: tuple[int, int]) -> None:
        self._again.clear()
        self._replayed = {
            kind: "".join(text for at, of, text in self._sent if of == kind and at > after)
            for kind in (EntryType.THINKING.value, EntryType.ANSWER.value)
        }
        self._sent = [sent for sent in self._sent if sent[0] <= after]

    def _beyond(self, kind: str, text: str) -> str:
        """The part of a delta that the client does not have yet."""
        known = self._replayed.get(kind, "")
        if not known:
            return text
        said = self._again.get(kind, "") + text
        self._again[kind] = said
        if known.startswith(said):
            return ""
        self._replayed[kind] = ""
        return said[len(known) :] if said.startswith(known) else f"\n\n{said}"

    def _end(self, value: dict[str, Any]) -> bytes:
        self.done = True
        out = []
        if not self._any_answer and value.get("answer"):
            out.append(self._chunk({"content": str(value["answer"])}))
        out.append(self._chunk({}, finish_reason(value.get("finish_reason"))))
        if self._include_usage:
            out.append(self._event({"choices": [], "usage": usage(value.get("usage"))}))
        return b"".join((*out, DONE))

    def _failed(self, value: dict[str, Any]) -> bytes:
        self.done = True
        return failed(str(value.get("code", "internal")), str(value.get("message", "the query failed")))

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        extra: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return self._event({"choices": [choice], **extra})

    def _event(self, body: dict[str, Any]) -> bytes:
        head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model}
        return b"data: %b\n\n" % orjson.dumps({**head, **body})


def failed(code: str, message: str) -> bytes:
    """An error after the response has begun: clients of OpenAI raise it."""
    return b"data: %b\n\n%b" % (error_body(code, message, openai_fields(500)), DONE)
