"""Weights that are replaced by a call to vLLM's workers: the scheduler's half hears of it before
the call runs. vLLM's real scheduler and executor class; the workers are a stand-in.

Mutants: the calls of ``UNKNOWN`` taken for harmless, a call noted after it ran, and a reset that is
no change in the caller's own process are each made here, and seen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import pytest

from kvass.connectors.vllm import rpcs
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import SchedulerHarness, make_configs, make_multi_configs, rig

PROMPT: Final = range(100)
OTHER: Final = range(200, 300)
DEFAULT: Final[dict[str, object]] = {"kvass.fixed_weights": False}
FIXED: Final[dict[str, object]] = {"kvass.fixed_weights": True}


class Workers:
    """In the place of a worker. ``seen``: its calls, each with the generations begun by then."""

    def __init__(self) -> None:
        self.client = FakeClient()
        self.seen: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Callable[..., str]:
        def method(*args: object, **kwargs: object) -> str:
            self.seen.append((name, self.client.generations))
            return f"the result of {name}"

        return method


def a_callable(workers: Workers) -> str:
    return workers.update()


def executor_of(kind: Any) -> Any:
    """An executor of vLLM around a stand-in."""
    executor = kind.__new__(kind)
    executor.driver_worker = Workers()
    executor.__dict__ |= {"sleeping_tags": set(), "is_sleeping": False}
    return executor


def engine(
    core: str = "EngineCoreProc",
    options: dict[str, object] = DEFAULT,
    configs: Any = None,
    **rest: Any,
) -> tuple[FakeClient, SchedulerHarness, Any]:
    """A scheduler that is made in the constructor of a ``core`` with a ``UniProcExecutor``. The
    daemon and vLLM's own cache hold ``PROMPT``."""
    from vllm.v1.engine import core as cores
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    kind: Any = getattr(cores, core)
    self = kind.__new__(kind)  # the scheduler's caller
    configs = configs or make_configs(options)
    self.vllm_config = configs[0]
    self.model_executor = executor_of(UniProcExecutor)
    client, world = rig(configs=configs, **rest)
    self.model_executor.driver_worker.client = client
    store(client, world, "first")
    return client, world, self.model_executor


def store(client: FakeClient, world: SchedulerHarness, name: str) -> None:
    """Run ``PROMPT``; afterwards the daemon and vLLM's own cache hold it."""
    world.add(name, PROMPT, max_tokens=1)
    world.run(client)
    assert len(client.rows) == 3
    assert not world.scheduler.has_requests()


def loads(client: FakeClient, world: SchedulerHarness, name: str) -> int:
    """Run ``PROMPT``, with vLLM's own cache as it is; how many chunks are loaded for it."""
    world.add(name, PROMPT, max_tokens=1)
    work = world.step()
    count = sum(len(load.slots[0]) for load in work.loads)
    client.commit(one.reservation for one in work.stores)
    if count:
        world.step(received=[name])
    world.run(client)
    return count


UNKNOWN: Final[list[tuple[Any, dict[str, Any]]]] = [
    ("reload_weights", {}),
    ("of_a_later_version", {}),
    ("apply_model", {"args": (a_callable,)}),
    (a_callable, {}),
    ("sleep", {"kwargs": {"level": 2}}),
    ("sleep", {}),
    ("discard", {"args": (("weights",),)}),
    ("discard", {"args": (("kv_cache", "weights"),)}),
]


def as_in_one_call(executor: Any, method: Any, fields: dict[str, Any]) -> Any:
    """As ``EngineCore.collective_rpc`` calls it."""
    return executor.collective_rpc(method, None, fields.get("args", ()), fields.get("kwargs"))


# ---------------------------------------------------------------- a reset alone


