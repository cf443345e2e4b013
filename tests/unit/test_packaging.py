"""What surrounds the code: compose files, lock, Makefile and documentation say what is there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from packaging.requirements import Requirement

from shared.contracts import MAX_FILE_BODY, SUBJECTS, TOOL_REQUEST, TOOL_RESULT
from shared.records.journal import EntryType

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK: dict[str, Any] = tomllib.loads((ROOT / "uv.lock").read_text())
INSTALL: dict[str, Any] = runpy.run_path(str(ROOT / "deploy" / "install.py"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
# The participants.
OURS = {name: service for name, service in SERVICES.items() if "services." in str(service.get("command"))}
OVERLAYS = sorted(path.name for path in ROOT.glob("compose.*.yaml"))
DRAIN = "60s${LOCAL2_DRAIN:-5}s"


def networks(service: dict[str, Any]) -> list[str]:
    """The names of those that a service is on."""
    return list(service.get("networks", ()))


def loaded(file: str) -> dict[str, dict[str, Any]]:
    """The services of a compose file; Compose's own marks on values (`!reset`) are passed over."""

    class Compose(yaml.SafeLoader):
        pass

    Compose.add_multi_constructor("!", lambda _loader, _mark, _node: None)
    services: dict[str, dict[str, Any]] = yaml.load(read(file), Loader=Compose)["services"]
    return services


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ── containers ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_closed_as_far_as_it_can_be(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["deploy"]["resources"]["limits"]["pids"] > 0


def test_no_container_runs_as_root() -> None:
    users = {name: str(service["user"]) for name, service in SERVICES.items() if "build" not in service}
    assert all(user == "redis" or int(user.partition(":")[0]) > 0 for user in users.values())


def test_every_container_has_a_bound_on_its_memory_and_only_the_model_servers_is_the_users_choice() -> None:
    bounds = {name: service["deploy"]["resources"]["limits"]["memory"] for name, service in SERVICES.items()}
    assert [name for name, bound in bounds.items() if ":-0}" in bound] == ["ollama"]


def test_every_lasting_service_has_a_health_check_and_time_to_stop() -> None:
    lasting = {name: s for name, s in SERVICES.items() if s["restart"] != "no"}
    assert SERVICES.keys() - lasting.keys() == {"config", "ollama-pull", "critic-pull"}
    assert all("healthcheck" in service and "stop_grace_period" in service for service in lasting.values())


def test_a_machine_that_has_no_time_for_a_container_does_not_kill_it() -> None:
    """Leaving takes a moment, or minutes where everything waits for the processor; the engine kills at the limit."""
    limits = [str(service["stop_grace_period"]) for service in SERVICES.values() if service["restart"] != "no"]
    assert all(int(re.match(r"\d+", limit)[0]) >= 60 for limit in limits)  # type: ignore[index]


def test_the_time_to_stop_follows_the_time_to_drain() -> None:
    from shared.participant.service import LEAVING_SECONDS
    from shared.participant.settings import Settings

    assert {service["stop_grace_period"] for service in OURS.values()} == {DRAIN}
    fixed, _, default = DRAIN.partition("s${LOCAL2_DRAIN:-")
    assert float(default.rstrip("}s")) == Settings.model_fields["drain"].default
    assert int(fixed) > LEAVING_SECONDS


def compose_is_there() -> bool:
    if shutil.which("docker") is None:
        return False
    return (
        subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30, check=False).returncode == 0
    )


@pytest.mark.skipif(not compose_is_there(), reason="there is no docker compose here to ask")
@pytest.mark.parametrize(("drain", "seconds"), [("", 65), ("0", 60), ("2.5", 62.5), ("60", 120), ("300", 360)])
def test_compose_adds_the_drain_to_the_time_to_stop(drain: str, seconds: float) -> None:
    environment = {**os.environ, "COMPOSE_FILE": "compose.yaml", **({"LOCAL2_DRAIN": drain} if drain else {})}
    told = subprocess.run(
        ["docker", "compose", "--env-file", "/dev/null", "config", "--format", "json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=True,
    ).stdout  # fmt: skip
    grace = json.loads(told)["services"]["generator"]["stop_grace_period"]
    parts = re.findall(r"([\d.]+)(m|s)", grace)
    assert sum(float(number) * {"m": 60, "s": 1}[unit] for number, unit in parts) == seconds


def test_only_the_gateway_is_published_and_only_on_loopback_unless_asked() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "gateway": ["${LOCAL2_API_BIND:-127.0.0.1}:${LOCAL2_API_PORT:-8765}:8765"],
        # with its profile, and on loopback whatever is asked: it has no accounts
        "grafana": ["127.0.0.1:${LOCAL2_GRAFANA_PORT:-3000}:3000"],
    }
    assert SERVICES["grafana"]["profiles"] == SERVICES["prometheus"]["profiles"] == ["observability"]


