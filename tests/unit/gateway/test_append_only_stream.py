"""The agent's own steps, told to a client that cannot take anything back."""

from __future__ import annotations

from hypothesis import given
from support.entries import whole
from support.runs import UNDISTURBED, Life, Plan, journal_of, lives, plans

from services.gateway.openai.append_only_stream import AppendOnlyStream, TextDelta
from shared.records.events import Entry, EntryType, decode


def entry(number: int, kind: EntryType, **data: object) -> Entry:
    return decode(f"1-{number}", kind, 0, whole(kind, data))


def thoughts(*entries: Entry, steps: bool = True) -> str:
    telling = AppendOnlyStream(steps=steps)
    told = [said for one in entries for said in telling.take(one)]
    return "".join(said.text for said in told if isinstance(said, TextDelta) and said.kind == "thinking")


def test_a_step_stands_between_the_thoughts_before_and_after_it() -> None:
    story = (
        entry(1, EntryType.THINKING, text="I should look."),
        entry(2, EntryType.MESSAGE, tool_calls=[{"id": "1", "name": "web_search", "args": {}}]),
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


def answer(*entries: Entry) -> list[str]:
    telling = AppendOnlyStream()
    told = [said for one in entries for said in telling.take(one)]
    return [said.text for said in told if isinstance(said, TextDelta) and said.kind == "answer"]


def piece(number: int, text: str) -> Entry:
    return entry(number, EntryType.ANSWER, text=text)


def restarted(number: int, after: str = "1-0") -> Entry:
    return entry(number, EntryType.RESTARTED, discard_after=after)


def test_text_of_a_second_restart_is_compared_with_all_that_was_sent() -> None:
    first, second = [piece(1, "one two "), piece(2, "three ")], [restarted(3), piece(4, "one ")]
    third = [restarted(5), piece(6, "one two "), piece(7, "three four")]
    assert answer(*first, *second, *third) == ["one two ", "three ", "four"]


def test_other_text_after_a_restart_is_a_paragraph_of_its_own() -> None:
    entries = [
        piece(1, "kept "),
        piece(2, "void"),
        restarted(3, "1-1"),
        piece(4, "vo"),
        piece(5, "lume"),
        piece(6, "s"),
    ]
    assert answer(*entries) == ["kept ", "void", "\n\nvolume", "s"]


def test_shorter_text_after_a_restart_is_followed_by_the_next_message() -> None:
    entries = [piece(1, "one two"), restarted(2), piece(3, "one"), entry(4, EntryType.MESSAGE), piece(5, "next")]
    assert answer(*entries) == ["one two", "next"]


@given(plan=plans, owners=lives)
def test_takeovers_at_any_entry_send_the_same_text_when_the_model_says_the_same(plan: Plan, owners: list[Life]) -> None:
    def sent(owners: list[Life]) -> tuple[str, str]:
        journal = [entry.typed() for entry in journal_of(plan, owners)]
        return thoughts(*journal), "".join(answer(*journal))

    assert sent(owners) == sent(UNDISTURBED)
