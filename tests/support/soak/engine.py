"""One engine of a soak, a process of its own: plays its share of a trace and checks what it loads.

It prints a JSON line (``Line``) per request, and ends after one with ``wrong``.
SIGUSR1 kills one of its ranks in the middle of the next copy.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from kvass.client.parallel import ParallelStrategy
from kvass.layout.copy_plan import RowCopy
from kvass.layout.describe import GroupPlanes
from kvass.simulate.traces import read
from kvass.testing.fake_engine import FakeEngine, spread
from kvass.testing.fake_rank import Transfer
from kvass.testing.pages import WrongPageError
from kvass.transfer.base import Job, Outcome
from kvass.transfer.host import HostMover
from kvass.types import GroupLayout, RankLayout
from tests.support.soak.memory import tell as tell_memory

CHUNK_TOKENS: Final = 16
MOST_CHUNKS: Final = 24
"""Of a prompt; longer ones are cut."""
ROW_S: Final = 0.001
MODEL: Final = RankLayout(
    (
        GroupLayout("full", 4, ("a", "b"), (2048, 1500)),
        GroupLayout("full", 16, ("c", "d"), (2500, 2048)),
    )
)
WORLDS: Final = (ParallelStrategy(tp=2, pp=2), ParallelStrategy(tp=2, replicas=2))
"""Engines are of these in turn; those of one world share their rows."""


class Setup(msgspec.Struct):
    """Plays the requests ``number``, ``number + engines``... of ``trace`` from ``first`` on, in a
    circle, ``rate`` a second on average. ``kind``: of a real engine, which module it is
    (``vllm_engine``); ``answers``: the file with its right answers."""

    socket: str
    number: int
    engines: int
    trace: str
    seed: int
    first: int = 0
    rate: float = 5.0
    answers: str = ""
    kind: str = ""


class Line(msgspec.Struct, omit_defaults=True):
    """Request ``n`` of the trace, in chunks; the ``pages`` that were right; its time in seconds."""

    n: int
    asked: int = 0
    hit: int = 0
    pages: int = 0
    s: float = 0.0
    wrong: str = ""


def requests(trace: Path, most: int = MOST_CHUNKS) -> list[list[int]]:
    """The first ``most`` pieces of each."""
    return [r.pieces[:most].tolist() for r in read(trace).requests]


def prompts(setup: Setup) -> Iterator[tuple[int, list[int]]]:
    """The number and the pieces of each request, when its time has come."""
    every = requests(Path(setup.trace))
    random, due_s = Random(f"{setup.seed} {setup.number} {setup.first}"), time.monotonic()
    n = setup.first - setup.first % setup.engines + setup.number
    while True:
        due_s += random.expovariate(setup.rate)
        early_s = due_s - time.monotonic()
        if early_s > 0:
            time.sleep(early_s)
        due_s -= min(early_s, 0.0)  # what was suspended does not hurry
        yield n, every[n % len(every)]
        n += setup.engines


def tell(line: Line) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


class SlowMover(HostMover):
    """So slow that what stops or kills an engine often does so in the middle of a copy."""

    def _copy(self, job: Job, planes: GroupPlanes, row: RowCopy) -> tuple[Outcome, str] | None:
        time.sleep(ROW_S)
        return super()._copy(job, planes, row)


class SoakEngine(FakeEngine):
    """Loses ``doomed`` ranks in the middle of a copy."""

    doomed: int = 0

    def flush(self, ranks: Iterable[int]) -> None:
        """Waits for no daemon: it may be gone."""

    def copy(self, what: Transfer, ranks: Iterable[int] | None = None) -> None:
        super().copy(what, ranks)
        if self.doomed:
            self.kill(what.id % self.world.ranks)

    def replace_dead(self) -> None:
        for number, rank in enumerate(self.ranks):
            if not rank.alive:
                self.revive(number)
                self.doomed = 0


def play(setup: Setup) -> None:
    world = WORLDS[setup.number // 2 % len(WORLDS)]
    identity = {"model": f"soak tp={world.tp} pp={world.pp} replicas={world.replicas}"}
    layouts = spread(world, MODEL)
    options = {
        "chunk_tokens": CHUNK_TOKENS,
        "identity": identity,
        "seed": setup.seed,
        "mover": SlowMover,
    }
    with SoakEngine(setup.socket, world, layouts, **options) as engine:  # type: ignore[arg-type]

        def lose_a_rank(*_: object) -> None:
            engine.doomed = 1

        signal.signal(signal.SIGUSR1, lose_a_rank)
        tell_memory(Path(setup.socket).parent)
        tell(Line(setup.first))
        for n, pieces in prompts(setup):
            prompt = [word for piece in pieces for word in (piece & 0xFFFFFFFF, piece >> 32) * 8]
            began_s = time.monotonic()
            try:
                hit = engine.load(prompt)
                pages = engine.verify()
            except WrongPageError as error:
                tell(Line(n, wrong=str(error)))
                return
            engine.store(prompt)
            engine.replace_dead()
            tell(Line(n, len(pieces), hit, pages, round(time.monotonic() - began_s, 3)))


if __name__ == "__main__":
    play(msgspec.json.decode(sys.argv[1], type=Setup))
