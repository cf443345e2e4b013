"""The JSON bodies of requests, and the shapes of answers for the API description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from services.gateway.http.errors import CODES
from services.gateway.http.keys import Role
from services.gateway.http.session_ids import SESSION_RULE, is_session_id
from shared import zones
from shared.contracts import MAX_QUERY_CHARS, MOST_SYSTEM_PROMPT, ClientQuery, Mode, Name, Sentiment, VotePart

TimeZone = Annotated[str, StringConstraints(max_length=zones.LONGEST_NAME), AfterValidator(zones.zone_name)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Options(Body):
    """Sampling of this query; what is left out is the participant's setting."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=100_000)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**31), lt=2**32)
    num_predict: int | None = Field(default=None, ge=1, le=1_000_000, description="Most tokens to generate")
    stop: list[Annotated[str, StringConstraints(min_length=1, max_length=200)]] | None = Field(
        default=None, max_length=16
    )
    repeat_penalty: float | None = Field(default=None, ge=0, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)


class QueryBody(ClientQuery):
    model_config = ConfigDict(
        json_schema_extra={"example": {"query": "What is the capital of France?", "session_id": "geography-1"}}
    )

    query: str = Field(
        max_length=MAX_QUERY_CHARS, description="The text of the question; may be empty if there are attachments"
    )
    session_id: str | None = Field(
        default=None, description=f"A session of yours, made when it is new: {SESSION_RULE}. Left out: a fresh one"
    )
    attachments: list[Name] | None = Field(
        default=None,
        max_length=16,
        description="Ids of your files that belong to the question. Left out, with `instead_of`: those of the query "
        "whose place it takes; [] for none",
    )
    options: Options | None = None
    instead_of: str | None = Field(
        default=None,
        max_length=64,
        description="A query of the session whose place this one takes, for the model and for who reads. The same "
        "words again are a further version, and the other stays readable; with other words it and what came after it "
        "leave the session, and memory forgets them. Left out: the question comes behind the newest turn",
    )
    deadline_seconds: float | None = Field(
        default=None, gt=0, description="Seconds for the whole answer, at most the gateway's own limit"
    )
    time_zone: TimeZone | None = Field(
        default=None,
        description="Your IANA time zone, for example Europe/Berlin: the model reads the date there. Left out: that of "
        "your key, else the deployment's",
    )

    @field_validator("session_id")
    @classmethod
    def _well_formed(cls, value: str | None) -> str | None:
        if value is not None and not is_session_id(value):
            raise ValueError(f"must be {SESSION_RULE}")
        return value

    @model_validator(mode="after")
    def _one_history(self) -> Self:
        if not self.query.strip() and not self.attachments:
            raise ValueError("query: must not be empty; only a message with attachments may be")
        if self.messages is not None and self.session_id is not None:
            raise ValueError("give either session_id or messages, not both")
        if self.instead_of is not None and self.session_id is None:
            raise ValueError("instead_of needs the session_id of that query")
        if self.mode != "committee" and (self.personas is not None or self.rounds is not None):
            raise ValueError("personas and rounds need mode committee")
        return self


class ChatSettings(Body):
    """How one chat is asked, in every browser; what is null is as the operator has set it.

    Model, temperature and system prompt hold for every query of the session that names none; mode, personas and rounds
    are kept for the client.
    """

    model: Name | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    system_prompt: str | None = Field(default=None, max_length=MOST_SYSTEM_PROMPT)
    mode: Mode | None = None
    personas: list[Name] | None = Field(default=None, max_length=20)
    rounds: int | None = Field(default=None, ge=1, le=10)

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> ChatSettings:
        """As they are kept; none, where that was written by somebody else."""
        try:
            return cls.model_validate(kept)
        except ValidationError:
            return cls()


class SessionBody(Body):
    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"example": {"title": "Capitals", "pinned": True}}
    )

    title: str | None = Field(default=None, max_length=200, description="Left out: it stays")
    pinned: bool | None = Field(default=None, description="Left out: it stays")
    settings: ChatSettings | None = Field(default=None, description="All of them; left out: they stay")
    version: str | None = Field(
        default=None,
        max_length=64,
        description="The query of a turn: of the versions of an answer this one is shown, with what was said behind "
        "it, and the next question goes on from there",
    )

    @field_validator("title")
    @classmethod
    def _says_something(cls, value: str | None) -> str | None:
        title = None if value is None else " ".join(value.split())
        if title == "":
            raise ValueError("must not be empty")
        return title

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.model_dump(exclude_none=True) == {}:
            raise ValueError("give at least one of title, pinned, settings and version")
        return self


