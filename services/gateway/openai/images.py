"""Images and files in a request of OpenAI's API: memory keeps them for a while, and the query has their ids.

Only what is in the request itself is taken, or is a file of the user's own by its id: nothing is fetched from addresses
that a client names.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.http.body import MAX_BODY
from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway
from services.gateway.http.participant_rpc import memory_files
from services.gateway.openai.chat_body import STORED, ChatBody, Part, bad, parts_of
from services.gateway.openai.responses import ResponseBody

_IMAGE = re.compile(r"data:(image/[a-z+.-]+);base64,", re.IGNORECASE)
_FILE = re.compile(r"data:([a-z0-9+./-]*)(?:;[a-z]+=[a-z0-9-]+)*;base64,", re.IGNORECASE)
_MOST = 16
# No file of the memory has a name of so many characters.
_LONGEST_ID = 200


Contents = list[list[str | Part]]


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a part has in it: base64, of a type as far as it is said. place: where it stands."""

    data: str
    kind: str
    name: str
    place: str
    image: bool


async def in_chat(gateway: Gateway, user_id: str, body: ChatBody, size: int) -> ChatBody:
    """The request with ids in the place of its images. `size`: of its body, in bytes. Raises ApiError."""
    if size <= MAX_BODY and not any(message.parts for message in body.messages):
        return body
    contents = await _stored(gateway, user_id, [message.parts for message in body.messages], size, "messages")
    messages = [
        message.model_copy(update={"content": parts}) if parts else message
        for message, parts in zip(body.messages, contents, strict=True)
    ]
    return body.model_copy(update={"messages": messages})


async def in_response(gateway: Gateway, user_id: str, body: ResponseBody, size: int) -> ResponseBody:
    """The same of a request for a response."""
    items = body.items()
    # what a tool returns to look at stands in its output
    fields = ["output" if isinstance(item.get("output"), list) else "content" for item in items]
    given = [parts_of(item.get(field)) for field, item in zip(fields, items, strict=True)]
    contents = await _stored(gateway, user_id, given, size, "input")
    kept = [
        {**item, field: [one.model_dump(exclude_unset=True) if isinstance(one, Part) else one for one in parts]}
        if parts
        else item
        for field, item, parts in zip(fields, items, contents, strict=True)
    ]
    return body.model_copy(update={"input": kept})


async def _stored(gateway: Gateway, user_id: str, contents: Contents, size: int, field: str) -> Contents:
    """Each content with ids in the place of its images and files."""
    found = [[_sent(part, f"{field}.{place}.content") for part in parts] for place, parts in enumerate(contents)]
    brought = [one for line in found for one in line if isinstance(one, _Sent)]
    if size - sum(len(one.data) for one in brought) > MAX_BODY:
        raise ApiError(413, "body_too_large", f"the body without its images is larger than {MAX_BODY} bytes")
    if len({one.data for one in brought}) > _MOST:
        raise bad(f"{field}: at most {_MOST} different images and files are taken", "unsupported")
    ids: dict[str, str] = {}
    keep = gateway.settings.retention + gateway.settings.deadline_seconds
    if brought:
        async with memory_files(gateway) as files:
            for one in brought:
                if one.data not in ids:
                    data = _decoded(one)
                    _, about = await files.add(user_id, data, name=one.name, content_type=one.kind, keep_seconds=keep)
                    if one.image and not about["type"].startswith("image/"):
                        raise bad(f"{one.place}: what is called {one.kind} is no image", "unsupported")
                    ids[one.data] = about["id"]

    def with_id(part: str | Part, sent: _Sent | str | None) -> str | Part:
        if sent is None:
            return part
        return Part(type=STORED, text=sent if isinstance(sent, str) else ids[sent.data])

    return [
        [with_id(part, sent) for part, sent in zip(parts, line, strict=True)]
        for parts, line in zip(contents, found, strict=True)
    ]


def _sent(part: str | Part, place: str) -> _Sent | str | None:
    """What a part brings, the id of what it names, or None for other parts. Raises ApiError 400."""
    if isinstance(part, str):
        return None
    match part.type:
        case "image_url" | "input_image":
            return _image(part, place)
        case "file":
            return _file(part.file if isinstance(part.file, Mapping) else {}, place)
        case "input_file":
            return _file(part.model_dump(), place)
        case _:
            return None


def _image(part: Part, place: str) -> _Sent | str:
    given = part.image_url
    address = given.get("url") if isinstance(given, Mapping) else given
    if address is None and (kept := _id(part.model_dump())) is not None:
        return kept
    if not isinstance(address, str) or (match := _IMAGE.match(address)) is None:
        raise bad(
            f"{place}: image_url: an image must be in the request itself, as data:image/png;base64,…; "
            "nothing is fetched from other addresses",
            "unsupported",
        )
    kind = match[1].lower()
    return _Sent(address[match.end() :], kind, f"image.{kind.rpartition('/')[2]}", place, image=True)


def _file(given: Mapping[str, Any], place: str) -> _Sent | str:
    if (kept := _id(given)) is not None:
        return kept
    data, name = given.get("file_data"), given.get("filename")
    if not isinstance(data, str) or not data:
        raise bad(
            f"{place}: a file must be in the request itself, as file_data with its filename, or a file_id of "
            "POST /files; nothing is fetched from other addresses",
            "unsupported",
        )
    match = _FILE.match(data)
    kind = match[1].lower() if match else ""
    return _Sent(data[match.end() :] if match else data, kind, str(name or "file")[:255], place, image=False)


def _id(given: Mapping[str, Any]) -> str | None:
    found = given.get("file_id")
    return found[:_LONGEST_ID] if isinstance(found, str) and found else None


def _decoded(sent: _Sent) -> bytes:
    try:
        return base64.b64decode(sent.data, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise bad(f"{sent.place}: the {'image' if sent.image else 'file'} is no base64: {exc}") from exc
