"""A stack of `local2 run` on a data folder of an older release: fill every store, and compare what a user sees.

`tests/upgrade/run.py` runs the older release itself; `tests/e2e/test_upgrade.py` has a recorded folder of one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from support.local2_run import ADMIN_KEY, Failed, Stack, eventually

MANUAL = b"# Kettle\n\nThe warranty lasts two years.\n\nDescale the kettle every month.\n"
NOTES = b"The tomatoes want water every second day.\n"
TALKS = {
    "home": ["My sister Anna lives in Lyon.", "I live in Graz and I work at SAP."],
    "trips": ["Tom moved from Lyon to Porto in May.", "Please remember that my passport number ends in 417."],
}
RULES = [
    {
        "when": {"user": "^Please remember", "tool_results": 0},
        "respond": {"tool_calls": [{"name": "save_memory", "args": {"content": "The passport number ends in 417."}}]},
    },
    {"when": {"user": "###Response B:"}, "respond": {"text": "The first is better. [RESULT] A"}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": "It is right. [RESULT] 4"}},
    {"respond": {"text": "I have noted it."}},
]


def fill(stack: Stack) -> str:
    """Write something into every store, and wait until the participants have it. Return the key of a second user."""
    call = stack.call
    texts = {"kettle.md": MANUAL, "garden.md": NOTES}
    files = [call("POST", f"/files?name={name}", content=text) for name, text in texts.items()]
    for session, queries in TALKS.items():
        for query in queries:
            asked = {"query": query, "session_id": session}
            if query is TALKS["home"][0]:
                asked["attachments"] = [files[0]["id"]]
            answer = call("POST", "/query", asked)
            call("POST", "/feedback", {"query_id": answer["query_id"], "stars": 4, "comment": f"about {session}"})
    call("PATCH", "/sessions/trips", {"title": "Journeys", "pinned": True})
    for text in ("The bicycle is in the cellar.", "The spare key is with Mrs Novak."):
        call("POST", "/tools/save_memory/call", {"args": {"content": text}})
    for topic, content in (("user.coffee", "Black, without sugar."), ("project.shed", "Build it in spring.")):
        call("PUT", f"/memory/topics/{topic}", {"content": content})
    call("DELETE", "/memory/topics/project.shed")
    call("POST", "/knowledge/facts", {"subject": "me", "relation": "lives in", "object": "Vienna", "since": "2026-02"})
    call("POST", "/knowledge/facts", {"subject": "Anna", "relation": "works at", "object": "Siemens"})
    call("PUT", "/preferences/consent", {"consent": True})
    anna: str = call("POST", "/keys", {"name": "phone", "user_id": "anna"})["key"]
    call("POST", "/query", {"query": "My brother Emil lives in Linz.", "session_id": "anna-1"}, key=anna)
    call("PUT", "/memory/topics/user.tea", {"content": "Green, after lunch."}, key=anna)
    call("PATCH", "/participants/generator/settings", {"history_turns": 7})
    call("PATCH", "/participants/memory/settings", {"top_k": 9})
    answered = sum(map(len, TALKS.values()))

    def settled() -> bool:
        found = seen(stack, anna)
        # a turn of each respondent, three notes and a topic
        return len(found["engrams"]) >= 2 * answered + 4 and len(found["facts"]) >= 5 and quiet(stack)

    eventually(settled, "everything is in its store")
    return anna


def quiet(stack: Stack) -> bool:
    """Return whether no participant has work to do."""
    rows = stack.call("GET", "/bus/streams")["streams"]
    return not any(group.get("lag") or group.get("pending") for row in rows for group in row["groups"])


def pages(stack: Stack, path: str, name: str) -> list[dict[str, Any]]:
    """Return all rows of a list that comes in pages."""
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = stack.call("GET", path, params={"limit": 50, **({"cursor": cursor} if cursor else {})})
        found += page[name]
        cursor = page.get("next_cursor") or page.get("cursor")
        if not cursor:
            return found


def seen(stack: Stack, anna: str) -> dict[str, list[str]]:
    """Return what the users and the administrator see of each store, as sorted lines. anna: a second user's key."""
    call = stack.call
    files = pages(stack, "/files", "files")
    engrams = pages(stack, "/memory/engrams", "engrams")
    facts = pages(stack, "/knowledge/facts", "facts")
    exports = [call("GET", "/preferences/export", params={"format": kind}) for kind in ("dpo", "kto", "critiques")]
    lines = {
        "turns": turns(stack, ADMIN_KEY),
        "files": [f"{one['id']} {one['name']} {call('GET', '/files/' + one['id'])}" for one in files],
        "engrams": [chosen(one, "id query answer content topic tainted score winner reward") for one in engrams],
        "topics": [chosen(one, "topic content") for one in call("GET", "/memory/topics")["topics"]],
        "facts": [chosen(one, "id subject relation object state since until said confidence why") for one in facts],
        "keys": [
            chosen(one, "id name user_id role") for one in call("GET", "/keys")["keys"] if one["user_id"] == "anna"
        ],
        "preferences": [line for export in exports for line in export.splitlines()],
        "consent": [chosen(call("GET", "/preferences/consent"), "user_id consent")],
        "settings": [
            f"{name} {key} {call('GET', f'/participants/{name}/settings')['values'][key]}"
            for name, key in (("generator", "history_turns"), ("memory", "top_k"))
        ],
        "another user": [
            *turns(stack, anna),
            str(sorted(one["content"] for one in call("GET", "/memory/topics", key=anna)["topics"])),
            str(sorted(one["id"] for one in call("GET", "/memory/engrams", key=anna)["engrams"])),
            *(chosen(one, "id object") for one in call("GET", "/knowledge/facts", key=anna)["facts"]),
        ],
    }
    return {name: sorted(rows) for name, rows in lines.items()}


