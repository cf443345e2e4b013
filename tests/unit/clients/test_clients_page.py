"""docs/clients.md says of each client what its program has tried, and shows the code that was run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "clients"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield __import__("page")
    del sys.modules["page"]


def test_the_page_shows_the_code_that_was_run_and_a_row_for_each_client(page: Any) -> None:
    text = page.PAGE.read_text()
    made = text.partition(page.BEGIN)[2].partition(page.END)[0]
    assert f"| client | version | {' | '.join(page.FEATURES)} |" in made
    for client in page.CLIENTS:
        not_run = f"- {page.title(client)}: " in made.partition("Not run:")[2].partition("###")[0]
        row = f"| {page.title(client)} | {client.version} | "
        shown = row in made and page.section(client) in made
        assert shown != not_run, f"{client.name}: make test-clients ARGS=--write"
    assert "docs: begin" not in made


def test_what_is_not_said_or_does_not_work_is_unexpected_unless_it_is_known(page: Any) -> None:
    found = page.Outcome(page.CLIENTS[0], dict.fromkeys(((feature, "") for feature in page.FEATURES), ""))
    assert (found.unexpected({}), {found.mark(feature) for feature in page.FEATURES}) == ([], {page.WORKS})
    found.tried["chat", "responses"] = "it gave 1"
    assert (found.unexpected({}), found.mark("chat")) == (["openai: chat responses"], page.FAILS)
    assert found.unexpected({("openai", "chat"): "theirs"}) == []
    del found.tried["chat", "responses"]
    assert found.unexpected({("openai", "chat"): "theirs"}) == ["openai: chat works, and is named as known not to"]
    del found.tried["usage", ""]
    assert (found.unexpected({}), found.mark("usage")) == (["openai: nothing is said of usage"], page.FAILS)
    found.not_offered["usage"] = "it counts nothing"
    assert (found.unexpected({}), found.mark("usage")) == ([], page.NOT_OFFERED)
    found.missing = "there is no npm on the PATH"
    assert "Not run:" in page.table([found], {})


def test_the_page_is_written_between_its_marks_only(page: Any) -> None:
    one = page.Outcome(page.CLIENTS[0])
    text = page.written(f"before\n{page.BEGIN}\nold\n{page.END}\nafter", [one], {})
    assert text.startswith(f"before\n{page.BEGIN}\n\n| client |")
    assert text.endswith(f"{page.END}\nafter")
    assert "old" not in text
    with pytest.raises(ValueError, match="has no lines"):
        page.written("no marks", [one], {})
