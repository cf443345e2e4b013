"""Signing out: nothing of the user is left on the screen, in memory or in the browser, in any tab."""

from __future__ import annotations

import contextlib
from typing import Any

from attachments import png, upload
from stage import Visit, answered, ask, until

# Words that are on the page, in its storage and in its memory as long as the user is signed in.
WORDS = "surprise-party-of-tomorrow"


def made_key(visit: Visit, user: str) -> tuple[str, str]:
    """Return the id of a new key of that user, and the key."""
    with visit.stack.api() as http:
        made = http.post("/keys", json={"name": user, "user_id": user, "role": "user"}).json()
    return made["id"], made["key"]


def sign_in(page: Any, key: str) -> None:
    page.get_by_role("dialog", name="Sign in").wait_for()
    page.locator("#key:focus").wait_for()
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Chat", exact=True).click()
    page.locator("#question").wait_for()


def signing_out_leaves_nothing(visit: Visit) -> None:
    _, ann = made_key(visit, "ann")
    ben_id, ben = made_key(visit, "ben")
    page = visit.open(path="/")
    sign_in(page, ann)
    files = [
        upload(f"{WORDS}.png", "image/png", png(64, 48)),
        upload("plan.md", "text/markdown", f"# The {WORDS}\n".encode()),
    ]
    page.set_input_files(".composer input[type=file]", files)
    page.locator(".composer .thumbnail img").wait_for()
    until(page, "!document.querySelector('.composer .attached .dim')")
    ask(page, f"What is the capital of France, for the {WORDS}?")
    answered(page, "Paris")
    page.get_by_role("button", name="plan.md").click()
    page.locator(".file-text", has_text=WORDS).wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Conversation state").click()
    page.locator(".message.user", has_text=WORDS).wait_for()
    page.keyboard.press("Escape")
    page.goto(f"{visit.stack.url}/#files")
    page.locator("#files-table", has_text=WORDS).wait_for()
    # more of the user's pages, and entries of the browser's history
    for place, words in (("memory", "Query"), ("bus", "Streams")):
        page.goto(f"{visit.stack.url}/#operate={place}")
        page.locator("main", has_text=words).wait_for()
    page.get_by_role("button", name="Chat", exact=True).click()
    answered(page, "Paris")
    page.fill("#question", f"a draft of the {WORDS}")
    page.fill("#search", WORDS)
    page.locator(".excerpt, .session-title", has_text=WORDS).first.wait_for()
    other = visit.open(path=page.url[len(visit.stack.url) :])
    other.locator(".question", has_text=WORDS).first.wait_for()
    for tab in (page, other):
        assert WORDS in everything(tab), "the check looks in the wrong places"
    assert in_memory(visit, page)
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_role("menuitem", name="Sign out").click()
    for tab in (page, other):
        tab.get_by_role("dialog", name="Sign in").wait_for()
        tab.bring_to_front()
        tab.locator("#key:focus").wait_for()
        tab.keyboard.press("Escape")
        tab.mouse.click(5, 5)
        tab.get_by_role("dialog", name="Sign in").wait_for()
        assert tab.get_by_role("button", name="Close").count() == 0
        assert WORDS not in everything(tab)
        assert not in_memory(visit, tab)
    page.bring_to_front()
    visit.shot(page, "signed-out")
    visit.axe(page)
    page.go_back()
    page.get_by_role("dialog", name="Sign in").wait_for()
    assert WORDS not in everything(page)
    page.locator("#key").focus()
    sign_in(page, ben)
    # The next user has an empty page, in both tabs.
    other.locator("#question").wait_for()
    for tab in (page, other):
        until(tab, "document.querySelector('.session-groups') && !document.querySelector('.session')")
        assert tab.input_value("#question") == ""
        assert WORDS not in everything(tab)
    ask(page, f"What is the capital of France, for the {WORDS}?")
    answered(page, "Paris")
    # A revoked key leads to the same state.
    with visit.stack.api() as http:
        assert http.delete(f"/keys/{ben_id}").is_success
    for tab in (page, other):
        tab.bring_to_front()
        tab.get_by_role("dialog", name="Sign in").wait_for(timeout=30_000)
        assert WORDS not in everything(tab)
    page.get_by_text("This key is not valid.").wait_for()


def everything(page: Any) -> str:
    """Return the page's HTML, title, address and field values, and its data in the browser's storage."""
    return str(
        page.evaluate(
            "() => [document.documentElement.outerHTML, document.title, location.href,"
            " ...[...document.querySelectorAll('input, textarea')].map(e => e.value),"
            " JSON.stringify({...localStorage}), JSON.stringify({...sessionStorage})].join('\\n')"
        )
    )


def in_memory(visit: Visit, page: Any) -> bool:
    """Return whether the words are in the page's memory after a garbage collection."""
    session = visit.context.new_cdp_session(page)
    pieces: list[str] = []
    session.on("HeapProfiler.addHeapSnapshotChunk", lambda piece: pieces.append(piece["chunk"]))
    for _ in range(2):
        session.send("HeapProfiler.collectGarbage")
    session.send("HeapProfiler.takeHeapSnapshot", {"reportProgress": False, "captureNumericValue": False})
    with contextlib.suppress(Exception):
        session.detach()
    return WORDS in "".join(pieces)
