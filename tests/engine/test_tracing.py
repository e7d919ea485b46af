"""Spans in the engine's OpenTelemetry traces, seen through the SDK's own exporter."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvass.engine import tracing
from kvass.engine.request_state import Answer
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.tiers import faulty
from tests.support.vllm.ranks import CopyGate, StubModelEngine, until

PROMPT = list(range(100))
FIRST = "1_first-0-a9077a15"
"""As a served engine names the second answer to the request ``first-0``."""
TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What an engine that traces has set up; its spans end here."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    monkeypatch.setenv(tracing.ENDPOINT, "http://nowhere.example:4317")
    return exporter


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "disk").mkdir()
    tier = faulty.url(tmp_path, f"disk:{tmp_path}/disk?capacity=64MiB")
    with running_daemon(tmp_path, tier=[tier], lookup_budget_ms=10_000) as daemon:
        yield daemon


def connected(daemon: Daemon) -> StubModelEngine:
    engine = StubModelEngine(daemon.socket, daemon)
    engine.wait_connected()
    return engine


def stored(daemon: Daemon) -> None:
    """By an engine that is gone, in the tier alone."""
    engine = connected(daemon)
    engine.generate(FIRST, PROMPT)
    engine.close()
    assert daemon.stop() == 0
    daemon.start()


def named(spans: Sequence[ReadableSpan], name: str) -> ReadableSpan:
    (span,) = (span for span in spans if span.name == name)
    return span


def test_a_request_that_loads_from_a_tier(
    daemon: Daemon, tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    stored(daemon)
    assert {s.name for s in exporter.get_finished_spans()} == {"kvass.lookup", "kvass.store"}
    missed = named(exporter.get_finished_spans(), "kvass.lookup")
    assert missed.attributes is not None
    assert missed.attributes["kvass.ended_by"] == "absent"
    store = exporter.get_finished_spans()[-1]
    assert store.attributes is not None
    assert store.attributes["gen_ai.request.id"] == "first-0"
    assert store.parent is None
    exporter.clear()

    engine = connected(daemon)
    engine.client.step.wait_s = engine.client.step.left_s = 0.0
    (tmp_path / "hold-load").touch()
    request = engine.world.add("second", PROMPT)
    request.trace_headers = HEADERS
    until(lambda: engine.step() and engine.client.connection.requests.promoting, "the promotion")
    assert exporter.get_finished_spans() == ()
    (tmp_path / "hold-load").unlink()
    until(lambda: engine.step().num_scheduled_tokens, "the request's first tokens")
    engine.close()
    spans = exporter.get_finished_spans()
    lookup, promote, load = (named(spans, f"kvass.{n}") for n in ("lookup", "promote", "load"))
    for span in (lookup, promote, load):
        assert span.attributes is not None
        assert span.attributes["gen_ai.request.id"] == "second"
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE, "the one that the client began"
    assert lookup.attributes == {
        "gen_ai.request.id": "second",
        "kvass.lookup_tokens": 96,
        "kvass.hit_tokens": 96,
    }
    assert promote.parent == lookup.context
    assert load.attributes is not None
    assert load.attributes["kvass.outcome"] == "done"
    assert load.attributes["kvass.bytes"] == store.attributes["kvass.bytes"]
    times = [lookup.start_time, promote.start_time, promote.end_time, load.start_time]
    assert times == sorted(times, key=lambda when: when or 0)
    assert lookup.end_time == promote.end_time


def test_a_load_that_is_late_is_an_error(daemon: Daemon, exporter: InMemorySpanExporter) -> None:
    stored(daemon)
    exporter.clear()
    engine = connected(daemon)
    CopyGate(engine.rank, ahead_s=1e6)
    engine.load("second", PROMPT)
    engine.close()
    load = named(exporter.get_finished_spans(), "kvass.load")
    assert load.attributes is not None
    assert load.attributes["kvass.outcome"] == "late"
    assert not load.status.is_ok


def test_ids_do_not_repeat_where_random_is_seeded(exporter: InMemorySpanExporter) -> None:
    """vLLM seeds it alike in all its processes."""
    state: Any = SimpleNamespace(request=SimpleNamespace(name="first", trace=""))
    for _ in range(2):
        random.seed(0)
        traced = tracing.begin()
        assert traced is not None
        traced.answered(state, Answer(0, 0, None, asked=96), True)
    contexts = [span.context for span in exporter.get_finished_spans() if span.context]
    assert len({one.span_id for one in contexts}) == len({one.trace_id for one in contexts}) == 2


def test_an_engine_that_does_not_trace(
    daemon: Daemon, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(tracing.ENDPOINT)
    engine = connected(daemon)
    engine.generate("first", PROMPT)
    engine.close()
    assert exporter.get_finished_spans() == ()
    code = "import sys, kvass.engine.planner as p, kvass.engine.copier; p.tracing.begin()"
    code += "\nassert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_opentelemetry_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(tracing.ENDPOINT, "http://nowhere.example:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with caplog.at_level(logging.WARNING):
        assert tracing.begin() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "pip install 'kvass[otel]'" in line
