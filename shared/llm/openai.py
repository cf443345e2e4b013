"""Any OpenAI-compatible server: vLLM, llama.cpp, LM Studio, a cluster behind one URL."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from shared.llm.adapter import BEHIND, RawCall, Said, WireEvent, following, merged
from shared.llm.address import openai_url
from shared.llm.discovery import is_llama, of_openai, same_model
from shared.llm.failures import ThinkingUnsupported, error_text, failure
from shared.llm.http import Bound
from shared.llm.port import (
    AccessRefused,
    ChatRequest,
    Finish,
    ModelError,
    ModelFacts,
    ModelMissing,
    ModelOverloaded,
    ModelRejected,
    ModelUnavailable,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
)
from shared.llm.server import OPENAI, SSE, ModelServer
from shared.llm.toolcalls import parsed, text_of
from shared.llm.vectors import unit_vectors

# Longest wait for an answer that needs no model, in seconds.
LOOK_TIMEOUT = 10.0
# A model may have to be loaded before it embeds.
EMBED_TIMEOUT = 120.0

# Ollama's names of options that have another one here.
_RENAMED = {"num_predict": "max_tokens"}
_NEW_LIMIT = "max_completion_tokens"
# Reasons behind which nothing more comes of an answer but counts of its tokens.
_WHOLE = ("stop", "length", "tool_calls", "function_call")
# What an answer begins with: a stream, one as a whole, or an error line of llama.cpp.
_BEGINS = (*SSE, b"{", b"error:")
# Options that an answer can do without; the switch for thinking has a fall-back of its own.
_SPARED = (
    "max_tokens", _NEW_LIMIT, "temperature", "top_p", "top_k", "min_p", "seed", "stop", "repeat_penalty",
    "presence_penalty", "frequency_penalty", "stream_options",
)  # fmt: skip
# The names under which servers send the thoughts of a message as text.
_REASONING = ("reasoning_content", "reasoning")
# Optional fields of a message, which a strict server may refuse.
_SPARED_OF_MESSAGE = (*_REASONING, "reasoning_details", "extra_content")
# The thoughts of a call that had none, for a server that demands some: Kimi treats an empty text as missing.
_NO_THOUGHTS = " "
_DEMANDS_THOUGHTS = re.compile(
    r"reasoning_content.{0,80}(?:missing|must be (?:passed|included|provided)|required)"
    r"|(?:missing|must (?:include|contain|have)|requires?).{0,40}reasoning_content",
    re.IGNORECASE | re.DOTALL,
)
# Refusals of null as the content of a message with calls (LM Studio, proxies).
_REFUSES_NULL = re.compile(
    r"content.{0,80}(?:must be a string|got null|<nil>|valid string|none is not|(?:cannot|may not|must not) be null)",
    re.IGNORECASE | re.DOTALL,
)
# Mistral's refusal of a call id that is not nine letters and digits.
_SHORT_IDS = re.compile(r"tool.?call.?id.{0,120}length of 9", re.IGNORECASE | re.DOTALL)
_REFUSES_OPTION = re.compile(
    r"unsupported|not support|unrecognized|unknown|unexpected|extra_forbidden|extra inputs|not permitted|not allowed"
    r"|deprecated|only the default|must be (?:1|the default)",
    re.IGNORECASE,
)


class OpenAIWire:
    """One connection pool to one server; retries are the caller's."""

    def __init__(self, base_url: str | None, api_key: str | None, ca_file: Path | None = None) -> None:
        # Silence is watched by the adapter: a model load is allowed to take longer than a pause.
        self._server = ModelServer(OPENAI, openai_url(base_url), api_key, ca_file)
        self._habits: dict[str, _Habits] = {}
        # Models that have answered, which are there whatever the server lists, and what it said of each.
        self._answered: set[str] = set()
        self._said: dict[str, ModelFacts] = {}

    @property
    def server(self) -> ModelServer:
        return self._server

    async def events(self, request: ChatRequest, *, wish: bool) -> AsyncGenerator[WireEvent, None]:
        missing = _missing(self._server.url, request.model)
        habits = self._habits.setdefault(request.model, _Habits())
        while True:
            asked, bound = _without(_body(request, wish, habits), habits.refused), Bound(request.length)
            reading = _Reading(request, missing, self._server.strange, habits.names)
            try:
                lines = self._server.lines("chat/completions", asked, bound, _BEGINS, missing)
                async with contextlib.aclosing(lines) as arrived:
                    until: float | None = None
                    while (some := await following(arrived, until, StreamInterrupted)) is not None:
                        for event in merged(reading.events(some)):
                            self._answered.add(request.model)
                            yield event
                        if until is None and reading.reason in _WHOLE:
                            until = asyncio.get_running_loop().time() + BEHIND
            except ModelMissing:
                self._answered.discard(request.model)
                raise
            except ModelRejected as exc:
                if isinstance(exc, ThinkingUnsupported) and wish:
                    raise
                if habits.learn(str(exc), asked):
                    continue
                if isinstance(exc, AccessRefused):
                    self._answered.discard(request.model)
                if isinstance(exc, ThinkingUnsupported):
                    raise ModelRejected(str(exc)) from exc
                raise
            for event in merged(reading.end()):
                yield event
            return

    async def facts(self, model: str) -> ModelFacts:
        try:
            self._said[model] = await self._listed(model)
        except (ModelUnavailable, ModelOverloaded):
            raise
        except ModelError:
            # a folder that is served, a name that a proxy understands, a server without a list or with a broken one
            if model not in self._answered:
                raise
        return self._said.get(model, ModelFacts())

    async def _listed(self, model: str) -> ModelFacts:
        missing = _missing(self._server.url, model)
        listed = await self._server.ask("GET", "models", missing, timeout=LOOK_TIMEOUT)
        try:
            entries = {str(entry["id"]): dict(entry) for entry in listed["data"]}
        except (KeyError, TypeError, ValueError) as exc:
            raise self._server.strange() from exc
        entry = next((entry for name, entry in entries.items() if same_model(name, model)), None)
        if entry is None:
            raise ModelMissing(missing, f"it has: {', '.join(entries) or 'none'}")
        return of_openai(entry, await self._props() if is_llama(entry) else None)

    async def _props(self) -> dict[str, Any] | None:
        """What llama.cpp's server says of itself; None when it does not."""
        with contextlib.suppress(ModelError):
            return await self._server.ask("GET", f"{root_of(self._server.url)}/props", timeout=LOOK_TIMEOUT)
        return None

    async def aclose(self) -> None:
        await self._server.aclose()


