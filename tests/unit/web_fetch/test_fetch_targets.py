"""What must never be fetched, through the whole tool: nothing is connected to, and no address is given away."""

from __future__ import annotations

import asyncio
from typing import Any

import httpcore
import pytest

from services.web_fetch import guard
from services.web_fetch.errors import Blocked, FetchError
from services.web_fetch.guard import AllowedHosts, GuardedBackend
from services.web_fetch.service import WebFetch
from shared.errors import ToolError

pytestmark = pytest.mark.asyncio(loop_scope="module")

PUBLIC = "93.184.216.34"

PRIVATE_ADDRESSES = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.1.2.3",
    "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255", "168.63.129.16", "192.0.0.1", "192.0.0.192",
    "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1",
    "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "::", "::1", "fe80::1", "febf::1", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "ff0e::1", "100::1",
    "2001:db8::1", "2001:2::1", "2001:10::1", "2001:20::1", "3fff::1", "5f00::1", "4000::1", "64:ff9b:1::a00:1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:a9fe:a9fe",
    "::127.0.0.1", "::7f00:1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::10.0.0.1", "2002:7f00:1::1",
    "2002:c0a8:101::1", "2001:0:808:808::80ff:fffe", "2001:0:7f00:1::f7f7:f7f7", "2600:1::5efe:7f00:1",
    "2600:1::200:5efe:a00:1", "fe80::5efe:808:808",
]  # fmt: skip

OTHER_FORMS = [
    "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/", "http://017700000001/", "http://0177.0.0.1/",
    "http://127.1/", "http://127.0.1/", "http://127.0.0.1./", "http://0/", "http://0x/", "http://127.0.0.0x1/",
    "http://3232235521/", "http://1.2.3.4.5/", "http://256.1.1.1/", "http://999999999999/",
    "http://127。0。0。1/", "http://127．0．0．1/", "http://１２７.0.0.1/", "http://①②⑦.⓪.⓪.①/", "http://127｡0.0.1/",
    "http://[::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[::1/", "http://[::1]x/", "http://[127.0.0.1]/",
    "http://[2606:4700::1111%eth0]/", "http://[::ffff:127.0.0.1]:80/", "http://[0:0:0:0:0:0:0:1]/",
    "http://user@8.8.8.8/", "http://8.8.8.8@127.0.0.1/", "http://user:pass@127.0.0.1/", "http://127.0.0.1%40a.example/",
    "http://a.example\\@127.0.0.1/", "http:\\\\127.0.0.1/", "http://127.0.0.1\\.a.example/", "http:///127.0.0.1/",
    "http:127.0.0.1/", "http://127.0.0.1#@a.example/", "http://127.0.0.1?@a.example/", "http://@127.0.0.1/",
    "http://127.0.0.1\t/", "http://127.0.0\n.1/", "http://a.example/\r\nHost: b", "http://a.example/\x00", "http://\u202e/",
    "http://a b.example/", "http://a..example/", "http://.example/", "http://-a.example/", "http:// /", "http://",
    "http://%6c%6f%63alhost/", "http://a.example:0/", "http://a.example:65536/", "http://a.example:x/",
    "http://a.example:8０/", "http://a.example:80:80/", "http://" + "a" * 64 + ".example/",
    pytest.param("http://a.example/" + "x" * 9_000, id="too long"),
]  # fmt: skip

SCHEMES = [
    "ftp://a.example/", "file:///etc/passwd", "gopher://a.example/", "data:text/html,hi", "javascript:alert(1)",
    "ws://a.example/", "dict://a.example/", "ldap://a.example/", "unix:///run/x.sock", "//a.example/", "a.example",
    "about:blank", "httpx://a.example/", "view-source:http://a.example/", "blob:http://a.example/1", "http+unix://a/",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE_ADDRESSES)
async def test_a_private_address_in_the_url_is_refused(address: str, fetcher: Any, detour: Any) -> None:
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(ToolError, match=r"^blocked: "):
        await fetcher(network=detour)(WebFetch(url=f"http://{host}/"))
    assert detour.connected == []


