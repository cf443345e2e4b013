"""Scripts that `make compose-test` runs inside the product's image."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from support.acl_redis import AclRedis, acl_redis

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_TEST = ROOT / "tests" / "compose"


@pytest.mark.parametrize("name", ["audit", "ballast", "probe"])
def test_compose_script_imports_only_packages_of_the_image(name: str) -> None:
    tree = ast.parse((COMPOSE_TEST / f"{name}.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {"shared", "services"}
    assert {module.partition(".")[0] for module in imported} <= sys.stdlib_module_names | own


def ballast(server: AclRedis, what: str) -> None:
    subprocess.run(
        [sys.executable, "-c", (COMPOSE_TEST / "ballast.py").read_text(encoding="utf-8"), what],
        cwd=ROOT, env={**os.environ, "LOCAL2_REDIS_URL": server.core}, check=True, timeout=60,
    )  # fmt: skip


def test_ballast_fills_redis_above_its_limit_and_empties_it(tmp_path: Path) -> None:
    limit = ("--maxmemory", "40mb")
    with acl_redis(tmp_path, arguments=limit) as server, redis.Redis.from_url(server.core) as client:
        client.set("local2:kept", "1")
        ballast(server, "fill")
        with pytest.raises(redis.OutOfMemoryError):
            client.set("local2:other", "1")
        ballast(server, "drop")
        client.set("local2:other", "1")
        assert sorted(client.scan_iter("*")) == [b"local2:kept", b"local2:other"]
