"""demo_model: a small real model behind Ollama's protocol, for machines where nothing else is installed.

`python -m services.demo_model --host 127.0.0.1 --port 0` prints one JSON line with its URL on stdout when it is ready.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Sequence

from services.demo_model.wheels import chat_file, embedding_file, require_libraries
from shared.errors import SettingsError


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Exit code 2: something is not installed, or the address cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m services.demo_model", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="0 (default): a free port")
    given = parser.parse_args(argv)
    try:
        require_libraries()
        files = chat_file(), embedding_file()
        with listen(given.host, given.port) as listener:
            _serve(listener, *files)
    except SettingsError as exc:
        print(exc, file=sys.stderr)
        return 2
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises SettingsError: the protocol has no authentication, so only loopback is served."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as exc:
        raise SettingsError(f"--host {host}: an IP address is expected") from exc
    if not address.is_loopback:
        raise SettingsError(f"--host {host}: the demonstration model has no authentication and serves loopback only")
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), port))
    except (OSError, OverflowError) as exc:
        listener.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {exc}") from exc
    return listener


def _serve(listener: socket.socket, chat: os.PathLike[str], embedding: os.PathLike[str]) -> None:
    # Imported here: a machine without the wheels gets the sentence above instead of a traceback.
    from pathlib import Path

    import uvicorn

    from services.demo_model.api import Api
    from services.demo_model.catalog import CARDS
    from services.demo_model.conversation import Conversation
    from services.demo_model.llama import Llama
    from services.demo_model.tools import ExampleIndex, shipped_examples
    from shared.llm.minilm import Embedder, give_back_memory

    started = time.perf_counter()
    _say(
        "loading the demonstration model (SmolLM2, 135 million parameters; it proves the stack, it is not a good model)"
    )
    llama = Llama(Path(chat))
    embedder = Embedder(Path(embedding))
    _say("loading the example phrasings for the choice of tools")
    index = ExampleIndex(lambda texts: embedder.embed(texts)[0], shipped_examples())
    give_back_memory()
    _say(f"ready after {time.perf_counter() - started:.1f} s")

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(json.dumps({"url": url_of(listener), "models": [card.name for card in CARDS]}), flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await llama.aclose()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        Api(Conversation(llama, index), embedder).app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )
    Announced(config).run(sockets=[listener])


def url_of(listener: socket.socket) -> str:
    """The address of a listener as a client writes it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(text: str) -> None:
    print(f"demo_model: {text}", file=sys.stderr, flush=True)
