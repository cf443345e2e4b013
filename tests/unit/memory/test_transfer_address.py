"""Under which of its addresses memory is reached by those who read documents from it."""

from __future__ import annotations

import socket

import pytest

from services.memory.transfer import towards


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://user:p%40ss@127.0.0.1/",
        "redis+cluster://127.0.0.1:7000,[::1]:7001,[::2]:7002/",
        "redis+sentinel://:secret@127.0.0.1,sentinel-2/mymaster/0",
    ],
)
def test_it_is_the_one_that_leads_to_the_bus_whatever_form_its_url_has(url: str) -> None:
    assert towards(url) == "127.0.0.1"


# no resolver is asked for such a name
@pytest.mark.parametrize("url", ["redis://a..b", "redis+cluster://a..b,127.0.0.1/"])
def test_it_is_the_host_s_name_where_no_address_is_known(url: str) -> None:
    assert towards(url) == socket.gethostname()
