"""``python -m bench --tier URL``: a tier behind a daemon; one on a server also against its library.

Law of this file: nothing of the user's is touched. A disk is measured in a new folder inside of the
one that is named, a server under a prefix of its own, and neither outlives the measuring.

What the names mean. Every one is there twice: for rows of 32 MiB (a chunk of Llama-8B; 8 MiB where
there is a server), and with ``_small`` for rows of 1 MiB. ``kvass bench --tier`` compares a disk
tier with a raw file.

- ``redis_put_vs_client``, ``redis_get_vs_client``: against ``set`` and ``get`` of redis-py, one
  value after the other; ``s3_...`` (``gcs_``, ``azure_``): against obstore's ``put`` and ``get``,
  from as many threads as the tier has connections; ``mooncake_put_vs_own``,
  ``mooncake_get_vs_own``: against ``put_from`` and ``get_into``, one object after the other.
  Those of redis and S3 end with bytes in the library's memory; the tier's are where they belong,
  verified.
- ``promote_16_rows_gbps``: from a lookup of 16 rows to its match, by a daemon that was restarted
  and has none of them in L1.
- ``lookup_p99_under_tier_load_us``: round trip of a lookup of 8,192 tokens (32 rows, all of them in
  L1), one a millisecond, while the same daemon flushes and promotes as fast as its tier can
  (``tier_load_store_gbps``, ``tier_load_load_gbps``); ``..._idle_us``: while it does nothing else.
- ``compress_gbps`` and the like: those of ``kvass bench``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from bench import counterparts, records
from bench.figures import add
from bench.flood import QUEUE_BYTES, Flood
from bench.pressure import measure_pressure
from bench.rows import Rows, flushed, wait_tier
from kvass._version import __version__
from kvass.cli.bench.coding import measure_coding
from kvass.cli.bench.disk import own_folder, spelled
from kvass.cli.bench.rig import (
    PATIENCE_S,
    WIDTH,
    fresh_name,
    say,
    shared_memory,
    start_daemon,
)
from kvass.errors import ConfigError, Unavailable
from kvass.tiers.base import Tier
from kvass.tiers.url import TierUrl, open_tier, parse_tier_url, redacted
from kvass.types import PAGE, Size


class Plan(msgspec.Struct, frozen=True):
    """How much of it."""

    sizes: records.Sizes
    tier_bytes: int
    """What a disk may take while a daemon is measured."""
    flood_bytes: int
    """What is stored while lookups are measured, at most."""
    queue_bytes: int = QUEUE_BYTES
    load_s: float = 8.0


DISK: Final = Plan((("", 32 << 20, 16), ("_small", 1 << 20, 256)), 2 << 30, 1 << 40)
SERVER: Final = Plan((("", 8 << 20, 16), ("_small", 1 << 20, 64)), 0, 1 << 30)
_SCHEMES: Final = ("disk", "redis", "s3", "gcs", "azure", "mooncake")


def measure_tier(text: str, l1_bytes: int, rounds: int, plan: Plan | None = None) -> dict[str, Any]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    url = parse_tier_url(text)
    if url.scheme not in _SCHEMES:
        raise ConfigError(f"tier {redacted(text)!r}: bench knows {', '.join(_SCHEMES)}")
    plan = plan or (DISK if url.scheme == "disk" else SERVER)
    figures: dict[str, Any] = {"version": __version__, "cores": os.cpu_count(), "rounds": rounds}
    figures["tier"] = redacted(text)
    figures |= measure_coding()
    if url.scheme == "disk":
        with own_folder(Path(url.where), plan.tier_bytes) as folder:
            (folder / "tier").mkdir()
            capacity = str(plan.tier_bytes)
            own = TierUrl("disk", str(folder / "tier"), url.options | {"capacity": capacity})
            _measure_daemons(figures, own, l1_bytes, plan)
    else:
        with own_prefix(url) as own:
            for suffix, size, count in plan.sizes:
                say(f"{count} records of {Size(size)}, {rounds} rounds")
                add(figures, _measure_server(own, size, count, rounds), suffix=suffix)
            _measure_daemons(figures, own, l1_bytes, plan)
    return figures


def _measure_server(url: TierUrl, size: int, count: int, rounds: int) -> dict[str, Any]:
    """The tier in this process, against its library."""
    with counterparts.library_trouble(url.scheme), ExitStack() as ending:
        memory = shared_memory(2 * count * size)
        ending.callback(memory.close)
        tier = _opened(url, ending)
        if (register := getattr(tier, "register_memory", None)) is not None:
            register(memory.buffer)
        other = counterparts.of(url, tier, memory.buffer)
        ending.callback(other.close)

        def after_round(keys: list[bytes]) -> None:
            tier.delete(keys)
            if isinstance(other, counterparts.MooncakeLoop):
                other.forget()

        figures = records.measure_records(tier, other, memory.buffer, size, rounds, after_round)
        tier.clear()
        return figures


# ---------------------------------------------------------------- behind a daemon


def _measure_daemons(figures: dict[str, Any], url: TierUrl, l1_bytes: int, plan: Plan) -> None:
    for suffix, size, count in plan.sizes:
        say(f"a daemon on that tier, {count} rows of {Size(size)}")
        add(figures, _measure_daemon(url, l1_bytes, size, count, plan), suffix=suffix)


def _measure_daemon(
    url: TierUrl, l1_bytes: int, size: int, count: int, plan: Plan
) -> dict[str, Any]:
    """The tier behind a daemon, which has rows of an earlier one there."""
    name = fresh_name()
    keys = [os.urandom(WIDTH) for _ in range(count)]
    flags = ("--tier", _text(url), "--keep-loaded", "no")
    with start_daemon(l1_bytes, *flags) as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, name, size, ending)
        rows.store(keys)
        wait_tier(rows.scheduler, flushed(count), "the flush")
    with start_daemon(l1_bytes, *flags) as daemon:
        with ExitStack() as ending:
            rows = Rows(daemon.socket, name, size, ending)
            figures = _measure_promotion(rows, keys)
        flood = Flood(daemon.socket, name, keys, size, plan.flood_bytes, plan.queue_bytes)
        return figures | measure_pressure(flood, plan.load_s)


def _measure_promotion(rows: Rows, keys: list[bytes]) -> dict[str, Any]:
    """Once: what was promoted is in L1 then. Asked until all is found, because a daemon that has
    just begun does not know its tier's epoch yet."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        began_s = time.perf_counter()
        matched = rows.find(keys)
        took_s = time.perf_counter() - began_s
        if matched.chunks == len(keys):
            break
        rows.release(matched)
        if time.monotonic() > deadline_s:
            raise Unavailable(f"the tier gives back {matched.chunks} of {len(keys)} rows")
        time.sleep(0.02)
    same = rows.holds(matched, keys)
    rows.release(matched)
    gbps = len(keys) * rows.row_bytes / took_s / 1e9
    return {f"promote_{len(keys)}_rows_gbps": gbps, "bytes_equal": same}


