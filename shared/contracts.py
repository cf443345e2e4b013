"""Every subject of the bus and its payload, declared once.

A subject is the Redis stream `local2:<subject>`. Payloads are strict when they are written (an unknown field is an
error) and tolerant when they are read (an unknown field is ignored), so that versions can be mixed during a rollout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import orjson
import pydantic.dataclasses
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import to_json

from shared.envelope import Envelope
from shared.errors import DecodeError
from shared.key_prefix import PREFIX

MCP = "mcp"  # the participant that serves the tools of MCP servers
MAX_QUERY_CHARS = 400_000
# Bytes of a file over HTTP, and of a request with images.
MAX_FILE_BODY = 32 * 1024**2
# Characters of the instructions for one conversation.
MOST_SYSTEM_PROMPT = 20_000
# The text that the model reads for a message of files alone; clients get an empty text.
FILES_ALONE = "(The user sent the attached files without a question.)"

RespondentId = Literal["A", "B"]
Mode = Literal["chat", "committee"]
Sentiment = Literal["positive", "negative"]
VotePart = Literal["thumb", "stars"]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Winner = Literal["A", "B", "tie"]

# Bounds of one answer, which no respondent sets itself.
_OF_THE_QUESTION = frozenset({"num_predict", "max_tokens", "stop", "seed"})


# of what is read, names come again and values do not: keeping these costs more than making them
_STRICT = ConfigDict(extra="forbid", cache_strings="keys")


class Payload(BaseModel):
    model_config = ConfigDict(**_STRICT, frozen=True)


class ChatToolCall(Payload):
    """A call of a client's own tool, as the model asked for it."""

    id: str
    name: str
    args: dict[str, Any]


class ChatTurnMessage(Payload):
    """One message of a history that the client gives itself."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    # the model's thoughts before its tool calls, where the client sends them back within the turn
    thinking: str | None = None
    # ids of files of the user's
    attachments: list[str] | None = None


class ClientTools(Payload):
    """Tools that the client runs itself: a call of one ends the answer.

    functions: their schemas in the OpenAI form. choice: `auto`, `required`, or the name of the one that must be called.
    parallel: whether one answer may ask for several.
    """

    functions: list[dict[str, Any]]
    choice: str = "auto"
    parallel: bool = True


class ClientQuery(Payload):
    """The fields of a query that have one form from the client's request to the respondents."""

    query: str = Field(min_length=1, max_length=MAX_QUERY_CHARS)
    mode: Mode = Field(default="chat", description="committee: personas deliberate before the answer")
    personas: list[Name] | None = Field(default=None, max_length=20, description="Who deliberates, in this order")
    rounds: int | None = Field(default=None, ge=1, le=10, description="Rounds of deliberation")
    messages: list[ChatTurnMessage] | None = Field(
        default=None, description="The history before the query, kept by you; then nothing is stored in a session"
    )
    model: Name | None = Field(default=None, description="A model of the backend, for this query only")
    tools: list[Name] | None = Field(
        default=None, max_length=100, description="Only these tools are offered to the model; [] for none"
    )
    system_prompt: str | None = Field(
        default=None,
        max_length=MOST_SYSTEM_PROMPT,
        description="Instructions for this conversation, behind the operator's; left out: those of the session",
    )
    time_zone: str | None = Field(default=None, description="IANA name of the user's zone")


class AcceptedQuery(ClientQuery):
    """The fields of a query that the gateway passes on to the respondents."""

    options: dict[str, Any] | None = None
    attachments: list[dict[str, Any]] | None = Field(
        default=None,
        description="The files of the question, each with its id, and its name, type, size and pages if known",
    )
    material: str | None = Field(
        default=None, description="Text of the client before the question: the model reads it, and it is not stored"
    )
    following: list[ChatTurnMessage] | None = Field(
        default=None,
        description="Messages after the question in a client's history: tool results, the beginning of the answer",
    )
    client_tools: ClientTools | None = None
    answer_schema: dict[str, Any] | None = Field(default=None, description="A JSON schema that the answer must fit")
    think: bool | None = None
    plain: bool = Field(
        default=False,
        description="One call of the model, without our tools and system prompt; nothing is remembered or judged",
    )


class QueryReceived(AcceptedQuery):
    """`query_id` is the id of the stream entry itself."""

    session_id: str
    user_id: str
    kept: bool = Field(default=False, description="The client's history is that of the session, which stores the turn")
    after: str | None = Field(
        default=None,
        description="The previous turn is the newest that was not accepted after this one; null: the newest of all",
    )
    first: bool = Field(default=False, description="The session was made with the query: it has no turn yet")
    time_zone: str = Field(default="", description="IANA name of the user's zone; empty: the deployment's")


