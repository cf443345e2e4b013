"""Tries stock clients of OpenAI's API, unmodified and as their own documentation shows them, and prints what works.

`make test-clients [ARGS="--short | --write | NAME …"]`: each client has an environment of its own under `.clients/`,
made at the first run, and a script in this folder that prints a line of JSON for each thing it tried. The stack is a
gateway and a generator at the scripted model. `--write` puts the table and what to set into docs/clients.md. `--short`
tries one client of each language, and is quick. The status is 1 when something does not work that is not named in
`KNOWN`; a client that cannot be installed here is said as NOT RUN.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE)]

from page import CLIENTS, PAGE, Client, Outcome, table, written  # noqa: E402
from support.environments import NotInstalled, python_environment  # noqa: E402
from support.openai_place import Place, open_place  # noqa: E402

from services.cli.launch.embedded_redis import EmbeddedRedis  # noqa: E402

PLACES = ROOT / ".clients"
# A bound for a busy machine: aider alone starts eight times.
SECONDS = 1_200.0
# With an index that is slow, a large client takes minutes; in the short form it must not.
INSTALL_SECONDS, SHORT_INSTALL_SECONDS = 600.0, 60.0
SHORT = ("openai", "openai_node")
# How long a run that nobody waits for may go on: the grace, and what a busy machine adds.
ABANDONED_SECONDS = 20.0

# What the model says: one script for all clients.
HELLO = "Hello there."
PARIS = {"city": "Paris", "country": "France"}
EDIT = "greeting.txt\n```\n<<<<<<< SEARCH\nGood bye.\n=======\nHello there.\n>>>>>>> REPLACE\n```\n"
RULES: list[dict[str, Any]] = [
    # smolagents: its own tools end a run, and its results come back as words of the user
    {
        "when": {"system": "Call a tool now", "user": "observation"},
        "respond": {"text": '{"name": "final_answer", "arguments": {"answer": "It is sunny there."}}'},
    },
    {
        "when": {"system": "Call a tool now", "user": "weather"},
        "respond": {"text": '{"name": "get_weather", "arguments": {"city": "Paris"}}'},
    },
    {
        "when": {"user": "hello, agent"},
        "respond": {"text": f'Thought: easy.\n<code>\nfinal_answer("{HELLO}")\n</code>'},
    },
    # Codex: its shell
    {
        "when": {"offered": "exec_command", "tool_results": 0, "user": "run it"},
        "respond": {"tool_calls": [{"name": "exec_command", "args": {"cmd": "echo hi42"}}]},
    },
    {"when": {"last_tool": "exec_command"}, "respond": {"text": "It printed <<result>>"}},
    # aider: an edit in its own notation
    {"when": {"user": "edit the greeting"}, "respond": {"text": EDIT}},
    {
        "when": {"offered": "get_weather", "tool_results": 0, "user": "weather"},
        "respond": {"tool_calls": [{"name": "get_weather", "args": {"city": "Paris"}}]},
    },
    {"when": {"last_tool": "get_weather"}, "respond": {"text": "It is <<result>> there."}},
    {"when": {"user": "where", "system": "JSON schema|Call a tool now"}, "respond": {"text": json.dumps(PARIS)}},
    {
        "when": {"offered": "final_result", "user": "where"},
        "respond": {"tool_calls": [{"name": "final_result", "args": PARIS}]},
    },
    {"when": {"user": "slowly"}, "respond": {"text": ["first ", "second ", "third"], "pace": 30}},
    {
        "when": {"user": "break"},
        "respond": {
            "text": ["one ", "two ", "three"],
            "fault": {"kind": "error_line", "after": 2, "text": "the model refuses this"},
        },
    },
    {"respond": {"thinking": "Hm.", "text": HELLO}},
]
# (client, feature) → why it does not work, and whose part it is.
KNOWN: dict[tuple[str, str], str] = {}


class NotRunnable(Exception):
    """A client cannot be tried here."""


def prepare(client: Client, seconds: float) -> list[str]:
    """Installs a client within so many seconds, once for these versions; the command that runs its script. Raises
    NotRunnable."""
    place = PLACES / client.name
    if client.kind == "python":
        try:
            python = sys.executable if _here(client) else python_environment(place, client.packages, seconds)
        except NotInstalled as exc:
            raise NotRunnable(str(exc)) from exc
        return [str(python), str(client.script)]
    if shutil.which("npm") is None:
        raise NotRunnable("there is no npm on the PATH")
    stamp = place / "installed.txt"
    wanted = "\n".join(client.packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(place, ignore_errors=True)
        _install(client, place, seconds)
        stamp.write_text(wanted)
    # a module finds its packages beside itself
    for script in (client.script, HERE / "trying.mjs"):
        shutil.copy(script, place)
    return ["node", str(place / client.script.name)]


def _here(client: Client) -> bool:
    """Whether the tests' own environment has the very package."""
    try:
        return len(client.packages) == 1 and version(client.names[0]) == client.version
    except PackageNotFoundError:
        return False


