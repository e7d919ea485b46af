"""An arena that is full still takes every store: room is made when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from kvass.messages import Register
from kvass.testing.daemon import running_daemon
from kvass.types import GroupLayout, RankLayout
from tests.client.test_real_daemon import CHUNKS, Engine
from tests.support.waiting import eventually

STORES: Final = 2000
LAYOUT: Final = RankLayout((GroupLayout("full", 32, ("layer",), ((1 << 20) // 8,)),))


def test_two_thousand_stores_into_half_the_room(
    tmp_path: Path, registration: Register, worker_registration: Register
) -> None:
    """2,000 rows of 1 MiB into 1 GiB: none is dropped, and the newest are there, intact."""
    prompts = [str(number) for number in range(STORES // CHUNKS)]
    rank = msgspec.structs.replace(worker_registration, layout=LAYOUT)
    with running_daemon(tmp_path, l1_size="1GiB") as daemon:
        engine = Engine(daemon.socket, registration, rank)
        assert eventually(lambda: engine.connected)
        for prompt in prompts:
            assert engine.store(prompt), f"store {prompt} was dropped"
        status = daemon.wait_until(reservations=0, leases=0, quarantined_bytes=0)
        assert status["counters"]["chunks_granted"] == STORES
        assert status["rows"] >= 0.9 * 1024, "the arena is used, not only turned over"
        for prompt in prompts[-STORES // CHUNKS // 4 :]:
            assert engine.load(prompt)
        assert not engine.load(prompts[0]), "room was made for something"
        engine.close()
