"""Tries Open WebUI as people install it, unmodified, at a gateway with a generator and a memory.

`make test-webui [ARGS=--write]`: Open WebUI of the version below has an environment of its own under `.clients/`, made
at the first run from the package index and without torch (its local models are not used). It is driven by its own HTTP
API, as its pages do, with its defaults; what is set is what docs/clients.md says. The model is the scripted one.
`--write` puts the table into docs/clients.md. The status is 1 when something does not work.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from support.http_gateway import client  # noqa: E402
from support.memories import memory_settings  # noqa: E402
from support.openai_place import Place, open_place  # noqa: E402
from support.services import announced, running  # noqa: E402

from services.cli.launch.embedded_redis import EmbeddedRedis  # noqa: E402
from services.memory.service import app as memory  # noqa: E402
from shared.contracts import RESPONSE_GENERATION  # noqa: E402
from shared.records.journal import EntryType  # noqa: E402

VERSION = "0.12.4"
PLACE = ROOT / ".clients" / "open_webui"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- table: make test-webui ARGS=--write -->", "<!-- end -->"
# Its local embedding models want torch; nothing of it runs without them being asked for.
LEFT_OUT = ("torch", "sentence-transformers")
STARTS_WITHIN, SECONDS = 300.0, 60.0
PASSWORD = "Only-for-this-test-1"

SLOWLY = [f"word{number} " for number in range(400)]
RULES: list[dict[str, Any]] = [
    {"when": {"user": "Generate a concise title"}, "respond": {"text": '{"title": "A greeting"}'}},
    {"when": {"user": "broad tags"}, "respond": {"text": '{"tags": ["General"]}'}},
    {"when": {"user": "Predict 3-5"}, "respond": {"text": '{"follow_ups": ["And now?"]}'}},
    {"when": {"user": "search queries"}, "respond": {"text": '{"queries": ["code of the cellar door"]}'}},
    {
        "when": {"offered": "get_current_timestamp", "user": "What time", "tool_results": 0},
        "respond": {"tool_calls": [{"name": "get_current_timestamp", "args": {}}]},
    },
    {"when": {"last_tool": "get_current_timestamp"}, "respond": {"text": "The clock said so."}},
    {"when": {"user": "A name"}, "respond": {"text": '{"title": "Named"}'}},
    {
        "when": {"user": "please ping", "tool_results": 0},
        "respond": {"tool_calls": [{"name": "probe", "args": {"text": "ping"}}]},
    },
    {"when": {"last_tool": "probe"}, "respond": {"text": "It <<result>>."}},
    {"when": {"user": "count slowly"}, "respond": {"text": SLOWLY, "pace": 0.1}},
    {"when": {"user": "house"}, "respond": {"text": "It is teal."}},
    {"respond": {"thinking": "Hm.", "text": "You asked: <<query>>"}},
]


def prepare() -> Path:
    """The environment of Open WebUI; its command."""
    command = PLACE / "bin" / "open-webui"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PLACE)], check=True)
        subprocess.run([str(PLACE / "bin" / "python"), "-m", "pip", "install", "-q", "uv"], check=True)
        overrides = PLACE / "left-out.txt"
        overrides.write_text("".join(f'{name}; sys_platform == "never"\n' for name in LEFT_OUT))
        into = ["--python", str(PLACE / "bin" / "python"), "--override", str(overrides)]
        subprocess.run([str(PLACE / "bin" / "uv"), "pip", "install", *into, f"open-webui=={VERSION}"], check=True)
    return command


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class Person:
    """Somebody with an account of Open WebUI."""

    http: httpx.AsyncClient
    id: str

    async def post(self, path: str, body: Any) -> Any:
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text[:300]}"
        return response.json()


@dataclass
class Chat:
    """A chat as the page keeps it: a tree of messages, of which the way to one leaf is sent."""

    person: Person
    id: str | None = None
    messages: dict[str, dict[str, Any]] = field(default_factory=dict)
    leaf: str | None = None

    def way(self, leaf: str | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while leaf is not None:
            found.insert(0, self.messages[leaf])
            leaf = self.messages[leaf]["parentId"]
        return found

    async def say(self, text: str, *, wait: bool = True, chores: bool = False, **fields: Any) -> str:
        """A question behind the last answer; the answer, when it is complete."""
        asked, answer = str(uuid.uuid4()), str(uuid.uuid4())
        message = {"id": asked, "parentId": self.leaf, "childrenIds": [answer], "role": "user", "content": text}
        message |= {"timestamp": int(time.time()), "models": ["local2"], **fields}
        self.messages[asked] = message
        self.messages[answer] = {"id": answer, "parentId": asked, "childrenIds": [], "role": "assistant", "content": ""}
        await self._send(asked, message, answer, chores=chores, files=fields.get("files"))
        return await self.answer() if wait else ""

    async def go_on(self) -> str:
        """Continue: what was answered is sent back as the beginning of the answer."""
        assert self.leaf is not None
        answer = self.messages[self.leaf]
        await self._send(self.leaf, self.messages[answer["parentId"]], self.leaf, assistant_message_id=self.leaf)
        return await self.answer()

    async def _send(
        self, last: str, message: dict[str, Any], answer: str, *, chores: bool = False, **fields: Any
    ) -> None:
        every = ("title_generation", "tags_generation", "follow_up_generation")
        body = {
            "stream": True, "model": "local2", "params": {}, "features": {}, "variables": {}, **fields,
            "messages": [{"role": one["role"], "content": one["content"]} for one in self.way(last)],
            "session_id": "page", "id": answer, "parent_id": message["parentId"], "user_message": message,
            "background_tasks": dict.fromkeys(every if chores else (), True),
            **({"chat_id": self.id} if self.id else {}),
        }  # fmt: skip
        told = await self.person.post("/api/chat/completions", body)
        self.id = self.id or told["chat_id"]
        self.leaf = answer

    async def shown(self) -> dict[str, Any]:
        """The chat as Open WebUI keeps it."""
        whole: dict[str, Any] = (await self.person.http.get(f"/api/v1/chats/{self.id}")).json()
        return whole

    async def answer(self) -> str:
        assert self.leaf is not None

        async def there() -> dict[str, Any] | None:
            tasks = (await self.person.http.get(f"/api/tasks/chat/{self.id}")).json()
            message: dict[str, Any] = (await self.shown())["chat"]["history"]["messages"].get(self.leaf, {})
            return message if message.get("done") and not tasks.get("task_ids") else None

        message = await until(there, "the answer is complete")
        assert not message.get("error"), message["error"]
        self.messages[self.leaf].update(content=message["content"])
        return str(message["content"])


async def until(look: Callable[[], Awaitable[Any]], what: str, seconds: float = SECONDS) -> Any:
    end = time.monotonic() + seconds
    while not (found := await look()):
        assert time.monotonic() < end, f"after {seconds:g} s not yet: {what}"
        await asyncio.sleep(0.2)
    return found


@dataclass
class Tried:
    """What is tried; each thing says what is wrong by raising."""

    place: Place
    ours: httpx.AsyncClient
    ann: Person
    bob: Person

    def behind(self, chat: Chat) -> dict[str, str]:
        return {"X-OpenWebUI-User-Id": chat.person.id}

    async def turns(self, chat: Chat) -> list[tuple[str, str]]:
        """The turns of the session that the chat is."""
        found = (await self.ours.get(f"/sessions/{chat.id}", headers=self.behind(chat))).json()
        return [(turn["query"], turn["answer"]) for turn in found["turns"]]

    async def remembered(self, person: Person) -> list[str]:
        """The questions that memory keeps of somebody."""
        headers = {"X-OpenWebUI-User-Id": person.id}
        found = (await self.ours.get("/memory/engrams", headers=headers)).json()
        return sorted(engram["query"] for engram in found["engrams"])

    async def remembers(self, person: Person, text: str, *, yes: bool = True) -> None:
        async def look() -> bool:
            return any(text in query for query in await self.remembered(person)) is yes

        await until(look, f"memory {'holds' if yes else 'has forgotten'} {text!r}")

    async def chat_with_its_defaults(self) -> None:
        chat = Chat(self.ann)
        before = len(self.place.sent)
        assert "hello there" in await chat.say("hello there", chores=True)

        async def titled() -> bool:
            return (await chat.shown())["title"] == "A greeting"

        await until(titled, "the chat has the title that the model made")

        async def tagged() -> bool:
            return sum("tools" not in one for one in self.place.sent[before:]) == 3

        await until(tagged, "title, tags and follow-ups were asked for")
        agent = [one for one in self.place.sent[before:] if "tools" in one]
        assert len(agent) == 1, f"{len(agent)} calls of the agent"
        published = await self.place.on.published(RESPONSE_GENERATION)
        assert [one.query for one in published] == ["hello there"], published
        assert [query for query, _ in await self.turns(chat)] == ["hello there"]

    async def a_tool_of_its_own(self) -> None:
        chat = Chat(self.ann)
        assert await chat.say("What time is it?") == "The clock said so."
        assert await self.turns(chat) == [("What time is it?", "The clock said so.")]
        assert "again" in await chat.say("again, please")
        assert [query for query, _ in await self.turns(chat)] == ["What time is it?", "again, please"]

    async def stop(self) -> None:
        chat = Chat(self.ann)
        await chat.say("count slowly", wait=False)
        query_id = await until(self._newest, "the question is with the agent")
        await self.place.on.seen(query_id, EntryType.ANSWER, 30)
        for task in (await self.ann.http.get(f"/api/tasks/chat/{chat.id}")).json()["task_ids"]:
            await self.ann.post(f"/api/tasks/stop/{task}", {})
        ended = await self.place.on.ended(query_id, 30)
        assert ended.type is EntryType.CANCELLED, ended.type
        assert not await self.place.on.published(RESPONSE_GENERATION, query_id)
        assert await self.turns(chat) == []

    async def _newest(self) -> str | None:
        found = await self.place.on.bus.latest("local2:query.received", 1)
        return found[0][0] if found and b"count slowly" in b" ".join(found[0][1]) else None

    async def two_people(self) -> None:
        await Chat(self.ann).say("my colour is blue")
        await Chat(self.bob).say("my colour is red")
        await self.remembers(self.ann, "blue")
        await self.remembers(self.bob, "red")
        assert not any("red" in query for query in await self.remembered(self.ann))
        assert not any("blue" in query for query in await self.remembered(self.bob))

    async def an_edited_question(self) -> None:
        chat = Chat(self.ann)
        await chat.say("I live in Rome")
        await self.remembers(self.ann, "Rome")
        chat.leaf = None
        await chat.say("I live in Oslo")
        assert [query for query, _ in await self.turns(chat)] == ["I live in Oslo"]
        await self.remembers(self.ann, "Oslo")
        await self.remembers(self.ann, "Rome", yes=False)

    async def go_on(self) -> None:
        chat = Chat(self.ann)
        await chat.say("begin something")
        await chat.go_on()
        sent = self.place.sent[-1]["messages"]
        assert sent[-1]["role"] == "assistant", [message["role"] for message in sent]
        assert len(await self.turns(chat)) == 1
        # both parts are one answer
        await chat.say("thanks")
        assert len(await self.turns(chat)) == 2

    async def headers(self) -> None:
        """The last one: the connection stays as it is set here."""
        config = (await self.ann.http.get("/openai/config")).json()
        said = {"X-LoCAL2-Events": "status", "X-OpenWebUI-Task": "{{TASK}}"}
        config["OPENAI_API_CONFIGS"] = {"0": {"enable": True, "headers": said}}
        await self.ann.post("/openai/config/update", config)
        own = await self.ann.post("/api/v1/tasks/config/update", {
            **(await self.ann.http.get("/api/v1/tasks/config")).json(), "TITLE_GENERATION_PROMPT_TEMPLATE": "A name?",
        })  # fmt: skip
        assert own["TITLE_GENERATION_PROMPT_TEMPLATE"] == "A name?"
        await self.ann.http.get("/api/models?refresh=true")
        chat = Chat(self.ann)
        assert "said ping" in await chat.say("please ping", chores=True)

        async def named() -> bool:
            return (await chat.shown())["title"] == "Named"

        await until(named, "the chat has the title that the template of its own made")
        shown = (await chat.shown())["chat"]["history"]["messages"][chat.leaf]
        assert "probe" in str(shown.get("statusHistory")), shown.get("statusHistory")
        assert [query for query, _ in await self.turns(chat)] == ["please ping"]

    async def _uploaded(self, name: str, text: bytes) -> dict[str, Any]:
        """A file of Ann's that has been read, as a message has it."""
        uploaded = await self.ann.http.post("/api/v1/files/", files={"file": (name, text, "text/plain")})
        file = uploaded.json()

        async def read() -> bool:
            status = (await self.ann.http.get(f"/api/v1/files/{file['id']}")).json()
            assert (status.get("data") or {}).get("status") != "failed", status["data"]
            return bool((status.get("data") or {}).get("status") == "completed")

        await until(read, "the file has been read")
        return {"type": "file", "file": file, "id": file["id"], "url": file["id"], "name": name}

    async def _embedded(self) -> float:
        """How many requests for embeddings the gateway has answered."""
        told = (await self.place.site.http.get("/metrics")).text
        pattern = r'^local2_http_requests_total\{.*route="/v1/embeddings",status="200"\} (\S+)$'
        return sum(float(count) for count in re.findall(pattern, told, re.MULTILINE))

    async def its_own_retrieval(self) -> None:
        changed = {"BYPASS_EMBEDDING_AND_RETRIEVAL": False, "TOP_K": 2}
        await self.ann.post("/api/v1/retrieval/config/update", changed)
        filler = "\n\n".join(f"Chapter {n}. {f'Nothing happens on page {n}. ' * 40}" for n in range(40))
        passage = "The code of the cellar door is 4711."
        before = await self._embedded()
        given = await self._uploaded("book.txt", f"{filler}\n\n{passage}\n\n{filler}".encode())
        assert await self._embedded() > before, "the passages were not embedded here"
        chat = Chat(self.ann)
        question = "What is the code of the cellar door?"
        await chat.say(question, files=[given])
        sent = str(self.place.sent[-1]["messages"][-1]["content"])
        assert passage in sent, sent[:500]
        assert len(sent) < 10_000, "the whole file came, and not its passages"
        assert [query for query, _ in await self.turns(chat)] == [question]
        await self.remembers(self.ann, question)
        assert not any("4711" in query or "Chapter" in query for query in await self.remembered(self.ann))

    async def a_file(self) -> None:
        given = await self._uploaded("notes.txt", b"The secret colour of the house is teal. " * 20)
        chat = Chat(self.ann)
        assert await chat.say("What colour is the house?", files=[given]) == "It is teal."
        assert "secret colour" in str(self.place.sent[-1]["messages"][-1]["content"])
        assert await self.turns(chat) == [("What colour is the house?", "It is teal.")]
        await self.remembers(self.ann, "What colour is the house?")
        assert not any("secret" in query for query in await self.remembered(self.ann))
        await chat.say("Sure?")
        assert len(await self.turns(chat)) == 2


