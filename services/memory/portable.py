"""Engrams as lines of JSON, for moving in and out. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from services.memory.engram import MAX_TEXT, Engram, Note, imported_id, topic_id
from services.memory.tools import MAX_CONTENT, checked_topic
from shared.errors import ToolError
from shared.participant.settings import describe

# A number below this is a time in seconds, as other programs write it.
_SECONDS = 100_000_000_000
_KINDS = frozenset({"critique", "pairwise", "reward", "class"})
_VERDICTS = ("A", "B", "tie")
_UNSTAMPED = "0" * 35
_FIELDS = (
    "respondent_id",
    "query_id",
    "generator_id",
    "model",
    "options",
    "finish_reason",
    "before",
    "follows",
    "tainted",
    "echo",
    "time_zone",
)


class Line(BaseModel):
    """One engram: query and answer, or content; with `topic` a topic. `metadata` is kept; what an export wrote there
    (grades, model, tools) is understood again."""

    model_config = ConfigDict(extra="ignore")

    query: str = Field(default="", max_length=MAX_TEXT)
    answer: str = Field(default="", max_length=MAX_TEXT)
    content: str = Field(default="", max_length=MAX_TEXT)
    topic: str = ""
    session_id: str = Field(default="", max_length=200)
    time: int | None = None
    user_id: str = Field(default="", max_length=200)
    metadata: dict[str, Any] = {}

    @field_validator("query", "answer", "content", "topic", "session_id", "user_id", mode="before")
    @classmethod
    def _or_empty(cls, value: Any) -> Any:
        return "" if value is None else value

    @field_validator("metadata", mode="before")
    @classmethod
    def _or_none(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("time", mode="before")
    @classmethod
    def _read_time(cls, value: Any) -> Any:
        """Milliseconds, seconds, or ISO 8601 (without a zone: UTC)."""
        if isinstance(value, str):
            try:
                at = datetime.fromisoformat(value)
            except ValueError as exc:
                raise ValueError("an ISO 8601 time or a number is expected") from exc
            value = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = int(value * 1000) if abs(value) < _SECONDS else int(value)
            if not 0 <= value < 10**14:
                raise ValueError("the time is out of range")
        return value

    @model_validator(mode="after")
    def _says_something(self) -> Line:
        if not self.query.strip() and not self.content.strip():
            # an answer whose question is not known is a note
            self.content, self.answer = self.answer, ""
        if not (self.query.strip() or self.content.strip()):
            raise ValueError("query, answer or content is needed")
        if self.topic and len(self.content) > MAX_CONTENT:
            raise ValueError(f"a topic's content has at most {MAX_CONTENT} characters")
        return self


def read_line(raw: Any) -> Line:
    """Raises ToolError with a sentence."""
    try:
        line = Line.model_validate(raw)
    except ValidationError as exc:
        raise ToolError(describe(exc)) from exc
    if line.topic:
        checked_topic(line.topic)
    return line


def engram_of(line: Line, user_id: str, recorded: int, engram_id: str | None = None, time_zone: str = "") -> Engram:
    """Return the engram of a line.

    engram_id: its former id, if it may have that again. time_zone: the zone for a line that names none.
    """
    time_ms = recorded if line.time is None else line.time
    metadata = dict(line.metadata)
    metadata.pop("id", None)
    known = {name: metadata.pop(name) for name in _FIELDS if name in metadata}
    calls = metadata.pop("tool_calls", None)
    annotations = _annotations(metadata, known.get("respondent_id"))
    if engram_id is None:
        engram_id = imported_id(user_id, line.session_id, line.time or 0, line.query, line.answer, line.content)
    common: dict[str, Any] = {
        "id": engram_id, "user_id": user_id, "time": time_ms, "recorded": recorded, "session_id": line.session_id,
        "time_zone": str(known.get("time_zone") or time_zone),
    }  # fmt: skip
    if line.topic:
        return Engram(
            **{**common, "id": topic_id(user_id, line.topic)},
            kind="topic",
            query_id=str(known.get("query_id") or ""),
            topic=line.topic,
            content=line.content,
        )
    if not line.query:
        return Engram(**common, kind="note", content=line.content, metadata=metadata, notes=_notes(annotations))
    return Engram(
        **common,
        kind="turn",
        query=line.query,
        answer=line.answer,
        content=line.content,
        respondent_id=known["respondent_id"] if known.get("respondent_id") in ("A", "B") else "",
        options=known["options"] if isinstance(known.get("options"), dict) else {},
        query_id=str(known.get("query_id") or ""),
        generator_id=str(known.get("generator_id") or ""),
        model=str(known.get("model") or ""),
        finish_reason=str(known.get("finish_reason") or ""),
        before=str(known.get("before") or ""),
        follows=str(known.get("follows") or ""),
        tainted=known.get("tainted") is True,
        echo=known.get("echo") is True,
        tool_calls=tuple(c for c in calls if isinstance(c, dict)) if isinstance(calls, list) else (),
        metadata=metadata,
        notes=_notes(annotations),
    )


def _notes(raw: Any) -> dict[str, Note]:
    """Annotations as an export wrote them; what has another form is left out."""
    notes: dict[str, Note] = {}
    for kind, found in raw.items() if isinstance(raw, dict) else ():
        if kind not in _KINDS or not isinstance(found, dict):
            continue
        mark, values = found.get("stamp"), found.get("values")
        if not isinstance(mark, str) or len(mark) != 35 or not mark.isdigit() or not isinstance(values, dict):
            continue
        if _plausible(kind, values):
            notes[kind] = Note(mark, values)
    return notes


def _annotations(metadata: dict[str, Any], respondent: Any) -> dict[str, Any]:
    """Takes what is said of an engram out of its metadata. An outcome of the comparison that stands there without its
    annotation, as other programs write it, is as good as the oldest."""
    won, verdict = metadata.pop("pairwise_winner", None), metadata.pop("pairwise_verdict", None)
    raw = metadata.pop("annotations", None)
    annotations: dict[str, Any] = dict(raw) if isinstance(raw, dict) else {}
    if verdict not in _VERDICTS and type(won) is bool and respondent in ("A", "B"):
        verdict = respondent if won else {"A": "B", "B": "A"}[respondent]
    if "pairwise" not in annotations and verdict in _VERDICTS:
        annotations["pairwise"] = {"stamp": _UNSTAMPED, "values": {"winner": verdict}}
    return annotations


def _plausible(kind: str, values: Mapping[str, Any]) -> bool:
    match kind:
        case "critique":
            return type(values.get("score")) is int and 1 <= values["score"] <= 5
        case "pairwise":
            return values.get("winner") in _VERDICTS
        case "reward":
            # null: the vote was withdrawn
            given = values.get("reward", "")
            return given is None or (type(given) in (int, float) and -1 <= given <= 1)
        case _:
            return isinstance(values.get("intent"), str) and isinstance(values.get("entities"), list)


def exported(engram: Engram) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"query": engram.query, "answer": engram.answer} if engram.kind == "turn" else {"content": engram.content}
    )
    if engram.kind == "topic":
        said["topic"] = engram.topic
    known = {name: value for name in _FIELDS if (value := getattr(engram, name))}
    annotations = {kind: {"stamp": n.stamp, "values": dict(n.values)} for kind, n in engram.notes.items()}
    compared = (
        {"pairwise_winner": engram.pairwise_winner, "pairwise_verdict": engram.pairwise_verdict}
        if engram.pairwise_verdict
        else {}
    )
    metadata: Mapping[str, Any] = {
        **engram.metadata,
        "id": engram.id,
        **known,
        **compared,
        **({"tool_calls": list(engram.tool_calls)} if engram.tool_calls else {}),
        **({"annotations": annotations} if annotations else {}),
    }
    return {
        **said,
        "session_id": engram.session_id,
        "time": engram.time,
        "user_id": engram.user_id,
        "metadata": metadata,
    }