@pytest.mark.parametrize("address", PRIVATE_ADDRESSES)
async def test_a_name_that_leads_to_a_private_address_is_refused_without_naming_it(
    address: str, fetcher: Any, detour: Any, names: Any
) -> None:
    run = fetcher(network=detour, resolver=names(inside_example=[[address]]))
    with pytest.raises(ToolError) as caught:
        await run(WebFetch(url="https://inside.example/"))
    assert str(caught.value) == "blocked: inside.example is not on the public internet"
    assert detour.connected == []


@pytest.mark.parametrize("url", OTHER_FORMS)
async def test_a_url_that_parsers_could_read_differently_is_refused(url: str, fetcher: Any, detour: Any) -> None:
    with pytest.raises(ToolError, match=r"^blocked: "):
        await fetcher(network=detour)(WebFetch(url=url))
    assert detour.connected == []


@pytest.mark.parametrize("url", SCHEMES)
async def test_other_schemes_are_refused(url: str, fetcher: Any, detour: Any) -> None:
    with pytest.raises(ToolError) as caught:
        await fetcher(network=detour)(WebFetch(url=url))
    assert str(caught.value) == "blocked: only http:// and https:// URLs can be fetched"
    assert detour.connected == []


@pytest.mark.parametrize("port", [1, 21, 22, 23, 25, 53, 110, 143, 389, 445, 993, 2375, 3306, 5432, 6379, 11211, 27017])
async def test_ports_of_other_services_are_refused(port: int, fetcher: Any, detour: Any) -> None:
    with pytest.raises(ToolError) as caught:
        await fetcher(network=detour)(WebFetch(url=f"http://{PUBLIC}:{port}/"))
    assert str(caught.value) == f"blocked: port {port} is not one of a web server"
    assert detour.connected == []


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "localhost.", "ip6-localhost.localhost"])
async def test_the_machines_own_name_is_refused_by_the_real_resolver(name: str, fetcher: Any, detour: Any) -> None:
    with pytest.raises(ToolError, match=r"^(blocked: .* is not on the public|fetch error: .* cannot be resolved)"):
        await fetcher(network=detour)(WebFetch(url=f"http://{name}/"))
    assert detour.connected == []


@pytest.mark.parametrize(
    "answer",
    [
        [PUBLIC, "10.0.0.1"],
        ["10.0.0.1", PUBLIC],
        [PUBLIC, "::1"],
        ["2606:4700::1111", "fd00::1"],
        [PUBLIC, "no address"],
    ],
)
async def test_one_private_address_among_public_ones_is_enough_to_refuse(
    answer: list[str], fetcher: Any, detour: Any, names: Any
) -> None:
    run = fetcher(network=detour, resolver=names(mixed_example=[answer]))
    with pytest.raises(ToolError, match=r"^blocked: mixed\.example is not on the public internet$"):
        await run(WebFetch(url="http://mixed.example/"))
    assert detour.connected == []


async def test_what_was_checked_is_what_is_connected_to(
    site: Any, reply: Any, fetcher: Any, detour: Any, names: Any
) -> None:
    site.replies["/"] = reply("<p>hello</p>")
    resolver = names(flip_example=[[PUBLIC], ["127.0.0.1"]])
    await fetcher(network=detour, resolver=resolver)(WebFetch(url=site.url(host="flip.example")))
    assert resolver.asked == ["flip.example"]
    assert detour.connected == [(PUBLIC, site.port)]
    assert f"Host: flip.example:{site.port}\r\n" in site.requests[0]


