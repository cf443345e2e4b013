"""Computation of facts from claims: a pure function of the set of claims, whatever their order.

Facts are not stored: an alias, a contradiction or a deletion changes the result of the next computation.

- Claims with the same subject, relation and object are one fact, with all its sources.
- If a relation has one object at a time (`relations.exclusive`), the object of the latest claim IS. It ends the others,
  on the date since which it is so, or on which it was said. A claim with an earlier `since` is about the past.
- A claim about a future day counts from that day on; an end on a future day counts until then.
- Two names of one entity are a fact about it.
- The user's words take precedence: a different statement of the assistant is doubted, and ends no fact.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

from services.knowledge.claims import Claim
from services.knowledge.dates import day, earlier, first
from services.knowledge.names import KINDS, USER, USER_NAME, Kind
from services.knowledge.relations import ALIAS, exclusive, symmetric

# If the two ends of a symmetric fact differ, the later of these counts.
State = Literal["is", "was", "doubted"]
# Returns the entity of a name's key.
EntityOf = Callable[[str], str]

# Confidence of a single source.
_TRUST = {"person": 1.0, "user": 0.8, "assistant": 0.5}
_BY_RULES = 0.9


@dataclass(frozen=True, slots=True)
class Entity:
    """A person, place, organisation or thing. `id` is its key, `name` its most frequent spelling."""

    id: str
    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement with its sources.

    claims: oldest first; the fact has the id of the first one. closed_by: the claim that ended it. ahead: it begins on
    a future day.
    """

    id: str
    subject: Entity
    relation: str
    object: Entity
    state: State
    since: str
    until: str
    confidence: float
    claims: tuple[Claim, ...]
    closed_by: Claim | None
    ahead: bool

    @property
    def said(self) -> int:
        """The time of its latest claim, in ms."""
        return self.claims[-1].said

    def why(self) -> list[str]:
        """Return sentences that name its sources, and what ended it."""
        told = [_reason(claim) for claim in self.claims]
        if self.closed_by is not None:
            ends = "ended" if self.state == "was" else "ends"
            told.append(f"It {ends} on {self.until or 'an unknown date'}: {_reason(self.closed_by)}")
        if self.state == "doubted":
            told.append("It is doubted: the user said something else.")
        return told


@dataclass(slots=True)
class _Timeline:
    """The state of a slot after some of its claims. `current` is the object that IS."""

    current: str | None = None
    since: dict[str, str] = field(default_factory=dict)
    state: dict[str, State] = field(default_factory=dict)
    until: dict[str, str] = field(default_factory=dict)
    closed_by: dict[str, Claim] = field(default_factory=dict)

    def close(self, key: str, until: str, by: Claim | None) -> None:
        self.state[key], self.until[key] = "was", until
        if by is not None:
            self.closed_by[key] = by
        if self.current == key:
            self.current = None


def no_aliases(key: str) -> str:
    """Return the entity of a key if there are no aliases: the key."""
    return key


def facts_of(
    claims: Iterable[Claim], entity: EntityOf = no_aliases, today: str = "", about: Set[str] = frozenset()
) -> list[Fact]:
    """Return the facts that the claims make, in the order of their ids.

    today: a date; '' if no claim is about the future. about: a fact must have one of these entities; empty: all facts.
    """
    unique = {one.id: one for one in claims}.values()
    if today and unique:
        # Clocks differ: no claim was made in the future.
        today = max(today, day(max(one.said for one in unique)))
    names = [one for one in unique if one.relation == ALIAS]
    found = _facts([one for one in unique if one.relation != ALIAS], entity, today, about)
    # Facts between names: each keeps its spelling.
    found += [
        replace(fact, subject=replace(fact.subject, id=entity(fact.subject.id)),
                object=replace(fact.object, id=entity(fact.object.id)))
        for fact in _facts(names, no_aliases, today, frozenset())
        if not about or {entity(fact.subject.id), entity(fact.object.id)} & about
    ]  # fmt: skip
    return sorted(found, key=lambda fact: fact.id)


