"""What is thought of an answer: the critic's grade and verdict, people's votes, and how long that is remembered."""

from __future__ import annotations

import time
from typing import Any

import redis
from operate import loaded
from stage import Visit, answered, ask, until


def an_answer_with_its_grade_and_the_engram(visit: Visit) -> None:
    """S8: the critic panel shows the grade, the memory inspector shows the annotated engram."""
    page = visit.open()
    ask(page, "What is the capital of France?")
    turn = answered(page, "Paris")
    turn.locator("summary", has_text="Thought").click()
    turn.get_by_text("The user asks for the capital").wait_for()
    turn.locator(".badge.good").first.wait_for(timeout=60_000)
    assert turn.locator(".badge.good").first.inner_text() == "5/5"
    turn.locator(".badge.good").first.click()
    turn.get_by_text("in plain words").wait_for()
    visit.shot(page, "answer")
    page.get_by_role("button", name="What is remembered about me").click()
    page.get_by_role("tab", name="Conversations").click()
    card = page.locator("#engram-list .card", has_text="capital of France").first
    card.locator(".badge.good").wait_for(timeout=30_000)
    visit.shot(page, "memory")
    visit.axe(page)
    page.keyboard.press("Escape")
    turn.locator(".details-line").click()
    page.get_by_text("query.received").wait_for()
    # Both respondents are graded.
    page.get_by_text("critique.result").first.wait_for()
    visit.shot(page, "waterfall")
    page.keyboard.press("Escape")
    turn.get_by_role("button", name="Good answer").click()
    turn.get_by_text("Thank you").wait_for()
    turn.get_by_role("button", name="5 of 5 stars").click()
    until(page, "document.querySelectorAll('.star.on').length === 5")
    compared(visit, page)
    only_what_was_said_to_me(visit, page)
    page.reload()
    again = answered(page, "Paris")
    again.locator(".badge.good").first.wait_for()
    assert again.get_by_role("button", name="Good answer").get_attribute("aria-pressed") == "true"
    again.locator("summary", has_text="Thought").wait_for()
    verdict = again.locator(".badge.verdict").inner_text()
    address = page.url
    # the critic's panel: the grade with its words, the comparison, and both answers
    rows = panel(page, "critic", "What is the capital of France?")
    grade = rows.filter(has_text="grade").filter(has_text="5/5").first
    grade.wait_for(timeout=60_000)
    rows.filter(has_text="comparison").first.wait_for(timeout=60_000)
    rows.filter(has_text="comparison").first.get_by_role("button").first.click()
    page.locator("tr.detail .two .card", has_text="Paris").nth(1).wait_for()
    visit.shot(page, "critic")
    # the memory's panel: A's engram with the grade, the vote and what the comparison said
    rows = panel(page, "memory", "What is the capital of France?")
    own = rows.filter(has=page.locator("td[data-name='Respondent']", has_text="A")).first
    for name, words in (("Respondent", "A"), ("Score", "5/5"), ("Sentiment", "positive"), ("Winner", verdict)):
        cell = own.locator(f"td[data-name='{name}']")
        deadline = time.monotonic() + 60
        while cell.inner_text().strip() != words:
            assert time.monotonic() < deadline, f"{name}: {cell.inner_text()!r} is not {words!r}"
            page.get_by_role("button", name="Refresh").first.click()
            page.wait_for_timeout(500)
    own.get_by_role("button", name="Open").click()
    page.locator("tr.detail", has_text="in plain words").wait_for()
    visit.shot(page, "memory-inspector")
    # a vote that is pressed again is withdrawn, in every tab and after a reload
    page.goto(address)
    again = answered(page, "Paris")
    other = visit.open(path=address[len(visit.stack.url) :])
    tab = answered(other, "Paris")
    for one in (page, other):
        until(one, "document.querySelectorAll('.star.on').length === 5")
    again.get_by_role("button", name="Good answer").click()
    again.get_by_text("Withdrawn").wait_for()
    until(other, "!document.querySelector('[aria-label=\"Good answer\"][aria-pressed=true]')")
    assert tab.locator(".star.on").count() == 5
    again.get_by_role("button", name="5 of 5 stars").click()
    until(page, "!document.querySelector('.star.on')")
    told(visit, page, "reward", {"reward": None})
    page.reload()
    answered(page, "Paris").locator(".badge.good").first.wait_for()
    assert page.locator(".star.on, [aria-label='Good answer'][aria-pressed=true]").count() == 0