async def test_a_name_that_changes_its_answer_between_two_hops_is_refused(
    site: Any, reply: Any, fetcher: Any, detour: Any, names: Any
) -> None:
    site.replies["/"] = reply(status="302 Found", location="/inside")
    run = fetcher(network=detour, resolver=names(flip_example=[[PUBLIC], ["127.0.0.1"]]))
    with pytest.raises(ToolError, match=r"^blocked: flip\.example is not on the public internet$"):
        await run(WebFetch(url=site.url(host="flip.example")))
    assert detour.connected == [(PUBLIC, site.port)]


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/", "http://10.0.0.1/latest", "//169.254.169.254/latest/meta-data/", "http://[::1]/",
        "http://2130706433/", "https://localhost/", "file:///etc/passwd", "ftp://a.example/", "http://u:p@a.example/",
        "http://inside.example/", "http://a.example:22/", "http://[::ffff:7f00:1]/", "gopher://127.0.0.1:6379/_INFO",
        "\\\\127.0.0.1\\x", "http://[", "http://127.0.0.1:80\\@a.example/",
    ],
)  # fmt: skip
async def test_a_redirect_to_a_private_address_is_refused(
    location: str, site: Any, reply: Any, fetcher: Any, detour: Any, names: Any
) -> None:
    site.replies["/"] = reply(status="302 Found", location=location)
    resolver = names(open_example=[[PUBLIC]], inside_example=[["10.1.2.3"]], localhost=[["127.0.0.1"]])
    with pytest.raises(ToolError, match=r"^blocked: "):
        await fetcher(network=detour, resolver=resolver)(WebFetch(url=site.url(host="open.example")))
    assert detour.connected == [(PUBLIC, site.port)]


async def test_an_allowed_host_is_allowed_by_its_name_only(site: Any, reply: Any, fetcher: Any, names: Any) -> None:
    site.replies["/"] = reply("<p>intranet</p>")
    run = fetcher(["wiki.example"], resolver=names(wiki_example=[["127.0.0.1"]], other_example=[["127.0.0.1"]]))
    assert "intranet" in (await run(WebFetch(url=site.url(host="wiki.example")))).text
    for host in ("127.0.0.1", "other.example", "a.wiki.example"):
        with pytest.raises(ToolError, match=r"^(blocked: |fetch error: .* cannot be resolved)"):
            await run(WebFetch(url=site.url(host=host)))
    assert len(site.requests) == 1


async def test_an_allowed_host_does_not_open_others_over_a_redirect(
    site: Any, reply: Any, fetcher: Any, names: Any
) -> None:
    site.replies["/"] = reply(status="301 Moved", location=site.url("/x", host="other.example"))
    run = fetcher(["wiki.example"], resolver=names(wiki_example=[["127.0.0.1"]], other_example=[["127.0.0.1"]]))
    with pytest.raises(ToolError, match=r"^blocked: other\.example"):
        await run(WebFetch(url=site.url(host="wiki.example")))
    assert len(site.requests) == 1


async def test_a_redirect_to_an_allowed_host_is_followed(site: Any, reply: Any, fetcher: Any, names: Any) -> None:
    site.replies["/"] = reply(status="301 Moved", location=site.url("/x", host="wiki.example"))
    site.replies["/x"] = reply("<p>intranet</p>")
    both = ["wiki.example", f"start.example:{site.port}"]
    run = fetcher(both, resolver=names(wiki_example=[["127.0.0.1"]], start_example=[["127.0.0.1"]]))
    assert "intranet" in (await run(WebFetch(url=site.url(host="start.example")))).text


async def test_an_entry_with_a_port_allows_that_port_only(site: Any, reply: Any, fetcher: Any) -> None:
    site.replies["/"] = reply("<p>hello</p>")
    assert "hello" in (await fetcher([f"127.0.0.1:{site.port}"])(WebFetch(url=site.url()))).text
    with pytest.raises(ToolError, match=r"^blocked: "):
        await fetcher(["127.0.0.1:8080"])(WebFetch(url=site.url()))


