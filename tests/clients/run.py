"""Tries stock clients of OpenAI's API, unmodified and as their own documentation shows them, and prints what works.

`make test-clients [ARGS="--write NAME …"]`: each client has an environment of its own under `.clients/`, made at the
first run, and a script in this folder that prints a line of JSON for each thing it tried. The stack is a gateway and a
generator at the scripted model. `--write` puts the table into docs/clients.md. The status is 1 when something does not
work that is not named in `KNOWN`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from support.openai_place import open_place  # noqa: E402

from services.cli.launch.embedded_redis import EmbeddedRedis  # noqa: E402

PLACES = ROOT / ".clients"
PAGE = ROOT / "docs" / "clients.md"
SECONDS = 240.0
MARK = "<!-- table: make test-clients ARGS=--write -->"

# What the model says: one script for all clients.
RULES: list[dict[str, Any]] = [
    {
        "when": {"offered": "get_weather", "tool_results": 0, "user": "weather"},
        "respond": {"tool_calls": [{"name": "get_weather", "args": {"city": "Paris"}}]},
    },
    {"when": {"last_tool": "get_weather"}, "respond": {"text": "It is <<result>> there."}},
    {
        "when": {"user": "where", "system": "JSON schema|Call a tool now"},
        "respond": {"text": '{"city": "Paris", "country": "France"}'},
    },
    {
        "when": {"offered": "final_result", "user": "where"},
        "respond": {"tool_calls": [{"name": "final_result", "args": {"city": "Paris", "country": "France"}}]},
    },
    {"when": {"user": "slowly"}, "respond": {"text": ["one ", "two ", "three"], "pace": 30}},
    {"when": {"user": "break"}, "respond": {"status": 400, "error": "the model refuses this"}},
    {"respond": {"thinking": "Hm.", "text": "Hello there."}},
]
# (client, what) → why it does not work, and whose part it is.
KNOWN: dict[tuple[str, str], str] = {}


@dataclass(frozen=True, slots=True)
class Client:
    """packages: what is installed, the first names the client. kind: python, or node."""

    name: str
    packages: Sequence[str]
    kind: str = "python"


CLIENTS = (
    Client("openai", ["openai"]),
    Client("pydantic_ai", ["pydantic-ai-slim[openai]"]),
    Client("langchain", ["langchain-openai"]),
    Client("openai_agents", ["openai-agents"]),
    Client("instructor", ["instructor"]),
    Client("openai_node", ["openai", "zod"], "node"),
    Client("ai_sdk", ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"], "node"),
)


@dataclass(slots=True)
class Outcome:
    client: Client
    version: str = ""
    tried: dict[str, str] = field(default_factory=dict)

    @property
    def unexpected(self) -> list[str]:
        bad = [what for what, detail in self.tried.items() if detail and (self.client.name, what) not in KNOWN]
        return bad if self.tried else ["nothing was tried"]


def prepare(client: Client) -> str:
    """Installs a client, once; its version."""
    place = PLACES / client.name
    if client.kind == "python":
        python = place / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "-q", *client.packages], check=True)
        name = client.packages[0].partition("[")[0]
        code = f"from importlib.metadata import version; print(version({name!r}))"
        return subprocess.check_output([str(python), "-c", code], text=True).strip()
    if not (place / "node_modules").exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text('{"private": true, "type": "module"}\n')
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", *client.packages], cwd=place, check=True
        )
    package = json.loads((place / "node_modules" / client.packages[0] / "package.json").read_text())
    return str(package["version"])


async def attempt(client: Client, url: str, key: str) -> Outcome:
    outcome = Outcome(client, await asyncio.to_thread(prepare, client))
    place = PLACES / client.name
    environment = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        environment.pop(name, None)
    if client.kind == "python":
        command = [str(place / "bin" / "python"), str(HERE / f"{client.name}_client.py")]
    else:
        # a module finds its packages beside itself
        shutil.copy(HERE / f"{client.name}.mjs", place / "try.mjs")
        command = ["node", str(place / "try.mjs")]
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        outcome.tried["everything"] = f"not done after {SECONDS:g} s"
    for line in out.decode().splitlines():
        if line.startswith('{"tried"'):
            said = json.loads(line)
            outcome.tried[said["tried"]] = said["trouble"]
    if process.returncode and not outcome.unexpected:
        outcome.tried["everything"] = err.decode()[-300:]
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| client | version | works | does not |", "|---|---|---|---|"]
    for outcome in outcomes:
        works = " · ".join(what for what, detail in outcome.tried.items() if not detail)
        fails = " · ".join(
            f"{what}: {KNOWN.get((outcome.client.name, what), detail)}"[:160]
            for what, detail in outcome.tried.items()
            if detail
        )
        packages = " ".join(f"`{one}`" for one in outcome.client.packages if one != "zod")
        lines.append(f"| {packages} | {outcome.version} | {works} | {fails or '-'} |")
    return "\n".join(lines)


async def run(names: Sequence[str]) -> list[Outcome]:
    chosen = [client for client in CLIENTS if not names or client.name in names]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as server:
        async with open_place(server.url, Path(folder), client_gone_seconds=0.5) as place:
            place.rules(*RULES)
            for client in chosen:
                if client.kind == "node" and shutil.which("npm") is None:
                    print(f"NOT RUN {client.name}: there is no npm on the PATH", flush=True)
                    continue
                print(f"── {client.name}", flush=True)
                outcomes.append(await attempt(client, place.site.url, place.ann.api_key))
                for what, trouble in outcomes[-1].tried.items():
                    print(f"   {'does not work' if trouble else 'ok'}: {what}{': ' + trouble[:300] if trouble else ''}")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these clients")
    parser.add_argument("--write", action="store_true", help="put the table into docs/clients.md")
    options = parser.parse_args()
    outcomes = asyncio.run(run(options.names))
    print(f"\n{table(outcomes)}")
    if options.write:
        head, _, _ = PAGE.read_text().partition(MARK)
        PAGE.write_text(f"{head}{MARK}\n\n{table(outcomes)}\n")
    unexpected = [f"{outcome.client.name}: {what}" for outcome in outcomes for what in outcome.unexpected]
    print("\nall as expected" if not unexpected else "\nunexpected: " + "; ".join(unexpected))
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
