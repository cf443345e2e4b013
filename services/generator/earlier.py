"""Files of earlier messages in the model's form: images and short texts while they fit, else a line for each file.

The memory lists the existing files and returns their bytes. A deleted file, or a memory that is away, gives a line and
never makes the question fail. The forms of the files are decided once for an answer. The journal records the decision
for a replica that takes the answer over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.generator.attachments import Wanted, quoted
from services.generator.context import EARLIER_SHARE, EarlierFile, Message, Rates, reserve
from shared.contracts import FILES_ALONE, ChatTurnMessage
from shared.participant.files import Files, FilesRefused, FilesUnavailable
from shared.records.events import FilesSent, SentEarlier
from shared.records.response_state import ResponseState
from shared.records.sessions import Turn, words_of

# The share of the prompt's room for all texts of earlier messages together.
TEXT_SHARE = 0.25
# Bytes of earlier images in one request: a model server may refuse a larger body.
MAX_IMAGE_BYTES = 20_000_000
# The most files per conversation to look up in the memory, the newest; older ones get a line from their turn's record.
_MAX_FILES = 100
# Seconds before the one retry when the memory is away.
_AGAIN_S = 0.5


class Form(StrEnum):
    """The form in which the model gets a file."""

    IMAGE = "image"
    TEXT = "text"
    # a line, for this reason
    SEARCH = "search"
    LEFT_OUT = "left_out"
    UNSEEN = "unseen"
    DELETED = "deleted"
    UNREADABLE = "unreadable"
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class Earlier:
    """Files by their ids, and the form of each."""

    files: Mapping[str, EarlierFile] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)

    def of(self, attachments: Iterable[Mapping[str, Any]]) -> list[EarlierFile]:
        return [self.files[str(one["id"])] for one in attachments]

    def event(self) -> FilesSent:
        """Return the decision for the journal."""
        forms = self.forms.items()
        return FilesSent(files=[SentEarlier(id=id, name=self.files[id].name, sent=form) for id, form in forms])


def recorded_forms(state: ResponseState) -> dict[str, Form] | None:
    """Return the forms of files that the journal has; None if it has no decision.

    A form of a newer release is left out: the file is looked up again.
    """
    known = {form.value for form in Form}
    sent = state.newest(FilesSent)
    return None if sent is None else {file.id: Form(file.sent) for file in sent.files if file.sent in known}


def in_summary(file: EarlierFile, form: Form) -> EarlierFile:
    """Return the file of a summarised turn: a line; an image counts as left out."""
    if form is not Form.IMAGE:
        return EarlierFile(file.id, file.name, file.line)
    return EarlierFile(file.id, file.name, file.line, left_out=True)


@dataclass(frozen=True, slots=True)
class Loader:
    """Loads files of earlier messages for one user and model. before: the decision in the journal. data: whether to
    fetch the bytes of images."""

    files: Files
    wanted: Wanted
    before: Mapping[str, Form] = field(default_factory=dict)
    data: bool = True

    async def load(self, newest_first: Iterable[Mapping[str, Any]], rates: Rates = Rates()) -> Earlier:
        """Return these files. newest_first: the records of their turns, each with an `id`."""
        attached: dict[str, Mapping[str, Any]] = {}
        for one in newest_first:
            attached.setdefault(str(one["id"]), one)
        if not attached:
            return Earlier()
        known = await self._known(list(attached)[:_MAX_FILES])
        about = {id: {"name": "a file", **record, **((known or {}).get(id) or {})} for id, record in attached.items()}
        forms = self._forms(about, known, rates)
        found = dict(zip(about, await asyncio.gather(*(self._file(about[id], forms[id]) for id in about)), strict=True))
        return Earlier({id: file for id, (file, _) in found.items()}, {id: form for id, (_, form) in found.items()})

    async def _known(self, ids: Sequence[str]) -> dict[str, dict[str, Any] | None] | None:
        """Return the memory's facts about files by id, None for a deleted file; None while the memory is away."""
        for last in (False, True):
            try:
                found = await self.files.operate(self.wanted.user_id, op="get", ids=ids)
            except FilesUnavailable:
                if not last:
                    await asyncio.sleep(_AGAIN_S)
                continue
            except FilesRefused:
                return None
            return {**dict.fromkeys(ids), **{str(one["id"]): one for one in found["files"]}}
        return None

    def _forms(
        self, about: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any] | None, rates: Rates
    ) -> dict[str, Form]:
        """Choose the forms, newest first: load as much as would fit into an otherwise empty prompt."""
        context = self.wanted.facts.context(self.wanted.num_ctx)
        room = context - reserve(context)
        images, size = int(EARLIER_SHARE * room / rates.image), MAX_IMAGE_BYTES
        chars = int(TEXT_SHARE * room * rates.ratio)
        forms: dict[str, Form] = {}
        for id, file in about.items():
            form = self._form(file, known is None, known is not None and known.get(id, file) is None)
            if form is Form.IMAGE:
                if images < 1 or file.get("size", 0) > size:
                    form = Form.LEFT_OUT
                else:
                    images, size = images - 1, size - file.get("size", 0)
            elif form is Form.TEXT:
                if file["chars"] > chars:
                    form = Form.SEARCH
                else:
                    chars -= file["chars"]
            forms[id] = self.before.get(id, form) if form is not Form.DELETED else form
        return forms

    def _form(self, file: Mapping[str, Any], away: bool, deleted: bool) -> Form:
        if deleted:
            return Form.DELETED
        if str(file.get("type", "")).startswith("image/"):
            return Form.UNSEEN if self.wanted.blind else Form.AWAY if away else Form.IMAGE
        if away:
            return Form.AWAY
        if file.get("state") == "failed":
            return Form.UNREADABLE
        return Form.TEXT if file.get("state") == "ready" and "chars" in file else Form.SEARCH

    async def _file(self, about: Mapping[str, Any], form: Form) -> tuple[EarlierFile, Form]:
        """Return a file with its content, and its form, which changes if the content cannot be fetched."""
        id, name = str(about["id"]), str(about["name"])
        if form in (Form.IMAGE, Form.TEXT) and (form is Form.TEXT or self.data):
            try:
                fetched = await self.files.fetch(self.wanted.user_id, id, text=form is Form.TEXT)
            except FilesUnavailable:
                form = Form.AWAY
            except FilesRefused:
                form = Form.DELETED
            else:
                about = {**about, **fetched.about}
                content = fetched.content
        else:
            content = b""
        match form:
            case Form.IMAGE:
                image = {"type": about["type"], "data": content, "name": name, "id": id}
                left_out, unseen = line(about, Form.LEFT_OUT), line(about, Form.UNSEEN)
                return EarlierFile(id, name, left_out, unseen, image=image), form
            case Form.TEXT:
                text = quoted(about, content.decode("utf-8", errors="replace"))
                return EarlierFile(id, name, line(about, Form.SEARCH), text=text), form
            case _:
                return EarlierFile(id, name, line(about, form), left_out=form is Form.LEFT_OUT), form


