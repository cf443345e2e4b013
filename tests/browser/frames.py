"""What the page computes for each frame, while a long answer is written and while a long conversation is read."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from stage import LONG, Visit, ask, until

FRAMES = """() => { window.frames_ = []; let last = performance.now();
  const tick = (now) => { window.frames_.push(now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick); }"""
# ms of a frame: what the 95th percentile may take, and what no frame may
FRAME, LONGEST_FRAME = 20.0, 100.0


@contextlib.contextmanager
def smooth(visit: Visit, page: Any, what: str) -> Iterator[None]:
    """The page's main thread computes for at most FRAME ms a frame meanwhile, and never for LONGEST_FRAME.

    A frame is what the main thread of the page does from one animation frame to the next: scripts, styles, layout,
    and writing down what is to be painted; other threads draw it. Counted is the processor's time of its tasks, which
    is what the page itself is to blame for. A machine that has other work to do lets the page wait, so that each of
    its frames has more to show: the bounds grow by as much as its tasks took longer than they computed.
    """
    page.evaluate(FRAMES)
    session = visit.browser.new_browser_cdp_session()
    events: list[dict[str, Any]] = []
    over: list[Any] = []
    session.on("Tracing.dataCollected", lambda part: events.extend(part["value"]))
    session.on("Tracing.tracingComplete", lambda end: over.append(end))
    session.send("Tracing.start", {"transferMode": "ReportEvents", "traceConfig": {
        "includedCategories": ["toplevel", "devtools.timeline"], "excludedCategories": ["*"]}})  # fmt: skip
    try:
        yield
    finally:
        session.send("Tracing.end")
        deadline = time.monotonic() + 60
        while not over:
            assert time.monotonic() < deadline, "the trace does not end"
            page.wait_for_timeout(50)
        session.detach()
    drawn = [one for one in events if one["name"] == "FireAnimationFrame"]
    threads = Counter((one["pid"], one["tid"]) for one in drawn)
    main = threads.most_common(1)[0][0]
    starts = sorted(one["ts"] for one in drawn if (one["pid"], one["tid"]) == main)
    computed, took, frames = 0.0, 0.0, [0.0] * (len(starts) + 1)
    for one in outermost(one for one in events if (one["pid"], one["tid"]) == main and one["ph"] == "X"):
        frames[bisect.bisect_right(starts, one["ts"])] += one.get("tdur", 0) / 1000
        computed, took = computed + one.get("tdur", 0), took + one["dur"]
    share = computed / took
    frames.sort()
    seen = sorted(page.evaluate("window.frames_.slice(2)"))
    p95, longest = frames[int(len(frames) * 0.95)], frames[-1]
    print(f"   {what}: {p95:.1f} ms computed a frame (p95), {longest:.0f} ms at most, with {share:.0%} of a processor; "
          f"on the clock {seen[int(len(seen) * 0.95)]:.1f} ms (p95), {seen[-1]:.0f} ms at most, {len(seen)} frames",
          flush=True)  # fmt: skip
    assert len(frames) > 20, "hardly anything was drawn"
    assert p95 <= FRAME / share, f"{p95:.1f} ms"
    assert longest <= LONGEST_FRAME / share, f"{longest:.0f} ms"


def outermost(spans: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those of a thread's spans that lie in no other one: a task is told by several layers of the browser."""
    end = 0.0
    for one in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
        if one["ts"] + one["dur"] > end:
            if one["ts"] >= end:
                yield one
            end = max(end, one["ts"] + one["dur"])


def frames_of_a_long_answer(visit: Visit) -> None:
    page = visit.open()
    with smooth(visit, page, f"an answer of {len(LONG.split())} words, {len(LONG)} characters"):
        ask(page, "a long one")
        # whoever looks often, or searches the page for words, is measured too
        page.wait_for_selector("article.turn.running", timeout=30_000)
        until(page, "!document.querySelector('article.turn.running')", 300, every=500)
    visit.shot(page, "long")


def frames_of_five_hundred_turns(visit: Visit) -> None:
    stamp = int(time.time() * 1000) - 600_000
    turns = [
        {"query": f"Question {n}?", "answer": f"Answer {n}. " + LONG[: 300 + (n * 37) % 900], "time": stamp + n}
        for n in range(500)
    ]
    with visit.stack.api() as http:
        body = {"sessions": [{"session_id": "five-hundred", "title": "Five hundred", "turns": turns}]}
        made = http.post("/sessions/import", json=body)
        assert made.status_code == 200, made.text
        session = made.json()["sessions"][0]["session_id"]
    page = visit.open()
    page.goto(f"{visit.stack.url}/#session={session}")
    page.get_by_text("Answer 499.").wait_for()
    with smooth(visit, page, "500 turns, scrolled to the first in some seconds"):
        page.locator(".scroller").hover()
        deadline = time.monotonic() + 90
        # 25,000 px a second, faster than a hand; to search the page for words would be measured too
        first = "() => document.querySelector('.scroller .question')?.textContent"
        while page.evaluate(first) != "Question 0?" and time.monotonic() < deadline:
            page.mouse.wheel(0, -1500)
            page.wait_for_timeout(60)
    assert page.get_by_text("Question 0?", exact=True).count() == 1
    assert page.locator("article.turn").count() < 60
    page.get_by_role("button", name="To the newest").click()
    page.get_by_text("Answer 499.").wait_for()
    visit.shot(page, "five-hundred")
