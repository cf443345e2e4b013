"""The two models that are here, as Ollama describes models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ModelError

# The newest server version whose protocol this one follows.
VERSION = "0.33.0"
_RELEASED = "2024-11-01T00:00:00Z"
_ABOUT = (
    "A demonstration model: it proves that the stack works, it is not a good model. "
    "Its tools are chosen by example phrasings, not by the model; "
    "short results of tools are passed on as they are."
)


class NotFound(ModelError):
    """There is no model of this name."""


@dataclass(frozen=True, slots=True)
class Card:
    """One model. `name` has no tag; both forms are accepted."""

    name: str
    digest: str
    size: int
    capabilities: tuple[str, ...]
    details: Mapping[str, Any]
    info: Mapping[str, Any]
    context: int

    @property
    def tagged(self) -> str:
        return f"{self.name}:latest"

    def tag(self) -> dict[str, Any]:
        """An entry of /api/tags."""
        return {
            "name": self.tagged, "model": self.tagged, "modified_at": _RELEASED, "size": self.size,
            "digest": self.digest, "details": dict(self.details),
        }  # fmt: skip

    def loaded(self) -> dict[str, Any]:
        """An entry of /api/ps: it stays loaded as long as the process runs."""
        entry = {key: value for key, value in self.tag().items() if key != "modified_at"}
        return {**entry, "expires_at": "2318-01-01T00:00:00Z", "size_vram": 0, "context_length": self.context}

    def shown(self) -> dict[str, Any]:
        """The answer of /api/show."""
        return {
            "license": "Apache License 2.0",
            "modelfile": f"# {_ABOUT}\nFROM {self.tagged}\n",
            "parameters": "temperature 0",
            "template": "{{ .Prompt }}",
            "system": _ABOUT,
            "details": dict(self.details),
            "model_info": dict(self.info),
            "capabilities": list(self.capabilities),
            "modified_at": _RELEASED,
        }


CHAT = Card(
    name="smollm2-135m-demo",
    digest="sha256:demonstration-smollm2-135m-instruct-q4_1",
    size=98_362_432,
    capabilities=("completion", "tools"),
    details={
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"],
        "parameter_size": "134.52M", "quantization_level": "Q4_1",
    },
    info={
        "general.architecture": "llama", "general.basename": "SmolLM2", "general.size_label": "135M",
        "general.description": _ABOUT, "general.parameter_count": 134_515_008, "llama.context_length": 2048,
    },
    context=2048,
)  # fmt: skip

EMBEDDING = Card(
    name="all-minilm",
    digest="sha256:8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    size=22_928_619,
    capabilities=("embedding",),
    details={
        "parent_model": "", "format": "onnx", "family": "bert", "families": ["bert"],
        "parameter_size": "22.7M", "quantization_level": "INT8",
    },
    info={
        "general.architecture": "bert", "general.basename": "all-MiniLM-L6-v2", "general.parameter_count": 22_713_216,
        "bert.context_length": 256, "bert.embedding_length": 384,
    },
    context=256,
)  # fmt: skip

CARDS = (CHAT, EMBEDDING)


def find(name: str) -> Card:
    """The model of that name, with or without `:latest`. Raises NotFound with Ollama's sentence."""
    for card in CARDS:
        if name in (card.name, card.tagged):
            return card
    raise NotFound(f"model '{name}' not found")