class OpenAIEmbeddings:
    """`/embeddings`. Raises ModelError."""

    def __init__(self, base_url: str | None, api_key: str | None, ca_file: Path | None = None) -> None:
        self._server = ModelServer(OPENAI, openai_url(base_url), api_key, ca_file)

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        if not texts:
            return []
        body = {"model": model, "input": list(texts), "encoding_format": "float"}
        missing = _missing(self._server.url, model)
        answer = await self._server.ask("POST", "embeddings", missing, body, timeout=EMBED_TIMEOUT)
        try:
            # some servers leave the number out, and keep the order
            entries = sorted(answer["data"], key=lambda entry: entry.get("index", 0))
            return unit_vectors([entry["embedding"] for entry in entries], len(texts))
        except (KeyError, TypeError, AttributeError, ValueError) as exc:
            raise ModelError(f"{self._server.url} sent no embeddings of {model} that can be used ({exc})") from exc

    async def aclose(self) -> None:
        await self._server.aclose()


def root_of(url: str) -> str:
    """Where the server's own routes are: the address without the protocol's `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


@dataclass(slots=True)
class _Habits:
    """Rules of a model's server, learned from its answers and refusals.

    refused: names of refused options and fields. names: the fields in which thoughts came, or `content` for parts of
    the content. demands: the server refuses a tool call without thoughts. short_ids: it refuses call ids that are not
    nine letters and digits. no_null: it refuses null as a content.
    """

    refused: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    demands: bool = False
    short_ids: bool = False
    no_null: bool = False

    def learn(self, refusal: str, asked: Mapping[str, Any]) -> bool:
        """Learn from the refusal of the body `asked`; return whether the request can be repeated in another form."""
        calling = [message for message in asked["messages"] if message.get("tool_calls")]
        if _SHORT_IDS.search(refusal):
            self.short_ids = True
            return any(self.id(call["id"]) != call["id"] for message in calling for call in message["tool_calls"])
        if _REFUSES_NULL.search(refusal):
            self.no_null = True
            return any(message["content"] is None for message in calling)
        if _DEMANDS_THOUGHTS.search(refusal):
            self.demands = "reasoning_content" not in self.refused
            return self.demands and any("reasoning_content" not in message for message in calling)
        if name := _refused_option(refusal, asked, _sent_in(calling)):
            self.refused.add(name)
        return name is not None

    def thoughts(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with the thoughts of a message with tool calls."""
        thinking = message.get("thinking")
        fields: dict[str, Any] = {}
        if thinking and "content" not in self.names:
            # Another replica received the message: the name of the field is unknown here.
            names = ["reasoning_content", *self.names] if self.names else _REASONING
            fields = dict.fromkeys(names, thinking)
        elif not thinking and self.demands:
            fields = {"reasoning_content": _NO_THOUGHTS}
        if details := message.get("reasoning_details"):
            fields["reasoning_details"] = list(details)
        return {name: value for name, value in fields.items() if name not in self.refused}

    def content(self, message: Mapping[str, Any]) -> Any:
        """Return the content of a message with tool calls; with the thoughts as a part if the server sent them so
        (Mistral)."""
        text, thinking = message.get("content") or "", message.get("thinking")
        if not thinking or "content" not in self.names or "thinking" in self.refused:
            return text or ("" if self.no_null else None)
        thought = {"type": "thinking", "thinking": [{"type": "text", "text": thinking}]}
        return [thought, {"type": "text", "text": text}] if text else [thought]

    def call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = {"name": call["name"], "arguments": orjson.dumps(call["args"]).decode()}
        written: dict[str, Any] = {"id": self.id(call["id"]), "type": "function", "function": function}
        if call.get("signature") and "extra_content" not in self.refused:
            written["extra_content"] = {"google": {"thought_signature": call["signature"]}}
        return written

    def id(self, given: str) -> str:
        """Return a call's id in the form that the server accepts; a call and its result get the same id."""
        if not self.short_ids or re.fullmatch(r"[A-Za-z0-9]{9}", given):
            return given
        return hashlib.sha256(given.encode()).hexdigest()[:9]


