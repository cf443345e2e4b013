"""Every key is of one family, nobody builds one elsewhere, and the docs and the users of Redis agree with that."""

from __future__ import annotations

import inspect
import re
import runpy
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.bus import keys
from shared.bus.keys import FAMILIES, Family
from shared.contracts import PREFIX, SUBJECTS, TOOL_REQUEST, TOOL_RESULT
from shared.errors import DecodeError
from shared.participant import health_quick
from shared.participant.quota import quota_kind

ROOT = Path(__file__).resolve().parents[2]
# All that web_search may read, of the examples below.
READ_BY_THE_WEB = {
    "tool.request.web_search",
    "result:{local2:tool.request.web_search}:1-1:A:0:0",
    "inbox:web_search:r1",
    "replica:web_search:r1",
    "settings-schema:web_search",
    "settings:web_search",
    "settings.update",
    "query.cancel",
    "tool.schema.request",
    "dead.letter",
    "once:{local2:dead.letter}:local2:tool.request.web_search:web_search:1-1",
    "replicas",
    "starts:web_search",
}
STREAMS = [subject.stream for subject in SUBJECTS] + [
    base.for_tool(tool).stream
    for base in (TOOL_REQUEST, TOOL_RESULT)
    for tool in ("web_search", "web_fetch", "search_memory", "git__log")
]
# What may stand in each place, so that every pattern of a user of Redis has something to match.
EXAMPLES = {
    "subject": [stream.removeprefix(PREFIX) for stream in STREAMS],
    "query_id": ["1-1"],
    "response_id": ["1-1:A"],
    "engram_id": ["1-1:A", "ann/lamp"],
    "call_id": ["1-1:A:0:0"],
    "respondent": ["A", "B"],
    "participant": ["generator", "gateway", "web_search", "web_fetch", "mcp"],
    "replica": ["r1"],
    "tool": ["web_search", "web_fetch", "search_memory", "git__log"],
    "session": ["s:1"],
    "said": ["1-1", "http:c", ""],
    "user": ["ann"],
    "stream": STREAMS,
    "name": [
        "x",
        *(f"local2:tool.request.{tool}:{tool}:1-1" for tool in ("web_search", "web_fetch")),
        "local2:tool.request.git__log:mcp:1-1",
    ],
    "sums": ["counts", "sums"],
}

BUILT = {"subject": "query.received", "sums": "counts"}


def keys_of(family: Family) -> list[str]:
    found = [family.pattern]
    for place in re.findall(r"<([a-z_]+)>", family.pattern):
        found = [key.replace(f"<{place}>", value) for key in found for value in EXAMPLES[place]]
    return found


EVERY = [(family, key) for family in FAMILIES for key in keys_of(family)]


def families(key: str) -> list[Family]:
    return [family for family in FAMILIES if family.parts(key) is not None]


@pytest.mark.parametrize(("family", "key"), EVERY, ids=[key for _, key in EVERY])
def test_a_key_is_of_one_family_and_says_what_it_is_made_of(family: Family, key: str) -> None:
    assert families(key) == [family]
    assert family(*(family.parts(key) or ())) == key
    assert fnmatchcase(key, family.glob)


def test_the_builders_and_the_subjects_agree() -> None:
    assert [keys.stream_key(subject.name) for subject in SUBJECTS] == [subject.stream for subject in SUBJECTS]
    assert keys.subject_of("local2:query.received") == "query.received"
    # the short way of the health check imports nothing of ours
    source = Path(health_quick.__file__).read_text()
    assert f'f"{{PREFIX}}{keys.REPLICAS.removeprefix(PREFIX)}"' in source
    replica = keys.replica_key("{participant}", "{replica}").removeprefix(PREFIX)
    assert f'f"{{PREFIX}}{replica}"' in source


