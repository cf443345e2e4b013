"""Every check of a story, as a pure function: what was seen in, outcomes out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from local2_stories.bus_tap import BusMessage
from local2_stories.story import (
    AnyOf,
    BusEvents,
    CritiqueCheck,
    DeliberationCheck,
    EngramCheck,
    FactLine,
    PairwiseCheck,
    PreferenceCheck,
    ResponseCheck,
    ResultLines,
    Turn,
)

from services.cli.words import counted
from shared.bus.keys import stream_key
from shared.contracts import (
    CRITIQUE_RESULT,
    PAIRWISE_RESULT,
    RESPONSE_GENERATION,
    TOOL_REQUEST,
    TOOL_RESULT,
    persona_key,
)

# So many words of a tool's result must come back in the answer for it to have been used.
SHARED_WORDS = 5
_WORD = re.compile(r"[^\W\d_]{6,}")
_PREVIEW = 160
_WON = {True: "the better one", False: "the other was better", None: "a tie"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check: its name in words, whether it holds, and, when it does not, what was seen instead."""

    check: str
    ok: bool
    seen: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a turn led to. `reply` is that of POST /query, `bus` every message about the query, in order. `engrams` and
    `dpo` are its engrams and its rows in the export; `facts`: what knowledge says then, as lines."""

    reply: dict[str, Any]
    bus: Sequence[BusMessage] = ()
    engrams: Sequence[dict[str, Any]] = ()
    facts: Sequence[str] = ()
    dpo: Sequence[dict[str, Any]] = ()

    @property
    def query_id(self) -> str:
        return str(self.reply.get("query_id", ""))

    @property
    def answer(self) -> str:
        return str(self.reply.get("answer") or "")

    @property
    def calls(self) -> list[dict[str, Any]]:
        return list(self.reply.get("tool_calls") or [])

    @property
    def events(self) -> list[str]:
        """The subjects of what respondent A's answer led to."""
        return [message.subject for message in self.bus if message.respondent_id == "A"]

    def payloads(self, subject: str) -> list[dict[str, Any]]:
        return [message.payload for message in self.bus if message.subject == subject]

    @property
    def shown(self) -> dict[str, Any] | None:
        """The response.generation of respondent A."""
        found = self.payloads(RESPONSE_GENERATION.name)
        return next((p for p in found if p.get("response_id") == f"{self.query_id}:A"), None)

    @property
    def pair(self) -> dict[str, Any] | None:
        """The pairwise.result."""
        found = self.payloads(PAIRWISE_RESULT.name)
        return next((p for p in found if p.get("original_query_id") == self.query_id), None)


def check_turn(turn: Turn, seen: Seen) -> list[Outcome]:
    """Everything that the turn says."""
    outcomes = [
        *_content(turn, seen.answer),
        *check_events(turn.expected_bus_events, seen.events),
        *_responses(turn.respondents, seen),
        *_true(seen),
        *check_responses(turn.response_generation_checks, seen),
    ]
    if turn.tool_calls:
        names = [str(call.get("tool")) for call in seen.calls]
        outcomes.append(
            Outcome(f"calls {' → '.join(turn.tool_calls)}", in_order(turn.tool_calls, names), f"called: {names}")
        )
    if turn.answer_uses_result_of is not None:
        outcomes.append(_uses_result(turn, seen))
    if turn.critique is not None:
        outcomes.append(_critique(turn.critique, seen))
    if turn.pairwise is not None:
        outcomes.extend(_pairwise(turn.pairwise, seen))
    if turn.engrams is not None:
        outcomes.extend(_engrams(turn.engrams, seen))
    if turn.preferences is not None:
        outcomes.append(_preferences(turn.preferences, seen))
    if turn.result_lines is not None:
        outcomes.extend(_result_lines(turn.result_lines, seen))
    if turn.facts is not None:
        outcomes.extend(_lines("knowledge has", turn.facts.lines, seen.facts))
    if turn.deliberations is not None:
        outcomes.append(_deliberations(turn.deliberations, seen))
    return outcomes


def _content(turn: Turn, answer: str) -> Iterator[Outcome]:
    text = folded(answer)
    for expected in turn.expected_content:
        texts = expected.any_of if isinstance(expected, AnyOf) else [expected]
        found = any(folded(part) in text for part in texts)
        yield Outcome(f"answer contains {' or '.join(map(repr, texts))}", found, f"answer: {_short(answer)}")
    for unwanted in turn.must_not_contain:
        missing = folded(unwanted) not in text
        yield Outcome(f"answer does not contain {unwanted!r}", missing, f"answer: {_short(answer)}")


def folded(text: str) -> str:
    """For comparing what people would call the same: case, white space and typographic apostrophes do not count."""
    return " ".join(text.casefold().replace("’", "'").replace("‘", "'").split())


