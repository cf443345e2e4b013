"""The phrases of relations that models and people use, and the canonical form of each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from services.knowledge.names import Kind

MAX_RELATION = 60
ALIAS = "is also called"

_KIN = (
    "sister", "brother", "sibling", "mother", "father", "parent", "daughter", "son", "child", "cousin", "aunt", "uncle",
    "niece", "nephew", "grandmother", "grandfather", "grandson", "granddaughter", "friend", "colleague", "boss",
    "neighbour", "roommate", "teacher", "flatmate",
)  # fmt: skip
KIN = frozenset(_KIN)
PARTNERS = {"wife": "is married to", "husband": "is married to", "spouse": "is married to",
            "fiance": "is engaged to", "fiancee": "is engaged to", "girlfriend": "is together with",
            "boyfriend": "is together with", "partner": "is together with"}  # fmt: skip
_PLAIN = {"mom": "mother", "mum": "mother", "dad": "father", "neighbor": "neighbour", "flat mate": "flatmate",
          "best friend": "friend", "grandma": "grandmother", "grandpa": "grandfather", "kid": "child",
          "coworker": "colleague", "co worker": "colleague", "manager": "boss"}  # fmt: skip

# A canonical form, its phrases in the present, and its phrases in the past.
_PHRASES: tuple[tuple[str, str, str], ...] = (
    ("lives in", r"lives? (?:in|at)|living (?:in|at)|resides? (?:in|at)|based in|moves? to|moved to|relocated to"
                 r"|has moved to|located in", r"(?:used to|did) live (?:in|at)|lived (?:in|at)|resided (?:in|at)"
                 r"|moved (?:away )?from|moved out of|left"),
    ("works at", r"works? (?:at|for)|working (?:at|for)|employed (?:at|by)|joined|started (?:at|working (?:at|for))",
                 r"(?:used to|did) work (?:at|for)|worked (?:at|for)|quit|resigned from|was fired (?:from|by)"
                 r"|retired from"),
    # A place or a field; the employer has a relation of its own.
    ("works in", r"works? in|working in", r"(?:used to|did) work in|worked in"),
    ("works as", r"works? as|working as|job|profession|occupation|has job|has profession|has occupation",
                 r"(?:used to|did) work as|worked as"),
    ("studies at", r"stud(?:y|ies) at|studying at|attends?|enrolled (?:at|in)", r"studied at|attended|graduated from"),
    ("is married to", r"married(?: to)?|marries|got married to", r"divorced(?: from)?|got divorced from|widowed by"),
    ("is engaged to", r"engaged to", r"broke off (?:the )?engagement (?:with|to)"),
    ("is together with", r"together with|dates|dating|in a relationship with", r"broke up with|separated from|dated"),
    ("was born in", r"born in|birthplace", r""),
    ("was born on", r"born on|birthday|has birthday|date of birth", r""),
    ("is aged", r"age|aged|has age|years old", r""),
    (ALIAS, r"(?:also )?called|also known as|aka|alias|named|name|nicknamed|nickname|has name|has nickname|known as"
            r"|(?:the )?same as", r""),
)  # fmt: skip
_EXCLUSIVE = frozenset(
    {"lives in", "works at", "works as", "studies at", "is married to", "is engaged to", "is together with", "is aged",
     "was born on", "was born in"}
)  # fmt: skip
_SYMMETRIC = frozenset(
    {"is married to", "is engaged to", "is together with", ALIAS,
     *(f"is {kin} of" for kin in ("sibling", "cousin", "friend", "colleague", "neighbour", "roommate", "flatmate"))}
)  # fmt: skip
_NOW = [(name, re.compile(rf"(?:{now})")) for name, now, _ in _PHRASES]
_THEN = [(name, re.compile(rf"(?:{then})")) for name, _, then in _PHRASES if then]
_OVER = re.compile(
    r"^(?:no longer|not anymore|formerly|previously|ex|former|used to be|used to)\s+|\s+(?:formerly|before)$"
)
_HAS_KIN = re.compile(r"^has (?:an? )?(.+)$")
_OF = re.compile(r"^(.+?)(?: of| to)?$")


# The kinds of subject and object that a relation implies. Any other relation implies `thing` for both.
_KINDS: dict[str, tuple[Kind, Kind]] = {
    "lives in": ("person", "place"),
    "works at": ("person", "organisation"),
    "works in": ("person", "thing"),
    "works as": ("person", "thing"),
    "studies at": ("person", "organisation"),
    "was born in": ("person", "place"),
    "was born on": ("person", "time"),
    "is aged": ("person", "thing"),
    **dict.fromkeys(PARTNERS.values(), ("person", "person")),
}
# Phrases of `lives in` that also have things as their subject.
_LIES = re.compile(r"\b(?:located|based)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation in its canonical form.

    past: the phrase states the past. turned: subject and object change places. kinds: of the subject and the object, in
    the order of the phrase.
    """

    name: str
    past: bool = False
    turned: bool = False
    kinds: tuple[Kind, Kind] = field(default=("thing", "thing"), compare=False)


