"""Write a graph as the release before SQLite did, with that release's code and ladybug 0.22.

The archives beside this file were made in a folder DIR with
`git archive 7417499 services shared | tar -x -C DIR` and `PYTHONPATH=DIR python make.py FOLDER close|kill`.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from services.knowledge.ladybug import open_ladybug  # type: ignore[import-not-found]

from services.knowledge.claims import Turn, claim
from services.knowledge.store import TABLES, Store  # type: ignore[attr-defined]

FOLDER, HOW = Path(sys.argv[1]), sys.argv[2]
START = 1_700_000_000_000
LATER = 1_800_000_000_000


async def main() -> None:
    async with open_ladybug(FOLDER / "knowledge.lbug", TABLES, 32 << 20) as graph:
        store = Store(graph)

        async def hear(source: str, user: str, said: int, *facts: tuple[str, str, str], **values: Any) -> None:
            query = values.pop("query", "")
            turn = Turn(source, user, f"s{source}", START + said, query)
            claims = [claim(turn, *fact, by="model", quote=" ".join(fact), **values) for fact in facts]
            await store.hear(turn, [one for one in claims if one], settled=not query)

        for number in range(20):
            await hear(f"{1000 + number}-1:A", "ann", number, (f"Person {number}", "likes", f"thing {number}"))
        await hear("2000-1:A", "ann", 100, ("Anna", "lives in", "Lyon"), ("Anna", "sister of", "me"))
        await hear("2001-1:A", "ann", 200, ("Anna", "lives in", "Porto"), ("Annie", "also called", "Anna"))
        await hear("2002-1:A", "bob", 300, ("Tom", "works at", "Bosch"), holds="was", until="2015")
        await hear("2003-1:A", "bob", 400, ("Tom", "works at", "SAP"), query="Tom works at SAP.")
        turn = Turn("person:1", "ann", "", START + 500, "")
        await store.correct("ann", turn, [], claim(turn, "me", "lives in", "Graz", by="person"))
        await store.forget("ann", ["1000-1:A"], LATER)
        found = {user: [one.row() for one in await store.all(user)] for user in await store.users()}
        (FOLDER / "claims.json").write_text(json.dumps(found))
        if HOW == "kill":
            os.kill(os.getpid(), 9)


asyncio.run(main())