def check_events(wanted: BusEvents, events: Sequence[str]) -> Iterator[Outcome]:
    seen = f"events: {_runs(events)}"
    for subject in wanted.present:
        yield Outcome(f"{subject} on the bus", any(_is(event, subject) for event in events), seen)
    for subject in wanted.absent:
        yield Outcome(f"no {subject} on the bus", not any(_is(event, subject) for event in events), seen)
    if wanted.in_order:
        yield Outcome(f"in order: {' → '.join(wanted.in_order)}", in_order(wanted.in_order, events), seen)


def _is(subject: str, wanted: str) -> bool:
    return subject.startswith(wanted[:-1]) if wanted.endswith("*") else subject == wanted


def in_order(wanted: Iterable[str], found: Iterable[str]) -> bool:
    """Whether `wanted` is a subsequence of `found`."""
    rest = iter(found)
    return all(any(item == name for name in rest) for item in wanted)


def _responses(respondents: Sequence[str], seen: Seen) -> Iterator[Outcome]:
    for respondent in respondents:
        ids = [str(payload.get("response_id")) for payload in seen.payloads(RESPONSE_GENERATION.name)]
        wanted = f"{seen.query_id}:{respondent}"
        yield Outcome(
            f"one response.generation of {respondent} on the bus", ids.count(wanted) == 1, f"response ids: {ids}"
        )


def _true(seen: Seen) -> Iterator[Outcome]:
    """Yield whether the answer is A's, `event_log` lists messages on the bus, and each result names its call."""
    if (shown := seen.shown) is not None:
        text = str(shown.get("answer"))
        yield Outcome("only A's answer is shown", text == seen.answer, f"A answered: {_short(text)}")
    log = list(seen.reply.get("event_log") or [])
    there = {(stream_key(m.subject), m.entry_id) for m in seen.bus}
    strange = [e for e in log if (e.get("stream"), e.get("id")) not in there]
    yield Outcome(
        "event_log lists messages on the bus", bool(log) and not strange, f"not on the bus: {_short(str(strange))}"
        if log else "it is empty",
    )  # fmt: skip
    asked = {(m.payload.get("call_id"), m.entry_id) for m in seen.bus if m.subject.startswith(f"{TOOL_REQUEST.name}.")}
    told = {
        (m.payload.get("call_id"), m.causation_id or m.payload.get("request_id"))
        for m in seen.bus
        if m.subject.startswith(f"{TOOL_RESULT.name}.")
    }
    for call in seen.calls:
        call_id, tool = call.get("call_id"), call.get("tool")
        requests = {pair for pair in asked if pair[0] == call_id}
        if requests:
            found = f"{call_id}: {_short(str(sorted(map(str, told))))}"
            yield Outcome(f"the result of {tool} names its call and its request", bool(requests & told), found)
        else:
            # a call that never left has an error instead of a result
            yield Outcome(f"{tool} was asked on the bus", bool(call.get("error")), f"no request has the id {call_id}")


def check_responses(checks: Sequence[ResponseCheck], seen: Seen) -> Iterator[Outcome]:
    """The reply and the response.generation on the bus must both fulfil each check."""
    for check in checks:
        for where, response in (("reply", seen.reply), ("response.generation", seen.shown)):
            ok, found = (False, "there is none") if response is None else _response_check(check, response)
            yield Outcome(f"{where}: {check}", ok, found)


def _response_check(check: ResponseCheck, response: dict[str, Any]) -> tuple[bool, str]:
    calls = response.get("tool_calls")
    match check:
        case "thinking_not_empty":
            return bool(str(response.get("thinking") or "").strip()), "thinking is empty"
        case "answer_not_empty":
            return bool(str(response.get("answer") or "").strip()), "the answer is empty"
        case "tool_calls_empty":
            return calls == [], f"tool_calls: {_short(str(calls))}"
        case "tool_calls_not_empty":
            return isinstance(calls, list) and bool(calls), f"tool_calls: {_short(str(calls))}"
        case _:
            assert_never(check)


def _uses_result(turn: Turn, seen: Seen) -> Outcome:
    tool = turn.answer_uses_result_of
    results = [str(call.get("result") or "") for call in seen.calls if call.get("tool") == tool]
    known = _words(turn.query)
    # The tool's own frame around the text would be found in any answer that quotes the URL.
    texts = [result.partition("Extracted text:")[2] or result for result in results]
    shared = (_words(" ".join(texts)) - known) & _words(seen.answer)
    enough = len(shared) >= SHARED_WORDS
    return Outcome(
        f"the answer uses the result of {tool}", enough, f"{counted(len(shared), 'word')} in common: {sorted(shared)}"
    )


def _words(text: str) -> set[str]:
    return {word.casefold() for word in _WORD.findall(text)}