class ToolFunction(Payload):
    name: str
    description: str
    parameters: dict[str, Any]


# No call of a tool is waited for longer than this many seconds.
LONGEST_CALL = 3_600.0


class ToolSchema(Payload):
    """`timeout`: seconds that a call may take, where its caller would wait for a shorter time by itself. `read_only`:
    false where it changes something, so that it is run for an answer that is shown alone."""

    type: Literal["function"] = "function"
    function: ToolFunction
    participant: str
    rubric: str | None = None
    priority: int | None = None
    # an operation for other participants, not for a model
    internal: bool | None = None
    timeout: float | None = Field(default=None, gt=0, le=LONGEST_CALL)
    read_only: bool | None = None


class ToolSchemaRequest(Payload):
    """Asks every live tool worker to announce its schema again."""


# What every call makes, and asks for its fields many times, is checked like a model and is none: those are slow to ask.
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=_STRICT)
class ToolRequest:
    """A call of a tool. Only its caller and the tool's worker have the `token`: `reply_to` takes no answer without it.
    `time_zone`: IANA name of the user's zone; empty: the deployment's."""

    query_id: str
    call_id: Annotated[str, Field(min_length=1)]
    tool: str
    args: dict[str, Any]
    session_id: str = ""
    user_id: str = ""
    reply_to: str = ""
    token: str = ""
    time_zone: str = ""


@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=_STRICT)
class ToolResultMessage:
    """`result` is the text for the model, `data` is structured and for clients; `error` is null on success.
    request_id: the entry of the request that was carried out, or of the one that no worker answered in time; empty
    if no request is known to be on the bus, and where a worker does not say.
    """

    query_id: str
    call_id: str
    tool: str
    result: str
    duration_ms: Annotated[int, Field(ge=0)]
    error: str | None = None
    data: Any = None
    session_id: str = ""
    request_id: str = ""


# The error of a call that would change something for an answer that nobody sees; its model reads it.
NOT_RUN = "not run: nothing is changed for an answer that is only compared; answer as if it had succeeded"


class ToolCallRecord(Payload):
    tool: str
    args: dict[str, Any]
    result: str
    error: str | None = None
    call_id: str
    duration_ms: int = 0
    data: Any = None

    @property
    def counts(self) -> bool:
        """Whether the answer is given as after a call that succeeded."""
        return self.error in (None, NOT_RUN)


