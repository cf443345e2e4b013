"""`make upgrade` in real containers: from an older version with data in every store, to this one, and back.

Takes the two versions into a checkout of its own, starts the old one, puts in conversations, memories, a topic, a vote,
a key and a setting; upgrades; looks whether everything is there and new questions are answered; goes back, and looks
again; then upgrades to a version whose gateway does not start, which has to end where it began. The images that
`compose.yaml` names must be there, or to be had. Status 0 when all of it was so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROJECT = f"local2-upgrade-{os.getpid()}"
# Of the versions under test alone: nothing of the caller's.
_FOREIGN = ("LOCAL2_", "COMPOSE_", "OLLAMA_", "SEARXNG_", "FROM")
_CALL = """
import json, sys, urllib.request
method, path, body = sys.argv[1], sys.argv[2], sys.stdin.read()
key = open('/data/admin.key').read().strip()
headers = {'authorization': 'Bearer ' + key, 'content-type': 'application/json'}
request = urllib.request.Request('http://127.0.0.1:8765' + path, body.encode() or None, headers, method=method)
with urllib.request.urlopen(request, timeout=120) as answer:
    sys.stdout.write(answer.read().decode() or 'null')
"""


class Wrong(Exception):
    """Something is not as it has to be."""


class Checkout:
    """A folder with one version after the other in it, and the containers that it has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.env |= {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "LOCAL2_TAG": f"upgrade-{os.getpid()}",
            "LOCAL2_API_PORT": "28765",
        }

    def run(self, *command: str, stdin: str = "", fails: bool = False, timeout: float = 900) -> str:
        """Its output. Raises Wrong when it fails, or does not where it has to."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, input=stdin, text=True, timeout=timeout, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if (done.returncode != 0) is not fails:
            raise Wrong(
                f"{' '.join(command)[:200]}: status {done.returncode}\n" + "\n".join(done.stdout.splitlines()[-40:])
            )
        return done.stdout

    def call(self, method: str, path: str, body: Any = None) -> Any:
        command = ["docker", "compose", "--project-name", PROJECT, "exec", "-T", "gateway", "python", "-c", _CALL]
        return json.loads(self.run(*command, method, path, stdin="" if body is None else json.dumps(body), timeout=150))

    def take(self, version: str) -> None:
        self.run("git", "checkout", "--quiet", "--detach", version)

    def fill(self) -> None:
        """Something in every store: Redis, Chroma, preferences, and the gateway's own folder has the key."""
        for number in range(3):
            asked = {"query": f"What is the {number}th lighthouse?", "session_id": "lights"}
            answer = self.call("POST", "/query", asked)
            self.call("POST", "/feedback", {"query_id": answer["query_id"], "stars": 5})
        self.call("PUT", "/memory/topics/user.coffee", {"content": "black, without sugar"})
        self.call("POST", "/keys", {"name": "phone", "user_id": "anna"})
        self.call("PATCH", "/participants/generator/settings", {"history_turns": 7})

    def seen(self) -> dict[str, Any]:
        """What a user sees of it."""
        turns = self.call("GET", "/sessions/lights")["turns"]
        settings = self.call("GET", "/participants/generator/settings")["values"]
        engrams = self.call("GET", "/memory/engrams")["engrams"]
        return {
            "turns": [turn["query"] for turn in turns],
            "topic": self.call("GET", "/memory/topics/user.coffee")["content"],
            "keys": sorted(key["name"] for key in self.call("GET", "/keys")["keys"]),
            "history": settings["history_turns"],
            "engrams": sorted({engram["query"] for engram in engrams if engram.get("query")}),
            "votes": self.call("GET", "/preferences/leaderboard") is not None,
        }

    def clean(self) -> None:
        label = f"label=com.docker.compose.project={PROJECT}"
        for kind, remove in (
            ("ps --all", "rm --force --volumes"),
            ("network ls", "network rm"),
            ("volume ls", "volume rm"),
        ):
            found = self.run("docker", *kind.split(), "--quiet", "--filter", label).split()
            if kind == "volume ls":
                found += self.run(
                    "docker", "volume", "ls", "--quiet", "--filter", f"label=local2.before={PROJECT}"
                ).split()
            if found:
                self.run("docker", *remove.split(), *found)
        for image in ("local2", "local2-memory"):
            subprocess.run(["docker", "rmi", f"{image}:upgrade-{os.getpid()}"], capture_output=True, check=False)


def eventually(checkout: Checkout, wanted: dict[str, Any] | None, what: str) -> dict[str, Any]:
    """What is seen, once all three answers are remembered, and it is as wanted."""
    until = time.monotonic() + 90
    while True:
        try:
            seen = checkout.seen()
            if len(seen["engrams"]) >= 3 and (wanted is None or seen == wanted):
                return seen
            wrong: object = seen
        except (Wrong, KeyError, ValueError) as exc:
            wrong = exc
        if time.monotonic() > until:
            raise Wrong(f"{what}: {wrong}, not {wanted}")
        time.sleep(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", help="the commit to upgrade from")
    parser.add_argument("new", nargs="?", default="HEAD", help="the commit to upgrade to (%(default)s)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="local2-upgrade-"))
    checkout = Checkout(folder / "checkout")
    began = time.monotonic()

    def done(what: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] ok  {what}", flush=True)

    try:
        new = subprocess.run(["git", "rev-parse", options.new], cwd=ROOT, capture_output=True, text=True, check=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout.folder)], check=True)
        checkout.take(options.old)
        checkout.run("make", "up")
        checkout.fill()
        before = eventually(checkout, None, "the old version")
        done(f"{options.old} runs: {before}")

        checkout.take(new.stdout.strip())
        said = checkout.run("make", "upgrade", f"FROM={options.old}")
        eventually(checkout, before, "after the upgrade")
        checkout.call("POST", "/query", {"query": "And one more?", "session_id": "lights"})
        done("upgraded, everything is there, and a question is answered: " + said.splitlines()[-1])

        said = checkout.run("make", "upgrade", "ARGS=back")
        eventually(checkout, before, "after the way back")
        done("back by hand, with the data of before the upgrade")

        compose = checkout.folder / "compose.yaml"
        compose.write_text(compose.read_text().replace('"services.gateway"]', '"services.nothing"]'))
        checkout.run("make", "upgrade", f"FROM={options.old}", fails=True)
        eventually(checkout, before, "after a version that does not start")
        done("a version that does not start: back by itself")
    except Wrong as exc:
        print(f"[{time.monotonic() - began:4.0f} s] FAILED  {exc}", flush=True)
        return 1
    finally:
        checkout.clean()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
