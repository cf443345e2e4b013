from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from eval.memory.data_set import DataSetError, Measures, Question, load, report

DATA = Path(__file__).parents[1] / "eval" / "memory"
TURN = {"id": "t1", "time": "2026-05-01T10:00:00Z", "query": "Hi"}
TALK = {"kind": "conversation", "id": "c", "user": "ann", "turns": [TURN]}
ASKED = {"kind": "question", "id": "q", "user": "ann", "query": "Who?", "evidence": ["t1"]}


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def question(*evidence: str, kind: str = "direct") -> Question:
    return Question(id="q", type=kind, query="?", evidence=evidence)


def test_a_file_has_conversations_and_questions(tmp_path: Path) -> None:
    data = load(written(tmp_path, TALK, "", {**ASKED, "more": "is ignored"}))
    assert data.users() == ["ann"]
    assert data.conversations[0].turns[0].answer == ""
    assert data.questions[0].evidence == ("t1",)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((TALK, "{no json"), "line 2"),
        ((TALK, {"kind": "answer"}), 'line 2: its "kind" must be'),
        (({**TALK, "turns": [{"id": "t1", "query": "Hi"}]}, ASKED), "time"),
        ((TALK, TALK, ASKED), "t1 occurs twice"),
        ((TALK, {**ASKED, "evidence": ["t9"]}), "names t9"),
        ((TALK, {**ASKED, "user": "bob"}), "names t1"),
        ((TALK,), "no questions"),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path: Path, lines: tuple[object, ...], told: str) -> None:
    with pytest.raises(DataSetError, match=told):
        load(written(tmp_path, *lines))


def test_a_missing_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataSetError, match="cannot be read"):
        load(tmp_path / "none.jsonl")


def test_recall_counts_the_evidence_that_was_found() -> None:
    measures = Measures()
    measures.add(question("a", "b"), ["x", "a", "y", "z", "w", "b"])
    assert measures.row() == {
        "recall@5": 0.5,
        "recall@10": 1.0,
        "MRR": 0.5,
        "false hits": None,
        "hits each": None,
    }


def test_what_is_not_found_counts_as_nothing() -> None:
    measures = Measures()
    measures.add(question("a"), ["a"])
    measures.add(question("b"), [])
    assert measures.row()["MRR"] == 0.5
    assert measures.row()["recall@5"] == 0.5


def test_hits_for_a_question_without_an_answer_are_false() -> None:
    measures = Measures()
    measures.add(question(), ["x", "y"])
    measures.add(question(), [])
    assert (measures.row()["false hits"], measures.row()["hits each"]) == (0.5, 1.0)
    assert measures.row()["MRR"] is None


def test_the_report_shows_ways_and_types() -> None:
    measures = Measures()
    measures.add(question("a", kind="update"), ["a"])
    text = report("set", {"dense only": measures})
    assert "recall@10" in text
    assert "update" in text
    assert "1.000" in text


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory_generate", DATA / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # its dataclasses look for their module by name
    sys.modules["memory_generate"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("half", ["train", "test"])
def test_the_shipped_data_set_is_what_its_generator_makes(generate: ModuleType, half: str) -> None:
    assert generate.written(half) == (DATA / f"{half}.jsonl").read_text(encoding="utf-8")
    talks = generate.text_of(generate.talks(half))
    assert talks == (DATA / f"talks-{half}.jsonl").read_text(encoding="utf-8")


def test_the_halves_share_no_turn_and_no_question() -> None:
    train, test = (load(DATA / f"{half}.jsonl") for half in ("train", "test"))
    said = [{turn.query for talk in data.conversations for turn in talk.turns} for data in (train, test)]
    asked = [{one.query for one in data.questions if one.type != "temporal"} for data in (train, test)]
    assert said[0].isdisjoint(said[1])
    assert asked[0].isdisjoint(asked[1])


def test_the_data_set_is_small_and_has_every_kind_of_question() -> None:
    assert sum((DATA / f"{half}.jsonl").stat().st_size for half in ("train", "test")) < 200_000
    kinds = {one.type for one in load(DATA / "test.jsonl").questions}
    assert kinds == {"direct", "paraphrase", "update", "multi", "rated", "temporal", "unanswerable"}