def _facts(claims: Iterable[Claim], entity: EntityOf, today: str, about: Set[str]) -> list[Fact]:
    told = sorted(claims, key=_order)
    groups: dict[tuple[str, str, str], list[Claim]] = defaultdict(list)
    slots: dict[tuple[str, ...], list[Claim]] = defaultdict(list)
    for one in told:
        key = _key(one, entity)
        if key[0] == key[2]:
            # Two names of one entity.
            continue
        groups[key].append(one)
        for slot in _slots(key):
            slots[slot].append(one)
    seen = {slot: _timeline(those, partial(_other_end, entity, slot), today) for slot, those in slots.items()}
    names = _entities(told, entity)
    return [_fact_of(key, those, names, [(slot, seen[slot]) for slot in _slots(key)], today)
            for key, those in groups.items() if not about or {key[0], key[2]} & about]  # fmt: skip


def fact_line(fact: Fact) -> str:
    """Return the fact as a model reads it: one line with IS or WAS, and dates. Models read no doubted facts."""
    said = f"{_name(fact.subject, True)} {_phrase(fact.relation, fact.object)}"
    dates = f" since {fact.since}" if fact.since else ""
    if fact.state == "was":
        dates += f" until {fact.until}" if fact.until else ""
        return f"{said}: WAS true{dates} (said {day(fact.said)})"
    if fact.state == "doubted":
        return f"{said}: doubted{dates} (said {day(fact.said)})"
    dates += f" until {fact.until}" if fact.until else ""
    return f"{said}: IS{' to be' if fact.ahead else ''} true{dates} (said {day(fact.said)})"


def _phrase(relation: str, object_: Entity) -> str:
    name = _name(object_, False)
    if relation.startswith("favourite "):
        return f"has the {relation} {name}"
    if relation.startswith("is ") and relation.endswith(" of"):
        return f"is the {relation.removeprefix('is ')} {name}"
    return f"{relation} {name}"


def _name(thing: Entity, first: bool) -> str:
    return (USER_NAME.capitalize() if first else USER_NAME) if thing.id == USER else thing.name


def _order(claim: Claim) -> tuple[int, str]:
    return claim.said, claim.id


def _key(claim: Claim, entity: EntityOf) -> tuple[str, str, str]:
    subject, object_ = entity(claim.subject_key), entity(claim.object_key)
    if symmetric(claim.relation) and object_ < subject:
        subject, object_ = object_, subject
    return subject, claim.relation, object_


def _slots(key: tuple[str, str, str]) -> list[tuple[str, ...]]:
    """Return the slots of a fact, in which claims compete: subject and relation if exclusive, else the fact itself."""
    subject, relation, object_ = key
    if not exclusive(relation):
        return [key]
    return [(subject, relation), (object_, relation)] if symmetric(relation) else [(subject, relation)]


def _other_end(entity: EntityOf, slot: tuple[str, ...], claim: Claim) -> str:
    """Return the end of a claim that competes in a slot."""
    subject, object_ = entity(claim.subject_key), entity(claim.object_key)
    return subject if object_ == slot[0] else object_


def _timeline(claims: Sequence[Claim], object_of: Callable[[Claim], str], today: str) -> _Timeline:
    """Apply the claims of a slot in their effective order, those of the user first."""
    found = _Timeline()
    for of_user in (True, False):
        settled, sure = set(found.state), found.current is not None
        told = [
            (object_of(one), one)
            for one in claims
            if (one.speaker == "user") is of_user and object_of(one) not in settled
        ]
        taken_back = {key: one.said for key, one in told if one.holds == "was"}
        for key, one in sorted(told, key=lambda each: _effective_order(each[1])):
            if _is_plan(one) and taken_back.get(key, 0) > one.said:
                # A plan that was cancelled.
                continue
            if sure and one.holds == "is":
                found.state[key] = "doubted"
            elif one.holds == "is" and _is_future(one.since, today):
                found.state.setdefault(key, "is")
                found.since.setdefault(key, one.since)
            else:
                _apply(found, key, one)
    return found


def _effective_order(claim: Claim) -> tuple[str, int, str]:
    """Return the order of claims: when they were said, or the future day that they are about."""
    return claim.since if _is_plan(claim) else day(claim.said), claim.said, claim.id


def _is_plan(claim: Claim) -> bool:
    """Return whether a claim is about a day after the one on which it was said."""
    return claim.holds == "is" and _is_future(claim.since, day(claim.said))


