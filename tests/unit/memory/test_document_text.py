"""Text out of files, what is refused and why, and the chunks that a search finds."""

from __future__ import annotations

import pytest
from support.made_files import bomb, pdf, png

from services.memory.chunks import Block, Chunk, chunked, whole
from services.memory.document_reader import DocumentReader
from services.memory.document_text import MOST_BLOCKS, MOST_CHARS, text_of
from services.memory.formats import FileRefused, Kind, clean_name, kind_of


def blocks(data: bytes, kind: Kind) -> list[tuple[str, str]]:
    return [(block.place, block.text) for block in text_of(data, kind, "a").blocks]


def refusal(data: bytes, kind: Kind = "pdf", name: str = "a.pdf") -> str:
    with pytest.raises(FileRefused) as refused:
        text_of(data, kind, name)
    return str(refused.value)


# ── what a file is ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "declared", "head", "kind"),
    [
        ("a.pdf", "", b"%PDF-1.7", "pdf"),
        ("a", "application/octet-stream", b"\n\n%PDF-1.4", "pdf"),
        ("a.png", "", png(), "png"),
        ("photo.jpg", "", b"\xff\xd8\xff\xe0", "jpeg"),
        ("photo.png", "", b"\xff\xd8\xff\xe0", "jpeg"),
        ("a.gif", "", b"GIF89a", "gif"),
        ("a.webp", "", b"RIFF\x00\x00\x00\x00WEBPVP8 ", "webp"),
        ("a.htm", "", b"<p>x", "html"),
        ("page", "", b"  <!-- x --> <!DOCTYPE html><p>", "html"),
        ("page", "text/html; charset=utf-8", b"plain", "html"),
        # tried in all ways, the comments would take for ever
        ("a.txt", "", b"<!---->" * 585, "text"),
        ("a.md", "", b"# x", "markdown"),
        ("a", "text/markdown", b"# x", "markdown"),
        ("main.py", "", b"print()", "text"),
        ("a.txt", "text/plain", "ÿþ".encode("utf-16"), "text"),
    ],
)
def test_a_file_is_known_by_its_first_bytes(name: str, declared: str, head: bytes, kind: Kind) -> None:
    assert kind_of(name, declared, head) == kind


@pytest.mark.parametrize(
    ("name", "head", "code", "said"),
    [
        ("a.txt", b"", "empty_file", "a.txt is empty"),
        ("a.pdf", b"<html>", "wrong_type", "not what its name says"),
        ("a.png", b"%PDF-1.4", "wrong_type", "not those of a png file"),
        ("a.docx", b"PK\x03\x04", "unsupported_type", "save what is in it as PDF or text"),
        ("a.tar.gz", b"\x1f\x8b\x08", "unsupported_type", "add the files that are in it"),
        ("a.exe", b"MZ\x90\x00\x03", "unsupported_type", "text, Markdown, HTML, PDF and images"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_a_sentence(name: str, head: bytes, code: str, said: str) -> None:
    with pytest.raises(FileRefused, match=said) as refused:
        kind_of(name, "", head)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\docs\\a.pdf", "a.pdf"),
        ("a\n\x1b[31mb", "a[31mb"),
        ("..", "file"),
        ("", "file"),
    ],
)
def test_a_name_has_no_folders_and_one_line(given: str, kept: str) -> None:
    assert clean_name(given) == kept
    assert len(clean_name("x" * 900)) == 200


# ── text and places ──────────────────────────────────────────────────────────────────────────────────────────


def test_plain_text_has_paragraphs_with_their_lines() -> None:
    assert blocks(b"one\r\n\r\n\r\ntwo\r\nthree\r\n\r\nfour", "text") == [
        ("line 1", "one"), ("line 4", "two\nthree"), ("line 7", "four")
    ]  # fmt: skip


def test_text_in_other_charsets_is_read() -> None:
    assert blocks("grün".encode("utf-16"), "text") == [("line 1", "grün")]
    assert blocks("grün".encode("cp1252"), "text") == [("line 1", "grün")]
    assert blocks(b"a\x00\x07b", "text") == [("line 1", "ab")]


def test_markdown_has_the_headings_above_each_paragraph() -> None:
    text = b"Title\n=====\nintro\n\n## Setup ##\n\n```\n# no heading\n```\n\n### Linux\nrun it\n\n## Use\n- a\n---\nb"
    assert blocks(text, "markdown") == [
        ("Title", "intro"),
        ("Title > Setup", "```\n# no heading\n```"),
        ("Title > Setup > Linux", "run it"),
        ("Title > Use", "- a\n---\nb"),
    ]
    assert text_of(text, "markdown", "a").title == "Title"


def test_html_has_its_headings_and_none_of_its_scripts() -> None:
    page = b"""<html><head><title>The &amp; manual</title><style>x{}</style></head><body><nav>Menu</nav>
    <h1>One</h1><p>first<p>second <b>bold</b><script>if (a < b) alert(1)</script><h2>Two</h2>
    <ul><li>a<li>b</ul><template>hidden</template></body>"""
    assert blocks(page, "html") == [
        ("One", "first"), ("One", "second bold"), ("One > Two", "a"), ("One > Two", "b")
    ]  # fmt: skip
    assert text_of(page, "html", "a").title == "The & manual"


def test_html_that_is_broken_is_read_all_the_same() -> None:
    assert blocks(b"<script>x</style><p>gone</script><p>there<![CDATA[x", "html")[0][1].startswith("there")
    deep = b"<div>" * 50_000 + b"deep"
    assert blocks(deep, "html") == [("", "deep")]


def test_a_pdf_has_pages_and_a_title() -> None:
    data = pdf(["The warranty lasts two years, and co-\nvers all parts.", "Second (page)"], "The manual")
    assert blocks(data, "pdf") == [
        ("page 1", "The warranty lasts two years, and covers all parts."), ("page 2", "Second (page)")
    ]  # fmt: skip
    assert text_of(data, "pdf", "a").title == "The manual"


def test_a_pdf_whose_password_is_for_changing_it_only_is_read() -> None:
    from io import BytesIO

    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(BytesIO(pdf(["open to readers"]))))
    writer.encrypt("", "owner's", algorithm="RC4-128")
    out = BytesIO()
    writer.write(out)
    assert blocks(out.getvalue(), "pdf") == [("page 1", "open to readers")]