def test_every_image_is_pinned_by_its_tag() -> None:
    for file in ("compose.yaml", *OVERLAYS):
        for image in re.findall(r"^\s+image: (.*)$", read(file), re.MULTILINE):
            tag = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", image).rpartition(":")[2]
            assert tag == "-local}" or re.search(r"\d", tag), f"{file}: {image}"
            assert "latest" not in image


def test_everything_that_touches_the_outside_is_redis_other_user_and_on_no_network_with_the_rest() -> None:
    users = {name: _redis_user(service) for name, service in OURS.items()}
    outside = {name for name, service in OURS.items() if "egress" in service["networks"]}
    assert outside == {"web_search", "web_fetch", "mcp"}
    # each is a user of its own, whose password no other has, also when .env has none
    assert {name for name, user in users.items() if user == name} == outside
    passwords = {name: value for name, value in SERVICES["redis"]["environment"].items() if name.endswith("_PASSWORD")}
    assert len(set(passwords.values())) == len(passwords) == 1 + len(outside)
    for name in outside:
        password = passwords[f"LOCAL2_REDIS_{name.upper()}_PASSWORD"]
        assert OURS[name]["environment"]["LOCAL2_REDIS_URL"] == f"redis://{name}:{password}@redis:6379/0"
    assert {name for name, user in users.items() if user == "core"} == OURS.keys() - outside
    assert {name for name in outside if "bus" in SERVICES[name]["networks"]} == set()
    for network, theirs in (("web", {"web_search", "web_fetch"}), ("mcp", {"mcp"})):
        shared = {name for name, service in SERVICES.items() if network in networks(service)}
        assert shared == theirs | {"redis", "prometheus"}


def _redis_user(service: dict[str, Any]) -> str:
    (user,) = re.findall(r"^redis://(\w+):", service["environment"]["LOCAL2_REDIS_URL"])
    return str(user)


def test_every_participant_comes_up_by_itself_and_one_file_leaves_out_what_a_small_machine_cannot_bear() -> None:
    profiles = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    assert profiles == {"prometheus": ["observability"], "grafana": ["observability"]}
    # with servers named, one; without, none
    assert SERVICES["mcp"]["deploy"]["replicas"] == "0${LOCAL2_MCP_SERVERS:+1}"
    small = yaml.safe_load(read("compose.small.yaml"))["services"]
    assert {name for name, service in small.items() if "profiles" in service} == {
        "respondent-b",
        "critic",
        "critic-pull",
    }


def test_nothing_of_the_checkout_is_given_to_a_container() -> None:
    """Its files may be their owner's alone, or on another machine than the engine: they come with an image."""
    for file in ("compose.yaml", *OVERLAYS):
        for name, service in loaded(file).items():
            for volume in service.get("volumes", ()):
                assert not str(volume).startswith("."), (file, name)
            if "config:/etc/local2:ro" in service.get("volumes", ()):
                assert service["depends_on"]["config"] == {"condition": "service_completed_successfully"}, (file, name)
    named = set(re.findall(r"/etc/local2/([\w./-]+)", "".join(map(read, ("compose.yaml", *OVERLAYS))))) - {"ca.pem"}
    assert named
    for path in named:
        assert (ROOT / "deploy" / path).exists()
        assert f"!deploy/{path.partition('/')[0]}" in read(".dockerignore").splitlines()


