"""Experiments: another model, prompt or temperature on trial with respondent B, and what comes of it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field, StrictBool

from services.gateway.http.auth import AdminDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.errors import ApiError, not_found
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.participant_rpc import operate
from services.gateway.http.schemas import Body, spec
from services.gateway.operations.experiment_shapes import Experiment, ExperimentList

router = APIRouter(route_class=JsonRoute, tags=["experiments"])

_SUMMARY = {
    "name": "shorter", "state": "running", "started": 1_700_000_000_000, "ended": None,
    "a": {"model": "gemma4:e4b", "prompt": "You are …", "temperature": None},
    "b": {"model": "gemma4:e4b", "prompt": "You are brief …", "temperature": None},
    "changed": ["prompt"],
}  # fmt: skip
_RESULT = {
    "decision": "better", "verdicts": 112, "wins": 51, "ties": 34, "losses": 27, "conversations": 61, "share": 0.66,
    "low": 0.51, "high": 0.79, "p_value": 0.03, "decided_at": 104, "more": None,
}  # fmt: skip
_EXPERIMENT = {
    **_SUMMARY, "result": _RESULT, "intents": {"question": {**_RESULT, "decision": "not yet", "decided_at": None}},
    "votes": {"a": {"positive": 9, "negative": 2}, "promoted": None}, "warnings": [],
}  # fmt: skip


class ExperimentBody(Body):
    name: str = Field(min_length=1, max_length=64, description="Letters, digits, dots, dashes and underscores")
    b: dict[str, Any] = Field(description="What is to be different: `model`, `prompt`, `temperature`")


class PromotionBody(Body):
    force: StrictBool = Field(default=False, description="Also when B is not known to be better")


async def _ask(gateway: Gateway, op: str, name: str, status: int = 200, **args: Any) -> Response:
    """Raises ApiError: 404 when there is no experiment of that name, 409 when it cannot be done now."""
    found = await operate(gateway, "reward", "", op=op, name=name, **args)
    if "refused" in found:
        raise ApiError(409, "experiment_refused", found["refused"])
    if found["experiment"] is None:
        raise not_found("experiment")
    return reply(found["experiment"], status)


@router.get("/experiments", summary="Experiments, the latest first",
            responses=spec("All of them", ExperimentList, {"experiments": [_SUMMARY]}, 403, 503))  # fmt: skip
async def list_experiments(gateway: GatewayDep, _admin: AdminDep) -> Response:
    return reply(await operate(gateway, "reward", "", op="experiments"))


@router.post(
    "/experiments",
    summary="Put another configuration on trial with respondent B",
    description="B is configured as A is, but for what is named. One experiment runs at a time.",
    responses=spec("It runs", Experiment, _EXPERIMENT, 400, 403, 409, 415, 422, 503, status=201),
    status_code=201,
)
async def start_experiment(body: ExperimentBody, gateway: GatewayDep, _admin: AdminDep) -> Response:
    return await _ask(gateway, "start", body.name, 201, b=body.b)


@router.get("/experiments/{name}", summary="What the verdicts say so far; it may be looked at as often as one likes",
            responses=spec("The experiment", Experiment, _EXPERIMENT, 403, 404, 503))  # fmt: skip
async def show_experiment(name: str, gateway: GatewayDep, _admin: AdminDep) -> Response:
    return await _ask(gateway, "experiment", name)


@router.post("/experiments/{name}/stop", summary="End it without a change; B has its former settings again",
             responses=spec("It has ended", Experiment, _EXPERIMENT, 403, 404, 409, 422, 503))  # fmt: skip
async def stop_experiment(name: str, gateway: GatewayDep, _admin: AdminDep) -> Response:
    return await _ask(gateway, "stop", name)


@router.post(
    "/experiments/{name}/promote",
    summary="Make B's configuration A's, now and for later starts",
    responses=spec("It is promoted", Experiment, _EXPERIMENT, 400, 403, 404, 409, 415, 422, 503),
)
async def promote_experiment(
    name: str, gateway: GatewayDep, _admin: AdminDep, body: PromotionBody | None = None
) -> Response:
    return await _ask(gateway, "promote", name, force=body is not None and body.force)


@router.post("/experiments/{name}/revert", summary="Give A the settings back that it had before the promotion",
             responses=spec("It is reverted", Experiment, _EXPERIMENT, 403, 404, 409, 422, 503))  # fmt: skip
async def revert_experiment(name: str, gateway: GatewayDep, _admin: AdminDep) -> Response:
    return await _ask(gateway, "revert", name)
