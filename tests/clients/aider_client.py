"""aider: one message without a terminal, in a folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from trying import not_offered, tried

# docs: begin
COMMAND = ["aider", "--model", "openai/local2", "--openai-api-base", os.environ["OPENAI_BASE_URL"]]
# docs: end

AIDER = str(Path(sys.executable).with_name(COMMAND[0]))
QUIET = (
    "--no-git --yes-always --no-pretty --analytics-disable --no-check-update --no-show-model-warnings --map-tokens 0"
)


def command(*words: str) -> list[str]:
    return [AIDER, *COMMAND[1:], *QUIET.split(), *words]


def aider(*words: str, folder: str | None = None) -> str:
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            command(*words), cwd=folder or empty, capture_output=True, text=True, timeout=300,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HOME": empty},
        )  # fmt: skip
    return done.stdout + done.stderr


def edited() -> str:
    """What aider is for: a file that is there with the words that the model named."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "greeting.txt").write_text("Good bye.\n")
        aider("--edit-format", "diff", "--message", "edit the greeting", "greeting.txt", folder=folder)
        return (Path(folder) / "greeting.txt").read_text()


def leaves() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command("--message", "slowly"), cwd=folder, env={**os.environ, "HOME": folder},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        seen = b""
        while b"first" not in seen and (more := process.stdout.read(1)):
            seen += more
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        process.stdout.close()
        return b"first" in seen


tried("chat", lambda: aider("--no-stream", "--message", "hello"), lambda said: "Hello there." in said)
tried("chat", edited, "Hello there.\n".__eq__, "a file is edited")
tried("stream", lambda: aider("--message", "hello"), lambda said: "Hello there." in said)
tried("usage", lambda: aider("--message", "hello"), lambda said: "Tokens:" in said)
tried("reasoning", lambda: aider("--message", "hello"), lambda said: "Hm." in said)
tried("abort", leaves)
tried(
    "wrong key", lambda: aider("--openai-api-key", "wrong", "--message", "hello"), lambda said: "Authentication" in said
)
not_offered("tools", "it edits by the text of the answer")
not_offered("structured", "it edits by the text of the answer")
not_offered("Responses", "it speaks chat completions only")
tried("mid-stream error", lambda: aider("--message", "break"), lambda said: "refuses" in said)
