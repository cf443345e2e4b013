"""What `local2 run` starts: one process per participant, each with its environment. Values in, values out."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.cli.launch.child import ChildSpec
from shared.participant.settings import own_prefix

# What the demonstration model server has beside its chat model.
DEMO_EMBEDDING = "all-minilm"
# Those that call a model.
MODEL_USERS = ("generator", "respondent-b", "critic", "memory", "knowledge")
WITH_TOOLS = ("web_search", "web_fetch", "memory", "knowledge")
PARTICIPANTS = (
    "gateway", "generator", "respondent-b", "web_search", "web_fetch", "critic", "reward", "memory", "knowledge", "mcp",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `local2 run`; None leaves a value to the settings. mcp: the settings name MCP servers."""

    data_dir: Path
    api_host: str = "127.0.0.1"
    api_port: int = 8765
    model: str | None = None
    respondent_b: bool = False
    model_b: str | None = None
    temperature_b: float = 0.5
    search: str | None = None
    headless: bool = False
    mcp: bool = False


def python(module: str, *args: str) -> list[str]:
    """The command for a module, tied to the supervisor."""
    return [sys.executable, "-m", "services.cli.launch.parent_death_pipe", module, *args]


def memory_env(models: Mapping[str, str]) -> dict[str, str]:
    """With the demonstration model comes an embedding model; another one could not be had then."""
    return {"LOCAL2_MEMORY_EMBEDDING_MODEL": DEMO_EMBEDDING} if "LOCAL2_DEMO" in models else {}


def participants(options: RunOptions, redis_url: str, models: Mapping[str, str], search: str | None) -> list[ChildSpec]:
    """The participants' processes.

    models: the environment of those that use the demonstration model (`demo_env`). search: web_search's provider.
    """

    def model_of(name: str) -> Mapping[str, str]:
        return models if f"{own_prefix(name)}BACKEND" in models else {}

    common = {
        "LOCAL2_REDIS_URL": redis_url,
        "LOCAL2_DATA_DIR": str(options.data_dir.resolve()),
        "LOCAL2_API_HOST": options.api_host,
        "LOCAL2_API_PORT": str(options.api_port),
        # The log view reads the JSON lines and makes them readable itself.
        "LOCAL2_LOG_FORMAT": "json",
        "PYTHONUNBUFFERED": "1",
    }
    respondent_a = {**common, **model_of("generator"), "LOCAL2_RESPONDENT_ID": "A"}
    memory = {**common, **model_of("memory"), **memory_env(model_of("memory"))}
    knowledge, critic = {**common, **model_of("knowledge")}, {**common, **model_of("critic")}
    if options.model and "LOCAL2_DEMO" not in models:
        respondent_a |= {"LOCAL2_MODEL": options.model, "LOCAL2_GENERATOR_MODEL": options.model}
        # what labels the memories and reads the facts is the respondent's model
        memory |= {"LOCAL2_MODEL": options.model}
        knowledge |= {"LOCAL2_MODEL": options.model}
        # With some backends the generator's model is the judge.
        critic |= {"LOCAL2_GENERATOR_MODEL": options.model}
    # the gateway's own names go before the general ones
    listening = {
        "LOCAL2_GATEWAY_HOST": options.api_host,
        "LOCAL2_GATEWAY_PORT": str(options.api_port),
        "LOCAL2_GATEWAY_EXPECTS": json.dumps(WITH_TOOLS),
    }
    specs = [
        ChildSpec("gateway", python("services.gateway"), {**common, **listening}),
        ChildSpec("generator", python("services.generator"), respondent_a),
        ChildSpec(
            "web_search",
            python("services.web_search"),
            {**common, **({"LOCAL2_WEB_SEARCH_PROVIDER": search} if search else {})},
        ),
        ChildSpec("web_fetch", python("services.web_fetch"), common),
        ChildSpec("critic", python("services.critic"), critic),
        ChildSpec("reward", python("services.reward"), common),
        ChildSpec("memory", python("services.memory"), memory),
        ChildSpec("knowledge", python("services.knowledge"), knowledge),
    ]
    if options.mcp:
        specs.append(ChildSpec("mcp", python("services.mcp"), common))
    if options.respondent_b:
        respondent_b = {
            **common,
            **model_of("respondent-b"),
            "LOCAL2_RESPONDENT_ID": "B",
            "LOCAL2_RESPONDENT_B_TEMPERATURE": str(options.temperature_b),
        }
        model = options.model_b or options.model
        if model and "LOCAL2_DEMO" not in models:
            respondent_b |= {"LOCAL2_MODEL": model, "LOCAL2_RESPONDENT_B_MODEL": model}
        specs.append(ChildSpec("respondent-b", python("services.generator"), respondent_b))
    return specs