def test_what_stands_in_redis_is_found_by_the_next_release_too() -> None:
    queries, dead = "{local2:query.received}", "{local2:dead.letter}"
    built = {
        keys.gone_key("a:b"): "local2:memory:gone:a%3Ab",
        keys.gone_key("a:b", "s:1"): "local2:memory:gone:a%3Ab:s:1",
        keys.taken_back_key("a%", "1-1"): "local2:memory:taken-back:a%25:1-1",
        keys.lane_key("A", "s:1"): f"local2:lane:{queries}:A:s:1",
        keys.waiting_key("A", "s:1"): f"local2:waiting:{queries}:A:s:1",
        keys.nothing_key("local2:x"): f"local2:once:{dead}:local2:x:nothing",
        keys.result_key("git__log", "1-1"): "local2:result:{local2:tool.request.git__log}:1-1",
        keys.turns_key("s:1", "A"): "local2:session:{s:1}:history:A",
    }
    assert [*built] == [*built.values()]
    lasting = (keys.session_key.lasting, keys.turns_key.lasting, keys.journal_key.lasting, keys.cancel_key.lasting)
    assert lasting == (True, True, False, False)
    assert (keys.journal_key.glob, keys.ALL_KEYS) == ("local2:journal:*:*", b"local2:*")
    assert keys.journal_key.parts("local2:journal:1-1:A") == ("1-1", "A")
    assert keys.journal_key.parts("local2:journal:1-1") is None


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (b"local2:result:{local2:tool.request.web_x}:\xff", b"local2:result:{local2:tool.request."),
        (b"local2:result:{local2:tool.request.server__x}:c", b"local2:result:{local2:tool.request."),
        (b"local2:result:{local2:tool.request.probe}:c__x", None),
        (b"local2:inbox:x:r1", b"local2:inbox:"),
        (b"local2:tool.request.web_x", b"local2:tool.request."),
        (b"local2:tool.request.probe", None),
        (b"local2:tool.result.web_x", b"local2:tool.result."),
        (b"local2:tool.result.probe", None),
        (
            b"local2:once:{local2:dead.letter}:local2:tool.request.web_x:web_x:1-1",
            b"local2:once:{local2:dead.letter}:local2:tool.request.",
        ),
        (b"local2:once:{local2:dead.letter}:local2:query.received:generator:1-1", None),
        (b"local2:dead.letter", b"local2:dead.letter"),
        (b"local2:replicas", b"local2:replicas"),
        (b"local2:replica:web_x:r1", b"local2:replica:"),
        (b"local2:replica:mcp:r1", b"local2:replica:"),
        (b"local2:replica:memory:r1", None),
        (b"local2:session:{s}", None),
        (b"local2:once:{local2:query.received}:x", None),
        (b"another:inbox:x", None),
    ],
)
def test_keys_of_untrusted_workers_have_a_quota(key: bytes, kind: bytes | None) -> None:
    assert quota_kind(key) == kind


def test_every_builder_is_of_one_family() -> None:
    built = {
        name: value
        for name, value in vars(keys).items()
        if name[0].isupper() and name.isupper() and isinstance(value, str)
    }
    for name, build in vars(keys).items():
        if name.endswith("_key"):
            family = isinstance(build, Family)
            places = re.findall(r"<([a-z_]+)>", build.pattern) if family else list(inspect.signature(build).parameters)
            built[name] = build(*(BUILT.get(place, "1-1") for place in places))
    del built["PREFIX"]
    assert len(built) > 30
    assert {name: key for name, key in built.items() if len(families(key)) != 1} == {}


@pytest.mark.parametrize("part", ["", "a}b", "{a", "a{b}c"])
def test_key_part_in_braces_that_has_braces_is_refused(part: str) -> None:
    for build in (keys.session_key, keys.deleted_key):
        with pytest.raises(DecodeError):
            build(part)
    with pytest.raises(DecodeError):
        keys.result_key(part, "1-1:A:0:0")
    with pytest.raises(DecodeError):
        keys.once_key(part, "x")