class Usage(Payload):
    """Tokens of all model calls of an answer. context_tokens: how much of the model's window the last one took, with
    its answer, as the server counts or else as it is estimated; context_window: the window."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    context_tokens: int = 0
    context_window: int = 0


class PersonaToolTrace(Payload):
    tool: str
    args: dict[str, Any]
    result_preview: str


class Deliberation(Payload):
    persona: str
    round: int
    response: str
    thinking: str = ""
    tool_trace: list[PersonaToolTrace] = []


# Characters of it that are told with an answer.
MOST_MATERIAL = 8_000
# Characters of one tool's result in `response.generation`: no observer keeps more.
MOST_RESULT = 200_000


class ResponseGeneration(Payload):
    """`options` are those of this answer. `own_options`: of them what the respondent's settings say, without what the
    client asked for; None where the writer does not tell."""

    query_id: str
    response_id: str
    session_id: str
    user_id: str
    respondent_id: RespondentId
    generator_id: str
    query: str
    answer: str
    thinking: str = ""
    tool_calls: list[ToolCallRecord] = []
    model: str
    options: dict[str, Any] = {}
    own_options: dict[str, Any] | None = None
    # tells system prompts apart in statistics
    prompt_version: str = ""
    usage: Usage = Usage()
    finish_reason: str
    deliberations: list[Deliberation] | None = None
    # the beginning of what the model read before the question, beside the conversation: passages that a client put
    # there, texts of attached files, a line for each image. For whoever judges the answer; it is kept nowhere
    material: str | None = None
    # the conversation, where the client gave it itself: no session has it
    history: list[ChatTurnMessage] | None = None
    # the assistant's instructions as the model read them, with the date and what it was told of its last grade; without
    # what members of a committee said
    system: str = ""
    # IANA name of the user's zone; empty: the deployment's
    time_zone: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """What stands for this answer in rankings: model, sampling, system prompt. What a client asks for is part of
        its question: two answers that differ in nothing else are of one configuration."""
        own = self.own_options
        if own is None:
            own = {name: value for name, value in self.options.items() if name not in _OF_THE_QUESTION}
        return {"model": self.model, "options": own, "prompt_version": self.prompt_version}


def prompt_version(system_prompt: str) -> str:
    """A short name of a system prompt: the same words, the same name."""
    return sha256(system_prompt.encode()).hexdigest()[:8]


def configuration(model: str, own_options: dict[str, Any], system_prompt: str) -> dict[str, Any]:
    """The configuration that answers given with these settings name (`ResponseGeneration.config`)."""
    return {"model": model, "options": own_options, "prompt_version": prompt_version(system_prompt)}


class AnswerDialog(Payload):
    session_id: str
    query_id: str
    query: str
    answer: str
    respondent_id: RespondentId


class JudgeGrade(Payload):
    """What one of several judges said of an answer; without a score `feedback` says why there is none."""

    model: str
    score: int | None = Field(default=None, ge=1, le=5)
    feedback: str


class JudgeVerdict(Payload):
    """What one of several judges said of two answers; without a winner `reason` says why there is none."""

    model: str
    winner: Winner | None = None
    forward: Winner | None = None
    swapped: Winner | None = None
    reason: str


class CritiqueResult(Payload):
    """`prompt`: what the judge read, as messages; None where it held material, which is kept nowhere, or nobody was
    asked. `judges`: where several judge, what each said; `score` is what they come to."""

    query_id: str
    response_id: str
    session_id: str
    respondent_id: RespondentId
    score: int | None = Field(default=None, ge=1, le=5)
    feedback: str
    rubric: str
    query: str
    answer: str
    prompt: list[ChatTurnMessage] | None = None
    judges: list[JudgeGrade] = []


class PairwiseResult(Payload):
    original_query_id: str
    query_id_a: str
    query_id_b: str
    winner: Winner
    score_a: float | None = None
    score_b: float | None = None
    reason: str
    config_a: dict[str, Any]
    config_b: dict[str, Any]
    session_id: str
    # who won when A stood first, and when B did
    forward: Winner | None = None
    swapped: Winner | None = None
    # where several judge, what each said; `winner` is what most of them name
    judges: list[JudgeVerdict] = []


class UserFeedback(Payload):
    """A thumb, stars or both, which one vote keeps apart; or what of it is withdrawn.

    Without `parts` it is about the stars where there are some, else about the thumb; a withdrawal about both.
    """

    query_id: str
    session_id: str
    user_id: str
    respondent_id: RespondentId = "A"
    # what the stars say, where only they are given; none of what is withdrawn
    sentiment: Sentiment | None = None
    stars: int | None = Field(default=None, ge=1, le=5)
    comment: str | None = None
    parts: list[VotePart] = []
    withdrawn: bool = False

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.withdrawn and (self.sentiment is None or ("stars" in self.parts and self.stars is None)):
            raise ValueError("sentiment, and stars where they are among the parts, must be given unless withdrawn")
        return self

    def changed(self) -> tuple[VotePart, ...]:
        """The parts of the vote that it is about."""
        if self.parts:
            return tuple(self.parts)
        return ("thumb", "stars") if self.withdrawn else ("thumb",) if self.stars is None else ("stars",)


class RewardEvent(Payload):
    query_id: str
    response_id: str
    respondent_id: RespondentId
    reward: float = Field(ge=-1, le=1)
    source: str
    config: dict[str, Any]
    intent: str = ""
    # an entry's id: a larger one tells a later state of the vote on the same answer
    vote_id: str = ""
    # nothing is left of the vote, and the reward is 0
    withdrawn: bool = False


class MemorySave(Payload):
    """A sentence or a topic's content to be remembered; `recorded` is when it was accepted, in ms. `time_zone`: IANA
    name of the user's zone."""

    id: str
    user_id: str
    kind: Literal["note", "topic"]
    content: str
    topic: str = ""
    session_id: str = ""
    query_id: str = ""
    recorded: int
    time_zone: str = ""


class MemoryClassify(Payload):
    """An engram whose intent and names the model is to tell, when it has time."""

    id: str
    user_id: str


class MemoryRead(Payload):
    """A file of a user whose text is to be read into the library of documents."""

    user_id: str
    file_id: str


class MemoryForget(Payload):
    """Everything remembered of a session that was deleted at `at` (ms)."""

    user_id: str
    session_id: str
    at: int


