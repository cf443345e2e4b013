"""What each container can reach and what it may do, against what it should: one wrong cell fails."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import outside
from stack import GATEWAY_PORT, Container, DockerError, Stack, docker

PROBE = Path(__file__).resolve().parent / "probe.py"
# Where a service listens, and where its metadata are on most clouds.
PORTS = {"redis": 6379, "ollama": 11434, "chroma": 8000, "searxng": 8080, "gateway": GATEWAY_PORT}
METADATA = ("169.254.169.254", 80)

# The services of the stack that each one reaches, itself left out. What is not named here must not be reached.
REACHES: dict[str, set[str]] = {
    "redis": {"gateway"},
    "gateway": {"redis"},
    "generator": {"redis", "gateway", "ollama"},
    "respondent-b": {"redis", "gateway", "ollama"},
    "memory": {"redis", "gateway", "ollama", "chroma"},
    "knowledge": {"redis", "gateway", "ollama"},
    "reward": {"redis", "gateway"},
    "critic": {"redis", "gateway", "ollama"},
    "web_search": {"redis", "searxng"},
    "web_fetch": {"redis"},
    "searxng": set(),
    "ollama": set(),
    "chroma": set(),
}
# Those that get to the internet; all others must not.
OUT = {"web_search", "web_fetch", "searxng"}
# A way to other networks of the host, if only for the published port's answers.
ROUTED = OUT | {"gateway"}
# How much of the host's memory the model takes, the model decides.
UNLIMITED = {"ollama"}
# Those that have done their work and ended.
ONE_SHOT = {"config", "ollama-pull", "critic-pull"}
# Containers of the test itself.
OURS = {"world"}

_LOOK = r"""
id -u
( : > /forbidden ) 2>/dev/null && echo written || echo read-only
grep -hE '^(CapEff|NoNewPrivs|Uid):' /proc/[0-9]*/status | sort -u | tr '\t' ' '
"""


@dataclass(frozen=True, slots=True)
class Locked:
    """How a container is closed; capabilities and flags are the worst of all its processes."""

    users: frozenset[int]
    read_only: bool
    capabilities: int
    no_new_privileges: bool
    memory: int
    pids: int

    def wrong(self, *, unlimited: bool) -> list[str]:
        found = []
        if 0 in self.users:
            found.append("runs as root")
        if not self.read_only:
            found.append("its root file system can be written")
        if self.capabilities:
            found.append(f"has capabilities {self.capabilities:x}")
        if not self.no_new_privileges:
            found.append("may gain privileges")
        if not self.memory and not unlimited:
            found.append("has no memory limit")
        if not self.pids:
            found.append("has no pid limit")
        return found

    def shown(self) -> str:
        users = ",".join(map(str, sorted(self.users)))
        return (
            f"{users:>7}  {'yes' if self.read_only else 'NO':<9}  {self.capabilities:>6x}  "
            f"{'yes' if self.no_new_privileges else 'NO':<12}  {self.memory >> 20:>5} M  {self.pids:>5}"
        )


LOCKED_HEADER = f"{'user':>7}  {'read-only':<9}  {'CapEff':>6}  {'NoNewPrivs':<12}  {'memory':>7}  {'pids':>5}"


def locked(container: Container) -> Locked:
    lines = docker("exec", container.id, "sh", "-c", _LOOK).split("\n")
    users, capabilities, privileges = {int(lines[0])}, 0, True
    for line in lines[2:]:
        name, _, value = line.partition(":")
        match name:
            case "Uid":
                users |= set(map(int, value.split()))
            case "CapEff":
                capabilities |= int(value, 16)
            case "NoNewPrivs":
                privileges = privileges and value.strip() == "1"
    host = container.raw["HostConfig"]
    return Locked(
        frozenset(users), lines[1] == "read-only", capabilities, privileges, host["Memory"], host["PidsLimit"] or 0
    )


@dataclass(frozen=True, slots=True)
class Row:
    service: str
    route: bool
    cells: dict[str, str]


@contextlib.contextmanager
def host_listener() -> Iterator[int]:
    """A port of this machine that is open on all its addresses, as many services' are."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        yield listener.getsockname()[1]