def turns(stack: Stack, key: str) -> list[str]:
    """Return the sessions of a user and their turns, each with its journal."""
    found = []
    for session in stack.call("GET", "/sessions", key=key)["sessions"]:
        path = f"/sessions/{session['session_id']}"
        found.append(f"{path}: {chosen(session, 'title pinned')}")
        for turn in stack.call("GET", path, key=key)["turns"]:
            # the log of the bus, and whether a vote is possible, end after a day
            journal = stack.call("GET", f"{path}/turns/{turn['query_id']}", key=key)["journal"]
            found.append(f"{path}: {chosen(turn, 'query_id query answer attachments')} {journal}")
    return found


def chosen(row: dict[str, Any], names: str) -> str:
    """Return some fields of a row as one line."""
    return " | ".join(str(row.get(name)) for name in names.split())


def differences(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """Return a line for each row that is lost, new or doubled."""
    found = []
    for name, rows in before.items():
        had, has = Counter(rows), Counter(after[name])
        found += [f"{name}: lost: {row}" for row in (had - has).elements()]
        found += [f"{name}: new or doubled: {row}" for row in (has - had).elements()]
    return found


def works(stack: Stack) -> None:
    """Check that each store answers questions about the old data. Raises Failed."""

    def found(path: str, word: str, **query: str) -> None:
        eventually(lambda: word in str(stack.call("GET", path, params=query)), f"{word} in {path}", 60)

    found("/memory", "cellar", query="Where is the bicycle?")
    found("/memory", "417", query="How does the passport number end?")
    found("/documents", "two years", query="How long is the warranty?")
    found("/knowledge/facts", "Lyon", about="Anna")
    told = stack.call("POST", "/tools/search_knowledge_graph/call", {"args": {"people": ["Anna"]}})
    if "Lyon" not in str(told):
        raise Failed(f"search_knowledge_graph: {told}")


def goes_on(stack: Stack) -> None:
    """Continue an old session, and wait for the new fact. Raises Failed."""
    stack.call("POST", "/query", {"query": "My brother Paul lives in Oslo.", "session_id": "home"})
    eventually(lambda: "Oslo" in str(stack.call("GET", "/knowledge/facts", params={"about": "Paul"})), "a new fact")
    last = stack.call("GET", "/sessions/home")["turns"]
    if len(last) != len(TALKS["home"]) + 1:
        raise Failed(f"the session has {len(last)} turns")


def same(stack: Stack, anna: str, before: dict[str, list[str]], what: str) -> None:
    """Wait until the users see the same as before. Raises Failed with the differences."""
    wrong: list[str] = []

    def arrived() -> bool:
        wrong[:] = differences(before, seen(stack, anna))
        return not wrong

    try:
        eventually(arrived, what, 60)
    except Failed as exc:
        raise Failed("\n".join([str(exc), *(line[:1500] for line in wrong[:40])])) from exc
