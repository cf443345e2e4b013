"""Users' ratings of this respondent's answers, by configuration and intent: stored in Redis, shown in the registry.

Every replica follows `reward.event`. An event counts once, although several replicas read it. Of several votes on one
answer the last one counts, unless it was withdrawn. The participant's consumer group stores the position in the
stream. So the bus does not trim events that are published while no replica runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import orjson

from shared.bus import Bus, Entry, ReplyError, Script
from shared.bus.keys import rewards_key, vote_key
from shared.contracts import REWARD_EVENT, RewardEvent
from shared.envelope import Envelope
from shared.errors import DecodeError, TransientError
from shared.participant.service import Context
from shared.telemetry.logging import get_logger

log = get_logger()

_STREAM = REWARD_EVENT.stream
# A client may name any model: further kinds of answers are counted as one.
_MOST_KINDS = 400
_SHOWN = 20
_OTHER = orjson.dumps([{}, "other"]).decode()
# The one consumer of each group, which never has anything pending.
_FOLLOWER = "follower"
_LOOK_SECONDS = 30.0
_PAUSE = 1.0

_COUNT = Script.read(Path(__file__).parent / "scripts" / "count_reward.lua")


class Rewards:
    """The statistics of one respondent. `group`: its participant."""

    def __init__(self, bus: Bus, group: str, respondent_id: str, retention: int) -> None:
        self._bus = bus
        self._group = group
        self._respondent = respondent_id
        # After this time the answer's record has expired, and no vote is possible.
        self._seconds = 2 * retention + 86_400
        self._counts, self._sums = rewards_key(respondent_id, "counts"), rewards_key(respondent_id, "sums")

    async def count(self, entry: Entry) -> None:
        """Count one entry of the stream; those of the other respondent only move the position."""
        event = self._event(entry)
        mine = event is not None and event.respondent_id == self._respondent
        vote, kind, vote_id, reward = "none", "", "", ""
        if event is not None and mine:
            config = {name: value for name, value in event.config.items() if value not in (None, "", {})}
            kind = orjson.dumps([config, event.intent], option=orjson.OPT_SORT_KEYS).decode()
            vote, vote_id = event.response_id, event.vote_id or entry[0]
            reward = "" if event.withdrawn else repr(event.reward)
        keys = (_STREAM, vote_key(vote), self._counts, self._sums)
        args = (self._group, entry[0], kind, vote_id, reward, self._seconds, _MOST_KINDS, _OTHER)
        await self._bus.link.call(*_COUNT(keys, *args))

    def _event(self, entry: Entry) -> RewardEvent | None:
        try:
            return REWARD_EVENT.decode(Envelope.parse(REWARD_EVENT.name, *entry))
        except DecodeError as exc:
            # Memory, which reads the stream as work, writes its dead letter.
            log.warning("rewards.malformed", entry_id=entry[0], reason=str(exc))
            return None

    async def statistics(self) -> list[dict[str, Any]]:
        """Return the kinds of answers with most ratings: configuration, intent, count, and the mean from -1 to 1."""
        raw = await self._bus.link.pipe([("HGETALL", self._counts), ("HGETALL", self._sums)])
        counts, sums = (dict(zip(found[::2], found[1::2], strict=True)) for found in raw)
        rows = []
        for kind, number in counts.items():
            # Skip malformed fields.
            with contextlib.suppress(ValueError, TypeError, ArithmeticError):
                config, intent = orjson.loads(kind)
                count = int(number)
                mean = round(float(sums.get(kind, 0)) / count, 4)
                rows.append({"config": config, "intent": str(intent), "count": count, "mean": mean})
        rows.sort(key=lambda row: (-row["count"], str(row["config"]), row["intent"]))
        return rows[:_SHOWN]

    async def position(self) -> str:
        """Return the id of the last counted event; create the group if it is missing."""
        try:
            await self._bus.link.call("XGROUP", "CREATE", _STREAM, self._group, "0", "MKSTREAM")
        except ReplyError as exc:
            if exc.code != "BUSYGROUP":
                raise
        for row in await self._bus.link.call("XINFO", "GROUPS", _STREAM):
            group = dict(zip(row[::2], row[1::2], strict=True))
            if group[b"name"].decode() == self._group:
                return str(group[b"last-delivered-id"].decode())
        return "0-0"

    async def serve(self) -> None:
        """Mark the group as used: the bus trims entries of abandoned groups. Reads nothing."""
        await self._bus.link.call("XREADGROUP", "GROUP", self._group, _FOLLOWER, "COUNT", 1, "STREAMS", _STREAM, "0")


async def follow_rewards(context: Context[Any], rewards: Rewards) -> None:
    """Count new events and show the statistics, until cancelled."""
    while True:
        try:
            follower = context.tail.follow(_STREAM, await rewards.position())
            try:
                while True:
                    await rewards.serve()
                    context.facts["rewards"] = await rewards.statistics()
                    try:
                        async with asyncio.timeout(_LOOK_SECONDS):
                            found = await follower.next()
                    except TimeoutError:
                        continue
                    for entry in found:
                        await rewards.count(entry)
            finally:
                follower.close()
        except (TransientError, ReplyError) as exc:
            log.warning("rewards.interrupted", reason=str(exc))
            await asyncio.sleep(_PAUSE)