def _install(client: Client, place: Path, seconds: float) -> None:
    place.mkdir(parents=True)
    (place / "package.json").write_text('{"private": true, "type": "module"}\n')
    quiet = ["--silent", "--no-audit", "--no-fund", "--fetch-retries=2", "--fetch-retry-mintimeout=2000"]
    command = ["npm", "install", "--save-exact", *quiet, *client.packages]
    try:
        subprocess.run(command, cwd=place, check=True, timeout=seconds, stderr=subprocess.DEVNULL)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
        shutil.rmtree(place, ignore_errors=True)
        raise NotRunnable("its packages cannot be had from the index here") from exc


async def attempt(client: Client, place: Place, seconds: float) -> Outcome:
    outcome = Outcome(client)
    try:
        command = await asyncio.to_thread(prepare, client, seconds)
    except NotRunnable as exc:
        outcome.missing = str(exc)
        return outcome
    environment = {**os.environ, "OPENAI_BASE_URL": f"{place.site.url}/v1", "OPENAI_API_KEY": place.ann.api_key}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        environment.pop(name, None)
    left_before = len(place.on.server.aborted)
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        outcome.tried["everything", ""] = f"not done after {SECONDS:g} s"
    if process.returncode and "everything" not in {feature for feature, _ in outcome.tried}:
        outcome.tried["everything", ""] = err.decode()[-600:]
    for line in out.decode().splitlines():
        if not line.startswith('{"tried"'):
            continue
        said = json.loads(line)
        if "not_offered" in said:
            outcome.not_offered[said["feature"]] = said["not_offered"]
        else:
            outcome.tried[said["feature"], said["way"]] = said["trouble"]
    if any(feature == "abort" for feature, _ in outcome.tried):
        await _look_for_the_end(place, outcome, left_before)
    return outcome


async def _look_for_the_end(place: Place, outcome: Outcome, left_before: int) -> None:
    """What a client has left must end at the model server too."""
    server = place.on.server
    try:
        await server.wait_until(lambda one: one.streaming == 0 and len(one.aborted) > left_before, ABANDONED_SECONDS)
    except TimeoutError:
        outcome.tried["abort", "at the model server"] = "the model went on for nobody"


async def run(names: Sequence[str], seconds: float) -> list[Outcome]:
    chosen = [client for client in CLIENTS if not names or client.name in names]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as server:
        async with open_place(server.url, Path(folder), client_gone_seconds=0.5) as place:
            place.rules(*RULES)
            for client in chosen:
                print(f"── {client.name}", flush=True)
                outcome = await attempt(client, place, seconds)
                outcomes.append(outcome)
                if outcome.missing:
                    print(f"NOT RUN test-clients {client.name}: {outcome.missing}", flush=True)
                for (feature, way), trouble in outcome.tried.items():
                    what = f"{feature} ({way})" if way else feature
                    print(f"   {'does not work' if trouble else 'ok'}: {what}{': ' + trouble[:300] if trouble else ''}")
                for feature, why in outcome.not_offered.items():
                    print(f"   not offered: {feature}: {why}")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these clients")
    parser.add_argument("--short", action="store_true", help=f"only {' and '.join(SHORT)}")
    parser.add_argument("--write", action="store_true", help="put what came of all into docs/clients.md")
    options = parser.parse_args()
    if options.write and (options.names or options.short):
        parser.error("--write needs all clients: name none")
    if unknown := set(options.names) - {client.name for client in CLIENTS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in CLIENTS)}")
    chosen = (SHORT, SHORT_INSTALL_SECONDS) if options.short else (options.names, INSTALL_SECONDS)
    outcomes = asyncio.run(run(*chosen))
    print(f"\n{table(outcomes, KNOWN)}")
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), outcomes, KNOWN))
    unexpected = [one for outcome in outcomes for one in outcome.unexpected(KNOWN)]
    whole = "what was run works as expected" if any(one.missing for one in outcomes) else "all as expected"
    print(f"\n{whole}" if not unexpected else "\nunexpected: " + "; ".join(unexpected))
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
