"""The stack under test: one Compose project with a name of its own, and everything that is asked of Docker."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PREFIX = "local2-ctest-"
TAG = "ctest"
LABEL = "com.docker.compose.project"
# Of throw-away containers: they are not the project's, and the image brings labels of the service that built it.
OURS = "local2.ctest"
GATEWAY_PORT = 8765
# How many gateways can be published at once.
PORTS = 8
# Nothing of the caller's own settings may reach the stack.
_FOREIGN = ("LOCAL2_", "COMPOSE_", "OLLAMA_", "SEARXNG_", "BRAVE_", "TAVILY_")


class DockerError(Exception):
    """A docker command failed; its message has the end of what it said."""


def docker(*args: str, timeout: float = 60, env: dict[str, str] | None = None, stdin: str | None = None) -> str:
    """The standard output of a docker command. Raises DockerError."""
    try:
        done = subprocess.run(
            ["docker", *args], env=env, input=stdin, text=True, capture_output=True, timeout=timeout, check=False
        )
    except FileNotFoundError as exc:
        raise DockerError("there is no docker command on this machine") from exc
    except subprocess.TimeoutExpired as exc:
        raise DockerError(f"docker {' '.join(args[:6])}: not done after {timeout:g} s") from exc
    if done.returncode:
        said = "\n".join(f"{done.stdout}\n{done.stderr}".strip().splitlines()[-25:])
        raise DockerError(f"docker {' '.join(args[:12])}: status {done.returncode}\n{said}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Container:
    id: str
    service: str
    name: str
    state: str
    pid: int
    raw: dict[str, Any]

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def healthy(self) -> bool:
        return bool(self.raw["State"].get("Health", {}).get("Status") == "healthy")

    @property
    def addresses(self) -> dict[str, str]:
        """Network → address."""
        found = self.raw["NetworkSettings"]["Networks"]
        return {name: network["IPAddress"] for name, network in found.items() if network["IPAddress"]}

    @property
    def gateways(self) -> list[str]:
        """The host's addresses on the container's networks, as Docker gives them out (internal ones have them too)."""
        ids = [network["NetworkID"] for network in self.raw["NetworkSettings"]["Networks"].values()]
        networks = json.loads(docker("network", "inspect", *ids)) if ids else []
        return [c["Gateway"] for network in networks for c in network["IPAM"]["Config"] if c.get("Gateway")]

    @property
    def bindings(self) -> list[str]:
        """Every address of this machine that leads into the container, as `ADDRESS:PORT`."""
        found = (self.raw["NetworkSettings"]["Ports"] or {}).values()
        return [f"{b['HostIp']}:{b['HostPort']}" for several in found for b in several or ()]

    def published(self, port: int) -> list[str]:
        """Addresses of this machine that lead to the container's port."""
        bindings = (self.raw["NetworkSettings"]["Ports"] or {}).get(f"{port}/tcp") or []
        return [f"{b['HostIp']}:{b['HostPort']}" for b in bindings if ":" not in b["HostIp"]]


