"""Preference data as trainers load it: rows of the conversational formats that TRL documents.

dpo: `prompt`, `chosen`, `rejected`. kto: `prompt`, `completion`, `label`. critiques: `prompt`, `completion` (the
judge's words) with its `score`, where the prompt is what the judge read. Messages are `{role, content}`. Calls of tools
stand behind the question, as messages with `tool_calls` and of the role `tool`: they are part of the prompt, so that
the answer alone is trained. Every row of a file has the same columns. Where several judge, a row is what they come to;
`provenance.judges` is what each said, as JSON in a text (empty where one judged alone).

Source: TRL documentation, "Dataset formats and types" (preference and unpaired preference, conversational, with tools).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import orjson

Format = Literal["dpo", "kto", "critiques"]
Tools = Literal["include", "leave-out"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Filters:
    """min_margin: least difference of the two grades (dpo), or distance of a grade or vote from the middle (kto).

    human_only: dpo keeps verdicts that a person's vote on one of the answers bears out; kto and critiques keep votes
    and what was voted on. since, until: of the answer, in ms. consent: only users who agreed to training on their data;
    who refused it is left out in any case. test_share: part of the sessions that is marked `test`. tools: what becomes
    of answers that were given with tools.
    """

    min_margin: float = 0.0
    human_only: bool = False
    since: int | None = None
    until: int | None = None
    consent: bool = False
    test_share: float = 0.0
    tools: Tools = "include"

    def refusal(self, answer: Mapping[str, Any], consents: Mapping[str, bool]) -> str | None:
        """Why an answer may not be used; None when it may."""
        agreed = consents.get(answer["user_id"])
        if agreed is False:
            return "of users who refused training"
        if self.consent and agreed is None:
            return "of users who have not agreed to training"
        early = self.since is not None and answer["time"] < self.since
        return (
            "not of the time asked for" if early or (self.until is not None and answer["time"] >= self.until) else None
        )

    def incomplete(self, answer: Mapping[str, Any]) -> str | None:
        """Why an answer's prompt is not wanted or cannot be given whole; None when it can. An answer to less than the
        model read would teach it to invent."""
        if answer["tools"] and self.tools == "leave-out":
            return "with tool calls"
        if answer["material"]:
            return "to files or passages, which are not kept"
        return "with tool calls that are not kept" if answer["tools"] and not answer["calls"] else None

    def split(self, session_id: str) -> str:
        """A session is in one part as a whole."""
        place = int.from_bytes(sha256(session_id.encode()).digest()[:8]) / 2**64
        return "test" if place < self.test_share else "train"


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _prompt(answer: Mapping[str, Any]) -> list[Row]:
    """All that the model had read when it gave the answer."""
    return [*orjson.loads(answer["messages"]), *(orjson.loads(answer["calls"]) if answer["calls"] else ())]


def _row(answer: Mapping[str, Any], filters: Filters, content: Row, provenance: Row) -> Row:
    """Columns in a fixed order, each of one type in every row: a loader takes the types from the first ones, so that a
    number which only some rows have is 0 elsewhere, and a column beside it says whether it is there."""
    return {
        **content,
        "split": filters.split(answer["session_id"]),
        "provenance": {
            "query_id": answer["query_id"],
            "session_id": answer["session_id"],
            "intent": answer["intent"],
            "time": answer["time"],
            **provenance,
        },
    }


# How many were left out for which reason; a row function counts into it.
LeftOut = Counter[str]


def dpo_rows(
    pairs: Iterable[Mapping[str, Any]], consents: Mapping[str, bool], filters: Filters, left_out: LeftOut | None = None
) -> Iterator[Row]:
    """`pairs`: verdicts with both answers (`a`, `b`) and the votes on them (`vote_a`, `vote_b`, None without)."""
    left_out = Counter() if left_out is None else left_out
    for pair in pairs:
        a, b = pair["a"], pair["b"]
        if pair["winner"] == "tie":
            left_out["ties"] += 1
            continue
        reason = filters.refusal(a, consents) or filters.incomplete(a) or filters.incomplete(b)
        if reason is None and a["calls"] != b["calls"]:
            reason = "of which the two called other tools or were told something else by them"
        if reason is not None:
            left_out[reason] += 1
            continue
        if a["answer"].strip() == b["answer"].strip():
            left_out["of two answers that are the same"] += 1
            continue
        chosen, rejected = (a, b) if pair["winner"] == "A" else (b, a)
        vote_chosen, vote_rejected = (
            (pair["vote_a"], pair["vote_b"]) if pair["winner"] == "A" else (pair["vote_b"], pair["vote_a"])
        )
        against = (vote_chosen is not None and vote_chosen < 0) or (vote_rejected is not None and vote_rejected > 0)
        borne_out = (vote_chosen is not None and vote_chosen > 0) or (vote_rejected is not None and vote_rejected < 0)
        if against or (filters.human_only and not borne_out):
            left_out["contradicted by a vote" if against else "that no vote bears out"] += 1
            continue
        margin = _margin(pair)
        if filters.min_margin > 0 and (margin is None or margin < filters.min_margin):
            left_out["with too small a margin of grades"] += 1
            continue
        yield _row(
            a,
            filters,
            {"prompt": _prompt(a), "chosen": _said(chosen["answer"]), "rejected": _said(rejected["answer"])},
            {
                "source": "judge and person" if borne_out else "judge",
                "judges": pair["judges"],
                "graded": margin is not None,
                "margin": margin or 0.0,
                # each respondent goes on from its own answers: in a longer conversation the two had different ones
                "same_prompt": a["messages"] == b["messages"],
                "chosen_config": chosen["config"],
                "rejected_config": rejected["config"],
                "chosen_id": chosen["response_id"],
                "rejected_id": rejected["response_id"],
            },
        )


def _margin(pair: Mapping[str, Any]) -> float | None:
    """By how much the winner's grade exceeds the loser's; None when one has none."""
    if pair["score_a"] is None or pair["score_b"] is None:
        return None
    difference = float(pair["score_a"]) - float(pair["score_b"])
    return difference if pair["winner"] == "A" else -difference


def kto_rows(
    answers: Iterable[Mapping[str, Any]],
    consents: Mapping[str, bool],
    filters: Filters,
    left_out: LeftOut | None = None,
) -> Iterator[Row]:
    """`answers`: answers with their `vote` and `score`, None where there is none. A person's vote outweighs a grade."""
    left_out = Counter() if left_out is None else left_out
    for answer in answers:
        vote, score = answer["vote"], answer["score"]
        if vote is not None and vote != 0:
            value, source = float(vote), "person"
        elif not filters.human_only and score is not None and score != 3:
            # a grade of 1 to 5 on the scale of a vote
            value, source = (score - 3) / 2, "judge"
        else:
            left_out["that no vote bears out" if filters.human_only else "that are neither good nor bad"] += 1
            continue
        if (reason := filters.refusal(answer, consents) or filters.incomplete(answer)) is not None:
            left_out[reason] += 1
            continue
        if abs(value) * 2 < filters.min_margin:
            left_out["with too small a margin"] += 1
            continue
        yield _row(
            answer,
            filters,
            {"prompt": _prompt(answer), "completion": _said(answer["answer"]), "label": value > 0},
            {
                "source": source,
                "judges": answer["judges"],
                "value": value,
                "config": answer["config"],
                "response_id": answer["response_id"],
            },
        )


