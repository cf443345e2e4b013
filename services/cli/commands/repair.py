"""Damaged stores of a data folder: found by `local2 doctor`, put aside by `local2 doctor --repair`.

Nothing is read out of damaged files. A backup brings the data back.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from services.cli.launch.embedded_redis import EmbeddedRedis, can_start
from services.cli.launch.redis_data import DataDamaged, put_aside
from services.cli.launch.run_lock import run_lock
from services.cli.settings import KnowledgeConfig, RewardConfig, StoreConfig
from services.cli.words import typed
from shared.errors import Local2Error
from shared.participant.store_marker import remove_marker, set_aside, sqlite_missing, sqlite_trouble, was_created

# Participants that check their own store.
_MODULES = ("memory",)


def damages(data_dir: Path, *, embedded: bool) -> list[tuple[str, str]]:
    """Return what is wrong with the stores of a folder: (store, sentence). Changes nothing.

    Only memory itself can read its store: here it is damaged when its database is gone or empty.

    embedded: the bus is the embedded one.
    """
    found = []
    if embedded:
        try:
            if (data_dir / "redis").exists() or was_created(data_dir / "redis"):
                can_start(data_dir / "redis")
        except Local2Error as exc:
            found.append(("data of the bus", str(exc)))
    databases = {"preferences": _preferences(data_dir)}
    if not (knowledge := _knowledge(data_dir)).on_server:
        databases["knowledge"] = knowledge.path
    databases |= {f"documents of user {path.parent.name}": path for path in _libraries(data_dir)}
    for name, path in databases.items():
        if what := _trouble(path):
            found.append((name, f"damaged: {what} (in {path.parent})"))
    memory = StoreConfig.load("memory", {"data_dir": data_dir})
    database = memory.folder / "chroma.sqlite3"
    if memory.chroma_url is None and was_created(memory.folder) and (what := sqlite_missing(database)):
        found.append(("memory's store", f"damaged: {what} (in {memory.folder})"))
    return found


def repair(data_dir: Path, *, embedded: bool) -> list[str]:
    """Put damaged stores aside, and return sentences that say so.

    Raises Local2Error when the stack runs, or a store cannot be put aside.
    """
    return asyncio.run(_repair(data_dir.absolute(), embedded)) if data_dir.exists() else []


async def _repair(data_dir: Path, embedded: bool) -> list[str]:
    said: list[str] = []
    async with run_lock(data_dir, 1.0):
        if embedded:
            said += await asyncio.to_thread(_bus, data_dir / "redis")
        said += await asyncio.to_thread(_database, _preferences(data_dir))
        if not (knowledge := _knowledge(data_dir)).on_server:
            said += await asyncio.to_thread(_database, knowledge.path)
        said += await asyncio.to_thread(_documents, data_dir)
        for name in _MODULES:
            said += await _of_participant(name, data_dir)
    # A backup is not needed for an index that memory could rebuild.
    if any("rebuilt from the keyword index" not in line for line in said):
        said.append(f"start the stack, then restore a backup: {typed('restore', '--merge')} FILE")
    return said


def _bus(folder: Path) -> list[str]:
    if not folder.exists() and not was_created(folder):
        return []
    try:
        with EmbeddedRedis(folder):
            return []
    except DataDamaged as exc:
        return [_sentence("the data of the bus were", exc.what, put_aside(folder))]


def _database(path: Path) -> list[str]:
    if (what := _trouble(path)) is None:
        return []
    # The write-ahead log must not meet the new database.
    aside = [set_aside(path.with_name(path.name + end)) for end in ("", "-wal", "-shm")]
    remove_marker(path)
    return [_sentence(f"{path.name} was", what, aside[0])]


def _documents(data_dir: Path) -> list[str]:
    """Put the folders of users with a damaged library aside, with the files in them."""
    damaged = {path: what for path in _libraries(data_dir) if (what := _trouble(path))}
    return [
        _sentence(f"the documents of user {path.parent.name} were", what, set_aside(path.parent))
        for path, what in damaged.items()
    ]


def _libraries(data_dir: Path) -> list[Path]:
    """Return the databases of all users' documents; see `services.memory.library`."""
    return [folder / "library.db" for folder in sorted((data_dir / "documents").glob("[0-9a-f]" * 32))]


def _trouble(path: Path) -> str | None:
    """Return what is wrong with a database that exists, or existed."""
    return sqlite_trouble(path) if sqlite_missing(path) is None or was_created(path) else None


def _sentence(store: str, damage: str, aside: Path | None) -> str:
    return f"{store} damaged ({damage})" + (f"; the damaged files are now in {aside}" if aside else "")


def _preferences(data_dir: Path) -> Path:
    return RewardConfig.load("reward", {"data_dir": data_dir}).path


def _knowledge(data_dir: Path) -> KnowledgeConfig:
    return KnowledgeConfig.load("knowledge", {"data_dir": data_dir})


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
    out, wrong = await process.communicate()
    if process.returncode != 0:
        last = wrong.decode(errors="replace").strip().splitlines()[-1:] or [f"status {process.returncode}"]
        raise Local2Error(f"{last[0]}; a backup is put back with: {typed('restore')} FILE")
    return out.decode(errors="replace").splitlines()
