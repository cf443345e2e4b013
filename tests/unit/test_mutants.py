"""The mutation run itself: which changes it makes, which tests it asks, and what it takes for a verdict."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent

import pytest
from mutants import recorded as recording
from mutants.changes import Change, changes
from mutants.marks import SEEN, mark
from mutants.readers import Readers
from mutants.recorded import Case, Recorded, unasserted
from mutants.run import AREAS, Aptness, aptness, area_of, chosen, report, rounds, sampled
from mutants.trial import Bench, Verdict
from mutants.wording import Wording

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
        ("if pop():\n    log.info('something')", {"if True:\n    log.info('something')"}),
        ("if a:\n    log.info('something')\nelse:\n    go()", {"if True:\n    log.info('something')\nelse:\n    go()"}),
    ],
)
def test_each_change_is_one_that_could_be_a_mistake(source: str, wanted: set[str]) -> None:
    assert wanted <= made(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "log.info('something', count=len(found))",
        "not_understood(stream, entry, reason)",
        "x: int | None",
        "TUNED = 3",
        "x = f'{a < b}'",
        "import a, b",
        "with suppress(KeyError, ValueError):\n    pass",
        "assert x is not None",
        "class P(Protocol):\n    def f(self) -> int:\n        return 1",
        "def f() -> str:\n    return ''",
        "def f() -> Iterable[int]:\n    return ()",
        "super().__init__(f'the index of {user_id} is broken')",
        "x = zip(a, b, strict=True)",
        "x = create_task(go, name=of)",
        "if a < b and c:\n    log.info('something', count=2)",
    ],
)
def test_what_is_no_behaviour_is_left_alone(source: str) -> None:
    assert made(source) == set()


def test_no_clock_stands_at_an_edge() -> None:
    assert made("x = loop.time() < until") == {"x = loop.time() >= until"}


def test_lua_is_changed_line_by_line() -> None:
    found = made(
        '''
        S = Script("""
        -- a == b is told here only
        if a == b then redis.call('GET', 'x') end
        redis.call('EXPIRE', KEYS[1], 9)
        return 1
        """)
        '''
    )
    assert any("if a ~= b then" in one for one in found)
    assert any("EXPIRE" not in one for one in found)
    assert any("KEYS[1], 10)" in one for one in found)
    assert any("return 0" in one for one in found)
    assert not any("KEYS[2]" in one or "a ~= b is told" in one for one in found)


@pytest.mark.parametrize(
    "line",
    [
        "local one = redis.call('XPENDING', KEYS[2], ARGV[2], row[2], row[2], 1)",
        "local first = redis.call('XPENDING', KEYS[2], ARGV[2], '-', '+', 1)[1]",
        "local claim = {'XCLAIM', KEYS[2], ARGV[2], ARGV[3], 0}",
    ],
)
def test_numbers_that_say_the_same_as_the_next_one_are_left_alone(line: str) -> None:
    assert made(f'S = """\n-- redis.call()\n{line}\n"""') == set()
    assert made("x = ('XCLAIM', a, b, c, 0, d)") == set()
    assert made("x = ('XCLAIM', a, b, c, 0, d, 'RETRYCOUNT', 3)") == {"x = ('XCLAIM', a, b, c, 0, d, 'RETRYCOUNT', 4)"}


def test_changes_of_the_product_are_python_again() -> None:
    for path in ("shared/bus/streams.py", "shared/bus/connection.py", "services/reward/ranking.py"):
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
    assert area_of("shared/bus/connection.py") == "bus"
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


def test_an_except_clause_is_known_by_its_own_lines() -> None:
    text = "def f():\n    try:\n        a()\n    except (A, B):\n        b()\n"
    assert Readers({"a.py": text}).of("a.py", 4) == {"a.py": {4}}


def bits(*lines: int) -> int:
    return sum(1 << line for line in lines)


def about(known: Recorded, tests: str = "") -> Aptness:
    """How apt tests are to notice a change of one.py."""
    known.sources["one.py"] = "if late:\n    pass\nusage = answer.usage\n"
    return aptness(known, Wording({"e.py": tests}), Change("one.py", 3, 0, 1, "answer.usage", "None"))


def test_the_cheapest_tests_are_asked_and_those_that_are_most_about_the_file_until_the_time_is_used_up() -> None:
    known = Recorded(
        cases={
            "broad": Case(0.1, {"one.py": bits(6), "two.py": bits(*range(50))}),
            "devoted": Case(5.0, {"one.py": bits(5, 6, 7)}),
            "slow": Case(30.0, {"one.py": bits(6), "two.py": bits(1)}),
            "elsewhere": Case(0.1, {"one.py": bits(1)}),
        }
    )
    apt = about(known)
    assert set(chosen(known, {"one.py": {6}}, apt, 10.0)) == {"broad", "devoted"}
    assert set(chosen(known, {"one.py": {6}}, apt, 40.0)) == {"broad", "devoted", "slow"}
    assert chosen(known, {"one.py": {6}}, apt, 40.0, {"broad", "devoted"}) == ["slow"]
    assert chosen(known, {"one.py": {9}}, apt, 40.0) == []


def test_of_tests_that_run_the_same_the_one_that_speaks_of_the_change_is_asked() -> None:
    lines = {"one.py": bits(3), "two.py": bits(*range(50))}
    known = Recorded(cases={f"e.py::test_{name}": Case(9.0, lines) for name in ("answers", "counts[7]", "ends")})
    tests = """