def _sent_in(messages: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the optional fields that these messages of a request contain."""
    found: set[str] = set()
    for message in messages:
        found |= message.keys() & set(_SPARED_OF_MESSAGE)
        found |= {name for call in message.get("tool_calls") or () for name in call.keys() & set(_SPARED_OF_MESSAGE)}
        if isinstance(message.get("content"), list):
            found.add("thinking")
    return found


def _body(request: ChatRequest, wish: bool, habits: _Habits) -> dict[str, Any]:
    body: dict[str, Any] = {_RENAMED.get(name, name): value for name, value in request.options.items()}
    if (length := request.length) is not None and "max_completion_tokens" not in body:
        body["max_tokens"] = length
    if wish:
        # How vLLM and llama.cpp are told; others ignore or refuse it (then we go on without).
        body["chat_template_kwargs"] = {"enable_thinking": request.think}
    body |= {
        "model": request.model,
        "messages": [_message(message, habits) for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.tools:
        body["tools"] = list(request.tools)
    if request.response_schema is not None:
        schema = {"name": "answer", "schema": request.response_schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _message(message: Mapping[str, Any], habits: _Habits) -> dict[str, Any]:
    content = message.get("content") or ""
    match message["role"]:
        case "assistant" if message.get("tool_calls"):
            return {
                "role": "assistant",
                "content": habits.content(message),
                **habits.thoughts(message),
                "tool_calls": [habits.call(call) for call in message["tool_calls"]],
            }
        case "tool":
            return {
                "role": "tool",
                "tool_call_id": habits.id(message.get("tool_call_id", "")),
                "name": message.get("tool_name", ""),
                "content": content,
            }
        case role:
            return {"role": role, "content": _parts(content, message["images"]) if message.get("images") else content}


def _parts(text: str, images: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A text with images, which are in the request itself: the server fetches nothing."""
    urls = [f"data:{image['type']};base64,{b64encode(image['data']).decode()}" for image in images]
    return [{"type": "text", "text": text}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]


def _without(body: dict[str, Any], refused: Collection[str]) -> dict[str, Any]:
    """The body without what the model refuses; the limit of the answer has a second name."""
    kept = {name: value for name, value in body.items() if name not in refused}
    if "max_tokens" in refused and "max_tokens" in body and _NEW_LIMIT not in refused:
        kept[_NEW_LIMIT] = body["max_tokens"]
    return kept


def _refused_option(text: str, body: Mapping[str, Any], fields: Collection[str]) -> str | None:
    """Return the optional option of a body, or the field of its messages (`fields`), that a refusal names; None if it
    names none."""
    if not _REFUSES_OPTION.search(text):
        return None
    # the one that is named first: the sentence may advise another one
    spared = [*(name for name in _SPARED if name in body), *fields]
    named = [(found.start(), name) for name in spared if (found := _word(name).search(text))]
    return min(named)[1] if named else None


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")


class _Reading:
    """One answer's events; the Finish waits for the usage, which comes in an event of its own after the last choice.

    reason: the finish reason, empty until the answer has ended. names: collects the fields in which thoughts came.
    """

    def __init__(self, request: ChatRequest, missing: str, strange: Callable[[], ModelError], names: set[str]) -> None:
        self._model = request.model
        self._missing = missing
        self._strange = strange
        self._names = names
        self._details: list[dict[str, Any]] = []
        self._whole: list[bytes] = []
        self._calls = _Calls(frozenset(tool["function"]["name"] for tool in request.tools))
        self.reason = ""
        self._begun = False
        self._usage: Mapping[str, Any] = {}
        self._ended = False

    def events(self, lines: Iterable[bytes]) -> Iterator[Said]:
        """What lines say; a comment, or the end of an event, says nothing."""
        for line in lines:
            kind, _, data = line.partition(b":")
            if self._whole or line.lstrip().startswith(b"{"):
                # some servers answer as a whole although a stream was asked for
                self._whole.append(line)
                continue
            if kind not in (b"data", b"error"):
                continue
            data = data.strip()
            if not data:
                continue
            if data == b"[DONE]":
                # not everybody says why
                self.reason = self.reason or "stop"
                yield from self.end()
                continue
            try:
                part = parsed(data)
                if kind == b"error" or part.get("error"):
                    raise failure(_status_in(part, self._begun), error_text(data), self._missing)
                for event in self._take(part):
                    self._begun = self._begun or not isinstance(event, tuple) or bool(event[1])
                    yield event
            except (ValueError, AttributeError, KeyError, TypeError, IndexError) as exc:
                raise StreamInterrupted(f"the server sent an event that cannot be read: {data[:80]!r}") from exc

    def _take(self, part: Mapping[str, Any]) -> Iterator[Said]:
        if isinstance(usage := part.get("usage"), dict):
            self._usage = usage
        self._model = part.get("model") or self._model
        # one answer was asked for
        choice: Mapping[str, Any] = next((one for one in part.get("choices") or () if not one.get("index")), {})
        delta = choice.get("delta") or choice.get("message") or {}
        self.reason = choice.get("finish_reason") or self.reason
        yield from self._thoughts(delta)
        for event in _content(delta.get("content")):
            if isinstance(event, tuple) and event[0] is ThinkingDelta:
                self._names.add("content")
            yield event
        if delta.get("refusal"):
            yield TextDelta, delta["refusal"]
        fragments = list(delta.get("tool_calls") or ())
        if delta.get("function_call"):
            # what calls were named before there were several
            fragments.append({"function": delta["function_call"]})
        for fragment in fragments:
            self._calls.add(fragment)
            yield TextDelta, ""

    def _thoughts(self, delta: Mapping[str, Any]) -> Iterator[Said]:
        # Both names are in use, and some servers send the same text under both.
        found = {name: text for name in _REASONING if (text := delta.get(name)) and isinstance(text, str)}
        self._names.update(found)
        details = [one for one in delta.get("reasoning_details") or () if isinstance(one, dict)]
        for one in details:
            _add_detail(self._details, one)
        if found:
            yield ThinkingDelta, next(iter(found.values()))
        elif details:
            yield ThinkingDelta, "".join(str(one.get("text") or one.get("summary") or "") for one in details)

    def end(self) -> Iterable[Said]:
        """The calls and the Finish, when the answer is complete; once."""
        if self._whole:
            yield from self._as_a_whole(b"\n".join(self._whole))
        if not self.reason or self._ended:
            return
        self._ended = True
        if self.reason == "content_filter":
            raise ModelRejected("the model backend withheld the answer (content filter)")
        # Fragments are complete only now; a call that the length limit cut off must not run.
        yield from self._calls.complete(cut=self.reason == "length")
        yield Finish(
            reason="length" if self.reason == "length" else "stop",
            prompt_tokens=self._usage.get("prompt_tokens"),
            completion_tokens=self._usage.get("completion_tokens"),
            model=self._model,
            reasoning_details=tuple(self._details),
        )

    def _as_a_whole(self, content: bytes) -> Iterable[Said]:
        try:
            value = orjson.loads(content)
            if value.get("error"):
                raise failure(None, error_text(content), self._missing)
            if not value["choices"]:
                raise self._strange()
            yield from self._take(value)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError) as exc:
            raise self._strange() from exc


