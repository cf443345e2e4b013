"""`make upgrade` in real containers: from an older version with data in every store, to this one, and back.

Takes the two versions into a checkout of its own, starts the old one, puts in conversations, memories, a topic, a vote,
a key and a setting; upgrades; looks whether everything is there and new questions are answered; goes back, and looks
again; then upgrades to a version whose gateway does not start, which has to end where it began. The images that
`compose.yaml` names must be there, or to be had. Status 0 when all of it was so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkout import ROOT, Checkout, Wrong


def fill(checkout: Checkout) -> None:
    """Something in every store: Redis, Chroma, preferences, and the gateway's own folder has the key."""
    for number in range(3):
        asked = {"query": f"What is the {number}th lighthouse?", "session_id": "lights"}
        answer = checkout.call("POST", "/query", asked)
        checkout.call("POST", "/feedback", {"query_id": answer["query_id"], "stars": 5})
    checkout.call("PUT", "/memory/topics/user.coffee", {"content": "black, without sugar"})
    checkout.call("POST", "/keys", {"name": "phone", "user_id": "anna"})
    checkout.call("PATCH", "/participants/generator/settings", {"history_turns": 7})


def seen(checkout: Checkout) -> dict[str, Any]:
    """What a user sees of it."""
    turns = checkout.call("GET", "/sessions/lights")["turns"]
    settings = checkout.call("GET", "/participants/generator/settings")["values"]
    engrams = checkout.call("GET", "/memory/engrams")["engrams"]
    return {
        "turns": [turn["query"] for turn in turns],
        "topic": checkout.call("GET", "/memory/topics/user.coffee")["content"],
        "keys": sorted(key["name"] for key in checkout.call("GET", "/keys")["keys"]),
        "history": settings["history_turns"],
        "engrams": sorted({engram["query"] for engram in engrams if engram.get("query")}),
        "votes": checkout.call("GET", "/preferences/leaderboard") is not None,
    }


def eventually(checkout: Checkout, wanted: dict[str, Any] | None, what: str) -> dict[str, Any]:
    """What is seen, once all three answers are remembered, and it is as wanted."""
    until = time.monotonic() + 90
    while True:
        try:
            found = seen(checkout)
            if len(found["engrams"]) >= 3 and (wanted is None or found == wanted):
                return found
            wrong: object = found
        except (Wrong, KeyError, ValueError) as exc:
            wrong = exc
        if time.monotonic() > until:
            raise Wrong(f"{what}: {wrong}, not {wanted}")
        time.sleep(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", help="the commit to upgrade from")
    parser.add_argument("new", nargs="?", default="HEAD", help="the commit to upgrade to (%(default)s)")
    options = parser.parse_args()
    began = time.monotonic()
    new = subprocess.run(["git", "rev-parse", options.new], cwd=ROOT, capture_output=True, text=True, check=True)

    def done(what: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] ok  {what}", flush=True)

    try:
        with Checkout("upgrade") as checkout:
            checkout.take(options.old)
            checkout.run("make", "up")
            fill(checkout)
            before = eventually(checkout, None, "the old version")
            done(f"{options.old} runs: {before}")

            checkout.take(new.stdout.strip())
            said = checkout.run("make", "upgrade", f"FROM={options.old}")
            eventually(checkout, before, "after the upgrade")
            checkout.call("POST", "/query", {"query": "And one more?", "session_id": "lights"})
            done("upgraded, everything is there, and a question is answered: " + said.splitlines()[-1])

            checkout.run("make", "upgrade", "ARGS=back")
            eventually(checkout, before, "after the way back")
            done("back by hand, with the data of before the upgrade")

            compose = checkout.folder / "compose.yaml"
            compose.write_text(compose.read_text().replace('"services.gateway"]', '"services.nothing"]'))
            checkout.run("make", "upgrade", f"FROM={options.old}", fails=True)
            eventually(checkout, before, "after a version that does not start")
            done("a version that does not start: back by itself")
    except Wrong as exc:
        print(f"[{time.monotonic() - began:4.0f} s] FAILED  {exc}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
