"""Tiers behind real engines: what one engine stored, another loads after the daemon was killed, or
through a daemon of its own that shares the store.

Every case asserts how much was loaded and that the tier gave it.

What is looked up before the daemon knows a tier's epoch is a miss at once. No case depends on how
soon that is: ``awake`` has stored something through a tier before anything is asked of it. For the
same reason the daemons do not weigh loading against computing, and lookups are patient.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvass.arena.place import remove_place
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine import hybrid
from tests.engine.conftest import Starter, store
from tests.support.servers.redis import RedisServer
from tests.support.vllm.judge import Judge
from tests.support.vllm.process import EngineProcess, Prompt
from tests.support.waiting import eventually

pytestmark = pytest.mark.engine

Make = Callable[[int], list[int]]
WAIT_S: Final = 60.0


class Movable(NamedTuple):
    """An engine whose socket is a link, so that it can meet one daemon after another."""

    engine: EngineProcess
    link: Path

    def goes_to(self, daemon: Daemon) -> EngineProcess:
        """From its next connection on."""
        fresh = self.link.with_suffix(".new")
        fresh.symlink_to(daemon.socket)
        fresh.rename(self.link)
        return self.engine


@pytest.fixture(scope="module")
def movables(start: Starter, folder: Path, model: Path) -> Iterator[list[Movable]]:
    """Two, started side by side. The first has its pages on a fake GPU. The second has a copy of
    the model in another folder, and waits for nothing in a step: as long as a tier loads, it is
    told to ask again, as in production."""
    links = [folder / f"tiers-{name}.sock" for name in "ab"]
    copied = folder / "tiers-model"
    shutil.copytree(model, copied, copy_function=shutil.copyfile)
    fields: list[dict[str, Any]] = [
        {"patient": True, "gpu": True},
        {"patient": False, "folder_of": copied},
    ]
    made = [
        Movable(start(link.stem, socket=link, **own), link)
        for link, own in zip(links, fields, strict=True)
    ]
    for one in made:
        one.engine.wait_ready()
    yield made
    for one in made:
        one.engine.kill()


class Place:
    """Daemons in folders of their own, one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()

    def daemon(self, *tiers: str) -> AbstractContextManager[Daemon]:
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        return running_daemon(folder, tier=list(tiers), **PATIENT)


PATIENT: Final[dict[str, Any]] = {"lookup_budget_ms": 10_000, "skip_slow_loads": "no"}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder for a disk tier."""
    made = tmp_path / "disk"
    made.mkdir()
    return made


def url(disk: Path) -> str:
    return f"disk:{disk}?capacity=256MiB"


def tier_of(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["tiers"][0]
    return found


def flushed(daemon: Daemon) -> None:
    """Wait until every tier has what was stored."""
    daemon.wait_until(reservations=0)

    def idle() -> bool:
        return not any(
            tier["flush_queue_rows"] or tier["storing_bytes"] for tier in daemon.status()["tiers"]
        )

    assert eventually(idle, WAIT_S), "a tier does not have it"


def awake(engine: EngineProcess, daemon: Daemon, prompt: Make) -> None:
    """Wait until something that ``engine`` computes now arrives in all tiers of ``daemon``."""
    before = daemon.status()["rows"]

    def stored() -> bool:
        engine.one(prompt(300), 1)
        daemon.wait_until(reservations=0)
        return bool(daemon.status()["rows"] > before)

    assert eventually(stored, WAIT_S), "the daemon does not have it"
    flushed(daemon)
    assert engine.reset()


def write_key(path: Path, key: str) -> str:
    """Replace a file of one key. Returns the option of a tier's URL for it."""
    new = path.with_suffix(".new")
    new.touch(0o600)
    new.write_text(key)
    new.replace(path)
    return f"&key_file={path}"


@pytest.mark.parametrize("encrypted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_killed_daemons_disk_serves_a_new_engine_and_the_old_one(
    place: Place,
    disk: Path,
    movables: Sequence[Movable],
    judge: Judge,
    prompt: Make,
    encrypted: bool,
) -> None:
    """Of an encrypted one, a daemon with another key serves nothing, and says so."""
    tokens, others = prompt(1000), prompt(600)
    keys = disk.with_name("keys")
    option = write_key(keys, "11" * 32) if encrypted else ""
    with place.daemon(url(disk) + option) as daemon:
        a = movables[0].goes_to(daemon)
        awake(a, daemon, prompt)
        for one in (tokens, others):
            judge.check(one, store(a, one, 8))
        flushed(daemon)
        daemon.kill()
        b = movables[1].goes_to(daemon)
        daemon.start()
        assert daemon.status()["rows"] == 0
        awake(b, daemon, prompt)
        warm = b.one(tokens)
        assert (warm.local, warm.external) == (0, 768)
        assert tier_of(daemon)["loaded_rows"] == 3
        judge.check(tokens, warm)
        awake(a, daemon, prompt)
        warm = a.one(others)
        assert (warm.local, warm.external) == (0, 512)
        assert tier_of(daemon)["loaded_rows"] == 3 + 2
        judge.check(others, warm)
        if encrypted:
            assert tier_of(daemon)["other_keys"] == 0
            assert a.reset()
            daemon.kill()
            write_key(keys, "22" * 32)
            daemon.start()
            awake(a, daemon, prompt)
            cold = a.one(others)
            assert (cold.local, cold.external) == (0, 0)
            judge.check(others, cold)
            assert eventually(lambda: tier_of(daemon)["other_keys"] == 1, WAIT_S)
            assert tier_of(daemon).get("loaded_rows", 0) == 0
        assert all(one.engine.reset() for one in movables)
        daemon.wait_until(leases=0, reservations=0, pins=0, rows_loading=0, promotions=0)


