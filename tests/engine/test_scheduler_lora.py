"""LoRA adapters: rows are found again by the weights that computed them, wherever these lay.

vLLM's hash has an adapter's name and path only, so every case here is one in which that is the same
and the weights are not, or cannot be known.
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
from unittest.mock import Mock

import pytest

from kvass.connectors.vllm import adapt
from kvass.engine import adapters, identity
from kvass.engine.adapters import NoSalt
from kvass.engine.stores import RequestState
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


def again(file: Path) -> None:
    """Write ``file`` as it is; file systems tell times apart that are some milliseconds apart."""
    before = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == before:
        file.write_bytes(file.read_bytes())


def loaded(client: FakeClient, lora: Path | None, world: SchedulerHarness | None = None) -> int:
    """How many loads a request begins in an engine, by default a new one. It computes the rest."""
    world = world or SchedulerHarness(client)
    name = f"{lora} {next(NUMBERS)}"
    world.add(name, TOKENS, lora=lora)
    loads = 0
    while world.scheduler.has_requests():
        output, work = world.schedule()
        client.commit(store.reservation for store in work.stores)
        received = [load.request for load in work.loads]
        world.finish(output, reported=list(world.open_steps), received=received)
        loads += len(received)
    return loads


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a thread may come late."""
    monkeypatch.setattr(adapters, "WAIT_S", 60.0)
    monkeypatch.setattr(adapters, "PATIENCE_S", 60.0)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def test_equal_weights_at_the_same_path_are_found_by_another_engine(
    client: FakeClient, tmp_path: Path
) -> None:
    one = train(tmp_path / "one", b"1234")
    assert loaded(client, one) == 0
    rows = set(client.rows)
    assert len(rows) == 3
    assert loaded(client, one) == 1
    (one / "checkpoint-5").mkdir()
    (one / "trainer_state.json").write_text("of no meaning to vLLM")
    assert loaded(client, one) == 1
    shutil.rmtree(one)
    train(one, b"1234")
    assert loaded(client, one) == 1, "its files were fetched anew"
    assert client.rows == rows


def test_files_that_did_not_change_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = train(tmp_path / "one", b"1234")
    first = adapters.read(str(one))
    digest = Mock(wraps=hashlib.file_digest)
    monkeypatch.setattr(hashlib, "file_digest", digest)
    assert adapters.read(str(one), first) == first
    assert digest.call_count == 0
    again(one / "adapter_model.safetensors")
    second = adapters.read(str(one), first)
    assert digest.call_count == 2
    assert second.content == first.content
    assert second.state != first.state


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_trained_anew_in_the_same_folder_is_another(
    client: FakeClient, tmp_path: Path, file: str
) -> None:
    one = train(tmp_path / "one", b"1234")
    assert loaded(client, one) == 0
    size = (one / file).stat().st_size
    (one / file).write_bytes(b"5" * size)
    assert loaded(client, one) == 0
    assert len(client.rows) == 6
    assert loaded(client, one) == 1


def test_a_path_that_leads_elsewhere_now_is_another_adapter(
    client: FakeClient, tmp_path: Path
) -> None:
    latest = tmp_path / "latest"
    for name in ("1234", "5678"):
        latest.unlink(missing_ok=True)
        latest.symlink_to(train(tmp_path / name, name.encode()))
        assert loaded(client, latest) == 0
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
        assert loaded(client, one, SchedulerHarness(client, configs=configs)) == 0
    assert len(client.rows) == 6


def test_requests_without_an_adapter_share_with_engines_that_have_some(
    client: FakeClient, tmp_path: Path
) -> None:
    world = SchedulerHarness(client)
    loaded(client, train(tmp_path / "one", b"1234"), world)
    assert loaded(client, None, world) == 0
    assert loaded(client, None) == 1


# ---------------------------------------------------------------- under a running engine


