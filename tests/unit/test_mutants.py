"""The mutation run itself: which changes it makes, which tests it asks, and what it takes for a verdict."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import pytest
from mutants import recorded as recording
from mutants.changes import Change, changes
from mutants.readers import Readers
from mutants.recorded import Case, Recorded, unasserted
from mutants.run import AREAS, area_of, chosen, report, sampled
from mutants.trial import Bench, Verdict

ROOT = Path(__file__).resolve().parents[2]


def made(source: str) -> set[str]:
    """The sources that come of every change."""
    raw = dedent(source).encode()
    return {change.applied(raw).decode().strip() for change in changes("x.py", raw)}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("if a < b:\n    go()", {"if a <= b:\n    go()", "if a >= b:\n    go()", "if False:\n    go()"}),
        ("x = a is not None and b", {"x = a is None and b", "x = a is not None or b", "x = ((b))"}),
        ("x = min(a, b)", {"x = max(a, b)", "x = (a)", "x = (b)"}),
        ("x = a if b else c", {"x = (a)", "x = (c)"}),
        ("x = f(a, b)", {"x = f(b, a)"}),
        ("x = f(a, k=1, m=b)", {"x = f(a, m=b)", "x = f(a, k=1)", "x = f(a, k=0, m=b)"}),
        ("def f() -> int:\n    return g()", {"def f() -> int:\n    return None"}),
        ("async def f():\n    await g()", {"async def f():\n    pass"}),
        ("for x in y:\n    break", {"for x in y:\n    continue"}),
        ("x = [a for a in b if c]", {"x = [a for a in b if True]"}),
        ("x = not a", {"x = (a)"}),
        ("x = a // b", {"x = a * b"}),
        ("try:\n    f()\nexcept A:\n    g()", {"try:\n    f()\nexcept A:\n    raise"}),
        ("try:\n    f()\nfinally:\n    g()", {"try:\n    f()\nfinally:\n    pass"}),
        ("x = 'ä', a == b", {"x = 'ä', a != b"}),
    ],
)
def test_each_change_is_one_that_could_be_a_mistake(source: str, wanted: set[str]) -> None:
    assert wanted <= made(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "log.info('something', count=len(found))",
        "x: int | None",
        "TUNED = 3",
        "x = f'{a < b}'",
        "import a, b",
        "with suppress(KeyError, ValueError):\n    pass",
        "assert x is not None",
        "class P(Protocol):\n    def f(self) -> int:\n        return 1",
        "def f() -> str:\n    return ''",
        "super().__init__(f'the index of {user_id} is broken')",
    ],
)
def test_what_is_no_behaviour_is_left_alone(source: str) -> None:
    assert made(source) == set()


def test_lua_is_changed_line_by_line() -> None:
    found = made(
        '''
        S = Script("""
        -- a == b is told here only
        if a == b then redis.call('GET', 'x') end
        redis.call('EXPIRE', KEYS[1], 9)
        """)
        '''
    )
    assert any("if a ~= b then" in one for one in found)
    assert any("EXPIRE" not in one for one in found)
    assert any("KEYS[1], 10)" in one for one in found)
    assert not any("KEYS[2]" in one or "a ~= b is told" in one for one in found)


def test_changes_of_the_product_are_python_again() -> None:
    for path in ("shared/bus/scripts.py", "shared/bus/link.py", "services/reward/ranking.py"):
        source = (ROOT / path).read_bytes()
        found = changes(path, source)
        assert len(found) > 30
        for number, change in enumerate(found):
            if number % 7 == 0:
                ast.parse(change.applied(source))
            assert source[change.start : change.end].decode() == change.old
            assert source[: change.start].count(b"\n") + 1 == change.line


def test_the_areas_name_files_that_exist() -> None:
    for area, patterns in AREAS.items():
        for pattern in patterns:
            assert list(ROOT.glob(pattern)), f"{area}: {pattern}"
    assert area_of("shared/bus/link.py") == "bus"
    assert area_of("services/cli/app.py") is None


def test_a_sample_is_told_by_its_seed_and_takes_no_line_twice() -> None:
    found = [Change("x.py", n // 3, n, n + 1, "a", "b") for n in range(90)]
    sample = sampled(found, 20, 7)
    assert sample == sampled(found, 20, 7) != sampled(found, 20, 8)
    assert len({change.line for change in sample}) == len(sample) == 20


SOURCES = {
    "one.py": """LIMIT = 3
SCRIPT = Script('x')
OTHER = SCRIPT

def f(a):
    if a:
        return (
            LIMIT
        )
