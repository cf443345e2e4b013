"""The verdicts of `make bench` and `make bench-peers`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(autouse=True)
def _bench_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for name in set(sys.modules) - before:
        if str(BENCH) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("value", "most", "shown"),
    [(6.0, True, "PASS"), (6.1, True, "MISS"), (48.0, True, "MISS"), (48.1, True, "FAR"),
     (6.0, False, "PASS"), (5.9, False, "MISS"), (0.75, False, "MISS"), (0.7, False, "FAR")],
)  # fmt: skip
def test_target_missed_by_far_differs_from_a_miss(value: float, most: bool, shown: str) -> None:
    from tables import Target

    # a value that varies between runs is never far off
    assert not Target("added time", value, 6.0, " ms", most).far
    target = Target("added time", value, 6.0, " ms", most, steady=True)
    assert str(target).split()[0] == shown
    assert (target.met, target.far) == (shown == "PASS", shown == "FAR")


def _entrant(name: str, p50: float, rate: float, missing: str = "") -> Any:
    from run_peers import Entrant

    one = {1: {"p50": p50, "rate": rate}, 64: {"p50": p50, "rate": rate}}
    return Entrant(name, "module:Class", missing=missing, rounds=[] if missing else [one])


@pytest.mark.parametrize(
    ("peer", "met"),
    [((600e-6, 3_000.0), [True, True]), ((400e-6, 3_000.0), [False, True]), ((600e-6, 3_001.0), [True, False])],
    ids=["slower", "lower latency", "higher rate"],
)
def test_peer_is_beaten_by_latency_and_rate(peer: tuple[float, float], met: list[bool]) -> None:
    from run_peers import compare

    _, verdicts = compare(_entrant("LoCAL2", 500e-6, 9_000), _entrant("plain", 400e-6, 9_500), [_entrant("q", *peer)])
    assert [verdict.met for verdict in verdicts] == [True, True, *met]


@pytest.mark.parametrize(
    ("plain", "met"),
    [((400e-6, 15_000.0), [True, True]), ((300e-6, 15_000.0), [False, True]), ((400e-6, 15_001.0), [True, False])],
    ids=["within both", "latency", "rate"],
)
def test_plain_client_limits_latency_and_rate(plain: tuple[float, float], met: list[bool]) -> None:
    from run_peers import compare

    _, verdicts = compare(_entrant("LoCAL2", 600e-6, 9_000), _entrant("plain", *plain), [])
    assert [verdict.met for verdict in verdicts] == met


def test_peer_that_is_missing_has_no_verdict() -> None:
    from run_peers import compare

    missing = _entrant("queue", 0, 0, missing="no such version")
    text, verdicts = compare(_entrant("LoCAL2", 500e-6, 9_000), _entrant("plain", 400e-6, 9_500), [missing])
    assert "NOT RUN queue: no such version" in text
    assert not [verdict for verdict in verdicts if "queue" in verdict.name]


def test_peer_packages_have_exact_versions() -> None:
    listed = tomllib.loads((BENCH / "peers" / "packages.toml").read_text(encoding="utf-8"))
    wanted = listed.pop("common") + [package for peer in listed.values() for package in peer["packages"]]
    assert [package for package in wanted if "==" not in package] == []
    for peer in listed.values():
        module = peer["bus"].partition(":")[0].replace(".", "/")
        assert (BENCH / f"{module}.py").is_file()
