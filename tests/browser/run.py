"""The console in a real browser, against a stack of its own with the scripted model.

`python tests/browser/run.py [--shots FOLDER] [--without WORD] [NAME …]`: the checks whose names contain one of the
words, or all. Needs Chromium (CHROMIUM, or `chromium` on the PATH) and Playwright; without them one line says NOT RUN
and what to install.
Every page is watched: an error in its console or a report of its Content-Security-Policy fails the check.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from account import signing_out_leaves_nothing
from attachments import (
    a_deleted_file_keeps_its_name,
    a_message_of_a_file_alone,
    a_question_with_an_image_and_files,
    the_page_of_files,
)
from frames import frames_of_a_long_answer, frames_of_five_hundred_turns
from judged import a_conversation_a_week_later, an_answer_with_its_grade_and_the_engram
from operate import every_page_of_operate, every_width_and_both_colours
from stage import AXE, BUILT, FLAGS, HOSTILE, ROOT, NotRun, Visit, answered, ask, running, until

# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def first_page_and_sign_in(visit: Visit) -> None:
    page = visit.open()
    page.get_by_text("What would you like to know?").wait_for()
    assert page.locator(".examples button").count() == 3
    assert "once=" not in page.url
    visit.shot(page, "first")
    page.reload()
    page.get_by_text("What would you like to know?").wait_for()
    stranger = Visit(visit.stack, visit.browser, visit.shots)
    other = stranger.open(path="/")
    other.get_by_role("dialog", name="Sign in").wait_for()
    other.fill("#key", "wrong-key")
    other.get_by_role("button", name="Sign in").click()
    other.get_by_text("This key is not valid.").wait_for()
    visit.shot(other, "sign-in")
    other.fill("#key", visit.stack.key)
    other.get_by_role("button", name="Sign in").click()
    other.get_by_text("What would you like to know?").wait_for()
    stranger.context.close()


def everything_that_an_answer_can_have(visit: Visit) -> None:
    page = visit.open()
    ask(page, "show everything, please")
    turn = answered(page, "A heading")
    turn.locator("math").nth(1).wait_for()
    turn.locator(".hljs-keyword").first.wait_for()
    prose = turn.locator(".prose")
    assert prose.locator("table td").nth(1).inner_text() == "a | b"
    assert prose.locator("input[type=checkbox]").count() == 2
    assert "Words_with_underscores_inside" in prose.inner_text()
    assert "$5 and $6" in prose.inner_text()
    assert prose.locator("section.notes li").count() == 1
    assert page.evaluate(
        "[...document.querySelectorAll('.prose p')].some(p => getComputedStyle(p).direction === 'rtl')"
    )
    turn.get_by_role("button", name="Copy", exact=True).click()
    assert "def greet" in page.evaluate("navigator.clipboard.readText()")
    assert page.evaluate("window.hit") is None
    assert prose.locator("img, script, style, svg").count() == 0
    visit.shot(page, "rich")
    visit.axe(page)
    ask(page, "say hostile things")
    answered(page, "<script>")
    with visit.stack.api() as http:
        session = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('session')")
        http.patch(f"/sessions/{session}", json={"title": HOSTILE[:190]})
    page.reload()
    page.locator(".session-title", has_text="onerror").first.wait_for()
    assert page.evaluate("window.hit") is None


def tools_and_memories(visit: Visit) -> None:
    page = visit.open()
    ask(page, "What major AI news broke this week?")
    page.locator(".step.tool").first.wait_for(timeout=30_000)
    until(page, "!document.querySelector('article.turn.running')", 60)
    page.locator(".step.tool summary").first.click()
    page.locator(".hits a").first.wait_for()
    page.locator(".sources a").first.wait_for()
    visit.shot(page, "tools")
    ask(page, "Please remember my preferred language is Elixir.")
    page.locator("article.turn").last.locator(".step.tool").first.wait_for(timeout=30_000)
    until(page, "!document.querySelector('article.turn.running')", 60)
    page.reload()
    page.locator("article.turn").nth(1).locator(".step.tool").first.wait_for()
    visit.axe(page)


def one_truth_in_two_tabs(visit: Visit) -> None:
    one = visit.open()
    ask(one, "What is the capital of France?")
    answered(one, "Paris")
    address = one.url[len(visit.stack.url) :]
    two = visit.open(path=address)
    answered(two, "Paris")
    ask(one, "slowly, please")
    two.locator("article.turn.running .prose", has_text="three").wait_for()
    two.get_by_role("button", name="Stop", exact=True).first.click()
    for page in (one, two):
        page.get_by_text("Stopped before the end.").wait_for()
        assert page.locator("article.turn").count() == 2
    other = Visit(visit.stack, visit.browser, visit.shots)
    third = other.open()
    third.goto(visit.stack.url + address)
    third.locator("article.turn").nth(1).wait_for()
    ask(third, "What is the capital of France?")
    one.locator("article.turn").nth(2).wait_for()
    visit.complaints += other.complaints
    other.context.close()


def a_question_that_is_quicker_than_the_page(visit: Visit) -> None:
    """Asked before the list of conversations is there, and accepted after it."""
    page = visit.open()
    held: list[Any] = []
    through: set[str] = set()

    def hold(route: Any) -> None:
        name = route.request.url.rpartition("/")[2].partition("?")[0]
        if name in through:
            return route.continue_()
        return held.append((name, route))

    def let(name: str) -> None:
        through.add(name)
        for one, route in held:
            if one == name:
                route.continue_()

    page.route("**/sessions?*", hold)
    page.route("**/query?*", hold)
    page.reload()
    for name in ("sessions", "query"):
        while not any(one == name for one, _ in held):
            page.wait_for_timeout(50)
        if name == "sessions":
            ask(page, "What is the capital of France?")
    with page.expect_response("**/sessions?*"):
        let("sessions")
    let("query")
    answered(page, "Paris")


def a_question_waits_for_its_turn(visit: Visit) -> None:
    page = visit.open()
    ask(page, "slowly, please")
    page.locator("article.turn.running .prose").wait_for()
    ask(page, "What is the capital of France?")
    page.get_by_text("Waiting for its turn").wait_for()
    page.fill("#question", "a draft")
    page.reload()
    page.locator("article.turn.running").first.wait_for()
    assert page.input_value("#question") == "a draft"
    page.locator("article.turn.running").first.get_by_role("button", name="Stop").click()
    answered(page, "Paris")


def another_version(visit: Visit) -> None:
    page = visit.open()
    ask(page, "What is the capital of France?")
    turn = answered(page, "Paris")
    turn.get_by_role("button", name="Ask again", exact=True).click()
    page.get_by_role("menuitem", name="The same again").click()
    page.get_by_text("2 of 2").wait_for()
    until(page, "!document.querySelector('article.turn.running')", 60)
    page.get_by_role("button", name="The version before").click()
    page.get_by_text("1 of 2").wait_for()
    page.get_by_role("button", name="Side by side").click()
    page.locator(".beside article").nth(1).wait_for()
    visit.shot(page, "versions")
    visit.axe(page)
    page.get_by_role("button", name="Side by side").click()
    # the choice is the session's, in every tab and after a reload; what is said next stands behind it
    other = visit.open(path=page.url[len(visit.stack.url) :])
    other.get_by_text("1 of 2").wait_for()
    ask(page, "What is the capital of France, please?")
    until(page, "document.querySelectorAll('article.turn').length === 2", 60)
    answered(page, "Paris")
    page.reload()
    page.get_by_text("1 of 2").wait_for()
    page.get_by_role("button", name="The version after").click()
    page.get_by_text("2 of 2").wait_for()
    assert page.locator("article.turn").count() == 1
    # other words take the question, its versions and what came after them away, in every tab
    page.get_by_role("button", name="Edit and ask again").first.click()
    assert page.input_value("#question") == "What is the capital of France?"
    page.get_by_text("are forgotten").wait_for()
    ask(page, "And once more: what is the capital of France?")
    answered(page, "Paris")
    for tab in (page, other):
        until(tab, "document.querySelectorAll('article.turn').length === 1", 60)
        tab.locator("article.turn .question", has_text="And once more").wait_for()
        until(tab, "!document.querySelector('.version-choice')")


def settings_are_the_chats(visit: Visit) -> None:
    page = visit.open()
    ask(page, "What is the capital of France?")
    answered(page, "Paris")
    page.get_by_role("button", name="Settings of this chat").click()
    page.get_by_label("Instructions for the model").fill("Speak like a pirate.")
    # longer than the pause between two looks at the server
    page.wait_for_timeout(3_000)
    page.get_by_role("button", name="Done", exact=True).click()
    page.get_by_role("button", name="own instructions").wait_for()
    other = visit.open(path=page.url[len(visit.stack.url) :])
    other.get_by_role("button", name="own instructions").click()
    until(other, "document.querySelector('#system-prompt')?.value === 'Speak like a pirate.'")


def names_pins_search_export_and_undo(visit: Visit) -> None:
    page = visit.open()
    ask(page, "What is the capital of France?")
    answered(page, "Paris")
    row = page.locator(".session-groups li.current")
    row.hover()
    row.locator(".session-menu").click()
    page.get_by_role("menuitem", name="Rename").click()
    page.fill(".rename", "A zebra crossing")
    page.press(".rename", "Enter")
    page.locator(".session-title", has_text="A zebra crossing").wait_for()
    row.hover()
    row.locator(".session-menu").click()
    page.get_by_role("menuitem", name="Pin").click()
    page.locator(".session-groups h2", has_text="Pinned").wait_for()
    page.fill("#search", "zebra")
    until(page, "document.querySelectorAll('.session').length === 1")
    page.fill("#search", "paris france")
    page.locator(".excerpt").first.wait_for()
    visit.shot(page, "search")
    page.fill("#search", "")
    row.hover()
    row.locator(".session-menu").click()
    with page.expect_download() as saved:
        page.get_by_role("menuitem", name="Save as Markdown").click()
    assert "> What is the capital of France?" in Path(saved.value.path()).read_text(encoding="utf-8")
    row.hover()
    row.locator(".session-menu").click()
    page.get_by_role("menuitem", name="Delete").click()
    page.get_by_role("button", name="Undo").click()
    page.locator(".session-title", has_text="A zebra crossing").click()
    answered(page, "Paris")
    row.hover()
    row.locator(".session-menu").click()
    page.get_by_role("menuitem", name="Delete").click()
    page.get_by_role("button", name="Undo").wait_for(state="detached", timeout=15_000)
    until(page, "![...document.querySelectorAll('.session-title')].some(e => e.textContent === 'A zebra crossing')")


def files_palette_and_keys(visit: Visit) -> None:
    page = visit.open()
    page.set_input_files(
        ".composer input[type=file]", [{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"The answer is 42."}]
    )
    page.locator(".attached li", has_text="notes.txt").wait_for()
    until(page, "!document.querySelector('.attached .dim')")
    visit.shot(page, "attached")
    ask(page, "What is the capital of France?")
    turn = answered(page, "Paris")
    turn.locator(".question-row .attached li", has_text="notes.txt").wait_for()
    page.reload()
    turn = answered(page, "Paris")
    turn.locator(".question-row .attached li", has_text="notes.txt").wait_for()
    # asked again, in the same words or others, it comes with its files
    turn.get_by_role("button", name="Ask again", exact=True).click()
    with page.expect_request("**/query?*") as asked:
        page.get_by_role("menuitem", name="The same again").click()
    assert len(asked.value.post_data_json["attachments"]) == 1
    page.get_by_text("2 of 2").wait_for()
    turn = answered(page, "Paris")
    turn.get_by_role("button", name="Edit and ask again").click()
    page.locator(".composer .attached li", has_text="notes.txt").wait_for()
    page.get_by_role("button", name="Remove notes.txt").click()
    page.get_by_role("button", name="Leave it as it was").click()
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Command").fill("dark")
    visit.shot(page, "palette")
    page.keyboard.press("Enter")
    until(page, "document.documentElement.dataset.theme === 'dark'")
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Command").fill("as the system")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Settings of this chat").click()
    page.fill("#model", "another:1b")
    visit.shot(page, "settings")
    visit.axe(page)
    page.get_by_role("button", name="Done", exact=True).click()
    page.get_by_text("another:1b").wait_for()


def a_committee(visit: Visit) -> None:
    page = visit.open()
    page.select_option("#mode", "committee")
    page.get_by_role("button", name="Settings of this chat").click()
    page.get_by_role("dialog").wait_for()
    page.locator("fieldset input").first.wait_for()
    names = page.get_by_label("Names, separated by commas")
    if names.count():
        names.fill("Analyst, Skeptic")
    else:
        page.get_by_label("Analyst").check()
        page.get_by_label("Skeptic").check()
    page.get_by_role("button", name="Done", exact=True).click()
    ask(page, "Should I move to the sea?")
    page.locator(".step.persona").nth(1).wait_for(timeout=60_000)
    until(page, "!document.querySelector('article.turn.running')", 60)
    visit.shot(page, "committee")


def a_gateway_that_dies_and_a_network_that_is_gone(visit: Visit) -> None:
    page = visit.open()
    ask(page, "slowly, please")
    page.locator("article.turn.running .prose", has_text="four").wait_for()
    with visit.stack.api() as http:
        parts = http.get("/participants").json()["participants"]
    (gateway,) = [part for part in parts if part["name"] == "gateway"]
    os.kill(int(gateway["replicas"][0]["replica"].rsplit("-", 2)[1]), signal.SIGKILL)
    page.get_by_text("Connection lost").wait_for()
    visit.context.set_offline(True)
    time.sleep(1)
    visit.context.set_offline(False)
    turn = answered(page, "one two three", within=90)
    assert " ".join(turn.locator(".prose").inner_text().split()).count("one two three four") == 12


def first_paint(visit: Visit) -> None:
    page = visit.open()
    page.reload()
    page.wait_for_selector("#question")
    page.wait_for_timeout(300)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    sizes = page.evaluate(
        "performance.getEntriesByType('resource').filter(e => e.name.includes('/console/'))"
        ".map(e => [e.name, e.encodedBodySize])"
    )
    whole = sum(size for _, size in sizes)
    print(f"   first paint after {paint:.0f} ms; {whole / 1000:.0f} kB compressed in {len(sizes)} files", flush=True)
    assert paint <= 1_000
    assert whole <= 250_000


CHECKS: list[Callable[[Visit], None]] = [
    first_page_and_sign_in,
    signing_out_leaves_nothing,
    an_answer_with_its_grade_and_the_engram,
    a_conversation_a_week_later,
    everything_that_an_answer_can_have,
    tools_and_memories,
    one_truth_in_two_tabs,
    a_question_that_is_quicker_than_the_page,
    a_question_waits_for_its_turn,
    another_version,
    settings_are_the_chats,
    names_pins_search_export_and_undo,
    files_palette_and_keys,
    a_question_with_an_image_and_files,
    a_message_of_a_file_alone,
    the_page_of_files,
    a_deleted_file_keeps_its_name,
    a_committee,
    first_paint,
    every_page_of_operate,
    every_width_and_both_colours,
    frames_of_a_long_answer,
    frames_of_five_hundred_turns,
    a_gateway_that_dies_and_a_network_that_is_gone,
]


def chromium() -> str:
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        raise NotRun("no Chromium on this machine: apt install chromium, or name one with CHROMIUM=/path")
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shots", type=Path, default=ROOT / "tests" / "browser" / "shots")
    parser.add_argument("--without", metavar="WORD", help="leave out the checks whose names contain it")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    try:
        program_path = chromium()
        try:
            from playwright.sync_api import sync_playwright
        except ImportError:
            raise NotRun("no Playwright: make test-browser installs it") from None
        for needed in (AXE, BUILT):
            if not needed.exists():
                raise NotRun(f"{needed.relative_to(ROOT)} is not there: make console")
    except NotRun as exc:
        print(f"NOT RUN: {exc}")
        return 0
    options.shots.mkdir(parents=True, exist_ok=True)
    chosen = [check for check in CHECKS if not options.names or any(name in check.__name__ for name in options.names)]
    if options.without:
        chosen = [check for check in chosen if options.without not in check.__name__]
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="local2-browser-") as folder,
        running(Path(folder)) as stack,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=program_path, args=FLAGS)
        for check in chosen:
            visit = Visit(stack, browser, options.shots)
            began = time.monotonic()
            wrong = ""
            try:
                check(visit)
            except Exception:
                wrong = traceback.format_exc(limit=4)
                with contextlib.suppress(Exception):
                    visit.shot(visit.context.pages[0], f"failed-{check.__name__}")
            if visit.context is not None:
                visit.context.close()
            wrong += "".join(f"\n  {said}" for said in dict.fromkeys(visit.complaints))
            failed += bool(wrong)
            name, took = check.__name__.replace("_", " "), time.monotonic() - began
            print(f"{'FAILED' if wrong else 'ok    '} {name} ({took:.1f} s){wrong}", flush=True)
        browser.close()
    print(f"{len(chosen) - failed} of {len(chosen)} checks passed; pictures in {options.shots}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
