"""What is kept of a question that has no answer."""

from __future__ import annotations

import pytest
from support.entries import event_of

from shared.contracts import QueryReceived
from shared.records.journal import EntryType
from shared.records.steps import Unanswered, unanswered

ASKED = QueryReceived(query="Where?", session_id="s", user_id="ann")


@pytest.mark.parametrize(
    ("query", "kind", "data", "kept"),
    [
        (ASKED, EntryType.COMPLETED, {}, None),
        # its client keeps the history
        (ASKED.model_copy(update={"messages": []}), EntryType.CANCELLED, {}, None),
        (ASKED, EntryType.CANCELLED, {}, Unanswered(query="Where?", mode="chat", state="cancelled")),
        (
            ASKED.model_copy(update={"mode": "committee", "after": "1-0"}),
            EntryType.FAILED,
            {"code": "model_unavailable", "message": "It is away."},
            Unanswered(
                query="Where?",
                mode="committee",
                after="1-0",
                state="failed",
                error={"code": "model_unavailable", "message": "It is away."},
            ),
        ),
    ],
)
def test_a_question_without_an_answer_is_kept_with_its_reason(
    query: QueryReceived, kind: EntryType, data: dict[str, object], kept: Unanswered | None
) -> None:
    assert unanswered(query, event_of(kind, data)) == kept
