"""Every key in Redis: its pattern, content, writer and lifetime, and the function that builds it.

Callers fill in the parts in angle brackets. Every key begins with the deployment's prefix (`shared/key_prefix.py`): on
a server in cluster mode its hash tag puts all keys into one slot. `make docs-keys` writes the table in docs/bus.md.
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
)
from shared.errors import DecodeError
from shared.key_prefix import PREFIX

Kind = Literal["stream", "string", "hash", "set", "sorted set"]

_PART = re.compile(r"<([a-z_]+)>")
# Regular expressions of parts that may contain colons or braces, or only certain words.
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
    # an engram's query id; empty if it has none
    "said": r".*",
    "stream": rf"(?:{re.escape(PREFIX)})?[^{{}}]+",
    "sums": r"counts|sums",
}


@dataclass(frozen=True)
class Family:
    """All keys of one pattern. A call builds a key from the parts of the pattern, in their order.

    owner: the participants that write the keys. expires: their lifetime, for the docs. lasting: they have no time to
    live.
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
        """Return the parts of a key; None if the key is of another family."""
        match = self._regex.fullmatch(key)
        return None if match is None else match.groups()

    @property
    def glob(self) -> str:
        """A pattern for SCAN that matches all keys of this family, and perhaps others."""
        return _PART.sub("*", self.pattern)

    @cached_property
    def _form(self) -> str:
        return _PART.sub("%s", self.pattern)

    @cached_property
    def _braced(self) -> tuple[bool, ...]:
        before = [self.pattern[: match.start()] for match in _PART.finditer(self.pattern)]
        return tuple(text.count("{") > text.count("}") for text in before)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        # Every second piece is the name of a part.
        pieces = _PART.split(self.pattern)
        return re.compile(
            "".join(
                f"({_FORMS.get(piece, '[^:{}]+')})" if number % 2 else re.escape(piece)
                for number, piece in enumerate(pieces)
            )
        )


FAMILIES: list[Family] = []


def _family(pattern: str, kind: Kind, what: str, *, owner: str, expires: str = "", lasting: str = "") -> Family:
    """Register a family. expires: its time to live; or lasting: the event that removes its keys."""
    family = Family(PREFIX + pattern, kind, what, owner, expires or lasting, lasting=bool(lasting))
    FAMILIES.append(family)
    return family


_RESPONDENTS = "generator, respondent-b"
_IN_QUERIES = f"{{{QUERY_RECEIVED.stream}}}"

# One row per family: pattern, type, content, writer, and lifetime.
# fmt: off

# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────
stream_key = _family("<subject>", "stream", "the subjects above", owner="see there", lasting="trimmed")
journal_key = _family("journal:<query_id>:<respondent>", "stream",
    "all events of one response; also the channel of its notifications",
    owner=f"{_RESPONDENTS}; after its end critic, reward", expires="`retention` (a day) after its end")
inbox_key = _family("inbox:<participant>:<replica>", "stream", "tool results and notifications for one process",
    owner="the replica, and those that answer it", expires="a minute after its last heartbeat")
once_key = _family("once:{<stream>}:<name>", "string",
    "idempotency key: the id of the entry that was published under this name",
    owner="the publisher", expires="`retention` after its query's deadline; of a replayed dead letter a day")
DEAD_LETTER_VERIFIED_UP_TO = _family("letters-seen", "string",
    "the newest dead letter that was verified not to be forged",
    owner="the janitor", lasting="no")()
result_key = _family(f"result:{{{TOOL_REQUEST.stream}.<tool>}}:<call_id>", "string", "the result of a call",
    owner="the tool's worker", expires="`retention`; a large one sooner")

# ── queries and their lanes ──────────────────────────────────────────────────────────────────────────────────────
record_key = _family(f"query:{_IN_QUERIES}:<query_id>", "hash",
    "the query's user and text, and its deadline by the bus's clock",
    owner="gateway", expires="`retention` after the deadline")
queries_key = _family(f"queries:{_IN_QUERIES}:<session>", "sorted set",
    "the session's queries with stored data, by its expiry (ms)",
    owner="gateway", expires="with the last of them")
lane_key = _family(f"lane:{_IN_QUERIES}:<respondent>:<session>", "sorted set",
    "session queue: the unfinished queries in their order",
    owner=f"gateway, {_RESPONDENTS}", expires="a day after its last use")
CHORES = _family(f"chores:{_IN_QUERIES}", "sorted set",
    "background queries in progress, by their expiry (ms)",
    owner="generator", expires="a day after its last use")()
waiting_key = _family(f"waiting:{_IN_QUERIES}:<respondent>:<session>", "hash", "the inbox to notify, per waiting query",
    owner=_RESPONDENTS, expires="a day after its last use")
cancel_key = _family("cancel:<query_id>", "string",
    "the query is cancelled or taken back: for replicas that missed the announcement",
    owner="gateway", expires="a day; taken back: a week")

# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────
session_key = _family("session:{<session>}", "hash", "owner, title, times",
    owner="gateway", lasting="until it is deleted")
turns_key = _family("session:{<session>}:history:<respondent>", "sorted set",
    "all turns by their queries' ids; a prompt has the newest 50 at most",
    owner=_RESPONDENTS, lasting="with its session")
summary_key = _family("session:{<session>}:summary", "hash",
    "the model's summary of older turns: their number, the last query, the text",
    owner="generator", lasting="with its session and the turns in it")
steps_key = _family("session:{<session>}:steps", "hash",
    "per query id: the journal, shortened to 64 kB; per id and `critique`, `pairwise` or `reward`: later judgements; "
    "per id and `unanswered`: the reason",
    owner="generator, critic, reward", lasting="with its session")