THINGS: dict[str, Callable[[Tried], Awaitable[None]]] = {
    "a chat with its defaults: one run of the agent, and title, tags and follow-ups as plain calls": (
        Tried.chat_with_its_defaults
    ),
    "a tool of Open WebUI's own": Tried.a_tool_of_its_own,
    "Stop: the run ends, nothing of it is kept": Tried.stop,
    "two people behind one key, each with a memory of their own": Tried.two_people,
    "an edited question: gone from the session and from memory": Tried.an_edited_question,
    "Continue": Tried.go_on,
    "a file: the model reads it, the question is remembered": Tried.a_file,
    "its own retrieval over our embeddings: the passage comes with the question, which is what is remembered": (
        Tried.its_own_retrieval
    ),
    "the two headers above: a title by a template of its own, status lines": Tried.headers,
}


async def opened(url: str, name: str, *, first: bool) -> Person:
    http = httpx.AsyncClient(base_url=url, timeout=SECONDS, trust_env=False)
    body = {"name": name, "email": f"{name}@example.org", "password": PASSWORD}
    admin = body if first else {**body, "role": "user"}
    made = await http.post("/api/v1/auths/signup" if first else "/api/v1/auths/signin", json=admin)
    assert made.status_code == 200, made.text
    http.headers["Authorization"] = f"Bearer {made.json()['token']}"
    return Person(http, made.json()["id"])


