"""Files of earlier messages: their forms, the fitting into the context, and learning from a server's counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generator.attachments import Wanted
from services.generator.context import (
    EARLIER_SHARE,
    IMAGE_TOKENS,
    Conversation,
    EarlierFile,
    Rates,
    estimate,
    fit,
    images_in,
    reserve,
)
from services.generator.earlier import Form, Loader, given_history, recorded_forms, with_files_of
from shared.contracts import FILES_ALONE, ChatTurnMessage
from shared.llm.port import ModelFacts
from shared.participant.files import Fetched, FilesRefused, FilesUnavailable
from shared.records.events import Entry
from shared.records.response_state import EMPTY, replay
from shared.records.sessions import Turn

PNG = {"name": "a.png", "type": "image/png", "size": 100, "state": "ready", "chars": 0}
TEXT = {"name": "a.md", "type": "text/markdown", "size": 100, "state": "ready", "chars": 5}
PDF = {"name": "m.pdf", "type": "application/pdf", "size": 100, "state": "ready", "chars": 99_000, "pages": 12}


class Kept:
    """Files at a memory, by id. away: the memory does not answer. lost: a file that is deleted after its look-up."""

    def __init__(self, files: dict[str, dict[str, Any]], *, away: bool = False, lost: str = "") -> None:
        self.files, self.away, self.lost = files, away, lost
        self.fetched: list[str] = []

    async def operate(self, _user_id: str, **args: Any) -> dict[str, Any]:
        if self.away:
            raise FilesUnavailable("away")
        known = [{"id": id, **self.files[id]} for id in args["ids"] if id in self.files]
        return {"files": known, "missing": [id for id in args["ids"] if id not in self.files]}

    async def fetch(self, _user_id: str, id: str, **_more: Any) -> Fetched:
        if id == self.lost:
            raise FilesRefused(404, "not_found", "gone")
        self.fetched.append(id)
        return Fetched({"id": id, **self.files[id]}, b"bytes")


def loader(kept: Any, before: dict[str, Form] | None = None, *, sees: bool = True, num_ctx: int = 16_000) -> Loader:
    abilities = frozenset({"chat", "vision"} if sees else {"chat"})
    return Loader(kept, Wanted("ann", "m", ModelFacts(abilities=abilities), num_ctx), before or {})


@pytest.mark.parametrize(
    ("kept", "said", "sees", "form", "line"),
    [
        (Kept({"f": PNG}), {}, True, Form.IMAGE, "a.png, an image; it does not fit any more and is not shown"),
        (Kept({"f": PNG}), {}, False, Form.UNSEEN, "a.png, an image, which this model cannot see"),
        (Kept({}), PNG, False, Form.DELETED, "a.png; it was deleted"),
        (Kept({}), {}, True, Form.DELETED, "a file; it was deleted"),
        (Kept({"f": PNG}, lost="f"), {}, True, Form.DELETED, "a.png; it was deleted"),
        (Kept({}, away=True), PNG, True, Form.AWAY, "a.png; it cannot be read at the moment"),
        (Kept({}, away=True), PNG, False, Form.UNSEEN, "a.png, an image, which this model cannot see"),
        (Kept({}, away=True), PDF, True, Form.AWAY, "m.pdf, 12 pages; it cannot be read at the moment"),
        (Kept({"f": TEXT}), {}, True, Form.TEXT, "a.md; use search_documents to read it"),
        (Kept({"f": TEXT}, lost="f"), {}, True, Form.DELETED, "a.md; it was deleted"),
        (Kept({"f": PDF}), {}, True, Form.SEARCH, "m.pdf, 12 pages; use search_documents to read it"),
        (Kept({"f": {**PDF, "pages": 1}}), {}, True, Form.SEARCH, "m.pdf, 1 page; use search_documents to read it"),
        (Kept({"f": {**TEXT, "state": "reading"}}), {}, True, Form.SEARCH, "a.md; use search_documents to read it"),
        (Kept({"f": {**TEXT, "state": "failed", "reason": "no text"}}), {}, True, Form.UNREADABLE,
         "a.md; it could not be read: no text"),
        (Kept({"f": {**PNG, "size": 30_000_000}}), {}, True, Form.LEFT_OUT,
         "a.png, an image; it does not fit any more and is not shown"),
        (Kept({"f": {**TEXT, "name": "a]\n[end.md"}}), {}, True, Form.TEXT,
         "a) (end.md; use search_documents to read it"),
    ],
)  # fmt: skip
async def test_earlier_file_gets_the_form_of_its_state(
    kept: Kept, said: Any, sees: bool, form: Form, line: str
) -> None:
    earlier = await loader(kept, sees=sees).load([{"id": "f", **said}])
    assert earlier.forms == {"f": form}
    assert earlier.files["f"].line == f"[attached earlier: {line}]"
    assert (earlier.files["f"].image is not None) == (form is Form.IMAGE)
    assert bool(earlier.files["f"].text) == (form is Form.TEXT)


async def test_image_too_large_leaves_room_for_older_ones() -> None:
    kept = Kept({"large": {**PNG, "size": 30_000_000}, "small": PNG})
    earlier = await loader(kept).load([{"id": "large"}, {"id": "small"}])
    assert earlier.forms == {"large": Form.LEFT_OUT, "small": Form.IMAGE}


async def test_takeover_sends_files_in_the_recorded_form() -> None:
    kept = Kept({"f": PNG, "g": TEXT})
    first = await loader(kept, sees=False).load([{"id": "f"}, {"id": "g"}])
    assert recorded_forms(EMPTY) is None
    known = recorded_forms(replay([Entry("1-5", 0, first.event())]))
    assert known == first.forms == {"f": Form.UNSEEN, "g": Form.TEXT}
    # The model sees images now, and one file was deleted: only the deleted file changes its form.
    del kept.files["g"]
    second = await loader(kept, known).load([{"id": "f"}, {"id": "g"}])
    assert second.forms == {"f": Form.UNSEEN, "g": Form.DELETED}


async def test_newest_images_are_loaded_and_no_more_than_fit() -> None:
    kept = Kept({str(n): PNG for n in range(30)})
    earlier = await loader(kept).load([{"id": str(n)} for n in range(30)])
    most = int(EARLIER_SHARE * (16_000 - reserve(16_000)) / IMAGE_TOKENS)
    assert kept.fetched == [str(n) for n in range(most)]
    assert list(earlier.forms.values()) == [Form.IMAGE] * most + [Form.LEFT_OUT] * (30 - most)


async def test_clients_history_carries_its_files_in_the_same_forms() -> None:
    kept = Kept({"i": PNG, "t": TEXT})
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "look", "attachments": ["i", "gone"]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "Here.", "tool_call_id": "1", "attachments": ["i", "t"]},
        {"role": "assistant", "content": "So it is."},
    ]
    messages, earlier = await given_history(loader(kept), history)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user", "assistant"]
    sent = Conversation([], [list(messages)]).fit([], [], 16_000).messages
    assert sent[0]["content"] == "[attached earlier: a file; it was deleted]\n\nlook"
    assert [images_in([message]) for message in sent] == [1, 0, 0, 1, 0]
    assert sent[2]["content"].endswith("[end of attached file a.md]\n\nHere.")
    assert set(earlier.forms) == {"i", "gone", "t"}
    blind, _ = await given_history(loader(kept, sees=False), history)
    assert [message["role"] for message in blind] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("said", "carries", "expected"),
    [
        ("what is it?", None, ["i"]),
        ("[passages]\n\nwhat  is it?", None, ["i"]),
        # The client's own attachments count.
        ("what is it?", ["other"], ["other"]),
        ("what was it?", None, None),
    ],
)
def test_clients_history_gets_the_files_of_its_session(
    said: str, carries: list[str] | None, expected: list[str] | None
) -> None:
    turns = [Turn("1-0", "hello", "x", 1), Turn("2-0", "what is it?", "x", 2, attachments=({"id": "i"},))]
    history = [
        ChatTurnMessage(role="user", content="hello"),
        ChatTurnMessage(role="assistant", content="what is it?"),
        ChatTurnMessage(role="user", content=said, attachments=carries),
    ]
    assert [message.attachments for message in with_files_of(history, turns)] == [None, None, expected]


def test_clients_history_gets_the_files_of_a_wordless_turn() -> None:
    turns = [Turn("1-0", FILES_ALONE, "x", 1, attachments=({"id": "i"},))]
    for content in ("", FILES_ALONE):
        (found,) = with_files_of([ChatTurnMessage(role="user", content=content)], turns)
        assert found.attachments == ["i"]


# ── fitting ──────────────────────────────────────────────────────────────────────────────────────────────────

SYSTEM = {"role": "system", "content": "Be brief."}


def image(n: int) -> EarlierFile:
    return EarlierFile(f"i{n}", f"{n}.png", f"[left out {n}]", f"[unseen {n}]", image={"data": b"", "name": str(n)})


def text(n: int, length: int) -> EarlierFile:
    return EarlierFile(f"t{n}", f"{n}.md", f"[search {n}]", text="x" * length)


def turn(n: int, length: int, *files: EarlierFile) -> list[dict[str, Any]]:
    asked = {"role": "user", "content": f"q{n}", **({"files": list(files)} if files else {})}
    return [asked, {"role": "assistant", "content": "a" * length}]


@given(
    st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 3), st.integers(0, 4_000)), max_size=20),
    st.integers(2_000, 20_000),
)
def test_files_never_push_out_turns(turns: list[tuple[int, int, int]], num_ctx: int) -> None:
    history = [
        turn(n, length, *(image(10 * n + k) for k in range(images)), text(n, chars))
        for n, (length, images, chars) in enumerate(turns)
    ]
    current = [{"role": "user", "content": "now"}]
    talk = Conversation([SYSTEM], history)
    fitted = talk.fit(current, [], num_ctx)
    lines = [
        [{**m, "content": "\n\n".join([*(f.line for f in m.get("files", ())), m["content"]])} for m in one]
        for one in history
    ]
    bare = fit([SYSTEM], lines, current, [], num_ctx)
    assert (fitted.kept, fitted.dropped) == (bare.kept, bare.dropped)
    assert not any("files" in message for message in fitted.messages)
    # Added files stay below their share, and `tokens` counts them.
    assert fitted.tokens <= max(bare.tokens, EARLIER_SHARE * (num_ctx - reserve(num_ctx)))
    assert estimate(fitted.messages) <= fitted.tokens
    # Every image is either sent or listed as left out.
    sent = [one["name"] for message in fitted.messages for one in message.get("images", ())]
    every = [file for one in history for m in one for file in m.get("files", ()) if file.image]
    assert len(sent) + len(fitted.left_out) == len(every)


def test_conversation_without_room_sends_newest_files_first() -> None:
    history = [turn(n, 10, image(n)) for n in range(5)]
    room = 8_000 - reserve(8_000)
    fitted = Conversation([SYSTEM], history).fit([], [], 8_000)
    shown = [m["images"][0]["name"] for m in fitted.messages if "images" in m]
    assert shown == ["1", "2", "3", "4"]
    assert [file.id for file in fitted.left_out] == ["i0"]
    assert fitted.tokens <= EARLIER_SHARE * room
    (first,) = [m["content"] for m in fitted.messages if m["content"].endswith("q0")]
    assert first == "[left out 0]\n\nq0"


def test_conversation_for_a_blind_server_has_lines() -> None:
    talk = Conversation([SYSTEM], [turn(0, 10, image(0))])
    assert talk.resends_images()
    talk.sees = False
    assert not talk.resends_images()
    fitted = talk.fit([], [], 32_000)
    assert fitted.messages[1] == {"role": "user", "content": "[unseen 0]\n\nq0"}
    assert [file.id for file in fitted.left_out] == ["i0"]


@pytest.mark.parametrize(
    ("rates", "tokens", "images", "expected"),
    [
        # The ratio is known: the rest of the count belongs to the images.
        (Rates(4.0), 1_512, 2, Rates(4.0, 256)),
        (Rates(4.0), 5_000, 2, Rates(4.0, 2_000)),
        # The bounds hold: a count from a cache, a file larger than any image.
        (Rates(4.0), 1_010, 2, Rates(4.0, 256)),
        (Rates(4.0), 40_000, 2, Rates(4.0, 4_096)),
        # The ratio is unknown, and images are most of the prompt: no learning.
        (Rates(), 1_900, 1, Rates()),
        # The ratio is unknown, and images are a small part of the prompt.
        (Rates(), 5_000, 1, Rates(1.0, 1_000)),
        (Rates(), 1_000, 0, Rates(4.0)),
        (Rates(4.0, 300), None, 2, Rates(4.0, 300)),
    ],
)
def test_measure_with_images_learns_tokens_per_image(
    rates: Rates, tokens: int | None, images: int, expected: Rates
) -> None:
    talk = Conversation([], [], rates)
    talk.measure(4_000, tokens, images)
    assert (talk.rates.ratio, talk.rates.image) == (pytest.approx(expected.ratio), expected.image)
