"""LoRA adapters with vLLM's real scheduler: rows are found again by the weights that computed them.

vLLM's hash has an adapter's name and path only, so every case here is one in which these are the
same and the weights are not, or cannot be known. ``test_adapters_model.py`` plays random histories,
``test_lora.py`` has real engines.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.connectors.vllm import content
from kvass.engine import adapter_files, adapters, boundary
from kvass.engine.adapter_files import files_state, same_files
from kvass.engine.held_adapters import GONE, UNKNOWN, Held, HeldAdapters
from kvass.engine.request_state import RequestState
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import SchedulerHarness, make_configs

TOKENS = range(100)
NUMBERS = itertools.count()


def train(folder: Path, weights: bytes) -> Path:
    """An adapter in ``folder``; that it was changed must not need another size to be seen."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def step(client: FakeClient, world: SchedulerHarness) -> tuple[int, int]:
    """One step, in which ranks copy what they do not refuse: how many loads and stores succeed."""
    output, work = world.schedule()
    stores = [store for store in work.stores if world.lora.may_store(store)]
    client.commit(store.reservation for store in stores)
    loads = [load.request for load in work.loads if world.lora.may_load(load)]
    failed = {load.request for load in work.loads} - set(loads)
    world.finish(output, reported=list(world.open_steps), received=loads, failed=failed)
    return len(loads), len(stores)


def loaded(
    client: FakeClient, lora: Path | None, world: SchedulerHarness | None = None, **fields: Any
) -> int:
    """How many loads of a request succeed in an engine, by default a new one. It computes the
    rest."""
    world = world or SchedulerHarness(client)
    world.add(f"{lora} {next(NUMBERS)}", TOKENS, lora=lora, **fields)
    loads = 0
    while world.scheduler.has_requests():
        loads += step(client, world)[0]
    return loads


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a thread may come late, and a file may be very young."""
    monkeypatch.setattr(adapters, "WAIT_S", 60.0)
    monkeypatch.setattr(adapters, "PATIENCE_S", 60.0)
    monkeypatch.setattr(adapters, "RECENT_S", -1.0)
    monkeypatch.setattr(adapter_files, "STABLE_NS", 0)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def one_slot(client: FakeClient) -> SchedulerHarness:
    """An engine whose ranks hold one adapter at a time, so that they read each again."""
    world = SchedulerHarness(client)
    world.lora.managers[0].capacity = 1
    return world


def test_equal_weights_are_found_by_another_engine_once_it_has_loaded_them(
    client: FakeClient, tmp_path: Path
) -> None:
    one, world = train(tmp_path / "one", b"1234"), SchedulerHarness(client)
    assert loaded(client, one) == 0
    rows = set(client.rows)
    assert len(rows) == 3
    assert loaded(client, one, world) == 0, "it does not know yet what it will load"
    assert world.scheduler.reset_prefix_cache()
    assert loaded(client, one, world) == 1
    shutil.copytree(one, tmp_path / "moved" / "one")
    shutil.rmtree(one)
    train(one, b"1234")
    assert world.scheduler.reset_prefix_cache()
    assert loaded(client, one, world, lora_id=2) == 0
    assert world.scheduler.reset_prefix_cache()
    assert loaded(client, one, world, lora_id=2) == 1, "neither files nor ids are its name"
    assert client.rows == rows


def test_an_adapter_trained_anew_in_the_same_folder_is_another(
    client: FakeClient, tmp_path: Path
) -> None:
    one = train(tmp_path / "one", b"1234")
    for weights in (b"1234", b"5678"):
        train(one, weights)
        world = SchedulerHarness(client)
        assert loaded(client, one, world) == 0
        assert world.scheduler.reset_prefix_cache()
        assert loaded(client, one, world) == 1
    assert len(client.rows) == 6


def test_what_an_engine_does_to_adapters_is_part_of_their_rows(
    client: FakeClient, tmp_path: Path
) -> None:
    import torch
    from vllm.config.lora import LoRAConfig

    one = train(tmp_path / "one", b"1234")
    for dtype in (torch.float16, torch.bfloat16):
        configs = make_configs()
        configs[0].lora_config = LoRAConfig(lora_dtype=dtype)
        world = SchedulerHarness(client, configs=configs)
        loaded(client, one, world)
        assert world.scheduler.reset_prefix_cache()
        assert loaded(client, one, world) == 1
    assert len(client.rows) == 6


def test_requests_without_an_adapter_share_with_engines_that_have_some(
    client: FakeClient, tmp_path: Path
) -> None:
    world = SchedulerHarness(client)
    loaded(client, train(tmp_path / "one", b"1234"), world)
    assert loaded(client, None, world) == 0
    assert loaded(client, None) == 1


def test_an_adapter_by_its_name_on_the_hub_computes(client: FakeClient) -> None:
    """An engine fetches its newest commit whenever it loads it."""
    world = SchedulerHarness(client)
    for _ in range(2):
        assert loaded(client, Path("some/adapter"), world) == 0
        assert world.scheduler.reset_prefix_cache()


def test_requests_that_load_in_place_are_uncached(client: FakeClient, tmp_path: Path) -> None:
    one, world = train(tmp_path / "one", b"1234"), SchedulerHarness(client)
    for _ in range(2):
        assert loaded(client, one, world, in_place=True) == 0
        assert world.scheduler.reset_prefix_cache()
    assert not client.rows


# ---------------------------------------------------------------- under a running engine


def test_after_other_weights_an_adapter_is_uncached_until_the_engines_cache_is_empty(
    client: FakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own cache goes on with the blocks of the old ones."""
    one, world = train(tmp_path / "one", b"1234"), SchedulerHarness(client)
    loaded(client, one, world)
    train(one, b"5678")
    world.add("in place", [1], lora=one, in_place=True, max_tokens=1)
    world.run(client)
    rows = set(client.rows)
    for _ in range(2):
        assert loaded(client, one, world) == 0
    assert client.rows == rows
    said = [r.getMessage() for r in caplog.records if "LoRA" in r.getMessage()]
    assert len(said) == 1
    assert one.name in said[0]
    assert world.scheduler.reset_prefix_cache()
    assert loaded(client, one, world) == 0
    assert len(client.rows) == len(rows) + 3
    assert world.scheduler.reset_prefix_cache()
    assert loaded(client, one, world) == 1


