"""What the gateway asks of reward: the ranking, preference data, consent, and its part of a backup."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, assert_never, get_args

import orjson
from pydantic import BaseModel, ConfigDict, Field

from services.reward.database import TABLES, key_of
from services.reward.experiments import Experiments, Refused
from services.reward.export import (
    Filters,
    Format,
    LeftOut,
    Tools,
    critique_rows,
    dpo_rows,
    kto_rows,
    nothing_because,
    row_digest,
)
from services.reward.reliability import report
from services.reward.settings import RewardSettings
from services.reward.store import Store
from shared.contracts import ToolRequest
from shared.envelope import now_ms
from shared.errors import SettingsError, ToolError, TransientError
from shared.participant.retention import Retention
from shared.participant.tool import ToolResult

if TYPE_CHECKING:
    from services.reward.leaderboard import Leaderboard

R = TypeVar("R")
NAME = "reward_manage"
# A page of rows; a message on the bus should stay small.
_PAGE_BYTES = 400_000
# A prompt holds a session's history: some rows are large.
_PAGE_ROWS = 200
# Rows of an export that are counted; of larger ones it is said that there are more.
_COUNTED = 1_000
# Later than every time, in ms; the digits of a number that a database can hold.
_LAST = 2**62
_TIME_DIGITS = 19


class Manage(BaseModel):
    """Reads and writes preference data."""

    model_config = ConfigDict(extra="forbid")

    op: Literal[
        "leaderboard", "verdicts", "export", "export_counts", "consent", "counts", "dump", "load", "clear",
        "judge", "experiments", "experiment", "start", "stop", "promote", "revert", "retention",
    ]  # fmt: skip
    # export, export_counts
    format: Format = "dpo"
    min_margin: float = Field(default=0.0, ge=0, le=4)
    human_only: bool = False
    since: int | None = None
    until: int | None = None
    consented: bool = False
    test_share: float = Field(default=0.0, ge=0, le=1)
    tools: Tools = "include"
    # verdicts
    limit: int = Field(default=100, ge=1, le=_PAGE_ROWS)
    # verdicts, export, dump
    cursor: str = ""
    table: str = ""
    # consent: null asks
    given: bool | None = None
    # load
    rows: list[dict[str, Any]] = []
    # experiments
    name: str = ""
    b: dict[str, Any] = {}
    force: bool = False
    # retention
    days: int | None = Field(default=None, ge=0)


class Access:
    """The store, for one at a time, each in a thread of its own turn: SQLite is blocking."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._damaged = asyncio.Event()

    async def with_store(self, work: Callable[[Store], R]) -> R:
        def locked() -> R:
            with self._lock:
                return work(self._store)

        try:
            return await asyncio.to_thread(locked)
        except TransientError:
            if self._store.damage is not None:
                self._damaged.set()
            raise

    async def whole(self) -> None:
        """Returns never; raises SettingsError once the database turns out to be broken: nothing may be read from the
        bus that cannot be kept."""
        await self._damaged.wait()
        raise SettingsError(self._store.damage)


class Desk:
    """What the gateway asks for."""

    def __init__(
        self,
        access: Access,
        experiments: Experiments,
        settings: Callable[[], RewardSettings],
        judges: Callable[[], Awaitable[list[str]]],
        retention: Retention,
    ) -> None:
        self._with_store = access.with_store
        self._judges = judges
        self._retention = retention
        self._experiments = experiments
        self._settings = settings
        self._leaderboard: Leaderboard | None = None

    async def manage(self, args: Manage, request: ToolRequest) -> ToolResult:
        try:
            return await self._manage(args, request)
        except TransientError as exc:
            # whoever asks would wait for nothing
            raise ToolError(f"unavailable: {exc}") from exc

    async def _manage(self, args: Manage, request: ToolRequest) -> ToolResult:
        match args.op:
            case "leaderboard":
                data = await self.leaderboard()
            case "verdicts":
                data = await self._with_store(lambda store: verdict_page(store, args.cursor, args.limit))
            case "export":
                data = await self._with_store(lambda store: export_page(store, args))
            case "export_counts":
                data = {
                    kind: await self._counted(args.model_copy(update={"format": kind})) for kind in get_args(Format)
                }
            case "consent":
                data = await self._with_store(lambda store: consent(store, request.user_id, args.given))
            case "counts":
                data = await self._with_store(lambda store: store.counts())
            case "dump":
                data = await self._with_store(lambda store: dump_page(store, args.table, args.cursor))
            case "load":
                data = await self._with_store(lambda store: load(store, args))
            case "clear":
                data = await self._with_store(lambda store: {"removed": store.clear()})
            case "judge":
                data = await self.judge()
            case "retention":
                data = {"kinds": await self._retention.shown(args.days)}
            case "experiments":
                data = {"experiments": await self._experiments.all()}
            case "experiment" | "start" | "stop" | "promote" | "revert":
                data = await self._experiment(args)
            case _:
                assert_never(args.op)
        return ToolResult("done", data)

    async def _counted(self, args: Manage) -> dict[str, Any]:
        """How many rows an export has, and whether it has more; `why` there is none."""
        seen, cursor, why = set[str](), "", None
        while cursor is not None and len(seen) < _COUNTED:
            asked = args.model_copy(update={"cursor": cursor})
            page = await self._with_store(partial(export_page, args=asked))
            seen.update(found["digest"] for found in page["rows"])
            cursor, why = page["cursor"], page.get("why")
        return {"rows": len(seen), "more": cursor is not None, "why": why}

    async def _experiment(self, args: Manage) -> dict[str, Any]:
        """`experiment`: null when there is none of that name; `refused`: why it cannot be done now."""
        try:
            match args.op:
                case "start":
                    found = await self._experiments.start(args.name, args.b)
                case "stop":
                    found = await self._experiments.stop(args.name)
                case "promote":
                    found = await self._experiments.promote(args.name, force=args.force)
                case "revert":
                    found = await self._experiments.revert(args.name)
                case _:
                    found = await self._experiments.show(args.name)
        except LookupError:
            return {"experiment": None}
        except Refused as exc:
            return {"refused": str(exc)}
        return {"experiment": found}

    async def judge(self) -> dict[str, Any]:
        """Whether the judge can be trusted."""

        def read(store: Store) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, int], list[str]]:
            return store.judged_and_rated(), store.judged_pairs(), store.tallies()["grades"], store.jury_grades()

        rated, pairs, grades, by_several = await self._with_store(read)
        return await asyncio.to_thread(report, rated, pairs, grades, await self._judges(), by_several)

    async def leaderboard(self) -> dict[str, Any]:
        """Rankings by the judge's comparisons and by people's votes, over all and for each intent."""
        samples = self._settings().samples

        def read(store: Store) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
            return store.comparisons(), store.ratings(), store.judged_and_rated()

        pairs, ratings, both = await self._with_store(read)
        if self._leaderboard is None:
            # with it comes numpy, whose memory is not held where nobody asks for a ranking
            from services.reward.leaderboard import Leaderboard

            self._leaderboard = Leaderboard()
        return await asyncio.to_thread(self._leaderboard.make, pairs, ratings, both, samples)