def test_answers():
    assert ask().answer == "Yes."

@pytest.mark.parametrize("number", [7])
def test_counts(number):
    assert ask().answer.usage == number

def test_ends():
    assert ask() is None
"""
    apt = about(known, tests)
    assert sorted(known.cases, key=apt) == ["e.py::test_ends", "e.py::test_answers", "e.py::test_counts[7]"]
    # the cheapest comes first, and they all take as long
    assert chosen(known, {"one.py": {3}}, apt, 18.0) == ["e.py::test_answers", "e.py::test_counts[7]"]
    assert apt("e.py::test_ends") == about(known)("e.py::test_ends") == 1 / 51


def test_what_a_test_file_has_to_start_counts_once() -> None:
    lines = {"one.py": bits(6)}
    known = Recorded(
        cases={
            "a.py::starts": Case(9.0, {"two.py": bits(1)}),
            "a.py::one": Case(0.1, lines),
            "a.py::two": Case(0.2, lines),
            "b.py::starts": Case(9.0, {"two.py": bits(1)}),
            "b.py::one": Case(0.3, lines),
            "c.py::alone": Case(0.4, lines),
        }
    )
    assert known.starts() == {"a.py": 9.0, "b.py": 9.0, "c.py": 0.4}
    apt = about(known)
    assert set(chosen(known, {"one.py": {6}}, apt, 10.0)) == {"a.py::one", "a.py::two", "c.py::alone"}
    assert rounds(known, ["a.py::one", "b.py::one", "c.py::alone"], apt)[0] == ["c.py::alone", "a.py::one"]


def test_tests_are_asked_file_by_file_first_those_that_are_about_the_change() -> None:
    broad, devoted = {"one.py": bits(6), "two.py": bits(*range(50))}, {"one.py": bits(5, 6, 7)}
    known = Recorded(
        cases={
            "a.py::broad": Case(0.1, broad),
            "b.py::slow": Case(30.0, devoted),
            "c.py::slower": Case(2.0, devoted),
            "c.py::quick": Case(0.1, broad),
            "d.py::devoted": Case(0.1, devoted),
        }
    )
    assert rounds(known, known.cases, about(known)) == [
        ["d.py::devoted", "c.py::quick", "c.py::slower"],
        ["b.py::slow", "a.py::broad"],
    ]


def test_a_report_counts_and_names_what_nobody_noticed() -> None:
    change = Change("shared/bus/connection.py", 12, 0, 1, "a\n  < b", "a <= b")
    stillborn = Verdict(change, "import", "breaks", 3)
    told = report([Verdict(change, "a test", "hangs", 3, 2.5), Verdict(change, tried=4), stillborn, Verdict(change)])
    assert "bus                1   3  33.3%" in told
    assert "1 of those noticed let a test hang." in told
    assert "A change that is noticed took 2.5 seconds of a processor." in told
    assert "A change that is missed took 0.0 seconds of a processor." in told
    assert "1 more are not counted" in told
    assert told.count("shared/bus/connection.py:12: a < b  →  a <= b") == 2
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

def test_wrong():
    assert double(2) == 5
"""


