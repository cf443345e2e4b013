"""Ways to spoil the stack, so that each check is seen to fail: a check that never failed proves nothing."""

from __future__ import annotations

from typing import Any

_EVERYTHING = ("gateway", "generator", "web_search", "web_fetch")

SABOTAGE: dict[str, dict[str, Any]] = {
    # no claim: what a dead replica held is anybody's only after half an hour
    "no-claim": {"services": {name: {"environment": {"LOCAL2_HEARTBEAT": "600"}} for name in _EVERYTHING}},
    # what was accepted is in the memory of a server that is about to restart
    "no-aof": {"services": {"redis": {"command": ["/bin/sh", "/etc/local2/redis/start.sh", "--appendonly", "no"]}}},
    # engrams that die with the vector store's process
    "forgetful": {"services": {"chroma": {"volumes": [{"type": "tmpfs", "target": "/var/tmp"}]}}},
    # one answer waits for its counterpart, the others are given up (long form only)
    "no-pairs": {"services": {"critic": {"environment": {"LOCAL2_CRITIC_PAIRWISE_BUFFER": "1"}}}},
    # a Redis that takes whatever comes, until its container is full (long form only)
    "no-maxmemory": {"services": {"redis": {"environment": {"LOCAL2_REDIS_MAXMEMORY": "0"}}}},
    # a worker that does not hear SIGTERM
    "deaf": {
        "services": {
            "web_fetch": {
                "init": False,
                "command": ["sh", "-c", "trap '' TERM; python -m services.web_fetch; true"],
                "stop_grace_period": "3s",
            }
        }
    },
    # pages that come at once: the processors are the limit
    "no-latency": {
        "services": {
            "world": {"environment": {"DELAY": "0"}},
            "web_fetch": {"environment": {"LOCAL2_WEB_FETCH_CONCURRENCY": "16"}},
        }
    },
    # a generator with a way out, root, a writable file system and all capabilities that Docker gives
    "open": {
        "services": {
            "generator": {
                "networks": ["egress"],
                "user": "0",
                "read_only": False,
                "cap_add": ["DAC_OVERRIDE"],
                "security_opt": [],
            }
        }
    },
    # published to the world
    "published": {"services": {"searxng": {"ports": ["0.0.0.0::8080"]}, "ollama": {"networks": ["bus"]}}},
    # requests that are repeated without their key (in run.py: the stack itself is sound)
    "no-key": {},
    # an answer that the story does not expect
    "no-search": {"services": {"web_search": {"environment": {"SEARXNG_URL": "http://nobody:8000"}}}},
}
