"""KEDA's objects: of the form that KEDA documents, and about streams and groups that exist."""

from __future__ import annotations

import copy
import math
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.kustomize import Resource, build

from services.generator.settings import GeneratorSettings
from shared.contracts import QUERY_RECEIVED, TOOL_REQUEST
from shared.participant.settings import Settings

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
SCALED = ("gpu", "external-model", "managed-redis")
NUMBER = {"type": "string", "pattern": "^[1-9][0-9]*$"}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def policy() -> dict[str, Any]:
    one = closed(
        ["type", "value", "periodSeconds"],
        type={"enum": ["Pods", "Percent"]},
        value={"type": "integer", "minimum": 1},
        periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
    )
    window = {"type": "integer", "minimum": 0, "maximum": 3600}
    return closed(["policies"], stabilizationWindowSeconds=window, policies={"type": "array", "items": one})


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
MORE = {"type": "integer", "minimum": 1}
META = closed(["name", "namespace"], name=TEXT, namespace=TEXT, labels={"type": "object"})
# What of KEDA's two definitions is used here, with the limits that they set, and the fields of its redis-streams scaler
# (https://keda.sh/docs/2.17/scalers/redis-streams/): keda.sh_scaledobjects.yaml and keda.sh_triggerauthentications.yaml
# in config/crd/bases of kedacore/keda, which https://github.com/datreeio/CRDs-catalog publishes as JSON Schema
# (keda.sh/scaledobject_v1alpha1.json at 0382106). Read and written down on 23 November 2026: no package of PyPI or npm
# carries a definition with scalingModifiers. Closed where KEDA's are, and stricter where a field has one use.
TRIGGER = closed(
    ["name", "type", "metadata", "authenticationRef"],
    name={"type": "string", "pattern": "^[a-z_]+$"},
    type={"const": "redis-streams"},
    metadata={
        **closed(
            ["stream"],
            stream=TEXT,
            consumerGroup=TEXT,
            lagCount=NUMBER,
            pendingEntriesCount=NUMBER,
            streamLength=NUMBER,
        ),
        # lagCount wins over pendingEntriesCount in one trigger, and neither is read without a group
        "oneOf": [
            {"required": ["consumerGroup", "lagCount"]},
            {"required": ["consumerGroup", "pendingEntriesCount"]},
            {"required": ["streamLength"], "not": {"required": ["consumerGroup"]}},
        ],
    },
    authenticationRef=closed(["name"], name=TEXT),
)
SCALED_OBJECT = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "ScaledObject"},
    metadata=META,
    spec=closed(
        ["scaleTargetRef", "triggers", "minReplicaCount", "maxReplicaCount"],
        scaleTargetRef=closed(["name"], name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=MORE,
        pollingInterval=MORE,
        fallback=closed(
            ["failureThreshold", "replicas"],
            failureThreshold=COUNT,
            replicas=COUNT,
            behavior={
                "enum": [
                    "static",
                    "currentReplicas",
                    "currentReplicasIfHigher",
                    "currentReplicasIfLower",
                    "scalingModifiers",
                ]
            },
        ),
        triggers={"type": "array", "minItems": 1, "items": TRIGGER},
        advanced=closed(
            ["scalingModifiers"],
            scalingModifiers=closed(
                ["formula", "target"], formula=TEXT, target=NUMBER, metricType={"enum": ["AverageValue", "Value"]}
            ),
            horizontalPodAutoscalerConfig=closed(
                ["behavior"], behavior=closed([], scaleUp=policy(), scaleDown=policy())
            ),
        ),
    ),
)
AUTHENTICATION = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "TriggerAuthentication"},
    metadata=META,
    spec=closed(
        ["secretTargetRef"],
        secretTargetRef={
            "type": "array",
            "items": closed(
                ["parameter", "name", "key"],
                parameter={"enum": ["address", "username", "password", "tls"]},
                name=TEXT,
                key=TEXT,
            ),
        },
    ),
)


@cache
def built(overlay: str) -> list[Resource]:
    return build(K8S / "overlays" / overlay)


def scales(resource: Resource) -> bool:
    return bool(resource["kind"] == "ScaledObject")


def scaled(overlay: str) -> dict[str, dict[str, Any]]:
    return {r["metadata"]["name"]: r["spec"] for r in built(overlay) if scales(r)}


def settings_of(resources: list[Resource]) -> dict[str, str]:
    (found,) = (r["data"] for r in resources if r["kind"] == "ConfigMap" and r["metadata"]["name"] == "settings")
    return dict(found)


@pytest.mark.parametrize("overlay", SCALED)
def test_every_object_has_the_form_that_keda_documents(overlay: str) -> None:
    schemas = {"ScaledObject": SCALED_OBJECT, "TriggerAuthentication": AUTHENTICATION}
    found = [resource for resource in built(overlay) if resource["apiVersion"].startswith("keda.sh/")]
    assert {resource["kind"] for resource in found} == set(schemas)
    for resource in found:
        jsonschema.validate(resource, schemas[resource["kind"]])


