"""Telling dead letters that the bus has written from forged ones.

Every tool worker must be able to set an entry aside, so every one can add a letter that names somebody else's stream.
But whoever sets an entry aside notes the letter's id under the entry's name in the same step (`once`), and Redis lets a
user do that for his own streams only. These notes go after a while; what was looked at in time counts as genuine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shared.bus.keys import LETTERS_SEEN, once_key
from shared.bus.port import Command, Port
from shared.contracts import DEAD_LETTER, DeadLetter
from shared.envelope import Envelope
from shared.errors import DecodeError
from shared.telemetry.logging import get_logger
from shared.telemetry.unread import not_understood

log = get_logger()

_PAGE = 100
_ID = re.compile(rb"\d+-\d+")

Entry = tuple[str, list[bytes]]


def letter_name(letter: DeadLetter) -> str:
    """What a letter is published once under."""
    return f"{letter.stream}:{letter.group}:{letter.entry_id}"


async def forged(port: Port, letters: Sequence[Entry]) -> list[str]:
    """The ids of those letters that nobody vouches for. One that cannot be read is none: nobody can replay it."""
    seen = _order(await _looked_at(port) or b"0-0")
    noted: dict[str, Command] = {}
    for letter_id, fields in letters:
        try:
            letter = DEAD_LETTER.decode(Envelope.parse(DEAD_LETTER.name, letter_id, fields))
        except DecodeError as exc:
            not_understood(DEAD_LETTER.stream, letter_id, str(exc))
            continue
        if _order(letter_id.encode()) > seen:
            noted[letter_id] = ("GET", once_key(DEAD_LETTER.stream, letter_name(letter)))
    notes = await port.pipe_raw(list(noted.values())) if noted else []
    return [letter_id for letter_id, note in zip(noted, notes, strict=True) if note != letter_id.encode()]


async def drop_forged(port: Port) -> None:
    """Removes the forged ones among the letters that have come since the last look."""
    seen = await _looked_at(port)
    if seen is None:
        # nobody knows which ones were looked at, and an older letter may have outlived its note
        newest = await port.call("XREVRANGE", DEAD_LETTER.stream, "+", "-", "COUNT", 1)
        seen = newest[0][0] if newest else b"0-0"
        await port.call("SET", LETTERS_SEEN, seen)
    while found := await port.call("XRANGE", DEAD_LETTER.stream, b"(" + seen, "+", "COUNT", _PAGE):
        if ids := await forged(port, [(letter_id.decode(), fields) for letter_id, fields in found]):
            log.error("bus.letters_forged", letters=ids)
            await port.call("XDEL", DEAD_LETTER.stream, *ids)
        seen = found[-1][0]
        await port.call("SET", LETTERS_SEEN, seen)


async def _looked_at(port: Port) -> bytes | None:
    """The id of the last letter that was looked at; None when nobody has said so, or somebody something else."""
    said = await port.call("GET", LETTERS_SEEN)
    return said if said is not None and _ID.fullmatch(said) else None


def _order(entry_id: bytes) -> tuple[int, int]:
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)