def test_the_bus_and_the_model_server_have_no_way_out() -> None:
    closed = {name for name, options in COMPOSE["networks"].items() if (options or {}).get("internal")}
    assert closed == {"bus", "web", "mcp", "models", "vectors", "search", "metrics"}
    assert SERVICES["redis"]["networks"] == ["bus", "web", "mcp"]
    assert SERVICES["ollama"]["networks"] == ["models"]
    assert SERVICES["chroma"]["networks"] == ["vectors"]
    assert {name for name, s in SERVICES.items() if "vectors" in networks(s)} == {"chroma", "memory"}
    assert {name for name, s in SERVICES.items() if "egress" in networks(s)} == {
        "ollama-pull",
        "critic-pull",
        "searxng",
        "web_search",
        "web_fetch",
        "mcp",
    }


@pytest.mark.parametrize("name", OURS)
def test_a_participants_command_names_a_module_that_exists(name: str) -> None:
    python, flag, module = OURS[name]["command"]
    assert (python, flag) == ("python", "-m")
    found = importlib.util.find_spec(module)
    assert found is not None
    if found.submodule_search_locations:
        assert importlib.util.find_spec(f"{module}.__main__") is not None


def test_a_workers_health_check_asks_for_its_own_participant() -> None:
    for name, service in OURS.items():
        if name != "gateway":
            assert service["healthcheck"]["test"][-3:] == ["-m", "shared.participant.health", name]


def test_the_gateway_is_healthy_when_it_answers_and_the_bus_knows_of_it() -> None:
    (check,) = SERVICES["gateway"]["healthcheck"]["test"][1:]
    assert "/health'" in check
    assert check.endswith("&& python -m shared.participant.health gateway")


def test_the_image_installs_extras_that_exist_and_runs_as_a_user() -> None:
    dockerfile = read("deploy/Dockerfile")
    installed = set(re.findall(r"--extra (\S+)", dockerfile))
    assert installed
    assert installed <= PROJECT["project"]["optional-dependencies"].keys()
    assert not {"memory", "embedded", "run", "all", "dev"} & installed
    assert re.search(r"^USER (?!root)\w+$", dockerfile, re.MULTILINE)
    assert "@sha256" not in dockerfile


def test_the_image_of_memory_has_the_client_of_the_servers_version() -> None:
    (server,) = re.findall(r"chromadb/chroma:([\d.]+)", SERVICES["chroma"]["image"])
    assert locked()["chromadb"] == locked()["chromadb-client"] == {server}
    assert "--extra memory-client" in read("deploy/Dockerfile")


def test_memory_starts_with_the_client_alone() -> None:
    """The image has `chromadb-client`, which lacks the store itself."""
    code = "import sys; sys.modules['chromadb_rust_bindings'] = None; import services.memory.service"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_image_target_exists_and_the_same_image_is_always_the_same_target() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", read("deploy/Dockerfile"), re.MULTILINE))
    built = {(service["image"], service["build"]["target"]) for service in OURS.values()}
    assert {target for _, target in built} <= targets
    assert len(built) == len({image for image, _ in built})


def variables(text: str) -> Iterator[str]:
    """Names that a compose file takes from the environment: interpolated, or passed on without a value."""
    yield from re.findall(r"(?<!\$)\$\{([A-Z0-9_]+)", text)
    yield from re.findall(r"^\s+([A-Z][A-Z0-9_]+):$", text, re.MULTILINE)


def test_the_example_environment_names_every_variable_and_no_other() -> None:
    used = {name for file in ("compose.yaml", *OVERLAYS) for name in variables(read(file))}
    documented = set(re.findall(r"^(?:# )?([A-Z][A-Z0-9_]+)=", read(".env.example"), re.MULTILINE))
    # Compose itself reads these two.
    assert documented == used | {"COMPOSE_FILE", "COMPOSE_PROFILES"}


def test_an_empty_value_is_never_passed_on_by_the_example_environment() -> None:
    active = re.findall(r"^([A-Z][A-Z0-9_]+)=(.*)$", read(".env.example"), re.MULTILINE)
    assert active
    assert all(value for _, value in active)


COMBINATIONS = [
    line.split()
    for line in re.findall(r"^```combinations\n(.*?)^```$", read("docs/containers.md"), re.MULTILINE | re.DOTALL)[
        0
    ].splitlines()
]


def test_every_file_and_every_profile_is_in_a_documented_combination() -> None:
    files = {file for files, *_ in COMBINATIONS for file in files.split(":")}
    assert files == {"compose.yaml", *OVERLAYS}
    profiles = {name for _, *rest in COMBINATIONS for name in (rest[0].split(",") if rest else [])}
    every = [loaded(file) for file in ("compose.yaml", *OVERLAYS)]
    assert profiles == {name for services in every for s in services.values() for name in s.get("profiles", [])}


