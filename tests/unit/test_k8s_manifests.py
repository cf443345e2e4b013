"""The Kubernetes manifests: built, valid by Kubernetes' own schemas, and true to the rest of the project."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.kustomize import Resource, build, containers, normal

from shared import key_prefix
from shared.participant.settings import Settings

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml"))
# The oldest Kubernetes that is supported, and the newest whose schemas are at hand.
VERSIONS = ("1.27", "1.37")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@cache
def built(overlay: str) -> list[Resource]:
    return build(K8S / "overlays" / overlay)


def workloads(overlay: str) -> Iterator[tuple[str, Resource]]:
    for resource in built(overlay):
        if "template" in resource.get("spec", {}):
            yield resource["metadata"]["name"], resource


def participants(overlay: str) -> dict[str, Resource]:
    """Deployments of participants by the participant's name."""
    found = {}
    for _, resource in workloads(overlay):
        labels = resource["spec"]["template"]["metadata"]["labels"]
        if labels.get("local2/kind") == "participant":
            found[labels["local2/participant"]] = resource
    return found


def settings_of(overlay: str) -> dict[str, str]:
    (found,) = (r["data"] for r in built(overlay) if r["kind"] == "ConfigMap" and r["metadata"]["name"] == "settings")
    return found


@cache
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"])


# ── built and valid ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_is_valid_by_the_schemas_of_kubernetes(overlay: str, version: str) -> None:
    checked = [resource for resource in built(overlay) if not resource["apiVersion"].startswith("keda.sh/")]
    for resource in checked:
        kubernetes_validate.validate(resource, version, strict=True)
    assert len(checked) > 20


