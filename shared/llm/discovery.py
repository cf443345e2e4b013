"""What a model server says of its models: how much they read, how many answers it writes at once, what they can do.

Every server says a part of it in a place of its own; the adapters ask there, and here their answers are read and kept.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.errors import ModelError

Ask = Callable[[str], Awaitable["ModelFacts"]]

# How long an answer counts: a server may be started again with another window, a model pulled with another template.
_FRESH_SECONDS = 300.0
# Of a model that is not loaded yet, less is known than will be.
_UNLOADED_SECONDS = 30.0
# After a look that failed the server is left alone for so long.
_FAILED_SECONDS = 10.0

_OLLAMA = "Ollama"

# As servers call them, and as we do. What a model answers in (`completion`) is no ability of its own.
_ABILITIES = {"tools": "tools", "thinking": "thinking", "vision": "vision", "embedding": "embeddings",
              "embeddings": "embeddings", "completion": "chat"}  # fmt: skip

# Where OpenAI-compatible servers name the window in an entry of `/v1/models`: vLLM and SGLang; LM Studio as the model
# is loaded, then at most; OpenRouter and LiteLLM; Groq.
_WINDOWS = ("max_model_len", "loaded_context_length", "max_context_length", "context_length", "context_window")

# No server has more tokens or slots; what says so is no number of them.
_MOST = 10**12
_N = r"(\d[\d,]*)"
_OF_WINDOW = re.compile(
    rf'"?n_ctx"?\s*[:=]\s*{_N}'  # llama.cpp's details
    rf"|context (?:size|length|window) ?(?:is|of)? ?(?:only )?\(?{_N}"  # llama.cpp, vLLM, SGLang, OpenAI, LM Studio
    rf"|maximum model length of {_N}|tokens allowed \({_N}|tokens > {_N} maximum",  # vLLM; Gemini; Anthropic
    re.IGNORECASE,
)
_OF_PROMPT = re.compile(
    rf'"?n_prompt_tokens"?\s*[:=]\s*{_N}|request \({_N} tokens\)'  # llama.cpp and Ollama
    rf"|{_N} in the messages|resulted in {_N} tokens|{_N} input tokens|prompt \(length {_N}\)"  # OpenAI, vLLM
    rf"|{_N} tokens from the input|input \({_N} tokens\)"  # SGLang
    rf"|input token count \({_N}\)|first {_N} tokens|too long: {_N} tokens",  # Gemini; LM Studio; Anthropic
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of one model at one server; None and "": the server does not say.

    server: the program, as its users call it. window: tokens that a prompt and its answer may have together, whatever
    is asked for. preset: the context that the model's author gave it (Ollama's `PARAMETER num_ctx`). loaded: the
    context with which it is in memory now. slots: answers that are written at the same time. abilities: of chat, tools,
    thinking, vision and embeddings. on_gpu: the part of a loaded model that lies in GPU memory, 0 to 1.
    """

    server: str = ""
    window: int | None = None
    preset: int | None = None
    loaded: int | None = None
    slots: int | None = None
    abilities: frozenset[str] | None = None
    on_gpu: float | None = None

    def context(self, wanted: int) -> int:
        """Tokens to plan with, when `wanted` are asked for."""
        return wanted if self.window is None else min(wanted, self.window)

    def shown(self) -> dict[str, Any]:
        """As JSON has it, without what is not known."""
        values = {
            "server": self.server or None,
            "window": self.window,
            "preset": self.preset,
            "loaded": self.loaded,
            "slots": self.slots,
            "abilities": None if self.abilities is None else sorted(self.abilities),
            "on_gpu": self.on_gpu,
        }
        return {name: value for name, value in values.items() if value is not None}


_UNKNOWN = ModelFacts(), 0.0


class Discovered:
    """The facts of one server's models, asked for once in a while; what an error has taught counts over what the server
    says. `clock`: seconds that only go forward."""

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._known: dict[str, tuple[ModelFacts, float]] = {}
        self._learned: dict[str, tuple[int, float]] = {}

    async def facts(self, model: str) -> ModelFacts:
        """What is known, asked for when that is too old. Never fails: of a server that cannot be asked, the last word
        counts."""
        known, until = self._known.get(model, _UNKNOWN)
        if self._clock() >= until:
            try:
                known = await self.renewed(model)
            except ModelError:
                self._known[model] = (known, self._clock() + _FAILED_SECONDS)
        return self._taught(model, known)

    async def renewed(self, model: str) -> ModelFacts:
        """What the server says now. Raises ModelError."""
        found = await self._ask(model)
        unloaded = found.server == _OLLAMA and found.loaded is None
        self._known[model] = (found, self._clock() + (_UNLOADED_SECONDS if unloaded else _FRESH_SECONDS))
        return self._taught(model, found)

    def learn(self, model: str, window: int) -> None:
        """A request was refused because the model's window is this."""
        self._learned[model] = (window, self._clock() + _FRESH_SECONDS)

    def _taught(self, model: str, facts: ModelFacts) -> ModelFacts:
        window, until = self._learned.get(model, (0, 0.0))
        return replace(facts, window=facts.context(window)) if self._clock() < until else facts


