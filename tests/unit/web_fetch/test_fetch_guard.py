"""Which addresses are public, which hosts are allowed, and how long is tried."""

from __future__ import annotations

import pytest

from services.web_fetch import guard
from services.web_fetch.address import is_public
from services.web_fetch.errors import Blocked
from services.web_fetch.guard import AllowedHosts
from services.web_fetch.service import WebFetchSettings


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("1.0.0.1", True), ("100.63.255.255", True), ("100.128.0.0", True), ("168.63.129.17", True),
        ("198.17.255.255", True), ("198.20.0.0", True), ("223.255.255.255", True), ("2606:4700::1111", True),
        ("2001:200::1", True), ("::ffff:8.8.8.8", True), ("::8.8.8.8", True), ("64:ff9b::808:808", True),
        ("::ffff:0:8.8.8.8", True), ("2002:808:808::1", True), ("2600:1::5efe:808:808", True),
        ("2600:1::200:5efe:808:808", True), ("2600:1::5eff:7f00:1", True), ("2606:4700::1111%eth0", False),
        ("8.8.8.8:80", False), ("a.example", False), ("", False),
    ],
)  # fmt: skip
def test_an_address_is_public_that_leads_to_nobodys_own_network(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_a_host_is_allowed_by_name_for_its_web_ports_or_for_the_port_that_is_told() -> None:
    allowed = AllowedHosts.of([" Wiki.example ", "a.example:8081"])
    assert allowed == AllowedHosts(frozenset({("wiki.example", None), ("a.example", 8081)}))
    asked = [("wiki.example", 80), ("wiki.example", 8081), ("a.example", 8081), ("a.example", 80), ("b.example", 80)]
    assert [target in allowed for target in asked] == [True, True, True, False, False]
    assert [allowed.named(*target) for target in asked] == [False, False, True, False, False]
    with pytest.raises(Blocked):
        AllowedHosts.of(["a.example", "not a host"])


def test_two_silent_addresses_are_passed_within_the_usual_time() -> None:
    assert WebFetchSettings().timeout > 2 * guard.ATTEMPT_SECONDS
