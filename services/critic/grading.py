"""What a judge is asked and what its words mean. Prompts are Prometheus 2's own; parsing never guesses.

Source: Kim et al., Prometheus 2, 2024, arXiv:2405.01535.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Literal

Verdict = Literal["A", "B", "tie"]
JudgePrompt = list[dict[str, str]]

# `[RESULT]` with any closing, `[RESULT: 4]`, `[SCORE]`, and a bare `RESULT:` where a sentence begins.
_MARKER = re.compile(
    r"\[ ?(?:final )?result(?![a-z])|[(<{] ?(?:final )?result ?[)>}:]|[\[(<{] ?(?:final )?score ?[\])>}]"
    r"|(?:^|(?<=[.!?>] )|(?<=\n))\s*(?:the )?(?:final )?result ?[:=]"
    # a heading of its own
    r"|(?:^|(?<=\n))[ \t]*#{1,6}[ \t]*(?:(?:final|overall) )?score[*_]*[ \t]?[:=]",
    re.IGNORECASE,
)
_LABEL = r"(?:(?:(?:the )?(?:final |overall )?(?:score|result|rating|grade)(?: (?:is|of))?)[\])>}\"' ]*[:=]?)?"
_NUMBER = re.compile(
    rf"(?>[\s\])>}}\"':=]*(?:(?:-|–|—|->|=>|→|#+) )?[\s\[(<{{\"']*{_LABEL}[\s\[(<{{\"']*)"
    r"(?P<number>[-+−]?\d+(?:[.,·]\d+)*)",
    re.IGNORECASE,
)
# A scale behind the number, in the few words that languages have for it.
_SCALE = re.compile(
    r"[\s\])>}\"']*[\[(]?\s*(?:/|out of|of|von|sur|de|su|av|af|van|из)\s*[\[(]?\s*(?P<top>\d+(?:[.,]\d+)?)",
    re.IGNORECASE,
)
# A scale that is told in words: "on a scale of 1 to 10", "out of a possible 10", "out of ten".
_TOLD_SCALE = re.compile(
    r"(?:[\s(,]|\b(?:on|an?|the|points?|stars?|marks?)\b){0,8}(?:out of|scale (?:of|from))(?P<told>[^\n.;]{0,40})",
    re.IGNORECASE,
)
_BEYOND_FIVE = re.compile(r"(?<!\d)(?:[6-9]|\d{2,})|\b(?:six|seven|eight|nine|ten|twenty|hundred)\b", re.IGNORECASE)
# What makes the number something else than one whole grade: a unit, a range, a fraction, a second number, a doubt.
_NOT_ALONE = re.compile(
    r"[a-z%‰°+_]|\s*(?:[-–—~/,;:&⁄]|to|or|and|bis|oder|ou|à|\.\.+)\s*\d|[\])>}]*[ \t]+\d|[\])>}\"']*\s*\?"
    r"|[\s,;(\[]*(?:or|maybe|perhaps|possibly)\s+(?:even\s+)?(?:an?\s+)?\d|[ \t]+(?:would|if|were|might|could)\b",
    re.IGNORECASE,
)
# A bound, as in `>3` or `< 4`; brackets and arrows are none.
_BOUND = re.compile(r"(?:[\s:\]]>|<) ?=? ?$")
# A last statement that consists of nothing but the grade and its label.
_LAST_SCORE = re.compile(
    r"(?:^|[.!?] |[\[(] ?)(?:(?:final|overall) )?score(?: ?[:=] ?|(?<=[\[(]score) )[\[(]?"
    r"(?P<grade>\d+)(?: ?/ ?5| out of 5)?[\])]*\.?$",
    re.IGNORECASE,
)
# A last sentence that ends with the grade, and one that does not mean it.
_SCORE_OF = re.compile(
    r"(?:^|[.!?]\s+|\n)(?P<before>[^.!?\n]*)\b(?:an? |the )(?:(?:final|overall) )?score of (?P<grade>\d+)"
    r"(?: ?/ ?5| out of 5)?\.?$",
    re.IGNORECASE,
)
_NOT_MEANT = re.compile(
    r"\b(?:not|cannot|never|no|nor|neither|would|could|might|may|should|if|unless|than|for|from|to|between|either|or|almost"
    r"|nearly|rather|instead|below|above|beyond|short|maybe|perhaps|possibly|whereas|while|scale)\b|n't\b",
    re.IGNORECASE,
)

_TO_SIDE = (
    r"(?>[\s\])>}\"':=]*(?:(?:-|–|—|->|=>|→) )?[\s\[(<{\"']*"
    r"(?:(?:the )?(?:final )?(?:result|verdict|winner)(?: is)? ?[:=]? ?)?"
    r"(?:(?:response|answer|assistant|option)[\s:\[(\"']*)?)"
)
_SIDE = re.compile(
    _TO_SIDE + r"(?P<side>[AB])(?![\w-])(?!\s*(?:or|and|/|,|&|=|vs\.?)\s*(?:response )?[AB](?!\w))", re.IGNORECASE
)
# `A` may be the article of a sentence; these words make it the name of a response.
_NAMED = re.compile(r"[ \t]+(?:is|was|wins|won|has|because|since|as|due|over|performs|provides)\b|(?![ \t]*\w)")
# The one that is named lost, or is asked about.
_UNLIKE = re.compile(
    r"\s*\?|\s*<(?![/|a-z])"
    r"|[ \t]+(?:(?:is|was|does|did|has)(?:n't)?[ \t]+)?(?:(?:slightly|somewhat|much|far|clearly|a bit)[ \t]+)*"
    r"(?:not|worse|weaker|poorer|inferior|loses|lost|fails)\b",
    re.IGNORECASE,
)
_TIE = re.compile(_TO_SIDE + r"(?:it is )?(?:a )?(?:tie|draw|both|neither|equal)(?![\w])", re.IGNORECASE)
_LAST_SIDE = re.compile(r"\[ ?response ([AB]) ?\]\.?$", re.IGNORECASE)

_BRACKETS = str.maketrans(
    {"【": "[", "】": "]", "「": "[", "」": "]", "«": '"', "»": '"', "“": '"', "”": '"', "’": "'"}
)


# What a judge thinks is no verdict; templates may open the block in the prompt.
_THOUGHT = re.compile(r"^.*</think(?:ing)?>|<think(?:ing)?>.*", re.IGNORECASE | re.DOTALL)


def _said(text: str) -> str:
    """The text without what was thought before it; nothing of a block that was not ended."""
    return _THOUGHT.sub("", text)


def _plain(text: str) -> str:
    """What was said without emphasis and escapes, with one form of each bracket, digit and space."""
    text = unicodedata.normalize("NFKC", _said(text)).translate(_BRACKETS)
    text = re.sub(r"[*`\\]|(?<!\w)_+|_+(?!\w)", "", text)
    return re.sub(r"[^\S\n]+", " ", text)


def parse_score(text: str) -> int | None:
    """The grade that a judge gave, 1 to 5; None when there is none that can be read without guessing.

    It is the number of the last `[RESULT] n`, with or without emphasis, other brackets, a colon, `Score:`, `/5` or
    `out of 5`; a heading `## Score: n` is such a mark too. Decimals, ranges, other scales and numbers in prose are no
    grade, and neither is what was only thought. Where no result is marked at all, a last statement of nothing but
    `Score: n` counts, or one that ends with `a score of n.` and says it of this answer, without a doubt.
    """
    plain = _plain(text)
    grades = [grade for end in _marks(plain) if (grade := _grade(plain, end)) is not None]
    if grades:
        return grades[-1] or None
    if any(_marks(plain)):
        return None
    line = plain.strip().rpartition("\n")[2].strip()
    last = _LAST_SCORE.search(line) or _SCORE_OF.search(line)
    if last is None or _NOT_MEANT.search(last.groupdict().get("before") or ""):
        return None
    return _within(int(last.group("grade"))) or None


def _marks(plain: str) -> Iterator[int]:
    """Where each marker of a result ends."""
    return (marker.end() for marker in _MARKER.finditer(plain))


def _within(grade: int) -> int:
    """The grade, or 0 for what is none."""
    return grade if grade <= 5 else 0


def _grade(plain: str, start: int) -> int | None:
    """The number after a marker, 0 when it is no whole grade from 1 to 5; None when there is no number."""
    number = _NUMBER.match(plain, start)
    if number is None:
        return None
    # 4.0 is 4
    whole = re.fullmatch(r"\+?(\d+)(?:[.,·]0+)?", number["number"])
    end = number.end()
    scale = _SCALE.match(plain, end)
    if scale is not None:
        if float(scale.group("top").replace(",", ".")) != 5:
            return 0
        end = scale.end()
    told = _TOLD_SCALE.match(plain, end)
    if whole is None or _NOT_ALONE.match(plain, end) or (told and _BEYOND_FIVE.search(told.group("told"))):
        return 0
    if _BOUND.search(plain[start : number.start("number")]) and not re.match(r" ?>", plain[number.end() :]):
        return 0
    return _within(int(whole.group(1)))


def parse_winner(text: str) -> Verdict | None:
    """The better response as a judge named it; `tie` where it says so itself; None when that is not to be read."""
    plain = _plain(text)
    verdicts = [verdict for end in _marks(plain) if (verdict := _side(plain, end)) is not None]
    if verdicts:
        return verdicts[-1]
    if any(_marks(plain)):
        return None
    last = _LAST_SIDE.search(plain.strip())
    return _named(last.group(1)) if last else None


def _side(plain: str, start: int) -> Verdict | None:
    if _TIE.match(plain, start):
        return "tie"
    side = _SIDE.match(plain, start)
    if side is None:
        return None
    if _UNLIKE.match(plain, side.end()):
        return None
    name = side.group("side")
    if name in "Aa" and not _NAMED.match(plain, side.end()):
        return None
    if name.islower() and re.match(r"[ \t]*\w", plain[side.end() :]):
        return None
    return _named(name)


def _named(letter: str) -> Verdict:
    return "A" if letter in "Aa" else "B"


def feedback_of(text: str) -> str:
    """What the judge wrote before its verdict."""
    text = _said(text)
    marks = list(_MARKER.finditer(text))
    words = text[: marks[-1].start()] if marks else text
    label = r"^\s*(?:#+\s*)?[*_]*feedback[*_]*\s*:[*_\s]*"
    return re.sub(label, "", words, flags=re.IGNORECASE).strip().rstrip("*_ \n")


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def _text(name: str) -> str:
    return files("services.critic").joinpath(f"prompts/{name}.txt").read_text(encoding="utf-8")


def _filled(name: str, reference: str, values: dict[str, str]) -> JudgePrompt:
    """The template with its placeholders replaced in one pass: what an answer contains is never taken for one."""
    template = _text(f"{name}_reference" if reference else name)
    values = {**values, "reference_answer": reference}
    user = re.sub(r"\{(\w+)\}", lambda found: values[found.group(1)], template)
    return [{"role": "system", "content": _text(f"{name}_system").strip()}, {"role": "user", "content": user}]


def absolute_prompt(instruction: str, response: str, rubric: str, reference: str = "") -> JudgePrompt:
    """Asks for a grade of one response. `rubric`: the question and the five score lines."""
    values = {"instruction": instruction, "response": response, "rubric": rubric}
    return _filled("absolute", reference, values)


def relative_prompt(instruction: str, first: str, second: str, rubric: str, reference: str = "") -> JudgePrompt:
    """Asks which of two responses is better. `rubric`: the question alone."""
    values = {"instruction": instruction, "response_A": first, "response_B": second, "rubric": rubric}
    return _filled("relative", reference, values)


def unswap(verdict: Verdict) -> Verdict:
    """Who won, of a judging that saw the responses in the other order: its A is B."""
    return {"A": "B", "B": "A", "tie": "tie"}[verdict]  # type: ignore[return-value]


def decide(forward: Verdict, swapped: Verdict) -> Verdict:
    """The winner when both orders agree on it, else a tie.

    A judge that prefers a position names another winner in the other order; that says nothing about the responses.
    """
    return forward if forward == swapped else "tie"
