"""KEDA's objects: of the form that KEDA documents, and about streams and groups that exist."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
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
META = closed(["name", "namespace"], name=TEXT, namespace=TEXT, labels={"type": "object"})
# What of KEDA's two definitions (keda.sh/v1alpha1) is used here, with the fields of its redis-streams scaler.
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
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        fallback=closed(
            ["failureThreshold", "replicas"],
            failureThreshold=COUNT,
            replicas=COUNT,
            behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
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


def scaled(overlay: str) -> dict[str, dict[str, Any]]:
    return {r["metadata"]["name"]: r["spec"] for r in built(overlay) if r["kind"] == "ScaledObject"}


@pytest.mark.parametrize("overlay", SCALED)
def test_every_object_has_the_form_that_keda_documents(overlay: str) -> None:
    schemas = {"ScaledObject": SCALED_OBJECT, "TriggerAuthentication": AUTHENTICATION}
    found = [resource for resource in built(overlay) if resource["apiVersion"].startswith("keda.sh/")]
    assert {resource["kind"] for resource in found} == set(schemas)
    for resource in found:
        jsonschema.validate(resource, schemas[resource["kind"]])


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
            ("length", {"stream": stream, "streamLength": "1"}),
        ]


@pytest.mark.parametrize(("lag", "pending", "length", "load"), [(7, 4, 20, 11), (0, 4, 4, 4), (-1, 4, 20, 20)])
def test_the_load_is_what_waits_and_what_runs_and_the_streams_length_when_redis_has_lost_count(
    lag: int, pending: int, length: int, load: int
) -> None:
    for spec in scaled("gpu").values():
        formula = spec["advanced"]["scalingModifiers"]["formula"]
        condition, _, rest = formula.partition(" ? ")
        yes, _, no = rest.partition(" : ")
        values = {"lag": lag, "pending": pending, "length": length}
        assert eval(yes if eval(condition, {}, values) else no, {}, values) == load


@pytest.mark.parametrize("overlay", SCALED)
def test_a_replica_is_added_before_the_others_are_full(overlay: str) -> None:
    for name, spec in scaled(overlay).items():
        settings = GeneratorSettings if name == "generator" else Settings
        concurrency = settings.model_fields["concurrency"].default
        assert int(spec["advanced"]["scalingModifiers"]["target"]) < concurrency


@pytest.mark.parametrize("overlay", SCALED)
def test_a_scaled_participant_keeps_one_replica_and_its_number_is_kedas_alone(overlay: str) -> None:
    deployments = {r["metadata"]["name"]: r for r in built(overlay) if r["kind"] == "Deployment"}
    for name, spec in scaled(overlay).items():
        assert spec["scaleTargetRef"]["name"] == name
        assert "replicas" not in deployments[name]["spec"]
        # a tool without a live replica is not offered to the model: at zero, nothing would ever ask for one
        assert spec["minReplicaCount"] == 1 < spec["maxReplicaCount"]
        assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["policies"] == [
            {"type": "Pods", "value": 1, "periodSeconds": 30}
        ]


def test_keda_finds_what_it_needs_in_the_secret() -> None:
    secret = (K8S / "secrets.sh").read_text(encoding="utf-8")
    (authentication,) = (r["spec"] for r in built("gpu") if r["kind"] == "TriggerAuthentication")
    keys = {entry["key"] for entry in authentication["secretTargetRef"]}
    made = yaml.safe_load(secret.split("<<YAML\n")[1].split("YAML\n")[0])
    assert keys == {"redis-address", "scaler-user", "scaler-password"} <= set(made["stringData"])
