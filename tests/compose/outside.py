"""A machine that stands for the internet: beyond the host's routing, so that only what is let out gets there.

A container without a network of Docker's is connected to the host by a cable of its own (a veth pair) and has no way
back to any of Docker's networks. It is reached from a container only through a default route *and* the host's address
translation: exactly what a real server out there needs. This takes root on the engine's own machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

from stack import LABEL, OURS, Stack, docker

PORT = 80
# Reserved for documentation, therefore nobody's; a pair of addresses for each run.
_NET = "203.0.113"
_LISTEN = "import socket,time\ns=socket.create_server(('0.0.0.0',80))\nwhile True:\n c,_=s.accept(); c.close()"


def possible() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "nsenter")))


class Outside:
    """`address` and `port` of a listener that is on the internet, as far as the stack can tell."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._cable = f"ctest{os.getpid() % 1_000_000}"
        first = os.getpid() % 63 * 4
        self._here, self.address = f"{_NET}.{first + 1}", f"{_NET}.{first + 2}"
        self.port = PORT

    def __enter__(self) -> Self:
        self._id = docker(
            *("run", "--detach", "--rm", "--init", "--network", "none", "--label", f"{OURS}={self._stack.name}"),
            *("--label", f"{LABEL}="),
            *("--entrypoint", "python", self._stack.image, "-c", _LISTEN),
        ).strip()
        try:
            pid = docker("inspect", "--format", "{{.State.Pid}}", self._id).strip()
            inside = ("nsenter", f"--net=/proc/{pid}/ns/net")
            for command in (
                ("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", pid),
                ("ip", "address", "add", f"{self._here}/30", "dev", self._cable),
                ("ip", "link", "set", self._cable, "up"),
                (*inside, "ip", "address", "add", f"{self.address}/30", "dev", "eth0"),
                (*inside, "ip", "link", "set", "eth0", "up"),
            ):
                subprocess.run(command, check=True, capture_output=True, text=True)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # its end of the cable goes with it, and so does ours
        docker("rm", "--force", self._id)
