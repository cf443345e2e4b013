"""A session's title: written once by the model in a background call, unless the user has given one."""

from __future__ import annotations

import re

from fastapi import Request

from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import Principal
from services.gateway.queries.accept import Ask, Origin, accept
from services.gateway.queries.query_routes import finished
from shared.records.erasing import erase
from shared.records.sessions import SessionInfo, Turn

# Characters of the question and of the answer that a title is made of, and those that it may have itself.
_READ = 1_500
_MOST = 80
_TOKENS = 40
_PROMPT = """Write a title for this conversation: two to six words in the language of the question, no quotation \
marks, no full stop. Say nothing but the title.

Question: {query}

Answer: {answer}"""
# What models put round a title all the same.
_BEFORE = re.compile(r"^(?:title|titel|titre|título)\s*:\s*", re.IGNORECASE)
_ROUND = "\"'`*#_“”„«» \t"


def prompt(turn: Turn) -> str:
    return _PROMPT.format(query=turn.query[:_READ], answer=turn.answer[:_READ])


def cleaned(said: str) -> str:
    """The title in what a model has said; empty when there is none, or it is an essay."""
    first = next((line for line in said.splitlines() if line.strip(_ROUND)), "").strip(_ROUND)
    title = " ".join(_BEFORE.sub("", first).strip(_ROUND).rstrip(".").split())
    return title if len(title) <= _MOST else ""


async def title(request: Request, gateway: Gateway, user: Principal, info: SessionInfo) -> tuple[str, bool]:
    """The session's title, and whether it was made now. Raises ApiError 409 before the first answer, and what a query
    may fail with."""
    if info.named:
        return info.title, False
    async with gateway.reachable():
        turns = (await gateway.sessions.page(info.session_id, "A", 1)).turns
    if not turns:
        raise ApiError(409, "not_answered", "the session has no answer yet that a title could be made of")
    # by its session and turn: several tabs ask at once, and one call is made
    once = Origin(user, f"title-{info.session_id}-{turns[0].query_id}")
    chore = Ask(
        query=prompt(turns[0]),
        messages=[],
        plain=True,
        think=False,
        options={"num_predict": _TOKENS},
        about=info.session_id,
    )
    made = await accept(gateway, once, chore)
    found = cleaned((await finished(request, gateway, made))["answer"])
    async with gateway.reachable():
        named = bool(found) and await gateway.sessions.name(info.session_id, turns[0].query_id, found)
        now = await gateway.sessions.info(info.session_id)
        if now is None:
            # its deletion may not have seen what had only just been asked
            await erase(gateway.bus, [made.query_id])
        return (now or info).title, named and now is not None
