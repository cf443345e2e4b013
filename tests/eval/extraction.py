"""How well the main text of pages is found: `python tests/eval/extraction.py [DIR …]` prints one table per set.

The built-in set (tests/eval/pages) has one page of each kind; what belongs to the main text stands between
`<!--main-->` and `<!--/main-->`. A DIR is a labelled set of real pages: `html/NAME.html` with its text in
`txt/NAME.txt`, the layout of the test data in newspaper4k's source distribution.

F1, recall and boilerplate are counted in words (characters in scripts without spaces): boilerplate is the share of the
extracted words that do not belong to the main text.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import trafilatura
from bs4 import BeautifulSoup

from services.web_fetch.extract import extract, whole_page

PAGES = Path(__file__).parent / "pages"
MARK = re.compile(r"<!--/?main-->")
MAIN = re.compile(r"<!--main-->(.*?)<!--/main-->", re.DOTALL)
TYPES = {".html": "text/html", ".json": "application/json", ".txt": "text/plain"}
WORD = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u3040-\u9fff]|[^\W\u0e00-\u0eff\u1000-\u109f\u3040-\u9fff]+")


@dataclass(frozen=True)
class Labelled:
    name: str
    body: str
    content_type: str
    main: str


@dataclass(frozen=True)
class Score:
    f1: float
    recall: float
    boilerplate: float


def score(found: str, wanted: str) -> Score:
    """Agreement of two texts as bags of words."""
    got, want = Counter(WORD.findall(found.lower())), Counter(WORD.findall(wanted.lower()))
    both = (got & want).total()
    precision, recall = both / max(1, got.total()), both / max(1, want.total())
    f1 = 2 * precision * recall / (precision + recall) if both else 0.0
    return Score(f1, recall, 1 - precision if got else 0.0)


def built_in() -> Iterator[Labelled]:
    """The pages beside this file."""
    for path in sorted(PAGES.iterdir()):
        body, kind = path.read_text(encoding="utf-8"), TYPES[path.suffix]
        main = BeautifulSoup(" ".join(MAIN.findall(body)), "lxml").get_text(" ") if kind == "text/html" else body
        yield Labelled(path.stem, MARK.sub("", body), kind, main)


def labelled(folder: Path) -> Iterator[Labelled]:
    """A set of real pages from outside."""
    for text in sorted((folder / "txt").glob("*.txt")):
        page = folder / "html" / f"{text.stem}.html"
        if page.is_file():
            body = page.read_text(encoding="utf-8", errors="replace")
            yield Labelled(text.stem, body, "text/html", text.read_text(encoding="utf-8"))


def plain_soup(page: Labelled) -> str:
    soup = BeautifulSoup(page.body, "lxml")
    for tag in soup(["script", "style", "noscript"]):
        tag.decompose()
    return soup.get_text("\n")


def trafilatura_with(**options: bool) -> Callable[[Labelled], str]:
    return lambda page: trafilatura.extract(page.body, **options) or ""


METHODS: dict[str, Callable[[Labelled], str]] = {
    "BeautifulSoup, all text": plain_soup,
    "BeautifulSoup, no furniture": lambda page: whole_page(BeautifulSoup(page.body, "lxml")),
    "trafilatura, as it comes": trafilatura_with(),
    "trafilatura, precision": trafilatura_with(favor_precision=True, include_comments=False),
    "trafilatura, recall": trafilatura_with(favor_recall=True),
    "web_fetch": lambda page: extract(page.body, page.content_type).text,
}


def measure(name: str, pages: list[Labelled]) -> None:
    """Prints the table of one set."""
    print(f"\n{name}: {len(pages)} pages")
    print(f"{'method':28} {'F1':>6} {'lowest':>7} {'recall':>7} {'boiler':>7} {'ms':>6}  worst pages")
    for method, run in METHODS.items():
        run(pages[0])  # what is loaded at first use does not count
        started = time.perf_counter()
        found = [
            run(page) if page.content_type == "text/html" or method == "web_fetch" else page.body for page in pages
        ]
        ms = (time.perf_counter() - started) * 1_000 / len(pages)
        scores = {page.name: score(text, page.main) for page, text in zip(pages, found, strict=True)}
        worst = sorted(scores, key=lambda page: scores[page].f1)[:3]
        print(
            f"{method:28} {mean(s.f1 for s in scores.values()):6.3f} {min(s.f1 for s in scores.values()):7.2f} "
            f"{mean(s.recall for s in scores.values()):7.3f} {mean(s.boilerplate for s in scores.values()):7.3f} "
            f"{ms:6.1f}  {', '.join(f'{page} {scores[page].f1:.2f}' for page in worst)}"
        )


if __name__ == "__main__":
    measure("built-in", list(built_in()))
    for argument in sys.argv[1:]:
        measure(Path(argument).name, list(labelled(Path(argument))))
