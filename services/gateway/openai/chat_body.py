"""OpenAI's chat completions, coming in: a request as a question to the agent. Pure.

Liberal, as clients are: a field that is null is not there, and what changes nothing for a local model is passed over.
What matters and cannot be done is refused with a sentence. Source: the API reference of OpenAI, 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.gateway.http.errors import ApiError, sentence
from services.gateway.http.schemas import Options
from services.gateway.openai.tool_forms import Function, Offered, args_of_text, offered
from services.gateway.queries.accept import Ask
from services.gateway.queries.prompt_wrappers import is_housekeeping, spoken, undressed
from shared.contracts import FILES_ALONE, MAX_QUERY_CHARS, ChatToolCall, ChatTurnMessage, ClientTools
from shared.zones import zone_name

DEFAULT_MODEL = "local2"
# One plain call of the model: for titles, tags and whatever else a client asks behind a user's back.
UTILITY_MODEL = "local2-utility"
_MOST_TOOLS = 128
_SEEDS = 2**32
# Bytes of a schema that is remembered once it was looked at.
_SHORT = 8_192
# Of seven types that there are. Whether those of a list differ is looked at by comparing each with each.
_MOST_TYPES = 100
# A part that stands for an image or a file which the memory keeps; its text is the id.
STORED = "local2_file"

Role = Literal["system", "user", "assistant", "tool"]
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class Wire(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Part(Wire):
    type: str = "text"
    text: str | None = None
    image_url: Any = None
    file: Any = None


class CalledFunction(Wire):
    name: str = Field(max_length=200)
    arguments: str | dict[str, Any] | None = ""


class CalledCustom(Wire):
    name: str = Field(max_length=200)
    input: str | None = ""


class Call(Wire):
    id: str | None = Field(default=None, max_length=200)
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    def told(self, otherwise: str) -> ChatToolCall:
        """The call; `otherwise`: its id where it has none. Raises ApiError 400."""
        if self.custom is not None:
            return ChatToolCall(id=self.id or otherwise, name=self.custom.name, args=args_of_text(self.custom.input))
        if self.function is None:
            raise bad("messages: a call in tool_calls must have its function")
        return ChatToolCall(id=self.id or otherwise, name=self.function.name, args=arguments(self.function.arguments))


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[str | Part] | None = None
    name: str | None = Field(default=None, max_length=200)
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = Field(default=None, max_length=200)
    reasoning_content: Any = None
    reasoning: Any = None

    @property
    def thinking(self) -> str | None:
        """Return the thoughts that a client sends back with the model's calls."""
        if self.role != "assistant":
            return None
        given = (self.reasoning_content, self.reasoning)
        return next((text for text in given if isinstance(text, str) and text.strip()), None)

    @property
    def parts(self) -> list[str | Part]:
        return self.content if isinstance(self.content, list) else []


class StreamOptions(Wire):
    include_usage: bool | None = None


class Tool(Wire):
    type: str = "function"
    function: Function | None = None


