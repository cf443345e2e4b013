"""What judge and people prefer: the ranking of configurations, data for trainers, and who agrees to its use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, StrictBool

from services.gateway.http.auth import AdminDep, UserDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.participant_rpc import operate
from services.gateway.http.schemas import LINES, Body, spec
from services.gateway.operations.preference_shapes import (
    ConsentShown,
    ExportCounts,
    JudgeReport,
    Leaderboard,
    PreferenceRow,
    VerdictPage,
)

router = APIRouter(route_class=JsonRoute, tags=["preferences"])

_ROW = {
    "name": "gemma4:e4b · temperature=0.5", "config": {"model": "gemma4:e4b", "options": {"temperature": 0.5}},
    "strength": 0.41, "low": 0.12, "high": 0.7, "win_rate": 0.6, "win_rate_low": 0.53, "win_rate_high": 0.67,
    "comparisons": 120, "wins": 60, "ties": 20, "losses": 40, "group": 1,
}  # fmt: skip
_RANKING = {
    "rows": [_ROW], "comparisons": 120, "bias": 0.3, "bias_low": 0.1, "bias_high": 0.5, "disagreement": 0.17,
    "groups": 1, "clusters": 45, "resampled": "session", "note": None,
}  # fmt: skip
_BOARD = {
    "judge": _RANKING,
    "people": {**_RANKING, "bias": None, "bias_low": None, "bias_high": None, "disagreement": None},
    "agreement": {"cases": 40, "share": 0.8, "kappa": 0.6},
    "intents": {"question": {"judge": _RANKING, "people": _RANKING}},
}


_DPO_LINE = (
    '{"prompt": [{"role": "user", "content": "…"}], "chosen": [{"role": "assistant", "content": "…"}], '
    '"rejected": [{"role": "assistant", "content": "…"}], "split": "train", "provenance": {"source": "judge"}}'
)


# The header that says why an export has no rows.
NO_ROWS = "X-No-Rows"


class ExportFilters(Body):
    """A filter that is misspelt is refused: it must not give away what it was to hold back."""

    min_margin: float = Field(default=0.0, ge=0, le=4, description="Least difference of grades")
    human_only: bool = Field(default=False, description="Only what a person's vote bears out")
    since: int | None = Field(default=None, description="Answers from then on, ms since the epoch")
    until: int | None = Field(default=None, description="Answers before then, ms since the epoch")
    consented: bool = Field(default=False, description="Only users who agreed to training")
    test_share: float = Field(default=0.0, ge=0, le=1, description="Part of the sessions marked `test`")
    tools: Literal["include", "leave-out"] = Field(default="include", description="Answers given with tools")


class ExportQuery(ExportFilters):
    format: Literal["dpo", "kto", "critiques"] = Field(default="dpo", description="Kind of rows")


class ConsentBody(Body):
    """Whether your conversations may be used for training."""

    consent: StrictBool


@router.get(
    "/preferences/leaderboard",
    summary="Configurations ranked by the judge's comparisons and by people's votes",
    description="Bradley-Terry strengths (log-odds, 0 is the mean of the group) with 95 % intervals from drawing users "
    "or sessions again. Configurations of different groups were never compared, not even by way of others: `note` says "
    "so. `bias`: what the judge adds to the answer that stands first; `disagreement`: share of pairs whose two orders "
    "name another winner.",
    responses=spec("The ranking, over all and for each intent", Leaderboard, _BOARD, 403, 503),
)
async def show_leaderboard(gateway: GatewayDep, _admin: AdminDep) -> Response:
    return reply(await operate(gateway, "reward", "", op="leaderboard"))


_MEASURED = {"cases": 80, "value": 0.55, "low": 0.37, "high": 0.73}
_JUDGE = {
    "judge": "ggozad/prometheus2", "agreement": _MEASURED, "disagreement": {**_MEASURED, "value": 0.17},
    "first_wins": _MEASURED, "length": _MEASURED, "own_model": {"cases": 0, "value": None, "low": None, "high": None},
    "unread": _MEASURED, "warnings": ["longer answers win: …"], "judges": [],
}  # fmt: skip


@router.get("/preferences/judge", summary="Whether the judge can be trusted: agreement with people, and what leads it",
            responses=spec("What is known of it", JudgeReport, _JUDGE, 403, 503))  # fmt: skip
async def show_judge(gateway: GatewayDep, _admin: AdminDep) -> Response:
    return reply(await operate(gateway, "reward", "", op="judge"))


_VERDICT = {
    "id": "grade:1790000000000-0:A", "kind": "grade", "time": 1790000004000, "query_id": "1790000000000-0",
    "session_id": "trip", "user_id": "ann", "query": "What is the capital of France?", "respondent": "A", "score": 5,
    "winner": None, "score_a": None, "score_b": None, "rubric": "realistic", "words": "It is right.", "judges": [],
    "answers": {"A": {"answer": "Paris.", "model": "gemma4:e4b"}},
}  # fmt: skip


@router.get(
    "/preferences/verdicts",
    summary="What the judge said of all users' answers, with both answers, newest first",
    responses=spec("A page of verdicts", VerdictPage, {"verdicts": [_VERDICT], "cursor": None}, 403, 422, 503),
)
async def list_verdicts(
    gateway: GatewayDep,
    _admin: AdminDep,
    limit: Annotated[int, Query(ge=1, le=200, description="So many at most; fewer where they are long")] = 100,
    cursor: Annotated[str, Query(max_length=200, description="As the page before said it")] = "",
) -> Response:
    return reply(await operate(gateway, "reward", "", op="verdicts", limit=limit, cursor=cursor))


@router.get(
    "/preferences/export",
    summary="Preference data of all users as JSON lines, in the formats that trainers load",
    response_class=StreamingResponse,
    description=f"Who refused training is in none of them. An answer without rows says why in the header `{NO_ROWS}`.",
    responses=spec("One row a line", PreferenceRow, _DPO_LINE, 403, 422, 503, media=LINES),
)
async def export_preferences(
    gateway: GatewayDep,
    _admin: AdminDep,
    wanted: Annotated[ExportQuery, Query()],
) -> Response:
    asked = {"op": "export", **wanted.model_dump()}
    # the first page before the answer begins: what is wrong then is still an error
    first = await operate(gateway, "reward", "", **asked)
    # an empty file would not say why it is; a header has room for plain characters only
    why = {NO_ROWS: first["why"].encode("ascii", "replace").decode()} if first.get("why") else {}
    return StreamingResponse(_rows(gateway, asked, first), media_type="application/x-ndjson", headers=why)


_COUNTS = {
    "dpo": {"rows": 0, "more": False, "why": "no rows: of 2 verdicts all are left out: 2 ties"},
    "kto": {"rows": 12, "more": False, "why": None},
    "critiques": {"rows": 1_004, "more": True, "why": None},
}


@router.get("/preferences/export/counts", summary="How many rows an export has in each format, and why none",
            responses=spec("As with these filters now", ExportCounts, _COUNTS, 403, 422, 503))  # fmt: skip
async def count_preferences(
    gateway: GatewayDep, _admin: AdminDep, wanted: Annotated[ExportFilters, Query()]
) -> Response:
    return reply(await operate(gateway, "reward", "", op="export_counts", **wanted.model_dump()))


async def _rows(gateway: Gateway, asked: dict[str, Any], page: dict[str, Any]) -> AsyncIterator[bytes]:
    seen: set[str] = set()
    while True:
        lines: list[bytes] = []
        for found in page["rows"]:
            if found["digest"] not in seen:
                seen.add(found["digest"])
                lines.append(orjson.dumps(found["row"]) + b"\n")
        yield b"".join(lines)
        if page["cursor"] is None:
            return
        # a failure from here on breaks the connection off: a file that is cut off must not look whole
        page = await operate(gateway, "reward", "", **asked, cursor=page["cursor"])


_CONSENT = {"user_id": "ann", "consent": True}


@router.get("/preferences/consent", summary="Whether your conversations may be used for training",
            responses=spec("What you said; null when you were never asked", ConsentShown, _CONSENT, 503))  # fmt: skip
async def show_consent(gateway: GatewayDep, user: UserDep) -> Response:
    return reply(await operate(gateway, "reward", user.user_id, op="consent"))


@router.put("/preferences/consent", summary="Say whether your conversations may be used for training",
            responses=spec("Kept", ConsentShown, _CONSENT, 400, 415, 422, 503))  # fmt: skip
async def give_consent(body: ConsentBody, gateway: GatewayDep, user: UserDep) -> Response:
    return reply(await operate(gateway, "reward", user.user_id, op="consent", given=body.consent))