@pytest.mark.parametrize("inside", ["alone", "MultiConnector"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_reset_is_no_change_in_a_process_of_vllms_own(inside: str, asynchronous: bool) -> None:
    configs = make_multi_configs(DEFAULT) if inside == "MultiConnector" else None
    client, world, _ = engine(configs=configs, asynchronous=asynchronous)
    for name in ("b", "c"):
        assert world.scheduler.reset_prefix_cache()
        assert loads(client, world, name) == 3
    world.add("d", OTHER)
    stores = world.step().stores
    assert not world.scheduler.reset_prefix_cache(), "blocks are in use"
    client.commit(one.reservation for one in stores)
    world.run(client)
    assert client.generations == 0
    assert len(client.rows) == 6


@pytest.mark.parametrize(("options", "generations"), [(DEFAULT, 1), (FIXED, 0)], ids=str)
def test_a_reset_is_a_change_in_the_callers_own_process(
    options: dict[str, object], generations: int
) -> None:
    """The caller's code may have replaced weights without a call, unless it says that it does not.
    A call is a change in both cases."""
    client, world, executor = engine("EngineCore", options)
    assert world.scheduler.reset_prefix_cache()
    assert loads(client, world, "b") == 3 * (not generations)
    assert client.generations == generations
    executor.collective_rpc("reload_weights")
    assert client.generations == generations + 1
    assert world.scheduler.reset_prefix_cache()
    assert loads(client, world, "c") == 0
    assert client.generations == 1 + generations, "the second reset made a stale cache clean"


def test_the_connectors_own_reset_clears_the_namespace_and_stays_in_it() -> None:
    client, world, executor = engine()
    executor.sleep(1)
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    executor.wake_up()
    assert client.rows == set()
    assert client.generations == 0
    assert loads(client, world, "b") == 0
    assert world.scheduler.reset_prefix_cache()
    assert loads(client, world, "c") == 3
    assert [name for name, _ in executor.driver_worker.seen] == ["sleep", "wake_up"]


@pytest.mark.parametrize("explicit", [False, True])
def test_what_foreign_code_left_behind_makes_every_reset_a_change(explicit: bool) -> None:
    client, world, executor = engine()
    executor.collective_rpc("reload_weights")
    assert world.scheduler.reset_prefix_cache()
    store(client, world, "b")
    assert world.scheduler.reset_prefix_cache()
    assert loads(client, world, "c") == 3, "vLLM's own code leaves nothing behind"
    executor.collective_rpc(a_callable)
    assert world.scheduler.reset_prefix_cache()
    store(client, world, "d")
    assert world.scheduler.reset_prefix_cache(reset_connector=explicit)
    assert loads(client, world, "e") == 0
    assert client.generations == 3


# ---------------------------------------------------------------- pause and sleep


def core_of(world: SchedulerHarness, executor: Any) -> Any:
    """An ``EngineCore`` that can pause and sleep."""
    from vllm.v1.engine.core import EngineCore

    core = EngineCore.__new__(EngineCore)
    core.scheduler, core.model_executor, core.mm_receiver_cache = world.scheduler, executor, None
    return core


@pytest.fixture
def clears(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clears of the namespace, which is that of all engines that share it."""
    seen: list[float] = []
    clear = FakeClient.clear

    def noted(client: FakeClient, timeout_s: float) -> bool:
        seen.append(timeout_s)
        return clear(client, timeout_s)

    monkeypatch.setattr(FakeClient, "clear", noted)
    return seen


@pytest.mark.parametrize("inside", ["alone", "MultiConnector"])
def test_a_pause_and_sleep_clear_nothing_in_a_process_of_vllms_own(
    inside: str, clears: list[float]
) -> None:
    configs = make_multi_configs(DEFAULT) if inside == "MultiConnector" else None
    client, world, executor = engine(configs=configs)
    core = core_of(world, executor)
    core.pause_scheduler(clear_cache=True)
    core.resume_scheduler()
    assert loads(client, world, "b") == 3
    core.sleep(1)
    executor.wake_up()
    core.resume_scheduler()
    assert loads(client, world, "c") == 3
    assert client.generations == 0
    core.sleep(2)
    executor.wake_up()
    core.resume_scheduler()
    assert client.generations == 1
    assert loads(client, world, "d") == 0
    assert not clears
    assert core.reset_prefix_cache(reset_connector=True)
    assert len(clears) == 1


def test_a_pause_ends_that_a_cache_is_stale(clears: list[float]) -> None:
    client, world, executor = engine()
    executor.collective_rpc("update_weights")
    assert loads(client, world, "b") == 0
    core = core_of(world, executor)
    core.pause_scheduler(clear_cache=True)
    core.resume_scheduler()
    store(client, world, "c")
    assert client.generations == 1
    assert not clears


@pytest.mark.parametrize(
    ("core", "options", "foreign", "generations"),
    [
        ("EngineCore", DEFAULT, False, 1),
        ("EngineCore", FIXED, False, 0),
        ("EngineCoreProc", DEFAULT, True, 2),
    ],
)
def test_where_others_reach_the_weights_a_pause_clears_the_namespace(
    core: str, options: dict[str, object], foreign: bool, generations: int, clears: list[float]
) -> None:
    client, world, executor = engine(core, options)
    if foreign:
        executor.collective_rpc(a_callable)
        assert world.scheduler.reset_prefix_cache()
        store(client, world, "b")
    core_of(world, executor).pause_scheduler(clear_cache=True)
    assert client.rows == set()
    assert client.generations == generations
    assert len(clears) == 1


# ---------------------------------------------------------------- which calls are changes


def test_harmless_calls_are_no_changes() -> None:
    client, world, executor = engine()
    calls: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in sorted(rpcs.HARMLESS)]
    calls += [("sleep", {"kwargs": {"level": 1}}), ("discard", {"args": (("kv_cache",),)})]
    for name, fields in calls:
        assert executor.collective_rpc(name, **fields) == [f"the result of {name}"]
        assert as_in_one_call(executor, name, fields) == [f"the result of {name}"]
    assert client.generations == 0
    assert world.scheduler.reset_prefix_cache()
    assert loads(client, world, "b") == 3


def test_harmless_calls_are_methods_of_vllms_workers() -> None:
    """The list has no name that another version could give to something else."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    newer = {
        "compute_weight_checksums",
        "get_simple_cpu_offload_num_cpu_blocks",
        "release_late_interaction_query_cache",
    }
    assert {name for name in rpcs.HARMLESS if not hasattr(CPUWorker, name)} <= newer


@pytest.mark.parametrize(("method", "fields"), UNKNOWN, ids=range(len(UNKNOWN)))
def test_any_other_call_is_noted_before_it_runs(method: Any, fields: dict[str, Any]) -> None:
    client, world, executor = engine()
    assert world.scheduler.reset_prefix_cache()
    (result,) = as_in_one_call(executor, method, fields)
    assert result.startswith("the result of ")
    assert [generations for _, generations in executor.driver_worker.seen] == [1]
    assert loads(client, world, "b") == 0
    assert world.scheduler.reset_prefix_cache()
    assert loads(client, world, "c") == 3 * isinstance(method, str) * (method != "apply_model")


def late(executor: Any, noted: Callable[[str, bool], None]) -> None:
    """The mutant that notes a call when it has run."""
    rpc = executor.collective_rpc

    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        result = rpc(method, *args, **kwargs)
        noted(str(method), False)
        return result

    executor.collective_rpc = collective_rpc


def test_controls_a_call_that_is_not_noted_or_late_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as mutant:
        mutant.setattr(rpcs, "HARMLESS", rpcs.HARMLESS | {"reload_weights"})
        with pytest.raises(AssertionError):
            test_any_other_call_is_noted_before_it_runs("reload_weights", {})
    with monkeypatch.context() as mutant:
        mutant.setattr(rpcs, "watch", late)
        with pytest.raises(AssertionError):
            test_any_other_call_is_noted_before_it_runs("reload_weights", {})
    with monkeypatch.context() as mutant:
        mutant.setattr(rpcs, "only_vllm_reaches_weights", lambda core, plugins: True)
        with pytest.raises(AssertionError):
            test_a_reset_is_a_change_in_the_callers_own_process(DEFAULT, 1)


@pytest.mark.parametrize("method", ["reload_weights", b"a function, as vLLM sends it"], ids=type)
def test_what_a_call_raises_passes_through(method: str | bytes) -> None:
    client, _, executor = engine()
    executor.driver_worker.reload_weights = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError if method == "reload_weights" else Exception):
        executor.collective_rpc(method)
    assert client.generations == 1


def test_a_watched_executor_ends_with_its_last_reference() -> None:
    """vLLM freezes the garbage collector after its start: a cycle would keep a GPU's memory."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    executor = executor_of(UniProcExecutor)
    rpcs.watch(executor, lambda what, foreign: None)
    assert executor.collective_rpc("check_health") == ["the result of check_health"]
    ended = weakref.ref(executor)
    del executor
    assert ended() is None


# ---------------------------------------------------------------- blocks of before


Said = Callable[[], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """The warnings of kvass so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("kvass")]