async def test_an_entry_with_a_port_allows_a_port_of_another_service(fetcher: Any, detour: Any) -> None:
    with pytest.raises(ToolError, match=r"^blocked: port 22 "):
        await fetcher(["127.0.0.1"], network=detour)(WebFetch(url="http://127.0.0.1:22/"))
    detour.dead.add("127.0.0.1")
    with pytest.raises(ToolError, match=r"^fetch error: no connection to 127\.0\.0\.1:22$"):
        await fetcher(["127.0.0.1:22"], network=detour)(WebFetch(url="http://127.0.0.1:22/"))


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"],
)
async def test_public_addresses_are_connected_to(
    address: str, site: Any, reply: Any, fetcher: Any, detour: Any, names: Any
) -> None:
    site.replies["/"] = reply("<p>public page</p>")
    run = fetcher(network=detour, resolver=names(open_example=[[address]]))
    assert "public page" in (await run(WebFetch(url=site.url(host="open.example")))).text
    assert detour.connected == [(address, site.port)]


async def test_the_next_address_is_tried_when_one_is_dead(
    site: Any, reply: Any, fetcher: Any, detour: Any, names: Any
) -> None:
    site.replies["/"] = reply("<p>public page</p>")
    detour.dead.add("2606:4700::1")
    run = fetcher(network=detour, resolver=names(open_example=[["2606:4700::1", PUBLIC]]))
    assert "public page" in (await run(WebFetch(url=site.url(host="open.example")))).text
    assert [address for address, _ in detour.connected] == ["2606:4700::1", PUBLIC]


async def test_a_silent_address_leaves_time_for_the_next_one(
    site: Any, reply: Any, fetcher: Any, detour: Any, names: Any
) -> None:
    site.replies["/"] = reply("<p>public page</p>")
    detour.silent.update({"2606:4700::1", "2606:4700::2"})
    addresses = ["2606:4700::1", "2606:4700::2", PUBLIC]
    run = fetcher(network=detour, resolver=names(open_example=[addresses]), timeout=20)
    assert "public page" in (await run(WebFetch(url=site.url(host="open.example")))).text
    assert [address for address, _ in detour.connected] == addresses
    # the last one has all the time that is left
    *first, last = detour.limits
    assert first == [guard.ATTEMPT_SECONDS] * 2
    assert last is None or last > guard.ATTEMPT_SECONDS


async def test_of_very_many_addresses_all_are_checked_and_a_few_are_tried(
    fetcher: Any, detour: Any, names: Any
) -> None:
    many = [f"93.184.{n // 250}.{n % 250 + 1}" for n in range(2_000)]
    detour.dead = set(many)
    run = fetcher(network=detour, resolver=names(many_example=[many], mixed_example=[[*many, "10.0.0.1"]]))
    with pytest.raises(ToolError, match="no connection to"):
        await run(WebFetch(url="http://many.example/"))
    assert [address for address, _ in detour.connected] == many[: guard.MOST_ADDRESSES]
    with pytest.raises(ToolError, match=r"^blocked: mixed\.example"):
        await run(WebFetch(url="http://mixed.example/"))


async def test_every_address_that_is_dead_is_an_error(
    site: Any, reply: Any, fetcher: Any, detour: Any, names: Any
) -> None:
    detour.dead.update({"2606:4700::1", PUBLIC})
    run = fetcher(network=detour, resolver=names(open_example=[["2606:4700::1", PUBLIC]]))
    with pytest.raises(ToolError):
        await run(WebFetch(url=site.url(host="open.example")))
    assert [address for address, _ in detour.connected] == ["2606:4700::1", PUBLIC]