def _critique(check: CritiqueCheck, seen: Seen) -> Outcome:
    scores = [
        p.get("score") for p in seen.payloads(CRITIQUE_RESULT.name) if p.get("response_id") == f"{seen.query_id}:A"
    ]
    good = any(type(score) is int and check.min_score <= score <= check.max_score for score in scores)
    return Outcome(
        f"critique.result with a score from {check.min_score} to {check.max_score}", good, f"scores: {scores}"
    )


def _pairwise(check: PairwiseCheck, seen: Seen) -> Iterator[Outcome]:
    found = seen.pair
    if found is None:
        yield Outcome("pairwise.result on the bus", False, "there is none")
        return
    yield Outcome(f"winner is {', '.join(check.winner)}", found.get("winner") in check.winner, _short(str(found)))
    ids = (found.get("query_id_a"), found.get("query_id_b"))
    wanted = (f"{seen.query_id}:A", f"{seen.query_id}:B")
    yield Outcome("pairwise.result names both responses", ids == wanted, f"ids: {ids}")
    for name in check.fields:
        value = found.get(name)
        if name in ("score_a", "score_b"):
            graded = isinstance(value, int | float) and 1 <= value <= 5
            yield Outcome(f"pairwise.result has {name} from 1 to 5", graded, f"{name}: {value}")
        else:
            yield Outcome(f"pairwise.result has {name}", value not in (None, ""), f"{name}: {value!r}")


def engrams_of(engrams: Iterable[dict[str, Any]], query_id: str) -> list[dict[str, Any]]:
    """Those of one query; an engram's id is its response's."""
    return [e for e in engrams if str(e.get("response_id") or e.get("id") or "").startswith(f"{query_id}:")]


def whole(check: EngramCheck, seen: Seen) -> bool:
    """Whether the engrams are as they should be."""
    return all(outcome.ok for outcome in _engrams(check, seen))


def _engrams(check: EngramCheck, seen: Seen) -> Iterator[Outcome]:
    by_respondent = {str(e.get("respondent_id") or e.get("respondent")): e for e in seen.engrams}
    for respondent in check.respondents:
        engram = by_respondent.get(respondent)
        yield Outcome(f"engram of respondent {respondent}", engram is not None, f"respondents: {sorted(by_respondent)}")
        for name in check.annotated:
            value = (engram or {}).get(name)
            if name == "pairwise_winner":
                verdict = (seen.pair or {}).get("winner")
                won = None if verdict == "tie" else verdict == respondent
                right = verdict is not None and (value, (engram or {}).get("pairwise_verdict")) == (won, verdict)
                yield Outcome(f"engram of {respondent} has the verdict: {_WON[won]}", right, f"{name}: {value}")
            else:
                yield Outcome(
                    f"engram of {respondent} has {name}", value not in (None, ""), f"engram: {_short(str(engram))}"
                )


def _preferences(check: PreferenceCheck, seen: Seen) -> Outcome:
    rows = len(seen.dpo)
    return Outcome(f"{counted(check.dpo, 'row')} of the query in the DPO export", rows == check.dpo, f"rows: {rows}")


def _deliberations(check: DeliberationCheck, seen: Seen) -> Outcome:
    deliberations = seen.reply.get("deliberations") or []
    said = [d for d in deliberations if str(d.get("response") or "").strip()]
    got = {(persona_key(str(d.get("persona"))), d.get("round")) for d in said}
    wanted = {(persona_key(persona), number) for persona in check.personas for number in range(1, check.rounds + 1)}
    return Outcome(f"deliberations of {', '.join(check.personas)}", wanted <= got, f"found: {sorted(map(str, got))}")


def _result_lines(check: ResultLines, seen: Seen) -> Iterator[Outcome]:
    results = [str(call.get("result") or "") for call in seen.calls if call.get("tool") == check.tool]
    yield from _lines(f"{check.tool} tells", check.lines, [line for result in results for line in result.splitlines()])


def _lines(what: str, wanted: Sequence[FactLine], lines: Sequence[str]) -> Iterator[Outcome]:
    for line in wanted:
        texts = ", ".join(line.contains)
        yield Outcome(f"{what} a fact that {line.holds}, with {texts}", says(line, lines), f"lines: {list(lines)}")


def says(wanted: FactLine, lines: Iterable[str]) -> bool:
    """Whether one of the lines has all that is wanted; IS and WAS are words in capitals."""
    mark = re.compile(rf"\b{wanted.holds}\b")
    return any(mark.search(line) and all(folded(part) in folded(line) for part in wanted.contains) for line in lines)


def _runs(events: Sequence[str]) -> str:
    """The events with repetitions counted."""
    out: list[tuple[str, int]] = []
    for event in events:
        out[-1:] = [(event, out[-1][1] + 1)] if out and out[-1][0] == event else [*out[-1:], (event, 1)]
    return " → ".join(name if count == 1 else f"{name}×{count}" for name, count in out) or "none"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _PREVIEW else text[: _PREVIEW - 1] + "…"