def test_with_blocks_of_before_nothing_is_loaded_or_stored_until_a_reset(said: Said) -> None:
    client, world, executor = engine()
    executor.collective_rpc("update_weights")
    assert not said(), "a reset may come before the next step"
    reserves, lookups = len(client.reserves), len(client.lookups)
    for name, prompt in (("b", PROMPT), ("c", OTHER)):
        world.add(name, prompt, max_tokens=40)
    world.run(client)
    (line,) = said()
    assert line.startswith("update_weights may have replaced weights")
    assert "reset_prefix_cache()" in line
    waits = world.add("d", OTHER)
    assert world.scheduler.reset_prefix_cache()
    world.run(client)
    assert waits.num_computed_tokens, "it was alive while the cache was stale"
    assert (len(client.reserves), len(client.lookups)) == (reserves, lookups)
    assert client.rows == set()
    assert world.scheduler.reset_prefix_cache()
    store(client, world, "e")
    assert world.scheduler.reset_prefix_cache()
    assert loads(client, world, "f") == 3
    assert client.generations == 1
    assert len(said()) == 1


def test_a_reset_before_the_change_leaves_nothing_to_wait_for(said: Said) -> None:
    """As ``pause(clear_cache=True)`` does: what was running is computed anew by the new weights."""
    client, world, executor = engine()
    world.add("b", OTHER, max_tokens=50)
    world.step()
    world.step()
    assert world.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    for _ in range(3):
        executor.collective_rpc("update_weights")
    assert client.generations == 1, "one of calls between which nothing was asked"
    work = world.step()
    (stored,) = work.stores
    assert len(stored.slots[0]) == 3
    client.commit([stored.reservation])
    executor.collective_rpc("update_weights")
    assert client.generations == 2
    assert client.rows == set()
    assert not said()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_what_is_in_flight_at_a_change_is_published_by_nobody_and_freed(asynchronous: bool) -> None:
    client, world, executor = engine(asynchronous=asynchronous)
    free = world.free_blocks
    world.add("b", OTHER, max_tokens=60)
    output, work = world.schedule()
    assert len(work.stores) == 1
    executor.collective_rpc("update_weights")
    client.commit(store.reservation for store in work.stores)
    reserves = len(client.reserves)
    world.finish(output, reported=list(world.open_steps))
    world.run(client)
    assert client.rows == set()
    assert len(client.reserves) == reserves
    assert world.free_blocks == free, "a block is still held"


