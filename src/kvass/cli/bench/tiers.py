"""``kvass bench --tier URL``: a tier, against what the same bytes take without one.

Law of this file: nothing of the user's is touched. A disk is measured in a new folder inside of the
one that is named, a server under a prefix of its own, and neither outlives the measuring.

What the names mean. Every one is there twice: for rows of 32 MiB (a chunk of Llama-8B; 8 MiB where
there is a server), and with ``_small`` for rows of 1 MiB.

- ``disk_write_vs_raw``, ``disk_read_vs_raw``: storing and loading 512 MiB in the tier, which is
  full and evicts, against writing and reading as much of a fallocated file beside it, past the page
  cache (``direct_io``), with as many threads. Medians of per-round ratios, as all of them.
- ``redis_put_vs_client``, ``redis_get_vs_client``: against ``set`` and ``get`` of redis-py, one
  value after the other; ``s3_...`` (``gcs_``, ``azure_``): against obstore's ``put`` and ``get``,
  from as many threads as the tier has connections; ``mooncake_put_vs_own``,
  ``mooncake_get_vs_own``: against ``put_from`` and ``get_into``, one object after the other.
  Theirs of redis and S3 end with bytes of the library's own, ours where they belong, proven.
- ``promote_16_rows_vs_raw_read``: from a lookup of 16 rows to its match, by a daemon that was
  restarted and has none of them in L1, against reading as much raw into the same memory. Servers
  have the rate only.
- ``lookup_p99_under_tier_load_us``: round trip of a lookup of 8,192 tokens (32 rows, all of them in
  L1), one a millisecond, while the same daemon flushes and promotes as fast as its tier can
  (``tier_load_store_gbps``, ``tier_load_load_gbps``); ``..._idle_us``: while it does nothing else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from kvass._version import __version__
from kvass.cli.bench import counterparts
from kvass.cli.bench.copies import WIDTH
from kvass.cli.bench.flood import QUEUE_BYTES, Flood
from kvass.cli.bench.machine import say, shared_memory, start_daemon
from kvass.cli.bench.pressure import measure_pressure
from kvass.cli.bench.promotion import find, measure_promotion
from kvass.cli.bench.records import measure_records
from kvass.cli.bench.rows import Rows, flushed, wait_tier
from kvass.errors import ConfigError
from kvass.tiers.base import Tier
from kvass.tiers.url import TierUrl, open_tier, parse_tier_url, shown
from kvass.types import PAGE, Size


class Sizes(msgspec.Struct, frozen=True):
    """How much of it."""

    row_bytes: int
    rows: int
    small_bytes: int
    small_rows: int
    tier_bytes: int
    """What a disk may take while a daemon is measured."""
    flood_bytes: int
    """What is stored while lookups are measured, at most."""
    queue_bytes: int = QUEUE_BYTES
    load_s: float = 8.0


DISK: Final = Sizes(32 << 20, 16, 1 << 20, 256, 2 << 30, 1 << 40)
SERVER: Final = Sizes(8 << 20, 16, 1 << 20, 64, 0, 1 << 30)
_SCHEMES: Final = ("disk", "redis", "s3", "gcs", "azure", "mooncake")
_SLACK: Final = 64 << 20


def measure_tier(
    text: str, l1_bytes: int, rounds: int, sizes: Sizes | None = None
) -> dict[str, Any]:
    """All figures, by the names in the package's docstring. Raises ``KvassError``."""
    url = parse_tier_url(text)
    if url.scheme not in _SCHEMES:
        raise ConfigError(f"tier {shown(text)!r}: bench knows {', '.join(_SCHEMES)}")
    sizes = sizes or (DISK if url.scheme == "disk" else SERVER)
    figures: dict[str, Any] = {"version": __version__, "cores": os.cpu_count(), "rounds": rounds}
    figures |= {"tier": shown(text), "row_bytes": sizes.row_bytes, "bytes_equal": True}
    with _of_our_own(url, sizes) as own:
        small = {"small_row_bytes": sizes.small_bytes}
        for size, count, suffix in _both(sizes):
            say(f"{count} records of {Size(size)}, {rounds} rounds")
            _add(figures, _records(own, size, count, rounds), suffix)
        for size, count, suffix in _both(sizes):
            say(f"a daemon on that tier, {count} rows of {Size(size)}")
            _add(figures, _daemon(own, l1_bytes, size, count, rounds, sizes), suffix)
    return figures | small


def _both(sizes: Sizes) -> list[tuple[int, int, str]]:
    return [(sizes.row_bytes, sizes.rows, ""), (sizes.small_bytes, sizes.small_rows, "_small")]


def _add(figures: dict[str, Any], more: dict[str, Any], suffix: str) -> None:
    same = figures["bytes_equal"] and more.pop("bytes_equal")
    figures |= {name + suffix: figure for name, figure in more.items()} | {"bytes_equal": same}


# ---------------------------------------------------------------- what is measured