def started(command: Path, folder: Path, port: int, gateway: str, key: str) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    kept.pop("PYTHONPATH", None)
    environment = {
        **kept,
        # what docs/clients.md says
        "OPENAI_API_BASE_URL": f"{gateway}/v1", "OPENAI_API_KEY": key, "ENABLE_FORWARD_USER_INFO_HEADERS": "true",
        "ENABLE_OLLAMA_API": "false",
        # for a machine without the internet, and without torch
        "OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1",
        # its own retrieval asks here for vectors, once that is switched on
        "RAG_EMBEDDING_ENGINE": "openai", "RAG_OPENAI_API_BASE_URL": f"{gateway}/v1", "RAG_OPENAI_API_KEY": key,
        "RAG_EMBEDDING_MODEL": "local2",
        "BYPASS_EMBEDDING_AND_RETRIEVAL": "true", "BYPASS_MODEL_ACCESS_CONTROL": "true",
        "DATA_DIR": str(folder), "WEBUI_SECRET_KEY": "only-for-this-test", "ANONYMIZED_TELEMETRY": "false",
    }  # fmt: skip
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [str(command), "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip


async def run() -> dict[str, str]:
    """What was tried, and what is wrong with it."""
    command = await asyncio.to_thread(prepare)
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis(Path(name) / "redis") as server:
        folder = Path(name)
        (folder / "webui").mkdir()
        async with open_place(server.url, folder, client_gone_seconds=0.5) as place:
            place.rules(*RULES)
            async with running(memory, memory_settings(server.url, folder, place.on.server.url)):
                await announced(server.url, "memory")
                made = await place.site.http.post("/keys", json={"name": "webui", "user_id": "webui", "trusted": True})
                key, port = made.json()["key"], free_port()
                url = f"http://127.0.0.1:{port}"
                process = started(command, folder / "webui", port, place.site.url, key)
                try:
                    async with client(place.site.url, key, timeout=30) as ours:
                        await _try(place, ours, url, process, outcomes)
                except (AssertionError, httpx.HTTPError) as exc:
                    outcomes["Open WebUI starts and knows the models"] = _words(exc)
                    print((folder / "webui" / "log").read_text(errors="replace")[-3_000:])
                finally:
                    process.terminate()
                    process.wait(30)
    return outcomes


async def _try(
    place: Place, ours: httpx.AsyncClient, url: str, process: subprocess.Popen[bytes], outcomes: dict[str, str]
) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as bare:

        async def up() -> bool:
            assert process.poll() is None, f"it ended with status {process.returncode}"
            try:
                return (await bare.get("/health")).status_code == 200
            except httpx.HTTPError:
                return False

        await until(up, "Open WebUI answers", STARTS_WITHIN)
    ann = await opened(url, "ann", first=True)
    await ann.post(
        "/api/v1/auths/add",
        {"name": "bob", "email": "bob@example.org", "password": PASSWORD, "role": "user"},
    )
    bob = await opened(url, "bob", first=False)
    try:
        for person in (ann, bob):
            models = (await person.http.get("/api/models")).json()["data"]
            assert "local2" in [model["id"] for model in models], models
        tried = Tried(place, ours, ann, bob)
        for what, attempt in THINGS.items():
            try:
                await attempt(tried)
                outcomes[what] = ""
            except (AssertionError, httpx.HTTPError, KeyError) as exc:
                outcomes[what] = _words(exc)
            print(f"   {'does not work' if outcomes[what] else 'ok'}: {what} {outcomes[what][:400]}", flush=True)
    finally:
        await ann.http.aclose()
        await bob.http.aclose()


def _words(exc: Exception) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split()) or type(exc).__name__


def table(outcomes: dict[str, str]) -> str:
    rows = [
        f"| {what} | {'does not: ' + trouble[:160] if trouble else 'works'} |" for what, trouble in outcomes.items()
    ]
    return "\n".join([f"| tried with Open WebUI {VERSION} | |", "|---|---|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/clients.md")
    options = parser.parse_args()
    outcomes = asyncio.run(run())
    print(f"\n{table(outcomes)}")
    if options.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n\n{table(outcomes)}\n\n{END}{rest.partition(END)[2]}")
    return 1 if any(outcomes.values()) or len(outcomes) < len(THINGS) else 0


if __name__ == "__main__":
    sys.exit(main())
