"""A query at one replica: errors that are no ending of its answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.response_runs import deps_of

from services.generator.answering import Answering
from services.generator.settings import GeneratorSettings
from shared.contracts import QueryReceived
from shared.errors import TransientError


@pytest.mark.parametrize("error", [TransientError("away"), TimeoutError("of a library")], ids=["transient", "timeout"])
async def test_answer_raises_errors_that_are_not_the_models(error: Exception) -> None:
    left: list[str] = []

    async def call(*_command: str) -> int:
        raise error

    async def leave(_session_id: str, query_id: str) -> None:
        left.append(query_id)

    async def unfinished() -> int:
        return 0

    bus = SimpleNamespace(link=SimpleNamespace(call=call), left=lambda *_: 600.0)
    deps = deps_of(
        SimpleNamespace(settings=GeneratorSettings(), bus=bus), session_queues=SimpleNamespace(release=leave)
    )
    message: Any = SimpleNamespace(
        entry_id="5000-1",
        payload=QueryReceived(session_id="s", query="Why?", user_id="ann"),
        envelope=SimpleNamespace(turn="", deadline=9_000, traceparent=""),
        deliveries=1,
    )
    with pytest.raises(type(error)) as caught:
        await Answering(deps, unfinished).answer(message)
    assert caught.value is error
    # The entry is delivered again, and keeps its place in the session's queue until then.
    assert left == []
