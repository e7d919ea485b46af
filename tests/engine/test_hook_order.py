"""Where vLLM's model runners begin a step's loads: before the forward pass, so that a load does not
wait for it, and after new blocks were zeroed, so that it is not wiped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvass.connectors.vllm.adapt import KVConnectorBase_V1
from kvass.engine.copier import Copier
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.conftest import GPU
from tests.support.vllm.ranks import StubModelEngine, until

PROMPT = list(range(100))


def run_v1(connector: Any, output: Any, forward: Callable[[], None]) -> None:
    """A step's hooks as vLLM's V1 runner calls them, on a CPU too."""
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    connector.handle_preemptions(output.kv_connector_metadata)
    with KVConnectorModelRunnerMixin._get_kv_connector_output(output):
        forward()


def run_v2(connector: Any, output: Any, forward: Callable[[], None]) -> None:
    """The same of the V2 runner."""
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    active = object.__new__(ActiveKVConnector)  # its constructor registers KV caches
    active.kv_connector, active.vllm_config = connector, None
    active._pending_load_kwargs, active._disabled = None, False
    active.pre_forward(output)
    forward()
    active.post_forward(set())


RUNNERS = [run_v1, run_v2]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path, lost_engine_grace_s=0.5) as one:
        yield one


@pytest.fixture
def ready(
    daemon: Daemon, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StubModelEngine]:
    """An engine that has stored ``PROMPT`` and forgotten it; vLLM's runners find its rank."""
    from vllm.v1.worker import kv_connector_model_runner_mixin as v1
    from vllm.v1.worker.gpu import kv_connector as v2

    a, b = (StubModelEngine(daemon.socket, daemon, **GPU) for _ in range(2))
    for one in (a, b):
        one.wait_connected()
    a.generate("a", PROMPT)
    monkeypatch.setattr(v1, "get_kv_transfer_group", lambda: b.rank.connector)
    monkeypatch.setattr(v1, "get_forward_context", lambda: None)
    monkeypatch.setattr(v2, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(v2, "get_forward_context", lambda: None)
    yield b
    a.close()
    b.close()


def order(engine: StubModelEngine, run: Callable[..., None]) -> list[str]:
    """What was put on the engine's stream in a step with a load, in this order."""
    on_stream: list[str] = []
    fake = engine.rank.connector.mover.fake
    place = fake.order

    def placing() -> Any:
        on_stream.append("load")
        return place()

    fake.order = placing
    engine.world.add("b", PROMPT)
    works: list[Any] = []

    def planned() -> bool:
        works.append(engine.world.schedule())
        return bool(works[-1][1].loads)

    until(planned, "the load")
    run(engine.rank.connector, works[-1][0], lambda: on_stream.append("forward"))
    engine.world.tolerant = True
    return on_stream


@pytest.mark.parametrize("run", RUNNERS)
def test_a_load_does_not_wait_for_the_forward_pass_of_its_step(
    ready: StubModelEngine, run: Callable[..., None]
) -> None:
    assert order(ready, run) == ["load", "forward"]


@pytest.mark.parametrize("run", RUNNERS)
def test_negative_control_what_begins_in_start_load_kv_waits_for_it(
    ready: StubModelEngine, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = ready.rank.connector
    bind = partial(KVConnectorBase_V1.bind_connector_metadata, connector)
    monkeypatch.setattr(connector, "bind_connector_metadata", bind)

    def begin(*args: Any, **kwargs: Any) -> None:
        Copier.load(ready.copier, connector._get_connector_metadata())

    monkeypatch.setattr(connector, "start_load_kv", begin)
    assert order(ready, run) == ["forward", "load"]


def test_new_blocks_are_zeroed_before_loads_begin() -> None:
    """In the text of both runners: every load begins after the step's blocks are known."""
    from vllm.v1.worker import gpu_model_runner as v1
    from vllm.v1.worker.gpu import model_runner as v2

    for runner, update, zero, begins in (
        (v1, "_update_states", "_zero_block_ids(", "kv_connector_no_forward( kv_connector_output("),
        (v2, "update_requests", "zero_block_ids(", "kv_connector.no_forward( .pre_forward("),
    ):
        kind = runner.GPUModelRunner
        assert zero in inspect.getsource(getattr(kind, update))
        step = inspect.getsource(kind.execute_model)
        updated = step.index(f"self.{update}(")
        assert all(updated < step.index(begin) for begin in begins.split()), kind
