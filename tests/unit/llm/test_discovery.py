"""What model servers say of their models, in their own words, and what is made of it."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import ModelError
from shared.llm.discovery import (
    Discovered,
    ModelFacts,
    of_ollama,
    of_openai,
    prompt_of,
    same_model,
    window_of,
)
from shared.llm.failures import failure
from shared.llm.port import ContextOverflow

# Refusals as the servers word them: window and length of the prompt, where they tell.
REFUSALS: list[tuple[str, str, int | None, int | None]] = [
    (
        "Ollama 0.32",
        '{"error":{"code":400,"message":"request (3031 tokens) exceeds the available context size (2048 tokens), try '
        'increasing it","type":"exceed_context_size_error","n_prompt_tokens":3031,"n_ctx":2048}}',
        2048,
        3031,
    ),
    ("llama.cpp", "request (9011 tokens) exceeds the available context size (8192 tokens), try increasing it", 8192,
     9011),
    (
        "vLLM",
        "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens (808 in the messages, "
        "8192 in the completion). Please reduce the length of the messages or completion.",
        4096,
        808,
    ),
    (
        "vLLM, newer",
        "'max_tokens' or 'max_completion_tokens' is too large: 8192. This model's maximum context length is 4096 tokens"
        " and your request has 100 input tokens (8192 > 4096 - 100).",
        4096,
        100,
    ),
    ("vLLM, the prompt alone", "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
     4096, 5000),
    (
        "SGLang",
        "Requested token count exceeds the model's maximum context length of 32768 tokens. You requested a total of "
        "40000 tokens: 31808 tokens from the input messages and 8192 tokens for the completion.",
        32768,
        31808,
    ),
    ("SGLang, the prompt alone", "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
     4096, 5000),
    (
        "OpenAI",
        "This model's maximum context length is 128,000 tokens. However, your messages resulted in 130,512 tokens.",
        128_000,
        130_512,
    ),
    ("Gemini", "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).", 1_048_576,
     1_200_000),
    (
        "LM Studio",
        "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with context "
        "length of only 4096 tokens, which is not enough.",
        4096,
        5000,
    ),
    ("Anthropic", "prompt is too long: 210000 tokens > 200000 maximum", 200_000, 210_000),
    ("Ollama's embeddings", "the input length exceeds the context length", None, None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "window", "prompt"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_a_refusal_says_how_long_window_and_prompt_are(text: str, window: int | None, prompt: int | None) -> None:
    assert (window_of(text), prompt_of(text)) == (window, prompt)
    refused = failure(400, text, "no such model")
    assert isinstance(refused, ContextOverflow)
    assert (refused.window, refused.prompt) == (window, prompt)


def shown(**more: Any) -> dict[str, Any]:
    info = {"general.architecture": "qwen2", "qwen2.context_length": 32768}
    return {"model_info": info, "parameters": "", "capabilities": ["completion", "tools"], **more}


def test_ollama_clamps_to_what_the_model_was_made_for() -> None:
    facts = of_ollama(shown(), [], "qwen")
    assert facts == ModelFacts("Ollama", window=32768, abilities=frozenset({"chat", "tools"}))
    assert (facts.context(32_000), facts.context(64_000)) == (32_000, 32_768)


def test_ollama_says_with_which_context_a_model_is_loaded_under_either_of_its_names() -> None:
    loaded = [{"model": "other:latest", "context_length": 1024}, {"model": "qwen:latest", "context_length": 2048}]
    assert of_ollama(shown(), loaded, "qwen").loaded == 2048
    # another program may have loaded it so: what is asked for next decides
    assert of_ollama(shown(), loaded, "qwen").window == 32768
    # nothing else is known
    assert of_ollama({"capabilities": None}, loaded, "qwen:latest") == ModelFacts("Ollama", window=2048, loaded=2048)


@pytest.mark.parametrize(
    ("entry", "share"),
    [
        ({"size": 10, "size_vram": 10}, 1.0),
        ({"size": 10, "size_vram": 4}, 0.4),
        ({"size": 10, "size_vram": 0}, 0.0),
        ({"size": 10}, 0.0),
        ({"size": 10, "size_vram": "much"}, 0.0),
        # a server that counts otherwise than we think
        ({"size": 10, "size_vram": 11}, 1.0),
        ({"size_vram": 4}, None),
        ({}, None),
    ],
)
def test_ollama_says_how_much_of_a_loaded_model_lies_in_gpu_memory(entry: dict[str, Any], share: float | None) -> None:
    loaded = [{"model": "other:latest", "size": 10, "size_vram": 7}, {"model": "qwen:latest", **entry}]
    assert of_ollama(shown(), loaded, "qwen").on_gpu == share
    assert of_ollama(shown(), [], "qwen").on_gpu is None


def test_a_context_that_the_models_author_set_is_found() -> None:
    found = of_ollama(shown(parameters='stop           "[/INST]"\nnum_ctx                        8192'), [], "judge")
    assert found.preset == 8192


@pytest.mark.parametrize(
    ("entry", "window", "server"),
    [
        ({"id": "m", "owned_by": "vllm", "max_model_len": 4096}, 4096, "vLLM"),
        ({"id": "m", "owned_by": "sglang", "max_model_len": 32768}, 32768, "SGLang"),
        ({"id": "m", "loaded_context_length": 4096, "max_context_length": 131072}, 4096, ""),
        ({"id": "m", "context_length": 131072}, 131072, ""),
        ({"id": "m", "owned_by": "groq", "context_window": 131072}, 131072, ""),
        ({"id": "gpt", "owned_by": "openai"}, None, ""),
        ({"id": "m", "max_model_len": "long"}, None, ""),
        ({"id": "m", "max_model_len": True}, None, ""),
        ({"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx": 2048, "n_ctx_train": 8192}}, 2048, "llama.cpp"),
        ({"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx_train": 8192}}, 8192, "llama.cpp"),
        ({"id": "m", "owned_by": "llamacpp", "meta": None}, None, "llama.cpp"),
    ],
)
def test_windows_are_found_where_servers_name_them(entry: dict[str, Any], window: int | None, server: str) -> None:
    facts = of_openai(entry)
    assert (facts.window, facts.server) == (window, server)


def test_llama_cpp_says_what_one_slot_has_and_how_many_there_are() -> None:
    entry = {"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx": 8192, "n_ctx_train": 32768}}
    props = {
        "default_generation_settings": {"n_ctx": 2048},
        "total_slots": 4,
        "modalities": {"vision": True, "audio": False},
        "chat_template_caps": {"supports_tool_calls": True, "supports_tools": True},
    }
    facts = of_openai(entry, props)
    assert facts == ModelFacts(
        "llama.cpp", window=2048, loaded=2048, slots=4, abilities=frozenset({"chat", "tools", "vision"})
    )
    # as the console has it
    assert facts.shown() == {
        "server": "llama.cpp", "window": 2048, "loaded": 2048, "slots": 4, "abilities": ["chat", "tools", "vision"]
    }  # fmt: skip


def test_a_model_has_two_names_at_ollama() -> None:
    assert same_model("qwen:latest", "qwen")
    assert same_model("qwen", "qwen:latest")
    assert not same_model("qwen:7b", "qwen")
    assert not same_model(None, "qwen")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Server:
    def __init__(self) -> None:
        self.asked = 0
        self.says: ModelFacts | ModelError = ModelFacts(window=32_768)

    async def __call__(self, model: str) -> ModelFacts:
        self.asked += 1
        if isinstance(self.says, ModelError):
            raise self.says
        return self.says


async def test_of_a_model_that_is_not_loaded_yet_a_server_is_asked_again_soon() -> None:
    clock, server = Clock(), Server()
    discovered = Discovered(server, clock)
    server.says = ModelFacts("Ollama", window=2048)
    await discovered.facts("m")
    server.says = ModelFacts("Ollama", window=2048, loaded=2048, on_gpu=0.5)
    clock.now += 29
    assert (await discovered.facts("m")).on_gpu is None
    clock.now += 1
    assert (await discovered.facts("m")).on_gpu == 0.5
    clock.now += 299
    await discovered.facts("m")
    assert server.asked == 2


async def test_a_server_is_asked_once_in_a_while() -> None:
    clock, server = Clock(), Server()
    discovered = Discovered(server, clock)
    assert (await discovered.facts("m")).window == 32_768
    server.says = ModelFacts(window=4096)
    assert (await discovered.facts("m")).window == 32_768
    assert server.asked == 1
    clock.now += 300
    assert (await discovered.facts("m")).window == 4096
    # whoever looks at its health learns the same
    server.says = ModelFacts(window=2048)
    await discovered.renewed("m")
    assert (await discovered.facts("m")).window == 2048
    assert server.asked == 3


async def test_of_a_server_that_cannot_be_asked_the_last_word_counts() -> None:
    clock, server = Clock(), Server()
    discovered = Discovered(server, clock)
    server.says = ModelError("away")
    assert await discovered.facts("m") == ModelFacts()
    assert await discovered.facts("m") == ModelFacts()
    assert server.asked == 1, "a server that does not answer is not asked before every call"
    with pytest.raises(ModelError, match="away"):
        await discovered.renewed("m")
    server.says = ModelFacts(window=32_768)
    clock.now += 10
    assert (await discovered.facts("m")).window == 32_768
    server.says = ModelError("away")
    clock.now += 300
    assert (await discovered.facts("m")).window == 32_768


async def test_what_a_refusal_taught_counts_over_what_the_server_says() -> None:
    clock, server = Clock(), Server()
    discovered = Discovered(server, clock)
    discovered.learn("m", 8192)
    assert (await discovered.facts("m")).window == 8192
    assert (await discovered.facts("n")).window == 32_768
    server.says = ModelFacts(window=4096)
    assert (await discovered.renewed("m")).window == 4096
    clock.now += 300
    server.says = ModelFacts(window=32_768)
    assert (await discovered.facts("m")).window == 32_768
