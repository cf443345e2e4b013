"""`local2 doctor --repair`, and what doctor says of the stores of a data folder: the bus, memory, preferences."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from services.cli.launch import redis_data
from services.cli.launch.embedded_redis import EmbeddedRedis, can_start
from services.cli.launch.redis_data import DataDamaged
from services.cli.launch.run_lock import run_lock
from services.cli.settings import RewardWish, StoreWish
from services.cli.words import typed
from shared.errors import Local2Error
from shared.participant.store_marker import sqlite_missing, sqlite_trouble, was_created

# Participants whose stores are files of their own; each knows best how to save them.
_MODULES = ("memory", "reward", "knowledge")


def damages(data_dir: Path, *, embedded: bool) -> list[tuple[str, str]]:
    """What is wrong with the stores of a folder: (store, sentence). Reads all of the two databases, changes nothing.

    embedded: the bus is the embedded one.
    """
    found = []
    if embedded:
        try:
            if (data_dir / "redis").exists() or was_created(data_dir / "redis"):
                can_start(data_dir / "redis")
        except Local2Error as exc:
            found.append(("data of the bus", str(exc)))
    databases = [("preferences", RewardWish.load("reward", {"data_dir": data_dir}).path)]
    memory = StoreWish.load("memory", {"data_dir": data_dir})
    if memory.chroma_url is None:
        databases.append(("memory's store", memory.folder / "chroma.sqlite3"))
    for name, path in databases:
        there = sqlite_missing(path) is None or was_created(path) or was_created(path.parent)
        if there and (what := sqlite_trouble(path)):
            found.append((name, f"damaged: {what} (in {path.parent})"))
    return found


def repair(data_dir: Path, *, embedded: bool) -> list[str]:
    """Puts aside what is damaged and saves what can be read of it. Sentences that say what was done.

    Raises Local2Error when the stack runs, or a store cannot be repaired.
    """
    return asyncio.run(_repair(data_dir.absolute(), embedded)) if data_dir.exists() else []


async def _repair(data_dir: Path, embedded: bool) -> list[str]:
    said: list[str] = []
    async with run_lock(data_dir, 1.0):
        if embedded:
            said += await asyncio.to_thread(_bus, data_dir / "redis")
        for name in _MODULES:
            said += await _of_participant(name, data_dir)
    return said


def _bus(folder: Path) -> list[str]:
    if not folder.exists() and not was_created(folder):
        return []
    try:
        with EmbeddedRedis(folder):
            return []
    except DataDamaged as exc:
        damage = exc.what

    def keys() -> int | None:
        try:
            with EmbeddedRedis(folder) as server:
                return server.keys()
        except DataDamaged:
            return None

    return [f"the data of the bus were damaged ({damage})", *redis_data.repair(folder, keys)]


async def _of_participant(name: str, data_dir: Path) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{name}.repair",
        env={**os.environ, "LOCAL2_DATA_DIR": str(data_dir)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, wrong = await process.communicate()
    if process.returncode != 0:
        last = wrong.decode(errors="replace").strip().splitlines()[-1:] or [f"status {process.returncode}"]
        raise Local2Error(f"{last[0]}; a backup is put back with: {typed('restore')} FILE")
    return told.decode(errors="replace").splitlines()