def test_nobody_else_builds_keys() -> None:
    # The prefix itself, the subjects' streams, the file itself, an error that names the prefix, and a module that must
    # import little.
    allowed = {
        "shared/key_prefix.py",
        "shared/contracts.py",
        "shared/bus/keys.py",
        "shared/bus/server.py",
        "shared/participant/health_quick.py",
    }
    sources = [path for folder in ("shared", "services") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 200
    building = {
        str(path.relative_to(ROOT))
        for path in sources
        if re.search(rf"""(?<!["'])\bPREFIX\b|\bf["']{PREFIX}[a-z{{]""", path.read_text())
    }
    assert building == allowed


def test_the_table_of_the_docs_is_made_from_the_file() -> None:
    """When it is not: make docs-keys."""
    script = runpy.run_path(str(ROOT / "deploy" / "docs_keys.py"))
    page = script["PAGE"].read_text()
    assert script["filled"](page) == page


# ── the users of Redis ───────────────────────────────────────────────────────────────────────────────────────────


def rules_of(user: str) -> list[tuple[str, str]]:
    """How ('', 'R' or 'W') and where the user may touch keys."""
    lines = (ROOT / "deploy" / "redis" / "users.acl").read_text().replace("WEB_TOOL", "web_search").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"user {user} "))
    more = lines[start + 1 :]
    rest = next((number for number, line in enumerate(more) if not line.startswith(" ")), len(more))
    words = " ".join(lines[start : start + 1 + rest]).replace(")", " ").split()
    found = [re.fullmatch(r"(?:%([RW]))?~(\S+)", word) for word in words]
    return [(match[1] or "", match[2]) for match in found if match]


@pytest.mark.parametrize("user", ["core", "web_search", "mcp", "scaler"])
def test_each_pattern_of_a_user_is_for_keys_that_there_are(user: str) -> None:
    rules = rules_of(user)
    assert rules
    assert [rule for _, rule in rules if not any(fnmatchcase(key, rule) for _, key in EVERY)] == []


def test_a_web_tool_reads_nothing_of_conversations_and_of_other_web_tools() -> None:
    readable = [rule for how, rule in rules_of("web_search") if how != "W"]
    found = {key.removeprefix(PREFIX) for _, key in EVERY if any(fnmatchcase(key, rule) for rule in readable)}
    assert found == READ_BY_THE_WEB


def test_mcp_reads_nothing_of_conversations_and_of_other_tools() -> None:
    readable = [rule for how, rule in rules_of("mcp") if how != "W"]
    found = {key.removeprefix(PREFIX) for _, key in EVERY if any(fnmatchcase(key, rule) for rule in readable)}
    theirs = {
        key.replace("web_search:web_search", "git__log:mcp")
        .replace("tool.request.web_search", "tool.request.git__log")
        .replace("web_search", "mcp")
        for key in READ_BY_THE_WEB
    }
    assert found == theirs | {"mcp:pins"}


def test_the_scaler_reads_work_streams_alone() -> None:
    rules = rules_of("scaler")
    assert {how for how, _ in rules} == {"R"}
    found = {family.pattern for family, key in EVERY if any(fnmatchcase(key, rule) for _, rule in rules)}
    assert found == {"local2:<subject>"}


_NAMES = st.text(alphabet="ab:%3A", min_size=1, max_size=6)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_NAMES, st.just("") | _NAMES, _NAMES, st.just("") | _NAMES)
def test_no_two_users_or_sessions_meet_in_one_key(user: str, session: str, other: str, another: str) -> None:
    same = (user, session) == (other, another)
    assert (keys.gone_key(user, session) == keys.gone_key(other, another)) is same
    assert (keys.taken_back_key(user, session) == keys.taken_back_key(other, another)) is same
    for respondent in ("A", "B"):
        for builder in (keys.turns_key, keys.lane_key, keys.waiting_key):
            assert (builder(user, respondent) == builder(other, respondent)) is (user == other)
    built = [keys.session_key, keys.deleted_key, keys.queries_key, keys.user_sessions_key, keys.engram_key]
    assert all((builder(user) == builder(other)) is (user == other) for builder in built)
