"""The first start as people do it, in real containers: a clone made under umask 077, and `make up`.

A judge's model that cannot be downloaded stops nobody; every participant comes up, and a question is answered; the API
stays at its port; a GPU that Docker cannot give out is told (by a fake nvidia-smi); MCP servers bring `mcp` up; every
participant is killed, and comes back; and all leave by themselves when the stack is stopped. The images that
`compose.yaml` names must be there, or to be had. Status 0 when all of it was so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkout import Checkout, Wrong

# In the place of the judge's download: a library that does not have it.
NOT_THERE = """#!/bin/sh
case $1 in
serve) exec sleep 600 ;;
list) ;;
show) exit 1 ;;
pull) echo 'Error: pull model manifest: file does not exist' >&2; exit 1 ;;
esac
"""
OVER = """services:
  critic-pull:
    environment:
      PATH: /not-there:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
      ATTEMPTS: "2"
      PAUSE: "0"
    volumes: ["./not-there:/not-there:ro"]
"""
SMI = "#!/bin/sh\necho 24576\n"


def participants(checkout: Checkout) -> list[str]:
    """The services that are participants, those without replicas left out."""
    services = json.loads(checkout.run("docker", "compose", "config", "--format", "json"))["services"]
    return [
        name
        for name, one in services.items()
        if "services." in " ".join(one.get("command") or ()) and one.get("deploy", {}).get("replicas") != 0
    ]


def containers(checkout: Checkout) -> dict[str, dict[str, Any]]:
    ids = checkout.run("docker", "compose", "ps", "--all", "--quiet").split()
    found = json.loads(checkout.run("docker", "inspect", *ids))
    return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in found}


def healthy(checkout: Checkout, seconds: float) -> None:
    """Waits until each participant is. Raises Wrong."""
    until = time.monotonic() + seconds
    while True:
        there = containers(checkout)
        states = {name: there[name]["State"] if name in there else {} for name in participants(checkout)}
        sick = [name for name, state in states.items() if state.get("Health", {}).get("Status") != "healthy"]
        if not sick:
            return
        if time.monotonic() > until:
            raise Wrong(f"not healthy after {seconds:g} s: {', '.join(sick)}")
        time.sleep(1)


def holds(true: bool, what: str) -> None:
    if not true:
        raise Wrong(what)


def main() -> int:
    began = time.monotonic()

    def done(what: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s, load {os.getloadavg()[0]:4.1f}] ok  {what}", flush=True)

    try:
        with Checkout("bringup", umask=0o077) as checkout:
            tried(checkout, done)
    except Wrong as exc:
        print(f"[{time.monotonic() - began:4.0f} s] FAILED  {exc}", flush=True)
        return 1
    return 0


def tried(checkout: Checkout, done: Any) -> None:
    folder = checkout.folder
    holds((folder / "deploy/redis/redis.conf").stat().st_mode & 0o077 == 0, "the clone is readable for everybody")
    fake = folder / "not-there"
    fake.mkdir(mode=0o755)
    fake.chmod(0o755)
    (fake / "ollama").write_text(NOT_THERE)
    (fake / "ollama").chmod(0o755)
    (folder / "over.yaml").write_text(OVER)
    checkout.env["COMPOSE_FILE"] = "compose.yaml:compose.cpu.yaml:over.yaml"
    said = checkout.run("make", "up")
    holds(f"Up: http://127.0.0.1:{checkout.port}" in said, said)
    expected = {
        "gateway",
        "generator",
        "respondent-b",
        "critic",
        "reward",
        "memory",
        "knowledge",
        "web_search",
        "web_fetch",
    }
    holds(set(participants(checkout)) == expected, f"these came up: {participants(checkout)}")
    healthy(checkout, 5)
    log = checkout.run("docker", "compose", "logs", "critic-pull")
    holds("ggozad/prometheus2 could not be downloaded" in log, log)
    done(f"a clone under umask 077: {len(expected)} participants are healthy, without the judge's model")

    answer = checkout.call("POST", "/query", {"query": "Hello?"})
    holds(bool(answer["answer"]), str(answer))
    checkout.run("docker", "compose", "restart", "gateway")
    checkout.run("docker", "compose", "up", "--detach", "--wait")
    at = checkout.run("docker", "compose", "port", "gateway", "8765").strip()
    holds(at == f"127.0.0.1:{checkout.port}", f"the gateway is at {at}")
    done("a question is answered, and the API is where it was after a restart and a plain `docker compose up`")

    smi = folder / "fake" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    path = checkout.env["PATH"]
    checkout.env["PATH"] = f"{smi.parent}:{path}"
    said = checkout.run("deploy/up.sh", "--find")
    checkout.env["PATH"] = path
    holds("1 NVIDIA GPU(s), 25 GB" in said and "Docker cannot give out the GPU" in said, said)
    services = json.loads(checkout.run("docker", "compose", "config", "--format", "json"))["services"]
    holds(services["generator"]["environment"]["LOCAL2_GPU"] == "nvidia", "the generator does not know of the GPU")
    checkout.run("docker", "compose", "up", "--detach", "--wait")
    log = checkout.run("docker", "compose", "logs", "--no-log-prefix", "ollama-pull")
    holds("has an NVIDIA GPU, and the model server is not given it" in log, log)
    done("a GPU that Docker cannot give out is told, by make up and by the download's log")

    checkout.env["LOCAL2_MCP_SERVERS"] = '{"docs": "http://nobody.invalid/mcp"}'
    checkout.run("docker", "compose", "up", "--detach", "--wait")
    holds("mcp" in participants(checkout), "mcp has no replica")
    healthy(checkout, 5)
    done("with a server named, mcp comes up too")

    for name in participants(checkout):
        # like a crash: told to the engine, a kill would count as a stop by hand
        os.kill(containers(checkout)[name]["State"]["Pid"], 9)
    time.sleep(2)
    healthy(checkout, 180)
    answer = checkout.call("POST", "/query", {"query": "Still there?"})
    holds(bool(answer["answer"]), str(answer))
    done("every participant was killed, came back, and a question is answered")

    checkout.run("docker", "compose", "stop")
    codes = {name: one["State"]["ExitCode"] for name, one in containers(checkout).items()}
    holds(137 not in codes.values(), f"killed while stopping: {codes}")
    done("all left by themselves")


if __name__ == "__main__":
    sys.exit(main())
