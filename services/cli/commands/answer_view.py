"""A query in the terminal while it runs: thinking, tool calls, and the answer as it is written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from services.cli.sse import Event
from services.cli.terminal import Terminal
from services.cli.words import counted, printable
from shared.records import events
from shared.records.events import EntryType, decode
from shared.records.response_state import EMPTY, ResponseState, apply

PREVIEW = 200


@dataclass(slots=True)
class AnswerView:
    """Print what each event adds to the state of the response. `outcome` is the terminal event.

    Nothing is printed if `console` is None.
    """

    console: Terminal | None
    thinking: bool = True
    outcome: Event | None = None
    _state: ResponseState = EMPTY
    _mode: str = ""
    _at_line_start: bool = True

    @property
    def answer(self) -> str:
        """The valid text of the answer so far, with the text before tool calls."""
        return "".join(text.text for text in self._state.texts(EntryType.ANSWER))

    def show(self, event: Event) -> None:
        entry = decode(event.id, event.type, 0, event.data)
        before, self._state = self._state, apply(self._state, entry)
        # A member's text is shown when it is whole: several may speak at once.
        match entry.event:
            case events.ThinkingPiece(text=text, speaker=None) if self.thinking:
                self._write("thinking", text, "dim italic")
            case events.AnswerPiece(text=text, speaker=None):
                self._write("answer", text, "")
            case events.ToolAsked() as call:
                self._line(f"→ {call.tool} {_short(call.args)}", "cyan")
            case events.ToolAnswered() as call:
                self._line(*_result_line(call))
            case events.Restarted(speaker=None):
                self._line("↻ started again by another replica; the unfinished text above is void", "yellow")
                self._write("answer", self.answer, "")
            # Every attempt of a model call writes the same notice.
            case events.Noticed() as new if new.message not in {one.message for one in before.events(events.Noticed)}:
                self._line(f"· {new.message or new.code}", "yellow")
            case events.Truncated() as cut:
                self._line(f"· {_cut(cut)}", "yellow")
            case events.PersonaWorking() as member:
                self._line(f"· {member.persona}, round {member.round} deliberates", "magenta")
            case events.PersonaDone() as member:
                self._line(f"· {member.persona}, round {member.round}: {member.response}", "magenta")
            case events.Completed(answer=answer) if not self.answer.rstrip().endswith(answer.strip()):
                # A part that no event had is shown at the end.
                self._break()
                self._write("answer", answer, "")
            case _:
                pass
        if self._state.end is not None and self.outcome is None:
            self.outcome = event
            self._break()

    def note(self, text: str) -> None:
        """A remark of the command itself, on a line of its own."""
        self._line(text, "yellow")

    def _write(self, mode: str, text: str, style: str) -> None:
        if self.console is None or not text:
            return
        if mode != self._mode:
            self._break()
            self._mode = mode
        # Text, not markup: what a model writes between brackets is not for rich to interpret.
        self.console.print(Text(printable(text), style=style), end="")
        self._at_line_start = text.endswith("\n")

    def _line(self, text: str, style: str) -> None:
        if self.console is None:
            return
        self._break()
        self.console.print(Text(printable(text), style=style))

    def _break(self) -> None:
        if self.console is not None and not self._at_line_start:
            self.console.print()
        self._at_line_start = True
        self._mode = ""


def _result_line(call: events.ToolAnswered) -> tuple[str, str]:
    head = f"← {call.tool} ({call.duration_ms} ms): "
    return (head + _short(call.error), "red") if call.error else (head + _short(call.result), "dim cyan")


def _cut(cut: events.Truncated) -> str:
    """Return a sentence about turns and images that no longer fit the model's context."""
    names = ", ".join(image.name or "a file" for image in cut.attachments)
    images = f"images of earlier messages: {names}" if names else ""
    turns = counted(cut.dropped_turns, "oldest turn") if cut.dropped_turns else ""
    return f"the conversation no longer fits the model's context; left out: {', '.join(filter(None, (turns, images)))}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= PREVIEW else text[: PREVIEW - 1] + "…"
