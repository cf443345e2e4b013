"""The counters of one process. Imported only when metrics are on; see `shared.telemetry.metrics`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from shared.telemetry.outcome import Outcome

CONTENT_TYPE = CONTENT_TYPE_LATEST
# A second series for each counter, of which nothing is asked here.
disable_created_metrics()  # type: ignore[no-untyped-call]

# A client may name any model, and a model may name any tool: beyond these, they are counted as one.
_MOST_VALUES = 64
OTHER = "other"

_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 900)


class Bounded:
    """Label values, the first so many as they are, all further ones as `other`."""

    def __init__(self, most: int = _MOST_VALUES) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._most or len(value) > 100:
            return OTHER
        self._known.add(value)
        return value


class Meter:
    def __init__(self, participant: str) -> None:
        self.registry = registry = CollectorRegistry()
        self._models, self._tools, self._streams = Bounded(), Bounded(), Bounded()
        ProcessCollector(registry=registry)
        info = Gauge("local2_info", "1, for the participant and its version", ["participant", "version"],
                     registry=registry)  # fmt: skip
        info.labels(participant, _version()).set(1)
        self._messages = Counter("local2_messages_handled", "Deliveries of work streams, by how they ended",
                                 ["stream", "outcome"], registry=registry)  # fmt: skip
        self._redelivered = Counter("local2_messages_redelivered", "Deliveries that were not the entry's first",
                                    ["stream"], registry=registry)  # fmt: skip
        self._message_seconds = Histogram("local2_message_seconds", "Seconds that a delivery was worked on",
                                          ["stream"], buckets=_LONG, registry=registry)  # fmt: skip
        self._wait_seconds = Histogram("local2_message_wait_seconds", "Seconds between writing and first delivery",
                                       ["stream"], buckets=_QUICK, registry=registry)  # fmt: skip
        self._tool_calls = Counter("local2_tool_calls", "Tool calls at their worker", ["tool", "outcome"],
                                   registry=registry)  # fmt: skip
        self._tool_seconds = Histogram("local2_tool_call_seconds", "Seconds of a tool call at its worker", ["tool"],
                                       buckets=_QUICK, registry=registry)  # fmt: skip
        self._requests = Counter("local2_tool_requests", "Tool calls as their caller sees them", ["tool", "outcome"],
                                 registry=registry)  # fmt: skip
        self._request_seconds = Histogram("local2_tool_request_seconds", "Seconds of a tool call, the bus included",
                                          ["tool"], buckets=_QUICK, registry=registry)  # fmt: skip
        self._background = Counter("local2_background_failures", "Failures of work that goes on beside a "
                                   "participant's own, and is begun again", ["work"], registry=registry)  # fmt: skip
        # there from the start, so that its first failure is an increase
        self._background.labels("unhandled")
        self._model_calls = Counter("local2_model_calls", "Model calls", ["model", "outcome"], registry=registry)
        self._model_seconds = Histogram("local2_model_call_seconds", "Seconds of a model call", ["model"],
                                        buckets=_LONG, registry=registry)  # fmt: skip
        self._first_token = Histogram("local2_model_time_to_first_token_seconds",
                                      "Seconds from a model call to its first thinking, text or tool call", ["model"],
                                      buckets=_LONG, registry=registry)  # fmt: skip
        self._tokens = Counter("local2_model_tokens", "Tokens as the model backend counts them",
                               ["model", "direction"], registry=registry)  # fmt: skip
        self._ignored = Counter("local2_inbox_ignored", "Entries of a replica's inbox of which nothing came, by reason",
                                ["reason"], registry=registry)  # fmt: skip
        for reason in ("late", "token", "malformed", "unknown"):
            self._ignored.labels(reason)
        self._journal = Counter("local2_journal_entries", "Journal entries written, by type", ["type"],
                                registry=registry)  # fmt: skip
        self._answer = Histogram("local2_query_first_token_seconds",
                                 "Seconds from accepting a query to the first thinking or text of its answer",
                                 buckets=_LONG, registry=registry)  # fmt: skip
        self._queries = Histogram("local2_query_seconds", "Seconds from accepting a query to its end", ["outcome"],
                                  buckets=_LONG, registry=registry)  # fmt: skip

        if participant in ("critic", "reward"):
            self._declare_judging(registry)

    def _declare_judging(self, registry: CollectorRegistry) -> None:
        """What only judges and those who count votes have. Every value is there from the start: a rate needs a zero."""
        self._grades = Counter("local2_grades", "Answers graded, by score; none: no score could be had", ["score"],
                               registry=registry)  # fmt: skip
        self._unread = Counter("local2_judgements_unread", "Things the judge said that could not be read, by what was "
                               "asked of it", ["asked"], registry=registry)  # fmt: skip
        self._verdicts = Counter("local2_verdicts", "Comparisons, by winner; none: no verdict could be had", ["winner"],
                                 registry=registry)  # fmt: skip
        self._split = Counter("local2_verdicts_split", "Comparisons whose two orders named different answers",
                              registry=registry)  # fmt: skip
        self._left = Counter("local2_left_ungraded", "Answers left ungraded because the judge is too slow, by what was "
                             "too much: the backlog or the age", ["reason"], registry=registry)  # fmt: skip
        self._waiting = Gauge("local2_pairs_waiting", "Answers that wait for their counterpart", registry=registry)
        self._in_line = Gauge("local2_judge_waiting", "Answers that wait for the judge", registry=registry)
        self._votes = Counter(
            "local2_votes", "Votes of users, by sentiment, and withdrawals", ["sentiment"], registry=registry
        )
        for counter, values in (
            (self._grades, ("1", "2", "3", "4", "5", "none")),
            (self._unread, ("grade", "comparison")),
            (self._verdicts, ("A", "B", "tie", "none")),
            (self._left, ("backlog", "age")),
            (self._votes, ("positive", "negative", "withdrawn")),
        ):
            for value in values:
                counter.labels(value)

    # ── the bus ──────────────────────────────────────────────────────────────────────────────────────────────

    def message(self, stream: str, outcome: Outcome, seconds: float, deliveries: int, waited: float) -> None:
        name = self._streams(stream)
        self._messages.labels(name, outcome).inc()
        self._message_seconds.labels(name).observe(seconds)
        if deliveries > 1:
            self._redelivered.labels(name).inc()
        else:
            self._wait_seconds.labels(name).observe(max(0.0, waited))

    def journal(self, kind: str) -> None:
        self._journal.labels(kind).inc()

    # ── tools ────────────────────────────────────────────────────────────────────────────────────────────────

    def tool_call(self, tool: str, outcome: Outcome, seconds: float) -> None:
        name = self._tools(tool)
        self._tool_calls.labels(name, outcome).inc()
        self._tool_seconds.labels(name).observe(seconds)

    def tool_request(self, tool: str, outcome: Outcome, seconds: float) -> None:
        # an invented name must not use up a place among the real ones
        name = OTHER if outcome == "unknown" else self._tools(tool)
        self._requests.labels(name, outcome).inc()
        self._request_seconds.labels(name).observe(seconds)

    def inbox_ignored(self, reason: Literal["late", "token", "malformed", "unknown"]) -> None:
        self._ignored.labels(reason).inc()

    def background_failed(self, work: str) -> None:
        self._background.labels(work).inc()

    # ── models ───────────────────────────────────────────────────────────────────────────────────────────────

    def model_call(
        self, model: str, outcome: Outcome, seconds: float, first: float | None, prompt: int, completion: int
    ) -> None:
        """first: seconds until the first sign of an answer."""
        name = self._models(model)
        self._model_calls.labels(name, outcome).inc()
        self._model_seconds.labels(name).observe(seconds)
        if first is not None:
            self._first_token.labels(name).observe(first)
        self._tokens.labels(name, "input").inc(prompt)
        self._tokens.labels(name, "output").inc(completion)

    # ── judging: critic and reward alone ─────────────────────────────────────────────────────────────────────

    def grade(self, score: int | None) -> None:
        self._grades.labels("none" if score is None else str(score)).inc()

    def unread(self, asked: Literal["grade", "comparison"]) -> None:
        self._unread.labels(asked).inc()

    def verdict(self, winner: str | None, *, split: bool = False) -> None:
        self._verdicts.labels(winner or "none").inc()
        if split:
            self._split.inc()

    def left_ungraded(self, reason: Literal["backlog", "age"]) -> None:
        self._left.labels(reason).inc()

    def pairs_waiting(self, number: int) -> None:
        self._waiting.set(number)

    def judge_waiting(self, number: int) -> None:
        self._in_line.set(number)

    def vote(self, sentiment: str) -> None:
        self._votes.labels(sentiment).inc()

    # ── queries ──────────────────────────────────────────────────────────────────────────────────────────────

    def first_token(self, seconds: float) -> None:
        self._answer.observe(max(0.0, seconds))

    def query(self, outcome: str, seconds: float) -> None:
        self._queries.labels(outcome).observe(max(0.0, seconds))

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _version() -> str:
    try:
        return version("local2")
    except PackageNotFoundError:
        return "unknown"
