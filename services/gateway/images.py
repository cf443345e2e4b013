"""Images in a request of OpenAI's API: they are brought to the memory for a while, and the query has their ids.

Only images that are in the request itself are taken: nothing is fetched from addresses that a client names.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from services.gateway.body import MAX_BODY
from services.gateway.chat_body import STORED, ChatBody, ChatMessage, Part, bad
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.operations import memory_files

_DATA = re.compile(r"data:(image/[a-z+.-]+);base64,", re.IGNORECASE)
_MOST = 16


async def stored(gateway: Gateway, user_id: str, body: ChatBody, size: int) -> ChatBody:
    """The request with ids in the place of its images. `size`: of its body, in bytes. Raises ApiError."""
    addresses = [
        (place, address)
        for place, message in enumerate(body.messages)
        for part in message.parts
        if (address := _address(part, place)) is not None
    ]
    left = size - sum(len(address) for _, address in addresses)
    if left > MAX_BODY:
        raise ApiError(413, "body_too_large", f"the body without its images is larger than {MAX_BODY} bytes")
    if not addresses:
        return body
    if len({address for _, address in addresses}) > _MOST:
        raise bad(f"messages: at most {_MOST} different images are taken", "unsupported")
    ids: dict[str, str] = {}
    keep = gateway.settings.retention + gateway.settings.deadline_seconds
    async with memory_files(gateway) as files:
        for place, address in addresses:
            if address not in ids:
                kind, data = _decoded(address, place)
                name = f"image.{kind.rpartition('/')[2]}"
                _, about = await files.add(user_id, data, name=name, content_type=kind, keep_seconds=keep)
                if not about["type"].startswith("image/"):
                    raise bad(f"messages.{place}.content: what is called {kind} is no image", "unsupported")
                ids[address] = about["id"]
    messages = [_with_ids(message, ids, place) for place, message in enumerate(body.messages)]
    return body.model_copy(update={"messages": messages})


def _with_ids(message: ChatMessage, ids: dict[str, str], place: int) -> ChatMessage:
    if not message.parts:
        return message
    parts: list[Any] = []
    for part in message.parts:
        address = _address(part, place)
        parts.append(part if address is None else Part(type=STORED, text=ids[address]))
    return message.model_copy(update={"content": parts})


def _address(part: str | Part, place: int) -> str | None:
    """Where a part's image is; None for other parts. Raises ApiError 400."""
    if isinstance(part, str) or part.type not in ("image_url", "input_image"):
        return None
    given = part.image_url
    address = given.get("url") if isinstance(given, dict) else given
    if not isinstance(address, str) or not _DATA.match(address):
        raise bad(
            f"messages.{place}.content: image_url: an image must be in the request itself, as data:image/png;base64,…; "
            "nothing is fetched from other addresses",
            "unsupported",
        )
    return address


def _decoded(address: str, place: int) -> tuple[str, bytes]:
    kind, _, data = address.partition(",")
    try:
        return kind[5:].partition(";")[0].lower(), base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise bad(f"messages.{place}.content: the image is no base64: {exc}") from exc
