"""What users think of an answer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from services.gateway.http.auth import UserDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.schemas import FeedbackBody, spec
from services.gateway.queries.query_shapes import Rated, VoteWithdrawn
from services.gateway.queries.records import owned
from shared.contracts import USER_FEEDBACK, UserFeedback, VotePart
from shared.telemetry import tracing

router = APIRouter(route_class=JsonRoute, tags=["feedback"])


@router.post(
    "/feedback",
    summary="Rate an answer of yours",
    description=FeedbackBody.__doc__,
    status_code=202,
    responses=spec("Taken", Rated, {"query_id": "1-0", "sentiment": "positive", "stars": 5}, 400, 404, 415, 422, 503,
                   status=202),
)  # fmt: skip
async def give_feedback(body: FeedbackBody, gateway: GatewayDep, user: UserDep) -> Response:
    async with gateway.reachable():
        record = await owned(gateway, user, body.query_id)
        rating = UserFeedback(
            query_id=record.query_id,
            session_id=record.session_id,
            user_id=user.user_id,
            sentiment=body.verdict(),
            stars=body.stars,
            comment=body.comment,
            parts=body.parts(),
        )
        await _publish(gateway, rating)
    return reply({"query_id": record.query_id, "sentiment": rating.sentiment, "stars": rating.stars}, 202)


@router.delete(
    "/feedback/{query_id}",
    summary="Withdraw a vote of yours",
    description="The whole vote, or with `what` its thumb or its stars; the other one stays. It counts nowhere any "
    "more as soon as it is handled. Withdrawing what is not there changes nothing.",
    status_code=202,
    responses=spec("Taken", VoteWithdrawn, {"query_id": "1-0", "withdrawn": ["stars"]}, 404, 422, 503, status=202),
)
async def withdraw_feedback(
    query_id: str,
    gateway: GatewayDep,
    user: UserDep,
    what: Annotated[VotePart | None, Query(description="Only this of it")] = None,
) -> Response:
    parts: list[VotePart] = ["thumb", "stars"] if what is None else [what]
    async with gateway.reachable():
        record = await owned(gateway, user, query_id)
        await _publish(
            gateway,
            UserFeedback(
                query_id=record.query_id,
                session_id=record.session_id,
                user_id=user.user_id,
                parts=parts,
                withdrawn=True,
            ),
        )
    return reply({"query_id": record.query_id, "withdrawn": parts}, 202)


async def _publish(gateway: Gateway, said: UserFeedback) -> None:
    headers = {"correlation_id": said.query_id, "session_id": said.session_id, "user_id": said.user_id}
    await gateway.bus.publish(USER_FEEDBACK.of(said, **headers, traceparent=tracing.current()))