def test_the_documented_combinations_are_what_ci_tries() -> None:
    loop = re.findall(r"done < <\((sed .*)\)$", read(".ci/run"), re.MULTILINE)
    assert len(loop) == 1
    tried = subprocess.run(["bash", "-c", loop[0]], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    assert [line.split() for line in tried.stdout.splitlines()] == COMBINATIONS
    assert len(COMBINATIONS) > len(OVERLAYS)


def test_the_page_on_containers_names_every_service_with_its_image_and_networks() -> None:
    rows = re.findall(r"^\| ([\w, -]+) \| (.*?) \| (.*?) \|", read("docs/containers.md"), re.MULTILINE)
    page = {name: (image, joined) for names, image, joined in rows for name in names.split(", ")}
    for name, service in SERVICES.items():
        image, joined = page[name]
        assert joined.split(", ") == (networks(service) or ["none"]), name
        default = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", service["image"]).removesuffix(":${LOCAL2_TAG:-local}")
        assert image.startswith(("the same", f"`{default}`")), name


def config(files: str, profiles: str = "") -> dict[str, dict[str, Any]]:
    """Return the services of these compose files, merged by Compose."""
    environment = {**os.environ, "COMPOSE_FILE": files, "COMPOSE_PROFILES": profiles}
    environment["LOCAL2_KNOWLEDGE_STORE"] = "bolt://graph:7687"
    merged = subprocess.run(
        ["docker", "compose", "--env-file", "/dev/null", "config", "--format", "json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=True,
    ).stdout  # fmt: skip
    services: dict[str, dict[str, Any]] = json.loads(merged)["services"]
    return services


def gpu_driver(files: str, profiles: str) -> str:
    """Return the GPU driver of a combination's model server; `cpu`, or `elsewhere` without a server."""
    for file, driver in (("vllm", "nvidia"), ("remote", "elsewhere"), ("cpu", "cpu"), ("cdi", "cdi"), ("rocm", "rocm")):
        if f"compose.{file}.yaml" in files and not (file == "remote" and "local-model" in profiles):
            return driver
    return "nvidia"


@pytest.mark.skipif(not compose_is_there(), reason="there is no docker compose here to ask")
@pytest.mark.parametrize(("files", "profiles"), [(row[0], row[1] if row[1:] else "") for row in COMBINATIONS])
def test_combination_of_files_gives_the_model_server_its_gpu(files: str, profiles: str) -> None:
    services, wanted = config(files, profiles), gpu_driver(files, profiles)
    reserved = {
        (name, device["driver"])
        for name, service in services.items()
        for device in service["deploy"]["resources"].get("reservations", {}).get("devices", ())
        if device["capabilities"] == ["gpu"]
    }
    server = "vllm" if "vllm" in files else "ollama"
    # The profile local-model adds the other server, with its own reservation.
    other = {("ollama", "nvidia")} if server == "vllm" and "local-model" in profiles else set()
    assert reserved == ({(server, wanted)} if wanted in ("nvidia", "cdi") else set()) | other
    devices = {device["source"] for device in services.get("ollama", {}).get("devices") or ()}
    assert devices == ({"/dev/kfd", "/dev/dri"} if wanted == "rocm" else set())
    # The download warns only about a GPU that the model server does not have.
    given = {service["environment"]["LOCAL2_GPU_GIVEN"] for name, service in services.items() if "pull" in name}
    assert given <= {"" if wanted == "cpu" else "1"}


# ── installation ─────────────────────────────────────────────────────────────────────────────────────────────


def locked() -> dict[str, set[str]]:
    """Return the versions in uv.lock by package; a package may have one for older and one for newer Pythons."""
    found: dict[str, set[str]] = {}
    for package in LOCK["package"]:
        if package["name"] != "local2":
            found.setdefault(package["name"], set()).add(package["version"])
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> Iterator[Requirement]:
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        if requirement.name != "local2":
            yield requirement


def test_lock_names_one_public_index_and_hashes_every_file() -> None:
    packages = [package for package in LOCK["package"] if package["name"] != "local2"]
    assert len({tuple(package["source"].items()) for package in packages}) == 1
    addresses = [*(p["source"]["registry"] for p in packages), *(file["url"] for file in files(packages))]
    # no path of a machine, no mirror, no credentials
    assert len({urlsplit(address).netloc for address in addresses}) == 2
    assert {urlsplit(address).scheme for address in addresses} == {"https"}
    assert not [address for address in addresses if "@" in address]
    assert all(file["hash"].startswith("sha256:") for file in files(packages))


def files(packages: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [file for p in packages for file in (*p.get("wheels", ()), *([p["sdist"]] if "sdist" in p else ()))]


def test_declared_dependencies_are_locked_at_allowed_versions() -> None:
    for requirement in declared():
        assert all(requirement.specifier.contains(version) for version in locked()[canonical(requirement.name)]), (
            requirement
        )


def test_lock_belongs_to_the_declared_dependencies() -> None:
    (own,) = [package for package in LOCK["package"] if package["name"] == "local2"]
    said = {(canonical(one["name"]), one.get("specifier", "")) for one in own["metadata"]["requires-dist"]}
    assert {(canonical(one.name), str(one.specifier)) for one in declared()} == {
        (name, str(Requirement(f"x{specifier}").specifier)) for name, specifier in said if name != "local2"
    }


def test_what_is_installed_here_is_what_the_lock_says() -> None:
    different = []
    for name, versions in locked().items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if installed not in versions:
            different.append(f"{name} {installed}")
    assert not different


@pytest.mark.parametrize(
    ("pip", "environment", "passed_on"),
    [
        pytest.param("", {}, {}, id="nothing configured: uv's own default index"),
        pytest.param(
            "global.index-url='https://mirror/simple'",
            {},
            {"UV_DEFAULT_INDEX": "https://mirror/simple"},
            id="a company's mirror",
        ),
        pytest.param(
            "global.index-url='https://a'\n:env:.index-url='https://b'",
            {},
            {"UV_DEFAULT_INDEX": "https://b"},
            id="the environment goes before a file",
        ),
        pytest.param(
            "global.index-url='https://a'",
            {"UV_DEFAULT_INDEX": "https://own"},
            {},
            id="a variable of uv's own stays",
        ),
        pytest.param(
            "global.extra-index-url='\\nfile:///a\\nfile:///b'",
            {},
            {"UV_INDEX": "file:///a file:///b", "UV_INDEX_STRATEGY": "unsafe-best-match"},
            id="several extra indexes",
        ),
        pytest.param(
            ":env:.find-links='/a /b'\n:env:.cert='/ca.pem'",
            {},
            {"UV_FIND_LINKS": "/a,/b", "SSL_CERT_FILE": "/ca.pem"},
            id="folders of wheels, and an authority",
        ),
    ],
)
def test_pip_configuration_reaches_uv(pip: str, environment: dict[str, str], passed_on: dict[str, str]) -> None:
    assert INSTALL["uv_environment"](pip, environment) == passed_on


def test_files_beside_the_code_are_part_of_the_package() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    beside = [
        path
        for folder in ("shared", "services")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".pyc")
        # the sources of a build, whose result the image takes
        and not path.is_relative_to(ROOT / "services" / "console")
    ]
    assert beside
    assert not [path for path in beside if not any(path.match(pattern) for pattern in patterns)]


def test_make_help_names_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout
    listed = set(re.findall(r"^  make ([a-z-]+) ", shown, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)
    assert listed == set(phony.split())
    assert {"setup", "run", "test", "lint", "types", "stories", "bench", "chaos", "up", "down", "logs"} <= listed


def test_make_without_a_python_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(read("Makefile"))
    for name in ("pyproject.toml", "uv.lock"):
        (tmp_path / name).touch()
    done = subprocess.run(
        ["make", "setup", "PYTHON="], cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode != 0
    assert "no Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_generated_environment_has_its_own_secrets_and_is_private(tmp_path: Path) -> None:
    for name in ("Makefile", ".env.example"):
        (tmp_path / name).write_text(read(name))
    subprocess.run(["make", "env"], cwd=tmp_path, capture_output=True, timeout=20, check=True)
    made = tmp_path / ".env"
    secrets = _secrets(made)
    assert len(set(secrets.values())) == len(secrets) == 5
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in secrets.values())
    assert made.stat().st_mode & 0o077 == 0


def _secrets(environment: Path) -> dict[str, str]:
    found = re.findall(r"^(LOCAL2_REDIS_\w*PASSWORD|SEARXNG_SECRET)=(.*)$", environment.read_text(), re.MULTILINE)
    return dict(found)


def test_an_environment_gets_the_secrets_that_it_lacks(tmp_path: Path) -> None:
    for name in ("Makefile", ".env.example"):
        (tmp_path / name).write_text(read(name))
    made = tmp_path / ".env"
    # no line feed at its end
    made.write_text("LOCAL2_REDIS_PASSWORD=a1\nSEARXNG_SECRET=s1\nOWN=b1")
    for _ in range(2):
        subprocess.run(["make", "env"], cwd=tmp_path, capture_output=True, timeout=20, check=True)
        before, secrets = made.read_text(), _secrets(made)
        assert before.count("\n") == 6
    assert (secrets["LOCAL2_REDIS_PASSWORD"], secrets["SEARXNG_SECRET"]) == ("a1", "s1")
    assert "OWN=b1\n" in made.read_text()
    added = {secrets[f"LOCAL2_REDIS_WEB_{tool}_PASSWORD"] for tool in ("SEARCH", "FETCH")}
    assert len(added) == 2
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in added)


# ── documentation ────────────────────────────────────────────────────────────────────────────────────────────

PAGES = ["README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_to_files_that_exist(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", read(page)):
        assert (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_files_and_make_targets_that_exist(page: str) -> None:
    text = read(page)
    makefile = read("Makefile")
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"`((?:shared|services|deploy|docs)/[\w./-]*\w)`", text):
        if path != "services/world_clock.py":  # the one that the reader is about to write
            assert (ROOT / path).exists(), path


def test_the_bus_page_names_every_subject_with_its_kind() -> None:
    page = read("docs/bus.md")
    for subject in (*SUBJECTS, TOOL_REQUEST, TOOL_RESULT):
        name = subject.name + (".<tool>" if subject in (TOOL_REQUEST, TOOL_RESULT) else "")
        assert f"| `{name}` | {subject.kind} |" in page


def test_the_bus_page_names_every_journal_entry() -> None:
    page = read("docs/bus.md").partition("## The journal")[2]
    assert not [kind.value for kind in EntryType if f"`{kind.value}`" not in page]


def test_a_knob_of_the_generator_that_the_gateway_has_too_is_given_to_both() -> None:
    from services.gateway.settings import GatewaySettings
    from shared.participant.settings import Settings

    own = GatewaySettings.model_fields.keys() - Settings.model_fields.keys()
    both = {f"LOCAL2_{name.upper()}" for name in own} & SERVICES["generator"]["environment"].keys()
    assert "LOCAL2_DEADLINE_SECONDS" in both
    assert both <= SERVICES["gateway"]["environment"].keys()


def test_the_containers_redis_syncs_as_it_is_told() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--appendfsync") + 1] == "${LOCAL2_REDIS_APPENDFSYNC:-everysec}"


def test_what_stands_before_the_gateway_lets_its_largest_body_through() -> None:
    """The gateway refuses larger ones itself, with a sentence."""
    found = [
        *re.findall(r"client_max_body_size (\d+)m;", (ROOT / "deploy/proxy/nginx.conf").read_text()),
        *re.findall(r"body-size: (\d+)m", (ROOT / "deploy/k8s/components/ingress/ingress.yaml").read_text()),
    ]
    assert len(found) == 3
    assert all(int(megabytes) * 1024**2 > MAX_FILE_BODY for megabytes in found)


def test_what_stands_before_the_gateway_lets_a_restore_through_whatever_its_size() -> None:
    nginx = read("deploy/proxy/nginx.conf").partition("location = /restore {")[2].partition("}")[0]
    assert "client_max_body_size 0;" in nginx
    assert "proxy_request_buffering off;" in nginx
    one, other = yaml.safe_load_all(read("deploy/k8s/components/ingress/ingress.yaml"))
    assert other["spec"]["rules"][0]["http"]["paths"][0]["path"] == "/restore"
    assert other["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"] == "0"
    assert one["spec"]["ingressClassName"] == other["spec"]["ingressClassName"]
