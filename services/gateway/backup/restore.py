"""Putting a backup back: everything is checked before the first write, and an interrupted restore can be repeated."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, BinaryIO, Literal

import orjson
from pydantic import ValidationError

from services.gateway.backup.section import Section, Tally
from services.gateway.http.errors import ApiError, sentence
from services.gateway.http.gateway import Gateway
from shared.bus import Bus
from shared.bus.keys import RESTORE_LOCK, RESTORE_UNFINISHED
from shared.errors import Local2Error
from shared.participant.background import supervised_tasks
from shared.participant.backup import BackupError, Header, Reader, Record, Summary
from shared.telemetry.logging import get_logger

log = get_logger()

Mode = Literal["empty", "merge", "replace"]

# A restore whose gateway died stands in the way of the next one for this long.
_LEASE_MS = 10_000
_BATCH = 64
# A batch for a participant goes through the bus.
_BATCH_BYTES = 300_000
# Seconds that one batch may take beyond what any request may ask of the bus.
_STEP = 60.0
# Two clocks may differ by this much.
_CLOCK_MS = 5_000


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A restore that has begun to write: which file, and how."""

    digest: str
    mode: Mode


async def unfinished(bus: Bus) -> Unfinished | None:
    raw = await bus.link.call("GET", RESTORE_UNFINISHED)
    if raw is None:
        return None
    try:
        return Unfinished(**orjson.loads(raw))
    except (ValueError, TypeError):
        # somebody's hand: a restore of nobody knows what
        return Unfinished("", "empty")


# ── before the first write ───────────────────────────────────────────────────────────────────────────────────────


def wanted(header: Header, sections: dict[str, Section], without: Collection[str]) -> dict[str, Section]:
    """The sections to restore. Raises BackupError for one that this version does not know."""
    found = {}
    for name, version in header.sections.items():
        if name in without:
            continue
        section = sections.get(name)
        if section is None or version > section.version:
            raise BackupError(
                "newer_section",
                f"the file has {name} in form {version}, which this version cannot read: restore it with LoCAL2 "
                f"{header.product} or newer, or leave it out: --without {name}",
            )
        found[name] = section
    return found


def validate(file: BinaryIO, sections: dict[str, Section], without: Collection[str]) -> Summary:
    """Reads the whole file and every record in it. Raises BackupError."""
    reader = Reader(file)
    taken = wanted(reader.header, sections, without)
    for number, (name, record) in enumerate(reader.records(), 1):
        if name not in taken:
            continue
        try:
            taken[name].check(record)
        except ValueError as exc:
            told = sentence(exc.errors()[0]) if isinstance(exc, ValidationError) else str(exc)
            raise BackupError("invalid_record", f"record {number} of the file, of {name}: {told}") from exc
    assert reader.summary is not None, "records() ends with a summary or raises"
    return reader.summary


async def admit(gateway: Gateway, summary: Summary, sections: dict[str, Section], mode: Mode) -> None:
    """Whether this file may be written into this stack now. Raises ApiError 409."""
    if await gateway.bus.server_time() + _CLOCK_MS < summary.header.created:
        # ids of new queries would sort before those of the file, and a session's turns would change their order
        raise ApiError(
            409,
            "clock_behind",
            "the clock of the bus is behind the one that the file was made by: set it, then restore",
        )
    begun = await unfinished(gateway.bus)
    if mode == "replace" or begun == Unfinished(summary.digest, mode):
        return
    if begun is not None:
        replaces = "restore a file with --replace, which first removes the present data"
        if begun.mode == "replace":
            message = f"a restore with --replace was interrupted here, and the data is incomplete: {replaces}"
        else:
            with_mode = "--merge" if begun.mode == "merge" else "neither --merge nor --replace"
            which = "this file" if begun.digest == summary.digest else "another file"
            message = (
                f"a restore of {which} was interrupted here: to complete it, restore that file again with {with_mode}; "
                f"to give it up, {replaces}"
            )
        raise ApiError(409, "restore_unfinished", message)
    if mode == "empty":
        for name, section in sections.items():
            if await section.absent() is None and not await section.empty():
                raise ApiError(
                    409,
                    "not_empty",
                    f"there are {name} in this stack: --merge keeps them and adds what is missing, "
                    "--replace removes them first",
                    section=name,
                )


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def alone(gateway: Gateway) -> AsyncIterator[str]:
    """The only restore of this stack, as long as the block. Raises ApiError 409."""
    token, link = uuid.uuid4().hex, gateway.bus.link
    if not await gateway.bus.lease(RESTORE_LOCK, token, _LEASE_MS):
        raise ApiError(
            409,
            "restore_running",
            "another restore is under way: wait for its end (one that died is forgotten after "
            f"{_LEASE_MS // 1000} seconds)",
        )
    try:
        async with supervised_tasks(restore_lease=partial(_renew, gateway, token)):
            yield token
    finally:
        with contextlib.suppress(Local2Error):
            async with gateway.reachable():
                if await link.call("GET", RESTORE_LOCK) == token.encode():
                    await link.call("DEL", RESTORE_LOCK)