def test_the_schemas_refuse_a_misspelt_field() -> None:
    resource = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x"}, "spek": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(resource, VERSIONS[-1], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl: the overlays were built by our resolver only")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_the_same_resources(overlay: str) -> None:
    command = ["kubectl", "kustomize", str(K8S / "overlays" / overlay)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert normal(built(overlay)) == normal(list(yaml.safe_load_all(output)))


KUBECTL = r"""#!/bin/sh
# a cluster of one Secret, whose keys are the lines of a file
case "$*" in
*"get secret"*) cat "$STATE/keys" 2>/dev/null || true ;;
*create*--filename*) cat >"$STATE/secret.yaml" ;;
*patch*) while [ "$1" != --patch-file ]; do shift; done; cat "$2" >"$STATE/patch.yaml" ;;
esac
"""
REDIS = {
    **dict.fromkeys(("REDIS_URL", "REDIS_WEB_SEARCH_URL", "REDIS_WEB_FETCH_URL", "REDIS_MCP_URL"), "rediss://u:p@r:1/0"),
    "REDIS_ADDRESS": "r:1", "REDIS_USER": "u", "REDIS_PASSWORD": "p",
}  # fmt: skip


def secrets(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kubectl = folder / "kubectl"
    kubectl.write_text(KUBECTL, encoding="utf-8")
    kubectl.chmod(0o755)
    return subprocess.run(
        [K8S / "secrets.sh", "elsewhere"],
        env={"PATH": f"{folder}:/usr/bin:/bin", "STATE": str(folder), "TMPDIR": str(folder), **environment},
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip


def test_the_secret_is_made_with_fresh_values_that_fit_together(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        assert secrets(tmp_path).returncode == 0
        secret = yaml.safe_load((tmp_path / "secret.yaml").read_text(encoding="utf-8"))
        kubernetes_validate.validate(secret, VERSIONS[-1], strict=True)
        seen.append(secret["stringData"])
    one, two = seen
    assert one["redis-url"] == f"redis://core:{one['redis-password']}@redis:6379/0"
    for name in ("web-search", "web-fetch", "mcp"):
        user, password = name.replace("-", "_"), one[f"redis-{name}-password"]
        assert one[f"redis-{name}-url"] == f"redis://{user}:{password}@redis:6379/0"
    assert one["scaler-user"] == "scaler"
    assert one["redis-address"] == "redis.elsewhere.svc:6379"
    fresh = [key for key in one if key.endswith(("-password", "-secret", "-key"))]
    assert len(fresh) == 7
    for key in fresh:
        assert re.fullmatch(r"(l2_)?[0-9a-f]{48}", one[key])
        assert one[key] != two[key]


def test_a_secret_of_an_earlier_release_gets_what_it_lacks_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("admin-key\nredis-address\nredis-password\nredis-url\nsearxng-secret\n")
    assert secrets(tmp_path).returncode == 0
    added = yaml.safe_load((tmp_path / "patch.yaml").read_text())["stringData"]
    users = [f"redis-{name}-{what}" for name in ("web-search", "web-fetch", "mcp") for what in ("url", "password")]
    assert set(added) == {"scaler-user", "scaler-password", *users}
    assert added["redis-mcp-password"] in added["redis-mcp-url"]
    (tmp_path / "patch.yaml").unlink()
    (tmp_path / "keys").write_text(
        "\n".join({*added, "admin-key", "redis-address", "redis-password", "redis-url", "searxng-secret"})
    )
    assert "has everything" in secrets(tmp_path).stdout
    assert not (tmp_path / "patch.yaml").exists()


def test_one_half_of_a_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("redis-url\nredis-mcp-url\n")
    done = secrets(tmp_path)
    assert done.returncode == 1
    assert "redis-mcp-url and redis-mcp-password" in done.stderr


def test_a_redis_elsewhere_is_named_whole_or_refused(tmp_path: Path) -> None:
    assert secrets(tmp_path, **REDIS).returncode == 0
    made = yaml.safe_load((tmp_path / "secret.yaml").read_text())["stringData"]
    assert (made["scaler-user"], made["redis-address"], made["redis-mcp-url"]) == ("u", "r:1", "rediss://u:p@r:1/0")
    (tmp_path / "secret.yaml").unlink()
    for name in REDIS:
        done = secrets(tmp_path, **{key: value for key, value in REDIS.items() if key != name})
        assert done.returncode == 2
        assert f"not set: {name}." in done.stderr
    for url in ("rediss://r:1/0", "rediss://:p@r:1/0"):
        done = secrets(tmp_path, **{**REDIS, "REDIS_URL": url})
        assert (done.returncode, "has a user and a password" in done.stderr) == (2, True)
        assert ":p@" not in done.stderr
    assert not (tmp_path / "secret.yaml").exists()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_that_is_named_is_there(overlay: str) -> None:
    names = {(r["kind"], r["metadata"]["name"]) for r in built(overlay)}
    secret = (K8S / "secrets.sh").read_text(encoding="utf-8")
    for name, resource in workloads(overlay):
        spec = resource["spec"]["template"]["spec"]
        for volume in spec.get("volumes", []):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names, name
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names, name
        for container in containers(resource):
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            claims = {claim["metadata"]["name"] for claim in resource["spec"].get("volumeClaimTemplates", [])}
            assert mounted == {volume["name"] for volume in spec.get("volumes", [])} | claims, name
            for source in container.get("envFrom", []):
                assert ("ConfigMap", source["configMapRef"]["name"]) in names, name
            for variable in container.get("env", []):
                key = variable.get("valueFrom", {}).get("secretKeyRef")
                if key and not key.get("optional"):
                    assert key["name"] == "local2"
                    assert f"\n{key['key']} " in secret, (name, key)
        assert resource["spec"].get("selector", {}).get("matchLabels", {}).items() <= (
            resource["spec"]["template"]["metadata"]["labels"].items()
        ), name
    for resource in built(overlay):
        if resource["kind"] == "Service":
            assert names & {("Deployment", resource["metadata"]["name"]), ("StatefulSet", resource["metadata"]["name"])}


# ── closed ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_is_root_or_can_become_it(overlay: str) -> None:
    for name, resource in workloads(overlay):
        spec = resource["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert not [volume for volume in spec.get("volumes", []) if "hostPath" in volume], name
        for container in containers(resource):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_has_requests_and_limits(overlay: str) -> None:
    for name, resource in workloads(overlay):
        for container in containers(resource):
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][kind].keys(), name
        for volume in resource["spec"]["template"]["spec"].get("volumes", []):
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), (name, volume)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_that_stays_has_three_probes(overlay: str) -> None:
    for name, resource in workloads(overlay):
        if resource["kind"] != "Job":
            for container in containers(resource):
                assert set(PROBES) <= container.keys(), name


def test_participants_run_as_the_user_of_the_image() -> None:
    user = re.search(r"useradd --uid (\d+)", (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8"))
    assert user
    for resource in participants("gpu").values():
        assert resource["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == int(user[1])


def policies(overlay: str) -> dict[str, dict[str, Any]]:
    return {r["metadata"]["name"]: r["spec"] for r in built(overlay) if r["kind"] == "NetworkPolicy"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_what_must_reach_out_does_and_only_to_public_addresses(overlay: str) -> None:
    spec = policies(overlay)
    assert spec["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    outward = [name for name, policy in spec.items() if "0.0.0.0/0" in str(policy) or "::/" in str(policy)]
    assert outward == ["web"]
    left_out = str(spec["web"])
    for private in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10", "127.0.0.0/8"):
        assert private in left_out
    reaching = {
        name
        for name, resource in workloads(overlay)
        if resource["spec"]["template"]["metadata"]["labels"].get("local2/web") == "true"
    }
    assert reaching - {"ollama-pull", "mcp"} == {"web-search", "web-fetch", "searxng"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_gateway_is_open_to_everybody(overlay: str) -> None:
    for name, policy in policies(overlay).items():
        for rule in policy.get("ingress", []):
            assert ("from" in rule) is (name != "gateway"), name
    services = [resource["spec"] for resource in built(overlay) if resource["kind"] == "Service"]
    assert {service.get("type", "ClusterIP") for service in services} == {"ClusterIP"}


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "ollama"])
def test_every_participant_can_be_scraped_from_one_namespace_and_nowhere_else(overlay: str) -> None:
    settings = settings_of(overlay)
    for name, deployment in participants(overlay).items():
        (container,) = containers(deployment)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["metrics"] == int(settings["LOCAL2_METRICS_PORT"]), name
    assert settings["LOCAL2_METRICS_HOST"] == "0.0.0.0"
    assert policies(overlay)["metrics"] == {
        "podSelector": {"matchLabels": {"local2/kind": "participant"}},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                "ports": [{"protocol": "TCP", "port": "metrics"}],
            }
        ],
    }
    services = [str(resource) for resource in built(overlay) if resource["kind"] in ("Service", "Ingress")]
    assert "metrics" not in str(services)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_policys_port_is_one_of_the_pods_it_speaks_of(overlay: str) -> None:
    ports = {
        (name, port["name"])
        for name, resource in workloads(overlay)
        for container in containers(resource)
        for port in container.get("ports", [])
    }
    checked = 0
    for policy in policies(overlay).values():
        for rule in policy.get("egress", []):
            for peer in rule.get("to", []):
                app = peer.get("podSelector", {}).get("matchLabels", {}).get("app")
                for port in rule["ports"] if app else []:
                    assert (app, port["port"]) in ports
                    checked += 1
    assert checked >= 2


# ── as in the rest of the project ────────────────────────────────────────────────────────────────────────────────


def test_every_participant_of_compose_is_here_and_started_in_the_same_way() -> None:
    here = {name: next(containers(deployment)) for name, deployment in participants("external-model").items()}
    there = {name: part["command"] for name, part in compose().items() if "services." in str(part.get("command"))}
    assert set(there) <= set(here)
    for name, command in there.items():
        assert here[name]["command"] + here[name]["args"] == command
        assert here[name]["image"].partition(":")[0] == compose()[name]["image"].partition(":")[0]


def test_every_participant_has_a_program() -> None:
    for deployment in participants("external-model").values():
        for container in containers(deployment):
            assert importlib.util.find_spec(container["args"][0] + ".__main__")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_those_of_compose(overlay: str) -> None:
    there = {re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", part["image"]) for part in compose().values()}
    for name, resource in workloads(overlay):
        for container in containers(resource):
            assert container["image"] in there, name


@cache
def variables() -> set[str]:
    """Every variable that a participant hears."""
    known = set()
    for found in pkgutil.walk_packages([str(ROOT / "services")], "services."):
        if found.name.count(".") == 2 and found.name.rpartition(".")[2] in ("service", "settings"):
            importlib.import_module(found.name)
    todo: list[type[Settings]] = [Settings]
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        module = cls.__module__.split(".")
        owners = {"", module[1].upper() + "_", "GENERATOR_", "RESPONDENT_B_"} if module[0] == "services" else {""}
        for name, info in cls.model_fields.items():
            choices = getattr(info.validation_alias, "choices", [info.validation_alias])
            known |= {str(choice) for choice in choices if choice}
            known |= {f"LOCAL2_{owner}{name.upper()}" for owner in owners}
    return known


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_variable_is_a_setting(overlay: str) -> None:
    given = set(settings_of(overlay))
    for deployment in participants(overlay).values():
        given |= {variable["name"] for container in containers(deployment) for variable in container["env"]}
    assert given - {"PARTICIPANT", key_prefix.VARIABLE} <= variables()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_key_prefix_of_the_settings_is_the_one_of_redis_and_keda(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(K8S.parent, tmp_path / "deploy")
    settings = tmp_path / "deploy" / "k8s" / "base" / "settings.env"
    settings.write_text(settings.read_text().replace("LOCAL2_KEY_PREFIX=local2:", "LOCAL2_KEY_PREFIX={team-2}:"))
    resources = build(tmp_path / "deploy" / "k8s" / "overlays" / overlay)
    servers = [one for one in resources if one["kind"] == "StatefulSet" and one["metadata"]["name"] == "redis"]
    assert bool(servers) is (overlay != "managed-redis")
    for server in servers:
        (container,) = containers(server)
        assert {"name": "LOCAL2_KEY_PREFIX", "value": "{team-2}:"} in container["env"]
    scaled = [one for one in resources if one["kind"] == "ScaledObject"]
    assert bool(scaled) is (overlay != "ollama")
    for one in scaled:
        for trigger in one["spec"]["triggers"]:
            assert re.fullmatch(r"\{team-2\}:(query\.received|tool\.request\.\w+)", trigger["metadata"]["stream"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_stopping_pod_has_time_to_drain(overlay: str) -> None:
    drain = float(settings_of(overlay)["LOCAL2_DRAIN"])
    for name, deployment in participants(overlay).items():
        spec = deployment["spec"]["template"]["spec"]
        # preStop runs within the grace period; after draining come the hand-over and the good-byes
        assert spec["terminationGracePeriodSeconds"] >= drain + 5 + 10, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_for_the_participant_that_runs_there(overlay: str) -> None:
    for name, deployment in participants(overlay).items():
        (container,) = containers(deployment)
        if name == "gateway":
            assert [container[probe]["httpGet"]["path"] for probe in PROBES] == [
                "/health",
                "/health",
                "/ready?for=gateway",
            ]
            continue
        (variable,) = (v for v in container["env"] if v["name"] == "PARTICIPANT")
        assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['local2/participant']"
        checks = ["--alive ", "--alive ", ""]
        assert [container[probe]["exec"]["command"][2] for probe in PROBES] == [
            f'exec python -m shared.participant.health {alive}"$PARTICIPANT"' for alive in checks
        ]
        # Python has to start first
        assert min(container[probe]["timeoutSeconds"] for probe in PROBES) >= 10


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_runs_in_several_replicas_is_never_evicted_at_once(overlay: str) -> None:
    budgets = {r["spec"]["selector"]["matchLabels"]["app"]: r["spec"] for r in built(overlay) if "Budget" in r["kind"]}
    least = {r["metadata"]["name"]: r["spec"]["minReplicaCount"] for r in built(overlay) if r["kind"] == "ScaledObject"}
    for name, deployment in participants(overlay).items():
        app = deployment["metadata"]["name"]
        # the API server takes a missing number for one
        number = least.get(app, deployment["spec"].get("replicas", 1))
        assert (number > 1) is (app in budgets), name
        assert budgets.get(app, {"maxUnavailable": 1})["maxUnavailable"] == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_another_model_in_the_settings_rolls_what_downloads_it(overlay: str) -> None:
    pulls = [resource for name, resource in workloads(overlay) if name == "ollama-pull"]
    assert bool(pulls) is (overlay in ("gpu", "ollama"))
    for pull in pulls:
        # a Job's template cannot be changed, and the settings' name changes with what they say
        assert pull["kind"] == "Deployment"
        (container,) = containers(pull)
        assert container["envFrom"] == [{"configMapRef": {"name": "settings"}}]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_the_server_fills_in_is_written_out_where_appliers_would_quarrel(overlay: str) -> None:
    for name, resource in workloads(overlay):
        for container in containers(resource):
            for variable in container.get("env", []):
                field = variable.get("valueFrom", {}).get("fieldRef")
                assert field is None or field["apiVersion"] == "v1", name
        for claim in resource["spec"].get("volumeClaimTemplates", []):
            assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim"), name
            assert claim["spec"]["volumeMode"] == "Filesystem", name


@pytest.mark.parametrize("overlay", ["gpu", "ollama", "external-model"])
def test_redis_starts_with_a_secret_of_an_earlier_release(overlay: str) -> None:
    (redis,) = (resource for name, resource in workloads(overlay) if name == "redis")
    (container,) = containers(redis)
    keys = {v["name"]: v["valueFrom"]["secretKeyRef"] for v in container["env"] if "valueFrom" in v}
    needed = {name for name, key in keys.items() if not key.get("optional")}
    assert needed == {"LOCAL2_REDIS_PASSWORD", "REDISCLI_AUTH"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_are_resolved_by_the_servers_of_usual_clusters(overlay: str) -> None:
    said = str(policies(overlay)["names"]["egress"])
    for server in ("kube-dns", "node-local-dns", "169.254.20.10/32", "openshift-dns"):
        assert server in said
