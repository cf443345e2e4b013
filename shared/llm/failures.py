"""Backends' failures turned into ours: by HTTP status where there is one, else by what the text says."""

from __future__ import annotations

import re
from typing import Any

import orjson

from shared.llm.discovery import prompt_of, window_of
from shared.llm.port import (
    AccessRefused,
    ContextOverflow,
    ModelError,
    ModelMissing,
    ModelOverloaded,
    ModelRejected,
    ModelUnavailable,
    NotOffered,
    StreamInterrupted,
)

_OVERFLOW = re.compile(
    r"(exceeds?|exceeded|longer than|larger than|too long for).{0,40}(context|input token)|prompt is too long"
    r"|maximum (context|model) length|context length of only|context_length_exceeded|exceed_context_size"
    r"|input token count.{0,40}exceeds",
    re.IGNORECASE | re.DOTALL,
)
# The process that runs the model ended while its server lives on. Ollama quotes the last errors of that process' log
# behind these words, whoever's request they were about: nothing after them tells of this one.
_CRASHED = re.compile(
    r"an error was encountered while running the model|(llama|model) runner (process )?(has|is|no)"
    r"|llama-?server process (has|is|no)|enginecore encountered|enginedeaderror|async engine.{0,20}(dead|died)",
    re.IGNORECASE | re.DOTALL,
)
_NO_TOOLS = re.compile(
    r"does not support (tools|tool use|tool calling|function calling)|tool choice requires|tools param requires"
    r"|tools? (is|are) not supported|function calling is not (enabled|supported)",
    re.IGNORECASE,
)
_NO_THINKING = re.compile(
    r"does not support (thinking|reasoning)\b|thinking is not (enabled|supported)|only works in thinking mode"
    r"|thinking_?(config|budget|level)|chat_template_kwargs|enable_thinking|reasoning_effort",
    re.IGNORECASE,
)
_NO_EMBEDDINGS = re.compile(
    r"does not support (the )?embeddings?|embeddings? (api )?(is|are) not (supported|enabled|available)", re.IGNORECASE
)
_BUSY = re.compile(r"server busy|overloaded|maximum pending requests|rate limit|too many requests", re.IGNORECASE)
_MISSING = re.compile(r"models?[ /]['\"`]?[\w./:@-]+['\"`]? (is )?(not found|does not exist)", re.IGNORECASE)


# Ollama's answer to a Host header that it does not know; a gateway that minds the key says so.
_HOST = (
    "the model server refuses the name by which it is called (HTTP 403 without a word). An Ollama that listens on its "
    "own machine only answers to localhost, to IP addresses and to names in .local: call it by one of these, or start "
    "it with OLLAMA_HOST=0.0.0.0"
)


class ToolsUnsupported(ModelRejected):
    """The model takes no tools; the same request without them may work."""


class ThinkingUnsupported(ModelRejected):
    """The model takes no wish about thinking; the same request without one may work."""


def failure(status: int | None, text: str, missing: str) -> ModelError:
    """Our error for a backend's answer. `status` is None for an error that came in the middle of a stream;
    `missing` is the sentence for a model that the backend does not have.
    """
    said = text.strip()[:500] or f"HTTP {status}"
    if _CRASHED.search(text):
        return StreamInterrupted(f"the model crashed at its server, whose log says why: {_without_quotation(said)}")
    if status in (429, 503) or _BUSY.search(text):
        return ModelOverloaded(f"the model backend is busy: {said}")
    if status in (502, 504):
        return ModelUnavailable(f"the model backend is not reachable through its proxy: {said}")
    if _OVERFLOW.search(text):
        return ContextOverflow(f"the prompt does not fit the model's context: {said}", window_of(text), prompt_of(text))
    if _NO_TOOLS.search(text):
        return ToolsUnsupported(said)
    # A 500 that merely mentions one of these words has another cause.
    if status in (400, 422) and _NO_THINKING.search(text):
        return ThinkingUnsupported(said)
    if _MISSING.search(text):
        return ModelMissing(missing)
    if status == 403 and not text.strip():
        return AccessRefused(_HOST)
    if status in (401, 403):
        return AccessRefused(f"the model backend refuses the API key: {said}")
    if status in (404, 405, 501) or _NO_EMBEDDINGS.search(text):
        return NotOffered(f"the model backend does not offer this: {said}")
    if status is not None and 400 <= status < 500:
        return ModelRejected(f"the model backend refuses the request: {said}")
    return ModelError(f"the model backend failed: {said}")


def _without_quotation(said: str) -> str:
    """What a server says of a crash, without what it quotes of somebody's prompt that was too long."""
    return said.partition(":")[0] if _OVERFLOW.search(said) else said


def error_text(body: bytes | str) -> str:
    """The sentence inside an error body, however deep backends wrap it; the body itself when it is not JSON, and of a
    Python program's trace its last line."""
    try:
        return _sentence(orjson.loads(body))
    except (ValueError, TypeError, RecursionError):
        # no JSON, or nested deeper than anybody writes it
        text = body.decode(errors="replace") if isinstance(body, bytes) else body
        return text.strip().rpartition("\n")[2] if text.lstrip().startswith("Traceback ") else text


def _sentence(value: Any) -> str:
    match value:
        case {"error": inner}:
            return _sentence(inner)
        case {"message": inner, "metadata": {"raw": raw}} if raw:
            # OpenRouter quotes the refusal of its provider in `raw`.
            return f"{_sentence(inner)}: {_sentence(raw)}"
        case {"message": inner} | {"detail": inner}:
            return _sentence(inner)
        case [inner, *_]:
            return _sentence(inner)
        case str() if value.lstrip().startswith("{"):
            return error_text(value)
        case str():
            return value
        case _:
            return orjson.dumps(value).decode()


def what(exc: BaseException) -> str:
    """A foreign exception in a few words; some have no text."""
    return str(exc) or type(exc).__name__