def test_what_is_offered_or_asked_for_at_a_change_is_given_back() -> None:
    client, world, executor = engine()
    assert world.scheduler.reset_prefix_cache()
    free, client.silent = world.free_blocks, True
    world.add("b", OTHER, max_tokens=1)
    world.step()
    request = world.add("c", PROMPT)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (96, True)
    lease = client.held["c"].lease
    assert client.awaited, "the blocks of an offer are held"
    executor.collective_rpc("update_weights")
    assert client.released == [lease]
    assert client.awaited == []
    assert world.free_blocks == free
    world.run(client)
    assert client.rows == set()


def test_a_block_that_was_begun_before_a_change_is_one_of_before() -> None:
    """vLLM caches it when it is full. By then no reset would be known to be missing."""
    client, world, executor = engine()
    assert world.scheduler.reset_prefix_cache()
    world.add("b", range(10), max_tokens=60)
    world.step()
    executor.collective_rpc("update_weights")
    world.run(client)
    reserves = len(client.reserves)
    world.add("c", [*range(10), *[7] * 60], max_tokens=1)
    output, _ = world.schedule()
    assert output.num_scheduled_tokens["c"] < 70, "the control: vLLM took blocks of before"
    world.finish(output)
    world.run(client)
    assert len(client.reserves) == reserves


def test_a_request_that_loads_at_a_change_is_not_stored() -> None:
    client, world, executor = engine()
    assert world.scheduler.reset_prefix_cache()
    world.add("b", [*PROMPT, *OTHER], max_tokens=40)
    assert len(world.step().loads) == 1
    executor.collective_rpc("update_weights")
    reserves = len(client.reserves)
    world.step(received=["b"])
    world.run(client)
    assert world.scheduler.reset_prefix_cache()
    assert len(client.reserves) == reserves


