"""Tools, participants, the bus, dead letters, keys, backups: what operators see."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.gateway.http.keys import Role
from services.gateway.http.shape import Shape


class OfferedFunction(Shape):
    name: str
    description: str
    parameters: dict[str, Any] = Field(description="A JSON schema")


class OfferedTool(Shape):
    type: Literal["function"]
    function: OfferedFunction


class ToolList(Shape):
    tools: list[OfferedTool]


class ToolAnswer(Shape):
    result: str = Field(description="The text that the model would read")
    error: str | None
    data: Any = Field(description="The same for programs")
    duration_ms: int = Field(description="Milliseconds")


class ReplicaShown(Shape):
    """A running process; an administrator is told more than its state. Times are in milliseconds since the epoch."""

    state: str
    replica: str = ""
    started: int = 0
    seen: int = 0
    age_ms: int = Field(default=0, description="Milliseconds since it was last heard of")
    in_flight: int = 0
    concurrency: int = 0
    handled: int = 0
    tools: list[str] = Field(default=[])
    facts: dict[str, Any] = Field(default={})
    release: int = 0


class WorkShown(Shape):
    subject: str
    backlog: int | None
    pending: int


class Participant(Shape):
    name: str
    replicas: list[ReplicaShown]
    work: list[WorkShown] = Field(default=[], description="For administrators")


class ParticipantList(Shape):
    participants: list[Participant]


class SettingsShown(Shape):
    participant: str
    json_schema: dict[str, Any] = Field(alias="schema")
    values: dict[str, Any]
    kept: list[str] = Field(
        default=[], description="Those that were changed at run time: they hold at later starts too"
    )


class PersonaList(Shape):
    """Names are compared without regard to case, spaces and underscores."""

    personas: list[str] = Field(description="Everybody who may be named")
    active_personas: list[str] = Field(default=[], description="Who deliberates when a query names nobody")
    order: list[str] = Field(default=[], description="Who of them speaks first")
    rounds: int = Field(default=1, description="When a query does not say")
    parallel: bool = Field(default=False, description="Whether the members of a round speak at the same time")


class Group(Shape):
    name: str
    consumers: int
    lag: int | None
    pending: int


class Stream(Shape):
    subject: str
    length: int
    oldest_seconds: float | None
    groups: list[Group]


class StreamList(Shape):
    streams: list[Stream]


class DeadLetterShown(Shape):
    """An entry that was set aside. One that cannot be read itself has `malformed`, and its fields as texts."""

    id: str
    fields: dict[str, str]
    time: int = Field(default=0, description="Milliseconds since the epoch")
    stream: str = ""
    group: str = ""
    entry_id: str = ""
    deliveries: int = 0
    reason: str = ""
    malformed: str = ""


class DeadLetterPage(Shape):
    dead_letters: list[DeadLetterShown]
    total: int
    next: str | None


class Replayed(Shape):
    id: str
    entry_id: str


class DroppedCount(Shape):
    dropped: int


class Key(Shape):
    id: str
    name: str
    user_id: str
    role: Role
    created: int = Field(description="Milliseconds since the epoch")
    trusted: bool = Field(description="Whether it may name the person that a request is of")
    time_zone: str | None = Field(description="IANA time zone of its questions that name none; null: the deployment's")
    until: int = Field(default=0, description="When it ends, in milliseconds since the epoch; left out: never")


class NewKey(Key):
    key: str = Field(description="The secret; it is shown this once")


class KeyList(Shape):
    keys: list[Key]


class Link(Shape):
    token: str
    path: str
    seconds: int


class RestoreChecked(Shape):
    product: str
    created: int
    counts: dict[str, int]


class RestoreTally(Shape):
    written: int
    kept: int
    skipped: int
    reasons: list[str]


class RestoreFault(Shape):
    code: str
    message: str


class RestoreLine(Shape):
    """A line of a restore's progress: first `checked`, then sections, at last `restored` or `error`.

    A section's line has `removed` during the deletion of its items (mode `replace`), else `done` and `of`.
    """

    checked: RestoreChecked | None = None
    section: str = ""
    removed: int | None = Field(default=None, description="Items of the section that have been removed")
    done: int = 0
    of: int = 0
    restored: dict[str, RestoreTally] | None = None
    error: RestoreFault | None = None


class KindKept(Shape):
    """Things of one kind, of all users. Times are in milliseconds since the epoch."""

    kind: str
    participant: str = Field(description="Who keeps them, and has the setting")
    setting: str
    keep_days: int = Field(description="Days after which they are removed; 0: never")
    kept: int = Field(description="How many there are")
    oldest: int | None = Field(description="When the oldest of them is from; null: there are none")
    due: int = Field(description="How many would be removed now, or if `keep_days` were the days asked for")


class KeeperAway(Shape):
    participant: str
    reason: str


class RetentionShown(Shape):
    days: int | None = Field(description="The days asked for; null: as it is set")
    kinds: list[KindKept]
    away: list[KeeperAway] = Field(description="Who could not be asked")