class QueryForget(Payload):
    """Everything that came of queries of a session, whose user has taken them back at `at` (ms)."""

    user_id: str
    session_id: str
    queries: list[str]
    at: int


class MemoryChanged(Payload):
    """Engrams of a user that were written or removed; `all`: every one is gone. The replicas of memory follow it."""

    user_id: str
    put: list[str] = []
    removed: list[str] = []
    all: bool = False


class SessionSummarise(Payload):
    """The older turns of a session are to be summarised, up to that of the query `until`, when the model has time."""

    session_id: str
    user_id: str
    until: str


class KnowledgeRead(Payload):
    """A response whose facts the model is to read, when it has time."""

    response_id: str
    user_id: str


class KnowledgeForget(Payload):
    """What rests on these responses alone is forgotten, as far as it was said until `at` (ms); none named: all of the
    user's."""

    user_id: str
    response_ids: list[str] = []
    at: int


class AgentTransition(Payload):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    agent: str
    replica: str
    query_id: str
    from_state: str = Field(alias="from")
    action: str
    to: str


class SettingsUpdate(Payload):
    participant: str
    values: dict[str, Any]


class QueryCancel(Payload):
    query_id: str


class DeadLetter(Payload):
    """`fields` is readable; `raw` (base64 of each name and value in turn) is there when they are not valid UTF-8, or a
    name occurs twice."""

    stream: str
    group: str
    entry_id: str
    deliveries: int
    reason: str
    fields: dict[str, str]
    raw: list[str] | None = None


AnyPayload = Payload | ToolRequest | ToolResultMessage
T = TypeVar("T", bound=AnyPayload)


def encode(payload: AnyPayload) -> bytes:
    """A payload as JSON. Raises ValueError for what JSON cannot carry."""
    try:
        return orjson.dumps(payload, default=_fields)
    except TypeError:
        # what orjson does not know, like integers of more than 64 bits
        return to_json(payload, by_alias=True, inf_nan_mode="null")


def _fields(value: Any) -> dict[str, Any]:
    """A payload's fields as they are: what was validated when it was made is not looked at again."""
    if isinstance(value, AgentTransition):
        # its field cannot have its name in Python
        return {"from" if name == "from_state" else name: field for name, field in value.__dict__.items()}
    if isinstance(value, Payload):
        return value.__dict__
    raise TypeError


@dataclass(slots=True)
class Outgoing:
    """A message to publish. `once` is a key under which it is published at most one time."""

    envelope: Envelope
    once: str | None = None


@dataclass(frozen=True, slots=True)
class Subject(Generic[T]):
    """A named stream of one payload type.

    kind `work`: read by consumer groups, never trimmed past an entry that one of them has not finished.
    kind `event`: read by observers, trimmed to about `keep` entries.
    `single_group`: exactly one group reads it, so finished entries are deleted.
    """

    name: str
    payload: type[T]
    kind: Literal["work", "event"] = "event"
    single_group: bool = False
    keep: int = 10_000

    @property
    def stream(self) -> str:
        return PREFIX + self.name

    def of(self, payload: T, *, once: str | None = None, **headers: Any) -> Outgoing:
        """The payload in its envelope; `headers` are envelope fields (see Envelope and Message.headers)."""
        return self.of_json(encode(payload), once=once, **headers)

    def of_json(self, data: bytes, *, once: str | None = None, **headers: Any) -> Outgoing:
        """The same for a payload of this subject that has been encoded before."""
        return Outgoing(Envelope(subject=self.name, payload=data, **headers), once)

    def decode(self, envelope: Envelope) -> T:
        """Raises DecodeError when the payload does not have this subject's form."""
        return self.read(envelope.payload)

    def read(self, data: bytes) -> T:
        """A payload from its JSON. Raises DecodeError."""
        kind: Any = self.payload
        try:
            payload: T = kind.__pydantic_validator__.validate_json(data, extra="ignore")
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "payload"
            raise DecodeError(f"the payload is malformed: {where}: {first['msg']}") from exc
        return payload

    def for_tool(self, tool: str) -> Subject[T]:
        """The subject of one tool, for the two subjects whose name ends in the tool's."""
        return replace(self, name=f"{self.name}.{tool}")


