"""The entries of a journal, one model per type: written by a response, and shown to clients.

Writers use the constructors, which refuse unknown fields. Readers are tolerant, because a newer release may write
unknown types and fields: an unknown field is ignored, and an unknown type or malformed data becomes `Unknown`.
Field names and their order are those of the JSON text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.contracts import (
    Deliberation,
    JudgeGrade,
    JudgeVerdict,
    PersonaToolTrace,
    Sentiment,
    ToolCallRecord,
    Usage,
    Winner,
)
from shared.telemetry.unread import not_understood


class EntryType(StrEnum):
    CLAIMED = "claimed"
    RESTARTED = "restarted"
    STATE = "state"
    THINKING = "thinking"
    ANSWER = "answer"
    MESSAGE = "message"
    NOTICE = "notice"
    TOOL_REQUEST = "tool.request"
    TOOL_RESULT = "tool.result"
    ATTACHMENTS = "attachments"
    CONTEXT_TRUNCATED = "context.truncated"
    PERSONA_WORKING = "persona.working"
    PERSONA_DONE = "persona.done"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CRITIQUE = "critique"
    PAIRWISE = "pairwise"
    REWARD = "reward"


TERMINAL = frozenset({EntryType.COMPLETED, EntryType.FAILED, EntryType.CANCELLED})
# Other participants append them after the terminal entry.
LATE = frozenset({EntryType.CRITIQUE, EntryType.PAIRWISE, EntryType.REWARD})

# A committee member and its round; None: the answer's own.
Speaker = tuple[str, int] | None


def _open(schema: dict[str, Any]) -> None:
    # Clients ignore unknown fields: a later version may add some.
    schema.pop("additionalProperties", None)


class Part(BaseModel):
    """A part of an event's data."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        populate_by_name=True,
        defer_build=True,
        cache_strings="keys",
        json_schema_extra=_open,
    )


class EventData(Part):
    """The data of an entry. `type` is the entry's type."""

    type: ClassVar[EntryType]

    @property
    def speaker(self) -> Speaker:
        """Whose event it is."""
        persona = getattr(self, "persona", "")
        return (persona, getattr(self, "round", 0)) if persona else None


class Attached(Part):
    """A file of a question."""

    id: str
    name: str = ""
    type: str = Field(default="", description="Detected from the content; empty: not known")
    size: int | None = Field(default=None, description="Bytes")
    pages: int | None = Field(default=None, description="Pages of a PDF that has been read")


class Claimed(EventData):
    """A replica has become the journal's writer."""

    type = EntryType.CLAIMED

    query_id: str
    response_id: str = ""
    session_id: str
    respondent_id: str = ""
    replica: str = ""
    model: str | None = None
    attempt: int = 1
    attachments: list[Attached] = Field(default=[])


class Restarted(EventData):
    """A model call began again: text after `discard_after` is void."""

    type = EntryType.RESTARTED

    step: int
    discard_after: str
    persona: str = ""
    round: int = 0


class Transition(EventData):
    """A step of the state machine."""

    type = EntryType.STATE

    from_state: str = Field(alias="from")
    action: str
    to: str


class Piece(EventData):
    """A piece of the model's text."""

    text: str
    persona: str = ""
    round: int = 0


class ThinkingPiece(Piece):
    """A piece of the model's thinking."""

    type = EntryType.THINKING


class AnswerPiece(Piece):
    """A piece of the model's answer."""

    type = EntryType.ANSWER


class ContextShown(Part):
    """The part of the conversation in the prompt: counts of turns, and ids of queries."""

    window: int = Field(description="Tokens")
    tokens: int = Field(description="Of prompt and answer: the server's count, else an estimate")
    ratio: float = Field(default=0, description="Characters per token, by the newest count")
    image_tokens: int = Field(default=0, description="Tokens of an image, by the newest count")
    turns: int = Field(description="Turns that are sent in full")
    cut: int = Field(description="Turns that are left out because they do not fit")
    first_turn: str = Field(default="", description="The oldest turn that is sent")
    summarised: int = Field(default=0, description="Earlier turns that a summary covers")
    summarised_until: str = Field(default="", description="The newest summarised turn")


