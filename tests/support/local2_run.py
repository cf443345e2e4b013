"""A stack as `local2 run` starts it, with the scripted model, for tests that restart or upgrade all of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
ADMIN_KEY = "the-admin-key-of-these-stacks"
# Nothing of the caller's own settings may reach the stacks.
_FOREIGN = ("LOCAL2_", "OLLAMA_", "OPENAI_", "GEMINI_")


class Failed(Exception):
    """The upgrade lost, doubled or broke something."""


def eventually(fact: Callable[[], Any], what: str, timeout: float = 120.0) -> Any:
    """Return the first true value of `fact`. Raises Failed after `timeout` seconds."""
    deadline, last = time.monotonic() + timeout, None
    while time.monotonic() < deadline:
        try:
            if value := fact():
                return value
        except (httpx.HTTPError, AssertionError) as exc:
            last = exc
        time.sleep(0.5)
    raise Failed(f"{what}: did not happen within {timeout:g} s ({last})")


class Stack:
    """A running stack, as its administrator uses it."""

    def __init__(self, tree: Path, data: Path, port: int) -> None:
        self.tree, self.data, self.port = tree, data, port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)

    def call(self, method: str, path: str, body: Any = None, *, key: str = ADMIN_KEY, **options: Any) -> Any:
        """Return the decoded reply. Raises Failed with the server's words unless the status is 2xx."""
        reply = self.http.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"}, **options)
        if not reply.is_success:
            raise Failed(f"{method} {path}: {reply.status_code} {reply.text[:500]}")
        kind = reply.headers.get("content-type", "").partition(";")[0]
        return reply.json() if kind == "application/json" else reply.text

    def command(self, *arguments: str) -> str:
        """Run a command of this stack's own release against it, and return what it prints."""
        address = {"LOCAL2_API_URL": f"http://127.0.0.1:{self.port}", "LOCAL2_DATA_DIR": str(self.data)}
        done = subprocess.run(
            [self.tree / ".venv" / "bin" / "local2", *arguments], cwd=self.tree, env={**environment(), **address},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"local2 {' '.join(arguments)}: status {done.returncode}\n{done.stdout[-3000:]}")
        return done.stdout


def environment() -> dict[str, str]:
    """Return this process's environment without settings of LoCAL2, and with the administrator's key."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {**kept, "LOCAL2_ADMIN_KEY": ADMIN_KEY}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextmanager
def scripted_model(folder: Path, rules: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Run the scripted model server of this checkout until the block ends; its address."""
    port, script = free_port(), folder / "rules.json"
    script.write_text(json.dumps({"rules": rules}), encoding="utf-8")
    with (folder / "model.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "shared.testing.model_server", "--port", str(port), "--rules", str(script)],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: httpx.get(f"{url}/api/version").is_success, "the model server answers")
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def running(tree: Path, data: Path, model: str, **settings: str) -> Iterator[Stack]:
    """Run the stack of a checkout on a data folder until the block ends. Raises Failed with the end of its log.

    model: the address of the model server. settings: environment variables, in lower case without LOCAL2_.
    """
    port, more = free_port(), {f"LOCAL2_{name.upper()}": value for name, value in settings.items()}
    log = data.parent / f"{data.name}.log"
    command = [tree / ".venv" / "bin" / "local2", "run", "--headless", "--respondent-b", "--search", "mock"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--data-dir", data, "--api-port", str(port)], cwd=tree,
            env={**environment(), "OLLAMA_HOST": model, **more}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:

        def ready() -> bool:
            if process.poll() is not None:
                raise Failed("the stack ended")
            parts = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=10).json()["parts"]
            return all(part["ok"] for part in parts.values())

        eventually(ready, "the stack is ready")
        stack = Stack(tree, data, port)
        participants = {"knowledge", "memory", "reward", "web_fetch"}
        names = lambda: {row["name"] for row in stack.call("GET", "/participants")["participants"]}  # noqa: E731
        eventually(lambda: participants <= names(), "all participants run")
        try:
            yield stack
        finally:
            stack.http.close()
        process.send_signal(signal.SIGINT)
        if status := process.wait(60):
            raise Failed(f"the stack ended with status {status}")
    except Failed as exc:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
        raise Failed(f"{exc}\n{end}") from exc
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
