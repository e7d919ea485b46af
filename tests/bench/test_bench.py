"""``python -m bench`` measures what it says. Small; no figure is judged here."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import bench.__main__ as command
from bench import core_time, footprint, largest_messages, pings
from bench.__main__ import main
from bench.core_time import measure_longest
from bench.pages import measure_pages
from bench.segments import measure_segments
from kvass.cli.bench import lookups
from kvass.core.effects import Received
from kvass.messages import Error


def test_all_figures_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command, "measure_lookups", partial(lookups.measure_lookups, resident=lookups.BATCH)
    )
    monkeypatch.setattr(lookups, "ASKS", 10)
    monkeypatch.setattr(core_time, "HELD", 10)
    longest = partial(measure_longest, rounds=1, arena_bytes=64 << 30)
    monkeypatch.setattr(command, "measure_longest", longest)
    few_chunks = partial(measure_segments, sizes=(1000,), rounds=1)
    monkeypatch.setattr(command, "measure_segments", few_chunks)
    monkeypatch.setattr(command, "measure_pages", partial(measure_pages, rounds=1))
    monkeypatch.setattr(pings, "PING_S", 0.05)
    monkeypatch.setattr(footprint, "IDLE_S", 0.1)
    figures = command.measure(256 << 20)
    assert figures["segments_found"] is True
    assert figures["bytes_equal"] is True


def test_output_and_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measure(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return {"ping_rps": {"1": 9.0}, "bytes_equal": len(asked) == 1}

    monkeypatch.setattr(command, "measure", measure)
    assert main(["--json", "--l1-size", "4GiB"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ping_rps": {"1": 9.0}, "bytes_equal": True}
    assert main(["--rounds", "7"]) == 1
    assert asked == [(4 << 30,), (3 << 30,)]
    assert main(["--rounds", "3"]) == 2
    assert capsys.readouterr().err == "bench: --rounds 3: use 7 or more, or figures are noise\n"


def test_the_largest_registrations_are_legal() -> None:
    """So what is measured is work, and no refusal; but for the one that is to be refused."""
    core = core_time.Core(1 << 40, largest_messages.LIMITS.namespaces)
    refused = []
    for name, session, message in largest_messages.registrations(core):
        (answer,) = core.step(Received(session, message))
        refused += [name] if isinstance(answer, Error) else []
    assert refused == ["register: too many layers"]