class CallOfMessage(Part):
    """A tool call as the model wrote it. error: why it cannot be run. signature: of the thoughts before it."""

    id: str
    name: str
    args: dict[str, Any]
    signature: str | None = None
    error: str | None = None


class ModelMessage(EventData):
    """A whole message of the model, with its tool calls and token counts."""

    type = EntryType.MESSAGE

    step: int
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[CallOfMessage] = Field(default=[])
    prompt_tokens: int | None = Field(default=0, description="null: the server did not count them")
    completion_tokens: int | None = Field(default=0, description="null: the server did not count them")
    finish_reason: str = ""
    model: str = ""
    context: ContextShown | None = None
    persona: str = ""
    round: int = 0
    reasoning_details: list[dict[str, Any]] = Field(
        default=[], description="The thoughts in the model server's own form"
    )
    scope: str = Field(default="", description="The committee member whose steps are counted; empty: the answer")


class Noticed(EventData):
    type = EntryType.NOTICE

    code: str
    message: str
    about: str = Field(default="", description="Of `low_grade`: the query whose answer was graded")
    score: int = Field(default=0, description="Of `low_grade`: 1 or 2")
    note: str = Field(default="", description="Of `low_grade`: the note in the prompt")
    persona: str = ""
    round: int = 0


class ToolAsked(EventData):
    type = EntryType.TOOL_REQUEST

    call_id: str
    tool: str
    args: dict[str, Any]
    step: int
    persona: str = ""
    round: int = 0


class ToolAnswered(ToolCallRecord, EventData):
    """A tool's result."""

    type = EntryType.TOOL_RESULT

    persona: str = ""
    round: int = 0


class SentEarlier(Part):
    """A file of an earlier message."""

    id: str
    name: str = ""
    sent: str = Field(
        description="image, text: with its message while it fits. In all other forms the model gets a line: search, "
        "left_out, unseen (the model sees no images), deleted, unreadable, away (the memory does not answer)"
    )


class FilesSent(EventData):
    """The forms in which the model gets the files of earlier messages."""

    type = EntryType.ATTACHMENTS

    files: list[SentEarlier]


class Truncated(EventData):
    """The conversation does not fit the model's context: turns are left out, images of earlier messages, or both."""

    type = EntryType.CONTEXT_TRUNCATED

    dropped_turns: int
    kept_turns: int
    prompt_tokens: int
    attachments: list[Attached] = Field(default=[], description="Images of earlier messages that are not sent")
    turns: int = 0
    cut: int = 0
    first_turn: str = Field(default="", description="The oldest turn that is sent")
    summarised: int = Field(default=0, description="Earlier turns that a summary covers")
    summarised_until: str = ""
    persona: str = ""
    round: int = 0


class PersonaWorking(EventData):
    type = EntryType.PERSONA_WORKING

    persona: str
    round: int


class PersonaDone(EventData):
    type = EntryType.PERSONA_DONE

    persona: str
    round: int
    response: str = ""
    thinking: str = ""
    tool_trace: list[PersonaToolTrace] = Field(default=[])


class CallEnded(ToolCallRecord):
    """A call with its outcome."""

    result_in: str = Field(
        default="", description="The id of the event that has a large result and large data, which are left out here"
    )


class ClientCall(Part):
    """A call that the client is to run."""

    id: str
    name: str
    args: dict[str, Any]


class Completed(EventData):
    type = EntryType.COMPLETED

    answer: str
    said_before: list[str] = Field(default=[])
    thinking: str
    tool_calls: list[CallEnded]
    usage: Usage
    finish_reason: str
    model: str
    client_calls: list[ClientCall] = Field(default=[])
    deliberations: list[Deliberation] = Field(default=[])
    published: bool = True


class Failed(EventData):
    """There is no answer. usage: of the finished model calls."""

    type = EntryType.FAILED

    code: str
    message: str
    usage: Usage = Usage()


class Cancelled(EventData):
    """The part that had been written. usage: of the finished model calls; the tokens of an aborted one are unknown."""

    type = EntryType.CANCELLED

    answer: str
    thinking: str
    usage: Usage = Usage()


