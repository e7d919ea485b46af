"""``python -m bench.fleet``, small: machines share a store, and routers choose as they say."""

from __future__ import annotations

import json

import pytest

from bench import fleet
from kvass.simulate.models import Layers, layout
from kvass.simulate.player import Model, Setting
from kvass.types import Size

TRACE = fleet.made("agents", 60, 0.5, 1)
MODEL = Model(512, layout((Layers(1, 256),), fleet.BLOCK_TOKENS))
ROW = MODEL.row_bytes


def played(router: str, l1_rows: int = 4096, l2_rows: int = 1 << 20) -> fleet.Fleet:
    setting = Setting(l1_rows * ROW, 512, l2_rows * ROW, 1e12, 20_000)
    return fleet.play(TRACE, setting, MODEL, 3, router)


@pytest.mark.parametrize("router", fleet.ROUTERS)
def test_every_token_is_found_or_computed(router: str) -> None:
    found = fleet.figures(played(router))
    assert found["computed"] + found["from L1"] + found["from store"] == pytest.approx(1)


@pytest.mark.parametrize(("l1_rows", "l2_rows"), [(60, 0), (120, 300)])
def test_what_is_held_is_what_a_request_finds_there(l1_rows: int, l2_rows: int) -> None:
    """``held_chunks`` is right after each request, with an L1 and a store that evict."""
    one = played("remembers", l1_rows=l1_rows, l2_rows=l2_rows)
    assert sum(machine.player.outcome.evicted_rows for machine in one.machines) > 0
    for machine in one.machines:
        for request in TRACE.requests[-20:]:
            held = machine.player.held_chunks(TRACE, request, tier=l2_rows > 0)
            machine.player.ask(TRACE, request)
            assert machine.player.outcome.hits[-1] == held * 512


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--machines", "2", "--requests", "20", "--routers", "in turns,knows L1"]
    assert fleet.run([*flags, "--l1", "1GiB", "--l2-speed", "1GB"]) == 0
    assert "| in turns |" in (out := capsys.readouterr().out)
    assert "| knows L1 |" in out
    assert fleet.run([*flags, "--l1", str(Size.parse("1GiB")), "--json"]) == 0
    assert {row["router"] for row in json.loads(capsys.readouterr().out)} == {
        "in turns",
        "knows L1",
    }