class ChatBody(Wire):
    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        json_schema_extra={
            "example": {"model": "local2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        },
    )

    model: str | None = Field(default=DEFAULT_MODEL, max_length=200)
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    n: int | None = None
    tools: list[Tool] | None = Field(default=None, max_length=_MOST_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = Field(default=None, max_length=_MOST_TOOLS)
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    metadata: dict[str, Any] | None = None
    user: Any = None

    @property
    def legacy(self) -> bool:
        """Whether the client speaks of functions, as before there were tools, and wants to be answered so."""
        return bool(self.functions) and not self.tools

    def offered(self) -> Offered:
        """The client's tools. Raises ApiError 400."""
        if self.legacy:
            return offered({"type": "function", "function": one.model_dump()} for one in self.functions or ())
        return offered(tool.model_dump(exclude_none=True) for tool in self.tools or ())


def asked(body: ChatBody, known_models: Iterable[str], task: str = "") -> Ask:
    """The query in a request. `task`: what the client calls it, where it is a chore of its own, for a title or tags.
    Raises ApiError: 404 for a model that is not here, 400 for what cannot be done."""
    if body.n not in (None, 1):
        raise bad("n: only one answer at a time", "unsupported")
    if body.logprobs:
        raise bad("logprobs: not supported", "unsupported")
    name = body.model or DEFAULT_MODEL
    messages = _messages(body.messages)
    last, before, following = question(messages)
    plain = is_plain(name, messages, task, body.metadata)
    material, query = ("", last.content) if plain else undressed(last.content)
    functions = [function for function, _ in body.offered().values()]
    return Ask(
        query=query,
        attachments=[{"id": file_id} for file_id in last.attachments or ()] or None,
        material=material or None,
        messages=before,
        following=following,
        model=backend_model(name, known_models),
        options=_options(body),
        client_tools=None if plain else client_tools(functions, _choice(body), body.parallel_tool_calls),
        answer_schema=answer_schema(body.response_format),
        think=False if plain else _think(body),
        plain=plain,
        time_zone=zone_in(body.metadata),
    )


def is_plain(name: str, messages: Sequence[ChatTurnMessage], task: str, metadata: Mapping[str, Any] | None) -> bool:
    """Whether one plain call of the model is meant: a program's own chore, not a question to the agent."""
    return name == UTILITY_MODEL or bool(task or (metadata or {}).get("task")) or is_housekeeping(messages)


def zone_in(metadata: Mapping[str, Any] | None) -> str | None:
    """Return the IANA time zone that a client gives in a request's `metadata`. Raises ApiError 400."""
    named = (metadata or {}).get("time_zone")
    if named is None:
        return None
    try:
        return zone_name(str(named))
    except ValueError as exc:
        raise bad(f"metadata.time_zone: {exc}") from exc


def backend_model(name: str, known: Iterable[str]) -> str | None:
    """The model behind the agent that a name means; None: the one it has. Raises ApiError 404."""
    if name in (DEFAULT_MODEL, UTILITY_MODEL):
        return None
    if name in (names := sorted(known)):
        return name
    there = ", ".join((DEFAULT_MODEL, UTILITY_MODEL, *names))
    raise ApiError(404, "model_not_found", f"there is no model {name!r} here; there are: {there}")


# ── the conversation ─────────────────────────────────────────────────────────────────────────────────────────────


def question(
    messages: Sequence[ChatTurnMessage],
) -> tuple[ChatTurnMessage, list[ChatTurnMessage], list[ChatTurnMessage] | None]:
    """(what the user said last, the messages before it, those after it). Raises ApiError 400."""
    # a conversation without a user's message is one where the system's is all that was said
    said = [n for n, message in enumerate(messages) if message.role == "user"] or [
        n for n, message in enumerate(messages) if message.role == "system"
    ]
    if not said:
        raise bad("messages: none of them is the user's")
    last = messages[said[-1]]
    if not last.content.strip():
        raise bad("messages: the last message of the user is empty")
    if any(len(message.content) + len(message.thinking or "") > MAX_QUERY_CHARS for message in messages):
        raise bad(f"messages: one is longer than {MAX_QUERY_CHARS} characters", "context_length_exceeded")
    # Finished turns go to the model without thoughts.
    before = [message.model_copy(update={"thinking": None}) for message in messages[: said[-1]]]
    return last, before, list(messages[said[-1] + 1 :]) or None


def _messages(messages: Sequence[ChatMessage]) -> list[ChatTurnMessage]:
    found: list[ChatTurnMessage] = []
    for place, message in enumerate(messages):
        calls = [call.told(f"call_{place}_{n}") for n, call in enumerate(message.tool_calls or ())]
        if message.function_call is not None:
            calls.append(ChatToolCall(id=f"call_{place}", name=message.function_call.name,
                                      args=arguments(message.function_call.arguments)))  # fmt: skip
        answers = message.tool_call_id
        if message.role == "function":
            # the older form has no ids: a result belongs to the call before it
            answers = f"call_{place - 1}"
        found.append(
            ChatTurnMessage(
                role=ROLES[message.role],
                content=content_of(message.content, place, message.role),
                attachments=files_of(message.content, message.role),
                name=message.name,
                tool_calls=calls or None,
                tool_call_id=answers,
                thinking=message.thinking if calls else None,
            )
        )
    return found


def content_of(content: str | Sequence[str | Part] | None, place: int, role: str) -> str:
    """A message's words; raises ApiError as `text_of` does."""
    text = text_of(content, place, role)
    if not text.strip() and role == "user" and files_of(content, role):
        return FILES_ALONE
    return spoken(text) if role == "assistant" else text


def files_of(content: str | Sequence[str | Part] | None, role: str) -> list[str] | None:
    """The ids of what a user, or a tool, shows."""
    if role not in ("user", "tool") or not content or isinstance(content, str):
        return None
    return [part.text for part in content if isinstance(part, Part) and part.type == STORED and part.text] or None


def parts_of(content: Any) -> list[str | Part]:
    """The parts of a content that has not been looked at. Raises ApiError 400."""
    if not isinstance(content, list):
        return []
    try:
        return [Part.model_validate(part) if isinstance(part, dict) else str(part) for part in content]
    except ValidationError as exc:
        raise bad(f"content: {sentence(exc.errors()[0])}") from exc


def arguments(told: Any) -> dict[str, Any]:
    """The arguments of a call that the client tells of; what is no JSON object is kept as it is."""
    try:
        value = orjson.loads(told or "{}") if told is None or isinstance(told, str) else told
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"unparsed": told}


def text_of(content: str | Sequence[str | Part] | None, place: int, role: str) -> str:
    """A message's text. What a model is said to have thought or refused is no part of it. Raises ApiError 400 for what
    a user sends that cannot be read."""
    if not isinstance(content, (list, tuple)):
        return str(content or "")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif part.type in ("text", "input_text", "output_text") and part.text is not None:
            texts.append(part.text)
        elif role != "assistant" and part.type != STORED:
            raise bad(f"messages.{place}.content: parts of type {part.type[:50]} are not supported", "unsupported")
    return "\n".join(texts)


# ── what is asked of the answer ──────────────────────────────────────────────────────────────────────────────────


def _choice(body: ChatBody) -> str | Mapping[str, Any] | None:
    if not body.legacy:
        return body.tool_choice
    # the older form names the function without saying that it is one
    return {"function": body.function_call} if isinstance(body.function_call, dict) else body.function_call


def client_tools(
    functions: Sequence[Function], choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ClientTools | None:
    """The client's own tools, where the model may call them. Raises ApiError 400."""
    names = [function.name for function in functions]
    wanted: str
    match choice:
        case None | "auto" | "required":
            wanted = choice or "auto"
        case "none":
            return None
        case {"allowed_tools": {"mode": mode, "tools": [*allowed]}} | {"mode": mode, "tools": [*allowed]}:
            kept = {_name(tool) for tool in allowed}
            functions = [function for function in functions if function.name in kept]
            wanted = "required" if mode == "required" else "auto"
        case Mapping() if (name := _name(choice)) is not None:
            if name not in names:
                raise bad(f"tool_choice: there is no tool {name!r} in tools")
            wanted = name
        case _:
            raise bad("tool_choice: must be none, auto, required or the name of a function")
    if not functions:
        if wanted == "required":
            raise bad("tool_choice: required, but there are no tools")
        return None
    for function in functions:
        check_schema(function.parameters or {}, f"the parameters of the tool {function.name}")
    return ClientTools(
        functions=[{"type": "function", "function": _schema(function)} for function in functions],
        choice=wanted,
        parallel=parallel is not False,
    )


def _name(choice: Any) -> str | None:
    if not isinstance(choice, Mapping):
        return None
    inner = choice.get("function", choice.get("custom", choice))
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def _schema(function: Function) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {"name": function.name, "description": function.description or "", "parameters": parameters}


def answer_schema(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema that the answer must fit. Raises ApiError 400."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            check_schema(schema, "response_format")
            return schema
        case {"type": "json_schema", "schema": dict(schema)}:
            check_schema(schema, "text.format")
            return schema
        case _:
            raise bad("response_format: must be of type text, json_object, or json_schema with a schema", "unsupported")


def check_schema(schema: dict[str, Any], what: str) -> None:
    """Raises ApiError 400 for what is no JSON schema."""
    said = orjson.dumps(schema)
    if trouble := (_trouble_again if len(said) <= _SHORT else _trouble)(said):
        raise bad(f"{what}: is no JSON schema: {trouble}")


def _trouble(said: bytes) -> str:
    """Why that is no JSON schema; empty where it is one."""
    import jsonschema

    schema = orjson.loads(said)
    if _types(schema) > _MOST_TYPES:
        return f"a type in it is a list with more than {_MOST_TYPES} entries"
    try:
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.exceptions.SchemaError as exc:
        return str(exc.message)[:200]
    except Exception as exc:
        # what calls itself a kind of schema that cannot be, a pattern beyond what the reader of patterns reads
        return str(exc)[:200] or type(exc).__name__
    return ""


def _types(value: Any) -> int:
    """The number of entries of the longest list of types."""
    if isinstance(value, list):
        return max(map(_types, value), default=0)
    if not isinstance(value, dict):
        return 0
    named = value.get("type")
    return max(len(named) if isinstance(named, list) else 0, *map(_types, value.values()), 0)


# a client's tools come again with every request, and take longer to look at than all the rest of it
_trouble_again = lru_cache(maxsize=1_024)(_trouble)


def _think(body: ChatBody) -> bool | None:
    wished = (body.chat_template_kwargs or {}).get("enable_thinking")
    if isinstance(wished, bool):
        return wished
    return effort(body.reasoning_effort)


def effort(word: str | None) -> bool | None:
    """Whether a model should think, by OpenAI's word for how much."""
    return None if word is None else word != "none"


def _options(body: ChatBody) -> dict[str, Any] | None:
    return options(
        {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k if body.top_k is None or body.top_k >= 0 else None,
            "min_p": body.min_p,
            "num_predict": body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
            "seed": body.seed,
            "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "repeat_penalty": body.repeat_penalty if body.repeat_penalty is not None else body.repetition_penalty,
        }
    )


def options(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Sampling options in our names; the usual ways of saying "no limit" are understood. Raises ApiError 400."""
    kept = {name: value for name, value in given.items() if value is not None}
    if kept.get("num_predict") == -1:
        del kept["num_predict"]
    if (seed := kept.get("seed")) is not None:
        # clients draw seeds of 64 bits, and mean chance by -1
        kept["seed"] = seed % _SEEDS
        if seed == -1:
            del kept["seed"]
    if "stop" in kept:
        kept["stop"] = [word for word in kept["stop"] if word]
    try:
        found = Options.model_validate(kept)
    except ValidationError as exc:
        raise bad(sentence(exc.errors(include_url=False)[0]).replace("num_predict", "max_tokens")) from exc
    return {name: value for name, value in found.model_dump(exclude_none=True).items() if value != []} or None


def bad(message: str, code: str = "invalid_request") -> ApiError:
    return ApiError(400, code, message)