def critique_rows(
    answers: Iterable[Mapping[str, Any]],
    consents: Mapping[str, bool],
    filters: Filters,
    left_out: LeftOut | None = None,
) -> Iterator[Row]:
    """`answers`: graded answers with `score`, `feedback`, `rubric`, `judged` (what the judge read) and `vote` (None
    without)."""
    left_out = Counter() if left_out is None else left_out
    for answer in answers:
        reason = "without a grade" if answer["score"] is None else filters.refusal(answer, consents)
        if reason is None and filters.human_only and answer["vote"] is None:
            reason = "that nobody voted on"
        if reason is None and abs(answer["score"] - 3) < filters.min_margin:
            reason = "with too small a margin"
        if reason is None and answer["tools"] and filters.tools == "leave-out":
            reason = "with tool calls"
        if reason is None and not answer["judged"]:
            reason = "of which it is not kept what the judge read"
        if reason is not None:
            left_out[reason] += 1
            continue
        yield _row(
            answer,
            filters,
            {
                "prompt": orjson.loads(answer["judged"]),
                "completion": _said(f"{answer['feedback']} [RESULT] {answer['score']}"),
                "score": int(answer["score"]),
            },
            {
                "source": "judge",
                "judges": answer["judges"],
                "rubric": answer["rubric"],
                "voted": answer["vote"] is not None,
                "vote": float(answer["vote"] or 0),
                "config": answer["config"],
                "response_id": answer["response_id"],
            },
        )


def row_digest(row: Row) -> bytes:
    """The same for rows of the same content, whatever their origin: duplicates are found by it."""
    content = {name: value for name, value in row.items() if name not in ("split", "provenance")}
    return sha256(orjson.dumps(_normalised(content))).digest()


def _normalised(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, list):
        return [_normalised(item) for item in value]
    if isinstance(value, dict):
        return {name: _normalised(item) for name, item in value.items()}
    return value


def nothing_because(kind: Format, left_out: LeftOut) -> str:
    """Why an export has no rows, as a sentence."""
    of = "verdicts" if kind == "dpo" else "answers with a grade or a vote"
    if not left_out:
        need = {
            "dpo": "a second respondent (`--respondent-b`) and a critic have to run, and both respondents answer",
            "kto": "a critic has to run, or people have to vote",
            "critiques": "a critic has to run",
        }[kind]
        return f"no rows: there are no {of} yet; {need}"
    told = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
    return f"no rows: of {left_out.total()} {of} all are left out: {told}"
