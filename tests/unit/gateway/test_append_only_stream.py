"""The agent's own steps, told to a client that cannot take anything back."""

from __future__ import annotations

import orjson

from services.gateway.openai.append_only_stream import AppendOnlyStream, TextDelta
from shared.records.journal import EntryType, JournalEntry


def entry(number: int, kind: EntryType, **data: object) -> JournalEntry:
    return JournalEntry(f"1-{number}", kind, 0, orjson.dumps(data))


def thoughts(*entries: JournalEntry, steps: bool = True) -> str:
    telling = AppendOnlyStream(steps=steps)
    told = [said for one in entries for said in telling.take(one)]
    return "".join(said.text for said in told if isinstance(said, TextDelta) and said.kind == "thinking")


def test_a_step_stands_between_the_thoughts_before_and_after_it() -> None:
    story = (
        entry(1, EntryType.THINKING, text="I should look."),
        entry(2, EntryType.MESSAGE, tool_calls=[{"id": "1"}]),
        entry(3, EntryType.TOOL_REQUEST, tool="web_search", args={"query": "x"}),
        entry(4, EntryType.TOOL_REQUEST, tool="web_fetch", args={"url": "y"}),
        entry(5, EntryType.THINKING, text="Now I know."),
    )
    told = 'I should look.\n\nweb_search {"query":"x"}\n\nweb_fetch {"url":"y"}\n\nNow I know.'
    assert thoughts(*story) == told
    assert thoughts(*story, steps=False) == "I should look.\n\nNow I know."


def test_a_step_of_a_committee_member_is_not_told_and_a_long_one_is_cut() -> None:
    assert thoughts(entry(1, EntryType.TOOL_REQUEST, tool="x", args={}, persona="Skeptic")) == ""
    long = thoughts(entry(1, EntryType.TOOL_REQUEST, tool="save_memory", args={"content": "y" * 5_000}))
    assert (len(long), long[-1]) == (len("save_memory ") + 201, "…")
    # what was written by somebody else is told as it is
    assert thoughts(entry(1, EntryType.TOOL_REQUEST)) == "None {}"
