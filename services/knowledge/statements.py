"""Every statement of the store, in SQL for the embedded database and in Cypher for a graph server.

Tables of the database: `users`, `names` (entities), `claims`, `sources` and `forgotten`. The graph of a server:

    (KnowledgeUser)-[:KNOWS]->(KnowledgeName)-[:SAID {a claim}]->(KnowledgeName)
    (KnowledgeUser)-[:HEARD]->(KnowledgeSource)
    (KnowledgeGone)

Both forms take the same parameters (see `of_name` and `of_source`) and return the same columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from services.knowledge.claims import FIELDS
from services.knowledge.relations import ALIAS

# The prefix of the sources that a person entered.
BY_HAND = "person:"
# Labels of a server's nodes whose ids are unique.
LABELS = ("KnowledgeUser", "KnowledgeName", "KnowledgeSource", "KnowledgeGone")

_COLUMNS = ", ".join(f'"{name}"' for name in FIELDS)
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS users (user TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS names (user TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (user, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (
    user TEXT NOT NULL, {", ".join(f'"{name}" {"INTEGER" if name == "said" else "TEXT"} NOT NULL' for name in FIELDS)},
    PRIMARY KEY (user, id));
CREATE INDEX IF NOT EXISTS claims_subject ON claims (user, subject_key, said DESC, id);
CREATE INDEX IF NOT EXISTS claims_object ON claims (user, object_key, said DESC, id);
CREATE INDEX IF NOT EXISTS claims_source ON claims (user, source, subject_key);
CREATE INDEX IF NOT EXISTS claims_alias ON claims (user) WHERE relation = '{ALIAS}';
CREATE TABLE IF NOT EXISTS sources (
    user TEXT NOT NULL, source TEXT NOT NULL, session_id TEXT NOT NULL, said INTEGER NOT NULL,
    settled INTEGER NOT NULL, query TEXT NOT NULL, answer TEXT NOT NULL, PRIMARY KEY (user, source));
CREATE INDEX IF NOT EXISTS sources_said ON sources (user, said);
CREATE TABLE IF NOT EXISTS forgotten (mark TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID;
"""


class Statement(NamedTuple):
    """Parameters are written `$name` in both languages. A list is one parameter: `IN $names` in Cypher, a JSON array in
    SQL (`json_each`)."""

    sql: str
    cypher: str


def of_name(user_id: str, key: str) -> dict[str, Any]:
    """Return the parameters that name an entity; `id` is that of the server's node (no key has a colon)."""
    return {"user": user_id, "key": key, "id": f"{user_id}:{key}"}


def of_source(user_id: str, source: str) -> dict[str, Any]:
    """Return the parameters that name a source; `id` is that of the server's node."""
    return {"user": user_id, "source": source, "id": f"{len(user_id)}:{user_id}:{source}"}


def _listed(name: str) -> str:
    return f"(SELECT value FROM json_each(${name}))"


# ── users ────────────────────────────────────────────────────────────────────────────────────────────────────

TOUCH = Statement(
    "INSERT INTO users VALUES ($user, 1) ON CONFLICT DO UPDATE SET version = version + 1 RETURNING version",
    "MERGE (u:KnowledgeUser {id: $user}) ON CREATE SET u.version = 1 ON MATCH SET u.version = u.version + 1 "
    "RETURN u.version AS version",
)
VERSION = Statement(
    "SELECT version FROM users WHERE user = $user",
    "MATCH (u:KnowledgeUser {id: $user}) RETURN u.version AS version",
)
USERS = Statement("SELECT user AS id FROM users ORDER BY user", "MATCH (u:KnowledgeUser) RETURN u.id AS id ORDER BY id")

# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────

KEYS = Statement(
    "SELECT key FROM names WHERE user = $user",
    "MATCH (:KnowledgeUser {id: $user})-[:KNOWS]->(n:KnowledgeName) RETURN n.key AS key",
)
HAS_NAME = Statement(
    "SELECT key FROM names WHERE user = $user AND key = $key",
    "MATCH (n:KnowledgeName) WHERE n.id = $id RETURN n.key AS key",
)
ADD_NAME = Statement(
    "INSERT INTO names VALUES ($user, $key)",
    "MATCH (u:KnowledgeUser) WHERE u.id = $user "
    "CREATE (u)-[:KNOWS]->(:KnowledgeName {id: $id, key: $key, aliased: false})",
)
# One name at a time: asked for several ids at once, some servers look at all nodes.
HAS_CLAIMS = Statement(
    "SELECT $key AS key WHERE EXISTS (SELECT 1 FROM claims WHERE user = $user AND subject_key = $key) "
    "OR EXISTS (SELECT 1 FROM claims WHERE user = $user AND object_key = $key)",
    "MATCH (n:KnowledgeName)-[:SAID]-(:KnowledgeName) WHERE n.id = $id RETURN n.key AS key LIMIT 1",
)
REMOVE_NAME = Statement(
    "DELETE FROM names WHERE user = $user AND key = $key",
    "MATCH (n:KnowledgeName) WHERE n.id = $id DETACH DELETE n",
)
COUNT_NAMES = Statement("SELECT count(*) AS n FROM names", "MATCH (n:KnowledgeName) RETURN count(n) AS n")