def line(about: Mapping[str, Any], form: Form) -> str:
    """Return the line in place of a file."""
    # A name must not end the line.
    name = " ".join(str(about["name"]).split()).translate(str.maketrans("[]", "()"))
    pages = about.get("pages")
    if pages:
        name += f", {pages} page{'s' if pages != 1 else ''}"
    match form:
        case Form.LEFT_OUT | Form.IMAGE:
            why = ", an image; it does not fit any more and is not shown"
        case Form.UNSEEN:
            why = ", an image, which this model cannot see"
        case Form.DELETED:
            why = "; it was deleted"
        case Form.UNREADABLE:
            why = f"; it could not be read: {about.get('reason') or 'it is damaged'}"
        case Form.AWAY:
            why = "; it cannot be read at the moment"
        case Form.SEARCH | Form.TEXT:
            why = "; use search_documents to read it"
    return f"[attached earlier: {name}{why}]"


def with_files_of(messages: Sequence[ChatTurnMessage], turns: Sequence[Turn]) -> list[ChatTurnMessage]:
    """Return a client's history; messages without files get those of their turn in the session."""
    found: list[ChatTurnMessage] = []
    place = 0
    for message in messages:
        at = next((n for n in range(place, len(turns)) if _asks(message, turns[n])), None)
        if at is not None:
            place = at + 1
            if turns[at].attachments and not message.attachments:
                message = message.model_copy(update={"attachments": [str(one["id"]) for one in turns[at].attachments]})
        found.append(message)
    return found


def _asks(message: ChatTurnMessage, turn: Turn) -> bool:
    """Return whether a message has the question of a turn; clients may put material before it."""
    text, question = " ".join(message.content.split()), " ".join(words_of(turn.query).split())
    return message.role == "user" and (text.endswith(question) if question else text in ("", FILES_ALONE))


async def given_history(loader: Loader, messages: Sequence[Message]) -> tuple[list[Message], Earlier]:
    """Return a client's own history with the files that its messages name.

    Images that tools returned stand behind the results of the tools, in a message of the user: servers take no images
    in a tool's message.
    """
    ids = [{"id": id} for message in reversed(messages) for id in message.get("attachments") or ()]
    earlier = await loader.load(ids)
    found: list[Message] = []
    returned: list[EarlierFile] = []
    for message in messages:
        if message["role"] != "tool":
            found += _shown(returned)
            returned = []
        bare = {name: value for name, value in message.items() if name != "attachments"}
        files = earlier.of([{"id": id} for id in dict.fromkeys(message.get("attachments") or ())])
        if message["role"] == "tool":
            returned += [one for one in files if one.image is not None]
            files = [one for one in files if one.image is None]
        found.append({**bare, "files": files} if files else bare)
    return [*found, *_shown(returned)], earlier


def _shown(images: list[EarlierFile]) -> list[Message]:
    return [{"role": "user", "content": "(What the tools returned to look at.)", "files": images}] if images else []