class Stack:
    """Up between `up` and the end of the block; at the end nothing of it is left, also after Ctrl-C."""

    def __init__(self, sabotage: dict[str, Any] | None = None, *, judged: bool = True) -> None:
        """`judged`: with the second respondent and the judge."""
        self.judged = judged
        self.name = f"{PREFIX}{os.getpid()}"
        self.admin_key = secrets.token_hex(16)
        self._folder = tempfile.TemporaryDirectory(prefix=self.name)
        self.folder = folder = Path(self._folder.name)
        # without the two as on a small machine
        small = [] if judged else [ROOT / "compose.small.yaml"]
        # The model is scripted: no GPU is used, even if there is one.
        self._files = [ROOT / "compose.yaml", ROOT / "compose.cpu.yaml", *small, HERE / "compose.test.yaml"]
        if sabotage:
            self._files.append(folder / "sabotage.yaml")
            self._files[-1].write_text(json.dumps(sabotage), encoding="utf-8")
        self.secrets = _fresh_secrets()
        self._settings = {
            **self.secrets,
            "LOCAL2_TAG": TAG,
            "LOCAL2_ADMIN_KEY": self.admin_key,
            # a range, so that gateways can be added
            "LOCAL2_API_PORT": _free_ports(PORTS),
            # Redis takes half of it for its data: little, so that it can be filled
            "LOCAL2_REDIS_MEMORY": "384M",
            "CTEST_RULES": str(_rules(folder)),
            "CTEST_IMAGE": f"local2:{TAG}",
        }
        (folder / "env").write_text("".join(f"{k}={v}\n" for k, v in self._settings.items()), encoding="utf-8")
        self.empty_settings = folder / "local2.yaml"
        self.empty_settings.write_text("{}\n", encoding="utf-8")
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self._env |= {"DOCKER_CLI_HINTS": "false", "COMPOSE_PROGRESS": "plain"}
        self._options = ["--project-directory", str(ROOT), "--project-name", self.name]
        self._options += ["--env-file", str(folder / "env")]
        for file in self._files:
            self._options += ["--file", str(file)]
        self.config: dict[str, Any] = json.loads(self.compose("config", "--format", "json"))
        self.scales: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self.down()
        finally:
            self.close()

    def close(self) -> None:
        """Forgets its settings and secrets; for a stack that was never up."""
        self._folder.cleanup()

    def compose(self, *args: str, timeout: float = 120) -> str:
        return docker("compose", *self._options, *args, timeout=timeout, env=self._env)

    @property
    def image(self) -> str:
        return f"local2:{TAG}"

    @property
    def services(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["services"]
        return found

    @property
    def participants(self) -> list[str]:
        """The services that are participants of the bus."""
        return [name for name, one in self.services.items() if "services." in " ".join(one.get("command") or ())]

    def build(self, timeout: float = 900) -> dict[str, int]:
        """Each image is built by one service and used by the others; their sizes in bytes, by name."""
        builders = {one["image"]: name for name, one in self.services.items() if "build" in one}
        self.compose("build", "--quiet", *builders.values(), timeout=timeout)
        return {name: int(docker("image", "inspect", "--format", "{{.Size}}", name)) for name in builders}

    def up(self, timeout: float = 240, **scales: int) -> float:
        """Starts, or scales what runs, and waits until all is healthy; the seconds it took."""
        began = time.monotonic()
        self.scales |= scales
        args = [f"--scale={name}={number}" for name, number in self.scales.items()]
        while True:
            left = timeout - (time.monotonic() - began)
            try:
                self.compose("up", "--detach", "--no-build", "--no-recreate", "--wait", *args, timeout=max(left, 5))
                break
            except DockerError as exc:
                # Compose gives up at the first check that failed three times, as on a machine that is too busy
                if "is unhealthy" not in str(exc) or left < 15:
                    raise
                time.sleep(2)
        return time.monotonic() - began

    def down(self) -> None:
        """Removes everything, also a throw-away container that was at work when the run was stopped."""
        if ours := docker("ps", "-aq", "--filter", f"label={OURS}={self.name}").split():
            docker("rm", "--force", *ours)
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", timeout=180)

    def leftovers(self) -> list[str]:
        """What carries the project's label after `down`."""
        label = f"label={LABEL}={self.name}"
        found = []
        for kind, args in (("container", ("ps", "-a")), ("network", ("network", "ls")), ("volume", ("volume", "ls"))):
            found += [f"{kind} {one}" for one in docker(*args, "-q", "--filter", label).split()]
        ours = docker("ps", "-aq", "--filter", f"label={OURS}={self.name}").split()
        return found + [f"throw-away container {one}" for one in ours]

    def containers(self, *services: str, stopped: bool = False) -> list[Container]:
        """The containers of these services (none: of all), in the order of their names."""
        listed = docker(
            "ps", "-q", *(["-a"] if stopped else []), "--no-trunc", "--filter", f"label={LABEL}={self.name}"
        )
        ids = listed.split()
        if not ids:
            return []
        try:
            raw = json.loads(docker("inspect", *ids))
        except DockerError:
            # one was removed in between
            return self.containers(*services, stopped=stopped)
        found = [
            Container(
                one["Id"],
                one["Config"]["Labels"]["com.docker.compose.service"],
                one["Name"].lstrip("/").removeprefix(f"{self.name}-"),
                one["State"]["Status"],
                one["State"]["Pid"],
                one,
            )
            for one in raw
            if one["Config"]["Labels"].get("com.docker.compose.oneoff") != "True"
        ]
        return sorted((c for c in found if not services or c.service in services), key=lambda c: c.name)

    def urls(self) -> list[str]:
        """The published addresses of the gateways that run now."""
        return [f"http://{at}" for c in self.containers("gateway") for at in c.published(GATEWAY_PORT)]

    def python(self, network: str, script: Path, *args: str, stdin: str = "", timeout: float = 120, **env: str) -> str:
        """The output of a script in a throw-away container of the project's image on a network (or `container:ID`)."""
        code = script.read_text(encoding="utf-8")
        # the standard input is the data, so the script comes as an argument
        command = [
            "run",
            "--rm",
            "--interactive",
            "--init",
            "--label",
            f"{OURS}={self.name}",
            "--label",
            f"{LABEL}=",
            "--network",
            network,
        ]
        command += ["--log-driver", "none", "--entrypoint", "python"]
        for name, value in env.items():
            command += ["--env", f"{name}={value}"]
        return docker(*command, self.image, "-c", code, *args, stdin=stdin, timeout=timeout)

    def deaths(self, since: float, until: float) -> dict[str, int]:
        """Container name → exit code of what ended in this span."""
        said = docker(
            *("events", "--since", f"{since:.3f}", "--until", f"{until:.3f}", "--filter", "event=die"),
            *("--filter", f"label={LABEL}={self.name}", "--format", "{{json .}}"),
        )
        found = {}
        for line in said.splitlines():
            attributes = json.loads(line)["Actor"]["Attributes"]
            found[attributes["name"].removeprefix(f"{self.name}-")] = int(attributes["exitCode"])
        return found

    def memory(self) -> dict[str, str]:
        """Container name → resident memory, as `docker stats` says."""
        ids = {c.id: c.name for c in self.containers()}
        rows = docker("stats", "--no-stream", "--no-trunc", "--format", "{{.ID}} {{.MemUsage}}", *ids).splitlines()
        return {ids[row.split()[0]]: row.split()[1] for row in rows}

    def logs(self) -> str:
        """What all containers said, those that were taken away excepted."""
        return _plain(self.compose("logs", "--no-color", "--timestamps", timeout=120))

    def complaints(self, lines: int = 60) -> list[str]:
        """What checks of health have failed of late, and the last warnings and errors of the participants."""
        sick = [
            f"{container.name}: health check: {check['Output'].strip()[-200:]}"
            for container in self.containers()
            for check in container.raw["State"].get("Health", {}).get("Log") or ()
            if check["ExitCode"]
        ]
        said = _plain(self.compose("logs", "--no-color", "--no-log-prefix", "--tail", "400", *self.participants))
        quiet = ('"level": "info"', '"level": "debug"')
        return sick + [line[:400] for line in said.splitlines() if not any(mark in line for mark in quiet)][-lines:]


def _plain(text: str) -> str:
    """Without what Compose tells a terminal even where there is none."""
    return text.replace("\x1b[2K", "")


def _fresh_secrets() -> dict[str, str]:
    """A value of our own for every secret that .env.example has a line for."""
    text = (ROOT / ".env.example").read_text(encoding="utf-8")
    names = re.findall(r"^(\w*(?:PASSWORD|SECRET)\w*)=", text, re.MULTILINE)
    return {name: secrets.token_hex(16) for name in names}


def _rules(folder: Path) -> Path:
    """The load's rules before those of the stories, whose last one fits everything."""
    load = yaml.safe_load((HERE / "rules.yaml").read_text(encoding="utf-8"))
    stories = yaml.safe_load((ROOT / "shared/testing/stories_rules.yaml").read_text(encoding="utf-8"))
    path = folder / "rules.yaml"
    path.write_text(json.dumps({"rules": load + stories["rules"]}), encoding="utf-8")
    path.chmod(0o644)
    return path


def _free_ports(number: int) -> str:
    """A range of ports that nobody listens on just now, as Compose writes it."""
    first = 20_000 + os.getpid() % 1_000 * number
    while True:
        try:
            for port in range(first, first + number):
                with socket.create_server(("127.0.0.1", port)):
                    pass
            return f"{first}-{first + number - 1}"
        except OSError:
            first += number
