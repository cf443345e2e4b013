"""An embedded store whose process was killed at any moment opens again, with all that it had confirmed."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from services.memory.settings import MemorySettings
from services.memory.store import open_store
from services.memory.vectors import Vector

KILLS = 5
# Writes and deletes until it is killed; a line for each change that is confirmed.
WRITER = """
import asyncio, sys
from pathlib import Path
from services.memory.engram import Engram
from services.memory.settings import MemorySettings
from services.memory.store import open_store
from services.memory.vectors import Vector

async def main(folder, first):
    async with open_store(MemorySettings(data_dir=Path(folder))) as store:
        for number in range(first, first + 100_000, 100):
            engrams = [Engram(f"e{n}", "ann", "note", n, n, content=f"note {n}") for n in range(number, number + 100)]
            await store.put("ann", [(one, Vector("m", [1.0, one.time / 1e6])) for one in engrams])
            print("put", number, flush=True)
            await store.delete("ann", [f"e{number + 99}"])
            print("deleted", number + 99, flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.slow
async def test_store_killed_at_any_moment_opens_again(tmp_path: Path) -> None:
    dice, there, gone, first = random.Random(1), set[str](), set[str](), 0
    for _ in range(KILLS):
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER, str(tmp_path), str(first), stdout=asyncio.subprocess.PIPE
        )
        assert writer.stdout is not None
        # at least one change, then somewhere in the next ones
        lines = [await writer.stdout.readline()]
        try:
            async with asyncio.timeout(dice.uniform(0.01, 1.0)):
                while line := await writer.stdout.readline():
                    lines.append(line)
        except TimeoutError:
            pass
        writer.kill()
        lines += (await writer.stdout.read()).splitlines(keepends=True)
        await writer.wait()
        assert lines[0], "the writer has ended by itself"
        for what, number in (line.split() for line in lines if line.endswith(b"\n")):
            if what == b"put":
                there.update(f"e{n}" for n in range(int(number), int(number) + 100))
                first = int(number) + 1_000
            else:
                gone.add(f"e{int(number)}")
        async with open_store(MemorySettings(data_dir=tmp_path)) as store:
            ids = {one.engram.id async for page in store.of_user("ann") for one in page if one.vector is not None}
            # of a deletion that was not confirmed, nothing is promised
            pending = {one for one in there if int(one[1:]) % 100 == 99}
            assert there - pending <= ids
            assert gone.isdisjoint(ids)
            near = await store.query("ann", Vector("m", [1.0, 0.0]), 5)
            assert len(near) == 5
