"""Runs acceptance stories on a stack of their own: scripted model, local page, everything else as it is.

`python tests/e2e/stories_stack.py [S1 S2 …]` (default: all); the exit code is that of `local2 stories`.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

HEADING = "Lighthouse Keepers of the Northern Coast"
PAGE = f"""<!doctype html><html lang="en"><head><title>{HEADING}</title></head><body>
<nav><a href="/">Home</a> <a href="/about">About</a></nav>
<main><article><h1>{HEADING}</h1>
<p>For more than two centuries the keepers of the northern lighthouses climbed their towers every evening, trimmed the
wicks and polished the lenses, so that fishing vessels could find the harbour entrance through fog and heavy rain.</p>
<p>Automation ended the profession gradually: electric lamps replaced petroleum burners, remote monitoring replaced the
nightly inspection, and the final resident keeper left the island station together with his family in early spring.</p>
<p>Today volunteers maintain the buildings. Visitors can borrow the original logbooks, which describe storms, rescues
and the ordinary loneliness of long winters in careful handwriting.</p>
</article></main><footer>Imprint</footer></body></html>""".encode()
START = 60.0
# S8 is about the console.
STORIES = ("S1", "S2", "S3", "S4", "S5", "S6", "S6b", "S7", "S9", "S10", "S11")
# S7 and S11 compare two respondents; by its name the scripted model knows which of them asks.
SHADOW = ("--respondent-b", "--model-b", "shadow:1b")


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/keepers"
        body = PAGE if found else b"not here"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8" if found else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the stack's log is what is wanted."""


@contextmanager
def page_server() -> Iterator[str]:
    """The address of a page with a heading and text."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/keepers"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def program(
    argv: Sequence[str], env: dict[str, str], stderr: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A child with its standard output to read; ended by its id."""
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def clean_environment(home: Path) -> dict[str, str]:
    """This environment without any setting of LoCAL2, in a folder without a settings file."""
    foreign = ("LOCAL2_", "OLLAMA_", "SEARXNG_", "BRAVE_", "TAVILY_", "OPENAI_", "GEMINI_")
    root = str(Path(__file__).parents[2])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return {**kept, "PYTHONPATH": path, "LOCAL2_DATA_DIR": str(home / "data"), "LOCAL2_CONFIG": str(_no_settings(home))}


def _no_settings(home: Path) -> Path:
    path = home / "local2.yaml"
    path.write_text("{}\n", encoding="utf-8")
    return path


@contextmanager
def stack(log: Path, extra: dict[str, str] | None = None, options: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """A running stack; yields the environment in which `local2` is its client, and PAGE_URL."""
    with tempfile.TemporaryDirectory(prefix="local2-stories-") as folder, page_server() as page, log.open("ab") as out:
        env = clean_environment(Path(folder))
        model = [sys.executable, "-m", "shared.testing.model_server", "--port", "0"]
        with program(model, env, out) as model_server:
            assert model_server.stdout is not None
            # It says "model server on URL" when it listens.
            model_url = model_server.stdout.readline().split()[-1]
            env |= {
                "MODEL_URL": model_url,
                "OLLAMA_HOST": model_url,
                "LOCAL2_API_PORT": str(free_port()),
                # nobody reads an answer here before asking on
                "LOCAL2_YIELD_REST": "0",
                "LOCAL2_WEB_SEARCH_PROVIDER": "mock",
                "LOCAL2_WEB_SEARCH_MOCK_PAGE_URL": page,
                "LOCAL2_WEB_FETCH_ALLOWED_PRIVATE_HOSTS": json.dumps([page.split("/")[2]]),
                **(extra or {}),
            }
            with program([sys.executable, "-m", "services.cli", "run", "--headless", *options], env, out) as running:
                wait_until_ready(f"http://127.0.0.1:{env['LOCAL2_API_PORT']}", running)
                yield {**env, "PAGE_URL": page}


def wait_until_ready(url: str, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START
    while True:
        try:
            answer = httpx.get(f"{url}/ready", trust_env=False, verify=False, timeout=5)
            # queries are answered without memory, but not the stories about it
            if answer.status_code == 200 and answer.json()["parts"]["memory"]["ok"]:
                return
            why = answer.text
        except httpx.HTTPError as exc:
            why = repr(exc)
        if running.poll() is not None:
            raise RuntimeError(f"local2 run ended with status {running.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the stack was not ready within {START:g} s: {why}")
        time.sleep(0.05)


def local2(env: dict[str, str], *args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line as a client of the stack."""
    command = [sys.executable, "-m", "services.cli", *args]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=timeout, check=False)


def variables(env: dict[str, str], *names: str) -> list[str]:
    """What stories are to know of this stack."""
    given = {"page_url": env["PAGE_URL"], "page_heading": HEADING} if "S4" in names else {}
    if "S11" in names:
        given["decided_judge"] = "scripted"
    return [part for name, value in given.items() for part in ("--var", f"{name}={value}")]


def stories(env: dict[str, str], *names: str) -> subprocess.CompletedProcess[str]:
    return local2(env, "stories", *names, *variables(env, *names), "--verbose", timeout=300)


def main(names: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="local2-log-") as folder:
        log = Path(folder) / "stack.log"
        try:
            with stack(log, options=SHADOW) as env:
                done = stories(env, *(names or STORIES))
        except RuntimeError as exc:
            print(exc, file=sys.stderr)
            print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
            return 1
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        if done.returncode:
            print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
