"""Dead letters: entries that were given up, and which of them are forged.

Every tool worker must be able to write a dead letter, so a captured worker can write one that names another stream.
But the bus writes each dead letter once, under an idempotency key that holds the letter's id. Redis lets a user write
such keys for its own streams only. A dead letter without its key is forged. The keys expire: dead letters up to the
watermark DEAD_LETTER_VERIFIED_UP_TO were verified in time.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from shared.bus.keys import DEAD_LETTER_VERIFIED_UP_TO, once_key
from shared.bus.replies import Command
from shared.bus.scripts import PUBLISH_ONCE
from shared.bus.slots import Delivery
from shared.bus.streams import RETENTION, Bus, Entry
from shared.contracts import DEAD_LETTER, DeadLetter
from shared.envelope import Envelope, order
from shared.errors import DecodeError
from shared.telemetry.logging import get_logger
from shared.telemetry.unread import not_understood

log = get_logger()

_PAGE = 100
_ID = re.compile(rb"\d+-\d+")


def idempotency_key(letter: DeadLetter) -> str:
    """Return the name under which a dead letter is published once."""
    return f"{letter.stream}:{letter.group}:{letter.entry_id}"


def dead_letter_command(bus: Bus, group: str, delivery: Delivery, reason: str) -> Command:
    """Return the command that writes an entry's dead letter, with all fields of the entry."""
    fields = delivery.fields
    readable, raw = [field.decode(errors="backslashreplace") for field in fields], None
    if [field.encode() for field in readable] != list(fields) or len(set(readable[::2])) < len(fields) // 2:
        raw = [base64.b64encode(field).decode() for field in fields]
    letter = DeadLetter(
        stream=delivery.stream,
        group=group,
        entry_id=delivery.entry_id,
        deliveries=delivery.deliveries,
        reason=reason,
        fields=dict(zip(readable[::2], readable[1::2], strict=True)),
        raw=raw,
    )
    return bus.publishing(DEAD_LETTER.of(letter, once=idempotency_key(letter)))


async def replay(bus: Bus, dead_id: str) -> str | None:
    """Write the original fields of a dead letter to its stream again, and remove the dead letter.

    Return the id of the new entry; None if there is no such dead letter. Raises DecodeError when the dead letter is
    malformed or forged.
    """
    found = await bus.range(DEAD_LETTER.stream, dead_id, dead_id)
    if not found:
        return None
    letter = DEAD_LETTER.decode(Envelope.parse(DEAD_LETTER.name, *found[0]))
    if await forged(bus, found):
        raise DecodeError(f"this dead letter is forged: no reader of {letter.stream} has written it. Drop it")
    raw = [base64.b64decode(field) for field in letter.raw or ()]
    pairs = letter.fields.items() if letter.raw is None else zip(raw[::2], raw[1::2], strict=False)
    # A replayed query must check its session queue again.
    fields = [part for pair in pairs if pair[0] not in ("turn", b"turn") for part in pair]
    key = once_key(letter.stream, f"replay:{dead_id}")
    entry_id = await bus.link.call(*PUBLISH_ONCE((letter.stream, key), RETENTION, "*", *fields))
    await drop(bus, dead_id)
    return str(entry_id.decode())


async def drop(bus: Bus, dead_id: str) -> bool:
    """Remove a dead letter; return False if there is none."""
    return bool(await bus.link.call("XDEL", DEAD_LETTER.stream, dead_id))


async def forged(bus: Bus, letters: Sequence[Entry]) -> list[str]:
    """Return the ids of forged dead letters; none where Redis has no users.

    Undecodable ones are skipped: they cannot be replayed.
    """
    if not bus.users:
        return []
    verified = order(await _verified_up_to(bus) or "0-0")
    keys: dict[str, Command] = {}
    for letter_id, fields in letters:
        try:
            letter = DEAD_LETTER.decode(Envelope.parse(DEAD_LETTER.name, letter_id, fields))
        except DecodeError as exc:
            not_understood(DEAD_LETTER.stream, letter_id, str(exc))
            continue
        if order(letter_id) > verified:
            keys[letter_id] = ("GET", once_key(DEAD_LETTER.stream, idempotency_key(letter)))
    values = await bus.link.pipe_raw(list(keys.values())) if keys else []
    return [letter_id for letter_id, value in zip(keys, values, strict=True) if value != letter_id.encode()]


async def drop_forged(bus: Bus) -> None:
    """Remove the forged ones among the dead letters that came since the last call, and move the watermark."""
    if not bus.users:
        return
    verified = await _verified_up_to(bus)
    if verified is None:
        # The key of an older dead letter may have expired: those that exist count as genuine.
        verified = await bus.newest(DEAD_LETTER.stream)
        await bus.link.call("SET", DEAD_LETTER_VERIFIED_UP_TO, verified)
    while found := await bus.range(DEAD_LETTER.stream, f"({verified}", count=_PAGE):
        if ids := await forged(bus, found):
            log.error("bus.dead_letters_forged", letters=ids)
            await bus.link.call("XDEL", DEAD_LETTER.stream, *ids)
        verified = found[-1][0]
        await bus.link.call("SET", DEAD_LETTER_VERIFIED_UP_TO, verified)


async def _verified_up_to(bus: Bus) -> str | None:
    """Return the watermark, the id of the last verified dead letter; None if it is missing or no id."""
    value = await bus.link.call("GET", DEAD_LETTER_VERIFIED_UP_TO)
    return value.decode() if value is not None and _ID.fullmatch(value) else None
