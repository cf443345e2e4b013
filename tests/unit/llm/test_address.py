"""Addresses as people write them, what is private, and where a proxy stands."""

from __future__ import annotations

import os

import pytest

from shared.errors import SettingsError
from shared.llm.address import google_url, is_loopback, is_private, ollama_url, openai_url, proxy_for, shown
from shared.llm.http import open_http


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (None, "http://127.0.0.1:8000/v1"),
        ("http://gpu:8000", "http://gpu:8000/v1"),
        ("http://gpu:8000/", "http://gpu:8000/v1"),
        ("gpu:8000", "http://gpu:8000/v1"),
        ("http://gpu:8000/v1/", "http://gpu:8000/v1"),
        ("http://gpu:8000/v1/chat/completions", "http://gpu:8000/v1"),
        ("http://gpu:8000/v1/models", "http://gpu:8000/v1"),
        ("https://api.example.com/openai/v3", "https://api.example.com/openai/v3"),
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000/v1"),
        ("http://[::]:8000", "http://[::1]:8000/v1"),
        ("http://user:pass@gpu:8000", "http://user:pass@gpu:8000/v1"),
    ],
)
def test_an_openai_address_without_a_path_means_v1(written: str | None, meant: str) -> None:
    assert openai_url(written) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("http://gpu:11434/v1", "http://gpu:11434"),
        ("http://gpu:11434/api/", "http://gpu:11434"),
        ("https://example.com/ollama/api", "https://example.com:443/ollama"),
        ("::1", "http://[::1]:11434"),
        ("[::]:1234", "http://[::1]:1234"),
    ],
)
def test_ollamas_address_is_without_the_protocols_path(written: str, meant: str) -> None:
    assert ollama_url(written) == meant


@pytest.mark.parametrize("read", [ollama_url, openai_url, google_url])
@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("gpu:99999", "the port must be a number from 1 to 65535"),
        ("http://gpu:0", "the port must be a number from 1 to 65535"),
        ("http://gpu:port", "the port must be a number from 1 to 65535"),
        ("ftp://gpu", "begins with http:// or https://, not with ftp://"),
        ("http//gpu:8000", "begins with http:// or https://"),
        ("https:/gpu:8000", "begins with http:// or https://"),
        ("http://", "there is no host in the address"),
        ("http://gpu:8000/v1?key=x", "leave out what begins with"),
        ("http://[::1", "an IPv6 address stands in brackets"),
        ("http://gpu one:8000", "there is a space"),
        ("http://gpu:8000/\nHost: other", "there is a space or a line's end"),
    ],
)
def test_a_malformed_address_is_a_sentence(read: type, written: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(written)


def test_a_password_in_an_address_is_not_shown() -> None:
    assert shown("http://user:pass@gpu:8000/v1") == "http://gpu:8000/v1"
    assert shown("http://gpu:8000/a@b") == "http://gpu:8000/a@b"


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "127.1", "::1", "10.1.2.3", "172.16.0.9", "172.31.255.1", "192.168.7.7", "169.254.9.9",
     "100.64.0.1", "fd12::1", "fe80::1%eth0", "::ffff:10.0.0.1", "ollama", "gpu-box", "gpu.local", "gpu.LOCAL.",
     "models.internal", "host.docker.internal", "nas.lan", "box.home.arpa", "vllm.models.svc",
     "vllm.models.svc.cluster.local"],
)  # fmt: skip
def test_private_hosts(host: str) -> None:
    assert is_private(host)


@pytest.mark.parametrize(
    "host",
    ["api.openai.com", "8.8.8.8", "172.32.0.1", "2606:4700::1", "::ffff:8.8.8.8", "mylocal", "local.example.com"],
)
def test_public_hosts(host: str) -> None:
    assert is_private(host) == (host == "mylocal")


def test_what_is_on_this_machine() -> None:
    here = ["http://localhost:1", "http://127.0.0.9:1", "http://[::1]:1", "http://ollama.localhost"]
    there = ["http://gpu:1", "http://10.0.0.1:1", "https://example.com"]
    assert [is_loopback(url) for url in (*here, *there)] == [True] * 4 + [False] * 3


PROXY = "http://proxy.example:3128"


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_a_proxy_stands_before_public_servers_only(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, PROXY)
    assert proxy_for("http://models.example.com:8000/v1") == PROXY
    for host in ("127.0.0.1", "localhost", "[::1]", "192.168.1.5", "[fd00::5]", "ollama", "gpu.local", "m.internal"):
        assert proxy_for(f"http://{host}:11434") is None


@pytest.mark.parametrize(
    "no_proxy", ["models.example.com", ".example.com", "example.com", "*", "other,models.example.com:8443"]
)
def test_no_proxy_is_heard(no_proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert proxy_for("https://models.example.com:8443/v1") is None
    assert proxy_for("https://models.example.org:8443/v1") == (None if no_proxy == "*" else PROXY)


def test_no_proxy_has_networks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", "not-a-network/8, 8.8.0.0/16")
    assert proxy_for("http://8.8.4.4") is None
    assert proxy_for("http://9.9.9.9") == PROXY


def test_the_schemes_own_proxy_goes_before_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://all.example:1")
    monkeypatch.setenv("HTTPS_PROXY", "secure.example:2")
    assert proxy_for("https://api.example.com") == "http://secure.example:2"
    assert proxy_for("http://api.example.com") == "http://all.example:1"


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        ("ftp://proxy.example:1", r"HTTP_PROXY: a proxy is http://, https:// or socks5://, not ftp://"),
        ("http://user:hunter2@proxy.example:99999", "HTTP_PROXY: the port must be a number"),
        ("http://", "HTTP_PROXY: there is no host"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_a_sentence(proxy: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(SettingsError, match=said) as caught:
        open_http("http://models.example.com", None)
    assert "hunter2" not in str(caught.value)


def test_socks_proxy_stands_before_public_servers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1080")
    assert proxy_for("http://127.0.0.1:11434") is None
    assert proxy_for("https://api.example.com") == "socks5://127.0.0.1:1080"
