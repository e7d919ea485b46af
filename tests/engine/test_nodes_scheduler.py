"""An engine whose ranks reach several daemons: vLLM's scheduler, real daemons, no model.

The pages' bytes follow from tokens and shard, so a rank that got another's bytes is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pytest

from kvass.client import reconnecting
from kvass.client.client import Client
from kvass.client.connection import open_connection
from kvass.client.node_parts import NodePart
from kvass.client.parallel import ParallelStrategy
from kvass.connectors.vllm.adapt import KVConnectorRole
from kvass.connectors.vllm.entry import KvassConnector
from kvass.connectors.vllm.nodes_connector import NodesConnector
from kvass.engine.nodes import _load_of
from kvass.engine.step_work import Load
from kvass.errors import Unavailable
from kvass.testing.daemon import Daemon, running_daemon
from kvass.types import Slots
from tests.engine.conftest import NOTHING_OWED
from tests.support.vllm.nodes_ranks import NodesEngine
from tests.support.vllm.ranks import StubModelEngine, until
from tests.support.vllm.scheduler import CHUNK, make_configs

PROMPT: Final = list(range(100))
CHUNKS: Final = len(PROMPT) // CHUNK
DENSE: Final = ParallelStrategy(tp=2)
MLA: Final = ParallelStrategy(tp=2, replicas=2)
FULL_AND_WINDOW: Final = [("full", 16, 0, 2), ("sliding_window", 16, 48, 2)]
FULL_AND_STATE: Final = [("full", 16, 0, 2), ("state", 32, 0, 2)]

Make = Callable[..., NodesEngine]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    """Patient, so that a busy machine makes no miss of a hit that a test is about."""
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(name) for name in "ab"]
        yield [
            stack.enter_context(running_daemon(folder, lookup_budget_ms=10_000))
            for folder in folders
        ]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store is given up because a busy machine grants it late."""
    monkeypatch.setattr("kvass.client.scheduler.LATE_S", 20.0)