def test_files_that_change_under_a_running_engine_end_what_is_known_of_it(
    client: FakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody tells whether it loaded them again, and blocks of the old ones stay in its cache."""
    one, other = train(tmp_path / "one", b"1234"), train(tmp_path / "other", b"1234")
    world = SchedulerHarness(client)
    assert loaded(client, one, world) == 0
    assert loaded(client, other, world) == 0
    rows = set(client.rows)
    train(one, b"5678")
    assert world.scheduler.reset_prefix_cache()
    for _ in range(2):
        assert loaded(client, one, world) == 0
    assert client.rows == rows, "weights unknown, and stored"
    assert world.scheduler.reset_prefix_cache()
    assert loaded(client, other, world) == 1
    said = [r.getMessage() for r in caplog.records if "LoRA" in r.getMessage()]
    assert len(said) == 1
    assert str(one) in said[0]
    assert loaded(client, one) == 0
    assert len(client.rows) == len(rows) + 3, "an engine started anew knows what it loads"


def test_what_a_request_computes_once_the_files_changed_is_not_stored(
    client: FakeClient, tmp_path: Path
) -> None:
    one = train(tmp_path / "one", b"1234")
    world = SchedulerHarness(client)
    world.add("a", range(40), max_tokens=60, lora=one)
    work = world.step()
    client.commit(store.reservation for store in work.stores)
    assert len(client.rows) == 1
    train(one, b"5678")
    world.run(client)
    assert len(client.rows) == 1


def test_without_a_look_at_its_files_an_adapter_is_uncached(
    client: FakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = SchedulerHarness(client)
    for _ in range(2):
        assert loaded(client, tmp_path / "nowhere", world) == 0
    assert not client.rows
    assert sum("nowhere" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("link", [False, True])
def test_an_adapter_that_changed_since_the_engine_began_is_uncached(
    client: FakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture, link: bool
) -> None:
    """It may have loaded the old files at its start, before the adapter's first request."""
    one = train(tmp_path / "one", b"1234")
    if link:
        (tmp_path / "latest").symlink_to(one)
    world = SchedulerHarness(client)
    if link:
        other = train(tmp_path / "other", b"5678")
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to(other)
        one = tmp_path / "latest"
    else:
        again(one / "adapter_model.safetensors")
    for _ in range(2):
        assert loaded(client, one, world) == 0
    assert not client.rows
    assert sum("younger" in r.getMessage() for r in caplog.records) == 1
    assert loaded(client, one) == 0
    assert len(client.rows) == 3, "an engine started anew knows what it loads"


def test_a_path_that_changed_once_is_never_used_again(tmp_path: Path) -> None:
    """Not even if a look was under way when it was noticed, and the first files are back."""
    path, other = str(train(tmp_path / "P", b"1234")), train(tmp_path / "P2", b"5678")
    known = adapters.Adapters()
    known.new_step()
    assert isinstance(known.salt(path, known.step), bytes)
    first = known.step
    (tmp_path / "P").rename(tmp_path / "first")
    Path(other).rename(path)
    seen = []
    for _ in range(6):
        known.new_step()
        seen.append(known.salt(path, first))  # of a request that waits: a look goes on meanwhile
        if (look := known._paths[path].look) is not None:
            look.exception()
    assert seen[-1] is NoSalt.NEVER
    (tmp_path / "P").rename(other)
    (tmp_path / "first").rename(path)
    for _ in range(6):
        known.new_step()
        assert known.salt(path, known.step) is NoSalt.NEVER
        if (look := known._paths[path].look) is not None:
            look.exception()


# ---------------------------------------------------------------- law 9


class Slow:
    """A file system that answers when it is told to. ``looks``: the paths it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Semaphore(0)
        self.looks: list[str] = []
        self.ended = queue.SimpleQueue[str]()
        self._read, on_thread = adapters.read, adapters.on_thread

        def note(name: str, call: Any, path: str, before: Any) -> Any:
            found = on_thread(name, call, path, before)
            found.add_done_callback(lambda _: self.ended.put(path))
            return found

        monkeypatch.setattr(adapters, "on_thread", note)
        monkeypatch.setattr(adapters, "read", self._slowly)
        monkeypatch.setattr(adapters, "WAIT_S", 0.005)

    def answer(self) -> None:
        """Answer one look that is on its way, and wait until it has come."""
        while not self.ended.empty():
            self.ended.get()
        self.free.release()
        self.ended.get(timeout=60)

    def _slowly(self, path: str, before: Any) -> Any:
        self.looks.append(Path(path).name)
        self.free.acquire()
        return self._read(path, before)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    found = Slow(monkeypatch)
    yield found
    found.free.release(1000)


def waited(world: SchedulerHarness) -> list[float]:
    """How long each step of ``world`` waits for files, from now on."""
    salts: Any = world.connector._planner._adapters
    waits: list[float] = []
    new_step = salts.new_step

    def step() -> None:
        waits.append(adapters.WAIT_S - salts._left_s)
        new_step()

    salts.new_step = step
    return waits


def stored(world: SchedulerHarness, client: FakeClient, steps: int) -> int:
    """How many chunks are stored in so many steps."""
    before = len(client.rows)
    for _ in range(steps):
        client.commit(store.reservation for store in world.step().stores)
    return len(client.rows) - before


def test_a_slow_file_system_is_served_late_and_waited_for_once(
    client: FakeClient, tmp_path: Path, slow: Slow
) -> None:
    one, world = train(tmp_path / "one", b"1234"), SchedulerHarness(client)
    waits = waited(world)
    request = world.add("a", TOKENS, max_tokens=60, lora=one)
    assert stored(world, client, 5) == 0
    assert request.num_computed_tokens == 0, "it is asked again"
    slow.answer()
    assert stored(world, client, 5) == 0
    assert request.num_computed_tokens > 100
    slow.answer()
    assert stored(world, client, 1) == 3
    assert len(waits) == 11
    assert sum(wait > 0 for wait in waits) == 1, "once"
    slow.answer()
    another = SchedulerHarness(client)
    another.add("b", TOKENS, lora=one)
    assert not another.step().loads
    slow.answer()
    assert len(another.step().loads) == 1


def test_a_look_goes_for_what_was_there_when_it_began(
    client: FakeClient, tmp_path: Path, slow: Slow
) -> None:
    one, world = train(tmp_path / "one", b"1234"), SchedulerHarness(client)
    world.add("a", range(40), max_tokens=100, lora=one)
    world.step()
    slow.answer()
    assert stored(world, client, 60) == 0, "three chunks are computed, of one it was asked"
    slow.answer()
    assert stored(world, client, 1) == 1
    slow.answer()
    assert stored(world, client, 1) == 2


def test_a_file_system_that_hangs_makes_requests_wait_no_longer_than_for_one_look(
    client: FakeClient, tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "PATIENCE_S", 0.0)
    one, other = train(tmp_path / "one", b"1234"), train(tmp_path / "other", b"1234")
    world = SchedulerHarness(client)
    waits = waited(world)
    for lora in (one, other):
        world.add(lora.name, TOKENS, lora=lora)
    world.run(client)
    assert len(waits) >= 4
    assert sum(wait > 0 for wait in waits) <= 1
    assert sorted(slow.looks) == ["one", "other"]
    assert not client.rows
    slow.answer()
    slow.answer()
    world.add("c", TOKENS, lora=one, max_tokens=60)
    assert stored(world, client, 5) == 0
    slow.answer()
    assert stored(world, client, 1) == 3


def test_a_late_look_ends_no_lookup_that_is_waited_for(
    client: FakeClient, tmp_path: Path, slow: Slow
) -> None:
    one = train(tmp_path / "one", b"1234")
    slow.free.release(100)
    loaded(client, one)
    while slow.free.acquire(blocking=False):
        pass
    world = SchedulerHarness(client)
    world.add("a", TOKENS, lora=one)
    client.pending = 3
    loads = stored(world, client, 1)
    slow.answer()
    for _ in range(5):
        loads += len(world.step().loads)
    assert loads == 1


def test_a_look_that_fails_in_an_unforeseen_way_is_not_the_last(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, real = train(tmp_path / "one", b"1234"), adapters.read
    look = Mock(side_effect=RuntimeError("a defect"))
    monkeypatch.setattr(adapters, "read", look)
    world = SchedulerHarness(client)
    assert loaded(client, one, world) == 0
    assert not client.rows
    look.side_effect = real
    assert loaded(client, one, world) == 0
    assert len(client.rows) == 3
    with pytest.raises(FileNotFoundError):
        real("~nosuchuser/adapter")


def test_without_a_daemon_no_files_are_looked_at(
    client: FakeClient, tmp_path: Path, slow: Slow
) -> None:
    client.connected = False
    world = SchedulerHarness(client)
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


def test_an_adapter_by_its_name_on_the_hub_is_uncached(client: FakeClient) -> None:
    with pytest.raises(identity.Indescribable, match="local folder"):
        adapters.read("some/adapter")
    assert loaded(client, Path("some/adapter")) == 0
    assert not client.rows


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
    monkeypatch.setattr(adapt, "TAGGED_HASHES", request.param == "control")
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
    for lora in (other, one, other):
        loaded(client, lora, world)
    assert (len(client.rows) == 3) is guarded
    said = [r.getMessage() for r in caplog.records if "for one" in r.getMessage()]
    assert len(said) == guarded
    assert loaded(client, one, with_lora(client)) == 1, "what was stored before is right"


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
    client: FakeClient, tmp_path: Path, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapt, "MAX_TEXTS", 1)
    world = with_lora(client)
    assert salted(client, world, "first") == 3
    assert salted(client, world, "second") == (0 if guarded else 3)
    assert loaded(client, None, with_lora(client)) == 0
    assert len(client.rows) == (6 if guarded else 9), "requests with no text have no such limit"
