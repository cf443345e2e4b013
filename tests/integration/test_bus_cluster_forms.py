"""The forms of the URL, the slots of commands, and what may be under way at the same time."""

from __future__ import annotations

import pytest

from shared.bus.endpoint import Endpoint, Server
from shared.bus.hash_slots import slot_of, slot_of_key, stages
from shared.errors import SettingsError


def test_a_cluster_url_names_any_number_of_nodes() -> None:
    found = Endpoint.parse("redis+cluster://user:p%40ss@one:7001,two,[::1]:7003/?socket_timeout=5")
    assert found.kind == "cluster"
    user = {"username": "user", "password": "p@ss"}
    places = (("one", 7001), ("two", 6379), ("::1", 7003))
    assert found.several == tuple(Server(*place, **user) for place in places)  # type: ignore[arg-type]
    assert found.several[0].at("::1", 1) == Server("::1", 1, **user)  # type: ignore[arg-type]
    tls = Endpoint.parse("rediss+cluster://one/?ssl_check_hostname=no").several[0].at("x", 1).tls
    assert tls is not None
    assert not tls.check_hostname


def test_a_sentinel_url_names_the_master_and_may_have_a_password_for_the_sentinels() -> None:
    found = Endpoint.parse("redis+sentinel://:secret@a:1,b/mymaster/3?sentinel_password=other%2F")
    assert (found.kind, found.master) == ("sentinel", "mymaster")
    assert found.several == (Server("a", 1, password="other/"), Server("b", 26379, password="other/"))
    assert found.server.at("m", 5) == Server("m", 5, password="secret", database=3)
    found = Endpoint.parse("redis+sentinel://:secret@a/mymaster?db=2")
    assert found.several == (Server("a", 26379),)
    assert found.server.database == 2


@pytest.mark.parametrize("url", ["redis://h:1/2", "rediss://h", "unix:///run/redis.sock?db=1"])
def test_a_url_of_one_server_is_read_as_such(url: str) -> None:
    found = Endpoint.parse(url)
    assert (found.kind, found.several, found.master) == ("single", (), "")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+cluster://h:1/1", "database 0 only"),
        ("redis+cluster://h:1/?db=2", "database 0 only"),
        ("redis+cluster://:secret@h:0/", "no number from 1 to 65535"),
        ("redis+cluster://:secret@h:x/", "no number from 1 to 65535"),
        ("redis+cluster://:secret@:6379/", "has no host"),
        ("redis+cluster://", "none of these"),
        ("redis-cluster://:secret@h:1/", "none of these"),
        ("h:6379", "none of these"),
        # what there is to say of one server, in every form; the host may be what was left out
        ("redis://there/first", "must be a number"),
        ("redis://user:secret", "no number from 1 to 65535"),
        ("redis+cluster://user:secret", "no number from 1 to 65535"),
        ("redis://user:secr/secret@h", "no number from 1 to 65535"),
        ("redis+cluster://h:1/?colour=red", "unknown options: colour"),
        ("redis+sentinel://h:1/mymaster?colour=red", "unknown options: colour"),
        ("rediss://h/?ssl_ca_certs=/nowhere", "certificates that cannot be read"),
        ("redis+sentinel://:secret@h:1/", "name of the master"),
        ("redis+sentinel://:secret@h:1/mymaster/x", "name of the master"),
        ("redis+sentinel://h:1/mymaster/0/0", "name of the master"),
    ],
)
def test_a_wrong_url_is_refused_with_a_sentence_that_shows_no_password(url: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as told:
        Endpoint.parse(url)
    assert "secret" not in str(told.value)


def test_the_slot_is_that_of_the_first_braces_with_something_in_them() -> None:
    # the examples of Redis' own specification
    assert slot_of_key("123456789") == 0x31C3
    assert slot_of_key("{user1000}.following") == slot_of_key("{user1000}.followers") == slot_of_key("user1000")
    assert slot_of_key("foo{}{bar}") != slot_of_key("bar")
    assert slot_of_key("foo{{bar}}zap") == slot_of_key("{bar")
    assert slot_of_key("foo{bar}{zap}") == slot_of_key("bar")


def test_the_key_is_found_where_each_command_has_it() -> None:
    slot = slot_of_key("k")
    assert slot_of(("GET", "k")) == slot_of(("XGROUP", "CREATE", "k", "g", "0")) == slot
    assert slot_of(("EVALSHA", "00", 1, "k", "x")) == slot
    assert slot_of(("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "STREAMS", "k", ">")) == slot


def test_commands_keep_their_order_where_it_can_matter() -> None:
    one, two = "{one}", "{two}"
    assert list(stages([("SET", one, 1), ("SET", one, 2), ("GET", one)])) == [[0, 1, 2]]
    assert list(stages([("SET", one, 1), ("XADD", two, "*", "a", "b"), ("SET", one, 2)])) == [[0], [1], [2]]
    assert list(stages([("GET", one), ("GET", two), ("HGETALL", one)])) == [[0, 1, 2]]
    assert list(stages([("DEL", one), ("DEL", two), ("GET", one)])) == [[0, 1], [2]]


def test_an_acknowledgement_waits_for_everything_before_it_even_in_its_own_slot() -> None:
    stream, beside = "{work}", "{work}:result"
    assert list(stages([("SET", beside, 1), ("XACK", stream, "g", "1-1")])) == [[0], [1]]
    assert list(stages([("XACK", stream, "g", "1-1"), ("XDEL", stream, "1-1")])) == [[0], [1]]