def verdict_page(store: Store, cursor: str, limit: int) -> dict[str, Any]:
    """What the judge said, the newest first, with the answers; `cursor`: where the next page begins, null: nowhere.
    Raises ToolError for a cursor that is none of ours."""
    time_ms, _, name = cursor.partition(" ")
    if cursor and not (time_ms.isdecimal() and len(time_ms) < _TIME_DIGITS and name):
        raise ToolError(f"there is no page {cursor[:100]}")
    found: list[dict[str, Any]] = []
    size = 0
    # one more than wanted says whether there is another page
    rows = store.verdicts((int(time_ms), name) if cursor else (_LAST, ""), limit + 1)
    for row in rows[:limit]:
        response_id = row.pop("response_id")
        answers = row.pop("answers")
        row["respondent"] = response_id.rpartition(":")[2] if response_id else None
        row["user_id"] = next((one["user_id"] for one in answers), None)
        row["query"] = next((one["query"] for one in answers), None)
        row["answers"] = {
            one["respondent"]: {"answer": one["answer"], "model": orjson.loads(one["config"]).get("model")}
            for one in answers
        }
        row["judges"] = [
            {
                "model": one["model"],
                "score": one.get("score"),
                "winner": one.get("winner"),
                "words": one.get("feedback") or one.get("reason") or "",
            }
            for one in (orjson.loads(row["judges"]) if row["judges"] else ())
        ]
        found.append(row)
        size += len(orjson.dumps(row))
        if size >= _PAGE_BYTES:
            break
    more = len(found) < len(rows)
    return {"verdicts": found, "cursor": f"{found[-1]['time']} {found[-1]['id']}" if more else None}


def export_page(store: Store, args: Manage) -> dict[str, Any]:
    """Rows from the cursor on, each with the digest of its content, and where the next page begins (null: nowhere);
    `why` there is none."""
    filters = Filters(
        args.min_margin, args.human_only, args.since, args.until, args.consented, args.test_share, args.tools
    )
    consents = store.consents()
    cursor, found, size = args.cursor, list[dict[str, Any]](), 0
    left_out: LeftOut = Counter()
    while size < _PAGE_BYTES:
        source = (store.pair_rows if args.format == "dpo" else store.answer_rows)(cursor, _PAGE_ROWS)
        if not source:
            why = None if found or args.cursor else nothing_because(args.format, left_out)
            return {"rows": found, "cursor": None, "why": why}
        shapes = {"dpo": dpo_rows, "kto": kto_rows, "critiques": critique_rows}
        for item in source:
            cursor = item["query_id"] if args.format == "dpo" else item["response_id"]
            for row in shapes[args.format]([item], consents, filters, left_out):
                found.append({"digest": row_digest(row).hex(), "row": row})
                size += len(orjson.dumps(row))
            if size >= _PAGE_BYTES:
                break
    return {"rows": found, "cursor": cursor}


def consent(store: Store, user_id: str, given: bool | None) -> dict[str, Any]:
    """What a user said about training on their data; asks only when `given` is None."""
    if given is not None:
        store.put("consents", {"user_id": user_id, "given": int(given), "time": now_ms()})
    return {"user_id": user_id, "consent": store.consent(user_id)}


def dump_page(store: Store, table: str, cursor: str) -> dict[str, Any]:
    """Rows of a table from the cursor on, for a backup."""
    _existing(table)
    rows: list[dict[str, Any]] = []
    size = 0
    for row in store.page(table, cursor, _PAGE_ROWS):
        rows.append(row)
        size += len(orjson.dumps(row))
        if size >= _PAGE_BYTES:
            break
    return {"rows": rows, "cursor": key_of(table, rows[-1]) if rows else None}


def load(store: Store, args: Manage) -> dict[str, Any]:
    """Puts rows of a backup back; what is there stays."""
    _existing(args.table)
    try:
        return {"written": store.load(args.table, args.rows, replace=False)}
    except (ValueError, KeyError) as exc:
        raise ToolError(f"a row of {args.table} cannot be used: {exc}") from exc


def _existing(table: str) -> None:
    if table not in TABLES:
        raise ToolError(f"there is no table {table}; there are: {', '.join(TABLES)}")