# ── sources ──────────────────────────────────────────────────────────────────────────────────────────────────

SOURCE = Statement(
    "SELECT source, session_id, said, settled, query, answer FROM sources WHERE user = $user AND source = $source",
    "MATCH (s:KnowledgeSource) WHERE s.id = $id RETURN s.source AS source, s.session_id AS session_id, "
    "s.said AS said, s.settled AS settled, s.query AS query, s.answer AS answer",
)
# A server finds the claims of a source by their subjects' nodes, whose ids the source's node lists.
SUBJECTS = Statement(
    "SELECT DISTINCT subject_key AS key FROM claims WHERE user = $user AND source = $source",
    "MATCH (s:KnowledgeSource) WHERE s.id = $id UNWIND s.names AS name RETURN name AS key",
)
ADD_SOURCE = Statement(
    "INSERT INTO sources VALUES ($user, $source, $session, $said, $settled, $query, $answer)",
    "MATCH (u:KnowledgeUser) WHERE u.id = $user CREATE (u)-[:HEARD]->(:KnowledgeSource {id: $id, source: $source, "
    "session_id: $session, said: $said, settled: $settled, names: $names, query: $query, answer: $answer})",
)
SET_SOURCE = Statement(
    "UPDATE sources SET session_id = $session, said = $said, settled = $settled, query = $query, answer = $answer "
    "WHERE user = $user AND source = $source",
    "MATCH (s:KnowledgeSource) WHERE s.id = $id SET s.session_id = $session, s.said = $said, s.settled = $settled, "
    "s.names = $names, s.query = $query, s.answer = $answer",
)
SETTLE = Statement(
    "UPDATE sources SET settled = 1, query = '', answer = '' WHERE user = $user AND source = $source",
    "MATCH (s:KnowledgeSource) WHERE s.id = $id SET s.settled = true, s.query = '', s.answer = ''",
)
REMOVE_SOURCE = Statement(
    "DELETE FROM sources WHERE user = $user AND source = $source",
    "MATCH (s:KnowledgeSource) WHERE s.id = $id DETACH DELETE s",
)
_HEARD = "MATCH (u:KnowledgeUser {id: $user})-[:HEARD]->(s:KnowledgeSource)"
SOURCES_OF_SESSION = Statement(
    "SELECT source FROM sources WHERE user = $user AND session_id = $session AND said <= $at",
    f"{_HEARD} WHERE s.session_id = $session AND s.said <= $at RETURN s.source AS source",
)
SOURCES_UNTIL = Statement(
    "SELECT source FROM sources WHERE user = $user AND said <= $at LIMIT $n",
    f"{_HEARD} WHERE s.said <= $at RETURN s.source AS source LIMIT $n",
)
READ_BEFORE = Statement(
    f"SELECT source FROM sources WHERE user = $user AND said < $before AND source NOT LIKE '{BY_HAND}%' "
    "ORDER BY said LIMIT $n",
    f"{_HEARD} WHERE s.said < $before AND NOT s.source STARTS WITH '{BY_HAND}' "
    "RETURN s.source AS source ORDER BY s.said LIMIT $n",
)

# ── marks of what was forgotten ──────────────────────────────────────────────────────────────────────────────

MARK = Statement(
    "INSERT INTO forgotten VALUES ($mark, $at) ON CONFLICT DO UPDATE SET at = $at",
    "MERGE (g:KnowledgeGone {id: $mark}) SET g.at = $at",
)
IS_MARKED = Statement(
    "SELECT mark FROM forgotten WHERE mark = $mark AND at >= $said",
    "MATCH (g:KnowledgeGone) WHERE g.id = $mark AND g.at >= $said RETURN g.id AS mark",
)
UNMARK = Statement("DELETE FROM forgotten WHERE mark = $mark", "MATCH (g:KnowledgeGone) WHERE g.id = $mark DELETE g")

# ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────

_CLAIM = ", ".join(f"r.{name} AS {name}" for name in FIELDS)
_OF_USER = "MATCH (:KnowledgeUser {id: $user})-[:KNOWS]->(a:KnowledgeName)-[r:SAID]->(:KnowledgeName)"
_AT_NAME = "MATCH (a:KnowledgeName)-[r:SAID]-(b:KnowledgeName) WHERE a.id = $id"
_FROM_NAME = "MATCH (a:KnowledgeName)-[r:SAID]->(b:KnowledgeName) WHERE a.id = $id"
_WHERE_SUBJECT = "FROM claims WHERE user = $user AND subject_key = $key"


