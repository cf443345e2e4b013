"""Reading the plainest English statements by rule, where no capable model is at hand.

Only what the user says of himself and of people by their names; questions, conditions and pronouns are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.knowledge.claims import Claim, Turn, claim, once, sentences
from services.knowledge.dates import MONTHS
from services.knowledge.relations import ALIAS, KIN, PARTNERS, kinship

# "I" is nobody's name.
_PART = r"(?!I\b)[A-ZÀ-ÖØ-Þ][\w'’-]*"
NAME = rf"{_PART}(?: (?:(?:de|da|di|du|la|le|of|the|van|von|der|den) ){{0,2}}{_PART}){{0,4}}"
_SMALL = r"[a-zà-öø-ÿ][\w'’-]*(?: [a-zà-öø-ÿ][\w'’-]*){0,2}"
_MONTH = "|".join(month.capitalize() for month in MONTHS)
_DATE = rf"(?:(?:\d{{1,2}} )?(?:{_MONTH})(?: \d{{1,2}}\b)?(?:,? \d{{4}})?|\d{{4}}|(?:last|this) (?:year|month))"
_WORDS = [*KIN, *PARTNERS, "mom", "mum", "dad", "neighbor", "best friend", "coworker", "fiancé", "fiancée"]
_KIN = rf"(?:(?:older|younger|little|big|twin|best) )?(?:{'|'.join(sorted(_WORDS, key=len, reverse=True))})"
_SUBJECT = rf"(?:I|[Mm]y {_KIN},? {NAME},?|{NAME})"
_WHO = rf"(?P<who>{_SUBJECT})"
_NO_NAMES = frozenset(
    {"He", "She", "It", "They", "We", "You", "The", "This", "That", "These", "Those", "There", "Here", "Who", "What",
     "When", "Where", "Why", "How", "Which", "Please", "If", "My", "Your", "His", "Her", "Our", "Their", "Yes", "No",
     "Ok", "Okay", "So", "And", "But", "Or", "Then", "Now", "Today", "Yesterday", "Tomorrow", "Monday", "Tuesday",
     "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "Nobody", "Somebody", "Someone", "Everyone",
     "Everybody", "People", "In", "On", "At", "From", "For", "To", "After", "Before", "Since", "While", "As",
     "Maybe", "Perhaps", "Both", "Neither", "Either", "I"} | {month.capitalize() for month in MONTHS}
)  # fmt: skip
# What people work in that is no place.
_FIELDS = "IT|HR|PR|QA|AI|UX|Sales|Marketing|Finance|Research|Engineering|Education|Healthcare|Law"
_ADVERB = r"(?: (?:now|currently|still|just|recently|also|has|have|had|am|is|are))*"

_LIVES = re.compile(
    rf"^{_WHO}{_ADVERB} (?P<how>lives?|living|resides?|lived|used to live|moved|no longer lives?) (?:in|to|at|back to) "
    rf"(?P<what>{NAME})(?:,? (?P<prep>in|since|until|till) (?P<date>{_DATE}))?"
)
_WORKS, _WORKS_IN = (
    re.compile(
        rf"^{_WHO}{_ADVERB} (?P<how>works?|working|worked|used to work|no longer works?) {where}"
        rf"(?P<what>{NAME})(?:,? (?P<prep>in|since|until|till) (?P<date>{_DATE}))?"
    )
    for where in ("(?:at|for) ", rf"in (?!(?:{_FIELDS})\b)")
)
_BORN = re.compile(rf"^{_WHO} (?:was|were) born in (?P<what>{NAME})(?:,? (?P<prep>in) (?P<date>{_DATE}))?")
_MARRIED = re.compile(
    rf"^{_WHO}{_ADVERB} (?P<how>married|engaged|divorced)(?: to| from)? (?P<what>{NAME})"
    rf"(?:,? (?P<prep>in|since) (?P<date>{_DATE}))?"
)
_KINS = (
    re.compile(rf"\b[Mm]y (?P<kin>{_KIN})(?:,|'s name is| is called| is named| called| named)? (?P<name>{NAME})"),
    re.compile(rf"^(?P<name>{NAME}) (?:is|are) my (?P<kin>{_KIN}?)s?\b"),
    re.compile(rf"\bI have an? (?P<kin>{_KIN})(?:,| who is)? (?:called|named) (?P<name>{NAME})"),
)
_CALLED = re.compile(rf"^(?:[Mm]y name is|I am called|I'm called|[Cc]all me) (?P<name>{NAME})")
_FAVOURITE = re.compile(
    rf"^[Mm]y (?:favou?rite|preferred) (?P<thing>{_SMALL}) is (?P<what>{NAME}|{_SMALL})(?=$|[.,;!])"
)
_PET = re.compile(rf"\bI have an? (?P<thing>{_SMALL}) (?:called|named) (?P<name>{NAME})")
_IF = re.compile(
    r"^(?:if|suppos(?:e|ing)|imagine|assum(?:e|ing)|pretend|maybe|perhaps|would|could|should|what if|I wish"
    r"|let['’]s (?:say|pretend|assume))\b",
    re.IGNORECASE,
)
# What begins there are somebody's words, perhaps another one's.
_QUOTED = re.compile(r":\s|[\"“„«»]")
_PAST = re.compile(r"lived|worked|used to|no longer|divorced")
# What a statement says of its subject begins with one of these.
_VERB = (
    r"(?:(?:now|currently|still|just|recently|also|both|all) )*"
    r"(?:is|are|am|was|were|has|have|had|lives?|lived|resides?|moved|used to|no longer|works?|worked|married|"
    r"divorced)\b"
)
_PEOPLE = rf"{_SUBJECT}(?:(?:,? and |, ){_SUBJECT})*"
_LIST = re.compile(_PEOPLE)
_MEMBER = re.compile(rf"(?:,? and |, )(?={_SUBJECT})")
_STATED = re.compile(rf"(?P<who>{_PEOPLE}) (?P<said>{_VERB}.*)")
_JOINED = re.compile(r",? (?:and|but|while|whereas) |, |; ")
# Characters in which subject and verb of a plain statement stand: to read all of a list at each of its names is slow.
_REACH = 200
# Of the subject before: not where that may be somebody else, and "I" is in the first person.
_GOES_ON = re.compile(_VERB)
_OTHERS = re.compile(r"\b(?:who|whom|whose|which|that|where|when|because|than)\b")
_NOT_MINE = re.compile(r"(?:\w+ )?(?:is|are|has|lives|resides|works)\b")
# "… and Eva my sister", behind "Tom is my brother".
_IS_MINE = re.compile(r"(?:is|are) my ")
_LEFT_OUT = re.compile(rf"(?P<who>{NAME}) (?P<said>my {_KIN}\b.*)")


def read(turn: Turn) -> list[Claim]:
    """What the user's words state; each claim is marked as read by rule."""
    return once(found for found in _all(turn) if found is not None)


