"""Runs the gateway: the HTTP server from the first moment, the bus as soon as it answers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import Generator

import uvicorn

from services.gateway.app import create_app
from services.gateway.http.admin_key import shown_by
from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import ADMIN, Principal
from services.gateway.queries.retention import retention
from services.gateway.settings import GatewaySettings
from shared.bus import open_subscriber
from shared.errors import SettingsError, TransientError
from shared.participant.background import supervised_tasks
from shared.participant.service import open_context, run_main
from shared.telemetry import metrics
from shared.telemetry.logging import get_logger

log = get_logger()

PARTICIPANT = "gateway"
# Seconds between two tries while Redis is full.
_AGAIN = 1.0
# Open files beside the connections of clients.
_OTHER_FILES = 512


class _Server(uvicorn.Server):
    """Signals are the run loop's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(settings: GatewaySettings) -> socket.socket:
    """The listening socket. Raises SettingsError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only for sockets that name their protocol
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host.strip("[]"), settings.port))
        listener.listen(2_048)
    except OSError as exc:
        listener.close()
        raise SettingsError(f"cannot listen on {settings.host}:{settings.port}: {exc.strerror or exc}") from exc
    return listener


def _raise_file_limit(wanted: int) -> None:
    """Raise the limit of open files, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


async def run(settings: GatewaySettings, stop: asyncio.Event, *, listener: socket.socket | None = None) -> None:
    """Serves until `stop` is set; open streams end then, and their clients go on at another replica."""
    _raise_file_limit(settings.max_connections + _OTHER_FILES)
    listener = listener or listen(settings)
    try:
        gateway = Gateway(settings)
    except SettingsError:
        listener.close()
        raise
    if gateway.keys.made is not None and not sys.stderr.isatty():
        # what is written here may be kept and passed on
        _tell(f"the administrator's API key was made; to see it: {shown_by(gateway.keys.made)}")
    config = uvicorn.Config(
        create_app(gateway),
        # httptools loses the body of a request with `Upgrade: h2c`
        http="h11",
        h11_max_incomplete_event_size=settings.max_header_bytes,
        limit_concurrency=settings.max_connections,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        # below that are warnings that every client can cause
        log_level="error",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=max(1, int(settings.drain)),
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(sockets=[listener]), name="http")
        attached = tasks.create_task(_attached(gateway, settings, listener.getsockname()[1]), name="bus")
        await stop.wait()
        gateway.stop()
        server.should_exit = True
        await serving
        attached.cancel()
    log.info("service.stopped")


def _tell(sentence: str) -> None:
    print(f"local2: {sentence}", file=sys.stderr, flush=True)


async def _attached(gateway: Gateway, settings: GatewaySettings, port: int) -> None:
    """The gateway on the bus, until cancelled."""
    async with (
        open_context(
            PARTICIPANT, settings, metrics=gateway.metrics_text, patient=False, opened=gateway.waits_for
        ) as context,
        open_subscriber(context.bus) as journals,
    ):
        gateway.attach(context, journals)
        known = await _made_known(gateway)
        context.facts["address"] = f"{settings.host}:{settings.port}"
        context.state = "ready"
        await context.announce()
        if gateway.keys.made is not None and sys.stderr.isatty():
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host).strip("[]")
            base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            key = f"the key: {shown_by(gateway.keys.made)}"
            try:
                token = await gateway.keys.link(Principal(ADMIN, "admin"))
                _tell(f"open {base}/#once={token} (works once, for a minute); {key}")
            except TransientError as exc:
                _tell(f"{base} has no link that works once just now ({exc}); {key}")
        log.info("service.ready", host=settings.host, port=settings.port, auth=settings.auth)
        while not known:
            await asyncio.sleep(_AGAIN)
            known = await _made_known(gateway)
        async with supervised_tasks(retention=retention(gateway).run):
            await asyncio.Event().wait()


async def _made_known(gateway: Gateway) -> bool:
    """Whether the administrator's key could be written; until then this gateway alone knows it."""
    try:
        await gateway.keys.start()
    except TransientError as exc:
        log.warning("keys.waiting", reason=str(exc))
        return False
    return True


def main() -> None:
    """Runs until SIGTERM or SIGINT. A wrong setting ends the process with a sentence and status 2."""
    # its own metrics are shown with or without a port for them
    metrics.start(PARTICIPANT)
    run_main(run, PARTICIPANT, GatewaySettings)
