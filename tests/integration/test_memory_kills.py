"""An embedded store whose process was killed at any moment has all that it had confirmed."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest

from services.memory.engram import Engram
from services.memory.index import entry
from services.memory.keywords import KeywordIndex
from services.memory.rebuild import copies
from services.memory.repair import repair
from services.memory.settings import MemorySettings
from services.memory.store import IndexDamaged, StoreUnavailable, open_store
from services.memory.vectors import NO_VECTOR, Vector

KILLS = 5
# Writes and deletes until it is killed; a line for each change that is confirmed.
WRITER = """
import asyncio, sys
from pathlib import Path
from services.memory.engram import Engram
from services.memory.index import entry
from services.memory.keywords import KeywordIndex
from services.memory.settings import MemorySettings
from services.memory.store import open_store
from services.memory.vectors import Vector

async def main(folder, first):
    settings = MemorySettings(data_dir=Path(folder))
    words = KeywordIndex(settings.words)
    words.set_mark("0-0")
    async with open_store(settings) as store:
        for number in range(first, first + 100_000, 100):
            engrams = [Engram(f"e{n}", "ann", "note", n, n, content=f"note {n}") for n in range(number, number + 100)]
            many = [(one, Vector("m", [1.0, one.time / 1e6])) for one in engrams]
            await store.put("ann", many)
            words.add("ann", [entry(*one) for one in many])
            print("put", number, flush=True)
            await store.delete("ann", [f"e{number + 99}"])
            words.remove("ann", [f"e{number + 99}"])
            print("deleted", number + 99, flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.slow
async def test_store_killed_at_any_moment_has_all_it_confirmed(tmp_path: Path) -> None:
    settings = MemorySettings(data_dir=tmp_path)
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
        rebuilt = await repair(settings)
        assert not [line for line in rebuilt if "put aside" in line]
        async with open_store(settings) as store:
            placed = [one async for page in store.of_user("ann") for one in page]
            ids = {one.engram.id for one in placed}
            assert len(ids) == len(placed)
            # of a deletion that was not confirmed, nothing is promised
            pending = {one for one in there if int(one[1:]) % 100 == 99}
            assert there - pending <= ids
            assert gone.isdisjoint(ids)
            near = await store.query("ann", Vector("m", [1.0, 0.0]), 5)
            assert len(near) == min(5, len([one for one in placed if one.vector is not None]))


async def changed(settings: MemorySettings, vector: Vector, first: int, last: int) -> None:
    """Write engrams to the store and the keyword index, and delete some of them."""
    with closing(KeywordIndex(settings.words)) as words:
        words.set_mark("0-0")
        async with open_store(settings) as store:
            for at in range(first, last, 100):
                many = [
                    (Engram(f"e{n}", "ann", "note", n, n, content=f"note {n}"), vector) for n in range(at, at + 100)
                ]
                await store.put("ann", many)
                await store.delete("ann", [f"e{at}"])
                words.add("ann", [entry(*one) for one in many])
                words.remove("ann", [f"e{at}"])


@pytest.mark.parametrize("vector", [Vector("m", [1.0, 0.0]), NO_VECTOR], ids=["vectors", "no vectors"])
async def test_index_saved_after_its_list_of_ids_is_rebuilt(tmp_path: Path, vector: Vector) -> None:
    """Chroma saves the vectors first: a process that dies then leaves the list of ids of the save before."""
    before, after = MemorySettings(data_dir=tmp_path / "before"), MemorySettings(data_dir=tmp_path / "after")
    await changed(before, vector, 0, 1_900)
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    await changed(after, vector, 1_900, 2_300)
    for file in after.folder.glob("*/*.bin"):
        shutil.copy(file, before.folder / file.parent.name / file.name)
    ids = {f"e{n}" for n in range(1_900) if n % 100}
    async with open_store(before) as store:
        with pytest.raises(IndexDamaged):
            await store.get("ann", ["e1"])
        assert set(store.suspects.users) == {"ann"}
        with closing(KeywordIndex(before.words)) as words:
            assert await store.rebuild("ann", copies(words, "ann")) == len(ids)
            assert await store.rebuild("ann", copies(words, "ann")) is None
        assert store.suspects.users == {}
    async with open_store(before) as store:
        found = {one.engram.id: one async for page in store.of_user("ann") for one in page}
        assert set(found) == ids
        assert {one.vector for one in found.values()} == {None}
        # as a background task does that gives them vectors again
        await store.put("ann", [(one.engram, Vector("m", [1.0, 0.0])) for one in found.values()])
        assert len(await store.query("ann", Vector("m", [1.0, 0.0]), 50)) == 50
        assert sum(one.count for one in await store.collections()) == len(ids)


async def test_passing_error_of_a_file_rebuilds_nothing(tmp_path: Path) -> None:
    settings = MemorySettings(data_dir=tmp_path)
    await changed(settings, Vector("m", [1.0, 0.0]), 0, 1_200)
    (file,) = settings.folder.glob("*/index_metadata.pickle")
    aside = file.rename(file.with_suffix(".aside"))
    file.mkdir()
    async with open_store(settings) as store:
        with pytest.raises(StoreUnavailable) as raised:
            await store.get("ann", ["e1"])
        assert not isinstance(raised.value, IndexDamaged)
        file.rmdir()
        aside.rename(file)
        assert set(await store.get("ann", ["e1"])) == {"e1"}
        assert store.suspects.users == {}