async def _renew(gateway: Gateway, token: str) -> None:
    while True:
        await asyncio.sleep(_LEASE_MS / 4000)
        with contextlib.suppress(Local2Error):
            await gateway.bus.link.call("SET", RESTORE_LOCK, token, "XX", "PX", _LEASE_MS)


async def restore(
    gateway: Gateway, file: BinaryIO, summary: Summary, sections: dict[str, Section], mode: Mode, token: str
) -> AsyncIterator[dict[str, Any]]:
    """Writes a validated file. Yields how far it is, at last what became of it, or why it stopped."""
    header = summary.header
    yield {"checked": {"product": header.product, "created": header.created, "counts": summary.counts}}
    tallies = {name: Tally() for name in sections}
    try:
        bus = gateway.bus
        async with gateway.reachable():
            await bus.link.call("SET", RESTORE_UNFINISHED, orjson.dumps(asdict(Unfinished(summary.digest, mode))))
        batches = _batches(file, sections)
        uncleared = dict(sections) if mode == "replace" else {}
        before, done = "", 0
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            name, records = batch
            if name != before:
                before, done = name, 0
                async for line in _cleared(gateway, uncleared, name, token):
                    yield line
            async with gateway.reachable(extra=_STEP):
                await _check_lease(gateway, token)
                await sections[name].write(records, tallies[name])
            done += len(records)
            yield {"section": name, "done": done, "of": summary.counts[name]}
        async for line in _cleared(gateway, uncleared, None, token):
            yield line
        async with gateway.reachable():
            await bus.link.call("DEL", RESTORE_UNFINISHED)
    except (ApiError, Local2Error) as exc:
        reason = exc.message if isinstance(exc, ApiError) else str(exc)
        log.warning("restore.failed", reason=reason)
        message = f"{reason}; the restore is not complete: run the same command again, it goes on where it stopped"
        yield {"error": {"code": "interrupted", "message": message}}
        return
    log.info("restore.complete", mode=mode, **{name: tally.written for name, tally in tallies.items()})
    yield {"restored": {name: asdict(tally) for name, tally in tallies.items()}}


async def _check_lease(gateway: Gateway, token: str) -> None:
    """Raise Local2Error if this restore has lost its lease: another restore may be writing."""
    if await gateway.bus.link.call("GET", RESTORE_LOCK) != token.encode():
        raise Local2Error("another restore has begun")


async def _cleared(
    gateway: Gateway, uncleared: dict[str, Section], until: str | None, token: str
) -> AsyncIterator[dict[str, Any]]:
    """Empty the sections up to `until`, in the order of the file, and take them out of `uncleared`.

    until: None for all remaining sections, which have no record in the file. Yields the number of removed items.
    """
    while uncleared and (until is None or until in uncleared):
        name = next(iter(uncleared))
        steps, removed = uncleared.pop(name).clear(), 0
        yield {"section": name, "removed": 0}
        while True:
            async with gateway.reachable(extra=_STEP):
                await _check_lease(gateway, token)
                if (step := await anext(steps, None)) is None:
                    break
            removed += step
            yield {"section": name, "removed": removed}


def _batches(file: BinaryIO, sections: Collection[str]) -> Iterator[tuple[str, list[Record]]]:
    """Records of one section at a time."""
    file.seek(0)
    reader = Reader(file)
    name, batch, size = "", list[Record](), 0
    for section, record in reader.records():
        if section not in sections:
            continue
        if batch and (section != name or len(batch) >= _BATCH or size + reader.size > _BATCH_BYTES):
            yield name, batch
            batch, size = [], 0
        name = section
        size += reader.size
        batch.append(record)
    if batch:
        yield name, batch