def _checkout(root: Path, files: dict[str, str]) -> None:
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    # packages, as in a checkout: one of the same name that lies further behind on the path would go before
    packages = {"shared/__init__.py": "", "services/__init__.py": ""}
    for path, text in {**packages, "shared/product.py": PRODUCT, "services/other.py": "", **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    shutil.copytree(ROOT / "tests" / "mutants", root / "tests" / "mutants")


@pytest.mark.slow
async def test_a_change_is_noticed_by_a_test_that_fails_twice_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mutants.trial._PATIENCE", (1.0, 5.0))
    _checkout(tmp_path, {"tests/test_product.py": TESTS, ".gitignore": "secret", "secret": ""})
    source = PRODUCT.encode()
    doubled, ends, unsteady = (f"tests/test_product.py::test_{name}" for name in ("doubled", "ends", "unsteady"))

    def changed(old: str, new: str) -> Change:
        start = source.index(old.encode())
        return Change("shared/product.py", 1, start, start + len(old), old, new)

    async with Bench(tmp_path) as bench:
        assert not bench.root.joinpath("secret").exists()
        await bench.check([doubled, ends], {})
        fails = await bench.judge(changed("n + n", "n - n"), [[doubled, ends]], {})
        assert (fails.by, fails.why) == (doubled, "fails")
        assert fails.seconds > 0.0
        hangs = await bench.judge(changed("False", "True"), [[doubled], [ends]], {ends: 0.0})
        assert (hangs.by, hangs.why) == (ends, "hangs")
        breaks = await bench.judge(changed("return", "return return"), [[doubled]], {})
        assert (breaks.by, breaks.why) == ("import", "breaks")
        # it failed for another reason than the change
        passes = await bench.judge(changed("n + n", "2 * n"), [[unsteady, doubled]], {})
        assert (passes.by, passes.tried) == (None, 2)
        # it fails without the change too
        wrong = await bench.judge(changed("n + n", "n - n"), [["tests/test_product.py::test_wrong", doubled]], {})
        assert (wrong.by, wrong.why) == (doubled, "fails")
        after = fails.after(passes)
        assert (after.by, after.tried, after.seconds) == (doubled, 4, fails.seconds + passes.seconds)
        with pytest.raises(RuntimeError, match="nothing changed"):
            await bench.check(["tests/test_product.py::test_of_nothing"], {})
    assert not bench.root.exists()
    assert (tmp_path / "shared" / "product.py").read_text() == PRODUCT


TELLS_NOTHING = """assert True
def test_of_nothing():
    for one in []:
        assert one
    assert (
        True
    )
"""


def test_an_assertion_that_no_test_ran_is_told() -> None:
    assert unasserted(TELLS_NOTHING, [5]) == ["4: assert one"]
    # those that run at import do so before any test
    assert unasserted(TELLS_NOTHING, []) == ["4: assert one", "5: assert True"]


MARKED = '''"""A docstring."""
from __future__ import annotations

def f(a):
    """Another."""
    global b
    b = (
        a
    )
    if a == 1:
        return 1
    elif a == 2:
        return 2
    try:
        int(a)
    except ValueError:
        b = 2
    match a:
        case 3:
            b = 3
        case _:
            def g():
                return b
    return g()

async def h(wait):
    await wait()
    return 1
'''


async def test_marks_say_which_lines_ran_in_every_process_and_the_text_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/__init__.py").touch()
    (tmp_path / "shared/marked.py").write_text(MARKED)
    places = mark(tmp_path, ["shared/__init__.py", "shared/marked.py"])
    file = tmp_path / "seen"
    monkeypatch.setenv(SEEN, str(file))

    def ran(call: str, before: str = "") -> set[int]:
        """The lines that a process runs which is killed thereafter."""
        file.unlink(missing_ok=True)
        program = f"import asyncio, os, shared.marked as m\n{before}\ntry: {call}\nfinally: os.kill(os.getpid(), 9)"
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, check=False)
        seen = file.read_bytes()
        assert len(seen) == len(places)
        lines = [place.lines for place, byte in zip(places, seen, strict=True) if byte]
        return {line for bits in lines for line in range(bits.bit_length()) if bits >> line & 1}

    start = {7, 8, 9, 10}
    assert ran("pass") == set()
    assert ran("m.f(1)") == {*start, 11}
    assert ran("m.f(2)") == {*start, 12, 13}
    # 12 is `elif`, and 19 the case that is tried first
    assert ran("m.f(3)") == {*start, 12, 14, 15, 18, 19, 20, 24}
    assert ran("m.f(4)") == {*start, 12, 14, 15, 18, 19, 21, 22, 23, 24}
    assert ran("m.f('4')") == {*start, 12, 14, 15, 18, 19, 21, 22, 23, 24}
    assert ran("m.f('x')") == {*start, 12, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24}
    assert ran("asyncio.run(m.h(fails))", "async def fails(): raise OSError") == {27}
    assert ran("m.f(1)", "import inspect; inspect.getsource(m.f).index('elif')") == {*start, 11}
    assert (tmp_path / "shared/marked.py").read_text() == MARKED


