"""Runs of the generator for unit tests: what a run may use, with stand-ins for what a test does not touch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from services.generator.response_run import ResponseRun, RunDeps
from shared.participant.tool_client import Caller


def deps_of(context: Any, **given: Any) -> RunDeps:
    """Return dependencies. given: those that the test uses."""
    fields = {
        name: given.get(name) for name in ("model", "tools", "sessions", "session_queues", "background_model", "files")
    }
    return RunDeps(cast(Any, context), **cast(Any, fields))


def run_of(
    deps: RunDeps, writer: Any, caller: Caller, *, message: Any = None, transitions_left: int = 0, **query: Any
) -> ResponseRun:
    """Return a run that writes to `writer`."""
    if message is None:
        payload = SimpleNamespace(**{"query": "What is new?", "attachments": None, **query})
        message = SimpleNamespace(entry_id=caller.query_id, payload=payload, deliveries=1)
    return ResponseRun(deps, message, caller, deps.model, writer, transitions_left=transitions_left)
