"""What users think of an answer."""

from __future__ import annotations

from fastapi import APIRouter, Response

from services.gateway.answers import reply
from services.gateway.auth import UserDep
from services.gateway.body import JsonRoute
from services.gateway.gateway import GatewayDep
from services.gateway.records import owned
from services.gateway.schemas import FeedbackBody, told
from services.gateway.shapes.queries import Rated
from shared.contracts import USER_FEEDBACK, UserFeedback
from shared.telemetry import tracing

router = APIRouter(route_class=JsonRoute, tags=["feedback"])


@router.post(
    "/feedback",
    summary="Rate an answer of yours",
    description=FeedbackBody.__doc__,
    status_code=202,
    responses=told("Taken", Rated, {"query_id": "1-0", "sentiment": "positive", "stars": 5}, 400, 404, 415, 422, 503,
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
        )
        headers = {"correlation_id": record.query_id, "session_id": record.session_id, "user_id": user.user_id}
        await gateway.bus.publish(USER_FEEDBACK.of(rating, **headers, traceparent=tracing.current()))
    return reply({"query_id": record.query_id, "sentiment": rating.sentiment, "stars": rating.stars}, 202)
