"""Alive, and able to answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from services.gateway.http.errors import full
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.health_shapes import Alive, Readiness
from services.gateway.http.json_response import reply
from services.gateway.http.schemas import spec
from shared.errors import BusUnavailable
from shared.participant.registry import ReplicaInfo

router = APIRouter(tags=["health"])

# Queries are answered without these too, only less well.
HELPFUL = frozenset({"memory"})

_READY = {
    "status": "ready",
    "parts": {
        "bus": {"ok": True, "reason": None, "readable": True},
        "generator": {"ok": True, "reason": None, "replicas": 1},
        "model": {
            "ok": True,
            "reason": None,
            "backend": "ollama",
            "model": "gemma4:e4b",
            "demo": False,
            "facts": {"server": "Ollama", "window": 131_072, "abilities": ["chat", "thinking", "tools"]},
        },
        "memory": {"ok": True, "reason": None, "replicas": 1},
    },
}


@router.get(
    "/health",
    summary="Whether this process is alive",
    responses=spec("Alive", Alive, {"status": "ok"}, key=False),
)
async def health() -> Response:
    return reply({"status": "ok"})


@router.get(
    "/ready",
    summary="Whether a query would be answered now, part by part",
    responses={
        **spec("Ready", Readiness, _READY, key=False),
        503: {"description": "Not ready; each part says why", "model": Readiness},
    },
)
async def ready(
    gateway: GatewayDep,
    part: Annotated[
        Literal["gateway"] | None,
        Query(
            alias="for",
            description="gateway: only whether this process has the bus, to read from at least; for a balancer",
        ),
    ] = None,
) -> Response:
    parts = await readiness(gateway)
    if part == "gateway":
        able = parts["bus"]["readable"]
    else:
        able = all(state["ok"] for name, state in parts.items() if name not in HELPFUL)
    return reply({"status": "ready" if able else "not ready", "parts": parts}, 200 if able else 503)


async def readiness(gateway: Gateway) -> dict[str, dict[str, Any]]:
    unknown = "not known while the bus is away"
    try:
        async with gateway.reachable():
            reason = await gateway.full()
            replicas = await gateway.context.registry.replicas(fresh=True)
    except BusUnavailable as exc:
        away = {"ok": False, "reason": unknown}
        bus = {"ok": False, "reason": str(exc), "readable": False}
        return {"bus": bus, "generator": away, "model": away, "memory": away}
    # nobody can announce himself then
    absent = "no {} is running" if reason is None else "no {} is known while the bus takes no writes"
    generators = [info for info in replicas if info.participant == "generator" and info.state == "ready"]
    parts: dict[str, dict[str, Any]] = {}
    if expected := gateway.settings.expects:
        missing = sorted(set(expected) - {info.participant for info in replicas if info.state == "ready"})
        awaited = f"waiting for the tools of {', '.join(missing)}" if missing and gateway.settling else None
        parts["tools"] = {"ok": awaited is None, "reason": awaited, "missing": missing}
    return parts | {
        "bus": {"ok": reason is None, "reason": reason and full(reason), "readable": True},
        "generator": {
            "ok": bool(generators),
            "reason": None if generators else absent.format("generator"),
            "replicas": len(generators),
        },
        "model": _model(generators),
        "memory": _memory([info for info in replicas if info.participant == "memory" and info.state == "ready"]),
    }


def _memory(replicas: list[ReplicaInfo]) -> dict[str, Any]:
    """What hinders it is told by each replica; `ok` says whether one of them works as it should."""
    reasons = [info.facts.get("degraded") for info in replicas]
    able = any(reason is None for reason in reasons)
    reason = None if able else str(reasons[0]) if reasons else "no memory is running"
    return {"ok": able, "reason": reason, "replicas": len(replicas)}


def _model(generators: list[ReplicaInfo]) -> dict[str, Any]:
    """The model as the generators see it; one that can reach it is enough."""
    if not generators:
        return {"ok": False, "reason": "not known without a generator"}
    facts = next((info.facts for info in generators if info.facts.get("backend_ok")), generators[0].facts)
    able = bool(facts.get("backend_ok"))
    part = {
        "ok": able,
        "reason": None if able else facts.get("backend_reason") or "the generator has not reached its model yet",
        "backend": facts.get("backend"),
        "model": facts.get("model"),
        "demo": bool(facts.get("demo")),
    }
    if known := facts.get("model_facts"):
        part["facts"] = known
    if note := facts.get("gpu_note"):
        part["note"] = note
    if part["demo"]:
        part["note"] = "this is the small demonstration model: it proves the stack, it is not a good model"
    return part
