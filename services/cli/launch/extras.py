"""The optional packages that the settings ask for: `python -m services.cli.launch.extras` prints the missing ones."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from services.cli.launch.plan import MODEL_USERS, PARTICIPANTS
from services.cli.settings import ExtrasConfig, KnowledgeConfig, ModelConfig

# A module of each extra that nothing else installs.
_MODULES = {
    "bucket": "obstore",
    "google-genai": "google.genai",
    "knowledge-bolt": "neo4j",
    "ladybug": "ladybug",
    "observability": "opentelemetry.exporter.otlp.proto.http",
}


def _wanted() -> Iterator[str]:
    for name in PARTICIPANTS:
        config = ExtrasConfig.load(name)
        if config.otlp_endpoint:
            yield "observability"
        if name == "memory" and config.files_bucket:
            yield "bucket"
    knowledge = KnowledgeConfig.load("knowledge")
    if knowledge.on_server:
        yield "knowledge-bolt"
    elif knowledge.old_path.exists():
        yield "ladybug"
    if any(ModelConfig.load(name).backend == "google_genai" for name in MODEL_USERS):
        yield "google-genai"


def missing_extras() -> list[str]:
    """Return the extras that settings ask for and that are not installed. Raises SettingsError."""
    return [extra for extra in sorted(set(_wanted())) if not _installed(_MODULES[extra])]


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # a parent package is missing
        return False


if __name__ == "__main__":
    print(*missing_extras())
