"""Traces by themselves: off costs nothing, a collector that is away harms nobody."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from support.collector import Collector

from shared.errors import Fenced, SettingsError
from shared.telemetry import tracing
from shared.telemetry.spans import NOTHING
from shared.telemetry.tracing_sdk import QUEUE, traces_url

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module", autouse=True)
def nothing_goes_on_in_the_background() -> Iterator[None]:
    """A recorder given up by `stop` may still be at its last attempt; no other test is to run beside that."""
    yield
    for thread in threading.enumerate():
        if thread.name == "traces-closing":
            thread.join(30)
            assert not thread.is_alive()


@contextmanager
def tracing_to(endpoint: str) -> Iterator[None]:
    tracing.start("tester", "tester-1", endpoint)
    try:
        yield
    finally:
        tracing.stop(2.0)


def test_off_a_span_is_nothing_and_a_trace_goes_through_as_it_came() -> None:
    assert not tracing.active()
    with tracing.span("x", parent=PARENT) as span:
        span.set({"a": 1})
        span.fail("Error")
        assert span is NOTHING
        assert tracing.current() == span.traceparent == ""


def test_a_span_continues_the_trace_of_a_message() -> None:
    with Collector() as collector, tracing_to(collector.url):
        with tracing.span("outer", parent=PARENT) as outer:
            assert tracing.current() == outer.traceparent
            with tracing.span("inner"):
                pass
        assert outer.traceparent.startswith("00-4bf92f3577b34da6a3ce929d0e0e4736-")
        tracing.stop(5.0)
        (inner,), (outside,) = collector.named("inner"), collector.named("outer")
        assert outside.parent == "00f067aa0ba902b7"
        assert inner.parent == outside.span_id


@pytest.mark.parametrize(
    "wrong", ["", "junk", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", PARENT.upper(), PARENT + "-x"]
)
def test_a_malformed_traceparent_begins_a_new_trace(wrong: str) -> None:
    with Collector() as collector, tracing_to(collector.url):
        with tracing.span("alone", parent=wrong):
            pass
        tracing.stop(5.0)
        (alone,) = collector.named("alone")
        assert alone.parent == ""
        assert alone.trace_id != "0" * 32


def test_an_unsampled_trace_stays_unsampled_further_down() -> None:
    with Collector() as collector, tracing_to(collector.url):
        with tracing.span("quiet", parent=PARENT[:-2] + "00"), tracing.span("inside") as inside:
            assert inside.traceparent.startswith("00-4bf92f3577b34da6a3ce929d0e0e4736-")
            assert inside.traceparent.endswith("-00")
        tracing.stop(5.0)
        assert collector.spans == []


def test_an_error_is_shown_by_its_class_and_giving_up_a_claim_is_none() -> None:
    with Collector() as collector, tracing_to(collector.url):
        with pytest.raises(ValueError), tracing.span("broken"):
            raise ValueError("the secret text")
        with pytest.raises(Fenced), tracing.span("lost"):
            raise Fenced("somebody else has it")
        tracing.stop(5.0)
        (broken,), (lost,) = collector.named("broken"), collector.named("lost")
        assert (broken.status, broken.attributes["error.type"], broken.message) == (2, "ValueError", "")
        assert (lost.status, lost.attributes["local2.stopped"]) == (0, "Fenced")
        assert b"secret" not in b"".join(collector.bodies)


def test_a_sampler_from_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with Collector() as collector, tracing_to(collector.url):
        with tracing.span("root"):
            pass
        with tracing.span("child", parent=PARENT):
            pass
        tracing.stop(5.0)
        assert [one.name for one in collector.spans] == ["child"]


def test_the_sdk_can_be_switched_off_by_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracing.start("tester", "tester-1", "http://127.0.0.1:9")
    assert not tracing.active()


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shared.telemetry.tracing_sdk")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SettingsError, match=r"pip install 'local2\[observability\]'"):
        tracing.start("tester", "tester-1", "http://127.0.0.1:9")
    assert not tracing.active()


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_the_endpoint_may_be_given_with_or_without_its_path(given: str, url: str) -> None:
    assert traces_url(given) == url


@contextmanager
def black_hole() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def nobody() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but not listening: refused
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("away", [black_hole, nobody], ids=["silent", "refusing"])
def test_a_collector_that_is_away_slows_nothing_and_holds_no_memory(away: object) -> None:
    count = 5 * QUEUE
    with away() as url:  # type: ignore[operator]
        tracing.start("tester", "tester-1", url)
        began, slow = time.perf_counter(), 0
        for _ in range(count):
            one = time.perf_counter()
            with tracing.span("work", parent=PARENT):
                pass
            slow += time.perf_counter() - one > 1.0
        took = time.perf_counter() - began
        # the queue, and the batch that is being sent
        assert sum(isinstance(one, ReadableSpan) for one in gc.get_objects()) <= 2 * QUEUE
        ending = time.perf_counter()
        sent = tracing.stop(0.5)
        assert time.perf_counter() - ending < 5.0
        assert not tracing.active()
    assert took / count < 0.002
    # a machine with too much to do lets one wait; a span that sends would do so for each of the many batches
    assert slow <= 2
    # one that refuses may be given up at once; a silent one cannot have taken anything
    assert not sent or away is nobody
    assert sum("traces-closing" in thread.name for thread in threading.enumerate()) <= 2
