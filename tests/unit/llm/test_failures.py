"""Foreign errors become ours by what they say; what cannot be told apart stays a plain model error."""

from __future__ import annotations

import pytest

from shared.llm.failures import ThinkingUnsupported, ToolsUnsupported, error_text, failure
from shared.llm.port import (
    AccessRefused,
    ContextOverflow,
    ModelError,
    ModelMissing,
    ModelOverloaded,
    ModelUnavailable,
    NotOffered,
    StreamInterrupted,
)


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (404, "model 'gemma4:e4b' not found", ModelMissing),
        (404, 'model "gemma4" not found, try pulling it first', ModelMissing),
        (404, "The model `Qwen/Qwen3-8B` does not exist.", ModelMissing),
        (404, "models/gemini-9 is not found for API version v1beta", ModelMissing),
        (404, "Not Found", NotOffered),
        (501, "This server does not support embeddings. Start it with `--embeddings`", NotOffered),
        (500, "this model does not support embeddings", NotOffered),
        (None, "pull model manifest: file does not exist", ModelError),
        (400, "registry.ollama.ai/library/x does not support tools", ToolsUnsupported),
        (400, '"x" does not support thinking', ThinkingUnsupported),
        (400, "Budget 0 is invalid. This model only works in thinking mode.", ThinkingUnsupported),
        (500, "reasoning_effort parser crashed", ModelError),
        (None, "server busy, please try again", ModelOverloaded),
        (503, "", ModelOverloaded),
        (504, "upstream timed out", ModelUnavailable),
        (400, "the input length exceeds the context length", ContextOverflow),
        (400, "The input token count (200000) exceeds the maximum number of tokens allowed", ContextOverflow),
        (None, "model requires more system memory (9.6 GiB) than is available (4.0 GiB)", ModelError),
        (403, "forbidden", AccessRefused),
        (None, "an error was encountered while running the model: unexpected EOF", StreamInterrupted),
        (500, "llama runner process has terminated: signal: killed", StreamInterrupted),
        (500, "llama runner process no longer running: 2", StreamInterrupted),
        (500, "model runner has unexpectedly stopped, this may be due to resource limitations", StreamInterrupted),
        (500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", StreamInterrupted),
    ],
)
def test_an_error_is_told_by_its_status_and_text(status: int | None, text: str, expected: type[ModelError]) -> None:
    assert type(failure(status, text, "get it")) is expected


STALE = (
    "an error was encountered while running the model: error: task id = 0, error: request (9011 tokens) exceeds the "
    "available context size (8192 tokens), try increasing it"
)


@pytest.mark.parametrize("status", [None, 500])
def test_what_a_crashed_model_quotes_of_its_log_is_not_about_this_prompt(status: int | None) -> None:
    crashed = failure(status, STALE, "get it")
    assert type(crashed) is StreamInterrupted
    assert "crashed" in str(crashed)
    assert "9011" not in str(crashed)
    # what may be about the crash is told
    assert "out of memory" in str(failure(status, "llama runner process has terminated: out of memory", ""))


def test_a_403_without_a_word_is_about_the_address_and_not_about_a_key() -> None:
    refused = str(failure(403, " ", "get it"))
    assert "OLLAMA_HOST=0.0.0.0" in refused
    assert "key" not in refused
    assert "key" in str(failure(403, "invalid api key", "get it"))
    assert "key" in str(failure(401, "", "get it"))


def test_a_missing_model_comes_with_what_to_do() -> None:
    assert str(failure(404, "model 'x' not found", "ollama pull x")) == "ollama pull x"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error": "plain"}', "plain"),
        (b'{"error": {"message": "nested", "code": 400}}', "nested"),
        (b'{"error": "{\\"error\\": {\\"code\\": 400, \\"message\\": \\"text in text\\"}}"}', "text in text"),
        (b'[{"error": {"message": "in a list"}}]', "in a list"),
        (b'{"detail": "of a proxy"}', "of a proxy"),
        (
            b'{"error": {"message": "Provider returned error", "code": 400, "metadata": {"raw": "{\\"error\\": '
            b'{\\"message\\": \\"it is wrong\\"}}", "provider_name": "x"}}}',
            "Provider returned error: it is wrong",
        ),
        (b'{"error": {"message": "busy", "metadata": {"raw": ""}}}', "busy"),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b'{"other": 1}', '{"other":1}'),
        (b'{"error": "{broken"}', "{broken"),
    ],
)
def test_the_sentence_is_found_however_deep_it_is_wrapped(body: bytes, expected: str) -> None:
    assert error_text(body) == expected
