"""reward on a real bus with a real database: votes, verdicts, ranking, export, and what happens in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from support.entries import event_of
from support.services import announced, running
from support.stack import Client
from support.waiting import eventually

from services.reward.database import Database
from services.reward.service import app
from services.reward.settings import RewardSettings
from services.reward.store import Store
from shared.bus import Bus
from shared.bus.keys import journal_key
from shared.contracts import (
    CRITIQUE_RESULT,
    MEMORY_FORGET,
    PAIRWISE_RESULT,
    QUERY_FORGET,
    RESPONSE_GENERATION,
    REWARD_EVENT,
    USER_FEEDBACK,
    CritiqueResult,
    MemoryForget,
    PairwiseResult,
    QueryForget,
    ResponseGeneration,
    RewardEvent,
    ToolCallRecord,
    UserFeedback,
    Winner,
)
from shared.envelope import now_ms
from shared.errors import SettingsError, TransientError
from shared.participant.service import open_context
from shared.participant.settings import Settings
from shared.participant.tool_client import Caller, ToolClient
from shared.records.journal import EntryType, JournalWriter, append_after
from shared.records.sessions import Turn

ROOT = Path(__file__).parents[2]
READ = [{"role": "user", "content": "Grade this."}]
STREAMS = (RESPONSE_GENERATION, CRITIQUE_RESULT, PAIRWISE_RESULT, USER_FEEDBACK, MEMORY_FORGET, QUERY_FORGET)


class Office(Client):
    """Publishes what other participants say, and asks reward as the gateway does."""

    def __init__(self, bus: Bus, tools: ToolClient) -> None:
        super().__init__(bus)
        self._tools = tools

    async def answered(self, query_id: str, respondent: Any = "A", answer: str = "Yes.", **fields: Any) -> None:
        values: dict[str, Any] = {
            "query_id": query_id, "response_id": f"{query_id}:{respondent}", "session_id": "s1", "user_id": "ann",
            "respondent_id": respondent, "generator_id": "g", "query": "Is it so?", "answer": answer,
            "model": f"model-{respondent}", "options": {"temperature": 0.5}, "finish_reason": "stop",
        }  # fmt: skip
        await self.bus.publish(RESPONSE_GENERATION.of(ResponseGeneration(**{**values, **fields})))

    async def compared(self, query_id: str, winner: Winner, score_a: float = 4, score_b: float = 2) -> None:
        config = {"options": {"temperature": 0.5}, "prompt_version": ""}
        result = PairwiseResult(
            original_query_id=query_id, query_id_a=f"{query_id}:A", query_id_b=f"{query_id}:B", winner=winner,
            score_a=score_a, score_b=score_b, reason="because", session_id="s1", forward=winner, swapped=winner,
            config_a={"model": "model-A", **config}, config_b={"model": "model-B", **config},
        )  # fmt: skip
        await self.bus.publish(PAIRWISE_RESULT.of(result))

    async def graded(self, query_id: str, score: int | None, respondent: Any = "A", prompt: Any = READ) -> None:
        result = CritiqueResult(
            query_id=query_id, response_id=f"{query_id}:{respondent}", session_id="s1", respondent_id=respondent,
            score=score, feedback="Plain.", rubric="realistic", query="Is it so?", answer="Yes.",
            prompt=prompt,
        )  # fmt: skip
        await self.bus.publish(CRITIQUE_RESULT.of(result))

    async def votes(self, query_id: str, *, stars: int | None = None, good: bool = True) -> None:
        vote = UserFeedback(
            query_id=query_id, session_id="s1", user_id="ann", sentiment="positive" if good else "negative", stars=stars
        )
        await self.bus.publish(USER_FEEDBACK.of(vote, correlation_id=query_id, session_id="s1", user_id="ann"))

    async def settled(self) -> None:
        async def done() -> bool:
            return not any([await self.bus.backlog(subject.stream, "reward") for subject in STREAMS])

        await eventually(done, 20, "nothing left for reward")

    async def ask(self, op: str, user: str = "ann", **args: Any) -> dict[str, Any]:  # type: ignore[override]
        caller = Caller(uuid.uuid4().hex, user_id=user)
        outcome = await self._tools.call(
            "reward_manage", {"op": op, **args}, call_id=caller.query_id, caller=caller, timeout=10, internal=True
        )
        assert outcome.error is None, outcome.error
        data: dict[str, Any] = outcome.data
        return data

    async def exported(self, kind: str, **filters: Any) -> list[dict[str, Any]]:
        found, cursor = [], ""
        while cursor is not None:
            page = await self.ask("export", format=kind, cursor=cursor, **filters)
            found += [item["row"] for item in page["rows"]]
            cursor = page["cursor"]
        return found

    async def rewards(self) -> list[RewardEvent]:
        return await self.published(REWARD_EVENT)


@contextlib.asynccontextmanager
async def office(url: str, folder: Path, **values: Any) -> AsyncIterator[Office]:
    # a beat that a busy machine does not miss: the operations below need the tool to be seen
    common: dict[str, Any] = {"redis_url": url, "heartbeat": 0.5, "drain": 0.5, "data_dir": folder}
    settings = RewardSettings(**{**common, "samples": 50, "patience": 1.0, **values})
    async with running(app, settings):
        await announced(url, "reward")
        async with open_context("office", Settings(**common)) as context, Bus(url, "test/office") as bus:
            yield Office(bus, ToolClient(context))


async def test_a_vote_becomes_reward_with_the_configuration_and_intent_of_its_answer(
    redis_url: str, tmp_path: Path
) -> None:
    async with office(redis_url, tmp_path) as on:
        writer, _ = await JournalWriter.claim(on.bus, journal_key("1-1", "A"), event_of("claimed", {}), 60)
        await writer.append(event_of(EntryType.COMPLETED, {}))
        call = ToolCallRecord(tool="web_search", args={}, result="x", call_id="c")
        asked = {"options": {"temperature": 1.0, "num_predict": 9}, "own_options": {"temperature": 0.5}}
        await on.answered("1-1", tool_calls=[call], **asked)
        await on.votes("1-1", stars=4)
        await on.settled()
        (event,) = await on.rewards()
        assert (await on.journal("1-1"))[-1].value()["reward"] == 0.5
    assert (event.response_id, event.reward, event.source, event.intent) == ("1-1:A", 0.5, "stars", "lookup")
    assert event.config == {"model": "model-A", "options": {"temperature": 0.5}}


async def test_what_another_program_wrote_needs_neither_an_envelope_nor_an_entrys_id(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    answer = ResponseGeneration(
        query_id="my-id", response_id="my-id:A", session_id="s1", user_id="ann", respondent_id="A", generator_id="g",
        query="Is it so?", answer="Yes.", model="model-A", finish_reason="stop",
    )  # fmt: skip
    vote = UserFeedback(query_id="my-id", session_id="s1", user_id="ann", sentiment="positive")
    async with office(redis_url, tmp_path) as on:
        for subject, payload in ((RESPONSE_GENERATION, answer), (USER_FEEDBACK, vote)):
            raw.xadd(subject.stream, {"payload": payload.model_dump_json()})
        await on.settled()
        (event,) = await on.rewards()
        (row,) = await on.exported("kto")
    assert (event.reward, event.config["model"]) == (1.0, "model-A")
    assert now_ms() - row["provenance"]["time"] < 60_000
    ((_, fields),) = raw.xrange(REWARD_EVENT.stream)
    assert (fields[b"correlation_id"], fields[b"session_id"], fields[b"user_id"]) == (b"my-id", b"s1", b"ann")


async def test_the_last_vote_counts_and_the_same_vote_changes_nothing(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path) as on:
        await on.answered("1-1")
        for stars in (5, 5, 1, 2):
            await on.votes("1-1", stars=stars)
        await on.settled()
        events = await on.rewards()
        (row,) = (await on.ask("dump", table="votes"))["rows"]
    # a vote that a later one has overtaken need not be told, and never comes behind it
    assert events[-1].reward == -0.5
    assert len({event.vote_id for event in events}) == len(events) <= 4
    assert all(re.fullmatch(r"\d+-\d+", event.vote_id) for event in events)
    assert sorted(events, key=lambda event: event.vote_id) == events
    assert (row["reward"], row["stars"]) == (-0.5, 2)


async def test_a_vote_that_is_quicker_than_its_answer_waits_for_it(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path, patience=10) as on:
        await on.votes("1-1")
        await asyncio.sleep(0.3)
        assert await on.rewards() == []
        await on.answered("1-1")
        await on.settled()
        (event,) = await on.rewards()
    assert event.config["model"] == "model-A"


async def test_many_votes_that_wait_do_not_keep_their_answers_out(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path, patience=30) as on:
        for n in range(20):
            await on.votes(f"{n + 1}-1")
        for n in range(20):
            await on.answered(f"{n + 1}-1")
        async with asyncio.timeout(15):
            await on.settled()
        assert [event.config["model"] for event in await on.rewards()] == ["model-A"] * 20


async def test_votes_on_what_was_deleted_are_not_waited_for(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path, patience=30) as on:
        await on.bus.publish(MEMORY_FORGET.of(MemoryForget(user_id="ann", session_id="s1", at=500)))
        await on.settled()
        for number in range(12):
            await on.votes(f"{100 + number}-1")
        # `settled` gives up before a single vote's patience
        await on.settled()
        assert await on.rewards() == []


async def test_nothing_stays_of_a_query_that_is_taken_back(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path) as on:
        for query_id in ("100-1", "101-1"):
            await on.answered(query_id)
            await on.answered(query_id, "B", answer="No.")
            await on.compared(query_id, "A")
        await on.settled()
        back = QueryForget(user_id="ann", session_id="s1", queries=["100-1"], at=500)
        await on.bus.publish(QUERY_FORGET.of(back))
        await on.settled()
        # also of what comes late
        await on.answered("100-1")
        await on.compared("100-1", "B")
        await on.settled()
        assert [row["provenance"]["query_id"] for row in await on.exported("dpo")] == ["101-1"]


async def test_a_session_id_that_is_used_again_after_its_deletion_is_kept(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path) as on:
        await on.bus.publish(MEMORY_FORGET.of(MemoryForget(user_id="ann", session_id="s1", at=500)))
        await on.settled()
        for query_id in ("500-1", "501-1"):
            await on.answered(query_id)
            await on.answered(query_id, "B", answer="No.")
            await on.compared(query_id, "A")
        await on.settled()
        assert [row["provenance"]["query_id"] for row in await on.exported("dpo")] == ["501-1"]


async def test_a_vote_on_an_answer_that_never_comes_is_still_a_reward(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path, patience=0.2) as on:
        await on.votes("1-1", good=False)
        await on.settled()
        (event,) = await on.rewards()
    assert (event.reward, event.source, event.config) == (-1.0, "thumbs", {})


async def test_nothing_is_lost_while_reward_is_away(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path):
        pass
    async with Bus(redis_url, "test/away") as bus:
        away = Office(bus, None)  # type: ignore[arg-type]
        for n in range(1, 21):
            await away.answered(f"{n}-1")
            await away.answered(f"{n}-1", "B")
            await away.compared(f"{n}-1", "A" if n % 3 else "B")
            await away.graded(f"{n}-1", 4)
            await away.votes(f"{n}-1")
    async with office(redis_url, tmp_path) as on:
        await on.settled()
        counts = await on.ask("counts")
        rewards = await on.rewards()
    assert (counts["responses"], counts["pairs"], counts["critiques"], counts["votes"]) == (40, 20, 20, 20)
    assert len(rewards) == 20


async def test_the_leaderboard_ranks_by_judge_and_by_people_and_tells_their_agreement(
    redis_url: str, tmp_path: Path
) -> None:
    async with office(redis_url, tmp_path) as on:
        for n in range(1, 13):
            await on.answered(f"{n}-1")
            await on.answered(f"{n}-1", "B")
            await on.compared(f"{n}-1", "A" if n > 2 else "B")
            await on.graded(f"{n}-1", 5)
            await on.votes(f"{n}-1", good=n > 3)
        await on.settled()
        board = await on.ask("leaderboard")
    judge, people = board["judge"], board["people"]
    assert [row["config"]["model"] for row in judge["rows"]] == ["model-A", "model-B"]
    assert (judge["rows"][0]["wins"], judge["rows"][0]["losses"], judge["disagreement"]) == (10, 2, 0.0)
    assert judge["rows"][0]["low"] < judge["rows"][0]["strength"] < judge["rows"][0]["high"]
    assert people["rows"][0]["config"]["model"] == "model-A"
    assert board["agreement"]["cases"] == 12
    assert board["agreement"]["share"] == 0.75
    assert board["intents"]["question"]["judge"]["comparisons"] == 12


async def test_report_of_the_judge_names_the_models_that_critics_announce(redis_url: str, tmp_path: Path) -> None:
    several = {"model": "j", "judges": [{"model": "one"}, {"model": "two"}]}
    async with office(redis_url, tmp_path) as on:
        assert (await on.ask("judge"))["judge"] is None
        settings = Settings(redis_url=redis_url, heartbeat=0.2, drain=0.5, data_dir=tmp_path)
        async with open_context("critic", settings) as critic:
            for facts, name in (({"model": "j", "judges": []}, "j"), (several, "one + two")):
                critic.facts.update(facts)

                async def named(name: str = name) -> bool:
                    return (await on.ask("judge"))["judge"] == name

                await eventually(named, 20, f"the judge is {name}")


async def test_dpo_rows_have_the_conversation_as_prompt(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path) as on:
        await on.sessions.open("s1", "ann", "Hello")
        await on.bus.link.pipe(on.sessions.appending("s1", "A", Turn("1-1", "Hello", "Good day.", 0)))
        await on.answered("2-1", answer="Yes, it is.")
        await on.answered("2-1", "B", answer="No.")
        await on.compared("2-1", "A")
        await on.settled()
        (row,) = await on.exported("dpo")
        assert await on.exported("dpo", min_margin=3) == []
        assert await on.exported("dpo", human_only=True) == []
        await on.votes("2-1")
        await on.settled()
        (borne_out,) = await on.exported("dpo", human_only=True)
        await on.votes("2-1", good=False)
        await on.settled()
        assert await on.exported("dpo") == []
    assert row["prompt"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": "Is it so?"},
    ]
    assert row["chosen"] == [{"role": "assistant", "content": "Yes, it is."}]
    assert row["rejected"] == [{"role": "assistant", "content": "No."}]
    assert (row["provenance"]["margin"], row["provenance"]["source"], row["split"]) == (2.0, "judge", "train")
    assert borne_out["provenance"]["source"] == "judge and person"


async def test_kto_and_critique_rows(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path) as on:
        for n, (score, good) in enumerate([(5, None), (1, None), (3, None), (5, False), (None, True)], 1):
            await on.answered(f"{n}-1", answer=f"answer {n}")
            await on.graded(f"{n}-1", score)
            if good is not None:
                await on.votes(f"{n}-1", good=good)
        await on.settled()
        kto = {row["completion"][0]["content"]: row for row in await on.exported("kto")}
        human = await on.exported("kto", human_only=True)
        critiques = await on.exported("critiques")
    assert {name: row["label"] for name, row in kto.items()} == {
        "answer 1": True, "answer 2": False, "answer 4": False, "answer 5": True,
    }  # fmt: skip
    assert kto["answer 4"]["provenance"]["source"] == "person"
    assert len(human) == 2
    assert {row["score"] for row in critiques} == {1, 3, 5}
    assert critiques[0]["completion"][0]["content"].endswith(f"[RESULT] {critiques[0]['score']}")


async def test_consent_and_time_limit_what_is_exported(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path) as on:
        for n, user in enumerate(("ann", "bob", "cyd"), 1):
            await on.answered(f"{n}000-1", answer=f"answer {n}", user_id=user)
            await on.graded(f"{n}000-1", 5)
        await on.settled()
        assert (await on.ask("consent", "ann"))["consent"] is None
        await on.ask("consent", "ann", given=True)
        await on.ask("consent", "bob", given=False)
        consented = await on.exported("kto", consented=True)
        refused = await on.exported("kto", since=2000, until=3000)
        recent = await on.exported("kto", since=3000, until=4000)
    assert [row["completion"][0]["content"] for row in consented] == ["answer 1"]
    assert refused == []
    assert [row["completion"][0]["content"] for row in recent] == ["answer 3"]


async def test_a_deleted_session_leaves_nothing_behind_and_nothing_of_it_comes_back(
    redis_url: str, tmp_path: Path
) -> None:
    async with office(redis_url, tmp_path) as on:
        await on.answered("1-1")
        await on.graded("1-1", 5)
        await on.votes("1-1")
        await on.settled()
        await on.bus.publish(MEMORY_FORGET.of(MemoryForget(user_id="ann", session_id="s1", at=now_ms())))
        await on.settled()
        await on.graded("1-1", 4)
        await on.settled()
        counts = await on.ask("counts")
    assert {name: n for name, n in counts.items() if n} == {"forgotten": 1}


async def test_a_backup_of_the_preferences_can_be_put_back(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path) as on:
        for n in range(1, 4):
            await on.answered(f"{n}-1")
            await on.compared(f"{n}-1", "A")
            await on.votes(f"{n}-1")
        await on.settled()
        tables = ("responses", "pairs", "votes")
        saved = {table: (await on.ask("dump", table=table))["rows"] for table in tables}
        assert (await on.ask("clear"))["removed"] == 9
        for table in tables:
            assert (await on.ask("load", table=table, rows=saved[table]))["written"] == 3
            assert (await on.ask("load", table=table, rows=saved[table]))["written"] == 0
        restored = {table: (await on.ask("dump", table=table))["rows"] for table in tables}
    assert orjson.dumps(restored) == orjson.dumps(saved)


async def test_a_history_that_the_client_gave_is_the_prompt(redis_url: str, tmp_path: Path) -> None:
    said = (("system", "Be brief."), ("user", "Hello"), ("assistant", "Good day."), ("tool", "a result"))
    history = [{"role": role, "content": content} for role, content in said]
    async with office(redis_url, tmp_path) as on:
        await on.answered("1-1", history=history)
        await on.graded("1-1", 5)
        await on.settled()
        (row,) = await on.exported("kto")
    assert row["prompt"] == [*history[:3], {"role": "user", "content": "Is it so?"}]


async def test_rows_hold_all_that_the_model_and_the_judge_read(redis_url: str, tmp_path: Path) -> None:
    call = {"tool": "calculate", "args": {"expression": "6*7"}, "result": "42", "call_id": "c1"}
    asked, read = {"role": "user", "content": "Is it so?"}, [{"role": "user", "content": "Grade this."}]
    async with office(redis_url, tmp_path) as on:
        await on.answered("1-1", system="Be kind.", tool_calls=[call])
        await on.answered("2-1", answer="By the file.", material="a file")
        await on.graded("1-1", 5, prompt=read)
        await on.graded("2-1", 5, prompt=None)
        await on.settled()
        (row,) = await on.exported("kto")
        assert await on.exported("kto", tools="leave-out") == []
        (critique,) = await on.exported("critiques")
        why = (await on.ask("export", format="critiques", tools="leave-out"))["why"]
        counts = await on.ask("export_counts")
        fewer = await on.ask("export_counts", tools="leave-out")
    assert row["prompt"][:2] == [{"role": "system", "content": "Be kind."}, asked]
    assert [message["role"] for message in row["prompt"][2:]] == ["assistant", "tool"]
    assert critique["prompt"] == read
    assert "1 with tool calls" in why
    assert {kind: (one["rows"], one["more"]) for kind, one in counts.items()} == {
        "dpo": (0, False), "kto": (1, False), "critiques": (1, False),
    }  # fmt: skip
    assert counts["kto"]["why"] is None
    assert "there are no verdicts yet" in counts["dpo"]["why"]
    assert fewer["critiques"] == {"rows": 0, "more": False, "why": why}
    assert "1 of which it is not kept what the judge read" in why


async def test_a_database_that_is_locked_for_a_while_loses_no_vote(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path) as on:
        await on.answered("1-1")
        await on.settled()
        with contextlib.closing(sqlite3.connect(tmp_path / "preferences.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            await on.votes("1-1", stars=5)
            await asyncio.sleep(1.5)
            other.execute("ROLLBACK")
        await on.settled()
        (row,) = (await on.ask("dump", table="votes"))["rows"]
        assert len(await on.rewards()) == 1
        assert await on.bus.link.call("XLEN", "local2:dead.letter") == 0
    assert row["stars"] == 5


async def test_a_full_disk_uses_up_no_delivery_and_whoever_asks_is_told(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    @contextlib.contextmanager
    def full(_self: Database) -> Iterator[sqlite3.Connection]:
        nonlocal tried
        tried += 1
        raise TransientError("the database cannot be used just now: database or disk is full")
        yield

    async with office(redis_url, tmp_path, patience=0.1) as on:
        with monkeypatch.context() as disk:
            disk.setattr(Database, "_transaction", full)
            await on.answered("1-1")
            await on.graded("1-1", 4)
            await on.votes("1-1", stars=5)
            # each of them several times
            await eventually(lambda: tried > 8, 60)
            with pytest.raises(AssertionError, match="unavailable: the database cannot be used just now"):
                await on.ask("consent", given=True)
            for subject in (RESPONSE_GENERATION, CRITIQUE_RESULT, USER_FEEDBACK):
                ((_, _, _, deliveries),) = await on.bus.link.call("XPENDING", subject.stream, "reward", "-", "+", 10)
                assert deliveries <= 1
        await on.settled()
        (row,) = (await on.ask("dump", table="votes"))["rows"]
        assert [len((await on.ask("dump", table=name))["rows"]) for name in ("responses", "critiques")] == [1, 1]
        assert await on.bus.link.call("XLEN", "local2:dead.letter") == 0
    assert row["stars"] == 5


async def test_a_vote_that_is_changed_very_often_still_reaches_the_journal(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path) as on:
        writer, _ = await JournalWriter.claim(on.bus, journal_key("1-1", "A"), event_of("claimed", {}), 600)
        await writer.append(event_of(EntryType.COMPLETED, {}))
        key = journal_key("1-1", "A")
        for number in range(600):
            await append_after(on.bus, key, event_of(EntryType.REWARD, {}), once=f"reward:{number}", patience=0)
        await on.answered("1-1")
        await on.votes("1-1", stars=2)
        await on.settled()
        assert (await on.journal("1-1"))[-1].value()["stars"] == 2


async def test_counting_the_rows_of_a_large_export_ends_and_says_so(redis_url: str, tmp_path: Path) -> None:
    async with office(redis_url, tmp_path) as on:
        for page in range(30):
            names = [f"{50 * page + number}-1" for number in range(50)]
            ids = [{"response_id": f"{name}:A", "query_id": name, "session_id": "s", "time": 1} for name in names]
            said = {"user_id": "ann", "respondent": "A", "query": "q", "answer": "a" * 1_000, "config": "{}",
                    "messages": '[{"role": "user", "content": "q"}]', "intent": "chat", "tools": 0}  # fmt: skip
            grade = {"score": 5, "feedback": "f", "rubric": "r"}
            await on.ask("load", table="responses", rows=[{**one, **said, "answer": one["query_id"] + said["answer"]}
                                                          for one in ids])  # fmt: skip
            await on.ask("load", table="critiques", rows=[{**one, **grade} for one in ids])
        found = (await on.ask("export_counts"))["kto"]
    assert 1_000 <= found["rows"] < 1_500
    assert (found["more"], found["why"]) == (True, None)


def test_a_database_belongs_to_one_process_whatever_path_leads_to_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from services.reward.store import Store;"
        "store = Store(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    )
    (tmp_path / "link").symlink_to(tmp_path / "p.sqlite")
    command = [sys.executable, "-c", program, str(tmp_path / "p.sqlite")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"
        # Both wait for the other process at the same time.
        with ThreadPoolExecutor(2) as pool:
            for refused in [pool.submit(Store, tmp_path / name) for name in ("p.sqlite", "link")]:
                with pytest.raises(SettingsError, match=rf"in use by another process \(process {owner.pid}\)"):
                    refused.result()
        owner.kill()
    Store(tmp_path / "link").close()