class CritiqueShown(EventData):
    type = EntryType.CRITIQUE

    score: int | None = Field(ge=1, le=5, description="null: no judge gave a score")
    feedback: str
    rubric: str
    judges: list[JudgeGrade] = Field(default=[], description="Where several judge, what each said")


class PairwiseShown(EventData):
    type = EntryType.PAIRWISE

    winner: Winner
    reason: str
    score_a: int | float | None
    score_b: int | float | None
    judges: list[JudgeVerdict] = Field(default=[], description="Where several judge, what each said")


class RewardShown(EventData):
    type = EntryType.REWARD

    reward: float | None = Field(ge=-1, le=1, description="null, like all other fields: the vote was withdrawn")
    sentiment: Sentiment | None = Field(description="By the stars, else by the thumb")
    thumb: Sentiment | None = Field(default=None, description="null: none was given, or it was withdrawn")
    stars: int | None = Field(ge=1, le=5)
    comment: str | None


class Unknown(NamedTuple):
    """An entry of an unknown type, or with malformed data."""

    type: str
    speaker: Speaker = None


KnownEvent = (
    Claimed
    | Restarted
    | Transition
    | ThinkingPiece
    | AnswerPiece
    | ModelMessage
    | Noticed
    | ToolAsked
    | ToolAnswered
    | FilesSent
    | Truncated
    | PersonaWorking
    | PersonaDone
    | Completed
    | Failed
    | Cancelled
    | CritiqueShown
    | PairwiseShown
    | RewardShown
)
Event = KnownEvent | Unknown
MODELS: dict[str, type[KnownEvent]] = {model.type: model for model in get_args(KnownEvent)}
# A terminal entry with malformed data ends its response all the same, with at least these fields.
_LEAST: dict[str, dict[str, Any]] = {
    EntryType.COMPLETED: {
        "answer": "", "thinking": "", "tool_calls": [], "usage": {}, "finish_reason": "", "model": ""
    },
    EntryType.FAILED: {"code": "internal", "message": ""},
    EntryType.CANCELLED: {"answer": "", "thinking": ""},
}  # fmt: skip


class Entry(NamedTuple):
    """An entry of a journal. `time` is in ms since the epoch.

    token: of a tool's request, the secret by which its answer is recognised; no client is shown it.
    """

    id: str
    time: int
    event: Event
    token: str = ""


def encode(event: KnownEvent) -> tuple[EntryType, bytes]:
    """Return the type and the JSON text of an entry. Fields that were not set are left out."""
    return event.type, event.model_dump_json(by_alias=True, exclude_unset=True).encode()


def shown(event: KnownEvent) -> dict[str, Any]:
    """Return an event's data as JSON values. Fields that the journal does not have are left out."""
    return event.model_dump(mode="json", by_alias=True, exclude_unset=True)


def decode(entry_id: str, kind: str, time: int, data: bytes | Mapping[str, Any], token: str = "") -> Entry:
    """Read an entry; `data` is its JSON text, or the values in it."""
    model: Any = MODELS.get(kind)
    if model is None:
        return Entry(entry_id, time, Unknown(kind))
    values: Any = {}
    try:
        values = orjson.loads(data) if isinstance(data, bytes) else data
        return Entry(entry_id, time, model.__pydantic_validator__.validate_python(values, extra="ignore"), token)
    except orjson.JSONDecodeError as exc:
        reason = f"no JSON: {exc}"
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        reason = f"{'.'.join(str(part) for part in first['loc']) or 'data'}: {first['msg']}"
    not_understood("a journal", entry_id, f"{kind}: {reason}", data if isinstance(data, bytes) else b"")
    return Entry(entry_id, time, _end(model, values) or Unknown(kind))


def _end(model: type[KnownEvent], given: Any) -> KnownEvent | None:
    """Return the terminal event of malformed data, with the well-formed fields; None for other types."""
    values = _LEAST.get(model.type)
    if values is None:
        return None
    for name, value in given.items() if isinstance(given, dict) else ():
        with contextlib.suppress(ValidationError):
            model.model_validate(values | {name: value}, extra="ignore")
            values = values | {name: value}
    return model.model_validate(values, extra="ignore")
