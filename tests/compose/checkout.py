"""A clone of this repository in a folder of its own, and the containers that are started from it, as people do it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
# Nothing of the caller's own settings may reach the containers.
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
    """Until the end of the block; then its containers, volumes and images are removed, and the folder.

    umask: with which it is cloned. port: where the gateway is published, one that nobody listens on just now.
    """

    def __init__(self, kind: str, umask: int = 0o022) -> None:
        self.name = f"local2-{kind}-{os.getpid()}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._umask = umask
        self._folder = Path(tempfile.mkdtemp(prefix=self.name))
        self.folder = self._folder / "checkout"
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.env |= {"COMPOSE_PROJECT_NAME": self.name, "LOCAL2_TAG": self.name, "LOCAL2_API_PORT": str(self.port)}

    def __enter__(self) -> Self:
        command = ["git", "clone", "--quiet", str(ROOT), str(self.folder)]
        subprocess.run(command, check=True, umask=self._umask)
        return self

    def __exit__(self, *_exc: object) -> None:
        ours, copies = f"label=com.docker.compose.project={self.name}", f"label=local2.before={self.name}"
        self._remove("rm --force --volumes", "ps --all", ours)
        self._remove("network rm", "network ls", ours)
        for label in (ours, copies):
            self._remove("volume rm", "volume ls", label)
        for image in ("local2", "local2-memory"):
            subprocess.run(["docker", "rmi", f"{image}:{self.name}"], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _remove(self, remove: str, listing: str, label: str) -> None:
        found = self.run("docker", *listing.split(), "--quiet", "--filter", label, inside=False).split()
        if found:
            self.run("docker", *remove.split(), *found, inside=False)

    def run(
        self, *command: str, stdin: str = "", fails: bool = False, inside: bool = True, timeout: float = 900
    ) -> str:
        """Its output. Raises Wrong when it fails, or does not where it has to."""
        done = subprocess.run(
            command, cwd=self.folder if inside else None, env=self.env, input=stdin, text=True, timeout=timeout,
            check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, umask=self._umask,
        )  # fmt: skip
        if (done.returncode != 0) is not fails:
            said = "\n".join(done.stdout.splitlines()[-40:])
            raise Wrong(f"{' '.join(command)[:200]}: status {done.returncode}\n{said}")
        return done.stdout

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The gateway's answer, asked in its own container with the administrator's key."""
        command = ["docker", "compose", "exec", "-T", "gateway", "python", "-c", _CALL, method, path]
        return json.loads(self.run(*command, stdin="" if body is None else json.dumps(body), timeout=150))

    def take(self, version: str) -> None:
        self.run("git", "checkout", "--quiet", "--detach", version)
