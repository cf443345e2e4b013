"""`local2 leaderboard` and `local2 export dpo|kto|critiques`: what judge and people prefer, and the data behind it."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import httpx
import typer
from rich.table import Table
from rich.text import Text

from services.cli.api import Api, ApiError, unreachable
from services.cli.commands.operate import AsJson, export, print_json, with_api
from services.cli.local_files import whole_file
from services.cli.settings import ClientSettings
from services.cli.terminal import console, errors
from services.cli.words import counted, printable

_BAR = 24


def leaderboard(
    intent: Annotated[str | None, typer.Option("--intent", help="Only turns of this kind")] = None,
    as_json: AsJson = False,
) -> None:
    """Configurations ranked by the judge's comparisons, and by people's votes."""
    board = with_api(lambda api: api.get("/preferences/leaderboard"))
    if as_json:
        print_json(board)
        return
    shown = board
    if intent is not None:
        if intent not in board["intents"]:
            there = ", ".join(board["intents"]) or "none yet"
            errors.print(f"nothing was compared or rated for {intent!r}; there is: {there}")
            raise typer.Exit(1)
        shown = board["intents"][intent]
    _ranking("By the judge", shown["judge"])
    judge = shown["judge"]
    if judge["disagreement"] is not None:
        console.print(
            f"the two orders disagree in {judge['disagreement']:.0%} of {counted(judge['comparisons'], 'comparison')}; "
            f"standing first is worth {judge['bias']:+.2f} [{judge['bias_low']:+.2f}, {judge['bias_high']:+.2f}]",
        )  # fmt: skip
    _ranking("By people", shown["people"])
    agreed = board["agreement"]
    if intent is None and agreed["share"] is not None:
        beyond = "" if agreed["kappa"] is None else f", kappa {agreed['kappa']:.2f}"
        console.print(
            f"judge and people agree on {agreed['share']:.0%} of {counted(agreed['cases'], 'answer')}{beyond}"
        )


def judge(as_json: AsJson = False) -> None:
    """Whether the judge can be trusted: its agreement with people, and what leads it besides the answers."""
    found = with_api(lambda api: api.get("/preferences/judge"))
    if as_json:
        print_json(found)
        return
    _figures(f"The judge: {found['judge'] or 'none is there'}", found)
    for one in found["judges"]:
        _figures(f"{one['judge']} by itself", one)


def _figures(title: str, found: dict[str, Any]) -> None:
    table = Table("", "", "95 %", "cases", title=printable(title), title_justify="left")
    for name, what, form in (
        ("agreement", "agreement with people's votes (kappa)", "+.2f"),
        ("disagreement", "another winner when the answers change places", ".0%"),
        ("first_wins", "… and then the one that stands first", ".0%"),
        ("length", "pull of length (log-odds by log of the ratio)", "+.2f"),
        ("own_model", "verdicts won by the judge's own model", ".0%"),
        ("unread", "grades that could not be had or read", ".0%"),
    ):
        row = found[name]
        value, low, high = ("-" if row[key] is None else format(row[key], form) for key in ("value", "low", "high"))
        table.add_row(what, value, f"{low} – {high}" if row["value"] is not None else "", str(row["cases"]))
    console.print(table)
    for warning in found["warnings"]:
        console.print(f"note: {printable(warning)}")


def _ranking(title: str, ranking: dict[str, Any]) -> None:
    if not ranking["rows"]:
        console.print(f"{title}: nothing to rank yet")
        return
    for group in range(1, ranking["groups"] + 1):
        place = f"{title}, group {group} of {ranking['groups']}" if ranking["groups"] > 1 else title
        table = Table("configuration", "win rate", "", "95 %", "won", "tied", "lost", title=place, title_justify="left")
        for row in ranking["rows"]:
            if row["group"] == group:
                table.add_row(
                    Text(row["name"]),
                    f"{row['win_rate']:.0%}",
                    bar(row["win_rate"], row["win_rate_low"], row["win_rate_high"]),
                    f"{row['win_rate_low']:.0%} – {row['win_rate_high']:.0%}",
                    str(row["wins"]), str(row["ties"]), str(row["losses"]),
                )  # fmt: skip
        console.print(table)
    if ranking["note"] is not None:
        console.print(ranking["note"])


def bar(value: float, low: float, high: float) -> Text:
    """A bar up to the value, with its interval in front of and behind its end."""
    cells = [
        "█"
        if (n + 0.5) / _BAR <= low
        else "▓"
        if (n + 0.5) / _BAR <= value
        else "░"
        if (n + 0.5) / _BAR <= high
        else " "
        for n in range(_BAR)
    ]
    return Text("".join(cells))


Out = Annotated[Path | None, typer.Option("--out", "-o", help="A file; default: standard output")]
Margin = Annotated[float, typer.Option("--min-margin", min=0, max=4, help="Least difference of the grades")]
Human = Annotated[bool, typer.Option("--human-only", help="Only what a person's vote bears out")]
Consented = Annotated[bool, typer.Option("--consented", help="Only users who agreed to training")]
Since = Annotated[datetime | None, typer.Option("--since", help="Answers from then on (UTC)")]
Until = Annotated[datetime | None, typer.Option("--until", help="Answers before then (UTC)")]
Share = Annotated[float, typer.Option("--test-share", min=0, max=1, help="Part of the sessions marked `test`")]
Tools = Annotated[
    Literal["include", "leave-out"],
    typer.Option("--tools", help="Answers that were given with tools: with their calls"),
]


def _export_of(kind: str, about: str) -> None:
    """The command of one format; all have the same options."""

    @export.command(kind, help=about)
    def write(
        out: Out = None,
        min_margin: Margin = 0,
        human_only: Human = False,
        since: Since = None,
        until: Until = None,
        consented: Consented = False,
        test_share: Share = 0,
        tools: Tools = "include",
    ) -> None:
        params = {"format": kind, "min_margin": min_margin, "human_only": human_only, "consented": consented,
                  "test_share": test_share, "tools": tools, "since": _ms(since), "until": _ms(until)}  # fmt: skip
        _write({name: value for name, value in params.items() if value is not None}, out)


_export_of("dpo", "Pairs of a chosen and a rejected answer, for DPO trainers.")
_export_of("kto", "Answers labelled good or bad, for KTO trainers.")
_export_of("critiques", "Answers with the judge's words and grade.")


def _write(params: dict[str, Any], out: Path | None) -> None:
    if out is None:
        _, why = asyncio.run(_download(params, sys.stdout.buffer))
    else:
        with whole_file(out) as file:
            rows, why = asyncio.run(_download(params, file))
        errors.print(f"{counted(rows, 'row')} in {out}")
    if why:
        errors.print(printable(why))


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.replace(tzinfo=UTC).timestamp() * 1000)


async def _download(params: dict[str, Any], file: BinaryIO) -> tuple[int, str]:
    """The number of rows written, and why there are none. Raises ApiError."""
    count, why = 0, ""
    async with Api(ClientSettings.load("cli")) as api:
        try:
            async with api.http.stream("GET", "/preferences/export", params=params) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise api.refusal(answer)
                why = answer.headers.get("X-No-Rows", "")
                async for piece in answer.aiter_bytes():
                    count += piece.count(b"\n")
                    file.write(piece)
        except httpx.RemoteProtocolError as exc:
            raise ApiError("incomplete", "the export broke off; nothing of it should be used: try again") from exc
        except httpx.HTTPError as exc:
            raise unreachable(api.base_url, exc) from exc
    file.flush()
    return count, why
