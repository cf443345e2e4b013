"""llm: a model of its own in `extra-openai-models.yaml`, by its commands as people type them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from trying import tried

# docs: begin
MODELS = """
- model_id: local2
  model_name: local2
  api_base: {url}
  api_key_name: local2
  supports_tools: true
  supports_schema: true
  reasoning: true
- model_id: local2-responses
  model_name: local2
  api_base: {url}
  api_key_name: local2
  supports_tools: true
  supports_schema: true
  responses: true
"""  # in the folder that `llm logs path` names; the key: `llm keys set local2`
# docs: end

HOME = Path(tempfile.mkdtemp())
LLM = str(Path(sys.executable).with_name("llm"))
(HOME / "extra-openai-models.yaml").write_text(MODELS.format(url=os.environ["OPENAI_BASE_URL"]))
(HOME / "keys.json").write_text(json.dumps({"local2": os.environ["OPENAI_API_KEY"], "wrong": "wrong"}))
ENVIRONMENT = {**os.environ, "LLM_USER_PATH": str(HOME)}
WEATHER = 'def get_weather(city: str) -> str:\n    "The weather"\n    return "sunny"\n'


def llm(*words: str, fails: bool = False) -> str:
    done = subprocess.run([LLM, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert bool(done.returncode) is fails, done.stderr
    return (done.stderr if fails else done.stdout).strip()


def leaves() -> bool:
    """Ctrl-C after the first words."""
    process = subprocess.Popen([LLM, "-m", "local2", "slowly"], env=ENVIRONMENT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    process.stdout.close()
    return bool(first)


def logged() -> dict[str, object]:
    rows: list[dict[str, object]] = json.loads(llm("logs", "list", "--json", "-n", "1"))
    return rows[0]


for model, feature in (("local2", "{}"), ("local2-responses", "Responses")):
    way = "" if feature == "{}" else "{}"
    tried(
        feature.format("chat"),
        lambda m=model: llm("-m", m, "--no-stream", "hello"),
        "Hello there.".__eq__,
        way.format("chat"),
    )
    tried(feature.format("stream"), lambda m=model: llm("-m", m, "hello"), "Hello there.".__eq__, way.format("stream"))
    tried(
        feature.format("tools"),
        lambda m=model: llm("-m", m, "--functions", WEATHER, "the weather?"),
        "It is sunny there.".__eq__,
        way.format("tools"),
    )
    tried(
        feature.format("structured"),
        lambda m=model: json.loads(llm("-m", m, "--schema", "city, country", "where?")),
        {"city": "Paris", "country": "France"}.__eq__,
        way.format("structured"),
    )
llm("-m", "local2", "hello")
tried("usage", lambda: logged()["output_tokens"])
tried("reasoning", lambda: llm("-m", "local2-responses", "hello") and json.dumps(logged()), lambda text: "Hm." in text)
tried("abort", leaves)
tried("wrong key", lambda: llm("-m", "local2", "--key", "wrong", "hello", fails=True), lambda said: "401" in said)
tried("mid-stream error", lambda: llm("-m", "local2", "break", fails=True), lambda said: "refuses" in said)
