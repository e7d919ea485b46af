"""``kvass bench --tier disk:PATH``: a tier on a disk, against the raw disk.

Law of this file: nothing of the user's is touched. The tier and the raw file are in a new folder
inside of the one that is named, which is gone afterwards.

What the names mean. Every one is there twice: for records of 32 MiB (a chunk of Llama-8B), and with
``_small`` for records of 1 MiB.

- ``disk_write_vs_raw``, ``disk_read_vs_raw``: storing and loading 512 MiB in the tier, which is
  full and evicts, against writing and reading as much of a fallocated file beside it, past the page
  cache (``direct_io``), with as many threads.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol
from urllib.parse import quote

import numpy as np

from kvass._version import __version__
from kvass.cli.bench.figures import add, ratio
from kvass.cli.bench.machine import say, seconds, shared_memory
from kvass.cli.bench.sessions import WIDTH
from kvass.errors import ConfigError, TierDown
from kvass.tiers.base import Buffer, Tier
from kvass.tiers.url import TierUrl, open_tier, parse_tier_url, shown
from kvass.transfer.base import U8Array
from kvass.types import PAGE, Size

Sizes = Sequence[tuple[str, int, int]]
"""What ends the figures' names, bytes of a record, how many records."""
DISK: Final = (("", 32 << 20, 16), ("_small", 1 << 20, 256))
WARM_UP: Final = 3
"""Rounds after which a disk's places have all been written once, and are written over."""


class Counterpart(Protocol):
    """What a tier is compared with: a store of the last records that were put.

    ``names``: of the ratios of a put and a get, ``X_vs_Y``. ``evicts``: whether the tier is full in
    all rounds, and old records leave by themselves. ``get`` may leave ``into`` alone if the library
    itself says where. ``forget``, between rounds and not measured, removes what has to go so that a
    put is a put.
    """

    names: tuple[str, str]
    evicts: bool

    def put(self, data: Sequence[Buffer]) -> None: ...

    def get(self, into: Sequence[Buffer]) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


def measure_tier(text: str, rounds: int, sizes: Sizes = DISK) -> dict[str, Any]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    url = parse_tier_url(text)
    if url.scheme != "disk":
        raise ConfigError(f"tier {shown(text)!r}: this measures tiers on a disk: disk:PATH")
    with own_folder(Path(url.where), most_bytes(sizes)) as folder:
        return header(text, rounds, sizes) | measure_disk(url, folder, rounds, sizes)


def header(text: str, rounds: int, sizes: Sizes) -> dict[str, Any]:
    """What was measured."""
    figures = {"version": __version__, "cores": os.cpu_count(), "rounds": rounds}
    (_, row_bytes, _), (_, small_bytes, _) = sizes
    return figures | {"tier": shown(text), "row_bytes": row_bytes, "small_row_bytes": small_bytes}


def measure_disk(url: TierUrl, folder: Path, rounds: int, sizes: Sizes) -> dict[str, Any]:
    """The figures of a tier with the options of ``url``, and of a raw file, in ``folder``."""
    figures: dict[str, Any] = {}
    for suffix, size, count in sizes:
        say(f"{count} records of {Size(size)}, {rounds} rounds")
        options = url.options | {"capacity": str(_tier_bytes(size, count))}
        with ExitStack() as ending:
            memory = shared_memory(2 * count * size)
            ending.callback(memory.close)
            (place := folder / f"records{suffix}").mkdir()
            tier = open_tier(spelled("disk", str(place), options))
            ending.callback(tier.close)
            raw = RawFile(folder, size, count, int(options.get("threads", "4")))
            ending.callback(raw.close)
            more = measure_records(tier, raw, memory.buffer, size, count, rounds)
            tier.clear()
        add(figures, more | {"direct_io": raw.direct}, suffix=suffix)
    return figures


def spelled(scheme: str, where: str, options: Mapping[str, str]) -> str:
    """The URL of a tier."""
    values = (f"{name}={quote(value, safe='/:')}" for name, value in options.items())
    return f"{scheme}:{quote(where, safe='/:')}?{'&'.join(values)}"


