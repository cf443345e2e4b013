"""What is known of all users: everything that was said, of which facts are made."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.backup.proxy_section import ProxySection


class KnowledgeRecord(BaseModel):
    """A line as the knowledge's own export writes it."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    user_id: str = Field(min_length=1, max_length=200)
    source: str = Field(min_length=1)
    said: int = Field(ge=0)
    subject: str = Field(min_length=1)
    relation: str = Field(min_length=1)
    object: str = Field(min_length=1)


class KnowledgeSection(ProxySection):
    name = participant = "knowledge"
    what, unit, counted = "facts", "fact", "claims"
    record = KnowledgeRecord
    page = 200
