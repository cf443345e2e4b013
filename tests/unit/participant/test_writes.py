"""Which operations between participants write."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import BaseModel

from services.knowledge.manage import KnowledgeManage
from services.memory.document_tools import DocumentsManage
from services.memory.manage import MemoryManage
from services.reward.manage import Manage as RewardManage
from shared.participant.writes import is_write, store_away

# Of each participant: the operations that only read. A new operation is in neither list, and fails here.
READS = {
    "memory": (MemoryManage, "search list get export topics topic_get stats embed retention"),
    "documents": (DocumentsManage, "endpoint list get search users"),
    "knowledge": (KnowledgeManage, "list get entities graph export stats retention"),
    "reward": (
        RewardManage,
        "leaderboard verdicts export export_counts counts dump judge experiments experiment retention",
    ),
}


@pytest.mark.parametrize("participant", READS)
def test_every_operation_is_known_as_read_or_write(participant: str) -> None:
    model, reads = READS[participant]
    assert issubclass(model, BaseModel)
    ops = get_args(model.model_fields["op"].annotation)
    writes = {op for op in ops if is_write(participant, {"op": op, "given": True})}
    assert sorted(writes | set(reads.split())) == sorted(ops)
    assert not writes & set(reads.split())


@pytest.mark.parametrize(
    ("participant", "args", "text"),
    [
        ("memory", {"op": "topic_put"}, "outcome unknown: away"),
        ("memory", {"op": "list"}, "unavailable: away"),
        ("reward", {"op": "consent", "given": True}, "outcome unknown: away"),
        ("reward", {"op": "consent", "given": None}, "unavailable: away"),
        ("another", {"op": "delete"}, "unavailable: away"),
    ],
)
def test_failed_store_reports_an_unknown_outcome_of_writes(participant: str, args: dict[str, str], text: str) -> None:
    assert str(store_away(participant, args, "away")) == text
