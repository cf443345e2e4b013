"""Dead letters: entries that were set aside, and whether the bus has written a letter or somebody has forged it.

Every tool worker must be able to set an entry aside, so every one can add a letter that names somebody else's stream.
But whoever sets an entry aside notes the letter's id under the entry's name in the same step (`once`), and Redis lets a
user do that for his own streams only. These notes go after a while; what was looked at in time counts as genuine.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from shared.bus.keys import LETTERS_SEEN, once_key
from shared.bus.port import Command
from shared.bus.scripts import PUBLISH_ONCE
from shared.bus.streams import RETENTION, Bus, Entry, order
from shared.contracts import DEAD_LETTER, DeadLetter
from shared.envelope import Envelope
from shared.errors import DecodeError
from shared.telemetry.logging import get_logger
from shared.telemetry.unread import not_understood

log = get_logger()

_PAGE = 100
_ID = re.compile(rb"\d+-\d+")


def letter_name(letter: DeadLetter) -> str:
    """What a letter is published once under."""
    return f"{letter.stream}:{letter.group}:{letter.entry_id}"


def burying(
    bus: Bus, stream: str, group: str, entry_id: str, fields: Sequence[bytes], deliveries: int, reason: str
) -> Command:
    """The command that sets an entry aside, with everything needed to look at it or to replay it."""
    readable, raw = [field.decode(errors="backslashreplace") for field in fields], None
    if [field.encode() for field in readable] != list(fields) or len(set(readable[::2])) < len(fields) // 2:
        raw = [base64.b64encode(field).decode() for field in fields]
    letter = DeadLetter(
        stream=stream,
        group=group,
        entry_id=entry_id,
        deliveries=deliveries,
        reason=reason,
        fields=dict(zip(readable[::2], readable[1::2], strict=True)),
        raw=raw,
    )
    return bus.publishing(DEAD_LETTER.of(letter, once=letter_name(letter)))


async def replay(bus: Bus, dead_id: str) -> str | None:
    """Puts a dead letter's original fields back on its stream and removes it; None when there is none.

    Raises DecodeError when the dead letter itself is malformed, or forged.
    """
    found = await bus.range(DEAD_LETTER.stream, dead_id, dead_id)
    if not found:
        return None
    letter = DEAD_LETTER.decode(Envelope.parse(DEAD_LETTER.name, *found[0]))
    if await forged(bus, found):
        raise DecodeError(f"nobody who may read {letter.stream} has set an entry of it aside so: it is forged")
    raw = [base64.b64decode(field) for field in letter.raw or ()]
    pairs = letter.fields.items() if letter.raw is None else zip(raw[::2], raw[1::2], strict=False)
    # a query that is put back has no turn before it asks
    fields = [part for pair in pairs if pair[0] not in ("turn", b"turn") for part in pair]
    key = once_key(letter.stream, f"replay:{dead_id}")
    entry_id = await bus.link.call(*PUBLISH_ONCE((letter.stream, key), RETENTION, "*", *fields))
    await drop(bus, dead_id)
    return str(entry_id.decode())


async def drop(bus: Bus, dead_id: str) -> bool:
    """Removes a dead letter; False when there is none."""
    return bool(await bus.link.call("XDEL", DEAD_LETTER.stream, dead_id))


async def forged(bus: Bus, letters: Sequence[Entry]) -> list[str]:
    """The ids of those letters that nobody vouches for, where Redis has users. One that cannot be read is none: nobody
    can replay it."""
    if not bus.users:
        return []
    seen = order(await _looked_at(bus) or "0-0")
    noted: dict[str, Command] = {}
    for letter_id, fields in letters:
        try:
            letter = DEAD_LETTER.decode(Envelope.parse(DEAD_LETTER.name, letter_id, fields))
        except DecodeError as exc:
            not_understood(DEAD_LETTER.stream, letter_id, str(exc))
            continue
        if order(letter_id) > seen:
            noted[letter_id] = ("GET", once_key(DEAD_LETTER.stream, letter_name(letter)))
    notes = await bus.link.pipe_raw(list(noted.values())) if noted else []
    return [letter_id for letter_id, note in zip(noted, notes, strict=True) if note != letter_id.encode()]


async def drop_forged(bus: Bus) -> None:
    """Removes the forged ones among the letters that have come since the last look."""
    if not bus.users:
        return
    seen = await _looked_at(bus)
    if seen is None:
        # nobody knows which ones were looked at, and an older letter may have outlived its note
        seen = await bus.newest(DEAD_LETTER.stream)
        await bus.link.call("SET", LETTERS_SEEN, seen)
    while found := await bus.range(DEAD_LETTER.stream, f"({seen}", count=_PAGE):
        if ids := await forged(bus, found):
            log.error("bus.letters_forged", letters=ids)
            await bus.link.call("XDEL", DEAD_LETTER.stream, *ids)
        seen = found[-1][0]
        await bus.link.call("SET", LETTERS_SEEN, seen)


async def _looked_at(bus: Bus) -> str | None:
    """The id of the last letter that was looked at; None when nobody has said so, or somebody something else."""
    said = await bus.link.call("GET", LETTERS_SEEN)
    return said.decode() if said is not None and _ID.fullmatch(said) else None