def _records(url: TierUrl, size: int, count: int, rounds: int) -> dict[str, Any]:
    """The tier in this process."""
    if url.scheme == "disk":
        url = _with(url, capacity=str(counterparts.places(count) * (size + 8192) + (1 << 20)))
    memory = shared_memory(2 * count * size)
    with counterparts.library_trouble(url.scheme), ExitStack() as ending:
        ending.callback(memory.close)
        tier = _open(url, ending)
        if (register := getattr(tier, "register_memory", None)) is not None:
            register(memory.buffer)
        other = counterparts.of(url, tier, memory.buffer, size, count)
        ending.callback(other.close)
        figures = measure_records(tier, other, memory.buffer, size, count, rounds)
        if isinstance(other, counterparts.RawFile):
            figures["direct_io"] = other.direct
        tier.clear()
    return figures


def _daemon(
    url: TierUrl, l1_bytes: int, size: int, count: int, rounds: int, sizes: Sizes
) -> dict[str, Any]:
    """The tier behind a daemon, which has rows of an earlier life there."""
    name = f"bench-{os.getpid()}-{os.urandom(4).hex()}"
    keys = [os.urandom(WIDTH) for _ in range(count)]
    flags = ("--tier", _text(url), "--retain-promoted", "no")
    with start_daemon(None, l1_bytes, *flags) as daemon, ExitStack() as ending:
        daemon.wait_populated()
        rows = Rows(daemon.socket, name, size, ending)
        rows.store(keys)
        wait_tier(rows.scheduler, flushed(count), "the flush")
    with start_daemon(None, l1_bytes, *flags) as daemon:
        daemon.wait_populated()
        with ExitStack() as ending:
            rows = Rows(daemon.socket, name, size, ending)
            figures = _promotion(url, rows, keys, rounds)
        flood = Flood(daemon.socket, name, keys, size, sizes.flood_bytes, sizes.queue_bytes)
        figures |= measure_pressure(flood, sizes.load_s)
    return figures


def _promotion(url: TierUrl, rows: Rows, keys: list[bytes], rounds: int) -> dict[str, Any]:
    """Against a raw read, if there is a disk."""
    if url.scheme != "disk":
        took_s, matched = find(rows, keys)
        same = rows.holds(matched, keys)
        rows.release(matched)
        size = len(keys) * rows.row_bytes
        return {f"promote_{len(keys)}_rows_gbps": size / took_s / 1e9, "bytes_equal": same}
    threads = int(url.options.get("threads", "4"))
    raw = counterparts.RawFile(Path(url.where).parent, rows.row_bytes, len(keys), threads)
    try:
        raw.fill()
        return measure_promotion(rows, keys, raw.get, rounds)
    finally:
        raw.close()


# ---------------------------------------------------------------- where


@contextmanager
def _of_our_own(url: TierUrl, sizes: Sizes) -> Iterator[TierUrl]:
    """The same tier, with nothing in it; gone afterwards."""
    name = f"kvass-bench-{os.urandom(4).hex()}"
    if url.scheme == "disk":
        with _folder(Path(url.where), sizes) as folder:
            tier = folder / "tier"
            tier.mkdir()
            own = msgspec.structs.replace(url, where=str(tier))
            yield _with(own, capacity=str(sizes.tier_bytes))
        return
    if url.scheme in ("redis", "mooncake"):
        own = _with(url, prefix=f"{name}:")
    else:
        where = url.where if "/" in url.where.removeprefix("//") else f"{url.where}/kvass"
        own = msgspec.structs.replace(url, where=f"{where.rstrip('/')}/{name}")
    with ExitStack() as ending:
        _open(own, ending)
    try:
        yield own
    finally:
        _sweep(own)


def _open(url: TierUrl, ending: ExitStack) -> Tier:
    """The tier, which answers. Raises ``TierDown``."""
    tier = open_tier(_text(url))
    ending.callback(tier.close)
    tier.probe([b"bench"])
    return tier


def _sweep(url: TierUrl) -> None:
    """Remove what a server has under our prefix, notes too."""
    with counterparts.library_trouble(url.scheme), ExitStack() as ending:
        memory = shared_memory(PAGE)
        ending.callback(memory.close)
        tier = _open(url, ending)
        counterparts.of(url, tier, memory.buffer, PAGE, 1).close()


@contextmanager
def _folder(parent: Path, sizes: Sizes) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="kvass-bench-", dir=parent) as made:
            disk = os.statvfs(made)
            free = disk.f_bavail * disk.f_frsize
            need = sizes.tier_bytes + counterparts.places(sizes.rows) * sizes.row_bytes + _SLACK
            if free < need:
                raise ConfigError(
                    f"{parent}: {free / 2**30:.1f}GiB are free, and bench needs "
                    f"{need / 2**30:.1f}GiB for a while"
                )
            yield Path(made)
    except OSError as error:
        raise ConfigError(f"{parent}: {error.strerror or error}") from error


def _with(url: TierUrl, **options: str) -> TierUrl:
    return msgspec.structs.replace(url, options={**url.options, **options})


def _text(url: TierUrl) -> str:
    options = "&".join(f"{name}={quote(value, safe='/:')}" for name, value in url.options.items())
    return f"{url.scheme}:{url.where}" + (f"?{options}" if options else "")
