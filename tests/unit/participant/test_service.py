"""The typed message of a delivery, names of replicas, and how wrong settings end a process."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from shared.bus import Delivery
from shared.contracts import QUERY_CANCEL, QueryCancel
from shared.errors import DecodeError, SettingsError
from shared.participant.service import new_replica_name, receive, run_main
from shared.participant.settings import Settings
from shared.telemetry.logging import configure


@asynccontextmanager
async def parked() -> AsyncIterator[None]:
    yield


def delivery(**fields: str) -> Delivery:
    given = {"payload": '{"query_id":"9-1"}', **fields}
    flat = [word.encode() for pair in given.items() for word in pair]
    made = SimpleNamespace(entry_id="5-1", fields=flat, deliveries=2, suspended=parked)
    return cast(Delivery, made)


def test_receive_returns_the_typed_message_of_a_delivery() -> None:
    message = receive(QUERY_CANCEL, delivery(session_id="s", traceparent="trace"))
    assert (message.entry_id, message.payload, message.deliveries) == ("5-1", QueryCancel(query_id="9-1"), 2)
    assert (message.envelope.subject, message.envelope.session_id) == ("query.cancel", "s")
    assert (message.envelope.traceparent, message.suspended) == ("trace", parked)
    with pytest.raises(DecodeError):
        receive(QUERY_CANCEL, delivery(payload="{"))


@pytest.mark.parametrize(("correlation", "query_id"), [("7-0", "7-0"), ("", "5-1")])
def test_message_ids_for_the_log(correlation: str, query_id: str) -> None:
    fields = {"correlation_id": correlation, "session_id": "s", "respondent_id": "B"}
    assert receive(QUERY_CANCEL, delivery(**fields)).envelope.ids() == {
        "query_id": query_id, "session_id": "s", "respondent_id": "B",
    }  # fmt: skip


def test_replica_names_have_host_and_process_and_differ() -> None:
    names = {new_replica_name() for _ in range(20)}
    assert len(names) == 20
    form = rf"{re.escape(socket.gethostname())}-{os.getpid()}-[0-9a-f]{{6}}"
    assert all(re.fullmatch(form, name) for name in names)


def test_main_prints_every_wrong_setting_and_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    async def fails(_settings: Settings, stop: asyncio.Event) -> None:
        assert not stop.is_set()
        # a failure that no task waits for is logged
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)
        raise ExceptionGroup("all", [SettingsError("one"), ExceptionGroup("more", [SettingsError("two")])])

    try:
        with pytest.raises(SystemExit) as ended:
            run_main(fails, "probe", Settings)
    finally:
        configure("warning", "json")
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-2:] == ["local2: one", "local2: two"]
    assert "background.unhandled" in err