def test_without_a_cache_of_its_own_an_engine_is_stale_while_what_was_running_runs(
    said: Said,
) -> None:
    """Nobody resets a cache that is switched off."""
    configs = make_configs(DEFAULT)
    configs[0].cache_config.enable_prefix_caching = False
    client, world, executor = engine(configs=configs)
    world.add("b", OTHER, max_tokens=40)
    world.step()
    executor.collective_rpc("update_weights")
    reserves, lookups = len(client.reserves), len(client.lookups)
    world.add("c", PROMPT, max_tokens=40)
    world.step()
    assert len(said()) == 1
    waits = world.add("d", PROMPT, max_tokens=40)
    world.abort("b")
    world.abort("c")
    world.run(client)
    assert waits.num_computed_tokens, "it was alive while the engine was stale"
    assert (len(client.reserves), len(client.lookups)) == (reserves, lookups)
    assert client.rows == set()
    store(client, world, "e")
    assert loads(client, world, "f") == 3
    assert client.generations == 1


@pytest.mark.parametrize("explicit", [False, True])
def test_an_attempt_to_reset_does_not_end_it(explicit: bool) -> None:
    client, world, executor = engine("EngineCore")
    executor.collective_rpc("update_weights")
    world.add("b", OTHER, max_tokens=40)
    world.step()
    assert not world.scheduler.reset_prefix_cache(reset_connector=explicit), "blocks are in use"
    reserves = len(client.reserves)
    world.run(client)
    assert loads(client, world, "c") == 0
    assert len(client.reserves) == reserves
    assert world.scheduler.reset_prefix_cache(reset_connector=explicit)
    store(client, world, "d")
    assert client.generations == 1


# ---------------------------------------------------------------- defects, and other threads


def test_a_defect_while_a_change_is_noted_loses_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    client, world, executor = engine()
    world.tolerant = True
    for name in ("b", "c"):
        world.add(name, OTHER, max_tokens=40)
        world.step()
    reserves = len(client.reserves)
    monkeypatch.setattr(client, "give_back", lambda request: 1 / 0)
    assert executor.collective_rpc("update_weights") == ["the result of update_weights"]
    monkeypatch.undo()
    assert executor.driver_worker.seen == [("update_weights", 1)]
    world.run(client)
    assert loads(client, world, "d") == 0
    assert len(client.reserves) == reserves


def test_a_change_from_another_thread_is_taken_in_by_the_next_hook() -> None:
    """As vLLM's fault tolerance does. The planner is used from the scheduler's thread alone."""
    client, world, executor = engine()
    caller = threading.Thread(target=executor.collective_rpc, args=("handle_ft_command",))
    caller.start()
    caller.join()
    assert client.generations == 0
    world.add("b", PROMPT)
    assert client.generations == 1
    world.run(client)
    assert client.rows == set()


# ---------------------------------------------------------------- who owns the workers


@pytest.mark.parametrize(
    ("core", "executor", "parallel", "plugins", "owned"),
    [
        ("EngineCoreProc", "uniproc", {}, "", True),
        ("DPEngineCoreProc", "uniproc", {}, "", True),
        ("EngineCoreProc", "multiproc", {}, "", True),
        ("EngineCore", "multiproc", {}, "", True),
        ("EngineCore", "uniproc", {}, "", False),
        ("EngineCoreActor", "uniproc", {}, "", False),
        ("EngineCoreProc", "subclass", {}, "", False),
        ("EngineCoreProc", "external", {}, "", False),
        ("EngineCoreProc", "uniproc", {"worker_extension_cls": "trl.Extension"}, "", False),
        ("EngineCoreProc", "uniproc", {"worker_cls": "mine.Worker"}, "", False),
        ("EngineCoreProc", "uniproc", {"worker_cls": Workers}, "", False),
        ("EngineCoreProc", "multiproc", {}, "a plug-in", False),
    ],
)
def test_vllm_owns_the_workers_of(
    core: str, executor: str, parallel: dict[str, Any], plugins: str, owned: bool
) -> None:
    from vllm.v1.engine import core as cores
    from vllm.v1.executor import uniproc_executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    uniproc = uniproc_executor.UniProcExecutor
    kinds = {
        "uniproc": uniproc,
        "multiproc": MultiprocExecutor,
        "subclass": type("UniProcExecutor", (uniproc,), {}),
        "external": uniproc_executor.ExecutorWithExternalLauncher,
    }
    kind: Any = getattr(cores, core)
    one = kind.__new__(kind)
    one.model_executor = kinds[executor].__new__(kinds[executor])
    one.vllm_config = make_configs()[0]
    for name, value in parallel.items():
        setattr(one.vllm_config.parallel_config, name, value)
    assert rpcs.only_vllm_reaches_weights(one, plugins) is owned
