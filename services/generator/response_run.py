"""One response at one replica: its dependencies, its state, and the writer of its journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from services.generator.deltas import FlushTimer
from services.generator.machine import IDLE, TABLE
from services.generator.session_queues import SessionQueues
from services.generator.settings import GeneratorSettings
from shared.contracts import AGENT_TRANSITION, AgentTransition, Outgoing, QueryReceived
from shared.envelope import Message
from shared.llm.port import ChatModel
from shared.participant.files import Files
from shared.participant.machine import Machine, Transition
from shared.participant.service import Context
from shared.participant.tool_client import Caller, ToolClient
from shared.records import events
from shared.records.events import Noticed
from shared.records.journal import JournalWriter, response_id
from shared.records.response_state import ResponseState
from shared.records.sessions import Sessions, Turn


@dataclass(frozen=True, slots=True)
class RunDeps:
    """The dependencies of all responses of a replica.

    background_model: returns a model that waits for all interactive queries. Its argument opens a block in which the
    query has no slot; the model waits in such a block.
    """

    context: Context[GeneratorSettings]
    model: ChatModel
    tools: ToolClient
    sessions: Sessions
    session_queues: SessionQueues
    background_model: Callable[[Callable[[], AbstractAsyncContextManager[None]]], ChatModel]
    files: Files
    flush_timer: FlushTimer = field(default_factory=FlushTimer)


@dataclass(slots=True)
class ResponseRun:
    """The state of one response, and the writer of its journal. Built by `opening.build_run`.

    transitions_left: transitions of earlier owners that this run has not repeated yet.
    hidden_notices: codes of notices that the model has sent and this response does not show.
    waits_for: why the model is not available, while the run waits for it.
    first_token_seen: whether the time to the first token needs no measuring.
    saved_text: the answer in the stored turn; None: no turn is stored.
    client_turns: the session's turns, if the client sent the history and the turns have been loaded.
    """

    deps: RunDeps
    message: Message[QueryReceived]
    caller: Caller
    model: ChatModel
    writer: JournalWriter
    machine: Machine = field(default_factory=lambda: Machine(TABLE, IDLE))
    transitions_left: int = 0
    hidden_notices: set[str] = field(default_factory=set)
    settings: GeneratorSettings = field(init=False)
    attachments: Sequence[Mapping[str, Any]] = field(init=False)
    waits_for: str = ""
    first_token_seen: bool = field(init=False)
    saved_text: str | None = None
    client_turns: Sequence[Turn] | None = None

    def __post_init__(self) -> None:
        self.settings = self.deps.context.settings
        self.attachments = self.query.attachments or ()
        # A client of an earlier attempt has seen the first token.
        self.first_token_seen = self.message.deliveries > 1

    @property
    def query(self) -> QueryReceived:
        return self.message.payload

    @property
    def state(self) -> ResponseState:
        """The response so far: the entries of earlier owners and of this one, including those on their way."""
        return self.writer.state

    @property
    def response_id(self) -> str:
        return response_id(self.caller.query_id, self.caller.respondent_id)

    def step(self, action: str) -> tuple[Transition, list[Outgoing]]:
        """Take a step of the state machine; return it with its message, which is left out during a replay."""
        step = self.machine.step(action)
        if self.transitions_left:
            self.transitions_left -= 1
            return step, []
        return step, [transition_message(self.deps.context, self.caller, step)]

    async def transition(self, action: str) -> None:
        """Take a step of the state machine; write it to the journal and the bus, except during a replay."""
        step, messages = self.step(action)
        if messages:
            await self.writer.append(transition_event(step), messages=messages)

    async def notice(self, code: str, text: str) -> None:
        """Write a notice for the client, once per response."""
        if not self.has_notice(code):
            await self.writer.append(Noticed(code=code, message=text))

    def has_notice(self, code: str) -> bool:
        """Return whether a notice was written or hidden."""
        return code in self.hidden_notices or any(notice.code == code for notice in self.state.events(Noticed))


def transition_message(context: Context[GeneratorSettings], caller: Caller, step: Transition) -> Outgoing:
    transition = AgentTransition(
        agent=context.settings.name,
        replica=context.replica,
        query_id=caller.query_id,
        from_state=step.before,
        action=step.action,
        to=step.after,
    )
    return AGENT_TRANSITION.of(transition, **caller.headers())


def transition_event(step: Transition) -> events.Transition:
    """Return the journal's entry of a step."""
    return events.Transition(from_state=step.before, action=step.action, to=step.after)
