"""Rules of a scripted model server for messages with tool calls; the server answers 400 when a request breaks one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Body = Mapping[str, Any]


class Insistence(BaseModel):
    """Rules of a server for each message with tool calls.

    needs: a required field, which may be empty only with `empty`. refuses: forbidden fields. ids: a pattern of call
    ids. scope: check all messages, or those behind the user's last one. error: the text of the refusal; `<<field>>`
    and `<<index>>` are replaced.
    """

    model_config = ConfigDict(extra="forbid")

    needs: str = ""
    empty: bool = False
    refuses: list[str] = []
    ids: str = ""
    scope: Literal["all", "turn"] = "all"
    error: str = "messages.<<index>>.<<field>> is wrong"

    def objection(self, body: Body) -> str | None:
        """Return the text of the refusal; None if the request follows the rules."""
        messages = list(_calling(body))
        last = _last_user(body)
        for message in messages if self.scope == "all" else [one for one in messages if one.index > last]:
            for field in self._wrong(message):
                return self.error.replace("<<field>>", field).replace("<<index>>", str(message.index))
        return None

    def _wrong(self, message: _Calling) -> Iterator[str]:
        value = message.fields.get(self.needs)
        if self.needs and (value is None or (not value and not self.empty)):
            yield self.needs
        yield from (field for field in self.refuses if field in message.fields)
        if self.ids and not all(re.fullmatch(self.ids, call_id) for call_id in message.ids):
            yield "tool call id"


@dataclass(frozen=True, slots=True)
class _Calling:
    """A message with tool calls: its place, its fields with those of its first call, the ids of its calls."""

    index: int
    fields: Mapping[str, Any]
    ids: list[str]


def _calling(body: Body) -> Iterator[_Calling]:
    for index, message in enumerate(body.get("messages") or ()):
        if calls := message.get("tool_calls"):
            fields = {**calls[0], **message}
            if isinstance(content := message.get("content"), list):
                fields |= {str(part.get("type")): part for part in content}
            yield _Calling(index, fields, [str(call.get("id") or "") for call in calls])
    for index, content in enumerate(body.get("contents") or ()):
        if calls := [part for part in content["parts"] if "functionCall" in part]:
            yield _Calling(index, calls[0], [str(call["functionCall"].get("id") or "") for call in calls])


def _last_user(body: Body) -> int:
    """Return the position of the user's last message, -1 without one. Results of tools do not count."""
    places = [n for n, message in enumerate(body.get("messages") or ()) if message["role"] == "user"]
    for n, content in enumerate(body.get("contents") or ()):
        if content.get("role") == "user" and any("functionResponse" not in part for part in content["parts"]):
            places.append(n)
    return places[-1] if places else -1
