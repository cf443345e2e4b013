"""Files in a chat and on the page Files: shown, opened, searched and deleted, and never run in the page's origin."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

from stage import Visit, answered, ask, until

WIDTHS = (390, 820, 1440)
HOSTILE = b"<!doctype html><script>opener && (opener.hit = 1); window.hit = 1</script><p>A page with some text</p>"
TEXT = b"# Descaling\n\n<script>window.hit = 2</script> Use citric acid.\n"


def png(width: int, height: int) -> bytes:
    """Return a PNG with a gradient."""
    line = b"".join(bytes((x * 255 // width, 120, 160)) for x in range(width))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(b"".join(b"\0" + line for _ in range(height)))),
            (b"IEND", b""),
        )
    )


def upload(name: str, kind: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": content}


PICTURE = upload("sea.png", "image/png", png(900, 600))
FILES = [
    PICTURE,
    upload("manual.md", "text/markdown", TEXT),
    upload("page.html", "text/html", HOSTILE),
]


def a_question_with_an_image_and_files(visit: Visit) -> None:
    page = visit.open()
    page.set_input_files(".composer input[type=file]", FILES)
    page.locator(".composer .thumbnail img").wait_for()
    until(page, "!document.querySelector('.composer .attached .dim')")
    visit.axe(page)
    ask(page, "What is the capital of France?")
    turn = answered(page, "Paris")
    shown_and_opened(visit, page, turn)
    page.reload()
    turn = answered(page, "Paris")
    shown_and_opened(visit, page, turn)
    # The messages in the model's form, with the system prompt in front.
    page.get_by_role("button", name="Conversation state").click()
    page.locator(".message.system").first.wait_for()
    page.locator(".message.user", has_text="What is the capital of France?").wait_for()
    page.locator(".message.assistant", has_text="Paris").wait_for()
    assert "The user asks for the capital" not in page.locator(".messages").inner_text()
    visit.shot(page, "conversation-state")
    visit.axe(page)


def shown_and_opened(visit: Visit, page: Any, turn: Any) -> None:
    until(page, "document.querySelector('article .thumbnail img')?.naturalWidth === 900")
    turn.get_by_role("button", name="Show sea.png").click()
    until(page, "document.querySelector('[role=dialog] img')?.naturalWidth === 900")
    visit.shot(page, "image")
    visit.axe(page)
    page.keyboard.press("Escape")
    turn.get_by_role("button", name="manual.md").click()
    page.locator(".file-text", has_text="<script>window.hit = 2</script> Use citric acid.").wait_for()
    page.keyboard.press("Escape")
    with page.expect_download() as saved:
        turn.get_by_role("button", name="page.html").click()
    assert Path(saved.value.path()).read_bytes() == HOSTILE
    assert page.evaluate("window.hit") is None


def a_message_of_a_file_alone(visit: Visit) -> None:
    page = visit.open()
    assert page.locator("#send").is_disabled()
    page.set_input_files(".composer input[type=file]", [upload("alone.md", "text/markdown", TEXT + b"alone")])
    until(page, "!document.querySelector('#send').disabled")
    page.locator("#send").click()
    page.locator("article.turn .chip", has_text="alone.md").wait_for()
    until(page, "!document.querySelector('article.turn.running')", 60)
    assert page.locator("article.turn .question").count() == 0
    assert page.locator("article.turn .error-text").count() == 0
    page.reload()
    page.locator("article.turn .chip", has_text="alone.md").wait_for()


def the_page_of_files(visit: Visit) -> None:
    for width in WIDTHS:
        one = Visit(visit.stack, visit.browser, visit.shots)
        page = one.open(width=width, dark=width == WIDTHS[1])
        page.get_by_role("button", name="Files", exact=True).click()
        page.get_by_role("heading", name="Files").wait_for()
        name = f"tomatoes-{width}.md"
        page.set_input_files("main input[type=file]", [upload(name, "text/markdown", TEXT + name.encode()), PICTURE])
        row = page.locator("#files-table tbody tr", has_text=name)
        row.get_by_text("ready").wait_for(timeout=60_000)
        page.fill("#file-search", f"TOMATOES-{width}")
        until(page, "document.querySelectorAll('#files-table tbody tr').length === 1")
        row.get_by_role("button", name=name, exact=True).click()
        page.locator(".file-text", has_text="citric acid").wait_for()
        page.keyboard.press("Escape")
        page.fill("#file-search", "")
        page.locator("#files-table tbody tr", has_text="sea.png").first.wait_for()
        one.shot(page, f"files-{width}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        one.axe(page)
        row.get_by_role("button", name=f"Delete {name}").click()
        page.get_by_role("button", name="Delete it").click()
        row.wait_for(state="detached")
        page.reload()
        page.locator("#files-table tbody tr", has_text="sea.png").first.wait_for()
        assert row.count() == 0
        visit.complaints += [f"{width}: {said}" for said in one.complaints]
        one.context.close()


def a_deleted_file_keeps_its_name(visit: Visit) -> None:
    page = visit.open()
    page.set_input_files(".composer input[type=file]", [upload("gone.png", "image/png", png(64, 48))])
    until(page, "!document.querySelector('.composer .attached .dim')")
    ask(page, "What is the capital of France?")
    answered(page, "Paris")
    page.locator("article .thumbnail img").wait_for()
    with visit.stack.api() as http:
        (found,) = http.get("/files", params={"search": "gone.png"}).json()["files"]
        assert http.delete(f"/files/{found['id']}").is_success
    page.reload()
    page.locator("article .chip.gone", has_text="gone.png").wait_for()
    assert page.locator("article img").count() == 0
