"""The conversation before a question in the model's form: for an answer, and for `GET /sessions/{id}`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.generator.compaction import Past
from services.generator.context import Conversation, Message, Rates
from services.generator.earlier import Earlier, Loader, in_summary
from services.generator.settings import GeneratorSettings
from shared.records.sessions import Turn


@dataclass(frozen=True, slots=True)
class Instructions:
    """The system prompt beside the operator's part. own: the conversation's instructions. note: on a low grade."""

    date_line: str
    own: str = ""
    note: str = ""

    def prompt(self, operators: str) -> str:
        """Return the system prompt of an answer; members of a committee have their own."""
        return "\n\n".join(part for part in (operators, self.own, self.date_line, self.note) if part)


async def of_session(
    settings: GeneratorSettings, prompt: str, past: Past, loader: Callable[[], Awaitable[Loader]]
) -> tuple[Conversation, Earlier]:
    """Return the conversation of a session, and its files. loader: called only if the session has files."""
    limit = settings.history_turns
    recent = past.after[-limit:] if limit else []
    rates = Rates()
    if recent:
        rates = Rates(recent[-1].ratio or rates.ratio, recent[-1].image_tokens or rates.image)
    attached = _attachments(past, recent)
    earlier = await (await loader()).load(attached, rates) if attached else Earlier()
    conversation = Conversation([{"role": "system", "content": prompt}], [_messages(turn, earlier) for turn in recent])
    conversation.names = [turn.query_id for turn in recent]
    conversation.rates = rates
    if limit and (summary := past.summary) is not None:
        files = [
            in_summary(earlier.files[str(one["id"])], earlier.forms[str(one["id"])]) for one in summary.attachments
        ]
        conversation.system.append(summary.message([file.line for file in files]))
        conversation.unseen = [file for file in files if file.left_out]
        conversation.summarised, conversation.until = summary.turns, summary.until
    return conversation, earlier


def _messages(turn: Turn, earlier: Earlier) -> list[Message]:
    said: list[Message] = list(turn.messages())
    if turn.attachments:
        said[0] = {**said[0], "files": earlier.of(turn.attachments)}
    return said


def _attachments(past: Past, turns: Sequence[Turn]) -> list[Any]:
    """Return the files of these turns and of the summarised ones, newest first."""
    summarised = past.summary.attachments if past.summary is not None else ()
    return [*(file for turn in reversed(turns) for file in turn.attachments), *reversed(summarised)]
