"""Reading the plainest English statements by rule, where no capable model is at hand.

Only what the user says of himself and of people by their names; questions, conditions and pronouns are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.knowledge.claims import Claim, Turn, claim, once, sentences
from services.knowledge.dates import MONTHS
from services.knowledge.relations import ALIAS, KIN, PARTNERS, kinship

# "I" is nobody's name, and the letters of "D.C." are no words of one.
_PART = r"(?!I\b)(?:St\. )?[A-ZÀ-ÖØ-Þ][\w'’-]*(?![\w'’-]|\.\w)"
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


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What people live and work in, and move to, that is no place: languages and what is of a country, fields and
# departments, how and when, programs and employers.
_LANGUAGES = _words(
    "African Afrikaans Albanian American Amharic Arabic Armenian Asian Australian Austrian Azerbaijani Basque "
    "Belarusian Belgian Bengali Bosnian Brazilian British Bulgarian Burmese Canadian Cantonese Catalan Chinese "
    "Croatian Czech Danish Dutch English Esperanto Estonian European Farsi Filipino Finnish Flemish French Gaelic "
    "Galician Georgian German Greek Gujarati Hebrew Hindi Hungarian Icelandic Indian Indonesian Irish Italian "
    "Japanese Kannada Kazakh Khmer Korean Kurdish Lao Latin Latvian Lithuanian Macedonian Malay Malayalam Mandarin "
    "Marathi Mexican Mongolian Nepali Norwegian Persian Polish Portuguese Punjabi Romanian Russian Scottish Serbian "
    "Sinhala Slovak Slovene Slovenian Somali Spanish Swahili Swedish Swiss Tagalog Tamil Telugu Thai Tibetan "
    "Turkish Ukrainian Urdu Uzbek Vietnamese Welsh Yiddish Zulu"
)
_FIELDS = _words(
    "AI Accounting Administration Advertising Agriculture Architecture Banking Biology Business Chemistry "
    "Compliance Construction Consulting Controlling Design Development Economics Education Engineering Estate Film "
    "Finance Gastronomy HR Healthcare Hospitality IT Insurance Journalism Law Legal Logistics Maintenance "
    "Management Manufacturing Marketing Media Medicine Music Nursing Operations PR Physics Politics Procurement "
    "Production Psychology Publishing Purchasing QA Relations Research Resources Retail Robotics Sales Science "
    "Security Service Services Software Support Tech Theatre Tourism Training Transport UI UX"
)
_MANNERS = _words(
    "Apartment Autumn Building Chaos Christ Christmas Denial Department Easter Exile Fall Fear Flat Free Fun God "
    "Harmony Home Hope Love Money Night Nights Office Pairs Peace Poverty Private Retirement Room School Secret "
    "Section Shifts Silence Spring Summer Team Teams Uni Unit University Winter"
)
_PRODUCTS = _words(
    "AG Android Bank Blender Bosch Chrome Corp Debian Discord Django Docker Emacs Excel Facebook Fedora Figma "
    "Firefox Git Gmail GmbH Google Group Haskell Inc Infineon Intel Java Kotlin Kubernetes Linux Ltd Mac Meta "
    "Microsoft Netflix Notion Nvidia Obsidian Oracle Outlook Perl Photoshop Postgres Python React Ruby Rust Scala "
    "Siemens Signal Slack Spotify Swift Telegram Ubuntu Unity Unreal Vim Windows Word Zoom"
)
_NO_EMPLOYERS = _LANGUAGES | _FIELDS | _MANNERS
_NO_PLACES = _NO_EMPLOYERS | _PRODUCTS
# Few short words in capitals are places.
_CAPITALS = re.compile(r"(?!(?:US|USA|UK|UAE|NYC|NY|LA|SF|DC|NZ)$)[A-Z]{2,4}$")
# "Berlin-based", "TypeScript"; not "Aix-en-Provence", "McAllen"
_COMPOUND = re.compile(r"-[a-z]+$|^(?!(?:Mac|Mc|De|La|Le|Du)[A-Z])\w*[a-z][A-Z]")
_ADVERB = r"(?: (?:now|currently|still|just|recently|also|has|have|had|am|is|are))*"
_WHEN = rf"(?:,? (?P<prep>in|since|until|till) (?P<date>{_DATE}))?"
# All of a name, and not where what follows belongs to who has it: "Tom's office", but "McDonald's in Graz".
_NAMED = rf"(?>{NAME})(?!(?<=['’]s) (?!(?:in|at|for|as|and|but|or|since|until|till|near|on|with|now|again|too)\b)[a-z])"

_LIVES = re.compile(
    rf"^{_WHO}{_ADVERB} (?P<how>lives?|living|resides?|lived|used to live|moved|no longer lives?) (?:in|to|at|back to) "
    rf"(?P<what>{_NAMED}){_WHEN}"
)
_MOVED = re.compile(
    rf"^{_WHO}{_ADVERB} moved (?:from (?P<left>{_NAMED})(?: back)? to (?P<what>{_NAMED})"
    rf"|(?:back )?to (?P<now>{_NAMED}) from (?P<before>{_NAMED})){_WHEN}"
)
_WORKS = re.compile(rf"^{_WHO}{_ADVERB} (?P<how>works?|working|worked|used to work|no longer works?)\b")
# What follows, one after the other: "in sales at SAP in Graz"; what is no name is passed over.
_WORKPLACE = re.compile(
    rf",? (?:(?P<of>at|for|in) (?!(?:{_MONTH})\b)(?P<what>{_NAMED})|in (?:an? |the )?[a-z]+\b"
    rf"|as (?:an? |the )?[a-z-]+(?: (?!(?:at|for|in|since|until|till)\b)[a-z]+)?)"
)
_SINCE = re.compile(_WHEN)
_BORN = re.compile(rf"^{_WHO} (?:was|were) born in (?P<what>{_NAMED})(?:,? (?P<prep>in) (?P<date>{_DATE}))?")
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
    if (moved := _MOVED.match(clause)) is not None:
        left, now = moved["left"] or moved["before"], moved["what"] or moved["now"]
        if _place(left) and _place(now):
            yield _stated(turn, moved["who"], "lives in", now, "place", quote, moved)
            yield _stated(turn, moved["who"], "lives in", left, "place", quote, moved, ended=True)
    elif (lives := _LIVES.match(clause)) is not None and _place(lives["what"]):
        yield _stated(turn, lives["who"], "lives in", lives["what"], "place", quote, lives, past=_over(lives))
    if (works := _WORKS.match(clause)) is not None:
        yield from _works(turn, works, clause, quote)
    if (born := _BORN.match(clause)) is not None and _place(born["what"]):
        yield _stated(turn, born["who"], "was born in", born["what"], "place", quote, born)
    if (married := _MARRIED.match(clause)) is not None:
        relation = "is engaged to" if married["how"] == "engaged" else "is married to"
        over = married["how"] == "divorced"
        yield _stated(turn, married["who"], relation, married["what"], "person", quote, married, ended=over)
    if (called := _CALLED.match(clause)) is not None and (name := _named(called["name"])):
        yield claim(turn, "me", ALIAS, name, subject_kind="person", object_kind="person", by="rules", quote=quote)
    if (liked := _FAVOURITE.match(clause)) is not None:
        yield claim(turn, "me", f"favourite {liked['thing']}", liked["what"], by="rules", quote=quote)
    if (pet := _PET.search(clause)) is not None and kinship(pet["thing"]) is None:
        yield claim(turn, "me", f"has {pet['thing']}", pet["name"], by="rules", quote=quote)


def _works(turn: Turn, works: re.Match[str], clause: str, quote: str) -> Iterator[Claim | None]:
    """For whom somebody works, and in which places."""
    employer, places, end = "", [], works.end()
    while (part := _WORKPLACE.match(clause, end)) is not None:
        end = part.end()
        if part["of"] == "in":
            places += [part["what"]] if _place(part["what"]) else []
        elif part["what"] and part["what"] not in _NO_EMPLOYERS:
            employer = employer or part["what"]
    when = _SINCE.match(clause, end)
    assert when is not None
    for relation, kind, names in (("works at", "organisation", [employer]), ("works in", "place", places)):
        for name in names:
            yield _stated(turn, works["who"], relation, name, kind, quote, when, past=_over(works))


def _over(found: re.Match[str]) -> bool:
    return _PAST.search(found["how"]) is not None


def _stated(
    turn: Turn, who: str, relation: str, what: str, kind: str, quote: str, when: re.Match[str], *, past: bool = False,
    ended: bool = False,
) -> Claim | None:  # fmt: skip
    """when: has the date, and whether it is that of the beginning or of the end. ended: it is that of the end."""
    subject, object_ = _who(who), _named(what)
    if not subject or not object_:
        return None
    ended = ended or when["prep"] in ("until", "till")
    past = past or ended
    return claim(
        turn, subject, relation, object_,
        subject_kind="person", object_kind=kind,
        holds="was" if past else "is",
        since=None if past else when["date"],
        until=when["date"] if ended else None,
        by="rules", quote=quote,
    )  # fmt: skip


def _place(name: str) -> bool:
    """Whether it may be a place, by its last word."""
    last = name.split()[-1]
    plain = re.sub(r"['’]s$", "", last)
    return not (plain in _NO_PLACES or len(plain) == 1 or _COMPOUND.search(plain) or _CAPITALS.match(name))


def _who(text: str) -> str:
    if text == "I":
        return text
    kin = re.match(rf"^[Mm]y {_KIN},? (?P<name>{NAME}),?$", text)
    return _named(kin["name"] if kin else text.rstrip(","))


def _named(text: str) -> str:
    """The name without words that begin a sentence; '' when nothing is left, or a pronoun stands for it."""
    words = text.split()
    return "" if not words or words[0] in _NO_NAMES else text
