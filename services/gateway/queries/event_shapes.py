"""Server-sent events: `data` is JSON in a text, as an event stream has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import Field, Json, RootModel, create_model

from services.gateway.http.shape import Shape
from shared.records.events import MODELS, KnownEvent


def _event(kind: str, data: type[KnownEvent]) -> type[Shape]:
    name = "".join(part.capitalize() for part in kind.split("."))
    fields: dict[str, Any] = {"id": (str, ...), "event": (Literal[kind], ...), "data": (Annotated[data, Json], ...)}
    return create_model(f"{name}Event", __base__=Shape, **fields)


class JournalEvent(RootModel[Any]):
    """An entry of a response's journal: `event` is its type, and `id` what to resume from. Ignore unknown types."""

    root: Union[tuple(_event(kind, data) for kind, data in MODELS.items())] = Field(discriminator="event")  # type: ignore[valid-type]  # noqa: UP007


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
