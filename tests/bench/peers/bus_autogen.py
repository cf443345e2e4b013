"""autogen: agents over gRPC. The host runs in the worker's process, which saves a change of processes."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autogen_core import AgentId, MessageContext, RoutedAgent, message_handler, try_get_known_serializers_for_type
from autogen_ext.runtimes.grpc import GrpcWorkerAgentRuntime, GrpcWorkerAgentRuntimeHost
from bus_port import tool_work

# Both processes run in one folder.
ADDRESS = Path("autogen-address")


def _new_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    ADDRESS.write_text(address, encoding="utf-8")
    return address


def _address() -> str:
    return ADDRESS.read_text(encoding="utf-8")


@dataclass
class Request:
    number: int
    language: str
    limit: int
    text: str


@dataclass
class Reply:
    text: str


class Echo(RoutedAgent):
    @message_handler
    async def echo(self, message: Request, ctx: MessageContext) -> Reply:
        return Reply(tool_work({"text": message.text}))


class AutogenBus:
    name = "autogen gRPC"
    promises = "none: a call in memory over two gRPC streams, no store"

    def __init__(self, _url: str) -> None:
        self._host: GrpcWorkerAgentRuntimeHost | None = None

    async def start_worker(self) -> None:
        self._host = GrpcWorkerAgentRuntimeHost(_new_address())
        self._host.start()
        await self._connect()
        await Echo.register(self._runtime, "echo", lambda: Echo("echo"))

    async def start_requester(self) -> None:
        await self._connect()

    async def _connect(self) -> None:
        self._runtime = GrpcWorkerAgentRuntime(_address())
        for kind in (Request, Reply):
            self._runtime.add_message_serializer(try_get_known_serializers_for_type(kind))
        await self._runtime.start()

    async def call(self, args: dict[str, Any]) -> str:
        reply: Reply = await self._runtime.send_message(Request(**args), AgentId("echo", "default"))
        return reply.text

    async def close(self) -> None:
        await self._runtime.stop()
        if self._host:
            await self._host.stop()
