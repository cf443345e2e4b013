"""Settings of memory."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from services.memory.ranking import Weights
from shared.llm.defaults import embedding_model
from shared.llm.preemption import PreemptionSettings
from shared.llm.settings import BackendSettings
from shared.participant.settings import Settings, kept_days


class DocumentSettings(BaseModel):
    """Files and the library of documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk: int = Field(default=800, ge=100, le=8_000, description="Most characters of a piece that a search finds")
    n_results: int = Field(default=5, ge=1, le=50, description="Pieces given to the model")
    max_file_bytes: int = Field(default=20_000_000, ge=1, le=32_000_000, description="Largest file that is taken")
    max_image_bytes: int = Field(default=10_000_000, ge=1, le=32_000_000, description="Largest image that is taken")
    max_image_pixels: int = Field(
        default=50_000_000, ge=1, le=1_000_000_000, description="Most pixels of an image that is taken"
    )
    max_files: int = Field(default=500, ge=1, le=100_000, description="Most files that one user keeps")
    max_total_bytes: int = Field(default=1_000_000_000, ge=1, description="Most bytes of files that one user keeps")
    max_uploads: int = Field(default=8, ge=1, le=1_000, description="Most files of one user that are on their way")


class MemorySettings(BackendSettings, PreemptionSettings):
    """`backend` and its address are those of the embedding model, and of the model that classifies."""

    runtime: ClassVar[frozenset[str]] = Settings.runtime | {
        "top_k", "min_score", "weights", "documents", "classify", "model", "concurrency", "answer_chars",
        "question_chars", "yield_above", "yield_rest", "yield_seconds", "hybrid", "do_rerank", "rerank",
        "rerank_model", "rerank_timeout", "rerank_pool", "log_chars", "keep_days_engrams", "keep_days_notes",
        "keep_days_files",
    }  # fmt: skip

    chroma_path: Path | None = Field(
        default=None, description="Folder of the embedded store; unset: `chroma` in the data folder"
    )
    chroma_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+",
        description="Address of a Chroma server, instead of the embedded store",
    )
    chroma_token: SecretStr | None = Field(default=None, description="Sent to the Chroma server as x-chroma-token")
    collection: str = Field(
        default="local2.memory",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,60}[A-Za-z0-9]$",
        description="What the names of the collections begin with",
    )
    embedding_model: str | None = Field(
        default=None,
        min_length=1,
        description="Model of the vectors; unset: nomic-embed-text, or what Gemini and OpenAI have instead",
    )
    embedding_stand_in: bool = Field(
        default=True,
        description="Where the server has no embeddings, the built-in all-minilm makes them, if it is installed",
    )
    on_model_change: Literal["reembed", "refuse"] = Field(
        default="reembed", description="What happens to engrams whose vectors are another model's"
    )
    top_k: int = Field(default=5, ge=1, le=50, description="Memories given to the model, where it names no n_results")
    hybrid: bool = Field(default=True, description="Whether a search goes by words too, and not by vectors alone")
    do_rerank: bool = Field(
        default=False, description="Whether searches are reranked that do not say (the committee's always are)"
    )
    rerank: Literal["none", "model", "cross-encoder"] = Field(
        default="model", description="Who reranks where it is asked for: the chat model, or the server at rerank_url"
    )
    rerank_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+",
        description="Address of a /rerank as llama.cpp, vLLM, TEI and Jina have it, such as http://host:8012/v1/rerank",
    )
    rerank_model: str = Field(default="", max_length=200, description="Model named to that server; empty: none")
    rerank_key: SecretStr | None = Field(default=None, description="Sent to that server as a bearer token")
    rerank_timeout: float = Field(
        default=8.0, gt=0, le=600, description="Seconds after which a search goes on without having been reranked"
    )
    rerank_pool: int = Field(default=20, ge=1, le=50, description="Memories from which a reranker chooses, at least")
    min_score: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Least cosine similarity of a relevant memory; unset: what suits the embedding model (mostly 0.3)",
    )
    weights: Weights = Field(default=Weights(), description="How ratings, words and age are weighted")
    documents: DocumentSettings = Field(
        default=DocumentSettings(), description="Files and the library of documents: sizes, numbers, pieces"
    )
    files_host: str = Field(
        default="127.0.0.1", min_length=1, description="Address on which other participants bring and fetch files"
    )
    files_port: int = Field(default=0, ge=0, le=65_535, description="Port of that address; 0 takes a free one")
    files_address: str | None = Field(
        default=None,
        pattern=r"^[^\s/]+$",
        description="host:port by which others find it; unset: files_host, or this host's address on the way to Redis",
    )
    files_bucket: str | None = Field(
        default=None,
        pattern=r"^s3://[^\s/]+(/\S*)?$",
        description="s3://bucket/prefix that keeps the bytes of files, instead of the data folder (docs/files.md)",
    )
    files_endpoint: str | None = Field(
        default=None, pattern=r"^https?://[^\s/]+", description="Address of its server, where it is not Amazon's"
    )
    files_region: str | None = Field(
        default=None, min_length=1, max_length=100, description="Its region, if it has one"
    )
    files_key_id: SecretStr | None = Field(default=None, description="Key for it; unset: as Amazon's tools find theirs")
    files_secret: SecretStr | None = Field(default=None, description="Secret of that key")
    question_chars: int = Field(default=300, ge=40, le=10_000, description="Of a recalled question")
    answer_chars: int = Field(default=800, ge=40, le=10_000, description="Of a recalled answer")
    log_chars: int = Field(
        default=8_000, ge=200, le=100_000, description="Most characters of the conversations round the hits (log: true)"
    )
    classify: Literal["auto", "model", "rules", "off"] = Field(
        default="auto",
        description="Who names intent and entities; auto: the model, unless it is the demonstration model",
    )
    model: str = Field(default="gemma4:e4b", min_length=1, description="Model that classifies")
    classify_timeout: float = Field(default=30.0, gt=0, le=600, description="Seconds for one classification")
    embed_batch: int = Field(default=32, ge=1, le=512, description="Most texts of one embedding call")
    ingest_limit: int = Field(default=64, ge=1, le=1_000, description="Responses taken into memory at the same time")
    concurrency: int = Field(default=96, ge=2, description="Messages handled at the same time by one replica")
    pending_days: float = Field(
        default=7.0, gt=0, le=365, description="How long a grade or rating waits for an engram that is not there yet"
    )
    forget_days: float = Field(
        default=30.0, gt=0, le=3650, description="How long what was deleted is kept from coming back by a late message"
    )
    erase_after: float = Field(
        default=2.0,
        ge=0,
        le=3600,
        description="Seconds from a deletion until its words leave the keyword files, while no question is answered",
    )
    keep_days_engrams: int = kept_days("Engrams of answers are removed so many days after they were given")
    keep_days_notes: int = kept_days("What somebody had remembered, notes and topics, is removed after so many days")
    keep_days_files: int = kept_days("Files are removed so many days after they came")
    demo: bool = Field(default=False, description="Set by `local2 run` when the demonstration model answers")

    @property
    def embedder(self) -> str:
        """The name of the embedding model."""
        return self.embedding_model or embedding_model(self.backend, self.base_url)

    @property
    def library(self) -> Path:
        """Folder of all users' files and documents."""
        return (self.data_dir / "documents").absolute()

    @property
    def folder(self) -> Path:
        """Of the embedded store."""
        return (self.chroma_path or self.data_dir / "chroma").absolute()

    @property
    def words(self) -> Path:
        """Of the keyword index, beside the embedded store."""
        return self.folder.with_name(f"{self.folder.name}-words")