deleted_key = _family("session:{<session>}:deleted", "string",
    "the newest query at the deletion: data of queries up to it is dropped",
    owner="gateway", expires="a week")
user_sessions_key = _family("sessions:<user>", "sorted set", "a user's sessions by last use",
    owner="gateway", lasting="with the last of them")

# ── judging ──────────────────────────────────────────────────────────────────────────────────────────────────────
grade_key = _family("grade:<response_id>", "string", "the grade of an answer",
    owner="critic", expires="`retention`")
verdict_key = _family("verdict:<query_id>", "string", "the comparison of the two answers",
    owner="critic", expires="`retention`")
pair_key = _family("pairs:{pairs}:<query_id>", "hash",
    "the two answers to compare, and the entry that compares them; or a marker that the pair is settled",
    owner="critic", expires="an hour, or `retention` if that is shorter")
PAIRS_WAITING = _family("pairs:{pairs}:waiting", "sorted set",
    "answers that wait for their counterpart, oldest first; at most `pairwise_buffer`",
    owner="critic", expires="an hour, or `retention` if that is shorter")()
vote_key = _family(f"rewards:{{{REWARD_EVENT.stream}}}:vote:<response_id>", "hash",
    "the current vote on an answer",
    owner=_RESPONDENTS, expires="a day after twice `retention`")
rewards_key = _family(f"rewards:{{{REWARD_EVENT.stream}}}:<respondent>:<sums>", "hash",
    "number (`counts`) and sum (`sums`) of ratings, by configuration and intent; at most 400 fields",
    owner=_RESPONDENTS, lasting="no")

# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────
engram_key = _family("memory:state:<engram_id>", "hash",
    "an engram's newest annotations and its owner, or a marker of its deletion",
    owner="memory", expires="`pending_days` (7); deleted: `forget_days` (30)")
_USER_GONE = _family("memory:gone:<user>", "string", "memories of a user up to this time (ms) are deleted",
    owner="memory", expires="`forget_days` (30)")
_SESSION_GONE = _family("memory:gone:<user>:<session>", "string", "the same for one session",
    owner="memory", expires="`forget_days` (30)")
_QUERY_GONE = _family("memory:taken-back:<user>:<said>", "string", "the same for one query",
    owner="memory", expires="`forget_days` (30)")
REEMBEDDING = _family("memory:reembedding", "string", "lease: the replica that writes the vectors of another model",
    owner="memory", expires="30 s after its last renewal")()
DOCUMENT_VECTORS = _family("memory:document-vectors", "string", "lease: the replica that writes documents' vectors",
    owner="memory", expires="30 s after its last renewal")()

# ── participants ─────────────────────────────────────────────────────────────────────────────────────────────────
replica_key = _family("replica:<participant>:<replica>", "string",
    "registry entry of a live process: state, load, tools, facts",
    owner="the replica", expires="the visibility timeout (three heartbeats)")
REPLICAS = _family("replicas", "sorted set", "index of the registry entries",
    owner="all", lasting="cleaned by its readers")()
starts_key = _family("starts:<participant>", "string", "number of started replicas",
    owner="the replica", lasting="no")
KNOWN_TOOLS = _family("tools", "set", "names of all announced tools",
    owner="every reader of the registry", lasting="no")()
MCP_PINS = _family("mcp:pins", "hash", "each MCP server's tools, by their hashes at the first connection",
    owner="mcp", lasting="no")()
JANITOR = _family("janitor", "string", "lease: the replica that trims",
    owner="any participant except web workers", expires="fifteen heartbeats")()
settings_key = _family("settings:<participant>", "hash", "run-time settings", owner="gateway", lasting="no")
schema_key = _family("settings-schema:<participant>", "string", "schema and start values of the settings",
    owner="the participant's replicas", lasting="no")

# ── the gateway's own ────────────────────────────────────────────────────────────────────────────────────────────
API_KEYS = _family("keys", "hash", "API keys, by their hash", owner="gateway", lasting="no")()
link_key = _family("link:<name>", "string", "the user of a one-time link to the console, by its token's hash",
    owner="gateway", expires="a minute")
RESTORE_LOCK = _family("restore:lock", "string", "lease: the restore in progress",
    owner="gateway", expires="10 s after its last renewal")()
RESTORE_UNFINISHED = _family("restore:unfinished", "string", "file and options of an unfinished restore",
    owner="gateway", lasting="until it is complete")()

# fmt: on


def subject_of(stream: str) -> str:
    """Return a stream's name without the prefix."""
    return stream.removeprefix(PREFIX)


def nothing_key(stream: str) -> str:
    """Return a key that never exists, and that every reader of the stream may write."""
    return once_key(DEAD_LETTER.stream, f"{stream}:nothing")


def taken_back_key(user_id: str, query_id: str) -> str:
    return _QUERY_GONE(_escaped(user_id), query_id)


def gone_key(user_id: str, session_id: str = "") -> str:
    user = _escaped(user_id)
    return _SESSION_GONE(user, session_id) if session_id else _USER_GONE(user)


def _escaped(part: str) -> str:
    """Escape the colons of a part that another part may follow."""
    return part.replace("%", "%25").replace(":", "%3A")


# For SCAN: all keys of this product.
ALL_KEYS = f"{PREFIX}*".encode()


def table() -> str:
    """Return the table of all families, for the docs."""
    lines = ["| key | type | what | written by | expires |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        cells = (f"`{family.pattern}`", family.kind, family.what, family.owner, family.expires)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