def _newest(of_subject: str = "", of_object: str = "") -> str:
    """Return SQL for the newest claims about a name, from the ends of two indexes. The parameters are conditions."""
    ends = (
        f"SELECT * FROM (SELECT {_COLUMNS} FROM claims WHERE user = $user AND {end}_key = $key {condition} "
        "ORDER BY said DESC, id LIMIT $n)"
        for end, condition in (("subject", of_subject), ("object", of_object))
    )
    return f"{' UNION ALL '.join(ends)} ORDER BY said DESC, id LIMIT $n"


ADD_CLAIM = Statement(
    f"INSERT INTO claims (user, {_COLUMNS}) VALUES ($user, {', '.join(f'${name}' for name in FIELDS)})",
    "MATCH (a:KnowledgeName), (b:KnowledgeName) WHERE a.id = $subject_node AND b.id = $object_node "
    f"CREATE (a)-[:SAID {{{', '.join(f'{name}: ${name}' for name in FIELDS)}}}]->(b) "
    f"SET a.aliased = (a.aliased OR $relation = '{ALIAS}')",
)
HAS_CLAIM = Statement(
    f"SELECT id {_WHERE_SUBJECT} AND id IN {_listed('ids')}",
    f"{_FROM_NAME} AND r.id IN $ids RETURN r.id AS id",
)
OBJECTS_OF_SOURCES = Statement(
    f"SELECT DISTINCT object_key AS key {_WHERE_SUBJECT} AND source IN {_listed('sources')}",
    f"{_FROM_NAME} AND r.source IN $sources RETURN DISTINCT b.key AS key",
)
REMOVE_OF_SOURCES = Statement(
    f"DELETE {_WHERE_SUBJECT} AND source IN {_listed('sources')}", f"{_FROM_NAME} AND r.source IN $sources DELETE r"
)
REMOVE_CLAIMS = Statement(
    f"DELETE {_WHERE_SUBJECT} AND id IN {_listed('ids')}", f"{_FROM_NAME} AND r.id IN $ids DELETE r"
)
NEWEST = Statement(_newest(), f"{_AT_NAME} RETURN {_CLAIM} ORDER BY said DESC, id LIMIT $n")
NEWEST_RIVALS = Statement(
    _newest(f"AND relation IN {_listed('relations')}", f"AND relation IN {_listed('symmetric')}"),
    f"{_AT_NAME} AND r.relation IN $relations AND (r.subject_key = $key OR r.relation IN $symmetric) "
    f"RETURN {_CLAIM} ORDER BY said DESC, id LIMIT $n",
)
BETWEEN = Statement(
    f"SELECT {_COLUMNS} {_WHERE_SUBJECT} AND object_key IN {_listed('others')} UNION ALL "
    f"SELECT {_COLUMNS} FROM claims WHERE user = $user AND object_key = $key AND subject_key IN {_listed('others')}",
    f"{_AT_NAME} AND b.key IN $others RETURN {_CLAIM}",
)
ALIASES = Statement(
    f"SELECT {_COLUMNS} FROM claims WHERE user = $user AND relation = '{ALIAS}'",
    "MATCH (:KnowledgeUser {id: $user})-[:KNOWS]->(a:KnowledgeName) WHERE a.aliased "
    f"MATCH (a)-[r:SAID]->(:KnowledgeName) WHERE r.relation = '{ALIAS}' RETURN {_CLAIM}",
)
CLAIM = Statement(
    f"SELECT {_COLUMNS} FROM claims WHERE user = $user AND id = $claim",
    f"{_OF_USER} WHERE r.id = $claim RETURN {_CLAIM}",
)
PAGE = Statement(
    f"SELECT {_COLUMNS} FROM claims WHERE user = $user AND id > $after ORDER BY id LIMIT $n",
    f"{_OF_USER} WHERE r.id > $after RETURN {_CLAIM} ORDER BY id LIMIT $n",
)
CLAIMS = Statement(
    f"SELECT {_COLUMNS} FROM claims WHERE user = $user ORDER BY id", f"{_OF_USER} RETURN {_CLAIM} ORDER BY id"
)
COUNT = Statement("SELECT count(*) AS n FROM claims WHERE user = $user", f"{_OF_USER} RETURN count(r) AS n")
COUNT_ALL = Statement(
    "SELECT count(*) AS n FROM claims", "MATCH (:KnowledgeName)-[r:SAID]->(:KnowledgeName) RETURN count(r) AS n"
)