@pytest.mark.parametrize("overlay", SCALED)
def test_what_kedas_webhook_looks_at_beyond_the_form_holds(overlay: str) -> None:
    """Its checks of a ScaledObject (apis/keda/v1alpha1/scaledobject_types.go and scaledobject_webhook.go)."""
    targets = [spec["scaleTargetRef"]["name"] for spec in scaled(overlay).values()]
    assert len(set(targets)) == len(targets), "two of them would fight over one Deployment"
    for spec in scaled(overlay).values():
        assert spec["minReplicaCount"] <= spec["maxReplicaCount"]
        modifiers, names = spec["advanced"]["scalingModifiers"], [trigger["name"] for trigger in spec["triggers"]]
        # a fallback with a formula is refused unless it is an average
        assert modifiers["metricType"] == "AverageValue"
        assert len(set(names)) == len(names)
        assert set(re.findall(r"[a-z_]+", modifiers["formula"])) - {"max"} == set(names)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("maxReplicaCount",), 0),
        (("pollingInterval",), 0),
        (("fallback", "behavior"), "none"),
        (("advanced", "scalingModifiers", "metricType"), "Utilization"),
        (("advanced", "scalingModifiers", "target"), 4),
        (("advanced", "scalingModifier"), {}),
        (("triggers",), []),
    ],
)
def test_the_form_refuses_what_keda_refuses(path: tuple[str, ...], wrong: Any) -> None:
    resource = copy.deepcopy(next(filter(scales, built("gpu"))))
    jsonschema.validate(resource, SCALED_OBJECT)
    place = resource["spec"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(resource, SCALED_OBJECT)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stream": "s", "consumerGroup": "g", "lagCount": "1", "pendingEntriesCount": "1"},
        {"stream": "s", "lagCount": "1"},
        {"stream": "s", "consumerGroup": "g", "lag": "1"},
        {"stream": "s", "consumerGroup": "g", "lagCount": 1},
    ],
)
def test_the_form_refuses_what_keda_would_misread(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, TRIGGER["properties"]["metadata"])


@pytest.mark.parametrize("overlay", SCALED)
def test_the_generator_and_every_tool_that_reaches_out_are_scaled_by_lag_and_pending(overlay: str) -> None:
    expected = {
        "generator": (QUERY_RECEIVED.stream, "generator"),
        "web-search": (TOOL_REQUEST.for_tool("web_search").stream, "web_search"),
        "web-fetch": (TOOL_REQUEST.for_tool("web_fetch").stream, "web_fetch"),
    }
    assert set(scaled(overlay)) == set(expected)
    for name, spec in scaled(overlay).items():
        stream, group = expected[name]
        assert [(trigger["name"], trigger["metadata"]) for trigger in spec["triggers"]] == [
            ("lag", {"stream": stream, "consumerGroup": group, "lagCount": "1"}),
            ("pending", {"stream": stream, "consumerGroup": group, "pendingEntriesCount": "1"}),
        ]


def replicas(spec: dict[str, Any], lag: int, pending: int) -> int:
    """What KEDA and the autoscaler make of these numbers."""
    modifiers = spec["advanced"]["scalingModifiers"]
    load = eval(modifiers["formula"], {}, {"lag": lag, "pending": pending})
    wanted = math.ceil(load / int(modifiers["target"]))
    return int(min(max(wanted, spec["minReplicaCount"]), spec["maxReplicaCount"]))


@pytest.mark.parametrize(("lag", "pending", "wanted"), [(0, 0, 2), (24, 0, 2), (25, 0, 3), (20, 28, 4), (1000, 16, 16)])
def test_a_tool_has_a_replica_for_each_twelve_calls(lag: int, pending: int, wanted: int) -> None:
    assert replicas(scaled("gpu")["web-fetch"], lag, pending) == wanted


@pytest.mark.parametrize(("lag", "pending", "wanted"), [(0, 0, 2), (2, 4, 2), (3, 4, 3), (50, 8, 8), (0, 24, 8)])
def test_the_generator_has_a_replica_for_each_three_queries(lag: int, pending: int, wanted: int) -> None:
    assert replicas(scaled("gpu")["generator"], lag, pending) == wanted


@pytest.mark.parametrize("overlay", SCALED)
def test_the_targets_follow_the_concurrency_of_the_settings(overlay: str, tmp_path: Path) -> None:
    settings = settings_of(built(overlay))
    for name, spec in scaled(overlay).items():
        concurrency = settings[f"LOCAL2_{name.upper().replace('-', '_')}_CONCURRENCY"]
        default = (GeneratorSettings if name == "generator" else Settings).model_fields["concurrency"].default
        assert spec["advanced"]["scalingModifiers"]["target"] == concurrency == str(default)
    clone = tmp_path / "k8s"
    shutil.copytree(K8S.parent, clone)
    path = clone / "k8s" / "base" / "settings.env"
    path.write_text(path.read_text().replace("GENERATOR_CONCURRENCY=4", "GENERATOR_CONCURRENCY=16"))
    changed = {r["metadata"]["name"]: r["spec"] for r in build(clone / "k8s" / "overlays" / overlay) if scales(r)}
    assert changed["generator"]["advanced"]["scalingModifiers"]["target"] == "16"


@pytest.mark.parametrize("overlay", SCALED)
def test_a_scaled_participant_keeps_two_replicas_and_its_number_is_kedas_alone(overlay: str) -> None:
    deployments = {r["metadata"]["name"]: r for r in built(overlay) if r["kind"] == "Deployment"}
    for name, spec in scaled(overlay).items():
        assert spec["scaleTargetRef"]["name"] == name
        assert "replicas" not in deployments[name]["spec"]
        # a tool without a live replica is not offered to the model: at zero, nothing would ever ask for one
        # with one, a disruption budget would let the last one go
        assert spec["minReplicaCount"] == 2 < spec["maxReplicaCount"]
        assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["policies"] == [
            {"type": "Pods", "value": 1, "periodSeconds": 30}
        ]


def test_keda_finds_what_it_needs_in_the_secret() -> None:
    secret = (K8S / "secrets.sh").read_text(encoding="utf-8")
    (authentication,) = (r["spec"] for r in built("gpu") if r["kind"] == "TriggerAuthentication")
    keys = {entry["key"] for entry in authentication["secretTargetRef"]}
    made = {line.split()[0] for line in secret.split("<<LINES\n")[1].split("LINES\n")[0].splitlines()}
    assert keys == {"redis-address", "scaler-user", "scaler-password"} <= made
