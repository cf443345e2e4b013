"""Every key there is in Redis: its form, what it is, who writes it and how long it stays; and the builder of each.

A part in angle brackets is filled in. Every key begins with the deployment's prefix (`shared/key_prefix.py`): on a
server in cluster mode its hash tag puts all keys into one slot. The table in docs/bus.md is made from this file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shared.contracts import (
    DEAD_LETTER,
    QUERY_RECEIVED,
    REWARD_EVENT,
    SUBJECTS,
    TOOL_REQUEST,
    TOOL_RESULT,
    TOOL_SCHEMA,
    is_untrusted,
)
from shared.errors import DecodeError
from shared.key_prefix import PREFIX

Kind = Literal["stream", "string", "hash", "set", "sorted set"]

_PLACE = re.compile(r"<([a-z_]+)>")
# What stands in a place, where it is not just something without colons and braces.
_FORMS = {
    "subject": "|".join(
        (
            *(re.escape(subject.name) for subject in SUBJECTS),
            *(re.escape(subject.name) + r"\.[^:{}]+" for subject in (TOOL_REQUEST, TOOL_RESULT)),
        )
    ),
    "query_id": r"[0-9]+-[0-9]+",
    "session": r"[^{}]+",
    "response_id": r"[^{}]+",
    "engram_id": r".+",
    "call_id": r".+",
    "name": r".+",
    # as an engram tells it, also where it is of no query
    "said": r".*",
    "stream": rf"(?:{re.escape(PREFIX)})?[^{{}}]+",
    "sums": r"counts|sums",
}


@dataclass(frozen=True)
class Family:
    """All keys of one form, and what builds them: called with what stands in the places of its pattern, in their order.

    owner: who writes them. expires: as it is told. lasting: they have no time to live, and stay until somebody removes
    them.
    """

    pattern: str
    kind: Kind
    what: str
    owner: str
    expires: str
    lasting: bool = False

    def __call__(self, *parts: str) -> str:
        """Return a key. Raises DecodeError for a part in braces that is empty or has braces itself."""
        for part, braced in zip(parts, self._braced, strict=True):
            own = part.removeprefix(PREFIX)
            if braced and (not own or "{" in own or "}" in own):
                raise DecodeError(f"{part!r} cannot be part of a key like {self.pattern}")
        return self._form % parts

    def parts(self, key: str) -> tuple[str, ...] | None:
        """What a key of this family is made of; None when it is of another one."""
        match = self._regex.fullmatch(key)
        return None if match is None else match.groups()

    @property
    def glob(self) -> str:
        """For SCAN: all keys of this family, and perhaps others."""
        return _PLACE.sub("*", self.pattern)

    @cached_property
    def _form(self) -> str:
        return _PLACE.sub("%s", self.pattern)

    @cached_property
    def _braced(self) -> tuple[bool, ...]:
        before = [self.pattern[: match.start()] for match in _PLACE.finditer(self.pattern)]
        return tuple(text.count("{") > text.count("}") for text in before)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        # every second piece is the name of a place
        pieces = _PLACE.split(self.pattern)
        return re.compile(
            "".join(
                f"({_FORMS.get(piece, '[^:{}]+')})" if number % 2 else re.escape(piece)
                for number, piece in enumerate(pieces)
            )
        )


FAMILIES: list[Family] = []


def _family(pattern: str, kind: Kind, what: str, *, owner: str, expires: str = "", lasting: str = "") -> Family:
    """`expires`: when it goes by itself; or `lasting`: until when it stays."""
    family = Family(PREFIX + pattern, kind, what, owner, expires or lasting, lasting=bool(lasting))
    FAMILIES.append(family)
    return family


_RESPONDENTS = "generator, respondent-b"
_IN_QUERIES = f"{{{QUERY_RECEIVED.stream}}}"

# A family a row: its form and type, what it is, who writes it, and when it goes by itself or until when it stays.
# fmt: off

# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────
stream_key = _family("<subject>", "stream", "the subjects above", owner="see there", lasting="trimmed")
journal_key = _family("journal:<query_id>:<respondent>", "stream",
    "everything that happened to one response; also the channel on which it rings",
    owner=f"{_RESPONDENTS}; behind the end critic, reward", expires="`retention` (a day) after its end")
inbox_key = _family("inbox:<participant>:<replica>", "stream", "tool results and wake-ups for one process",
    owner="the replica; written by whoever answers it", expires="a minute after its last heartbeat")
once_key = _family("once:{<stream>}:<name>", "string", "the id of the entry that was published once under that name",
    owner="whoever publishes", expires="`retention` after its query's deadline; of a replayed dead letter a day")
DEAD_LETTER_VERIFIED_UP_TO = _family("letters-seen", "string",
    "the newest dead letter that was verified not to be forged",
    owner="the janitor", lasting="no")()
result_key = _family(f"result:{{{TOOL_REQUEST.stream}.<tool>}}:<call_id>", "string", "the result of a call",
    owner="the tool's worker", expires="`retention`; a large one sooner")

# ── queries and their lanes ──────────────────────────────────────────────────────────────────────────────────────
record_key = _family(f"query:{_IN_QUERIES}:<query_id>", "hash",
    "whose the query is, its text and deadline, by the clock of the bus",
    owner="gateway", expires="`retention` after the deadline")
queries_key = _family(f"queries:{_IN_QUERIES}:<session>", "sorted set",
    "the session's queries of which something may still be kept, by the time (ms) until when",
    owner="gateway", expires="with the last of them")
lane_key = _family(f"lane:{_IN_QUERIES}:<respondent>:<session>", "sorted set",
    "the session's unfinished queries in their order",
    owner=f"gateway, {_RESPONDENTS}", expires="a day after its last use")
CHORES = _family(f"chores:{_IN_QUERIES}", "sorted set",
    "queries of programs, not of people, that are being answered, by the time (ms) until when",
    owner="generator", expires="a day after its last use")()
waiting_key = _family(f"waiting:{_IN_QUERIES}:<respondent>:<session>", "hash", "whose inbox to wake, per waiting query",
    owner=_RESPONDENTS, expires="a day after its last use")
cancel_key = _family("cancel:<query_id>", "string",
    "the query is cancelled, or taken back: for whoever was away when that was announced, or takes it later",
    owner="gateway", expires="a day; taken back: a week")

# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────
session_key = _family("session:{<session>}", "hash", "owner, title, times",
    owner="gateway", lasting="until it is deleted")
turns_key = _family("session:{<session>}:history:<respondent>", "sorted set",
    "all turns, each behind its query's id; read in pages, the newest 50 are what a model is shown at most",
    owner=_RESPONDENTS, lasting="with its session")
summary_key = _family("session:{<session>}:summary", "hash",
    "what was said in its older turns, in the model's words: how many, until which query, the text",
    owner="generator", lasting="until its session, or a turn that it rests on, is gone")
steps_key = _family("session:{<session>}:steps", "hash",
    "what happened in each of its queries, behind the query's id: the journal, shortened (at most 64 kB); behind id "
    "and `critique`, `pairwise` or `reward` what was thought of it later, or why it is `unanswered`",
    owner="generator, critic, reward", lasting="with its session")
deleted_key = _family("session:{<session>}:deleted", "string",
    "the newest query there was when the session was deleted: none up to it may bring anything back",
    owner="gateway", expires="a week")
user_sessions_key = _family("sessions:<user>", "sorted set", "a user's sessions by last use",
    owner="gateway", lasting="with the last of them")

# ── judging ──────────────────────────────────────────────────────────────────────────────────────────────────────
grade_key = _family("grade:<response_id>", "string", "the grade of an answer, asked for once",
    owner="critic", expires="`retention`")
verdict_key = _family("verdict:<query_id>", "string", "the comparison of the two answers, asked for once",
    owner="critic", expires="`retention`")
pair_key = _family("pairs:{pairs}:<query_id>", "hash",
    "the two answers that are to be compared, and whose entry compares them; or that nothing more is expected",
    owner="critic", expires="an hour, or `retention` if that is shorter")
PAIRS_WAITING = _family("pairs:{pairs}:waiting", "sorted set",
    "answers that wait for their counterpart, oldest first; at most `pairwise_buffer`",
    owner="critic", expires="an hour, or `retention` if that is shorter")()
vote_key = _family(f"rewards:{{{REWARD_EVENT.stream}}}:vote:<response_id>", "hash",
    "the vote on an answer that counts, so that a later one takes its place",
    owner=_RESPONDENTS, expires="a day after twice `retention`")
rewards_key = _family(f"rewards:{{{REWARD_EVENT.stream}}}:<respondent>:<sums>", "hash",
    "how often (`counts`) and how well (`sums`) answers were rated, by configuration and intent; at most 400 kinds",
    owner=_RESPONDENTS, lasting="no")

# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────
engram_key = _family("memory:state:<engram_id>", "hash",
    "an engram's newest annotations and its owner, or that it was deleted",
    owner="memory", expires="`pending_days` (7); deleted: `forget_days` (30)")
_USER_GONE = _family("memory:gone:<user>", "string", "until when (ms) what is remembered of a user is deleted",
    owner="memory", expires="`forget_days` (30)")
_SESSION_GONE = _family("memory:gone:<user>:<session>", "string", "the same of one session",
    owner="memory", expires="`forget_days` (30)")
_QUERY_GONE = _family("memory:taken-back:<user>:<said>", "string", "the same of what was said in one query",
    owner="memory", expires="`forget_days` (30)")
REEMBEDDING = _family("memory:reembedding", "string", "the replica that writes the vectors of another model",
    owner="memory", expires="thirty seconds after its last sign")()
DOCUMENT_VECTORS = _family("memory:document-vectors", "string", "the replica that makes the vectors of documents",
    owner="memory", expires="thirty seconds after its last sign")()

# ── participants ─────────────────────────────────────────────────────────────────────────────────────────────────
replica_key = _family("replica:<participant>:<replica>", "string", "one live process: state, load, tools, facts",
    owner="the replica", expires="the visibility timeout (three heartbeats)")
REPLICAS = _family("replicas", "sorted set", "index of the above",
    owner="all", lasting="cleaned by whoever reads it")()
starts_key = _family("starts:<participant>", "string", "how many replicas of it were ever started",
    owner="the replica", lasting="no")
KNOWN_TOOLS = _family("tools", "set", "names of tools that were ever announced",
    owner="whoever reads the registry", lasting="no")()
MCP_PINS = _family("mcp:pins", "hash", "each MCP server's tools, by their hashes, as they were when it was first seen",
    owner="mcp", lasting="no")()
JANITOR = _family("janitor", "string", "the replica that trims just now",
    owner="any participant but the web's", expires="fifteen heartbeats")()
settings_key = _family("settings:<participant>", "hash", "run-time settings", owner="gateway", lasting="no")
schema_key = _family("settings-schema:<participant>", "string", "their schema and start values",
    owner="the participant's replicas", lasting="no")

# ── the gateway's own ────────────────────────────────────────────────────────────────────────────────────────────
API_KEYS = _family("keys", "hash", "API keys, by their hash", owner="gateway", lasting="no")()
link_key = _family("link:<name>", "string", "whom a one-time link to the console is for, by its token's hash",
    owner="gateway", expires="a minute")
RESTORE_LOCK = _family("restore:lock", "string", "the restore that is under way",
    owner="gateway", expires="ten seconds after its last sign")()
RESTORE_UNFINISHED = _family("restore:unfinished", "string", "which file was being restored, and how",
    owner="gateway", lasting="until it is complete")()

# fmt: on


def subject_of(stream: str) -> str:
    """The name that a stream is shown by."""
    return stream.removeprefix(PREFIX)


def nothing_key(stream: str) -> str:
    """A key that is never there. Whoever reads the stream may write it: under such a one he sets entries aside."""
    return once_key(DEAD_LETTER.stream, f"{stream}:nothing")


def taken_back_key(user_id: str, query_id: str) -> str:
    return _QUERY_GONE(_apart(user_id), query_id)


def gone_key(user_id: str, session_id: str = "") -> str:
    user = _apart(user_id)
    return _SESSION_GONE(user, session_id) if session_id else _USER_GONE(user)


def _apart(part: str) -> str:
    """A part behind which another may come: a colon in it does not look like the end of it."""
    return part.replace("%", "%25").replace(":", "%3A")


# Prefixes of keys that untrusted workers may write.
_QUOTA_KINDS = tuple(
    key.encode()
    for key in (
        inbox_key.pattern.partition("<")[0],
        TOOL_SCHEMA.stream,
        DEAD_LETTER.stream,
        REPLICAS,
    )
)
# The prefix of the request streams of tools. Only trusted participants write entries to them.
REQUESTS = f"{TOOL_REQUEST.stream}.".encode()
# Prefixes of keys with the name of a tool or a participant: untrusted workers may write those with an untrusted name.
_QUOTA_KINDS_BY_NAME = tuple(
    key.encode()
    for key in (
        *(family.pattern.partition("<")[0] for family in (result_key, replica_key, schema_key, starts_key)),
        f"{TOOL_RESULT.stream}.",
        REQUESTS.decode(),
        once_key(DEAD_LETTER.stream, f"{TOOL_REQUEST.stream}."),
    )
)


# For SCAN: all keys of this product.
OURS = f"{PREFIX}*".encode()


def quota_kind(key: bytes) -> bytes | None:
    """Return the prefix of a key's kind; None for a key that no untrusted worker may write."""
    if kind := next((kind for kind in _QUOTA_KINDS if key.startswith(kind)), None):
        return kind
    kind = next((kind for kind in _QUOTA_KINDS_BY_NAME if key.startswith(kind)), None)
    if kind is None:
        return None
    name = re.split(rb"[:}]", key[len(kind) :], maxsplit=1)[0]
    return kind if is_untrusted(name.decode(errors="replace")) else None


def table() -> str:
    """All families, for the docs."""
    lines = ["| key | type | what | written by | expires |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        cells = (f"`{family.pattern}`", family.kind, family.what, family.owner, family.expires)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
