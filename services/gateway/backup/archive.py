"""Writing a backup: section after section, page after page, nothing kept in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence

from services.gateway.backup.restore import unfinished
from services.gateway.backup.section import Section
from services.gateway.backup.sections import all_sections
from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway
from shared.bus import ReplyError
from shared.errors import Local2Error
from shared.participant.backup import Header, Record, Writer, product_version
from shared.telemetry.logging import get_logger

log = get_logger()

# Seconds that one page may take beyond what any request may ask of the bus.
STEP = 30.0


async def begin(gateway: Gateway, sections: dict[str, Section], without: Collection[str]) -> Header:
    """What the file will say of itself."""
    notes = []
    if await unfinished(gateway.bus) is not None:
        notes.append("a restore of this stack was interrupted: what it had not put back yet is not in this file")
    return Header(
        product=product_version(),
        created=await gateway.bus.server_time(),
        sections={name: section.version for name, section in sections.items()},
        without=[name for name in all_sections(gateway) if name in without],
        notes=notes,
    )


async def archive(gateway: Gateway, sections: dict[str, Section], header: Header) -> AsyncGenerator[bytes, None]:
    """The file in pieces. When something fails on the way, its last line says so, and it is not complete."""
    writer = Writer()
    try:
        yield writer.begin(header)
        for name, section in sections.items():
            async for page in _pages(gateway, section):
                if piece := await asyncio.to_thread(writer.records, name, page):
                    yield piece
            yield writer.end(name)
        yield writer.complete()
        log.info("backup.complete", sections=list(sections))
    except ReplyError as exc:
        log.warning("backup.failed", reason=str(exc))
        yield writer.failed("bus_error", f"the bus refused a command: {exc}")
    except ApiError as exc:
        log.warning("backup.failed", reason=exc.message)
        yield writer.failed(exc.code, exc.message)
    except Local2Error as exc:
        log.warning("backup.failed", reason=str(exc))
        yield writer.failed("unavailable", str(exc))


async def _pages(gateway: Gateway, section: Section) -> AsyncIterator[Sequence[Record]]:
    pages = section.export()
    while True:
        async with gateway.reachable(extra=STEP):
            page = await anext(pages, None)
        if page is None:
            return
        if page:
            yield page