def test_what_says_nothing_is_refused_with_a_sentence() -> None:
    assert "protected by a password: save it without one" in refusal(pdf(["x"], password="secret"))
    assert "only pictures: have a program recognise the text (OCR)" in refusal(pdf(["", ""]))
    assert "cannot be read as PDF" in refusal(pdf(["x"])[:200])
    assert "cannot be read as PDF" in refusal(b"%PDF-1.4\n" + b"\x00garbage" * 100)
    assert refusal(b" \n\n ", "text", "a.txt") == "a.txt has no text"
    assert refusal(b"<script>x</script>", "html", "a.html") == "a.html has no text"
    assert "is an image" in refusal(png(), "png", "a.png")


def test_a_text_that_is_too_long_is_cut_and_says_so() -> None:
    most = "x" * MOST_CHARS
    found = text_of(f"{most}\n\nmore".encode(), "text", "a")
    assert ("".join(block.text for block in found.blocks).strip(), found.cut) == (most, True)
    assert not text_of(most.encode(), "text", "a").cut


def test_of_a_text_of_very_many_paragraphs_the_first_are_kept() -> None:
    most = "\n\n".join(["x"] * MOST_BLOCKS)
    found = text_of(f"{most}\n\ny".encode(), "text", "a")
    assert ({block.text for block in found.blocks}, len(found.blocks), found.cut) == ({"x"}, MOST_BLOCKS, True)
    assert not text_of(most.encode(), "text", "a").cut


# ── the process that may be killed ───────────────────────────────────────────────────────────────────────────


async def test_a_file_that_takes_too_much_of_the_processor_kills_its_reader_alone() -> None:
    reader = DocumentReader(cpu_seconds=0.5)
    with pytest.raises(FileRefused, match=r"^bomb.pdf takes more time or memory to read than a file may$"):
        await reader.read(bomb(2, b"BT (a) Tj ET "), "pdf", "bomb.pdf")
    assert (await reader.read(b"still here", "text", "a.txt")).blocks == [Block("line 1", "still here")]


async def test_a_file_that_unpacks_to_a_thousand_times_its_size_is_refused() -> None:
    packed = bomb(100, b" ")
    assert len(packed) < 200_000
    with pytest.raises(FileRefused, match=r"bomb.pdf (cannot be read|takes more time or memory)"):
        await DocumentReader().read(packed, "pdf", "bomb.pdf")


async def test_a_refusal_comes_out_of_the_process() -> None:
    with pytest.raises(FileRefused, match="only pictures"):
        await DocumentReader().read(pdf([""]), "pdf", "scan.pdf")


# ── chunks ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_chunks_end_with_paragraphs_and_stay_in_their_place() -> None:
    said = [Block("page 1", "a" * 40), Block("page 1", "b" * 40), Block("page 1", "c" * 40), Block("page 2", "d")]
    found = chunked(said, 100, across=False)
    assert [(chunk.place, len(chunk.text)) for chunk in found] == [("page 1", 82), ("page 1", 40), ("page 2", 1)]


def test_a_chunk_of_plain_text_is_at_the_line_of_its_first_paragraph() -> None:
    found = chunked([Block("line 1", "one"), Block("line 3", "two"), Block("line 5", "x" * 95)], 100, across=True)
    assert found == [Chunk("line 1", "one\n\ntwo"), Chunk("line 5", "x" * 95)]


def test_a_long_paragraph_is_cut_where_a_sentence_ends() -> None:
    sentence = "This sentence has exactly so many words. "
    found = chunked([Block("A", sentence * 20)], 200, across=False)
    assert all(len(chunk.text) <= 200 and chunk.text.endswith(".") for chunk in found)
    assert " ".join(chunk.text for chunk in found) == (sentence * 20).strip()


def test_the_whole_text_names_each_place_once() -> None:
    assert whole([Chunk("page 1", "a"), Chunk("page 1", "b"), Chunk("page 2", "c")]) == (
        "[page 1]\n\na\n\nb\n\n[page 2]\n\nc"
    )
