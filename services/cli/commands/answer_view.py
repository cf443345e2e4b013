"""What a person sees of a query while it runs: thinking, tool calls, the answer as it is written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from services.cli.sse import Event
from services.cli.terminal import Terminal
from services.cli.words import counted, printable

PREVIEW = 200


@dataclass(slots=True)
class _Piece:
    entry: tuple[int, int]
    text: str


@dataclass(slots=True)
class AnswerView:
    """Feed it events; `outcome` is the terminal one. Nothing is printed when `console` is None."""

    console: Terminal | None
    thinking: bool = True
    outcome: Event | None = None
    _answer: list[_Piece] = field(default_factory=list)
    _notices: set[str] = field(default_factory=set)
    _mode: str = ""
    _at_line_start: bool = True

    @property
    def answer(self) -> str:
        """The answer's text so far, without what a restart made void."""
        return "".join(piece.text for piece in self._answer)

    def show(self, event: Event) -> None:
        data = event.data
        match event.type:
            case "thinking" | "answer" if "persona" in data:
                # what a member says is shown when it has said it: several may speak at once
                pass
            case "thinking":
                if self.thinking:
                    self._write("thinking", str(data.get("text", "")), "dim italic")
            case "answer":
                text = str(data.get("text", ""))
                self._answer.append(_Piece(entry_order(event.id), text))
                self._write("answer", text, "")
            case "tool.request":
                self._line(f"→ {data.get('tool')} {_short(data.get('args') or {})}", "cyan")
            case "tool.result":
                self._line(*_result_line(data))
            case "restarted" if "persona" not in data:
                after = entry_order(str(data.get("discard_after") or "0-0"))
                self._answer = [piece for piece in self._answer if piece.entry <= after]
                self._line("↻ started again by another replica; the unfinished text above is void", "yellow")
                if self.answer:
                    self._write("answer", self.answer, "")
            case "notice":
                self._notice(f"· {data.get('text') or data.get('message') or _short(data)}")
            case "context.truncated":
                self._line(f"· {_cut(data)}", "yellow")
            case "persona.working":
                self._line(f"· {_seat(data)} deliberates", "magenta")
            case "persona.done":
                self._line(f"· {_seat(data)}: {data.get('response') or ''}", "magenta")
            case "completed":
                self.outcome = event
                self._complete(str(data.get("answer", "")))
            case "failed" | "cancelled":
                self.outcome = event
                self._break()

    def note(self, text: str) -> None:
        """A remark of the command itself, on a line of its own."""
        self._line(text, "yellow")

    def _notice(self, text: str) -> None:
        # Every attempt of a model call says the same again.
        if text not in self._notices:
            self._notices.add(text)
            self._line(text, "yellow")

    def _complete(self, answer: str) -> None:
        # The end is what counts: a part that never came as a delta is shown now.
        if answer.strip() and not self.answer.rstrip().endswith(answer.strip()):
            self._break()
            self._write("answer", answer, "")
        self._break()

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


def entry_order(entry_id: str) -> tuple[int, int]:
    """A stream entry id as numbers; what is not one comes first."""
    high, _, low = entry_id.partition("-")
    return (int(high), int(low or 0)) if high.isdigit() and (low or "0").isdigit() else (0, 0)


def _result_line(data: dict[str, Any]) -> tuple[str, str]:
    took = f" ({data['duration_ms']} ms)" if data.get("duration_ms") is not None else ""
    if data.get("error"):
        return f"← {data.get('tool')}{took}: {_short(data['error'])}", "red"
    return f"← {data.get('tool')}{took}: {_short(data.get('result') or '')}", "dim cyan"


def _cut(data: dict[str, Any]) -> str:
    """Return a sentence about turns and images that no longer fit the model's context."""
    names = ", ".join(str(file.get("name", "a file")) for file in data.get("attachments") or ())
    images = f"images of earlier messages: {names}" if names else ""
    turns = counted(dropped, "oldest turn") if (dropped := data.get("dropped_turns")) else ""
    return f"the conversation no longer fits the model's context; left out: {', '.join(filter(None, (turns, images)))}"


def _seat(data: dict[str, Any]) -> str:
    """A member of a committee and its round."""
    return f"{data.get('persona')}, round {data.get('round')}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= PREVIEW else text[: PREVIEW - 1] + "…"
