"""`local2 run`: its options."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands.doctor import configured_redis
from services.cli.launch.plan import RunOptions
from services.cli.launch.run import Run
from services.cli.settings import ClientSettings


def run(
    model: Annotated[str | None, typer.Option(help="The generator's model (LOCAL2_MODEL, gemma4:e4b)")] = None,
    respondent_b: Annotated[bool, typer.Option("--respondent-b", help="Runs the second respondent too")] = False,
    model_b: Annotated[str | None, typer.Option(help="Its model (default: the generator's)")] = None,
    temperature_b: Annotated[float, typer.Option(min=0, max=2, help="Its sampling temperature")] = 0.5,
    api_port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Port of the HTTP API (default: LOCAL2_API_PORT, 8765)")
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            help="searxng, brave, tavily or mock (default: LOCAL2_WEB_SEARCH_PROVIDER, else SearXNG if it answers, "
            "else Brave or Tavily if its key is set)"
        ),
    ] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Plain lines, for logs and other programs")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of everything kept (LOCAL2_DATA_DIR, .local2)")] = None,
) -> None:
    """Run the whole stack on this machine until Ctrl-C."""
    if search not in (None, "searxng", "brave", "tavily", "mock"):
        raise typer.BadParameter("searxng, brave, tavily or mock", param_hint="--search")
    given = {"api_port": api_port, "data_dir": data_dir}
    client = ClientSettings.load("cli", {name: value for name, value in given.items() if value is not None})
    options = RunOptions(
        data_dir=client.data_dir,
        api_host=client.api_host,
        api_port=client.api_port,
        model=model,
        respondent_b=respondent_b,
        model_b=model_b,
        temperature_b=temperature_b,
        search=search,
        headless=headless,
    )
    asyncio.run(Run(options, client, configured_redis(client)).until_stopped())
