"""The client that openapi-python-client generates, in use: ask, events with resume, cancel, feedback."""

from __future__ import annotations

import json
import os

from local2_client import AuthenticatedClient
from local2_client.api.feedback import give_feedback
from local2_client.api.queries import ask, cancel_query, query_events
from local2_client.api.sessions import list_sessions, show_session
from local2_client.models import Accepted, FeedbackBody, Problem, QueryBody, QueryResult, Rated, SessionPage, Stopping
from trying import tried

api = AuthenticatedClient(os.environ["LOCAL2_URL"], os.environ["LOCAL2_KEY"], timeout=None)
answers: list[QueryResult] = []


def asks() -> bool:
    answer = ask.sync(client=api, body=QueryBody(query="Hello"))
    assert isinstance(answer, QueryResult), answer
    answers.append(answer)
    return (answer.state, answer.answer) == ("completed", "Hello there.")


def events(query_id: str, after: str | None = None) -> list[dict[str, str]]:
    text = query_events.sync(query_id, client=api, last_event_id_query=after)
    assert isinstance(text, str), text
    blocks = [block for block in text.split("\n\n") if block.startswith("id:")]
    return [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]


def resumes() -> bool:
    whole = events(answers[0].query_id)
    text = "".join(json.loads(one["data"])["text"] for one in whole if one["event"] == "answer")
    return text == "Hello there." and events(answers[0].query_id, whole[2]["id"]) == whole[3:]


def cancels() -> bool:
    accepted = ask.sync(client=api, body=QueryBody(query="tell me slowly, for long"), wait=False)
    assert isinstance(accepted, Accepted), accepted
    stopping = cancel_query.sync(accepted.query_id, client=api)
    assert isinstance(stopping, Stopping), stopping
    return events(accepted.query_id)[-1]["event"] == "cancelled"


def rates() -> bool:
    rated = give_feedback.sync(client=api, body=FeedbackBody(query_id=answers[0].query_id, stars=5))
    return isinstance(rated, Rated) and rated.sentiment == "positive"


def refused() -> bool:
    problem = show_session.sync("none", client=api)
    return isinstance(problem, Problem) and problem.error.code == "not_found"


def lists() -> bool:
    page = list_sessions.sync(client=api, limit=5)
    return isinstance(page, SessionPage) and any(session.title == "Hello" for session in page.sessions)


tried("ask", asks)
tried("events with resume", resumes)
tried("cancel", cancels)
tried("feedback", rates)
tried("an error with its code", refused)
tried("sessions", lists)
