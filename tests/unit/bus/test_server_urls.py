"""The forms of the URL of the bus."""

from __future__ import annotations

import pytest

from shared.bus import Bus
from shared.bus.server import Server
from shared.errors import SettingsError


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("redis://h:1/2", [("h", 1)]),
        ("redis://h", [("h", 6379)]),
        ("redis://:7000/0", [("localhost", 7000)]),
        ("redis://[::1]:7/0", [("::1", 7)]),
        ("rediss://user:p%40ss@h/0?ssl_check_hostname=no", [("h", 6379)]),
        ("redis://h/0?socket_timeout=5&protocol=3&client_name=x", [("h", 6379)]),
        ("unix:///run/redis.sock?db=1", [("localhost", 6379)]),
        ("redis+cluster://user:p%40ss@one:7001,two,[::1]:7003/", [("one", 7001), ("two", 6379), ("::1", 7003)]),
        ("redis+cluster://one/0", [("one", 6379)]),
        ("rediss+cluster://one/?ssl_cert_reqs=none", [("one", 6379)]),
        ("redis+sentinel://:pw@a:1,b/mymaster/3?sentinel_password=x%2F", [("a", 1), ("b", 26379)]),
        ("redis+sentinel://a/mymaster?db=2", [("a", 26379)]),
    ],
)
def test_url_is_read_as_redis_clients_write_it(url: str, addresses: list[tuple[str, int]]) -> None:
    assert Server(url).addresses == addresses


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+cluster://h:1/1", "database 0 only"),
        ("redis+cluster://h:1/?db=2", "database 0 only"),
        ("redis+cluster://:secret@h:0x/", "cannot be read"),
        ("redis+cluster://:secret@:6379/", "cannot be read"),
        ("redis+cluster://", "cannot be read"),
        ("redis-cluster://:secret@h:1/", "cannot be read"),
        ("h:6379", "cannot be read"),
        ("redis://there/first", "not a number"),
        ("redis://user:secret", "cannot be read"),
        ("redis://user:secr/secret@h", "not a number"),
        ("redis+cluster://h:1/?colour=red", "unknown option 'colour'"),
        ("redis+sentinel://h:1/mymaster?colour=red", "unknown option 'colour'"),
        ("redis://h/?ssl_ca_certs=/nowhere", "unknown option 'ssl_ca_certs'"),
        ("rediss://h/?ssl_ca_certs=/nowhere", "LOCAL2_REDIS_URL names a file that cannot be used"),
        ("redis+sentinel://:secret@h:1/", "name of the master"),
        ("redis+sentinel://:secret@h:1/mymaster/x", "not a number"),
    ],
)
def test_wrong_url_is_refused_without_its_password(url: str, reason: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Bus(url, "test/1")
    assert reason in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "users"),
    [("redis://h", False), ("redis://:pw@h", False), ("redis://default:pw@h", False), ("redis://core:pw@h", True)],
)
def test_url_with_a_user_says_that_the_server_has_users(url: str, users: bool) -> None:
    assert Bus(url, "test/1").users is users
