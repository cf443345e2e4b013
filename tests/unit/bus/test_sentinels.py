"""Who the sentinels say is master, asked of servers that answer what the test says."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from support.scripted_redis import HangUp, ScriptedRedis
from support.waiting import eventually

from shared.bus import ReplyError
from shared.bus import sentinel as module
from shared.bus.clock import BusClock
from shared.bus.endpoint import Endpoint, Server
from shared.bus.sentinel import SentinelLink, Sentinels
from shared.bus.wire import Desync


def state(port: int, flags: str, epoch: int = 0) -> list[bytes]:
    fields = {"name": "mymaster", "ip": "127.0.0.1", "port": port, "flags": flags, "role-reported": "master"}
    fields["config-epoch"] = epoch
    return [str(part).encode() for field in fields.items() for part in field]


async def sentinels(stack: AsyncExitStack, *answers: Any) -> tuple[list[ScriptedRedis], str]:
    """One for each answer, and the URL that names them."""
    made = [ScriptedRedis(SENTINEL=answer) for answer in answers]
    servers = [await stack.enter_async_context(one.listening()) for one in made]
    places = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return made, f"redis+sentinel://me:p@{places}/mymaster/3?sentinel_username=other&sentinel_password=s"


async def test_one_sentinel_after_the_other_is_asked_until_one_knows_a_master_that_is_up() -> None:
    def hangs_up(*_: bytes) -> None:
        raise HangUp

    async with AsyncExitStack() as stack:
        unknown = ReplyError("ERR No such master with that name")
        made, url = await sentinels(stack, hangs_up, unknown, state(7, "s_down,master"), state(7, "master"), unknown)
        link = SentinelLink(Sentinels(Endpoint.parse(url)), name="test")
        assert await link.server() == Server("127.0.0.1", 7, username="me", password="p", database=3)
        await eventually(lambda: not any(one.connections for one in made))
    asked = [(b"AUTH", b"other", b"s"), (b"SENTINEL", b"MASTER", b"mymaster")]
    assert [one.asked for one in made] == [[asked]] * 4 + [[]]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (state(7, "slave"), "the master is slave"),
        (state(7, "s_down,master"), "the master is s_down,master"),
        (state(7, "master,o_down"), "the master is master,o_down"),
        (state(7, "disconnected,master"), "the master is disconnected,master"),
        (ReplyError("ERR No such master"), "ERR No such master"),
    ],
)
async def test_why_a_sentinel_knows_no_master_is_told(answer: Any, said: str) -> None:
    async with AsyncExitStack() as stack:
        (one,), url = await sentinels(stack, answer)
        with pytest.raises(ConnectionError) as told:
            await SentinelLink(Sentinels(Endpoint.parse(url)), name="test").server()
    assert str(told.value) == f"no sentinel knows a master that is up (127.0.0.1:{one.port}: {said})"


async def test_sentinels_that_do_not_answer_or_not_in_the_protocol_leave_time_for_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []

    async def opened(server: Server, _commands: Any) -> Any:
        if server.host == "c":
            return SimpleNamespace(abort=lambda: None), [state(7, "master")]
        raise {"a": TimeoutError(), "b": Desync("odd")}[server.host]

    def timeout(seconds: float) -> Any:
        given.append(seconds)
        return asyncio.timeout(None)

    monkeypatch.setattr(module, "open_wire", opened)
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(timeout=timeout))
    link = SentinelLink(Sentinels(Endpoint.parse("redis+sentinel://a,b,c/m/0")), name="test", timeout=60.0)
    assert (await link.server()).port == 7
    # and what is left is for the connection to the master
    assert len(given) == 3
    assert 30.0 < sum(given) < 60.0
    link = SentinelLink(Sentinels(Endpoint.parse("redis+sentinel://a,b/m/0")), name="test")
    with pytest.raises(ConnectionError, match=r"\(a:26379: TimeoutError; b:26379: odd\)"):
        await link.server()


async def test_the_master_is_used_once_it_says_itself_that_it_is_one() -> None:
    clock = BusClock()
    async with AsyncExitStack() as stack:
        master = ScriptedRedis(GET=b"1", ROLE=[b"slave", b"x", 1])
        port = (await stack.enter_async_context(master.listening())).port
        (sentinel,), url = await sentinels(stack, state(port, "master"))
        link = await stack.enter_async_context(
            SentinelLink(Sentinels(Endpoint.parse(url)), name="test/1", timeout=60.0, clock=clock)
        )
        await eventually(lambda: link.trouble)
        assert link.trouble == "the sentinels' master is a slave just now"
        master.answers["ROLE"] = ReplyError("NOPERM no")
        await eventually(lambda: link.trouble == "NOPERM no")
        master.answers["ROLE"] = [b"master", 1, []]
        assert await link.call("GET", "x") == b"1"
        # every connection is to whoever is master then
        assert len(sentinel.asked) == len(master.asked) >= 3
    handshake = [(b"AUTH", b"me", b"p"), (b"SELECT", b"3"), (b"CLIENT", b"ID"), (b"ROLE",)]
    assert master.asked[-1][:5] == [*handshake, (b"CLIENT", b"SETNAME", b"test/1")]
    assert clock.now_ms() == pytest.approx(5_000_000, abs=300_000)


async def test_a_sentinel_that_was_cut_off_is_not_believed_unless_all_say_so() -> None:
    async with AsyncExitStack() as stack:
        made, url = await sentinels(stack, state(7, "master", 1), state(8, "master", 2))
        known = Sentinels(Endpoint.parse(url))
        # nothing better is known yet
        assert (await known.ask(5.0)).port == 7
        made[0].answers["SENTINEL"] = ReplyError("ERR not now")
        assert (await known.ask(5.0)).port == 8
        made[0].answers["SENTINEL"] = state(7, "master", 1)
        assert (await known.ask(5.0)).port == 8
        # a later fail-over, and the same one told again
        made[0].answers["SENTINEL"] = state(9, "master", 3)
        assert [(await known.ask(5.0)).port for _ in range(2)] == [9, 9]
        # all of them were set up anew
        for one in made:
            one.answers["SENTINEL"] = state(6, "master", 0)
        assert [(await known.ask(5.0)).port for _ in range(2)] == [6, 6]


async def test_a_connection_leaves_a_master_that_the_sentinels_have_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK", 0.05)
    async with AsyncExitStack() as stack:
        old, new = (ScriptedRedis(GET=name, ROLE=[b"master", 1, []]) for name in (b"old", b"new"))
        ports = [(await stack.enter_async_context(one.listening())).port for one in (old, new)]
        (sentinel,), url = await sentinels(stack, state(ports[0], "master", 1))
        known = Sentinels(Endpoint.parse(url))
        links = [SentinelLink(known, name=f"test/{n}", timeout=5.0) for n in range(2)]
        for link in links:
            await stack.enter_async_context(link)
            assert await link.call("GET", "x") == b"old"
        # one that is away, or says nothing, makes nobody leave
        for answer in (ReplyError("ERR not now"), state(ports[1], "s_down,master", 2)):
            sentinel.answers["SENTINEL"] = answer
            asked = len(sentinel.asked)
            await eventually(lambda asked=asked: len(sentinel.asked) > asked + 2)
            assert [await link.call("GET", "x") for link in links] == [b"old", b"old"]
        assert [link.generation for link in links] == [1, 1]
        # an answer that makes no sense ends the connection, which says so
        sentinel.answers["SENTINEL"] = [b"flags", b"master"]
        await eventually(lambda: all(link.trouble for link in links))
        sentinel.answers["SENTINEL"] = state(ports[0], "master", 1)
        assert [await link.call("GET", "x") for link in links] == [b"old", b"old"]
        generations = [link.generation for link in links]
        # the old one still says that it is a master
        sentinel.answers["SENTINEL"] = state(ports[1], "master", 2)
        await eventually(lambda: all(link.generation > n for link, n in zip(links, generations, strict=True)))
        assert [await link.call("GET", "x") for link in links] == [b"new", b"new"]


async def test_what_one_connection_hears_from_the_sentinels_all_know() -> None:
    clock = BusClock()
    async with AsyncExitStack() as stack:
        _, url = await sentinels(stack, state(7, "master"))
        link = SentinelLink(Sentinels(Endpoint.parse(url)), name="test/1:commands", timeout=3.0, clock=clock)
        line = link.line("s", "test/1:inbox")
        assert (line._name, line._timeout, line._clock, line.server_of("s")) == ("test/1:inbox", 3.0, clock, None)
        await link.server()
        master = Server("127.0.0.1", 7, username="me", password="p", database=3)
        assert (link.server_of("s"), line.server_of("s")) == (master, master)
