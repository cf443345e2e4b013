"""How a URL is read part by part, and what is refused of it, in which words."""

from __future__ import annotations

import pytest

from services.web_fetch.errors import Blocked
from services.web_fetch.url import MAX_URL, Target, check_port, parse, split_authority

LONGEST = ".".join(["a" * 63] * 3 + ["a" * 61])


@pytest.mark.parametrize(
    ("url", "target", "shown"),
    [
        ("http://A.Example", Target("http", "a.example", 80, "/"), "http://a.example/"),
        (" https://a.example./x?y=1#z ", Target("https", "a.example", 443, "/x?y=1"), "https://a.example/x?y=1"),
        ("http://a.example:443", Target("http", "a.example", 443, "/"), "http://a.example:443/"),
        ("https://a.example:443/", Target("https", "a.example", 443, "/"), "https://a.example/"),
        ("http://a.example:/", Target("http", "a.example", 80, "/"), "http://a.example/"),
        ("http://a.example:1/", Target("http", "a.example", 1, "/"), "http://a.example:1/"),
        ("http://a.example:65535/", Target("http", "a.example", 65_535, "/"), "http://a.example:65535/"),
        ("http://a.example/ä b/%41?q=ö c&d=[1]", Target("http", "a.example", 80, "/%C3%A4%20b/%41?q=%C3%B6%20c&d=[1]"),
         "http://a.example/%C3%A4%20b/%41?q=%C3%B6%20c&d=[1]"),
        ("http://a.example?x", Target("http", "a.example", 80, "/?x"), "http://a.example/?x"),
        ("http://[2001:DB8:0::1]:8080/", Target("http", "2001:db8::1", 8080, "/"), "http://[2001:db8::1]:8080/"),
        ("http://[::1]", Target("http", "::1", 80, "/"), "http://[::1]/"),
        ("https://[::1]:/", Target("https", "::1", 443, "/"), "https://[::1]/"),
        ("http://8.8.8.8./", Target("http", "8.8.8.8", 80, "/"), "http://8.8.8.8/"),
        ("http://8.a.example/", Target("http", "8.a.example", 80, "/"), "http://8.a.example/"),
        ("http://Bücher.example/", Target("http", "xn--bcher-kva.example", 80, "/"), "http://xn--bcher-kva.example/"),
        (f"http://{LONGEST}/", Target("http", LONGEST, 80, "/"), f"http://{LONGEST}/"),
    ],
)  # fmt: skip
def test_a_url_is_requested_as_it_is_read(url: str, target: Target, shown: str) -> None:
    assert parse(url) == target
    assert str(target) == shown


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://[", "the URL is malformed"), ("ftp://a.example/", "only http:// and https:// URLs can be fetched"),
        ("http://[::1]x/", "malformed"), ("http://[1.2.3.4]/", "malformed"), ("http://[::1%25eth0]/", "zone"),
        ("http://a.example:0/", "the URL's port is malformed"), ("http://a.example:65536/", "port"),
        ("http://a.example:1000000/", "port"), ("http://a.example:x/", "port"), ("http://a.example:8٠/", "port"),
        ("http://[::1]:x/", "port"), ("http://[::1]:0/", "port"),
        (f"http://{LONGEST}a/", "the URL's host is not a valid name"), (f"http://{'a' * 64}.example/", "valid name"),
        ("http:///x", "valid name"), ("http://a.-b.example/", "valid name"), ("http://a b/", "valid name"),
        ("http://127.1/", "a numeric host must be four decimal numbers"), ("http://0x7f000001/", "four decimal"),
        ("http://a.0177/", "four decimal"), ("http://256.1.1.1/", "four decimal"), ("http://a\\b/", "backslash"),
    ],
)  # fmt: skip
def test_what_is_refused_is_told_by_the_part_that_is_wrong(url: str, why: str) -> None:
    with pytest.raises(Blocked, match=why):
        parse(url)


def test_a_url_is_as_long_as_servers_take() -> None:
    longest = "http://a.example/" + "x" * (MAX_URL - 17)
    assert len(parse(longest).path) == MAX_URL - 16
    with pytest.raises(Blocked, match="longer than 8192 characters"):
        parse(longest + "x")


@pytest.mark.parametrize(
    ("authority", "parts"),
    [
        ("a.example", ("a.example", None)), ("a.example:", ("a.example", None)), ("A.example:81", ("a.example", 81)),
        ("[::1]", ("::1", None)), ("[::1]:", ("::1", None)), ("[::1]:81", ("::1", 81)),
    ],
)  # fmt: skip
def test_a_host_has_a_port_where_one_is_told(authority: str, parts: tuple[str, int | None]) -> None:
    assert split_authority(authority) == parts


@pytest.mark.parametrize("authority", ["[::1", "[::1]81", "[", "[]"])
def test_a_bracket_is_closed_before_the_port(authority: str) -> None:
    with pytest.raises(Blocked, match="the URL's host is malformed"):
        split_authority(authority)


@pytest.mark.parametrize(("port", "open"), [(80, True), (443, True), (1_024, True), (8_080, True), (65_535, True),
                                            (1_023, False), (22, False), (6_379, False), (81, False)])  # fmt: skip
def test_a_web_server_listens_on_a_port_of_the_web_or_a_free_one(port: int, open: bool) -> None:
    if open:
        check_port(port)
    else:
        with pytest.raises(Blocked, match=f"port {port} is not one of a web server"):
            check_port(port)


@pytest.mark.parametrize(
    ("location", "leads"),
    [("/x", "http://a.example:81/x"), ("y", "http://a.example:81/d/y"), (" //b.example ", "http://b.example/"),
     ("https://b.example/z", "https://b.example/z"), ("?q", "http://a.example:81/d/e?q")],
)  # fmt: skip
def test_a_redirect_leads_on_from_where_it_came(location: str, leads: str) -> None:
    assert str(parse("http://a.example:81/d/e").join(location)) == leads


def test_a_redirect_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(Blocked, match="malformed"):
        parse("http://a.example/").join("http://[")


@pytest.mark.parametrize("url", ["http://user@a.example/", "https://user:pass@a.example/", "http://@a.example/"])
def test_a_url_with_a_user_is_refused_for_that(url: str) -> None:
    with pytest.raises(Blocked, match="user name or password"):
        parse(url)


@pytest.mark.parametrize("location", ["/a\nb", "http://a.exa\tmple/", "\\\\b.example/", "/" + "a" * 100_000])
def test_a_redirect_is_refused_as_it_came_before_anything_of_it_is_cleaned_away(location: str) -> None:
    with pytest.raises(Blocked, match=r"control character|longer than"):
        parse("http://a.example/").join(location)


@pytest.mark.parametrize("host", ["xn--a.\u0378", "\u2488.example", "\u0301a.example"])
def test_a_name_that_no_registry_takes_is_refused(host: str) -> None:
    with pytest.raises(Blocked, match="the URL's host is not a valid name"):
        parse(f"http://{host}/")
