"""The tool that models call."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints

from services.knowledge.graph import GraphUnavailable
from services.knowledge.search import Search, fact_json, text_of
from services.knowledge.settings import KnowledgeSettings
from shared.contracts import ToolRequest
from shared.errors import ToolError
from shared.participant.service import Context
from shared.participant.tool import Tool, ToolResult

_AWAY = "the knowledge graph is away; try again later"
_Name = Annotated[str, StringConstraints(strip_whitespace=True, max_length=200)]


class SearchKnowledgeGraph(BaseModel):
    """Look up what is known of people and places in the user's life, how they are related, and what is true now (IS) or
    was true before (WAS). Call it for questions about somebody or some place by name ("where does Anna live?", "where
    did Anna live before?", "who is Tom's sister?", "who do I know in Porto?"); for the user himself give "me"."""

    model_config = ConfigDict(populate_by_name=True)

    people: list[_Name] = Field(
        default=[],
        max_length=20,
        validation_alias=AliasChoices("people", "persons", "names"),
        description='Names of people, such as "Anna"; "me" for the user',
    )
    locations: list[_Name] = Field(
        default=[],
        max_length=20,
        validation_alias=AliasChoices("locations", "places"),
        description='Names of places or organisations, such as "Porto"',
    )


class KnowledgeTools:
    def __init__(self, context: Context[KnowledgeSettings], search: Search) -> None:
        self._context = context
        self._search = search

    def tool(self) -> Tool[SearchKnowledgeGraph]:
        return Tool("search_knowledge_graph", SearchKnowledgeGraph, self.run)

    async def run(self, args: SearchKnowledgeGraph, request: ToolRequest) -> ToolResult:
        settings = self._context.settings
        people, locations = [one for one in args.people if one], [one for one in args.locations if one]
        try:
            hits = await self._search.find(request.user_id, people, locations, settings.n_results, settings.hops)
        except GraphUnavailable as exc:
            raise ToolError(_AWAY) from exc
        return ToolResult(text_of(hits), {"facts": [{**fact_json(hit.fact), "hop": hit.hop} for hit in hits]})