def measure_records(
    tier: Tier, other: Counterpart, memory: U8Array, size: int, count: int, rounds: int
) -> dict[str, Any]:
    """The ratios of ``other.names``, and rates. ``memory`` holds ``2 * count`` records.

    Both sides take turns in every round, the one that begins too; every record is of new bytes,
    under a key of its own; every byte loaded is compared. Raises ``TierDown`` if the tier did not
    take all, or did not give it back.
    """
    buffers = list(memory[: 2 * count * size].reshape(2 * count, size))
    source, target = buffers[:count], buffers[count:]
    words = memory[: count * size].view(np.uint64)
    words[:] = np.random.default_rng(0).integers(0, 1 << 63, len(words), np.uint64)
    times: dict[str, list[float]] = {}
    same = True
    for number in range(rounds + WARM_UP):
        keys = [os.urandom(WIDTH) for _ in range(count)]
        words[:: PAGE // 8] += np.uint64(1)  # other bytes in every page than last time
        turn = -1 if number % 2 else 1
        puts = {"put": partial(_store, tier, keys, source), "their put": partial(other.put, source)}
        gets = {"get": partial(_load, tier, keys, target), "their get": partial(other.get, target)}
        for name, step in (*[*puts.items()][::turn], *[*gets.items()][::turn]):
            if name == "get":
                memory[count * size :] = 0
            took_s = seconds(step)
            if number >= WARM_UP:
                times.setdefault(name, []).append(took_s)
            if name == "get":
                same = same and all(map(np.array_equal, source, target))
        if not other.evicts:
            tier.delete(keys)
        other.forget()
    figures: dict[str, Any] = {"bytes_equal": same}
    for name, ours in zip(other.names, ("put", "get"), strict=True):
        theirs, (what, _, whom) = times[f"their {ours}"], name.partition("_vs_")
        figures[name] = ratio(times[ours], theirs)
        figures[f"{what}_gbps"] = count * size / median(times[ours]) / 1e9
        figures[f"{what}_{whom}_gbps"] = count * size / median(theirs) / 1e9
    return figures


def _store(tier: Tier, keys: Sequence[bytes], data: Sequence[Buffer]) -> None:
    kept = sum(tier.store(keys, [[one] for one in data]))
    if kept != len(keys):
        raise TierDown(f"the tier kept {kept} of {len(keys)} records")


def _load(tier: Tier, keys: Sequence[bytes], into: Sequence[Buffer]) -> None:
    found = sum(tier.load(keys, [[one] for one in into]))
    if found != len(keys):
        raise TierDown(f"the tier gave back {found} of {len(keys)} records")


# ---------------------------------------------------------------- where


@contextmanager
def own_folder(parent: Path, need: int) -> Iterator[Path]:
    """A new folder in ``parent``, gone afterwards. Raises ``ConfigError`` without ``need`` bytes of
    room."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvass-bench-", dir=parent) as made:
            disk = os.statvfs(made)
            free = disk.f_bavail * disk.f_frsize
            if free < need:
                raise ConfigError(
                    f"{parent}: {free / 2**30:.1f}GiB are free, and bench needs "
                    f"{need / 2**30:.1f}GiB for a while"
                )
            yield Path(made)
    except OSError as error:
        raise ConfigError(f"{parent}: {error.strerror or error}") from error


def most_bytes(sizes: Sizes) -> int:
    """What a tier and a raw file take together, at most."""
    return max(2 * _tier_bytes(size, count) for _, size, count in sizes) + (64 << 20)


def _tier_bytes(size: int, count: int) -> int:
    return places(count) * (size + 8192) + (1 << 20)


# ---------------------------------------------------------------- the raw disk


def places(count: int) -> int:
    """How many records a disk holds that is measured with ``count``: then the oldest leave."""
    return count + max(1, count // 4)


class RawFile:
    """A fallocated file, written and read past the page cache (``direct``: whether it can be) by
    ``threads`` threads. It has as many places as the tier under test."""

    names = ("disk_write_vs_raw", "disk_read_vs_raw")
    evicts = True

    def __init__(self, folder: Path, size: int, count: int, threads: int) -> None:
        self._size, self._places, self._first = size, places(count), 0
        self._pool = ThreadPoolExecutor(threads, "bench-raw")
        self._path = folder / "raw"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(self._path, flags, 0o600)
            self.direct = False
        os.posix_fallocate(self._fd, 0, self._places * size)

    def put(self, data: Sequence[Buffer]) -> None:
        """Write over the oldest."""
        self._first = (self._first + len(data)) % self._places
        self._each(os.pwritev, data)

    def get(self, into: Sequence[Buffer]) -> None:
        self._each(os.preadv, into)

    def forget(self) -> None:
        """The oldest are written over."""

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)
        self._path.unlink()

    def _each(self, move: Callable[[int, Sequence[Any], int], int], data: Sequence[Buffer]) -> None:
        def one(i: int) -> None:
            at = (self._first + i) % self._places * self._size
            assert move(self._fd, [data[i].data], at) == self._size, "a short read or write"

        list(self._pool.map(one, range(len(data))))
