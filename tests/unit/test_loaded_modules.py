"""What a participant loads at its start: its idle memory is little else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What only some processes need, or only at some moment: each costs megabytes in every process that loads it.
HEAVY = {
    "rich", "pygments", "click", "jsonschema", "numpy", "prometheus_client", "chromadb", "trafilatura", "google.genai",
    "ladybug", "neo4j", "grpc", "ollama", "openai", "mcp", "mcp_types", "psutil", "opentelemetry.sdk",
    "opentelemetry.exporter", "shared.telemetry.tracing_sdk",
}  # fmt: skip
NEEDED = {
    "gateway": {"prometheus_client", "click"},
    "memory": {"numpy", "click"},
}


# What those need that ask models or read a file of settings: a gateway does neither at its start.
FOR_MODELS = {"httpx", "yaml", "shared.llm.adapter"}
WITHOUT = ("gateway", "reward")


@pytest.mark.parametrize(
    "participant", ["gateway", "generator", "web_search", "web_fetch", "critic", "reward", "memory", "knowledge"]
)
def test_a_participant_loads_no_more_than_it_needs(participant: str) -> None:
    program = f"import sys, services.{participant}.service; print(*sys.modules); import httpx; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    itself, with_httpx = (set(line.split()) for line in done.stdout.splitlines())
    assert HEAVY & with_httpx <= NEEDED.get(participant, set())
    assert participant not in WITHOUT or not FOR_MODELS & itself
