"""What a very small model says behind llama.cpp's own server: `python tests/eval/talks.py [--talks 40] [--gguf FILE]`.

The server is started as users start it: the model's own chat template, no routing of ours, OpenAI's protocol. A
generator with two tools that are alive asks it over the bus, and every answer is looked at: is it prose, or a call that
the model printed, and did it end within its bound? Prints each talk and the figures. Exit status 1 when an answer was a
printed call or did not end in time; a talk that ends with a reason instead of an answer is counted, and no fault.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.apps import ProbeSettings, probe
from support.services import announced, running
from support.stack import Client, respondent

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.demo_model.wheels import chat_file
from services.generator.settings import GeneratorSettings
from services.web_search.service import WebSearchSettings
from services.web_search.service import app as web_search
from shared.bus import Bus
from shared.llm.clean import Cleaner, asks_for_code
from shared.llm.printed_calls import PrintedCall
from shared.records.journal import EntryType
from shared.telemetry.logging import configure

# Two in one line are a question and what follows it up.
QUESTIONS = (
    "What major AI news broke this week?", "What is the current price of Bitcoin in USD?",
    "Search the web for the weather in Oslo.", "Search for the latest Python release. | When was that?",
    "Who won the football match yesterday?", "Look up the population of Lisbon.", "What is the capital of France?",
    "Tell me about the Python GIL. | Why was it introduced?", "Use the web_search tool to find news about Redis.",
    "Call web_search with the query 'rain'.", "Probe the text hello.", "Call the tool probe with text ok.",
    "What is the boiling point of water at sea level?", "Write a haiku about the sea.", "What is 17 times 23?",
    "Summarize the plot of Hamlet in two sentences.", "List five fruits.", "List ten countries and their capitals.",
    "What happened in 1989?", "Is it going to rain tomorrow?", "Find a good recipe for bread.",
    "What is the exchange rate of the euro today? | And of the pound?", "Who is the president of Brazil now?",
    "Translate 'good morning' into Spanish.", "Explain how a bicycle stays upright.", "Write a long story about a dog.",
    "Count from one to fifty.", "Say hello again and again.", "What is the newest phone?", "What tools do you have?",
    "Search the web for LoCAL2. | What did you find?", "Give me the top headlines.", "What is the speed of light?",
    "Name the planets.", "Which is larger, 3 or 5?", "What does HTTP stand for?", "Find flights to Rome.",
    "What is love?", "What time is it in Tokyo?", "Search for cats and then for dogs.",
)  # fmt: skip


@contextmanager
def llama_server(gguf: Path, n_ctx: int, key: str) -> Iterator[str]:
    """llama.cpp's HTTP server with a model's own template; its address."""
    # its threads spin while they wait unless this is set before it is loaded
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel = n_ctx, 1
    params.use_jinja = True
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.api_keys, params.ui, params.endpoint_slots = [key], False, False
    params.fit_params, params.cache_ram_mib, params.warmup = False, 0, False
    params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 1, 2
    params.verbosity = -1
    server = xllamacpp.Server(params)
    yield f"{str(server.listening_address).rstrip('/')}/v1"
    del server


def is_printed_call(answer: str, question: str, offered: dict[str, Any]) -> bool:
    cleaner = Cleaner(offered, asked=lambda: asks_for_code(question))
    return any(isinstance(piece, PrintedCall) for piece in (*cleaner.feed(answer), *cleaner.finish()))


async def measured(options: argparse.Namespace, url: str, model_url: str, key: str) -> int:
    common: dict[str, Any] = {"redis_url": url, "heartbeat": 1.0, "drain": 1.0}
    settings = GeneratorSettings(
        **common, backend="openai", base_url=model_url, api_key=key, model=options.gguf.name,
        num_ctx=options.num_ctx, max_tokens=options.max_tokens, temperature=0.0, deadline_seconds=options.bound,
    )  # fmt: skip
    kinds: Counter[str] = Counter()
    longest, calls = 0.0, 0
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus(url, "eval/talks"))
        client = Client(bus)
        await stack.enter_async_context(running(probe, ProbeSettings(**common)))
        await stack.enter_async_context(running(web_search, WebSearchSettings(**common, provider="mock")))
        await stack.enter_async_context(running(respondent(settings), settings))
        for name in ("probe", "web_search", "generator"):
            await announced(url, name, timeout=30)
        offered: dict[str, Any] = {"web_search": {}, "probe": {}}
        for number in range(options.talks):
            for question in QUESTIONS[number % len(QUESTIONS)].split(" | "):
                began = time.monotonic()
                query_id = await client.ask(question, f"talk{number}", deadline=options.bound)
                end = await client.ended(query_id, timeout=options.bound + 30)
                seconds = time.monotonic() - began
                entries = await client.journal(query_id)
                ran = [entry.value()["tool"] for entry in entries if entry.type is EntryType.TOOL_RESULT]
                looped = any(e.type is EntryType.NOTICE and e.value()["code"] == "model_loops" for e in entries)
                said = str(end.value().get("answer") or end.value().get("message") or "")
                if seconds > options.bound + 5:
                    kind = "not ended in time"
                elif end.type is EntryType.COMPLETED:
                    kind = "printed call" if is_printed_call(said, question, offered) else "prose"
                else:
                    kind = f"ended with a reason ({end.value()['code']})"
                kinds[kind] += 1
                kinds["of them stopped in a loop"] += looped
                longest, calls = max(longest, seconds), calls + len(ran)
                shown = " ".join(said.split())[:90]
                line = f"{number + 1:3} {seconds:5.1f} s  {kind}{', loop' * looped}  {ran or ''}  {question!r}: {shown}"
                print(line, flush=True)
    print(f"\n{options.talks} talks with {options.gguf.name}: " + ", ".join(f"{kinds[kind]} {kind}" for kind in kinds))
    print(f"tool runs {calls}, longest answer {longest:.1f} s (bound {options.bound:g} s)")
    return 1 if kinds["printed call"] or kinds["not ended in time"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--talks", type=int, default=len(QUESTIONS))
    parser.add_argument("--gguf", type=Path, default=None, help="another model (default: the demonstration model's)")
    parser.add_argument("--num-ctx", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a model call, as shipped unless it is given")
    parser.add_argument("--bound", type=float, default=300.0, help="seconds that an answer may take")
    options = parser.parse_args()
    options.gguf = options.gguf or chat_file()
    configure("error", "json")
    key = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="local2-talks-") as folder,
        EmbeddedRedis(Path(folder) / "redis") as redis,
        llama_server(options.gguf, options.num_ctx, key) as model_url,
    ):
        return asyncio.run(measured(options, redis.url, model_url, key))


if __name__ == "__main__":
    sys.exit(main())
