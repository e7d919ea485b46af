"""A tier in this process, against the same bytes without it: a raw file, or a server's library."""

from __future__ import annotations

import errno
import os
import shutil
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

from bench.figures import add
from kvass.cli.bench.rig import WIDTH, ratio, say, seconds, shared_memory
from kvass.errors import ConfigError, TierDown
from kvass.tiers.base import Buffer, Tier
from kvass.tiers.url import TierUrl, open_tier
from kvass.transfer.base import U8Array
from kvass.types import PAGE, Size

Sizes = Sequence[tuple[str, int, int]]
"""What ends the figures' names, bytes of a record, how many records."""
DISK: Final = (("", 32 << 20, 16), ("_small", 1 << 20, 256))
WARM_UP: Final = 3
"""Rounds after which a disk's places have all been written once, and are written over."""


class Counterpart(Protocol):
    """What a tier is compared with: a store of the last records that were put.

    ``names``: of the ratios of a put and a get, ``X_vs_Y``. ``get`` may leave ``into`` alone if the
    library itself says where.
    """

    names: tuple[str, str]

    def put(self, data: Sequence[Buffer]) -> None: ...

    def get(self, into: Sequence[Buffer]) -> None: ...


def measure_disk(url: TierUrl, folder: Path, rounds: int, sizes: Sizes) -> dict[str, Any]:
    """The figures of a tier with the options of ``url``, and of a raw file, in ``folder``."""
    figures: dict[str, Any] = {}
    for suffix, size, count in sizes:
        say(f"{count} records of {Size(size)}, {rounds} rounds")
        options = url.options | {"capacity": str(_tier_bytes(size, count))}
        (place := folder / f"records{suffix}").mkdir()
        with ExitStack() as ending:
            memory = shared_memory(2 * count * size)
            ending.callback(memory.close)
            tier = open_tier(spelled("disk", str(place), options))
            ending.callback(tier.close)
            raw = RawFile(folder / "raw", size, count, int(options.get("threads", "4")))
            ending.callback(raw.close)
            more = measure_records(tier, raw, memory.buffer, size, rounds)
            tier.clear()
        add(figures, more | {"direct_io": raw.direct}, suffix=suffix)
    return figures


def measure_records(
    tier: Tier,
    other: Counterpart,
    memory: U8Array,
    size: int,
    rounds: int,
    after_round: Callable[[list[bytes]], object] = len,
) -> dict[str, Any]:
    """The ratios of ``other.names``, and rates. ``memory``: of all records, twice.

    Both sides take turns in every round, the one that begins too; every record is of new bytes,
    under a key of its own; every byte loaded is compared. ``after_round`` gets the keys. Raises
    ``TierDown`` if the tier did not take all, or did not give it back.
    """
    source, target = memory.reshape(2, -1, size)
    words = source.reshape(-1).view(np.uint64)
    words[:] = np.random.default_rng(0).integers(0, 1 << 63, len(words), np.uint64)
    times: dict[str, list[float]] = {}
    same = True
    for number in range(rounds + WARM_UP):
        keys = [os.urandom(WIDTH) for _ in source]
        words[:: PAGE // 8] += np.uint64(1)  # other bytes in every page than last time
        steps: dict[str, Callable[[], object]] = {
            "put": partial(_move, tier.store, keys, source),
            "their put": partial(other.put, [*source]),
            "get": partial(_move, tier.load, keys, target),
            "their get": partial(other.get, [*target]),
        }
        turn = -1 if number % 2 else 1
        for name in (*["put", "their put"][::turn], *["get", "their get"][::turn]):
            if name == "get":
                target[:] = 0
            took_s = seconds(steps[name])
            if number >= WARM_UP:
                times.setdefault(name, []).append(took_s)
            if name == "get":
                same = same and np.array_equal(source, target)
        after_round(keys)
    figures: dict[str, Any] = {"bytes_equal": same}
    for name, ours in zip(other.names, ("put", "get"), strict=True):
        theirs, (what, _, whom) = times[f"their {ours}"], name.partition("_vs_")
        figures[name] = ratio(times[ours], theirs)
        figures[f"{what}_gbps"] = source.nbytes / median(times[ours]) / 1e9
        figures[f"{what}_{whom}_gbps"] = source.nbytes / median(theirs) / 1e9
    return figures


def _move(move: Callable[..., Sequence[bool]], keys: Sequence[bytes], records: U8Array) -> None:
    """Store or load all of them."""
    moved = sum(move(keys, [[record] for record in records]))
    if moved != len(keys):
        raise TierDown(f"the tier took or gave back {moved} of {len(keys)} records")


def spelled(scheme: str, where: str, options: Mapping[str, str]) -> str:
    """The URL of a tier."""
    values = (f"{name}={quote(value, safe='/:')}" for name, value in options.items())
    return f"{scheme}:{quote(where, safe='/:')}?{'&'.join(values)}"


@contextmanager
def own_folder(parent: Path, need: int) -> Iterator[Path]:
    """A new folder in ``parent``, gone afterwards. Raises ``ConfigError`` without ``need`` bytes of
    room."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvass-bench-", dir=parent) as made:
            if (free := shutil.disk_usage(made).free) < need:
                have, wanted = (f"{size / 2**30:.1f}GiB" for size in (free, need))
                raise ConfigError(f"{parent}: {have} are free, and bench needs {wanted}")
            yield Path(made)
    except OSError as error:
        raise ConfigError(f"{parent}: {error.strerror or error}") from error


def most_bytes(sizes: Sizes) -> int:
    """What a tier and a raw file take together, at most."""
    return max(2 * _tier_bytes(size, count) for _, size, count in sizes) + (64 << 20)


def _tier_bytes(size: int, count: int) -> int:
    """Room for a quarter more than one round stores: then the oldest leave."""
    return (count + max(1, count // 4)) * (size + 8192) + (1 << 20)


class RawFile:
    """A fallocated file of ``count`` records, written and read past the page cache (``direct``:
    whether it can be) by ``threads`` threads."""

    names = ("disk_write_vs_raw", "disk_read_vs_raw")

    def __init__(self, path: Path, size: int, count: int, threads: int) -> None:
        self._path, self._size = path, size
        self._pool = ThreadPoolExecutor(threads, "bench-raw")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.direct = True
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, count * size)

    def put(self, data: Sequence[Buffer]) -> None:
        """Write all of it over what is there."""
        self._each(os.pwritev, data)

    def get(self, into: Sequence[Buffer]) -> None:
        """Read it back."""
        self._each(os.preadv, into)

    def close(self) -> None:
        """Close, and remove it."""
        self._pool.shutdown()
        os.close(self._fd)
        self._path.unlink()

    def _each(self, move: Callable[[int, Sequence[Any], int], int], data: Sequence[Buffer]) -> None:
        def one(i: int) -> None:
            assert move(self._fd, [data[i].data], i * self._size) == self._size, "a short one"

        list(self._pool.map(one, range(len(data))))