def test_a_request_for_one_token_brings_its_rows_to_l1(
    place: Place, disk: Path, movables: Sequence[Movable], judge: Judge, prompt: Make
) -> None:
    """What docs/tiers.md says of it. The other prompt, of which nobody asked, is the control. It
    comes from the disk while its request waits behind a full batch."""
    tokens, others = prompt(1000), prompt(600)
    with place.daemon(url(disk)) as daemon:
        a = movables[0].goes_to(daemon)
        awake(a, daemon, prompt)
        for one in (tokens, others):
            store(a, one)
        flushed(daemon)
        daemon.kill()
        b = movables[1].goes_to(daemon)
        daemon.start()
        awake(a, daemon, prompt)
        awake(b, daemon, prompt)
        assert a.one(tokens, 1).external == 768
        assert tier_of(daemon)["loaded_rows"] == 3
        daemon.wait_until(reservations=0)
        warm = b.one(tokens)
        assert warm.external >= 768
        assert tier_of(daemon)["loaded_rows"] == 3, "they are in L1"
        judge.check(tokens, warm)
        assert daemon.status()["counters"]["prefetches"] == 0
        batch = [Prompt(prompt(20), 8) for _ in range(8)]
        warm = b.generate(*batch, Prompt(others))[-1]
        assert warm.external == 512
        assert daemon.status()["counters"]["prefetches"] == 1
        assert tier_of(daemon)["loaded_rows"] == 3 + 2, "these were not"
        judge.check(others, warm)
        assert all(one.engine.reset() for one in movables)


def test_a_killed_daemons_memory_serves_its_engines_without_any_tier(
    tmp_path: Path, memory_folder: Path, movables: Sequence[Movable], judge: Judge, prompt: Make
) -> None:
    """The control: a daemon that finds no memory."""
    tokens, arena = prompt(1000), str(memory_folder / "kvass")
    with running_daemon(tmp_path, arena=arena, **PATIENT) as daemon:
        engines = [one.goes_to(daemon) for one in movables]
        registered(daemon)
        judge.check(tokens, store(engines[0], tokens, 8))
        daemon.wait_until(reservations=0)
        daemon.restart()
        assert daemon.status()["arena"]["adopted_rows"] == 3
        registered(daemon)
        for engine in engines:  # the second may find the tail that the first has stored again
            warm = engine.one(tokens)
            assert warm.external == 768 or (engine is engines[1] and warm.external == 992)
            judge.check(tokens, warm)
            assert engine.reset()
        daemon.kill()
        remove_place(arena)
        daemon.start()
        registered(daemon)
        assert engines[0].one(tokens).external == 0
        assert all(engine.reset() for engine in engines)


def registered(daemon: Daemon) -> None:
    """Wait until both engines have met the daemon with all their ranks."""

    def complete() -> bool:
        engines = daemon.status()["engines"]
        whole = [e for e in engines if e["scheduler"] and not e["missing_ranks"]]
        return len(whole) == 2

    assert eventually(complete, WAIT_S), "an engine did not come back"


def test_two_daemons_share_a_store(
    place: Place, movables: Sequence[Movable], judge: Judge, prompt: Make
) -> None:
    tokens, others = prompt(1000), prompt(600)
    branch = others[:400] + prompt(300)
    with closing(RedisServer()) as server, place.daemon(f"redis:{server.address}") as one:
        a = movables[0].goes_to(one)
        awake(a, one, prompt)
        judge.check(tokens, store(a, tokens, 8))
        flushed(one)
        with place.daemon(f"redis:{server.address}") as other:
            b = movables[1].goes_to(other)
            awake(b, other, prompt)
            warm = b.one(tokens)
            assert (warm.local, warm.external) == (0, 768)
            assert tier_of(other)["loaded_rows"] == 3
            judge.check(tokens, warm)
            judge.check(others, store(b, others, 8))
            flushed(other)
            assert a.reset()
            warm = a.one(branch)
            assert (warm.local, warm.external) == (0, 256)
            assert tier_of(one)["loaded_rows"] == 1
            judge.check(branch, warm)
            for daemon in (one, other):
                assert tier_of(daemon)["errors"] == 0
                assert tier_of(daemon)["load_misses"] == 0


@pytest.mark.slow  # of tiers it is in tests/support/reference, of such models in test_hybrid.py
def test_a_model_with_windows_from_disk(disk: Path, tmp_path: Path) -> None:
    """gpt-oss: of each chunk a whole row and a window's, both from the tier."""
    options = {"tier": [url(disk)], **PATIENT}
    with hybrid.running_pair(hybrid.GPT_OSS, tmp_path, options) as pair:
        awake(pair.a, pair.daemon, pair.prompt)
        prompts = [pair.prompt(size) for size in (257, 768, 1000)]
        for tokens in prompts:
            pair.store(tokens)
        flushed(pair.daemon)
        pair.daemon.restart()
        awake(pair.b, pair.daemon, pair.prompt)
        for tokens in prompts:
            before = tier_of(pair.daemon).get("loaded_rows", 0)
            warm = pair.load(tokens)
            assert (warm.local, warm.external) == (0, pair.model.hit(len(tokens)))
            full = warm.external // pair.model.chunk
            assert tier_of(pair.daemon)["loaded_rows"] == before + full + 1
            pair.check(tokens, warm)