def _is_future(date: str, today: str) -> bool:
    return earlier(today, date)


def _apply(found: _Timeline, key: str, claim: Claim) -> None:
    if claim.holds == "was":
        if earlier(claim.until, found.since.get(key, "")):
            # An earlier period of the same fact.
            return
        if claim.since:
            found.since.setdefault(key, claim.since)
        # "It was so" ends a fact that is so.
        ended = claim.until or (day(claim.said) if found.state.get(key) == "is" else found.until.get(key, ""))
        found.close(key, ended, claim if found.state.get(key) == "is" else None)
        return
    other = found.current
    if other is not None and other != key:
        since = found.since.get(other, "")
        if earlier(claim.since, since):
            found.since[key] = claim.since
            found.close(key, since, None)
            return
        ended = claim.since or day(claim.said)
        found.close(other, ended, claim)
    if found.state.get(key) != "is":
        # It is so again, or for the first time.
        found.since.pop(key, None)
        found.until.pop(key, None)
        found.closed_by.pop(key, None)
    found.current = key
    found.state[key] = "is"
    if claim.since:
        found.since[key] = first(found.since.get(key, ""), claim.since)
    if claim.until:
        found.until[key] = claim.until


def _fact_of(
    key: tuple[str, str, str],
    claims: Sequence[Claim],
    names: dict[str, Entity],
    seen: Sequence[tuple[tuple[str, ...], _Timeline]],
    today: str,
) -> Fact:
    subject, relation, object_ = key
    states = [(one, object_ if slot[0] == subject else subject) for slot, one in seen]
    # A symmetric fact is over if it is over at one end.
    slot, end = max(states, key=lambda one: get_args(State).index(one[0].state[one[1]]))
    state, until = slot.state[end], slot.until.get(end, "")
    if state != "doubted":
        state = "was" if earlier(until, today) else "is" if earlier(today, until) else state
    by_source: dict[str, float] = {}
    for one in claims:
        by_source[one.source] = max(by_source.get(one.source, 0.0), _trust(one))
    doubt = 1.0
    for trust in by_source.values():
        doubt *= 1 - trust
    return Fact(
        id=claims[0].id,
        subject=names[subject],
        relation=relation,
        object=names[object_],
        state=state,
        since=slot.since.get(end, ""),
        until=until,
        confidence=round(1 - doubt, 3),
        claims=tuple(claims),
        closed_by=slot.closed_by.get(end),
        ahead=state == "is" and _is_future(slot.since.get(end, ""), today),
    )


def _trust(claim: Claim) -> float:
    trust = _TRUST["person" if claim.by == "person" else claim.speaker]
    return trust * _BY_RULES if claim.by == "rules" else trust


def _entities(claims: Sequence[Claim], entity: EntityOf) -> dict[str, Entity]:
    """Return each entity with its most frequent name and kind; any other kind goes before `thing`."""
    names: dict[str, Counter[str]] = defaultdict(Counter)
    kinds: dict[str, Counter[Kind]] = defaultdict(Counter)
    for one in claims:
        for key, name, kind in (
            (one.subject_key, one.subject, one.subject_kind),
            (one.object_key, one.object, one.object_kind),
        ):
            names[entity(key)][name] += 1
            kinds[entity(key)][kind] += kind != "thing"
    return {key: Entity(key, _name_of(key, names[key]), _kind_of(key, kinds[key])) for key in names}


def _name_of(key: str, used: Counter[str]) -> str:
    return USER_NAME if key == USER else max(used, key=lambda name: (used[name], len(name), name))


def _kind_of(key: str, used: Counter[Kind]) -> Kind:
    if key == USER:
        return "person"
    return max(KINDS, key=lambda kind: (used[kind], kind == "thing", kind))


def _reason(claim: Claim) -> str:
    who = "The user" if claim.speaker == "user" else "The assistant"
    said = f": “{claim.quote}”" if claim.quote else f" that {claim.subject} {claim.relation} {claim.object}"
    how = {"model": "read by the model", "rules": "read by rule", "person": "entered by hand"}[claim.by]
    return f"{who} said on {day(claim.said)}{said} ({how})."