@pytest.fixture
def engine(daemons: list[Daemon], request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes engines of a namespace of this test."""
    made: list[NodesEngine] = []

    def make(strategy: ParallelStrategy, where: Sequence[int], **options: Any) -> NodesEngine:
        tag = options.pop("tag", request.node.name)
        made.append(NodesEngine(daemons, where, strategy, tag=tag, **options))
        made[-1].wait_connected()
        return made[-1]

    yield make
    for one in made:
        one.close()
    at_rest(daemons)


def at_rest(daemons: list[Daemon]) -> None:
    for daemon in daemons:
        daemon.wait_until(**NOTHING_OWED)


def forget(daemon: Daemon) -> None:
    """Make one daemon forget all rows."""
    with Client(daemon.socket) as client:
        client.clear(everything=True)


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        (DENSE, (0, 1)),
        (MLA, (0, 1)),
        (ParallelStrategy(tp=4, replicas=2), (0, 1, 0, 1)),
        (ParallelStrategy(tp=2, pp=2), (0, 0, 1, 1)),
    ],
    ids=["dense", "mla", "gqa", "stages"],
)
def test_a_second_engine_hits_what_the_first_one_stored(
    engine: Make, daemons: list[Daemon], strategy: ParallelStrategy, where: Sequence[int]
) -> None:
    before = [daemon.status()["rows"] for daemon in daemons]
    first, second = engine(strategy, where), engine(strategy, where)
    for node, daemon in enumerate(daemons):
        ranks = ParallelStrategy(tp=len(where)).on(np.flatnonzero(np.equal(where, node)), 2)
        for one in daemon.status()["engines"]:
            assert one["instance"].endswith(f", {ranks.node_name}, 1 more daemon")
    first.generate("a", PROMPT)
    assert [daemon.status()["rows"] for daemon in daemons] == [n + CHUNKS for n in before]
    request, found = second.load("b", PROMPT)
    assert found == CHUNKS * CHUNK
    second.verify(request, found)


@pytest.mark.parametrize("shapes", [FULL_AND_WINDOW, FULL_AND_STATE], ids=["window", "state"])
def test_windows_and_states(engine: Make, shapes: Sequence[Any]) -> None:
    first, second = (engine(DENSE, (0, 1), shapes=shapes) for _ in range(2))
    first.generate("a", PROMPT)
    request, found = second.load("b", PROMPT)
    assert found == CHUNKS * CHUNK
    second.verify(request, found)


def test_what_cannot_be_shared_out_fails_and_nothing_stays_lent(
    engine: Make, daemons: list[Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine(DENSE, (0, 1))
    first.generate("a", PROMPT)
    assert first.world.scheduler.reset_prefix_cache()
    first.world.tolerant, fails = True, [1]

    def load_of(*args: Any) -> Load | None:
        if fails:
            raise ZeroDivisionError(fails.pop())
        return _load_of(*args)

    monkeypatch.setattr("kvass.engine.nodes._load_of", load_of)
    request, found = first.load("b", PROMPT)
    assert not fails
    assert found == 0
    for daemon in daemons:
        assert daemon.status()["leases"] == 0
    until(partial(_ended, first, request), "its end")
    assert first.world.scheduler.reset_prefix_cache()
    assert first.load("c", PROMPT)[1] == CHUNKS * CHUNK


def test_a_lost_report_costs_a_hit_and_nothing_else(engine: Make, daemons: list[Daemon]) -> None:
    first = engine(DENSE, (0, 1))
    first.generate("a", PROMPT)
    assert first.world.scheduler.reset_prefix_cache()
    first.loses = 1
    request, found = first.load("b", PROMPT)
    assert (first.loses, found) == (0, 0)
    until(partial(_ended, first, request), "its end")
    until(partial(_hits, first), "hits again")
    assert first.client.form == 2
    until(partial(_done, first), "that nothing is owed")


def test_more_rows_than_wanted_are_cut_only_if_the_first_ones_are_wanted() -> None:
    rows = Slots(((0,),), b"\0\0" * 5, b"".join(i.to_bytes(4, "little") for i in range(5)))
    load, part = Load("r", b"all", 7), NodePart(b"one", 8, 0.0, 9.0, (rows,))
    found = _load_of(load, part, [3], True)
    assert found is not None
    assert (found.boot, found.lease, found.slots) == (b"one", 8, (rows.first(3),))
    assert _load_of(load, part, [3], False) is None
    found = _load_of(load, part, [5], False)
    assert found is not None
    assert found.slots == (rows,)
    assert _load_of(load, part, [6], True) is None


def test_a_subclass_of_the_connector_works_on_several_machines() -> None:
    class Own(KvassConnector):
        pass

    made = list[str]()

    class Counted(Own):
        def __init__(self, *args: Any) -> None:
            made.append("once")
            super().__init__(*args)

    for kind in (KvassConnector, Own, Counted):
        config, caches = make_configs({"kvass.several_machines": True}, strategy=DENSE)
        connector = kind(config, KVConnectorRole.SCHEDULER, caches)
        assert isinstance(connector, kind)
        assert isinstance(connector, NodesConnector)
        connector.shutdown()
    assert made == ["once"]
    config, caches = make_configs(strategy=DENSE)
    assert type(Own(config, KVConnectorRole.SCHEDULER, caches)) is Own


def test_with_one_daemon_a_hit_takes_not_a_step_more(engine: Make, daemons: list[Daemon]) -> None:
    nodes, plain = engine(DENSE, (0, 0)), StubModelEngine(daemons[0].socket, strategy=DENSE)
    plain.wait_connected()
    steps = []
    for one in (nodes, plain):
        one.generate("a", PROMPT)
        assert one.world.scheduler.reset_prefix_cache()
        begun = one.world.connector._planner.stores._number
        one.loads.clear()
        one.world.add("b", PROMPT)
        while not one.loads:
            one.step()
        steps.append(one.world.connector._planner.stores._number - begun)
    plain.close()
    assert nodes.client.nodes == ((0, 1),)
    assert steps[0] == steps[1]


def test_what_a_request_says_of_its_session_reaches_all_nodes(
    engine: Make, daemons: list[Daemon]
) -> None:
    """It is retained on all, and ended on all, also if no request follows."""
    first = engine(DENSE, (0, 1))
    before = [daemon.status() for daemon in daemons]
    for name, ttl, ended in (("a", "1h", 0), ("b", 0, 1)):
        params = {"kvass.ttl": ttl}
        request = first.world.add(name, PROMPT, params=params, session="s", max_tokens=2)
        until(partial(_ended, first, request), "its end")
        until(partial(_done, first), "that nothing is owed")
        assert first.world.scheduler.reset_prefix_cache()
        for daemon, then in zip(daemons, before, strict=True):
            status = daemon.wait_until(**NOTHING_OWED)
            assert (status["l1_kept_bytes"] > then["l1_kept_bytes"]) == (not ended)
            for counter, many in (("sessions_ended", 1), ("session_rows_ended", CHUNKS)):
                counted = status["counters"][counter] - then["counters"][counter]
                assert counted == many * ended, counter


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_node_that_lost_its_rows_gets_them_again(
    engine: Make, daemons: list[Daemon], lacks: int
) -> None:
    first = engine(DENSE, (0, 1))
    first.generate("a", PROMPT)
    forget(daemons[lacks])
    kept = daemons[1 - lacks].status()["rows"]
    assert first.world.scheduler.reset_prefix_cache()
    first.generate("b", PROMPT)
    assert first.found["b"] == 0
    assert daemons[lacks].status()["rows"] == CHUNKS
    assert daemons[1 - lacks].status()["rows"] == kept
    assert first.world.scheduler.reset_prefix_cache()
    assert first.load("c", PROMPT)[1] == CHUNKS * CHUNK


@pytest.mark.parametrize("has_more", [0, 1])
def test_a_hit_is_what_both_nodes_have(engine: Make, daemons: list[Daemon], has_more: int) -> None:
    first = engine(DENSE, (0, 1))
    first.generate("a", PROMPT)
    forget(daemons[1 - has_more])
    assert first.world.scheduler.reset_prefix_cache()
    first.generate("b", PROMPT[: CHUNK + 1])
    assert first.world.scheduler.reset_prefix_cache()
    request, found = first.load("c", PROMPT)
    assert found == CHUNK
    first.verify(request, found)


def test_a_node_with_other_weights_is_refused_with_a_line(daemons: list[Daemon]) -> None:
    """By its own daemon, to which its ranks and the scheduler say other identities. Whoever comes
    second is refused."""
    engine = NodesEngine(daemons, (0, 1), DENSE, tag="one", tags={1: "other"})

    def shown() -> str:
        return "".join(one["uncached"] for one in daemons[0].status()["engines"])

    until(lambda: engine.step() and shown(), "that it is shown")
    assert shown().startswith(("the daemon of ranks 1 of 2: ", "rank 1: "))
    assert "identity[tag]" in shown()
    engine.generate("a", PROMPT)
    assert engine.found["a"] == 0
    engine.close()
    at_rest(daemons)


def test_a_daemon_that_is_restarted_while_the_engine_starts_splits_no_node(
    daemons: list[Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its ranks came late, and the other one has not reached the new daemon yet."""
    kept_away, connect = {3}, open_connection

    def opened(path: str, terms: Any, **options: Any) -> Any:
        if terms is not None and terms.rank in kept_away:
            raise Unavailable("it is kept away")
        return connect(path, terms, **options)

    monkeypatch.setattr(reconnecting, "open_connection", opened)
    with closing(NodesEngine(daemons, (0, 0, 1, 1), ParallelStrategy(tp=4))) as engine:
        reached = engine.client.reached
        until(lambda: engine.step() and 2 in reached._boots, "rank 2")
        kept_away.symmetric_difference_update({2, 3})
        daemons[1].restart()
        until(lambda: engine.step() and 3 in reached._boots, "rank 3")
        for _ in range(3):
            engine.step()
            assert engine.client.form == 0
        kept_away.clear()
        engine.wait_connected()
        assert (engine.client.form, engine.client.nodes) == (1, ((0, 1), (2, 3)))
        engine.generate("a", PROMPT)
        assert engine.world.scheduler.reset_prefix_cache()
        assert engine.load("b", PROMPT)[1] == CHUNKS * CHUNK
    at_rest(daemons)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_daemon_is_killed_and_comes_back(
    engine: Make, daemons: list[Daemon], killed: int
) -> None:
    first = engine(DENSE, (0, 1))
    first.generate("a", PROMPT)
    daemons[killed].kill()
    assert first.world.scheduler.reset_prefix_cache()
    request = first.world.add("b", PROMPT, max_tokens=2)
    until(lambda: first.step() and request.is_finished(), "its end")
    assert first.found["b"] == 0
    daemons[killed].start()
    first.wait_connected()
    first.generate("c", [*PROMPT, 5])
    assert first.world.scheduler.reset_prefix_cache()
    assert first.load("d", PROMPT)[1] == CHUNKS * CHUNK


def test_a_daemon_that_is_stopped_costs_no_request_more_than_its_budget(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        pair = []
        for name in "ab":
            (tmp_path / name).mkdir()
            pair.append(stack.enter_context(running_daemon(tmp_path / name)))
        engine = NodesEngine(pair, (0, 1), DENSE)
        stack.callback(engine.close)
        engine.wait_connected()
        engine.generate("a", PROMPT)
        pair[1].suspend()
        stack.callback(pair[1].resume)
        (node,), asked = engine.client.others, list[int]()
        for name in "bcd":
            assert engine.world.scheduler.reset_prefix_cache()
            request, found = engine.load(name, PROMPT)
            asked.append(node.counters["lookups"])
            assert found == 0
            until(partial(_ended, engine, request), "its end")
        assert asked[0] > 0
        assert asked[2] == asked[1], "it is not asked while an answer is overdue"
        pair[1].resume()
        until(partial(_hits, engine), "hits again")


def _ended(engine: NodesEngine, request: Any) -> bool:
    engine.step()
    return bool(request.is_finished())


def _hits(engine: NodesEngine) -> bool:
    name = str(time.monotonic())
    engine.world.scheduler.reset_prefix_cache()
    request, found = engine.load(name, PROMPT)
    until(partial(_ended, engine, request), "its end")
    return bool(found)


def _done(engine: NodesEngine) -> bool:
    engine.step()
    return not engine.world.scheduler.has_requests() and not engine.client.owes


def test_aborts_preemptions_and_clears_at_any_step_leave_nothing_behind(
    engine: Make, daemons: list[Daemon]
) -> None:
    """Every page that a request begins with is compared."""
    rng = Random(1)
    both = [engine(DENSE, (0, 1), blocks=32) for _ in range(2)]
    stems = [[stem, *range(60 + 20 * stem)] for stem in range(4)]
    for turn in range(80):
        one = rng.choice(both)
        live = list(one.world.scheduler.requests)
        if len(live) < 3:
            tokens = [*rng.choice(stems), *rng.choices(range(500), k=rng.randint(1, 60))]
            one.world.add(str(turn), tokens, max_tokens=rng.randint(1, 20))
        elif rng.random() < 0.3:
            one.world.abort(rng.choice(live))
        if rng.random() < 0.1:
            forget(rng.choice(daemons))
        for each in both:
            for _ in range(rng.randint(0, 3)):
                each.step()
    for one in both:
        until(partial(_done, one), "the end of all requests, and that nothing is owed")
        assert one.client.form == 1, "no report was lost"
    at_rest(daemons)