def of_ollama(shown: Mapping[str, Any], loaded: Sequence[Mapping[str, Any]], model: str) -> ModelFacts:
    """From `/api/show` and the models of `/api/ps`. A context above the one that the model was made for is clamped by
    the server without a word; how many requests it takes at once it does not tell."""
    mine = next((one for one in loaded if same_model(one.get("model"), model)), {})
    running = _count(mine.get("context_length"))
    info = shown.get("model_info")
    info = info if isinstance(info, Mapping) else {}
    architecture = info.get("general.architecture")
    trained = _count(info.get(f"{architecture}.context_length"))
    preset = re.search(r"^\s*num_ctx\s+(\d+)\s*$", str(shown.get("parameters") or ""), re.MULTILINE)
    return ModelFacts(
        server=_OLLAMA,
        # a model that does not say what it was made for runs with what it was loaded with
        window=running if trained is None else trained,
        preset=_read(preset[1]) if preset else None,
        loaded=running,
        abilities=_abilities(shown.get("capabilities")),
        on_gpu=_share(mine.get("size_vram"), mine.get("size")),
    )


def of_openai(entry: Mapping[str, Any], props: Mapping[str, Any] | None = None) -> ModelFacts:
    """From a model's entry in `/v1/models`, and llama.cpp's `/props`, which may be switched off."""
    if is_llama(entry):
        return _of_llama(entry, props or {})
    stated = (_count(entry.get(name)) for name in _WINDOWS)
    return ModelFacts(
        server={"vllm": "vLLM", "sglang": "SGLang"}.get(str(entry.get("owned_by")), ""),
        window=next((window for window in stated if window is not None), None),
        abilities=_abilities(entry.get("capabilities")),
    )


def _of_llama(entry: Mapping[str, Any], props: Mapping[str, Any]) -> ModelFacts:
    meta, settings = entry.get("meta"), props.get("default_generation_settings")
    meta = meta if isinstance(meta, Mapping) else {}
    # of one slot: the server divides what it was started with
    running = _count(settings.get("n_ctx")) if isinstance(settings, Mapping) else None
    running = running or _count(meta.get("n_ctx"))
    template, modalities = props.get("chat_template_caps"), props.get("modalities")
    abilities = None
    if isinstance(template, Mapping):
        can = {"chat"}
        can |= {"tools"} if template.get("supports_tool_calls") or template.get("supports_tools") else set()
        can |= {"vision"} if isinstance(modalities, Mapping) and modalities.get("vision") else set()
        abilities = frozenset(can)
    return ModelFacts(
        server="llama.cpp",
        window=running or _count(meta.get("n_ctx_train")),
        loaded=running,
        slots=_count(props.get("total_slots")),
        abilities=abilities,
    )


def is_llama(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of `/v1/models` is llama.cpp's."""
    return entry.get("owned_by") == "llamacpp"


def same_model(name: Any, wanted: str) -> bool:
    """Whether both are names of one model: Ollama lists all with a tag, and takes them without."""
    return name in (wanted, f"{wanted}:latest") or f"{name}:latest" == wanted


def window_of(text: str) -> int | None:
    """The window that a refusal names, in tokens."""
    return _found(_OF_WINDOW, text)


def prompt_of(text: str) -> int | None:
    """The length of the prompt that a refusal names, in tokens."""
    return _found(_OF_PROMPT, text)


def _found(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return _read(match[match.lastindex].replace(",", "")) if match and match.lastindex else None


def _read(digits: str) -> int | None:
    return int(digits) if len(digits) <= len(str(_MOST)) else None


def tokens_of(value: Any) -> int | None:
    """A number of tokens as a server gives it; None when it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST else None


def _count(value: Any) -> int | None:
    """A number of tokens or slots; 0 means that nobody has set one."""
    return tokens_of(value) or None


def _share(part: Any, whole: Any) -> float | None:
    """How much of the whole a part is; Ollama leaves a 0 out in places."""
    size = _count(whole)
    return None if size is None else min((_count(part) or 0) / size, 1.0)


def _abilities(value: Any) -> frozenset[str] | None:
    if not isinstance(value, list):
        return None
    return frozenset(_ABILITIES[name] for name in map(str, value) if name in _ABILITIES)
