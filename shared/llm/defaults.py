"""What a backend is asked for where nobody has named a model."""

from __future__ import annotations

from urllib.parse import urlsplit

_EMBEDDING = {"google_genai": "gemini-embedding-001"}
_OPENAI = "api.openai.com"


def embedding_model(backend: str, base_url: str | None = None) -> str:
    """The embedding model's name. Servers that run one model take any name; others say that they do not have it."""
    if backend == "openai" and urlsplit(base_url or "").hostname == _OPENAI:
        return "text-embedding-3-small"
    return _EMBEDDING.get(backend, "nomic-embed-text")
