"""Files of earlier turns for respondent B, and for a replica that takes an answer over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.made_files import png
from support.memories import memory_settings
from support.services import announced, running
from support.stack import Client, respondent
from support.waiting import eventually

from services.generator.settings import GeneratorSettings
from services.memory.service import app
from shared.bus import Bus
from shared.participant.files import open_files
from shared.participant.service import open_context
from shared.participant.settings import Settings
from shared.participant.tool_client import ToolClient
from shared.records.journal import EntryType
from shared.testing.model_server import ScriptedModelServer
from shared.testing.script import Script

NOTES = b"The tomatoes want water every second day."
MODELS = {
    "seeing": ["tools", "thinking", "vision"],
    "other": ["tools", "thinking", "vision"],
    "nomic-embed-text": ["embedding"],
}


def script(*rules: dict[str, Any]) -> Script:
    return Script.model_validate({"models": MODELS, "rules": [*rules, {"respond": {"text": "I see."}}]})


def settings(url: str, folder: Path, server: ScriptedModelServer, **more: Any) -> GeneratorSettings:
    plain = {"heartbeat": 0.5, "drain": 0.2, "ollama_host": server.url, "num_ctx": 16_000, "model": "seeing"}
    return GeneratorSettings(**{**plain, "redis_url": url, "data_dir": folder, **more})


async def added(url: str, **files: bytes) -> list[dict[str, Any]]:
    """Add files of the user `u1`; return them in the form of a question's attachments."""
    async with (
        open_context("asker", Settings(redis_url=url, heartbeat=0.5)) as context,
        open_files(ToolClient(context)) as memory,
    ):
        found = [(await memory.add("u1", data, name=name.replace("_", ".")))[1] for name, data in files.items()]

        async def read() -> bool:
            now = await memory.operate("u1", op="get", ids=[file["id"] for file in found])
            return all(file["state"] == "ready" for file in now["files"])

        await eventually(read, 20, "the files are read")
        return [{"id": file["id"]} for file in found]


def chats(server: ScriptedModelServer, model: str = "seeing") -> list[list[dict[str, Any]]]:
    """Return the messages of requests for answers, without requests for labels of memories."""
    bodies = [request.body for request in server.requests if "messages" in (request.body or {})]
    asked = [body["messages"] for body in bodies if body["model"] == model]
    return [messages for messages in asked if messages[0]["content"].startswith("You are LoCAL2")]


async def test_respondent_b_sees_the_files_of_earlier_turns(redis_url: str, tmp_path: Path) -> None:
    async with (
        ScriptedModelServer(script()) as server,
        running(app, memory_settings(redis_url, tmp_path, server.url)),
        running(respondent(a := settings(redis_url, tmp_path, server)), a),
        running(respondent(b := settings(redis_url, tmp_path, server, respondent_id="B", model="other")), b),
        Bus(redis_url, "test/client") as bus,
    ):
        for name in ("memory", "generator", "respondent-b"):
            await announced(redis_url, name)
        client = Client(bus)
        attachments = await added(redis_url, photo_png=png(3, 2), notes_md=NOTES)
        for query, files in (("what are these?", attachments), ("and now?", None)):
            query_id = await client.ask(query, "s1", respondents=("A", "B"), attachments=files)
            for who in ("A", "B"):
                await client.answer(query_id, respondent=who)
        for model in ("seeing", "other"):
            *_, (_, first, _, last) = chats(server, model)
            assert len(first["images"]) == 1
            assert "every second day" in first["content"]
            assert last == {"role": "user", "content": "and now?"}


async def test_takeover_reads_the_files_as_the_journal_decided(redis_url: str, tmp_path: Path) -> None:
    stalled = {
        "when": {"user": "and now"},
        "times": 1,
        "respond": {"text": "x", "fault": {"kind": "stall", "after": 0}},
    }
    async with ScriptedModelServer(script(stalled)) as server, Bus(redis_url, "test/client") as bus:
        client, values = Client(bus), settings(redis_url, tmp_path, server)
        memory = memory_settings(redis_url, tmp_path, server.url)
        async with running(respondent(values), values):
            async with running(app, memory):
                for name in ("memory", "generator"):
                    await announced(redis_url, name)
                attachments = await added(redis_url, photo_png=png(3, 2), notes_md=NOTES)
                await client.answer(await client.ask("what are these?", "s1", attachments=attachments))
            # The memory is away when the next answer begins.
            query_id = await client.ask("and now?", "s1")
            entry = await client.seen(query_id, EntryType.ATTACHMENTS)
            assert [file["sent"] for file in entry.value()["files"]] == ["away", "away"]
            await server.wait_until(lambda s: s.streaming == 1)
        async with running(app, memory), running(respondent(values), values):
            assert await client.answer(query_id) == "I see."
            # The next question has the files again.
            await client.answer(await client.ask("so?", "s1"))
        _, died, taken_over, later = chats(server)
        assert died == taken_over
        assert "it cannot be read at the moment" in died[1]["content"]
        assert len(later[1]["images"]) == 1
        assert (await client.types(query_id)).count(EntryType.ATTACHMENTS) == 1
