"""One server's URL: where it listens, as whom it is spoken to, and what is refused."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from typing import Any

import pytest

from shared.bus import Bus
from shared.bus.endpoint import Endpoint, Server, _place
from shared.bus.sentinel import SentinelLink, Sentinels
from shared.errors import SettingsError


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://", {}),
        ("redis://there", {"host": "there"}),
        ("redis://there:7000/3", {"host": "there", "port": 7000, "database": 3}),
        ("redis://:7000", {"port": 7000}),
        ("redis://me:p%3A@:7000/", {"port": 7000, "username": "me", "password": "p:"}),
        ("redis://[::1]:7000", {"host": "::1", "port": 7000}),
        ("redis://there?db=4", {"host": "there", "database": 4}),
        ("redis://there/3?db=4", {"host": "there", "database": 4}),
        ("redis://me:p%40ss@there/", {"host": "there", "username": "me", "password": "p@ss"}),
        ("redis://:secret@there", {"host": "there", "password": "secret"}),
        ("redis://there?username=me&password=p", {"host": "there", "username": "me", "password": "p"}),
        ("redis://old:old@there?username=me&password=p", {"host": "there", "username": "me", "password": "p"}),
        ("unix:///run/my%20redis.sock", {"path": "/run/my redis.sock", "port": 0}),
        ("unix://me:p@/run/r.sock?db=2", {"path": "/run/r.sock", "port": 0, "username": "me", "password": "p",
                                          "database": 2}),
        ("redis://there?socket_timeout=5&client_name=x&protocol=3", {"host": "there"}),
    ],
)  # fmt: skip
def test_a_url_is_read_as_other_clients_write_it(url: str, wanted: dict[str, Any]) -> None:
    assert Endpoint.parse(url).server == Server(**wanted)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://there/first", "must be a number, not 'first'"),
        ("redis://there?db=-1", "must be a number"),
        ("redis://there?colour=red&shape=round", "unknown options: colour, shape"),
        ("redis://there?colour=", "unknown options: colour"),
        # of TLS, though there is none
        ("redis://there?ssl_cert_reqs=none", "unknown options: ssl_cert_reqs"),
        ("rediss://there?ssl_cert_reqs=maybe", "must be one of none, optional, required"),
    ],
)
def test_what_a_url_cannot_say_is_refused_in_a_sentence(url: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Endpoint.parse(url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://me:secret@there/first", "the URL of Redis is wrong: .*must be a number.*; expected: "),
        ("http://me:secret@there", "the URL of Redis is wrong: it is none of these; expected: "),
        ("redis+cluster://", "the URL of Redis is wrong: it is none of these"),
        ("redis+cluster://me:secret@there:1,:2/", "an address has no host"),
        ("redis+cluster://me:secret@there/?colour=", "unknown options: colour"),
        ("redis+sentinel://there/", "ends with the name of the master and a database"),
        ("nothing", "the URL of Redis is wrong"),
        ("redis", "it is none of these"),
        ("rediss://me:secret@there?ssl_ca_certs=/no/such/file", "certificates that cannot be read"),
    ],
)
def test_a_wrong_setting_is_told_with_what_is_expected_and_without_the_password(url: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        Endpoint.parse(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "mode", "checks"),
    [
        ("", ssl.CERT_REQUIRED, True),
        ("?ssl_cert_reqs=Required", ssl.CERT_REQUIRED, True),
        ("?ssl_cert_reqs=optional", ssl.CERT_OPTIONAL, True),
        ("?ssl_cert_reqs=none", ssl.CERT_NONE, False),
        ("?ssl_check_hostname=no", ssl.CERT_REQUIRED, False),
        ("?ssl_check_hostname=yes", ssl.CERT_REQUIRED, True),
    ],
)
def test_tls_checks_everything_unless_told_otherwise(options: str, mode: ssl.VerifyMode, checks: bool) -> None:
    tls = Endpoint.parse(f"rediss://there{options}").server.tls
    assert tls is not None
    assert (tls.verify_mode, tls.check_hostname) == (mode, checks)


def test_a_file_of_certificates_that_is_not_there_is_an_error() -> None:
    for option in ("ssl_ca_certs", "ssl_certfile"):
        with pytest.raises(SettingsError, match="No such file"):
            Endpoint.parse(f"rediss://there?{option}=/nowhere.pem")


@pytest.mark.parametrize(
    ("server", "greeting"),
    [
        (Server(), []),
        (Server(password="p"), [("AUTH", "p")]),
        (Server(username="me", password="p", database=3), [("AUTH", "me", "p"), ("SELECT", 3)]),
        (Server(username="me"), []),
    ],
)
def test_a_connection_introduces_itself(server: Server, greeting: list[Any]) -> None:
    assert server.greeting() == greeting


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("one:7001", ("one", 7001)), ("one", ("one", 9)), ("[::1]:7001", ("::1", 7001)), ("[::1]", ("::1", 9)),
     ("one:1", ("one", 1)), ("one:65535", ("one", 65_535))],
)  # fmt: skip
def test_an_address_may_leave_its_port_out(text: str, wanted: tuple[str, int]) -> None:
    assert _place(text, 9) == wanted
    # as a server it is written in full
    assert _place(str(Server(*wanted)), 8) == wanted


@pytest.mark.parametrize("text", ["one:0", "one:65536", "one:x", "one:-1"])
def test_a_port_is_between_1_and_65535(text: str) -> None:
    with pytest.raises(ValueError):
        _place(text, 9)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis://there", False),
        ("redis://:p@there", False),
        ("redis://default:p@there", False),
        ("redis://me:p@there", True),
        ("redis+cluster://me:p@one,two/", True),
        ("redis+sentinel://there/m/0?sentinel_username=me", False),
    ],
)
def test_a_url_may_say_which_of_the_users_this_is(url: str, named: bool) -> None:
    assert Bus(url, "test/1").users is named


async def test_where_no_sentinel_knows_a_master_each_of_them_is_told_with_its_reason(closed_ports: list[int]) -> None:
    places = ",".join(f"127.0.0.1:{port}" for port in closed_ports)
    link = SentinelLink(Sentinels(Endpoint.parse(f"redis+sentinel://{places}/mymaster/0")), name="test/1", timeout=2.0)
    with pytest.raises(ConnectionError, match="no sentinel knows a master that is up") as told:
        await link.server()
    assert [f"127.0.0.1:{port}: " in str(told.value) for port in closed_ports] == [True, True]


@pytest.fixture
def closed_ports() -> Iterator[list[int]]:
    """Nobody listens there, and nobody will while the test runs."""
    with socket.socket() as one, socket.socket() as other:
        for taken in (one, other):
            taken.bind(("127.0.0.1", 0))
        yield [taken.getsockname()[1] for taken in (one, other)]