async def test_proxies_of_the_environment_are_not_used(
    site: Any, reply: Any, fetcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    site.replies["/"] = reply("<p>direct</p>")
    assert "direct" in (await fetcher([f"127.0.0.1:{site.port}"])(WebFetch(url=site.url()))).text
    with pytest.raises(ToolError, match=r"^blocked: "):
        await fetcher()(WebFetch(url="http://10.0.0.1/"))


async def test_sockets_of_this_machine_are_never_opened() -> None:
    backend = guard.GuardedBackend(guard.AllowedHosts(), resolver=_nobody)
    with pytest.raises(ToolError, match="sockets of this machine"):
        await backend.connect_unix_socket("/var/run/docker.sock")


async def _nobody(host: str, port: int) -> list[str]:
    return []


async def test_a_name_without_an_address_is_told() -> None:
    backend = guard.GuardedBackend(guard.AllowedHosts(), resolver=_nobody)
    with pytest.raises(ToolError, match=r"the name nowhere\.example cannot be resolved"):
        await backend.connect_tcp("nowhere.example", 80)


# ── part by part ─────────────────────────────────────────────────────────────────────────────────────────────────


class Network:
    """Takes connections to some addresses, and fails with the others as it is told."""

    def __init__(self, **failing: Exception) -> None:
        self.failing = failing
        self.tried: list[Any] = []

    async def connect_tcp(self, *how: Any) -> Any:
        self.tried.append(how)
        failure = self.failing.get(f"at{how[0].rpartition('.')[2]}")
        if failure is not None:
            raise failure
        return f"to {how[0]}"


def guarding(network: Any, answer: Any, *allowed: str) -> tuple[Any, list[Any]]:
    asked: list[Any] = []

    async def resolver(host: str, port: int) -> list[str]:
        asked.append((host, port))
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    return GuardedBackend(AllowedHosts.of(allowed), resolver, network), asked


async def test_one_address_after_the_other_is_tried_and_the_last_for_all_the_time() -> None:
    refused, silent = httpcore.ConnectError("no"), httpcore.ConnectTimeout("no")
    for failing, reached in (({}, 1), ({"at1": refused}, 2), ({"at1": silent, "at2": refused}, 3)):
        network = Network(**failing)
        backend, asked = guarding(network, ["8.8.8.1", "8.8.8.2", "8.8.8.3"])
        assert await backend.connect_tcp("a.example", 81 + 1_000, 7.5) == f"to 8.8.8.{reached}"
        assert asked == [("a.example", 1_081)]
        limits = [guard.ATTEMPT_SECONDS, guard.ATTEMPT_SECONDS, 7.5]
        assert network.tried == [(f"8.8.8.{n}", 1_081, limits[n - 1]) for n in range(1, reached + 1)]
    # another fault is none of the address's
    backend, _ = guarding(Network(at1=httpcore.ReadError("no")), ["8.8.8.1", "8.8.8.2"])
    with pytest.raises(httpcore.ReadError):
        await backend.connect_tcp("a.example", 80)


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        ([], FetchError, "the name a.example cannot be resolved"),
        (OSError("no"), FetchError, "the name a.example cannot be resolved"),
        (UnicodeError("no"), FetchError, "the name a.example cannot be resolved"),
        (TimeoutError("no"), FetchError, "the name servers do not answer for a.example"),
        (["8.8.8.8", "10.0.0.1"], Blocked, "a.example is not on the public internet"),
    ],
)
async def test_where_a_name_leads_nowhere_nothing_is_connected_to(
    answer: Any, error: type[Exception], why: str
) -> None:
    network = Network()
    backend, _ = guarding(network, answer)
    with pytest.raises(error, match=why):
        await backend.connect_tcp("a.example", 80)
    assert network.tried == []


async def test_a_private_host_that_is_allowed_is_reached_at_the_ports_that_it_is_allowed_for() -> None:
    for allowed, port, reached in (
        (["a.example"], 80, True), (["a.example"], 22, False), (["a.example:22"], 22, True),
        (["a.example:22"], 80, False), (["b.example"], 80, False),
    ):  # fmt: skip
        network = Network()
        backend, asked = guarding(network, ["10.0.0.1"], *allowed)
        if reached:
            assert await backend.connect_tcp("a.example", port, None) == "to 10.0.0.1"
        else:
            with pytest.raises(Blocked):
                await backend.connect_tcp("a.example", port, None)
        assert network.tried == ([("10.0.0.1", port, None)] if reached else [])
        # what no web server listens on is not even looked up
        assert len(asked) == (allowed != ["a.example"] or port != 22)


async def test_whoever_waits_between_two_attempts_waits() -> None:
    backend, _ = guarding(Network(), [])
    began = asyncio.get_running_loop().time()
    await backend.sleep(0.02)
    assert asyncio.get_running_loop().time() - began >= 0.02