def test_a_recording_that_fails_on_the_way_goes_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests/unit").mkdir(parents=True)
    files = [f"tests/unit/test_{name}.py" for name in "abc"]
    for file in files:
        (tmp_path / file).write_text(file)
    asked: list[str] = []
    broken = {files[1]}

    def record(
        _root: Path, _sources: Sequence[str], some: Sequence[str], _workers: int
    ) -> Iterator[tuple[str, dict[str, Case]]]:
        for file in some:
            asked.append(file)
            if file in broken:
                raise RuntimeError("a worker died")
            yield file, {f"{file}::test": Case(1.0)}

    monkeypatch.setattr(recording, "_record", record)
    monkeypatch.setattr(recording, "_EVERY", 0.0)
    with pytest.raises(RuntimeError, match="a worker died"):
        recording.recorded(tmp_path, [], 1)
    assert set(recording.recorded(tmp_path, [], 0).cases) == {f"{files[0]}::test"}
    assert asked == files[:2]
    asked.clear()
    broken.clear()
    assert set(recording.recorded(tmp_path, [], 1).cases) == {f"{file}::test" for file in files}
    assert asked == files[1:]
    (tmp_path / files[0]).write_text("changed")
    assert set(recording.recorded(tmp_path, [], 0).cases) == {f"{file}::test" for file in files[1:]}
    assert asked == files[1:]
    for file in files:
        (tmp_path / file).write_text("changed again")
    with pytest.raises(RuntimeError, match="no test is recorded"):
        recording.recorded(tmp_path, [], 0)


RECORDED = """
import subprocess, sys
import pytest
from shared.product import double, run

@pytest.fixture(scope="module")
def process():
    told = "from shared.product import double\\nwhile input(): print(double(1), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        yield started
        started.kill()

def asked(process):
    process.stdin.write("x\\n")
    process.stdin.flush()
    return process.stdout.readline()

def test_starts_it(process):
    run()

def test_asks_it(process):
    assert asked(process) == "2\\n"

def test_loops():
    for one in []:
        assert one
"""


@pytest.mark.slow
def test_who_asks_a_process_that_another_test_started_is_recorded_as_running_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = "def test_fails():\n    assert False\n    assert not True\n"
    _checkout(tmp_path, {"tests/unit/test_product.py": RECORDED, "tests/unit/test_failing.py": failing})
    known = recording.recorded(tmp_path, ["shared/product.py"], 1)
    name = "tests/unit/test_product.py::test_"
    assert set(known.cases) == {f"{name}{case}" for case in ("starts_it", "asks_it", "loops")}
    assert known.running("shared/product.py", [3]) == [f"{name}asks_it"]
    assert known.running("shared/product.py", [7, 11]) == [f"{name}starts_it"]
    told = capsys.readouterr().err
    assert told.count("asserted by no test:") == 1
    assert "asserted by no test: tests/unit/test_product.py:28: assert one" in told
    assert "not used, it fails as things are: FAILED tests/unit/test_failing.py::test_fails" in told
