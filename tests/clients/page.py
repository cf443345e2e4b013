"""The clients that are tried, and what docs/clients.md says of them. Values in, text out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "clients.md"
BEGIN, END = "<!-- make test-clients ARGS=--write: from here -->", "<!-- to here -->"
# The columns of the table. A script says something of each, and may try more.
FEATURES = (
    "chat", "stream", "usage", "reasoning", "abort", "wrong key", "tools", "structured", "Responses",
    "mid-stream error",
)  # fmt: skip
WORKS, NOT_OFFERED, FAILS = "✓", "–", "✗"


@dataclass(frozen=True, slots=True)
class Client:
    """packages: what is installed, with versions; the first names the client. sets: what its user sets."""

    name: str
    packages: Sequence[str]
    sets: str
    kind: str = "python"

    @property
    def names(self) -> list[str]:
        return [re.split(r"==|(?<=.)@", one)[0] for one in self.packages]

    @property
    def version(self) -> str:
        return re.split(r"==|(?<=.)@", self.packages[0])[1]

    @property
    def script(self) -> Path:
        return HERE / (f"{self.name}_client.py" if self.kind == "python" else f"{self.name}.mjs")

    @property
    def snippet(self) -> str:
        """The part of its script that the page shows."""
        found = re.search(r"^(?:#|//) docs: begin\n(.*?)^(?:#|//) docs: end$", self.script.read_text(), re.M | re.S)
        assert found is not None, f"{self.script.name} has no part for the page"
        return re.sub(r"  # isort: skip$", "", found[1], flags=re.MULTILINE).rstrip()


_BOTH = "Both variables, and the model's name."
CLIENTS = (
    Client("openai", ["openai==3.54.0"], _BOTH),
    Client("openai_node", ["openai@6.49.0", "zod@4.6.7"], _BOTH, "node"),
    Client("pydantic_ai", ["pydantic-ai-slim[openai]==2.68.0"], "Both variables, and `openai:local2` as the model."),
    Client("langchain", ["langchain-openai==1.7.3"], _BOTH),
    Client(
        "langchain_node",
        ["@langchain/openai@1.5.8", "@langchain/core@1.4.0", "zod@4.6.7"],
        "The key as a variable; the address stands in the code.",
        "node",
    ),
    Client("openai_agents", ["openai-agents==0.24.0"], f"{_BOTH} Its traces go to OpenAI unless that is switched off."),
    Client(
        "openai_agents_node",
        ["@openai/agents@0.20.0", "zod@4.6.7"],
        f"{_BOTH} Its traces go to OpenAI unless that is switched off.",
        "node",
    ),
    Client(
        "ai_sdk",
        ["ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7"],
        "The two variables are handed to either provider.",
        "node",
    ),
    Client(
        "litellm",
        ["litellm==1.106.2", "mcp"],
        "Both variables, and `openai/local2` as the model. Its tools and Responses need `mcp` installed beside it.",
    ),
    Client("instructor", ["instructor==1.17.0"], _BOTH),
    Client("smolagents", ["smolagents[openai]==1.26.0"], _BOTH),
    Client("llm", ["llm==0.36"], "A file with the address (`{url}`), and the key under a name of its own."),
    Client(
        "codex", ["@openai/codex@0.169.0"], "The key as a variable; the address stands in its configuration.", "node"
    ),
    Client("aider", ["aider-chat==0.86.2"], "The key as a variable; the address as an option."),
)


@dataclass(slots=True)
class Outcome:
    """What came of one client. tried: (feature, way) → what was wrong, or nothing. missing: why it was not run."""

    client: Client
    tried: dict[tuple[str, str], str] = field(default_factory=dict)
    not_offered: dict[str, str] = field(default_factory=dict)
    missing: str = ""

    def silent(self) -> list[str]:
        """Features that its script says nothing of."""
        spoken = {feature for feature, _ in self.tried} | set(self.not_offered)
        return [feature for feature in FEATURES if feature not in spoken]

    def unexpected(self, known: Mapping[tuple[str, str], str]) -> list[str]:
        """What does not work and is not known, in words."""
        name = self.client.name
        if self.missing:
            return []
        found = [f"{name}: nothing is said of {feature}" for feature in self.silent()]
        for (feature, way), trouble in self.tried.items():
            if trouble and (name, feature) not in known:
                found.append(f"{name}: {feature} {way}".rstrip())
        # what is known and works by now is not known any more
        for client, feature in known:
            if client == name and not any(trouble for (one, _), trouble in self.tried.items() if one == feature):
                found.append(f"{name}: {feature} works, and is named as known not to")
        return found

    def mark(self, feature: str) -> str:
        if feature in self.not_offered:
            return NOT_OFFERED
        troubles = [trouble for (one, _), trouble in self.tried.items() if one == feature]
        return FAILS if any(troubles) or not troubles else WORKS


def table(outcomes: Sequence[Outcome], known: Mapping[tuple[str, str], str]) -> str:
    """The table, the reasons under it, and what was not run."""
    lines = [f"| client | version | {' | '.join(FEATURES)} |", "|" + "---|" * (len(FEATURES) + 2)]
    for outcome in outcomes:
        if not outcome.missing:
            marks = " | ".join(outcome.mark(feature) for feature in FEATURES)
            lines.append(f"| {title(outcome.client)} | {outcome.client.version} | {marks} |")
    lines += ["", f"{WORKS} works · {NOT_OFFERED} the client has nothing of the kind · {FAILS} does not work", ""]
    for outcome in outcomes:
        reasons = [f"{NOT_OFFERED} {feature}: {why}" for feature, why in outcome.not_offered.items()]
        failing = {feature: trouble for (feature, _), trouble in outcome.tried.items() if trouble}
        reasons += [
            f"{FAILS} {feature}: {known.get((outcome.client.name, feature), trouble)}"
            for feature, trouble in failing.items()
        ]
        if reasons:
            lines.append(f"- {title(outcome.client)}: {'; '.join(reasons)}.")
    missing = [f"- {title(outcome.client)}: {outcome.missing}" for outcome in outcomes if outcome.missing]
    return "\n".join(lines + (["", "Not run:", "", *missing] if missing else []))


def title(client: Client) -> str:
    language = " (JavaScript)" if client.kind == "node" else ""
    shown = [name for name in client.names if name not in ("zod", "@langchain/core", "mcp")]
    return " ".join(f"`{name}`" for name in shown) + language


def section(client: Client) -> str:
    """What a user of the client sets; the code is a part of the program that was run."""
    language = "python" if client.kind == "python" else "js"
    return f"### {title(client)}\n\n{client.sets}\n\n```{language}\n{client.snippet}\n```"


def written(page: str, outcomes: Sequence[Outcome], known: Mapping[tuple[str, str], str]) -> str:
    """The page with what the program makes of it. Raises ValueError when the page has no place for it."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no lines {BEGIN!r} and {END!r}")
    made = [table(outcomes, known), *(section(outcome.client) for outcome in outcomes if not outcome.missing)]
    return f"{head}{BEGIN}\n\n" + "\n\n".join(made) + f"\n\n{END}{tail}"