def test_what_a_request_computes_with_other_weights_is_not_stored(
    client: FakeClient, tmp_path: Path
) -> None:
    one, world = train(tmp_path / "one", b"1234"), SchedulerHarness(client)
    world.add("a", range(40), max_tokens=60, lora=one)
    while not client.rows:
        step(client, world)
    train(one, b"5678")
    world.add("b", [1], lora=one, in_place=True, max_tokens=1)
    while world.scheduler.has_requests():
        step(client, world)
    assert len(client.rows) == 1


def test_ranks_that_read_different_weights_share_with_nobody(
    client: FakeClient, tmp_path: Path
) -> None:
    one = train(tmp_path / "one", b"1234")
    torn, whole = (SchedulerHarness(client) for _ in range(2))
    for world in (torn, whole):
        world.connector._planner._adapters._ranks = 2
        world.lora = type(world.lora)(2)
    torn.lora.managers[1].use(torn.add("a", TOKENS, lora=train(one, b"5678")).lora_request)
    train(one, b"1234")
    while torn.scheduler.has_requests():
        step(client, torn)
    assert len(client.rows) == 3
    for hits in (0, 1):
        assert loaded(client, one, whole) == hits
        assert whole.scheduler.reset_prefix_cache()
    assert len(client.rows) == 6


# ---------------------------------------------------------------- adapters that are read again


def test_adapters_that_alternate_hit(client: FakeClient, tmp_path: Path) -> None:
    one, other = train(tmp_path / "one", b"1234"), train(tmp_path / "other", b"5678")
    world = one_slot(client)
    for hits in (0, 1, 1):
        for name, lora in enumerate((one, other), 1):
            assert loaded(client, lora, world, lora_id=name) == hits
            assert world.scheduler.reset_prefix_cache()
    assert len(client.rows) == 6


