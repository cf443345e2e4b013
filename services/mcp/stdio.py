"""A server that is a program of this machine: JSON lines over its standard input and output.

Beside what the SDK's own transport does, a line has a limit, what the program says on its standard error is heard, and
its end is told with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from shared.errors import TransientError
from shared.telemetry.logging import get_logger

log = get_logger()

# For one message. A result is cut at `max_bytes`; this bounds what is read of a program that never ends its line.
MOST_BYTES = 16_000_000
_LONGEST_SAYING = 500
# Seconds that a program is given to end by itself, and after SIGTERM.
_PATIENCE = 1.0

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class Ended(TransientError):
    """The program has ended, or was ended because it did not keep to the protocol."""


@dataclass(slots=True)
class Trouble:
    """What is wrong with one connection to a server.

    text: what it has done against the protocol; then the connection is over. refused: the last status of HTTP that is
    an error.
    """

    text: str = ""
    refused: int | None = None


class Program:
    """What is known of a running program. `last_words`: the last line on its standard error, without secrets."""

    def __init__(self, masked: Callable[[str], str], trouble: Trouble) -> None:
        self._masked = masked
        self.last_words = ""
        self.trouble = trouble

    def hear(self, line: bytes) -> None:
        if said := self._masked(line.decode(errors="replace").strip())[:_LONGEST_SAYING]:
            self.last_words = said
            log.debug("mcp.said", text=said)

    def why(self, status: int | None) -> str:
        reason = self.trouble.text or f"it ended with status {status}"
        return f"{reason}: {self.last_words}" if self.last_words else reason


@contextlib.asynccontextmanager
async def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    masked: Callable[[str], str],
    ended: asyncio.Event,
    trouble: Trouble,
) -> AsyncIterator[tuple[Streams, Callable[[], str]]]:
    """The streams of a program that runs as long as the block, and what to call for why it has ended.

    environment: beside the few variables that every program needs. ended: set when it has. Raises Ended when it cannot
    be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**get_default_environment(), **environment},
            limit=MOST_BYTES,
            start_new_session=True,
        )
    except (OSError, ValueError) as exc:
        raise Ended(masked(f"{command[0]} cannot be started: {exc}")) from exc
    program = Program(masked, trouble)
    to_session, from_program = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_program, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    jobs = [
        asyncio.create_task(_reading(process, program, to_session, ended)),
        asyncio.create_task(_writing(process, from_session)),
        asyncio.create_task(_hearing(process, program)),
    ]
    try:
        yield (from_program, to_program), lambda: program.why(process.returncode)
    finally:
        for stream in (to_session, from_program, to_program, from_session):
            stream.close()
        await _to_its_end(asyncio.create_task(_stopped(process, jobs)))


async def _reading(
    process: asyncio.subprocess.Process,
    program: Program,
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    ended: asyncio.Event,
) -> None:
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            try:
                message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError:
                # many programs print something there that is no message
                program.hear(line[:_LONGEST_SAYING])
                continue
            await to_session.send(message)
        await process.wait()
    except ValueError:
        program.trouble.text = f"it sent more than {MOST_BYTES // 1_000_000} MB in one message"
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        # the session has ended first
        pass
    finally:
        ended.set()
        # whoever waits for an answer is told that none will come
        to_session.close()


async def _writing(
    process: asyncio.subprocess.Process, from_session: MemoryObjectReceiveStream[SessionMessage]
) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        async for message in from_session:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _hearing(process: asyncio.subprocess.Process, program: Program) -> None:
    assert process.stderr is not None
    rest = b""
    while chunk := await process.stderr.read(4_096):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            program.hear(line)
        rest = rest[-_LONGEST_SAYING:]
    program.hear(rest)


async def _to_its_end(task: asyncio.Task[None]) -> None:
    """Waits for a task of bounded length however often the wait is cancelled, and is cancelled only then."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled


async def _stopped(process: asyncio.subprocess.Process, jobs: Sequence[asyncio.Task[None]]) -> None:
    """Ends the program with all that it has started: politely first; then those who wrote to it and read of it."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await process.wait()
        # what it has started may have survived it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
    await process.wait()
    # what nobody reads any more, or somebody who escaped holds open, would leave it open; there is no public way
    process._transport.close()  # type: ignore[attr-defined]
    with contextlib.suppress(ConnectionError):
        await process.stdin.wait_closed()
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
