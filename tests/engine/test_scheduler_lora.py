"""LoRA adapters: rows are found again by the weights that computed them, wherever these lay.

vLLM's hash has an adapter's name and path only, so every case here is one in which that is the same
and the weights are not, or cannot be known.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.connectors.vllm import adapters, identity
from kvass.testing.fake_client import FakeClient
from kvass.testing.vllm_scheduler import World, make_configs

TOKENS = range(100)
NUMBERS = itertools.count()


def train(folder: Path, weights: bytes) -> Path:
    """An adapter in ``folder``; that it was changed must not need another size to be seen."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def loaded(client: FakeClient, lora: Path | None, world: World | None = None) -> int:
    """How many loads a request begins in an engine, by default a new one. It computes the rest."""
    world = world or World(client)
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
    assert client.rows == rows


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
    for name in ("one", "two"):
        latest.unlink(missing_ok=True)
        latest.symlink_to(train(tmp_path / name, b"1234"))
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
        assert loaded(client, one, World(client, configs=configs)) == 0
    assert len(client.rows) == 6


def test_requests_without_an_adapter_share_with_engines_that_have_some(
    client: FakeClient, tmp_path: Path
) -> None:
    world = World(client)
    loaded(client, train(tmp_path / "one", b"1234"), world)
    assert loaded(client, None, world) == 0
    assert loaded(client, None) == 1


# ---------------------------------------------------------------- under a running engine


def test_files_that_change_under_a_running_engine_end_what_is_known_of_it(
    client: FakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody tells whether it loaded them again, and blocks of the old ones stay in its cache."""
    one, other = train(tmp_path / "one", b"1234"), train(tmp_path / "other", b"1234")
    world = World(client)
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
    world = World(client)
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
    world = World(client)
    for _ in range(2):
        assert loaded(client, tmp_path / "nowhere", world) == 0
    assert not client.rows
    assert sum("nowhere" in r.getMessage() for r in caplog.records) == 1
    train(tmp_path / "nowhere", b"1234")
    assert loaded(client, tmp_path / "nowhere", world) == 0
    assert len(client.rows) == 3


# ---------------------------------------------------------------- law 9


class Stuck:
    """A file system that answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.looks = 0
        self._real = identity.adapter_weights
        monkeypatch.setattr(identity, "adapter_weights", self._look)
        monkeypatch.setattr(adapters, "WAIT_S", 0.05)

    def let_go(self, salts: adapters.Adapters) -> str:
        """Answer, from now on at once; what was too late, once it has come."""
        self.free.set()
        assert salts._late is not None
        late = salts._late.result(60)
        salts._wait_s = 60.0
        salts.new_step()
        return late

    def _look(self, path: str) -> str:
        self.looks += 1
        self.free.wait()
        return self._real(path)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    found = Stuck(monkeypatch)
    yield found
    found.free.set()


def test_a_file_system_that_hangs_does_not_hang_the_engine(
    client: FakeClient, tmp_path: Path, stuck: Stuck
) -> None:
    world = World(client)
    one, other = train(tmp_path / "one", b"1234"), train(tmp_path / "other", b"1234")
    waited: list[float] = []
    salts: Any = world.connector._planner._adapters
    new_step = salts.new_step

    def step() -> None:
        waited.append(adapters.WAIT_S - salts._left_s)
        new_step()

    salts.new_step = step
    for lora in (one, other):
        world.add(lora.name, TOKENS, lora=lora)
    world.run(client)
    assert len(waited) >= 4
    assert sum(one > 0 for one in waited) == 1, "who is not there is waited for once, in all"
    assert stuck.looks == 1
    assert not client.rows
    salts.new_step = new_step
    stuck.let_go(salts)
    loaded(client, one, world)
    assert len(client.rows) == 3


def test_an_answer_that_came_late_is_asked_for_again(tmp_path: Path, stuck: Stuck) -> None:
    """It may be of before a change."""
    one = train(tmp_path / "one", b"1234")
    salts = adapters.Adapters()
    assert salts.salt("one", str(one)) is None
    old = stuck.let_go(salts)
    train(one, b"5678")
    assert salts.salt("one", str(one)) is not None
    assert stuck.looks == 2
    assert list(salts._first.values()) != [old]
    salts.close()


# ---------------------------------------------------------------- by name


def test_an_adapter_by_its_name_on_the_hub_is_known_by_the_commit_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    there = tmp_path / "models--some--adapter"
    (there / "refs").mkdir(parents=True)
    (there / "snapshots").mkdir()
    with pytest.raises(FileNotFoundError, match="fetch it"):
        identity.adapter_weights("some/adapter")
    found = set()
    for commit in ("1" * 40, "2" * 40, "1" * 40):
        train(there / "snapshots" / commit, b"1234")
        (there / "refs" / "main").write_text(commit)
        found.add(identity.adapter_weights("some/adapter"))
    assert len(found) == 2
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE"):
        identity.adapter_weights("some/adapter")
