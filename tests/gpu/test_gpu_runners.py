"""A pair of workers without vLLM replays the hook orders of its model runners over a real daemon.

Law of this file: what one engine stored, the other loads; every page that was loaded is checked by
its content, and blocks are rewritten the moment they are free.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_rank import Transfer
from kvass.testing.pages import WrongPageError
from tests.gpu.device import Device
from tests.gpu.engine import CARELESS, ORDERS, DeviceEngine
from tests.gpu.kv import NAMES

PROMPTS = 4
STEPS = 7


@pytest.fixture
def daemon(tmp_path: Path, device: Device) -> Iterator[Daemon]:
    with running_daemon(tmp_path, "6GiB" if device.real else "64MiB") as one:
        yield one


class Pair:
    """Two engines, and the prompts that either stores and either loads."""

    def __init__(self, daemon: Daemon, device: Device, name: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.daemon = daemon
        self.engines = [DeviceEngine(daemon.socket, device, name, seed=n) for n in range(2)]
        chunk = self.engines[0].chunk_tokens
        self.prompts = [
            range(n << 20, (n << 20) + self.rng.randint(1, 3) * chunk) for n in range(PROMPTS)
        ]
        self.stored = 0
        self.loaded = 0

    def run(self, order: tuple[str, ...]) -> None:
        """A history of ``order``; raises WrongPageError."""
        for _ in range(STEPS):
            for engine in self.engines:
                self._end(engine, engine.step(order, self._plan(engine)))
        for _ in range(2):  # what is stored by now, on both
            for prompt in self.prompts:
                for engine in self.engines:
                    self._finish(engine)
                    what = engine.match(prompt)
                    if what is not None:
                        self._end(engine, engine.step(order, [what]))
                    self._finish(engine)

    def _plan(self, engine: DeviceEngine) -> list[Transfer]:
        """The scheduler's part: something to store, something to load, or both."""
        planned = []
        for plan in (engine.reserve, engine.match):
            prompt = self.rng.choice(self.prompts)
            if self.rng.random() < 0.7 and engine.room(len(prompt) // engine.chunk_tokens):
                planned.append(plan(prompt))
        return [what for what in planned if what is not None]

    def _finish(self, engine: DeviceEngine) -> None:
        """Steps without work, until nothing flies."""
        assert engine.ranks[0].mover.drain(60)
        self._end(engine, engine.step(("results",), []))
        assert not engine.flying

    def _end(self, engine: DeviceEngine, over: list[Transfer]) -> None:
        for what in over:
            assert set(what.outcomes.values()) == {"done"}, what.outcomes
            rows = engine.wait(what)
            assert rows == len(what.keys)
            if what.kind == "store":
                self.stored += rows
        self.loaded += engine.verify()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.mark.parametrize("order", ORDERS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("name", NAMES)
def test_every_loaded_page_is_right(device: Device, daemon: Daemon, name: str, order: str) -> None:
    with closing(Pair(daemon, device, name, seed=NAMES.index(name))) as pair:
        pair.run(ORDERS[order])
    assert pair.stored > 3
    assert pair.loaded > 40
    daemon.wait_until(leases=0, reservations=0, pins=0, quarantined_bytes=0)


@pytest.mark.parametrize("order", CARELESS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("name", ["llama_8b_blocks", "gpt_oss", "deepseek_v4"])
def test_controls_must_corrupt(device: Device, daemon: Daemon, name: str, order: str) -> None:
    with closing(Pair(daemon, device, name, seed=1)) as pair, pytest.raises(WrongPageError):
        pair.run(CARELESS[order])
