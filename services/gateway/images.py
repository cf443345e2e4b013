"""Images in a request of OpenAI's API: they are brought to the memory for a while, and the query has their ids.

Only images that are in the request itself are taken: nothing is fetched from addresses that a client names.
"""

from __future__ import annotations

import base64
import binascii
import re

from services.gateway.body import MAX_BODY
from services.gateway.chat_body import STORED, ChatBody, Part, bad, parts_of
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.operations import memory_files
from services.gateway.responses import ResponseBody

_DATA = re.compile(r"data:(image/[a-z+.-]+);base64,", re.IGNORECASE)
_MOST = 16


Contents = list[list[str | Part]]


async def in_chat(gateway: Gateway, user_id: str, body: ChatBody, size: int) -> ChatBody:
    """The request with ids in the place of its images. `size`: of its body, in bytes. Raises ApiError."""
    contents = await _stored(gateway, user_id, [message.parts for message in body.messages], size, "messages")
    messages = [
        message.model_copy(update={"content": parts}) if parts else message
        for message, parts in zip(body.messages, contents, strict=True)
    ]
    return body.model_copy(update={"messages": messages})


async def in_response(gateway: Gateway, user_id: str, body: ResponseBody, size: int) -> ResponseBody:
    """The same of a request for a response."""
    items = body.items()
    contents = await _stored(gateway, user_id, [parts_of(item.get("content")) for item in items], size, "input")
    kept = [
        {**item, "content": [one.model_dump(exclude_unset=True) if isinstance(one, Part) else one for one in parts]}
        if parts
        else item
        for item, parts in zip(items, contents, strict=True)
    ]
    return body.model_copy(update={"input": kept})


async def _stored(gateway: Gateway, user_id: str, contents: Contents, size: int, field: str) -> Contents:
    """Each content with ids in the place of its images."""
    found = [
        (f"{field}.{place}.content", address)
        for place, parts in enumerate(contents)
        for part in parts
        if (address := _address(part, f"{field}.{place}.content")) is not None
    ]
    if size - sum(len(address) for _, address in found) > MAX_BODY:
        raise ApiError(413, "body_too_large", f"the body without its images is larger than {MAX_BODY} bytes")
    if not found:
        return contents
    if len({address for _, address in found}) > _MOST:
        raise bad(f"{field}: at most {_MOST} different images are taken", "unsupported")
    ids: dict[str, str] = {}
    keep = gateway.settings.retention + gateway.settings.deadline_seconds
    async with memory_files(gateway) as files:
        for place, address in found:
            if address not in ids:
                kind, data = _decoded(address, place)
                name = f"image.{kind.rpartition('/')[2]}"
                _, about = await files.add(user_id, data, name=name, content_type=kind, keep_seconds=keep)
                if not about["type"].startswith("image/"):
                    raise bad(f"{place}: what is called {kind} is no image", "unsupported")
                ids[address] = about["id"]
    return [[_with_id(part, ids) for part in parts] for parts in contents]


def _with_id(part: str | Part, ids: dict[str, str]) -> str | Part:
    address = _address(part, "")
    return part if address is None else Part(type=STORED, text=ids[address])


def _address(part: str | Part, place: str) -> str | None:
    """Where a part's image is; None for other parts. Raises ApiError 400."""
    if isinstance(part, str) or part.type not in ("image_url", "input_image"):
        return None
    given = part.image_url
    address = given.get("url") if isinstance(given, dict) else given
    if not isinstance(address, str) or not _DATA.match(address):
        raise bad(
            f"{place}: image_url: an image must be in the request itself, as data:image/png;base64,…; "
            "nothing is fetched from other addresses",
            "unsupported",
        )
    return address


def _decoded(address: str, place: str) -> tuple[str, bytes]:
    kind, _, data = address.partition(",")
    try:
        return kind[5:].partition(";")[0].lower(), base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise bad(f"{place}: the image is no base64: {exc}") from exc
