"""What can be reached from where this runs: started in the network of each container in turn.

Reads `{"targets": {name: [[host, port], …]}}`, prints for each name whether any of its addresses can be connected to,
else why not, and whether there is a way to other networks at all.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys

PATIENCE = 2.0


async def one(host: str, port: int) -> str:
    try:
        async with asyncio.timeout(PATIENCE):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return "silence"
    except socket.gaierror:
        return "no name"
    except ConnectionRefusedError:
        return "refused"
    except OSError as exc:
        return {101: "no route", 113: "no host"}.get(exc.errno or 0, str(exc))
    writer.close()
    return "open"


async def reach(addresses: list[tuple[str, int]]) -> str:
    """`open` when one of the addresses is; else the answer of the first that says more than its name."""
    answers = await asyncio.gather(*(one(host, port) for host, port in addresses))
    if "open" in answers:
        return "open"
    return next((answer for answer in answers if answer != "no name"), "no name")


def default_route() -> bool:
    with open("/proc/net/route", encoding="ascii") as file:
        return any(line.split()[1] == "00000000" for line in file.readlines()[1:])


async def main() -> None:
    targets = json.load(sys.stdin)["targets"]
    answers = await asyncio.gather(*(reach(addresses) for addresses in targets.values()))
    print(json.dumps({"route": default_route(), "reach": dict(zip(targets, answers, strict=True))}))


if __name__ == "__main__":
    asyncio.run(main())
