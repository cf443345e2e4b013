"""Server-sent events: `data` is JSON in a text, as an event stream has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import Field, Json, RootModel, create_model

from services.gateway.http.shape import Shape
from services.gateway.queries.file_shapes import Attached
from services.gateway.queries.query_shapes import ClientCall, CritiqueShown, PairwiseShown, RewardShown
from shared.contracts import Deliberation, PersonaToolTrace, ToolCallRecord, Usage
from shared.records.journal import EntryType


class _Member(Shape):
    """Of a committee, whose entry it is and in which round."""

    persona: str = ""
    round: int = 0


class Claimed(Shape):
    """A replica has become the journal's writer."""

    query_id: str
    session_id: str
    response_id: str = ""
    respondent_id: str = ""
    replica: str = ""
    model: str | None = None
    attempt: int = 1
    attachments: list[Attached] = Field(default=[])


class Restarted(_Member):
    """A model call began again: text after `discard_after` is void."""

    step: int
    discard_after: str


class Transition(Shape):
    """A step of the state machine."""

    from_state: str = Field(alias="from")
    action: str
    to: str


class Piece(_Member):
    """What the model wrote."""

    text: str


class ContextShown(Shape):
    """What the model saw of the conversation: counts of turns, and ids of queries."""

    window: int = Field(description="Tokens")
    tokens: int = Field(description="Of the prompt and its answer: the server's count, or else an estimate")
    ratio: float = Field(default=0, description="Characters per token, as they were counted last")
    turns: int = Field(description="Sent as they were said")
    cut: int = Field(description="Left out, because they do not fit")
    first_turn: str = Field(default="", description="The oldest turn that is sent")
    summarised: int = Field(default=0, description="Before them, told by a summary")
    summarised_until: str = Field(default="", description="The newest of those")


class ModelMessage(_Member):
    """A whole message of the model, with its tool calls and token counts."""

    step: int
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = Field(default=[])
    reasoning_details: list[dict[str, Any]] = Field(
        default=[], description="The thoughts in a form that only the model server understands"
    )
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    model: str = ""
    scope: str = Field(default="", description="Of a committee: whose steps are counted")
    context: ContextShown | None = None


class Noticed(_Member):
    code: str
    message: str
    about: str = Field(default="", description="Of `low_grade`: the query whose answer was graded")
    score: int = Field(default=0, description="Of `low_grade`: 1 or 2")
    note: str = Field(default="", description="Of `low_grade`: what the model is told")


class ToolAsked(_Member):
    call_id: str
    tool: str
    args: dict[str, Any]
    step: int


class ToolAnswered(_Member, ToolCallRecord):
    pass


class SentEarlier(Shape):
    """A file of an earlier message."""

    id: str
    name: str = ""
    sent: str = Field(
        description="image, text: with its message while it fits. In all other forms the model gets a line: search, "
        "left_out, unseen (the model sees no images), deleted, unreadable, away (the memory does not answer)"
    )


class FilesSent(Shape):
    """The forms in which the model gets the files of earlier messages."""

    files: list[SentEarlier]


class Truncated(_Member):
    """The conversation does not fit the model's context: turns are left out, images of earlier messages, or both."""

    dropped_turns: int
    kept_turns: int
    prompt_tokens: int
    turns: int = 0
    cut: int = 0
    first_turn: str = Field(default="", description="The oldest turn that is sent")
    summarised: int = Field(default=0, description="Turns before them, told by a summary")
    summarised_until: str = ""
    attachments: list[Attached] = Field(default=[], description="Images of earlier messages that are not sent")


class PersonaWorking(Shape):
    persona: str
    round: int


class PersonaDone(Shape):
    persona: str
    round: int
    response: str = ""
    thinking: str = ""
    tool_trace: list[PersonaToolTrace] = Field(default=[])


class CallEnded(ToolCallRecord):
    """A call with its outcome."""

    result_in: str = Field(
        default="", description="The id of the event that has a large result, and large data: here they are left out"
    )


class Completed(Shape):
    answer: str
    thinking: str
    tool_calls: list[CallEnded]
    usage: Usage
    finish_reason: str
    model: str
    said_before: list[str] = Field(default=[])
    client_calls: list[ClientCall] = Field(default=[])
    deliberations: list[Deliberation] = Field(default=[])
    published: bool = True


class Failed(Shape):
    """usage: of the model's calls until then."""

    code: str
    message: str
    usage: Usage = Usage()


class Cancelled(Shape):
    """The part that had been written. usage: of the model's calls until then; what the one that was broken off took no
    server tells."""

    answer: str
    thinking: str
    usage: Usage = Usage()


# What each type of a journal's entry carries.
JOURNAL: dict[EntryType, type[Shape]] = {
    EntryType.CLAIMED: Claimed,
    EntryType.RESTARTED: Restarted,
    EntryType.STATE: Transition,
    EntryType.THINKING: Piece,
    EntryType.ANSWER: Piece,
    EntryType.MESSAGE: ModelMessage,
    EntryType.NOTICE: Noticed,
    EntryType.TOOL_REQUEST: ToolAsked,
    EntryType.TOOL_RESULT: ToolAnswered,
    EntryType.ATTACHMENTS: FilesSent,
    EntryType.CONTEXT_TRUNCATED: Truncated,
    EntryType.PERSONA_WORKING: PersonaWorking,
    EntryType.PERSONA_DONE: PersonaDone,
    EntryType.COMPLETED: Completed,
    EntryType.FAILED: Failed,
    EntryType.CANCELLED: Cancelled,
    EntryType.CRITIQUE: CritiqueShown,
    EntryType.PAIRWISE: PairwiseShown,
    EntryType.REWARD: RewardShown,
}


def _event(kind: EntryType, data: type[Shape]) -> type[Shape]:
    name = "".join(part.capitalize() for part in kind.value.split("."))
    fields: dict[str, Any] = {
        "id": (str, ...),
        "event": (Literal[kind.value], ...),
        "data": (Annotated[data, Json], ...),
    }
    return create_model(f"{name}Event", __base__=Shape, **fields)


class JournalEvent(RootModel[Any]):
    """An entry of a response's journal: `event` is its type, and `id` what to resume from. Ignore unknown types."""

    root: Union[tuple(_event(kind, data) for kind, data in JOURNAL.items())] = Field(discriminator="event")  # type: ignore[valid-type]  # noqa: UP007


class BusEntry(Shape):
    """An entry of the bus with its envelope. What cannot be read as JSON is shown as a text."""

    subject: str
    entry_id: str
    payload: Any
    source: str = Field(default="", description="participant/replica")
    time: str = Field(default="", description="Milliseconds since the epoch")


class BusEvent(Shape):
    id: str
    event: str = Field(description="The subject")
    data: Json[BusEntry]
