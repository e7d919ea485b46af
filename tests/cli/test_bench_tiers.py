"""``kvass bench --tier``: a tier on a disk, small; no figure is judged here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvass.cli import bench
from kvass.cli.bench import tiers
from kvass.cli.bench.tiers import RawFile, measure_records, measure_tier
from kvass.cli.main import main
from kvass.errors import TierDown
from kvass.tiers.base import Buffer
from kvass.tiers.buffers import page_buffer
from kvass.tiers.disk import DiskTier

SIZES = (("", 256 << 10, 4), ("_small", 64 << 10, 4))


def test_every_figure_is_there_and_nothing_stays(tmp_path: Path) -> None:
    figures = measure_tier(f"disk:{tmp_path}?threads=2", 2, SIZES)
    for name in ("disk_write", "disk_read"):
        for suffix in ("", "_small"):
            for kind in ("_vs_raw", "_gbps", "_raw_gbps"):
                assert figures[f"{name}{kind}{suffix}"] > 0
    assert figures["bytes_equal"] is True
    assert figures["direct_io"] in (True, False)
    assert (figures["row_bytes"], figures["small_row_bytes"]) == (256 << 10, 64 << 10)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- negative controls


class Forgetful:
    """A disk tier that breaks one promise."""

    def __init__(self, tier: DiskTier, fault: str) -> None:
        self._tier, self._fault = tier, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def store(self, keys: list[bytes], data: Any) -> list[bool]:
        kept = self._tier.store(keys, data)
        return [*kept[:-1], False] if self._fault == "store" else kept

    def load(self, keys: list[bytes], into: Any) -> list[bool]:
        found = self._tier.load(keys, into)
        if self._fault == "bytes":
            into[1][0][77] ^= 1
        return [*found[:-1], False] if self._fault == "load" else found


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[DiskTier, RawFile, Buffer]]:
    folder = tmp_path / "tier"
    folder.mkdir()
    tier, raw = DiskTier(folder, 16 << 20), RawFile(tmp_path, 8192, 4, 2)
    yield tier, raw, page_buffer(8 * 8192)
    tier.close()
    raw.close()


@pytest.mark.parametrize("fault", ["", "store", "load", "bytes"])
def test_a_tier_that_cheats_gets_no_figures(
    fault: str, parts: tuple[DiskTier, RawFile, Buffer]
) -> None:
    tier, raw, memory = parts
    mine: Any = Forgetful(tier, fault)
    if fault in ("store", "load"):
        with pytest.raises(TierDown, match="3 of 4 records"):
            measure_records(mine, raw, memory, 8192, 4, 1)
    else:
        assert measure_records(mine, raw, memory, 8192, 4, 1)["bytes_equal"] is (not fault)


def test_the_raw_file_gives_back_what_was_put(parts: tuple[DiskTier, RawFile, Buffer]) -> None:
    _, raw, memory = parts
    rows = [memory[at : at + 8192] for at in range(0, len(memory), 8192)]
    for number in range(3):
        for i, row in enumerate(rows[:4]):
            row[:] = 10 * number + i
        raw.put(rows[:4])
        raw.get(rows[4:])
        assert all(np.array_equal(a, b) for a, b in zip(rows[:4], rows[4:], strict=True))


# ---------------------------------------------------------------- the command


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def measure(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return {"disk_write_vs_raw": 0.9, "bytes_equal": True}

    monkeypatch.setattr(bench, "measure_tier", measure)
    assert main(["bench", "--tier", "disk:/d", "--json", "--rounds", "7"]) == 0
    assert json.loads(capsys.readouterr().out) == {"disk_write_vs_raw": 0.9, "bytes_equal": True}
    assert asked == [("disk:/d", 7)]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tier", "floppy:/a"], "unknown scheme 'floppy'"),
        (["--tier", "disk"], "write SCHEME:WHERE"),
        (["--tier", "redis:127.0.0.1:1"], "tiers on a disk: disk:PATH"),
        (["--tier", "disk:/nowhere/at/all"], "/nowhere/at/all: No such file"),
        (["--tier", "disk:/proc"], "/proc: "),
        (["--tier", "disk:{tmp}?speed=11"], "unknown option 'speed'"),
        (["--tier", "disk:{tmp}?threads=many"], "threads: 'many'"),
        (["--tier", "disk:{tmp}", "--socket", "/s"], "leave out --socket"),
        (["--tier", "disk:{tmp}", "--rounds", "1"], "use 7 or more"),
    ],
)
def test_bad_flags_get_one_line(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if not line.startswith("measuring")]
    assert error.startswith("kvass: ")
    assert says in error
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiers, "most_bytes", lambda sizes: 1 << 60)
    assert main(["bench", "--tier", f"disk:{tmp_path}"]) == 2
    assert "bench needs" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