class FeedbackBody(Body):
    """A thumb (`sentiment`), stars or both: two fields of one vote. What is not given stays as it was. 5 and 4 stars
    are positive, 2 and 1 negative. 3 weigh nothing; they are positive unless a sentiment is given."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={"example": {"query_id": "1700000000000-0", "stars": 5, "comment": "Short and right."}},
    )

    query_id: str = Field(min_length=1, max_length=64)
    sentiment: Sentiment | None = None
    stars: int | None = Field(default=None, ge=1, le=5)
    comment: str | None = Field(default=None, max_length=4_000)

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        implied = self._implied()
        if self.sentiment is None and self.stars is None:
            raise ValueError("either sentiment or stars must be given")
        if self.sentiment is not None and implied is not None and self.sentiment != implied:
            raise ValueError(f"{self.stars} stars and a {self.sentiment} sentiment contradict each other")
        return self

    def _implied(self) -> Sentiment | None:
        if self.stars is None or self.stars == 3:
            return None
        return "positive" if self.stars > 3 else "negative"

    def parts(self) -> list[VotePart]:
        """What of the vote it gives."""
        given: dict[VotePart, Any] = {"thumb": self.sentiment, "stars": self.stars}
        return [name for name, value in given.items() if value is not None]

    def verdict(self) -> Sentiment:
        return self.sentiment or self._implied() or "positive"


class ToolCallBody(Body):
    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"example": {"args": {"query": "LoCAL2 release notes"}}}
    )

    args: dict[str, Any] = Field(default_factory=dict, description="As the tool's schema in GET /tools says")


class KeyBody(Body):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={"example": {"name": "Ann's laptop", "user_id": "ann", "role": "user"}},
    )

    name: str = Field(min_length=1, max_length=100, description="To recognise the key by")
    user_id: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}$", description="Whose queries and sessions the key opens"
    )
    role: Role = "user"
    trusted: bool = Field(
        default=False,
        description="It may name the person and the chat of a request: X-OpenWebUI-User-Id and X-OpenWebUI-Chat-Id, or "
        "`user` and `metadata` of a chat completion",
    )
    time_zone: TimeZone | None = Field(
        default=None, description="IANA time zone of its questions that name none; left out: the deployment's"
    )


class KeyChange(Body):
    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"example": {"time_zone": "Australia/Sydney"}}
    )

    time_zone: TimeZone | None = Field(
        description="IANA time zone of its questions that name none; null: the deployment's"
    )


class RedeemBody(Body):
    token: str = Field(min_length=1, max_length=200, description="Of a one-time link")


class Fault(BaseModel):
    """`code` is for programs, `message` for people; some errors carry more."""

    model_config = ConfigDict(extra="allow")

    code: str = Field(description=f"One of these, or of a version that is newer: {', '.join(sorted(CODES))}")
    message: str
    query_id: str = Field(default="", description="Of the query that it is about")
    session_id: str = ""
    type: str = Field(default="", description="OpenAI's name for the kind of error; on /v1 only")
    param: str | None = None


class Problem(BaseModel):
    """What every refusal and every failure looks like."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"error": {"code": "not_found", "message": "there is no such session"}}}
    )

    error: Fault


JSON = "application/json"
SSE = "text/event-stream"
LINES = "application/x-ndjson"
# Where the description has a model.
PLACE = "#/components/schemas/{model}"

MEANINGS: dict[int, str] = {
    400: "Malformed", 401: "No valid API key", 403: "Not for this key", 404: "Not there, or not yours",
    408: "The body comes too slowly",
    409: "Conflict", 410: "The query of this Idempotency-Key was deleted", 413: "Too large", 415: "Not JSON",
    422: "A value is wrong", 429: "Too busy; see Retry-After",
    502: "The model backend failed", 503: "The bus or a participant is away", 504: "The deadline has passed",
}  # fmt: skip
# How OpenAPI says what stands for a whole body that is no JSON.
_WHOLE: dict[type, dict[str, Any]] = {bytes: {"type": "string", "format": "binary"}, str: {"type": "string"}}
# Named by its place, because FastAPI builds what checks a model anew for every route that names the model itself.
PROBLEM: dict[str, Any] = {"content": {JSON: {"schema": {"$ref": PLACE.format(model=Problem.__name__)}}}}


def spec(
    description: str,
    shape: Any,
    example: Any,
    *problems: int,
    status: int = 200,
    media: str = JSON,
    events: type[BaseModel] | None = None,
    key: bool = True,
) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route: the successful one, with an example, and its errors.

    shape: of the JSON, of one event or of one line; `str` or `bytes` for other bodies. events: the shape of the
    server-sent events that a client can ask for instead. key: whether the route needs an API key.
    """
    answer: dict[str, Any] = {"description": description, "content": {media: {"example": example}}}
    if media == JSON:
        answer["model"] = shape
    else:
        answer["content"][media] |= {"schema": _WHOLE[shape]} if shape in _WHOLE else _each(shape)
    if events is not None:
        answer["content"][SSE] = _each(events)
    found: dict[int | str, dict[str, Any]] = {status: answer}
    for code in (*((401,) if key else ()), *problems):
        found[code] = {"description": MEANINGS[code], **PROBLEM}
    return found


def _each(shape: type[BaseModel]) -> dict[str, Any]:
    """A body that is a text with many such things in it: OpenAPI 3.2 says it by `itemSchema`, which 3.1 lacks."""
    return {"schema": {"type": "string"}, "x-itemSchema": {"$ref": PLACE.format(model=shape.__name__)}}


Respondent = Literal["A", "B"]