def targets(stack: Stack, container: Container, internet: tuple[str, int] | None) -> dict[str, list[tuple[str, int]]]:
    """Every address that leads to a service: its name, and its number in each network, whoever is told of it."""
    found: dict[str, list[tuple[str, int]]] = {}
    published: list[tuple[str, int]] = []
    for other in stack.containers():
        if other.service in PORTS:
            port = PORTS[other.service]
            numbers = [(address, port) for address in other.addresses.values()]
            found.setdefault(other.service, [(other.service, port)]).extend(numbers)
        for at in other.published(GATEWAY_PORT):
            published += [(host, int(at.rpartition(":")[2])) for host in container.gateways]
    found["published port, at the host's address"] = published
    if internet is not None:
        found["internet"] = [internet]
    found["metadata"] = [METADATA]
    return found


def examine(stack: Stack, container: Container, internet: tuple[str, int] | None, host_port: int) -> Row:
    wanted = targets(stack, container, internet)
    wanted["any port of the host"] = [(address, host_port) for address in container.gateways]
    said = stack.python(f"container:{container.id}", PROBE, stdin=json.dumps({"targets": wanted}), timeout=60)
    found = json.loads(said)
    return Row(container.service, found["route"], found["reach"])


def wrong_cells(row: Row) -> list[str]:
    """What the row has that it should not have, and the other way round."""
    reaches = REACHES.get(row.service)
    if reaches is None:
        return [f"{row.service}: nothing says what it may reach"]
    found = []
    if row.route != (row.service in ROUTED):
        found.append(f"{row.service}: {'has a' if row.route else 'has no'} default route")
    for name, answer in row.cells.items():
        if name == "internet":
            should = row.service in OUT
        elif name in PORTS:
            should = name in reaches or name == row.service
        elif name == "metadata" and row.service in ROUTED:
            continue  # the host's network decides; what the model can do with it is asked of web_fetch itself
        elif name == "any port of the host":
            continue  # Docker's bridges have an address of the host: its firewall decides
        else:
            should = False
        if (answer == "open") != should:
            found.append(f"{row.service} → {name}: {answer}, should be {'open' if should else 'closed'}")
    return found


def table(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    shown = [f"{'from':<13}" + "".join(f"{_short(name):>15}" for name in names) + f"{'default route':>15}"]
    for row in rows:
        cells = "".join(f"{row.cells.get(name, '-').replace('open', 'OPEN'):>15}" for name in names)
        shown.append(f"{row.service:<13}{cells}{'yes' if row.route else 'none':>15}")
    return shown


def _short(name: str) -> str:
    return {"published port, at the host's address": "published port", "any port of the host": "host, any port"}.get(
        name, name
    )


@contextlib.contextmanager
def internet(stack: Stack, given: tuple[str, int] | None) -> Iterator[tuple[str, int] | None]:
    """Something beyond the host: what the caller named, or a machine made for it; None where neither can be had."""
    if given is not None or not outside.possible():
        yield given
        return
    with outside.Outside(stack) as there:
        yield there.address, there.port


def survey(stack: Stack, given: tuple[str, int] | None) -> tuple[list[str], list[str], bool]:
    """Lines to print, what is wrong, and whether an address outside could be tried."""
    lines, wrong = [], []
    one_each = {c.service: c for c in stack.containers() if c.service not in OURS}
    with internet(stack, given) as there, host_listener() as host_port, ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda c: examine(stack, c, there, host_port), one_each.values()))
    lines += table(rows)
    for row in rows:
        wrong += wrong_cells(row)
    lines += ["", f"{'':<13}{LOCKED_HEADER}"]
    for service, container in one_each.items():
        try:
            found = locked(container)
        except DockerError as exc:
            wrong.append(f"{service}: cannot be looked into: {exc}")
            continue
        lines.append(f"{service:<13}{found.shown()}")
        wrong += [f"{service}: {what}" for what in found.wrong(unlimited=service in UNLIMITED)]
    for container in stack.containers():
        allowed = "127.0.0.1:" if container.service == "gateway" else "nowhere"
        wrong += [f"{container.name}: published on {at}" for at in container.bindings if not at.startswith(allowed)]
    none = {name for name, service in stack.services.items() if service.get("deploy", {}).get("replicas") == 0}
    missing = set(stack.services) - set(one_each) - OURS - ONE_SHOT - none
    wrong += [f"{service}: has no container" for service in sorted(missing)]
    return lines, wrong, there is not None


# Addresses that a model may ask for and must not get, through the tool itself …
FORBIDDEN = (
    "http://redis/",
    f"http://gateway:{GATEWAY_PORT}/health",
    "http://169.254.169.254/latest/meta-data/",
    "http://127.0.0.1/",
    "http://[::ffff:169.254.169.254]/",
)
# … and how it says so: refused by address, or without a name on the networks that it is on.
REFUSALS = ("blocked: ", "fetch error: the name ")
