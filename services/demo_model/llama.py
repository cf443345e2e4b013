"""The chat model inside this process: llama.cpp with one slot, so that requests wait in line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.demo_model.wheels import does_not_load
from shared.errors import ModelError

N_CTX = 2048
MAX_ANSWER = 512
DEFAULT_ANSWER = 256
MAX_WAITING = 64
# Prompt tokens between two checks for a client that left: about 0.2 s of work.
STEP = 64
_CHARS_PER_TOKEN = 3.2


class Busy(ModelError):
    """Too many requests wait for the one slot."""


class Refused(ModelError):
    """llama.cpp refuses the request itself, for example because of its JSON schema."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer. Times in nanoseconds, as Ollama gives them."""

    reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_ns: int = 0
    eval_ns: int = 0


Build = Callable[[int], Sequence[Mapping[str, str]]]


class Llama:
    """Loads the model; `chat` streams one answer at a time. Raises WheelsMissing."""

    def __init__(self, model: Path, n_ctx: int = N_CTX) -> None:
        # llama.cpp's threads spin while they wait unless this is set before it is loaded; with anything else
        # running on the machine that costs it nearly all of its speed.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        try:
            import xllamacpp
        except ImportError as exc:
            raise does_not_load(exc) from exc

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx = n_ctx
        params.n_parallel = 1
        params.n_batch = params.n_ubatch = STEP
        params.fit_params = False
        params.cache_ram_mib = 0
        params.warmup = False
        params.cpuparams.n_threads = 1
        params.cpuparams_batch.n_threads = 2
        params.verbosity = -1
        # The library always opens a listener of its own; only calls inside this process are wanted. A socket file in a
        # private folder, deleted at once, can be reached by nobody.
        params.ui = params.endpoint_slots = False
        params.api_keys = [secrets.token_hex(16)]
        with tempfile.TemporaryDirectory(prefix="local2-") as folder:
            params.hostnames = [str(Path(folder) / "closed.sock")]
            self._server = xllamacpp.Server(params)
        self.n_ctx = n_ctx
        self._line = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llama")
        self._waiting = 0
        self._closing = threading.Event()

    async def chat(
        self, build: Build, options: Mapping[str, Any], num_ctx: int, response_format: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[Text | Done, None]:
        """Streams the answer to `build(characters)`; a prompt that is still too long is built again, shorter.

        Closing the iterator stops the generation, also in the middle of the prompt. Raises Busy or Refused.
        """
        if self._waiting >= MAX_WAITING:
            raise Busy("server busy, please try again.  maximum pending requests exceeded")
        self._waiting += 1
        try:
            context = max(min(num_ctx, self.n_ctx), 256)
            answer = int(options.get("num_predict") or -1)
            answer = min(answer if answer > 0 else DEFAULT_ANSWER, MAX_ANSWER, context // 2)
            budget = int((context - answer) * _CHARS_PER_TOKEN)
            while True:
                body = {
                    "messages": list(build(budget)),
                    "max_tokens": answer,
                    "temperature": 0.0,
                    # Breaks the loops of repeated sentences that a greedy small model falls into; what is shorter than
                    # a sentence (a price, a name) may be copied from the prompt.
                    "dry_multiplier": 0.8,
                    "dry_allowed_length": 12,
                    # A loop over "Lyon: Lyon: " is one too: by default a colon ends the comparison.
                    "dry_sequence_breakers": ["\n"],
                    **{name: value for name, value in options.items() if name not in ("num_ctx", "num_predict")},
                    "stream": True,
                    "return_progress": True,
                    "stream_options": {"include_usage": True},
                }
                if response_format is not None:
                    body["response_format"] = dict(response_format)
                try:
                    async with contextlib.aclosing(self._stream(body)) as pieces:
                        async for piece in pieces:
                            yield piece
                    return
                except _TooLong as exc:
                    if budget <= 64:
                        raise Refused(str(exc)) from exc
                    budget = int(budget * 0.9 * (context - answer) / exc.tokens)
        finally:
            self._waiting -= 1

    async def _stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Text | Done, None]:
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        left = threading.Event()

        def on_chunk(chunk: Mapping[str, Any]) -> bool:
            # True stops llama.cpp at its next token or prompt batch.
            if left.is_set() or self._closing.is_set():
                return True
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            return False

        def run() -> None:
            if not (left.is_set() or self._closing.is_set()):
                self._server.handle_chat_completions(dict(body), on_chunk)

        def ended(_job: Future[None]) -> None:
            # The loop may be gone when the process is going down.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(chunks.put_nowait, None)

        job = self._line.submit(run)
        job.add_done_callback(ended)
        reason = "stop"
        finished: Done | None = None
        try:
            while (chunk := await chunks.get()) is not None:
                if "error" in chunk:
                    raise _error(chunk["error"])
                for choice in chunk.get("choices") or ():
                    if choice["delta"].get("content"):
                        yield Text(choice["delta"]["content"])
                    reason = choice.get("finish_reason") or reason
                if chunk.get("usage"):
                    finished = _done(reason, chunk)
        finally:
            left.set()
            job.cancel()
        failed = None if job.cancelled() else job.exception()
        if isinstance(failed, ValueError):
            raise Refused(str(failed)) from failed
        if finished is None:
            raise ModelError("the demonstration model stopped before the end of its answer") from failed
        yield finished

    async def aclose(self) -> None:
        """Stops what runs and frees the model."""
        self._closing.set()
        await asyncio.to_thread(self._line.shutdown, cancel_futures=True)
        del self._server


class _TooLong(ModelError):
    def __init__(self, message: str, tokens: int) -> None:
        super().__init__(message)
        self.tokens = tokens


def _error(error: Mapping[str, Any]) -> ModelError:
    message = str(error.get("message") or "the demonstration model failed")
    if error.get("type") == "exceed_context_size_error":
        return _TooLong(message, int(error["n_prompt_tokens"]))
    return Refused(message) if int(error.get("code") or 500) < 500 else ModelError(message)


def _done(reason: str, chunk: Mapping[str, Any]) -> Done:
    usage, timings = chunk["usage"], chunk.get("timings") or {}
    return Done(
        reason="length" if reason == "length" else "stop",
        prompt_tokens=int(usage["prompt_tokens"]),
        completion_tokens=int(usage["completion_tokens"]),
        prompt_ns=int(float(timings.get("prompt_ms", 0)) * 1e6),
        eval_ns=int(float(timings.get("predicted_ms", 0)) * 1e6),
    )