def test_whose_files_changed_meanwhile_computes(client: FakeClient, tmp_path: Path) -> None:
    one, other = train(tmp_path / "one", b"1234"), train(tmp_path / "other", b"5678")
    world = one_slot(client)
    for _ in range(2):
        for name, lora in enumerate((one, other), 1):
            loaded(client, lora, world, lora_id=name)
            assert world.scheduler.reset_prefix_cache()
    (tmp_path / "aside").mkdir()
    one.rename(tmp_path / "aside" / "one")
    train(one, b"1235")
    for hits in (0, 0, 1):  # what is computed before the ranks have told is lost
        assert loaded(client, one, world, lora_id=1) == hits
        assert world.scheduler.reset_prefix_cache()
    assert len(client.rows) == 9


def test_a_file_that_changed_just_now_tells_nothing(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change again within the same tick of the file system's clock."""
    monkeypatch.setattr(adapter_files, "STABLE_NS", 10**15)
    one = train(tmp_path / "one", b"1234")
    assert files_state(str(one)) == ""
    world = one_slot(client)
    for _ in range(3):
        for name, lora in enumerate((one, tmp_path / "none"), 1):
            assert loaded(client, lora, world, lora_id=name) == 0
            assert world.scheduler.reset_prefix_cache()


def test_everything_on_the_way_to_the_files_counts(tmp_path: Path) -> None:
    one, other = train(tmp_path / "one", b"1234"), train(tmp_path / "other", b"1234")
    latest = tmp_path / "latest"
    latest.symlink_to(one)
    seen = {files_state(str(path)) for path in (one, other, latest)}
    latest.unlink()
    latest.symlink_to(other)
    seen.add(files_state(str(latest)))
    (one / "more.json").write_text("")
    seen.add(files_state(str(one)))
    assert len(seen) == 5
    assert files_state(str(tmp_path / "nowhere")) == ""


def test_a_folder_on_the_way_that_was_there_before_is_seen(tmp_path: Path) -> None:
    """Renamed away and back: no file changed, and others were read meanwhile."""
    (tmp_path / "now").mkdir()
    one = train(tmp_path / "now" / "one", b"1234")
    before = files_state(str(one))
    for source, target in (("now", "aside"), ("aside", "now")):
        (tmp_path / source).rename(tmp_path / target)
    assert files_state(str(one)) != before
    assert same_files(files_state(str(one))) == same_files(before), "on another machine too"


# ---------------------------------------------------------------- law 9


class Slow:
    """A file system that answers when it is told to. ``looks``: the paths it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Semaphore(0)
        self.looks: list[str] = []
        self.ended = queue.SimpleQueue[str]()
        self._read, on_thread = files_state, boundary.on_thread

        def note(name: str, call: Any, path: str) -> Any:
            found = on_thread(name, call, path)
            found.add_done_callback(lambda _: self.ended.put(path))
            return found

        monkeypatch.setattr(adapters, "on_thread", note)
        monkeypatch.setattr(adapters, "files_state", self._slowly)
        monkeypatch.setattr(adapters, "WAIT_S", 0.005)

    def answer(self) -> None:
        """Answer one look that is on its way, and wait until it has come."""
        while not self.ended.empty():
            self.ended.get()
        self.free.release()
        self.ended.get(timeout=60)

    def _slowly(self, path: str) -> Any:
        self.looks.append(Path(path).name)
        self.free.acquire()
        return self._read(path)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    found = Slow(monkeypatch)
    yield found
    found.free.release(1000)


def waited(world: SchedulerHarness) -> list[float]:
    """How long each step of ``world`` waits for files, from now on."""
    known: Any = world.connector._planner._adapters
    waits: list[float] = []
    new_step = known.new_step

    def begin(number: int) -> None:
        waits.append(adapters.WAIT_S - known._left_s)
        new_step(number)

    known.new_step = begin
    return waits


def alternate(client: FakeClient, folder: Path) -> tuple[SchedulerHarness, Path]:
    """An engine, and an adapter that it held, read from files that it looked at, and holds no more.
    All of ``TOKENS`` is stored."""
    one, other = train(folder / "one", b"1234"), train(folder / "other", b"5678")
    world = one_slot(client)
    for _ in range(2):
        for name, lora in enumerate((one, other), 1):
            loaded(client, lora, world, lora_id=name)
            assert world.scheduler.reset_prefix_cache()
    return world, one


def test_a_slow_file_system_is_served_late_and_waited_for_once(
    client: FakeClient, tmp_path: Path, slow: Slow
) -> None:
    slow.free.release(100)
    world, one = alternate(client, tmp_path)
    while slow.free.acquire(blocking=False):
        pass
    waits = waited(world)
    request = world.add("a", TOKENS, lora=one)
    for _ in range(5):
        assert step(client, world) == (0, 0)
    assert request.num_computed_tokens == 0, "it is asked again"
    assert sum(wait > 0 for wait in waits) == 1, "once"
    slow.answer()
    assert step(client, world)[0] == 1


def test_a_file_system_that_hangs_makes_requests_wait_no_longer_than_for_one_look(
    client: FakeClient, tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.free.release(100)
    world, one = alternate(client, tmp_path)
    while slow.free.acquire(blocking=False):
        pass
    monkeypatch.setattr(adapters, "PATIENCE_S", 0.0)
    waits, looks = waited(world), len(slow.looks)
    for name in "ab":
        world.add(name, TOKENS, lora=one)
    world.run(client)
    assert sum(wait > 0 for wait in waits) <= 1
    assert slow.looks[looks:] == ["one"]


def test_a_late_look_ends_no_lookup_that_is_waited_for(
    client: FakeClient, tmp_path: Path, slow: Slow
) -> None:
    slow.free.release(100)
    world, one = alternate(client, tmp_path)
    while slow.free.acquire(blocking=False):
        pass
    world.add("a", TOKENS, lora=one)
    client.pending = 3
    assert step(client, world)[0] == 0
    slow.free.release(1000)
    loads = 0
    while world.scheduler.has_requests():
        if (look := world.connector._planner._adapters._paths[str(one)].look) is not None:
            look.exception()
        loads += step(client, world)[0]
    assert loads == 1


def test_of_too_many_adapters_the_new_ones_are_uncached_until_the_engines_cache_is_empty(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(adapters, "MAX_KNOWN", 2)
    world, stored = one_slot(client), []
    for name in range(1, 5):
        loaded(client, train(tmp_path / f"{name}", b"%d" % name), world, lora_id=name)
        stored.append(len(client.rows))
    assert stored == [3, 6, 6, 6]
    assert caplog.text.count("run uncached until reset_prefix_cache()") == 1
    assert world.scheduler.reset_prefix_cache()
    loaded(client, tmp_path / "4", world, lora_id=4)
    assert len(client.rows) == 9


def test_a_file_system_that_was_slow_once_is_waited_for_again(
    client: FakeClient, tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.free.release(100)
    world, one = alternate(client, tmp_path)
    while slow.free.acquire(blocking=False):
        pass
    for loads_at_once in (0, 1):
        world.add(f"{loads_at_once}", TOKENS, lora=one)
        assert step(client, world)[0] == loads_at_once
        monkeypatch.setattr(adapters, "WAIT_S", 60.0)  # of what was waited for in vain, too
        slow.free.release(100)
        while world.scheduler.has_requests():
            step(client, world)
        assert world.scheduler.reset_prefix_cache()
        loaded(client, tmp_path / "other", world, lora_id=2)
        assert world.scheduler.reset_prefix_cache()


def test_after_one_look_that_failed_all_is_seen_again() -> None:
    """Also that nothing is held any more: else its id would be remembered for ever."""
    listed = {1: threading.Lock(), 2: threading.Lock()}
    held = HeldAdapters(0, lambda: listed, lambda _: "weights", lambda _: ("", ""))
    held.look(1)
    del listed[1]
    held.look(2)
    assert held.news() == {1: Held(2, GONE), 2: Held(1, "weights")}
    held.note_unknown(3)
    assert held.news() == {1: Held(3, UNKNOWN), 2: Held(3, UNKNOWN)}
    held.look(4)
    assert held.news() == {1: Held(4, GONE), 2: Held(4, "weights")}


def test_a_look_that_fails_in_an_unforeseen_way_is_not_the_last(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "files_state", lambda path: 1 / 0)
    world, one = alternate(client, tmp_path)
    assert loaded(client, one, world) == 0
    monkeypatch.setattr(adapters, "files_state", files_state)
    for name, lora in ((2, tmp_path / "other"), (1, one)):
        assert world.scheduler.reset_prefix_cache()
        assert loaded(client, lora, world, lora_id=name) == 1


def test_without_a_daemon_no_files_are_looked_at(
    client: FakeClient, tmp_path: Path, slow: Slow
) -> None:
    client.connected = False
    world = one_slot(client)
    world.add("a", TOKENS, lora=train(tmp_path / "one", b"1234"))
    world.run(client)
    assert not slow.looks


# ---------------------------------------------------------------- the keys


class Chunks:
    """As much of a request as its hashes."""

    def __init__(self, hashes: list[bytes]) -> None:
        self.hashes = hashes

    def chunk_hashes(self, first: int, end: int) -> list[bytes]:
        return self.hashes[first:end]


@pytest.mark.parametrize("width", [16, 32, 64])
def test_salted_hashes_differ_by_hash_and_by_salt(width: int) -> None:
    hashes = [hashlib.shake_128(bytes([n])).digest(width) for n in range(5)]
    state = RequestState(Chunks(hashes))  # type: ignore[arg-type]
    found = set(hashes)
    for salt in (b"one", b"other"):
        digests, each = state.digests(4, salt)
        assert (len(digests), each) == (4 * width, width)
        assert digests[: 2 * width] == state.digests(2, salt)[0]
        found |= {digests[i : i + width] for i in range(0, len(digests), width)}
    assert len(found) == 5 + 4 + 4
    assert state.digests(4, b"") == (b"".join(hashes[:4]), width)
    assert state.digests(0, b"one") == (b"", 0)


# ---------------------------------------------------------------- vLLM 0.30


def with_lora(client: FakeClient) -> SchedulerHarness:
    from vllm.config.lora import LoRAConfig

    configs = make_configs()
    configs[0].lora_config = LoRAConfig()
    return SchedulerHarness(client, configs=configs)


def salted(client: FakeClient, world: SchedulerHarness, salt: str) -> int:
    """The rows that a request with a ``salt`` and no adapter leaves behind."""
    before = len(client.rows)
    world.add(f"salted {next(NUMBERS)}", TOKENS, salt=salt)
    world.run(client)
    return len(client.rows) - before


@pytest.fixture(params=["guarded", "control"])
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the connector believes that block hashes hold plain texts, as vLLM 0.30's do."""
    monkeypatch.setattr(content, "TAGGED_HASHES", request.param == "control")
    return str(request.param) == "guarded"


def test_a_name_that_is_seen_with_a_second_path_is_uncached(
    client: FakeClient, tmp_path: Path, guarded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM 0.30 gives the second adapter the first one's blocks out of its own cache."""
    (tmp_path / "elsewhere").mkdir()
    one = train(tmp_path / "one", b"1234")
    other = train(tmp_path / "elsewhere" / "one", b"5678")
    world = with_lora(client)
    assert loaded(client, one, world) == 0
    assert len(client.rows) == 3
    for lora, name in ((other, 2), (one, 1), (other, 2)):
        loaded(client, lora, world, lora_id=name)
    assert (len(client.rows) == 3) is guarded
    said = [r.getMessage() for r in caplog.records if "for one" in r.getMessage()]
    assert len(said) == guarded
    world = with_lora(client)
    loaded(client, one, world)
    assert world.scheduler.reset_prefix_cache()
    assert loaded(client, one, world) == 1, "what was stored before is right"


def test_a_salt_that_reads_as_an_adapters_name_is_uncached_and_the_adapter_too(
    client: FakeClient, tmp_path: Path, guarded: bool
) -> None:
    one = train(tmp_path / "one", b"1234")
    world = with_lora(client)
    assert salted(client, world, "one") == 3
    loaded(client, one, world)
    assert (len(client.rows) == 3) is guarded
    assert world.scheduler.reset_prefix_cache()
    assert salted(client, world, "another") == 3


def test_of_too_many_texts_the_new_ones_are_uncached(
    client: FakeClient, guarded: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(content, "MAX_TEXTS", 1)
    world = with_lora(client)
    assert salted(client, world, "first") == 3
    assert salted(client, world, "second") == (0 if guarded else 3)
    assert caplog.text.count("run uncached until this engine is restarted") == guarded
    assert loaded(client, None, with_lora(client)) == 0
    assert len(client.rows) == (6 if guarded else 9), "requests with no text have no such limit"
