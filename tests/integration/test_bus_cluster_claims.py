"""Tests of one server, run on a cluster of three; the contract suite (tests/contract/bus) has most promises."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import redis
from support.cluster import Cluster

CLAIMS = {
    "test_bus_tail": [
        "test_a_tail_survives_a_flush",
    ],
    "test_bus_bell": [
        "test_an_entry_that_was_not_rung_is_found",
        "test_what_comes_after_the_end_is_rung_too",
        "test_a_key_that_is_no_journal_is_read_as_none",
    ],
    "test_bus_dead_letters": [
        "test_the_same_entry_is_set_aside_once_however_often_it_is_buried",
    ],
    "test_bus_retention": [
        "test_an_entry_is_finished_when_its_group_has_read_and_acknowledged_it",
    ],
}


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"on_a_cluster_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


for _name, _claims in CLAIMS.items():
    _found = _module(_name)
    for _claim in _claims:
        globals()[_claim] = getattr(_found, _claim)


@pytest.fixture(scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), appendonly="no") as cluster:
        yield cluster


@pytest.fixture
def redis_url(_cluster: Cluster) -> str:
    _cluster.flush()
    return _cluster.url


@pytest.fixture
def raw(_cluster: Cluster, redis_url: str) -> Iterator[redis.RedisCluster]:
    with redis.RedisCluster("127.0.0.1", _cluster.nodes[0].port) as client:
        yield client