def only_what_was_said_to_me(visit: Visit, page: Any) -> None:
    """In what is remembered about a person, listed or found, the second respondent's answers are not."""
    with visit.stack.api() as http:
        deadline = time.monotonic() + 60
        while True:
            told = http.get("/memory/engrams?limit=200").json()["engrams"]
            said = [one["respondent_id"] for one in told if one["query"] == "What is the capital of France?"]
            if "B" in said:
                break
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
    page.get_by_role("button", name="What is remembered about me").click()
    page.get_by_role("tab", name="Conversations").click()
    cards = page.locator("#engram-list .card", has_text="What is the capital of France?")
    cards.first.wait_for()
    assert cards.count() == said.count("A")

    def by_the_second(route: Any) -> None:
        found = route.fetch().json()
        assert found["hits"]
        route.fulfill(json={**found, "hits": [{**one, "respondent_id": "B"} for one in found["hits"]]})

    page.route("**/memory?*", by_the_second)
    page.fill("#memory-query", "capital of France")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_text("Nothing fits.").wait_for()
    assert page.locator("#engram-list .card").count() == 0
    page.unroute("**/memory?*")
    page.keyboard.press("Escape")


def compared(visit: Visit, page: Any) -> None:
    """Waits until the newest answer of the session that is shown has been compared with the other respondent's."""
    told(visit, page, "pairwise", {})


def told(visit: Visit, page: Any, kind: str, wanted: dict[str, Any]) -> None:
    """Waits until the newest turn of the session that is shown tells of this."""
    session = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('session')")
    with visit.stack.api() as http:
        query = http.get(f"/sessions/{session}").json()["turns"][-1]["query_id"]
        deadline = time.monotonic() + 90
        while True:
            journal = http.get(f"/sessions/{session}/turns/{query}").json()["journal"]
            if any(one["event"] == kind and wanted.items() <= one["data"].items() for one in journal):
                return
            assert time.monotonic() < deadline, f"no {kind} {wanted}"
            time.sleep(0.2)


def panel(page: Any, place: str, words: str) -> Any:
    """The rows of a table of Operate that have these words."""
    page.goto(page.url.partition("#")[0] + f"#operate={place}")
    loaded(page)
    rows = page.locator("main table.grid > tbody > tr:not(.detail)", has_text=words)
    rows.first.wait_for(timeout=60_000)
    return rows


def a_conversation_a_week_later(visit: Visit) -> None:
    """When its journals, records and results have gone, a conversation is shown as on its day."""
    page = visit.open()
    ask(page, "What major AI news broke this week?")
    page.locator(".sources a").first.wait_for(timeout=60_000)
    until(page, "!document.querySelector('article.turn.running')", 60)
    ask(page, "What is the capital of France?")
    turn = answered(page, "Paris")
    turn.get_by_role("button", name="4 of 5 stars").click()
    told(visit, page, "critique", {"score": 5})
    with visit.stack.api() as http:
        session = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('session')")
        query = http.get(f"/sessions/{session}").json()["turns"][-1]["query_id"]
        http.post("/feedback", json={"query_id": query, "stars": 4, "comment": "Well put."}).raise_for_status()
    told(visit, page, "reward", {"stars": 4, "comment": "Well put."})
    compared(visit, page)
    page.reload()
    before = as_people_see_it(page)
    with visit.stack.api() as http:
        turns = http.get(f"/sessions/{session}").json()["turns"]
        assert len(turns) == 2
        with redis.Redis(unix_socket_path=str(visit.stack.redis)) as bus:
            for one in turns:
                gone = list(bus.scan_iter(f"local2:*{one['query_id']}*"))
                assert gone
                bus.unlink(*gone)
            bus.unlink(f"local2:queries:{{local2:query.received}}:{session}")
        for one in turns:
            assert http.get(f"/queries/{one['query_id']}").status_code == 404
            http.delete(f"/memory/engrams/{one['query_id']}:A")
    page.reload()
    assert as_people_see_it(page) == before
    # its vote is remembered, and no other one is offered
    assert "Well put." in before[-1]
    turn = page.locator("article.turn").last
    turn.get_by_role("img", name="Your vote: 4 of 5 stars").wait_for()
    assert page.get_by_role("button", name="Good answer").count() == 0
    page.locator(".details-line").last.click()
    # The messages of the bus are shown while the query's record is there.
    page.get_by_text("Question's id").wait_for()
    visit.shot(page, "a-week-later")


def as_people_see_it(page: Any) -> list[str]:
    """The text of each turn with everything in it opened."""
    answered(page, "Paris")
    page.locator(".star.on").nth(3).wait_for()
    closed = page.locator("article.turn details:not([open]) > summary")
    for _ in range(50):
        if closed.count():
            closed.first.click()
    page.locator(".hits a").first.wait_for()
    return list(page.locator("article.turn").all_inner_texts())