QUERY_RECEIVED = Subject("query.received", QueryReceived, kind="work")
TOOL_SCHEMA = Subject("tool.schema", ToolSchema, keep=1_000)
TOOL_SCHEMA_REQUEST = Subject("tool.schema.request", ToolSchemaRequest, keep=100)
TOOL_REQUEST = Subject("tool.request", ToolRequest, kind="work", single_group=True)
TOOL_RESULT = Subject("tool.result", ToolResultMessage)
RESPONSE_GENERATION = Subject("response.generation", ResponseGeneration, kind="work")
ANSWER_DIALOG = Subject("answer.dialog", AnswerDialog)
CRITIQUE_RESULT = Subject("critique.result", CritiqueResult, kind="work")
PAIRWISE_RESULT = Subject("pairwise.result", PairwiseResult, kind="work")
USER_FEEDBACK = Subject("user.feedback", UserFeedback, kind="work")
REWARD_EVENT = Subject("reward.event", RewardEvent, kind="work")
MEMORY_SAVE = Subject("memory.save", MemorySave, kind="work", single_group=True)
MEMORY_CLASSIFY = Subject("memory.classify", MemoryClassify, kind="work", single_group=True)
MEMORY_READ = Subject("memory.read", MemoryRead, kind="work", single_group=True)
MEMORY_FORGET = Subject("memory.forget", MemoryForget, kind="work")
QUERY_FORGET = Subject("query.forget", QueryForget, kind="work")
MEMORY_CHANGED = Subject("memory.changed", MemoryChanged, keep=100_000)
SESSION_SUMMARISE = Subject("session.summarise", SessionSummarise, kind="work", single_group=True)
KNOWLEDGE_READ = Subject("knowledge.read", KnowledgeRead, kind="work", single_group=True)
KNOWLEDGE_FORGET = Subject("knowledge.forget", KnowledgeForget, kind="work", single_group=True)
AGENT_TRANSITION = Subject("agent.transition", AgentTransition)
SETTINGS_UPDATE = Subject("settings.update", SettingsUpdate, keep=1_000)
QUERY_CANCEL = Subject("query.cancel", QueryCancel, keep=1_000)
DEAD_LETTER = Subject("dead.letter", DeadLetter, keep=100_000)

# Subjects with a fixed name; the two tool subjects exist once per tool.
SUBJECTS: tuple[Subject[Any], ...] = (
    QUERY_RECEIVED,
    TOOL_SCHEMA,
    TOOL_SCHEMA_REQUEST,
    RESPONSE_GENERATION,
    ANSWER_DIALOG,
    CRITIQUE_RESULT,
    PAIRWISE_RESULT,
    USER_FEEDBACK,
    REWARD_EVENT,
    MEMORY_SAVE,
    MEMORY_CLASSIFY,
    MEMORY_READ,
    MEMORY_FORGET,
    QUERY_FORGET,
    MEMORY_CHANGED,
    SESSION_SUMMARISE,
    KNOWLEDGE_READ,
    KNOWLEDGE_FORGET,
    AGENT_TRANSITION,
    SETTINGS_UPDATE,
    QUERY_CANCEL,
    DEAD_LETTER,
)

# Tools that return data of the user's own store or of this machine; other results may be a stranger's text.
OWN_TOOLS = frozenset(
    {"search_memory", "save_memory", "save_topic", "recall_topic", "search_knowledge_graph", "current_time"}
)
# Older tool names stay usable on the bus, in lists of tools, and when a model calls them.
TOOL_ALIASES: dict[str, str] = {
    "recall_memory": "search_memory",
    "memory_recall": "search_memory",
    "search_memories": "search_memory",
    "memory_save": "save_topic",
}


def canonical_tool(name: str, args: dict[str, Any]) -> str:
    """Return the current name of a called tool. An old recall name with a `topic` means recall_topic."""
    current = TOOL_ALIASES.get(name, name)
    if current == "search_memory" and name != current and args.get("topic"):
        return "recall_topic"
    return current


def is_untrusted(name: str) -> bool:
    """Return whether a participant or tool belongs to an untrusted worker: `web_…`, mcp, and its `server__tool`.

    Untrusted workers read pages and programs of third parties, so that they may be captured.
    """
    return name.startswith("web_") or name == MCP or "__" in name


def listed_tools(names: Iterable[str]) -> frozenset[str]:
    """Return the current names of listed tools. An old recall name stands for two tools."""
    topic: dict[str, Any] = {"topic": "any"}
    return frozenset(current for name in names for current in (canonical_tool(name, {}), canonical_tool(name, topic)))


def persona_key(name: str) -> str:
    """What names of one persona have in common: case, spaces and underscores make no difference."""
    return "".join(name.casefold().replace("_", " ").split())
