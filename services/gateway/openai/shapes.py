"""OpenAI's shapes, as far as they are spoken."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, Json

from services.gateway.http.shape import Shape


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int = Field(description="Seconds since the epoch")
    owned_by: str


class Models(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class UrlCitation(Shape):
    url: str
    title: str
    start_index: int
    end_index: int


class Citation(Shape):
    type: Literal["url_citation"]
    url_citation: UrlCitation


class AskedFunction(Shape):
    name: str
    arguments: str = Field(description="JSON in a text")


class AskedCall(Shape):
    id: str
    type: Literal["function"]
    function: AskedFunction
    index: int = Field(default=0, description="In chunks only")


class CompletionMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    annotations: list[Citation]
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[AskedCall] = Field(default=[], description="Calls that the client is to run")
    function_call: AskedFunction | None = None


FinishReason = Literal["stop", "length", "tool_calls", "function_call", "content_filter"]


class Choice(Shape):
    index: int
    message: CompletionMessage
    logprobs: None
    finish_reason: FinishReason


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Seconds since the epoch")
    model: str
    choices: list[Choice]
    usage: Tokens


class Delta(Shape):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning: str = ""
    reasoning_content: str = ""
    annotations: list[Citation] = Field(default=[])
    tool_calls: list[AskedCall] = Field(default=[])
    function_call: AskedFunction | None = None


class ChunkChoice(Shape):
    index: int
    delta: Delta
    logprobs: None
    finish_reason: FinishReason | None


class ChatChunk(Shape):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int = Field(description="Seconds since the epoch")
    model: str
    choices: list[ChunkChoice]
    usage: Tokens | None = None


class ChatChunkEvent(Shape):
    """A chunk of a completion; the last event's data is `[DONE]`."""

    data: Json[ChatChunk] | Literal["[DONE]"]


class EmbeddingItem(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="base64: 32-bit floats, little-endian")


class EmbeddingTokens(Shape):
    prompt_tokens: int = Field(description="An estimate: a quarter of the characters")
    total_tokens: int


class EmbeddingList(Shape):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingTokens


class InputDetails(Shape):
    cached_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class ResponseTokens(Shape):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class ResponseError(Shape):
    code: str
    message: str


class Incomplete(Shape):
    reason: str


class ResponseObject(Shape):
    """A response. Settings of its request are repeated as they came."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Seconds since the epoch")
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]] = Field(description="Messages, reasoning and function calls")
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: str
    usage: ResponseTokens | None
    user: str | None = None


class ResponseDeleted(Shape):
    id: str
    object: Literal["response"]
    deleted: bool


class ResponseEventData(Shape):
    """`type` says what else is in it."""

    type: str
    sequence_number: int


class ResponseEvent(Shape):
    event: str
    data: Json[ResponseEventData]