def _all(turn: Turn) -> Iterator[Claim | None]:
    for sentence in sentences(turn.query):
        if sentence.endswith("?") or _IF.match(sentence):
            continue
        for clause in _clauses(_told(_plain(sentence))):
            yield from _clause(turn, clause, sentence)


def _plain(sentence: str) -> str:
    return re.sub(r"\bI['’]m\b", "I am", re.sub(r"\bI['’]ve\b", "I have", sentence))


def _told(sentence: str) -> str:
    """What the user says in it, of himself."""
    told = re.sub(r"^(?:please )?(?:remember|note|know)(?: that)?:? ", "", sentence, flags=re.IGNORECASE)
    return _QUOTED.split(told, maxsplit=1)[0]


def _clauses(sentence: str) -> Iterator[str]:
    """Each statement of a sentence, about one person: of several that are joined, and of several people.

    What is joined is a statement where it has a subject and a verb, or a verb and the subject of the one before; else
    it belongs to what stands before it, as the rest of a name or of a list does.
    """
    begun, before = 0, ""
    for joint in _JOINED.finditer(sentence):
        clause, rest = before + sentence[begun : joint.start()], sentence[joint.end() : joint.end() + _REACH]
        stated = _STATED.match(clause, 0, _REACH)
        if _STATED.match(rest) and not _LIST.fullmatch(clause, 0, _REACH):
            before = ""
        elif stated and _IS_MINE.match(stated["said"]) and (left_out := _LEFT_OUT.match(rest)):
            # what was left out stands in place of the space before "my"
            yield from _of_each(clause)
            begun, before = joint.end() + left_out.start("said"), f"{left_out['who']} is "
            continue
        elif stated and _goes_on(stated, rest):
            before = f"{stated['who']} "
        else:
            continue
        yield from _of_each(clause)
        begun = joint.end()
    yield from _of_each(before + sentence[begun:])


