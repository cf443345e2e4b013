"""Errors of a server as the errors that callers know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shared.bus.replies import (
    BusFull,
    Command,
    ConnectionLost,
    Reply,
    ReplyError,
    checked,
    committed,
)
from shared.bus.scripts import Script, load_scripts
from shared.envelope import order
from shared.errors import BusUnavailable


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed", BusFull),
        ("MISCONF Redis is configured to save", BusFull),
        ("NOREPLICAS Not enough good replicas to write.", BusFull),
        ("BUSY Redis is busy running a script", BusUnavailable),
        ("BUSYGROUP Consumer Group name already exists", ReplyError),
        ("WRONGTYPE Operation", ReplyError),
    ],
)
def test_an_error_says_what_its_caller_can_do(text: str, kind: type[Exception]) -> None:
    reply = ReplyError(text)
    with pytest.raises(kind, match=text) as raised:
        checked(reply)
    assert type(raised.value) is kind
    # raised itself it would hold the frame that holds it, until somebody collects the garbage
    assert raised.value is not reply
    if kind is ReplyError:
        assert ReplyError(text).code == text.split()[0]


def test_what_is_no_error_passes() -> None:
    assert checked(b"x") == b"x"
    assert checked(None) is None


def test_transaction_returns_replies_or_raises_the_reason() -> None:
    assert committed([b"OK", b"QUEUED", b"QUEUED", [b"1", ReplyError("WRONGTYPE no")]])[0] == b"1"
    # the server refused one of them, and then all
    with pytest.raises(BusFull, match="OOM"):
        committed([b"OK", ReplyError("OOM no room"), b"QUEUED", ReplyError("EXECABORT because of previous errors")])
    with pytest.raises(ReplyError, match="EXECABORT"):
        committed([b"OK", b"QUEUED", ReplyError("EXECABORT on its own")])


def test_script_is_called_by_its_hash_and_key_count() -> None:
    script = Script("return 1")
    assert script(("a", "b"), 3) == ("EVALSHA", "e0e1f9fabfc9d4800c877a703b823ac0578ff8db", 2, "a", "b", 3)
    assert Script.known[script.sha] is script
    del Script.known[script.sha]


@pytest.mark.parametrize(
    ("known", "loaded"), [([0, 1], ["return 1"]), ([1, 1], []), (ReplyError("NOPERM no"), ["return 1", "return 2"])]
)
async def test_a_server_is_given_the_scripts_that_it_does_not_know(
    known: Any, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Script, "known", {})
    scripts, asked = [Script("return 1"), Script("return 2")], list[Sequence[Command]]()

    async def ask(commands: Sequence[Command]) -> list[Reply]:
        asked.append(commands)
        return [known] if len(asked) == 1 else [b"sha"] * len(commands)

    assert await load_scripts(ask) == [b"sha"] * len(loaded)
    asking = [("SCRIPT", "EXISTS", *[script.sha for script in scripts])]
    loading = [[("SCRIPT", "LOAD", source) for source in loaded]] if loaded else []
    assert asked == [asking, *loading]
    # one that cannot tell is given none
    known, asked = ReplyError("BUSY a script runs"), []
    assert (await load_scripts(ask), asked) == ([known], [asking])


def test_connection_lost_once_counts_no_broken_message() -> None:
    assert (str(ConnectionLost("x")), ConnectionLost("x").broken, ConnectionLost("x", 3).broken) == ("x", 0, 3)


def test_ids_are_ordered_by_their_numbers() -> None:
    ids = ["10-0", "9-10", "9-9", "9"]
    assert sorted(ids, key=order) == ["9", "9-9", "9-10", "10-0"]
    assert order("9") == order("9-0")
