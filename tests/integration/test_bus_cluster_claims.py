"""What the bus promises on one server, it promises on a cluster of three: the same tests, on the other bus."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import redis
from support.cluster import Cluster

CLAIMS = {
    "test_bus_work": [
        "test_two_replicas_share_the_work_and_none_is_done_twice",
        "test_a_replica_takes_no_more_than_it_can_run",
        "test_an_idle_replica_with_a_blocked_read_never_exceeds_its_slots_when_it_claims",
        "test_a_replica_of_several_streams_takes_no_more_than_it_can_run",
        "test_work_comes_back_from_waiting_at_once_when_the_replica_only_waits_for_entries",
        "test_a_dead_replicas_entries_are_claimed_after_three_heartbeats_on_an_idle_queue",
        "test_what_cannot_be_finished_is_handed_over_at_once_and_keeps_its_count",
        "test_a_handler_that_swallows_its_cancellation_writes_nothing_for_a_lost_entry",
        "test_a_silent_consumer_is_removed_unless_it_still_holds_entries",
    ],
    "test_bus_tail": [
        "test_every_follower_gets_every_entry_once_in_order",
        "test_two_hundred_followers_of_one_stream_all_get_everything",
        "test_a_follower_behind_what_was_trimmed_goes_on_with_what_is_there",
        "test_a_tail_survives_a_flush",
    ],
    "test_bus_bell": [
        "test_whoever_joins_and_whatever_is_not_rung_every_entry_comes_once_in_order",
        "test_two_hundred_followers_of_one_journal_all_get_everything",
        "test_an_entry_that_was_not_rung_is_found",
        "test_what_comes_after_the_end_is_rung_too",
        "test_a_key_that_is_no_journal_is_read_as_none",
    ],
    "test_bus_dead_letters": [
        "test_a_message_that_can_never_be_handled_is_set_aside_at_once",
        "test_replay_puts_the_identical_fields_back",
        "test_the_same_entry_is_set_aside_once_however_often_it_is_buried",
    ],
    "test_bus_retention": [
        "test_an_abandoned_group_no_longer_holds_entries_back",
        "test_what_was_finished_a_moment_ago_stays_for_observers_unless_it_is_much",
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
