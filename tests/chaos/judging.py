"""`make judging-chaos`: 500 pairs of answers, two critics killed at random, reward and memory away for a minute.

Then everything that each of them knows is compared with what was judged and voted. The status is 0 only when nothing is
lost, twice or mixed up.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.judging import judging

from shared.telemetry.logging import configure


def main() -> int:
    parser = argparse.ArgumentParser(prog="judging-chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two kills of a critic")
    parser.add_argument("--away", type=float, default=60.0, help="seconds that reward and memory are missing")
    parser.add_argument("--seconds", type=float, default=900.0, help="give up after this long")
    parser.add_argument("--seed", type=int, default=None, help="of the order and the victims (default: by the clock)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    configure("error", "console", participant="judging")
    count = asyncio.run(
        judging(options.pairs, every=options.every, away=options.away, seed=seed, seconds=options.seconds)
    )
    killed = ", ".join(f"{name} {number}" for name, number in sorted(count.kills.items()))
    rows = [
        ("pairs", count.pairs),
        ("critiques, verdicts, answers voted on", f"{2 * count.pairs}, {count.pairs}, {count.pairs}"),
        ("seconds", f"{count.seconds:.1f}"),
        ("killed", f"{sum(count.kills.values())} ({killed})"),
        ("judgements that had to be asked for again", count.judged - 4 * count.pairs),
        ("wrong", sum(count.wrong.values())),
    ]
    print("\n".join(f"{name:<44}{value}" for name, value in rows))
    if count.wrong:
        print("\n".join(["", f"FAILED (seed {seed})", *(text[:2_000] for text in count.details)]))
    return 1 if count.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
