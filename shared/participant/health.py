"""The health check of a container: is this host's replica alive? `python -m shared.participant.health PARTICIPANT`

It reads what the replica itself wrote into the registry within its last three heartbeats: a process that runs but no
longer reaches the bus, or whose event loop stands still, is not healthy. Exit status: 0 healthy, 1 not, 2 wrong use.

`--alive` is for whoever restarts what fails (a liveness probe): while Redis itself is away, every replica counts as
alive, because it comes back by itself and a restart would help nothing.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.participant import health_quick

if TYPE_CHECKING:
    from shared.participant.registry import ReplicaInfo

# A draining replica is on its way out in good order.
HEALTHY = frozenset({"ready", "draining"})
PATIENCE = 3.0
ALIVE = "--alive"


def verdict(replicas: Sequence[ReplicaInfo | health_quick.Announced], participant: str, host: str) -> tuple[bool, str]:
    """Whether one of the participant's replicas on `host` serves, and a sentence about it."""
    own = [info for info in replicas if info.participant == participant and info.replica.startswith(f"{host}-")]
    if not own:
        return False, f"no replica of {participant} on {host} has announced itself lately"
    serving = [info for info in own if info.state in HEALTHY]
    chosen = (serving or own)[-1]
    return bool(serving), f"{participant}/{chosen.replica} is {chosen.state}, {chosen.in_flight} in flight"


async def check(participant: str, url: str, patience: float = PATIENCE, *, alive: bool = False) -> tuple[bool, str]:
    """The verdict for this host, over any kind of bus; `alive` is it when Redis did not answer within `patience` s."""
    # here, and not for the whole module: a check that goes the short way does without
    import asyncio

    from shared.bus import Bus
    from shared.errors import BusUnavailable
    from shared.participant.registry import Registry

    async with Bus(url, f"health/{participant}", timeout=patience) as bus:
        try:
            async with asyncio.timeout(patience):
                replicas = await Registry(bus, heartbeat=0).replicas()
        except (TimeoutError, BusUnavailable):
            busy = "BUSY " in bus.link.trouble
            return alive, "Redis is kept busy by a script" if busy else "Redis does not answer"
    return verdict(replicas, participant, socket.gethostname())


def quick(participant: str, *, alive: bool, patience: float = PATIENCE) -> tuple[bool, str] | None:
    """The verdict where the bus is one plain Redis that the environment names; else None."""
    url = health_quick.url_of(participant)
    if url is None:
        return None
    try:
        found = health_quick.announced(url, participant, patience)
    except health_quick.NotPlain:
        return None
    except health_quick.Busy:
        return alive, "Redis is kept busy by a script"
    except OSError:
        return alive, "Redis does not answer"
    return verdict(found, participant, socket.gethostname())


def thorough(participant: str, *, alive: bool) -> tuple[bool, str]:
    """The verdict with all settings and over any kind of bus."""
    import asyncio

    from shared.errors import Local2Error
    from shared.participant.settings import Settings
    from shared.telemetry.logging import configure

    configure("error", "console")
    try:
        settings = Settings.load(participant)
        return asyncio.run(check(participant, settings.redis_url, alive=alive))
    except Local2Error as exc:
        return False, str(exc)


def main(argv: Sequence[str]) -> int:
    names = [word for word in argv if word != ALIVE]
    if len(names) != 1:
        print(f"usage: python -m shared.participant.health [{ALIVE}] PARTICIPANT", file=sys.stderr)
        return 2
    healthy, sentence = quick(names[0], alive=ALIVE in argv) or thorough(names[0], alive=ALIVE in argv)
    print(sentence)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
