"""What is refused of a URL, in which words."""

from __future__ import annotations

import pytest

from services.web_fetch.errors import Blocked
from services.web_fetch.url import parse


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
