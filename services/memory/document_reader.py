"""Reads files, each in a process of its own, which is killed when the file takes more than it may."""

from __future__ import annotations

import asyncio

from services.memory.chunks import Block
from services.memory.document_text import DocumentText
from services.memory.formats import FileRefused, Kind
from shared.reading.pdf import CPU_SECONDS
from shared.reading.process import Died, ReadingProcess
from shared.telemetry.logging import get_logger

log = get_logger()

CHILD = "services.memory.document_child"
# Two of them beside the memory itself fit into its container.
PROCESSES = 2
# A process that waits for something that never comes uses no processor.
_LONGEST = 120.0


class DocumentReader:
    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._places = asyncio.Semaphore(PROCESSES)

    async def read(self, data: bytes, kind: Kind, name: str) -> DocumentText:
        """Raises FileRefused."""
        async with self._places:
            child = await ReadingProcess.start(CHILD)
            try:
                async with asyncio.timeout(_LONGEST):
                    answer = await child.ask({"kind": kind, "name": name, "cpu": self._cpu_seconds}, data)
            except (Died, TimeoutError) as exc:
                log.warning("document.too_heavy", kind=kind, bytes=len(data))
                raise FileRefused("too_heavy", f"{name} takes more time or memory to read than a file may") from exc
            finally:
                await child.end()
        if "refused" in answer:
            raise FileRefused("unreadable", answer["refused"])
        return DocumentText(answer["title"], [Block(*block) for block in answer["blocks"]], answer["cut"])
