"""current_time: the time of day. The prompt leaves it out to keep the model server's prompt cache valid."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from services.memory.settings import MemorySettings
from shared.contracts import ToolRequest
from shared.envelope import now_ms
from shared.errors import ToolError
from shared.participant.service import Context
from shared.participant.tool import Tool, ToolResult
from shared.zones import clock_line, first_zone, local_time, zone_name


class CurrentTime(BaseModel):
    """Get the current time of day, with weekday and date. Call it whenever an answer depends on the time ("what time is
    it?", "how many hours until six o'clock?", "is it too late to call my mother?"), also for the time elsewhere ("what
    time is it in Tokyo?")."""

    model_config = ConfigDict(str_strip_whitespace=True)

    zone: str = Field(
        default="", description="IANA time zone, for example Asia/Tokyo; left out: the zone where the user is"
    )


def current_time(args: CurrentTime, ms: int, usual: str) -> ToolResult:
    """Return the local time of a moment (ms since the epoch). usual: the zone for a call that names none. Raises
    ToolError for an unknown zone."""
    try:
        zone = zone_name(args.zone) if args.zone else usual
    except ValueError as exc:
        raise ToolError(str(exc)) from exc
    return ToolResult(clock_line(ms, zone), {"time": local_time(ms, zone).isoformat(timespec="seconds"), "zone": zone})


def clock(context: Context[MemorySettings]) -> Tool[CurrentTime]:
    """Return the tool with the clock of this machine."""

    async def run(args: CurrentTime, request: ToolRequest) -> ToolResult:
        return current_time(args, now_ms(), first_zone(request.time_zone, context.settings.zone))

    return Tool("current_time", CurrentTime, run)
