"""What vLLM is told of lookups and copies, for its log and its ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

from kvass.connectors.vllm import KvassConnector
from kvass.engine.traffic import MEANINGS, EngineTraffic
from kvass.messages import Status
from kvass.testing.daemon import running_daemon
from kvass.transfer.base import Done, Job
from tests.support.vllm.ranks import StubModelEngine, making
from tests.support.vllm.scheduler import BLOCK, CHUNK, make_configs

PROMPT = list(range(100))


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[StubModelEngine, StubModelEngine]]:
    with running_daemon(tmp_path) as daemon, making(StubModelEngine) as make:
        yield make(daemon.socket), make(daemon.socket)


def listen(engine: StubModelEngine) -> Counter[str]:
    """All that vLLM's scheduler takes from its half of the connector."""
    connector, taken = engine.world.connector, Counter[str]()
    ask = connector.get_kv_connector_stats

    def asked() -> Any:
        if (stats := ask()) is not None:
            assert not stats.is_empty()
            taken.update(stats.to_dict())
        return stats

    connector.get_kv_connector_stats = asked
    return taken


def test_lookups_hits_and_copies(engines: tuple[StubModelEngine, StubModelEngine]) -> None:
    a, b = engines
    asked, asked_again = listen(a), listen(b)
    a.generate("a", PROMPT)
    assert asked == {"lookups": 1, "lookup_tokens": 96}
    stored = a.rank.connector.get_kv_connector_stats().data
    assert stored["stores"] > 0 < stored["store_bytes"]
    assert stored["store_seconds"] > 0
    b.load("b", PROMPT)
    assert (asked_again["lookup_tokens"], asked_again["hit_tokens"]) == (96, 96)
    loaded = b.rank.connector.get_kv_connector_stats().data
    assert loaded["loads"] == 1
    assert loaded["load_bytes"] == stored["store_bytes"]
    assert b.rank.connector.get_kv_connector_stats() is None, "it was taken"


def test_engine_and_daemon_count_the_same_hit_rate(
    engines: tuple[StubModelEngine, StubModelEngine],
) -> None:
    """Exactly, also if what the engine's own cache has or what matches ends inside a chunk."""
    engine, other = engines
    counted = listen(engine)

    def more() -> list[int]:
        """What the daemon counts more: looked-up tokens and hit tokens."""
        rows = engine.client.call(Status(), 30.0).fields["engines"]
        (row,) = (row for row in rows if row["instance"] == engine.client.registration.instance)
        return [row[name] - counted[name] for name in ("lookup_tokens", "hit_tokens")]

    engine.generate("all misses", PROMPT)
    other.generate("for later", [5] * 3 * CHUNK)
    engine.generate("two chunks of it", [5] * 2 * CHUNK + [7] * 100)
    assert more() == [0, 0]
    assert counted == {"lookups": 2, "lookup_tokens": 96 + 160, "hit_tokens": 2 * CHUNK}
    engine.generate("the own cache has a block more", [5] * 2 * CHUNK + [7] * BLOCK + [8] * 100)
    assert more() == [0, 0]
    other.generate("for later, too", [6] * 2 * CHUNK)
    engine.generate("one chunk and a block", [6] * (CHUNK + BLOCK) + [7] * 100)
    assert more() == [0, 0]
    assert counted["hit_tokens"] == 3 * CHUNK + BLOCK


def test_a_lookup_that_is_repeated_counts_once(
    engines: tuple[StubModelEngine, StubModelEngine],
) -> None:
    """vLLM asks again in each step in which it has no blocks for the request."""
    a, _ = engines
    planner = a.world.connector._planner
    a.world.add("a", PROMPT)
    for _ in range(3):
        assert planner.match("a", 0) == 0
    assert planner.traffic.take() == {}, "it has no blocks yet"
    planner.allocated("a", (), 0)
    planner.allocated("a", (), 0)
    assert planner.traffic.take() == {"lookups": 1, "lookup_tokens": 96}
    assert planner.match("a", 0) == 0
    planner.allocated("a", (), 0)
    assert planner.traffic.take() == {"lookups": 1, "lookup_tokens": 96}, "after a preemption"


def test_copies_that_came_to_nothing() -> None:
    traffic = EngineTraffic()
    for kind, outcome in (("load", "late"), ("load", "lost"), ("store", "failed")):
        traffic.copied(Done(Job(kind, (), None), outcome))  # type: ignore[arg-type]
    assert traffic.take() == {"loads_late": 1, "loads_failed": 1, "stores_failed": 1}
    assert traffic.take() == {}


def test_vllm_shows_them() -> None:
    """Through vLLM's own registration, as its ``/metrics`` does it."""
    config, _ = make_configs()
    labels, values = ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    prom = KVConnectorProm(config, labels, values)
    stats = KvassConnector.build_kv_connector_stats({"loads": 2, "load_seconds": 0.25})
    prom.observe(stats.aggregate(KvassConnector.build_kv_connector_stats({"loads": 1})).data, 1)
    own = {"model_name": "m", "engine": "1"}
    assert REGISTRY.get_sample_value("vllm:kvass_loads_total", own) == 3
    assert REGISTRY.get_sample_value("vllm:kvass_load_seconds_total", own) == 0.25
    assert REGISTRY.get_sample_value("vllm:kvass_loads_total", own | {"engine": "0"}) == 0
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    for name, meaning in MEANINGS.items():
        assert REGISTRY.get_sample_value(f"vllm:kvass_{name}_total", own) is not None
        assert f"| `vllm:kvass_{name}_total` | {meaning} |" in page
    assert stats.reduce() == {"load_seconds": 0.25, "loads": 3}