""",
    "two.py": "from one import OTHER\n\ndef g():\n    use(OTHER)\n",
}


def test_what_runs_at_import_matters_to_those_who_read_it() -> None:
    readers = Readers(SOURCES)
    assert readers.of("one.py", 6) == {"one.py": {6}}
    assert readers.of("one.py", 8) == {"one.py": {7, 8, 9}}
    assert readers.of("one.py", 1) == {"one.py": {7, 8, 9}}
    # through another name, in another file
    assert readers.of("one.py", 2) == {"two.py": {4}}
    assert readers.of("two.py", 2) == {}


def test_who_runs_a_line_unseen_is_known_of_its_function() -> None:
    readers = Readers({"a.py": "X = 1\n\ndef f():\n    def g():\n        return 1\n    return g\n"})
    assert readers.around("a.py", 5) == {"a.py": {4, 5}}
    assert readers.around("a.py", 6) == {"a.py": {3, 4, 5, 6}}
    assert readers.around("a.py", 1) == {}


def bits(*lines: int) -> int:
    return sum(1 << line for line in lines)


def test_the_cheapest_tests_are_asked_and_those_that_are_most_about_the_file_until_the_time_is_used_up() -> None:
    known = Recorded(
        cases={
            "broad": Case(0.1, {"one.py": bits(6), "two.py": bits(*range(50))}),
            "devoted": Case(5.0, {"one.py": bits(5, 6, 7)}),
            "slow": Case(30.0, {"one.py": bits(6), "two.py": bits(1)}),
            "elsewhere": Case(0.1, {"one.py": bits(1)}),
        }
    )
    assert chosen(known, {"one.py": {6}}, "one.py", 10.0) == ["broad", "devoted"]
    assert chosen(known, {"one.py": {6}}, "one.py", 40.0) == ["broad", "devoted", "slow"]
    assert chosen(known, {"one.py": {9}}, "one.py", 40.0) == []


def test_a_report_counts_and_names_what_nobody_noticed() -> None:
    change = Change("shared/bus/link.py", 12, 0, 1, "a\n  < b", "a <= b")
    stillborn = Verdict(change, "import", "breaks", 3)
    told = report([Verdict(change, "a test", "hangs", 3), Verdict(change, tried=4), stillborn, Verdict(change)])
    assert "bus                1   3  33.3%" in told
    assert "1 of those noticed let a test hang." in told
    assert "1 more are not counted" in told
    assert told.count("shared/bus/link.py:12: a < b  →  a <= b") == 2
    assert told.count("(no test runs it)") == 1


PRODUCT = """
def double(n):
    return n + n


def go_on():
    return False


def run():
    while go_on():
        pass
"""
TESTS = """
import pathlib
from shared.product import double, run

def test_doubled():
    assert double(2) == 4

def test_ends():
    run()

def test_unsteady():
    seen = pathlib.Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        assert False
"""


@pytest.mark.slow
async def test_a_change_is_noticed_by_a_test_that_fails_twice_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mutants.trial._PATIENCE", 5.0)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)  # noqa: ASYNC221
    for path, text in {
        "shared/product.py": PRODUCT,
        "services/other.py": "",
        "tests/test_product.py": TESTS,
        ".gitignore": "secret",
        "secret": "",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    shutil.copytree(ROOT / "tests" / "mutants", tmp_path / "tests" / "mutants")
    source = PRODUCT.encode()
    doubled, ends, unsteady = (f"tests/test_product.py::test_{name}" for name in ("doubled", "ends", "unsteady"))

    def changed(old: str, new: str) -> Change:
        start = source.index(old.encode())
        return Change("shared/product.py", 1, start, start + len(old), old, new)

    async with Bench(tmp_path) as bench:
        assert not bench.root.joinpath("secret").exists()
        await bench.check([doubled, ends], {})
        fails = await bench.judge(changed("n + n", "n - n"), [doubled, ends], {})
        assert (fails.by, fails.why) == (doubled, "fails")
        hangs = await bench.judge(changed("False", "True"), [doubled, ends], {ends: 0.0})
        assert (hangs.by, hangs.why) == (ends, "hangs")
        breaks = await bench.judge(changed("return", "return return"), [doubled], {})
        assert (breaks.by, breaks.why) == ("import", "breaks")
        # it failed for another reason than the change
        passes = await bench.judge(changed("n + n", "2 * n"), [unsteady, doubled], {})
        assert (passes.by, passes.tried) == (None, 2)
        with pytest.raises(RuntimeError, match="nothing changed"):
            await bench.check(["tests/test_product.py::test_of_nothing"], {})
    assert not bench.root.exists()
    assert (tmp_path / "shared" / "product.py").read_text() == PRODUCT


TELLS_NOTHING = """
def test_of_nothing():
    for one in []:
        assert one
    assert (
        True
    )
"""


def test_an_assertion_that_no_test_ran_is_told_and_tests_are_no_part_of_the_product() -> None:
    cases = {"t.py::test_of_nothing": Case(0.1, {"tests/t.py": bits(2, 3, 5, 6), "shared/a.py": bits(1)})}
    told = unasserted({"tests/t.py": TELLS_NOTHING, "tests/other.py": "assert 1\n"}, cases)
    assert told == ["tests/t.py:4: assert one", "tests/other.py:1: assert 1"]
    assert cases["t.py::test_of_nothing"].lines == {"shared/a.py": bits(1)}


def test_a_recording_that_fails_on_the_way_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests/unit").mkdir(parents=True)
    files = [f"tests/unit/test_{name}.py" for name in "abc"]
    for file in files:
        (tmp_path / file).write_text(file)
    asked: list[str] = []
    broken = {files[1]}

    def record(_root: Path, some: Sequence[str], _workers: int) -> dict[str, Case]:
        asked.extend(some)
        if broken & set(some):
            raise RuntimeError("a worker died")
        return {f"{file}::test": Case(1.0) for file in some}

    monkeypatch.setattr(recording, "_record", record)
    monkeypatch.setattr(recording, "_AT_A_TIME", 1)
    known = recording.recorded(tmp_path, [], 1)
    assert set(known.cases) == {f"{files[0]}::test", f"{files[2]}::test"}
    assert f"tried again the next time: {files[1]}" in capsys.readouterr().err
    asked.clear()
    broken.clear()
    (tmp_path / files[2]).write_text("changed")
    assert len(recording.recorded(tmp_path, [], 1).cases) == 3
    assert asked == files[1:]
    (tmp_path / files[0]).write_text("changed too")
    assert set(recording.recorded(tmp_path, [], 0).cases) == {f"{file}::test" for file in files[1:]}
    assert asked == files[1:]
    for file in files:
        (tmp_path / file).write_text("changed again")
    broken.update(files)
    with pytest.raises(RuntimeError, match="a worker died"):
        recording.recorded(tmp_path, [], 1)
