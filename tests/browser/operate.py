"""The operators' pages: by keys, by address, in all widths and both colours, beside what strangers wrote."""

from __future__ import annotations

from typing import Any

import redis
from stage import HOSTILE, WIDTHS, Visit, answered, ask, until


def every_page_of_operate(visit: Visit) -> None:
    """By keys alone and by its address; what strangers wrote is text on each."""
    page = visit.open()
    ask(page, "say hostile things")
    answered(page, "<script>")
    with visit.stack.api() as http:
        for method, path, body in (
            ("POST", "/keys", {"name": HOSTILE[:60], "user_id": "mallory", "role": "user"}),
            ("POST", "/knowledge/facts", {"subject": HOSTILE[:40], "relation": "lives in", "object": "Berlin"}),
            ("PUT", "/memory/topics/user.hostile", {"content": HOSTILE}),
            ("PATCH", "/participants/generator/settings", {"system_prompt": HOSTILE}),
            ("PATCH", "/participants/generator/settings", {"system_prompt": "Be brief."}),
        ):
            made = http.request(method, path, json=body)
            assert made.is_success, f"{method} {path}: {made.text}"
    with redis.Redis(unix_socket_path=str(visit.stack.redis)) as bus:
        bus.xadd("local2:tool.request.web_fetch", {"payload": f"no json {HOSTILE}"})
    page.get_by_role("button", name="Operate").focus()
    page.keyboard.press("Enter")
    page.get_by_role("tab", name="Participants").focus()
    places = page.get_by_role("tablist", name="Operate").get_by_role("tab").evaluate_all("tabs => tabs.map(t => t.id)")
    assert len(places) > 10
    for place in places:
        until(page, f"document.activeElement?.id === {place!r}")
        page.keyboard.press("Enter")
        until(page, f"location.hash.startsWith('#operate={place}')")
        until(page, f"document.getElementById({place!r}).ariaSelected === 'true'")
        loaded(page)
        page.evaluate(
            "[...document.querySelectorAll('main [aria-expanded=false]')].slice(0, 3).forEach(e => e.click())"
        )
        visit.axe(page)
        harmless(page)
        page.get_by_role("tab", selected=True).focus()
        page.keyboard.press("ArrowDown")
    for place, words in (
        ("keys", "onerror"), ("knowledge", "onerror"), ("dead-letters", "web_fetch"),
        ("critic", "say hostile things"), ("participants/generator/settings", "Changed lately"),
        ("participants/critic", "Activity"), ("bus", "Streams"),
    ):  # fmt: skip
        page.goto(f"{visit.stack.url}/#operate={place.replace('/', '%2F')}")
        page.locator("main", has_text=words).wait_for(timeout=60_000)
        loaded(page)
        visit.shot(page, f"operate-{place.replace('/', '-')}")
        harmless(page)


def loaded(page: Any) -> None:
    """Waits until the page of Operate that is open has what it asked for."""
    page.locator("main h2").first.wait_for()
    until(page, "!document.querySelector('main').textContent.includes('Loading …')")


def harmless(page: Any) -> None:
    """Nothing of what strangers wrote has become an element, and none of it ran."""
    assert page.evaluate("window.hit") is None, page.url
    assert page.locator("main :is(img, script, style, iframe)").count() == 0, page.url


def every_width_and_both_colours(visit: Visit) -> None:
    for dark in (False, True):
        for width in WIDTHS:
            one = Visit(visit.stack, visit.browser, visit.shots)
            page = one.open(width=width, dark=dark)
            ask(page, "show everything, please")
            answered(page, "A heading")
            page.wait_for_timeout(500)
            name = f"{width}-{'dark' if dark else 'light'}"
            one.shot(page, f"chat-{name}")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            one.axe(page)
            # Colours change no width: one width is enough for the dark pages, which axe checks.
            if not dark or width == WIDTHS[0]:
                operate_without_scrolling(one, page, name, axe=dark)
            visit.complaints += [f"{name}: {said}" for said in one.complaints]
            one.context.close()


def operate_without_scrolling(visit: Visit, page: Any, name: str, *, axe: bool) -> None:
    """Open each page of Operate; none is wider than the window."""
    page.goto(f"{visit.stack.url}/#operate=participants")
    tabs = page.get_by_role("tablist", name="Operate").get_by_role("tab")
    tabs.first.wait_for()
    for place in tabs.evaluate_all("tabs => tabs.map(t => t.id)"):
        page.goto(f"{visit.stack.url}/#operate={place}")
        loaded(page)
        visit.shot(page, f"operate-{place}-{name}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{place} {name}"
        if axe:
            visit.axe(page)
