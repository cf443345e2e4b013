"""Chroma in this process: its compiled part alone, in the form of its own client, as far as memory uses that.

The layers of Python above it are for whoever needs more of them: loaded, they take 50 MB, and of a query a fifth.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Where Chroma keeps everything that is not said to be elsewhere.
_PLACE = ("default_tenant", "default_database")
_PACKAGE, _ERRORS = "chromadb", "chromadb.errors"


def errors() -> Any:
    """Chroma's module of errors, without the package round it."""
    if _ERRORS not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(_ERRORS, Path(_folder(), "errors.py"))
        sys.modules[_ERRORS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_ERRORS])
    return sys.modules[_ERRORS]


def package() -> Any:
    """The whole package: what a server is asked by."""
    if _bare(sys.modules.get(_PACKAGE)):
        del sys.modules[_PACKAGE]
    return importlib.import_module(_PACKAGE)


def _without_package() -> None:
    """What Chroma's compiled part raises it looks for in the module of errors, and would load the package for that."""
    if _PACKAGE not in sys.modules:
        bare = ModuleType(_PACKAGE)
        bare.__path__ = [_folder()]
        sys.modules[_PACKAGE] = bare


def _bare(module: ModuleType | None) -> bool:
    return module is not None and getattr(module, "__file__", None) is None


def _folder() -> str:
    spec: Any = importlib.util.find_spec(_PACKAGE)
    return str(spec.submodule_search_locations[0])


class Engine:
    """open_indexes: so many collections' vectors stay in memory, with their files open."""

    def __init__(self, database: Path, open_indexes: int) -> None:
        self.database = database
        # in the containers there is only the client of a server, without it
        import chromadb_rust_bindings as compiled  # type: ignore[import-untyped]

        errors()
        _without_package()
        self.compiled = compiled.Bindings(
            allow_reset=False,
            sqlite_db_config=compiled.SqliteDBConfig(
                hash_type=compiled.MigrationHash.MD5,
                migration_mode=compiled.MigrationMode.Apply,
                url=str(database),
            ),
            persist_path=str(database.parent),
            hnsw_cache_size=open_indexes,
        )

    def close(self) -> None:
        """Its files are closed soon after, in threads of its own."""
        del self.compiled

    def heartbeat(self) -> int:
        at: int = self.compiled.heartbeat()
        return at

    def list_collections(self, limit: int | None = None, offset: int | None = None) -> list[Records]:
        return [Records(self, one) for one in self.compiled.list_collections(limit, offset, *_PLACE)]

    def get_collection(self, name: str, *, embedding_function: None = None) -> Records:
        return Records(self, self.compiled.get_collection(name, *_PLACE))

    def get_or_create_collection(
        self,
        name: str,
        *,
        metadata: Mapping[str, Any],
        configuration: Mapping[str, Any] | None = None,
        embedding_function: None = None,
    ) -> Records:
        # vectors come from us
        chosen = json.dumps({**configuration, "embedding_function": {"type": "legacy"}}) if configuration else None
        made = self.compiled.create_collection(name, chosen, None, dict(metadata), True, *_PLACE)
        return Records(self, made)

    def delete_collection(self, name: str) -> None:
        self.compiled.delete_collection(name, *_PLACE)


class Records:
    """A collection."""

    __slots__ = ("_engine", "_id", "metadata", "name")

    def __init__(self, engine: Engine, about: Any) -> None:
        self._engine = engine
        self._id = str(about.id)
        self.name: str = about.name
        self.metadata: Mapping[str, Any] = about.metadata or {}

    def count(self) -> int:
        found: int = self._engine.compiled.count(self._id, *_PLACE)
        return found

    def get(
        self,
        ids: Sequence[str] | None = None,
        where: Mapping[str, Any] | None = None,
        limit: int | None = None,
        offset: int = 0,
        include: Sequence[str] = ("metadatas",),
    ) -> dict[str, Any]:
        condition = json.dumps(where) if where else None
        chosen = None if ids is None else list(ids)
        found = self._engine.compiled.get(self._id, chosen, condition, limit, offset, None, list(include), *_PLACE)
        return {"ids": found.ids, "metadatas": found.metadatas, "embeddings": found.embeddings}

    def query(
        self, query_embeddings: Sequence[Sequence[float]], n_results: int, include: Sequence[str] = ("distances",)
    ) -> dict[str, Any]:
        found = self._engine.compiled.query(
            self._id, None, query_embeddings, n_results, None, None, list(include), *_PLACE
        )
        return {"ids": found.ids, "distances": found.distances}

    def upsert(
        self, ids: Sequence[str], embeddings: Sequence[Sequence[float]], metadatas: Sequence[Mapping[str, Any]]
    ) -> None:
        self._engine.compiled.upsert(self._id, list(ids), embeddings, metadatas, None, None, *_PLACE)

    def update(self, ids: Sequence[str], metadatas: Sequence[Mapping[str, Any]]) -> None:
        self._engine.compiled.update(self._id, list(ids), None, metadatas, None, None, *_PLACE)

    def delete(self, ids: Sequence[str]) -> None:
        self._engine.compiled.delete(self._id, list(ids), None, None, None, *_PLACE)