def _status_in(part: Mapping[str, Any], begun: bool) -> int | None:
    """Return the HTTP status of an error inside a stream. None: the error has none, or it is a 4xx other than 429 after
    the answer has begun."""
    error = part.get("error")
    status = (error if isinstance(error, dict) else part).get("code")
    if not isinstance(status, int) or not 400 <= status < 600 or (begun and status < 500 and status != 429):
        return None
    return status


def _content(content: Any) -> list[Said]:
    """Texts and thoughts of a content: a text, or a list of parts of which each says what it is."""
    if not content:
        return []
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return [(TextDelta, content)]
    events: list[Said] = []
    for part in content:
        if isinstance(part, str):
            events.append((TextDelta, part))
        elif part.get("type") == "thinking":
            thoughts = part.get("thinking") or part.get("text") or ""
            thoughts = thoughts if isinstance(thoughts, list) else [thoughts]
            said = (thought if isinstance(thought, str) else thought.get("text") or "" for thought in thoughts)
            events.append((ThinkingDelta, "".join(said)))
        elif part.get("text") or part.get("refusal"):
            events.append((TextDelta, part.get("text") or part["refusal"]))
    return events


def _add_detail(details: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    """Add a piece of OpenRouter's `reasoning_details`: text continues the entry of the same type and number."""
    kind, last = piece.get("type"), details[-1] if details else {}
    name = {"reasoning.text": "text", "reasoning.summary": "summary"}.get(str(kind))
    if name is None or (kind, piece.get("index")) != (last.get("type"), last.get("index")):
        details.append(dict(piece))
        return
    text = str(last.get(name) or "") + str(piece.get(name) or "")
    last.update({key: value for key, value in piece.items() if value is not None} | {name: text})


@dataclass(slots=True)
class _Call:
    """A call whose fragments are being put together."""

    index: int
    id: str | None = None
    name: str = ""
    signature: str | None = None
    arguments: list[Any] = field(default_factory=list)

    def written(self) -> Any:
        """The arguments so far. Not to the letter of the protocol: some servers send them as an object."""
        whole = next((piece for piece in self.arguments if not isinstance(piece, str)), None)
        return "".join(self.arguments) if whole is None else whole


class _Calls:
    """Tool calls put together from their fragments, which may come in any order. `offered`: names on offer."""

    def __init__(self, offered: Collection[str]) -> None:
        self._offered = offered
        self._calls: list[_Call] = []
        self._open: dict[int, _Call] = {}

    def add(self, fragment: Mapping[str, Any]) -> None:
        function = fragment.get("function") or {}
        call_id, name, arguments = fragment.get("id"), function.get("name") or "", function.get("arguments")
        index = fragment.get("index")
        if not isinstance(index, int):
            index = self._calls[-1].index if self._calls else 0
        call = self._open.get(index)
        if call is None or self._begins_another(call, call_id, name):
            call = self._open[index] = _Call(index)
            self._calls.append(call)
        call.id = call.id or (text_of(call_id) if call_id else None)
        call.signature = _signature(fragment.get("extra_content")) or call.signature
        if name != call.name:  # some repeat the name in every fragment
            call.name += text_of(name)
        if arguments:
            call.arguments.append(arguments)

    def _begins_another(self, call: _Call, call_id: Any, name: str) -> bool:
        """Whether a fragment is of another call, although it comes under the same number: some number every call 0,
        others not at all."""
        if call_id and call.id and call_id != call.id:
            return True
        if not name or not call.name or (call_id and call_id == call.id):
            return False
        if call.arguments:
            return _is_complete(call.written())
        # half a name is followed by its other half
        return call.name in self._offered and name in self._offered and name != call.name

    def complete(self, *, cut: bool) -> Iterator[RawCall]:
        for call in sorted(self._calls, key=lambda call: call.index):
            if cut and call is self._calls[-1] and not _is_complete(call.written()):
                continue
            yield RawCall(call.id, call.name, call.written(), call.signature)


def _signature(extra: Any) -> str | None:
    """Return Gemini's signature of thoughts from a call's `extra_content` (Google's OpenAI-compatible server)."""
    match extra:
        case {"google": {"thought_signature": str() as signature}}:
            return signature
        case _:
            return None


def _is_complete(value: Any) -> bool:
    """Whether arguments are a whole JSON value."""
    try:
        return not isinstance(value, str) or orjson.loads(value) is not None
    except orjson.JSONDecodeError:
        return False


def _missing(url: str, model: str) -> str:
    return f"the server at {url} does not have the model {model}"