def exclusive(relation: str) -> bool:
    """Return whether a subject has one object at a time: a later one ends the earlier one."""
    return relation in _EXCLUSIVE or relation.startswith("favourite ")


def symmetric(relation: str) -> bool:
    return relation in _SYMMETRIC


def relation_of(phrase: str) -> Relation | None:
    """Return the canonical form of a phrase; None if it is longer than a few words, or not made of words."""
    words = " ".join(phrase.replace("_", " ").replace("-", " ").casefold().replace("favorite", "favourite").split())
    words = re.sub(r"n['’]t\b", " not", words)
    if not words or len(words) > MAX_RELATION or len(words.split()) > 6:
        return None
    if not all(c.isalnum() or c in " '’" for c in words):
        return None
    past = bool(_OVER.search(words))
    words = _OVER.sub("", words).strip()
    if words.startswith("was ") and words not in ("was born in", "was born on"):
        past, words = True, words[4:]
    bare = re.sub(r"^(?:is|are|am|be|has been|currently|now)\s+", "", words)
    bare = re.sub(r"^(?:no longer|not|the|an?)\s+", "", bare) if not bare.startswith("not ") else bare[4:]
    past = past or words.startswith(("is no longer", "is not", "not "))
    if bare in ("", "is", "are", "am", "was", "were", "be", "has", "have"):
        return None
    for name, pattern in _THEN:
        if pattern.fullmatch(bare):
            return Relation(name, True, kinds=_kinds(name, bare))
    for name, pattern in _NOW:
        if pattern.fullmatch(bare):
            return Relation(name, past, kinds=_kinds(name, bare))
    name = _favourite(bare) or _plain(words, bare)
    return _kinship(bare, past) or Relation(name, past, kinds=_kinds(name, bare))


def kinship(word: str) -> str | None:
    """Return the relation in `Anna is my WORD`; None for other words."""
    plain = _PLAIN.get(word, word).replace("é", "e")
    plain = _PLAIN.get(plain.removesuffix("s"), plain)
    older = re.sub(r"^(?:older|younger|elder|little|big|twin|best|good|old|close|dear|step|half) ?", "", plain)
    plain = older if older in KIN or older in PARTNERS else plain
    return PARTNERS.get(plain) or (f"is {plain} of" if plain in KIN else None)


def _kinship(bare: str, past: bool) -> Relation | None:
    if (has := _HAS_KIN.match(bare)) is not None and (name := kinship(has[1].removesuffix(" named"))):
        return Relation(name, past, turned=True, kinds=("person", "person"))
    found = _OF.match(bare)
    name = kinship(found[1]) if found else None
    return Relation(name, past, kinds=("person", "person")) if name else None


def _kinds(name: str, phrase: str) -> tuple[Kind, Kind]:
    subject, object_ = _KINDS.get(name, ("thing", "thing"))
    return ("thing" if _LIES.search(phrase) else subject), object_


def _favourite(bare: str) -> str | None:
    found = re.match(r"^(?:has )?(?:favourite|preferred) (.+)$", bare)
    return f"favourite {found[1].removesuffix(' is')}" if found else None


def _plain(words: str, bare: str) -> str:
    """Return the form of an unknown phrase: `is`, `are` and `am` are one word."""
    return f"is {bare}" if words != bare and words.split()[0] in ("is", "are", "am") else bare