# ---------------------------------------------------------------- a server


@contextmanager
def own_prefix(url: TierUrl) -> Iterator[TierUrl]:
    """The same server, under a prefix with nothing in it; gone afterwards."""
    name = f"kvass-bench-{os.urandom(4).hex()}"
    if url.scheme in ("redis", "mooncake"):
        own = msgspec.structs.replace(url, options=url.options | {"prefix": f"{name}:"})
    else:
        where = url.where if "/" in url.where.removeprefix("//") else f"{url.where}/kvass"
        own = msgspec.structs.replace(url, where=f"{where.rstrip('/')}/{name}")
    with ExitStack() as ending:
        _opened(own, ending)
    try:
        yield own
    finally:
        _sweep(own)


def _sweep(url: TierUrl) -> None:
    """Remove what a server has under our prefix, notes too."""
    with counterparts.library_trouble(url.scheme), ExitStack() as ending:
        memory = shared_memory(PAGE)
        ending.callback(memory.close)
        tier = _opened(url, ending)
        counterparts.of(url, tier, memory.buffer).close()


def _opened(url: TierUrl, ending: ExitStack) -> Tier:
    """The tier, which answers. Raises ``TierDown``."""
    options = url.options | {"compress": "off"}  # records are random
    tier = open_tier(spelled(url.scheme, url.where, options))
    ending.callback(tier.close)
    tier.probe([b"bench"])
    return tier


def _text(url: TierUrl) -> str:
    return spelled(url.scheme, url.where, url.options)
