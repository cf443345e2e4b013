"""generator_manage: internal operations that the gateway calls for users; models do not get this tool.

`messages` returns the array that the model would get before the next question of a session, built by the functions that
build it for an answer.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from services.generator.context import ContextTooSmall, images_in, one_system
from services.generator.conversation import Instructions, of_session
from services.generator.earlier import Loader
from services.generator.generation import wanted_by
from services.generator.grades import last_low_grade
from services.generator.opening import past_of
from services.generator.response_run import RunDeps
from services.generator.steps import offered, planned_with
from shared.contracts import ToolRequest
from shared.envelope import now_ms
from shared.errors import ModelError, ToolError
from shared.llm.markers import all_broken
from shared.participant.tool import Tool, ToolResult
from shared.records.summaries import reading
from shared.zones import date_line, first_zone

NAME = "generator_manage"
# Replaces the operator's system prompt for users who are not administrators.
HIDDEN_PROMPT = "[the operator's instructions, which administrators can read]"


class GeneratorManage(BaseModel):
    """Operates on the conversations of a user.

    after: the last turn of the conversation, in a session with versions. model, system_prompt: of the chat's settings.
    hide_prompt: whether to replace the operator's system prompt.
    """

    model_config = ConfigDict(extra="ignore")

    op: Literal["messages"]
    session_id: str
    after: str | None = None
    model: str | None = None
    system_prompt: str | None = None
    hide_prompt: bool = True


class Manage:
    def __init__(self, deps: RunDeps) -> None:
        self._deps = deps

    def tool(self) -> Tool[Any]:
        return Tool(NAME, GeneratorManage, self.manage, internal=True)

    async def manage(self, args: GeneratorManage, request: ToolRequest) -> ToolResult:
        """Run the operation. `data` is {"found": false} for a missing session or another user's."""
        deps, settings = self._deps, self._deps.context.settings
        info = await deps.sessions.info(args.session_id)
        if info is None or info.user_id != request.user_id:
            return ToolResult("", {"found": False})
        raw = await deps.context.bus.link.pipe(
            [*deps.sessions.newest(args.session_id, settings.respondent_id), reading(args.session_id)]
        )
        past = await past_of(deps, args.session_id, args.after, raw)
        low = await last_low_grade(deps.context.bus, past.turns) if settings.tell_low_grade else None
        zone = first_zone(request.time_zone, settings.zone)
        instructions = Instructions(
            date_line(now_ms(), zone), args.system_prompt or "", low.note if low is not None else ""
        )
        model = args.model or settings.model
        try:
            loader = partial(self._loader, request.user_id, model)
            conversation, _ = await of_session(settings, instructions.prompt(settings.system_prompt), past, loader)
            facts = await planned_with(settings, deps.model, model)
            fitted = conversation.fit([], await offered(deps.tools), facts.context(settings.num_ctx))
        except (ModelError, ContextTooSmall) as exc:
            raise ToolError(str(exc)) from exc
        messages = [dict(message) for message in one_system(fitted.messages)]
        if args.hide_prompt and messages and messages[0]["role"] == "system":
            shown = messages[0]["content"].removeprefix(settings.system_prompt)
            messages[0]["content"] = HIDDEN_PROMPT + shown if shown != messages[0]["content"] else HIDDEN_PROMPT
        return ToolResult("", {"found": True, "messages": [_shown(message) for message in messages]})

    async def _loader(self, user_id: str, model: str) -> Loader:
        return Loader(self._deps.files, await wanted_by(self._deps, user_id, model), data=False)


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as JSON: ids in place of images, and markers in the form that the model server gets."""
    shown = {"role": message["role"], "content": all_broken(message["content"])}
    if images_in([message]):
        shown["attachments"] = [str(image["id"]) for image in message["images"]]
    return shown