def _goes_on(stated: re.Match[str], rest: str) -> bool:
    """Whether what follows is said of the same subject."""
    if not _GOES_ON.match(rest) or _OTHERS.search(stated["said"]):
        return False
    return stated["who"] != "I" or not _NOT_MINE.match(rest)


def _of_each(clause: str) -> Iterator[str]:
    """The statement of each of the people that it is about."""
    clause = clause.strip()
    stated = _STATED.match(clause, 0, _REACH)
    if stated is None:
        yield clause
        return
    for who in _MEMBER.split(stated["who"]):
        yield f"{who} {clause[stated.start('said') :]}"


def _clause(turn: Turn, clause: str, quote: str) -> Iterator[Claim | None]:
    for pattern in _KINS:
        for found in pattern.finditer(clause):
            relation = kinship(found["kin"])
            if relation is not None and (name := _named(found["name"])):
                yield claim(
                    turn, name, relation, "me", subject_kind="person", object_kind="person", by="rules", quote=quote
                )
    for pattern, relation, kind in (
        (_LIVES, "lives in", "place"),
        (_WORKS, "works at", "organisation"),
        (_WORKS_IN, "works in", "place"),
        (_BORN, "was born in", "place"),
        (_MARRIED, "", "person"),
    ):
        if (stated := pattern.match(clause)) is not None:
            yield _stated(turn, stated, relation, kind, quote)
    if (called := _CALLED.match(clause)) is not None and (name := _named(called["name"])):
        yield claim(turn, "me", ALIAS, name, subject_kind="person", object_kind="person", by="rules", quote=quote)
    if (liked := _FAVOURITE.match(clause)) is not None:
        yield claim(turn, "me", f"favourite {liked['thing']}", liked["what"], by="rules", quote=quote)
    if (pet := _PET.search(clause)) is not None and kinship(pet["thing"]) is None:
        yield claim(turn, "me", f"has {pet['thing']}", pet["name"], by="rules", quote=quote)


def _stated(turn: Turn, found: re.Match[str], relation: str, kind: str, quote: str) -> Claim | None:
    who, what = _who(found["who"]), _named(found["what"])
    if not who or not what:
        return None
    how = found.groupdict().get("how") or ""
    if not relation:
        relation = "is engaged to" if how == "engaged" else "is married to"
    past = bool(_PAST.search(how)) or found["prep"] in ("until", "till")
    date = found["date"]
    return claim(
        turn, who, relation, what,
        subject_kind="person", object_kind=kind,
        holds="was" if past else "is",
        since=None if past else date,
        until=date if past and (how == "divorced" or found["prep"] in ("until", "till")) else None,
        by="rules", quote=quote,
    )  # fmt: skip


def _who(text: str) -> str:
    if text == "I":
        return text
    kin = re.match(rf"^[Mm]y {_KIN},? (?P<name>{NAME}),?$", text)
    return _named(kin["name"] if kin else text.rstrip(","))


def _named(text: str) -> str:
    """The name without words that begin a sentence; '' when nothing is left, or a pronoun stands for it."""
    words = text.split()
    return "" if not words or words[0] in _NO_NAMES else text
